"""`config.rl.sources`: prompts of several sources, each with its own rewards, environment and sampling settings."""

import dataclasses
import json
import types

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_gradients as exact
import tiny

import jaxpost
from jaxpost.algorithms import grpo
from jaxpost.environments import turns
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.planning import dry_run
from jaxpost.programs import train as programs
from jaxpost.rewards.groups import Graded, Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.rl import batching, mixture, reward_metrics
from jaxpost.rollout import rollout_codec
from jaxpost.stage import prepare
from jaxpost.types import Credit, Experience, Prompt, Rollout, RowShape


def right(completions, answer, **columns):
  """Needs a column that the other source does not have."""
  del columns
  return [float(len(c) % 2 == int(a) % 2) for c, a in zip(completions, answer)]


def short(completions, style, **columns):
  """Needs a column that the first source does not have."""
  del columns
  assert set(style) == {'terse'}
  return [1 / (1 + len(c)) for c in completions]


def config(sources, **over):
  """The part of a config that `mixture.parse` reads."""
  fields = dict(max_new_tokens=8, min_new_tokens=0, top_k=0, temperature=0.9)
  return types.SimpleNamespace(
    rl=types.SimpleNamespace(sources=sources, sampling_mask=over.pop('sampling_mask', False)),
    rollout=types.SimpleNamespace(**fields),
    environment=over.pop('environment', ''),
    train_on_rollouts=over.pop('train_on_rollouts', ''),
  )


ROWS = types.SimpleNamespace(name='a + b', sizes=(3, 5))


def test_entries_set_rewards_and_sampling_of_their_source():
  parsed = mixture.parse(
    config(('sums?rewards=right+short&max_new_tokens=4', 'chat?top_p=0.5')), ('right', 'short'), ROWS
  )
  assert parsed == (
    {'name': 'sums', 'rewards': ['right', 'short'], 'sampling': {'max_tokens': 4}},
    {'name': 'chat', 'rewards': ['right', 'short'], 'sampling': {'top_p': 0.5}},
  )


def test_each_source_has_an_environment_and_a_temperature():
  entries = ('sums?environment=Shop&temperature=0.5', 'chat?environment=none', 'dice?environment=Dice')
  rows = types.SimpleNamespace(name='a + b + c', sizes=(3, 5, 1))
  parsed = mixture.parse(config(entries, environment='./x.py:Shop, y:Dice'), (), rows)
  assert [source['environment'] for source in parsed] == ['Shop', '', 'Dice']
  assert [source['sampling'] for source in parsed] == [{'temperature': x} for x in (0.5, 0.9, 0.9)]
  tools = mixture.tools_by_row({'Shop': ['buy'], 'Dice': ['roll']}, parsed, rows)
  assert [tools(n) for n in (0, 2, 3, 7, 8)] == [['buy'], ['buy'], [], [], ['roll']]


def test_single_held_out_source_takes_run_temperature_and_no_environment():
  single = types.SimpleNamespace(name='test', sizes=(4,))
  assert mixture.parse(config(('a', 'b?temperature=0.5')), (), single) == ({'sampling': {'temperature': 0.9}},)
  several = config(('a?environment=Shop', 'b?environment=Dice'), environment='x:Shop,y:Dice')
  with pytest.raises(InputError, match='name as many sources'):
    mixture.parse(several, (), single)


