"""The sampler's programs for Qwen3-1.7B, with two of its layers, compiled for TPUs that are not there.

They need libtpu, but no TPU.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

CLONE = pathlib.Path(__file__).resolve().parents[1]
LAYERS = 2
VOCABULARY = 151_936

DRIVER = """
import dataclasses, importlib, json, sys

from jaxpost.planning import machines
from jaxpost.models import presets
from jaxpost.planning import aot, dry_run

topology, mesh, layers, slots, page_size, *programs = *sys.argv[1:3], *map(int, sys.argv[3:6]), *sys.argv[6:]
topology = machines.parse(topology)
machines.set_environment(topology)
presets.PRESETS['qwen3_1_7b'] = dataclasses.replace(presets.PRESETS['qwen3_1_7b'], num_layers=layers)
config = importlib.import_module('configs.grpo_gsm8k').get_config()
config.model.update(path='qwen3_1_7b', remat='full')
config.mesh.rollout = mesh
config.rollout.update(slots=slots, page_size=page_size)
config.eval.data.path = ''
stage, = dry_run.prepare_all(config.to_dict())
rows = aot.compile_stage(stage, topology, tuple(programs)).rows
print(json.dumps([
    dict(program=row['program'], read=row['read'], temporaries=row['temp_bytes'], arguments=row['arguments'])
    for row in rows]))
"""

pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None, reason="no libtpu, which compiles for these: pip install 'jax[tpu]'"
  ),
]


def compiled(topology, *programs, mesh, slots, page_size=0):
  """Returns a row of facts for each compiled program, from a process of its own."""
  done = subprocess.run(
    [sys.executable, '-c', DRIVER, topology, mesh, *map(str, (LAYERS, slots, page_size)), *programs],
    capture_output=True,
    text=True,
    cwd=CLONE,
    env=os.environ | {'PYTHONPATH': os.pathsep.join([str(CLONE), os.environ.get('PYTHONPATH', '')])},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  rows = json.loads(done.stdout.splitlines()[-1])
  assert {row['program'] for row in rows} == set(programs)
  return rows


@pytest.mark.parametrize('topology', ['v5e:2x2', 'v6e:2x2'])
def test_programs_of_the_sampler_compile_for_tpus_and_copy_no_cache(topology):
  """Decoding has logits and little else in temporaries, whether it reads all of the cache or a part."""
  slots = 64  # of each device
  logits_bytes = slots * VOCABULARY * 4
  rows = compiled(topology, 'generate', 'insert', 'prefill', mesh='data=-1', slots=4 * slots)
  assert len({row['read'] for row in rows if row['program'] == 'generate'}) > 1  # all of the cache, and a part
  for row in rows:
    temporaries, cache_bytes = row['temporaries'], row['arguments'].get('kv_cache', 0)
    if row['program'] == 'generate':
      assert temporaries <= 4 * logits_bytes + 0.2 * cache_bytes, row
    elif row['program'] == 'insert':
      assert temporaries <= 0.3 * cache_bytes, row


def test_decoding_from_pages_compiles_for_tpus():
  compiled('v5e:2x2', 'generate', mesh='tensor=-1', slots=64, page_size=32)
