"""Each on-policy method raises pass@1 from one start, seeded.

Preferences, reward models, PPO, distillation and the rest are held to what
they learn in the files of their own tests.
"""

import learning
import pytest

FAMILY = ('grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'sapo', 'rloo',
          'reinforce_pp', 'reinforce_pp_baseline', 'remax')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('learning')
  learning.run('start', learning.start_config(), path)
  return path


@pytest.mark.parametrize('name', FAMILY)
def test_learns(name, folder):
  found = learning.measure(name, folder)
  case = learning.CASES[name]
  assert found['after'] - found['before'] > case.gain, found
