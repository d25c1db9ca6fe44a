"""Kill it, stop it, damage it, start it again: the run comes out the same.

One short run of SFT and GRPO is made without a disturbance; the others are
compared with it, in the rows of their metrics and in every bit of their final
state. What runs in a process of its own runs by the launcher's command.
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

# Never all equal, so that GRPO learns.
REWARD = """
def remainder(completion_ids, **columns):
  return [float(sum(ids) % 7) for ids in completion_ids]
"""
# The launcher, and a file of how often compilation found its cache.
COUNTED = """
import atexit, collections, json, os, runpy, sys
import jax
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda e, **_: seen.update([e]))
atexit.register(
    lambda: open(os.environ['EVENTS'], 'w').write(json.dumps(seen)))
runpy.run_module('launch.train', run_name='__main__')
"""


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


@pytest.fixture(scope='module')
def command(model, tmp_path_factory):
  """command(workdir, *more) -> the arguments of a run of both stages."""
  folder = tmp_path_factory.mktemp('config')
  (folder / 'rewards.py').write_text(REWARD)
  both = tiny.run_config(
    model,
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
  return lambda workdir, *more: [
    sys.executable,
    '-m',
    'launch.train',
    f'--config={path}',
    f'--workdir={workdir}',
    *more,
  ]


def start(arguments, **variables):
  return subprocess.Popen(
    arguments, cwd=ROOT, text=True, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )


def finish(process, code=0):
  """(stdout, stderr) of a process that must end with this exit code."""
  try:
    out, err = process.communicate(timeout=LIMIT)
  finally:
    process.kill()
  assert process.returncode == code, f'{process.returncode}\n{out}\n{err}'
  return out, err


@pytest.fixture(scope='module')
def baseline(command, tmp_path_factory):
  """The folder of the run that nothing disturbs."""
  workdir = tmp_path_factory.mktemp('runs') / 'baseline'
  out, err = finish(start(command(workdir)))
  assert 'after the first step' not in out + err
  summary = json.loads(out.splitlines()[-1])
  assert summary == json.loads((workdir / 'summary.json').read_text())
  return workdir


def seal(folder, step=None):
  """Returns {name: crc} of the leaves and files in a checkpoint's manifest."""
  step = max(finished_steps(folder)) if step is None else step
  _, _, text = (folder / str(step) / 'checksums.json').read_bytes().partition(b'\n')
  return json.loads(text)


def state(workdir, stage, step=None):
  """{leaf: bytes} of a checkpoint, and its meta."""
  import jax

  from jaxpost.storage.checkpoint import Checkpointer

  folder = workdir / 'checkpoints' / stage
  step = max(finished_steps(folder)) if step is None else step
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tree = {
    k: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here)
    for k, (shape, dtype) in seal(folder, step)['leaves'].items()
  }
  checkpointer = Checkpointer(folder)
  try:
    _, leaves, meta = checkpointer.restore(tree, step)
  finally:
    checkpointer.close()
  return {k: np.asarray(x).tobytes() for k, x in leaves.items()}, meta


def assert_same_run(workdir, expected):
  """Rows, final states, samples and exported weights, bit for bit."""
  mine, theirs = (metrics.comparable_rows(d / 'metrics.jsonl') for d in (workdir, expected))
  assert mine == theirs
  for stage, steps in STEPS.items():
    assert max(finished_steps(workdir / 'checkpoints' / stage)) == steps
    assert state(workdir, stage) == state(expected, stage)
  for pattern in ('samples/*/*.jsonl', 'export/*.safetensors'):
    files = sorted(p.relative_to(expected) for p in expected.glob(pattern))
    assert files == sorted(p.relative_to(workdir) for p in workdir.glob(pattern))
    for file in files:
      assert (workdir / file).read_bytes() == (expected / file).read_bytes()
  figures = [
    {
      k: v
      for k, v in json.loads((d / 'summary.json').read_text()).items()
      if k not in ('wall_s', 'paths') and 'time' not in k and 'per_s' not in k
    }
    for d in (workdir, expected)
  ]
  assert figures[0] == figures[1]


