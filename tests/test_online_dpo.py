"""`algorithms.online_dpo`: which samples of a group become a pair, how pairs are packed, and whole runs."""

import json
import types

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import online_dpo
from jaxpost.errors import InputError
from jaxpost.rl import batching
from jaxpost.stage import batch_shape
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout

GROUPS, SIZE, C = 3, 4, 5
NAN = np.nan


def experience(rewards, finished=True):
  """Groups of three prompts with 3, 4 and 5 tokens. Completions have tokens from 100 on, prompts from 500 on."""
  n = GROUPS * SIZE
  prompts = tuple(Prompt(i, 500 + np.arange(10 * i, 10 * i + 3 + i), '', {}) for i in range(GROUPS))
  lengths = 2 + np.arange(n) % 4
  completions = 100 + np.arange(n * C).reshape(n, C)
  rollout = Rollout(
    prompts,
    completions.astype(np.int32),
    lengths,
    np.zeros((n, C)),
    np.zeros((n, C)),
    finished=np.broadcast_to(finished, n),
  )
  return Experience(rollout, np.array(rewards, float).ravel(), batching.completion_mask(rollout), {})


def settings(**over):
  """The resolved and checked config."""
  rollout = dict(prompts=GROUPS, group_size=SIZE, max_prompt_length=5, max_new_tokens=C)
  over = tiny.merged(dict(algorithm='online_dpo', rollout=rollout), over)
  (config,) = config_lib.parse(tiny.merged(config_lib.defaults(), over)).values()
  config = config_lib.resolve(config, online_dpo.ONLINE_DPO.defaults)
  online_dpo.ONLINE_DPO.check(config)
  return config


def choose(rewards, finished=True, **over):
  """(1 for each chosen sample, -1 for each rejected one, 0 for others; the credit)."""
  credit = online_dpo.credit(experience(rewards, finished), settings(**over))
  return np.sign(credit.arrays['choice'].sum(1)), credit


def test_best_and_worst_of_each_group_are_the_pair():
  choice, credit = choose([[1, 3, 0, 2], [1, 1, 1, 1], [NAN, 5, NAN, 4]])
  np.testing.assert_array_equal(choice.reshape(GROUPS, SIZE), [[0, 1, -1, 0], [0, 0, 0, 0], [0, 1, 0, -1]])
  assert credit.metrics == dict(pairs=2, groups_without_pair=1, reward_gap=(3 + 1) / 2)


def test_groups_without_two_different_rewards_are_counted():
  choice, credit = choose([[NAN] * 4, [NAN, 1, NAN, NAN], [2, 2, 2, NAN]])
  assert not choice.any() and not credit.mask.any()
  assert credit.metrics == dict(pairs=0, groups_without_pair=3)


def test_truncated_samples_are_left_out():
  finished = np.array([True, False, True, True] * GROUPS)
  choice, credit = choose([[1, 3, 0, 2]] * 3, finished, rl=dict(mask_truncated=True))
  np.testing.assert_array_equal(choice.reshape(GROUPS, SIZE)[0], [0, 0, -1, 1])
  assert credit.metrics['masked_truncated'] == 3


