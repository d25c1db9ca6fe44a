"""Compares two ways of context parallelism: keys and values gathered, or sent around a ring.

  python benchmarks/ring_attention.py --tokens=4096                        # processes with a core each
  python benchmarks/ring_attention.py --topology=v5p:2x2x2 --tokens=32768  # compiled for described chips

Gathering is what `jaxpost/models/context_parallel.py` does, for chips with XLA's
products and with their kernel. Ring attention (arXiv:2310.01889, with stripes,
arXiv:2311.09431) is only here. Forward and backward of one layer are measured.

Legend: B rows, t tokens of a shard, H heads, K kv heads, h head size.
"""

import functools
import os
import socket
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the clone

from absl import app, flags

_TOPOLOGY = flags.DEFINE_string('topology', '', 'Compile for these chips; empty: time on CPU cores.')
_TOKENS = flags.DEFINE_integer('tokens', 4096, 'Length of the row.')
_PROCESSES = flags.DEFINE_integer('processes', 2, 'Number of processes, each with a core.')
_RANK = flags.DEFINE_integer('rank', -1, 'Set by the script: rank of a process that it started.')
_ADDRESS = flags.DEFINE_string('address', '', 'Set by the script: HOST:PORT of the first process.')


def ring(q, k, v, segments, n, chunk):
  """Ring attention of striped [B, t, H, h]: in n rounds each shard sees the keys of one other shard.

  The sums so far are rescaled by the new largest score (online softmax); the
  backward pass recomputes the scores of a shard.
  """
  import jax
  import jax.numpy as jnp

  me = jax.lax.axis_index('context')
  step = min(chunk, q.shape[1])
  b, t, heads, size = q.shape
  q = (q / size**0.5).reshape(b, t, k.shape[2], -1, size)

  @jax.checkpoint
  def part(q, k, v, documents, number):
    """Returns (sum of weights x values, sum of weights, largest score), by chunks of queries."""
    out = []
    for start in range(0, t, step):
      end = min(start + step, t)
      scores = jnp.einsum('btkgh,bskh->bkgts', q[:, start:end], k[:, :end], preferred_element_type=jnp.float32)
      # Token i of shard s is token i n + s of the row.
      causal = jnp.arange(start, end)[:, None] * n + me >= (jnp.arange(end) * n + number)
      same = segments[:, start:end, None] == documents[:, None, :end]
      scores = jnp.where((causal & same)[:, None, None], scores, -1e30)
      top = jax.lax.stop_gradient(scores.max(-1))
      weights = jnp.exp(scores - top[..., None])
      out.append(
        (
          jnp.einsum('bkgts,bskh->bkgth', weights.astype(v.dtype), v[:, :end], preferred_element_type=jnp.float32),
          weights.sum(-1),
          top,
        )
      )
    return [jnp.concatenate(x, axis=3) for x in zip(*out)]

  total = 0.0
  norm = 0.0
  documents = segments
  best = jnp.full((b, k.shape[2], q.shape[3], t), -1e30)
  for i in range(n):
    some, weight, top = part(q, k, v, documents, (me + i) % n)
    new = jnp.maximum(best, top)
    old, add = jnp.exp(best - new), jnp.exp(top - new)
    total = total * old[..., None] + some * add[..., None]
    norm, best = norm * old + weight * add, new
    if i + 1 < n:
      k, v, documents = (
        jax.lax.ppermute(x, 'context', [((j + 1) % n, j) for j in range(n)]) for x in (k, v, documents)
      )
  out = total / norm[..., None]
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, heads, size)


