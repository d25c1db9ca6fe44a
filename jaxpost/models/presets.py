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
  num_layers = fields['sizes'][3]
  values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
  for name in fields.keys() & {'layer_ropes', 'layer_windows', 'mixers'}:  # one period of layers, which is repeated
    values[name] = tuple(itertools.islice(itertools.cycle(fields[name]), num_layers))
  ropes = [rope | {'scaling': tuple(rope.get('scaling', {}).items())} for rope in fields['ropes']]
  values['ropes'] = tuple(Rope(**rope) for rope in ropes)
  if 'experts' in values:
    values['experts'] = Experts(**values['experts'])
  return record(values.pop('family'), *values.pop('sizes'), **values)


@functools.cache
def _configs(record: type[ModelConfig]) -> dict[str, ModelConfig]:
  """Returns the configs of this class, by name."""
  configs: dict[str, ModelConfig] = {}
  for table in _TABLES.values():
    if table.get('record', 'ModelConfig') == record.__name__:
      shared = {name: value for name, value in table.items() if name not in ('record', 'shapes')}
      configs |= {name: _config(record, shared | shape) for name, shape in table['shapes'].items()}
  return configs


PRESETS = _configs(ModelConfig)


def every() -> dict[str, ModelConfig]:
  """Returns `PRESETS` and the presets with other layers than Llama's, whose config classes are only imported here."""
  from jaxpost.models.decoder_configs import HybridConfig, MixedConfig

  return PRESETS | _configs(HybridConfig) | _configs(MixedConfig)
