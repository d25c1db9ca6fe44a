"""Figures of methods of which `losses.json` has none, computed from the formulas of their papers.

    python tests/golden/derive.py > tests/golden/derived.json

Plain Python in float64, sums written out as in the papers, nothing of jaxpost.
Each function says which formula it is; `tests/test_derived.py` holds the library to the
figures, and the file to this one.
"""

import itertools
import json
import math

EPS = 1e-6


def added(values):
  """Adds numbers one after the other. From Python 3.12 on, the built-in `sum` of floats rounds in another way."""
  result = 0
  for value in values:
    result += value
  return result


def normalized(x, members, scale):
  """(x - mean) / (std + eps) of one value among `members`, with the unbiased std; 0 for a single member."""
  mean = added(members) / len(members)
  if len(members) == 1:
    return 0.0
  if scale == 'none':
    return x - mean
  return (x - mean) / (math.sqrt(added((y - mean) ** 2 for y in members) / (len(members) - 1)) + EPS)


# Two prompts, three episodes each. An episode is (observation, reward of the turn) of each turn, and its outcome. All
# episodes of a prompt begin in the same state '', and some meet again: (0, 0) and (0, 1) at 'hall', and (1, 0) twice.
EPISODES = [
  [
    ([('', 0.5), ('hall', 0.0)], 1.0),
    ([('', 0.2), ('hall', 0.3), ('door', 0.0)], 0.0),
    ([('', 0.0), ('lake', 0.0)], 0.0),
  ],
  [
    ([('', 0.0), ('hall', 0.1), ('hall', 0.0)], 1.0),
    ([('', 0.0)], 0.0),
    ([('', 0.4), ('door', 0.2), ('hall', 0.0)], 2.0),
  ],
]


def mt_grpo(gamma, scale):
  """MT-GRPO, arXiv:2505.11821.

  With turn reward R^T and outcome reward R^O, each normalized over the group to A^T and
  A^O, the tokens of the first turn get A^O + lambda A^T with lambda = 1, those of the second
  A^O. Written for any number of turns: A_k = sum over l >= k of gamma^(l - k) a_l, with a_l
  the normalized reward of turn l among the episodes that have a turn l, and the normalized
  outcome added to the a of the last turn. For two turns, of which the last has no reward
  of its own, and gamma = 1, this is the paper's.
  """
  out = []
  for group in EPISODES:
    outcomes = [outcome for _, outcome in group]
    for turns, outcome in group:
      a = []
      for k, (_, reward) in enumerate(turns):
        a.append(normalized(reward, [other[k][1] for other, _ in group if len(other) > k], scale))
      a[-1] += normalized(outcome, outcomes, scale)
      out.append([added(gamma ** (m - k) * a[m] for m in range(k, len(a))) for k in range(len(a))])
  return out


