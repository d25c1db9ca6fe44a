"""The shape of the batches of a stage, from its config and the number of batch shards."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.stage.config import Config


@dataclasses.dataclass(frozen=True)
class BatchShape:
  """The shape of a step's batches, fixed for the run. Numbers of rows are multiples of `micro_rows`.

  rows: rows of a step.
  update_rows: rows of one update: those of a minibatch if on-policy, otherwise `rows`.
  micro_rows: rows of a micro-batch, over all devices.
  filled: rows of a step that completions of full length fill; less than `rows` only if they share prompts.
  """

  rows: int
  update_rows: int
  micro_rows: int
  row_length: int
  filled: int


def slots(config: Config, on_policy: bool) -> int:
  """Returns how many sequences are sampled at a time: `config.rollout.slots`, or all of them up to 512."""
  r, held_out = config.rollout, config.eval
  return r.slots or min(r.prompts * r.group_size if on_policy else held_out.size * held_out.samples, 512)


def row_length(config: Config, on_policy: bool) -> int:
  """Returns the tokens of a row: `config.train.row_length` or, if it is 0, a prompt with a completion or 512."""
  if config.train.row_length:
    return config.train.row_length
  if config.train.share_prompt:
    from jaxpost.rl import shared_prompts

    return shared_prompts.row_length(config.rollout)
  return config.rollout.max_prompt_length + config.rollout.max_new_tokens if on_policy else 512


def batch_shape(config: Config, on_policy: bool, shards: int, tokens: int = 16_384) -> BatchShape:
  """Returns the shape of batches that split over `shards` batch shards.

  Args:
    on_policy: rows hold completions; otherwise documents.
    tokens: limit of a micro-batch per shard if on-policy and `train.micro_batch_size` is 0; the default is for
      accelerators.

  Raises:
    InputError: the rows of a micro-batch do not split evenly over the shards.
  """
  length = row_length(config, on_policy)
  rows = update_rows = filled = config.train.batch_size
  micro_rows = config.train.micro_batch_size
  if on_policy:
    r = config.rollout
    sequences_per_row = max(1, length // (r.max_prompt_length + r.max_new_tokens))  # if all have the full length
    completions = r.prompts * r.group_size
    rows = filled = math.ceil(completions / sequences_per_row)  # before padding to whole micro-batches
    update_rows = math.ceil(completions // config.rl.minibatches / sequences_per_row)
    if config.train.share_prompt:
      from jaxpost.rl import shared_prompts

      filled = min(rows, shared_prompts.filled_rows(r, length))
    if not micro_rows:
      # Split a shard's rows into as few equal micro-batches as `tokens` allows: a partial one costs as much as a full.
      shard_rows = math.ceil(update_rows / shards)
      micro_batches = min(shard_rows, math.ceil(shard_rows * length / tokens))
      micro_rows = shards * math.ceil(shard_rows / micro_batches)
  micro_rows = micro_rows or rows
  if micro_rows % shards:
    raise InputError(
      f'config.train: the {micro_rows} rows of a micro-batch do not split over {shards} '
      f'batch shards of config.mesh.train; use a multiple of {shards}'
    )

  def padded(n: int) -> int:
    return math.ceil(n / micro_rows) * micro_rows

  return BatchShape(padded(rows), padded(update_rows), micro_rows, length, padded(filled))
