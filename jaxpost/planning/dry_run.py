"""A config as a stage without data, tokenizer, weights or devices."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import TYPE_CHECKING

from jaxpost import testing
from jaxpost.data import sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.models import presets
from jaxpost.stage import algorithms, checks, find_weights, optim
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare as prepare_lib
from jaxpost.stage import sources as sources_lib

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

# Made-up rows, of which one suits each method that learns from data.
_ROWS = ('', '_pairs', '_labels', '_scores', '_steps')


def named_shape(name: str) -> ModelConfig | None:
  """'qwen3_8b', 'Qwen/Qwen3-8B' or 'Llama-3.1-8B-Instruct' -> its shape."""
  plain = lambda text: re.sub('[^a-z0-9]', '', text.lower())
  wanted = plain(re.sub('(?i)-(instruct|base|it|hf|chat).*$', '', name.partition('@')[0].rpartition('/')[2]))
  shapes = {plain(k): v for k, v in presets.PRESETS.items()}
  return shapes.get(wanted.removeprefix('meta'))


def shape_of(text: str, key: str) -> ModelConfig:
  """The shape that a name, or a folder with a config.json, stands for."""
  shape = named_shape(text)
  if shape is not None:
    return shape
  if text.startswith(('.', '/', '~')) or '://' in text:
    return find_weights.open_folder(text, key)[1]
  near = difflib.get_close_matches(text.rpartition('/')[2].lower().replace('-', '_'), presets.PRESETS, 1)
  raise InputError(
    f'{key}: no shape is called {text!r}; '
    + (f'did you mean {near[0]!r}? ' if near else '')
    + f'known: {", ".join(presets.PRESETS)}, or the path of a folder'
  )


def find(text: str, key: str, earlier: dict) -> sources_lib.Source:
  """As `weights.find`, by shapes alone."""
  if text.startswith('stage:'):
    return find_weights.find(text, key, earlier)
  shape = shape_of(text, key)
  if key.startswith(('config.critic', 'config.reward_model')):
    shape = model_lib.with_scalar_head(shape)
  return sources_lib.Source(shape)


def prepare_all(config: dict, stage: str = '') -> list[prepare_lib.Prepared]:
  """The stages of a config, or the one called `stage`."""
  done = []
  for name, section in config_lib.parse(config).items():
    done.append(prepare(name, section, done))
  chosen = [p for p in done if not stage or p.name == stage]
  if not chosen:
    raise InputError(f'--stage: there is no {stage!r}, only {", ".join(p.name for p in done)}')
  return chosen


def prepare(name: str, config: config_lib.Config, before=()) -> prepare_lib.Prepared:
  """What `build.prepare` gives, from the config alone."""
  algorithm = algorithms.load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  algorithm.check(config)
  optim.check(config.optim.name, config.optim.weight_decay)
  m = config.model
  source = sources_lib.Source(shape_of(m.path, 'config.model.path') if m.path else prepare_lib.model_source(m).config)
  found = prepare_lib.find_weights(
    config,
    algorithm,
    source,
    before[-1].name if before else '',
    {p.name: sources_lib.Source(p.model.config) for p in before},
    find,
  )
  if 'critic' in found:
    found['critic'] = sources_lib.Source(model_lib.with_scalar_head(found['critic'].config))
  p = prepare_lib.Prepared(
    name,
    config,
    algorithm,
    found,
    prepare_lib.make_model(config, algorithm, found['policy'].config),
    tokenizer_lib.load('bytes'),
    None,
    None,
    None,
  )
  prompts = testing.RandomPrompts(config.rollout.prompts, config.rollout.max_prompt_length, 256)
  if algorithm.on_policy:
    checks.check_sampling(config, True, rewards=False)
    p.stream = prompts
  else:
    p.rows, p.stream, p.first_batch, p.example = _made_rows(p)
  if config.eval.data.path:
    p.eval_rows = ()
    if not algorithm.on_policy:
      p.eval_examples = (p.example(0),)
    if config.eval.samples:
      p.eval_prompts, p.pool = (prompts.prompt(0),), object()
  return p


def _made_rows(p: prepare_lib.Prepared) -> tuple:
  """(rows, stream, a batch, number -> Example) of data that suits."""
  small = dataclasses.replace(p.config, train=dataclasses.replace(p.config.train, batch_size=1))
  error = None
  for kind in _ROWS:
    # Of few rows grain shuffles slowly: 5 minutes for a row of 32,768 tokens.
    q = dataclasses.replace(p, config=small, rows=sources.read_sources(f'generated:arithmetic{kind}:max=99,size=4096'))
    try:
      return q.rows, prepare_lib.row_stream(q), q.first_batch, q.example
    except InputError as e:
      error = error or e
  raise error
