"""Exports the policy of a stage as a Hugging Face folder, with a model card.

The card has the base model, method, data, metrics, command and versions of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

from etils import epath

from jaxpost.data import sources
from jaxpost.errors import InputError
from jaxpost.formats import hf_export
from jaxpost.models import model as model_lib
from jaxpost.models import parameters
from jaxpost.monitor import metrics, report
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store

if TYPE_CHECKING:
  from jaxpost.stage.records import Inputs

_CARD = 'README.md'
_ORIGIN = re.compile(r'<!-- jaxpost: (\{.*\}) -->')

_LANGUAGE_MODEL_USAGE = (
  '    vllm serve FOLDER',
  '    python llama.cpp/convert_hf_to_gguf.py FOLDER --outfile model.gguf',
  '    echo "FROM ./model.gguf" > Modelfile && ollama create NAME -f Modelfile',
)
_REWARD_MODEL_USAGE = (
  '    transformers.AutoModelForSequenceClassification.from_pretrained("FOLDER")  # its logit is the score',
  '    python -m launch.train ... --config.reward=reward_model --config.reward_model.path=FOLDER',
)
# {loss: the token whose logit is the score}; transformers and servers read the logit of the last token of any text.
_SCORE_POSITIONS = {
  'process': 'The logit at the line break after each step is the score of the step. No other token was trained.',
  '': 'The score is the logit at the stop token that ends an answer, the only one that was trained. Many chat '
  'templates render a line break after it: remove that before the text is scored.',
}


def export(inputs: Inputs, folder: epath.PathLike, params: dict) -> None:
  """Writes a folder that `transformers` loads, with a subfolder adapter/ for `peft` if the stage trains an adapter."""
  tokenizer, model, section = inputs.tokenizer, inputs.model, inputs.config.model
  policy = inputs.sources['policy']
  base = policy.base or policy
  pad, save = tokenizer.pad_id, tokenizer.save
  if inputs.algorithm.scalar_head:
    from jaxpost.stage import reward_models

    pad = reward_models.pad_id(tokenizer)
    save = functools.partial(reward_models.save_tokenizer, tokenizer)
  merge = model.merge  # not jitted: fused operations would round differently
  if model.quantized:
    from jaxpost.models import quantization
    from jaxpost.programs import weight_files

    merge = weight_files.after(functools.partial(quantization.convert_params, model=model.base), merge)
  origin = None
  if section.path:  # there is a folder to copy the other parts from
    from jaxpost.stage import model_folders

    origin = model_folders.origin(section, model.config)
  save_adapter = None
  # An adapter of the text model would not match the tensor names of a multimodal base.
  if model.config.lora and not (origin and origin.renames):
    from jaxpost.formats import peft

    save_adapter = peft.writer(model, params, adapter_base(inputs))

  def save_beside(path: epath.Path) -> None:
    save(path)
    if save_adapter:
      save_adapter(path / 'adapter')
      save(path / 'adapter')  # the adapter may have been trained with another chat template than its base

  with origin or contextlib.nullcontext():
    hf_export.save(
      folder,
      model_lib.build(dataclasses.replace(model_lib.with_value_head(model.config, False), lora=())),
      params,
      merge=merge,
      stop_ids=tokenizer.stop_ids,
      bos_id=tokenizer.bos_id,
      pad_id=pad,
      # Generation settings are those of the model, even if config.model.tokenizer names another folder.
      generation=hf_export.read_generation(str(base.folder or section.path) if section.tokenizer else tokenizer.source),
      tokenizer_save=save_beside,
      origin=origin,
    )


def adapter_base(inputs: Inputs) -> str:
  """Returns the name of the model below a stage's adapter; '' without one, or if more than the adapter is trained."""
  source, model = inputs.sources['policy'], inputs.model
  while source.base is not None and source.config.lora == model.config.lora:
    source = source.base
  trained = set(model.table) - model.frozen
  only_adapter = all(parameters.is_adapter(path) or path == 'score' for path in trained)
  return source.name if only_adapter and source.base is None else ''


