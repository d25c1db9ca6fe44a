"""The viewer of episodes: index, requests over HTTP, the page in one file.

Legend: N sequences, C completion tokens.
"""

import json
import re
import shutil
import subprocess
import threading
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest

from jaxpost.errors import InputError
from jaxpost.rl import reward_metrics
from jaxpost.rollout import rollout_files
from jaxpost.stage.config import defaults
from jaxpost.tools import rollout_index, rollout_view
from jaxpost.types import Credit, Prompt, Rollout

GROUP = 4


def row(step, prompt, sample, **fields):
  return {
    'split': 'train',
    'prompt': f'question {prompt} <b>',
    'completion': f'said {step} {prompt} {sample} </script><script>alert(1)</script>',
    'reward': float(sample == 0),
    'components': {'exact_match': float(sample == 0)},
    'length': 3 + sample,
    'finished': True,
    'prompt_index': prompt,
    'sample': sample,
    'expected': '42',
    **fields,
  }


def write(run, step, rows, stage='grpo'):
  path = run / f'samples/{stage}/{step}.jsonl'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(r, ensure_ascii=False) + '\n' for r in rows), 'utf-8')


@pytest.fixture
def run(tmp_path):
  """Two steps of two prompts of four samples; in step 2 one has no reward and one is truncated."""
  write(tmp_path, 1, [row(1, p, s) for p in range(2) for s in range(GROUP)])
  rows = [row(2, p, s) for p in range(2) for s in range(GROUP)]
  rows[5] |= {'reward': None, 'error': 'judge: timeout'}
  rows[2] |= {'finished': False, 'completion': 'it said "Größe"\nand went on'}
  write(tmp_path, 2, rows)
  (tmp_path / 'config.json').write_text(json.dumps(defaults() | {'algorithm': 'grpo'}))
  return tmp_path


def test_trouble_comes_first(run):
  index = rollout_index.Index(run)
  first, second, third = (index.full(n) for n in index.find(rollout_index.Query())[:3])
  assert first['error'] == 'judge: timeout' and second['finished'] is False and third['short']['step'] == 2
  assert index.overview()['failed'] == index.overview()['truncated'] == 1


@pytest.mark.parametrize(
  'query, count',
  [
    (dict(), 16),
    (dict(step=1), 8),
    (dict(only='failed'), 1),
    (dict(only='truncated'), 1),
    (dict(only='right'), 4),
    (dict(only='wrong'), 11),
    (dict(lowest=0.5), 4),
    (dict(highest=0.5), 11),
    (dict(text='SAID 2 1'), 4),
    (dict(text='"größe"\n'), 1),
    (dict(text='nobody wrote this'), 0),
    (dict(stage='sft'), 0),
  ],
)
def test_filters(run, query, count):
  assert len(rollout_index.Index(run).find(rollout_index.Query(**query))) == count


def test_orders(run):
  index = rollout_index.Index(run)
  for sort in ('length', 'reward'):
    up = [
      index.episodes[n][sort] for n in index.find(rollout_index.Query(sort=sort)) if index.episodes[n][sort] is not None
    ]
    down = [index.episodes[n][sort] for n in index.find(rollout_index.Query(sort=f'-{sort}'))]
    assert up == sorted(up) and [x for x in down if x is not None] == up[::-1]
  with pytest.raises(InputError, match='sort'):
    index.find(rollout_index.Query(sort='beauty'))


def test_groups_and_history(run):
  index = rollout_index.Index(run)
  assert index.group(5) == [4, 5, 6, 7]
  assert [index.episodes[n]['step'] for n in index.history(5)] == [1] * GROUP + [2] * GROUP


def test_it_follows_a_run(run):
  index = rollout_index.Index(run)
  assert not index.refresh()
  with (run / 'samples/grpo/3.jsonl').open('w') as file:
    file.write(json.dumps(row(3, 0, 0)) + '\n' + json.dumps(row(3, 0, 1))[:40])  # being written
  assert index.refresh() and index.overview()['episodes'] == 17
  write(run, 3, [row(3, 0, s) for s in range(GROUP)])
  assert index.refresh() and index.overview()['episodes'] == 20
  assert len(index.find(rollout_index.Query(step=3))) == GROUP


def test_a_folder_of_no_run_is_refused(tmp_path):
  with pytest.raises(InputError, match='not the folder of a run'):
    rollout_view.Viewer(tmp_path)
  (tmp_path / 'config.json').touch()  # before the first sample
  assert not rollout_view.Viewer(tmp_path).index.episodes


