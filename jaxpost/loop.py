"""The loop: next batch, update, log, evaluate, save. All algorithms run it.

The order inside a step is a contract: metrics of a step are written before
the checkpoint of that step, so that a resume finds both or neither, and the
stream is read only after the step before it was dispatched.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator

import jax

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import Preempted
from jaxpost.hardware.host import StopSignal
from jaxpost.monitor.nonfinite import diagnosis, merge_metrics

if typing.TYPE_CHECKING:  # passed in; the loop needs nothing else of them
  from jaxpost.monitor.host_health import Peers
  from jaxpost.monitor.metrics import MetricsWriter
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles
  from jaxpost.storage.checkpoint import Checkpointer


@dataclasses.dataclass
class Stage:
  """Everything one stage of a run needs; `build.py` makes it.

  stream: yields `Item`s.
  evaluate: (roles, step) -> (metrics, sample rows), or None.
  flops_per_token, peak: for `mfu`; peak is 0 where the hardware is unknown.
  """

  name: str
  steps: int
  roles: Roles
  stream: Iterator
  evaluate: Callable | None
  checkpointer: 'Checkpointer'
  writer: 'MetricsWriter'
  chrono: 'Timeline'
  meta: dict  # what goes into each checkpoint besides the stream
  seal: Callable  # after the first step a compilation is a surprise
  checks: Callable  # (metrics of step 0) -> raises where it cannot be right
  due: Callable  # (step that begins): for the watchdog and the profiler
  close: Callable  # ends what is open after the last step, or an error
  waits: bool  # the next item needs the update done
  peers: 'Peers | None' = None  # of a run of several processes
  eval_every: int = 0
  save_every: int = 0
  samples_every: int = 10
  keep: Callable | None = None  # (step, Experience, Credit) -> None
  max_skipped: int = 5
  flops_per_token: float = 0.0
  peak_flops: float = 0.0
  memory: Callable = dict  # () -> what is in use


def resume(stage: Stage) -> int:
  """Restores the newest good checkpoint, if there is one; steps done."""
  if stage.checkpointer.latest() is None:
    return 0
  template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states(stage))
  step, restored, meta = stage.checkpointer.restore(template)
  for name, role in stage.roles.trainable.items():
    role.state = restored[name]
  stage.stream.restore(meta['stream'])
  return step


def states(stage: Stage) -> dict:
  """The TrainState of each trainable role."""
  return {k: role.state for k, role in stage.roles.trainable.items()}


def run_stage(stage: Stage, start: int):
  """Runs the steps after `start`, the number of those done."""
  run = _Progress(stage)
  stage.chrono.pop()  # compilation is no step's time
  with StopSignal() as stop:
    if start == 0 and stage.evaluate:
      run.evaluate(0)
    for step in range(start + 1, stage.steps + 1):
      stage.due(step)
      with stage.chrono('data'):
        item = next(stage.stream)
      with stage.chrono('update'):
        done = [(role, stage.roles.trainable[role].update(batch)) for role, batch in item.updates]
        stage.chrono.watch('update', done)
        run.log_pending()  # of the step before: the device is busy with this
        if stage.waits:
          jax.block_until_ready(done)
      told = stage.peers and stage.peers.begin(step, stage.roles)
      run.pending = step, done, item, stage.chrono.pop(), told
      if step == start + 1:
        run.first(step, done[0][1])
      leaving = stop.reached()
      last = step == stage.steps
      if last or stage.eval_every and step % stage.eval_every == 0:
        run.evaluate(step)
      if last or leaving or (stage.save_every and step % stage.save_every == 0):
        run.save(step)
      stage.checkpointer.check()
      if leaving:
        stage.checkpointer.wait()
        raise Preempted(f'{stage.name}: told to stop, saved at step {step}; run the same command to go on')
    run.log_pending()


class _Progress:
  """What the loop remembers between steps, on the host."""

  def __init__(self, stage: Stage):
    self.stage, self.pending = stage, None
    self.scores = 0, {}  # step and metrics of the last evaluation
    self.skipped = 0
    self.sample_step, self.sample_rows = -1, []

  def first(self, step: int, metrics: dict):
    """After the first step of a process: look hard, then allow no compile."""
    if step == 1:
      self.stage.checks(to_host(metrics))
    self.stage.seal()

  def log_pending(self):
    """Writes the row of the step before this one."""
    if self.pending is None:
      return
    stage = self.stage
    (step, done, item, times, told), self.pending = self.pending, None
    row = merge_metrics([(role, to_host(found)) for role, found in done])
    skipped = row.pop('skipped_updates')
    # A good step makes up for a tenth of a bad one.
    self.skipped = self.skipped + 1 if skipped else max(0, self.skipped - 0.1)
    tokens = item.info['tokens']
    row |= item.info | times | stage.memory()
    if stage.peers:
      row |= stage.peers.finish(told, times)
    row['skipped_updates'] = int(skipped)
    row['empty_updates'] = int(row['empty_updates'])
    row['tokens_per_s'] = tokens / times['time/step']
    if stage.peak_flops:
      rate = 3 * stage.flops_per_token * row['tokens_per_s']
      row['mfu'] = rate / stage.peak_flops
    stage.writer.write(step, 'train', row)
    if item.samples and (step % stage.samples_every == 0 or step in (1, stage.steps)):
      self.samples(step, 'train', item.samples())
    if item.learnt and stage.keep:
      stage.keep(step, *item.learnt)
    if self.skipped >= stage.max_skipped:
      raise FloatingPointError(
        f'{stage.name}: loss or gradient was not finite in about '
        f'{self.skipped:.0f} steps up to {step}; lower config.optim.lr or '
        'inspect the data of those steps (config.optim.max_skipped sets the '
        f'limit){diagnosis(item, done, stage.roles)}'
      )

  def evaluate(self, step: int):
    if self.stage.evaluate is None:
      return
    self.log_pending()
    with self.stage.chrono('eval'):
      metrics, samples = self.stage.evaluate(self.stage.roles, step)
    metrics |= self.stage.chrono.pop()
    self.stage.writer.write(step, 'eval', metrics)
    self.scores = step, metrics
    if samples:
      self.samples(step, 'eval', samples)

  def samples(self, step: int, split: str, rows: list[dict]):
    """One file a step, whatever it holds."""
    if step != self.sample_step:
      self.sample_step, self.sample_rows = step, []
    self.sample_rows += [{'split': split, **row} for row in rows]
    self.stage.writer.samples(step, self.sample_rows)

  def save(self, step: int):
    self.log_pending()
    stage = self.stage
    stage.writer.flush()  # its rows must not be younger than a checkpoint
    evaluated, scores = self.scores
    metrics = {k: v for k, v in scores.items() if math.isfinite(v)} if (evaluated == step) else None
    stage.checkpointer.save(step, states(stage), {**stage.meta, 'stream': stage.stream.state()}, metrics)
