"""Checks the results of the grouped matmul kernels on this device, for the shapes of a run's experts.

The check runs before the programs of a run are compiled. If a kernel is wrong, XLA computes the experts.
`models/grouped.py` calls the kernels.

Legend: N rows, E groups, D inputs, F outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.hardware import kernel_check
from jaxpost.matmul import Compute
from jaxpost.models import lora, transformer
from jaxpost.models.grouped import grouped

if TYPE_CHECKING:
  from jaxpost.models.config import CustomConfig, ModelConfig

GROUPED = 'grouped'  # the name of the kernel
_GROUPS = 4
_ROWS = (6, 90, 310)  # rows per group on average: the kernel has tiles of three sizes
_BEYOND = 1e4  # value of rows that are in no group, which the kernel must ignore


class Matrix(NamedTuple):
  """Shape of the matrix of each group."""

  inputs: int
  outputs: int


def verify(compute: Compute, models: Iterable[ModelConfig | CustomConfig], shards: Collection[int] = (1,)) -> Compute:
  """Checks the kernel for each matrix of the experts of a run; returns `compute`, without the kernel if it is wrong.

  Like `kernel_check.verify`, it checks a shape once, and a kernel that is wrong on one process is used on none.

  Args:
    models: the models that the run trains, samples from or scores with.
    shards: numbers of devices that the matrices are split over.
  """
  checks = sorted({(GROUPED, matrix) for cfg in models for n in shards for matrix in matrices(cfg, n)})
  return kernel_check.without_wrong(compute, dataclasses.replace(compute, grouped_kernel=False), checks, trusted)


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


@functools.cache
def trusted(name: str, matrix: Matrix, dtype: str) -> str:
  """Checks the kernel for a matrix; returns '' if it is right, otherwise what differs from XLA."""
  del name
  return kernel_check.judge(lambda: errors(matrix, dtype))


def errors(matrix: Matrix, dtype: str) -> dict[str, float]:
  """Returns the errors of the kernel: {'out': of the result, 'x', 'w': of the gradients of rows and matrices}.

  An error is the largest difference from XLA in float32 over the largest value; the largest of all `_ROWS` counts.
  """
  compute = Compute(dtype, platform='gpu', ragged=jax.default_backend() == 'tpu', grouped_kernel=True)

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def measured(key: jax.Array) -> list[jax.Array]:
    dtypes = ((compute.dtype, 'float32'), ('float32', compute.dtype))  # if all weights are trained, and of adapters
    cases = [jnp.stack(_errors(matrix, compute, rows, key, *pair)) for rows in _ROWS for pair in dtypes]
    return list(jnp.max(jnp.stack(cases), axis=0))

  return dict(zip(('out', 'x', 'w'), map(float, measured(jax.random.key(0)))))


def _errors(matrix: Matrix, compute: Compute, rows: int, key: jax.Array, x_dtype: str, w_dtype: str) -> list[jax.Array]:
  """Compares groups that end inside a tile, a group without rows, and rows that are in no group.

  Args:
    x_dtype: dtype of the rows, of their gradient and of the result.
    w_dtype: dtype of the matrices and of their gradient.
  """
  count = rows * _GROUPS
  sizes = jnp.array([1, 0, count // 4, count // 2 + 1])
  group = jnp.sum(jnp.arange(count)[:, None] >= jnp.cumsum(sizes), axis=1)  # [N] group of each row; E: none
  keys = jax.random.split(key, 3)

  def draw(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape).astype(compute.dtype)

  w = draw(keys[0], _GROUPS, *matrix)
  x, g = (jnp.where(group[:, None] < _GROUPS, draw(k, count, n), _BEYOND) for k, n in zip(keys[1:], matrix))

  def exact(x: jax.Array, w: jax.Array) -> jax.Array:
    in_group = jnp.arange(_GROUPS)[:, None, None] == group[:, None]  # [E, N, 1]
    return jnp.einsum('end,edf->nf', x * in_group, w, precision='highest')

  expected, expected_vjp = jax.vjp(exact, x.astype(jnp.float32), w.astype(jnp.float32))
  out, vjp = jax.vjp(lambda x, w: grouped(x, w, sizes, compute, x_dtype), x.astype(x_dtype), w.astype(w_dtype))
  pairs = zip((out, *vjp(g.astype(x_dtype))), (expected, *expected_vjp(g.astype(jnp.float32))))
  return [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]
