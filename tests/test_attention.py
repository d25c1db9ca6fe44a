"""Attention: each implementation against its definition, both ways; choice.

Legend: B rows, T tokens, H heads, K kv heads, h head size.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.matmul import Compute, compute_for
from jaxpost.models import attention, flash, scores

CLONE = pathlib.Path(__file__).parents[1]
# What a layer may have besides documents and groups of heads.
LAYERS = {
    'plain': {}, 'window': dict(window=40), 'cap': dict(cap=5.0),
    'sinks': dict(sinks=True), 'scale': dict(scale=0.3),
    'all': dict(window=150, cap=5.0, sinks=True)}
SHAPES = {  # T, H, K, h, hv
    'groups': (256, 4, 2, 64, 64), 'one_kv_head': (256, 3, 1, 64, 64),
    'odd_length': (200, 2, 2, 64, 64), 'latent': (256, 2, 2, 96, 64)}


def case(shape, *, window=0, cap=0.0, sinks=False, scale=0.0, branches=False):
  """Arrays of two packed rows, and what tells how to attend."""
  length, heads, kv_heads, size, values = shape
  random = np.random.RandomState(0)
  draw = lambda *shape: jnp.asarray(
      random.standard_normal((2, length, *shape)), jnp.float32)
  qkv = draw(heads, size), draw(kv_heads, size), draw(kv_heads, values)
  cuts = np.array([[0, 30, 31, length - 20], [0, 100, 140, length]])
  number = np.arange(length)
  found = np.stack([np.searchsorted(c, number, side='right') for c in cuts])
  at = number - np.take_along_axis(cuts, found - 1, 1)
  segments = np.where(number < length - 20, found, found % 4)
  cfg = tiny.config(
      num_heads=heads, num_kv_heads=kv_heads, head_dim=size,
      attention_softcap=cap, attention_scale=scale)
  branch = (np.where(at < 10, 0, 1 + at % 2) if branches else None)
  rest = dict(
      segment_ids=jnp.asarray(segments, jnp.int32), branch_ids=branch,
      positions=jnp.asarray(at, jnp.int32), window=window, cfg=cfg)
  sink = jnp.asarray(random.standard_normal(heads), jnp.float32)
  return (*qkv, sink if sinks else None), rest, draw(heads, values)


def both_ways(run, args, g):
  """(out, gradients by q, k, v and sinks), compiled."""
  given = [x for x in args if x is not None]

  def whole(given, g):
    out, back = jax.vjp(lambda *x: run(*x, *[None] * (4 - len(x))), *given)
    return out, back(g.astype(out.dtype))

  return jax.jit(whole)(given, g)


def close(ours, right, tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
    assert tiny.largest(a - b) <= tolerance * tiny.largest(b)


def plain(name, rest, compute=tiny.EXACT):
  compute = dataclasses.replace(compute, attention=name)

  def run(q, k, v, sinks):
    return attention.attention(q, k, v, compute=compute, sinks=sinks, **rest)

  return run


def interpreted(rest):
  """Splash, as a TPU would do it, in float32."""
  def run(q, k, v, sinks):
    return flash.splash(
        scores.scaled(q, rest['cfg']), k, v, rest['segment_ids'], None, sinks,
        window=rest['window'], cfg=rest['cfg'], compute=tiny.EXACT,
        interpret=True)
  return run


@functools.cache
def right(shape, layer, branches=False):
  args, rest, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  return both_ways(plain('reference', rest), args, g)


def by_hand(args, rest):
  """[B, T, H, hv] in numpy: one query at a time."""
  q, k, v, sinks = (None if x is None else np.asarray(x, float) for x in args)
  cfg, out = rest['cfg'], np.zeros((*q.shape[:3], v.shape[-1]))
  segments, at = np.asarray(rest['segment_ids']), np.asarray(rest['positions'])
  scale = cfg.attention_scale or q.shape[3] ** -0.5
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]
            and at[b, t] - at[b, s] < (rest['window'] or 10**6)
            and (rest['branch_ids'] is None or rest['branch_ids'][b, s] in (
                0, rest['branch_ids'][b, t]))]
    head = n // (q.shape[2] // k.shape[2])
    score = scale * k[b, seen, head] @ q[b, t, n]
    if cfg.attention_softcap:
      score = cfg.attention_softcap * np.tanh(score / cfg.attention_softcap)
    weight = np.exp(score)
    total = weight.sum() + (0 if sinks is None else np.exp(sinks[n]))
    out[b, t, n] = weight @ v[b, seen, head] / total
  return out


@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('branches', [False, True])
def test_the_reference_is_the_definition(layer, branches):
  args, rest, _ = case((50, 4, 2, 8, 6), branches=branches, **LAYERS[layer])
  right = by_hand(args, rest)
  out = plain('reference', rest)(*args)
  assert tiny.largest(out - right) <= 1e-5 * tiny.largest(right)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('branches', [False, True])
def test_chunks_are_the_reference(shape, layer, branches):
  args, rest, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  close(both_ways(plain('chunked', rest), args, g),
        right(shape, layer, branches), 1e-5)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('layer', LAYERS)
def test_splash_is_the_reference(shape, layer):
  args, rest, g = case(SHAPES[shape], **LAYERS[layer])
  close(both_ways(interpreted(rest), args, g), right(shape, layer), 1e-5)
