"""The expected gradients of GRPO and its family, written down from the papers in float64.

Nothing here calls `jaxpost.losses` or `jaxpost.algorithms`: tests compare their gradients with these, for lists of all
groups of completions that a policy can sample, each with its probability. test_combinations.py lists those of a
categorical policy, test_sampled_gradients.py those of a transformer.

Legend: K groups with a probability each, G samples of a group, C completion tokens.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

EPS = 1e-6  # added to a standard deviation that divides


@dataclasses.dataclass
class Groups:
  """Groups of samples, each with its probability, and the log-probs of their tokens under several policies."""

  chance: np.ndarray  # [K], the probability of a group; the sum is 1
  mask: np.ndarray  # [K, G, C], 1 on tokens of completions
  finished: np.ndarray  # [K, G]
  rewards: np.ndarray  # [K, G]
  present: np.ndarray  # [K, G, C], log-probs under the policy that the update starts from
  old: np.ndarray  # log-probs under the policy before the first update of the rollout
  sampler: np.ndarray  # log-probs under the policy that sampled
  reference: np.ndarray  # log-probs under the reference
  entropy: np.ndarray  # [K, G, C] of next tokens, before the first update
  components: dict[str, tuple[float, np.ndarray]] = dataclasses.field(default_factory=dict)  # weight, [K, G]
  greedy: np.ndarray | None = None  # [K], reward of the greedy answer
  expert: np.ndarray | None = None  # [K, G] bool
  values: np.ndarray | None = None  # [K, G, C], of the states before tokens
  draws: float = np.inf  # sequences that a standard deviation is taken over; inf: the distribution itself

  def mean(self, x: np.ndarray, mask: np.ndarray) -> float:
    """Returns the mean of x over all entries of the mask, each weighted by the probability of its group."""
    weight = mask * self.chance.reshape(-1, *(1,) * (mask.ndim - 1))
    return float((weight * x).sum() / weight.sum())

  def std(self, x: np.ndarray, mask: np.ndarray) -> float:
    """Returns the unbiased standard deviation of x over all entries of the mask."""
    variance = self.mean((x - self.mean(x, mask)) ** 2, mask)
    number = self.draws * (mask.sum() / mask[..., 0].size if mask.ndim == 3 else mask.mean())
    return float(np.sqrt(variance / (1 - 1 / number)))


def gradient(groups: Groups, rl: Any, max_tokens: int, entropy_weight: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
  """Returns the derivatives of the loss by log-prob and entropy of each token [K, G, C], times the chance of its group.

  Args:
    rl: `config.rl`, resolved.
    max_tokens: the divisor of the aggregate 'constant'.
    entropy_weight: the present weight of the entropy bonus where it adapts, that is with `rl.entropy_target`.
  """
  mask = groups.mask.astype(np.float64)
  mask = mask * trained(groups, rl)[:, None, None]
  if rl.mask_truncated:
    mask = mask * groups.finished[..., None]
  advantage = advantages(groups, rl, mask)
  behavior = groups.sampler
  if groups.expert is not None:  # no policy sampled the answers of an expert
    behavior = np.where(groups.expert[..., None], groups.old, groups.sampler)
  base = behavior if rl.old_policy == 'sampler' else groups.old
  used_advantage = advantage
  if rl.top_entropy < 1:
    used_advantage = advantage * largest(groups.entropy, mask, rl.top_entropy)
  by_logprob = SURROGATES[rl.loss](used_advantage, groups.present - base, Tokens(groups.present, base, mask), rl)
  if groups.expert is not None:
    p = np.exp(groups.present)
    shaped = -used_advantage * rl.expert_gamma * p / (p + rl.expert_gamma) ** 2  # LUFFY (arXiv:2504.14945)
    by_logprob = np.where(groups.expert[..., None], shaped, by_logprob)
  for name in rl.importance:
    if name == 'opsm':  # DeepSeek-V3.2 (arXiv:2512.02556), with the present policy
      too_far = over_sequence(behavior - groups.present, mask) > rl.opsm_threshold
      by_logprob = by_logprob * ~(too_far & (used_advantage < 0))
    else:
      by_logprob = by_logprob * CORRECTIONS[name](groups.old - behavior, mask, rl)
  if rl.kl_coef and rl.kl_in == 'loss':
    log_ratio = groups.present - groups.reference
    value, change = KL[rl.kl_estimator](log_ratio)
    if rl.kl_weighted:  # the derivative of the ratio times the estimate
      change = np.exp(groups.present - base) * (change + value)
    by_logprob = by_logprob + rl.kl_coef * change
  if rl.kl_cov:  # "The entropy mechanism" (arXiv:2505.22617)
    centered = [x - groups.mean(x, mask) for x in (behavior, advantage)]
    by_logprob = by_logprob + rl.kl_cov_coef * np.sign(groups.present - groups.old) * largest(
      centered[0] * centered[1], mask, rl.kl_cov
    )
  nll = 0.0
  if rl.correct_nll_coef:  # VAPO (arXiv:2504.05118): the mean over right answers
    correct = mask * (groups.rewards >= rl.keep_reward)[..., None]
    of_mean = 'sequence' if rl.aggregate == 'sequence' else 'token'
    nll = rl.correct_nll_coef * token_weights(groups, correct, of_mean, max_tokens)
  weight = token_weights(groups, mask, rl.aggregate, max_tokens)
  bonus = entropy_weight if rl.entropy_target else rl.entropy_coef
  return weight * by_logprob - nll, -bonus * weight


def trained(groups: Groups, rl: Any) -> np.ndarray:
  """Returns whether each group [K] is trained on; others only fill up a step, and no statistic counts them."""
  varied = groups.rewards.max(axis=1) > groups.rewards.min(axis=1)
  return varied if rl.dynamic_sampling else np.ones(len(varied), bool)


def counted(groups: Groups, rl: Any) -> np.ndarray:
  """Returns 1 for each sequence [K, G] that statistics over sequences count, else 0."""
  return np.repeat(trained(groups, rl)[:, None], groups.rewards.shape[1], axis=1).astype(float)


def token_weights(groups: Groups, mask: np.ndarray, aggregate: str, max_tokens: int) -> np.ndarray:
  """Returns the weight of each token in the loss [K, G, C], times the probability of its group."""
  chance = groups.chance[:, None, None]
  lengths = mask.sum(axis=2, keepdims=True)
  sequences = (chance * (lengths > 0)).sum()
  return {
    'token': chance * mask / (chance * mask).sum(),
    'sequence': chance * mask / np.maximum(lengths, 1) / sequences,
    'constant': chance * mask / (sequences * max_tokens),
  }[aggregate]


# ------------------------------------------------------------- advantages


def advantages(groups: Groups, rl: Any, mask: np.ndarray) -> np.ndarray:
  """Returns the advantage of each token [K, G, C]."""
  kl = np.zeros(mask.shape)
  if rl.kl_coef and rl.kl_in != 'loss':
    kl = rl.kl_coef * (groups.old - groups.reference) * mask  # k1
  penalty = kl if rl.kl_in == 'reward' else 0 * kl
  values = ADVANTAGES[rl.advantage](groups, rl, groups.rewards - penalty.sum(axis=2), mask, penalty)
  values = values[..., None] if values.ndim == 2 else values
  return (values - (kl if rl.kl_in == 'advantage' else 0)) * mask


def group(groups, rl, rewards, mask, penalty):
  """GRPO (arXiv:2402.03300); Dr. GRPO (2503.20783) without the std, "Lite PPO" (2508.08221) with that of the batch."""
  centered = rewards - rewards.mean(axis=1, keepdims=True)
  if rl.scale_rewards == 'batch':
    return centered / (groups.std(rewards, counted(groups, rl)) + EPS)
  return centered / (rewards.std(axis=1, ddof=1, keepdims=True) + EPS) if rl.scale_rewards == 'group' else centered


def leave_one_out(groups, rl, rewards, mask, penalty):
  """RLOO (arXiv:2402.14740)."""
  out = np.zeros(rewards.shape)
  for i in range(rewards.shape[1]):
    others = np.delete(rewards, i, axis=1)
    out[:, i] = rewards[:, i] - others.mean(axis=1)
    if rl.scale_rewards == 'leave_one_out':
      std = others.std(axis=1, ddof=1)
      out[:, i] /= np.where(std > EPS, std + EPS, 1)
  return out


def whitened(groups, x, mask):
  return (x - groups.mean(x, mask)) / groups.std(x, mask)


def to_go(rewards, mask, penalty):
  """Returns the reward of the sequence minus the penalties from each token on [K, G, C]."""
  remaining_penalty = np.cumsum((penalty * mask)[..., ::-1], axis=2)[..., ::-1]
  return rewards[..., None] - remaining_penalty


def reinforce_pp(groups, rl, rewards, mask, penalty):
  """REINFORCE++ (arXiv:2501.03262): returns with the KL of the tokens that follow, whitened over the batch."""
  return whitened(groups, to_go(groups.rewards, mask, penalty), mask)


def reinforce_pp_baseline(groups, rl, rewards, mask, penalty):
  """REINFORCE++ with a baseline (same paper): minus the mean of the group, whitened over the tokens of the batch."""
  centered = (rewards - rewards.mean(axis=1, keepdims=True))[..., None] * np.ones(mask.shape)
  return whitened(groups, centered, mask)


def remax(groups, rl, rewards, mask, penalty):
  """ReMax (arXiv:2310.10505)."""
  return to_go(groups.rewards, mask, penalty) - groups.greedy[:, None, None]


def opo(groups, rl, rewards, mask, penalty):
  """OPO (arXiv:2505.23585), eq. 8: the baseline weighs by length."""
  lengths = mask.sum(axis=2)
  uniform = rewards.max(axis=1) == rewards.min(axis=1)
  baseline = (lengths * rewards).sum(axis=1) / np.maximum(lengths.sum(axis=1), 1)
  return np.where(uniform[:, None], 0, rewards - baseline[:, None])


def gpg(groups, rl, rewards, mask, penalty):
  """GPG (arXiv:2504.02546), eq. 7: scaled by the share of groups that are not uniform."""
  chance = trained(groups, rl) * groups.chance
  varied_share = (rewards.max(axis=1) > rewards.min(axis=1)) @ chance / chance.sum()
  return (rewards - rewards.mean(axis=1, keepdims=True)) / varied_share


def maxrl(groups, rl, rewards, mask, penalty):
  """MaxRL (arXiv:2602.02710)."""
  mean = rewards.mean(axis=1, keepdims=True)
  return (rewards - mean) / np.where(mean > 0, mean, 1)


def pass_at_k(groups, rl, rewards, mask, penalty):
  """Pass@k training (arXiv:2508.10751), section 2.2: all subsets of k, each with GRPO's advantage of its best."""
  subsets = list(itertools.combinations(range(rewards.shape[1]), rl.pass_k))
  best = np.stack([rewards[:, list(s)].max(axis=1) for s in subsets], axis=1)
  mean, std = best.mean(axis=1, keepdims=True), best.std(axis=1, keepdims=True)
  of_subset = (best - mean) / np.where(std > 0, std, 1)
  return np.stack([of_subset[:, [i in s for s in subsets]].mean(axis=1) for i in range(rewards.shape[1])], axis=1) * (
    std > 0
  )


