"""Memory and seconds of a step by arithmetic, without compiling anything.

Sizes of parameters, optimizer state, frozen models and the KV cache are exact, from the parameter table and the mesh.
Activations and memory traffic are counted for `remat=full`, where a layer saves its input and is recomputed in the
backward pass, and for `remat=dots`, where it also saves the results of its projections and of attention. docs/fits.md
compares these figures with those of compiled programs; `sampling_arithmetic.py` has those of sampling.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.hardware import chips
from jaxpost.losses import head_chunk
from jaxpost.matmul import WHOLE_ROW_KERNELS, compute_for
from jaxpost.models import model as model_lib
from jaxpost.models import transformer
from jaxpost.models.attention_kernels import supports_branches
from jaxpost.planning import held, meshes, sampling_arithmetic, traffic_bound
from jaxpost.planning.case import FLOAT, Case
from jaxpost.stage import batch_shape, checks, critic_weights

if TYPE_CHECKING:
  from jaxpost.planning import machines
  from jaxpost.stage.records import Inputs

USABLE = 0.9  # share of the memory that JAX may take; the rest is for fragmentation and for what is not counted here
# Allocated bytes per live byte of XLA for TPU if layers save several results, which leave gaps.
_GAPS = 1.2
# Live arrays of each width of a layer in its backward pass: the values and their gradients.
_ALIVE = 2
_PREFETCHED = 2  # layers whose weights are gathered at the same time
# Passes of an update over the weights: forward, and for the gradients of inputs and of weights.
_PASSES = 3
# config.model.remat -> forward passes that the backward pass recomputes.
_RECOMPUTED = {'dots': 0.0, 'full': 1.0}
ESTIMATED = ('auto', *_RECOMPUTED)  # of config.model.remat, on accelerators


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The memory and the seconds that a step takes on a device.

  updating: {purpose: bytes} during an update.
  sampling: {purpose: bytes} while completions for training or evaluation are sampled; {} if none are.
  seconds: {'update', 'score' or 'sample': seconds of a step}: compute, memory and network without overlap.
  trained: tokens that a step trains on.
  scoring: bytes of frozen models on one of `mesh.score_devices`; 0 without such devices.
  """

  updating: dict[str, float]
  sampling: dict[str, float]
  seconds: dict[str, float]
  trained: int
  scoring: float = 0.0

  @property
  def memory(self) -> dict[str, float]:
    """{purpose: bytes} of updates or of sampling for training, whichever needs more."""
    return max(self.updating, self.sampling, key=_sum) if 'sample' in self.seconds else self.updating

  @property
  def total(self) -> float:
    return sum(self.memory.values())

  @property
  def tokens_per_s(self) -> float:
    return self.trained / sum(self.seconds.values())


def estimate(
  inputs: Inputs, topology: machines.Topology, train: dict[str, int], rollout: dict[str, int], branches: bool = False
) -> Estimate:
  """Estimates a step of a stage with the meshes `train` and `rollout`, {axis: size}.

  branches: whether documents branch, such as pairs with one prompt; not every attention kernel supports that.

  Raises:
    InputError: the rows of a step do not split over the mesh.
  """
  train_layout = meshes.layout(train)
  platform = 'gpu' if topology.gpu else 'tpu'
  section = inputs.config.model
  chip_memory, triton = getattr(chips.of_kind(topology.chip.kind), 'memory', 0.0), not topology.before_ampere
  compute = compute_for(platform, section.dtype, section.remat, section.attention, chip_memory, triton=triton)
  if compute.remat not in _RECOMPUTED:
    raise InputError(f'config.model.remat: memory is estimated for {" and ".join(_RECOMPUTED)} only')
  splits_rows = train_layout.mesh.shape['context'] > 1 and compute.attention in WHOLE_ROW_KERNELS
  if splits_rows or branches and not supports_branches(compute.attention, inputs.model.config):
    compute = dataclasses.replace(compute, attention='chunked')
  on_policy = inputs.algorithm.on_policy
  shape = batch_shape.batch_shape(inputs.config, on_policy, train_layout.batch_shards, tokens=compute.micro_tokens)
  case = Case(inputs, topology, train_layout, meshes.layout(rollout, 'rollout'), compute, shape=shape)
  resident = held.memory(case)
  learners = [case]  # one for each model that learns; they are updated one after the other
  if 'critic' in inputs.sources:
    critic, _ = critic_weights.model_of(inputs)
    learners.append(dataclasses.replace(case, inputs=dataclasses.replace(inputs, model=critic)))
  updating = resident | max(map(_activations, learners), key=_sum)
  rows_updated = shape.filled * inputs.config.rl.epochs if on_policy else shape.filled
  seconds = {'update': _update_seconds(case, resident['optimizer']) * rows_updated / shape.micro_rows}
  if 'reference' in inputs.sources:
    scored = case.seconds(_flops(case), _memory_traffic(case, 1), _traffic(case, train=False))
    seconds['score'] = scored * shape.filled / shape.micro_rows
  trained = shape.rows * shape.row_length
  sampling = resident | sampling_arithmetic.memory(case) if checks.samples(inputs.config, inputs.algorithm) else {}
  if inputs.config.rollout.staleness and not inputs.config.mesh.rollout_devices:  # the sampler runs during updates
    updating |= {k: sampling[k] for k in ('sampler', 'cache') if k in sampling}
  if on_policy:
    seconds['sample'] = sampling_arithmetic.seconds(case)
    rollouts = inputs.config.rollout
    trained = rollouts.prompts * rollouts.group_size * (rollouts.max_prompt_length + rollouts.max_new_tokens)
  scoring = held.frozen(case) if inputs.config.mesh.score_devices else 0.0
  return Estimate(updating, sampling, seconds, trained, scoring)


