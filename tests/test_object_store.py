"""Tests of models and runs on object stores (gs://, s3://), with a fake store in a folder.

Like these stores, the fake cannot append to a file, has no folders without files, and
copies a file to rename it.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import rich.console
import safetensors
import safetensors.numpy
import tiny
from etils import epath
from etils.epath import backend, gpath
from fsspec import spec

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.formats import hf, model_folder, safetensors_file
from jaxpost.monitor import metrics
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store
from jaxpost.storage import remote as remote_lib
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.tools import inference

CONSOLE = rich.console.Console(quiet=True)


class FakeStore(backend.Backend):
  """A store that keeps objects as files below `root` and counts the bytes that are read."""

  def __init__(self, root):
    self.root, self.read = pathlib.Path(root), 0

  def _at(self, path):
    return self.root / os.fspath(path).split('://')[1]

  def open(self, path, mode):
    assert 'a' not in mode, f'{path}: no store can append'
    if 'w' in mode:
      self._at(path).parent.mkdir(parents=True, exist_ok=True)
      return open(self._at(path), mode)
    return CountingFile(open(self._at(path), mode), self)

  def exists(self, path):
    return self._at(path).is_file() or self.isdir(path)

  def isdir(self, path):
    return any(p.is_file() for p in self._at(path).rglob('*'))

  def listdir(self, path):
    return [p.name for p in self._at(path).iterdir() if p.is_file() or self.isdir(f'{path}/{p.name}')]

  def glob(self, path):
    folder, _, pattern = os.fspath(path).rpartition('/')
    return [f'{folder}/{p.name}' for p in self._at(folder).glob(pattern)]

  def walk(self, top, **_):
    raise NotImplementedError(top)

  def makedirs(self, path, **_):
    pass

  mkdir = makedirs

  def rmtree(self, path):
    shutil.rmtree(self._at(path))

  def remove(self, path):
    self._at(path).unlink()

  def rename(self, path, dst):
    assert not self.isdir(path), f'{path}: no store can rename a folder'
    shutil.copyfile(self._at(path), self._at(dst))
    self.remove(path)

  replace = rename

  def copy(self, path, dst, overwrite):
    raise NotImplementedError(path, dst, overwrite)

  def stat(self, path):
    return backend.os_backend.stat(self._at(path))


class CountingFile:
  """A file that adds to its store the number of bytes read."""

  def __init__(self, file, store):
    self._file, self._store = file, store

  def read(self, size=-1):
    data = self._file.read(size)
    self._store.read += len(data)
    return data

  def __getattr__(self, name):
    return getattr(self._file, name)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._file.close()


@pytest.fixture
def objects(tmp_path, monkeypatch):
  store = FakeStore(tmp_path / 'objects')
  for scheme in 'gs', 's3':
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, scheme, store)
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  (tmp_path / 'cwd').mkdir()
  monkeypatch.chdir(tmp_path / 'cwd')  # a path that is mistaken for a local one would be written here
  object_store.check.cache_clear()
  remote_lib.here.cache_clear()
  yield store
  assert not list((tmp_path / 'cwd').iterdir())


def config(model, **over):
  return tiny.run_config(
    model,
    **tiny.merged(
      dict(
        train=dict(steps=4),
        save=dict(every=2, export=True),
        log=dict(tensorboard=True),
        eval=dict(data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=20')),
      ),
      over,
    ),
  )


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_run_on_a_store_equals_run_on_a_disk(objects, tmp_path, scheme):
  model = tiny.folder(tmp_path / 'model', num_layers=2)
  stages.run(config(model), tmp_path / 'local', CONSOLE)
  remote_lib.upload(model, f'{scheme}://bucket/model')
  run = f'{scheme}://bucket/runs/one'
  run_config = config(f'{scheme}://bucket/model')
  stages.run(tiny.merged(run_config, dict(train=dict(steps=2))), run, CONSOLE)
  run_folder = objects.root / 'bucket/runs/one'
  shutil.rmtree(run_folder / 'export')
  summary = stages.run(run_config, run, CONSOLE)  # resumes after step 2

  def rows(where):
    return [r for r in metrics.comparable_rows(where / 'metrics.jsonl') if r['step'] != 2 or r['split'] == 'train']

  assert rows(run_folder) == rows(tmp_path / 'local')
  assert len(rows(run_folder)) == 6 and len((run_folder / 'resumes.jsonl').read_text().splitlines()) == 1

  def names(folder):
    return {
      re.sub('[0-9]{5,}[^/]*', 'N', str(p.relative_to(folder)))
      for p in folder.rglob('*')
      if p.is_file() and 'state' not in p.parts
    }

  # A store cannot append, so a run on it writes no timeline.
  assert names(run_folder) - {'resumes.jsonl'} == names(tmp_path / 'local') - {'timeline/sft.json'}
  assert summary['paths']['export'] == f'{run}/export'
  for name in 'model.safetensors', 'config.json', 'README.md':
    a, b = ((w / 'export' / name).read_bytes() for w in (run_folder, tmp_path / 'local'))
    # The card names the folder of the initial weights, which differs.
    assert re.sub(rb'base model \| .*', b'', a) == re.sub(rb'base model \| .*', b'', b), name
  assert stages.run(run_config, run, CONSOLE) == summary  # the run had finished

  from_run = inference.from_run(run, step=4)
  from_export = inference.from_folder(f'{run}/export')
  for a, b in zip(*(jax.tree.leaves(w.params) for w in (from_run, from_export))):
    np.testing.assert_array_equal(a, b)


def test_adapter_and_merged_export_on_a_store_load_the_same_weights(objects, tmp_path):
  model = tiny.folder(tmp_path / 'model', num_layers=2)
  remote_lib.upload(model, 'gs://bucket/model')
  stages.run(config('gs://bucket/model', lora=dict(rank=2)), 'gs://bucket/one', CONSOLE)
  plain = config_lib.parse(tiny.run_config(''))['sft']
  merged, adapter = (inference.from_folder(f'gs://bucket/one/export{end}', plain) for end in ('', '/adapter'))
  for a, b in zip(*(jax.tree.leaves(w.params) for w in (merged, adapter))):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_restore_skips_a_damaged_step(objects):
  writer = Checkpointer('gs://bucket/run', keep=2)
  tree = {'w': jax.numpy.arange(8.0)}
  for step in 1, 2:
    writer.save(step, jax.tree.map(lambda x, n=step: n * x, tree), {'at': step})
  writer.close()
  file = max(
    (p for p in (objects.root / 'bucket/run/2/state').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size
  )
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)
  warnings = []
  template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
  reader = Checkpointer('gs://bucket/run')
  arrays = (objects.root / 'bucket/run/2/state').rename(objects.root / 'away')
  assert reader.restore_meta() == {'at': 2}  # reading the metadata needs no arrays
  assert reader.leaves() == {'w': [[8], 'float32']}
  arrays.rename(objects.root / 'bucket/run/2/state')
  step, state, meta = reader.restore(template, warn=warnings.append)
  reader.close()
  assert step == 1 and meta == {'at': 1} and len(warnings) == 1
  np.testing.assert_array_equal(state['w'], tree['w'])


# --------------------------------------------------------------------- reading


@pytest.fixture
def tensors(objects):
  """Random tensors of several types in a file on the store."""
  random = np.random.RandomState(0)
  values = {
    'a': random.standard_normal((6, 5, 4)).astype(np.float32),
    'b': random.standard_normal((7, 3)).astype('bfloat16'),
    'c': random.randint(0, 255, (9,), np.uint8),
    'd': random.standard_normal((2, 2)).astype(np.float16),
  }
  path = objects.root / 'bucket/x.safetensors'
  path.parent.mkdir(parents=True)
  safetensors.numpy.save_file(values, path, metadata={'format': 'pt'})
  return path


@pytest.mark.parametrize(
  'name, index',
  [
    ('a', slice(0, 6)),
    ('a', (slice(2, 5), slice(1, 3))),
    ('a', (slice(0, 6), slice(0, 5), slice(3, 4))),
    ('b', slice(3, 7)),
    ('c', slice(2, 9)),
    ('d', (slice(1, 2), slice(0, 2))),
  ],
)
def test_slices_are_those_of_a_local_file(tensors, name, index):
  remote = epath.Path('gs://bucket/x.safetensors')
  with remote.open('rb') as file, safetensors.safe_open(tensors, framework='np') as local:
    actual = safetensors_file.tensors(file, remote.stat().length)
    assert actual.keys() == set(local.keys())
    expected = local.get_slice(name)
    assert list(actual[name].shape) == expected.get_shape()
    assert actual[name].dtype == expected.get_dtype()
    np.testing.assert_array_equal(actual[name][index], expected[index], strict=True)


def test_reference_to_a_reading_frame_keeps_no_file_open(tensors, monkeypatch):
  """A watchdog on another thread may look at all frames at any moment."""
  frames, frombuffer = [], np.frombuffer

  def keeping_frames(*args):
    frame = sys._getframe()
    while frame := frame.f_back:
      frames.append(frame)
    return frombuffer(*args)

  monkeypatch.setattr(np, 'frombuffer', keeping_frames)
  with contextlib.ExitStack() as stack:
    read = model_folder.open_file(epath.Path(tensors), stack)['a'][slice(1, 3)]
  assert frames and read.shape[0] == 2


def test_only_the_rows_of_a_shard_are_read(tensors, objects):
  with epath.Path('gs://bucket/x.safetensors').open('rb') as file:
    arrays = safetensors_file.tensors(file, tensors.stat().st_size)
    objects.read = 0
    arrays['a'][slice(2, 4), slice(0, 2)]
  assert objects.read == 2 * 5 * 4 * 4


@pytest.mark.parametrize(
  'data', [b'', b'short', (1 << 40).to_bytes(8, 'little') + b'{}', (4).to_bytes(8, 'little') + b'{"a"']
)
def test_unreadable_safetensors_is_refused(objects, tmp_path, data):
  model = pathlib.Path(tiny.folder(tmp_path / 'model'))
  (model / 'model.safetensors').write_bytes(data)
  remote_lib.upload(model, 'gs://bucket/model')
  with pytest.raises(InputError, match='model.safetensors: unreadable') as e:
    hf.check('gs://bucket/model', hf.read_config('gs://bucket/model'))
  assert '\n' not in str(e.value)


def test_truncated_file_is_refused_with_its_name(objects, tmp_path):
  model = pathlib.Path(tiny.folder(tmp_path / 'model'))
  file = model / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-4])
  remote_lib.upload(model, 'gs://bucket/model')
  with pytest.raises(InputError, match=r'unreadable \(its header describes'):
    hf.check('gs://bucket/model', hf.read_config('gs://bucket/model'))


@pytest.mark.parametrize(
  'header',
  [
    [1],
    {'a': 5},
    {'a': dict(dtype='F32', shape=[4])},
    {'a': dict(dtype='F32', shape=[4], data_offsets=[0, 4])},
    {'a': dict(dtype='F32', shape=[1], data_offsets=[4, 0])},
  ],
)
def test_damaged_header_is_refused(header):
  text = json.dumps(header).encode()
  data = len(text).to_bytes(8, 'little') + text + bytes(4)
  with pytest.raises(ValueError, match='its header'):
    safetensors_file.tensors(io.BytesIO(data), len(data))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
  'path, package, extra', [('gs://bucket/run', 'gcsfs', r'\[gcs\]'), ('s3://bucket/run', 's3fs', r'\[s3\]')]
)
def test_a_missing_extra_is_named(monkeypatch, path, package, extra):
  monkeypatch.setitem(__import__('sys').modules, package, None)
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  object_store.check.cache_clear()
  for call in (
    lambda: stages.run(tiny.run_config(''), path, CONSOLE),
    lambda: inference.from_run(path),
    lambda: inference.from_folder(path),
  ):
    with pytest.raises(InputError, match=f'{path}: needs the extra {extra}: pip install') as error:
      call()
    assert '\n' not in str(error.value)


def test_unknown_store_is_refused():
  with pytest.raises(InputError, match='--workdir: hdfs://a/b: only the object stores'):
    stages.run(tiny.run_config(''), 'hdfs://a/b', CONSOLE)


def test_missing_model_is_refused(objects):
  with pytest.raises(InputError, match='gs://bucket/none does not exist'):
    stages.run(config('gs://bucket/none'), 'gs://bucket/run', CONSOLE)


def test_read_fetches_only_the_requested_range():
  """fsspec by itself would read megabytes ahead at every slice."""
  data, fetched = os.urandom(20_000_000), []

  class Object(spec.AbstractBufferedFile):
    def _fetch_range(self, start, end):
      fetched.append(end - start)
      return data[start:end]

  def read(file):
    file.seek(7_000_000)
    return file.read(1000)

  assert read(Object(None, 'x', size=len(data))) == data[7_000_000:7_001_000]
  assert fetched.pop() > 1_000_000
  file = remote_lib.exactly(Object(None, 'x', size=len(data)))
  assert read(file) == data[7_000_000:7_001_000]
  assert fetched == [1000]
