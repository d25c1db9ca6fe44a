"""Policy gradients from graded groups of completions: GRPO and its family.

Legend: N sequences, G samples per prompt, P = N / G prompts, C completion tokens, B rows, T tokens.

`config.rl` selects the surrogate and the credit; the methods at the end of the file differ in its fields.
"""

from typing import Any

import jax
import numpy as np

from jaxpost.algorithms import rl_fields
from jaxpost.algorithms.base import Algorithm, Config, expect, learning_rate
from jaxpost.losses import advantages, policy_gradient, reduce
from jaxpost.types import Credit, Experience, Objective


def objective(config: Config) -> Objective:
  """Returns the surrogate of `config.rl.loss` with its KL and entropy terms."""
  rl = config.rl
  coupled = 'opsm' in rl.importance or policy_gradient.LOSSES[rl.loss].per_sequence is not None

  def token_losses(outputs, arrays, reducer=None):
    logp = outputs.logprobs
    if rl.old_policy == 'sampler':
      old = arrays['sampler_logprobs']
    else:  # if a rollout has one update, the old policy is the current one, and its log-probs are not recomputed
      old = arrays.get('old_logprobs', jax.lax.stop_gradient(logp))
    loss, metrics = _surrogate(logp, old, arrays, rl, reducer)
    multipliers = _multipliers(logp, arrays, rl, reducer)
    for multiplier in multipliers.values():
      loss *= multiplier
    terms, kl = _added_terms(outputs, old, arrays, rl)
    return sum(terms, loss), metrics | multipliers | _diagnosis(outputs, arrays, metrics) | kl

  def batch_loss(outputs, batch):
    weights = batch.loss_weights

    def reducer(reduction):
      return lambda x: reduction(x, weights != 0, batch.sequence_ids)

    return jax.tree.map(lambda x: (weights * x).sum(), token_losses(outputs, batch.arrays, reducer))

  return Objective(
    batch_loss if coupled else token_losses,
    coupled=coupled,
    token_means=True,
    reads=('entropy',),
    learns=('entropy',) if rl.entropy_coef or rl.entropy_target else (),
    arrays=_arrays_in_loss(config),
    temperature=config.rollout.temperature,
  )


def _surrogate(logp, old, arrays, rl, reducer) -> policy_gradient.LossAndMetrics:
  """The surrogate of `rl.loss`; `reducer` turns a reduction over sequences into a function of [B, T], if coupled."""
  surrogate = policy_gradient.LOSSES[rl.loss]
  options = rl_fields.options(policy_gradient.SurrogateOptions, rl)
  advantage = arrays['advantages']
  per_sequence = (reducer(surrogate.per_sequence),) if surrogate.per_sequence else ()
  loss, metrics = surrogate.fn(logp, old, advantage, options, *per_sequence)
  if 'demonstration' in arrays:
    shaped = policy_gradient.expert(logp, advantage, rl.expert_gamma)
    loss = jax.numpy.where(arrays['demonstration'] > 0, shaped, loss)
  return loss, metrics


def _multipliers(logp, arrays, rl, reducer) -> dict[str, jax.Array]:
  """Returns {name of its metric: factor [B, T]} of the factors that multiply the surrogate alone."""
  multipliers = {}
  if 'opsm' in rl.importance:
    multipliers['off_policy_kept'] = policy_gradient.off_policy_kept(
      logp, arrays['sampler_logprobs'], arrays['advantages'], rl.opsm_threshold, reducer(reduce.sequence_mean)
    )
  if 'importance_weights' in arrays:
    multipliers['importance_weight'] = arrays['importance_weights']
  return multipliers


def _added_terms(outputs, old, arrays, rl) -> tuple[list[jax.Array], dict[str, jax.Array]]:
  """Returns ([terms to add to the surrogate], {'kl': the KL to the reference} where it is one of them)."""
  logp = outputs.logprobs
  terms, metrics = [], {}
  if rl.kl_coef > 0 and rl.kl_in == 'loss':
    metrics['kl'] = policy_gradient.KL[rl.kl_estimator](logp, arrays['ref_logprobs'])
    # Weighted by pi / pi_old, it estimates the KL of the current policy from samples of the old one (arXiv:2512.02556).
    weight = policy_gradient.importance_ratio(logp, old) if rl.kl_weighted else 1.0
    terms.append(rl.kl_coef * weight * metrics['kl'])
  if 'kl_cov' in arrays:
    terms.append(rl.kl_cov_coef * arrays['kl_cov'] * policy_gradient.KL['abs'](logp, old))
  if 'nll_weights' in arrays:
    terms.append(-arrays['nll_weights'] * logp)
  terms.append(-arrays.get('entropy_coef', rl.entropy_coef) * outputs.entropy)
  return terms, metrics


def _arrays_in_loss(config: Config) -> tuple[str, ...]:
  """Names of the arrays that the surrogate reads."""
  rl = config.rl
  names = ('advantages', 'sampler_logprobs', *rl_fields.scores_in_loss(config))
  if rl_fields.corrections(rl):
    names += ('importance_weights',)
  if rl_fields.has_token_terms(rl):
    from jaxpost.algorithms import token_terms

    names += token_terms.arrays(rl)
  return names


