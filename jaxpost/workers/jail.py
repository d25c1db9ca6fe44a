"""The inner side of the sandbox: isolates itself, runs the programs of a job, reports the results.

sandbox.py starts it as `python -m jaxpost.workers.jail`. It reads a JSON object, the job, from the first line of stdin
and writes one JSON object per line to stdout:

  {'ready': true} or {'setup': text}   isolated, or why isolation failed
  {'output': text or null}             for each input, in order
  {'answer': text or null}             for each line that is sent to a solution

For tests, more lines follow on stdin: null starts the solution in a new process, and a text is a line to send to it.
The test and its expected values stay with sandbox.py; this process only passes lines on, and parses none of the
solution's.

This process is trusted; it is process 1 of the namespaces. It starts a new interpreter for each program, drops all
privileges in it, filters its system calls, and kills every process that the program leaves behind. The programs cannot
write to the pipe to sandbox.py.
"""

import contextlib
import itertools
import json
import os
import pathlib
import platform
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from typing import BinaryIO, NoReturn

from jaxpost.workers import namespaces, seccomp, supervisor

WORK = '/sandbox'

# A program is executed as a script, with the builtins `exit` and `quit`, which an interpreter without `site` lacks.
_PROGRAM = """
def read():
  import builtins, sys
  builtins.exit = builtins.quit = sys.exit
  del sys.argv[0]
  globals()['__file__'] = sys.argv[0]
  with open(sys.argv[0], 'rb') as file:
    return compile(file.read(), sys.argv[0], 'exec')
exec((read(), globals().pop('read'))[0])
"""
# Read before the isolation, which hides the file.
_RUNNER = pathlib.Path(__file__).with_name('runner.py').read_text(encoding='utf-8')


def main() -> int:
  """Reads the job from stdin and runs it, isolated unless it is insecure; returns the exit code."""
  namespaces.die_with_parent()
  namespaces.new_keyring()
  # From its own namespace, process 1 gets only signals that it has a handler for. Python has one for SIGINT, with which
  # a program of the same user could end the jail, and its failure would look like one of the sandbox.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  requests = os.fdopen(os.dup(0), 'rb')
  job = json.loads(requests.readline())
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  try:
    if sys.platform != 'linux':
      run(job, requests)
      return 0
    if not job['insecure']:
      seccomp.program(platform.machine())  # made once, before the forks; an error if there is none
    # `namespaces.isolated` has two processes between the child and the one that starts the programs.
    return supervisor.supervise(
      lambda entrance: run_isolated({**job, 'entrance': entrance}, requests),
      limits_mb=(job['memory_mb'], job['disk_mb']),
      cgroups=job['cgroups'],
      below=0 if job['insecure'] else 2,
    )
  except OSError as error:
    namespaces.report({'setup': str(error)})
    return 1


def run_isolated(job: dict, requests: BinaryIO) -> int:
  """Runs the job in the child of the supervisor, isolated unless it is insecure; returns the exit code."""
  namespaces.die_with_parent()
  if not job['insecure']:
    return namespaces.isolated(lambda root: run(job, requests, root), job['binds'], WORK)
  namespaces.become_subreaper()
  run(job, requests)
  return 0


def run(job: dict, requests: BinaryIO, root: bool = False) -> None:
  """Runs every program of the job and reports; they share one deadline.

  Args:
    job: see `sandbox._Jail`.
    requests: the lines of stdin after the job.
    root: True if this process is root in its namespaces; programs then switch to NOBODY_ID.
  """
  signal.signal(signal.SIGUSR1, lambda *_: kill_programs(job['insecure']))  # sent if they hold too much memory
  namespaces.report({'ready': True})
  deadline = time.monotonic() + job['timeout_s']
  if job['inputs'] is not None:
    for number, text in enumerate(job['inputs']):
      in_time = time.monotonic() < deadline
      namespaces.report({'output': run_input(job, text, number, deadline, root) if in_time else None})
    return
  started = False
  for number in itertools.count():
    if not started and not requests.readline():
      return
    started = answer_lines(job, requests, number, deadline, root)


