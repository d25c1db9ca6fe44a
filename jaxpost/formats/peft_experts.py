"""Reads adapters of experts as `peft` stores them: one A and one B for all experts of a layer.

The modules of `transformers` hold the experts of a layer as two parameters, gate_up_proj [E, 2 F, D] and down_proj
[E, D, F]. With `target_parameters`, `peft` stores the adapter of such a parameter as A [E R, in] and B [out, R E]. The
rows of A are grouped by expert, the columns of B by rank. Gate and up either share the ranks, R = r, or each has its
own, R = 2 r: then those of gate come first.

Legend: E experts, F size of an expert, D size of the model, r rank of an adapter, R rank of a tensor.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import families, peft_layout, tensor_layout
from jaxpost.models.config import ModelConfig

_PARAMETER = {'gate': 'gate_up_proj', 'up': 'gate_up_proj', 'down': 'down_proj'}  # matrix -> parameter with it


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
  """One expert's part of a tensor of all experts, with the interface of `safetensors_file.Tensor`.

  Attributes:
    read: returns the whole tensor. whole_shape: its shape.
    index: the part, a slice for each dimension.
  """

  read: Callable[[], Any]
  whole_shape: tuple[int, ...]
  index: tuple[slice, slice]

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip(self.index, self.whole_shape))

  def __getitem__(self, index: Any) -> Any:
    return self.read()[self.index][index]


def split(
  folder: epath.Path, raw: dict, tensors: dict, rows: dict[str, tensor_layout.Stored], cfg: ModelConfig
) -> dict:
  """Returns `tensors` with one tensor per expert instead of one for all experts.

  Args:
    folder: of the adapter, for errors. raw: the content of its adapter_config.json.
    tensors: {name: open tensor} of the folder.
    rows: {path: place} of all adapters that the model could have.

  Raises:
    InputError: `target_parameters` names another parameter than those of experts, or a tensor has a wrong shape.
  """
  parameters = _target_parameters(folder / peft_layout.CONFIG, raw, cfg)
  if not parameters:
    return tensors
  assert cfg.experts  # checked by `_target_parameters`
  experts, size = cfg.experts.num, cfg.experts.size
  rank = raw['r']
  own_ranks = bool(raw.get('rank_pattern'))  # gate and up have separate ranks
  out = dict(tensors)

  @functools.lru_cache(maxsize=1)  # all experts of a layer are read one after the other
  def read(name: str, check: bool) -> Any:
    value = tensors[name][:]
    if check and (value[size:, : rank * experts].any() or value[:size, rank * experts :].any()):
      raise peft_layout.other_model(folder, f'tensor {name} mixes gate and up')
    return value

  for path, stored in rows.items():
    matrix, side = path.split('/')[-2:]
    parameter = _PARAMETER.get(matrix)
    if stored.spec.stack < 2 or parameter not in parameters:  # no experts, or not adapted in this form
      continue
    separate_ranks = own_ranks and parameter == 'gate_up_proj'
    tensor_rank = rank * (2 if separate_ranks else 1)
    first_rank = rank if separate_ranks and matrix == 'up' else 0
    # `peft` wraps a module once for each of its parameters.
    wrapper = 'base_layer.' if parameter == 'gate_up_proj' and len(parameters) > 1 else ''
    for number, expert_name in enumerate(stored.names):
      layer, expert = divmod(number, experts)
      prefix = f'base_model.model.model.layers.{stored.spec.number(layer)}.mlp.experts.{wrapper}'
      name = f'{prefix}lora_{side.upper()}.weight'
      if name not in tensors:
        continue
      shape = tensors[name].shape
      if shape[1 if side == 'b' else 0] != experts * tensor_rank:
        raise peft_layout.other_model(folder, f'tensor {name} has shape {list(shape)}')
      if side == 'a':
        start = expert * tensor_rank + first_rank
        index = slice(start, start + rank), slice(None)
      else:
        columns = slice(expert + first_rank * experts, (first_rank + rank) * experts, experts)
        # In gate_up_proj, the rows of gate come first.
        output_rows = {'gate': slice(size), 'up': slice(size, None)}.get(matrix, slice(None))
        index = output_rows, columns
      out.pop(name, None)
      out[expert_name] = ExpertTensor(functools.partial(read, name, side == 'b' and separate_ranks), shape, index)
  return out


def _target_parameters(config_file: epath.Path, raw: dict, cfg: ModelConfig) -> set[str]:
  """Returns the last names of `target_parameters`, each of which is a parameter of experts."""
  parameters = raw.get('target_parameters') or []
  if not isinstance(parameters, list) or any(type(name) is not str for name in parameters):
    raise InputError(f'{config_file}: target_parameters={parameters!r} must be a list of names')
  names = {name.rpartition('.')[2] for name in parameters}
  one_tensor_per_expert = cfg.experts and not families.of_model(cfg.family).fused
  if names and (names - {*_PARAMETER.values()} or not one_tensor_per_expert):
    raise InputError(
      f'{config_file}: target_parameters={sorted(names)} is not supported (only gate_up_proj and down_proj of experts, '
      'of families whose folders have a tensor for each)'
    )
  return names
