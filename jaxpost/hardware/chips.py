"""Peak rates and memory of the known accelerators."""

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
  """Figures of one device of a kind, from the vendors' data sheets; 0 if unknown."""

  kind: str  # part of jax.Device.device_kind
  flops: float  # dense bfloat16 FLOP/s
  memory: float = 0.0  # bytes
  bandwidth: float = 0.0  # of the memory, bytes/s
  link: float = 0.0  # bytes/s that a device receives along a mesh axis in a slice (both directions of a torus) or host
  network: float = 0.0  # bytes/s of the device's share of the network between slices or hosts
  clock: float = 0.0  # Hz, to convert XLA's estimates in cycles; 0 if XLA makes none
  devices: int = 1  # that JAX shows for a chip
  largest: tuple[int, ...] = ()  # chips along each dimension of the largest slice


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
  't4': Chip('T4', 65e12, 16e9, 320e9),  # FLOP/s of float16, as it has no units for bfloat16
}
_MORE_KINDS = {'TPU v5e': 'v5e', 'TPU v5p': 'v5p', 'TPU v6e': 'v6e'}


def before_ampere(device: Any) -> bool:
  """Returns whether a device is an NVIDIA GPU without bfloat16, for which XLA does not compile Triton either."""
  # A number for NVIDIA, such as 7.5, and a name for AMD, such as gfx942.
  capability = device.compute_capability if device.platform == 'gpu' else ''
  return capability[:1].isdigit() and float(capability) < 8


def of_kind(kind: str) -> Chip | None:
  """Returns the chip that a `device_kind` names, by the longest name that matches; None if it is unknown."""
  chips = {chip.kind: chip for chip in CHIPS.values()} | {name: CHIPS[key] for name, key in _MORE_KINDS.items()}
  matches = [name for name in chips if re.search(rf'{re.escape(name)}(?![0-9A-Za-z])', kind)]  # L4 does not match L40
  return chips[max(matches, key=len)] if matches else None
