"""Resume of a run that was killed, stopped or damaged: it ends with the results of an undisturbed run.

The baseline is a short run of SFT and GRPO without a disturbance. Disturbed runs must end with the same rows of
metrics, and with the same final state, bit for bit. Runs in a process of their own are started by `launch.train`.
"""

import collections
import contextlib
import functools
import gc
import json
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
import scorecard
import tiny

from jaxpost import stages
from jaxpost.errors import InputError, NoCheckpointError, Preempted
from jaxpost.hardware import memory
from jaxpost.monitor import metrics
from jaxpost.storage import manifest
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
TASK = 'generated:arithmetic:max=99,ops=+'
STEPS = {'sft': 8, 'grpo': 6}
LIMIT = 240  # seconds for a process, on a busy machine

# Its rewards differ within a group, so that GRPO learns.
REWARD = """
def remainder(completion_ids, **columns):
  return [float(sum(ids) % 7) for ids in completion_ids]
"""
# The launcher, which also writes counts of JAX events, such as hits of the compilation cache, to the file $EVENTS.
COUNTING_LAUNCHER = """
import atexit, collections, json, os, runpy, sys
import jax
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda e, **_: seen.update([e]))
atexit.register(
    lambda: open(os.environ['EVENTS'], 'w').write(json.dumps(seen)))
runpy.run_module('launch.train', run_name='__main__')
"""


@pytest.fixture(scope='module')
def command(nano, tmp_path_factory):
  """command(workdir, *flags) -> the command line of a run of both stages."""
  folder = tmp_path_factory.mktemp('config')
  (folder / 'rewards.py').write_text(REWARD)
  both = tiny.run_config(
    nano,
    stages=('sft', 'grpo'),
    reward=f'{folder}/rewards.py:remainder',
    save=dict(every=2, export=True),
    eval=dict(every=3, samples=2, data=dict(path=f'{TASK},split=test,size=8,correct=1')),
    sft=dict(algorithm='sft', train=dict(steps=STEPS['sft'])),
    grpo=dict(
      algorithm='grpo',
      train=dict(steps=STEPS['grpo'], row_length=0),
      data=dict(path=f'{TASK},split=train,size=200,correct=1'),
      rollout=dict(prompts=4, group_size=4),
      rl=dict(kl_coef=0.05),
    ),
  )
  path = tiny.config_file(folder / 'both.py', both)
  return lambda workdir, *flags: [
    sys.executable,
    '-m',
    'launch.train',
    f'--config={path}',
    f'--workdir={workdir}',
    *flags,
  ]


def start(arguments, **variables):
  return subprocess.Popen(
    arguments, cwd=ROOT, text=True, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )


def finish(process, code=0):
  """Waits for a process, which must end with this exit code; returns (stdout, stderr)."""
  try:
    out, err = process.communicate(timeout=LIMIT)
  finally:
    process.kill()
  assert process.returncode == code, f'{process.returncode}\n{out}\n{err}'
  return out, err


@pytest.fixture(scope='module')
def baseline(command, tmp_path_factory):
  """The folder of the undisturbed run."""
  workdir = tmp_path_factory.mktemp('runs') / 'baseline'
  out, err = finish(start(command(workdir)))
  assert 'after the first step' not in out + err
  summary = json.loads(out.splitlines()[-1])
  assert summary == json.loads((workdir / 'summary.json').read_text())
  return workdir


def seal(folder, step=None):
  """Returns the manifest of a checkpoint, by default of the newest: its leaves, its files and their checksums."""
  step = max(finished_steps(folder)) if step is None else step
  _, _, text = (folder / str(step) / 'checksums.json').read_bytes().partition(b'\n')
  return json.loads(text)


def state(workdir, stage, step=None):
  """Returns ({leaf: bytes}, meta) of a checkpoint, by default of the newest."""
  folder = workdir / 'checkpoints' / stage
  step = max(finished_steps(folder)) if step is None else step
  one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tree = {
    k: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=one_device)
    for k, (shape, dtype) in seal(folder, step)['leaves'].items()
  }
  checkpointer = Checkpointer(folder)
  try:
    _, leaves, meta = checkpointer.restore(tree, step)
  finally:
    checkpointer.close()
  return {k: np.asarray(x).tobytes() for k, x in leaves.items()}, meta


