"""Makes the roles, stream and evaluator of a placed stage, and compiles their programs.

`on_policy.py` makes the parts that sample.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
from etils import epath

from jaxpost.data import loader
from jaxpost.distributed import coordination, watchdog
from jaxpost.loop import Stage
from jaxpost.models import model as model_lib
from jaxpost.models.config import CustomConfig
from jaxpost.models.model import Model
from jaxpost.monitor import program_table
from jaxpost.programs import train as programs
from jaxpost.programs.compile import TooLargeError
from jaxpost.roles import Frozen, Policy, Roles, Trainable
from jaxpost.stage import checks, load_weights, optim, precompile
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.types import Credit, Experience, Item, Update

if TYPE_CHECKING:
  import optax

  from jaxpost.algorithms.base import Algorithm
  from jaxpost.hardware.memory import Memory
  from jaxpost.monitor.host_health import HostHealth
  from jaxpost.monitor.metrics import MetricsWriter
  from jaxpost.rl.controller import Controller
  from jaxpost.rollout.native import NativeEngine
  from jaxpost.stage.config import Config
  from jaxpost.stage.evaluate import Evaluator
  from jaxpost.stage.place import PlacedStage
  from jaxpost.stage.records import Inputs


def assemble(placed: PlacedStage, workdir: epath.PathLike, writer: MetricsWriter, params: dict) -> Stage:
  """Makes the stage, compiled and ready to run from its first step.

  Args:
    params: initial parameters in the layout `placed.train`; their buffers are donated.
  """
  inputs, config, model = placed.inputs, placed.config, placed.model
  workdir = epath.Path(workdir)
  roles, stream, engine = make_parts(placed, params, workdir)
  save, log = config.save, config.log
  trace = None
  if log.profile_from:
    from jaxpost.monitor.profile import Trace

    trace = Trace(workdir / 'profile' / placed.name, log.profile_from, log.profile_steps, config.train.steps)

  def begin_step(step: int) -> None:
    placed.timer.flush()
    watchdog.start_operation(f'step {step} of {placed.name}', log.watchdog_s)
    if trace:
      trace.at(step)

  def check_first_step(metrics: dict):
    # Dropout and rollouts of another run change metrics that are known at step 1, such as importance ratios of 1.
    if not model.dropout and not config.train_on_rollouts:
      inputs.algorithm.check_first_step(metrics, config)

  evaluate = make_evaluator(placed, engine)
  memory_usage = compile_together(placed, roles, engine, evaluate)
  placed.timer.begin(workdir / 'timeline' / f'{placed.name}.json', log.timeline_steps)
  return Stage(
    name=placed.name,
    steps=config.train.steps,
    roles=roles,
    stream=stream,
    evaluate=evaluate,
    checkpointer=Checkpointer(
      workdir / 'checkpoints' / placed.name, keep=save.keep, keep_best=save.keep_best, best_mode=save.best_mode
    ),
    writer=writer,
    timer=placed.timer,
    meta=load_weights.make_meta(inputs, workdir) | {'rows': placed.data.checksum},
    on_step_begin=begin_step,
    forbid_compiles=placed.ledger.seal,
    check_first_step=check_first_step,
    first_policy_step=1 + (config.critic.warmup_steps if 'critic' in roles.trainable else 0),
    stop_profiler=trace.close if trace else None,
    wait_for_update=inputs.algorithm.on_policy and not config.rollout.staleness,
    host_health=host_health_of(placed, roles, writer),
    memory_usage=memory_usage,
    eval_every=config.eval.every,
    save_every=save.every,
    samples_every=log.samples_every,
    save_rollout=make_rollout_saver(placed, workdir),
    max_skipped=config.optim.max_skipped,
    update_flops=functools.partial(flops_of_updates, placed, roles),
    peak_flops=program_table.peak_flops(jax.devices()),
  )


def compile_together(
  placed: PlacedStage, roles: Roles, engine: NativeEngine | None, evaluator: Evaluator | None
) -> Memory:
  """Compiles every program; if one is too large for a device of any process, all processes raise that TooLargeError."""
  too_large = None
  try:
    memory_usage = precompile.compile_all(placed, roles, engine, evaluator)
  except TooLargeError as error:
    too_large = vars(error)
  # This also keeps a process that compiles slowly from timing out the first collective.
  for refusal in filter(None, coordination.all_gather(too_large)):
    raise TooLargeError(**refusal)
  return memory_usage


def flops_of_updates(placed: PlacedStage, roles: Roles, updates: Sequence[Update], context: float) -> float:
  """Returns the FLOPs of a step's updates per token, if a token attends to `context` tokens on average."""
  minibatches = placed.config.rl.minibatches if placed.algorithm.on_policy else 1  # each has its part of the tokens
  return sum(roles.trainable[update.role].model.flops_of_update(context) for update in updates) / minibatches


