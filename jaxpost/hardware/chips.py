"""Peak rates and memory of the known accelerators; chips.toml has the figures."""

import dataclasses
import pathlib
import re
import tomllib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
  """Figures of one device of a kind; 0 if unknown."""

  kind: str  # jax.Device.device_kind, without the vendor's name before it and the kind of memory or socket behind it
  flops: float  # dense bfloat16 FLOP/s
  memory: float = 0.0  # bytes
  bandwidth: float = 0.0  # of the memory, bytes/s
  link: float = 0.0  # bytes/s that a device receives along a mesh axis in a slice (both directions of a torus) or host
  network: float = 0.0  # bytes/s of the device's share of the network between slices or hosts
  clock: float = 0.0  # Hz, to convert XLA's estimates in cycles; 0 if XLA makes none
  devices: int = 1  # that JAX shows for a chip
  largest: tuple[int, ...] = ()  # chips along each dimension of the largest slice
  bfloat16: bool = True  # whether it has units for it
  aliases: tuple[str, ...] = ()  # other values of `kind`


def _chips(table: str, unit: float) -> dict[str, Chip]:
  """Returns the chips of a table by their names; `unit` is that of their memory, in bytes."""
  out = {}
  for name, fields in _TABLES[table].items():
    values = {key: tuple(x) if isinstance(x, list) else x for key, x in fields.items()}
    out[name] = Chip(**values | {'memory': fields['memory'] * unit})
  return out


_TABLES = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))
CHIPS = _chips('tpu', 2**30) | _chips('gpu', 1)
# GPUs that programs can be compiled for without a device -> what describes them to the compiler.
TARGETS = {name: target for target in _TABLES['target'] for name in target['chips']}


def before_ampere(device: Any) -> bool:
  """Returns whether a device is an NVIDIA GPU without bfloat16, for which XLA does not compile Triton either."""
  # A number for NVIDIA, such as 7.5, and a name for AMD, such as gfx942.
  capability = device.compute_capability if device.platform == 'gpu' else ''
  return capability[:1].isdigit() and float(capability) < 8


def of_kind(kind: str) -> Chip | None:
  """Returns the chip that a `device_kind` names exactly; None if it is unknown, such as another variant or a part."""
  name = re.sub('^(NVIDIA |Tesla |GeForce )+', '', kind)
  names = (name, re.sub(r'( \d+GB)?( HBM\w+)?( SXM\d \w+)?$', '', name))  # as in H100 80GB HBM3
  return next((chip for chip in CHIPS.values() if {chip.kind, *chip.aliases} & {*names}), None)


def memory_of(device: Any) -> float:
  """Returns the bytes of a device, by its data sheet or else as it reports them; 0 if neither is known."""
  chip = of_kind(device.device_kind)
  return chip.memory if chip else (device.memory_stats() or {}).get('bytes_limit', 0.0)
