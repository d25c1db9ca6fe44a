"""Writes docs/methods.md: what each method learns in about a minute.

  python docs/make_methods_table.py [METHOD ...]

Runs the cases of tests/learning.py (all, or those named; the others keep
their rows), on the machine it is started on, seed 0.
"""

import dataclasses
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

from jaxpost.stage import algorithms  # noqa: E402
from jaxpost.stage import config as config_lib  # noqa: E402

CASES = learning.CASES | learning.VARIANTS
PAGE = ROOT / 'docs' / 'methods.md'
KEPT = '<!-- measured '
HEAD = """# What each method learns

Written by `python docs/make_methods_table.py`. A tiny Qwen3-style model (0.6 M parameters) has
been trained on sums of numbers up to 99, half of them with wrong answers. Each method continues
from there with seed 0 on two CPU cores, and is evaluated on held-out data.
`tests/test_learning.py` requires these gains, except for GMPO, DPPO, GPG, OPO, MaxRL and pass@k.
pass@1 is measured on 256 sums with 4 samples each, the others on 256 pairs or labels.
Before training, policy and reference are equal, so all pairs tie, which counts as 0.5. ORPO, CPO
and SimPO start from a model with a quarter of that training. SimPO, which has no term for good
answers alone, widens the margins of such a model and leaves its ranking of pairs as it is.

| algorithm | metric | before | after | steps | its own choices | set here |
|---|---|---|---|---|---|---|
"""
TAIL = """
"Its own choices" replace the defaults of these fields. Values in a config or on the command line
take precedence.
"""


SECTIONS = 'rl', 'preference', 'critic', 'distill', 'reward_model'


def choices(name: str, case: dict) -> tuple[str, str]:
  """(what the method brings along, what the case sets beside it)."""
  plain = config_lib.defaults()
  (config,) = config_lib.parse(dict(algorithm=name, reward='x')).values()
  own = algorithms.load_algorithm(name).defaults
  resolved = config_lib.resolve(config, own)

  def say(section, field, value):
    return f'`{section}.{field}={value}`'

  brought = []
  for section in SECTIONS:
    for field in dataclasses.fields(vars(resolved)[section]):
      value = vars(vars(resolved)[section])[field.name]
      if field.name in own.get(section, ()) and value != field.metadata['auto']:
        brought.append(say(section, field.name, value))
  return ', '.join(brought), ', '.join(
    say(s, f, value) for s in SECTIONS for f, value in case[s].items() if value != plain[s][f]
  )


def known() -> dict:
  """The figures that the page holds."""
  if not PAGE.exists():
    return {}
  for line in PAGE.read_text().splitlines():
    if line.startswith(KEPT):
      return json.loads(line[len(KEPT) : -len(' -->')])
  return {}


def main(names):
  figures = known()
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    learning.make_start(folder)
    for name in names or CASES:
      figures[name] = learning.measure(name, folder)
      figures[name].pop('seconds')
      print(name, figures[name], flush=True)
  write(figures)


def write(figures: dict):
  rows = [
    f'| `{name}` | {f["metric"]} | {f["before"]:.3f} | {f["after"]:.3f} | '
    f'{f["steps"]} | ' + ' | '.join(choices(name, CASES[name].config)) + ' |'
    for name, f in figures.items()
  ]
  PAGE.write_text(HEAD + '\n'.join(rows) + '\n' + TAIL + '\n' + KEPT + json.dumps(figures) + ' -->\n')


if __name__ == '__main__':
  main(sys.argv[1:])
