"""Checks the results of attention kernels on this device, shape by shape; `layer_check.py` checks those of
experts and of recurrences.

The check runs before the programs of a run are compiled. XLA computes the shapes that a kernel gets wrong.
`models/attention_kernels.py` has the kernels.

Legend: T tokens, H heads, K kv heads, h head size, hv head size of values.
"""

import dataclasses
import functools
import logging
import pathlib
import types
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.hardware import gpu_options, probe
from jaxpost.matmul import Compute
from jaxpost.models import attention_kernels, attention_xla, decode_kernels, layers, rope
from jaxpost.models.attention_kernels import AttentionShape
from jaxpost.models.config import CustomConfig, ModelConfig, Rope

_TOLERANCE = 0.05  # largest error, as a share of the largest value; that of rounding to bfloat16 is a tenth of it
_HEADS = 2  # kv heads that are checked, with all of their query heads
DECODE = 'decode_'  # begins the names of the kernels for single tokens
# Slots decoded and held, entries of the cache and of a block, and of a page.
_DECODED = (4, 4, 1100, 32, 0), (128, 130, 300, 8, 0), (7, 8, 1280, 16, 128)
_GPU_OPTIONS = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
# Errors of a kernel, or of JAX when it lowers the kernel, for unsupported shapes. JaxRuntimeError is a RuntimeError;
# the errors of Pallas for TPU are private classes of JAX.
_FAILURES = (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError)
_SCORES = 2**25  # attention scores that the reference computes at a time
_LARGE = 2**26  # elements of q [rows, T, H, h] above which fewer rows and heads are checked


class KernelUse(NamedTuple):
  """A use of attention in a run."""

  model: ModelConfig | CustomConfig
  length: int  # tokens of a row
  parts: int = 1  # parts that context parallelism splits a row into
  branches: bool = False  # whether rows have branches after a shared prompt


def verify(compute: Compute, uses: Iterable[KernelUse], decoded: Sequence[ModelConfig | CustomConfig] = ()) -> Compute:
  """Checks the attention kernel of a run and returns `compute` with the shapes that XLA has to compute.

  If the kernel gets a shape wrong on any process, XLA computes the shape on all. Each shape is checked once in a
  process; correct ones are remembered in ~/.cache/jaxpost/attention.json.

  Args:
    compute: with the kernel that the config or the platform chose.
    uses: all uses of attention in training and scoring, and for prefill.
    decoded: models that sample.

  Raises:
    InputError: the kernel is wrong, and the config names it.
  """
  checks = sorted({(compute.attention, shape) for use in uses for shape in _shapes_to_check(compute, use)})
  checks += sorted(
    {(DECODE + compute.decode_kernel, shape) for cfg in decoded for shape in decoded_shapes(compute, cfg)}
  )
  rejected, decode_kernel = [], compute.decode_kernel
  for (name, shape), fault in zip(checks, faults(checks, compute.dtype, trusted)):
    if not fault:
      continue
    rows = f' for rows of {shape.length} tokens' if shape.length else ''  # decoding has no rows
    wrong = f'{name} is wrong on {where_it_runs()}{rows}, {_words(shape)}: {fault}'
    if name.startswith(DECODE):
      decode_kernel = ''
    elif compute.forced:
      raise InputError(f'config.model.attention: {wrong}; take auto')
    else:
      rejected.append(shape)
    logging.warning('attention by %s; XLA computes these', wrong)
  return dataclasses.replace(compute, rejected_shapes=tuple(rejected), decode_kernel=decode_kernel)


def faults(checks: Sequence[tuple[str, Any]], dtype: str, check: Callable[[str, Any, str], str]) -> list[str]:
  """Returns for each (kernel, shape) how it is wrong on any process, or ''; see `verify`.

  Args:
    check: (kernel, shape, dtype) -> how it is wrong on this process, or ''.
  """
  path = probe.cache_file('attention.json')
  keys = [_key(name, dtype, shape) for name, shape in checks]
  known = probe.read_cache(path)
  found = ['' if key in known else check(name, shape, dtype) for key, (name, shape) in zip(keys, checks)]
  correct = {key: 1 for key, fault in zip(keys, found) if not fault}
  if not correct.keys() <= known.keys():
    probe.add_to_cache(path, correct)
  return [next(filter(None, of_processes), '') for of_processes in zip(*coordination.all_gather(found))]


