"""Faults of one process of a run: all processes end within the time limits, with an error that names the cause.

Two real processes on CPU, connected by gloo, are started as on a cluster. One of them fails because a test sends it a
signal, or because code of the user hangs.
"""

import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import children
import pytest
import tiny

from jaxpost.distributed import watchdog
from jaxpost.monitor import metrics
from jaxpost.storage.manifest import finished_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOST = socket.gethostname()
BEAT_S, STEP_S = 6, 10  # --heartbeat_s, config.log.watchdog_s
SLACK_S = 5  # all processes must have ended this long after the time limit
PATIENCE_S = 240  # the time that a run may take to begin on a busy machine

# A map of data, which hangs in the trainer itself because rows are read and mapped there.
HANGING_MAP = """
import os, time

def fix(row):
  if os.environ['RANK'] == '1' and os.path.exists(os.environ['HANG']):
    while True:
      time.sleep(0.1)
  return row
"""
HANGING_REWARD = """
import os, time

def slow(completions, **columns):
  if os.environ['RANK'] == '1' and os.path.exists(os.environ['HANG']):
    while True:
      time.sleep(0.1)
  return [float(len(c) % 3) for c in completions]
"""
# A launcher that calls the reward in the trainer instead of a worker process, so that a hanging call cannot be killed.
LAUNCHER_WITH_REWARD = """
import sys
from absl import flags
import importlib.util
spec = importlib.util.spec_from_file_location('rewards', sys.argv.pop(1))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from jaxpost import stages
run = stages.run
def with_reward(config, workdir, **options):
  config = config.to_dict()
  return run(config | {'reward': module.slow}, workdir, **options)
stages.run = with_reward
from launch import exits, train
exits.run(train.main)
"""


class Cluster:
  """Processes of `launch.train` that form one run, and the files that they write."""

  def __init__(self, folder, config, ranks=(0, 1), head=('-m', 'launch.train'), flags=(), variables=lambda rank: {}):
    self.folder, self.hang = folder, folder / 'hang'
    self.metrics = folder / 'run' / 'metrics.jsonl'
    file, address = tiny.config_file(folder / 'config.py', config), children.free_address()
    self.children = [
      subprocess.Popen(
        [
          sys.executable,
          '-u',
          *head,
          f'--config={file}',
          f'--workdir={folder}/run',
          f'--coordinator={address}',
          '--num_processes=2',
          f'--process_id={rank}',
          f'--heartbeat_s={BEAT_S}',
          *flags,
        ],
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=open(folder / f'out{rank}', 'w'),
        stderr=open(folder / f'err{rank}', 'w'),
        env=children.environment(RANK=str(rank), HANG=str(self.hang), **variables(rank)),
      )
      for rank in ranks
    ]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for child in self.children:
      child.kill()
      child.wait()

  def wait_for_steps(self, number=3):
    deadline = time.monotonic() + PATIENCE_S
    while not self.metrics.exists() or (self.metrics.read_text().count('"train"') < number):
      assert time.monotonic() < deadline
      assert all(c.poll() is None for c in self.children), self.stderr_of(0)
      time.sleep(0.1)
    self.wait(lambda: False, 2.5)  # each process sends one heartbeat per second; all must have seen one

  def wait(self, condition, seconds):
    """Waits for a condition, at most `seconds` plus the time that threads of the processes had to wait for a core."""
    start, delay = time.monotonic(), children.RunDelay(child.pid for child in self.children)
    while not condition() and time.monotonic() < start + seconds + delay.seconds():
      time.sleep(0.05)

  def ends_within(self, seconds, ranks=(0, 1)):
    """Asserts that these processes end in time; returns their exit codes."""
    ending = [self.children[i] for i in ranks]
    self.wait(lambda: all([child.poll() is not None for child in ending]), seconds + SLACK_S)
    for i in ranks:
      if self.children[i].poll() is None:
        pytest.fail(f'process {i} goes on after {seconds + SLACK_S} s:\n' + self.stderr_of(i))
    return [child.returncode for child in ending]

  def stderr_of(self, rank):
    return (self.folder / f'err{rank}').read_text()

  def error_line(self, rank):
    """Returns the only error line of a process, and all of its stderr."""
    text = self.stderr_of(rank)
    lines = [x for x in text.splitlines() if x.startswith('jaxpost: ')]
    assert len(lines) == 1, text
    return lines[0], text


