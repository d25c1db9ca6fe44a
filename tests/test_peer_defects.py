"""Defects that were found in comparable libraries, and what catches each here.

`CAUGHT_BY` names the tests that live with the code they are of; the rest
stand below.
"""

import ast
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.monitor import metrics
from jaxpost.programs import generate
from jaxpost.rewards import length
from jaxpost.rl import batching
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import RowShape

TESTS = pathlib.Path(__file__).parent
CAUGHT_BY = {
  'finished rows go on decoding': 'test_sampler.py:test_samples_do_not_depend_on_slots_and_blocks',
  'a group is prefilled once for each sample': 'test_peer_defects.py:test_a_group_reads_its_prompt_once',
  'another temperature compiles again': 'test_peer_defects.py:test_sampling_parameters_compile_nothing',
  'the cache is replicated': 'test_peer_defects.py:test_the_cache_is_split_over_the_batch_axes',
  'each process trains on all samples': 'test_processes.py:test_each_group_is_graded_by_one_process_only',
  'PPO rounds rewards': 'test_ppo.py:test_fractional_rewards_reach_the_returns_unrounded',
  'PPO KL at a temperature': 'test_ppo.py:test_first_step_is_on_policy_at_a_temperature_below_1',
  'GRPO KL at a temperature': 'test_peer_defects.py:test_log_probs_share_one_temperature',
  'the same draws each step': 'test_sampler.py:test_another_step_draws_other_tokens',
  'stale stop ids': 'test_peer_defects.py:test_sampling_parameters_compile_nothing',
  'a stale sampling policy': 'test_peer_defects.py:test_the_sampler_has_the_newest_weights',
  'k1 KL in the loss by default': 'test_peer_defects.py:test_the_default_kl_has_a_gradient',
  'ratio silently 1': 'test_peer_defects.py:test_later_updates_are_off_policy',
  'overlong penalty in characters': 'test_peer_defects.py:test_overlong_counts_tokens',
  'dynamic sampling ignored': 'test_grpo_family.py:test_dynamic_sampling_fills_the_batch_with_varied_groups',
  'the list of rewards is changed': 'test_peer_defects.py:test_the_config_is_not_changed',
  'resume replays the data': 'test_resume.py:test_run_killed_at_random_moments_resumes_bitwise',
  'all logits at once': 'test_head.py:test_the_update_never_holds_all_logits',
  'rows padded to the longest possible': 'test_peer_defects.py:test_short_completions_share_rows',
  'left padding': 'test_peer_defects.py:test_short_completions_share_rows',
  'rewards without a timeout': 'test_rewards_pool.py:test_hanging_group_does_not_delay_other_groups',
  'a failed reward is 0': 'test_rewards_pool.py:test_a_bad_reward_masks_its_group_only',
  'text is tokenised again for training': 'test_peer_defects.py:test_trained_tokens_are_those_that_were_sampled',
  'loss depends on the accumulation': 'test_grpo_family.py:test_loss_and_gradients_do_not_depend_on_the_layout_of_rows',
  'NaN of a group of one': 'test_losses_advantages.py:test_group_of_one_keeps_its_reward_only_with_singleton_raw',
}


@pytest.mark.parametrize('defect', CAUGHT_BY)
def test_has_a_test(defect):
  file, _, name = CAUGHT_BY[defect].partition(':')
  tree = ast.parse((TESTS / file).read_text())
  names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
  assert any(n == name for n in names), defect


def parts(model, **over):
  return jaxpost.policy_and_stream(tiny.grpo_config(model, **over))


def test_sampling_parameters_compile_nothing(nano):
  """Temperature, top-k, top-p, stop ids and lengths are arrays."""
  _, stream = parts(nano)
  try:
    next(stream)
    engine = stream.sampler.engine
    before = len(engine.programs.ledger.rows)
    prompts, _ = next(stream.prompts)
    stream.engine.load(stream.roles.policy.params, 0)
    made = [
      stream.sampler(prompts, 4, 0, **options)
      for options in (dict(temperature=0.0), dict(temperature=0.5, top_k=3), dict(top_p=0.5), dict(max_tokens=2))
    ]
    assert len(engine.programs.ledger.rows) == before
    assert made[-1].lengths.max() == 2
    # Stop ids are read again as well: stop at the first greedy token.
    first = int(made[0].completions[0, 0])
    engine.config = dataclasses.replace(engine.config, stop_ids=(first,) * len(engine.config.stop_ids))
    stopped = stream.sampler(prompts, 4, 0, temperature=0.0)
    assert stopped.lengths[0] == 1 and stopped.finished[0]
    assert len(engine.programs.ledger.rows) == before
  finally:
    stream.close()


def test_the_cache_is_split_over_the_batch_axes():
  mesh = jax.sharding.AbstractMesh((2, 2, 1, 1, 2), AXES)
  place = generate.slot_shardings(Layout(mesh, 'rollout'))
  cache = jax.ShapeDtypeStruct((8, 2, 64, 16), jnp.float32)
  spec = place({'k': cache})['k'].spec

  def split(part):
    return part if isinstance(part, tuple) else (part,)

  assert set(split(spec[0])) == {'data', 'fsdp'} and spec[1] == 'tensor'


