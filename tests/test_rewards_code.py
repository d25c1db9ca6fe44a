"""The reward `code` and its sandbox: rewards of a model's programs, cheating and hostile programs, and isolation."""

import ctypes
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from sandboxes import ALLOWED, WHY_NOT, needs_namespaces

from jaxpost.errors import InputError
from jaxpost.rewards import code
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.workers import call, sandbox

CLONE = pathlib.Path(__file__).resolve().parents[1]


LIMITS = sandbox.SandboxLimits(timeout_s=10.0, memory_mb=256)
RIGHT = 'def add(a, b):\n  return a + b'
WRONG = 'def add(a, b):\n  return a - b'
TESTS = ['assert add(1, 2) == 3', 'assert add(0, 0) == 0']


def fenced(program, language='python'):
  return f'So:\n```{language}\n{program}\n```\nDone.'


@pytest.fixture(scope='module')
def reward():
  if not ALLOWED:
    pytest.skip(WHY_NOT)
  return code.Code(timeout=10.0, memory_mb=256)


# ------------------------------------------------------------------- scoring


@pytest.mark.parametrize(
  'text, program',
  [
    ('', ''),
    ('no code', ''),
    ('```python\na\n```\n```py\nb\nc\n```', 'b\nc'),
    ('```python\na\n```\n```\noutput\n```', 'a'),
    ('```\na\n```', 'a'),
    ('```python title="a.py"\na\n```', 'a'),
    ('```bash\nls\n```', ''),
    ('```python\na\n```\n```json\n{}\n```', 'a'),
    ('  ```Python\n  a\n  ```', '  a'),
    ('~~~python\na = """\n```\n"""\n~~~', 'a = """\n```\n"""'),
    ('````python\n```\nx\n```\n````', '```\nx\n```'),
    ('```python\nnot closed', 'not closed'),
    ('text ```python inline``` text', ''),
  ],
)
def test_last_python_block_of_a_completion_is_the_program(text, program):
  assert code.last_block(text) == program


@pytest.mark.parametrize(
  'text, reward_of_all, share',
  [
    (fenced(RIGHT), 1.0, 1.0),
    (fenced(WRONG), 0.0, 0.5),
    (fenced('def add(a, b)'), 0.0, 0.0),
    (fenced(RIGHT + '\ns = "\u00e4\U0001f600"'), 1.0, 1.0),
    (fenced('\ud800'), 0.0, 0.0),
    (fenced('x = "\0"'), 0.0, 0.0),
    (RIGHT, 0.0, 0.0),
    ('', 0.0, 0.0),
  ],
)
def test_code_scores_all_tests_or_their_share(reward, text, reward_of_all, share):
  shares = code.Code(timeout=10.0, memory_mb=256, share=True)
  for completion in (text, [{'role': 'assistant', 'content': text}]):
    assert reward([completion], tests=[TESTS]) == [reward_of_all]
    assert shares([completion], tests=[TESTS]) == [share]


def test_columns_of_tests_setup_code_and_imports(reward):
  text = fenced(RIGHT)
  one = 'assert add(1, 2) == 3\n\ndef test_more():\n  assert add(2, 2) == 4'
  assert reward([text], tests=[one]) == [1]
  # A test function that is only defined must not pass: it has to be run.
  never = 'def test_it():\n  assert add(1, 1) == 3'
  assert reward([text], tests=[never]) == [0]
  needs = ['assert math.isclose(add(1, two), 3)']
  assert reward([text], test_list=[needs], test_imports=[['import math']], test_setup_code=['two = 2']) == [1]
  assert reward([text], test_list=[needs]) == [0]
  # Rows of two files may each have one of the columns.
  assert reward([text] * 2, tests=[None, one], test_list=[TESTS, None]) == [1, 1]
  for bad in (None, [], '', [' '], [3], {'a': 1}):
    assert reward([text], tests=[bad]) == [None]
  assert reward([text], inputs=[['1']], outputs=[[]]) == [None]
  assert code.Code(fenced=False)([RIGHT], tests=[TESTS]) == [1]


def test_programs_are_scored_by_their_outputs_for_inputs(reward):
  columns = dict(inputs=[['1 2\n', '3 4\n']], outputs=[['3', '7\n']])
  right = 'a, b = map(int, input().split())\nprint(a + b, " \\n")'
  for program, expected in (
    (right, 1),
    ('print(3)', 0),
    (right + '\nraise SystemExit(1)', 0),
    ('if __name__ == "__main__":\n  ' + right.replace('\n', '\n  '), 1),
  ):
    assert reward([fenced(program)], **columns) == [expected]
  shares = code.Code(timeout=10.0, share=True)
  assert shares([fenced('print(3)')], **columns) == [0.5]
  echo = fenced('print(open(0, encoding="utf-8").read())')
  assert reward([echo], inputs=[['\u00e4\U0001f600']], outputs=[['\u00e4\U0001f600']]) == [1]


