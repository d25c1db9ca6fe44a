"""Mixture-of-experts layer: each token goes through the top-k of E expert MLPs.

Legend: B rows, T tokens, N tokens in all, D hidden size, F size of an expert,
E experts, k of them for a token, L layers.

`mlp` is the layer. It shards over the mesh and calls `_mlp_on_device`, which routes (`routing.py`), dispatches tokens
to the devices of their experts (`expert_parallel.py`), applies the experts (`expert_mlp.py`) and combines. Nothing is
dropped and nothing is padded to a capacity. `param_rows` declares the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError
from jaxpost.matmul import Compute
from jaxpost.models import expert_mlp, expert_parallel, layers
from jaxpost.models.parameters import Param
from jaxpost.models.routing import Routing, route

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

SHARED_PREFIX = 'shared_'  # of the parameters of the shared expert
_MATRICES = ('gate', 'up', 'down')
# Rows that a GPU multiplies without rounds, even if one device gets all of them, as in decoding: the host waits for the
# device at each round. With more rows, as in training, rounds without rows would cost more than the wait.
_ROWS_AT_ONCE = 8192


class _Sharding(NamedTuple):
  """How the layer is split over a mesh, as one device needs to know it.

  Attributes:
    specs: {parameter: its partition}.
    size: devices along the 'expert' axis.
    tokens_split: devices along that axis hold different tokens.
    exact: see `expert_parallel.exchange`.
    reduce_dtype: type in which gradients are summed over 'fsdp'.
  """

  specs: dict[str, PartitionSpec]
  size: int
  tokens_split: bool
  exact: bool
  reduce_dtype: str


def with_shared(
  p: dict, y: jax.Array, cfg: ModelConfig, compute: Compute, layout: Callable, chosen: jax.Array | None = None
) -> tuple[jax.Array, Routing]:
  """Adds the outputs of shared experts, if any, to those of `mlp`, whose experts may work in a latent space."""
  if cfg.experts.latent:
    x = layers.project('btd,dl->btl', y, p, 'latent_in', compute, layout=layout)
    out, routing = mlp(p, x, cfg, compute, layout, chosen=chosen, router_input=y)
    out = layers.project('btl,ld->btd', out, p, 'latent_out', compute, layout=layout)
  else:
    out, routing = mlp(p, y, cfg, compute, layout, chosen=chosen)
  if cfg.experts.shared:
    shared = {k.removeprefix(SHARED_PREFIX): v for k, v in p.items() if k.startswith(SHARED_PREFIX)}
    shared_out = layers.mlp(shared, y, cfg, compute, layout)
    out = out + (gate_shared(p, y, shared_out) if cfg.experts.shared_gate else shared_out)
  return out, routing


def mlp(
  p: dict,
  x: jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  layout: Callable,
  chosen: jax.Array | None = None,
  router_input: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
  """Applies the experts of each token and sums their outputs by router weight.

  On a mesh each device routes its own tokens. The 'expert' axis splits tokens and experts: each token is dispatched to
  the devices of its experts, which send the sums of their outputs back, to be combined. A device with more tokens than
  the others works in more rounds, see `expert_mlp.py`.

  Args:
    x: [B, T, D].
    layout: a `Layout`, or any function on a single device.
    chosen: [B, T, k], experts to use instead of the router's choice.
    router_input: [B, T, D], input of the router; None: x.

  Returns:
    ([B, T, D], `Routing`).
  """
  params = _dense_params(p, compute)
  if not isinstance(layout, Layout) or layout.mesh.size == 1:
    return _mlp_on_device(params, x, chosen, router_input, cfg, compute=compute)
  size = layout.mesh.shape['expert']
  if cfg.experts.num % size:
    raise InputError(f'config.mesh: expert={size} must divide the {cfg.experts.num} experts of the model')
  specs = _param_specs(params, cfg, layout)
  tokens = layout.spec(('batch', 'time', None), x.shape)
  sharding = _Sharding(
    specs=specs,
    size=size,
    tokens_split='expert' in jax.tree.leaves(tuple(tokens)),
    exact=layout.mesh.devices.flat[0].platform != 'cpu',
    reduce_dtype=layout.reduce_dtype,
  )
  return jax.shard_map(
    functools.partial(_mlp_on_device, cfg=cfg, compute=compute, sharding=sharding),
    mesh=layout.mesh,
    in_specs=(specs, tokens, tokens, tokens),
    out_specs=(tokens, Routing(tokens, tokens)),
    check_vma=False,
  )(params, x, chosen, router_input)


def _dense_params(p: dict, compute: Compute) -> dict[str, jax.Array]:
  """Returns the arrays of the routed experts and of the router, with quantized matrices dequantized.

  A matrix `gate` with an adapter becomes three arrays: `gate`, `gate_a` and `gate_b`.
  """
  names = ['router', *(name for name in _MATRICES if name in p)]
  names += [f'{name}_bias' for name in names if f'{name}_bias' in p]
  names += [name for name in ('router_choice', 'router_scale') if name in p]
  params = {}
  for name in names:
    w = p[name]
    if hasattr(w, 'apart'):  # `lora.Adapted`
      w, params[f'{name}_a'], params[f'{name}_b'] = w.apart()
    params[name] = w.dense(compute.dtype) if hasattr(w, 'dense') else w
  return params


def _param_specs(params: dict, cfg: ModelConfig, layout: Layout) -> dict[str, PartitionSpec]:
  """Returns the partition of each of `params` (`_dense_params` of one layer)."""
  table = param_rows(cfg)
  specs = {}
  for name in params:
    if f'layers/{name}' in table:
      spec = table[f'layers/{name}']
      specs[name] = layout.spec(spec.axes[1:], spec.shape[1:])
  specs |= {name: PartitionSpec() for name in ('router', 'router_scale') if name in params}  # small, and needed whole
  for name in _MATRICES:
    if f'{name}_a' in params:
      expert, inputs, outputs = specs[name]
      specs[f'{name}_a'] = PartitionSpec(expert, inputs, None)
      specs[f'{name}_b'] = PartitionSpec(expert, None, outputs)
  return specs


def _mlp_on_device(
  p: dict,
  x: jax.Array,
  chosen: jax.Array | None,
  router_input: jax.Array | None,
  cfg: ModelConfig,
  compute: Compute,
  sharding: _Sharding | None = None,
) -> tuple[jax.Array, Routing]:
  """Computes `mlp` of the tokens [B, T, D] of one device, with its share of the experts."""
  weights, routing = route(p, x if router_input is None else router_input, cfg.experts, chosen)
  rows = _flatten_tokens(x), _flatten_tokens(weights), _flatten_tokens(routing.chosen)
  if sharding is None:
    out = expert_mlp.apply_experts(p, *rows, first=0, cfg=cfg, compute=compute).astype(compute.residual)
    return out.reshape(x.shape), routing

  p = {name: _gather_fsdp(w, sharding.specs[name], compute.dtype, sharding.reduce_dtype) for name, w in p.items()}
  num_local = cfg.experts.num // sharding.size
  first = room = 0
  if sharding.size > 1:
    first = jax.lax.axis_index('expert') * num_local
    if sharding.tokens_split:
      sent, rows = expert_parallel.dispatch_tokens(*rows, num_local, sharding.exact)
  pairs = routing.chosen.size  # of a token and an expert that a device gets if routing is even
  if sharding.tokens_split and (compute.platform != 'gpu' or sharding.size * pairs > _ROWS_AT_ONCE):
    room = 2 * pairs
  tensor_shards = jax.lax.axis_size('tensor') if 'tensor' in sharding.specs['up'] else 1
  if 'down_bias' in p:  # each tensor shard adds its share
    p = p | {'down_bias': p['down_bias'] / tensor_shards}
  out = expert_mlp.apply_experts(p, *rows, first=first, cfg=cfg, compute=compute, room=room).astype(compute.residual)
  if sharding.size > 1 and sharding.tokens_split:
    out = expert_parallel.combine(out.reshape(sharding.size, -1, x.shape[-1]), sent)
  elif sharding.size > 1:
    out = jax.lax.psum(out, 'expert')
  if tensor_shards > 1:
    out = jax.lax.psum(out, 'tensor')
  return out.reshape(x.shape), routing


def _flatten_tokens(x: jax.Array) -> jax.Array:
  """[B, T, n] -> [B T, n]."""
  return x.reshape(-1, x.shape[-1])


def _gather_fsdp(w: jax.Array, spec: PartitionSpec, dtype: str, reduce_dtype: str) -> jax.Array:
  """Gathers a shard of experts over 'fsdp', in `dtype`.

  The result is cast back to the type of the parameter, so that its gradient has that type. In the backward pass,
  float32 gradients are summed in `reduce_dtype`.
  """
  for axis, mesh_axis in enumerate(spec):
    if mesh_axis == 'fsdp':
      w = _gather(w, mesh_axis, axis, dtype, reduce_dtype)
  return w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w, mesh_axis, axis, dtype, reduce_dtype):
  del reduce_dtype
  return jax.lax.all_gather(w.astype(dtype), mesh_axis, axis=axis, tiled=True).astype(w.dtype)


def _gather_forward(w, mesh_axis, axis, dtype, reduce_dtype):
  return _gather(w, mesh_axis, axis, dtype, reduce_dtype), None


def _gather_backward(mesh_axis, axis, dtype, reduce_dtype, residuals, g):
  del dtype, residuals
  sent = g.astype(reduce_dtype) if g.dtype == jnp.float32 else g
  return (jax.lax.psum_scatter(sent, mesh_axis, scatter_dimension=axis, tiled=True).astype(g.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def gate_shared(p: dict, x: jax.Array, out: jax.Array) -> jax.Array:
  """Multiplies the output of the shared experts [B, T, D] by sigmoid(x W), one number for each token."""
  weight = p[f'{SHARED_PREFIX}weight']
  gate = jnp.einsum('btd,dn->btn', x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
  return (jax.nn.sigmoid(gate) * out).astype(out.dtype)


def behind(dense: dict[str, Param], table: dict[str, Param], cfg: ModelConfig) -> dict[str, Param]:
  """Returns `table`, whose layers have experts, with a stack 'dense' of the layers of the table `dense`."""
  rows = {}
  for stack, stack_table in ('dense', dense), ('layers', table):
    numbers = tuple(i for i, name in enumerate(cfg.layer_stacks) if name == stack)
    for path, spec in stack_table.items():
      if spec.stacked:
        shape = (len(numbers), *spec.shape[1:])
        rows[f'{stack}/{path.partition("/")[2]}'] = dataclasses.replace(spec, shape=shape, numbers=numbers)
  outside = {path: spec for path, spec in table.items() if not spec.stacked}
  return {'embed': outside.pop('embed')} | rows | outside


def param_rows(cfg: ModelConfig) -> dict[str, Param]:
  """Returns the rows of the parameter table that replace those of a dense MLP."""
  n, d = cfg.sparse_layers, cfg.hidden_size
  e, f = cfg.experts.num, cfg.experts.size
  shared_f, inner = cfg.experts.shared_size or cfg.experts.shared * f, cfg.experts.latent or d
  block = 'model.layers.{}.mlp.'

  def matrix(name, shape, axes):
    return Param((n, e, *shape), ('layers', 'expert', *axes), f'{block}experts.{{}}.{name}_proj.weight', matrix=True)

  def bias(name, shape, axes):
    return Param((n, *shape), ('layers', *axes), f'{block}{name}.bias', 'zeros', exact=True)

  def outside(name, shape, axes):
    return Param((n, *shape), ('layers', *axes), f'{block}{name}.weight', matrix=True)

  biases = {
    'router': bias('gate', (e,), (None,)),
    'gate': bias('experts.{}.gate_proj', (e, f), ('expert', 'mlp')),
    'up': bias('experts.{}.up_proj', (e, f), ('expert', 'mlp')),
    'down': bias('experts.{}.down_proj', (e, d), ('expert', None)),
  }
  table = {
    'layers/router': Param((n, d, e), ('layers', 'embed', None), f'{block}gate.weight', matrix=True, exact=True),
    'layers/gate': matrix('gate', (inner, f), ('embed', 'mlp')),
    'layers/up': matrix('up', (inner, f), ('embed', 'mlp')),
    'layers/down': matrix('down', (f, inner), ('mlp', 'embed')),
  }
  for name, spec in biases.items():
    if name in cfg.biases:
      table[f'layers/{name}_bias'] = spec
  if cfg.experts.choice_bias:
    table['layers/router_choice'] = dataclasses.replace(
      biases['router'], hf=f'{block}gate.e_score_correction_bias', dtype='float32'
    )
  if shared_f:
    table |= {
      f'layers/{SHARED_PREFIX}gate': outside('shared_experts.gate_proj', (d, shared_f), ('embed', 'mlp')),
      f'layers/{SHARED_PREFIX}up': outside('shared_experts.up_proj', (d, shared_f), ('embed', 'mlp')),
      f'layers/{SHARED_PREFIX}down': outside('shared_experts.down_proj', (shared_f, d), ('mlp', 'embed')),
    }
  if cfg.experts.latent:
    table |= {
      'layers/latent_in': outside('fc1_latent_proj', (d, inner), ('embed', None)),
      'layers/latent_out': outside('fc2_latent_proj', (inner, d), (None, 'embed')),
    }
  if cfg.activation in layers.UNGATED:
    table = {k: v for k, v in table.items() if not k.endswith('gate')}
  if cfg.experts.shared_gate:
    table[f'layers/{SHARED_PREFIX}weight'] = Param(
      (n, d, 1), ('layers', 'embed', None), f'{block}shared_expert_gate.weight', matrix=True, exact=True
    )
  return table
