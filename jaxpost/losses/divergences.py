"""Divergences between a student and a teacher, token by token.

Legend: V vocabulary, k most probable tokens of the teacher; leading axes [...] are free. S is the student, T the
teacher. Results are [...] float32, unreduced.

Padding of the vocabulary has logits of -1e30 (or -inf): it has probability 0 and gets no gradient.
"""

import math

import jax
import jax.numpy as jnp

from jaxpost.losses.reduce import same_shape
from jaxpost.types import MASKED_LOGIT

# Log-probability of a tail without mass: low enough for a probability of 0, high
# enough to be multiplied and differentiated.
_FLOOR = -100.0


def generalized_jsd(
  student_logits: jax.Array, teacher_logits: jax.Array, beta: float, temperature: float = 1.0
) -> jax.Array:
  """beta KL(T || M) + (1 - beta) KL(S || M), M = (1 - beta) S + beta T.

  GKD (arXiv:2306.13649), eq. 1, in the convention of TRL: beta = 0 is the forward KL(T || S), which covers the
  teacher's distribution, and beta = 1 the reverse KL(S || T), which seeks its modes. They are the limits of the sum
  divided by beta and by 1 - beta, respectively.

  Args:
    student_logits, teacher_logits: [..., V], divided by `temperature`.

  Returns:
    [...] float32, nats; not multiplied by temperature^2.
  """
  same_shape('student_logits, teacher_logits [..., V]', None, student_logits, teacher_logits)
  return _divergence(_log_probs(student_logits, temperature), _log_probs(teacher_logits, temperature), beta)


def topk_jsd(
  student_logits: jax.Array, teacher_ids: jax.Array, teacher_logprobs: jax.Array, beta: float, temperature: float = 1.0
) -> jax.Array:
  """Computes `generalized_jsd` from the k most probable tokens of the teacher.

  The other V - k tokens together are one more outcome. With k = V the result
  equals the divergence of the whole distributions; otherwise it is a lower bound.

  Args:
    student_logits: [..., V], divided by `temperature`.
    teacher_ids: [..., k] int, distinct.
    teacher_logprobs: [..., k], log_softmax(teacher logits / temperature) of
      those tokens: the temperature is already applied.
  """
  return partial_jsd(student_logits, teacher_ids + 1, teacher_logprobs, beta, temperature)


def partial_jsd(
  student_logits: jax.Array, teacher_ids: jax.Array, teacher_logprobs: jax.Array, beta: float, temperature: float = 1.0
) -> jax.Array:
  """Computes `topk_jsd` where the student's vocabulary may lack some of the teacher's k tokens.

  Their probability under the teacher belongs to the outcome of all other tokens.

  Args:
    student_logits: [..., V], divided by `temperature`.
    teacher_ids: [..., k] int, 1 + the student's id of each, distinct; 0 for none.
    teacher_logprobs: [..., k].
  """
  same_shape('teacher_ids, teacher_logprobs [..., k]', None, teacher_ids, teacher_logprobs)
  same_shape(
    'leading axes of student_logits [..., V] and teacher_ids [..., k]',
    None,
    student_logits[..., 0],
    teacher_ids[..., 0],
  )
  known = teacher_ids > 0
  teacher = jnp.where(known, _masked(teacher_logprobs.astype(jnp.float32)), MASKED_LOGIT)
  student = _log_probs(student_logits, temperature)
  ids = jnp.where(known, teacher_ids - 1, student.shape[-1])  # beyond the vocabulary nothing is written
  student_top = jnp.where(known, jnp.take_along_axis(student, ids, axis=-1, mode='clip'), MASKED_LOGIT)
  others = jnp.put_along_axis(student, ids, MASKED_LOGIT, axis=-1, inplace=False, mode='drop')
  student_tail = jnp.maximum(jax.nn.logsumexp(others, axis=-1, keepdims=True), _FLOOR)
  teacher_tail = _log_complement(jax.nn.logsumexp(teacher, axis=-1, keepdims=True))
  student = jnp.concatenate([student_top, student_tail], axis=-1)
  return _divergence(student, jnp.concatenate([teacher, teacher_tail], axis=-1), beta)


def event_jsd(student_logprob: jax.Array, teacher_logprob: jax.Array, beta: float) -> jax.Array:
  """Computes `generalized_jsd` of one event, with that log-probability, and its complement.

  A lower bound of the divergence of distributions in which the event is one outcome or several.
  """
  student, teacher = (jnp.stack([x, _log_complement(x)], axis=-1) for x in (student_logprob, teacher_logprob))
  return _divergence(student, teacher, beta)


def _log_probs(logits: jax.Array, temperature: float) -> jax.Array:
  return jax.nn.log_softmax(_masked(logits.astype(jnp.float32) / temperature), axis=-1)


def _masked(x: jax.Array) -> jax.Array:
  # Masked logits may be -inf, and -inf - -inf is NaN, as is its gradient. A NaN in x has to remain, which `jnp.maximum`
  # would drop on XLA:CPU.
  return jnp.where(x < MASKED_LOGIT, MASKED_LOGIT, x)


def _log_complement(log_mass: jax.Array) -> jax.Array:
  """Returns log(1 - exp(log_mass)), at least _FLOOR, which it is for masses that round to 1."""
  below_one = log_mass < -1e-6
  # The inner `where` keeps the gradient finite at a mass of 1.
  complement = jnp.log(-jnp.expm1(jnp.where(below_one, log_mass, -1.0)))
  return jnp.where(below_one, jnp.maximum(complement, _FLOOR), _FLOOR)


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
  """Returns KL(p || q) over the last axis; p and q are log-probabilities."""
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def _divergence(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
  """Computes `generalized_jsd` of log-probabilities [..., outcomes]."""
  if not 0 <= beta <= 1:
    raise ValueError(f'beta {beta}: must be between 0 and 1')
  if beta == 0:
    return _kl(teacher, student)
  if beta == 1:
    return _kl(student, teacher)
  mixture = jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
  return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