@pytest.mark.parametrize(
  'entries, over, message',
  [
    (('a',), {}, '1 entries for 2 sources of a + b'),
    (('a', 'a'), {}, 'a is given twice'),
    (('a', 'my source'), {}, "'my source' must be NAME"),
    (('a', 'b?reward=right'), {}, "no option 'reward'; did you mean 'rewards'"),
    (('a', 'b?temperature=0'), {}, 'temperature=0.0 is not from 0.001 to 10000.0'),
    (('a', 'b?environment=Maze'), {}, "no environment 'Maze'; config.environment has nothing"),
    (
      ('a', 'b?environment=Maze'),
      dict(environment='./x.py:Shop,y:Dice'),
      'a: choose one with environment=Shop|Dice|none',
    ),
    (
      ('a?environment=none', 'b?environment=Maze'),
      dict(environment='./x.py:Shop,y:Dice'),
      'has Shop, Dice, and none is',
    ),
    (('a', 'b?rewards=wrong'), {}, "no reward 'wrong'; config.reward has right, short"),
    (('a', 'b?rewards='), {}, "no reward ''"),
    (('a', 'b?top_k'), {}, "'top_k' must be option=value"),
    (('a', 'b?top_k=1&top_k=2'), {}, "'top_k=2' must be option=value, given once"),
    (('a', 'b?top_k=x'), {}, "top_k='x' is no int"),
    (('a', 'b?top_p=nan'), {}, 'top_p=nan is not from 0 to 1'),
    (('a', 'b?max_new_tokens=9'), {}, 'more than config.rollout.max_new_tokens=8'),
    (('a', 'b?max_new_tokens=2&min_new_tokens=3'), {}, 'min_new_tokens=3 is more than max_new_tokens=2'),
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


def test_reward_sum_is_the_verdict_where_deciding_reward_does_not_grade():
  graded = [
    Graded([1.0, 0.0], {'right': [1.0, 0.0], 'short': [None, None]}, None, graded_by=['right']),
    Graded([0.2, 0.7], {'right': [None, None], 'short': [0.2, 0.7]}, None, graded_by=['short']),
    Graded([None, None], {'right': [None, None], 'short': [None, None]}, 'failed', graded_by=['short']),
    # `right` could not grade these answers.
    Graded([0.0, 1.0], {'right': [None, None], 'short': [0.0, 1.0]}, None, graded_by=['right', 'short']),
  ]
  verdicts = reward_metrics.verdict_table(graded, reward_metrics.reward_table(graded), 'right')
  np.testing.assert_array_equal(verdicts, [[1, 0], [0.2, 0.7], [np.nan, np.nan], [np.nan, np.nan]])


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


def summarize(item):
  """What must be equal when a run resumes: prompts, tokens, rewards and the metrics of each source."""
  rollout = item.experience.rollout
  figures = {k: v for k, v in item.info.items() if k.startswith(('sources/', 'reward', 'completion'))}
  return [p.index for p in rollout.prompts], rollout.completions.tolist(), item.experience.rewards.tolist(), figures


@pytest.mark.parametrize('over', [{}, dict(rollout=dict(staleness=1))])
def test_a_run_mixes_and_resumes_bit_for_bit(nano, tmp_path, over):
  raw = run_config(nano, tmp_path, **over)
  stream, resumed = (jaxpost.policy_and_stream(raw)[1] for _ in range(2))
  try:
    steps, state = [], None
    for n in range(4):
      if n == 2:
        state = json.loads(json.dumps(stream.state()))
      item = next(stream)
      steps.append(summarize(item))
      rollout, info = item.experience.rollout, item.info
      names = [p.source['name'] for p in rollout.prompts]
      assert [('style' in p.columns) for p in rollout.prompts] == [name == 'chat' for name in names]
      lengths = rollout.lengths.reshape(len(names), -1)
      completions = rollout.completions.reshape(len(names), 4, -1)
      assert np.isfinite(item.experience.rewards).all() and info['failed_groups'] == 0
      for name, length, tokens in zip(names, lengths, completions):
        if name == 'sums':
          assert length.max() <= 3 < rollout.completions.shape[1]
        else:  # top_k=1 draws the most probable token, so all samples of the group are equal
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
    resumed.restore(state)
    assert [summarize(next(resumed)) for _ in range(2)] == steps[2:]
  finally:
    stream.close()
    resumed.close()


def test_sources_have_the_shares_of_their_weights(nano, tmp_path):
  (prepared,) = prepare.prepare_all(run_config(nano, tmp_path))
  prepared.close()
  names = [prepared.data.stream.prompt(i).source['name'] for i in range(400)]
  assert names.count('sums') == 300


def test_a_source_without_the_column_of_its_reward_is_refused(nano, tmp_path):
  with pytest.raises(InputError, match='style'):
    prepare.prepare_all(run_config(nano, tmp_path, rl=dict(sources=('sums?rewards=right+short', 'chat?rewards=short'))))


@pytest.mark.parametrize(
  'entries, over, message',
  [
    (('sums?rewards=wrong', 'chat'), {}, "sums: there is no reward 'wrong'"),
    (('sums', 'chat?top_p=1.5'), {}, 'chat: top_p=1.5 is not from 0 to 1'),
    (('sums', 'chat', 'third'), {}, 'has 3 entries for 2 sources'),
    (('sums', 'chat?environment=none'), dict(reward='', environment='a:Shop'), 'chat: has no environment, and config'),
    (('sums', 'chat'), dict(eval=dict(samples=1, data=dict(path='a + b + c'))), 'has 2 entries for 3 sources'),
  ],
)
def test_a_plan_refuses_what_a_run_refuses(nano, tmp_path, entries, over, message):
  raw = run_config(nano, tmp_path, rl=dict(sources=entries), **over)
  with pytest.raises(InputError, match=f'config.rl.sources: .*{message}'):
    dry_run.prepare_all(raw)


def test_a_plan_takes_sources_that_a_run_takes(nano, tmp_path):
  over = dict(samples=1, data=dict(path='one source for all entries'))
  dry_run.prepare_all(run_config(nano, tmp_path, eval=over))
  dry_run.prepare_all(tiny.merged(run_config(nano, tmp_path), dict(data=dict(path=''))))  # a plan needs no data


def test_held_out_source_without_column_of_its_reward_is_refused(nano, tmp_path):
  right_rows = write(tmp_path / 'held.jsonl', [{'prompt': '1+1=', 'answer': '2'}])
  for name, row in ('styled', {'prompt': 'say 1', 'style': 'terse'}), ('bare', {'prompt': 'say 1'}):
    path = f'{right_rows} + {write(tmp_path / f"{name}.jsonl", [row])}'
    raw = run_config(nano, tmp_path, eval=dict(samples=1, size=2, data=dict(path=path)))
    if name == 'styled':
      prepare.prepare_all(raw)[0].close()
      continue
    with pytest.raises(InputError, match="short .*needs the column 'style', the data from .*bare.jsonl:1 on has"):
      prepare.prepare_all(raw)


# ---------------------------------------------------------------- temperature


def exact_rollout(temperatures):
  """All completions of `test_exact_gradients`, once for each source, with their log-probs at its temperature."""
  answers = exact.completions(2)
  index = np.arange(2 * len(answers)) % len(answers)
  of_source = np.repeat(temperatures, len(answers))
  logits = exact.raw_logits(exact.params('policy'), 2)
  logp = np.stack([np.asarray(exact.picked(logits / t, answers)) for t in temperatures]).reshape(-1, 2)
  sampling = [{'sampling': {'temperature': float(t)}} for t in of_source]
  return Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}, s) for i, s in enumerate(sampling)),
    completions=answers[index],
    lengths=np.full(len(index), 2),
    logprobs=logp,
    behavior_logprobs=logp,
    finished=np.ones(len(index), bool),
  )


