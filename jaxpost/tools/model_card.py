"""The model card of an export: base model, method, data, metrics, command and versions of its run."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import metrics, report_facts
from jaxpost.monitor.report import number
from jaxpost.stage import config as config_lib
from jaxpost.storage import hub, object_store

_FILE = 'README.md'
_ORIGIN = re.compile(r'<!-- jaxpost: (\{.*\}) -->')


def check_stage(folder: epath.PathLike, stage: str) -> None:
  """Raises InputError if a folder holds the export of another stage."""
  card = epath.Path(folder) / _FILE
  origin = _ORIGIN.search(card.read_text()) if card.exists() else None
  if origin and (there := json.loads(origin[1])['stage']) != stage:
    raise InputError(f'{folder}: holds an export of stage {there}, not {stage}; export to another folder')


def write(folder: epath.PathLike, run: epath.PathLike, stage: str, step: int) -> None:
  """Adds the facts of a run to the card of its export, below the header that the export has written."""
  card = epath.Path(folder) / _FILE
  object_store.write_text(card, card.read_text().rstrip('\n') + '\n\n' + describe(run, stage, step))


def describe(run: epath.PathLike, stage: str, step: int) -> str:
  """Returns the Markdown of a card: how the weights were made, and how to use them."""
  run = epath.Path(run).expanduser()
  config = config_lib.parse_saved(run / 'config.json')[stage]
  origin = {'stage': stage, 'step': step}
  start = report_facts.start(run)
  rows = {
    'base model': config.model.path or f'random weights of the shape {config.model.preset}',
    'method': config.algorithm,
    'data': _text(config.data.path),
    'rewards': ', '.join(map(str, config.rewards_tuple())),
    'stage': f'{stage}, step {step} of {config.train.steps}',
    'seed': config.seed,
    **{name: start['facts'].get(name, '') for name in ('machine', 'versions', 'commit', 'command') if start},
  }
  lines = [f'<!-- jaxpost: {json.dumps(origin)} -->', '', '| how it was made | |', '|---|---|']
  lines += [f'| {name} | {_cell(value)} |' for name, value in rows.items() if value not in ('', None)]
  measured = _metrics(run, stage, step)
  if measured:
    lines += ['', f'| held-out metric, step {measured[0]} | |', '|---|---|']
    lines += [f'| {name} | {number(value)} |' for name, value in measured[1].items()]
  lines += [
    '',
    'The license is that of the base model and the data, which are not named here; add it before you publish.',
    '',
    '    vllm serve FOLDER',
    '    python llama.cpp/convert_hf_to_gguf.py FOLDER --outfile model.gguf  # then: FROM ./model.gguf in a Modelfile',
  ]
  return '\n'.join(lines) + '\n'


def _metrics(run: epath.Path, stage: str, step: int) -> tuple[int, dict[str, float]] | None:
  """The last evaluation up to a step, without what depends on the clock."""
  rows = metrics.comparable_rows(run / 'metrics.jsonl')
  found = [r for r in rows if r['stage'] == stage and r['split'] != 'train' and r['step'] <= step]
  if not found:
    return None
  return found[-1]['step'], {k: v for k, v in found[-1].items() if k not in metrics.ROW_KEYS}


def _text(value: Any) -> str:
  return ' + '.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cell(value: Any) -> str:
  return ' '.join(str(value).split()).replace('|', '\\|')


def push(folder: str, repo: str, public: bool, say: Callable[[str], None]) -> None:
  """Uploads a folder to the hub; without a token says what would be sent.

  Raises:
    InputError: `repo` is not org/name, or the hub refuses it.
  """
  if not re.fullmatch(r'[\w.-]+/[\w.-]+', repo):
    raise InputError(f'--push={repo}: name a model of the hub, as ORG/NAME')
  if object_store.is_remote(folder):
    raise InputError(f'--push: {folder} is no local folder; export to one')
  if not hub.has_token():
    for path in sorted(p for p in pathlib.Path(folder).rglob('*') if p.is_file()):
      say(f'would send {path.relative_to(folder)}, {path.stat().st_size:,} bytes')
    say(f'--push={repo}: nothing was sent, there is no token of the hub; run `hf auth login`, or set HF_TOKEN')
    return
  say(hub.upload(folder, repo, private=not public))
