"""Memory and seconds of sampling by arithmetic: weights, KV cache, logits, prefill and decoding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxpost.hardware import memory as memory_lib
from jaxpost.models import decode_kernels, transformer
from jaxpost.models.parameters import STATEFUL
from jaxpost.planning.case import FLOAT, Case
from jaxpost.rollout import buckets
from jaxpost.stage import batch_shape, load_weights

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.stage.records import Inputs


def slots(inputs: Inputs, shards: int = 1) -> tuple[int, int]:
  """Returns (sequences that each of `shards` samples at a time, number of such waves), of training or of evaluation."""
  rollout, held_out = inputs.config.rollout, inputs.config.eval
  total = rollout.prompts * rollout.group_size if inputs.algorithm.on_policy else held_out.size * held_out.samples
  num_slots = batch_shape.slots(inputs.config, inputs.algorithm.on_policy)
  return math.ceil(num_slots / shards), math.ceil(total / num_slots)


def prefilled(inputs: Inputs) -> int:
  """Returns the number of prompts of the largest prefill, see `Buckets.prefill_rows`.

  Requests of an environment come one by one, so each of them may be a separate prompt.
  """
  config = inputs.config
  group = config.rollout.group_size if inputs.algorithm.on_policy else config.eval.samples
  return math.ceil(slots(inputs)[0] / (1 if config.environment else group))


def entry_bytes(case: Case) -> float:
  """Returns the bytes of a token in the KV cache of a device; an 8-bit cache also has a scale per head."""
  tensor = case.rollout.mesh.shape['tensor']
  quantized = case.inputs.config.rollout.cache
  total = 0.0
  for heads, sizes in case.cfg.layer_caches:
    head_bytes = sum(n + case.width if quantized else n * case.width for n in sizes)
    total += head_bytes * (heads / tensor if heads % tensor == 0 else heads)
  return total


def weight_bytes(case: Case) -> float:
  """Returns the bytes of the sampler's weights on a device."""
  model = case.inputs.model.base or case.inputs.model
  saved = 0.0
  if case.inputs.config.rollout.weights:  # 8-bit weights
    from jaxpost.models import scaled

    saved = scaled.bytes_saved(model, case.rollout, case.width)
  paths = model.table.keys() - model.mtp
  return memory_lib.size(load_weights.described(model, case.rollout, case.compute.dtype, paths)) - saved


def _own_weights(case: Case) -> float:
  """Returns the bytes of the sampler's weights, without training weights that it reads in place."""
  inputs, model = case.inputs, case.inputs.model
  if not inputs.config.rollout.share_base:
    return weight_bytes(case)
  # Frozen weights that the two layouts split differently are copied as well.
  specs = {path: {x.spec(p.axes, p.shape) for x in (case.train, case.rollout)} for path, p in model.table.items()}
  copied = [path for path in specs if path not in model.frozen or len(specs[path]) > 1]
  return float(memory_lib.size(load_weights.described(model, case.rollout, inputs.config.model.param_dtype, copied)))


def _state(cfg: ModelConfig, tensor: int) -> float:
  """Returns the bytes per sequence on a device of layers with a recurrent state instead of a KV cache."""
  layers = sum(stack in STATEFUL for stack in cfg.layer_stacks)
  sizes = (math.prod(shape) / (tensor if shape[0] % tensor == 0 else 1) for shape in cfg.state_shapes)
  return layers * sum(sizes) * FLOAT


def memory(case: Case) -> dict[str, float]:
  """Returns the bytes of the sampler's weights, its cache, the part of it that a decoding block copies, and logits.

  'prefill' is what a prefill needs more than a decoding block, which never runs at the same time.
  """
  cfg = case.cfg
  rollout = case.inputs.config.rollout
  tensor = case.rollout.mesh.shape['tensor']
  slots_per_device, _ = slots(case.inputs, case.rollout.batch_shards)
  block = rollout.block or case.compute.decode_block
  compute = decode_kernels.compute_of_decoding(case.compute, cfg, rollout)
  multiple = rollout.page_size or decode_kernels.entries_multiple(compute, cfg)
  length = buckets.cache_length(rollout.max_prompt_length + rollout.max_new_tokens, block, multiple)
  logits = 2 * slots_per_device * cfg.padded_vocab_size / tensor * FLOAT
  prompts = math.ceil(prefilled(case.inputs) / case.rollout.batch_shards)
  padded = buckets.bucket(rollout.max_prompt_length, rollout.max_prompt_length + rollout.max_new_tokens)
  tokens = prompts * padded
  entry = entry_bytes(case)
  state = _state(cfg, tensor)
  # A block copies the filled part of the cache that it attends to, up to a power of two, unless that is all of it. A
  # kernel for decoding copies nothing. States are held twice: before and after the block.
  copied_entries = 0 if compute.decode_kernel else 2 ** int(math.log2(length - 1))
  if compute.platform == 'tpu' and (compute.decode_kernel or not (rollout.cache or rollout.page_size)):
    copied_entries = 3 * block  # XLA for TPU reads a plain cache where it is, and holds the entries of a block thrice
  copied = slots_per_device * (copied_entries * entry + state)
  cache = (slots_per_device * length + tokens) * entry + (slots_per_device + prompts) * state
  prefill = tokens * case.layer_width(tensor) * case.width + case.attention_weights(tokens, padded, tensor)
  prefill_excess = max(0.0, prefill - copied - logits)
  return dict(sampler=_own_weights(case), cache=cache, copied=copied, logits=logits, prefill=prefill_excess)


def seconds(case: Case) -> float:
  """Returns the seconds of sampling: a token reads the weights, its prompt's cache and half of its answer's."""
  cfg = case.cfg
  rollout = case.inputs.config.rollout
  tensor = case.rollout.mesh.shape['tensor']
  slots_per_device, waves = slots(case.inputs, case.rollout.batch_shards)
  weights = weight_bytes(case)
  context = rollout.max_prompt_length + rollout.max_new_tokens / 2
  flops = slots_per_device * transformer.flops_per_token(cfg, context) / tensor
  token_seconds = case.seconds(flops, weights + slots_per_device * context * entry_bytes(case))
  tokens = rollout.prompts * rollout.max_prompt_length / case.rollout.batch_shards
  prefill = tokens * transformer.flops_per_token(cfg, rollout.max_prompt_length / 2) / tensor
  return waves * rollout.max_new_tokens * token_seconds + case.seconds(prefill, weights)
