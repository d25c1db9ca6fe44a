"""Options of XLA's compiler for GPUs. Those that XLA_FLAGS names are not set; those that XLA refuses are left out."""

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.distributed import coordination

# Collectives overlap with products, and those of a layer are combined.
PROGRAM_OPTIONS = {
  'xla_gpu_enable_latency_hiding_scheduler': True,
  'xla_gpu_all_gather_combine_threshold_bytes': 128 << 20,
  'xla_gpu_reduce_scatter_combine_threshold_bytes': 128 << 20,
  'xla_gpu_all_reduce_combine_threshold_bytes': 128 << 20,
}
# A layer whose weights are split over `fsdp` is gathered while the one before it computes. Loops are unrolled.
GATHER_OPTIONS = {'xla_gpu_enable_while_loop_double_buffering': True}
if jax.__version_info__ < (0, 11):
  GATHER_OPTIONS['xla_gpu_enable_pipelined_all_gather'] = True
else:
  GATHER_OPTIONS['xla_gpu_pipeline_all_gather'] = 'COLLECTIVE_PIPELINING_MODE_ON'
# Hosts that compile a program would share its autotuning, and wait for a host that has the program in its cache.
HOSTS_OPTIONS = {'xla_gpu_shard_autotuning': False}
DETERMINISTIC_OPTIONS = {'xla_gpu_deterministic_ops': True}
OPTIONS = PROGRAM_OPTIONS | GATHER_OPTIONS | HOSTS_OPTIONS | DETERMINISTIC_OPTIONS


def of_program(arguments: Sequence[Any], of_run: dict[str, Any]) -> dict[str, Any]:
  """Returns the options of a program that takes these arrays, with those of all programs of its run."""
  gathers = any(getattr(x.sharding, 'mesh', None) and x.sharding.mesh.shape.get('fsdp', 1) > 1 for x in arguments)
  return accepted(_unset(PROGRAM_OPTIONS | GATHER_OPTIONS if gathers else PROGRAM_OPTIONS)) | of_run


def of_run(deterministic: bool) -> dict[str, Any]:
  """Returns the options of all programs of a run; `deterministic` is `config.train.deterministic`."""
  options = HOSTS_OPTIONS if coordination.process_count() > 1 else {}
  return accepted(_unset(options | (DETERMINISTIC_OPTIONS if deterministic else {})))


def _unset(options: dict[str, Any]) -> dict[str, Any]:
  """Returns the options that XLA_FLAGS does not set."""
  flags = os.environ.get('XLA_FLAGS', '')
  return {name: value for name, value in options.items() if name not in flags}


def accepted(options: dict[str, Any]) -> dict[str, Any]:
  """Returns the options that the compiler accepts; each other one is warned about once."""
  return {name: value for name, value in options.items() if _is_accepted(name, value)}


@functools.cache
def _is_accepted(name: str, value: Any) -> bool:
  # A device of this process is asked even about the devices of a plan: the names are the same on all platforms.
  message = try_options(jax.local_devices()[0], {name: value})[name]
  if message:
    logging.warning('jax %s: compiler option %s is left out: %s', jax.__version__, name, message)
  return not message


def try_options(device: jax.Device, options: dict[str, Any]) -> dict[str, str]:
  """Returns {option: '' if the compiler of a device accepts its value, otherwise the compiler's message}."""
  shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
  lowered = jax.jit(lambda x: x + 1).lower(shape)
  out = {}
  for name, value in options.items():
    try:
      lowered.compile({name: value})
      out[name] = ''
    except jax.errors.JaxRuntimeError as e:
      out[name] = str(e).partition('\n')[0]
  return out
