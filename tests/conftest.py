"""Settings of all tests: CPU, no network, a compile cache, shared data.

`pytest` alone runs what ends in minutes and covers every room. `--long` runs
everything: also the tests marked `long`, and those that tests/slow.txt lists with
the seconds they took. CI=true leaves out the costliest of them (`slow.nightly`).
A test marked `core` always runs, one marked `ci` always in CI, one marked `nightly` never there.
"""

import collections
import gc
import importlib.metadata
import os
import pathlib
import signal
import sys

import pytest
import slow

CLONE = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path.home() / '.cache' / 'jaxpost' / 'test-xla'

# A GRPO run of a tiny model compiles in 5 s of CPU time instead of 14. .ci/run also
# trains and samples with all optimizations.
_FLAGS = ['--xla_backend_optimization_level=0']
if os.environ.get('JAX_PLATFORMS', 'cpu') != 'cpu':
  _FLAGS = []  # an accelerator runs what is measured on it
elif importlib.metadata.version('jaxlib').startswith('0.10.'):  # a flag that XLA does not know ends the process
  _FLAGS += ['--xla_cpu_use_fusion_emitters=false', '--xla_cpu_parallel_codegen_split_count=1']

# Before anything imports jax or transformers; subprocesses inherit them.
for _name, _value in {
  'JAX_PLATFORMS': 'cpu',
  # Programs are compiled once: most of a test's time is compilation, and many
  # tests share small programs.
  'JAX_COMPILATION_CACHE_DIR': str(CACHE),
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.05',
  'XLA_FLAGS': ' '.join(_FLAGS),
  # glibc's malloc keeps its pages, as in `jaxpost.tune_host`; xdist's workers start after this.
  'MALLOC_ARENA_MAX': '1',
  'MALLOC_MMAP_MAX_': '0',
  'MALLOC_TRIM_THRESHOLD_': str(2**31 - 1),
  'MALLOC_TOP_PAD_': str(64 << 20),
  'HF_HUB_OFFLINE': '1',
  'HF_DATASETS_OFFLINE': '1',
  'TRANSFORMERS_VERBOSITY': 'error',
  'TOKENIZERS_PARALLELISM': 'false',
  # Lowering is 7 % of the suite's time shorter without the frames that would be written into programs.
  'JAX_TRACEBACK_IN_LOCATIONS_LIMIT': '0',
}.items():
  os.environ.setdefault(_name, _value)


# A shell starts commands in the background with SIGINT ignored, and nohup with SIGHUP ignored; tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
  signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope='module')
def params(model):
  """Random parameters of the `model` of a test module."""
  import tiny  # after the environment is set

  return tiny.params(model)


def pytest_addoption(parser):
  parser.addoption('--long', action='store_true', help='also run the tests that take long')


def pytest_collection_modifyitems(config, items):
  listed, in_ci = slow.read(), os.environ.get('CI') == 'true'

  def marked(*marks):
    return {item.nodeid for item in items if any(item.get_closest_marker(mark) for mark in marks)}

  if config.getoption('--long'):
    left = set()
  elif in_ci:
    left = slow.nightly(listed) | marked('nightly')
    left -= marked('ci') | set(config.args)  # a test that the command line names runs
  else:
    left = set(listed) | marked('long', 'nightly')
  left -= marked('core')

  if deselected := [item for item in items if item.nodeid in left]:
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item.nodeid not in left]
  if in_ci or config.getoption('--long'):
    # Two workers take whole files; the longest go first, so that both end together.
    seconds = collections.Counter()
    for item in items:
      seconds[slow.file(item.nodeid)] += listed.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -seconds[slow.file(item.nodeid)])


@pytest.fixture(scope='module', autouse=True)
def _forget_programs():
  """Frees the programs of a file when it ends; kept, they slow the garbage collector for all others."""
  yield
  if 'jax' in sys.modules:
    sys.modules['jax'].clear_caches()
  gc.collect()
  gc.freeze()


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
