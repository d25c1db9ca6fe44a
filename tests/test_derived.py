"""Methods without reference values from another library, against values derived from the formulas of their papers.

tests/golden/derive.py holds the derivations, and says how to write tests/golden/derived.json.
"""

import json
import pathlib
import re
import runpy
import types

import golden_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost.algorithms import distill, ppo, teachers
from jaxpost.losses import entropy_control, group_advantages, surrogates, turn_advantages
from jaxpost.stage import config as config_lib
from jaxpost.stage import moving_reference
from jaxpost.types import Experience, Prompt, Rollout

GOLDEN = pathlib.Path(__file__).parent / 'golden'
DERIVED = json.loads((GOLDEN / 'derived.json').read_text('utf-8'))
derive = runpy.run_path(str(GOLDEN / 'derive.py'))

STATES = {'': [], 'hall': [7, 7], 'door': [8], 'lake': [7, 8]}  # observation: its tokens


def test_derived_json_is_up_to_date():
  assert json.loads(json.dumps(derive['figures']())) == DERIVED


def episodes():
  """Returns the episodes of derive.py, with turns of two tokens between observations.

  They are (rewards [2, 3], turn_rewards [6, 20], sampled [6, 20], completions [6, 20]).
  """
  all_episodes = [episode for group in derive['EPISODES'] for episode in group]
  tokens, sampled, turn_rewards = (np.zeros((len(all_episodes), 20)) for _ in range(3))
  for n, (turns, _) in enumerate(all_episodes):
    length = 0
    for observation, reward in turns:
      observed = STATES[observation]
      tokens[n, length : length + len(observed)] = observed
      length += len(observed) + 2
      tokens[n, length - 2 : length] = n, length  # tokens of the policy, which are not part of the state
      sampled[n, length - 2 : length] = 1
      turn_rewards[n, length - 1] = reward
  rewards = [outcome + sum(reward for _, reward in turns) for turns, outcome in all_episodes]
  return np.array(rewards).reshape(2, 3), turn_rewards, sampled, tokens.astype(np.int32)


def expected(case, sampled):
  """Returns the derived value of each turn, at the tokens that the policy sampled in it."""
  values = np.zeros(sampled.shape)
  for n, value_of_turns in enumerate(DERIVED[case]):
    (places,) = np.nonzero(sampled[n])
    values[n, places] = np.repeat(value_of_turns, 2)
  return values


