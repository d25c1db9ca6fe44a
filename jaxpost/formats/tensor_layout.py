"""Maps parameters to the tensors of a Hugging Face folder; `tensor_reader.py` reads them.

Matrices are stored as [outputs, inputs], each flattened to one dimension, and the vocabulary without padding. If a
family keeps several parameters in one tensor, they are its rows, in the order of the table.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from jaxpost.formats import families
from jaxpost.models import transformer
from jaxpost.models.config import ModelConfig
from jaxpost.models.parameters import Param, input_dims, is_mtp

AXES = {'joined': 2, 'transposed': 1}  # the dimension of a tensor in which parameters follow each other


@dataclasses.dataclass(frozen=True)
class Stored:
  """The place of a parameter: rows of tensors, one tensor for each layer (or expert).

  names: of the tensors. shape: of each tensor. first: its first row in each, or its first entry if `order` (see
  `Family.fused`) is not ''. column: its first column. copies: names of copies of the tensor that an export writes, too.
  """

  spec: Param
  names: tuple[str, ...]
  shape: tuple[int, ...]
  first: int = 0
  order: str = ''
  column: int = 0
  copies: tuple[str, ...] = ()


def table(cfg: ModelConfig, rows: dict[str, Param] | None = None) -> dict[str, Stored]:
  """Returns {path: place} of the parameters in `rows`, by default all of the model."""
  family = families.of_model(cfg.family)
  out: dict[str, Stored] = {}
  ends: dict[tuple[str, ...], int] = {}  # names of tensors -> their rows (or entries) so far
  for path, spec in (rows or transformer.param_table(cfg)).items():
    layer_path = f'layers/{path.partition("/")[2]}'
    if 'expert' in spec.axes and layer_path in family.fused:  # one tensor has all experts of a layer
      hf_name, order = family.fused[layer_path]
      spec = dataclasses.replace(spec, hf=hf_name, matrix=False)
      *outer, outputs = spec.shape[spec.stack :]
      names = _names(spec.hf, spec)
      if order == 'interleaved':
        sharing = [x for x, (tensor, _) in family.fused.items() if tensor == hf_name]
        shape, first = (*outer, outputs * len(sharing)), sharing.index(layer_path)
      else:
        shape = (outer[0], outputs, outer[1]) if order == 'transposed' else (*outer, outputs)
        first = ends.get(names, 0)
        ends[names] = first + outputs
      out[path] = Stored(spec, names, shape, first, order)
      continue
    hf_name = f'.{re.sub("^model(?=[.])", family.prefix, spec.hf)}.'
    for llama_name, family_name in family.names.items():
      hf_name = hf_name.replace(f'.{llama_name}.', f'.{family_name}.')
    names = _names(hf_name.strip('.'), spec)
    if is_mtp(path):
      names = tuple(_of_predictor(hf_name, family.predictor or {}, cfg) for hf_name in names)
    shape, first = _shape(spec, cfg), ends.get(names, 0)
    if path in family.rows:  # a vector that is stored as a matrix
      shape = (1, *shape)
    ends[names] = first + shape[0]
    out[path] = Stored(spec, names, shape, first)
  return {path: dataclasses.replace(s, shape=_whole(s, ends.get(s.names))) for path, s in out.items()}


def _of_predictor(name: str, names: Mapping[str, str], cfg: ModelConfig) -> str:
  """Returns the family's name of a tensor of the layer after the last one; `names` is `Family.predictor`."""
  block = f'model.layers.{cfg.num_layers}.'
  inner_name = name.removeprefix(block)
  prefix = next((prefix for prefix in names if inner_name.startswith(prefix)), None)
  return name if prefix is None else names[prefix] + inner_name.removeprefix(prefix)


def _whole(stored: Stored, rows: int | None) -> tuple[int, ...]:
  """Returns the shape of the tensors of a parameter, in which all parameters together have `rows` rows."""
  if rows is None:
    return stored.shape
  axis = AXES.get(stored.order, 0)
  return (*stored.shape[:axis], rows, *stored.shape[axis + 1 :])


def _names(name: str, spec: Param) -> tuple[str, ...]:
  if not spec.stack:
    return (name,)
  return tuple(name.format(spec.number(i), *expert) for i, *expert in np.ndindex(spec.shape[: spec.stack]))


def groups(table: dict[str, Stored]) -> list[dict[str, Stored]]:
  """Groups the rows of a table that share tensors."""
  out: dict[str, dict[str, Stored]] = {}
  for path, stored in table.items():
    out.setdefault(stored.names[0], {})[path] = stored
  return list(out.values())


def _shape(spec: Param, cfg: ModelConfig) -> tuple[int, ...]:
  """Returns the shape that one tensor has in the folder, if it holds this parameter alone."""
  shape = spec.shape[spec.stack :]
  if spec.axes[0] == 'vocab':
    return (cfg.vocab_size, *shape[1:])
  if not spec.matrix:
    return shape
  cut = input_dims(spec)
  return math.prod(shape[cut:]), math.prod(shape[:cut])


def rows(stored: Stored, value: np.ndarray) -> np.ndarray:
  """Returns the values of a parameter for one tensor as they are stored: its rows of the tensor."""
  if stored.spec.matrix:
    inputs = math.prod(value.shape[: input_dims(stored.spec)])
    value = value.reshape(inputs, -1).T  # [outputs, inputs]
    padding = stored.shape[1] - inputs  # columns of other adapters in this tensor
    return np.pad(value, ((0, 0), (stored.column, padding - stored.column))) if padding else value
  if stored.order == 'transposed':
    return value.swapaxes(1, 2)
  return value[None] if len(stored.shape) > value.ndim else value[: stored.shape[0]]


def together(stored: Stored, parts: list[np.ndarray]) -> np.ndarray:
  """Joins the `rows` of all parameters in a tensor, in the order of the table."""
  if stored.order == 'interleaved':
    return np.stack(parts, axis=-1).reshape(stored.shape)  # [..., F, parts] -> [..., F parts]
  return np.concatenate(parts, axis=AXES.get(stored.order, 0)) if len(parts) > 1 else parts[0]
