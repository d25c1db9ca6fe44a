"""A flipped bit in any file of a finished run is reported in one line, or changes nothing that is read again.

Files are read by this library; those that are never read again (the report, TensorBoard, traces) may be damaged.
"""

import contextlib
import io
import json
import logging
import random

import jax
import numpy as np
import pytest
import rich.console
import tiny

from jaxpost import stages
from jaxpost.data import tokenizer
from jaxpost.errors import InputError, NoCheckpointError
from jaxpost.formats import hf, hf_export
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics, program_table
from jaxpost.rollout import rollout_files
from jaxpost.stage import config as config_lib
from jaxpost.storage import array_cache, seals
from jaxpost.storage.checkpoint import Checkpointer

FLIPS = 200
PAIRS = 'generated:arithmetic_pairs:max=99,split=train,size=12'


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """(config, folder) of a finished run that has every kind of file."""
  folder = tmp_path_factory.mktemp('flips')
  config = tiny.run_config(
    tiny.folder(folder / 'nano'),
    stages=('dpo', 'grpo'),
    save=dict(export=True),
    log=dict(tensorboard=True, rollouts_every=1, samples_every=1),
    reward=tiny.low_share,
    dpo=dict(
      algorithm='dpo',
      data=dict(path=PAIRS),
      train=dict(steps=2, row_length=96, batch_size=4),
      preference=dict(precompute_ref=True),
    ),
    grpo=dict(algorithm='grpo', train=dict(steps=2, row_length=0), rollout=dict(prompts=2, group_size=2)),
  )
  stages.run(config, folder / 'run', rich.console.Console(quiet=True))
  return config, folder / 'run'


def comparable(value):
  """Returns the value with arrays replaced by (shape, dtype, bytes), so that values can be compared with ==."""
  return jax.tree.map(lambda x: (x.shape, str(x.dtype), np.asarray(x).tobytes()) if hasattr(x, 'dtype') else x, value)


def read_export(run):
  model = model_lib.build(hf.read_config(run / 'export'))
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = jax.tree.map(lambda _: here, jax.eval_shape(model.init, jax.random.key(0)))
  text = tokenizer.load(run / 'export')
  weights = comparable(hf.load_params(run / 'export', model, shardings, 'float32'))
  return weights, hf_export.read_generation(run / 'export'), text.stop_ids, text.encode('1+1')


def read_checkpoint(run, stage):
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with contextlib.closing(Checkpointer(run / 'checkpoints' / stage)) as checkpointer:
    step = checkpointer.latest()
    leaves = seals.loads((run / 'checkpoints' / stage / str(step) / seals.NAME).read_bytes(), '')['leaves']
    tree = {k: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here) for k, (shape, dtype) in leaves.items()}
    step, state, meta = checkpointer.restore(tree)
    return step, comparable(state), meta


def read(config, run, name):
  """Returns (all that readers of this file return, the lines that they print)."""
  console = rich.console.Console(file=io.StringIO(), width=400)
  kind = name.split('/')[0]
  if kind == 'cache':
    folder = (run / name).parent
    value = comparable(array_cache.load_or_make(folder, lambda: {'made': np.zeros(1)}))
  elif kind == 'export':
    value = read_export(run)
  elif kind == 'checkpoints':
    value = read_checkpoint(run, name.split('/')[1])
  elif kind == 'rollouts':
    rollout, arrays = rollout_files.load(run / name)
    value = comparable(arrays), comparable(vars(rollout) | {'prompts': [str(p) for p in rollout.prompts]})
  else:
    value = [
      stages.run(config, run, console),
      config_lib.parse_saved(run / 'config.json'),
      program_table.read(run / 'plan.json', ['dpo', 'grpo']),
      metrics.read_rows(run / 'metrics.jsonl'),
    ]
  return value, console.file.getvalue().replace(f'{run}: was finished before; another --workdir starts a new run\n', '')


def flip(path, random_source):
  data = bytearray(path.read_bytes())
  position = random_source.randrange(len(data))
  data[position] ^= 1 << random_source.randrange(8)
  path.write_bytes(data)


