"""The table of built-in rewards, and how a reward spec is resolved.

A spec is a name of this table, 'pkg.module:fn', './file.py:fn', a function written for verl as 'verl:pkg.module:fn', or
a callable. All but a callable accept options: 'name?key=value&key=value' (options.py).
"""

import itertools
import re
from collections.abc import Callable, Sequence

from jaxpost.errors import InputError, did_you_mean, type_of

PACKAGE = 'jaxpost.rewards.'
# name: (module:attribute below jaxpost.rewards, help text: a completion gets 1 if ..., or the reward)
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
  'ifeval': ('ifeval:ifeval', 'it follows all instructions, as IFEval has them'),
  'judge': ('judge:Judge', 'the score of a model behind a URL'),
  'rank_judge': ('rank_judge:RankJudge', 'its place in the order of such a model'),
}


def locate(spec: str) -> str:
  """Resolves the name of a built-in reward to 'module:fn'; other specs are returned unchanged, options included.

  Raises:
    InputError: if there is no reward of that name.
  """
  if not isinstance(spec, str):
    raise InputError(
      f'reward: {spec!r} is {type_of(spec)}; write a builtin name, pkg.module:function or ./file.py:function'
    )
  base, mark, options = spec.partition('?')
  if ':' in base:
    return spec
  if base.endswith('.py'):
    raise InputError(f'reward: {base} is a file; name its function, too: {base}:FUNCTION')
  if base not in BUILTIN:
    hint = did_you_mean(base, BUILTIN)
    if '=' in base:
      hint = 'options are written name?key=value&key=value, a comma as %2C; '
    raise InputError(
      f'reward: no built-in reward {base!r}; {hint}there are {", ".join(BUILTIN)} (docs/rewards.md);'
      ' write a custom reward as pkg.module:function or ./file.py:function'
    )
  return f'{PACKAGE}{BUILTIN[base][0]}{mark}{options}'


def needed_variables(specs: Sequence[str | Callable]) -> list[str]:
  """Returns the environment variables that options called *_env name, such as the API key of a judge."""
  return [
    name for spec in specs if isinstance(spec, str) for name in re.findall(r'(?<=_env=)[^&]+', spec.partition('?')[2])
  ]


def short_names(specs: Sequence[str | Callable]) -> tuple[str, ...]:
  """Returns a distinct name for each spec, for metrics and errors: 'fn' for 'a.b:fn?x=1'."""
  bases = [s.partition('?')[0] if isinstance(s, str) else s for s in specs]
  short = [b.rpartition(':')[2] if isinstance(b, str) else getattr(b, '__name__', type(b).__name__) for b in bases]
  names = []
  for i, spec in enumerate(specs):
    if spec in specs[:i]:
      raise InputError(f'reward: {spec} is given twice; use reward_weights')
    same = [b for b, s in zip(bases, short) if s == short[i] and b != bases[i]]
    name = bases[i] if same and isinstance(spec, str) else short[i]
    numbered = (f'{name}_{number}' for number in itertools.count(2))  # the same function with other options
    names.append(next(free for free in itertools.chain([name], numbered) if free not in names))
  return tuple(names)


def pick(names: Sequence[str], name: str, field: str) -> str:
  """Returns `name`, the value of a config field, or the first of `names` if it is ''; InputError if it is unknown."""
  if name and name not in names:
    raise InputError(f'{field}: {name!r} is not among the rewards: {", ".join(names) or "there are none"}')
  return name or next(iter(names), '')
