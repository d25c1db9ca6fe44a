"""`config.rl.sources`: prompts of several sources, each with its own rewards and sampling settings."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.rewards.groups import Graded, Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.rl import mixture, reward_metrics
from jaxpost.rollout import rollout_codec
from jaxpost.stage import prepare


def right(completions, answer, **columns):
  """Needs a column that the other source does not have."""
  del columns
  return [float(len(c) % 2 == int(a) % 2) for c, a in zip(completions, answer)]


def short(completions, style, **columns):
  """Likewise."""
  del columns
  assert set(style) == {'terse'}
  return [1 / (1 + len(c)) for c in completions]


def config(sources, **over):
  fields = dict(max_new_tokens=8, min_new_tokens=0, top_k=0)
  return types.SimpleNamespace(
    rl=types.SimpleNamespace(sources=sources, sampling_mask=over.pop('sampling_mask', False)),
    rollout=types.SimpleNamespace(**fields),
    environment=over.pop('environment', ''),
    train_on_rollouts=over.pop('train_on_rollouts', ''),
  )


ROWS = types.SimpleNamespace(name='a + b', sizes=(3, 5))


def test_entries_are_read():
  found = mixture.parse(
    config(('sums?rewards=right+short&max_new_tokens=4', 'chat?top_p=0.5')), ('right', 'short'), ROWS
  )
  assert found == (
    {'name': 'sums', 'rewards': ['right', 'short'], 'sampling': {'max_tokens': 4}},
    {'name': 'chat', 'rewards': ['right', 'short'], 'sampling': {'top_p': 0.5}},
  )


@pytest.mark.parametrize(
  'entries, over, message',
  [
    (('a',), {}, '1 entries for 2 sources of a + b'),
    (('a', 'a'), {}, 'a is given twice'),
    (('a', 'my source'), {}, "'my source' must be NAME"),
    (('a', 'b?reward=right'), {}, "no option 'reward'; did you mean 'rewards'"),
    (('a', 'b?temperature=0.5'), {}, 'one temperature, config.rollout.temperature'),
    (('a', 'b?rewards=wrong'), {}, "no reward 'wrong'; config.reward has right, short"),
    (('a', 'b?rewards='), {}, "no reward ''"),
    (('a', 'b?top_k'), {}, "'top_k' must be option=value"),
    (('a', 'b?top_k=1&top_k=2'), {}, "'top_k=2' must be option=value, given once"),
    (('a', 'b?top_k=x'), {}, "top_k='x' is no int"),
    (('a', 'b?top_p=nan'), {}, 'top_p=nan is not from 0 to 1'),
    (('a', 'b?max_new_tokens=9'), {}, 'more than config.rollout.max_new_tokens=8'),
    (('a', 'b?max_new_tokens=2&min_new_tokens=3'), {}, 'min_new_tokens=3 is more than max_new_tokens=2'),
    (('a', 'b?max_new_tokens=2'), dict(environment='x:Y'), 'episodes of config.environment'),
    (('a', 'b?top_k=2'), dict(sampling_mask=True), 'sampling_mask'),
    (('a', 'b?top_k=2'), dict(train_on_rollouts='run'), 'config.train_on_rollouts keep the sources'),
  ],
)
def test_wrong_entries_are_refused(entries, over, message):
  with pytest.raises(InputError) as error:
    mixture.parse(config(entries, **over), ('right', 'short'), ROWS, held_out=False)
  assert message in str(error.value) and 'config.rl.sources' in str(error.value)


def test_held_out_rows_of_one_source_are_graded_by_all_functions():
  entries = config(('a?rewards=right', 'b?rewards=short'))
  single = types.SimpleNamespace(name='test', sizes=(4,))
  assert mixture.parse(entries, ('right', 'short'), single) == ()
  with pytest.raises(InputError, match='2 entries for 1 sources of test'):
    mixture.parse(entries, ('right', 'short'), single, held_out=False)


def test_a_group_is_graded_by_its_own_functions(tmp_path, monkeypatch):
  (tmp_path / 'graders.py').write_text(
    'def right(completions, answer, **_):\n  return [1.0] * len(completions)\n'
    'def short(completions, style, **_):\n  return [0.5] * len(completions)\n'
  )
  monkeypatch.chdir(tmp_path)
  specs = ('./graders.py:right', short, './graders.py:short')
  groups = [
    Group(['p'] * 2, ['x', 'yy'], [[1], [2, 2]], {'answer': ['1', '2']}, ['right']),
    Group(['p'] * 2, ['x', 'yy'], [[1], [2, 2]], {'style': ['terse'] * 2}),
  ]
  with RewardPool(specs) as pool:
    names = pool.names
    groups[1] = dataclasses.replace(groups[1], graded_by=names[1:])
    sums, chat = pool.grade(groups)
  assert sums.error is None and sums.rewards == [1.0, 1.0]
  assert sums.components == {names[0]: [1.0, 1.0], names[1]: [None] * 2, names[2]: [None] * 2}
  assert chat.error is None and chat.rewards == [1 / 2 + 0.5, 1 / 3 + 0.5]
  assert chat.components[names[0]] == [None] * 2


def test_the_sum_decides_where_the_deciding_reward_does_not_grade():
  graded = [
    Graded([1.0, 0.0], {'right': [1.0, 0.0], 'short': [None, None]}, None, graded_by=['right']),
    Graded([0.2, 0.7], {'right': [None, None], 'short': [0.2, 0.7]}, None, graded_by=['short']),
    Graded([None, None], {'right': [None, None], 'short': [None, None]}, 'failed', graded_by=['short']),
  ]
  found = reward_metrics.verdicts(graded, reward_metrics.reward_table(graded), 'right')
  np.testing.assert_array_equal(found, [[1, 0], [0.2, 0.7], [np.nan, np.nan]])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(path)


def run_config(folder, tmp_path, **over):
  sums = write(tmp_path / 'sums.jsonl', [{'prompt': f'{n}+{n}=', 'answer': str(2 * n)} for n in range(10)])
  chat = write(tmp_path / 'chat.jsonl', [{'prompt': f'say {n}', 'style': 'terse'} for n in range(6)])
  base = dict(
    reward=(right, short),
    data=dict(path=(sums, chat), weights=(3.0, 1.0)),
    rl=dict(sources=('sums?rewards=right&max_new_tokens=3', 'chat?rewards=short&top_k=1')),
  )
  return tiny.grpo_config(folder, **tiny.merged(base, over))


def facts(item):
  rollout = item.experience.rollout
  metrics = {k: v for k, v in item.info.items() if k.startswith(('sources/', 'reward', 'completion'))}
  return [p.index for p in rollout.prompts], rollout.completions.tolist(), item.experience.rewards.tolist(), metrics


@pytest.mark.parametrize('over', [{}, dict(rollout=dict(staleness=1))])
def test_a_run_mixes_and_resumes_bit_for_bit(folder, tmp_path, over):
  made = run_config(folder, tmp_path, **over)
  stream, again = (jaxpost.policy_and_stream(made)[1] for _ in range(2))
  try:
    found, state = [], None
    for n in range(4):
      if n == 2:
        state = json.loads(json.dumps(stream.state()))
      item = next(stream)
      found.append(facts(item))
      rollout, info = item.experience.rollout, item.info
      names = [p.source['name'] for p in rollout.prompts]
      assert [('style' in p.columns) for p in rollout.prompts] == [name == 'chat' for name in names]
      lengths = rollout.lengths.reshape(len(names), -1)
      completions = rollout.completions.reshape(len(names), 4, -1)
      assert np.isfinite(item.experience.rewards).all() and info['failed_groups'] == 0
      for name, length, tokens in zip(names, lengths, completions):
        if name == 'sums':
          assert length.max() <= 3 < rollout.completions.shape[1]
        else:  # greedy, as only the most probable token may be drawn
          assert (tokens == tokens[:1]).all()
      assert sum(info.get(f'sources/{name}/groups', 0) for name in ('sums', 'chat')) == len(names) == 4
      assert info.get('sources/chat/frac_reward_zero_std', 1) == 1
      rewards = item.experience.rewards.reshape(4, 4)
      for name in set(names):
        own = rewards[[n == name for n in names]]
        assert info[f'sources/{name}/reward'] == pytest.approx(own.mean())
    assert [row['source'] for row in item.samples()[::4]] == names
    saved = rollout_codec.from_text(rollout_codec.to_text(rollout))
    assert [p.source for p in saved.prompts] == [p.source for p in rollout.prompts]
    again.restore(state)
    assert [facts(next(again)) for _ in range(2)] == found[2:]
  finally:
    stream.close()
    again.close()


def test_shares_are_those_of_the_weights(folder, tmp_path):
  (prepared,) = prepare.prepare_all(run_config(folder, tmp_path))
  prepared.close()
  names = [prepared.data.stream.prompt(i).source['name'] for i in range(400)]
  assert names.count('sums') == 300


def test_a_source_without_the_column_of_its_reward_is_refused(folder, tmp_path):
  with pytest.raises(InputError, match='style'):
    prepare.prepare_all(
      run_config(folder, tmp_path, rl=dict(sources=('sums?rewards=right+short', 'chat?rewards=short')))
    )
