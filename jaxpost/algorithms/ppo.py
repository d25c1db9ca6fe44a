"""PPO (arXiv:1707.06347) with a critic, as for language models (arXiv:2203.02155).

Legend: N sequences, C completion tokens, B rows, T tokens.

The last token of a completion gets its reward, and every token is penalized by the KL to the reference. GAE computes
advantages and returns; the policy is trained with the surrogate of `grpo.py`, the critic with a clipped value loss. The
value of a token is the critic's output at the token before it: the state in which it was sampled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpost.algorithms import grpo, rl_fields
from jaxpost.algorithms.base import Algorithm, Config, learning_rate
from jaxpost.errors import refuse
from jaxpost.losses import advantages, token_advantages
from jaxpost.losses import values as values_lib
from jaxpost.types import Credit, Experience, Objective


def objective(config: Config) -> Objective:
  """Returns the surrogate of the policy, plus the value loss with `config.critic.value_head`."""
  policy = grpo.objective(config)
  if not config.critic.value_head:
    return policy
  value = value_objective(config)

  def policy_loss(outputs, batch):
    if policy.coupled:
      return policy.fn(outputs, batch)
    loss, metrics = policy.fn(outputs, batch.arrays)
    weights = batch.loss_weights
    return jnp.sum(weights * loss), {name: jnp.sum(weights * x) for name, x in metrics.items()}

  def policy_and_value_loss(outputs, batch):
    loss, metrics = policy_loss(outputs, batch)
    value_loss, value_metrics = value.fn(outputs, batch)
    metrics |= {f'critic/{name}': x for name, x in value_metrics.items()}
    return loss + config.critic.coef * value_loss, metrics

  arrays = policy.arrays + value.arrays
  return dataclasses.replace(policy, fn=policy_and_value_loss, coupled=True, arrays=arrays)


def value_objective(config: Config) -> Objective:
  """Returns the clipped value loss of the critic (`losses.values.clipped_value_loss`)."""

  def clipped(outputs, batch):
    weights = batch.loss_weights
    arrays = batch.arrays
    # The value of a token is the output at the token before. The one that wraps around is at the first token of a row,
    # which has no weight.
    values = jnp.where(weights > 0, jnp.roll(outputs.values, 1, axis=1), 0)
    loss, is_clipped = values_lib.clipped_value_loss(
      values, arrays['values'], arrays['returns'], config.critic.value_clip
    )
    total = jnp.sum(weights * loss)
    return total, {'vf_loss': total, 'vf_clipfrac': jnp.sum(weights * is_clipped)}

  return Objective(clipped, coupled=True, token_means=True, arrays=('values', 'returns'))


def critic(config: Config) -> Objective | None:
  """Returns the objective of a critic model, or None with `config.critic.value_head`."""
  return None if config.critic.value_head else value_objective(config)


def value_head(config: Config) -> bool:
  """Returns True if the policy itself has the scalar head."""
  return config.critic.value_head


def scores(config: Config) -> tuple[str, ...]:
  """Returns the names of the scores that are computed before the update."""
  return (*grpo.scores(config), 'values')


def credit(experience: Experience, config: Config) -> Credit:
  """Returns whitened advantages [N, C] (GAE, arXiv:1506.02438), and the returns for the critic.

  Advantages and returns may have different lambdas (VC-PPO, arXiv:2503.01491).
  """
  rl = config.rl
  mask, metrics = grpo.trained_tokens(experience, np.isfinite(experience.rewards), config)
  kl, memory, kl_metrics = grpo.kl_penalty(experience, mask, config)
  rewards = advantages.token_rewards(experience.rewards, mask, kl, experience.turn_rewards)
  values = np.where(mask > 0, experience.arrays['values'], 0)
  lam = values_lib.length_adaptive_lam(mask, rl.length_alpha) if rl.length_alpha else rl.lam
  advantage, returns = values_lib.gae(rewards, values, mask, rl.gamma, lam)
  if config.critic.lam >= 0:
    _, returns = values_lib.gae(rewards, values, mask, rl.gamma, config.critic.lam)
  whitened = token_advantages.whiten(advantage, mask)
  out = grpo.finish(experience, whitened, mask, metrics | kl_metrics, memory, config=config)
  out.arrays.update(values=values, returns=returns)
  out.metrics.update(_value_metrics(values, returns, mask))
  trained = mask.any(axis=1)
  if rl.length_alpha and trained.any():
    out.metrics['gae_lambda/mean'] = float(lam[trained].mean())
  return out


def _value_metrics(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Metrics of the critic over the trained tokens; {} if there are none."""
  counted = mask > 0
  if not counted.any():
    return {}
  metrics = {'values/mean': float(values[counted].mean()), 'returns/mean': float(returns[counted].mean())}
  metrics |= {'values/std': float(values[counted].std()), 'returns/std': float(returns[counted].std())}
  explained = values_lib.explained_variance(values, returns, mask)
  if np.isfinite(explained):  # NaN if all returns are equal: they have no variance
    metrics['critic/explained_variance'] = explained
  return metrics


