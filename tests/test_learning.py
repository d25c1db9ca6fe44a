"""Each method learns from one start, seeded: the cases of learning.py."""

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
  """A process whose programs are optimized: thousands of steps take longer than their compilation."""
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv('XLA_FLAGS')
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn'))
    pool.submit(len, '').result()  # starts it, with this environment
  with pool:
    yield pool


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('learning')


def learns(name, child, folder):
  found, case = child.submit(learning.measure, name, folder).result(), learning.CASES[name]
  change = found['after'] - found['before']
  assert change > case.gain if case.gain > 0 else change < case.gain, found


@pytest.mark.parametrize('name', learning.CASES)
def test_learns(name, child, folder):
  learns(name, child, folder)


def test_the_page_has_all_cases_and_each_has_learned():
  """docs/methods.md, also of those that no test trains."""
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
      learns(name, child, folder)
  rows = learning.train_rows('dapo', folder)
  assert all(row['frac_reward_zero_std'] == 0 for row in rows)
  plain = learning.train_rows('grpo', folder)
  assert max(row['frac_reward_zero_std'] for row in plain) > 0
