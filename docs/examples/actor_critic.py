"""Advantage actor-critic after a warm start: two roles, two stages.

The advantage of the actor is the reward minus the critic's value of the prompt
and the tokens so far. The critic is a separate model that regresses the reward
(A2C; Mnih et al. 2016, arXiv:1602.01783).

python -m launch.train --config=docs/examples/actor_critic.py \
  --workdir=runs/actor_critic
"""

import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxpost import Algorithm, Credit, Objective, defaults


def actor(config):
  """Policy gradient -A log p with an entropy bonus."""
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
  """Squared error of the value of the state before each token."""
  del config

  def loss(outputs, batch):
    # values[:, t] is the value after token t, so roll by one to get the value before it.
    before = jnp.roll(outputs.values, 1, axis=1)
    error = (before - batch.arrays['returns']) ** 2
    total = jnp.sum(batch.loss_weights * error)
    return total, {'error': total}

  return Objective(loss, coupled=True, arrays=('returns',))


def credit(experience, config):
  """Returns both targets: the returns for the critic, the advantages for the actor."""
  del config
  graded = np.isfinite(experience.rewards)
  mask = experience.mask * graded[:, None]
  returns = np.nan_to_num(experience.rewards)[:, None] * mask
  advantages = (returns - experience.arrays['values']) * mask
  return Credit({'advantages': advantages, 'returns': returns}, mask)


def check_first_step(metrics, config):
  """Checks that the first loss is finite."""
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
  """An SFT warm start on partly wrong sums, then actor-critic on exact match."""
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
