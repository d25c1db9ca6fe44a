"""Loads the weights of a `records.Source` onto the devices of a role, and records their base in checkpoints.

A PEFT folder, and a checkpoint of a run with frozen parameters, hold only some of the parameters. The others come from
the source's base.
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
from jaxpost.models import model as model_lib
from jaxpost.models.model import Model
from jaxpost.models.parameters import flatten, join, nest
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.stage.records import Inputs, Source
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout


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
  """Loads the parameters of `model` from a source, in `layout`."""
  if ledger and ledger.dry:
    return described(model, layout, dtype)
  seed = seed if source.seed is None else source.seed
  stored = base_model = model_lib.build(source.config)
  # An adapter folder goes on top of plain weights: other adapters below it are merged first.
  if source.folder and source.base:
    base_model = stored.base
  if source.config.lora in ((), model.config.lora):  # otherwise the adapter is merged, into weights that are not coded
    stored = model_lib.quantized(stored, model.quantized)
    base_model = model_lib.quantized(base_model, model.quantized)
  params = {}
  if source.base:
    params = load(source.base, base_model, layout, dtype, workdir, seed=seed, ledger=ledger)
  params = join(params, _load_without_base(source, stored, layout, dtype, workdir, seed=seed, ledger=ledger))
  return model_lib.adopt(params, stored, model, layout, jnp.dtype(dtype), seed=seed)


def _load_without_base(
  source: Source, model: Model, layout: Layout, dtype: str, workdir: Any, seed: int, ledger: Ledger | None
) -> dict:
  """Loads the leaves that a source holds itself, without those of its base."""
  shardings = model.shardings(layout)
  folder = source.checkpoints_in(workdir)
  plain = model_lib.build(source.config)  # the model as it is stored
  keep = functools.partial(model_lib.convert, theirs=plain, model=model)
  if folder is not None:
    return keep(read_checkpoint(folder, source.step, plain, layout, dtype, partial=source.base is not None))
  if source.folder is None:
    return programs.random_params(model, seed, jnp.dtype(dtype), shardings, ledger or Ledger())
  from jaxpost.programs.weight_files import write_piece

  if source.base is not None:
    from jaxpost.formats import peft

    return peft.load(source.folder, model, shardings, write_piece)
  from jaxpost.formats import hf

  # Tensor by tensor: `keep` quantizes each before the next is read.
  return hf.load_params(source.folder, plain, plain.shardings(layout), jnp.dtype(dtype), keep, write=write_piece)


def described(model: Model, layout: Layout, dtype: str, keep: Collection[str] | None = None) -> dict:
  """Returns the parameters as shapes with shardings, which take no memory; with `keep`, only those of its paths."""
  out = {}
  for path, spec in model.table.items():
    if keep is None or path in keep:
      sharding = layout.sharding(spec.axes, spec.shape)
      out[path] = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype), sharding=sharding)
  return nest(out)


def read_checkpoint(
  folder: epath.Path, step: int | None, model: Model, layout: Layout, dtype: str, partial: bool = False
) -> dict:
  """Reads the policy's parameters from a checkpoint and casts them to `dtype`; with `partial`, only those it holds."""
  at = 'policy/params'
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    saved_dtypes = {leaf.removeprefix(f'{at}/'): dtype for leaf, (_, dtype) in checkpointer.leaves(step).items()}
    targets = flatten(described(model, layout, dtype, saved_dtypes if partial else None))
    stored = {path: x.update(dtype=saved_dtypes.get(path, x.dtype)) for path, x in targets.items()}
    params = flatten(checkpointer.restore_params(nest(stored), step, at=at))
    return nest({path: params[path].astype(x.dtype) for path, x in targets.items()})


def make_meta(inputs: Inputs, workdir: epath.PathLike) -> dict:
  """Returns the JSON that each checkpoint of a stage keeps besides its arrays.

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
        f'{base["folder"] or base["checkpoints"] or base["stage"]}: these weights have changed since {inputs.name} of '
        f'{workdir} began to train on top of them; restore the old ones or choose another --workdir'
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
