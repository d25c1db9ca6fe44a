"""A model as the rest of the library sees it: five functions and a table.

Anything that provides these trains and samples here; `transformer.py` is one
provider.
"""

import dataclasses
import functools
from collections.abc import Callable

from jaxpost.models import transformer
from jaxpost.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Model:
  """Pure functions of parameters; shapes in `transformer.py`.

  forward(params, tokens, positions, segment_ids, compute=, constrain=)
    -> hidden [B, T, D]
  head(params) -> [V, D]
  init(key, dtype=) -> params
  prefill(params, tokens, lengths, compute=, constrain=) -> (Cache, [S, D])
  decode(weights, cache, tokens, positions, compute=, read=, constrain=)
    -> (Cache, [S, D])
  """

  config: ModelConfig
  table: dict[str, transformer.Param]
  forward: Callable
  head: Callable
  init: Callable
  prefill: Callable
  decode: Callable

  def axes(self) -> dict:
    """The logical axes of every parameter, nested like the parameters."""
    return transformer.nest({k: p.axes for k, p in self.table.items()})

  def shapes(self) -> dict:
    return transformer.nest({k: p.shape for k, p in self.table.items()})

  def shardings(self, layout) -> dict:
    """The sharding of every parameter in `layout`, nested like them."""
    return transformer.nest({
        k: layout.sharding(p.axes, p.shape) for k, p in self.table.items()})


def build(cfg: ModelConfig) -> Model:
  bind = lambda fn: functools.partial(fn, cfg=cfg)
  return Model(
      config=cfg, table=transformer.param_table(cfg),
      forward=bind(transformer.forward), head=transformer.head,
      init=bind(transformer.init), prefill=bind(transformer.prefill),
      decode=bind(transformer.decode))
