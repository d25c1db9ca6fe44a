"""FLOPs, memory traffic and collectives of a compiled program, counted from its HLO.

XLA's own cost analysis counts the body of a loop once. Here it counts as often as the loop runs, so that a scan over
layers costs as much as all layers. Figures are those of one device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.planning import hlo, kernels
from jaxpost.planning.loop_trips import Loops

if TYPE_CHECKING:
  import jax

_FUSIONS = 'fusion', 'fusion-start'  # the second is asynchronous: ((arguments), results, context)
# Operations that write in place -> index of the input with the new values.
_IN_PLACE = {'dynamic-update-slice': 1, 'scatter': 2}
_SAME = 'bitcast', 'convert', 'copy'  # inside a fusion these name the elements of their input anew
# These move nothing: names, or second halves of asynchronous operations, which count at their start.
_FREE = frozenset(
  """parameter constant tuple get-tuple-element bitcast while
    conditional call after-all partition-id replica-id iota opt-barrier
    async-update add-dependency""".split()
)


@dataclasses.dataclass
class Totals:
  """Costs of a program on one device.

  flops: of products, convolutions and kernels. bytes: through main memory.
  cycles: XLA's estimate of all but kernels, if it writes one.
  collectives: {(kind, group): [bytes that a device receives, number]}; group is a tuple of device positions.
  unknown: op_names of loops whose number of iterations is not known.
  kernel_flops, kernel_bytes: the parts of kernels in flops and bytes.
  """

  flops: float = 0.0
  bytes: float = 0.0
  cycles: float = 0.0
  collectives: dict = dataclasses.field(default_factory=dict)
  unknown: tuple = ()
  kernel_flops: float = 0.0
  kernel_bytes: float = 0.0

  def add(self, other: Totals, times: float = 1) -> None:
    """Adds the costs of a computation that runs `times` times."""
    for name in ('flops', 'bytes', 'kernel_flops', 'kernel_bytes', 'cycles'):
      setattr(self, name, getattr(self, name) + times * getattr(other, name))
    self.unknown += other.unknown
    for key, (size, number) in other.collectives.items():
      total = self.collectives.setdefault(key, [0, 0])
      total[0] += times * size
      total[1] += times * number


def count(
  text: str,
  iterations: Callable[[str], int | None] = lambda name: None,
  sent_share: Callable[[int], float] = lambda number: 1.0,
  branch: Callable[[str], bool | None] = lambda name: None,
  filled: int = 0,
) -> Totals:
  """Returns the totals of a compiled program.

  Args:
    text: `compiled.as_text()`.
    iterations: `op_name` of a loop whose end depends on data -> its largest number of iterations, or None.
    sent_share: number of devices -> the share of its buffer that a ragged exchange between them sends.
    branch: `op_name` of a condition -> its value, or None to count the costlier branch.
    filled: filled entries of a slot's cache that a decoding kernel reads; 0: all.
  """
  return _Counter(text, iterations, sent_share, branch, filled).total()


class _Counter:
  """One walk over the computations of a program."""

  def __init__(self, text: str, iterations: Callable, sent_share: Callable, branch: Callable, filled: int):
    self.sent_share = sent_share
    self.branch = branch
    self.filled = filled
    self.computations, self.entry = hlo.parse(text)
    callers: dict[str, tuple[str, hlo.Op]] = {}  # computation -> (computation, instruction) that runs it
    for name, ops in self.computations.items():
      for op in ops.values():
        for called in self.called(op):
          callers.setdefault(called, (name, op))
    self.loops = Loops(self.computations, callers, iterations)
    self.totals = functools.cache(self._totals)

  def total(self) -> Totals:
    return self.totals(self.entry)

  def called(self, op: hlo.Op) -> list[str]:
    """Returns the computations that an instruction runs, except those of a reduction."""
    if op.kind == 'while':
      return [op.computation('body')]
    if op.kind == 'conditional':
      branches = op.attribute('branch_computations') or (
        f'{op.attribute("true_computation")} {op.attribute("false_computation")}'
      )
      return re.findall(r'[\w.\-]+', branches)
    if op.kind == 'call':
      return [op.computation('to_apply')]
    if op.kind in (*_FUSIONS, 'async-start'):
      return [op.computation('calls')]
    return []

  def _totals(self, name: str, fused: bool = False) -> Totals:
    out = Totals()
    ops = self.computations.get(name, {})
    for op in ops.values():
      times = self.loops.trips(name, op) if op.kind == 'while' else 1
      if times is None:
        times = 1
        out.unknown = (*out.unknown, hlo.op_name(op))
      for part in self.inner(op):
        out.add(part, times)
      self.add_own(out, ops, op, fused)
    return out

  def inner(self, op: hlo.Op) -> list[Totals]:
    """Returns the totals of the computations that an instruction runs; of a condition, those of one branch."""
    called = self.called(op)
    if op.kind != 'conditional':
      return [self.totals(c, op.kind in _FUSIONS) for c in called]
    # Branches without the kernel are for shapes that it does not support.
    with_kernel = [c for c in called if any(map(kernels.is_one, self.computations[c].values()))]
    branches = [self.totals(c, False) for c in self.taken(op, with_kernel or called)]
    return [max(branches, key=lambda t: t.flops + t.bytes, default=Totals())]

  def add_own(self, out: Totals, ops: dict[str, hlo.Op], op: hlo.Op, fused: bool) -> None:
    """Adds what an instruction itself costs; inside a fusion nothing goes through main memory."""
    out.flops += self.flops(ops, op)
    if kind := hlo.collective(op):
      self.collect(out, ops, op, kind, fused)
    flops, moved = kernels.cost(op, [a for name in op.inputs if name in ops for a in ops[name].arrays], self.filled)
    out.flops += flops
    if fused:
      return
    moved += self.traffic(ops, op)
    out.bytes += moved
    if match := re.search(r'"estimated_cycles":"(\d+)"', op.text):
      out.cycles += int(match[1])
    elif kernels.is_one(op):
      out.kernel_flops += flops
      out.kernel_bytes += moved

  def taken(self, op: hlo.Op, branches: list[str]) -> list[str]:
    """Returns the branch that a condition of known value takes, or all of them."""
    value = self.branch(hlo.op_name(op))
    if value is None or len(branches) != 2:
      return branches
    first = op.computation('true_computation') == branches[0]  # numbered branches start with False
    return branches[:1] if value == first else branches[1:]

  # ------------------------------------------------------------ matrix work

  def flops(self, ops: dict[str, hlo.Op], op: hlo.Op) -> float:
    if op.kind == 'convolution':
      return _convolution(op, self.shape(ops, op, 0), self.shape(ops, op, 1))
    if op.kind == 'dot':
      contracted = op.numbers('lhs_contracting_dims')
    elif op.kind == 'custom-call' and '__cublas' in op.text:
      match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.text)
      contracted = [int(i) for i in re.findall(r'\d+', match[1] if match else '')]
    else:
      return 0.0
    lhs = self.shape(ops, op, 0)
    return 2.0 * math.prod(op.arrays[0].dims) * math.prod(lhs.dims[i] for i in contracted)

  def shape(self, ops: dict[str, hlo.Op], op: hlo.Op, number: int) -> hlo.Array:
    return ops[op.inputs[number]].arrays[0]

  # ------------------------------------------------------------ main memory

  def traffic(self, ops: dict[str, hlo.Op], op: hlo.Op) -> float:
    """Returns the bytes that an instruction reads from and writes to main memory."""
    if op.kind in _FREE or op.kind.endswith('-done'):
      return 0.0
    results = op.arrays
    if op.kind == 'slice-start':  # (source, destination, context)
      ends = (self.shape(ops, op, 0), op.arrays[1])
      return sum(op.arrays[1].bytes for end in ends if not end.fast)  # read, and written
    if op.kind == 'fusion-start':
      results = results[sum(len(ops[name].arrays) for name in op.inputs) : -1]
    elif op.kind.endswith('-start'):  # (destination, source, context)
      results = results[:1]
    if op.kind in _IN_PLACE:
      return 2.0 * _slow([self.shape(ops, op, _IN_PLACE[op.kind])])
    if op.kind in ('dynamic-slice', 'gather', 'slice'):
      return 2.0 * _slow(results)
    reads = 0.0
    parts = self.computations.get(op.computation('calls'), {}) if op.kind in _FUSIONS else {}
    for i, name in enumerate(op.inputs):
      arrays = ops[name].arrays if name in ops else ()
      reads += min(_slow(arrays), self.touched(parts, i, _slow(arrays)))
    written = _slow(results)
    for inner in parts.values():  # a fusion that ends in an update writes only what is new
      if inner.root and inner.kind in _IN_PLACE:
        written = min(written, parts[inner.inputs[_IN_PLACE[inner.kind]]].arrays[0].bytes)
    return reads + written

  def touched(self, parts: dict, number: int, default: float) -> float:
    """Returns the bytes that a fusion reads of an argument: those of slices, or `default` for all."""
    names = {o.name for o in parts.values() if o.kind == 'parameter' and o.inner == str(number)}
    size = 0.0 if parts else default
    for op in parts.values():
      if not names & set(op.inputs):
        continue
      nested = self.computations[op.computation('calls')] if op.kind == 'fusion' else {}
      if op.kind in _SAME or nested and all(o.kind in ('parameter', *_SAME) for o in nested.values()):
        if op.root:  # the whole argument is the result
          return default
        names.add(op.name)
      elif op.kind in ('dynamic-slice', 'gather', 'slice') and (op.inputs[0] in names):
        size += op.arrays[0].bytes
      elif op.kind in _IN_PLACE and op.inputs[0] in names:
        size += parts[op.inputs[_IN_PLACE[op.kind]]].arrays[0].bytes
      elif nested:
        size += sum(self.touched(nested, i, default) for i, name in enumerate(op.inputs) if name in names)
      else:
        return default
    return size

  # -------------------------------------------------------------- the network

  def collect(self, out: Totals, ops: dict[str, hlo.Op], op: hlo.Op, kind: str, fused: bool) -> None:
    """Adds the bytes that a device receives in a collective."""
    if 'chain_id=' in op.text and not any(
      op.name in o.inputs and '"AsyncCollectiveStart"' in o.text for o in ops.values()
    ):
      return  # XLA for TPU repeats a collective in every computation that overlaps with it
    group = hlo.group_of(op)
    number = len(group) if kind != 'collective-permute' else 2
    if number < 2:
      return
    ragged = kind == 'ragged-all-to-all'  # only its first input is data, the others are offsets and sizes
    size = sum(a.bytes for name in op.inputs[: 1 if ragged else None] if name in ops for a in ops[name].arrays)
    size *= self.sent_share(number) if ragged else 1
    if kind == 'all-reduce' and fused and any(o.kind == 'dynamic-slice' for o in ops.values()):
      kind = 'reduce-scatter'  # as XLA for TPU writes it
    # Bytes that a device of a ring receives, per byte of its input.
    share = (number - 1) / number
    factor = {'all-gather': number - 1, 'all-reduce': 2 * share, 'collective-permute': 1}.get(kind, share)
    total = out.collectives.setdefault((kind, group), [0, 0])
    total[0] += size * factor
    total[1] += 1


def _slow(arrays: Sequence[hlo.Array]) -> float:
  """Returns the bytes of arrays in main memory."""
  return float(sum(a.bytes for a in arrays if not a.fast))


def _convolution(op: hlo.Op, lhs: hlo.Array, rhs: hlo.Array) -> float:
  """Returns the FLOPs of a convolution: products with elements of the input, not with padding or dilation holes."""
  # The letters of dimensions, such as b01f_01io->b01f.
  ((inputs, kernel, result),) = re.findall(r'dim_labels=(\w+)_(\w+)->(\w+)', op.text)
  window = re.search(r'window=\{([^}]*)\}', op.text)
  fields = dict(re.findall(r'(\w+)=([\w\-]+)', window[1] if window else ''))

  def of_dimension(name: str, number: int, default: str) -> str:
    return fields[name].split('x')[number] if name in fields else default

  spatial = sorted(c for c in inputs if c.isdigit())
  pairs = 1.0
  for letter in spatial:
    i = int(letter)
    size = rhs.dims[kernel.index(letter)]
    padding = int(of_dimension('pad', i, '0_0').split('_')[0])
    stride, lhs_dilation, rhs_dilation = (int(of_dimension(n, i, '1')) for n in ('stride', 'lhs_dilate', 'rhs_dilate'))
    length = lhs.dims[inputs.index(letter)]
    # Pairs of an output and a kernel position that read an element of the input.
    starts = np.arange(op.arrays[0].dims[result.index(letter)])[:, None] * stride
    positions = starts + np.arange(size) * rhs_dilation - padding
    valid = (positions >= 0) & (positions % lhs_dilation == 0) & (positions // lhs_dilation < length)
    pairs *= float(valid.sum())
  groups = (op.numbers('batch_group_count') or [1])[0]
  return (
    2.0 * pairs * lhs.dims[inputs.index('b')] / groups * (rhs.dims[kernel.index('i')] * rhs.dims[kernel.index('o')])
  )


def by_axis(totals: Totals, mesh: jax.sharding.Mesh) -> dict[str, dict[str, list]]:
  """Returns {kind: {axes: [bytes, number, a group]}} of the collectives.

  Axes such as 'fsdp' or 'data+fsdp' are those along which the members of a group differ.
  """
  shape = tuple(mesh.shape.values())
  out: dict[str, dict[str, list]] = collections.defaultdict(dict)
  for (kind, group), (size, number) in totals.collectives.items():
    positions = np.array(np.unravel_index(group, shape))
    axes = '+'.join(name for name, row in zip(mesh.shape, positions) if len(set(row)) > 1)
    entry = out[kind].setdefault(axes, [0, 0, group])
    entry[0] += size
    entry[1] += number
  return dict(out)