def test_a_group_reads_its_prompt_once(nano):
  _, stream = parts(nano, rollout=dict(prompts=3, group_size=8, slots=4))
  engine, read = stream.sampler.engine, []
  prefill = engine.prefill
  engine.prefill = lambda texts, rows=0: (read.extend(tuple(t) for t in texts), prefill(texts, rows))[1]
  try:
    prompts, _ = next(stream.prompts)
    stream.engine.load(stream.roles.policy.params, 0)
    stream.sampler(prompts, 8, 0)
  finally:
    stream.close()
  assert sorted(read) == sorted({tuple(p.tokens) for p in prompts})


def test_log_probs_share_one_temperature(nano, tmp_path):
  jaxpost.run(
    tiny.grpo_config(nano, train=dict(steps=1), rl=dict(kl_coef=0.1), rollout=dict(temperature=0.6)), tmp_path
  )
  (row,) = tiny.rows(tmp_path)
  assert row['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  assert abs(row['kl']) < 1e-8  # the reference is the policy


def test_the_sampler_has_the_newest_weights(nano, tmp_path):
  """At every step the sampler's log-probs are those of the policy."""
  jaxpost.run(tiny.grpo_config(nano, train=dict(steps=4), optim=dict(lr=5e-2)), tmp_path)
  rows = tiny.rows(tmp_path)
  assert rows[0]['loss'] != rows[-1]['loss']
  for row in rows:
    assert row['sampler_mismatch'] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize('correction', ['token_truncated', 'sequence_truncated', 'sequence_mask', 'opsm'])
def test_truncated_sampling_is_on_policy(nano, tmp_path, correction):
  """The mass that top-p leaves out is no difference between sampler and trainer (TRL #6789)."""
  over = dict(rollout=dict(top_p=0.5), rl=dict(importance=(correction,)))
  jaxpost.run(tiny.grpo_config(nano, train=dict(steps=1), **over), tmp_path)
  row = next(r for r in metrics.read_rows(tmp_path / 'metrics.jsonl') if r['split'] == 'train')
  assert row['grad_norm'] > 0
  weight = 'off_policy_kept' if correction == 'opsm' else 'importance_weight'
  assert row[weight] == pytest.approx(1, abs=1e-4)
  if correction != 'opsm':
    assert abs(row['rollout_corr/kl']) < 1e-4


def config_of(name, **over):
  parsed = config_lib.parse(tiny.merged(dict(algorithm=name, reward='x'), over))
  return config_lib.resolve(next(iter(parsed.values())), algorithms.load_algorithm(name).defaults)


def test_no_correction_can_be_asked_for():
  lagged = dict(rollout=dict(staleness=1))
  assert config_of('grpo', **lagged).rl.importance == ('token_truncated',)
  assert config_of('grpo', **lagged, rl=dict(importance=())).rl.importance == ()
  assert config_of('grpo').rl.importance == config_of('ppo').rl.importance == ()


def test_the_default_kl_has_a_gradient():
  assert config_of('grpo').rl.kl_estimator == 'k3'
  assert config_of('grpo').rl.kl_in == 'loss'
  assert config_of('rloo').rl.kl_in == 'reward'  # where k1 is right
  for name in ('grpo', 'dapo', 'gspo', 'rloo', 'ppo'):
    assert config_of(name, rl=dict(kl_in='reward')).rl.kl_estimator == 'k1'
    assert config_of(name, rl=dict(kl_in='loss')).rl.kl_estimator == 'k3'


def test_later_updates_are_off_policy(nano):
  """The old log-probs stay those of the rollout."""
  policy, stream = parts(nano, rl=dict(epochs=3), optim=dict(lr=5e-2))
  try:
    item = next(stream)
  finally:
    stream.close()
  ratios = []
  for _, batch in item.updates:
    assert 'old_logprobs' in batch.arrays
    ratios.append(float(policy.update(batch)['ratio']))
  assert ratios[0] == pytest.approx(1, abs=1e-5)
  assert abs(ratios[-1] - 1) > 1e-4


def test_overlong_counts_tokens():
  """Not characters: both have 90 tokens, of which one is a long word."""
  found = length.Overlong(max=100, buffer=20)(completion_ids=[list(range(90)), list(range(90))])
  assert found == [-0.5, -0.5]


def test_the_config_is_not_changed(nano):
  config = tiny.grpo_config(nano, algorithm='dapo')
  before = repr(config)
  _, stream = jaxpost.policy_and_stream(config)
  stream.close()
  assert repr(config) == before


@functools.lru_cache
def rollout():
  from test_grpo_family import rollout as make

  return make()


def test_short_completions_share_rows():
  """Rows hold as many sequences as fit, from the left, without gaps."""
  made = rollout()
  mask = batching.completion_mask(made)
  total = int(batching.prompt_lengths(made).sum() + made.lengths.sum())
  batch = batching.to_batch(made, range(12), mask, {}, RowShape(-(-total // 32) + 1, 32))
  real = batch.segment_ids > 0
  assert real.sum() == total
  for row in real:  # padding only at the end
    assert not np.any(np.diff(row.astype(int)) > 0)
  assert (batch.segment_ids.max(axis=1) > 1).any()


def test_trained_tokens_are_those_that_were_sampled():
  made = rollout()
  mask = batching.completion_mask(made)
  batch = batching.to_batch(made, range(12), mask, {}, RowShape(12, 11))
  back = batching.from_rows(made, batch.tokens, RowShape(12, 11))
  np.testing.assert_array_equal(back, made.completions * mask)
