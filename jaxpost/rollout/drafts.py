"""Drafts of the tokens that sequences will draw next, from what samples of the same prompt have drawn.

Samples of a group repeat each other and their prompt: names, numbers, steps of a derivation. Where the last tokens of a
sequence occurred before, the tokens that followed there are its draft ("prompt lookup", n-gram speculation). The
verify program (`programs/verify.py`) accepts the part of it that would have been drawn anyway.

Everything here is decided by tokens alone, which are equal on all processes, and is forgotten at the end of a call of
the engine, so that a resumed run samples as an uninterrupted one does.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.programs.verify import Draft
from jaxpost.rollout.scheduler import Scheduler

if TYPE_CHECKING:
  from jaxpost.programs.generate import Block
  from jaxpost.rollout.native import NativeEngine
  from jaxpost.rollout.sampler_config import SamplerConfig
  from jaxpost.rollout.sequence import ActiveSequence, Completion

_GRAM = 3  # tokens that have to occur before; of shorter n-grams most continuations are wrong
_MOST_TOKENS = 1 << 22  # kept at a time; the texts of the oldest prompts go first
_FREE_ROWS = 256  # of a matrix product on an accelerator: more take longer, fewer as long as reading the weights does


class _Texts:
  """The texts of one prompt's samples, and where each n-gram occurred last."""

  def __init__(self) -> None:
    self.of_sample: dict[int, list[int]] = collections.defaultdict(list)
    self.continued: dict[tuple[int, ...], tuple[list[int], int]] = {}  # n-gram -> (text, place of what follows)

  def extend(self, sample: int, tokens: np.ndarray) -> None:
    """Appends tokens to the text of a sample."""
    text = self.of_sample[sample]
    first = max(len(text), _GRAM)
    text.extend(tokens.tolist())
    for end in range(first, len(text)):
      self.continued[tuple(text[end - _GRAM : end])] = text, end

  def draft(self, sample: int, most: int) -> list[int]:
    """Returns what followed the last n-gram of a sample where it occurred before; [] if it did not."""
    text, place = self.continued.get(tuple(self.of_sample[sample][-_GRAM:]), ([], 0))
    return text[place : place + most]


def no_draft(rows: int, most: int) -> Draft:
  """Returns empty drafts of `rows` slots, with room for `most` tokens each."""
  return Draft(np.zeros((rows, most), np.int32), np.zeros(rows, np.int32))


def verify_cost(platform: str, rows: int, most: int) -> float:
  """Returns the time that verifying `most` tokens in each of `rows` slots takes, in steps of decoding."""
  if platform == 'cpu':
    return 3.5  # measured for 7 tokens in 1 to 32 rows; a step is bound by overheads that do not grow with its tokens
  return 1 + max(1.0, rows * most / _FREE_ROWS) / max(1.0, rows / _FREE_ROWS)  # one pass reads them, one step follows


