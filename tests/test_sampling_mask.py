"""`rl.sampling_mask`, log-probs over the tokens that the sampler could draw: the draw, the head, the gradient, a run.

Legend: V vocabulary, N sequences, C completion tokens.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_gradients as exact
import tiny

import jaxpost
from jaxpost.algorithms import grpo
from jaxpost.errors import InputError
from jaxpost.losses import head, head_chunk
from jaxpost.monitor import metrics
from jaxpost.programs import sampling
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout, RowShape

V, DRAWS = 12, 400
ROW = np.random.default_rng(5).normal(size=V).astype(np.float32) * 2
TIED = np.where(np.arange(V) < 4, 1.0, 0.0).astype(np.float32)


def draw(row, max_allowed, **fields):
  """Draws many times from the logits `row`; returns (tokens, their log-probs among allowed tokens, allowed ids + 1)."""

  def full(x, dtype=jnp.int32):
    return jnp.full(DRAWS, x, dtype)

  defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0, max_tokens=9, seed=0, top_logprobs=0)
  settings = {k: full(v, jnp.float32 if isinstance(v, float) else jnp.int32) for k, v in (defaults | fields).items()}
  ids = dict(stop_ids=full(-1)[:, None], forbidden_ids=full(fields.pop('forbidden', -1))[:, None])
  settings.pop('forbidden', None)
  uniform = (jnp.arange(DRAWS) + 0.5) / DRAWS
  logits = jnp.tile(jnp.asarray(row), (DRAWS, 1))
  drawn = sampling.draw(logits, sampling.Sampling(**settings, **ids), uniform, full(0), allowed=max_allowed)
  return np.asarray(drawn.tokens), np.asarray(drawn.behavior_logprobs), np.asarray(drawn.allowed[0])


@pytest.mark.parametrize(
  'row, fields, size',
  [
    (ROW, dict(top_k=5), 5),
    (ROW, dict(top_k=5, top_p=0.6), None),
    (ROW, dict(top_k=5, min_p=0.3), None),
    (ROW, dict(top_k=3, forbidden=int(ROW.argmax())), 3),
    (TIED, dict(top_k=3), 3),
  ],
  ids=['top-k', 'top-p', 'min-p', 'forbidden', 'more ties than fit'],
)
def test_allowed_ids_are_the_tokens_that_can_be_drawn(row, fields, size):
  tokens, logprobs, ids = draw(row, 5, **fields)
  (allowed_ids,) = {tuple(sorted(x[x > 0] - 1)) for x in ids}
  if fields['top_k'] < 5:  # the engine has room for 5 ids, and ties may fill it
    assert len(allowed_ids) >= fields['top_k']
  else:
    assert size is None or len(allowed_ids) == size
  assert set(tokens.tolist()) <= set(allowed_ids)
  logits = row[list(allowed_ids)]
  expected = {i: x for i, x in zip(allowed_ids, logits - np.log(np.exp(logits).sum()))}
  np.testing.assert_allclose(logprobs, [expected[i] for i in tokens], atol=1e-5)


def test_ties_beyond_the_room_are_not_drawn():
  tokens, _, ids = draw(TIED, 3, top_k=3)
  assert (ids > 0).sum(axis=1).tolist() == [3] * DRAWS
  assert len(set(tokens.tolist())) == 3


def test_slots_without_top_k_report_nothing():
  """Slots of evaluations are such, as they sample with the fields of `eval`."""
  tokens, _, ids = draw(ROW, 3, top_p=0.9)
  assert not ids.any() and len(set(tokens.tolist())) > 3


# ------------------------------------------------------------------------ head


def dense(hidden, table, labels, allowed):
  """Returns (log-prob, entropy) of the labels in float32, by the definition."""
  logits = hidden @ table.T
  members = np.zeros((*labels.shape, len(table)), bool)
  for b, t in np.ndindex(labels.shape):
    kept = allowed[b, t][allowed[b, t] > 0] - 1
    members[b, t, kept if len(kept) else slice(None)] = True
  logp = jax.nn.log_softmax(jnp.where(members, logits, -1e30))
  entropy = -jnp.sum(jnp.where(members, jnp.exp(logp) * logp, 0), axis=-1)
  return jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0], entropy


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'outputs'])
def test_masked_loss_and_gradients_equal_the_definition(fused):
  random = np.random.default_rng(0)
  hidden, table = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((2, 5, 8), (V, 8)))
  allowed = np.zeros((2, 5, 4), np.int32)
  for b, t in np.ndindex(2, 5):
    size = [0, 1, 2, 4][(b + t) % 4]
    allowed[b, t, :size] = 1 + random.choice(V, size, replace=False)
  labels = np.where(allowed[..., 0] > 0, allowed[..., 0] - 1, 3)
  weights = jnp.asarray(random.uniform(0.5, 1, (2, 5)), jnp.float32)
  arrays = {'allowed': jnp.asarray(allowed)}

  def value(outputs):
    return outputs.logprobs * 1.3 - 0.4 * outputs.entropy

  config = head_chunk.HeadConfig(
    lambda outputs, arrays_of_chunk: (value(outputs), {}),
    V,
    1.0,
    dataclasses.replace(tiny.EXACT, head_elements=2 * V * 2),
    tiny.one_device(),
  )

  def fused_or_outputs(h, w):
    if fused:
      return head.fused_loss(config, h, w, labels, weights, arrays=arrays)[0]
    return (weights * value(head.token_outputs(config, h, w, labels, weights, arrays=arrays))).sum()

  def reference(h, w):
    logp, entropy = dense(h, w, labels, allowed)
    return (weights * (1.3 * logp - 0.4 * entropy)).sum()

  actual, expected = (jax.value_and_grad(f, (0, 1))(hidden, table) for f in (fused_or_outputs, reference))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(tiny.largest(b), 1))


# ------------------------------------------------------------------- gradients


@pytest.mark.parametrize('masked', [True, False])
def test_the_gradient_is_that_of_the_truncated_policy(masked):
  """Of 4 tokens, 3 can be drawn first and then 2. Without the mask, the gradient of their mass is missing."""
  drawable = [n for n, (a, b) in enumerate(exact.completions(2)) if a != 1 and b in (a, (a + 1) % 4)]
  answers, values = exact.completions(2)[drawable], exact.rewards_of(2, False)[drawable]
  allowed = np.array([[[1, 3, 4], [1 + a, 1 + (a + 1) % 4, 0]] for a, _ in answers], np.int32)

  def logprobs(weights, renormalized):
    logp = exact.logprobs(weights, 2)[np.array(drawable)]
    if not renormalized:
      return logp
    same_first = answers[:, :1] == answers[:, 0]  # the two answers with the same first token share their second set
    first = jax.nn.logsumexp(logp[:, 0]) - np.log(2)
    second = jax.nn.logsumexp(jnp.where(same_first, logp[None, :, 1], -1e30), axis=1)
    return logp - jnp.stack([jnp.full(len(drawable), first), second], axis=1)

  behavior = np.asarray(logprobs(exact.params('policy'), True))
  index = np.array(list(itertools.product(range(len(drawable)), repeat=2)))
  probability, index = np.exp(behavior.sum(axis=1)[index].sum(axis=1)), index.reshape(-1)
  assert probability.sum() == pytest.approx(1, abs=1e-5)
  sampled_logprobs = np.asarray(logprobs(exact.params('policy'), masked))[index]
  rollout = Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}) for i in range(len(probability))),
    completions=answers[index],
    lengths=np.full(len(index), 2),
    logprobs=sampled_logprobs,
    behavior_logprobs=behavior[index],
    finished=np.ones(len(index), bool),
    allowed=allowed[index] if masked else None,
  )
  mask = np.ones((len(index), 2), np.float32)
  experience = Experience(rollout, values[index], mask, dict(sampler_logprobs=sampled_logprobs))
  config = exact.config_of('grpo', dict(advantage='leave_one_out'))
  credit = grpo.credit(experience, config)
  weights = batching.token_weights(credit.mask, 'token', 2) * np.repeat(probability * len(probability), 2)[:, None]
  batch = batching.to_batch(rollout, range(len(index)), weights.astype(np.float32), credit.arrays, RowShape(6, 48))
  loss = programs.make_loss(exact.model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  gradient = jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), split)

  def expectation(w):
    return (jnp.exp(logprobs(w, True).sum(axis=1)) * values).sum() / 2

  expected = jax.grad(expectation)(exact.params('policy'))
  if masked:
    exact.close(gradient, (-1, expected))
    return
  with pytest.raises(AssertionError):
    exact.close(gradient, (-1, expected))


# ------------------------------------------------------------------------- run


@pytest.mark.long
def test_run_with_sampling_mask_is_on_policy(nano, tmp_path):
  """Sampler, old policy and reference agree: the ratio and the weights are 1, and the KL is 0."""
  sampled = dict(top_k=6, top_p=0.9)
  overrides = dict(rl=dict(sampling_mask=True, kl_coef=0.1, importance=('token_truncated',)), train=dict(steps=2))
  config = tiny.grpo_config(nano, rollout=sampled, **overrides)
  _, stream = jaxpost.policy_and_stream(config)
  try:
    experience = next(stream).experience
  finally:
    stream.close()
  rollout, mask = experience.rollout, experience.mask > 0
  assert rollout.allowed.shape == (*rollout.completions.shape, 6)
  sizes = (rollout.allowed > 0).sum(axis=-1)[mask]
  assert 1 <= sizes.min() < sizes.max() <= 6  # top-p leaves fewer than top_k in some places
  member = (rollout.allowed == rollout.completions[..., None] + 1).any(axis=-1)
  assert member[mask].all()
  for name in ('old_logprobs', 'ref_logprobs'):
    np.testing.assert_allclose(experience.arrays[name][mask], rollout.logprobs[mask], atol=1e-5)
  jaxpost.run(config, tmp_path / 'run')
  first = metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl')[0]
  assert first['ratio'] == pytest.approx(1, abs=1e-4) and first['sampler_mismatch'] == pytest.approx(1, abs=1e-4)
  assert first['importance_weight'] == pytest.approx(1, abs=1e-4) and abs(first['kl']) < 1e-6
  assert first['entropy'] <= np.log(6)


@pytest.mark.parametrize(
  'over',
  [
    dict(),
    dict(rollout=dict(top_k=4, top_logprobs=2)),
    dict(rollout=dict(top_k=4), environment='x'),
    dict(rollout=dict(top_k=4), train_on_rollouts='run'),
    dict(rollout=dict(top_k=4), algorithm='online_dpo'),
    dict(rollout=dict(top_k=4), algorithm='rft'),
  ],
)
def test_sampling_mask_is_refused_where_ids_are_not_recorded(over):
  over = tiny.merged(dict(algorithm='grpo', reward='x', rl=dict(sampling_mask=True)), over)
  method = algorithms.load_algorithm(over['algorithm'])
  with pytest.raises(InputError, match='rl.sampling_mask'):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))