def _sum(parts: dict[str, float]) -> float:
  return sum(parts.values())


def _saved_width(case: Case) -> float:
  """Returns the elements per token that a layer saves with `remat=dots`, counted in the residual dtype."""
  cfg = case.cfg
  elements = case.attention_width + 2 * case.mlp_width
  if case.compute.attention == 'triton':  # a float32 statistic per head
    elements += 2 * cfg.num_heads
  # The input is saved as well, and the results of both projections to hidden_size.
  return elements / case.train.mesh.shape['tensor'] + 3 * cfg.hidden_size


def _chunk(case: Case) -> float:
  """Returns the number of logits in the memory of a device at a time."""
  sizes = case.train.mesh.shape
  rows = case.shape.micro_rows // case.train.batch_shards
  length = case.shape.row_length // sizes['context']
  vocab = case.cfg.padded_vocab_size
  return rows * head_chunk.chunk_length(rows, length, vocab, case.compute.head_elements) * vocab / sizes['tensor']


def _activations(case: Case) -> dict[str, float]:
  """Returns the bytes of gradients and activations in an update, at its peak: in a layer or at the head."""
  model, cfg = case.inputs.model, case.cfg
  residual = jnp.dtype(case.compute.residual).itemsize
  gradients = FLOAT * held.elements(model_lib.trained_part(model), case.train)
  if case.shape.micro_rows < case.shape.update_rows:  # accumulated ones, and those of the micro-batch
    gradients *= 2
  width = cfg.hidden_size if case.compute.remat == 'full' else _saved_width(case)
  saved = case.tokens * width * residual * (cfg.num_layers + model.trains_mtp)
  tensor = case.train.mesh.shape['tensor']
  weights = _ALIVE * case.attention_weights(case.tokens, case.shape.row_length, tensor)
  layer = _ALIVE * case.tokens * case.layer_width(tensor) * case.width + _PREFETCHED * _gathered(case, 'layers')
  logits = _chunk(case) if model.head else 0.0
  head = logits * (FLOAT + case.width) + case.tokens * cfg.hidden_size * FLOAT + _gathered(case, 'vocab')
  activations = saved + max(weights + layer, head)
  if case.compute.platform == 'tpu' and case.compute.remat != 'full':
    activations *= _GAPS
  return dict(gradients=gradients, activations=activations)


def _gathered(case: Case, axis: str) -> float:
  """Returns the bytes of gathered weights, of one layer (`axis` 'layers') or of embedding and head ('vocab').

  Weights are gathered over fsdp, and all but those of experts over expert, in the dtype of products. Their gradients
  have the same shape, in float32, before they are reduced.
  """
  sizes = dict(case.train.mesh.shape)
  total = 0.0
  model = case.inputs.model
  for path, param in model.table.items():
    if axis in param.axes and param.matrix | ('vocab' in param.axes) and path not in model.mtp:  # gathered separately
      axes = ('fsdp',) if 'expert' in param.axes else ('fsdp', 'expert')
      gathered = meshes.layout(sizes | dict.fromkeys(axes, 1)).sharding(param.axes, param.shape)
      elements = math.prod(gathered.shard_shape(param.shape)) / (param.shape[0] if param.stacked else 1)
      has_gradient = any(sizes[name] > 1 for name in axes) and path not in model.frozen
      total += elements * (case.width + FLOAT * has_gradient)
  return total


def _traffic(case: Case, train: bool) -> dict:
  """Returns the bytes that a device receives for a micro-batch."""
  shape = 1, case.shape.micro_rows, case.shape.row_length
  dtype = case.inputs.config.model.param_dtype
  return traffic_bound.of_pass(
    case.inputs.model, case.train, shape, compute=case.compute, param_dtype=dtype, train=train
  )


def _flops(case: Case) -> float:
  """Returns the FLOPs of a forward pass over a micro-batch on a device."""
  tokens = case.shape.micro_rows * case.shape.row_length
  return tokens * transformer.flops_per_token(case.cfg, case.context) / case.train.mesh.size


def _memory_traffic(case: Case, passes: float) -> float:
  """Returns the bytes of weights, activations and logits that `passes` passes over the layers read or write."""
  cfg = case.cfg
  model = case.inputs.model
  tensor = case.train.mesh.shape['tensor']
  unused = 0 if model.trains_mtp else sum(math.prod(model.table[path].shape) for path in model.mtp)
  weights = (transformer.num_params(cfg) - unused) / tensor / case.train.mesh.shape['expert'] * case.width
  activations = 2 * case.tokens * cfg.num_layers * case.layer_width(tensor) * case.width
  logits = case.tokens * cfg.padded_vocab_size / tensor * FLOAT
  return passes * (weights + activations + logits)


def _update_seconds(case: Case, state: float) -> float:
  """Returns the seconds of a micro-batch, with its share of the optimizer step over `state` bytes of its state."""
  model = case.inputs.model
  trained_elements = held.elements(model_lib.trained_part(model), case.train)
  num_micro_batches = case.shape.update_rows / case.shape.micro_rows
  optimizer = 2 * (state + trained_elements * 2 * FLOAT) / num_micro_batches
  recomputed = _RECOMPUTED[case.compute.remat]
  moved = _memory_traffic(case, _PASSES + recomputed) + optimizer
  tokens = case.shape.micro_rows * case.shape.row_length
  flops = tokens * model.flops_of_update(case.context) / case.train.mesh.size
  return case.seconds(flops + recomputed * _flops(case), moved, _traffic(case, train=True))
