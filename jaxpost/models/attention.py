"""Attention over packed rows; `decoding.py` attends over a cache.

Legend: B rows, T queries, S keys, K kv heads, G queries per kv head, h head size, hv that of values.
"""

from jax.ad_checkpoint import checkpoint_name

from jaxpost.distributed.mesh import row_shards
from jaxpost.matmul import Compute
from jaxpost.models.attention_xla import chunked
from jaxpost.models.config import ModelConfig


def attention(
  q, k, v, segment_ids, compute: Compute, branch_ids, positions, window, cfg: ModelConfig, sinks=None, layout=None
):
  """Computes causal attention inside each document of a packed row.

  Branches of a document (`types.Batch`) attend to its shared part and to themselves. `compute.attention` selects the
  implementation, where it supports the arguments; `attention_kernels.py` has the kernels of accelerators and their
  limits.

  Args:
    q: [B, T, H, h]; k: [B, T, K, h]; v: [B, T, K, hv]; segment_ids,
      positions: [B, T]; branch_ids: [B, T] or None. q and k may be `sparse_attention.Queries` and `Keys`.
    window: sliding window: a token attends to tokens of its document less than
      this far back; 0: all. An array in a scan over layers that differ.
    cfg: for the scale and the soft cap of the scores.
    sinks: [H], the score of an extra key without value for each head, or None.
    layout: a `Layout`, or any function on a single device. Where it splits
      rows, q, k and v are striped, see `context_parallel.py`.

  Returns:
    [B, T, H, hv].

  Raises:
    InputError: the requested implementation does not support the arguments.
  """
  if cfg.chunked and window:  # as if each chunk were a document
    segment_ids = segment_ids * (1 + q.shape[1] // window) + positions // window
  rest = segment_ids, compute, branch_ids, positions, window, cfg, sinks
  parts = row_shards(layout)
  if isinstance(q, tuple):
    from jaxpost.models import sparse_attention

    return sparse_attention.attend(q, k, v, *rest, parts)
  if uses_kernel(compute):
    from jaxpost.models import attention_kernels

    if attention_kernels.kernel_fits(q, v, branch_ids, compute, cfg, parts=parts):
      return attention_kernels.attend(q, k, v, *rest, layout, parts)
  if parts > 1:
    from jaxpost.models import context_parallel

    return context_parallel.attend(q, k, v, *rest, layout, parts)
  return checkpoint_name(chunked(q, k, v, *rest).astype(compute.residual), 'dots')


# Values of `config.model.attention` that cannot attend from a part of a row.
WHOLE_ROW_KERNELS = ('triton',)


def uses_kernel(compute: Compute) -> bool:
  """True if `compute.attention` is a kernel of an accelerator, which `hardware.kernel_check` verifies."""
  return compute.attention != 'chunked'
