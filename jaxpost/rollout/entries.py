"""Host arrays that the programs `insert` and `extend` take, one entry per slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.programs.extend import More
from jaxpost.programs.generate import Entry
from jaxpost.rollout import sampler_config
from jaxpost.rollout.buckets import bucket
from jaxpost.rollout.kv_cache import PageCopy

if TYPE_CHECKING:
  from jaxpost.rollout.native import NativeEngine

CHUNK = 32  # tokens by which a cached prefix is extended at a time


def make_entry(
  engine: NativeEngine, sequences: dict[int, Any], rows: dict[int, int], copies: Sequence[PageCopy] = ()
) -> Entry:
  """The argument of `insert`.

  Args:
    sequences: {slot: `scheduler.Sequence`}.
    rows: {slot: row of the prefix}.
    copies: pages to be filled.
  """
  slots = engine.max_concurrent_decodes
  source = np.full(slots, -1, np.int32)
  index = np.zeros(slots, np.int32)
  sample = np.zeros(slots, np.int32)
  each = [sampler_config.sampling(engine.config, {})] * slots
  for slot, sequence in sequences.items():
    request = sequence.request
    drawn = len(sequence.tokens) - len(request.tokens)
    source[slot] = rows[slot]
    index[slot] = request.prompt
    sample[slot] = request.sample
    s = sampler_config.sampling(engine.config, request.sampling)
    each[slot] = s.replace(max_tokens=s.max_tokens - drawn, min_tokens=s.min_tokens - drawn)
  table = None
  if engine.page:
    table = np.full((bucket(len(copies), 1 << 30), 3), -1, np.int32)
    for i, copy in enumerate(copies):
      table[i] = dataclasses.astuple(copy)
  return Entry(source, index, sample, jax.tree.map(lambda *x: np.stack(x), *each), table)


def make_chunk(slots: int, suffixes: dict[int, tuple[int, np.ndarray]], start: int) -> More:
  """The next tokens of each suffix, from `start` on."""
  tokens = np.zeros((slots, CHUNK), np.int32)
  lengths = np.zeros(slots, np.int32)
  filled = np.zeros(slots, np.int32)
  for slot, (at, ids) in suffixes.items():
    part = ids[start : start + CHUNK]
    tokens[slot, : len(part)] = part
    lengths[slot] = len(part)
    filled[slot] = at + start
  return More(tokens, lengths, filled)
