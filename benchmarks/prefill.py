"""Times the prefill of prompts that a group of samples shares, beside as many prompts prefilled one by one.

  python benchmarks/prefill.py --bf16 --shape=xs --batch=64 --prompt=512

--batch completions of one token each: in groups of 8 with a common prompt, and with a prompt each.
"""

import dataclasses
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the clone

import numpy as np

from benchmarks import command
from jaxpost import testing
from jaxpost.stage import on_policy
from jaxpost.tools import bench


def measure(options: bench.Options, workdir: str) -> dict:
  """Returns median seconds of both, from request to result, and their ratio."""
  del workdir
  placed, params = bench.place_with_weights('sample', dataclasses.replace(options, new=1))
  engine = on_policy.make_engine(placed, slots=options.batch)
  engine.load(params, 0)
  seconds = {}
  for name, group_size in (('group', 8), ('alone', 1)):
    source = testing.RandomPrompts(options.batch // group_size, options.prompt, placed.model.config.vocab_size)
    times = []
    for step in range(options.steps + 1):
      prompts, _ = next(source)
      start = time.perf_counter()
      engine(prompts, group_size=group_size, run_key=on_policy.run_key(0, 1), step=step)
      times.append(time.perf_counter() - start)
    seconds[name] = float(np.median(times[1:]))  # the first compiles
  return dict(group_s=seconds['group'], alone_s=seconds['alone'], share=seconds['group'] / seconds['alone'])


if __name__ == '__main__':
  command.run('prefill', measure)
