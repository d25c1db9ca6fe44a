"""Costs of custom kernels, which XLA's cost analysis cannot see.

Kernels of attention (`models/attention_kernels.py`), of grouped products (`models/grouped.py`) and of recurrences
(`models/recurrence_kernels.py`) are known. Others count as no FLOPs and one read of each argument.

Legend: B rows, T tokens, H heads, h head size, hv that of values.
"""

import math
import re

from jaxpost.planning import hlo

# Matrix products per pair of blocks: (with inner or outer size h, with hv).
_SPLASH = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2)}
_SPLASH_NAME = re.compile(r'splash_m\w+?_(fwd|dq|dkv)_')
_TRITON = {'forward': (1, 1), 'queries': (2, 1), 'keys': (2, 2)}
_TRITON_NAME = re.compile(r'attention_(forward|queries|keys)_(\d+)')
_DECODE_NAME = re.compile(r'decode_(\d+)(?:_(\d+))?(_pages)?')
_GROUPED_NAME = re.compile(r'grouped_(rows|matrices)')
_RECURRENCE_NAME = re.compile(r'recurrence_(forward|backward)_(\d+)')
_TRITON_TARGET = '__gpu$xla.gpu.triton'


def cost(op: hlo.Op, arguments: list[hlo.Array], filled: int = 0) -> tuple[float, float]:
  """Returns (FLOPs, bytes besides one read of each argument) of a custom call.

  filled: filled entries of a slot's cache in decoding; 0: all.
  """
  if not is_one(op):
    return 0.0, 0.0
  if match := _RECURRENCE_NAME.search(hlo.op_name(op)):
    return (3.0 if match[1] == 'backward' else 1.0) * _recurrence(arguments, int(match[2])), 0.0
  if match := _DECODE_NAME.search(hlo.op_name(op)):
    return _decode(arguments, int(match[1]), int(match[2] or 1), is_paged=bool(match[3]), filled=filled)
  if _target(op) == _TRITON_TARGET:
    if hlo.op_name(op).endswith('/rotate/pallas_call'):
      return 0.0, _entries_of_one_token(arguments)
    if match := _GROUPED_NAME.search(hlo.op_name(op)):
      return _rows_by_groups(op, arguments) if match[1] == 'rows' else _groups_of_rows(op, arguments)
    match = _TRITON_NAME.search(hlo.op_name(op))
    return _causal(_TRITON[match[1]], int(match[2]), arguments) if match else (0.0, 0.0)
  if hlo.op_name(op).endswith('/ragged-dot-none'):
    return _groups(op, arguments[-2])
  if hlo.op_name(op).endswith('/jit(tgmm)/pallas_call'):
    return _groups_of_rows(op, arguments[-2:])
  match = _SPLASH_NAME.search(hlo.op_name(op))
  return _splash(op, match[1], arguments) if match else (0.0, 0.0)


def is_one(op: hlo.Op) -> bool:
  return op.kind == 'custom-call' and _target(op) in ('tpu_custom_call', _TRITON_TARGET)


def _target(op: hlo.Op) -> str:
  match = re.search(r'custom_call_target="([^"]*)"', op.text)
  return match[1] if match else ''


def _groups(op: hlo.Op, x: hlo.Array) -> tuple[float, float]:
  """Returns (FLOPs, extra bytes) of rows [N, D] times one matrix per group, for groups of equal size."""
  return 2.0 * _share_of_rows(op) * math.prod(x.dims) * op.arrays[0].dims[-1], 0.0


def _share_of_rows(op: hlo.Op) -> float:
  """Returns the share of rows that belong to a group: half in a round of `expert_mlp.py`, which has spare rows."""
  return 0.5 if re.search(r'\brounds\)*/', hlo.op_name(op)) else 1.0


def _rows_by_groups(op: hlo.Op, arguments: list[hlo.Array]) -> tuple[float, float]:
  """Returns `_groups` for a kernel that skips matrices of groups without rows, with a uniform router."""
  x, w = arguments[:2]
  unused = (1 - 1 / w.dims[0]) ** (_share_of_rows(op) * x.dims[0])
  return _groups(op, x)[0], -unused * w.bytes


def _groups_of_rows(op: hlo.Op, arguments: list[hlo.Array]) -> tuple[float, float]:
  """Returns (FLOPs, extra bytes) of the gradient of the matrices, from rows [N, D] and gradients [N, F]."""
  x, g = arguments[:2]
  return 2.0 * _share_of_rows(op) * math.prod(x.dims) * g.dims[-1], 0.0


