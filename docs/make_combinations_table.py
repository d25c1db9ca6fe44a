"""Writes docs/combinations.md: choices of method fields that are refused together.

python docs/make_combinations_table.py
"""

import collections
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import combinations  # noqa: E402

PAGE = ROOT / 'docs' / 'combinations.md'
HEAD = """# Which choices go together

Written by `python docs/make_combinations_table.py`. Surrogate loss, advantage, KL,
corrections and schedule can be chosen independently, in GRPO and in the methods that differ from
it in such choices, or have a critic (`ppo`, `vapo`) or a teacher (`opd`). `tests/test_combinations.py`
takes every pair of these choices. A pair is refused with one line before anything
starts, or it runs. At the first step its ratios and importance weights are 1, nothing
is clipped or masked, and the KL is 0. Its gradient has the direction and the length of the
exact one: that of the formulas of the papers (`tests/formulas.py`), over all groups of
completions that a small categorical policy can draw. That holds on policy, and where the
policies that sampled, that is trained and that is the reference differ.
"""


def page() -> str:
  """Returns the text of the page."""
  pairs = list(combinations.pairs())
  refused = {pair: why for pair in pairs if (why := combinations.refusal(*pair))}
  lines = [HEAD, '## The choices', '', '| field | choices |', '|---|---|']
  for field, choices in combinations.FIELDS.items():
    lines.append(f'| {field} | {", ".join(f"`{name}`" for name in choices)} |')
  lines += [
    '',
    'Other on-policy methods have losses of their own. Besides the first choice of each field, they take:',
    '',
  ]
  lines += [f'* `{name}`: {", ".join(f"`{x}`" for x in combinations.taken(name))}' for name in combinations.OTHERS]
  lines += ['', f'## Refused: {len(refused)} of {len(pairs)} pairs', '', '| choice | with | message |', '|---|---|---|']
  lines += rows(pairs, refused)
  return '\n'.join(lines) + '\n'


def rows(pairs: list, refused: dict) -> list[str]:
  """One row a choice and message; a pair is named once, under the choice with more refusals."""
  found = collections.defaultdict(set)  # (choice, message) -> the other choices
  for pair, why in refused.items():
    for choice, other in (pair, pair[::-1]):
      found[choice, why].add(other)
  lines = []
  named = set()
  for (choice, why), others in sorted(found.items(), key=lambda item: -len(item[1])):
    others = {other for other in others if (frozenset({choice, other}), why) not in named}
    named |= {(frozenset({choice, other}), why) for other in others}
    partners = {other for pair in pairs if choice in pair for other in pair if refused.get(pair, why) == why} - {choice}
    if others:
      lines.append(f'| {said(choice)} | {listed(others, partners)} | {why} |')
  return lines


def listed(others: set, partners: set) -> str:
  """The choices, or all but the few that are missing."""
  missing = sorted(partners - others)
  if not missing:
    return 'anything'
  if len(missing) < len(others) / 2:
    return 'anything but ' + ', '.join(map(said, missing))
  return ', '.join(map(said, sorted(others)))


def said(choice: tuple[str, str]) -> str:
  """A choice as text."""
  field, name = choice
  return f'`{field}={name}`' if '.' in field else f'{field}: {name}'


if __name__ == '__main__':
  PAGE.write_text(page(), 'utf-8')
