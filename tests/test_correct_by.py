"""config.rl.correct_by names the reward that decides whether a sample is correct.

It selects the groups of dynamic sampling and the completions of rejection sampling, and defines pass@k and maj@k.
"""

import json
import pathlib
import runpy

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import rft
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.rewards.groups import Graded
from jaxpost.rewards.pool import RewardPool
from jaxpost.rl import batching, dynamic_sampling, grading
from jaxpost.rl.reward_metrics import verdict_table
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare, sampling_inputs
from jaxpost.stage.evaluate import pass_metrics
from jaxpost.tools import score_dataset
from jaxpost.types import Experience, Prompt, Rollout

CLONE = pathlib.Path(__file__).resolve().parents[1]
LENGTHS = [300, 380, 390, 400, 420, 300, 300, 310]  # of a group, in tokens: the penalty of the recipe begins at 384
TASK = 'generated:arithmetic:max=9,ops=+,split=train,correct=1'


def stage_config(**fields):
  (config,) = config_lib.parse(tiny.merged(dict(algorithm='grpo'), fields)).values()
  return config


def never(completions, **columns):
  del columns
  return [0.0] * len(completions)


def always(completions, **columns):
  del columns
  return [1.0] * len(completions)


def by_place(completions, **columns):
  """Returns 0, 1, 2, ..., so that the rewards of every group differ."""
  del columns
  return [float(i) for i in range(len(completions))]


def run(config, workdir):
  jaxpost.run(config, workdir)
  return metrics.read_rows(workdir / 'metrics.jsonl')


# ------------------------------------------------------------ dynamic sampling


def test_length_penalty_alone_does_not_select_an_all_wrong_group():
  """Three groups of the shipped DAPO recipe, of the same lengths: all wrong, one right, all right."""
  recipe = runpy.run_path(CLONE / 'configs/grpo_gsm8k.py')['get_config']('method=dapo').to_dict()
  (config,) = config_lib.parse(recipe).values()
  size = len(LENGTHS)
  right_of_groups = [[], [2], range(size)]
  texts = [['#### 4' if i in right else '#### 5' for i in range(size)] for right in right_of_groups]
  padded = [text.rjust(length, '.') for group in texts for text, length in zip(group, LENGTHS)]
  ids = np.zeros((3 * size, 512), np.int32)
  for row, text in zip(ids, padded):
    row[: len(text)] = np.frombuffer(text.encode(), np.uint8)
  rollout = Rollout(
    tuple(Prompt(i, np.zeros(1, np.int32), '2+2=', {'answer': '#### 4'}) for i in range(3)),
    ids,
    np.array(LENGTHS * 3),
    np.zeros(ids.shape, np.float32),
    np.zeros(ids.shape, np.float32),
    np.ones(len(ids), bool),
  )
  with RewardPool(config.rewards_tuple()) as pool:
    pool.check(['prompt', 'answer'])
    grader = grading.Grader(pool, tokenizer_lib.load('bytes'), correct_by=sampling_inputs.correct_by(config, False))
    pending = grader.submit(rollout)
    assert dynamic_sampling.varied_groups(pending).tolist() == [False, True, False]
    assert dynamic_sampling.select_varied(pending, 1).selected == [[1]]
    assert grading.varied(pending.rounds[0].rewards).all()  # the penalty alone makes the sums of every group differ


def test_sample_without_a_reward_has_no_verdict():
  """Another reward masks the only right sample of a group, so that all others are wrong."""
  right = dict(right=[1.0, 0.0, 0.0])
  graded = [Graded([None, 0.0, -0.5], right, None), Graded([1.0, 0.0, -0.5], right, None)]
  rewards = np.array([[np.nan, 0.0, -0.5], [1.0, 0.0, -0.5]])
  np.testing.assert_array_equal(verdict_table(graded, rewards, 'right'), [[np.nan, 0, 0], [1, 0, 0]])
  assert grading.varied(verdict_table(graded, rewards, 'right')).tolist() == [False, True]


@pytest.mark.parametrize('decides, missing', [('', 4), ('by_place', 0)])
def test_dynamic_sampling_selects_groups_by_the_named_reward(nano, decides, missing):
  """The total rewards of all groups differ, but without a name `never` decides, and no group is trained on."""
  rl = dict(dynamic_sampling=2, correct_by=decides)
  _, stream = jaxpost.policy_and_stream(tiny.grpo_config(nano, reward=(never, by_place), rl=rl))
  try:
    item = next(stream)
  finally:
    stream.close()
  assert item.info.get('dynamic_sampling/missing', 0) == missing
  trained = np.asarray(item.updates[0].batch.loss_weights) > 0
  assert trained.any() == (not missing)


