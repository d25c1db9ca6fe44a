"""Memory and seconds of a step by arithmetic: nothing is compiled, and no device is described to a compiler.

Parameters, optimizer state, frozen models and the KV cache have their exact sizes, from the
parameter table and the mesh. Activations, and what a program reads and writes, are counted for
`remat=full`, where a layer keeps its input and is computed again when its gradient is, and for
`remat=dots`, where it keeps the results of its projections and of attention, too. docs/fits.md
has these figures beside those of compiled programs; `sampling_arithmetic.py` has those of sampling.
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
from jaxpost.models import partition, transformer
from jaxpost.models.attention_kernels import BRANCHES
from jaxpost.planning import held, meshes, sampling_arithmetic, traffic_bound
from jaxpost.planning.case import FLOAT, Case
from jaxpost.stage import batch_shape, checks, critic_weights

if TYPE_CHECKING:
  from jaxpost.planning import machines
  from jaxpost.stage.records import Inputs

USABLE = 0.9  # of what JAX may take: the rest is for fragments, and for what is left out here
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
  scoring: bytes of frozen models that have devices of their own, on one of these.
  """

  updating: dict[str, float]
  sampling: dict[str, float]
  seconds: dict[str, float]
  trained: int
  scoring: float = 0.0

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


def estimate(
  inputs: Inputs, topology: machines.Topology, train: dict[str, int], rollout: dict[str, int], branches: bool = False
) -> Estimate:
  """Estimates a step of a stage with the meshes `train` and `rollout`, {axis: size}.

  branches: documents of a row branch, as pairs with one prompt do, which not every attention kernel supports.

  Raises:
    InputError: the rows of a step do not split over the mesh.
  """
  train_layout = meshes.layout(train)
  platform = 'gpu' if topology.gpu else 'tpu'
  section = inputs.config.model
  known = chips.of_kind(topology.chip.kind)
  most, triton = known.memory if known else 0.0, not topology.before_ampere
  compute = compute_for(platform, section.dtype, section.remat, section.attention, most, triton=triton)
  if compute.remat not in _AGAIN:
    raise InputError(f'config.model.remat: memory is estimated for {" and ".join(_AGAIN)} only')
  split = train_layout.mesh.shape['context'] > 1 and compute.attention in WHOLE_ROW_KERNELS
  if split or branches and compute.attention not in BRANCHES:
    compute = dataclasses.replace(compute, attention='chunked')
  on_policy = inputs.algorithm.on_policy
  shape = batch_shape.batch_shape(inputs.config, on_policy, train_layout.batch_shards, tokens=compute.micro_tokens)
  case = Case(inputs, topology, train_layout, meshes.layout(rollout, 'rollout'), compute, shape=shape)
  stays = held.memory(case)
  learning = [case]  # of each model that learns, one after the other
  if 'critic' in inputs.sources:
    critic, _ = critic_weights.model_of(inputs)
    learning.append(dataclasses.replace(case, inputs=dataclasses.replace(inputs, model=critic)))
  updating = stays | max(map(_activations, learning), key=_sum)
  passes = shape.filled * inputs.config.rl.epochs if on_policy else shape.filled
  seconds = {'update': _update_seconds(case, stays['optimizer']) * passes / shape.micro_rows}
  if 'reference' in inputs.sources:
    scored = case.seconds(_flops(case), _read(case, 1), _traffic(case, train=False))
    seconds['score'] = scored * shape.filled / shape.micro_rows
  trained = shape.rows * shape.row_length
  sampling = stays | sampling_arithmetic.memory(case) if checks.samples(inputs.config, inputs.algorithm) else {}
  if inputs.config.rollout.staleness and not inputs.config.mesh.rollout_devices:  # the sampler runs meanwhile
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
  """Returns the elements of a token that a layer keeps for `remat=dots`, in the residual type."""
  cfg = case.cfg
  split = case.attention_width + 2 * case.mlp_width
  if case.compute.attention == 'triton':  # a float32 statistic of each head
    split += 2 * cfg.num_heads
  # The input is kept, too, and the results of both projections to its width.
  return split / case.train.mesh.shape['tensor'] + 3 * cfg.hidden_size


