"""Warns of sequences longer than a model's trained positions, and refuses options that custom models do not support."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jaxpost.errors import InputError, refuse
from jaxpost.models import rope
from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.models.config import CustomConfig, ModelConfig
  from jaxpost.stage.config import Config


def longest(cfg: ModelConfig) -> int:
  """Returns the tokens of the longest sequence that the model supports, with its RoPE scaling."""
  length = cfg.max_position
  for table in cfg.ropes:
    scaling = dict(table.scaling)
    # For yarn, max_position_embeddings may be the length before scaling; for llama3 and longrope it is the one after.
    if scaling.get('rope_type') in ('linear', 'dynamic', 'yarn'):
      original = scaling.get('original_max_position_embeddings', cfg.max_position)
      length = max(length, int(scaling.get('factor', 1) * original))
  return length


def check_lengths(config: Config, algorithm: Algorithm, cfg: ModelConfig) -> None:
  """Warns if documents, or prompts with their completions, may be longer than the model has positions for.

  Raises:
    InputError: answers would share a prompt that their lengths rotate in different ways.
  """
  field, length = 'train.row_length', row_length(config, algorithm.on_policy)
  limit = rope.by_length(cfg)
  if algorithm.on_policy:  # a row may hold several completions, each after its prompt
    field = 'rollout: max_prompt_length + max_new_tokens'
    length = config.rollout.max_prompt_length + config.rollout.max_new_tokens
  refuse(
    algorithm.mean_per(config) in ('pair', 'label') and config.preference.share_prompt and 0 < limit < length,
    'config.preference.share_prompt: the RoPE scaling of this model rotates a prompt by the length of its answer '
    f'beyond {limit} tokens, so that two answers cannot share it; set it to False, or train.row_length to {limit}',
  )
  if length > (positions := longest(cfg)):
    logging.warning(
      'config.%s: %d tokens are more than the %d positions of the model (max_position_embeddings); tokens beyond them '
      'have positions that it has not learned: lower it, or add a RoPE scaling to the config.json of the model',
      field,
      length,
      positions,
    )


def check_custom(config: Config, algorithm: Algorithm, cfg: CustomConfig) -> None:
  """Raises InputError for options that need more than the interface of a custom model."""
  branches = algorithm.per in ('pair', 'label') or algorithm.pack is not None
  unsupported = {  # 'field=value that turns it off': whether it is on
    'preference.share_prompt=False': branches and config.preference.share_prompt,
    'train.share_prompt=False': config.train.share_prompt,
    'nll.neftune_alpha=0': config.nll.neftune_alpha,
    'nll.mtp_weight=0': config.nll.mtp_weight,
    'rollout.page_size=0': config.rollout.page_size,
    'rollout.share_base=False': config.rollout.share_base,
  }
  for fix, is_on in unsupported.items():
    if is_on:
      raise InputError(
        f'config.{fix.partition("=")[0]}: the custom model {cfg.code} is called with parameters, tokens, positions '
        f'and segments only, and samples from a copy of its weights; set config.{fix}'
      )
