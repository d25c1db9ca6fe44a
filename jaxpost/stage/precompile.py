"""Every program of a stage, compiled before its first step.

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
from jaxpost.roles import Roles, without_signal
from jaxpost.stage.records import has_branches
from jaxpost.types import Batch

if TYPE_CHECKING:
  from jaxpost.rollout.native import NativeEngine
  from jaxpost.stage.evaluate import Evaluator
  from jaxpost.stage.place import PlacedStage


def memory_of(placed: PlacedStage, roles: Roles, engine: NativeEngine | None, evaluates: bool) -> memory.Memory:
  """Predicts the memory that the compiled programs of a stage will need.

  evaluates: whether the run also samples for its evaluation.
  """
  offloaded = {}
  if placed.config.rollout.offload:
    if not placed.ledger.dry and not memory.can_offload(jax.local_devices()[0]):
      raise InputError(
        'config.rollout.offload: these devices reach no memory of the host that could hold it; set it to False'
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
  own = {k: x for k, x in sampler.items() if k not in held}  # `rollout.share_base`: the rest is the policy's
  out: dict[str, int] = {}  # per program, of the device that needs most
  for mesh in dict.fromkeys(x.mesh for x in (placed.train, placed.rollout, placed.score)):
    device = mesh.devices.flat[0]
    ids = {d.id for d in mesh.devices.flat}
    found = memory.predict(
      [r for r in placed.ledger.rows if r['device'] in ids],
      held=memory.size(held, device),
      offloaded=memory.size(offloaded, device),
      sampler=memory.size(own, device),
      overlap=ahead,
      preserved=memory.size(preserved, device),
    )
    if placed.check_fits:
      placed.check_fits(found, (mesh.local_devices or jax.local_devices())[0])
    out |= {k: max(n, out.get(k, 0)) for k, n in found.items()}
  return memory.Memory(out)


def compile_all(
  placed: PlacedStage, roles: Roles, engine: NativeEngine | None, evaluator: Evaluator | None
) -> memory.Memory:
  """Compiles every program before step 0, two at a time; returns the memory that they need."""
  algorithm, policy = placed.algorithm, roles.policy
  update, update_rows, step_rows = _batches(placed, roles)
  jobs: list[Callable[[], Any]] = []
  jobs += [functools.partial(r.update_program.compile, r.state, update, r.frozen) for r in roles.trainable.values()]
  jobs += _score_jobs(placed, roles, update_rows, step_rows)
  later: list[Callable[[], Any]] = []  # shares programs with what is in `jobs`
  if evaluator and evaluator.held_out:
    program = evaluator.held_out.program
    later.append(functools.partial(program.compile, policy.state.params, update, policy.state.step, policy.frozen))
  turns = bool(placed.workers.environment)
  if engine and algorithm.on_policy:
    lengths = placed.data.stream.lengths
    jobs += engine.jobs(policy.params, lengths, placed.config.rollout.group_size, turns)
    if algorithm.greedy_baseline(placed.config):  # one answer to each prompt
      later += engine.jobs(policy.params, lengths, 1, turns)
  if engine and evaluator and evaluator.sampled:
    sampled = evaluator.sampled
    later += engine.jobs(policy.params, [len(x.tokens) for x in sampled.prompts], sampled.samples, turns)
  placed.ledger.planned = len(placed.ledger.begun) + len(jobs) + len(later)
  run_jobs(jobs)
  run_jobs(later)
  return memory_of(placed, roles, engine, bool(evaluator and evaluator.sampled))


def run_jobs(jobs: Sequence[Callable[[], Any]]) -> None:
  """Runs jobs, two at a time; after the first error, which it raises, none begins any more."""
  with futures.ThreadPoolExecutor(2) as pool:
    running = [pool.submit(job) for job in jobs]
    try:
      for done in futures.as_completed(running):
        done.result()
    finally:  # also where a user interrupts
      pool.shutdown(wait=False, cancel_futures=True)


def _batches(placed: PlacedStage, roles: Roles) -> tuple[Batch, Batch, Batch]:
  """Describes [M, B / M, T] batches: of an update, its rows as scoring reads them, and all rows of a step likewise."""
  shape = placed.shape
  micro = shape.micro_rows
  described = functools.partial(jax.ShapeDtypeStruct, sharding=placed.train.sharding((None, 'batch'), (1, micro)))

  def batch(rows: int, branches: bool) -> Batch:
    host = _rollout_row(placed, branches) if placed.algorithm.on_policy else placed.data.first_batch
    return jax.tree.map(lambda x: described((rows // micro, micro, *x.shape[1:]), x.dtype), host)

  rows = batch(shape.update_rows, has_branches(placed.inputs, placed.data))
  tokens = rows.tokens.shape
  names = {name for objective in placed.objectives.values() for name in objective.arrays}
  heads = roles.teachers if placed.distills else ()
  hidden = tuple(described((*tokens, x.model.config.hidden_size), placed.compute.dtype) for x in heads)
  # Arrays of the data have types and shapes of their own; what roles compute before an update is a float32 per token.
  update = rows.replace(arrays=dict.fromkeys(names, described(tokens, np.float32)) | rows.arrays, teacher_hidden=hidden)
  step = batch(shape.rows, placed.config.train.share_prompt)
  return update, without_signal(rows), without_signal(step)


def _score_jobs(placed: PlacedStage, roles: Roles, update_rows: Batch, step_rows: Batch) -> list[Callable[[], Any]]:
  """Lists what compiles the scores of frozen roles, of the policy and of the critic."""
  # Teachers whose logits the loss reads run on the rows of each update, others score the rollouts of a step.
  of_update, of_step = (roles.teachers, ()) if placed.distills else ((), roles.teachers)
  jobs: list[Callable[[], Any]] = [functools.partial(x.compile, step_rows) for x in (roles.reward_model, *of_step) if x]
  if roles.reference:  # the pairs of an update have log-probs of their own
    rows = update_rows if placed.algorithm.pack else step_rows
    jobs.append(functools.partial(roles.reference.compile, rows))
  jobs += [functools.partial(x.compile, update_rows) for x in of_update]
  readers = {'old_logprobs': 'policy', 'values': 'critic' if roles.critic else 'policy'}
  scores = placed.algorithm.scores(placed.config)
  for name in dict.fromkeys(readers[score] for score in scores if score in readers):
    role = roles.trainable[name]
    jobs.append(functools.partial(role.score_program.compile, role.params, step_rows))
  return jobs


def _rollout_row(placed: PlacedStage, branches: bool) -> Batch:
  """A row as rollouts are packed into it, with `branches` behind prompts or without."""
  length = placed.shape.row_length
  ints = np.zeros((1, length), np.int32)
  floats = np.zeros((1, length), np.float32)
  optional = {'branch_ids': ints} if branches else {}
  if placed.config.router.routing_replay:
    cfg = placed.model.config
    optional['experts'] = np.zeros((1, length, cfg.sparse_layers, cfg.experts.top_k), np.uint16)
  if placed.config.rl.sampling_mask:
    optional['allowed'] = np.zeros((1, length, placed.config.rollout.top_k), np.int32)
  if any('temperature=' in entry for entry in placed.config.rl.sources):
    optional['temperature'] = floats
  return Batch(ints, ints, ints, floats, sequence_ids=ints, **optional)
