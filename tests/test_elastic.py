"""Four processes make the same run as one, and other numbers of processes and meshes resume it.

Uses the driver, the runs and the tolerances of test_processes.py: counts, rewards and data order are equal,
floats are within 1e-5, and restored state is equal bit for bit.
"""

import json
import shutil

import pytest
import test_processes as real

folder = real.folder  # the fixture

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def one(folder):
  """{name: (steps, digest of the state)} of the runs of one process."""
  ((out, _),) = real.finish(real.start(folder, 'one', real.RUNS))
  return json.loads(out.splitlines()[-1])


@pytest.fixture(scope='module')
def four(folder, one):
  """The same as `one` from each of four processes."""
  return [json.loads(out.splitlines()[-1]) for out, _ in real.finish(real.start(folder, 'quad', real.RUNS, 4))]


@pytest.mark.nightly
@pytest.mark.parametrize('name', real.RUNS)
def test_four_processes_make_the_same_run_as_one(folder, one, four, name):
  assert [result[name][0] for result in four] == [one[name][0]] * 4
  assert len({result[name][1] for result in four}) == 1
  real.check_rows(real.rows(folder, 'quad', name), real.rows(folder, 'one', name))


@pytest.mark.nightly
@pytest.mark.parametrize('name', real.ON_POLICY)
def test_four_sample_and_grade_each_prompt_once(folder, one, four, name):
  real.test_samples_and_rewards_equal_those_of_one_process(four, folder, 'quad', name)
  graded = {
    tag: sorted(line.split(' ', 1)[1] for line in (folder / f'{tag}.graded').read_text().splitlines())
    for tag in ('one', 'quad')
  }
  assert graded['one'] == graded['quad']


@pytest.mark.parametrize(
  'count, devices, mesh',
  [
    (2, 1, 'fsdp=-1'),
    (4, 1, 'data=2,fsdp=2'),
    (2, 2, 'fsdp=2,tensor=2'),
    pytest.param(1, 4, 'tensor=4', marks=pytest.mark.ci),
  ],
)
def test_every_stage_resumes_on_another_mesh_and_process_count(folder, one, count, devices, mesh):
  """The checkpoint in the middle of each run of one process is resumed on another mesh and number of processes."""
  tag = f'from_one_on_{count}x{devices}_{mesh.replace(",", "_")}'
  for name in real.RUNS:
    work = folder / tag / name
    shutil.copytree(folder / 'one' / name, work)
    shutil.rmtree(work / 'checkpoints' / name / str(real.STEPS))
    (work / 'summary.json').unlink()
  results = real.finish(real.start(folder, tag, real.RUNS, count, devices, MESH=mesh))
  for out, _ in results:
    result = json.loads(out.splitlines()[-1])
    assert {k: v[1] for k, v in result.items()} == {k: v[1] for k, v in one.items()}  # the state that was restored
  for name in real.RUNS:
    resumed = (folder / tag / name / 'resumes.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in resumed] == [real.MIDDLE]
    real.check_rows(real.rows(folder, tag, name), real.rows(folder, 'one', name))
