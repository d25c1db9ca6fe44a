"""Low-rank adapters (LoRA, arXiv:2106.09685) as rows of the parameter table.

Legend: L layers, r rank, B rows, T tokens. A matrix W [L, in, out] (each side
of any number of dimensions) gets A [L, in, r] and B [L, r, out] and acts as
x W + scale (x A) B. Those of E experts [L, E, in, out] get a pair each: A
[L, E, in, r], B [L, E, r, out]. `ModelConfig.lora` is (rank, alpha, rslora,
targets).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.errors import InputError
from jaxpost.matmul import einsum
from jaxpost.models import model as model_lib
from jaxpost.models import quantization
from jaxpost.models.parameters import Param, flatten, input_dims, join, leaf, nest

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model

ROOT = 'lora'  # adapters are below it: lora/layers/q/a is A of layers/q


def scale(cfg: ModelConfig) -> float:
  """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
  rank, alpha, rslora, _ = cfg.lora
  return alpha / (math.sqrt(rank) if rslora else rank)


def build(cfg: ModelConfig, dropout: float = 0.0) -> Model:
  """The model of `cfg`, with adapters where `cfg.lora` has them."""
  plain = model_lib.build(dataclasses.replace(cfg, lora=()))
  if not cfg.lora:
    return plain
  rows = adapter_rows(plain.table, cfg)
  if dropout and any('expert' in spec.axes for spec in rows.values()):
    raise InputError('config.lora.dropout: is not for adapters of experts; set it to 0')

  def init(key, dtype=jnp.float32):
    return plain.init(key, dtype=dtype) | nest(
      {path: fresh(i, spec, key) for i, (path, spec) in enumerate(rows.items())}
    )

  return dataclasses.replace(
    plain,
    config=cfg,
    table=plain.table | rows,
    init=init,
    forward=functools.partial(_forward, plain.forward, cfg, dropout),
    base=plain,
    merge=functools.partial(merge, cfg=cfg),
    dropout=dropout,
    view=functools.partial(adapted, cfg=cfg),
  )


def _matching(paths, pattern: str, key: str, expression='{}') -> list[str]:
  """The paths that the pattern fits as a whole; InputError without any."""
  try:
    found = [p for p in paths if re.fullmatch(expression.format(pattern), p)]
  except re.error as e:
    raise InputError(f'{key}: {pattern!r} is no regular expression ({e})') from None
  if not found:
    raise InputError(f'{key}: {pattern!r} matches none of {", ".join(paths)}')
  return found


def adapter_rows(table: dict, cfg: ModelConfig) -> dict[str, Param]:
  """The rows of A and B. InputError where there can be none."""
  rank, *_, pattern = cfg.lora
  rows = {}
  names = {target_name(p, s): p for p, s in table.items() if s.matrix and s.stacked}
  # 'q' is any path that ends in /q, too; experts are asked for by that word.
  for path in map(
    names.get, _matching(names, pattern, 'config.lora.targets', '(?:(?!.*experts/).*/|layers/(?=experts/))?(?:{})')
  ):
    spec = table[path]
    if path not in targets(table):
      raise InputError(
        f'config.lora.targets: {pattern!r} matches {path}; routers have no adapters here, leave them out: "q|k|v|o"'
      )
    cut = spec.stack + input_dims(spec)
    least = min(math.prod(spec.shape[spec.stack : cut]), math.prod(spec.shape[cut:]))
    if rank > least:
      raise InputError(f'config.lora.rank: {rank} is larger than {path}, whose rank is at most {least}; lower it')
    hf = f'base_model.model.{spec.hf.removesuffix("weight")}lora_'
    rows[f'{ROOT}/{path}/a'] = Param(
      (*spec.shape[:cut], rank),
      (*spec.axes[:cut], None),
      f'{hf}A.weight',
      'uniform',
      matrix=True,
      dtype='float32',
      first=spec.first,
    )
    rows[f'{ROOT}/{path}/b'] = Param(
      (*spec.shape[: spec.stack], rank, *spec.shape[cut:]),
      (*spec.axes[: spec.stack], 'rank', *spec.axes[cut:]),
      f'{hf}B.weight',
      'zeros',
      matrix=True,
      dtype='float32',
      first=spec.first,
    )
  return rows


