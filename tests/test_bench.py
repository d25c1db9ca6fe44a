"""The standard workload (`jaxpost.tools.bench`) and the scripts of benchmarks/: what they measure and how they run."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxpost.tools import bench

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain `pytest` does not add the root, which holds benchmarks/

from benchmarks import reshard, turns  # noqa: E402


def test_reshard_benchmark_moves_and_copies_weights(tmp_path):
  row = reshard.measure(bench.Options(shape='tiny', steps=2, bf16=True), str(tmp_path))
  assert row['moved_gb'] > 0 and row['shared_gb'] > 0
  assert row['gb_per_s'] > 0 and row['share_of_copy'] == pytest.approx(row['gb_per_s'] / row['copy_gb_per_s'])


def test_sample_benchmark_compares_decoding_with_the_bytes_it_reads(tmp_path):
  short = bench.run('sample', bench.Options(shape='tiny', steps=1, batch=1, new=8), tmp_path)
  assert 320 * 128 * 4 < short['decode_bytes'] < 4e6  # more than the embedding, less than 1 M float32
  long = bench.run('sample', bench.Options(shape='tiny', steps=1, batch=1, new=8, prompt=100), tmp_path)
  assert short['tokens'] == long['tokens']
  entry_bytes = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head size, bytes of a float32
  assert long['decode_bytes'] - short['decode_bytes'] == 40 * entry_bytes
  assert (
    0 < short['share_of_bandwidth'] == pytest.approx(short['decode_bytes'] / short['decode_s'] / short['bytes_per_s'])
  )


@pytest.mark.nightly  # test_scheduler.py holds what the cache saves
def test_turns_benchmark_reads_fewer_tokens_with_a_kept_cache(tmp_path):
  row = turns.measure(bench.Options(shape='tiny', steps=1, batch=4, new=4), str(tmp_path))
  assert row['kept/tokens'] == row['read/tokens'] > 0
  assert row['read/tokens_cached'] == 0 < row['kept/tokens_cached']
  assert row['kept/tokens_prefilled'] + row['kept/tokens_cached'] == (row['read/tokens_prefilled'])


def test_docstrings_of_benchmarks_name_their_command():
  for path in sorted((ROOT / 'benchmarks').glob('*.py')):
    if path.stem not in ('__init__', 'command'):
      assert f'python benchmarks/{path.name} ' in ast.get_docstring(ast.parse(path.read_text('utf-8'))), path


def test_library_and_configs_do_not_import_benchmarks():
  for path in [p for package in ('jaxpost', 'launch', 'configs') for p in (ROOT / package).rglob('*.py')]:
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      assert not (isinstance(node, ast.ImportFrom) and (node.module or '').startswith('benchmarks')), path
      assert not (isinstance(node, ast.Import) and any(x.name.startswith('benchmarks') for x in node.names)), path


@pytest.mark.long
def test_benchmark_script_runs_without_pythonpath(tmp_path):
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  command = [sys.executable, ROOT / 'benchmarks/prefill.py', '--shape=tiny', '--batch=8', '--steps=1', '--notune']
  done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=600)
  assert done.returncode == 0, done.stderr[-3000:]
  row = json.loads(done.stdout.splitlines()[-1])
  assert row['what'] == 'prefill' and row['batch'] == 8 and not row['tuned']
  assert row['share'] == pytest.approx(row['group_s'] / row['alone_s'])