def programs(layout, tokens, computes, cfg):
  """Returns {name: jitted gradients with respect to q, k and v of a row} and the shapes of their arguments."""
  import jax
  import jax.numpy as jnp

  from jaxpost.models import context_parallel, layers
  from jaxpost.models.attention_xla import PackedRows

  n = layout.mesh.shape['context']
  shapes = [(1, tokens, heads, cfg.head_dim) for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)]
  split = layout.spec(('batch', 'time', None, None), shapes[0])
  # Four documents.
  segments = jnp.repeat(jnp.arange(4), tokens // 4)[None]
  places = jnp.arange(tokens)[None]

  def gathered(q, k, v, compute):
    return layers.attention(q, k, v, PackedRows(segments, places), 0, cfg=cfg, compute=compute, layout=layout)

  def ring_attention(q, k, v):
    compute = computes['gathered']
    k, v = (x.astype(compute.dtype) for x in (k, v))
    return jax.shard_map(
      functools.partial(ring, n=n, chunk=compute.q_chunk),
      mesh=layout.mesh,
      out_specs=split,
      check_vma=False,
      in_specs=(split, split, split, jax.P(*split[:2])),
    )(q.astype(compute.dtype), k, v, context_parallel.stripe(segments, n))

  def gradients(attend):
    return jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v))), argnums=(0, 1, 2)))

  sharding = jax.sharding.NamedSharding(layout.mesh, split)
  given = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes]
  made = {name: gradients(functools.partial(gathered, compute=compute)) for name, compute in computes.items()}
  return made | dict(ring=gradients(ring_attention)), given


def described():
  """Prints the bytes and cycles of the programs, compiled for described chips."""
  from jaxpost.planning import machines

  topology = machines.parse(_TOPOLOGY.value)
  machines.set_environment(topology)
  from jaxpost.distributed import phases
  from jaxpost.matmul import compute_for
  from jaxpost.models import presets
  from jaxpost.planning import cost

  devices = machines.devices(topology)
  layout = phases.make_layout(f'context={len(devices)}', 'train', devices=devices)
  cfg = presets.PRESETS['llama3_8b']
  ways = {'gathered': 'chunked', 'gathered, splash': 'splash'}
  if topology.gpu:
    del ways['gathered, splash']
  made, given = programs(
    layout,
    _TOKENS.value,
    {
      name: compute_for('gpu' if topology.gpu else 'tpu', 'bfloat16', 'none', attention)
      for name, attention in ways.items()
    },
    cfg,
  )
  for name, program in made.items():
    compiled = program.lower(*given).compile()
    totals = cost.count(compiled.as_text())
    assert not totals.unknown, totals.unknown
    print(
      name,
      f'{compiled.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB of temporaries,',
      f'{sum(x for x, _ in totals.collectives.values()) / 2**20:.0f} MiB '
      f'sent, {totals.bytes / 2**30:.1f} GiB read and written,',
      f'{totals.cycles / 1e6:.1f} M cycles by XLA',
      flush=True,
    )


def timed():
  """Prints the seconds of the programs on processes with a core each, after a check that they agree."""
  os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[_RANK.value]})
  from jaxpost.distributed import cluster

  cluster.connect(_ADDRESS.value, _PROCESSES.value, _RANK.value)
  import jax
  import numpy as np

  from jaxpost.distributed import phases
  from jaxpost.matmul import Compute
  from jaxpost.models import presets

  layout = phases.make_layout(f'context={_PROCESSES.value}', 'train')
  made, given = programs(layout, _TOKENS.value, dict(gathered=Compute('float32')), presets.PRESETS['s'])
  random = np.random.RandomState(0)
  whole = [random.standard_normal(x.shape).astype(np.float32) for x in given]
  arrays = [jax.make_array_from_callback(x.shape, x.sharding, lambda i, w=w: w[i]) for x, w in zip(given, whole)]
  out = {name: program(*arrays) for name, program in made.items()}
  for one, two in zip(*out.values()):
    for a, b in zip(one.addressable_shards, two.addressable_shards):
      np.testing.assert_allclose(a.data, b.data, rtol=1e-3, atol=1e-4)
  seconds = {name: [] for name in made}
  for _ in range(7):
    for name, program in made.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*arrays))
      seconds[name].append(time.perf_counter() - start)
  if not _RANK.value:
    for name, values in seconds.items():
      print(f'{name}: {statistics.median(values):.3f} s, of {min(values):.3f} to {max(values):.3f}')


def main(_):
  if _TOPOLOGY.value:
    return described()
  if _RANK.value >= 0:
    return timed()
  with socket.socket() as s:
    s.bind(('localhost', 0))
    address = f'localhost:{s.getsockname()[1]}'
  done = [
    subprocess.Popen([sys.executable, *sys.argv, f'--rank={rank}', f'--address={address}'])
    for rank in range(_PROCESSES.value)
  ]
  return int(any([p.wait() for p in done]))


if __name__ == '__main__':
  app.run(main)
