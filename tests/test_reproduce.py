"""`launch.reproduce` draws a sample of a run again; `train_on_rollouts` trains on the rollouts of another run."""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.data import tokenizer
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.rollout import rollout_files
from jaxpost.tools import reproduce, rollout_index, rollout_view

GRADE = """
def low(completion_ids, **_):
  return [sum(t < 64 for t in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope='module')
def config(nano, tmp_path_factory):
  reward = tmp_path_factory.mktemp('reward') / 'grade.py'
  reward.write_text(GRADE)
  return tiny.grpo_config(
    nano,
    reward=f'{reward}:low',
    train=dict(steps=4),
    optim=dict(lr=1e-2),
    rl=dict(minibatches=2, kl_coef=0.01),
    save=dict(every=2, keep=9),
    log=dict(rollouts_every=1, samples_every=1),
  )


@pytest.fixture(scope='module')
def run(config, nano, tmp_path_factory):
  """A run whose config has paths relative to the folder in which it was started; the tests are in another one."""
  folder = tmp_path_factory.mktemp('run')
  shutil.copytree(nano, folder / 'nano')
  tokenizer.load('bytes').save(folder / 'nano')
  with contextlib.chdir(folder):
    jaxpost.run(tiny.merged(config, dict(init_from='nano', model=dict(tokenizer='./nano'))), folder / 'run')
  return folder / 'run'


def stored_samples(run, step):
  rows = (run / f'samples/grpo/{step}.jsonl').read_text().splitlines()
  return [json.loads(row) for row in rows]


@pytest.mark.parametrize('step, row', [(1, 0), (2, 7), (4, 15)])
def test_a_sample_is_drawn_again(run, step, row):
  """The steps before it are repeated: from the start of the run, or for step 4 from the checkpoint of step 2."""
  here = pathlib.Path.cwd()
  sample = reproduce.reproduce(run, step, row)
  assert sample['identical'] is True
  original, arrays = rollout_files.load(run / f'rollouts/grpo/{step}.npz')
  length = original.lengths[row]
  assert sample['ids'] == original.completions[row, :length].tolist()
  assert sample['logprobs'] == [float(x) for x in original.logprobs[row, :length]]
  stored = stored_samples(run, step)[row]
  assert sample['reward'] == stored['reward'] == arrays['rewards'][row]
  assert sample['components'] == stored['components'] == {'low': stored['reward']}
  assert sample['advantage'] == pytest.approx(arrays['credit/advantages'][row, 0])
  assert len(sample['texts']) == len(sample['trained']) == length
  assert sample['version'] == 2 * (step - 1)
  assert pathlib.Path.cwd() == here


def test_viewer_has_all_token_values_of_a_run_with_reference(monkeypatch, run):
  viewer = rollout_view.Viewer(run)
  monkeypatch.setattr('os.chdir', None)  # its requests are answered in threads, which read files of this folder
  episode = viewer.episode(viewer.index.find(rollout_index.Query(step=4))[5])
  tokens = episode['tokens']
  assert not episode['missing'] and {*rollout_view.SAVED_BY} < {*tokens}
  assert 0 < min(tokens['entropy']) and max(tokens['entropy']) <= np.log(512)
  assert min(tokens['kl']) >= 0 and max(tokens['kl']) > 0  # three steps away from the reference
  assert tokens['ratio'] == pytest.approx([1] * len(tokens['text']), rel=1e-3)  # on policy


def test_losses_of_samples_add_up_to_loss_of_their_update(run):
  """A step has two updates of eight samples each."""
  by_update = {}
  for row in range(16):
    sample = reproduce.reproduce(run, 1, row)
    by_update.setdefault(round(sample['loss_of_update'], 9), []).append(sample)
  assert [len(x) for x in by_update.values()] == [8, 8]
  for total, samples in by_update.items():
    assert sum(x['loss'] for x in samples) == pytest.approx(total, abs=1e-6)
    assert sum(x['loss_share'] for x in samples) == pytest.approx(1, abs=1e-3)


def test_losses_of_samples_add_up_to_loss_of_the_step(config, tmp_path):
  """The step has one update; a second one would use the parameters after the first."""
  one_update = tiny.merged(config, dict(rl=dict(minibatches=1), train=dict(steps=2), rollout=dict(prompts=2)))
  jaxpost.run(one_update, tmp_path / 'run')
  row = [r for r in metrics.read_rows(tmp_path / 'run/metrics.jsonl') if r['step'] == 2][0]
  samples = [reproduce.reproduce(tmp_path / 'run', 2, n) for n in range(len(stored_samples(tmp_path / 'run', 2)))]
  assert abs(row['loss']) > 1e-4
  assert sum(x['loss'] for x in samples) == pytest.approx(row['loss'], abs=1e-6)


def test_sample_that_differs_or_is_missing_is_not_identical(run, tmp_path):
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
  (copy / 'checkpoints/grpo/2/meta/metadata').write_text('{}')  # damaged: the run is repeated from its start
  assert reproduce.reproduce(copy, 3, 3)['identical'] is True  # compared with samples/, as rollouts/ is gone
  (copy / 'samples/grpo/2.jsonl').unlink()
  before = sorted(copy.rglob('*'))
  assert reproduce.reproduce(copy, 2, 3)['identical'] is None
  assert sorted(copy.rglob('*')) == before


def test_reproduce_command_prints_sample_and_loss(run):
  done = subprocess.run(
    [sys.executable, '-m', 'launch.reproduce', f'--run={run}', '--step=3', '--row=1'], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert 'identical to the sample that the run has kept' in done.stderr
  titles = ('Reward', 'Reward low', 'Advantage', 'Loss of the sample', 'Share of that loss', 'Step of the weights')
  for title in titles:
    (value,) = re.findall(rf'^{title}: (\S+)$', done.stdout, re.MULTILINE)
    assert re.fullmatch(r'-?[\d.]{1,7}(e-\d+)?', value), value
  assert 'Ended by itself: ' in done.stdout and 'log-prob' in done.stdout


@pytest.mark.parametrize(
  'step, row, words', [(9, 0, 'none of the 4 steps'), (1, 16, 'none of the 16 samples'), (1, -1, '--row')]
)
def test_step_or_row_out_of_range_is_refused(run, step, row, words, monkeypatch):
  monkeypatch.setattr(reproduce.place, 'place_stage', None)  # before anything is placed on a device
  with pytest.raises(InputError, match=words):
    reproduce.reproduce(run, step, row)


# ------------------------------------------------------- training on rollouts


def comparable_metrics(run):
  """The metrics without those of sampling, which a run on stored rollouts does not do, and without single rewards."""
  return [
    {
      k: v
      for k, v in r.items()
      if k not in ('reshard_bytes', 'sampler_mismatch', 'slot_occupancy') and not k.startswith('rewards/')
    }
    for r in metrics.comparable_rows(run / 'metrics.jsonl')
  ]


@pytest.mark.parametrize('regrade', [True, False])
def test_run_on_stored_rollouts_equals_their_run(config, run, tmp_path, regrade):
  """With rewards that are computed again, and with the stored ones."""
  again = tiny.merged(config, dict(train_on_rollouts=str(run)))
  if not regrade:
    again['reward'] = ''
  jaxpost.run(again, tmp_path)
  rows, original = comparable_metrics(tmp_path), comparable_metrics(run)
  keys = {'loss', 'reward', 'kl', 'grad_norm', 'completions/mean_length'}
  assert keys <= rows[0].keys() & original[0].keys()
  for row, original_row in zip(rows, original, strict=True):
    assert all(row[k] == original_row[k] for k in keys)
  for row in metrics.read_rows(tmp_path / 'metrics.jsonl'):
    assert row['reshard_bytes'] == 0


def test_stored_rollouts_can_be_trained_with_another_learning_rate(config, run, tmp_path):
  again = tiny.merged(config, dict(train_on_rollouts=str(run), optim=dict(lr=1e-3)))
  jaxpost.run(again, tmp_path)
  rows, original = comparable_metrics(tmp_path), comparable_metrics(run)
  assert rows[0]['reward'] == original[0]['reward']
  assert rows[-1]['reward'] == original[-1]['reward']
  assert rows[-1]['kl'] != original[-1]['kl']


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
  if 'npz' in words:  # refused before the first step, although its rollout exists
    assert not (tmp_path / 'run').exists()


def test_a_gap_in_the_stored_rollouts_is_refused_before_the_first_step(config, run, tmp_path):
  shutil.copytree(run / 'rollouts', tmp_path / 'from/rollouts')
  (tmp_path / 'from/rollouts/grpo/3.npz').unlink()
  again = tiny.merged(config, dict(train_on_rollouts=str(tmp_path / 'from')))
  with pytest.raises(
    InputError, match=r'/3\.npz: is missing; a run saves all rollouts with config.log.rollouts_every=1'
  ):
    jaxpost.run(again, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  jaxpost.run(tiny.merged(again, dict(train=dict(steps=2))), tmp_path / 'run')  # which reads steps 1 and 2 only


def test_file_that_is_no_rollout_is_refused(tmp_path):
  path = tmp_path / '1.npz'
  path.write_bytes(b'PK nothing')
  with pytest.raises(InputError, match=r'1\.npz: not a rollout'):
    rollout_files.load(path)
