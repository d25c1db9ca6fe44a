"""Sampling on devices of its own, and ahead of training by a fixed lag.

One driver on eight fake devices (`main` below) makes the runs; the tests
compare what they left, bit for bit. `by_hand` is what a lag means, written
down plainly: each phase waits for the one before.
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
# name -> (mesh, rollout)
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
def said(tmp_path_factory):
  import tiny

  folder = tmp_path_factory.mktemp('ahead')
  tiny.folder(folder / 'model', num_heads=4, num_kv_heads=4)
  run = children.run(__file__, str(folder), devices=8, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0', timeout=600)
  return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize('name', ['sync', 'one', 'three', 'same devices'])
def test_lag_is_what_it_says(said, name):
  """Weights and every drawn token; lag 0 is the synchronous run."""
  assert said[name]['stream'] == said[name]['by hand']


def test_lags_differ(said):
  assert said['sync']['stream'] != said['one']['stream']


@pytest.mark.parametrize('name', RUNS)
def test_resumes_to_the_bit(said, name):
  """Evaluations in between take no weights away; nothing is sampled twice."""
  rows, again = said[name]['rows'], said[name]['resumed']
  assert [r['step'] for r in rows if r['split'] == 'train'] == [*range(1, STEPS + 1)]
  assert again == rows
  assert said[name]['params'] == said[name]['resumed params']


@pytest.mark.parametrize('name', ['one', 'three', 'swap'])
def test_staleness_is_bounded(said, name):
  lag = RUNS[name][1]['staleness']
  rows = [r for r in said[name]['rows'] if r['split'] == 'train']
  assert [r['staleness/max'] for r in rows] == [min(lag, step) for step in range(STEPS)]
  if name != 'swap':
    assert all(r['staleness/mean'] == r['staleness/max'] for r in rows)
  else:  # the first two blocks of a rollout are of older weights
    assert all(r['staleness/max'] - 1 < r['staleness/mean'] < r['staleness/max'] for r in rows[2:])
  assert rows[-1]['importance_weight'] != 1


def test_versions_of_tokens(said):
  """Tokens of the first blocks, and those after the swap."""
  for step, versions in enumerate(said['swap']['versions']):
    old, new = max(0, step - 2), max(0, step - 1)
    assert versions in ([[old]] * 8, [[old]] * 4 + [[new]] * 4)
  assert [[0]] * 4 + [[1]] * 4 in said['swap']['versions']


def test_timeline(said):
  """The timeline of devices and threads is in each row of metrics, and in a file for Perfetto."""
  for row in said['one']['times'][1:]:
    busy = {k: row[f'time/busy/{k}'] for k in ('train', 'rollout', 'both')}
    assert 0 <= busy['both'] <= min(busy['train'], busy['rollout'])
    assert max(busy.values()) <= row['time/step'] * 1.001
    assert busy['train'] > 0
  assert sum(r['time/busy/rollout'] for r in said['one']['times']) > 0
  events = said['one']['events']
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
  for lane in spans.values():  # one thing at a time
    for (_, end, _), (start, *_) in zip(sorted(lane), sorted(lane)[1:]):
      assert start >= end - 2  # microseconds, rounded


class Device(types.SimpleNamespace):
  __hash__ = object.__hash__


def test_rows_that_context_does_not_split():
  from jaxpost.distributed import phases
  from jaxpost.stage import schema

  devices = [Device(platform='cpu', process_index=0, id=i) for i in range(4)]
  with pytest.raises(InputError, match='row_length: 34 is no multiple of the context=4'):
    phases.make_layouts(schema.MeshSection(train='context=4'), 34, devices)


def test_weights_that_do_not_fit_the_training_devices():
  from jaxpost.distributed import bridge, phases
  from jaxpost.stage import schema

  devices = [Device(platform='cpu', process_index=0, id=i) for i in range(8)]
  layouts = phases.make_layouts(schema.MeshSection(train='fsdp=5', rollout='tensor=3', rollout_devices=3), 32, devices)
  with pytest.raises(InputError, match='weights are split over 3'):
    bridge.make_bridge(layouts['train'], layouts['rollout'], 'config.mesh.rollout')


def digest(tree):
  import jax
  import numpy as np

  return hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


def by_hand(given):
  """Weights and tokens of a run whose phases wait for each other."""
  import jax
  import numpy as np

  policy, stream = jaxpost.policy_and_stream(given)
  config_, lag, drawn = stream.config, given['rollout']['staleness'], []

  def host():
    return jax.tree.map(np.array, policy.params)

  def placed(tree):
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tree, policy.params)

  after = [host()]  # each update
  for step in range(STEPS):
    version = max(0, step - lag)
    old = types.SimpleNamespace(params=placed(after[version]))
    stream.engine.load(old.params, version)
    rollout = stream.sampler(next(stream.prompts)[0], config_.rollout.group_size, step)
    stream.engine.unload()
    drawn.append(rollout.completions)
    pending = stream.grader.submit(rollout)
    scores = stream.scorer.fetch(stream.scorer.start(rollout))
    experience = stream.make_experience(stream.grade(pending, scores), scores)
    updates = stream.make_batches(experience, stream.algorithm.credit(experience, config_))
    jax.block_until_ready([policy.update(batch) for _, batch in updates])
    stream.step += 1
    after.append(host())
  stream.close()
  return digest(after[-1]), digest(drawn)


def by_stream(given, versions):
  """The same of the controller; nothing waits that need not."""

  policy, stream = jaxpost.policy_and_stream(given)
  drawn = []
  for _ in range(STEPS):
    item = next(stream)
    rollout = item.experience.rollout
    drawn.append(rollout.completions)
    every = [{int(v) for v, n in zip(column, rollout.lengths) if n > i} for i, column in enumerate(rollout.versions.T)]
    versions.append([sorted(x) for x in every])
    for _, batch in item.updates:
      policy.update(batch)
  stream.close()
  return digest(policy.params), digest(drawn)


def main(folder):
  from jaxpost import stages
  from jaxpost.distributed.phases import make_layout
  from jaxpost.models import model as model_lib
  from jaxpost.monitor import metrics
  from jaxpost.stage import load_weights, model_folders

  folder, said = pathlib.Path(folder), {}
  shape = model_folders.open_folder(f'{folder}/model', '')[1]
  model, layout = model_lib.build(shape), make_layout('fsdp=-1', 'train')
  for name in RUNS:
    given, versions = config(folder, name), []
    found = {'stream': by_stream(given, versions), 'versions': versions}
    if name not in ('swap', 'rounds'):
      found['by hand'] = by_hand(given)
    for what, tag in ('rows', 'params'), ('resumed', 'resumed params'):
      work = folder / name / what
      if what == 'resumed':  # killed after step 2
        shutil.copytree(folder / name / 'rows', work)
        for step in 4, 5:
          shutil.rmtree(work / 'checkpoints' / 'grpo' / str(step))
        (work / 'summary.json').unlink()
      stages.run(given, work)
      found[what] = metrics.comparable_rows(work / 'metrics.jsonl')
      if what == 'rows':
        found['times'] = [row for row in metrics.read_rows(work / 'metrics.jsonl') if row['split'] == 'train']
        found['events'] = json.loads((work / 'timeline' / 'grpo.json').read_text().rstrip(',\n') + ']')
      found[tag] = digest(load_weights.read_checkpoint(work / 'checkpoints' / 'grpo', STEPS, model, layout, 'float32'))
    said[name] = found
  print(json.dumps(said))


if __name__ == '__main__':
  main(*sys.argv[1:])
