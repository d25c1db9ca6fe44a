"""A state (pytree) as arrays by name, which is how checkpoints store it."""

from typing import Any

import jax
from etils import epath

from jaxpost import errors


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
  """Returns ({'opt_state/0/mu/embed': leaf}, treedef), in leaf order."""
  pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
  named = {}
  for path, leaf in pairs:
    key = jax.tree_util.keystr(path, simple=True, separator='/')
    if key in named:
      raise ValueError(f'two leaves of the state are both called {key}')
    named[key] = leaf
  return named, treedef


def check_arrays(named: dict[str, Any]) -> None:
  """Raises TypeError for leaves that a checkpoint cannot hold."""
  for key, leaf in named.items():
    if not isinstance(leaf, jax.Array):
      raise TypeError(f'{key} is a {type(leaf).__name__}, not a jax array')
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise TypeError(f'{key} is {leaf.dtype}; save jax.random.key_data of it')


def check_match(where: epath.Path, saved: dict[str, list], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
  """Raises InputError if the leaves on disk are not the ones wanted."""
  here = {k: f'{x.dtype} {list(x.shape)}' for k, x in wanted.items()}
  there = {k: f'{dtype} {shape}' for k, (shape, dtype) in saved.items()}
  wrong = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
  if not wrong:
    return
  key = wrong[0]
  more = f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''
  raise errors.InputError(
    f'{where}: {key} is {there.get(key, "absent")} in the checkpoint and'
    f' {here.get(key, "absent")} in the run{more}; the config changed since'
    ' this checkpoint: restore the old values or choose another folder'
  )
