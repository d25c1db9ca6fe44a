"""Configs in YAML: `--config=my.yaml` is read by this config file, as `--config=yaml_config.py:my.yaml`.

The file holds nested fields as docs/config.md lists them; those it leaves out have their
defaults. docs/config_schema.json is its schema for editors:

    # yaml-language-server: $schema=docs/config_schema.json
    algorithm: sft
    model: {path: Qwen/Qwen3-0.6B}
    data: {path: train.jsonl}
    train: {epochs: 3, batch_size: 32}
"""

import re

import ml_collections
import yaml

from jaxpost import defaults
from jaxpost.errors import InputError, refuse
from jaxpost.stage.config import merge


class _Loader(yaml.SafeLoader):
  """Reads YAML 1.1, with 1e-5 as a number, and refuses a key that stands twice in a block."""

  def compose_mapping_node(self, anchor):
    node, lines = super().compose_mapping_node(anchor), {}  # before << adds the keys of another block
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
      line, first = key.start_mark.line + 1, lines.get(str(key.value))
      refuse(bool(first), f'--config: {self.name}:{line}: {key.value} stands in line {first}, too; keep one of them')
      lines[str(key.value)] = line
    return node


# YAML 1.1 takes a number without a point or a sign of the exponent for text.
_Loader.add_implicit_resolver(
  'tag:yaml.org,2002:float', re.compile(r'[-+]?([0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+$'), list('+-.0123456789')
)


def get_config(path):
  """Returns the config in a YAML file."""
  try:
    with open(path, encoding='utf-8') as file:
      given = yaml.load(file, _Loader)
  except OSError as error:
    raise InputError(f'--config: {path}: {error.strerror}') from None
  except yaml.YAMLError as error:
    raise InputError(f'--config: {" ".join(str(error).split())}') from None
  if not isinstance(given, dict):
    raise InputError(f'--config: {path}: holds no fields; write `algorithm: sft`, and so on')
  return ml_collections.ConfigDict(merge(defaults(), _plain(given)))


def _plain(value):
  """The value with the keys of its blocks as text, and its lists as tuples."""
  if isinstance(value, dict):
    return {str(key): _plain(inner) for key, inner in value.items()}
  return tuple(_plain(inner) for inner in value) if isinstance(value, list) else value
