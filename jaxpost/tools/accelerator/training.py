"""Measures updates and whole steps: tokens per second, MFU, and memory compared with the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.hardware import chips
from jaxpost.tools.accelerator import chip, workload
from jaxpost.tools.bench import update

if TYPE_CHECKING:
  from jaxpost.loop import Stage
  from jaxpost.types import Item

_FIRST = 2  # steps that are not timed


def sft(
  preset: str,
  layers: int,
  rows: int,
  row_length: int,
  steps: int,
  algorithm: str = 'sft',
  documents: int = 0,
  rank: int = 0,
  remat: str = 'auto',
  attention: str = 'auto',
  head_elements: int = 0,
  recurrence_kernel: bool = True,
) -> dict[str, Any]:
  """Times updates of a method that learns from data.

  Args:
    layers: number of layers of the model; 0: all.
    documents: mean tokens of a document; 0: lengths as in an instruction data set.
    rank: of adapters on bfloat16 weights; 0: all weights are trained, in float32.
    head_elements: largest number of logits in memory; 0: the default.
    recurrence_kernel: whether a kernel may compute recurrences, as it does by default.
  """
  cfg = workload.shape_of(preset, layers)
  config = dict(
    algorithm=algorithm,
    model=dict(remat=remat, attention=attention, param_dtype='bfloat16' if rank else 'float32'),
    train=dict(steps=steps + _FIRST, batch_size=rows, row_length=row_length),
    lora=dict(rank=rank),
    optim=dict(lr=1e-5),
  )
  lengths = workload.lengths_of(documents, row_length)
  watch = workload.Watch()
  compute: dict[str, Any] = {'head_elements': head_elements} if head_elements else {}
  compute |= {} if recurrence_kernel else {'recurrence_kernel': ''}
  with workload.stage(cfg, config, ('dpo' if algorithm == 'dpo' else 'sft', lengths), compute) as running:
    stage = running.assembled()
    compiled_s = watch.lap()
    items, metrics, seconds = _updates(stage, watch, steps)
    tokens = [item.info['tokens'] for item in items]
    context = float(np.average([item.info['mean_context'] for item in items], weights=tokens))
    tokens_per_s = sum(tokens) / sum(seconds)
    profiled = workload.profile(lambda: jax.block_until_ready(update(stage, items[-1])))
    return dict(
      start_s=compiled_s,
      step_s=float(np.median(seconds)),
      step_p95_s=float(np.percentile(seconds, 95)),
      tokens_per_s=tokens_per_s,
      mean_context=context,
      **model_flops(stage, tokens_per_s, context),
      loss=float(metrics[0]['loss']),
      attention=running.placed.compute.attention,
      rejected_shapes=len(running.placed.compute.rejected_shapes),
      remat=running.placed.compute.remat,
      **watch.memory(stage.memory_usage()['memory/predicted_bytes']),
      **running.figures(),
      profile=profiled,
    )


def _updates(stage: Stage, watch: workload.Watch, steps: int) -> tuple[list[Item], list[dict], list[float]]:
  """Returns the items and the seconds of `steps` updates after the warm-up, and the metrics of the last one."""
  items, seconds = [], []
  for _ in range(steps + _FIRST):
    items.append(next(stage.stream))
    watch.lap()
    metrics = jax.block_until_ready(update(stage, items[-1]))
    seconds.append(watch.lap())
  return items[_FIRST:], metrics, seconds[_FIRST:]


def model_flops(stage: Stage, tokens_per_s: float, context: float) -> dict[str, Any]:
  """Returns the model's FLOP/s at a rate of tokens, and its shares of the data sheet and of measured products."""
  rate = stage.roles.policy.model.flops_of_update(context) * tokens_per_s
  size = 0 if chips.of_kind(jax.devices()[0].device_kind) else 512  # without a data sheet it is measured briefly
  return dict(
    model_flops_per_s=rate,
    mfu=chip.mfu(rate),
    share_of_matmul=rate / chip.measured(size)['matmul_flops'] / jax.device_count(),
  )


