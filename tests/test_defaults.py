"""Tests of the default hyperparameters of methods, and that docs/defaults.md lists them."""

import ast
import pathlib
import re

import pytest

from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib

CLONE = pathlib.Path(__file__).resolve().parents[1]
ROWS_OF_PAGE = {
  row[0]: row[1:]
  for row in re.findall(r'^\| `(\w+)` \| (\S+) \| (.*?) ?\| (.+) \|$', (CLONE / 'docs/defaults.md').read_text(), re.M)
}


def resolved(name, **over):
  parsed = config_lib.parse(dict(algorithm=name, **over))
  return config_lib.resolve(next(iter(parsed.values())), algorithms.load_algorithm(name).defaults)


def test_defaults_page_has_a_row_for_every_method():
  assert set(ROWS_OF_PAGE) == set(algorithms.ALGORITHMS)


@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
def test_defaults_page_has_the_actual_values(name):
  listed_lr, listed_fields, source = ROWS_OF_PAGE[name]
  config = resolved(name)
  assert config.optim.lr == pytest.approx(float(listed_lr)) and source
  for section, field, value in re.findall(r'`(\w+)\.(\w+)=(\S+?)`', listed_fields):
    actual = vars(vars(config)[section])[field]
    assert actual == type(actual)(value), (section, field)


def test_adapters_have_ten_times_the_learning_rate():
  assert resolved('grpo', lora=dict(rank=4)).optim.lr == pytest.approx(1e-5)
  assert resolved('sft', lora=dict(path='adapter')).optim.lr == pytest.approx(2e-4)
  for name in algorithms.ALGORITHMS:
    assert resolved(name, lora=dict(rank=4)).optim.lr == pytest.approx(10 * resolved(name).optim.lr), name


@pytest.mark.parametrize('lr', [0.0, 1e-5, 3e-3])
def test_learning_rate_of_the_config_is_kept(lr):
  assert resolved('grpo', optim=dict(lr=lr), lora=dict(rank=4)).optim.lr == lr


def test_default_critic_learning_rate_is_not_below_that_of_the_policy():
  assert resolved('ppo', optim=dict(lr=3e-3)).critic.lr == 3e-3
  assert resolved('ppo', optim=dict(lr=3e-3), critic=dict(lr=1e-4)).critic.lr == 1e-4
  assert resolved('ppo', critic=dict(value_head=True)).critic.lr == 0
  assert resolved('vapo', optim=dict(lr=3e-6)).critic.lr == pytest.approx(6e-6)


def test_defaults_of_a_loss_or_estimator_apply_only_to_it():
  """LUSPO's clip range is only for its loss, and GiGPO's discount of turns only for its estimator."""
  luspo = resolved('luspo', rl=dict(loss='clip')).rl
  assert (luspo.clip_low, luspo.clip_high, resolved('luspo').rl.clip_high) == (0.2, 0.2, 2.5e-3)
  assert (resolved('dapo', rl=dict(loss='clip')).rl.clip_high, resolved('vapo').rl.clip_high) == (0.28, 0.28)
  others = [resolved('gigpo', environment='x', rl=dict(advantage=x)).rl for x in ('group', 'mt_grpo')]
  assert [x.turn_gamma for x in others] == [1, 1] and resolved('gigpo', environment='x').rl.turn_gamma == 0.95


@pytest.mark.parametrize('path', sorted((CLONE / 'configs').glob('[!_]*.py')), ids=lambda path: path.stem)
def test_recipes_say_which_figure_to_expect(path):
  """The figure is published (docs/defaults.md) or was measured here, or the recipe says that none is known."""
  text = ' '.join(ast.get_docstring(ast.parse(path.read_text('utf-8'))).split())
  published = path.name in (CLONE / 'docs' / 'defaults.md').read_text('utf-8')
  measured = 'pass@1 of five seeds' in text or 'goes from 0.51 to 0.66' in text
  assert (
    ('docs/defaults.md' in text and published) or measured or 'No published figure is known for this recipe' in text
  )
