"""Dependencies: version bounds in setup.py, the tested versions in constraints/, licenses, and documented installs."""

import ast
import importlib.metadata
import pathlib
import re

import pytest
from packaging.requirements import Requirement

CLONE = pathlib.Path(__file__).resolve().parents[1]
CONSTRAINTS = sorted((CLONE / 'constraints').glob('*.txt'))
CALENDAR = ('fsspec',)  # packages whose versions are dates, so that an upper bound would say nothing
PERMISSIVE = re.compile(r'\b(MIT|BSD|0BSD|Apache|ISC|PSF|MPL-2\.0|Zlib|CC0)\b', re.I)
SUFFIXES = ('.py', '.md', '.sh', '.txt', '.yaml', '.ipynb', '.jinja')
COPYLEFT = re.compile(r'\b(A?GPL|SSPL|BUSL|proprietary|Commons Clause|CC-BY-NC)', re.I)


def core():
  """Returns the requirements of an installation without extras."""
  tree = ast.parse((CLONE / 'setup.py').read_text('utf-8'))
  (lines,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == 'CORE']
  return [Requirement(line) for line in ast.literal_eval(lines)]


def pinned(path):
  """Returns {package: version} of a constraints file."""
  rows = [line.split('==') for line in path.read_text('utf-8').splitlines() if not line.startswith('#')]
  return {name: version.strip() for name, version in rows}


def test_each_dependency_has_version_bounds():
  for requirement in core():
    operators = {x.operator for x in requirement.specifier}
    assert operators == ({'>='} if requirement.name in CALENDAR else {'>=', '<'}), requirement


@pytest.mark.parametrize('path', CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_are_within_the_bounds_of_the_dependencies(path):
  python = path.stem.rpartition('-')[2]
  versions = pinned(path)
  for requirement in core():
    if requirement.marker is None or requirement.marker.evaluate({'python_version': python}):
      name = requirement.name.lower().replace('_', '-')
      assert requirement.specifier.contains(versions[name]), requirement
  assert not versions.keys() & {'torch', 'tensorflow'}


def test_each_supported_jax_has_a_constraints_file_with_its_own_python():
  """CI takes the file that is named after its Python, and the matrix installs a Python for each file."""
  versions = [re.fullmatch(r'jax-(\d+\.\d+)-python-(\d+\.\d+)', path.stem).groups() for path in CONSTRAINTS]
  assert [jax for jax, _ in versions] == ['0.10', '0.11', '0.12']
  assert len({python for _, python in versions}) == len(versions)
  for path, (jax, _) in zip(CONSTRAINTS, versions):
    assert pinned(path)['jax'].startswith(f'{jax}.')


def license_of(name):
  """Returns the license in a package's metadata."""
  data = importlib.metadata.metadata(name)
  classified = [x for x in data.get_all('Classifier') or [] if x.startswith('License ::')]
  return ' '.join([data.get('License-Expression') or '', *classified, (data.get('License') or '')[:200]])


@pytest.mark.parametrize('name', sorted({name for path in CONSTRAINTS for name in pinned(path)}))
def test_licenses_are_permissive(name):
  """MPL-2.0 is accepted, since it covers only its own files."""
  try:
    text = license_of(name)
  except importlib.metadata.PackageNotFoundError:
    pytest.skip('is not installed with this version of jax')
  assert PERMISSIVE.search(text) and not COPYLEFT.search(text), text


def test_no_documented_command_installs_jaxpost_from_a_registry():
  """jaxpost has no release in a registry, so pip would fetch a package of this name by another author."""
  files = [p for d in ('jaxpost', 'launch', 'docs', 'configs', 'notebooks', 'tests') for p in (CLONE / d).rglob('*')]
  texts = {p: p.read_text('utf-8', 'replace') for p in [*files, CLONE / 'README.md'] if p.suffix in SUFFIXES}
  assert len(texts) > 300
  assert not [p for p, text in texts.items() if re.search(r"pip install (-\w+ )*['\"]?jaxpost\b", text)]
