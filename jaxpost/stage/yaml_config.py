"""Configs in YAML, which `jaxpost.load_config` and `--config=my.yaml` read.

The file holds the nested fields of docs/config.md; missing fields have their defaults. A value is read as the type of
its field, so `run_name: 12e5` and `run_name: on` need no quotes. docs/config_schema.json is its schema for editors:

    # yaml-language-server: $schema=docs/config_schema.json
    algorithm: sft
    model: {path: Qwen/Qwen3-0.6B}
    data: {path: train.jsonl}
    train: {epochs: 3, batch_size: 32}
"""

import os
import re
from typing import Any

import yaml

from jaxpost.errors import InputError, refuse
from jaxpost.stage import field_names
from jaxpost.stage.config import defaults, merge
from jaxpost.stage.schema import Config

_TAG = 'tag:yaml.org,2002:'
_NUMBERS = {
  'int': re.compile(r'[-+]?(0|[1-9][0-9_]*|0b[01]+|0o[0-7]+|0x[0-9a-fA-F]+)$'),
  'float': re.compile(
    r'[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$'
    r'|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$'
  ),
}


class _Loader(yaml.SafeLoader):
  """Reads YAML 1.1 with the numbers of YAML 1.2, without dates, and refuses repeated keys in a block.

  1e-5 is a number and 0o17 an octal one; 017, 12:30 and 2026-01-31 are text.
  """

  def compose_mapping_node(self, anchor):
    node, lines = super().compose_mapping_node(anchor), {}  # before << merges another block
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
      line, first = key.start_mark.line + 1, lines.get(str(key.value))
      refuse(bool(first), f'--config: {self.name}:{line}: {key.value} is also in line {first}; keep one of them')
      lines[str(key.value)] = line
    return node


_NOT_READ = {_TAG + name for name in (*_NUMBERS, 'timestamp')}
_Loader.yaml_implicit_resolvers = {
  first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_READ]
  for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
  _Loader.add_implicit_resolver(_TAG + _name, _pattern, list('+-.0123456789'))


def load_config(path: str | os.PathLike) -> dict:
  """Returns the config of a YAML file, or of the config.json of a run, as nested dicts of all fields."""
  try:
    with open(path, encoding='utf-8') as file:
      loader = _Loader(file)
      node = loader.get_single_node()
      fields = node and loader.construct_document(_typed(node, ()))
  except OSError as error:
    raise InputError(f'--config: {path}: {error.strerror}') from None
  except yaml.YAMLError as error:
    raise InputError(f'--config: {" ".join(str(error).split())}') from None
  refuse(not isinstance(fields, dict), f'--config: {path}: holds no fields; write `algorithm: sft`, and so on')
  return merge(defaults(), _plain(fields))


def _typed(node: yaml.Node, path: tuple[str, ...]) -> yaml.Node:
  """Returns the node with unquoted values of text fields, and all names of fields, as text."""
  if isinstance(node, yaml.MappingNode):
    pairs = []
    for key, value in node.value:
      if key.tag == _TAG + 'merge':
        blocks = value.value if isinstance(value, yaml.SequenceNode) else [value]
        merged = [_typed(block, path) for block in blocks]
        pairs.append((key, yaml.SequenceNode(_TAG + 'seq', merged, value.start_mark, value.end_mark)))
      else:
        name = (key.value,) if isinstance(key, yaml.ScalarNode) else ()
        pairs.append((_as_text(key) if name else key, _typed(value, path + name)))
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)
  if isinstance(node, yaml.SequenceNode):
    items = [_typed(item, path) for item in node.value]
    return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
  return _as_text(node) if path and _is_text(path) and node.tag != _TAG + 'null' else node


def _as_text(node: yaml.ScalarNode) -> yaml.ScalarNode:
  return yaml.ScalarNode(_TAG + 'str', node.value, node.start_mark, node.end_mark)


def _is_text(path: tuple[str, ...]) -> bool:
  """Returns whether a field of the config or of a stage's block holds one or several texts."""
  *names, last = path if path[0] in field_names.FIELDS else path[1:] or ('',)
  section = '.'.join(names)
  kind = field_names.FIELDS.get('.'.join([*names, last]))
  if kind is tuple:
    fields = (field_names.FIELDS[section] if section else Config).__dataclass_fields__
    kind = fields[last].metadata['each']
  return kind in (str, Any)


def _plain(value):
  """Returns the value with keys of blocks as text, and lists as tuples."""
  if isinstance(value, dict):
    return {str(key): _plain(inner) for key, inner in value.items()}
  return tuple(_plain(inner) for inner in value) if isinstance(value, list) else value
