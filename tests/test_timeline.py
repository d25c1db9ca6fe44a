"""The time of each step, and a trace of the steps that were asked for and of no others."""

import contextlib
import itertools
import json
import types

import jax
import pytest
import tiny

from jaxpost import loop, stages
from jaxpost.errors import Preempted
from jaxpost.monitor import profile, timeline
from jaxpost.types import Item


def test_a_run_leaves_a_trace(tmp_path):
  model = tiny.folder(tmp_path / 'model')
  config = tiny.run_config(model, log=dict(profile_from=2, profile_steps=2), train=dict(steps=5))
  stages.run(config, tmp_path / 'run')
  traces = list((tmp_path / 'run' / 'profile' / 'sft').rglob('*.xplane.pb'))
  assert len(traces) == 1 and traces[0].stat().st_size > 1000


def test_steps_of_a_trace(monkeypatch, tmp_path, caplog):
  said = []
  monkeypatch.setattr(timeline.jax.profiler, 'start_trace', lambda folder: said.append('start'))
  monkeypatch.setattr(timeline.jax.profiler, 'stop_trace', lambda: said.append('stop'))
  for first, last, begun, expected in (
    (2, 9, 1, {2: 'start', 5: 'stop'}),
    (0, 9, 1, {}),
    (2, 9, 4, {4: 'start', 5: 'stop'}),  # resumed inside of it
    (8, 9, 1, {8: 'start', 9: 'stop'}),  # what follows the last step is not traced
    (9, 9, 1, {9: 'start'}),  # unless no other step is
    (2, 9, 6, {}),
  ):
    trace = profile.Trace(tmp_path, first, 3, last)
    found = {}
    for step in range(begun, last + 1):
      said.clear()
      trace.at(step)
      if said:
        (found[step],) = said
    assert found == expected, (first, last, begun)
    assert bool(caplog.messages) == (begun > first > 0 and not expected), (first, last, begun)


def test_an_error_leaves_no_trace_open(monkeypatch, tmp_path):
  """Else a notebook could not trace again."""

  def fail(self):
    raise RuntimeError('between the steps')

  monkeypatch.setattr(loop._Progress, 'log_pending', fail)
  model = tiny.folder(tmp_path / 'model')
  config = tiny.run_config(model, log=dict(profile_from=1, profile_steps=3), train=dict(steps=5))
  with pytest.raises(RuntimeError, match='between the steps'):
    stages.run(config, tmp_path / 'run')
  timeline.jax.profiler.start_trace(str(tmp_path / 'again'))
  timeline.jax.profiler.stop_trace()


def test_a_timeline_counts_each_second_once(monkeypatch, tmp_path):
  def busy(rollout):
    return {'time/busy/train': 0, 'time/busy/rollout': rollout, 'time/busy/both': 0}

  now = [0.0]
  monkeypatch.setattr('time.perf_counter', lambda: now[0])
  timer = timeline.Timeline({'update': 'train', 'sample': 'rollout'})
  with timer('wait'):
    now[0] += 1
    with timer('sample'):
      now[0] += 2
    now[0] += 4
  now[0] += 8
  with pytest.raises(KeyError), timer('update'):
    now[0] += 16
    raise KeyError
  assert timer.pop() == {'time/wait': 5, 'time/sample': 2, 'time/update': 16, 'time/step': 31} | busy(2)
  now[0] += 1
  assert timer.pop() == {'time/step': 1} | busy(0)
  timer.begin(tmp_path / 'new' / 'x.json', steps=1)
  with timer('sample'):
    now[0] += 3
  timer.flush()  # what is written still counts
  assert timer.pop() == {'time/sample': 3, 'time/step': 3} | busy(3)
  with timer('data'):
    now[0] += 1
  timer.flush()
  timer.flush()
  events = json.loads((tmp_path / 'new' / 'x.json').read_text().rstrip(',\n') + ']')
  assert [(e['tid'], e['args']['name']) for e in events if e['name'] == 'thread_name'] == [
    (0, 'host'),
    (1, 'train'),
    (2, 'rollout'),
  ]
  assert [(e['name'], e['tid'], e['dur']) for e in events if e['ph'] == 'X'] == [
    ('sample', 0, 3e6),
    ('sample', 2, 3e6),
    ('data', 0, 1e6),
  ]


class Devices:
  """A role whose updates take 10 s of devices that run beside the host, in which a dispatch takes 1 s."""

  def __init__(self):
    self.now, self.ready = 0.0, 0.0

  def update(self, batch):
    del batch
    self.now += 1
    self.ready = max(self.now, self.ready) + 10
    return {'skipped_updates': 0.0, 'ready': self.ready}

  def fetch(self, metrics):
    self.now = max(self.now, metrics['ready'])
    return metrics