def run_input(job: dict, text: str, number: int, deadline: float, root: bool) -> str | None:
  """Runs the solution as a program on one input; returns its stdout, or None if it failed."""
  folder = new_folder(job, number)
  with open(f'{folder}/solution.py', 'w', encoding='utf-8') as file:
    file.write(job['solution'])
  os.chmod(f'{folder}/solution.py', 0o644)
  reads, writes = os.pipe()
  devnull = os.open(os.devnull, os.O_RDWR)
  pipes = {0: text_file(text, folder), 1: writes, 2: devnull}
  try:
    pid = start(job, ['-c', _PROGRAM, f'{folder}/solution.py'], pipes, folder, deadline, root=root)
    try:
      return read_output(pid, reads, job['output_bytes'], deadline)
    finally:
      end_programs(pid, job['insecure'])
  finally:
    os.close(reads)


def answer_lines(job: dict, requests: BinaryIO, number: int, deadline: float, root: bool) -> bool:
  """Starts the solution and passes lines to and from it; returns True if the solution is to be started again."""
  folder = new_folder(job, number)
  channel, program_channel = socket.socketpair()
  devnull = os.open(os.devnull, os.O_RDWR)
  pipes = {0: devnull, 1: devnull, 2: devnull, 3: program_channel.detach()}
  with channel:
    pid = start(job, ['-c', _RUNNER], pipes, folder, deadline, root=root)
    try:
      alive = send_line(channel, json.dumps(job['solution']), deadline)
      while line := requests.readline():
        request = json.loads(line)
        if request is None:
          return True
        answer = None
        if alive and (alive := send_line(channel, request, deadline)):
          answer = receive_line(channel, job['output_bytes'], deadline)
          alive = answer is not None
        namespaces.report({'answer': answer})
    finally:
      end_programs(pid, job['insecure'])
  return False


def start(job: dict, command: list[str], pipes: dict[int, int], folder: str, deadline: float, root: bool) -> int:
  """Starts a program in a new process, closes this side's copies of its descriptors, and returns its id."""
  failure = os.pipe()  # Carries an error of the child; a successful execve closes it.
  pid = os.fork()
  if not pid:
    exec_program(job=job, command=command, pipes=pipes, folder=folder, deadline=deadline, root=root, failure=failure[1])
  for pipe in {*pipes.values(), failure[1]}:
    os.close(pipe)
  with open(failure[0]) as file:
    if text := file.read():
      end_programs(pid, job['insecure'])
      raise OSError(text)
  return pid


def new_folder(job: dict, number: int) -> str:
  """Makes an empty working directory; inside the namespaces it replaces that of the previous program."""
  if job['insecure']:  # The previous program may have removed, replaced or closed this folder, or made others in it.
    if os.path.islink(job['folder']) or os.path.isfile(job['folder']):
      os.unlink(job['folder'])
    os.makedirs(job['folder'], exist_ok=True)
    os.chmod(job['folder'], 0o700)
    return tempfile.mkdtemp(dir=job['folder'])
  if number:
    namespaces.unmount(WORK)
  namespaces.mount_tmpfs(WORK, f'size={job["disk_mb"]}m,nr_inodes=4096,mode=777')
  return WORK


def text_file(text: str, folder: str) -> int:
  """Returns a descriptor of an unnamed file with this text, for stdin."""
  with tempfile.TemporaryFile(dir=folder) as file:
    file.write(text.encode(errors='replace'))
    file.seek(0)
    return os.dup(file.fileno())


def exec_program(
  job: dict, command: list[str], pipes: dict[int, int], folder: str, deadline: float, root: bool, failure: int
) -> NoReturn:
  """Drops all privileges of this forked process and replaces it with the program's interpreter.

  Args:
    command: arguments of the interpreter.
    pipes: {descriptor in the program: descriptor here}; all others are closed.
    failure: descriptor that receives the text of an error before execve.
  """
  try:
    os.setsid()
    namespaces.die_with_parent()
    os.chdir(folder)
    if job.get('entrance', -1) >= 0:
      os.write(job['entrance'], b'0')
    if not job['insecure']:
      namespaces.new_ipc()
    # Sources and targets may overlap: move all of them above 64 first, then down to their numbers.
    last = 1 + max(pipes)
    high = {k: os.dup2(v, 64 + k) for k, v in pipes.items()}
    os.dup2(failure, 64 + last)
    for number, pipe in high.items():
      os.dup2(pipe, number)
    failure = os.dup2(64 + last, last, inheritable=False)
    os.closerange(last + 1, 4096)
    set_limits(job, deadline)
    if root:  # Leaving uid 0 also clears the capabilities.
      nobody = namespaces.NOBODY_ID
      os.setgroups([])
      os.setresgid(nobody, nobody, nobody)
      os.setresuid(nobody, nobody, nobody)
    if not job['insecure']:
      namespaces.no_new_privileges()
      seccomp.install()
    # Not -I, which ignores PYTHONHASHSEED: the order of sets would differ between runs.
    os.execve(
      job['python'],
      [job['python'], '-sSP', *command],
      {
        'PATH': '/usr/local/bin:/usr/bin:/bin',
        'HOME': folder,
        'TMPDIR': folder,
        'LANG': 'C.UTF-8',
        'PYTHONHASHSEED': '0',
        'PYTHONDONTWRITEBYTECODE': '1',
        'OPENBLAS_NUM_THREADS': '1',
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(job['path']),
      },
    )
  except BaseException as error:  # A forked copy must never return into its caller's code.
    os.write(failure, namespaces.text_of(error).encode())
  finally:
    os._exit(1)


