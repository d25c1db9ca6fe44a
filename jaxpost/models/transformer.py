"""The decoder: one parameter table, one block, three ways through it.

Legend: B rows, T tokens, D hidden size, V padded vocabulary, L layers,
H heads, K kv heads, h head size, F MLP size, S slots.

`forward` reads packed rows (training, scoring), `prefill` also returns what
a cache needs, `decode` adds one token to each slot. All three run the same
`_block`; they differ in what attends to what.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute
from jaxpost.models import attention
from jaxpost.models import layers
from jaxpost.models import rope
from jaxpost.models.config import ModelConfig
from jaxpost.types import Cache


@dataclasses.dataclass(frozen=True)
class Param:
  """One row of the parameter table.

  axes: logical name of each dimension; 'layers' comes first where stacked.
  hf: name in a Llama folder, with {} for the layer; `stored.py` has others.
  matrix: an operand of matrix products, stored transposed by HF ([out, in]).
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  hf: str
  init: str = 'normal'  # normal | ones | zeros
  matrix: bool = False

  @property
  def stacked(self) -> bool:
    return self.axes[0] == 'layers'

  @property
  def vector(self) -> bool:
    """A norm scale or a bias: never rounded."""
    return len(self.axes) - self.stacked == 1


def param_table(cfg: ModelConfig) -> dict[str, Param]:
  """Path -> parameter: drives init, sharding, HF import, export and counts."""
  d, f, n, size = (
      cfg.hidden_size, cfg.intermediate_size, cfg.num_layers, cfg.head_dim)
  h, k = cfg.num_heads, cfg.num_kv_heads
  block = 'model.layers.{}.'

  def stacked(shape, axes, hf):
    return Param((n, *shape), ('layers', *axes), f'{block}{hf}.weight',
                 matrix=True)

  def vector(size, hf, init):
    return Param((n, size), ('layers', None), block + hf, init)

  scale = 'zeros' if cfg.norm_offset else 'ones'
  norm = lambda hf: vector(d, f'{hf}_layernorm.weight', scale)

  table = {
      'embed': Param((cfg.padded_vocab_size, d), ('vocab', 'embed'),
                     'model.embed_tokens.weight'),
      'layers/attention_norm': norm('input'),
      'layers/q': stacked((d, h, size), ('embed', 'heads', None),
                          'self_attn.q_proj'),
      'layers/k': stacked((d, k, size), ('embed', 'kv_heads', None),
                          'self_attn.k_proj'),
      'layers/v': stacked((d, k, size), ('embed', 'kv_heads', None),
                          'self_attn.v_proj'),
      'layers/o': stacked((h, size, d), ('heads', None, 'embed'),
                          'self_attn.o_proj'),
      'layers/mlp_norm': norm(
          'pre_feedforward' if cfg.norms == 'both' else 'post_attention'),
      'layers/gate': stacked((d, f), ('embed', 'mlp'), 'mlp.gate_proj'),
      'layers/up': stacked((d, f), ('embed', 'mlp'), 'mlp.up_proj'),
      'layers/down': stacked((f, d), ('mlp', 'embed'), 'mlp.down_proj'),
      'norm': Param((d,), (None,), 'model.norm.weight', scale),
      'layers/attention_post_norm': norm('post_attention'),
      'layers/mlp_post_norm': norm('post_feedforward'),
  }
  gone = {'pre': 'post_norm', 'post': ('attention_norm', 'mlp_norm')}
  if cfg.norms != 'both':
    table = {k: v for k, v in table.items() if not k.endswith(gone[cfg.norms])}
  for name, heads in (('q', h), ('k', k)) if cfg.qk_norm else ():
    width = size * (heads if cfg.qk_norm == 'wide' else 1)
    table[f'layers/{name}_norm'] = vector(
        width, f'self_attn.{name}_norm.weight', scale)
  widths = dict(q=h * size, k=k * size, v=k * size, o=d, gate=f, up=f, down=d)
  for name in cfg.biases:
    hf = table[f'layers/{name}'].hf.removeprefix(block)
    table[f'layers/{name}_bias'] = vector(
        widths[name], hf.replace('.weight', '.bias'), 'zeros')
  if cfg.num_labels or cfg.value_head:
    # Zeros: what was not trained yet judges all texts alike.
    table['score'] = Param(
        (d, 1), ('embed', None), 'score.weight', 'zeros', matrix=True)
  if not cfg.num_labels and not cfg.tie_embeddings:
    table['head'] = Param((cfg.padded_vocab_size, d), ('vocab', 'embed'),
                          'lm_head.weight')
  return table


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


