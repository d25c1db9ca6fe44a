"""XLA's text of a compiled program, parsed: instructions and their shapes."""

import dataclasses
import math
import re

import numpy as np

_BITS = {
  'pred': 8,
  's4': 4,
  'u4': 4,
  's8': 8,
  'u8': 8,
  'f8e4m3fn': 8,
  'f8e5m2': 8,
  's16': 16,
  'u16': 16,
  'f16': 16,
  'bf16': 16,
  's32': 32,
  'u32': 32,
  'f32': 32,
  's64': 64,
  'u64': 64,
  'f64': 64,
  'c64': 64,
  'c128': 128,
}
_COLLECTIVE = re.compile(
  '(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
  '|collective-broadcast|ragged-all-to-all)(-start)?$'
)
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?')


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
    found = re.search(rf'(?<![\w]){name}=(\{{[^{{}}]*\}}|[%\w.\-:>]+)', self.text)
    return found[1] if found else ''

  def numbers(self, name: str) -> list[int]:
    return [int(n) for n in re.findall(r'\d+', self.attribute(name))]


def arrays(text: str) -> tuple[Array, ...]:
  """The arrays in a shape; tokens and contexts have no dimensions."""
  return tuple(
    Array(kind, tuple(int(n) for n in dims.split(',') if n), 'S(1)' in (layout or ''))
    for kind, dims, layout in _ARRAY.findall(text)
    if kind in _BITS
  )


def parse(text: str) -> tuple[dict[str, dict[str, Op]], str]:
  """({computation: {name: Op}}, the name of the entry)."""
  found: dict[str, dict[str, Op]] = {}
  ops: dict[str, Op] | None = None  # of the computation at hand
  entry = ''
  # Backend configs of kernels span several lines, which are joined.
  for line in re.sub(r'\n(?="|}})', ' ', text).splitlines():
    if line.endswith('{') and ' -> ' in line and ' = ' not in line[: line.find('(')]:
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
  inner = rest[start + 1 : stop - 1]
  return Op(
    name.lstrip('%'),
    rest[:start],
    arrays(shape),
    tuple(re.findall(r'%([\w.\-]+)', inner)),
    rest[stop:],
    inner=inner,
    root=line.startswith('ROOT '),
  )


def _close(text: str) -> int:
  """The place after the parenthesis that closes the first one."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c == '(') - (c == ')')
    if not depth:
      return i + 1
  return len(text)


def op_name(op: Op) -> str:
  found = re.search(r'op_name="([^"]*)"', op.text)
  return found[1] if found else op.name


def constant(op: Op) -> int | None:
  return int(op.inner) if re.fullmatch(r'-?\d+', op.inner) else None


def collective(op: Op) -> str:
  """Which one an instruction is, or begins: 'all-reduce', ...; or ''.

  Between slices XLA for TPU writes a send and a recv that say what they do.
  """
  if op.kind == 'send':
    found = re.search(r'megascale_transfer_type="(\w+)"', op.text)
    name = found[1].lower().replace('_', '-') if found else ''
    return {'one-to-one': 'collective-permute'}.get(name, name)
  found = _COLLECTIVE.match(op.kind)
  return found[1] if found else ''


def group_of(op: Op) -> tuple[int, ...]:
  """The first group of devices that take part, as positions in the mesh."""
  if found := re.search(r'megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"', op.text):
    slices, chips = map(_count, found.groups())
    return tuple(range(0, slices * chips, chips))
  if 'collective-permute' in op.kind:
    pairs = re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', op.text)
    return (int(pairs[1]), int(pairs[2])) if pairs else ()
  text = op.text.partition('replica_groups=')[2]
  if found := re.match(r'\{\{([\d,]*)\}', text):
    return tuple(int(n) for n in found[1].split(',') if n)
  if found := re.match(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text):
    return tuple(_iota(found[2], found[3]).reshape(_ints(found[1]))[0].tolist())
  if found := re.match(
    r'mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))?'
    r' ?\{([^}]*)\}',
    text,
  ):
    sizes = {n: int(s) for n, s in re.findall(r"'(\w+)'=(\d+)", found[1])}
    ids = np.arange(math.prod(sizes.values()))
    if order := re.match(r'\[([\d,]+)\](?:T\(([\d,]+)\)?)?', found[2] or ''):
      ids = _iota(order[1], order[2])
    along = re.findall(r"'(\w+)'", found[3])
    pick = tuple(slice(None) if n in along else 0 for n in sizes)
    return tuple(ids.reshape(tuple(sizes.values()))[pick].ravel().tolist())
  return ()


def _count(text: str) -> int:
  """Number of elements in a list that XLA writes as '1,2' or '0:3'."""
  ends = [_ints(part.replace(':', ',')) for part in text.split(',')]
  return sum(end[-1] - end[0] + 1 for end in ends)


def _ints(text: str) -> tuple[int, ...]:
  return tuple(int(n) for n in text.split(','))


def _iota(shape: str, order: str | None) -> np.ndarray:
  """Device numbers as XLA writes them: [8,2]T(1,0), flat."""
  sizes = _ints(shape)
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  return (ids.transpose(_ints(order)) if order else ids).ravel()