def check(config: Config) -> None:
  """Raises InputError for combinations of fields that cannot work."""
  rl = config.rl
  section = config.critic
  refuse(
    rl.advantage != 'gae',
    f'config.rl.advantage: {rl.advantage!r} has no critic, and ppo has one; leave it empty, or use the algorithm grpo',
  )
  refuse(
    rl.kl_in == 'advantage',
    'config.rl.kl_in: the critic of ppo learns from rewards, so a KL in the advantage is hidden from it; use reward',
  )
  refuse(
    rl.scale_rewards != 'none', 'config.rl.scale_rewards: ppo whitens advantages over the batch instead; leave it empty'
  )
  for name in ('path', 'lr', 'warmup_steps'):
    refuse(
      section.value_head and bool(vars(section)[name]),
      f'config.critic.{name}: a value head has no weights and no '
      'optimizer of its own; unset it or config.critic.value_head',
    )
  refuse(
    section.coef != type(section).coef and not section.value_head,
    f'config.critic.coef: a critic model has an update of its own; leave it {type(section).coef}, '
    'or set config.critic.value_head',
  )
  refuse(-1 < section.lam < 0, f"config.critic.lam: {section.lam} is below 0; -1 is the method's own")
  refuse(
    rl.length_alpha > 0 and section.lam >= 0 and rl.lam != type(rl).lam,
    'config.rl.lam: with rl.length_alpha and critic.lam nothing would read it; leave it out',
  )
  refuse(
    section.warmup_steps >= config.train.steps and not config.train.epochs,  # those of epochs are not known yet
    f'config.critic.warmup_steps: {section.warmup_steps} leaves the policy none of {config.train.steps} steps; '
    'lower it',
  )
  rl_fields.check_shared(config)


def method(
  critic_lam: float = -1.0, critic_lr: Callable[[float], float] = lambda lr: max(1e-5, lr), **choices: Any
) -> Algorithm:
  """Returns PPO with other defaults in `config.rl` and `config.critic`.

  Args:
    critic_lam: lambda of the critic's targets; -1: that of the advantages.
    critic_lr: learning rate of the policy -> that of the critic; by default verl's 1e-5, or the policy's if larger.
  """

  def rate(config: Config) -> float:
    return 0.0 if config.critic.value_head else critic_lr(config.optim.lr)

  return Algorithm(
    objective,
    {
      'rl': {**rl_fields.defaults({'kl_in': 'reward', **choices}), 'advantage': 'gae', 'scale_rewards': 'none'},
      'optim': {'lr': learning_rate(1e-6)},
      'critic': {'lr': rate, 'lam': critic_lam},
    },
    sections=('rl', 'critic'),
    critic=critic,
    value_head=value_head,
    needs=grpo.needs,
    check=check,
    check_first_step=grpo.check_first_step,
    on_policy=True,
    scores=scores,
    credit=credit,
  )


PPO = ALGORITHM = method()
VAPO = method(  # arXiv:2504.05118, section 5.1
  critic_lam=1.0, critic_lr=lambda lr: 2 * lr, length_alpha=0.05, clip_high=0.28, correct_nll_coef=0.1
)
