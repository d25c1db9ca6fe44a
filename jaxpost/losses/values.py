"""Losses of critics and reward models.

Legend: B rows, T tokens, P pairs. Unreduced and elementwise.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.losses.reduce import same_shape


def clipped_value_loss(values, old_values, returns, clip: float = 0.0):
  """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

  PPO's value clipping (arXiv:2005.12729, section 3).

  Args:
    values, old_values, returns: [B, T].
    clip: 0 is off.

  Returns:
    (loss, is_clipped) [B, T], the latter float 0 or 1: tokens whose loss is
    the clipped one, and whose gradient is 0.
  """
  same_shape('values, old_values, returns [B, T]', None, values, old_values, returns)
  squared = (values - returns) ** 2
  if not clip:
    return squared / 2, jnp.zeros_like(squared)
  held = jnp.clip(values, old_values - clip, old_values + clip)
  clipped = (held - returns) ** 2
  return (jnp.maximum(squared, clipped) / 2, (clipped > squared).astype(squared.dtype))


def explained_variance(values, returns, mask) -> float:
  """1 - Var(returns - values) / Var(returns) over the mask, on the host.

  1: the critic is exact; 0: no better than a constant. NaN where the returns
  do not vary.
  """
  same_shape('values, returns, mask', None, values, returns, mask)
  mask = np.asarray(mask, bool)
  returns = np.asarray(returns, np.float64)[mask]
  error = returns - np.asarray(values, np.float64)[mask]
  if not returns.size or np.ptp(returns) == 0:
    return float('nan')
  return float(1 - error.var() / returns.var())


def bradley_terry(chosen, rejected, margin=None, center_coef: float = 0.0):
  """-log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)^2.

  InstructGPT (arXiv:2203.02155), eq. 1, with Llama 2's margin
  (arXiv:2307.09288), eq. 2, and the centring of arXiv:2312.09244.

  Args:
    chosen, rejected: [P] rewards; margin: [P] or None.

  Returns:
    [P].
  """
  same_shape('chosen, rejected [P]', None, chosen, rejected)
  gap = chosen - rejected
  if margin is not None:
    same_shape('chosen, margin [P]', None, chosen, margin)
    gap = gap - margin
  return -jax.nn.log_sigmoid(gap) + center_coef * (chosen + rejected) ** 2


def squared_error(predictions, targets):
  """(prediction - target)^2, for rewards that are scores."""
  same_shape('predictions, targets', None, predictions, targets)
  return (predictions - targets) ** 2


def binary_cross_entropy(logits, labels):
  """-y log sigmoid(x) - (1 - y) log sigmoid(-x), for labels y in [0, 1]."""
  same_shape('logits, labels', None, logits, labels)
  return jax.nn.softplus(logits) - labels * logits


def process_reward_loss(logits, labels):
  """`binary_cross_entropy` at the tokens that end a step of a solution.

  "Let's verify step by step" (arXiv:2305.20050): the label says whether the
  step is right. Tokens that end no step have weight 0.

  Args:
    logits, labels: [B, T].

  Returns:
    [B, T].
  """
  return binary_cross_entropy(logits, labels)


# How a reward model of single completions learns: fn(output, target).
REGRESSION = {'mse': squared_error, 'bce': binary_cross_entropy}