@pytest.mark.parametrize('share', [True, False])
def test_packed_pairs_hold_the_sampled_tokens(share):
  config = settings(preference=dict(share_prompt=share))
  shape = batch_shape.batch_shape(config, True, 1)
  rows, length = shape.rows, shape.row_length
  assert length == 2 * (5 + C)
  data = experience([[1, 3, 0, 2], [1, 1, 1, 1], [NAN, 5, NAN, 4]])
  credit = online_dpo.credit(data, config)
  batch = online_dpo.pack(data, credit, range(12), config, rows, row_length=length)
  assert batch.tokens.shape == (rows, length)
  assert batch.loss_weights.sum() == pytest.approx(data.rollout.lengths[[1, 2, 9, 11]].sum() / 2)
  assert set(batch.arrays) == {'nll_weights'}
  sides = {}  # sample -> 1 if it is chosen, 0 if it is rejected
  for r in range(rows):
    for number in range(1, batch.sequence_ids[r].max() + 1):
      at = np.flatnonzero(batch.sequence_ids[r] == number)
      start = at[0] - 1  # the token that predicts the first one
      n = (batch.tokens[r, at[0]] - 100) // C
      prompt = data.rollout.prompts[n // SIZE].tokens
      assert batch.tokens[r, start] == prompt[-1]
      assert batch.positions[r, start] == len(prompt) - 1
      np.testing.assert_array_equal(batch.tokens[r, at], data.rollout.completions[n, : data.rollout.lengths[n]])
      np.testing.assert_array_equal(batch.positions[r, at], len(prompt) + np.arange(len(at)))
      sides[n] = number % 2  # sequences of chosen answers have odd numbers
  assert sides == {1: 1, 2: 0, 9: 1, 11: 0}
  times = (batch.tokens == 500).sum()
  assert times == (1 if share else 2)


@pytest.mark.parametrize('share', [True, False])
def test_batch_shape_does_not_depend_on_the_number_of_pairs(share):
  config = settings(preference=dict(share_prompt=share))
  shape = batch_shape.batch_shape(config, True, 1)
  rows, length = shape.rows, shape.row_length

  def shapes(rewards):
    data = experience(rewards)
    batch = online_dpo.pack(data, online_dpo.credit(data, config), range(12), config, rows, row_length=length)
    return {
      k: np.shape(v) for k, v in vars(batch).items() if k != 'arrays' and v is not None and len(v)
    }, batch.loss_weights.sum()

  full, full_weight = shapes([[1, 3, 0, 2]] * 3)
  empty, empty_weight = shapes([[1, 1, 1, 1]] * 3)
  assert full == empty and full_weight > 0 and empty_weight == 0
  assert 'sequence_ids' in full and ('branch_ids' in full) == share


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(rollout=dict(group_size=1)), 'group_size: 1 sample is no pair'),
    (dict(rl=dict(minibatches=2)), 'rl.minibatches: would split pairs'),
    (dict(rl=dict(kl_coef=0.1)), r'rl.kl_coef: online_dpo \(.*\) would ignore'),
    (dict(rl=dict(entropy_coef=0.1)), 'rl.entropy_coef: online_dpo'),
    (dict(rl=dict(importance=('icepop',))), 'rl.importance: online_dpo'),
    (dict(train=dict(row_length=12)), 'row_length: 12 has no room'),
    (
      dict(train=dict(row_length=30), rollout=dict(group_size=2), preference=dict(share_prompt=False)),
      'row_length: 30 has no room',
    ),
    (dict(preference=dict(losses=('ipo2',))), "did you mean 'ipo'"),
  ],
)
def test_config_that_online_dpo_cannot_use_is_refused(over, message):
  with pytest.raises(InputError, match=f'config.*{message}'):
    settings(**over)


def test_run_starts_at_loss_log_2_and_compiles_each_program_once(tmp_path):
  """Before the first update, the policy equals its reference: the margin is 0."""
  model = tiny.folder(tmp_path / 'nano')
  config = tiny.grpo_config(model, algorithm='online_dpo', train=dict(steps=3), rl=dict(dynamic_sampling=2))
  jaxpost.run(config, tmp_path / 'run')
  rows = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').open()]
  assert rows[0]['loss'] == pytest.approx(np.log(2), abs=1e-5)
  assert rows[0]['rewards/margins'] == pytest.approx(0, abs=1e-5)
  assert rows[-1]['rewards/margins'] != 0
  assert all(r['pairs'] + r['groups_without_pair'] == 4 for r in rows)
  programs = [p['program'] for p in json.loads((tmp_path / 'run/plan.json').read_text())[0]['programs']]
  assert programs.count('update') == programs.count('score') == 1


def test_steps_without_a_pair_have_no_loss_and_are_counted(tmp_path):
  def constant(completions, **columns):
    return [1.0] * len(completions)

  config = tiny.grpo_config(
    tiny.folder(tmp_path / 'nano'), algorithm='online_dpo', reward=constant, train=dict(steps=2)
  )
  jaxpost.run(config, tmp_path / 'run')
  for line in (tmp_path / 'run/metrics.jsonl').open():
    row = types.SimpleNamespace(**json.loads(line))
    assert row.pairs == 0 and row.empty_updates == 1 and {'loss', 'grad_norm'}.isdisjoint(vars(row))
    assert row.groups_without_pair == 4
