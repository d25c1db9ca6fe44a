"""Requests to an engine, their completions, and the sequences that the scheduler makes of them.

Legend: P prompt tokens, C completion tokens, L layers, k experts per token.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
  from jaxpost.programs.generate import Block


@dataclasses.dataclass(frozen=True)
class Request:
  """A request to an engine to continue a text.

  The random draws depend on (run key, step, `prompt`, `sample`, position in the text) and on nothing else. The next
  turn of a conversation is a request with the same `prompt` and `sample` and the longer text, so all turns together
  draw what one long sample would.

  Attributes:
    tokens: [P] int32, the text so far: prompt, completions, tool results.
    prompt: global index of the prompt.
    sample: index within the group of the prompt.
    sampling: {field of `programs.sampling.Sampling` or 'stop_strings': scalar or tuple} that differ from the config.
    tag: of the caller; comes back with the completion.
    is_cancelled: asked between blocks; True gives up the place in the queue or the slot, without a completion. It must
      answer the same on every process.
  """

  tokens: np.ndarray
  prompt: int
  sample: int = 0
  sampling: dict = dataclasses.field(default_factory=dict)
  tag: Any = None
  is_cancelled: Callable[[], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """The answer of an engine to a request: host arrays, equal on every process.

  Attributes:
    tokens: [C] int32, including the stop id.
    logprobs: [C] float32 under the distribution with temperature, before top-k, top-p and min-p.
    behavior_logprobs: [C] float32 under the truncated distribution that the tokens were drawn from.
    finished: ended by a stop id or a stop string, not by max_tokens.
    versions: [C] int32, number of optimizer updates that produced the weights of each token (0: the initial ones).
    stop_string: that ended it, or ''; the last token completes it.
    top_ids, top_logprobs: [C, n] int32 and float32, most probable first.
    allowed: [C, k] int32, see `Rollout`.
    experts: [P + C, L, k] uint16 chosen by the router, for the whole text.
  """

  request: Request
  tokens: np.ndarray
  logprobs: np.ndarray
  behavior_logprobs: np.ndarray
  finished: bool
  versions: np.ndarray
  stop_string: str = ''
  top_ids: np.ndarray | None = None
  top_logprobs: np.ndarray | None = None
  experts: np.ndarray | None = None
  allowed: np.ndarray | None = None


class DrawnTokens(NamedTuple):
  """The n tokens that one block drew for a sequence, with the fields of `generate.Block`."""

  tokens: np.ndarray  # [n]
  logprobs: np.ndarray  # [n]
  behavior_logprobs: np.ndarray  # [n]
  experts: tuple  # ([n, L, k],) or ()
  top: tuple  # (ids, log-probs), [n, most], or ()
  allowed: tuple  # ([n, k],) or ()
  versions: np.ndarray  # [n], see `Completion`

  def first(self, count: int) -> DrawnTokens:
    return jax.tree.map(lambda x: x[:count], self)


@dataclasses.dataclass(eq=False)
class ActiveSequence:
  """A request on its way through the queue and a slot.

  request: what was asked for.
  left: tokens that may still be drawn, after the blocks dispatched.
  tokens: what is prefilled when it gets a slot.
  used: cache entries, at most, after the blocks dispatched.
  experts: ([P, L, k],) that routed `tokens`, where routing is recorded.
  done: whether the completion has ended.
  blocks: the tokens that each harvested block drew.
  """

  request: Request
  left: int
  tokens: np.ndarray
  experts: tuple = ()
  done: bool = False
  blocks: list[DrawnTokens] = dataclasses.field(default_factory=list)

  def __post_init__(self):
    self.tokens = np.ascontiguousarray(self.tokens, np.int32)
    self.key = self.tokens.tobytes()  # of equal prompts, and of their prefixes
    self.used = len(self.tokens)

  def requeued(self) -> ActiveSequence:
    """This sequence to be prefilled again, with what it has drawn; all its blocks were harvested."""
    tokens = np.concatenate([self.request.tokens, self.drawn()])
    return ActiveSequence(self.request, self.left, tokens, blocks=self.blocks)

  def drawn(self) -> np.ndarray:
    """[C] token ids so far."""
    return np.concatenate([np.zeros(0, np.int32), *(block.tokens for block in self.blocks)])

  def append(self, block: Block, slot: int, version: int) -> None:
    """Appends what a block drew in a slot."""
    drawn = block.drawn[:, slot]
    fields = (block.tokens, block.logprobs, block.behavior_logprobs, block.experts, block.top, block.allowed)
    versions = np.full(drawn.sum(), version, np.int32)
    self.blocks.append(DrawnTokens._make([*jax.tree.map(lambda x: x[drawn, slot], fields), versions]))

  def cut_at_stop_string(self, strings: Collection[str], decode: Callable, min_tokens: int = 0) -> str:
    """Drops the tokens after the one that completes a stop string; returns that string, or ''.

    Only the last block is searched. A string that the first `min_tokens` tokens complete does not count.
    """
    if not strings:
      return ''
    new = len(self.blocks[-1].tokens)
    # A token may be a single byte of a character of four.
    reach = 4 * max(map(len, strings)) + new
    # These blocks have enough tokens. Joining all of a long completion after each block would be slow.
    tokens = np.concatenate([block.tokens for block in self.blocks[-reach - new :]])
    whole = decode(tokens[-reach:])
    if not any(string in whole for string in strings):
      return ''
    # From here on places are those in `tokens`, which may lack the beginning of the completion.
    before = len(tokens) - new
    least = min_tokens - sum(len(block.tokens) for block in self.blocks[: -reach - new])
    for end in range(max(before, least) + 1, len(tokens) + 1):
      start = max(0, end - reach)
      text = decode(tokens[start:end])
      early = decode(tokens[start : max(start, least)])
      for string in strings:
        # The early part ends where both agree: half a character decodes to
        # something else once the rest of it follows.
        known = len(os.path.commonprefix([early, text]))
        if text.find(string, max(0, known - len(string) + 1)) >= 0:
          self.blocks[-1] = self.blocks[-1].first(end - before)
          return string
    return ''

  def completion(self, stop_string: str, finished: bool) -> Completion:
    """The record of a finished sequence."""
    drawn = jax.tree.map(lambda *x: np.concatenate(x), *self.blocks)
    new = len(self.tokens) - len(self.request.tokens)  # drawn before it was prefilled again
    most = self.request.sampling.get('top_logprobs')
    top_ids, top_logprobs = [x[:, :most] for x in drawn.top] or (None, None)
    experts = np.concatenate([self.experts[0], drawn.experts[0][new:]]) if drawn.experts else None
    return Completion(
      self.request,
      drawn.tokens,
      drawn.logprobs,
      drawn.behavior_logprobs,
      finished,
      versions=drawn.versions,
      stop_string=stop_string,
      top_ids=top_ids,
      top_logprobs=top_logprobs,
      experts=experts,
      allowed=drawn.allowed[0] if drawn.allowed else None,
    )
