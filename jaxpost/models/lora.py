"""Low-rank adapters (LoRA, arXiv:2106.09685) as rows of the parameter table.

Legend: L layers, r rank, B rows, T tokens. A matrix W [L, in, out] (where `in` and `out` may be several dimensions)
gets A [L, in, r] and B [L, r, out] and acts as x W + scale (x A) B. Matrices of E experts [L, E, in, out] get A [L, E,
in, r] and B [L, E, r, out]. `ModelConfig.lora` is (rank, alpha, rslora, targets).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.matmul import einsum
from jaxpost.models.parameters import ADAPTER_ROOT, Param, input_dims, is_mtp, match_paths, nest

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model


def scale(cfg: ModelConfig) -> float:
  """Returns the adapter scale: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
  rank, alpha, rslora, _ = cfg.lora
  return alpha / (math.sqrt(rank) if rslora else rank)


def with_adapters(plain: Model, cfg: ModelConfig, dropout: float = 0.0) -> Model:
  """Returns the model `plain` with the adapters of `cfg.lora`; `dropout` is the rate for their inputs."""
  rows = adapter_rows(plain.table, cfg)
  if dropout and any('expert' in spec.axes for spec in rows.values()):
    raise InputError('config.lora.dropout: adapters of experts have no dropout; set it to 0')

  def init(key, dtype=jnp.float32):
    adapters = {path: fresh(i, spec, key) for i, (path, spec) in enumerate(rows.items())}
    return plain.init(key, dtype=dtype) | nest(adapters)

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


def adapter_rows(table: dict, cfg: ModelConfig) -> dict[str, Param]:
  """Returns the table rows of A and B; InputError for targets that cannot have an adapter."""
  rank, *_, pattern = cfg.lora
  rows = {}
  paths = {target_name(p, s): p for p, s in table.items() if s.matrix and s.stacked and not is_mtp(p)}
  # 'q' also matches any path that ends in /q, except for experts: those are
  # selected by 'experts/q'.
  expression = r'(?:(?!.*experts/).*/|\w+/(?=experts/))?(?:{})'
  if pattern == ALL_LINEAR:
    target_paths = all_linear(table, rank)
  else:
    if pattern != DEFAULT and re.fullmatch(r'[\w/|]+', pattern):  # a list of names: each must match something
      for name in pattern.split('|'):
        match_paths(paths, name, 'config.lora.targets', expression)
    target_paths = [paths[name] for name in match_paths(paths, pattern, 'config.lora.targets', expression)]
  for path in target_paths:
    spec = table[path]
    if path not in targets(table):
      raise InputError(
        f'config.lora.targets: {pattern!r} matches {path}; routers and indexers have no adapters here, '
        'leave them out: "q|k|v|o"'
      )
    cut = spec.stack + input_dims(spec)
    if rank > full_rank(spec):
      raise InputError(
        f'config.lora.rank: {rank} is larger than {path}, whose rank is at most {full_rank(spec)}; lower it'
      )
    hf = f'base_model.model.{spec.hf.removesuffix("weight")}lora_'
    adapter = functools.partial(Param, matrix=True, dtype='float32', numbers=spec.numbers)
    shape, axes = (*spec.shape[:cut], rank), (*spec.axes[:cut], None)
    rows[f'{ADAPTER_ROOT}/{path}/a'] = adapter(shape, axes, f'{hf}A.weight', 'uniform')
    shape = (*spec.shape[: spec.stack], rank, *spec.shape[cut:])
    axes = (*spec.axes[: spec.stack], 'rank', *spec.axes[cut:])
    rows[f'{ADAPTER_ROOT}/{path}/b'] = adapter(shape, axes, f'{hf}B.weight', 'zeros')
  return rows


DEFAULT = 'q|k|v|o|gate|up|down'  # of `config.lora.targets`
ALL_LINEAR = 'all-linear'  # as in PEFT: every matrix of a layer that can have an adapter, except those of experts
_MAX_LAYERS = 4096  # of a stack, so that numbers of dropout keys do not collide


def target_pattern(text: str, table: dict, rank: int) -> str:
  """Returns the regex of `config.lora.targets` for names as PEFT writes them; other text is returned unchanged.

  'q_proj,v_proj' becomes 'q|v'. 'all-linear' becomes `DEFAULT` if both select the same matrices of the model without
  adapters, whose parameter table is `table`.
  """
  if text == ALL_LINEAR and {p.rpartition('/')[2] for p in all_linear(table, rank)} <= {*DEFAULT.split('|')}:
    return DEFAULT
  names = [name.strip() for name in text.split(',')]
  if len(names) > 1 or re.fullmatch(r'[\w|]*_proj[\w|]*', text):
    return '|'.join(re.sub(r'\b([qkvo]|gate|up|down)_proj\b', r'\1', name) for name in names)
  return text


def targets(table: dict) -> list[str]:
  """Returns the paths of the matrices that can have an adapter."""
  return [p for p, s in table.items() if s.matrix and s.stacked and not s.exact]


def all_linear(table: dict, rank: int = 1) -> list[str]:
  """Returns the paths that `lora.targets=all-linear` stands for, except those whose full rank is below `rank`."""
  paths = [p for p in targets(table) if 'expert' not in table[p].axes and not is_mtp(p)]
  return [p for p in paths if full_rank(table[p]) >= rank]


def full_rank(spec: Param) -> int:
  """Returns the largest rank that a matrix of this shape can have: the smaller of its inputs and outputs."""
  cut = spec.stack + input_dims(spec)
  return min(math.prod(spec.shape[spec.stack : cut]), math.prod(spec.shape[cut:]))