@needs_namespaces
def test_code_reward_in_a_pool():
  with RewardPool('code?timeout=4&share=true', timeout_s=30.0) as pool:
    with pytest.raises(InputError, match="'tests' or 'test_list' or 'inputs'"):
      pool.check(['answer'])
    pool.check(['test_list'])
    chat = [[{'role': 'assistant', 'content': fenced(t)}] for t in (RIGHT, WRONG, 'while True: pass')]
    columns = {'test_list': [TESTS] * 3}
    (graded,) = pool.grade([Group(['p'] * 3, chat, [[1]] * 3, columns)])
    assert graded.rewards == [1.0, 0.5, 0.0] and graded.error is None


@needs_namespaces
def test_timeout_that_would_kill_the_worker_is_refused():
  """Programs must reach their own limit first: it scores 0, whereas a killed worker masks the samples."""
  group = Group(['p'] * 9, [fenced(RIGHT)] * 9, [[1]] * 9, {'test_list': [TESTS] * 9})
  with RewardPool('code?timeout=4', timeout_s=10.0) as pool:
    with pytest.raises(InputError, match='may take 12 s, more than config.rew'):
      pool.grade([group])


# ------------------------------------------------------------------- cheating

CHEATS = {
  'exit': 'import sys\nsys.exit(0)',
  'os exit': 'import os\nos._exit(0)',
  'exit in the test': 'import os\nadd = lambda a, b: os._exit(0)',
  'prints': 'print("passed", "OK", "True")\nraise SystemExit',
  'every channel': (
    'import os\nfor i in range(64):\n  try: os.write(i, b"+" * 99)\n  except OSError: pass\nos._exit(0)'
  ),
  'exit function': 'import atexit\natexit.register(print, "passed")',
  'thread': (
    'import os, time\nfrom threading import Timer\nTimer(0.1, os._exit, [0]).start()\ndef add(a, b): time.sleep(1)'
  ),
  'signal': 'import os\nos.kill(os.getpid(), 9)',
  'stop': 'import os\nos.kill(os.getpid(), 19)',
}


@needs_namespaces
@pytest.mark.parametrize('cheat', CHEATS)
def test_cheating_programs_pass_no_test(cheat):
  limits = sandbox.SandboxLimits(timeout_s=2.0)
  assert sandbox.run_tests(CHEATS[cheat], TESTS, limits) == [False, False]


@needs_namespaces
def test_sandbox_holds_neither_expected_outputs_nor_files_of_earlier_runs():
  """A program sees only its own source file."""
  look = 'import gc, os, sys\nprint(sorted(os.listdir()), os.environ)'
  (shown,) = sandbox.run_inputs(look, ['in'], LIMITS)
  assert "['solution.py']" in shown
  leave = 'import os\nprint(sorted(os.listdir()))\nopen("left", "w")'
  assert sandbox.run_inputs(leave, ['', ''], LIMITS) == ["['solution.py']\n"] * 2


# ------------------------------------------------------------------ hostility

HOSTILE = {
  'loop': 'while True: pass',
  'deaf loop': (
    'import signal\nfor s in range(1, 32):\n'
    '  try: signal.signal(s, signal.SIG_IGN)\n'
    '  except OSError: pass\nwhile True: pass'
  ),
  'fork bomb': 'import os\nwhile True:\n  try: os.fork()\n  except: pass',
  '100 MB': 'for _ in range(100): print("x" * 1_000_000)',
  'endless print': 'while True: print("x" * 1_000_000)',
  'memory': 'x = []\nwhile True: x.append(bytearray(10**7))',
  'disk': 'f = open("x", "wb")\nwhile True: f.write(bytes(10**6))',
  'files': 'for i in range(10**6): open(str(i), "w").close()',
  'recursion': 'def f(): f()\nf()',
  'kills all': 'import os\nos.kill(-1, 9)\nos.kill(1, 9)',
  'crash': 'import ctypes\nctypes.string_at(0)',
  'daemon': (
    'import os, time\nif os.fork() == 0:\n  os.setsid()\n'
    '  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)\n'
    'time.sleep(1000)'
  ),
}


@pytest.fixture(scope='module', autouse=True)
def subreaper():
  """Makes orphans of this process its children, which tells them from those of another pytest worker."""
  if sys.platform == 'linux':
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(set_child_subreaper, 0, 0, 0, 0) == 0
  else:
    yield


