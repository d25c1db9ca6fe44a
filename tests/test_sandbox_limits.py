"""Limits of `workers.sandbox` on a program in total: memory of all its processes, no survivors, nothing kept."""

import concurrent.futures
import ctypes
import dataclasses
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

import pytest
from sandboxes import needs_namespaces

from jaxpost.workers import sandbox, supervisor

CLONE = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='the sandbox needs Linux')
LIMITS = sandbox.SandboxLimits(timeout_s=60.0, memory_mb=128)  # Python starts slowly on a busy machine
INSECURE = dataclasses.replace(LIMITS, insecure=True)

CHILDREN = """
import os, time
ends = os.pipe()
for i in range({count}):
  if not os.fork():
    x = bytearray({mb} << 20)
    os.write(ends[1], b'+')
    time.sleep(100)
got = b''
while len(got) < {count}:
  got += os.read(ends[0], 100)
time.sleep({seconds})
print('held')
"""
# Starts a grandchild in a new session, which appends to a file as long as it lives.
SURVIVOR = """
import os, sys, time
if not os.fork():
  os.setsid()
  if not os.fork():
    for i in range(10_000):
      open({file!r}, 'a').write('.')
      time.sleep(0.01)
  os._exit(0)
while not os.path.exists({file!r}): time.sleep(0.01)
{then}
"""

# Runs a program that must respect the modes of files even as root: the execve takes away CAP_DAC_OVERRIDE and
# CAP_DAC_READ_SEARCH.
AS_NON_ROOT = """
import ctypes, os, sys
for power in (1, 2):
  ctypes.CDLL(None).prctl(24, power)
os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])
"""


@pytest.fixture(params=['group', 'watched'])
def counted(request, monkeypatch):
  """The two ways of limiting memory in sum: a control group, or a supervisor that watches the processes."""
  if request.param == 'watched':
    monkeypatch.setattr(sandbox, '_CGROUPS', '/proc/none')
    assert 'is only watched' in sandbox.lacks(LIMITS)
  elif why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')


@pytest.mark.parametrize(
  'limits', [pytest.param(LIMITS, marks=needs_namespaces), INSECURE], ids=['isolated', 'insecure']
)
def test_memory_is_limited_in_sum(counted, limits):
  """No process allocates more than 40 MB: three fit in the limit of 128 MB, and 16 with 640 MB in sum do not."""
  few, many = CHILDREN.format(count=3, mb=25, seconds=0.3), CHILDREN.format(count=16, mb=40, seconds=30)
  assert sandbox.run_inputs(few, [''], limits) == ['held\n']
  assert sandbox.run_inputs(many, ['', ''], limits) == [None, None]
  assert sandbox.run_inputs(few, [''], limits) == ['held\n']
  assert sandbox.run_tests(f'{many}f = abs', ['assert f(1) == 1'], limits) == [False]


def test_files_in_memory_count_towards_the_limit():
  """A control group counts files in memory; an isolated program cannot create any (test_seccomp.py)."""
  if why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')
  program = 'import os\nfor i in range({count}): os.write(os.memfd_create("x"), bytes(20 << 20))\nprint("held")'
  outputs = [sandbox.run_inputs(program.format(count=count), [''], INSECURE) for count in (5, 20)]
  assert outputs == [['held\n'], [None]]


@needs_namespaces
def test_memory_shared_by_processes_counts_once(monkeypatch):
  """30 child processes that inherit 60 MB hold 60 MB in sum and not 1,800 MB."""
  monkeypatch.setattr(sandbox, '_CGROUPS', '/proc/none')
  program = 'x = bytearray(60 << 20)\n' + CHILDREN.format(count=30, mb=0, seconds=0.3)
  assert sandbox.run_inputs(program, [''], LIMITS) == ['held\n']


@needs_namespaces
def test_a_signal_to_process_1_does_not_end_the_jail():
  """A program of the same user can send signals; an end of process 1 would leave the sample without a verdict."""
  program = 'import sys, time\nprint(input(), flush=True)\ntime.sleep(1)'
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    result = thread.submit(sandbox.run_inputs, program, ['6'], LIMITS)
    while not (inside := [pid for pid in supervisor.descendants(os.getpid()) if is_process_1(pid)]):
      assert not result.done()
      time.sleep(0.01)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1}:  # SIGUSR1 ends the program
      os.kill(inside[0], number)
    assert result.result() == ['6\n']


