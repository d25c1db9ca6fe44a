"""Tests of launch.view, the viewer of sampled episodes: its index, its HTTP requests, and the page in one file.

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


def test_stage_that_samples_nothing_is_refused(tmp_path):
  config_file = tmp_path / 'config.json'
  config_file.write_text(json.dumps(defaults() | {'algorithm': 'sft'}))
  for open_viewer in (
    lambda: rollout_view.make_server(tmp_path, 0),
    lambda: rollout_view.write_file(tmp_path, 'x.html', 9),
  ):
    with pytest.raises(InputError, match='sft samples nothing, so there are no episodes to show; launch.report'):
      open_viewer()
  config_file.write_text(json.dumps(defaults() | {'algorithm': 'grpo'}))  # its first step is still to come
  assert rollout_view.write_file(tmp_path, tmp_path / 'x.html', 9) == 0


def write(run, step, rows, stage='grpo'):
  path = run / f'samples/{stage}/{step}.jsonl'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(r, ensure_ascii=False) + '\n' for r in rows), 'utf-8')


@pytest.fixture
def run(tmp_path):
  """A run with two steps of two prompts with four samples. In step 2, one sample has no reward and one is truncated."""
  write(tmp_path, 1, [row(1, p, s) for p in range(2) for s in range(GROUP)])
  rows = [row(2, p, s) for p in range(2) for s in range(GROUP)]
  rows[5] |= {'reward': None, 'error': 'judge: timeout'}
  rows[2] |= {'finished': False, 'completion': 'it said "Größe"\nand went on'}
  write(tmp_path, 2, rows)
  write(tmp_path, '2-old', rows)  # a copy that somebody has made
  (tmp_path / 'config.json').write_text(json.dumps(defaults() | {'algorithm': 'grpo'}))
  return tmp_path


def test_failed_and_truncated_episodes_come_first(run):
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
def test_filters_select_the_right_number_of_episodes(run, query, count):
  assert len(rollout_index.Index(run).find(rollout_index.Query(**query))) == count


def test_search_finds_the_same_episodes_as_casefolding_each_parsed_row(tmp_path):
  """Files are searched as bytes. Letters whose case folding is longer, or is ASCII, must not make a difference."""
  random = np.random.default_rng(0)
  letters = [*'kKsSiIfFlL n"\\\n', *'ßẞſKİıŉǰﬁﬄﬆÖöΣςσᾼᾳДдꭰᏠ数🙂', '\u2028', '\x01', '\ufffd']
  texts = [''.join(random.choice(letters, 12)) for _ in range(300)]
  texts[50:100] = [text + '\ud800' for text in texts[50:100]]
  for step in range(6):
    path = tmp_path / f'samples/grpo/{step}.jsonl'
    rows_of_step = [row(step, 0, s, completion=text) for s, text in enumerate(texts[50 * step : 50 * step + 50])]
    rows_of_step[0] |= {'turns': [{'role': 'tool', 'content': texts[50 * step]}]}
    json_options = dict(ensure_ascii=step == 5, separators=(',', ':') if step == 2 else None)
    object_store.write_text(path, ''.join(json.dumps(m, **json_options) + '\n' for m in rows_of_step))
  with (tmp_path / 'samples/grpo/3.jsonl').open('rb+') as file:
    file.truncate(3000)  # the last line is cut off
  with (tmp_path / 'samples/grpo/4.jsonl').open('rb+') as file:
    file.write(b'\xff')  # the first line is no UTF-8
  index = rollout_index.Index(tmp_path)
  rows = {e['id']: json.loads(index._line(e['id'])) for e in index.episodes}
  assert 200 < len(rows) < 299
  assert [file.foreign for file in index._files.values()] == [False, True, True, False, False, True]
  starts = random.integers(0, 10, 300)
  queries = [texts[n % 300][at : at + 1 + n % 3] for n, at in enumerate(starts)]
  counts = set()
  for text in [*queries, *map(str.upper, queries), 'strasse', '": "', '", "', 'completion', '42', 'quest']:
    folded = text.casefold()
    actual = index.find(rollout_index.Query(text=text, sort='oldest'))
    expected = [
      n for n, r in rows.items() if any(folded in r[k].casefold() for k in ('prompt', 'completion', 'expected'))
    ]
    assert actual == expected, text
    counts.add(len(actual))
  assert {0, 1, len(rows)} < counts


@pytest.mark.parametrize(
  'text', ['reward', 'step', 'train', 'exact_match', '1.0', 'finished', 'true', 'role', 'tool', 'x', 'nb']
)
def test_search_does_not_match_json_keys_numbers_or_escapes(run, text):
  write(run, 3, [row(3, 0, 0, completion='a\nb', turns=TURNS), row(3, 0, 1, error='judge: "timeout"', reward=None)])
  index = rollout_index.Index(run)

  def found(text):
    return index.find(rollout_index.Query(step=3, text=text))

  assert not index.find(rollout_index.Query(text=text))
  assert found('ADD') == found('zÜrich') == found('city') == found('77') == found('a\nB') == [16]
  assert found('"Timeout"') == [17] and len(found('question')) == 2


def test_search_reads_each_file_once_and_pages_reuse_the_result(run, monkeypatch):
  viewer = rollout_view.Viewer(run)
  reads = []
  folded = rollout_index._folded
  monkeypatch.setattr(rollout_index, '_folded', lambda *args: (reads.append(args), folded(*args))[1])
  pages = [viewer.answer('/api/episodes', {'text': 'SAID', 'size': '5', 'page': str(n)}) for n in range(4)]
  assert len(reads) == 2 and [page['total'] for page in pages] == [16] * 4
  assert len({e['id'] for page in pages for e in page['episodes']}) == 16
  viewer.answer('/api/episodes', {'text': 'said', 'step': '1'})
  assert len(reads) == 3  # only the file of that step
  write(run, 3, [row(3, 0, 0)])
  viewer.answer('/api/overview', {})
  assert viewer.answer('/api/episodes', {'text': 'SAID', 'size': '5'})['total'] == 17


def test_episodes_sort_by_length_and_reward_in_both_directions(run):
  index = rollout_index.Index(run)
  for sort in ('length', 'reward'):
    ascending = [
      index.episodes[n][sort] for n in index.find(rollout_index.Query(sort=sort)) if index.episodes[n][sort] is not None
    ]
    descending = [index.episodes[n][sort] for n in index.find(rollout_index.Query(sort=f'-{sort}'))]
    assert ascending == sorted(ascending) and [x for x in descending if x is not None] == ascending[::-1]
  with pytest.raises(InputError, match='sort'):
    index.find(rollout_index.Query(sort='beauty'))


def test_group_and_history_of_an_episode(run):
  index = rollout_index.Index(run)
  assert index.group(5) == [4, 5, 6, 7]
  assert [index.episodes[n]['step'] for n in index.history(5)] == [1] * GROUP + [2] * GROUP


def test_index_follows_a_running_run(run):
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
  original = rollout_index._short

  def slow_short(*args):
    time.sleep(0.01)
    return original(*args)

  monkeypatch.setattr(rollout_index, '_short', slow_short)
  write(run, 3, [row(3, 0, s) for s in range(GROUP)])
  threads = [threading.Thread(target=index.refresh) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert index.overview()['episodes'] == 20


def test_episodes_removed_by_a_resume_are_forgotten(run):
  viewer = rollout_view.Viewer(run)
  assert viewer.answer('/api/episodes', {'step': '2'})['total'] == 8
  (run / 'samples/grpo/2.jsonl').unlink()
  assert viewer.answer('/api/episodes', {'text': 'SAID 2'})['total'] == 0  # before the index is refreshed
  for number in ('9', '13'):
    with pytest.raises(InputError, match=f'episode {number}: a resume of the run has removed it'):
      viewer.answer('/api/episode', {'id': number})
  assert viewer.answer('/api/overview', {})['episodes'] == 8 and not viewer.index.refresh()
  assert viewer.answer('/api/episodes', {'step': '2'})['total'] == 0
  assert [e['step'] for e in viewer.answer('/api/history', {'id': '5'})] == [1] * GROUP
  write(run, 2, [row(2, 0, 0)])  # the resumed run reaches that step again
  assert viewer.answer('/api/overview', {})['episodes'] == 9
  with pytest.raises(InputError, match='removed'):
    viewer.answer('/api/group', {'id': '8'})  # this place is now that of another episode
  with pytest.raises(InputError, match='there are 17'):
    viewer.answer('/api/group', {'id': '9' * 400})  # larger than any float


def test_best_reward_ignores_removed_samples(run):
  write(run, 3, [row(3, 0, 0) | {'reward': 7.0}])
  index = rollout_index.Index(run)
  assert len(index.find(rollout_index.Query(only='right'))) == 1
  (run / 'samples/grpo/3.jsonl').unlink()
  assert index.refresh()
  right = index.find(rollout_index.Query(only='right'))
  assert right and all(index.episodes[n]['reward'] == 1 for n in right)


def test_folder_that_is_no_run_is_refused(tmp_path):
  with pytest.raises(InputError, match='not the folder of a run'):
    rollout_view.Viewer(tmp_path)
  (tmp_path / 'config.json').touch()  # before the first sample
  assert not rollout_view.Viewer(tmp_path).index.episodes


def test_hundred_thousand_episodes_are_listed_within_30_s_of_cpu_time(tmp_path):
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

  Args:
    scored: which it has of old_logprobs (the sampler's + log 2), ref_logprobs (the sampler's - 0.25) and entropy.
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


def test_tokens_of_kept_rollout_have_logprobs_ratio_kl_and_entropy(run):
  logprobs = keep_rollout(run, 2, ('old_logprobs', 'ref_logprobs', 'entropy'))
  viewer = rollout_view.Viewer(run)
  episode = viewer.answer('/api/episode', {'id': '13'})  # step 2, prompt 1, sample 1
  tokens = episode['tokens']
  assert tokens['text'] == ['M', 'i', '!'] and tokens['logprob'] == logprobs[5].tolist()
  assert tokens['ratio'] == pytest.approx([2, 2, 2]) and tokens['advantage'] == (logprobs[5] + 50).tolist()
  assert tokens['entropy'] == (-logprobs[5] / 2).tolist() and not episode['missing']
  log_ratio = 0.25 + np.log(2)  # log-prob of the policy minus that of the reference
  assert tokens['kl'] == pytest.approx([np.exp(-log_ratio) - 1 + log_ratio] * 3, rel=1e-5)
  assert 'sampler_logprob' not in tokens  # it is shown as `logprob`


def test_missing_token_values_name_existing_config_fields(run):
  keep_rollout(run, 2, ('ref_logprobs',))
  viewer = rollout_view.Viewer(run)
  episode = viewer.answer('/api/episode', {'id': '13'})
  # With one update per rollout, the sampler's log-probs are those of the policy.
  assert episode['tokens']['kl'] == pytest.approx([np.exp(-0.25) - 0.75] * 3, rel=1e-4)
  assert sorted(episode['missing']) == ['entropy', 'ratio']
  episode = viewer.answer('/api/episode', {'id': '2'})  # step 1 was not kept
  assert episode['tokens'] is None and episode['missing'] == {'tokens': 'log.rollouts_every=1'}
  fields = re.findall(r'\b(\w+\.\w+)', ' '.join([*rollout_view.SAVED_BY.values(), 'log.rollouts_every=1']))
  for section, _, field in (name.partition('.') for name in fields):
    assert field in defaults()[section]


def test_browser_shows_filtered_list_and_episode_of_the_file(run, tmp_path):
  """The list follows the filters of the address. The episode has its group, its tokens and what was not saved."""
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
  options = re.findall(r'<option value="(\w+)">', detail[detail.index('id="by"') :])
  assert options[:3] == ['advantage', 'kl', 'logprob']
  assert 'rl.importance=token_truncated' in detail[detail.index('id="missing"') :]


def test_browser_shows_filtered_list_and_episode_of_the_server(run, tmp_path):
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


def test_server_answers_requests_of_the_page_and_refuses_others(run):
  server = rollout_view.make_server(run, 0)
  threading.Thread(target=server.serve_forever, daemon=True).start()

  def get(path, **headers):
    http_request = urllib.request.Request(f'http://127.0.0.1:{server.server_port}{path}', headers=headers)
    with urllib.request.urlopen(http_request, timeout=20) as response:
      return response.headers['Content-Type'], response.read().decode()

  try:
    kind, text = get('/')
    assert kind.startswith('text/html') and 'const DATA = null;' in text
    for request in re.findall(r"ask\('(\w+)'", text):  # every request that the page makes
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
    with pytest.raises(IsADirectoryError):  # not an error of the port
      rollout_view.make_server(run, 0)
  finally:
    server.shutdown()
    server.server_close()


def test_written_file_holds_the_first_episodes_and_no_script_of_a_sample(run, tmp_path):
  out = tmp_path / 'episodes.html'
  assert rollout_view.write_file(run, out, most=10) == 10
  text = out.read_text('utf-8')
  assert '<script>alert' not in text and 'http://' not in text and 'https://' not in text
  data = json.loads(re.search(r'const DATA = (.*);\n', text)[1])
  assert data['episodes'][0]['error'] == 'judge: timeout' and len(data['episodes']) == 10
  assert data['overview']['episodes'] == 16


@pytest.mark.skipif(not shutil.which('node'), reason='node is not installed')
def test_script_of_the_file_filters_like_the_index(run, tmp_path):
  """node runs the page's own filter on the data of a file, and the index answers the same queries."""
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
  requests = [{'page': 0, 'size': 50, 'sort': 'trouble', **q} for q in queries]
  parts = [
    script[: script.index('const $')],
    script[script.index('function fromFile') : script.index('function pills')],
  ]
  (tmp_path / 'a.js').write_text(
    '\n'.join(parts)
    + f'console.log(JSON.stringify({json.dumps(requests)}.map(q => fromFile("episodes", q).episodes.map(e => e.id))))',
    'utf-8',
  )
  result = subprocess.run(['node', tmp_path / 'a.js'], text=True, capture_output=True, timeout=60)
  assert result.returncode == 0, result.stderr
  index = rollout_index.Index(run)
  for query, actual in zip(requests, json.loads(result.stdout)):
    expected = index.find(rollout_view._query({k: str(v) for k, v in query.items()}))
    assert sorted(actual) == sorted(expected), query
    if query['sort'] != 'trouble':
      key = query['sort'].lstrip('-').replace('oldest', 'step')
      assert [index.episodes[n][key] for n in actual] == [index.episodes[n][key] for n in expected], query


def test_sample_rows_have_the_expected_answer_and_turns():
  assert reward_metrics._expected({'answer': ['1', '2'], 'x': [0, 0]}, 1) == {'expected': '2'}
  assert reward_metrics._expected({'question': ['1']}, 0) == {}
  call = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'f'}}]}
  assert reward_metrics._turns([call, {'role': 'tool', 'content': 'y'}])['turns'] == [
    {'role': 'assistant', 'tool_calls': call['tool_calls']},
    {'role': 'tool', 'content': 'y'},
  ]
  assert reward_metrics._turns('text') == reward_metrics._turns([{'role': 'assistant', 'content': 'x'}]) == {}
