"""A loss of power costs at most the steps after the newest checkpoint.

What is on a disk then: of a file, what was in it when it was last synced; of a folder, the names it
had when it was last synced. What was never synced is gone, or empty where its name was.
"""

import os
import stat

import numpy as np
import pytest
import tiny

from jaxpost import stages
from jaxpost.monitor import metrics
from jaxpost.storage import array_cache, manifest, object_store, run_lock


class Disk:
  """Follows os.fsync below a folder that is taken to be on the disk."""

  def __init__(self, root, monkeypatch):
    self.root = root.stat().st_ino
    self.files, self.folders, self.sync = {}, {}, os.fsync
    monkeypatch.setattr(os, 'fsync', self.fsync)

  def fsync(self, handle):
    self.sync(handle)
    found = os.fstat(handle)
    if stat.S_ISDIR(found.st_mode):
      with os.scandir(handle) as entries:
        self.folders[found.st_ino] = {e.name: (e.inode(), e.is_dir()) for e in entries}
    else:
      with open(f'/proc/self/fd/{handle}', 'rb') as file:
        self.files[found.st_ino] = file.read()

  def restore(self, target, inode=None):
    """Writes what is left after a loss of power."""
    target.mkdir()
    for name, (number, is_folder) in self.folders.get(inode or self.root, {}).items():
      if is_folder:
        self.restore(target / name, number)
      else:
        (target / name).write_bytes(self.files.get(number, b''))


@pytest.fixture
def place(tmp_path):
  (tmp_path / 'disk').mkdir()
  return tmp_path / 'disk'


def test_the_model_of_a_disk(place, tmp_path, monkeypatch):
  disk = Disk(place, monkeypatch)
  (place / 'lost').write_text('x')
  object_store.write(place / 'a' / 'b' / 'kept', b'y')
  (place / 'a' / 'b' / 'late').write_text('z')
  object_store.sync(place / 'a' / 'b')
  disk.restore(tmp_path / 'after')
  assert sorted(p.name for p in (tmp_path / 'after').rglob('*')) == ['a', 'b', 'kept', 'late', 'lost']
  assert (tmp_path / 'after/a/b/kept').read_bytes() == b'y' and (tmp_path / 'after/a/b/late').read_bytes() == b''


def test_a_run(place, tmp_path, monkeypatch):
  """Each checkpoint is there once it is sealed, with its rows; the export once the summary is."""
  monkeypatch.setattr(run_lock, 'WATCH_S', 0.1)  # the lock of the run is on the disk, too
  disk = Disk(place, monkeypatch)
  model = tiny.folder(tmp_path / 'nano')
  config = tiny.run_config(model, save=dict(every=2, keep=9, export=True))
  seal, sealed = manifest.write, []

  def write(folder, made):
    seal(folder, made)
    after = tmp_path / f'after{made.step}'
    disk.restore(after)
    folder = after / 'run/checkpoints/sft'
    manifest.verify(manifest.read(folder, made.step), folder / str(made.step))
    assert len(metrics.read_rows(after / 'run/metrics.jsonl')) >= made.step
    sealed.append(made.step)

  monkeypatch.setattr(manifest, 'write', write)
  stages.run(config, place / 'run')
  assert sealed == [2, 4, 6]
  disk.restore(tmp_path / 'end')
  monkeypatch.setattr(manifest, 'write', seal)
  assert stages.run(config, tmp_path / 'end/run')['steps/sft'] == 6  # finished before
  weights = [(p / 'run/export/model.safetensors').read_bytes() for p in (place, tmp_path / 'end')]
  assert weights[0] == weights[1]
  stages.run(config, tmp_path / 'after4/run')
  assert (tmp_path / 'after4/run/export/model.safetensors').read_bytes() == weights[0]
  assert metrics.comparable_rows(tmp_path / 'after4/run/metrics.jsonl') == metrics.comparable_rows(
    place / 'run/metrics.jsonl'
  )


def test_cached_arrays(place, tmp_path, monkeypatch):
  disk = Disk(place, monkeypatch)
  made = array_cache.load_or_make(place / 'cache/x', lambda: {'a': np.arange(1000)})
  disk.restore(tmp_path / 'after')
  found = array_cache.load_or_make(tmp_path / 'after/cache/x', lambda: pytest.fail('made again'))
  assert (found['a'] == made['a']).all()