def host_health_of(placed: PlacedStage, roles: Roles, writer: MetricsWriter) -> HostHealth | None:
  """Makes the comparison of the health of the run's processes; None if there is one process."""
  if coordination.process_count() == 1:
    return None
  from jaxpost.monitor.host_health import make_host_health

  return make_host_health(roles, placed.config.log.every, placed.ledger, writer.note)


def make_rollout_saver(placed: PlacedStage, workdir: epath.PathLike) -> Callable | None:
  """Returns a function that saves the rollouts of a step; None if `log.rollouts_every` is 0."""
  every, temperature = placed.config.log.rollouts_every, placed.config.rollout.temperature
  if not every or coordination.process_index():
    return None
  from jaxpost.rollout import rollout_files

  folder = epath.Path(workdir) / 'rollouts' / placed.name

  def save_step(step: int, experience: Experience, credit: Credit) -> None:
    if step % every == 0:
      rollout_files.save(folder / f'{step}.npz', experience, credit, temperature)

  return save_step


def make_parts(
  placed: PlacedStage, params: dict, workdir: epath.PathLike | None = None
) -> tuple[Roles, DataStream | Controller, NativeEngine | None]:
  """Makes (roles, stream, engine or None) of a stage.

  Args:
    placed: its documents receive the arrays that frozen roles precompute.
    params: initial parameters of the policy, in the layout `placed.train`.
    workdir: the run's folder, where precomputed arrays are cached.
  """
  config, algorithm = placed.config, placed.algorithm
  if isinstance(placed.model.config, CustomConfig) and not placed.ledger.dry:
    from jaxpost.stage import own_code

    own_code.check_masks(placed, params)
  precomputed = ()
  if algorithm.precompute(config):
    from jaxpost.stage import frozen_roles, precompute

    make_run = functools.partial(frozen_roles.make_frozen_run, placed, params, workdir)
    precomputed = precompute.precompute(placed, make_run, workdir)
  roles = make_roles(placed, params, workdir, precomputed)
  engine = None
  if checks.samples(config, algorithm):
    from jaxpost.stage import on_policy

    if not config.train_on_rollouts or checks.samples_held_out(config):
      engine = on_policy.make_engine(placed)
    if algorithm.on_policy:
      return roles, on_policy.make_controller(placed, roles, engine), engine
  stream = placed.data.stream
  if coordination.process_count() > 1:
    from jaxpost.data.shared_rows import SharedStream

    stream = SharedStream(stream, placed.data.first_batch, roles.policy.place)
  return roles, DataStream(stream, algorithm, config, roles), engine


def make_roles(placed: PlacedStage, params: dict, workdir: epath.PathLike | None, precomputed: tuple = ()) -> Roles:
  """Makes the policy and the other models that a stage reads.

  Args:
    precomputed: names of roles whose outputs the documents carry, so that their weights are not loaded.
  """
  role_sources = placed.inputs.sources
  moving = bool(placed.config.reference.every)  # the reference is part of the policy's optimizer state
  skipped = {'policy', 'critic', *precomputed} | ({'reference'} if moving else set())
  frozen: dict[str, Frozen] = {}  # made before the policy, whose update takes over the buffers of `params`
  for name in role_sources:
    if name not in skipped:
      from jaxpost.stage import frozen_roles

      frozen[name] = frozen_roles.make_frozen(placed, name, params, workdir)
  critic = None
  if 'critic' in role_sources:
    from jaxpost.stage import critic_weights

    critic = make_trainable(placed, 'critic', *critic_weights.load(placed, params, workdir))
  policy = make_trainable(placed, 'policy', placed.model, params)
  if moving:
    from jaxpost.stage import moving_reference

    frozen['reference'] = moving_reference.MovingReference(policy)
  teachers = tuple(role for name, role in frozen.items() if name.startswith('teacher_'))
  if teachers and placed.distills:
    from jaxpost.stage import frozen_roles

    policy.frozen['teacher_heads'] = frozen_roles.teacher_heads(placed, teachers)
  return Roles(policy, critic, frozen.get('reference'), frozen.get('reward_model'), teachers)


