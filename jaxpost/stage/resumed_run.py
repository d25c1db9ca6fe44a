"""Compares a run that is resumed with the one that began in its folder, which has a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import start
from jaxpost.monitor.metrics import read_growing
from jaxpost.stage import config as config_lib
from jaxpost.stage import load_weights
from jaxpost.stage.consistency import difference, spelled
from jaxpost.storage.manifest import finished_steps

if TYPE_CHECKING:
  import rich.console

  from jaxpost.stage.records import PreparedStage

# Changing these does not change what a run computes, or only from here on.
_FREE = (
  *('log', 'save', 'eval', 'rewards', 'mesh', 'train.steps'),
  # They decide what fits into memory: a run that ran out of it, or moves to other devices, goes on with others.
  *('train.micro_batch_size', 'model.remat', 'model.attention', 'rollout.slots', 'rollout.offload'),
  *('tools.workers', 'tools.timeout_s', 'tools.env_vars'),
)


def check_config(workdir: epath.Path, configs: dict, console: rich.console.Console) -> None:
  """Shows what changed since the run began; refuses what would corrupt it.

  Stages of which nothing is saved may change in any way.
  """
  path = workdir / 'config.json'
  old = config_lib.parse_saved(path)
  done = {n: finished_steps(workdir / 'checkpoints' / n) for n in old}
  begun = [name for name, steps in done.items() if steps]
  if begun != list(configs)[: len(begun)]:
    raise InputError(
      f'config.stages: {workdir} holds another run, of which {", ".join(begun)} has begun, and this one has '
      f'{", ".join(configs)}: choose another --workdir for a new run, or set the stages back'
    )
  for name, config in configs.items():
    changes = difference(spelled(vars(old[name])), spelled(vars(config))) if name in old else {}
    for key, (was, now) in changes.items():
      if key != 'stages':
        console.out(f'config.{key} of {name}: {was!r} in {path}, now {now!r}', highlight=False)
    for key in changes if name in begun else ():
      was, now = changes[key]
      _refuse(workdir, name, key, was, now, newest=name == begun[-1], done=done[name][0])


def _refuse(workdir, stage, key, was, now, newest: bool, done: int):
  """InputError where a stage that has begun cannot go on with a change."""
  no_epochs = key == 'train.epochs' and not now  # train.steps counts in their place
  free = key == 'stages' or no_epochs or any(key == f or key.startswith(f + '.') for f in _FREE)
  if key == 'train.steps' and (not newest or now < done):
    raise InputError(
      f'config.train.steps: {now} of {stage}, but {workdir} holds its step {done}'
      + ('' if newest else ' and a later stage has begun from it')
      + f'; set it back to {was} or choose another --workdir'
    )
  if not free:
    raise InputError(
      f'{workdir}: config.{key} of {stage} differs from the run that is being resumed ({was!r}, now {now!r}); '
      f'set it back or choose another --workdir, where init_from={workdir} starts from its weights'
    )


def check_models(prepared: Sequence[PreparedStage], workdir: epath.Path) -> None:
  """InputError where a stage's checkpoint is of another model, even of the same shapes, or of more or fewer rows."""
  from jaxpost.models import saved_config

  for p in prepared:
    if not (saved := load_weights.saved_meta(p.name, workdir)):
      continue
    was = dataclasses.asdict(saved_config.from_json(saved['model']))
    for k, v in dataclasses.asdict(p.inputs.model.config).items():
      if was.get(k) != v:
        raise InputError(
          f'config.model.path of {p.name}: has {k} {v!r}, in the checkpoint '
          f'{was.get(k)!r}; bring it back or change --workdir'
        )
    if finished_steps(workdir / 'checkpoints' / p.name)[0] >= p.config.train.steps:
      continue  # it reads no more rows
    was, now = saved['stream'].get('prompts', saved['stream']), p.data.stream.state()
    for k in ('num_rows', 'num_prompts'):
      if k in was and k in now and was[k] != now[k]:
        raise InputError(
          f'config.data.path of {p.name}: {p.config.data.path} has {now[k]} {k[4:]}, and had {was[k]} when the '
          f'checkpoint was saved; bring them back, or choose another --workdir, where init_from={workdir} starts from '
          'its weights'
        )


def changed_code(workdir: epath.Path, files: Mapping[str, str]) -> list[str]:
  """Returns a line for each of the `start.code_files` that has changed since the last start, if the run goes on."""
  starts = read_growing(workdir / start.FILE) if any(workdir.glob('checkpoints/*/*')) else []
  was = starts[-1].get('files', {}) if starts else {}
  return [
    f'warning: {path}: has changed since this run was started last; the steps so far used it as it was'
    for path, digest in files.items()
    if was.get(path, digest) != digest
  ]
