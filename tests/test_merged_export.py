"""An export of adapters merges one layer at a time, and writes the bytes of an export of merged parameters."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from jaxpost import stages
from jaxpost.formats import hf_export
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts
from jaxpost.models.parameters import leaf, nest
from jaxpost.stage import export, place, prepare

SHAPES = dict(
  dense=dict(hidden_size=64, intermediate_size=128),
  fused=dict(family='phi3', qk_norm=''),
  moe=dict(family='qwen3_moe', experts=Experts(4, 2, 16)),
)
LAYERS = 6


@pytest.fixture(scope='module')
def bases(tmp_path_factory):
  root = tmp_path_factory.mktemp('bases')
  return {name: tiny.folder(root / name, num_layers=LAYERS, **fields) for name, fields in SHAPES.items()}


def prepared(base, kind, dtype, targets):
  """(a stage with adapters, its parameters with random adapters, so that these change the export)."""
  p = prepare.prepare_all(
    tiny.merged(
      tiny.run_config(base),
      dict(lora=dict(rank=3, alpha=8.0, targets=targets), model=dict(quantize=kind, param_dtype=dtype)),
    )
  )[0]
  initial = stages.initial_params(place.place_stage(p), None)
  random = np.random.RandomState(0)
  params = {path: leaf(initial, path) for path in p.inputs.model.table}
  for path, x in params.items():
    if path.startswith('lora/'):
      params[path] = 0.2 * random.standard_normal(x.shape).astype(np.float32)
  return p, nest(params)


@pytest.mark.parametrize(
  'name, kind, dtype',
  [
    ('dense', '', 'float32'),
    ('dense', 'nf4', 'bfloat16'),
    ('fused', '', 'bfloat16'),
    ('fused', 'int8', 'float32'),
    ('moe', '', 'float32'),
  ],
)
def test_export_of_adapters_has_bytes_of_merged_parameters(bases, tmp_path, name, kind, dtype):
  experts = '|layers/experts/(gate|up|down)' * (name == 'moe')
  p, params = prepared(bases[name], kind, dtype, f'q|o{experts}' if experts else 'q|k|v|o|gate|up|down')
  export.export(p.inputs, tmp_path / 'new', params)
  model = p.inputs.model
  hf_export.save(tmp_path / 'old', model_lib.build(dataclasses.replace(model.config, lora=())), model.merge(params))
  written, expected = ((tmp_path / way / 'model.safetensors').read_bytes() for way in ('new', 'old'))
  assert written == expected


@pytest.mark.parametrize('kind', ['', 'nf4'])
def test_one_layer_is_merged_at_a_time(bases, tmp_path, monkeypatch, kind):
  p, params = prepared(bases['dense'], kind, 'float32', 'q|k|v|o|gate|up|down')
  held, fetch = [], hf_export.to_host

  def fetched(x):
    held.append(sum(x.nbytes for x in jax.live_arrays()))
    return fetch(x)

  before = sum(x.nbytes for x in jax.live_arrays())
  monkeypatch.setattr(hf_export, 'to_host', fetched)
  export.export(p.inputs, tmp_path / 'out', params)
  matrix = 4 * 64 * 128  # bytes of the largest matrix of one layer
  assert len(held) > 9 * LAYERS
  # The parts, the result and the previous result are alive: on CPU, a result on the host is a live array, too.
  assert matrix < max(held) - before < 3.5 * matrix