def test_policy_gradient_uses_temperature_of_each_source():
  """Weighted by their probabilities, all completions give the gradient of the expected reward at both temperatures."""
  temperatures = np.array([0.5, 2.0])
  rollout = exact_rollout(temperatures)
  answers, values = exact.completions(2), exact.rewards_of(2, False)
  chance = np.exp(rollout.logprobs.sum(axis=1))
  assert chance[: len(answers)].sum() == pytest.approx(1, abs=1e-5)
  experience = Experience(
    rollout, np.tile(values, 2), np.ones((len(chance), 2), np.float32), dict(sampler_logprobs=rollout.logprobs)
  )
  reinforce = exact.config_of('grpo', dict(advantage='gpg', loss='reinforce', scale_rewards='none'))
  credit = Credit(
    dict(advantages=np.tile(values, 2)[:, None] * experience.mask, sampler_logprobs=rollout.logprobs),
    experience.mask,
    {},
  )
  weights = batching.token_weights(credit.mask, 'token', 2) * (chance * len(answers))[:, None]
  batch = batching.to_batch(rollout, range(len(chance)), weights.astype(np.float32), credit.arrays, RowShape(2, 50))
  assert sorted(set(batch.temperature.ravel())) == [0.0, 0.5, 2.0]
  loss = programs.make_loss(exact.model(), grpo.objective(reinforce), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  gradient = jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), split)

  def expectation(w):
    logits = exact.raw_logits(w, 2)
    return sum((jnp.exp(exact.picked(logits / t, answers).sum(axis=1)) * values).sum() for t in temperatures) / 4

  exact.close(gradient, (-1, jax.grad(expectation)(exact.params('policy'))))


