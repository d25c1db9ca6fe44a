"""Refuses, before data is read, what a model of your own (`models/custom.py`) lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.models.config import CustomConfig
  from jaxpost.stage.config import Config


def check(config: Config, algorithm: Algorithm, cfg: CustomConfig) -> None:
  """Raises InputError for options that need more than such a model has."""
  branches = algorithm.per in ('pair', 'label') or algorithm.pack is not None
  asked = {
    'preference.share_prompt=False': branches and config.preference.share_prompt,
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
