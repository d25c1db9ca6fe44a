"""FLOPs, memory traffic and collectives of a compiled program, counted from its HLO.

XLA's own cost analysis counts the body of a loop once. Here it counts as
often as the loop runs, so that a scanned layer costs what all layers cost.
Figures are those of one device.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from jaxpost.planning import hlo, kernels

# Written in place: the input that holds what is new.
_IN_PLACE = {'dynamic-update-slice': 1, 'scatter': 2}
# These move nothing: names, or halves of what was counted where it started.
_FREE = frozenset(
  """parameter constant tuple get-tuple-element bitcast while
    conditional call after-all partition-id replica-id iota opt-barrier
    async-update add-dependency""".split()
)


@dataclasses.dataclass
class Totals:
  """Costs of a program on one device.

  flops: of products, convolutions and kernels of attention. bytes: through
  main memory. cycles: XLA's estimate, where it writes one. collectives:
  {(kind, group): [bytes on the wire, number]}; group is a tuple of device
  positions.
  unknown: loops whose number of iterations is not known.
  """

  flops: float = 0.0
  bytes: float = 0.0
  cycles: float = 0.0
  collectives: dict = dataclasses.field(default_factory=dict)
  unknown: tuple = ()

  def add(self, other: 'Totals', times: float = 1):
    self.flops += times * other.flops
    self.bytes += times * other.bytes
    self.cycles += times * other.cycles
    self.unknown += other.unknown
    for key, (size, number) in other.collectives.items():
      mine = self.collectives.setdefault(key, [0, 0])
      mine[0] += times * size
      mine[1] += times * number


def count(text: str, turns: Callable = lambda name: None, share: Callable = lambda number: 1.0) -> Totals:
  """Totals of a compiled program.

  Args:
    text: `compiled.as_text()`.
    turns: the name of a loop whose end is decided while it runs (its
      `op_name`) -> how often it runs at most, or None.
    share: how much of what it may send a ragged exchange between so many
      devices sends.
  """
  return _Counter(text, turns, share).total()


class _Counter:
  """One walk over the computations of a program."""

  def __init__(self, text, turns, share):
    self.share = share
    self.computations, self.entry = hlo.parse(text)
    self.turns = turns
    self.callers = {}  # computation -> (computation, hlo.Op) that runs it
    for name, ops in self.computations.items():
      for op in ops.values():
        for called in self.called(op):
          self.callers.setdefault(called, (name, op))
    self.totals = functools.cache(self._totals)

  def total(self) -> Totals:
    return self.totals(self.entry)

  def called(self, op: hlo.Op) -> list[str]:
    """Computations that an instruction runs; not those of a reduction."""
    if op.kind == 'while':
      return [op.attribute('body').lstrip('%')]
    if op.kind == 'conditional':
      branches = op.attribute('branch_computations') or (
        f'{op.attribute("true_computation")} {op.attribute("false_computation")}'
      )
      return re.findall(r'[\w.\-]+', branches)
    if op.kind == 'call':
      return [op.attribute('to_apply').lstrip('%')]
    if op.kind in ('fusion', 'async-start'):
      return [op.attribute('calls').lstrip('%')]
    return []

  def _totals(self, name: str, fused: bool = False) -> Totals:
    out, ops = Totals(), self.computations.get(name, {})
    for op in ops.values():
      called = self.called(op)
      if op.kind == 'conditional':  # the rest is for what a kernel cannot do
        called = [c for c in called if any(map(kernels.is_one, self.computations[c].values()))] or called
      inner = [self.totals(c, op.kind == 'fusion') for c in called]
      if op.kind == 'conditional':  # the branch that does the most
        inner = [max(inner, key=lambda t: t.flops + t.bytes, default=Totals())]
      times = self.trips(name, op) if op.kind == 'while' else 1
      if times is None:
        times, out.unknown = 1, (*out.unknown, hlo.op_name(op))
      for part in inner:
        out.add(part, times)
      out.flops += self.flops(ops, op)
      if found := re.search(r'"estimated_cycles":"(\d+)"', op.text):
        out.cycles += int(found[1]) * (not fused)
      if kind := hlo.collective(op):
        self.collect(out, ops, op, kind, fused)
      flops, moved = kernels.cost(op, [a for name in op.inputs if name in ops for a in ops[name].arrays])
      out.flops += flops
      if not fused:
        out.bytes += self.traffic(ops, op) + moved
    return out

  # ------------------------------------------------------------ matrix work

  def flops(self, ops, op: hlo.Op) -> float:
    if op.kind == 'dot':
      left = self.shape(ops, op, 0)
      inner = [left.dims[i] for i in op.numbers('lhs_contracting_dims')]
      return 2.0 * math.prod(op.arrays[0].dims) * math.prod(inner)
    if op.kind == 'convolution':
      return _convolution(op, self.shape(ops, op, 0), self.shape(ops, op, 1))
    if op.kind == 'custom-call' and '__cublas' in op.text:
      found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.text)
      left = self.shape(ops, op, 0)
      inner = [left.dims[int(i)] for i in re.findall(r'\d+', found[1] if found else '')]
      return 2.0 * math.prod(op.arrays[0].dims) * math.prod(inner)
    return 0.0

  def shape(self, ops, op: hlo.Op, number: int) -> hlo.Array:
    return ops[op.inputs[number]].arrays[0]

  # ------------------------------------------------------------ main memory

  def traffic(self, ops, op: hlo.Op) -> float:
    """Bytes that an instruction reads from and writes to main memory."""
    if op.kind in _FREE or op.kind.endswith('-done'):
      return 0.0
    results = op.arrays
    if op.kind == 'slice-start':  # (source, destination, context)
      return sum(op.arrays[1].bytes for end in (self.shape(ops, op, 0), op.arrays[1]) if not end.fast)
    if op.kind.endswith('-start'):  # (destination, source, context)
      results = results[:1]
    if op.kind in _IN_PLACE:
      return 2.0 * _slow([self.shape(ops, op, _IN_PLACE[op.kind])])
    if op.kind in ('dynamic-slice', 'gather', 'slice'):
      return 2.0 * _slow(results)
    reads = 0.0
    parts = self.computations.get(op.attribute('calls').lstrip('%'), {}) if op.kind == 'fusion' else {}
    for i, name in enumerate(op.inputs):
      given = ops[name].arrays if name in ops else ()
      reads += min(_slow(given), self.touched(parts, i, _slow(given)))
    written = _slow(results)
    for inner in parts.values():  # in place
      if inner.root and inner.kind in _IN_PLACE:
        written = min(written, parts[inner.inputs[_IN_PLACE[inner.kind]]].arrays[0].bytes)
    return reads + written

  def touched(self, parts: dict, number: int, default: float) -> float:
    """Bytes of an argument of a fusion that it looks at: slices, or all."""
    names = {o.name for o in parts.values() if o.kind == 'parameter' and o.inner == str(number)}
    size = 0.0 if parts else default
    for op in parts.values():
      if not names & set(op.inputs):
        continue
      if op.kind in ('bitcast', 'convert', 'copy'):
        names.add(op.name)
      elif op.kind in ('dynamic-slice', 'gather', 'slice') and (op.inputs[0] in names):
        size += op.arrays[0].bytes
      elif op.kind in _IN_PLACE and op.inputs[0] in names:
        size += parts[op.inputs[_IN_PLACE[op.kind]]].arrays[0].bytes
      elif op.kind == 'fusion':  # in a fusion
        inner = self.computations[op.attribute('calls').lstrip('%')]
        size += sum(self.touched(inner, i, default) for i, name in enumerate(op.inputs) if name in names)
      else:
        return default
    return size

  # -------------------------------------------------------------- the network

  def collect(self, out: Totals, ops, op: hlo.Op, kind: str, fused: bool):
    if 'chain_id=' in op.text and not any(
      op.name in o.inputs and '"AsyncCollectiveStart"' in o.text for o in ops.values()
    ):
      return  # XLA for TPU names it in all that overlaps with it
    group = hlo.group_of(op)
    number = len(group) if kind != 'collective-permute' else 2
    if number < 2:
      return
    ragged = kind == 'ragged-all-to-all'  # then follow places and sizes
    size = sum(a.bytes for name in op.inputs[: 1 if ragged else None] if name in ops for a in ops[name].arrays)
    size *= self.share(number) if ragged else 1
    if kind == 'all-reduce' and fused and any(o.kind == 'dynamic-slice' for o in ops.values()):
      kind = 'reduce-scatter'  # as XLA for TPU writes it
    factor = {'all-gather': number - 1, 'all-reduce': 2 * (number - 1) / number, 'collective-permute': 1}.get(
      kind, (number - 1) / number
    )
    mine = out.collectives.setdefault((kind, group), [0, 0])
    mine[0] += size * factor
    mine[1] += 1

  # --------------------------------------------------------------- loop turns

  def trips(self, caller: str, op: hlo.Op) -> int | None:
    """How often a loop runs; None where only the run decides it."""
    known = re.search(r'known_trip_count\W+n\W+(\d+)', op.text)
    if known:
      return int(known[1])
    ops = self.computations[op.attribute('condition').lstrip('%')]
    ends = [o for o in ops.values() if o.kind == 'compare']
    root = next(o for o in ops.values() if o.root)
    if root.kind == 'fusion':
      inner = self.computations[root.attribute('calls').lstrip('%')]
      ends = [o for o in inner.values() if o.kind == 'compare']
    if len(ends) == 1:
      index = self.counter(ops, root, ends[0])
      if index is not None:
        first = self.initial(caller, op, index)
        step = self.step(op, index, first)
        last = self.bound(caller, op, ops, root, ends[0])
        if None not in (first, step, last) and step > 0:
          inclusive = 'direction=LE' in ends[0].text
          return max(0, math.ceil((last + inclusive - first) / step))
    return self.turns(hlo.op_name(op))

  def sources(self, ops, root: hlo.Op, end: hlo.Op) -> list[hlo.Op | None]:
    """The operations on both sides of a comparison, inside the condition."""
    out = []
    for name in end.inputs:
      if root.kind == 'fusion':
        inner = self.computations[root.attribute('calls').lstrip('%')]
        source = inner[name]
        if source.kind == 'parameter':
          source = ops.get(root.inputs[int(source.inner)])
      else:
        source = ops.get(name)
      while source and source.kind in ('bitcast', 'copy', 'convert'):
        source = ops.get(source.inputs[0])
      out.append(source)
    return out

  def counter(self, ops, root: hlo.Op, end: hlo.Op) -> int | None:
    left = self.sources(ops, root, end)[0]
    if left is None or left.kind != 'get-tuple-element':
      return None
    return int(left.attribute('index'))

  def bound(self, caller, loop: hlo.Op, ops, root: hlo.Op, end: hlo.Op) -> int | None:
    right = self.sources(ops, root, end)[1]
    if right is None:
      return None
    if right.kind == 'constant':
      return hlo.constant(right)
    if right.kind == 'get-tuple-element':
      return self.initial(caller, loop, int(right.attribute('index')))
    return None

  def initial(self, caller: str, loop: hlo.Op, index: int) -> int | None:
    return self.field(caller, loop.inputs[0], index)

  def field(self, name: str, value: str, index: int) -> int | None:
    """The number in place `index` of a tuple, if it is the same always."""
    ops = self.computations[name]
    op = ops.get(value)
    while op and op.kind in ('copy', 'opt-barrier'):
      op = ops.get(op.inputs[0])
    if op is None:
      return None
    if op.kind == 'tuple':
      return self.number(name, op.inputs[index], {})
    if op.kind == 'parameter' and name in self.callers:
      outer, call = self.callers[name]
      if call.kind == 'while':
        return self.field(outer, call.inputs[0], index)
    return None

  def step(self, loop: hlo.Op, index: int, first: int | None) -> int | None:
    """How much a turn adds to the counter."""
    body = loop.attribute('body').lstrip('%')
    ops = self.computations[body]
    root = next(o for o in ops.values() if o.root)
    if root.kind != 'tuple' or first is None:
      return None
    after = self.number(body, root.inputs[index], {index: first})
    return None if after is None else after - first

  def number(self, name: str, value: str, state: dict) -> int | None:
    """A scalar that depends on constants and `state`, the loop's fields."""
    ops = self.computations[name]
    op = ops.get(value)
    if op is None:
      return None
    again = lambda i: self.number(name, op.inputs[i], state)
    if op.kind == 'constant':
      return hlo.constant(op)
    if op.kind in ('copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start'):
      return again(0)
    if op.kind == 'get-tuple-element':
      index, source = int(op.attribute('index')), ops.get(op.inputs[0])
      if source and source.kind == 'parameter':
        if index in state:
          return state[index]
        return self.field(name, source.name, index)
      return self.field(name, op.inputs[0], index)
    if op.kind == 'add' or op.kind == 'subtract':
      pair = again(0), again(1)
      if None in pair:
        return None
      return pair[0] + (pair[1] if op.kind == 'add' else -pair[1])
    if op.kind == 'fusion':
      return self.fused_number(name, op, state)
    return None

  def fused_number(self, name, op: hlo.Op, state) -> int | None:
    inner = self.computations[op.attribute('calls').lstrip('%')]

    def value(o: hlo.Op):
      if o.kind == 'parameter':
        return self.number(name, op.inputs[int(o.inner)], state)
      if o.kind == 'constant':
        return hlo.constant(o)
      given = [value(inner[i]) for i in o.inputs]
      if None in given or o.kind not in ('add', 'subtract', 'copy', 'bitcast'):
        return None
      return {'add': sum(given), 'subtract': given[0] - given[-1]}.get(o.kind, given[0])

    return value(next(o for o in inner.values() if o.root))


