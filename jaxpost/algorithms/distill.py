"""Distillation: a student learns the next-token distributions of its teachers.

Legend: M micro-batches, B rows, T tokens, C tokens of a chunk, V vocabulary,
D' hidden size of a teacher, k of its most probable tokens.

DISTILL trains on the data (Hinton et al. 2015, arXiv:1503.02531); GKD trains on the
student's own samples in a fraction of the steps (arXiv:2306.13649, algorithm 1).

A teacher's logits are computed together with the student's, chunk by chunk, from its
hidden states. With `distill.top_k`, its k most probable tokens are computed once and
cached on disk instead, and no teacher is in memory during training.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpost.algorithms.base import Algorithm, Precompute, expect, refuse, refuse_unread
from jaxpost.algorithms.sft import render_text
from jaxpost.distributed import transfer
from jaxpost.losses import divergences
from jaxpost.types import MASKED_LOGIT, Credit, Experience, Objective


def objective(config) -> Objective:
  """sum_i w_i D_beta(teacher_i, student) + nll_coef * cross entropy.

  D_beta is `losses.divergences.generalized_jsd` of GKD, eq. 1; w sums to 1.
  """
  d = config.distill

  def loss(outputs, arrays):
    metrics = {'divergence': outputs.divergence, 'nll': -outputs.logprobs, 'entropy': outputs.entropy}
    # No cross entropy on the student's own samples.
    given = arrays.get('from_data', 1.0)
    return outputs.divergence - d.nll_coef * given * outputs.logprobs, metrics

  return Objective(loss, reads=('entropy',), divergence=from_cache(d) if d.top_k else from_logits(d))


def objective_on_policy(config) -> Objective:
  """Returns the objective with cross entropy on completions of the data only."""
  return dataclasses.replace(objective(config), arrays=('from_data',) if config.distill.nll_coef else ())


def shares(d) -> list:
  """Returns the weights of the teachers, normalized to sum 1."""
  weights = d.weights or (1.0,) * len(d.teachers)
  return [w / sum(weights) for w in weights]


def from_logits(d):
  """For `losses.head_chunk.HeadConfig.divergence`: of whole distributions.

  Tokens that the teacher lacks are left out of the student's, too.
  """

  def divergence(logits, teachers, arrays):
    del arrays
    return sum(
      w
      * divergences.generalized_jsd(
        jnp.where(theirs > MASKED_LOGIT / 2, logits, MASKED_LOGIT), theirs, d.beta, d.temperature
      )
      for w, theirs in zip(shares(d), teachers)
    )

  return divergence


def from_cache(d):
  """For `losses.head_chunk.HeadConfig.divergence`: of the teachers' top k and the rest."""

  def divergence(logits, teachers, arrays):
    del teachers
    return sum(
      w
      * divergences.topk_jsd(logits, arrays[f'teacher_{i}_ids'], arrays[f'teacher_{i}_logprobs'], d.beta, d.temperature)
      for i, w in enumerate(shares(d))
    )

  return divergence


def needs(config) -> tuple[str, ...]:
  """Returns the frozen roles: the teachers."""
  del config
  return ('teachers',)


def prepare(batch, roles, config):
  """Adds the hidden states of the teachers, in the layout of training."""
  del config
  move = lambda x: transfer.move(roles.policy.layout, x, None, 'batch', None)
  return batch.replace(teacher_hidden=tuple(move(t(batch)) for t in roles.teachers))


def precompute(config) -> dict:
  """Returns the top-k caches of the teachers, which then are not needed in training."""
  d = config.distill

  def of(i):
    names = f'teacher_{i}_ids', f'teacher_{i}_logprobs'
    return Precompute(
      {names[0]: ((d.top_k,), np.int32), names[1]: ((d.top_k,), np.float32)},
      lambda found: dict(zip(names, found)),
      (d.top_k, d.temperature),
    )

  return {f'teacher_{i}': of(i) for i in range(len(d.teachers) if d.top_k else 0)}


def credit(experience: Experience, config) -> Credit:
  """Returns all completions for training; there are no rewards."""
  arrays = {}
  if config.distill.nll_coef:
    arrays['from_data'] = np.full_like(experience.mask, experience.rollout.from_data)
  return Credit(arrays, experience.mask, {'on_policy': 1.0 - experience.rollout.from_data})


def from_data(config) -> float:
  """Returns the fraction of steps that train on the data."""
  return 1.0 - config.distill.on_policy


def check(config):
  """InputError for teachers and weights that cannot work."""
  d = config.distill
  refuse(not d.teachers, 'config.distill.teachers: is empty; name a folder, org/name, RUN[@step] or stage:NAME')
  for i, text in enumerate(d.teachers):
    refuse(not text, f'config.distill.teachers[{i}]: is empty; name a folder, org/name, RUN[@step] or stage:NAME')
  refuse(
    len(d.weights) not in (0, len(d.teachers)),
    f'config.distill.weights: {len(d.weights)} weights for {len(d.teachers)} teachers; give one each, or ()',
  )
  refuse(
    any(w < 0 for w in d.weights) or bool(d.weights and not sum(d.weights)),
    f'config.distill.weights: {d.weights} must be 0 or more, and not all 0',
  )


def check_on_data(config):
  """InputError for fields that cannot work on data."""
  check(config)
  refuse(
    config.distill.on_policy != 1.0,
    'config.distill.on_policy: distill trains on the data alone; set '
    'config.algorithm=gkd to mix in samples of the student',
  )
  refuse(
    bool(config.distill.top_k and config.data.streaming),
    'config.distill.top_k: is found for all rows before the first step, '
    'and config.data.streaming reads them when needed; set one of them '
    'to its default',
  )


def check_on_policy(config):
  """InputError for fields that cannot work on samples."""
  check(config)
  d = config.distill
  refuse(
    d.top_k > 0,
    'config.distill.top_k: a cache knows no samples that are still to be made; '
    'set it to 0, or config.algorithm=distill',
  )
  refuse(
    d.on_policy == 1.0 and d.nll_coef > 0,
    'config.distill.nll_coef: is for completions of the data, and '
    'config.distill.on_policy=1 takes none; lower it, or set nll_coef=0',
  )
  refuse_unread(config.rl, rl_fields_read(config.rl), 'gkd')


def rl_fields_read(rl) -> set[str]:
  """Returns the fields of `config.rl` that count in GKD."""
  del rl
  return {'aggregate', 'epochs', 'minibatches'}


def check_first_step(metrics, config):
  """AssertionError unless the divergence is 0 where student and teacher are the same model."""
  start = config.init_from
  if not start and len(config.stages) < 2:
    start = config.model.path
  if start and set(config.distill.teachers) == {start}:
    exact = config.model.dtype == 'float32'
    expect(metrics, {'divergence': (0.0, 1e-5 if exact else 1e-2)}, 'student and teacher are the same model')


DISTILL = ALGORITHM = Algorithm(
  objective,
  needs=needs,
  prepare=prepare,
  precompute=precompute,
  render=render_text,
  check=check_on_data,
  check_first_step=check_first_step,
)
GKD = Algorithm(
  objective_on_policy,
  {'rl': dict(aggregate='token', dynamic_sampling=0)},
  needs=needs,
  prepare=prepare,
  check=check_on_policy,
  check_first_step=check_first_step,
  on_policy=True,
  rewards=False,
  from_data=from_data,
  credit=credit,
)
