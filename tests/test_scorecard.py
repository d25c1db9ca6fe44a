"""The reliability scorecard (tests/scorecard.py): its rows, the counts of their cases, limits of soaks, and signals."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import scorecard

PAGE = scorecard.CLONE / 'docs' / 'reliability.md'


@pytest.mark.parametrize('row', scorecard.ROWS, ids=lambda row: row.number)
def test_tests_of_each_row_exist(row):
  missing = [test for test in (*row.tests, *row.more) if not scorecard.is_there(test)]
  assert not missing


def test_reliability_page_has_the_rows_of_the_scorecard():
  numbers = re.findall(r'^\| (R\d+) \|', PAGE.read_text('utf-8'), re.M)
  assert numbers == [row.number for row in scorecard.ROWS]
  cells = [line.split('|')[2].strip() for line in PAGE.read_text('utf-8').splitlines() if line.startswith('| R')]
  stale = [row.number for row, cell in zip(scorecard.ROWS, cells) if cell != row.what]
  assert not stale, 'run python -m tests.scorecard'


def test_passed_and_failed_cases_are_counted_by_row():
  plugin = scorecard.Collector({'R1': ('test_a.py::test_x',), 'R2': ('test_a.py',)})
  plugin.rows |= {'tests/test_a.py::test_x[0]': ['R1', 'R2']}

  class Report:
    nodeid, duration, user_properties = 'tests/test_a.py::test_x[0]', 1.0, [('cases', 7)]

    def __init__(self, when, outcome):
      self.when, self.outcome = when, outcome

  for report in (Report('setup', 'passed'), Report('call', 'passed'), Report('call', 'failed')):
    plugin.pytest_runtest_logreport(report)
  assert plugin.counts['R1'] == plugin.counts['R2'] == {'passed': 7, 'failed': 7, 'seconds': 2.0}
  assert plugin.failed == [Report.nodeid]


def test_soak_fails_if_memory_files_or_threads_grow():
  """After its first third, a soak may not add more than 1 % of memory per hour, a file, or a thread."""
  flat = [(float(n), 500.0, 16, 34, n) for n in range(90)]

  def end(*measured):
    return [*flat, *((90.0 + n, *measured, 90 + n) for n in range(10))]

  assert scorecard.grown([(0.0, 100.0, 1, 1, 0), *flat]) == []
  assert scorecard.grown(end(504.0, 16, 34)) == []
  assert scorecard.grown(end(506.0, 17, 35)) == [
    'MB of memory grew from 500 to 506',
    'open files grew from 16 to 17',
    'threads grew from 34 to 35',
  ]
  assert scorecard.grown([*flat, (90.0, 500.0, 28, 44, 90)]) == []  # a single peak, as within a save, is no growth
  assert scorecard.grown([*flat, (4 * 3600.0, 515.0, 16, 34, 99)]) == []


TESTS = """
import os, pathlib, time

def test_quick(record_property):
  record_property('cases', 3)

def test_slow():
  if not os.fork():
    os.setsid()
    while True:
      pathlib.Path(os.environ['ALIVE']).touch()
      time.sleep(0.01)
  time.sleep(600)
"""


def test_sigterm_ends_all_processes_and_prints_partial_results(tmp_path):
  """Even a process that a test has started in a session of its own is ended."""
  (tmp_path / 'tests').mkdir()
  (tmp_path / 'tests' / '__init__.py').touch()
  (tmp_path / 'tests' / 'test_x.py').write_text(TESTS)
  rows = "ROWS = (Row('R1', 'a', 'cases', ('test_x.py',)),)"
  source = pathlib.Path(scorecard.__file__).read_text('utf-8')
  begin, end = source.index('ROWS = ('), source.index('class Collector')
  (tmp_path / 'tests' / 'scorecard.py').write_text(f'{source[:begin]}{rows}\n\n\n{source[end:]}')
  (tmp_path / 'tests' / 'conftest.py').write_text(
    "def pytest_addoption(parser): parser.addoption('--long', action='store_true')"
  )
  alive = tmp_path / 'alive'
  process = subprocess.Popen(
    [sys.executable, '-m', 'tests.scorecard'],
    cwd=tmp_path,
    text=True,
    env=os.environ | {'ALIVE': str(alive), 'PYTHONPATH': f'{tmp_path}:{scorecard.CLONE}'},
    stdout=subprocess.PIPE,
  )
  while not alive.exists():
    assert process.poll() is None
    time.sleep(0.05)
  process.terminate()
  printed, _ = process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGTERM
  assert '| R1 | a | 3 of 3 cases; 1 tests were not run |' in printed
  alive.unlink()
  time.sleep(0.3)
  assert not alive.exists()
