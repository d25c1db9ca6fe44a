"""Caches computed arrays on disk: a folder of .npy files and an index.

The index is written last, with checksums of the files. The arrays are computed again if a folder has no index, or has
files that differ from it.
"""

import logging
from collections.abc import Callable

import numpy as np
from etils import epath

from jaxpost.distributed import coordination
from jaxpost.storage import object_store, seals

_INDEX = 'index.json'


def load_or_make(path: epath.PathLike | None, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Returns {name: array} from the folder `path`, or calls `make` and writes its result there.

  All processes call it together; process 0 verifies and writes the files. Arrays on local disks are memory-mapped.
  Without a path nothing is cached.
  """
  if path is None:
    return make()
  path = epath.Path(path)
  index = _index(path, verify=coordination.process_index() == 0)
  if coordination.broadcast(index is not None):  # process 0 decides
    if index is None:
      raise FileNotFoundError(f'{path}: process 0 sees this folder, and this process does not')
    return {name: _load(path / f'{name}.npy') for name in index}
  values = make()
  if coordination.process_index() == 0:
    _write(path, values)
  coordination.all_gather('written')
  return values


def _index(path: epath.Path, verify: bool) -> dict[str, list] | None:
  """Returns {name: [bytes, crc32] of its file} of a finished folder; None for others."""
  if not (path / _INDEX).exists():
    return None
  try:
    index = seals.loads((path / _INDEX).read_bytes(), _INDEX)
    files = {f'{name}.npy': entry for name, entry in index.items()}
    if verify:
      on_disk = object_store.checksums(path, [name for name in files if (path / name).exists()])
      for name, checksum in files.items():
        if on_disk.get(name) != checksum:
          raise seals.DamagedError(f'{name} is missing or differs from its checksum')
  except seals.DamagedError as error:
    logging.warning('%s: %s; its arrays are computed again', path, error)
    return None
  return index


def _load(file: epath.Path) -> np.ndarray:
  if object_store.is_remote(file):
    with file.open('rb') as f:
      return np.load(f, allow_pickle=False)
  return np.load(str(file), mmap_mode='r', allow_pickle=False)


def _write(path: epath.Path, values: dict[str, np.ndarray]) -> None:
  object_store.make_folder(path)
  (path / _INDEX).unlink(missing_ok=True)
  for name, array in values.items():
    draft = path / f'.{name}.tmp'
    with draft.open('wb') as f:
      np.save(f, array, allow_pickle=False)
    if not object_store.is_remote(draft):
      object_store.sync(draft)
    draft.replace(path / f'{name}.npy')
  sums = object_store.checksums(path, [f'{name}.npy' for name in values])
  object_store.write(path / _INDEX, seals.dumps({name: sums[f'{name}.npy'] for name in values}))
