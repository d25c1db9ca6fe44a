"""The scorecard names tests that are there."""

import re

import pytest
import scorecard

PAGE = scorecard.CLONE / 'docs' / 'reliability.md'


@pytest.mark.parametrize('row', scorecard.ROWS, ids=lambda row: row.number)
def test_its_tests_are_there(row):
  lost = [test for test in (*row.tests, *row.more) if not scorecard.is_there(test)]
  assert not lost


def test_the_page_has_its_rows():
  numbers = re.findall(r'^\| (R\d+) \|', PAGE.read_text('utf-8'), re.M)
  assert numbers == [row.number for row in scorecard.ROWS]


def test_cases_are_counted_by_row():
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
