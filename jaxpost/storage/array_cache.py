"""Arrays on disk, computed once: a folder of .npy files and an index.

The index is written last, with checksums of the files: a folder without one, or with files that
differ, is computed again.
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

  All processes call it and agree; process 0 writes. Arrays on local disks are
  mapped, not read. Without a path nothing is kept.
  """
  if path is None:
    return make()
  path = epath.Path(path)
  found = _index(path, verify=coordination.process_index() == 0)
  if coordination.broadcast(found is not None):  # what process 0 sees counts
    if found is None:
      raise FileNotFoundError(f'{path}: process 0 sees it and this one not')
    return {name: _load(path / f'{name}.npy') for name in found}
  values = make()
  if coordination.process_index() == 0:
    _write(path, values)
  coordination.all_gather('written')
  return values


def _index(path: epath.Path, verify: bool) -> dict[str, list] | None:
  """Returns {name: [bytes, crc32] of its file} of a finished folder, else None."""
  if not (path / _INDEX).exists():
    return None
  try:
    index = seals.loads((path / _INDEX).read_bytes(), _INDEX)
    files = {f'{name}.npy': entry for name, entry in index.items()}
    if verify and files != (found := object_store.checksums(path, [f for f in files if (path / f).exists()])):
      wrong = next(f for f in files if found.get(f) != files[f])
      raise seals.DamagedError(f'{wrong} is missing or differs from its checksum')
  except seals.DamagedError as error:
    logging.warning('%s: %s; its arrays are computed again', path, error)
    return None
  return index


def _load(file: epath.Path) -> np.ndarray:
  if '://' in str(file):
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
