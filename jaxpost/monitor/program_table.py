"""The table of compiled programs that a run prints and plan.json holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import rich.box
import rich.table
from etils import epath

from jaxpost.models import transformer
from jaxpost.monitor import metrics
from jaxpost.storage import object_store

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.config import ModelConfig


def peak_flops(devices: Sequence[jax.Device]) -> float:
  """Peak FLOPs a second of all devices together; 0 for unknown hardware."""
  from jaxpost.hardware import chips

  chip = chips.of_kind(devices[0].device_kind)
  return chip.flops * len(devices) if chip else 0.0


def make_plan(
  stage: str, cfg: ModelConfig, layouts: dict[str, Layout], tokens_per_step: int, rows: list[dict], memory: dict
) -> dict:
  """A JSON record of the programs of a stage.

  Args:
    rows: one per program; see `programs.compile.Ledger`.
    memory: {program: most bytes in use on a device while it runs}.
  """
  device = jax.devices()[0]
  return dict(
    stage=stage,
    devices=jax.device_count(),
    device_kind=device.device_kind,
    processes=jax.process_count(),
    family=cfg.family,
    parameters=transformer.num_params(cfg),
    mesh={k: dict(v.mesh.shape) for k, v in layouts.items()},
    tokens_per_step=tokens_per_step,
    programs=rows,
    memory=memory,
  )


def render(plan: dict) -> rich.table.Table:
  """The plan as a table for the console."""
  number = metrics.short_number
  meshes = '; '.join(
    f'{phase} ' + ', '.join(f'{a}={n}' for a, n in mesh.items() if n > 1)
    if any(n > 1 for n in mesh.values())
    else f'{phase} one device'
    for phase, mesh in plan['mesh'].items()
  )
  table = rich.table.Table(
    title=f'{plan["stage"]}: {number(plan["parameters"])} parameters, '
    f'{plan["devices"]} x {plan["device_kind"]}, mesh: {meshes}, at most '
    f'{number(plan["tokens_per_step"])} tokens a step, at most '
    f'{_mib(plan["memory"]["peak"])} a device',
    box=rich.box.SIMPLE,
    title_justify='left',
  )
  for name in ('program', 'shapes', 'arguments', 'temporaries', 'FLOPs', 'compile s'):
    left = name in ('program', 'shapes')
    table.add_column(name, justify='left' if left else 'right')
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
  """The saved plans of these stages."""
  plans = json.loads(path.read_text()) if path.exists() else []
  return [p for p in plans if p['stage'] in stages]


def write(path: epath.Path, plans: list[dict]) -> None:
  """Writes plan.json."""
  object_store.write_text(path, json.dumps(plans, indent=1))


def _mib(count: int) -> str:
  return f'{count / 2**20:.1f} MiB'
