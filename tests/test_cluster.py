"""Connecting processes (`jaxpost.distributed.cluster`): clusters that JAX detects, Pathways, and unknown clusters."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = """
import json
from jaxpost.distributed import channel as channels, cluster, coordination
cluster.connect(init_s=60)
me = coordination.process_index()
channel, other = channels.Channel(), channels.Channel()
joined = [channel.join(b'ab'[me : me + 1] * n).decode() for n in (1, 3, 0, 2)]
try:
  if me:
    other.closed.set()
    other.join(b'alone')
except channels.Closed:
  joined.append('closed')
print(json.dumps([coordination.all_gather([me, coordination.process_count()]), coordination.all_gather(joined)]))
"""
# Environment variables that the launchers of these clusters set; jax/_src/clusters reads them.
CLUSTERS = {
  'slurm': lambda rank, job: dict(
    SLURM_JOB_ID=str(job),
    SLURM_STEP_NODELIST='localhost',
    SLURM_NTASKS='2',
    SLURM_PROCID=str(rank),
    SLURM_LOCALID=str(rank),
    SLURM_STEP_NUM_NODES='1',
  ),
  'ompi': lambda rank, job: dict(
    OMPI_MCA_orte_hnp_uri=f'{job}.0;tcp://127.0.0.1:40000',
    OMPI_COMM_WORLD_SIZE='2',
    OMPI_COMM_WORLD_RANK=str(rank),
    OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
  ),
}


def start_python(code, **env):
  return subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', **env},
  )


@pytest.mark.parametrize('name', CLUSTERS)
def test_two_processes_of_a_known_cluster_connect(name):
  job = random.randrange(10**6)  # the port is derived from the job id
  children = [start_python(CODE, **CLUSTERS[name](rank, job)) for rank in (0, 1)]
  for child in children:
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err[-2000:]
    joined = ['ab', 'aaabbb', '', 'aabb']
    assert json.loads(out) == [[[0, 2], [1, 2]], [joined, [*joined, 'closed']]]


def test_unknown_cluster_prints_one_line_with_the_flags_to_set():
  done = subprocess.run(
    [sys.executable, '-m', 'launch.train', '--distributed', '--config=configs/quickstart.py', '--workdir=/no/where'],
    cwd=ROOT,
    text=True,
    capture_output=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 2 and 'Traceback' not in done.stderr
  assert '--coordinator=HOST:PORT, --num_processes' in done.stderr


@pytest.mark.parametrize('installed', [True, False])
def test_pathways_is_initialized_or_its_package_named(installed, tmp_path):
  """One process drives all hosts, so no coordinator is needed."""
  code = 'from jaxpost.distributed import cluster\ncluster.connect()\nprint("on")'
  if installed:
    (tmp_path / 'pathwaysutils.py').write_text('def initialize():\n  print("Pathways")\n')
  child = start_python(code, JAX_PLATFORMS='proxy,cpu', PYTHONPATH=f'{tmp_path}:{ROOT}')
  out, err = child.communicate(timeout=300)
  if installed:
    assert out.split() == ['Pathways', 'on'], err
  else:
    assert 'InputError' in err and 'pip install pathwaysutils' in err
