"""All pairs of choices of config fields that make up an RL method, and the gradient of each, exact and by jaxpost.

`tests/test_combinations.py` asserts that each pair has the right gradient or is refused in one line;
`docs/make_combinations_table.py` writes the refused pairs into docs/combinations.md. The gradients are those of an
expectation over all groups of SIZE samples that a categorical policy can draw, K groups in all.
"""

import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import formulas
import jax
import numpy as np
import tiny

from jaxpost.errors import InputError
from jaxpost.losses import advantages, importance, policy_gradient
from jaxpost.rl import batching
from jaxpost.rl.controller import Controller
from jaxpost.rl.grading import GradedRollout
from jaxpost.stage import algorithms, sampling_inputs
from jaxpost.stage import config as config_lib
from jaxpost.types import Batch, Credit, Experience, Objective, Outputs, Prompt, Rollout, Scores

SIZE, C, SYMBOLS = 3, 3, 3
_KL = dict(kl_coef=0.1)
_PASS_K = {'pass_at_k': 2}
# Methods that learn by the surrogate of grpo.py -> the config that they need to run.
_METHODS = {
  **{name: {} for name, where in algorithms.ALGORITHMS.items() if where.partition(':')[0] in ('grpo', 'ppo')},
  **dict.fromkeys(('mt_grpo', 'gigpo'), dict(environment='x')),
  'pass_at_k': dict(rl=dict(pass_k=2)),
  'opd': dict(rl=dict(reference='x')),
}
# Field -> {choice: config that it sets}. The default of GRPO is one of the choices.
FIELDS = {
  'algorithm': {name: dict(needs, algorithm=name) for name, needs in _METHODS.items()},
  'rl.loss': {name: dict(rl=dict(loss=name)) for name in policy_gradient.LOSSES},
  'rl.advantage': {
    name: dict(rl=dict(advantage=name, pass_k=_PASS_K.get(name, 4)), environment='x' if 'sampled' in e.takes else '')
    for name, e in advantages.ESTIMATORS.items()
  },
  'rl.aggregate': {name: dict(rl=dict(aggregate=name)) for name in ('token', 'sequence', 'constant')},
  'rl.scale_rewards': {name: dict(rl=dict(scale_rewards=name)) for name in ('group', 'batch', 'none', 'leave_one_out')},
  'KL': {
    'none': dict(rl=dict(kl_coef=0.0)),
    **{f'{name} in the loss': dict(rl=dict(_KL, kl_in='loss', kl_estimator=name)) for name in policy_gradient.KL},
    'k1 in the loss, weighted': dict(rl=dict(_KL, kl_in='loss', kl_estimator='k1', kl_weighted=True)),
    'k3 in the loss, weighted': dict(rl=dict(_KL, kl_in='loss', kl_estimator='k3', kl_weighted=True)),
    **{f'{name} in the reward': dict(rl=dict(_KL, kl_in='reward', kl_estimator=name)) for name in policy_gradient.KL},
    'k1 in the advantage': dict(rl=dict(_KL, kl_in='advantage', kl_estimator='k1')),
    'in the reward, adaptive': dict(rl=dict(_KL, kl_in='reward', kl_target=0.1)),
  },
  'rl.importance': {
    'none': dict(rl=dict(importance=())),
    **{name: dict(rl=dict(importance=(name,))) for name in (*importance.METHODS, 'opsm')},
  },
  'rl.old_policy': {name: dict(rl=dict(old_policy=name)) for name in ('recomputed', 'sampler')},
  'rollout.staleness': {str(n): dict(rollout=dict(staleness=n)) for n in (0, 1, 2)},
  'truncation': {
    'none': {},
    'rollout.top_p=0.9': dict(rollout=dict(top_p=0.9)),
    'rl.sampling_mask': dict(rl=dict(sampling_mask=True), rollout=dict(top_k=8)),
    'rl.mask_truncated': dict(rl=dict(mask_truncated=True)),
  },
  'rl.minibatches': {str(n): dict(rl=dict(minibatches=n)) for n in (1, 2)},
  'rl.epochs': {str(n): dict(rl=dict(epochs=n)) for n in (1, 2)},
  'rl.dynamic_sampling': {
    '0': dict(rl=dict(dynamic_sampling=0)),
    '2': dict(rl=dict(dynamic_sampling=2)),
    '2, rl.keep_surplus': dict(rl=dict(dynamic_sampling=2, keep_surplus=1)),
  },
  'entropy control': {
    'none': {},
    'rl.clip_cov': dict(rl=dict(clip_cov=0.05, cov_low=90.0, cov_high=99.0)),  # no token has such a covariance
    'rl.kl_cov': dict(rl=dict(kl_cov=0.1)),
    'rl.entropy_target': dict(rl=dict(entropy_target=9.0)),
    'rl.top_entropy': dict(rl=dict(top_entropy=0.5)),
  },
  'rl.replay': {'0': {}, '8': dict(rl=dict(replay=8))},
  'rl.expert': {'False': {}, 'True': dict(rl=dict(expert=True))},
  'rl.correct_nll_coef': {str(x): dict(rl=dict(correct_nll_coef=x)) for x in (0.0, 0.1)},
  'rl.dual_clip': {str(x): dict(rl=dict(dual_clip=x)) for x in (0.0, 3.0)},
  'rl.entropy_coef': {str(x): dict(rl=dict(entropy_coef=x)) for x in (0.0, 0.01)},
}
# Methods with losses of their own -> their config. They refuse the choices that their steps do not read.
OTHERS = {
  'online_dpo': dict(algorithm='online_dpo'),
  'rft': dict(algorithm='rft'),
  'gkd': dict(algorithm='gkd', reward='', distill=dict(teachers=('x',))),
}
CHOICES = [(field, choice) for field, choices in FIELDS.items() for choice in choices]


