"""A sample of a run again, and a run on the rollouts of another.

Legend: N sequences, C completion tokens.
"""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.rollout import rollout_files
from jaxpost.tools import reproduce, rollout_index, rollout_view

GRADE = """
def low(completion_ids, **_):
  return [sum(t < 64 for t in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


@pytest.fixture(scope='module')
def config(model, tmp_path_factory):
  reward = tmp_path_factory.mktemp('reward') / 'grade.py'
  reward.write_text(GRADE)
  return tiny.grpo_config(
    model,
    reward=f'{reward}:low',
    train=dict(steps=4),
    optim=dict(lr=1e-2),
    rl=dict(minibatches=2, kl_coef=0.01),
    save=dict(every=2, keep=9),
    log=dict(rollouts_every=1, samples_every=1),
  )


@pytest.fixture(scope='module')
def run(config, tmp_path_factory):
  folder = tmp_path_factory.mktemp('run') / 'run'
  jaxpost.run(config, folder)
  return folder


def kept(run, step):
  rows = (run / f'samples/grpo/{step}.jsonl').read_text().splitlines()
  return [json.loads(row) for row in rows]


@pytest.mark.parametrize('step, row', [(1, 0), (2, 7), (4, 15)])
def test_a_sample_is_drawn_again(run, step, row):
  """From the start, past a checkpoint, and right after one."""
  found = reproduce.reproduce(run, step, row)
  assert found['identical'] is True
  theirs, arrays = rollout_files.load(run / f'rollouts/grpo/{step}.npz')
  length = theirs.lengths[row]
  assert found['ids'] == theirs.completions[row, :length].tolist()
  assert found['logprobs'] == [float(x) for x in theirs.logprobs[row, :length]]
  shown = kept(run, step)[row]
  assert found['reward'] == shown['reward'] == arrays['rewards'][row]
  assert found['components'] == shown['components'] == {'low': shown['reward']}
  assert found['advantage'] == pytest.approx(arrays['credit/advantages'][row, 0])
  assert len(found['texts']) == len(found['trained']) == length
  assert found['version'] == 2 * (step - 1)


def test_the_viewer_has_every_color_of_a_run_that_scores(run):
  viewer = rollout_view.Viewer(run)
  found = viewer.episode(viewer.index.find(rollout_index.Query(step=4))[5])
  tokens = found['tokens']
  assert not found['missing'] and {*rollout_view.SAVED_BY} < {*tokens}
  assert 0 < min(tokens['entropy']) and max(tokens['entropy']) <= np.log(512)
  assert min(tokens['kl']) >= 0 and max(tokens['kl']) > 0  # three updates away from the reference
  assert tokens['ratio'] == pytest.approx([1] * len(tokens['text']), rel=1e-3)  # on policy


def test_losses_of_the_samples_add_up(run):
  """The losses of the samples of an update add up to its loss, weighted by size."""
  found = [reproduce.reproduce(run, 1, row) for row in range(16)]
  by_update = {}
  for one in found:
    by_update.setdefault(round(one['loss_of_update'], 9), []).append(one)
  assert [len(x) for x in by_update.values()] == [8, 8]
  for total, ones in by_update.items():
    assert sum(x['loss'] for x in ones) == pytest.approx(total, abs=1e-6)
    assert sum(x['loss_share'] for x in ones) == pytest.approx(1, abs=1e-3)


def test_their_sum_is_the_loss_of_the_run(config, tmp_path):
  """The step has one update; a second one would use the parameters after the first."""
  one = tiny.merged(config, dict(rl=dict(minibatches=1), train=dict(steps=2), rollout=dict(prompts=2)))
  jaxpost.run(one, tmp_path / 'run')
  row = [r for r in metrics.read_rows(tmp_path / 'run/metrics.jsonl') if r['step'] == 2][0]
  found = [reproduce.reproduce(tmp_path / 'run', 2, n) for n in range(len(kept(tmp_path / 'run', 2)))]
  assert abs(row['loss']) > 1e-4
  assert sum(x['loss'] for x in found) == pytest.approx(row['loss'], abs=1e-6)


def test_what_differs_is_told(run, tmp_path):
  copy = tmp_path / 'run'
  shutil.copytree(run, copy)
  path = copy / 'rollouts/grpo/2.npz'
  with np.load(path) as file:
    arrays = dict(file)
  arrays['logprobs'] = np.nextafter(arrays['logprobs'], np.float32(9))
  np.savez(path, **arrays)
  path.write_bytes(rollout_files._sealed(path.read_bytes()))
  assert reproduce.reproduce(copy, 2, 3)['identical'] is False
  shutil.rmtree(copy / 'rollouts')
  (copy / 'checkpoints/grpo/2/meta/metadata').write_text('{}')  # damaged: the steps before 3 are made from the start
  assert reproduce.reproduce(copy, 3, 3)['identical'] is True  # of samples/
  (copy / 'samples/grpo/2.jsonl').unlink()
  before = sorted(copy.rglob('*'))
  assert reproduce.reproduce(copy, 2, 3)['identical'] is None
  assert sorted(copy.rglob('*')) == before


def test_the_command(run):
  out = subprocess.run(
    [sys.executable, '-m', 'launch.reproduce', f'--run={run}', '--step=3', '--row=1'], capture_output=True, text=True
  )
  assert out.returncode == 0, out.stderr
  assert 'identical to the sample that the run has kept' in out.stderr
  for word in ('log-prob', "components: {'low'", 'loss_share', 'advantage'):
    assert word in out.stdout


@pytest.mark.parametrize(
  'step, row, words', [(9, 0, 'none of the 4 steps'), (1, 16, 'none of the 16 samples'), (1, -1, '--row')]
)
def test_what_is_not_there_is_refused(run, step, row, words):
  with pytest.raises(InputError, match=words):
    reproduce.reproduce(run, step, row)


# ------------------------------------------------------- training on rollouts


def losses(run):
  return [
    {
      k: v
      for k, v in r.items()
      if k not in ('reshard_bytes', 'sampler_mismatch', 'slot_occupancy') and not k.startswith('rewards/')
    }
    for r in metrics.comparable_rows(run / 'metrics.jsonl')
  ]


@pytest.mark.parametrize('regrade', [True, False])
def test_a_run_on_saved_rollouts_is_that_run(config, run, tmp_path, regrade):
  """This holds for rewards that are computed again and for those that were saved."""
  again = tiny.merged(config, dict(train_on_rollouts=str(run)))
  if not regrade:
    again['reward'] = ''
  jaxpost.run(again, tmp_path)
  mine, its = losses(tmp_path), losses(run)
  keys = {'loss', 'reward', 'kl', 'grad_norm', 'completions/mean_length'}
  assert keys <= mine[0].keys() & its[0].keys()
  for a, b in zip(mine, its, strict=True):
    assert all(a[k] == b[k] for k in keys)
  for row in metrics.read_rows(tmp_path / 'metrics.jsonl'):
    assert row['reshard_bytes'] == 0


def test_another_learning_rate_on_the_same_rollouts(config, run, tmp_path):
  again = tiny.merged(config, dict(train_on_rollouts=str(run), optim=dict(lr=1e-3)))
  jaxpost.run(again, tmp_path)
  mine, its = losses(tmp_path), losses(run)
  assert mine[0]['reward'] == its[0]['reward']
  assert mine[-1]['reward'] == its[-1]['reward']
  assert mine[-1]['kl'] != its[-1]['kl']


@pytest.mark.parametrize(
  'over, words',
  [
    (dict(train=dict(steps=5)), r'5\.npz: is missing'),
    (dict(rollout=dict(prompts=2)), '16 completions of 4 prompts'),
    (dict(rl=dict(dynamic_sampling=2)), 'config.train_on_rollouts'),
    (dict(algorithm='remax', rl=dict(kl_coef=0.0)), 'config.train_on_rollouts'),
  ],
)
def test_rollouts_that_do_not_fit_are_refused(config, run, tmp_path, over, words):
  again = tiny.merged(config, tiny.merged(dict(train_on_rollouts=str(run)), over))
  if 'algorithm' in over:
    again['rl']['minibatches'] = 1
    moved = tmp_path / 'from/rollouts/remax'
    shutil.copytree(run / 'rollouts/grpo', moved)
    again['train_on_rollouts'] = str(tmp_path / 'from')
  with pytest.raises(InputError, match=words):
    jaxpost.run(again, tmp_path / 'run')
  if 'npz' in words:  # not after the steps that are there
    assert not (tmp_path / 'run').exists()


def test_a_file_that_is_no_rollout(tmp_path):
  path = tmp_path / '1.npz'
  path.write_bytes(b'PK nothing')
  with pytest.raises(InputError, match=r'1\.npz: not a rollout'):
    rollout_files.load(path)