def warn_left_out(model: Model) -> None:
  """Warns about layer matrices that `DEFAULT` does not name, or that are too small for the rank with `ALL_LINEAR`."""
  rank, *_, pattern = model.config.lora
  table = (model.base or model).table
  if pattern == DEFAULT:
    names = {p.rpartition('/')[2] for p in all_linear(table, rank)} - {*DEFAULT.split('|')}
    reason = 'all-linear includes them'
  else:
    names = {*all_linear(table)} - {*all_linear(table, rank)} if pattern == ALL_LINEAR else set()
    reason = f'their rank is below {rank}'
  if names:
    logging.warning('config.lora.targets: %s get no adapters; %s', ', '.join(sorted(names)), reason)


def target_name(path: str, spec: Param) -> str:
  """Returns the name of a path in `config.lora.targets`; that of experts in layers/gate is layers/experts/gate."""
  stack, _, last = path.rpartition('/')
  return f'{stack}/experts/{last}' if 'expert' in spec.axes else path


def fresh(number: int, spec: Param, key: jax.Array) -> jax.Array:
  """Returns initial values: uniform within 1 / sqrt(inputs) for A, as in PEFT, and zeros for B.

  number: of the row, from which its random numbers derive.
  """
  if spec.init != 'uniform':
    return jnp.zeros(spec.shape)
  bound = 1 / math.sqrt(math.prod(spec.shape[spec.stack : -1]))
  return jax.random.uniform(jax.random.fold_in(key, number), spec.shape, minval=-bound, maxval=bound)


@functools.partial(jax.tree_util.register_dataclass, data_fields=('w', 'a', 'b', 'keys'), meta_fields=('scale', 'rate'))
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A matrix W with its adapter A and B, which `matmul.einsum` accepts as an operand."""

  w: jax.Array  # it may be a `QuantizedMatrix`
  a: jax.Array
  b: jax.Array
  keys: jax.Array | None  # [B, 2] uint32, dropout keys of the rows; None: no dropout
  scale: float  # factor of (x A) B
  rate: float  # of dropout

  def apart(self) -> tuple:
    """Returns (W, A, scale B), for grouped products of experts."""
    return self.w, self.a, self.scale * self.b

  def dense(self, dtype: Any) -> jax.Array:
    """Returns the merged matrix W + scale A B of one layer."""
    w = self.w.dense('float32') if hasattr(self.w, 'dense') else self.w
    return (w + self.scale * jnp.tensordot(self.a, self.b, axes=1, precision=jax.lax.Precision.HIGHEST)).astype(dtype)

  def product(self, spec: str, x: jax.Array, dtype: str, out: str = 'float32') -> jax.Array:
    """Computes x W + scale (dropout(x) A) B; `spec` is the einsum of x and W, and `out` the type of x W."""
    return einsum(spec, x, self.w, dtype, out) + self.change(spec, x, dtype)

  def change(self, spec: str, x: jax.Array, dtype: str) -> jax.Array:
    """Computes scale (dropout(x) A) B in float32."""
    x_axes, w_axes, out_axes = spec.replace('->', ',').split(',')
    # A is [inputs, z], x A is [xa_axes] and B is [z, outputs], where the letter z stands for the rank.
    inputs = ''.join(c for c in w_axes if c in x_axes)
    outputs = ''.join(c for c in w_axes if c in out_axes)
    xa_axes = ''.join(c for c in x_axes if c not in w_axes) + 'z'
    if self.keys is not None:
      kept = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - self.rate, x.shape[1:]))(self.keys)
      x = jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)
    xa = self.scale * einsum(f'{x_axes},{inputs}z->{xa_axes}', x, self.a, dtype)
    return einsum(f'{xa_axes},z{outputs}->{out_axes}', xa, self.b, dtype)


def _forward(forward, cfg, rate, params, *rows, dropout=None, **options):
  """Runs `forward` of the model without adapters on adapted matrices.

  dropout: [B, 2] uint32, dropout keys of the rows; None: no dropout.
  """

  def adapted_matrix(number, w, a, b):
    keys = None
    if dropout is not None:
      layers = number * _MAX_LAYERS + jnp.arange(len(a))  # W, A and B have a leading axis of layers
      keys = jax.vmap(lambda i: jax.vmap(lambda k: jax.random.fold_in(k, i))(dropout))(layers)
    return Adapted(w, a, b, keys, scale(cfg), rate=rate)

  return forward(_over_targets(params, adapted_matrix), *rows, **options)


def adapted(params: dict, cfg: ModelConfig) -> dict:
  """Returns parameters of the model without adapters, with `Adapted` matrices."""
  return _over_targets(params, lambda number, w, a, b: Adapted(w, a, b, None, scale(cfg), rate=0.0))


def merge(params: dict, cfg: ModelConfig) -> dict:
  """Merges adapters into their matrices: W + scale A B."""

  def add(_number, w, a, b):
    merged = jax.vmap(lambda w, a, b: Adapted(w, a, b, None, scale(cfg), rate=0.0).dense(w.dtype))
    if a.ndim == b.ndim == 4:  # layers of experts; without experts A or B has fewer dimensions
      merged = jax.vmap(merged)
    return merged(w, a, b)

  return _over_targets(params, add)


def _over_targets(params: dict, fn: Callable) -> dict:
  """Returns `params` without adapters, and with each adapted W replaced by fn(number, W, A, B)."""
  if ADAPTER_ROOT not in params:
    return params
  out = {k: v for k, v in params.items() if k != ADAPTER_ROOT}
  number = 0
  for stack, adapters in params[ADAPTER_ROOT].items():
    out[stack] = dict(out[stack])
    for name, adapter in adapters.items():
      out[stack][name] = fn(number, out[stack][name], adapter['a'], adapter['b'])
      number += 1
  return out
