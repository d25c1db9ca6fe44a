"""The outermost process of a sandbox: bounds the total memory of its programs, and leaves none of them alive.

It forks the process that builds the sandbox, `jail`, and becomes the subreaper of everything below: a program that
makes a session of its own and loses its parent becomes a child of this process or of the jail, which kill it (prctl(2),
PR_SET_CHILD_SUBREAPER). SIGTERM, which also comes when the process that uses the sandbox dies, ends all of them.

The proportional set sizes of the programs are added up every `_TICK_S` seconds, and beyond the limit all of them are
killed. A control group, where one can be made (cgroups(7)), also bounds what they allocate within a tick, files in
memory, and the buffers of pipes and sockets. Linux only.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator

from jaxpost.workers import namespaces

_TICK_S = 0.02
_MB = 1 << 20
_PAGE = os.sysconf('SC_PAGE_SIZE')
_WATCH = {signal.SIGTERM, signal.SIGCHLD}
# Files with the limit of memory and with that of swap, and the latter's value; '': it includes memory, and is the same
_LIMITS = (
  ('memory.max', 'memory.swap.max', '0'),  # version 2
  ('memory.limit_in_bytes', 'memory.memsw.limit_in_bytes', ''),  # version 1
)


class Cgroup:
  """A new control group that limits the memory of the processes in it; OSError if none can be made.

  Attributes:
    entrance: descriptor of the file that a process writes '0' to in order to enter.
  """

  def __init__(self, memory_mb: int, root: str) -> None:
    errors = []
    groups = pathlib.Path('/proc/self/cgroup').read_text()
    for parent, (limit, swap, max_swap) in candidates(groups, pathlib.Path(root)):
      self._folder = parent / f'jaxpost-{os.getpid()}'
      try:
        self._folder.mkdir(exist_ok=True)
        (self._folder / limit).write_text(str(memory_mb * _MB))
        if (self._folder / swap).exists():
          (self._folder / swap).write_text(max_swap or str(memory_mb * _MB))
        self.entrance = os.open(self._folder / 'cgroup.procs', os.O_WRONLY)
        return
      except OSError as error:
        errors.append(f'{error.filename}: {error.strerror}')
        with contextlib.suppress(OSError):
          self._folder.rmdir()
    raise OSError('; '.join(errors) or 'this system has none')

  def remove_stale(self) -> None:
    """Removes empty groups beside this one that processes have left behind."""
    for folder in self._folder.parent.glob('jaxpost-*'):
      if not os.path.exists(f'/proc/{folder.name.rpartition("-")[2]}'):
        with contextlib.suppress(OSError):
          folder.rmdir()

  def remove(self) -> None:
    """Removes the group, which must be empty; a process that has just ended may still be in it."""
    os.close(self.entrance)
    for _ in range(100):
      with contextlib.suppress(OSError):
        return self._folder.rmdir()
      time.sleep(0.01)


def candidates(text: str, root: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[str, str, str]]]:
  """Yields folders in which a group with a memory limit may be made, and its entry of `_LIMITS`.

  In version 2 a group with processes has no limited groups below it, but those beside it may be limited.

  Args:
    text: the text of /proc/self/cgroup.
    root: where the groups are mounted.
  """
  for line in text.splitlines():
    number, controllers, path = line.split(':', 2)
    path = path.lstrip('/')
    if 'memory' in controllers.split(','):
      yield root / 'memory' / path, _LIMITS[1]
    elif number == '0':
      yield root / path, _LIMITS[0]
      if path:
        yield (root / path).parent, _LIMITS[0]


def why_no_cgroup(root: str) -> str:
  """Returns why no control group can be made here, '' if one can; removes those whose owner was killed."""
  try:
    group = Cgroup(64, root)
    group.remove_stale()
    group.remove()
  except OSError as error:
    return str(error)
  return ''


def supervise(run: Callable[[int], int], limits_mb: tuple[int, int], cgroups: str, below: int) -> int:
  """Runs the jail in a child process; returns its exit code after everything below has ended.

  Args:
    run: run(descriptor) of the jail; programs enter the control group by the descriptor, which is -1 without a group.
    limits_mb: limits of the memory of all programs, and of their files in memory; the group counts both.
    cgroups: where control groups are mounted.
    below: how many processes are between the child and the one that starts the programs, each with one child.
  """
  namespaces.die_with_parent(signal.SIGTERM)
  namespaces.become_subreaper()
  try:
    group = Cgroup(sum(limits_mb), cgroups)
  except OSError:
    group = None
  signal.pthread_sigmask(signal.SIG_BLOCK, _WATCH)
  child = os.fork()
  if not child:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCH)
    namespaces.exit_with(lambda: run(group.entrance if group else -1))
  try:
    return _wait(child, limits_mb[0] * _MB, below)
  finally:
    end_all()
    if group:
      group.remove()


def _wait(child: int, limit: int, below: int) -> int:
  """Waits for the child or SIGTERM and watches the memory of the programs; returns an exit code."""
  while True:
    received = signal.sigtimedwait(_WATCH, _TICK_S)
    if received and received.si_signo == signal.SIGTERM:
      return 1
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
      return os.waitstatus_to_exitcode(status) & 255
    starter = child
    for _ in range(below):
      starter = next(iter(children(starter)), 0)
    if starter and memory(descendants(starter), limit) > limit:
      os.kill(starter, signal.SIGUSR1)  # jail.py then kills its programs.


def children(pid: int) -> list[int]:
  """Returns the ids of the child processes."""
  pids: list[int] = []
  with contextlib.suppress(OSError):  # The process may end meanwhile.
    for task in os.listdir(f'/proc/{pid}/task'):
      pids += map(int, pathlib.Path(f'/proc/{pid}/task/{task}/children').read_text().split())
  return pids


def descendants(pid: int) -> list[int]:
  """Returns the ids of all processes below this one."""
  pids = children(pid)
  for child in pids:  # grows meanwhile
    pids += children(child)
  return pids


def memory(pids: list[int], limit: int) -> int:
  """Returns the bytes of memory of processes; shared pages count once if the sum would be beyond the limit."""
  resident = 0
  for pid in pids:
    with contextlib.suppress(OSError):
      resident += int(pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]) * _PAGE
  return sum(map(_proportional, pids)) if resident > limit else resident


def _proportional(pid: int) -> int:
  """Returns the proportional set size of a process in bytes, 0 once it has ended."""
  try:
    text = pathlib.Path(f'/proc/{pid}/smaps_rollup').read_text()
  except OSError:
    return 0
  return 1024 * next((int(line.split()[1]) for line in text.splitlines() if line.startswith('Pss:')), 0)


def end_all() -> None:
  """Kills everything below this process, which must be a subreaper, and waits until nothing is left."""
  while True:
    for pid in descendants(os.getpid()):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      return
    time.sleep(0.001)
