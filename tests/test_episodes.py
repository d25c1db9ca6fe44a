"""Whole runs in an environment: GRPO, PPO, replay, several processes.

Legend: N sequences, C completion tokens.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import episodes
import jax
import numpy as np
import pytest
import tiny
from test_processes import free_address

import jaxpost
from jaxpost.distributed import cluster
from jaxpost.environments import turns
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.rollout import rollout_files
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare
from jaxpost.tools import inference, preview_stage, reproduce

ROOT = pathlib.Path(__file__).resolve().parents[1]
REWARD = '''
def answered(completions, **_):
  """The share of turns of a tool."""
  return [sum(m['role'] == 'tool' for m in c) / len(c) for c in completions]
'''


@pytest.fixture(scope='module', autouse=True)
def calls():
  """A random model's turns are taken for calls."""
  old, turns.parse = turns.parse, episodes.parse
  yield
  turns.parse = old


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('episodes')
  (path / 'env.py').write_text(episodes.ENVIRONMENT)
  (path / 'reward.py').write_text(REWARD)
  episodes.folder(path / 'model')
  return path


def config(folder, **over):
  return episodes.config(
    str(folder / 'model'), folder / 'env.py', **tiny.merged(dict(log=dict(rollouts_every=1)), over)
  )


@pytest.fixture(scope='module')
def run(folder):
  jaxpost.run(config(folder, save=dict(every=2, keep=3)), folder / 'run')
  return folder / 'run'


def rows(run):
  return metrics.read_rows(run / 'metrics.jsonl')


