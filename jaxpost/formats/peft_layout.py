"""Maps the adapters of a model to the tensors of a `peft` folder.

The tensors are the adapter rows of the parameter table under their Hugging Face names. Some families keep several
matrices in one tensor, such as q, k and v in qkv_proj; there `peft` has one adapter for the tensor. A folder holds it
in one of two forms:

  shared A   the matrices have one A [r, in], and rows of B [out, r] each, as `peft` trains it.
  own A      each matrix has its own r rows of A [n r, in], and its own rows and columns of B [out, n r], which is 0
             elsewhere. Such a tensor of n matrices has n times the rank and alpha (`rank_pattern`, `alpha_pattern`).

Exports use the second form, because each matrix here has its own adapter.

Legend: r rank of an adapter.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import families, tensor_layout
from jaxpost.formats.tensor_layout import Stored
from jaxpost.models import layers, parameters

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'


def other_model(folder: epath.Path, why: str) -> InputError:
  """Returns the error for a folder whose tensors do not fit the model."""
  return InputError(f'{folder / WEIGHTS}: {why}; the adapter is of another model')


def module_of(stored: Stored) -> str:
  """Returns the last name of the module that an adapter belongs to, such as 'q_proj'."""
  return stored.names[0].split('.lora_')[0].rpartition('.')[2]


def matrices_of_modules(cfg: ModelConfig) -> dict[str, int]:
  """Returns {module: number of matrices that it has in one tensor}, where there are several."""
  plain = tensor_layout.table(dataclasses.replace(cfg, lora=()))
  names = collections.Counter(stored.names[0] for stored in plain.values())
  counts = {name.split('.')[-2]: n for name, n in names.items() if n > 1 and name.endswith('.weight')}
  if cfg.experts and not families.of_model(cfg.family).fused:
    counts['gate_up_proj'] = 2  # `transformers` joins these two tensors
  return counts


def layout(model: Model, own_a: set[str] | None = None) -> dict[str, Stored]:
  """Returns {path: place in the folder} of the adapters, and of the head of a reward model.

  In the modules `own_a` of several matrices (None: all), each has its own A; in others they share A. InputError if
  `peft` cannot represent these adapters.
  """
  rows = {path: spec for path, spec in model.table.items() if parameters.is_adapter(path)}
  if model.config.num_labels:
    score = model.table['score']
    rows['score'] = dataclasses.replace(score, hf=f'base_model.model.{score.hf}')
  places = tensor_layout.table(model.config, rows)
  adapted = {path.removesuffix('/a'): places[path] for path in rows if path.endswith('/a')}
  _check_experts(model, adapted)
  matrices = tensor_layout.table(model.config, (model.base or model).table)
  matrices_in_tensor = collections.Counter(stored.names[0] for stored in matrices.values())
  adapters_in_tensor = collections.Counter(a.names[0] for a in adapted.values())
  for path, a in adapted.items():
    b = places[f'{path}/b']
    count = matrices_in_tensor[matrices[path.removeprefix(f'{parameters.ADAPTER_ROOT}/')].names[0]]
    if adapters_in_tensor[a.names[0]] < count:
      raise InputError(
        f'{a.names[0]}: this family keeps {count} matrices in one tensor; for `peft`, all need adapters, or none'
      )
    if own_a is None or module_of(a) in own_a:
      places[f'{path}/b'] = dataclasses.replace(b, column=a.first, shape=(b.shape[0], a.shape[0]))
    else:
      places[f'{path}/a'] = dataclasses.replace(a, first=0, shape=(a.shape[0] // count, a.shape[1]))
  return places


def _check_experts(model: Model, adapted: dict[str, Stored]) -> None:
  """Raises InputError for adapters of experts that `peft` cannot join; `adapted` is {path of a matrix: place of A}."""
  experts = {path: stored for path, stored in adapted.items() if stored.spec.stack > 1}
  if not experts:
    return
  if model.config.activation in layers.UNGATED:
    raise InputError('adapters of experts without a gate are in the merged export only')
  if len({path.rpartition('/')[2] for path in experts} & {'gate', 'up'}) == 1:
    raise InputError('experts/gate and experts/up are one matrix in `peft`: both need adapters, or neither')
  modules = {module_of(stored) for stored in experts.values()}
  others = {module_of(stored) for path, stored in adapted.items() if path not in experts}
  if families.of_model(model.config.family).fused or modules & others:
    raise InputError(f'`peft` cannot tell which matrices adapters of experts are of in a {model.config.family} model')
