"""Policy gradients from graded groups of completions: GRPO and its family.

Legend: N sequences, C completion tokens, B rows, T tokens.

There is one surrogate and one credit assignment, both selected by `config.rl`; the
methods at the end of the file differ in the fields that they set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpost.algorithms.base import Algorithm, Config, expect, refuse, refuse_unread
from jaxpost.losses import advantages, importance, policy_gradient, reduce
from jaxpost.types import Credit, Experience, Objective

RlSection = Any  # `config.rl`

# Fields of `config.rl` that only some surrogates, corrections or estimators read.
_OPTIONS = (
  *policy_gradient.SurrogateOptions.__dataclass_fields__,
  *importance.CorrectionOptions.__dataclass_fields__,
  *('std_eps', 'singleton', 'pass_k', 'gamma'),
)


def objective(config: Config) -> Objective:
  """Returns the surrogate of `config.rl.loss` with its KL and entropy terms."""
  rl = config.rl
  masked = 'opsm' in rl.importance
  chosen = policy_gradient.LOSSES[rl.loss]
  coupled = masked or chosen.per_sequence
  options = _options(policy_gradient.SurrogateOptions, rl)
  kl = rl.kl_coef > 0 and rl.kl_in == 'loss'

  def surrogate(outputs, arrays, sequence_mean=None):
    logp = outputs.logprobs
    # The recomputed old policy is the present one if a rollout has one update.
    recomputed = arrays.get('old_logprobs', jax.lax.stop_gradient(logp))
    old = arrays['sampler_logprobs'] if rl.old_policy == 'sampler' else recomputed
    loss, metrics = chosen.fn(logp, old, arrays['advantages'], options, sequence_mean)
    if masked:
      kept = policy_gradient.off_policy_kept(
        logp, arrays['sampler_logprobs'], arrays['advantages'], rl.opsm_threshold, sequence_mean
      )
      loss *= kept
      metrics['off_policy_kept'] = kept
    if 'importance_weights' in arrays:
      loss *= arrays['importance_weights']
      metrics['importance_weight'] = arrays['importance_weights']
    metrics |= {
      'entropy': outputs.entropy,
      'sampler_mismatch': policy_gradient.mismatch(logp, arrays['sampler_logprobs']),
    }
    if kl:
      metrics['kl'] = policy_gradient.KL[rl.kl_estimator](logp, arrays['ref_logprobs'])
      # Weighted, it is the KL of the present policy although an older one sampled (arXiv:2512.02556).
      weight = policy_gradient.importance_ratio(logp, old) if rl.kl_weighted else 1.0
      loss += rl.kl_coef * weight * metrics['kl']
    return loss - rl.entropy_coef * outputs.entropy, metrics

  def over_sequences(outputs, batch):
    weights = batch.loss_weights

    def mean(x):
      return reduce.sequence_mean(x, weights != 0, batch.sequence_ids)

    def total(x):
      return (weights * x).sum()

    loss, metrics = surrogate(outputs, batch.arrays, mean)
    return total(loss), jax.tree.map(total, metrics)

  arrays = ['advantages', 'sampler_logprobs', *_scores_in_loss(config)]
  if _corrections(rl):
    arrays.append('importance_weights')
  return Objective(
    over_sequences if coupled else surrogate,
    coupled=coupled,
    token_means=True,
    reads=('entropy',),
    learns=('entropy',) if rl.entropy_coef else (),
    arrays=tuple(arrays),
    temperature=config.rollout.temperature,
  )


def _corrections(rl: RlSection) -> tuple[str, ...]:
  """The corrections of `rl.importance` that are computed before the update: all but opsm."""
  return tuple(name for name in rl.importance if name != 'opsm')


def _options(kind: type, rl: RlSection) -> Any:
  """Returns options of this kind, whose fields are fields of `config.rl`."""
  return kind(**{name: vars(rl)[name] for name in kind.__dataclass_fields__})


def _scores_in_loss(config: Config) -> tuple[str, ...]:
  """Names of the log-probs that the surrogate compares with."""
  rl = config.rl
  names = []
  if (rl.epochs * rl.minibatches > 1 and rl.old_policy == 'recomputed') or _corrections(rl):
    names.append('old_logprobs')
  if rl.kl_coef > 0 and rl.kl_in == 'loss':
    names.append('ref_logprobs')
  return tuple(names)


def scores(config: Config) -> tuple[str, ...]:
  """Returns the names of the log-probs that are computed before the update."""
  names = list(_scores_in_loss(config))
  if config.rl.kl_coef > 0 and config.rl.kl_in != 'loss':
    names += ['old_logprobs', 'ref_logprobs']
  return tuple(dict.fromkeys(names))


def needs(config: Config) -> tuple[str, ...]:
  """Returns the frozen roles: the reference model where a KL is computed."""
  return ('reference',) if 'ref_logprobs' in scores(config) else ()


def greedy_baseline(config: Config) -> bool:
  """Returns whether a greedy completion of each prompt is graded, too (ReMax)."""
  return config.rl.advantage == 'remax'


def credit(experience: Experience, config: Config) -> Credit:
  """Returns an advantage for each trained token."""
  valid = np.isfinite(experience.rewards)
  if experience.baseline is not None:
    valid &= np.isfinite(np.repeat(experience.baseline, len(valid) // experience.groups))
  mask, metrics = trained_tokens(experience, valid, config)
  kl, memory, kl_metrics = kl_penalty(experience, mask, config)
  values = _advantages(experience, valid, mask, kl, config)
  return finish(experience, values, mask, metrics | kl_metrics, memory, config=config)


def trained_tokens(experience: Experience, valid: np.ndarray, config: Config) -> tuple[np.ndarray, dict]:
  """Returns (mask [N, C] of the tokens to train, metrics); `valid` is [N]."""
  if not config.rl.mask_truncated:
    return experience.mask * valid[:, None], {}
  finished = experience.rollout.finished
  return experience.mask * (valid & finished)[:, None], {'masked_truncated': int((valid & ~finished).sum())}


def kl_penalty(experience: Experience, mask: np.ndarray, config: Config) -> tuple[np.ndarray | float, dict, dict]:
  """Returns (KL penalty [N, C] to subtract from rewards or advantages, memory, metrics)."""
  rl = config.rl
  arrays = experience.arrays
  if not rl.kl_coef or rl.kl_in == 'loss':
    return 0.0, {}, {}
  coef = experience.memory.get('kl_coef', rl.kl_coef)
  estimate = np.asarray(policy_gradient.KL[rl.kl_estimator](arrays['old_logprobs'], arrays['ref_logprobs'])) * mask
  mean = float(estimate.sum() / max(mask.sum(), 1))
  after = coef
  if rl.kl_target:
    after = advantages.adaptive_kl(coef, mean, rl.kl_target, rl.kl_horizon, len(mask))
  return coef * estimate, {'kl_coef': float(after)}, {'kl': mean, 'kl_coef': coef}


def _advantages(experience, valid, mask, kl, config) -> np.ndarray:
  """Advantages [N, C] by `config.rl.advantage`."""
  rl = config.rl
  estimator = advantages.ESTIMATORS[rl.advantage]
  shape = (experience.groups, -1)
  kl, of_token = (0.0, kl) if rl.kl_in == 'advantage' else (kl, 0.0)
  arrays = {
    # An estimator of groups has one reward per sequence, so the KL is summed over it.
    'rewards': (experience.rewards - np.sum(kl * np.ones_like(mask), axis=1)).reshape(shape),
    'valid': valid.reshape(shape),
    'lengths': (mask > 0).sum(axis=1).reshape(shape),
    'mask': mask,
    'token_rewards': advantages.token_rewards(experience.rewards, mask, kl),
    'components': {name: (w, values.reshape(shape)) for name, (w, values) in experience.components.items()},
  }
  if experience.baseline is not None:
    arrays['greedy'] = np.repeat(np.nan_to_num(experience.baseline), len(valid) // experience.groups)
  options = {argument: vars(rl)[field] for argument, field in estimator.reads.items()}
  values = estimator.fn(*(arrays[name] for name in estimator.takes), **options)
  return (values if values.shape == mask.shape else values.reshape(-1, 1)) * np.ones_like(mask) - of_token


def finish(
  experience: Experience, values: np.ndarray, mask: np.ndarray, metrics: dict, memory: dict, config: Config
) -> Credit:
  """Returns the Credit of advantages `values` [N, C], with the arrays that the surrogate reads."""
  rl = config.rl
  arrays = experience.arrays
  out = {'advantages': np.asarray(values, np.float32) * (mask > 0), 'sampler_logprobs': arrays['sampler_logprobs']}
  out |= {k: arrays[k] for k in _scores_in_loss(config)}
  counted = mask > 0
  if counted.any():
    metrics |= {
      'advantages/mean': float(out['advantages'][counted].mean()),
      'advantages/max': float(out['advantages'][counted].max()),
      'advantages/min': float(out['advantages'][counted].min()),
    }
  names = _corrections(rl)
  if names:
    old = arrays['old_logprobs']
    # Before truncation: the mass that top-p and the like leave out is no difference of weights.
    sampler = arrays['sampler_logprobs']
    out['importance_weights'] = importance.correction(
      names, old - sampler, counted, _options(importance.CorrectionOptions, rl)
    )
    metrics |= importance.off_policy_metrics(old, sampler, counted)
  return Credit(out, mask, metrics, memory)


def check_first_step(metrics: dict, config: Config) -> None:
  """Raises AssertionError if the metrics of the first step cannot be right.

  Before any update the policy equals the reference and the old policy: the ratio is
  1, nothing is clipped, the KL is 0, and sampler and trainer agree on log-probs.
  """
  if not metrics.get('ratio'):
    return  # every sample was masked
  exact = config.model.dtype == 'float32'
  rl = config.rl
  # If a rollout has several updates, another program computes the old log-probs and may
  # round bfloat16 differently; if it has one, they come from the update itself.
  same = exact or not (rl.old_policy == 'sampler' or 'old_logprobs' in _scores_in_loss(config))
  rare = 0.0 if same else 1e-2  # fraction of tokens
  expect(
    metrics,
    {
      'ratio': (1.0, 1e-4 if same else 1e-2),
      'clip_ratio/low_mean': (0.0, rare if rl.clip_low > 0.02 else 1.0),
      'clip_ratio/high_mean': (0.0, rare if rl.clip_high > 0.02 else 1.0),
      'kl': (0.0, 1e-8 if exact else 1e-3),
      'sampler_mismatch': (1.0, 1e-4 if exact else 0.02),
    },
    'sampler, reference and trainer do not compute the same model',
  )


def check(config: Config) -> None:
  """Raises InputError for combinations of fields that cannot work."""
  rl = config.rl
  size = config.rollout.group_size
  refuse(
    rl.advantage in ('gae', 'best_of_n'),
    f'config.rl.advantage: {rl.advantage!r} belongs to the algorithm {"ppo" if rl.advantage == "gae" else "rft"}',
  )
  estimator = advantages.ESTIMATORS[rl.advantage]
  refuse(
    size < 2 and estimator.compares,
    'config.rollout.group_size: 1 sample has nothing to be compared '
    f'with, and rl.advantage={rl.advantage!r} compares; use at least 2',
  )
  refuse(
    rl.scale_rewards not in estimator.scales,
    f'config.rl.scale_rewards: {rl.scale_rewards!r} does not go with rl.advantage={rl.advantage!r}, '
    f'which takes {" or ".join(estimator.scales)}',
  )
  refuse(
    rl.advantage == 'pass_at_k' and rl.pass_k >= size,
    f'config.rl.pass_k: no two subsets of {rl.pass_k} can be compared in a group of {size}; '
    'lower it, or raise config.rollout.group_size',
  )
  refuse(
    'components' in estimator.takes
    and (rl.kl_in == 'reward' and rl.kl_coef > 0 or bool(config.train_on_rollouts and not config.reward)),
    f'config.rl.advantage: {rl.advantage!r} needs each reward by itself: without a KL in the reward '
    '(use rl.kl_in=loss), and graded anew under train_on_rollouts (set config.reward)',
  )
  check_terms(config)


def check_terms(config: Config) -> None:
  """Raises InputError for combinations that no surrogate of this file allows, also in PPO."""
  rl = config.rl
  refuse(
    bool(config.train_on_rollouts) and (rl.dynamic_sampling > 0 or greedy_baseline(config)),
    'config.train_on_rollouts: what was sampled again, or greedily, is not kept; '
    'leave out rl.dynamic_sampling and remax',
  )
  refuse(
    rl.kl_in != 'reward' and rl.kl_target > 0,
    'config.rl.kl_target: only a KL in the reward adapts; set config.rl.kl_in=reward',
  )
  refuse(rl.kl_target > 0 and not rl.kl_coef, 'config.rl.kl_target: needs a kl_coef to start from')
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
    rl.old_policy == 'sampler' and bool(_corrections(rl)),
    'config.rl.importance: with old_policy=sampler the surrogate itself holds the ratio to the sampler; '
    'leave importance empty (opsm may stay)',
  )
  refuse(min(rl.clip_low, rl.clip_high) < 0, 'config.rl.clip_low, clip_high: must not be below 0')
  refuse(0 < rl.dual_clip <= 1, f'config.rl.dual_clip: {rl.dual_clip} must be above 1, or 0 for off')
  importance.check(rl.importance, _options(importance.CorrectionOptions, rl))
  refuse(
    rl.dynamic_sampling > 0 and config.rollout.group_size < 2,
    'config.rl.dynamic_sampling: one sample never differs; set it to 0 or config.rollout.group_size to at least 2',
  )
  choices = f'advantage={rl.advantage!r}, loss={rl.loss!r}, importance={rl.importance!r}'
  refuse_unread(rl, rl_fields_read(rl), choices)


def rl_fields_read(rl: RlSection) -> set[str]:
  """Returns the fields of `config.rl` that count with these choices."""
  estimator = advantages.ESTIMATORS.get(rl.advantage)  # None for those of other algorithms
  read = {*policy_gradient.LOSSES[rl.loss].reads, *(estimator.reads.values() if estimator else ())}
  read.update(*(importance.METHODS[name].reads for name in _corrections(rl)))
  conditions = {name: name in read for name in _OPTIONS} | {
    'std_eps': 'std_eps' in read and (rl.scale_rewards != 'none' or 'scale_rewards' not in read),
    'gamma': 'gamma' in read or rl.advantage == 'gae',
    'lam': rl.advantage == 'gae',
    'old_policy': bool(policy_gradient.LOSSES[rl.loss].reads) or rl.kl_weighted,
    'reference': False,
    'kl_weighted': rl.kl_coef > 0 and rl.kl_in == 'loss',
    'kl_target': rl.kl_coef > 0 and rl.kl_in == 'reward',
    'kl_horizon': rl.kl_target > 0,
    'keep_reward': False,
    'opsm_threshold': 'opsm' in rl.importance,
  }
  return {name for name in vars(rl) if conditions.get(name, True)}


def rl_defaults(choices: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the defaults of `config.rl` of a method with these choices.

  Where a config names another surrogate or estimator than the method's, what belongs
  to it precedes these choices: with rl.loss=gspo, DAPO has GSPO's clip range and mean.
  """

  def default_of(field: str) -> Callable[[Config], Any]:
    def value(config: Config) -> Any:
      rl = config.rl
      loss = policy_gradient.LOSSES[rl.loss or choices.get('loss', 'clip')]
      estimator = advantages.ESTIMATORS.get(rl.advantage or choices.get('advantage', 'group'))
      auto = rl.__dataclass_fields__[field].metadata['auto']
      if field == 'scale_rewards' and estimator and choices.get(field) not in estimator.scales:
        return estimator.scales[0]
      chosen = field in choices and rl.loss in ('', choices.get('loss', 'clip'))
      if field in loss.sets and not chosen:
        return loss.sets[field]
      return auto if field.startswith('clip_') and field not in loss.reads else choices.get(field, auto)

    return value

  def importance(config: Config) -> tuple[str, ...]:
    """A correction if samples come from older weights than the old policy's."""
    recomputed = (config.rl.old_policy or default_of('old_policy')(config)) == 'recomputed'
    return ('token_truncated',) if config.rollout.staleness and recomputed else ()

  def kl_estimator(config: Config) -> str:
    """Outside of the loss only k1 has the gradient of the KL, in it k1 has none (arXiv:2512.21852)."""
    return 'k3' if (config.rl.kl_in or choices.get('kl_in', 'loss')) == 'loss' else 'k1'

  fields = ('aggregate', 'clip_low', 'clip_high', 'old_policy', 'scale_rewards')
  return dict(importance=importance, kl_estimator=kl_estimator) | choices | {name: default_of(name) for name in fields}


