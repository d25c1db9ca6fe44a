"""TODO."""

import hashlib
import json
from collections.abc import Callable

import numpy as np
from etils import epath

from jaxpost.distributed import coordination
from jaxpost.storage import object_store


def fingerprint(parts) -> str:
  """16 hex digits of anything that JSON can spell."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load_or_make(path, make: Callable) -> dict:
  """{name: array} from the folder `path`, or of `make()`, which then fills it.

  All processes call it and agree; process 0 writes. Arrays on local disks are
  mapped, not read. Without a path nothing is kept.
  """
  if path is None:
    return make()
  path = epath.Path(path)
  found = _index(path)
  if coordination.broadcast(found is not None):  # what process 0 sees counts
    if found is None:
      raise FileNotFoundError(f'{path}: process 0 sees it and this one not')
    return {name: _load(path / f'{name}.npy') for name in found}
  values = make()
  if coordination.process_index() == 0:
    _write(path, values)
  coordination.all_gather('written')
  return values


def _index(path):
  """{name: bytes of its file} of a finished folder, else None."""
  if not (path / 'index.json').exists():
    return None
  index = json.loads((path / 'index.json').read_text())
  whole = all((path / f'{n}.npy').exists() and (path / f'{n}.npy').stat().length == size for n, size in index.items())
  return index if whole else None


def _load(file):
  if '://' in str(file):
    with file.open('rb') as f:
      return np.load(f, allow_pickle=False)
  return np.load(str(file), mmap_mode='r', allow_pickle=False)


def _write(path, values):
  path.mkdir(parents=True, exist_ok=True)
  (path / 'index.json').unlink(missing_ok=True)
  for name, array in values.items():
    draft = path / f'.{name}.tmp'
    with draft.open('wb') as f:
      np.save(f, array, allow_pickle=False)
    draft.replace(path / f'{name}.npy')
  object_store.write_text(path / 'index.json', json.dumps({n: (path / f'{n}.npy').stat().length for n in values}))
