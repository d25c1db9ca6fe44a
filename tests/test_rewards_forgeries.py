"""The judge of code rewards: forged verdicts score 0, honest solutions 1, and tests it cannot judge are refused."""

import ast
import dataclasses

import pytest
from sandboxes import needs_namespaces

from jaxpost.rewards import code
from jaxpost.workers import call, checks, dialog, sandbox, values

pytestmark = needs_namespaces
LIMITS = sandbox.SandboxLimits(timeout_s=3.0, memory_mb=256)
PATIENT = dataclasses.replace(LIMITS, timeout_s=60.0)  # for programs that must succeed, also on a busy machine
TESTS = ['assert add(1, 2) == 3', 'def check(candidate):\n  assert candidate(20, 22) == 42\ncheck(add)']
WRONG = '\ndef add(a, b): return -1\n'
FRAME = """{"value": true}"""
# A program that writes a frame to every file descriptor that may be the channel to the judge
FORGE = f"""
import os
for i in range(1, 9):
  try: os.write(i, b'{FRAME}\\n')
  except OSError: pass
"""

# Each solution is a module that runs, but its `add` never computes a sum.
FORGERIES = {
  'exec does nothing': 'import builtins\nbuiltins.exec = lambda *a, **k: None' + WRONG,
  'compile gives pass': 'import builtins\nc = builtins.compile\nbuiltins.compile = lambda s, *a: c("", *a)' + WRONG,
  'json.loads': 'import json\njson.loads = lambda *a, **k: True' + WRONG,
  'json.dumps says true': f"import json\njson.dumps = lambda *a, **k: '{FRAME}'" + WRONG,
  'json.dumps says passed': 'import json\njson.dumps = lambda *a, **k: \'{"passed": true}\'' + WRONG,
  'always equal': 'class A:\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef add(a, b): return A()',
  'never unequal': 'class A:\n  __eq__ = __ne__ = __bool__ = lambda s, *o: True\ndef add(a, b): return A()',
  'int subclass': 'class A(int):\n  __eq__ = lambda s, o: True\n  __hash__ = int.__hash__\ndef add(a, b): return A(-1)',
  'int that indexes': 'class A(int):\n  __index__ = __int__ = lambda s: 3\ndef add(a, b): return A(-1)',
  'str subclass': 'class A(str):\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef add(a, b): return A("x")',
  'list subclass': 'class A(list):\n  __eq__ = lambda s, o: True\ndef add(a, b): return A([3])',
  'dict subclass': 'class A(dict):\n  __eq__ = lambda s, o: True\ndef add(a, b): return A(value=True)',
  'float nan': 'def add(a, b): return float("nan")',
  'bool for a number': 'def add(a, b): return True',
  'reflected compare': 'class A:\n  def __getattr__(s, n): return lambda *a: True\ndef add(a, b): return A()',
  'excepthook': 'import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): raise ValueError',
  'excepthook prints': f"import sys\nsys.excepthook = lambda *a: print('{FRAME}')\ndef add(a, b): raise SystemExit",
  'main mark': 'import __main__, os\n__main__.mark = "m"\ndef add(a, b): return getattr(__main__, "test", None)',
  'main names': 'import __main__\n__main__._answer = __main__.encode = lambda *a: True' + WRONG,
  'frames': (
    'import sys\ndef add(a, b):\n  f, seen = sys._getframe(), []\n'
    '  while f:\n    seen += [v for v in f.f_locals.values() if type(v) is int]\n    f = f.f_back\n'
    '  return next((v for v in seen if v not in (a, b)), None)'
  ),
  'gc': (
    'import gc\ndef add(a, b):\n  return [v for o in gc.get_objects() if type(o) is dict'
    ' for k, v in list(o.items()) if k in ("expected", "test", "mark")]'
  ),
  'thread': 'import threading, os, time\nthreading.Thread(target=lambda: (time.sleep(.1), os._exit(0))).start()'
  + WRONG,
  'thread answers': (
    'import threading, os, time\ndef tell():\n  for _ in range(50):\n    time.sleep(.002)\n'
    f"    try: os.write(3, b'{FRAME}\\n')\n    except OSError: return\n"
    'threading.Thread(target=tell, daemon=True).start()' + WRONG
  ),
  'trace': 'import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)' + WRONG,
  'import hook': 'import sys\nclass F:\n  def find_spec(s, *a): return None\nsys.meta_path.insert(0, F())' + WRONG,
  'module swap': 'import sys, types\nsys.modules["solution"] = types.SimpleNamespace(add=lambda a, b: object())'
  + WRONG,
  'reads the socket': 'import os, socket\ntry:\n  s = socket.socket(fileno=os.dup(3))\n  s.setblocking(False)\n'
  '  seen = s.recv(9999)\nexcept OSError: seen = b""\ndef add(a, b): return seen.decode()',
  'reads every fd': (
    'import os\nseen = []\nfor i in range(32):\n  try:\n    os.set_blocking(i, False)\n    seen.append(os.read(i, 999))'
    '\n  except OSError: pass\ndef add(a, b): return repr(seen)'
  ),
  'environment': 'import os\ndef add(a, b): return [v for v in os.environ.values() if v.isdigit()]',
  'arguments': 'import sys\ndef add(a, b): return sys.argv + getattr(sys, "orig_argv", [])',
  'own proc': 'def add(a, b):\n  try: return open("/proc/self/environ").read()\n  except OSError: return "no"',
  'parent proc': (
    'import os\ndef add(a, b):\n  for p in (1, os.getppid()):\n    try: return open(f"/proc/{p}/mem", "rb").read(9)\n'
    '    except OSError: pass'
  ),
  'timing': 'import time\ndef add(a, b):\n  time.sleep(0.01)\n  return int(time.time() * 1e9) % 2',
  'sys.exit': 'import sys\ndef add(a, b):\n  sys.stdout.write("passed")\n  sys.exit(0)',
  'os._exit': 'import os\ndef add(a, b):\n  print("passed", end="")\n  os._exit(0)',
  'atexit': f"import atexit, os, sys\natexit.register(lambda: os.write(1, b'{FRAME}'))\nadd = lambda a, b: sys.exit(0)",
  'pickling': 'class A:\n  def __reduce__(s): return (eval, ("3",))\ndef add(a, b): return A()',
  'infinite generator': 'def add(a, b):\n  while True: yield 3',
  'deep recursion': 'def add(a, b):\n  x = 3\n  for _ in range(100000): x = [x]\n  return x',
  'recursion without end': 'import sys\nsys.setrecursionlimit(10**6)\ndef add(a, b): return add(b, a)',
  'cycle': 'x = []\nx.append(x)\ndef add(a, b): return x',
  'huge output': 'def add(a, b): return "3" * 10**7',
  'huge integer': 'def add(a, b): return 10 ** 5000',
  'prints a verdict': f"print('{FRAME}')\nprint('passed', 'OK')\nadd = print",
  'writes to every fd': (
    f"import os\nfor i in range(64):\n  try: os.write(i, b'{FRAME}\\n' * 9)\n  except OSError: pass\n" + WRONG
  ),
  'one frame before each': (
    f"import os\ndef add(a, b):\n  try: os.write(3, b'{FRAME}\\n')\n  except OSError: pass\n  return -1"
  ),
  'bad frames': 'import os\ntry: os.write(3, b\'{"passed": true}\\n\')\nexcept OSError: pass\n' + WRONG,
  'object of another number': (
    'import os\ndef add(a, b):\n  try: os.write(3, b\'{"value": ["o", 0, "int"]}\\n\')\n  except OSError: pass\n'
    '  os._exit(0)'
  ),
  'child answers later': (
    'import os, time\nif os.fork() == 0:\n  for _ in range(40):\n    time.sleep(.005)\n'
    f"    try: os.write(3, b'{FRAME}\\n')\n    except OSError: break\n  os._exit(0)" + WRONG
  ),
  'signals': (
    'import os, signal\ndef add(a, b):\n  for p in (os.getppid(), 1):\n    for s in (2, 10, 15):\n'
    '      try: os.kill(p, s)\n      except OSError: pass\n  return -1'
  ),
  'class of another': (
    'class A:\n  __class__ = property(lambda s: bool)\n  __eq__ = lambda s, o: True\n  __hash__ = None\n'
    'def add(a, b): return A()'
  ),
  'isinstance': (
    'import builtins\nbuiltins.isinstance = builtins.issubclass = lambda *a: True\nbuiltins.type = lambda *a: int'
    + WRONG
  ),
  'equality of int in C': (
    'import ctypes, gc\nd = gc.get_referents(int.__dict__)[0]\ne = int.__eq__\nd["__eq__"] = lambda s, o: True\n'
    'ctypes.pythonapi.PyType_Modified(ctypes.py_object(int))' + WRONG
  ),
  'value of an integer in C': (
    'import ctypes\ndef add(a, b):\n  x = 10 ** 6\n  ctypes.memset(id(x) + 24, 255, 4)\n  return x'
  ),
  'globals of the caller': (
    'import sys\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n    for k, v in list(f.f_globals.items()):\n'
    f"      if callable(v) and k != 'add' and k[:2] != '__': f.f_globals[k] = lambda *a, **k: b'{FRAME}'\n"
    '    f = f.f_back\n  return -1'
  ),
  'runs another program': f'import os, sys\ndef add(a, b): os.execv(sys.executable, [sys.executable, "-c", {FORGE!r}])',
  'module for the next program': (
    'for name in ("json.py", "sitecustomize.py", "usercustomize.py", "x.pth"):\n'
    f'  with open(name, "w") as f: f.write({FORGE!r} + "dumps = loads = lambda *a, **k: True")\n' + WRONG
  ),
  'alarm': (
    f'import signal\ndef tell(*a): exec({FORGE!r})\n'
    'def add(a, b):\n  signal.signal(signal.SIGALRM, tell)\n'
    '  signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n  return -1'
  ),
  'memory of its own': (
    'def add(a, b):\n  try:\n    with open("/proc/self/mem", "r+b", 0) as m:\n      m.seek(id(-1) + 16)\n'
    '      m.write(b"\\xff" * 8)\n  except OSError: pass\n  return -1'
  ),
  'stops its parent': (
    'import os, signal\ndef add(a, b):\n  try: os.kill(os.getppid(), signal.SIGSTOP)\n'
    '  except OSError: pass\n  return -1'
  ),
  'duplicate keys and NaN': (
    'import os\ndef add(a, b):\n  try: os.write(3, b\'{"value": NaN, "value": true, "value": 1e999}\\n\')\n'
    '  except OSError: pass\n  os._exit(0)'
  ),
  'no encoder': (
    'import json.encoder as e\ne.c_make_encoder = None\n'
    f"e.JSONEncoder.iterencode = lambda s, o, **k: iter(['{FRAME}'])\n"
    f"e.JSONEncoder.encode = lambda s, o: '{FRAME}'" + WRONG
  ),
  'builtins of the test': 'import builtins\nbuiltins.abs = builtins.all = lambda *a: True\nabs = all = sorted = min'
  + WRONG,
}
EXECUTE_SOLUTION = """
import sys
print('ran', flush=True)
try: exec(compile(sys.stdin.read(), 'x', 'exec'), {'__name__': 'solution'})
except Exception as error: print('Error', type(error).__name__)
"""


