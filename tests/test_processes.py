"""Runs of two real processes on CPU, joined by gloo, equal runs of one process, and fail together with one error.

A driver (`main` below) makes the same runs in one process, in two, and in two with two devices each; the tests compare
the run folders. Only a few sampled tokens may differ, because near ties are rounded differently on other layouts.
"""

import hashlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import children
import jax
import numpy as np
import pytest

from jaxpost.monitor import metrics
from jaxpost.storage.manifest import finished_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
ON_POLICY = 'grpo', 'ppo'
RUNS = 'sft', 'dpo', 'kto', *ON_POLICY
LIMIT = 600  # seconds that a process may take on a busy machine
STEPS, MIDDLE = 4, 2  # steps of a run, and the step at which it is saved on the way
# Policy and reference are equal in the first step, so that rounding decides which of two rewards is larger.
TIES = 'rewards/accuracies'
# Metrics that depend on the layout, as rows are padded to the number of devices
LAYOUT = (
  'packing_efficiency',
  'slot_occupancy',
  'tokens_per_dispatch',
  'tokens_prefilled',
  'tokens_cached',
  'reshard_bytes',
)

REWARD = """
import os

def low(prompts, completion_ids, trainer_state, **columns):
  with open(os.environ['GRADED'], 'a') as file:  # the parent is the trainer
    text = prompts[0][0]['content']
    file.write(f'{os.getppid()} {trainer_state.global_step} {text}\\n')
  return [sum(t < 64 for t in ids) / len(ids) for ids in completion_ids]
"""


def config(folder, name, **fields):
  """Returns the config of the run called `name`, as nested dicts."""
  import tiny

  task = 'generated:arithmetic:max=99,ops=+'
  base = dict(
    mesh=dict(train=os.environ.get('MESH', 'fsdp=-1')),
    train=dict(steps=STEPS, batch_size=4),
    save=dict(every=MIDDLE, keep=5),
    log=dict(every=1, samples_every=1),
    eval=dict(every=MIDDLE, size=4, data=dict(path=f'{task},split=test,size=8,correct=1')),
  )
  sampled = dict(
    algorithm=name,
    reward=f'{folder}/rewards.py:low',
    rewards=dict(env_vars=('GRADED',)),
    train=dict(row_length=0),
    rollout=dict(prompts=3, group_size=4),
    rl=dict(kl_coef=0.05),
    eval=dict(samples=2),
    save=dict(export=name == 'grpo'),
  )
  pairs = 'generated:arithmetic_pairs:max=9,size=40,split='
  special = {
    'dpo': dict(
      algorithm='dpo',
      train=dict(row_length=256),
      data=dict(path=f'{pairs}train'),
      eval=dict(data=dict(path=f'{pairs}test')),
      preference=dict(precompute_ref=True),
    )
  }
  labels = 'generated:arithmetic_labels:max=9,size=40,split='
  special['kto'] = dict(
    algorithm='kto',
    train=dict(row_length=256),
    data=dict(path=f'{labels}train'),
    eval=dict(data=dict(path=f'{labels}test')),
  )
  for name_ in ON_POLICY:
    special[name_] = sampled
  return tiny.run_config(str(folder / 'model'), **tiny.merged(tiny.merged(base, special.get(name, {})), fields))


def environment(folder, devices=1, **more):
  return children.environment(
    devices=devices, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0', GRADED=str(folder), **more
  )


