"""Costs of kernels, which are opaque to XLA's cost analysis.

Kernels of attention (`models/attention_kernels.py`) and of products of groups (`models/grouped.py`) are known; others
count their arguments as read once and no FLOPs.

Legend: B rows, T tokens, H heads, h head size, hv that of values.
"""

import math
import re

from jaxpost.planning import hlo

# Products of two blocks with h, and with hv, in a pass over pairs of blocks.
_SPLASH = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2)}
_SPLASH_NAME = re.compile(r'splash_m\w+?_(fwd|dq|dkv)_')
_TRITON = {'forward': (1, 1), 'queries': (2, 1), 'keys': (2, 2)}
_TRITON_NAME = re.compile(r'attention_(forward|queries|keys)_(\d+)')
_DECODE_NAME = re.compile(r'decode_(\d+)')
_GROUPED_NAME = re.compile(r'grouped_(rows|matrices)')
_TRITON_TARGET = '__gpu$xla.gpu.triton'


def cost(op: hlo.Op, given: list[hlo.Array], filled: int = 0) -> tuple[float, float]:
  """(FLOPs, bytes beyond reading each argument once) of a custom call.

  Args:
    given: the arguments.
    filled: entries of a slot's cache that decoding finds filled; 0: all.
  """
  if not is_one(op):
    return 0.0, 0.0
  if _target(op) == _TRITON_TARGET:
    if found := _DECODE_NAME.search(hlo.op_name(op)):
      return _decode(given, int(found[1]), filled)
    if found := _GROUPED_NAME.search(hlo.op_name(op)):
      return _rows_by_groups(op, given) if found[1] == 'rows' else _groups_of_rows(op, given)
    found = _TRITON_NAME.search(hlo.op_name(op))
    return _causal(_TRITON[found[1]], int(found[2]), given) if found else (0.0, 0.0)
  if hlo.op_name(op).endswith('/ragged-dot-none'):
    return _groups(op, given[-2])
  found = _SPLASH_NAME.search(hlo.op_name(op))
  return _splash(op, found[1], given) if found else (0.0, 0.0)


def is_one(op: hlo.Op) -> bool:
  return op.kind == 'custom-call' and (_target(op) in ('tpu_custom_call', _TRITON_TARGET))


def _target(op: hlo.Op) -> str:
  found = re.search(r'custom_call_target="([^"]*)"', op.text)
  return found[1] if found else ''


def _groups(op: hlo.Op, x: hlo.Array) -> tuple[float, float]:
  """(FLOPs, extra bytes) of a product of rows [N, D] with a matrix for each group of equal size."""
  return 2.0 * _share_of_rows(op) * math.prod(x.dims) * op.arrays[0].dims[-1], 0.0


def _share_of_rows(op: hlo.Op) -> float:
  """Returns the share of rows that belong to a group: half in a round of experts (`expert_mlp.py`), with its room."""
  return 0.5 if re.search(r'\brounds\)*/', hlo.op_name(op)) else 1.0


def _rows_by_groups(op: hlo.Op, given: list[hlo.Array]) -> tuple[float, float]:
  """(FLOPs, bytes) of `_groups`, which reads no matrix of a group without rows, for a uniform router."""
  x, w = given[:2]
  unused = (1 - 1 / w.dims[0]) ** (_share_of_rows(op) * x.dims[0])
  return _groups(op, x)[0], -unused * w.bytes


def _groups_of_rows(op: hlo.Op, given: list[hlo.Array]) -> tuple[float, float]:
  """(FLOPs, extra bytes) of the gradient of the matrices from rows [N, D] and gradients [N, F]."""
  x, g = given[:2]
  return 2.0 * _share_of_rows(op) * math.prod(x.dims) * g.dims[-1], 0.0


def _splash(op: hlo.Op, kind: str, given) -> tuple[float, float]:
  """(FLOPs, bytes) of splash attention over the blocks that mask and window leave; [B, H, T, h], or one row."""
  # Blocks of queries and of keys. Where a kernel goes through them by query, `across` leaves out what the mask does;
  # where it goes through them by key, `down` does.
  down, across = given[0].dims[-2:]
  q, k, v = [a for a in given if a.dtype in ('bf16', 'f32') and len(a.dims) >= 3][:3]
  rows, (heads, length, size) = math.prod(q.dims[:-3]), q.dims[-3:]
  keys, values = k.dims[-2], v.dims[-1]
  block = keys // across if kind == 'dkv' else length // down
  ((n, window),) = re.findall(r'attention_stripes_(\d+)_window_(\d+)', hlo.op_name(op))
  pairs = rows * heads * splash_blocks(length, keys, block, int(n), int(window))
  with_h, with_hv = _SPLASH[kind]
  flops = 2.0 * pairs * block**2 * (with_h * size + with_hv * values)
  moved = pairs * block * (size + values) * (q.bytes // math.prod(q.dims))
  once = v.bytes / values * (size + values)  # which is counted already
  return flops, max(0.0, moved - once)


def splash_blocks(queries: int, keys: int, block: int, n: int, window: int) -> int:
  """Pairs of blocks with a query that sees a key, in a row of n stripes.

  Query j is where key n j + n - 1 is, see `flash.splash`.
  """
  pairs = 0
  for start in range(0, queries, block):
    first, last = n * start + n - 1, n * (start + block) - 1
    pairs += min(last, keys - 1) // block + 1
    pairs -= max(0, first - window + 1) // block if window else 0
  return pairs


def _causal(products: tuple[int, int], window: int, given: list[hlo.Array]) -> tuple[float, float]:
  """(FLOPs, bytes) of attention on GPUs over the causal half or the window, for rows of one document."""
  q, _, v = [a for a in given if len(a.dims) == 4][:3]
  rows, length, heads, size = q.dims
  window = min(window or length, length)
  pairs = window * (window + 1) / 2 + (length - window) * window
  return 2.0 * rows * heads * pairs * (products[0] * size + products[1] * v.dims[-1]), 0.0


def _decode(given: list[hlo.Array], window: int, filled: int) -> tuple[float, float]:
  """(FLOPs, bytes) of a token of each slot over what is filled of its cache, in the window; no other slot is read."""
  q, k, v = given[:3]
  slots, heads, group, size = q.dims
  entries = min(n for n in (k.dims[2], window, filled) if n)
  flops = 2.0 * slots * heads * group * entries * (size + v.dims[-1])
  return flops, -(1 - slots / k.dims[0] * entries / k.dims[2]) * (k.bytes + v.bytes)
