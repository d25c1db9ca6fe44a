"""Methods against a collapse of entropy: tokens without gradient or with a KL penalty, and an adaptive bonus.

Legend: N sequences, C completion tokens. Arrays are numpy arrays on the host, of the whole rollout, so that results do
not depend on minibatches, micro-batches or meshes. Log-probs are those of the sampler, and entropies those before the
first update on the rollout. verl computes both in each micro-batch with the current policy; in the first update on
policy, these are the same.
"""

import numpy as np

from jaxpost.losses.reduce import same_shape


def covariance(logprobs: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns (log pi - mean) (A - mean) of each token [N, C], with means over the tokens of the mask; 0 elsewhere.

  "The entropy mechanism" (arXiv:2505.22617): updates lower the entropy most at tokens where it is large.
  """
  same_shape('logprobs, advantages, mask [N, C]', 2, logprobs, advantages, mask)
  mask = np.asarray(mask, bool)

  def centered(x):
    x = np.asarray(x, np.float64)
    return np.where(mask, x - x[mask].mean(), 0)

  return centered(logprobs) * centered(advantages)


def clip_cov(
  cov: np.ndarray, mask: np.ndarray, *, fraction: float, low: float, high: float, random: np.random.Generator
) -> np.ndarray:
  """Returns a mask [N, C] bool of the tokens that lose their gradient: Clip-Cov (arXiv:2505.22617).

  They are drawn at random from the tokens whose covariance is between `low` and `high`:
  `fraction` of all tokens, at least one, or all candidates if there are fewer.
  """
  mask = np.asarray(mask, bool)
  candidates = np.flatnonzero(mask & (cov > low) & (cov < high))
  count = min(len(candidates), max(int(fraction * mask.sum()), 1))
  chosen = np.zeros(mask.size, bool)
  chosen[random.choice(candidates, count, replace=False)] = True
  return chosen.reshape(mask.shape)


def largest(x: np.ndarray, mask: np.ndarray, *, fraction: float) -> np.ndarray:
  """Returns a mask [N, C] bool of the tokens with the largest x: `fraction` of all, at least one.

  With the covariance as x it is KL-Cov (arXiv:2505.22617): they get a penalty, the KL divergence from the old policy.
  With the entropy as x only they are trained: "Beyond the 80/20 rule" (arXiv:2506.01939), whose fraction is 0.2.
  """
  mask = np.asarray(mask, bool)
  candidates = np.flatnonzero(mask)
  count = min(len(candidates), max(int(fraction * len(candidates)), 1))
  order = np.argsort(-np.asarray(x).reshape(-1)[candidates], kind='stable')
  chosen = np.zeros(mask.size, bool)
  chosen[candidates[order[:count]]] = True
  return chosen.reshape(mask.shape)


def adaptive_coef(coef: float, entropy: float, target: float, step: float) -> tuple[float, float]:
  """Returns (weight of the entropy bonus for a rollout of this entropy, coefficient for the next one).

  Skywork-OR1 (arXiv:2505.22312): the coefficient rises by `step` if the entropy is below its target, and otherwise
  falls by `step`, here not below 0. The bonus counts only if the entropy is at most its target.
  """
  next_coef = coef + step if entropy < target else max(coef - step, 0.0)
  return (coef if entropy <= target else 0.0), next_coef
