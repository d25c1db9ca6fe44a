"""Requests to an engine, their completions, and the state of a request in the scheduler.

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
    tag: any value of the caller, by which it knows the completion again.
    is_cancelled: called between blocks; on True the request leaves the queue or its slot, without a completion. It must
      return the same on every process.
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
    stop_string: the string that ended the completion, whose last token completes it; '': none did.
    top_ids, top_logprobs: [C, n] int32 and float32, most probable first.
    allowed: [C, k] int32, see `Rollout`.
    experts: [P + C, L, k] uint16, indices of the experts chosen by the router, for the whole text.
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


@dataclasses.dataclass(eq=False)
class ActiveSequence:
  """A request in the queue or in a slot.

  remaining: tokens that may still be drawn, after the blocks dispatched.
  tokens: the text to prefill when it gets a slot; key: the same as bytes, to compare prompts and prefixes.
  used: upper bound of its cache entries after the blocks dispatched.
  experts: ([P, L, k],) that routed `tokens`, if routing is recorded, else ().
  done: whether the completion has ended.
  blocks: the tokens that each harvested block drew.
  """

  request: Request
  remaining: int
  tokens: np.ndarray
  experts: tuple = ()
  done: bool = False
  blocks: list[DrawnTokens] = dataclasses.field(default_factory=list)

  def __post_init__(self):
    self.tokens = np.ascontiguousarray(self.tokens, np.int32)
    self.key = self.tokens.tobytes()
    self.used = len(self.tokens)

  def requeued(self) -> ActiveSequence:
    """Returns this sequence with the drawn tokens in the text to prefill; all its blocks must have been harvested."""
    tokens = np.concatenate([self.request.tokens, self.drawn()])
    return ActiveSequence(self.request, self.remaining, tokens, blocks=self.blocks)

  def drawn(self) -> np.ndarray:
    """[C] token ids so far."""
    return np.concatenate([np.zeros(0, np.int32), *(block.tokens for block in self.blocks)])

  def append(self, block: Block, slot: int, version: int) -> None:
    """Appends the tokens that a block drew in a slot."""
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
    # A token may be one byte of a character of four, so a string may take four tokens per character.
    reach = 4 * max(map(len, strings)) + new
    # These blocks have enough tokens. Joining all of a long completion after each block would be slow.
    tokens = np.concatenate([self.request.tokens[-1:], *(block.tokens for block in self.blocks[-reach - new :])])

    def added(start: int, end: int) -> str:
      """Returns the text that tokens[start:end] add to the token before: SentencePiece starts no text with a space."""
      return decode(tokens[start - 1 : end])[len(decode(tokens[start - 1 : start])) :]

    window = added(max(1, len(tokens) - reach), len(tokens))
    if not any(string in window for string in strings):
      return ''
    # From here on, indices are those in `tokens`, which may lack the beginning of the completion.
    before = len(tokens) - new
    min_end = 1 + min_tokens - sum(len(block.tokens) for block in self.blocks[: -reach - new])
    for end in range(max(before, min_end) + 1, len(tokens) + 1):
      start = max(1, end - reach)
      text = added(start, end)
      early = added(start, max(start, min_end))  # text of the first `min_tokens`, where no string counts
      for string in strings:
        # Half a character decodes to something else once its other bytes follow, so the early text is `text` up to
        # where the two agree. A string counts if it ends after that.
        early_length = len(os.path.commonprefix([early, text]))
        if text.find(string, max(0, early_length - len(string) + 1)) >= 0:
          self.blocks[-1] = jax.tree.map(lambda x, kept=end - before: x[:kept], self.blocks[-1])
          return string
    return ''

  def completion(self, stop_string: str, finished: bool) -> Completion:
    """Returns the completion of a finished sequence."""
    drawn = jax.tree.map(lambda *x: np.concatenate(x), *self.blocks)
    prefilled = len(self.tokens) - len(self.request.tokens)  # tokens drawn before a preemption, and prefilled again
    num_top = self.request.sampling.get('top_logprobs')
    top_ids, top_logprobs = [x[:, :num_top] for x in drawn.top] or (None, None)
    experts = np.concatenate([self.experts[0], drawn.experts[0][prefilled:]]) if drawn.experts else None
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
