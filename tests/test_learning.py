"""Each method learns from one start, seeded: the cases of learning.py."""

import concurrent.futures
import multiprocessing

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
def folder(child, tmp_path_factory):
  path = tmp_path_factory.mktemp('learning')
  child.submit(learning.make_start, path).result()
  return path


@pytest.mark.parametrize('name', learning.CASES)
def test_learns(name, child, folder):
  found, case = child.submit(learning.measure, name, folder).result(), learning.CASES[name]
  change = found['after'] - found['before']
  assert change > case.gain if case.gain > 0 else change < case.gain, found


def test_dynamic_sampling_leaves_no_group_without_variance(folder):
  rows = learning.train_rows('dapo', folder)
  assert all(row['frac_reward_zero_std'] == 0 for row in rows)
  plain = learning.train_rows('grpo', folder)
  assert max(row['frac_reward_zero_std'] for row in plain) > 0
