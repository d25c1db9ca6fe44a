"""Checks that all processes of a run have the same code, config, run folder, data and weights.

Imported only if there are several processes.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from jaxpost.data import sources
from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.stage import weight_sources
from jaxpost.storage import seals
from jaxpost.storage.manifest import finished_steps, is_finished

if TYPE_CHECKING:
  from jaxpost.stage.records import PreparedStage, Source


def check_config(raw: dict) -> None:
  """Raises InputError if the processes differ in code or config."""
  versions = {'the version of jax': jax.__version__, 'the code of jaxpost': code()}
  check_same(versions, 'install the same version everywhere')  # before the config, whose fields the code defines
  plain = config_lib.spelled(raw)
  if len(set(coordination.all_gather(seals.fingerprint(plain)))) > 1:
    configs = coordination.all_gather(plain)
    for i, other in enumerate(configs):
      for key, (first, value) in config_lib.difference(configs[0], other).items():
        raise InputError(
          f'config.{key}: {first!r} on process 0 and {value!r} on process {i}; start all with the same config'
        )


def check_workdir(workdir: epath.Path, configs: dict) -> None:
  """Raises InputError if the processes see different files in the workdir."""
  saved = {name: finished_steps(workdir / 'checkpoints' / name) for name in configs}
  contents = [is_finished(workdir, configs), saved]
  check_same({f'the content of {workdir}': contents}, 'give a --workdir that all processes share')


def check_inputs(prepared: Sequence[PreparedStage]) -> None:
  """Raises InputError if the processes see different data, tokens or weights."""
  values = {}
  for p in prepared:
    inputs, data = p.inputs, p.data
    assert data.rows is not None  # as in all runs that train
    rows, held_out = p.config.data.path, p.config.eval.data.path
    values[f'config.data.path of {p.name}: the content of {rows}'] = [*data.rows.sizes, data.checksum]
    if data.held_out is not None:
      content = [*data.held_out.rows.sizes, sources.digest(data.held_out.rows)]
      values[f'config.eval.data.path of {p.name}: the content of {held_out}'] = content
    first = data.first_batch
    values[f'the tokenizer of {p.name}'] = seals.fingerprint(
      [inputs.tokenizer.encode(str(data.rows[0])), first is not None and first.tokens.tolist()]
    )
    for role, source in inputs.sources.items():
      values[f'the {role} of {p.name}'] = seals.fingerprint(outline(source))
  check_same(values, 'give all processes the same files')


def check_same(values: dict[str, Any], hint: str) -> None:
  """Raises InputError on every process if the values of one differ from those of process 0.

  Args:
    values: {name: JSON value}; the error names the first that differs.
  """

  def shown(value: Any) -> str:
    return f' ({value})' if len(str(value)) < 80 else ''

  all_values = coordination.all_gather(values)
  for name, first in all_values[0].items():
    for i, other in enumerate(all_values):
      if (value := other.get(name)) != first:
        raise InputError(f'{name} of process {i}{shown(value)} differs from that of process 0{shown(first)}; {hint}')


def code() -> str:
  """Returns a hash of the source files of this library on this host."""
  root = pathlib.Path(__file__).parents[1]
  return seals.fingerprint([[str(file.relative_to(root)), file.read_text()] for file in sorted(root.rglob('*.py'))])


def outline(source: Source) -> list:
  """Returns the shape of the model, and samples of its files, as JSON."""
  return [dataclasses.asdict(source.config), weight_sources.file_samples(source), source.base and outline(source.base)]
