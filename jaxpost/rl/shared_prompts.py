"""Completions that share a row behind one copy of their prompt (`config.train.share_prompt`).

A group of G completions of C tokens after a prompt of P tokens takes P - 1 + G (C + 1) tokens in place of G (P + C):
the last token of the prompt, which predicts the first one of a completion, is repeated in each branch. `types.Batch`
explains branches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxpost.errors import refuse

if TYPE_CHECKING:
  import numpy as np

  from jaxpost.algorithms.base import Algorithm

_LONGEST = 8192  # tokens of a row that is chosen here, unless one completion needs more


def check(config: Any, algorithm: Algorithm, found: Mapping[str, Any]) -> None:
  """Raises InputError where rows cannot share prompts; `found` has the `Source` of each role."""
  name = 'config.train.share_prompt'
  refuse(not algorithm.on_policy, f'{name}: {config.algorithm} samples nothing; pairs have preference.share_prompt')
  refuse(algorithm.pack is not None, f'{name}: {config.algorithm} trains on pairs, which have preference.share_prompt')
  recurrent = [role for role, source in found.items() if source.config.state_shapes]
  refuse(
    bool(recurrent),
    f'{name}: the model of the {" and ".join(recurrent)} has layers with a recurrent state, which cannot read several '
    'completions after one prompt; leave it False',
  )


def row_length(rollout: Any) -> int:
  """Returns the tokens of a row for a whole group of `config.rollout`, or for as much of it as 8,192 tokens hold."""
  shared, branch = rollout.max_prompt_length - 1, rollout.max_new_tokens + 1
  return shared + branch * max(1, min(rollout.group_size, (_LONGEST - shared) // branch))


def most_rows(rollout: Any, length: int) -> int:
  """Returns the rows that suffice for the completions of a step, however long they are."""
  shared, branch = rollout.max_prompt_length - 1, rollout.max_new_tokens + 1
  documents = math.ceil(rollout.group_size / ((length - shared) // branch))  # of a prompt
  if documents > 1:
    return rollout.prompts * documents
  return math.ceil(rollout.prompts / (length // (shared + rollout.group_size * branch)))


def documents(
  members: Collection[int], group_size: int, prompts: np.ndarray, completions: np.ndarray, row_length: int
) -> Iterator[list[int]]:
  """Yields documents of at most `row_length` tokens: sequences with one prompt, in order.

  Args:
    members: indices of the sequences; `group_size` in a row have one prompt.
    prompts, completions: [N] tokens of each sequence.
  """
  for _, group in itertools.groupby(sorted(members), lambda n: n // group_size):
    document, used = [], 0
    for n in group:
      if document and used + 1 + completions[n] > row_length:
        yield document
        document = []
      used = (used if document else prompts[n] - 1) + 1 + completions[n]
      document.append(n)
    yield document
