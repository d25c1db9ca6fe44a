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

import browser
import numpy as np
import pytest

from jaxpost.errors import InputError
from jaxpost.rl import reward_metrics
from jaxpost.rollout import rollout_files
from jaxpost.stage.config import defaults
from jaxpost.storage import object_store
from jaxpost.tools import rollout_index, rollout_view
from jaxpost.types import Credit, Prompt, Rollout

GROUP = 4


CALLS = [{'type': 'function', 'function': {'name': 'add', 'arguments': {'city': 'Zürich', 'n': 77}}}]
TURNS = [{'role': 'assistant', 'content': 'a', 'tool_calls': CALLS}, {'role': 'tool', 'content': 'b', 'name': 'add'}]


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


def test_a_run_that_samples_nothing_is_told(tmp_path):
  saved = tmp_path / 'config.json'
  saved.write_text(json.dumps(defaults() | {'algorithm': 'sft'}))
  for use in (lambda: rollout_view.make_server(tmp_path, 0), lambda: rollout_view.write_file(tmp_path, 'x.html', 9)):
    with pytest.raises(InputError, match='sft samples nothing, so there are no episodes to show; launch.report'):
      use()
  saved.write_text(json.dumps(defaults() | {'algorithm': 'grpo'}))  # whose first step is still to come
  assert rollout_view.write_file(tmp_path, tmp_path / 'x.html', 9) == 0


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
  write(tmp_path, '2-old', rows)  # a copy that somebody has made
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


def test_a_text_is_found_as_if_each_row_were_parsed_and_folded(tmp_path):
  """Files are searched as bytes. Letters whose case folding is longer, or in ASCII, must not make a difference."""
  random = np.random.default_rng(0)
  letters = [*'kKsSiIfFlL n"\\\n', *'ßẞſKİıŉǰﬁﬄﬆÖöΣςσᾼᾳДдꭰᏠ数🙂', '\u2028', '\x01', '\ufffd']
  texts = [''.join(random.choice(letters, 12)) for _ in range(300)]
  texts[50:100] = [text + '\ud800' for text in texts[50:100]]
  for step in range(6):
    path = tmp_path / f'samples/grpo/{step}.jsonl'
    metrics = [row(step, 0, s, completion=text) for s, text in enumerate(texts[50 * step : 50 * step + 50])]
    metrics[0] |= {'turns': [{'role': 'tool', 'content': texts[50 * step]}]}
    written = dict(ensure_ascii=step == 5, separators=(',', ':') if step == 2 else None)
    object_store.write_text(path, ''.join(json.dumps(m, **written) + '\n' for m in metrics))
  with (tmp_path / 'samples/grpo/3.jsonl').open('rb+') as file:
    file.truncate(3000)  # ends in a torn line
  with (tmp_path / 'samples/grpo/4.jsonl').open('rb+') as file:
    file.write(b'\xff')  # the first line is no UTF-8
  index = rollout_index.Index(tmp_path)
  rows = {e['id']: json.loads(index._line(e['id'])) for e in index.episodes}
  assert 200 < len(rows) < 299
  assert [file.foreign for file in index._files.values()] == [False, True, True, False, False, True]
  places = random.integers(0, 10, 300)
  asked = [texts[n % 300][at : at + 1 + n % 3] for n, at in enumerate(places)]
  counts = set()
  for text in [*asked, *map(str.upper, asked), 'strasse', '": "', '", "', 'completion', '42', 'quest']:
    wanted = text.casefold()
    found = index.find(rollout_index.Query(text=text, sort='oldest'))
    holds = [n for n, r in rows.items() if any(wanted in r[k].casefold() for k in ('prompt', 'completion', 'expected'))]
    assert found == holds, text
    counts.add(len(found))
  assert {0, 1, len(rows)} < counts


@pytest.mark.parametrize(
  'text', ['reward', 'step', 'train', 'exact_match', '1.0', 'finished', 'true', 'role', 'tool', 'x', 'nb']
)
def test_keys_figures_and_escapes_are_no_texts(run, text):
  write(run, 3, [row(3, 0, 0, completion='a\nb', turns=TURNS), row(3, 0, 1, error='judge: "timeout"', reward=None)])
  index = rollout_index.Index(run)

  def found(text):
    return index.find(rollout_index.Query(step=3, text=text))

  assert not index.find(rollout_index.Query(text=text))
  assert found('ADD') == found('zÜrich') == found('city') == found('77') == found('a\nB') == [16]
  assert found('"Timeout"') == [17] and len(found('question')) == 2


