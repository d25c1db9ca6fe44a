"""A loss of power costs at most the steps after the newest checkpoint.

After it, a disk has the content that each file had when it was last synced, and the names that each folder had when
it was last synced. A file that was never synced is gone, or empty where its folder was synced with its name.
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
  """Records what os.fsync writes to the disk, below a folder that is taken to be on the disk."""

  def __init__(self, root, monkeypatch):
    self.root = root.stat().st_ino
    self.files, self.folders, self.sync = {}, {}, os.fsync
    monkeypatch.setattr(os, 'fsync', self.fsync)

  def fsync(self, handle):
    self.sync(handle)
    status = os.fstat(handle)
    if stat.S_ISDIR(status.st_mode):
      with os.scandir(handle) as entries:
        self.folders[status.st_ino] = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
    else:
      with open(f'/proc/self/fd/{handle}', 'rb') as file:
        self.files[status.st_ino] = file.read()

  def restore(self, target, inode=None):
    """Writes to `target` what the disk has after a loss of power."""
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


def test_disk_of_these_tests_keeps_only_synced_files(place, tmp_path, monkeypatch):
  disk = Disk(place, monkeypatch)
  (place / 'lost').write_text('x')
  object_store.write(place / 'a' / 'b' / 'kept', b'y')
  (place / 'a' / 'b' / 'late').write_text('z')
  object_store.sync(place / 'a' / 'b')
  disk.restore(tmp_path / 'after')
  assert sorted(p.name for p in (tmp_path / 'after').rglob('*')) == ['a', 'b', 'kept', 'late', 'lost']
  assert (tmp_path / 'after/a/b/kept').read_bytes() == b'y' and (tmp_path / 'after/a/b/late').read_bytes() == b''


def test_power_loss_keeps_sealed_checkpoints_and_export(place, tmp_path, monkeypatch):
  """After a checkpoint is sealed, it is on the disk with its rows of metrics; after the end, the export is, too."""
  monkeypatch.setattr(run_lock, 'WATCH_S', 0.1)  # the lock of the run is on the same disk
  disk = Disk(place, monkeypatch)
  model = tiny.folder(tmp_path / 'nano')
  config = tiny.run_config(model, save=dict(every=2, keep=9, export=True))
  seal, sealed = manifest.write, []

  def write(folder, checkpoint):
    seal(folder, checkpoint)
    after = tmp_path / f'after{checkpoint.step}'
    disk.restore(after)
    folder = after / 'run/checkpoints/sft'
    manifest.verify(manifest.read(folder, checkpoint.step), folder / str(checkpoint.step))
    assert len(metrics.read_rows(after / 'run/metrics.jsonl')) >= checkpoint.step
    sealed.append(checkpoint.step)

  monkeypatch.setattr(manifest, 'write', write)
  stages.run(config, place / 'run')
  assert sealed == [2, 4, 6]
  disk.restore(tmp_path / 'end')
  monkeypatch.setattr(manifest, 'write', seal)
  assert stages.run(config, tmp_path / 'end/run')['steps/sft'] == 6  # the run had finished
  weights = [(p / 'run/export/model.safetensors').read_bytes() for p in (place, tmp_path / 'end')]
  assert weights[0] == weights[1]
  stages.run(config, tmp_path / 'after4/run')
  assert (tmp_path / 'after4/run/export/model.safetensors').read_bytes() == weights[0]
  assert metrics.comparable_rows(tmp_path / 'after4/run/metrics.jsonl') == metrics.comparable_rows(
    place / 'run/metrics.jsonl'
  )


def test_power_loss_keeps_cached_arrays(place, tmp_path, monkeypatch):
  disk = Disk(place, monkeypatch)
  arrays = array_cache.load_or_make(place / 'cache/x', lambda: {'a': np.arange(1000)})
  disk.restore(tmp_path / 'after')
  restored = array_cache.load_or_make(tmp_path / 'after/cache/x', lambda: pytest.fail('made again'))
  assert (restored['a'] == arrays['a']).all()