def start(folder, tag, names, count=1, devices=1, driver=__file__, **more):
  """Starts `count` processes of the driver, which make the runs `names` in FOLDER/tag together; returns them."""
  address = children.free_address()
  return [
    subprocess.Popen(
      [sys.executable, driver, str(folder), tag, ','.join(names), str(rank), str(count), address],
      text=True,
      cwd=ROOT,
      env=environment(folder / f'{tag}.graded', devices, **more),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for rank in range(count)
  ]


def finish(children, code=0):
  """Waits for processes, which must end with exit code `code`; returns their (stdout, stderr)."""
  try:
    results = [child.communicate(timeout=LIMIT) for child in children]
  finally:
    for child in children:
      child.kill()
  for child, (out, err) in zip(children, results):
    assert child.returncode == code, out[-2000:] + err[-4000:]
  return results


def digest(folder, work, name):
  """Returns a digest of all bits of the parameters that a run saved at step MIDDLE."""
  from jaxpost.distributed.phases import make_layout
  from jaxpost.distributed.transfer import to_host
  from jaxpost.models import model as model_lib
  from jaxpost.stage import load_weights, model_folders

  shape = model_folders.open_folder(str(folder / 'model'), '')[1]
  params = to_host(
    load_weights.read_checkpoint(
      work / 'checkpoints' / name, MIDDLE, model_lib.build(shape), make_layout('fsdp=-1', 'train'), 'float32'
    )
  )
  return hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()


def main(folder, tag, names, rank, count, address):
  """Makes the runs `names` as process `rank` of `count`; prints {name: (steps, digest)} or the error of bad data."""
  from jaxpost import stages
  from jaxpost.distributed import cluster
  from jaxpost.errors import InputError

  folder, rank = pathlib.Path(folder), int(rank)
  if int(count) > 1:
    cluster.connect(address, int(count), rank)
  results = {}
  for name in names.split(','):
    work, run = folder / tag / name, name.rpartition('/')[2]
    if run in RUNS:
      summary = stages.run(config(folder, run), work)
      results[name] = summary[f'steps/{run}'], digest(folder, work, run)
    else:  # the name is a path of data, at which each process has another file
      os.chdir(folder / f'host{rank}')
      with pytest.raises(InputError) as caught:
        stages.run(config(folder, 'sft', data=dict(path=name)), work)
      results[name] = str(caught.value)
  print(json.dumps(results))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  import tiny

  root = tmp_path_factory.mktemp('processes')
  tiny.folder(root / 'model', num_heads=4, num_kv_heads=4)
  (root / 'rewards.py').write_text(REWARD)
  for rank in (0, 1):
    (root / f'host{rank}').mkdir()

    def row(n, answer):
      return json.dumps({'prompt': f'{n}+1=', 'completion': str(answer)}) + '\n'

    # Grain draws a shuffled index out of 20 in 1.6 ms, and one out of 600 in 0.05 ms. With 20 rows, a process on a busy
    # machine took six seconds, and its watchdog ended it before it could raise the error of the other process.
    rows = [row(n, n + 1) for n in range(600)]
    if rank:
      rows[550] = row(550, 99)
    (root / f'host{rank}' / 'other.jsonl').write_text(''.join(rows))
    (root / f'host{rank}' / 'broken.jsonl').write_text(''.join(rows[:599]) + '{' * rank + '\n')
  return root


@pytest.fixture(scope='module')
def results_of(folder):
  """Makes all runs of the driver; returns {tag: [what `main` of each process printed]}.

  four_after_one and one_after_two hold runs of one layout that go on from step MIDDLE in the other.
  """
  started = {'one': start(folder, 'one', RUNS), 'two': start(folder, 'two', (*RUNS, 'other.jsonl', 'broken.jsonl'), 2)}
  outputs = {tag: finish(children) for tag, children in started.items()}
  for origin, resumed in ('one', 'four_after_one'), ('two', 'one_after_two'):
    for name in 'sft', 'grpo':
      shutil.copytree(folder / origin / name, folder / resumed / name)
      shutil.rmtree(folder / resumed / name / 'checkpoints' / name / str(STEPS))
      (folder / resumed / name / 'summary.json').unlink()
  started = {
    'four': start(folder, 'four', ('sft', 'grpo', '../four_after_one/sft', '../four_after_one/grpo'), 2, devices=2),
    'one_after_two': start(folder, 'one_after_two', ('sft', 'grpo')),
  }
  outputs |= {tag: finish(children) for tag, children in started.items()}
  return {tag: [json.loads(out.splitlines()[-1]) for out, _ in results] for tag, results in outputs.items()}


def rows(folder, tag, name):
  return metrics.comparable_rows(folder / tag / name / 'metrics.jsonl')


def samples(folder, tag, name):
  """Returns {(step, split, prompt index, sample): row of the samples of a run}."""
  return {
    (int(file.stem), row['split'], row['prompt_index'], row['sample']): row
    for file in (folder / tag / name / 'samples' / name).glob('*.jsonl')
    for row in metrics.read_growing(file)  # str.splitlines would also split at U+0085, which a byte model may sample
  }


def check_rows(rows_a, rows_b):
  """Asserts that rows of metrics of two layouts agree: floats up to rounding, everything else exactly."""
  assert [(r['step'], r['split']) for r in rows_a] == [(r['step'], r['split']) for r in rows_b]
  for a, b in zip(rows_a, rows_b):
    # Only runs of several processes have hashes of their parameters.
    a, b = ({k: v for k, v in row.items() if not k.startswith('param_hash/')} for row in (a, b))
    assert set(a) == set(b)
    for key in set(a) - {TIES, *LAYOUT}:
      if isinstance(b[key], float):  # the absolute tolerance is for means that are 0 but for rounding
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), (a, key)
      else:
        assert a[key] == b[key], (a, key)


