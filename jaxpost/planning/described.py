"""A config as a stage without data, tokenizer, weights or devices."""

import dataclasses
import difflib
import re

from jaxpost import build, config as config_lib, optim, testing, weights
from jaxpost.data import sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.models import presets, model as model_lib
from jaxpost.models.config import ModelConfig

# Made-up rows, of which one suits each method that learns from data.
_ROWS = ('', '_pairs', '_labels', '_scores', '_steps')


def named_shape(name: str) -> ModelConfig | None:
  """'qwen3_8b', 'Qwen/Qwen3-8B' or 'Llama-3.1-8B-Instruct' -> its shape."""
  plain = lambda text: re.sub('[^a-z0-9]', '', text.lower())
  wanted = plain(re.sub('(?i)-(instruct|base|it|hf|chat).*$', '',
                        name.partition('@')[0].rpartition('/')[2]))
  shapes = {plain(k): v for k, v in presets.PRESETS.items()}
  return shapes.get(wanted.removeprefix('meta'))


def shape_of(text: str, key: str) -> ModelConfig:
  """The shape that a name, or a folder with a config.json, stands for."""
  shape = named_shape(text)
  if shape is not None:
    return shape
  if text.startswith(('.', '/', '~')) or '://' in text:
    return weights.open_folder(text, key)[1]
  near = difflib.get_close_matches(
      text.rpartition('/')[2].lower().replace('-', '_'), presets.PRESETS, 1)
  raise InputError(
      f'{key}: no shape is called {text!r}; ' +
      (f'did you mean {near[0]!r}? ' if near else '') +
      f'known: {", ".join(presets.PRESETS)}, or the path of a folder')


def find(text: str, key: str, earlier: dict) -> weights.Source:
  """As `weights.find`, by shapes alone."""
  if text.startswith('stage:'):
    return weights.find(text, key, earlier)
  shape = shape_of(text, key)
  if key.startswith(('config.critic', 'config.reward_model')):
    shape = model_lib.with_scalar_head(shape)
  return weights.Source(shape)


def prepare_all(config: dict, stage: str = '') -> list[build.Prepared]:
  """The stages of a config, or the one called `stage`."""
  done = []
  for name, section in config_lib.parse(config).items():
    done.append(prepare(name, section, done))
  chosen = [p for p in done if not stage or p.name == stage]
  if not chosen:
    raise InputError(f'--stage: there is no {stage!r}, only '
                     f'{", ".join(p.name for p in done)}')
  return chosen


def prepare(name: str, config: config_lib.Config, before=()) -> build.Prepared:
  """What `build.prepare` gives, from the config alone."""
  algorithm = build.load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  algorithm.check(config)
  optim.check(config.optim.name, config.optim.weight_decay)
  m = config.model
  source = weights.Source(
      shape_of(m.path, 'config.model.path') if m.path else
      build.model_source(m).config)
  found = build.find_weights(
      config, algorithm, source, before[-1].name if before else '',
      {p.name: weights.Source(p.model.config) for p in before}, find)
  if 'critic' in found:
    found['critic'] = weights.Source(
        model_lib.with_scalar_head(found['critic'].config))
  p = build.Prepared(
      name, config, algorithm, found,
      build.make_model(config, algorithm, found['policy'].config),
      tokenizer_lib.load('bytes'), None, None, None)
  prompts = testing.RandomPrompts(
      config.rollout.prompts, config.rollout.max_prompt_length, 256)
  if algorithm.on_policy:
    build.check_sampling(config, True, rewards=False)
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


def _made_rows(p: build.Prepared) -> tuple:
  """(rows, stream, a batch, number -> Example) of data that suits."""
  small = dataclasses.replace(
      p.config, train=dataclasses.replace(p.config.train, batch_size=1))
  error = None
  for kind in _ROWS:
    # Of few rows grain shuffles slowly: 5 minutes for a row of 32,768 tokens.
    q = dataclasses.replace(p, config=small, rows=sources.read_sources(
        f'generated:arithmetic{kind}:max=99,size=4096'))
    try:
      return q.rows, build.row_stream(q), q.first_batch, q.example
    except InputError as e:
      error = error or e
  raise error