def method(**choices: Any) -> Algorithm:
  """Returns an algorithm of this family with other defaults in `config.rl`."""
  return Algorithm(
    objective,
    {'rl': rl_defaults(choices)},
    needs=needs,
    check=check,
    check_first_step=check_first_step,
    on_policy=True,
    scores=scores,
    greedy_baseline=greedy_baseline,
    credit=credit,
  )


GRPO = ALGORITHM = method()  # arXiv:2402.03300
DR_GRPO = method(scale_rewards='none', aggregate='constant')  # 2503.20783
DAPO = method(clip_high=0.28, dynamic_sampling=10)  # 2503.14476
GSPO = method(loss='gspo')  # 2507.18071
CISPO = method(loss='cispo')  # 2506.13585
SAPO = method(loss='sapo')  # 2511.20347
GMPO = method(loss='geo_mean')  # 2507.20673
DPPO = method(loss='dppo_tv')  # 2602.04879
GPG = method(advantage='gpg', loss='reinforce')  # 2504.02546
OPO = method(advantage='opo', loss='reinforce')  # 2505.23585
MAXRL = method(advantage='maxrl')  # 2602.02710
PASS_AT_K = method(advantage='pass_at_k')  # 2508.10751
RLOO = method(advantage='leave_one_out', kl_in='reward')  # 2402.14740
REINFORCE_PP = method(advantage='reinforce_pp', kl_in='reward')  # 2501.03262
REINFORCE_PP_BASELINE = method(advantage='reinforce_pp_baseline')  # 2501.03262
REMAX = method(advantage='remax', loss='reinforce', kl_in='reward')  # 2310.10505