def jails():
  """Returns (pid, arguments) of the living sandbox processes that descend from this process."""
  listing = subprocess.check_output(['ps', 'axwwo', 'pid=,ppid=,args='], text=True)
  rows = [line.split(None, 2) for line in listing.splitlines()]
  parents = {int(pid): int(parent) for pid, parent, *_ in rows}

  def is_ours(pid):
    while pid in parents and pid != os.getpid():
      pid = parents[pid]
    return pid == os.getpid()

  return {
    (pid, args)
    for pid, _, args in (row for row in rows if len(row) == 3)
    if ('jaxpost.workers.jail' in args or 'The program inside the sandbox' in args) and is_ours(int(pid))
  }


@needs_namespaces
@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_programs_fail_and_leave_no_process(name):
  limits = sandbox.SandboxLimits(timeout_s=1.5, memory_mb=128)
  before = jails()
  start = time.monotonic()
  assert sandbox.run_inputs(HOSTILE[name], [''], limits, 1000) == [None]
  assert not any(sandbox.run_tests(HOSTILE[name], TESTS, limits))
  assert time.monotonic() - start < 10
  assert jails() <= before
  assert sandbox.run_tests(RIGHT, TESTS, LIMITS) == [True, True]


INSPECT = """
import ctypes, os, socket
def tried(name, fn):
  try: print(name, 'yes', fn())
  except OSError as error: print(name, 'no', error.strerror)
def write(path):
  with open(path, 'w') as file: return file.write('x')
def udp():
  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
  return s.sendto(b'x', ('192.0.2.1', 53))
libc = ctypes.CDLL(None, use_errno=True)
def libc_call(name, *args):
  if getattr(libc, name)(*args) < 0:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
FOLDER = input()
tried('tcp', lambda: socket.create_connection(('127.0.0.1', int(input())), 1))
tried('udp', udp)
tried('read', lambda: open(FOLDER + '/secret').read())
tried('list', lambda: os.listdir(FOLDER))
tried('home', lambda: os.listdir(os.path.expanduser('~root')))
tried('passwd', lambda: open('/etc/passwd').read())
tried('proc', lambda: os.listdir('/proc/1'))
for path in '/x', '/usr/x', '/etc/x', '/dev/x', FOLDER + '/x', os.__file__:
  tried('write', lambda: write(path))
tried('mount', lambda: libc_call('mount', b'x', b'/usr', b'tmpfs', 0, b''))
tried('writable', lambda: libc_call('mount', b'x', b'/usr', b'', 4128, b''))
tried('umount', lambda: libc_call('umount2', b'/usr', 2))
tried('chroot', lambda: os.chroot('/usr'))
tried('namespace', lambda: libc_call('unshare', 0x10000000))
tried('trace', lambda: libc_call('ptrace', 16, 1, 0, 0))
tried('root', lambda: os.setuid(0))
tried('here', lambda: write('x'))
tried('tmp', lambda: write('/tmp/y'))
print('ids', os.getuid(), os.getpid() < 10, sorted(os.environ))
"""


@needs_namespaces
def test_folders_that_the_sandbox_shows_are_read_only(tmp_path, monkeypatch):
  """The mode of the folder would let a program write, but the sandbox does not."""
  shown = tmp_path / 'shown'
  shown.mkdir()
  tmp_path.chmod(0o755)
  shown.chmod(0o777)
  binds = sandbox._binds(False)
  monkeypatch.setattr(sandbox, '_binds', lambda packages: [*binds, str(shown)])
  program = (
    'import os\nfor p in input().split():\n'
    '  try: open(p + "/x", "w")\n'
    '  except OSError as e: print(e.strerror)\n'
    'print(os.listdir(p))'
  )
  (printed,) = sandbox.run_inputs(program, [f'/ /usr /etc /dev {shown}'], LIMITS)
  assert printed == 'Read-only file system\n' * 5 + '[]\n'


@needs_namespaces
def test_number_of_processes_is_limited():
  program = (
    'import os, time\nfor i in range(1000):\n  try:\n'
    '    if os.fork() == 0: time.sleep(100)\n'
    '  except OSError: break\nprint(i)'
  )
  (printed,) = sandbox.run_inputs(program, [''], LIMITS)
  assert 1 < int(printed) <= LIMITS.processes


