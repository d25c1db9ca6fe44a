"""Previews a stage: its model, rows as the model reads them, rewards. Loads no weights."""

from __future__ import annotations

import numpy as np
from rich import text as rich_text

from jaxpost.data import preview
from jaxpost.data.sources import Rows
from jaxpost.models import transformer
from jaxpost.monitor.metrics import short_number
from jaxpost.rewards import builtin
from jaxpost.rl.reward_metrics import REWARD_MODEL
from jaxpost.stage import batch_shape, checks, epochs, reward_models, sampling_inputs
from jaxpost.stage.records import Data, Inputs, PreparedStage

_COUNTED = 512  # rows in the table of lengths
_IDS = 24  # token ids shown of a row


def show_stage(stage: PreparedStage, rows: int) -> list:
  """Returns rich renderables: model, `rows` rows as the model reads them, rewards.

  Args:
    stage: prepared as for training, so it has passed all checks before the first step.
  """
  inputs = stage.inputs
  data = stage.data
  config = stage.config
  tokenizer = inputs.tokenizer
  data_rows = data.rows
  assert data_rows is not None
  per_epoch = epochs.steps_of(inputs, data)
  parameters = transformer.num_params(inputs.model.config)
  earlier = f'stage:{policy.stage}' if (policy := inputs.sources['policy']).stage else ''
  passes = f'{short_number(config.train.steps / per_epoch)} epochs'
  passes += f' of {short_number(per_epoch)} steps' if per_epoch >= 1 else ''
  data_line = f'data: {len(data_rows)} row{"s" if len(data_rows) > 1 else ""} of {config.data.path}'
  if data_rows.dropped:
    data_line += f', {data_rows.dropped} more dropped by config.data.map'
  out = [
    rich_text.Text(f'{stage.name}: {config.algorithm}, {config.train.steps} steps, {passes}', 'bold'),
    f'model: {config.init_from or earlier or config.model.path or config.model.preset}, {parameters:,} '
    f'parameters, {tokenizer.vocab_size} tokens of {tokenizer.source}',
    data_line,
  ]
  out += [f'warning: {text}' for text in epochs.warnings(inputs, data)]
  if data.held_out:
    count = len(data.held_out.rows)
    out.append(f'held out: {min(count, config.eval.size)} of {count} rows of {config.eval.data.path}')
  if method_fields := inputs.algorithm.defaults.get('rl', ()):
    values = {name: vars(config.rl)[name] for name in method_fields}
    out.append('method: ' + ', '.join(f'rl.{k} {"none" if v == () else v}' for k, v in values.items()))
  tools = None
  if stage.workers.environment:
    tools = stage.workers.environment.tools
    by_name = tools if isinstance(tools, dict) else {config.environment: tools}
    out += [f'tool: {tool["function"]["name"]} of {name}' for name, its_tools in by_name.items() for tool in its_tools]
  on_policy = inputs.algorithm.on_policy
  out += _show_prompts(inputs, data_rows, rows, tools) if on_policy else _show_rows(inputs, data, rows)
  if checks.samples(config, inputs.algorithm):
    environment = stage.workers.environment  # of several, each may have rewards
    out += _show_rewards(inputs, bool(environment) and getattr(environment, 'gives_reward', True))
  return out


def _show_rows(inputs: Inputs, data: Data, count: int) -> list:
  config, tokenizer = inputs.config, inputs.tokenizer
  indices = range(min(max(count, _COUNTED), len(data.rows)))
  examples_by_index = {i: example for i in indices if (example := data.documents.plain(i)) is not None}
  if not examples_by_index:  # a map may drop streamed rows
    return [f'the first {len(indices)} rows are all dropped by config.data.map']
  numbers, examples = list(examples_by_index), list(examples_by_index.values())
  length = batch_shape.row_length(config, False)
  *shown, _ = preview.preview(examples[:count] or examples[:1], tokenizer)
  out = []
  for i, row in enumerate(shown[:count]):
    out += [_heading(data.rows.where(numbers[i]), examples[i].tokens), row]
  table = preview.preview(examples, tokenizer, length, config.data.overlong == 'drop')[-1]
  table.title = f'the first {len(examples)} rows'
  return [*out, table]


def _show_prompts(inputs: Inputs, data: Rows, count: int, tools: list[dict] | None) -> list:
  config = inputs.config
  tokenizer = inputs.tokenizer
  out: list[rich_text.Text | str] = []
  prompts = sampling_inputs.prompt_stream(inputs, data, shuffle=False, tools=tools)
  for i in range(min(count, len(prompts))):
    prompt = prompts.prompt(i)
    if prompt is None:  # a streamed row that is dropped
      continue
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


def _show_rewards(inputs: Inputs, from_environment: bool) -> list:
  config = inputs.config
  correct_by = sampling_inputs.correct_by(config, reward_models.grades(config, inputs.algorithm))
  names = iter(sampling_inputs.reward_names(config))
  specs = config.rewards_tuple()
  rewards = []  # (name, where it is from, weight)
  for spec, weight in zip(specs, config.reward_weights or [1.0] * len(specs)):
    if spec == REWARD_MODEL:
      rewards.append((spec, config.reward_model.path, weight))
    else:
      rewards.append((next(names), builtin.locate(spec) if isinstance(spec, str) else 'in this process', weight))
  if from_environment:
    rewards.append(('environment', config.environment, 1.0))
  return [
    f'reward: {name} ({place}), weight {weight:g}{", decides what is correct" if name == correct_by else ""}'
    for name, place, weight in rewards
  ]


def _heading(place: str, tokens: np.ndarray) -> rich_text.Text:
  """Returns the heading of a row: its place, its length and its first token ids."""
  place = f'...{place[-37:]}' if len(place) > 40 else place
  ids = ' '.join(map(str, tokens[:_IDS].tolist()))
  ellipsis = ' ...' if len(tokens) > _IDS else ''
  return rich_text.Text.assemble((f'{place}: {len(tokens)} tokens', 'bold'), f'  {ids}{ellipsis}')
