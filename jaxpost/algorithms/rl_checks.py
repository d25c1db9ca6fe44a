"""Checks of the estimators and features of `config.rl` that are off by default.

`rl_fields.py` calls `check_estimator` or `check_features` if one of them is on, and makes all other checks itself.
"""

from jaxpost.algorithms.base import Config
from jaxpost.errors import refuse
from jaxpost.losses import advantages, importance


def check_estimator(config: Config) -> None:
  """Raises InputError if an estimator `config.rl.advantage` other than GRPO's cannot work with the other fields."""
  rl, size = config.rl, config.rollout.group_size
  refuse(
    rl.advantage == 'pass_at_k' and rl.pass_k >= size,
    f'config.rl.pass_k: no two subsets of {rl.pass_k} can be compared in a group of {size}; '
    'lower it, or raise config.rollout.group_size',
  )
  estimator = advantages.ESTIMATORS[rl.advantage]
  kl_in_reward = rl.kl_in == 'reward' and rl.kl_coef > 0
  refuse(
    estimator.binary and kl_in_reward,
    f'config.rl.advantage: {rl.advantage!r} is defined for rewards of 0 and 1, which a KL in the reward changes; '
    'use rl.kl_in=loss',
  )
  refuse(
    'components' in estimator.takes and (kl_in_reward or bool(config.train_on_rollouts and not config.reward)),
    f'config.rl.advantage: {rl.advantage!r} needs each reward by itself: without a KL in the reward '
    '(use rl.kl_in=loss), and graded anew under train_on_rollouts (set config.reward)',
  )
  refuse(
    'sampled' in estimator.takes and not _from_environment_or_file(config),
    f'config.rl.advantage: {rl.advantage!r} compares the turns of an environment; set config.environment',
  )


def check_features(config: Config) -> None:
  """Raises InputError for an optional feature that does not go with the other fields."""
  rl, rollout = config.rl, config.rollout
  refuse(
    rl.kl_in != 'reward' and rl.kl_target > 0,
    'config.rl.kl_target: only a KL in the reward adapts; set config.rl.kl_in=reward',
  )
  refuse(rl.kl_target > 0 and not rl.kl_coef, 'config.rl.kl_target: needs a kl_coef to start from')
  refuse(
    rl.sampling_mask and (not rollout.top_k or bool(rollout.top_logprobs or _from_environment_or_file(config))),
    'config.rl.sampling_mask: keeps rollout.top_k ids a token, so set that; and leave out rollout.top_logprobs, '
    'environment and train_on_rollouts',
  )
  _check_replaced_samples(config)
  refuse(
    bool(rollout.weights or rollout.cache) and rl.old_policy != 'sampler' and set(rl.importance) <= {'opsm'},
    f'config.rl.importance: {rl.importance} corrects nothing, and a sampler in 8 bits (rollout.weights, rollout.cache) '
    "draws from another distribution; leave it ('auto',), or set rl.old_policy=sampler",
  )
  is_stale = rl.old_policy == 'sampler' and (rollout.staleness or rl.keep_surplus or rl.replay)
  refuse(
    rl.kl_cov > 0 and rl.epochs * rl.minibatches == 1 and not is_stale,
    'config.rl.kl_cov: is a KL to the old policy, which is 0 in the only update of a rollout; '
    'use rl.clip_cov, more config.rl.minibatches, or rl.old_policy=sampler with config.rollout.staleness',
  )
  refuse(
    rl.clip_cov > 0 and rl.cov_low >= rl.cov_high,
    f'config.rl.cov_low: {rl.cov_low} is not below cov_high={rl.cov_high}, so no token is clipped; raise cov_high',
  )
  check_dynamic_sampling(config)


def _check_replaced_samples(config: Config) -> None:
  """Refuses `expert` and `replay`, which replace the last sample of a group, where groups cannot have such a sample."""
  rl = config.rl
  estimated = rl.kl_coef or rl.clip_cov or rl.kl_cov or rl.entropy_target
  refuse(
    rl.expert and bool(estimated or _from_environment_or_file(config) or config.router.routing_replay),
    'config.rl.expert: estimates from samples do not hold for completions of the data; leave out kl_coef, '
    'clip_cov, kl_cov, entropy_target, environment, train_on_rollouts and routing_replay',
  )
  refuse(
    rl.expert and config.rollout.group_size < 2,
    'config.rl.expert: a group is one completion of the data and at least one sample; raise config.rollout.group_size',
  )
  groups_change = rl.dynamic_sampling or rl.expert or _from_environment_or_file(config) or not config.reward
  refuse(
    bool(rl.replay and groups_change),
    'config.rl.replay: needs a reward function, and groups that stay as they were drawn; leave out dynamic_sampling, '
    'expert, environment and train_on_rollouts',
  )
  weighs = any(method.weighs for name, method in importance.METHODS.items() if name in rl.importance)
  refuse(
    rl.replay > 0 and rl.old_policy != 'sampler' and not weighs,
    'config.rl.replay: its samples are those of an older policy, and no weight corrects for that; '
    "set rl.old_policy=sampler, or leave rl.importance ('auto',)",
  )


def check_dynamic_sampling(config: Config) -> None:
  """Refuses to sample again for groups that cannot have two different rewards."""
  refuse(
    config.rl.dynamic_sampling > 0 and config.rollout.group_size < 2,
    'config.rl.dynamic_sampling: one sample never differs; set it to 0 or config.rollout.group_size to at least 2',
  )


def _from_environment_or_file(config: Config) -> bool:
  """Returns whether completions come from an environment or a file, and not from the sampler alone."""
  return bool(config.environment or config.train_on_rollouts)
