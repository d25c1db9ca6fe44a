"""Lists the shapes for which a stage runs accelerator kernels, and checks the kernels on the stage's devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxpost.distributed.mesh import Layout, row_shards
from jaxpost.hardware import kernel_check
from jaxpost.hardware.kernel_check import KernelUse
from jaxpost.models import attention_kernels, decode_kernels
from jaxpost.rollout import buckets
from jaxpost.stage import checks
from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.stage.place import PlacedStage
  from jaxpost.stage.records import PreparedStage


def verified(
  compute: Compute, prepared: PreparedStage, layouts: dict[str, Layout], platform: str, dry: bool
) -> Compute:
  """Returns the compute settings of a stage without kernels that give wrong results on these devices.

  Args:
    dry: for a plan: no kernel runs, and only kernels that the platform lacks are refused.
  """
  inputs = prepared.inputs
  if compute.uses_kernel:
    attention_kernels.check_platform(compute, platform)
  if dry:
    return compute
  if compute.uses_kernel:
    length = row_length(inputs.config, inputs.algorithm.on_policy)
    decoded = [inputs.model.config] if _decodes(compute, prepared) else []
    compute = kernel_check.verify(compute, attention_uses(prepared, layouts, length), decoded)
  if not (compute.grouped_kernel or compute.recurrence_kernel):
    return compute
  from jaxpost.hardware import layer_check

  configs = [x.config for x in (inputs.model, *inputs.sources.values())]
  return layer_check.verify(compute, configs, {layout.mesh.shape['tensor'] for layout in layouts.values()})


def _decodes(compute: Compute, prepared: PreparedStage) -> bool:
  """Returns whether the stage samples by the kernel for single tokens; XLA reads a cache of 8 bits."""
  config, cfg = prepared.inputs.config, prepared.inputs.model.config
  if not checks.samples(config, prepared.inputs.algorithm):
    return False
  return bool(decode_kernels.compute_of_decoding(compute, cfg, config.rollout).decode_kernel)


def attention_by_xla(placed: PlacedStage) -> Iterator[str]:
  """Yields what XLA attends in although the stage has a kernel for attention."""
  compute = placed.compute
  if compute.rejected_shapes:
    yield f'by XLA for {len(compute.rejected_shapes)} shapes that it gets wrong'
  if placed.has_branches and not attention_kernels.supports_branches(compute.attention, placed.model.config):
    yield 'by XLA for rows with a shared prompt'
  samples = checks.samples(placed.config, placed.algorithm)
  if compute.uses_kernel and samples and not _decodes(compute, placed):
    yield 'decoding by XLA'


def attention_uses(prepared: PreparedStage, layouts: dict[str, Layout], length: int) -> list[KernelUse]:
  """Lists the rows that attention processes: packed rows and prefilled ones."""
  inputs = prepared.inputs
  config, on_policy = inputs.config, inputs.algorithm.on_policy
  uses = []
  trained = {'policy': inputs.model, 'critic': inputs.sources.get('critic', inputs.model)}
  branched = prepared.has_branches
  # The pairs of online DPO have branches, but the rows that a reward model scores there have none.
  for branches in {branched, branched and inputs.algorithm.pack is None}:
    for name, x in (inputs.sources | trained).items():
      layout = layouts['train' if name in trained else 'score']
      uses.append(KernelUse(x.config, length, row_shards(layout), branches))
  r = config.rollout
  if on_policy or config.eval.samples:
    max_length = r.max_prompt_length + r.max_new_tokens
    # Continued conversations and preempted sequences are prefilled with all of their tokens.
    longest = max_length if prepared.workers.environment or r.page_size else r.max_prompt_length
    lengths = {buckets.bucket(n, max_length) for n in range(1, longest + 1)}
    uses += [KernelUse(inputs.model.config, n) for n in lengths]
  return uses
