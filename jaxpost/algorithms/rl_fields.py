"""The fields of `config.rl`: which go together, which are read, and the defaults of a method.

`rl_checks.py` refuses combinations of features that are off by default; `docs/combinations.md` lists refused pairs.
"""

import functools
from collections.abc import Mapping
from typing import Any

from jaxpost.algorithms.base import Config
from jaxpost.errors import refuse, refuse_unread
from jaxpost.losses import advantages, policy_gradient

RlSection = Any  # `config.rl`

# Fields of `config.rl` that only some surrogates, corrections or estimators read.
_OPTIONS = (
  *policy_gradient.SurrogateOptions.__dataclass_fields__,
  # The fields of `importance.CorrectionOptions`, which is imported only where a correction is on.
  *('importance_cap', 'token_low', 'token_high', 'sequence_low', 'sequence_high'),
  *('product_low', 'product_high', 'reject_above'),
  *('std_eps', 'singleton', 'pass_k', 'gamma', 'turn_gamma', 'step_weight'),
)


def corrections(rl: RlSection) -> tuple[str, ...]:
  """Returns the corrections of `rl.importance` that are computed before the update: all but opsm."""
  return tuple(name for name in rl.importance if name != 'opsm')


def options(kind: type, rl: RlSection) -> Any:
  """Returns an instance of the dataclass `kind` whose fields are set from the fields of `config.rl` of these names."""
  return kind(**{name: vars(rl)[name] for name in kind.__dataclass_fields__})


def has_token_terms(rl: RlSection) -> bool:
  """Returns whether a field switches on a term of `token_terms.py`."""
  return rl.top_entropy < 1 or bool(rl.clip_cov or rl.kl_cov or rl.entropy_target or rl.correct_nll_coef or rl.expert)


def scores_in_loss(config: Config) -> tuple[str, ...]:
  """Returns the names of the log-probs, besides the sampler's, that the surrogate compares the policy's with."""
  rl = config.rl
  names = []
  if (rl.epochs * rl.minibatches > 1 and rl.old_policy == 'recomputed') or corrections(rl):
    names.append('old_logprobs')
  if rl.kl_coef > 0 and rl.kl_in == 'loss':
    names.append('ref_logprobs')
  return tuple(names)


def check(config: Config) -> None:
  """Raises InputError for combinations of fields that cannot work."""
  rl = config.rl
  refuse(
    rl.advantage in ('gae', 'best_of_n'),
    f'config.rl.advantage: {rl.advantage!r} belongs to the algorithm {"ppo" if rl.advantage == "gae" else "rft"}',
  )
  estimator = advantages.ESTIMATORS[rl.advantage]
  refuse(
    config.rollout.group_size < 2 and estimator.compares,
    f'config.rollout.group_size: rl.advantage={rl.advantage!r} compares the samples of a group, and 1 has nothing to '
    'be compared with; use at least 2',
  )
  refuse(
    rl.scale_rewards not in estimator.scales,
    f'config.rl.scale_rewards: {rl.scale_rewards!r} does not go with rl.advantage={rl.advantage!r}, '
    f'which takes {" or ".join(estimator.scales)}',
  )
  if rl.advantage != 'group':
    from jaxpost.algorithms import rl_checks

    rl_checks.check_estimator(config)
  check_shared(config)


def check_shared(config: Config) -> None:
  """Raises InputError for combinations that cannot work with any estimator, those of PPO and OPD included."""
  rl = config.rl
  refuse(
    rl.kl_in != 'loss' and rl.kl_estimator != 'k1',
    f'config.rl.kl_estimator: the gradient of {rl.kl_estimator} in the {rl.kl_in} is not that of the KL; '
    'use k1, or config.rl.kl_in=loss',
  )
  refuse(
    rl.kl_in == 'loss' and rl.kl_estimator == 'k1' and rl.kl_coef > 0 and not rl.kl_weighted,
    'config.rl.kl_estimator: k1 in the loss has no gradient on average; use k3, config.rl.kl_weighted, '
    'or config.rl.kl_in=reward',
  )
  refuse(
    rl.old_policy == 'sampler' and bool(corrections(rl)),
    'config.rl.importance: with old_policy=sampler the surrogate itself holds the ratio to the sampler; '
    'leave importance empty (opsm may stay)',
  )
  features = (rl.clip_cov, rl.dynamic_sampling, rl.expert, rl.kl_cov, rl.kl_target, rl.replay, rl.sampling_mask)
  if any(features) or config.train_on_rollouts or config.rollout.weights or config.rollout.cache:
    from jaxpost.algorithms import rl_checks

    rl_checks.check_features(config)
  refuse(min(rl.clip_low, rl.clip_high) < 0, 'config.rl.clip_low, clip_high: must not be below 0')
  for name in ('length_alpha', 'correct_nll_coef', 'turn_gamma'):
    refuse(vars(rl)[name] < 0, f'config.rl.{name}: must not be below 0, except -1')
  refuse(0 < rl.dual_clip <= 1, f'config.rl.dual_clip: {rl.dual_clip} must be above 1, or 0 for off')
  if rl.importance:
    from jaxpost.losses import importance

    importance.check(rl.importance, options(importance.CorrectionOptions, rl))
  refuse_unread(rl, fields_read(rl), f'advantage={rl.advantage!r}, loss={rl.loss!r}, importance={rl.importance!r}')


