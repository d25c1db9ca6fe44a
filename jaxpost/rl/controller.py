"""The controller of RL: one step is sample, grade, score, credit, batches.

It alternates programs on the devices and worker processes on the hosts, and passes records between them:

    Prompt -> Rollout -> GradedRollout -> Experience -> Credit -> Batch

`loop.py` consumes its items like those of any data set. All processes of a run compute the same values on the host, so
they take the same decisions.

Legend: N sequences, C completion tokens, M micro-batches, B rows, T row length.
"""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from jaxpost.rl import batching, reward_metrics
from jaxpost.rl.grading import GradedRollout, Grader, PendingRollout, varied
from jaxpost.rl.rollout_queue import RolloutQueue, RolloutSampler
from jaxpost.rl.scoring import Scorer
from jaxpost.types import Credit, Experience, Item, RowShape, Scores, Update

if typing.TYPE_CHECKING:  # for annotations only: the objects are passed in
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.prompts import PromptStream
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.rl.dynamic_sampling import Surplus
  from jaxpost.rl.replay import Replay
  from jaxpost.roles import Roles
  from jaxpost.rollout.engine import Engine, OnDispatch


@dataclasses.dataclass
class Controller:
  """An iterator of `types.Item`, one per step, resumable at every step.

  Attributes:
    sampler: an engine, an environment, recorded rollouts or demonstrations.
    step_shape: fixed shape of a batch of all sequences of a step; update_shape: that of a minibatch.
    engine: runs the sampler's programs; None where the sampler needs no weights.
    memory: state of the algorithm between steps, see `types.Experience`.
    surplus: groups of dynamic sampling for later steps.
    replay: right samples for later steps (`config.rl.replay`).
  """

  algorithm: Algorithm
  config: typing.Any
  roles: Roles
  sampler: RolloutSampler
  grader: Grader
  prompts: PromptStream
  timer: Timeline
  step_shape: RowShape
  update_shape: RowShape
  engine: Engine | None = None
  step: int = 0
  memory: dict = dataclasses.field(default_factory=dict)
  surplus: Surplus | None = None
  replay: Replay | None = None

  def __post_init__(self):
    self.scorer = Scorer(
      self.algorithm, self.config, self.roles, self.timer, self.step_shape, tokenizer=self.grader.tokenizer
    )
    self.rollouts = RolloutQueue(self.sample, self.config, self.roles, self.grader, self.timer, engine=self.engine)

  def __iter__(self) -> Controller:
    return self

  def __next__(self) -> Item:
    """Samples, grades and packs the data of the next step."""
    sampled = pending = self.rollouts.take(self.step)  # calls `sample` unless sampled ahead; grading has begun
    if self.replay:
      with self.timer('reward'):
        pending = self.replay.mix(sampled, self.step)
    pending_scores = self.scorer.start(pending.rollout)
    # While the devices score and the workers grade, later steps are sampled.
    self.rollouts.prefetch(self.step)
    scores = self.scorer.fetch(pending_scores)
    with self.timer('reward'):
      graded = pending.result(scores.reward_model)  # waits for the reward functions
    for observe in self.grader.observers:  # later steps have drawn their prompts: resumed runs draw the same ones
      observe(sampled, self.replay.drawn if self.replay else graded)
    experience = self.make_experience(graded, scores)
    with self.timer('pack'):
      credit = self.algorithm.credit(experience, self.config)
      updates = self.make_batches(experience, credit)
    # The logged rewards are those of the rollout as it was sampled: replayed samples do not count.
    rewards = self.replay.metrics() if self.replay else graded.metrics()
    info = sampled.info | rewards | reward_metrics.advantage_metrics(credit) | credit.metrics
    info |= reward_metrics.step_metrics(experience, self.step_shape, self.config)
    self.step += 1
    self.memory = credit.memory
    return Item(updates, info, graded.sample_rows, experience, credit, error=graded.error)

  def sample(self, step: int, on_dispatch: OnDispatch | None = None) -> PendingRollout:
    """Samples the rollout of a step, and starts its grading.

    One round of prompts or, with `config.rl.dynamic_sampling`, rounds until enough groups have right and wrong answers.
    """
    pending = self.sample_round(step, on_dispatch)
    num_groups = self.config.rollout.prompts
    max_rounds = self.config.rl.dynamic_sampling
    if not max_rounds:
      return pending
    from jaxpost.rl import dynamic_sampling

    pending = pending.join(self.surplus.take(step))
    while True:
      with self.timer('reward'):
        needs_more = dynamic_sampling.needs_more_groups(pending, step, num_groups, max_rounds)
      if not needs_more:
        return self.surplus.select(pending, num_groups)
      pending = pending.join(self.sample_round(step, on_dispatch))

  def sample_round(self, step: int, on_dispatch: OnDispatch | None) -> PendingRollout:
    """Samples `group_size` completions of the next prompts, and submits them to the graders."""
    prompts, info = next(self.prompts)
    greedy = None
    with self.timer('sample'):
      rollout = self.sampler(prompts, self.config.rollout.group_size, step, on_dispatch)
      if self.algorithm.greedy_baseline(self.config):
        greedy = self.sampler(prompts, 1, step, on_dispatch, temperature=0.0)
    with self.timer('pack'):
      return self.grader.submit(rollout, greedy, info)

  def make_experience(self, graded: GradedRollout, scores: Scores) -> Experience:
    """Joins rollout, rewards and log-probs for the algorithm's `credit`."""
    rollout = graded.rollout
    mask = batching.completion_mask(rollout)
    if self.config.rl.dynamic_sampling:  # groups whose answers are all right or all wrong only fill up the batch
      mask = mask * np.repeat(varied(graded.verdicts), rollout.group_size)[:, None]
    arrays = {'sampler_logprobs': rollout.logprobs, **scores._replace(reward_model=None).computed()}
    if rollout.demonstration is not None:  # not sampled: the ratios of demonstrations are 1
      arrays['sampler_logprobs'] = np.where(rollout.demonstration[:, None], scores.old_logprobs, rollout.logprobs)
    return Experience(
      rollout,
      graded.rewards,
      mask,
      arrays,
      baseline=graded.baseline,
      components=graded.components,
      verdicts=graded.verdicts.reshape(-1),
      step=self.step,
      memory=self.memory,
    )

  def make_batches(self, experience: Experience, credit: Credit) -> list[Update]:
    """Packs the batch of each update of the step, in order, and places it on the devices."""
    config, roles, shape = self.config, self.roles, self.update_shape
    train_policy = not roles.critic or self.step >= config.critic.warmup_steps
    updates = []
    for members in batching.minibatches(len(credit.mask), config.rl, config.seed, self.step):
      if self.algorithm.pack:
        rows = self.algorithm.pack(experience, credit, members, config, shape.num_rows, row_length=shape.row_length)
      else:
        weights, mask = np.zeros_like(credit.mask), credit.mask[members]
        weights[members] = batching.token_weights(mask, config.rl.aggregate, config.rollout.max_new_tokens)
        rows = batching.to_batch(experience.rollout, members, weights, credit.arrays, shape)
      batch = roles.policy.place(rows)
      if train_policy:
        updates.append(Update('policy', self.algorithm.prepare(batch, roles, config)))
      if roles.critic:
        updates.append(Update('critic', batch))
    return updates

  def state(self) -> dict:
    """JSON values for a checkpoint of the steps done so far."""
    out = self.rollouts.state(self.step)  # may read more prompts
    if self.surplus:
      out['surplus'] = self.surplus.state()
    if self.replay:
      out['replay'] = self.replay.state()
    return {'step': self.step, 'memory': self.memory, 'prompts': self.prompts.state(), **out}

  def restore(self, state: dict) -> None:
    """Continues after the step of `state`."""
    self.step = state['step']
    self.memory = state['memory']
    self.prompts.restore(state['prompts'])
    self.rollouts.restore(state, self.step)
    if self.surplus:
      self.surplus.restore(state['surplus'])
    if self.replay:
      self.replay.restore(state['replay'])

  def close(self) -> None:
    """Ends the worker processes of the grader."""
    if self.grader.pool:
      self.grader.pool.close()
