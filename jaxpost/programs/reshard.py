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
from jaxpost.models.parameters import MTP, STACKS, narrow, nest, unstack_layers
from jaxpost.programs.compile import Ledger, Program

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.models.parameters import Param

GROUP_BYTES = 2**30


class WeightSource(NamedTuple):
  """The parameter that a weight outside the layer stacks is made of."""

  parameter: str
  cast: Param | None  # its row of the parameter table; None: the type stays


class Reshard:
  """The program reshard(params) -> weights, with one dict per layer.

  Matrices that multiply the same activations are fused into one, unless they are split over devices. Weights that need
  no copy share the parameters' buffers, so they have to be freed before an update donates these.

  Args:
    most: bytes of the layers that one program makes, on all devices together; at least one layer.
    share_buffers: False where these buffers are still in use when an update donates the parameters.

  Attributes:
    shared_bytes: bytes that the last call shared.
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
    kept = self._kept = (MTP,) if model.mtp else ()  # with the trainer
    self._sources = {name: WeightSource(name, p) for name, p in self._table.items() if name not in (*STACKS, *kept)}
    # XLA:CPU converts a whole tied bfloat16 table to float32 to look up a few rows.
    if compute.platform == 'cpu' and model.config.tie_embeddings and compute.dtype == 'bfloat16':
      self._sources['embed'] = WeightSource('embed', None)
      self._sources['head'] = WeightSource('embed', model.table['embed'])
      self._shardings['head'] = self._shardings['embed']
    self._stacks = [s for s in STACKS if s in self._table]
    shardings, nbytes = _layers_of(model, layout, compute, self._fused)
    self._order = model.config.layer_stacks
    self.layers = len(shardings)
    # One program makes every group, so layers that differ are in one group.
    self.group = self.layers if len(self._stacks) > 1 else group_of(self.layers, most, nbytes)
    self._rest = Program('reshard', self._cast, ledger, lambda weights: {k: self._shardings[k] for k in weights})
    self._start = jax.ShapeDtypeStruct((), np.int32, sharding=layout.sharding())  # the first layer of a group
    calls = self.layers // max(1, self.group)
    kept = [self._store(layer) for layer in shardings[: self.group]]
    self._some = Program('reshard', self._cast_layers, ledger, kept, calls_per_step=calls)

  def __call__(self, params: dict) -> dict:
    shared, rest, stacked = self._split(params)
    self.shared_bytes = sum(x.nbytes for x in shared.values())
    weights = shared | (self._rest(rest) if rest else {})
    if self.layers:
      weights['layers'] = [
        layer
        for start in range(0, self.layers, self.group)
        for layer in self._some(stacked, self._layout.put(np.int32(start)))
      ]
    return weights

  def compile(self, params: dict) -> None:
    """Compiles the programs for parameters or their `jax.ShapeDtypeStruct`s."""
    _, rest, stacked = self._split(params)
    if rest:
      self._rest.compile(rest)
    if self.layers:
      self._some.compile(stacked, self._start)

  def outputs(self, params: dict) -> dict:
    """Returns the weights as `jax.ShapeDtypeStruct`s."""
    weights, rest, stacked = self._split(params)
    weights |= self._rest.outputs(rest) if rest else {}
    if self.layers:
      weights['layers'] = self._some.outputs(stacked, self._start) * (self.layers // self.group)
    return weights

  def _split(self, params) -> tuple[dict, dict, dict]:
    """Returns (weights that share a parameter's buffers, parameters to copy by name of the weight, layers)."""
    if not self.layers:
      return {}, params, {}
    shared, rest = {}, {}
    for name, (parameter, cast) in self._sources.items():
      x = params[parameter]
      dtype = x.dtype if cast is None or cast.exact else self._compute.dtype
      needs_no_copy = x.dtype == dtype and x.sharding.is_equivalent_to(self._shardings[name], x.ndim)
      if self._share_buffers and needs_no_copy:
        shared[name] = relabelled(x, self._shardings[name])
      else:
        rest[name] = x
    outside_layers = {*self._kept, *(source.parameter for source in self._sources.values())}
    return shared, rest, {k: x for k, x in params.items() if k not in outside_layers}

  def _cast(self, params):
    """Casts everything outside the layer stack; for a custom model, everything."""
    if not self.layers:
      return jax.tree.map(lambda x, p: narrow(x, p, self._compute), self._merged(params), self._table)
    # Without a copy, jit would return the parameter itself.
    copies = {name: (jnp.copy(x), self._sources[name].cast) for name, x in params.items()}
    return {name: x if row is None else narrow(x, row, self._compute) for name, (x, row) in copies.items()}

  def _cast_layers(self, stacked, start):
    """Makes the weights of `group` layers from layer `start` on."""
    if self.group < self.layers:
      cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=self.group)
      stacked = jax.tree.map(functools.partial(on_bits, cut), stacked)
    some = self._merged(stacked)
    cast = {
      name: jax.tree.map(lambda x, p: narrow(x, p, self._compute), some[name], self._table[name])
      for name in self._stacks
    }
    return [self._store(_fuse(p, self._fused)) for p in unstack_layers(cast, self._order[: self.group])['layers']]

  def _merged(self, params):
    """Merges adapters, in float32 where that is computed in: in bfloat16, the sum would not be the trainer's."""
    if self._compute.dtype == 'float32':
      params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params)
    return self._merge(params)


def _layers_of(model: Model, layout: Layout, compute: Compute, fused: dict) -> tuple[list[dict], int]:
  """Returns (shardings of the fused weights of every layer, bytes of the largest layer on all devices)."""
  each, largest, width = {}, 0, jnp.dtype(compute.dtype).itemsize
  for stack in STACKS:
    rows = {path.split('/')[1]: p for path, p in model.table.items() if p.stacked and path.startswith(f'{stack}/')}
    each[stack] = _fuse({name: layout.sharding(p.axes[1:], p.shape[1:]) for name, p in rows.items()}, fused)
    largest = max(largest, sum(math.prod(p.shape[1:]) * (4 if p.exact else width) for p in rows.values()))
  return [each[stack] for stack in model.config.layer_stacks], largest


def _fusable(table: dict[str, Param]) -> dict[str, tuple[str, ...]]:
  """Returns the groups of FUSED that can be one matrix, by the parameter table."""

  def alike(names):
    specs = [table.get(f'layers/{n}') for n in names]
    biases = {f'layers/{n}_bias' in table for n in names}
    inputs = all(s and s.axes[:2] == ('layers', 'embed') for s in specs) and len(biases) == 1
    # Heads of queries are larger where a gate of the output is beside them.
    return inputs and len({s.shape[3:] for s in specs}) == 1

  return {k: names for k, names in FUSED.items() if alike(names)}


def _fuse(p: dict, joined: dict) -> dict:
  """Joins the matrices of each group in a layer's weights, or in their shardings."""
  p = dict(p)
  for name, parts in joined.items():
    for tail, axis in (('', FUSED_AXIS[name]), ('_bias', -1)):
      if all(part + tail in p for part in parts):
        some = [p.pop(part + tail) for part in parts]
        p[name + tail] = some[0] if isinstance(some[0], jax.sharding.Sharding) else jnp.concatenate(some, axis)
  return p


def group_of(layers: int, most: int, each: int) -> int:
  """Returns the largest divisor of `layers` so that a group of as many, of `each` bytes, fits `most` bytes."""
  fitting = max(1, min(layers, most // max(each, 1)))
  return next((n for n in range(fitting, 1, -1) if layers % n == 0), 1)
