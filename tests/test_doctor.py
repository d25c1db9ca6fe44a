"""`launch.doctor` (host, devices, disks, agreement of hosts) and the slash commands of `launch.chat`."""

import collections
import io
import pathlib
import resource
import subprocess
import sys

import children
import pytest

from jaxpost.tools import chat, doctor

CLONE = pathlib.Path(__file__).resolve().parents[1]


def by_name(findings):
  return {finding.what: finding for finding in findings}


def test_doctor_examines_versions_devices_memory_and_disks(tmp_path):
  findings = by_name(doctor.examine(str(tmp_path / 'new' / 'runs')))
  assert {'Python', 'versions', 'devices', 'attention', 'host memory', 'disk of runs', 'open files'} <= findings.keys()
  assert str(tmp_path) in findings['disk of runs'].found and 'cpu' in findings['devices'].found
  assert 'jax ' in findings['versions'].found


def test_doctor_proposes_fixes_for_bad_hosts(tmp_path, monkeypatch):
  usage = collections.namedtuple('usage', 'total used free')
  monkeypatch.setattr(doctor.shutil, 'disk_usage', lambda path: usage(10, 9, 2**30))
  monkeypatch.setattr(doctor.memory, 'free_on_host', lambda: 1e9)
  monkeypatch.setattr(resource, 'getrlimit', lambda which: (256, 4096))
  monkeypatch.setattr(doctor.glob, 'glob', lambda pattern: ['/dev/nvidia0'] if 'nvidia' in pattern else [])
  findings = by_name(doctor.examine(str(tmp_path)))
  with_a_fix = {what for what, finding in findings.items() if finding.fix}
  assert with_a_fix == {'devices', 'host memory', 'disk of runs', 'disk of compiled programs', 'open files'}
  assert 'ulimit -n 4096' in findings['open files'].fix and '[cuda]' in findings['devices'].fix


def test_doctor_refuses_workdirs_that_cannot_hold_a_run(tmp_path, monkeypatch):
  file = tmp_path / 'file'
  file.touch()
  for path in (file, file / 'run'):
    assert f'{file} is a file, and a run needs a folder' in doctor._disk_of_runs(str(path)).fix
  assert 'name a folder' in doctor._disk_of_runs('').fix and not doctor._disk_of_runs(str(tmp_path / 'new')).fix
  monkeypatch.setattr('os.access', lambda path, mode: False)  # as root may write everywhere, the refusal is simulated
  assert f'{tmp_path} cannot be written' in doctor._disk_of_runs(str(tmp_path / 'new')).fix


def test_doctor_command_fails_exactly_if_it_proposes_a_fix(tmp_path):
  command = [sys.executable, '-m', 'launch.doctor', f'--workdir={tmp_path}']
  done = subprocess.run(command, cwd=CLONE, text=True, capture_output=True, timeout=100)
  assert (done.returncode == 2) == ('\nfix' in f'\n{done.stdout}'), done.stderr
  assert 'versions: jaxpost' in done.stdout


@pytest.mark.long
def test_doctor_of_two_hosts_measures_their_connection(tmp_path):
  address = children.free_address()
  command = [sys.executable, '-m', 'launch.doctor', f'--workdir={tmp_path}', f'--coordinator={address}']
  processes = [
    subprocess.Popen([*command, '--num_processes=2', f'--process_id={i}'], cwd=CLONE, text=True, stdout=subprocess.PIPE)
    for i in (0, 1)
  ]
  for process in processes:
    out = process.communicate(timeout=200)[0]
    assert 'hosts: 0: ' in out and '1 devices), 1: ' in out and 'all-reduce of 16 MiB a device: ' in out
    assert float(out.split('and back: ')[1].split(' ms')[0]) > 0


def test_doctor_names_hosts_with_other_devices_or_versions():
  facts = {'host': 'a', 'devices': 4, 'versions': {'jax': '1'}}
  assert not doctor._unlike([facts, facts | {'host': 'b'}])
  assert 'devices of process 1 are 8, and of process 0 4' in doctor._unlike([facts, facts | {'devices': 8}])
  assert 'versions of process 2' in doctor._unlike([facts, facts, facts | {'versions': {'jax': '2'}}])


def test_slash_commands_of_chat():
  out = io.StringIO()
  messages = [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'hi'}]
  assert chat.command('/reset', messages, out) == messages[:1] and chat.command('/reset', messages[1:], out) == []
  assert chat.command('/system  be kind ', messages, out) == [{'role': 'system', 'content': 'be kind'}]
  assert chat.command('/system', messages, out) == []
  assert chat.command('/exit', messages, out) is None
  assert chat.HELP not in out.getvalue()
  assert chat.command('/what', messages, out) == messages and chat.HELP in out.getvalue()
