"""Which tests run where: a plain `pytest`, CI, and `--long`."""

from types import SimpleNamespace

import conftest
import pytest
import slow

# Seconds of tests/slow.txt that CI runs; it falls. On two slow cores a second of the list takes about one on the clock.
LIMIT = 4300


def test_of_the_cases_of_a_function_the_cheapest_run_in_ci():
  listed = {'f.py::a[x]': 30.0, 'f.py::a[y]': 20.0, 'f.py::a[z]': 5.0, 'f.py::b': 90.0, 'g.py::a[x]': 3.0}
  assert slow.nightly(listed) == {'f.py::a[x]', 'f.py::a[y]'}
  shared = {'f.py::c[x]': 90.0, 'f.py::c[y]': 0.0, 'f.py::c[z]': 9.0}
  assert slow.nightly(listed | shared) == {'f.py::a[x]', 'f.py::a[y]'}
  listed['f.py::a[z]'] = 50.0
  assert slow.nightly(listed) == {'f.py::a[x]', 'f.py::a[z]'}


def test_ci_runs_each_function_and_ends_in_time():
  listed = slow.read()
  run = set(listed) - slow.nightly(listed)
  assert {slow.function(test) for test in run} == {slow.function(test) for test in listed}
  assert sum(listed[test] for test in run) < LIMIT


@pytest.mark.parametrize(
  'ci, args, long, ran',
  [
    ('', [], False, ['f.py::fast']),
    ('', [], True, ['f.py::t[a]', 'f.py::t[b]', 'f.py::fast']),
    ('true', [], False, ['f.py::t[b]', 'f.py::fast']),
    ('true', ['f.py::t[a]'], False, ['f.py::t[a]', 'f.py::t[b]', 'f.py::fast']),
    ('true', [], True, ['f.py::t[a]', 'f.py::t[b]', 'f.py::fast']),
  ],
)
def test_what_runs(ci, args, long, ran, monkeypatch):
  """Of two slow cases CI runs the cheaper one; a test that is named on the command line runs in any case."""
  monkeypatch.setenv('CI', ci)
  monkeypatch.setattr(slow, 'read', lambda: {'f.py::t[a]': 30.0, 'f.py::t[b]': 20.0})
  items = [
    SimpleNamespace(nodeid=n, get_closest_marker=lambda name: None) for n in ('f.py::t[a]', 'f.py::t[b]', 'f.py::fast')
  ]
  left = []
  config = SimpleNamespace(
    args=args, getoption=lambda name: long, hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
  )
  conftest.pytest_collection_modifyitems(config, items)
  assert [item.nodeid for item in items] == ran
  assert len(items) + len(left) == 3
