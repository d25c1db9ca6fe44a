"""Which tokens keep, lose or are held back in their gradient, so that entropy does not collapse.

Legend: N sequences, C completion tokens. Arrays are numpy arrays on the host, of the
whole rollout: a choice does not depend on minibatches, micro-batches or meshes. Log-probs
are those of the sampler and entropies those before the first update of the rollout, where
verl takes the present ones of each micro-batch; on policy and in the first update they
are the same.
"""

import numpy as np

from jaxpost.losses.reduce import same_shape


def covariance(logprobs: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns (log pi - mean) (A - mean) of each token [N, C], means over the masked-in tokens; 0 elsewhere.

  "The entropy mechanism" (arXiv:2505.22617): where it is large, an update lowers
  the entropy most.
  """
  same_shape('logprobs, advantages, mask [N, C]', 2, logprobs, advantages, mask)
  mask = np.asarray(mask, bool)
  if not mask.any():
    return np.zeros(mask.shape)

  def centered(x):
    x = np.asarray(x, np.float64)
    return np.where(mask, x - x[mask].mean(), 0)

  return centered(logprobs) * centered(advantages)


def clip_cov(
  cov: np.ndarray, mask: np.ndarray, *, fraction: float, low: float, high: float, random: np.random.Generator
) -> np.ndarray:
  """Returns the tokens [N, C] bool that lose their gradient: Clip-Cov (arXiv:2505.22617).

  They are drawn at random from those whose covariance is between `low` and `high`:
  `fraction` of all tokens, at least one, where there are so many.
  """
  mask = np.asarray(mask, bool)
  found = np.flatnonzero(mask & (cov > low) & (cov < high))
  count = min(len(found), max(int(fraction * mask.sum()), 1))
  chosen = np.zeros(mask.size, bool)
  chosen[random.choice(found, count, replace=False)] = True
  return chosen.reshape(mask.shape)


def kl_cov(cov: np.ndarray, mask: np.ndarray, *, fraction: float) -> np.ndarray:
  """Returns the tokens [N, C] bool of the largest covariance, `fraction` of all, at least one.

  KL-Cov (arXiv:2505.22617): they are held to the old policy by a KL penalty.
  """
  return _largest(cov, mask, fraction)


def top_entropy(entropy: np.ndarray, mask: np.ndarray, *, fraction: float) -> np.ndarray:
  """Returns the tokens [N, C] bool of the largest entropy, `fraction` of all, at least one: those that are trained.

  "Beyond the 80/20 rule" (arXiv:2506.01939), whose fraction is 0.2.
  """
  return _largest(entropy, mask, fraction)


def _largest(x: np.ndarray, mask: np.ndarray, fraction: float) -> np.ndarray:
  mask = np.asarray(mask, bool)
  found = np.flatnonzero(mask)
  count = min(len(found), max(int(fraction * len(found)), 1))
  order = np.argsort(-np.asarray(x).reshape(-1)[found], kind='stable')
  chosen = np.zeros(mask.size, bool)
  chosen[found[order[:count]]] = True
  return chosen.reshape(mask.shape)


def adaptive_coef(coef: float, entropy: float, target: float, step: float) -> tuple[float, float]:
  """Returns (weight of the entropy bonus now, coefficient to remember) for a rollout of this entropy.

  Skywork-OR1 (arXiv:2505.22312): the coefficient rises by `step` while the
  entropy is below its target and falls by it otherwise, here to 0 at least; the bonus
  counts only while the entropy is at most its target.
  """
  moved = coef + step if entropy < target else max(coef - step, 0.0)
  return (coef if entropy <= target else 0.0), moved
