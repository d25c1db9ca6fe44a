"""A pytest plugin that writes tests/slow.txt, the list of tests that a plain `pytest` leaves out.

    PYTHONPATH=tests pytest --long -p slow     # from scratch
    PYTHONPATH=tests pytest -p slow            # adds tests that are still slow in a plain run

CI leaves out some of them, too, unless they are marked `ci`: tests of more than LONGEST seconds, and cases of a test
function that take more than CHEAP seconds and do not fit into BUDGET seconds together with its cheaper cases. If the
cases of a function share the work that takes the time, CI runs all of them. `pytest --long` runs all tests, as does
`.ci/run` with JAXPOST_CI_NIGHTLY=1.

A line has the seconds of a test and its name. The time of a shared fixture counts for the first test that uses the
fixture, so all cases of that test function are listed; if other functions use the fixture, too, they are slow in the
plain run.
"""

import collections
import pathlib

# Seconds on two cores with AVX512_BF16 and an empty compile cache; with AVX2 only, a test may take twice as long.
LIMIT = 1.5
BUDGET = 5.0
LONGEST = 8.0
CHEAP = 3.0
LIST = pathlib.Path(__file__).with_name('slow.txt')
_took = collections.defaultdict(collections.Counter)  # test: {'setup', 'call', 'teardown': seconds}


def read():
  """{test: seconds} of tests/slow.txt."""
  rows = (line.split(maxsplit=1) for line in LIST.read_text('utf-8').splitlines())
  return {test: float(seconds) for seconds, test in rows}


def function(test):
  """The name of a test without its case."""
  return test.partition('[')[0]


def file(test):
  """The file of a test."""
  return test.partition('::')[0]


def nightly(listed):
  """The tests of `listed`, {test: seconds}, that CI leaves to `--long` unless they are marked `ci`."""
  # A case that takes no time uses what another case has made for both: to leave out that other case gains nothing.
  sharing = {function(test) for test, seconds in listed.items() if seconds < 0.1}
  spent = collections.Counter()
  left_out = set()
  for test in sorted(listed, key=lambda test: (listed[test], test)):
    name = function(test)
    over_budget = listed[test] > CHEAP and name in spent and spent[name] + listed[test] > BUDGET
    if name not in sharing and (over_budget or listed[test] > LONGEST):
      left_out.add(test)
    else:
      spent[name] += listed[test]
  return left_out


def pytest_runtest_logreport(report):
  if 'nightly' in report.keywords:  # these are left out in any case
    return
  _took[report.nodeid][report.when] += report.duration


def pytest_sessionfinish(session):
  if hasattr(session.config, 'workerinput') or not _took:
    return

  with_fixture = {function(test) for test, took in _took.items() if took['setup'] > LIMIT}
  slow = {} if session.config.getoption('--long') else read()
  for test, took in _took.items():
    if took.total() > LIMIT or function(test) in with_fixture:
      slow[test] = took.total()
  LIST.write_text(''.join(f'{slow[test]:.1f} {test}\n' for test in sorted(slow)), 'utf-8')
  others = sum(took.total() for test, took in _took.items() if test not in slow)
  print(f'\n{len(slow)} tests are in {LIST.name}; the others took {others:.0f} s together')
