"""Lower bound on a program's collective traffic, from its shardings alone.

Figures are per micro-batch, in bytes that one device of a ring receives: an all-gather of n shards of s bytes costs
(n - 1) s, a reduce-scatter the same, an all-reduce of b bytes 2 b (n - 1) / n. By mesh axis, training communicates:

  fsdp     each matrix is gathered once forward and once backward, in the dtype of products, and its gradient is
           reduced in the dtype of parameters. All but experts are split over fsdp and expert together.
  tensor   two activations per layer are summed forward, two backward, and one more if the layer is recomputed.
  expert   a token goes to each device with one of its experts, all equally likely, and back; so do its gradients.
  context  keys and values of a layer are gathered forward, and again if it is recomputed, and their gradients are
           scattered; gradients of parameters are summed as over data.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxpost.distributed.bridge import make_bridge
from jaxpost.programs.generate import DecodeState
from jaxpost.types import Batch

if TYPE_CHECKING:
  from jax.sharding import PartitionSpec

  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.models.parameters import Param
  from jaxpost.stage.place import PlacedStage

_SAMPLED = 16  # devices over which the bytes of a reshard are averaged


def of_program(
  placed: PlacedStage, layout: Layout, name: str, args: Sequence[Any], times: int
) -> dict[str, dict[str, float]]:
  """Returns {kind: {axis: bytes}} of a program with these arguments; {} for programs without a bound.

  layout: of the program; times: calls that share the work.
  """
  model = placed.model
  second = args[1] if len(args) > 1 else None
  bound = functools.partial(of_pass, model, layout, compute=placed.compute, param_dtype=placed.config.model.param_dtype)
  if isinstance(second, Batch):
    return bound(second.tokens.shape, train=name == 'update')
  if isinstance(second, DecodeState):
    block = min(placed.decode_block, placed.config.rollout.max_new_tokens)
    return bound((block, second.positions.shape[0], 1), train=False)
  if name == 'prefill':
    return bound((1, *args[1].shape), train=False)
  if name == 'reshard':
    bridge = make_bridge(placed.train, placed.rollout)
    return of_reshard(
      model,
      args[0],
      times,
      train=placed.train,
      rollout=bridge.source if bridge else placed.rollout,
      dtype=placed.compute.dtype,
    )
  return {}


def of_pass(
  model: Model, layout: Layout, shape: tuple[int, int, int], *, compute: Compute, param_dtype: str, train: bool
) -> dict[str, dict[str, float]]:
  """Returns {kind: {axis: bytes}} of a pass over tokens [M, B, T], or of an update on them."""
  micro, rows, length = shape
  parts = layout.mesh.shape['context']
  tokens = math.ceil(rows / layout.batch_shards) * length // parts
  single_pass = _Pass(
    model,
    layout,
    compute,
    train,
    tokens,
    activation=tokens * model.config.hidden_size * jnp.dtype(compute.residual).itemsize,
    wide=jnp.dtype(compute.dtype).itemsize,
    full=jnp.dtype(param_dtype).itemsize,
  )
  out: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
  if parts > 1:  # outputs of the last layer are moved from stripes to contiguous parts
    out['all-to-all']['context'] += micro * (1 + train) * single_pass.activation * (parts - 1) / parts
  for path, param in model.table.items():
    if path in model.mtp and not (train and model.trains_mtp):  # not run by any program
      continue
    for traffic in (single_pass.of_weights(path, param), single_pass.of_activations(path, param)):
      for kind, axis, size in traffic:
        out[kind][axis] += micro * size
  return {k: dict(v) for k, v in out.items()}


@dataclasses.dataclass(frozen=True)
class _Pass:
  """A pass over one micro-batch, or an update on it; its methods yield (kind, axis, bytes that a device receives).

  tokens: of a device. activation: bytes of their residual stream. wide, full: bytes of a number in matrix products and
  of a stored parameter.
  """

  model: Model
  layout: Layout
  compute: Compute
  train: bool
  tokens: int
  activation: int
  wide: int
  full: int

  def shard(self, param: Param) -> tuple[int, ...]:
    """Returns the shape of a device's part of a parameter."""
    return self.layout.sharding(param.axes, param.shape).shard_shape(param.shape)

  def of_weights(self, path: str, param: Param) -> Iterator[tuple[str, str, float]]:
    """Yields the collectives of a parameter and its gradient."""
    sizes = self.layout.mesh.shape
    shard = math.prod(self.shard(param))
    learns = self.train and path not in self.model.frozen
    for axes in _gathered(self.layout.spec(param.axes, param.shape), param):
      n = math.prod(sizes[a] for a in axes)
      times = 2 if self.train and param.stacked else 1  # again in the backward pass of a layer
      yield 'all-gather', '+'.join(axes), times * shard * (n - 1) * self.wide
      if learns:
        yield 'reduce-scatter', '+'.join(axes), shard * (n - 1) * self.full
    for axis in ('context', 'data'):
      n = sizes[axis]
      if learns and n > 1:
        yield 'all-reduce', axis, 2 * shard * self.full * (n - 1) / n

  def of_activations(self, path: str, param: Param) -> Iterator[tuple[str, str, float]]:
    """Yields the collectives of activations and their gradients that a matrix causes."""
    sizes = self.layout.mesh.shape
    train, remat = self.train, self.compute.remat
    expert, context, tensor = sizes['expert'], sizes['context'], sizes['tensor']
    experts = self.model.config.experts
    if experts and expert > 1 and path.endswith('/router'):
      # Dispatch and combine, the same for gradients, and dispatch again if the backward pass recomputes a layer.
      exchanges = 2
      if train:
        exchanges += 3 if remat == 'full' else 2
      share = experts.share(expert)
      yield 'ragged-all-to-all', 'expert', exchanges * share * param.shape[0] * self.activation * (expert - 1)
    if path in ('layers/k', 'layers/v', 'mtp/k', 'mtp/v') and context > 1:
      # The keys or values of a device's tokens, in all layers: a matrix is [layers, hidden, heads, head size].
      local_bytes = param.shape[0] * self.tokens * self.wide * math.prod(self.shard(param)[2:])
      recomputed = train and remat != 'none'
      yield 'all-gather', 'context', (1 + recomputed) * local_bytes * (context - 1)
      if train:
        yield 'reduce-scatter', 'context', local_bytes * (context - 1)
    tied = bool(self.model.head) and 'head' not in self.model.table
    if count := _sums(path, param, self.layout.spec(param.axes, param.shape), train, remat, tied=tied):
      yield 'all-reduce', 'tensor', count * self.activation * 2 * (tensor - 1) / tensor


