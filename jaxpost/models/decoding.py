"""The sampler's passes: `prefill` makes a key-value cache, `decode` adds a token to each slot.

Legend: B rows, T tokens, D hidden size, L layers, H heads, K kv heads, h head size, S slots, N entries of a slot.

Both passes run the layers of `transformer.py`; `decode` attends over the cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum, from_bits
from jaxpost.models import layers, rope, transformer
from jaxpost.models.attention_xla import PackedRows, scale_queries, softcap, softmax
from jaxpost.models.config import ModelConfig
from jaxpost.models.parameters import STATEFUL
from jaxpost.models.transformer import unconstrained
from jaxpost.types import MASKED_LOGIT, Cache


def prefill(
  params: dict,
  tokens: jax.Array,
  lengths: jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  constrain: Callable = unconstrained,
) -> tuple[Cache, jax.Array]:
  """Right-padded prompts [B, T] -> (Cache of length T, last hidden [B, D])."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  x = constrain(transformer.embed(params, tokens, cfg, compute, constrain), 'batch', None, None)
  params = transformer.with_inputs(params, tokens, x, cfg, compute=compute, layout=constrain)
  rows = PackedRows(segment_ids, positions)

  def attend(q, k, v, cache_entries, window, sinks):
    if jnp.dtype(compute.cache).itemsize == 1:  # rounded as in the cache, which later tokens attend to
      k, v = (to_cache_type(y, compute).dense(y.dtype) for y in (k, v))
    out = layers.attention(q, k, v, rows, window, cfg=cfg, compute=compute, sinks=sinks, layout=constrain)
    return out, [to_cache_type(y.swapaxes(1, 2), compute) for y in cache_entries]

  tables = rope.tables(positions, lengths[:, None], cfg)
  recur = transformer.recurrence_over(rows, cfg, compute, constrain, keep=True)
  x, kept, routes = transformer.run_layers(
    params, x, tables, attend, cfg, compute=compute, constrain=constrain, recur=recur
  )
  last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
  experts: tuple = ()
  if routes is not None:
    from jaxpost.models import routing

    experts = routing.record(routes, cfg)
  states = tuple(tuple(state) for state, stack in zip(kept, cfg.layer_stacks) if stack in STATEFUL)
  # A layer that attends to the keys and values of another one has no entries.
  entries = [entry for entry, stack in zip(kept, cfg.layer_stacks) if stack not in STATEFUL and entry]
  keys = tuple(entry[0] for entry in entries)
  values = tuple(entry[1] for entry in entries if len(entry) > 1)  # latent attention has one array for both
  return Cache(keys, values, experts=experts, states=states), last


def decode(
  weights: dict,
  cache: Cache,
  recent: Cache,
  tokens: jax.Array,
  filled: jax.Array,
  step: int | jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  constrain: Callable = unconstrained,
) -> tuple[Cache, jax.Array]:
  """Decodes one token per slot.

  XLA would copy a cache that is written at every token, so the cache is only read during a block of T tokens. New
  entries are in `recent` until the block ends (`programs.cache_storage.append`).

  Args:
    weights: with a list of layers (`unstack_layers`), each its parameters or a function of its input that returns them.
    cache: L x [S, K, N, h], or pages and a table; the first `filled` [S] entries are valid.
    recent: a Cache with L x [S, K, T, h], of which the first `step` are valid, and the current recurrent states.
    tokens: [S], at positions filled + step; or [S, T'], consecutive tokens that begin there.

  Returns:
    (recent with the new entries, hidden [S, D] or [S, T', D]).
  """
  rows = tokens.reshape(len(tokens), -1)
  x = transformer.embed(weights, rows, cfg, compute, constrain)
  weights = transformer.with_inputs(weights, rows, x, cfg, compute=compute, layout=constrain)
  positions = (filled + step)[:, None] + jnp.arange(rows.shape[1])
  tables = rope.tables(positions, positions + 1, cfg)
  ks, vs, experts, states = list(recent.k), list(recent.v), list(recent.experts), list(recent.states)
  kernel = compute.decode_kernel if tokens.ndim == 1 else ''
  if kernel == 'triton':
    from jaxpost.models import decode_triton

  same = dict(ks=ks, vs=vs, cache=cache, filled=filled, step=step)
  attend = functools.partial(_attend, **same, cfg=cfg, compute=compute, layout=constrain, kernel=kernel)
  run_layer = functools.partial(transformer.layer, compute=compute, layout=constrain, absorbed=True)
  for i, (p, kind) in enumerate(zip(weights['layers'], cfg.layer_kinds)):
    p = p(x) if callable(p) else p
    place = cfg.place_in_cache(i)
    layer_cfg, table, kernel_table, recur = cfg, rope.pick(tables, kind.rope), None, None
    if kernel == 'triton' and decode_triton.rotates(cfg, table, constrain):
      # The layer leaves its projections as they are.
      layer_cfg, table, kernel_table = dataclasses.replace(cfg, qk_norm=''), None, table
    attend_layer = functools.partial(attend, layer=place, window=kind.window, p=p, rope_table=kernel_table)
    if cfg.layer_stacks[i] in STATEFUL:
      from jaxpost.models import hybrid

      recur = hybrid.over_state(cfg, states, place, compute, constrain)
    x, _, routing = run_layer(p, x, table, attend_layer, layer_cfg, recur=recur)
    x = constrain(x, 'batch', None, None)
    record = cfg.place_of_experts(i)
    if experts and routing and record is not None:
      experts[record] = _put(experts[record], routing.chosen[:, None].astype(experts[record].dtype), step)
  x = layers.rms_norm(x, weights['norm'], cfg)
  return Cache(tuple(ks), tuple(vs), experts=tuple(experts), states=tuple(states)), x.reshape(*tokens.shape, -1)


