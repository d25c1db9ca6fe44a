"""Configuration records of models in checkpoints."""

from typing import Any

from jaxpost.models.attention_configs import ChunkedConfig, LatentConfig, MixedConfig
from jaxpost.models.config import CustomConfig, Experts, ModelConfig, Rope
from jaxpost.models.hybrid_config import HybridConfig


def from_json(fields: dict) -> ModelConfig | CustomConfig:
  """Restores a config from its `dataclasses.asdict` after a JSON round trip."""
  fields = {k: _tuples(v) for k, v in fields.items()}
  if fields.pop('value_head', False):  # a field in checkpoints until November 2026
    fields['more_heads'] = ('value',)
  if 'code' in fields:
    return CustomConfig(**fields)
  experts = fields.get('experts')
  kinds = {'mixers': HybridConfig, 'kv_rank': LatentConfig, 'full_head_dim': MixedConfig, 'sparse': ChunkedConfig}
  kind = next((kind for field, kind in kinds.items() if field in fields), ModelConfig)
  return kind(
    **fields | {'ropes': tuple(Rope(**rope) for rope in fields['ropes']), 'experts': experts and Experts(**experts)}
  )


def _tuples(value: Any) -> Any:
  """Turns the lists of JSON back into tuples."""
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