def long_run(folder, **over):
  """A config of an SFT run that lasts longer than any test."""
  model = tiny.folder(folder / 'model', num_heads=2, num_kv_heads=2)
  return tiny.run_config(
    model,
    **tiny.merged(
      dict(train=dict(steps=100_000), log=dict(every=1, watchdog_s=STEP_S), eval=dict(data=dict(path=''))), over
    ),
  )


@pytest.mark.long
@pytest.mark.parametrize('victim', [0, 1], ids=['coordinator', 'worker'])
def test_killed_process_is_named_and_ends_the_others_in_time(victim, tmp_path):
  with Cluster(tmp_path, long_run(tmp_path)) as run:
    run.wait_for_steps()
    run.children[victim].kill()
    codes = run.ends_within(BEAT_S)
    assert codes == [-9, 1] if victim == 0 else [1, -9]
    line, _ = run.error_line(1 - victim)
    assert re.search(f'process {victim} on {HOST} .pid [0-9]+. is gone', line)
    assert re.search('step [0-9]+ of sft', line)


# A library that sets the wall clock an hour ahead, for Python and for the C++ code of JAX and gRPC.
CLOCK_AHEAD = """
#define _GNU_SOURCE
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>

int clock_gettime(clockid_t clock, struct timespec* now) {
  long code = syscall(SYS_clock_gettime, clock, now);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += 3600;
  return code;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval* restrict out, void* restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


@pytest.mark.long
@pytest.mark.skipif(
  not shutil.which('cc'), reason='no C compiler: the clock of a process is set ahead by a library in C'
)
def test_clocks_an_hour_apart_disturb_neither_run_nor_fault_detection(tmp_path):
  """The run trains, no measured time contains the hour, and a killed process is noticed as soon as otherwise."""
  (tmp_path / 'ahead.c').write_text(CLOCK_AHEAD)
  library = tmp_path / 'ahead.so'
  subprocess.run(['cc', '-shared', '-fPIC', '-o', library, tmp_path / 'ahead.c'], check=True)
  print_time = [sys.executable, '-c', 'import time; print(time.time())']
  ahead = subprocess.run(print_time, env=children.environment(LD_PRELOAD=str(library)), capture_output=True, check=True)
  assert 3590 < float(ahead.stdout) - time.time() < 3610

  config = long_run(tmp_path, save=dict(every=2), log=dict(every=2))
  with Cluster(tmp_path, config, variables=lambda rank: {'LD_PRELOAD': str(library)} if rank == 1 else {}) as run:
    run.wait_for_steps(4)
    run.children[1].kill()
    assert run.ends_within(BEAT_S) == [1, -9]
    line, _ = run.error_line(0)
    assert re.search(f'process 1 on {HOST} .pid [0-9]+. is gone', line)
  rows = [r for r in metrics.read_rows(run.metrics) if r['split'] == 'train']
  times = {name: value for row in rows for name, value in row.items() if name.startswith('time/')}
  assert 'time/host_skew' in times and max(times.values()) < 600, times


@pytest.mark.long
@pytest.mark.parametrize('victim', [0, 1], ids=['coordinator', 'worker'])
def test_suspended_process_is_named_and_ends_the_others_in_time(victim, tmp_path):
  with Cluster(tmp_path, long_run(tmp_path)) as run:
    run.wait_for_steps()
    run.children[victim].send_signal(signal.SIGSTOP)
    codes = run.ends_within(BEAT_S, [1 - victim])
    assert codes == [1]
    line, text = run.error_line(1 - victim)
    assert re.search(f'process {victim} on {HOST} .pid [0-9]+. is gone', line)
    assert 'step' in line and 'Thread' in text  # the stacks of the threads


@pytest.mark.long
def test_process_stuck_in_python_ends_all_and_its_line_is_named(tmp_path):
  (tmp_path / 'maps.py').write_text(HANGING_MAP)
  rows = ''.join(f'{{"prompt": "{n}", "completion": "{n}"}}\n' for n in range(2000))
  (tmp_path / 'rows.jsonl').write_text(rows)
  with Cluster(
    tmp_path,
    long_run(tmp_path, data=dict(path=str(tmp_path / 'rows.jsonl'), streaming=True, map=f'{tmp_path}/maps.py:fix')),
  ) as run:
    run.wait_for_steps()
    run.hang.touch()
    assert run.ends_within(STEP_S + 3) == [1, 1]  # 3 s for the rows that were read ahead
    line, text = run.error_line(1)
    assert f'process 1 on {HOST}' in line and 'is stuck in step' in line
    assert 'maps.py:7 in fix' in text
    line, _ = run.error_line(0)  # whether process 0 still waits or process 1 has ended first
    assert f'process 1 on {HOST}' in line and 'maps.py:7 in fix' in line


@pytest.mark.long
@pytest.mark.parametrize('killable', [True, False])
def test_hanging_reward_ends_the_run(killable, tmp_path):
  """A reward in a worker is killed and `rewards.max_failed` ends the run; in the trainer, the watchdog ends it."""
  (tmp_path / 'rewards.py').write_text(HANGING_REWARD)
  config = long_run(
    tmp_path,
    algorithm='grpo',
    train=dict(row_length=0),
    rollout=dict(prompts=2, group_size=2),
    rewards=dict(timeout_s=3.0, max_failed=0.0, workers=1, env_vars=('HANG',)),
    reward=f'{tmp_path}/rewards.py:slow' if killable else 'length',
  )
  head = ('-m', 'launch.train') if killable else ('-c', LAUNCHER_WITH_REWARD, str(tmp_path / 'rewards.py'))
  with Cluster(tmp_path, config, head=head) as run:
    run.wait_for_steps(20 if killable else 3)
    run.hang.touch()
    if killable:
      assert run.ends_within(STEP_S) == [2, 2]
      for rank in (0, 1):
        assert 'reward slow: no answer in 3 s' in run.error_line(rank)[0]
      return
    assert run.ends_within(STEP_S) == [1, 1]
    line, text = run.error_line(1)
    assert f'process 1 on {HOST}' in line and 'is stuck in step' in line
    assert 'rewards.py:7 in slow' in line and 'in slow' in text
    line, _ = run.error_line(0)
    assert 'process 1 on' in line and 'rewards.py:7 in slow' in line


@pytest.mark.long
@pytest.mark.parametrize('absent', [0, 1])
def test_missing_host_is_named_and_ends_the_others_in_time(absent, tmp_path):
  begun = time.monotonic()
  with Cluster(tmp_path, long_run(tmp_path), ranks=[1 - absent], flags=['--init_timeout_s=6']) as run:
    # 15 s for the start of Python and JAX.
    assert run.ends_within(6 + 15, [0]) == [1]
    line, text = run.error_line(1 - absent)
    assert ('process 1 did not come to localhost' if absent else 'process 0 does not answer at localhost') in line
    assert 'within 6 s' in line and len(text.splitlines()) < 5, text
    assert time.monotonic() - begun > 6


# ---------------------------------- hosts that differ or are slow, without failing

LAUNCHER_WITH_DIFFERENT_REPLICA = '''
import sys
from absl import flags
import jax, numpy as np
from jaxpost import loop

resume = loop.resume

def bend(stage):
  """Process 1 goes on from one bit more in a norm scale that all share."""
  role = stage.roles.policy
  params = role.state.params
  norm = params['norm']
  if jax.process_index() == 1:
    local = np.asarray(norm.addressable_data(0)).copy()
    local.view(np.uint32)[3] ^= 1
    norm = jax.make_array_from_single_device_arrays(
        norm.shape, norm.sharding,
        [jax.device_put(local, jax.local_devices()[0])])
  role.state = role.state.replace(params={**params, 'norm': norm})
  return resume(stage)

loop.resume = bend
from launch import exits, train
exits.run(train.main)
'''
LAUNCHER_WITH_SLOW_DATA = """
import os, time
from absl import flags
from jaxpost.stage import assemble as assemble_lib

