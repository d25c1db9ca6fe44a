"""`rl.grading.Grader`: rewards of a rollout from functions, an environment, a reward model and stored rollouts.

Also, which stored rollouts a run may train on. Legend: P prompts, C completion tokens.
"""

import concurrent.futures
import types

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.environments import agents, episode, openai_server
from jaxpost.errors import InputError
from jaxpost.rewards.groups import Graded
from jaxpost.rl import merging, mixture
from jaxpost.rl.grading import Grader
from jaxpost.rollout import rollout_codec, rollout_files
from jaxpost.rollout.sequence import Request
from jaxpost.stage import config as config_lib
from jaxpost.stage import reward_models, sampling_inputs
from jaxpost.tools import reproduce
from jaxpost.types import Credit, Experience, Prompt, Rollout, RowShape

P, C = 2, 3


class Pool:
  """A reward pool with one function, which returns `value` for each sample."""

  weights = {'f': 1.0}

  def __init__(self, value):
    self.value = value
    self.groups = []

  def submit(self, groups, step):
    del step
    self.groups += groups
    futures = []
    for group in groups:
      values = [self.value] * len(group.completions)
      futures.append(concurrent.futures.Future())
      futures[-1].set_result(Graded(values, {'f': values}, None))
    return futures

  def count(self, graded):
    del graded


TOKENIZER = types.SimpleNamespace(decode=lambda ids: 'x')


def rollout(size, environment=None, source=None, **fields):
  """Two groups of `size` samples; `environment` has the reward of each sample."""
  count = P * size
  plain = np.zeros((count, C), np.float32)
  messages = [{'role': 'user', 'content': 'q'}]
  return Rollout(
    prompts=tuple(Prompt(i, np.array([5], np.int32), messages, {}, source or {}) for i in range(P)),
    completions=np.ones((count, C), np.int32),
    lengths=np.full(count, C, np.int32),
    logprobs=plain,
    behavior_logprobs=plain,
    finished=np.ones(count, bool),
    rewards=None if environment is None else {'environment': np.array(environment, float)},
  ).replace(**fields)


@pytest.mark.parametrize('pool, correct_by, function', [(Pool(0.25), 'f', 0.25), (None, 'environment', 0.0)])
def test_greedy_baseline_is_the_whole_reward(pool, correct_by, function):
  """The baseline of ReMax has the rewards of the environment and of the function, if there is one."""
  grader = Grader(pool, TOKENIZER, correct_by=correct_by)
  graded = grader.submit(rollout(2, [1, 0, 1, 0]), rollout(1, [1, 0.5])).result()
  np.testing.assert_array_equal(graded.rewards, np.array([1, 0, 1, 0]) + function)
  np.testing.assert_array_equal(graded.baseline, np.array([1, 0.5]) + function)


def test_samples_without_a_baseline_are_counted():
  """The greedy answer of the first prompt has no reward, so its sample that has a reward is not trained."""
  pending = Grader(None, TOKENIZER, correct_by='environment').submit(
    rollout(2, [1, np.nan, 0, 1]), rollout(1, [np.nan, 0])
  )
  assert pending.result().metrics()['masked_baseline'] == 1
  pending = Grader(None, TOKENIZER, correct_by='environment').submit(rollout(2, [1, 0, 0, 1]))
  assert 'masked_baseline' not in pending.result().metrics()


def test_frac_reward_zero_std_counts_groups_with_two_or_more_rewards():
  """In the metric of the run and in that of each source; groups have no, one, two equal and two different rewards."""
  nan = np.nan
  rewards = np.array([[nan, nan, nan], [nan, 1, nan], [1, 1, nan], [0, 1, nan]])
  source = {'name': 'sums'}
  samples = rollout(6, rewards.ravel(), source)
  prompts = tuple(Prompt(i, np.array([5], np.int32), '', {}, source) for i in range(4))
  pending = Grader(None, TOKENIZER).submit(samples.replace(prompts=prompts))
  graded = pending.result()
  assert graded.metrics()['frac_reward_zero_std'] == 0.5
  mixture.observe(pending, graded)
  assert pending.info['sources/sums/frac_reward_zero_std'] == 0.5
  pending = Grader(None, TOKENIZER).submit(rollout(2, [nan, 1, nan, nan], source))
  graded = pending.result()
  assert np.isnan(graded.metrics()['frac_reward_zero_std'])
  mixture.observe(pending, graded)
  assert 'sources/sums/frac_reward_zero_std' not in pending.info


