"""The reward model as a role: which stage asks it, and what it must be."""

from jaxpost.errors import InputError
from jaxpost.stage import find_weights, sources

NAME = 'reward_model'  # in config.reward: a role, not a function
KEY = 'config.reward_model.path'


def is_asked(config, algorithm) -> bool:
  """Only what learns from rewards loads the model that gives them."""
  return algorithm.on_policy and algorithm.rewards and NAME in config.rewards_tuple()


def find(config, earlier: dict, find_source=find_weights.find) -> sources.Source:
  """Its weights; `earlier` is {stage: ModelConfig}."""
  path = config.reward_model.path
  if not path:
    raise InputError(f'{KEY}: is empty, and config.reward asks for a reward model; name a folder, RUN or stage:NAME')
  source = find_source(path, KEY, earlier)
  if not source.config.num_labels:
    raise InputError(f'{KEY}: {path} is a language model, it has no head that gives a reward')
  return source


def weight(config) -> float:
  """Of the reward model beside the reward functions."""
  specs = config.rewards_tuple()
  if not config.reward_weights or NAME not in specs:
    return 1.0
  return config.reward_weights[specs.index(NAME)]