def assert_same_run(workdir, expected):
  """Asserts that two runs agree in metrics, final states, samples, exported weights and summary, bit for bit."""
  rows, expected_rows = (metrics.comparable_rows(d / 'metrics.jsonl') for d in (workdir, expected))
  assert rows == expected_rows
  for stage, steps in STEPS.items():
    assert max(finished_steps(workdir / 'checkpoints' / stage)) == steps
    assert state(workdir, stage) == state(expected, stage)
  for pattern in ('samples/*/*.jsonl', 'export/*.safetensors'):
    files = sorted(p.relative_to(expected) for p in expected.glob(pattern))
    assert files == sorted(p.relative_to(workdir) for p in workdir.glob(pattern))
    for file in files:
      assert (workdir / file).read_bytes() == (expected / file).read_bytes()

  def summary_without_times(folder):
    summary = json.loads((folder / 'summary.json').read_text())
    return {k: v for k, v in summary.items() if k not in ('wall_s', 'paths') and 'time' not in k and 'per_s' not in k}

  assert summary_without_times(workdir) == summary_without_times(expected)


def test_the_baseline_learns_in_both_stages(baseline):
  """If the baseline did not learn, equal final states would prove nothing."""
  rows = metrics.comparable_rows(baseline / 'metrics.jsonl')
  for stage, steps in STEPS.items():
    train = [r for r in rows if (r['stage'], r['split']) == (stage, 'train')]
    assert [r['step'] for r in train] == list(range(1, steps + 1))
    assert len({r['loss'] for r in train}) == steps
    assert all(r['grad_norm'] > 0 for r in train)
    first, last = (state(baseline, stage, s)[0] for s in (steps - 2, steps))
    assert first != last
  evals = [(r['stage'], r['step']) for r in rows if r['split'] == 'eval']
  assert evals == [('sft', 0), ('sft', 3), ('sft', 6), ('sft', 8), ('grpo', 0), ('grpo', 3), ('grpo', 6)]


def test_each_program_is_compiled_once(baseline):
  for plan in json.loads((baseline / 'plan.json').read_text()):
    shapes = collections.Counter((r['program'], r['shapes']) for r in plan['programs'])
    assert {k: n for k, n in shapes.items() if n > 1} == {}
    names = {'update', 'generate', 'prefill', 'insert', 'reshard', {'sft': 'evaluate', 'grpo': 'score'}[plan['stage']]}
    assert names <= {r['program'] for r in plan['programs']}


def test_repeated_run_is_equal_and_hits_the_compilation_cache(command, baseline, tmp_path):
  _, *options = command(tmp_path / 'again')
  arguments = [sys.executable, '-c', COUNTING_LAUNCHER, *options[2:]]
  events = tmp_path / 'events.json'
  out, err = finish(start(arguments, EVENTS=str(events)))
  assert_same_run(tmp_path / 'again', baseline)
  event_counts = json.loads(events.read_text())
  plans = json.loads((baseline / 'plan.json').read_text())
  programs = sum(len(p['programs']) for p in plans)
  assert event_counts['/jax/compilation_cache/cache_hits'] >= programs
  assert event_counts.get('/jax/compilation_cache/cache_misses', 0) == 0


# Processes that are killed.


def descendants(pid):
  """Returns {pid: start time} of all descendants of a process."""
  start_times = {}
  for task in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
    with contextlib.suppress(OSError):  # the process has just ended
      for child in task.read_text().split():
        start_times |= {int(child): start_time(child), **descendants(child)}
  return start_times


