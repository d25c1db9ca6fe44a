"""Attention by its definition, the reference against which tests compare the implementations."""

import jax.numpy as jnp

from jaxpost.matmul import einsum
from jaxpost.models.attention_xla import scale_queries, softcap, softmax
from jaxpost.types import MASKED_LOGIT


def reference(q, k, v, rows, window, cfg, compute, sinks=None):
  """Computes attention from all scores [B, H, T, T]; rows: (segment_ids, positions, branch_ids); window: 0 for none."""
  segment_ids, positions, branch_ids = rows
  groups = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
  scores = softcap(einsum('btnh,bsnh->bnts', scale_queries(q, cfg), k, compute.dtype), cfg)
  index = jnp.arange(q.shape[1])
  mask = segment_ids[:, :, None] == segment_ids[:, None]
  mask &= index[:, None] >= index
  distance = positions[:, :, None] - positions[:, None]
  mask &= (distance < window) | (window == 0)
  if branch_ids is not None:
    in_shared_prompt = branch_ids[:, None] == 0
    mask &= in_shared_prompt | (branch_ids[:, :, None] == branch_ids[:, None])
  weights = softmax(jnp.where(mask[:, None], scores, MASKED_LOGIT), sinks if sinks is None else sinks[:, None, None])
  return einsum('bnts,bsnh->btnh', weights, v, compute.dtype)
