"""Tests that each method learns: it gains what learning.py requires, from the same seeded start."""

import concurrent.futures
import json
import multiprocessing
import pathlib
import re
import statistics

import learning
import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def child():
  """Returns a process that compiles with all optimizations, which pay off over thousands of steps."""
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv('XLA_FLAGS')
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn'))
    pool.submit(len, '').result()  # starts the process with this environment
  with pool:
    yield pool


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('learning')


def assert_learns(name, child, folder):
  """Asserts that a case of learning.py gains at least what it must, or loses it where `gain` is negative."""
  scores, case = child.submit(learning.measure, name, folder).result(), learning.CASES[name]
  change = scores['after'] - scores['before']
  assert change > case.gain if case.gain > 0 else change < case.gain, scores


@pytest.mark.parametrize('name', learning.CASES)
def test_learns(name, child, folder):
  assert_learns(name, child, folder)


def test_methods_page_lists_all_cases_with_their_required_gain():
  """docs/methods.md also has cases that no test trains."""
  page = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'methods.md'
  figures = json.loads(re.search('<!-- measured (.*) -->', page.read_text('utf-8')).group(1))
  cases = learning.CASES | learning.VARIANTS
  assert set(figures) == set(cases)
  for name, case in cases.items():
    change = statistics.mean(figures[name]['after']) - statistics.mean(figures[name]['before'])
    assert change > case.gain if case.gain > 0 else change < case.gain, (name, change)


def test_dynamic_sampling_leaves_no_group_without_variance(child, folder):
  for name in ('dapo', 'grpo'):
    if not (folder / name / 'summary.json').exists():
      assert_learns(name, child, folder)
  dapo_rows = learning.train_rows('dapo', folder)
  assert all(row['frac_reward_zero_std'] == 0 for row in dapo_rows)
  grpo_rows = learning.train_rows('grpo', folder)
  assert max(row['frac_reward_zero_std'] for row in grpo_rows) > 0