class Drafts:
  """Holds what the samples of each prompt have drawn so far; decides whether drafts from it pay.

  Args:
    most: tokens of a draft at most.
    platform: of the devices that verify them.
  """

  def __init__(self, most: int, platform: str):
    self.most = most
    self.platform = platform
    self.prompts: dict[int, _Texts] = {}
    self.tokens = 0
    self.expected = most / 2  # tokens accepted of a draft: a running mean, which begins with a guess
    # Counts that `figures` reports.
    self.drafted = 0
    self.accepted = 0
    self.verified = 0

  def add(self, sequence: ActiveSequence) -> None:
    """Remembers what the last block drew for a sequence; where more of its text is unknown, all of that."""
    request = sequence.request
    texts = self.prompts.setdefault(request.prompt, _Texts())
    known = len(texts.of_sample[request.sample])
    before = len(request.tokens) + sum(len(block.tokens) for block in sequence.blocks[:-1])
    if sequence.blocks and known == before:
      new = sequence.blocks[-1].tokens
    else:  # at its first block, at the next turn of a conversation, or if it was forgotten
      new = np.concatenate([request.tokens, sequence.drawn()])[known:]
    texts.extend(request.sample, new)
    self.tokens += len(new)
    while self.tokens > _MOST_TOKENS and len(self.prompts) > 1:
      oldest = self.prompts.pop(next(iter(self.prompts)))
      self.tokens -= sum(map(len, oldest.of_sample.values()))

  def propose(self, live: Mapping[int, ActiveSequence], rows: int) -> Draft | None:
    """Returns the drafts of sequences, by slot; None where verifying them does not pay."""
    drafts = no_draft(rows, self.most)
    for slot, sequence in live.items():
      if not sequence.blocks:
        self.add(sequence)  # its prompt
      texts = self.prompts.get(sequence.request.prompt)
      draft = texts.draft(sequence.request.sample, self.most) if texts else []
      drafts.tokens[slot, : len(draft)] = draft
      drafts.lengths[slot] = len(draft)
    drawn = 1 + min(self.expected, self.most) * np.count_nonzero(drafts.lengths) / len(live)
    if drawn <= verify_cost(self.platform, rows, self.most):
      self.expected += 0.01 * (self.most / 2 - self.expected)  # so that drafts are tried again later
      return None
    return drafts

  def count(self, drafted: int, accepted: int) -> None:
    """Counts a draft of `drafted` tokens, of which `accepted` were drawn."""
    self.drafted += drafted
    self.accepted += accepted
    self.expected += 0.05 * (accepted - self.expected)

  def figures(self) -> dict:
    """Figures of the call: drafted tokens, the share of them that was accepted, and blocks that verified drafts."""
    share = self.accepted / self.drafted if self.drafted else 0.0
    return {'draft/tokens': self.drafted, 'draft/acceptance_rate': share, 'draft/blocks': self.verified}


class DraftingScheduler(Scheduler):
  """A scheduler whose blocks verify drafts where that pays.

  A block is harvested before the next one is dispatched, as drafts continue what it drew.
  """

  overlaps = False

  def __init__(self, engine: NativeEngine, *args: Any, **kwargs: Any) -> None:
    super().__init__(engine, *args, **kwargs)
    self.drafts = Drafts(engine.block - 1, engine.programs.platform)
    self.draft: Draft | None = None  # of the block that runs

  def decode(self, live: dict[int, ActiveSequence], rows: int, read: int, table: Any) -> Block:
    """Dispatches a block that verifies drafts, or a usual one."""
    self.draft = self.drafts.propose(live, rows)
    if self.draft is None:
      return super().decode(live, rows, read, table)
    engine = self.engine
    self.drafts.verified += 1
    tables = () if table is None else (engine.layout.put(table),)
    draft = engine.layout.put(self.draft, 'batch', None)
    self.state, block = engine.programs.verifier(rows, read)(engine.weights, self.state, draft, *tables)
    return block

  def harvest(self) -> list[Completion]:
    """Reads the block; a sequence whose draft was wrong has drawn less than a whole block."""
    slots, block, _ = self.running[0]
    drawn = to_host(block.drawn, share=False)
    finished = super().harvest()
    for slot, sequence in slots.items():
      missing = len(drawn) - int(drawn[:, slot].sum())
      sequence.used -= missing
      sequence.left += missing
      self.drafts.add(sequence)
      if self.draft is not None and self.draft.lengths[slot]:
        self.drafts.count(int(self.draft.lengths[slot]), int(drawn[:-1, slot].sum()))
    return finished

  def figures(self) -> dict:
    """Figures of the call; see `Scheduler.figures` and `Drafts.figures`."""
    return super().figures() | self.drafts.figures()


def scheduler(config: SamplerConfig, several: bool, batch_shards: int) -> type[Scheduler]:
  """Returns the scheduler of an engine on a mesh with so many parts of the batch.

  Raises:
    InputError: unless its model decodes `several` tokens at a time.
  """
  if not several:
    raise InputError(
      'config.rollout.speculation: drafts are verified several tokens at a time, which this model cannot: a recurrent '
      "state is that of the last token alone, recorded experts and custom models have one token a step; set it to ''"
    )
  if min(config.block, config.max_new_tokens) < 2:
    raise InputError(
      f'config.rollout.speculation: rollout.block={config.block} and rollout.max_new_tokens={config.max_new_tokens} '
      "leave nothing to draft; raise them, or set this to ''"
    )
  if batch_shards > 1:
    raise InputError(
      'config.rollout.speculation: drafts are not verified by each device alone, and would move cache entries between '
      "devices; set it to '', or give config.mesh.rollout a tensor axis only"
    )
  return DraftingScheduler
