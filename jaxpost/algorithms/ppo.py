"""PPO (arXiv:1707.06347) with a critic, as for language models (2203.02155).

Legend: N sequences, C completion tokens, B rows, T tokens.

The last token of a completion has its reward, and every token is penalized by the KL
to the reference. GAE computes advantages and returns; the policy is trained with the
surrogate of `grpo.py`, the critic with a clipped value loss. The value of a token is
the critic's output at the token before it: the state in which it was sampled.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpost.algorithms import grpo
from jaxpost.algorithms.base import Algorithm, refuse
from jaxpost.losses import advantages
from jaxpost.losses import values as values_lib
from jaxpost.types import Credit, Experience, Objective


def objective(config) -> Objective:
  """Returns the surrogate of the policy, plus the value loss with critic.value_head."""
  policy = grpo.objective(config)
  if not config.critic.value_head:
    return policy
  critic = value_objective(config)

  def both(outputs, batch):
    if policy.coupled:
      loss, metrics = policy.fn(outputs, batch)
    else:
      total = lambda x: jnp.sum(batch.loss_weights * x)
      loss, metrics = policy.fn(outputs, batch.arrays)
      loss, metrics = total(loss), {k: total(x) for k, x in metrics.items()}
    value_loss, more = critic.fn(outputs, batch)
    return loss + config.critic.coef * value_loss, metrics | {f'critic/{name}': x for name, x in more.items()}

  return dataclasses.replace(policy, fn=both, coupled=True, arrays=policy.arrays + critic.arrays)


def value_objective(config) -> Objective:
  """Returns the clipped value loss of the critic."""

  def clipped(outputs, batch):
    weights, arrays = batch.loss_weights, batch.arrays
    # The first token of a row has no weight, so what wraps never counts.
    values = jnp.where(weights > 0, jnp.roll(outputs.values, 1, axis=1), 0)
    loss, is_clipped = values_lib.clipped_value_loss(
      values, arrays['values'], arrays['returns'], config.critic.value_clip
    )
    total = lambda x: jnp.sum(weights * x)
    return total(loss), {'vf_loss': total(loss), 'vf_clipfrac': total(is_clipped)}

  return Objective(clipped, coupled=True, token_means=True, arrays=('values', 'returns'))


def critic(config) -> Objective | None:
  """Returns the objective of a critic model, or None with critic.value_head."""
  return None if config.critic.value_head else value_objective(config)


def scores(config) -> tuple[str, ...]:
  """Returns the names of the scores that are computed before the update."""
  return (*grpo.scores(config), 'values')


def credit(experience: Experience, config) -> Credit:
  """Returns whitened advantages, and the returns for the critic."""
  rl, valid = config.rl, np.isfinite(experience.rewards)
  mask, metrics = grpo.trained_tokens(experience, valid, config)
  kl, memory, kl_metrics = grpo.kl_in_reward(experience, mask, config)
  values = np.where(mask > 0, experience.arrays['values'], 0)
  gains, returns = advantages.gae(grpo.token_rewards(experience, mask, kl), values, mask, rl.gamma, rl.lam)
  out = grpo.finish(experience, advantages.whiten(gains, mask), mask, metrics | kl_metrics, memory, config)
  out.arrays.update(values=values, returns=returns)
  counted = mask > 0
  if counted.any():
    out.metrics.update({'values/mean': float(values[counted].mean()), 'returns/mean': float(returns[counted].mean())})
    explained = values_lib.explained_variance(values, returns, mask)
    if np.isfinite(explained):  # equal returns have nothing to explain
      out.metrics['critic/explained_variance'] = explained
  return out


def check(config):
  """InputError for combinations of fields that cannot work."""
  rl, c = config.rl, config.critic
  refuse(
    rl.advantage != 'gae',
    f'config.rl.advantage: {rl.advantage!r} asks no critic, and ppo has one; leave it empty, or use the algorithm grpo',
  )
  refuse(
    rl.scale_rewards != 'none', 'config.rl.scale_rewards: ppo whitens advantages over the batch instead; leave it empty'
  )
  for name in ('path', 'lr', 'warmup_steps'):
    refuse(
      c.value_head and bool(vars(c)[name]),
      f'config.critic.{name}: a value head has no weights and no '
      'optimizer of its own; unset it or config.critic.value_head',
    )
  refuse(
    c.warmup_steps >= config.train.steps,
    f'config.critic.warmup_steps: {c.warmup_steps} leaves the policy none of {config.train.steps} steps; lower it',
  )
  grpo.check_terms(config)


PPO = ALGORITHM = Algorithm(
  objective,
  {
    'rl': dict(
      advantage='gae', scale_rewards='none', kl_estimator='k1', kl_in='reward', importance=grpo.default_importance
    )
  },
  critic=critic,
  value_head=lambda config: config.critic.value_head,
  needs=grpo.needs,
  check=check,
  check_first_step=grpo.check_first_step,
  on_policy=True,
  scores=scores,
  credit=credit,
)
