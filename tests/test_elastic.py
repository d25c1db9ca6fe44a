"""Other processes and meshes go on with a run that one process began.

With the driver, the runs and the promises of test_processes.py: counts,
rewards and data order exactly, floats to 1e-5, restored state bit for bit.
"""

import json
import shutil

import pytest
import test_processes as real

folder = real.folder  # the fixture

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def one(folder):
  """What one process says of its runs: {name: (steps, digest)}."""
  (out, _), = real.finish(real.start(folder, 'one', real.RUNS))
  return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize('count, devices, mesh', [
    (2, 2, 'fsdp=2,tensor=2')])
def test_every_stage_goes_on_elsewhere(folder, one, count, devices, mesh):
  """The middle of each run of one process, on other meshes and processes."""
  tag = f'from_one_on_{count}x{devices}_{mesh.replace(",", "_")}'
  for name in real.RUNS:
    work = folder / tag / name
    shutil.copytree(folder / 'one' / name, work)
    shutil.rmtree(work / 'checkpoints' / name / str(real.STEPS))
    (work / 'summary.json').unlink()
  results = real.finish(real.start(
      folder, tag, real.RUNS, count, devices, MESH=mesh))
  for out, _ in results:
    said = json.loads(out.splitlines()[-1])
    assert {k: v[1] for k, v in said.items()} == {
        k: v[1] for k, v in one.items()}  # the state that was restored
  for name in real.RUNS:
    resumed = (folder / tag / name / 'resumes.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in resumed] == [real.MIDDLE]
    real.check_rows(
        real.rows(folder, tag, name), real.rows(folder, 'one', name))
