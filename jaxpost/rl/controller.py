"""The controller of on-policy RL: which phase runs when, in what order.

Legend: N sequences, C completion tokens, B rows, T tokens.

It alternates programs on the same devices and threads the records between
them: prompts -> rollout -> rewards -> log-probs and values -> credit ->
batches. The loop consumes what it yields and does not know that it samples.
Every process runs it on the same values and takes the same decisions.
"""

from __future__ import annotations

import dataclasses
import typing

import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.transfer import to_host
from jaxpost.rl import batching as rows_lib
from jaxpost.rl import grading
from jaxpost.rl.rollout_queue import Ahead
from jaxpost.types import Batch, Credit, Experience, Item

if typing.TYPE_CHECKING:  # passed in
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.prompts import PromptStream
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles
  from jaxpost.rollout.sampler import Sampler


@dataclasses.dataclass
class Controller:
  """An iterator of `types.Item`, resumable at each step.

  config: the stage's config, read by `algorithm` too.
  rows: (B, T) of all sequences of a step, fixed, so that nothing is compiled
    twice; update_rows: of one minibatch.
  """

  algorithm: Algorithm
  config: object
  roles: Roles
  sampler: Sampler
  grader: grading.Grader
  prompts: 'PromptStream'
  chrono: 'Timeline'
  rows: tuple[int, int]
  update_rows: tuple[int, int]
  step: int = 0
  memory: dict = dataclasses.field(default_factory=dict)
  engine: object = None  # under the sampler, to swap its weights

  def __post_init__(self):
    self.ahead = Ahead(
      self.algorithm, self.config, self.roles, self.sampler, self.grader, self.prompts, self.chrono, self.engine
    )

  def __iter__(self):
    return self

  def __next__(self) -> Item:
    ahead = self.ahead
    ahead.fill(self.step, 1)
    asked = self._ask(ahead.queue[0].graded)  # runs while others are sampled
    ahead.fill(self.step, self.config.rollout.staleness)
    sampled = ahead.next()
    experience = self._score(sampled.graded, asked)
    with self.chrono('pack'):
      credit = self.algorithm.credit(experience, self.config)
      updates = self._updates(experience, credit)
    info = sampled.info | sampled.graded.metrics() | credit.metrics | self._figures(experience)
    self.step, self.memory = self.step + 1, credit.memory
    return Item(updates, info, sampled.graded.rows, (experience, credit))

  def _ask(self, graded) -> dict:
    """Starts what programs say of a rollout: name -> [M, B / M, T]."""
    wanted = self.algorithm.scores(self.config)
    if not wanted and not self.roles.reward_model:
      return {}
    rollout = graded.rollout
    mask = rows_lib.completion_mask(rollout)
    with self.chrono('pack'):
      batch = self.roles.policy.place(rows_lib.to_batch(rollout, range(len(mask)), mask, {}, *self.rows))
    with self.chrono('score'):
      found = self._programs(batch, wanted)
    self.chrono.watch('score', found)
    return found

  def _score(self, graded, asked: dict) -> Experience:
    """Adds what the programs say of the rollout, and the rewards."""
    rollout = graded.rollout
    mask = rows_lib.completion_mask(rollout)
    arrays = {'sampler_logprobs': rollout.logprobs, 'behaviour_logprobs': rollout.behaviour_logprobs}
    if asked:
      with self.chrono('score'):
        asked = to_host(asked)
      arrays |= {k: rows_lib.from_rows(rollout, x, self.rows[1], self.rows[0]) for k, x in asked.items()}
    with self.chrono('reward'):
      rewards, baseline = graded.rewards(arrays.pop('reward_model', None))
      if self.config.rl.dynamic_sampling:  # what only filled up the step
        mixed = np.repeat(graded.kept_mixed(), graded.group_size)
        mask = mask * mixed[:, None]
    return Experience(rollout, rewards, mask, arrays, baseline, self.step, self.memory)

  def _programs(self, batch: Batch, wanted) -> dict:
    """name -> [M, B / M, T] on the devices."""
    roles, found = self.roles, {}
    own = 'old_logprobs' in wanted or 'values' in wanted and not roles.critic
    said = roles.policy.score(batch) if own else None
    if 'old_logprobs' in wanted:
      found['old_logprobs'] = said.logprobs
    if 'ref_logprobs' in wanted:
      found['ref_logprobs'] = roles.reference(batch).logprobs
    if 'values' in wanted:
      # Of the text before each token, which is where the state ends.
      values = (roles.critic.score(batch) if roles.critic else said).values
      found['values'] = jnp.roll(values, 1, axis=2)
    if roles.reward_model:
      found['reward_model'] = roles.reward_model(batch).values
    return found

  def _updates(self, experience: Experience, credit: Credit) -> list:
    """(role, placed batch) of each update, in order."""
    config, roles, out = self.config, self.roles, []
    for members in rows_lib.minibatches(len(credit.mask), config.rl, config.seed, self.step):
      batch = self._batch(experience, credit, members)
      if self.step >= config.critic.warmup_steps or not roles.critic:
        out.append(('policy', self.algorithm.prepare(batch, roles, config)))
      if roles.critic:
        out.append(('critic', batch))
    return out

  def _batch(self, experience, credit, members) -> Batch:
    rl, rollout = self.config.rl, experience.rollout
    if self.algorithm.pack:
      host = self.algorithm.pack(experience, credit, members, self.config, *self.update_rows)
    else:
      weights = np.zeros_like(credit.mask)
      weights[members] = rows_lib.token_weights(credit.mask[members], rl.aggregate, self.config.rollout.max_new_tokens)
      host = rows_lib.to_batch(rollout, members, weights, credit.arrays, *self.update_rows)
    return self.roles.policy.place(host)

  def _figures(self, experience) -> dict:
    rollout, rl = experience.rollout, self.config.rl
    tokens = int(rows_lib.prompt_lengths(rollout).sum() + rollout.lengths.sum())
    found = {
      'tokens': tokens,
      'packing_efficiency': tokens / (self.rows[0] * self.rows[1]),
      'slot_occupancy': rollout.occupancy,
      **rollout.figures,
    }
    if self.config.rollout.staleness:  # in steps, of the weights that drew a token
      age = self.step - rows_lib.versions(rollout)[experience.mask > 0] / (rl.epochs * rl.minibatches)
      found |= {'staleness/mean': float(age.mean()) if age.size else 0.0, 'staleness/max': float(age.max(initial=0.0))}
    return found

  def state(self) -> dict:
    return {'step': self.step, 'memory': self.memory, **self.ahead.state(self.step)}

  def restore(self, state: dict):
    self.step, self.memory = state['step'], state['memory']
    self.ahead.restore(state, self.step)

  def close(self):
    self.grader.close()
