"""Maps names of models, data sets and matrices of other libraries, or leaves out those that are unknown here."""

from __future__ import annotations

import re
from typing import Any

from jaxpost.tools.converted_value import Setting, named

_PROJECTION = re.compile(r'\.\*(?:q|k|v|o|gate|up|down)_proj')


def known_here(library: str, setting: Setting, given: dict[str, Any]) -> Setting:
  """Leaves out names that are not of the hub or our matrices; maps Tunix's patterns of projections to ours."""
  name = setting.name.rpartition('.')[2]
  if name == 'model_id' and setting.fields and '/' not in str(setting.value):
    reason = f'is no name of the hub; {setting.fields[0]} is a Hugging Face folder or ORG/NAME of the hub'
    return setting.unmapped(reason)
  if name == 'dataset_name' and setting.fields and library in ('tunix', 'maxtext'):
    return _data_set(setting, given)
  if name in ('module_path', 'lora_module_path') and setting.fields:
    return _matrices(setting)
  return setting


def _data_set(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps a name with an owner, which names of TFDS lack, unless the file says that TFDS reads it."""
  name = str(setting.value).removeprefix('huggingface:')
  if '/' in name and 'tfds' not in (named(given, 'data_source'), named(given, 'dataset_type')):
    return Setting(setting.name, name, setting.fields)
  reason = f'names a data set of TFDS; {setting.fields[0]} is a file, a folder or a name of the hub'
  return setting.unmapped(reason)


def _matrices(setting: Setting) -> Setting:
  """Maps a pattern such as .*q_proj|.*v_proj; names of einsums and of MaxText's modules differ from ours."""
  names = str(setting.value).split('|')
  if all(_PROJECTION.fullmatch(name) for name in names):
    return Setting(setting.name, '|'.join(name.removeprefix('.*') for name in names), setting.fields)
  reason = 'has names of matrices that are others here; lora.targets is a pattern such as q_proj|v_proj'
  return setting.unmapped(reason)
