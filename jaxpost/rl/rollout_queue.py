"""The rollouts of the next steps: which weights sample them, and when.

The staleness L is `config.rollout.staleness`; with L > 0, the first rollouts are sampled from the initial weights.

    L   the rollout of step u is sampled          from the weights after
    0   when step u begins                        step u - 1
    1   then, while step u - 1 is being trained   step u - 2
    2   in step u - 1, before its update          step u - 3

With L > 0 the host dispatches an update, samples while the training devices run it, and copies its weights
afterwards, so training and sampling overlap where they have devices of their own. The order never depends on the clock:
runs repeat bit for bit.

A checkpoint holds the rollouts in the queue, and those that need weights which no checkpoint holds are sampled first.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax

from jaxpost.distributed import coordination
from jaxpost.errors import refuse
from jaxpost.rl.grading import Grader, PendingRollout

if typing.TYPE_CHECKING:  # for annotations only: the objects are passed in
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles
  from jaxpost.rollout.engine import Engine, OnDispatch
  from jaxpost.types import Prompt, Rollout


class RolloutSampler(typing.Protocol):
  """Makes `group_size` completions of each prompt; see `rollout.sampler.Sampler`.

  `sampling` holds fields of `programs.sampling.Sampling` that differ from the config.
  """

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int, step: int, on_dispatch: OnDispatch | None, **sampling: typing.Any
  ) -> Rollout: ...


@dataclasses.dataclass
class RolloutQueue:
  """Rollouts in the order of their steps.

  Attributes:
    sample: (step, on_dispatch) -> the rollout of a step, see `Controller.sample`.
    engine: samples the rollouts, and needs weights; None: rollouts come from files.
    rollouts: those of the next steps, sampled and being graded.
    version: number of updates that produced the weights of the engine; None: it has no weights.
    moved_bytes: bytes that the last copy of weights to the engine moved.
  """

  sample: Callable[[int, OnDispatch | None], PendingRollout]
  config: typing.Any
  roles: Roles
  grader: Grader
  timer: Timeline
  engine: Engine | None = None
  rollouts: collections.deque[PendingRollout] = dataclasses.field(default_factory=collections.deque)
  version: int | None = None
  moved_bytes: int = 0

  def __post_init__(self):
    if coordination.process_count() == 1 or not self.engine:
      return
    sampling_processes = coordination.owners(self.engine.layout.mesh.devices.flat)
    some_only_train = len(sampling_processes) < coordination.process_count()
    needs_all = bool(self.config.environment or self.config.rollout.inflight_update_blocks)
    refuse(
      some_only_train and needs_all,
      'config.mesh.rollout_devices: are those of some processes only, and '
      'environments and rollout.inflight_update_blocks need all; leave them out',
    )

  def take(self, step: int) -> PendingRollout:
    """Removes and returns the rollout of a step; samples it if it is not there.

    Args:
      step: its number from 0, which is also the number of steps dispatched so far.
    """
    self._sample_until(step + 1, next_step=step, steps_done=step)
    return self.rollouts.popleft()

  def prefetch(self, step: int) -> None:
    """Samples rollouts of steps after `step`, as far as the staleness lets them precede its update."""
    until = min(step + self.config.rollout.staleness, self.config.train.steps)
    self._sample_until(until, next_step=step + 1, steps_done=step)

  def _sample_until(self, until: int, *, next_step: int, steps_done: int):
    """Samples those rollouts of the steps [next_step, until) that the queue lacks."""
    while next_step + len(self.rollouts) < until:
      self.rollouts.append(self._sample_one(next_step + len(self.rollouts), steps_done))

  def _sample_one(self, step: int, steps_done: int) -> PendingRollout:
    """Samples the rollout of a step after `steps_done` steps were dispatched."""
    newest = self._updates(steps_done)
    offloaded: contextlib.AbstractContextManager = contextlib.nullcontext()
    if self.config.rollout.offload:
      from jaxpost.rl import offload

      offloaded = offload.offloaded(self.roles, self.timer)
    with offloaded:
      if self.version is None:
        self._load_weights(newest)
      if self.engine:
        with self.timer('wait'):  # for the update that these weights come from
          jax.block_until_ready(self.engine.weights)
      on_dispatch = None
      if self.config.rollout.inflight_update_blocks:
        on_dispatch = functools.partial(self._update_in_flight, newest)
      pending = self.sample(step, on_dispatch)
      pending.info['reshard_bytes'] = self.moved_bytes
      if self.config.rollout.staleness:
        self._load_weights(newest)  # for the next rollout; dispatched, not waited for
      else:
        self.version = None
        if self.engine:
          self.engine.unload()
    return pending

  def _updates(self, steps: int) -> int:
    """Returns the number of optimizer updates in these steps."""
    return steps * self.config.rl.epochs * self.config.rl.minibatches

  def _load_weights(self, version: int):
    """Copies the policy's current weights to the engine, unless it has them."""
    if self.version == version:
      return
    with self.timer('reshard'):
      if self.engine:
        self.moved_bytes = self.engine.load(self.roles.policy.params, version)['bytes']
        self.timer.watch('reshard', self.engine.weights)
    self.version = version

  def _update_in_flight(self, version: int, dispatched_blocks: int):
    """Loads newer weights in the middle of a rollout (`rollout.inflight_update_blocks`)."""
    if dispatched_blocks == self.config.rollout.inflight_update_blocks:
      self._load_weights(version)

  def state(self, steps_done: int) -> dict:
    """JSON values for a checkpoint after `steps_done` steps; {} if on-policy."""
    if not self.config.rollout.staleness:
      return {}
    until = min(steps_done + self.config.rollout.staleness, self.config.train.steps)
    self._sample_until(until, next_step=steps_done, steps_done=steps_done)
    from jaxpost.rollout import rollout_codec

    queue = []
    for pending in self.rollouts:  # without its rewards, which the workers may still be computing
      rollouts = [rollout_codec.to_text(r.rollout) for r in pending.rounds]
      kept = [r.from_earlier_step for r in pending.rounds]
      queue.append({'info': pending.info, 'chosen': pending.selected, 'rollouts': rollouts, 'kept': kept})
    return {'queue': queue}

  def restore(self, state: dict, steps_done: int) -> None:
    """Continues from `state`, and grades its rollouts again; the policy must have been restored already."""
    self.rollouts.clear()
    if not self.config.rollout.staleness:
      return
    self.version = None
    self._load_weights(self._updates(steps_done))
    from jaxpost.rollout import rollout_codec

    for saved in state['queue']:
      rounds = [self.grader.submit(rollout_codec.from_text(text)).rounds[0] for text in saved['rollouts']]
      for round_, from_earlier_step in zip(rounds, saved['kept'], strict=True):
        round_.from_earlier_step = from_earlier_step
      self.rollouts.append(PendingRollout(self.grader, rounds, saved['info'], saved['chosen']))
