"""Drawing one token per slot. Legend: S slots, V vocabulary, M stop ids, F forbidden ids.

A token is drawn with one uniform number per slot, which depends only on (run key, step, prompt, sample, position). The
cumulative distribution is inverted in two levels, so that one pass over the logits gives the token and its log-prob.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxpost.types import MASKED_LOGIT, Array

TILES = {'cpu': (1, 256), 'gpu': (1, 128), 'tpu': (8, 128)}  # `vocab_tile` of `draw` for each platform
_GREEDY = 1e-4  # a lower temperature counts as 0, because logits / T could overflow


@struct.dataclass
class Sampling:
  """Sampling parameters of each slot. They are arrays, so that new values do not need a new program."""

  temperature: Array  # [S] float32, 0 is greedy
  top_k: Array  # [S] int32, 0 is off
  top_p: Array  # [S] float32, 1 is off
  min_p: Array  # [S] float32, relative to the most probable token; 0 is off
  stop_ids: Array  # [S, M] int32, padded with -1
  forbidden_ids: Array  # [S, F] int32, never drawn; padded with -1
  min_tokens: Array  # [S] int32, number of tokens before which stop ids are not drawn
  max_tokens: Array  # [S] int32
  seed: Array  # [S] int32, folded into the key of the draws; with 0 the key does not change
  top_logprobs: Array  # [S] int32, how many of the most probable tokens are reported


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns [S] uniforms in [0, 1) from slot keys [S, 2] uint32 and positions [S]."""

  def slot_uniform(key, position):
    key = jax.random.wrap_key_data(key, impl='threefry2x32')
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(slot_uniform)(keys, positions)


def slot_keys(
  run_key: jax.Array, step: jax.Array, prompts: jax.Array, samples: jax.Array, seeds: jax.Array
) -> jax.Array:
  """Returns the key of each slot, [S, 2] uint32, from prompt and sample indices [S] and seeds [S]."""

  def slot_key(prompt, sample, seed):
    key = jax.random.fold_in(run_key, step)
    key = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
    key = jax.random.key_data(key)
    seeded = jax.random.fold_in(jax.random.wrap_key_data(key, impl='threefry2x32'), seed)
    return jnp.where(seed == 0, key, jax.random.key_data(seeded))

  return jax.vmap(slot_key)(prompts, samples, seeds)


@struct.dataclass
class Drawn:
  """The token that was drawn for each slot."""

  tokens: Array  # [S] int32
  logprobs: Array  # [S], under log_softmax(logits / T); T = 1 where greedy
  behavior_logprobs: Array  # [S], under the distribution drawn from
  broken: Array  # [S] bool: logits were not finite, or all tokens are excluded
  top: tuple  # ids and log-probs [S, n] of the top-n tokens, or ()
  allowed: tuple = ()  # ([S, k] int32,), 1 + the ids that could be drawn, or ()


