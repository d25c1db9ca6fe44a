"""The controller of on-policy RL: which phase runs when, in what order.

Legend: N sequences, C completion tokens, B rows, T tokens.

It alternates programs on the same devices and threads the records between
them: prompts -> rollout -> rewards -> log-probs and values -> credit ->
batches. The loop consumes what it yields and does not know that it samples.
Every process runs it on the same values and takes the same decisions.
"""

import dataclasses
import logging
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import grading
from jaxpost.algorithms.base import Algorithm
from jaxpost.data import experience as rows_lib
from jaxpost.roles import Roles, Sampler
from jaxpost.sharding import to_host
from jaxpost.types import Batch, Credit, Experience, Item

if typing.TYPE_CHECKING:  # passed in
  from jaxpost.data.prompts import PromptStream
  from jaxpost.metrics import Chrono


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
  chrono: 'Chrono'
  rows: tuple[int, int]
  update_rows: tuple[int, int]
  step: int = 0
  memory: dict = dataclasses.field(default_factory=dict)

  def __iter__(self):
    return self

  def __next__(self) -> Item:
    rl, step = self.config.rl, self.step
    with self.chrono('reshard'):
      self._park(True)
      moved = self.sampler.sync(
          self.roles.policy, step * rl.epochs * rl.minibatches)
    graded, info = self._sample()
    while rl.dynamic_sampling and self._wants_more(graded, info):
      more, newer = self._sample()
      info |= newer
      graded = grading.join(graded, more)
    self.sampler.release()
    with self.chrono('reshard'):
      self._park(False)
    if rl.dynamic_sampling:
      graded = grading.keep_mixed(graded, self.config.rollout.prompts)
    experience = self._score(graded)
    with self.chrono('pack'):
      credit = self.algorithm.credit(experience, self.config)
      updates = self._updates(experience, credit)
    self.step, self.memory = step + 1, credit.memory
    info |= graded.metrics() | credit.metrics | self._figures(
        experience, moved['bytes'])
    return Item(updates, info, graded.rows, (experience, credit))

  def _park(self, there: bool):
    if self.config.rollout.park_optimizer:
      for role in self.roles.trainable.values():
        role.park(there)

  def _sample(self):
    """One round: (what was sampled, its grading under way; figures)."""
    prompts, info = next(self.prompts)
    group, greedy = self.config.rollout.group_size, None
    with self.chrono('sample'):
      rollout = self.sampler(prompts, group, self.step)
      if self.algorithm.greedy_baseline(self.config):
        greedy = self.sampler(prompts, 1, self.step, temperature=0.0)
    with self.chrono('pack'):  # workers grade while the devices score
      return self.grader.submit(rollout, greedy), info

  def _wants_more(self, graded, info) -> bool:
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
        self.step + 1, mixed.sum(), wanted, rounds)
    return False

  def _score(self, graded) -> Experience:
    """Adds what the programs say of the rollout, and the rewards."""
    rollout, roles = graded.rollout, self.roles
    mask = rows_lib.completion_mask(rollout)
    arrays = {'sampler_logprobs': rollout.logprobs,
              'behaviour_logprobs': rollout.behaviour_logprobs}
    wanted = self.algorithm.scores(self.config)
    if wanted or roles.reward_model:
      with self.chrono('pack'):
        batch = roles.policy.place(rows_lib.to_batch(
            rollout, range(len(mask)), mask, {}, *self.rows))
      with self.chrono('score'):
        found = self._programs(batch, wanted)
      unpack = lambda x: rows_lib.from_rows(
          rollout, to_host(x), self.rows[1], self.rows[0])
      arrays |= {k: unpack(x) for k, x in found.items()}
    with self.chrono('reward'):
      rewards, baseline = graded.rewards(arrays.pop('reward_model', None))
      if self.config.rl.dynamic_sampling:  # what only filled up the step
        mixed = np.repeat(graded.kept_mixed(), graded.group_size)
        mask = mask * mixed[:, None]
    return Experience(rollout, rewards, mask, arrays, baseline, self.step,
                      self.memory)

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
    return jax.block_until_ready(found)

  def _updates(self, experience: Experience, credit: Credit) -> list:
    """(role, placed batch) of each update, in order."""
    config, roles, out = self.config, self.roles, []
    for members in rows_lib.minibatches(
        len(credit.mask), config.rl, config.seed, self.step):
      batch = self._batch(experience, credit, members)
      if self.step >= config.critic.warmup_steps or not roles.critic:
        out.append(('policy', self.algorithm.prepare(batch, roles, config)))
      if roles.critic:
        out.append(('critic', batch))
    return out

  def _batch(self, experience, credit, members) -> Batch:
    rl, rollout = self.config.rl, experience.rollout
    if self.algorithm.pack:
      host = self.algorithm.pack(
          experience, credit, members, self.config, *self.update_rows)
    else:
      weights = np.zeros_like(credit.mask)
      weights[members] = rows_lib.token_weights(
          credit.mask[members], rl.aggregate,
          self.config.rollout.max_new_tokens)
      host = rows_lib.to_batch(
          rollout, members, weights, credit.arrays, *self.update_rows)
    return self.roles.policy.place(host)

  def _figures(self, experience, moved: int) -> dict:
    rollout = experience.rollout
    tokens = int(rows_lib.prompt_lengths(rollout).sum() +
                 rollout.lengths.sum())
    return {'tokens': tokens, 'reshard_bytes': moved,
            'packing_efficiency': tokens / (self.rows[0] * self.rows[1]),
            'slot_occupancy': rollout.occupancy, **rollout.figures}

  def state(self) -> dict:
    return {'step': self.step, 'prompts': self.prompts.state(),
            'memory': self.memory}

  def restore(self, state: dict):
    self.step, self.memory = state['step'], state['memory']
    self.prompts.restore(state['prompts'])

  def close(self):
    self.grader.close()
