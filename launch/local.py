"""Trains with several processes on this machine, as several hosts would.

  python -m launch.local --processes=2 --devices=4 -- --config=... --workdir=...

What stands behind `--` goes to `launch.train`. On CPU unless JAX_PLATFORMS
says otherwise. Lines are marked with the process they are of. The exit code is
the worst of theirs; when one fails, the others get some seconds to follow.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from absl import flags

from jaxpost.errors import InputError

_PROCESSES = flags.DEFINE_integer('processes', 2, 'How many.', lower_bound=1, upper_bound=64)
_DEVICES = flags.DEFINE_integer('devices', None, 'CPU devices that each pretends to have.', lower_bound=1)
GRACE_S = 30.0  # for the others, once one has failed


def start(arguments, rank) -> subprocess.Popen:
  env = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', **os.environ}
  if _DEVICES.value:
    env['XLA_FLAGS'] += f' --xla_force_host_platform_device_count={_DEVICES.value}'
  # In a session of its own: Ctrl-C reaches it once, from here.
  return subprocess.Popen(
    [sys.executable, '-u', '-m', f'{__package__}.train', *arguments, f'--process_id={rank}'],
    env=env,
    text=True,
    start_new_session=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def copy(rank, source, target):
  for line in source:
    print(f'[{rank}] {line}', end='', file=target, flush=True)


def worst(codes) -> int:
  """2 and 3 need a person; 42 only where nothing else went wrong."""
  others = [1] * any(code not in (0, 2, 3, 42) for code in codes)
  return next(c for c in (2, 3, *others, 42, 0) if c in (*codes, *others))


def main(argv):
  if not argv[1:]:
    raise InputError("nothing to start; write launch.train's flags behind --")
  running, failed = [], 0.0
  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda number, frame: [p.send_signal(number) for p in running])
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
  for rank in range(_PROCESSES.value):
    running.append(start([*argv[1:], f'--coordinator={address}', f'--num_processes={_PROCESSES.value}'], rank))
    p = running[-1]
    for pair in (p.stdout, sys.stdout), (p.stderr, sys.stderr):
      threading.Thread(target=copy, args=(rank, *pair)).start()
  while any(p.poll() is None for p in running):
    if any(p.returncode for p in running):
      failed = failed or time.monotonic()
    for p in running if failed and time.monotonic() - failed > GRACE_S else ():
      p.kill()
    time.sleep(0.05)
  sys.exit(worst([p.returncode for p in running]))


if __name__ == '__main__':
  from . import exits

  exits.run(main, words=99)