def _attend(
  q, k, v, cache_entries, *, ks, vs, cache, layer, p, rope_table, compute: Compute, layout: Any, kernel: str, **options
) -> tuple[jax.Array, None]:
  """Adds the entries of a layer to `ks` and `vs`, and attends to them and to the cache.

  Args:
    p: parameters of the layer.
    rope_table: by which a kernel rotates the projections q, k and v, or None.
    kernel: of `decode_kernels.py`, or ''.
    options: other arguments of `cached_attention`.
  """
  step, cfg = options['step'], options['cfg']
  if rope_table:
    from jaxpost.models import decode_triton

    entries = (ks[layer], vs[layer]), step
    q, ks[layer], vs[layer] = decode_triton.rotate_and_write(q, k, v, *entries, p=p, table=rope_table, cfg=cfg)
  else:
    for recent_entries, new in zip((ks, vs), cache_entries):
      recent_entries[layer] = _put(recent_entries[layer], to_cache_type(new.swapaxes(1, 2), compute), step)
  recent = [ks[layer], *vs[layer : layer + 1]]
  options['sinks'] = p.get('sinks')
  if kernel:
    from jaxpost.models import decode_kernels

    entries = [from_bits(pool[layer]) for pool in (cache.k, cache.v)]
    out = decode_kernels.cached_attention(
      q, entries, recent, kernel=kernel, table=cache.table, layout=layout, **options
    )
    return out, None
  cached = layer_entries(cache, layer, step)
  if 'kv_a' in p:
    from jaxpost.models import mla

    q, cached, recent, options['choose'] = mla.from_cache(q, cached, recent, cfg, compute)
  return cached_attention(q, cached, recent, compute=compute, **options), None


def _put(entries: Any, new: Any, step: int | jax.Array) -> Any:
  """Returns entries [S, K, T, h] with those of one step, or of several that begin there."""
  return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, step, axis=2), entries, new)


def to_cache_type(x: jax.Array, compute: Compute) -> Any:
  """Returns keys or values [..., h] as the cache keeps them."""
  if jnp.dtype(compute.cache).itemsize > 1:
    return x.astype(compute.dtype).astype(compute.cache)
  from jaxpost.models import scaled

  return scaled.encode(x, compute.cache, (-1,), compute.dtype)  # a scale for each token and head


def layer_entries(cache: Cache, layer: int, step: int | jax.Array) -> list[jax.Array]:
  """Returns keys and values of a layer, [S, K, N, h], gathered from pages if any.

  Pages are gathered at every step, behind a barrier: gathered once for a block of steps, they would take the memory
  that paging saves.
  """
  keys_and_values = [pool[layer] for pool in (cache.k, cache.v) if pool]
  table = cache.table
  if table is None:
    return keys_and_values
  table, _ = jax.lax.optimization_barrier((table, step))

  def gather(pool):
    pages = pool[table].swapaxes(1, 2)  # [S, K, n, p, h]
    return from_bits(pages.reshape(*pages.shape[:2], -1, pages.shape[-1]))

  return [jax.tree.map(gather, pool) for pool in keys_and_values]


