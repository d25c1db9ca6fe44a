"""Meshes, rematerialisation and batches that fit, the fastest first.

Every candidate's update is compiled. First all meshes at their most frugal:
everything recomputed, one row a shard; where that does not fit, nothing on
that mesh does. On the fastest of them less recomputation and more rows at a
time are tried then.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import TYPE_CHECKING

import rich.box
import rich.console
import rich.table

from jaxpost.errors import InputError
from jaxpost.hardware import chips
from jaxpost.planning import dry_run, meshes, stage, tables

if TYPE_CHECKING:
  from jaxpost.stage.records import PreparedStage

_REMAT = ('none', 'dots')
_MOST_ROWS = 8  # of a shard at a time


def search(
  raw: dict, options: stage.Options, console: rich.console.Console, words: tuple = ('--config=FILE',)
) -> list[dict]:
  """The best plan of each stage, after the ranked list and a launch line.

  words: of the command that asked, whose config the line is to have, too.
  """
  best = []
  if not options.topology.chip.memory:
    raise InputError(
      f'--search: {options.topology.text}: only chips of known speed and '
      f'memory can be ranked; for example {chips.EXAMPLES}'
    )
  for p in dry_run.prepare_all(raw, options.stage):
    p = vary(p, {'mesh.rollout': p.config.mesh.rollout.replace('auto', 'data=-1')})
    found = _candidates(p, options, console)
    fitting = sorted((f for f in found if f[1]['fits'] is not False), key=seconds_a_token)
    if not fitting:
      raise InputError(
        f'--search: nothing of {p.name} fits {options.topology.text}; take more chips, shorter rows or a smaller model'
      )
    if p.inputs.algorithm.on_policy:
      fitting[0] = _with_rollout(*fitting[0], p, options, console)
    console.print(ranking(fitting))
    prefix = f'--config.{p.name}.' if raw.get('stages') else '--config.'
    console.print(launch_line(words, {prefix + k: v for k, v in fitting[0][0].items()}), soft_wrap=True)
    best.append({**fitting[0][1], 'settings': fitting[0][0]})
  return best


def launch_line(words: tuple, proposed: dict) -> str:
  """`launch.train` with the config of a command, and what is proposed."""
  given, rest = {}, list(words)
  while rest:
    word = '--' + rest.pop(0).lstrip('-')
    name, equals, _ = word.partition('=')
    if not re.match(r'--(no)?config(\.|$)', name):
      continue
    value = rest and not equals and not rest[0].startswith('-')
    given[name] = f'{word}={rest.pop(0)}' if value else word
  given |= {k: f'{k}={v}' for k, v in proposed.items()}
  return ' '.join(['python -m launch.train', *map(shlex.quote, given.values()), '--workdir=runs/planned'])


def timed(plan: dict) -> dict:
  """The plan of an update alone, with the seconds of a step that follow from it."""
  row = plan['programs'][0]
  plan['step'] = plan['step'] or {'no_overlap': {'step_s': row['calls'] * row['seconds']['no_overlap']}}
  return plan


def seconds_a_token(found: tuple) -> float:
  """Without overlap: so that what crosses the network counts."""
  step = found[1]['step']['no_overlap']
  return step['step_s'] / found[1]['trained_tokens']


def vary(p: PreparedStage, settings: dict) -> PreparedStage:
  """The stage with {'section.field': value} in its config."""
  config = p.config
  for key, value in settings.items():
    section, field = key.split('.')
    config = dataclasses.replace(config, **{section: dataclasses.replace(vars(config)[section], **{field: value})})
  return dataclasses.replace(p, inputs=dataclasses.replace(p.inputs, config=config))


def _candidates(p, options, console) -> list:
  """[(settings, plan)] of what was tried."""
  shards, tried = meshes.training(p.inputs, options.topology, fixed=False), []

  def attempt(mesh, remat, rows):
    at_once = rows * shards[mesh]
    settings = {'mesh.train': mesh, 'model.remat': remat, 'train.micro_batch_size': at_once}
    if not p.inputs.algorithm.on_policy and p.config.train.batch_size < at_once:
      settings['train.batch_size'] = at_once
    plan = stage.plan(vary(p, settings), dataclasses.replace(options, only=('update',)))
    row = timed(plan)['programs'][0]
    console.print(
      f'{mesh} remat={remat} rows={at_once}: '
      + ('does NOT fit' if row['fits'] is False else 'fits')
      + f', {tables.gib(row["bytes_per_chip"]["total"])} GiB, '
      f'{1e6 * seconds_a_token((settings, plan)):.3f} us a token'
    )
    tried.append((settings, plan))
    return row['fits'] is not False, seconds_a_token((settings, plan))

  frugal, errors = {}, []
  for mesh in shards:
    try:
      frugal[mesh] = attempt(mesh, 'full', 1)
    except InputError as error:  # not every stage knows every axis
      errors.append(error)
      console.print(f'{mesh}: {error}')
  if not frugal:
    raise errors[0]
  good = [m for m, (fits, _) in frugal.items() if fits]
  if not good:
    return tried
  best = min(good, key=lambda m: frugal[m][1])
  for remat in _REMAT:
    attempt(best, remat, 1)
  rows, last = 2, frugal[best][1]
  while rows <= _MOST_ROWS:
    fits, took = attempt(best, 'full', rows)
    if not fits or took >= last:
      break
    rows, last = 2 * rows, took
  return tried


def _with_rollout(settings, plan, p, options, console) -> tuple:
  """The winner with the least split of the sampler's weights that fits."""
  for mesh in meshes.sampling(p.inputs, options.topology):
    more = settings | {'mesh.rollout': mesh}
    whole = stage.plan(vary(p, more), dataclasses.replace(options, only=()))
    console.print(f'mesh.rollout={more["mesh.rollout"]}: ' + ('fits' if whole['fits'] else 'does NOT fit'))
    if whole['fits'] is not False:
      return more, whole
  return settings, plan


def ranking(found: list) -> rich.table.Table:
  out = rich.table.Table(box=rich.box.SIMPLE, title='what fits, fastest first', title_justify='left')
  for name in ('settings', 'GiB a device', 'us a token', 'MFU'):
    out.add_column(name, justify='left' if name == 'settings' else 'right')
  for settings, plan in found:
    row = next(r for r in plan['programs'] if r['program'] == 'update')
    out.add_row(
      ' '.join(f'{k}={v}' for k, v in settings.items()),
      tables.gib(row['bytes_per_chip']['total']),
      f'{1e6 * seconds_a_token((settings, plan)):.3f}',
      f'{row["flops"]["model"] and row["roofline_mfu"] or 0:.1%}',
    )
  return out
