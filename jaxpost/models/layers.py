"""Norm, projections and MLP.

Legend: B rows, T tokens, D hidden size, F MLP size, N heads, h head size.
"""

import functools

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum, products
from jaxpost.models.config import ModelConfig


_ACTIVATIONS = {
    'silu': jax.nn.silu,
    'gelu': functools.partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(table, tokens, dtype: str, constrain):
  """Rows of the table [V, D], rounded as the sampler's copy of it is.

  Whole rows: from rows split over fsdp XLA would replicate the activations of
  the global batch. Rounded before they are gathered, in half the bytes; the
  gradient is summed in the type of the table all the same.
  """
  return constrain(table.astype(dtype), 'vocab', None)[tokens]


def _embed_forward(table, tokens, dtype, constrain):
  return embed(table, tokens, dtype, constrain), (table, tokens)


def _embed_backward(dtype, constrain, residuals, g):
  del dtype
  table, tokens = residuals
  d_table = jnp.zeros(table.shape, table.dtype).at[tokens].add(
      g.astype(table.dtype))
  return constrain(d_table, 'vocab', None), None


embed.defvjp(_embed_forward, _embed_backward)


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
  """`einsum(spec, x, p[name])`, plus its bias where the layer has one.

  In the type of the residual stream, where it goes.
  """
  y = einsum(spec, x, p[name], compute.dtype, compute.residual)
  return _biased(y, p, name)


def project_all(spec: str, x, p, names, compute: Compute) -> list:
  """The projections of one x, with their biases, in float32."""
  ys = products(spec, x, tuple(p[name] for name in names), compute)
  return [_biased(y, p, name) for y, name in zip(ys, names)]


def _biased(y, p, name: str):
  bias = p.get(f'{name}_bias')
  return y if bias is None else y + bias.reshape(y.shape[2:])


def mlp(p, x, cfg: ModelConfig, compute: Compute):
  """SwiGLU and its like (Shazeer, 2020): [B, T, D] -> [B, T, D]."""
  gate, up = project_all('btd,df->btf', x, p, ('gate', 'up'), compute)
  hidden = _ACTIVATIONS[cfg.activation](gate) * up
  return project(
      'btf,fd->btd', hidden.astype(compute.residual), p, 'down', compute)
