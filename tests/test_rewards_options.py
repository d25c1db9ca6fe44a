"""Tests of options in reward specs, reward functions of TRL and verl, and the page's table of builtin rewards."""

import logging
import math
import pathlib
import re

import pytest

from jaxpost.errors import InputError
from jaxpost.rewards import builtin, options
from jaxpost.rewards.groups import Group, stats_of
from jaxpost.rewards.pool import RewardPool

CLONE = pathlib.Path(__file__).resolve().parents[1]
FUNCTIONS = """
import asyncio
import os
from typing import Optional


def scaled(completions, answer, scale: float = 1.0, **columns):
  return [scale * (c == a) for c, a in zip(completions, answer)]


def shown(completions, flag=False, count: 'int' = 2,
          name: Optional[str] = None, **columns):
  return [float(flag is True) + 10 * count + 100 * (name == 'a,b&c%')
          for _ in completions]


def get_factory(size: int, low=-1.0):
  def reward(completion_ids, **columns):
    return [low if len(ids) > size else 0.0 for ids in completion_ids]
  return reward


class Made:
  def __init__(self, bonus: float):
    self.bonus = bonus

  async def __call__(self, completions, **columns):
    await asyncio.sleep(0)
    return [self.bonus] * len(completions)


def no_reward(size=1):
  return size


def breaks(size=1):
  raise KeyError(size)


def keyed(completions, key_env=''):
  return [float(os.environ.get(key_env) == 'secret') for _ in completions]


def trl_extras(completions, trainer_state, log_metric=None, log_extra=None,
               **kwargs):
  log_extra('seen', completions)
  for c in completions:
    log_metric('letters', len(c))
  assert kwargs['answer'] and 'time_limit_s' not in kwargs
  return [float(trainer_state.global_step)] * len(completions)


async def trl_async(prompts, completions, log_metric, **kwargs):
  assert 'trainer_state' in kwargs
  await asyncio.sleep(0)
  log_metric('letters', 100)
  return [None for _ in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None,
                  bonus=0.0):
  if solution_str == 'bad':
    raise ValueError('no score')
  if data_source == 'dict':
    return {'score': bonus + (solution_str == ground_truth), 'acc': 0.5,
            'pred': solution_str}
  if data_source == 'no score':
    return {'acc': 1.0}
  return solution_str == ground_truth and extra_info['index'] == 3


async def slow_score(data_source, solution_str, ground_truth, extra_info):
  await asyncio.sleep(0.3)
  return float(solution_str == ground_truth)
"""


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp('rewards') / 'mine.py'
  path.write_text(FUNCTIONS)
  return path


def group(*completions, **columns):
  size = len(completions)
  return Group(
    ['p'] * size, list(completions), [[1] * len(c) for c in completions], {k: [v] * size for k, v in columns.items()}
  )


def graded(specs, *groups, step=None):
  with RewardPool(specs, timeout_s=20.0) as pool:
    results = pool.grade(list(groups), step)
    return results, stats_of(results), pool.names


@pytest.mark.parametrize(
  'spec, rewards',
  [
    ('scaled?scale=-2.5', [-2.5, 0.0]),
    ('scaled', [1.0, 0.0]),
    ('shown?flag=true&name=a%2Cb%26c%25', [121.0, 121.0]),
    ('shown?count=-3', [-30.0, -30.0]),
    ('get_factory?size=1', [0.0, -1.0]),
    ('get_factory?low=-3&size=0', [-3.0, -3.0]),
    ('Made?bonus=7', [7.0, 7.0]),
  ],
)
def test_options_are_parsed_and_passed_to_the_reward(file, spec, rewards):
  """A column with the name of an option does not replace the option."""
  column = {'scale': 9} if 'scale=' in spec else {'size': 9, 'bonus': 9}
  (result,), _, names = graded(f'{file}:{spec}', group('a', 'bb', answer='a', **column))
  assert result.error is None
  assert result.rewards == rewards
  assert names == (spec.partition('?')[0],)


