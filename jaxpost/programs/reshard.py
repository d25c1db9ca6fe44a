"""Reshard: the trainer's parameters become the sampler's weights.

They are cast and resharded some layers at a time, which bounds the memory that is needed besides the two copies. A
parameter outside the layers that has the sampler's type and sharding already is not copied.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.transfer import relabelled
from jaxpost.matmul import on_bits
from jaxpost.models.layers import FUSED, FUSED_AXIS
from jaxpost.models.parameters import MTP, STACKS, in_float32, narrow, nest, unstack_layers
from jaxpost.programs.compile import Ledger, Program

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.models.parameters import Param

GROUP_BYTES = 2**30


class WeightSource(NamedTuple):
  """The parameter of which a weight outside the layer stacks is a copy."""

  parameter: str
  cast: Param | None  # its row of the parameter table; None: the type stays


class Reshard:
  """The program reshard(params) -> weights, with one dict per layer.

  Matrices that multiply the same activations are fused into one, unless they are split over devices. Weights that need
  no copy share the parameters' buffers, so they have to be freed before an update donates these.

  Args:
    most: limit of the bytes of the layers that a program makes, on all devices together; it makes at least one layer.
    share_buffers: False if weights are still in use when an update donates the parameters; nothing is shared then.

  Attributes:
    shared_bytes: bytes of the weights that shared buffers in the last call.
    layers, group: numbers of all layers, and of those that one call of a program makes.
  """

  def __init__(
    self,
    model: Model,
    layout: Layout,
    compute: Compute,
    ledger: Ledger,
    most: int = GROUP_BYTES,
    share_buffers: bool = True,
  ):
    self._merge, self._store = model.merge, model.store
    model = model.base or model
    self._compute, self._layout, self._share_buffers = compute, layout, share_buffers
    self._table, self._shardings = nest(model.table), model.shardings(layout)
    # Concatenating matrices that are split over `tensor` would move their parts between devices.
    self._fused = _fusable(model.table) if layout.mesh.shape['tensor'] == 1 else {}
    self._unused = (MTP,) if model.mtp else ()  # by samplers
    outside = {name: p for name, p in self._table.items() if name not in (*STACKS, *self._unused)}
    self._sources = {name: WeightSource(name, p) for name, p in outside.items()}
    # XLA:CPU converts a whole tied bfloat16 table to float32 to look up a few rows.
    if compute.platform == 'cpu' and model.config.tie_embeddings and compute.dtype == 'bfloat16':
      self._sources['embed'] = WeightSource('embed', None)
      self._sources['head'] = WeightSource('embed', model.table['embed'])
      self._shardings['head'] = self._shardings['embed']
    self._stacks = [s for s in STACKS if s in self._table]
    shardings, nbytes = _layers_of(model, layout, compute, self._fused)
    self._order = model.config.layer_stacks
    self.layers = len(shardings)
    # One program makes every group, so a model whose layers differ is a single group.
    self.group = self.layers if len(self._stacks) > 1 else group_of(self.layers, most, nbytes)
    self._copy_outside = Program('reshard', self._cast, ledger, lambda out: {k: self._shardings[k] for k in out})
    self._start = jax.ShapeDtypeStruct((), np.int32, sharding=layout.sharding())  # the first layer of a group
    calls = self.layers // max(1, self.group)
    group_shardings = [self._store(layer) for layer in shardings[: self.group]]
    self._copy_group = Program('reshard', self._cast_layers, ledger, group_shardings, calls_per_step=calls)

  def __call__(self, params: dict) -> dict:
    shared, to_copy, stacked = self._split(params)
    self.shared_bytes = sum(x.nbytes for x in shared.values())
    weights = shared | (self._copy_outside(to_copy) if to_copy else {})
    if self.layers:
      weights['layers'] = []
      for start in range(0, self.layers, self.group):
        weights['layers'] += self._copy_group(stacked, self._layout.put(np.int32(start)))
    return weights

  def compile(self, params: dict) -> None:
    """Compiles the programs for parameters or their `jax.ShapeDtypeStruct`s."""
    _, to_copy, stacked = self._split(params)
    if to_copy:
      self._copy_outside.compile(to_copy)
    if self.layers:
      self._copy_group.compile(stacked, self._start)

  def outputs(self, params: dict) -> dict:
    """Returns the weights as `jax.ShapeDtypeStruct`s."""
    weights, to_copy, stacked = self._split(params)
    weights |= self._copy_outside.outputs(to_copy) if to_copy else {}
    if self.layers:
      weights['layers'] = self._copy_group.outputs(stacked, self._start) * (self.layers // self.group)
    return weights

  def _split(self, params) -> tuple[dict, dict, dict]:
    """Returns (weights that share a parameter's buffers, {name of a weight: parameter to copy}, stacks of layers)."""
    if not self.layers:
      return {}, params, {}
    shared, to_copy = {}, {}
    for name, (parameter, cast) in self._sources.items():
      x = params[parameter]
      dtype = x.dtype if cast is None or cast.exact else self._compute.dtype
      needs_no_copy = x.dtype == dtype and x.sharding.is_equivalent_to(self._shardings[name], x.ndim)
      if self._share_buffers and needs_no_copy:
        shared[name] = relabelled(x, self._shardings[name])
      else:
        to_copy[name] = x
    outside_layers = {*self._unused, *(source.parameter for source in self._sources.values())}
    return shared, to_copy, {k: x for k, x in params.items() if k not in outside_layers}

  def _cast(self, params):
    """Casts the parameters outside the layer stacks; those of a custom model are all outside."""
    if not self.layers:
      return jax.tree.map(lambda x, p: narrow(x, p, self._compute), self._merged(params), self._table)
    # Without a copy, jit would return the parameter itself.
    copies = {name: (jnp.copy(x), self._sources[name].cast) for name, x in params.items()}
    return {name: x if row is None else narrow(x, row, self._compute) for name, (x, row) in copies.items()}

  def _cast_layers(self, stacked, start):
    """Returns the weights of `group` layers from layer `start` on."""
    if self.group < self.layers:
      cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=self.group)
      stacked = jax.tree.map(functools.partial(on_bits, cut), stacked)
    merged = self._merged(stacked)
    cast = {
      name: jax.tree.map(lambda x, p: narrow(x, p, self._compute), merged[name], self._table[name])
      for name in self._stacks
    }
    return [self._store(_fuse(p, self._fused)) for p in unstack_layers(cast, self._order[: self.group])['layers']]

  def _merged(self, params):
    """Merges adapters: in float32 if the model computes in it, because a sum in bfloat16 would not be the trainer's."""
    return self._merge(in_float32(params) if self._compute.dtype == 'float32' else params)


