"""Limits of a solution in sum: memory of all its processes, and nothing that lives on or is kept."""

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

from jaxpost.workers import sandbox, supervisor

CLONE = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='the sandbox needs Linux')
call_it = 'import ctypes, sys\nsys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x20000) != 0)'
namespaces = pytest.mark.skipif(
  sys.platform != 'linux' or subprocess.run([sys.executable, '-c', call_it]).returncode != 0,
  reason='this kernel or container allows no user namespaces',
)
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
# A child of a child in a session of its own, which appends to a file as long as it lives.
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

# Runs a program to which the modes of files apply also as root: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which
# the execve takes away.
OBEDIENT = """
import ctypes, os, sys
for power in (1, 2):
  ctypes.CDLL(None).prctl(24, power)
os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])
"""


@pytest.fixture(params=['group', 'watched'])
def counted(request, monkeypatch):
  """Memory in sum is limited in one of two ways."""
  if request.param == 'watched':
    monkeypatch.setattr(sandbox, '_CGROUPS', '/proc/none')
    assert 'is only watched' in sandbox.lacks(LIMITS)
  elif why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')


@pytest.mark.parametrize('limits', [pytest.param(LIMITS, marks=namespaces), INSECURE], ids=['isolated', 'insecure'])
def test_memory_is_limited_in_sum(counted, limits):
  """No process has more than 40 MB; 16 of them are refused 640, and three have 120."""
  few, many = CHILDREN.format(count=3, mb=25, seconds=0.3), CHILDREN.format(count=16, mb=40, seconds=30)
  assert sandbox.run_inputs(few, [''], limits) == ['held\n']
  assert sandbox.run_inputs(many, ['', ''], limits) == [None, None]
  assert sandbox.run_inputs(few, [''], limits) == ['held\n']
  assert sandbox.run_tests(f'{many}f = abs', ['assert f(1) == 1'], limits) == [False]


def test_files_in_memory_count():
  """A control group counts them; in the namespaces no program can make one (test_seccomp.py)."""
  if why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')
  program = 'import os\nfor i in range({count}): os.write(os.memfd_create("x"), bytes(20 << 20))\nprint("held")'
  found = [sandbox.run_inputs(program.format(count=count), [''], INSECURE) for count in (5, 20)]
  assert found == [['held\n'], [None]]


@namespaces
def test_what_processes_share_counts_once(monkeypatch):
  """60 processes that have inherited 60 MB hold 60 MB and not 3,600."""
  monkeypatch.setattr(sandbox, '_CGROUPS', '/proc/none')
  program = 'x = bytearray(60 << 20)\n' + CHILDREN.format(count=30, mb=0, seconds=0.3)
  assert sandbox.run_inputs(program, [''], LIMITS) == ['held\n']


@namespaces
def test_a_signal_to_process_1_does_not_end_the_jail():
  """A program of the same user can send it; as its failure would be the sandbox's, the sample would have no verdict."""
  program = 'import sys, time\nprint(input(), flush=True)\ntime.sleep(1)'
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    result = thread.submit(sandbox.run_inputs, program, ['6'], LIMITS)
    while not (inside := [pid for pid in supervisor.descendants(os.getpid()) if is_process_1(pid)]):
      assert not result.done()
      time.sleep(0.01)
    for sign in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1}:  # of ours, to end the program
      os.kill(inside[0], sign)
    assert result.result() == ['6\n']


def is_process_1(pid):
  """Returns whether a process is the first of its namespace, and has started a program."""
  try:
    status = pathlib.Path(f'/proc/{pid}/status').read_text()
    return '\t1\n' in status.partition('NSpid:')[2].partition('NSpgid')[0] and bool(supervisor.children(pid))
  except OSError:
    return False


def is_written(file):
  """Returns whether anything still appends to a file."""
  size = file.stat().st_size
  time.sleep(0.2)
  return file.stat().st_size > size


@pytest.mark.parametrize('then, printed', [('print(6)', '6\n'), ('time.sleep(100)', None), ('os.abort()', None)])
def test_a_session_of_its_own_does_not_outlive_the_program(tmp_path, then, printed):
  file = tmp_path / 'alive'
  limits = dataclasses.replace(INSECURE, timeout_s=60.0 if printed else 2.0)
  assert sandbox.run_inputs(SURVIVOR.format(file=str(file), then=then), [''], limits) == [printed]
  assert not file.exists() or not is_written(file)  # in two seconds a busy machine may not get so far


@pytest.mark.parametrize('sign', [signal.SIGKILL, signal.SIGTERM])
def test_a_session_of_its_own_does_not_outlive_the_owner(tmp_path, sign):
  file = tmp_path / 'alive'
  program = SURVIVOR.format(file=str(file), then='time.sleep(100)')
  code = f'from jaxpost.workers import sandbox as s\ns.run_inputs({program!r}, [""], s.{INSECURE!r})'
  owner = subprocess.Popen([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': str(CLONE)})
  while not file.exists():
    time.sleep(0.01)
    assert owner.poll() is None
  owner.send_signal(sign)
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
  shown = subprocess.run([sys.executable, '-c', OBEDIENT, run], env=environment, capture_output=True, text=True)
  assert shown.stdout == "['1\\n', '2\\n']\n", shown.stderr
  assert not list(tmp_path.iterdir())


def test_what_cannot_be_removed_keeps_nothing_else_and_no_link_is_followed(tmp_path, monkeypatch):
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
  left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*')}
  assert left == {'outside', 'job', 'job/a', 'job/a/b', 'job/a/b/kept', 'job/c', 'job/c/kept'}
  (tmp_path / 'link').symlink_to(outside)
  at = os.open(tmp_path, os.O_DIRECTORY)
  with pytest.raises(OSError):  # as where the program has put a link in the place of a folder that was listed
    sandbox._open_folder('link', at)
  os.close(at)
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


def test_no_group_is_left(tmp_path, monkeypatch):
  """Only the groups of this test count: other tests run beside it and have groups of their own."""
  if why := supervisor.why_no_cgroup(sandbox._CGROUPS):
    pytest.skip(f'no control group can be made here: {why}')
  parents = [parent for parent, _ in supervisor.candidates(pathlib.Path('/proc/self/cgroup').read_text(), ROOT)]
  started, popen = [], subprocess.Popen
  monkeypatch.setattr(sandbox.subprocess, 'Popen', lambda *a, **kw: started.append(popen(*a, **kw)) or started[-1])
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
def test_groups_are_looked_for_where_a_process_may_make_them(text, folders):
  assert [parent for parent, _ in supervisor.candidates(text, ROOT)] == [ROOT / folder for folder in folders]


KEEP = """
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


@namespaces
def test_nothing_is_kept_between_programs():
  assert sandbox.run_inputs(KEEP, ['', ''], LIMITS) == ['False\n', 'False\n']


def test_keys_of_the_session_are_not_shown():
  """Also without a filter of system calls."""
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
