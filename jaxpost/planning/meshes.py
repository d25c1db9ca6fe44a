"""The meshes that a search compiles for: a bounded list, made without devices.

`fsdp` over all devices, with each tensor axis, is always in it. Of the rest a
few are: those that would send the least for a token, and whose state fits.
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
_LONG = 16_384  # tokens of a row that is worth splitting
_LANES = 128  # XLA for TPU sums narrower shards of gradients everywhere
_MORE = 6  # meshes besides `fsdp` and `tensor`


def train_devices(inputs: Inputs, topology: machines.Topology) -> int:
  mesh = inputs.config.mesh
  return topology.devices - mesh.rollout_devices - mesh.score_devices


def rollout_devices(inputs: Inputs, topology: machines.Topology) -> int:
  return inputs.config.mesh.rollout_devices or train_devices(inputs, topology)


def layout(sizes: Mapping[str, int], phase: str = 'train') -> Layout:
  """Returns the layout of a phase on a mesh of these sizes, {axis: size}, that has no devices."""
  return Layout(AbstractMesh(tuple(sizes[a] for a in AXES), AXES), phase)


def tensors(inputs: Inputs, devices: int) -> list[int]:
  """Sizes of the tensor axis that split heads and the MLP evenly; of a custom model, whose layers are unknown, 1."""
  cfg = inputs.model.config
  if isinstance(cfg, CustomConfig):
    return [1]
  size = cfg.experts.size if cfg.experts else cfg.intermediate_size
  return [t for t in _TENSOR if devices % t == 0 and cfg.num_heads % t == 0 and size % t == 0]


def sampling(inputs: Inputs, topology: machines.Topology) -> list[str]:
  """Meshes of the sampler, the least split of its weights first."""
  return ['data=-1' + (f',tensor={t}' if t > 1 else '') for t in tensors(inputs, rollout_devices(inputs, topology))]


def training(inputs: Inputs, topology: machines.Topology, fixed: bool) -> dict[str, int]:
  """{mesh: batch shards} of those to compile an update for.

  Args:
    fixed: the batch is that of the config, which has to split over the
      shards; else it is one row a shard.
  """
  plain = {}  # those of fsdp and tensor alone
  more = []  # (seconds a token, sizes, batch shards) of the others
  for sizes in every(inputs, topology, train_devices(inputs, topology)):
    shards = sizes['data'] * sizes['fsdp'] * sizes['expert']
    shape = 1, shards, batch_shape.row_length(inputs.config, inputs.algorithm.on_policy)
    if fixed:
      try:
        whole = batch_shape.batch_shape(inputs.config, inputs.algorithm.on_policy, shards)
      except InputError:
        continue
      shape = whole.rows // whole.micro_rows, whole.micro_rows, whole.row_length
    if sizes['data'] * sizes['expert'] * sizes['context'] == 1:
      plain[spell(sizes)] = shards
    elif seconds := _seconds_a_token(inputs, topology, sizes, shape):
      more.append((seconds, sizes, shards))
  return plain | {spell(sizes): shards for sizes, shards in _few(more)}


def every(inputs: Inputs, topology: machines.Topology, devices: int) -> Iterator[dict[str, int]]:
  """The sizes of every mesh that splits the model evenly."""
  cfg = inputs.model.config
  experts = [e for e in range(1, cfg.experts.num + 1) if cfg.experts.num % e == 0] if cfg.experts else [1]
  length = batch_shape.row_length(inputs.config, inputs.algorithm.on_policy)
  # States of a sequence are not passed on from part to part of a row.
  splits = not (isinstance(cfg, CustomConfig) or cfg.state_shapes)
  splits = splits and inputs.config.model.attention not in WHOLE_ROW_KERNELS
  contexts = [1, *(c for c in _CONTEXT if splits and length >= _LONG and length % c == 0)]
  for t, e, c in itertools.product(tensors(inputs, devices), experts, contexts):
    left, odd = divmod(devices, t * e * c)
    if odd or not left:
      continue
    sizes = dict(data=1, fsdp=left, expert=e, context=c, tensor=t)
    yield sizes
    # Fewer shards of weights, each as wide as the lanes, with copies of them along data.
    wide = [
      m
      for m in range(2, left)
      if left % m == 0 and cfg.hidden_size % (m * e) == 0 and cfg.hidden_size // (m * e) >= _LANES
    ]
    tpu = not topology.gpu and not topology.local
    if tpu and wide and cfg.hidden_size < _LANES * left * e:
      yield sizes | dict(data=left // wide[-1], fsdp=wide[-1])


def spell(sizes: Mapping[str, int]) -> str:
  """The text of a mesh; what is left is fsdp, unless data says how much."""
  given = {k: n for k, n in sizes.items() if n > 1 or k == 'fsdp'}
  if sizes['data'] == 1:
    given['fsdp'] = -1
  return ','.join(f'{k}={n}' for k, n in given.items())


def _few(found: list) -> list:
  """The best of each kind first, then the second of each."""
  found = sorted(found, key=lambda x: x[0])
  kinds: dict[tuple, list] = {}
  for place, (_, sizes, shards) in enumerate(found):
    kind = sizes['expert'], sizes['context'], sizes['data'] > 1
    kinds.setdefault(kind, []).append((place, sizes, shards))
  # By turn, then by place among all, which no two share.
  ranked = sorted((turn, *x) for some in kinds.values() for turn, x in enumerate(some))
  return [(sizes, shards) for *_, sizes, shards in ranked[:_MORE]]


def _seconds_a_token(inputs: Inputs, topology: machines.Topology, sizes: dict, shape: tuple) -> float | None:
  """Seconds per token by the lower bound on the traffic of an update; None where its state does not fit."""
  m = inputs.config.model
  split = layout(sizes)
  platform = 'cpu' if topology.local else 'tpu'
  compute = compute_for('gpu' if topology.gpu else platform, m.dtype, 'full')
  state = memory.size(load_weights.described(inputs.model, split, m.param_dtype))
  state += held.optimizer(inputs, split, compute.dtype)
  if topology.memory and state > topology.memory:
    return None
  sent = traffic_bound.of_pass(inputs.model, split, shape, compute=compute, param_dtype=m.param_dtype, train=True)
  return sum(
    size / rate(topology, sizes, name.split('+')[0]) for axes in sent.values() for name, size in axes.items()
  ) / math.prod(shape)


def rate(topology: machines.Topology, sizes: dict, outer: str) -> float:
  """Bytes/s along an axis, or several of which one is the outermost."""
  inner = AXES[AXES.index(outer) :]
  near = topology.devices // topology.slices
  if topology.gpu:
    owned = topology.owned
    near = sum(d.process_index == owned[0].process_index for d in owned) or (topology.size[-1])
  far = math.prod(sizes[a] for a in inner) > near
  return (topology.chip.network if far else topology.chip.link) or 1.0