def start_time(pid):
  """Returns when a process began, in clock ticks; None once it has ended."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return None
  state, *fields = text.rpartition(')')[2].split()
  return None if state == 'Z' else fields[18]


def unfinished(workdir, stage, since=0.0):
  """Returns the steps whose save began after `since` and has not ended."""
  with contextlib.suppress(OSError):
    return [
      p.name
      for p in (workdir / 'checkpoints' / stage).iterdir()
      if not (p / 'checksums.json').exists() and p.stat().st_mtime > since
    ]
  return []


def has_rows(workdir, stage, count):
  """Returns whether a run has begun and written `count` rows of a stage."""
  begun = (workdir / 'config.json').exists()
  return begun and train_rows(workdir, stage) >= count


def train_rows(workdir, stage):
  """Returns the number of rows of training steps that a stage has written."""
  path = workdir / 'metrics.jsonl'
  text = path.read_text() if path.exists() else ''
  return text.count(f'"stage": "{stage}", "split": "train"')


def wait_for(process, condition):
  """Polls until the condition holds; returns False if the process ended first."""
  deadline = time.monotonic() + LIMIT
  while not condition():
    if process.poll() is not None:
      return False
    assert time.monotonic() < deadline, 'too slow'
    time.sleep(0.001)
  return True


def assert_gone(processes):
  deadline = time.monotonic() + 10
  while any(begun and start_time(pid) == begun for pid, begun in processes.items()):
    assert time.monotonic() < deadline, f'left over: {processes}'
    time.sleep(0.02)


@pytest.mark.ci
@pytest.mark.parametrize('seed', range(7, 7 + scorecard.ROUNDS))
def test_run_killed_at_random_moments_resumes_bitwise(command, baseline, tmp_path, record_property, seed):
  """kill -9 hits both stages, in the middle of saves and of steps."""
  workdir, draw = tmp_path / 'killed', random.Random(seed)
  record_property('cases', 4)
  kills_inside_a_save = 0
  for stage, writing in (('sft', True), ('sft', False), ('grpo', False), ('grpo', True)):
    start_s, process = time.time(), start(command(workdir))
    try:
      if writing:
        started = wait_for(process, functools.partial(unfinished, workdir, stage, start_s))
      else:
        rows_before_kill = draw.randint(1, 3) + train_rows(workdir, stage)
        started = wait_for(process, functools.partial(has_rows, workdir, stage, rows_before_kill))
        time.sleep(draw.uniform(0, 0.05))
      workers = descendants(process.pid)
      process.kill()
      out, err = process.communicate()
    finally:
      process.kill()
    assert started and process.returncode == -signal.SIGKILL, out + err
    assert len(workers) >= 2
    assert_gone(workers)
    kills_inside_a_save += bool(unfinished(workdir, stage, start_s))
  out, err = finish(start(command(workdir)))
  assert 'after the first step' not in out + err
  assert kills_inside_a_save >= 1
  assert_same_run(workdir, baseline)


@pytest.mark.ci
def test_run_stopped_by_sigterm_saves_and_resumes_bitwise(command, baseline, tmp_path):
  """SIGTERM comes before the first step and in both stages; each time the run saves and ends with code 42."""
  workdir = tmp_path / 'stopped'
  for stage, rows in (('sft', 0), ('sft', 3), ('grpo', 1)):
    process = start(command(workdir))
    try:
      assert wait_for(process, functools.partial(has_rows, workdir, stage, rows))
      workers = descendants(process.pid)
      process.terminate()
      _, err = finish(process, code=42)
    finally:
      process.kill()
    assert_gone(workers)
    assert err.count('\n') == 1 and err.startswith('jaxpost: ')
    assert 'told to stop' in err and 'run the same command to go on' in err
    if rows:
      step = max(finished_steps(workdir / 'checkpoints' / stage))
      assert f'{stage}: told to stop, saved at step {step};' in err
      assert step >= rows and not unfinished(workdir, stage)
      # The saved step includes all steps with rows: those before the signal and the step that was running.
      assert train_rows(workdir, stage) == step
  out, _ = finish(start(command(workdir)))
  text = ' '.join(out.split())
  assert 'resumes after step' in text and 'later rows' not in text
  assert_same_run(workdir, baseline)


def all_files(workdir):
  """Returns {path: (content, modification time)} of the files of a run."""
  return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in workdir.rglob('*') if p.is_file()}


def test_finished_run_started_again_changes_nothing(command, baseline):
  before, begin = all_files(baseline), time.monotonic()
  out, _ = finish(start(command(baseline)))
  assert time.monotonic() - begin < 20
  assert 'was finished before' in out
  assert json.loads(out.splitlines()[-1]) == json.loads((baseline / 'summary.json').read_text())
  assert all_files(baseline) == before


# Tests in this process use SFT, which needs no worker process.


def run(config, workdir):
  logging.getLogger().setLevel(logging.WARNING)
  return stages.run(config, workdir)


def same_rows(workdir, expected):
  rows, expected_rows = (metrics.comparable_rows(d / 'metrics.jsonl') for d in (workdir, expected))
  assert rows == expected_rows


@pytest.fixture(scope='module')
def sft(nano, tmp_path_factory):
  """(config, folder) of a finished SFT run that keeps all its steps."""
  config = tiny.run_config(
    nano,
    save=dict(every=2, keep=9, export=False),
    eval=dict(every=2, size=4, data=dict(path=f'{TASK},split=test,size=4,correct=1')),
  )
  workdir = tmp_path_factory.mktemp('sft') / 'run'
  run(config, workdir)
  assert finished_steps(workdir / 'checkpoints' / 'sft') == [6, 4, 2]
  return config, workdir


def copy(workdir, target):
  shutil.copytree(workdir, target)
  (target / 'summary.json').unlink()
  return target


def leave_out_evaluation(workdir, step):
  """Makes a run look as if it had been stopped at this step, before an evaluation that the resume has to make up."""
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  kept = [line for line in lines if (json.loads(line)['split'], json.loads(line)['step']) != ('eval', step)]
  assert len(kept) == len(lines) - 1
  path.write_text(''.join(kept))
  folder = workdir / 'checkpoints/sft'
  manifest.write(folder / str(step), manifest.read(folder, step)._replace(metrics={}))


def live_bytes():
  gc.collect()
  return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.core
def test_more_steps_continue_a_finished_run(sft, nano, tmp_path, monkeypatch):
  config, _ = sft
  short = tiny.merged(config, dict(train=dict(steps=4)))
  run(short, tmp_path / 'run')
  leave_out_evaluation(tmp_path / 'run', 4)
  read, before = Checkpointer.restore, live_bytes()

  def restore(checkpointer, template):
    # The initial state must be freed before the restore: a resume must fit on a device that the start nearly filled.
    assert live_bytes() - before < 0.1 * memory.size(template)
    return read(checkpointer, template)

  verify, verified = manifest.verify, []
  with monkeypatch.context() as patched:
    patched.setattr(Checkpointer, 'restore', restore)
    patched.setattr(manifest, 'verify', lambda *args: verified.append(args) or verify(*args))
    assert run(config, tmp_path / 'run')['steps/sft'] == 6
  # Checksums are verified twice: of the meta, which is compared with the config and needs no arrays, and of the state.
  assert [any(name.startswith('state/') for name in record.files) for record, _ in verified] == [False, True]
  same_rows(tmp_path / 'run', sft[1])
  assert state(tmp_path / 'run', 'sft') == state(sft[1], 'sft')
  loss, expected = (seal(folder / 'checkpoints/sft', 4)['metrics']['loss'] for folder in (tmp_path / 'run', sft[1]))
  assert loss == expected  # for `save.keep_best`
  assert json.loads((tmp_path / 'run/config.json').read_text())['train']['steps'] == 6
  stage_config = types.SimpleNamespace(train=types.SimpleNamespace(steps=6))
  stage = types.SimpleNamespace(name='sft', config=stage_config, data=types.SimpleNamespace(held_out=True))
  assert stages.stages_done([stage], tmp_path / 'run') == 1
  folder = tmp_path / 'run/checkpoints/sft'
  manifest.write(folder / '6', manifest.read(folder, 6)._replace(metrics={}))  # killed after the row of the evaluation
  (tmp_path / 'run/summary.json').unlink()
  run(config, tmp_path / 'run')
  same_rows(tmp_path / 'run', sft[1])
  leave_out_evaluation(tmp_path / 'run', 6)
  assert stages.stages_done([stage], tmp_path / 'run') == 0  # all its steps are done, but not the evaluation after them
  with pytest.raises(InputError, match='train.steps: 4 of sft.* its step 6'):
    run(short, tmp_path / 'run')


def test_changed_data_is_refused_before_compilation_and_changed_reward_warns(nano, tmp_path, monkeypatch, capsys):
  row = json.dumps(dict(prompt='1+1=', completion='2', answer='2')) + '\n'
  data, rewards = tmp_path / 'data.jsonl', tmp_path / 'rewards.py'
  data.write_text(row * 9)
  rewards.write_text(REWARD)
  over = dict(data=dict(path=str(data)), save=dict(every=2, export=False), train=dict(steps=2))
  grpo = dict(algorithm='grpo', reward=f'{rewards}:remainder', rollout=dict(prompts=2, group_size=2))
  for name, method, kind in (('sft', {}, 'rows'), ('grpo', grpo, 'prompts')):
    data.write_text(row * 9)
    config = tiny.merged(tiny.run_config(nano, **over), method)
    run(config, tmp_path / name)
    data.write_text(row * 10)
    run(config, tmp_path / name)  # the stage is finished and reads no more rows
    longer = tiny.merged(config, dict(train=dict(steps=3)))
    with monkeypatch.context() as patched:
      patched.setattr(stages.place, 'place_stage', None)
      message = rf'config.data.path of {name}: {re.escape(str(data))} has 10 {kind}, and had 9 when the checkpoint'
      with pytest.raises(InputError, match=message):
        run(longer, tmp_path / name)
  data.write_text(row * 9)
  warning = f'warning: {rewards}: has changed since the last start of this run'
  assert warning not in capsys.readouterr().out
  rewards.write_text(f'{REWARD}\n# stricter\n')
  run(longer, tmp_path / 'grpo')
  assert warning in capsys.readouterr().out.replace('\n', '')


def test_rows_that_changed_in_place_warn(nano, tmp_path, capsys):
  rows = [dict(prompt=f'{n}+1=', completion=str(n + 1), answer=str(n + 1)) for n in range(9)]
  data = tmp_path / 'data.jsonl'
  warning = f'warning: config.data.path of sft: {data} has other rows than when the checkpoint was saved'
  config = tiny.run_config(nano, data=dict(path=str(data)), save=dict(every=1, export=False), train=dict(steps=1))

  def warns(steps):
    data.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    run(tiny.merged(config, dict(train=dict(steps=steps))), tmp_path / 'run')
    return warning in capsys.readouterr().out.replace('\n', '')

  assert not warns(1)
  rows[4]['completion'] = '6'
  assert warns(2)
  assert not warns(3)  # the checkpoint of step 2 is of the changed rows


def test_rows_that_a_map_draws_at_random_do_not_warn(nano, tmp_path, monkeypatch, capsys):
  """Such rows differ each time that they are read; if they do not, other rows are a change of the data."""
  data, maps = tmp_path / 'data.jsonl', tmp_path / 'maps.py'
  data.write_text(''.join(json.dumps(dict(prompt=f'{n}+1=', completion=str(n + 1))) + '\n' for n in range(9)))
  maps.write_text('import random\n\ndef change(row):\n  return row | dict(completion=str(random.randint(10, 99)))\n')
  data_options = dict(path=str(data), map=f'{maps}:change')
  config = tiny.run_config(nano, data=data_options, save=dict(every=1, export=False))

  def warns(steps):
    run(tiny.merged(config, dict(train=dict(steps=steps))), tmp_path / 'run')
    return 'has other rows than when the checkpoint was saved' in capsys.readouterr().out.replace('\n', '')

  assert not warns(1)
  assert not warns(2)
  monkeypatch.setattr(random, 'randint', lambda low, high: low)
  assert warns(3)


def test_drafts_of_killed_processes_are_removed_by_the_next_start(sft, tmp_path):
  """A draft stays if its process lives, or if it is of another host, of which nothing is known."""
  config, finished = sft
  workdir = tmp_path / 'run'
  shutil.copytree(finished, workdir)
  (workdir / 'summary.json').unlink()
  die = 'import os, signal, sys; from jaxpost.storage import object_store as s; '
  die += 's.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL); s.write(sys.argv[1], b"half")'
  for name in ('config.json', 'checkpoints/sft/notes.json'):
    assert subprocess.run([sys.executable, '-c', die, str(workdir / name)]).returncode == -signal.SIGKILL
  drafts = [*workdir.rglob('.*.tmp')]
  assert {draft.parent.name for draft in drafts} == {'run', 'sft'} and len(drafts) == 2
  pid = re.fullmatch(r'.*\.(\d+)\.tmp', drafts[0].name)[1]
  host = socket.gethostname()
  others = [f'.config.json.elsewhere.{pid}.tmp', f'.config.json.{host}.{os.getppid()}.tmp', '.notes.tmp']
  others.append(f'.config.json.x{host}.{pid}.tmp')
  for name in others:
    (workdir / name).write_text('')
  run(config, workdir)
  assert {path.name for path in workdir.rglob('.*.tmp')} == {*others}


def test_signal_in_the_last_step_is_not_lost(sft, tmp_path):
  """Only the summary is left to do, and the run still raises Preempted, for exit code 42."""
  config, expected = sft
  workdir = tmp_path / 'run'

  def stop():
    deadline = time.monotonic() + LIMIT
    while train_rows(workdir, 'sft') < 5 and time.monotonic() < deadline:
      time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

  signals_after_run = []
  old_handler = signal.signal(signal.SIGTERM, lambda *_: signals_after_run.append(1))
  thread = threading.Thread(target=stop)
  thread.start()
  try:
    with pytest.raises(Preempted, match='told to stop'):
      run(config, workdir)
      thread.join()
      assert signals_after_run, 'the signal was lost'
      pytest.skip('so busy a machine that the signal came after the run')
  finally:
    thread.join()
    signal.signal(signal.SIGTERM, old_handler)
  run(config, workdir)
  same_rows(workdir, expected)


def test_init_from_starts_from_the_weights_of_another_run(sft, nano, tmp_path):
  config, other = sft
  for suffix, step in (('', 6), ('@2', 2)):
    child = tiny.merged(config, dict(init_from=f'{other}{suffix}', optim=dict(lr=0.0), train=dict(steps=1)))
    run(child, tmp_path / f'run{step}')
    leaves, _ = state(tmp_path / f'run{step}', 'sft')
    expected, _ = state(other, 'sft', step)
    weights = {k for k in leaves if k.startswith('policy/params/')}
    assert weights and all(leaves[k] == expected[k] for k in weights)
  with pytest.raises(InputError, match=r'config.init_from: .*checkpoints/sft has no step 3; it has 6, 4, 2$'):
    run(tiny.merged(config, dict(init_from=f'{other}@3')), tmp_path / 'bad')


def test_save_keep_and_keep_best_decide_which_steps_stay(nano, tmp_path):
  """The loss falls, so that `best_mode=max` keeps an early step beside the newest ones."""
  config = tiny.run_config(
    nano,
    optim=dict(lr=1e-2),
    eval=dict(every=1, data=dict(path=f'{TASK},split=test,size=8,correct=1')),
    save=dict(every=1, keep=2, keep_best='loss', best_mode='max'),
  )
  run(config, tmp_path / 'run')
  rows = metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl')
  losses = {r['step']: r['loss'] for r in rows if r['split'] == 'eval' and r['step']}
  best = max(losses, key=losses.get)
  assert best < 5, losses
  folder = tmp_path / 'run' / 'checkpoints' / 'sft'
  assert finished_steps(folder) == [6, 5, best]


def damage(folder):
  """Flips one bit in the largest file of a step."""
  file = max((p for p in folder.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def test_damaged_checkpoint_falls_back_and_none_left_ends_with_code_3(sft, tmp_path, capsys):
  """A damaged newest step falls back to the step before it; with no usable step left, the exit code is 3."""
  config, expected = sft
  workdir = copy(expected, tmp_path / 'run')
  folder = workdir / 'checkpoints' / 'sft'
  damage(folder / '6')
  run(config, workdir)
  warnings = [line for line in capsys.readouterr().out.splitlines() if 'checksum' in line]
  assert len(warnings) == 1 and 'using step 4' in warnings[0]
  assert 'step 6 (6/' in warnings[0]
  same_rows(workdir, expected)
  assert state(workdir, 'sft') == state(expected, 'sft')
  (workdir / 'summary.json').unlink()
  for step in finished_steps(folder):
    damage(folder / str(step))
  rows = (workdir / 'metrics.jsonl').read_bytes()
  with pytest.raises(NoCheckpointError, match='no usable checkpoint') as error:
    run(config, workdir)
  assert error.value.exit_code == 3 and '\n' not in str(error.value)
  assert (workdir / 'metrics.jsonl').read_bytes() == rows


def test_second_stage_resumes_only_on_the_weights_it_began_from(sft, nano, tmp_path):
  """A second stage never starts or resumes from an older step than the last of the stage before it."""
  config, first = sft
  workdir = copy(first, tmp_path / 'run')
  both = tiny.merged(config, dict(stages=('sft', 'more'), sft={}, more=dict(seed=1)))
  damage(workdir / 'checkpoints' / 'sft' / '6')
  run(both, workdir)  # the first stage repeats its last steps
  steps = [(r['stage'], r['step']) for r in metrics.read_rows(workdir / 'metrics.jsonl') if r['split'] == 'train']
  assert steps == [(stage, n) for stage in ('sft', 'more') for n in range(1, 7)]
  assert state(workdir, 'sft') == state(first, 'sft')
  # Once the second stage has begun, the first stage is not repeated.
  damage(workdir / 'checkpoints' / 'sft' / '6')
  longer = tiny.merged(both, dict(more=dict(train=dict(steps=8))))
  with pytest.raises(NoCheckpointError, match='step 6 .6/.*checksum'):
    run(longer, workdir)
