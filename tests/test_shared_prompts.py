"""Completions behind one copy of their prompt (`config.train.share_prompt`): packing, losses, runs and refusals.

Legend: N sequences, G samples a prompt, P prompt tokens, C completion tokens, B rows, T tokens a row.
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


def rollout(seed, prompts, size, longest_prompt, longest, vocab=131, fixed=False):
  """Prompts and completions of random lengths, or all of the longest."""
  random = np.random.default_rng(seed)
  lengths = random.integers(1, longest + 1, prompts * size)
  prompt_lengths = random.integers(1, longest_prompt + 1, prompts)
  if fixed:
    lengths[:], prompt_lengths[:] = longest, longest_prompt
  completions = random.integers(1, vocab, (prompts * size, longest)) * (np.arange(longest) < lengths[:, None])
  logprobs = -random.random((prompts * size, longest)).astype(np.float32)
  return Rollout(
    prompts=tuple(Prompt(i, random.integers(1, vocab, n), '', {}) for i, n in enumerate(prompt_lengths)),
    completions=completions.astype(np.int32),
    lengths=lengths.astype(np.int32),
    logprobs=logprobs,
    behavior_logprobs=logprobs,
    finished=lengths < longest,
  )


def rollout_section(prompts, size, longest_prompt, longest):
  return types.SimpleNamespace(
    prompts=prompts, group_size=size, max_prompt_length=longest_prompt, max_new_tokens=longest
  )


# ------------------------------------------------------------------- packing


@pytest.mark.parametrize('seed', range(40))
def test_each_token_is_predicted_from_its_own_text(seed):
  """A token attends, in order of positions, to its prompt and its completion up to it; all tokens come back."""
  random = np.random.default_rng(seed)
  prompts, size, longest_prompt, longest = random.integers(1, [5, 7, 12, 12])
  section = rollout_section(prompts, size, longest_prompt, longest)
  made = rollout(seed, *vars(section).values())
  length = int(random.integers(longest_prompt + longest, shared_prompts.row_length(section) + 20))
  values = random.standard_normal(made.logprobs.shape).astype(np.float32)
  mask = batching.completion_mask(made)
  shape = RowShape(max(1, prompts * size), length, True)
  batch = batching.to_batch(made, range(prompts * size), mask, {'x': values}, *shape)
  np.testing.assert_array_equal(batching.from_rows(made, batch.arrays['x'][None], *shape), values * mask)
  assert batch.loss_weights.sum() == made.lengths.sum()
  seen = []
  for row in range(shape[0]):
    ids = batch.sequence_ids[row]
    for number in range(1, ids.max() + 1):
      last = np.flatnonzero(ids == number)[-1]
      same = batch.segment_ids[row] == batch.segment_ids[row, last]
      same &= np.isin(batch.branch_ids[row], [0, batch.branch_ids[row, last]])
      at = np.flatnonzero(same)
      np.testing.assert_array_equal(batch.positions[row, at], np.arange(len(at)))
      np.testing.assert_array_equal(at[-(ids == number).sum() :], np.flatnonzero(ids == number))
      seen.append(batch.tokens[row, at].tolist())
  texts = [[*made.prompts[n // size].tokens, *made.completions[n, : made.lengths[n]]] for n in range(prompts * size)]
  assert sorted(seen) == sorted(map(list, texts))
  experience = Experience(made, np.zeros(prompts * size), mask, {})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reward_metrics, 'surprisal_metrics', lambda own: {})
    found = reward_metrics.step_metrics(experience, shape, CONFIG)
  assert found['tokens'] == (batch.segment_ids > 0).sum()
  assert found['mean_context'] == pytest.approx((batch.positions + 1)[batch.segment_ids > 0].mean())


CONFIG = config_lib.resolve(
  config_lib.parse(dict(algorithm='grpo', reward='x', rl=dict(kl_coef=0.1, entropy_coef=0.01)))['grpo'],
  grpo.GRPO.defaults,
)


@pytest.mark.parametrize('seed', range(40))
def test_rows_hold_any_part_of_a_step(seed):
  """Minibatches tear groups apart, and completions may all be as long as can be."""
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
    made = rollout(seed, *vars(section).values(), fixed=fixed)
    every = np.arange(prompts * size)
    assert len([*batching.places(made, every, shape.rows, length, share_prompt=True)]) == len(every)
    for members in batching.minibatches(len(every), config.rl, 0, seed):
      found = [*batching.places(made, members, shape.update_rows, length, share_prompt=True)]
      assert sorted(p.sequence for p in found) == sorted(members) and max(p.end for p in found) <= length


def test_a_group_takes_one_row_or_equal_parts():
  section = rollout_section(4, 8, 256, 512)
  length = shared_prompts.row_length(section)
  assert length == 4480 >= 255 + 8 * 513 and shared_prompts.filled_rows(section, length) == 4
  assert shared_prompts.filled_rows(section, 768) == 32 and shared_prompts.filled_rows(section, 2 * length) == 2
  groups = rollout_section(4, 16, 256, 512)  # one row would take 8,463 tokens
  assert shared_prompts.row_length(groups) == 4480 and shared_prompts.filled_rows(groups, 4480) == 8
  for prompt, new in ((8000, 512), (1024, 4096)):  # no less than 4 completions
    long = rollout_section(2, 8, prompt, new)
    assert prompt - 1 + 4 * (new + 1) <= shared_prompts.row_length(long) < prompt + 127 + 4 * (new + 1)


def test_rows_hold_what_an_environment_draws():
  """Prompts of a group may have only a part in common, and the rest is in the completions, which are longer then."""
  section = rollout_section(4, 8, 256, 512)
  config = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, **vars(section)))
  config = dataclasses.replace(config, train=dataclasses.replace(CONFIG.train, share_prompt=True))
  shape = batch_shape.batch_shape(config, True, 1)
  for common in (200, 100, 10, 0):
    made = rollout(0, 4, 8, 256, 768 - common, fixed=True)
    made = made.replace(prompts=tuple(p.replace(tokens=p.tokens[:common]) for p in made.prompts))
    mask = batching.completion_mask(made)
    of_rows = shape.rows, shape.row_length, True
    batch = batching.to_batch(made, range(32), mask, {}, *of_rows)
    back = batching.from_rows(made, batch.tokens[None].astype(float), *of_rows)
    np.testing.assert_array_equal(back, made.completions)


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


def outcome(model, params, made, shape, micro=1, experts=False):
  """(loss, metrics, gradients) of an update, and log-probs [N, C]."""
  random, mask = np.random.default_rng(1), batching.completion_mask(made)
  arrays = {
    name: random.standard_normal(mask.shape).astype(np.float32)
    for name in ('advantages', 'sampler_logprobs', 'ref_logprobs')
  }
  weights = batching.token_weights(mask, 'token', mask.shape[1])
  batch = batching.to_batch(made, range(len(mask)), weights, arrays, *shape)
  assert not experts or batch.experts is not None
  layout = tiny.one_device()
  loss = train.make_loss(model, grpo.objective(CONFIG), layout, tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro, *x.shape[1:]), batch)
  (value, metrics), grads = jax.jit(lambda p, b: train.accumulate(loss, p, b))(params, split)
  return value, metrics, grads


@pytest.mark.parametrize('name', MODELS)
def test_loss_and_gradient_are_those_of_rows_apart(name):
  cfg = MODELS[name]
  model = model_lib.build(cfg)
  params = tiny.params(model)
  made = rollout(3, 3, 4, 9, 6)
  if cfg.experts:  # as a sampler would have chosen them: the prompt's are those of the group
    random = np.random.default_rng(2)
    shape = 12, 15, cfg.sparse_layers, cfg.experts.top_k
    experts = np.argsort(random.random((*shape[:3], cfg.experts.num)), axis=-1)[..., : shape[3]].astype(np.uint16)
    for n in range(12):
      length = len(made.prompts[n // 4].tokens)
      experts[n, :length] = experts[n // 4 * 4, :length]
    made = made.replace(experts=experts)
  apart = outcome(model, params, made, (12, 15, False))
  assert abs(float(apart[0])) > 1e-3 and tiny.largest(apart[2]['embed']) > 1e-3
  for shape, micro in (((3, 40, True), 1), ((6, 22, True), 2)):
    shared = outcome(model, params, made, shape, micro)
    for key, value in {'loss': apart[0], **{k: x for k, x in apart[1].items() if k != 'router'}}.items():
      found = shared[0] if key == 'loss' else shared[1][key]
      assert float(found) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * tiny.largest(y)), shared[2], apart[2])
  with pytest.raises(AssertionError):  # the test sees a prompt that is not shared
    wrong = made.replace(prompts=tuple(p.replace(tokens=p.tokens[::-1] + 1) for p in made.prompts))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * tiny.largest(y)),
      outcome(model, params, wrong, (3, 40, True))[2],
      apart[2],
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
  # Which reads each answer in training, and in evaluation.
  'reward_model': dict(
    reward='reward_model',
    eval=dict(every=2, samples=2, size=8, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=20')),
  ),
}


@pytest.mark.parametrize('name', METHODS)
def test_a_run_is_that_without(tmp_path, name):
  path = tiny.folder(tmp_path / 'model')
  over = METHODS[name] | dict(
    distill=dict(teachers=(tiny.folder(tmp_path / 'teacher', hidden_size=24),) if name == 'gkd' else ()),
    reward_model=dict(path=tiny.folder(tmp_path / 'grades', num_labels=1) if name == 'reward_model' else ''),
  )

  def run(folder, **train_fields):
    config = tiny.merged(tiny.grpo_config(path, **over), dict(train=dict(steps=3, **train_fields)))
    jaxpost.run(config, tmp_path / folder)
    return rows_of(tmp_path / folder)

  apart, shared = run('apart'), run('shared', share_prompt=True)
  for a, b in zip(apart, shared, strict=True):
    assert 'tokens' not in a or b['tokens'] < 0.7 * a['tokens']
    same = {'loss', 'grad_norm', 'completion_tokens', 'entropy', 'kl', 'critic/loss', 'sampler_mismatch'} & a.keys()
    same |= {key for key in a if 'reward' in key and not key.startswith('time/')}
    for key in same:
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
def test_what_cannot_share_is_refused(tmp_path, over, words):
  family = over.pop('model', '')
  path = tiny.folder(tmp_path / 'model', **dict(family=family, num_layers=3) if family else {})
  with pytest.raises(InputError, match=f'config.train.share_prompt: {words}'):
    jaxpost.run(tiny.merged(tiny.grpo_config(path, **over), dict(train=dict(share_prompt=True))), tmp_path / 'run')
