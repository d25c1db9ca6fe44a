"""Built-in rewards of format, regular expressions, JSON schemas, length and repetition; some equal those of TRL."""

import functools
import http.server
import json
import sys
import threading
import urllib.request

import pytest
from golden_losses import CASES

from jaxpost.errors import InputError
from jaxpost.rewards import format as forms
from jaxpost.rewards import length
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.workers import call


def chat(text):
  return [{'role': 'assistant', 'content': text}]


def grade(reward, text, **columns):
  """The reward of a text; asserts that a message with this text has the same."""
  columns = {k: [v] for k, v in columns.items()}
  (plain,) = reward(completions=[text], **columns)
  (message,) = reward(completions=[chat(text)], **columns)
  assert plain == message
  return plain


@pytest.mark.parametrize(
  'text, reward',
  [
    ('<think>\na\n</think>\nb', 1.0),
    ('<think></think>', 1.0),
    ('<think>\u00e4\n\n\U0001f600</think>', 1.0),
    ('<think>a', 0.0),
    ('a</think>', 0.0),
    (' <think>a</think>', 0.0),
    ('<think>a<think>b</think>', 0.0),
    ('<think>a</think><think>', 0.0),
    ('', 0.0),
  ],
)
def test_think_format(text, reward):
  assert grade(forms.think_format, text) == reward


def test_think_format_equals_trl():
  """The expected rewards are those of TRL's think_format_reward."""
  texts = [
    '<think>\nThis is my reasoning.\n</think>\nThis is my answer.',
    '<think>a</think>',
    '<think>\nno end',
    'no <think>a</think>',
  ]
  assert forms.think_format(list(map(chat, texts))) == CASES['trl/think_format']


@pytest.mark.parametrize(
  'text, reward',
  [
    ('<think>a</think><answer>b</answer>', 1.0),
    (' <think>a\n</think>\n\n<answer>\u00e4</answer>\n', 1.0),
    ('<think>a</think> b <answer>c</answer>', 0.0),
    ('<think>a</think><answer>b</answer> c', 0.0),
    ('a <think>a</think><answer>b</answer>', 0.0),
    ('<answer>b</answer><think>a</think>', 0.0),
    ('<think>a</think><answer>b</answer><answer>c</answer>', 0.0),
    ('<think>a<answer>b</think></answer>', 0.0),
    ('<think>a</think><answer>b', 0.0),
    ('', 0.0),
  ],
)
def test_tag_format(text, reward):
  assert grade(forms.TagFormat(), text) == reward


def test_tag_format_of_other_tags():
  reward = forms.TagFormat('plan+do+check')
  assert grade(reward, '<plan></plan><do>x</do><check></check>') == 1
  assert grade(reward, '<plan></plan><check></check><do>x</do>') == 0
  assert grade(forms.TagFormat('a.b'), '<axb></axb>') == 0


def test_regex_match():
  column = forms.RegexMatch()
  assert column.needs_columns == ('pattern',)
  assert column(['ab1', 'ab', ''], [r'\d$'] * 3) == [1, 0, 0]
  assert column(['a', 'a', 'a'], ['(', None, 'a']) == [None, None, 1]
  option = forms.RegexMatch(pattern='^\u00e4+')
  assert option.needs_columns == ()
  assert grade(option, '\u00e4b') == 1 and grade(option, 'b\u00e4') == 0
  full = forms.RegexMatch(pattern='a+', full=True)
  assert [grade(full, t) for t in ('aa', 'aab', '')] == [1, 0, 0]
  # The option overrides the column.
  assert option(['\u00e4'], pattern=['x']) == [1]


SCHEMA = {
  'type': 'object',
  'required': ['name'],
  'properties': {'name': {'type': 'string'}, 'age': {'type': 'integer', 'minimum': 0}},
}


@pytest.fixture
def jsonschema():
  return pytest.importorskip('jsonschema', reason="not installed: pip install -e '.[rewards]'")


@pytest.mark.usefixtures('jsonschema')
@pytest.mark.parametrize(
  'text, reward',
  [
    ('{"name": "a", "age": 3}', 1.0),
    ('```json\n{"name": "\u00e4"}\n```', 1.0),
    ('{"name": "a", "age": -1}', 0.0),
    ('{"age": 3}', 0.0),
    ('{"name": NaN}', 0.0),
    ('here: {"name": "a"}', 0.0),
    ('', 0.0),
    ('\ud800', 0.0),
    ('[' * 100_000, 0.0),
    ('1' * 10_000, 0.0),
  ],
)
def test_json_schema(text, reward, tmp_path):
  path = tmp_path / 'schema.json'
  path.write_text(json.dumps(SCHEMA))
  assert grade(forms.JsonSchema(str(path)), text) == reward
  column = forms.JsonSchema()
  assert column.needs_columns == ('schema',)
  assert grade(column, text, schema=SCHEMA) == reward
  assert grade(column, text, schema=json.dumps(SCHEMA)) == reward


