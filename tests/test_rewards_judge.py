"""The reward `judge` with a server that answers, fails, is slow, or sends garbage."""

import pathlib
import re
import time

import judge_double
import pytest

from jaxpost.errors import InputError
from jaxpost.rewards import judge
from jaxpost.rewards.groups import Group, stats_of
from jaxpost.rewards.pool import RewardPool
from jaxpost.workers import call


@pytest.fixture
def double():
  """Starts servers that play a judge; see judge_double.py."""
  with judge_double.doubles() as start:
    yield start


@pytest.fixture
def template(tmp_path):
  path = tmp_path / 'template.txt'
  path.write_text('{prompt}|{completion}|{min}-{max}')
  return str(path)


def scores(server, *texts, prompts=None, time_limit_s=None, columns=None, **options):
  reward = judge.Judge(server.url, 'm', pause=0.01, **options)
  return reward(prompts or ['p'] * len(texts), list(texts), time_limit_s=time_limit_s, **(columns or {}))


def test_judge_reads_the_last_score_of_an_answer(double, template):
  answers = {
    'right': 'Good. Score: 10',
    'wrong': 'score = 0',
    'half': '**Score:** 5',
    'two': 'Score: 1\nno, Score: 7.5',
    '': 'Score: 2',
    '\u00e4\U0001f600': 'Score: 3',
    'beyond': 'Score: 11',
    'none': 'I like it',
  }
  server = double(lambda text, attempt: answers[text.split('|')[1]])
  expected = scores(server, *answers, template=template, retries=1)
  assert expected == [1.0, 0.0, 0.5, 0.75, 0.2, 0.3, None, None]
  chat = [[{'role': 'assistant', 'content': text}] for text in answers]
  prompt = [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}]
  assert scores(server, *chat, template=template, retries=0, prompts=[prompt] * 8) == expected
  path, headers, body = server.requests[-1]
  assert path == '/v1/chat/completions' and 'Authorization' not in headers
  assert body['model'] == 'm' and body['temperature'] == 0
  assert body['max_tokens'] == 512
  assert body['messages'][0]['content'].startswith('system: s\nuser: u|')
  assert server.seen['p|right|0-10'] == 1 and server.seen['p|none|0-10'] == 2


def test_score_pattern_and_range_are_options(double):
  server = double(lambda text, attempt: 'Score: 3 <mark>-1</mark>')
  assert scores(server, 'a', score='<mark>(.*?)</mark>', min=-1.0, max=1.0) == [0.0]
  assert scores(server, 'a', min=1.0, max=5.0) == [0.5]
  assert scores(server, 'a', score='(mark)', retries=0) == [None]
  server.plan = lambda text, attempt: 'Score: -3'
  assert scores(server, 'a', min=-4.0, max=0.0) == [0.25]
  assert scores(server, 'a', retries=0) == [None]


def test_values_in_a_template_are_not_expanded_again(double, tmp_path):
  path = tmp_path / 'template.txt'
  path.write_text('{"json": 1} {{completion}} {answer}: {completion}', 'utf-8')
  server = double(lambda text, attempt: 'Score: 5')
  reward = judge.Judge(server.url, 'm', template=str(path))
  assert reward.needs_columns == ('answer',)
  assert reward(['p'], ['{answer} {min}'], answer=[4], other=['x']) == [0.5]
  assert list(server.seen) == ['{"json": 1} {{answer} {min}} 4: {answer} {min}']


def test_rubric_template_of_the_docs_works(double, tmp_path):
  text = (pathlib.Path(__file__).parents[1] / 'docs/rewards.md').read_text('utf-8')
  path = tmp_path / 'rubric.txt'
  path.write_text(re.search(r'### A rubric.*?```text\n(.*?)```', text, re.S)[1], 'utf-8')
  server = double(lambda text, attempt: 'Line 1: yes. Line 2: no.\nScore: 1')
  reward = judge.Judge(server.url, 'm', template=str(path), max=2.0)
  assert reward.needs_columns == ('rubric',)
  assert reward(['2+2?'], ['4'], rubric=['says 4\nis a sentence']) == [0.5]
  (question,) = server.seen
  assert 'says 4\nis a sentence\n' in question and 'from 0 to 2.' in question


@pytest.mark.parametrize(
  'first',
  [
    500,
    503,
    408,
    'no score',
    b'garbage',
    b'{"choices": []}',
    b'[]',
    b'{"choices": [{"message": {"content": null}}]}',
    b'[' * 100_000,
  ],
)
def test_temporary_failures_are_retried(double, first):
  server = double(lambda text, attempt: first if attempt < 3 else 'Score: 5')
  assert scores(server, 'a', 'b') == [0.5, 0.5]
  assert sorted(server.seen.values()) == [3, 3]


