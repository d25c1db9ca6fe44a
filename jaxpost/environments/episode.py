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
  """Limits of an episode."""

  prompt: int  # tokens before the first turn
  tokens: int  # tokens of all turns and answers together
  turns: int = 8  # turns of the model
  result: int = 256  # tokens of one tool answer; the rest is cut
  wait_blocks: int = 4  # blocks after which an answer is used (`config.tools.wait_blocks`); 0: as soon as it arrives
  failed: float = 0.25  # fraction of failed episodes that stops a run


class EpisodeToken(NamedTuple):
  """A token after the context of an episode."""

  id: int
  generated: bool  # by the policy; False for a tool's answer and template tokens
  logprob: float  # under the policy; 0 if not generated
  behavior_logprob: float  # under the distribution it was drawn from; 0 if not generated
  version: int  # number of optimizer updates that produced the weights
  reward: float = 0.0  # of the turn that ends with this token; 0 elsewhere


@dataclasses.dataclass(eq=False)
class Episode:
  """One sample of a prompt: its conversation, token by token."""

  number: int  # index in the rollout
  prompt: Prompt
  sample: int  # index in its group
  slot: int = -1  # index of the environment that plays it, over all processes; -1 before it starts
  context: np.ndarray | None = None  # [P] the tokens before the first turn; None before `reset`
  tokens: list[EpisodeToken] = dataclasses.field(default_factory=list)  # all tokens after the context
  messages: list[dict] = dataclasses.field(default_factory=list)  # turns of the model and answers of tools
  calls: list[dict] = dataclasses.field(default_factory=list)  # tool calls of the last turn
  turns: int = 0  # number of turns of the model
  called: int = 0  # number of tool calls
  failures: int = 0  # number of tool calls that raised
  malformed: int = 0  # number of turns whose calls could not be parsed
  finished: bool = False  # the last turn ended by itself, without a call
  reward: float = np.nan  # what get_reward() returned; NaN: nothing yet, or None
  error: str | None = None  # why the episode failed; None: it did not
  lost: bool = False  # its process was killed or died


def given_tokens(ids: Iterable[int], version: int) -> list[EpisodeToken]:
  """Returns the tokens that the policy did not generate, such as an answer of a tool."""
  return [EpisodeToken(int(i), False, 0.0, 0.0, version) for i in ids]


def generated_tokens(completion: Completion) -> list[EpisodeToken]:
  """Returns the tokens of a turn of the model."""
  c = completion
  columns = (x.tolist() for x in (c.tokens, c.logprobs, c.behavior_logprobs, c.versions))
  return [EpisodeToken(i, True, *values) for i, *values in zip(*columns, strict=True)]
