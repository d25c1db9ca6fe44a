"""Advantage actor-critic after a warm start: two roles, two stages.

The actor learns from the reward less what a critic expected of the prompt
and the tokens so far; the critic, a model of its own, learns that reward
(A2C; Mnih et al. 2016, arXiv:1602.01783).

python -m launch.train --config=docs/examples/actor_critic.py \
  --workdir=runs/actor_critic
"""

import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxpost import Algorithm, Credit, Objective, defaults


def actor(config):
  """-A log p, with a bonus for entropy."""
  bonus = config.rl.entropy_coef

  def loss(outputs, arrays):
    gain = arrays['advantages'] * outputs.logprobs
    return -gain - bonus * outputs.entropy, {'entropy': outputs.entropy}

  return Objective(
    loss,
    reads=('entropy',),
    learns=('entropy',) if bonus else (),
    arrays=('advantages',),
    temperature=config.rollout.temperature,
  )


def critic(config):
  """Squared error of the value before each token."""
  del config

  def loss(outputs, batch):
    # values[:, t] speaks of the text up to and with token t.
    before = jnp.roll(outputs.values, 1, axis=1)
    error = (before - batch.arrays['returns']) ** 2
    total = jnp.sum(batch.loss_weights * error)
    return total, {'error': total}

  return Objective(loss, coupled=True, arrays=('returns',))


def credit(experience, config):
  """Both targets: what came, and what came beyond expectation."""
  del config
  graded = np.isfinite(experience.rewards)
  mask = experience.mask * graded[:, None]
  returns = np.nan_to_num(experience.rewards)[:, None] * mask
  advantages = (returns - experience.arrays['values']) * mask
  return Credit(
    {'advantages': advantages, 'returns': returns}, mask, metrics={'advantages/std': float(advantages.std())}
  )


def check_first_step(metrics, config):
  """A critic that has learnt nothing yet expects nothing."""
  del config
  if not np.isfinite(metrics['loss']):
    raise AssertionError('the first loss is not finite')


ALGORITHM = Algorithm(
  actor,
  critic=critic,
  on_policy=True,
  credit=credit,
  scores=lambda config: ('values',),
  check_first_step=check_first_step,
)


def get_config():
  config = ml_collections.ConfigDict(defaults())
  config.stages = ('warm', 'online')
  task = 'generated:arithmetic:max=19,ops=+'
  config.model.preset = 'tiny'
  config.reward = 'exact_match'
  config.rollout.max_prompt_length = 32
  config.rollout.max_new_tokens = 4
  config.eval.data.path = f'{task},split=test,size=64'
  config.eval.update(samples=4, size=64)
  config.warm = dict(
    algorithm='sft',
    data=dict(path=f'{task},correct=0.6'),
    train=dict(steps=300, batch_size=16, row_length=256),
    optim=dict(lr=3e-3, schedule='cosine', warmup_steps=20),
  )
  config.online = dict(
    algorithm=__file__,
    data=dict(path=f'{task},correct=1'),
    train=dict(steps=60),
    optim=dict(lr=3e-4, warmup_steps=5),
    rollout=dict(prompts=32, group_size=8),
    critic=dict(lr=1e-3),
  )
  return config
