"""Divergences between a student and a teacher, token by token.

Legend: V vocabulary, k tokens that the teacher kept; leading axes are free
and stay. S is the student, T the teacher. Results are unreduced.

Padding of the vocabulary has logits of -1e30 (or -inf): it has probability 0
and takes no gradient. Float32.
"""

import math

import jax
import jax.numpy as jnp

from jaxpost.losses.reduce import same_shape

_NEVER = -1e30
# Log-probability of what a teacher never says, and of a tail without mass:
# low enough to be 0, high enough to be multiplied and differentiated.
_FLOOR = -100.0


def forward_kl(student_logits, teacher_logits, temperature: float = 1.0):
  """KL(T || S) [...], of logits [..., V]: covers all that the teacher does."""
  return generalized_jsd(student_logits, teacher_logits, 0.0, temperature)


def reverse_kl(student_logits, teacher_logits, temperature: float = 1.0):
  """KL(S || T) [...], of logits [..., V]: seeks the teacher's modes."""
  return generalized_jsd(student_logits, teacher_logits, 1.0, temperature)


def generalized_jsd(student_logits, teacher_logits, beta: float = 0.5, temperature: float = 1.0):
  """beta KL(T || M) + (1 - beta) KL(S || M), M = (1 - beta) S + beta T.

  GKD (arXiv:2306.13649), eq. 1, in the convention of TRL: beta = 0 stands for
  KL(T || S) and beta = 1 for KL(S || T), the limits of the sum divided by
  beta and by 1 - beta.

  Args:
    student_logits, teacher_logits: [..., V], divided by `temperature`.

  Returns:
    [...] float32, nats; not multiplied by temperature^2.
  """
  same_shape('student_logits, teacher_logits [..., V]', None, student_logits, teacher_logits)
  return _divergence(_log_probs(student_logits, temperature), _log_probs(teacher_logits, temperature), beta)


def topk_jsd(
  student_logits, teacher_ids, teacher_logprobs, beta: float = 0.5, temperature: float = 1.0, outside: str = 'tail'
):
  """`generalized_jsd` from the k most probable tokens of the teacher.

  beta = 0 is KL(T || S), beta = 1 KL(S || T), as there.

  Args:
    student_logits: [..., V], divided by `temperature`.
    teacher_ids: [..., k] int, distinct.
    teacher_logprobs: [..., k], log_softmax(teacher logits / temperature) of
      those: the temperature is already applied.
    outside: what becomes of the other V - k tokens.
      'tail': they are one more outcome, with the mass that is left. With
        k = V, and never above, the divergence of the whole distributions.
      'zero': as 'tail', but the teacher says only the k (rescaled to sum to
        1), so that the student is pushed off the others: a log-probability of
        -100 there.
      'renormalise': both are rescaled to the k; the student is free outside.

  Returns:
    [...] float32.
  """
  same_shape('teacher_ids, teacher_logprobs [..., k]', None, teacher_ids, teacher_logprobs)
  same_shape(
    'leading axes of student_logits [..., V] and teacher_ids [..., k]',
    None,
    student_logits[..., 0],
    teacher_ids[..., 0],
  )
  teacher = jnp.maximum(teacher_logprobs.astype(jnp.float32), _NEVER)
  student = _log_probs(student_logits, temperature)
  kept = jnp.take_along_axis(student, teacher_ids, axis=-1)
  if outside == 'renormalise':
    return _divergence(jax.nn.log_softmax(kept), jax.nn.log_softmax(teacher), beta)
  rest = jnp.put_along_axis(student, teacher_ids, _NEVER, axis=-1, inplace=False)
  rest = jnp.maximum(jax.nn.logsumexp(rest, axis=-1, keepdims=True), _FLOOR)
  if outside == 'tail':
    tail = _log_rest(jax.nn.logsumexp(teacher, axis=-1, keepdims=True))
  elif outside == 'zero':
    teacher = jax.nn.log_softmax(teacher)
    tail = jnp.full_like(rest, _FLOOR)
  else:
    raise ValueError(f"outside {outside!r}: want 'tail', 'zero' or 'renormalise'")
  return _divergence(jnp.concatenate([kept, rest], axis=-1), jnp.concatenate([teacher, tail], axis=-1), beta)


def _log_probs(logits, temperature):
  # -inf - -inf is NaN, and so is its gradient.
  logits = jnp.maximum(logits.astype(jnp.float32) / temperature, _NEVER)
  return jax.nn.log_softmax(logits, axis=-1)


def _log_rest(log_mass):
  """log(1 - exp(x)), at least _FLOOR; masses that round to 1 leave nothing."""
  some = log_mass < -1e-6
  rest = jnp.log(-jnp.expm1(jnp.where(some, log_mass, -1.0)))
  return jnp.where(some, jnp.maximum(rest, _FLOOR), _FLOOR)


def _kl(p, q):
  """KL(p || q) of log-probabilities, over the last axis."""
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def _divergence(student, teacher, beta):
  """`generalized_jsd` of log-probabilities [..., outcomes]."""
  if not 0 <= beta <= 1:
    raise ValueError(f'beta {beta}: want 0 to 1')
  if beta == 0:
    return _kl(teacher, student)
  if beta == 1:
    return _kl(student, teacher)
  mixture = jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
  return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
