"""Named model configs, for `config.model.preset`: models without a folder of weights; presets.toml has their shapes."""

import functools
import itertools
import pathlib
import tomllib
from typing import Any

from jaxpost.models.config import Experts, ModelConfig, Rope

_TABLES = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))


def _config(record: type[ModelConfig], fields: dict[str, Any]) -> ModelConfig:
  """Returns the config that these fields of presets.toml describe."""
  layers = fields['sizes'][3]
  given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
  for name in fields.keys() & {'layer_ropes', 'layer_windows', 'mixers'}:
    given[name] = tuple(itertools.islice(itertools.cycle(fields[name]), layers))
  given['ropes'] = tuple(Rope(**rope | {'scaling': tuple(rope.get('scaling', {}).items())}) for rope in given['ropes'])
  if 'experts' in given:
    given['experts'] = Experts(**given['experts'])
  return record(given.pop('family'), *given.pop('sizes'), **given)


@functools.cache
def _configs(record: type[ModelConfig]) -> dict[str, ModelConfig]:
  """Returns the configs of this class, by name."""
  found: dict[str, ModelConfig] = {}
  for table in _TABLES.values():
    if table.get('record', 'ModelConfig') == record.__name__:
      shared = {name: value for name, value in table.items() if name not in ('record', 'shapes')}
      found |= {name: _config(record, shared | shape) for name, shape in table['shapes'].items()}
  return found


PRESETS = _configs(ModelConfig)


def every() -> dict[str, ModelConfig]:
  """Returns `PRESETS` and those with other layers than a Llama's, whose classes are imported now."""
  from jaxpost.models.attention_configs import MixedConfig
  from jaxpost.models.hybrid_config import HybridConfig

  return PRESETS | _configs(HybridConfig) | _configs(MixedConfig)