def test_function_that_returns_none_leaves_reward_of_the_environment():
  grader = Grader(Pool(None), TOKENIZER, correct_by='environment')
  pending = grader.submit(rollout(2, [1, 0, np.nan, 0]))
  np.testing.assert_array_equal(pending.result().rewards, [1, 0, np.nan, 0])
  scores = np.tile(np.arange(C, dtype=float), (2 * P, 1))  # of a reward model; the score of the last token counts
  np.testing.assert_array_equal(pending.result(scores).rewards, [C, C - 1, np.nan, C - 1])


def test_recorded_verdicts_need_no_reward_named_by_correct_by():
  recorded = rollout(2, verdicts=np.array([1.0, 0, 0, 1]), rewards={'recorded': np.array([0.5, 0, 0, 0.5])})
  graded = Grader(None, TOKENIZER, correct_by='environment').submit(recorded).result()
  np.testing.assert_array_equal(graded.verdicts, [[1, 0], [0, 1]])
  np.testing.assert_array_equal(graded.rewards, [0.5, 0, 0, 0.5])


def test_recorded_rewards_count_for_sources_without_an_environment(tmp_path):
  old = rollout(2, [1, 0, 1, 0], source=dict(name='a', environment=''))
  rewards, mask = np.array([1.0, 0, 0.5, 0]), np.ones((2 * P, C), np.float32)
  arrays = {'sampler_logprobs': old.logprobs}
  rollout_files.save(tmp_path / '1.npz', Experience(old, rewards, mask, arrays, verdicts=rewards), Credit({}, mask, {}))
  recorded = rollout_files.RecordedSampler(tmp_path, 'train', rewards=True)(old.prompts, 2, 0)
  np.testing.assert_array_equal(Grader(None, TOKENIZER).submit(recorded).result().rewards, rewards)


def test_regraded_rollouts_drop_their_rewards_and_grading_functions(tmp_path):
  """Rewards of turns are dropped, too, and the sources of the new run choose the functions."""
  old = rollout(2, [1, 0, 1, 0], source=dict(rewards=['old'], name='a'), turn_rewards=np.full((2 * P, C), 0.5))
  rewards, mask = np.array([1.0, 0, 1, 0]), np.ones((2 * P, C), np.float32)
  arrays = {'sampler_logprobs': old.logprobs}
  rollout_files.save(tmp_path / '1.npz', Experience(old, rewards, mask, arrays, verdicts=rewards), Credit({}, mask, {}))
  for new_source, functions in (({}, None), (dict(rewards=['f']), ['f'])):
    prompts = [p.replace(source=new_source) for p in old.prompts]
    recorded = rollout_files.RecordedSampler(tmp_path, 'train', rewards=False)(prompts, 2, 0)
    assert (recorded.rewards, recorded.turn_rewards, recorded.verdicts) == (None, None, None)
    pool = Pool(0.25)
    graded = Grader(pool, TOKENIZER, correct_by='f').submit(recorded).result()
    np.testing.assert_array_equal(graded.rewards, [0.25] * 4)
    assert [group.graded_by for group in pool.groups] == [functions] * P
    assert recorded.prompts[0].source['name'] == 'a'


@pytest.mark.parametrize(
  'fields', [dict(), dict(mask=np.ones((4 * P, C), bool)), dict(source={'sampling': {'temperature': 0.5}})]
)
def test_reward_model_scores_rollout_in_several_batches(fields):
  """Eight sequences in batches of three, also with the masks of episodes or the temperatures of sources."""
  calls = []

  def reward_model(batch):
    calls.append(batch)
    return types.SimpleNamespace(values=batch.tokens[None].astype(np.float32) * np.ones_like(batch.loss_weights))

  roles = types.SimpleNamespace(policy=types.SimpleNamespace(place=lambda batch: batch), reward_model=reward_model)
  samples = rollout(4, **fields)
  samples = samples.replace(completions=np.arange(4 * P * C, dtype=np.int32).reshape(-1, C))
  scores = reward_models.scores(samples, roles, max_sequences=3, shape=RowShape(3, C + 1))
  np.testing.assert_array_equal(scores, samples.completions)
  assert len(calls) == 3


