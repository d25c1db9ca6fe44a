"""Mixtures of experts: each token passes a few MLPs that a router chooses.

Legend: B rows, T tokens, N tokens in all, D hidden size, F size of an expert,
E experts, k of them for a token, L layers.

Nothing is dropped and nothing is padded to a capacity: tokens are sorted by
expert, and `matmul.grouped` multiplies each run of them by its matrix.
"""

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, grouped
from jaxpost.models import layers
from jaxpost.models.config import ModelConfig
from jaxpost.models.table import Param


def rows(cfg: ModelConfig) -> dict[str, Param]:
  """The rows of the parameter table in place of those of a dense MLP."""
  n, d, e, f = (
      cfg.num_layers, cfg.hidden_size, cfg.experts.num, cfg.experts.size)
  block = 'model.layers.{}.mlp.'

  def matrix(name, shape, axes):
    return Param((n, e, *shape), ('layers', 'expert', *axes),
                 f'{block}experts.{{}}.{name}_proj.weight', matrix=True)

  return {
      'layers/router': Param(
          (n, d, e), ('layers', 'embed', None), f'{block}gate.weight',
          matrix=True, exact=True),
      'layers/gate': matrix('gate', (d, f), ('embed', 'mlp')),
      'layers/up': matrix('up', (d, f), ('embed', 'mlp')),
      'layers/down': matrix('down', (f, d), ('mlp', 'embed')),
  }


def mlp(p, x, cfg: ModelConfig, compute: Compute):
  """[B, T, D] -> [B, T, D], the weighted sum of what k experts say."""
  weights, chosen, _ = route(p, x, cfg)
  flat = lambda y: y.reshape(-1, y.shape[-1])
  out = _experts(p, flat(x), flat(weights), flat(chosen), cfg, compute)
  return out.reshape(x.shape)


def route(p, x, cfg: ModelConfig):
  """(weights [B, T, k], experts [B, T, k] int32, logits [B, T, E]).

  In float32 from unrounded weights: a token at the edge between two experts
  should go the same way in training and in sampling.
  """
  logits = jnp.einsum('btd,de->bte', x.astype(jnp.float32), p['router'],
                      precision=jax.lax.Precision.HIGHEST)
  chosen = jax.lax.top_k(logits, cfg.experts.top_k)[1]
  weights = jnp.take_along_axis(
      jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
  if cfg.experts.normalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, chosen, logits


def _experts(p, x, weights, chosen, cfg, compute):
  """x [N, D], weights and chosen [N, k] -> [N, D] float32."""
  k, e = cfg.experts.top_k, cfg.experts.num
  by_token = chosen.reshape(-1)
  order = jnp.argsort(by_token)  # of [N k], those of an expert together
  back = jnp.zeros_like(order).at[order].set(
      jnp.arange(len(order)), unique_indices=True)
  sizes = jnp.sum(by_token[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32)
  dot = lambda x, w: grouped(
      x, w, sizes, compute.dtype, compute.group_block)
  y = _permute(jnp.repeat(x, k, axis=0), order, back)
  y = layers.ACTIVATIONS[cfg.activation](dot(y, p['gate'])) * dot(y, p['up'])
  y = dot(y.astype(compute.residual), p['down'])
  y = _permute(y, back, order).reshape(*weights.shape, -1)
  return jnp.sum(y * weights[..., None], axis=1)


@jax.custom_vjp
def _permute(x, order, back):
  """x[order]; `back` undoes it, so that the gradient is no scatter."""
  return x[order]


_permute.defvjp(lambda x, order, back: (x[order], back),
                lambda back, g: (g[back], None, None))