def _diagnosis(outputs, arrays, metrics) -> dict[str, jax.Array]:
  """Metrics of every surrogate: entropy, distance of policy and sampler, clip ratios by sign of the advantage."""
  logp, sampler = jax.lax.stop_gradient(outputs.logprobs), arrays['sampler_logprobs']
  diagnosis = {
    'entropy': outputs.entropy,
    'sampler_mismatch': jax.numpy.exp(policy_gradient.KL['abs'](sampler, logp)),  # 1 if they agree
    'sampler_kl/k1': policy_gradient.KL['k1'](sampler, logp),
    'sampler_kl/k3': policy_gradient.KL['k3'](sampler, logp),
  }
  if 'clip_ratio/low_mean' in metrics:
    clipped = metrics['clip_ratio/low_mean'] + metrics['clip_ratio/high_mean']
    positive = arrays['advantages'] > 0
    diagnosis |= {
      'clip_ratio/region_mean': clipped,
      'clip_ratio/positive_mean': clipped * positive,
      'clip_ratio/negative_mean': clipped * ~positive,
    }
  return diagnosis


def scores(config: Config) -> tuple[str, ...]:
  """Returns the names of the log-probs that are computed before the update."""
  names = list(rl_fields.scores_in_loss(config))
  if config.rl.kl_coef > 0 and config.rl.kl_in != 'loss':
    names += ['old_logprobs', 'ref_logprobs']
  if config.rl.expert:
    names.append('old_logprobs')
  if config.rl.top_entropy < 1:
    names.append('entropy')
  return tuple(dict.fromkeys(names))


def needs(config: Config) -> tuple[str, ...]:
  """Returns the frozen roles: the reference model where a KL is computed."""
  return ('reference',) if 'ref_logprobs' in scores(config) else ()


def credit(experience: Experience, config: Config) -> Credit:
  """Returns an advantage for each trained token."""
  valid = np.isfinite(experience.rewards)
  if experience.baseline is not None:
    valid &= np.isfinite(np.repeat(experience.baseline, experience.rollout.group_size))
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
  rl, arrays = config.rl, experience.arrays
  if not rl.kl_coef or rl.kl_in == 'loss':
    return 0.0, {}, {}
  coef = experience.memory.get('kl_coef', rl.kl_coef) if rl.kl_target else rl.kl_coef
  if not mask.any():
    return 0.0, {'kl_coef': coef}, {'kl_coef': coef}
  estimate = np.asarray(policy_gradient.KL[rl.kl_estimator](arrays['old_logprobs'], arrays['ref_logprobs'])) * mask
  mean = float(estimate.sum() / mask.sum())
  next_coef = advantages.adaptive_kl(coef, mean, rl.kl_target, rl.kl_horizon, len(mask)) if rl.kl_target else coef
  return coef * estimate, {'kl_coef': float(next_coef)}, {'kl': mean, 'kl_coef': coef}


def _advantages(experience, valid, mask, kl, config) -> np.ndarray:
  """Advantages [N, C] by the estimator `config.rl.advantage`."""
  rl = config.rl
  estimator = advantages.ESTIMATORS[rl.advantage]
  shape = (len(experience.rollout.prompts), -1)
  # Groups that only fill up a step (`rl.dynamic_sampling`) do not count, as in the mean of the loss.
  trained = experience.mask.reshape(shape).any(axis=1, keepdims=True)
  kl_in_reward, kl_in_advantage = (0.0, kl) if rl.kl_in == 'advantage' else (kl, 0.0)
  arrays = {
    # Estimators that compare groups read one reward per sequence, so the KL is summed over its tokens.
    'rewards': (experience.rewards - np.sum(kl_in_reward * np.ones_like(mask), axis=1)).reshape(shape),
    'valid': valid.reshape(shape) & trained,
    'lengths': (mask > 0).sum(axis=1).reshape(shape),
    'mask': mask,
    'token_rewards': advantages.token_rewards(experience.rewards, mask, kl_in_reward, experience.turn_rewards),
    'turn_rewards': experience.turn_rewards,
    'sampled': experience.mask,
    'completions': experience.rollout.completions,
    'components': {name: (w, values.reshape(shape)) for name, (w, values) in experience.components.items()},
  }
  if experience.baseline is not None:
    arrays['greedy'] = np.repeat(np.nan_to_num(experience.baseline), experience.rollout.group_size)
  options = {argument: vars(rl)[field] for argument, field in estimator.reads.items()}
  values = estimator.fn(*(arrays[name] for name in estimator.takes), **options)
  if values.shape != mask.shape:  # one advantage per sequence, which all its tokens get
    values = values.reshape(-1, 1)
  return values * np.ones_like(mask) - kl_in_advantage


