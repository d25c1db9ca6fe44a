"""The inside of the sandbox: isolates itself, runs programs, reports.

python -m jaxpost.rewards.jail; sandbox.py starts it. One JSON object on stdin
(see there), one JSON object a line on stdout:

  {'ready': true} or {'setup': text}            isolated, or why it is not
  {'passed': bool} or {'output': text or null}  per program, in order

Process 1 of the namespaces starts a fresh interpreter for each program and,
after it, ends whatever else is left. Programs have none of its capabilities.
"""

import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import tempfile
import time

from jaxpost.workers import namespaces

WORK = '/sandbox'

# What tests run in. The mark, which says that all passed, is not in the
# process before the solution has been executed.
_RUNNER = """
import json, os, sys, types
channel = open(3, 'rb', closefd=False)
solution = json.loads(channel.readline())
module = sys.modules['solution'] = types.ModuleType('solution')
exec(compile(solution, 'solution.py', 'exec'), module.__dict__)
os.write(3, b'+')
test, mark = json.loads(channel.readline())
before = dict(module.__dict__)
exec(compile(test, 'test.py', 'exec'), module.__dict__)
for name, value in list(module.__dict__.items()):
  if name.startswith('test') and callable(value):
    if before.get(name) is not value:
      value()
os.write(3, mark.encode())
os._exit(0)
"""


def main():
  namespaces.die_with_parent()
  job = json.load(sys.stdin)
  nothing = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nothing, 0)
  try:
    if job['insecure']:
      run(job)
      return 0
    return namespaces.isolated(lambda root: run(job, root), job['binds'], WORK)
  except OSError as error:
    namespaces.report({'setup': str(error)})
    return 1


def run(job, root=False):
  """Every program of the job, each with what is left of the time."""
  namespaces.report({'ready': True})
  deadline = time.monotonic() + job['timeout_s']
  tests = job['tests'] is not None
  for number, given in enumerate(job['tests'] if tests else job['inputs']):
    left = deadline - time.monotonic()
    result = None
    if left > 0:
      result = one(job, given, number, deadline, root)
    namespaces.report({'passed': bool(result)} if tests else {'output': result})


def one(job, given, number, deadline, root):
  """Whether the test passed; or what the program printed, None if it failed."""
  folder = new_folder(job, number)
  if job['tests'] is not None:
    ours, theirs = socket.socketpair()
    command = ['-c', _RUNNER]
    nothing = os.open(os.devnull, os.O_RDWR)
    pipes = {0: nothing, 1: nothing, 2: nothing, 3: theirs.detach()}
  else:
    with open(f'{folder}/solution.py', 'w', encoding='utf-8') as file:
      file.write(job['solution'])
    os.chmod(f'{folder}/solution.py', 0o644)
    command = [f'{folder}/solution.py']
    reads, writes = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    pipes = {0: text_file(given, folder), 1: writes, 2: nothing}
  failure = os.pipe()  # closed by a successful execve
  pid = os.fork()
  if not pid:
    become(job, command, pipes, folder, deadline, root, failure[1])
  for pipe in {*pipes.values(), failure[1]}:
    os.close(pipe)
  try:
    with open(failure[0]) as file:
      if text := file.read():
        raise OSError(text)
    if job['tests'] is not None:
      return passed(ours, job, given, deadline)
    return printed(pid, reads, job['output_bytes'], deadline)
  finally:
    end_all(pid, job['insecure'])
    if job['tests'] is not None:
      ours.close()
    else:
      os.close(reads)


def new_folder(job, number):
  """An empty working directory that only this program sees."""
  if job['insecure']:
    folder = f'{job["folder"]}/{number}'
    os.mkdir(folder)
    return folder
  if number:
    namespaces.unmount(WORK)
  namespaces.mount_tmpfs(WORK, f'size={job["disk_mb"]}m,nr_inodes=4096,mode=777')
  return WORK


