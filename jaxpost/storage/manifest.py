"""The manifest of a checkpoint (checksums.json): what was saved, and its checksums.

Orbax loads a flipped bit without an error. So each step of a run has a manifest, written once all other files are
there: a step without one was never finished, and a step whose files differ from it is damaged. Its first line is its
checksum (`seals.dumps`). Arrays of a state (a pytree) are saved under their names: 'params/embed'.
"""

from __future__ import annotations

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
  """Finishes the step in `folder`, atomically."""
  object_store.write(epath.Path(folder) / NAME, seals.dumps(manifest._asdict()))


def read(folder: epath.PathLike, step: int) -> Manifest:
  """Reads the manifest of a step below `folder`; looks at no other file.

  Raises:
    DamagedError: where there is none (the step is unfinished), or it is not the one that was written.
  """
  path = epath.Path(folder) / str(step) / NAME
  if not path.exists():
    raise DamagedError(f'{step}/{NAME} is missing, the save was never finished')
  manifest = Manifest(**seals.loads(path.read_bytes(), f'{step}/{NAME}'))
  if manifest.step != step:
    raise DamagedError(f'{step}/{NAME} belongs to step {manifest.step}')
  return manifest


def verify(manifest: Manifest, folder: epath.PathLike) -> None:
  """Reads all files of a step in `folder`; raises DamagedError unless they are those of its manifest."""
  folder, step = epath.Path(folder), manifest.step
  for name in manifest.files:
    if not (folder / name).is_file():
      raise DamagedError(f'{step}/{name} is missing')
  for name, found in object_store.checksums(folder, manifest.files).items():
    if found != manifest.files[name]:
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


def split_run(text: str) -> tuple[str, str]:
  """Splits RUN[@step] into (folder, step or ''); a folder that is there may have an '@' in its own path."""
  if epath.Path(text).expanduser().exists():
    return text, ''
  folder, at, step = text.rpartition('@')
  return (folder, step) if at else (text, '')


def name_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
  """Returns ({'opt_state/0/mu/embed': leaf}, treedef), in leaf order."""
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


def check_leaves(where: epath.Path, saved: dict[str, list], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
  """Raises InputError if the leaves on disk are not the ones wanted."""
  here = {k: f'{x.dtype} {list(x.shape)}' for k, x in wanted.items()}
  there = {k: f'{dtype} {shape}' for k, (shape, dtype) in saved.items()}
  wrong = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
  if not wrong:
    return
  key = wrong[0]
  more = f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''
  raise InputError(
    f'{where}: {key} is {there.get(key, "absent")} in the checkpoint and'
    f' {here.get(key, "absent")} in the run{more}; the config changed since'
    ' this checkpoint: restore the old values or choose another folder'
  )
