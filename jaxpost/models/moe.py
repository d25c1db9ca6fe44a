"""Mixture-of-experts layer: each token goes through the top-k of E expert MLPs.

Legend: B rows, T tokens, N tokens in all, D hidden size, F size of an expert,
E experts, k of them for a token, L layers.

`mlp` is the layer. Each device routes its tokens (`routing.py`) and applies their experts (`expert_mlp.py`). On a mesh,
`_apply_on_mesh` dispatches tokens to the devices of their experts before that and combines the outputs after it
(`expert_parallel.py`); a device with more tokens than the others works in more rounds. Nothing is dropped and nothing
is padded to a capacity. `param_rows` declares the parameters.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError
from jaxpost.matmul import Compute
from jaxpost.models import expert_mlp, expert_parallel, layers
from jaxpost.models.config import ModelConfig
from jaxpost.models.parameters import LAYER, Param
from jaxpost.models.routing import Routing, route

_SHARED = 'shared_'  # prefix of the parameters of the shared expert
_ROUTER = ('router', 'router_bias', 'router_choice', 'router_scale')
_MATRICES = ('gate', 'up', 'down')
# Rows that a GPU multiplies without rounds, even if one device gets all of them, as in decoding: the host waits for the
# device at each round. With more rows, as in training, rounds without rows would cost more than the wait.
_ROWS_AT_ONCE = 8192


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
    shared = shared_params(p)
    shared_out = layers.mlp(shared, y, cfg, compute, layout)
    if cfg.experts.shared_gate:  # sigmoid(y W), one number for each token
      gate = jnp.einsum('btd,dn->btn', y.astype(jnp.float32), shared['weight'], precision=jax.lax.Precision.HIGHEST)
      shared_out = (jax.nn.sigmoid(gate) * shared_out).astype(shared_out.dtype)
    out = out + shared_out
  return out, routing


def shared_params(p: dict) -> dict:
  """Returns the parameters of the shared expert, with the names of those of a dense MLP."""
  return {name.removeprefix(_SHARED): w for name, w in p.items() if name.startswith(_SHARED)}


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

  Args:
    x: [B, T, D].
    layout: a `Layout`, or any function on a single device.
    chosen: [B, T, k], experts to use instead of the router's choice.
    router_input: [B, T, D], input of the router; None: x.

  Returns:
    ([B, T, D], `Routing`).
  """
  params = _dense_params(p, compute)
  apply = functools.partial(expert_mlp.apply_experts, cfg=cfg, compute=compute)
  if not isinstance(layout, Layout) or layout.mesh.size == 1:
    return _route_and_apply(params, x, chosen, router_input, cfg=cfg, apply=apply)
  if cfg.experts.num % (size := layout.mesh.shape['expert']):
    raise InputError(f'config.mesh: expert={size} must divide the {cfg.experts.num} experts of the model')
  specs = _param_specs(params, cfg, layout)
  tokens, split_over = layout.of_tokens(x.shape)
  apply = functools.partial(
    _apply_on_mesh, cfg=cfg, compute=compute, layout=layout, specs=specs, tokens_split='expert' in split_over
  )
  return jax.shard_map(
    functools.partial(_route_and_apply, cfg=cfg, apply=apply),
    mesh=layout.mesh,
    in_specs=(specs, tokens, tokens, tokens),
    out_specs=(tokens, Routing(tokens, tokens)),
    check_vma=False,
  )(params, x, chosen, router_input)


def _dense_params(p: dict, compute: Compute) -> dict[str, jax.Array]:
  """Returns the arrays of the routed experts and of the router, with quantized matrices dequantized.

  A matrix `gate` with an adapter becomes three arrays: `gate`, `gate_a` and `gate_b`.
  """
  names = (*_ROUTER, *_MATRICES, *(f'{name}_bias' for name in _MATRICES))
  params = {}
  for name in filter(p.__contains__, names):
    w = p[name]
    if hasattr(w, 'apart'):  # `lora.Adapted`
      w, params[f'{name}_a'], params[f'{name}_b'] = w.apart()
    params[name] = w.dense(compute.dtype) if hasattr(w, 'dense') else w
  return params


def _param_specs(params: dict, cfg: ModelConfig, layout: Layout) -> dict[str, PartitionSpec]:
  """Returns the partition of each of `params` (`_dense_params` of one layer)."""
  table, specs = param_rows(cfg), {}
  for name in params:
    if name in _ROUTER:
      specs[name] = PartitionSpec()  # small, and needed whole
    elif spec := table.get(f'layers/{name}'):
      specs[name] = layout.spec(spec.axes[1:], spec.shape[1:])
  for name in _MATRICES:
    if f'{name}_a' in params:
      expert, inputs, outputs = specs[name]
      specs[f'{name}_a'] = PartitionSpec(expert, inputs, None)
      specs[f'{name}_b'] = PartitionSpec(expert, None, outputs)
  return specs


def _route_and_apply(
  p: dict,
  x: jax.Array,
  chosen: jax.Array | None,
  router_input: jax.Array | None,
  cfg: ModelConfig,
  apply: Callable[..., jax.Array],
) -> tuple[jax.Array, Routing]:
  """Computes `mlp` of the tokens [B, T, D] of one device; `apply` is `expert_mlp.apply_experts` or `_apply_on_mesh`."""
  weights, routing = route(p, x if router_input is None else router_input, cfg.experts, chosen)
  rows = (y.reshape(-1, y.shape[-1]) for y in (x, weights, routing.chosen))  # [B, T, n] -> [B T, n]
  return apply(p, *rows).reshape(x.shape), routing