@pytest.mark.parametrize(
  'case, options', [('gamma1/group', {}), ('gamma0.5/none', dict(gamma=0.5, scale='none'))], ids=['default', 'options']
)
def test_mt_grpo_advantages_match_the_derivation(case, options):
  rewards, turn_rewards, sampled, _ = episodes()
  ours = turn_advantages.mt_grpo(rewards, np.ones((2, 3), bool), turn_rewards, sampled, **options)
  np.testing.assert_allclose(ours, expected(f'mt_grpo/{case}', sampled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'case, options',
  [('gamma0.95/group', {}), ('gamma0.9/weight0.5/none', dict(gamma=0.9, weight=0.5, scale='none'))],
  ids=['default', 'options'],
)
def test_gigpo_advantages_match_the_derivation(case, options):
  rewards, turn_rewards, sampled, tokens = episodes()
  ours = turn_advantages.gigpo(rewards, np.ones((2, 3), bool), turn_rewards, sampled, tokens, **options)
  np.testing.assert_allclose(ours, expected(f'gigpo/{case}', sampled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('gamma', [0.1, 0.5])
def test_luffy_loss_and_gradient_match_the_derivation(gamma):
  probs, advantages = (jnp.array(x, jnp.float32) for x in zip(*derive['LUFFY']))
  expected = np.array(DERIVED[f'luffy/gamma{gamma}'])
  loss, slope = jax.jvp(lambda logp: surrogates.expert(logp, advantages, gamma), (jnp.log(probs),), (jnp.ones(6),))
  np.testing.assert_allclose(loss, expected[:, 0], rtol=1e-5)
  np.testing.assert_allclose(slope, expected[:, 1], rtol=1e-5)


def close(ours, derived):
  np.testing.assert_allclose(ours, derived, rtol=1e-5, atol=1e-6)


def with_lost_samples(groups, *more):
  """Returns groups [N, G + 1] with one sample more, which has no reward; valid; and `more` arrays, widened alike."""
  groups, *more = (np.insert(np.array(x, np.float64), 1, 7.0, axis=1) for x in (groups, *more))
  valid = np.ones(groups.shape, bool)
  valid[:, 1] = False
  groups[:, 1] = np.nan
  return groups, valid, *more


def without_lost_samples(advantages):
  """Returns the advantages without those of the samples that `with_lost_samples` added, which must be 0."""
  assert not advantages[:, 1].any()
  return np.delete(advantages, 1, axis=1)


@pytest.mark.parametrize('lost', [False, True], ids=['all have rewards', 'one has none'])
@pytest.mark.parametrize('case', ['maxrl', 'pass_at_k/k1', 'pass_at_k/k2', 'pass_at_k/k3', 'opo', 'gdpo'])
def test_group_advantages_match_the_derivation(case, lost):
  """Advantages of samples with rewards do not depend on a sample that has none."""
  method, _, k = case.partition('/k')
  graded = list(zip(*derive['GRADED']))
  weighted = list(derive['REWARDS'].values())
  arrays = {'opo': graded, 'gdpo': [values for _, values in weighted]}.get(method, [derive['BINARY']])
  arrays = [np.array(x, np.float64) for x in arrays]
  first, valid, *more = with_lost_samples(*arrays) if lost else (arrays[0], np.ones(arrays[0].shape, bool), *arrays[1:])
  if method == 'gdpo':
    components = {str(i): (weight, x) for i, ((weight, _), x) in enumerate(zip(weighted, (first, *more)))}
    ours = group_advantages.gdpo(components, valid)
  else:
    ours = getattr(group_advantages, method)(first, valid, *more, **(dict(k=int(k)) if k else {}))
  close(without_lost_samples(ours) if lost else ours, DERIVED[case])


def tokens_with_covariance():
  """Returns (covariance, mask) of the tokens of derive.py."""
  mask = np.array([[x is not None for x in row] for row in derive['TOKENS']])
  probs, advantages = np.moveaxis(np.array([[x or (0.5, 99.0) for x in row] for row in derive['TOKENS']]), 2, 0)
  return entropy_control.covariance(np.log(probs), advantages, mask), mask


def test_covariance_of_logprobs_and_advantages_matches_the_derivation():
  np.testing.assert_allclose(tokens_with_covariance()[0], DERIVED['covariance'], rtol=1e-12)


@pytest.mark.parametrize('fraction', [0.01, 0.2, 0.9])
def test_clip_cov_draws_as_many_tokens_as_derived_and_only_inside_the_range(fraction):
  count, inside = DERIVED[f'clip_cov/{fraction}']
  cov, mask = tokens_with_covariance()
  drawn = set()
  for seed in range(30):
    random = np.random.default_rng(seed)
    chosen = np.argwhere(entropy_control.clip_cov(cov, mask, fraction=fraction, low=0.2, high=1.5, random=random))
    assert len(chosen) == count
    drawn |= set(map(tuple, chosen.tolist()))
  assert sorted(drawn) == [tuple(at) for at in inside]


@pytest.mark.parametrize('fraction', [0.01, 0.3])
def test_kl_cov_selects_the_derived_tokens(fraction):
  cov, mask = tokens_with_covariance()
  assert np.argwhere(entropy_control.largest(cov, mask, fraction=fraction)).tolist() == DERIVED[f'kl_cov/{fraction}']


@pytest.mark.parametrize('alpha', [0.5, 0.25])
def test_vapo_advantages_and_returns_match_the_derivation(alpha):
  """Advantages use a lambda that depends on the length of their sample; returns use lambda 1."""
  derived = DERIVED[f'vapo/alpha{alpha}']
  lengths = np.array([len(of_tokens) for _, of_tokens in derive['VALUES']])
  shape = len(lengths), max(lengths)
  mask = np.float32(np.arange(shape[1]) < lengths[:, None])
  padded = np.full(shape, np.nan)
  padded[mask > 0] = np.concatenate([of_tokens for _, of_tokens in derive['VALUES']])
  rewards = np.array([outcome for outcome, _ in derive['VALUES']])
  zeros = np.zeros(shape, np.float32)
  prompts = tuple(Prompt(i, np.zeros(1, np.int32), '', {}) for i in range(shape[0]))
  rollout = Rollout(prompts, zeros.astype(np.int32), lengths, zeros, zeros, np.ones(shape[0], bool))
  arrays = dict(values=padded, old_logprobs=zeros, sampler_logprobs=zeros, behavior_logprobs=zeros)
  (config,) = config_lib.parse(dict(algorithm='vapo', reward='x', rl=dict(length_alpha=alpha))).values()
  config = config_lib.resolve(config, ppo.VAPO.defaults)
  result = ppo.credit(Experience(rollout, rewards, mask, arrays, verdicts=rewards), config)
  close(result.arrays['advantages'][mask > 0], np.concatenate(derived['advantages']))
  close(result.arrays['returns'][mask > 0], np.concatenate(derived['returns']))
  assert result.metrics['gae_lambda/mean'] == pytest.approx(np.mean(derived['lambda']))


@pytest.mark.parametrize('start', [0.0, 0.02])
def test_adaptive_entropy_coefficient_matches_the_derivation(start):
  weights_and_coefs, coef = [], start
  for entropy in derive['ENTROPIES']:
    weight, coef = entropy_control.adaptive_coef(coef, entropy, target=0.2, step=0.005)
    weights_and_coefs.append((weight, coef))
  np.testing.assert_allclose(weights_and_coefs, DERIVED[f'adaptive_entropy/start{start}'], atol=1e-12)


@pytest.mark.parametrize('every, mix', [(1, 0.6), (2, 0.25), (3, 1)])
def test_moving_reference_matches_the_derivation(every, mix):
  """The updates are the differences between the listed weights, which `optax.identity` adds as they are."""
  first, *later = np.float32(derive['WEIGHTS'])
  optimizer = moving_reference.following(optax.identity(), every, mix)
  params, references = jnp.asarray(first), []
  state = optimizer.init(params)
  for weights in later:
    updates, state = optimizer.update(weights - params, state, params)
    params = params + updates
    references.append(state.reference)
  close(np.array(references), DERIVED[f'moving_reference/every{every}/mix{mix}'])


@pytest.mark.parametrize('chosen', ['0+1', '1'])
def test_opd_advantages_of_several_teachers_match_the_derivation(chosen):
  """Teachers are combined into one reference; log reference - log student is the advantage, its mean is -loss."""
  student = np.array([derive['softmax'](x) for x in derive['STUDENT']])
  # Each of the four symbols of the vocabulary is a sequence of its own, which repeats it at two positions.
  logprobs = [np.log([derive['softmax'](x) for x in of_teacher]).T for of_teacher in derive['TEACHERS'][:2]]
  source = {} if '+' in chosen else {'teachers': [int(chosen)]}
  prompts = (Prompt(0, np.zeros(1, np.int32), '', {}, source),)
  zeros = np.zeros(logprobs[0].shape, np.float32)
  rollout = Rollout(prompts, zeros.astype(np.int32), np.full(4, 2), zeros, zeros, np.ones(4, bool))
  options = types.SimpleNamespace(teachers=('x', 'y'), weights=derive['SHARES'][:2])
  advantages = teachers.combine(logprobs, rollout, types.SimpleNamespace(distill=options)).T - np.log(student)
  derived = DERIVED[f'teachers_of_samples/{chosen}']
  close(advantages, [of_symbols for of_symbols, _ in derived])
  close(-(student * advantages).sum(axis=1), [loss for _, loss in derived])


@pytest.mark.parametrize('form', ['T1.5', 'top2'])
@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
def test_distillation_loss_of_several_teachers_matches_the_derivation(beta, form):
  logits = jnp.array(derive['STUDENT'])
  teacher_logits = [
    [[-jnp.inf if x is None else x for x in row] for row in of_teacher] for of_teacher in derive['TEACHERS']
  ]
  of_teachers = [jnp.array(x) for x in teacher_logits]
  temperature = 1.5 if form == 'T1.5' else 1.0
  options = types.SimpleNamespace(
    teachers=('x', 'y', 'z'), weights=derive['SHARES'], beta=beta, temperature=temperature
  )
  if form == 'T1.5':
    ours = distill.from_logits(options)(logits, of_teachers, {})
  else:
    arrays = {}
    for i, x in enumerate(of_teachers):
      logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(x), 2)
      arrays |= {f'teacher_{i}_ids': ids, f'teacher_{i}_logprobs': logprobs}
      arrays[f'teacher_{i}_vocab_size'] = jnp.full(ids.shape[:-1], logits.shape[-1])
    ours = distill.from_cache(options)(logits, (), arrays)
  close(ours, DERIVED[f'teachers_of_tokens/beta{beta}/{form}'])


@pytest.mark.parametrize('method', ['mt_grpo', 'gigpo'])
def test_turn_advantages_ignore_a_sample_without_a_reward(method):
  """The other samples get the advantages that they get without it, and its own advantage is 0."""
  rewards, turn_rewards, sampled, tokens = episodes()
  rewards[0, 2] = np.nan
  valid = np.isfinite(rewards)
  arrays = {'mt_grpo': (turn_rewards, sampled), 'gigpo': (turn_rewards, sampled, tokens)}[method]
  ours = getattr(turn_advantages, method)(rewards, valid, *arrays)
  alone = getattr(turn_advantages, method)(rewards[:1, :2], valid[:1, :2], *(x[:2] for x in arrays))
  np.testing.assert_allclose(ours[:2], alone, rtol=1e-6)
  assert not ours[2].any() and ours[:2].any()


def test_every_golden_value_of_other_libraries_has_a_test():
  """tests/golden/README.md names each case once, beside the test file that reads it."""
  rows = re.findall(r'^\| `(tests/\S+)` \| (.+) \|$', (GOLDEN / 'README.md').read_text(), re.M)
  named = [case for _, cases in rows for case in re.findall('`(.+?)`', cases)]
  assert sorted(named) == sorted(golden_losses.CASES)
  for file, _ in rows:
    assert 'from golden_losses import' in (GOLDEN.parents[1] / file).read_text(), file
