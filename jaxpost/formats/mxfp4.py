"""Weights in mxfp4, as GPT-OSS stores its experts, read as floats.

Legend: E experts, D inputs, F outputs.

Along the inputs, runs of 32 numbers of 4 bits (sign, 2 bits of exponent, 1 of mantissa) share a scale, a power of two
(OCP Microscaling Formats, 2023). `NAME_blocks` [E, F, D / 32, 16] holds two numbers per byte, low bits first, and
`NAME_scales` [E, F, D / 32] the exponents plus 127.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

_BLOCKS, _SCALES, _RUN = '_blocks', '_scales', 32
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_VALUES, -_VALUES])


@dataclasses.dataclass(frozen=True)
class Matrices:
  """Blocks and scales, with the interface of a `safetensors_file.Tensor` of shape [E, D, F]."""

  dtype = 'BF16'  # which holds them exactly

  blocks: Any
  scales: Any

  @property
  def shape(self) -> tuple[int, ...]:
    experts, outputs, runs, _ = self.blocks.shape
    return experts, runs * _RUN, outputs

  def __getitem__(self, key):
    experts, inputs, outputs = key
    runs = slice(inputs.start // _RUN, -(-inputs.stop // _RUN))
    packed = self.blocks[experts, outputs, runs]  # [E, F, runs, 16]
    exponents = self.scales[experts, outputs, runs].astype(np.int32) - 127  # [E, F, runs]
    values = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1)  # [E, F, runs, 16, 2]
    values = np.ldexp(values.reshape(*packed.shape[:3], _RUN), exponents[..., None]).astype(ml_dtypes.bfloat16)
    start = inputs.start - runs.start * _RUN  # of the requested inputs in the runs that were read
    return values.reshape(*packed.shape[:2], -1)[..., start : start + inputs.stop - inputs.start].swapaxes(1, 2)


def joined(tensors: dict) -> dict:
  """Returns {name: (file, slice)} with each pair of blocks and scales as one slice, without its suffix."""
  out = {}
  for name, (file, tensor) in tensors.items():
    scales_name = name.removesuffix(_BLOCKS) + _SCALES
    if name.endswith(_BLOCKS) and scales_name in tensors:
      out[name.removesuffix(_BLOCKS)] = file, Matrices(tensor, tensors[scales_name][1])
    elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
      out[name] = file, tensor
  return out
