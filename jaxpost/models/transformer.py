"""The decoder: one parameter table, one block, three ways through it.

Legend: B rows, T tokens, D hidden size, V padded vocabulary, L layers,
H heads, K kv heads, h head size, F MLP size, S slots.

`forward` reads packed rows (training, scoring), `prefill` also returns what
a cache needs, `decode` adds one token to each slot. All three run the same
`_block`; they differ in what attends to what.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute
from jaxpost.matmul import einsum
from jaxpost.models import attention
from jaxpost.models import layers
from jaxpost.models.config import ModelConfig
from jaxpost.types import Cache


@dataclasses.dataclass(frozen=True)
class Param:
  """One row of the parameter table.

  axes: logical name of each dimension; 'layers' comes first where stacked.
  hf: name in a Hugging Face folder, with {} for the layer.
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


def param_table(cfg: ModelConfig) -> dict[str, Param]:
  """Path -> parameter: drives init, sharding, HF import, export and counts."""
  d, f, n, size = (
      cfg.hidden_size, cfg.intermediate_size, cfg.num_layers, cfg.head_dim)
  h, k = cfg.num_heads, cfg.num_kv_heads
  block = 'model.layers.{}.'

  def stacked(shape, axes, hf, init='normal'):
    return Param((n, *shape), ('layers', *axes), f'{block}{hf}.weight', init,
                 matrix=init == 'normal')

  table = {
      'embed': Param((cfg.padded_vocab_size, d), ('vocab', 'embed'),
                     'model.embed_tokens.weight'),
      'layers/attention_norm': stacked((d,), (None,), 'input_layernorm',
                                       'ones'),
      'layers/q': stacked((d, h, size), ('embed', 'heads', None),
                          'self_attn.q_proj'),
      'layers/k': stacked((d, k, size), ('embed', 'kv_heads', None),
                          'self_attn.k_proj'),
      'layers/v': stacked((d, k, size), ('embed', 'kv_heads', None),
                          'self_attn.v_proj'),
      'layers/o': stacked((h, size, d), ('heads', None, 'embed'),
                          'self_attn.o_proj'),
      'layers/mlp_norm': stacked((d,), (None,), 'post_attention_layernorm',
                                 'ones'),
      'layers/gate': stacked((d, f), ('embed', 'mlp'), 'mlp.gate_proj'),
      'layers/up': stacked((d, f), ('embed', 'mlp'), 'mlp.up_proj'),
      'layers/down': stacked((f, d), ('mlp', 'embed'), 'mlp.down_proj'),
      'norm': Param((d,), (None,), 'model.norm.weight', 'ones'),
  }
  if cfg.qk_norm:
    table |= {
        'layers/q_norm': stacked((size,), (None,), 'self_attn.q_norm', 'ones'),
        'layers/k_norm': stacked((size,), (None,), 'self_attn.k_norm', 'ones'),
    }
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
  return 2 * matrices + 4 * cfg.num_layers * cfg.num_heads * (
      cfg.head_dim * context)


@jax.custom_vjp
def _unstack(x):
  """[L, ...] -> L arrays; its transpose is one stack, not L padded sums."""
  return tuple(x)


_unstack.defvjp(lambda x: (tuple(x), None), lambda _, g: (jnp.stack(g),))


def unstack_layers(params: dict, num_layers: int) -> dict:
  """Parameters with a list of layers in place of the stacked dict."""
  leaves = {name: _unstack(x) for name, x in params['layers'].items()}
  return {**params, 'layers': [
      {name: leaf[i] for name, leaf in leaves.items()}
      for i in range(num_layers)]}


