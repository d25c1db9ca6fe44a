"""`monitor.timeline` and `monitor.profile`: times of steps and phases, profiler traces; and the order at a stop."""

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


def test_trace_starts_and_stops_at_the_configured_steps(monkeypatch, tmp_path, caplog):
  calls = []
  monkeypatch.setattr(timeline.jax.profiler, 'start_trace', lambda folder: calls.append('start'))
  monkeypatch.setattr(timeline.jax.profiler, 'stop_trace', lambda: calls.append('stop'))
  for first, last, begun, expected in (
    (2, 9, 1, {2: 'start', 5: 'stop'}),
    (2, 9, 4, {4: 'start', 5: 'stop'}),  # resumed inside of the traced steps
    (8, 9, 1, {8: 'start', 9: 'stop'}),  # the work after the last step is not traced
    (9, 9, 1, {9: 'start'}),  # unless there is no other step to trace
    (2, 9, 6, {}),
  ):
    trace = profile.Trace(tmp_path, first, 3, last)
    actual = {}
    for step in range(begun, last + 1):
      calls.clear()
      trace.at(step)
      if calls:
        (actual[step],) = calls
    assert actual == expected, (first, last, begun)
    assert bool(caplog.messages) == (begun > first and not expected), (first, last, begun)


def test_an_error_leaves_no_trace_open(monkeypatch, tmp_path):
  """An open trace would keep a notebook from tracing again."""

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
  timer.flush()  # a written phase still counts
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
  """A role with a simulated clock: the host dispatches an update in 1 s, and its devices then compute for 10 s."""

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
  """This includes the first step and the step after an evaluation, before which the host waits for no device."""
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
  times = [(split, step, row['time/step']) for step, split, row, *_ in rows]
  assert [seconds for split, _, seconds in times if split == 'eval'] == [5, 5, 5, 5]
  assert all(10 <= seconds <= 12 for split, _, seconds in times if split == 'train'), times
  assert stage.timer.doing() == 'x 7/7 (0 s)'


@pytest.mark.parametrize(
  'start, stopped_in, metrics, expected',
  [
    (0, 9, {}, 'eval 0, eval 2, save 2, eval 4, save 4, eval 5, save 5'),
    (0, 2, {}, 'eval 0, save 2'),  # stopped in this step, with no time for an evaluation
    (2, 9, {}, 'eval 2, rows on disk, metrics of 2, eval 4, save 4, eval 5, save 5'),
    (2, 9, {'loss': 1.0}, 'eval 4, save 4, eval 5, save 5'),
    (2, 5, {'loss': 1.0}, 'eval 4, save 4, save 5'),
    (5, 9, {}, 'eval 5, rows on disk, metrics of 5'),  # stopped in the last step
  ],
)
def test_stopped_run_saves_before_it_evaluates_and_makes_up_for_it(start, stopped_in, metrics, expected, monkeypatch):
  events, step = [], [start]

  def evaluate(run, step):
    events.append(f'eval {step}')
    run.evaluated = {step: {'loss': 2.0}}

  monkeypatch.setattr(loop._Progress, 'evaluate', evaluate)
  monkeypatch.setattr(loop._Progress, 'save', lambda self, step: events.append(f'save {step}'))
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
      add_metrics=lambda step, added: events.append(f'metrics of {step}' if added == {'loss': 2.0} else added),
    ),
    writer=types.SimpleNamespace(flush=lambda: events.append('rows on disk')),
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
  stage.timer.watch = lambda phase, events: None

  def leave(name, saved):
    raise Preempted(saved)

  stop = types.SimpleNamespace(reached=lambda: step[-1] >= stopped_in, leave=leave)
  with pytest.raises(Preempted) if stopped_in <= 5 else contextlib.nullcontext():
    loop.run_stage(stage, start, stop)
  assert ', '.join(events) == expected
