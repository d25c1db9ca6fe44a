"""Marks of tests that compile for accelerators which are described, but need not be there: their compilers do."""

import importlib.util

import pytest


def _needs(package, extra):
  return pytest.mark.skipif(
    importlib.util.find_spec(package) is None, reason=f"no {package}, which compiles for these: pip install '{extra}'"
  )


GPUS = _needs('jax_cuda13_plugin', 'jax[cuda13]')
TPUS = _needs('libtpu', 'jax[tpu]')
