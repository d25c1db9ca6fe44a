"""A run of any method that is killed at a chosen moment resumes to the same bits as an undisturbed run.

The moments are lines of code and not times, so that each is hit. Of two processes, one kills itself at the moment, and
the test then kills the other.
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
  """The config of a run of `CASES`, as nested dicts."""
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
  method_fields = {
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
  return tiny.run_config(f'{folder}/model', **tiny.merged(base, method_fields.get(name, {})))


def main(folder, name, moment, rank, count, address, workdir):
  """Makes the run in this process, and kills the process at the moment."""
  from jaxpost import loop, stages
  from jaxpost.distributed import cluster
  from jaxpost.formats import hf_export
  from jaxpost.storage import object_store

  if int(count) > 1:
    cluster.connect(address, int(count), int(rank))

  def die_before(owner, attribute, when):
    """Makes the process die before a call of a function for which `when` holds."""
    inner = getattr(owner, attribute)

    @functools.wraps(inner)
    def outer(*args, **options):
      if when(*args):
        os.kill(os.getpid(), signal.SIGKILL)
      return inner(*args, **options)

    setattr(owner, attribute, outer)

  def half_a_seal(path, data):
    """Writes half of the seal of the last step under a temporary name; holds for that write only."""
    if pathlib.Path(path).parent.name == str(STEPS) and path.name == 'checksums.json':
      (path.parent / f'.{path.name}.half.tmp').write_bytes(data[: len(data) // 2])
      return True
    return False

  def row_of(step_and_split):
    return lambda writer, step, split, *args: (step, split) == step_and_split

  if moment == 'start':
    die_before(loop, 'run_stage', lambda *args: True)
  if moment == 'step' and int(rank) == int(count) - 1:  # while the devices compute the next step
    die_before(metrics.MetricsWriter, 'write', row_of((3, 'train')))
  if moment == 'evaluation':
    die_before(metrics.MetricsWriter, 'write', row_of((STEPS, 'eval')))
  if moment == 'save':
    die_before(object_store, 'write', half_a_seal)
  if moment == 'export':
    die_before(hf_export, '_write_configs', lambda *args: True)
  stages.run(config(pathlib.Path(folder), name), workdir)


def make(folder, name, moment, count, workdir):
  """Makes a run, in this process or in child processes that may be killed at a moment; returns the exit codes."""
  if count == 1 and not moment:
    from jaxpost import stages

    stages.run(config(folder, name), workdir)
    return [0]
  address = children.free_address()
  options = dict(cwd=ROOT, env=children.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  processes = [
    subprocess.Popen(
      [sys.executable, __file__, str(folder), name, moment, str(rank), str(count), address, str(workdir)], **options
    )
    for rank in range(count)
  ]
  try:
    if moment:
      dying = count - 1 if moment == 'step' else 0
      _, stderr = processes[dying].communicate(timeout=real.LIMIT)
      assert processes[dying].returncode == -signal.SIGKILL, stderr
    else:
      real.finish(processes)
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  return [process.returncode for process in processes]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The folder of the models, the environment and the reward of all runs."""
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
  """undisturbed(name, number of processes) -> the folder of a run that was not killed."""

  @functools.cache
  def find(name, count):
    workdir = folder / f'{name}_{count}'
    make(folder, name, '', count, workdir)
    return workdir

  return find


# CI kills two of these runs, the scorecard all.
@pytest.mark.parametrize('name, moment, count', CASES if scorecard.RUNS else CASES[:2])
def test_run_killed_at_a_line_of_code_resumes_bitwise(name, moment, count, folder, undisturbed, tmp_path):
  expected, workdir = undisturbed(name, count), tmp_path / 'run'
  make(folder, name, moment, count, workdir)
  (stage,) = [path.name for path in (expected / 'checkpoints').iterdir()]
  saved = finished_steps(workdir / 'checkpoints' / stage)  # a save may still be in progress during the next steps
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
