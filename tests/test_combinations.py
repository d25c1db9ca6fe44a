"""Tests of every pair of method fields: it runs and keeps its invariants, or is refused with one line."""

import dataclasses
import pathlib

import combinations
import numpy as np
import pytest

CLONE = pathlib.Path(__file__).resolve().parents[1]
PAIRS = list(combinations.pairs())


@pytest.fixture(scope='module')
def refused():
  """Returns {pair: reason} of the pairs that are refused."""
  return {pair: reason for pair in PAIRS if (reason := combinations.refusal(*pair))}


@pytest.fixture(scope='module')
def updated(refused):
  """Returns {pair: (on policy, off policy)} of the pairs that run, each a `Case` with its `Update`.

  A pair with a default is the other choice alone. Of pairs with equal configs, one is run.
  """
  configs = {}
  for pair in PAIRS:
    if pair not in refused:
      config = combinations.config_of(*pair)
      configs.setdefault(repr(dataclasses.replace(config, algorithm='')), (pair, config))
  cases = [combinations.Case(config, on_policy) for _, config in configs.values() for on_policy in (True, False)]
  results = list(zip(cases, combinations.updates(cases)))
  return {pair: (results[2 * i], results[2 * i + 1]) for i, (pair, _) in enumerate(configs.values())}


def test_kl_in_reward_except_k1_and_k1_in_loss_are_always_refused(refused):
  """The pairs of all other choices are checked by running them."""
  runs = {choice for pair in PAIRS if pair not in refused for choice in pair}
  names = [f'{name} in the reward' for name in ('k2', 'k3', 'abs', 'k1+', 'k3+')]
  assert set(combinations.CHOICES) - runs == {('KL', name) for name in (*names, 'k1 in the loss')}


def test_refusals_are_one_line_that_names_a_field(refused):
  for pair, reason in refused.items():
    assert '\n' not in reason and reason.startswith('config.'), (pair, reason)


def test_methods_with_their_own_loss_refuse_unused_fields():
  """Other fields of these methods are covered by the tests of the methods."""
  common = [*(f'rollout.staleness={n}' for n in (1, 2)), 'rollout.top_p=0.9']
  means = ['rl.aggregate=sequence', 'rl.aggregate=constant']
  epochs, several = ['rl.epochs=2'], ['rl.minibatches=2', 'rl.epochs=2']
  assert combinations.taken('online_dpo') == [*common, 'rl.mask_truncated', *epochs, 'rl.dynamic_sampling=2']
  assert combinations.taken('rft') == [*means, *common, 'rl.mask_truncated', *several, 'rl.dynamic_sampling=2']
  assert combinations.taken('gkd') == [*means, *common, *several]


@pytest.mark.ci
@pytest.mark.long
def test_pairs_are_on_policy_at_the_first_step(updated):
  """Ratios and weights are 1, nothing is masked or clipped, and the KL is 0."""
  for pair, ((_, update), _) in updated.items():
    ones = ('ratio', 'importance_weight', 'off_policy_kept', 'sampler_mismatch')
    expected = dict.fromkeys(ones, update.total) | {'kl': 0}
    for name, value in expected.items():
      assert np.isclose(update.metrics.get(name, value), value, rtol=1e-5, atol=1e-7), (pair, name)
    assert not any(v for k, v in update.metrics.items() if k.startswith('clip_ratio/')), pair
    assert update.credit.metrics.get('kl', 0) == 0, pair


@pytest.mark.long
@pytest.mark.parametrize('where', ['on policy', 'off policy'])
def test_pairs_have_the_gradient_of_the_formulas(updated, where):
  """The gradient of the logits of a categorical policy is exact, over all groups that can be drawn.

  Off policy, the policies that sampled, that is trained and that is the reference differ, and so does the policy
  before the update if a rollout has several updates.
  """
  for pair, results in updated.items():
    case, update = results[where == 'off policy']
    expected = combinations.expected(*case)
    size = np.linalg.norm(expected)
    assert size > 1e-3, pair
    assert (update.gradient * expected).sum() > (1 - 1e-6) * size * np.linalg.norm(update.gradient), pair
    assert np.isclose(np.linalg.norm(update.gradient), size, rtol=1e-3), (pair, np.linalg.norm(update.gradient), size)


@pytest.mark.parametrize('field', ['rl.loss', 'KL', 'rl.importance', 'rl.aggregate', 'entropy control', 'rl.expert'])
def test_ignored_choices_would_be_detected(field):
  """Off policy, in the second update of a rollout, each choice must have another gradient than the default."""
  several = ('rl.epochs', '2')
  plain = combinations.expected(combinations.config_of(several), on_policy=False)
  without_effect = []
  for choice in combinations.FIELDS[field]:
    if not combinations.refusal(several, (field, choice)):
      gradient = combinations.expected(combinations.config_of(several, (field, choice)), on_policy=False)
      if np.linalg.norm(gradient - plain) < 1e-2 * np.linalg.norm(plain):
        without_effect.append(choice)
  never_active = {'entropy control': ['rl.clip_cov', 'rl.entropy_target']}.get(
    field, []
  )  # take no effect in the first step
  assert without_effect == [next(iter(combinations.FIELDS[field])), *never_active]


def test_combinations_page_is_up_to_date(monkeypatch):
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  import make_combinations_table

  text = (CLONE / 'docs' / 'combinations.md').read_text('utf-8')
  assert text == make_combinations_table.page(), 'run python docs/make_combinations_table.py'
