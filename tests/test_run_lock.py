"""`storage.run_lock`: one run per folder; which process may take the lock, and when a stale lock is taken over."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import children
import pytest
import tiny

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.storage import run_lock

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE_S = 120  # the longest wait, on a busy machine
# Takes the lock when a line arrives on its input, and holds it until it is killed. Its writes are delayed: it may have
# to wait between the look at the lock of another process and the replacement of that lock.
HOLDER = """
import sys, time
from jaxpost.errors import InputError
from jaxpost.storage import object_store, run_lock
write = object_store.write
object_store.write = lambda *given: (time.sleep(float(sys.argv[2])), write(*given))
lock = run_lock.RunLock(sys.argv[1], print)
print('ready', flush=True)
sys.stdin.readline()
try:
  lock.acquire()
except InputError as error:
  print('refused', error)
else:
  print('holds', flush=True)
  time.sleep(600)
"""


@contextlib.contextmanager
def holders(folder, *delays_s):
  """Yields processes that try to take the lock of a folder at once, and whether each 'holds' it or was 'refused'."""
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', HOLDER, str(folder), str(seconds)],
      cwd=ROOT,
      text=True,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    for seconds in delays_s
  ]
  try:
    assert [process.stdout.readline() for process in processes] == ['ready\n'] * len(processes)
    for process in processes:
      process.stdin.write('\n')
      process.stdin.flush()
    yield processes, [process.stdout.readline().split()[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.communicate()


@pytest.fixture
def lock(tmp_path):
  """lock() -> a new RunLock of one folder, released after the test; `lock.lost` has the notices of lost locks."""
  locks, notices = [], []

  def make():
    locks.append(run_lock.RunLock(tmp_path / 'run', notices.append))
    return locks[-1]

  make.lost = notices
  yield make
  for instance in locks:
    instance.release()


@pytest.fixture
def quick(monkeypatch):
  """Beats of 0.05 s, and a lock without beats is stale after 0.6 s."""
  monkeypatch.setattr(run_lock, 'BEAT_S', 0.05)
  monkeypatch.setattr(run_lock, 'WATCH_S', 0.6)


def rewrite(folder, **fields):
  """Replaces fields in the file of the lock."""
  path = folder / 'run' / run_lock.NAME
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_second_process_is_refused_with_the_holder_and_takes_over_after_its_death(lock, tmp_path):
  with holders(tmp_path / 'run', 0) as ((first,), states):
    assert states == ['holds']
    with pytest.raises(
      InputError, match=f'process {first.pid} on .* since 20.*; wait until it ends, end it, or choose'
    ):
      lock().acquire()
  messages = []
  lock().acquire(messages.append)  # on this machine, a dead holder is recognized without watching for beats
  assert not messages


def test_lock_is_released_only_by_its_holder(lock, tmp_path):
  holder, other = lock(), lock()
  holder.acquire()
  holder.acquire()
  with pytest.raises(InputError, match=f'process {os.getpid()} on'):
    other.acquire()
  other.release()  # does nothing: `other` does not hold the lock
  assert (tmp_path / 'run' / run_lock.NAME).exists()
  holder.release()
  assert list((tmp_path / 'run').iterdir()) == []
  other.acquire()


def test_lock_of_a_reused_pid_is_taken_over(lock, tmp_path):
  lock().acquire()
  rewrite(tmp_path, start='17')
  lock().acquire()


@pytest.mark.parametrize('damage', [{'pid': 2**40, 'start': ''}, {'pid': '\0'}, {'pid': '\ud800'}])
def test_damaged_lock_of_this_machine_is_taken_over(damage, lock, tmp_path, quick):
  first = lock()
  first.acquire()
  first._released.set()  # ends the beats
  first._thread.join()
  rewrite(tmp_path, **damage)
  lock().acquire()


def test_lock_of_another_machine_is_respected_while_it_beats(lock, tmp_path, quick, monkeypatch):
  monkeypatch.setattr(run_lock, 'WATCH_S', PATIENCE_S)
  first = lock()
  first._record['machine'] = 'another'
  first.acquire()
  messages = []
  with pytest.raises(InputError, match='if it is certainly gone, remove .*lock.json'):
    lock().acquire(messages.append)
  assert 'watching for' in messages[0]


@pytest.mark.parametrize('damaged', [False, True])
def test_lock_of_another_machine_is_taken_over_without_beats(damaged, lock, tmp_path, quick):
  first = lock()
  first.acquire()
  first._released.set()  # ends the beats
  first._thread.join()
  rewrite(tmp_path, machine='another')
  if damaged:
    (tmp_path / 'run' / run_lock.NAME).write_bytes(b'\xff{')
  start = time.monotonic()
  lock().acquire()
  assert time.monotonic() - start >= 0.6


def test_holder_whose_lock_was_taken_over_is_notified(lock, tmp_path, quick):
  first = lock()
  first.acquire()
  with first._beating:  # between two beats, as a beat would write the file again
    rewrite(tmp_path, token='of another', pid=7)
  deadline = time.monotonic() + PATIENCE_S
  while not lock.lost and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(lock.lost) == 1 and 'process 7 on' in lock.lost[0]


def test_a_lock_that_was_removed_comes_back(lock, tmp_path, quick):
  lock().acquire()
  path = tmp_path / 'run' / run_lock.NAME
  path.unlink()
  deadline = time.monotonic() + PATIENCE_S
  while not path.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert path.exists() and not lock.lost


def test_beats_go_on_after_an_error_of_an_object_store(lock, tmp_path, quick):
  """Errors of object stores are no OSErrors; a beat that fails is repeated."""
  held, failed = lock(), []
  read = held._read

  def fail_once():
    if failed:
      return read()
    failed.append(True)
    raise RuntimeError('503: try again')

  held.acquire()
  held._read = fail_once
  path = tmp_path / 'run' / run_lock.NAME
  deadline = time.monotonic() + PATIENCE_S
  while not failed and time.monotonic() < deadline:
    time.sleep(0.01)
  before = path.read_bytes()
  while path.read_bytes() == before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert failed and path.read_bytes() != before


def test_only_one_of_several_processes_takes_over_a_stale_lock(lock, tmp_path):
  """Some are delayed between the look at the lock and its replacement, for longer than the others take."""
  first = lock()
  first.acquire()
  rewrite(tmp_path, start='17')
  with holders(tmp_path / 'run', 0, 0, 1.5, 3) as (_, states):
    assert sorted(states) == ['holds', 'refused', 'refused', 'refused']


def test_workdir_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(InputError, match='--workdir: .*file/run: cannot be written'):
    run_lock.RunLock(tmp_path / 'file' / 'run', print).acquire()


def test_second_run_in_a_workdir_is_refused_and_a_killed_run_leaves_no_obstacle(tmp_path):
  """The second run ends with code 2 and one line, and the first goes on; once it is killed, the run can be resumed."""
  model = tiny.folder(tmp_path / 'nano')
  config = tiny.run_config(model, train=dict(steps=100_000), save=dict(every=2))
  file = tiny.config_file(tmp_path / 'config.py', config)
  arguments = [sys.executable, '-m', 'launch.train', f'--config={file}', f'--workdir={tmp_path}/run']
  options = dict(cwd=ROOT, text=True, env=children.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
  first = subprocess.Popen(arguments, **options)
  try:
    rows = tmp_path / 'run' / 'metrics.jsonl'
    while not (rows.exists() and rows.read_text().count('\n') > 3):
      assert first.poll() is None
      time.sleep(0.05)
    second = subprocess.run(arguments, **options)
    assert second.returncode == 2, second.stderr
    assert f'process {first.pid} on ' in second.stderr and second.stderr.count('\n') == 1
    rows_seen = rows.read_text().count('\n')
    while rows.read_text().count('\n') == rows_seen:
      assert first.poll() is None
      time.sleep(0.05)
  finally:
    first.send_signal(signal.SIGKILL)
    first.communicate()
  assert (tmp_path / 'run' / run_lock.NAME).exists()
  steps_done = rows.read_text().count('"train"')
  stages.run(tiny.merged(config, dict(train=dict(steps=steps_done + 2))), tmp_path / 'run')
  assert not (tmp_path / 'run' / run_lock.NAME).exists()
  assert [t for t in threading.enumerate() if t.name == 'run lock'] == []
