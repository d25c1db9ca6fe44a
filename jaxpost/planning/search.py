"""Searches for the fastest mesh, rematerialization and batch that fit.

Every candidate's update is compiled. Each mesh is tried first with the least memory: full recomputation, one row per
shard. If that does not fit, nothing on that mesh does. On the fastest mesh, less recomputation and more rows at a time
are tried next.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, NamedTuple

import rich.console
import rich.table

from jaxpost.errors import InputError
from jaxpost.monitor import report
from jaxpost.monitor.program_table import console_table
from jaxpost.planning import auto, defaults, dry_run, machines, meshes, stage, tables
from jaxpost.programs.compile import TooLargeError

if TYPE_CHECKING:
  from jaxpost.stage.records import PreparedStage

_REMAT = ('none', 'dots')
_ROWS = (2, 4, 8)  # per shard, after 1


class Candidate(NamedTuple):
  """Settings {'section.field': value} that replace those of a config, and the plan with them."""

  settings: dict
  plan: dict

  @property
  def fits(self) -> bool:
    """False if a program needs more memory than a device has; True also if that is unknown."""
    return self.plan['fits'] is not False


def search(
  raw: dict, options: stage.Options, console: rich.console.Console, words: tuple[str, ...] = ('--config=FILE',)
) -> list[dict]:
  """Returns the best plan of each stage; prints the ranked candidates and a launch line for it.

  Args:
    words: arguments of the calling command, from which the launch line takes the config flags.

  Raises:
    InputError: the chips are unknown, or nothing fits.
  """
  best = []
  if not options.topology.chip.memory:
    raise InputError(
      f'--search: {options.topology.text}: only chips of known speed and '
      f'memory can be ranked; for example {machines.FORMS}'
    )
  for p in dry_run.prepare_all(raw, options.stage):
    p = stage.vary(p, {'mesh.rollout': p.config.mesh.rollout.replace('auto', 'data=-1')})
    fitting = [c for c in _candidates(p, options, console) if c.fits]
    if not fitting:
      raise InputError(
        f'--search: nothing of {p.name} fits {options.topology.text}; take more chips, shorter rows or a smaller model'
      )
    fitting.sort(key=lambda c: stage.seconds_a_token(c.plan))
    if p.inputs.algorithm.on_policy:
      fitting[0] = _with_rollout(fitting[0], p, options, console)
    console.print(ranking(fitting))
    prefix = f'--config.{p.name}.' if raw.get('stages') else '--config.'
    fastest = fitting[0]
    console.print(launch_line(words, {prefix + k: v for k, v in fastest.settings.items()}), soft_wrap=True)
    best.append({**fastest.plan, 'settings': fastest.settings})
  return best


def launch_line(words: tuple, proposed: dict) -> str:
  """Returns a command line of `launch.train` with the config flags among `words` and the proposed ones."""
  flags = dict(report.config_flags(words)) | proposed
  texts = [flag if value is None else f'{flag}={value}' for flag, value in flags.items()]
  return ' '.join(['python -m launch.train', *map(shlex.quote, texts), '--workdir=runs/planned'])


def _candidates(p: PreparedStage, options: stage.Options, console: rich.console.Console) -> list[Candidate]:
  """Returns all candidates that were compiled, including those that do not fit."""
  shards = meshes.training(p.inputs, options.topology, fixed=False)
  tried = []

  def attempt(mesh: str, remat: str, rows: int) -> Candidate:
    """Plans the update with micro-batches of `rows` rows per shard."""
    micro_batch = rows * shards[mesh]
    settings = {'mesh.train': mesh, 'model.remat': remat, 'train.micro_batch_size': micro_batch}
    if not p.inputs.algorithm.on_policy and p.config.train.batch_size < micro_batch:
      settings['train.batch_size'] = micro_batch
    try:
      plan = stage.with_step(stage.plan(stage.vary(p, settings), dataclasses.replace(options, only=('update',))))
    except TooLargeError as error:
      console.print(f'{mesh} remat={remat} rows={micro_batch}: {error}')
      tried.append(Candidate(settings, {'fits': False}))
      return tried[-1]
    row = plan['programs'][0]
    candidate = Candidate(settings, plan)
    console.print(
      f'{mesh} remat={remat} rows={micro_batch}: '
      + ('does NOT fit' if row['fits'] is False else 'fits')
      + f', {tables.gib(row["bytes_per_chip"]["total"])} GiB, '
      f'{1e6 * stage.seconds_a_token(candidate.plan):.3f} us a token'
    )
    tried.append(candidate)
    return candidate

  least_memory = {}
  errors = []
  for mesh in shards:
    try:
      least_memory[mesh] = attempt(mesh, 'full', 1)
    except InputError as error:  # not every stage supports every axis
      errors.append(error)
      console.print(f'{mesh}: {error}')
  if not least_memory:
    raise errors[0]
  seconds = {mesh: stage.seconds_a_token(candidate.plan) for mesh, candidate in least_memory.items() if candidate.fits}
  if not seconds:
    return tried
  best = min(seconds, key=seconds.__getitem__)
  for remat in _REMAT:
    attempt(best, remat, 1)
  last = seconds[best]
  for rows in _ROWS:
    candidate = attempt(best, 'full', rows)
    if not candidate.fits or stage.seconds_a_token(candidate.plan) >= last:
      break
    last = stage.seconds_a_token(candidate.plan)
  return tried


def _with_rollout(
  winner: Candidate, p: PreparedStage, options: stage.Options, console: rich.console.Console
) -> Candidate:
  """Returns the winner with the least split of the sampler's weights that fits, if one does.

  As in a run, `rollout.slots` and what else the config leaves open are chosen by memory.
  """
  for mesh in meshes.sampling(p.inputs, options.topology):
    settings = winner.settings | {'mesh.rollout': mesh}
    try:
      fitted = defaults.fitted(stage.vary(p, settings), options.topology, console.print)
      plan = auto.planned(fitted, dataclasses.replace(options, only=()), console.print)
    except InputError as error:
      console.print(f'mesh.rollout={mesh}: {error}')
      continue
    candidate = Candidate(settings, plan)
    console.print(f'mesh.rollout={mesh}: ' + ('fits' if candidate.fits else 'does NOT fit'))
    if candidate.fits:
      return candidate
  return winner


def ranking(candidates: list[Candidate]) -> rich.table.Table:
  """Returns the candidates as a table."""
  columns = ('settings', 'GiB a device', 'us a token', 'MFU')
  out = console_table('what fits, fastest first', columns, left=('settings',))
  for candidate in candidates:
    row = next(r for r in candidate.plan['programs'] if r['program'] == 'update')
    out.add_row(
      ' '.join(f'{k}={v}' for k, v in candidate.settings.items()),
      tables.gib(row['bytes_per_chip']['total']),
      f'{1e6 * stage.seconds_a_token(candidate.plan):.3f}',
      f'{row["flops"]["model"] and row["roofline_mfu"] or 0:.1%}',
    )
  return out
