"""Flash-attention kernels: splash (TPU) and Triton (GPU).

Legend: B rows, T tokens (t of a part), H heads, K kv heads, h head size, hv that of values, n parts of a row.

`REFUSALS` says what each kernel does not support. `layers.attention` is the only caller.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError
from jaxpost.matmul import WHOLE_ROW_KERNELS, Compute
from jaxpost.models import attention_xla, context_parallel
from jaxpost.models.attention_xla import PackedRows
from jaxpost.models.config import CustomConfig, ModelConfig

SHORT = 256  # for shorter rows, starting a kernel costs more than it saves
_LANES = 128  # of a TPU's registers; blocks and rows are multiples of it
_PAD = -1  # segment id of padding that is added to a row
_APART = 2.0**20  # far above the scores of any model, so that attention weights between branches are 0


def _splash_refuses(head_dim, value_dim, dtype) -> str:
  if dtype != 'bfloat16':
    return f'config.model.dtype={dtype} (bfloat16 only)'
  unaligned = [n for n in (head_dim, value_dim) if n % 8]
  return f'heads of {unaligned[0]} (multiples of 8 only)' if unaligned else ''


def _triton_refuses(head_dim, value_dim, dtype) -> str:
  if dtype not in ('bfloat16', 'float16'):
    return f'config.model.dtype={dtype} (bfloat16 and float16 only)'
  return f'heads of {head_dim} and {value_dim} (up to 256 only)' if max(head_dim, value_dim) > 256 else ''


class AttentionShape(NamedTuple):
  """Shape of an attention problem, for which a kernel is checked against XLA.

  The fields not described here are those of `ModelConfig`.
  """

  length: int  # 0 for single tokens over a cache
  parts: int  # parts of a row, over the `context` axis
  heads: int
  kv_heads: int
  head_dim: int
  value_dim: int
  attention_scale: float
  attention_softcap: float
  windows: tuple[int, ...]
  sinks: bool
  branches: bool = False  # of a shared prompt

  @property
  def chunked(self) -> bool:
    return False  # chunks are checked as windows


# (h, hv, dtype) -> what the kernel does not support, or ''. All support segments, windows, grouped heads, soft caps
# and sinks.
REFUSALS = {'splash': _splash_refuses, 'triton': _triton_refuses}
PLATFORMS = {'splash': ('tpu',), 'triton': ('gpu', 'cuda')}  # where they run


def refused(compute: Compute, cfg: ModelConfig, work: AttentionShape) -> str:
  """Returns what the kernel does not support of such attention in a model, or ''."""
  if work.parts > 1 and compute.attention in WHOLE_ROW_KERNELS:
    return 'rows that a context axis splits'
  if work.branches and not supports_branches(compute.attention, cfg):
    return 'branches of a shared prompt in such a model; set share_prompt=False in config.preference or config.train'
  return REFUSALS[compute.attention](work.head_dim, work.value_dim, compute.dtype)


def supports_branches(kernel: str, cfg: ModelConfig | CustomConfig) -> bool:
  """Returns whether a kernel supports branches of a shared prompt (`types.Batch`) in a model.

  Splash would count windows in places instead of positions, and a soft cap would bound what keeps branches apart. A
  chunk may begin in the prompt and end in a branch, with other branches between; a kernel would see two documents.
  """
  if isinstance(cfg, CustomConfig):
    return False
  if kernel == 'splash':
    return not any(cfg.layer_windows) and not cfg.attention_softcap
  return not cfg.chunked


def kernel_fits(
  q: jax.Array, v: jax.Array, branch_ids: jax.Array | None, compute: Compute, cfg: ModelConfig, parts: int
) -> bool:
  """True if the kernel is to be used; InputError if it is required and cannot be.

  If `compute.attention` was chosen by 'auto', it is not used for short rows, nor for shapes for which the check of
  kernels found wrong results.
  """
  heads = v.shape[2], q.shape[3], v.shape[3]
  shape = attention_shape(cfg, q.shape[1], parts, heads, branches=branch_ids is not None)
  refusal = refused(compute, cfg, shape)
  if refusal and compute.forced:
    name = compute.attention
    raise InputError(f'config.model.attention: {name} does not support {refusal}; with auto, XLA computes it instead')
  if refusal or compute.forced:
    return not refusal
  return q.shape[1] >= SHORT * parts and shape not in compute.rejected_shapes


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  rows: PackedRows,
  window: int | jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  sinks: jax.Array | None,
  layout: Callable | None,
  parts: int,
) -> jax.Array:
  """Computes `layers.attention` by the kernel, on each device's rows and heads.

  Where rows are split, a device has a stripe of the queries and gathers all keys.
  """
  windows = (window,) if isinstance(window, int) else tuple(sorted(set(cfg.layer_windows)))
  window_index = 0 if isinstance(window, int) else jnp.searchsorted(jnp.array(windows), window)
  local = functools.partial(_local, windows=windows, cfg=cfg, compute=compute, parts=parts)
  args = q, k, v, rows, window_index, sinks
  if not isinstance(layout, Layout) or layout.mesh.size == 1:
    return local(*args)
  q_spec = layout.spec(('batch', 'time', 'heads', None), q.shape)
  k_spec = layout.spec(('batch', 'time', 'kv_heads', None), k.shape)
  # More tensor shards than kv heads: each has all of these, and selects those of its query heads.
  select_kv = q_spec[2] is not None and k_spec[2] is None
  return jax.shard_map(
    functools.partial(local, groups=q.shape[2] // k.shape[2] if select_kv else 0),
    mesh=layout.mesh,
    in_specs=(q_spec, k_spec, k_spec, PartitionSpec(q_spec[0]), PartitionSpec(), PartitionSpec(q_spec[2])),
    out_specs=q_spec,
    check_vma=False,
  )(*args)


def _local(q, k, v, rows: PackedRows, window_index, sinks, *, windows, cfg, compute, parts, groups=0):
  """Runs the kernel on one device; with `groups` > 0 it has all kv heads, of `groups` query heads each."""
  q = attention_xla.scale_queries(q, cfg)
  q, k, v = (x.astype(compute.dtype) for x in (q, k, v))
  stripe: dict[str, Any] = {}
  if parts > 1:
    k, v = context_parallel.gather_stripes(k), context_parallel.gather_stripes(v)
    stripe = dict(stripe=(jax.lax.axis_index('context'), parts))
  if groups:
    query_heads = jax.lax.axis_index('tensor') * q.shape[2] + jnp.arange(q.shape[2])
    k, v = (jnp.take(x, query_heads // groups, axis=2) for x in (k, v))
  kernels = [functools.partial(KERNELS[compute.attention], window=w, cfg=cfg, **stripe) for w in windows]
  args = q, k, v, rows, sinks
  return kernels[0](*args) if len(windows) == 1 else jax.lax.switch(window_index, kernels, *args)


def _padded(multiple: int, segment_ids, *arrays):
  """Pads rows [B, T] and [B, T, N, h] to a multiple of a length; the padding is a document of its own."""
  padding = -segment_ids.shape[1] % multiple
  if not padding:
    return segment_ids, *arrays
  return (
    jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=_PAD),
    *(jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in arrays),
  )


# --------------------------------------------------------------------- splash


def splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  rows: PackedRows,
  sinks: jax.Array | None,
  *,
  window: int,
  cfg: ModelConfig,
  stripe: tuple[int | jax.Array, int] = (0, 1),
  interpret: bool = False,
) -> jax.Array:
  """Runs the sparse flash attention of `jax.experimental.pallas.ops.tpu`.

  Blocks that the causal mask or the window hides are skipped; those that document boundaries or branches hide are not.

  Args:
    q: [B, t, H, h], scaled; k: [B, T, K, h]; v: [B, T, K, hv].
    stripe: (i, n): query j is that of token n j + i; i may be traced.
    interpret: run it on the CPU, for tests.

  Returns:
    [B, t, H, hv].
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as lib
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  part, n = stripe
  length, segment_ids = q.shape[1], rows.segment_ids
  multiple = 512
  if length <= 2048:
    multiple = _LANES if length <= 512 else 2 * _LANES
  queries = jax.tree.map(lambda ids: ids.reshape(len(q), length, n)[..., part], rows)
  if rows.branch_ids is not None:
    q, k = _kept_apart(q, k, queries.branch_ids, rows.branch_ids)
  query_segments, q = _padded(multiple, queries.segment_ids, q)
  block = next(b for b in (512, 384, 256, _LANES) if q.shape[1] % b == 0)
  if n > 1:
    # A mask is static, so it has to be the same for all parts: query j is placed at n j + n - 1 instead of n j + part,
    # and keys move by as many places.
    segment_ids, k, v = (_shifted(x, part, n, fill) for x, fill in ((segment_ids, _PAD), (k, 0), (v, 0)))
  segment_ids, k, v = _padded(block, segment_ids, k, v)
  shape = q.shape[1], k.shape[1]
  mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
  mask.q_sequence = mask.q_sequence * n + n - 1  # this is part of the hash of the mask
  sizes: dict[str, Any] = {f.name: block for f in dataclasses.fields(lib.BlockSizes) if f.name.startswith('block')}
  kernel = lib.make_splash_mha(
    masks.MultiHeadMask([mask] * q.shape[2]),
    block_sizes=lib.BlockSizes(**sizes),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
    attn_logits_soft_cap=cfg.attention_softcap or None,
    residual_checkpoint_name='dots',
  )
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  # `planning.kernels` reads n and the window from this name, as they are not among the kernel's arguments.
  with jax.named_scope(f'attention_stripes_{n}_window_{window}'):
    out = jax.vmap(lambda q, k, v, *s: kernel(q, k, v, lib.SegmentIds(*s), sinks))(q, k, v, query_segments, segment_ids)
  return out.swapaxes(1, 2)[:, :length]


