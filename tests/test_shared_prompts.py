"""Rows with completions after one shared copy of their prompt (`train.share_prompt`): packing, losses, runs, refusals.

Legend: N sequences, G samples per prompt, P prompt tokens, C completion tokens, B rows, T tokens per row.
"""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import grpo
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts
from jaxpost.programs import train
from jaxpost.rl import batching, reward_metrics, shared_prompts
from jaxpost.stage import batch_shape
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout, RowShape


def rollout(seed, prompts, size, max_prompt, max_new, vocab=131, fixed=False):
  """Returns prompts and completions of random lengths, or (`fixed`) of the greatest length."""
  random = np.random.default_rng(seed)
  lengths = random.integers(1, max_new + 1, prompts * size)
  prompt_lengths = random.integers(1, max_prompt + 1, prompts)
  if fixed:
    lengths[:], prompt_lengths[:] = max_new, max_prompt
  completions = random.integers(1, vocab, (prompts * size, max_new)) * (np.arange(max_new) < lengths[:, None])
  logprobs = -random.random((prompts * size, max_new)).astype(np.float32)
  return Rollout(
    prompts=tuple(Prompt(i, random.integers(1, vocab, n), '', {}) for i, n in enumerate(prompt_lengths)),
    completions=completions.astype(np.int32),
    lengths=lengths.astype(np.int32),
    logprobs=logprobs,
    behavior_logprobs=logprobs,
    finished=lengths < max_new,
  )


def rollout_section(prompts, size, longest_prompt, longest):
  return types.SimpleNamespace(
    prompts=prompts, group_size=size, max_prompt_length=longest_prompt, max_new_tokens=longest
  )


# ------------------------------------------------------------------- packing


@pytest.mark.parametrize('seed', range(40))
def test_packed_completions_attend_to_their_prompt_and_own_tokens_only(seed):
  """A token sees, in order of positions, its prompt and its completion up to itself; values of tokens are restored."""
  random = np.random.default_rng(seed)
  prompts, size, longest_prompt, longest = random.integers(1, [5, 7, 12, 12])
  section = rollout_section(prompts, size, longest_prompt, longest)
  sampled = rollout(seed, *vars(section).values())
  length = int(random.integers(longest_prompt + longest, shared_prompts.row_length(section) + 20))
  values = random.standard_normal(sampled.logprobs.shape).astype(np.float32)
  mask = batching.completion_mask(sampled)
  shape = RowShape(max(1, prompts * size), length, True)
  batch = batching.to_batch(sampled, range(prompts * size), mask, {'x': values}, shape)
  np.testing.assert_array_equal(batching.from_rows(sampled, batch.arrays['x'][None], shape), values * mask)
  assert batch.loss_weights.sum() == sampled.lengths.sum()
  seen = []
  for row in range(shape[0]):
    ids = batch.sequence_ids[row]
    for number in range(1, ids.max() + 1):
      last = np.flatnonzero(ids == number)[-1]
      is_visible = batch.segment_ids[row] == batch.segment_ids[row, last]
      is_visible &= np.isin(batch.branch_ids[row], [0, batch.branch_ids[row, last]])
      visible = np.flatnonzero(is_visible)
      np.testing.assert_array_equal(batch.positions[row, visible], np.arange(len(visible)))
      np.testing.assert_array_equal(visible[-(ids == number).sum() :], np.flatnonzero(ids == number))
      seen.append(batch.tokens[row, visible].tolist())
  texts = [
    [*sampled.prompts[n // size].tokens, *sampled.completions[n, : sampled.lengths[n]]] for n in range(prompts * size)
  ]
  assert sorted(seen) == sorted(map(list, texts))
  experience = Experience(sampled, np.zeros(prompts * size), mask, {})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reward_metrics, 'surprisal_metrics', lambda own: {})
    step_metrics = reward_metrics.step_metrics(experience, shape, CONFIG)
  assert step_metrics['tokens'] == (batch.segment_ids > 0).sum()
  assert step_metrics['mean_context'] == pytest.approx((batch.positions + 1)[batch.segment_ids > 0].mean())


CONFIG = config_lib.resolve(
  config_lib.parse(dict(algorithm='grpo', reward='x', rl=dict(kl_coef=0.1, entropy_coef=0.01)))['grpo'],
  grpo.GRPO.defaults,
)


@pytest.mark.parametrize('seed', range(40))
def test_batch_rows_suffice_for_any_minibatch(seed):
  """Minibatches split groups, and all completions may have the greatest length."""
  random = np.random.default_rng(seed)
  prompts, size, longest_prompt, longest = random.integers(1, [9, 9, 40, 40])
  section = rollout_section(prompts, size, longest_prompt, longest)
  length = int(random.integers(longest_prompt + longest, 2 * shared_prompts.row_length(section)))
  config = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, **vars(section)))
  minibatches = int(random.choice([n for n in (1, 2, 3, 4) if prompts * size % n == 0]))
  config = dataclasses.replace(
    config,
    train=dataclasses.replace(CONFIG.train, row_length=length, share_prompt=True, micro_batch_size=1),
    rl=dataclasses.replace(CONFIG.rl, minibatches=minibatches),
  )
  shape = batch_shape.batch_shape(config, True, 1)
  for fixed in (True, False):
    sampled = rollout(seed, *vars(section).values(), fixed=fixed)
    all_sequences = np.arange(prompts * size)
    assert len([*batching.places(sampled, all_sequences, RowShape(shape.rows, length, True))]) == len(all_sequences)
    for members in batching.minibatches(len(all_sequences), config.rl, 0, seed):
      placed = [*batching.places(sampled, members, RowShape(shape.update_rows, length, True))]
      assert sorted(p.sequence for p in placed) == sorted(members) and max(p.end for p in placed) <= length