def make_optimizer(inputs: Inputs, role: str, part: Model, dtype: str) -> tuple[optax.GradientTransformation, Callable]:
  """Makes (optimizer, learning rate schedule) of a role; `part` has its trained parameters, `dtype` is of matmuls."""
  config, section = inputs.config, inputs.config.optim
  updates_per_step = config.rl.epochs * config.rl.minibatches if inputs.algorithm.on_policy else 1
  steps = config.train.steps
  lr = section.lr
  if role == 'critic':
    lr = config.critic.lr or lr
  elif 'critic' in inputs.sources:
    steps -= config.critic.warmup_steps
  warmup = optim.warmup_steps(section, steps) * updates_per_step
  schedule = optim.make_schedule(section.schedule, lr, steps * updates_per_step, warmup, section.end_lr)
  optimizer = optim.make_optimizer(section, schedule, part)
  if config.reference.every and role == 'policy':
    from jaxpost.stage import moving_reference

    reference = config.reference
    optimizer = moving_reference.following(optimizer, reference.every, reference.mix, reference.reset_optimizer)
  if dtype == 'float16':
    from jaxpost.programs import loss_scale

    optimizer = loss_scale.scaled(optimizer)
  return optimizer, schedule


def make_trainable(placed: PlacedStage, role: str, model: Model, params: dict) -> Trainable:
  """Makes the policy or the critic, with its optimizer state and its update and score programs."""
  objective, train = placed.objectives[role], placed.train
  part = model_lib.trained_part(model)
  params, fixed = model_lib.split(params, model)
  optimizer, schedule = make_optimizer(placed.inputs, role, part, placed.compute.dtype)
  shardings = programs.state_shardings(part, optimizer, train)

  def make_score():
    from jaxpost.programs import score

    return score.make_score(model, train, placed.compute, placed.ledger, temperature=objective.temperature)

  fields = dict(
    model=model,
    layout=train,
    micro_batch_size=placed.shape.micro_rows,
    update_program=programs.make_update(
      model,
      objective,
      optimizer,
      schedule,
      train,
      compute=placed.compute,
      ledger=placed.ledger,
      clip_norm=placed.config.optim.clip_norm or math.inf,
      shardings=shardings,
    ),
    make_score=make_score,
    state=programs.make_state(params, optimizer, shardings, placed.ledger),
    objective=objective,
    frozen={'params': fixed},
  )
  if role == 'critic':
    return Trainable(**fields)

  def export_policy(folder: epath.PathLike, params: dict) -> None:
    from jaxpost.stage import export

    export.export(placed.inputs, folder, params)

  return Policy(**fields, export_fn=export_policy)


@dataclasses.dataclass
class DataStream:
  """The packed batches of a data set as a stream of items for the training loop."""

  batches: loader.PackedStream
  algorithm: Algorithm
  config: Config
  roles: Roles

  def __iter__(self) -> DataStream:
    return self

  def __next__(self) -> Item:
    batch, info = next(self.batches)
    batch = self.algorithm.prepare(self.roles.policy.place(batch), self.roles, self.config)
    return Item([Update('policy', batch)], info)

  def state(self) -> dict:
    """Returns the position in the data, which a checkpoint stores."""
    return self.batches.state()

  def restore(self, state: dict) -> None:
    """Continues from the position that a checkpoint stores."""
    self.batches.restore(state)

  def close(self) -> None:
    """Ends the threads that read ahead."""
    self.batches.close()


def make_evaluator(placed: PlacedStage, engine: NativeEngine | None) -> Evaluator | None:
  """Makes the evaluation of `config.eval`; None if there is no held-out data."""
  held_out = placed.data.held_out
  if held_out is None:
    return None
  from jaxpost.stage import evaluate

  loss = evaluate.make_loss_eval(placed) if held_out.documents is not None else None
  sampled = None
  if placed.config.eval.samples:
    from jaxpost.stage import on_policy

    sampled = on_policy.make_sampled_eval(placed, engine, held_out.prompts)
  return evaluate.Evaluator(loss, sampled)