@pytest.mark.parametrize(
  'spec, message',
  [
    ('scaled?scael=2', "reward scaled: unknown option 'scael'; did you mean 'scale'"),
    ('scaled?completions=2', "unknown option 'completions'; there are"),
    ('scaled?scale=much', "option scale='much' is no float"),
    ('scaled?scale=nan', "option scale='nan' is no float"),
    ('shown?flag=maybe', "option flag='maybe' is no bool"),
    ('shown?count=1.5', "option count='1.5' is no int"),
    ('shown?count', "option 'count' must be key=value"),
    ('shown?count=1&count=2', 'option count is given twice'),
    ('Made', "reward Made: needs the option 'bonus'"),
    ('get_factory', 'wrong signature'),
    ('no_reward?size=2', 'made an int, not a reward function'),
    ('breaks?', r'raised KeyError: 1 at .*mine.py:\d+'),
  ],
)
def test_bad_options_are_refused_with_one_line(file, spec, message):
  with RewardPool(f'{file}:{spec}') as pool:
    with pytest.raises(InputError, match=message) as caught:
      pool.check()
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'spec, message',
  [
    ('overlong', "reward overlong: needs the option 'max'"),
    ('overlong?max=10&bufer=2', "unknown option 'bufer'; did you mean"),
    ('overlong?max=10&buffer=20', 'reward overlong: options max=10, buffer=20'),
    ('repetition?penalty=1', 'penalty <= 0'),
    ('length?max=10&target=10', 'target < max'),
    ('cosine_length?max=9&by=gms8k', "by='gms8k' is not one of"),
    ('regex_match?pattern=(', r"pattern='\('"),
    ('tag_format?tags=a+a', 'must be different names'),
    ('code?timeout=0', 'want timeout > 0'),
    ('judge?model=m&url=ftp://x', 'is no address'),
    ('judge?model=m&url=http://key@host/v1', 'is no address'),
    ('judge?model=m&url=http://host/v1&score=a', 'has no group'),
    ('judge?model=m&url=http://host/v1&template=none.txt', 'No such file'),
  ],
)
def test_bad_options_of_builtins(spec, message):
  with RewardPool(spec) as pool:
    with pytest.raises(InputError, match=message):
      pool.check()


def test_unknown_builtin_lists_all():
  with pytest.raises(InputError) as caught:
    builtin.locate('overlnog?max=3')
  assert "did you mean 'overlong'?" in str(caught.value)
  assert 'docs/rewards.md' in str(caught.value)
  for name in builtin.BUILTIN:
    assert name in str(caught.value)
  # Where config.reward is one string, a comma ends a spec.
  with pytest.raises(InputError, match='name.key=value&key=value, a comma as'):
    builtin.locate('max=400')


class Len:
  __name__ = 'len'


def test_short_names_leave_out_options_and_are_unique():
  names = builtin.short_names(
    (
      'regex_match?pattern=a',
      'regex_match?pattern=b',
      'a:f?x=1',
      'b:f',
      'regex_match',
      len,
      Len(),
      'judge?url=http://host:80/v1&model=m',
    )
  )
  assert names == ('regex_match', 'regex_match_2', 'a:f', 'b:f', 'regex_match_3', 'len', 'len_2', 'judge')
  with pytest.raises(InputError, match='given twice'):
    builtin.short_names(('overlong?max=3', 'overlong?max=3'))


def test_one_reward_twice_has_two_components(file):
  (result,), _, _ = graded(('regex_match?pattern=a', 'regex_match?pattern=^a%2B$&full=true'), group('aa', 'ab'))
  assert result.components == {'regex_match': [1, 1], 'regex_match_2': [1, 0]}


def test_secret_named_by_an_option_reaches_the_worker(file, monkeypatch):
  monkeypatch.setenv('MY_API_KEY', 'secret')
  monkeypatch.setenv('OTHER_API_KEY', 'secret')
  spec = f'{file}:keyed?key_env=MY_API_KEY'
  with RewardPool((spec, 'code?insecure=true')) as pool:
    pool.check()
    variables = pool._workers[0]._variables
    assert 'MY_API_KEY' in variables and 'OTHER_API_KEY' not in variables
  (result,), _, _ = graded(spec, group('a'))
  assert result.rewards == [1.0]
  with RewardPool(f'{file}:keyed?key_env=NO_API_KEY') as pool:
    with pytest.raises(InputError, match='variable NO_API_KEY is set'):
      pool.check()


