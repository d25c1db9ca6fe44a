"""Compiles the kernel for decoding for TPUs that are not here: `compile_decoding.py TOPOLOGY`.

It prints for each case the temporary bytes of a program with the kernel alone, as a share of the cache.
"""

import sys
import types

from jaxpost.planning import machines

topology = machines.parse(sys.argv[1])
machines.set_environment(topology)
import jax  # noqa: E402  the environment comes first

from jaxpost.models import decode_kernels  # noqa: E402

BLOCK = 32
# Slots, kv heads, queries of each, sizes of keys and values, entries of a slot, entries of a page, and the window; a
# window below 0 is one of chunks.
CASES = (
  (256, 8, 2, 128, 128, 1088, 0, 0),
  (256, 8, 4, 64, 64, 1152, 0, 0),
  (64, 4, 5, 96, 96, 2048, 0, 1024),
  (32, 16, 1, 256, 256, 1088, 0, 0),
  (16, 2, 8, 192, 128, 4096, 0, 128),
  (32, 1, 8, 128, 128, 32768, 0, 0),
  (1, 8, 4, 64, 64, 384, 0, 0),
  (128, 8, 2, 128, 128, 4096, 32, 0),
  (64, 8, 8, 64, 64, 4096, 128, 0),
  (16, 8, 5, 128, 128, 16384, 1024, -8192),
  (4, 64, 1, 256, 256, 1088, 0, 0),
)

sharding = jax.sharding.SingleDeviceSharding(machines.devices(topology)[0])


def array(*shape, dtype='bfloat16'):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


for slots, heads, group, size, values, entries, page, window in CASES:
  cfg = types.SimpleNamespace(head_dim=size, attention_scale=0.0, attention_softcap=30.0, chunked=window < 0)
  held = (slots * entries // page // 2, heads, page) if page else (slots, heads, entries)
  cache = [array(*held, n) for n in (size, values)]
  recent = [array(slots, heads, BLOCK, n) for n in (size, values)]
  table = array(slots, entries // page, dtype='int32') if page else None
  integers = array(slots, dtype='int32'), array(dtype='int32')

  def attend(q, cache, recent, filled, step, sinks, table, window=window, cfg=cfg):
    return decode_kernels.cached_attention(
      q, cache, recent, filled, step, kernel='mosaic', window=abs(window), cfg=cfg, sinks=sinks, table=table
    )

  q, sinks = array(slots, 1, heads * group, size), array(heads * group, dtype='float32')
  compiled = jax.jit(attend).lower(q, cache, recent, *integers, sinks, table).compile()
  cache_bytes = sum(2 * x.size for x in cache)
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
  print(compiled.memory_analysis().temp_size_in_bytes / cache_bytes)
