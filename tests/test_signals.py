"""Stop signals (SIGTERM, SIGINT, SIGHUP) at any moment: a run saves once, loses no step and ends with code 42."""

import contextlib
import os
import pathlib
import pty
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent import futures

import children
import pytest
import tiny

from jaxpost import stages
from jaxpost.errors import InputError, Preempted
from jaxpost.hardware import signals
from jaxpost.monitor import metrics
from jaxpost.rewards.pool import Group, RewardPool
from jaxpost.storage.manifest import finished_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT = 240  # seconds that a process may take, on a busy machine
# A map that keeps its thread in C code, as compilation does, so that no Python signal handler can run.
STUCK_MAP = """
import hashlib, os, pathlib

def fix(row):
  if hold := os.environ.get('HOLD'):
    pathlib.Path(hold).touch()
    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
  return row
"""
# The launcher, whose first export hangs for 600 s; the next one does not.
SLOW_EXPORT = """
import os, pathlib, sys, time
from absl import flags
from jaxpost.formats import hf, hf_export

write = hf_export._write_configs

def slowly(*args):
  hold = pathlib.Path(os.environ['HOLD'])
  if not hold.exists():
    hold.touch()
    time.sleep(600)
  return write(*args)

hf_export._write_configs = slowly
from launch import exits, train
exits.run(train.main)
"""


def command(folder, config, head=('-m', 'launch.train')):
  file = tiny.config_file(folder / 'config.py', config)
  return [sys.executable, *head, f'--config={file}', f'--workdir={folder}/run']


