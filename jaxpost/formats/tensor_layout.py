"""Maps parameters to the tensors of a Hugging Face folder; `tensor_reader.py` reads them.

Matrices are stored transposed ([out, in]) and reshaped to the table's shape; the vocabulary is cut to the tokens that
there are. Where a family keeps several parameters in one tensor, they are its rows in the order of the table.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.formats import families
from jaxpost.models import transformer
from jaxpost.models.parameters import Param, input_dims, is_mtp

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

AXES = {'joined': 2, 'transposed': 1}  # the dimension of a tensor in which parameters follow each other


@dataclasses.dataclass(frozen=True)
class Stored:
  """The place of a parameter: rows of tensors, one for each layer (or expert).

  names: of the tensors. shape: of each tensor. first: the first row in each, or the first entry where `order` (of
  `Family.fused`) is not ''. column: the first column of a matrix. copies: further tensors that an export has of it.
  """

  spec: Param
  names: tuple[str, ...]
  shape: tuple[int, ...]
  first: int = 0
  order: str = ''
  column: int = 0
  copies: tuple[str, ...] = ()


def table(cfg: ModelConfig, rows: dict[str, Param] | None = None) -> dict[str, Stored]:
  """Returns path -> place, for `rows` or the whole parameter table."""
  family = families.of_model(cfg.family)
  out: dict[str, Stored] = {}
  ends: dict[tuple[str, ...], int] = {}  # tensors -> rows, or entries, that they have so far
  for path, spec in (rows or transformer.param_table(cfg)).items():
    inside = f'layers/{path.partition("/")[2]}'
    if 'expert' in spec.axes and inside in family.fused:
      name, order = family.fused[inside]
      spec = dataclasses.replace(spec, hf=name, matrix=False)
      *outer, last = spec.shape[spec.stack :]
      names = _names(spec.hf, spec)
      if order == 'interleaved':
        turns = [x for x, (tensor, _) in family.fused.items() if tensor == name]
        shape, first = (*outer, last * len(turns)), turns.index(inside)
      else:
        shape = (outer[0], last, outer[1]) if order == 'transposed' else (*outer, last)
        first = ends.get(names, 0)
        ends[names] = first + last
      out[path] = Stored(spec, names, shape, first, order)
      continue
    name = f'.{re.sub("^model(?=[.])", family.prefix, spec.hf)}.'
    for ours, theirs in family.names.items():
      name = name.replace(f'.{ours}.', f'.{theirs}.')
    names = _names(name.strip('.'), spec)
    if is_mtp(path):
      names = tuple(_of_predictor(name, family.predictor or {}, cfg) for name in names)
    if path in family.rows:
      out[path] = Stored(spec, names, (1, *_shape(spec, cfg)))
      continue
    shape, first = _shape(spec, cfg), ends.get(names, 0)
    ends[names] = first + shape[0]
    out[path] = Stored(spec, names, shape, first)
  return {path: dataclasses.replace(s, shape=_whole(s, ends.get(s.names))) for path, s in out.items()}


def _of_predictor(name: str, names: Mapping[str, str], cfg: ModelConfig) -> str:
  """Returns what a family calls a tensor of the layer behind the last one; `names` has the beginnings it replaces."""
  block = f'model.layers.{cfg.num_layers}.'
  rest = name.removeprefix(block)
  ours = next((ours for ours in names if rest.startswith(ours)), None)
  return name if ours is None else names[ours] + rest.removeprefix(ours)


def _whole(stored: Stored, rows: int | None) -> tuple[int, ...]:
  """Returns the shape of the tensors of a parameter, which have `rows` rows of all their parameters, if several."""
  if rows is None:
    return stored.shape
  at = AXES.get(stored.order, 0)
  return (*stored.shape[:at], rows, *stored.shape[at + 1 :])


def _names(name: str, spec: Param) -> tuple[str, ...]:
  if not spec.stack:
    return (name,)
  return tuple(name.format(spec.number(i), *rest) for i, *rest in np.ndindex(spec.shape[: spec.stack]))


def groups(table: dict[str, Stored]) -> list[dict[str, Stored]]:
  """Groups the rows of a table that share tensors."""
  out: dict[str, dict[str, Stored]] = {}
  for path, stored in table.items():
    out.setdefault(stored.names[0], {})[path] = stored
  return list(out.values())


def _shape(spec: Param, cfg: ModelConfig) -> tuple[int, ...]:
  """Returns the shape that one tensor of a parameter has in the folder."""
  shape = spec.shape[spec.stack :]
  if spec.axes[0] == 'vocab':
    return (cfg.vocab_size, *shape[1:])
  if not spec.matrix:
    return shape
  cut = input_dims(spec)
  return math.prod(shape[cut:]), math.prod(shape[:cut])


def rows(stored: Stored, value: np.ndarray) -> np.ndarray:
  """Returns an entry of a parameter as it is stored: its rows of the tensor."""
  if stored.spec.matrix:
    size = math.prod(value.shape[: input_dims(stored.spec)])
    value = value.reshape(size, -1).T  # [outputs, inputs]
    others = stored.shape[1] - size  # columns of other parameters
    return np.pad(value, ((0, 0), (stored.column, others - stored.column))) if others else value
  if stored.order == 'transposed':
    return value.swapaxes(1, 2)
  return value[None] if len(stored.shape) > value.ndim else value[: stored.shape[0]]


def together(stored: Stored, parts: list[np.ndarray]) -> np.ndarray:
  """Joins the `rows` of all parameters in a tensor."""
  if stored.order == 'interleaved':
    return np.stack(parts, axis=-1).reshape(stored.shape)  # [..., F, parts] -> [..., F parts]
  return np.concatenate(parts, axis=AXES.get(stored.order, 0)) if len(parts) > 1 else parts[0]
