"""Custom models: a flax module, linen or nnx, as a `Model`.

Legend: B rows, T tokens, S slots, D hidden size, V vocabulary.

The module is called with `tokens`, `positions` and `segment_ids`, int32 [B, T], and returns hidden states [B, T, D]. A
token may attend to itself and to earlier tokens of its segment. The module and the path of its output embedding are
enough to train and to sample; docs/your_model.md has two complete examples.

There is no KV cache: each new token costs a pass over the whole text. A model
that has to sample fast provides `prefill` and `decode` itself.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import RULES
from jaxpost.errors import InputError
from jaxpost.models.config import CustomConfig
from jaxpost.models.model import Model
from jaxpost.models.parameters import Param, flatten, leaf, nest
from jaxpost.types import Cache


def linen(module: Any, *, vocab_size: int, head: str, axes: Sequence[tuple[str, tuple]] = ()) -> Model:
  """Makes a model of a `flax.linen.Module`.

  Args:
    module: see the top of this file; all its variables are in the collection 'params'.
    vocab_size: V, its number of tokens.
    head: path of the output embedding, [V, D] or [D, V]: 'embed/embedding' if
      it is tied to the input's, 'lm_head/kernel' for a Dense.
    axes: (regular expression, logical axes) pairs; the first that matches a whole path defines how that parameter is
      sharded: 'embed', 'mlp', 'heads', 'kv_heads', 'vocab' or None for each dimension. The default is that of
      `nn.with_partitioning`, or ('embed', None, ...) for a matrix.
  """
  import flax.linen as nn

  def init_boxed(key):
    variables = module.init(key, *_example())
    _refuse(set(variables) != {'params'}, f'has the collections {", ".join(sorted(variables))}')
    return variables['params']

  names = nn.get_partition_spec(jax.eval_shape(init_boxed, jax.random.key(0)))
  return _make(
    lambda key: nn.unbox(init_boxed(key)),
    lambda params, *inputs: module.apply({'params': params}, *inputs),
    vocab_size,
    head,
    axes,
    named=flatten(names),
  )


def nnx(make_module: Callable, *, vocab_size: int, head: str, axes: Sequence[tuple[str, tuple]] = ()) -> Model:
  """Makes a model of `make_module(rngs)`, which returns a `flax.nnx.Module`.

  All its state must be `nnx.Param`s; a path is the names of `to_pure_dict`
  joined by /. The other arguments are those of `linen`.
  """
  from flax import nnx as lib

  graph, *states = lib.split(lib.eval_shape(lambda: make_module(lib.Rngs(0))), lib.Param, ...)
  abstract, other_state = states
  _refuse(bool(jax.tree.leaves(other_state)), 'has state that is not an nnx.Param')

  def init(key):
    state = lib.state(make_module(lib.Rngs(key)), lib.Param)
    return _strings(lib.to_pure_dict(state))

  def apply(params, *inputs):
    state = jax.tree.map(lambda x: x, abstract)
    lib.replace_by_pure_dict(state, params)
    return lib.merge(graph, state)(*inputs)

  names = lib.to_pure_dict(lib.get_partition_spec(abstract))
  return _make(init, apply, vocab_size, head, axes, named=flatten(_strings(names)))


def _refuse(condition: bool, complaint: str):
  """Raises InputError if the condition holds; `complaint` follows 'the module' in the message."""
  if condition:
    raise InputError(f'config.model.preset: the module {complaint}; only parameters can be trained, sharded and saved')


def _example() -> tuple[jax.Array, ...]:
  """Returns tokens, positions and segment_ids for initialization."""
  return (jnp.zeros((1, 2), jnp.int32),) * 3


def _strings(tree: Any) -> Any:
  """Turns the keys of nested dicts into strings; nnx uses ints for lists."""
  return {str(k): _strings(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _axes(path: str, shape: tuple, rules, named) -> tuple:
  """Returns the logical axes of a parameter; InputError for unknown names."""
  axes = _named_axes(path, shape, rules, named)
  for name in axes:
    if name is not None and name not in RULES['train']:
      raise InputError(
        f'config.model.preset: axes {axes} of {path}: {name!r} is not a logical axis, '
        f'so that dimension would not be sharded; use {", ".join(RULES["train"])}, or None'
      )
  return axes


def _named_axes(path: str, shape: tuple, rules, named) -> tuple:
  for pattern, names in rules:
    if re.fullmatch(pattern, path):
      if len(names) != len(shape):
        raise InputError(
          f'config.model.preset: axes {names} of {pattern!r} are for {len(names)} dimensions; {path} is {list(shape)}'
        )
      return tuple(names)
  names = named or (('embed',) if len(shape) > 1 else ())
  return (*names, *(None,) * (len(shape) - len(names)))


def _make(init, apply, vocab_size, head, rules, named) -> Model:
  shapes = {k: x.shape for k, x in flatten(jax.eval_shape(init, jax.random.key(0))).items()}
  _refuse(head not in shapes, f'has no {head!r}, which `head` names; there is {", ".join(shapes)}')
  _refuse(
    len(shapes[head]) != 2 or vocab_size not in shapes[head],
    f'has a {head} of {list(shapes[head])}, which is not [{vocab_size}, width] or its transpose',
  )
  for path, shape in shapes.items():
    _refuse(not shape, f'has the scalar {path}; give it shape [1]')
  table = {
    path: Param(shape, _axes(path, shape, rules, named.get(path)), path.replace('/', '.'), exact=len(shape) < 2)
    for path, shape in shapes.items()
  }
  for pattern, _ in rules:
    _refuse(
      not any(re.fullmatch(pattern, p) for p in table),
      f'has no parameter that {pattern!r} in `axes` matches; there is {", ".join(table)}',
    )
  vocab_first = shapes[head][0] == vocab_size
  config = CustomConfig(vocab_size, shapes[head][vocab_first], sum(math.prod(s) for s in shapes.values()))

  def run(params, tokens, positions, segment_ids, compute):
    # Rounded here, so that training, scoring and sampling use the same values.
    flat = {path: leaf(params, path) for path in table}
    flat = {path: x if table[path].exact else x.astype(compute.dtype) for path, x in flat.items()}
    with jax.default_matmul_precision('highest' if compute.dtype == 'float32' else None):
      return apply(nest(flat), tokens, positions, segment_ids)

  return Model(
    config=config,
    table=table,
    forward=functools.partial(_forward, run),
    head=lambda params: leaf(params, head) if vocab_first else leaf(params, head).T,
    init=lambda key, dtype=jnp.float32: jax.tree.map(lambda x: x.astype(dtype), init(key)),
    prefill=functools.partial(_prefill, run),
    decode=functools.partial(_decode, run),
    empty_cache=_empty_cache,
  )


def _forward(run, params, tokens, positions, segment_ids, *, compute, constrain):
  del constrain
  return run(params, tokens, positions, segment_ids, compute)


def _prefill(run, weights, tokens, lengths, *, compute, constrain):
  """Returns a cache that holds the tokens themselves, as [B, 1, T, 1]."""
  del constrain
  hidden = _read(run, weights, tokens, lengths, compute)
  return Cache((tokens[:, None, :, None],), ()), hidden


def _decode(run, weights, cache, recent, tokens, filled, step, *, compute, constrain):
  del constrain
  new = jax.lax.dynamic_update_slice_in_dim(recent.k[0], tokens[:, None, None, None], step, axis=2)
  rows = jnp.pad(cache.k[0][:, 0, :, 0], ((0, 0), (0, new.shape[2])))
  append = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
  text = append(rows, new[:, 0, :, 0], filled)
  hidden = _read(run, weights, text, filled + step + 1, compute)
  return Cache((new,), ()), hidden


def _read(run, weights, tokens, lengths, compute):
  """Runs the module on [S, T] tokens; returns the hidden states [S, D] of the last ones."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  hidden = run(weights, tokens, positions, segment_ids, compute)
  return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]


def _empty_cache(rows: int, entries: int, compute) -> Cache:
  del compute
  return Cache((jnp.zeros((rows, 1, entries, 1), jnp.int32),), ())
