"""Layouts: the one place where logical axes become mesh axes.

A parameter or activation names its dimensions ('embed', 'heads', ...); a phase (train, rollout) has a mesh and a dict
of rules from logical to mesh axes. A `Layout` joins the two. phases.py makes those of a config.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'expert', 'context', 'tensor')
BATCH_AXES = ('data', 'fsdp', 'expert')

# Training gathers each layer's weights over fsdp when it is used; sampling would pay that at every token, so there
# weights are split over tensor only. Experts stay where they are in both: tokens are dispatched to them
# (models/moe.py). All other parameters are split over that axis as over fsdp.
RULES = {
  'train': {
    'batch': BATCH_AXES,
    'embed': ('fsdp', 'expert'),
    'vocab': 'tensor',
    'heads': 'tensor',
    'kv_heads': 'tensor',
    'mlp': 'tensor',
    'expert': 'expert',
    'time': 'context',
  },
  'rollout': {
    'batch': BATCH_AXES,
    'slots': (*BATCH_AXES, 'tensor'),  # where each device needs the full vocabulary of a few
    'vocab': 'tensor',
    'heads': 'tensor',
    'kv_heads': 'tensor',
    'mlp': 'tensor',
    'expert': 'expert',
  },
}


class TiedWeight(NamedTuple):
  """A parameter that a program uses in two places, such as a tied embedding.

  value: the parameter, gathered and in the compute type; it has no gradient.
  sums: [n, ...], never read. Its gradient is that of the parameter, one part
    per device: the gradients of both uses are added before they are reduced across devices.
  """

  value: jax.Array
  sums: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.sums.shape[1:]

  @property
  def dtype(self) -> jnp.dtype:
    return self.sums.dtype

  def astype(self, dtype: Any) -> jax.Array:
    del dtype  # `value` is in the compute type already
    return self.value


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the rules by which a phase uses it."""

  mesh: Mesh
  phase: str = 'train'
  reduce_dtype: str = 'float32'  # in which gradients are summed over devices

  @property
  def batch_shards(self) -> int:
    """Number of parts the batch dimension is split into."""
    return math.prod(self.mesh.shape[a] for a in BATCH_AXES)

  def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
    """The partition of an array whose dimensions are called `axes`.

    A dimension that its mesh axis does not divide (4 KV heads on 8 tensor shards) stays whole; slots are split over
    fewer axes then.
    """
    rules = RULES[self.phase]
    parts, used = [], set()
    for i, axis in enumerate(axes):
      names = tuple(n for n in axes_of(rules.get(axis)) if n not in used and self.mesh.shape[n] > 1)
      while shape is not None and shape[i] % math.prod(self.mesh.shape[n] for n in names):
        names = names[:-1] if axis == 'slots' else ()
      used |= set(names)  # a mesh axis splits one dimension of an array at most
      parts.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*parts)

  def sharding(self, axes: Sequence[str | None] = (), shape: Sequence[int] | None = None) -> NamedSharding:
    """The sharding of an array whose dimensions are called `axes`, see `spec`."""
    return NamedSharding(self.mesh, self.spec(axes, shape))

  def __call__(self, x, *axes):
    """Pins an activation inside a program; free on one device."""
    if self.mesh.size == 1:
      return x
    return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

  def of_tokens(self, shape: Sequence[int]) -> tuple[PartitionSpec, tuple[str, ...]]:
    """(partition of an array of tokens [B, T, ...], the mesh axes that it is split over)."""
    rows = self.spec(('batch', 'time'), shape)
    return rows, tuple(a for part in rows for a in axes_of(part))

  def sum_over_tokens(
    self, fn: Callable, tokens: tuple[jax.Array, ...], *axes: str | None, of: Any = None
  ) -> jax.Array | TiedWeight | None:
    """fn(*tokens), a sum over tokens, reduced to the shards of its layout.

    Each device sums over its own tokens, then a reduce-scatter adds the parts (`reduced`). XLA's partitioner would
    all-reduce the whole sum, or move the activations of rows that are split over `context`.

    Args:
      fn: arrays [b, t, ...] of some tokens -> an array of dimensions `axes`.
      tokens: arrays [B, T, ...].
      of: the parameter whose gradient it is.

    Returns:
      The array, or None: no part of it is kept, or tokens cannot be split. What a `Shared` parameter takes, of one.
    """
    rows, over = self.of_tokens(tokens[0].shape)
    spec = self.spec(axes, jax.eval_shape(fn, *tokens).shape)  # of the sum, as its parameter is laid out
    shared = isinstance(of, TiedWeight)
    kept = any(set(axes_of(part)) & set(over) for part in spec)
    if not (shared or kept or (over and self.reduce_dtype != 'float32')):
      return None
    sums = jax.shard_map(
      lambda *tokens: fn(*tokens)[None],  # the sum of a device's own tokens, [1, ...]
      mesh=self.mesh,
      in_specs=rows,
      out_specs=PartitionSpec(over),
      axis_names=set(over),
      check_vma=False,
    )(*tokens)
    return TiedWeight(None, sums) if shared else self.reduced(sums, axes, over)

  def reduced(self, sums: jax.Array, axes: Sequence[str | None], over: tuple[str, ...]) -> jax.Array:
    """Sums [n, ...] over n devices, by a reduce-scatter to the shards of the layout.

    Args:
      sums: split over the mesh axes `over` in their first dimension.
      axes: the other dimensions.
    """
    if self.mesh.size == 1:
      return jnp.sum(sums, axis=0)
    spec = self.spec(axes, sums.shape[1:])
    kept = [part if set(axes_of(part)) & set(over) else None for part in spec]
    left = tuple(a for a in over if not any(a in axes_of(p) for p in kept))  # summed, but not split over

    def local(x):
      x = x[0].astype(self.reduce_dtype) if x.dtype == jnp.float32 else x[0]
      for i, part in enumerate(kept):
        if part:
          x = jax.lax.psum_scatter(x, part, scatter_dimension=i, tiled=True)
      return (jax.lax.psum(x, left) if left else x).astype(sums.dtype)

    rest = (None if mine else part for part, mine in zip(spec, kept))
    return jax.shard_map(local, mesh=self.mesh, check_vma=False, in_specs=PartitionSpec(over, *rest), out_specs=spec)(
      sums
    )

  def put(self, tree: Any, *axes: str | None) -> Any:
    """Host arrays become global device arrays; processes read the parts of their own devices."""
    tree = jax.tree.map(np.asarray, tree)
    shardings = jax.tree.map(lambda x: self.sharding(axes[: x.ndim], x.shape), tree)
    if jax.process_count() == 1:
      return jax.device_put(tree, shardings)  # at once: a call takes 0.5 ms
    return jax.tree.map(
      lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__, dtype=x.dtype), tree, shardings
    )


def row_shards(layout: Any) -> int:
  """Returns the number of parts of a row (`models/context_parallel.py`); `layout` may be any `constrain` function."""
  if not isinstance(layout, Layout) or layout.phase == 'rollout':
    return 1
  return layout.mesh.shape['context']


def axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes in one place of a PartitionSpec."""
  return (part,) if isinstance(part, str) else part or ()
