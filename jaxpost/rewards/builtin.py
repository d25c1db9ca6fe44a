"""The reward functions that go by a bare name, and what a spec names.

A spec is one of these names, 'pkg.module:fn', './file.py:fn', one of verl's
functions as 'verl:pkg.module:fn', or a callable. All but the last take options
as 'name?key=value&key=value' (options.py).
"""

import difflib
import re

from jaxpost.errors import InputError

# name: (module:what of jaxpost.rewards, help)
BUILTIN = {
  'exact_match': ('math:exact_match', 'the text is the answer'),
  'numeric_match': ('math:numeric_match', 'its last number is the answer'),
  'gsm8k': ('math:gsm8k', 'the number after #### or boxed is the answer'),
  'math_verify': ('math:MathVerify', 'its LaTeX equals the answer'),
  'think_format': ('format:think_format', '<think>...</think> comes first'),
  'tag_format': ('format:TagFormat', 'it is made of these tags, in order'),
  'regex_match': ('format:RegexMatch', 'a pattern is found in it'),
  'json_schema': ('format:JsonSchema', 'it is JSON that fits a schema'),
  'length': ('length:Length', '1 at a number of tokens, less off it'),
  'cosine_length': ('length:CosineLength', 'right and short is best'),
  'overlong': ('length:Overlong', 'below 0 near the limit of tokens'),
  'repetition': ('length:Repetition', 'below 0 for repeated n-grams'),
  'code': ('code:Code', 'its Python passes the tests, in a sandbox'),
  'judge': ('judge:Judge', 'the score of a model behind a URL'),
}


def locate(spec):
  """'module:fn' of a builtin's name; 'a.b:fn' and './f.py:fn' as they are.

  Options stay at its end.
  """
  if not isinstance(spec, str):
    raise InputError(
      f'reward: {spec!r} is a {type(spec).__name__}; write a builtin name, pkg.module:function or ./file.py:function'
    )
  base, mark, options = spec.partition('?')
  if ':' in base:
    return spec
  if base not in BUILTIN:
    near = difflib.get_close_matches(base, BUILTIN, n=1)
    hint = f'did you mean {near[0]!r}? ' if near else ''
    if '=' in base:
      hint = 'options are written name?key=value&key=value, a comma as %2C; '
    raise InputError(
      f'reward: no builtin {base!r}; {hint}there are {", ".join(BUILTIN)}'
      ' (docs/rewards.md);'
      ' your own is written pkg.module:function or ./file.py:function'
    )
  return f'jaxpost.rewards.{BUILTIN[base][0]}{mark}{options}'


def variables(specs):
  """Environment variables that options called *_env name: a judge's key."""
  return [
    name for spec in specs if isinstance(spec, str) for name in re.findall(r'(?<=_env=)[^&]+', spec.partition('?')[2])
  ]


def short_names(specs):
  """The names of metrics and errors: 'fn' for 'a.b:fn?x=1', all different."""
  bases = [s.partition('?')[0] if isinstance(s, str) else s for s in specs]
  short = [_short(base) for base in bases]
  names = []
  for i, spec in enumerate(specs):
    if spec in specs[:i]:
      raise InputError(f'reward: {spec} is given twice; use reward_weights')
    same = [b for b, s in zip(bases, short) if s == short[i] and b != bases[i]]
    name = bases[i] if same and isinstance(spec, str) else short[i]
    number = 1
    while (name if number == 1 else f'{name}_{number}') in names:
      number += 1  # one function with other options
    names.append(name if number == 1 else f'{name}_{number}')
  return tuple(names)


def _short(spec):
  if isinstance(spec, str):
    return spec.rpartition(':')[2]
  if hasattr(spec, '__name__'):
    return spec.__name__
  return type(spec).__name__
