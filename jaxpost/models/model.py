"""The `Model` record: pure functions and a parameter table; what of it is trained, and weights of its other forms.

Anything that provides these functions can be trained and sampled from; `build` and `custom.py` return such records. A
model may have adapters (`lora.py`), quantized matrices (`quantization.py`) and frozen parameters. Runs without the
first two do not import these files.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError
from jaxpost.models import transformer
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.models.parameters import Param, flatten, is_adapter, is_mtp, leaf, match_paths, nest

_CODE = 'config.model.preset'


@dataclasses.dataclass(frozen=True)
class Model:
  """Pure functions of parameters; `transformer.py` and `decoding.py` explain arguments and shapes.

  forward(params, tokens, positions, segment_ids, compute=, constrain=)
    -> hidden [B, T, D]; also takes branch_ids=, noise=, dropout= if given
  head(params) -> [V, D]; None for a model with a scalar head only
  values(params, hidden) -> [B, T], for a model with a scalar head
  init(key, dtype=) -> params
  prefill(params, tokens, lengths, compute=, constrain=) -> (Cache, [S, D])
  decode(weights, cache, recent, tokens, filled, step, compute=, constrain=)
    -> (recent, [S, D])
  empty_cache(rows, entries, compute) -> Cache; None: keys and values
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
  frozen: frozenset = frozenset()  # paths of parameters that are not trained
  base: Model | None = None  # the model without adapters and quantization
  merge: Callable = lambda params: params  # params -> parameters of the base
  view: Callable = lambda params: params  # params -> input of the base's `prefill`
  store: Callable = dict  # {name: matrix or sharding} of a sampler's layer -> the same, as the sampler stores it
  passes: float = 3.0  # FLOPs of an update, in units of a forward pass
  dropout: float = 0.0  # rate on the inputs of adapters, in updates
  quantized: str = ''  # 'int8' or 'nf4': quantized matrices

  def shapes(self) -> dict:
    """The shape of every parameter, nested like the parameters."""
    return nest({k: p.shape for k, p in self.table.items()})

  @property
  def mtp(self) -> frozenset[str]:
    """Paths of the module for multi-token prediction, if the model has one."""
    return frozenset(filter(is_mtp, self.table)) if 'mtp' in self.config.more_heads else frozenset()

  @property
  def trains_mtp(self) -> bool:
    """True if updates train the module for multi-token prediction."""
    return not self.mtp <= self.frozen

  def flops_of_update(self, context: float) -> float:
    """Returns the FLOPs of an update per token, if tokens attend to `context` tokens on average."""
    flops = self.passes * transformer.flops_per_token(self.config, context)
    if self.trains_mtp:
      from jaxpost.models import multi_token

      rows = {path: self.table[path] for path in self.mtp}
      flops += 3 * transformer.flops_per_token(multi_token.one_layer(self.config), context, rows)
    return flops

  def shardings(self, layout: Layout) -> dict:
    """The sharding of every parameter in `layout`, nested like them."""
    return nest({k: layout.sharding(p.axes, p.shape) for k, p in self.table.items()})


def with_value_head(cfg: ModelConfig, present: bool) -> ModelConfig:
  """Returns the config with a scalar head beside the language-model head, or without it."""
  others = tuple(name for name in cfg.more_heads if name != 'value')
  return dataclasses.replace(cfg, more_heads=('value', *others) if present else others)


def with_scalar_head(cfg: ModelConfig, lora: tuple = ()) -> ModelConfig:
  """Returns the config with a scalar head, for reward models and critics."""
  return dataclasses.replace(cfg, num_labels=1, more_heads=(), lora=lora)


def from_code(code: str) -> Model:
  """Loads a custom model: calls the user's function './file.py:make'."""
  from jaxpost import imports

  make = imports.load_callable(code, _CODE)
  needed = [
    p.name
    for p in inspect.signature(make).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]
  if needed:
    raise InputError(f'{_CODE}: {code} must be callable without arguments; it requires {", ".join(needed)}')
  model = make()
  if not isinstance(model, Model):
    raise InputError(
      f'{_CODE}: {code} returns a {type(model).__name__}, not a Model; '
      'jaxpost.models.custom.linen or .nnx makes one of a flax module'
    )
  return dataclasses.replace(model, config=dataclasses.replace(model.config, code=code))


def build(cfg: ModelConfig | CustomConfig, dropout: float = 0.0) -> Model:
  """Builds the model of `cfg`, with the adapters of `cfg.lora` if there are any."""
  plain = _without_adapters(dataclasses.replace(cfg, lora=()))
  if not cfg.lora:
    return plain
  from jaxpost.models import lora

  return lora.with_adapters(plain, cfg, dropout)


def _without_adapters(cfg: ModelConfig | CustomConfig) -> Model:
  if isinstance(cfg, CustomConfig):
    if cfg.num_labels or 'value' in cfg.more_heads:
      raise InputError(
        f'{_CODE}: {cfg.code} has no scalar head, which a critic or a reward '
        'model needs; take a method without one, or a model of `presets`'
      )
    return from_code(cfg.code)

  return Model(
    config=cfg,
    table=transformer.param_table(cfg),
    forward=functools.partial(transformer.forward, cfg=cfg),
    head=None if cfg.num_labels else head,
    init=functools.partial(init, cfg=cfg),
    prefill=functools.partial(_of_sampler, 'prefill', cfg=cfg),
    decode=functools.partial(_of_sampler, 'decode', cfg=cfg),
    values=values if cfg.num_labels or 'value' in cfg.more_heads else None,
  )


