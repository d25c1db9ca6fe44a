"""Samplers that return the answers of a data set: all completions of a step, or one in each group.

Legend: N sequences (one a prompt), G samples a prompt, C completion tokens, P prompt tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.data import chat
from jaxpost.data import messages as messages_lib
from jaxpost.data import prompts as prompts_lib
from jaxpost.errors import InputError
from jaxpost.rollout.rollout_codec import arrays_of
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.rewards.groups import Graded
  from jaxpost.rl.rollout_queue import RolloutSampler
  from jaxpost.rollout.engine import OnDispatch

_STREAM = 7  # separates these random numbers from others of the same seed and step


@dataclasses.dataclass
class DemonstrationSampler:
  """A sampler that returns the answers of the data in a share of the steps.

  Attributes:
    sampler: samples the completions of the other steps.
    share: fraction of the steps; the choice is a function of seed and step alone.
    max_tokens: limit of an answer; longer ones are cut.
  """

  sampler: RolloutSampler
  tokenizer: Tokenizer
  share: float
  seed: int
  max_tokens: int

  def from_data(self, step: int) -> bool:
    """Returns True for a step that takes the answers of the data."""
    return np.random.default_rng((self.seed, step, _STREAM)).random() < self.share

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int, step: int, on_dispatch: OnDispatch | None = None, **sampling: Any
  ) -> Rollout:
    """Returns a rollout, see `rollout.sampler.Sampler`; the data have one completion a prompt."""
    if self.from_data(step):
      return to_rollout(prompts, self.tokenizer, self.max_tokens, step)
    return self.sampler(prompts, group_size, step, on_dispatch, **sampling)


@dataclasses.dataclass
class SamplerWithDemonstrations:
  """A sampler whose groups end with the answer of the data (LUFFY, arXiv:2504.14945).

  Attributes:
    sampler: draws the other samples of a group.
    max_tokens: limit of an answer; longer ones are cut.
  """

  sampler: RolloutSampler
  tokenizer: Tokenizer
  max_tokens: int

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int, step: int, on_dispatch: OnDispatch | None = None, **sampling: Any
  ) -> Rollout:
    """Returns a rollout, see `rollout.sampler.Sampler`; a group of one is sampled."""
    if group_size == 1:
      return self.sampler(prompts, 1, step, on_dispatch, **sampling)
    drawn = self.sampler(prompts, group_size - 1, step, on_dispatch, **sampling)
    answers = to_rollout(prompts, self.tokenizer, self.max_tokens, step)
    answers = answers.replace(versions=np.full(answers.completions.shape, drawn.version, np.int32))

    def append(x: np.ndarray, last: np.ndarray | None) -> np.ndarray:
      """Appends the answers [P, ...] to the groups of samples [P * (G - 1), ...]; returns [P * G, ...]."""
      if last is None:  # the data have no such array
        last = np.zeros((len(prompts), *x.shape[1:]), x.dtype)
      groups = x.reshape(len(prompts), group_size - 1, *x.shape[1:])
      return np.concatenate([groups, last[:, None]], axis=1).reshape(-1, *x.shape[1:])

    demonstration = np.arange(len(prompts) * group_size) % group_size == group_size - 1
    arrays = {name: append(x, vars(answers)[name]) for name, x in arrays_of(drawn).items()}
    return drawn.replace(demonstration=demonstration, **arrays)


def leave_out(rollout: Rollout, demonstration: np.ndarray, *grades: list[Graded] | None) -> tuple:
  """Returns (the rollout with the lengths of samples alone, *grades without those of the answers of the data)."""
  samples = rollout.replace(lengths=rollout.lengths[~demonstration], finished=rollout.finished[~demonstration])
  return samples, *(groups and [_without_last(group) for group in groups] for groups in grades)  # None stays None


def _without_last(group: Graded) -> Graded:
  components = {name: values[:-1] for name, values in group.components.items()}
  return dataclasses.replace(group, rewards=group.rewards[:-1], components=components)


def check(tokenizer: Tokenizer, rows: Rows, limit: int) -> None:
  """Raises InputError if one of the first `limit` rows has no completion."""
  for i in range(0 if rows.streaming else min(len(rows), limit)):
    row, where = rows[i], rows.where(i)
    make_example(tokenizer, _row(row, prompts_lib.prompt_of(row, where), where), where)


def make_example(tokenizer: Tokenizer, row: dict, where: str) -> Example:
  """Tokenizes a row as for training on its last answer; InputError if it has none."""
  example = chat.make_example(tokenizer, row, where, train_on='completion')
  if not example.loss_mask.any():
    raise InputError(f'{where}: no token of its answer is trained; drop the row, or the weight 0 of the message')
  return example


def to_rollout(prompts: Sequence[Prompt], tokenizer: Tokenizer, max_tokens: int, step: int = 0) -> Rollout:
  """Returns the data's answers to the prompts, one each, cut to `max_tokens`.

  The tokens are those that supervised training on the row would train, from the first to
  the last trained one; their log-probs are 0.
  """
  num_prompts = len(prompts)
  completions = np.zeros((num_prompts, max_tokens), np.int32)
  lengths = np.zeros(num_prompts, np.int32)
  finished = np.ones(num_prompts, bool)
  for n, prompt in enumerate(prompts):
    where = f'prompt {prompt.index}'
    example = make_example(tokenizer, _row(prompt.columns, prompt.prompt, where), where)
    trained = np.flatnonzero(example.loss_mask)
    answer = example.tokens[trained[0] : trained[-1] + 1]
    lengths[n] = min(len(answer), max_tokens)
    finished[n] = len(answer) <= max_tokens
    completions[n, : lengths[n]] = answer[:max_tokens]
  logprobs = np.zeros(completions.shape, np.float32)
  return Rollout(
    prompts=tuple(prompts),
    completions=completions,
    lengths=lengths,
    logprobs=logprobs,
    behavior_logprobs=logprobs,
    finished=finished,
    step=step,
    from_data=True,
  )


def _row(columns: dict, prompt: str | list[dict], where: str) -> dict:
  """Returns a row of the data whose prompt is that of the sampler; InputError unless a chat of it ends in an answer."""
  if columns.get('messages') is None:
    return {**columns, 'prompt': prompt}
  answer = messages_lib.check_messages(columns['messages'], f'{where}: messages')[-1]
  if answer['role'] != 'assistant':
    raise InputError(f'{where}: messages: ends with a turn of the {answer["role"]}, so it has no answer to train on')
  if isinstance(prompt, str):
    raise InputError(
      f'{where}: prompt: is text, and messages a chat, whose answer does not follow that text; to sample from the '
      'chat, rename the text: config.data.columns=asked=prompt'
    )
  return {**columns, 'messages': [*prompt, answer]}
