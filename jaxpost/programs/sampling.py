"""Drawing one token per slot. Legend: S slots, V vocabulary, M stop ids.

One uniform number per slot decides, by inverting the cumulative distribution
in two levels: token and log-prob come out of one pass over the logits. It
depends only on (run key, step, prompt, sample, position).
"""

import jax
import jax.numpy as jnp

from jaxpost.types import Sampling

_HIDE = -1e30


def uniforms(keys, positions):
  """[S, 2] uint32 slot keys, [S] positions -> [S] uniforms in [0, 1)."""
  def one(key, position):
    key = jax.random.wrap_key_data(key, impl='threefry2x32')
    return jax.random.uniform(jax.random.fold_in(key, position))
  return jax.vmap(one)(keys, positions)


def slot_keys(run_key, step, prompts, samples):
  """[S] prompt and sample indices -> [S, 2] uint32 key of each sequence."""
  def one(prompt, sample):
    key = jax.random.fold_in(run_key, step)
    key = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
    return jax.random.key_data(key)
  return jax.vmap(one)(prompts, samples)


def draw(logits, sampling: Sampling, uniform):
  """Samples from softmax(logits / T), truncated by top-k and top-p.

  Args:
    logits: [S, V] float32; uniform: [S].

  Returns:
    (tokens [S] int32, logprobs [S], behaviour_logprobs [S]): the log-prob
    under log_softmax(logits / T), with T = 1 where sampling is greedy, and
    under the truncated distribution that was drawn from.
  """
  greedy = sampling.temperature == 0
  logits = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
  top = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - top)
  total = jnp.sum(weights, axis=-1)
  truncates = (sampling.top_k > 0) | (sampling.top_p < 1)
  kept = jax.lax.cond(
      jnp.any(truncates & ~greedy), _truncate, lambda w, *_: w,
      weights, total, sampling)
  drawn, kept_total = _invert(kept, uniform)
  # An argmax over the vocabulary costs more than the draw on CPU.
  tokens = jax.lax.cond(
      jnp.any(greedy),
      lambda: jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn),
      lambda: drawn)
  picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
  scaled = picked - top[:, 0]
  logprobs = scaled - jnp.log(total)
  behaviour = jnp.where(greedy, 0.0, scaled - jnp.log(kept_total))
  return tokens.astype(jnp.int32), logprobs, behaviour


def _truncate(weights, total, sampling: Sampling):
  """Zeroes what top-k and top-p leave out; [S, V] -> [S, V]."""
  ordered = -jnp.sort(-weights, axis=-1)
  size = weights.shape[-1]
  k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, size), size)
  kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
  # The smallest set of tokens whose mass reaches top_p keeps its last token.
  before = jnp.cumsum(ordered, axis=-1) - ordered
  inside = before < sampling.top_p[:, None] * total[:, None]
  last = jnp.maximum(jnp.sum(inside, axis=-1), 1)
  pth = jnp.take_along_axis(ordered, last[:, None] - 1, axis=-1)
  return jnp.where(weights >= jnp.maximum(kth, pth), weights, 0)


def _invert(weights, uniform, block: int = 256):
  """Index whose cumulative weight passes uniform * total; and the total."""
  slots, size = weights.shape
  weights = jnp.pad(weights, ((0, 0), (0, -size % block)))
  blocks = weights.reshape(slots, -1, block)
  ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
  total = ends[:, -1]
  target = uniform * total
  at = jnp.sum(ends <= target[:, None], axis=-1)
  at = jnp.minimum(at, ends.shape[-1] - 1)
  row = jnp.take_along_axis(blocks, at[:, None, None], axis=1)[:, 0]
  start = jnp.where(at > 0, jnp.take_along_axis(
      ends, jnp.maximum(at - 1, 0)[:, None], axis=-1)[:, 0], 0)
  inner = start[:, None] + jnp.cumsum(row, axis=-1)
  offset = jnp.sum(inner <= target[:, None], axis=-1)
  # Rounding may step past the last weight, or onto one that is 0.
  last = block - 1 - jnp.argmax(row[:, ::-1] > 0, axis=-1)
  return at * block + jnp.minimum(offset, last), total
