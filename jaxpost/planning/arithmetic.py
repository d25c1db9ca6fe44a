"""Memory and seconds of a step by arithmetic: nothing is compiled, and no device is described to a compiler.

Parameters, optimizer state, frozen models and the KV cache have their exact sizes, from the
parameter table and the mesh. Activations, and what a program reads and writes, are counted for
`remat=full`, where a layer keeps its input and is computed again when its gradient is, and for
`remat=dots`, where it keeps the results of its projections and of attention, too. docs/fits.md
has these figures beside those of compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.errors import InputError
from jaxpost.hardware import chips, memory
from jaxpost.losses import head_chunk
from jaxpost.matmul import compute_for
from jaxpost.models import partition, transformer
from jaxpost.models.parameters import STATEFUL
from jaxpost.planning import meshes, traffic_bound
from jaxpost.rollout import native
from jaxpost.stage import batch_shape, checks, load_weights

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model
  from jaxpost.planning import machines
  from jaxpost.stage.batch_shape import BatchShape
  from jaxpost.stage.records import Inputs

USABLE = 0.9  # of what JAX may take: the rest is for fragments, and for what is left out here
_FLOAT = 4  # bytes
# By how much XLA for TPU allocates more than is alive where layers keep several results, which leave gaps.
_GAPS = 1.2
# Arrays of a layer's widths that are alive while its gradient is computed: the values and their gradients.
_ALIVE = 2
_PREFETCHED = 2  # layers whose weights are gathered at a time
# Passes over the weights of an update: forward, and for the gradients of inputs and weights.
_PASSES = 3
# Forward passes that the backward pass recomputes.
_AGAIN = {'dots': 0.0, 'full': 1.0}
ESTIMATED = ('auto', *_AGAIN)  # of config.model.remat, on accelerators


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The memory and the seconds that a step takes on a device.

  updating: {purpose: bytes} during an update.
  sampling: {purpose: bytes} while completions are drawn, to be trained on or evaluated; {} where none are.
  seconds: {'update', 'score', 'sample': seconds of a step}: products, memory and network without overlap.
  trained: tokens of a step.
  """

  updating: dict[str, float]
  sampling: dict[str, float]
  seconds: dict[str, float]
  trained: int

  @property
  def memory(self) -> dict[str, float]:
    """{purpose: bytes} while the program of training that needs most of it runs."""
    return max(self.updating, self.sampling, key=_sum) if 'sample' in self.seconds else self.updating

  @property
  def total(self) -> float:
    return sum(self.memory.values())

  @property
  def tokens_per_s(self) -> float:
    return self.trained / sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class _Case:
  """A stage on meshes of a machine; the rollout mesh is the training mesh where nothing is sampled."""

  inputs: Inputs
  topology: machines.Topology
  train: Layout
  rollout: Layout
  compute: Compute
  shape: BatchShape

  @property
  def cfg(self) -> ModelConfig:
    return self.inputs.model.config

  @functools.cached_property
  def width(self) -> int:
    """Bytes of an operand of products."""
    return jnp.dtype(self.compute.dtype).itemsize

  @functools.cached_property
  def row_shards(self) -> int:
    return self.train.batch_shards * self.train.mesh.shape['context']

  @functools.cached_property
  def tokens(self) -> int:
    """Tokens of a device at a time in training."""
    return self.shape.micro_rows * self.shape.row_length // self.row_shards

  @functools.cached_property
  def context(self) -> float:
    """Mean number of tokens that a token of a row attends to."""
    config = self.inputs.config
    skips_branches = config.train.share_prompt and self.compute.attention != 'chunked'
    longest = config.rollout.max_prompt_length + config.rollout.max_new_tokens
    return (longest if skips_branches else self.shape.row_length) / 2


