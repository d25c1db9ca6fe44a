"""Kernels, decoding, buffer donation and memory on a GPU or TPU.

Run them by `JAX_PLATFORMS=cuda,cpu pytest -m accelerator -n 0` (or tpu,cpu). JAXPOST_ACCELERATOR=cpu runs the parts
that a CPU supports, to show that these tests still work.
"""

import dataclasses
import os

import jax
import numpy as np
import pytest

from jaxpost.hardware import chips, kernel_check, layer_check, memory, probe
from jaxpost.matmul import compute_for
from jaxpost.models import attention_kernels, presets
from jaxpost.stage import on_policy
from jaxpost.tools import bench
from jaxpost.tools.accelerator import decoding, training, workload

pytestmark = pytest.mark.accelerator
LARGE_PRESETS = [name for name in presets.every() if not name.startswith(('tiny', 'xs'))]


@pytest.fixture(autouse=True)
def accelerator():
  platform = os.environ.get('JAXPOST_ACCELERATOR')
  if jax.default_backend() == 'cpu' and platform != 'cpu':
    pytest.skip('JAX sees no accelerator: JAX_PLATFORMS=cuda,cpu or tpu,cpu on a machine that has one')
  return jax.devices()[0]


def compute_of(accelerator):
  """Returns the settings of runs here; skips the test if no kernel computes attention."""
  compute = compute_for(
    accelerator.platform, probe.matmul_type()[0], 'none', triton=not chips.before_ampere(accelerator)
  )
  if compute.attention not in attention_kernels.REFUSALS:
    pytest.skip(f'XLA computes attention on {accelerator.platform}')
  return compute


@pytest.mark.parametrize('branches', [False, True])
@pytest.mark.parametrize('length', [512, 4096])
@pytest.mark.parametrize('preset', LARGE_PRESETS)
def test_a_kernel_agrees_with_attention_in_float32(accelerator, preset, length, branches):
  """In all sizes of heads of a model, in rows without and with branches of a shared prompt."""
  compute, cfg, refused = compute_of(accelerator), presets.every()[preset], []
  for heads in cfg.head_shapes:
    shape = attention_kernels.attention_shape(cfg, length, 1, heads, branches)
    refused.append(attention_kernels.refused(compute, cfg, shape))
    assert refused[-1] or not kernel_check.trusted(compute.attention, shape, compute.dtype), shape
  if all(refused):
    pytest.skip(f'{compute.attention} cannot do {refused[0]}')


@pytest.mark.parametrize('preset', LARGE_PRESETS)
def test_the_kernel_for_single_tokens_agrees_with_attention_in_float32(accelerator, preset):
  compute = compute_of(accelerator)
  shapes = kernel_check.decoded_shapes(compute, presets.every()[preset])
  for shape in shapes:
    assert not kernel_check.trusted(kernel_check.DECODE + compute.decode_kernel, shape, compute.dtype), shape
  if not shapes:
    pytest.skip('XLA decodes')


@pytest.mark.parametrize('preset', [name for name in LARGE_PRESETS if presets.every()[name].experts])
def test_experts_agree_with_products_in_float32(accelerator, preset):
  """This includes the matrices of LoRA adapters."""
  compute = compute_for(
    accelerator.platform, probe.matmul_type()[0], 'none', triton=not chips.before_ampere(accelerator)
  )
  if not compute.grouped_kernel:
    pytest.skip(f'XLA computes experts on {accelerator.platform} in {compute.dtype}')
  adapters = (16, 32.0, False, 'experts/gate|experts/up|experts/down')
  for matrix in layer_check.matrices(dataclasses.replace(presets.every()[preset], lora=adapters)):
    assert not layer_check.trusted(layer_check.EXPERTS, matrix, compute.dtype), matrix


@pytest.mark.parametrize('preset', [name for name in LARGE_PRESETS if presets.every()[name].state_shapes])
def test_recurrences_agree_with_chunks_in_float32(accelerator, preset):
  compute = compute_for(
    accelerator.platform, probe.matmul_type()[0], 'none', triton=not chips.before_ampere(accelerator)
  )
  if not compute.recurrence_kernel:
    pytest.skip(f'XLA computes recurrences on {accelerator.platform} in {compute.dtype}')
  for heads in layer_check.heads(compute.recurrence_kernel, presets.every()[preset]):
    assert not layer_check.trusted(layer_check.RECURRENCE, heads, compute.dtype), heads


@pytest.mark.parametrize('preset', ['xs', 'tiny_moe'])
def test_decoding_agrees_with_teacher_forcing(preset):
  """The limit is the divergence of 2e-4 that other libraries report between sampler and trainer."""
  mismatch = decoding.mismatch(preset, layers=2, contexts=(16, 300, 700), new=16)
  assert sorted(mismatch['by_context']) == ['16', '300', '700']
  for context, figures in mismatch['by_context'].items():
    assert figures['tokens'] > 0 and 0 <= figures['kl'] < 2e-4 and figures['max_difference'] < 0.1, context


def test_updates_and_blocks_write_in_place():
  cfg = workload.shape_of('xs', 2)
  config = dict(algorithm='sft', train=dict(steps=2, batch_size=2, row_length=256))
  with workload.stage(cfg, config, ('sft', workload.lengths_of(0, 256))) as running:
    stage = running.assembled()
    before = jax.tree.leaves(stage.roles.policy.state)
    jax.block_until_ready(bench.update(stage, next(stage.stream)))
    assert all(x.is_deleted() for x in before if x.ndim)
    row = next(r for r in running.placed.ledger.rows if r['program'] == 'update')
    assert row['alias_bytes'] >= sum(x.nbytes for x in jax.tree.leaves(stage.roles.policy.state))
  with workload.stage(cfg, decoding._config(64, 16, slots=4), ('prompts', np.array([64, 64]))) as running:
    engine = decoding._loaded(running, 4)
    prompt, key = np.full(64, 5, np.int32), on_policy.run_key(0, 1)
    entry = decoding._entry(engine, prompt, 4)
    state = engine.insert(engine.init_decode_state(), engine.prefill([prompt]), entry, key, 0)
    engine.generate(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.cache))


def test_peak_memory_is_near_the_prediction(accelerator):
  if not accelerator.memory_stats():
    pytest.skip(f'{accelerator.device_kind} has no statistics of its memory')
  before = memory.peak()['memory/peak_bytes']
  report = training.sft('qwen3_0_6b', layers=4, rows=8, row_length=2048, steps=2)
  peak = memory.peak()['memory/peak_bytes']
  assert peak > before, 'a test before this one used more memory; run this one alone'
  assert 0.8 < peak / report['predicted_bytes'] < 1.05
