"""Whole runs in an environment with tools: GRPO, PPO, resume, replay of rollouts, evaluation, two processes.

Legend: N sequences, C completion tokens.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import children
import episodes
import jax
import numpy as np
import pytest
import tiny

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
  """Parses a random model's turns as tool calls."""
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
def test_sampler_logprobs_of_episodes_match_the_trainer(run):
  """They agree in the first step, for tokens of turns after tool results, too."""
  first = rows(run)[0]
  assert first['ratio'] == pytest.approx(1, abs=1e-5)
  assert first['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  assert first['tools/call_frequency'] > 1 and first['episodes/turns'] > 1
  assert first['tools/failure_frequency'] > 0
  assert first['episodes/failed'] == first['masked_samples'] == 0
  assert first['reward'] == first['rewards/environment/mean'] > 0
  assert first['pass_rate/none'] > 0  # the environment alone decides which completions are correct


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
      # The untrained text between turns of the model; each part is text that the template inserts.
      parts = text.split('\ntool\n')[1:]
      assert parts and all(p.endswith('\nassistant\n') for p in parts)
      assert not arrays['credit/advantages'][n][tools[n]].any()


def test_observation_of_reset_is_appended_to_the_prompt(run):
  rollout, _ = rollout_files.load(run / 'rollouts/grpo/1.npz')
  for prompt in rollout.prompts:
    text = bytes(int(i) for i in prompt.tokens if i < 256).decode()
    answer = prompt.columns['answer']
    assert text.endswith(f'= [{answer}]\nassistant\n' if int(answer) % 2 else '=\nassistant\n')


def test_resumed_episode_run_is_bitwise_identical(folder, run):
  resumed = folder / 'again'
  jaxpost.run(config(folder, train=dict(steps=2)), resumed)
  jaxpost.run(config(folder, train=dict(steps=3)), resumed)
  assert metrics.comparable_rows(resumed / 'metrics.jsonl') == [
    {k: v for k, v in row.items()} for row in metrics.comparable_rows(run / 'metrics.jsonl')
  ]


def test_reproduce_replays_an_episode(run):
  result = reproduce.reproduce(run, 3, 5)
  assert result['identical'] is True
  assert 0 < sum(result['trained']) < len(result['trained'])
  assert result['components'] == {'environment': result['reward']}


@pytest.mark.parametrize('over', [dict(), dict(environment='')], ids=['same config', 'no environment'])
def test_training_on_recorded_episodes_gives_the_same_updates(folder, run, tmp_path, over):
  replay_config = config(folder, train_on_rollouts=str(run), **over)
  jaxpost.run(replay_config, tmp_path / 'replayed')
  for a, b in zip(rows(tmp_path / 'replayed'), rows(run), strict=True):
    assert (a['loss'], a['grad_norm']) == (b['loss'], b['grad_norm'])
    assert a['pass_rate/none'] == b['pass_rate/none']


def test_ppo_adds_a_reward_function_to_the_environment_reward(folder):
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


def test_reward_rises_within_20_steps(folder):
  """The policy learns shorter turns, so that more calls of the tool fit into an episode."""
  model = episodes.folder(folder / 'wordy', length=2.5)
  run_config = episodes.config(model, folder / 'env.py', train=dict(steps=20), rollout=dict(prompts=8, slots=16))
  jaxpost.run(run_config, folder / 'rises')
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
def test_bad_environment_config_is_refused(folder, tmp_path, monkeypatch, over, words):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'text.jsonl').write_text('{"prompt": "a", "answer": "1"}\n')
  with pytest.raises(InputError, match=words):
    jaxpost.run(config(folder, **over), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_inspect_and_evaluate_know_the_environment(folder, run):
  run_config = config(
    folder, eval=dict(samples=2, size=2, data=dict(path='generated:arithmetic:max=9,ops=+,size=4,correct=1'))
  )
  stage = config_lib.parse(run_config)['grpo']
  (prepared,) = prepare.prepare_all(run_config)
  with contextlib.closing(prepared):
    lines = [str(x) for x in preview_stage.show_stage(prepared, 1)]
  assert any('tool: nth' in line for line in lines)
  assert any(line.startswith('method: ') and 'rl.aggregate token' in line for line in lines)
  scores = inference.evaluate(inference.from_run(run), stage)
  assert scores['rows'] == 2 and scores['reward'] > 0


def main(folder, tag, rank, count, address):
  """Runs one process of a run of several processes."""
  cluster.connect(address, int(count), int(rank))
  turns.parse = episodes.parse
  folder = pathlib.Path(folder)
  jaxpost.run(config(folder, tools=dict(workers=2)), folder / tag)


def test_two_processes_sample_the_same_episodes_as_one(folder, run):
  address = children.free_address()
  processes = [
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
    outputs = [process.communicate(timeout=500) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (out, err) in zip(processes, outputs):
    assert process.returncode == 0, out[-2000:] + err[-4000:]
  two_processes, one_process = (rollout_files.load(x / 'rollouts/grpo/1.npz')[0] for x in (folder / 'two', run))
  equal_rows = (two_processes.completions == one_process.completions).all(axis=1)
  assert equal_rows.mean() > 0.9, equal_rows
  assert np.abs(two_processes.logprobs - one_process.logprobs)[equal_rows].max() < 1e-4
  assert (two_processes.rewards['recorded'] == one_process.rewards['recorded'])[equal_rows].all()
  first_sample = json.loads((folder / 'two/samples/grpo/1.jsonl').open().readline())
  assert first_sample['components']['environment'] == first_sample['reward']


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  main(*sys.argv[1:])
