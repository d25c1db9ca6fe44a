"""Policy gradients from graded groups of completions: GRPO and its family.

Legend: N sequences, C completion tokens, B rows, T tokens.

One surrogate, one credit assignment, both chosen by `config.rl`; the methods
at the end differ in what they choose.
"""

import jax
import numpy as np

from jaxpost.algorithms.base import Algorithm, expect, refuse, refuse_unread
from jaxpost.losses import advantages, importance, policy_gradient, reduce
from jaxpost.types import Credit, Experience, Objective

_COMPARING = 'group', 'leave_one_out', 'reinforce_pp_baseline'
# Fields of `config.rl` that only some choices read; the rest always count.
_READ_WITH = {
  'std_eps': lambda rl: rl.advantage == 'group' and (rl.scale_rewards != 'none'),
  'singleton': lambda rl: rl.advantage in _COMPARING,
  'dual_clip': lambda rl: rl.loss == 'clip',
  'tau_pos': lambda rl: rl.loss == 'sapo',
  'tau_neg': lambda rl: rl.loss == 'sapo',
  'kl_target': lambda rl: rl.kl_coef > 0 and rl.kl_in == 'reward',
  'kl_horizon': lambda rl: rl.kl_target > 0,
  'gamma': lambda rl: rl.advantage in ('reinforce_pp', 'remax', 'gae'),
  'lam': lambda rl: rl.advantage == 'gae',
  'keep_reward': lambda rl: False,
  'importance_cap': lambda rl: bool({'token_truncated', 'sequence_truncated'} & set(rl.importance)),
  'token_low': lambda rl: bool({'icepop', 'token_mask'} & set(rl.importance)),
  'sequence_low': lambda rl: 'sequence_mask' in rl.importance,
  'opsm_threshold': lambda rl: 'opsm' in rl.importance,
}
_READ_WITH |= {'token_high': _READ_WITH['token_low'], 'sequence_high': _READ_WITH['sequence_low']}


