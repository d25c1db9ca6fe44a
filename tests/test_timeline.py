"""A trace of the steps that were asked for, and of no others."""

import pytest
import tiny

from jaxpost import loop, stages
from jaxpost.monitor import timeline


def test_a_run_leaves_a_trace(tmp_path):
  model = tiny.folder(tmp_path / 'model')
  config = tiny.run_config(model, log=dict(profile_from=2, profile_steps=2), train=dict(steps=5))
  stages.run(config, tmp_path / 'run')
  traces = list((tmp_path / 'run' / 'profile' / 'sft').rglob('*.xplane.pb'))
  assert len(traces) == 1 and traces[0].stat().st_size > 1000


def test_steps_of_a_trace(monkeypatch, tmp_path):
  said = []
  monkeypatch.setattr(timeline.jax.profiler, 'start_trace', lambda folder: said.append('start'))
  monkeypatch.setattr(timeline.jax.profiler, 'stop_trace', lambda: said.append('stop'))
  for first, last, begun, expected in (
    (2, 9, 1, {2: 'start', 5: 'stop'}),
    (0, 9, 1, {}),
    (2, 9, 4, {4: 'start', 5: 'stop'}),  # resumed inside of it
    (8, 9, 1, {8: 'start', 9: 'stop'}),
    (2, 9, 6, {}),
  ):
    trace = timeline.Trace(tmp_path, first, 3, last)
    found = {}
    for step in range(begun, last + 1):
      said.clear()
      trace.at(step)
      if said:
        (found[step],) = said
    assert found == expected, (first, last, begun)


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
