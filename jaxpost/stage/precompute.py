"""What frozen models say of a data set, computed once and kept on disk.

Legend: N examples, T tokens of one, S tokens of all that are read.

    WORKDIR/cache/FINGERPRINT/  NAME.npy (the arrays)  index.json (written
                                last: without it nothing was made)
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable

import numpy as np
from etils import epath

from jaxpost.data import packing
from jaxpost.distributed import coordination
from jaxpost.storage.array_cache import fingerprint, load_or_make

_WINDOW = 256  # documents packed together
_FIELDS = ('tokens', 'loss_mask', 'positions', 'segment_ids', 'branch_ids', 'sequence_ids')


def digest(examples: Iterable) -> str:
  """Of what a model reads of each Example (or None), and what is trained."""
  total = hashlib.sha256()
  for example in examples:
    total.update(b'|')
    for name in _FIELDS if example is not None else ():
      array = vars(example)[name]
      if array is not None:
        total.update(f'{name}{array.dtype}{len(array)}'.encode())
        total.update(np.ascontiguousarray(array).tobytes())
  return total.hexdigest()


def read_tokens(example) -> np.ndarray:
  """[T] bool: tokens that are trained, or of a sequence that is only read."""
  if example.sequence_ids is None:
    return example.trained
  return example.trained | (example.sequence_ids > 0)


@dataclasses.dataclass
class Lookup:
  """Arrays of trained tokens that examples carry once devices computed them.

  Until then they carry zeros, of the same shapes.

  fields: name -> (shape after [T], dtype).
  starts: [N + 1], where the tokens of an example begin in `values`.
  values: name -> [S, ...].
  """

  fields: dict = dataclasses.field(default_factory=dict)
  starts: np.ndarray | None = None
  values: dict = dataclasses.field(default_factory=dict)

  def attach(self, number: int, example):
    """The Example `number` with its arrays; None stays None."""
    if example is None or not self.fields:
      return example
    trained, arrays = read_tokens(example), dict(example.arrays)
    for name, (shape, dtype) in self.fields.items():
      arrays[name] = np.zeros((len(trained), *shape), dtype)
      if name in self.values:
        start, stop = self.starts[number : number + 2]
        arrays[name][trained] = self.values[name][start:stop]
    return dataclasses.replace(example, arrays=arrays)

  def fill(self, examples: Iterable, values: dict):
    """Takes what was computed of the trained tokens of all `examples`."""
    counts = [0 if e is None else int(read_tokens(e).sum()) for e in examples]
    self.starts = np.append(0, np.cumsum(counts))
    self.values |= values


def precompute(kit, ask: Callable, identity: Callable, workdir) -> tuple:
  """Gives a stage's examples what frozen roles say of them; the roles' names.

  From the disk, where it is kept; only else is a role made, then let go.

  Args:
    kit: `assemble.Kit`, whose `prepared` has the examples.
    ask: (name, `Precompute`) -> the `run` of `read`.
    identity: `weights.Source` -> JSON that tells it from others.
  """
  p = kit.prepared
  wanted = p.algorithm.precompute(kit.config)
  if kit.ledger.dry or not wanted:  # in a plan they are gone by the first step
    return tuple(wanted)
  sets = [(p.lookup, p.example, len(p.rows))]
  if p.eval_examples:
    held_out = Lookup(p.lookup.fields)
    sets.append((held_out, p.eval_examples.__getitem__, len(p.eval_examples)))
  for name, spec in wanted.items():
    run = ask(name, spec)
    for lookup, example, number in sets:
      every = [example(n) for n in range(number)]
      key = fingerprint(
        [
          identity(p.sources[name]),
          digest(every),
          kit.compute.dtype,
          p.model.quantized,
          kit.shape[2],
          spec.options,
          sorted(spec.arrays),
        ]
      )
      # Times of files may differ between hosts.
      path = workdir and epath.Path(workdir) / 'cache' / coordination.broadcast(key)
      make = functools.partial(read, every.__getitem__, number, spec.arrays, run, kit.shape[0], kit.shape[2])
      lookup.fill(every, load_or_make(path, make))
  if wanted and p.eval_examples:
    p.eval_examples = tuple(held_out.attach(n, e) for n, e in enumerate(p.eval_examples))
  return tuple(wanted)


def read(examples: Callable, number: int, fields: dict, run: Callable, rows: int, row_length: int) -> dict:
  """{name: [S, ...]} of the trained tokens of all examples, in order.

  Args:
    examples: number -> Example or None, for 0 to `number`.
    fields: as in `Lookup`.
    run: host Batch [rows, row_length] -> {name: [rows, row_length, ...]}.
  """
  parts = {name: [np.zeros((0, *shape), dtype)] for name, (shape, dtype) in fields.items()}
  for first in range(0, number, _WINDOW):
    window = [examples(n) for n in range(first, min(first + _WINDOW, number))]
    # Which of its tokens are left where one is longer than a row.
    cut = [
      None
      if e is None
      else dataclasses.replace(e, loss_mask=read_tokens(e), arrays={'at': np.arange(len(e.tokens))}).cut(row_length)
      for e in window
    ]
    found = [
      {name: np.zeros((len(e.tokens), *shape), dtype) for name, (shape, dtype) in fields.items()}
      if e is not None
      else None
      for e in window
    ]
    known = [n for n, e in enumerate(cut) if e is not None]
    packed = [[known[i] for i in row] for row in packing.pack([len(cut[n].tokens) for n in known], row_length)]
    for start in range(0, len(packed), rows):
      some = packed[start : start + rows]
      out = run(packing.to_batch([[cut[n] for n in row] for row in some], row_length, rows, normalize=False))
      for r, row in enumerate(some):
        column = 0
        for n in row:
          at, begin = cut[n].arrays['at'], column
          column += len(at)
          for name in fields:
            found[n][name][at] = out[name][r, begin:column]
    for e, arrays in zip(window, found):
      for name in fields if e is not None else ():
        parts[name].append(arrays[name][read_tokens(e)])
  return {name: np.concatenate(part) for name, part in parts.items()}