def estimate(
  inputs: Inputs, topology: machines.Topology, train: dict[str, int], rollout: dict[str, int], branches: bool = False
) -> Estimate:
  """Estimates a step of a stage with the meshes `train` and `rollout`, {axis: size}.

  branches: documents of a row branch, as pairs with one prompt do, which not every attention kernel supports.

  Raises:
    InputError: the rows of a step do not split over the mesh.
  """
  layouts = [
    Layout(AbstractMesh(tuple(m[a] for a in AXES), AXES), n) for m, n in ((train, 'train'), (rollout, 'rollout'))
  ]
  platform = 'gpu' if topology.gpu else 'tpu'
  section = inputs.config.model
  known = chips.of_kind(topology.chip.kind)
  compute = compute_for(platform, section.dtype, section.remat, section.attention, known.memory if known else 0.0)
  if compute.remat not in _AGAIN:
    raise InputError(f'config.model.remat: memory is estimated for {" and ".join(_AGAIN)} only')
  if branches:
    from jaxpost.models.attention_kernels import BRANCHES

    compute = compute if compute.attention in BRANCHES else dataclasses.replace(compute, attention='chunked')
  on_policy = inputs.algorithm.on_policy
  shape = batch_shape.batch_shape(inputs.config, on_policy, layouts[0].batch_shards, tokens=compute.micro_tokens)
  case = _Case(inputs, topology, *layouts, compute, shape)
  held = _held(case)
  updating = held | _activations(case)
  passes = shape.filled * inputs.config.rl.epochs if on_policy else shape.filled
  seconds = {'update': _update_seconds(case) * passes / shape.micro_rows}
  if 'reference' in inputs.sources:
    seconds['score'] = _score_seconds(case) * shape.filled / shape.micro_rows
  trained = shape.rows * shape.row_length
  sampling = held | _sampler(case) if checks.samples(inputs.config, inputs.algorithm) else {}
  if on_policy:
    seconds['sample'] = _sample_seconds(case)
    rollouts = inputs.config.rollout
    trained = rollouts.prompts * rollouts.group_size * (rollouts.max_prompt_length + rollouts.max_new_tokens)
  return Estimate(updating, sampling, seconds, trained)


def _sum(parts: dict[str, float]) -> float:
  return sum(parts.values())


def _split(model: Model, layout: Layout, of: frozenset | None = None) -> float:
  """Returns the parameters of a device, or those of the paths `of`."""
  return float(
    sum(
      math.prod(layout.sharding(x.axes, x.shape).shard_shape(x.shape))
      for path, x in model.table.items()
      if of is None or path in of
    )
  )


def _held(case: _Case) -> dict[str, float]:
  """Returns the bytes of what stays on a device: parameters, moments, a critic, frozen models."""
  model = case.inputs.model
  learned = frozenset(model.table) - model.frozen
  dtype = case.inputs.config.model.param_dtype
  out = dict(
    parameters=float(memory.size(load_weights.described(model, case.train, dtype))),
    optimizer=meshes.MOMENTS * _split(model, case.train, learned),
  )
  sources, config = case.inputs.sources, case.inputs.config
  if 'critic' in sources:  # of all weights, with moments and gradients of its own
    critic = _split(partition.build(sources['critic'].config), case.train)
    out['critic'] = critic * (jnp.dtype(dtype).itemsize + meshes.MOMENTS)
  frozen = 0.0
  for name in sources.keys() - {'policy', 'critic', *case.inputs.algorithm.precompute(config)}:
    if name == 'reference':  # shares what is not trained
      frozen += _split(model, case.train, learned)
    else:
      frozen += _split(partition.build(sources[name].config), case.train)
  if frozen:
    out['frozen'] = case.width * frozen
  return out


def _layer_width(case: _Case) -> float:
  """Returns the elements of a token that a layer computes: projections, attention, MLP."""
  cfg = case.cfg
  heads = cfg.num_heads * (cfg.head_dim + cfg.value_dim) + sum(cfg.cached[0] * size for size in cfg.cached[1])
  wide = cfg.experts.top_k * cfg.experts.size if cfg.experts else cfg.intermediate_size
  return (heads + 3 * wide) / case.train.mesh.shape['tensor'] + 4 * cfg.hidden_size


def _saved_width(case: _Case) -> float:
  """Returns the elements of a token that a layer keeps for `remat=dots`, in the residual type."""
  cfg, tensor = case.cfg, case.train.mesh.shape['tensor']
  wide = cfg.experts.top_k * cfg.experts.size if cfg.experts else cfg.intermediate_size
  split = (
    cfg.num_heads * (cfg.head_dim + cfg.value_dim) + sum(cfg.cached[0] * size for size in cfg.cached[1]) + 2 * wide
  )
  if case.compute.attention == 'triton':  # a float32 statistic of each head
    split += 2 * cfg.num_heads
  return split / tensor + 3 * cfg.hidden_size  # with the input, and the results of both projections to its width


def _attention_weights(case: _Case) -> float:
  """Returns the bytes of the attention weights, in float32, of the queries that XLA computes at a time."""
  queries = min(case.compute.q_chunk, case.shape.row_length)
  return case.tokens * queries * _FLOAT * case.cfg.num_heads / case.train.mesh.shape['tensor']


