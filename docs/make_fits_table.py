"""Writes docs/fits.md: what fits where, by arithmetic.

python docs/make_fits_table.py
"""

import os
import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from jaxpost.planning import fits  # noqa: E402
from launch import fits_flags  # noqa: E402

PAGE = ROOT / 'docs' / 'fits.md'
BEGIN = '<!-- the tables -->'
MODELS = (
  'qwen3_0_6b',
  'qwen3_1_7b',
  'qwen3_4b',
  'qwen3_8b',
  'qwen3_14b',
  'qwen3_32b',
  'qwen3_30b_a3b',
  'qwen2_5_0_5b',
  'qwen2_5_7b',
  'llama3_2_1b',
  'llama3_2_3b',
  'llama3_1_8b',
  'llama3_1_70b',
  'gemma3_1b',
  'gpt_oss_20b',
  'mixtral_8x7b',
  'qwen3_5_9b',
  'qwen3_5_35b_a3b',
  'glm4_5_air',
)


def section(model: str, devices: list[str]) -> str:
  """Returns the table of a model, and the commands of what fits, folded."""
  methods = list(fits.METHODS)
  found = {(cell.device, cell.method): cell for cell in fits.cells(fits_flags.recipes(model), devices)}
  lines = [f'### {model}', '', f'| device | {" | ".join(methods)} |', '|---' * (len(methods) + 1) + '|']
  for device in devices:
    lines.append(f'| {device} | {" | ".join(fits.text(found[device, method]) for method in methods)} |')
  lines += ['', '<details>', f'<summary>Meshes and commands of {model}</summary>', '', '```']
  for method in methods:
    shared: dict[str, list[str]] = {}
    for device in devices:
      if found[device, method].fits:
        shared.setdefault(fits.command(found[device, method], 'FOLDER'), []).append(device)
    for command, names in shared.items():
      lines += [f'# {method}: {", ".join(names)}', wrapped(command)]
  return '\n'.join([*lines, '```', '', '</details>']) + '\n'


def wrapped(command: str) -> str:
  """Returns a command in lines that a page shows without scrolling."""
  options = dict(subsequent_indent='  ', break_on_hyphens=False, break_long_words=False)
  return ' \\\n'.join(textwrap.wrap(command, 88, **options))


if __name__ == '__main__':
  head, _, _ = PAGE.read_text('utf-8').partition(BEGIN)
  PAGE.write_text('\n'.join([head + BEGIN + '\n', *(section(model, list(fits.DEVICES)) for model in MODELS)]), 'utf-8')
