"""Length and row buckets of the sampler: the finite set of shapes that it compiles.

A prompt is padded to a power of two, attention reads a power of two of cache entries, and a block computes all slots or
a part of them. So few programs are compiled, and none while a run samples.
"""

import dataclasses


def bucket(length: int, longest: int, smallest: int = 32, factor: int = 2) -> int:
  """Smallest of `smallest`, `smallest * factor`, ... that holds `length`; at most `longest`."""
  size = smallest
  while size < length:
    size *= factor
  return min(size, longest)


def cache_length(longest: int, block: int, page_size: int) -> int:
  """Cache entries of a slot for sequences of `longest` tokens, in whole pages: a block may run past the last token."""
  page = page_size or 1
  return -(-(longest + block) // page) * page


def entries_read(length: int, cache_length: int, page_size: int) -> int:
  """Cache entries that attention by XLA reads where `length` are filled; all of them from four fifths on."""
  size = bucket(length, cache_length, max(64, page_size))
  return size if size < 0.8 * cache_length else cache_length


@dataclasses.dataclass(frozen=True)
class Buckets:
  """Shapes of an engine.

  slots: sequences decoded at the same time.
  batch_shards: parts that a mesh splits the slots into.
  least_rows: rows that the matrix product of this platform wants at least.
  longest: tokens of the longest sequence.
  cache_length: cache entries of a slot.
  page_size: entries of a page; 0: there are no pages.
  block: decode steps of a dispatch.
  max_new_tokens: of a completion.
  reads_filled: whether decoding reads the entries that are filled, wherever the cache ends.
  """

  slots: int
  batch_shards: int
  least_rows: int
  longest: int
  cache_length: int
  page_size: int
  block: int
  max_new_tokens: int
  reads_filled: bool = False

  def prompt(self, length: int) -> int:
    """Tokens that a prompt of `length` is padded to."""
    return bucket(length, self.longest)

  def read(self, length: int) -> int:
    """Cache entries that attention reads in all slots where `length` are filled."""
    return entries_read(length, self.cache_length, self.page_size)

  def decode(self, length: int, rows: int) -> int:
    """Cache entries that a block of `rows` slots reads; 0 means that the kernel reads exactly the filled entries."""
    # A part of the slots together reads at least what all of them read in the smallest bucket: less would save little.
    return 0 if self.reads_filled else self.read(max(length, 64 * self.slots // rows))

  def rows(self, count: int) -> int:
    """Slots that are computed where the first `count` are in use."""
    return min(size for size in self.row_sizes() if size >= count)

  def row_sizes(self) -> list[int]:
    """All slots, a half, a quarter and an eighth of them.

    Only all of them where few blocks follow the first, and on a mesh that
    splits the slots: the first half of these is on the first half of its devices.
    """
    if self.batch_shards > 1 or self.max_new_tokens <= 4 * self.block:
      return [self.slots]
    return [self.slots // n for n in (1, 2, 4, 8) if self.slots // n >= self.least_rows]

  def copy_sizes(self, rows: int, length: int) -> list[int]:
    """Sizes of the table of page copies, where a prefill is `rows` prompts padded to `length`."""
    most = self.slots + rows * (length // self.page_size)  # each slot has a last page of its own
    return sorted({self.page_copies(n) for n in range(most + 1)})

  def page_copies(self, count: int) -> int:
    """Rows of the table for `count` page copies: few sizes, as each is a program of its own."""
    return bucket(count, 1 << 30, factor=8)

  def prefill_rows(self, group_size: int) -> int:
    """Prompts of a prefill: as many as fill the slots once with `group_size` samples each."""
    rows = -(-self.slots // group_size)
    return -(-rows // self.batch_shards) * self.batch_shards
