"""Chips as data: peak rates and memory of the accelerators that are known."""

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
  """Figures of one device of a kind, from the vendors' data sheets.

  flops: dense bfloat16 FLOP/s. memory: bytes. bandwidth: of that memory, bytes/s. link: bytes/s that a device
  receives along one mesh axis inside a slice or host (both directions of a torus axis; NVLink). network: bytes/s of
  its share of the network between slices or hosts. clock: Hz, of XLA's estimates in cycles; 0 where it gives none.
  devices: that JAX sees on a chip. largest: chips along each dimension of the largest slice.
  """

  kind: str  # in jax.Device.device_kind
  flops: float
  memory: float = 0.0
  bandwidth: float = 0.0
  link: float = 0.0
  network: float = 0.0
  clock: float = 0.0
  devices: int = 1
  largest: tuple[int, ...] = ()


_GIB = 2**30
# JAX shows two devices per chip of tpu7x; its figures are those of one device.
CHIPS = {
  'v4': Chip('TPU v4', 275e12, 32 * _GIB, 1228e9, 90e9, network=6.2e9, clock=1.05e9, largest=(16, 16, 16)),
  'v5e': Chip('TPU v5 lite', 197e12, 16 * _GIB, 819e9, 90e9, network=3.1e9, clock=1.5e9, largest=(16, 16)),
  'v5p': Chip('TPU v5', 459e12, 95.74 * _GIB, 2765e9, 180e9, network=6.2e9, clock=1.75e9, largest=(16, 20, 28)),
  'v6e': Chip('TPU v6 lite', 918e12, 32 * _GIB, 1640e9, 180e9, network=12.5e9, clock=1.75e9, largest=(16, 16)),
  'tpu7x': Chip('TPU7x', 1153e12, 96 * _GIB, 3690e9, 180e9, network=12.5e9, devices=2, largest=(16, 24, 24)),
  'h100': Chip('H100', 989e12, 80e9, 3350e9, 450e9, network=50e9),
  'h200': Chip('H200', 989e12, 141e9, 4800e9, 450e9, network=50e9),
  'h100_pcie': Chip('H100 PCIe', 756e12, 80e9, 2000e9),
  'h100_nvl': Chip('H100 NVL', 835e12, 94e9, 3938e9),
  'gh200': Chip('GH200', 989e12, 96e9, 4000e9),
  'b200': Chip('B200', 2250e12, 180e9, 8000e9, 900e9),
  'a100': Chip('A100', 312e12, 40e9, 1555e9, 300e9),
  'a100_80gb': Chip('A100-SXM4-80GB', 312e12, 80e9, 2039e9, 300e9),
  'a100_pcie_80gb': Chip('A100 80GB PCIe', 312e12, 80e9, 1935e9),
  'l40': Chip('L40', 181e12, 48e9, 864e9),
  'l40s': Chip('L40S', 362e12, 48e9, 864e9),
  'l4': Chip('L4', 121e12, 24e9, 300e9),
  't4': Chip('T4', 65e12, 16e9, 320e9),  # of float16: it has no units for bfloat16
}
_MORE_KINDS = {'TPU v5e': 'v5e', 'TPU v5p': 'v5p', 'TPU v6e': 'v6e'}


def before_ampere(device: Any) -> bool:
  """Returns whether a device is an NVIDIA GPU that has no bfloat16, for which XLA compiles no Triton either."""
  # NVIDIA's is a number, such as 7.5, and AMD's a name, such as gfx942.
  capability = device.compute_capability if device.platform == 'gpu' else ''
  return capability[:1].isdigit() and float(capability) < 8


def of_kind(kind: str) -> Chip | None:
  """Returns the chip that a `device_kind` names; if several match, the longest name."""
  names = {c.kind: c for c in CHIPS.values()} | {k: CHIPS[v] for k, v in _MORE_KINDS.items()}
  found = [name for name in names if re.search(rf'{re.escape(name)}(?![0-9A-Za-z])', kind)]  # an L40 is no L4
  return names[max(found, key=len)] if found else None
