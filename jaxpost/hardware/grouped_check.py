"""Numerical check of the kernel for products of groups on this device, in the shapes of a run's experts.

It runs before the programs of a run are compiled; where the kernel is wrong, XLA computes the experts.
`models/grouped_triton.py` has the kernel.

Legend: N rows, E groups, D inputs, F outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
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
_ROWS = (6, 90, 310)  # of a group on average: the kernel has tiles for few rows, for more, and for many
_BEYOND = 1e4  # in rows of no group, which must not count


class Matrix(NamedTuple):
  """Sides of the matrix of each group."""

  inputs: int
  outputs: int


def verify(compute: Compute, models: Iterable[ModelConfig | CustomConfig], shards: Collection[int] = (1,)) -> Compute:
  """Checks the kernel for each matrix of the experts of a run; returns `compute`, without a kernel that is wrong.

  Like `kernel_check.verify`, it checks a shape once, and one process that finds the kernel wrong decides for all.

  Args:
    models: which the run trains, samples from or scores with.
    shards: numbers of devices that the matrices are split over.
  """
  if not compute.grouped_kernel:
    return compute
  works = sorted({(GROUPED, x) for cfg in models for n in shards for x in matrices(cfg, n)})
  if not works:
    return compute
  whys = kernel_check.faults(works, compute.dtype, trusted)
  wrong = [f'{x.inputs} x {x.outputs} {why}' for (_, x), why in zip(works, whys) if why]
  if not wrong:
    return compute
  where = kernel_check.where_it_runs()
  logging.warning('experts by %s are wrong on %s: %s; XLA computes all of them', GROUPED, where, '; '.join(wrong))
  return dataclasses.replace(compute, grouped_kernel=False)


def matrices(cfg: ModelConfig | CustomConfig, shards: int = 1) -> set[Matrix]:
  """Returns the matrices of the experts and of their adapters on a device, none for a dense model."""
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
      out |= {Matrix(a, b), Matrix(b, a)}  # the gradient of the rows reads the matrix transposed
  return out


@functools.cache
def trusted(name: str, matrix: Matrix, dtype: str) -> str:
  """Checks a kernel; returns '' if it is right, else what differs from XLA."""
  del name
  return kernel_check.judge(lambda: errors(matrix, dtype))


def errors(matrix: Matrix, dtype: str) -> dict[str, float]:
  """Returns {'out', 'x', 'w'}: how far the kernel is from XLA in float32, forward and in the gradients.

  An error is the largest difference over the largest value, of few rows, of more and of many.
  """
  compute = Compute(dtype, platform='gpu', grouped_kernel=True)

  @functools.partial(jax.jit, compiler_options=kernel_check.compiler_options())
  def measured(key: jax.Array) -> list[jax.Array]:
    types = ((compute.dtype, 'float32'), ('float32', compute.dtype))  # of all weights, and of adapters
    found = [jnp.stack(_errors(matrix, compute, rows, key, *kinds)) for rows in _ROWS for kinds in types]
    return list(jnp.max(jnp.stack(found), axis=0))

  return dict(zip(('out', 'x', 'w'), map(float, measured(jax.random.key(0)))))


def _errors(matrix: Matrix, compute: Compute, rows: int, key: jax.Array, out: str, kind: str) -> list[jax.Array]:
  """Compares groups that end inside of a tile, one without rows, and rows of no group.

  Args:
    out: type of the rows, of their gradient and of the result.
    kind: type of the matrices and of their gradient.
  """
  count = rows * _GROUPS
  sizes = jnp.array([1, 0, count // 4, count // 2 + 1])
  group = jnp.sum(jnp.arange(count)[:, None] >= jnp.cumsum(sizes), axis=1)  # [N] of each row; E: none
  keys = jax.random.split(key, 3)

  def draw(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape).astype(compute.dtype)

  w = draw(keys[0], _GROUPS, *matrix)
  x, g = (jnp.where(group[:, None] < _GROUPS, draw(k, count, n), _BEYOND) for k, n in zip(keys[1:], matrix))

  def exact(x: jax.Array, w: jax.Array) -> jax.Array:
    own = jnp.arange(_GROUPS)[:, None, None] == group[:, None]  # [E, N, 1]
    return jnp.einsum('end,edf->nf', x * own, w, precision='highest')

  right, right_back = jax.vjp(exact, x.astype(jnp.float32), w.astype(jnp.float32))
  ours, back = jax.vjp(lambda x, w: grouped(x, w, sizes, compute, out), x.astype(out), w.astype(kind))
  pairs = zip((ours, *back(g.astype(out))), (right, *right_back(g.astype(jnp.float32))))
  return [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]
