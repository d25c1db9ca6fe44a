"""What each method learns from one start, seeded: the cases of learning.py."""

import learning
import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('learning')
  learning.make_start(path)
  return path


@pytest.mark.parametrize('name', learning.CASES)
def test_learns(name, folder):
  found, case = learning.measure(name, folder), learning.CASES[name]
  change = found['after'] - found['before']
  assert change > case.gain if case.gain > 0 else change < case.gain, found


def test_dynamic_sampling_leaves_no_group_without_variance(folder):
  rows = learning.train_rows('dapo', folder)
  assert all(row['frac_reward_zero_std'] == 0 for row in rows)
  plain = learning.train_rows('grpo', folder)
  assert max(row['frac_reward_zero_std'] for row in plain) > 0