def start(arguments, **variables):
  return subprocess.Popen(
    arguments,
    cwd=ROOT,
    text=True,
    env=children.environment(**variables),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def finish(process, code):
  try:
    out, err = process.communicate(timeout=LIMIT)
  finally:
    process.kill()
  assert process.returncode == code, f'{process.returncode}\n{out}\n{err}'
  return err


def wait_for(process, condition):
  deadline = time.monotonic() + LIMIT
  while not condition():
    assert process.poll() is None and time.monotonic() < deadline, 'ended or too slow'
    time.sleep(0.002)


def train_rows(folder):
  """Returns the number of training steps in the metrics of the run."""
  file = folder / 'run' / 'metrics.jsonl'
  return file.read_text().count('"train"') if file.exists() else 0


@pytest.fixture
def clock(monkeypatch):
  """[the time that signal handlers see], which stands still: on a busy machine, milliseconds could become a second."""
  now = [100.0]
  monkeypatch.setattr(signals, 'time', types.SimpleNamespace(monotonic=lambda: now[0]))
  return now


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_repeated_stop_signals_save_once_without_losing_a_step(number, nano, tmp_path, clock):
  """A run in this process gets a signal three times: it saves once, with all steps, and raises Preempted at the end."""
  config = tiny.run_config(nano, train=dict(steps=4000))

  def stop():
    while train_rows(tmp_path) < 3:
      time.sleep(0.001)
    for _ in range(3):
      os.kill(os.getpid(), number)
      time.sleep(0.002)

  thread = threading.Thread(target=stop)
  thread.start()
  with pytest.raises(Preempted, match='saved at step'):
    stages.run(config, tmp_path / 'run')
  thread.join()
  (step,) = finished_steps(tmp_path / 'run' / 'checkpoints' / 'sft')
  assert step == train_rows(tmp_path) >= 3


def test_previous_handlers_are_restored():
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
  with signals.StopSignal() as stop:
    signal.raise_signal(signal.SIGINT)
    assert stop.received == signal.SIGINT and stop.reached()
    with pytest.raises(Preempted, match='^here: told to stop, no step is lost'):
      stop.check('here')
    stop.received = None
  assert {n: signal.getsignal(n) for n in before} == before


def test_a_run_in_a_thread_goes_without_handlers(tmp_path):
  with futures.ThreadPoolExecutor(1) as pool:
    run = pool.submit(stages.run, {'data': {'path': 'nowhere.jsonl'}, 'model': {'dtype': 'float32'}}, tmp_path / 'run')
    with pytest.raises(InputError, match='nowhere.jsonl'):  # and not ValueError, as handlers need the main thread
      run.result()


def test_ctrl_c_again_after_two_seconds_ends_the_run(clock):
  with signals.StopSignal() as stop:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    clock[0] += 2
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
    stop.received = None


def test_ignored_sighup_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with signals.StopSignal() as stop:
      signal.raise_signal(signal.SIGHUP)
      assert stop.received is None
  finally:
    signal.signal(signal.SIGHUP, before)


PROCESS_IN_C_CODE = """
import hashlib, os, signal, sys, time
from jaxpost.hardware import signals
with signals.StopSignal(exit_after_s=0.3) as stop:
  stop.unsaved = sys.argv[1] == 'unsaved'
  os.kill(os.getpid(), signal.SIGTERM)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1 if sys.argv[1] == 'stuck' else 4_000_000)
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(0.1)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(7)
"""


@pytest.mark.parametrize('case, code', [('stuck', 42), ('unsaved', 7)])
def test_process_stuck_in_c_code_ends_at_the_deadline_unless_steps_are_unsaved(case, code):
  """Code in C never looks at a flag, so the process is ended, unless steps would be lost; later signals end nothing."""
  done = subprocess.run(
    [sys.executable, '-c', PROCESS_IN_C_CODE, case], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
  )
  assert done.returncode == code, done.stderr
  assert done.stderr == ('jaxpost: told to stop, no step is lost; run the same command to go on\n' * (code == 42))


# Controls its own clock, whose lock can also stop the watching thread. `looks` waits until that thread has read all
# values.
PROCESS_WITH_ITS_OWN_CLOCK = """
import os, signal, threading, time, types
from jaxpost.hardware import signals

now, calls, gate, ended = [100.0], [0], threading.RLock(), []

def monotonic():
  with gate:
    calls[0] += threading.current_thread() is not threading.main_thread()
    return now[0]

def looks():
  seen = calls[0]
  while calls[0] < seen + 3:
    time.sleep(0.01)

def ctrl_c():
  os.kill(os.getpid(), signal.SIGINT)

signals.time = types.SimpleNamespace(monotonic=monotonic)
with signals.StopSignal(exit_after_s=0.5) as stop:
  stop.unsaved, stop.end = True, lambda code, message: ended.append((now[0], code))
  ctrl_c()
  ctrl_c()
  looks()
  with gate:  # Python runs nothing for five seconds; when the signal of that time arrived, nobody knows
    now[0] += 5
    ctrl_c()
  looks()
  ctrl_c()
  looks()
  assert ended == [(105.0, 130)], ended
  now[0] += 100  # the process was suspended
  looks()
  stop.unsaved = False
  now[0] += 0.25
  looks()
  assert len(ended) == 1, ended
  now[0] += 0.75
  looks()
  assert ended[1] == (206.0, 42), ended
"""


def test_time_of_a_signal_is_when_it_arrives_not_when_its_handler_runs():
  """C code delays the handler of a signal; and a suspended process loses no unsaved steps."""
  subprocess.run([sys.executable, '-c', PROCESS_WITH_ITS_OWN_CLOCK], cwd=ROOT, check=True, timeout=LIMIT)


def test_stop_while_stuck_in_c_code_before_the_first_step_ends_with_42(nano, tmp_path):
  (tmp_path / 'maps.py').write_text(STUCK_MAP)
  config = tiny.run_config(nano, data=dict(map=f'{tmp_path}/maps.py:fix'))
  process = start(command(tmp_path, config), HOLD=str(tmp_path / 'hold'))
  wait_for(process, (tmp_path / 'hold').exists)
  process.terminate()
  process.terminate()
  assert finish(process, 42) == 'jaxpost: told to stop, no step is lost; run the same command to go on\n'


def test_stop_during_export_leaves_no_partial_export_and_repeats_it(nano, tmp_path):
  """The export folder does not exist until it is complete; the next run repeats the export."""
  config = tiny.run_config(nano, save=dict(export=True))
  arguments = command(tmp_path, config, head=('-c', SLOW_EXPORT))
  process = start(arguments, HOLD=str(tmp_path / 'hold'))
  wait_for(process, (tmp_path / 'hold').exists)
  process.terminate()
  finish(process, 42)
  assert not (tmp_path / 'run' / 'export').exists() and not (tmp_path / 'run' / 'summary.json').exists()
  finish(start(arguments, HOLD=str(tmp_path / 'hold')), 0)
  assert (tmp_path / 'run' / 'export' / 'model.safetensors').exists()
  assert [p.name for p in (tmp_path / 'run').glob('.export*')] == []


# Makes the terminal at standard input the controlling one, whose closing sends SIGHUP to the process.
WITH_CONTROLLING_TERMINAL = (
  'import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])'
)


def test_closed_terminal_saves_and_ends_with_42(nano, tmp_path):
  """The process gets SIGHUP and each write to the terminal fails, but it still saves."""
  config = tiny.run_config(nano, train=dict(steps=100_000), log=dict(every=1))
  terminal, other_end = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, '-c', WITH_CONTROLLING_TERMINAL, *command(tmp_path, config)],
    cwd=ROOT,
    env=children.environment(),
    start_new_session=True,
    stdin=other_end,
    stdout=other_end,
    stderr=other_end,
  )
  os.close(other_end)
  os.set_blocking(terminal, False)

  def has_begun():
    with contextlib.suppress(OSError):
      os.read(terminal, 1 << 16)
    return train_rows(tmp_path) >= 3

  wait_for(process, has_begun)
  os.close(terminal)
  assert process.wait(LIMIT) == 42
  (step,) = finished_steps(tmp_path / 'run' / 'checkpoints' / 'sft')
  assert step == len(metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl'))


SLOW_REWARD = """
import os, time

def slow(completions, **columns):
  open(os.environ['HOLD'], 'w').close()
  time.sleep(1.0)
  return [1.0] * len(completions)
"""


def test_reward_workers_ignore_stop_signals(tmp_path, monkeypatch):
  """Slurm signals all processes of a job, including reward workers; groups that are being graded must not fail."""
  (tmp_path / 'rewards.py').write_text(SLOW_REWARD)
  monkeypatch.setenv('HOLD', str(tmp_path / 'hold'))
  with RewardPool((f'{tmp_path}/rewards.py:slow',), workers=1, env_vars=('HOLD',)) as pool:
    pool.check(())
    worker = pool._workers[0]._process.pid

    def stop():
      while not (tmp_path / 'hold').exists():
        time.sleep(0.01)
      for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(worker, number)

    thread = threading.Thread(target=stop)
    thread.start()
    (graded,) = pool.grade([Group(['a'], ['b'], [[1]], {})])
    thread.join()
    assert graded.error is None and pool._workers[0]._process.pid == worker
