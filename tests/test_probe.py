"""`hardware.probe`: the type of matrix products for which `config.model.dtype='auto'` stands on a machine."""

import json
import os
import subprocess
import sys
import time

import children
import jax
import pytest
import rich.console
import tiny
from test_processes import environment, finish

from jaxpost import stages
from jaxpost.hardware import chips, probe
from jaxpost.monitor import metrics


def test_this_machine_is_measured_once(tmp_path, monkeypatch):
  start = time.perf_counter()
  chosen, why = probe.matmul_type(tmp_path / 'cpu.json')
  assert time.perf_counter() - start < 10  # half a second on an idle machine
  (rates,) = json.loads((tmp_path / 'cpu.json').read_text()).values()
  assert set(rates) == {'float32', 'bfloat16', 'float16'}
  assert all(rate > 0.1 for rate in rates.values())
  assert f'bfloat16 {rates["bfloat16"]:g}' in why
  monkeypatch.setattr(probe, 'matmul_rate', None)  # a second probe would fail
  assert probe.matmul_type(tmp_path / 'cpu.json') == (chosen, why)
  # Other flags and other versions of JAX have other kernels, and are measured again.
  monkeypatch.setattr(probe, 'matmul_rate', lambda *_: 7e9)
  monkeypatch.setenv('XLA_FLAGS', os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_max_isa=AVX2')
  assert probe.matmul_type(tmp_path / 'cpu.json') == ('float32', 'GFLOP/s: float32 7, bfloat16 7, float16 7')
  monkeypatch.undo()
  monkeypatch.setattr(probe, 'matmul_rate', lambda *_: 8e9)
  monkeypatch.setattr(jax, '__version__', '0.0.1')
  assert probe.matmul_type(tmp_path / 'cpu.json')[1].startswith('GFLOP/s: float32 8,')


@pytest.mark.parametrize(
  'rates, chosen',
  [
    (dict(float32=50, bfloat16=100, float16=400), 'bfloat16'),
    (dict(float32=50, bfloat16=52, float16=1), 'float32'),
    (dict(float32=50, bfloat16=3, float16=400), 'float32'),
  ],
)
def test_faster_of_float32_and_bfloat16_is_chosen(tmp_path, monkeypatch, rates, chosen):
  monkeypatch.setattr(probe, 'matmul_rate', lambda name, *_: 1e9 * rates[name])
  assert probe.matmul_type(tmp_path / 'a' / 'cpu.json')[0] == chosen
  (tmp_path / 'a' / 'cpu.json').write_text('{"cut')
  assert probe.matmul_type(tmp_path / 'a' / 'cpu.json')[0] == chosen


@pytest.mark.parametrize(
  'kind, capability, chosen',
  [('gpu', '7.5', 'float16'), ('gpu', '9.0', 'bfloat16'), ('gpu', 'gfx942', 'bfloat16'), ('tpu', '', 'bfloat16')],
)
def test_types_of_accelerators_are_chosen_without_a_probe(monkeypatch, kind, capability, chosen):
  class Device:
    platform, device_kind = kind, 'some'
    compute_capability = capability

  monkeypatch.setattr(probe.jax, 'devices', lambda: [Device()])
  assert probe.matmul_type() == (chosen, 'of some')
  assert chips.before_ampere(Device()) == (chosen == 'float16')


def test_a_run_keeps_the_type_that_it_began_with(tmp_path, monkeypatch):
  model, messages = tiny.folder(tmp_path / 'model'), []
  config = tiny.merged(tiny.run_config(model), dict(model=dict(dtype='auto'), train=dict(steps=2), save=dict(every=1)))

  class Console(rich.console.Console):
    def out(self, text, **_):
      messages.append(text)

  console = Console(quiet=True)
  monkeypatch.setattr(probe, 'matmul_type', lambda: ('float32', 'why'))
  stages.run(config, tmp_path / 'run', console)
  assert 'config.model.dtype: auto is float32 here (why)' in messages
  monkeypatch.setattr(probe, 'matmul_type', lambda: ('bfloat16', 'why'))
  stages.run(tiny.merged(config, dict(train=dict(steps=4))), tmp_path / 'run', console)
  exact = tiny.merged(config, dict(model=dict(dtype='float32'), train=dict(steps=4)))
  stages.run(exact, tmp_path / 'exact', console)
  rows = [[r for r in metrics.comparable_rows(tmp_path / d / 'metrics.jsonl')] for d in ('run', 'exact')]
  assert rows[0] == rows[1]
  saved = json.loads((tmp_path / 'run/config.json').read_text())
  assert saved['model']['dtype'] == 'float32'


def test_auto_is_resolved_per_stage(tmp_path, monkeypatch):
  monkeypatch.setattr(probe, 'matmul_type', lambda: ('float32', 'why'))
  raw = dict(model=dict(dtype='bfloat16'), stages=('a', 'b'), a=dict(model=dict(dtype='auto')), b=dict())
  resolved = stages.with_dtype(raw, tmp_path, rich.console.Console(quiet=True))
  assert resolved['a']['model']['dtype'] == 'float32'
  assert resolved['model']['dtype'] == 'bfloat16' and resolved['b'] == {}
  # If no type is given, one is chosen for all stages without one.
  for raw in ({}, dict(model=dict(preset='tiny'), stages=('a',), a=dict(model=dict(path='x')))):
    resolved = stages.with_dtype(raw, tmp_path, rich.console.Console(quiet=True))
    assert resolved == raw | {'model': raw.get('model', {}) | {'dtype': 'float32'}}


PRINT_DTYPE = """
import sys
from jaxpost.distributed import cluster
from jaxpost import stages
import pathlib, rich.console
cluster.connect(sys.argv[1], 2, int(sys.argv[2]))
raw = dict(model=dict(dtype='auto'))
print(stages.with_dtype(raw, pathlib.Path(sys.argv[3]),
                          rich.console.Console(quiet=True))['model']['dtype'])
"""


def test_all_processes_take_the_type_of_the_first(tmp_path):
  """The measurements of process 0 decide, even if those of process 1 prefer another type."""
  address, flags = children.free_address(), environment(tmp_path).get('XLA_FLAGS', '')
  key = ' '.join([probe._cpu(), str(os.cpu_count()), jax.__version__, flags]).rstrip()
  for rank, fast in enumerate(('float32', 'bfloat16')):
    file = tmp_path / str(rank) / '.cache/jaxpost/cpu.json'
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({key: dict(float32=1.0, bfloat16=1.0, float16=1.0) | {fast: 9.0}}))
  outputs = finish(
    [
      subprocess.Popen(
        [sys.executable, '-c', PRINT_DTYPE, address, str(rank), str(tmp_path)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path) | {'HOME': str(tmp_path / str(rank))},
      )
      for rank in range(2)
    ]
  )
  assert [out.split()[-1] for out, _ in outputs] == ['float32', 'float32']


def test_probe_works_without_a_writable_cache(tmp_path):
  (tmp_path / 'file').write_text('')
  chosen, _ = probe.matmul_type(tmp_path / 'file' / 'cpu.json')
  assert chosen in ('float32', 'bfloat16')
