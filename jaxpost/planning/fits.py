"""Finds by arithmetic which methods of a model fit on which common devices.

Each cell has the fastest mesh that fits in memory, with as many rows at a time as make it faster; `arithmetic.py`
estimates its memory and time.
"""

from __future__ import annotations

import math
import operator
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpost.distributed.mesh import AXES, BATCH_AXES
from jaxpost.errors import InputError
from jaxpost.monitor.metrics import short_number
from jaxpost.monitor.program_table import console_table
from jaxpost.planning import arithmetic, dry_run, machines, meshes, stage
from jaxpost.planning.machines import Topology
from jaxpost.planning.tables import gib
from jaxpost.stage import batch_shape, prepare
from jaxpost.stage.records import Inputs, PreparedStage

if TYPE_CHECKING:
  import rich.table


# The machines of docs/fits.md, as `machines.spell` names them.
DEVICES = (
  ('T4', 'L4', 'A100', 'H100', 'H200', '8xA100', '8xH100', '8xH200', '8xB200')  # of one host
  + ('v5e-1', 'v5e-8', 'v5e-256', 'v6e-8', 'v5p-8', 'v5p-64')
)
# Method -> (recipe, its further arguments).
METHODS = {
  'SFT': ('sft_gsm8k', ''),
  'SFT LoRA': ('sft_gsm8k', ',lora=16'),
  'DPO': ('dpo_hh', ''),
  'GRPO': ('grpo_gsm8k', ''),
  'GRPO LoRA': ('grpo_gsm8k', ',lora=16'),
}
_HOST = 8  # chips of the largest host; 4 for v5p


class Cell(NamedTuple):
  """The best way found to run a method on a machine; `settings` {'section.field': value} differ from the recipe."""

  machine: Topology
  settings: dict[str, Any]
  estimate: arithmetic.Estimate
  method: str = ''

  @property
  def device(self) -> str:
    return self.machine.text

  @property
  def memory(self) -> float:
    return self.machine.memory

  @property
  def fits(self) -> bool:
    return self.estimate.total <= arithmetic.USABLE * self.memory

  def dollars(self, price: float) -> float:
    """Returns USD for a million trained tokens at `price` USD per chip and hour."""
    return price * self.machine.chips / 3600 / self.estimate.tokens_per_s * 1e6


def topology(device: str) -> Topology:
  """Returns the machine of a name, as `machines.parse` reads it."""
  return machines.parse(device, flag='--devices', compiled=False)


def devices(names: Sequence[str]) -> list[str]:
  """Returns names of machines as DEVICES spells them, or DEVICES without names; InputError if one is unknown."""
  return list(dict.fromkeys(machines.spell(topology(name)) for name in names)) or list(DEVICES)


def methods(names: Sequence[str]) -> list[str]:
  """Returns names as METHODS spells them, or all without names; InputError if one is unknown."""
  spellings = {name.lower().replace(' ', '_'): name for name in METHODS}
  chosen = {name.lower().replace(' ', '_'): name for name in names}
  for key, name in chosen.items():
    if key not in spellings:
      raise InputError(f'--methods: there is no {name!r}; known: {", ".join(spellings)}')
  return [spellings[key] for key in chosen] or list(METHODS)


def prices(text: str, names: Sequence[str]) -> dict[str, float]:
  """Parses '1.5' (of each device) or 'h100=2.5,v5e-8=1.2'; returns USD per chip and hour of some devices."""
  out: dict[str, float] = {}
  for part in filter(None, text.replace(' ', '').split(',')):
    name, _, number = part.rpartition('=')
    out |= dict.fromkeys(devices([name]) if name else names, machines.price(number))
  return out


def cells(raw: Mapping[str, Mapping], names: Sequence[str]) -> list[Cell]:
  """Returns a cell for each method and device.

  Args:
    raw: {method: config of its recipe, with the model's name as `model.path`}.
    names: of machines, as in DEVICES.
  """
  out = []
  for method, config in raw.items():
    ((name, (algorithm, section)),) = prepare.resolve_all(config).items()
    inputs = dry_run.make_inputs(name, algorithm, section)
    out += [_best(inputs, topology(device))._replace(method=method) for device in names]
  return out


def _best(inputs: Inputs, machine: Topology) -> Cell:
  """Returns the fastest cell that fits, or else the one that needs least memory.

  The batch is that of the recipe, or one row per shard if that is more.
  """
  batch_rows = batch_shape.batch_shape(inputs.config, inputs.algorithm.on_policy, 1).rows
  for slots in _slots(inputs):
    tried: list[Cell] = []
    for sizes in meshes.every(inputs, machine, machine.devices):
      shards = math.prod(sizes[a] for a in BATCH_AXES)
      rows = 1  # per shard; doubled while they fit and the batch has them
      while rows == 1 or (rows * shards <= batch_rows and tried[-1].fits):
        tried.append(_on_mesh(inputs, machine, sizes, rows=rows, slots=slots))
        rows *= 2
    fitting = [cell for cell in tried if cell.fits]
    if fitting:
      return max(fitting, key=operator.attrgetter('estimate.tokens_per_s'))
  return min(tried, key=operator.attrgetter('estimate.total'))