@needs_namespaces
def test_program_reaches_only_its_own_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('A_SECRET', 'secret')
  (tmp_path / 'secret').write_text('secret')
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    (printed,) = sandbox.run_inputs(INSPECT, [f'{tmp_path}\n{port}\n'], LIMITS)
  lines = [line.split(maxsplit=2) for line in printed.splitlines()]
  allowed_actions = [line[0] for line in lines if line[1] == 'yes']
  denied_actions = [line[0] for line in lines if line[1] == 'no']
  assert sorted(allowed_actions) == ['here', 'tmp'], printed
  assert len(denied_actions) == 20 and 'secret' not in printed, printed
  assert lines[-1][:2] == ['ids', '65534']
  assert lines[-1][2].startswith('True') and 'A_SECRET' not in printed
  assert list(tmp_path.iterdir()) == [tmp_path / 'secret']


@needs_namespaces
def test_sandbox_ends_when_the_process_that_started_it_is_killed():
  before = jails()
  parent = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'from jaxpost.workers import sandbox as s\n'
      's.run_tests("import time; time.sleep(50)", ["assert f()"],'
      ' s.SandboxLimits(timeout_s=40.0))',
    ],
    env={**os.environ, 'PYTHONPATH': str(CLONE)},
  )
  deadline = time.monotonic() + 10
  while len(jails() - before) < 4 and time.monotonic() < deadline:
    time.sleep(0.05)
  assert len(jails() - before) >= 4
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  while jails() - before and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not jails() - before


@needs_namespaces
def test_packages_are_visible_only_with_the_option():
  program = 'import numpy\nprint(numpy.ones(3).sum())'
  with_packages = sandbox.SandboxLimits(timeout_s=20.0, memory_mb=2048, packages=True)
  assert sandbox.run_inputs(program, [''], with_packages) == ['3.0\n']
  assert sandbox.run_inputs(program, [''], LIMITS) == [None]


# ---------------------------------------------------- without a sandbox

REFUSED = """
import sys
from jaxpost.errors import InputError
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool
if __name__ == '__main__':
  text = '```python\\nx = 1\\n```'
  for spec in ('code', 'code?insecure=true'):
    with RewardPool(spec) as pool:
      try:
        pool.check(['tests'])
        graded, = pool.grade([Group(['p'], [text], [[1]],
                                    {'tests': ['assert x == 1']})])
        print(graded.rewards, graded.error)
      except InputError as error:
        print('refused:', error)
"""


@needs_namespaces
@pytest.mark.skipif(not shutil.which('unshare'), reason='needs unshare(1)')
def test_code_reward_without_namespaces_is_refused_unless_insecure(tmp_path):
  """It runs in a user namespace that may not make further ones."""
  (tmp_path / 'main.py').write_text(REFUSED)
  command = f'echo 0 >/proc/sys/user/max_user_namespaces && exec {sys.executable} {tmp_path}/main.py'
  printed = subprocess.check_output(
    ['unshare', '-Ur', 'sh', '-c', command], text=True, env={**os.environ, 'PYTHONPATH': str(CLONE)}
  )
  refused, insecure = printed.splitlines()
  assert refused.startswith('refused: reward code: the sandbox cannot be set')
  assert 'unshare(user' in refused and 'insecure=true' in refused
  assert insecure == '[1.0] None'


def test_insecure_programs_have_limits_and_leave_no_files(tmp_path, monkeypatch):
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.setattr(sandbox.tempfile, 'tempdir', None)
  limits = sandbox.SandboxLimits(timeout_s=1.0, memory_mb=256, insecure=True)
  assert sandbox.run_tests(RIGHT, TESTS, limits) == [True, True]
  assert sandbox.run_inputs('print(input())', ['a', 'b'], limits) == ['a\n', 'b\n']
  for name in ('loop', '100 MB', 'memory'):
    assert sandbox.run_inputs(HOSTILE[name], [''], limits) == [None]
  assert list(tmp_path.iterdir()) == []


@needs_namespaces
def test_sandbox_that_breaks_is_an_error_rather_than_a_zero(monkeypatch):
  """The sandbox is killed while programs run, as a kernel that is out of memory might kill it."""

  class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      threading.Timer(0.7, self.kill).start()

  monkeypatch.setattr(sandbox.subprocess, 'Popen', Popen)
  with pytest.raises(call.RewardError, match='ended after 1 lines'):
    sandbox.run_tests('import time\ntime.sleep(9)', TESTS, LIMITS)


@needs_namespaces
def test_program_that_cannot_start_is_an_error(monkeypatch):
  """The interpreter is outside of the sandbox: nothing was run, so the program has not failed."""
  monkeypatch.setattr(sandbox, '_binds', lambda packages: [])
  hidden = not sandbox._python().startswith('/usr/')
  if not hidden:
    pytest.skip('this interpreter is in /usr, which is always visible')
  with pytest.raises(call.RewardError, match='cannot be set up.*No such file'):
    sandbox.run_tests(RIGHT, TESTS, LIMITS)