def draw(
  logits: jax.Array,
  sampling: Sampling,
  uniform: jax.Array,
  counts: jax.Array,
  *,
  top: int = 0,
  allowed: int = 0,
  unroll: bool = False,
  vocab_tile: tuple[int, int] = (1, 256),
) -> Drawn:
  """Samples from softmax(logits / T), without the tokens that `sampling` excludes.

  Excluded are forbidden ids, stop ids before `min_tokens`, and then the tokens that top-k, top-p and min-p cut off.

  Args:
    logits: [S, V] float32; uniform: [S]; counts: [S], number of tokens drawn before.
    top: how many of the most probable tokens to report, by log_softmax(logits / T); zeros if
      `sampling.top_logprobs` of all slots are 0.
    allowed: the largest `top_k` of slots that report the tokens which could be drawn; 0: they are not reported.
    unroll: unroll the search for a truncation. A CUDA graph can contain a branch, but no loop in it: with a loop, the
      host would wait for the branch's predicate at each token.
    vocab_tile: numbers of slots and of tokens that are next to each other in memory, of which the weights of the tokens
      are summed at a time: (8, 128) on TPUs, where any other view of the logits is a copy.
  """
  greedy = sampling.temperature < _GREEDY
  # Logits are scaled where they are used: an array of scaled logits would be written and read again for each token.
  scale = 1.0 / jnp.where(greedy, 1.0, sampling.temperature)
  highest = (jnp.max(logits, axis=-1) * scale)[:, None]
  early = counts < sampling.min_tokens
  forbidden = jnp.concatenate([sampling.forbidden_ids, jnp.where(early[:, None], sampling.stop_ids, -1)], axis=1)
  options = dict(forbidden=forbidden, allowed=allowed, unroll=unroll, tile=vocab_tile)
  tokens, kept_total, total, highest_kept, ids = _choose(logits, scale, highest, sampling, uniform, **options)
  token_logits = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] * scale
  most_probable = ()
  if top:
    from jaxpost.programs import reported

    most_probable = reported.most_probable(logits * scale[:, None], highest, total, sampling.top_logprobs, top)
  return Drawn(
    tokens=tokens,
    logprobs=token_logits - highest[:, 0] - jnp.log(total),
    behavior_logprobs=jnp.where(greedy, 0.0, token_logits - highest_kept[:, 0] - jnp.log(kept_total)),
    broken=~jnp.isfinite(total) | ~(kept_total > 0),
    top=most_probable,
    allowed=ids,
  )


@jax.named_scope('choose')  # `jaxpost.planning` finds the branches by this name
def _choose(logits, scale, highest, sampling: Sampling, uniform, *, forbidden, allowed: int, unroll: bool, tile: tuple):
  """Draws a token of each slot from those that are not excluded: the kept ones.

  Returns (tokens, sum of the kept weights, sum of all weights, largest kept logit, `Drawn.allowed`), each [S, ...].
  """
  greedy = sampling.temperature < _GREEDY
  cuts = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)

  def weigh(logits):
    return jnp.exp(logits * scale[:, None] - highest)

  def untruncated():
    tokens, total = _invert(logits, weigh, -jnp.inf, uniform, tile)
    ids = (jnp.zeros((len(logits), allowed), jnp.int32),) if allowed else ()
    return tokens, total, total, highest, ids

  def truncated():
    # Weights are relative to the best token that is not forbidden: forbidden ones may be far more probable.
    rows = jnp.arange(len(logits))[:, None]
    masked = jnp.where(forbidden < 0, logits.shape[-1], forbidden)  # an id of -1 masks nothing: it is dropped
    permitted = (logits * scale[:, None]).at[rows, masked].set(MASKED_LOGIT, mode='drop')
    top = jnp.max(permitted, axis=-1, keepdims=True)
    kept, ids = jnp.where(permitted > MASKED_LOGIT, jnp.exp(permitted - top), 0), []
    kept = jax.lax.cond(
      jnp.any(cuts & ~greedy), functools.partial(_truncate, unroll=unroll), lambda w, _: w, kept, sampling
    )
    if allowed:
      kept, *ids = _at_most(kept, sampling.top_k, allowed)
    best = jnp.argmax(permitted, axis=-1)  # in this branch only: on a CPU it costs more than a draw
    tokens, total = _invert(kept, lambda x: x, 0.0, uniform, tile)
    return jnp.where(greedy, best, tokens), total, jnp.sum(weigh(logits), axis=-1), top, tuple(ids)

  # The draws are inside of the branches, because a branch that returned the weights would copy them.
  return jax.lax.cond(jnp.any(cuts | greedy) | jnp.any(forbidden >= 0), truncated, untruncated)


