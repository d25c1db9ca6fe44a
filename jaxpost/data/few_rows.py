"""Computes the order in which grain shuffles a small number of rows, much faster than grain.

grain's `index_shuffle` encrypts an index to 16 bits again and again until the result is below the number of rows. With
2 rows it takes up to 65,536 times, or 18 ms, per document. This module encrypts all 16-bit numbers of an epoch at once.
Its order must be exactly that of grain, as saved positions and results depend on it.
"""

import functools
from collections.abc import Callable

import numpy as np

_NUMBERS = np.arange(1 << 16)


def _two_rounds() -> np.ndarray:
  """Returns [65536] each number after two rounds of the cipher (Simon with 8-bit words) with keys of 0."""
  left, right = np.divmod(_NUMBERS, 256)

  def mix(x: np.ndarray) -> np.ndarray:
    return (x << 1 | x >> 7) & x ^ (x << 2 & 255 | x >> 6)

  left = left ^ mix(right)
  return left << 8 | right ^ mix(left)


_TWO_ROUNDS = _two_rounds()


def endless(start: int, size: int, seed: int) -> Callable[[int], int]:
  """Returns the function (index of a document) -> row of `grain.MapDataset.range(start, start + size).shuffle(seed)`.

  Args:
    size: number of rows, at most 65536; grain is faster for more than 1024.
    seed: 32 bits; epoch e is shuffled with `seed + e`.
  """

  @functools.lru_cache(max(1, (1 << 16) // size))  # the epochs of a window, which may be read several times
  def epoch(number: int) -> list[int]:
    table = _encryption((seed + number) % (1 << 32))
    # Follow each index through the table until it is below `size`; `jump` is the result of 1, 2, 4, ... steps.
    rows, jump = table[:size], table.copy()
    jump[:size] = np.arange(size)  # a number below `size` stays
    while rows.max() >= size:
      rows, jump = jump[rows], jump[jump]
    return (rows + start).tolist()

  return lambda index: epoch(index // size)[index % size]


def _encryption(seed: int) -> np.ndarray:
  """Returns [65536] each number after the four rounds of grain's cipher."""
  keys = [key & 255 for key in _seed_sequence(seed)]  # a round uses the 8 bits of a word
  # Applying the first key of a pair of rounds to their input, and the second to their output, gives the same result.
  halfway = _TWO_ROUNDS[_NUMBERS ^ keys[0] << 8] ^ keys[1] ^ keys[2] << 8
  return _TWO_ROUNDS[halfway] ^ keys[3]


def _seed_sequence(seed: int) -> list[int]:
  """Returns the four 32-bit numbers that `std::seed_seq{seed}` of C++ generates."""
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
