"""Pytest settings of all tests: the CPU backend, no network, a compile cache, shared data, and which tests run.

`pytest` alone runs tests that end within minutes and cover every package. `--long` runs
everything: also the tests marked `long`, and those that tests/slow.txt lists with their
durations in seconds. CI=true leaves out only the costliest of these (`slow.nightly`).
A test marked `core` always runs, a test marked `ci` always runs in CI, and a test marked `nightly` never does.
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

# Without XLA's optimizations, a GRPO run of a tiny model compiles in 5 s of CPU time
# instead of 14. .ci/run also trains and samples with all optimizations.
_FLAGS = ['--xla_backend_optimization_level=0']
if os.environ.get('JAX_PLATFORMS', 'cpu') != 'cpu':
  _FLAGS = []  # tests on an accelerator measure the optimized programs
elif importlib.metadata.version('jaxlib').startswith('0.10.'):  # XLA aborts the process on a flag that it does not know
  _FLAGS += ['--xla_cpu_use_fusion_emitters=false', '--xla_cpu_parallel_codegen_split_count=1']

# Set before anything imports jax or transformers. Subprocesses inherit the variables.
for _name, _value in {
  'JAX_PLATFORMS': 'cpu',
  # Most of a test's time is compilation, and many tests share small programs, which
  # are therefore compiled once and cached.
  'JAX_COMPILATION_CACHE_DIR': str(CACHE),
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.05',
  'XLA_FLAGS': ' '.join(_FLAGS),
  # glibc's malloc keeps its pages, as in `jaxpost.tune_host`. xdist's workers start after this.
  'MALLOC_ARENA_MAX': '1',
  'MALLOC_MMAP_MAX_': '0',
  'MALLOC_TRIM_THRESHOLD_': str(2**31 - 1),
  'MALLOC_TOP_PAD_': str(64 << 20),
  'HF_HUB_OFFLINE': '1',
  'HF_DATASETS_OFFLINE': '1',
  'TRANSFORMERS_VERBOSITY': 'error',
  'TOKENIZERS_PARALLELISM': 'false',
  # Without Python stack frames in the programs, lowering takes less time: 7 % of that of the suite.
  'JAX_TRACEBACK_IN_LOCATIONS_LIMIT': '0',
}.items():
  os.environ.setdefault(_name, _value)


# A shell starts background commands with SIGINT ignored, and nohup with SIGHUP ignored. Tests send both signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
  signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope='module')
def params(model):
  """Random parameters of the `model` of a test module."""
  import tiny  # imports jax, so not before the environment is set

  return tiny.params(model)


@pytest.fixture(scope='session')
def nano(tmp_path_factory):
  """The folder of a tiny model. All tests of a process read it, and none writes to it."""
  import tiny

  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def pytest_addoption(parser):
  parser.addoption('--long', action='store_true', help='also run the tests that take long')


def pytest_collection_modifyitems(config, items):
  listed, in_ci = slow.read(), os.environ.get('CI') == 'true'

  def marked(*marks):
    return {item.nodeid for item in items if any(item.get_closest_marker(mark) for mark in marks)}

  if config.getoption('--long'):
    excluded = set()
  elif in_ci:
    excluded = slow.nightly(listed) | marked('nightly')
    excluded -= marked('ci') | set(config.args)  # a test named on the command line runs
  else:
    excluded = set(listed) | marked('long', 'nightly')
  excluded -= marked('core')

  if deselected := [item for item in items if item.nodeid in excluded]:
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item.nodeid not in excluded]
  if in_ci or config.getoption('--long'):
    # Two workers take whole files. The longest files go first, so that both workers end at about the same time.
    seconds = collections.Counter()
    for item in items:
      seconds[slow.file(item.nodeid)] += listed.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -seconds[slow.file(item.nodeid)])


@pytest.fixture(scope='module', autouse=True)
def _free_programs():
  """Frees the compiled programs at the end of a test file. They would slow garbage collection for later files."""
  yield
  if 'jax' in sys.modules:
    sys.modules['jax'].clear_caches()
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def shared_data():
  """Returns a function from a name to the path of that shared data. It skips the test if the data is missing."""
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
