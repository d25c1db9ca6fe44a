"""Makes the JSON schema of a config, docs/config_schema.json, for editors of YAML and JSON configs."""

import dataclasses
import typing
from typing import Any

from jaxpost.stage.schema import Config

_TYPES = {str: 'string', bool: 'boolean', int: 'integer', float: 'number', dict: 'object', tuple: 'array'}


def schema() -> dict[str, Any]:
  """Returns the JSON schema (draft 2020-12) of a config file."""
  config = _section(Config)
  # Any other key is the name of a stage, whose block has the fields of a config.
  config['additionalProperties'] = {'$ref': '#/$defs/stage'}
  return {
    '$schema': 'https://json-schema.org/draft/2020-12/schema',
    'title': 'jaxpost config',
    **config,
    '$defs': {'stage': _section(Config)},
  }


def _section(kind: type) -> dict[str, Any]:
  hints = typing.get_type_hints(kind)
  properties = {f.name: _field(f, hints[f.name]) for f in dataclasses.fields(kind)}
  return {'type': 'object', 'properties': properties, 'additionalProperties': False}


def _field(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
  if dataclasses.is_dataclass(hint):
    return _section(typing.cast(type, hint))
  meta = field.metadata
  out = {'description': meta['help']} if meta else {}
  if hint in _TYPES:
    out['type'] = _TYPES[hint]
  if field.default is not dataclasses.MISSING:
    out['default'] = list(field.default) if isinstance(field.default, tuple) else field.default
  if meta and hint is tuple and meta['each']:
    out['items'] = {'type': _TYPES[meta['each']]}
  limits = {'minimum': meta['lo'], 'maximum': meta['hi']} if meta and hint is not tuple else {}
  out |= {name: limit for name, limit in limits.items() if limit is not None}
  if meta and meta['choices']:
    choices = {'enum': list(meta['choices'])}
    out |= {'items': choices} if hint is tuple else choices
  return out