def _of_sampler(name, *args, **options):
  from jaxpost.models import decoding  # imported here, because runs that only train do not need it

  return getattr(decoding, name)(*args, **options)


def init(key: jax.Array, cfg: ModelConfig, dtype: Any = jnp.float32) -> dict:
  """Returns initial parameters: normal with standard deviation `initializer_range`; padding of the vocabulary is 0."""
  flat = {}
  for i, (path, spec) in enumerate(transformer.param_table(cfg).items()):
    if spec.init in ('ones', 'zeros'):
      value = jnp.full(spec.shape, spec.init == 'ones', spec.dtype or dtype)
    else:
      value = cfg.initializer_range * jax.random.normal(jax.random.fold_in(key, i), spec.shape, dtype)
    if spec.axes[0] == 'vocab':
      value = value.at[cfg.vocab_size :].set(0)
    flat[path] = value
  return nest(flat)


def head(params: dict) -> jax.Array:
  """Returns the output embedding [V, D]; the input embedding if they are tied."""
  return params['head'] if 'head' in params else params['embed']


def values(params: dict, hidden: jax.Array) -> jax.Array:
  """Applies the scalar head in float32: [B, T, D] -> [B, T]."""
  hidden = hidden.astype(jnp.float32)
  return jnp.einsum('btd,dn->btn', hidden, params['score'], precision=jax.lax.Precision.HIGHEST)[..., 0]


def freeze(model: Model, pattern: str, mtp: bool = False) -> Model:
  """Returns the model with `frozen` set: the paths that are not trained.

  Args:
    pattern: regular expression that matches whole paths. With '', a model with adapters trains only these and a scalar
      head, and another model trains everything. `Param.frozen` are always frozen.
    mtp: whether to train a module for multi-token prediction.
  """
  if pattern:
    frozen = set(match_paths(model.table, pattern, 'config.train.freeze'))
  else:
    frozen = {p for p in model.table if model.config.lora and not is_adapter(p) and p != 'score'}
  frozen |= {p for p, spec in model.table.items() if spec.frozen} | (frozenset() if mtp else model.mtp)
  if len(frozen) == len(model.table):
    raise InputError(f'config.train.freeze: {pattern!r} leaves nothing to train')
  # An update costs as much as a forward pass, a second one for the gradients of activations,
  # and a third one for those of parameters, of which only the trained share is computed.
  sizes = {path: math.prod(spec.shape) for path, spec in model.table.items() if path not in model.mtp}
  share = 1 - sum(sizes.get(path, 0) for path in frozen) / sum(sizes.values())
  return dataclasses.replace(model, frozen=frozenset(frozen), passes=2 + share)


def frozen_base_model(cfg: ModelConfig, kind: str = '') -> Model:
  """Builds the model of `cfg` with trained adapters on a frozen base, quantized to `kind` (`quantized`)."""
  return quantized(freeze(build(cfg), ''), kind)


def quantized(model: Model, kind: str) -> Model:
  """Returns `quantization.quantize_model(model, kind)`, which is only imported if `kind` is not ''."""
  if not kind:
    return model
  from jaxpost.models import quantization

  return quantization.quantize_model(model, kind)


def convert(params: dict, theirs: Model, model: Model) -> dict:
  """Returns the parameters of `theirs`, with matrices quantized or dequantized to the form that `model` has."""
  if not (theirs.quantized or model.quantized):
    return params
  from jaxpost.models import quantization

  return quantization.convert_params(params, model)


def trained_part(model: Model) -> Model:
  """Returns the model with the trained rows of its table only."""
  return dataclasses.replace(model, table={p: spec for p, spec in model.table.items() if p not in model.frozen})


def split(params: dict, model: Model) -> tuple[dict, dict]:
  """Splits parameters into (trained, frozen); `parameters.join` merges them."""
  trained = {p: leaf(params, p) for p in model.table if p not in model.frozen}
  return nest(trained), nest({p: leaf(params, p) for p in model.table if p in model.frozen})


def adopt(params: dict, theirs: Model, model: Model, layout: Layout, dtype: Any, seed: int = 0) -> dict:
  """Converts parameters of `theirs` to those of `model`, the same decoder in another form.

  Adapters of `theirs` are merged unless `model` has the same; new adapters are initialized, and a new scalar head is 0.
  Leaves that `model` lacks are dropped. Matrices are quantized or dequantized to the form that `model` has; others get
  the type of their row in its table or, if that is '', `dtype`.
  """
  if theirs.config.lora not in ((), model.config.lora):
    params = theirs.merge(params)
  converted = flatten(convert(params, theirs, model))
  key = jax.random.key(seed)
  out = {}
  for i, (path, spec) in enumerate(model.table.items()):
    sharding = layout.sharding(spec.axes, spec.shape)
    if path in converted:
      value = converted[path].astype(spec.dtype or dtype)  # the same array if it has that type
      out[path] = jax.device_put(value, sharding) if model.quantized else value
      continue
    value = np.zeros(spec.shape)  # of a scalar head
    if is_adapter(path):
      from jaxpost.models import lora

      value = np.asarray(lora.fresh(i, spec, key))
    out[path] = jax.device_put(value.astype(spec.dtype or dtype), sharding)
  return nest(out)
