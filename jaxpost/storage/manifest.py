"""The manifest of a checkpoint (checksums.json): what was saved, and its checksums.

Orbax loads a flipped bit without an error. So each step of a run has a manifest, written
once all other files are there: a step without one was never finished, and a step whose
files differ from it is damaged. Its first line is the crc32 of the JSON that follows.
"""

from __future__ import annotations

import json
import zlib
from typing import NamedTuple

from etils import epath

from jaxpost.storage import object_store

NAME = 'checksums.json'


class DamagedError(Exception):
  """A step of a checkpoint is unfinished or damaged; the message names the file."""


class Manifest(NamedTuple):
  """The contents of a finished step."""

  step: int  # updates done
  leaves: dict[str, list]  # 'params/embed' -> [shape, dtype]
  metrics: dict[str, float]
  files: dict[str, list]  # name below the step's folder -> [bytes, crc32]


def write(folder: epath.PathLike, manifest: Manifest) -> None:
  """Finishes the step in `folder`, atomically."""
  text = json.dumps(manifest._asdict(), sort_keys=True).encode()
  object_store.write(epath.Path(folder) / NAME, b'%08x\n' % zlib.crc32(text) + text)


def read(folder: epath.PathLike, step: int) -> Manifest:
  """Reads the manifest of a step below `folder`; looks at no other file.

  Raises:
    DamagedError: where there is none, or it is not the one that was written.
  """
  path = epath.Path(folder) / str(step) / NAME
  if not path.exists():
    raise DamagedError(f'{step}/{NAME} is missing, the save was never finished')
  checksum, _, text = path.read_bytes().partition(b'\n')
  if checksum != b'%08x' % zlib.crc32(text):
    raise DamagedError(f'{step}/{NAME} differs from its checksum')
  manifest = Manifest(**json.loads(text))
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
