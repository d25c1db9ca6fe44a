"""Loading of model folders with block-quantized float8 (FP8) weights, against a dequantization in numpy."""

import contextlib
import json
import pathlib
import sys

import children
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.distributed.phases import make_layout
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export, model_folder, safetensors_file, tensor_layout
from jaxpost.formats.safetensors_file import SINGLE
from jaxpost.models import model as model_lib

FLOAT8 = ml_dtypes.float8_e4m3fn
BLOCK = (12, 20)  # rows and columns of a block, whose borders cut through heads and shards of the matrices below


def quantize_folder(folder, block):
  """Replaces the matrices of a folder by random float8 codes with scales; returns the weights that they stand for.

  Args:
    block: rows and columns of a block; None for one scale a matrix.
  """
  tensors = safetensors.numpy.load_file(folder / SINGLE)
  random, stored, expected = np.random.RandomState(0), {}, {}
  for name, x in tensors.items():
    expected[name] = stored[name] = x
    if not name.endswith('_proj.weight'):
      continue
    rows, columns = block or x.shape
    codes = random.uniform(-400, 400, x.shape).astype(FLOAT8)
    scales = random.uniform(1e-3, 1e-2, (-(-x.shape[0] // rows), -(-x.shape[1] // columns))).astype(np.float32)
    scale_of_weights = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: x.shape[0], : x.shape[1]]
    expected[name] = codes.astype(np.float32) * scale_of_weights
    stored[name] = codes
    stored[f'{name}_scale_inv'] = scales if block else scales.reshape(())
    if not block:
      stored[name.replace('.weight', '.activation_scale')] = np.ones((), np.float32)
  kinds = {name: (x.dtype, x.shape) for name, x in stored.items()}
  (folder / SINGLE).write_bytes(safetensors_file.header(kinds) + b''.join(x.tobytes() for x in stored.values()))
  config = json.loads((folder / 'config.json').read_text())
  config['quantization_config'] = dict(quant_method='fp8', weight_block_size=block and list(block), fmt='e4m3')
  (folder / 'config.json').write_text(json.dumps(config))
  return expected


def make_folder(path):
  shape = dict(hidden_size=40, intermediate_size=56, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=10)
  return pathlib.Path(tiny.folder(path, **shape))


@pytest.fixture
def folder(tmp_path):
  return make_folder(tmp_path / 'model')


def check_load(folder, expected, mesh):
  """Asserts that the folder, loaded on this mesh, has the expected weights."""
  model = model_lib.build(hf.read_config(folder))
  hf.check(folder, model.config)
  params = hf.load_params(folder, model, model.shardings(make_layout(mesh, 'train')), 'float32')
  actual = dict(hf_export.export_tensors(tensor_layout.table(model.config), params, np.dtype('float32')))
  assert actual.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_array_equal(actual[name], x, err_msg=name)


def load_on_eight_devices(path):
  path = pathlib.Path(path)
  for i, block in enumerate((BLOCK, None)):
    folder = make_folder(path / str(i))
    expected = quantize_folder(folder, block)
    for mesh in ('fsdp=2,tensor=4', 'data=8') if block else ('fsdp=8',):
      check_load(folder, expected, mesh)


def test_fp8_weights_load_as_numpy_dequantizes_them(folder):
  check_load(folder, quantize_folder(folder, BLOCK), 'data=1')


def test_fp8_weights_load_onto_eight_devices_as_numpy_dequantizes_them(tmp_path):
  children.run(__file__, str(tmp_path), devices=8, timeout=300)


def test_any_range_of_an_fp8_matrix_can_be_read(folder):
  expected = quantize_folder(folder, BLOCK)
  name = 'model.layers.1.mlp.down_proj.weight'

  with contextlib.ExitStack() as stack:
    tensor = model_folder.open_tensors(folder, stack)[name][1]
    for rows, columns in ((0, 40), (0, 56)), ((11, 13), (19, 21)), ((12, 24), (20, 40)), ((39, 40), (55, 56)):
      part = slice(*rows), slice(*columns)
      np.testing.assert_array_equal(tensor[part], expected[name][part])


def test_fp8_weights_with_wrong_or_missing_scales_are_refused(folder):
  quantize_folder(folder, BLOCK)
  path = folder / 'config.json'
  config = json.loads(path.read_text())
  config['quantization_config']['weight_block_size'] = [128, 128]
  path.write_text(json.dumps(config))
  model = model_lib.build(hf.read_config(folder))
  with pytest.raises(InputError, match=r'weight_scale_inv has shape .* need \[1, 1\]'):
    hf.check(folder, model.config)
  with open(folder / SINGLE, 'rb') as file:
    views = safetensors_file.tensors(file, (folder / SINGLE).stat().st_size)
    tensors = {k: np.array(t[:]) for k, t in views.items()}
  tensors.pop('model.layers.0.mlp.up_proj.weight_scale_inv')
  kinds = {k: (x.dtype, x.shape) for k, x in tensors.items()}
  (folder / SINGLE).write_bytes(safetensors_file.header(kinds) + b''.join(x.tobytes() for x in tensors.values()))
  config['quantization_config']['weight_block_size'] = list(BLOCK)
  path.write_text(json.dumps(config))
  with pytest.raises(InputError, match='up_proj.weight has type F8_E4M3'):
    hf.check(folder, model.config)


if __name__ == '__main__':
  load_on_eight_devices(sys.argv[1])
