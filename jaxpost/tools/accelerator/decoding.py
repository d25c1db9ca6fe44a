"""Measures the sampler: seconds per token against memory reads, and its agreement with the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.hardware import chips, memory
from jaxpost.models.transformer import flops_per_token
from jaxpost.rl import batching
from jaxpost.rollout.sequence import ActiveSequence, Request
from jaxpost.stage import assemble, on_policy
from jaxpost.tools.accelerator import chip, workload
from jaxpost.tools.accelerator.workload import Running
from jaxpost.tools.bench import decode_bytes

if TYPE_CHECKING:
  from jaxpost.rollout.native import NativeEngine

_ROUNDS = 5


def _config(prompt: int, new: int, **rollout: Any) -> dict[str, Any]:
  section = dict(max_prompt_length=prompt, max_new_tokens=new, prompts=1, group_size=2) | rollout
  return dict(algorithm='grpo', train=dict(steps=1), rollout=section)


def _loaded(running: Running, slots: int) -> NativeEngine:
  """Returns an engine with the weights of the stage, and frees the training copy."""
  engine = on_policy.make_engine(running.placed, slots=slots)
  engine.load(running.params, 0)
  running.params = {}
  return engine


def _median_seconds(work: Callable[[], Any], rounds: int = _ROUNDS) -> float:
  """Returns the median seconds of `work`, including the wait for its results, after a call that compiles."""
  jax.block_until_ready(work())
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    jax.block_until_ready(work())
    times.append(time.perf_counter() - start)
  return float(np.median(times))


def _entry(engine: NativeEngine, prompt: np.ndarray, slots: int) -> Any:
  """Returns an entry that forks the first row of a prefill into `slots` slots."""
  sequences = {i: ActiveSequence(Request(prompt, 0, i), engine.config.max_new_tokens, prompt) for i in range(slots)}
  return engine.entry(sequences, dict.fromkeys(range(slots), 0))


def _share(seconds: float, count: float) -> dict[str, float]:
  """Returns `count` bytes and the share of copy bandwidth at which they were read."""
  size = 0 if chips.of_kind(jax.devices()[0].device_kind) else 64
  return dict(bytes_read=count, share_of_copy=count / seconds / chip.measured(size)['copy_bytes_per_s'])


def _filled_entries(prompt: int, block: int) -> float:
  """Returns the cache entries of a slot that a token of the timed blocks attends to, on average.

  The first block after a prompt of `prompt` tokens compiles, and the next `_ROUNDS` are timed. A token attends to the
  entries before its block, and to those of the block before itself.
  """
  return prompt + block * (1 + _ROUNDS) / 2 + (block - 1) / 2


def decode(preset: str, layers: int, slots: int, length: int, block: int, top_p: float = 1.0) -> dict[str, Any]:
  """Times decoding blocks with all slots in use, whose caches are filled to `length` entries by the end.

  Args:
    slots: sequences decoded at a time.
    block: tokens of a dispatch.
    top_p: nucleus of sampling; 1: off.
  """
  cfg = workload.shape_of(preset, layers)
  blocks = _ROUNDS + 2
  prompt = np.arange(3, 3 + max(1, length - blocks * block), dtype=np.int32) % (cfg.vocab_size - 3) + 3
  config = _config(max(16, len(prompt)), blocks * block, slots=slots, block=block, top_p=top_p)
  with workload.stage(cfg, config, ('prompts', np.array([len(prompt)] * 2))) as running:
    engine = _loaded(running, slots)
    prefilled = engine.prefill([prompt])
    state = engine.insert(
      engine.init_decode_state(), prefilled, _entry(engine, prompt, slots), on_policy.run_key(0, 1), 0
    )
    read_bucket = engine.buckets.decode(min(length, engine.length), engine.max_concurrent_decodes)
    state_cell = [state]

    def run() -> Any:
      state_cell[0], drawn = engine.generate(state_cell[0], read_bucket)
      return drawn

    seconds = _median_seconds(run, blocks - 2) / engine.block
    profiled = workload.profile(lambda: jax.block_until_ready(run()), per=engine.block)
    weights, cache = engine.weights, state_cell[0].cache
    filled = _filled_entries(len(prompt), engine.block)
    return dict(
      slots=engine.max_concurrent_decodes,
      token_s=seconds,
      tokens_per_s=slots / seconds,
      cache_bytes=memory.size(cache),
      read_entries=read_bucket or filled,
      cache_entries=engine.length,
      filled_entries=filled,
      **_share(seconds, decode_bytes(weights, cache, filled / engine.length)),
      operations_per_token=profiled.pop('operations', None),
      profile=profiled,
      **running.figures(),
    )


def prefill(preset: str, layers: int, prompts: int, length: int) -> dict[str, Any]:
  """Times the prefill of a batch of prompts: tokens per second and MFU, without the head."""
  cfg = workload.shape_of(preset, layers)
  with workload.stage(cfg, _config(length, 16), ('prompts', np.array([length] * 2))) as running:
    engine = _loaded(running, prompts)
    texts = [np.full(length, 5, np.int32)] * prompts
    seconds = _median_seconds(lambda: engine.prefill(texts, rows=prompts))
    head = 2 * cfg.padded_vocab_size * cfg.hidden_size
    flops = prompts * length * (flops_per_token(cfg, length / 2) - head)
    return dict(
      prefill_s=seconds, tokens_per_s=prompts * length / seconds, mfu=chip.mfu(flops / seconds), **running.figures()
    )


def _copied_bytes(params: dict, weights: dict, moved: int) -> float:
  """Returns the bytes per device that sending weights to the sampler reads (all of `params`) and writes.

  Args:
    moved: bytes of the sampler's `weights` over all devices that are written, and not shared with `params`.
  """
  share = moved / sum(x.nbytes for x in jax.tree.leaves(weights))
  return memory.size(params) + share * memory.size(weights)


def moves(preset: str, layers: int, slots: int, length: int) -> dict[str, Any]:
  """Times the work between decoding blocks: `insert` into one slot and all slots, `move`, and sending weights."""
  cfg = workload.shape_of(preset, layers)
  prompt = np.full(max(16, length // 2), 5, np.int32)
  config = _config(len(prompt), length - len(prompt), slots=slots)
  with workload.stage(cfg, config, ('prompts', np.array([len(prompt)] * 2))) as running:
    engine = on_policy.make_engine(running.placed, slots=slots)
    loads = []
    for _ in range(3):
      start = time.perf_counter()
      moved = engine.load(running.params, 0)['bytes']
      loads.append(time.perf_counter() - start)
    copied = _copied_bytes(running.params, engine.weights, moved)
    prefilled, key = engine.prefill([prompt]), on_policy.run_key(0, 1)
    state_cell = [engine.init_decode_state()]

    def insert(count: int) -> Callable[[], Any]:
      entry = _entry(engine, prompt, count)

      def run() -> Any:
        state_cell[0] = engine.insert(state_cell[0], prefilled, entry, key, 0)
        return state_cell[0].positions

      return run

    def move() -> Any:
      state_cell[0] = engine.move(state_cell[0], {engine.max_concurrent_decodes - 1: 0})
      return state_cell[0].positions

    return dict(
      insert_one_s=_median_seconds(insert(1)),
      insert_all_s=_median_seconds(insert(slots)),
      move_one_s=_median_seconds(move),
      reshard_s=min(loads[1:]),
      reshard_bytes=copied,
      reshard_share_of_copy=_share(min(loads[1:]), copied)['share_of_copy'],
      **running.figures(),
    )


def mismatch(preset: str, layers: int, contexts: tuple[int, ...], new: int) -> dict[str, Any]:
  """Compares log-probs of the sampler with those of the trainer for the same tokens, by tokens of context.

  The KL divergence of the sampler from the trainer is estimated over the drawn tokens by the mean of
  exp(d) - 1 - d with d = log p_trainer - log p_sampler (k3, http://joschu.net/blog/kl-approx.html).

  Args:
    contexts: tokens of the prompts.
    new: tokens drawn after each.
  """
  cfg = workload.shape_of(preset, layers)
  longest = max(contexts)
  config = _config(longest, new, prompts=len(contexts)) | dict(reward='even_words')
  with workload.stage(cfg, config, ('prompts', np.array(contexts))) as running:
    roles, controller, engine = assemble.make_parts(running.placed, running.params)
    engine.load(roles.policy.params, 0)
    rollout = controller.sample(0).rollout
    mask = batching.completion_mask(rollout)
    batch = batching.to_batch(rollout, range(len(mask)), mask, {}, controller.step_shape)
    row_logprobs = jax.device_get(roles.policy.score(batch).logprobs)
    trainer_logprobs = batching.from_rows(rollout, row_logprobs, controller.step_shape)
    controller.close()
    by_context = {}
    lengths = batching.prompt_lengths(rollout)
    for n in sorted(set(lengths.tolist())):
      selected = (lengths == n)[:, None] & (mask > 0)
      d = (trainer_logprobs - rollout.logprobs)[selected].astype(np.float64)
      by_context[str(n)] = dict(
        tokens=len(d), kl=float(np.mean(np.expm1(d) - d)), max_difference=float(np.abs(d).max()), mean=float(d.mean())
      )
    return dict(
      by_context=by_context,
      dtype=running.placed.compute.dtype,
      rejected_shapes=len(running.placed.compute.rejected_shapes),
      **running.figures(),
    )
