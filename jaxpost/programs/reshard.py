"""Reshard: the trainer's parameters become the sampler's weights.

They are cast and resharded some layers at a time, which bounds the memory that is needed besides the two copies. A
parameter outside the layers that has the sampler's type and sharding already is not copied.
"""

from __future__ import annotations

import collections
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.transfer import relabelled
from jaxpost.matmul import Compute, on_bits
from jaxpost.models.layers import FUSED, FUSED_AXIS
from jaxpost.models.parameters import ADAPTER_ROOT, MTP, STACKS, Param, in_float32, narrow, nest, unstack_layers
from jaxpost.programs.compile import Ledger, Program

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model

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
    most: limit of the bytes of the layers that a call copies, on all devices together; it copies at least one layer.
    share_buffers: False if weights are still in use when an update donates the parameters; nothing is shared then.

  Attributes:
    shared_bytes: bytes of the weights that shared buffers in the last call.
    groups: {name of a stack: range of the first layers of its groups}; a custom model has no stacks.
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
    outside = {name: p for name, p in self._table.items() if name not in (*STACKS, MTP)}  # samplers do not use MTP
    self._sources = {name: WeightSource(name, p) for name, p in outside.items()}
    # XLA:CPU converts a whole tied bfloat16 table to float32 to look up a few rows.
    if compute.platform == 'cpu' and model.config.tie_embeddings and compute.dtype == 'bfloat16':
      self._sources['embed'] = WeightSource('embed', None)
      self._sources['head'] = WeightSource('embed', model.table['embed'])
      self._shardings['head'] = self._shardings['embed']
    self.groups, self._copy_group, self._order = {}, {}, model.config.layer_stacks
    for name, layers in collections.Counter(self._order).items():
      shardings, nbytes = _layer_of(self._table[name], layout, compute, self._fused)
      self.groups[name] = calls = range(0, layers, group_of(layers, most, nbytes))
      fn, out = functools.partial(self._cast_group, name), [self._store(shardings)] * calls.step
      self._copy_group[name] = Program('reshard', fn, ledger, out, calls_per_step=len(calls))
    self._copy_outside = Program('reshard', self._cast, ledger, lambda out: {k: self._shardings[k] for k in out})
    self._start = jax.ShapeDtypeStruct((), np.int32, sharding=layout.sharding())  # the first layer of a group

  def __call__(self, params: dict) -> dict:
    shared, to_copy = self._outside(params)
    self.shared_bytes = sum(x.nbytes for x in shared.values())
    weights = shared | (self._copy_outside(to_copy) if to_copy else {})
    return weights | self._layers(params, lambda copy, stack, i: copy(stack, self._layout.put(np.int32(i))))

  def compile(self, params: dict) -> None:
    """Compiles the programs for parameters or their `jax.ShapeDtypeStruct`s."""
    _, to_copy = self._outside(params)
    if to_copy:
      self._copy_outside.compile(to_copy)
    for name, copy in self._copy_group.items():
      copy.compile(_of_stack(params, name), self._start)

  def outputs(self, params: dict) -> dict:
    """Returns the weights as `jax.ShapeDtypeStruct`s."""
    weights, to_copy = self._outside(params)
    weights |= self._copy_outside.outputs(to_copy) if to_copy else {}
    return weights | self._layers(params, lambda copy, stack, _: copy.outputs(stack, self._start))

  def _layers(self, params, copies) -> dict:
    """Returns {'layers': the weights of all layers}; `copies` gets (program, stack, start), and returns a group's."""

    def of_stack(name):
      stack = _of_stack(params, name)
      for start in self.groups[name]:
        yield from copies(self._copy_group[name], stack, start)

    stacks = {name: of_stack(name) for name in self.groups}
    return {'layers': [next(stacks[name]) for name in self._order]} if stacks else {}

  def _outside(self, params) -> tuple[dict, dict]:
    """Returns (weights outside the layers that share a parameter's buffers, {name of a weight: parameter to copy})."""
    if not self.groups:
      return {}, params
    shared, to_copy = {}, {}
    for name, (parameter, cast) in self._sources.items():
      x = params[parameter]
      dtype = x.dtype if cast is None or cast.exact else self._compute.dtype
      needs_no_copy = x.dtype == dtype and x.sharding.is_equivalent_to(self._shardings[name], x.ndim)
      if self._share_buffers and needs_no_copy:
        shared[name] = relabelled(x, self._shardings[name])
      else:
        to_copy[name] = x
    return shared, to_copy

  def _cast(self, params):
    """Casts the parameters outside the layer stacks; those of a custom model are all outside."""
    if not self.groups:
      return jax.tree.map(lambda x, p: narrow(x, p, self._compute), self._merged(params), self._table)
    # Without a copy, jit would return the parameter itself.
    copies = {name: (jnp.copy(x), self._sources[name].cast) for name, x in params.items()}
    return {name: x if row is None else narrow(x, row, self._compute) for name, (x, row) in copies.items()}

  def _cast_group(self, name, stacked, start):
    """Returns the weights of a group of layers of a stack, from its layer `start` on."""
    group = self.groups[name]
    if len(group) > 1:
      cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=group.step)
      stacked = jax.tree.map(functools.partial(on_bits, cut), stacked)
    cast = jax.tree.map(lambda x, p: narrow(x, p, self._compute), self._merged(stacked)[name], self._table[name])
    return [self._store(_fuse(p, self._fused)) for p in unstack_layers({name: cast}, [name] * group.step)['layers']]

  def _merged(self, params):
    """Merges adapters: in float32 if the model computes in it, because a sum in bfloat16 would not be the trainer's."""
    return self._merge(in_float32(params) if self._compute.dtype == 'float32' else params)


def _of_stack(params: dict, name: str) -> dict:
  """Returns the parameters of a stack and its adapters."""
  return {name: params[name], ADAPTER_ROOT: {name: params.get(ADAPTER_ROOT, {}).get(name, {})}}


def _layer_of(rows: dict[str, Param], layout: Layout, compute: Compute, fused: dict) -> tuple[dict, int]:
  """Returns (shardings of the fused weights of a layer of a stack, its bytes on all devices)."""
  itemsize = jnp.dtype(compute.dtype).itemsize
  shardings = {name: layout.sharding(p.axes[1:], p.shape[1:]) for name, p in rows.items()}
  return _fuse(shardings, fused), sum(math.prod(p.shape[1:]) * (4 if p.exact else itemsize) for p in rows.values())


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
