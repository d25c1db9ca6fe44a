"""Every pair of method fields runs and keeps its invariants, or is refused with one line."""

import pathlib

import combinations
import numpy as np
import pytest

CLONE = pathlib.Path(__file__).resolve().parents[1]
PAIRS = list(combinations.pairs())


@pytest.fixture(scope='module')
def refused():
  """{pair: why}."""
  return {pair: why for pair in PAIRS if (why := combinations.refusal(*pair))}


@pytest.fixture(scope='module')
def checked():
  """Configs that have run."""
  return set()


def test_choices_that_are_always_refused(refused):
  """All others are checked by running them."""
  runs = {choice for pair in PAIRS if pair not in refused for choice in pair}
  names = [f'{name} in the reward' for name in ('k2', 'k3', 'abs', 'k1+', 'k3+')]
  assert set(combinations.CHOICES) - runs == {('KL', name) for name in (*names, 'k1 in the loss')}


def test_refusals_are_one_line_that_names_a_field(refused):
  for pair, why in refused.items():
    assert '\n' not in why and why.startswith('config.'), (pair, why)


@pytest.mark.parametrize('field', list(combinations.FIELDS))
def test_pairs_are_on_policy_at_the_first_step(field, refused, checked):
  """Ratio and weights 1, nothing masked or clipped, KL 0, the gradient -A of each token."""
  given = combinations.experience()
  for pair in PAIRS:
    if pair in refused or pair[0][0] != field:
      continue
    config = combinations.config_of(*pair)
    if repr(config) in checked:
      continue  # with a default, the pair is the other choice alone
    checked.add(repr(config))
    gradient, wanted, metrics, credit = combinations.update(config, given)
    total = combinations.total_weight(config, credit)
    ones = ('ratio', 'importance_weight', 'off_policy_kept', 'sampler_mismatch')
    expected = dict.fromkeys(ones, total) | {'kl': 0}
    for name, value in expected.items():
      assert np.isclose(metrics.get(name, value), value, rtol=1e-5, atol=1e-7), (pair, name)
    assert not any(float(v) for k, v in metrics.items() if k.startswith('clip_ratio/')), pair
    assert credit.metrics.get('kl', 0) == 0, pair
    rl = config.rl
    if rl.kl_weighted:
      continue  # a constant beside it, which has no mean: tests/test_exact_gradients.py
    assert np.abs(wanted).max() > 1e-3, pair
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7, err_msg=str(pair))


def test_the_page_is_up_to_date(monkeypatch):
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  import make_combinations_table

  text = (CLONE / 'docs' / 'combinations.md').read_text('utf-8')
  assert text == make_combinations_table.page(), 'run python docs/make_combinations_table.py'
