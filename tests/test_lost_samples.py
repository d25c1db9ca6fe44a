"""Ten thousand samples whose rewards raise, hang, end their process, or are no numbers: all are rewarded or counted.

`samples/` has every sample of the run. Each must have the reward that the functions return for it, or have none and be
counted as masked. No function returns 0 or less, so that a failure scored as 0 would be noticed.
"""

import json
import math
import os
import pathlib

import pytest
import tiny

import jaxpost
from jaxpost.monitor import metrics

STEPS = 40 if 'JAXPOST_SCORECARD' in os.environ else 4
PROMPTS, GROUP = 32, 8
# Imported by the workers and executed by the test, which computes the expected rewards with the same functions.
FUNCTIONS = """
import os, time, zlib

KINDS = ('raise', 'some', 'all', 'nan', 'short', 'text', 'print', 'wrong') + 8 * ('fine',)


def text(message):
  return message if isinstance(message, str) else message[-1]['content']


def kind(prompt):
  number = zlib.crc32(text(prompt).encode())
  if number % 131 == 0:
    return 'exit'
  return 'hang' if number % 257 == 0 else KINDS[number % len(KINDS)]


def fine(completions, **columns):
  return [1.0 + len(text(c)) for c in completions]


def hostile(completions, prompts, **columns):
  found = kind(prompts[0])
  values = [3.0 + len(text(c)) % 3 for c in completions]
  if found == 'raise':
    raise ValueError('no verdict')
  if found == 'exit':
    os._exit(3)
  if found == 'hang':
    time.sleep(999)
  if found == 'print':
    print('x' * 1_000_000)
  if found == 'some':
    values[1::2] = [None] * len(values[1::2])
  if found == 'all':
    values = [None] * len(values)
  if found == 'nan':
    values[0] = float('nan')
  if found == 'wrong':
    values[0] = {'points': 3.0}
  if found == 'text':
    values[0] = 'three'
  return values[:-1] if found == 'short' else values
"""
MASKS_GROUP = 'raise', 'exit', 'hang', 'nan', 'short', 'text', 'wrong'


def expected(functions, row):
  """The reward that a row of samples/ must have; None if it must be masked."""
  kind = functions['kind'](row['prompt'])
  fine = functions['fine']([row['completion']])[0]
  if kind in MASKS_GROUP or (kind == 'some' and row['sample'] % 2):
    return None
  return fine if kind == 'all' else fine + 3.0 + len(row['completion']) % 3


@pytest.mark.long
def test_samples_of_failing_rewards_are_masked_and_counted(tmp_path, record_property):
  (tmp_path / 'hostile.py').write_text(FUNCTIONS)
  functions = {}
  exec(FUNCTIONS, functions)
  config = tiny.run_config(
    tiny.folder(tmp_path / 'model'),
    algorithm='grpo',
    reward=f'{tmp_path}/hostile.py:fine,{tmp_path}/hostile.py:hostile',
    data=dict(path='generated:arithmetic:max=99,ops=+,split=train,size=6000,correct=1'),
    train=dict(steps=STEPS, row_length=0),
    rollout=dict(prompts=PROMPTS, group_size=GROUP, max_prompt_length=32, max_new_tokens=4),
    rewards=dict(timeout_s=5.0, max_failed=1.0),
    eval=dict(data=dict(path='')),
    log=dict(every=1, samples_every=1),
  )
  jaxpost.run(config, tmp_path / 'run')
  rows = {r['step']: r for r in metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl') if r['split'] == 'train'}
  assert sorted(rows) == list(range(1, STEPS + 1))
  kinds, samples = set(), 0
  for file in sorted((tmp_path / 'run' / 'samples').rglob('*.jsonl')):
    rows_of_step = [json.loads(line) for line in file.read_text().rstrip('\n').split('\n')]
    assert len({(r['prompt_index'], r['sample']) for r in rows_of_step}) == len(rows_of_step) == PROMPTS * GROUP
    for row in rows_of_step:
      reward = expected(functions, row)
      assert row['reward'] == reward if reward is None else math.isclose(row['reward'], reward), row
      assert row['reward'] is not None or row.get('error') or None in row['components'].values(), row
    step = rows[int(pathlib.Path(file).stem)]
    assert step['masked_samples'] == sum(r['reward'] is None for r in rows_of_step)
    kinds |= {functions['kind'](r['prompt']) for r in rows_of_step}
    samples += len(rows_of_step)
  assert samples == STEPS * PROMPTS * GROUP
  assert kinds >= {*MASKS_GROUP, 'some', 'all', 'print', 'fine'} - ({'exit', 'hang'} if STEPS < 40 else set())
  record_property('cases', samples)


def test_reward_that_sometimes_raises_gives_one_warning_and_shows_prints(tmp_path, capfd):
  file = tmp_path / 'mine.py'
  file.write_text(
    'def mine(completions, prompts, **_):\n'
    '  print("asked", prompts[0])\n'
    '  if prompts[0].startswith("1"):\n'
    '    raise KeyError("one")\n'
    '  return [float(len(c)) for c in completions]\n'
  )
  data = tmp_path / 'data.jsonl'
  data.write_text('{"prompt": "1+1="}\n{"prompt": "2+1="}\n')
  config = tiny.run_config(
    tiny.folder(tmp_path / 'model'),
    algorithm='grpo',
    reward=f'{file}:mine',
    data=dict(path=str(data)),
    train=dict(steps=2, row_length=0),
    rollout=dict(prompts=2, group_size=2, max_prompt_length=32, max_new_tokens=2),
    rewards=dict(max_failed=1.0, workers=1),
    eval=dict(data=dict(path='')),
  )
  summary = jaxpost.run(config, tmp_path / 'run')
  out, err = capfd.readouterr()
  failed = 'the reward of 1 of 2 groups failed (1 groups of this stage so far), and they train nothing: '
  failed += f"reward mine: raised KeyError: 'one' at {file}:4"
  assert [line for line in out.splitlines() if line.startswith('warning')] == [f'warning: grpo step 1: {failed}']
  assert [(w['text'], w['count']) for w in summary['warnings'] if w['kind'] == 'failed'] == [(failed, 2)]
  assert summary['failed_groups/grpo'] == 2
  shown = sorted(line for line in err.splitlines() if 'asked' in line)
  assert shown == ['mine: asked 1+1='] * 2 + ['mine: asked 2+1='] * 2
