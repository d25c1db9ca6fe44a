"""A pytest plugin that writes tests/slow.txt: the tests that a plain `pytest` leaves to CI.

    CI=true PYTHONPATH=tests pytest -p slow    # from scratch
    PYTHONPATH=tests pytest -p slow            # adds what is still slow in a plain run

A line is the seconds of a test and its name. A shared fixture is charged to the first
test that uses it, and then lists all cases of that test function; where other functions
use it too, they show up in the plain run.
"""

import collections
import os
import pathlib

LIMIT = 3.0  # seconds, on 2 cores with an empty compile cache
LIST = pathlib.Path(__file__).with_name('slow.txt')
_took = collections.defaultdict(collections.Counter)  # test: {'setup', 'call', 'teardown': seconds}


def read():
  """{test: seconds} of tests/slow.txt."""
  rows = (line.split(maxsplit=1) for line in LIST.read_text('utf-8').splitlines())
  return {test: float(seconds) for seconds, test in rows}


def pytest_runtest_logreport(report):
  _took[report.nodeid][report.when] += report.duration


def pytest_sessionfinish(session):
  if hasattr(session.config, 'workerinput') or not _took:
    return

  def function(test):
    return test.partition('[')[0]

  with_fixture = {function(test) for test, took in _took.items() if took['setup'] > LIMIT}
  slow = {} if os.environ.get('CI') == 'true' else read()
  for test, took in _took.items():
    if took.total() > LIMIT or function(test) in with_fixture:
      slow[test] = took.total()
  LIST.write_text(''.join(f'{slow[test]:.1f} {test}\n' for test in sorted(slow)), 'utf-8')
  rest = sum(took.total() for test, took in _took.items() if test not in slow)
  print(f'\n{len(slow)} tests are in {LIST.name}; the others took {rest:.0f} s together')