def pairs() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
  """All pairs of choices of two fields."""
  for first, second in itertools.combinations(CHOICES, 2):
    if first[0] != second[0]:
      yield first, second


@functools.lru_cache(maxsize=None)
def config_of(*chosen: tuple[str, str]) -> config_lib.Config:
  """The resolved and checked config of GRPO, or of another method, with these choices; InputError if it is refused."""
  over = dict(algorithm='grpo', reward='x', rollout=dict(group_size=SIZE, max_new_tokens=C))
  for field, choice in chosen:
    over = tiny.merged(over, OTHERS[choice] if choice in OTHERS else FIELDS[field][choice])
  algorithm = algorithms.load_algorithm(over['algorithm'])
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), algorithm.defaults)
  sampling_inputs.check_sampling(config, on_policy=True, rewards=algorithm.rewards)
  algorithm.check(config)
  return config


def taken(method: str) -> list[str]:
  """The choices that a method of `OTHERS` accepts, without the first of each field."""
  accepted = []
  for field, choices in FIELDS.items():
    for choice in list(choices)[1:]:
      if field != 'algorithm' and not refusal(('algorithm', method), (field, choice)):
        accepted.append(choice if '.' in choice else f'{field}={choice}')
  return accepted


@functools.lru_cache(maxsize=None)
def refusal(*chosen: tuple[str, str]) -> str:
  """The error that refuses the choices, or ''."""
  try:
    config_of(*chosen)
  except InputError as error:
    return str(error)
  return ''


# The sampler draws each of the four answers of a prompt with probability 1/4; FINISHED says which are complete.
ANSWERS = (((0, 1), (0, 2), (1,), (2, 2)), ((0,), (1, 0, 2), (1, 2), (2, 1)))
REWARDS = np.array([[1.0, 0, 0, 1], [0, 1, 0, 0]])
OTHER_REWARDS = np.array([[0.0, 1, 0, 1], [1, 0, 0, 1]])
FINISHED = np.array([[True, False, True, True], [True, False, True, True]])
GREEDY = np.array([0.25, 0.5])
STATES = sorted({(p, a[:t]) for p, answers in enumerate(ANSWERS) for a in answers for t in range(len(a))})
# All groups of a prompt, as indices of its answers; they are equally probable.
DRAWN = np.array(list(itertools.product(range(4), repeat=SIZE)))
PROMPTS = np.repeat([0, 1], len(DRAWN))  # of each group
DRAWS = np.concatenate([DRAWN, DRAWN])  # [K, SIZE]
_ANSWERS = [(p, answer) for p in (0, 1) for answer in ANSWERS[p]]
_INDEX = PROMPTS[:, None] * 4 + DRAWS  # [K, SIZE], into _ANSWERS
_VALUES = np.random.RandomState(6).standard_normal(len(STATES))  # of a critic


