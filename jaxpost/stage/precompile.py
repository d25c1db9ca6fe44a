"""Compiles every program of a stage before its first step.

Legend: M micro-batches, B rows, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.errors import InputError
from jaxpost.hardware import memory
from jaxpost.models import transformer
from jaxpost.programs.compile import TooLargeError
from jaxpost.roles import Roles, without_signal
from jaxpost.types import Batch

if TYPE_CHECKING:
  from jaxpost.rollout.native import NativeEngine
  from jaxpost.stage.evaluate import Evaluator
  from jaxpost.stage.place import PlacedStage


def memory_of(placed: PlacedStage, roles: Roles, engine: NativeEngine | None, evaluates: bool) -> memory.Memory:
  """Predicts the device memory that the compiled programs of a stage will need.

  Args:
    evaluates: whether evaluation samples, too.
  """
  offloaded = {}
  if placed.config.rollout.offload:
    if not placed.ledger.dry and not memory.can_offload(jax.local_devices()[0]):
      raise InputError(
        'config.rollout.offload: these devices cannot address host memory to offload to; set it to False'
      )
    from jaxpost.rl import offload

    offloaded = offload.offloadable(roles)
  held = memory.distinct(
    [(r.state, r.frozen) for r in roles.trainable.values()],
    [r.params for r in (roles.reference, roles.reward_model, *roles.teachers) if r],
  )
  sampler = memory.distinct(engine.described(roles.policy.params)) if engine else {}
  ahead = placed.config.rollout.staleness > 0  # the sampler runs while the policy is updated
  preserved = memory.distinct(engine.described(roles.policy.params)[0]) if engine and ahead and evaluates else {}
  unshared = {key: x for key, x in sampler.items() if key not in held}  # with `rollout.share_base`, others are held
  max_bytes: dict[str, int] = {}  # program -> bytes of the device that needs most of it
  for mesh in dict.fromkeys(layout.mesh for layout in (placed.train, placed.rollout, placed.score)):
    device = mesh.devices.flat[0]
    ids = {d.id for d in mesh.devices.flat}
    predicted = memory.predict(
      [row for row in placed.ledger.rows if row['device'] in ids],
      held=memory.size(held, device),
      offloaded=memory.size(offloaded, device),
      sampler=memory.size(unshared, device),
      overlap=ahead,
      preserved=memory.size(preserved, device),
    )
    if not placed.ledger.dry:
      check_fits(predicted, (mesh.local_devices or jax.local_devices())[0])
    max_bytes |= {name: max(size, max_bytes.get(name, 0)) for name, size in predicted.items()}
  return memory.Memory(max_bytes)


def check_fits(predicted: dict[str, int], device: jax.Device) -> None:
  """Raises TooLargeError if a program needs more memory than the device has; `predicted` is from `memory.predict`."""
  limit = (device.memory_stats() or {}).get('bytes_limit')  # CPUs have none
  name = max(predicted, key=predicted.__getitem__)
  if limit and predicted[name] > limit:
    raise TooLargeError(name, predicted[name], f', of which a device ({device.device_kind}) has {limit / 2**30:.1f}')


def compile_all(
  placed: PlacedStage, roles: Roles, engine: NativeEngine | None, evaluator: Evaluator | None
) -> memory.Memory:
  """Compiles every program of a stage, two at a time; returns the memory that they need, or raises TooLargeError."""
  algorithm, policy = placed.algorithm, roles.policy
  update, update_rows, step_rows = _batches(placed, roles)
  jobs = [functools.partial(r.update_program.compile, r.state, update, r.frozen) for r in roles.trainable.values()]
  jobs += _score_jobs(placed, roles, update_rows, step_rows)
  later: list[Callable[[], Any]] = []  # jobs that reuse programs of `jobs`, so that none is compiled twice
  if evaluator and evaluator.held_out:
    program = evaluator.held_out.program
    later.append(functools.partial(program.compile, policy.state.params, update, policy.state.step, policy.frozen))
  turns = bool(placed.workers.environment)
  if engine and algorithm.on_policy:
    lengths = placed.data.stream.lengths
    jobs += engine.jobs(policy.params, lengths, placed.config.rollout.group_size, turns)
    if algorithm.greedy_baseline(placed.config):  # samples one answer per prompt
      later += engine.jobs(policy.params, lengths, 1, turns)
  if engine and evaluator and evaluator.sampled:
    sampled = evaluator.sampled
    later += engine.jobs(policy.params, [len(x.tokens) for x in sampled.prompts], sampled.samples, turns)
  placed.ledger.planned = len(placed.ledger.begun) + len(jobs) + len(later)
  run_jobs(jobs)
  run_jobs(later)
  return memory_of(placed, roles, engine, bool(evaluator and evaluator.sampled))


def plan_entry(placed: PlacedStage, memory_usage: memory.Memory) -> dict:
  """Returns the entry of plan.json for a compiled stage."""
  cfg = placed.model.config
  return dict(
    stage=placed.name,
    devices=jax.device_count(),
    device_kind=jax.devices()[0].device_kind,
    processes=jax.process_count(),
    family=cfg.family,
    parameters=transformer.num_params(cfg),
    mesh={'train': dict(placed.train.mesh.shape), 'rollout': dict(placed.rollout.mesh.shape)},
    tokens_per_step=placed.shape.rows * placed.shape.row_length,
    programs=placed.ledger.rows,
    memory=memory_usage.predicted,  # {program: peak bytes in use on a device while it runs}
    choices=placed.choices,  # {config field, 'logits' or 'experts': the value that is used, and the reason}
  )


def run_jobs(jobs: Sequence[Callable[[], Any]]) -> None:
  """Runs jobs, two at a time; raises the first error, after which no further job begins."""
  with futures.ThreadPoolExecutor(2) as pool:
    running = [pool.submit(job) for job in jobs]
    try:
      for done in futures.as_completed(running):
        done.result()
    finally:  # also on an interrupt
      pool.shutdown(wait=False, cancel_futures=True)


def _batches(placed: PlacedStage, roles: Roles) -> tuple[Batch, Batch, Batch]:
  """Returns the shapes [M, B / M, T] of three batches: of an update, and of an update and of a step for scoring."""
  shape = placed.shape
  micro = shape.micro_rows
  described = functools.partial(jax.ShapeDtypeStruct, sharding=placed.train.sharding((None, 'batch'), (1, micro)))

  def batch(rows: int, branches: bool) -> Batch:
    host = placed.data.first_batch
    if placed.algorithm.on_policy:
      from jaxpost.stage import sampling_inputs

      host = sampling_inputs.empty_row(placed, branches)
    return jax.tree.map(lambda x: described((rows // micro, micro, *x.shape[1:]), x.dtype), host)

  rows = batch(shape.update_rows, placed.has_branches)
  tokens = rows.tokens.shape
  names = {name for objective in placed.objectives.values() for name in objective.arrays}
  heads = roles.teachers if placed.distills else ()
  hidden = tuple(described((*tokens, x.model.config.hidden_size), placed.compute.dtype) for x in heads)
  # Roles compute a float32 per token before an update; arrays of the data keep their own dtypes and shapes.
  update = rows.replace(arrays=dict.fromkeys(names, described(tokens, np.float32)) | rows.arrays, teacher_hidden=hidden)
  step = batch(shape.rows, placed.config.train.share_prompt)
  return update, without_signal(rows), without_signal(step)


def _score_jobs(placed: PlacedStage, roles: Roles, update_rows: Batch, step_rows: Batch) -> list[Callable[[], Any]]:
  """Lists the jobs that compile the score programs of frozen roles, of the policy and of the critic."""
  # Teachers whose logits the loss reads run on the rows of each update, others score the rollouts of a step.
  teacher_rows = update_rows if placed.distills else step_rows
  jobs: list[Callable[[], Any]] = []
  if roles.reward_model:
    jobs.append(functools.partial(roles.reward_model.compile, step_rows))
  jobs += [functools.partial(teacher.compile, teacher_rows) for teacher in roles.teachers]
  if roles.reference:  # methods that pack pairs for an update score these pairs
    rows = update_rows if placed.algorithm.pack else step_rows
    jobs.append(functools.partial(roles.reference.compile, rows))
  readers = {'old_logprobs': 'policy', 'values': 'critic' if roles.critic else 'policy'}
  scores = placed.algorithm.scores(placed.config)
  for name in dict.fromkeys(readers[score] for score in scores if score in readers):
    role = roles.trainable[name]
    jobs.append(functools.partial(role.score_program.compile, role.params, step_rows))
  return jobs