def _product(spec: str, x: jax.Array, entries: jax.Array, compute: Compute) -> jax.Array:
  """Returns einsum(spec, x, entries), of x [S, K, g, .] and the entries [S, K, N, h] of a layer."""
  dtype = entries.dtype.name  # its values are rounded to the operand type, see Compute
  if compute.platform == 'cpu' and dtype == 'float32' and 1 < x.shape[2] <= 4:
    # For such few rows of x and a large N, XLA:CPU is 1.5 to 3 times faster with one product for each row.
    rows = [einsum(spec.replace('g', ''), x[:, :, i], entries, dtype) for i in range(x.shape[2])]
    return jnp.stack(rows, axis=2)
  return einsum(spec, x, entries, dtype)


def cached_attention(
  q: jax.Array,
  cache: Sequence,
  recent: Sequence,
  filled: jax.Array,
  step: int | jax.Array,
  compute: Compute,
  window: int,
  cfg: ModelConfig,
  sinks: jax.Array | None = None,
  choose: Callable | None = None,
) -> jax.Array:
  """Attends from new tokens to the filled part of the KV cache.

  Args:
    q: [S, T', H, h], of one token per slot or of several consecutive ones.
    cache: keys and values [S, K, N, h], of which the first `filled` [S] are valid.
    recent: keys and values [S, K, T, h] of the tokens after those. The first query is the token at `step` of them; each
      query attends to the tokens up to itself.
    window, cfg, sinks: see `layers.attention`.
    choose: (mask [S, T', N + T]) -> mask without the entries that an indexer excludes, or None.

  Returns:
    [S, T', H, h].
  """
  slots, count, heads, size = q.shape
  kv_heads, room = cache[0].shape[1:3]
  q = scale_queries(q, cfg).astype(compute.dtype)
  q = q.reshape(slots, count, kv_heads, heads // kv_heads, size).swapaxes(1, 2)
  q = q.reshape(slots, kv_heads, -1, size)  # one axis: queries by time, then by head of a group
  # XLA:GPU would merge two products of the same q into one, and copy the cache at every token.
  pairs = (q, cache[0]), (jax.lax.optimization_barrier(q), recent[0])
  scores = jnp.concatenate([_product('bkgh,bksh->bkgs', q, keys, compute) for q, keys in pairs], axis=-1)
  merged = scores.shape
  scores = scores.reshape(slots, kv_heads, count, -1, merged[-1])
  entry, new = jnp.arange(room), jnp.arange(recent[0].shape[2])
  query_offset = step + jnp.arange(count)[:, None]  # in `recent`
  is_filled = jnp.broadcast_to(entry < filled[:, None, None], (slots, count, room))
  is_before = jnp.broadcast_to(new <= query_offset, (slots, count, len(new)))
  mask = jnp.concatenate([is_filled, is_before], axis=-1)
  if window:
    key_position = jnp.concatenate([jnp.broadcast_to(entry, (slots, room)), filled[:, None] + new], -1)
    query_position = filled[:, None, None] + query_offset
    first_visible = query_position - (query_position % window if cfg.chunked else window - 1)
    mask &= key_position[:, None] >= first_visible
  mask = choose(mask) if choose else mask
  scores = jnp.where(mask[:, None, :, None], softcap(scores, cfg), MASKED_LOGIT)
  weights = softmax(scores, sinks if sinks is None else sinks.reshape(kv_heads, 1, -1, 1))
  cache_weights, recent_weights = jnp.split(weights.reshape(merged).astype(compute.dtype), [room], axis=-1)
  out = _product('bkgs,bksh->bkgh', cache_weights, cache[1], compute)
  out += _product('bkgs,bksh->bkgh', recent_weights, recent[1], compute)
  out = out.reshape(slots, kv_heads, count, -1, out.shape[-1]).swapaxes(1, 2)
  return out.reshape(slots, count, heads, -1)
