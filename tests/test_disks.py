"""A run folder that becomes read-only, exceeds its quota or is slow: one line, an exit code, and an equal resume.

The fault is raised by an audit hook where Python opens a file below the folder for writing, or makes, renames or
removes one, and where the library waits for the disk (`object_store.sync`, where NFS reports an exceeded quota). Files
that Orbax writes in C++ are in folders that it makes in Python. test_bad_input.py has a disk that is really full.
"""

import re
import signal
import subprocess
import sys

import children
import pytest
import test_resume
import tiny

from jaxpost import stages
from jaxpost.monitor import metrics
from jaxpost.storage.manifest import finished_steps

BEGUN, STEPS = 3, 8
# The launcher with the fault sys.argv[1] below the folder sys.argv[2] from the metrics row of step BEGUN on.
FAULTY = f"""
import errno, os, sys, time
from absl import flags
from jaxpost.monitor import metrics
from jaxpost.storage import object_store

fault, folder = sys.argv.pop(1), sys.argv.pop(1)
begun, row, sync = [], metrics.MetricsWriter.write, object_store.sync
CHANGES = ('os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'os.truncate')

def write(self, step, split, values, error=''):
  row(self, step, split, values)
  if step == {BEGUN} and split == 'train':
    begun.append(step)

def fail(path):
  if fault == 'slow':
    time.sleep(0.05)
  else:
    raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), str(path))

def audit(event, given):
  changes = event in CHANGES or event == 'open' and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
  if begun and changes and fault != 'slow' and str(given[0]).startswith(folder):
    fail(given[0])

def late(path):
  if begun:
    fail(path)
  sync(path)

metrics.MetricsWriter.write = write
sys.addaudithook(audit)
if fault in ('slow', 'EDQUOT'):
  object_store.sync = late
from launch import exits, train
exits.run(train.main)
"""


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """(config, folder) of a run without a fault."""
  folder = tmp_path_factory.mktemp('disks')
  config = tiny.run_config(tiny.folder(folder / 'nano'), train=dict(steps=STEPS), save=dict(every=1), log=dict(every=1))
  stages.run(config, folder / 'run')
  return config, folder / 'run'


@pytest.mark.parametrize(
  'fault, code, message',
  [
    ('EROFS', 2, 'Read-only file system; name another path, or change its permissions'),
    ('EDQUOT', 5, 'no room on the disk, or in the quota; what was saved before is good: make room and run the same'),
    ('slow', 0, ''),
  ],
  ids=['read-only', 'quota', 'slow'],
)
def test_fault_of_run_folder_is_one_line_and_resume_is_equal(fault, code, message, undisturbed, tmp_path):
  config, expected = undisturbed
  file, workdir = tiny.config_file(tmp_path / 'config.py', config), tmp_path / 'run'
  command = [sys.executable, '-c', FAULTY, fault, str(workdir), f'--config={file}', f'--workdir={workdir}']
  options = dict(cwd=test_resume.ROOT, env=children.environment(), capture_output=True, text=True)
  done = subprocess.run(command, timeout=test_resume.LIMIT, **options)
  assert done.returncode == code != -signal.SIGKILL, done.stderr
  # Threads of Orbax may also write lines about event loops that are already closed.
  lines = [line for line in done.stderr.splitlines() if line.startswith('jaxpost: ')]
  assert len(lines) == bool(code), done.stderr
  assert all(re.search(f'jaxpost: {workdir}/.*: {message}', line) for line in lines), lines
  if code:
    rows = metrics.read_rows(workdir / 'metrics.jsonl')
    # The background save of the next step fails, and the save after it reports that.
    assert BEGUN <= rows[-1]['step'] <= BEGUN + 2
    assert 1 <= finished_steps(workdir / 'checkpoints' / 'sft')[0] <= BEGUN
    stages.run(config, workdir)
  assert metrics.comparable_rows(workdir / 'metrics.jsonl') == metrics.comparable_rows(expected / 'metrics.jsonl')
  assert test_resume.state(workdir, 'sft') == test_resume.state(expected, 'sft')