@pytest.mark.long
def test_a_run_with_two_temperatures_is_on_policy(nano, tmp_path):
  """Sampler, old policy and reference agree at the temperature of each source."""
  entries = ('sums?rewards=right&temperature=0.4', 'chat?rewards=short')
  over = dict(rl=dict(sources=entries, kl_coef=0.1, importance=('token_truncated',)), train=dict(steps=2))
  raw = run_config(nano, tmp_path, rollout=dict(temperature=1.5), **over)
  _, stream = jaxpost.policy_and_stream(raw)
  try:
    experience = next(stream).experience
  finally:
    stream.close()
  rollout, mask = experience.rollout, experience.mask > 0
  assert {p.source['sampling']['temperature'] for p in rollout.prompts} == {0.4, 1.5}
  for name in ('old_logprobs', 'ref_logprobs'):
    np.testing.assert_allclose(experience.arrays[name][mask], rollout.logprobs[mask], atol=1e-5)
  jaxpost.run(raw, tmp_path / 'run')
  first = metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl')[0]
  assert first['ratio'] == pytest.approx(1, abs=1e-4) and first['sampler_mismatch'] == pytest.approx(1, abs=1e-4)
  assert abs(first['kl']) < 1e-6


# ---------------------------------------------------------------- environment

SHOP = '''
class Shop:
  """Sells."""

  def reset(self, **row):
    self.sold = 0
    return ' [open]'

  def nth(self, n: int) -> str:
    """
    Sells one.

    Args:
      n: Which one.
    """
    self.sold += 1
    return 'sold'

  def get_reward(self):
    return float(self.sold)


class Dice:
  """Rolls."""

  turn_reward = 0.0

  def reset(self, **row):
    return None

  def nth(self, n: int) -> str:
    """
    Rolls.

    Args:
      n: Which die.
    """
    self.turn_reward = 0.25
    return str(n % 6)
'''


@pytest.fixture
def calls(monkeypatch):
  """Turns of the random model are parsed as tool calls, which it would never write."""
  monkeypatch.setattr(turns, 'parse', episodes.parse)


def environments_config(tmp_path, **over):
  """A run with three sources: one plays Shop, one has single answers, one plays Dice."""
  (tmp_path / 'env.py').write_text(SHOP)
  chat = [{'role': 'user', 'content': 'go'}]
  shop = write(tmp_path / 'shop.jsonl', [{'prompt': chat, 'n': n} for n in range(6)])
  sums = write(tmp_path / 'sums.jsonl', [{'prompt': f'{n}+{n}=', 'answer': str(2 * n)} for n in range(6)])
  dice = write(tmp_path / 'dice.jsonl', [{'prompt': chat, 'n': n} for n in range(6)])
  entries = (
    'shop?environment=Shop&rewards=zero_reward&temperature=1.3',
    'sums?environment=none&rewards=right&max_new_tokens=3',
    'dice?environment=Dice&rewards=zero_reward&max_new_tokens=40',
  )
  base = dict(
    environment=f'{tmp_path}/env.py:Shop, {tmp_path}/env.py:Dice',
    reward=(right, zero_reward),
    data=dict(path=(shop, sums, dice), weights=(1.0, 1.0, 1.0)),
    rl=dict(sources=entries),
    rollout=dict(prompts=6, max_new_tokens=64),
    tools=dict(workers=2),
  )
  return episodes.config(episodes.folder(tmp_path / 'model'), tmp_path / 'env.py', **tiny.merged(base, over))


