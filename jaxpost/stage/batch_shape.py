"""TODO."""

import math

from jaxpost.errors import InputError


def row_length(config, on_policy: bool) -> int:
  if config.train.row_length:
    return config.train.row_length
  if on_policy:
    return config.rollout.max_prompt_length + config.rollout.max_new_tokens
  return 512


def batch_shape(config, on_policy: bool, shards: int, whole=True, tokens=8192):
  """(rows of a step, rows at a time, tokens a row), fixed for the run.

  whole: all sequences of a step, not of one minibatch. tokens: of a device at
  a time, on-policy, if `train.micro_batch_size` is 0.
  """
  length = row_length(config, on_policy)
  rows, micro = config.train.batch_size, config.train.micro_batch_size
  if on_policy:
    r = config.rollout
    a_row = max(1, length // (r.max_prompt_length + r.max_new_tokens))
    count = r.prompts * r.group_size
    part = math.ceil(count // config.rl.minibatches / a_row)
    own = math.ceil(part / shards)  # in equal parts: empty ones are skipped
    micro = micro or shards * math.ceil(own / min(own, math.ceil(own * length / tokens)))
    rows = math.ceil(count / a_row) if whole else part
  micro = micro or rows
  if micro % shards:
    raise InputError(
      f'config.train: {micro} rows at a time do not split over {shards} '
      f'batch shards of config.mesh.train; use a multiple of {shards}'
    )
  return math.ceil(rows / micro) * micro, micro, length
