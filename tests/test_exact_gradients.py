"""Policy gradients equal exact ones: every completion of a tiny policy, weighted by its probability.

The policy is a transformer with 4 symbols and completions of 2 tokens, so that all 16 completions, and all 256 groups
of two, can be listed. Their mean gradient through credit, packing, surrogate and accumulation must equal the gradient
of the expected reward or divergence, which is computed from the list. There is no sampling noise.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.algorithms import grpo
from jaxpost.losses import head_chunk
from jaxpost.models import model as model_lib
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout, RowShape

SYMBOLS = 4
PROMPT = np.array([2], np.int32)


def completions(length):
  return np.array(list(itertools.product(range(SYMBOLS), repeat=length)), np.int32)


def rewards_of(length, binary, seed=7):
  """Returns one reward for each completion, of a normal distribution or 0 and 1."""
  values = np.random.RandomState(seed).standard_normal(SYMBOLS**length)
  return (values > 0.3).astype(float) if binary else values


@functools.lru_cache
def model():
  return model_lib.build(tiny.config(num_layers=1, vocab_size=SYMBOLS))


@functools.lru_cache
def params(kind):
  """Returns the weights of the policy, or those of the sampler or the reference, which are near them."""
  base = tiny.params(model())
  if kind == 'policy':
    return base
  random = np.random.RandomState({'sampler': 1, 'reference': 2}[kind])
  return jax.tree.map(lambda x: x + 0.05 * random.standard_normal(x.shape).astype(np.float32), base)


def raw_logits(weights, length):
  """Returns logits [completions, length, SYMBOLS], differentiable by `weights`."""
  answers = completions(length)
  rows = np.concatenate([np.tile(PROMPT, (len(answers), 1)), answers], axis=1)
  hidden = tiny.hidden(model(), weights, rows)[:, :-1]
  return head_chunk.logits(hidden, model().head(weights), model().config.logit_form, 'float32')[..., :SYMBOLS]


def picked(logits, answers):
  """Returns the log-probs [completions, length] of the tokens of `answers`."""
  return jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], axis=-1)[..., 0]


def logprobs(weights, length):
  """Returns log-probs of tokens [completions, length], differentiable by `weights`."""
  return picked(raw_logits(weights, length), completions(length))


def config_of(algorithm, rl):
  parsed = config_lib.parse(dict(algorithm=algorithm, reward='x', rl=rl))
  return config_lib.resolve(next(iter(parsed.values())), algorithms.load_algorithm(algorithm).defaults)


def measured(algorithm, rl, *, length=2, size=2, binary=False, off_policy=False, components=None):
  """Returns the mean gradient over all groups, each weighted by its probability under the sampler."""
  config = config_of(algorithm, rl)
  answers, values = completions(length), rewards_of(length, binary)
  arrays = {kind: np.asarray(logprobs(params(kind), length)) for kind in ('policy', 'sampler', 'reference')}
  sampler = arrays['sampler' if off_policy else 'policy']
  groups = np.array(list(itertools.product(range(len(answers)), repeat=size)))
  probability = np.exp(sampler.sum(axis=1, dtype=np.float64))[groups].prod(axis=1)
  index = groups.reshape(-1)
  rollout = Rollout(
    prompts=tuple(Prompt(i, PROMPT, '', {}) for i in range(len(groups))),
    completions=answers[index],
    lengths=np.full(len(index), length),
    logprobs=sampler[index],
    behavior_logprobs=sampler[index],
    finished=np.ones(len(index), bool),
  )
  experience = Experience(
    rollout=rollout,
    rewards=values[index],
    mask=np.ones((len(index), length), np.float32),
    arrays=dict(
      sampler_logprobs=sampler[index], old_logprobs=arrays['policy'][index], ref_logprobs=arrays['reference'][index]
    ),
    baseline=np.full(len(groups), 0.4),
    verdicts=values[index],
    components={name: (weight, table[index]) for name, (weight, table) in (components or {}).items()},
  )
  credit = grpo.credit(experience, config)
  weights = batching.token_weights(credit.mask, config.rl.aggregate, length)
  weights = weights * np.repeat(probability * len(groups), size)[:, None]
  fit = 16  # sequences in a row
  rows = math.ceil(len(index) / fit)
  batch = batching.to_batch(
    rollout, range(len(index)), weights.astype(np.float32), credit.arrays, RowShape(rows, fit * (length + 1))
  )
  loss = programs.make_loss(model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  return jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(params('policy'), split)


@functools.lru_cache
def exact(name, length=2, binary=False):
  """Returns the gradient of an expectation under the policy, per token: divided by the length.

  'kl' is the divergence of completions, KL(policy, reference). 'kl_of_tokens' sums the divergences of next tokens, with
  prefixes drawn by the policy and not differentiated; 'reverse_kl_of_tokens' does so with KL(reference, policy), and
  'entropy_of_tokens' with the entropies of next tokens.
  """
  values = rewards_of(length, binary)
  reference = logprobs(params('reference'), length)
  probability = jnp.exp(logprobs(params('policy'), length))
  # One value for the prefix before each token, one for the tokens after it.
  prefix = jnp.cumprod(jnp.concatenate([jnp.ones((len(values), 1)), probability[:, :-1]], axis=1), axis=1)
  after = SYMBOLS ** (length - 1 - np.arange(length))  # completions that share prefix and token

  def expectation(weights):
    logp = logprobs(weights, length)
    of_completion = jnp.exp(logp.sum(axis=1))
    return {
      'reward': lambda: (of_completion * values).sum(),
      'second_reward': lambda: (of_completion * rewards_of(length, binary, seed=8)).sum(),
      'kl': lambda: (of_completion * (logp - reference).sum(axis=1)).sum(),
      'kl_of_tokens': lambda: (prefix * jnp.exp(logp) * (logp - reference) / after).sum(),
      'reverse_kl_of_tokens': lambda: (prefix * jnp.exp(reference) * (reference - logp) / after).sum(),
      'entropy_of_tokens': lambda: -(prefix * jnp.exp(logp) * logp / after).sum(),
      'nothing': lambda: 0.0 * logp.sum(),
    }[name]() / length

  return jax.grad(expectation)(params('policy'))


def close(actual, *terms):
  """Checks that a gradient is the sum of factor * gradient over `terms`."""
  expected = jax.tree.map(lambda *leaves: sum(f * x for (f, _), x in zip(terms, leaves)), *(g for _, g in terms))
  size = max(tiny.largest(x) for _, g in terms for x in jax.tree.leaves(g))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    assert tiny.largest(a - b) <= 2e-4 * size


@pytest.mark.parametrize('aggregate', ['token', 'sequence', 'constant'])
@pytest.mark.parametrize(
  'rl, factor',
  [
    (dict(advantage='leave_one_out'), 1),
    (dict(advantage='group', scale_rewards='none'), 1 / 2),  # the mean of two includes the sample itself
    (dict(advantage='opo'), 1 / 2),
    (dict(advantage='remax'), 1),
    (dict(advantage='gpg'), 1 / 2 * 256 / 240),  # 16 of 256 groups have one completion twice
  ],
  ids=lambda x: x['advantage'] if isinstance(x, dict) else '',
)
def test_estimators_have_the_gradient_of_the_reward(rl, factor, aggregate):
  close(measured('grpo', dict(rl, aggregate=aggregate)), (-factor, exact('reward')))


def test_maxrl_has_the_gradient_of_its_series():
  """With the mean as baseline, n samples give the sum over k < n of (1 - p)^(k - 1) grad p (arXiv:2602.02710)."""
  rewards = rewards_of(1, True)
  p = float((np.exp(np.asarray(logprobs(params('policy'), 1)).sum(axis=1)) * rewards).sum())
  assert 0.1 < p < 0.9
  gradient = measured('maxrl', {}, length=1, size=3, binary=True)
  close(gradient, (-(1 + (1 - p)), exact('reward', 1, True)))


def test_gdpo_has_the_gradient_of_the_weighted_rewards():
  """Each reward of a pair that differs becomes +-1 / sqrt(2), however large it is (arXiv:2601.05242)."""
  one, two = rewards_of(2, True), rewards_of(2, True, seed=8)
  assert not np.array_equal(one, two)
  gradient = measured('grpo', dict(advantage='gdpo'), components={'one': (1.0, 50 * one), 'two': (-0.4, two)})
  # The advantages are whitened by the std over all 256 pairs; for either reward, the sign is that of x_i - x_j.
  total = sum(w * (x[:, None] - x[None]) for w, x in ((1.0, one), (-0.4, two))) / np.sqrt(2)
  scale = 1 / np.stack([total, -total]).std(ddof=1) / np.sqrt(2)
  close(gradient, (-scale, exact('reward', 2, True)), (0.4 * scale, exact('second_reward', 2, True)))


@pytest.mark.parametrize(
  'estimator, divergence',
  [
    ('k1', 'nothing'),
    ('k2', 'kl_of_tokens'),
    ('k3', 'reverse_kl_of_tokens'),
    ('k1+', 'kl_of_tokens'),
    ('k3+', 'kl_of_tokens'),
  ],
)
def test_kl_in_the_loss_has_the_gradient_of_its_divergence(estimator, divergence):
  """arXiv:2512.21852, table 1; k3 in the loss has the gradient of KL(reference, policy)."""
  rl = dict(advantage='leave_one_out', kl_coef=2.0, kl_estimator=estimator)
  close(measured('grpo', rl), (-1, exact('reward')), (2, exact(divergence)))


@pytest.mark.parametrize('estimator', ['k1', 'k3'])
def test_weighted_kl_in_the_loss_is_exact(estimator):
  """The ratio as weight makes k1 and k3 exact (DeepSeek-V3.2, arXiv:2512.02556, section 3.1)."""
  rl = dict(advantage='leave_one_out', kl_coef=2.0, kl_estimator=estimator, kl_weighted=True)
  close(measured('grpo', rl), (-1, exact('reward')), (2, exact('kl_of_tokens')))


@pytest.mark.parametrize('estimator', ['k1', 'k3'])
def test_weighted_kl_is_exact_off_policy(estimator):
  rl = dict(advantage='leave_one_out', kl_coef=2.0, kl_estimator=estimator, kl_weighted=True, old_policy='sampler')
  rl |= dict(clip_low=0.99, clip_high=99.0)
  gradient = measured('grpo', rl, length=1, off_policy=True)
  close(gradient, (-1, exact('reward', 1)), (2, exact('kl', 1)))


@pytest.mark.parametrize('target', [0.0, 99.0], ids=['fixed', 'adaptive'])
def test_entropy_bonus_has_the_gradient_of_the_entropy(target):
  rl = dict(advantage='leave_one_out', entropy_coef=2.0, entropy_target=target)
  close(measured('grpo', rl), (-1, exact('reward')), (-2, exact('entropy_of_tokens')))


def test_nll_of_right_answers_has_the_gradient_of_the_pass_rate():
  """VAPO: for rewards of 0 and 1, the gradient is that of the pass rate over the share of right answers."""
  share_right = rewards_of(2, True).mean()
  assert 0 < share_right < 1
  gradient = measured('grpo', dict(advantage='leave_one_out', correct_nll_coef=0.1), binary=True)
  close(gradient, (-(1 + 0.1 / share_right), exact('reward', 2, True)))


def test_kl_in_the_reward_has_the_gradient_of_the_kl_of_completions():
  rl = dict(advantage='leave_one_out', kl_coef=2.0, kl_in='reward')
  close(measured('grpo', rl), (-1, exact('reward')), (2, exact('kl')))


def test_kl_in_the_advantage_has_the_gradient_of_the_kl_of_tokens():
  """On-policy distillation: the divergence of next tokens from a teacher, beside the reward."""
  rl = dict(advantage='leave_one_out', kl_coef=2.0, kl_in='advantage')
  close(measured('grpo', rl), (-1, exact('reward')), (2, exact('kl_of_tokens')))


def test_sequence_weights_correct_samples_of_an_older_policy():
  rl = dict(loss='reinforce', advantage='leave_one_out', importance=('sequence_truncated',), importance_cap=1e6)
  close(measured('grpo', rl, off_policy=True), (-1, exact('reward')))
  with pytest.raises(AssertionError):
    close(measured('grpo', rl | dict(importance=()), off_policy=True), (-1, exact('reward')))
