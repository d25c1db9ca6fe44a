"""The standard workload: SFT, sampling and GRPO of two small Qwen3 shapes.

Documents have 32 to 512 random tokens (log-normal), prompts 60 (--prompt); the optimizer is AdamW. It runs the same
stages as `launch.train`, on data made in memory.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import testing
from jaxpost.data.loader import PackedStream
from jaxpost.hardware import memory as memory_lib
from jaxpost.hardware import memory_rate, probe
from jaxpost.models import presets
from jaxpost.models.transformer import flops_per_token
from jaxpost.monitor.metrics import MetricsWriter
from jaxpost.programs import train as programs
from jaxpost.rewards.pool import RewardPool
from jaxpost.stage import assemble, on_policy, place, prepare
from jaxpost.stage import config as config_lib
from jaxpost.stage.records import Data, PreparedStage, Source, Workers

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.loop import Stage
  from jaxpost.types import Item

_ROW_LENGTH = 512  # of SFT's packed rows
_GROUP = 8  # completions of a prompt
_DOCUMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the workload; launch/workload_flags.py has them as flags."""

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
  share_prompt: bool = False


def even_words(completions: list[str], **columns: Any) -> list[float]:
  """The reward of the GRPO workload: the count of even numbers among the first 32 words."""
  del columns
  return [float(sum(int(w) % 2 == 0 for w in c.split()[:32])) for c in completions]


def run(what: str, options: Options, workdir: epath.PathLike) -> dict:
  """Times 'sft', 'sample' or 'grpo' and returns its record."""
  return record(what, options, {'sft': sft, 'sample': sample, 'grpo': grpo}[what](options, workdir))


def record(what: str, options: Options, figures: dict) -> dict:
  """Returns a JSON-able record of a measurement: its figures, its options and the machine."""
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


def make_stage(what: str, options: Options, workdir: epath.PathLike) -> tuple[place.PlacedStage, Stage]:
  """Returns the stage of this workload, ready to train, as from a config."""
  placed, params = place_with_weights(what, options)
  writer = MetricsWriter(workdir, tensorboard=False, primary=False)
  return placed, assemble.assemble(placed, workdir, writer, params)