def is_process_1(pid):
  """Returns whether a process is process 1 of a namespace and has started a program."""
  try:
    status = pathlib.Path(f'/proc/{pid}/status').read_text()
    return '\t1\n' in status.partition('NSpid:')[2].partition('NSpgid')[0] and bool(supervisor.children(pid))
  except OSError:
    return False


def is_written(file):
  """Returns whether a process still appends to a file."""
  size = file.stat().st_size
  time.sleep(0.2)
  return file.stat().st_size > size


@pytest.mark.parametrize('then, printed', [('print(6)', '6\n'), ('time.sleep(100)', None), ('os.abort()', None)])
def test_process_in_another_session_does_not_outlive_the_program(tmp_path, then, printed):
  file = tmp_path / 'alive'
  limits = dataclasses.replace(INSECURE, timeout_s=60.0 if printed else 2.0)
  assert sandbox.run_inputs(SURVIVOR.format(file=str(file), then=then), [''], limits) == [printed]
  assert not file.exists() or not is_written(file)  # on a busy machine, the program may not start within two seconds


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_process_in_another_session_does_not_outlive_the_owner(tmp_path, number):
  file = tmp_path / 'alive'
  program = SURVIVOR.format(file=str(file), then='time.sleep(100)')
  code = f'from jaxpost.workers import sandbox as s\ns.run_inputs({program!r}, [""], s.{INSECURE!r})'
  owner = subprocess.Popen([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': str(CLONE)})
  while not file.exists():
    time.sleep(0.01)
    assert owner.poll() is None
  owner.send_signal(number)
  owner.wait()
  deadline = time.monotonic() + 60
  while is_written(file):
    assert time.monotonic() < deadline


@pytest.mark.parametrize(
  'acts',
  [
    'for _ in range(1100):\n  os.mkdir("d")\n  os.chdir("d")',
    'os.makedirs("a/b")\nopen("a/b/c", "w").close()\nos.symlink("/", "a/l")\nos.chmod("a/b", 0)\nos.chmod("..", 0)',
    'import shutil\nshutil.rmtree(os.path.dirname(os.getcwd()))',
    'for i in range(5): os.makedirs(f"../{i}", exist_ok=True)',
    'import shutil\nhere = os.path.dirname(os.getcwd())\nshutil.rmtree(here)\nos.symlink("/proc", here)',
  ],
  ids=['deep', 'closed', 'removed', 'planted', 'linked'],
)
def test_a_program_without_isolation_cannot_keep_its_folder_or_fail_the_next(tmp_path, acts):
  program = (
    f'import os\nwhich = input()\nprint(which)\nif which == "2": os._exit(print(end="", flush=True) or 0)\n{acts}'
  )
  run = f'from jaxpost.workers import sandbox as s\nprint(s.run_inputs({program!r}, ["1", "2"], s.{INSECURE!r}))'
  environment = {**os.environ, 'PYTHONPATH': str(CLONE), 'TMPDIR': str(tmp_path)}
  done = subprocess.run([sys.executable, '-c', AS_NON_ROOT, run], env=environment, capture_output=True, text=True)
  assert done.stdout == "['1\\n', '2\\n']\n", done.stderr
  assert not list(tmp_path.iterdir())


def test_removal_skips_files_it_cannot_remove_and_follows_no_link(tmp_path, monkeypatch):
  unlink = os.unlink

  def refuse(path, **options):
    if path == 'kept':
      raise PermissionError
    unlink(path, **options)

  outside = tmp_path / 'outside'
  outside.mkdir(mode=0o500)
  for name in ('a/b', 'c'):
    (tmp_path / 'job' / name).mkdir(parents=True)
    for file in ('kept', 'file'):
      (tmp_path / 'job' / name / file).touch()
  (tmp_path / 'job/link').symlink_to(outside)
  monkeypatch.setattr(os, 'unlink', refuse)
  sandbox._remove(str(tmp_path / 'job'))
  remaining = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*')}
  assert remaining == {'outside', 'job', 'job/a', 'job/a/b', 'job/a/b/kept', 'job/c', 'job/c/kept'}
  (tmp_path / 'link').symlink_to(outside)
  folder_fd = os.open(tmp_path, os.O_DIRECTORY)
  with pytest.raises(OSError):  # as if the program had replaced a listed folder by a link
    sandbox._open_folder('link', folder_fd)
  os.close(folder_fd)
  assert outside.stat().st_mode & 0o777 == 0o500
  links = (pathlib.Path('/proc/self/fd') / number for number in os.listdir('/proc/self/fd'))
  assert not [link for link in links if link.is_symlink() and str(tmp_path) in os.readlink(link)]


def test_a_group_whose_owner_was_killed_is_removed_and_others_are_not():
  if why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')
  group = supervisor.Cgroup(64, sandbox._CGROUPS)
  ended = subprocess.Popen(['true'])
  ended.wait()
  stale = group._folder.with_name(f'jaxpost-{ended.pid}')
  stale.mkdir()
  try:
    group.remove_stale()
    assert not stale.exists() and group._folder.exists()
  finally:
    group.remove()


def test_sandbox_leaves_no_control_group(tmp_path, monkeypatch):
  """Only the groups of this test are looked for, because tests that run at the same time have their own groups."""
  if why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')
  parents = [parent for parent, _ in supervisor.candidates(pathlib.Path('/proc/self/cgroup').read_text(), ROOT)]
  started, popen = [], subprocess.Popen

  def recorded_popen(*args, **options):
    started.append(popen(*args, **options))
    return started[-1]

  monkeypatch.setattr(sandbox.subprocess, 'Popen', recorded_popen)
  program = SURVIVOR.format(file=str(tmp_path / 'alive'), then='print(6)')
  assert sandbox.run_inputs(program, ['', ''], INSECURE) == ['6\n', '6\n']
  assert len(started) == 1
  assert not [parent for parent in parents if (parent / f'jaxpost-{started[0].pid}').exists()]


ROOT = pathlib.Path('/sys/fs/cgroup')


@pytest.mark.parametrize(
  'text, folders',
  [
    ('0::/user.slice/run.scope\n', ['user.slice/run.scope', 'user.slice']),
    ('0::/\n', ['']),
    ('9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n', ['memory/job/7', '']),
    ('', []),
  ],
)
def test_candidates_are_folders_where_a_process_may_make_control_groups(text, folders):
  assert [parent for parent, _ in supervisor.candidates(text, ROOT)] == [ROOT / folder for folder in folders]


KEEPER = """
import os, socket
paths = '/tmp/kept', '/dev/shm/kept', 'kept'
found = [os.path.exists(path) for path in paths]
for path in paths: open(path, 'w').close()
s = socket.socket(socket.AF_UNIX)
try: s.bind(b'\\0kept')
except OSError: found.append(True)
if not os.fork():
  os.setsid()
  s.listen()
  while True: s.accept()
print(any(found))
"""


@needs_namespaces
def test_nothing_is_kept_between_programs():
  assert sandbox.run_inputs(KEEPER, ['', ''], LIMITS) == ['False\n', 'False\n']


def test_keys_of_the_session_keyring_are_hidden():
  """Keys are hidden even without a filter of system calls."""
  number = {'x86_64': (248, 250), 'aarch64': (217, 219)}.get(platform.machine())
  libc = ctypes.CDLL(None, use_errno=True)
  key = libc.syscall(number[0], b'user', b'canary', b'value', 5, -3) if number else -1
  if key < 0:
    pytest.skip('this system has no keyrings')
  program = f'import ctypes\nprint(ctypes.CDLL(None).syscall({number[1]}, 10, -3, b"user", b"canary", 0))'
  try:
    assert libc.syscall(number[1], 10, -3, b'user', b'canary', 0) > 0
    assert sandbox.run_inputs(program, [''], INSECURE) == ['-1\n']
  finally:
    libc.syscall(number[1], 9, key, -3)  # KEYCTL_UNLINK
