"""The standard workload and the scripts of benchmarks/: they measure what they say."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxpost.tools import bench

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # which a plain `pytest` does not have

from benchmarks import reshard, turns  # noqa: E402


def test_weights_are_moved_and_copied(tmp_path):
  found = reshard.measure(bench.Options(shape='tiny', steps=2, bf16=True), str(tmp_path))
  assert found['moved_gb'] > 0 and found['shared_gb'] > 0
  assert found['gb_per_s'] > 0 and found['share_of_copy'] == pytest.approx(found['gb_per_s'] / found['copy_gb_per_s'])


def test_a_step_is_held_against_what_it_reads(tmp_path):
  found = bench.run('sample', bench.Options(shape='tiny', steps=1, batch=1, new=8), tmp_path)
  assert 320 * 128 * 4 < found['decode_bytes'] < 4e6  # embedding, 0.9 M
  longer = bench.run('sample', bench.Options(shape='tiny', steps=1, batch=1, new=8, prompt=100), tmp_path)
  assert found['tokens'] == longer['tokens']
  entry = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, sizes
  assert longer['decode_bytes'] - found['decode_bytes'] == 40 * entry
  assert (
    0 < found['share_of_bandwidth'] == pytest.approx(found['decode_bytes'] / found['decode_s'] / found['bytes_per_s'])
  )


def test_turns_read_less_where_their_cache_is_kept(tmp_path):
  found = turns.measure(bench.Options(shape='tiny', steps=1, batch=4, new=4), str(tmp_path))
  assert found['kept/tokens'] == found['read/tokens'] > 0
  assert found['read/tokens_cached'] == 0 < found['kept/tokens_cached']
  assert found['kept/tokens_prefilled'] + found['kept/tokens_cached'] == (found['read/tokens_prefilled'])


def test_scripts_name_their_commands():
  for path in sorted((ROOT / 'benchmarks').glob('*.py')):
    if path.stem not in ('__init__', 'command'):
      assert f'python benchmarks/{path.name} ' in ast.get_docstring(ast.parse(path.read_text('utf-8'))), path


def test_nothing_imports_the_benchmarks():
  for path in [p for room in ('jaxpost', 'launch', 'configs') for p in (ROOT / room).rglob('*.py')]:
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      assert not (isinstance(node, ast.ImportFrom) and (node.module or '').startswith('benchmarks')), path
      assert not (isinstance(node, ast.Import) and any(x.name.startswith('benchmarks') for x in node.names)), path


@pytest.mark.long
def test_a_script_runs_from_a_clone(tmp_path):
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  command = [sys.executable, ROOT / 'benchmarks/prefill.py', '--shape=tiny', '--batch=8', '--steps=1', '--notune']
  done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=600)
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['what'] == 'prefill' and found['batch'] == 8 and not found['tuned']
  assert found['share'] == pytest.approx(found['group_s'] / found['alone_s'])
