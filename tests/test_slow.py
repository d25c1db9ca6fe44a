"""Which tests run in a plain `pytest`, in CI, and with `--long` (tests/slow.py, tests/conftest.py)."""

from types import SimpleNamespace

import conftest
import pytest
import slow

# Most seconds of tests/slow.txt that CI may run besides the tests marked `ci`; lower it where possible. On two slow
# cores, one such second takes about a second on the clock, and CI has 90 minutes.
LIMIT = 2220


def test_the_costliest_do_not_run_in_ci():
  listed = {'f.py::a[x]': 9.0, 'f.py::a[y]': 8.0, 'f.py::a[z]': 4.0, 'f.py::b': 90.0, 'g.py::a[x]': 3.0}
  assert slow.nightly(listed) == {'f.py::a[x]', 'f.py::a[y]', 'f.py::b'}
  shared_cost = {'f.py::c[x]': 90.0, 'f.py::c[y]': 0.0, 'f.py::c[z]': 9.0}
  assert slow.nightly(listed | shared_cost) == {'f.py::a[x]', 'f.py::a[y]', 'f.py::b'}
  cheap_cases = {f'f.py::d[{i}]': 3.0 for i in range(9)}
  assert slow.nightly(listed | cheap_cases) == {'f.py::a[x]', 'f.py::a[y]', 'f.py::b'}
  listed['f.py::a[z]'] = 50.0
  assert slow.nightly(listed) == {'f.py::a[x]', 'f.py::a[z]', 'f.py::b'}


def test_ci_ends_in_time():
  listed = slow.read()
  assert sum(listed[test] for test in set(listed) - slow.nightly(listed)) < LIMIT


SLOW = {'f.py::t[a]': 15.0, 'f.py::t[b]': 7.0, 'f.py::long': 90.0, 'g.py::ci': 95.0, 'g.py::core': 80.0}
ALL = [*SLOW, 'f.py::fast', 'g.py::nightly']


@pytest.mark.parametrize(
  'ci, args, long, ran',
  [
    ('', [], False, ['g.py::core', 'f.py::fast']),
    ('true', [], False, ['g.py::ci', 'g.py::core', 'f.py::t[b]', 'f.py::fast']),
    ('true', ['f.py::long'], False, ['g.py::ci', 'g.py::core', 'f.py::t[b]', 'f.py::long', 'f.py::fast']),
    ('true', [], True, ALL),
    ('', [], True, ALL),
  ],
)
def test_plain_ci_and_long_runs_select_their_tests(ci, args, long, ran, monkeypatch):
  """Tests are named after their marks. With CI or --long, the file that takes longest comes first."""
  monkeypatch.setenv('CI', ci)
  monkeypatch.setattr(slow, 'read', lambda: SLOW)
  ids = ['f.py::t[a]', 'f.py::t[b]', 'f.py::long', 'f.py::fast', 'g.py::ci', 'g.py::core', 'g.py::nightly']
  items = [SimpleNamespace(nodeid=n, get_closest_marker=lambda mark, n=n: n.endswith(f'::{mark}')) for n in ids]
  deselected = []
  hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
  conftest.pytest_collection_modifyitems(SimpleNamespace(args=args, getoption=lambda name: long, hook=hook), items)
  assert sorted(item.nodeid for item in items) == sorted(ran)
  assert {item.nodeid for item in items} | {item.nodeid for item in deselected} == set(ids)
  if ci or long:
    assert [item.nodeid[0] for item in items] == sorted((n[0] for n in ran), reverse=True)
