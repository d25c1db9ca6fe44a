"""Tests of `storage.checkpoint`: bitwise saves and restores, the steps that are kept, and recovery from damage.

Faults are real: bits are flipped on disk, processes are killed with SIGKILL, and the kernel refuses writes.
"""

import hashlib
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import children
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scorecard

from jaxpost import errors, types
from jaxpost.storage import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[1]
SEAL = 'checksums.json'


def make_state(seed, width=16):
  """A TrainState with all kinds of nodes and leaves: None, namedtuples, an empty array, bfloat16, NaN.

  NumPy draws the values, so that child processes of these tests compile nothing.
  """
  draw = np.random.default_rng(seed)
  params = {
    'embed': np.zeros((width, 8), np.float32),
    'layers': {'w': np.zeros((2, 8, 8), jnp.bfloat16), 'bias': None, 'nothing': np.zeros((0, 8), np.float32)},
  }
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 9)))
  state = types.TrainState(step=np.int32(seed), params=params, opt_state=jax.eval_shape(tx.init, params))
  state = jax.tree.map(lambda x: jnp.asarray((9 * draw.normal(size=x.shape)).astype(x.dtype)), state)
  special_values = np.array([math.nan, -0.0, 1e-40, math.inf], np.float32)
  state.params['head.out/proj'] = jnp.asarray(special_values)
  return state