def set_limits(job: dict, deadline: float) -> None:
  """Sets the resource limits of this process, which its children inherit and cannot raise."""
  megabyte = 1 << 20
  limits = {
    resource.RLIMIT_CPU: int(deadline - time.monotonic()) + 1,
    resource.RLIMIT_AS: job['memory_mb'] * megabyte,
    resource.RLIMIT_FSIZE: job['disk_mb'] * megabyte,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
  }
  if not job['insecure']:  # Outside a user namespace the limit counts all processes of the user.
    limits[resource.RLIMIT_NPROC] = job['processes']
  for name, value in limits.items():
    resource.setrlimit(name, (value, value))


def send_line(channel: socket.socket, line: str, deadline: float) -> bool:
  """Sends a line; False if the other end has closed or does not read before the deadline."""
  try:
    channel.settimeout(max(deadline - time.monotonic(), 0.001))
    channel.sendall(line.encode() + b'\n')
    return True
  except (BrokenPipeError, ConnectionResetError, TimeoutError):
    return False


def receive_line(channel: socket.socket, limit: int, deadline: float) -> str | None:
  """Receives the answer to one line; None if there is none in time, it is too long, or more lines come with it."""
  data = bytearray()
  try:
    while not data.endswith(b'\n') and len(data) <= limit:
      channel.settimeout(max(deadline - time.monotonic(), 0.001))
      part = channel.recv(1 << 16)
      if not part:
        return None
      data += part
  except (ConnectionResetError, TimeoutError):
    return None
  return data.decode(errors='replace') if len(data) <= limit and data.count(b'\n') == 1 else None


def read_output(pid: int, pipe: int, limit: int, deadline: float) -> str | None:
  """Returns a program's stdout; None if it failed, took too long or printed more than `limit` bytes."""
  data = bytearray()
  is_open = True
  status = None  # exit status of the program; None while it runs
  while status is None or is_open:
    if status is None and time.monotonic() > deadline:
      return None
    if not is_open:
      time.sleep(0.002)
    elif select.select([pipe], [], [], 0 if status is not None else 0.005)[0]:
      part = os.read(pipe, 1 << 16)
      is_open = bool(part)
      data += part
      if len(data) > limit:
        return None
      continue
    elif status is not None:  # A child of the program still holds the pipe open.
      break
    if status is None:
      status = exit_status(pid)
  return data.decode(errors='replace') if status == 0 else None


def exit_status(pid: int) -> int | None:
  """Returns the exit status of a child, -1 after a signal, None while it runs; does not reap it."""
  result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  if result is None:
    return None
  return result.si_status if result.si_code == os.CLD_EXITED else -1


def kill_programs(insecure: bool) -> None:
  """Kills all programs that run.

  In the namespaces, kill(-1) reaches every process but this one. Elsewhere they are found as descendants.
  """
  for pid in supervisor.descendants(os.getpid()) if insecure else [-1]:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)


def end_programs(pid: int, insecure: bool) -> None:
  """Kills the program `pid` and all processes that it has started, and waits for them to end.

  On systems other than Linux only the process group of the program is killed.
  """
  if sys.platform == 'linux' and insecure:
    return supervisor.end_all()
  if insecure:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # Without processes, macOS raises PermissionError.
      os.killpg(pid, signal.SIGKILL)
  else:
    kill_programs(insecure)
  with contextlib.suppress(ChildProcessError):
    while True:
      os.waitpid(-1, 0)


if __name__ == '__main__':
  sys.exit(main())
