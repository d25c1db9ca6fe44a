"""Estimates the steps of an epoch over a stage's data, converts `train.epochs` to steps, and warns about the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpost.data import packing
from jaxpost.stage import checks
from jaxpost.stage import config as config_lib
from jaxpost.stage.batch_shape import row_length
from jaxpost.stage.config import Config

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.stage.records import Data, Inputs, PreparedStage

_SAMPLED = 256  # documents of a source that are measured if none have been read yet


def steps_of(inputs: Inputs, data: Data) -> float:
  """Returns the steps in which a stage uses each of its documents, or prompts, once.

  It is exact for prompts, except for those that streaming leaves out. For documents it is an estimate from packing the
  first 20,000 of them, as they are packed in windows and in another order each epoch.
  """
  config = inputs.config
  if inputs.algorithm.on_policy:
    return len(data.stream) / config.rollout.prompts
  rows_per_document = 0.0
  for share, lengths in _lengths(data):
    kept = [n for n in lengths if n]
    packed_rows = len(packing.pack(kept, row_length(config, False))) if config.data.packing else len(kept)
    rows_per_document += share * max(1, packed_rows) / len(lengths)
  return len(data.rows) * rows_per_document / config.train.batch_size


def tokens_of(inputs: Inputs, data: Data) -> float:
  """Returns the tokens of one pass over the documents; 0 for an on-policy stage, which samples them."""
  if inputs.algorithm.on_policy:
    return 0.0
  tokens_per_document = sum(share * sum(lengths) / len(lengths) for share, lengths in _lengths(data))
  return len(data.rows) * tokens_per_document


def _lengths(data: Data) -> list[tuple[float, list[int]]]:
  """Returns (share of all documents, tokens of each of its first documents, 0 if dropped) of each source."""
  rows = data.rows
  read = 0 if rows.streaming else checks.READ_FIRST
  shares = rows.weights or rows.sizes

  def length(n: int) -> int:
    example = data.stream.fitted(n, data.documents.plain(n))
    return 0 if example is None else len(example.tokens)

  out, start = [], 0
  for share, size in zip(shares, rows.sizes, strict=True):
    measured = range(start, start + min(size, max(read - start, _SAMPLED)))
    if size:
      out.append((share / sum(shares), [length(n) for n in measured]))
    start += size
  return out


def warnings(inputs: Inputs, data: Data) -> list[str]:
  """Returns warnings about data that is cut, steps that are not saved, and settings that have no effect."""
  config, steps = inputs.config, inputs.config.train.steps
  out = [_warn_over_long(inputs, data), _warn_best(config)]
  if steps > 100 and not 0 < config.save.every < steps:
    out.append(f'nothing is saved before step {steps}, so a crash loses all of them: config.save.every=N saves every N')
  if inputs.algorithm.on_policy and config.train.batch_size != type(config.train).batch_size:
    out.append('config.train.batch_size changes nothing, rollout.prompts and rollout.group_size are the batch')
  if config.log.profile_from > steps:
    out.append(f'config.log.profile_from={config.log.profile_from} traces nothing, as there are {steps} steps')
  if config.eval.every and not config.eval.data.path:
    out.append('config.eval.every changes nothing, as config.eval.data.path is empty')
  if data.held_out and data.held_out.documents is None and not config.eval.samples:
    out.append(f'nothing is evaluated: {config.algorithm} has no loss of held-out rows, so set config.eval.samples')
  return [text for text in out if text]


def _warn_over_long(inputs: Inputs, data: Data) -> str:
  """Returns a warning if more than 1 % of the prompts, or of the documents read by now, are too long; '' if not."""
  config, fate = inputs.config, 'left out'
  if inputs.algorithm.on_policy:
    count, total = data.stream.skipped, data.stream.skipped + len(data.stream)
    kind, limit, field = 'prompts', config.rollout.max_prompt_length, 'config.rollout.max_prompt_length'
  else:
    kind, limit, field = 'documents', row_length(config, False), 'config.train.row_length'
    total = 0 if data.rows.streaming else min(len(data.rows), checks.READ_FIRST)
    plain = {n: e for n in range(total) if (e := data.documents.plain(n)) is not None and len(e.tokens) > limit}
    count = len(plain)
    if config.data.overlong == 'truncate':
      cut = sum(data.stream.fitted(n, example) is not None for n, example in plain.items())
      fate = f'cut there ({cut:,}) or left out ({count - cut:,})' if 0 < cut < count else fate
      fate = 'cut there' if cut == count else f'{fate}, as nothing trained would remain'
  if count <= total / 100:
    return ''
  share = f'{count:,} of {total:,} {kind} ({count / max(total, 1):.0%})'
  return f'{share} are longer than {limit:,} tokens and are {fate}: raise {field}'


def _warn_best(config: Config) -> str:
  """Returns a warning if few steps are both saved and evaluated, so that `save.keep_best` has little choice."""
  saved, evaluated, steps = config.save.every, config.eval.every, config.train.steps
  every = math.lcm(saved, evaluated)  # of steps that are both saved and evaluated; 0 if either is 0
  if not config.save.keep_best or 0 < every < steps and every == max(saved, evaluated):
    return ''
  candidates = f'every {every} steps one is' if 0 < every < steps else f'only step {steps}, the last, is'
  return f'config.save.keep_best: {candidates} both saved and evaluated: let config.save.every equal config.eval.every'


def count_steps(inputs: Inputs, data: Data) -> Inputs:
  """Returns the stage with `train.steps` for its `train.epochs`, where these are given."""
  train = inputs.config.train
  if not train.epochs:
    return inputs
  train = dataclasses.replace(train, steps=max(1, round(train.epochs * steps_of(inputs, data))))
  inputs.algorithm.check(dataclasses.replace(inputs.config, train=dataclasses.replace(train, epochs=0.0)))
  return dataclasses.replace(inputs, config=dataclasses.replace(inputs.config, train=train))


def with_steps_of_run(raw: dict, configs: Mapping[str, Config], path: epath.Path) -> dict:
  """Returns the config with the steps into which a run in this folder has converted its `train.epochs`.

  Args:
    raw: the config as nested dicts.
    configs: the same, {stage: Config}.
    path: config.json of the run; it may be missing.
  """
  if not any(c.train.epochs for c in configs.values()) or not path.exists():
    return raw
  saved = config_lib.parse_saved(path)
  same_epochs = [n for n, c in configs.items() if n in saved and c.train.epochs == saved[n].train.epochs > 0]
  return with_steps(raw, {name: saved[name].train.steps for name in same_epochs})


def with_steps(raw: dict, steps: Mapping[str, int]) -> dict:
  """Returns the config with `train.steps` of these stages."""
  for name, count in steps.items():
    change = {'train': {'steps': count}}
    raw = config_lib.merge(raw, {name: change} if raw.get('stages') else change)
  return raw


def facts(prepared: Sequence[PreparedStage]) -> dict[str, dict[str, Any]]:
  """Returns {stage: its steps, rows, warnings, tokens per epoch, batch and epochs} for reports."""
  out = {}
  for p in prepared:
    config, per_epoch = p.config, steps_of(p.inputs, p.data)
    if p.inputs.algorithm.on_policy:
      batch = f'{config.rollout.prompts} prompts x {config.rollout.group_size} completions'
    else:
      batch = f'{config.train.batch_size} rows x {row_length(config, False)} tokens'
    out[p.name] = dict(
      steps=config.train.steps,
      rows=len(p.data.stream) if p.inputs.algorithm.on_policy else len(p.data.rows),
      notes=[f'warning: {text}' for text in warnings(p.inputs, p.data)],
      tokens_per_epoch=round(tokens_of(p.inputs, p.data)),
      batch=f'{batch} at a learning rate of {config.optim.lr:.3g}',
      epochs=config.train.steps / per_epoch if per_epoch else 0.0,
    )
  return out
