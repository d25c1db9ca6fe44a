"""Writes the table of docs/recipes.md: what each recipe trains, and what its small form shows.

  python docs/make_recipes_table.py [RECIPE ...]

Trains the small form (`:runlocal`) of the recipes that are named, or of all, with the compiler flags of the tests. The
others keep their figures, which tests/test_configs.py holds docstrings and page to.
"""

import hashlib
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
PAGE = ROOT / 'docs' / 'recipes.md'
BEGIN, END = '<!-- the table -->\n', '\n<!-- measured '
# These need no more than two CPU cores, and were measured whole.
WHOLE = {
  'quickstart': '[pass@1 of five seeds](getting_started.md#what-to-expect)',
  'text_game': '[reward of one seed](environments.md)',
}
NAMES = [path.stem for path in sorted((ROOT / 'configs').glob('[!_]*.py')) if path.stem not in WHOLE]
# The (split, metric) of the last stage that a small form shows, where it is not the held-out loss.
SHOWN = {
  'sft_alpaca': ('train', 'loss'),
  'distill_gsm8k': ('eval', 'divergence'),
  'gkd_gsm8k': ('train', 'divergence'),
  'reward_model_hh': ('train', 'loss'),
  **dict.fromkeys(('dpo_hh', 'kto', 'sft_dpo'), ('train', 'rewards/margins')),
  **dict.fromkeys((f'{m}_gsm8k' for m in ('grpo', 'ppo', 'rft', 'online_dpo', 'tools')), ('train', 'reward')),
  'sft_rm_ppo': ('train', 'reward'),
}
COLUMNS = ('recipe', 'stages', 'model', 'small form', 'CPU s', 'published')


def small(name: str) -> Any:
  """Returns the config of the small form of a recipe."""
  return importlib.import_module(f'configs.{name}').get_config('runlocal')


def settings(name: str) -> str:
  """Returns a digest of the fields that the small form sets to something else than their default."""
  from jaxpost.stage import config as config_lib

  def changed(block: dict, plain: dict) -> dict:
    inner = {k: changed(v, plain.get(k) or {}) if isinstance(v, dict) else v for k, v in block.items()}
    return {k: v for k, v in inner.items() if v != ({} if isinstance(block[k], dict) else plain.get(k))}

  found = changed(small(name).to_dict(), config_lib.defaults())
  return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def measure(name: str) -> dict:
  """Trains the small form of a recipe; returns the first and the last value of what it shows."""
  import rich.console

  import jaxpost
  from jaxpost.monitor import metrics

  config, begun = small(name), time.process_time()
  config.log.tensorboard = config.save.export = False
  split, metric = shown = SHOWN.get(name, ('eval', 'loss'))
  with tempfile.TemporaryDirectory() as folder:
    jaxpost.run(config, folder, rich.console.Console(quiet=True))
    rows = [row for row in metrics.read_rows(pathlib.Path(folder) / 'metrics.jsonl') if row['split'] == split]
  stage = rows[-1 if shown in SHOWN.values() else 0]['stage']
  found = [row[metric] for row in rows if row['stage'] == stage]
  cpu = round(time.process_time() - begun)
  return dict(split=split, metric=metric, first=found[0], last=found[-1], cpu=cpu, settings=settings(name))


def said(figure: dict) -> str:
  """Returns what the docstring of the recipe has to say."""
  first, last = (round(figure[end], 2) + 0.0 for end in ('first', 'last'))  # without the sign of a zero
  return f'{figure["metric"]} goes from {first:.2f} to {last:.2f}'


def published(name: str) -> str:
  """Returns the figures of others for a recipe, of docs/defaults.md."""
  page = (ROOT / 'docs' / 'defaults.md').read_text('utf-8')
  rows = re.findall(r'^\| `(?:configs/)?(\w+)\.py\S* .*?\| ([^|]*?) \| (.*?) \| ([\w-]+)', page, re.M)
  return '; '.join(f'{model}: {figure} ({source})' for recipe, model, figure, source in rows if recipe == name)


def table(figures: dict) -> str:
  """Returns the table of all recipes."""
  lines = [f'| {" | ".join(COLUMNS)} |', '|---' * len(COLUMNS) + '|']
  for name in sorted([*NAMES, *WHOLE]):
    config = importlib.import_module(f'configs.{name}').get_config()
    stages = ', '.join(config[stage].algorithm for stage in config.stages) or config.algorithm
    cells = [f'[{name}](../configs/{name}.py)', stages, config.model.path or f'`{config.model.preset}`']
    if name in figures:
      figure = figures[name]
      cells += [said(figure) + (', held out' if figure['split'] == 'eval' else ''), str(figure['cpu']), published(name)]
    else:
      cells += [WHOLE.get(name, 'runs; no figure'), '', published(name)]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines) + '\n'


def measured() -> dict:
  """Returns the figures that the page holds."""
  _, _, kept = PAGE.read_text('utf-8').partition(END)
  return json.loads(kept.removesuffix(' -->\n') or '{}')


def write(figures: dict) -> None:
  """Writes the page, with these figures."""
  head, _, _ = PAGE.read_text('utf-8').partition(BEGIN)
  PAGE.write_text(head + BEGIN + '\n' + table(figures) + END + json.dumps(figures) + ' -->\n', 'utf-8')


if __name__ == '__main__':
  os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'  # CPU time does not depend on what was compiled before
  import conftest  # noqa: F401 - the flags of the compiler

  figures = measured()
  for recipe in sys.argv[1:] or NAMES:
    figures[recipe] = measure(recipe)
    print(recipe, figures[recipe], flush=True)
    write(figures)
