"""`RewardPool`: a reward function that raises, hangs, crashes or returns nonsense masks its group and nothing else.

The functions are written to a file, as a user's would be. Most of them misbehave only if the first completion of the
group is 'bad'.
"""

import datetime
import logging
import os
import pathlib
import queue
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from jaxpost.data import sources
from jaxpost.errors import InputError
from jaxpost.rewards.groups import Group, stats_of
from jaxpost.rewards.pool import RewardPool

FUNCTIONS = """
import os
import re
import subprocess
import sys
import time


def bad(completions):
  return completions[0] == 'bad'


def fine(completions, **columns):
  return [float(len(c)) for c in completions]


def index(completions, **columns):
  time.sleep(0.05 * (3 - int(completions[0]) % 4))
  return [int(c) for c in completions]


async def awaited(completions, **columns):
  import asyncio
  await asyncio.sleep(0)
  return [1.0 for c in completions]


def only_what_it_names(completions, answer):
  return [float(c == a) for c, a in zip(completions, answer)]


def none_for_some(completions, **columns):
  return [None if c == 'none' else 1.0 for c in completions]


def changes_its_arguments(completions, prompts, **columns):
  completions.clear()
  return [0.5 for _ in prompts]


def raises(completions, **columns):
  if bad(completions):
    raise ValueError('no such\\nthing')  # THE LINE
  return [1] * len(completions)


def raises_below(completions, **columns):
  return [1 + re.compile('(' if bad(completions) else 'a').groups
          for c in completions]


def talks(completions, **columns):
  print(completions[0])
  return [0.25] * len(completions)


def talks_too(completions, **columns):
  print('to stderr', file=sys.stderr)
  return [0.75] * len(completions)


def exits(completions, **columns):
  return sys.exit(3) if bad(completions) else [1] * len(completions)


def sleeps(completions, **columns):
  if bad(completions):
    time.sleep(1000)
  return [1] * len(completions)


def spins(completions, **columns):
  while bad(completions):
    pass
  return [1] * len(completions)


def holds_the_gil(completions, **columns):
  if bad(completions):
    re.match('(a+)+b', 'a' * 64)
  return [1] * len(completions)


def leaves(completions, **columns):
  if bad(completions):
    os._exit(0)
  return [1] * len(completions)


def crashes(completions, **columns):
  if bad(completions):
    import ctypes
    ctypes.string_at(0)
  return [1] * len(completions)


def leaves_a_child_behind(completions, **columns):
  if bad(completions) and os.fork():
    os._exit(7)
  elif bad(completions):
    time.sleep(1000)
  return [1] * len(completions)


def forks_and_both_return(completions, **columns):
  child = os.fork() if bad(completions) else 0
  if child:
    with open(os.environ['PIDS'], 'a') as file:
      file.write(f'{child} ')
  return [1] * len(completions)


def spawns(completions, **columns):
  child = subprocess.Popen(['sleep', '1000'])
  with open(os.environ['PIDS'], 'a') as file:
    file.write(f'{os.getpid()} {child.pid} ')
  while bad(completions):
    pass
  return [1] * len(completions)


def prints(completions, **columns):
  print('x' * 50_000_000)
  os.write(1, b'{"values": [9, 9]}\\n')
  return [1] * len(completions)


def reads(completions, **columns):
  return [float(len(sys.stdin.read())) for _ in completions]


def closes_everything(completions, **columns):
  if bad(completions):
    os.closerange(0, 100)
  return [1] * len(completions)


def environment(completions, **columns):
  return [float(c in os.environ) for c in completions]


def answers(value):
  def reward(completions, **columns):
    if bad(completions):
      return value(completions)
    return [1] * len(completions)
  return reward


nan = answers(lambda c: [1.0, float('nan')])
inf = answers(lambda c: [1.0, -float('inf')])
beyond = answers(lambda c: [10 ** 400, 1])
none = answers(lambda c: None)
text = answers(lambda c: ['1', 1.0])
is_text = answers(lambda c: '12')
short = answers(lambda c: [1.0])
long = answers(lambda c: [1.0] * 3)
number = answers(lambda c: 1.0)
generator = answers(lambda c: (1.0 for _ in c))
endless = answers(lambda c: iter(int, 1))
mapping = answers(lambda c: {0: 1.0, 1: 1.0})
complex_number = answers(lambda c: [1j, 1.0])
nested = answers(lambda c: [[1.0], [1.0]])


def numpy_scalars(completions, **columns):
  import numpy as np
  return [np.float32(0.5), np.int64(2)]


def numpy_array(completions, **columns):
  import numpy as np
  return np.array([0.5, 2.0])


def bools(completions, **columns):
  return [True, False]


def positional(completions, /):
  return [1.0]


def unrelated(a, b=1):
  return [1.0]


not_callable = 3
"""


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp('rewards') / 'mine.py'
  path.write_text(FUNCTIONS)
  return path