read = assemble_lib.DataStream.__next__

def slowly(self):
  time.sleep(1.0 if os.environ['RANK'] == '1' else 0.0)
  return read(self)

assemble_lib.DataStream.__next__ = slowly
from launch import exits, train
exits.run(train.main)
"""


@pytest.mark.long
def test_a_replica_that_differs_stops_all(tmp_path):
  with Cluster(tmp_path, long_run(tmp_path), head=('-c', LAUNCHER_WITH_DIFFERENT_REPLICA)) as run:
    assert run.ends_within(PATIENCE_S) == [1, 1]
    for rank in (0, 1):
      assert re.search(
        f'replicas of the parameters differ: norm on .* of process [01] on host {HOST}', run.stderr_of(rank)
      )
    assert not run.metrics.read_text()


@pytest.mark.long
def test_the_slow_host_is_named(tmp_path):
  with Cluster(
    tmp_path, long_run(tmp_path, train=dict(steps=12), log=dict(every=3)), head=('-c', LAUNCHER_WITH_SLOW_DATA)
  ) as run:
    assert run.ends_within(PATIENCE_S) == [0, 0], run.stderr_of(1)
    assert f'note: process 1 on {HOST} is the slowest' in (tmp_path / 'out0').read_text()
    rows = [r for r in metrics.read_rows(run.metrics) if r['split'] == 'train']
    logged = [r for r in rows if 'time/host_skew' in r]
    assert [r['step'] for r in logged] == [3, 6, 9, 12]
    assert all(r['time/slowest_process'] == 1 for r in logged[1:])
    assert logged[-1]['time/host_skew'] > 0.2
    hashes = [r['param_hash/policy'] for r in logged]
    assert len(set(hashes)) == 4  # parameters change between logged steps, and replicas agree


# Checksums of a checkpoint take 8 s: longer than the limit of a step, and than the wait for a failed peer.
LAUNCHER_WITH_SLOW_DISK = """
import time
from absl import flags
from jaxpost.storage import object_store