def test_unfiltered_metrics_include_groups_that_dynamic_sampling_dropped(nano, tmp_path):
  """The first round has one varied group of four, the second has four: the step trains on four of the five."""
  graded_sizes = []

  def right(completions, **columns):
    del columns
    graded_sizes.append(len(completions))
    return [float(i == 0 and len(graded_sizes) not in (2, 3, 4)) for i in range(len(completions))]

  (row,) = run(
    tiny.grpo_config(nano, reward=(right, always), rl=dict(dynamic_sampling=3), train=dict(steps=1)), tmp_path
  )
  assert row['dynamic_sampling/rounds'] == 2
  assert (row['rewards/right/mean'], row['reward'], row['frac_reward_zero_std']) == (0.25, 1.25, 0)
  assert row['rewards/right/mean/unfiltered'] == 5 * 0.25 / 8
  assert row['reward/unfiltered'] == 1 + 5 * 0.25 / 8
  assert row['frac_reward_zero_std/unfiltered'] == 3 / 8


def test_without_dynamic_sampling_there_are_no_unfiltered_metrics(nano, tmp_path):
  (row,) = run(tiny.grpo_config(nano, train=dict(steps=1)), tmp_path)
  assert not [name for name in row if 'unfiltered' in name]


# ---------------------------------------------------------------------- pass@k


def test_pass_at_k_of_evaluation_is_by_the_named_reward(nano, tmp_path):
  """`never` decides unless `correct_by` names `always`; each reward also has a pass@k of its own."""
  held_out = dict(samples=2, size=4, data=dict(path=TASK))
  base = tiny.grpo_config(nano, reward=(never, always), eval=held_out, train=dict(steps=1))
  *_, last = run(base, tmp_path / 'first')
  assert last['split'] == 'eval' and last['reward'] == 1
  assert [last[k] for k in ('pass@1', 'pass@2', 'pass@1/never', 'pass@1/always', 'pass@2/always')] == [0, 0, 0, 1, 1]
  named = tiny.merged(base, dict(rl=dict(correct_by='always'), reward_weights=(1.0, 0.01)))
  named['save'] = dict(named['save'], keep_best='pass@1/never')
  *_, last = run(named, tmp_path / 'named')
  assert last['pass@1'] == 1 and last['pass@1/never'] == 0  # by the reward itself, whatever its weight


def test_sft_run_reports_pass_at_k_by_its_first_reward(nano, tmp_path):
  held_out = dict(samples=2, size=4, data=dict(path=TASK))
  *_, last = run(tiny.run_config(nano, reward=(always, never), eval=held_out, train=dict(steps=1)), tmp_path)
  assert last['pass@1'] == 1 and last['pass@1/never'] == 0 and 'loss' in last


def test_pass_at_k_leaves_out_and_counts_prompts_without_a_verdict():
  graded = [Graded([1.0, 2.0], dict(right=[1.0, 1.0], form=[None, None]), None)]
  graded += [Graded([1.0, 0.0], dict(right=[1.0, 0.0], form=[0.0, 0.0]), None)]
  graded += [Graded([1.0, 1.0], dict(right=[None, None], form=[1.0, 1.0]), None)]
  graded += [Graded([None, None], dict(right=[1.0, 1.0], form=[None, None]), 'form: it raised')]
  table = verdict_table(graded, np.array([[1.0, 2.0], [1.0, 0.0], [1.0, 1.0], [np.nan] * 2]), 'right')
  measured = pass_metrics(graded, table, 1.0)
  assert measured['ungraded_prompts'] == 2
  assert (measured['pass@1'], measured['pass@2']) == (0.75, 1.0)
  assert (measured['pass@1/right'], measured['pass@1/form']) == (0.75, 0.0)


def test_scores_of_a_data_set_are_by_the_named_reward():
  """Four wrong answers in the right format: pass@k and maj@k are 0 by the answer and 1 by the format."""
  rows = [dict(completions=['5'] * 4, completion_ids=[[5]] * 4)]
  graded = [Graded([1.0] * 4, dict(exact_match=[0.0] * 4, regex_match=[1.0] * 4), None)]
  summary = score_dataset.summary(rows, graded, (258,), correct_by='exact_match')
  assert (summary['pass@1'], summary['pass@4'], summary['maj@4']) == (0, 0, 0)
  assert (summary['pass@1/exact_match'], summary['pass@1/regex_match']) == (0, 1)
  summary = score_dataset.summary(rows, graded, (258,), correct_by='regex_match')
  assert (summary['pass@1'], summary['maj@4']) == (1, 1)


# ---------------------------------------------------------- rejection sampling


