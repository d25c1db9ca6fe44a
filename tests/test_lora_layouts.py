"""DPO runs with adapters on meshes of eight fake devices have the metrics and exports of a run on one device."""

import json
import pathlib
import sys

import children
import numpy as np
import pytest
import rich.console
import tiny

from jaxpost import stages
from jaxpost.monitor import metrics

ROOT = pathlib.Path(__file__).parents[1]
MESHES = {'fsdp=4,tensor=2': 'data=4,tensor=2', 'data=2,fsdp=4': 'data=8'}


def config(model, **over):
  """A DPO run, which has a reference and samples in evaluations."""
  task = 'generated:arithmetic_pairs:max=99,split={},size=40'
  return tiny.run_config(
    model,
    **tiny.merged(
      dict(
        algorithm='dpo',
        lora=dict(rank=2, dropout=0.2),
        data=dict(path=task.format('train')),
        train=dict(steps=3, batch_size=8, row_length=96),
        save=dict(export=True),
      ),
      over,
    ),
  )


def run(config, workdir):
  stages.run(config, workdir, rich.console.Console(quiet=True))
  return [r for r in metrics.comparable_rows(workdir / 'metrics.jsonl') if r['split'] == 'train']


@pytest.fixture(scope='module', params=['', 'int8', 'nf4'])
def one_device_run(request, tmp_path_factory):
  """(config, metrics, folder) of a run on one device with this format of the base."""
  folder = tmp_path_factory.mktemp('one')
  model = tiny.folder(folder / 'nano', hidden_size=64)
  raw = tiny.merged(config(model), dict(model=dict(quantize=request.param)))
  return raw, run(raw, folder / 'run'), folder / 'run'


@pytest.mark.parametrize('mesh', MESHES)
def test_run_on_mesh_equals_run_on_one_device(one_device_run, mesh, tmp_path):
  from safetensors.numpy import load_file

  raw, expected, folder = one_device_run
  raw = tiny.merged(raw, dict(mesh=dict(train=mesh, rollout=MESHES[mesh])))
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  children.run(__file__, str(tmp_path), devices=8, timeout=300)
  actual = [r for r in metrics.comparable_rows(tmp_path / 'run/metrics.jsonl') if r['split'] == 'train']
  assert len(actual) == len(expected) == 3
  for row, expected_row in zip(actual, expected):
    for key in ('loss', 'grad_norm', 'rewards/margins'):
      assert row[key] == pytest.approx(expected_row[key], rel=1e-3, abs=1e-5), key
  for name in ('model', 'adapter/adapter_model'):
    a, b = (load_file(f / f'export/{name}.safetensors') for f in (tmp_path / 'run', folder))
    assert a.keys() == b.keys()
    for key in a:
      np.testing.assert_allclose(a[key], b[key], atol=1e-3, err_msg=key)


if __name__ == '__main__':
  place = pathlib.Path(sys.argv[1])
  run(json.loads((place / 'config.json').read_text()), place / 'run')