def _apply_on_mesh(
  p: dict,
  x: jax.Array,
  weights: jax.Array,
  chosen: jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  layout: Layout,
  specs: dict[str, PartitionSpec],
  tokens_split: bool,
) -> jax.Array:
  """Computes `expert_mlp.apply_experts` of the rows [N, D] of one device, with the experts of all devices.

  Args:
    p: this device's shards of the parameters.
    specs: {parameter: its partition}.
    tokens_split: devices along the mesh axis 'expert' have different rows, and exchange them. If not, they have the
      same rows, and add up their outputs.
  """
  size = layout.mesh.shape['expert']
  num_local = cfg.experts.num // size
  first = jax.lax.axis_index('expert') * num_local if size > 1 else 0
  p = dict(p)
  for name, spec in specs.items():
    if 'fsdp' in spec:
      p[name] = _gather_fsdp(p[name], tuple(spec).index('fsdp'), compute.dtype, layout.reduce_dtype)
  summed_over = ['expert'] if size > 1 and not tokens_split else []
  if 'tensor' in specs['up']:
    summed_over.append('tensor')
    if 'down_bias' in p:  # each tensor shard adds its share
      p['down_bias'] = p['down_bias'] / jax.lax.axis_size('tensor')
  rows, room = (x, weights, chosen), 0
  if tokens_split:
    exact = layout.mesh.devices.flat[0].platform != 'cpu'
    plan, rows = expert_parallel.dispatch_tokens(*rows, num_local, exact)
    pairs = chosen.size  # of a token and an expert that a device gets if routing is even
    if compute.platform != 'gpu' or size * pairs > _ROWS_AT_ONCE:
      room = 2 * pairs
  out = expert_mlp.apply_experts(p, *rows, first=first, cfg=cfg, compute=compute, room=room)
  if tokens_split:
    out = expert_parallel.combine(out.reshape(size, *x.shape), plan)
  for mesh_axis in summed_over:
    out = jax.lax.psum(out, mesh_axis)
  return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_fsdp(w: jax.Array, axis: int, dtype: str, reduce_dtype: str) -> jax.Array:
  """Gathers a shard of experts over 'fsdp', in `dtype`.

  The result is cast back to the type of the parameter, so that its gradient has that type. In the backward pass,
  float32 gradients are summed in `reduce_dtype`.
  """
  del reduce_dtype
  return jax.lax.all_gather(w.astype(dtype), 'fsdp', axis=axis, tiled=True).astype(w.dtype)


def _gather_backward(axis, _dtype, reduce_dtype, _residuals, g):
  sent = g.astype(reduce_dtype) if g.dtype == jnp.float32 else g
  return (jax.lax.psum_scatter(sent, 'fsdp', scatter_dimension=axis, tiled=True).astype(g.dtype),)


_gather_fsdp.defvjp(lambda *args: (_gather_fsdp(*args), None), _gather_backward)


def param_rows(cfg: ModelConfig) -> dict[str, Param]:
  """Returns the rows of the parameter table that replace those of a dense MLP."""
  n, d, e, f = cfg.sparse_layers, cfg.hidden_size, cfg.experts.num, cfg.experts.size
  shared_f, inner = cfg.experts.shared_size or cfg.experts.shared * f, cfg.experts.latent or d

  def row(name, shape, axes, **options):
    return Param((n, *shape), ('layers', *axes), f'{LAYER}mlp.{name}', **options)

  def matrix(name, shape, axes, **options):
    return row(f'{name}.weight', shape, axes, matrix=True, **options)

  def bias(name, shape, axes, **options):
    return row(name, shape, axes, init='zeros', exact=True, **options)

  table = {
    'router': matrix('gate', (d, e), ('embed', None), exact=True),
    'gate': matrix('experts.{}.gate_proj', (e, inner, f), ('expert', 'embed', 'mlp')),
    'up': matrix('experts.{}.up_proj', (e, inner, f), ('expert', 'embed', 'mlp')),
    'down': matrix('experts.{}.down_proj', (e, f, inner), ('expert', 'mlp', 'embed')),
  }
  biases = {
    'router': bias('gate.bias', (e,), (None,)),
    'gate': bias('experts.{}.gate_proj.bias', (e, f), ('expert', 'mlp')),
    'up': bias('experts.{}.up_proj.bias', (e, f), ('expert', 'mlp')),
    'down': bias('experts.{}.down_proj.bias', (e, d), ('expert', None)),
  }
  table |= {f'{name}_bias': spec for name, spec in biases.items() if name in cfg.biases}
  if cfg.experts.choice_bias:
    table['router_choice'] = bias('gate.e_score_correction_bias', (e,), (None,), dtype='float32')
  if shared_f:
    table |= {
      f'{_SHARED}gate': matrix('shared_experts.gate_proj', (d, shared_f), ('embed', 'mlp')),
      f'{_SHARED}up': matrix('shared_experts.up_proj', (d, shared_f), ('embed', 'mlp')),
      f'{_SHARED}down': matrix('shared_experts.down_proj', (shared_f, d), ('mlp', 'embed')),
    }
  if cfg.experts.latent:
    table |= {
      'latent_in': matrix('fc1_latent_proj', (d, inner), ('embed', None)),
      'latent_out': matrix('fc2_latent_proj', (inner, d), (None, 'embed')),
    }
  if cfg.activation in layers.UNGATED:
    table = {name: spec for name, spec in table.items() if not name.endswith('gate')}
  if cfg.experts.shared_gate:
    table[f'{_SHARED}weight'] = matrix('shared_expert_gate', (d, 1), ('embed', None), exact=True)
  return {f'layers/{name}': spec for name, spec in table.items()}
