"""The sampler's programs for Qwen3-1.7B, with a few of its layers, and kernels, compiled for TPUs that are not there.

They need libtpu, but no TPU.
"""

import pathlib

import children
import described
import pytest

CLONE = pathlib.Path(__file__).resolve().parents[1]
LAYERS = 28
VOCABULARY = 151_936

DRIVER = """
import dataclasses, importlib, json, sys

from jaxpost.planning import machines
from jaxpost.models import presets
from jaxpost.planning import aot, dry_run, roofline
from jaxpost.rollout import buckets

topology, mesh, attention, *numbers, programs = sys.argv[1:]
layers, slots, page_size, every_size = map(int, numbers)
topology = machines.parse(topology)
machines.set_environment(topology)
presets.PRESETS['qwen3_1_7b'] = dataclasses.replace(presets.PRESETS['qwen3_1_7b'], num_layers=layers)
config = importlib.import_module('configs.grpo_gsm8k').get_config()
config.model.update(path='qwen3_1_7b', remat='full', attention=attention)
config.mesh.rollout = mesh
config.rollout.update(slots=slots, page_size=page_size)
config.eval.data.path = ''
if not every_size:
  buckets.Buckets.row_sizes = lambda self: [self.slots]
stage, = dry_run.prepare_all(config.to_dict())
compiled = aot.compile_stage(stage, topology, tuple(programs.split(',')))
print(json.dumps([
    dict(program=row['program'], read=row['read'], temporaries=row['temp_bytes'], arguments=row['arguments'],
         filled=row['filled'], gathered=sum(
             size for (kind, _), (size, _) in row['totals'].collectives.items() if kind == 'all-gather'),
         seconds=roofline.xla_seconds(row['totals'], topology.chip) / compiled.placed.decode_block,
         bandwidth=topology.chip.bandwidth, unknown=row['totals'].unknown)
    for row in compiled.rows]))
"""

pytestmark = [pytest.mark.long, described.TPUS]


def compiled(topology, *programs, mesh, slots, attention='auto', page_size=0, layers=2, every_size=False):
  """Returns a row of facts for each compiled program, from a process of its own.

  every_size: also programs that decode a part of the slots.
  """
  sizes = map(str, (layers, slots, page_size, int(every_size)))
  rows = children.printed('-c', DRIVER, topology, mesh, attention, *sizes, ','.join(programs), timeout=3000)
  assert {row['program'] for row in rows} == set(programs)
  return rows


@pytest.mark.parametrize('topology, attention', [('v5e:2x2', 'auto'), ('v6e:2x2', 'auto'), ('v5e:2x2', 'chunked')])
def test_programs_of_the_sampler_compile_for_tpus_and_copy_no_cache(topology, attention):
  """Decoding has logits and little else in temporaries, by the kernel, and by XLA from all of the cache or a part."""
  slots = 64  # of each device
  logits_bytes = slots * VOCABULARY * 4
  rows = compiled(topology, 'generate', 'insert', 'prefill', mesh='data=-1', slots=4 * slots, attention=attention)
  reads = {row['read'] for row in rows if row['program'] == 'generate'}
  assert len(reads) > 1 if attention == 'chunked' else reads == {0}
  for row in rows:
    temporaries, cache_bytes = row['temporaries'], row['arguments'].get('kv_cache', 0)
    if row['program'] == 'generate':
      assert temporaries <= 4 * logits_bytes + 0.2 * cache_bytes, row
    elif row['program'] == 'insert':
      assert temporaries <= 0.3 * cache_bytes, row


@pytest.mark.parametrize('topology', ['v4:2x2x1', 'v5e-1', 'v5p:2x2x1', 'v6e-1', 'tpu7x:2x2x1'])
def test_kernels_for_recurrences_compile_for_tpus(topology):
  """Vector memory suffices for the heads of all families and for the largest; XLA computes single tokens."""
  done = children.run('tests/compile_recurrences.py', 'mosaic', topology, timeout=3000)
  assert done.stdout.split() == ['2', '1', '0'] * 5


@pytest.mark.parametrize('topology', ['v4:2x2x1', 'v5e-1', 'v5p:2x2x1', 'v6e-1', 'tpu7x:2x2x1'])
def test_the_kernel_for_decoding_compiles_for_tpus_and_copies_no_cache(topology):
  """Vector and scalar memory suffice for the heads of all families, and XLA keeps the cache as the kernel reads it."""
  shares = children.run('tests/compile_decoding.py', topology, timeout=3000).stdout.split()
  assert len(shares) == 11 and max(map(float, shares)) <= 0.1


def test_decoding_from_pages_compiles_for_tpus():
  compiled('v5e:2x2', 'generate', mesh='tensor=-1', slots=64, page_size=32, every_size=True)


def test_entries_of_a_block_are_appended_where_they_are():
  """On a mesh that splits slots and heads, devices gather numbers of the block for the host, and no entries."""
  slots, block = 64, 32
  (row,) = compiled('v5e:2x4', 'generate', mesh='data=4,tensor=2', slots=slots)
  assert row['gathered'] <= 4 * 4 * slots * block


def test_decoding_in_256_slots_of_a_v6e_reaches_75_percent_of_its_bandwidth():
  """By XLA's estimate, the seconds of a token are at most those of reading weights and filled cache / 0.75.

  Both grow by as much with each layer, so those of 28 layers follow from programs with 2 and with 4.
  """
  few, more = (compiled('v6e-1', 'generate', mesh='data=-1', slots=256, layers=layers)[0] for layers in (2, 4))

  def of_all_layers(fact):
    return fact(few) + (fact(more) - fact(few)) / 2 * (LAYERS - 2)

  assert not few['unknown']
  room = 320 + 512 + 32
  read = of_all_layers(lambda row: row['arguments']['parameters'] + row['arguments']['kv_cache'] * row['filled'] / room)
  layer_bytes = 2 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144) + 2 * 2 * 8 * 128 * 256 * few['filled']
  assert read == pytest.approx(2 * 2048 * VOCABULARY + LAYERS * layer_bytes, rel=0.01)
  assert read / few['bandwidth'] / of_all_layers(lambda row: row['seconds']) >= 0.75
