"""A plan as people read it: tables, a picture, and the object of plan.json."""

import json

import rich.box
import rich.console
import rich.table

from jaxpost.monitor.metrics import short_number
from jaxpost.storage import object_store

_GIB, _WIDTH = 2**30, 40
_COLOURS = {
  'parameters': 'blue',
  'optimizer': 'cyan',
  'kv_cache': 'magenta',
  'batch': 'white',
  'other': 'white',
  'outputs': 'yellow',
  'temporaries': 'red',
  'elsewhere': 'bright_black',
}


def gib(count) -> str:
  return f'{count / _GIB:.2f}'


def memory(rows: list[dict], limit: float) -> rich.table.Table:
  """GiB a device of each program, and a bar of what fills it."""
  table = rich.table.Table(
    title='memory, GiB a device' + (f' of {gib(limit)}' if limit else ''), box=rich.box.SIMPLE, title_justify='left'
  )
  for name in ('program', 'shapes', 'fits', 'free', 'params', 'optim.', 'KV', 'temp.', 'held', ''):
    table.add_column(name, justify='left' if name in ('program', 'shapes', '') else 'right', no_wrap=True)
  full = limit or max(r['bytes_per_chip']['total'] for r in rows)
  for r in rows:
    b = r['bytes_per_chip']
    fits = {True: 'yes', False: 'NO', None: '?'}[r['fits']]
    table.add_row(
      r['program'],
      r['shapes'][:24],
      fits,
      gib(r['free_bytes']) if limit else '',
      gib(b['parameters']),
      gib(b['optimizer']),
      gib(b['kv_cache']),
      gib(b['temporaries']),
      gib(b['elsewhere']),
      bar(b, full),
    )
  return table


def bar(parts: dict, full: float) -> str:
  """A line of letters as long as what they stand for; ! is too much."""
  line = ''
  for name, colour in _COLOURS.items():
    count = round(_WIDTH / 2 * parts[name] / full)
    line += f'[{colour}]{name[0] * count}[/]' if count else ''
  return line + ('[red]![/]' if parts['total'] > full else '')


def work(rows: list[dict]) -> rich.table.Table:
  """FLOPs, seconds and the share of the peak of each program."""
  table = rich.table.Table(
    title="time: the slowest of three parts (roofline), and XLA's estimate", box=rich.box.SIMPLE, title_justify='left'
  )
  for name in (
    'program',
    'calls',
    'FLOPs a device',
    'of the model',
    'compute',
    'memory',
    'network',
    'roofline',
    'XLA',
    'MFU',
    'compile s',
  ):
    table.add_column(name, justify='left' if name == 'program' else 'right')
  for r in rows:
    s = r['seconds']
    table.add_row(
      r['program'],
      f'{r["calls"]:g}',
      short_number(r['flops']['program']),
      short_number(r['flops']['model']),
      *(milliseconds(s[n]) for n in ('compute', 'memory', 'network', 'roofline', 'xla')),
      f'{r["roofline_mfu"]:.1%}' if r['roofline_mfu'] else '',
      f'{r["compile_s"]:.0f}',
    )
  return table


def milliseconds(seconds) -> str:
  return '' if seconds is None else f'{1e3 * seconds:.1f} ms'


def traffic(rows: list[dict]) -> rich.table.Table:
  """MiB a device of each kind of collective, along each axis."""
  table = rich.table.Table(
    title='collectives: MiB that a device receives, and the least it must', box=rich.box.SIMPLE, title_justify='left'
  )
  for name in ('program', 'axis', 'kinds', 'sent', 'least', 'ratio', 'network'):
    table.add_column(name, justify='right' if name in ('sent', 'least', 'ratio') else 'left')
  for r in rows:
    for axis, found in by_axis(r).items():
      sent, least = found['sent'] / 2**20, found['least'] / 2**20
      table.add_row(
        r['program'],
        axis,
        ', '.join(f'{k} {v / 2**20:,.1f}' for k, v in found['kinds'].items()),
        f'{sent:,.1f}',
        f'{least:,.1f}',
        f'{sent / least:.2f}' if least else '',
        'between' if found['far'] else 'inside',
      )
  return table


def by_axis(row: dict) -> dict:
  """{axis: bytes sent, the least, by kind}; what moves next to nothing not."""
  out = {}
  blank = lambda: dict(sent=0.0, least=0.0, kinds={}, far=False)
  for kind, axes in row['collective_bytes'].items():
    for axis, found in axes.items():
      mine = out.setdefault(axis, blank())
      mine['sent'] += found['bytes']
      mine['kinds'][kind] = found['bytes']
      mine['far'] |= found['between_hosts']
  for axes in row['collective_minimum'].values():
    for axis, count in axes.items():
      out.setdefault(axis, blank())['least'] += count
  return {k: v for k, v in out.items() if v['sent'] + v['least'] > 2**16}


def totals(plan: dict) -> rich.table.Table:
  """Seconds a step, rates and cost."""
  table = rich.table.Table(
    title=f'a step: at most {short_number(plan["trained_tokens"])} tokens '
    f'trained, {short_number(plan["sampled_tokens"])} sampled',
    box=rich.box.SIMPLE,
    title_justify='left',
  )
  for name in ('estimate', 's a step', 'tokens/s', 'tokens/s/chip', 'MFU', 'USD/M tokens', 'where it goes'):
    table.add_column(name, justify='left' if name in ('estimate', 'where it goes') else 'right')
  for name, found in plan['step'].items():
    cost = found.get('usd_per_million_tokens')
    table.add_row(
      {'no_overlap': 'no overlap', 'xla': 'XLA, no network'}.get(name, name),
      f'{found["step_s"]:.3f}',
      short_number(found['tokens_per_s']),
      f'{found["tokens_per_s_per_chip"]:,.0f}',
      f'{found["mfu"]:.1%}',
      f'{cost:.4f}' if cost else '',
      ', '.join(f'{k} {v / found["step_s"]:.0%}' for k, v in found['seconds'].items() if v > found['step_s'] / 200),
    )
  return table


def show(plan: dict, console: rich.console.Console):
  """Prints the plan of a stage."""
  axes = '; '.join(
    f'{phase} ' + ','.join(f'{a}={n}' for a, n in mesh.items() if n > 1) or 'one device'
    for phase, mesh in plan['mesh'].items()
  )
  console.print(
    f'{plan["stage"]}: {plan["algorithm"]}, '
    f'{short_number(plan["parameters"])} parameters, {plan["devices"]} x '
    f'{plan["device_kind"]} ({plan["topology"]}), mesh: {axes}'
  )
  limit = plan['memory_per_device']
  for table in (memory(plan['programs'], limit), work(plan['programs']), traffic(plan['programs'])):
    if table.row_count:
      console.print(table)
  if plan['step']:
    console.print(totals(plan))
  worst = [r for r in plan['programs'] if r['fits'] is False]
  if worst:
    most = max(worst, key=lambda r: -r['free_bytes'])
    console.print(
      f'DOES NOT FIT: {most["program"]} is {gib(-most["free_bytes"])} GiB '
      'over; --search looks for a mesh, rematerialisation and batch that do'
    )


def write(path, plans: list[dict]):
  object_store.write_text(path, json.dumps(plans, indent=1))
