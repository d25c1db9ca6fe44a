"""Distillation: a student learns the next-token distributions of its teachers.

Legend: M micro-batches, B rows, T tokens, C tokens of a chunk, V vocabulary,
D' hidden size of a teacher, k number of its most probable tokens that are kept.

DISTILL trains on the data (Hinton et al. 2015, arXiv:1503.02531); GKD trains on the
student's own samples in a fraction of the steps (arXiv:2306.13649, algorithm 1).

A teacher's logits are computed together with the student's, chunk by chunk, from its
hidden states. With `distill.top_k`, its k most probable tokens are computed once and
cached on disk instead, and no teacher is in memory during training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpost.algorithms.base import Algorithm, Config, Precompute, expect, learning_rate
from jaxpost.algorithms.sft import render_text
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.distributed import transfer
from jaxpost.errors import refuse, refuse_unread
from jaxpost.losses import divergences
from jaxpost.types import MASKED_LOGIT, Batch, Credit, Divergence, Experience, Objective

if TYPE_CHECKING:
  from jaxpost.roles import Roles

DistillOptions = Any  # `config.distill`


def objective(config: Config) -> Objective:
  """Returns the loss sum_i w_i D_beta(teacher_i, student) + nll_coef * cross entropy.

  D_beta is `losses.divergences.generalized_jsd` of GKD, eq. 1; w sums to 1.
  """
  options = config.distill
  if options.align == 'text':
    from jaxpost.algorithms import distill_text

    return distill_text.objective(config, shares(options))

  def loss(outputs, arrays):
    metrics = {'divergence': outputs.divergence, 'nll': -outputs.logprobs, 'entropy': outputs.entropy}
    # No cross entropy on the student's own samples.
    is_from_data = arrays.get('from_data', 1.0)
    return outputs.divergence - options.nll_coef * is_from_data * outputs.logprobs, metrics

  divergence = from_cache(options) if options.top_k else from_logits(options)
  return Objective(loss, reads=('entropy',), divergence=divergence)


def objective_on_policy(config: Config) -> Objective:
  """Returns the objective with cross entropy on completions of the data only."""
  arrays = ('from_data',) if config.distill.nll_coef else ()
  return dataclasses.replace(objective(config), arrays=arrays)


def from_logits(options: DistillOptions) -> Divergence:
  """Returns the divergence of whole distributions, as a function of logits.

  Tokens that the teacher lacks are left out of the student's, too.
  """

  def divergence(logits, teachers, arrays):
    del arrays
    total = 0
    for weight, teacher in zip(shares(options), teachers):
      student = jnp.where(teacher <= MASKED_LOGIT / 2, MASKED_LOGIT, logits)  # written so that NaN is not masked
      total += weight * divergences.generalized_jsd(student, teacher, options.beta, options.temperature)
    return total

  return divergence


def from_cache(options: DistillOptions) -> Divergence:
  """Returns the divergence of two distributions over the teachers' top k tokens and one event for all others.

  Tokens that the teacher lacks are left out of the student's, too, as in `from_logits`.
  """

  def divergence(logits, teachers, arrays):
    del teachers
    total = 0
    for i, weight in enumerate(shares(options)):
      ids, logprobs, size = (arrays[name] for name in _cache_names(i))
      student = jnp.where(jnp.arange(logits.shape[-1]) < size[..., None], logits, MASKED_LOGIT)
      total += weight * divergences.topk_jsd(student, ids, logprobs, options.beta, options.temperature)
    return total

  return divergence


def shares(options: DistillOptions) -> list[float]:
  """Returns the weights of the teachers, normalized to sum 1."""
  weights = options.weights or (1.0,) * len(options.teachers)
  return [weight / sum(weights) for weight in weights]


def _cache_names(teacher: int) -> tuple[str, str, str]:
  """Names in `Batch.arrays` of a teacher's top tokens, their log-probs [B, T, k] and its vocabulary size [B, T]."""
  return f'teacher_{teacher}_ids', f'teacher_{teacher}_logprobs', f'teacher_{teacher}_vocab_size'


def needs(config: Config) -> tuple[str, ...]:
  """Returns the frozen roles: the teachers."""
  del config
  return ('teachers',)


def prepare(batch: Batch, roles: Roles, config: Config) -> Batch:
  """Adds the hidden states of the teachers, moved to the layout of training."""
  del config
  layout = roles.policy.layout
  hidden = [transfer.move(layout, teacher(batch), None, 'batch') for teacher in roles.teachers]
  return batch.replace(teacher_hidden=tuple(hidden))


def precompute(config: Config) -> dict[str, Precompute]:
  """Returns the specs of the teachers' top-k caches, with which training needs no teacher; {} if there are none."""
  options = config.distill
  if options.align == 'text':
    from jaxpost.algorithms import teacher_text

    return teacher_text.precompute(config)
  if not options.top_k:
    return {}
  return {f'teacher_{i}': _top_k_cache(i, options) for i in range(len(options.teachers))}


def _top_k_cache(teacher: int, options: DistillOptions) -> Precompute:
  names = ids, logprobs, vocab_size = _cache_names(teacher)
  shape = (options.top_k,)

  def read(outputs):
    return dict(zip(names, outputs))

  arrays = {ids: (shape, np.int32), logprobs: (shape, np.float32), vocab_size: ((), np.int32)}
  return Precompute(arrays, read, options=(options.top_k, options.temperature))


def credit(experience: Experience, config: Config) -> Credit:
  """Returns all completions for training; there are no rewards."""
  from_data = experience.rollout.from_data
  arrays = {}
  if config.distill.nll_coef:
    arrays['from_data'] = np.full_like(experience.mask, from_data)
  return Credit(arrays, experience.mask, {'on_policy': 1.0 - from_data})


