"""GRPO: experience with group-relative advantages, and a clipped surrogate.

Legend: N sequences, B rows, T tokens, C completion tokens.
"""

import jax
import numpy as np

from jaxpost.data import packing
from jaxpost.losses import advantages as advantages_lib
from jaxpost.losses import policy_gradient
from jaxpost.programs.train import Objective
from jaxpost.types import Batch, Rollout

ON_POLICY = True


def make_objective(config) -> Objective:
  """The loss of one token, from the `rl` and `rollout` blocks."""
  options = config.rl

  def surrogate(outputs, arrays):
    logprobs = outputs.logprobs
    # One update per rollout: the old policy is this one.
    old = arrays.get('old_logprobs', jax.lax.stop_gradient(logprobs))
    loss, ratio, low, high = policy_gradient.clipped_surrogate(
        logprobs, old, arrays['advantages'], options.clip_low,
        options.clip_high)
    metrics = {
        'entropy': outputs.entropy, 'ratio': ratio,
        'clip_ratio/low_mean': low, 'clip_ratio/high_mean': high,
        'sampler_mismatch': policy_gradient.mismatch(
            logprobs, arrays['sampler_logprobs'])}
    if 'ref_logprobs' in arrays:
      kl = policy_gradient.kl_k3(logprobs, arrays['ref_logprobs'])
      loss += options.kl_coef * kl
      metrics['kl'] = kl
    return loss - options.entropy_coef * outputs.entropy, metrics

  return Objective(
      surrogate, entropy=True, entropy_grad=options.entropy_coef > 0,
      temperature=config.rollout.temperature)


def advantages(rewards, config) -> tuple[np.ndarray, dict]:
  """[N / G, G] rewards (NaN: masked) -> advantages and their metrics."""
  valid = np.isfinite(rewards)
  flat = advantages_lib.uniform(rewards, valid)
  values = advantages_lib.group_relative(
      rewards, valid, scale=config.rl.scale_rewards)
  kept = rewards[valid]
  spread = [r[v].std(ddof=1) for r, v in zip(rewards, valid) if v.sum() > 1]
  return values, {
      'reward': float(kept.mean()) if kept.size else float('nan'),
      'reward_std': float(np.mean(spread)) if spread else float('nan'),
      'frac_reward_zero_std': float(flat.mean()),
      'masked_samples': int((~valid).sum())}


def rows_of(rollout: Rollout, row_length: int, num_rows: int) -> tuple:
  """Where each sequence goes: (row, start) [N] in rows of `row_length`."""
  group = len(rollout.lengths) // len(rollout.prompts)
  prompt = np.repeat([len(p.tokens) for p in rollout.prompts], group)
  rows = packing.pack((prompt + rollout.lengths).tolist(), row_length)
  if len(rows) > num_rows:
    raise ValueError(f'{len(rows)} rows do not fit {num_rows}')
  place = np.zeros((len(rollout.lengths), 2), np.int64)
  for r, members in enumerate(rows):
    at = 0
    for n in members:
      place[n] = r, at
      at += prompt[n] + rollout.lengths[n]
  return place, prompt


def to_batch(rollout: Rollout, values, valid, num_rows: int,
             row_length: int) -> Batch:
  """Packs prompts and completions; completions of valid samples are trained.

  Args:
    values, valid: [N] advantages and bool.

  Returns:
    Batch [num_rows, row_length], weights normalised over all trained tokens.
  """
  place, prompt = rows_of(rollout, row_length, num_rows)
  shape = num_rows, row_length
  tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
  weights, per_token, sampled = (
      np.zeros(shape, np.float32) for _ in range(3))
  group = len(rollout.lengths) // len(rollout.prompts)
  for n, ((row, at), length) in enumerate(zip(place, rollout.lengths)):
    answer = at + prompt[n]
    end = answer + length
    tokens[row, at:answer] = rollout.prompts[n // group].tokens
    tokens[row, answer:end] = rollout.completions[n, :length]
    positions[row, at:end] = np.arange(end - at)
    segments[row, at:end] = segments[row].max() + 1
    weights[row, answer:end] = valid[n]
    per_token[row, answer:end] = values[n]
    sampled[row, answer:end] = rollout.logprobs[n, :length]
  weights /= max(weights.sum(), 1.0)
  return Batch(tokens, positions, segments, weights, advantages=per_token,
               sampler_logprobs=sampled)


def check_first_step(metrics, config):
  """What must hold before anything was learnt; a violation is our bug.

  The policy is the reference and the old policy: ratio 1, nothing clipped,
  KL 0, and the sampler's log-probs are the trainer's.
  """
  if not metrics['ratio']:
    return  # every sample was masked
  exact = config.model.dtype == 'float32'
  # With several updates the old log-probs come from another program, which
  # rounds bfloat16 elsewhere; with one they are the update's own.
  same = exact or config.rl.updates_per_rollout == 1
  limits = {
      'ratio': (1.0, 1e-4 if same else 1e-2),
      'clip_ratio/low_mean': (0.0, 0.0), 'clip_ratio/high_mean': (0.0, 0.0),
      'kl': (0.0, 1e-8 if exact else 1e-4),
      'sampler_mismatch': (1.0, 1e-4 if exact else 0.02)}
  for name, (value, tolerance) in limits.items():
    # Written so that NaN fails too.
    if name in metrics and not abs(metrics[name] - value) <= tolerance:
      raise AssertionError(
          f'{name} is {metrics[name]} at the first step and must be {value}: '
          'sampler, reference and trainer do not compute the same model')