def best_minus_second(groups, rl, rewards, mask, penalty):
  """arXiv:2503.19595, divided by the std of the group as in verl."""
  out = np.zeros(rewards.shape)
  for row, values in zip(out, rewards):
    first = values.argmax()
    if (values == values[first]).sum() == 1:
      row[first] = (values[first] - np.delete(values, first).max()) / (values.std(ddof=1) + EPS)
  return out


def gdpo(groups, rl, rewards, mask, penalty):
  """GDPO (arXiv:2601.05242), eqs. 4 to 6."""
  total = 0
  for weight, values in groups.components.values():
    std = values.std(axis=1, ddof=1, keepdims=True)
    total = total + weight * (values - values.mean(axis=1, keepdims=True)) / (std + EPS)
  return total / (groups.std(total, counted(groups, rl)) + EPS)


def gigpo(groups, rl, rewards, mask, penalty):
  """GiGPO (arXiv:2505.10978): with one turn, which starts from the prompt, state and episode are the same."""
  return (1 + rl.step_weight) * group(groups, rl, rewards, mask, penalty)


def gae(groups, rl, rewards, mask, penalty):
  """GAE (arXiv:1506.02438), whitened as in PPO."""
  sums = sums_of_gae(groups.rewards, penalty, groups.values, mask, rl.gamma, policy_lam(rl, mask))
  return whitened(groups, sums, mask)