def fields_read(rl: RlSection) -> set[str]:
  """Returns the names of the fields of `config.rl` that are read, given the values of the others."""
  estimator = advantages.ESTIMATORS.get(rl.advantage)  # None for 'gae' and 'best_of_n', of other algorithms
  read = {*policy_gradient.LOSSES[rl.loss].reads, *(estimator.reads.values() if estimator else ())}
  if corrections(rl):
    from jaxpost.losses import importance

    read.update(*(importance.METHODS[name].reads for name in corrections(rl)))
  conditions = {name: name in read for name in _OPTIONS} | {
    'std_eps': 'std_eps' in read and (rl.scale_rewards != 'none' or 'scale_rewards' not in read),
    'gamma': 'gamma' in read or rl.advantage == 'gae',
    **dict.fromkeys(('lam', 'length_alpha'), rl.advantage == 'gae'),
    'old_policy': policy_gradient.LOSSES[rl.loss].reads_old or rl.kl_weighted or rl.kl_cov > 0,
    **dict.fromkeys(('reference', 'privileged'), False),
    'kl_weighted': rl.kl_coef > 0 and rl.kl_in == 'loss',
    'kl_target': rl.kl_coef > 0 and rl.kl_in == 'reward',
    'kl_horizon': rl.kl_target > 0,
    'keep_reward': rl.correct_nll_coef > 0,
    **dict.fromkeys(('cov_low', 'cov_high'), rl.clip_cov > 0),
    'kl_cov_coef': rl.kl_cov > 0,
    'entropy_step': rl.entropy_target > 0,
    'opsm_threshold': 'opsm' in rl.importance,
    'expert': rl.advantage != 'gae',
    'expert_gamma': rl.expert,
    'keep_surplus': rl.dynamic_sampling > 0 and rl.advantage != 'remax',
    'replay': bool(estimator and estimator.compares),
  }
  return {name for name in vars(rl) if conditions.get(name, True)}


def defaults(choices: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the defaults of `config.rl` of a method that is defined by `choices`.

  If a config names another surrogate or estimator than the method's, the defaults of that one come first: with
  rl.loss=gspo, DAPO has GSPO's clip range and mean; with clip, LUSPO has PPO's.
  """
  method_loss = choices.get('loss', 'clip')
  method_advantage = choices.get('advantage', 'group')

  def auto(config: Config, field: str) -> Any:
    return config.rl.__dataclass_fields__[field].metadata['auto']

  def of_loss(config: Config, field: str) -> Any:
    loss = config.rl.loss or method_loss
    values = policy_gradient.LOSSES[loss].sets
    if loss == method_loss:
      values = {**values, **choices}
    elif not field.startswith('clip_'):  # a method's clip range is meant for its own surrogate
      values = {**choices, **values}
    return values.get(field, auto(config, field))

  def scale_rewards(config: Config) -> str:
    estimator = advantages.ESTIMATORS.get(config.rl.advantage or method_advantage)
    fits = estimator is None or choices.get('scale_rewards') in estimator.scales
    return choices.get('scale_rewards', auto(config, 'scale_rewards')) if fits else estimator.scales[0]

  def turn_gamma(config: Config) -> float:
    is_method_estimator = config.rl.advantage in ('', method_advantage)
    return choices['turn_gamma'] if is_method_estimator else auto(config, 'turn_gamma')

  def importance(config: Config) -> tuple[str, ...]:
    """A correction if the sampler's weights differ from the old policy's: they are older, or in 8 bits."""
    rl, rollout = config.rl, config.rollout
    recomputed = (rl.old_policy or of_loss(config, 'old_policy')) == 'recomputed'
    stale = rollout.staleness or rl.keep_surplus or rl.replay
    quantized = rollout.weights or rollout.cache
    return ('token_truncated',) if recomputed and (stale or quantized) else ()

  def kl_estimator(config: Config) -> str:
    """In a reward or advantage only k1 has the gradient of the KL; in the loss k1 has none (arXiv:2512.21852)."""
    return 'k3' if (config.rl.kl_in or choices.get('kl_in', 'loss')) == 'loss' else 'k1'

  by_loss = {f: functools.partial(of_loss, field=f) for f in ('aggregate', 'clip_low', 'clip_high', 'old_policy')}
  rules = {'importance': importance, 'kl_estimator': kl_estimator, **choices, **by_loss, 'scale_rewards': scale_rewards}
  return rules | ({'turn_gamma': turn_gamma} if 'turn_gamma' in choices else {})
