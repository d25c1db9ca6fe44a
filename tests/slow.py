"""A pytest plugin that writes tests/slow.txt: the tests that a plain `pytest` leaves out.

    PYTHONPATH=tests pytest --long -p slow     # from scratch
    PYTHONPATH=tests pytest -p slow            # adds what is still slow in a plain run

CI leaves out some of them, too: those that take more than LONGEST seconds and are not
marked `ci`, and of the others of one test function those of more than CHEAP seconds that
do not fit into BUDGET seconds with the cheaper ones. Where the cases of a function share
what takes the time, all run. `pytest --long` runs all tests; so does `.ci/run` where JAXPOST_CI_NIGHTLY=1.

A line is the seconds of a test and its name. A shared fixture is charged to the first
test that uses it, and then lists all cases of that test function; where other functions
use it too, they show up in the plain run.
"""

import collections
import pathlib

# Seconds on two cores with an empty compile cache, where they have AVX512_BF16; with AVX2 only, a test may take twice
# as long.
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
  # A case that takes nothing shows that another one has made what they share: to leave that one out gains nothing.
  whole = {function(test) for test, seconds in listed.items() if seconds < 0.1}
  spent = collections.Counter()
  left = set()
  for test in sorted(listed, key=lambda test: (listed[test], test)):
    name = function(test)
    late = listed[test] > CHEAP and name in spent and spent[name] + listed[test] > BUDGET
    if name not in whole and (late or listed[test] > LONGEST):
      left.add(test)
    else:
      spent[name] += listed[test]
  return left


def pytest_runtest_logreport(report):
  if 'nightly' in report.keywords:  # these are left out whatever they take
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
  rest = sum(took.total() for test, took in _took.items() if test not in slow)
  print(f'\n{len(slow)} tests are in {LIST.name}; the others took {rest:.0f} s together')