@pytest.mark.parametrize('asked, stops', [((), ()), (('b',), ('a', 'b'))])
def test_stop_strings_of_agent_are_added_to_those_of_the_run(asked, stops):
  """A request without stop strings sets none, as the engine knows those of the run."""
  request = Request(np.array([5], np.int32), 0, 0, {'max_tokens': 4, 'stop_strings': asked})
  session = types.SimpleNamespace(
    request=lambda body, encode, most: Request(encode(), 0, 0, {'temperature': 0.5, 'max_tokens': most})
  )
  engine = types.SimpleNamespace(config=types.SimpleNamespace(stop_strings=('a',)))
  sampling = openai_server._session_request(session, {}, [request], engine).sampling
  assert sampling == {'temperature': 0.5, 'max_tokens': 4} | ({'stop_strings': stops} if stops else {})


def test_rows_of_source_without_own_rewards_are_checked_for_all():
  """The source has a temperature only: names=None checks the columns of all functions."""
  seen = []
  pool = types.SimpleNamespace(check_rows=lambda rows, names=None, numbers=None: seen.append(names))
  rows = types.SimpleNamespace(sizes=(3,), streaming=False)
  mixture.check_rows(pool, rows, ({'sampling': {'temperature': 0.5}},))
  assert seen == [None]


def test_a_step_without_stored_samples_cannot_be_compared(tmp_path):
  (tmp_path / 'samples/grpo').mkdir(parents=True)
  (tmp_path / 'samples/grpo/25.jsonl').write_text('{"split": "eval"}\n')
  item = types.SimpleNamespace(experience=types.SimpleNamespace(rollout=rollout(2)), samples=list)
  assert reproduce.compare(tmp_path, 'grpo', 25, 0, item) is None


def test_agents_sample_with_settings_of_their_source():
  source = {'sampling': {'temperature': 0.5, 'top_p': 0.9}}
  prompt = Prompt(0, np.array([5], np.int32), [{'role': 'user', 'content': 'q'}], {}, source)
  owner = types.SimpleNamespace(
    pool=types.SimpleNamespace(all=[]),
    turns=None,
    limits=episode.EpisodeLimits(prompt=8, tokens=8),
    endpoint=types.SimpleNamespace(),
  )
  for settings, temperature in (({}, 0.5), ({'temperature': 0.0}, 0.0)):  # a greedy evaluation has temperature 0
    scheduler = agents.AgentScheduler(owner, [episode.Episode(0, prompt, 0)], settings)
    (session,) = scheduler.sessions.values()
    body = {'messages': [{'role': 'user', 'content': 'q'}]}
    sampling = session.request(body, lambda: np.array([5], np.int32), 8).sampling
    assert sampling == {'temperature': temperature, 'top_p': 0.9, 'max_tokens': 8}


def test_dynamic_sampling_and_curriculum_with_stored_rollouts_are_refused(tmp_path):
  """Both choose prompts, and stored rollouts have theirs. Methods that do not share the checks of GRPO refuse, too."""
  for algorithm in 'rft', 'online_dpo', 'grpo':
    for feature in dict(dynamic_sampling=2), dict(curriculum='retire'):
      over = dict(algorithm=algorithm, train_on_rollouts=str(tmp_path), rl=feature)
      (config,) = config_lib.parse(tiny.grpo_config('', **over)).values()
      with pytest.raises(InputError, match='config.train_on_rollouts: stored rollouts have neither'):
        sampling_inputs.check_sampling(config, True)