def leaf(tree: dict, path: str):
  for name in path.split('/'):
    tree = tree[name]
  return tree


def join(one: dict, two: dict) -> dict:
  """The leaves of two trees in one; where both have one, that of the second."""
  both = [k for k, v in two.items() if k in one and isinstance(v, dict)]
  return one | two | {k: join(one[k], two[k]) for k in both}


def init(key, cfg: ModelConfig, dtype=jnp.float32) -> dict:
  """Random parameters: normal(initializer_range), padding rows zero."""
  flat = {}
  for i, (path, spec) in enumerate(param_table(cfg).items()):
    if spec.init in ('ones', 'zeros'):
      value = jnp.full(spec.shape, spec.init == 'ones', dtype)
    else:
      value = cfg.initializer_range * jax.random.normal(
          jax.random.fold_in(key, i), spec.shape, dtype)
    if spec.axes[0] == 'vocab':
      value = value.at[cfg.vocab_size:].set(0)
    flat[path] = value
  return nest(flat)


def head(params) -> jax.Array:
  """[V, D] output embedding; the input embedding where they are tied."""
  return params['head'] if 'head' in params else params['embed']


def values(params, hidden) -> jax.Array:
  """[B, T, D] -> [B, T] float32: the scalar head, never rounded."""
  return jnp.einsum('btd,dn->btn', hidden.astype(jnp.float32),
                    params['score'], precision=jax.lax.Precision.HIGHEST
                    )[..., 0]


def num_params(cfg: ModelConfig) -> int:
  return sum(math.prod(p.shape) for p in param_table(cfg).values())


def flops_per_token(cfg: ModelConfig, context: float) -> float:
  """Forward FLOPs of one token that sees `context` tokens (causal: half T)."""
  embedding = cfg.padded_vocab_size * cfg.hidden_size
  matrices = num_params(cfg) - (0 if cfg.tie_embeddings else embedding)
  seen = sum(min(context, k.window or context) for k in layer_kinds(cfg))
  return 2 * matrices + 4 * cfg.num_heads * cfg.head_dim * seen


@jax.custom_vjp
def _unstack(x):
  """[L, ...] -> L arrays; its transpose is one stack, not L padded sums."""
  return tuple(x)


_unstack.defvjp(lambda x: (tuple(x), None), lambda _, g: (jnp.stack(g),))


def unstack_layers(params: dict, num_layers: int) -> dict:
  """Parameters with a list of layers in place of the stacked dict."""
  leaves, tree = jax.tree.flatten(params['layers'])
  rows = zip(*map(_unstack, leaves), strict=True)
  return {**params, 'layers': [tree.unflatten(row) for row in rows]}


class Kind(NamedTuple):
  """How a layer differs from others: indices, or arrays under a scan."""

  rope: int | jax.Array  # index of its table, -1 for none
  window: int | jax.Array  # tokens it sees, 0 for all


def layer_kinds(cfg: ModelConfig) -> list[Kind]:
  zeros = (0,) * cfg.num_layers
  return [Kind(*x) for x in zip(
      cfg.layer_ropes or zeros, cfg.layer_windows or zeros)]


