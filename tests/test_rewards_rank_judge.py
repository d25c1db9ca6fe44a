"""`rank_judge`: a model behind a URL ranks the completions of a group; its ranking may be biased, wrong or missing."""

import re

import judge_double
import pytest

from jaxpost.errors import InputError
from jaxpost.rewards import rank_judge
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.workers import call


@pytest.fixture
def double():
  with judge_double.doubles() as start:
    yield start


def shown(text):
  """The answers of a request, in the order in which the judge sees them."""
  return re.findall(r'^Answer \d+:\n(.*)$', text, re.M)


def by_length(text, attempt=1):
  """The reply of a judge that prefers short answers."""
  del attempt
  answers = shown(text)
  return 'Ranking: ' + ' > '.join(str(n) for n, _ in sorted(enumerate(answers, 1), key=lambda x: len(x[1])))


def make(url, **options):
  return rank_judge.RankJudge(url, 'm', pause=0.01, **options)


def test_ranks_become_rewards_and_equal_texts_are_shown_once(double):
  server, logged = double(by_length), []
  judge = make(server.url)
  rewards = judge(['p'] * 5, ['aaa', 'a', 'aaaaa', 'a', 'aaaa'], log_metric=lambda *x: logged.append(x))
  assert rewards == [pytest.approx(x) for x in (2 / 3, 1, 0, 1, 1 / 3)]
  texts = [body['messages'][0]['content'] for _, _, body in server.requests]
  assert sorted(map(shown, texts)) == sorted([['aaa', 'a', 'aaaaa', 'aaaa'], ['aaaa', 'aaaaa', 'a', 'aaa']])
  assert dict(logged) == {'rank_judge_without_ranking': 0, 'rank_judge_agreement': 1}


def test_position_bias_of_judge_cancels_over_orders(double):
  server, logged = double(lambda text, attempt: 'Ranking: 1 > 2 > 3'), []
  assert make(server.url)(['p'] * 3, ['a', 'b', 'c'], log_metric=lambda *x: logged.append(x)) == [0.5] * 3
  assert dict(logged)['rank_judge_agreement'] == 0


def test_single_order_reads_last_ranking_and_shows_messages(double):
  server = double(lambda text, attempt: 'I think\nRanking: 3 > 1\nNo.\n**Ranking: 2 > 1 = 3**')
  prompt = [{'role': 'user', 'content': 'hi'}]
  completions = [[{'role': 'assistant', 'content': x}] for x in 'abc']
  assert make(server.url, orders=1)([prompt] * 3, completions) == [0.25, 1, 0.25]
  assert 'user: hi' in server.requests[0][2]['messages'][0]['content']


def test_equal_answers_send_no_request(double):
  server = double(by_length)
  assert make(server.url)(['p'] * 3, ['same'] * 3) == [0.5] * 3
  assert not server.requests


@pytest.mark.parametrize(
  'reply',
  [
    'no idea',
    'Ranking: 1 > 2',
    'Ranking: 1 > 2 > 3 > 4',
    'Ranking: 1 > 1 > 2',
    'Ranking: 1 > > 2 > 3',
    'Ranking: 0 > 1 > 2',
  ],
)
def test_invalid_ranking_gives_none(double, reply):
  logged = []
  judge = make(double(lambda text, attempt: reply).url, retries=1)
  assert judge(['p'] * 3, ['a', 'b', 'c'], log_metric=lambda *x: logged.append(x)) == [None] * 3
  assert logged == [('rank_judge_without_ranking', 1)]


def test_order_without_a_ranking_leaves_the_other_order(double):
  server = double(lambda text, attempt: by_length(text) if shown(text)[0] == 'a' else 'hm')
  assert make(server.url, retries=0)(['p'] * 3, ['a', 'bb', 'ccc']) == [1, 0.5, 0]


def test_server_error_fails_the_group(double):
  with pytest.raises(call.RewardError, match='no request was answered: HTTP 500'):
    make(double(lambda text, attempt: 500).url, retries=1)(['p'] * 2, ['a', 'b'])


def test_orders_of_presentation_differ():
  assert rank_judge._orders(4, 4) == [[0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 2]]
  with pytest.raises(InputError, match='orders=0'):
    make('http://127.0.0.1:1/v1', orders=0)


def test_pool_builds_rank_judge_with_a_template_file(double, tmp_path):
  server = double(by_length)
  template = tmp_path / 'rank.txt'
  template.write_text('{prompt} for {audience}: {count}\n{answers}')
  spec = f'rank_judge?url={server.url}&model=m&template={template}&orders=1'
  group = Group(['p'] * 2, ['long one', 'short'], [[1], [2]], {'audience': ['children'] * 2})
  with RewardPool(spec) as pool:
    (graded,) = pool.grade([group])
  assert graded.error is None and graded.rewards == [0, 1]
  assert server.requests[0][2]['messages'][0]['content'].startswith('p for children: 2\nAnswer 1:\nlong one')
  template.write_text('{prompt}')
  with pytest.raises(InputError, match=r'has no \{answers\}'):
    make(server.url, template=str(template))
