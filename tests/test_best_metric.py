"""`save.keep_best` names a metric of the evaluations of every stage, or no stage trains."""

import pytest
import rich.console
import tiny

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.planning import dry_run
from jaxpost.stage import algorithms, evaluate, prepare

TASK = 'generated:arithmetic{}:max=9,ops=+,size=12'
QUIET = rich.console.Console(quiet=True)


def evaluated(kind=''):
  return dict(data=dict(path=TASK.format(kind)), eval=dict(size=4, data=dict(path=TASK.format(kind))))


def test_a_name_that_a_later_stage_lacks_is_refused_before_the_first_trains(nano, tmp_path):
  raw = tiny.run_config(nano, **evaluated(), stages=('first', 'second'), save=dict(keep_best='loss'))
  raw |= dict(reward=tiny.low_share, first=dict(algorithm='sft'))
  raw['second'] = dict(algorithm='grpo', train=dict(row_length=0), eval=dict(samples=2))
  with pytest.raises(
    InputError, match="config.save.keep_best: an evaluation of grpo has no metric 'loss'; it has comp"
  ):
    stages.run(raw, tmp_path / 'run', QUIET)
  assert not (tmp_path / 'run').exists()
  with pytest.raises(InputError, match='config.save.keep_best: an evaluation of grpo'):
    dry_run.prepare_all(raw)
  raw['save']['keep_best'] = 'pass@2/low_share'
  with pytest.raises(InputError, match="config.save.keep_best: an evaluation of sft has no metric 'pass@2/low_share'"):
    stages.run(raw, tmp_path / 'run', QUIET)
  raw['first']['eval'] = dict(samples=2)
  for stage in prepare.prepare_all(raw):
    stage.close()


@pytest.mark.parametrize(
  'algorithm, kind, over',
  [
    ('sft', '', dict(reward=tiny.low_share, eval=dict(samples=3))),
    ('grpo', '', dict(reward=tiny.low_share, train=dict(row_length=0), eval=dict(samples=2))),
    ('dpo', '_pairs', {}),
    ('kto', '_labels', {}),
    ('reward_model', '_pairs', {}),
  ],
)
def test_the_known_names_are_those_of_an_evaluation(nano, tmp_path, algorithm, kind, over):
  raw = tiny.run_config(nano, **tiny.merged(evaluated(kind), dict(algorithm=algorithm, train=dict(steps=1)) | over))
  stages.run(raw, tmp_path, QUIET)
  *_, row = [row for row in metrics.read_rows(tmp_path / 'metrics.jsonl') if row['split'] == 'eval']
  method, config = next(iter(prepare.resolve_all(raw).values()))
  known = set() if method.on_policy else evaluate.metrics_of_loss(config, method)
  known |= evaluate.metrics_of_samples(config) if config.eval.samples else set()
  assert {name for name in row if name not in metrics.ROW_KEYS and not metrics.is_clock_key(name)} == known


def test_the_loss_of_every_method_on_data_has_known_names():
  for name in algorithms.ALGORITHMS:
    over = dict(distill=dict(teachers=('x',))) if name == 'distill' else {}
    method = algorithms.load_algorithm(name)
    if not method.on_policy:
      config = next(iter(prepare.resolve_all(dict(algorithm=name) | over).values()))[1]
      assert evaluate.metrics_of_loss(config, method) > {'loss'}, name
