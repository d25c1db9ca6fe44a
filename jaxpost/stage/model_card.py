"""The model card of an export: base model, method, data, metrics, command and versions of its run."""

from __future__ import annotations

import json
import re
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import metrics, report_facts
from jaxpost.monitor.report import number
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store

_FILE = 'README.md'
_ORIGIN = re.compile(r'<!-- jaxpost: (\{.*\}) -->')

_WRITES = (  # how to use a model that writes text
  '    vllm serve FOLDER',
  '    python llama.cpp/convert_hf_to_gguf.py FOLDER --outfile model.gguf',
  '    echo "FROM ./model.gguf" > Modelfile && ollama create NAME -f Modelfile',
)
_SCORES = (  # and a reward model
  '    transformers.AutoModelForSequenceClassification.from_pretrained("FOLDER")  # its logit is the score',
  '    python -m launch.train ... --config.reward=reward_model --config.reward_model.path=FOLDER',
)


def check_stage(folder: epath.PathLike, stage: str) -> None:
  """Raises InputError if a folder holds the export of another stage."""
  card = epath.Path(folder) / _FILE
  origin = _ORIGIN.search(card.read_text()) if card.exists() else None
  if origin and (there := json.loads(origin[1])['stage']) != stage:
    raise InputError(f'{folder}: holds an export of stage {there}, not {stage}; export to another folder')


def write(folder: epath.PathLike, run: epath.PathLike, stage: str, step: int) -> None:
  """Adds the facts of a run to the card of its export: to the header that the export has written, and below it."""
  card = epath.Path(folder) / _FILE
  config = config_lib.parse_saved(epath.Path(run).expanduser() / 'config.json')[stage]
  header, end, title = card.read_text().partition('\n---\n')
  facts = ''.join(f'\n{name}: {value}' for name, value in _header(config.model.path).items())
  object_store.write_text(card, header + facts + end + title.rstrip('\n') + '\n\n' + describe(run, stage, step))


def _header(base: str) -> dict[str, str]:
  """Returns what the header of a card says of the base model: its name on the hub, or the license in its folder."""
  if not base or not epath.Path(base).exists():
    return {'base_model': base} if re.fullmatch(r'[\w.-]+/[\w.-]+', base) else {}
  card = epath.Path(base) / _FILE
  text = card.read_bytes().decode('utf-8', 'replace') if card.exists() else ''
  header = text.partition('\n---\n')[0] if text.startswith('---\n') else ''
  named = re.search(r'^license: *([\w.+-]+) *$', header, re.MULTILINE)
  return {'license': named[1]} if named else {}


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
    'The licenses of the base model and the data hold for these weights, too; name them before you publish.',
    '',
    *(_SCORES if algorithms.load_algorithm(config.algorithm).scalar_head else _WRITES),
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
