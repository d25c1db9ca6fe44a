"""Checks the results of the kernels for layers on this device: those of experts and of recurrences.

The check runs before the programs of a run are compiled. If a kernel is wrong for one shape, XLA computes all layers of
its kind. `models/grouped.py` and `models/recurrence_kernels.py` call the kernels.

Legend: N rows, E groups, D inputs, F outputs.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.hardware import kernel_check
from jaxpost.matmul import Compute
from jaxpost.models import lora, recurrence, recurrence_kernels, recurrence_triton, transformer
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.models.grouped import grouped

EXPERTS, RECURRENCE = 'grouped', 'recurrence'  # names of the kernels
_EXPERTS = 4
_ROWS = (6, 90, 310)  # rows per group on average: the kernel has tiles of three sizes
_BEYOND = 1e4  # value of rows that are in no group, which the kernel must ignore
# Ends of documents in two rows: in a chunk, after one token, and at borders of chunks of 32 and 64 tokens.
_ENDS = (40, 41, 192), (64, 130, 150)
_LENGTH = 230  # documents have whole chunks, and the rows end inside one


class Matrix(NamedTuple):
  """Shape of the matrix of each group."""

  inputs: int
  outputs: int


class Heads(NamedTuple):
  """The heads of a recurrence on a device, see `recurrence.chunked`, and a kernel for them."""

  kernel: str
  size: int
  width: int
  channels: int  # decays of a head
  corrected: bool
  key_heads: int
  value_heads: int


def verify(compute: Compute, models: Iterable[ModelConfig | CustomConfig], shards: Collection[int] = (1,)) -> Compute:
  """Checks the kernels in the shapes of the models of a run; returns `compute`, without a kernel that is wrong.

  Like `kernel_check.verify`, it checks a shape once, and a kernel that is wrong on one process is used on none.

  Args:
    models: the models that the run trains, samples from or scores with.
    shards: numbers of devices that the matrices of experts and the heads of recurrences are split over.
  """
  experts, recurrences = set(), set()
  for cfg in models:
    experts |= {(EXPERTS, x) for n in shards for x in (matrices(cfg, n) if compute.grouped_kernel else ())}
    recurrences |= {(RECURRENCE, x) for n in shards for x in heads(compute.recurrence_kernel, cfg, n)}
  without = dataclasses.replace(compute, grouped_kernel=False)
  compute = kernel_check.without_wrong(compute, without, sorted(experts), trusted)
  without = dataclasses.replace(compute, recurrence_kernel='')
  return kernel_check.without_wrong(compute, without, sorted(recurrences), trusted)


def matrices(cfg: ModelConfig | CustomConfig, shards: int = 1) -> set[Matrix]:
  """Returns the matrices of the experts and of their adapters on a device; none for a dense model."""
  if not cfg.experts:
    return set()
  table = transformer.param_table(cfg)
  if cfg.lora:
    table |= lora.adapter_rows(table, cfg)
  out = set()
  for spec in table.values():
    if spec.matrix and 'expert' in spec.axes:
      sides = zip(spec.shape[spec.stack :], spec.axes[spec.stack :])
      a, b = (n // shards if axis == 'mlp' and n % shards == 0 else n for n, axis in sides)
      out |= {Matrix(a, b), Matrix(b, a)}  # the gradient of the rows multiplies by the transposed matrix
  return out


def heads(kernel: str, cfg: ModelConfig | CustomConfig, shards: int = 1) -> list[Heads]:
  """Returns the heads for which a kernel would run; none for a model without a recurrence that the kernel supports.

  shards: number of devices that they are split over, as `recurrence_kernels.over_mesh` does.
  """
  if not cfg.state_shapes or cfg.mixer == 'convolution':
    return []
  key_heads, value_heads = cfg.key_heads, cfg.value_heads
  if value_heads % shards == 0:
    value_heads //= shards
    if key_heads % shards == 0:
      key_heads //= shards
    elif key_heads > 1:  # repeated
      key_heads = value_heads
  of_kind = kernel, cfg.key_size, cfg.value_size, cfg.key_size if cfg.gate_rank else 1, cfg.mixer == 'delta'
  found = Heads(*of_kind, key_heads=key_heads, value_heads=value_heads)
  return [found] if any(_supported(found)) else []


def _supported(work: Heads) -> list[bool]:
  """Returns whether the kernel supports rows, and whether it supports single tokens."""
  return [recurrence_kernels.supports(*work[:4], single=single) for single in (False, True)]


def computed_by(compute: Compute, cfg: ModelConfig) -> str:
  """Returns what computes the recurrences of a model, in words."""
  for found in heads(compute.recurrence_kernel, cfg):
    rows, tokens = _supported(found)
    return 'kernel' if rows and tokens else 'kernel for rows' if rows else 'kernel for single tokens'
  return 'XLA'


@functools.cache
def trusted(name: str, work: Matrix | Heads, dtype: str) -> str:
  """Checks a kernel for a matrix or for heads; returns '' if it is right, otherwise what differs from XLA."""
  return kernel_check.judge(lambda: errors(name, work, dtype))


def errors(name: str, work: Any, dtype: str) -> dict[str, float]:
  """Returns {array: error of a kernel}, where an error is the largest difference from XLA over the largest value."""
  return _of_experts(work, dtype) if name == EXPERTS else _of_recurrences(work, dtype)


def _of_experts(matrix: Matrix, dtype: str) -> dict[str, float]:
  """Returns the errors of the kernel: {'out': of the result, 'x', 'w': of the gradients of rows and matrices}.

  The largest of all `_ROWS` counts.
  """
  compute = Compute(dtype, platform='gpu', ragged=jax.default_backend() == 'tpu', grouped_kernel=True)

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def measured(key: jax.Array) -> list[jax.Array]:
    dtypes = ((compute.dtype, 'float32'), ('float32', compute.dtype))  # if all weights are trained, and of adapters
    cases = [jnp.stack(_in_groups(matrix, compute, rows, key, *pair)) for rows in _ROWS for pair in dtypes]
    return list(jnp.max(jnp.stack(cases), axis=0))

  return dict(zip(('out', 'x', 'w'), map(float, measured(jax.random.key(0)))))


def _in_groups(
  matrix: Matrix, compute: Compute, rows: int, key: jax.Array, x_dtype: str, w_dtype: str
) -> list[jax.Array]:
  """Compares groups that end inside a tile, a group without rows, and rows that are in no group.

  Args:
    x_dtype: dtype of the rows, of their gradient and of the result.
    w_dtype: dtype of the matrices and of their gradient.
  """
  count = rows * _EXPERTS
  sizes = jnp.array([1, 0, count // 4, count // 2 + 1])
  group = jnp.sum(jnp.arange(count)[:, None] >= jnp.cumsum(sizes), axis=1)  # [N] group of each row; E: none
  keys = jax.random.split(key, 3)

  def draw(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape).astype(compute.dtype)

  w = draw(keys[0], _EXPERTS, *matrix)
  x, g = (jnp.where(group[:, None] < _EXPERTS, draw(k, count, n), _BEYOND) for k, n in zip(keys[1:], matrix))

  def exact(x: jax.Array, w: jax.Array) -> jax.Array:
    in_group = jnp.arange(_EXPERTS)[:, None, None] == group[:, None]  # [E, N, 1]
    return jnp.einsum('end,edf->nf', x * in_group, w, precision='highest')

  expected, expected_vjp = jax.vjp(exact, x.astype(jnp.float32), w.astype(jnp.float32))
  out, vjp = jax.vjp(lambda x, w: grouped(x, w, sizes, compute, x_dtype), x.astype(x_dtype), w.astype(w_dtype))
  return kernel_check.largest_errors((out, vjp(g.astype(x_dtype))), (expected, expected_vjp(g.astype(jnp.float32))))


def _of_recurrences(work: Heads, dtype: str) -> dict[str, float]:
  """Returns the errors of the kernels that support these heads: of results, states, and gradients of all inputs.

  Single tokens have no gradients. This checks what was compiled, not the formulas, which both share
  (`models/recurrence_chunk.py`).
  """
  draw, rows = kernel_check.normal_numbers(), len(_ENDS)
  q, k = (draw(rows, _LENGTH, work.key_heads, work.size) / work.size**0.5 for _ in range(2))
  v, log_decay, beta = (draw(rows, _LENGTH, work.value_heads, n) for n in (work.width, work.channels, 1))
  # Half of the heads have slow decays, so that the state matters for several chunks.
  is_fast = jnp.arange(work.value_heads)[:, None] % 2
  terms = *(x.astype(dtype) for x in (q, k, v)), -jnp.exp(2 * log_decay - 7 + 5 * is_fast), jax.nn.sigmoid(beta[..., 0])
  state, g_state = (draw(rows, work.value_heads, work.size, work.width) for _ in range(2))
  runs = jnp.asarray([np.searchsorted(ends, np.arange(_LENGTH), side='right') for ends in _ENDS], jnp.int32)

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
    return kernel_check.largest_errors((found, vjp(g)), (expected, expected_vjp(g)))

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def of_token(terms, runs, state):
    terms, runs = tuple(x[:, :1] for x in terms), runs[:, :1]
    found = recurrence_triton.one_token(terms, runs, state, corrected=work.corrected)
    return kernel_check.largest_errors(found, exact(terms, runs, state))

  supports_rows, supports_tokens = _supported(work)
  out: dict[str, jax.Array] = {}
  if supports_tokens:
    out |= {f'{name} of a token': x for name, x in zip(('out', 'state'), of_token(terms, runs, state))}
  if supports_rows:
    names = 'out', 'state', 'q', 'k', 'v', 'log_decay', 'beta', 'state before'
    out |= zip(names, of_rows(terms, runs, state, (draw(*v.shape), g_state)))
  return {name: float(x) for name, x in out.items()}
