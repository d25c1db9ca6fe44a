"""The loop of all algorithms: next item, update, log, evaluate, save.

The order inside a step is a contract: metrics of a step are written before its checkpoint, so that a checkpoint always
has its metrics (a resume drops later rows), and the stream is read only after the step before it was dispatched. After
a stop signal the run saves at once; if that step is due for an evaluation, the resumed run makes it first.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator

import jax

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import DivergedError
from jaxpost.monitor import nonfinite

if typing.TYPE_CHECKING:  # for annotations only: the objects are passed in
  from jaxpost.hardware.signals import StopSignal
  from jaxpost.monitor.host_health import HostHealth
  from jaxpost.monitor.metrics import MetricsWriter
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles
  from jaxpost.storage.checkpoint import Checkpointer
  from jaxpost.types import Credit, Experience, Item, TrainState


@dataclasses.dataclass
class Stage:
  """Everything one stage of a run needs; `stage/assemble.py` makes it."""

  name: str
  steps: int
  roles: Roles
  stream: Iterator[Item]  # with state() and restore(state), for checkpoints
  evaluate: Callable[[Roles, int], tuple[dict, list[dict]]] | None  # (roles, step) -> metrics, sample rows
  checkpointer: Checkpointer
  writer: MetricsWriter
  timer: Timeline
  meta: dict  # goes into each checkpoint, besides the stream's state
  on_step_begin: Callable[[int], None]  # called with the number of the step, from 1
  forbid_compiles: Callable[[], None]  # after the first step a compilation is a warning
  check_first_step: Callable[[dict], None]  # raises if the metrics of `first_policy_step` cannot be right
  stop_profiler: Callable[[], None] | None  # after the last step, or an error; None: nothing is profiled
  wait_for_update: bool  # the next item needs the weights of this update
  host_health: HostHealth | None = None  # compares the processes of a run; None if there is only one
  first_policy_step: int = 1  # the steps before it update a critic only
  save_rollout: Callable[[int, Experience, Credit], None] | None = None
  memory_usage: Callable[[], dict] = dict
  eval_every: int = 0
  save_every: int = 0
  samples_every: int = 10
  max_skipped: int = 5
  update_flops: Callable[[list, float], float] | None = None  # (updates of a step, mean context) -> FLOPs per token
  peak_flops: float = 0.0  # of all devices; 0: unknown

  def evaluates(self, step: int) -> bool:
    """Returns whether there is an evaluation after `step` updates; 0: before the first one."""
    periodic = self.eval_every > 0 and step % self.eval_every == 0
    return self.evaluate is not None and (periodic or step in (0, self.steps))


def resume(stage: Stage) -> int:
  """Restores the newest good checkpoint, if there is one, and returns the steps done."""
  if stage.checkpointer.is_empty():
    return 0
  template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states(stage))
  for name, role in stage.roles.trainable.items():
    role.state = template[name]  # frees the initial arrays: a device may have no room for a second state beside them
  step, restored, meta = stage.checkpointer.restore(template)
  for name, role in stage.roles.trainable.items():
    role.state = restored[name]
  stage.stream.restore(meta['stream'])
  return step


def states(stage: Stage) -> dict[str, TrainState]:
  """Returns the TrainState of each trainable role."""
  return {name: role.state for name, role in stage.roles.trainable.items()}


def run_stage(stage: Stage, start: int, stop: StopSignal) -> None:
  """Runs the steps after `start`, the number of steps done; after a stop signal, saves and raises Preempted."""
  run = _Progress(stage)
  stage.timer.place = f'{stage.name} {start}/{stage.steps}'
  stage.timer.pop()  # no step is charged with the compilation
  if stage.evaluates(start) and (start == 0 or not stage.checkpointer.metrics(start)):
    run.evaluate(start)
    if start:  # the checkpoint exists; the rows of its step must be on disk before it gets these metrics
      stage.writer.flush()
      stage.checkpointer.add_metrics(start, run.evaluated[start])
  for step in range(start + 1, stage.steps + 1):
    stage.timer.place = f'{stage.name} {step}/{stage.steps}'
    stage.on_step_begin(step)
    with stage.timer('data'):
      item = next(stage.stream)
    with stage.timer('update'):
      role_metrics = [(role, stage.roles.trainable[role].update(batch)) for role, batch in item.updates]
      stage.timer.watch('update', role_metrics)
      stop.unsaved = True  # from here on, ending the process would lose this step
      run.log_pending()  # of the step before, while the devices are busy with this one
      if stage.wait_for_update:
        jax.block_until_ready(role_metrics)
    replica_check = stage.host_health.begin(step, stage.roles) if stage.host_health else None
    # If the host does not wait for the devices, the time of a step ends when its metrics are read.
    times = stage.timer.pop() if stage.wait_for_update else {}
    run.pending = _PendingStep(step, item, role_metrics, times, replica_check)
    if step == stage.first_policy_step:
      stage.check_first_step(to_host(next(metrics for role, metrics in role_metrics if role == 'policy')))
    if step == start + 1:
      stage.forbid_compiles()
    preempted = stop.reached()
    if stage.evaluates(step) and not preempted:
      run.evaluate(step)
      preempted = stop.reached()  # the evaluation may have taken minutes
    if step == stage.steps or preempted or (stage.save_every and step % stage.save_every == 0):
      run.save(step)
    stage.checkpointer.check()
    if preempted:
      stage.checkpointer.wait(for_all=True)
      stop.leave(stage.name, f'saved at step {step}')
  run.log_pending()


class _PendingStep(typing.NamedTuple):
  """A dispatched step whose metrics are still on the devices."""

  step: int
  item: Item
  role_metrics: list[tuple[str, dict]]  # (role, metrics on the devices) of each update
  times: dict  # seconds of each phase; {} if the host did not wait for the devices: read with the metrics
  replica_check: dict | None


class _Progress:
  """The state of the loop between steps, on the host."""

  def __init__(self, stage: Stage):
    self.stage = stage
    self.pending: _PendingStep | None = None
    self.skipped = 0.0  # bad steps, less a tenth of one for each good step since
    self.in_doubt = False  # the metrics logged last suggest that the state may not be finite
    self.evaluated: dict[int, dict] = {}  # {the step evaluated last: its finite metrics}

  def log_pending(self) -> None:
    """Writes the metrics, samples and rollout of the step dispatched last."""
    stage, pending = self.stage, self.pending
    if pending is None:
      return
    self.pending = None
    step, item = pending.step, pending.item
    row = nonfinite.merge_metrics([(role, to_host(metrics)) for role, metrics in pending.role_metrics])
    times = pending.times or stage.timer.pop()
    self.skipped = self.skipped + 1 if row['skipped_updates'] else max(0, self.skipped - 0.1)
    self.in_doubt = nonfinite.is_doubtful(row)
    row |= item.info | times | stage.memory_usage()
    if stage.host_health:
      row |= stage.host_health.finish(pending.replica_check, times)
    row['tokens_per_s'] = item.info['tokens'] / times['time/step']
    if stage.peak_flops and stage.update_flops:
      row['mfu'] = stage.update_flops(item.updates, row['mean_context']) * row['tokens_per_s'] / stage.peak_flops
    stage.writer.write(step, 'train', row, item.error)
    if item.samples and (step % stage.samples_every == 0 or step in (1, stage.steps)):
      stage.writer.samples(step, [{'split': 'train', **sample} for sample in item.samples()])
    if item.experience and stage.save_rollout:
      stage.save_rollout(step, item.experience, item.credit)
    if self.skipped >= stage.max_skipped:
      raise DivergedError(
        f'{stage.name}: loss, gradient or updated weights were not finite in about {self.skipped:.0f} steps up to '
        f'{step}; lower config.optim.lr (with config.save.allow_changes=optim.lr) or inspect the data of those steps '
        f'(config.optim.max_skipped sets the limit){nonfinite.explain(item, pending.role_metrics, stage.roles)}'
      )

  def evaluate(self, step: int) -> None:
    """Writes the metrics and samples of an evaluation after `step` updates."""
    assert self.stage.evaluate, 'see `Stage.evaluates`'
    self.log_pending()
    with self.stage.timer('eval'):
      metrics, samples = self.stage.evaluate(self.stage.roles, step)
    metrics |= self.stage.timer.pop()
    if step == 0:
      self.stage.checkpointer.check_metrics(metrics)
    self.stage.writer.write(step, 'eval', metrics)
    self.evaluated = {step: {name: value for name, value in metrics.items() if math.isfinite(value)}}
    if samples:
      self.stage.writer.samples(step, [{'split': 'eval', **sample} for sample in samples])

  def save(self, step: int) -> None:
    """Saves a checkpoint, with the metrics of this step's evaluation."""
    self.log_pending()
    stage = self.stage
    stage.timer.place = f'{stage.name} {step}/{stage.steps}: saving'
    if self.in_doubt:
      nonfinite.check_states(states(stage), f'{stage.name}: at step {step}')
    stage.writer.flush()  # the rows of a step must be on disk before its checkpoint
    meta = {**stage.meta, 'stream': stage.stream.state()}
    stage.checkpointer.save(step, states(stage), meta, self.evaluated.get(step))
