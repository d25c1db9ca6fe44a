"""The program of loading: writes a piece of a parameter, read from a file, into the shards that it belongs to."""

import jax

from jaxpost.formats import tensor_reader

# Donates its first argument, so that a piece is written in place.
write = jax.jit(tensor_reader.write, donate_argnums=0, static_argnums=(3, 4, 5, 6, 7))
