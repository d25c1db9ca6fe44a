"""Times the transfer of the trainer's weights to the sampler, beside a plain copy of them.

  python benchmarks/reshard.py --shape=s --bf16

Prints one line of JSON: bytes read and written per second by both.
"""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the clone

import jax
import jax.numpy as jnp

from benchmarks import command
from jaxpost.stage import on_policy
from jaxpost.tools import bench


def measure(options: bench.Options, workdir: str) -> dict:
  """Returns the best of `options.steps` transfers and copies; the first of each compiles and is left out."""
  del workdir
  placed, params = bench.place_with_weights('sample', options)
  engine = on_policy.make_engine(placed)
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  transfers = []
  copies = []
  for _ in range(options.steps + 1):
    start = time.perf_counter()
    written = engine.load(params, 0)['bytes']
    transfers.append(time.perf_counter() - start)
    # Weights that are laid out alike on both sides are used in place.
    shared = sum(x.nbytes for x in jax.tree.leaves(engine.weights)) - written
    engine.unload()
    start = time.perf_counter()
    copy = jax.block_until_ready(jax.tree.map(jnp.copy, params))
    copies.append(time.perf_counter() - start)
    del copy  # before the next transfer needs the memory
  rate = (size + written) / min(transfers[1:])
  copy_rate = 2 * size / min(copies[1:])
  return dict(
    reshard_s=min(transfers[1:]),
    moved_gb=(size + written) / 1e9,
    shared_gb=shared / 1e9,
    gb_per_s=rate / 1e9,
    copy_gb_per_s=copy_rate / 1e9,
    share_of_copy=rate / copy_rate,
    all=[round(t, 4) for t in transfers],
  )


if __name__ == '__main__':
  command.run('reshard', measure)