@pytest.mark.parametrize('name', FORGERIES)
def test_forgery_runs_and_passes_no_test(name):
  printed = sandbox.run_inputs(EXECUTE_SOLUTION, [FORGERIES[name]], PATIENT)[0]
  assert printed and printed.startswith('ran') and 'Error' not in printed
  assert sandbox.run_tests(FORGERIES[name], TESTS, LIMITS) == [False, False]


def test_at_least_fifty_forgeries_are_tested():
  assert len(FORGERIES) >= 50


# (a right solution, a test that it must pass)
HONEST = [
  ('def f(a, b): return a + b', 'assert f(1, 2) == 3'),
  ('def f(x): return [1, (2, 3)]', 'assert f(0) == [1, (2, 3)]'),
  ('def f(x): return {1: {2}, "a": None}', 'assert f(0) == {1: {2}, "a": None}'),
  ('def f(x): return not x', 'assert not f(1)\nassert f(0) is True'),
  ('def f(x): return x / 3', 'assert abs(f(1) - 0.3333333) < 1e-6'),
  ('def f(x): return x / 3', 'import math\nassert math.isclose(f(1), 1 / 3, rel_tol=1e-9)'),
  ('def f(x): return set(x)', 'assert sorted(f([2, 1, 2])) == [1, 2]'),
  (
    'def f(x): return x * 2',
    'def check(candidate):\n  assert candidate(2) == 4, "two"\n  assert candidate("a") == "aa"\ncheck(f)',
  ),
  ('def f(x): return 2', 'assert f(0) == 2.0'),
  ('import collections\ndef f(x): return collections.Counter(x)', 'assert f("aab") == {"a": 2, "b": 1}'),
  ('def f(n):\n  for i in range(n): yield i', 'assert list(f(3)) == [0, 1, 2]'),
  ('def f(l): l.sort()', 'x = [2, 1]\nf(x)\nassert x == [1, 2]'),
  (
    'class S:\n  def __init__(s): s.l = []\n  def push(s, v): s.l.append(v)\n  def pop(s): return s.l.pop()',
    's = S()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s.l) == 1',
  ),
  ('class Solution:\n  def two(self, a): return a', 'assert Solution().two([1]) == [1]'),
  (
    'def f(x):\n  if x < 0: raise ValueError("no")\n  return x',
    'import pytest\ndef test_it():\n  with pytest.raises(ValueError):\n    f(-1)\n  assert f(1) == 1',
  ),
  # The test itself raises in the `with` block, as in Python.
  ('def f(x): return {1: x}', 'import pytest\nwith pytest.raises(KeyError):\n  f(2)[3]\nassert f(2) == {1: 2}'),
  ('def f(x): raise KeyError', 'try:\n  f(1)\n  assert False\nexcept LookupError:\n  pass'),
  ('def f(x): return x ** 2', 'for x, y in [(1, 1), (3, 9)]:\n  assert f(x) == y'),
  ('def f(x): return x ** 2', 'assert all(f(i) == i * i for i in range(5))\nassert [f(i) for i in (1, 2)] == [1, 4]'),
  ('def sum(a, b): return a * b', 'assert sum(10, 15) == 150'),
  ('def f(): return b"a", 1j, float("inf")', 'assert f() == (b"a", 1j, float("inf"))'),
  ('def f(x): return " A "', 'assert f(0).strip().lower() == "a"\nassert isinstance(f(0), str) and len(f(0)) == 3'),
  ('LIMIT = 3\ndef f(x): return min(x, LIMIT)', 'assert f(9) == LIMIT'),
]


