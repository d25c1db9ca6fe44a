"""The order of few rows, as grain shuffles them, without the time that grain takes for each document.

grain's `index_shuffle` encrypts an index to 16 bits, again and again until it comes out below the number of rows: up
to 65,536 times, and so 18 ms, for a document of 2 rows. Here the encryption of all 16-bit numbers is computed at once
for each epoch, as a table. Saved positions and results depend on the order: it is that of grain, entry by entry.
"""

import functools
from collections.abc import Callable

import numpy as np

_NUMBERS = np.arange(1 << 16)


def _two_rounds() -> np.ndarray:
  """Returns [65536] what two rounds of the cipher (Simon, of 8-bit words) make of each number, with keys of 0."""
  left, right = np.divmod(_NUMBERS, 256)

  def mix(x: np.ndarray) -> np.ndarray:
    return (x << 1 | x >> 7) & x ^ (x << 2 & 255 | x >> 6)

  left = left ^ mix(right)
  return left << 8 | right ^ mix(left)


_TWO_ROUNDS = _two_rounds()


def endless(start: int, size: int, seed: int) -> Callable[[int], int]:
  """Returns the function (index of a document) -> row of `grain.MapDataset.range(start, start + size).shuffle(seed)`.

  Args:
    size: at most 65536 rows; of more than 1024, grain takes less time.
    seed: of 32 bits; that of epoch e is `seed + e`.
  """

  @functools.lru_cache(max(1, (1 << 16) // size))  # the epochs of a window, which may be read several times
  def epoch(number: int) -> list[int]:
    table = _encryption((seed + number) % (1 << 32))
    rows, jump = table[:size], table.copy()
    jump[:size] = np.arange(size)  # where a walk ends
    while rows.max() >= size:
      rows, jump = jump[rows], jump[jump]  # as many steps again as all before
    return (rows + start).tolist()

  return lambda index: epoch(index // size)[index % size]


def _encryption(seed: int) -> np.ndarray:
  """Returns [65536] what the four rounds of grain's cipher make of each number."""
  keys = [key & 255 for key in _seed_sequence(seed)]  # a round has the bits of a word
  # The key of an odd round can be added to its input, that of an even one to its output.
  halfway = _TWO_ROUNDS[_NUMBERS ^ keys[0] << 8] ^ keys[1] ^ keys[2] << 8
  return _TWO_ROUNDS[halfway] ^ keys[3]


def _seed_sequence(seed: int) -> list[int]:
  """Returns the 4 numbers of 32 bits that C++'s `std::seed_seq{seed}` generates."""
  word = (1 << 32) - 1
  out = [0x8B8B8B8B] * 4
  for k in range(4):
    mixed = out[k] ^ out[(k + 1) % 4] ^ out[k - 1]
    first = 1664525 * (mixed ^ mixed >> 27) & word
    second = first + (1, 1 + seed, 2, 3)[k] & word
    out[(k + 1) % 4] = out[(k + 1) % 4] + first & word
    out[(k + 2) % 4] = out[(k + 2) % 4] + second & word
    out[k] = second
  for k in range(4):
    mixed = out[k] + out[(k + 1) % 4] + out[k - 1] & word
    first = 1566083941 * (mixed ^ mixed >> 27) & word
    second = first - k & word
    out[(k + 1) % 4] ^= first
    out[(k + 2) % 4] ^= second
    out[k] = second
  return out
