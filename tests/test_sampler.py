"""`programs.sampling` and the engine: draws follow their distribution, and log-probs agree with the scorer."""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.matmul import compute_for
from jaxpost.models import decode_kernels, decode_triton
from jaxpost.models import model as model_lib
from jaxpost.programs import sampling
from jaxpost.programs import score as score_lib
from jaxpost.programs.compile import Ledger
from jaxpost.programs.sampling import Sampling
from jaxpost.rollout import native
from jaxpost.types import Batch, Prompt

DRAWS, V = 20_000, 600  # V: more than one tile of the vocabulary


@pytest.fixture(scope='module')
def row():
  """V logits, of which a few are likely."""
  random = np.random.RandomState(0)
  return (2.5 * random.standard_normal(V)).astype(np.float32)


@functools.lru_cache(maxsize=None)
def uniforms():
  keys = sampling.slot_keys(jax.random.key(5), 3, jnp.arange(DRAWS) // 4, jnp.arange(DRAWS) % 4, jnp.zeros(DRAWS, int))
  return sampling.uniforms(keys, jnp.full(DRAWS, 17))


def draw(row, temperature=1.0, top_k=0, top_p=1.0, **ids):
  """Draws a token in each of DRAWS slots with the same logits; returns (tokens, logprobs, behavior_logprobs)."""

  def full(x, dtype):
    return jnp.full(DRAWS, x, dtype)

  settings = slots_of(
    DRAWS,
    temperature=full(temperature, jnp.float32),
    top_k=full(top_k, jnp.int32),
    top_p=full(top_p, jnp.float32),
    **ids,
  )
  logits = jnp.broadcast_to(jnp.asarray(row), (DRAWS, V))
  return _draw(logits, settings, uniforms())


def slots_of(count, **fields):
  """The Sampling settings of `count` slots; `fields` replace the defaults."""

  def full(x, dtype=jnp.int32):
    return jnp.full(count, x, dtype)

  return Sampling(
    **{
      **dict(
        temperature=full(1, jnp.float32),
        top_k=full(0),
        top_p=full(1, jnp.float32),
        min_p=full(0, jnp.float32),
        stop_ids=full(-1)[:, None],
        forbidden_ids=full(-1)[:, None],
        min_tokens=full(0),
        max_tokens=full(9),
        seed=full(0),
        top_logprobs=full(0),
      ),
      **fields,
    }
  )


def _draw(logits, settings, uniform):
  drawn = _compiled(logits, settings, uniform, jnp.zeros(len(uniform), int))
  return [np.asarray(x) for x in (drawn.tokens, drawn.logprobs, drawn.behavior_logprobs)]


_compiled = jax.jit(sampling.draw)


def distribution(row, temperature, top_k, top_p):
  """Returns (log-probs, log-probs after top-k and top-p), computed in float64 by the definitions."""
  x = row.astype(np.float64) / temperature
  logp = x - np.log(np.sum(np.exp(x)))
  order = np.argsort(-logp)
  chances = np.exp(logp[order]) * (np.arange(V) < (top_k or V))
  chances /= chances.sum()  # top-p is a share of the probability that top-k leaves
  keep = (np.cumsum(chances) - chances < top_p) & (chances > 0)
  kept = np.full(V, -np.inf)
  kept[order[keep]] = logp[order[keep]]
  return logp, kept - np.log(np.sum(np.exp(kept)))


def test_a_truncation_without_a_loop_draws_the_same():
  """The unrolled form is for GPUs, where the host would decide at each token about a branch with a loop inside."""
  logits = jnp.asarray(np.random.default_rng(3).normal(size=(8, V)), jnp.float32) * 3
  settings = slots_of(8, top_k=jnp.arange(8), top_p=jnp.linspace(0.3, 1, 8, dtype=jnp.float32))
  arguments = logits, settings, uniforms()[:8], jnp.zeros(8, int)
  texts, draws = [], []
  for unroll in (False, True):
    lowered = jax.jit(functools.partial(sampling.draw, unroll=unroll)).lower(*arguments)
    texts.append(lowered.as_text())
    draws.append(lowered.compile()(*arguments))
  assert [text.count('stablehlo.while') for text in texts] == [2, 0]
  for one, other in zip(*map(jax.tree.leaves, draws)):
    np.testing.assert_array_equal(one, other)


def test_a_draw_writes_no_array_of_logits():
  """Scaled logits or weights of the whole vocabulary would have to be written and read again for each token."""
  shape = jax.ShapeDtypeStruct((8, 1152), jnp.float32)
  arguments = shape, slots_of(8), uniforms()[:8], jnp.zeros(8, int)
  text = _compiled.lower(*arguments).compile().as_text()
  entry = text[text.index('ENTRY') :]
  written = [line for line in entry.splitlines() if re.search(r'= \(?f32\[8,1152\]', line)]
  assert all(re.search(r' (parameter|tuple)\(', line) for line in written), written


def test_draws_do_not_depend_on_the_vocab_tile():
  """Accelerators sum the weights of smaller tiles, TPUs those of 8 slots at a time if they have a multiple of 8."""
  logits = jnp.asarray(np.random.default_rng(4).normal(size=(64, 1000)), jnp.float32) * 3
  for fields in (dict(), dict(temperature=jnp.full(64, 0.7, jnp.float32)), dict(top_k=jnp.full(64, 30))):
    arguments = logits, slots_of(64, **fields), uniforms()[:64], jnp.zeros(64, int)
    expected = jax.jit(sampling.draw)(*arguments)
    for tile, count in ((1, 128), 64), ((8, 128), 64), ((8, 128), 63):
      first = operator.itemgetter(slice(count))
      drawn = jax.jit(functools.partial(sampling.draw, vocab_tile=tile))(*jax.tree.map(first, arguments))
      np.testing.assert_array_equal(drawn.tokens, first(expected.tokens))
      np.testing.assert_allclose(drawn.logprobs, first(expected.logprobs), atol=2e-6)


SETTINGS = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.8), (1.3, 40, 0.7)]


