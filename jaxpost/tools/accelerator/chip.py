"""Measurements of the device itself: its kind, its rates, and the correctness of its kernels."""

from __future__ import annotations

import contextlib
import functools
import platform
from typing import TYPE_CHECKING, Any

import jax

from jaxpost.hardware import chips, gpu_options, kernel_check, layer_check, memory_rate, probe
from jaxpost.matmul import Compute, compute_for
from jaxpost.models import attention_kernels, presets
from jaxpost.models.attention_kernels import AttentionShape
from jaxpost.monitor import start

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'numpy')
_PLUGINS = ('jax-cuda13-plugin', 'jax-cuda12-plugin', 'nvidia-cudnn-cu13', 'nvidia-cudnn-cu12', 'nvidia-nccl-cu13')


def versions() -> dict[str, Any]:
  """Returns installed versions and the devices of JAX."""
  device = jax.devices()[0]
  chip = chips.of_kind(device.device_kind)
  return dict(
    device=device.device_kind,
    devices=jax.device_count(),
    platform=device.platform,
    compute_capability=getattr(device, 'compute_capability', None),
    platform_version=device.client.platform_version,
    python=platform.python_version(),
    packages=start.versions((*_PACKAGES, *_PLUGINS)),
    memory_limit_bytes=(device.memory_stats() or {}).get('bytes_limit'),
    memory_of_data_sheet_bytes=chip and chip.memory,
    dtype=probe.matmul_type(),
  )


@functools.cache
def measured(size: int = 0) -> dict[str, float]:
  """Returns FLOP/s of products, and bytes/s of reads and copies of this device, measured once per process.

  Args:
    size: rows of the product, and KiB of the arrays; 0: large enough for this device.
  """
  dtype = probe.matmul_type()[0]
  return dict(
    matmul_flops=probe.matmul_rate(dtype, size),
    read_bytes_per_s=memory_rate.measure(size * 1024),
    copy_bytes_per_s=memory_rate.copy(size * 1024),
  )


def mfu(flops_per_s: float) -> float | None:
  """Returns the share that all devices together reach of their data sheet; None if there is none."""
  chip = chips.of_kind(jax.devices()[0].device_kind)
  return flops_per_s / chip.flops / jax.device_count() if chip and chip.flops else None


def rates(size: int) -> dict[str, Any]:
  """Returns `measured`, its shares of the data sheet, and the seconds of a dispatch."""
  measured_rates = measured(size)
  chip = chips.of_kind(jax.devices()[0].device_kind)
  shares = {}
  if chip and chip.flops:
    shares['matmul_of_data_sheet'] = measured_rates['matmul_flops'] / chip.flops
  if chip and chip.bandwidth:
    shares['copy_of_data_sheet'] = measured_rates['copy_bytes_per_s'] / chip.bandwidth
  return measured_rates | shares | {f'dispatch_{k}_s': v for k, v in memory_rate.dispatch().items()}


def compiler_options() -> dict[str, Any]:
  """Returns which options of runs this compiler knows, and the reason if it does not know one."""
  return dict(options=gpu_options.try_options(jax.devices()[0], gpu_options.OPTIONS))


def kernels(kernel_length: int) -> dict[str, Any]:
  """Returns the largest errors of the kernels of this platform, in the shapes of all families.

  An error is the largest difference from XLA in float32 over the largest value. Attention in training, experts
  ('PRESET experts D x F') and recurrences ('PRESET recurrence') are checked forward and backward, decoding of single
  tokens ('PRESET decode') forward. Attention is checked for each size of heads of a model, in rows without and with
  branches of a shared prompt. Shapes that are left when the time is up are in 'not_checked'.

  Args:
    kernel_length: tokens of a row.
  """
  device = jax.devices()[0]
  compute = compute_for(device.platform, probe.matmul_type()[0], 'none', triton=not chips.before_ampere(device))
  name = compute.attention
  if name not in attention_kernels.REFUSALS:
    return dict(kernel=name, errors={}, note='XLA computes attention on this platform; there is no kernel to check')
  cases, refused = _cases(compute, kernel_length)
  errors: dict[str, Any] = {}
  not_checked = dict(cases)
  with contextlib.suppress(TimeoutError):  # the time limit of this row
    for (kernel, shape), label in cases.items():
      if kernel in (layer_check.EXPERTS, layer_check.RECURRENCE):
        found = layer_check.trusted(kernel, shape, compute.dtype)
        errors[label] = found or layer_check.errors(kernel, shape, compute.dtype)
      else:
        errors[label] = kernel_check.trusted(kernel, shape, compute.dtype) or {
          str(window): kernel_check.errors(kernel, shape, compute.dtype, window) for window in shape.windows
        }
      del not_checked[kernel, shape]
  return dict(kernel=name, dtype=compute.dtype, errors=errors, refused=refused, not_checked=[*not_checked.values()])


def _cases(compute: Compute, length: int) -> tuple[dict[tuple[str, Any], str], dict[str, str]]:
  """Returns {(kernel, shape): its name in the result} and {name: why a kernel does not support it} of all presets."""
  cases: dict[tuple[str, Any], str] = {}
  refused = {}
  for branches in (False, True):
    for preset, cfg in presets.every().items():
      for heads in cfg.head_shapes:
        shape = attention_kernels.attention_shape(cfg, length, 1, heads, branches)
        label = f'{preset}{_size(cfg, shape)}' + ' branches' * branches
        if refusal := attention_kernels.refused(compute, cfg, shape):
          refused[label] = refusal
        else:
          cases.setdefault((compute.attention, shape), label)
      if branches:
        continue
      for shape in kernel_check.decoded_shapes(compute, cfg):
        cases.setdefault((kernel_check.DECODE + compute.decode_kernel, shape), f'{preset}{_size(cfg, shape)} decode')
      for matrix in layer_check.matrices(cfg) if compute.grouped_kernel else ():
        cases.setdefault((layer_check.EXPERTS, matrix), f'{preset} experts {matrix.inputs} x {matrix.outputs}')
      for heads in layer_check.heads(compute.recurrence_kernel, cfg):
        cases.setdefault((layer_check.RECURRENCE, heads), f'{preset} recurrence')
  return cases, refused


def _size(cfg: ModelConfig, shape: AttentionShape) -> str:
  """Returns the size of the heads of a shape, in words, if the model has heads of several sizes."""
  return f' heads of {shape.head_dim}' if len(cfg.head_shapes) > 1 else ''