def test_a_hundred_thousand(tmp_path):
  line = row(1, 7, 3, completion='x' * 200)
  for step in range(1, 11):
    write(tmp_path, step, [line | {'prompt_index': n // GROUP, 'sample': n % GROUP} for n in range(10_000)])
  start = time.process_time()
  viewer = rollout_view.Viewer(tmp_path)
  answer = viewer.answer('/api/episodes', {'page': '1999', 'size': '50'})
  assert answer['total'] == 100_000 and len(answer['episodes']) == 50
  assert viewer.answer('/api/episodes', {'page': '2000'})['episodes'] == []
  assert len(json.dumps(answer)) < 100_000 and time.process_time() - start < 30


def test_tokens_of_kept_rollouts(run):
  completions = np.array([[72 + n, 105, 33] for n in range(2 * GROUP)], np.int32)
  logprobs = -np.arange(6 * GROUP, dtype=np.float32).reshape(2 * GROUP, 3)
  prompts = tuple(Prompt(n, np.array([65]), f'question {n} <b>', {}) for n in range(2))
  lengths = np.full(2 * GROUP, 3)
  rollout = Rollout(
    prompts,
    completions=completions,
    lengths=lengths,
    logprobs=logprobs,
    behavior_logprobs=logprobs,
    finished=lengths > 0,
    step=1,
    version=0,
  )
  arrays = {'advantages': logprobs + 50, 'old_logprobs': logprobs + np.log(2.0).astype(np.float32)}
  experience = types.SimpleNamespace(rollout=rollout, rewards=lengths * 1.0, verdicts=lengths * 1.0)
  rollout_files.save(run / 'rollouts/grpo/2.npz', experience, Credit(arrays, np.ones_like(logprobs), {}))
  viewer = rollout_view.Viewer(run)
  tokens = viewer.answer('/api/episode', {'id': '13'})['tokens']  # step 2, prompt 1, sample 1
  assert tokens['text'] == ['M', 'i', '!'] and tokens['logprob'] == logprobs[5].tolist()
  assert tokens['ratio'] == pytest.approx([2, 2, 2]) and tokens['advantage'] == (logprobs[5] + 50).tolist()
  assert viewer.answer('/api/episode', {'id': '2'})['tokens'] is None  # step 1 was not kept


def test_over_http(run):
  server = rollout_view.make_server(run, 0)
  threading.Thread(target=server.serve_forever, daemon=True).start()

  def get(path, **headers):
    asked = urllib.request.Request(f'http://127.0.0.1:{server.server_port}{path}', headers=headers)
    with urllib.request.urlopen(asked, timeout=20) as answer:
      return answer.headers['Content-Type'], answer.read().decode()

  try:
    kind, text = get('/')
    assert kind.startswith('text/html') and 'const DATA = null;' in text
    for request in re.findall(r"ask\('(\w+)'", text):  # what the page asks is there
      assert json.loads(get(f'/api/{request}?id=3')[1]), request
    assert json.loads(get('/api/group?id=3')[1])[3]['expected'] == '42'
    assert json.loads(get('/api/episodes?lowest=0.5&size=3&page=1')[1])['total'] == 4
    for wrong in ('/api/episode?id=99', '/api/episodes?step=x', '/etc/passwd', '/api/episode?id=nan'):
      with pytest.raises(urllib.error.HTTPError, match='404'):
        get(wrong)
    with pytest.raises(urllib.error.HTTPError, match='403'):
      get('/api/overview', Host='evil.example')
  finally:
    server.shutdown()
    server.server_close()


def test_one_file(run, tmp_path):
  out = tmp_path / 'episodes.html'
  assert rollout_view.write_file(run, out, most=10) == 10
  text = out.read_text('utf-8')
  assert '<script>alert' not in text and 'http://' not in text and 'https://' not in text
  data = json.loads(re.search(r'const DATA = (.*);\n', text)[1])
  assert data['episodes'][0]['error'] == 'judge: timeout' and len(data['episodes']) == 10
  assert data['overview']['episodes'] == 16


@pytest.mark.skipif(not shutil.which('node'), reason='node is not installed')
def test_the_script_of_the_file_filters_as_the_server_does(run, tmp_path):
  """The page's own filter, run by node on the data of a file, against the index."""
  rollout_view.write_file(run, tmp_path / 'a.html', most=99)
  script = re.search(r'<script>\n(.*)</script>', (tmp_path / 'a.html').read_text('utf-8'), re.S)[1]
  queries = [
    dict(only='failed'),
    dict(only='right'),
    dict(only='wrong', step='2'),
    dict(text='größe'),
    dict(lowest='0.5'),
    dict(sort='-length'),
    dict(sort='oldest'),
  ]
  asked = [{'page': 0, 'size': 50, 'sort': 'trouble', **q} for q in queries]
  parts = [
    script[: script.index('const $')],
    script[script.index('function fromFile') : script.index('function pills')],
  ]
  (tmp_path / 'a.js').write_text(
    '\n'.join(parts)
    + f'console.log(JSON.stringify({json.dumps(asked)}.map(q => fromFile("episodes", q).episodes.map(e => e.id))))',
    'utf-8',
  )
  done = subprocess.run(['node', tmp_path / 'a.js'], text=True, capture_output=True, timeout=60)
  assert done.returncode == 0, done.stderr
  index = rollout_index.Index(run)
  for query, found in zip(asked, json.loads(done.stdout)):
    wanted = index.find(rollout_view._query({k: str(v) for k, v in query.items()}))
    assert sorted(found) == sorted(wanted), query
    if query['sort'] != 'trouble':
      key = query['sort'].lstrip('-').replace('oldest', 'step')
      assert [index.episodes[n][key] for n in found] == [index.episodes[n][key] for n in wanted], query


def test_rows_name_the_expected_answer_and_turns():
  assert reward_metrics._expected({'answer': ['1', '2'], 'x': [0, 0]}, 1) == {'expected': '2'}
  assert reward_metrics._expected({'question': ['1']}, 0) == {}
  call = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'f'}}]}
  assert reward_metrics._turns([call, {'role': 'tool', 'content': 'y'}])['turns'] == [
    {'role': 'assistant', 'tool_calls': call['tool_calls']},
    {'role': 'tool', 'content': 'y'},
  ]
  assert reward_metrics._turns('text') == reward_metrics._turns([{'role': 'assistant', 'content': 'x'}]) == {}