@pytest.mark.parametrize('solution, test', HONEST)
def test_honest_solution_passes(solution, test):
  assert sandbox.run_tests(solution, [test], PATIENT) == [True]


# A test that the judge cannot evaluate: pattern of the error
REFUSED = {
  'class TestIt(unittest.TestCase):\n  def test_a(self): pass': 'plain `assert`',
  'import numpy as np\nassert np.allclose(f(1), 2)': 'imports numpy',
  'assert f(lambda x: x) == 2': 'a function',
  'assert f(1) == Point(1, 2)': 'class Point',
  'def check(candidate):\n  assert candidate(1) == 2': 'entry_point',
  'f(1)': 'asserts nothing',
  'assert 1 == 1': 'calls no function of the solution',
  'while f(1): pass\nassert f(1)': 'for',
  'assert f(1': 'no Python',
  "assert f(5).to_bytes(2, 'big') == b'..'": r'line 1 uses `f\(5\).to_bytes`',
  "assert f('ab').translate({97: 'x'}) == 'xb'": 'translate',
  "assert f('a').expandtabs(4) == 'a'": 'expandtabs',
  "fmt = '{}'\nassert fmt.format(f(3)) == '3'": r'line 2 uses `fmt.format`',
  "assert bin(f(5)) == '0b101'": 'the builtin bin',
  'assert f(1)[:, 0] == [1]': r'line 1 uses `f\(1\)\[:, 0\]`',
  'x = eval("3")\nopen("x")\nassert (yield)': 'no Python',
}


