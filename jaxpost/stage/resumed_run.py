"""Compares the config, models, data and code of a resumed run with those that it began with, and removes drafts."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from jaxpost.data import sources
from jaxpost.errors import InputError
from jaxpost.monitor import start
from jaxpost.monitor.metrics import read_growing
from jaxpost.stage import config as config_lib
from jaxpost.stage import load_weights, prepare
from jaxpost.stage.schema import CHANGEABLE
from jaxpost.storage import object_store
from jaxpost.storage.manifest import finished_steps

if TYPE_CHECKING:
  import rich.console

  from jaxpost.stage.records import PreparedStage

# Fields and sections that a resumed run may change.
_FREE = (
  *('log', 'save', 'eval', 'rewards', 'mesh', 'train.steps'),
  # These decide memory: a run that ran out of it, or moves to other devices, may continue with other values.
  *('train.micro_batch_size', 'model.remat', 'model.attention', 'rollout.slots', 'rollout.offload'),
  *('tools.workers', 'tools.timeout_s', 'tools.env_vars'),
)


def check_config(workdir: epath.Path, configs: dict, console: rich.console.Console) -> None:
  """Prints the config fields that changed since the run began; refuses changes that would corrupt the run.

  Stages without a checkpoint may change in any way.
  """
  path = workdir / 'config.json'
  old_configs = config_lib.parse_saved(path)
  saved_steps = {name: finished_steps(workdir / 'checkpoints' / name) for name in old_configs}
  begun = [name for name, steps in saved_steps.items() if steps]
  if begun != list(configs)[: len(begun)]:
    raise InputError(
      f'config.stages: {workdir} holds another run, of which {", ".join(begun)} has begun, and this one has '
      f'{", ".join(configs)}: choose another --workdir for a new run, or set the stages back'
    )
  for name, config in configs.items():
    changes = config_lib.difference(old_configs[name], config) if name in old_configs else {}
    for key, (old, new) in changes.items():
      if key != 'stages':
        console.out(f'config.{key} of {name}: {old!r} in {path}, now {new!r}', highlight=False)
    for key in changes if name in begun else ():
      old, new = changes[key]
      last_step, is_newest = saved_steps[name][0], name == begun[-1]
      trains = is_newest and last_step < config.train.steps
      if not (trains and key in config.save.allow_changes and not _kept_by(key, config)):
        advice = _advice(key, config, newest=begun[-1], trains=trains)
        _refuse(workdir, name, key, old, new, is_newest=is_newest, last_step=last_step, advice=advice)


def _kept_by(key: str, config: config_lib.Config) -> str:
  """Returns the field whose state, in checkpoints, depends on the old value of `key`; '' if there is none."""
  rl = config.rl
  by_verdicts = {'rl.curriculum': rl.curriculum, 'rl.replay': rl.replay}
  samples = {'rollout.staleness': config.rollout.staleness, 'rl.keep_surplus': rl.keep_surplus, 'rl.replay': rl.replay}
  states = dict.fromkeys(('reward', 'reward_weights', 'rl.correct_by'), by_verdicts)
  states |= dict.fromkeys(('rollout.max_new_tokens', 'rollout.temperature'), samples)
  states |= {'rl.kl_coef': {'rl.kl_target': rl.kl_target}, 'rl.entropy_coef': {'rl.entropy_target': rl.entropy_target}}
  return next((field for field, used in states.get(key, {}).items() if used), '')


def _advice(key: str, config: config_lib.Config, newest: str, trains: bool) -> str:
  """Returns how a stage can take another value of a field, as the end of a message; '' if it cannot.

  Args:
    newest: name of the newest stage that has begun. trains: whether steps of this stage are left.
  """
  if key not in CHANGEABLE:
    return ''
  if field := _kept_by(key, config):
    return f'; the checkpoint keeps what config.{field} has made of the old value'
  if not trains:
    return f'; no step of the stage is left: set config.{newest}.{key} for {newest} alone, or raise its train.steps'
  return f', or allow it by --config.save.allow_changes={key}'


def _refuse(
  workdir: epath.Path, stage: str, key: str, old: Any, new: Any, is_newest: bool, last_step: int, advice: str
) -> None:
  """Raises InputError if a stage that has begun cannot continue with a change."""
  no_epochs = key == 'train.epochs' and not new  # then train.steps applies
  free = key == 'stages' or no_epochs or any(key == f or key.startswith(f + '.') for f in _FREE)
  if key == 'train.steps' and (not is_newest or new < last_step):
    raise InputError(
      f'config.train.steps: {new} of {stage}, but {workdir} holds its step {last_step}'
      + ('' if is_newest else ' and a later stage has begun from it')
      + f'; set it back to {old} or choose another --workdir'
    )
  if not free:
    raise InputError(
      f'{workdir}: config.{key} of {stage} differs from the run that is being resumed ({old!r}, now {new!r}); '
      f'set it back or choose another --workdir, where init_from={workdir} starts from its weights{advice}'
    )


def check_models(prepared: Sequence[PreparedStage], workdir: epath.Path, console: rich.console.Console) -> None:
  """Raises InputError if a stage's checkpoint is of another model or number of rows; warns if it is of other rows."""
  from jaxpost.models import decoder_configs

  for p in prepared:
    if not (saved := load_weights.saved_meta(p.name, workdir)):
      continue
    saved_model = dataclasses.asdict(decoder_configs.from_json(saved['model']))
    for field, value in dataclasses.asdict(p.inputs.model.config).items():
      if saved_model.get(field) != value:
        raise InputError(
          f'config.model.path of {p.name}: has {field} {value!r}, in the checkpoint '
          f'{saved_model.get(field)!r}; bring it back or change --workdir'
        )
    if finished_steps(workdir / 'checkpoints' / p.name)[0] >= p.config.train.steps:
      continue  # the stage reads no more rows
    old, new = saved['stream'].get('prompts', saved['stream']), p.data.stream.state()
    for key, kind in (('num_rows', 'rows'), ('num_prompts', 'prompts')):
      if key in old and key in new and old[key] != new[key]:
        raise InputError(
          f'config.data.path of {p.name}: {p.config.data.path} has {new[key]} {kind}, and had {old[key]} when the '
          f'checkpoint was saved; bring them back, or choose another --workdir, where init_from={workdir} starts from '
          'its weights'
        )
    if saved.get('rows', p.data.checksum) != p.data.checksum:
      if p.config.data.map and sources.digest(prepare.read_rows(p.config)) != p.data.checksum:
        continue  # rows of a map that draws random numbers differ each time that they are read
      text = f'{p.config.data.path} has other rows than when the checkpoint was saved, whose steps used the old ones'
      console.out(f'warning: config.data.path of {p.name}: {text}', highlight=False)


def changed_code(workdir: epath.Path, files: Mapping[str, str]) -> list[str]:
  """Returns a warning for each code file of a resumed run that has changed since its last start.

  Args:
    files: {path: digest}, see `start.code_files`.
  """
  starts = read_growing(workdir / start.FILE) if any(workdir.glob('checkpoints/*/*')) else []
  old_files = starts[-1].get('files', {}) if starts else {}
  return [
    f'warning: {path}: has changed since the last start of this run, whose steps so far used the old version'
    for path, digest in files.items()
    if old_files.get(path, digest) != digest
  ]


def remove_drafts(workdir: epath.Path) -> None:
  """Removes the drafts of files (`object_store.write`) that processes of this host left in the folder as they died."""
  pattern = re.compile(rf'\..+\.{re.escape(socket.gethostname())}\.(\d+)\.tmp')
  for parent, _, names in [] if object_store.is_remote(workdir) else os.walk(workdir):
    for match in filter(None, map(pattern.fullmatch, names)):
      try:
        os.kill(int(match[1]), 0)  # sends nothing
      except ProcessLookupError:
        os.unlink(os.path.join(parent, match[0]))
      except OSError:  # the process is alive, and of another user
        pass