@pytest.mark.usefixtures('jsonschema')
def test_invalid_json_schema_in_row_gives_none_and_in_file_is_refused(tmp_path):
  reward = forms.JsonSchema()
  for schema in (None, 3, '{', {'type': 'thing'}, ['a'], ''):
    assert grade(reward, '{}', schema=schema) is None
  assert grade(reward, '{}', schema=True) == 1
  path = tmp_path / 'schema.json'
  for text in ('{', '{"type": 3}', '3'):
    path.write_text(text)
    with pytest.raises(InputError, match='schema.json'):
      forms.JsonSchema(str(path))
  with pytest.raises(InputError, match='No such file'):
    forms.JsonSchema(str(tmp_path / 'gone.json'))


@pytest.mark.usefixtures('jsonschema')
def test_json_schema_fetches_nothing(tmp_path):
  (tmp_path / 'schema.json').write_text('{}')
  serve = functools.partial(Quiet, directory=str(tmp_path))
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), serve) as server:
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}/schema.json'
    assert urllib.request.urlopen(url).read() == b'{}'
    with pytest.raises(call.RewardError, match=f'refers to .*{url}'):
      forms.JsonSchema()(['{}'], [{'$ref': url}])
    server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *unused):
    pass


def test_json_schema_without_jsonschema_package_is_refused(monkeypatch):
  monkeypatch.setitem(sys.modules, 'jsonschema', None)
  with pytest.raises(InputError, match=r"'jsonschema', .*'.\[rewards\]'"):
    forms.JsonSchema()


def of_lengths(reward, *lengths):
  return reward(completion_ids=[[1] * n for n in lengths], answer=['x'])


def test_overlong_equals_trl():
  """The expected rewards are those of TRL's get_soft_overlong_punishment(100, 20)."""
  reward = length.Overlong(max=100, buffer=20)
  assert of_lengths(reward, 50, 80, 85, 90, 100, 101) == CASES['trl/soft_overlong_max100_cache20']
  assert of_lengths(length.Overlong(100, 20, 0.5), 0, 90, 100, 900) == [0, -0.25, -0.5, -0.5]
  assert of_lengths(length.Overlong(100), 100, 101) == [0, -1]


def test_length_reward_falls_linearly_from_target():
  reward = length.Length(max=40, target=20)
  assert of_lengths(reward, 0, 5, 20, 30, 40, 99) == [0, 0.25, 1, 0.5, 0, 0]
  assert of_lengths(length.Length(max=40), 0, 10, 40) == [1, 0.75, 0]


def test_repetition_equals_example_of_trl():
  """The example of TRL 1.10, get_repetition_penalty_reward(2, -1.0)."""
  reward = length.Repetition(ngram=2, penalty=-1.0)
  assert reward(completion_ids=[[1, 2, 3, 4], [5] * 5, [5], []]) == [0, -0.75, 0, 0]
  triples = length.Repetition(penalty=-2.0)
  assert triples(completion_ids=[[1, 2, 3, 1, 2, 3]]) == [-0.5]


def test_cosine_length_equals_example_of_trl():
  """0.75 and -0.75 are the example of TRL 1.10, get_cosine_scaled_reward(100)."""
  reward = length.CosineLength(max=100, by='numeric_match')
  ids = [[1] * n for n in (0, 50, 100, 200)]
  rewards = reward(['4', '4', chat('4'), '4'], ids, ['4'] * 4)
  assert rewards == pytest.approx([1.0, 0.75, 0.5, 0.5])
  rewards = reward(['5', '', chat('5'), '\u00e4'], ids, ['4'] * 4)
  assert rewards == pytest.approx([-1.0, -0.75, -0.5, -0.5])
  assert reward(['4'], [[1]], ['none']) == [None]


def test_format_rewards_in_a_pool_with_weights():
  specs = (
    'exact_match',
    'overlong?max=4&buffer=2',
    'length?max=10',
    'repetition?ngram=1',
    'cosine_length?max=4&by=exact_match',
    'tag_format',
    'think_format',
    'regex_match?pattern=^a$',
  )
  with RewardPool(specs, weights=(1.0,) + (0.5,) * 7) as pool:
    pool.check(['answer'])
    (graded,) = pool.grade(
      [Group(['p'] * 3, [chat('a'), chat(''), chat('\u00e4')], [[1], [], [1, 2, 2, 2]], {'answer': ['a'] * 3})]
    )
  assert graded.error is None
  parts = graded.components
  assert parts['exact_match'] == parts['regex_match'] == [1, 0, 0]
  assert parts['overlong'] == [0, 0, -1]
  assert parts['length'] == pytest.approx([0.9, 1.0, 0.6])
  assert parts['repetition'] == [0, 0, -0.5]
  assert parts['cosine_length'] == pytest.approx([0.9268, -1, -0.5], abs=1e-4)
  assert graded.rewards[0] == pytest.approx(1 + 2.8268 / 2, abs=1e-4)