@pytest.mark.parametrize('temperature,top_k,top_p', SETTINGS)
def test_draws_follow_the_distribution(row, temperature, top_k, top_p):
  tokens, logprobs, behavior = draw(row, temperature, top_k, top_p)
  logp, kept = distribution(row, temperature, top_k, top_p)
  np.testing.assert_allclose(logprobs, logp[tokens], atol=1e-5)
  np.testing.assert_allclose(behavior, kept[tokens], atol=1e-5)
  assert np.isfinite(behavior).all()  # no token outside of the truncated distribution
  expected = DRAWS * np.exp(kept)
  counts = np.bincount(tokens, minlength=V)
  rare = expected < 10  # too few for the statistic: these tokens share one bin
  bins = np.append(expected[~rare], expected[rare].sum())
  observed = np.append(counts[~rare], counts[rare].sum())
  bins, observed = bins[bins > 0], observed[bins > 0]
  chi2, degrees = np.sum((observed - bins) ** 2 / bins), len(bins) - 1
  assert degrees > 4
  assert abs(chi2 - degrees) < 4 * np.sqrt(2 * degrees), (chi2, degrees)


def test_top_p_applies_to_the_tokens_that_top_k_leaves():
  """Top-k 2 of .4 .3 .2 .1 leaves .57 .43; half of that is the first token alone, as in transformers and vLLM."""
  four_tokens = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [1e-30] * (V - 4), np.float32))
  tokens, *_ = draw(four_tokens, top_k=2, top_p=0.5)
  assert set(tokens.tolist()) == {0}
  tokens, *_ = draw(four_tokens, top_p=0.5)
  assert set(tokens.tolist()) == {0, 1}


def test_a_temperature_that_would_overflow_is_greedy(row):
  assert (draw(row, 2e-38)[0] == row.argmax()).all()
  assert np.isfinite(draw(row, 2e-38)[1]).all()


