"""Attention of single tokens over a KV cache by kernels of accelerators, which read only the filled entries.

`decode_triton.py` (NVIDIA GPUs) and `decode_mosaic.py` (TPUs) have the kernels; `decoding.py` calls them.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.matmul import Compute
from jaxpost.models.config import CustomConfig, ModelConfig

_MAX_SIZE = 256  # of a head


def module(kernel: str) -> ModuleType:
  """Returns the module of a kernel, 'triton' or 'mosaic'; ImportError if this JAX lacks what it needs."""
  if kernel == 'mosaic':
    from jaxpost.models import decode_mosaic

    return decode_mosaic
  from jaxpost.models import decode_triton

  return decode_triton


def supports(compute: Compute, cfg: ModelConfig | CustomConfig) -> bool:
  """Returns whether `compute.decode_kernel` can decode: every layer caches keys and values of 16 bits.

  Heads have at most 256 elements, on TPUs a multiple of 8.
  """
  if isinstance(cfg, CustomConfig) or not compute.decode_kernel or jnp.dtype(compute.cache).itemsize != 2:
    return False
  multiple = 8 if compute.decode_kernel == 'mosaic' else 1
  supported = {
    (heads, *sizes) for heads, *sizes in cfg.head_shapes if all(n <= _MAX_SIZE and n % multiple == 0 for n in sizes)
  }
  # A latent cache (MLA) has one array for all heads, so its entries match no head shape.
  return all((heads, *sizes) in supported for heads, sizes in cfg.layer_caches)


def compute_of_decoding(compute: Compute, cfg: ModelConfig | CustomConfig, rollout: Any) -> Compute:
  """Returns `compute`, without the decoding kernel if that does not support the model or what `rollout` asks for.

  rollout: `config.rollout` or a `SamplerConfig`, which leaves the type of the cache to `compute.cache`.
  """
  # A kernel attends from one token per slot, where speculation has several.
  supported = not (rollout.speculation or getattr(rollout, 'cache', '')) and supports(compute, cfg)
  if supported and rollout.page_size:
    least = 16 if compute.decode_kernel == 'triton' else entries_multiple(compute, cfg)
    supported = rollout.page_size % least == 0
  return dataclasses.replace(compute, decode_kernel=compute.decode_kernel if supported else '')


def entries_multiple(compute: Compute, cfg: ModelConfig | CustomConfig) -> int:
  """Returns a number that the entries of a slot, or of a page, must be a multiple of.

  XLA for TPU keeps an array in the order of dimensions that pads it least to tiles of 8 x 128 elements. With such a
  number, these are the entries and the elements of a head, and the kernel reads the cache as it is.
  """
  if compute.decode_kernel != 'mosaic':
    return 1
  return 128 if any(size % 128 for _, sizes in cfg.layer_caches for size in sizes) else 8


def compute_of_engine(
  compute: Compute, cfg: ModelConfig, layout: Layout, slots: int, *, entries: int, page_size: int, block: int
) -> Compute:
  """Returns `compute`, without the kernel if memories of a TPU core do not hold what it needs, which is logged.

  slots: of all devices. entries, page_size, block: see `decode_mosaic.refusal`.
  """
  if compute.decode_kernel != 'mosaic':
    return compute
  tensor, lengths = layout.mesh.shape['tensor'], dict(entries=entries, page_size=page_size, block=block)
  for heads, sizes in set(cfg.layer_caches):
    local_heads = heads // tensor if heads % tensor == 0 else heads
    if reason := module('mosaic').refusal(slots // layout.batch_shards, local_heads, sizes, **lengths):
      logging.warning('the decoding kernel does not support %s; XLA decodes', reason)
      return dataclasses.replace(compute, decode_kernel='')
  return compute


def cached_attention(
  q: jax.Array,
  cache: Sequence[jax.Array],
  recent: Sequence[jax.Array],
  filled: jax.Array,
  step: int | jax.Array,
  *,
  kernel: str,
  window: int,
  cfg: ModelConfig,
  sinks: jax.Array | None = None,
  table: jax.Array | None = None,
  layout: Callable | None = None,
) -> jax.Array:
  """Computes `decoding.cached_attention` of one token per slot, on each device's slots and heads.

  table: [S, n] int32, the pages of each slot, if the cache has pages [., K, p, h].
  """
  shape, kv_heads = q.shape, cache[0].shape[1]
  q = q.reshape(len(q), kv_heads, -1, shape[-1])
  run = functools.partial(module(kernel).attend, window=window, cfg=cfg)
  args = q, tuple(cache), tuple(recent), filled, step, sinks if sinks is None else sinks.reshape(kv_heads, -1)
  if table is not None:
    args = *args, table
  if isinstance(layout, Layout) and layout.mesh.size > 1:
    rows = layout.spec(('batch', 'kv_heads', None, None), q.shape)
    of_slots = PartitionSpec(rows[0])
    specs = rows, rows, rows, of_slots, PartitionSpec(), PartitionSpec(rows[1]), of_slots
    run = jax.shard_map(run, mesh=layout.mesh, in_specs=specs[: len(args)], out_specs=rows, check_vma=False)
  return run(*args).reshape(*shape[:3], -1)