def data_share(config: Config) -> float:
  """Returns the fraction of steps that train on the data."""
  return 1.0 - config.distill.on_policy


def check(config: Config) -> None:
  """Raises InputError for teachers and weights that cannot work."""
  options = config.distill
  refuse(not options.teachers, 'config.distill.teachers: is empty; name a folder, org/name, RUN[@step] or stage:NAME')
  for i, text in enumerate(options.teachers):
    refuse(not text, f'config.distill.teachers[{i}]: is empty; name a folder, org/name, RUN[@step] or stage:NAME')
  num_weights = len(options.weights)
  refuse(
    num_weights not in (0, len(options.teachers)),
    f'config.distill.weights: {num_weights} weights for {len(options.teachers)} teachers; give one each, or ()',
  )
  refuse(
    any(w < 0 for w in options.weights) or bool(options.weights and not sum(options.weights)),
    f'config.distill.weights: {options.weights} must be 0 or more, and not all 0',
  )


def check_on_data(config: Config) -> None:
  """Raises InputError for fields that cannot work on data."""
  check(config)
  if config.distill.align == 'text':
    from jaxpost.algorithms import distill_text

    distill_text.check(config)
  refuse(
    config.distill.on_policy != 1.0,
    'config.distill.on_policy: distill trains on the data alone; set '
    'config.algorithm=gkd to mix in samples of the student',
  )
  refuse(
    bool(config.distill.top_k and config.data.streaming),
    'config.distill.top_k: is computed for all rows before the first step, and config.data.streaming reads rows '
    'when they are needed; set one of them to its default',
  )


def check_on_policy(config: Config) -> None:
  """Raises InputError for fields that cannot work on samples."""
  check(config)
  options = config.distill
  refuse(
    options.align == 'text',
    "config.distill.align: gkd reads the distributions of its teachers at the student's tokens, so it needs one "
    'tokenizer; use algorithm=opd, which compares the texts of samples, or algorithm=distill on data',
  )
  refuse(
    options.top_k > 0,
    'config.distill.top_k: is cached before the first step, when samples do not exist yet; '
    'set it to 0, or config.algorithm=distill',
  )
  refuse(
    options.on_policy == 1.0 and options.nll_coef > 0,
    'config.distill.nll_coef: is for completions of the data, and '
    'config.distill.on_policy=1 takes none; lower it, or set nll_coef=0',
  )
  refuse_unread(config.rl, ('aggregate', 'correct_by', 'epochs', 'minibatches'), 'gkd')


def check_teachers(config: Config, sources: Mapping[str, Any], tokenizer: Tokenizer) -> None:
  """Raises InputError for teachers that cannot read the student's tokens."""
  for i in range(sum(name.startswith('teacher_') for name in sources)):
    source = sources[f'teacher_{i}']
    key = f'config.distill.teachers[{i}]: {config.distill.teachers[i]}'
    if config.distill.align == 'text':
      from jaxpost.algorithms import distill_text

      distill_text.check_teacher(key, source, config.distill.top_k)
      continue
    check_teacher(key, source, tokenizer)
    size = min(source.config.vocab_size, sources['policy'].config.vocab_size)
    refuse(
      config.distill.top_k > size,
      f'config.distill.top_k: {config.distill.top_k} of {size} tokens that student and teacher share; '
      'lower it, or 0 for all of them',
    )


def check_teacher(key: str, source: Any, tokenizer: Tokenizer) -> None:
  """Raises InputError, which begins with `key`, for a source of weights that cannot read the student's tokens."""
  probe = 'Zwölf: 12 + 345 = 357, so x_1 ≥ 2\n\treturn "ja"; 日本'
  size = source.config.vocab_size
  refuse(bool(source.config.num_labels), f'{key} is a reward model, which predicts no tokens; name a language model')
  refuse(
    size < tokenizer.vocab_size,
    f'{key} has a vocabulary of {size}, less than the {tokenizer.vocab_size} tokens of {tokenizer.source}; '
    'a teacher must read what the student reads',
  )
  if source.folder and (source.folder / 'tokenizer.json').exists():
    teacher_tokenizer = tokenizer_lib.load(str(source.folder))
    refuse(
      teacher_tokenizer.encode(probe) != tokenizer.encode(probe),
      f'{key} has another tokenizer than {tokenizer.source}; its tokens mean something else, '
      'so choose a teacher of the same family, or distill with config.distill.align=text (algorithm=distill or opd)',
    )


def check_first_step(metrics: dict, config: Config) -> None:
  """Raises AssertionError unless the divergence is 0 where student and teacher are the same model."""
  start = config.init_from
  if not start and len(config.stages) < 2 and not config.model.quantize and not config.lora.path:
    start = config.model.path
  if start and set(config.distill.teachers) == {start}:
    exact = config.model.dtype == 'float32'
    expect(metrics, {'divergence': (0.0, 1e-5 if exact else 1e-2)}, 'student and teacher are the same model')


DISTILL = ALGORITHM = Algorithm(
  objective,
  {'optim': {'lr': learning_rate(2e-5)}},
  sections=('distill',),
  needs=needs,
  prepare=prepare,
  precompute=precompute,
  render=render_text,
  check=check_on_data,
  check_roles=check_teachers,
  check_first_step=check_first_step,
)
GKD = Algorithm(
  objective_on_policy,
  {'optim': {'lr': learning_rate(1e-5)}, 'rl': {'aggregate': 'token', 'dynamic_sampling': 0}},
  sections=('distill', 'rl'),
  needs=needs,
  prepare=prepare,
  check=check_on_policy,
  check_roles=check_teachers,
  check_first_step=check_first_step,
  on_policy=True,
  rewards=False,
  data_share=data_share,
  credit=credit,
)