def _slots(inputs: Inputs) -> list[int]:
  """Returns numbers of slots to try, those of the recipe and fewer; [0] if nothing is sampled."""
  if not inputs.algorithm.on_policy:
    return [0]
  recipe_slots = batch_shape.slots(inputs.config, on_policy=True)
  return [n for i in range(5) if (n := recipe_slots >> i)]


def _on_mesh(inputs: Inputs, machine: Topology, sizes: dict[str, int], rows: int, slots: int) -> Cell:
  """Returns the cell of a training mesh, with the least split of the sampler that fits."""
  on_policy = inputs.algorithm.on_policy
  micro_batch = rows * math.prod(sizes[a] for a in BATCH_AXES)
  settings: dict[str, Any] = {'model.dtype': 'float16'} if machine.before_ampere else {}
  settings |= {'model.remat': 'full', 'mesh.train': meshes.spell(sizes), 'train.micro_batch_size': micro_batch}
  batch = inputs.config.train.batch_size
  if not on_policy and batch % micro_batch:
    settings['train.batch_size'] = math.ceil(batch / micro_batch) * micro_batch
  if on_policy and slots < _slots(inputs)[0]:
    settings['rollout.slots'] = slots
  changed = stage.vary(PreparedStage(inputs), settings).inputs
  tried = []
  for tensor in meshes.tensors(inputs, machine.devices) if on_policy else [1]:
    rollout = dict.fromkeys(AXES, 1) | dict(data=machine.devices // tensor, tensor=tensor)
    estimate = arithmetic.estimate(changed, machine, sizes, rollout)
    rollout_setting = {'mesh.rollout': f'data=-1,tensor={tensor}'} if tensor > 1 else {}
    tried.append(Cell(machine, settings | rollout_setting, estimate))
    if tried[-1].fits:
      return tried[-1]
  return min(tried, key=operator.attrgetter('estimate.total'))


def command(cell: Cell, model: str) -> str:
  """Returns the command that trains like this; `model` is a folder or the name of a repository on the hub."""
  recipe, arguments = METHODS[cell.method]
  fields = [f'--config.{key}={value}' for key, value in cell.settings.items()]
  words = [f'--config=configs/{recipe}.py:model={model}{arguments}', *fields, '--workdir=runs/fits']
  largest = _HOST // 2 if cell.machine.name == 'v5p' else _HOST
  if cell.machine.chips > largest:
    words.append('--distributed')
  return shlex.join(['python', '-m', 'launch.train', *words])


def text(cell: Cell) -> str:
  """Returns a cell as short text for docs/fits.md."""
  if not cell.fits:
    return f'no: {gib(cell.estimate.total)}'
  return f'{gib(cell.estimate.total)}, {short_number(cell.estimate.tokens_per_s)}/s'


def table(rows: Sequence[Cell], priced: Mapping[str, float], title: str) -> rich.table.Table:
  """Returns the cells as a table for the console; a price adds the column of cost."""
  columns = ['method', 'device', 'fits', 'GiB', 'of', 'tokens/s', 'mesh', 'rows at a time']
  if priced:
    columns.append('USD per million tokens')
  out = console_table(title, columns, left=('method', 'device', 'mesh'))
  for cell in rows:
    usd = f'{cell.dollars(priced[cell.device]):.3g}' if cell.device in priced and cell.fits else ''
    out.add_row(
      cell.method,
      cell.device,
      'yes' if cell.fits else 'NO',
      gib(cell.estimate.total),
      gib(cell.memory),
      short_number(cell.estimate.tokens_per_s) if cell.fits else '',
      ' '.join(f'{k}={v}' for k, v in cell.settings.items() if k.startswith('mesh')) if cell.fits else '',
      str(cell.settings['train.micro_batch_size']) if cell.fits else '',
      *([usd] if priced else ()),
    )
  return out


def as_json(cell: Cell, model: str, price: float | None) -> dict:
  """Returns a cell as a JSON-able object."""
  return dict(
    method=cell.method,
    device=cell.device,
    chips=cell.machine.chips,
    fits=cell.fits,
    memory_bytes=cell.memory,
    needed_bytes=cell.estimate.memory,
    seconds=cell.estimate.seconds,
    tokens_per_s=cell.estimate.tokens_per_s,
    usd_per_million_tokens=None if price is None else cell.dollars(price),
    settings=cell.settings,
    command=command(cell, model),
  )