def finish(
  experience: Experience, values: np.ndarray, mask: np.ndarray, metrics: dict, memory: dict, config: Config
) -> Credit:
  """Returns the Credit of advantages `values` [N, C], with the arrays that the surrogate reads."""
  rl, arrays = config.rl, experience.arrays
  out = {'advantages': np.asarray(values, np.float32) * (mask > 0), 'sampler_logprobs': arrays['sampler_logprobs']}
  out |= {k: arrays[k] for k in rl_fields.scores_in_loss(config)}
  counted = mask > 0
  if rl_fields.has_token_terms(rl):
    from jaxpost.algorithms import token_terms

    term_metrics, term_memory = token_terms.apply(experience, out, counted, config)
    metrics, memory = metrics | term_metrics, memory | term_memory
  if names := rl_fields.corrections(rl):
    from jaxpost.losses import importance

    # Use log-probs before truncation: the mass that top-p removes is not a difference between the two sets of weights.
    old, sampler = arrays['old_logprobs'], arrays['sampler_logprobs']
    out['importance_weights'] = importance.correction(
      names, old - sampler, counted, rl_fields.options(importance.CorrectionOptions, rl)
    )
    metrics |= importance.off_policy_metrics(old, sampler, counted)
    metrics |= importance.weight_metrics(out['importance_weights'], out['advantages'], counted)
  return Credit(out, mask, metrics, memory)


def check_first_step(metrics: dict, config: Config) -> None:
  """Raises AssertionError if the metrics of the first step cannot be right.

  Before any update the policy equals the reference and the old policy: the ratio is 1, nothing is clipped, the KL is 0,
  and sampler and trainer agree on log-probs.
  """
  if not metrics.get('ratio'):
    return  # every sample was masked
  rl, rollout = config.rl, config.rollout
  exact = config.model.dtype == 'float32'
  quantized = bool(rollout.weights or rollout.cache)
  other_program = rl.old_policy == 'sampler' or 'old_logprobs' in rl_fields.scores_in_loss(config)
  if quantized and rl.old_policy == 'sampler':
    ratio, clipped = 0.5, 1.0  # the ratio is to a policy whose weights or cache have 8 bits
  elif other_program and not exact:
    ratio, clipped = 1e-2, 1e-2  # the program that computed the old log-probs may round bfloat16 differently
  else:
    ratio, clipped = 1e-4, 0.0
  is_product = policy_gradient.LOSSES[rl.loss].per_sequence is reduce.sequence_total  # it accumulates rounding errors
  # Rounding to bfloat16 alone made 0.023 in 28 layers on an H200 (docs/performance.md).
  rounding, square = (1e-4, 1e-8) if exact else (0.05, 1e-3)
  expect(
    metrics,
    {
      'ratio': (1.0, np.inf if is_product else ratio),
      # Rounding alone may leave a clip range as narrow as GSPO's.
      'clip_ratio/low_mean': (0.0, clipped if rl.clip_low > 0.02 else 1.0),
      'clip_ratio/high_mean': (0.0, clipped if rl.clip_high > 0.02 else 1.0),
      'kl': (0.0, square if rl.kl_estimator in ('k2', 'k3', 'k3+') else rounding),
      'sampler_mismatch': (1.0, 0.5 if quantized else rounding),
    },
    'sampler, reference and trainer do not compute the same model',
  )


def method(**choices: Any) -> Algorithm:
  """Returns an algorithm of this family whose defaults in `config.rl` are `choices`."""
  return Algorithm(
    objective,
    {'rl': rl_fields.defaults(choices), 'optim': {'lr': learning_rate(1e-6)}},
    sections=('rl',),
    needs=needs,
    check=rl_fields.check,
    check_first_step=check_first_step,
    on_policy=True,
    scores=scores,
    greedy_baseline=lambda config: config.rl.advantage == 'remax',
    credit=credit,
  )


GRPO = ALGORITHM = method()  # arXiv:2402.03300
DR_GRPO = method(scale_rewards='none', aggregate='constant')  # 2503.20783
DAPO = method(clip_high=0.28, dynamic_sampling=10)  # 2503.14476
GSPO = method(loss='gspo')  # 2507.18071
CISPO = method(loss='cispo')  # 2506.13585
SAPO = method(loss='sapo')  # 2511.20347
LUSPO = method(loss='gspo', aggregate='constant', clip_low=2e-3, clip_high=2.5e-3)  # 2602.05261
VESPO = method(loss='vespo')  # 2602.10693
DRO = method(loss='dro')  # 2405.19107
GMPO = method(loss='geo_mean')  # 2507.20673
DPPO = method(loss='dppo_tv')  # 2602.04879
GPG = method(advantage='gpg', loss='reinforce')  # 2504.02546
OPO = method(advantage='opo', loss='reinforce')  # 2505.23585
MAXRL = method(advantage='maxrl')  # 2602.02710
PASS_AT_K = method(advantage='pass_at_k')  # 2508.10751
MT_GRPO = method(advantage='mt_grpo')  # 2505.11821
GIGPO = method(advantage='gigpo', turn_gamma=0.95)  # 2505.10978
RLOO = method(advantage='leave_one_out', kl_in='reward')  # 2402.14740
REINFORCE_PP = method(advantage='reinforce_pp', kl_in='reward')  # 2501.03262
REINFORCE_PP_BASELINE = method(advantage='reinforce_pp_baseline')  # 2501.03262
REMAX = method(advantage='remax', loss='reinforce', kl_in='reward')  # 2310.10505