def test_row_length_fits_a_group_or_equal_parts_of_it():
  section = rollout_section(4, 8, 256, 512)
  length = shared_prompts.row_length(section)
  assert length == 4480 >= 255 + 8 * 513 and shared_prompts.filled_rows(section, length) == 4
  assert shared_prompts.filled_rows(section, 768) == 32 and shared_prompts.filled_rows(section, 2 * length) == 2
  groups_of_16 = rollout_section(4, 16, 256, 512)  # one row would take 8,463 tokens
  assert shared_prompts.row_length(groups_of_16) == 4480 and shared_prompts.filled_rows(groups_of_16, 4480) == 8
  for prompt, new_tokens in ((8000, 512), (1024, 4096)):  # a row has room for at least 4 completions
    long_section = rollout_section(2, 8, prompt, new_tokens)
    assert (
      prompt - 1 + 4 * (new_tokens + 1) <= shared_prompts.row_length(long_section) < prompt + 127 + 4 * (new_tokens + 1)
    )


def test_rows_suffice_if_prompts_of_a_group_share_only_a_prefix():
  """In an environment, prompts may differ after a common prefix; the rest is then part of the completions."""
  section = rollout_section(4, 8, 256, 512)
  config = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, **vars(section)))
  config = dataclasses.replace(config, train=dataclasses.replace(CONFIG.train, share_prompt=True))
  shape = batch_shape.batch_shape(config, True, 1)
  for common in (200, 100, 10, 0):
    sampled = rollout(0, 4, 8, 256, 768 - common, fixed=True)
    sampled = sampled.replace(prompts=tuple(p.replace(tokens=p.tokens[:common]) for p in sampled.prompts))
    mask = batching.completion_mask(sampled)
    row_shape = RowShape(shape.rows, shape.row_length, True)
    batch = batching.to_batch(sampled, range(32), mask, {}, row_shape)
    restored = batching.from_rows(sampled, batch.tokens[None].astype(float), row_shape)
    np.testing.assert_array_equal(restored, sampled.completions)


# -------------------------------------------------------------------- losses

MODELS = {
  'dense': tiny.config(),
  'windows': tiny.config(layer_windows=(4, 0), attention_softcap=3.0),
  'experts': tiny.config(experts=Experts(6, 2, 20)),
  'latent': tiny.latent(),
  'sparse': tiny.sparse(),
  'mixed': tiny.mixed(),
  'chunked': tiny.chunked(),
}


def outcome(model, params, sampled, shape, micro=1, experts=False):
  """Returns (loss, metrics, gradients) of an update."""
  random, mask = np.random.default_rng(1), batching.completion_mask(sampled)
  arrays = {
    name: random.standard_normal(mask.shape).astype(np.float32)
    for name in ('advantages', 'sampler_logprobs', 'ref_logprobs')
  }
  weights = batching.token_weights(mask, 'token', mask.shape[1])
  batch = batching.to_batch(sampled, range(len(mask)), weights, arrays, RowShape(*shape))
  assert not experts or batch.experts is not None
  layout = tiny.one_device()
  loss = train.make_loss(model, grpo.objective(CONFIG), layout, tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro, *x.shape[1:]), batch)
  (value, metrics), grads = jax.jit(lambda p, b: train.accumulate(loss, p, b))(params, split)
  return value, metrics, grads


