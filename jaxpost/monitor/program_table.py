"""The table of compiled programs that a run prints and writes to plan.json."""

import json
import logging
from collections.abc import Sequence

import jax
import rich.box
import rich.table
from etils import epath

from jaxpost.monitor import metrics
from jaxpost.storage import seals


def peak_flops(devices: Sequence[jax.Device]) -> float:
  """Returns peak FLOP/s of all devices together; 0 for unknown hardware."""
  from jaxpost.hardware import chips

  chip = chips.of_kind(devices[0].device_kind)
  return chip.flops * len(devices) if chip else 0.0


def console_table(title: str, columns: Sequence[str], left: Sequence[str], no_wrap: bool = False) -> rich.table.Table:
  """Returns an empty table for the console; the columns named in `left` are aligned left, the others right."""
  table = rich.table.Table(title=title, box=rich.box.SIMPLE, title_justify='left')
  for name in columns:
    table.add_column(name, justify='left' if name in left else 'right', no_wrap=no_wrap)
  return table


def mesh_text(meshes: dict[str, dict[str, int]]) -> str:
  """Returns the mesh axes above 1 as text, such as 'train fsdp=8; rollout one device'."""
  axes = {phase: [f'{a}={n}' for a, n in mesh.items() if n > 1] for phase, mesh in meshes.items()}
  return '; '.join(f'{phase} {", ".join(split) or "one device"}' for phase, split in axes.items())


def one_line(plan: dict) -> str:
  """Returns a summary of a stage's compiled programs in one line."""
  count, seconds = len(plan['programs']), sum(row['compile_s'] for row in plan['programs'])
  return (
    f'{plan["stage"]}: {metrics.short_number(plan["parameters"])} parameters, compiled {count} programs '
    f'({seconds:.0f} s, added up); mesh: {mesh_text(plan["mesh"])}; at most {_mib(plan["memory"]["peak"])} a device '
    f'(plan.json has each; --verbose prints them); {", ".join(f"{k} {v}" for k, v in plan["choices"].items())}'
  )


def render(plan: dict) -> rich.table.Table:
  """Returns the programs of a plan as a table for the console."""
  number = metrics.short_number
  title = (
    f'{plan["stage"]}: {number(plan["parameters"])} parameters, '
    f'{plan["devices"]} x {plan["device_kind"]}, mesh: {mesh_text(plan["mesh"])}, at most '
    f'{number(plan["tokens_per_step"])} tokens a step, at most {_mib(plan["memory"]["peak"])} a device'
  )
  columns = ('program', 'shapes', 'arguments', 'temporaries', 'FLOPs', 'compile s')
  table = console_table(title, columns, left=('program', 'shapes'))
  for row in plan['programs']:
    table.add_row(
      row['program'],
      row['shapes'][:44],
      _mib(row['argument_bytes']),
      _mib(row['temp_bytes']),
      number(row['flops']) if row['flops'] else '',
      f'{row["compile_s"]:.1f}',
    )
  return table


def read(path: epath.Path, stages: list[str]) -> list[dict]:
  """Returns the saved plans of these stages; [] if the file is missing or damaged, as nothing depends on it."""
  try:
    seals.check(path.parent, [path.name])
    return [p for p in json.loads(path.read_text()) if p['stage'] in stages] if path.exists() else []
  except (ValueError, KeyError, TypeError) as error:
    logging.warning('%s: is written anew without its earlier plans: %s', path, error)
    return []


def _mib(count: int) -> str:
  return f'{count / 2**20:.1f} MiB'
