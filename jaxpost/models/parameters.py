"""The parameter table: its rows, and nested dicts with the same paths."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.matmul import Compute

LAYER = 'model.layers.{}.'  # prefix of a layer's tensors in Hugging Face's naming
ADAPTER_ROOT = 'lora'  # path prefix of adapters: lora/layers/q/a is A of layers/q
# Stacks whose layers have a state of fixed size instead of attention; those of 'dense' layers have no experts.
STATEFUL = ('dense_delta', 'dense_convolution', 'dense_state_space', 'delta', 'convolution', 'state_space')
STACKS = ('dense', *STATEFUL, 'mlp', 'moe', 'local', 'local_shared', 'shared', 'layers')  # names of all stacks
MTP = 'mtp'  # path prefix of the module for multi-token prediction, which samplers do not use (`multi_token.py`)


@dataclasses.dataclass(frozen=True)
class Param:
  """One row of the parameter table."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # logical name of each dimension; 'layers' comes first where stacked
  # Name in a Hugging Face folder of Llama, with {} for the layer, and for the expert if each has a tensor; formats/ has
  # the names of other families.
  hf: str
  init: str = 'normal'  # normal | ones | zeros
  matrix: bool = False  # an operand of matrix products, stored transposed by HF ([out, in])
  exact: bool = False  # never rounded: a norm scale, a bias or a router
  numbers: tuple[int, ...] = ()  # the layers that have it, in the order of its entries; (): all layers
  dtype: str = ''  # type in memory; '' is the type of the other parameters
  frozen: bool = False  # has no gradient, and is never trained

  @property
  def stacked(self) -> bool:
    """True if the first dimension is the layer."""
    return self.axes[0] == 'layers'

  def number(self, i: int) -> int:
    """Returns the number of the layer that the i-th entry belongs to."""
    return self.numbers[i] if self.numbers else i

  @property
  def stack(self) -> int:
    """Number of leading dimensions (layer, expert) whose entries HF stores separately."""
    return self.hf.count('{}')


def rows_of_layers(table: dict[str, Param]) -> dict[str, Param]:
  """Returns {name: row} of the layers of a table with one stack."""
  return {path.partition('/')[2]: spec for path, spec in table.items() if spec.stacked}


def in_stacks(plain: dict[str, Param], stacks: Sequence[str], rows_of: Callable) -> dict[str, Param]:
  """Returns a table with several stacks of layers, and the rows outside of layers that `plain` has.

  Args:
    stacks: name of the stack of each layer (`ModelConfig.layer_stacks`).
    rows_of: name of a stack -> {name: row} of its layers, with any number of layers.
  """
  rows = {}
  for stack in (name for name in STACKS if name in stacks):
    numbers = tuple(i for i, name in enumerate(stacks) if name == stack)
    for name, spec in rows_of(stack).items():
      rows[f'{stack}/{name}'] = dataclasses.replace(spec, shape=(len(numbers), *spec.shape[1:]), numbers=numbers)
  outside = {path: spec for path, spec in plain.items() if not spec.stacked}
  return {'embed': outside.pop('embed')} | rows | outside


def input_dims(spec: Param) -> int:
  """Returns the number of leading dimensions of a matrix that are its inputs.

  'embed' or the rank of an adapter is one whole side of a matrix: [embed | heads, size], [heads, size | embed].
  """
  axes = spec.axes[spec.stack :]
  return 1 if axes[0] in ('embed', 'rank') else len(axes) - 1


def match_paths(paths: Iterable[str], pattern: str, key: str, expression: str = '{}') -> list[str]:
  """Returns the paths that `pattern`, inserted into `expression`, matches as a whole; InputError if there are none."""
  try:
    matches = [p for p in paths if re.fullmatch(expression.format(pattern), p)]
  except re.error as e:
    raise InputError(f'{key}: {pattern!r} is not a regular expression ({e})') from None
  if not matches:
    raise InputError(f'{key}: {pattern!r} matches none of {", ".join(paths)}')
  return matches


def nest(flat: dict) -> dict:
  """Makes nested dicts of paths: {'layers/q': x} -> {'layers': {'q': x}}."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(tree: dict) -> dict:
  """Makes paths of nested dicts: {'layers': {'q': x}} -> {'layers/q': x}."""
  return traverse_util.flatten_dict(tree, sep='/')


def leaf(tree: dict, path: str) -> Any:
  """Returns the entry of nested dicts at a path 'layers/q'."""
  for name in path.split('/'):
    tree = tree[name]
  return tree


def join(tree: dict, other: dict) -> dict:
  """Merges two nested dicts; where only one has a dict, or both have a leaf, the entry of `other` wins."""
  common = [k for k, v in other.items() if isinstance(v, dict) and isinstance(tree.get(k), dict)]
  return tree | other | {k: join(tree[k], other[k]) for k in common}


@jax.custom_vjp
def _unstack(x):
  """[L, ...] -> L arrays; the gradient is one stack, where that of indexing would be a sum of L padded arrays."""
  return tuple(x)


_unstack.defvjp(lambda x: (tuple(x), None), lambda _, g: (jnp.stack(g),))


def unstack_layers(params: dict, stacks: Sequence[str]) -> dict:
  """Returns the parameters with a list of layers instead of the stacked dicts, if they do not have it already.

  stacks: name of the stack of each layer (`ModelConfig.layer_stacks`).
  """
  if isinstance(params.get('layers'), list):  # of a sampler
    return params
  layers: dict[str, list] = {}  # of each stack
  for name in STACKS:
    if name in params:
      leaves, tree = jax.tree.flatten(params[name])
      layers[name] = [tree.unflatten(arrays) for arrays in zip(*map(_unstack, leaves), strict=True)]
  assert {name: len(x) for name, x in layers.items()} == dict(collections.Counter(stacks))
  next_layer = {name: iter(x) for name, x in layers.items()}
  others = {k: v for k, v in params.items() if k not in STACKS}
  return others | {'layers': [next(next_layer[name]) for name in stacks]}


def narrow(x: jax.Array, param: Param, compute: Compute) -> jax.Array:
  """Returns a copy of a parameter in the type of operands, or in its own type if it is `exact`."""
  return jnp.array(x, x.dtype if param.exact else compute.dtype, copy=True)


def in_float32(tree: Any) -> Any:
  """Returns the tree with its bfloat16 leaves as float32."""
  return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def is_mtp(path: str) -> bool:
  """Returns True for the paths of a module for multi-token prediction."""
  return path.startswith(f'{MTP}/')


def is_adapter(path: str) -> bool:
  """Returns True for the paths of the matrices A and B of LoRA."""
  return path.startswith(f'{ADAPTER_ROOT}/')