def _block(p, x, table, attend: Callable, cfg: ModelConfig, compute: Compute):
  """[B, T, D] -> ([B, T, D], whatever `attend` keeps)."""
  norm = lambda x, name: layers.rms_norm(x, p[name], cfg) if name in p else x
  y = norm(x, 'attention_norm')
  q, k, v = layers.project_all('btd,dnh->btnh', y, p, 'qkv', compute)
  if cfg.qk_norm:
    q = layers.norm_heads(q, p['q_norm'], cfg)
    k = layers.norm_heads(k, p['k_norm'], cfg)
  q, k = rope.rotate(q, table, cfg), rope.rotate(k, table, cfg)
  out, kept = attend(q, k, v)
  out = layers.project('btnh,nhd->btd', out, p, 'o', compute)
  x = _add(x, norm(out, 'attention_post_norm'), cfg)
  out = layers.mlp(p, norm(x, 'mlp_norm'), cfg, compute)
  return _add(x, norm(out, 'mlp_post_norm'), cfg), kept


def _add(x, out, cfg):
  """The residual stream with what attention or the MLP adds to it."""
  if cfg.residual_scale != 1:
    out = out * cfg.residual_scale
  return x + out.astype(x.dtype)


_REMAT = {
    'none': lambda block: block,
    'dots': lambda block: jax.checkpoint(
        block, policy=jax.checkpoint_policies.dots_saveable),
    'full': jax.checkpoint,
}


def _run(params, x, tables, attend, cfg, compute, constrain):
  """Embedded tokens through all layers; returns (normed x, kept per layer).

  Args:
    tables: of `rope.tables`; attend: (q, k, v, window) -> (out, kept).
  """
  def block(p, x, kind):
    x, kept = _block(p, x, rope.pick(tables, kind.rope),
                     lambda *qkv: attend(*qkv, kind.window), cfg, compute)
    return constrain(x, 'batch', None, None), kept

  @functools.cache  # a checkpoint is traced once for each kind
  def alike(kind):
    return _REMAT[compute.remat](functools.partial(block, kind=kind))

  kinds = layer_kinds(cfg)
  split = isinstance(params['layers'], list)  # a sampler's weights
  if compute.unroll or split:
    kept = []
    if not split:
      params = unstack_layers(params, cfg.num_layers)
    for p, kind in zip(params['layers'], kinds):
      x, kept_l = alike(kind)(p, x)
      kept.append(kept_l)
    return layers.rms_norm(x, params['norm'], cfg), kept
  # What all layers share stays a number, which attention can make use of.
  varied = {name: jnp.array([getattr(k, name) for k in kinds])
            for name in Kind._fields if len({getattr(k, name) for k in kinds}
                                            ) > 1}
  if varied:
    vary = _REMAT[compute.remat](lambda p, x, varied: block(
        p, x, kinds[0]._replace(**varied)))
    x, kept = jax.lax.scan(
        lambda x, xs: vary(xs[0], x, xs[1]), x, (params['layers'], varied))
  else:
    x, kept = jax.lax.scan(
        lambda x, p: alike(kinds[0])(p, x), x, params['layers'])
  kept = kept and [[y[i] for y in kept] for i in range(cfg.num_layers)]
  return layers.rms_norm(x, params['norm'], cfg), kept


def _embed(params, tokens, cfg, compute, constrain, noise=None):
  x = layers.embed(params['embed'], tokens, compute.dtype, constrain)
  if cfg.embed_scale != 1:
    x = x * jnp.asarray(cfg.embed_scale, compute.dtype)  # rounded, as in HF
  x = x.astype(compute.residual)
  return x if noise is None else (x + noise).astype(x.dtype)


def _unconstrained(x, *axes):
  del axes
  return x


