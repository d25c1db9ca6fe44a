"""Algorithms outside the package: the examples of docs/your_algorithm.md learn, resume and stay short."""

import importlib.util
import pathlib

import ml_collections
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.rl import reward_metrics
from jaxpost.stage import algorithms

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'examples'
EXPERIENCE = jaxpost.Experience(None, np.ones(16), np.tile(np.arange(8) < 5, (16, 1)).astype(np.float32), {})
MAX_LINES = {'reinforce.py': 60, 'actor_critic.py': 150}


def run(config, workdir):
  jaxpost.run(config, workdir)
  return tiny.rows(workdir)


@pytest.mark.parametrize('name', MAX_LINES)
def test_example_is_short(name):
  assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES[name]


@pytest.mark.parametrize(
  'fields, words',
  [
    ('on_policy=True', 'is on_policy and has no `credit`'),
    ('', 'is not on_policy and has no `render`'),
    ("on_policy=True, credit=f, scores=('ref_logprobs',)", r"`scores` is \('ref_logprobs',\) and must be a function"),
    ("on_policy=True, credit=f, needs='reference'", "`needs` is 'reference' and must be a function"),
  ],
)
def test_an_algorithm_that_is_incomplete_is_refused(tmp_path, fields, words):
  file = tmp_path / 'mine.py'
  file.write_text(f'import jaxpost\nf = lambda *arguments: None\nALGORITHM = jaxpost.Algorithm(f, {fields})\n')
  with pytest.raises(InputError, match=words):
    algorithms.load_algorithm(str(file))


OWN = """
import jaxpost
import numpy as np

def objective(config):
  def loss(outputs, arrays):
    return arrays['advantages'] * outputs.logprobs, {}

  return jaxpost.Objective(loss, arrays=('advantages',))

def credit(experience, config):
  mask, rewards = experience.mask, experience.rewards
  return RESULT

ALGORITHM = jaxpost.Algorithm(objective, on_policy=True, credit=credit)
"""


@pytest.mark.parametrize(
  'result, words',
  [
    (
      'jaxpost.Credit({"advantage": mask}, mask, {})',
      r"has no array 'advantages', which the objective names in `arrays`",
    ),
    (
      'jaxpost.Credit({"advantages": rewards}, mask, {})',
      r'`advantages` has the shape \(16,\) and must have \(16, 8\) or \(16, 1\)',
    ),
    ('jaxpost.Credit({"advantages": mask[:8]}, mask, {})', r'`advantages` has the shape \(8, 8\) and'),
    (
      'jaxpost.Credit({"advantages": mask}, mask[:, :1], {})',
      r'`mask` has the shape \(16, 1\) and must have \(16, 8\)',
    ),
    ('jaxpost.Credit({"advantages": mask * np.nan}, mask, {})', '`advantages` is not finite on trained tokens'),
    ('jaxpost.Credit({"advantages": mask}, np.full(mask.shape, np.inf), {})', '`mask` is not finite'),
    ('{"advantages": mask}', r'is a dict and must be a jaxpost.Credit'),
  ],
)
def test_a_credit_that_the_objective_cannot_read_is_refused(tmp_path, result, words):
  """Its arrays were read only in the program of the update, whose errors name neither the file nor the function."""
  file = tmp_path / 'mine.py'
  file.write_text(OWN.replace('RESULT', result))
  with pytest.raises(InputError, match=rf'^config.algorithm: .*mine.py: the result of `credit`.*{words}'):
    algorithms.load_algorithm(str(file)).credit(EXPERIENCE, None)


@pytest.mark.parametrize('result', ['rewards[:, None]', 'np.where(mask > 0, 1, np.nan)', 'mask[:, :1]'])
def test_a_credit_of_whole_completions_trains(nano, tmp_path, result):
  """An array [N, 1] holds one value per completion, and the tokens that the mask leaves out may have any value."""
  file = tmp_path / 'mine.py'
  file.write_text(OWN.replace('RESULT', f'jaxpost.Credit({{"advantages": {result}}}, mask)'))
  (row,) = run(tiny.grpo_config(nano, algorithm=str(file), train=dict(steps=1)), tmp_path / 'run')
  assert row['grad_norm'] > 0 and row['skipped_updates'] == 0
  figures = {key: row[f'advantages/{key}'] for key in 'mean std min max frac_positive frac_zero'.split()}
  if 'rewards' not in result:  # 1 on all trained tokens
    assert figures == dict(mean=1, std=0, min=1, max=1, frac_positive=1, frac_zero=0)
  else:
    assert figures['min'] < figures['mean'] < figures['max'] and figures['std'] > 0