def gigpo(gamma, weight, scale):
  """GiGPO, arXiv:2505.10978.

  A^E = (R - mean) / F_norm with R the sum of all rewards of an episode. The
  turns of a group that start from the same state form a step group, several of one episode
  included. R_t = sum over k >= t of gamma^(k - t) r_k. A^S = (R_t - mean) /
  F_norm within the step group. A = A^E + omega A^S. The outcome is part of the last
  reward; F_norm is the std or 1.
  """
  out = []
  for group in EPISODES:
    rewards = []
    for turns, outcome in group:
      r = [reward for _, reward in turns]
      r[-1] += outcome
      rewards.append(r)
    totals = [added(r) for r in rewards]
    returns = [[added(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in rewards]
    steps = {}
    for i, (turns, _) in enumerate(group):
      for t, (state, _) in enumerate(turns):
        steps.setdefault(state, []).append(returns[i][t])
    for i, (turns, _) in enumerate(group):
      of_episode = normalized(totals[i], totals, scale)
      out.append(
        [of_episode + weight * normalized(returns[i][t], steps[state], scale) for t, (state, _) in enumerate(turns)]
      )
  return out


def luffy(gamma):
  """LUFFY, arXiv:2504.14945: the loss of a token of an expert, and its derivative by the log-prob.

  The ratio to the expert is p / 1; shaped by f(x) = x / (x + gamma), unclipped, the loss is
  -A f(p). With dp = p d(log p), the derivative is -A gamma p / (p + gamma)^2.
  """
  out = []
  for p, advantage in LUFFY:
    out.append([-advantage * p / (p + gamma), -advantage * gamma * p / (p + gamma) ** 2])
  return out


# Probabilities and advantages of tokens of an expert.
LUFFY = [(1.0, 0.5), (0.5, 2.0), (0.1, 1.0), (1e-3, 1.5), (1e-9, 1.0), (0.3, -0.7)]


# Groups of samples that are right (1) or wrong (0); none, some and all of a group are right.
BINARY = [[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]]


def maxrl():
  """MaxRL, arXiv:2602.02710: the gradient of the log of the pass rate.

  Its estimate is the mean of the scores S_i = grad log p(y_i) of the K right samples, 0 if there is none;
  minus the mean of all N scores, whose expectation is 0: sum_i (r_i / K - 1 / N) S_i. With the loss a mean over
  samples, the advantage is N times the coefficient of S_i.
  """
  out = []
  for group in BINARY:
    right, n = added(group), len(group)
    out.append([n * (r / right - 1 / n) if right else 0.0 for r in group])
  return out


def pass_at_k(k):
  """Pass@k training, arXiv:2508.10751, section 2.2: every subset of k samples is one sample of GRPO.

  The reward of a subset is its largest, its advantage (R - mean) / std over all subsets, with the std of the
  population, and a sample has the mean advantage of the subsets that it is part of. A group whose subsets are all
  equal has 0.
  """
  out = []
  for group in BINARY:
    subsets = list(itertools.combinations(range(len(group)), k))
    best = [max(group[i] for i in subset) for subset in subsets]
    mean = added(best) / len(best)
    std = math.sqrt(added((x - mean) ** 2 for x in best) / len(best))
    gains = [(x - mean) / std if std else 0.0 for x in best]
    of_samples = []
    for i in range(len(group)):
      mine = [gain for gain, subset in zip(gains, subsets) if i in subset]
      of_samples.append(added(mine) / len(mine))
    out.append(of_samples)
  return out


# Rewards and lengths of groups of samples.
GRADED = [
  ([1.0, 0.2, -0.5, 0.7], [3, 12, 5, 1]),
  ([0.0, 0.0, 2.0, 0.0], [40, 2, 9, 9]),
  ([0.4, 0.4, 0.4, 0.4], [1, 2, 3, 4]),
]


def opo():
  """OPO, arXiv:2505.23585.

  The baseline of least variance weighs rewards by the squared norm of the gradient of their sample. With tokens whose
  gradients are orthogonal and of equal norm this is proportional to the length: b = sum l r / sum l, A = r - b.
  """
  out = []
  for rewards, lengths in GRADED:
    baseline = added(n * r for n, r in zip(lengths, rewards)) / added(lengths)
    out.append([r - baseline for r in rewards])
  return out


# Several rewards of the same samples, by prompt, and their weights. The second is uniform in one group.
REWARDS = {
  'right': (1.0, [[1, 0, 0, 1], [0, 0, 0, 1], [1, 0, 1, 1]]),
  'format': (0.5, [[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
  'length': (-0.3, [[120, 80, 300, 40], [10, 500, 20, 35], [77, 60, 61, 62]]),
}


def gdpo():
  """GDPO, arXiv:2601.05242, eqs. 4 to 6.

  Each reward is normalized in its group by itself; the weighted sum of these is normalized over the batch. Stds are
  unbiased, and eps is added to both, where TRL's `normalize_then_sum` has 1e-4 in place of 1e-6.
  """
  sums = [[0.0] * 4 for _ in range(3)]
  for weight, values in REWARDS.values():
    for total, group in zip(sums, values):
      for i, r in enumerate(group):
        total[i] += weight * normalized(r, group, 'group')
  every = [x for total in sums for x in total]
  return [[normalized(x, every, 'group') for x in total] for total in sums]


# Probabilities and advantages of the tokens of three samples; None: not trained.
TOKENS = [
  [(0.9, 1.2), (0.03, 1.2), None, (0.5, 1.2), (0.99, 1.2)],
  [(0.2, -0.8), (0.7, -0.8), (0.01, -0.8), None, None],
  [(0.6, 3.0), None, (0.95, 3.0), (0.1, 3.0), (0.3, 3.0)],
]


def covariance():
  """ "The entropy mechanism", arXiv:2505.22617: (log p - its mean) (A - its mean), means over the trained tokens."""
  kept = [x for row in TOKENS for x in row if x]
  logp = added(math.log(p) for p, _ in kept) / len(kept)
  gain = added(a for _, a in kept) / len(kept)
  return [[(math.log(x[0]) - logp) * (x[1] - gain) if x else 0.0 for x in row] for row in TOKENS]


def clip_cov(fraction, low, high):
  """Clip-Cov, the same paper: of N tokens, `fraction` N lose their gradient, drawn among low < covariance < high.

  Returns (how many, at least one and at most those that there are; [token may lose it]), with the bounds given and
  tokens as (sample, place).
  """
  cov = covariance()
  places = [(s, c) for s, row in enumerate(TOKENS) for c, x in enumerate(row) if x]
  inside = [[s, c] for s, c in places if low < cov[s][c] < high]
  return [min(max(math.floor(fraction * len(places)), 1), len(inside)), inside]


def kl_cov(fraction):
  """KL-Cov, the same paper: the `fraction` N tokens of the largest covariance, as (sample, place)."""
  cov = covariance()
  places = [(s, c) for s, row in enumerate(TOKENS) for c, x in enumerate(row) if x]
  count = max(math.floor(fraction * len(places)), 1)
  return sorted([s, c] for s, c in sorted(places, key=lambda at: -cov[at[0]][at[1]])[:count])


# Outcome of a sample, and the critic's value before each of its tokens.
VALUES = [(1.0, [0.1, 0.3, -0.2, 0.5, 0.4, 0.9, 0.7, 1.1]), (0.0, [0.2, 0.6, -0.4]), (1.0, [0.8])]


def vapo(alpha):
  """VAPO, arXiv:2504.05118, sections 4.1 and 4.2: a lambda for the policy, another for the critic.

  The coefficients of GAE should sum to alpha times the length l: sum_k lambda^k = 1 / (1 - lambda) = alpha l, so
  lambda = 1 - 1 / (alpha l), here 0 where alpha l < 1, of which the paper says nothing. The critic has lambda = 1: the
  target of each token is the sum of all that follows, the outcome. A_t = sum_k lambda^k d_(t + k),
  d_t = r_t + V_(t + 1) - V_t. Advantages are whitened over the tokens, by PPO's custom: (A - mean) / sqrt(var + 1e-8),
  with the unbiased variance.
  """
  lambdas, gains = [], []
  for outcome, values in VALUES:
    n = len(values)
    lam = max(1 - 1 / (alpha * n), 0.0)
    following = [*values[1:], 0.0]
    d = [(outcome if t == n - 1 else 0.0) + following[t] - values[t] for t in range(n)]
    lambdas.append(lam)
    gains.append([added(lam**k * d[t + k] for k in range(n - t)) for t in range(n)])
  every = [x for row in gains for x in row]
  mean = added(every) / len(every)
  std = math.sqrt(added((x - mean) ** 2 for x in every) / (len(every) - 1) + 1e-8)
  return {
    'lambda': lambdas,
    'advantages': [[(x - mean) / std for x in row] for row in gains],
    'returns': [[outcome] * len(values) for outcome, values in VALUES],
  }


# Entropies of rollouts, around a target of 0.2.
ENTROPIES = [0.1, 0.15, 0.3, 0.19, 0.5, 0.4, 0.6, 0.05]


def adaptive_entropy(start, step):
  """Skywork-OR1, arXiv:2505.22312: c rises by `step` where the entropy is below its target and falls by it above.

  The weight of the bonus is c where the entropy is at most the target, and 0 otherwise. Below 0 the bonus would lower
  the entropy; like TRL's `entropy_coef_min`, this holds c at 0.

  Returns [(weight of this rollout, c of the next)].
  """
  out, c = [], start
  for entropy in ENTROPIES:
    weight = c if entropy <= 0.2 else 0.0
    c = max(0.0, c + step if entropy < 0.2 else c - step)
    out.append([weight, c])
  return out


# Two weights of the policy before and after each update.
WEIGHTS = [[1.0, -2.0], [0.9, -1.7], [0.7, -1.9], [0.75, -1.0], [0.2, -0.4], [-0.3, 0.1], [-0.1, 0.6]]


def moving_reference(every, mix):
  """TR-DPO, arXiv:2404.09656: the reference after each update; it moves after every `every` ones.

  ref <- mix theta + (1 - mix) ref, solved: after m moves, (1 - mix)^m theta_0 + sum over j = 1 ... m of
  mix (1 - mix)^(m - j) theta_(j every).
  """
  out = []
  for n in range(1, len(WEIGHTS)):
    m = n // every
    row = []
    for w in range(2):
      moves = added(mix * (1 - mix) ** (m - j) * WEIGHTS[j * every][w] for j in range(1, m + 1))
      row.append((1 - mix) ** m * WEIGHTS[0][w] + moves)
    out.append(row)
  return out


# Logits of a student and of three teachers at two tokens, over four symbols; the last teacher lacks the last symbol.
STUDENT = [[0.3, -1.0, 0.8, 0.1], [2.0, 0.0, -0.5, 1.0]]
TEACHERS = [
  [[1.0, 0.0, -1.0, 0.5], [0.2, 0.4, 0.6, 0.8]],
  [[-0.7, 0.9, 0.3, 0.0], [3.0, -1.0, 0.0, 0.5]],
  [[0.1, 0.2, 1.5, None], [1.2, 0.7, -0.9, None]],
]
SHARES = [0.5, 2.0, 1.0]


def softmax(logits, temperature=1.0):
  """Probabilities; 0 where a logit is None."""
  weights = [0.0 if x is None else math.exp(x / temperature) for x in logits]
  return [w / added(weights) for w in weights]


def kl(p, q):
  """KL(p || q)."""
  return added(x * math.log(x / y) for x, y in zip(p, q) if x)


def teachers_of_samples(chosen):
  """On-policy distillation from several teachers: the advantage of each symbol, and the divergence that it lowers.

  The loss is sum_i w_i KL(student || teacher_i), with w the shares of the chosen teachers, which sum to 1. KL(S || T)
  is the mean over samples y of S of log S(y) - log T(y), the k1 estimate (MiniLLM, arXiv:2306.08543, for one teacher),
  so the advantage of y is sum_i w_i log T_i(y) - log S(y).

  Returns [(of each symbol, the loss)] of both tokens.
  """
  total = added(SHARES[i] for i in chosen)
  out = []
  for token, logits in enumerate(STUDENT):
    student = softmax(logits)
    found = [softmax(TEACHERS[i][token]) for i in chosen]
    shares = [SHARES[i] / total for i in chosen]
    gains = [added(w * math.log(t[y]) for w, t in zip(shares, found)) - math.log(p) for y, p in enumerate(student)]
    out.append([gains, added(w * kl(student, t) for w, t in zip(shares, found))])
  return out


def teachers_of_tokens(beta, temperature, k=0):
  """Distillation from several teachers: sum_i w_i D(teacher_i, student) of both tokens, the w summing to 1.

  D is that of GKD (arXiv:2306.13649), eq. 1: beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S;
  KL(T || S) for beta = 0, KL(S || T) for beta = 1. A symbol that a teacher lacks is left out of the student before it
  is normalized. With `k`, T and S are over the teacher's k most probable symbols and, as one, all
  others.
  """
  out = []
  for token, logits in enumerate(STUDENT):
    total = 0.0
    for share, teacher in zip(SHARES, TEACHERS):
      t = softmax(teacher[token], temperature)
      if k:
        s = softmax(logits, temperature)
        top = sorted(range(4), key=lambda y: -t[y])[:k]
        s, t = ([p[y] for y in top] + [1 - added(p[y] for y in top)] for p in (s, t))
      else:
        s = softmax([None if other is None else x for x, other in zip(logits, teacher[token])], temperature)
      m = [beta * x + (1 - beta) * y for x, y in zip(t, s)]
      d = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, beta * kl(t, m) + (1 - beta) * kl(s, m))
      total += share / added(SHARES) * d
    out.append(total)
  return out


def figures():
  """{case: value}."""
  return {
    'mt_grpo/gamma1/group': mt_grpo(1.0, 'group'),
    'mt_grpo/gamma0.5/none': mt_grpo(0.5, 'none'),
    'luffy/gamma0.1': luffy(0.1),
    'luffy/gamma0.5': luffy(0.5),
    'gigpo/gamma0.95/group': gigpo(0.95, 1.0, 'group'),
    'gigpo/gamma0.9/weight0.5/none': gigpo(0.9, 0.5, 'none'),
    'maxrl': maxrl(),
    **{f'pass_at_k/k{k}': pass_at_k(k) for k in (1, 2, 3)},
    'opo': opo(),
    'gdpo': gdpo(),
    'covariance': covariance(),
    **{f'clip_cov/{fraction}': clip_cov(fraction, 0.2, 1.5) for fraction in (0.01, 0.2, 0.9)},
    **{f'kl_cov/{fraction}': kl_cov(fraction) for fraction in (0.01, 0.3)},
    **{f'vapo/alpha{alpha}': vapo(alpha) for alpha in (0.5, 0.25)},
    **{f'adaptive_entropy/start{start}': adaptive_entropy(start, 0.005) for start in (0.0, 0.02)},
    'moving_reference/every1/mix0.6': moving_reference(1, 0.6),
    'moving_reference/every2/mix0.25': moving_reference(2, 0.25),
    'moving_reference/every3/mix1': moving_reference(3, 1.0),
    'teachers_of_samples/0+1': teachers_of_samples([0, 1]),
    'teachers_of_samples/1': teachers_of_samples([1]),
    **{f'teachers_of_tokens/beta{beta}/T1.5': teachers_of_tokens(beta, 1.5) for beta in (0.0, 0.3, 1.0)},
    **{f'teachers_of_tokens/beta{beta}/top2': teachers_of_tokens(beta, 1.0, k=2) for beta in (0.0, 0.3, 1.0)},
  }


if __name__ == '__main__':
  print(json.dumps(figures(), indent=1))
