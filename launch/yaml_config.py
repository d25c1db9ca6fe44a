"""Configs in YAML: `--config=my.yaml` is read by this config file, as `--config=yaml_config.py:my.yaml`.

The file holds nested fields as docs/config.md lists them; those it leaves out have their
defaults. docs/config_schema.json is its schema for editors:

    # yaml-language-server: $schema=docs/config_schema.json
    algorithm: sft
    model: {path: Qwen/Qwen3-0.6B}
    data: {path: train.jsonl}
    train: {epochs: 3, batch_size: 32}
"""

import ml_collections
import yaml

from jaxpost import defaults
from jaxpost.errors import InputError
from jaxpost.stage.config import merge


def get_config(path):
  """Returns the config in a YAML file."""
  try:
    with open(path, encoding='utf-8') as file:
      given = yaml.safe_load(file)
  except OSError as error:
    raise InputError(f'--config: {path}: {error.strerror}') from None
  except yaml.YAMLError as error:
    raise InputError(f'--config: {" ".join(str(error).split())}') from None
  if not isinstance(given, dict):
    raise InputError(f'--config: {path}: holds no fields; write `algorithm: sft`, and so on')
  return ml_collections.ConfigDict(merge(defaults(), _floats(given)))


def _floats(value):
  """Numbers such as 1e-5, which YAML 1.1 takes for text, as numbers; lists as tuples."""
  if isinstance(value, dict):
    return {str(key): _floats(inner) for key, inner in value.items()}
  if isinstance(value, list):
    return tuple(_floats(inner) for inner in value)
  if isinstance(value, str) and value[:1] in '+-.0123456789' and 'e' in value.lower():
    try:
      return float(value)
    except ValueError:
      return value
  return value
