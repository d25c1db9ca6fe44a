"""Previews a stage from its config: model, rows as the model reads them, rewards. Loads no weights."""

from __future__ import annotations

import contextlib

import numpy as np
from rich import text as rich_text

from jaxpost.data import preview
from jaxpost.data.sources import Rows
from jaxpost.errors import InputError
from jaxpost.models import transformer
from jaxpost.rewards import builtin
from jaxpost.stage import batch_shape, checks, documents, prepare, reward_model
from jaxpost.stage import config as config_lib
from jaxpost.stage.records import Inputs
from jaxpost.tools import inference

_COUNTED = 512  # rows behind the table of lengths
_IDS = 24  # token ids shown of a row


def show_stage(name: str, config: config_lib.Config, rows: int) -> list:
  """Returns rich renderables: model, `rows` rows as the model reads them, rewards."""
  inputs = inference.prepare_model(name, config)
  config, tokenizer = inputs.config, inputs.tokenizer
  if not config.data.path:
    raise InputError('config.data.path: is empty; name a file, a folder, org/name or generated:arithmetic')
  data = prepare.read_rows(config)
  held_out = config.eval.data.path
  count = transformer.num_params(inputs.model.config)
  out = [
    rich_text.Text(f'{name}: {config.algorithm}, {config.train.steps} steps', 'bold'),
    f'model: {config.model.path or config.model.preset}, {count:,} '
    f'parameters, {tokenizer.vocab_size} tokens of {tokenizer.source}',
    f'data: {len(data)} rows of {config.data.path}',
  ]
  if data.dropped:
    out[-1] += f', {data.dropped} more dropped by config.data.map'
  if held_out:
    read = prepare.read_held_out_rows(config)
    out.append(f'held out: {min(len(read), config.eval.size)} of {len(read)} rows of {held_out}')
  on_policy = inputs.algorithm.on_policy
  samples = on_policy or held_out and config.eval.samples
  tools = None
  with contextlib.ExitStack() as cleanup:
    if samples and config.environment:
      environment = prepare.start_environment(inputs)
      cleanup.callback(environment.close)
      tools = environment.tools
      out += [f'tool: {tool["function"]["name"]} of {config.environment}' for tool in tools]
    out += _show_prompts(inputs, data, rows, tools) if on_policy else _show_rows(inputs, data, rows)
    if samples:
      out += _show_rewards(inputs, data)
  return out


def _show_rows(inputs: Inputs, data: Rows, count: int) -> list:
  config, tokenizer = inputs.config, inputs.tokenizer
  render = inputs.algorithm.render(data, tokenizer, config)
  examples = [render(i) for i in range(min(max(count, _COUNTED), len(data)))]
  if not inputs.algorithm.scalar_head:
    documents.warn_without_stop(examples, tokenizer)
  length = batch_shape.row_length(config, False)
  *shown, _ = preview.preview(examples[:count] or examples[:1], tokenizer)
  out = []
  for i, row in enumerate(shown[:count]):
    out += [_heading(data.where(i), examples[i].tokens), row]
  table = preview.preview(examples, tokenizer, length)[-1]
  table.title = f'the first {len(examples)} rows'
  return [*out, table]


def _show_prompts(inputs: Inputs, data: Rows, count: int, tools: list[dict] | None) -> list:
  config = inputs.config
  tokenizer = inputs.tokenizer
  prompts = prepare.prompt_stream(inputs, data, shuffle=False, tools=tools)
  out = []
  for i in range(min(count, len(prompts))):
    prompt = prompts.prompt(i)
    out += [
      _heading(f'prompt {i}', prompt.tokens),
      rich_text.Text(tokenizer.decode(prompt.tokens, skip_special=False), 'dim'),
    ]
    for key, value in prompt.columns.items():
      out.append(f'  {key} = {repr(value)[:200]}')
  lengths = prompts.lengths
  return [
    *out,
    f'{len(lengths)} prompts of {min(lengths)} to {max(lengths)} '
    f'tokens, median {np.median(lengths):.0f}; {prompts.skipped} longer '
    f'than {config.rollout.max_prompt_length} are left out',
  ]


def _show_rewards(inputs: Inputs, data: Rows) -> list:
  config = inputs.config
  checks.check_sampling(config, inputs.algorithm.on_policy)
  decides = reward_model.correct_by(config, reward_model.is_used(config, inputs.algorithm))
  pool = prepare.start_rewards(config, data)  # imports every function
  if pool is None:
    return []
  pool.close()
  specs = config.rewards_tuple()
  weights = config.reward_weights or [1.0] * len(specs)
  where = [builtin.locate(s) if isinstance(s, str) else 'in this process' for s in specs]
  return [
    f'reward: {name} ({place}), weight {weight:g}' + ', decides what is correct' * (name == decides)
    for name, place, weight in zip(pool.names, where, weights)
  ]


def _heading(place: str, tokens: np.ndarray) -> rich_text.Text:
  """Returns the heading of a row: its place in the file, its length and its first token ids."""
  place = f'...{place[-37:]}' if len(place) > 40 else place
  ids = ' '.join(map(str, tokens[:_IDS].tolist()))
  more = ' ...' if len(tokens) > _IDS else ''
  return rich_text.Text.assemble((f'{place}: {len(tokens)} tokens', 'bold'), f'  {ids}{more}')
