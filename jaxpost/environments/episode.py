"""The records of an episode: its limits, its tokens, its state.

Legend: P context tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
  from jaxpost.rollout.sequence import Completion
  from jaxpost.types import Prompt


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
  """Limits of an episode.

  Attributes:
    prompt: tokens before the first turn.
    tokens: tokens of all turns and answers together.
    turns: turns of the model.
    result: tokens of one tool answer; the rest is cut.
    wait_blocks: blocks of tokens after which an answer is used (`config.tools.wait_blocks`); 0: as soon as it arrives.
    failed: fraction of failed episodes that stops a run.
  """

  prompt: int
  tokens: int
  turns: int = 8
  result: int = 256
  wait_blocks: int = 4
  failed: float = 0.25


class EpisodeToken(NamedTuple):
  """A token after the context of an episode.

  Attributes:
    id: the token.
    generated: True if the policy generated it, False for a tool's answer and template tokens.
    logprob: log-prob under the policy, 0 if not generated.
    behavior_logprob: log-prob under the distribution it was drawn from, 0 if not generated.
    version: number of optimizer updates that produced the weights.
    reward: the reward of the turn that ends with this token, 0 elsewhere.
  """

  id: int
  generated: bool
  logprob: float
  behavior_logprob: float
  version: int
  reward: float = 0.0


@dataclasses.dataclass(eq=False)
class Episode:
  """One sample of a prompt: its conversation, token by token.

  Attributes:
    number: index in the rollout.
    sample: index in its group.
    slot: index of the environment that plays it, over all processes; -1 before it starts.
    context: [P] the tokens before the first turn; None before `reset`.
    tokens: all tokens after the context.
    messages: turns of the model and answers of tools.
    calls: tool calls of the last turn.
    turns: number of turns of the model.
    called: number of tool calls.
    failures: number of tool calls that raised.
    malformed: number of turns whose calls could not be parsed.
    finished: True if the last turn ended by itself, without a call.
    reward: what get_reward() returned; NaN: nothing yet, or None.
    error: why the episode failed; None: it did not.
    lost: True if its process was killed or died.
  """

  number: int
  prompt: Prompt
  sample: int
  slot: int = -1
  context: np.ndarray | None = None
  tokens: list[EpisodeToken] = dataclasses.field(default_factory=list)
  messages: list[dict] = dataclasses.field(default_factory=list)
  calls: list[dict] = dataclasses.field(default_factory=list)
  turns: int = 0
  called: int = 0
  failures: int = 0
  malformed: int = 0
  finished: bool = False
  reward: float = np.nan
  error: str | None = None
  lost: bool = False


def given_tokens(ids: Iterable[int], version: int) -> list[EpisodeToken]:
  """Returns the tokens that the policy did not generate, such as an answer of a tool."""
  return [EpisodeToken(int(i), False, 0.0, 0.0, version) for i in ids]


def generated_tokens(completion: Completion) -> list[EpisodeToken]:
  """Returns the tokens of a turn of the model."""
  columns = zip(
    completion.tokens.tolist(),
    completion.logprobs.tolist(),
    completion.behavior_logprobs.tolist(),
    completion.versions.tolist(),
    strict=True,
  )
  return [EpisodeToken(i, True, logprob, behavior, version) for i, logprob, behavior, version in columns]
