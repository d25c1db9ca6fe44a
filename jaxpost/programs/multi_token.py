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


def hidden(
  params: dict,
  states: jax.Array,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  layout: Any,
) -> jax.Array:
  """Returns hidden states [B, T, D], of which the head makes the logits of the token after the next one.

  At the last token of a document they are of no use; no other position of the document reads them.

  Args:
    states: [B, T, D], of `transformer.forward` for these rows.
  """
  layer = {name: x for name, x in params[MTP].items() if name not in multi_token.OUTSIDE}
  own = {name: params[MTP][name][0] for name in multi_token.OUTSIDE}
  x = transformer.embed(params, jnp.roll(tokens, -1, axis=1), cfg, compute, layout)
  x = [layers.rms_norm(x, own['embed_norm'], cfg), layers.rms_norm(states, own['hidden_norm'], cfg).astype(x.dtype)]
  x = layers.project('btd,dm->btm', jnp.concatenate(x, axis=-1), own, 'in', compute, layout=layout)
  below = dict(layers=layer, norm=own['norm'])
  rest = dict(compute=compute, constrain=layout, inputs=x)
  return transformer.forward(below, tokens, positions, segment_ids, multi_token.one_layer(cfg), **rest)


def loss(
  model: Model, head: HeadConfig, params: dict, batch: Batch, states: jax.Array, scale: float | jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the cross entropy of trained tokens two positions on, and {metric: []}, both times `scale`.

  A token has the weight that it has in the main loss, and none if its document begins less than two tokens before it.

  Args:
    head: the head of the model.
    states: [B, T, D], hidden states of the model.
  """
  assert model.head, 'a scalar head predicts no tokens'
  rows = batch.tokens, batch.positions, batch.segment_ids
  ahead = hidden(params, states, *rows, cfg=model.config, compute=head.compute, layout=head.layout)
  labels, positions, weights = (jnp.roll(x, -2, axis=1) for x in (batch.tokens, batch.positions, batch.loss_weights))
  # Positions restart with each document: this holds neither across a border nor where the row wraps around.
  weights = jnp.where(positions == batch.positions + 2, weights, 0)
  head = head._replace(loss_fn=_cross_entropy, reads=(), learns=(), divergence=None)
  return head_lib.fused_loss(head, ahead, model.head(params), labels, weights * scale, arrays={})


def _cross_entropy(outputs, arrays):
  del arrays
  return -outputs.logprobs, {'mtp_nll': -outputs.logprobs}
