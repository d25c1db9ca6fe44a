"""Tests of on-policy distillation from several teachers, by weight and by source of the prompt, with rewards."""

import json
import types

import numpy as np
import proofs
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost.algorithms import teachers
from jaxpost.errors import InputError
from jaxpost.rl import mixture
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Prompt, Rollout

QUIET = rich.console.Console(quiet=True)
WEIGHTS = (0.5, 2.0, 1.0)
SOURCES = ('sums?teachers=0+2', 'chat?teachers=1')


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """Returns the folders of a student and three teachers with other shapes or weights."""
  path = tmp_path_factory.mktemp('models')
  shapes = dict(student={}, zero=dict(num_layers=2), one=dict(hidden_size=32), two=dict(initializer_range=0.3))
  return {name: tiny.folder(path / name, **shape) for name, shape in shapes.items()}


def run_config(folders, path, **over):
  for name, prompts in dict(sums=[f'{n}+{n}=' for n in range(10)], chat=[f'say {n}' for n in range(6)]).items():
    (path / f'{name}.jsonl').write_text(''.join(json.dumps({'prompt': x}) + '\n' for x in prompts))
  base = dict(
    algorithm='opd',
    data=dict(path=tuple(str(path / f'{name}.jsonl') for name in ('sums', 'chat'))),
    distill=dict(teachers=tuple(folders[name] for name in ('zero', 'one', 'two')), weights=WEIGHTS),
    rl=dict(sources=SOURCES, kl_coef=0.5),
  )
  return tiny.grpo_config(folders['student'], **tiny.merged(base, over))


def test_combined_logprobs_are_the_weighted_mean_of_the_teachers_of_the_source():
  """In float64, each teacher has the weight w_i / (sum of w of all teachers of the prompt)."""
  random = np.random.default_rng(0)
  logprobs = -random.uniform(0, 5, (3, 6, 4)).astype(np.float32)  # 3 teachers, 3 prompts with 2 samples, 4 tokens
  sources = ({'name': 'a', 'teachers': [0, 2]}, {'name': 'b', 'teachers': [1]}, {})
  prompts = tuple(Prompt(n, np.zeros(1, np.int32), '', {}, source) for n, source in enumerate(sources))
  empty = np.zeros((6, 4), np.float32)
  rollout = Rollout(prompts, empty.astype(int), np.full(6, 4), empty, empty, np.full(6, True))

  def combined(weights):
    return teachers.combine(logprobs, rollout, types.SimpleNamespace(distill=distill_section(weights)))

  def distill_section(weights):
    return types.SimpleNamespace(teachers=('x', 'y', 'z'), weights=weights)

  one, two, three = np.float64(logprobs)
  expected = np.concatenate(
    [(0.5 * one + 1.0 * three)[:2] / 1.5, two[2:4], (0.5 * one + 2.0 * two + 1.0 * three)[4:] / 3.5]
  )
  np.testing.assert_allclose(combined(WEIGHTS), expected, rtol=1e-6)
  equal = np.concatenate([(one + three)[:2] / 2, two[2:4], (one + two + three)[4:] / 3])
  np.testing.assert_allclose(combined(()), equal, rtol=1e-6)


