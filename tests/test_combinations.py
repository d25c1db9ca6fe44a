"""Every pair of method fields runs and keeps its invariants, or is refused with one line."""

import dataclasses
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
def updated(refused):
  """{pair: (on policy, off policy)} of those that run, a `Case` with its `Update` each.

  With a default, a pair is the other choice alone: of equal configs there is one.
  """
  configs = {}
  for pair in PAIRS:
    if pair not in refused:
      config = combinations.config_of(*pair)
      configs.setdefault(repr(dataclasses.replace(config, algorithm='')), (pair, config))
  cases = [combinations.Case(config, on_policy) for _, config in configs.values() for on_policy in (True, False)]
  found = list(zip(cases, combinations.updates(cases)))
  return {pair: (found[2 * i], found[2 * i + 1]) for i, (pair, _) in enumerate(configs.values())}


def test_choices_that_are_always_refused(refused):
  """All others are checked by running them."""
  runs = {choice for pair in PAIRS if pair not in refused for choice in pair}
  names = [f'{name} in the reward' for name in ('k2', 'k3', 'abs', 'k1+', 'k3+')]
  assert set(combinations.CHOICES) - runs == {('KL', name) for name in (*names, 'k1 in the loss')}


def test_refusals_are_one_line_that_names_a_field(refused):
  for pair, why in refused.items():
    assert '\n' not in why and why.startswith('config.'), (pair, why)


def test_methods_with_losses_of_their_own_refuse_what_they_do_not_read():
  """The rest is tested where these methods are."""
  common = [*(f'rollout.staleness={n}' for n in (1, 2)), 'rollout.top_p=0.9']
  means = ['rl.aggregate=sequence', 'rl.aggregate=constant']
  epochs, several = ['rl.epochs=2'], ['rl.minibatches=2', 'rl.epochs=2']
  assert combinations.taken('online_dpo') == [*common, 'rl.mask_truncated', *epochs, 'rl.dynamic_sampling=2']
  assert combinations.taken('rft') == [*means, *common, 'rl.mask_truncated', *several, 'rl.dynamic_sampling=2']
  assert combinations.taken('gkd') == [*means, *common, *several]


@pytest.mark.ci
@pytest.mark.long
def test_pairs_are_on_policy_at_the_first_step(updated):
  """Ratio and weights 1, nothing masked or clipped, KL 0."""
  for pair, ((_, found), _) in updated.items():
    ones = ('ratio', 'importance_weight', 'off_policy_kept', 'sampler_mismatch')
    expected = dict.fromkeys(ones, found.total) | {'kl': 0}
    for name, value in expected.items():
      assert np.isclose(found.metrics.get(name, value), value, rtol=1e-5, atol=1e-7), (pair, name)
    assert not any(v for k, v in found.metrics.items() if k.startswith('clip_ratio/')), pair
    assert found.credit.metrics.get('kl', 0) == 0, pair


@pytest.mark.long
@pytest.mark.parametrize('where', ['on policy', 'off policy'])
def test_pairs_have_the_gradient_of_the_formulas(updated, where):
  """The gradient of the logits of a categorical policy is the exact one, over all groups that can be drawn.

  Off policy, the policies that sampled, that is trained and that is the reference differ, and so does
  the one before the update if a rollout has several.
  """
  for pair, found in updated.items():
    case, update = found[where == 'off policy']
    wanted = combinations.expected(*case)
    size = np.linalg.norm(wanted)
    assert size > 1e-3, pair
    assert (update.gradient * wanted).sum() > (1 - 1e-6) * size * np.linalg.norm(update.gradient), pair
    assert np.isclose(np.linalg.norm(update.gradient), size, rtol=1e-3), (pair, np.linalg.norm(update.gradient), size)


@pytest.mark.parametrize('field', ['rl.loss', 'KL', 'rl.importance', 'rl.aggregate', 'entropy control', 'rl.expert'])
def test_choices_that_are_left_out_would_be_found(field):
  """Off policy, in the second update of a rollout, each has another gradient than the default."""
  several = ('rl.epochs', '2')
  plain = combinations.expected(combinations.config_of(several), on_policy=False)
  same = []
  for choice in combinations.FIELDS[field]:
    if not combinations.refusal(several, (field, choice)):
      other = combinations.expected(combinations.config_of(several, (field, choice)), on_policy=False)
      same += [choice] if np.linalg.norm(other - plain) < 1e-2 * np.linalg.norm(plain) else []
  idle = {'entropy control': ['rl.clip_cov', 'rl.entropy_target']}.get(field, [])  # out of reach, for the first step
  assert same == [next(iter(combinations.FIELDS[field])), *idle]


def test_the_page_is_up_to_date(monkeypatch):
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  import make_combinations_table

  text = (CLONE / 'docs' / 'combinations.md').read_text('utf-8')
  assert text == make_combinations_table.page(), 'run python docs/make_combinations_table.py'