def test_rate_limit_waits_for_retry_after(double):
  server = double(lambda text, attempt: 429 if attempt == 1 else 'Score: 5')
  start = time.monotonic()
  assert scores(server, 'a') == [0.5]
  assert time.monotonic() - start > 0.95  # Retry-After


def test_pauses_between_retries_double(monkeypatch, double):
  pauses = []
  monkeypatch.setattr(judge.time, 'sleep', pauses.append)
  server = double(lambda text, attempt: 500)
  reward = judge.Judge(server.url, 'm', retries=4, pause=1.0)
  with pytest.raises(call.RewardError, match='HTTP 500'):
    reward(['p'], ['a'])
  assert len(pauses) == 4
  for i, pause in enumerate(pauses):
    assert 0.5 * 2**i <= pause <= 1.5 * 2**i


def test_answers_without_a_score_after_all_retries_are_masked(double):
  server = double(lambda text, attempt: b'garbage')
  logged = {}
  reward = judge.Judge(server.url, 'm', pause=0.01, retries=2)
  assert reward(['p'] * 2, ['a', 'b'], log_metric=logged.__setitem__) == [None, None]
  assert logged == {'judge_without_score': 1.0}
  assert sorted(server.seen.values()) == [3, 3]


def test_request_that_fails_for_good_masks_only_its_sample(double):
  server = double(lambda text, attempt: 400 if 'long' in text else 'Score: 5')
  assert scores(server, 'a', 'too long', 'b') == [0.5, None, 0.5]
  assert sum(server.seen.values()) == 3


@pytest.mark.parametrize(
  'status, message',
  [
    (401, 'no request was answered: HTTP 401 .*told to fail'),
    (404, 'HTTP 404'),
    (500, 'HTTP 500'),
    (302, 'HTTP 302'),  # a redirect is not followed, as the API key must not go to another server
  ],
)
def test_server_that_answers_no_request_fails_the_group(double, status, message):
  server = double(lambda text, attempt: status)
  with pytest.raises(call.RewardError, match=message):
    scores(server, 'a', 'b', retries=1)
  assert set(server.seen.values()) == {2 if status == 500 else 1}


def test_unreachable_server_fails_the_group(double):
  server = double(None)
  server.shutdown()
  server.server_close()
  with pytest.raises(call.RewardError, match='Connection refused'):
    scores(server, 'a', retries=1)


def test_slow_requests_are_retried_and_then_masked(double):
  server = double(lambda text, attempt: 2.0 if 'slow' in text and (attempt == 1 or 'always' in text) else 'Score: 5')
  assert scores(server, 'slow', 'fast', 'always slow', timeout=0.3, retries=1) == [0.5, 0.5, None]
  # Shortly before the worker would be killed, the rewards that are known by then are returned.
  start = time.monotonic()
  assert scores(server, 'fast', 'always slow', timeout=9.0, time_limit_s=1.0) == [0.5, None]
  assert time.monotonic() - start < 1.0


def test_requests_overlap_up_to_parallel(double):
  server = double(lambda text, attempt: 0.2)
  start = time.monotonic()
  assert scores(server, *map(str, range(16))) == [0.5] * 16
  assert time.monotonic() - start < 1.5  # one after the other, they would take 3.2 seconds
  assert 4 <= server.most <= 8
  server.most = 0
  scores(server, *map(str, range(4)), parallel=1)
  assert server.most == 1


def test_judge_in_a_pool_sends_its_api_key(double, template, monkeypatch, tmp_path):
  """The config of a run holds only the name of the environment variable with the key."""
  server = double(lambda text, attempt: 'Score: 8' if 'a' in text else 'hm')
  monkeypatch.setenv('MY_API_KEY', 'canary-1')
  (tmp_path / 'answer.txt').write_text('{completion}={answer}')
  spec = f'judge?url={server.url}&model=m&api_key_env=MY_API_KEY&pause=0&template={tmp_path}/answer.txt'
  with RewardPool(spec, timeout_s=20.0) as pool:
    assert pool.names == ('judge',)
    with pytest.raises(InputError, match="needs the column 'answer'"):
      pool.check(['question'])
    (graded,) = pool.grade([Group(['p'] * 2, ['a', 'b'], [[1]] * 2, {'answer': ['4'] * 2})])
    assert graded.rewards == [0.8, None] and graded.error is None
    assert stats_of([graded])['logged/judge_without_score'] == 0.5 and stats_of([graded])['masked_rows'] == 1
  assert server.requests[0][1]['Authorization'] == 'Bearer canary-1'
  monkeypatch.delenv('MY_API_KEY')
  with RewardPool(spec) as pool:
    with pytest.raises(InputError, match='MY_API_KEY'):
      pool.check(['answer'])
