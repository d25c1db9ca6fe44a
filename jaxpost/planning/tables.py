"""Tables of a plan for the console: memory, time, collectives, and rates of a step."""

import collections
from typing import Any

import rich.console
import rich.table

from jaxpost.monitor.metrics import short_number
from jaxpost.monitor.program_table import console_table, mesh_text

_GIB = 2**30
_WIDTH = 40  # characters of two full bars
# Purposes of memory, in the order of the bar.
_COLORS = {
  'parameters': 'blue',
  'optimizer': 'cyan',
  'kv_cache': 'magenta',
  'batch': 'white',
  'other': 'white',
  'outputs': 'yellow',
  'temporaries': 'red',
  'elsewhere': 'bright_black',
}


def gib(count: float) -> str:
  """Returns bytes as a number of GiB."""
  return f'{count / _GIB:.2f}'


def memory(rows: list[dict], limit: float) -> rich.table.Table:
  """Returns GiB on a device of each program, with a bar by purpose; limit: bytes of a device, 0 if unknown."""
  table = console_table(
    'memory, GiB a device' + (f' of {gib(limit)}' if limit else ''),
    ('program', 'shapes', 'fits', 'free', 'params', 'optim.', 'KV', 'temp.', 'held', ''),
    left=('program', 'shapes', ''),
    no_wrap=True,
  )
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
  """Returns a bar of first letters of purposes, in proportion to their memory; ! marks more than `full` bytes."""
  line = ''
  for name, color in _COLORS.items():
    count = round(_WIDTH / 2 * parts[name] / full)
    if count:
      line += f'[{color}]{name[0] * count}[/]'
  return line + ('[red]![/]' if parts['total'] > full else '')


def work(rows: list[dict]) -> rich.table.Table:
  """Returns FLOPs, seconds and the share of the peak of each program."""
  parts = ('compute', 'memory', 'network', 'roofline')
  table = console_table(
    "time: the slowest of three parts (roofline), and XLA's estimate",
    ('program', 'calls', 'FLOPs a device', 'of the model', *parts, 'XLA', 'MFU', 'compile s'),
    left=('program',),
  )
  for r in rows:
    s = r['seconds']
    table.add_row(
      r['program'],
      f'{r["calls"]:g}',
      short_number(r['flops']['program']),
      short_number(r['flops']['model']),
      *(milliseconds(s[name]) for name in (*parts, 'xla')),
      f'{r["roofline_mfu"]:.1%}' if r['roofline_mfu'] else '',
      f'{r["compile_s"]:.0f}',
    )
  return table


def milliseconds(seconds: float | None) -> str:
  """Returns seconds as text in ms; '' if they are unknown."""
  return '' if seconds is None else f'{1e3 * seconds:.1f} ms'


def traffic(rows: list[dict]) -> rich.table.Table:
  """Returns MiB per device of each kind of collective, along each axis."""
  table = console_table(
    'collectives: MiB that a device receives, and the lower bound',
    ('program', 'axis', 'kinds', 'sent', 'bound', 'ratio', 'network'),
    left=('program', 'axis', 'kinds', 'network'),
  )
  for r in rows:
    for axis, entry in by_axis(r).items():
      sent = entry['sent'] / 2**20
      bound = entry['bound'] / 2**20
      table.add_row(
        r['program'],
        axis,
        ', '.join(f'{kind} {size / 2**20:,.1f}' for kind, size in entry['kinds'].items()),
        f'{sent:,.1f}',
        f'{bound:,.1f}',
        f'{sent / bound:.2f}' if bound else '',
        'between' if entry['far'] else 'inside',
      )
  return table


def by_axis(row: dict) -> dict:
  """Returns {axis: {'sent': bytes, 'bound': lower bound, 'kinds': {kind: bytes}, 'far': between hosts}} of a program.

  Axes with at most 64 KiB of traffic are left out.
  """
  out: dict[str, dict[str, Any]] = collections.defaultdict(lambda: dict(sent=0.0, bound=0.0, kinds={}, far=False))
  for kind, sent in row['collective_bytes'].items():
    for axis, entry in sent.items():
      out[axis]['sent'] += entry['bytes']
      out[axis]['kinds'][kind] = entry['bytes']
      out[axis]['far'] |= entry['between_hosts']
  for bounds in row['collective_minimum'].values():
    for axis, count in bounds.items():
      out[axis]['bound'] += count
  return {k: v for k, v in out.items() if v['sent'] + v['bound'] > 2**16}


def totals(plan: dict) -> rich.table.Table:
  """Returns seconds a step, rates and cost."""
  table = console_table(
    f'a step: at most {short_number(plan["trained_tokens"])} tokens '
    f'trained, {short_number(plan["sampled_tokens"])} sampled',
    ('estimate', 's a step', 'tokens/s', 'tokens/s/chip', 'MFU', 'USD/M tokens', 'where it goes'),
    left=('estimate', 'where it goes'),
  )
  for name, estimate in plan['step'].items():
    cost, step_s = estimate.get('usd_per_million_tokens'), estimate['step_s']
    table.add_row(
      {'no_overlap': 'no overlap', 'xla': 'XLA, no network'}.get(name, name),
      f'{step_s:.3f}',
      short_number(estimate['tokens_per_s']),
      f'{estimate["tokens_per_s_per_chip"]:,.0f}',
      f'{estimate["mfu"]:.1%}',
      f'{cost:.4f}' if cost else '',
      ', '.join(f'{k} {v / step_s:.0%}' for k, v in estimate['seconds'].items() if v > step_s / 200),
    )
  return table


def show(plan: dict, console: rich.console.Console) -> None:
  """Prints the plan of a stage."""
  console.print(
    f'{plan["stage"]}: {plan["algorithm"]}, '
    f'{short_number(plan["parameters"])} parameters, {plan["devices"]} x '
    f'{plan["device_kind"]} ({plan["topology"]}), mesh: {mesh_text(plan["mesh"])}'
  )
  limit = plan['memory_per_device']
  for table in (memory(plan['programs'], limit), work(plan['programs']), traffic(plan['programs'])):
    if table.row_count:
      console.print(table)
  if plan['step']:
    console.print(totals(plan))
  if any(r['program'] == 'verify' for r in plan['programs']):
    console.print(
      'drafts (rollout.speculation) are not counted: how many are accepted depends on the text', soft_wrap=True
    )
  too_large = [r for r in plan['programs'] if r['fits'] is False]
  if too_large:
    worst = min(too_large, key=lambda r: r['free_bytes'])
    console.print(
      f'DOES NOT FIT: {worst["program"]} is {gib(-worst["free_bytes"])} GiB over; '
      + (plan.get('nearest') or '--search looks for a mesh, rematerialization and batch that do'),
      soft_wrap=True,
    )
