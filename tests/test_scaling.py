"""benchmarks/scaling.py: speed-up and efficiency of the standard workload are computed and printed correctly."""

import json
import os
import pathlib
import sys

import children
import pytest

from jaxpost.errors import InputError

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain `pytest` does not have it in its path

from benchmarks import scaling  # noqa: E402


def plan(**overrides):
  return scaling.Plan(**{**dict(what='sft', counts=(1, 2), batch=8, rounds=2, flags=()), **overrides})


def test_strong_and_weak_speed_up_equal_figures_by_hand():
  """8 rows take 1 s; two processes need 0.6 s for 8 and 1.25 s for 16."""
  times = {(1, 8): 1.0, (1, 4): 0.5, (2, 8): 0.6, (2, 16): 1.25}
  measured = []

  def run(n, batch):
    measured.append((n, batch))
    return times[n, batch] + (len(measured) <= len(times))  # the first round is slow

  strong, weak = scaling.measure(plan(), run)
  assert measured == 2 * [(1, 8), (1, 4), (2, 8), (2, 16)]  # interleaved
  assert (strong['mode'], strong['batch']) == ('strong', 8)
  assert strong['speedup'] == pytest.approx(1 / 0.6)
  assert strong['efficiency'] == pytest.approx(1 / 1.2)
  assert strong['communication_share'] == pytest.approx(0.1 / 0.6)
  assert (weak['mode'], weak['batch']) == ('weak', 16)
  assert weak['speedup'] == pytest.approx(2 / 1.25)
  assert weak['efficiency'] == pytest.approx(0.8)
  assert weak['communication_share'] == pytest.approx(0.2)
  assert '80%' in scaling.table([strong, weak])


@pytest.mark.parametrize(
  'over, words',
  [
    (dict(counts=(1, 4096)), 'a core each'),
    (dict(batch=7), 'cannot be split over 2'),
    (dict(what='grpo', batch=8), 'in groups of 8'),
  ],
)
def test_bad_settings_are_refused(over, words):
  with pytest.raises(InputError, match=words):
    scaling.measure(plan(**over), lambda n, batch: 1.0)


@pytest.mark.parametrize('text', ['x', '', '0', '1', '1,-2', '1,2.5'])
def test_bad_process_counts_are_refused(text):
  with pytest.raises(InputError, match='--processes'):
    scaling.counts(text.split(','))


def test_one_process_is_always_timed():
  assert scaling.counts(['4', '2', '4']) == (1, 4, 2)


RUN = dict(
  what='sft',
  shape='xs',
  bf16=True,
  mesh='fsdp=-1',
  prompt=60,
  new=9,
  ragged=False,
  mean=64,
  top_p=1.0,
  device='cpu',
  jax='1',
)


def test_figures_from_recorded_lines_of_a_cluster(tmp_path):
  """The best figure of each setting counts; settings without all of their runs are left out."""
  file = tmp_path / 'runs.jsonl'
  times = [(1, 8, 3.0), (1, 8, 1.0), (1, 4, 0.5), (2, 8, 0.6), (2, 16, 1.25), (4, 8, 0.1)]
  file.write_text(
    ''.join(
      json.dumps(dict(RUN, processes=n, devices=4 * n, batch=batch, all=[9.0, 9.0, t, t, 8.0])) + '\n\n'
      for n, batch, t in times
    )
  )
  seconds = {(1, 8): 1.0, (1, 4): 0.5, (2, 8): 0.6, (2, 16): 1.25}
  strong, weak = scaling.measure(plan(), lambda n, batch: seconds[n, batch])
  assert scaling.recorded(file) == [strong, scaling.figures('sft', 'weak', 2, 4, seconds), weak]
  mixed = file.read_text() + json.dumps(dict(RUN, bf16=False, processes=1, devices=4, batch=8, all=[9.0] * 3))
  for text, words in (
    (mixed, 'different workloads: .*bf16=False.*bf16=True'),
    ('', r'has \(processes, batch\) \[\]; n processes'),
    ('{"what": "sample"}', 'no lines of .launch.bench sft'),
  ):
    file.write_text(text)
    with pytest.raises(InputError, match=words):
      scaling.recorded(file)
  with pytest.raises(InputError, match='no lines of'):
    scaling.recorded(tmp_path / 'none')


@pytest.mark.long
@pytest.mark.parametrize('what, batch', [('sft', 4), ('grpo', 16)])
def test_benchmark_runs_real_processes_with_a_core_each(what, batch):
  if len(os.sched_getaffinity(0)) < 2:
    pytest.skip('one core: nothing to speed up on')
  options = '--shape=nano', f'--workloads={what}', f'--batch={batch}', '--rounds=1', '--steps=2', '--new=8'
  rows = children.printed('benchmarks/scaling.py', *options, timeout=1800)
  assert [(r['mode'], r['processes'], r['batch']) for r in rows] == [('strong', 2, batch), ('weak', 2, 2 * batch)]
  assert all(r['speedup'] > 0 for r in rows)  # its size depends on the machine
  assert all(0 <= r['communication_share'] < 1 for r in rows)
