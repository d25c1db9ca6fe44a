"""A model as the rest of the library sees it: five functions and a table.

Anything that provides these trains and samples here; `transformer.py` is one
provider.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

from jaxpost import imports
from jaxpost.errors import InputError
from jaxpost.models import transformer
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.models.parameters import Param, nest

_CODE = 'config.model.preset'


@dataclasses.dataclass(frozen=True)
class Model:
  """Pure functions of parameters; shapes in `transformer.py`.

  forward(params, tokens, positions, segment_ids, compute=, constrain=)
    -> hidden [B, T, D]; takes branch_ids=, noise=, dropout= if one has them
  head(params) -> [V, D]; None of a model that gives scores only
  values(params, hidden) -> [B, T], of a model with a scalar head
  init(key, dtype=) -> params
  prefill(params, tokens, lengths, compute=, constrain=) -> (Cache, [S, D])
  decode(weights, cache, recent, tokens, filled, step, compute=, constrain=)
    -> (recent, [S, D])
  empty_cache(rows, entries, compute) -> Cache; None: of keys and values
  """

  config: ModelConfig | CustomConfig
  table: dict[str, Param]
  forward: Callable
  head: Callable | None
  init: Callable
  prefill: Callable
  decode: Callable
  values: Callable | None = None
  empty_cache: Callable | None = None
  frozen: frozenset = frozenset()  # paths that training leaves as they are
  base: 'Model | None' = None  # without adapters, whose parameters
  merge: Callable = lambda params: params  # makes of those with adapters
  view: Callable = lambda params: params  # what `prefill` of the base takes
  passes: float = 3.0  # forward passes that an update is worth
  dropout: float = 0.0  # of what adapters read, in updates
  quantized: str = ''  # 'int8' or 'nf4': how matrices are held

  def axes(self) -> dict:
    """The logical axes of every parameter, nested like the parameters."""
    return nest({k: p.axes for k, p in self.table.items()})

  def shapes(self) -> dict:
    return nest({k: p.shape for k, p in self.table.items()})

  def shardings(self, layout) -> dict:
    """The sharding of every parameter in `layout`, nested like them."""
    return nest({k: layout.sharding(p.axes, p.shape) for k, p in self.table.items()})


def with_scalar_head(cfg: ModelConfig, lora: tuple = ()) -> ModelConfig:
  """The same decoder as a judge: reward models and critics."""
  return dataclasses.replace(cfg, num_labels=1, value_head=False, lora=lora)


def from_code(code: str) -> Model:
  """What a function of the user's returns: './file.py:make'."""
  make = imports.load_callable(code, _CODE)
  needed = [
    p.name
    for p in inspect.signature(make).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]
  if needed:
    raise InputError(f'{_CODE}: {code} must need no arguments; it has {", ".join(needed)}')
  found = make()
  if not isinstance(found, Model):
    raise InputError(
      f'{_CODE}: {code} returns a {type(found).__name__}, not a Model; '
      'jaxpost.models.custom.linen or .nnx makes one of a flax module'
    )
  return dataclasses.replace(found, config=dataclasses.replace(found.config, code=code))


def build(cfg: ModelConfig) -> Model:
  assert not cfg.lora, 'models.lora.build makes models with adapters'
  if isinstance(cfg, CustomConfig):
    if cfg.num_labels or cfg.value_head:
      raise InputError(
        f'{_CODE}: {cfg.code} has no scalar head, which a critic or a reward '
        'model needs; take a method without one, or a model of `presets`'
      )
    return from_code(cfg.code)
  bind = lambda fn: functools.partial(fn, cfg=cfg)
  return Model(
    config=cfg,
    table=transformer.param_table(cfg),
    forward=bind(transformer.forward),
    head=None if cfg.num_labels else transformer.head,
    init=bind(transformer.init),
    prefill=bind(transformer.prefill),
    decode=bind(transformer.decode),
    values=transformer.values if cfg.num_labels or cfg.value_head else None,
  )
