"""Lists the shapes in which a stage uses the kernels of an accelerator, and checks these kernels on its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpost.distributed.mesh import row_shards
from jaxpost.hardware import kernel_check
from jaxpost.hardware.kernel_check import KernelUse
from jaxpost.models import attention_kernels
from jaxpost.models.attention_kernels import BRANCHES
from jaxpost.rollout import buckets
from jaxpost.stage import checks
from jaxpost.stage.batch_shape import row_length
from jaxpost.stage.records import has_branches

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.stage.records import PreparedStage


def verified(
  compute: Compute, prepared: PreparedStage, layouts: dict[str, Layout], platform: str, dry: bool
) -> Compute:
  """Returns the settings of a stage without what its kernels compute wrongly on these devices.

  Args:
    layouts: {phase: Layout}.
    dry: of a plan: nothing runs, only what the platform does not have is refused.
  """
  inputs = prepared.inputs
  if compute.uses_kernel:
    attention_kernels.check_platform(compute, platform)
    if not dry:
      length = row_length(inputs.config, inputs.algorithm.on_policy)
      decoded = [inputs.model.config] if checks.samples(inputs.config, inputs.algorithm) else []
      compute = kernel_check.verify(compute, attention_uses(prepared, layouts, length, compute.attention), decoded)
  if compute.grouped_kernel and not dry:
    from jaxpost.hardware import grouped_check

    models = [x.config for x in (inputs.model, *inputs.sources.values())]
    compute = grouped_check.verify(compute, models, {x.mesh.shape['tensor'] for x in layouts.values()})
  return compute


def attention_uses(
  prepared: PreparedStage, layouts: dict[str, Layout], length: int, kernel: str = ''
) -> list[KernelUse]:
  """Lists the rows that attention will see: packed ones, if the kernel supports their branches, and all for prefill."""
  inputs = prepared.inputs
  config, on_policy = inputs.config, inputs.algorithm.on_policy
  out = []
  trained = {'policy': inputs.model, 'critic': inputs.sources.get('critic', inputs.model)}
  found = has_branches(inputs, prepared.data)
  # Pairs of online DPO have branches, and what a reward model reads there has none.
  for branches in {found, found and inputs.algorithm.pack is None}:
    if branches and kernel not in BRANCHES:
      continue
    for name, x in (inputs.sources | trained).items():
      layout = layouts['train' if name in trained else 'score']
      out.append(KernelUse(x.config, length, row_shards(layout), branches))
  r = config.rollout
  if on_policy or config.eval.samples:
    room = r.max_prompt_length + r.max_new_tokens
    # Continued conversations and preempted sequences are prefilled as a whole.
    longest = room if prepared.workers.environment or r.page_size else r.max_prompt_length
    lengths = {buckets.bucket(n, room) for n in range(1, longest + 1)}
    out += [KernelUse(inputs.model.config, n) for n in lengths]
  return out