def _of_tokens(value, pad=0):
  """[8, C] of value(prompt, prefix, token)."""
  rows = [[value(p, answer[:t], answer[t]) for t in range(len(answer))] for p, answer in _ANSWERS]
  return np.array([row + [pad] * (C - len(row)) for row in rows])


STATE = _of_tokens(lambda p, prefix, token: STATES.index((p, prefix)))
TOKEN = _of_tokens(lambda p, prefix, token: token)
MASK = _of_tokens(lambda p, prefix, token: 1)


@functools.lru_cache
def policy(name: str) -> np.ndarray:
  """Log-probs [states, SYMBOLS] of a categorical policy.

  'sampler' draws `ANSWERS`. 'old' differs from 'sampler' after the first prompt only, 'present' from both of these, and
  'reference' from all three.
  """
  count = np.array([[sum(a[: len(x) + 1] == (*x, s) for a in ANSWERS[p]) for s in range(SYMBOLS)] for p, x in STATES])
  sampler = np.log(np.maximum(count / count.sum(axis=1, keepdims=True), 1e-9))
  random = np.random.RandomState(1)
  noise = [random.standard_normal(count.shape) for _ in range(3)]
  first = np.array([p == 0 for p, _ in STATES])[:, None]
  flat = np.maximum(sampler, np.log(0.1))
  old = np.where(first, flat + 0.4 * noise[0], sampler)
  present = np.maximum(old, np.log(0.1)) + 0.7 * noise[1]
  logits = dict(sampler=sampler, old=old, present=present, reference=flat + 0.5 * noise[2])[name]
  return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def logprobs(name: str) -> np.ndarray:
  """[K * SIZE, C] of the tokens of all groups."""
  return (policy(name)[STATE, TOKEN] * MASK)[_INDEX.reshape(-1)]


def entropies(name: str) -> np.ndarray:
  """[K * SIZE, C] of the next token of a policy."""
  logp = policy(name)
  return (-(np.exp(logp) * logp).sum(axis=1)[STATE] * MASK)[_INDEX.reshape(-1)]


def roles(config: config_lib.Config, on_policy: bool) -> dict[str, str]:
  """Role -> name of its `policy`: 'sampler' in all roles if on-policy.

  Otherwise, sampler and reference differ from the old policy, and so does the present one if a rollout has several
  updates.
  """
  if on_policy:
    return dict.fromkeys(('present', 'old', 'sampler', 'reference'), 'sampler')
  several_updates = config.rl.epochs * config.rl.minibatches > 1
  return dict(present='present' if several_updates else 'old', old='old', sampler='sampler', reference='reference')