def on_policy(
  algorithm: str,
  preset: str,
  layers: int,
  prompts: int,
  group: int,
  prompt: int,
  new: int,
  steps: int,
  slots: int = 0,
  micro: int = 0,
  share: bool = False,
) -> dict[str, Any]:
  """Times whole steps of a method that samples, by phase, after a warm-up step.

  Args:
    group: completions of each of the `prompts`, which have `prompt` tokens.
    slots: sequences sampled at a time; 0: the default.
    micro: rows of a micro-batch; 0: the default.
    share: pack completions of a prompt after one copy of it.
  """
  cfg = workload.shape_of(preset, layers)
  config = dict(
    algorithm=algorithm,
    reward='even_words',
    train=dict(steps=steps + 1, micro_batch_size=micro, share_prompt=share),
    optim=dict(lr=1e-6),
    rollout=dict(prompts=prompts, group_size=group, max_prompt_length=prompt, max_new_tokens=new, slots=slots),
  )
  watch = workload.Watch()
  lengths = np.full(prompts * (steps + 1), prompt)
  with workload.stage(cfg, config, ('prompts', lengths)) as running:
    stage = running.assembled()
    compiled_s = watch.lap()
    times = []
    first: dict[str, float] = {}
    stage.timer.pop()
    for _ in range(steps + 1):
      with stage.timer('data'):
        item = next(stage.stream)
      with stage.timer('update'):
        metrics = jax.block_until_ready(update(stage, item))
      times.append(stage.timer.pop())
      first = first or _of_policy(item, metrics)
    stage.stream.close()
    return dict(
      start_s=compiled_s,
      compile_s=sum(r['compile_s'] for r in running.placed.ledger.rows),
      programs_compiled=len(running.placed.ledger.rows),
      first_step_s=times[0]['time/step'],
      **{k: float(np.median([t[k] for t in times[1:]])) for k in times[0]},
      tokens=item.info['tokens'],
      slot_occupancy=item.info['slot_occupancy'],
      sampler_mismatch=_of_policy(item, metrics).get('sampler_mismatch'),
      first_step_refused=_refused(stage, first),
      **watch.memory(stage.memory_usage()['memory/predicted_bytes']),
      **running.figures(),
    )


def _of_policy(item: Item, metrics: list[dict]) -> dict[str, float]:
  """Returns the metrics of the policy's first update in a step; {} if there is none."""
  policy_metrics = [update_metrics for (role, _), update_metrics in zip(item.updates, metrics) if role == 'policy']
  return {k: float(v) for k, v in policy_metrics[0].items()} if policy_metrics else {}


def _refused(stage: Stage, metrics: dict[str, float]) -> str:
  """Returns why a run with these metrics would end at its first step; '' if it would not."""
  try:
    stage.check_first_step(metrics)
  except AssertionError as e:
    return str(e)
  return ''


def repeat(
  preset: str, layers: int, rows: int, row_length: int, steps: int, deterministic: bool = False
) -> dict[str, Any]:
  """Trains twice from the same weights on the same rows; returns whether losses and weights are equal, bit for bit.

  Args:
    deterministic: compile the programs with `train.deterministic`.
  """
  cfg = workload.shape_of(preset, layers)
  train = dict(steps=steps, batch_size=rows, row_length=row_length, deterministic=deterministic)
  config = dict(algorithm='sft', train=train, optim=dict(lr=1e-4))
  runs = []
  for _ in range(2):
    with workload.stage(cfg, config, ('sft', workload.lengths_of(0, row_length))) as running:
      stage = running.assembled()
      losses = [float(update(stage, next(stage.stream))[0]['loss']) for _ in range(steps)]
      choices = running.placed.choices
      runs.append((losses, [np.asarray(x) for x in jax.tree.leaves(stage.roles.policy.params)]))
  (first, first_params), (second, second_params) = runs
  different = [int((a.view(np.uint8) != b.view(np.uint8)).any()) for a, b in zip(first_params, second_params)]
  return dict(
    bit_equal=first == second and not any(different),
    losses=[first, second],
    different_arrays=sum(different),
    arrays=len(different),
    largest_difference=max(float(np.abs(a - b).max()) for a, b in zip(first_params, second_params)),
    deterministic=deterministic,
    choices=choices,
  )
