"""Layouts: the one module where logical axes become mesh axes.

Parameters and activations name their dimensions ('embed', 'heads', ...); a phase (train, rollout) has a mesh and rules
from logical to mesh axes. A `Layout` has both. phases.py makes the layouts of a config.
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

# Training gathers the weights of each layer over fsdp when it uses the layer. Sampling would pay for that at every
# token, so it splits weights over tensor only. In both, experts are split over the axis expert, and tokens are
# dispatched to them (models/moe.py). Training also splits all other parameters over that axis, as over fsdp.
_IN_BOTH = {'vocab': 'tensor', 'heads': 'tensor', 'kv_heads': 'tensor', 'mlp': 'tensor', 'expert': 'expert'}
RULES = {
  'train': {'batch': BATCH_AXES, 'embed': ('fsdp', 'expert'), **_IN_BOTH, 'time': 'context'},
  # Each device needs the full vocabulary of a few slots.
  'rollout': {'batch': BATCH_AXES, 'slots': (*BATCH_AXES, 'tensor'), **_IN_BOTH},
}


class TiedWeight(NamedTuple):
  """A parameter that a program uses in two places, such as a tied embedding.

  value: the parameter, gathered and in the compute dtype; it has no gradient.
  sums: [n, ...], never read. Its gradient is that of the parameter, one part for each of n devices: the gradients of
    both uses are added before they are reduced across devices.
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
    del dtype  # `value` is already in the compute dtype
    return self.value


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the rules by which a phase uses it."""

  mesh: Mesh
  phase: str = 'train'
  reduce_dtype: str = 'float32'  # dtype in which gradients are summed over devices

  @property
  def batch_shards(self) -> int:
    """Number of parts that the batch dimension is split into."""
    return math.prod(self.mesh.shape[a] for a in BATCH_AXES)

  def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
    """Returns the partition of an array with the logical `axes`.

    A dimension whose size is no multiple of its shards (4 KV heads on 8 tensor shards) is replicated; slots are then
    split over fewer axes.
    """
    rules = RULES[self.phase]
    parts, used = [], set()
    for i, axis in enumerate(axes):
      names = tuple(n for n in axes_of(rules.get(axis)) if n not in used and self.mesh.shape[n] > 1)
      while shape is not None and shape[i] % math.prod(self.mesh.shape[n] for n in names):
        names = names[:-1] if axis == 'slots' else ()
      used |= set(names)  # a mesh axis can split only one dimension of an array
      parts.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*parts)

  def sharding(self, axes: Sequence[str | None] = (), shape: Sequence[int] | None = None) -> NamedSharding:
    """Returns the sharding of an array with the logical `axes`, see `spec`."""
    return NamedSharding(self.mesh, self.spec(axes, shape))

  def __call__(self, x, *axes):
    """Constrains the sharding of an activation inside a program; does nothing on one device."""
    if self.mesh.size == 1:
      return x
    return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

  def of_tokens(self, shape: Sequence[int]) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Returns (partition of an array of tokens [B, T, ...], the mesh axes that it is split over)."""
    spec = self.spec(('batch', 'time'), shape)
    return spec, tuple(a for part in spec for a in axes_of(part))

  def sum_over_tokens(
    self, fn: Callable, tokens: tuple[jax.Array, ...], *axes: str | None, of: Any = None
  ) -> jax.Array | TiedWeight | None:
    """Returns fn(*tokens), a sum over tokens such as a gradient, reduced to the shards of the layout.

    Each device sums over its own tokens, then a reduce-scatter adds the parts (`reduced`). XLA's partitioner would
    all-reduce the whole sum, or move the activations of rows that are split over `context`.

    Args:
      fn: arrays [b, t, ...] of some tokens -> an array with the logical `axes`.
      tokens: arrays [B, T, ...].
      of: the parameter whose gradient the sum is.

    Returns:
      The array, or None if the sum is not split over the mesh axes of the tokens. For a `TiedWeight`, a TiedWeight
      with the sums of each device.
    """
    token_spec, over = self.of_tokens(tokens[0].shape)
    spec = self.spec(axes, jax.eval_shape(fn, *tokens).shape)  # of the sum, which is laid out as its parameter
    is_tied = isinstance(of, TiedWeight)
    is_scattered = any(set(axes_of(part)) & set(over) for part in spec)
    if not (is_tied or is_scattered or (over and self.reduce_dtype != 'float32')):
      return None
    sums = jax.shard_map(
      lambda *tokens: fn(*tokens)[None],  # [1, ...] the sum over a device's own tokens
      mesh=self.mesh,
      in_specs=token_spec,
      out_specs=PartitionSpec(over),
      axis_names=set(over),
      check_vma=False,
    )(*tokens)
    return TiedWeight(None, sums) if is_tied else self.reduced(sums, axes, over)

  def reduced(self, sums: jax.Array, axes: Sequence[str | None], over: tuple[str, ...]) -> jax.Array:
    """Adds `sums` [n, ...] of n devices, by a reduce-scatter to the shards of the layout.

    Args:
      sums: the first dimension is split over the mesh axes `over`.
      axes: logical axes of the other dimensions.
    """
    if self.mesh.size == 1:
      return jnp.sum(sums, axis=0)
    spec = self.spec(axes, sums.shape[1:])
    scattered = [part if set(axes_of(part)) & set(over) else None for part in spec]
    all_reduced = tuple(a for a in over if not any(a in axes_of(part) for part in scattered))

    def reduce_local(x):
      x = x[0].astype(self.reduce_dtype) if x.dtype == jnp.float32 else x[0]
      for i, part in enumerate(scattered):
        if part:
          x = jax.lax.psum_scatter(x, part, scatter_dimension=i, tiled=True)
      return (jax.lax.psum(x, all_reduced) if all_reduced else x).astype(sums.dtype)

    in_specs = PartitionSpec(over, *(None if scatter else part for part, scatter in zip(spec, scattered)))
    return jax.shard_map(reduce_local, mesh=self.mesh, check_vma=False, in_specs=in_specs, out_specs=spec)(sums)

  def put(self, tree: Any, *axes: str | None) -> Any:
    """Returns host arrays as global device arrays; each process copies the shards of its own devices."""
    tree = jax.tree.map(np.asarray, tree)
    shardings = jax.tree.map(lambda x: self.sharding(axes[: x.ndim], x.shape), tree)
    if jax.process_count() == 1:
      return jax.device_put(tree, shardings)  # in one call for all arrays, as a call takes 0.5 ms
    return jax.tree.map(
      lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__, dtype=x.dtype), tree, shardings
    )


def row_shards(layout: Any) -> int:
  """Returns the number of parts of a row (`models/context_parallel.py`): 1 if `layout` is another function."""
  if not isinstance(layout, Layout) or layout.phase == 'rollout':
    return 1
  return layout.mesh.shape['context']


def axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """Returns the mesh axes of one dimension of a PartitionSpec."""
  return (part,) if isinstance(part, str) else part or ()
