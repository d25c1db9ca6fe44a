"""Weights in 8-bit floats with a scale for each block, read as floats.

DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), Qwen3 and MiniMax-M2 publish them:
`NAME.weight` [F, D] (F outputs, D inputs) in float8 (e4m3) and `NAME.weight_scale_inv` [F / 128, D / 128], rounded
up: one scale per block, by which its values are multiplied. `weight_block_size` in config.json is the size of a block;
without that field, a matrix has one scale.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxpost.errors import InputError
from jaxpost.formats.safetensors_file import FLOAT8

_WEIGHT, _SCALE, _ACTIVATIONS = '.weight', '.weight_scale_inv', '.activation_scale'


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A matrix [F, D] and its scales, with the interface of `safetensors_file.Tensor`."""

  dtype = 'F32'

  codes: Any
  scales: Any  # [F / rows, D / columns], rounded up
  block: tuple[int, int]

  @property
  def shape(self) -> tuple[int, ...]:
    return self.codes.shape

  def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
    """Reads some rows and columns, and the scales of the blocks that overlap them."""
    spans = [slice(*s.indices(n)[:2]) for s, n in zip(key, self.shape, strict=True)]
    blocks = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip(spans, self.block))
    scales = self.scales[blocks].astype(np.float32)
    for axis, (span, block_range, size) in enumerate(zip(spans, blocks, self.block)):
      # Index of the block of each row (or column) among the scales that were read.
      scales = np.take(scales, np.arange(span.start, span.stop) // size - block_range.start, axis)
    return self.codes[tuple(spans)].astype(np.float32) * scales


def joined(tensors: dict[str, tuple], config: dict[str, Any]) -> dict[str, tuple]:
  """Returns {name: (file, slice)} with each matrix and its scales as one slice, named like the matrix.

  `config` is the config.json of the folder. InputError if the scales do not fit their matrix or the block size in it.
  """
  size = (config.get('quantization_config') or {}).get('weight_block_size')
  out = dict(tensors)
  for name in [n for n in tensors if n.endswith(_SCALE)]:
    base = name.removesuffix(_SCALE)
    file, scales = out.pop(name)
    out.pop(base + _ACTIVATIONS, None)  # activations are not quantized here
    if base + _WEIGHT not in tensors or tensors[base + _WEIGHT][1].dtype != FLOAT8:
      raise InputError(f'{file}: tensor {name} has no matrix {base + _WEIGHT} in {FLOAT8} beside it')
    file_of_codes, codes = tensors[base + _WEIGHT]
    shape, actual = codes.shape, scales.shape
    block = tuple(size or shape)
    if len(shape) != 2 or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
      raise InputError(f'{file}: weight_block_size={size!r} of tensor {base + _WEIGHT} {list(shape)} is not supported')
    expected = tuple(-(-n // b) for n, b in zip(shape, block))
    if actual != expected and not (math.prod(actual) == 1 == math.prod(expected)):
      raise InputError(f'{file}: tensor {name} has shape {list(actual)}; blocks of {list(block)} need {list(expected)}')
    out[base + _WEIGHT] = file_of_codes, Matrix(codes, dataclasses.replace(scales, shape=expected), block)
  return out
