"""What models lack: positions that a run may reach and they have not learned, and what one of your own cannot do."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxpost.errors import InputError
from jaxpost.models import rope
from jaxpost.models.config import CustomConfig
from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.models.config import ModelConfig
  from jaxpost.stage.config import Config
  from jaxpost.stage.records import Source


def longest(cfg: ModelConfig) -> int:
  """Returns the tokens of a sequence that the model's positions are made for, its RoPE scaling counted."""
  most = cfg.max_position
  for table in cfg.ropes:
    scaling = dict(table.scaling)
    # Configs of yarn keep the length before scaling in max_position_embeddings; those of llama3 and longrope do not.
    if scaling.get('rope_type') in ('linear', 'dynamic', 'yarn'):
      original = scaling.get('original_max_position_embeddings', cfg.max_position)
      most = max(most, int(scaling.get('factor', 1) * original))
  return most


def check(config: Config, algorithm: Algorithm, cfg: ModelConfig) -> None:
  """Refuses what a model of one's own cannot do; of others, warns if documents may be longer than their positions."""
  field, length = _longest_document(config, algorithm)
  if isinstance(cfg, CustomConfig):
    _check_custom(config, cfg)
  elif length > (most := longest(cfg)):
    logging.warning(
      'config.%s: %d tokens are more than the %d positions of the model (max_position_embeddings); what is longer '
      'trains positions that it has not learned: lower it, or give the config.json of the model a RoPE scaling',
      field,
      length,
      most,
    )


def _longest_document(config: Config, algorithm: Algorithm) -> tuple[str, int]:
  """Returns the tokens that a document may have, and the fields of the config that say so."""
  if algorithm.on_policy:  # a row may hold several completions, each after its prompt
    rollout = config.rollout
    return 'rollout: max_prompt_length + max_new_tokens', rollout.max_prompt_length + rollout.max_new_tokens
  return 'train.row_length', row_length(config, False)


def with_readable_pairs(config: Config, algorithm: Algorithm, found: Mapping[str, Source]) -> Config:
  """Returns the config with `preference.share_prompt` off, and warns, where a model cannot read two answers so."""
  _, length = _longest_document(config, algorithm)
  for role, source in found.items():
    cfg = source.config
    if isinstance(cfg, CustomConfig) or cfg.state_shapes or 0 < rope.by_length(cfg) < length:
      logging.warning(
        'config.preference.share_prompt: is taken as False, because the %s is a model of your own, has layers with a '
        'recurrent state, or rotates a prompt by the length of its answer (RoPE scaling)',
        role,
      )
      preference = dataclasses.replace(config.preference, share_prompt=False)
      config = dataclasses.replace(config, preference=preference)
      algorithm.check(config)
      break
  return config


def _check_custom(config: Config, cfg: CustomConfig) -> None:
  """Raises InputError for options that need more than such a model has."""
  asked = {
    'train.share_prompt=False': config.train.share_prompt,
    'nll.neftune_alpha=0': config.nll.neftune_alpha,
    'nll.mtp_weight=0': config.nll.mtp_weight,
    'rollout.page_size=0': config.rollout.page_size,
    'rollout.share_base=False': config.rollout.share_base,
  }
  for fix, wrong in asked.items():
    if wrong:
      raise InputError(
        f'config.{fix.partition("=")[0]}: {cfg.code}, a model of your own, '
        f'is called with parameters, tokens, positions and segments only, and samples from a copy; set config.{fix}'
      )
