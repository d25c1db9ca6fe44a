"""config.rollout.staleness and mesh.rollout_devices: sampling ahead of training, on devices of its own.

A driver on eight virtual devices (`main` below) makes the runs, and the tests compare their results bit for bit.
`by_hand` defines a lag of sampling with phases that wait for each other.
"""

import hashlib
import json
import pathlib
import shutil
import sys
import types

import children
import pytest

import jaxpost
from jaxpost.errors import InputError

STEPS = 5
# name of a run: (config.mesh, config.rollout)
RUNS = {
  'sync': (dict(train='fsdp=4', rollout='data=2,tensor=2'), dict()),
  'one': (dict(train='fsdp=4', rollout='data=2,tensor=2'), dict(staleness=1)),
  'three': (dict(train='fsdp=2', score_devices=2, rollout='data=-1'), dict(staleness=3)),
  'swap': (dict(train='fsdp=4', rollout='data=-1'), dict(staleness=2, inflight_update_blocks=2)),
  'same devices': (dict(train='fsdp=8', rollout='data=-1', rollout_devices=0), dict(staleness=1)),
  'rounds': (dict(train='fsdp=4', rollout='data=-1'), dict(staleness=2)),
}


def config(folder, name):
  import tiny

  mesh, rollout = RUNS[name]
  return tiny.grpo_config(
    f'{folder}/model',
    mesh=dict(rollout_devices=4) | mesh,
    rollout=dict(block=2, max_new_tokens=8, **rollout),
    rl=dict(kl_coef=0.01, dynamic_sampling=3 * (name == 'rounds')),
    train=dict(steps=STEPS),
    save=dict(every=2, keep=9),
    optim=dict(lr=1e-2),
    eval=dict(
      every=2, samples=2, size=4, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=8,correct=1')
    ),
  )


@pytest.fixture(scope='module')
def results(tmp_path_factory):
  """{name of a run: results}, as `main` prints them."""
  import tiny

  folder = tmp_path_factory.mktemp('ahead')
  tiny.folder(folder / 'model', num_heads=4, num_kv_heads=4)
  variables = dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0')
  return children.printed(__file__, str(folder), devices=8, timeout=600, **variables)


@pytest.mark.parametrize('name', ['sync', 'one', 'three', 'same devices'])
def test_stream_with_a_lag_equals_phases_by_hand(results, name):
  """The final weights and every sampled token are equal; the run with lag 0 is synchronous."""
  assert results[name]['stream'] == results[name]['by hand']


def test_lag_of_one_step_differs_from_no_lag(results):
  assert results['sync']['stream'] != results['one']['stream']


@pytest.mark.parametrize('name', RUNS)
def test_run_that_samples_ahead_resumes_bit_for_bit(results, name):
  """Evaluations in between leave the sampler its weights, and nothing is sampled twice."""
  rows, resumed = results[name]['rows'], results[name]['resumed']
  assert [r['step'] for r in rows if r['split'] == 'train'] == [*range(1, STEPS + 1)]
  assert resumed == rows
  assert results[name]['params'] == results[name]['resumed params']


@pytest.mark.parametrize('name', ['one', 'three', 'swap'])
def test_reported_staleness_is_that_of_the_config(results, name):
  lag = RUNS[name][1]['staleness']
  rows = [r for r in results[name]['rows'] if r['split'] == 'train']
  assert [r['staleness/max'] for r in rows] == [min(lag, step) for step in range(STEPS)]
  if name != 'swap':
    assert all(r['staleness/mean'] == r['staleness/max'] for r in rows)
  else:  # weights are swapped after two blocks of a rollout, so that its first tokens are of older weights
    assert all(r['staleness/max'] - 1 < r['staleness/mean'] < r['staleness/max'] for r in rows[2:])
  assert rows[-1]['importance_weight'] != 1


def test_inflight_update_swaps_the_weights_of_later_tokens(results):
  """All eight tokens have the older version, or the last four have the newer one."""
  for step, versions in enumerate(results['swap']['versions']):
    old, new = max(0, step - 2), max(0, step - 1)
    assert versions in ([[old]] * 8, [[old]] * 4 + [[new]] * 4)
  assert [[0]] * 4 + [[1]] * 4 in results['swap']['versions']


def test_timeline_is_in_metrics_and_in_a_trace_file(results):
  """Busy times of devices are in each row of metrics, and the spans of devices and threads in a file for Perfetto."""
  for row in results['one']['times'][1:]:
    busy = {k: row[f'time/busy/{k}'] for k in ('train', 'rollout', 'both')}
    assert 0 <= busy['both'] <= min(busy['train'], busy['rollout'])
    assert max(busy.values()) <= row['time/step'] * 1.001
    assert busy['train'] > 0
  assert sum(r['time/busy/rollout'] for r in results['one']['times']) > 0
  events = results['one']['events']
  lanes = {(e['pid'], e['tid']): e['args']['name'] for e in events if e['name'] == 'thread_name'}
  assert set(lanes.values()) == {'host', 'train', 'rollout', 'weights'}
  spans = {}
  for e in events:
    if e['ph'] == 'X':
      spans.setdefault(lanes[e['pid'], e['tid']], []).append((e['ts'], e['ts'] + e['dur'], e['name']))
  names = {lane: {name for *_, name in x} for lane, x in spans.items()}
  assert names['train'] == {'score', 'update'}
  assert names['rollout'] == {'sample'} and names['weights'] == {'reshard'}
  assert names['host'] >= {'sample', 'update', 'reward', 'data', 'wait'}
  assert [x[2] for x in sorted(spans['train'])].count('update') == STEPS
  for lane in spans.values():  # the spans of a lane do not overlap
    for (_, end, _), (start, *_) in zip(sorted(lane), sorted(lane)[1:]):
      assert start >= end - 2  # microseconds, rounded