def policy_lam(rl, mask):
  """Returns lambda of the policy; in VAPO (arXiv:2504.05118), section 4.2, it depends on the length of the answer."""
  lengths = np.maximum(mask.sum(axis=-1, keepdims=True), 1)
  return np.maximum(0, 1 - 1 / (rl.length_alpha * lengths)) if rl.length_alpha else rl.lam


def sums_of_gae(rewards, penalty, values, mask, gamma, lam):
  """Returns arXiv:1506.02438, eq. 16, summed term by term [..., C]; rewards [...] are given at the last tokens."""
  tokens = mask.shape[-1]
  last = np.arange(tokens) == mask.sum(axis=-1, keepdims=True) - 1
  values = values * mask

  def later(x, n):
    return np.concatenate([x[..., n:], np.zeros((*x.shape[:-1], n))], axis=-1)

  delta = (rewards[..., None] * last - penalty + gamma * later(values, 1) - values) * mask
  return sum((gamma * lam) ** n * later(delta, n) for n in range(tokens))


ADVANTAGES = dict(
  gae=gae,
  group=group,
  leave_one_out=leave_one_out,
  reinforce_pp=reinforce_pp,
  reinforce_pp_baseline=reinforce_pp_baseline,
  remax=remax,
  opo=opo,
  gpg=gpg,
  maxrl=maxrl,
  pass_at_k=pass_at_k,
  best_minus_second=best_minus_second,
  gdpo=gdpo,
  mt_grpo=group,  # MT-GRPO (arXiv:2505.11821) with one turn
  gigpo=gigpo,
)


