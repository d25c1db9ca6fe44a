"""The table of algorithms by name, and how a config's algorithm is found."""

import importlib

from jaxpost.algorithms.base import Algorithm
from jaxpost.errors import InputError, did_you_mean

# Name -> module:attribute of its `Algorithm`, in jaxpost/algorithms/.
ALGORITHMS = {
  'sft': 'sft:SFT',
  'dpo': 'preference:DPO',
  'orpo': 'preference:ORPO',
  'cpo': 'preference:CPO',
  'simpo': 'preference:SIMPO',
  'ld_dpo': 'preference:LD_DPO',
  'wpo': 'preference:WPO',
  'kto': 'kto:KTO',
  'reward_model': 'reward_model:REWARD_MODEL',
  'distill': 'distill:DISTILL',
  'gkd': 'distill:GKD',
  'opd': 'opd:OPD',
  'grpo': 'grpo:GRPO',
  'dr_grpo': 'grpo:DR_GRPO',
  'dapo': 'grpo:DAPO',
  'gspo': 'grpo:GSPO',
  'cispo': 'grpo:CISPO',
  'sapo': 'grpo:SAPO',
  'gmpo': 'grpo:GMPO',
  'luspo': 'grpo:LUSPO',
  'vespo': 'grpo:VESPO',
  'dro': 'grpo:DRO',
  'dppo': 'grpo:DPPO',
  'gpg': 'grpo:GPG',
  'opo': 'grpo:OPO',
  'maxrl': 'grpo:MAXRL',
  'pass_at_k': 'grpo:PASS_AT_K',
  'mt_grpo': 'grpo:MT_GRPO',
  'gigpo': 'grpo:GIGPO',
  'rloo': 'grpo:RLOO',
  'reinforce_pp': 'grpo:REINFORCE_PP',
  'reinforce_pp_baseline': 'grpo:REINFORCE_PP_BASELINE',
  'remax': 'grpo:REMAX',
  'rft': 'rft:RFT',
  'ppo': 'ppo:PPO',
  'vapo': 'ppo:VAPO',
  'online_dpo': 'online_dpo:ONLINE_DPO',
}


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
  from jaxpost import imports

  module = imports.load_module(target, 'config.algorithm')
  attribute = attribute or 'ALGORITHM'
  found = vars(module).get(attribute)
  if not isinstance(found, Algorithm):
    raise InputError(
      f'config.algorithm: {target} has no {attribute} = jaxpost.Algorithm(...); docs/your_algorithm.md shows one'
    )
  if not found.on_policy and found.render is None:
    raise InputError(
      f'config.algorithm: {target}: neither on_policy nor a `render` for '
      'data; jaxpost.algorithms.sft.render_text is that of SFT'
    )
  return found
