"""Lists the meshes that a search compiles for, without devices.

It always has `fsdp` over all devices, with each size of tensor. Of other meshes it has a few: those whose state
fits and that would take the least communication time per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jax.sharding import AbstractMesh

from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.errors import InputError
from jaxpost.hardware import memory
from jaxpost.matmul import WHOLE_ROW_KERNELS, compute_for
from jaxpost.models.config import CustomConfig
from jaxpost.planning import held, traffic_bound
from jaxpost.stage import batch_shape, load_weights

if TYPE_CHECKING:
  from jaxpost.planning import machines
  from jaxpost.stage.records import Inputs

_TENSOR = (1, 2, 4, 8)
_CONTEXT = (2, 4, 8)
_LONG = 16_384  # tokens; shorter rows are not split
_LANES = 128  # XLA for TPU all-reduces gradients with narrower shards
_OTHERS = 6  # meshes that do not consist of `fsdp` and `tensor` alone


def train_devices(inputs: Inputs, topology: machines.Topology) -> int:
  mesh = inputs.config.mesh
  return topology.devices - mesh.rollout_devices - mesh.score_devices


def rollout_devices(inputs: Inputs, topology: machines.Topology) -> int:
  return inputs.config.mesh.rollout_devices or train_devices(inputs, topology)


def layout(sizes: Mapping[str, int], phase: str = 'train') -> Layout:
  """Returns the layout of a phase on a mesh of these sizes, {axis: size}, that has no devices."""
  return Layout(AbstractMesh(tuple(sizes[a] for a in AXES), AXES), phase)


def tensors(inputs: Inputs, devices: int) -> list[int]:
  """Returns sizes of the tensor axis that split heads and the MLP evenly; [1] for custom models."""
  cfg = inputs.model.config
  if isinstance(cfg, CustomConfig):
    return [1]
  size = cfg.experts.size if cfg.experts else cfg.intermediate_size
  return [t for t in _TENSOR if devices % t == 0 and cfg.num_heads % t == 0 and size % t == 0]


def sampling(inputs: Inputs, topology: machines.Topology) -> list[str]:
  """Returns meshes of the sampler, the least split of its weights first."""
  return ['data=-1' + (f',tensor={t}' if t > 1 else '') for t in tensors(inputs, rollout_devices(inputs, topology))]


def training(inputs: Inputs, topology: machines.Topology, fixed: bool) -> dict[str, int]:
  """Returns {mesh: batch shards} of the meshes to compile an update for.

  Args:
    fixed: the batch is that of the config and has to split over the shards; otherwise it is one row per shard.
  """
  plain = {}  # meshes of fsdp and tensor alone
  others = []  # (seconds per token, sizes, batch shards)
  for sizes in every(inputs, topology, train_devices(inputs, topology)):
    shards = sizes['data'] * sizes['fsdp'] * sizes['expert']
    shape = 1, shards, batch_shape.row_length(inputs.config, inputs.algorithm.on_policy)
    if fixed:
      try:
        batch = batch_shape.batch_shape(inputs.config, inputs.algorithm.on_policy, shards)
      except InputError:
        continue
      shape = batch.rows // batch.micro_rows, batch.micro_rows, batch.row_length
    if sizes['data'] * sizes['expert'] * sizes['context'] == 1:
      plain[spell(sizes)] = shards
    elif seconds := _seconds_a_token(inputs, topology, sizes, shape):
      others.append((seconds, sizes, shards))
  return plain | {spell(sizes): shards for sizes, shards in _few(others)}


def every(inputs: Inputs, topology: machines.Topology, devices: int) -> Iterator[dict[str, int]]:
  """Yields {axis: size} of every mesh that splits the model evenly."""
  cfg = inputs.model.config
  experts = [e for e in range(1, cfg.experts.num + 1) if cfg.experts.num % e == 0] if cfg.experts else [1]
  length = batch_shape.row_length(inputs.config, inputs.algorithm.on_policy)
  # Recurrent states are not passed on between the parts of a row.
  whole = isinstance(cfg, CustomConfig) or cfg.state_shapes or inputs.config.model.attention in WHOLE_ROW_KERNELS
  contexts = [1, *(c for c in _CONTEXT if not whole and length >= _LONG and length % c == 0)]
  for t, e, c in itertools.product(tensors(inputs, devices), experts, contexts):
    shards, remainder = divmod(devices, t * e * c)
    if remainder or not shards:
      continue
    sizes = dict(data=1, fsdp=shards, expert=e, context=c, tensor=t)
    yield sizes
    # Fewer shards of weights, each at least as wide as the lanes, with replicas along data.
    wide = [
      m
      for m in range(2, shards)
      if shards % m == 0 and cfg.hidden_size % (m * e) == 0 and cfg.hidden_size // (m * e) >= _LANES
    ]
    tpu = not topology.gpu and not topology.local
    if tpu and wide and cfg.hidden_size < _LANES * shards * e:
      yield sizes | dict(data=shards // wide[-1], fsdp=wide[-1])


def spell(sizes: Mapping[str, int]) -> str:
  """Returns the text of a mesh; fsdp is -1 (all other devices) unless data is above 1."""
  shown = {axis: size for axis, size in sizes.items() if size > 1 or axis == 'fsdp'}
  if sizes['data'] == 1:
    shown['fsdp'] = -1
  return ','.join(f'{axis}={size}' for axis, size in shown.items())


def _few(timed: list) -> list:
  """Returns the best mesh of each kind, then the second of each, and so on."""
  timed = sorted(timed, key=lambda mesh: mesh[0])
  kinds: dict[tuple, list] = {}
  for place, (_, sizes, shards) in enumerate(timed):
    key = sizes['expert'], sizes['context'], sizes['data'] > 1
    kinds.setdefault(key, []).append((place, sizes, shards))
  # By rank within a kind, then by place among all, which is unique.
  ranked = sorted((rank, *mesh) for meshes in kinds.values() for rank, mesh in enumerate(meshes))
  return [(sizes, shards) for *_, sizes, shards in ranked[:_OTHERS]]


def _seconds_a_token(inputs: Inputs, topology: machines.Topology, sizes: dict, shape: tuple) -> float | None:
  """Returns seconds per token by the lower bound on an update's traffic; None if its state does not fit."""
  m = inputs.config.model
  mesh_layout = layout(sizes)
  platform = 'cpu' if topology.local else 'tpu'
  compute = compute_for('gpu' if topology.gpu else platform, m.dtype, 'full')
  state = memory.size(load_weights.described(inputs.model, mesh_layout, m.param_dtype))
  state += held.optimizer(inputs, mesh_layout, compute.dtype)
  if topology.memory and state > topology.memory:
    return None
  sent = traffic_bound.of_pass(inputs.model, mesh_layout, shape, compute=compute, param_dtype=m.param_dtype, train=True)
  return wire_seconds(topology, sizes, sent) / math.prod(shape)


def wire_seconds(topology: machines.Topology, sizes: dict[str, int], sent: Mapping[str, Mapping[str, float]]) -> float:
  """Returns the seconds of {kind: {axes: bytes that a device receives}}, one collective after the other."""
  traffic = [item for axes in sent.values() for item in axes.items()]
  return sum(size / rate(topology, sizes, axes.split('+')[0]) for axes, size in traffic)


def rate(topology: machines.Topology, sizes: dict, outer: str) -> float:
  """Returns bytes/s along one or several axes, of which `outer` is the outermost."""
  inner = AXES[AXES.index(outer) :]
  devices_nearby = topology.devices // topology.slices
  if topology.gpu:
    owned = topology.owned
    devices_nearby = sum(d.process_index == owned[0].process_index for d in owned) or (topology.size[-1])
  crosses_hosts = math.prod(sizes[a] for a in inner) > devices_nearby
  return (topology.chip.network if crosses_hosts else topology.chip.link) or 1.0
