"""The manifest of a checkpoint (checksums.json): what was saved, and its checksums.

Orbax does not detect flipped bits. So each step of a run has a manifest, which is written after all other files: a step
without one is unfinished, and a step whose files differ from it is damaged. Its first line is its own checksum
(`seals.dumps`). The arrays of a state (a pytree) are saved by name: 'params/embed'.
"""

import contextlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxpost.errors import InputError
from jaxpost.storage import object_store, seals
from jaxpost.storage.seals import NAME, DamagedError


class Manifest(NamedTuple):
  """The contents of a finished step."""

  step: int  # updates done
  leaves: dict[str, list]  # 'params/embed' -> [shape, dtype]
  metrics: dict[str, float]
  files: dict[str, list]  # name below the step's folder -> [bytes, crc32]


def write(folder: epath.PathLike, manifest: Manifest) -> None:
  """Writes the manifest of the step in `folder`, atomically, which marks the step as finished."""
  object_store.write(epath.Path(folder) / NAME, seals.dumps(manifest._asdict()))


def read(folder: epath.PathLike, step: int) -> Manifest:
  """Reads the manifest of a step below `folder`; DamagedError if it is missing (the step is unfinished) or damaged."""
  path = epath.Path(folder) / str(step) / NAME
  if not path.exists():
    raise DamagedError(f'{step}/{NAME} is missing, the save was never finished')
  manifest = Manifest(**seals.loads(path.read_bytes(), f'{step}/{NAME}'))
  if manifest.step != step:
    raise DamagedError(f'{step}/{NAME} belongs to step {manifest.step}')
  return manifest


def verify(manifest: Manifest, folder: epath.PathLike) -> None:
  """Raises DamagedError unless all files of a step in `folder` have the checksums of its manifest."""
  folder, step = epath.Path(folder), manifest.step
  for name in manifest.files:
    if not (folder / name).is_file():
      raise DamagedError(f'{step}/{name} is missing')
  for name, checksum in object_store.checksums(folder, manifest.files).items():
    if checksum != manifest.files[name]:
      raise DamagedError(f'{step}/{name} differs from its checksum')


def steps(folder: epath.PathLike) -> list[int]:
  """Returns the steps that have a folder, finished or not, newest first."""
  folder = epath.Path(folder)
  if not folder.exists():
    return []
  names = {path.name for path in folder.iterdir() if path.is_dir()}
  numbers = {int(name) for name in names if name.isascii() and name.isdigit()}
  return sorted((s for s in numbers if str(s) in names), reverse=True)


def finished_steps(folder: epath.PathLike) -> list[int]:
  """Returns the steps whose save was finished, newest first, without verifying them."""
  folder = epath.Path(folder)
  return [s for s in steps(folder) if (folder / str(s) / NAME).exists()]


def scores(folder: epath.PathLike, steps: Iterable[int], metric: str, mode: str) -> dict[int, float]:
  """Returns {step: score} of the steps with a good manifest: a metric, negative for `mode` 'min'; -inf without it."""
  out, sign = {}, 1 if mode == 'max' else -1
  for step in steps:
    with contextlib.suppress(DamagedError):
      value = read(folder, step).metrics.get(metric, math.nan)
      out[step] = -math.inf if math.isnan(value) else sign * value
  return out


def best(folder: epath.PathLike, metric: str, mode: str) -> int | None:
  """Returns the finished step with the best metric, the later one of equals; None if no step has it."""
  found = scores(folder, finished_steps(folder), metric, mode)
  return max((step for step in found if found[step] > -math.inf), key=lambda step: (found[step], step), default=None)


def is_finished(workdir: epath.Path, configs: dict) -> bool:
  """Returns whether the last stage has its final checkpoint, its export and the run's summary; needs no device."""
  name, config = list(configs.items())[-1]
  saved_steps = finished_steps(workdir / 'checkpoints' / name)
  exported = not config.save.export or (workdir / 'export').exists()
  return bool(saved_steps) and saved_steps[0] >= config.train.steps and exported and (workdir / 'summary.json').exists()


def split_run(text: str) -> tuple[str, str]:
  """Splits RUN[@step] into (folder, step or ''); the path of an existing folder may itself contain an '@'."""
  if epath.Path(text).expanduser().exists():
    return text, ''
  folder, at, step = text.rpartition('@')
  return (folder, step) if at else (text, '')


def name_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
  """Returns ({name such as 'opt_state/0/mu/embed': leaf}, treedef), in leaf order."""
  pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
  named = {}
  for path, leaf in pairs:
    key = jax.tree_util.keystr(path, simple=True, separator='/')
    if key in named:
      raise ValueError(f'two leaves of the state are both called {key}')
    named[key] = leaf
  return named, treedef


def check_arrays(named: dict[str, Any]) -> None:
  """Raises TypeError for leaves that a checkpoint cannot hold."""
  for key, leaf in named.items():
    if not isinstance(leaf, jax.Array):
      raise TypeError(f'{key} is a {type(leaf).__name__}, not a jax array')
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise TypeError(f'{key} is {leaf.dtype}; save jax.random.key_data of it')


def check_leaves(folder: epath.Path, saved: dict[str, list], targets: dict[str, jax.ShapeDtypeStruct]) -> None:
  """Raises InputError if the saved leaves, {name: [shape, dtype]}, differ from those of a run in shape or dtype."""
  in_run = {name: f'{x.dtype} {list(x.shape)}' for name, x in targets.items()}
  on_disk = {name: f'{dtype} {shape}' for name, (shape, dtype) in saved.items()}
  different = sorted(name for name in {*in_run, *on_disk} if in_run.get(name) != on_disk.get(name))
  if not different:
    return
  name = different[0]
  others = f' (and {len(different) - 1} more)' if len(different) > 1 else ''
  raise InputError(
    f'{folder}: {name} is {on_disk.get(name, "absent")} in the checkpoint and {in_run.get(name, "absent")} in the run'
    f'{others}; the config changed since this checkpoint: restore the old values or choose another folder'
  )