def targets(table: dict) -> list[str]:
  """The paths of what can have an adapter."""
  return [p for p, s in table.items() if s.matrix and s.stacked and not s.exact]


def target_name(path: str, spec: Param) -> str:
  """What `config.lora.targets` calls it: layers/experts/gate for those."""
  stack, _, last = path.rpartition('/')
  return f'{stack}/experts/{last}' if 'expert' in spec.axes else path


def is_adapter(path: str) -> bool:
  return path.startswith(f'{ROOT}/')


def fresh(number: int, spec: Param, key):
  """A starts uniform within 1 / sqrt(inputs), as in PEFT; the rest at 0."""
  if spec.init != 'uniform':
    return jnp.zeros(spec.shape)
  bound = 1 / math.sqrt(math.prod(spec.shape[spec.stack : -1]))
  return jax.random.uniform(jax.random.fold_in(key, number), spec.shape, minval=-bound, maxval=bound)


@functools.partial(jax.tree_util.register_dataclass, data_fields=('w', 'a', 'b', 'keys'), meta_fields=('scale', 'rate'))
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A matrix with its adapter, where `matmul.einsum` takes a matrix.

  keys: [B, 2] uint32, of the dropout in each row; None is no dropout.
  """

  w: jax.Array
  a: jax.Array
  b: jax.Array
  keys: jax.Array | None
  scale: float
  rate: float

  def apart(self) -> tuple:
    """(W, A, scale B), for what multiplies groups of rows by each."""
    return self.w, self.a, self.scale * self.b

  def dense(self, dtype):
    """W + scale A B, of one layer."""
    w = self.w.dense('float32') if hasattr(self.w, 'dense') else self.w
    return (w + self.scale * jnp.tensordot(self.a, self.b, axes=1, precision=jax.lax.Precision.HIGHEST)).astype(dtype)

  def product(self, spec: str, x, dtype: str):
    """x W + scale (dropout(x) A) B, as `einsum` would of W alone."""
    inputs, out = spec.split('->')
    left, right = inputs.split(',')
    into = ''.join(c for c in right if c in left)
    onto = ''.join(c for c in right if c in out)
    low = ''.join(c for c in left if c not in right) + 'z'
    y = x
    if self.keys is not None:
      kept = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - self.rate, x.shape[1:]))(self.keys)
      y = jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)
    y = self.scale * einsum(f'{left},{into}z->{low}', y, self.a, dtype)
    return einsum(spec, x, self.w, dtype) + einsum(f'{low},z{onto}->{out}', y, self.b, dtype)


def _forward(
  forward,
  cfg,
  rate,
  params,
  tokens,
  positions,
  segment_ids,
  compute,
  constrain=None,
  branch_ids=None,
  noise=None,
  dropout=None,
  chosen=None,
  routing=None,
):
  """`forward` of the model without adapters, with them.

  dropout: [B, 2] uint32, keys of what is dropped in each row.
  """

  def pair(number, w, a, b):
    keys = None
    if dropout is not None:
      layers = number * len(a) + jnp.arange(len(a))
      keys = jax.vmap(lambda i: jax.vmap(lambda k: jax.random.fold_in(k, i))(dropout))(layers)
    return Adapted(w, a, b, keys, scale(cfg), rate)

  given = dict(constrain=constrain, branch_ids=branch_ids, noise=noise, chosen=chosen, routing=routing)
  return forward(
    _over_targets(params, pair),
    tokens,
    positions,
    segment_ids,
    compute=compute,
    **{k: v for k, v in given.items() if v is not None},
  )


def adapted(params: dict, cfg: ModelConfig) -> dict:
  """Parameters of the model without adapters, whose matrices have them."""
  return _over_targets(params, lambda number, w, a, b: Adapted(w, a, b, None, scale(cfg), 0.0))


def merge(params: dict, cfg: ModelConfig) -> dict:
  """Parameters of the model without adapters that computes the same."""

  def add(number, w, a, b):
    del number
    dot = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    of_layers = jax.vmap(dot)
    if a.ndim == b.ndim == 4:  # of experts; of others one has fewer
      of_layers = jax.vmap(of_layers)
    return (w + scale(cfg) * of_layers(a, b)).astype(w.dtype)

  return _over_targets(params, add)


def _over_targets(params: dict, fn: Callable) -> dict:
  """`params` without adapters, fn(number, W, A, B) in the place of each W."""
  if ROOT not in params:
    return params
  out, number = {k: v for k, v in params.items() if k != ROOT}, 0
  for stack, pairs in params[ROOT].items():
    out[stack] = dict(out[stack])
    for name, pair in pairs.items():
      out[stack][name] = fn(number, out[stack][name], pair['a'], pair['b'])
      number += 1
  return out


# ------------------------------------------------------------------ freezing


def freeze(model: Model, pattern: str) -> Model:
  """The model with the rows that training leaves as they are.

  Those whose whole path the pattern matches; without one, with adapters, all
  but these and a scalar head.
  """
  frozen = {p for p in model.table if model.config.lora and not is_adapter(p) and p != 'score'}
  if pattern:
    frozen = set(_matching(model.table, pattern, 'config.train.freeze'))
  if len(frozen) == len(model.table):
    raise InputError(f'config.train.freeze: {pattern!r} leaves nothing to train')
  # No gradient of what is frozen: forward, through it, and of the others.
  sizes = {path: math.prod(spec.shape) for path, spec in model.table.items()}
  share = 1 - sum(sizes[path] for path in frozen) / sum(sizes.values())
  return dataclasses.replace(model, frozen=frozenset(frozen), passes=2 + share)


def frozen_base_model(cfg: ModelConfig, kind: str = '') -> Model:
  """The model of `cfg` whose adapters are trained, its base quantised or not."""
  return quantization.quantize_model(freeze(build(cfg), ''), kind)


def trained_part(model: Model) -> Model:
  """The table of what is trained, with the shapes and shardings of that."""
  return dataclasses.replace(model, table={p: spec for p, spec in model.table.items() if p not in model.frozen})


def split(params: dict, model: Model) -> tuple[dict, dict]:
  """(what is trained, what is frozen); `join` puts them together."""
  flat = {p: leaf(params, p) for p in model.table}
  return tuple(nest({p: x for p, x in flat.items() if (p in model.frozen) == side}) for side in (False, True))


def adopt(params: dict, theirs: Model, model: Model, layout, dtype, seed: int = 0) -> dict:
  """Parameters of `theirs` as those of `model`, the same decoder.

  Adapters that `model` has not, too, are merged; its own start fresh, and a
  scalar head at zero. Leaves that `model` lacks are dropped. Matrices are
  quantised, or made whole, as `model` has them.
  """
  if theirs.config.lora not in ((), model.config.lora):
    params = theirs.merge(params)
  have = flatten(quantization.convert_params(params, model))
  key, out = jax.random.key(seed), {}
  for i, (path, spec) in enumerate(model.table.items()):
    sharding = layout.sharding(spec.axes, spec.shape)
    if path in have:
      out[path] = have[path] if not model.quantized else (jax.device_put(have[path], sharding))
    else:
      out[path] = jax.device_put(np.asarray(fresh(i, spec, key)).astype(spec.dtype or dtype), sharding)
  return nest(out)


def adopt_sharing_frozen(params: dict, theirs: Model, model: Model, layout, dtype) -> dict:
  """`adopt` for a model that is trained, too: it shares what it freezes."""
  own, fixed = split(adopt(params, theirs, model, layout, dtype), model)
  return join(jax.tree.map(jnp.copy, own), fixed)
