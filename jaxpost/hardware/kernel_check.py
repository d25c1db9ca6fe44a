"""Numerical check of attention kernels on this device, shape by shape; `grouped_check.py` has that of experts.

It runs before the programs of a run are compiled. A shape that a kernel gets
wrong goes to XLA's attention. `models/attention_kernels.py` has the kernels.

Legend: T tokens, H heads, K kv heads, h head size, hv that of values.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.hardware import probe
from jaxpost.matmul import Compute
from jaxpost.models import attention_kernels, attention_xla
from jaxpost.models.config import CustomConfig

if TYPE_CHECKING:
  from jaxpost.models.attention_kernels import AttentionShape
  from jaxpost.models.config import ModelConfig

# Largest error, as a share of the largest value; rounding to bfloat16 makes a tenth of it.
_TOLERANCE = 0.05
_HEADS = 2  # kv heads that are checked, with all their query heads
DECODE = 'decode'  # the name of the kernel for single tokens
_DECODED = (4, 4, 1024, 32), (128, 130, 300, 8)  # slots decoded and held, entries of the cache and of a block
_GPU_OPTIONS = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
_SCORES = 2**25  # of the reference that exist at a time
_LARGE = 2**26  # numbers of a q above which there is less of it
# Errors of a kernel, or of JAX lowering it (JaxRuntimeError is a RuntimeError), for a shape that it does not support.
_FAILURES = (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError)


class KernelUse(NamedTuple):
  """Rows that a run attends to.

  length: tokens of a row; parts: that a row is split into, for context parallelism; branches: rows have them.
  """

  model: ModelConfig | CustomConfig
  length: int
  parts: int = 1
  branches: bool = False


def verify(compute: Compute, uses: Iterable[KernelUse], decoded: Sequence[ModelConfig | CustomConfig] = ()) -> Compute:
  """Checks the attention kernel of a run and returns `compute` with the shapes that XLA has to compute.

  A shape that the kernel gets wrong on any process goes to XLA on all. Each shape is checked once in a process; correct
  ones are remembered in ~/.cache/jaxpost/attention.json.

  Args:
    compute: with the kernel that the config or the platform chose.
    uses: all rows that the run attends to.
    decoded: models that sample.

  Raises:
    InputError: the kernel is wrong, and the config names it.
  """
  dtype = compute.dtype
  works = sorted({(compute.attention, work) for use in uses for work in _shapes_to_check(compute, use)})
  works += sorted({(DECODE, work) for cfg in decoded for work in decoded_shapes(compute, cfg)})
  out, decode_kernel = [], compute.decode_kernel
  for (name, work), why in zip(works, faults(works, dtype, trusted)):
    where = where_it_runs()
    if work.length:  # a cache that is decoded from has no rows
      where += f' for rows of {work.length} tokens'
    wrong = f'{name} is wrong on {where}, {_words(work)}: {why}'
    if why and compute.forced and name != DECODE:
      raise InputError(f'config.model.attention: {wrong}; take auto')
    if why:
      if name == DECODE:
        decode_kernel = False
      else:
        out.append(work)
      logging.warning('attention by %s; XLA computes these', wrong)
  return dataclasses.replace(compute, rejected_shapes=tuple(out), decode_kernel=decode_kernel)


def faults(works: Sequence[tuple[str, Any]], dtype: str, check: Callable[[str, Any, str], str]) -> list[str]:
  """Returns for each (kernel, shape) why it is wrong on a process, or ''; see `verify`.

  Args:
    check: fn(kernel, shape, dtype) -> the same for this process.
  """
  path = probe.cache_file('attention.json')
  keys = [_key(name, dtype, work) for name, work in works]
  known = probe.read_cache(path)
  whys = ['' if key in known else check(name, work, dtype) for key, (name, work) in zip(keys, works)]
  correct = {key: 1 for key, why in zip(keys, whys) if not why}
  if not correct.keys() <= known.keys():
    probe.add_to_cache(path, correct)
  return [next(filter(None, of_processes), '') for of_processes in zip(*coordination.all_gather(whys))]


def where_it_runs() -> str:
  return f'{jax.local_devices()[0].device_kind} with jax {jax.__version__}'


def _shapes_to_check(compute: Compute, use: KernelUse) -> list[AttentionShape]:
  """Returns the shapes for which the kernel would be used."""
  cfg, length, parts, branches = use
  if isinstance(cfg, CustomConfig) or (length < attention_kernels.SHORT * parts and not compute.forced):
    return []
  shapes = [attention_kernels.attention_shape(cfg, length, parts, heads, branches) for heads in cfg.head_shapes]
  return [x for x in shapes if not attention_kernels.refused(compute, x.head_dim, x.value_dim, parts)]


def decoded_shapes(compute: Compute, cfg: ModelConfig | CustomConfig) -> list[AttentionShape]:
  """Returns the shapes in which the kernel for single tokens would read a cache."""
  if not (compute.decode_kernel and attention_kernels.decodes(cfg, compute)):
    return []
  return [attention_kernels.attention_shape(cfg, 0, 1, heads) for heads in cfg.head_shapes]


def _words(work: AttentionShape) -> str:
  words = [f'{work.heads} heads of {work.head_dim} on {work.kv_heads}']
  if work.parts > 1:
    words.insert(0, f'{work.parts} parts')
  if work.sinks:
    words.append('sinks')
  if work.attention_softcap:
    words.append('a soft cap')
  if work.branches:
    words.append('branches')
  return ', '.join(words)


def _key(name: str, dtype: str, work: tuple) -> str:
  """Returns a text that changes with the kernel, its code, the shape, and what it runs on."""
  device = jax.local_devices()[0]
  code = zlib.crc32(device.client.platform_version.encode())
  models, checks = pathlib.Path(attention_kernels.__file__).parent, pathlib.Path(__file__).parent
  for file in sorted({*models.glob('attention_*.py'), *models.glob('*_triton.py'), *checks.glob('*_check.py')}):
    code = zlib.crc32(file.read_bytes(), code)
  return ' '.join(map(str, (name, dtype, *work, jax.__version__, device.device_kind, code)))


@functools.cache
def trusted(name: str, work: AttentionShape, dtype: str) -> str:
  """Checks a kernel for each window of a model; returns '' if all are right, else what differs from XLA."""

  def found() -> dict[str, float]:
    windows = {window: f' with window {window}' if window else '' for window in work.windows}
    return {f'{k}{where}': x for n, where in windows.items() for k, x in errors(name, work, dtype, n).items()}

  return judge(found)


def judge(found: Callable[[], dict[str, float]]) -> str:
  """Returns '' if a check finds only small errors, else what is wrong or has failed.

  Args:
    found: fn() -> {what: largest error over the largest value}.
  """
  try:
    # NaN is wrong, too, which `x > _TOLERANCE` would miss.
    wrong = [f'{x:.1e} in {k}' for k, x in found().items() if not x <= _TOLERANCE]
  except _FAILURES as e:
    return f'{type(e).__name__}: {str(e).partition(chr(10))[0]}'
  return f'off by {", ".join(wrong)}' if wrong else ''


def compiler_options() -> dict[str, Any]:
  """Returns options of XLA; tuning the products of the reference takes half a minute for each shape on an H200."""
  options = _GPU_OPTIONS if jax.default_backend() == 'gpu' else {}
  return {k: v for k, v in options.items() if k not in probe.refused_options(tuple(options.items()))}


def _packed_rows(count: int, length: int) -> tuple[jax.Array, jax.Array]:
  """Returns (segment_ids, positions) of one or two rows: documents and padding, and documents that fill a row."""
  cuts = jnp.array(
    [[length // 7, length // 2 + 1, length - length // 9], [length // 3, length // 2 + length // 8, length]]
  )[:count]
  number = jnp.arange(length)
  # [rows, T] 0 to 3, the document of a token
  found = jax.vmap(lambda c: jnp.searchsorted(c, number, side='right'))(cuts)
  starts = jnp.concatenate([jnp.zeros((count, 1), int), cuts], axis=1)
  # Segments 1, 2, 3 and, behind the last cut, 0, which is padding.
  return ((found + 1) % 4).astype(jnp.int32), number - jnp.take_along_axis(starts, found, axis=1)


def _sizes(work: AttentionShape) -> tuple[int, int]:
  """Returns how many rows and kv heads are checked."""
  kv_heads, rows = min(work.kv_heads, _HEADS), 2
  each = work.length * work.head_dim * (work.heads // work.kv_heads)
  if rows * kv_heads * each > _LARGE:
    rows = 1
  if rows * kv_heads * each > _LARGE:
    kv_heads = 1
  return rows, kv_heads


def _branches(work: AttentionShape, positions: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns positions, and the ids of two branches behind a shared part, the second of which starts again there."""
  if not work.branches:
    return positions, {}
  shared, second = work.length // 16, work.length // 8
  branch = jnp.where(positions < shared, 0, 1 + (positions >= second))
  again = jnp.where(positions >= second, positions - second + shared, positions)
  return again, dict(branch_ids=branch.astype(jnp.int32))


