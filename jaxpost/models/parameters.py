"""Rows of a parameter table, and trees of what it describes."""

import dataclasses

import jax
import jax.numpy as jnp

STACKS = ('dense', 'layers')  # of layers, in their order


@dataclasses.dataclass(frozen=True)
class Param:
  """One row of the parameter table.

  axes: logical name of each dimension; 'layers' comes first where stacked.
  hf: name in a Llama folder, with {} for the layer, and for the expert where
    each has a tensor; `stored.py` has others.
  matrix: an operand of matrix products, stored transposed by HF ([out, in]).
  exact: never rounded: a norm scale, a bias or a router.
  first: the number of its first layer.
  dtype: in memory; '' is that of the parameters.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  hf: str
  init: str = 'normal'  # normal | ones | zeros
  matrix: bool = False
  exact: bool = False
  first: int = 0
  dtype: str = ''

  @property
  def stacked(self) -> bool:
    return self.axes[0] == 'layers'

  @property
  def stack(self) -> int:
    """Leading dimensions of which each entry is stored by itself."""
    return self.hf.count('{}')


def input_dims(spec: Param) -> int:
  """Leading dimensions of a stored matrix that are its inputs.

  'embed' has a side of its own: [embed | heads, size], [heads, size | embed];
  so has the rank of adapters.
  """
  axes = spec.axes[spec.stack :]
  return 1 if axes[0] in ('embed', 'rank') else len(axes) - 1


def nest(flat: dict) -> dict:
  """{'layers/q': x} -> {'layers': {'q': x}}: the form of all parameters."""
  tree = {}
  for path, value in flat.items():
    *parents, leaf = path.split('/')
    node = tree
    for name in parents:
      node = node.setdefault(name, {})
    node[leaf] = value
  return tree


def flatten(tree: dict, prefix='') -> dict:
  """What `nest` was given."""
  flat = {}
  for name, value in tree.items():
    flat |= flatten(value, f'{prefix}{name}/') if isinstance(value, dict) else {prefix + name: value}
  return flat


def leaf(tree: dict, path: str):
  for name in path.split('/'):
    tree = tree[name]
  return tree


def held_parts(tree: dict, path: str) -> tuple[dict, dict]:
  """(what `Model.merge` makes a parameter of, what it asks besides), nested.

  Its leaf, or its codes, and its adapter; the type of the norm is that of what
  was quantised.
  """
  own = {p: x for p, x in flatten(tree).items() if f'/{path}/' in f'/{p}/'}
  return nest(own), {k: x for k, x in tree.items() if k == 'norm' and own.keys() != {path}}


def join(one: dict, two: dict) -> dict:
  """The leaves of two trees in one; where both have one, that of the second."""
  both = [k for k, v in two.items() if k in one and isinstance(v, dict)]
  return one | two | {k: join(one[k], two[k]) for k in both}


@jax.custom_vjp
def _unstack(x):
  """[L, ...] -> L arrays; its transpose is one stack, not L padded sums."""
  return tuple(x)


_unstack.defvjp(lambda x: (tuple(x), None), lambda _, g: (jnp.stack(g),))


def unstack_layers(params: dict, num_layers: int) -> dict:
  """Parameters with a list of layers in place of the stacked dicts."""
  out = []
  for stack in (params[name] for name in STACKS if name in params):
    leaves, tree = jax.tree.flatten(stack)
    rows = zip(*map(_unstack, leaves), strict=True)
    out += [tree.unflatten(row) for row in rows]
  assert len(out) == num_layers
  rest = {k: v for k, v in params.items() if k not in STACKS}
  return {**rest, 'layers': out}
