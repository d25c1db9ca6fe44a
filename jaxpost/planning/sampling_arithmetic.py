"""Memory and seconds of sampling by arithmetic: weights, the cache, logits, and how long completions take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxpost.hardware import memory as memory_lib
from jaxpost.models import attention_kernels, transformer
from jaxpost.models.parameters import STATEFUL
from jaxpost.planning.case import FLOAT
from jaxpost.rollout import buckets
from jaxpost.stage import batch_shape, load_weights

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.planning.case import Case
  from jaxpost.stage.records import Inputs


def slots(inputs: Inputs) -> tuple[int, int]:
  """Returns (sequences that are sampled at a time, how often), for training or else for evaluation."""
  rollout, held_out = inputs.config.rollout, inputs.config.eval
  total = rollout.prompts * rollout.group_size if inputs.algorithm.on_policy else held_out.size * held_out.samples
  found = batch_shape.slots(rollout, total)
  return found, math.ceil(total / found)


def prefilled(inputs: Inputs) -> int:
  """Returns the prompts of the largest prefill, the only ones whose prefixes are there, see `Buckets.prefill_rows`.

  Requests of an environment come one by one, so that each of them may be a prompt of its own.
  """
  config = inputs.config
  group = config.rollout.group_size if inputs.algorithm.on_policy else config.eval.samples
  return math.ceil(slots(inputs)[0] / (1 if config.environment else group))


def entry_bytes(case: Case) -> float:
  """Returns the bytes of a token in the KV cache of a device; one of 8 bits has a scale beside each head's codes."""
  tensor = case.rollout.mesh.shape['tensor']
  coded = case.inputs.config.rollout.cache
  total = 0.0
  for heads, sizes in case.cfg.layer_caches:
    of_head = sum(n + case.width if coded else n * case.width for n in sizes)
    total += of_head * (heads / tensor if heads % tensor == 0 else heads)
  return total


def weight_bytes(case: Case) -> float:
  """Returns the bytes of the sampler's weights on a device."""
  model = case.inputs.model.base or case.inputs.model
  saved = 0.0
  if case.inputs.config.rollout.weights:  # of 8 bits
    from jaxpost.models import scaled

    saved = scaled.bytes_saved(model, case.rollout, case.width)
  kept = model.table.keys() - model.mtp
  return memory_lib.size(load_weights.described(model, case.rollout, case.compute.dtype, kept)) - saved


def _own_weights(case: Case) -> float:
  """Returns the bytes of the sampler's weights without those of training that it reads in place."""
  inputs, model = case.inputs, case.inputs.model
  if not inputs.config.rollout.share_base:
    return weight_bytes(case)
  # A frozen weight that the layouts split in different ways is a copy, too.
  specs = {path: {x.spec(p.axes, p.shape) for x in (case.train, case.rollout)} for path, p in model.table.items()}
  own = [path for path in specs if path not in model.frozen or len(specs[path]) > 1]
  return float(memory_lib.size(load_weights.described(model, case.rollout, inputs.config.model.param_dtype, own)))


def _state(cfg: ModelConfig, tensor: int) -> float:
  """Returns the bytes of a device that layers with a state instead of keys and values keep of a sequence."""
  layers = sum(stack in STATEFUL for stack in cfg.layer_stacks)
  sizes = (math.prod(shape) / (tensor if shape[0] % tensor == 0 else 1) for shape in cfg.state_shapes)
  return layers * sum(sizes) * FLOAT


def memory(case: Case) -> dict[str, float]:
  """Returns the bytes of the sampler's weights, cache, what a block copies of it, and logits.

  'prefill': what a prefill needs more than a block of decoding does, which never runs at the same time.
  """
  cfg = case.cfg
  rollout = case.inputs.config.rollout
  tensor = case.rollout.mesh.shape['tensor']
  at_a_time = slots(case.inputs)[0]
  mine = math.ceil(at_a_time / case.rollout.batch_shards)
  # A block of decoding may run past the last token that counts.
  length = rollout.max_prompt_length + rollout.max_new_tokens + (rollout.block or case.compute.decode_block)
  logits = 2 * mine * cfg.padded_vocab_size / tensor * FLOAT
  prompts = math.ceil(prefilled(case.inputs) / case.rollout.batch_shards)
  padded = buckets.bucket(rollout.max_prompt_length, rollout.max_prompt_length + rollout.max_new_tokens)
  tokens = prompts * padded
  entry = entry_bytes(case)
  state = _state(cfg, tensor)
  # A block attends to the part of the cache that is filled, up to a power of two, and copies it if it is not all; the
  # decoding kernel of GPUs copies nothing. States are there before and after it.
  in_place = not rollout.cache and attention_kernels.compute_of_decoding(case.compute, cfg, rollout).decode_kernel
  copied_entries = 0 if in_place else 2 ** int(math.log2(length - 1))
  copied = mine * (copied_entries * entry + state)
  cache = (mine * length + tokens) * entry + (mine + prompts) * state
  prefill = tokens * case.layer_width(tensor) * case.width + case.attention_weights(tokens, padded, tensor)
  more = max(0.0, prefill - copied - logits)
  return dict(sampler=_own_weights(case), cache=cache, copied=copied, logits=logits, prefill=more)


def seconds(case: Case) -> float:
  """Returns the seconds of sampling: each token reads the weights and, on average, half of its answer's cache."""
  cfg = case.cfg
  rollout = case.inputs.config.rollout
  tensor = case.rollout.mesh.shape['tensor']
  at_a_time, waves = slots(case.inputs)
  mine = math.ceil(at_a_time / case.rollout.batch_shards)
  weights = weight_bytes(case)
  seen = rollout.max_prompt_length + rollout.max_new_tokens / 2
  one = case.seconds(mine * transformer.flops_per_token(cfg, seen) / tensor, weights + mine * seen * entry_bytes(case))
  tokens = rollout.prompts * rollout.max_prompt_length / case.rollout.batch_shards
  prefill = tokens * transformer.flops_per_token(cfg, rollout.max_prompt_length / 2) / tensor
  return waves * rollout.max_new_tokens * one + case.seconds(prefill, weights)