def _truncate(weights, sampling: Sampling, unroll: bool):
  """Sets the weights [S, V] that top-k, top-p and min-p exclude to 0.

  Top-p applies to the distribution after top-k, as in transformers and vLLM. Tokens with equal weights are all kept.
  """

  def by_count(kept):
    return _cut(kept, jnp.ones_like(kept), sampling.top_k.astype(jnp.float32), sampling.top_k > 0, unroll)

  def by_mass(kept):
    return _cut(kept, kept, sampling.top_p * jnp.sum(kept, axis=-1), sampling.top_p < 1, unroll)

  kept = jax.lax.cond(jnp.any(sampling.top_k > 0), by_count, lambda kept: kept, weights)
  kept = jax.lax.cond(jnp.any(sampling.top_p < 1), by_mass, lambda kept: kept, kept)
  return jnp.where(weights >= sampling.min_p[:, None], kept, 0)


def _at_most(weights, top_k, limit: int):
  """Returns (the `limit` largest weights, others set to 0 [S, V]; 1 + their ids [S, limit] int32, padded with 0).

  Top-k alone keeps more if weights are equal. In slots where `top_k` [S] is 0, all are kept, and no ids reported.
  """
  values, ids = jax.lax.top_k(weights, limit)
  rows = jnp.arange(len(weights))[:, None]
  limited = (top_k > 0)[:, None]
  kept = jnp.where(limited, jnp.zeros_like(weights).at[rows, ids].set(values), weights)
  return kept, jnp.where(limited & (values > 0), ids + 1, 0).astype(jnp.int32)


def _cut(weights, values, target, applies, unroll):
  """Keeps the smallest set of largest weights whose `values` sum up to `target` [S], in slots where `applies` [S].

  The smallest weight of the set is found by a binary search over the bits of floats: sorting the vocabulary costs
  twenty times as much.
  """

  def halve(_, bounds):
    low, high = bounds  # bits, which are ordered like the floats; the weights above `low` reach the target
    middle = (low + high) // 2
    threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
    enough = jnp.sum(jnp.where(weights > threshold, values, 0.0), axis=-1) >= target
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  bits_of_one = 0x3F800000  # 1.0 is the largest weight
  bounds = jnp.zeros(target.shape, jnp.int32), jnp.full(target.shape, bits_of_one)
  low, _ = jax.lax.fori_loop(0, 30, halve, bounds, unroll=unroll)
  threshold = jnp.where(applies, jax.lax.bitcast_convert_type(low, jnp.float32), -1.0)[:, None]
  return jnp.where(weights > threshold, weights, 0)


def _invert(values, weigh, padding: float, uniform, tile: tuple[int, int]):
  """Returns the index whose cumulative weight passes uniform * total, [S], and the total, [S].

  The weights are weigh(values [S, V]), which is computed again for the tile that is drawn from; weigh(padding) is 0.
  """
  slots, size = len(values), tile[1]
  values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % size)), constant_values=padding)
  rows = tile[0] if slots % tile[0] == 0 else 1

  def in_tiles(x):  # [S / rows, V / size, rows, size]
    return x.reshape(slots // rows, rows, -1, size).swapaxes(1, 2)

  sums = jnp.sum(in_tiles(weigh(values)), axis=-1).swapaxes(1, 2).reshape(slots, -1)
  ends = jnp.cumsum(sums, axis=-1)
  total = ends[:, -1]
  target = uniform * total
  # First level: the tile in which the cumulative weight passes the target; second level: the token in this tile.
  index = jnp.minimum(jnp.sum(ends <= target[:, None], axis=-1), ends.shape[-1] - 1)
  weights = weigh(jnp.take_along_axis(in_tiles(values), index.reshape(-1, 1, rows, 1), axis=1).reshape(slots, size))
  start = jnp.where(index > 0, jnp.take_along_axis(ends, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0], 0)
  cumulative = start[:, None] + jnp.cumsum(weights, axis=-1)
  offset = jnp.sum(cumulative <= target[:, None], axis=-1)
  # Rounding may lead past the last weight of the tile, or to one that is 0.
  last = size - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
  return index * size + jnp.minimum(offset, last), total