@pytest.mark.ci
def test_flipped_bits_are_reported_or_harmless(finished, caplog, record_property):
  config, run = finished
  names = [str(p.relative_to(run)) for p in sorted(run.rglob('*')) if p.is_file() and p.stat().st_size]
  kinds = sorted({name.split('/')[0] for name in names})
  assert {'cache', 'checkpoints', 'config.json', 'export', 'metrics.jsonl', 'plan.json'} <= {*kinds}
  assert {'rollouts', 'samples', 'summary.json', 'checksums.json', 'tensorboard'} <= {*kinds}
  random_source, expected, wrong_and_silent, reported = random.Random(0), {}, [], 0
  record_property('cases', FLIPS)
  for n in range(FLIPS):
    kind = kinds[n % len(kinds)]
    name = random_source.choice([name for name in names if name.split('/')[0] == kind])
    part = name if kind in ('cache', 'rollouts') else '/'.join(name.split('/')[: 2 if kind == 'checkpoints' else 1])
    if part not in expected:
      expected[part] = read(config, run, name)[0]
    original = (run / name).read_bytes()
    flip(run / name, random_source)
    caplog.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed, caplog.at_level(logging.WARNING):
      try:
        value, lines = read(config, run, name)
      except (InputError, NoCheckpointError) as error:
        value, lines = None, str(error)
        assert lines and '\n' not in lines, lines
    lines += printed.getvalue() + caplog.text
    reported += bool(lines)
    if not lines and value != expected[part]:
      wrong_and_silent.append(name)
    (run / name).write_bytes(original)
    for made in run.glob('cache/*/made.npy'):  # damaged caches are computed again
      made.unlink()
  assert not wrong_and_silent
  assert reported > FLIPS / 2


def test_error_names_the_damaged_file(finished, tmp_path):
  """The message names the file, and says what to do about damaged weights."""
  config, run = finished
  for name, message in {'config.json': 'config.json: differs', 'summary.json': 'summary.json: differs'}.items():
    before = (run / name).read_bytes()
    (run / name).write_bytes(before.replace(b'3', b'4', 1))
    console = rich.console.Console(file=io.StringIO(), width=400)
    try:
      with contextlib.suppress(InputError) if name == 'summary.json' else pytest.raises(InputError, match=message):
        stages.run(config, run, console)
      if name == 'summary.json':
        assert message in console.file.getvalue()
    finally:
      (run / name).write_bytes(before)
  weights = run / 'export' / 'model.safetensors'
  before = weights.read_bytes()
  weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
  try:
    with pytest.raises(InputError, match='model.safetensors: differs from its checksum.*remove .*checksums.json'):
      read_export(run)
  finally:
    weights.write_bytes(before)


def test_truncated_rollout_file_is_refused(finished, tmp_path):
  _, run = finished
  data = (run / 'rollouts/grpo/1.npz').read_bytes()
  np.load(io.BytesIO(data), allow_pickle=False)  # numpy ignores the checksum at the end
  (tmp_path / '1.npz').write_bytes(data[:-1])
  with pytest.raises(InputError, match='differs from its checksum, or has none'):
    rollout_files.load(tmp_path / '1.npz')


def test_sealed_beginning_may_be_appended_to_and_not_changed(tmp_path):
  path = tmp_path / 'rows'
  path.write_text('ab')
  seals.add_beginning(path, 2, seals.zlib.crc32(b'ab'))
  path.write_text('abc')
  assert seals.damaged(tmp_path) == []
  for text in ('aBc', 'a'):
    path.write_text(text)
    assert seals.damaged(tmp_path) == ['rows']


def test_failed_write_keeps_the_previous_file_valid(tmp_path, monkeypatch):
  path = tmp_path / 'a.json'
  seals.write(path, json.dumps({'a': 1}))
  with monkeypatch.context() as patch, pytest.raises(OSError):
    write, calls = seals.object_store.write, []

    def second_fails(*args):
      calls.append(args)
      if len(calls) == 2:
        raise OSError('no space')
      write(*args)

    patch.setattr(seals.object_store, 'write', second_fails)
    seals.write(path, json.dumps({'a': 2}))
  assert seals.read_json(path) == {'a': 1} and seals.damaged(tmp_path) == []
  seals.write(path, json.dumps({'a': 3}))
  assert seals.read_json(path) == {'a': 3}
