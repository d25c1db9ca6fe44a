"""What every test runs under: CPU, no network, a compile cache, shared data.

`--long` (or CI=true) also runs the tests marked `long`.
"""

import os
import pathlib

import pytest

CLONE = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path.home() / '.cache' / 'jaxpost' / 'test-xla'

# Before anything imports jax or transformers; subprocesses inherit them.
for _name, _value in {
  'JAX_PLATFORMS': 'cpu',
  # Reruns find their programs here: most of a test's time is compilation.
  'JAX_COMPILATION_CACHE_DIR': str(CACHE),
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.5',
  'HF_HUB_OFFLINE': '1',
  'HF_DATASETS_OFFLINE': '1',
  'TRANSFORMERS_VERBOSITY': 'error',
  'TOKENIZERS_PARALLELISM': 'false',
}.items():
  os.environ.setdefault(_name, _value)


def pytest_addoption(parser):
  parser.addoption('--long', action='store_true', help='also run the tests marked long')


def pytest_collection_modifyitems(config, items):
  if config.getoption('--long') or os.environ.get('CI') == 'true':
    return
  long = [item for item in items if item.get_closest_marker('long')]
  if long:
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.fixture(scope='session')
def shared_data():
  """shared_data(name) -> path of that data, or the test is skipped."""
  root = pathlib.Path(os.environ.get('JAXPOST_SHARED', CLONE.parent / 'shared'))

  def find(name):
    path = root / 'data' / name
    if not path.exists():
      pytest.skip(
        f'no data {name!r}: put it at ../shared/data/{name} beside the'
        ' clone, or set JAXPOST_SHARED to the folder that holds data/'
      )
    return path

  return find
