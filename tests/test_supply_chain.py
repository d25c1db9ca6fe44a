"""The packages of an installation: bounds, tested versions, licenses."""

import ast
import importlib.metadata
import pathlib
import re

import pytest
from packaging.requirements import Requirement

CLONE = pathlib.Path(__file__).resolve().parents[1]
CONSTRAINTS = sorted((CLONE / 'constraints').glob('*.txt'))
CALENDAR = ('fsspec',)  # versions are dates: no bound says what would break
FREE = re.compile(r'\b(MIT|BSD|0BSD|Apache|ISC|PSF|MPL-2\.0|Zlib|CC0)\b', re.I)
SUFFIXES = ('.py', '.md', '.sh', '.txt', '.yaml', '.ipynb', '.jinja')
COPYLEFT = re.compile(r'\b(A?GPL|SSPL|BUSL|proprietary|Commons Clause|CC-BY-NC)', re.I)


def core():
  """The requirements of a core install."""
  tree = ast.parse((CLONE / 'setup.py').read_text('utf-8'))
  (lines,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == 'CORE']
  return [Requirement(line) for line in ast.literal_eval(lines)]


def pinned(path):
  """{name: version} of a file of constraints."""
  rows = [line.split('==') for line in path.read_text('utf-8').splitlines() if not line.startswith('#')]
  return {name: version.strip() for name, version in rows}


def test_each_dependency_has_bounds():
  for requirement in core():
    operators = {x.operator for x in requirement.specifier}
    assert operators == ({'>='} if requirement.name in CALENDAR else {'>=', '<'}), requirement


@pytest.mark.parametrize('path', CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_are_within_the_bounds(path):
  python = path.stem.rpartition('-')[2]
  found = pinned(path)
  for requirement in core():
    if requirement.marker is None or requirement.marker.evaluate({'python_version': python}):
      name = requirement.name.lower().replace('_', '-')
      assert requirement.specifier.contains(found[name]), requirement
  assert not found.keys() & {'torch', 'tensorflow'}


def test_constraints_are_of_all_versions_of_jax():
  """One file each, for a Python of its own: CI takes the file of its Python, and the matrix a Python for each file."""
  found = [re.fullmatch(r'jax-(\d+\.\d+)-python-(\d+\.\d+)', path.stem).groups() for path in CONSTRAINTS]
  assert [jax for jax, _ in found] == ['0.10', '0.11', '0.12']
  assert len({python for _, python in found}) == len(found)
  for path, (jax, _) in zip(CONSTRAINTS, found):
    assert pinned(path)['jax'].startswith(f'{jax}.')


def license_of(name):
  """Returns the license in a package's metadata."""
  data = importlib.metadata.metadata(name)
  classified = [x for x in data.get_all('Classifier') or [] if x.startswith('License ::')]
  return ' '.join([data.get('License-Expression') or '', *classified, (data.get('License') or '')[:200]])


@pytest.mark.parametrize('name', sorted({name for path in CONSTRAINTS for name in pinned(path)}))
def test_licenses_are_permissive(name):
  """MPL-2.0 covers its own files only."""
  try:
    text = license_of(name)
  except importlib.metadata.PackageNotFoundError:
    pytest.skip('is not installed with this version of jax')
  assert FREE.search(text) and not COPYLEFT.search(text), text


def test_no_line_installs_jaxpost_from_a_registry():
  """It has no release there, so pip would fetch a package of that name by another author."""
  files = [p for d in ('jaxpost', 'launch', 'docs', 'configs', 'notebooks', 'tests') for p in (CLONE / d).rglob('*')]
  texts = {p: p.read_text('utf-8', 'replace') for p in [*files, CLONE / 'README.md'] if p.suffix in SUFFIXES}
  assert len(texts) > 300
  assert not [p for p, text in texts.items() if re.search(r"pip install (-\w+ )*['\"]?jaxpost\b", text)]