@pytest.fixture
def pool_of(file):
  """Makes pools of functions of the file; all are closed after the test."""
  pools = []

  def make(*names, **settings):
    pools.append(RewardPool(tuple(f'{file}:{name}' for name in names), **{'timeout_s': 1.0, **settings}))
    return pools[-1]

  yield make
  for pool in pools:
    pool.close()


def group(*completions, **columns):
  """A group of completions whose rows all have the same values in `columns`."""
  size = len(completions)
  columns = {name: [value] * size for name, value in columns.items()}
  return Group(['p'] * size, list(completions), [[1]] * size, columns)


def alive(pid):
  """Returns whether a process runs; a zombie does not."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return stat.rpartition(')')[2].split()[0] not in 'ZX'


def wait_dead(pids, seconds=5.0):
  """The processes that still run after waiting for all of them to end."""
  deadline = time.monotonic() + seconds
  while any(map(alive, pids)) and time.monotonic() < deadline:
    time.sleep(0.02)
  return [pid for pid in pids if alive(pid)]


# Function -> pattern of the error of its group.
BAD = {
  'raises': 'raised ValueError: no such thing at .*mine.py:LINE',
  'raises_below': r'raised \w+: missing \), .* at .*mine.py:\d+',
  'exits': r'raised SystemExit: 3 at .*mine.py:\d+',
  'sleeps': r'no answer in 1 s at .*mine.py:\d+',
  'spins': r'no answer in 1 s at .*mine.py:\d+',
  'holds_the_gil': r'no answer in 1 s at .*mine.py:\d+',
  'leaves': 'the worker exited with code 0',
  'leaves_a_child_behind': 'the worker exited with code 7',
  'crashes': r'the worker died of SIGSEGV at .*mine.py:\d+',
  'closes_everything': 'the worker (closed|exited)',
  'nan': 'returned nan at 1; None says',
  'inf': 'returned -inf at 1; None says',
  'beyond': 'returned a number beyond float32 at 0',
  'none': 'returned NoneType None, not a list of 2 numbers',
  'text': "returned str '1' at 0, not a number",
  'is_text': "returned str '12', not a list",
  'short': 'returned 1 rewards for 2 completions',
  'long': 'returned 3 rewards for 2 completions',
  'number': 'returned float 1.0, not a list',
  'generator': 'returned generator .*, not a list',
  'endless': 'returned callable_iterator .*, not a list',
  'mapping': 'returned dict .*, not a list',
  'complex_number': r'returned complex 1j at 0, not a number',
  'nested': r'returned list \[1.0\] at 0, not a number',
}


@pytest.mark.parametrize('name', BAD)
def test_a_bad_reward_masks_its_group_only(pool_of, name):
  pool = pool_of(name, 'fine')
  good, bad, after = pool.grade([group('a', 'bb'), group('bad', 'bb'), group('a', 'bb')])
  assert good.rewards == after.rewards == [2.0, 3.0]
  assert good.error is after.error is None
  assert bad.rewards == [None, None]
  line = 1 + FUNCTIONS.split('# THE LINE')[0].count('\n')
  expected = f'reward {name}: ' + BAD[name].replace('LINE', str(line))
  assert re.match(expected, bad.error), bad.error
  assert '\n' not in bad.error
  assert bad.components == {name: [None, None], 'fine': [None, None]}
  timeouts = int('no answer' in BAD[name])
  assert stats_of([good, bad, after]) == dict(groups=3, failed_groups=1, timeouts=timeouts, masked_rows=2)


@pytest.mark.parametrize(
  'name, rewards',
  [
    ('awaited', [1.0, 1.0]),
    ('none_for_some', [1.0, None]),
    ('numpy_scalars', [0.5, 2.0]),
    ('numpy_array', [0.5, 2.0]),
    ('bools', [1.0, 0.0]),
    ('prints', [1.0, 1.0]),
    ('reads', [0.0, 0.0]),
    ('only_what_it_names', [1.0, 0.0]),
  ],
)
def test_unusual_but_valid_return_values_are_accepted(pool_of, name, rewards):
  pool = pool_of(name, timeout_s=20.0)
  graded = pool.grade([group('bad', 'none', answer='bad')] * 2)
  assert [g.error for g in graded] == [None, None]
  assert [g.rewards for g in graded] == [rewards, rewards]
  assert all(type(r) is float for g in graded for r in g.rewards if r is not None)
  assert stats_of(graded)['masked_rows'] == 2 * rewards.count(None)


def test_forked_and_spawned_children_of_a_call_are_ended(pool_of, tmp_path, monkeypatch):
  """A forked copy of a worker ends at once; processes that a worker spawned end when it times out."""
  pid_file = tmp_path / 'pids'
  monkeypatch.setenv('PIDS', str(pid_file))
  pool = pool_of('forks_and_both_return', env_vars=('PIDS',))
  graded = pool.grade([group('bad')] * 2)
  assert [g.rewards for g in graded] == [[1.0], [1.0]]
  pids = [int(pid) for pid in pid_file.read_text().split()]
  assert len(pids) == 2 and wait_dead(pids) == []
  pid_file.unlink()
  assert pool_of('spawns', env_vars=('PIDS',)).grade([group('a'), group('bad')])[1].timed_out
  pids = [int(pid) for pid in pid_file.read_text().split()]
  assert len(pids) == 4 and wait_dead(pids) == []


def test_weighted_sum_masks_rows_with_none_unless_all_are_none(pool_of):
  pool = pool_of('fine', 'none_for_some', weights=(0.5, -2.0))
  mixed, all_none = pool.grade([group('a', 'none'), group('none', 'none')])
  assert mixed.rewards == [0.5 * 1 - 2.0, None]  # not 2.0, as if its verdict had been 0
  assert mixed.components == {'fine': [1, 4], 'none_for_some': [1, None]}
  assert all_none.rewards == [0.5 * 4] * 2  # None for a whole group: the function does not apply to this prompt
  assert stats_of([mixed, all_none])['masked_rows'] == 1


def test_results_come_in_order_and_overlap(pool_of):
  pool = pool_of('index', workers=2)
  pool.check()
  first = pool.submit([group(str(i)) for i in range(8)])
  second = pool.submit([group('9')])
  assert second[0].result().rewards == [9.0]
  assert [future.result().rewards for future in first] == [[i] for i in range(8)]
  assert pool.grade([]) == []


def test_function_cannot_change_arguments_of_other_functions(pool_of):
  pool = pool_of('changes_its_arguments', 'fine')
  assert pool.grade([group('a', 'bb')])[0].rewards == [1.5, 2.5]


def test_hanging_group_does_not_delay_other_groups(pool_of):
  pool = pool_of('spins', workers=2)
  pool.check()
  start = time.monotonic()
  graded = pool.grade([group('bad')] + [group('a')] * 50)
  assert [g.error is None for g in graded] == [False] + [True] * 50
  assert time.monotonic() - start < 3


def test_worker_killed_between_groups_fails_no_group(pool_of):
  pool = pool_of('fine')
  pool.grade([group('a')])
  os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
  assert pool.grade([group('a')])[0].error is None


def test_killed_reaper_does_not_end_the_run(pool_of):
  """The reaper is needed only if this process is killed, too."""
  pool = pool_of('fine')
  pool.grade([group('a')])
  for process in (pool._reaper._process, pool._workers[0]._process):
    process.kill()
    process.wait()
  assert pool.grade([group('a')])[0].error is None


def test_worker_killed_while_importing_is_started_once_more(tmp_path):
  flag, file = tmp_path / 'flag', tmp_path / 'rewards.py'
  killed = f'flag = pathlib.Path({str(flag)!r})\nif flag.exists():\n  flag.unlink()\n  os.kill(os.getpid(), 9)\n'
  file.write_text(f'import os, pathlib\n{killed}def one(completions, **columns):\n  return [1.0] * len(completions)\n')
  with RewardPool(f'{file}:one') as pool:
    pool.grade([group('a')])
    flag.touch()
    pool._workers[0]._process.kill()
    assert pool.grade([group('a')])[0].rewards == [1.0]
    assert not flag.exists()


def test_builtin_rewards_grade_messages_and_name_missing_columns():
  messages = [{'role': 'assistant', 'content': 'so #### 4'}]
  prompt = [{'role': 'user', 'content': '2+2?'}]
  with RewardPool(('gsm8k', 'think_format')) as pool:
    pool.check(('answer',))
    (graded,) = pool.grade([Group([prompt], [messages], [[1]], {'answer': ['#### 4']})])
    assert graded.components == {'gsm8k': [1.0], 'think_format': [0.0]}
    with pytest.raises(InputError, match="gsm8k .*needs the column 'answer', the data has: question"):
      pool.check(('question',))


def test_callables_run_in_this_process_with_a_warning(caplog):
  def local(completions, **columns):
    return [1.0 / (c != 'bad') for c in completions]

  with caplog.at_level(logging.WARNING):
    pool = RewardPool((local, 'think_format', len_of))
  assert 'local runs inside this process' in caplog.text
  with pool:
    good, bad = pool.grade([group('<think></think>'), group('bad')])
  assert good.rewards == [1.0 + 1.0 + 15.0] and good.error is None
  assert bad.rewards == [None]
  assert 'reward local: raised ZeroDivisionError' in bad.error
  assert 'test_rewards_pool.py:' in bad.error


async def len_of(completions):
  return [len(c) for c in completions]


CONNECTED = """
import asyncio
import os

