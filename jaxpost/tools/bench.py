"""The standard workload: SFT, sampling and GRPO of two small Qwen3 shapes.

Documents of 32 to 512 random tokens (log-normal), prompts of 60 (--prompt),
AdamW. It runs the stages that `launch.train` runs, on data made up in memory.
"""

from __future__ import annotations

import collections
import dataclasses
import resource
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import testing
from jaxpost.data.loader import PackedStream
from jaxpost.hardware import memory as memory_lib
from jaxpost.hardware import probe
from jaxpost.models import presets
from jaxpost.models.transformer import flops_per_token
from jaxpost.monitor.metrics import MetricsWriter
from jaxpost.programs import train as programs
from jaxpost.rewards.pool import RewardPool
from jaxpost.stage import assemble, on_policy, place, prepare
from jaxpost.stage import config as config_lib
from jaxpost.stage import sources as sources_lib
from jaxpost.stage.records import Data, PreparedStage, Workers
from jaxpost.types import Request

if TYPE_CHECKING:
  from jaxpost.loop import Stage


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the workload; launch/bench.py has them as flags."""

  shape: str = 'xs'
  batch: int = 16
  steps: int = 5
  prompt: int = 60
  new: int = 128
  samples: int = 0
  ragged: bool = False
  mean: int = 64
  bf16: bool = False
  mesh: str = 'fsdp=-1'
  top_p: float = 1.0


def even_words(completions, **columns):
  """Reward of the GRPO workload: even numbers among the first 32 words."""
  del columns
  return [float(sum(int(w) % 2 == 0 for w in c.split()[:32])) for c in completions]


def run(what: str, options: Options, workdir) -> dict:
  """One JSON-able record of figures; `what` names a function here."""
  figures = {'sft': sft, 'sample': sample, 'grpo': grpo, 'reshard': reshard, 'turns': turns, 'prefill': prefill}[what](
    options, workdir
  )
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return dict(
    peer='jaxpost',
    what=what,
    **dataclasses.asdict(options),
    processes=jax.process_count(),
    devices=jax.device_count(),
    jax=jax.__version__,
    device=jax.devices()[0].device_kind,
    **figures,
    max_rss_mib=round(peak / 2**20),
  )


def make_stage(what: str, o: Options, workdir) -> tuple[place.PlacedStage, Stage]:
  """The stage that a config for this workload would give."""
  samples = what != 'sft'
  config = config_lib.parse(
    dict(
      algorithm='grpo' if samples else 'sft',
      reward='even_words',
      model=dict(preset=o.shape, dtype='bfloat16' if o.bf16 else 'float32'),
      data=dict(path='random'),
      train=dict(steps=o.steps + 2, batch_size=o.batch, row_length=0 if samples else 512),
      optim=dict(lr=1e-5 if samples else 1e-4, weight_decay=1e-4),
      rollout=dict(
        prompts=max(1, o.batch // 8),
        group_size=8,
        max_prompt_length=-(-o.prompt // 64) * 64,
        max_new_tokens=o.new,
        top_p=o.top_p,
      ),
      rl=dict(kl_coef=0.04),
      log=dict(tensorboard=False, watchdog_s=0.0),
      mesh=dict(train=o.mesh, rollout='data=-1' if jax.device_count() > 1 else ''),
    )
  )['grpo' if samples else 'sft']
  algorithm, config = prepare.settle(config)
  source = sources_lib.Source(presets.PRESETS[o.shape])
  vocab = source.config.vocab_size
  stops = (1, *range(3, 3 + vocab // o.mean)) if o.ragged else (1,)
  sources = {'policy': source, 'reference': source} if samples else {'policy': source}
  inputs = prepare.make_inputs(what, config, algorithm, sources, testing.IntTokenizer(vocab, stops))
  if samples:
    data = Data(stream=testing.RandomPrompts(config.rollout.prompts, o.prompt, vocab))
  else:
    lengths = testing.document_lengths(4096)
    stream = PackedStream(
      lambda i: testing.random_example(lengths[i], vocab, i), 4096, batch_size=o.batch, row_length=512, seed=0
    )
    data = Data(stream=stream, first_batch=next(stream)[0])
  rewards = RewardPool(f'{__name__}:even_words', workers=1) if what == 'grpo' else None
  placed = place.place_stage(PreparedStage(inputs, data, Workers(rewards)))
  params = programs.random_params(placed.model, 0, jnp.float32, placed.model.shardings(placed.train), placed.ledger)
  if what in ('sample', 'reshard', 'turns', 'prefill'):
    return placed, params
  writer = MetricsWriter(workdir, tensorboard=False, primary=False)
  return placed, assemble.assemble(placed, workdir, writer, params)


def update(stage: Stage, item) -> list:
  return [stage.roles.trainable[role].update(batch) for role, batch in item.updates]


def sft(o: Options, workdir) -> dict:
  """Real tokens a second, after the first two steps."""
  placed, stage = make_stage('sft', o, workdir)
  times, cpu, tokens = [], [], []
  for _ in range(o.steps + 2):
    item = next(stage.stream)
    start, busy = time.perf_counter(), time.process_time()
    jax.block_until_ready(update(stage, item))
    times.append(time.perf_counter() - start)
    cpu.append(time.process_time() - busy)
    tokens.append(item.info['tokens'])
  stage.stream.close()
  real = sum(tokens[2:]) / sum(times[2:])
  dtype = jnp.bfloat16 if o.bf16 else jnp.float32
  rate = probe.matmul_rate(dtype)
  lengths = testing.document_lengths(4096)  # what a token sees on average
  context = (lengths**2).sum() / lengths.sum() / 2
  flops = 3 * flops_per_token(placed.model.config, context)
  step = float(np.mean(times[2:]))
  return dict(
    step_s=step,
    cpu_s=float(np.mean(cpu[2:])),
    real_tokens_per_s=real,
    padded_tokens_per_s=o.batch * 512 / step,
    matmul_gflops=rate / 1e9,
    share_of_matmul=flops * real / rate,
    all=[round(t, 3) for t in times],
    **memory(placed, 'update'),
  )


def memory(placed: place.PlacedStage, program: str) -> dict:
  row = next(r for r in placed.ledger.rows if r['program'] == program)
  return dict(
    compile_s=row['compile_s'], temp_mib=row['temp_bytes'] / 2**20, argument_mib=row['argument_bytes'] / 2**20
  )


def sample(o: Options, workdir) -> dict:
  """Tokens a second; --batch in flight, --samples in all."""
  o = dataclasses.replace(o, samples=o.samples or o.batch)
  placed, params = make_stage('sample', o, workdir)
  engine = on_policy.make_engine(placed, slots=o.batch)
  engine.load(params, 0)
  source = testing.RandomPrompts(o.samples, o.prompt, placed.model.config.vocab_size)
  times, cpu, counts = [], [], []
  key = on_policy.run_key(0, 1)
  for step in range(o.steps + 1):
    prompts, _ = next(source)
    start, busy = time.perf_counter(), time.process_time()
    rollout = engine(prompts, group_size=1, run_key=key, step=step)
    times.append(time.perf_counter() - start)
    cpu.append(time.process_time() - busy)
    counts.append(int(rollout.lengths.sum()))
  rates = [n / t for n, t in zip(counts[1:], times[1:])]
  # Prefill counted, as if it were decoding, too.
  slots = engine.max_concurrent_decodes
  seconds = float(np.median(times[1:])) * rollout.occupancy * slots / counts[-1]
  filled = (o.prompt + counts[-1] / o.samples / 2) / engine.length
  _, state = engine.described(params)
  read = decode_bytes(engine.weights, state.cache, filled)
  bandwidth = probe.memory_rate()
  return dict(
    wall_s=float(np.median(times[1:])),
    first_s=times[0],
    tokens=counts[-1],
    tokens_per_s=float(np.median(rates)),
    best_tokens_per_s=max(rates),
    cpu_s=float(np.median(cpu[1:])),
    slot_occupancy=rollout.occupancy,
    **rollout.figures,
    decode_s=seconds,
    decode_bytes=read,
    bytes_per_s=bandwidth,
    share_of_bandwidth=read / bandwidth / seconds,
  )


def decode_bytes(weights: dict, cache, filled: float) -> float:
  """Lower bound on the bytes that a device reads to decode one token in all slots.

  filled: share of the cache.
  """
  if 'head' in weights:  # else the embedding is read whole, as the head
    weights = {k: x for k, x in weights.items() if k != 'embed'}
  return memory_lib.size(weights) + memory_lib.size(cache) * filled


def reshard(o: Options, workdir) -> dict:
  """Bytes a second, read and written, of moving the weights and of a copy."""
  placed, params = make_stage('reshard', o, workdir)
  engine = on_policy.make_engine(placed)
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  times, copies = [], []
  for _ in range(o.steps + 1):
    start = time.perf_counter()
    written = engine.load(params, 0)['bytes']
    times.append(time.perf_counter() - start)
    shared = sum(x.nbytes for x in jax.tree.leaves(engine.weights)) - written
    engine.unload()
    start = time.perf_counter()
    copy = jax.block_until_ready(jax.tree.map(jnp.copy, params))
    copies.append(time.perf_counter() - start)
    del copy
  rate = (size + written) / min(times[1:])
  plain = 2 * size / min(copies[1:])
  return dict(
    reshard_s=min(times[1:]),
    moved_gb=(size + written) / 1e9,
    shared_gb=shared / 1e9,
    gb_per_s=rate / 1e9,
    copy_gb_per_s=plain / 1e9,
    share_of_copy=rate / plain,
    all=[round(t, 4) for t in times],
  )


def turns(o: Options, workdir) -> dict:
  """Conversations of four turns: with their cache kept, and read anew.

  --batch slots, --samples conversations; a turn draws --new tokens at most,
  and an answer of 24 follows some blocks later.
  """
  o = dataclasses.replace(o, samples=o.samples or o.batch, new=4 * o.new + 72)
  placed, params = make_stage('turns', o, workdir)
  engine = on_policy.make_engine(placed, slots=o.batch)
  engine.load(params, 0)
  vocab = placed.model.config.vocab_size
  out, most = {}, (o.new - 72) // 4
  for name, reuse_cache in (('kept', True), ('read', False)):
    spent = []
    for _ in range(o.steps + 1):
      talk = _Talk(testing.RandomPrompts(o.samples, o.prompt, vocab), most)
      start, busy = time.perf_counter(), time.process_time()
      figures = engine.serve(
        talk.requests,
        run_key=on_policy.run_key(0, 1),
        step=0,
        next_requests=talk.follow,
        prefill_rows=2,
        reuse_cache=reuse_cache,
      )
      spent.append((time.perf_counter() - start, time.process_time() - busy))
    wall, cpu = (float(np.median(x)) for x in zip(*spent[1:]))
    out |= {f'{name}/{k}': x for k, x in dict(wall_s=wall, cpu_s=cpu, tokens=talk.drawn, **figures).items()}
  return out


def prefill(o: Options, workdir) -> dict:
  """Texts of one token: --batch in groups of 8, and each read alone."""
  o = dataclasses.replace(o, new=1)
  placed, params = make_stage('prefill', o, workdir)
  engine = on_policy.make_engine(placed, slots=o.batch)
  engine.load(params, 0)
  vocab, out = placed.model.config.vocab_size, {}
  for name, group in (('group', 8), ('alone', 1)):
    source = testing.RandomPrompts(o.batch // group, o.prompt, vocab)
    times = []
    for step in range(o.steps + 1):
      prompts, _ = next(source)
      start = time.perf_counter()
      engine(prompts, group_size=group, run_key=on_policy.run_key(0, 1), step=step)
      times.append(time.perf_counter() - start)
    out[f'{name}_s'] = float(np.median(times[1:]))
  return dict(out, share=out['group_s'] / out['alone_s'])


class _Talk:
  """Conversations whose answers are made up."""

  def __init__(self, prompts, most: int):
    self.requests = [Request(p.tokens, p.index, 0, dict(max_tokens=most)) for p in next(prompts)[0]]
    self.answer = np.arange(40, 64, dtype=np.int32)
    self.waiting, self.drawn = collections.deque(), 0
    self.said = collections.Counter()

  def follow(self, done, idle) -> list[Request]:
    for c in done:
      self.drawn += len(c.tokens)
      self.said[c.request.prompt] += 1
      if self.said[c.request.prompt] < 4:
        self.waiting.append(
          [
            4,
            Request(np.concatenate([c.request.tokens, c.tokens, self.answer]), c.request.prompt, 0, c.request.sampling),
          ]
        )
    for item in self.waiting:
      item[0] -= 1
    ready = []
    while self.waiting and (idle or self.waiting[0][0] < 0):
      ready.append(self.waiting.popleft()[1])
    return ready


def grpo(o: Options, workdir) -> dict:
  """Seconds a step, and what each phase takes of it."""
  placed, stage = make_stage('grpo', o, workdir)
  times = []
  stage.timer.pop()
  for _ in range(o.steps + 2):
    with stage.timer('data'):
      item = next(stage.stream)
    with stage.timer('update'):
      jax.block_until_ready(update(stage, item))
    times.append(stage.timer.pop())
  stage.stream.close()
  named = {k: float(np.median([t[k] for t in times[1:]])) for k in times[0]}
  step = named['time/step']
  return dict(
    step_s=step,
    completions_per_step=o.batch,
    controller_share=(named['time/pack'] + named['time/data']) / step,
    **named,
    all=[round(t['time/step'], 3) for t in times],
    **memory(placed, 'update'),
  )