def test_a_search_reads_each_file_once_and_its_next_page_none(run, monkeypatch):
  viewer = rollout_view.Viewer(run)
  read = []
  monkeypatch.setattr(rollout_index, '_folded', lambda *of, was=rollout_index._folded: (read.append(of), was(*of))[1])
  pages = [viewer.answer('/api/episodes', {'text': 'SAID', 'size': '5', 'page': str(n)}) for n in range(4)]
  assert len(read) == 2 and [page['total'] for page in pages] == [16] * 4
  assert len({e['id'] for page in pages for e in page['episodes']}) == 16
  viewer.answer('/api/episodes', {'text': 'said', 'step': '1'})
  assert len(read) == 3  # only the file of that step
  write(run, 3, [row(3, 0, 0)])
  viewer.answer('/api/overview', {})
  assert viewer.answer('/api/episodes', {'text': 'SAID', 'size': '5'})['total'] == 17


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


def test_requests_at_the_same_time_read_a_file_once(run, monkeypatch):
  index = rollout_index.Index(run)
  short = rollout_index._short
  monkeypatch.setattr(rollout_index, '_short', lambda *of: (time.sleep(0.01), short(*of))[1])
  write(run, 3, [row(3, 0, s) for s in range(GROUP)])
  threads = [threading.Thread(target=index.refresh) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert index.overview()['episodes'] == 20


def test_samples_that_a_resume_removes_are_forgotten(run):
  viewer = rollout_view.Viewer(run)
  assert viewer.answer('/api/episodes', {'step': '2'})['total'] == 8
  (run / 'samples/grpo/2.jsonl').unlink()
  assert viewer.answer('/api/episodes', {'text': 'SAID 2'})['total'] == 0  # before the index knows
  for number in ('9', '13'):
    with pytest.raises(InputError, match=f'episode {number}: a resume of the run has removed it'):
      viewer.answer('/api/episode', {'id': number})
  assert viewer.answer('/api/overview', {})['episodes'] == 8 and not viewer.index.refresh()
  assert viewer.answer('/api/episodes', {'step': '2'})['total'] == 0
  assert [e['step'] for e in viewer.answer('/api/history', {'id': '5'})] == [1] * GROUP
  write(run, 2, [row(2, 0, 0)])  # the run comes to that step again
  assert viewer.answer('/api/overview', {})['episodes'] == 9
  with pytest.raises(InputError, match='removed'):
    viewer.answer('/api/group', {'id': '8'})  # another one's place now
  with pytest.raises(InputError, match='there are 17'):
    viewer.answer('/api/group', {'id': '9' * 400})  # more than a float holds


def test_the_best_reward_is_of_samples_that_are_there(run):
  write(run, 3, [row(3, 0, 0) | {'reward': 7.0}])
  index = rollout_index.Index(run)
  assert len(index.find(rollout_index.Query(only='right'))) == 1
  (run / 'samples/grpo/3.jsonl').unlink()
  assert index.refresh()
  right = index.find(rollout_index.Query(only='right'))
  assert right and all(index.episodes[n]['reward'] == 1 for n in right)


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


def keep_rollout(run, step, scored=()):
  """Writes the rollout of a step of 2 prompts and returns its log-probs [2 * GROUP, 3].

  scored: which of old_logprobs (the sampler's + log 2), ref_logprobs (the sampler's - 0.25) and entropy it has.
  """
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
  scores = {'old_logprobs': logprobs + np.log(2.0).astype(np.float32), 'ref_logprobs': logprobs - 0.25}
  scores |= {'entropy': -logprobs / 2, 'sampler_logprobs': logprobs}
  of_step = {name: scores[name] for name in (*scored, 'sampler_logprobs')}
  in_loss = {name: x for name, x in of_step.items() if name != 'entropy'}
  experience = types.SimpleNamespace(rollout=rollout, rewards=lengths * 1.0, verdicts=lengths * 1.0, arrays=of_step)
  credit = Credit({'advantages': logprobs + 50, **in_loss}, np.ones_like(logprobs), {})
  rollout_files.save(run / f'rollouts/grpo/{step}.npz', experience, credit)
  return logprobs


def test_tokens_of_kept_rollouts(run):
  logprobs = keep_rollout(run, 2, ('old_logprobs', 'ref_logprobs', 'entropy'))
  viewer = rollout_view.Viewer(run)
  found = viewer.answer('/api/episode', {'id': '13'})  # step 2, prompt 1, sample 1
  tokens = found['tokens']
  assert tokens['text'] == ['M', 'i', '!'] and tokens['logprob'] == logprobs[5].tolist()
  assert tokens['ratio'] == pytest.approx([2, 2, 2]) and tokens['advantage'] == (logprobs[5] + 50).tolist()
  assert tokens['entropy'] == (-logprobs[5] / 2).tolist() and not found['missing']
  apart = 0.25 + np.log(2)  # of the policy above the reference
  assert tokens['kl'] == pytest.approx([np.exp(-apart) - 1 + apart] * 3, rel=1e-5)
  assert 'sampler_logprob' not in tokens  # which is `logprob`


def test_the_fields_that_save_what_a_run_has_not(run):
  keep_rollout(run, 2, ('ref_logprobs',))
  viewer = rollout_view.Viewer(run)
  found = viewer.answer('/api/episode', {'id': '13'})
  # The sampler's log-probs are those of the policy, as a rollout has one update.
  assert found['tokens']['kl'] == pytest.approx([np.exp(-0.25) - 0.75] * 3, rel=1e-4)
  assert sorted(found['missing']) == ['entropy', 'ratio']
  found = viewer.answer('/api/episode', {'id': '2'})  # step 1 was not kept
  assert found['tokens'] is None and found['missing'] == {'tokens': 'log.rollouts_every=1'}
  fields = re.findall(r'\b(\w+\.\w+)', ' '.join([*rollout_view.SAVED_BY.values(), 'log.rollouts_every=1']))
  for section, _, field in (name.partition('.') for name in fields):
    assert field in defaults()[section]


def test_the_page_in_a_browser(run, tmp_path):
  """The list by the filters of the address; an episode with its group, its tokens and what was not saved."""
  keep_rollout(run, 2, ('ref_logprobs',))
  rollout_view.write_file(run, tmp_path / 'a.html', most=99)
  page = browser.rendered(f'{(tmp_path / "a.html").as_uri()}#only=wrong&step=2&id=13', tmp_path / 'profile')
  index = rollout_index.Index(run)
  rows = [int(number) for number in re.findall(r'class="row" data-id="(\d+)"', page.partition('id="detail"')[0])]
  assert rows == index.find(rollout_index.Query(only='wrong', step=2)) and len(rows) == 5
  assert '16 episodes, 1 without reward, 1 truncated' in page and '&lt;script&gt;alert(1)' in page
  detail = page.partition('id="detail"')[2]
  assert 'Group of 4' in detail and 'question 1 &lt;b&gt;' in detail
  tokens = re.findall(r'<span class="tok" title="([^"]*)"[^>]*>(.*?)</span>', detail)
  assert [text for _, text in tokens] == ['M', 'i', '!'] and 'KL to the reference 0.0288' in tokens[0][0]
  chosen = re.findall(r'<option value="(\w+)">', detail[detail.index('id="by"') :])
  assert chosen[:3] == ['advantage', 'kl', 'logprob']
  assert 'rl.importance=token_truncated' in detail[detail.index('id="missing"') :]


def test_the_page_of_the_server_in_a_browser(run, tmp_path):
  server = rollout_view.make_server(run, 0)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    page = browser.rendered(f'http://localhost:{server.server_port}/#only=failed&id=2', tmp_path / 'profile')
  finally:
    server.shutdown()
    server.server_close()
  rows, _, detail = page.partition('id="detail"')
  assert re.findall(r'class="row" data-id="(\d+)"', rows) == ['13'] and '1 to 1 of 1' in rows
  assert 'said 1 0 2' in detail and 'log.rollouts_every=1' in detail[detail.index('id="missing"') :]


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
    with pytest.raises(InputError, match=f'--port={server.server_port}: .*; choose another, or 0 for any'):
      rollout_view.make_server(run, server.server_port)
    (run / 'samples/grpo/9.jsonl').mkdir()
    with pytest.raises(IsADirectoryError):  # which is none of the port's
      rollout_view.make_server(run, 0)
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
  write(run, 3, [row(3, 0, 0, turns=TURNS)])
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
    *(dict(text=text) for text in ('zürich', 'city', '77', 'timeout', 'reward', 'tool')),
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