@pytest.mark.parametrize('source', REFUSED)
def test_unreadable_test_is_refused_with_its_reason(source):
  with pytest.raises(checks.UnreadableTest, match=REFUSED[source]):
    checks.read(source)


def test_test_found_unreadable_during_evaluation_is_an_error_rather_than_a_failure():
  with pytest.raises(checks.UnreadableTest, match='str.upper'):
    sandbox.run_tests('def f(x): return x', ['assert str.upper(f("a")) == "A"'], PATIENT)


def test_each_attribute_of_a_plain_value_is_evaluated_or_refused():
  values_ = ('', [], (), {}, set(), frozenset(), 0, 0.0, 0j, b'', range(0), False)
  for name in {name for value in values_ for name in dir(value)} - {'__class__'}:
    try:
      test = checks.read(f'assert f(1).{name}')
    except checks.UnreadableTest:
      continue
    for value in values_:
      evaluator = dialog.Evaluator(test, None, float('inf'))
      evaluator.ask = lambda *parts, value=value: value
      node = ast.parse(f'f.{name}', mode='eval').body
      assert not hasattr(value, name) or evaluator._value(node, {}) is not None, (value, name)


def test_row_with_an_unreadable_test_is_masked_and_counted():
  reward, logged = code.Code(fenced=False), []
  bad, good = ['import numpy as np\nassert np.all(f(1))'], ['assert f(1) == 1']
  rewards = reward(['def f(x): return x'] * 2, tests=[bad, good], log_metric=lambda *pair: logged.append(pair))
  assert rewards == [None, 1.0] and logged == [('code_unreadable', 0.5), ('code_late', 0.0)]
  with pytest.raises(call.RewardError, match='line 1 imports numpy.*a test may import'):
    reward(['def f(x): return x'], tests=[bad])
  with pytest.raises(call.RewardError, match='imports numpy'):  # An empty completion does not hide it.
    reward([''], tests=[bad])