def errors(name: str, work: AttentionShape, dtype: str, window: int) -> dict[str, float]:
  """Returns {'out', 'q', 'k', 'v', ('sinks')}: how far a kernel is from XLA in float32.

  An error is the largest difference over the largest value: 'out' of the forward pass, the others of gradients. Rows
  are packed; long ones are checked with fewer heads. Stripes of a split row are computed one after the other.
  """
  if name == DECODE:
    # Few slots, over whose entries blocks of the device are split, and many, with more in the cache than decoded.
    return dict(out=max(_decode_error(work, dtype, window, *sizes) for sizes in _DECODED))
  length, size, values = work.length, work.head_dim, work.value_dim
  rows, kv_heads = _sizes(work)
  heads = kv_heads * (work.heads // work.kv_heads)
  keys = jax.random.split(jax.random.key(0), 5)

  def draw(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, (rows, length, *shape)).astype(dtype)

  given = (draw(keys[0], heads, size), draw(keys[1], kv_heads, size), draw(keys[2], kv_heads, values))
  if work.sinks:
    given += (jax.random.normal(keys[4], (heads,)),)
  g = draw(keys[3], heads, values).astype(jnp.float32)
  segments, positions = _packed_rows(rows, length)
  positions, branches = _branches(work, positions)
  exactly = Compute('float32', q_chunk=max(16, min(length, _SCORES // (heads * length))))
  packed = attention_xla.PackedRows(segments, positions, **branches)

  def exact(q, k, v, sinks=None):
    return attention_xla.attend_in_chunks(q, k, v, packed, window, cfg=work, compute=exactly, sinks=sinks)

  def fast(q, k, v, sinks=None):
    q, k, v = (x.astype(dtype) for x in (attention_xla.scale_queries(q, work), k, v))

    def run(q, **stripe):
      kernel = attention_kernels.KERNELS[name]
      return kernel(q, k, v, packed, sinks, window=window, cfg=work, **stripe).astype(jnp.float32)

    n = work.parts  # stripe i has the tokens i, i + n, ...; stacked, they are [rows, T / n, n, H, hv]
    if n == 1:
      return run(q)
    return jnp.stack([run(q[:, i::n], stripe=(i, n)) for i in range(n)], axis=2).reshape(rows, length, heads, values)

  @functools.partial(jax.jit, compiler_options=compiler_options())
  def measured(given, g):
    right, right_back = jax.vjp(exact, *(x.astype(jnp.float32) for x in given))
    out, back = jax.vjp(fast, *given)
    pairs = zip((out, *back(g)), (right, *right_back(g)))
    return [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]

  return dict(zip(('out', 'q', 'k', 'v', 'sinks'), map(float, measured(given, g))))


def _decode_error(work: AttentionShape, dtype: str, window: int, slots: int, held: int, room: int, block: int) -> float:
  """Returns how far the kernel for single tokens is from XLA in float32.

  Of `slots` of `held` slots, with `room` entries in the cache and `block` tokens drawn since.
  """
  from jaxpost.models import decode_triton, decoding

  filled = jnp.resize(jnp.array([0, 33, room // 2 + 1, room, 1, room - 1]), slots)
  kv_heads = min(work.kv_heads, _HEADS)
  heads = kv_heads * (work.heads // work.kv_heads)
  keys = jax.random.split(jax.random.key(0), 6)

  def draw(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape).astype(dtype)

  q = draw(keys[0], slots, 1, heads, work.head_dim)
  cache, recent = (
    (draw(a, rows, kv_heads, entries, work.head_dim), draw(b, rows, kv_heads, entries, work.value_dim))
    for a, b, rows, entries in ((keys[1], keys[2], held, room), (keys[3], keys[4], slots, block))
  )
  sinks = jax.random.normal(keys[5], (heads,)) if work.sinks else None

  @functools.partial(jax.jit, compiler_options=compiler_options())
  def measured(q, cache, recent, sinks):
    given = dict(window=window, cfg=work, sinks=sinks)
    exactly = jax.tree.map(lambda x: x[:slots].astype(jnp.float32), (q, cache, recent))
    right = decoding.cached_attention(*exactly, filled, jnp.int32(block // 2), compute=Compute('float32'), **given)
    out = decode_triton.cached_attention(
      q, cache, recent, filled, jnp.int32(block // 2), compute=Compute(dtype), **given
    )
    return jnp.max(jnp.abs(out - right)) / jnp.max(jnp.abs(right))

  return float(measured(q, cache, recent, sinks))
