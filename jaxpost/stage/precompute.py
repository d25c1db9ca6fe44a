"""Precomputes outputs of frozen models (reference log-probs, teacher top-k) and caches them on disk.

Legend: T tokens of an example, S tokens of all examples whose outputs are read.

    WORKDIR/cache/FINGERPRINT/  NAME.npy (the arrays)  index.json (written last, it marks the cache as complete)
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

# Host batch [rows, row_length] -> {name: [rows, row_length, ...]}, the outputs of a frozen role.
Run = Callable[['Batch'], dict[str, np.ndarray]]
_WINDOW = 256  # documents packed together
_FIELDS = ('tokens', 'loss_mask', 'positions', 'segment_ids', 'branch_ids', 'sequence_ids')


def digest(examples: Iterable[Example | None]) -> str:
  """Returns a hash of the model inputs and loss masks of `examples`."""
  total = hashlib.sha256()
  for example in examples:
    total.update(b'|')
    for name in _FIELDS if example is not None else ():
      if (array := vars(example)[name]) is not None:
        total.update(f'{name}{array.dtype}{len(array)}'.encode())
        total.update(np.ascontiguousarray(array).tobytes())
  return total.hexdigest()


def precompute(
  placed: PlacedStage, make_run: Callable[[str, Precompute], Run], workdir: epath.PathLike | None
) -> tuple[str, ...]:
  """Fills a stage's documents, held-out ones too, with outputs of frozen roles; returns the names of these roles.

  The arrays are read from disk if an earlier run has cached them. If not, the role is made, and freed afterwards.

  Args:
    workdir: the run's folder; None to cache nothing.
  """
  specs = placed.algorithm.precompute(placed.config)  # {role: Precompute}
  if placed.ledger.dry or not specs:  # a plan makes no arrays
    return tuple(specs)
  data, shape = placed.data, placed.shape
  sets = [(data.documents, data.rows)]
  if data.held_out and data.held_out.documents:
    sets.append((data.held_out.documents, data.held_out.rows))
  for name, spec in specs.items():
    run = make_run(name, spec)
    for documents, rows in sets:
      examples = [documents.plain(n) for n in range(len(documents))]
      teacher_texts = None  # the documents in the tokens of a teacher with another tokenizer
      if spec.texts:
        tokenizer = weight_sources.tokenizer_of(placed.inputs.sources[name], {})
        teacher_texts = spec.texts(placed, name, examples, rows, tokenizer)
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
          teacher_texts and digest(teacher_texts.theirs),
        ]
      )
      # The key has modification times of files, which may differ between hosts.
      path = workdir and epath.Path(workdir) / 'cache' / coordination.broadcast(key)
      make = functools.partial(read, examples, spec.arrays, run, shape.rows, shape.row_length)
      if teacher_texts:
        make = functools.partial(teacher_texts.read, spec, run, read)
      documents.fill(examples, load_or_make(path, make))
  return tuple(specs)


def read(
  examples: Sequence[Example | None], fields: Mapping, run: Run, rows: int, row_length: int
) -> dict[str, np.ndarray]:
  """Computes {name: [S, ...]} of the tokens that each example reads (`Example.read`), in the order of the examples.

  fields: as in `Documents`.
  """
  # The empty first part gives arrays their dtype if there are no examples.
  parts = {name: [np.zeros((0, *shape), dtype)] for name, (shape, dtype) in fields.items()}
  for first in range(0, len(examples), _WINDOW):
    window = [example for example in examples[first : first + _WINDOW] if example is not None]
    for example, arrays in zip(window, _read_window(window, fields, run, rows, row_length)):
      is_read = example.read  # [T] bool
      for name, array in arrays.items():
        parts[name].append(array[is_read])
  return {name: np.concatenate(part) for name, part in parts.items()}


def _read_window(
  examples: Sequence[Example], fields: Mapping, run: Run, rows: int, row_length: int
) -> list[dict[str, np.ndarray]]:
  """Computes {name: [T, ...]} of each example; outputs of tokens that do not fit into a row are 0."""
  results = [
    {name: np.zeros((len(example.tokens), *shape), dtype) for name, (shape, dtype) in fields.items()}
    for example in examples
  ]
  cut_examples = []  # (arrays of an example, the example cut to a row, with the positions that its tokens had before)
  for example, arrays in zip(examples, results):
    marked = dataclasses.replace(example, loss_mask=example.read, arrays={'place': np.arange(len(example.tokens))})
    if (cut := marked.cut(row_length)) is not None:
      cut_examples.append((arrays, cut))
  packed = packing.pack_examples([cut for _, cut in cut_examples], row_length)
  for start in range(0, len(packed), rows):
    batch_rows = [[cut_examples[i] for i in row] for row in packed[start : start + rows]]
    outputs = run(packing.to_batch([[cut for _, cut in row] for row in batch_rows], row_length, rows, totals=()))
    for r, row in enumerate(batch_rows):
      column = 0  # where the next document begins in the row
      for arrays, cut in row:
        places = cut.arrays['place']
        for name in fields:
          arrays[name][places] = outputs[name][r, column : column + len(places)]
        column += len(places)
  return results
