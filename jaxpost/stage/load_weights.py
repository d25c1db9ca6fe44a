"""Where the weights of a role come from, and how they get onto the devices.

A source is '' (random), a Hugging Face folder or org/name, RUN[@step] (a
checkpoint of another run) or stage:NAME (an earlier stage of this one). A PEFT
folder, and a checkpoint of a run that froze parameters, hold some leaves; the
others come from the source that is their base.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import hf, peft
from jaxpost.models import lora, quantization
from jaxpost.models.parameters import join, nest
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.stage.sources import Source, checkpoints, record
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model


def load(
  source: Source, model: Model, layout: Layout, dtype: str, workdir=None, *, seed: int = 0, ledger: Ledger | None = None
) -> dict:
  """The parameters as `model` has them, in `layout`."""
  if ledger and ledger.dry:
    return described(model, layout, dtype)
  seed = seed if source.seed is None else source.seed
  theirs = below = lora.build(source.config)
  # An adapter is put on merged weights, whatever else has been put on them.
  if source.folder and source.base:
    below = theirs.base
  if source.config.lora in ((), model.config.lora):  # else they are merged
    theirs, below = (quantization.quantize_model(m, model.quantized) for m in (theirs, below))
  params = source.base and load(source.base, below, layout, dtype, workdir, seed=seed, ledger=ledger)
  params = join(params or {}, _own(source, theirs, layout, dtype, workdir, seed, ledger))
  return lora.adopt(params, theirs, model, layout, jnp.dtype(dtype), seed)


def is_beside(source: Source, p) -> bool:
  """Whether it is an adapter folder on the very leaves that the policy of the
  stage `p` (build.Prepared) leaves as they are."""
  below = lambda s: s.base if s.folder and s.base else s
  policy, base = p.sources['policy'], below(source)
  other = below(policy)
  if (
    base is source
    or not base.name
    or base.config.lora
    or ((base.name, base.config) != (other.name, other.config))
    or (policy.config.lora not in ((), p.model.config.lora))
  ):
    return False
  shared = lora.frozen_base_model(source.config, p.model.quantized).frozen
  return shared <= p.model.frozen


def load_beside(source: Source, p, params, layout: Layout, ledger) -> tuple:
  """(model, its own leaves, those that it shares with the policy)."""
  model = lora.frozen_base_model(source.config, p.model.quantized)
  return (model, load_adapter(source, model, layout, ledger), lora.split(params, p.model)[1])


def load_adapter(source: Source, model: Model, layout: Layout, ledger) -> dict:
  """The leaves of an adapter folder by themselves."""
  part = lora.trained_part(model)
  if ledger and ledger.dry:
    return described(part, layout, 'float32')
  return peft.load(source.folder, model, part.shardings(layout), programs.write)


def _own(source, model: Model, layout, dtype, workdir, seed, ledger) -> dict:
  """The leaves that a source has without its base."""
  shardings, folder = model.shardings(layout), checkpoints(source, workdir)
  keep = functools.partial(quantization.convert_params, model=model)
  plain = lora.build(source.config)  # which is what is stored
  if folder is not None:
    return keep(read_checkpoint(folder, source.step, plain, layout, dtype, partial=source.base is not None))
  if source.base is not None:
    return peft.load(source.folder, model, shardings, programs.write)
  if source.folder is not None:  # one by one, so that all are never whole
    return hf.load_params(source.folder, plain, plain.shardings(layout), jnp.dtype(dtype), keep, programs.write)
  return programs.random_params(model, seed, jnp.dtype(dtype), shardings, ledger or Ledger())


def described(model: Model, layout: Layout, dtype: str, keep=None) -> dict:
  """Shapes and shardings of parameters, no memory; of the paths in `keep`."""
  return nest(
    {
      path: jax.ShapeDtypeStruct(
        spec.shape, jnp.dtype(spec.dtype or dtype), sharding=layout.sharding(spec.axes, spec.shape)
      )
      for path, spec in model.table.items()
      if keep is None or path in keep
    }
  )


def move(tree, shardings):
  """Device arrays as `shardings` says; of a plan, their descriptions."""

  def place(x, sharding):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)

  return jax.tree.map(place, tree, shardings)


def read_checkpoint(
  folder, step, model: Model, layout: Layout, dtype: str, role='policy', warn=print, partial=False
) -> dict:
  """The parameters of one role in a checkpoint; if `partial`, those in it."""
  checkpointer, at = Checkpointer(folder), f'{role}/params'
  try:
    template = described(
      model, layout, dtype, {leaf.removeprefix(f'{at}/') for leaf in checkpointer.leaves(step)} if partial else None
    )
    return checkpointer.restore_params(template, step, at=at, warn=warn)
  finally:
    checkpointer.close()


def make_meta(p, workdir) -> dict:
  """What is kept in each checkpoint of the stage `p` (build.Prepared).

  InputError where the weights below those that are trained have changed since
  the stage began.
  """
  meta = dict(model=dataclasses.asdict(p.model.config))
  if p.model.frozen:
    saved = saved_meta(p, workdir)
    base = record(p.sources['policy'], workdir, p.config.seed)
    if saved and saved['base']['fingerprint'] != base['fingerprint']:
      raise InputError(
        f'{base["folder"] or base["checkpoints"] or base["stage"]}: these '
        f'weights have changed since {p.name} of {workdir} was made on top '
        'of them; bring the old ones back or choose another --workdir'
      )
    meta['base'] = base
  return meta


def saved_meta(p, workdir) -> dict | None:
  """That of the newest checkpoint of the stage `p`."""
  folder = epath.Path(workdir) / 'checkpoints' / p.name
  if not finished_steps(folder):
    return None
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    return checkpointer.restore_meta(warn=lambda _: None)