checksums = object_store.checksums

def slowly(*names):
  time.sleep(8)
  return checksums(*names)

object_store.checksums = slowly
from launch import exits, train
exits.run(train.main)
"""


@pytest.mark.ci
@pytest.mark.long
def test_stopped_run_finishes_a_checkpoint_slower_than_the_watchdog(tmp_path):
  config = long_run(tmp_path, save=dict(every=0), log=dict(watchdog_s=5))
  with Cluster(tmp_path, config, head=('-c', LAUNCHER_WITH_SLOW_DISK)) as run:
    run.wait_for_steps()
    run.children[1].send_signal(signal.SIGTERM)
    assert run.ends_within(2 * STEP_S) == [42, 42], run.stderr_of(0) + run.stderr_of(1)
    (step,) = finished_steps(tmp_path / 'run' / 'checkpoints' / 'sft')
    for rank in (0, 1):
      assert f'saved at step {step}' in run.error_line(rank)[0]


# A process that prints why it ends ("late") or not ("early"), and is then aborted as by JAX.
PROCESS_THAT_ABORTS = """
import os, sys
from jaxpost.distributed import peers, watchdog

peers.on_abort(lambda: 'another process is gone')
if sys.argv[1] == 'late':
  watchdog.print_reason('the data of process 1 are wrong', 2, sys.stderr)
os.abort()
"""


@pytest.mark.parametrize(
  'when, code, reason', [('late', 2, 'the data of process 1 are wrong'), ('early', 1, 'another process is gone')]
)
def test_only_the_first_reason_is_printed(when, code, reason):
  """An abort while a process already ends, which depends on timing, changes neither its error line nor its code."""
  done = subprocess.run([sys.executable, '-c', PROCESS_THAT_ABORTS, when], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == code
  assert [x for x in done.stderr.splitlines() if x.startswith('jaxpost: ')] == [f'jaxpost: {reason}']


def test_main_thread_counts_as_waiting_while_its_reading_thread_waits_for_another_process():
  """The code of the reading thread is compiled under the file name of a module in which jaxpost waits for peers."""
  namespace, begun, done = {}, threading.Event(), threading.Event()
  code = 'def wait(begun, event):\n  begun.set()\n  event.wait()'
  exec(compile(code, watchdog._WAITING[0], 'exec'), namespace)
  assert not watchdog.place()[1]
  thread = threading.Thread(target=namespace['wait'], args=(begun, done), daemon=True)
  thread.start()
  try:
    assert begun.wait(10)
    assert watchdog.place()[1]
  finally:
    done.set()
    thread.join()
  assert not watchdog.place()[1]
