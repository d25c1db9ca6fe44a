"""Rollouts, sampled when they are needed or a fixed number of updates before.

With lag L the rollout of step u comes from the weights after update
u - 1 - L, and those before the first update are the first ones. The host asks
for update t - 1, samples while it runs, and takes its weights afterwards: who
trains and who samples work at the same time where their devices differ. The
order never depends on the clock, so runs repeat to the bit.

A checkpoint holds what is in the queue. What the next step would sample with
weights that a checkpoint does not hold is sampled before it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import typing

import jax

from jaxpost.algorithms.base import Algorithm, refuse
from jaxpost.distributed import coordination
from jaxpost.distributed.transfer import owners
from jaxpost.rl import grading

if typing.TYPE_CHECKING:  # passed in
  from jaxpost.data.prompts import PromptStream
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles
  from jaxpost.rollout.sampler import Sampler


@dataclasses.dataclass
class Sampled:
  """A step's rollout, its grading under way, and figures of both."""

  graded: grading.Grading
  info: dict


@dataclasses.dataclass
class Ahead:
  """The rollouts of a stage, in the order of its steps.

  queue: those of the next steps that are there already.
  version: updates behind the weights that the sampler holds; None: none.
  """

  algorithm: Algorithm
  config: object
  roles: Roles
  sampler: Sampler
  grader: grading.Grader
  prompts: 'PromptStream'
  chrono: 'Timeline'
  engine: object = None  # that the sampler runs on, to swap its weights
  queue: collections.deque = dataclasses.field(default_factory=collections.deque)
  version: int | None = None
  moved: int = 0  # bytes, when weights were moved last

  def __post_init__(self):
    config, few = (
      self.config,
      coordination.process_count() > 1
      and self.engine
      and len(owners(self.engine.layout.mesh.devices.flat)) < coordination.process_count(),
    )
    refuse(
      bool(few and (config.environment or config.rollout.inflight_update_blocks)),
      'config.mesh.rollout_devices: are those of some processes only, and '
      'environments and rollout.inflight_update_blocks need all; leave them out',
    )

  @property
  def lag(self) -> int:
    return self.config.rollout.staleness

  def fill(self, done: int, number: int):
    """Samples until the next `number` steps after `done` have a rollout."""
    number = min(number, max(1, self.config.train.steps - done))
    while len(self.queue) < number:
      self.queue.append(self._collect(done, done + len(self.queue)))

  def next(self) -> Sampled:
    return self.queue.popleft()

  def sync(self, version: int):
    """Gives the sampler the weights of now, if it has not got them."""
    if self.version == version:
      return
    with self.chrono('reshard'):
      self.moved = self.sampler.sync(self.roles.policy, version)['bytes']
    if self.engine:
      self.chrono.watch('reshard', self.engine.weights)
    self.version = version

  def _park(self, there: bool):
    if self.config.rollout.offload:
      with self.chrono('reshard'):
        self.roles.park(there)

  def _collect(self, done: int, step: int) -> Sampled:
    """The rollout of a step, after `done` steps were asked for."""
    rl, config = self.config.rl, self.config
    now = done * rl.epochs * rl.minibatches
    self._park(True)
    if self.version is None:
      self.sync(now)
    if self.engine:
      with self.chrono('wait'):  # for the update, where sampling is ahead
        jax.block_until_ready(self.engine.weights)
    swap = functools.partial(self._swap, now) if config.rollout.inflight_update_blocks else None
    graded, info = self._sample(step, swap)
    while rl.dynamic_sampling and self._wants_more(graded, info, step):
      more, newer = self._sample(step, swap)
      info |= newer
      graded = grading.join(graded, more)
    info['reshard_bytes'] = self.moved
    if self.lag:
      self.sync(now)  # for the next one; whoever trains is not waited for
    else:
      self.sampler.release()
      self.version = None
    self._park(False)
    if rl.dynamic_sampling:
      graded = grading.keep_mixed(graded, config.rollout.prompts)
    return Sampled(graded, info)

  def _swap(self, now: int, dispatched: int):
    if dispatched == self.config.rollout.inflight_update_blocks:
      self.sync(now)

  def _sample(self, step: int, swap):
    """One round: (what was sampled, its grading under way; figures)."""
    prompts, info = next(self.prompts)
    group, greedy = self.config.rollout.group_size, None
    with self.chrono('sample'):
      rollout = self.sampler(prompts, group, step, swap)
      if self.algorithm.greedy_baseline(self.config):
        greedy = self.sampler(prompts, 1, step, swap, temperature=0.0)
    with self.chrono('pack'):  # workers grade while the devices score
      return self.grader.submit(rollout, greedy), info

  def _wants_more(self, graded, info, step: int) -> bool:
    """Whether groups that differ in reward are still missing."""
    with self.chrono('reward'):
      mixed = graded.mixed()
    wanted, rounds = self.config.rollout.prompts, graded.rounds
    info['dynamic_sampling/rounds'] = rounds
    info['dynamic_sampling/kept_ratio'] = float(mixed.mean())
    if mixed.sum() >= wanted:
      return False
    if rounds < self.config.rl.dynamic_sampling:
      return True
    info['dynamic_sampling/missing'] = int(wanted - mixed.sum())
    logging.warning(
      'step %d: %d of %d groups differ in reward after %d rounds; the '
      'update goes on with these (config.rl.dynamic_sampling)',
      step + 1,
      mixed.sum(),
      wanted,
      rounds,
    )
    return False

  def state(self, done: int) -> dict:
    """For a checkpoint after `done` steps; JSON values."""
    if not self.lag:
      return {'prompts': self.prompts.state()}
    from jaxpost.rollout import rollout_files

    if done < self.config.train.steps:
      self.fill(done, self.lag)
    return {
      'prompts': self.prompts.state(),
      'queue': [
        dict(
          info=x.info,
          chosen=x.graded.chosen and [list(map(int, part)) for part in x.graded.chosen],
          rollouts=[rollout_files.to_text(part.rollout) for part in x.graded.parts],
        )
        for x in self.queue
      ],
    }

  def restore(self, state: dict, done: int):
    """Goes on there; the policy has its weights of then again."""
    self.prompts.restore(state['prompts'])
    self.queue.clear()
    if not self.lag:
      return
    from jaxpost.rollout import rollout_files

    rl = self.config.rl
    self.version = None
    self.sync(done * rl.epochs * rl.minibatches)
    for saved in state['queue']:  # graded again: rewards were under way
      rounds = [self.grader.submit(rollout_files.from_text(text)) for text in saved['rollouts']]
      graded = functools.reduce(grading.join, rounds)
      graded.chosen = saved['chosen']
      self.queue.append(Sampled(graded, saved['info']))
