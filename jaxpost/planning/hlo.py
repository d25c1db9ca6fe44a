"""What a compiled program does, counted from XLA's text of it.

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

_BITS = {
    'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 'f8e4m3fn': 8, 'f8e5m2': 8,
    's16': 16, 'u16': 16, 'f16': 16, 'bf16': 16, 's32': 32, 'u32': 32,
    'f32': 32, 's64': 64, 'u64': 64, 'f64': 64, 'c64': 64, 'c128': 128}
_COLLECTIVE = re.compile(
    '(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
    '|collective-broadcast|ragged-all-to-all)(-start)?$')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?')
# Written in place: the input that holds what is new.
_IN_PLACE = {'dynamic-update-slice': 1, 'scatter': 2}
# These move nothing: names, or halves of what was counted where it started.
_FREE = frozenset('''parameter constant tuple get-tuple-element bitcast while
    conditional call after-all partition-id replica-id iota opt-barrier
    async-update add-dependency'''.split())


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a shape as XLA writes it: f32[2,3]{1,0:S(1)}."""

  dtype: str
  dims: tuple[int, ...]
  fast: bool  # in a memory on the chip that is not its main one

  @property
  def bytes(self) -> int:
    return math.prod(self.dims) * _BITS.get(self.dtype, 0) // 8


@dataclasses.dataclass(frozen=True)
class Op:
  """One instruction."""

  name: str
  kind: str
  arrays: tuple[Array, ...]  # of the result
  inputs: tuple[str, ...]
  text: str  # all that follows the inputs
  inner: str  # between the parentheses
  root: bool

  def attribute(self, name: str) -> str:
    """The text of `name=...`: a word, or what stands in braces."""
    found = re.search(
        rf'(?<![\w]){name}=(\{{[^{{}}]*\}}|[%\w.\-:>]+)', self.text)
    return found[1] if found else ''

  def numbers(self, name: str) -> list[int]:
    return [int(n) for n in re.findall(r'\d+', self.attribute(name))]


@dataclasses.dataclass
class Totals:
  """What a program costs one device.

  flops: of matrix products and convolutions. bytes: through main memory.
  cycles: XLA's estimate, where it writes one. collectives: {(kind, group):
  [bytes on the wire, number]}; group is a tuple of device positions.
  unknown: loops whose number of turns nobody could tell.
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


def arrays(text: str) -> tuple[Array, ...]:
  """The arrays in a shape; tokens and contexts have no dimensions."""
  return tuple(
      Array(kind, tuple(int(n) for n in dims.split(',') if n),
            'S(1)' in (layout or ''))
      for kind, dims, layout in _ARRAY.findall(text) if kind in _BITS)


def parse(text: str) -> tuple[dict[str, dict[str, Op]], str]:
  """({computation: {name: Op}}, the name of the entry)."""
  found, ops, entry = {}, None, ''
  for line in text.splitlines():
    if line.endswith('{') and ' -> ' in line and ' = ' not in line[:line.find(
        '(')]:
      head = line.split('(')[0].split()
      name = head[-1].lstrip('%')
      entry = name if head[0] == 'ENTRY' else entry
      ops = found[name] = {}
    elif ops is not None and ' = ' in line:
      op = _op(line.strip())
      if op:
        ops[op.name] = op
  return found, entry


def _op(line: str) -> Op | None:
  name, _, rest = line.removeprefix('ROOT ').partition(' = ')
  end = _close(rest) if rest.startswith('(') else rest.find(' ')
  shape, rest = rest[:end], rest[end:].lstrip()
  start = rest.find('(')
  if start < 0:
    return None
  stop = start + _close(rest[start:])
  inner = rest[start + 1:stop - 1]
  return Op(name.lstrip('%'), rest[:start], arrays(shape),
            tuple(re.findall(r'%([\w.\-]+)', inner)), rest[stop:], inner,
            line.startswith('ROOT '))


def _close(text: str) -> int:
  """The place after the parenthesis that closes the first one."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c == '(') - (c == ')')
    if not depth:
      return i + 1
  return len(text)


def count(text: str, turns: Callable = lambda name: None) -> Totals:
  """Totals of a compiled program.

  Args:
    text: `compiled.as_text()`.
    turns: the name of a loop whose end is decided while it runs (its
      `op_name`) -> how often it runs at most, or None.
  """
  return _Counter(text, turns).total()


