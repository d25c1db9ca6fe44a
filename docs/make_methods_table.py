"""Writes docs/methods.md: what each method learns in about a minute.

  python docs/make_methods_table.py [METHOD ...]

Runs the cases of tests/learning.py (all, or those named; the others keep
their rows), on the machine it is started on, seed 0.
"""

import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import jaxpost  # noqa: E402

jaxpost.tune_host()
jaxpost.use_compile_cache()

import learning  # noqa: E402

from jaxpost import build, config as config_lib  # noqa: E402

PAGE = ROOT / 'docs' / 'methods.md'
KEPT = '<!-- measured '
HEAD = '''# What each method learns

Made by `python docs/make_methods_table.py`. A tiny Qwen3-style model (0.6 M
parameters) that has seen sums of numbers up to 19, 60 % of them right, goes on
with each method, seed 0, on two CPU cores; what is measured is held out.
`tests/test_learning.py` and the tests of each method hold the gains.
`rewards/accuracies` before training is 0 where policy and reference are still
one: ties count as wrong.

| algorithm | metric | before | after | steps | its own choices |
|---|---|---|---|---|---|
'''
TAIL = '''
"Its own choices" stand in for fields that a config leaves at their defaults;
whatever a config or the command line sets wins.
'''


def choices(name: str) -> str:
  """What `Algorithm.defaults` sets, as it would stand in a config."""
  parsed = config_lib.parse(dict(algorithm=name, reward='x'))
  config = next(iter(parsed.values()))
  defaults = build.load_algorithm(name).defaults
  resolved = config_lib.resolve(config, defaults)
  return ', '.join(
      f'`{section}.{field}={vars(vars(resolved)[section])[field]}`'
      for section, fields in defaults.items() for field in fields)


def known() -> dict:
  """The figures that the page holds."""
  if not PAGE.exists():
    return {}
  for line in PAGE.read_text().splitlines():
    if line.startswith(KEPT):
      return json.loads(line[len(KEPT):-len(' -->')])
  return {}


def main(names):
  figures = known()
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    learning.make_start(folder)
    for name in names or learning.CASES:
      figures[name] = learning.measure(name, folder)
      figures[name].pop('seconds')
      print(name, figures[name], flush=True)
  write(figures)


def write(figures: dict):
  rows = [
      f'| `{name}` | {f["metric"]} | {f["before"]:.3f} | {f["after"]:.3f} | '
      f'{f["steps"]} | {choices(name)} |'
      for name, f in figures.items()]
  PAGE.write_text(HEAD + '\n'.join(rows) + '\n' + TAIL + '\n' + KEPT +
                  json.dumps(figures) + ' -->\n')


if __name__ == '__main__':
  main(sys.argv[1:])
