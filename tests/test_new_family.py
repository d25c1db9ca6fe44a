"""The walkthrough "Adding a family" of docs/models.md: its two blocks add a model family that passes all tests."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

CLONE = pathlib.Path(__file__).resolve().parents[1]
FAMILIES, CASES = 'jaxpost/formats/families.py', 'tests/test_families.py'


def blocks():
  """Returns (the entry of the table of families, the case for its tests), as the docs print them."""
  page = (CLONE / 'docs/models.md').read_text('utf-8')
  entry, case = re.findall(r'```python\n(.*?)```', page.split('## Adding a family')[1], re.S)
  return entry, case


def add(folder, file, table, block):
  """Inserts a block as the first entry of a table in a file."""
  path = folder / file
  text = path.read_text('utf-8')
  assert text.count(f'\n{table} = {{\n') == 1
  path.write_text(text.replace(f'\n{table} = {{\n', f'\n{table} = {{\n{block}'), 'utf-8')


@pytest.fixture
def copy(tmp_path):
  """A folder with a copy of the sources and of the tests of families."""
  shutil.copytree(CLONE / 'jaxpost', tmp_path / 'jaxpost', ignore=shutil.ignore_patterns('__pycache__'))
  (tmp_path / 'tests').mkdir()
  for name in 'conftest.py', 'slow.py', 'slow.txt', 'test_families.py', 'tiny.py':
    shutil.copy(CLONE / 'tests' / name, tmp_path / 'tests')
  return tmp_path


def run(copy, *args):
  return subprocess.run(
    [sys.executable, *args],
    cwd=copy,
    text=True,
    capture_output=True,
    timeout=600,
    env=os.environ | {'PYTHONPATH': f'{copy}:{copy}/tests', 'PYTEST_ADDOPTS': ''},
  )


MEASURE = """
import json, pathlib, sys
import jaxpost, test_families as families
folder = pathlib.Path('model')
network = families.make(sys.argv[1], folder)
print(json.dumps(dict(
    source=jaxpost.__file__, config=json.loads(
        (folder / 'config.json').read_text())['model_type'],
    logits=families.logit_error(folder, network))))
"""


@pytest.mark.ci
def test_documented_blocks_add_a_family(copy):
  pytest.importorskip('torch')
  entry, case = blocks()
  name = re.match(r"\s*'(\w+)': Family\(", entry)[1]
  assert len(entry.splitlines()) <= 22 and case.startswith(f"'{name}': (")
  sources = ''.join(p.read_text('utf-8') for p in (CLONE / 'jaxpost').rglob('*.py'))
  assert name not in sources.lower()  # the sources do not know the family yet
  add(copy, CASES, 'CASES', case)
  without_entry = run(copy, '-c', MEASURE, name)
  assert f"model_type '{name}' is not supported" in without_entry.stderr
  add(copy, FAMILIES, 'FAMILIES', entry)
  with_entry = run(copy, '-c', MEASURE, name)
  assert with_entry.returncode == 0, with_entry.stderr[-3000:]
  measured = json.loads(with_entry.stdout.splitlines()[-1])
  assert measured['source'].startswith(str(copy)) and measured['config'] == name
  assert 0 < measured['logits'] <= 3e-5
  # The family passes all tests of families.
  done = run(copy, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/test_families.py', '-k', name)
  passed = re.search(r'^(\d+) passed, \d+ deselected', done.stdout, re.M)
  assert passed and int(passed[1]) >= 5, done.stdout[-3000:]
