"""Norm, rotary embedding and MLP.

Legend: B rows, T tokens, D hidden size, F MLP size, N heads, h head size.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.matmul import Compute, einsum
from jaxpost.models.config import ModelConfig


def rms_norm(x, scale, eps: float):
  """x / rms(x) * scale in float32 (Zhang and Sennrich, 2019)."""
  dtype = x.dtype
  x = x.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
  return (x * scale).astype(dtype)


def rope_frequencies(cfg: ModelConfig):
  """[h / 2] angular frequencies, with Llama 3.1's scaling where asked.

  On the host: `pow` of an accelerator is coarser, and positions multiply the
  error. Rounded where `transformers` rounds.
  """
  half = cfg.head_dim // 2
  period = (cfg.rope_theta ** (np.arange(half) / half)).astype(np.float32)
  freq = np.float32(1) / period
  if not cfg.rope_scaling:
    return freq
  _, factor, low, high, original = cfg.rope_scaling
  wavelength = 2 * math.pi / freq
  smooth = (original / wavelength - low) / (high - low)
  blend = (1 - smooth) * freq / factor + smooth * freq
  scaled = np.where(wavelength > original / low, freq / factor, blend)
  return np.where(
      wavelength < original / high, freq, scaled).astype(np.float32)


def rope_table(positions, cfg: ModelConfig):
  """[B, T] positions -> (cos, sin), each [B, T, 1, h] float32."""
  angle = positions[..., None].astype(jnp.float32) * rope_frequencies(cfg)
  angle = jnp.concatenate([angle, angle], axis=-1)[..., None, :]
  return jnp.cos(angle), jnp.sin(angle)


def rope(x, table):
  """Rotates [B, T, N, h], first half against second half (as in HF)."""
  cos, sin = table
  return x.astype(jnp.float32) * cos + rotate_half(x) * sin


def rotate_half(x):
  """[.., a, b] -> [.., -b, a] by a product with a signed permutation.

  Exact, and on CPU 5 x as fast as slicing and concatenating.
  """
  half = x.shape[-1] // 2
  turn = np.zeros((2 * half, 2 * half), np.float32)
  turn[half + np.arange(half), np.arange(half)] = -1
  turn[np.arange(half), half + np.arange(half)] = 1
  return jnp.einsum('btnh,hi->btni', x.astype(jnp.float32), turn,
                    precision=jax.lax.Precision.HIGHEST)


def mlp(p, x, compute: Compute):
  """SwiGLU (Shazeer, 2020): [B, T, D] -> [B, T, D]."""
  gate = einsum('btd,df->btf', x, p['gate'], compute.dtype)
  up = einsum('btd,df->btf', x, p['up'], compute.dtype)
  hidden = (jax.nn.silu(gate) * up).astype(compute.residual)
  return einsum('btf,fd->btd', hidden, p['down'], compute.dtype)