class _Counter:
  """One walk over the computations of a program."""

  def __init__(self, text, turns):
    self.computations, self.entry = parse(text)
    self.turns = turns
    self.callers = {}  # computation -> (computation, Op) that runs it
    for name, ops in self.computations.items():
      for op in ops.values():
        for called in self.called(op):
          self.callers.setdefault(called, (name, op))
    self.totals = functools.cache(self._totals)

  def total(self) -> Totals:
    return self.totals(self.entry)

  def called(self, op: Op) -> list[str]:
    """Computations that an instruction runs; not those of a reduction."""
    if op.kind == 'while':
      return [op.attribute('body').lstrip('%')]
    if op.kind == 'conditional':
      branches = op.attribute('branch_computations') or (
          f'{op.attribute("true_computation")} '
          f'{op.attribute("false_computation")}')
      return re.findall(r'[\w.\-]+', branches)
    if op.kind == 'call':
      return [op.attribute('to_apply').lstrip('%')]
    if op.kind in ('fusion', 'async-start'):
      return [op.attribute('calls').lstrip('%')]
    return []

  def _totals(self, name: str, fused: bool = False) -> Totals:
    out, ops = Totals(), self.computations.get(name, {})
    for op in ops.values():
      inner = [self.totals(c, op.kind == 'fusion') for c in self.called(op)]
      if op.kind == 'conditional':  # the branch that does the most
        inner = [max(inner, key=lambda t: t.flops + t.bytes, default=Totals())]
      times = 1
      if op.kind == 'while':
        times = self.trips(name, op)
        if times is None:
          times, out.unknown = 1, (*out.unknown, _op_name(op))
      for part in inner:
        out.add(part, times)
      out.flops += self.flops(ops, op)
      if found := re.search(r'"estimated_cycles":"(\d+)"', op.text):
        out.cycles += int(found[1]) * (not fused)
      if match := _COLLECTIVE.match(op.kind):
        self.collect(out, ops, op, match[1], fused)
      if not fused:
        out.bytes += self.traffic(ops, op)
    return out

  # ------------------------------------------------------------ matrix work

  def flops(self, ops, op: Op) -> float:
    if op.kind == 'dot':
      left = self.shape(ops, op, 0)
      inner = [left.dims[i] for i in op.numbers('lhs_contracting_dims')]
      return 2.0 * math.prod(op.arrays[0].dims) * math.prod(inner)
    if op.kind == 'convolution':
      return _convolution(op, self.shape(ops, op, 0), self.shape(ops, op, 1))
    if op.kind == 'custom-call' and '__cublas' in op.text:
      found = re.search(
          r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.text)
      left = self.shape(ops, op, 0)
      inner = [left.dims[int(i)] for i in re.findall(
          r'\d+', found[1] if found else '')]
      return 2.0 * math.prod(op.arrays[0].dims) * math.prod(inner)
    return 0.0

  def shape(self, ops, op: Op, number: int) -> Array:
    return ops[op.inputs[number]].arrays[0]

  # ------------------------------------------------------------ main memory

  def traffic(self, ops, op: Op) -> float:
    """Bytes that an instruction reads from and writes to main memory."""
    if op.kind in _FREE or op.kind.endswith('-done'):
      return 0.0
    results = op.arrays
    if op.kind.endswith('-start'):  # (destination, source, context)
      results = results[:1]
    if op.kind in _IN_PLACE:
      return 2.0 * _slow([self.shape(ops, op, _IN_PLACE[op.kind])])
    if op.kind in ('dynamic-slice', 'gather', 'slice', 'slice-start'):
      return 2.0 * _slow(results)
    reads = 0.0
    parts = self.computations.get(
        op.attribute('calls').lstrip('%'), {}) if op.kind == 'fusion' else {}
    for i, name in enumerate(op.inputs):
      given = ops[name].arrays if name in ops else ()
      reads += min(_slow(given), _touched(parts, i, _slow(given)))
    written = _slow(results)
    for inner in parts.values():  # in place
      if inner.root and inner.kind in _IN_PLACE:
        written = min(written, parts[
            inner.inputs[_IN_PLACE[inner.kind]]].arrays[0].bytes)
    return reads + written

  # -------------------------------------------------------------- the network

  def collect(self, out: Totals, ops, op: Op, kind: str, fused: bool):
    group = group_of(op)
    number = len(group) if kind != 'collective-permute' else 2
    if number < 2:
      return
    size = sum(a.bytes for name in op.inputs if name in ops
               for a in ops[name].arrays)
    if kind == 'all-reduce' and fused and any(
        o.kind == 'dynamic-slice' for o in ops.values()):
      kind = 'reduce-scatter'  # as XLA for TPU writes it
    factor = {
        'all-gather': number - 1, 'all-reduce': 2 * (number - 1) / number,
        'collective-permute': 1}.get(kind, (number - 1) / number)
    mine = out.collectives.setdefault((kind, group), [0, 0])
    mine[0] += size * factor
    mine[1] += 1

  # --------------------------------------------------------------- loop turns

  def trips(self, caller: str, op: Op) -> int | None:
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
    return self.turns(_op_name(op))

  def sources(self, ops, root: Op, end: Op) -> list[Op | None]:
    """What the two sides of a comparison are in the condition itself."""
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

  def counter(self, ops, root: Op, end: Op) -> int | None:
    left = self.sources(ops, root, end)[0]
    if left is None or left.kind != 'get-tuple-element':
      return None
    return int(left.attribute('index'))

  def bound(self, caller, loop: Op, ops, root: Op, end: Op) -> int | None:
    right = self.sources(ops, root, end)[1]
    if right is None:
      return None
    if right.kind == 'constant':
      return _constant(right)
    if right.kind == 'get-tuple-element':
      return self.initial(caller, loop, int(right.attribute('index')))
    return None

  def initial(self, caller: str, loop: Op, index: int) -> int | None:
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

  def step(self, loop: Op, index: int, first: int | None) -> int | None:
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
      return _constant(op)
    if op.kind in ('copy', 'bitcast', 'convert', 'reshape', 'copy-done',
                   'copy-start'):
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

  def fused_number(self, name, op: Op, state) -> int | None:
    inner = self.computations[op.attribute('calls').lstrip('%')]

    def value(o: Op):
      if o.kind == 'parameter':
        return self.number(name, op.inputs[int(o.inner)], state)
      if o.kind == 'constant':
        return _constant(o)
      given = [value(inner[i]) for i in o.inputs]
      if None in given or o.kind not in ('add', 'subtract', 'copy', 'bitcast'):
        return None
      return {'add': sum(given), 'subtract': given[0] - given[-1]}.get(
          o.kind, given[0])

    return value(next(o for o in inner.values() if o.root))