connection = None


async def asks(completions, **columns):
  global connection
  if connection is None:  # once, as a client of an API does
    connection = await asyncio.open_connection('127.0.0.1', int(os.environ['ECHO_PORT']))
  reader, writer = connection
  if completions[0] == 'exit':
    raise SystemExit(3)
  replies = []
  for completion in completions:
    writer.write(f'{len(completion)}\\n'.encode())
    replies.append(float(await reader.readline()))
  return replies
"""


def test_a_connection_of_an_async_function_stays_open(tmp_path, monkeypatch):
  class Echo(socketserver.StreamRequestHandler):
    def handle(self):
      for line in self.rfile:
        self.wfile.write(line)

  (tmp_path / 'mine.py').write_text(CONNECTED)
  with socketserver.ThreadingTCPServer(('127.0.0.1', 0), Echo) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('ECHO_PORT', str(server.server_address[1]))
    with RewardPool(f'{tmp_path}/mine.py:asks', env_vars=('ECHO_PORT',)) as pool:
      for texts in ('a', 'bcd'), ('e', 'fg'):
        (graded,) = pool.grade([group(*texts)])
        assert graded.error is None and graded.rewards == [len(text) for text in texts]
      exited, graded = pool.grade([group('exit'), group('hi')])
      assert 'raised SystemExit: 3' in exited.error and graded.rewards == [2.0]
    server.shutdown()


def test_too_many_failures_stop_the_run(pool_of):
  pool = pool_of('raises', max_failed=0.3)
  with pytest.raises(InputError, match='first batch failed: reward raises: ra'):
    pool.grade([group('bad')] * 2)
  pool = pool_of('raises', max_failed=0.3)
  for _ in range(4):
    pool.grade([group('bad'), group('a'), group('a'), group('a')])
  graded = [future.result() for future in pool.submit([group('bad')] * 3 + [group('a')])]
  with pytest.raises(InputError, match='7 of the last 20 groups failed, max_f'):
    pool.count(graded)
  assert stats_of(graded)['failed_groups'] == 3


@pytest.mark.parametrize(
  'spec, message',
  [
    ('{file}:nope', "has no 'nope'"),
    ('{file}:not_callable', 'is an int, not a function'),
    ('{file}:positional', 'mine.py.*wrong signature .completions, /.'),
    ('{file}:unrelated', 'mine.py.*wrong signature.*verl:./file.py:function'),
    ('{folder}/none.py:f', 'no file'),
    ('{folder}/broken.py:f', 'broken.py:2'),
    ('{folder}/raising.py:f', 'raised NameError.*raising.py:3'),
    ('{folder}/leaving.py:f', 'raised SystemExit'),
    ('{folder}/dying.py:f', 'exited with code 5 while importing: farewell'),
    ('{folder}/missing.py:f', "imports 'no_such_package'"),
    ('{folder}/hanging.py:f', r'took longer than 1 s at .*hanging.py:2'),
    ('no.such.module:f', "no module 'no"),
  ],
)
def test_check_names_function_and_fault(file, tmp_path, spec, message):
  sources = {
    'broken': 'x = 1\ndef f(:\n',
    'raising': '\n\nundefined\n',
    'leaving': 'import sys; sys.exit()\n',
    'dying': 'import os; print("farewell", flush=True); os._exit(5)\n',
    'missing': 'import no_such_package\n',
    'hanging': '\nwhile True: pass\n',
  }
  for name, source in sources.items():
    (tmp_path / f'{name}.py').write_text(source)
  spec = spec.format(file=file, folder=tmp_path)
  start = 1.0 if 'hanging' in spec else 20.0
  with RewardPool(spec, start_timeout_s=start) as pool:
    with pytest.raises(InputError, match=message) as caught:
      pool.check()
  assert spec.rpartition(':')[2] in str(caught.value)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'rewards': ()}, 'none is given'),
    ({'rewards': 'gsm8'}, "mean 'gsm8k'"),
    ({'rewards': 'gsm8k', 'weights': (1.0, 2.0)}, '2 weights for 1'),
    ({'rewards': 'gsm8k', 'weights': (float('nan'),)}, 'nan is not finite'),
    ({'rewards': 'gsm8k', 'workers': 0}, 'workers: 0'),
    ({'rewards': 'gsm8k', 'timeout_s': float('inf')}, 'timeout_s: inf'),
    ({'rewards': 'gsm8k', 'max_failed': 1.5}, 'max_failed: 1.5'),
  ],
)
def test_invalid_settings_are_refused(settings, message):
  with pytest.raises(InputError, match=message):
    RewardPool(**settings)


def test_columns_that_are_not_json_are_refused_by_name(pool_of):
  pool = pool_of('fine')
  with pytest.raises(InputError, match="column 'when': .*object"):
    pool.grade([group('a', ok=1, when=object())])
  with pytest.raises(InputError, match="column 'when': .*datetime is not JSON .* drop it with config.data.map"):
    pool.check_rows(sources.read('a', fake_rows=[{'prompt': 'p', 'when': datetime.datetime(2026, 1, 1)}]))
  with pytest.raises(InputError, match="called 'completions'"):
    pool.grade([Group(['p'], ['a'], [[1]], {'completions': ['a']})])
  with pytest.raises(ValueError, match='x has 2 entries for 1'):
    pool.grade([Group(['p'], ['a'], [[1]], {'x': [1, 2]})])


def test_a_missing_column_is_named(pool_of):
  pool = pool_of('only_what_it_names')
  with pytest.raises(InputError, match="needs the column 'answer', this row has: question"):
    pool.grade([group('a', question='q')])


def test_modules_in_working_directory_shadow_no_standard_modules(tmp_path, monkeypatch):
  for name in ('json', 'math', 'signal'):
    (tmp_path / f'{name}.py').write_text('raise ImportError')
  (tmp_path / 'my_rewards.py').write_text(FUNCTIONS)
  monkeypatch.chdir(tmp_path)
  with RewardPool(('./my_rewards.py:fine', 'my_rewards:awaited')) as pool:
    pool.check()
    assert pool.grade([group('abc')])[0].rewards == [4.0]


def test_secrets_in_environment_are_hidden_from_workers(pool_of, monkeypatch):
  names = 'A_TOKEN', 'my_secret', 'X_API_KEY', 'TOKENIZERS_PARALLELISM', 'HOME'
  for name in names:
    monkeypatch.setenv(name, 'x')
  (graded,) = pool_of('environment').grade([group(*names)])
  assert graded.rewards == [0, 0, 0, 1, 1]


def test_output_of_a_call_is_logged_up_to_a_limit(pool_of, caplog):
  with caplog.at_level(logging.INFO):
    pool_of('prints', timeout_s=20.0).grade([group('a')])
  (record,) = [r for r in caplog.records if 'printed' in r.message]
  assert 'printed 50000020 bytes' in record.message
  assert len(record.message) < 3000


def test_printed_lines_are_shown_with_function_up_to_a_limit(pool_of, capfd):
  """Terminal escape codes are removed, and a printed line that looks like a reply is not taken for one."""
  reply = '{"values": [9.0], "logged": []}'
  pool = pool_of('talks', 'talks_too')
  assert pool.grade([group(f'one\n\x1b[31m{reply}')])[0].rewards == [1.0]
  assert capfd.readouterr().err.splitlines() == ['talks: one', f'talks:  [31m{reply}', 'talks_too: to stderr']
  pool.grade([group('\n'.join(map(str, range(30)))), group('x')])
  first = [f'talks: {i}' for i in range(20)]
  more = 'rewards: printed more than 20 lines in this step; the others are not shown'
  assert capfd.readouterr().err.splitlines() == [*first, more]
  pool.grade([group('y'), group('talks_too')])
  shown = ['talks: y', 'talks_too: to stderr', 'talks: talks_too', 'talks_too: to stderr']
  assert capfd.readouterr().err.splitlines() == shown
  pool.grade([group('z' * 50_000)])
  cut, line, other = capfd.readouterr().err.splitlines()
  assert 'bytes before this are not shown' in cut and len(line) < 500 and other == shown[1]
  pool = pool_of('talks', workers=2)
  for text in 'abcdef':  # only the lines of the worker that printed first are shown, whichever that is
    pool.grade([group(text)])
  shown = capfd.readouterr().err.splitlines()
  assert shown[0] == 'talks: a' and shown == sorted(shown)
  pool_of('talks', show_printed=False).grade([group('x')])
  assert not capfd.readouterr().err


def test_close_ends_children_and_busy_workers(pool_of, tmp_path, monkeypatch):
  monkeypatch.setenv('PIDS', str(tmp_path / 'pids'))
  pool = pool_of('spawns', workers=2, timeout_s=60.0, env_vars=('PIDS',))
  pool.grade([group('a')])
  pending = pool.submit([group('bad')])
  time.sleep(0.3)
  start = time.monotonic()
  pool.close()
  assert time.monotonic() - start < 3
  pids = [int(p) for p in (tmp_path / 'pids').read_text().split()]
  assert len(pids) == 4 and wait_dead(pids) == []
  assert pending[0].done()
  with pytest.raises(RuntimeError, match='closed'):
    pool.submit([group('a')])


PARENT = """
import sys, time
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool
if __name__ == '__main__':
  pool = RewardPool(sys.argv[1] + ':spawns', workers=2, timeout_s=60.0, env_vars=('PIDS',))
  pool.check()
  pool.submit([Group(['p'], ['bad'], [[1]], {})] * 2)
  time.sleep(60.0 if len(sys.argv) == 2 else 1.0)
