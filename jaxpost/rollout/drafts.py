"""Speculative decoding: drafts the next tokens of sequences from the other samples of their prompt.

Samples of a group repeat each other and their prompt: names, numbers, steps of a derivation. If the last tokens of a
sequence occurred before, the tokens that followed there are its draft ("prompt lookup", n-gram speculation). The
verify program (`programs/verify.py`) accepts the part of it that would have been drawn anyway.

All decisions depend on tokens alone, which are equal on all processes, and nothing is kept after a call of the engine,
so that a resumed run samples as an uninterrupted one does.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import refuse
from jaxpost.programs.verify import Draft
from jaxpost.rollout.scheduler import Scheduler

if TYPE_CHECKING:
  from jaxpost.programs.generate import Block
  from jaxpost.rollout.sampler_config import SamplerConfig
  from jaxpost.rollout.sequence import ActiveSequence, Completion

_GRAM = 3  # the n of n-grams; most continuations of shorter ones are wrong
_MAX_TOKENS = 1 << 22  # limit of the tokens that are kept; the texts of the oldest prompts are dropped first
_FREE_ROWS = 256  # rows of a matrix product on an accelerator up to which its time is that of reading the weights


class _Texts:
  """The texts of one prompt's samples, and where each n-gram occurred last."""

  def __init__(self) -> None:
    self.of_sample: dict[int, list[int]] = collections.defaultdict(list)
    self.continued: dict[tuple[int, ...], tuple[list[int], int]] = {}  # n-gram -> (text, index of the token after it)

  def extend(self, sample: int, tokens: np.ndarray) -> None:
    """Appends tokens to the text of a sample."""
    text = self.of_sample[sample]
    first = max(len(text), _GRAM)
    text.extend(tokens.tolist())
    for end in range(first, len(text)):
      self.continued[tuple(text[end - _GRAM : end])] = text, end

  def draft(self, sample: int, width: int) -> list[int]:
    """Returns at most `width` tokens that followed an earlier occurrence of a sample's last n-gram; [] without one."""
    text, start = self.continued.get(tuple(self.of_sample[sample][-_GRAM:]), ([], 0))
    return text[start : start + width]


def no_draft(rows: int, width: int) -> Draft:
  """Returns empty drafts of `rows` slots, with room for `width` tokens each."""
  return Draft(np.zeros((rows, width), np.int32), np.zeros(rows, np.int32))


def verify_cost(platform: str, rows: int, width: int) -> float:
  """Returns the time that verifying `width` tokens in each of `rows` slots takes, in steps of decoding."""
  if platform == 'cpu':
    return 3.5  # measured for 7 tokens in 1 to 32 rows; a step is bound by overheads that do not grow with its tokens
  # One forward pass over the drafts, and one step that draws the token after them.
  return 1 + max(1.0, rows * width / _FREE_ROWS) / max(1.0, rows / _FREE_ROWS)


class Drafts:
  """Stores the tokens that samples of each prompt have drawn so far, and decides whether drafts from them pay.

  width: limit of the tokens of a draft.
  platform: of the devices that verify them.
  """

  def __init__(self, width: int, platform: str):
    self.width = width
    self.platform = platform
    self.prompts: dict[int, _Texts] = {}
    self.tokens = 0  # stored in `prompts`
    self.expected = width / 2  # running mean of the accepted tokens of a draft; it starts with a guess
    # Counts that `figures` reports.
    self.drafted = 0
    self.accepted = 0
    self.verified = 0

  def add(self, sequence: ActiveSequence) -> None:
    """Stores the tokens of a sequence that are not stored yet, usually those of its last block."""
    request = sequence.request
    texts = self.prompts.setdefault(request.prompt, _Texts())
    num_stored = len(texts.of_sample[request.sample])
    before = len(request.tokens) + sum(len(block.tokens) for block in sequence.blocks[:-1])
    if sequence.blocks and num_stored == before:
      new = sequence.blocks[-1].tokens
    else:  # at its first block, at the next turn of a conversation, or if its prompt was dropped
      new = np.concatenate([request.tokens, sequence.drawn()])[num_stored:]
    texts.extend(request.sample, new)
    self.tokens += len(new)
    while self.tokens > _MAX_TOKENS and len(self.prompts) > 1:
      oldest = self.prompts.pop(next(iter(self.prompts)))
      self.tokens -= sum(map(len, oldest.of_sample.values()))

  def propose(self, live: Mapping[int, ActiveSequence], rows: int) -> Draft | None:
    """Returns the drafts of sequences, by slot; None if verifying them is expected to take longer than decoding."""
    drafts = no_draft(rows, self.width)
    for slot, sequence in live.items():
      if not sequence.blocks:
        self.add(sequence)  # its prompt
      texts = self.prompts.get(sequence.request.prompt)
      draft = texts.draft(sequence.request.sample, self.width) if texts else []
      drafts.tokens[slot, : len(draft)] = draft
      drafts.lengths[slot] = len(draft)
    expected_tokens = 1 + min(self.expected, self.width) * np.count_nonzero(drafts.lengths) / len(live)  # per sequence
    if expected_tokens <= verify_cost(self.platform, rows, self.width):
      self.expected += 0.01 * (self.width / 2 - self.expected)  # so that drafts are tried again later
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
  """A scheduler whose blocks verify drafts if that is faster than decoding.

  A block is harvested before the next one is dispatched, as its tokens decide the next drafts.
  """

  overlaps = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self.drafts = Drafts(self.engine.block - 1, self.engine.programs.platform)
    self.draft: Draft | None = None  # drafts that the running block verifies

  def decode(self, live: dict[int, ActiveSequence], rows: int, read: int, table: Any) -> Block:
    """Dispatches a block that verifies drafts, or one that decodes."""
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
    """Reads the block, in which a sequence whose draft was wrong has drawn fewer tokens than a block has steps."""
    slots, block, _ = self.running[0]
    drawn = to_host(block.drawn, share=False)
    finished = super().harvest()
    for slot, sequence in slots.items():
      missing = len(drawn) - int(drawn[:, slot].sum())
      sequence.used -= missing
      sequence.remaining += missing
      self.drafts.add(sequence)
      if self.draft is not None and self.draft.lengths[slot]:
        self.drafts.count(int(self.draft.lengths[slot]), int(drawn[:-1, slot].sum()))
    return finished

  def figures(self) -> dict:
    """Figures of the call; see `Scheduler.figures` and `Drafts.figures`."""
    return super().figures() | self.drafts.figures()


def check(config: SamplerConfig, can_extend: bool, shards: int) -> None:
  """Raises InputError where drafts cannot be verified; see `sampler_config.check` and `sampler_config.can_extend`."""
  where = 'config.rollout.speculation'
  refuse(
    not can_extend,
    f'{where}: drafts are verified several tokens at a time, which this model cannot: a recurrent state is that of the '
    "last token alone, recorded experts and custom models have one token a step; set it to ''",
  )
  refuse(
    1 in (config.block, config.max_new_tokens),
    f'{where}: rollout.block={config.block} and rollout.max_new_tokens={config.max_new_tokens} leave nothing to draft; '
    "raise them, or set this to ''",
  )
  refuse(
    shards > 1,
    f'{where}: drafts are not verified by each device alone, and would move cache entries between devices; set it to '
    "'', or give config.mesh.rollout a tensor axis only",
  )