def _op_name(op: Op) -> str:
  found = re.search(r'op_name="([^"]*)"', op.text)
  return found[1] if found else op.name


def _constant(op: Op) -> int | None:
  return int(op.inner) if re.fullmatch(r'-?\d+', op.inner) else None


def _slow(given: Sequence[Array]) -> float:
  return float(sum(a.bytes for a in given if not a.fast))


def _touched(parts: dict, number: int, default: float) -> float:
  """Bytes of an argument of a fusion that it looks at: slices, or all."""
  if not parts:
    return default
  names = [o.name for o in parts.values()
           if o.kind == 'parameter' and o.inner == str(number)]
  size, names = 0.0, set(names)
  for op in parts.values():
    if not names & set(op.inputs):
      continue
    if op.kind in ('bitcast', 'convert', 'copy'):
      names.add(op.name)
    elif op.kind in ('dynamic-slice', 'gather', 'slice') and (
        op.inputs[0] in names):
      size += op.arrays[0].bytes
    elif op.kind in _IN_PLACE and op.inputs[0] in names:
      size += parts[op.inputs[_IN_PLACE[op.kind]]].arrays[0].bytes
    else:
      return default
  return size


def _convolution(op: Op, left: Array, right: Array) -> float:
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
    stride, wide, holes = (int((split(n) or ['1'] * 9)[i]) for n in (
        'stride', 'lhs_dilate', 'rhs_dilate'))
    length = left.dims[inputs.index(d)]
    out = np.arange(op.arrays[0].dims[result.index(d)])[:, None] * stride
    at = out + np.arange(size) * holes - low
    good = (at >= 0) & (at % wide == 0) & (at // wide < length)
    pairs *= float(good.sum())
  groups = (op.numbers('batch_group_count') or [1])[0]
  return 2.0 * pairs * left.dims[inputs.index('b')] / groups * (
      right.dims[kernel.index('i')] * right.dims[kernel.index('o')])


def group_of(op: Op) -> tuple[int, ...]:
  """The first group of devices that take part, as positions in the mesh."""
  if 'collective-permute' in op.kind:
    pairs = re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', op.text)
    return (int(pairs[1]), int(pairs[2])) if pairs else ()
  text = op.text.partition('replica_groups=')[2]
  if found := re.match(r'\{\{([\d,]*)\}', text):
    return tuple(int(n) for n in found[1].split(',') if n)
  if found := re.match(
      r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text):
    return tuple(_iota(found[2], found[3]).reshape(_ints(found[1]))[0].tolist())
  if found := re.match(r'mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))?'
                       r' ?\{([^}]*)\}', text):
    sizes = {n: int(s) for n, s in re.findall(r"'(\w+)'=(\d+)", found[1])}
    ids = np.arange(math.prod(sizes.values()))
    if order := re.match(
        r'\[([\d,]+)\](?:T\(([\d,]+)\)?)?', found[2] or ''):
      ids = _iota(order[1], order[2])
    along = re.findall(r"'(\w+)'", found[3])
    pick = tuple(slice(None) if n in along else 0 for n in sizes)
    return tuple(ids.reshape(tuple(sizes.values()))[pick].ravel().tolist())
  return ()


def _ints(text: str) -> tuple[int, ...]:
  return tuple(int(n) for n in text.split(','))


def _iota(shape: str, order: str | None) -> np.ndarray:
  """Device numbers as XLA writes them: [8,2]T(1,0), flat."""
  shape = _ints(shape)
  ids = np.arange(math.prod(shape)).reshape(shape)
  return (ids.transpose(_ints(order)) if order else ids).ravel()


def by_axis(totals: Totals, mesh) -> dict:
  """{kind: {axes: [bytes, number, a group]}}; axes such as 'fsdp' or
  'data+fsdp', those along which the members of a group differ."""
  shape, out = tuple(mesh.shape.values()), collections.defaultdict(dict)
  for (kind, group), (size, number) in totals.collectives.items():
    places = np.array(np.unravel_index(group, shape))
    axes = '+'.join(
        name for name, row in zip(mesh.shape, places) if len(set(row)) > 1)
    mine = out[kind].setdefault(axes, [0, 0, group])
    mine[0] += size
    mine[1] += number
  return dict(out)
