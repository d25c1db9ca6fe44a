"""Precomputed outputs of frozen models (reference log-probs, teacher top-k), cached on disk.

Legend: N examples, T tokens of one, S tokens of all that are read.

    WORKDIR/cache/FINGERPRINT/  NAME.npy (the arrays)  index.json (written
                                last: without it nothing was made)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from etils import epath

from jaxpost.data import packing
from jaxpost.distributed import coordination
from jaxpost.stage import weight_sources
from jaxpost.storage.array_cache import load_or_make
from jaxpost.storage.seals import fingerprint

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Precompute
  from jaxpost.data.examples import Example
  from jaxpost.stage.place import PlacedStage
  from jaxpost.types import Batch

# Host batch [rows, row_length] -> {name: [rows, row_length, ...]}, by a frozen role.
Run = Callable[['Batch'], dict[str, np.ndarray]]
_WINDOW = 256  # documents packed together
_FIELDS = ('tokens', 'loss_mask', 'positions', 'segment_ids', 'branch_ids', 'sequence_ids')


def digest(examples: Iterable[Example | None]) -> str:
  """Returns a hash of the model inputs and loss masks of `examples`."""
  total = hashlib.sha256()
  for example in examples:
    total.update(b'|')
    for name in _FIELDS if example is not None else ():
      array = vars(example)[name]
      if array is not None:
        total.update(f'{name}{array.dtype}{len(array)}'.encode())
        total.update(np.ascontiguousarray(array).tobytes())
  return total.hexdigest()


def precompute(
  placed: PlacedStage, make_run: Callable[[str, Precompute], Run], workdir: epath.PathLike | None
) -> tuple[str, ...]:
  """Fills a stage's documents with what frozen roles compute; returns the names of these roles.

  The arrays come from the disk, where an earlier run left them; only otherwise
  is a role made, and freed again.

  Args:
    placed: the stage, whose documents (and held-out ones) are filled.
    make_run: makes the `run` of a role.
    workdir: the run's folder; None keeps nothing.
  """
  wanted = placed.algorithm.precompute(placed.config)
  if placed.ledger.dry or not wanted:  # a plan makes no arrays
    return tuple(wanted)
  data, shape = placed.data, placed.shape
  sets = [(data.documents, data.rows)]
  if data.held_out and data.held_out.documents:
    sets.append((data.held_out.documents, data.held_out.rows))
  for name, spec in wanted.items():
    run = make_run(name, spec)
    for documents, rows in sets:
      examples = [documents.plain(n) for n in range(len(documents))]
      theirs = None
      if spec.texts:
        tokenizer = weight_sources.tokenizer_of(placed.inputs.sources[name], {})
        theirs = spec.texts(placed, name, examples, rows, tokenizer)
      key = fingerprint(
        [
          weight_sources.identity(placed.inputs.sources[name], workdir, placed.config.seed),
          digest(examples),
          placed.compute.dtype,
          placed.config.model.param_dtype,
          placed.model.quantized,
          dataclasses.asdict(placed.model.config),  # adapters that are not kept are merged, and rounded
          shape.row_length,
          spec.options,
          sorted(spec.arrays),
          theirs and digest(theirs.theirs),
        ]
      )
      # Times of files may differ between hosts.
      path = workdir and epath.Path(workdir) / 'cache' / coordination.broadcast(key)
      make = functools.partial(
        read, examples.__getitem__, len(documents), spec.arrays, run, shape.rows, shape.row_length
      )
      if theirs:
        make = functools.partial(theirs.read, spec, run, read)
      documents.fill(examples, load_or_make(path, make))
  return tuple(wanted)


def read(
  examples: Callable[[int], Example | None], number: int, fields: Mapping, run: Run, rows: int, row_length: int
) -> dict[str, np.ndarray]:
  """Computes {name: [S, ...]} of the trained tokens of all examples, in order.

  Args:
    examples: number -> Example or None, for 0 to `number`.
    fields: as in `Documents`.
  """
  # Arrays have a type without examples, too.
  parts = {name: [np.zeros((0, *shape), dtype)] for name, (shape, dtype) in fields.items()}
  for first in range(0, number, _WINDOW):
    every = map(examples, range(first, min(first + _WINDOW, number)))
    window = [example for example in every if example is not None]
    for example, arrays in zip(window, _read_window(window, fields, run, rows, row_length)):
      trained = example.read
      for name, array in arrays.items():
        parts[name].append(array[trained])
  return {name: np.concatenate(part) for name, part in parts.items()}


def _read_window(
  examples: Sequence[Example], fields: Mapping, run: Run, rows: int, row_length: int
) -> list[dict[str, np.ndarray]]:
  """Computes {name: [T, ...]} of each example; the tokens that do not fit into a row are 0."""
  found = [
    {name: np.zeros((len(example.tokens), *shape), dtype) for name, (shape, dtype) in fields.items()}
    for example in examples
  ]
  short = {}  # number -> the example cut to a row, with the places that its tokens had before
  for number, example in enumerate(examples):
    marked = dataclasses.replace(example, loss_mask=example.read, arrays={'place': np.arange(len(example.tokens))})
    if (cut := marked.cut(row_length)) is not None:
      short[number] = cut
  numbers = list(short)
  packed = packing.pack_examples(list(short.values()), row_length)  # rows of indices into `numbers`
  for start in range(0, len(packed), rows):
    batch = [[numbers[i] for i in row] for row in packed[start : start + rows]]
    out = run(packing.to_batch([[short[n] for n in row] for row in batch], row_length, rows, normalize=False))
    for r, row in enumerate(batch):
      column = 0  # where the next document begins in the row
      for number in row:
        places = short[number].arrays['place']
        for name in fields:
          found[number][name][places] = out[name][r, column : column + len(places)]
        column += len(places)
  return found
