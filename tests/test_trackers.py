"""Trackers (`monitor.trackers`) get metrics, samples and the report; one that fails is left out and the run goes on."""

import functools
import importlib.util
import logging
import re
import shutil
import sys
import types

import pytest
import rich.console
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.monitor import metrics, trackers
from jaxpost.stage.schema import LogSection

QUIET = rich.console.Console(quiet=True)


class Fake(types.ModuleType):
  """A package whose functions record their calls; those in `fails` raise."""

  def __init__(self, name, fails=()):
    super().__init__(name)
    self.calls, self.fails = [], fails
    self.info = types.SimpleNamespace(run_id='r1')
    self.experiments = []  # names of MLflow experiments

  def __getattr__(self, name):
    if name.startswith('__'):
      raise AttributeError(name)

    def call(*args, **options):
      if name in self.fails:
        raise ConnectionError('no route to host')
      self.calls.append((name, args, options))
      if name == 'create_experiment':
        self.experiments.append(args[0])
      return None if name == 'get_experiment_by_name' and args[0] not in self.experiments else self

    return call

  def of(self, name):
    return [(args, options) for called, args, options in self.calls if called == name]


def run(tmp_path, monkeypatch, *fakes, **options):
  """Writes metrics and samples of two stages with these packages as trackers; returns the packages."""
  for fake in fakes:
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
  log = LogSection(trackers=tuple(fake.__name__ for fake in fakes), **options)
  start = functools.partial(trackers.Trackers, log)
  with metrics.MetricsWriter(tmp_path / 'mine', tensorboard=False, trackers=start, console=QUIET) as writer:
    for stage in ('sft', 'grpo'):
      writer.start_stage(stage, 2)
      writer.write(1, 'train', {'loss': 1.0, 'kl': float('nan')})
      writer.write(2, 'eval', {'pass@1': 0.5})
      writer.samples(2, [{'split': 'train', 'prompt': 'p', 'completion': 'c', 'reward': 0.5}])
  assert len(metrics.read_rows(tmp_path / 'mine/metrics.jsonl')) == 4  # metrics are complete whatever trackers do
  return fakes


def names(calls):
  return [str(args[0]).rpartition('/')[2] for args, _ in calls]


def test_wandb_gets_metrics_samples_and_report_and_resumes(tmp_path, monkeypatch):
  (fake,) = run(tmp_path, monkeypatch, Fake('wandb'), project='p', tags=('a',), offline=True)
  ((_, settings),) = fake.of('init')
  assert settings['project'] == 'p' and settings['tags'] == ['a'] and settings['mode'] == 'offline'
  assert [args[0] for args, _ in fake.of('log')][:2] == [
    {'sft/train/loss': 1.0, 'sft/step': 1},
    {'sft/eval/pass@1': 0.5, 'sft/step': 2},
  ]
  ((_, table), *_) = fake.of('Table')
  assert table == {'columns': ['split', 'prompt', 'completion', 'reward'], 'data': [['train', 'p', 'c', 0.5]]}
  assert set(fake.of('log')[2][0][0]) == {'sft/samples', 'sft/step'}
  assert [args[0] for args, _ in fake.of('define_metric')] == ['sft/*', 'grpo/*']
  assert names(fake.of('save')) == ['2.jsonl', '2.jsonl', 'report.html']
  assert fake.calls[-1][0] == 'finish'
  (resumed,) = run(tmp_path, monkeypatch, Fake('wandb'))  # the same folder, the same run
  assert resumed.of('init')[0][1]['id'] == settings['id'] and resumed.of('init')[0][1]['resume'] == 'allow'
  shutil.rmtree(tmp_path)
  tmp_path.mkdir()
  (apart,) = run(tmp_path, monkeypatch, Fake('wandb'))  # a new folder at the same path, as on another machine
  assert apart.of('init')[0][1]['id'] != settings['id']


def test_trackio_gets_metrics_samples_and_report_and_resumes(tmp_path, monkeypatch):
  (fake,) = run(tmp_path, monkeypatch, Fake('trackio'), tags=('night', 'b'))
  ((_, settings),) = fake.of('init')
  assert settings == {'project': 'jaxpost', 'name': settings['name'], 'group': 'night', 'resume': 'allow'}
  assert re.fullmatch('mine-[0-9a-f]{8}', settings['name'])  # trackio has no run id, and merges equal names
  assert fake.of('log')[0][0][0] == {'sft/train/loss': 1.0, 'sft/step': 1}
  assert names(fake.of('save'))[-1] == 'report.html' and fake.calls[-1][0] == 'finish'
  (resumed,) = run(tmp_path, monkeypatch, Fake('trackio'))  # the same folder, the same run
  assert resumed.of('init')[0][1]['name'] == settings['name']
  (apart,) = run(tmp_path / 'other', monkeypatch, Fake('trackio'))  # another folder named `mine`
  assert apart.of('init')[0][1]['name'].startswith('mine-') and apart.of('init')[0][1]['name'] != settings['name']
  (named,) = run(tmp_path / 'named', monkeypatch, Fake('trackio'), run_name='night 3')
  assert named.of('init')[0][1]['name'].startswith('night 3-')
  monkeypatch.setenv('TRACKIO_SPACE_ID', 'a/b')
  with pytest.raises(InputError, match='offline.*TRACKIO_SPACE_ID'):
    run(tmp_path, monkeypatch, Fake('trackio'), offline=True)


