"""Killed at a chosen moment, a run of any method goes on to the bits of one that nothing disturbs.

The moments are lines of code and not times, so each is hit. Of two processes one dies at the moment, and the other is
killed with it.
"""

import functools
import os
import pathlib
import signal
import subprocess
import sys

import children
import pytest
import scorecard
import test_processes as real
import test_resume

from jaxpost.monitor import metrics
from jaxpost.storage.manifest import finished_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
TASK = 'generated:arithmetic:max=99,ops=+'
STEPS, EVERY = 4, 2
# (run, moment, number of processes)
CASES = [
  ('sft', 'export', 1),
  ('distill', 'evaluation', 1),
  ('gkd', 'save', 1),
  ('sft', 'step', 2),
  ('dpo', 'save', 1),
  ('dpo', 'evaluation', 1),
  ('reward_model', 'save', 1),
  ('grpo', 'start', 1),
  ('grpo', 'export', 1),
  ('ppo', 'step', 1),
  ('ppo', 'save', 1),
  ('environment', 'step', 1),
  ('lag', 'step', 1),
  ('grpo', 'save', 2),
]
REWARD = """
def remainder(completion_ids, **columns):
  return [float(sum(ids) % 7) for ids in completion_ids]
"""


def config(folder, name, processes=1):
  """Nested dicts of a run."""
  import episodes
  import tiny

  pairs = 'generated:arithmetic_pairs:max=9,size=40,split='
  paired = dict(data=dict(path=f'{pairs}train'), eval=dict(data=dict(path=f'{pairs}test')), train=dict(row_length=256))
  sampled = dict(
    algorithm=name,
    reward=f'{folder}/rewards.py:remainder',
    train=dict(row_length=0),
    rollout=dict(prompts=2, group_size=4),
    rl=dict(kl_coef=0.05),
    eval=dict(samples=2),
  )
  own = {
    'dpo': dict(algorithm='dpo', **paired),
    'reward_model': dict(algorithm='reward_model', **paired),
    'distill': dict(algorithm='distill', distill=dict(teachers=(f'{folder}/teacher',))),
    'gkd': dict(
      algorithm='gkd', distill=dict(teachers=(f'{folder}/teacher',), on_policy=0.5), train=dict(row_length=0)
    ),
    'grpo': sampled,
    'ppo': sampled,
    'lag': tiny.merged(sampled, dict(algorithm='grpo', rollout=dict(staleness=1))),
  }
  base = dict(
    train=dict(steps=STEPS, batch_size=4),
    save=dict(every=EVERY, keep=5, export=name not in ('reward_model',)),
    log=dict(every=1, samples_every=1),
    eval=dict(every=EVERY, size=4, data=dict(path=f'{TASK},split=test,size=8,correct=1')),
    mesh=dict(train='fsdp=-1'),
  )
  if name == 'environment':
    return episodes.config(f'{folder}/player', folder / 'env.py', **tiny.merged(base, dict(eval=dict(samples=2))))
  return tiny.run_config(f'{folder}/model', **tiny.merged(base, own.get(name, {})))


def main(folder, name, moment, rank, count, address, workdir):
  """Makes the run in this process; at the moment, ends it."""
  from jaxpost import loop, stages
  from jaxpost.distributed import cluster
  from jaxpost.formats import hf_export
  from jaxpost.storage import object_store

  if int(count) > 1:
    cluster.connect(address, int(count), int(rank))

  def die():
    os.kill(os.getpid(), signal.SIGKILL)

  def before(owner, attribute, when):
    inner = getattr(owner, attribute)

    @functools.wraps(inner)
    def outer(*given, **more):
      if when(*given):
        die()
      return inner(*given, **more)

    setattr(owner, attribute, outer)

  def half_a_seal(path, data):
    if pathlib.Path(path).parent.name == str(STEPS) and path.name == 'checksums.json':
      (path.parent / f'.{path.name}.half.tmp').write_bytes(data[: len(data) // 2])
      return True
    return False

  def row_of(wanted):
    return lambda writer, step, split, *given: (step, split) == wanted

  if moment == 'start':
    before(loop, 'run_stage', lambda *given: True)
  if moment == 'step' and int(rank) == int(count) - 1:  # the next step is on the devices then
    before(metrics.MetricsWriter, 'write', row_of((3, 'train')))
  if moment == 'evaluation':
    before(metrics.MetricsWriter, 'write', row_of((STEPS, 'eval')))
  if moment == 'save':
    before(object_store, 'write', half_a_seal)
  if moment == 'export':
    before(hf_export, '_write_configs', lambda *given: True)
  stages.run(config(pathlib.Path(folder), name), workdir)


def make(folder, name, moment, count, workdir):
  """Makes a run, in this process or in several; returns their exit codes."""
  if count == 1 and not moment:
    from jaxpost import stages

    stages.run(config(folder, name), workdir)
    return [0]
  address = real.free_address()
  given = dict(cwd=ROOT, env=children.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  started = [
    subprocess.Popen(
      [sys.executable, __file__, str(folder), name, moment, str(rank), str(count), address, str(workdir)], **given
    )
    for rank in range(count)
  ]
  try:
    if moment:
      first = count - 1 if moment == 'step' else 0
      _, said = started[first].communicate(timeout=real.LIMIT)
      assert started[first].returncode == -signal.SIGKILL, said
    else:
      real.finish(started)
  finally:
    for process in started:
      process.kill()
      process.communicate()
  return [process.returncode for process in started]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  import episodes
  import tiny

  root = tmp_path_factory.mktemp('kills')
  tiny.folder(root / 'model', num_heads=4, num_kv_heads=4)
  tiny.folder(root / 'teacher', hidden_size=32, num_heads=4, num_kv_heads=4)
  episodes.folder(root / 'player')
  (root / 'env.py').write_text(episodes.ENVIRONMENT)
  (root / 'rewards.py').write_text(REWARD)
  return root


@pytest.fixture(scope='module')
def undisturbed(folder):
  """undisturbed(run, number of processes) -> its folder."""

  @functools.cache
  def find(name, count):
    workdir = folder / f'{name}_{count}'
    make(folder, name, '', count, workdir)
    return workdir

  return find


# CI makes two of them, the scorecard all.
@pytest.mark.parametrize('name, moment, count', CASES if scorecard.RUNS else CASES[:2])
def test_killed_at_a_moment(name, moment, count, folder, undisturbed, tmp_path):
  expected, workdir = undisturbed(name, count), tmp_path / 'run'
  make(folder, name, moment, count, workdir)
  (stage,) = [path.name for path in (expected / 'checkpoints').iterdir()]
  saved = finished_steps(workdir / 'checkpoints' / stage)  # a save goes on during the next steps
  assert saved in {'start': [[]], 'export': [[STEPS, EVERY]]}.get(moment, [[], [EVERY]])
  assert not (workdir / 'export').exists()
  make(folder, name, '', count, workdir)
  assert metrics.comparable_rows(workdir / 'metrics.jsonl') == metrics.comparable_rows(expected / 'metrics.jsonl')
  assert test_resume.state(workdir, stage) == test_resume.state(expected, stage)
  for pattern in ('samples/*/*.jsonl', 'export/*.safetensors'):
    files = sorted(path.relative_to(expected) for path in expected.glob(pattern))
    assert files == sorted(path.relative_to(workdir) for path in workdir.glob(pattern))
    assert all((workdir / file).read_bytes() == (expected / file).read_bytes() for file in files)


if __name__ == '__main__':
  main(*sys.argv[1:])