def _kept_apart(q, k, query_branches, key_branches):
  """Appends features to q [B, t, H, h] and k [B, T, K, h] that separate branches; branches are [B, t] and [B, T].

  The masks of splash compare one number of a query with one of a key, which cannot say that all branches attend to the
  shared part. The features are the bits of a branch and their complements: their products add `-_APART` to a score for
  each bit in which the branches differ, and exactly 0 where they are equal or the key is shared.
  """
  size = -(-k.shape[1].bit_length() // 4) * 4  # a row has no more branches than tokens; h stays a multiple of 8
  of_query, of_key = (branches[..., None] >> jnp.arange(size) & 1 for branches in (query_branches, key_branches))
  penalty = jnp.where(key_branches > 0, -_APART, 0)[..., None]

  def extended(x, features):
    # XLA computes this sum in one pass; it would write the features of all heads before it concatenates them.
    features = jnp.pad(features.astype(x.dtype), ((0, 0), (0, 0), (x.shape[3], 0)))
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 2 * size))) + features[:, :, None]

  q = extended(q, jnp.concatenate([of_query, 1 - of_query], axis=-1))
  return q, extended(k, penalty * jnp.concatenate([1 - of_key, of_key], axis=-1))


def _shifted(x, part, n: int, fill):
  """Shifts [B, T, ...] right by n - 1 - part places; no query attends to the tokens that fall off the end."""
  padded = jnp.pad(x, ((0, 0), (n - 1, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
  return jax.lax.dynamic_slice_in_dim(padded, part, x.shape[1], axis=1)


def triton(
  q: jax.Array, k: jax.Array, v: jax.Array, rows: PackedRows, sinks: jax.Array | None, *, window: int, cfg: ModelConfig
) -> jax.Array:
  """Runs `attention_triton.attend` on rows of any length."""
  from jaxpost.models import attention_triton

  length = q.shape[1]
  segment_ids, q, k, v = _padded(_LANES, rows.segment_ids, q, k, v)
  padding = (0, 0), (0, q.shape[1] - length)
  rows = PackedRows(segment_ids, *(x if x is None else jnp.pad(x, padding) for x in rows[1:]))
  return attention_triton.attend(q, k, v, rows, sinks, window=window, cfg=cfg)[:, :length]


KERNELS: dict[str, Callable[..., jax.Array]] = {'splash': splash, 'triton': triton}


# ------------------------------------------------------------- which kernel


def attention_shape(
  cfg: ModelConfig, length: int, parts: int, heads: tuple[int, int, int] | None = None, branches: bool = False
) -> AttentionShape:
  """Returns the attention shape of a model in rows of `length` tokens, in `parts` parts.

  Args:
    heads: one of `cfg.head_shapes`; None: the first.
    branches: whether rows have branches of a shared prompt, see `types.Batch`.
  """
  kv_heads, head_dim, value_dim = heads or cfg.head_shapes[0]
  return AttentionShape(
    length,
    parts,
    cfg.num_heads,
    kv_heads,
    head_dim,
    value_dim=value_dim,
    attention_scale=cfg.attention_scale,
    attention_softcap=cfg.attention_softcap,
    windows=tuple(sorted(set(cfg.layer_windows or (0,)))),
    sinks='sinks' in cfg.biases,
    branches=branches,
  )


def check_platform(compute: Compute, platform: str) -> None:
  """Raises InputError if the requested kernel does not run on this platform."""
  name = compute.attention
  if platform not in PLATFORMS.get(name, (platform,)):
    raise InputError(
      f'config.model.attention: {name} runs on {PLATFORMS[name][0].upper()} only, and this is {platform}; take auto'
    )
