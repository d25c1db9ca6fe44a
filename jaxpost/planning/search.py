"""Meshes, rematerialisation and batches that fit, the fastest first.

Every candidate's update is compiled. First all meshes at their most frugal:
everything recomputed, one row a shard; where that does not fit, nothing on
that mesh does. On the fastest of them less recomputation and more rows at a
time are tried then.
"""

import dataclasses

import rich.box
import rich.console
import rich.table

from jaxpost import build
from jaxpost.errors import InputError
from jaxpost.planning import chips, described, stage, table

_TENSOR = (1, 2, 4, 8)
_REMAT = ('none', 'dots')
_MOST_ROWS = 8  # of a shard at a time


def search(raw: dict, options: stage.Options,
           console: rich.console.Console) -> list[dict]:
  """The best plan of each stage, after the ranked list and a launch line."""
  best = []
  if not options.topology.chip.memory:
    raise InputError(
        f'--search: {options.topology.text}: only chips of known speed and '
        f'memory can be ranked; for example {chips.EXAMPLES}')
  for p in described.prepare_all(raw, options.stage):
    found = _candidates(p, options, console)
    fitting = sorted((f for f in found if f[1]['fits'] is not False),
                     key=seconds_a_token)
    if not fitting:
      raise InputError(
          f'--search: nothing of {p.name} fits {options.topology.text}; take '
          'more chips, shorter rows or a smaller model')
    if p.algorithm.on_policy:
      fitting[0] = _with_rollout(*fitting[0], p, options, console)
    console.print(ranking(fitting))
    prefix = f'--config.{p.name}.' if len(
        described.prepare_all(raw)) > 1 else '--config.'
    console.print('python -m launch.train --config=FILE --workdir=DIR ' +
                  ' '.join(f'{prefix}{k}={v}'
                           for k, v in fitting[0][0].items()))
    best.append({**fitting[0][1], 'settings': fitting[0][0]})
  return best


def tensors(p: build.Prepared, chips: int) -> list[int]:
  """Sizes of the tensor axis that split heads and the MLP evenly."""
  cfg = p.model.config
  size = cfg.experts.size if cfg.experts else cfg.intermediate_size
  return [t for t in _TENSOR if chips % t == 0 and cfg.num_heads % t == 0
          and size % t == 0]


def spell(rest: str, tensor: int) -> str:
  """The text of a mesh whose devices are split by `tensor`, else `rest`."""
  return rest + (f',tensor={tensor}' if tensor > 1 else '')


def timed(plan: dict) -> dict:
  """The plan of an update alone, with what it says of a step."""
  row = plan['programs'][0]
  plan['step'] = plan['step'] or {'no_overlap': {
      'step_s': row['calls'] * row['seconds']['no_overlap']}}
  return plan


def seconds_a_token(found: tuple) -> float:
  """Without overlap: so that what crosses the network counts."""
  step = found[1]['step']['no_overlap']
  return step['step_s'] / found[1]['trained_tokens']


def vary(p: build.Prepared, settings: dict) -> build.Prepared:
  """The stage with {'section.field': value} in its config."""
  config = p.config
  for key, value in settings.items():
    section, field = key.split('.')
    config = dataclasses.replace(config, **{
        section: dataclasses.replace(vars(config)[section], **{field: value})})
  return dataclasses.replace(p, config=config)


def _candidates(p, options, console) -> list:
  """[(settings, plan)] of what was tried."""
  tried = []

  def attempt(tensor, remat, rows):
    mesh = spell('fsdp=-1', tensor)
    at_once = rows * options.topology.chips // tensor
    settings = {'mesh.train': mesh, 'model.remat': remat,
                'train.micro_batch_size': at_once}
    if not p.algorithm.on_policy and p.config.train.batch_size < at_once:
      settings['train.batch_size'] = at_once
    plan = stage.plan(vary(p, settings), dataclasses.replace(
        options, only=('update',)))
    row = timed(plan)['programs'][0]
    console.print(
        f'{mesh} remat={remat} rows={at_once}: ' + (
            'does NOT fit' if row['fits'] is False else 'fits') +
        f', {table.gib(row["bytes_per_chip"]["total"])} GiB, '
        f'{1e6 * seconds_a_token((settings, plan)):.3f} us a token')
    tried.append((settings, plan))
    return row['fits'] is not False, seconds_a_token((settings, plan))

  frugal = {t: attempt(t, 'full', 1) for t in tensors(
      p, options.topology.chips)}
  good = [t for t, (fits, _) in frugal.items() if fits]
  if not good:
    return tried
  best = min(good, key=lambda t: frugal[t][1])
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
  for tensor in tensors(p, options.topology.chips):
    more = settings | {'mesh.rollout': spell('data=-1', tensor)}
    whole = stage.plan(vary(p, more), dataclasses.replace(options, only=()))
    console.print(f'mesh.rollout={more["mesh.rollout"]}: ' + (
        'fits' if whole['fits'] else 'does NOT fit'))
    if whole['fits'] is not False:
      return more, whole
  return settings, plan


def ranking(found: list) -> rich.table.Table:
  out = rich.table.Table(box=rich.box.SIMPLE, title='what fits, fastest first',
                         title_justify='left')
  for name in ('settings', 'GiB a device', 'us a token', 'MFU'):
    out.add_column(name, justify='left' if name == 'settings' else 'right')
  for settings, plan in found:
    row = next(r for r in plan['programs'] if r['program'] == 'update')
    out.add_row(
        ' '.join(f'{k}={v}' for k, v in settings.items()),
        table.gib(row['bytes_per_chip']['total']),
        f'{1e6 * seconds_a_token((settings, plan)):.3f}',
        f'{row["flops"]["model"] and row["roofline_mfu"] or 0:.1%}')
  return out