# ------------------------------------------------------------- surrogates


@dataclasses.dataclass
class Tokens:
  """Log-probs of the present and the old policy, and the mask [K, G, C]."""

  present: np.ndarray
  old: np.ndarray
  mask: np.ndarray


def over_sequence(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns the mean of x over the tokens of each sequence [K, G, 1]."""
  return (x * mask).sum(axis=2, keepdims=True) / np.maximum(mask.sum(axis=2, keepdims=True), 1)


def clipped(a, r, rl):
  """Returns the derivative by log r of -min(r A, clip(r) A); where A < 0, a dual clip c bounds the objective by c A."""
  inside = np.where(a >= 0, r <= 1 + rl.clip_high, r >= 1 - rl.clip_low)
  if rl.dual_clip:
    inside &= (a >= 0) | (r <= rl.dual_clip)
  return -a * r * inside


def sapo(a, log_r, tokens, rl):
  """SAPO (arXiv:2511.20347): sigmoid(tau (r - 1)) 4 / tau."""
  r, tau = np.exp(log_r), np.where(a > 0, rl.tau_pos, rl.tau_neg)
  gate = 1 / (1 + np.exp(-tau * (r - 1)))
  return -a * r * 4 * gate * (1 - gate)


def geo_mean(a, log_r, tokens, rl):
  """GMPO (arXiv:2507.20673): the geometric mean of ratios that are clipped by the sign of the advantage."""
  low, high = (a < 0) & (log_r < -rl.clip_low), (a > 0) & (log_r > rl.clip_high)
  bounded = np.where(low, -rl.clip_low, np.where(high, rl.clip_high, log_r))
  return -a * np.exp(over_sequence(bounded, tokens.mask)) * ~(low | high)


def dppo(a, tokens, measure, rl):
  """DPPO (arXiv:2602.04879): tokens that have moved too far in the direction of their advantage are left out."""
  p, q = np.exp(tokens.present), np.exp(tokens.old)
  moved = (a > 0) & (p > q) & (measure(p, q) > rl.clip_high) | (a < 0) & (p < q) & (measure(p, q) > rl.clip_low)
  return -a * np.minimum(p / q, 20) * ~moved


def binary_kl(p, q):
  with np.errstate(all='ignore'):
    of_other_tokens = (1 - q) * np.log((1 - q) / (1 - p))
  return q * np.log(q / p) + np.where(q < 1, of_other_tokens, 0)


def vespo(a, log_r, tokens, rl):
  """VESPO (arXiv:2602.10693): W^k exp(lambda (1 - W)) of the product of the ratios."""
  ratio = np.exp((log_r * tokens.mask).sum(axis=2, keepdims=True))
  shape, rate = np.where(a >= 0, 2, 3), np.where(a >= 0, 3, 2)
  return -a * ratio**shape * np.exp(rate * (1 - ratio))


SURROGATES = dict(
  clip=lambda a, log_r, tokens, rl: clipped(a, np.exp(log_r), rl),  # PPO (arXiv:1707.06347), 1912.09729
  reinforce=lambda a, log_r, tokens, rl: -a,
  cispo=lambda a, log_r, tokens, rl: -a * np.clip(np.exp(log_r), 1 - rl.clip_low, 1 + rl.clip_high),  # 2506.13585
  sapo=sapo,
  gspo=lambda a, log_r, tokens, rl: clipped(a, np.exp(over_sequence(log_r, tokens.mask)), rl),  # 2507.18071
  geo_mean=geo_mean,
  dppo_tv=lambda a, log_r, tokens, rl: dppo(a, tokens, lambda p, q: abs(p - q), rl),
  dppo_kl=lambda a, log_r, tokens, rl: dppo(a, tokens, binary_kl, rl),
  vespo=vespo,
  dro=lambda a, log_r, tokens, rl: -a + rl.dro_beta * log_r,  # DRO (arXiv:2405.19107)
)

# (value, derivative by log pi) of each estimator of the KL, for d = log pi - log ref (Schulman 2020; arXiv:2512.21852).
KL = {
  'k1': lambda d: (d, np.ones(d.shape)),
  'k2': lambda d: (d**2 / 2, d),
  'k3': lambda d: (np.exp(-d) - 1 + d, 1 - np.exp(-d)),
  'abs': lambda d: (abs(d), np.sign(d)),
  'k1+': lambda d: (d, d),
  'k3+': lambda d: (np.exp(-d) - 1 + d, d),
}


# ------------------------------------------------------------ corrections


def within(x, low, high):
  return (x >= low) & (x <= high)


def product(log_w, mask):
  return np.exp((log_w * mask).sum(axis=2, keepdims=True))


def k2(log_w):
  return log_w**2 / 2


def k3(log_w):
  return np.exp(log_w) - 1 - log_w


# Weights from log(old / sampler): Yao et al. 2025, IcePop (arXiv:2510.18855), and masks as in verl.
CORRECTIONS = dict(
  token_truncated=lambda w, mask, rl: np.minimum(np.exp(w), rl.importance_cap),
  sequence_truncated=lambda w, mask, rl: np.minimum(product(w, mask), rl.importance_cap),
  icepop=lambda w, mask, rl: np.exp(w) * within(np.exp(w), rl.token_low, rl.token_high),
  token_mask=lambda w, mask, rl: within(np.exp(w), rl.token_low, rl.token_high),
  sequence_mask=lambda w, mask, rl: within(np.exp(over_sequence(w, mask)), rl.sequence_low, rl.sequence_high),
  product_mask=lambda w, mask, rl: within(product(w, mask), rl.product_low, rl.product_high),
  token_k2=lambda w, mask, rl: k2(w) <= rl.reject_above,
  token_k3=lambda w, mask, rl: k3(w) <= rl.reject_above,
  sequence_k2=lambda w, mask, rl: over_sequence(k2(w), mask) <= rl.reject_above,
  sequence_k3=lambda w, mask, rl: over_sequence(k3(w), mask) <= rl.reject_above,
)


def largest(x: np.ndarray, mask: np.ndarray, fraction: float) -> np.ndarray:
  """Returns whether each token [K, G, C] is in the fraction of the mask with the largest x; the first of equal ones."""
  descending = np.argsort(np.where(mask > 0, -x, np.inf).ravel(), kind='stable')
  chosen = np.zeros(mask.size, bool)
  chosen[descending[: max(int(fraction * (mask > 0).sum()), 1)]] = True
  return chosen.reshape(mask.shape)
