"""Trains with several processes on this machine, as on several hosts.

  python -m launch.local --processes=2 --devices=4 -- --config=... --workdir=...

Arguments after `--` go to `launch.train`. Runs on CPU unless JAX_PLATFORMS is set. Each line of output is marked with
its process. The exit code is the worst of the processes; if one fails, the others are ended after some seconds.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TextIO

from absl import flags

from jaxpost.errors import InputError

from . import exits

_PROCESSES = flags.DEFINE_integer('processes', 2, 'Number of processes.', lower_bound=1, upper_bound=64)
_DEVICES = flags.DEFINE_integer('devices', None, 'Simulated CPU devices per process.', lower_bound=1)
GRACE_S = 30.0  # for the other processes after one has failed


def start(arguments: list[str], rank: int) -> subprocess.Popen:
  """Starts `launch.train` as one of the processes."""
  env = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', **os.environ}
  if _DEVICES.value:
    env['XLA_FLAGS'] += f' --xla_force_host_platform_device_count={_DEVICES.value}'
  return subprocess.Popen(
    [sys.executable, '-u', '-m', f'{__package__}.train', *arguments, f'--process_id={rank}'],
    env=env,
    errors='backslashreplace',  # invalid UTF-8 would end the thread that reads it
    start_new_session=True,  # otherwise it would get Ctrl-C twice, from the terminal and from here
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def copy(rank: int, source: TextIO, target: TextIO):
  """Copies all lines, marked with their process, because a process blocks when its pipe is full."""
  for line in source:
    try:
      if not line.startswith('[Gloo] Rank'):  # printed about connections at each start
        print(f'[{rank}] {line}', end='', file=target, flush=True)
    except BrokenPipeError:  # as in `| head`: the run continues
      os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())


def main(argv):
  """Starts the processes and waits for all of them."""
  if not argv[1:]:
    raise InputError('nothing to start; write the flags of launch.train after --')
  running = []
  failed_at = 0.0  # time of the first failure
  for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
    signal.signal(number, lambda number, frame: [p.send_signal(number) for p in running])
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
  for rank in range(_PROCESSES.value):
    p = start([*argv[1:], f'--coordinator={address}', f'--num_processes={_PROCESSES.value}'], rank)
    running.append(p)
    for pair in (p.stdout, sys.stdout), (p.stderr, sys.stderr):
      threading.Thread(target=copy, args=(rank, *pair)).start()
  while any(p.poll() is None for p in running):
    if any(p.returncode for p in running):
      failed_at = failed_at or time.monotonic()
    for p in running if failed_at and time.monotonic() - failed_at > GRACE_S else ():
      p.kill()
    time.sleep(0.05)
  sys.exit(exits.worst([p.returncode for p in running]))


if __name__ == '__main__':
  exits.run(main, words=99)
