"""Warns of sequences longer than a model's trained positions, and refuses options that custom models do not support."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxpost.errors import refuse
from jaxpost.models import rope
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.stage.config import Config
  from jaxpost.stage.records import Source


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


def check(config: Config, algorithm: Algorithm, cfg: ModelConfig) -> None:
  """Refuses what a model of one's own cannot do; of others, warns if documents may be longer than their positions."""
  field, length = _longest_document(config, algorithm)
  if isinstance(cfg, CustomConfig):
    _check_custom(config, cfg)
  else:
    warn_beyond(f'config.{field}', length, cfg)


def warn_beyond(what: str, length: int, cfg: ModelConfig) -> None:
  """Warns if sequences of `length` tokens, which `what` limits, are longer than the model has positions."""
  positions = longest(cfg)
  if length > positions:
    logging.warning(
      '%s: %d tokens are more than the %d positions of the model (max_position_embeddings); tokens beyond them '
      'have positions that it has not learned: lower it, or add a RoPE scaling to the config.json of the model',
      what,
      length,
      positions,
    )


def _longest_document(config: Config, algorithm: Algorithm) -> tuple[str, int]:
  """Returns (the fields of the config that limit a document, its largest number of tokens)."""
  if algorithm.on_policy:  # a row may hold several completions, each after its prompt
    rollout = config.rollout
    return 'rollout: max_prompt_length + max_new_tokens', rollout.max_prompt_length + rollout.max_new_tokens
  return 'train.row_length', row_length(config, False)


def with_readable_pairs(config: Config, algorithm: Algorithm, role_sources: Mapping[str, Source]) -> Config:
  """Returns the config with `preference.share_prompt` off, and warns, where a model cannot read two answers so."""
  _, length = _longest_document(config, algorithm)
  for role, source in role_sources.items():
    cfg = source.config
    if isinstance(cfg, CustomConfig) or cfg.state_shapes or 0 < rope.by_length(cfg) < length:
      logging.warning(
        'config.preference.share_prompt: is taken as False, because the %s is a model of your own, has layers with a '
        'recurrent state, or rotates a prompt by the length of its answer (RoPE scaling)',
        role,
      )
      config = dataclasses.replace(config, preference=dataclasses.replace(config.preference, share_prompt=False))
      algorithm.check(config)
      break
  return config


def _check_custom(config: Config, cfg: CustomConfig) -> None:
  """Raises InputError for options that need more than the interface of a custom model."""
  unsupported = {  # 'field=value that turns it off': whether it is on
    'lora.rank=0': config.lora.rank,
    'train.share_prompt=False': config.train.share_prompt,
    'nll.neftune_alpha=0': config.nll.neftune_alpha,
    'nll.mtp_weight=0': config.nll.mtp_weight,
    'rollout.page_size=0': config.rollout.page_size,
    'rollout.share_base=False': config.rollout.share_base,
  }
  for fix, is_on in unsupported.items():
    refuse(
      bool(is_on),
      f'config.{fix.partition("=")[0]}: the custom model {cfg.code} is called with parameters, tokens, positions and '
      f'segments only, and samples from a copy of its weights; set config.{fix}',
    )