def _block(p, x, table, attend: Callable, cfg: ModelConfig, compute: Compute):
  """[B, T, D] -> ([B, T, D], whatever `attend` keeps)."""
  y = layers.rms_norm(x, p['attention_norm'], cfg.norm_eps)
  q = einsum('btd,dnh->btnh', y, p['q'], compute.dtype)
  k = einsum('btd,dnh->btnh', y, p['k'], compute.dtype)
  v = einsum('btd,dnh->btnh', y, p['v'], compute.dtype)
  if cfg.qk_norm:
    q = layers.rms_norm(q, p['q_norm'], cfg.norm_eps)
    k = layers.rms_norm(k, p['k_norm'], cfg.norm_eps)
  q, k = layers.rope(q, table), layers.rope(k, table)
  out, kept = attend(q, k, v)
  out = einsum('btnh,nhd->btd', out, p['o'], compute.dtype)
  x = x + out.astype(x.dtype)
  y = layers.rms_norm(x, p['mlp_norm'], cfg.norm_eps)
  return x + layers.mlp(p, y, compute).astype(x.dtype), kept


_REMAT = {
    'none': lambda block: block,
    'dots': lambda block: jax.checkpoint(
        block, policy=jax.checkpoint_policies.dots_saveable),
    'full': jax.checkpoint,
}


def _run(params, x, positions, attend, cfg, compute, constrain):
  """Embedded tokens through all layers; returns (normed x, kept per layer)."""
  table = layers.rope_table(positions, cfg)

  def block(p, x):
    x, kept = _block(p, x, table, attend, cfg, compute)
    return constrain(x, 'batch', None, None), kept

  block = _REMAT[compute.remat](block)
  split = isinstance(params['layers'], list)  # a sampler's weights
  if compute.unroll or split:
    kept = []
    if not split:
      params = unstack_layers(params, cfg.num_layers)
    for p in params['layers']:
      x, kept_l = block(p, x)
      kept.append(kept_l)
  else:
    x, kept = jax.lax.scan(lambda x, p: block(p, x), x, params['layers'])
    kept = kept and [[y[i] for y in kept] for i in range(cfg.num_layers)]
  return layers.rms_norm(x, params['norm'], cfg.norm_eps), kept


def _embed(params, tokens, compute, constrain, noise=None):
  # Whole rows: from rows split over fsdp XLA would replicate the activations
  # of the global batch.
  x = constrain(params['embed'], 'vocab', None)[tokens]
  # Rounded as the sampler's copy of the weights is: both see one embedding.
  x = x.astype(compute.dtype).astype(compute.residual)
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
  x = _embed(params, tokens, compute, constrain, noise)
  x = constrain(x, 'batch', None, None)

  def attend(q, k, v):
    return attention.causal(
        q, k, v, segment_ids, compute, branch_ids), None

  x, _ = _run(params, x, positions, attend, cfg, compute, constrain)
  return x


def prefill(params, tokens, lengths, cfg: ModelConfig, compute: Compute,
            constrain=_unconstrained):
  """Right-padded prompts [B, T] -> (Cache of length T, last hidden [B, D])."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  x = constrain(_embed(params, tokens, compute, constrain), 'batch', None, None)

  def attend(q, k, v):
    out = attention.causal(q, k, v, segment_ids, compute)
    pair = [y.swapaxes(1, 2).astype(compute.dtype).astype(compute.cache)
            for y in (k, v)]
    return out, pair

  x, kept = _run(params, x, positions, attend, cfg, compute, constrain)
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
  x = _embed(weights, tokens[:, None], compute, constrain)
  table = layers.rope_table(positions[:, None], cfg)
  ks, vs = list(cache.k), list(cache.v)
  for i, p in enumerate(weights['layers']):

    def attend(q, k, v, i=i):
      k, v = k.astype(compute.dtype), v.astype(compute.dtype)
      ks[i] = write_rows(ks[i], k[:, 0], positions, compute.row_writes)
      vs[i] = write_rows(vs[i], v[:, 0], positions, compute.row_writes)
      out = attention.cached(
          q, ks[i][:, :, :read], vs[i][:, :, :read], positions + 1, compute)
      return out, None

    x, _ = _block(p, x, table, attend, cfg, compute)
    x = constrain(x, 'batch', None, None)
  x = layers.rms_norm(x, weights['norm'], cfg.norm_eps)
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