def _slow(given: Sequence[hlo.Array]) -> float:
  return float(sum(a.bytes for a in given if not a.fast))


def _convolution(op: hlo.Op, left: hlo.Array, right: hlo.Array) -> float:
  """Products of a convolution that meet an element, not padding or holes."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', op.text)
  inputs, kernel, result = labels[1], labels[2], labels[3]
  window = re.search(r'window=\{([^}]*)\}', op.text)
  fields = dict(re.findall(r'(\w+)=([\w\-]+)', window[1] if window else ''))
  split = lambda name: fields[name].split('x') if name in fields else None
  spatial = sorted(c for c in inputs if c.isdigit())
  pairs = 1.0
  for d in spatial:
    i = int(d)
    size = right.dims[kernel.index(d)]
    low = int((split('pad') or ['0_0'] * 9)[i].split('_')[0])
    stride, wide, holes = (int((split(n) or ['1'] * 9)[i]) for n in ('stride', 'lhs_dilate', 'rhs_dilate'))
    length = left.dims[inputs.index(d)]
    out = np.arange(op.arrays[0].dims[result.index(d)])[:, None] * stride
    at = out + np.arange(size) * holes - low
    good = (at >= 0) & (at % wide == 0) & (at // wide < length)
    pairs *= float(good.sum())
  groups = (op.numbers('batch_group_count') or [1])[0]
  return (
    2.0
    * pairs
    * left.dims[inputs.index('b')]
    / groups
    * (right.dims[kernel.index('i')] * right.dims[kernel.index('o')])
  )


def by_axis(totals: Totals, mesh) -> dict:
  """{kind: {axes: [bytes, number, a group]}}; axes such as 'fsdp' or
  'data+fsdp', those along which the members of a group differ."""
  shape, out = tuple(mesh.shape.values()), collections.defaultdict(dict)
  for (kind, group), (size, number) in totals.collectives.items():
    places = np.array(np.unravel_index(group, shape))
    axes = '+'.join(name for name, row in zip(mesh.shape, places) if len(set(row)) > 1)
    mine = out[kind].setdefault(axes, [0, 0, group])
    mine[0] += size
    mine[1] += number
  return dict(out)
