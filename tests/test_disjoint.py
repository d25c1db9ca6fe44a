"""A run in which one process trains and another samples or scores has the metrics of a run in one process.

The driver (`main` below) makes GRPO runs on four devices, once all of one process ('one') and once two each of two
processes ('two'), where the weights go from host to host.
"""

import json
import pathlib
import shutil
import sys

import pytest
from test_processes import finish
from test_processes import start as start_all

from jaxpost.monitor import metrics

STEPS, MIDDLE = 4, 2
REWARD = """
def low(completion_ids, **columns):
  return [sum(t < 64 for t in ids) / len(ids) for ids in completion_ids]
"""
LAGS = {'sync': 0, 'ahead': 2}  # run -> rollout.staleness
LABELS = dict(path='generated:arithmetic_labels:max=9,size=40,split=train')
# Runs whose reference is on devices of the second process: on as many as training has, and on fewer.
SCORED = {
  'same': dict(algorithm='kto', data=LABELS, mesh=dict(score_devices=2)),
  'fewer': dict(
    mesh=dict(score_devices=1, rollout='data=1', rollout_devices=1), eval=dict(data=dict(path=''), samples=0)
  ),
}


def config(folder, name):
  import tiny

  if name == 'same':  # nothing is sampled
    base = dict(mesh=dict(train='fsdp=2'), train=dict(steps=MIDDLE, batch_size=4, row_length=128))
    return tiny.run_config(str(folder / 'model'), **tiny.merged(base, SCORED[name]))
  if name in SCORED:
    return tiny.merged(tiny.merged(config(folder, 'sync'), dict(train=dict(steps=MIDDLE))), SCORED[name])
  return tiny.run_config(
    str(folder / 'model'),
    algorithm='grpo',
    reward=f'{folder}/rewards.py:low',
    mesh=dict(train='fsdp=2', rollout='data=2', rollout_devices=2),
    train=dict(steps=STEPS, row_length=0),
    save=dict(every=MIDDLE, keep=9),
    log=dict(every=1, samples_every=1),
    rl=dict(kl_coef=0.01),
    rollout=dict(prompts=3, group_size=4, staleness=LAGS[name]),
    eval=dict(
      every=MIDDLE, samples=2, size=4, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=8,correct=1')
    ),
  )


def main(folder, tag, names, rank, count, address):
  from jaxpost import stages
  from jaxpost.distributed import cluster

  folder = pathlib.Path(folder)
  if int(count) > 1:
    cluster.connect(address, int(count), int(rank))
  summaries = {}
  for name in names.split(','):
    summaries[name] = stages.run(config(folder, name.rpartition('_')[2]), folder / tag / name)
  print(json.dumps(summaries))


def start(folder, tag, names, count, devices):
  return start_all(folder, tag, names, count, devices, driver=__file__)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  import tiny

  root = tmp_path_factory.mktemp('disjoint')
  tiny.folder(root / 'model', num_heads=4, num_kv_heads=4)
  (root / 'rewards.py').write_text(REWARD)
  finish(start(root, 'one', [*LAGS, *SCORED], 1, 4))
  finish(start(root, 'two', [*LAGS, *SCORED], 2, 2))
  for name in LAGS:  # copies that look as if killed after the checkpoint of step MIDDLE, which then resume
    again = root / 'two' / f'again_{name}'
    shutil.copytree(root / 'two' / name, again)
    shutil.rmtree(again / 'checkpoints' / 'grpo' / str(STEPS))
    (again / 'summary.json').unlink()
  finish(start(root, 'two', [f'again_{name}' for name in LAGS], 2, 2))
  return root


def rows(folder, tag, name):
  """The metrics of a run without the hashes of parameters, which depend on the mesh."""
  return [
    {k: v for k, v in row.items() if not k.startswith('param_hash/')}
    for row in metrics.comparable_rows(folder / tag / name / 'metrics.jsonl')
  ]


@pytest.mark.parametrize('name', LAGS)
def test_run_of_two_processes_equals_run_of_one(folder, name):
  assert rows(folder, 'two', name) == rows(folder, 'one', name)
  assert rows(folder, 'two', name)[-1]['step'] == STEPS


@pytest.mark.parametrize('name', SCORED)
def test_a_reference_on_another_process_scores_the_same(folder, name):
  assert rows(folder, 'two', name) == rows(folder, 'one', name)
  assert rows(folder, 'two', name)[-1]['step'] == MIDDLE


@pytest.mark.parametrize('name', LAGS)
def test_run_of_two_processes_resumes_bit_for_bit(folder, name):
  assert rows(folder, 'two', f'again_{name}') == rows(folder, 'two', name)


def test_timeline_has_lanes_of_both_processes(folder):
  events = json.loads((folder / 'two' / 'ahead' / 'timeline' / 'grpo.json').read_text().rstrip(',\n') + ']')
  lanes = {(e['pid'], e['tid']): e['args']['name'] for e in events if e['name'] == 'thread_name'}
  busy = {(e['pid'], lanes[e['pid'], e['tid']]) for e in events if e['ph'] == 'X'}
  assert {(0, 'train'), (1, 'rollout'), (1, 'weights')} <= busy
  assert (1, 'train') not in busy


if __name__ == '__main__':
  main(*sys.argv[1:])
