"""Scores of a rollout by the roles: log-probs, entropies, values and outputs of a reward model.

Legend: N sequences, C completion tokens, M micro-batches, B rows, T row length.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing

import jax.numpy as jnp

from jaxpost.distributed.transfer import to_host
from jaxpost.rl import batching
from jaxpost.types import Batch, Rollout, RowShape, Scores

if typing.TYPE_CHECKING:  # for annotations only: the objects are passed in
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.roles import Roles


class PendingScores(typing.NamedTuple):
  """Scores of a rollout that the devices are computing.

  scores: [M, B / M, T] each, on the devices.
  readings: the rollout as the reference or the teachers read it: one for all of them, or one for each.
  """

  scores: Scores
  rollout: Rollout
  readings: list[Rollout]


@dataclasses.dataclass
class Scorer:
  """Runs the programs of the roles that an algorithm needs on whole rollouts.

  Attributes:
    shape: the shape of a batch of all sequences of a step.
    tokenizer: encodes the prompts of a privileged teacher.
  """

  algorithm: Algorithm
  config: typing.Any
  roles: Roles
  timer: Timeline
  shape: RowShape
  tokenizer: Tokenizer

  def start(self, rollout: Rollout) -> PendingScores:
    """Dispatches the programs that compute the scores, without waiting for them."""
    roles, names = self.roles, self.algorithm.scores(self.config)
    readings = [rollout]
    if not names and not roles.reward_model:
      return PendingScores(Scores(), rollout, readings)
    with self.timer('pack'):
      batch = self._placed(rollout)
      read_batches = [batch]
      if self.config.rl.privileged or self.config.distill.align == 'text':
        from jaxpost.algorithms import teachers

        readings = teachers.readings(rollout, roles.teachers, self.config, self.tokenizer)
        read_batches = [self._placed(reading) for reading in readings]
    scores = {}
    with self.timer('score'):
      if {'old_logprobs', 'entropy'} & {*names} or ('values' in names and not roles.critic):
        outputs = roles.policy.score(batch)
        scores = {'old_logprobs': outputs.logprobs, 'entropy': outputs.entropy, 'values': outputs.values}
        saved = ('entropy',) if self.config.log.rollouts_every else ()  # comes with log-probs, and launch.view shows it
        scores = {name: x for name, x in scores.items() if name in (*names, *saved)}
      if 'ref_logprobs' in names:  # for the KL term
        readers: list[typing.Any] = [*roles.teachers] or [roles.reference]  # there is one, see `Algorithm.needs`
        scores['ref_logprobs'] = [reader(x).logprobs for reader, x in zip(readers, itertools.cycle(read_batches))]
      if 'values' in names:
        values = roles.critic.score(batch).values if roles.critic else scores['values']
        # The value of a token is that of the state before it, the critic's output at the token to its left.
        scores['values'] = jnp.roll(values, 1, axis=2)
      if roles.reward_model:
        scores['reward_model'] = roles.reward_model(batch).values
    self.timer.watch('score', scores)
    return PendingScores(Scores(**scores), rollout, readings)

  def fetch(self, pending: PendingScores) -> Scores:
    """Waits for the scores, and returns them unpacked from rows to [N, C] on the host."""
    if arrays := pending.scores.computed():
      with self.timer('score'):
        arrays = to_host(arrays)
    readings = zip(itertools.cycle(pending.readings), arrays.pop('ref_logprobs', ()))
    read = [batching.from_rows(reading, x, self.shape) for reading, x in readings]
    scores = {name: batching.from_rows(pending.rollout, x, self.shape) for name, x in arrays.items()}
    if read and self.roles.teachers:
      from jaxpost.algorithms import teachers

      scores |= teachers.scores(read, pending, self.roles.teachers, scores, self.config)
    elif read:
      scores['ref_logprobs'] = read[0]
    return Scores(**scores)

  def _placed(self, rollout: Rollout) -> Batch:
    mask = batching.completion_mask(rollout)
    return self.roles.policy.place(batching.to_batch(rollout, range(len(mask)), mask, {}, self.shape))