def _layers_of(model: Model, layout: Layout, compute: Compute, fused: dict) -> tuple[list[dict], int]:
  """Returns (shardings of the fused weights of every layer, bytes of the largest layer on all devices)."""
  shardings, largest, itemsize = {}, 0, jnp.dtype(compute.dtype).itemsize
  for stack in STACKS:
    rows = {path.split('/')[1]: p for path, p in model.table.items() if p.stacked and path.startswith(f'{stack}/')}
    shardings[stack] = _fuse({name: layout.sharding(p.axes[1:], p.shape[1:]) for name, p in rows.items()}, fused)
    largest = max(largest, sum(math.prod(p.shape[1:]) * (4 if p.exact else itemsize) for p in rows.values()))
  return [shardings[stack] for stack in model.config.layer_stacks], largest


def _fusable(table: dict[str, Param]) -> dict[str, tuple[str, ...]]:
  """Returns the groups of FUSED that can be one matrix, according to the parameter table."""

  def fits(names):
    specs = [table.get(f'layers/{name}') for name in names]
    has_bias = {f'layers/{name}_bias' in table for name in names}
    same_inputs = all(spec and spec.axes[:2] == ('layers', 'embed') for spec in specs) and len(has_bias) == 1
    # If the outputs of attention have gates, the heads of queries are larger, because they include the gates.
    return same_inputs and len({spec.shape[3:] for spec in specs}) == 1

  return {group: names for group, names in FUSED.items() if fits(names)}


def _fuse(p: dict, fused: dict) -> dict:
  """Joins the matrices of each group of `fused`, and their biases, in a layer's weights or in their shardings."""
  p = dict(p)
  for name, parts in fused.items():
    for suffix, axis in (('', FUSED_AXIS[name]), ('_bias', -1)):
      if all(part + suffix in p for part in parts):
        xs = [p.pop(part + suffix) for part in parts]
        p[name + suffix] = xs[0] if isinstance(xs[0], jax.sharding.Sharding) else jnp.concatenate(xs, axis)
  return p


def group_of(layers: int, most: int, each: int) -> int:
  """Returns the largest divisor of `layers` for which that many layers of `each` bytes fit `most` bytes, or 1."""
  fitting = max(1, min(layers, most // max(each, 1)))
  return next((n for n in range(fitting, 1, -1) if layers % n == 0), 1)
