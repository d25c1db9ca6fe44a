"""Says where a run may reach positions that the model has not learned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.stage.config import Config

_ORIGINAL = 'original_max_position_embeddings'


def longest(cfg: ModelConfig) -> int:
  """Returns the tokens of a sequence that the model's positions are made for, its RoPE scaling counted."""
  most = cfg.max_position
  for rope in cfg.ropes:
    scaling = dict(rope.scaling)
    # Configs of yarn keep the length before scaling in max_position_embeddings; those of llama3 and longrope do not.
    if scaling.get('rope_type') in ('linear', 'dynamic', 'yarn'):
      most = max(most, int(scaling.get('factor', 1) * scaling.get(_ORIGINAL, cfg.max_position)))
  return most


def warn(cfg: ModelConfig, config: Config, on_policy: bool) -> None:
  """Warns if documents, or prompts with their completions, may be longer than the model has positions for."""
  field, length = 'train.row_length', row_length(config, on_policy)
  if on_policy:  # a row may hold several completions, each after its prompt
    field = 'rollout: max_prompt_length + max_new_tokens'
    length = config.rollout.max_prompt_length + config.rollout.max_new_tokens
  if length > (most := longest(cfg)):
    logging.warning(
      'config.%s: %d tokens are more than the %d positions of the model (max_position_embeddings); what is longer '
      'trains positions that it has not learned: lower it, or give the config.json of the model a RoPE scaling',
      field,
      length,
      most,
    )