"""


@pytest.mark.parametrize('kill', [True, False])
def test_workers_and_their_children_end_with_the_parent(file, tmp_path, kill):
  """The parent is killed by SIGKILL, or exits without closing the pool; both while the pool grades."""
  (tmp_path / 'parent.py').write_text(PARENT)
  root = pathlib.Path(__file__).resolve().parents[1]
  pid_file = tmp_path / 'pids'
  parent = subprocess.Popen(
    [sys.executable, tmp_path / 'parent.py', file] + ['exit'] * (not kill),
    env={**os.environ, 'PYTHONPATH': str(root), 'PIDS': str(pid_file)},
    stderr=subprocess.PIPE,
  )
  deadline = time.monotonic() + 20
  while time.monotonic() < deadline:
    pids = pid_file.read_text().split() if pid_file.exists() else []
    if len(pids) == 4:  # two workers with one child each
      break
    time.sleep(0.05)
  pids = [int(pid) for pid in pids]
  if kill:
    assert len(pids) == 4 and all(map(alive, pids))
    children = pathlib.Path(f'/proc/{parent.pid}/task')
    pids += [int(p) for t in children.iterdir() for p in (t / 'children').read_text().split()]
    parent.kill()
  _, errors = parent.communicate(timeout=20)
  assert errors == b''
  assert wait_dead(pids) == []


def test_reward_modules_import_neither_jax_nor_numpy():
  root = pathlib.Path(__file__).resolve().parents[1]
  code = (
    'import sys, jaxpost.rewards.pool, jaxpost.rewards.worker\n'
    'import jaxpost.rewards.math, jaxpost.rewards.format\n'
    'print({"jax", "numpy", "flax"} & set(sys.modules))'
  )
  out = subprocess.check_output([sys.executable, '-c', code], cwd=root, text=True)
  assert out == 'set()\n'


def test_close_does_not_wait_for_a_job_that_a_thread_has_taken():
  """The queue claims to have a job that a thread has taken meanwhile: `close` must not block in `get`."""

  class Raced(queue.Queue):
    def empty(self):
      return False

  pool = RewardPool(('exact_match',))
  pool._jobs = Raced()
  closing = threading.Thread(target=pool.close, daemon=True)
  closing.start()
  closing.join(20)
  assert not closing.is_alive()
