"""Tests of the expected gradients of preference losses and PPO, with the policy of test_exact_gradients.py.

All 16 completions of 2 tokens and all 256 pairs of them are enumerated, each with its
probability. The formulas here are written from the papers, and share no code with
`jaxpost.losses`. Gradients are those of the log-probs of all completions, or, computed
through model and accumulation, those of the weights.
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
from jaxpost.types import Batch, Experience, Outputs, Prompt, Rollout, RowShape

LENGTH, BETA = 2, 0.7
COUNT = exact.SYMBOLS**LENGTH
FIRST, SECOND = (x.reshape(-1) for x in np.indices((COUNT, COUNT)))  # the completions of each pair


def config_of(algorithm, **preference):
  over = dict(algorithm=algorithm, preference=preference, model=dict(dtype='float32'))
  method = algorithms.load_algorithm(algorithm)
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults)
  method.check(config)
  return method, config


@functools.lru_cache
def logps(kind):
  """Returns the log-probs of all completions, [16, 2] float64."""
  return np.asarray(exact.logprobs(exact.params(kind), LENGTH), np.float64)


def probabilities():
  """Returns the probability of each completion under the policy, [16]."""
  return np.exp(logps('policy').sum(axis=1))


def gradient(algorithm, config, batch):
  """Returns the gradient of the weights, as an update computes it."""
  loss = programs.make_loss(exact.model(), algorithm.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  return jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), split)


def gradient_of_logprobs(algorithm, config, batch, answers):
  """Returns the gradient of the log-probs [16, 2] of all completions. The batch has `answers` [rows, sequences]."""
  fn = algorithm.objective(config).fn

  def loss(table):
    logprobs = jnp.pad(table[answers.ravel()], ((0, 0), (1, 0))).reshape(batch.tokens.shape)
    return fn(Outputs(logprobs=logprobs, entropy=jnp.ones_like(logprobs)), batch)[0]

  return jax.grad(loss)(jnp.asarray(logps('policy'), jnp.float32))


def rows_of(answers, weights, **arrays):
  """Returns a batch with one row for each entry of `answers` [rows, sequences], and `weights` [rows]."""
  rows, sequences = answers.shape
  tokens = np.concatenate(
    [np.broadcast_to(exact.PROMPT, (rows * sequences, 1)), exact.completions(LENGTH)[answers.ravel()]], axis=1
  )
  shape = (rows, sequences * (LENGTH + 1))
  segments = np.repeat(np.arange(1, sequences + 1), LENGTH + 1)[None].repeat(rows, axis=0)
  is_trained = np.tile([0, *[1] * LENGTH], (rows, sequences))

  def padded(x):
    """Pads [16, LENGTH] of completions to [rows, tokens]."""
    return np.pad(x[answers.ravel()], ((0, 0), (1, 0))).reshape(shape).astype(np.float32)

  batch_arrays = {
    name: padded(x) if np.shape(x) == (COUNT, LENGTH) else np.float32(x * is_trained) for name, x in arrays.items()
  }
  return Batch(
    tokens.reshape(shape).astype(np.int32),
    np.tile(np.arange(LENGTH + 1), (rows, sequences)).astype(np.int32),
    segments.astype(np.int32),
    (is_trained * np.asarray(weights)[:, None]).astype(np.float32),
    sequence_ids=(segments * is_trained).astype(np.int32),
    arrays=batch_arrays,
  )


def pair_gradient(labels, nll=None, algorithm='dpo', **preference):
  """Returns the gradient of the mean loss over pairs of samples of the policy.

  Args:
    labels: [256], the probability that the first completion is chosen.
  """
  method, config = config_of(algorithm, **{'beta': BETA, **preference})
  answers = np.stack([FIRST, SECOND], axis=1)
  batch = rows_of(answers, probabilities()[FIRST] * probabilities()[SECOND] * labels, ref_logprobs=logps('reference'))
  nll_weights = (batch.sequence_ids == 1) * (np.zeros(len(labels)) if nll is None else nll)[:, None]
  batch = batch.replace(arrays=batch.arrays | {'nll_weights': np.float32(nll_weights)})
  return gradient_of_logprobs(method, config, batch, answers)


def formula_gradient(formula, weights):
  """Returns the gradient of sum(weights * formula(c, r, chosen, rejected)), with c and r the log-ratios [256]."""

  def total(logprobs):
    logp = logprobs.sum(axis=1)
    ratio = logp - logps('reference').sum(axis=1)
    return (weights * formula(ratio[FIRST], ratio[SECOND], logp[FIRST], logp[SECOND])).sum()

  return jax.grad(total)(jnp.asarray(logps('policy'), jnp.float32))


def bradley_terry(values):
  return 1 / (1 + np.exp(-(values[FIRST] - values[SECOND])))


def test_nll_gradient_is_that_of_chosen_answers():
  labels = bradley_terry(exact.rewards_of(LENGTH, False))
  weights = probabilities()[FIRST] * probabilities()[SECOND] * labels
  with_nll, without_nll = (pair_gradient(labels, nll=nll, algorithm='orpo') for nll in (weights, None))
  exact.close(with_nll, (1, without_nll), (1, formula_gradient(lambda c, r, yw, yl: -yw, weights)))
  exact.close(
    pair_gradient(labels, nll=weights, losses=('sft',)), (1, formula_gradient(lambda c, r, yw, yl: -yw, weights))
  )


@pytest.mark.parametrize('name, more', [('sigmoid', {}), ('ipo', dict(ipo_average=False, beta=0.1))])
def test_gradient_is_zero_at_the_optimum(name, more):
  """DPO: labels of the rewards beta log(pi / ref). IPO: preferences 1/2 + beta (difference of the log-ratios)."""
  ratio = (logps('policy') - logps('reference')).sum(axis=1)
  labels = bradley_terry(BETA * ratio) if name == 'sigmoid' else 1 / 2 + 0.1 * (ratio[FIRST] - ratio[SECOND])
  assert 0 < labels.min() < 0.4 and 0.6 < labels.max() < 1
  size = tiny.largest(pair_gradient(np.full(len(labels), 0.5), losses=(name,), **more))
  assert tiny.largest(pair_gradient(labels, losses=(name,), **more)) < 1e-3 * size


def test_robust_dpo_with_flipped_labels_has_the_gradient_of_right_labels():
  """With a share of the labels flipped, its gradient is that of DPO with the right labels (arXiv:2403.00409)."""
  labels, flipped = bradley_terry(exact.rewards_of(LENGTH, False)), 0.2
  noisy = (1 - flipped) * labels + flipped * (1 - labels)
  clean = pair_gradient(labels, losses=('sigmoid',))
  exact.close(pair_gradient(noisy, losses=('robust',), label_smoothing=flipped), (1, clean))
  with pytest.raises(AssertionError):
    exact.close(pair_gradient(noisy, losses=('sigmoid',)), (1, clean))


def true_values():
  """Returns the values of the policy before each token, [16, 2]: the expected reward given the tokens before it."""
  weights, rewards = probabilities(), exact.rewards_of(LENGTH, False)
  of_first = weights.reshape(exact.SYMBOLS, -1)
  given_first = (weights * rewards).reshape(exact.SYMBOLS, -1).sum(axis=1) / of_first.sum(axis=1)
  return np.stack([np.full(COUNT, weights @ rewards), np.repeat(given_first, exact.SYMBOLS)], axis=1)


def ppo_gradient(values, **rl):
  """Returns the mean gradient of the policy, the std that whitens the advantages, the Credit, and the config."""
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
  weights = batching.token_weights(credit.mask, 'token', LENGTH) * (probabilities() * COUNT)[:, None]
  names = ppo.objective(config).arrays
  batch = batching.to_batch(
    rollout, range(COUNT), np.float32(weights), {k: credit.arrays[k] for k in names}, RowShape(COUNT, LENGTH + 1)
  )
  next_values = np.concatenate([values[:, 1:], rewards[:, None]], axis=1)
  unwhitened = next_values - values
  unwhitened[:, 0] += config.rl.lam * unwhitened[:, 1]
  return gradient(ppo.PPO, config, batch), unwhitened.std(ddof=1), credit, config


@pytest.mark.parametrize('lam', [1.0, 0.5])
def test_ppo_has_the_gradient_of_the_reward(lam):
  """GAE is unbiased with lambda 1 and any values, or with the true values and any lambda (arXiv:1506.02438)."""
  wrong_values = true_values() + np.array([[0.3, 0]]) + np.where(np.arange(COUNT) < 8, 0.5, -0.5)[:, None] * [[0, 1]]
  actual, std, *_ = ppo_gradient(wrong_values if lam == 1 else true_values(), lam=lam)
  exact.close(actual, (-1 / std, exact.exact('reward')))
  if lam < 1:
    actual, std, *_ = ppo_gradient(wrong_values, lam=lam)
    with pytest.raises(AssertionError):
      exact.close(actual, (-1 / std, exact.exact('reward')))


def test_value_loss_gradient_is_zero_at_the_expected_reward():
  """The gradient of the expected value loss, by state, is 0 at the true values and p (V - true value) elsewhere."""
  values = true_values()
  state = np.stack([np.zeros(COUNT, int), 1 + np.arange(COUNT) // exact.SYMBOLS], axis=1)
  _, _, credit, config = ppo_gradient(values, lam=1.0)
  objective = ppo.value_objective(config)
  shape = (COUNT, LENGTH + 1)
  weights = np.zeros(shape, np.float32)
  weights[:, 1:] = probabilities()[:, None]
  padded = {name: np.pad(credit.arrays[name], ((0, 0), (1, 0))) for name in ('values', 'returns')}
  batch = Batch(None, None, None, weights, sequence_ids=weights > 0, arrays=padded)

  def loss(table):
    # The value of a state is at its last token, before the next token is drawn.
    return objective.fn(Outputs(values=jnp.pad(table[state], ((0, 0), (0, 1)))), batch)[0]

  table = np.zeros(1 + exact.SYMBOLS)
  table[state] = values
  state_prob = np.zeros(len(table))
  np.add.at(state_prob, state, probabilities()[:, None])
  np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(table, jnp.float32)), 0 * table, atol=1e-6)
  moved = table + np.array([0.05, -0.1, 0.1, 0.02, -0.05])  # less than critic.value_clip
  np.testing.assert_allclose(
    jax.grad(loss)(jnp.asarray(moved, jnp.float32)), state_prob * (moved - table), rtol=1e-4, atol=1e-6
  )
