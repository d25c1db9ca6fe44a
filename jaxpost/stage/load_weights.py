"""Loads the weights of a `records.Source` onto the devices of a role, and keeps in checkpoints what they lie on top of.

A PEFT folder, and a checkpoint of a run that froze parameters, hold some of the parameters; the others come from the
source that is their base.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from etils import epath

from jaxpost.errors import InputError
from jaxpost.models import partition
from jaxpost.models.parameters import flatten, join, nest
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.stage.records import Source
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model
  from jaxpost.stage.records import Inputs


def load(
  source: Source,
  model: Model,
  layout: Layout,
  dtype: str,
  workdir: epath.PathLike | None = None,
  *,
  seed: int = 0,
  ledger: Ledger | None = None,
) -> dict:
  """Loads the parameters as `model` has them, in `layout`."""
  if ledger and ledger.dry:
    return described(model, layout, dtype)
  seed = seed if source.seed is None else source.seed
  stored = below = partition.build(source.config)
  # An adapter is put on merged weights, whatever else has been put on them.
  if source.folder and source.base:
    below = stored.base
  if source.config.lora in ((), model.config.lora):  # else they are merged
    stored = partition.quantized(stored, model.quantized)
    below = partition.quantized(below, model.quantized)
  params = {}
  if source.base:
    params = load(source.base, below, layout, dtype, workdir, seed=seed, ledger=ledger)
  params = join(params, _load_without_base(source, stored, layout, dtype, workdir, seed=seed, ledger=ledger))
  return partition.adopt(params, stored, model, layout, jnp.dtype(dtype), seed=seed)


def _load_without_base(
  source: Source, model: Model, layout: Layout, dtype: str, workdir: Any, seed: int, ledger: Ledger | None
) -> dict:
  """The leaves that a source has without its base."""
  shardings = model.shardings(layout)
  folder = source.checkpoints_in(workdir)
  plain = partition.build(source.config)  # which is what is stored
  keep = functools.partial(partition.convert, theirs=plain, model=model)
  if folder is not None:
    return keep(read_checkpoint(folder, source.step, plain, layout, dtype, partial=source.base is not None))
  if source.base is not None:
    from jaxpost.formats import peft
    from jaxpost.programs import write_pieces

    return peft.load(source.folder, model, shardings, write_pieces.write)
  if source.folder is not None:  # one by one, so that all are never whole
    from jaxpost.formats import hf
    from jaxpost.programs import write_pieces

    wanted = plain.shardings(layout)
    return hf.load_params(source.folder, plain, wanted, jnp.dtype(dtype), keep, write=write_pieces.write)
  return programs.random_params(model, seed, jnp.dtype(dtype), shardings, ledger or Ledger())


def described(model: Model, layout: Layout, dtype: str, keep: Collection[str] | None = None) -> dict:
  """Returns shapes and shardings of parameters, without memory; if `keep` is given, of its paths."""
  found = {}
  for path, spec in model.table.items():
    if keep is None or path in keep:
      sharding = layout.sharding(spec.axes, spec.shape)
      found[path] = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype), sharding=sharding)
  return nest(found)


def read_checkpoint(
  folder: epath.Path, step: int | None, model: Model, layout: Layout, dtype: str, partial: bool = False
) -> dict:
  """Reads the policy's parameters in a checkpoint, as type `dtype`; with `partial`, only those that it holds."""
  at = 'policy/params'
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    saved = {leaf.removeprefix(f'{at}/'): kind for leaf, (_, kind) in checkpointer.leaves(step).items()}  # path: type
    wanted = flatten(described(model, layout, dtype, saved if partial else None))
    stored = {path: x.update(dtype=saved.get(path, x.dtype)) for path, x in wanted.items()}
    found = flatten(checkpointer.restore_params(nest(stored), step, at=at))
    return nest({path: partition.in_type(found[path], x.dtype) for path, x in wanted.items()})


def make_meta(inputs: Inputs, workdir: epath.PathLike) -> dict:
  """Returns what each checkpoint of a stage keeps besides arrays: JSON.

  Raises:
    InputError: the frozen weights have changed since the stage began.
  """
  meta = dict(model=dataclasses.asdict(inputs.model.config))
  if inputs.model.frozen:
    from jaxpost.stage import weight_sources

    saved = saved_meta(inputs.name, workdir)
    base = weight_sources.record(inputs.sources['policy'], workdir, inputs.config.seed)
    if saved and saved['base']['fingerprint'] != base['fingerprint']:
      raise InputError(
        f'{base["folder"] or base["checkpoints"] or base["stage"]}: these '
        f'weights have changed since {inputs.name} of {workdir} was made on top '
        'of them; bring the old ones back or choose another --workdir'
      )
    meta['base'] = base
  return meta


def saved_meta(stage: str, workdir: epath.PathLike) -> dict | None:
  """Returns the meta of the newest checkpoint of a stage, or None."""
  folder = epath.Path(workdir) / 'checkpoints' / stage
  if not finished_steps(folder):
    return None
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    return checkpointer.restore_meta()
