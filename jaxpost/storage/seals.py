"""Checksums of the files that a later run reads: checksums.json of a folder.

It maps each file's name to the list of versions that are accepted, each as [bytes, crc32], or [bytes, crc32, true] of
the beginning of a file that grows. The first line of checksums.json is the crc32 of its other lines. Files that are not
listed, and folders without checksums.json, are not checked.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Collection
from concurrent import futures
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.storage import object_store

NAME = 'checksums.json'


class DamagedError(Exception):
  """Data differs from its checksum; the message names the data."""


def fingerprint(parts: Any) -> str:
  """Returns 16 hex digits that identify JSON values."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def dumps(value: Any) -> bytes:
  """Returns a JSON value with its checksum in the first line."""
  text = json.dumps(value, sort_keys=True).encode()
  return b'%08x\n' % zlib.crc32(text) + text


def loads(data: bytes, name: object) -> Any:
  """Returns the value that `dumps` wrote; DamagedError, which begins with `name`, if it differs from its checksum."""
  checksum, _, text = data.partition(b'\n')
  if checksum != b'%08x' % zlib.crc32(text):
    raise DamagedError(f'{name} differs from its checksum')
  return json.loads(text)


def add(folder: epath.PathLike, names: Collection[str]) -> None:
  """Adds files that will not change to the checksums of their folder."""
  _update(epath.Path(folder), {n: [c] for n, c in object_store.checksums(folder, names).items()})


def write(path: epath.PathLike, text: str) -> None:
  """Writes a file and its checksum.

  The checksum is written first and the previous one stays accepted, so that an interrupt leaves a good file.
  """
  path, data = epath.Path(path), text.encode('utf-8', 'backslashreplace')
  previous = _read(path.parent).get(path.name, [])[:1]
  _update(path.parent, {path.name: [[len(data), zlib.crc32(data)], *previous]})
  object_store.write(path, data)


def add_beginning(path: epath.PathLike, size: int, crc: int) -> None:
  """Adds the first `size` bytes of a file that grows, and their crc32, to the checksums of its folder."""
  _update(epath.Path(path).parent, {epath.Path(path).name: [[size, crc, True]]})


def damaged(folder: epath.PathLike, names: Collection[str] | None = None) -> list[str]:
  """Returns which listed files, of `names` or (None) of all, differ from their checksums; missing ones do not count."""
  folder = epath.Path(folder)
  try:
    listed = _load(folder)
  except DamagedError:
    return [NAME]
  existing = [n for n in listed if (names is None or n in names) and (folder / n).is_file()]
  with futures.ThreadPoolExecutor(8) as pool:
    good = pool.map(lambda name: any(_matches(folder / name, *version) for version in listed[name]), existing)
    return [name for name, is_good in zip(existing, good) if not is_good]


def check(folder: epath.PathLike, names: Collection[str] | None = None) -> None:
  """Raises InputError if one of the listed files differs from its checksum."""
  if different := damaged(folder, names):
    raise InputError(
      f'{epath.Path(folder) / different[0]}: differs from its checksum, so it was damaged or changed; restore it from '
      f'a copy, or remove {epath.Path(folder) / NAME} if the change is intended'
    )


def warn(folder: epath.PathLike, names: Collection[str]) -> None:
  """Logs a line for each of these files that differs from its checksum; users may edit them."""
  for name in damaged(folder, names):
    logging.warning('%s: differs from its checksum: it was edited or damaged', epath.Path(folder) / name)


def read_json(path: epath.PathLike) -> dict[str, Any]:
  """Reads a JSON object from a file that `write` wrote; InputError if it is damaged."""
  path = epath.Path(path)
  check(path.parent, [path.name])
  return object_store.read_json(path)


def _matches(path: epath.Path, size: int, crc: int, grows: bool = False) -> bool:
  """Returns whether a file, or the beginning of a file that grows, has this checksum."""
  return object_store.checksum(path, size) == [size, crc] and (grows or path.stat().length == size)


def _load(folder: epath.Path) -> dict[str, list]:
  return loads((folder / NAME).read_bytes(), NAME) if (folder / NAME).exists() else {}


def _read(folder: epath.Path) -> dict[str, list]:
  try:
    return _load(folder)
  except DamagedError:
    return {}


def _update(folder: epath.Path, entries: dict[str, list]) -> None:
  object_store.write(folder / NAME, dumps(_read(folder) | entries))