def test_the_baseline_learns_in_both_stages(baseline):
  """Else equal states would prove nothing."""
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


def test_repeated_run_is_equal_and_finds_its_programs(command, baseline, tmp_path):
  _, *rest = command(tmp_path / 'again')
  arguments = [sys.executable, '-c', COUNTED, *rest[2:]]
  events = tmp_path / 'events.json'
  out, err = finish(start(arguments, EVENTS=str(events)))
  assert_same_run(tmp_path / 'again', baseline)
  seen = json.loads(events.read_text())
  plans = json.loads((baseline / 'plan.json').read_text())
  programs = sum(len(p['programs']) for p in plans)
  assert seen['/jax/compilation_cache/cache_hits'] >= programs
  assert seen.get('/jax/compilation_cache/cache_misses', 0) == 0


# Processes that are killed.


def descendants(pid):
  """{pid: start time} of the children of a process, and theirs."""
  found = {}
  for task in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
    with contextlib.suppress(OSError):  # it has just ended
      for child in task.read_text().split():
        found |= {int(child): start_time(child), **descendants(child)}
  return found


def start_time(pid):
  """When a process began, in ticks; None once it is gone."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return None
  state, *fields = text.rpartition(')')[2].split()
  return None if state == 'Z' else fields[18]


def unfinished(workdir, stage, since=0.0):
  """Steps whose writing began after `since` and has not ended."""
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
  path = workdir / 'metrics.jsonl'
  text = path.read_text() if path.exists() else ''
  return text.count(f'"stage": "{stage}", "split": "train"')


def wait_for(process, condition):
  """Polls until it holds; False if the process ended before."""
  deadline = time.monotonic() + LIMIT
  while not condition():
    if process.poll() is not None:
      return False
    assert time.monotonic() < deadline, 'too slow'
    time.sleep(0.001)
  return True


def assert_gone(processes):
  deadline = time.monotonic() + 10
  while any(t and start_time(pid) == t for pid, t in processes.items()):
    assert time.monotonic() < deadline, f'left over: {processes}'
    time.sleep(0.02)


@pytest.mark.ci
@pytest.mark.parametrize('seed', range(7, 7 + scorecard.ROUNDS))
def test_killed_at_any_moment(command, baseline, tmp_path, record_property, seed):
  """kill -9 in both stages, in the middle of writes and of steps."""
  workdir, draw = tmp_path / 'killed', random.Random(seed)
  record_property('cases', 4)
  inside = 0
  for stage, writing in (('sft', True), ('sft', False), ('grpo', False), ('grpo', True)):
    begin, process = time.time(), start(command(workdir))
    try:
      if writing:
        started = wait_for(process, functools.partial(unfinished, workdir, stage, begin))
      else:
        least = draw.randint(1, 3) + train_rows(workdir, stage)
        started = wait_for(process, functools.partial(has_rows, workdir, stage, least))
        time.sleep(draw.uniform(0, 0.05))
      workers = descendants(process.pid)
      process.kill()
      out, err = process.communicate()
    finally:
      process.kill()
    assert started and process.returncode == -signal.SIGKILL, out + err
    assert len(workers) >= 2
    assert_gone(workers)
    inside += bool(unfinished(workdir, stage, begin))
  out, err = finish(start(command(workdir)))
  assert 'after the first step' not in out + err
  assert inside >= 1
  assert_same_run(workdir, baseline)


@pytest.mark.ci
def test_told_to_stop(command, baseline, tmp_path):
  """SIGTERM before the first step and in both stages: saved, exit code 42."""
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
      # The steps that were done at the signal, and the step after them.
      assert train_rows(workdir, stage) == step
  out, _ = finish(start(command(workdir)))
  assert 'rows of metrics past it, dropped: 0' in ' '.join(out.split())
  assert_same_run(workdir, baseline)


def everything(workdir):
  return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in workdir.rglob('*') if p.is_file()}


def test_finished_run_started_again_changes_nothing(command, baseline):
  before, begin = everything(baseline), time.monotonic()
  out, _ = finish(start(command(baseline)))
  assert time.monotonic() - begin < 20
  assert 'was finished before' in out
  assert json.loads(out.splitlines()[-1]) == json.loads((baseline / 'summary.json').read_text())
  assert everything(baseline) == before


# In this process: SFT, so that no worker is needed.


def run(config, workdir):
  logging.getLogger().setLevel(logging.WARNING)
  return stages.run(config, workdir)


def same_rows(a, b):
  a, b = (metrics.comparable_rows(d / 'metrics.jsonl') for d in (a, b))
  assert a == b


@pytest.fixture(scope='module')
def sft(model, tmp_path_factory):
  """(config, folder) of an SFT run that keeps all its steps."""
  config = tiny.run_config(
    model,
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
  """Makes a run look as if it had been told to stop in this step, whose evaluation the resume has to make."""
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
def test_more_steps_continue_a_finished_run(sft, model, tmp_path, monkeypatch):
  config, _ = sft
  short = tiny.merged(config, dict(train=dict(steps=4)))
  run(short, tmp_path / 'run')
  leave_out_evaluation(tmp_path / 'run', 4)
  read, before = Checkpointer.restore, live_bytes()

  def restore(checkpointer, template):
    # The initial state is gone by then: on a device that is nearly full, a resume must fit where the start did.
    assert live_bytes() - before < 0.1 * memory.size(template)
    return read(checkpointer, template)

  verify, verified = manifest.verify, []
  with monkeypatch.context() as patched:
    patched.setattr(Checkpointer, 'restore', restore)
    patched.setattr(manifest, 'verify', lambda *given: verified.append(given) or verify(*given))
    assert run(config, tmp_path / 'run')['steps/sft'] == 6
  # For what is compared with the config, which needs no arrays, and for the state.
  assert [any(name.startswith('state/') for name in what.files) for what, _ in verified] == [False, True]
  same_rows(tmp_path / 'run', sft[1])
  assert state(tmp_path / 'run', 'sft') == state(sft[1], 'sft')
  scores, theirs = (seal(folder / 'checkpoints/sft', 4)['metrics']['loss'] for folder in (tmp_path / 'run', sft[1]))
  assert scores == theirs  # for `save.keep_best`
  assert json.loads((tmp_path / 'run/config.json').read_text())['train']['steps'] == 6
  given = types.SimpleNamespace(train=types.SimpleNamespace(steps=6))
  stage = types.SimpleNamespace(name='sft', config=given, data=types.SimpleNamespace(held_out=True))
  assert stages.stages_done([stage], tmp_path / 'run') == 1
  folder = tmp_path / 'run/checkpoints/sft'
  manifest.write(folder / '6', manifest.read(folder, 6)._replace(metrics={}))  # killed after the row of the evaluation
  (tmp_path / 'run/summary.json').unlink()
  run(config, tmp_path / 'run')
  same_rows(tmp_path / 'run', sft[1])
  leave_out_evaluation(tmp_path / 'run', 6)
  assert stages.stages_done([stage], tmp_path / 'run') == 0  # all its steps, and not the evaluation after them
  with pytest.raises(InputError, match='train.steps: 4 of sft.* its step 6'):
    run(short, tmp_path / 'run')


def test_other_rows_are_refused_before_anything_is_compiled(model, tmp_path, monkeypatch, capsys):
  row = json.dumps(dict(prompt='1+1=', completion='2', answer='2')) + '\n'
  data, rewards = tmp_path / 'data.jsonl', tmp_path / 'rewards.py'
  data.write_text(row * 9)
  rewards.write_text(REWARD)
  over = dict(data=dict(path=str(data)), save=dict(every=2, export=False), train=dict(steps=2))
  grpo = dict(algorithm='grpo', reward=f'{rewards}:remainder', rollout=dict(prompts=2, group_size=2))
  for name, more, kind in (('sft', {}, 'rows'), ('grpo', grpo, 'prompts')):
    data.write_text(row * 9)
    config = tiny.merged(tiny.run_config(model, **over), more)
    run(config, tmp_path / name)
    data.write_text(row * 10)
    run(config, tmp_path / name)  # is done, and reads no more rows
    longer = tiny.merged(config, dict(train=dict(steps=3)))
    with monkeypatch.context() as patched:
      patched.setattr(stages.place, 'place_stage', None)
      words = rf'config.data.path of {name}: {re.escape(str(data))} has 10 {kind}, and had 9 when the checkpoint'
      with pytest.raises(InputError, match=words):
        run(longer, tmp_path / name)
  data.write_text(row * 9)
  said = f'warning: {rewards}: has changed since the last start of this run'
  assert said not in capsys.readouterr().out
  rewards.write_text(f'{REWARD}\n# stricter\n')
  run(longer, tmp_path / 'grpo')
  assert said in capsys.readouterr().out.replace('\n', '')


def test_signal_in_the_last_step_is_not_lost(sft, tmp_path):
  """Nothing is left to do but the summary, and 42 is still the answer."""
  config, expected = sft
  workdir = tmp_path / 'run'

  def stop():
    deadline = time.monotonic() + LIMIT
    while train_rows(workdir, 'sft') < 5 and time.monotonic() < deadline:
      time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

  late = []
  old = signal.signal(signal.SIGTERM, lambda *_: late.append(1))
  thread = threading.Thread(target=stop)
  thread.start()
  try:
    with pytest.raises(Preempted, match='told to stop'):
      run(config, workdir)
      thread.join()
      assert late, 'the signal was lost'
      pytest.skip('so busy a machine that the signal came after the run')
  finally:
    thread.join()
    signal.signal(signal.SIGTERM, old)
  run(config, workdir)
  same_rows(workdir, expected)


def test_init_from_starts_from_those_weights(sft, model, tmp_path):
  config, other = sft
  for where, step in (('', 6), ('@2', 2)):
    child = tiny.merged(config, dict(init_from=f'{other}{where}', optim=dict(lr=0.0), train=dict(steps=1)))
    run(child, tmp_path / f'run{step}')
    mine, _ = state(tmp_path / f'run{step}', 'sft')
    theirs, _ = state(other, 'sft', step)
    weights = {k for k in mine if k.startswith('policy/params/')}
    assert weights and all(mine[k] == theirs[k] for k in weights)
  with pytest.raises(NoCheckpointError, match='step 3 .not there.'):
    run(tiny.merged(config, dict(init_from=f'{other}@3')), tmp_path / 'bad')


def test_keep_and_keep_best(model, tmp_path):
  """The loss falls, so that the first step has the largest."""
  config = tiny.run_config(
    model,
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


def test_damaged_checkpoints(sft, tmp_path, capsys):
  """The newest falls back to the one before it; with none left, exit code 3."""
  config, expected = sft
  workdir = copy(expected, tmp_path / 'run')
  folder = workdir / 'checkpoints' / 'sft'
  damage(folder / '6')
  run(config, workdir)
  lines = [line for line in capsys.readouterr().out.splitlines() if 'checksum' in line]
  assert len(lines) == 1 and 'using step 4' in lines[0]
  assert 'step 6 (6/' in lines[0]
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


def test_a_second_stage_needs_the_weights_it_began_from(sft, model, tmp_path):
  """Never from an older step than the one that the stage before ended with."""
  config, first = sft
  workdir = copy(first, tmp_path / 'run')
  both = tiny.merged(config, dict(stages=('sft', 'more'), sft={}, more=dict(seed=1)))
  damage(workdir / 'checkpoints' / 'sft' / '6')
  run(both, workdir)  # the first stage makes its last steps again
  steps = [(r['stage'], r['step']) for r in metrics.read_rows(workdir / 'metrics.jsonl') if r['split'] == 'train']
  assert steps == [(stage, n) for stage in ('sft', 'more') for n in range(1, 7)]
  assert state(workdir, 'sft') == state(first, 'sft')
  # Now that the second has begun, the first is not made anew.
  damage(workdir / 'checkpoints' / 'sft' / '6')
  longer = tiny.merged(both, dict(more=dict(train=dict(steps=8))))
  with pytest.raises(NoCheckpointError, match='step 6 .6/.*checksum'):
    run(longer, workdir)