def without_wrong(
  compute: Compute, without: Compute, checks: Sequence[tuple[str, Any]], check: Callable[[str, Any, str], str]
) -> Compute:
  """Returns `compute`, or `without` a kernel if that is wrong for a shape on any process.

  Args:
    checks, check: as for `faults`.
  """
  found = zip(checks, faults(checks, compute.dtype, check) if checks else [])
  wrong = [
    f'{", ".join(f"{k}={v}" for k, v in shape._asdict().items())}: {fault}' for (_, shape), fault in found if fault
  ]
  if not wrong:
    return compute
  name, where = checks[0][0], where_it_runs()
  logging.warning('kernel %s is wrong on %s: %s; XLA computes all of them', name, where, '; '.join(wrong))
  return without


def where_it_runs() -> str:
  return f'{jax.local_devices()[0].device_kind} with jax {jax.__version__}'


def _shapes_to_check(compute: Compute, use: KernelUse) -> list[AttentionShape]:
  """Returns the shapes of a use for which the kernel would run."""
  cfg, length, parts, branches = use
  if isinstance(cfg, CustomConfig) or (length < attention_kernels.SHORT * parts and not compute.forced):
    return []
  shapes = [attention_kernels.attention_shape(cfg, length, parts, heads, branches) for heads in cfg.head_shapes]
  return [x for x in shapes if not attention_kernels.refused(compute, cfg, x)]


def decoded_shapes(compute: Compute, cfg: ModelConfig | CustomConfig) -> list[AttentionShape]:
  """Returns the shapes of a model for which the kernel for single tokens would run."""
  if not decode_kernels.supports(compute, cfg):
    return []
  return [attention_kernels.attention_shape(cfg, 0, 1, heads) for heads in cfg.head_shapes]


def _words(work: AttentionShape) -> str:
  words = {
    f'{work.parts} parts': work.parts > 1,
    f'{work.heads} heads of {work.head_dim} on {work.kv_heads}': True,
    'sinks': work.sinks,
    'a soft cap': work.attention_softcap,
    'branches': work.branches,
  }
  return ', '.join(word for word, applies in words.items() if applies)


def _key(name: str, dtype: str, work: tuple) -> str:
  """Returns a cache key that changes with the kernel, its code, the shape, and the device and versions it runs on."""
  device = jax.local_devices()[0]
  code = zlib.crc32(device.client.platform_version.encode())
  models, checks = pathlib.Path(attention_kernels.__file__).parent, pathlib.Path(__file__).parent
  patterns = 'attention_*.py', 'decod*.py', 'grouped*.py', 'recurrence*.py'
  for file in sorted({*checks.glob('*_check.py'), *(file for pattern in patterns for file in models.glob(pattern))}):
    code = zlib.crc32(file.read_bytes(), code)
  return ' '.join(map(str, (name, dtype, *work, jax.__version__, device.device_kind, code)))


@functools.cache
def trusted(name: str, work: AttentionShape, dtype: str) -> str:
  """Checks a kernel for each window of a model; returns '' if all are right, otherwise what differs from XLA."""

  def all_errors() -> dict[str, float]:
    out: dict[str, float] = {}
    for window in work.windows:
      label = f' with window {window}' if window else ''
      out |= {f'{array}{label}': error for array, error in errors(name, work, dtype, window).items()}
    return out

  return judge(all_errors)


def judge(find_errors: Callable[[], dict[str, float]]) -> str:
  """Returns '' if a check, () -> {array: error}, finds only small errors, otherwise what is wrong or has failed."""
  try:
    wrong = [f'{error:.1e} in {array}' for array, error in find_errors().items() if not error <= _TOLERANCE]
  except BaseException as e:
    if not isinstance(e, _FAILURES) and not type(e).__module__.startswith('jax.'):
      raise
    return f'{type(e).__name__}: {str(e).partition(chr(10))[0]}'
  return f'off by {", ".join(wrong)}' if wrong else ''


def compiler_options() -> dict[str, Any]:
  """Returns XLA options without autotuning, which takes half a minute for the reference of each shape on an H200."""
  options = _GPU_OPTIONS if jax.default_backend() == 'gpu' else {}
  return gpu_options.accepted(options)