class Device(types.SimpleNamespace):
  __hash__ = object.__hash__


def test_row_length_that_the_context_axis_does_not_divide_is_refused():
  from jaxpost.distributed import phases
  from jaxpost.stage import schema

  devices = [Device(platform='cpu', process_index=0, id=i) for i in range(4)]
  with pytest.raises(InputError, match='row_length: 34 is no multiple of the context=4'):
    phases.make_layouts(schema.MeshSection(train='context=4'), 34, devices)


def test_training_devices_that_are_no_multiple_of_a_rollout_replica_are_refused():
  from jaxpost.distributed import bridge, phases
  from jaxpost.stage import schema

  devices = [Device(platform='cpu', process_index=0, id=i) for i in range(8)]
  layouts = phases.make_layouts(schema.MeshSection(train='fsdp=5', rollout='tensor=3', rollout_devices=3), 32, devices)
  with pytest.raises(InputError, match='weights are split over 3'):
    bridge.make_bridge(layouts['train'], layouts['rollout'])


def digest(tree):
  import jax
  import numpy as np

  return hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


def by_hand(config_dict):
  """Returns digests of the weights and tokens of a run whose phases wait for each other."""
  import jax
  import numpy as np

  policy, stream = jaxpost.policy_and_stream(config_dict)
  config_, lag, completions = stream.config, config_dict['rollout']['staleness'], []

  def params_on_host():
    return jax.tree.map(np.array, policy.params)

  def placed(tree):
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tree, policy.params)

  weights_by_version = [params_on_host()]  # the weights after each update
  for step in range(STEPS):
    version = max(0, step - lag)
    old = types.SimpleNamespace(params=placed(weights_by_version[version]))
    stream.engine.load(old.params, version)
    rollout = stream.sampler(next(stream.prompts)[0], config_.rollout.group_size, step)
    stream.engine.unload()
    completions.append(rollout.completions)
    pending = stream.grader.submit(rollout)
    scores = stream.scorer.fetch(stream.scorer.start(rollout))
    experience = stream.make_experience(pending.result(scores.reward_model), scores)
    updates = stream.make_batches(experience, stream.algorithm.credit(experience, config_))
    jax.block_until_ready([policy.update(batch) for _, batch in updates])
    stream.step += 1
    weights_by_version.append(params_on_host())
  stream.close()
  return digest(weights_by_version[-1]), digest(completions)


def by_stream(config_dict, versions):
  """Returns the digests of `by_hand` for the controller's stream, which waits only where it must.

  Appends to `versions`, for each step, the versions of the weights that sampled each position of its completions.
  """
  policy, stream = jaxpost.policy_and_stream(config_dict)
  completions = []
  for _ in range(STEPS):
    item = next(stream)
    rollout = item.experience.rollout
    completions.append(rollout.completions)
    versions_of_step = []
    for i, column in enumerate(rollout.versions.T):
      versions_of_step.append(sorted({int(v) for v, length in zip(column, rollout.lengths) if length > i}))
    versions.append(versions_of_step)
    for _, batch in item.updates:
      policy.update(batch)
  stream.close()
  return digest(policy.params), digest(completions)


def main(folder):
  """Makes all runs, each as a stream and by hand, and once more resumed after step 2; prints {name: results}."""
  from jaxpost import stages
  from jaxpost.distributed.phases import make_layout
  from jaxpost.models import model as model_lib
  from jaxpost.monitor import metrics
  from jaxpost.stage import load_weights, model_folders

  folder, results = pathlib.Path(folder), {}
  shape = model_folders.open_folder(f'{folder}/model', '')[1]
  model, layout = model_lib.build(shape), make_layout('fsdp=-1', 'train')
  for name in RUNS:
    config_dict, versions = config(folder, name), []
    run_results = {'stream': by_stream(config_dict, versions), 'versions': versions}
    if name not in ('swap', 'rounds'):
      run_results['by hand'] = by_hand(config_dict)
    for kind, tag in ('rows', 'params'), ('resumed', 'resumed params'):
      work = folder / name / kind
      if kind == 'resumed':  # as if the run had been killed after step 2
        shutil.copytree(folder / name / 'rows', work)
        for step in 4, 5:
          shutil.rmtree(work / 'checkpoints' / 'grpo' / str(step))
        (work / 'summary.json').unlink()
      stages.run(config_dict, work)
      run_results[kind] = metrics.comparable_rows(work / 'metrics.jsonl')
      if kind == 'rows':
        run_results['times'] = [row for row in metrics.read_rows(work / 'metrics.jsonl') if row['split'] == 'train']
        run_results['events'] = json.loads((work / 'timeline' / 'grpo.json').read_text().rstrip(',\n') + ']')
      run_results[tag] = digest(
        load_weights.read_checkpoint(work / 'checkpoints' / 'grpo', STEPS, model, layout, 'float32')
      )
    results[name] = run_results
  print(json.dumps(results))


if __name__ == '__main__':
  main(*sys.argv[1:])