def check_stage(folder: epath.PathLike, stage: str) -> None:
  """Raises InputError if a folder holds the export of another stage."""
  card = epath.Path(folder).expanduser() / _CARD
  origin = _ORIGIN.search(card.read_text()) if card.exists() else None
  if origin and (exported := json.loads(origin[1])['stage']) != stage:
    raise InputError(f'{folder}: holds an export of stage {exported}, not {stage}; export to another folder')


def write_card(folder: epath.PathLike, run: epath.PathLike, stage: str, step: int) -> None:
  """Adds the facts of a run to the card that its export has written: to the YAML header, and at the end."""
  card = epath.Path(folder).expanduser() / _CARD
  config = config_lib.parse_saved(epath.Path(run).expanduser() / 'config.json')[stage]
  header, end, title = card.read_text().partition('\n---\n')
  facts = ''.join(f'\n{name}: {value}' for name, value in _header(config.model.path).items())
  # The card's commands name the folder by a relative path as it is, and by the last part of others.
  name = str(folder).rstrip('/')
  name = name.rpartition('/')[2] if name.startswith(('/', '~')) or '://' in name else name
  about = describe(run, stage, step, name)
  object_store.write_text(card, header + facts + end + title.rstrip('\n') + '\n\n' + about)


def _header(base: str) -> dict[str, str]:
  """Returns the card's fields about the base model: its name on the hub, or the license that its folder states."""
  folder = epath.Path(base).expanduser()
  if not base or not folder.exists():
    name = base.partition('@')[0]  # the hub allows no revision in this field
    return {'base_model': name} if re.fullmatch(r'[\w.-]+/[\w.-]+', name) else {}
  card = folder / _CARD
  text = card.read_bytes().decode('utf-8', 'replace') if card.exists() else ''
  header = text.partition('\n---\n')[0] if text.startswith('---\n') else ''
  license_line = re.search(r'^license: *([\w.+-]+) *$', header, re.MULTILINE)
  return {'license': license_line[1]} if license_line else {}


def describe(run: epath.PathLike, stage: str, step: int, folder: str = 'FOLDER') -> str:
  """Returns the Markdown of a card: how the weights were made, and how to use them from `folder`."""
  run = epath.Path(run).expanduser()
  config = config_lib.parse_saved(run / 'config.json')[stage]
  origin = {'stage': stage, 'step': step}
  start = report.start_of_run(run)
  rows = {
    'base model': config.model.path or f'random weights of the shape {config.model.preset}',
    'method': config.algorithm,
    'data': ' + '.join(sources.split(config.data.path)),
    'rewards': ', '.join(map(str, config.rewards_tuple())),
    'stage': f'{stage}, step {step} of {config.train.steps}',
    'seed': config.seed,
    **{name: start['facts'].get(name, '') for name in ('machine', 'versions', 'commit', 'command') if start},
  }
  lines = [f'<!-- jaxpost: {json.dumps(origin)} -->', '', '| how it was made | |', '|---|---|']
  lines += [f'| {name} | {_cell(value)} |' for name, value in rows.items() if value not in ('', None)]
  evaluations = [
    row
    for row in metrics.comparable_rows(run / 'metrics.jsonl')  # without timings
    if row['stage'] == stage and row['split'] != 'train' and row['step'] <= step
  ]
  if evaluations:
    evaluation = evaluations[-1]
    lines += ['', f'| held-out metric, step {evaluation["step"]} | |', '|---|---|']
    held_out = {name: value for name, value in evaluation.items() if name not in metrics.ROW_KEYS}
    lines += [f'| {name} | {report.number(value)} |' for name, value in held_out.items()]
  is_reward_model = algorithms.load_algorithm(config.algorithm).scalar_head
  usage = _REWARD_MODEL_USAGE if is_reward_model else _LANGUAGE_MODEL_USAGE
  lines += [
    '',
    'The licenses of the base model and the data hold for these weights, too; name them before you publish.',
    '',
    *(line.replace('FOLDER', folder if '"FOLDER' in line else shlex.quote(folder)) for line in usage),
  ]
  if is_reward_model:
    lines += ['', _SCORE_POSITIONS.get(config.reward_model.loss, _SCORE_POSITIONS[''])]
  return '\n'.join(lines) + '\n'


def _cell(value: Any) -> str:
  return ' '.join(str(value).split()).replace('|', '\\|')