@pytest.mark.parametrize('name', MODELS)
def test_loss_and_gradients_equal_those_of_separate_rows(name):
  cfg = MODELS[name]
  model = model_lib.build(cfg)
  params = tiny.params(model)
  sampled = rollout(3, 3, 4, 9, 6)
  if cfg.experts:  # as a sampler records them: the experts of a prompt are the same in its group
    random = np.random.default_rng(2)
    shape = 12, 15, cfg.sparse_layers, cfg.experts.top_k
    experts = np.argsort(random.random((*shape[:3], cfg.experts.num)), axis=-1)[..., : shape[3]].astype(np.uint16)
    for n in range(12):
      length = len(sampled.prompts[n // 4].tokens)
      experts[n, :length] = experts[n // 4 * 4, :length]
    sampled = sampled.replace(experts=experts)
  separate = outcome(model, params, sampled, (12, 15, False))
  assert abs(float(separate[0])) > 1e-3 and tiny.largest(separate[2]['embed']) > 1e-3
  for shape, micro in (((3, 40, True), 1), ((6, 22, True), 2)):
    shared = outcome(model, params, sampled, shape, micro)
    for key, value in {'loss': separate[0], **{k: x for k, x in separate[1].items() if k != 'router'}}.items():
      shared_value = shared[0] if key == 'loss' else shared[1][key]
      assert float(shared_value) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * tiny.largest(y)), shared[2], separate[2])
  with pytest.raises(AssertionError):  # another prompt would be noticed
    other_prompts = sampled.replace(prompts=tuple(p.replace(tokens=p.tokens[::-1] + 1) for p in sampled.prompts))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * tiny.largest(y)),
      outcome(model, params, other_prompts, (3, 40, True))[2],
      separate[2],
    )


# ---------------------------------------------------------------------- runs


def rows_of(folder):
  return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


METHODS = {
  'grpo': dict(rl=dict(kl_coef=0.05)),
  'minibatches': dict(rl=dict(minibatches=2, epochs=2)),
  'ppo': dict(algorithm='ppo'),
  'stale': dict(rollout=dict(staleness=1), rl=dict(importance=('token_truncated',))),
  'gkd': dict(algorithm='gkd', reward=''),
  # The reward model reads each completion, in training and in evaluation.
  'reward_model': dict(
    reward='reward_model',
    eval=dict(every=2, samples=2, size=8, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=20')),
  ),
}


@pytest.mark.parametrize('name', METHODS)
def test_run_with_shared_prompts_has_the_metrics_of_one_without(tmp_path, name):
  path = tiny.folder(tmp_path / 'model')
  over = METHODS[name] | dict(
    distill=dict(teachers=(tiny.folder(tmp_path / 'teacher', hidden_size=24),) if name == 'gkd' else ()),
    reward_model=dict(path=tiny.folder(tmp_path / 'grades', num_labels=1) if name == 'reward_model' else ''),
  )

  def run(folder, **train_fields):
    config = tiny.merged(tiny.grpo_config(path, **over), dict(train=dict(steps=3, **train_fields)))
    jaxpost.run(config, tmp_path / folder)
    return rows_of(tmp_path / folder)

  separate, shared = run('apart'), run('shared', share_prompt=True)
  for a, b in zip(separate, shared, strict=True):
    assert 'tokens' not in a or b['tokens'] < 0.7 * a['tokens']
    compared = {'loss', 'grad_norm', 'completion_tokens', 'entropy', 'kl', 'critic/loss', 'sampler_mismatch'} & a.keys()
    compared |= {key for key in a if 'reward' in key and not key.startswith('time/')}
    for key in compared:
      assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
  'over, words',
  [
    (dict(algorithm='sft'), 'sft samples nothing; pairs have preference.share_prompt'),
    (dict(algorithm='online_dpo'), 'online_dpo trains on pairs'),
    (dict(model='qwen3_5_text'), 'the policy is a model of your own, or has layers with a recurrent state'),
    (dict(algorithm='rft', nll=dict(neftune_alpha=1.0)), 'nll.mtp_weight and nll.neftune_alpha'),
    (dict(train=dict(row_length=36)), 'a row of 36 tokens has no room for a prompt and two completions'),
  ],
)
def test_unsupported_share_prompt_is_refused(tmp_path, over, words):
  family = over.pop('model', '')
  path = tiny.folder(tmp_path / 'model', **dict(family=family, num_layers=3) if family else {})
  with pytest.raises(InputError, match=f'config.train.share_prompt: {words}'):
    jaxpost.run(tiny.merged(tiny.grpo_config(path, **over), dict(train=dict(share_prompt=True))), tmp_path / 'run')
