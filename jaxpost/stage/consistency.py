"""Checks the folder of a run, and compares configs; `resumed_run.py` compares a run with the one that it resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store
from jaxpost.storage.manifest import finished_steps


def check_workdir(text: epath.PathLike) -> epath.Path:
  """Returns the folder of a run; raises InputError if it is a file, cannot be written or has broken links."""
  if not str(text):
    raise InputError('--workdir: is empty; name a folder for the run')
  object_store.check(str(text), '--workdir')
  workdir = epath.Path(text).expanduser()
  if object_store.is_remote(workdir):
    return workdir
  existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
  if not existing.is_dir():
    raise InputError(f'--workdir: {existing} is a file, and a run needs a folder; name another')
  with object_store.explained(), contextlib.suppress(FileNotFoundError):
    os.stat(workdir)
  for path in (workdir / 'checkpoints', *workdir.glob('checkpoints/*')):
    if os.path.islink(path) and not path.exists():
      raise InputError(f'{path}: is a link that leads nowhere; remove it, or name another --workdir')
  if not os.access(existing, os.W_OK):
    raise InputError(f'--workdir: {existing} cannot be written; name another, or change its permissions')
  return workdir


def is_finished(workdir: epath.Path, configs: dict) -> bool:
  """Returns whether the last stage has its final checkpoint, its export and the run's summary; needs no device."""
  name, config = list(configs.items())[-1]
  steps = finished_steps(workdir / 'checkpoints' / name)
  exported = not config.save.export or (workdir / 'export').exists()
  return bool(steps) and steps[0] >= config.train.steps and exported and (workdir / 'summary.json').exists()


def spelled(value: Any) -> Any:
  """Returns a config as it reads back from JSON; functions become their names, which are the same in every process."""

  def to_json(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
      return vars(item)
    named = item if hasattr(item, '__qualname__') else type(item)
    return f'{named.__module__}:{named.__qualname__}' if callable(item) else str(item)

  return json.loads(json.dumps(value, default=to_json))


def changes(raw: dict) -> dict[str, dict]:
  """Returns {stage: {field: value}} of the fields that are not at their defaults."""
  defaults = spelled(config_lib.defaults())
  out = {}
  for name, config in config_lib.parse(raw).items():
    changed = difference(defaults, spelled(vars(config)))
    out[name] = {key: value for key, (_, value) in changed.items() if key != 'stages'}
  return out


def difference(old: Any, new: Any, prefix: str = '') -> dict[str, tuple]:
  """Returns {dotted key: (old, new)} of the leaves that differ."""
  if isinstance(old, dict) and isinstance(new, dict):
    out: dict[str, tuple] = {}
    for key in sorted({*old, *new}):
      out |= difference(old.get(key), new.get(key), f'{prefix}{key}.')
    return out
  return {} if old == new else {prefix[:-1]: (old, new)}