def test_mlflow_gets_metrics_samples_and_report_and_resumes(tmp_path, monkeypatch):
  (fake,) = run(tmp_path, monkeypatch, Fake('mlflow'), offline=True, run_name='first')
  assert fake.of('set_tracking_uri')[0][0] == (f'sqlite:///{tmp_path}/mine/mlflow.db',)
  assert fake.of('start_run')[0][1] == {'run_id': None, 'run_name': 'first', 'tags': None}
  assert fake.of('log_metrics')[1] == (({'sft/eval/pass_at_1': 0.5, 'sft/step': 2},), {'step': 2})
  assert [args[1] for args, _ in fake.of('log_artifact')] == ['samples/sft', 'samples/grpo', None]
  files = (tmp_path / 'mine/mlruns').as_uri()  # not in the folder from which the run was started
  assert fake.of('create_experiment') == [(('jaxpost',), {'artifact_location': files})]
  run(tmp_path, monkeypatch, fake, offline=True)
  assert len(fake.of('create_experiment')) == 1  # MLflow refuses a name that exists
  (online,) = run(tmp_path, monkeypatch, Fake('mlflow'))
  assert online.of('start_run')[0][1]['run_id'] == 'r1'
  assert not online.of('set_tracking_uri') and not online.of('create_experiment')  # the server chooses the place


def test_tensorboard_has_the_newest_samples(tmp_path):
  """It has the newest eight samples, in which line breaks of texts remain line breaks."""
  with metrics.MetricsWriter(tmp_path, console=QUIET) as writer:
    writer.start_stage('grpo', 1)
    old = {'split': 'train', 'prompt': 'old', 'completion': 'o', 'reward': 1.0}
    writer.samples(3, [old] + [{'split': 'eval', 'prompt': 'one *and*\n\ntwo', 'completion': '', 'reward': 0.25}] * 8)
    writer.samples(4, [])
  (file,) = (tmp_path / 'tensorboard/grpo').iterdir()
  events = file.read_bytes()
  assert b'grpo/samples' in events and b'old' not in events
  assert b'      "prompt": "one *and*\n    \n    two",\n' in events and b'"reward": 0.25' in events


@pytest.mark.parametrize('fails', ['init', 'log', 'save', 'finish'])
def test_a_failing_tracker_is_left_out(fails, tmp_path, monkeypatch, caplog):
  with caplog.at_level(logging.WARNING):
    bad, good = run(tmp_path, monkeypatch, Fake('wandb', (fails,)), Fake('mlflow'))
  assert len(good.of('log_metrics')) == 4 and good.of('end_run')
  (warning,) = [r.getMessage() for r in caplog.records]
  assert warning.startswith('wandb failed at') and 'no route to host' in warning
  assert len(bad.of('log')) == {'init': 0, 'log': 0, 'save': 3, 'finish': 6}[fails]


def test_a_report_that_fails_does_not_leave_a_tracker_open(tmp_path, monkeypatch):
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'plan.json').write_text('no JSON')
  (fake,) = run(tmp_path, monkeypatch, Fake('wandb'))
  assert fake.calls[-1][0] == 'finish' and 'report.html' not in names(fake.of('save'))


@pytest.mark.parametrize('name', trackers.TRACKERS)
def test_missing_tracker_package_is_refused_before_the_run(name, tmp_path, monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda package: None if package == name else find_spec(package))
  with pytest.raises(InputError, match=re.escape(f"pip install -e '.[{name}]'")):
    jaxpost.run(tiny.run_config('nowhere', log=dict(trackers=(name,))), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_config_selects_trackers(tmp_path, monkeypatch):
  """`log.trackers` lists the packages; unknown names are refused."""
  from jaxpost.stage import config

  monkeypatch.setitem(sys.modules, 'mlflow', fake := Fake('mlflow'))
  (chosen,) = config.parse({'log': {'trackers': ('mlflow',), 'project': 'p', 'offline': True}}).values()
  trackers.Trackers(chosen.log, tmp_path)
  assert fake.of('set_experiment')[0][0] == ('p',)
  with pytest.raises(InputError, match="did you mean 'mlflow'"):
    config.parse({'log': {'trackers': ('mlfow',)}})
