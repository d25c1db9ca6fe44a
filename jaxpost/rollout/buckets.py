"""Length and row buckets of the sampler: the finite set of shapes that it compiles.

A prompt is padded to a power of two, attention reads a power of two of cache entries, and a block computes all slots or
a fraction of them. So few programs are needed, and all are compiled before a run samples.
"""

import dataclasses


def bucket(length: int, longest: int, smallest: int = 32, factor: int = 2) -> int:
  """Returns the first of `smallest`, `smallest * factor`, ... that is at least `length`; at most `longest`."""
  size = smallest
  while size < length:
    size *= factor
  return min(size, longest)


def cache_length(longest: int, block: int, multiple: int) -> int:
  """Cache entries of a slot for `longest` tokens and a block, which may run past the last token.

  multiple: entries of a page, or what else the length has to be a multiple of; 0: nothing.
  """
  return -(-(longest + block) // (multiple or 1)) * (multiple or 1)


def entries_read(length: int, cache_length: int, page_size: int) -> int:
  """Cache entries that attention by XLA reads if `length` are filled: a bucket, or all if that is 80 % of them."""
  size = bucket(length, cache_length, max(64, page_size))
  return size if size < 0.8 * cache_length else cache_length


@dataclasses.dataclass(frozen=True)
class Buckets:
  """Sizes of an engine, and the buckets that follow from them; fields not described here are those of `SamplerConfig`.

  batch_shards: parts that a mesh splits the slots into.
  min_rows: fewest rows that this platform multiplies efficiently.
  max_length: tokens of the longest sequence.
  cache_length: cache entries of a slot.
  reads_filled: whether a kernel for decoding reads exactly the filled entries.
  """

  slots: int
  batch_shards: int
  min_rows: int
  max_length: int
  cache_length: int
  page_size: int
  block: int
  max_new_tokens: int
  reads_filled: bool = False

  def prompt(self, length: int) -> int:
    """Tokens that a prompt of `length` is padded to."""
    return bucket(length, self.max_length)

  def read(self, length: int) -> int:
    """Cache entries that attention reads in all slots if `length` are filled."""
    return entries_read(length, self.cache_length, self.page_size)

  def decode(self, length: int, rows: int) -> int:
    """Cache entries that a block of `rows` slots reads; 0 means that the kernel reads exactly the filled entries."""
    # `rows` slots together read at least as many entries as all slots in the smallest bucket: fewer would save little.
    return 0 if self.reads_filled else self.read(max(length, 64 * self.slots // rows))

  def rows(self, count: int) -> int:
    """Slots that are computed if the first `count` are in use."""
    return min(size for size in self.row_sizes() if size >= count)

  def row_sizes(self) -> list[int]:
    """Returns the numbers of slots that a block may compute: all, a half, a quarter and an eighth of them.

    It is always all of them if a completion has few blocks, and on a mesh that splits the slots, where the
    first half of them is on half of the devices.
    """
    if self.batch_shards > 1 or self.max_new_tokens <= 4 * self.block:
      return [self.slots]
    return [self.slots // n for n in (1, 2, 4, 8) if self.slots // n >= self.min_rows]

  def copy_sizes(self, rows: int, length: int) -> list[int]:
    """Sizes of the table of page copies, if a prefill is `rows` prompts padded to `length`."""
    max_copies = self.slots + rows * (length // self.page_size)  # prompts share full pages; each slot has a last one
    return sorted({self.page_copies(n) for n in range(max_copies + 1)})

  def page_copies(self, count: int) -> int:
    """Rows of the table for `count` page copies, from few sizes, as each is compiled."""
    return bucket(count, 1 << 30, factor=8)

  def prefill_rows(self, group_size: int) -> int:
    """Prompts of a prefill: as many as fill the slots once with `group_size` samples each."""
    rows = -(-self.slots // group_size)
    return -(-rows // self.batch_shards) * self.batch_shards