@pytest.mark.core
def test_the_sampler_is_the_policy(run):
  """Log-probs of the first step, of turns after tools, are the trainer's."""
  first = rows(run)[0]
  assert first['ratio'] == pytest.approx(1, abs=1e-5)
  assert first['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  assert first['tools/call_frequency'] > 1 and first['episodes/turns'] > 1
  assert first['tools/failure_frequency'] > 0
  assert first['episodes/failed'] == first['masked_samples'] == 0
  assert first['reward'] == first['rewards/environment/mean'] > 0
  assert first['pass_rate/none'] > 0  # nothing but the environment decides what is right


def test_only_the_tokens_of_the_policy_are_trained(run):
  def decode(ids):
    return bytes(int(i) for i in ids if i < 256).decode(errors='replace')

  for step in 1, 2, 3:
    rollout, arrays = rollout_files.load(run / f'rollouts/grpo/{step}.npz')
    inside = np.arange(rollout.mask.shape[1]) < rollout.lengths[:, None]
    assert not rollout.mask[~inside].any()
    assert (arrays['trained'] == rollout.mask).all()
    tools = inside & ~rollout.mask
    assert tools.any(axis=1).sum() > 4
    for n in np.flatnonzero(tools.any(axis=1)):
      text = decode(rollout.completions[n][tools[n]])
      # Split where the model wrote: each is what the template puts there.
      parts = text.split('\ntool\n')[1:]
      assert parts and all(p.endswith('\nassistant\n') for p in parts)
      assert not arrays['credit/advantages'][n][tools[n]].any()


def test_the_observation_is_in_the_prompt(run):
  rollout, _ = rollout_files.load(run / 'rollouts/grpo/1.npz')
  for prompt in rollout.prompts:
    text = bytes(int(i) for i in prompt.tokens if i < 256).decode()
    answer = prompt.columns['answer']
    assert text.endswith(f'= [{answer}]\nassistant\n' if int(answer) % 2 else '=\nassistant\n')


def test_it_repeats_to_the_bit_and_resumes(folder, run):
  again = folder / 'again'
  jaxpost.run(config(folder, train=dict(steps=2)), again)
  jaxpost.run(config(folder, train=dict(steps=3)), again)
  assert metrics.comparable_rows(again / 'metrics.jsonl') == [
    {k: v for k, v in row.items()} for row in metrics.comparable_rows(run / 'metrics.jsonl')
  ]


def test_an_episode_is_replayed(run):
  found = reproduce.reproduce(run, 3, 5)
  assert found['identical'] is True
  assert 0 < sum(found['trained']) < len(found['trained'])
  assert found['components'] == {'environment': found['reward']}


@pytest.mark.parametrize('over', [dict(), dict(environment='')], ids=['same config', 'no environment'])
def test_it_is_trained_on_again(folder, run, tmp_path, over):
  again = config(folder, train_on_rollouts=str(run), **over)
  jaxpost.run(again, tmp_path / 'replayed')
  for a, b in zip(rows(tmp_path / 'replayed'), rows(run), strict=True):
    assert (a['loss'], a['grad_norm']) == (b['loss'], b['grad_norm'])
    assert a['pass_rate/none'] == b['pass_rate/none']


def test_ppo_and_a_reward_function(folder):
  over = dict(
    algorithm='ppo',
    reward=f'{folder}/reward.py:answered',
    train=dict(steps=2),
    eval=dict(samples=2, size=2, data=dict(path='generated:arithmetic:max=9,ops=+,size=4,correct=1')),
  )
  jaxpost.run(config(folder, **over), folder / 'ppo')
  train = [r for r in rows(folder / 'ppo') if r['split'] == 'train']
  assert train[0]['ratio'] == pytest.approx(1, abs=1e-5)
  for row in train:
    assert row['reward'] == pytest.approx(row['rewards/environment/mean'] + row['rewards/answered/mean'])
    assert 0.2 < row['rewards/answered/mean'] <= 0.5
    assert np.isfinite(row['critic/vf_loss']) and row['tools/call_frequency']
  last = rows(folder / 'ppo')[-1]
  assert last['split'] == 'eval' and 0 < last['reward']


def test_the_reward_rises(folder):
  """A policy with shorter turns can call the tool more often."""
  model = episodes.folder(folder / 'wordy', length=2.5)
  made = episodes.config(model, folder / 'env.py', train=dict(steps=20), rollout=dict(prompts=8, slots=16))
  jaxpost.run(made, folder / 'rises')
  rewards = [r['reward'] for r in rows(folder / 'rises')]
  assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15, rewards


@pytest.mark.parametrize(
  'over, words',
  [
    (dict(environment='./nothing.py:Env'), 'no file'),
    (dict(environment='json:loads'), 'making one raised TypeError'),
    (dict(data=dict(path='text.jsonl')), 'is plain text'),
    (dict(tools=dict(max_turns=0)), 'config.tools.max_turns'),
  ],
)
def test_what_cannot_be_played_is_refused(folder, tmp_path, monkeypatch, over, words):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'text.jsonl').write_text('{"prompt": "a", "answer": "1"}\n')
  with pytest.raises(InputError, match=words):
    jaxpost.run(config(folder, **over), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_inspect_and_evaluate_know_the_environment(folder, run):
  made = config(
    folder, eval=dict(samples=2, size=2, data=dict(path='generated:arithmetic:max=9,ops=+,size=4,correct=1'))
  )
  stage = config_lib.parse(made)['grpo']
  (prepared,) = prepare.prepare_all(made)
  with contextlib.closing(prepared):
    shown = [str(x) for x in preview_stage.show_stage(prepared, 1)]
  assert any('tool: nth' in line for line in shown)
  assert any(line.startswith('method: ') and 'rl.aggregate token' in line for line in shown)
  found = inference.evaluate(inference.from_run(run), stage)
  assert found['rows'] == 2 and found['reward'] > 0


def main(folder, tag, rank, count, address):
  """One of the processes of a run."""
  cluster.connect(address, int(count), int(rank))
  turns.parse = episodes.parse
  folder = pathlib.Path(folder)
  jaxpost.run(config(folder, tools=dict(workers=2)), folder / tag)


def test_two_processes_play_what_one_plays(folder, run):
  address = free_address()
  children = [
    subprocess.Popen(
      [sys.executable, __file__, str(folder), 'two', str(rank), '2', address],
      cwd=ROOT,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env=os.environ | {'PYTHONPATH': f'{ROOT}:{ROOT}/tests'},
    )
    for rank in range(2)
  ]
  try:
    said = [child.communicate(timeout=500) for child in children]
  finally:
    for child in children:
      child.kill()
  for child, (out, err) in zip(children, said):
    assert child.returncode == 0, out[-2000:] + err[-4000:]
  mine, its = (rollout_files.load(x / 'rollouts/grpo/1.npz')[0] for x in (folder / 'two', run))
  same = (mine.completions == its.completions).all(axis=1)
  assert same.mean() > 0.9, same
  assert np.abs(mine.logprobs - its.logprobs)[same].max() < 1e-4
  assert (mine.rewards['recorded'] == its.rewards['recorded'])[same].all()
  one = json.loads((folder / 'two/samples/grpo/1.jsonl').open().readline())
  assert one['components']['environment'] == one['reward']


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  main(*sys.argv[1:])
