"""A prepared stage on devices: its layouts, batch shape and objectives."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpost.distributed import phases
from jaxpost.matmul import Compute, compute_for
from jaxpost.monitor.timeline import Timeline
from jaxpost.programs.compile import Ledger
from jaxpost.stage import batch_shape, checks
from jaxpost.stage.batch_shape import BatchShape
from jaxpost.stage.records import PreparedStage

if TYPE_CHECKING:
  import jax

  from jaxpost.algorithms.base import Algorithm
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model
  from jaxpost.types import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedStage(PreparedStage):
  """A prepared stage with what its roles and programs share on the devices.

  train, rollout, score: the layouts of the phases; phases that share devices have equal ones.
  objectives: {trainable role: Objective}.
  """

  train: Layout
  rollout: Layout
  score: Layout
  compute: Compute
  objectives: dict[str, Objective]
  ledger: Ledger
  timer: Timeline
  shape: BatchShape

  @property
  def algorithm(self) -> Algorithm:
    """The method that the stage trains with."""
    return self.inputs.algorithm

  @property
  def model(self) -> Model:
    """The policy's model."""
    return self.inputs.model

  @property
  def distills(self) -> bool:
    """True if the loss reads the teachers' logits; if not, teachers are scored like the reference."""
    return self.objectives['policy'].divergence is not None

  @property
  def decode_block(self) -> int:
    """Tokens that the sampler decodes in each slot per dispatch."""
    return self.config.rollout.block or self.compute.decode_block

  @property
  def choices(self) -> dict[str, str]:
    """Returns {field: 'value (what chose it)'} of fields that the config may leave open, and of sizes without one."""
    config, compute = self.config, self.compute

    def chosen(value: object, configured: object = 'auto') -> str:
      return f'{value} ({compute.platform if configured in ("auto", 0) else "config"})'

    out = {
      'model.dtype': compute.dtype,
      'model.attention': chosen(compute.attention, config.model.attention),
      'model.remat': chosen(compute.remat, config.model.remat),
      'train.micro_batch_size': chosen(self.shape.micro_rows, config.train.micro_batch_size),
      'logits': chosen(f'{compute.head_elements:,} at a time'),
    }
    if checks.samples(config, self.algorithm):
      out['rollout.block'] = chosen(self.decode_block, config.rollout.block)
      out['rollout.slots'] = chosen(batch_shape.slots(config, self.algorithm.on_policy), config.rollout.slots)
    out |= {field: f'{operator.attrgetter(field)(config)} ({reason})' for field, reason in self.by_memory.items()}
    if compute.uses_kernel:
      from jaxpost.stage import kernel_uses

      out['model.attention'] = ', '.join([out['model.attention'], *kernel_uses.attention_by_xla(self)])
    if self.model.config.experts:
      out['experts'] = chosen('kernel' if compute.grouped_kernel else 'XLA')
    if self.model.config.state_shapes and self.model.config.mixer != 'convolution':
      from jaxpost.hardware import layer_check

      out['recurrence'] = chosen(layer_check.computed_by(compute, self.model.config))
    for field in self.algorithm.defaults.get('rl', ()):  # the method chooses these
      out[f'rl.{field}'] = str(vars(config.rl)[field]).replace('()', 'none')
    return out


def place_stage(
  prepared: PreparedStage, devices: Sequence[jax.Device] | None = None, ledger: Ledger | None = None
) -> PlacedStage:
  """Places a stage on devices; one that was placed before, with other settings, is placed anew.

  Args:
    devices: the devices of a topology description, for a plan; None for all devices of this run.
    ledger: None for a new one; the ledger of a plan makes no arrays (`dry`).
  """
  inputs = prepared.inputs
  config, on_policy = inputs.config, inputs.algorithm.on_policy
  layouts = {
    phase: dataclasses.replace(layout, reduce_dtype=config.train.reduce_dtype)
    for phase, layout in phases.make_layouts(config.mesh, batch_shape.row_length(config, on_policy), devices).items()
  }
  train = layouts['train']
  ledger = ledger or Ledger()
  device = train.mesh.devices.flat[0]
  platform, memory, triton = device.platform, 0.0, True
  if platform != 'cpu':
    from jaxpost.hardware import chips

    memory = chips.memory_of(device)
    triton = not chips.before_ampere(device)
  if platform == 'gpu':
    from jaxpost.hardware import gpu_options

    ledger.options = gpu_options.of_run(config.train.deterministic) | (ledger.options or {})
  compute = compute_for(platform, config.model.dtype, config.model.remat, config.model.attention, memory, triton=triton)
  if compute.uses_kernel or compute.grouped_kernel:
    from jaxpost.stage import kernel_uses

    compute = kernel_uses.verified(compute, prepared, layouts, platform, ledger.dry)
  teachers = [source for name, source in inputs.sources.items() if name.startswith('teacher_')]
  policy = dataclasses.replace(
    inputs.algorithm.objective(config),
    teacher_forms=tuple(source.config.logit_form for source in teachers),
    router=(config.router.balance_coef, config.router.z_coef),  # of the losses in `routing.balance_loss`
    seed=config.seed,
  )
  critic = inputs.algorithm.critic(config)
  return PlacedStage(
    **{field.name: getattr(prepared, field.name) for field in dataclasses.fields(PreparedStage)},
    **layouts,
    compute=compute,
    objectives={'policy': policy, 'critic': critic} if critic else {'policy': policy},
    ledger=ledger,
    timer=Timeline(phases.lanes(layouts)),
    shape=batch_shape.batch_shape(config, on_policy, train.batch_shards, tokens=compute.micro_tokens),
  )