def experience(config: config_lib.Config | None = None, on_policy: bool = True) -> Experience:
  """All groups that the sampler can draw, graded and scored.

  Rewards are 0 or 1, which all estimators accept. `behavior_logprobs`, those after top-p, differ from the log-probs of
  the model.
  """
  config = config or config_of()
  which = roles(config, on_policy)
  index = _INDEX.reshape(-1)
  log_probs = {name: np.float32(logprobs(kind)) for name, kind in which.items()}
  lengths = MASK.sum(axis=1)[index]
  rewards, other, finished = (x.reshape(-1)[index] for x in (REWARDS, OTHER_REWARDS, FINISHED))
  rollout = Rollout(
    prompts=tuple(Prompt(i, np.arange(2 + p, dtype=np.int32), '', {}) for i, p in enumerate(PROMPTS)),
    completions=TOKEN[index].astype(np.int32),
    lengths=lengths,
    logprobs=log_probs['sampler'],
    behavior_logprobs=log_probs['sampler'] + np.float32(0.2),
    finished=finished,
    demonstration=np.arange(len(index)) % SIZE == SIZE - 1 if config.rl.expert else None,
  )
  graded = GradedRollout(
    rollout=rollout,
    rewards=rewards,
    baseline=GREEDY[PROMPTS],
    verdicts=rewards.reshape(-1, SIZE),
    components={'right': (1.0, rewards), 'other': (-0.4, other)},
    results=[],
    sampled=None,
    stats={},
    error='',
    tokenizer=None,
  )
  scores = Scores(
    old_logprobs=log_probs['old'],
    ref_logprobs=log_probs['reference'],
    entropy=np.float32(entropies(which['old'])),
    values=np.float32(values()),
  )
  return Controller.make_experience(types.SimpleNamespace(config=config, step=0, memory={}), graded, scores)


def values() -> np.ndarray:
  """[K * SIZE, C], of the state before each token."""
  return (_VALUES[STATE] * MASK)[_INDEX.reshape(-1)]


class Case(NamedTuple):
  """A config, and whether all policies are equal."""

  config: config_lib.Config
  on_policy: bool


@dataclasses.dataclass
class Update:
  """Gradient and metrics that jaxpost computes for a case.

  Attributes:
    gradient: by the logits, [states, SYMBOLS].
    metrics: metrics of the loss, summed over tokens.
    total: value of a metric that is 1 at every trained token.
  """

  gradient: np.ndarray
  metrics: dict[str, float]
  total: float
  credit: Credit


# Fields of `config.rl` that only `credit` reads; their effect is in the arrays, so cases may share a loss function.
_IN_CREDIT = {'advantage', 'scale_rewards', 'aggregate', 'dynamic_sampling', 'keep_surplus', 'replay', 'mask_truncated'}
_IN_CREDIT |= {'pass_k', 'minibatches', 'epochs', 'importance', 'sampling_mask', 'kl_target', 'clip_cov', 'cov_low'}
_IN_CREDIT |= {'cov_high', 'top_entropy', 'correct_nll_coef', 'reference', 'length_alpha', 'turn_gamma'}


def updates(cases: Sequence[Case]) -> list[Update]:
  """The updates of all cases; cases that share a loss function are computed together."""
  prepared = [_prepare(case) for case in cases]
  groups = collections.defaultdict(list)
  for i, ((config, _), (_, arrays, _)) in enumerate(zip(cases, prepared)):
    fields = {name: value for name, value in vars(config.rl).items() if name not in _IN_CREDIT}
    groups[repr((fields, 'opsm' in config.rl.importance, config.rollout.temperature, sorted(arrays)))].append(i)
  results = [None] * len(cases)
  for members in _chunks(groups.values(), 8):
    config = cases[members[0]].config
    weights, arrays = jax.tree.map(lambda *x: np.stack(x), *(prepared[i][1:][::-1] for i in members))
    present = [roles(*cases[i])['present'] for i in members]
    outputs = [np.stack([np.float32(f(name)) for name in present]) for f in (logprobs, entropies)]
    objective = algorithms.load_algorithm(config.algorithm).objective(config)
    metrics, gradients = _value_and_grad(objective, outputs, weights, arrays)
    for n, i in enumerate(members):
      results[i] = Update(
        gradient=of_logits(*(x[n] for x in gradients), present[n]),
        metrics={name: float(x[n]) for name, x in metrics.items()},
        total=float(weights[n].sum()),
        credit=prepared[i][0],
      )
  return results


def _chunks(lists: Iterable[Sequence[int]], size: int) -> Iterator[list[int]]:
  """The entries of each list in pieces of one size, which compile once; the last piece repeats its first entry."""
  for entries in lists:
    for start in range(0, len(entries), size):
      piece = list(entries[start : start + size])
      yield piece + piece[:1] * (size - len(piece))


