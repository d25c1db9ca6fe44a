"""Weights in 8-bit floats with a scale for each block, read as floats.

DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), Qwen3 and MiniMax-M2 publish them:
`NAME.weight` [F, D] in float8 (e4m3) and `NAME.weight_scale_inv` [F / 128, D / 128], rounded
up, by which the numbers of a block are multiplied. `weight_block_size` in config.json has
the size of a block; without one, a matrix has one scale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxpost.errors import InputError
from jaxpost.formats.safetensors_file import FLOAT8

_WEIGHT, _SCALE, _ACTIVATIONS = '.weight', '.weight_scale_inv', '.activation_scale'


@dataclasses.dataclass(frozen=True)
class Matrix:
  """Both tensors as one slice of a safetensors file, of shape [F, D]."""

  codes: Any
  scales: Any  # [F / rows, D / columns], rounded up
  block: tuple[int, int]

  def get_shape(self) -> list[int]:
    return self.codes.get_shape()

  def get_dtype(self) -> str:
    return 'F32'

  def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
    """Reads some rows and columns; of the scales, those of the blocks that they cut."""
    spans = [slice(*s.indices(n)[:2]) for s, n in zip(key, self.get_shape(), strict=True)]
    blocks = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip(spans, self.block))
    scales = self.scales[blocks].astype(np.float32)
    for axis, (span, some, size) in enumerate(zip(spans, blocks, self.block)):
      # The number of a row's (column's) block, among those that were read.
      scales = np.take(scales, np.arange(span.start, span.stop) // size - some.start, axis)
    return self.codes[tuple(spans)].astype(np.float32) * scales


def joined(found: dict[str, tuple], config: dict[str, Any]) -> dict[str, tuple]:
  """Name -> (file, slice), with each matrix and its scales under the name of the matrix.

  Args:
    found: name -> (file, slice) of all tensors in a folder.
    config: its config.json.

  Raises:
    InputError: scales do not have the shape that the size of a block asks for.
  """
  size = (config.get('quantization_config') or {}).get('weight_block_size')
  out = dict(found)
  for name in [n for n in found if n.endswith(_SCALE)]:
    base = name.removesuffix(_SCALE)
    file, scales = out.pop(name)
    out.pop(base + _ACTIVATIONS, None)  # of static scales for activations, which are not rounded here
    if base + _WEIGHT not in found or found[base + _WEIGHT][1].get_dtype() != FLOAT8:
      raise InputError(f'{file}: tensor {name} has no matrix {base + _WEIGHT} in {FLOAT8} beside it')
    at, codes = found[base + _WEIGHT]
    shape = codes.get_shape()
    block = tuple(size or shape)
    if len(shape) != 2 or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
      raise InputError(f'{file}: weight_block_size={size!r} of tensor {base + _WEIGHT} {shape} is not supported')
    wanted = tuple(-(-n // b) for n, b in zip(shape, block))
    given = tuple(scales.get_shape())
    if given != wanted and not (math.prod(given) == 1 == math.prod(wanted)):
      raise InputError(f'{file}: tensor {name} has shape {list(given)}; blocks of {list(block)} ask for {list(wanted)}')
    out[base + _WEIGHT] = at, Matrix(codes, dataclasses.replace(scales, shape=wanted), block)
  return out
