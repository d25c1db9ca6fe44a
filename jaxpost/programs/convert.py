"""Compiled conversions of parameters before functions that are not compiled, for exports of quantized models."""

from collections.abc import Callable

import jax


def after(first: Callable, then: Callable) -> Callable:
  """Returns the function then(first(x)), with `first` compiled once for each shape of x."""
  first = jax.jit(first)
  return lambda x: then(first(x))
