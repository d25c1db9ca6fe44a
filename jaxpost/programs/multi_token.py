"""The loss of a module that predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437, eq. 24 and 25).

Legend: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.losses import head as head_lib
from jaxpost.models import layers, multi_token, transformer
from jaxpost.models.parameters import MTP

if TYPE_CHECKING:
  from jaxpost.losses.head_chunk import HeadConfig
  from jaxpost.matmul import Compute
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model
  from jaxpost.types import Batch


def hidden(params: dict, batch: Batch, states: jax.Array, cfg: ModelConfig, compute: Compute, layout: Any) -> jax.Array:
  """Returns hidden states [B, T, D], from which the head computes the logits of the token after the next one.

  Those of the last token of a document have no meaning, as its next token belongs to another document; no other
  position attends to them.

  Args:
    states: [B, T, D], of `transformer.forward` for the rows of the batch.
  """
  layer = {name: x for name, x in params[MTP].items() if name not in multi_token.OUTSIDE}
  outside = {name: params[MTP][name][0] for name in multi_token.OUTSIDE}
  x = transformer.embed(params, jnp.roll(batch.tokens, -1, axis=1), cfg, compute, layout)
  embeddings = layers.rms_norm(x, outside['embed_norm'], cfg)
  states = layers.rms_norm(states, outside['hidden_norm'], cfg).astype(x.dtype)
  both = jnp.concatenate([embeddings, states], axis=-1)
  x = layers.project('btd,dm->btm', both, outside, 'in', compute, layout=layout)
  decoder = dict(layers=layer, norm=outside['norm'])
  options = dict(compute=compute, constrain=layout, inputs=x)
  rows = batch.tokens, batch.positions, batch.segment_ids
  return transformer.forward(decoder, *rows, multi_token.one_layer(cfg), **options)


def loss(
  model: Model, head: HeadConfig, params: dict, batch: Batch, states: jax.Array, scale: float | jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns (cross entropy, {metric: []}) of tokens predicted from two positions before, both times `scale`.

  A token has the same weight as in the main loss, or 0 if it is one of the first two of its document.

  Args:
    head: the head of the model.
    states: [B, T, D], hidden states of the model.
  """
  assert model.head, 'a scalar head predicts no tokens'
  mtp_states = hidden(params, batch, states, model.config, head.compute, layout=head.layout)
  labels, positions, weights = (jnp.roll(x, -2, axis=1) for x in (batch.tokens, batch.positions, batch.loss_weights))
  # Positions restart in each document, so they are not consecutive across documents or where the row wraps around.
  weights = jnp.where(positions == batch.positions + 2, weights, 0)
  head = head._replace(loss_fn=_cross_entropy, reads=(), learns=(), divergence=None)
  return head_lib.fused_loss(head, mtp_states, model.head(params), labels, weights * scale, arrays={})


def _cross_entropy(outputs, _arrays):
  return -outputs.logprobs, {'mtp_nll': -outputs.logprobs}
