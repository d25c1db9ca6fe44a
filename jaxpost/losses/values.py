"""Critics and reward models: generalized advantage estimation, and losses of values.

Legend: B rows, T tokens, P pairs, N sequences, C completion tokens. All losses are unreduced and elementwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxpost.losses.reduce import same_shape
from jaxpost.losses.token_advantages import masked_tokens
from jaxpost.types import Array


def gae(
  token_rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, gamma: float = 1.0, lam: float | np.ndarray = 1.0
) -> tuple[np.ndarray, np.ndarray]:
  """Computes generalized advantage estimation (arXiv:1506.02438), eq. 16, on the host.

  d_t = r_t + gamma V_next - V_t, A_t = d_t + gamma lam A_next, where next is the next trained token: tokens between
  (tool output) are skipped, and discounts do not count them. The value after the last one is 0.

  Args:
    token_rewards, values, mask: [N, C]; entries outside of the mask are ignored.
    lam: one number, or one for each sequence [N].

  Returns:
    (advantages, returns = A + V), each [N, C] float32; not whitened.
  """
  mask, rewards, values = masked_tokens('token_rewards, values, mask [N, C]', mask, token_rewards, values)
  gains = np.zeros_like(values)
  next_value = np.zeros(len(values))
  gain = np.zeros(len(values))
  for t in reversed(range(values.shape[1])):
    delta = rewards[:, t] + gamma * next_value - values[:, t]
    gain = np.where(mask[:, t], delta + gamma * lam * gain, gain)
    next_value = np.where(mask[:, t], values[:, t], next_value)
    gains[:, t] = gain
  gains = np.where(mask, gains, 0)
  return gains.astype(np.float32), (gains + values).astype(np.float32)


def length_adaptive_lam(mask: ArrayLike, alpha: float) -> np.ndarray:
  """Returns max(1 - 1 / (alpha * trained tokens), 0) of each sequence [N].

  The lambda of the policy in VAPO (arXiv:2504.05118), section 4.2, with which the
  coefficients of GAE sum to the same fraction of a completion, however long it is.
  """
  lengths = (np.asarray(mask) > 0).sum(axis=1)
  return np.maximum(1 - 1 / (alpha * np.maximum(lengths, 1)), 0)


def clipped_value_loss(
  values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float = 0.0
) -> tuple[jax.Array, jax.Array]:
  """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

  PPO's value clipping (arXiv:2005.12729, section 3).

  Args:
    values, old_values, returns: [B, T].
    clip: largest distance from V_old that lowers the loss; 0: no clipping.

  Returns:
    (loss, is_clipped), each [B, T]; is_clipped is 1.0 for tokens whose loss is the
    clipped one, and whose gradient is 0; else 0.0.
  """
  same_shape('values, old_values, returns [B, T]', None, values, old_values, returns)
  squared = (values - returns) ** 2
  if not clip:
    return squared / 2, jnp.zeros_like(squared)
  clipped_values = jnp.clip(values, old_values - clip, old_values + clip)
  clipped = (clipped_values - returns) ** 2
  return (jnp.maximum(squared, clipped) / 2, (clipped > squared).astype(squared.dtype))


def explained_variance(values: Array, returns: Array, mask: Array) -> float:
  """Returns 1 - Var(returns - values) / Var(returns) over the mask, on the host.

  1: the critic is exact; 0: it is not better than a constant. NaN if the returns do not vary.
  """
  same_shape('values, returns, mask', None, values, returns, mask)
  mask = np.asarray(mask, bool)
  returns = np.asarray(returns, np.float64)[mask]
  error = returns - np.asarray(values, np.float64)[mask]
  if not returns.size or np.ptp(returns) == 0:
    return float('nan')
  return float(1 - error.var() / returns.var())


def bradley_terry(
  chosen: jax.Array, rejected: jax.Array, margin: Array | None = None, center_coef: float = 0.0
) -> jax.Array:
  """-log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)^2 of rewards [P].

  InstructGPT (arXiv:2203.02155), eq. 1, with Llama 2's margin
  (arXiv:2307.09288), eq. 2, and the centering of arXiv:2312.09244.
  """
  same_shape('chosen, rejected [P]', None, chosen, rejected)
  gap = chosen - rejected
  if margin is not None:
    same_shape('chosen, margin [P]', None, chosen, margin)
    gap = gap - margin
  return -jax.nn.log_sigmoid(gap) + center_coef * (chosen + rejected) ** 2


def squared_error(predictions: Array, targets: Array) -> Array:
  """(prediction - target)^2, for reward models of numeric scores."""
  same_shape('predictions, targets', None, predictions, targets)
  return (predictions - targets) ** 2


def process_reward_loss(logits: Array, labels: Array) -> jax.Array:
  """-y log sigmoid(x) - (1 - y) log sigmoid(-x) of logits x and labels y [B, T], at the last token of each step.

  "Let's verify step by step" (arXiv:2305.20050): the label y in [0, 1] says
  whether the step of the solution is right. The batch gives other tokens weight 0.
  """
  same_shape('logits, labels', None, logits, labels)
  return jax.nn.softplus(logits) - labels * logits
