"""`programs.replicas`: the hash that compares replicas depends on every bit and on its position."""

import jax
import numpy as np
import pytest

from jaxpost.programs import replicas


@pytest.mark.parametrize('shape', [(), (7,), (3, 5), (3, 2, 4), (2, 3, 2, 3)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_no_flipped_bit_is_missed(shape, dtype):
  size = np.dtype(jax.numpy.dtype(dtype)).itemsize
  words = np.random.RandomState(0).randint(0, 2 ** (8 * size), shape, np.int64).astype(f'uint{8 * size}')
  words = np.asarray(words)

  def digest(words):
    return replicas._hash(jax.lax.bitcast_convert_type(words, dtype))

  flipped = []
  for index in np.ndindex(shape):
    for bit in range(8 * size):
      other = words.copy()
      other[index] ^= other.dtype.type(1 << bit)
      flipped.append(other)
  hashes = jax.jit(jax.vmap(digest))(np.stack(flipped))
  assert not np.any(np.asarray(hashes) == np.asarray(jax.jit(digest)(words)))


def test_order_of_values_changes_the_hash():
  x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
  digest = jax.jit(replicas._hash)
  hashes = {int(digest(y)) for y in (x, x[::-1], x[:, ::-1], x[..., ::-1])}
  assert len(hashes) == 4
