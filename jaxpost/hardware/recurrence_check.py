"""Checks the results of the kernel for recurrences on this device, for the heads of a run's models.

The check runs before the programs of a run are compiled. If the kernel is wrong, XLA computes the recurrences.
`models/recurrence.py` calls the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.hardware import kernel_check
from jaxpost.models import recurrence, recurrence_triton

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.config import CustomConfig, ModelConfig

RECURRENCE = 'recurrence'  # the name of the kernel
_ENDS = 40, 41, 130  # of the documents of a row: in a chunk, next to the border before, and after whole chunks
_LENGTH = 150
_GROUPS = 2  # value heads of a key head


class Heads(NamedTuple):
  """Heads of a recurrence, see `recurrence.chunked`."""

  size: int
  width: int
  corrected: bool


def verify(compute: Compute, models: Iterable[ModelConfig | CustomConfig]) -> Compute:
  """Checks the kernel for the heads of each model; returns `compute`, without the kernel if it is wrong.

  Like `kernel_check.verify`, it checks heads once, and a kernel that is wrong on one process is used on none.
  """
  checks = sorted({(RECURRENCE, x) for cfg in models for x in heads(cfg)})
  return kernel_check.without_wrong(compute, 'recurrence_kernel', checks, trusted)


def heads(cfg: ModelConfig | CustomConfig) -> list[Heads]:
  """Returns the heads for which the kernel would run; none for a model without a recurrence that it supports."""
  if not cfg.state_shapes or cfg.mixer == 'convolution':
    return []
  channels = cfg.key_size if cfg.gate_rank else 1
  supported = recurrence_triton.supports(cfg.key_size, cfg.value_size, channels)
  return [Heads(cfg.key_size, cfg.value_size, cfg.mixer == 'delta')] if supported else []


@functools.cache
def trusted(name: str, work: Heads, dtype: str) -> str:
  """Checks the kernel for heads; returns '' if it is right, otherwise what differs from XLA."""
  del name
  return kernel_check.judge(lambda: errors(work, dtype))


def errors(work: Heads, dtype: str) -> dict[str, float]:
  """Returns the errors of the kernel: of the result ('out'), the state, and the gradients of all inputs.

  An error is the largest difference from XLA in float32 over the largest value.
  """
  draw = kernel_check.normal_numbers()
  rows, kv_heads = 2, 2
  q, k = (draw(rows, _LENGTH, kv_heads, work.size) / work.size**0.5 for _ in range(2))
  v, log_decay, beta = (draw(rows, _LENGTH, kv_heads * _GROUPS, n) for n in (work.width, 1, 1))
  log_decay, beta = -jnp.exp(2 * log_decay - 2), jax.nn.sigmoid(beta[..., 0])
  state, g_state = (draw(rows, kv_heads * _GROUPS, work.size, work.width) for _ in range(2))
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  runs = jnp.asarray(np.searchsorted(_ENDS, np.tile(np.arange(_LENGTH), (rows, 1)), side='right'), jnp.int32)

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def measured(terms, state, g):
    options = dict(runs=runs, corrected=work.corrected)
    exact_terms = [x.astype(jnp.float32) for x in terms]
    expected, expected_vjp = jax.vjp(
      lambda terms, state: recurrence.chunked(*terms, state=state, dtype='float32', **options), exact_terms, state
    )
    found, vjp = jax.vjp(
      lambda terms, state: recurrence_triton.chunked(*terms, state=state, dtype=dtype, **options), list(terms), state
    )
    pairs = zip(*(jax.tree.leaves(x) for x in ((found, vjp(g)), (expected, expected_vjp(g)))))
    return [jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]

  names = 'out', 'state', 'q', 'k', 'v', 'log_decay', 'beta', 'state before'
  return dict(zip(names, map(float, measured((q, k, v, log_decay, beta), state, (draw(*v.shape), g_state)))))