def test_greedy_takes_the_best_token_and_reports_logprobs_at_temperature_1(row):
  tokens, logprobs, behavior = draw(row, temperature=0.0, top_k=3)
  assert (tokens == row.argmax()).all() and (behavior == 0).all()
  logp, _ = distribution(row, 1.0, 0, 1.0)
  np.testing.assert_allclose(logprobs, logp.max(), atol=1e-5)


def test_each_slot_samples_with_its_own_settings(row):
  random = np.random.RandomState(0)
  kinds = random.randint(0, 4, DRAWS)

  def pick(*x):
    return np.asarray(x)[kinds]

  settings = slots_of(
    DRAWS,
    temperature=pick(0.0, 1.0, 0.5, 1.0).astype(np.float32),
    top_k=pick(0, 1, 0, 5),
    top_p=pick(1.0, 1.0, 1.0, 1e-9).astype(np.float32),
  )
  logits = jnp.broadcast_to(jnp.asarray(row), (DRAWS, V))
  tokens, _, _ = _draw(logits, settings, uniforms())
  # Greedy, top-1 and a top-p near 0 all draw the most probable token.
  assert (tokens[kinds != 2] == row.argmax()).all()
  alone = draw(row, 0.5)[0]  # without truncation, sums are rounded differently
  assert np.mean((tokens != alone)[kinds == 2]) <= 3e-3


@pytest.mark.parametrize('uniform', [0.0, 1 - 2**-24])
def test_extreme_uniforms_draw_the_first_and_last_possible_token(uniform):
  row = np.full(V, -np.inf, np.float32)
  row[[3, 590]] = 0.0  # only these two tokens can be drawn
  token = _draw(jnp.asarray(row)[None], slots_of(1), jnp.full(1, uniform, jnp.float32))[0]
  assert token[0] == (3 if uniform == 0 else 590)


def test_uniforms_depend_on_key_step_prompt_sample_seed_and_position():
  def at(key=0, step=0, prompt=0, sample=0, seed=0, position=0):
    keys = sampling.slot_keys(jax.random.key(key), step, jnp.array([prompt]), jnp.array([sample]), jnp.array([seed]))
    return float(sampling.uniforms(keys, jnp.array([position]))[0])

  values = [at()] + [at(**{name: 1}) for name in ('key', 'step', 'prompt', 'sample', 'seed', 'position')]
  assert len(set(values)) == 7 and at() == values[0]


# The engine, mostly in exact float32.

NEW, GROUP = 24, 4


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config(initializer_range=0.15))


def prompts(count=8):
  random = np.random.RandomState(1)
  return [Prompt(10 + i, random.randint(0, 131, 2 + 3 * i % 17, np.int32), '', {}) for i in range(count)]


def sample(model, params, slots=16, block=16, step=2, count=8, compute=tiny.EXACT, **fields):
  settings = native.SamplerConfig(
    **{**dict(slots=slots, max_prompt=20, max_new_tokens=NEW, stop_ids=(5, 6), block=block), **fields}
  )
  engine = native.NativeEngine(model, settings, tiny.one_device('rollout'), compute, Ledger())
  engine.load(params, version=3)
  return engine(prompts(count), group_size=GROUP, step=step, run_key=np.array([1, 2], np.uint32))


@pytest.fixture(scope='module')
def rollout(model, params):
  return sample(model, params, temperature=0.8)


