"""The reward model as a role: which stage uses it, where its weights are, what it weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.stage.config import Config
  from jaxpost.stage.sources import Source

NAME = 'reward_model'  # in config.reward: a role, not a function
KEY = 'config.reward_model.path'


def is_used(config: Config, algorithm: Algorithm) -> bool:
  """True if the stage loads a reward model: it learns from rewards, and one is among them."""
  return algorithm.on_policy and algorithm.rewards and NAME in config.rewards_tuple()


def find(config: Config, earlier: Mapping[str, Source], find_source: Callable) -> Source:
  """Finds its weights by `find_source`, see `sources.find`; `earlier` is {stage: Source}."""
  path = config.reward_model.path
  if not path:
    raise InputError(f'{KEY}: is empty, and config.reward asks for a reward model; name a folder, RUN or stage:NAME')
  source = find_source(path, KEY, earlier)
  if not source.config.num_labels:
    raise InputError(f'{KEY}: {path} is a language model, it has no head that gives a reward')
  return source


def correct_by(config: Config, model_grades: bool) -> str:
  """Returns the name of the reward that decides what is correct; '' where nothing is graded.

  Args:
    model_grades: whether a reward model is among the roles of the stage.

  Raises:
    InputError: config.rl.correct_by is no reward of the stage.
  """
  from jaxpost.rewards import builtin

  names = list(builtin.short_names([spec for spec in config.rewards_tuple() if spec != NAME]))
  names += ['environment'] * bool(config.environment) + [NAME] * model_grades
  return builtin.pick(names, config.rl.correct_by, 'config.rl.correct_by')
