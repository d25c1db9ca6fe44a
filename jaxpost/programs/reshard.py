"""Reshard: the trainer's parameters become the sampler's weights.

Cast and laid out on the way, some layers at a time, so that what exists beside
the two copies is bounded. What has the sampler's type and layout already, and
is no layer, is not copied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.transfer import relabelled
from jaxpost.models.layers import fusable, fuse
from jaxpost.models.parameters import STACKS, narrow, nest, unstack_layers
from jaxpost.programs.compile import Ledger, Program

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model

GROUP_BYTES = 2**30


class Reshard:
  """The program reshard(params) -> weights, with one dict per layer.

  Matrices that multiply the same activations are fused into one, unless they are
  split over devices. Weights that need no copy share the parameters' buffers, so
  they have to be freed before an update donates these.

  Args:
    most: bytes of the layers that one program makes, on all devices together;
      at least one layer.
    share_buffers: weights that need no copy share the parameters' buffers; False
      where they are still in use when an update donates the parameters.

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
    self._merge, model = model.merge, model.base or model
    self._compute, self._layout, self._share_buffers = compute, layout, share_buffers
    self._table, self._shardings = nest(model.table), model.shardings(layout)
    joined = fusable(model.table) if layout.mesh.shape['tensor'] == 1 else {}
    self._joined = joined
    # Name -> the parameter that it is made of, and how.
    self._made = {k: (k, p) for k, p in self._table.items() if k not in STACKS}
    # XLA:CPU converts a whole bfloat16 table to float32 to look up a few rows.
    if compute.row_writes and model.config.tie_embeddings and (compute.dtype == 'bfloat16'):
      self._made |= dict(embed=('embed', None), head=('embed', model.table['embed']))
      self._shardings['head'] = self._shardings['embed']
    each, most_bytes = [], 0  # shardings of every layer, bytes of the largest
    for stack in STACKS:
      rows = {path.split('/')[1]: p for path, p in model.table.items() if p.stacked and path.startswith(f'{stack}/')}
      (number,) = {p.shape[0] for p in rows.values()} or {0}
      each += [fuse({k: layout.sharding(p.axes[1:], p.shape[1:]) for k, p in rows.items()}, joined)] * number
      most_bytes = max(most_bytes, sum(math.prod(p.shape[1:]) * _size(p, compute) for p in rows.values()))
    self.layers = len(each)
    self._stacks = [s for s in STACKS if s in self._table]
    # Layers that differ are made by one program.
    self.group = self.layers if len(self._stacks) > 1 else group_of(self.layers, most, most_bytes)
    self._rest = Program('reshard', self._cast, ledger, lambda shapes: {k: self._shardings[k] for k in shapes})
    self._some = Program(
      'reshard', self._cast_layers, ledger, each[: self.group], times=self.layers // max(1, self.group)
    )

  def __call__(self, params) -> dict:
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

  def compile(self, params):
    _, rest, stacked = self._split(params)
    if rest:
      self._rest.compile(rest)
    if self.layers:
      self._some.compile(stacked, self._start())

  def outputs(self, params) -> dict:
    """The weights as `jax.ShapeDtypeStruct`s."""
    weights, rest, stacked = self._split(params)
    weights |= self._rest.outputs(rest) if rest else {}
    if self.layers:
      weights['layers'] = self._some.outputs(stacked, self._start()) * (self.layers // self.group)
    return weights

  def _start(self):
    return jax.ShapeDtypeStruct((), np.int32, sharding=self._layout.sharding())

  def _split(self, params) -> tuple[dict, dict, dict]:
    """(weights that are parameters, what others are made of, layers)."""
    if not self.layers:
      return {}, params, {}
    shared, rest = {}, {}
    for name, (source, param) in self._made.items():
      x = params[source]
      kind = x.dtype if param is None or param.exact else self._compute.dtype
      same = self._share_buffers and x.dtype == kind and x.sharding.is_equivalent_to(self._shardings[name], x.ndim)
      if same:
        shared[name] = relabelled(x, self._shardings[name])
      else:
        rest[name] = x
    sources = {source for source, _ in self._made.values()}
    return shared, rest, {k: x for k, x in params.items() if k not in sources}

  def _cast(self, params):
    """Casts everything outside the layer stack; for a custom model, everything."""
    if not self.layers:
      return jax.tree.map(lambda x, p: narrow(x, p, self._compute), self._merge(params), self._table)
    # Without a copy in it jit would return the parameter itself.
    copy = lambda x, p: jnp.copy(x) if p is None else narrow(jnp.copy(x), p, self._compute)
    return {name: copy(x, self._made[name][1]) for name, x in params.items()}

  def _cast_layers(self, stacked, start):
    """`group` layers from `start` on."""
    if self.group < self.layers:
      stacked = jax.tree.map(lambda x: _rows(x, start, self.group), stacked)
    some = self._merge(stacked)
    cast = {
      name: jax.tree.map(lambda x, p: narrow(x, p, self._compute), some[name], self._table[name])
      for name in self._stacks
    }
    return [fuse(p, self._joined) for p in unstack_layers(cast, self.group)['layers']]


def _size(param, compute: Compute) -> int:
  return 4 if param.exact else jnp.dtype(compute.dtype).itemsize


def group_of(layers: int, most: int, each: int) -> int:
  """Layers of a group: as many as fit `most` bytes and divide their number."""
  fitting = max(1, min(layers, most // max(each, 1)))
  return next((n for n in range(fitting, 1, -1) if layers % n == 0), 1)


def _rows(x, start, count: int):
  """x[start:start + count], by its bits: see `matmul`."""
  narrow_type = x.dtype == jnp.bfloat16
  bits = jax.lax.bitcast_convert_type(x, jnp.uint16) if narrow_type else x
  bits = jax.lax.dynamic_slice_in_dim(bits, start, count)
  return jax.lax.bitcast_convert_type(bits, x.dtype) if narrow_type else bits
