"""All pairs of choices of the method fields: each runs as it should, or is refused with one line.

`tests/test_combinations.py` holds the invariants; `docs/make_combinations_table.py`
writes the pairs that are refused into docs/combinations.md.
"""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxpost.algorithms import grpo
from jaxpost.errors import InputError
from jaxpost.losses import advantages, importance, policy_gradient
from jaxpost.rl import batching
from jaxpost.stage import algorithms, sampling_inputs
from jaxpost.stage import config as config_lib
from jaxpost.types import Batch, Experience, Outputs, Prompt, Rollout

GROUPS, SIZE, C = 3, 4, 5
_KL = dict(kl_coef=0.1)
_PASS_K = {'pass_at_k': 2}
# Field -> {choice: what it sets}. A default of GRPO is a choice, too.
FIELDS = {
  'rl.loss': {name: dict(rl=dict(loss=name)) for name in policy_gradient.LOSSES},
  'rl.advantage': {
    name: dict(rl=dict(advantage=name, pass_k=_PASS_K.get(name, 4)), environment='x' if 'sampled' in e.takes else '')
    for name, e in advantages.ESTIMATORS.items()
  },
  'rl.aggregate': {name: dict(rl=dict(aggregate=name)) for name in ('token', 'sequence', 'constant')},
  'rl.scale_rewards': {name: dict(rl=dict(scale_rewards=name)) for name in ('group', 'batch', 'none', 'leave_one_out')},
  'KL': {
    'none': {},
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
    '0': {},
    '2': dict(rl=dict(dynamic_sampling=2)),
    '2, rl.keep_surplus': dict(rl=dict(dynamic_sampling=2, keep_surplus=1)),
  },
  'entropy control': {
    'none': {},
    'rl.clip_cov': dict(rl=dict(clip_cov=0.05, cov_low=90.0, cov_high=99.0)),  # which no token has
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
CHOICES = [(field, choice) for field, choices in FIELDS.items() for choice in choices]


def pairs() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
  """All pairs of choices of two fields."""
  for one, two in itertools.combinations(CHOICES, 2):
    if one[0] != two[0]:
      yield one, two


def config_of(*chosen: tuple[str, str]) -> config_lib.Config:
  """The config of GRPO with these choices, resolved and checked; InputError where they are refused."""
  over = dict(algorithm='grpo', reward='x', rollout=dict(group_size=SIZE))
  for field, choice in chosen:
    over = tiny.merged(over, FIELDS[field][choice])
  algorithm = algorithms.load_algorithm('grpo')
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), algorithm.defaults)
  sampling_inputs.check_sampling(config, on_policy=True)
  algorithm.check(config)
  return config


def refusal(*chosen: tuple[str, str]) -> str:
  """Why the choices are refused, or ''."""
  try:
    config_of(*chosen)
  except InputError as error:
    return str(error)
  return ''


def experience() -> Experience:
  """A rollout of the present policy: old policy, sampler and reference are the same.

  Rewards are 0 or 1, which all estimators take. The log-probs of the distribution
  that top-p leaves are others.
  """
  random = np.random.RandomState(0)
  size = GROUPS * SIZE
  lengths = random.randint(2, C + 1, size)
  logprobs = np.log(random.uniform(0.2, 0.9, (size, C))).astype(np.float32)
  rollout = Rollout(
    prompts=tuple(Prompt(i, np.arange(2 + i, dtype=np.int32), '', {}) for i in range(GROUPS)),
    completions=np.zeros((size, C), np.int32),
    lengths=lengths,
    logprobs=logprobs,
    behavior_logprobs=logprobs + 0.2,
    finished=lengths < C,
    expert=np.arange(size) % SIZE == SIZE - 1,  # read with rl.expert
  )
  rewards = np.tile([1.0, 0, 0, 1], GROUPS)
  rewards[:SIZE] = [0, 0, 1, 0]
  scores = ('sampler_logprobs', 'old_logprobs', 'ref_logprobs')
  return Experience(
    rollout=rollout,
    rewards=rewards,
    mask=batching.completion_mask(rollout),
    arrays={name: logprobs for name in scores} | {'entropy': -logprobs},
    baseline=np.full(GROUPS, 0.25),
    verdicts=rewards,
    components={'right': (1.0, rewards), 'wrong': (-0.5, 1 - rewards)},
  )


def update(config: config_lib.Config, given: Experience):
  """(gradient of the log-probs, the one that the advantages ask for, metrics of the loss [N, C], Credit)."""
  credit = grpo.credit(given, config)
  weights = jnp.asarray(batching.token_weights(credit.mask, config.rl.aggregate, C))
  objective = grpo.objective(config)
  missing = set(objective.arrays) - set(credit.arrays)
  assert not missing, f'the loss reads {missing}, which credit does not make'
  arrays = {name: jnp.asarray(x) for name, x in credit.arrays.items()}
  ids = np.broadcast_to(np.ones(C, np.int32), weights.shape)
  batch = Batch(ids, ids, ids, weights, sequence_ids=ids, arrays=arrays)
  entropy = jnp.full(weights.shape, 0.5)

  def loss(logprobs):
    outputs = Outputs(logprobs=logprobs, entropy=entropy)
    if objective.coupled:
      return objective.fn(outputs, batch)
    value, metrics = objective.fn(outputs, arrays)
    return (weights * value).sum(), {name: (weights * x).sum() for name, x in metrics.items()}

  (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(given.arrays['sampler_logprobs']))
  chance, gamma = np.exp(given.arrays['sampler_logprobs']), config.rl.expert_gamma
  shaped = np.where(credit.arrays.get('expert', 0), gamma * chance / (chance + gamma) ** 2, 1)
  wanted = arrays['advantages'] * shaped + arrays.get('nll_weights', 0)
  return np.asarray(gradient), np.asarray(-weights * wanted), metrics, credit


def total_weight(config: config_lib.Config, credit) -> float:
  """Returns the sum of a metric that is 1 at every trained token."""
  return float(batching.token_weights(credit.mask, config.rl.aggregate, C).sum())