def _chunk(case: _Case) -> float:
  """Returns the logits of a device that are in memory at a time."""
  sizes = case.train.mesh.shape
  rows = case.shape.micro_rows // case.train.batch_shards
  length = case.shape.row_length // sizes['context']
  vocab = case.cfg.padded_vocab_size
  return rows * head_chunk.chunk_length(rows, length, vocab, case.compute.head_elements) * vocab / sizes['tensor']


def _activations(case: _Case) -> dict[str, float]:
  """Returns the bytes that an update needs besides what is held: at its head, or at a layer."""
  model = case.inputs.model
  cfg = case.cfg
  residual = jnp.dtype(case.compute.residual).itemsize
  gradients = _FLOAT * _split(model, case.train, frozenset(model.table) - model.frozen)
  if case.shape.micro_rows < case.shape.update_rows:  # the sum, and those of the rows at hand
    gradients *= 2
  width = cfg.hidden_size if case.compute.remat == 'full' else _saved_width(case)
  kept = case.tokens * width * residual * (cfg.num_layers + model.trains_mtp)
  weights = 0.0 if case.compute.uses_kernel else _ALIVE * _attention_weights(case)
  layer = _ALIVE * case.tokens * _layer_width(case) * case.width + _PREFETCHED * _gathered(case, 'layers')
  head = _chunk(case) * (_FLOAT + case.width) + case.tokens * cfg.hidden_size * _FLOAT + _gathered(case, 'vocab')
  activations = kept + max(weights + layer, head)
  if case.compute.platform == 'tpu' and case.compute.remat != 'full':
    activations *= _GAPS
  return dict(gradients=gradients, activations=activations)


def _gathered(case: _Case, axis: str) -> float:
  """Returns the bytes of one layer, or of embedding and head, gathered over fsdp and in the type of products.

  Their gradients are whole, in float32, before they are reduced.
  """
  sizes = dict(case.train.mesh.shape)
  whole = Layout(AbstractMesh(tuple(1 if a == 'fsdp' else sizes[a] for a in AXES), AXES))
  total = 0.0
  model = case.inputs.model
  for path, x in model.table.items():
    if axis in x.axes and x.matrix | ('vocab' in x.axes) and path not in model.mtp:  # which is gathered on its own
      count = math.prod(whole.sharding(x.axes, x.shape).shard_shape(x.shape)) / (x.shape[0] if x.stacked else 1)
      reduced = sizes['fsdp'] > 1 and path not in model.frozen
      total += count * (case.width + _FLOAT * reduced)
  return total


def _seconds(case: _Case, flops: float, moved: float, sent: dict | None = None) -> float:
  """Returns the seconds of products, memory and network, one after the other."""
  chip, wire = case.topology.chip, 0.0
  for axes in (sent or {}).values():
    for name, size in axes.items():
      wire += size / meshes.rate(case.topology, dict(case.train.mesh.shape), name.split('+')[0])
  return flops / chip.flops + moved / chip.bandwidth + wire


def _traffic(case: _Case, train: bool) -> dict:
  """Returns the bytes that a device receives for a micro-batch."""
  shape = 1, case.shape.micro_rows, case.shape.row_length
  dtype = case.inputs.config.model.param_dtype
  return traffic_bound.of_pass(
    case.inputs.model, case.train, shape, compute=case.compute, param_dtype=dtype, train=train
  )


def _flops(case: _Case) -> float:
  """Returns the FLOPs of a forward pass over a micro-batch on a device."""
  tokens = case.shape.micro_rows * case.shape.row_length
  return tokens * transformer.flops_per_token(case.cfg, case.context) / case.train.mesh.size


def _read(case: _Case, passes: float) -> float:
  """Returns the bytes of weights and activations that so many passes over the layers move."""
  cfg = case.cfg
  model = case.inputs.model
  tensor = case.train.mesh.shape['tensor']
  unused = 0 if model.trains_mtp else sum(math.prod(model.table[path].shape) for path in model.mtp)
  weights = (transformer.num_params(cfg) - unused) / tensor / case.train.mesh.shape['expert'] * case.width
  activations = 2 * case.tokens * cfg.num_layers * _layer_width(case) * case.width
  logits = case.tokens * cfg.padded_vocab_size / tensor * _FLOAT
  return passes * (weights + activations + logits)


def _update_seconds(case: _Case) -> float:
  """Returns the seconds of a micro-batch, with its part of the optimizer's pass."""
  model = case.inputs.model
  learned = _split(model, case.train, frozenset(model.table) - model.frozen)
  micro = case.shape.update_rows / case.shape.micro_rows
  optimizer = learned * 2 * (meshes.MOMENTS + 2 * _FLOAT) / micro
  again = _AGAIN[case.compute.remat]
  read = _read(case, _PASSES + again) + optimizer
  tokens = case.shape.micro_rows * case.shape.row_length
  flops = tokens * model.flops_of_update(case.context) / case.train.mesh.size
  return _seconds(case, flops + again * _flops(case), read, _traffic(case, train=True))