def template(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def digest(tree):
  """A hash of the structure of a tree, and of the dtypes, shapes and bits of its leaves."""
  leaves, treedef = jax.tree.flatten(tree)
  result = hashlib.sha256(str(treedef).encode())
  for leaf in leaves:
    result.update(f'{leaf.shape} {leaf.dtype}'.encode())
    result.update(np.asarray(leaf).tobytes())
  return result.hexdigest()


def save_steps(folder, steps, **options):
  ck = checkpoint.Checkpointer(folder, **options)
  for step in steps:
    ck.save(step, make_state(step), {'position': step})
  ck.close()


def steps_in(folder):
  return sorted(int(path.name) for path in folder.iterdir())


def sealed(folder, step):
  return (folder / str(step) / SEAL).exists()


def restore(folder, step=None):
  """Returns (step, state, meta, warnings) that a new process would restore."""
  warnings = []
  ck = checkpoint.Checkpointer(folder)
  result = ck.restore(template(make_state(0)), step, warn=warnings.append)
  ck.close()
  return *result, warnings


def run_child(code, *args, env=(), check=True):
  """Runs Python code in a child process; returns its (exit code, stdout, stderr)."""
  child = start_child(code, *args, env=env)
  out, err = child.communicate(timeout=120)
  if check:
    assert child.returncode == 0, out + err
  return child.returncode, out, err


def start_child(code, *args, env=()):
  """Starts a child process that runs Python code with the names of this module."""
  code = 'from test_checkpoint import *\n' + textwrap.dedent(code)
  paths = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': paths, **dict(env)}
  return subprocess.Popen(
    [sys.executable, '-c', code, *map(str, args)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )


# Round trips.


def test_round_trip_is_bitwise(tmp_path):
  state, meta = make_state(7), {'position': [3, 5], 'lr': 0.1, 'stage': 'sft'}
  ck = checkpoint.Checkpointer(tmp_path / 'new')
  assert ck.latest() is None
  ck.save(7, state, meta)
  meta['position'].append(9)  # after the call: must not be saved
  assert ck.latest() == 7
  step, restored, restored_meta = ck.restore(template(state))
  assert step == 7
  assert restored_meta == {'position': [3, 5], 'lr': 0.1, 'stage': 'sft'}
  assert digest(restored) == digest(state)
  assert digest(restored) != digest(make_state(8))
  assert ck.restore_meta() == restored_meta
  ck.close()


def test_restore_params_reads_no_optimizer_state(tmp_path):
  save_steps(tmp_path, [1, 2])
  ck = checkpoint.Checkpointer(tmp_path)
  params = make_state(2).params
  assert digest(ck.restore_params(template(params))) == digest(params)
  params_of_step_1 = ck.restore_params(template(make_state(1).params), 1)
  assert digest(params_of_step_1) == digest(make_state(1).params)
  layers = ck.restore_params(template(params['layers']), at='params/layers')
  assert digest(layers) == digest(params['layers'])
  items_read = []
  original = ck._orbax.restore
  ck._orbax.restore = lambda folder, args: (items_read.append(args['state'].item), original(folder, args=args))[1]
  ck.restore_params(template(params))
  assert all(key.startswith('params/') for key in items_read[0]) and len(items_read) == 1
  ck.close()


def test_state_may_be_donated_once_save_returns(tmp_path):
  state = {'w': jnp.arange(1 << 20, dtype=jnp.float32), 'b': jnp.ones((8, 8))}
  before = digest(state)
  wipe = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
  ck = checkpoint.Checkpointer(tmp_path)
  for step in range(1, 6):
    copy = jax.tree.map(jnp.copy, state)
    ck.save(step, copy, {})
    jax.block_until_ready(wipe(wipe(copy)))
    ck.wait()
    assert digest(ck.restore(template(state), step)[1]) == before
  ck.close()


def test_restores_on_other_meshes(tmp_path):
  state = make_state(3)
  ck = checkpoint.Checkpointer(tmp_path)
  ck.save(3, state, {})
  ck.wait()
  _, out, _ = run_child(
    """
    state = make_state(3)
    ck = checkpoint.Checkpointer(sys.argv[1], keep=9)
    step = 3
    for shape in ((8, 1), (2, 4), (1, 2)):
      devices = jax.devices()[:shape[0] * shape[1]]
      auto = (jax.sharding.AxisType.Auto,) * 2
      mesh = jax.make_mesh(shape, ('a', 'b'), devices=devices, axis_types=auto)
      def struct(x):
        spec = jax.P('a', 'b') if x.shape == (16, 8) else jax.P()
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
      wanted = jax.tree.map(struct, state)
      _, restored, _ = ck.restore(wanted)
      assert digest(restored) == digest(state)
      jax.tree.map(lambda x, y: (x.sharding == y.sharding) or 1 / 0,
                   restored, wanted)
      step += 1
      ck.save(step, restored, {})
      ck.wait()
    ck.close()
    print(len(jax.devices()))
    """,
    tmp_path,
    env={'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}.items(),
  )
  assert out.split()[-1] == '8'
  step, restored, _ = ck.restore(template(state))
  assert step == 6 and digest(restored) == digest(state)
  ck.close()


# A run whose config has changed.


def test_restore_into_changed_model_names_key_and_shapes(tmp_path):
  save_steps(tmp_path, [1])
  state = make_state(1)
  params = state.params
  extra = {**params, 'extra': jnp.ones((2,))}
  without_embed = {k: v for k, v in params.items() if k != 'embed'}
  cast = {**params, 'embed': params['embed'].astype(jnp.bfloat16)}
  cases = [
    (make_state(1, width=32).params, ['params/embed', '[16, 8]', '[32, 8]']),
    (extra, ['params/extra is absent in the checkpoint', 'float32 [2]']),
    (without_embed, ['params/embed', 'absent in the run', '[16, 8]']),
    (cast, ['float32 [16, 8]', 'bfloat16 [16, 8]']),
  ]
  ck = checkpoint.Checkpointer(tmp_path)
  for changed, words in cases:
    with pytest.raises(errors.InputError) as caught:
      ck.restore(template(state.replace(params=changed)))
    message = str(caught.value)
    assert '\n' not in message and 'the config changed' in message
    assert all(word in message for word in words), message
  ck.close()


def test_unsavable_states_and_bad_options_are_refused(tmp_path):
  ck = checkpoint.Checkpointer(tmp_path)
  for state in ({'a': 1.0}, {'a': jax.random.key(0)}):
    with pytest.raises(TypeError, match='^a is'):
      ck.save(1, state, {})
  with pytest.raises(ValueError, match='both called a/b'):
    ck.save(1, {'a': {'b': jnp.ones(2)}, 'a/b': jnp.ones(2)}, {})
  with pytest.raises(TypeError, match='no sharding for a'):
    ck.save(1, {'a': jnp.ones(2)}, {})
    ck.restore({'a': jax.ShapeDtypeStruct((2,), jnp.float32)})
  ck.close()
  with pytest.raises(errors.InputError, match='at least 1'):
    checkpoint.Checkpointer(tmp_path, keep=0)
  with pytest.raises(errors.InputError, match="best_mode is 'most'"):
    checkpoint.Checkpointer(tmp_path, best_mode='most')


def test_another_run_is_not_overwritten(tmp_path):
  save_steps(tmp_path, [10, 20])
  before = digest(restore(tmp_path)[1])
  ck = checkpoint.Checkpointer(tmp_path)
  for step in (5, 20):
    with pytest.raises(errors.InputError, match='already holds step 20'):
      ck.save(step, make_state(1), {})
  ck.close()
  assert digest(restore(tmp_path)[1]) == before


# The steps that stay on disk.


def test_keeps_the_newest_and_the_best(tmp_path):
  scores = {1: 0.9, 2: 0.9, 3: 0.2, 4: math.nan, 5: None, 6: 0.1, 7: 0.2}
  for mode, best in (('max', 2), ('min', 6)):
    folder = tmp_path / mode
    ck = checkpoint.Checkpointer(folder, keep_best='acc', best_mode=mode)
    for step, score in scores.items():
      if step == 6:  # the best survives a restart
        ck.close()
        ck = checkpoint.Checkpointer(folder, keep_best='acc', best_mode=mode)
        ck.restore(template(make_state(0)))
      metrics = None if score is None else {'acc': score, 'loss': 1.0}
      ck.save(step, make_state(step), {}, metrics)
    ck.save(8, make_state(8), {})
    ck.save(9, make_state(9), {}, {'loss': 1.0})  # an evaluation that graded nothing must not cost the step
    ck.check_metrics(['acc', 'loss'])
    with pytest.raises(errors.InputError, match="no metric 'acc'.*loss"):
      ck.check_metrics(['loss'])
    ck.close()
    assert steps_in(folder) == sorted({best, 8, 9})
  save_steps(tmp_path / 'plain', [1, 2, 3, 4], keep=3)
  assert steps_in(tmp_path / 'plain') == [2, 3, 4]


def test_saving_the_same_step_again_is_a_no_op(tmp_path):
  ck = checkpoint.Checkpointer(tmp_path)
  for meta in ({'position': 1}, {'position': 2}):
    ck.save(1, make_state(1), meta)
  assert ck.restore_meta() == {'position': 1}
  ck.close()
  ck = checkpoint.Checkpointer(tmp_path)
  ck.restore(template(make_state(0)))
  ck.save(1, make_state(1), {'position': 3})
  assert ck.restore_meta() == {'position': 1}
  ck.close()


COUNT_LISTS = """
import gc, logging, sys
sys.path.insert(0, 'tests')
import test_checkpoint
from jaxpost.storage import checkpoint
logging.disable(logging.CRITICAL)
ck, state = checkpoint.Checkpointer(sys.argv[1]), test_checkpoint.make_state(1)
for step in range(1, 13):
  ck.save(step, state, {})
  ck.wait()
  gc.collect()
  print(sum(type(x) is list for x in gc.get_objects()))
ck.close()
"""


def test_saves_leave_no_objects_in_memory(tmp_path):
  """Saves 7 to 12 leave at most two paths each in a cache of Orbax, with a list each, or two from Python 3.12 on.

  Without `_spare_memory`, tensorstore would keep 24 lists per save. The count is made in a child process because
  threads that earlier tests have left running create lists, too.
  """
  lists = [int(line) for line in children.run('-c', COUNT_LISTS, str(tmp_path)).stdout.split()]
  assert lists[-1] - lists[5] <= 6 * 2 * (2 if sys.version_info >= (3, 12) else 1), lists


def test_failed_seal_keeps_the_last_good_step(tmp_path, monkeypatch):
  ck = checkpoint.Checkpointer(tmp_path, keep=1)
  ck.save(1, make_state(1), {})
  ck.wait()
  original = checkpoint.object_store.checksums

  def broken(folder, names):
    raise OSError('no space')

  monkeypatch.setattr(checkpoint.object_store, 'checksums', broken)
  ck.save(2, make_state(2), {})
  with pytest.raises(OSError, match='no space') as caught:
    ck.save(3, make_state(3), {})
  assert 'while saving step 2' in caught.value.__notes__[0]
  monkeypatch.setattr(checkpoint.object_store, 'checksums', original)
  assert (tmp_path / '2' / 'commit_success.txt').exists()
  assert restore(tmp_path)[0] == 1
  ck.save(2, make_state(2), {})  # the run may go on, and may even save this step again
  ck.close()
  assert steps_in(tmp_path) == [2]
  assert digest(restore(tmp_path)[1]) == digest(make_state(2))


def test_rolling_back_drops_the_abandoned_steps(tmp_path):
  save_steps(tmp_path, [10, 20, 30], keep=3)
  ck = checkpoint.Checkpointer(tmp_path, keep=3)
  ck.restore(template(make_state(0)), 10)
  ck.save(20, make_state(21), {'position': 'new'})
  ck.close()
  assert steps_in(tmp_path) == [10, 20]
  step, state, meta, _ = restore(tmp_path)
  assert step == 20 and meta == {'position': 'new'}
  assert digest(state) == digest(make_state(21))


# Damage.


def all_files(folder):
  return sorted(path for path in folder.rglob('*') if path.is_file())


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
  folder = tmp_path_factory.mktemp('two')
  save_steps(folder, [10, 20])
  return folder, {step: digest(make_state(step)) for step in (10, 20)}


def expect_fallback(folder, digests, name=''):
  """Asserts that step 10 is restored, with one warning that names the damaged file of step 20."""
  step, state, meta, warnings = restore(folder)
  assert step == 10 and meta == {'position': 10}
  assert digest(state) == digests[10]
  assert len(warnings) == 1 and '\n' not in warnings[0]
  assert f'20/{name}' in warnings[0] and 'using step 10' in warnings[0]


@pytest.mark.parametrize('seed', range(scorecard.ROUNDS))
def test_every_flipped_bit_is_noticed(two_steps, record_property, seed):
  folder, digests = two_steps
  draw = random.Random(seed)
  flips = 0
  for path in all_files(folder / '20'):
    original = path.read_bytes()
    regions = [(k * len(original) // 4, (k + 1) * len(original) // 4) for k in range(4)]
    for start, end in regions:
      damaged = bytearray(original)
      damaged[draw.randrange(start, end)] ^= 1 << draw.randrange(8)
      path.write_bytes(damaged)
      expect_fallback(folder, digests, path.relative_to(folder / '20'))
      flips += 1
    path.write_bytes(original)
  record_property('cases', flips)
  assert flips >= 40
  step, state, _, warnings = restore(folder)  # all files are repaired
  assert step == 20 and digest(state) == digests[20] and not warnings


def test_truncated_or_missing_file_falls_back_to_previous_step(two_steps, record_property):
  folder, digests = two_steps
  record_property('cases', 5 * len(all_files(folder / '20')))
  for path in all_files(folder / '20'):
    original = path.read_bytes()
    name = path.relative_to(folder / '20')
    for damaged in (original[: len(original) // 2], b'', original + b'\0', b'\x80\x04N.'):
      path.write_bytes(damaged)
      expect_fallback(folder, digests, name)
    path.unlink()
    expect_fallback(folder, digests, name)
    path.write_bytes(original)
  assert restore(folder)[0] == 20


def test_folders_that_are_no_checkpoints_are_skipped(tmp_path):
  save_steps(tmp_path, [10])
  (tmp_path / '99').mkdir()
  (tmp_path / '098').mkdir()
  (tmp_path / 'notes').mkdir()
  (tmp_path / '97').write_text('a file')
  shutil.copytree(tmp_path / '10', tmp_path / '50')  # renamed by hand
  step, _, _, warnings = restore(tmp_path)
  assert step == 10 and len(warnings) == 1
  assert '99/checksums.json is missing' in warnings[0]
  assert '50/checksums.json belongs to step 10' in warnings[0]
  ck = checkpoint.Checkpointer(tmp_path)
  ck.restore(template(make_state(0)), warn=lambda line: None)
  ck.save(50, make_state(50), {})
  ck.save(99, make_state(99), {})
  assert ck.latest() == 99
  ck.close()
  assert digest(restore(tmp_path)[1]) == digest(make_state(99))
  assert (tmp_path / 'notes').exists()


def test_missing_or_damaged_checkpoints_raise_no_checkpoint_error(tmp_path):
  ck = checkpoint.Checkpointer(tmp_path / 'absent')
  with pytest.raises(errors.NoCheckpointError, match='nothing there'):
    ck.restore({})
  assert ck.is_empty() and ck.latest() is None and not (tmp_path / 'absent').exists()
  save_steps(tmp_path, [10, 20])
  ck = checkpoint.Checkpointer(tmp_path)
  with pytest.raises(errors.NoCheckpointError, match=r'step 15 \(not there; there is 20, 10\)$'):
    ck.restore(template(make_state(0)), 15)
  for step in (10, 20):
    (tmp_path / str(step) / 'meta' / 'metadata').write_text('{}')
  for call in (ck.latest, ck.restore_meta, lambda: ck.restore({})):
    with pytest.raises(errors.NoCheckpointError) as caught:
      call()
    message = str(caught.value)
    assert '\n' not in message and '10/meta/metadata' in message
    assert '20/meta/metadata' in message
  with pytest.raises(errors.NoCheckpointError, match='20/meta/metadata'):
    ck.restore(template(make_state(0)), 20)  # an explicit step has no fallback
  ck.close()


def test_damaged_step_is_not_kept_as_spare(tmp_path):
  save_steps(tmp_path, [10, 17])
  (tmp_path / '17' / 'meta' / 'metadata').write_text('{}')
  ck = checkpoint.Checkpointer(tmp_path)
  ck.restore(template(make_state(0)), warn=lambda line: None)
  ck.save(20, make_state(20), {})
  ck.close()
  assert steps_in(tmp_path) == [10, 20]  # damaged step 17 would be useless as a spare


# Sudden ends.


def test_kill_9_during_write_keeps_previous_step(tmp_path):
  child = start_child(
    """
    big = jnp.asarray(np.random.default_rng(0).normal(size=(1 << 20,)))
    ck = checkpoint.Checkpointer(sys.argv[1], keep=2)
    for step in range(1, 10 ** 6):
      ck.save(step, {'small': make_state(step), 'big': big + step}, {})
    """,
    tmp_path,
  )
  deadline = time.time() + 60
  write_in_progress = False
  while not write_in_progress and child.poll() is None and time.time() < deadline:
    for path in tmp_path.iterdir():
      if int(path.name) > 2 and not (path / 'commit_success.txt').exists():
        write_in_progress = True
    time.sleep(0.001)
  child.send_signal(signal.SIGKILL)
  _, err = child.communicate()
  assert write_in_progress and child.returncode == -signal.SIGKILL, err
  unfinished = [s for s in steps_in(tmp_path) if not sealed(tmp_path, s)]
  assert unfinished  # otherwise the kill did not interrupt a write
  last_sealed = unfinished[-1] - 1
  state = {'small': make_state(last_sealed), 'big': jnp.zeros((1 << 20,))}
  warnings = []
  ck = checkpoint.Checkpointer(tmp_path)
  assert ck.latest() == last_sealed
  step, restored, _ = ck.restore(template(state), warn=warnings.append)
  assert step == last_sealed and 'the save was never finished' in warnings[0]
  assert digest(restored['small']) == digest(state['small'])
  first = np.float32(np.random.default_rng(0).normal()) + np.float32(last_sealed)
  assert restored['big'][0] == first
  ck.save(unfinished[-1], make_state(2), {})
  ck.close()
  step, state, _, warnings = restore(tmp_path)
  assert step == unfinished[-1] and not warnings
  assert digest(state) == digest(make_state(2))


def test_kill_between_commit_and_seal_and_inside_a_removal(tmp_path, record_property):
  record_property('cases', 2)
  die = 'os.kill(os.getpid(), signal.SIGKILL)'
  body = """
    ck = checkpoint.Checkpointer(sys.argv[1], keep=1)
    ck.restore(template(make_state(0)))
    {patch}
    ck.save(2, make_state(2), {{}})
    ck.wait()
  """
  patches = {
    'seal': f'checkpoint.object_store.checksums = lambda *args: {die}',
    'removal': f'type(ck._folder).rmtree = lambda *args: {die}',
  }
  children = {}
  for name, patch in patches.items():
    save_steps(tmp_path / name, [1])
    children[name] = start_child(body.format(patch=patch), tmp_path / name)
  for name, child in children.items():
    _, err = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, err
    folder = tmp_path / name
    assert steps_in(folder) == [1, 2]
    assert (folder / '2' / 'commit_success.txt').exists()
    last_sealed = 1 if name == 'seal' else 2
    assert [s for s in (1, 2) if sealed(folder, s)] == [last_sealed]
    step, state, _, _ = restore(folder)
    assert step == last_sealed and digest(state) == digest(make_state(last_sealed))
    ck = checkpoint.Checkpointer(folder, keep=1)
    ck.restore(template(make_state(0)), warn=lambda line: None)
    ck.save(last_sealed + 1, make_state(last_sealed + 1), {})
    ck.close()
    assert steps_in(folder) == [last_sealed + 1]
    assert restore(folder)[0] == last_sealed + 1


def test_disk_full_surfaces_at_the_next_check(tmp_path):
  _, out, _ = run_child(
    """
    import resource
    folder = pathlib.Path(sys.argv[1])
    wanted = template(make_state(0))
    ck = checkpoint.Checkpointer(folder)
    ck.save(1, make_state(1), {})
    ck.wait()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Signals of the limit are ignored by Python: writes fail with EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, unlimited[1]))
    ck.save(2, make_state(2), {})
    error = None
    for _ in range(6000):  # a loop that only checks, on a busy machine
      try:
        ck.check()
      except (OSError, ValueError) as caught:
        error = caught
        break
      time.sleep(0.02)
    print(type(error).__name__, error, error.__notes__)
    ck.check()  # once is enough
    assert ck.latest() == 1
    assert digest(ck.restore(wanted)[1]) == digest(make_state(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    ck.save(2, make_state(2), {})
    ck.close()
    """,
    tmp_path,
  )
  assert 'while saving step 2' in out
  assert digest(restore(tmp_path)[1]) == digest(make_state(2))


@pytest.mark.nightly  # test_faults.py stops a run whose save takes longer than the limit
def test_watchdog_does_not_end_a_save_longer_than_its_limit(tmp_path):
  """The limit of a step is suspended while a checkpoint is written, and ends the process afterwards."""
  child = start_child(
    """
    from jaxpost.distributed import watchdog
    from jaxpost.storage import object_store
    checksums = object_store.checksums
    object_store.checksums = lambda *names: time.sleep(3) or checksums(*names)
    watchdog.start_operation('step 3 of sft', 1.0)
    ck = checkpoint.Checkpointer(sys.argv[1])
    ck.save(3, make_state(3), {})
    ck.wait()
    print('saved', flush=True)
    time.sleep(60)
    """,
    tmp_path,
  )
  out, err = child.communicate(timeout=120)
  assert child.returncode == 1 and out == 'saved\n', out + err
  assert 'is stuck in step 3 of sft' in err
  assert digest(restore(tmp_path)[1]) == digest(make_state(3))


# Several processes.


def test_two_processes_restore_the_same_step_after_damage(tmp_path):
  address = children.free_address()
  code = """
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ('d',), axis_types=auto)
    def spread(x):
      spec = jax.P('d') if x.shape == (16, 8) else jax.P()
      sharding = jax.NamedSharding(mesh, spec)
      return jax.make_array_from_callback(
        x.shape, sharding, lambda i: np.asarray(x)[i])
    states = {s: jax.tree.map(spread, make_state(s)) for s in (1, 2, 3)}
    wanted = template(states[1])
    ck = checkpoint.Checkpointer(sys.argv[1])
    ck.save(1, states[1], {'at': 1})
    ck.save(2, states[2], {'at': 2})
    assert ck.latest() == 2
    if jax.process_index() == 0:
      path = pathlib.Path(sys.argv[1]) / '2' / 'state' / '_METADATA'
      path.write_bytes(path.read_bytes()[:-1])
    checkpoint.coordination.all_gather('damaged')
    lines = []
    step, state, meta = ck.restore(wanted, warn=lines.append)
    assert (step, meta) == (1, {'at': 1}), (step, meta)
    def same(x, y):
      assert x.sharding == y.sharding
      for a, b in zip(x.addressable_shards, y.addressable_shards):
        assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    jax.tree.map(same, state, states[1])
    ck.save(2, states[2], {'at': 2})
    ck.save(3, states[3], {'at': 3})
    ck.close()
    print('warned', len(lines))
  """
  processes = [start_child(code, tmp_path, address, index) for index in (0, 1)]
  results = [process.communicate(timeout=120) for process in processes]
  for child, (out, err) in zip(processes, results):
    assert child.returncode == 0, out + err
  assert [out.split()[-1] for out, _ in results] == ['1', '0']
  step, state, _, _ = restore(tmp_path)
  assert step == 3 and digest(state) == digest(make_state(3))
  assert steps_in(tmp_path) == [2, 3]
