"""Terms of single tokens beside the surrogate: entropy control, the NLL of right answers, experts.

`grpo.finish` calls `apply` where a field of `config.rl` asks for one. They are computed on
the host once a rollout; the surrogate reads their arrays.

Legend: N sequences, C completion tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpost.algorithms.base import Config
from jaxpost.errors import refuse
from jaxpost.losses import entropy_control, importance
from jaxpost.types import Experience


def apply(
  experience: Experience, out: dict[str, np.ndarray], mask: np.ndarray, config: Config
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Changes the arrays [N, C] of a `Credit` in place; returns (metrics, memory).

  A token that loses its gradient gets the advantage 0; the normalizer of the loss still
  counts it, as in the papers.

  Args:
    out: has 'advantages'; gets 'entropy_coef', 'kl_cov', 'nll_weights' and 'expert' where they are asked for.
    mask: the trained tokens, bool.
  """
  rl = config.rl
  metrics, memory = {}, {}
  if not mask.any():
    # The surrogate reads the arrays of an empty update, too.
    out |= {name: np.zeros(mask.shape, np.float32) for name in arrays(rl)}
    return metrics, {
      'entropy_coef': experience.memory.get('entropy_coef', rl.entropy_coef)
    } if rl.entropy_target else {}
  if rl.clip_cov or rl.kl_cov:
    cov = entropy_control.covariance(out['sampler_logprobs'], out['advantages'], mask)
    metrics |= {'entropy_cov/mean': float(cov[mask].mean()), 'entropy_cov/max': float(cov[mask].max())}
    if rl.kl_cov:
      out['kl_cov'] = np.float32(entropy_control.kl_cov(cov, mask, fraction=rl.kl_cov))
    if rl.clip_cov:
      random = np.random.default_rng((config.seed, experience.step, 0xC0F))
      limits = dict(fraction=rl.clip_cov, low=rl.cov_low, high=rl.cov_high)
      dropped = entropy_control.clip_cov(cov, mask, **limits, random=random)
      out['advantages'] = out['advantages'] * ~dropped
      metrics['entropy_cov/clipped'] = float(dropped[mask].mean())
  if rl.top_entropy < 1:
    entropy = experience.arrays['entropy']
    kept = entropy_control.top_entropy(entropy, mask, fraction=rl.top_entropy)
    out['advantages'] = out['advantages'] * kept
    metrics['top_entropy/threshold'] = float(entropy[kept].min())
  if rl.entropy_target:
    # -log p of what was sampled has the entropy as its mean, without another pass.
    entropy = float(-out['sampler_logprobs'][mask].mean())
    before = experience.memory.get('entropy_coef', rl.entropy_coef)
    weight, after = entropy_control.adaptive_coef(before, entropy, rl.entropy_target, rl.entropy_step)
    out['entropy_coef'] = np.full(mask.shape, weight, np.float32)
    memory['entropy_coef'] = after
    metrics['entropy_coef'] = weight
  if rl.expert:
    out['expert'] = np.float32(mask & experience.rollout.expert[:, None])
  if rl.correct_nll_coef:
    right = mask & (experience.verdicts >= rl.keep_reward)[:, None]
    # The loss is a mean over all tokens, or sequences; this makes the term the mean over those of right answers.
    counted = (x.any(axis=1) if rl.aggregate == 'sequence' else x for x in (mask, right))
    every, kept = (int(x.sum()) for x in counted)
    scale = rl.correct_nll_coef * every / max(kept, 1)
    out['nll_weights'] = np.float32(scale * right)
  return metrics, memory


def arrays(rl: Any) -> tuple[str, ...]:
  """Returns the names of the arrays that the surrogate reads with these fields."""
  asked = {'entropy_coef': rl.entropy_target, 'kl_cov': rl.kl_cov, 'nll_weights': rl.correct_nll_coef}
  asked['expert'] = rl.expert
  return tuple(name for name, value in asked.items() if value)


def check(config: Config) -> None:
  """Raises InputError where `rl.sampling_mask`, `rl.expert`, `rl.replay` or a sampler in 8 bits does not hold."""
  rl, rollout = config.rl, config.rollout
  replayed = config.environment or config.train_on_rollouts
  refuse(
    rl.sampling_mask and (not rollout.top_k or bool(rollout.top_logprobs or replayed)),
    'config.rl.sampling_mask: keeps rollout.top_k ids a token, so set that; and leave out rollout.top_logprobs, '
    'environment and train_on_rollouts',
  )
  estimated = rl.kl_coef or rl.clip_cov or rl.kl_cov or rl.entropy_target
  refuse(
    rl.expert and bool(estimated or replayed or config.router.routing_replay),
    'config.rl.expert: what is estimated from samples does not hold for completions of the data; leave out kl_coef, '
    'clip_cov, kl_cov, entropy_target, environment, train_on_rollouts and routing_replay',
  )
  given = rl.dynamic_sampling or rl.expert or replayed or not config.reward
  refuse(
    rl.replay > 0 and bool(given),
    'config.rl.replay: needs a reward function, and groups that stay as they were drawn; leave out dynamic_sampling, '
    'expert, environment and train_on_rollouts',
  )
  weighted = rl.old_policy == 'sampler' or any(importance.METHODS[x].weighs for x in rl.importance if x != 'opsm')
  refuse(
    rl.replay > 0 and not weighted,
    'config.rl.replay: its samples are those of an older policy, and no weight corrects for that; '
    "set rl.old_policy=sampler, or leave rl.importance ('auto',)",
  )
  refuse(
    bool(rollout.weights or rollout.cache) and rl.old_policy != 'sampler' and set(rl.importance) <= {'opsm'},
    f'config.rl.importance: {rl.importance} corrects nothing, and a sampler in 8 bits (rollout.weights, rollout.cache) '
    "draws from another distribution; leave it ('auto',), or set rl.old_policy=sampler",
  )
