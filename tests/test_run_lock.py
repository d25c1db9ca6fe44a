"""One run in a folder: who may take the lock, and when it is left over."""

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
PATIENCE_S = 120  # on a busy machine
# Takes the lock at a line on its input, and holds it until it is killed; held up for some seconds before it replaces
# the lock of another.
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
def holders(folder, *held_up_s):
  """Yields processes that try to take the lock of a folder at once, and what each said."""
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', HOLDER, str(folder), str(seconds)],
      cwd=ROOT,
      text=True,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    for seconds in held_up_s
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
  """lock() -> another lock of one folder; all are released in the end."""
  made = []

  def make():
    made.append(run_lock.RunLock(tmp_path / 'run', made_over.append))
    return made[-1]

  made_over = make.lost = []
  yield make
  for one in made:
    one.release()


@pytest.fixture
def quick(monkeypatch):
  monkeypatch.setattr(run_lock, 'BEAT_S', 0.05)
  monkeypatch.setattr(run_lock, 'WATCH_S', 0.6)


def rewrite(folder, **fields):
  path = folder / 'run' / run_lock.NAME
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_second_process_is_told_who_has_it(lock, tmp_path):
  with holders(tmp_path / 'run', 0) as ((first,), said):
    assert said == ['holds']
    with pytest.raises(
      InputError, match=f'process {first.pid} on .* since 20.*; wait until it ends, end it, or choose'
    ):
      lock().acquire()
  said = []
  lock().acquire(said.append)  # it is dead, and on this machine that is known without watching
  assert not said


def test_a_lock_is_given_back(lock, tmp_path):
  one, other = lock(), lock()
  one.acquire()
  one.acquire()
  with pytest.raises(InputError, match=f'process {os.getpid()} on'):
    other.acquire()
  other.release()  # not its own
  assert (tmp_path / 'run' / run_lock.NAME).exists()
  one.release()
  assert list((tmp_path / 'run').iterdir()) == []
  other.acquire()


def test_a_pid_that_is_used_again(lock, tmp_path):
  lock().acquire()
  rewrite(tmp_path, start='17')
  lock().acquire()


@pytest.mark.parametrize('damage', [{'pid': 2**40, 'start': ''}, {'pid': '\0'}, {'pid': '\ud800'}])
def test_a_damaged_lock_of_this_machine_is_left_over(damage, lock, tmp_path, quick):
  first = lock()
  first.acquire()
  first._released.set()  # beats no more
  first._thread.join()
  rewrite(tmp_path, **damage)
  lock().acquire()


def test_elsewhere_it_lives_while_it_beats(lock, tmp_path, quick, monkeypatch):
  monkeypatch.setattr(run_lock, 'WATCH_S', PATIENCE_S)
  first = lock()
  first._record['machine'] = 'another'
  first.acquire()
  said = []
  with pytest.raises(InputError, match='if it is certainly gone, remove .*lock.json'):
    lock().acquire(said.append)
  assert 'watching for' in said[0]


@pytest.mark.parametrize('damaged', [False, True])
def test_elsewhere_it_is_left_over_without_beats(damaged, lock, tmp_path, quick):
  first = lock()
  first.acquire()
  first._released.set()  # beats no more
  first._thread.join()
  rewrite(tmp_path, machine='another')
  if damaged:
    (tmp_path / 'run' / run_lock.NAME).write_bytes(b'\xff{')
  start = time.monotonic()
  lock().acquire()
  assert time.monotonic() - start >= 0.6


def test_a_holder_that_was_taken_over_is_told(lock, tmp_path, quick):
  first = lock()
  first.acquire()
  with first._beating:  # not in the middle of a beat, which would write the file again
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
  """Their errors are no OSErrors; a beat that fails is tried again."""
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


def test_of_several_one_takes_what_is_left_over(lock, tmp_path):
  """Also where some are held up between the look at the lock and its replacement, for longer than the others take."""
  first = lock()
  first.acquire()
  rewrite(tmp_path, start='17')
  with holders(tmp_path / 'run', 0, 0, 1.5, 3) as (_, said):
    assert sorted(said) == ['holds', 'refused', 'refused', 'refused']


def test_a_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(InputError, match='--workdir: .*file/run: cannot be written'):
    run_lock.RunLock(tmp_path / 'file' / 'run', print).acquire()


def test_two_runs(tmp_path):
  """The second ends with 2 and one line, the first is not disturbed; killed, it hinders none."""
  model = tiny.folder(tmp_path / 'nano')
  config = tiny.run_config(model, train=dict(steps=100_000), save=dict(every=2))
  file = tiny.config_file(tmp_path / 'config.py', config)
  arguments = [sys.executable, '-m', 'launch.train', f'--config={file}', f'--workdir={tmp_path}/run']
  given = dict(cwd=ROOT, text=True, env=children.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
  first = subprocess.Popen(arguments, **given)
  try:
    rows = tmp_path / 'run' / 'metrics.jsonl'
    while not (rows.exists() and rows.read_text().count('\n') > 3):
      assert first.poll() is None
      time.sleep(0.05)
    second = subprocess.run(arguments, **given)
    assert second.returncode == 2, second.stderr
    assert f'process {first.pid} on ' in second.stderr and second.stderr.count('\n') == 1
    seen = rows.read_text().count('\n')
    while rows.read_text().count('\n') == seen:
      assert first.poll() is None
      time.sleep(0.05)
  finally:
    first.send_signal(signal.SIGKILL)
    first.communicate()
  assert (tmp_path / 'run' / run_lock.NAME).exists()
  done = rows.read_text().count('"train"')
  stages.run(tiny.merged(config, dict(train=dict(steps=done + 2))), tmp_path / 'run')
  assert not (tmp_path / 'run' / run_lock.NAME).exists()
  assert [t for t in threading.enumerate() if t.name == 'run lock'] == []
