"""`launch.bench accelerator`: every row runs, and a row that fails, hangs or crashes does not stop the others."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from jaxpost.hardware.chips import Chip
from jaxpost.matmul import compute_for
from jaxpost.planning import machines
from jaxpost.rollout import native
from jaxpost.tools.accelerator import chip, decoding, rows, supervisor, training, worker, workload
from jaxpost.tools.accelerator.rows import Row


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_row_name_selects_all_rows_below_it():
  name = 'decode/qwen3_1_7b/32x512'
  assert list(rows.chosen(name)) == [name, name + '/top_p', name + '/block=8']
  assert list(rows.chosen('bits')) == ['bits', 'bits/deterministic']
  assert list(rows.chosen('')) == list(rows.ROWS) and list(rows.chosen('rates,versions')) == ['versions', 'rates']
  with pytest.raises(ValueError, match="no row 'decod'; the rows are versions, "):
    rows.chosen('decod')


def test_exception_or_timeout_is_an_error_of_its_row(monkeypatch):
  fake = type(sys)('jaxpost.tools.accelerator.fake')
  fake.raises = lambda: [][0]
  fake.hangs = lambda: time.sleep(30)
  fake.works = lambda: dict(x=float('nan'))
  monkeypatch.setitem(sys.modules, fake.__name__, fake)
  assert worker.measure('a', Row('fake:raises', 9), False)['error'] == 'IndexError: list index out of range'
  start = time.monotonic()
  assert worker.measure('b', Row('fake:hangs', 0.2), False)['error'] == 'TimeoutError: gave no result in 0 s'
  assert time.monotonic() - start < 10
  hurried = worker.measure('b', Row('fake:hangs', 9), False, left=0.2)
  assert hurried['error'] == 'TimeoutError: gave no result in 0 s'
  line = worker.measure('c', Row('fake:works', 9), False)
  assert line.pop('seconds') >= 0 and line == dict(row='c', x=None)


# What a worker with the rows a, b and c executes first: it dies or hangs in row b, or ends before row a.
DIES_IN_B = 'send(dict(begin="a")); send(dict(row="a", x=1)); send(dict(begin="b")); os.abort()'
HANGS_IN_B = 'send(dict(begin="a")); send(dict(row="a", x=1)); send(dict(begin="b")); time.sleep(60)'
ENDS_AT_ONCE = 'sys.exit(3)'


@pytest.mark.parametrize(
  'first, error',
  [(DIES_IN_B, 'its process ended with code -6'), (HANGS_IN_B, 'gave no result in 1 s'), (ENDS_AT_ONCE, None)],
)
def test_worker_that_dies_or_hangs_fails_only_its_current_row(tmp_path, monkeypatch, first, error):
  script = tmp_path / 'fake_worker.py'
  script.write_text(
    'import json, os, sys, time\n'
    'options, *names = sys.argv[1:]\n'
    'fd = json.loads(options)["pipe"]\n'
    'def send(m): os.write(fd, (json.dumps(m) + "\\n").encode())\n'
    f'if not os.path.exists({str(tmp_path / "second")!r}):\n'
    f'  open({str(tmp_path / "second")!r}, "w").close()\n'
    f'  {first}\n'
    'for n in names:\n'
    '  send(dict(begin=n)); send(dict(row=n, x=1))\n'
  )
  started = []
  popen = subprocess.Popen

  def start(command, **kw):
    started.append(command[4:])
    return popen([sys.executable, str(script), *command[3:]], **kw)

  monkeypatch.setattr(supervisor.subprocess, 'Popen', start)
  monkeypatch.setattr(supervisor, '_GRACE', 0.5)
  monkeypatch.setattr(rows, 'ROWS', {name: Row('none:none', 0.5) for name in 'abc'})
  failed = supervisor.run(str(tmp_path / 'out'), 100, say=lambda text: None)
  lines = {line['row']: line for line in lines_of(tmp_path / 'out')}
  assert list(lines) == ['a', 'b', 'c'] and failed == 1
  if error:
    assert lines['b']['error'] == error and lines['a']['x'] == lines['c']['x'] == 1
    assert started == [['a', 'b', 'c'], ['c']]
  else:
    assert lines['a']['error'] == 'its process ended with code 3' and started == [['a', 'b', 'c'], ['b', 'c']]


def test_rows_beyond_the_budget_are_reported_as_skipped(tmp_path):
  out = tmp_path / 'out.jsonl'
  assert supervisor.run(str(out), 0, 'versions,rates', say=lambda text: None) == 0
  assert [line['row'] for line in lines_of(out)] == ['versions', 'rates']
  assert all(line['skipped'] == 'the budget is used up' for line in lines_of(out))


def test_command_exits_with_1_if_a_row_failed(tmp_path):
  """The rows after the failed one are measured, too."""
  out = tmp_path / 'out.jsonl'
  command = [sys.executable, '-m', 'launch.bench', 'accelerator', '--tiny', '--rows=versions,rates', f'--out={out}']
  process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {'JAX_PLATFORMS': 'nowhere'})
  assert process.returncode == 1, process.stderr[-3000:]
  assert process.stderr.endswith(f'2 of 2 rows failed; {out} has the error of each\n')
  assert ['nowhere' in line['error'] for line in lines_of(out)] == [True, True]


def test_bytes_of_decoding_are_those_of_the_entries_that_the_timed_blocks_attend_to(monkeypatch):
  monkeypatch.setattr(decoding.workload, 'profile', lambda work, per: work() and {})
  filled_before, generate = [], native.NativeEngine.generate

  def watched(engine, state, read):
    filled_before.append(np.asarray(state.positions).tolist())
    return generate(engine, state, read)

  monkeypatch.setattr(native.NativeEngine, 'generate', watched)
  row = decoding.decode('tiny', layers=1, slots=2, length=64, block=4)
  assert filled_before == [[36 + 4 * i] * 2 for i in range(7)]
  timed = filled_before[1:6]  # the first one compiles, the last one is profiled
  filled = np.mean(timed) + np.mean([0, 1, 2, 3])  # with the entries of the block before a token
  assert row['filled_entries'] == filled == 49.5
  longer = decoding.decode('tiny', layers=1, slots=2, length=96, block=4)
  entry = row['cache_bytes'] / row['cache_entries']  # bytes of an entry in both slots
  weights = row['bytes_read'] - filled * entry
  assert weights == longer['bytes_read'] - (filled + 32) * entry > 0


def test_stage_of_a_row_has_the_settings_that_a_run_chooses_by_memory(monkeypatch):
  """The CPU is taken for a GPU with little memory, then for one of which everything fits, then for itself."""

  def choices():
    config = dict(algorithm='sft', train=dict(batch_size=8, row_length=512))
    cfg = workload.shape_of('tiny', 1)
    with workload.stage(cfg, config, ('sft', workload.lengths_of(0, 512))) as running:
      return running.figures()['choices']

  own = choices()
  devices = tuple(jax.devices()[:1])
  large = machines.Topology('toy', 'gpu', Chip('toy', 1e12, 1e12, 1e12), (1,), owned=devices)
  small = dataclasses.replace(large, chip=dataclasses.replace(large.chip, memory=2e7))
  monkeypatch.setattr(machines, 'here', lambda devices: large)
  assert choices() == own
  monkeypatch.setattr(machines, 'here', lambda devices: small)
  assert '(memory: else ' in choices()['train.micro_batch_size'] and '(memory: ' not in str(own)


def test_second_row_of_repeated_runs_compiles_deterministic_programs(monkeypatch):
  configs = []

  def stage(cfg, config, rows):
    configs.append(config)
    raise TimeoutError

  monkeypatch.setattr(training.workload, 'stage', stage)
  for name in rows.chosen('bits'):
    with pytest.raises(TimeoutError):
      rows.ROWS[name].run(tiny=True)
  assert [config['train']['deterministic'] for config in configs] == [False, True]


def test_kernels_are_checked_for_each_size_of_heads_and_for_branches(monkeypatch):
  """The kernels of a GPU are not run here."""
  compute, checked = compute_for('gpu', 'bfloat16', 'none'), []
  monkeypatch.setattr(chip, 'compute_for', lambda *_, **__: compute)
  monkeypatch.setattr(chip.kernel_check, 'trusted', lambda *case: checked.append(case) or 'seen')
  monkeypatch.setattr(chip.layer_check, 'trusted', lambda *case: 'seen')
  row = chip.kernels(1024)
  assert set(row['errors'].values()) == {'seen'} and not row['not_checked']
  expected = {'tiny_gemma4 heads of 32', 'tiny_gemma4 heads of 48', 'gemma4_e2b heads of 256 branches'}
  expected |= {'tiny_gemma4 heads of 32 decode', 'tiny_gemma4 heads of 48 decode', 'qwen3_5_0_8b recurrence'}
  assert expected <= row['errors'].keys() | row['refused'].keys()
  uses = [(shape.head_dim, shape.branches, kernel) for kernel, shape, _ in checked]
  assert {(48, False, 'triton'), (48, True, 'triton'), (48, False, 'decode_triton')} <= set(uses)
  branched = [branches for _, branches, _ in uses]
  assert branched == sorted(branched)  # plain rows first, because the time is limited


def test_figures_of_several_devices_are_those_of_one_device(monkeypatch):
  """Training splits the weights over 4 devices; the sampler holds a whole copy of them on each, in half the bytes."""

  def array(dtype, parts):
    split = types.SimpleNamespace(shard_shape=lambda shape: (shape[0] // parts,))
    return types.SimpleNamespace(
      shape=(64,), dtype=np.dtype(dtype), nbytes=64 * np.dtype(dtype).itemsize, sharding=split
    )

  params, weights = dict(x=array('float32', 4)), dict(x=array('float16', 1))
  assert decoding._copied_bytes(params, weights, moved=128) == 16 * 4 + 64 * 2
  assert decoding._copied_bytes(params, weights, moved=0) == 16 * 4
  monkeypatch.setattr(chip.chips, 'of_kind', lambda kind: Chip('toy', 100.0))
  monkeypatch.setattr(jax, 'device_count', lambda: 4)
  assert chip.mfu(200.0) == 0.5


NAMES = 'while', 'fusion', 'copy', 'conditional'
# (line, event, offset, duration in us): a loop of two operations, a branch inside it, and an operation after it.
ON_TPU = [
  ('XLA Ops', 'fusion', 0, 4),
  ('XLA Ops', 'while', 4, 20),
  ('XLA Ops', 'fusion', 4, 6),
  ('XLA Ops', 'conditional', 10, 14),
  ('XLA Ops', 'copy', 10, 14),
  ('XLA Ops', 'copy', 24, 6),
  ('Async XLA Ops', 'copy', 0, 30),
  ('Steps', 'fusion', 0, 30),
]


def test_operations_of_a_profile_exclude_loops_whose_event_spans_their_body():
  lines = ''
  for name in dict.fromkeys(line for line, *_ in ON_TPU):
    events = ''.join(
      f'events {{ metadata_id: {NAMES.index(event)} offset_ps: {start}000000 duration_ps: {duration}000000 }}'
      for line, event, start, duration in ON_TPU
      if line == name
    )
    lines += f'lines {{ name: "{name}" {events} }}'
  metadata = ''.join(
    f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for i, name in enumerate(NAMES)
  )
  planes = ''.join(f'planes {{ name: "/device:TPU:{i}" {lines} {metadata} }}' for i in range(2))
  trace = jax.profiler.ProfileData.from_text_proto(planes)
  found = [(event.name, event.duration_ns / 1e3) for event in workload._operations(list(trace.planes))]
  assert found == [('fusion', 4), ('fusion', 6), ('copy', 14), ('copy', 6)]  # 30 us, as long as the device is busy


@pytest.mark.long
def test_mfu_counts_the_context_of_packed_documents(tmp_path, monkeypatch):
  """Documents of 64 tokens attend to 32.5 tokens on average, although half of a row of 256 is 128."""
  monkeypatch.setattr(training.workload, 'lengths_of', lambda mean, longest: training.np.full(64, 64))
  monkeypatch.setattr(training.workload, 'profile', lambda work: {})
  calls = []
  monkeypatch.setattr(training, 'model_flops', lambda stage, rate, context: calls.append((stage, context)) or {})
  row = training.sft('tiny', layers=1, rows=1, row_length=256, steps=1)
  ((stage, context),) = calls
  assert context == row['mean_context'] == 32.5
  model = stage.roles.policy.model
  attention = 4 * model.config.num_heads * model.config.head_dim
  assert model.flops_of_update(context) - model.flops_of_update(0) == pytest.approx(3 * 32.5 * attention)


def run_tiny(folder, *words):
  """Runs the command that a user runs, on the devices of this machine; returns {row: its line}."""
  out = folder / 'out.jsonl'
  process = subprocess.run(
    [sys.executable, '-m', 'launch.bench', 'accelerator', '--tiny', '--budget=40m', f'--out={out}', *words],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(folder / 'cache')},
  )
  assert process.returncode == 0, process.stderr[-3000:]
  lines = {line['row']: line for line in lines_of(out)}
  assert not {k: x['error'] for k, x in lines.items() if 'error' in x}
  return lines


# A row for each function that measures.
EACH_KIND = (
  'versions,rates,options,kernels,bits,sft/qwen3_0_6b,mismatch,decode/qwen3_1_7b/128x1024,prefill,moves,'
  'grpo/qwen3_1_7b/slots=256'
)


@pytest.mark.ci
@pytest.mark.long
def test_a_row_of_each_kind_runs_at_tiny_shapes(tmp_path):
  lines = run_tiny(tmp_path, f'--rows={EACH_KIND}')
  assert {rows.ROWS[name].measure for name in lines} == {row.measure for row in rows.ROWS.values()}
  assert lines['bits']['bit_equal'] and lines['bits/deterministic']['bit_equal']
  assert lines['sft/qwen3_0_6b']['tokens_per_s'] > 0
  assert lines['grpo/qwen3_1_7b/slots=256']['first_step_refused'] == ''


@pytest.mark.long
def test_every_row_runs_at_tiny_shapes(tmp_path):
  lines = run_tiny(tmp_path)
  assert list(lines) == list(rows.ROWS)
  assert lines['versions']['packages']['jax'] == jax.__version__
  assert lines['bits/deterministic']['bit_equal'] and lines['bits']['bit_equal']
  sft = lines['sft/qwen3_1_7b']
  assert sft['choices']['train.micro_batch_size'] == '2 (cpu)'
  assert sft['tokens_per_s'] > 0 and sft['profile']['largest'] and sft['predicted_bytes'] > 0
  assert {'update'} <= {p['program'] for p in sft['programs']}
  decode = lines['decode/qwen3_1_7b/32x512']
  assert decode['share_of_copy'] > 0 and decode['operations_per_token'] > 0
  assert lines['grpo/qwen3_1_7b']['time/sample'] > 0 and lines['grpo/qwen3_1_7b']['compile_s'] > 0
  assert {k: row['first_step_refused'] for k, row in lines.items() if 'first_step_refused' in row} == {
    k: '' for k in lines if k.startswith(('grpo', 'ppo'))
  }
  for x in lines['mismatch/qwen3_1_7b']['by_context'].values():
    assert x['max_difference'] < 1e-4 and 0 <= x['kl'] < 1e-8