def _prepare(case: Case) -> tuple[Credit, dict[str, np.ndarray], np.ndarray]:
  """(Credit, the arrays that the loss reads, weights of the tokens)."""
  config = case.config
  algorithm = algorithms.load_algorithm(config.algorithm)
  credit = algorithm.credit(experience(*case), config)
  read = algorithm.objective(config).arrays
  missing = set(read) - set(credit.arrays)
  assert not missing, f'the loss reads {missing}, which credit does not make'
  several_updates = config.rl.epochs * config.rl.minibatches > 1
  # In a rollout with one update, the old policy is the present one, even if an importance correction scores it.
  arrays = {name: np.asarray(credit.arrays[name]) for name in read if several_updates or name != 'old_logprobs'}
  return credit, arrays, batching.token_weights(credit.mask, config.rl.aggregate, C)


def _value_and_grad(objective: Objective, outputs: Sequence[np.ndarray], weights: np.ndarray, arrays: dict):
  """({metric: [n]}, derivatives by log-probs and entropies [n, K * SIZE, C]) of n cases."""
  ids = np.ones(weights.shape[1:], np.int32)

  def loss(logprobs, entropy, weights, arrays):
    outputs = Outputs(logprobs=logprobs, entropy=entropy)
    if objective.coupled:
      return objective.fn(outputs, Batch(ids, ids, ids, weights, sequence_ids=ids, arrays=arrays))
    value, metrics = objective.fn(outputs, arrays)
    return (weights * value).sum(), {name: (weights * x).sum() for name, x in metrics.items()}

  of_outputs = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, metrics), gradients = of_outputs(*outputs, weights, arrays)
  return jax.tree.map(np.asarray, (metrics, gradients))


def expected(config: config_lib.Config, on_policy: bool) -> np.ndarray:
  """The gradient [states, SYMBOLS] of the expected loss, by the formulas of the papers."""
  which = roles(config, on_policy)
  rewards, other, finished = (x.reshape(-1)[_INDEX] for x in (REWARDS, OTHER_REWARDS, FINISHED))
  groups = formulas.Groups(
    chance=np.full(len(DRAWS), 1 / len(DRAWS)),
    mask=MASK[_INDEX],
    finished=finished,
    rewards=rewards,
    **{name: logprobs(kind).reshape(len(DRAWS), SIZE, C) for name, kind in which.items()},
    entropy=entropies(which['old']).reshape(len(DRAWS), SIZE, C),
    values=values().reshape(len(DRAWS), SIZE, C),
    components={'right': (1.0, rewards), 'other': (-0.4, other)},
    greedy=GREEDY[PROMPTS],
    expert=np.arange(SIZE)[None].repeat(len(DRAWS), 0) == SIZE - 1 if config.rl.expert else None,
    draws=DRAWS.size,
  )
  # An adaptive bonus starts at `entropy_coef`, as the entropy is below the target of all these configs.
  parts = formulas.gradient(groups, config.rl, C, entropy_weight=config.rl.entropy_coef)
  return of_logits(*(x.reshape(-1, C) for x in parts), which['present'])


def of_logits(by_logprob: np.ndarray, by_entropy: np.ndarray, name: str) -> np.ndarray:
  """Derivatives by log-probs and entropies [K * SIZE, C] -> by logits [states, SYMBOLS] of a policy."""
  index = _INDEX.reshape(-1)
  state, token, mask = STATE[index], TOKEN[index], MASK[index]
  logp = policy(name)
  chance = np.exp(logp)
  by_logprob, by_entropy = np.asarray(by_logprob, np.float64) * mask, np.asarray(by_entropy, np.float64) * mask
  out = np.zeros(logp.shape)
  np.add.at(out, (state, token), by_logprob)
  totals = [np.bincount(state.ravel(), x.ravel(), len(out))[:, None] for x in (by_logprob, by_entropy)]
  entropy = -(chance * logp).sum(axis=1, keepdims=True)
  return out - totals[0] * chance - totals[1] * chance * (logp + entropy)
