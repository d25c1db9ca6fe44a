"""Norm, projections and MLP.

Legend: B rows, T tokens, D hidden size, F MLP size, N heads, h head size.
"""

import functools

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum
from jaxpost.models.config import ModelConfig


ACTIVATIONS = {
    'silu': jax.nn.silu,
    'gelu': functools.partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def rms_norm(x, scale, cfg: ModelConfig):
  """x / rms(x) * scale in float32 (Zhang and Sennrich, 2019)."""
  dtype = x.dtype
  x = x.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + cfg.norm_eps)
  if cfg.norm_offset:
    scale = scale + cfg.norm_offset
  return (x * scale).astype(dtype)


def norm_heads(x, scale, cfg: ModelConfig):
  """[B, T, N, h] -> the same: each head by itself, or all of them at once."""
  if cfg.qk_norm == 'wide':
    wide = x.reshape(*x.shape[:2], -1)
    return rms_norm(wide, scale, cfg).reshape(x.shape)
  return rms_norm(x, scale, cfg)


def project(spec: str, x, p, name: str, compute: Compute):
  """`einsum(spec, x, p[name])`, plus its bias where the layer has one."""
  y = einsum(spec, x, p[name], compute.dtype)
  bias = p.get(f'{name}_bias')
  return y if bias is None else y + bias.reshape(y.shape[2:])


def mlp(p, x, cfg: ModelConfig, compute: Compute):
  """SwiGLU and its like (Shazeer, 2020): [B, T, D] -> [B, T, D]."""
  gate = project('btd,df->btf', x, p, 'gate', compute)
  up = project('btd,df->btf', x, p, 'up', compute)
  hidden = ACTIVATIONS[cfg.activation](gate) * up
  return project(
      'btf,fd->btd', hidden.astype(compute.residual), p, 'down', compute)