def place_with_weights(what: str, options: Options) -> tuple[place.PlacedStage, dict]:
  """Returns the stage of a workload on its devices, with random parameters."""
  algorithm, config = prepare.resolve(_config(what, options))
  source = Source(presets.every()[options.shape])
  vocab = source.config.vocab_size
  # More stop ids end completions of random tokens sooner: after `mean` tokens on average.
  stops = (1, *range(3, 3 + vocab // options.mean)) if options.ragged else (1,)
  sources = {'policy': source} if what == 'sft' else {'policy': source, 'reference': source}
  inputs = prepare.make_inputs(what, config, algorithm, sources, testing.IntTokenizer(vocab, stops))
  if what == 'sft':
    stream = _documents(options, vocab)
    data = Data(stream=stream, first_batch=next(stream)[0])
  else:
    data = Data(stream=testing.RandomPrompts(config.rollout.prompts, options.prompt, vocab))
  rewards = RewardPool(f'{__name__}:even_words', workers=1) if what == 'grpo' else None
  placed = place.place_stage(PreparedStage(inputs, data, Workers(rewards)))
  params = programs.random_params(placed.model, 0, jnp.float32, placed.model.shardings(placed.train), placed.ledger)
  return placed, params


def _config(what: str, options: Options) -> config_lib.Config:
  on_policy = what != 'sft'
  return config_lib.parse(
    dict(
      algorithm='grpo' if on_policy else 'sft',
      reward='even_words',
      model=dict(preset=options.shape, dtype='bfloat16' if options.bf16 else 'float32'),
      data=dict(path='random'),
      train=dict(
        steps=options.steps + 2,
        batch_size=options.batch,
        row_length=0 if on_policy else _ROW_LENGTH,
        share_prompt=options.share_prompt,
      ),
      optim=dict(lr=1e-5 if on_policy else 1e-4, weight_decay=1e-4),
      rollout=dict(
        prompts=max(1, options.batch // _GROUP),
        group_size=_GROUP,
        max_prompt_length=-(-options.prompt // 64) * 64,
        max_new_tokens=options.new,
        top_p=options.top_p,
      ),
      rl=dict(kl_coef=0.04),
      log=dict(tensorboard=False, watchdog_s=0.0),
      mesh=dict(train=options.mesh, rollout='data=-1' if jax.device_count() > 1 else ''),
    )
  )['grpo' if on_policy else 'sft']


def _documents(options: Options, vocab: int) -> PackedStream:
  lengths = testing.document_lengths(_DOCUMENTS)
  return PackedStream(
    lambda i: testing.random_example(lengths[i], vocab, i),
    _DOCUMENTS,
    batch_size=options.batch,
    row_length=_ROW_LENGTH,
    seed=0,
  )


def update(stage: Stage, item: Item) -> list:
  """Dispatches the updates of a step; returns their metrics, which are ready when the updates are done."""
  return [stage.roles.trainable[role].update(batch) for role, batch in item.updates]


def sft(options: Options, workdir: epath.PathLike) -> dict:
  """Times SFT: tokens per second without padding, after the first two steps."""
  placed, stage = make_stage('sft', options, workdir)
  times = []
  cpu = []
  tokens = []
  for _ in range(options.steps + 2):
    item = next(stage.stream)
    start = time.perf_counter()
    cpu_start = time.process_time()
    jax.block_until_ready(update(stage, item))
    times.append(time.perf_counter() - start)
    cpu.append(time.process_time() - cpu_start)
    tokens.append(item.info['tokens'])
  stage.stream.close()
  tokens_per_s = sum(tokens[2:]) / sum(times[2:])
  matmul_flops = probe.matmul_rate(jnp.bfloat16 if options.bf16 else jnp.float32)
  # A token in a document of n tokens attends to n / 2 on average, and long documents have more tokens.
  lengths = testing.document_lengths(_DOCUMENTS)
  context = float(np.sum(lengths**2)) / float(np.sum(lengths)) / 2
  flops = 3 * flops_per_token(placed.model.config, context)
  step = float(np.mean(times[2:]))
  return dict(
    step_s=step,
    cpu_s=float(np.mean(cpu[2:])),
    real_tokens_per_s=tokens_per_s,
    padded_tokens_per_s=options.batch * _ROW_LENGTH / step,
    matmul_gflops=matmul_flops / 1e9,
    share_of_matmul=flops * tokens_per_s / matmul_flops,
    all=[round(t, 3) for t in times],
    **memory(placed, 'update'),
  )


def memory(placed: place.PlacedStage, program: str) -> dict:
  """Returns compile time and memory of a program."""
  row = next(r for r in placed.ledger.rows if r['program'] == program)
  return dict(
    compile_s=row['compile_s'], temp_mib=row['temp_bytes'] / 2**20, argument_mib=row['argument_bytes'] / 2**20
  )


def sample(options: Options, workdir: epath.PathLike) -> dict:
  """Times sampling: tokens per second, with --batch sequences at a time and --samples in total."""
  del workdir
  options = dataclasses.replace(options, samples=options.samples or options.batch)
  placed, params = place_with_weights('sample', options)
  engine = on_policy.make_engine(placed, slots=options.batch)
  engine.load(params, 0)
  source = testing.RandomPrompts(options.samples, options.prompt, placed.model.config.vocab_size)
  times = []
  cpu = []
  counts = []
  key = on_policy.run_key(0, 1)
  for step in range(options.steps + 1):
    prompts, _ = next(source)
    start = time.perf_counter()
    cpu_start = time.process_time()
    rollout = engine(prompts, group_size=1, run_key=key, step=step)
    times.append(time.perf_counter() - start)
    cpu.append(time.process_time() - cpu_start)
    counts.append(int(rollout.lengths.sum()))
  rates = [n / t for n, t in zip(counts[1:], times[1:])]
  # Prefill time is counted as decoding.
  slots = engine.max_concurrent_decodes
  seconds = float(np.median(times[1:])) * rollout.occupancy * slots / counts[-1]
  # On average, half of a completion is in the cache when it is read.
  filled = (options.prompt + counts[-1] / options.samples / 2) / engine.length
  _, state = engine.described(params)
  read_bytes = decode_bytes(engine.weights, state.cache, filled)
  bandwidth = memory_rate.measure()
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
    decode_bytes=read_bytes,
    bytes_per_s=bandwidth,
    share_of_bandwidth=read_bytes / bandwidth / seconds,
  )


def decode_bytes(weights: dict, cache: Any, filled: float) -> float:
  """Returns a lower bound on the bytes that a device reads to decode one token in all slots.

  filled: share of the cache that is filled.
  """
  if 'head' in weights:  # otherwise the whole embedding is read as the head
    weights = {k: x for k, x in weights.items() if k != 'embed'}
  return memory_lib.size(weights) + memory_lib.size(cache) * filled


def grpo(options: Options, workdir: epath.PathLike) -> dict:
  """Times GRPO: seconds per step and per phase."""
  placed, stage = make_stage('grpo', options, workdir)
  times = []
  stage.timer.pop()
  for _ in range(options.steps + 2):
    with stage.timer('data'):
      item = next(stage.stream)
    with stage.timer('update'):
      jax.block_until_ready(update(stage, item))
    times.append(stage.timer.pop())
  stage.stream.close()
  seconds = {k: float(np.median([t[k] for t in times[1:]])) for k in times[0]}
  step = seconds['time/step']
  return dict(
    step_s=step,
    completions_per_step=options.batch,
    controller_share=(seconds['time/pack'] + seconds['time/data']) / step,
    **seconds,
    all=[round(t['time/step'], 3) for t in times],
    **memory(placed, 'update'),
  )
