"""Tests of which config sections each method reads: fields of the others are refused, and are not read."""

import dataclasses
import re

import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.stage import checks, prepare
from jaxpost.stage.algorithms import ALGORITHMS, load_algorithm

SECTIONS = ('nll', 'preference', 'reward_model', 'distill', 'rl', 'critic')


def stages(*methods, **shared):
  """Returns the config of a run with a stage for each of these methods."""
  return shared | dict(stages=methods) | {name: dict(algorithm=name) for name in methods}


@pytest.mark.parametrize(
  'config, field, method',
  [
    (dict(algorithm='dpo', rl=dict(kl_coef=0.1)), 'rl.kl_coef', 'dpo'),
    (dict(algorithm='orpo', rl=dict(reference='folder')), 'rl.reference', 'orpo'),  # ORPO has no reference
    (dict(algorithm='sft', preference=dict(beta=0.2)), 'preference.beta', 'sft'),
    (dict(algorithm='sft', rl=dict(correct_by='gsm8k')), 'rl.correct_by', 'sft'),  # SFT samples nothing
    (dict(algorithm='dpo', reward_model=dict(path='folder')), 'reward_model.path', 'dpo'),
    (dict(algorithm='grpo', critic=dict(lam=0.5)), 'critic.lam', 'grpo'),
    (dict(algorithm='grpo', critic=dict(path='folder')), 'critic.path', 'grpo'),
    (dict(algorithm='ppo', nll=dict(label_smoothing=0.1)), 'nll.label_smoothing', 'ppo'),
    (dict(algorithm='kto', distill=dict(beta=0.1)), 'distill.beta', 'kto'),
    (stages('sft', 'grpo', preference=dict(beta=0.2)), 'preference.beta', 'sft'),
  ],
)
def test_field_that_no_stage_reads_is_refused(config, field, method):
  with pytest.raises(InputError, match=rf'^config\.{re.escape(field)}: {method} would ignore it'):
    prepare.resolve_all(config)


@pytest.mark.parametrize(
  'field, value',
  [('reward', 'gsm8k'), ('reward_weights', (1.0,)), ('environment', './a.py:A'), ('train_on_rollouts', 'x')],
)
def test_field_of_sampling_is_warned_of_if_no_stage_samples(field, value, caplog):
  """It may be of a recipe whose evaluation is off, or of a user who left out --config.algorithm=grpo."""
  evaluated = dict(eval=dict(samples=2, data=dict(path='file.jsonl')))
  for config in (
    dict(algorithm='sft'),
    stages('sft', 'grpo'),
    dict(algorithm='grpo'),
    dict(algorithm='sft') | evaluated,
  ):
    prepare.resolve_all({**config, field: value})
  (warning,) = caplog.messages
  assert warning.startswith(f'config.{field} changes nothing: no stage samples (config.algorithm, ')


@pytest.mark.parametrize(
  'config',
  [
    stages('sft', 'dpo', preference=dict(beta=0.2), nll=dict(label_smoothing=0.1)),
    dict(algorithm='dpo', rl=dict(reference='folder')),
    dict(
      algorithm='sft', reward='gsm8k', rl=dict(correct_by='gsm8k'), eval=dict(samples=2, data=dict(path='file.jsonl'))
    ),
    dict(algorithm='docs/examples/actor_critic.py', critic=dict(lr=0.1), preference=dict(beta=0.2)),
  ],
)
def test_field_that_some_stage_may_read_is_accepted(config):
  assert prepare.resolve_all(config)


class Unread:
  """Stands in for a config section that must not be read."""

  def __init__(self, name):
    self.name = name

  def __getattribute__(self, name):
    raise AssertionError(f'config.{object.__getattribute__(self, "name")} is read')


@pytest.mark.parametrize('name', ALGORITHMS)
def test_methods_read_only_the_sections_they_declare(name):
  algorithm = load_algorithm(name)
  over = dict(distill=dict(teachers=('folder',))) if name in ('distill', 'gkd', 'opd') else {}
  over |= dict(environment='./env.py:Env') if name in ('mt_grpo', 'gigpo') else {}
  ((_, (_, config)),) = prepare.resolve_all(tiny.merged(dict(algorithm=name, reward='gsm8k'), over)).items()
  assert set(algorithm.sections) < set(SECTIONS)
  config = dataclasses.replace(config, **{key: Unread(key) for key in set(SECTIONS) - set(algorithm.sections)})
  algorithm.check(config)
  for function in (algorithm.objective, algorithm.critic, algorithm.value_head, algorithm.needs, algorithm.precompute):
    function(config)
  for function in (algorithm.mean_per, algorithm.data_share, algorithm.scores, algorithm.greedy_baseline):
    function(config)
  assert checks.samples(config, algorithm) == algorithm.on_policy
