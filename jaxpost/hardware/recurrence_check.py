"""Checks the results of the kernels for recurrences on this device, for the heads of a run's models.

The check runs before the programs of a run are compiled. If a kernel is wrong, XLA computes the recurrences.
`models/recurrence_kernels.py` has the kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.hardware import kernel_check
from jaxpost.models import recurrence, recurrence_kernels, recurrence_triton

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.config import CustomConfig, ModelConfig

RECURRENCE = 'recurrence'  # the name of the kernels
_ENDS = 40, 41, 130  # of the documents of a row: in a chunk, next to the border before, and after whole chunks
_LENGTH = 230  # the last document has whole chunks, too
_GROUPS = 2  # value heads of a key head


class Heads(NamedTuple):
  """Heads of a recurrence, see `recurrence.chunked`, and a kernel for them."""

  kernel: str
  size: int
  width: int
  channels: int  # decays of a head
  corrected: bool


def verify(compute: Compute, models: Iterable[ModelConfig | CustomConfig]) -> Compute:
  """Checks the kernels for the heads of each model; returns `compute`, without them if they are wrong.

  Like `kernel_check.verify`, it checks heads once, and a kernel that is wrong on one process is used on none.
  """
  checks = sorted({(RECURRENCE, x) for cfg in models for x in heads(compute.recurrence_kernel, cfg)})
  without = dataclasses.replace(compute, recurrence_kernel='')
  return kernel_check.without_wrong(compute, without, checks, trusted)


def heads(kernel: str, cfg: ModelConfig | CustomConfig) -> list[Heads]:
  """Returns the heads for which a kernel would run; none for a model without a recurrence that the kernel supports."""
  if not cfg.state_shapes or cfg.mixer == 'convolution':
    return []
  found = Heads(kernel, cfg.key_size, cfg.value_size, cfg.key_size if cfg.gate_rank else 1, cfg.mixer == 'delta')
  return [found] if any(_supported(found)) else []


def _supported(work: Heads) -> tuple[bool, bool]:
  """Returns whether the kernel supports rows, and whether it supports single tokens."""
  rows, tokens = (recurrence_kernels.supports(*work[:4], single=single) for single in (False, True))
  return rows, tokens


def computed_by(compute: Compute, cfg: ModelConfig) -> str:
  """Returns what computes the recurrences of a model, in words."""
  for found in heads(compute.recurrence_kernel, cfg):
    return {(True, True): 'kernel', (True, False): 'kernel for rows'}.get(_supported(found), 'kernel for single tokens')
  return 'XLA'


@functools.cache
def trusted(name: str, work: Heads, dtype: str) -> str:
  """Checks the kernels for heads; returns '' if they are right, otherwise what differs from XLA."""
  del name
  return kernel_check.judge(lambda: errors(work, dtype))


def errors(work: Heads, dtype: str) -> dict[str, float]:
  """Returns the errors of the kernels that support these heads: of results, states, and gradients of all inputs.

  An error is the largest difference from XLA in float32 over the largest value. Single tokens have no gradients. This
  checks what was compiled, not the formulas, which both share (`models/recurrence_chunk.py`).
  """
  draw = kernel_check.normal_numbers()
  rows, kv_heads = 2, 2
  q, k = (draw(rows, _LENGTH, kv_heads, work.size) / work.size**0.5 for _ in range(2))
  v, log_decay, beta = (draw(rows, _LENGTH, kv_heads * _GROUPS, n) for n in (work.width, work.channels, 1))
  # Half of the heads have slow decays, so that the state matters for several chunks.
  is_fast = jnp.arange(kv_heads * _GROUPS)[:, None] % 2
  terms = *(x.astype(dtype) for x in (q, k, v)), -jnp.exp(2 * log_decay - 7 + 5 * is_fast), jax.nn.sigmoid(beta[..., 0])
  state, g_state = (draw(rows, kv_heads * _GROUPS, work.size, work.width) for _ in range(2))
  runs = jnp.asarray(np.searchsorted(_ENDS, np.tile(np.arange(_LENGTH), (rows, 1)), side='right'), jnp.int32)

  def exact(terms, runs, state):
    return recurrence.chunked(*terms, runs=runs, state=state, dtype='float32', corrected=work.corrected)

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def of_rows(terms, runs, state, g):
    options = dict(kernel=work.kernel, dtype=dtype, corrected=work.corrected)
    fast = functools.partial(recurrence_kernels.over_rows, **options)
    (found, vjp), (expected, expected_vjp) = (
      jax.vjp(lambda terms, state, fn=fn: fn(terms, runs, state), inputs, state)
      for fn, inputs in ((fast, terms), (exact, tuple(x.astype(jnp.float32) for x in terms)))
    )
    return _errors((found, vjp(g)), (expected, expected_vjp(g)))

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def of_token(terms, runs, state):
    terms, runs = tuple(x[:, :1] for x in terms), runs[:, :1]
    found = recurrence_triton.one_token(terms, runs, state, corrected=work.corrected)
    return _errors(found, exact(terms, runs, state))

  supports_rows, supports_tokens = _supported(work)
  out: dict[str, jax.Array] = {}
  if supports_tokens:
    out |= {f'{name} of a token': x for name, x in zip(('out', 'state'), of_token(terms, runs, state))}
  if supports_rows:
    names = 'out', 'state', 'q', 'k', 'v', 'log_decay', 'beta', 'state before'
    out |= zip(names, of_rows(terms, runs, state, (draw(*v.shape), g_state)))
  return {name: float(x) for name, x in out.items()}


def _errors(found, expected) -> list[jax.Array]:
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return [jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]
