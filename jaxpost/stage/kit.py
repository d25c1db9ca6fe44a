"""TODO."""

from __future__ import annotations

import dataclasses
import functools
import typing

from jaxpost.distributed import phases
from jaxpost.matmul import Compute, compute_for
from jaxpost.models import attention_kernels, context_parallel, routing
from jaxpost.monitor.timeline import Timeline
from jaxpost.programs.compile import Ledger
from jaxpost.stage import batch_shape
from jaxpost.stage import kit as kit_lib

if typing.TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.stage.kit import Kit
  from jaxpost.stage.prepare import Prepared


@dataclasses.dataclass
class Kit:
  """What the parts of a stage share."""

  prepared: Prepared
  train: Layout
  rollout: Layout
  score: Layout
  compute: Compute
  objectives: dict  # trainable role -> Objective
  ledger: Ledger
  timer: Timeline
  shape: tuple[int, int, int]  # rows of a step, rows at a time, tokens
  update_rows: int  # of one update

  @property
  def config(self):
    return self.prepared.config

  @property
  def algorithm(self):
    return self.prepared.algorithm


def make_kit(p: Prepared, devices=None, ledger: Ledger | None = None) -> Kit:
  """What a stage shares on all devices of this machine, or on `devices`."""
  config, on_policy = p.config, p.algorithm.on_policy
  layouts = phases.make_layouts(config.mesh, batch_shape.row_length(config, on_policy), devices)
  train, m, ledger = layouts['train'], config.model, ledger or Ledger()
  platform = train.mesh.devices.flat[0].platform
  compute = compute_for(platform, m.dtype, m.remat, m.attention)
  attention_kernels.check_platform(compute, platform)
  if attention_kernels.uses_kernel(compute) and not ledger.dry:
    from jaxpost.hardware import kernel_check

    compute = kernel_check.settle(compute, kit_lib.attended(p, layouts, batch_shape.row_length(config, on_policy)))
  objectives = {
    'policy': dataclasses.replace(
      p.algorithm.objective(config),
      teacher_forms=tuple(
        source.config.logit_form for name, source in p.sources.items() if name.startswith('teacher_')
      ),
      router=routing.loss_weights(config.router, p.model.config),
    )
  }
  if critic := p.algorithm.critic(config):
    objectives['critic'] = critic
  shape = functools.partial(batch_shape.batch_shape, config, on_policy, train.batch_shards, tokens=compute.micro_tokens)
  return Kit(
    p,
    train,
    layouts['rollout'],
    layouts['score'],
    compute,
    objectives,
    ledger,
    Timeline(phases.lanes(layouts)),
    shape(),
    shape(whole=False)[0],
  )


def attended(p, layouts: dict, length: int) -> list[tuple]:
  """(ModelConfig, tokens, parts of a row) of all that will be attended.

  Of packed rows of `length`, if none has branches, and of all lengths that the
  sampler may read texts in.
  """
  from jaxpost.rollout.sampler_config import rung

  config, on_policy, out = p.config, p.algorithm.on_policy, []
  branches = not on_policy and p.first_batch.branch_ids is not None
  if not branches:
    trained = {'policy': p.model, 'critic': p.sources.get('critic', p.model)}
    out += [
      (x.config, length, context_parallel.num_shards(layouts['train' if name in trained else 'score']))
      for name, x in (p.sources | trained).items()
    ]
  r = config.rollout
  if on_policy or config.eval.samples:
    room = r.max_prompt_length + r.max_new_tokens
    # Texts that go on, or that a full pool sent back, are read as a whole.
    longest = room if p.environment or r.page_size else r.max_prompt_length
    out += [(p.model.config, n, 1) for n in {rung(n, room) for n in range(1, longest + 1)}]
  return out