def as_batch(rollout):
  """Returns (Batch with one sequence per row and weight on its completion, positions of the completions)."""
  n, room = rollout.completions.shape
  shape = n, 20 + room
  tokens, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
  segments, at = np.zeros(shape, np.int32), []
  for i in range(n):
    prompt = rollout.prompts[i // GROUP].tokens
    row = np.append(prompt, rollout.completions[i, : rollout.lengths[i]])
    tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    weights[i, len(prompt) : len(row)] = 1
    at.append(np.arange(len(prompt), len(row)))
  positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  return Batch(tokens, positions, segments, weights), at


def scored(model, params, rollout, micro, compute):
  """Returns (log-probs of the sampler, log-probs of the scorer) of all sampled tokens."""
  batch, at = as_batch(rollout)
  layout = tiny.one_device()
  batch = jax.tree.map(lambda x: layout.put(x.reshape(micro, -1, x.shape[-1])), batch)
  score = score_lib.make_score(
    model, layout, dataclasses.replace(compute, head_elements=50_000), Ledger(), temperature=0.8
  )
  logprobs = np.asarray(score(params, batch).logprobs)
  logprobs = logprobs.reshape(-1, logprobs.shape[-1])
  assert [len(x) for x in at] == rollout.lengths.tolist()
  return (
    np.concatenate([x[: len(n)] for x, n in zip(rollout.logprobs, at)]),
    np.concatenate([x[n] for x, n in zip(logprobs, at)]),
  )


@pytest.mark.parametrize('micro', [1, 4])
def test_the_scorer_gives_the_log_probs_of_the_sampler(model, params, rollout, micro):
  ours, theirs = scored(model, params, rollout, micro, tiny.EXACT)
  np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_scorer_is_near_logprobs_of_the_sampler_in_bfloat16(model, params):
  compute = compute_for('cpu', 'bfloat16', 'none')
  drawn = sample(model, params, temperature=0.8, compute=compute)
  ours, theirs = scored(model, params, drawn, 1, compute)
  assert np.exp(np.abs(ours - theirs)).mean() <= 1.02
  assert np.abs(ours - theirs).max() > 0


@pytest.mark.parametrize('kernel, pages', [('triton', {}), ('mosaic', dict(page_size=128, cache_tokens=4096))])
def test_scorer_is_near_logprobs_of_decode_kernels(model, params, monkeypatch, kernel, pages):
  """Pallas' interpreter runs the kernel, with slots that are refilled and blocks that decode only some of the slots."""
  module, calls = decode_kernels.module(kernel), []
  attend = module.attend

  def interpreted(q, cache, *args, **options):
    calls.append((len(q), *cache[0].shape[:3:2]))
    return attend(q, cache, *args, interpret=True, **options)

  monkeypatch.setattr(module, 'attend', interpreted)
  rotate = functools.partial(decode_triton.rotate_and_write, interpret=True)
  monkeypatch.setattr(decode_triton, 'rotate_and_write', rotate)
  compute = dataclasses.replace(compute_for('cpu', 'bfloat16', 'none'), decode_kernel=kernel)
  drawn = sample(model, params, block=4, count=5, temperature=0.8, compute=compute, **pages)
  ours, theirs = scored(model, params, drawn, 1, compute)
  assert np.exp(np.abs(ours - theirs)).mean() <= 1.02
  # The kernel is traced once per layer and number of rows, always with the whole cache.
  assert {16} < {rows for rows, *_ in calls} <= {16, 8, 4, 2}
  room = 128 if pages else 20 + NEW + 4
  assert {tuple(held) for _, *held in calls} == {(33 if pages else 16, room)}


def test_rollout_ends_at_stop_ids_and_is_zero_beyond(rollout):
  stops = np.isin(rollout.completions, (5, 6))
  beyond = np.arange(NEW) >= rollout.lengths[:, None]
  for i, length in enumerate(rollout.lengths):
    assert rollout.finished[i] == stops[i, length - 1]
    assert not stops[i, : length - 1].any()
    assert rollout.finished[i] or length == NEW
  assert 0 < rollout.finished.sum() < len(rollout.lengths)
  for x in (rollout.completions, rollout.logprobs):
    assert (x[beyond] == 0).all()
  # Without truncation, tokens are drawn from the distribution of the model itself.
  np.testing.assert_allclose(rollout.behavior_logprobs, rollout.logprobs, atol=1e-6)
  assert (rollout.step, rollout.version) == (2, 3)


def flips(a, b) -> int:
  """Returns the number of sequences that differ; after a first differing token, all later ones may differ."""
  return int(np.any(a.completions != b.completions, axis=1).sum())


@pytest.mark.parametrize('slots,block', [(2, 4), (5, 1)])
def test_samples_do_not_depend_on_slots_and_blocks(model, params, rollout, slots, block):
  other = sample(model, params, slots, block, temperature=0.8)
  assert flips(other, rollout) <= 3 * rollout.lengths.sum() / 1000
  same = np.all(other.completions == rollout.completions, axis=1)
  np.testing.assert_array_equal(other.lengths[same], rollout.lengths[same])
  np.testing.assert_allclose(other.logprobs[same], rollout.logprobs[same], atol=1e-5)


def test_another_step_draws_other_tokens(model, params, rollout):
  again = sample(model, params, step=3, temperature=0.8)
  assert flips(again, rollout) > 20
  assert len(np.unique(rollout.completions[:GROUP], axis=0)) == GROUP


def test_greedy_decoding_matches_argmax_of_the_forward_pass(model, params):
  greedy = sample(model, params, temperature=0.0, count=3)
  batch, at = as_batch(greedy)
  best = tiny.logits(model, params, batch.tokens).argmax(-1)
  for i, completion_positions in enumerate(at):
    np.testing.assert_array_equal(best[i, completion_positions - 1], greedy.completions[i, : len(completion_positions)])


def test_excluded_tokens_are_not_drawn(row):
  """Excluded are forbidden ids, stop ids before min_tokens, and tokens below min_p of the best remaining token."""
  order = np.argsort(-row)

  def tile(ids):
    return jnp.tile(jnp.asarray(ids, jnp.int32), (DRAWS, 1))

  tokens, logprobs, behavior = draw(
    row,
    min_p=jnp.full(DRAWS, 0.2),
    forbidden_ids=tile(order[[0, -1]]),
    stop_ids=tile([order[1], -1]),
    min_tokens=jnp.full(DRAWS, 1),
  )
  logp, _ = distribution(row, 1.0, 0, 1.0)
  inside = logp >= logp[order[2]] + np.log(0.2)
  inside[order[:2]] = inside[order[-1]] = False
  assert set(tokens) == set(np.flatnonzero(inside))
  kept = logp - np.log(np.exp(logp[inside]).sum())
  np.testing.assert_allclose(behavior, kept[tokens], atol=1e-5)
  np.testing.assert_allclose(logprobs, logp[tokens], atol=1e-5)
  best, *_ = draw(row, 0.0, forbidden_ids=tile(order[:1]))
  assert (best == order[1]).all()


@pytest.mark.parametrize('fields', [dict(min_p=0.1), dict(top_k=2), dict(top_p=0.5), dict()])
def test_excluded_token_of_dominant_logit_keeps_the_others_finite(fields):
  """The weights of the other tokens must not underflow beside that of the excluded token."""
  row = np.linspace(2, -2, V, dtype=np.float32)
  row[0] = 120
  if 'min_p' in fields:
    fields = {'min_p': jnp.full(DRAWS, fields['min_p'])}
  tokens, logprobs, behavior = draw(row, forbidden_ids=jnp.zeros((DRAWS, 1), jnp.int32), **fields)
  assert 0 not in tokens and np.isfinite(behavior).all()
  logp_of_others = row[1:] - np.log(np.exp(row[1:]).sum())
  if not fields:
    np.testing.assert_allclose(behavior, logp_of_others[tokens - 1], atol=1e-5)
  np.testing.assert_allclose(logprobs, row[tokens] - 120, atol=1e-4)


def test_slot_without_a_permitted_token_is_broken():
  row = jnp.zeros((1, 2))
  drawn = sampling.draw(
    row, slots_of(1).replace(forbidden_ids=jnp.array([[0, 1]])), jnp.full(1, 0.5), jnp.zeros(1, int)
  )
  assert drawn.broken[0]


def test_the_most_probable_tokens_are_reported(row):
  drawn = sampling.draw(
    jnp.asarray(row)[None], slots_of(1, top_logprobs=jnp.full(1, 3)), jnp.full(1, 0.5), jnp.zeros(1, int), top=3
  )
  order, (logp, _) = np.argsort(-row), distribution(row, 1.0, 0, 1.0)
  np.testing.assert_array_equal(drawn.top[0][0], order[:3])
  np.testing.assert_allclose(drawn.top[1][0], logp[order[:3]], atol=1e-5)