@pytest.mark.parametrize('tag, name', [*(('two', name) for name in RUNS), ('four', 'sft'), ('four', 'grpo')])
def test_metrics_equal_those_of_one_process(results_of, folder, tag, name):
  assert all(results[name][0] == STEPS for results in results_of[tag])
  assert results_of[tag][0][name] == results_of[tag][1][name]
  check_rows(rows(folder, tag, name), rows(folder, 'one', name))


@pytest.mark.parametrize('tag, name', [('two', 'grpo'), ('two', 'ppo'), ('four', 'grpo')])
def test_samples_and_rewards_equal_those_of_one_process(results_of, folder, tag, name):
  """Prompts are equal; at most 3 in 1,000 tokens may differ."""
  rows_by_key, expected = (samples(folder, t, name) for t in (tag, 'one'))
  assert set(rows_by_key) == set(expected)
  flips = 0
  for key, row in rows_by_key.items():
    assert row['prompt'] == expected[key]['prompt']
    if row['completion'] == expected[key]['completion']:
      assert row['reward'] == expected[key]['reward']
      assert row['components'] == expected[key]['components']
    else:
      flips += 1
  assert flips <= 0.003 * sum(row['length'] for row in expected.values())


def test_each_group_is_graded_by_one_process_only(results_of, folder):
  graded = {
    tag: [line.split(' ', 1) for line in (folder / f'{tag}.graded').read_text().splitlines()] for tag in ('one', 'two')
  }
  assert sorted(line for _, line in graded['two']) == sorted(line for _, line in graded['one'])
  shares = [sum(pid == process for pid, _ in graded['two']) for process in {pid for pid, _ in graded['two']}]
  # A step has 3 prompts, of which one process has 1 and the other 2; steps 0, 2 and 4 grade 4 held-out prompts.
  assert sorted(shares) == [len(ON_POLICY) * n for n in (STEPS * 1 + 3 * 2, STEPS * 2 + 3 * 2)]


@pytest.mark.parametrize('name', ['sft', 'grpo'])
@pytest.mark.parametrize('tag, origin', [('one_after_two', 'two'), ('four_after_one', 'one')])
def test_run_resumes_with_another_number_of_processes(results_of, folder, tag, origin, name):
  resumes = (folder / tag / name / 'resumes.jsonl').read_text().splitlines()
  assert [json.loads(line)['step'] for line in resumes] == [MIDDLE]
  if tag == 'four_after_one':
    resumed = results_of['four'][0][f'../four_after_one/{name}']
  else:
    resumed = results_of[tag][0][name]
  assert resumed == results_of[origin][0][name]  # restored bit for bit
  check_rows(rows(folder, tag, name), rows(folder, origin, name))


def test_two_processes_write_the_files_of_one(results_of, folder):
  for name in RUNS:
    files = {path.name for path in (folder / 'two' / name).iterdir()}
    assert files == {path.name for path in (folder / 'one' / name).iterdir()}
  for name in 'sft', 'grpo':
    assert finished_steps(folder / 'two' / name / 'checkpoints' / name) == [STEPS, MIDDLE]
  a, b = ((folder / tag / 'dpo' / 'cache') for tag in ('one', 'two'))
  assert [p.name for p in a.iterdir()] == [p.name for p in b.iterdir()]


def test_different_data_on_two_processes_is_refused_on_both(results_of):
  assert results_of['two'][0]['other.jsonl'] == results_of['two'][1]['other.jsonl']
  assert results_of['two'][0]['other.jsonl'].startswith(
    'config.data.path of sft: the content of other.jsonl of process 1'
  )


