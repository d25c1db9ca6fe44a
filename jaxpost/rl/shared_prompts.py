"""Rows in which several completions share one copy of their prompt (`config.train.share_prompt`).

A group of G completions of C tokens after a prompt of P tokens takes P - 1 + G (C + 1) tokens rather than G (P + C):
the last token of the prompt, which predicts the first one of a completion, is repeated in each branch. `types.Batch`
explains branches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxpost.errors import refuse
from jaxpost.models.config import CustomConfig

if TYPE_CHECKING:
  import numpy as np

  from jaxpost.algorithms.base import Algorithm

_LONG = 8192  # limit of the tokens of a row, unless a prompt and 4 completions need more


def check(config: Any, algorithm: Algorithm, sources: Mapping[str, Any]) -> None:
  """Raises InputError where rows cannot share prompts; `sources` has the `Source` of each role."""
  name = 'config.train.share_prompt'
  refuse(not algorithm.on_policy, f'{name}: {config.algorithm} samples nothing; pairs have preference.share_prompt')
  refuse(algorithm.pack is not None, f'{name}: {config.algorithm} trains on pairs, which have preference.share_prompt')
  refuse(
    bool(config.nll.mtp_weight or config.nll.neftune_alpha),
    f'{name}: nll.mtp_weight and nll.neftune_alpha need documents with one completion; leave one of the fields out',
  )
  for role, source in sources.items():
    refuse(
      isinstance(source.config, CustomConfig) or bool(source.config.state_shapes),
      f'{name}: the {role} is a model of your own, or has layers with a recurrent state, and cannot read several '
      'completions after one prompt; leave it False',
    )
  row = config.train.row_length or row_length(config.rollout)
  refuse(
    _capacity(config.rollout, row) < min(2, config.rollout.group_size),
    f'{name}: a row of {row} tokens has no room for a prompt and two completions of the greatest lengths; raise '
    'config.train.row_length, or leave it 0',
  )


def row_length(rollout: Any) -> int:
  """Returns the tokens of a row for a group of `config.rollout`, or an equal part of it where it is long."""
  shared, branch = rollout.max_prompt_length - 1, rollout.max_new_tokens + 1
  limit = max(_LONG, shared + 4 * branch)
  parts = math.ceil(rollout.group_size / ((limit - shared) // branch))
  needed = shared + branch * math.ceil(rollout.group_size / parts)
  return math.ceil(needed / 128) * 128  # attention kernels and meshes need a multiple


def filled_rows(rollout: Any, length: int) -> int:
  """Returns how many rows of `length` tokens a step fills if all its completions have the greatest length."""
  shared, branch = rollout.max_prompt_length - 1, rollout.max_new_tokens + 1
  parts = math.ceil(rollout.group_size / _capacity(rollout, length))
  if parts > 1:
    return rollout.prompts * parts
  return math.ceil(rollout.prompts / (length // (shared + rollout.group_size * branch)))


def _capacity(rollout: Any, length: int) -> int:
  """Returns how many completions of one prompt a row holds if all have the greatest length."""
  return (length - rollout.max_prompt_length + 1) // (rollout.max_new_tokens + 1)


def documents(
  members: Collection[int], group_size: int, prompts: np.ndarray, completions: np.ndarray, row_length: int
) -> Iterator[list[int]]:
  """Yields documents of at most `row_length` tokens: sequences with the same prompt, or one with an empty prompt.

  Args:
    members: indices of the sequences; those with the same `n // group_size` have one prompt.
    prompts, completions: [N] tokens of each sequence.
  """
  for _, group in itertools.groupby(sorted(members), lambda n: n // group_size):
    document: list[int] = []
    used = 0
    for n in group:
      if document and (used + 1 + completions[n] > row_length or not prompts[n]):
        yield document
        document = []
      used = (used if document else prompts[n] - 1) + 1 + completions[n]
      document.append(n)
    yield document