def _packed_rows(work: AttentionShape, count: int) -> attention_xla.PackedRows:
  """Returns one or two rows of three documents; the first row ends in padding.

  If the shape has branches, each document has two after a shared prompt, at whose end the positions of both start.
  """
  length = work.length
  with_padding = [length // 7, length // 2 + 1, length - length // 9]
  full = [length // 3, length // 2 + length // 8, length]
  ends = jnp.array([with_padding, full])[:count]  # of the documents
  index = jnp.arange(length)
  document = jax.vmap(lambda row: jnp.searchsorted(row, index, side='right'))(ends)  # [rows, T] 0 to 2; 3: padding
  starts = jnp.concatenate([jnp.zeros((count, 1), int), ends], axis=1)
  segment_ids = ((document + 1) % 4).astype(jnp.int32)  # 1, 2, 3; 0: padding
  positions = index - jnp.take_along_axis(starts, document, axis=1)
  if not work.branches:
    return attention_xla.PackedRows(segment_ids, positions)
  prompt, second = length // 16, length // 8  # ends of the prompt and of the first branch
  branch_ids = jnp.where(positions < prompt, 0, 1 + (positions >= second)).astype(jnp.int32)
  positions = jnp.where(positions >= second, positions - second + prompt, positions)
  return attention_xla.PackedRows(segment_ids, positions, branch_ids)


def _sizes(work: AttentionShape) -> tuple[int, int]:
  """Returns the numbers of rows and kv heads that are checked."""
  kv_heads = min(work.kv_heads, _HEADS)
  size = work.length * work.head_dim * (work.heads // work.kv_heads)  # elements of q per row and kv head
  rows = 2 if 2 * kv_heads * size <= _LARGE else 1
  return rows, kv_heads if rows * kv_heads * size <= _LARGE else 1


def largest_errors(found: Any, expected: Any) -> list[jax.Array]:
  """Returns the largest difference of each array over the largest expected value; infinity if one has NaN."""

  def error(a, b):
    difference = jnp.abs(a.astype(jnp.float32) - b)
    # XLA for CPU may leave NaN out of a maximum.
    return jnp.max(jnp.where(jnp.isnan(difference), jnp.inf, difference)) / jnp.max(jnp.abs(b))

  return jax.tree.map(error, jax.tree.leaves(found), jax.tree.leaves(expected))


def normal_numbers() -> Callable[..., jax.Array]:
  """Returns draw(*shape, dtype='float32'), which draws other numbers at each call."""
  keys = iter(jax.random.split(jax.random.key(0), 10))
  return lambda *shape, dtype='float32': jax.random.normal(next(keys), shape).astype(dtype)


def errors(name: str, work: AttentionShape, dtype: str, window: int) -> dict[str, float]:
  """Returns the errors of a kernel: {'out': of the result, 'q', 'k', 'v' and perhaps 'sinks': of their gradients}.

  The kernels for single tokens have no gradients; for the first window, that of GPUs has `_token_errors`, too.
  An error is the largest difference from XLA in float32 over the largest value. Rows are packed; long rows are checked
  with fewer heads. The stripes of a row that is split are computed one after the other.
  """
  if name.startswith(DECODE):
    kernel = name.removeprefix(DECODE)
    # Triton splits the entries of a slot over thread blocks if slots are few; the case of many also has more held.
    found = dict(out=max(_decode_error(kernel, work, dtype, window, *sizes) for sizes in _DECODED))
    if kernel == 'mosaic' or work.head_dim != work.value_dim or window != work.windows[0]:  # what follows has no window
      return found
    return found | {
      f'{array} of a token': x for normed in (False, True) for array, x in _token_errors(work, dtype, normed).items()
    }
  length, size, values = work.length, work.head_dim, work.value_dim
  rows, kv_heads = _sizes(work)
  heads = kv_heads * (work.heads // work.kv_heads)
  draw = normal_numbers()
  inputs = [draw(rows, length, *shape, dtype=dtype) for shape in ((heads, size), (kv_heads, size), (kv_heads, values))]
  inputs += [draw(heads)] if work.sinks else []
  g = draw(rows, length, heads, values, dtype=dtype).astype(jnp.float32)
  packed = _packed_rows(work, rows)
  float32 = Compute('float32', q_chunk=max(16, min(length, _SCORES // (heads * length))))

  def exact(q, k, v, sinks=None):
    return attention_xla.attend_in_chunks(q, k, v, packed, window, cfg=work, compute=float32, sinks=sinks)

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
  def measured(inputs, g):
    expected, expected_vjp = jax.vjp(exact, *(x.astype(jnp.float32) for x in inputs))
    out, vjp = jax.vjp(fast, *inputs)
    return largest_errors((out, *vjp(g)), (expected, *expected_vjp(g)))

  return dict(zip(('out', 'q', 'k', 'v', 'sinks'), map(float, measured(inputs, g))))


def _token_errors(work: AttentionShape, dtype: str, normed: bool) -> dict[str, float]:
  """Returns the errors of `decode_triton.rotate_and_write` for a few slots; see `errors`.

  normed: whether heads are normalized.
  """
  from jaxpost.models import decode_triton

  slots, block, step, size = 6, 8, jnp.int32(5), work.head_dim
  kv_heads = min(work.kv_heads, _HEADS)
  group = work.heads // work.kv_heads
  fields = dict(norm_eps=1e-6, norm_offset=0.5, rotary_dim=0, ropes=(Rope(),), qk_norm='head' if normed else '')
  cfg: Any = types.SimpleNamespace(**work._asdict(), **fields)
  draw = normal_numbers()
  inputs = [draw(slots, 1, heads, size, dtype=dtype) for heads in (kv_heads * group, kv_heads, kv_heads)]
  recent = [draw(slots, kv_heads, block, size, dtype=dtype) for _ in ('keys', 'values')]
  angle = jnp.tile(draw(slots, 1, 1, size // 2), 2)
  table = jnp.cos(angle), jnp.sin(angle)
  p = dict(q_norm=draw(size), k_norm=draw(size))

  @functools.partial(jax.jit, compiler_options=compiler_options())
  def measured(inputs, recent, table, p):
    found = decode_triton.rotate_and_write(*inputs, recent, step, p=p, table=table, cfg=cfg)
    q, k, v = (x.astype(jnp.float32) for x in inputs)
    q, k = layers.norm_heads(q, k, p, cfg) if normed else (q, k)
    q, k = rope.rotate(q, table, cfg), rope.rotate(k, table, cfg)
    expected = [q, *(x.astype(jnp.float32).at[:, :, step].set(new[:, 0]) for x, new in zip(recent, (k, v)))]
    return largest_errors(found, expected)

  return dict(zip(('queries', 'keys', 'values'), map(float, measured(inputs, recent, table, p))))


def _decode_error(
  kernel: str, work: AttentionShape, dtype: str, window: int, slots: int, held: int, room: int, block: int, page: int
) -> float:
  """Returns the error of the kernel for single tokens, see `errors`.

  It decodes `slots` of the `held` slots of a cache of `room` entries, amid `block` entries that follow the cache. With
  `page` > 0, the entries are in pages of as many. A window begins 32 entries before the end of a chunk of 512.
  """
  from jaxpost.models import decoding

  filled = jnp.resize(jnp.array([0, 33, room // 2 + 1, room, 1, room - 1, min(room, 479 + window)]), slots)
  kv_heads = work.kv_heads if slots < 8 else min(work.kv_heads, _HEADS)  # the sizes of blocks depend on the heads
  heads = kv_heads * (work.heads // work.kv_heads)
  draw, sizes = normal_numbers(), (work.head_dim, work.value_dim)
  q = draw(slots, 1, heads, work.head_dim, dtype=dtype)
  cache = [draw(held, kv_heads, room, size, dtype=dtype) for size in sizes]
  recent = [draw(slots, kv_heads, block, size, dtype=dtype) for size in sizes]
  sinks = draw(heads) if work.sinks else None

  @functools.partial(jax.jit, compiler_options=compiler_options())
  def measured(q, cache, recent, sinks):
    options, drawn = dict(window=window, cfg=work, sinks=sinks), jnp.int32(block // 2)
    inputs = jax.tree.map(lambda x: x[:slots].astype(jnp.float32), (q, cache, recent))
    expected = decoding.cached_attention(*inputs, filled, drawn, compute=Compute('float32'), **options)
    if page:
      table = jax.random.permutation(jax.random.key(1), held * room // page).reshape(held, -1)
      options['table'] = table[:slots]
      cache = [_in_pages(x, table, page) for x in cache]
    out = decode_kernels.cached_attention(q, cache, recent, filled, drawn, kernel=kernel, **options)
    return largest_errors(out, expected)[0]

  return float(measured(q, cache, recent, sinks))


def _in_pages(x: jax.Array, table: jax.Array, page: int) -> jax.Array:
  """Returns entries [S, K, N, h] in pages [S N / page, K, page, h], in the order of `table` [S, N / page]."""
  slots, heads, room, size = x.shape
  pages = x.reshape(slots, heads, room // page, page, size).swapaxes(1, 2).reshape(-1, heads, page, size)
  return jnp.zeros_like(pages).at[table.reshape(-1)].set(pages)