def _splash(op: hlo.Op, kind: str, arguments) -> tuple[float, float]:
  """Returns (FLOPs, bytes) of splash attention over the unmasked blocks; queries are [B, H, T, h] or [H, T, h]."""
  # Numbers of blocks of queries and of keys. Kernels that iterate by query leave masked blocks out of `across`, and
  # those that iterate by key leave them out of `down`.
  down, across = arguments[0].dims[-2:]
  q, k, v = [a for a in arguments if a.dtype in ('bf16', 'f32') and len(a.dims) >= 3][:3]
  rows, (heads, length, size) = math.prod(q.dims[:-3]), q.dims[-3:]
  keys, values = k.dims[-2], v.dims[-1]
  block = keys // across if kind == 'dkv' else length // down
  ((stripes, window),) = re.findall(r'attention_stripes_(\d+)_window_(\d+)', hlo.op_name(op))
  pairs = rows * heads * splash_blocks(length, keys, block, int(stripes), int(window))
  with_h, with_hv = _SPLASH[kind]
  flops = 2.0 * pairs * block**2 * (with_h * size + with_hv * values)
  moved = pairs * block * (size + values) * (q.bytes // math.prod(q.dims))
  once = v.bytes / values * (size + values)  # counted already, as one read
  return flops, max(0.0, moved - once)


def splash_blocks(queries: int, keys: int, block: int, n: int, window: int) -> int:
  """Returns the number of pairs of blocks with a query that attends to a key, in a row of n stripes.

  Query j has the position of key n j + n - 1, see `flash.splash`.
  """
  pairs = 0
  for start in range(0, queries, block):
    first, last = n * start + n - 1, n * (start + block) - 1
    pairs += min(last, keys - 1) // block + 1
    pairs -= max(0, first - window + 1) // block if window else 0
  return pairs


def _causal(products: tuple[int, int], window: int, arguments: list[hlo.Array]) -> tuple[float, float]:
  """Returns (FLOPs, bytes) of attention on GPUs over the causal half or the window, for rows of one document."""
  q, _, v = [a for a in arguments if len(a.dims) == 4][:3]
  rows, length, heads, size = q.dims
  window = min(window or length, length)
  pairs = window * (window + 1) / 2 + (length - window) * window
  return 2.0 * rows * heads * pairs * (products[0] * size + products[1] * v.dims[-1]), 0.0


def _recurrence(arguments: list[hlo.Array], chunk: int) -> float:
  """Returns the FLOPs of a gated delta rule over rows, without the inverse of a matrix for each chunk.

  The gradient computes all of it again, and two products for each. State spaces need fewer products.
  """
  q, _, v = arguments[:3]
  size, width = q.dims[-1], v.dims[-1]
  within_chunk = chunk * (6.0 * size + 4.0 * width)  # of a token with the others of its chunk
  return math.prod(v.dims[:-1]) * (6.0 * size * width + within_chunk)


def _decode(arguments: list[hlo.Array], window: int, chunk: int, is_paged: bool, filled: int) -> tuple[float, float]:
  """Returns (FLOPs, bytes) of one token per slot over the filled part of its cache, or the window if shorter.

  chunk: entries that are read at a time.
  """
  q, *caches, new_keys, new_values = [a for a in arguments if len(a.dims) == 4]
  slots, heads, group, _ = q.dims
  size = new_keys.dims[3] + new_values.dims[3]  # of a key and a value
  held = math.prod(caches[0].dims) // (heads * new_keys.dims[3])  # entries of all slots or pages
  room = held // (slots if is_paged else caches[0].dims[0])
  if is_paged and filled:  # slots may share pages
    room = max(room, filled)
  entries = min(n for n in (room, window, filled) if n)
  # A chunk at the end of the entries is half full on average, and so is one at the beginning of a window.
  ends = 2 if window and entries == window else 1
  read = min(entries + ends * (chunk - 1) / 2, -(-room // chunk) * chunk)
  counted = sum(x.bytes for x in caches if not x.fast)
  actual = slots * read / held * sum(x.bytes for x in caches if not x.fast) / (len(caches) / 2)
  if chunk == 1:  # the kernel of GPUs reads the tokens of the block up to the step
    actual -= (new_keys.bytes + new_values.bytes) / 2
  return 2.0 * slots * heads * group * entries * size, actual - counted


def _entries_of_one_token(arguments: list[hlo.Array]) -> float:
  """Returns extra bytes: of the entries of a block, which are arguments and results, one token's are written."""
  keys, values = arguments[-2:]
  return -(2 - 1 / keys.dims[2]) * (keys.bytes + values.bytes)