def text_file(text, folder):
  with tempfile.TemporaryFile(dir=folder) as file:
    file.write(text.encode(errors='replace'))
    file.seek(0)
    return os.dup(file.fileno())


def become(job, command, pipes, folder, deadline, root, failure):
  """This process, a copy of ours, becomes the program's interpreter."""
  try:
    os.setsid()
    namespaces.die_with_parent()
    os.chdir(folder)
    last = 1 + max(pipes)
    high = {k: os.dup2(v, 64 + k) for k, v in pipes.items()}
    os.dup2(failure, 64 + last)
    for number, pipe in high.items():
      os.dup2(pipe, number)
    failure = os.dup2(64 + last, last, inheritable=False)
    os.closerange(last + 1, 4096)
    limit(job, deadline)
    if root:  # also takes the capabilities
      nobody = namespaces.NOBODY
      os.setgroups([])
      os.setresgid(nobody, nobody, nobody)
      os.setresuid(nobody, nobody, nobody)
    if not job['insecure']:
      namespaces.no_new_privileges()
    # No -I: it would ignore PYTHONHASHSEED, and then sets differ between runs.
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
  except BaseException as error:  # this copy of the process goes no further
    os.write(failure, namespaces.text_of(error).encode())
  finally:
    os._exit(1)


def limit(job, deadline):
  megabyte = 1 << 20
  limits = {
    resource.RLIMIT_CPU: int(deadline - time.monotonic()) + 1,
    resource.RLIMIT_AS: job['memory_mb'] * megabyte,
    resource.RLIMIT_FSIZE: job['disk_mb'] * megabyte,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
  }
  if not job['insecure']:  # outside it would count all of the user's
    limits[resource.RLIMIT_NPROC] = job['processes']
  for name, value in limits.items():
    resource.setrlimit(name, (value, value))


def passed(channel, job, test, deadline):
  """Whether solution and test ended with the mark."""
  mark = secrets.token_hex(16)
  try:
    say(channel, job['solution'], deadline)
    if hear(channel, 1, deadline) != b'+':
      return False
    say(channel, [test, mark], deadline)
    return hear(channel, len(mark), deadline) == mark.encode()
  except (BrokenPipeError, ConnectionResetError, TimeoutError):
    return False  # it ended or it hangs


def say(channel, line, deadline):
  channel.settimeout(max(deadline - time.monotonic(), 0.001))
  channel.sendall(json.dumps(line).encode() + b'\n')


def hear(channel, size, deadline):
  data = b''
  while len(data) < size:
    channel.settimeout(max(deadline - time.monotonic(), 0.001))
    part = channel.recv(size - len(data))
    if not part:
      break
    data += part
  return data


def printed(pid, pipe, limit, deadline):
  """Its output; None if it failed, took too long or printed too much."""
  data, open_, ended = b'', True, None
  while ended is None or open_:
    if ended is None and time.monotonic() > deadline:
      return None
    if not open_:
      time.sleep(0.002)
    elif select.select([pipe], [], [], 0 if ended is not None else 0.005)[0]:
      part = os.read(pipe, 1 << 16)
      open_, data = bool(part), data + part
      if len(data) > limit:
        return None
      continue
    elif ended is not None:  # a child of it still holds the pipe
      break
    if ended is None:
      ended = finished(pid)
  return data.decode(errors='replace') if ended == 0 else None


def finished(pid):
  """Its exit status once it has ended; leaves it to be reaped."""
  result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  if result is None:
    return None
  return result.si_status if result.si_code == os.CLD_EXITED else -1


def end_all(pid, insecure):
  """Kills the program and, inside, everything but this process 1."""
  try:
    if insecure:
      os.killpg(pid, signal.SIGKILL)
    else:
      os.kill(-1, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass  # nobody left; macOS says so by the second
  while True:
    try:
      os.waitpid(-1, 0)
    except ChildProcessError:
      return


if __name__ == '__main__':
  sys.exit(main())