def test_trl_functions_get_trainer_state_and_loggers(file):
  """They are also passed to async functions. Metrics are means over all logged values."""
  specs = f'{file}:trl_extras', f'{file}:trl_async'
  results, stats, _ = graded(specs, group('a', 'bbb', answer='x'), group('cc', answer='x'), step=7)
  assert [r.error for r in results] == [None, None]
  assert [r.rewards for r in results] == [[7.0, 7.0], [7.0]]
  assert stats['logged/letters'] == (1 + 3 + 2 + 100 + 100) / 5
  assert stats['groups'] == 2

  def local(completions, log_metric, **columns):
    log_metric('here', 2)
    return [1.0] * len(completions)

  logging.disable(logging.WARNING)
  try:
    assert graded(local, group('a'))[1]['logged/here'] == 2
  finally:
    logging.disable(logging.NOTSET)


def test_columns_with_names_of_trl_arguments_are_refused(file):
  with RewardPool(f'{file}:trl_extras') as pool:
    with pytest.raises(InputError, match="called 'log_metric'"):
      pool.submit([group('a', answer='x', log_metric=1)])


def verl_group(*texts, source='plain', truth='4', **columns):
  return group(*texts, data_source=source, reward_model={'ground_truth': truth, 'style': 'rule'}, **columns)


def test_verl_scores_dicts_and_errors_become_rewards(file):
  spec = f'verl:{file}:compute_score?bonus=0.5'
  chat = [{'role': 'assistant', 'content': '4'}]
  results, stats, names = graded(
    spec,
    verl_group('4', '5', '', '\u00e4', extra_info={'index': 3}),
    verl_group('4', 'b', source='dict'),
    verl_group('bad', '4'),
    verl_group('4', source='no score'),
    verl_group(chat, source='dict'),
  )
  assert names == ('compute_score',)
  assert results[0].rewards == [1.0, 0.0, 0.0, 0.0]
  assert results[1].rewards == [1.5, 0.5]
  assert results[4].rewards == [1.5]
  assert stats['logged/acc'] == 0.5 and 'logged/pred' not in stats
  assert re.search(r'ValueError: no score at .*mine.py:\d+', results[2].error)
  assert results[2].rewards == [None, None]
  assert "a dict without 'score': acc" in results[3].error


def test_verl_async_scores_overlap(file):
  with RewardPool(f'verl:{file}:slow_score', timeout_s=2.0) as pool:
    pool.check(['data_source', 'reward_model'])
    (result,) = pool.grade([verl_group(*'45' * 8)])
  assert result.rewards == [1.0, 0.0] * 8  # one after the other would take 4.8 s


def test_verl_function_without_its_columns_is_refused(file):
  with RewardPool(f'verl:{file}:compute_score') as pool:
    with pytest.raises(InputError, match="the column 'data_source'"):
      pool.check(['answer'])
    (result,) = pool.grade([verl_group('4', extra_info={'index': 3})])
    assert result.error is None
    wrong_type = group('4', data_source='a', reward_model='4')
    (result,) = pool.grade([wrong_type])
  assert "'reward_model' must be {'ground_truth'" in result.error


def test_rewards_page_lists_every_builtin_and_option():
  """The table of docs/rewards.md has rows | `name` | `option=default` ... | columns | meaning |."""
  text = (CLONE / 'docs/rewards.md').read_text('utf-8')
  rows = dict(re.findall(r'^\| `(\w+)` \|([^|]*)\|', text, re.M))
  assert set(rows) == set(builtin.BUILTIN)
  for name, (target, _) in builtin.BUILTIN.items():
    fn = options.load_callable(f'jaxpost.rewards.{target}', name)
    parameters = options._parameters(fn) if isinstance(fn, type) else {}
    listed = dict(re.findall(r'`(\w+)=?([^`]*)`', rows[name]))
    assert set(listed) == set(parameters), name
    for key, parameter in parameters.items():
      default = parameter.default
      if default in (parameter.empty, None, '') or key == 'score':
        assert listed[key] == '', (name, key)
      elif isinstance(default, bool):
        assert listed[key] == str(default).lower(), (name, key)
      elif isinstance(default, str):
        assert listed[key] == default, (name, key)
      else:
        assert math.isclose(float(listed[key]), default), (name, key)
