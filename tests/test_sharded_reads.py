"""Loading weights onto a mesh reads each matrix row once over all processes, and gives every device its shards.

The child processes run `two_processes` or `eight_devices` below; the tests check their output or exit status.
"""

import json
import math
import pathlib
import subprocess
import sys

import children
import numpy as np
import safetensors.numpy
import test_processes

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPE = dict(
  vocab_size=259, hidden_size=64, intermediate_size=96, num_layers=6, num_heads=8, num_kv_heads=4, tie_embeddings=False
)
LAYOUTS = [
  'dense:fsdp=8',
  'dense:fsdp=4,tensor=2',
  'fused:tensor=4,data=2',
  'moe:expert=4,data=2',
  'moe:expert=2,fsdp=2,tensor=2',
  'latent:expert=2,fsdp=2,tensor=2',
  'packed:expert=2,tensor=2,data=2',
]

MESHES = ['fsdp=2', 'tensor=2', 'data=2']  # of two processes


def models():
  import tiny

  from jaxpost.models.config import Experts

  return dict(
    dense=tiny.config(**SHAPE),
    fused=tiny.config(**SHAPE, family='phi3', biases=('q', 'k', 'v', 'o')),
    moe=tiny.config(**SHAPE, family='qwen3_moe', experts=Experts(8, 2, 24)),
    packed=tiny.config(
      **SHAPE | dict(family='gpt_oss', qk_norm=''),
      experts=Experts(8, 2, 24, limit=1.5, alpha=1.7),
      biases=('q', 'o', 'router', 'gate', 'up', 'down', 'sinks'),
    ),
    latent=tiny.latent(),
  )


def count_reads():
  """Returns [bytes of matrices, bytes of vectors], a list that counts what is read from now on, in whole rows.

  An object store reads whole rows.
  """
  from jaxpost.formats import safetensors_file

  read, count = safetensors_file.Tensor.__getitem__, [0, 0]

  def counting_read(tensor, index):
    rows, *_ = index if isinstance(index, tuple) else (index,)
    size = len(range(*rows.indices(tensor.shape[0])))
    count[len(tensor.shape) == 1] += 4 * size * math.prod(tensor.shape[1:])
    return read(tensor, index)

  safetensors_file.Tensor.__getitem__ = counting_read
  return count


def load(folder, model, layout, piece):
  """Loads the parameters of a model as a run does, in pieces of `piece` bytes."""
  from jaxpost.formats import model_folder, tensor_reader
  from jaxpost.stage import load_weights, records

  tensor_reader._PIECE = piece
  source = records.Source(model.config, folder=model_folder.opened(folder), name='x')
  return load_weights.load(source, model, layout, 'float32')


def two_processes(folder, rank, address):
  """In one of two processes, checks its shards, and prints {mesh: bytes read}.

  With `data=2`, both have all weights.
  """
  from jaxpost.distributed import cluster
  from jaxpost.distributed.phases import make_layout
  from jaxpost.models import model as model_lib
  from jaxpost.models.parameters import leaf

  cluster.connect(address, 2, int(rank))
  count, counts = count_reads(), {}
  model = model_lib.build(models()['dense'])
  expected = np.load(pathlib.Path(folder) / 'whole.npz')
  for mesh in MESHES:
    count[:] = 0, 0
    params = load(folder, model, make_layout(mesh, 'train'), 4096)
    counts[mesh] = list(count)
    for path in model.table:
      for shard in leaf(params, path).addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[path][shard.index], strict=True)
  print(json.dumps(counts))


def eight_devices(folder):
  """Checks that each layout of eight devices has the parameters of one device."""
  import jax
  import tiny

  from jaxpost.distributed.phases import make_layout
  from jaxpost.distributed.transfer import to_host
  from jaxpost.formats import hf_export
  from jaxpost.models import model as model_lib

  saved, count = {}, count_reads()
  for name, config in models().items():
    model = model_lib.build(config)
    saved[name] = tiny.params(model)
    hf_export.save(pathlib.Path(folder) / name, model, saved[name])
  for text in LAYOUTS:
    name, _, mesh = text.partition(':')
    model, count[:] = model_lib.build(models()[name]), (0, 0)
    loaded = load(pathlib.Path(folder) / name, model, make_layout(mesh, 'train'), 2048)
    if name == 'dense':  # heads and kv heads are fewer than devices
      check(
        count[0]
        == sum(
          x.nbytes
          for x in safetensors.numpy.load_file(pathlib.Path(folder) / name / 'model.safetensors').values()
          if x.ndim > 1
        )
      )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), to_host(loaded), to_host(saved[name]))
    jax.tree.map(lambda x, sharding: check(x.sharding == sharding), loaded, model.shardings(make_layout(mesh, 'train')))


def check(condition):
  assert condition


def start(devices, *arguments):
  return subprocess.Popen(
    [sys.executable, __file__, *map(str, arguments)],
    text=True,
    cwd=ROOT,
    env=test_processes.environment('', devices),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def test_two_processes_read_each_matrix_row_once(tmp_path):
  """No row of a matrix is read twice, on any mesh."""
  import tiny

  from jaxpost.formats import hf_export
  from jaxpost.models import model as model_lib
  from jaxpost.models.parameters import flatten

  model = model_lib.build(models()['dense'])
  params = tiny.params(model)
  hf_export.save(tmp_path / 'model', model, params, max_shard_bytes=100_000)
  np.savez(tmp_path / 'model/whole.npz', **flatten(params))
  files = list((tmp_path / 'model').glob('*.safetensors'))
  sizes = [x.nbytes for f in files for x in safetensors.numpy.load_file(f).values() if x.ndim > 1]
  vectors = sum(x.nbytes for f in files for x in safetensors.numpy.load_file(f).values() if x.ndim == 1)
  assert len(files) > 5 and vectors < sum(sizes) / 20
  address = children.free_address()
  counts = [
    json.loads(out.splitlines()[-1])
    for out, _ in test_processes.finish([start(1, tmp_path / 'model', rank, address) for rank in (0, 1)])
  ]
  for mesh in MESHES:
    assert sum(count[mesh][0] for count in counts) == sum(sizes)
    for count in counts:
      own, shared = count[mesh]
      assert own <= 1.05 * sum(sizes) / 2
      assert shared <= vectors


def test_shards_on_eight_devices_equal_the_saved_parameters(tmp_path):
  test_processes.finish([start(8, tmp_path)])


if __name__ == '__main__':
  sys.path.insert(0, str(ROOT / 'tests'))
  (two_processes if len(sys.argv) > 2 else eight_devices)(*sys.argv[1:])
