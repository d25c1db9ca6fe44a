"""The table of algorithms by name, and how a config's algorithm is found."""

import importlib

from jaxpost.algorithms.base import Algorithm
from jaxpost.errors import InputError, did_you_mean

# Module in jaxpost/algorithms/ -> the names of its algorithms; the module calls them the same in capitals.
_OF_MODULES = {
  'sft': 'sft',
  'preference': 'dpo orpo cpo simpo ld_dpo wpo',
  'kto': 'kto',
  'reward_model': 'reward_model',
  'distill': 'distill gkd',
  'opd': 'opd',
  'grpo': 'grpo dr_grpo dapo gspo cispo sapo gmpo luspo vespo dro dppo gpg opo maxrl pass_at_k mt_grpo gigpo rloo '
  'reinforce_pp reinforce_pp_baseline remax',
  'rft': 'rft',
  'ppo': 'ppo vapo',
  'online_dpo': 'online_dpo',
}
# Name -> module:attribute of its `Algorithm`.
ALGORITHMS = {name: f'{module}:{name.upper()}' for module, names in _OF_MODULES.items() for name in names.split()}


def load_algorithm(name: str) -> Algorithm:
  """Returns the Algorithm that `config.algorithm` names.

  Args:
    name: a name in ALGORITHMS, pkg.module or ./file.py; with :NAME if the module
      does not call it ALGORITHM.

  Raises:
    InputError: there is none, or it is incomplete.
  """
  target, _, attribute = ALGORITHMS.get(name, name).partition(':')
  if name in ALGORITHMS:
    return vars(importlib.import_module(f'jaxpost.algorithms.{target}'))[attribute]
  if '.' not in target:
    raise InputError(
      f'config.algorithm: there is no {name!r}; {did_you_mean(name, ALGORITHMS)}built in: {", ".join(ALGORITHMS)}, or '
      'pkg.module or ./file.py of yours'
    )
  from jaxpost.stage import own_code

  return own_code.load_algorithm(target, attribute or 'ALGORITHM')
