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
  """[B, T] positions -> (cos, sin), each [B, T, 1, h / 2] float32."""
  angle = positions[..., None].astype(jnp.float32) * rope_frequencies(cfg)
  return jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]


def rope(x, table):
  """Rotates [B, T, N, h], first half against second half (as in HF)."""
  cos, sin = table
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1)


def mlp(p, x, compute: Compute):
  """SwiGLU (Shazeer, 2020): [B, T, D] -> [B, T, D]."""
  gate = einsum('btd,df->btf', x, p['gate'], compute.dtype)
  up = einsum('btd,df->btf', x, p['up'], compute.dtype)
  hidden = (jax.nn.silu(gate) * up).astype(compute.residual)
  return einsum('btf,fd->btd', hidden, p['down'], compute.dtype)