def expected_logprobs(config, rollout):
  """Returns sum_i w_i log T_i of each sampled token, [N, C] float64, with the teachers of its source."""
  size = len(rollout.lengths) // len(rollout.prompts)
  out = np.zeros(rollout.completions.shape)
  for i, folder in enumerate(config['distill']['teachers']):
    model, params = tiny.load(folder)
    for k, answer in enumerate(rollout.completions):
      prompt, answer = rollout.prompts[k // size], answer[: rollout.lengths[k]]
      teachers_of_source = {'sums': (0, 2), 'chat': (1,)}[prompt.source['name']]
      if i in teachers_of_source:
        logits = np.float64(tiny.logits(model, params, np.concatenate([prompt.tokens, answer])[None])[0])
        logits = logits[len(prompt.tokens) - 1 : -1]
        logp = logits[np.arange(len(answer)), answer] - np.log(np.exp(logits).sum(axis=1))
        out[k, : len(answer)] += WEIGHTS[i] / sum(WEIGHTS[j] for j in teachers_of_source) * logp
  return out


def test_advantages_add_rewards_and_the_teachers_of_the_source(folders, tmp_path):
  """A = (r - mean) / (std + eps) + kl_coef (sum_i w_i log T_i - log pi)."""
  config = run_config(folders, tmp_path)
  _, stream = jaxpost.policy_and_stream(config)
  try:
    item = next(stream)
  finally:
    stream.close()
  experience, rollout = item.experience, item.experience.rollout
  assert {prompt.source['name'] for prompt in rollout.prompts} == {'sums', 'chat'}
  expected = expected_logprobs(config, rollout)
  np.testing.assert_allclose(experience.arrays['ref_logprobs'], expected, rtol=1e-5, atol=2e-5)
  assert np.abs(expected - experience.arrays['old_logprobs']).max() > 0.1
  rewards = experience.rewards.reshape(4, 4)
  reward_advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (
    rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6
  )
  advantages = reward_advantages.reshape(-1, 1) + 0.5 * (expected - experience.arrays['old_logprobs'])
  np.testing.assert_allclose(item.credit.arrays['advantages'], advantages * experience.mask, rtol=1e-4, atol=5e-5)
  assert item.info['kl'] == pytest.approx(
    ((experience.arrays['old_logprobs'] - expected) * experience.mask).sum() / experience.mask.sum()
  )


def test_a_run_resumes_bit_for_bit(folders, tmp_path):
  config = run_config(folders, tmp_path, train=dict(steps=4), save=dict(every=2, export=True))
  proofs.check_lost_steps(config, tmp_path)


def test_group_size_1_works_without_rewards(folders, tmp_path):
  config = run_config(folders, tmp_path, reward='', rollout=dict(group_size=1), train=dict(steps=1))
  config['rl']['kl_coef'] = 1.0
  jaxpost.run(config, tmp_path / 'run', QUIET)
  (row,) = tiny.rows(tmp_path / 'run')
  assert row['kl'] > 0.01 and row['grad_norm'] > 0 and 'reward' not in row


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(rl=dict(reference='x')), 'config.rl.reference: config.distill.teachers would ignore it'),
    (dict(distill=dict(weights=(1.0,))), 'config.distill.weights: 1 weights for 2 teachers'),
    (dict(distill=dict(beta=0.9)), 'config.distill.beta: opd would ignore it'),
    (dict(distill=dict(teachers=())), 'config.rl.reference: is empty; name the teacher'),
  ],
)
def test_incompatible_distillation_options_are_refused(over, message):
  fields = tiny.merged(dict(algorithm='opd', reward='x', distill=dict(teachers=('a', 'b'))), over)
  method = algorithms.load_algorithm('opd')
  with pytest.raises(InputError, match=message):
    method.check(config_lib.resolve(next(iter(config_lib.parse(fields).values())), method.defaults))


@pytest.mark.parametrize(
  'entry, weights, kl_in, message',
  [
    ('a?teachers=3', WEIGHTS, 'advantage', "teachers='3' must be positions in config.distill.teachers, from 0 to 2"),
    ('a?teachers=0+0', WEIGHTS, 'advantage', 'each once'),
    ('a?teachers=', WEIGHTS, 'advantage', "teachers='' must be positions"),
    ('a?teachers=1', (1.0, 0.0, 1.0), 'advantage', "config.distill.weights are 0 for teachers='1'"),
    ('a?teachers=1', WEIGHTS, 'loss', 'teachers are those of algorithm=opd'),
  ],
)
def test_wrong_teachers_of_a_source_are_refused(entry, weights, kl_in, message):
  fields = dict(rl=dict(sources=(entry,), kl_in=kl_in), distill=dict(teachers=('x', 'y', 'z'), weights=weights))
  (config,) = config_lib.parse(dict(algorithm='opd', reward='x') | fields).values()
  with pytest.raises(InputError) as error:
    mixture.parse(config, (), types.SimpleNamespace(name='a', sizes=(3,)))
  assert message in str(error.value) and 'config.rl.sources' in str(error.value)