def test_rft_trains_on_the_correct_sample_with_the_highest_reward():
  """A wrong sample with a higher total reward is not trained on."""
  rollout = Rollout(
    (Prompt(0, np.zeros(1, np.int32), '', {}), Prompt(1, np.zeros(1, np.int32), '', {})),
    *(np.zeros((6, 2), np.int32), np.full(6, 2), np.zeros((6, 2)), np.zeros((6, 2)), np.ones(6, bool)),
  )
  # In the first group, the wrong sample has a bonus of 3 and the right ones have penalties of 0.5 and 0.1.
  total_rewards = np.array([3.0, 0.5, 0.9, 2.0, 2.0, 2.0])
  right = np.array([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
  experience = Experience(rollout, total_rewards, batching.completion_mask(rollout), {}, verdicts=right)
  config = config_lib.resolve(stage_config(algorithm='rft'), rft.RFT.defaults)
  credit = rft.credit(experience, config)
  assert np.flatnonzero(credit.mask.any(axis=1)).tolist() == [2]
  assert credit.metrics['rft/dropped'] == 1


def test_replay_of_recorded_rollouts_keeps_their_verdicts(nano, tmp_path):
  """A replay of an `rft` run with its recorded rewards keeps the same completions."""
  base = tiny.grpo_config(nano, algorithm='rft', reward=(never, by_place), train=dict(steps=1))
  base['log'] = dict(base['log'], rollouts_every=1)
  (row,) = run(base, tmp_path / 'run')
  again = base | dict(train_on_rollouts=str(tmp_path / 'run'), reward='')
  (replayed,) = run(again, tmp_path / 'again')
  assert replayed['rft/kept'] == row['rft/kept'] == 0
  assert replayed['reward'] == row['reward'] == 1.5


# ------------------------------------------------------- the name of the reward


@pytest.mark.parametrize(
  'over, model_grades, expected',
  [
    (dict(reward='gsm8k,overlong?max=9'), False, 'gsm8k'),
    (dict(reward='gsm8k,overlong?max=9', rl=dict(correct_by='overlong')), False, 'overlong'),
    (dict(reward='length?max=9,length?max=8', rl=dict(correct_by='length_2')), False, 'length_2'),
    (dict(reward='./a.py:f?x=1,gsm8k', reward_weights=(0.5, 1.0)), False, 'f'),
    (dict(reward='reward_model,gsm8k'), True, 'gsm8k'),
    (dict(reward='reward_model,gsm8k', rl=dict(correct_by='reward_model')), True, 'reward_model'),
    (dict(reward='reward_model'), True, 'reward_model'),
    (dict(environment='./env.py:Env'), False, 'environment'),
    (dict(environment='./env.py:Env', reward='think_format'), False, 'think_format'),
    (dict(environment='./env.py:Env', reward='think_format', rl=dict(correct_by='environment')), False, 'environment'),
    (dict(), False, ''),
  ],
)
def test_first_reward_function_decides_unless_another_is_named(over, model_grades, expected):
  assert sampling_inputs.correct_by(stage_config(**over), model_grades) == expected


def test_correct_by_that_names_no_reward_is_refused(nano):
  config = tiny.grpo_config(nano, reward='gsm8k,overlong?max=9', rl=dict(correct_by='gsm'))
  with pytest.raises(InputError, match="config.rl.correct_by: 'gsm' is not among the rewards: gsm8k, overlong"):
    prepare.prepare_all(config)
  with pytest.raises(InputError, match="'reward_model' is not among the rewards: gsm8k, overlong"):
    prepare.prepare_all(tiny.merged(config, dict(rl=dict(correct_by='reward_model'))))


def test_evaluation_of_a_replay_without_a_reward_is_refused(nano, tmp_path):
  config = tiny.grpo_config(
    nano, reward='', train_on_rollouts=str(tmp_path), eval=dict(samples=1, data=dict(path=TASK))
  )
  with pytest.raises(InputError, match='config.reward: is empty'):
    prepare.prepare_all(config)


def test_score_dataset_refuses_an_unknown_correct_by_before_sampling(nano, tmp_path):
  from jaxpost.tools import completions, inference

  data = tmp_path / 'data.jsonl'
  data.write_text(json.dumps(dict(prompt='1+1=', answer='2')) + '\n')
  tokenizer_lib.load('bytes').save(nano)
  with pytest.raises(InputError, match="--correct_by: 'exact' is not among the rewards: exact_match"):
    score_dataset.measure(
      inference.from_folder(nano),
      score_dataset.read(str(data)),
      'exact_match',
      '',
      completions.Draws(n=2, max_new_tokens=2),
      grading=score_dataset.Grading(correct_by='exact'),
    )
