"""Prepares stages from a config alone, without data, tokenizer, weights or devices."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from jaxpost import testing
from jaxpost.data import sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.examples import Documents
from jaxpost.environments import factory
from jaxpost.errors import InputError, did_you_mean
from jaxpost.models import model as model_lib
from jaxpost.models import presets
from jaxpost.stage import checks, model_folders, sampling_inputs, weight_sources
from jaxpost.stage import prepare as prepare_lib
from jaxpost.stage.records import Data, HeldOutData, Inputs, PreparedStage, Source
from jaxpost.storage import manifest

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.models.config import ModelConfig
  from jaxpost.stage.config import Config

# Kinds of generated rows; each method that learns from data can use one of them.
_ROWS = ('', '_pairs', '_labels', '_scores', '_steps')


def named_shape(name: str) -> ModelConfig | None:
  """Returns the shape of a preset or hub name, such as 'qwen3_8b' or 'Llama-3.1-8B-Instruct'; None if unknown."""

  def plain(text):
    return re.sub('[^a-z0-9]', '', text.lower())

  key = plain(re.sub('(?i)-(instruct|base|it|hf|chat).*$', '', name.partition('@')[0].rpartition('/')[2]))
  shapes = {plain(k): v for k, v in presets.every().items()}
  return shapes.get(key.removeprefix('meta'))


def shape_of(text: str, key: str, text_only: bool = False) -> ModelConfig:
  """Returns the shape of a model by its name, or by a folder with a config.json."""
  shape = named_shape(text)
  if shape is not None:
    return shape
  if text.startswith(('.', '/', '~')) or '://' in text:
    return model_folders.open_folder(text, key, text_only)[1]
  hint = did_you_mean(text.rpartition('/')[2].lower().replace('-', '_'), presets.every())
  raise InputError(
    f'{key}: no shape is called {text!r}; {hint}known: {", ".join(presets.every())}, or the path of a folder'
  )


def find(text: str, key: str, earlier: dict, text_only: bool = False) -> Source:
  """Returns the source named `text` like `weight_sources.find`; a name that is no local path gives a shape only."""
  is_here = '://' not in text and epath.Path(manifest.split_run(text)[0]).expanduser().exists()
  if is_here or text.startswith('stage:'):
    return weight_sources.find(text, key, earlier, text_only)
  shape = shape_of(text, key, text_only)
  if key.startswith(('config.critic', 'config.reward_model')):
    shape = model_lib.with_scalar_head(shape)
  return Source(shape)


def prepare_all(config: Mapping, stage: str = '') -> list[PreparedStage]:
  """Prepares the stages of a config, or the one called `stage`, without reading anything."""
  prepared: list[PreparedStage] = []
  for name, (algorithm, section) in prepare_lib.resolve_all(config).items():
    prepared.append(prepare(name, algorithm, section, prepared))
  chosen = [p for p in prepared if not stage or p.name == stage]
  if not chosen:
    raise InputError(f'--stage: there is no {stage!r}, only {", ".join(p.name for p in prepared)}')
  return chosen


def prepare(name: str, algorithm: Algorithm, config: Config, before: Sequence[PreparedStage]) -> PreparedStage:
  """Prepares a stage from its resolved config alone; `before` are the stages that run first."""
  return with_made_up_data(make_inputs(name, algorithm, config, before))


def with_made_up_data(inputs: Inputs) -> PreparedStage:
  """Returns the stage of these inputs, of a run or of a plan, with data of the config's shapes and bytes as tokens."""
  inputs = dataclasses.replace(inputs, tokenizer=tokenizer_lib.load('bytes'))
  return PreparedStage(inputs, _made_up_data(inputs))


def make_inputs(name: str, algorithm: Algorithm, config: Config, before: Sequence[PreparedStage] = ()) -> Inputs:
  """Makes the inputs of a stage from its resolved config (`stage.prepare.resolve`) alone."""
  checks.check_config(config, algorithm)
  section = config.model
  if section.path:
    source = find(section.path, 'config.model.path', {}, section.text_only)
  else:
    source = Source(prepare_lib.source_of_model(section).config)
  earlier = {p.name: Source(p.inputs.model.config, stage=p.name) for p in before}
  weights = prepare_lib.find_weights(
    config, algorithm, source, earlier, functools.partial(find, text_only=section.text_only)
  )
  prepare_lib.check_weights(config, algorithm, weights)
  return prepare_lib.make_inputs(name, config, algorithm, weights, tokenizer_lib.load('bytes'))


def _made_up_data(inputs: Inputs) -> Data:
  """Returns data of the config's shapes: random prompts, or generated rows."""
  config, algorithm = inputs.config, inputs.algorithm
  prompts = testing.RandomPrompts(config.rollout.prompts, config.rollout.max_prompt_length, 256)
  if checks.samples(config, algorithm):
    sampling_inputs.check_model(config, inputs.model)
    sampling_inputs.check_sampling(config, algorithm.on_policy, rewards=False)
    if config.environment:
      factory.check_fields(config)
    if config.rl.sources:
      _check_sources(inputs)
  data = Data(stream=prompts) if algorithm.on_policy else _generated_rows(inputs)
  if not config.eval.data.path:
    return data
  documents = Documents((data.documents.plain(0),).__getitem__, 1) if data.documents else None
  return dataclasses.replace(
    data, held_out=HeldOutData((), documents, (prompts.prompt(0),) if config.eval.samples else ())
  )


def _check_sources(inputs: Inputs) -> None:
  """Refuses errors in `config.rl.sources`; of the data of a run, a plan knows only how many sources there are."""
  from jaxpost.rl import mixture

  config = inputs.config
  paths = {}  # {whether they are held out: the sources that are sampled from}
  if inputs.algorithm.on_policy:
    paths[False] = sources.split(config.data.path or config.rl.sources)  # a plan needs no data
  if checks.samples_held_out(config):
    paths[True] = sources.split(config.eval.data.path)
  for held_out, names in paths.items():
    rows: Any = types.SimpleNamespace(name=' + '.join(names), sizes=(1,) * len(names))
    mixture.of_prompts(inputs, sampling_inputs.reward_names(config), rows, tools=None, held_out=held_out)


def _generated_rows(inputs: Inputs) -> Data:
  """Returns the first kind of generated rows that the algorithm accepts."""
  # One row at a time: grain shuffles few rows slowly, 5 minutes for a row of 32,768 tokens.
  config = dataclasses.replace(inputs.config, train=dataclasses.replace(inputs.config.train, batch_size=1))
  inputs = dataclasses.replace(inputs, config=config)
  errors = []
  for kind in _ROWS:
    try:
      return prepare_lib.make_data(inputs, sources.read_sources(f'generated:arithmetic{kind}:max=99,size=4096'))
    except InputError as error:
      errors.append(error)
  raise errors[0]
