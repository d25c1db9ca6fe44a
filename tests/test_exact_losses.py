"""Expected gradients of preference losses and PPO, on the policy of test_exact_gradients.py.

All 16 completions of 2 tokens and all 256 pairs of them are listed, each with its
probability. The formulas here are written down from the papers, and share no code with
`jaxpost.losses`. Gradients are those of the log-probs of all completions, or, through model
and accumulation, those of the weights.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_gradients as exact
import tiny

from jaxpost.algorithms import ppo
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Batch, Experience, Outputs, Prompt, Rollout

LENGTH, BETA = 2, 0.7
COUNT = exact.SYMBOLS**LENGTH
FIRST, SECOND = (x.reshape(-1) for x in np.indices((COUNT, COUNT)))  # the answers of each pair


def config_of(algorithm, **preference):
  over = dict(algorithm=algorithm, preference=preference, model=dict(dtype='float32'))
  found = algorithms.load_algorithm(algorithm)
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), found.defaults)
  found.check(config)
  return found, config


@functools.lru_cache
def logps(kind):
  """[16, 2] float64."""
  return np.asarray(exact.logprobs(exact.params(kind), LENGTH), np.float64)


def chance():
  """Returns the probability of each completion under the policy, [16]."""
  return np.exp(logps('policy').sum(axis=1))


def gradient(algorithm, config, batch):
  """Returns the gradient of the weights, as an update computes it."""
  loss = programs.make_loss(exact.model(), algorithm.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  return jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), split)


def gradient_of_logprobs(algorithm, config, batch, answers):
  """Returns that of the log-probs of all completions [16, 2]; `answers` [rows, sequences] are those of the batch."""
  fn = algorithm.objective(config).fn

  def loss(table):
    logprobs = jnp.pad(table[answers.ravel()], ((0, 0), (1, 0))).reshape(batch.tokens.shape)
    return fn(Outputs(logprobs=logprobs, entropy=jnp.ones_like(logprobs)), batch)[0]

  return jax.grad(loss)(jnp.asarray(logps('policy'), jnp.float32))


def rows_of(answers, weights, **arrays):
  """A batch with one row for each entry of `answers` [rows, sequences], and [rows] weights."""
  rows, sequences = answers.shape
  one = np.concatenate(
    [np.broadcast_to(exact.PROMPT, (rows * sequences, 1)), exact.completions(LENGTH)[answers.ravel()]], axis=1
  )
  shape = (rows, sequences * (LENGTH + 1))
  number = np.repeat(np.arange(1, sequences + 1), LENGTH + 1)[None].repeat(rows, axis=0)
  trained = np.tile([0, *[1] * LENGTH], (rows, sequences))

  def padded(x):
    """[16, LENGTH] of completions -> [rows, tokens]."""
    return np.pad(x[answers.ravel()], ((0, 0), (1, 0))).reshape(shape).astype(np.float32)

  found = {name: padded(x) if np.shape(x) == (COUNT, LENGTH) else np.float32(x * trained) for name, x in arrays.items()}
  return Batch(
    one.reshape(shape).astype(np.int32),
    np.tile(np.arange(LENGTH + 1), (rows, sequences)).astype(np.int32),
    number.astype(np.int32),
    (trained * np.asarray(weights)[:, None]).astype(np.float32),
    sequence_ids=(number * trained).astype(np.int32),
    arrays=found,
  )


def of_pairs(labels, nll=None, algorithm='dpo', **preference):
  """The gradient of the mean loss over pairs of samples of the policy.

  Args:
    labels: [256], the chance that the first is chosen.
  """
  found, config = config_of(algorithm, **{'beta': BETA, **preference})
  answers = np.stack([FIRST, SECOND], axis=1)
  batch = rows_of(answers, chance()[FIRST] * chance()[SECOND] * labels, ref_logprobs=logps('reference'))
  first = (batch.sequence_ids == 1) * (np.zeros(len(labels)) if nll is None else nll)[:, None]
  batch = batch.replace(arrays=batch.arrays | {'nll_weights': np.float32(first)})
  return gradient_of_logprobs(found, config, batch, answers)


def dense(formula, weights):
  """The gradient of sum(weights * formula(c, r, chosen, rejected)), c and r the log-ratios of both answers [256]."""

  def total(logprobs):
    logp = logprobs.sum(axis=1)
    ratio = logp - logps('reference').sum(axis=1)
    return (weights * formula(ratio[FIRST], ratio[SECOND], logp[FIRST], logp[SECOND])).sum()

  return jax.grad(total)(jnp.asarray(logps('policy'), jnp.float32))


def bradley_terry(values):
  return 1 / (1 + np.exp(-(values[FIRST] - values[SECOND])))


def test_the_nll_of_chosen_answers():
  labels = bradley_terry(exact.rewards_of(LENGTH, False))
  weights = chance()[FIRST] * chance()[SECOND] * labels
  found, without = (of_pairs(labels, nll=nll, algorithm='orpo') for nll in (weights, None))
  exact.close(found, (1, without), (1, dense(lambda c, r, yw, yl: -yw, weights)))
  exact.close(of_pairs(labels, nll=weights, losses=('sft',)), (1, dense(lambda c, r, yw, yl: -yw, weights)))


@pytest.mark.parametrize('name, more', [('sigmoid', {}), ('ipo', dict(ipo_average=False, beta=0.1))])
def test_nothing_is_learned_at_the_optimum(name, more):
  """DPO: labels of the rewards beta log(pi / ref). IPO: preferences 1/2 + beta (difference of the log-ratios)."""
  ratio = (logps('policy') - logps('reference')).sum(axis=1)
  labels = bradley_terry(BETA * ratio) if name == 'sigmoid' else 1 / 2 + 0.1 * (ratio[FIRST] - ratio[SECOND])
  assert 0 < labels.min() < 0.4 and 0.6 < labels.max() < 1
  size = tiny.largest(of_pairs(np.full(len(labels), 0.5), losses=(name,), **more))
  assert tiny.largest(of_pairs(labels, losses=(name,), **more)) < 1e-3 * size


def test_robust_dpo_sees_through_flipped_labels():
  """arXiv:2403.00409: with a share of the labels flipped, its gradient is that of DPO with the right ones."""
  labels, flipped = bradley_terry(exact.rewards_of(LENGTH, False)), 0.2
  noisy = (1 - flipped) * labels + flipped * (1 - labels)
  clean = of_pairs(labels, losses=('sigmoid',))
  exact.close(of_pairs(noisy, losses=('robust',), label_smoothing=flipped), (1, clean))
  with pytest.raises(AssertionError):
    exact.close(of_pairs(noisy, losses=('sigmoid',)), (1, clean))


def states():
  """Values of the policy before each token [16, 2]: the expected reward given the tokens before it."""
  weights, rewards = chance(), exact.rewards_of(LENGTH, False)
  given_first = (weights * rewards).reshape(exact.SYMBOLS, -1).sum(axis=1) / weights.reshape(exact.SYMBOLS, -1).sum(
    axis=1
  )
  return np.stack([np.full(COUNT, weights @ rewards), np.repeat(given_first, exact.SYMBOLS)], axis=1)


def of_ppo(values, **rl):
  """(the mean gradient of the policy, the std that whitens the advantages, Credit, config)."""
  config = exact.config_of('ppo', dict(aggregate='token', **rl))
  ppo.check(config)
  logprobs = logps('policy').astype(np.float32)
  rollout = Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}) for i in range(COUNT)),
    completions=exact.completions(LENGTH),
    lengths=np.full(COUNT, LENGTH),
    logprobs=logprobs,
    behavior_logprobs=logprobs,
    finished=np.ones(COUNT, bool),
  )
  arrays = dict(sampler_logprobs=logprobs, old_logprobs=logprobs, values=np.float32(values))
  rewards = exact.rewards_of(LENGTH, False)
  credit = ppo.credit(
    Experience(rollout, rewards, np.ones((COUNT, LENGTH), np.float32), arrays, verdicts=rewards), config
  )
  weights = batching.token_weights(credit.mask, 'token', LENGTH) * (chance() * COUNT)[:, None]
  names = ppo.objective(config).arrays
  batch = batching.to_batch(
    rollout, range(COUNT), np.float32(weights), {k: credit.arrays[k] for k in names}, COUNT, row_length=LENGTH + 1
  )
  following = np.concatenate([values[:, 1:], rewards[:, None]], axis=1)
  raw = following - values
  raw[:, 0] += config.rl.lam * raw[:, 1]
  return gradient(ppo.PPO, config, batch), raw.std(ddof=1), credit, config


@pytest.mark.parametrize('lam', [1.0, 0.5])
def test_ppo_has_the_gradient_of_the_reward(lam):
  """GAE is unbiased with lambda 1 and any values, or with the true values and any lambda (arXiv:1506.02438)."""
  other = states() + np.array([[0.3, 0]]) + np.where(np.arange(COUNT) < 8, 0.5, -0.5)[:, None] * [[0, 1]]
  found, std, *_ = of_ppo(other if lam == 1 else states(), lam=lam)
  exact.close(found, (-1 / std, exact.exact('reward')))
  if lam < 1:
    found, std, *_ = of_ppo(other, lam=lam)
    with pytest.raises(AssertionError):
      exact.close(found, (-1 / std, exact.exact('reward')))


def test_the_critic_learns_the_expected_reward():
  """The gradient of the expected value loss, by state, is 0 at the true values and p (V - true value) elsewhere."""
  true = states()
  state = np.stack([np.zeros(COUNT, int), 1 + np.arange(COUNT) // exact.SYMBOLS], axis=1)
  _, _, credit, config = of_ppo(true, lam=1.0)
  objective = ppo.value_objective(config)
  shape = (COUNT, LENGTH + 1)
  weights = np.zeros(shape, np.float32)
  weights[:, 1:] = chance()[:, None]
  padded = {name: np.pad(credit.arrays[name], ((0, 0), (1, 0))) for name in ('values', 'returns')}
  batch = Batch(None, None, None, weights, sequence_ids=weights > 0, arrays=padded)

  def loss(table):
    # A value stands at the token before: the state in which the next one is drawn.
    return objective.fn(Outputs(values=jnp.pad(table[state], ((0, 0), (0, 1)))), batch)[0]

  table = np.zeros(1 + exact.SYMBOLS)
  table[state] = true
  of_state = np.zeros(len(table))
  np.add.at(of_state, state, chance()[:, None])
  np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(table, jnp.float32)), 0 * table, atol=1e-6)
  moved = table + np.array([0.05, -0.1, 0.1, 0.02, -0.05])  # less than critic.value_clip
  np.testing.assert_allclose(
    jax.grad(loss)(jnp.asarray(moved, jnp.float32)), of_state * (moved - table), rtol=1e-4, atol=1e-6
  )
