"""Scores of a rollout by the roles: log-probs, entropies, values and outputs of a reward model.

Legend: N sequences, C completion tokens, M micro-batches, B rows, T row length.
"""

from __future__ import annotations

import dataclasses
import typing

import jax.numpy as jnp

from jaxpost.distributed.transfer import to_host
from jaxpost.rl import batching
from jaxpost.types import Batch, Rollout, RowShape, Scores

if typing.TYPE_CHECKING:  # passed in
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles


class PendingScores(typing.NamedTuple):
  """Scores of a rollout that the devices are computing.

  scores: [M, B / M, T] each, on the devices.
  seen_by_teacher: the rollout as the teacher reads it, after the prompts of `config.rl.privileged` where these are set.
  """

  scores: Scores
  rollout: Rollout
  seen_by_teacher: Rollout


@dataclasses.dataclass
class Scorer:
  """Runs the programs of the roles that an algorithm needs on whole rollouts.

  Attributes:
    shape: of a batch of all sequences of a step.
    tokenizer: of the prompts of a privileged teacher.
  """

  algorithm: Algorithm
  config: typing.Any
  roles: Roles
  timer: Timeline
  shape: RowShape
  tokenizer: Tokenizer

  def start(self, rollout: Rollout) -> PendingScores:
    """Dispatches the programs, and does not wait for them."""
    roles, wanted = self.roles, self.algorithm.scores(self.config)
    seen_by_teacher = rollout
    if not wanted and not roles.reward_model:
      return PendingScores(Scores(), rollout, seen_by_teacher)
    with self.timer('pack'):
      batch = of_teacher = self._placed(rollout)
      if self.config.rl.privileged:
        from jaxpost.rl import teachers

        seen_by_teacher = teachers.privileged_rollout(rollout, self.config, self.tokenizer)
        of_teacher = self._placed(seen_by_teacher)
    found = {}
    with self.timer('score'):
      if {'old_logprobs', 'entropy'} & {*wanted} or ('values' in wanted and not roles.critic):
        outputs = roles.policy.score(batch)
        found = {'old_logprobs': outputs.logprobs, 'entropy': outputs.entropy, 'values': outputs.values}
        saved = ('entropy',) if self.config.log.rollouts_every else ()  # the program has it, and launch.view shows it
        found = {name: x for name, x in found.items() if name in (*wanted, *saved)}
      if 'ref_logprobs' in wanted:  # for the KL term
        found['ref_logprobs'] = [teacher(of_teacher).logprobs for teacher in roles.teachers]
        if not roles.teachers:
          assert roles.reference, 'see `Algorithm.needs`'
          found['ref_logprobs'] = roles.reference(of_teacher).logprobs
      if 'values' in wanted:
        values = roles.critic.score(batch).values if roles.critic else found['values']
        # The state before a token ends with the token to its left.
        found['values'] = jnp.roll(values, 1, axis=2)
      if roles.reward_model:
        found['reward_model'] = roles.reward_model(batch).values
    self.timer.watch('score', found)
    return PendingScores(Scores(**found), rollout, seen_by_teacher)

  def fetch(self, pending: PendingScores) -> Scores:
    """Waits for the scores: rows on the devices -> [N, C] on the host."""
    if arrays := pending.scores.computed():
      with self.timer('score'):
        arrays = to_host(arrays)

    def unpack(name, x):
      if isinstance(x, list):
        from jaxpost.rl import teachers

        return teachers.combine([unpack(name, one) for one in x], pending.rollout, self.config)
      packed = pending.seen_by_teacher if name == 'ref_logprobs' else pending.rollout
      return batching.from_rows(packed, x, *self.shape)

    return Scores(**{name: unpack(name, x) for name, x in arrays.items()})

  def _placed(self, rollout: Rollout) -> Batch:
    """The whole rollout on the devices of the policy."""
    mask = batching.completion_mask(rollout)
    return self.roles.policy.place(batching.to_batch(rollout, range(len(mask)), mask, {}, *self.shape))