def _gathered(spec: PartitionSpec, param: Param) -> Iterator[Sequence[str]]:
  """Yields the mesh axes of each dimension that is gathered when the parameter is used."""
  for part, axis in zip(spec, param.axes):
    names = (part,) if isinstance(part, str) else part or ()
    if axis != 'expert' and {'fsdp', 'expert'} & set(names):
      yield names


def _sums(path: str, param: Param, spec: PartitionSpec, train: bool, remat: str, tied: bool) -> int:
  """Returns how often activations are summed over tensor because of a matrix."""
  if 'tensor' not in spec:
    return 0
  layers = param.shape[0] if param.stacked else 1
  if path.endswith('/o'):  # summed again if the layer is recomputed
    return layers * (1 + train + (train and remat == 'full'))
  if path.endswith('down'):
    return layers * (1 + train)
  return {'head': int(train), 'embed': 1 + (train and tied)}.get(path, 0)


def of_reshard(
  model: Model, moved_of: Mapping, times: int, train: Layout, rollout: Layout, dtype: str
) -> dict[str, dict[str, float]]:
  """Returns {kind: {axis: bytes}}: what a device receives on average to get its part of the sampler's weights.

  Args:
    moved_of: first parts of the paths of parameters that the program moves.
    times: calls of the program until all are moved.
    train: the current layout.
    rollout: the layout after the reshard.
    dtype: of the sampler's weights.
  """
  moved: dict[str, float] = collections.defaultdict(float)
  devices = list(train.mesh.devices.flat)
  sampled = devices[:: max(1, len(devices) // _SAMPLED)]
  for path, param in model.table.items():
    if path.split('/')[0] not in moved_of:
      continue
    skip = int(param.stacked)
    axes, shape = param.axes[skip:], param.shape[skip:]
    old = train.sharding(axes, shape)
    new = rollout.sharding(axes, shape)
    held = old.devices_indices_map(shape)
    needed = new.devices_indices_map(shape)
    missing = 0.0
    for device in sampled:
      needed_elements = 1  # of the new part
      held_elements = 1  # of these, already on the device
      for held_slice, needed_slice, n in zip(held[device], needed[device], shape):
        held_first, held_end, _ = held_slice.indices(n)
        needed_first, needed_end, _ = needed_slice.indices(n)
        needed_elements *= needed_end - needed_first
        held_elements *= max(0, min(held_end, needed_end) - max(held_first, needed_first))
      missing += (needed_elements - held_elements) / len(sampled)
    names = [part for part in old.spec if part and part not in new.spec]
    count = param.shape[0] if param.stacked else 1
    moved['+'.join(map(str, names)) or 'all'] += missing * count * jnp.dtype(dtype).itemsize
  return {'all-gather': {k: v / times for k, v in moved.items() if v}}
