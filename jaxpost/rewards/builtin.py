"""The reward functions that go by a bare name, and what a spec names.

A spec is one of these names, 'pkg.module:fn', './file.py:fn' or a callable.
"""

import difflib

from jaxpost.errors import InputError

BUILTIN = {
    'exact_match': 'jaxpost.rewards.math:exact_match',
    'numeric_match': 'jaxpost.rewards.math:numeric_match',
    'gsm8k': 'jaxpost.rewards.math:gsm8k',
    'think_format': 'jaxpost.rewards.format:think_format',
    'regex_match': 'jaxpost.rewards.format:regex_match',
}


def locate(spec):
  """'module:fn' of a builtin's name; 'a.b:fn' and './f.py:fn' as they are."""
  if not isinstance(spec, str):
    raise InputError(
        f'reward: {spec!r} is a {type(spec).__name__}; write a builtin name,'
        ' pkg.module:function or ./file.py:function'
    )
  if ':' in spec:
    return spec
  if spec not in BUILTIN:
    near = difflib.get_close_matches(spec, BUILTIN, n=1)
    hint = f'did you mean {near[0]!r}? ' if near else ''
    raise InputError(
        f'reward: no builtin {spec!r}; {hint}there are {", ".join(BUILTIN)};'
        ' your own is written pkg.module:function or ./file.py:function'
    )
  return BUILTIN[spec]


def short_names(specs):
  """The names of metrics and errors: 'fn' for 'a.b:fn', if no two share it."""
  short = [_short(spec) for spec in specs]
  names = []
  for i, spec in enumerate(specs):
    if spec in specs[:i]:
      raise InputError(f'reward: {spec} is given twice; use reward_weights')
    if short.count(short[i]) == 1:
      names.append(short[i])
    else:
      names.append(spec if isinstance(spec, str) else f'{short[i]}_{i}')
  return tuple(names)


def _short(spec):
  if isinstance(spec, str):
    return spec.rpartition(':')[2]
  if hasattr(spec, '__name__'):
    return spec.__name__
  return type(spec).__name__
