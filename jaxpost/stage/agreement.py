"""Checks that the processes of a run agree: in code, config, run folder, data and weights. Read with several only."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.stage import consistency, weight_sources
from jaxpost.storage import seals
from jaxpost.storage.manifest import finished_steps

if TYPE_CHECKING:
  from jaxpost.data.sources import Rows
  from jaxpost.stage.records import PreparedStage, Source

# Rows that processes compare at the start: all of most data sets.
_HASHED, _HASHED_LAZY = 20_000, 100


def check_config(raw: dict) -> None:
  """InputError where processes have other code, or other configs."""
  check_same(  # first: other code may have other fields
    {'the version of jax': jax.__version__, 'the code of jaxpost': code()}, 'install one everywhere'
  )
  plain = consistency.spelled(raw)
  if len(set(coordination.all_gather(seals.fingerprint(plain)))) > 1:
    every = coordination.all_gather(plain)
    for i, other in enumerate(every):
      for key, (was, now) in consistency.difference(every[0], other).items():
        raise InputError(
          f'config.{key}: {was!r} on process 0 and {now!r} on process {i}; start all with the same config'
        )


def check_workdir(workdir: epath.Path, configs: dict) -> None:
  """InputError where processes see another workdir."""
  saved = {n: finished_steps(workdir / 'checkpoints' / n) for n in configs}
  check_same(
    {f'what {workdir} holds': [consistency.is_finished(workdir, configs), saved]},
    'give a --workdir that all processes reach',
  )


def check_inputs(prepared: Sequence[PreparedStage]) -> None:
  """InputError where processes see different data, tokens or weights."""
  values = {}
  for p in prepared:
    inputs, data = p.inputs, p.data
    assert data.rows is not None  # as in all runs that train
    rows, held_out = p.config.data.path, p.config.eval.data.path
    values[f'config.data.path of {p.name}: what is in {rows}'] = digest(data.rows)
    if data.held_out is not None:
      values[f'config.eval.data.path of {p.name}: what is in {held_out}'] = digest(data.held_out.rows)
    first = data.first_batch
    values[f'the tokenizer of {p.name}'] = seals.fingerprint(
      [inputs.tokenizer.encode(str(data.rows[0])), first is not None and first.tokens.tolist()]
    )
    for role, source in inputs.sources.items():
      values[f'the {role} of {p.name}'] = seals.fingerprint(outline(source))
  check_same(values, 'give all processes the same files')


def check_same(values: dict[str, Any], hint: str) -> None:
  """Raises InputError on every process if any holds another value than process 0.

  Args:
    values: {name: JSON value}; the first that differs is named.
    hint: what to do about it.
  """
  all_values = coordination.all_gather(values)
  for name, first in all_values[0].items():
    for i, other in enumerate(all_values):
      if other.get(name) != first:
        shown = [f' ({x})' if len(str(x)) < 80 else '' for x in (other.get(name), first)]
        raise InputError(f'{name} of process {i}{shown[0]} differs from that of process 0{shown[1]}; {hint}')


def code() -> str:
  """Returns a hash of this library as it is installed here."""
  root = pathlib.Path(__file__).parents[1]
  return seals.fingerprint([[str(file.relative_to(root)), file.read_text()] for file in sorted(root.rglob('*.py'))])


def outline(source: Source) -> list:
  """Returns the shape, and samples of the files of a folder, as JSON."""
  return [dataclasses.asdict(source.config), weight_sources.file_samples(source), source.base and outline(source.base)]


def digest(rows: Rows) -> str:
  """Returns a hash of the number of rows and of up to 20,000 of them."""
  most = _HASHED_LAZY if rows.streaming else _HASHED
  chosen = np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)
  return seals.fingerprint([len(rows), list(rows.sizes), *(json.dumps(rows[n], default=str) for n in chosen.tolist())])