def test_data_error_of_one_process_ends_the_other(results_of):
  first, second = (s['broken.jsonl'] for s in results_of['two'])
  assert second.startswith('broken.jsonl:600')
  assert first == f'process 1: {second}'


def launch(folder, module, arguments, root=ROOT):
  return subprocess.Popen(
    [sys.executable, '-m', module, *arguments],
    cwd=root,
    text=True,
    env=environment(folder / 'graded'),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def refusal(folder, file, *arguments, rank_1=(), root_1=ROOT, workdir='refused'):
  """Runs two processes of launch.train, which must end with exit code 2 and the same line; returns this line.

  Args:
    rank_1: more arguments of the second process.
    root_1: folder of the code that the second process runs.
  """
  address = children.free_address()
  results = finish(
    [
      launch(
        folder,
        'launch.train',
        [
          f'--config={file}',
          f'--workdir={folder}/{workdir}',
          *arguments,
          *more,
          f'--coordinator={address}',
          '--num_processes=2',
          f'--process_id={rank}',
        ],
        root,
      )
      for rank, (more, root) in enumerate((((), ROOT), (rank_1, root_1)))
    ],
    2,
  )
  lines = []
  for _, err in results:
    assert 'Traceback' not in err
    lines += [x for x in err.splitlines() if x.startswith('jaxpost: ')]
  first, second = lines
  assert first == second
  return first


@pytest.fixture(scope='module')
def plain(folder):
  """The config file of an SFT run of one step without evaluation."""
  import tiny

  return tiny.config_file(
    folder / 'plain.py', config(folder, 'sft', train=dict(steps=1), eval=dict(data=dict(path='')))
  )


def test_different_configs_of_two_processes_are_refused_on_both(folder, plain):
  line = refusal(folder, plain, rank_1=['--config.seed=1'])
  assert 'config.seed: 0 on process 0 and 1 on process 1' in line
  assert not (folder / 'refused').exists()


def test_different_code_of_two_processes_is_refused_on_both(folder, plain):
  """Process 1 runs from a copy of the sources that differs by a comment.

  Its config differs, too, but the error names the code, from which that may come.
  """
  for package in 'jaxpost', 'launch':
    shutil.copytree(ROOT / package, folder / 'newer' / package)
  with open(folder / 'newer' / 'jaxpost' / 'losses' / 'head.py', 'a') as file:
    file.write('# newer\n')
  line = refusal(folder, plain, rank_1=['--config.seed=1'], root_1=folder / 'newer')
  assert line.startswith('jaxpost: the code of jaxpost of process 1 (')
  assert line.endswith('); install the same version everywhere')
  assert not (folder / 'refused').exists()


@pytest.mark.parametrize(
  'flag, expected',
  [
    ('mesh.train=fsdp=3', "config.mesh.train: 'fsdp=3' does not fit 2 device"),
    ('train.batch_size=3', 'config.train: the 3 rows of a micro-batch do not split over 2'),
  ],
  ids=['mesh', 'batch'],
)
def test_mesh_and_batch_that_do_not_fit_the_devices_of_both_are_refused(flag, expected, folder, plain):
  assert expected in refusal(folder, plain, f'--config.{flag}')
  assert not (folder / 'refused').exists()


def test_checkpoint_of_another_model_is_refused_on_both_processes(folder, plain):
  """The model at config.model.path has another hidden size than when the run began."""
  import tiny

  from jaxpost import stages

  model = tiny.folder(folder / 'wide', num_heads=4, num_kv_heads=4)
  stages.run(
    tiny.merged(
      config(folder, 'sft', train=dict(steps=1), eval=dict(data=dict(path=''))), dict(model=dict(path=model))
    ),
    folder / 'begun',
  )
  shutil.rmtree(model)
  tiny.folder(folder / 'wide', num_heads=4, num_kv_heads=4, hidden_size=32)
  line = refusal(folder, plain, f'--config.model.path={model}', '--config.train.steps=2', workdir='begun')
  assert ('config.model.path of sft: has hidden_size 32, in the checkpoint 16; bring it back') in line
  assert finished_steps(folder / 'begun' / 'checkpoints' / 'sft') == [1]


def test_gloo_connection_messages_are_left_out_of_the_output(capsys):
  from launch import local

  local.copy(1, io.StringIO('a\n[Gloo] Rank 1 is connected to 1 peer ranks. Expected\nb\n'), sys.stdout)
  assert capsys.readouterr().out == '[1] a\n[1] b\n'


def test_all_output_of_a_process_is_read_even_without_a_reader(tmp_path, monkeypatch, capsys):
  """Bytes that are not UTF-8 are escaped. Output is read on when stdout is closed, or the process would block."""
  from launch import local

  monkeypatch.setattr(local, '_DEVICES', types.SimpleNamespace(value=None))
  monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
  (tmp_path / 'python').write_text("#!/bin/sh\nprintf 'a\\377\\nb\\n'\n")
  (tmp_path / 'python').chmod(0o755)
  with local.start([], 0) as process:
    local.copy(0, process.stdout, sys.stdout)
  assert capsys.readouterr().out == '[0] a\\xff\n[0] b\n'
  read, write = os.pipe()
  os.close(read)
  source = io.StringIO('a\nb\n')
  with os.fdopen(write, 'w') as target:
    local.copy(0, source, target)
  assert not source.read()


def test_signal_to_one_process_stops_all_at_one_step(folder):
  import tiny

  file = tiny.config_file(
    folder / 'long.py', config(folder, 'sft', train=dict(steps=5000), save=dict(every=0), eval=dict(data=dict(path='')))
  )
  work = folder / 'stopped'
  run = launch(folder, 'launch.local', ['--processes=2', '--', f'--config={file}', f'--workdir={work}'])
  try:
    deadline, metrics_file = time.monotonic() + LIMIT, work / 'metrics.jsonl'
    while not metrics_file.exists() or metrics_file.read_text().count('\n') < 3:
      assert run.poll() is None and time.monotonic() < deadline
      time.sleep(0.1)
    children = pathlib.Path(f'/proc/{run.pid}/task/{run.pid}/children')
    os.kill(int(children.read_text().split()[1]), signal.SIGTERM)
    out, err = run.communicate(timeout=LIMIT)
  finally:
    run.send_signal(signal.SIGTERM)
    run.kill()
  assert run.returncode == 42, err
  steps = finished_steps(work / 'checkpoints' / 'sft')
  assert len(steps) == 1 and 3 <= steps[0] < 5000
  for rank in (0, 1):
    assert f'[{rank}] jaxpost: sft: told to stop, saved at step' in err
  assert rows(work, '.', '.')[-1]['step'] == steps[0]
  assert '[0] sft 1/5000' in out and '[1] sft' not in out


CHOOSES_AGAIN = """
import sys

import jax
import test_processes

from jaxpost import stages
from jaxpost.distributed import coordination
from jaxpost.hardware.chips import Chip
from jaxpost.planning import auto, machines
from jaxpost.programs.compile import TooLargeError
from jaxpost.stage import precompile


def here(devices):
  return machines.Topology('toy', 'gpu', Chip('toy', 1e12, 1e12, 1e9), (2,), owned=tuple(devices))


def check_fits(predicted, device):
  if coordination.process_index() == 1 and not refused:
    refused.append('update')
    raise TooLargeError('update', 2**30, '')


refused = []
machines.here, precompile.check_fits = here, check_fits
stages.with_meshes = lambda prepared, *_: auto.resolve(prepared, print)
test_processes.main(*sys.argv[1:])
"""


def test_processes_choose_smaller_settings_together(folder):
  """A program is too large on one of the two."""
  driver = folder / 'chooses_again.py'
  driver.write_text(CHOOSES_AGAIN)
  outputs = finish(start(folder, 'again', ['sft'], 2, driver=driver, PYTHONPATH=f'{ROOT}:{ROOT / "tests"}'))
  for out, _ in outputs:
    assert 'sft: update needs 1.0 GiB of memory; smaller settings are chosen' in out
    assert json.loads(out.splitlines()[-1])['sft'][0] == STEPS
  (plan,) = json.loads((folder / 'again/sft/plan.json').read_text())
  assert plan['choices']['model.remat'].startswith('full (memory: else '), plan['choices']


if __name__ == '__main__':
  main(*sys.argv[1:])
