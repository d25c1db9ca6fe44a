"""The program of loading: writes a piece of a parameter, read from a file, into the shards that contain it."""

import jax

from jaxpost.formats import tensor_reader

# `x` is donated, so that a piece is written in place.
write = jax.jit(tensor_reader.write, donate_argnames='x', static_argnames=('sharding', 'shape', 'rows', 'row', 'moves'))