@pytest.mark.parametrize('loss, shape', [('sum()', r'\(\)'), ('mean(1)', r'\(\d+,\)')])
def test_a_loss_that_is_no_value_per_token_is_refused(nano, tmp_path, loss, shape):
  """A sum over tokens was multiplied by the weight of each token, so each counted for all."""
  file = tmp_path / 'mine.py'
  file.write_text(
    OWN.replace('RESULT', 'jaxpost.Credit({"advantages": mask}, mask)').replace(
      "arrays['advantages'] * outputs.logprobs", f'outputs.logprobs.{loss}'
    )
  )
  with pytest.raises(InputError, match=rf'the loss of an objective has the shape {shape}, must have \(\d+, \d+\)'):
    run(tiny.grpo_config(nano, algorithm=str(file), train=dict(steps=1)), tmp_path / 'run')


def test_metrics_of_advantages_leave_out_what_is_not_trained():
  mask = np.array([[1, 1, 0], [1, 0, 0]], np.float32)
  for advantages in (np.array([[2.0, 0, 9], [-1, 9, 9]]), np.array([[2.0], [-1]])):
    found = reward_metrics.advantage_metrics(jaxpost.Credit({'advantages': advantages}, mask))
    trained = np.broadcast_to(advantages, mask.shape)[mask > 0]
    assert found['advantages/mean'] == pytest.approx(trained.mean()) and found['advantages/min'] == -1
    assert found['advantages/frac_zero'] == pytest.approx((trained == 0).mean())
  for arrays, trains in (({}, 1), ({'advantages': np.ones(7)}, 1), ({'advantages': mask}, 0)):  # 7: of a `pack`
    assert reward_metrics.advantage_metrics(jaxpost.Credit(arrays, mask * trains)) == {}


def test_reinforce_raises_its_reward(nano, tmp_path):
  rows = run(
    tiny.grpo_config(
      nano,
      algorithm=str(EXAMPLES / 'reinforce.py'),
      train=dict(steps=30),
      rollout=dict(prompts=8, group_size=4),
      optim=dict(lr=2e-2),
    ),
    tmp_path,
  )
  reward = [r['reward'] for r in rows]
  assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.2
  assert rows[-1]['baseline'] > rows[0]['baseline']


def test_reinforce_reads_its_own_options(nano, tmp_path):
  baselines = {}
  for rate in (0.1, 1.0):
    config = ml_collections.ConfigDict(
      tiny.grpo_config(nano, algorithm=str(EXAMPLES / 'reinforce.py'), train=dict(steps=1))
    )
    config.user.rate = rate
    (row,) = run(config, tmp_path / str(rate))
    baselines[rate] = row['baseline']
    assert row['baseline'] == pytest.approx(rate * row['reward'])
  config.user.rate = 0.5
  config.train.steps = 2
  with pytest.raises(InputError, match='config.user.rate of reinforce differs'):
    jaxpost.run(config, tmp_path / '1.0')


def test_state_of_reinforce_survives_a_resume(nano, tmp_path):
  config = tiny.grpo_config(
    nano,
    algorithm=str(EXAMPLES / 'reinforce.py'),
    save=dict(every=2),
    train=dict(steps=4),
    optim=dict(schedule='constant'),
  )
  whole = run(config, tmp_path / 'whole')
  run(tiny.merged(config, dict(train=dict(steps=2))), tmp_path / 'parts')
  parts = run(config, tmp_path / 'parts')
  for key in ('baseline', 'loss', 'reward'):
    assert [r[key] for r in whole] == [r[key] for r in parts]


def test_actor_critic_trains_two_roles_in_two_stages(nano, tmp_path):
  spec = importlib.util.spec_from_file_location('actor_critic', EXAMPLES / 'actor_critic.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  small = tiny.grpo_config(nano)
  config = module.get_config().to_dict()
  for key in ('model', 'log', 'reward'):
    config[key] = small[key]
  config['save']['export'] = False
  config['eval'] = small['eval']
  config['warm']['train'] = dict(steps=2, batch_size=2, row_length=64)
  config['online'] |= dict(
    train=dict(steps=40), rollout=dict(prompts=8, group_size=4), optim=dict(lr=2e-2), critic=dict(lr=2e-2)
  )
  rows = run(config, tmp_path)
  assert [r['stage'] for r in rows] == ['warm'] * 2 + ['online'] * 40
  online = rows[2:]
  reward, error = ([r[k] for r in online] for k in ('reward', 'critic/error'))
  assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.2
  assert np.mean(error[-5:]) < np.mean(error[:5]) / 2