def forward(params, tokens, positions, segment_ids, cfg: ModelConfig,
            compute: Compute, constrain=_unconstrained, branch_ids=None,
            noise=None):
  """Packed rows [B, T] -> final hidden states [B, T, D].

  `constrain(x, *axes)` pins activations at layer boundaries (`Layout`);
  `noise` [B, T, D] is added to the embeddings.
  """
  x = _embed(params, tokens, cfg, compute, constrain, noise)
  x = constrain(x, 'batch', None, None)
  lengths = None
  if rope.by_length(cfg):
    lengths = document_lengths(positions, segment_ids)

  def attend(q, k, v, window):
    return attention.causal(
        q, k, v, segment_ids, compute, branch_ids, positions, window, cfg
    ), None

  x, _ = _run(params, x, rope.tables(positions, lengths, cfg), attend, cfg,
              compute, constrain)
  return x


def document_lengths(positions, segment_ids):
  """[B, T] of the last position of each token's document, plus 1."""
  def row(positions, segments):
    most = jax.ops.segment_max(positions, segments, positions.shape[0] + 1)
    return most[segments] + 1
  return jax.vmap(row)(positions, segment_ids)


def prefill(params, tokens, lengths, cfg: ModelConfig, compute: Compute,
            constrain=_unconstrained):
  """Right-padded prompts [B, T] -> (Cache of length T, last hidden [B, D])."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  x = constrain(_embed(params, tokens, cfg, compute, constrain),
                'batch', None, None)

  def attend(q, k, v, window):
    out = attention.causal(q, k, v, segment_ids, compute, None, positions,
                           window, cfg)
    pair = [y.swapaxes(1, 2).astype(compute.dtype).astype(compute.cache)
            for y in (k, v)]
    return out, pair

  tables = rope.tables(positions, lengths[:, None], cfg)
  x, kept = _run(params, x, tables, attend, cfg, compute, constrain)
  last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
  return Cache(tuple(k for k, _ in kept), tuple(v for _, v in kept)), last


def decode(weights, cache: Cache, tokens, positions, cfg: ModelConfig,
           compute: Compute, read: int, constrain=_unconstrained):
  """One token per slot: ([S], [S]) -> (cache with it, hidden [S, D]).

  Args:
    weights: parameters with a list of layers (`unstack_layers`).
    tokens: [S], written at `positions` [S] of the cache.
    read: entries of the cache that attention looks at; all positions < read.
  """
  x = _embed(weights, tokens[:, None], cfg, compute, constrain)
  tables = rope.tables(positions[:, None], positions[:, None] + 1, cfg)
  ks, vs = list(cache.k), list(cache.v)
  for i, (p, kind) in enumerate(zip(weights['layers'], layer_kinds(cfg))):

    def attend(q, k, v, i=i, window=kind.window):
      k, v = k.astype(compute.dtype), v.astype(compute.dtype)
      ks[i] = write_rows(ks[i], k[:, 0], positions, compute.row_writes)
      vs[i] = write_rows(vs[i], v[:, 0], positions, compute.row_writes)
      out = attention.cached(
          q, ks[i][:, :, :read], vs[i][:, :, :read], positions + 1, compute,
          window, cfg)
      return out, None

    x, _ = _block(p, x, rope.pick(tables, kind.rope), attend, cfg, compute)
    x = constrain(x, 'batch', None, None)
  x = layers.rms_norm(x, weights['norm'], cfg)
  return Cache(tuple(ks), tuple(vs)), x[:, 0]


def write_rows(cache, rows, positions, one_by_one: bool = True):
  """cache[s, :, positions[s]] = rows[s]; cache [S, K, length, h], in place.

  A position past the end writes the last entry of its own slot: only slots
  that are done get there.
  """
  rows = rows.astype(cache.dtype)[:, :, None]
  positions = jnp.asarray(positions)
  if not one_by_one:
    return jax.vmap(
        lambda c, r, at: jax.lax.dynamic_update_slice(c, r, (0, at, 0)))(
            cache, rows, positions)

  def write(s, cache):  # XLA:CPU's scatter copies
    return jax.lax.dynamic_update_slice(
        cache, jax.lax.dynamic_slice_in_dim(rows, s, 1),
        (s, 0, positions[s], 0))

  return jax.lax.fori_loop(0, cache.shape[0], write, cache)
