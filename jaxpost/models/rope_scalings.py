"""Scaled frequencies of rotary position embeddings, by the `rope_type` of a config.json.

Legend: B rows, T tokens, d rotated entries of a head.

`periods(theta, d)` are those of `rope.py`, [d / 2], in tokens per radian.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def frequencies(
  theta: float, dim: int, p: dict[str, Any], lengths: jax.Array | None, periods: Callable
) -> tuple[Any, float]:
  """Returns (frequencies [d / 2] or [B, T, d / 2], the factor of cos and sin).

  Args:
    p: `Rope.scaling` as a dict.
    lengths: length of each token's document, [B, T] or [B, 1], for the types of `rope.BY_LENGTH`.
  """
  kind = p['rope_type']
  if kind in _SCALINGS:
    return _SCALINGS[kind](theta, dim, p, periods)
  assert kind in ('dynamic', 'longrope') and lengths is not None, kind
  if kind == 'longrope':
    long, scale = _longrope(theta, dim, p, 'long_factor', periods)
    short, _ = _longrope(theta, dim, p, 'short_factor', periods)
    return jnp.where(lengths[..., None] > p['original_max_position_embeddings'], long, short), scale
  return _dynamic(theta, dim, p, lengths[..., None], periods), 1.0


def query_factors(positions: jax.Array, p: dict[str, Any]) -> tuple[jax.Array, ...]:
  """Returns the factors of queries as a tuple of one array [B, T, 1, 1]; () for types without them.

  A factor is 1 + beta log(1 + floor((position + offset) / length)), as in Llama 4, whose layers without rotary
  embeddings (rope_type 'none') count positions from 1 (`query_offset`).

  Args:
    positions: [B, T].
    p: `Rope.scaling` as a dict.
  """
  beta = p.get('llama_4_scaling_beta')
  if not beta:
    return ()
  ratio = (positions + p.get('query_offset', 0)).astype(jnp.float32) / p['original_max_position_embeddings']
  return (1 + beta * jnp.log1p(jnp.floor(ratio))[..., None, None],)


def _linear(theta, dim, p, periods):
  """Position interpolation (Chen et al., arXiv:2306.15595)."""
  return np.float32(1) / periods(theta, dim) / np.float32(p['factor']), 1.0


def _proportional(theta, dim, p, periods):
  """Gemma 4: only a part of the pairs of entries rotates, with the frequencies that they would have if all did."""
  freq = np.float32(1) / periods(theta, dim) / np.float32(p.get('factor', 1))
  freq[int(p.get('partial_rotary_factor', 1) * dim // 2) :] = 0
  return freq, 1.0


def _ntk_alpha(theta, dim, p, periods):
  """NTK-aware scaling with a fixed factor of the base (Hunyuan)."""
  return np.float32(1) / periods(theta * p['alpha'] ** (dim / (dim - 2)), dim), 1.0


def _llama3(theta, dim, p, periods):
  """Llama 3.1: long wavelengths are interpolated, short ones unchanged."""
  freq = np.float32(1) / periods(theta, dim)
  low, high = p['low_freq_factor'], p['high_freq_factor']
  factor, original = p['factor'], p['original_max_position_embeddings']
  wavelength = 2 * math.pi / freq
  smooth = (original / wavelength - low) / (high - low or 1)  # with equal factors, nothing is in between
  blend = (1 - smooth) * freq / factor + smooth * freq
  scaled = np.where(wavelength > original / low, freq / factor, blend)
  return np.where(wavelength < original / high, freq, scaled).astype(np.float32), 1.0


def _yarn(theta, dim, p, periods):
  """YaRN (Peng et al., arXiv:2309.00071, section 3.4)."""
  original, factor = p['original_max_position_embeddings'], p['factor']

  def dimension(rotations):  # that with this number of rotations in `original` tokens
    return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

  low, high = dimension(p.get('beta_fast') or 32), dimension(p.get('beta_slow') or 1)
  if p.get('truncate', True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low or 0.001), 0, 1)
  period = periods(theta, dim)
  freq = np.float32(1) / (factor * period) * ramp + (np.float32(1) / period * (1 - ramp))
  scale = p.get('attention_factor')
  if scale is None:

    def attention_factor(m):
      return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    scale = attention_factor(1)
    if p.get('mscale') and p.get('mscale_all_dim'):
      scale = attention_factor(p['mscale']) / attention_factor(p['mscale_all_dim'])
  return freq.astype(np.float32), scale


def _longrope(theta, dim, p, field, periods):
  """LongRoPE (Ding et al., arXiv:2402.13753): factors found by search."""
  original, factor = p['original_max_position_embeddings'], p['factor']
  scale = p.get('attention_factor')
  if scale is None:
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
  factors = np.asarray(p[field], np.float32)
  return np.float32(1) / (factors * periods(theta, dim)), scale


def _dynamic(theta, dim, p, lengths, periods):
  """Dynamic NTK: the base grows with the length of the document beyond the limit."""
  limit = p['original_max_position_embeddings']
  ratio = jnp.maximum(lengths, limit).astype(jnp.float32) / limit
  growth = (p['factor'] * ratio - (p['factor'] - 1)) ** (1 / (dim / 2 - 1))
  # Frequency i of the base theta growth^(d / 2) is theta^(-2 i / d) growth^(-i).
  return np.float32(1) / periods(theta, dim) * growth ** (-np.arange(dim // 2, dtype=np.float32))


_SCALINGS = {
  'linear': _linear,
  'proportional': _proportional,
  'ntk_alpha': _ntk_alpha,
  'llama3': _llama3,
  'yarn': _yarn,
}