def objective(config) -> Objective:
  """The surrogate of `config.rl.loss`, KL and entropy terms."""
  rl = config.rl
  masked = 'opsm' in rl.importance
  coupled = masked or rl.loss in policy_gradient.SEQUENCE_LOSSES
  options = policy_gradient.SurrogateOptions(rl.clip_low, rl.clip_high, rl.dual_clip, rl.tau_pos, rl.tau_neg)
  kl = rl.kl_coef > 0 and rl.kl_in == 'loss'

  def surrogate(outputs, arrays, sequence_mean=None):
    logp = outputs.logprobs
    # One update per rollout: the old policy is this one.
    old = arrays.get('old_logprobs', jax.lax.stop_gradient(logp))
    loss, metrics = policy_gradient.LOSSES[rl.loss](logp, old, arrays['advantages'], options, sequence_mean)
    if masked:
      kept = policy_gradient.off_policy_kept(
        logp, arrays['behaviour_logprobs'], arrays['advantages'], rl.opsm_threshold, sequence_mean
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
      loss += rl.kl_coef * metrics['kl']
    return loss - rl.entropy_coef * outputs.entropy, metrics

  def over_sequences(outputs, batch):
    weights, ids = batch.loss_weights, batch.sequence_ids
    mean = lambda x: reduce.sequence_mean(x, weights != 0, ids)
    loss, metrics = surrogate(outputs, batch.arrays, mean)
    total = lambda x: (weights * x).sum()
    return total(loss), jax.tree.map(total, metrics)

  return Objective(
    over_sequences if coupled else surrogate,
    coupled=coupled,
    token_means=True,
    reads=('entropy',),
    learns=('entropy',) if rl.entropy_coef else (),
    arrays=(
      'advantages',
      'sampler_logprobs',
      *_scores_in_loss(config),
      *('behaviour_logprobs',) * masked,
      *('importance_weights',) * bool(_corrections(rl)),
    ),
    temperature=config.rollout.temperature,
  )


def _corrections(rl) -> tuple:
  """Those of `rl.importance` that are known before the update."""
  return tuple(name for name in rl.importance if name != 'opsm')


def _scores_in_loss(config) -> tuple:
  """Log-probs of other models that the surrogate compares with."""
  rl = config.rl
  old = rl.epochs * rl.minibatches > 1 or bool(_corrections(rl))
  kl = rl.kl_coef > 0 and rl.kl_in == 'loss'
  return ('old_logprobs',) * old + ('ref_logprobs',) * kl


def scores(config) -> tuple:
  """What programs have to say of a rollout before the update."""
  in_reward = config.rl.kl_coef > 0 and config.rl.kl_in == 'reward'
  both = ('old_logprobs', 'ref_logprobs') if in_reward else ()
  return tuple(dict.fromkeys((*_scores_in_loss(config), *both)))


def needs(config) -> tuple:
  return ('reference',) if 'ref_logprobs' in scores(config) else ()


def greedy_baseline(config) -> bool:
  return config.rl.advantage == 'remax'


def credit(experience: Experience, config) -> Credit:
  """Rewards -> an advantage for each trained token."""
  valid = np.isfinite(experience.rewards)
  if experience.baseline is not None:
    valid &= np.isfinite(np.repeat(experience.baseline, len(valid) // experience.groups))
  mask, metrics = trained_tokens(experience, valid, config)
  kl, memory, kl_metrics = kl_in_reward(experience, mask, config)
  values = _advantages(experience, valid, mask, kl, config)
  return finish(experience, values, mask, metrics | kl_metrics, memory, config)


def trained_tokens(experience, valid, config):
  """(mask [N, C] of tokens to train, metrics)."""
  keep, metrics = valid, {}
  if config.rl.mask_truncated:
    cut = ~experience.rollout.finished
    metrics['masked_truncated'] = int((keep & cut).sum())
    keep = keep & ~cut
  return experience.mask * keep[:, None], metrics


def kl_in_reward(experience, mask, config):
  """(penalty [N, C] to take from the rewards, memory, metrics)."""
  rl, arrays = config.rl, experience.arrays
  if not rl.kl_coef or rl.kl_in != 'reward':
    return 0.0, {}, {}
  coef = experience.memory.get('kl_coef', rl.kl_coef)
  estimate = np.asarray(policy_gradient.KL[rl.kl_estimator](arrays['old_logprobs'], arrays['ref_logprobs'])) * mask
  mean = float(estimate.sum() / max(mask.sum(), 1))
  after = coef
  if rl.kl_target:
    after = advantages.adaptive_kl(coef, mean, rl.kl_target, rl.kl_horizon, len(mask))
  return coef * estimate, {'kl_coef': float(after)}, {'kl': mean, 'kl_coef': coef}


def token_rewards(experience, mask, kl) -> np.ndarray:
  """[N, C]: the reward on the last trained token, less the KL on each."""
  out, trained = np.zeros(mask.shape), mask > 0
  last = mask.shape[1] - 1 - trained[:, ::-1].argmax(axis=1)
  out[np.arange(len(mask)), last] = np.nan_to_num(experience.rewards)
  return (out - kl) * trained


def _advantages(experience, valid, mask, kl, config) -> np.ndarray:
  """[N, C] by `config.rl.advantage`."""
  rl, shape = config.rl, (experience.groups, -1)
  per_token = token_rewards(experience, mask, kl)
  if rl.advantage == 'reinforce_pp':
    return advantages.reinforce_plus_plus(per_token, mask, rl.gamma)
  if rl.advantage == 'remax':
    greedy = np.repeat(np.nan_to_num(experience.baseline), len(valid) // experience.groups)
    return advantages.remax(per_token, mask, greedy, rl.gamma)
  grouped = valid.reshape(shape)
  # A penalty in the reward counts for the whole sequence here.
  rewards = (experience.rewards - np.sum(kl * np.ones_like(mask), axis=1)).reshape(shape)
  if rl.advantage == 'reinforce_pp_baseline':
    return advantages.reinforce_plus_plus_baseline(rewards, grouped, mask, singleton=rl.singleton)
  if rl.advantage == 'leave_one_out':
    values = advantages.leave_one_out(rewards, grouped, singleton=rl.singleton)
  else:
    values = advantages.group_relative(rewards, grouped, scale=rl.scale_rewards, eps=rl.std_eps, singleton=rl.singleton)
  return values.reshape(-1, 1) * np.ones_like(mask)


def finish(experience, values, mask, metrics, memory, config) -> Credit:
  """Credit with the correction for the sampler and the log-probs to compare."""
  rl, arrays = config.rl, dict(experience.arrays)
  out = {'advantages': np.asarray(values, np.float32) * (mask > 0), 'sampler_logprobs': arrays['sampler_logprobs']}
  out |= {k: arrays[k] for k in _scores_in_loss(config)}
  counted = mask > 0
  if counted.any():
    metrics |= {
      'advantages/mean': float(out['advantages'][counted].mean()),
      'advantages/max': float(out['advantages'][counted].max()),
      'advantages/min': float(out['advantages'][counted].min()),
    }
  if 'opsm' in rl.importance:
    out['behaviour_logprobs'] = arrays['behaviour_logprobs']
  if names := _corrections(rl):
    old, sampler = arrays['old_logprobs'], arrays['behaviour_logprobs']
    out['importance_weights'] = importance.correction(
      names,
      old - sampler,
      counted,
      importance.CorrectionOptions(rl.importance_cap, rl.token_low, rl.token_high, rl.sequence_low, rl.sequence_high),
    )
    metrics |= importance.off_policy_metrics(old, sampler, counted)
  return Credit(out, mask, metrics, memory)


def check(config):
  """InputError for combinations that cannot work."""
  rl, size = config.rl, config.rollout.group_size
  refuse(
    size < 2 and rl.advantage in _COMPARING,
    'config.rollout.group_size: 1 sample has nothing to be compared '
    f'with, and rl.advantage={rl.advantage!r} compares; use at least 2',
  )
  refuse(
    rl.advantage in ('gae', 'best_of_n'),
    f'config.rl.advantage: {rl.advantage!r} belongs to the algorithm {"ppo" if rl.advantage == "gae" else "rft"}',
  )
  check_terms(config)


def check_terms(config):
  """As `check`, of what does not depend on the advantages."""
  rl, size = config.rl, config.rollout.group_size
  refuse(
    bool(config.train_on_rollouts) and (rl.dynamic_sampling > 0 or greedy_baseline(config)),
    'config.train_on_rollouts: what was sampled again, or greedily, is not kept; '
    'leave out rl.dynamic_sampling and remax',
  )
  refuse(
    rl.kl_in == 'loss' and rl.kl_target > 0,
    'config.rl.kl_target: only a KL in the reward adapts; set config.rl.kl_in=reward',
  )
  refuse(rl.kl_target > 0 and not rl.kl_coef, 'config.rl.kl_target: needs a kl_coef to start from')
  refuse(
    rl.kl_in == 'reward' and rl.kl_estimator.endswith('+'),
    f'config.rl.kl_estimator: {rl.kl_estimator} has a gradient of its own, which a reward has not; use k1 or k3',
  )
  refuse(min(rl.clip_low, rl.clip_high) < 0, 'config.rl.clip_low, clip_high: must not be below 0')
  refuse(0 < rl.dual_clip <= 1, f'config.rl.dual_clip: {rl.dual_clip} must be above 1, or 0 for off')
  _check_importance(rl)
  refuse(
    rl.dynamic_sampling > 0 and size < 2,
    'config.rl.dynamic_sampling: one sample never differs; set it to 0 or config.rollout.group_size to at least 2',
  )
  refuse_unread(
    rl,
    [name for name in vars(rl) if name not in _READ_WITH or _READ_WITH[name](rl)],
    f'advantage={rl.advantage!r}, loss={rl.loss!r}, importance={rl.importance!r}',
  )


def _check_importance(rl):
  known = *importance.METHODS, 'opsm'
  unknown = set(rl.importance) - set(known)
  refuse(bool(unknown), f'config.rl.importance: {sorted(unknown)} not known; known: {", ".join(known)}')
  ratios = [name for name in rl.importance if name in importance.WEIGHTS]
  refuse(
    len(ratios) > 1,
    f'config.rl.importance: {" and ".join(ratios)} would each multiply by the ratio; keep one, and masks beside it',
  )
  for kind in 'token', 'sequence':
    low, high = vars(rl)[f'{kind}_low'], vars(rl)[f'{kind}_high']
    refuse(low > high, f'config.rl.{kind}_low: {low} is above {kind}_high={high}, so nothing is kept; swap them')


def check_first_step(metrics, config):
  """What must hold before anything was learnt; a violation is our bug.

  The policy is the reference and the old policy: ratio 1, nothing clipped,
  KL 0, and the sampler's log-probs are the trainer's.
  """
  if not metrics.get('ratio'):
    return  # every sample was masked
  exact = config.model.dtype == 'float32'
  rl = config.rl
  # With several updates the old log-probs come from another program, which
  # rounds bfloat16 elsewhere; with one they are the update's own.
  same = exact or 'old_logprobs' not in _scores_in_loss(config)
  rare = 0.0 if same else 1e-2  # share of tokens
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


def of_older(config) -> tuple:
  """The correction for samples of older weights, where none is chosen."""
  return ('token_truncated',) if config.rollout.staleness else ()


def method(**choices) -> Algorithm:
  """An algorithm of this family with other choices in `config.rl`."""
  return Algorithm(
    objective,
    {'rl': {'importance': of_older, **choices}},
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
GSPO = method(loss='gspo', clip_low=3e-4, clip_high=4e-4, aggregate='sequence')  # 2507.18071
CISPO = method(loss='cispo', clip_low=1.0, clip_high=4.0)  # 2506.13585
SAPO = method(loss='sapo', aggregate='sequence')  # 2511.20347
RLOO = method(advantage='leave_one_out', scale_rewards='none', kl_estimator='k1', kl_in='reward')  # 2402.14740
REINFORCE_PP = method(advantage='reinforce_pp', scale_rewards='none', kl_estimator='k1', kl_in='reward')  # 2501.03262
REINFORCE_PP_BASELINE = method(advantage='reinforce_pp_baseline', scale_rewards='none')  # 2501.03262
REMAX = method(
  advantage='remax', scale_rewards='none', loss='reinforce', kl_estimator='k1', kl_in='reward'
)  # 2310.10505
