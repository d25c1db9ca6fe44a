"""Parses XLA's text (HLO) of a compiled program: instructions and their shapes."""

import dataclasses
import math
import re

import numpy as np

# Bits of an element -> the names of its types.
_DTYPES = {
  4: 's4 u4',
  8: 'pred s8 u8 f8e4m3fn f8e5m2',
  16: 's16 u16 f16 bf16',
  32: 's32 u32 f32',
  64: 's64 u64 f64 c64',
  128: 'c128',
}
_BITS = {name: bits for bits, names in _DTYPES.items() for name in names.split()}
_COLLECTIVE = re.compile(
  '(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
  '|collective-broadcast|ragged-all-to-all)(-start)?$'
)
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?')


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a shape, which XLA writes as f32[2,3]{1,0:S(1)}."""

  dtype: str
  dims: tuple[int, ...]
  fast: bool  # in on-chip memory, not in main memory

  @property
  def bytes(self) -> int:
    return math.prod(self.dims) * _BITS[self.dtype] // 8


@dataclasses.dataclass(frozen=True)
class Op:
  """One instruction."""

  name: str
  kind: str
  arrays: tuple[Array, ...]  # of the result
  inputs: tuple[str, ...]
  text: str  # everything after the inputs
  inner: str  # the text between the parentheses
  root: bool

  def attribute(self, name: str) -> str:
    """Returns the value of `name=...`: a word, or text in braces; '' if it is missing."""
    match = re.search(rf'(?<![\w]){name}=(\{{[^{{}}]*\}}|[%\w.\-:>]+)', self.text)
    return match[1] if match else ''

  def computation(self, name: str) -> str:
    """Returns the name of the computation in an attribute, such as `body`; '' if it is missing."""
    return self.attribute(name).lstrip('%')

  def numbers(self, name: str) -> list[int]:
    return [int(n) for n in re.findall(r'\d+', self.attribute(name))]


def arrays(text: str) -> tuple[Array, ...]:
  """Returns the arrays in the text of a shape, without tokens and contexts."""
  return tuple(
    Array(kind, tuple(int(n) for n in dims.split(',') if n), 'S(1)' in (layout or ''))
    for kind, dims, layout in _ARRAY.findall(text)
    if kind in _BITS
  )


def parse(text: str) -> tuple[dict[str, dict[str, Op]], str]:
  """Returns ({computation: {name: Op}}, name of the entry computation)."""
  computations: dict[str, dict[str, Op]] = {}
  ops: dict[str, Op] | None = None  # of the current computation
  entry = ''
  # Backend configs of kernels span several lines, which are joined.
  for line in re.sub(r'\n(?="|}})', ' ', text).splitlines():
    if line.endswith('{') and ' -> ' in line and ' = ' not in line[: line.find('(')]:
      words = line.split('(')[0].split()
      name = words[-1].lstrip('%')
      entry = name if words[0] == 'ENTRY' else entry
      ops = computations[name] = {}
    elif ops is not None and ' = ' in line:
      op = _op(line.strip())
      if op:
        ops[op.name] = op
  return computations, entry


def _op(line: str) -> Op | None:
  name, _, tail = line.removeprefix('ROOT ').partition(' = ')
  end = _close(tail) if tail.startswith('(') else tail.find(' ')
  shape, tail = tail[:end], tail[end:].lstrip()
  start = tail.find('(')
  if start < 0:
    return None
  stop = start + _close(tail[start:])
  inner = tail[start + 1 : stop - 1]
  return Op(
    name.lstrip('%'),
    tail[:start],
    arrays(shape),
    tuple(re.findall(r'%([\w.\-]+)', inner)),
    tail[stop:],
    inner=inner,
    root=line.startswith('ROOT '),
  )


def _close(text: str) -> int:
  """Returns the index after the parenthesis that closes the first one."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c == '(') - (c == ')')
    if not depth:
      return i + 1
  return len(text)


def op_name(op: Op) -> str:
  match = re.search(r'op_name="([^"]*)"', op.text)
  return match[1] if match else op.name


def constant(op: Op) -> int | None:
  return int(op.inner) if re.fullmatch(r'-?\d+', op.inner) else None


def collective(op: Op) -> str:
  """Returns the collective that an instruction is or starts, such as 'all-reduce'; '' if none.

  Between slices, XLA for TPU writes a send and a recv, with the collective as an attribute.
  """
  if op.kind == 'send':
    match = re.search(r'megascale_transfer_type="(\w+)"', op.text)
    name = match[1].lower().replace('_', '-') if match else ''
    return {'one-to-one': 'collective-permute'}.get(name, name)
  match = _COLLECTIVE.match(op.kind)
  return match[1] if match else ''


def group_of(op: Op) -> tuple[int, ...]:
  """Returns the first group of participating devices, as positions in the mesh."""
  if match := re.search(r'megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"', op.text):
    slices, chips = map(_count, match.groups())
    return tuple(range(0, slices * chips, chips))
  if 'collective-permute' in op.kind:
    pairs = re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', op.text)
    return (int(pairs[1]), int(pairs[2])) if pairs else ()
  text = op.text.partition('replica_groups=')[2]
  if match := re.match(r'\{\{([\d,]*)\}', text):
    return tuple(int(n) for n in match[1].split(',') if n)
  if match := re.match(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text):
    return tuple(_iota(match[2], match[3]).reshape(_ints(match[1]))[0].tolist())
  if match := re.match(
    r'mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))?'
    r' ?\{([^}]*)\}',
    text,
  ):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    ids = np.arange(math.prod(sizes.values()))
    if order := re.match(r'\[([\d,]+)\](?:T\(([\d,]+)\)?)?', match[2] or ''):
      ids = _iota(order[1], order[2])
    axes = re.findall(r"'(\w+)'", match[3])
    index = tuple(slice(None) if name in axes else 0 for name in sizes)
    return tuple(ids.reshape(tuple(sizes.values()))[index].ravel().tolist())
  return ()


def _count(text: str) -> int:
  """Returns the number of elements in a list that XLA writes as '1,2' or '0:3'."""
  ends = [_ints(part.replace(':', ',')) for part in text.split(',')]
  return sum(end[-1] - end[0] + 1 for end in ends)


def _ints(text: str) -> tuple[int, ...]:
  return tuple(int(n) for n in text.split(','))


def _iota(shape: str, order: str | None) -> np.ndarray:
  """Returns the flat device numbers that XLA writes as [8,2]T(1,0)."""
  sizes = _ints(shape)
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  return (ids.transpose(_ints(order)) if order else ids).ravel()