def _score_seconds(case: _Case) -> float:
  return _seconds(case, _flops(case), _read(case, 1), _traffic(case, train=False))


def slots(inputs: Inputs) -> tuple[int, int]:
  """Returns (sequences that are sampled at a time, how often), for training or else for evaluation."""
  rollout, held_out = inputs.config.rollout, inputs.config.eval
  total = rollout.prompts * rollout.group_size if inputs.algorithm.on_policy else held_out.size * held_out.samples
  found = batch_shape.slots(rollout, total)
  return found, math.ceil(total / found)


def _entry(case: _Case) -> float:
  """Returns the bytes of a token in the KV cache of a device; one of 8 bits has a scale beside each head's codes."""
  tensor, coded = case.rollout.mesh.shape['tensor'], case.inputs.config.rollout.cache
  return sum(
    (heads / tensor if heads % tensor == 0 else heads) * sum(n + case.width if coded else n * case.width for n in sizes)
    for heads, sizes in case.cfg.layer_caches
  )


def _weights(case: _Case) -> float:
  """Returns the bytes of the sampler's weights on a device."""
  model, kind = case.inputs.model.base or case.inputs.model, case.inputs.config.rollout.weights
  saved = 0.0
  if kind:
    from jaxpost.models import scaled

    saved = scaled.bytes_saved(model, case.rollout, case.width)
  kept = model.table.keys() - model.mtp
  return memory.size(load_weights.described(model, case.rollout, case.compute.dtype, kept)) - saved


def _state(cfg: ModelConfig, tensor: int) -> float:
  """Returns the bytes of a device that layers with a state instead of keys and values keep of a sequence."""
  layers = sum(stack in STATEFUL for stack in cfg.layer_stacks)
  sizes = (math.prod(shape) / (tensor if shape[0] % tensor == 0 else 1) for shape in cfg.state_shapes)
  return layers * sum(sizes) * _FLOAT


def _sampler(case: _Case) -> dict[str, float]:
  """Returns the bytes of the sampler's weights, cache, what a block copies of it, and logits."""
  cfg = case.cfg
  rollout = case.inputs.config.rollout
  tensor = case.rollout.mesh.shape['tensor']
  at_a_time = slots(case.inputs)[0]
  mine = math.ceil(at_a_time / case.rollout.batch_shards)
  # A block of decoding may run past the last token that counts.
  length = rollout.max_prompt_length + rollout.max_new_tokens + (rollout.block or case.compute.decode_block)
  logits = 2 * mine * cfg.padded_vocab_size / tensor * _FLOAT
  some = rollout.prompts if case.inputs.algorithm.on_policy else at_a_time  # whose prefixes are there at a time
  prompts = math.ceil(some / case.rollout.batch_shards)
  entry = _entry(case)
  state = _state(cfg, tensor)
  # A block attends to the part of the cache that is filled, up to a power of two, and copies it if it is not all; the
  # decoding kernel of GPUs copies nothing. States are there before and after it.
  in_place = not rollout.cache and native.without_unsupported_kernel(case.compute, cfg, rollout).decode_kernel
  copied_entries = 0 if in_place else 2 ** int(math.log2(length - 1))
  copied = mine * (copied_entries * entry + state)
  cache = (mine * length + prompts * rollout.max_prompt_length) * entry + (mine + prompts) * state
  return dict(sampler=_weights(case), cache=cache, copied=copied, logits=logits)


def _sample_seconds(case: _Case) -> float:
  """Returns the seconds of sampling: each token reads the weights and, on average, half of its answer's cache."""
  cfg = case.cfg
  rollout = case.inputs.config.rollout
  tensor = case.rollout.mesh.shape['tensor']
  at_a_time, waves = slots(case.inputs)
  mine = math.ceil(at_a_time / case.rollout.batch_shards)
  weights = _weights(case)
  seen = rollout.max_prompt_length + rollout.max_new_tokens / 2
  one = _seconds(case, mine * transformer.flops_per_token(cfg, seen) / tensor, weights + mine * seen * _entry(case))
  tokens = rollout.prompts * rollout.max_prompt_length / case.rollout.batch_shards
  prefill = tokens * transformer.flops_per_token(cfg, rollout.max_prompt_length / 2) / tensor
  return waves * rollout.max_new_tokens * one + _seconds(case, prefill, weights)