def _chunk(case: Case) -> float:
  """Returns the logits of a device that are in memory at a time."""
  sizes = case.train.mesh.shape
  rows = case.shape.micro_rows // case.train.batch_shards
  length = case.shape.row_length // sizes['context']
  vocab = case.cfg.padded_vocab_size
  return rows * head_chunk.chunk_length(rows, length, vocab, case.compute.head_elements) * vocab / sizes['tensor']


def _activations(case: Case) -> dict[str, float]:
  """Returns the bytes that an update needs besides what is held: at its head, or at a layer."""
  model, cfg = case.inputs.model, case.cfg
  residual = jnp.dtype(case.compute.residual).itemsize
  gradients = FLOAT * held.elements(partition.trained_part(model), case.train)
  if case.shape.micro_rows < case.shape.update_rows:  # the sum, and those of the rows at hand
    gradients *= 2
  width = cfg.hidden_size if case.compute.remat == 'full' else _saved_width(case)
  kept = case.tokens * width * residual * (cfg.num_layers + model.trains_mtp)
  tensor = case.train.mesh.shape['tensor']
  weights = _ALIVE * case.attention_weights(case.tokens, case.shape.row_length, tensor)
  layer = _ALIVE * case.tokens * case.layer_width(tensor) * case.width + _PREFETCHED * _gathered(case, 'layers')
  logits = _chunk(case) if model.head else 0.0
  head = logits * (FLOAT + case.width) + case.tokens * cfg.hidden_size * FLOAT + _gathered(case, 'vocab')
  activations = kept + max(weights + layer, head)
  if case.compute.platform == 'tpu' and case.compute.remat != 'full':
    activations *= _GAPS
  return dict(gradients=gradients, activations=activations)


def _gathered(case: Case, axis: str) -> float:
  """Returns the bytes of one layer, or of embedding and head, gathered and in the type of products.

  All is gathered over fsdp, and what is no expert over expert. The gradients of what is gathered are whole, in float32,
  before they are reduced.
  """
  sizes = dict(case.train.mesh.shape)
  total = 0.0
  model = case.inputs.model
  for path, x in model.table.items():
    if axis in x.axes and x.matrix | ('vocab' in x.axes) and path not in model.mtp:  # which is gathered on its own
      over = ('fsdp',) if 'expert' in x.axes else ('fsdp', 'expert')
      whole = meshes.layout(sizes | dict.fromkeys(over, 1)).sharding(x.axes, x.shape)
      count = math.prod(whole.shard_shape(x.shape)) / (x.shape[0] if x.stacked else 1)
      reduced = any(sizes[a] > 1 for a in over) and path not in model.frozen
      total += count * (case.width + FLOAT * reduced)
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


def _read(case: Case, passes: float) -> float:
  """Returns the bytes of weights and activations that so many passes over the layers move."""
  cfg = case.cfg
  model = case.inputs.model
  tensor = case.train.mesh.shape['tensor']
  unused = 0 if model.trains_mtp else sum(math.prod(model.table[path].shape) for path in model.mtp)
  weights = (transformer.num_params(cfg) - unused) / tensor / case.train.mesh.shape['expert'] * case.width
  activations = 2 * case.tokens * cfg.num_layers * case.layer_width(tensor) * case.width
  logits = case.tokens * cfg.padded_vocab_size / tensor * FLOAT
  return passes * (weights + activations + logits)


def _update_seconds(case: Case, state: float) -> float:
  """Returns the seconds of a micro-batch, with its part of the optimizer's pass over `state` bytes of its own."""
  model = case.inputs.model
  learned = held.elements(partition.trained_part(model), case.train)
  micro = case.shape.update_rows / case.shape.micro_rows
  optimizer = 2 * (state + learned * 2 * FLOAT) / micro
  again = _AGAIN[case.compute.remat]
  read = _read(case, _PASSES + again) + optimizer
  tokens = case.shape.micro_rows * case.shape.row_length
  flops = tokens * model.flops_of_update(case.context) / case.train.mesh.size
  return case.seconds(flops + again * _flops(case), read, _traffic(case, train=True))