def zero_reward(completions, **columns):
  """Gives 0, so that the reward of the environment is all there is."""
  del columns
  return [0.0] * len(completions)


@pytest.mark.long
def test_sources_play_in_environments_of_their_own_and_resume_bit_for_bit(tmp_path, calls):
  raw = environments_config(tmp_path)
  stream = jaxpost.policy_and_stream(raw)[1]
  try:
    steps, state = [], None
    for n in range(3):
      if n == 1:
        state = json.loads(json.dumps(stream.state()))
      item = next(stream)
      steps.append(summarize(item))
      rollout, info = item.experience.rollout, item.info
      size = raw['rollout']['group_size']
      names = np.repeat([p.source['name'] for p in rollout.prompts], size)
      assert set(names) == {'shop', 'sums', 'dice'} and info['episodes/failed'] == 0
      components = {name: values for name, (_, values) in item.experience.components.items()}
      called = np.array([sum(m['role'] == 'tool' for m in own) for own in rollout.messages])
      single, sold, rolled = (names == name for name in ('sums', 'shop', 'dice'))
      assert not called[single].any() and called[sold].any() and called[rolled].any()
      assert rollout.lengths[single].max() <= 3 and rollout.lengths[rolled].max() <= 40 < rollout.lengths[sold].max()
      # Single answers have no reward of an environment; only their function grades them.
      assert np.isnan(components['environment'][single]).all()
      np.testing.assert_array_equal(item.experience.rewards[single], components['right'][single])
      np.testing.assert_array_equal(item.experience.rewards[sold], components['environment'][sold])
      assert (components['environment'][sold] >= called[sold]).all() and not components['environment'][rolled].any()
      np.testing.assert_allclose(item.experience.rewards[rolled], components['environment_turns'][rolled])
      assert info['sources/sums/turns'] == 1 < info['sources/shop/turns']
    stream.restore(state)
    assert [summarize(next(stream)) for _ in range(2)] == steps[1:]
  finally:
    stream.close()


def test_tools_are_shown_to_the_prompts_of_their_environment(tmp_path):
  template = tmp_path / 'tools.jinja'
  template.write_text(
    '{%- for tool in tools or [] %}<{{ tool.function.name }}: {{ tool.function.description }}>{% endfor %}'
    '{%- for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}'
    '{%- if add_generation_prompt %}assistant{% endif %}'
  )
  (prepared,) = prepare.prepare_all(environments_config(tmp_path, data=dict(chat_template=str(template))))
  prepared.close()
  shown = {'shop': '<nth: Sells one.>', 'dice': '<nth: Rolls.>'}
  for i in range(12):
    prompt = prepared.data.stream.prompt(i)
    text = bytes(int(t) for t in prompt.tokens if t < 256).decode()
    assert [tool for tool in shown.values() if tool in text] == [shown[n] for n in shown if n == prompt.source['name']]


def test_several_environments_need_sources(tmp_path):
  with pytest.raises(InputError, match='there are 2 .Shop, Dice.; config.rl.sources has to say'):
    prepare.prepare_all(environments_config(tmp_path, rl=dict(sources=())))


def test_a_source_that_nothing_grades_is_refused(tmp_path):
  """Its samples would all have reward 0 and be trained as failures; a method without rewards accepts the source."""
  entries = 'shop?environment=Shop', 'sums?environment=none', 'dice?environment=Dice'
  raw = environments_config(tmp_path, rl=dict(sources=entries), reward='')
  with pytest.raises(InputError, match='config.rl.sources: sums: has no environment, and config.reward is empty'):
    prepare.prepare_all(raw)
  teacher = dict(algorithm='opd', rl=dict(reference=raw['model']['path']))
  (prepared,) = prepare.prepare_all(tiny.merged(raw, teacher))
  prepared.close()