@pytest.mark.parametrize('feature', [dict(curriculum='retire'), dict(replay=2)])
def test_features_that_ask_what_is_right_need_a_threshold_where_a_reward_model_decides(feature):
  def check(reward='reward_model', pass_reward=1.0, **rl):
    over = dict(reward=reward, eval=dict(pass_reward=pass_reward), rl=feature | rl, reward_model=dict(path='rm'))
    (config,) = config_lib.parse(tiny.grpo_config('', **over)).values()
    sampling_inputs.check_sampling(config, True)

  message = 'config.eval.pass_reward: .* the zero of a reward model is arbitrary'
  with pytest.raises(InputError, match=message):
    check()
  with pytest.raises(InputError, match=message):
    check('exact_match,reward_model', correct_by='reward_model')
  check(pass_reward=0.7)
  check('exact_match,reward_model')
  with pytest.raises(InputError, match='config.rl.keep_reward: .* the zero of a reward model is arbitrary'):
    check(pass_reward=0.7, correct_nll_coef=0.1)
  check(pass_reward=0.7, correct_nll_coef=0.1, keep_reward=0.7)


def test_merged_rounds_keep_the_verdict_of_each_sample():
  first, second = (rollout(2, verdicts=np.array(x)) for x in ([1.0, 0, 0, 1], [0.0, 0, 1, 1]))
  np.testing.assert_array_equal(merging.merge([first, second], [[1], [0, 1]]).verdicts, [0, 1, 0, 0, 1, 1])


def test_merged_and_stored_rounds_keep_the_error_of_each_episode():
  first, second = (rollout(2, errors=np.array(x)) for x in (['', '', 'reset: x', ''], ['', 'died', '', '']))
  merged = merging.merge([first, second], [[1], [0, 1]])
  assert merged.errors.tolist() == ['reset: x', '', '', 'died', '', '']
  assert rollout_codec.from_text(rollout_codec.to_text(merged)).errors.tolist() == merged.errors.tolist()


def test_stored_rollout_has_all_fields_and_is_checked_before_training(tmp_path):
  rewards, mask = np.arange(4.0), np.ones((2 * P, C), np.float32)

  def stored(**fields):
    samples = rollout(1 if 'from_data' in fields else 2, **fields)
    experience = Experience(samples, rewards, mask, {'sampler_logprobs': samples.logprobs}, verdicts=rewards)
    rollout_files.save(tmp_path / '1.npz', experience, Credit({}, mask, {}), 0.7)
    return samples

  def read(temperature=None):
    return rollout_files.RecordedSampler(tmp_path, 'train', True, temperature)(original.prompts, 2, 0)

  optional = dict(versions=np.full((2 * P, C), 3, np.int32), replayed=np.array([True, False] * P))
  original = stored(**optional)
  recorded = read(0.7)
  np.testing.assert_array_equal(recorded.versions, original.versions)
  np.testing.assert_array_equal(recorded.replayed, original.replayed)
  with pytest.raises(InputError, match='was sampled at temperature 0.7, .*temperature=0.7 .now 1'):
    read(1.0)
  original = stored(source={'sampling': {'temperature': 0.5}})
  assert read(1.0).lengths.size  # not refused, as each prompt has its own temperature
  for fields, message in (
    (dict(from_data=True), 'answers of the data'),
    (dict(demonstration=np.array([False, True] * P)), 'answers of the data'),
    (dict(allowed=np.ones((2 * P, C, 2), np.int32)), 'was sampled with config.rl.sampling_mask'),
  ):
    original = stored(**fields)
    recorded = read()  # no temperature: by a method that reads no log-probs
    assert recorded.from_data == ('from_data' in fields)
    with pytest.raises(InputError, match=message):
      read(0.7)


@pytest.mark.parametrize('algorithm, temperature', [('grpo', 0.5), ('rft', None)])
def test_only_methods_that_read_stored_logprobs_ask_for_their_temperature(
  tmp_path, monkeypatch, algorithm, temperature
):
  monkeypatch.setattr(rollout_files, 'load', lambda path: None)  # the folder has no rollouts
  folder = tiny.folder(tmp_path / 'model')
  over = dict(algorithm=algorithm, train_on_rollouts=str(tmp_path), rollout=dict(temperature=0.5))
  _, stream = jaxpost.policy_and_stream(tiny.grpo_config(folder, **over))
  try:
    assert stream.sampler.temperature == temperature
  finally:
    stream.close()
