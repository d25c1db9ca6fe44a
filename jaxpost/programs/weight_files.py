"""Programs that run while weights are read from files, or written to them."""

from collections.abc import Callable

import jax

from jaxpost.formats import tensor_reader

# Writes a piece of a parameter, read from a file, into the shards that contain it: in place, as `x` is donated.
write_piece = jax.jit(
  tensor_reader.write, donate_argnames='x', static_argnames=('sharding', 'shape', 'rows', 'row', 'moves')
)


def after(first: Callable, then: Callable) -> Callable:
  """Returns the function then(first(x)), with `first` compiled once for each shape of x: of exported quantized weights.

  `then` is not compiled.
  """
  first = jax.jit(first)
  return lambda x: then(first(x))
