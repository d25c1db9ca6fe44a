"""Optional per-token terms of the loss: entropy control, the NLL of right answers, the loss of demonstrations.

`grpo.finish` calls `apply` if a field of `config.rl` switches one on. The arrays are computed on
the host once a rollout; the surrogate reads them.

Legend: N sequences, C completion tokens.
"""

from typing import Any

import numpy as np

from jaxpost.algorithms.base import Config
from jaxpost.losses import entropy_control
from jaxpost.types import Experience


def apply(
  experience: Experience, out: dict[str, np.ndarray], mask: np.ndarray, config: Config
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Changes the arrays [N, C] of a `Credit` in place; returns (metrics, memory).

  A token that loses its gradient gets the advantage 0; the normalizer of the loss still counts it, as in the papers.

  Args:
    out: has 'advantages'; gets those of 'entropy_coef', 'kl_cov', 'nll_weights' and 'demonstration' that are on.
    mask: the trained tokens, [N, C] bool.
  """
  rl = config.rl
  metrics: dict[str, float] = {}
  memory: dict[str, float] = {}
  if not mask.any():
    # An update without tokens has the same arrays, so that its program is the same.
    out |= {name: np.zeros(mask.shape, np.float32) for name in arrays(rl)}
    if rl.entropy_target:
      memory['entropy_coef'] = experience.memory.get('entropy_coef', rl.entropy_coef)
    return metrics, memory
  if rl.clip_cov or rl.kl_cov:
    cov = entropy_control.covariance(out['sampler_logprobs'], out['advantages'], mask)
    metrics |= {'entropy_cov/mean': float(cov[mask].mean()), 'entropy_cov/max': float(cov[mask].max())}
    if rl.kl_cov:
      out['kl_cov'] = np.asarray(entropy_control.largest(cov, mask, fraction=rl.kl_cov), np.float32)
    if rl.clip_cov:
      random = np.random.default_rng((config.seed, experience.step, 0xC0F))
      limits = dict(fraction=rl.clip_cov, low=rl.cov_low, high=rl.cov_high)
      dropped = entropy_control.clip_cov(cov, mask, **limits, random=random)
      out['advantages'] = out['advantages'] * ~dropped
      metrics['entropy_cov/clipped'] = float(dropped[mask].mean())
  if rl.top_entropy < 1:
    entropy = experience.arrays['entropy']
    kept = entropy_control.largest(entropy, mask, fraction=rl.top_entropy)
    out['advantages'] = out['advantages'] * kept
    metrics['top_entropy/threshold'] = float(entropy[kept].min())
  if rl.entropy_target:
    # The mean of -log p of the sampled tokens estimates the entropy of the sampler without another pass.
    mean_entropy = float(-out['sampler_logprobs'][mask].mean())
    coef = experience.memory.get('entropy_coef', rl.entropy_coef)
    weight, next_coef = entropy_control.adaptive_coef(coef, mean_entropy, rl.entropy_target, rl.entropy_step)
    out['entropy_coef'] = np.full(mask.shape, weight, np.float32)
    memory['entropy_coef'] = next_coef
    metrics['entropy_coef'] = weight
  demonstration = experience.rollout.demonstration
  if rl.expert and demonstration is not None:
    out['demonstration'] = np.asarray(mask & demonstration[:, None], np.float32)
  if rl.correct_nll_coef:
    right = mask & (experience.verdicts >= rl.keep_reward)[:, None]
    # The loss divides by `normalizer`; multiplying by it makes the term a mean over the right tokens or sequences.
    sequences = int(mask.any(axis=1).sum())
    normalizer, right_units = {
      'token': (int(mask.sum()), right),
      'sequence': (sequences, right.any(axis=1)),
      'constant': (sequences * config.rollout.max_new_tokens, right),
    }[rl.aggregate]
    scale = rl.correct_nll_coef * normalizer / max(int(right_units.sum()), 1)
    out['nll_weights'] = np.asarray(scale * right, np.float32)
  return metrics, memory


def arrays(rl: Any) -> tuple[str, ...]:
  """Returns the names of the arrays that the surrogate reads, by the fields that switch them on."""
  switches = {'entropy_coef': rl.entropy_target, 'kl_cov': rl.kl_cov, 'nll_weights': rl.correct_nll_coef}
  switches['demonstration'] = rl.expert
  return tuple(name for name, value in switches.items() if value)
