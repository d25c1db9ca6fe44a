"""Figures of methods that no peer has, computed from the formulas of their papers.

    python tests/golden/derive.py > tests/golden/derived.json

Plain Python in float64, sums written out as in the papers, nothing of jaxpost.
Each function says which formula it is; `tests/test_derived.py` holds the library to the
figures, and the file to this one.
"""

import json
import math

EPS = 1e-6


def normalized(x, members, scale):
  """(x - mean) / (std + eps) of one value among `members`, with the unbiased std; 0 for a single member."""
  mean = sum(members) / len(members)
  if len(members) == 1:
    return 0.0
  if scale == 'none':
    return x - mean
  return (x - mean) / (math.sqrt(sum((y - mean) ** 2 for y in members) / (len(members) - 1)) + EPS)


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
      out.append([sum(gamma ** (m - k) * a[m] for m in range(k, len(a))) for k in range(len(a))])
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
    totals = [sum(r) for r in rewards]
    returns = [[sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in rewards]
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


def figures():
  """{case: value}."""
  return {
    'mt_grpo/gamma1/group': mt_grpo(1.0, 'group'),
    'mt_grpo/gamma0.5/none': mt_grpo(0.5, 'none'),
    'luffy/gamma0.1': luffy(0.1),
    'luffy/gamma0.5': luffy(0.5),
    'gigpo/gamma0.95/group': gigpo(0.95, 1.0, 'group'),
    'gigpo/gamma0.9/weight0.5/none': gigpo(0.9, 0.5, 'none'),
  }


if __name__ == '__main__':
  print(json.dumps(figures(), indent=1))