@pytest.mark.parametrize('wait', [False, True])
def test_a_step_takes_as_long_as_its_devices(wait, monkeypatch):
  """Also the first one and the one after an evaluation, for which the host waits for nothing before it goes on."""
  devices, rows = Devices(), []

  def evaluate(roles, step):
    devices.now += 5
    return {}, []

  monkeypatch.setattr('time.perf_counter', lambda: devices.now)
  monkeypatch.setattr(loop, 'to_host', devices.fetch)
  monkeypatch.setattr(loop.nonfinite, 'is_doubtful', lambda row: False)
  monkeypatch.setattr(jax, 'block_until_ready', lambda done: devices.fetch(done[0][1]))
  stage = loop.Stage(
    name='x',
    steps=7,
    roles=types.SimpleNamespace(trainable={'policy': devices}),
    stream=itertools.repeat(Item([('policy', None)], {'tokens': 11})),
    evaluate=evaluate,
    checkpointer=types.SimpleNamespace(check=list, check_metrics=sorted),
    writer=types.SimpleNamespace(write=lambda *row: rows.append(row)),
    timer=timeline.Timeline({'update': 'devices', 'sample': 'devices'}),
    meta={},
    on_step_begin=id,
    forbid_compiles=list,
    check_first_step=id,
    stop_profiler=list,
    wait_for_update=wait,
    eval_every=3,
  )
  stage.timer.watch = lambda phase, done: None
  monkeypatch.setattr(loop._Progress, 'save', lambda self, step: None)
  loop.run_stage(stage, 0, types.SimpleNamespace(reached=lambda: False))
  found = [(split, step, row['time/step']) for step, split, row, *_ in rows]
  assert [took for split, _, took in found if split == 'eval'] == [5, 5, 5, 5]
  assert all(10 <= took <= 12 for split, _, took in found if split == 'train'), found
  assert stage.timer.doing() == 'x 7/7 (0 s)'


@pytest.mark.parametrize(
  'start, told_in, metrics, expected',
  [
    (0, 9, {}, 'eval 0, eval 2, save 2, eval 4, save 4, eval 5, save 5'),
    (0, 2, {}, 'eval 0, save 2'),  # told to stop in the step, and there may be no time for an evaluation
    (2, 9, {}, 'eval 2, rows on disk, metrics of 2, eval 4, save 4, eval 5, save 5'),
    (2, 9, {'loss': 1.0}, 'eval 4, save 4, eval 5, save 5'),
    (2, 5, {'loss': 1.0}, 'eval 4, save 4, save 5'),
    (5, 9, {}, 'eval 5, rows on disk, metrics of 5'),  # told to stop in the last step
  ],
)
def test_a_run_told_to_stop_saves_before_it_evaluates(start, told_in, metrics, expected, monkeypatch):
  done, step = [], [start]

  def evaluate(run, step):
    done.append(f'eval {step}')
    run.evaluated = {step: {'loss': 2.0}}

  monkeypatch.setattr(loop._Progress, 'evaluate', evaluate)
  monkeypatch.setattr(loop._Progress, 'save', lambda self, step: done.append(f'save {step}'))
  monkeypatch.setattr(loop._Progress, 'log_pending', lambda self: None)
  stage = loop.Stage(
    name='x',
    steps=5,
    roles=types.SimpleNamespace(trainable={'policy': types.SimpleNamespace(update=lambda batch: {})}),
    stream=itertools.repeat(Item([('policy', None)], {'tokens': 11})),
    evaluate=max,
    checkpointer=types.SimpleNamespace(
      check=list,
      wait=lambda for_all: None,
      metrics=lambda step: metrics,
      add_metrics=lambda step, added: done.append(f'metrics of {step}' if added == {'loss': 2.0} else added),
    ),
    writer=types.SimpleNamespace(flush=lambda: done.append('rows on disk')),
    timer=timeline.Timeline({'update': 'devices', 'sample': 'devices'}),
    meta={},
    on_step_begin=lambda n: step.append(n),
    forbid_compiles=list,
    check_first_step=id,
    stop_profiler=None,
    wait_for_update=False,
    eval_every=2,
    save_every=2,
  )
  stage.timer.watch = lambda phase, done: None

  def leave(name, saved):
    raise Preempted(saved)

  stop = types.SimpleNamespace(reached=lambda: step[-1] >= told_in, leave=leave)
  with pytest.raises(Preempted) if told_in <= 5 else contextlib.nullcontext():
    loop.run_stage(stage, start, stop)
  assert ', '.join(done) == expected