def test_entry_point_is_called_with_json_arguments_and_results():
  reward = code.Code(fenced=False)
  solution = 'class Solution:\n  def add(self, a, b): return (a + b, True)\ndef add(a, b): return [a + b, 1]'
  columns = dict(inputs=[[[1, 2]], ['1\n2'], [[1, 2]]], outputs=[[[3, True]], ['[3, true]'], [[3, True]]])
  names = ['Solution().add', 'Solution().add', 'add']
  assert reward([solution] * 3, entry_point=names, **columns) == [1.0, 1.0, 0.0]
  humaneval_tests = ['def check(candidate):\n  assert candidate(1, 2)[0] == 3']
  assert reward([solution], tests=[humaneval_tests], entry_point=['add']) == [1.0]


def test_values_compare_as_in_python_except_bools():
  for a, b, equal in (
    (1, 1.0, True),
    (True, 1, False),
    ([True], [1], False),
    ({0: 1}, {False: 1}, False),
    ((1,), [1], False),
    ({1, 2}, {2, 1}, True),
    ({'a': [1.0]}, {'a': [1]}, True),
  ):
    assert values.same(a, b) == equal
  assert values.same((1, (2,)), [1, [2]], exact=False)


def test_evaluator_handles_every_node_that_the_reader_accepts():
  for kind in checks._EVALUATED:
    assert kind == 'Starred' or hasattr(dialog.Evaluator, f'_{kind}'), kind


@pytest.mark.parametrize(
  'test', ['assert f(1) ** 10 ** 9 > 0', 'assert "a" * f(10 ** 12)', 'assert sum(range(f(10 ** 12)))']
)
def test_value_of_a_solution_cannot_make_the_judge_compute_forever(test):
  assert sandbox.run_tests('def f(x): return x + 2', [test], LIMITS) == [False]
