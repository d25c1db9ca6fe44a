"""A prepared stage -> a stage on the devices, with its programs compiled.

Legend: M micro-batches, B rows, T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import numpy as np
from etils import epath

from jaxpost.data import loader
from jaxpost.distributed import coordination, transfer, watchdog
from jaxpost.distributed.transfer import to_host
from jaxpost.loop import Stage
from jaxpost.models import lora, routing
from jaxpost.models import model as model_lib
from jaxpost.models.parameters import join
from jaxpost.models.transformer import flops_per_token
from jaxpost.monitor import program_table
from jaxpost.monitor import timeline as timeline_lib
from jaxpost.programs import loss_scale, score
from jaxpost.programs import train as programs
from jaxpost.roles import Frozen, Policy, Roles, Trainable, place
from jaxpost.stage import load_weights, optim, precompile, precompute, reward_model, sources
from jaxpost.stage.evaluate import Evaluator, HeldOut
from jaxpost.stage.export import export
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.types import Item, RowShape, Update

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.monitor.metrics import MetricsWriter
  from jaxpost.monitor.timeline import Timeline
  from jaxpost.stage.kit import Kit
  from jaxpost.stage.prepare import Prepared


def assemble(kit: Kit, workdir, writer: MetricsWriter, params) -> Stage:
  """The stage, ready to run from its first step.

  Args:
    params: initial parameters in `kit.train`; their buffers are taken over.
  """
  p, config = kit.prepared, kit.config
  workdir = epath.Path(workdir)
  roles, stream, engine = make_parts(kit, params, workdir)
  save, log = config.save, config.log
  trace = timeline_lib.Trace(workdir / 'profile' / p.name, log.profile_from, log.profile_steps, config.train.steps)

  def check_first_step(metrics: dict):
    # Dropout and rollouts of another run change what must hold at the start.
    if not p.model.dropout and not config.train_on_rollouts:
      p.algorithm.check_first_step(metrics, config)

  stage = Stage(
    name=p.name,
    steps=config.train.steps,
    roles=roles,
    stream=stream,
    evaluate=make_evaluator(kit, engine),
    checkpointer=Checkpointer(
      workdir / 'checkpoints' / p.name, keep=save.keep, keep_best=save.keep_best, best_mode=save.best_mode
    ),
    writer=writer,
    timer=kit.timer,
    meta=load_weights.make_meta(p, workdir),
    on_step_begin=functools.partial(begin_step, p, kit.timer, trace),
    forbid_compiles=kit.ledger.seal,
    check_first_step=check_first_step,
    stop_profiler=trace.close,
    wait_for_update=p.algorithm.on_policy and not config.rollout.staleness,
    host_health=peers_of(kit, roles, writer),
    eval_every=config.eval.every,
    save_every=save.every,
    samples_every=log.samples_every,
    save_rollout=make_rollout_saver(p.name, workdir, log.rollouts_every),
    max_skipped=config.optim.max_skipped,
    flops_per_token=p.model.passes / 3 * flops_per_token(p.model.config, kit.shape[2] / 2),
    peak_flops=program_table.peak_flops(jax.devices()),
  )
  stage.memory_usage = precompile.compile_all(kit, roles, stream, engine, stage.evaluate)
  kit.timer.begin(workdir / 'timeline' / f'{p.name}.json', log.timeline_steps)
  return stage


def begin_step(p: Prepared, timeline: Timeline, trace, step: int):
  timeline.flush()
  watchdog.start_operation(f'step {step} of {p.name}', p.config.log.watchdog_s)
  trace.at(step)


def peers_of(kit: Kit, roles: Roles, writer: MetricsWriter):
  """What processes say to each other on the way; one has nobody to tell."""
  if coordination.process_count() == 1:
    return None
  from jaxpost.monitor.host_health import make_host_health

  return make_host_health(roles, kit.config.log.every, kit.ledger, writer.note)


def make_rollout_saver(stage: str, workdir, every: int):
  """Returns a function that saves what a step learns from, or None (`log.rollouts_every` = 0)."""
  if not every or coordination.process_index():
    return None
  from jaxpost.rollout import rollout_files

  return rollout_files.make_saver(epath.Path(workdir) / 'rollouts' / stage, every)


def make_parts(kit: Kit, params, workdir=None) -> tuple:
  """(roles, stream, engine or None)."""
  p, config = kit.prepared, kit.config
  ready = precompute.precompute(
    kit,
    lambda name, spec: ask_frozen(kit, name, spec, params, workdir),
    lambda source: sources.identity(source, workdir, config.seed),
    workdir,
  )
  frozen = {
    name: make_frozen(kit, name, params, workdir) for name in p.sources if name not in ('policy', 'critic', *ready)
  }
  critic = make_critic(kit, params, workdir) if 'critic' in p.sources else None
  policy = make_trainable(kit, 'policy', p.model, params)
  teachers = tuple(v for k, v in frozen.items() if k.startswith('teacher_'))
  if teachers:
    heads = tuple(t.head_for(kit.prepared.model.config) for t in teachers)
    policy.frozen['teacher_heads'] = load_weights.move(
      heads, tuple(kit.train.sharding(('vocab', 'embed'), x.shape) for x in heads)
    )
  roles = Roles(policy, critic, frozen.get('reference'), frozen.get('reward_model'), teachers)
  samples = (p.algorithm.on_policy and not config.train_on_rollouts) or (
    (p.pool or p.environment) and config.eval.samples
  )
  engine = make_engine(kit) if samples else None
  stream = (
    make_controller(kit, roles, engine) if p.algorithm.on_policy else (DataStream(p.stream, p.algorithm, config, roles))
  )
  return roles, stream, engine


def make_critic(kit: Kit, params, workdir) -> Trainable:
  """Weights of its own; under adapters, where it can, those of the policy."""
  p, dtype = kit.prepared, kit.config.model.param_dtype
  source = p.sources['critic']
  model = lora.frozen_base_model(model_lib.with_scalar_head(source.config, p.model.config.lora), p.model.quantized)
  if model.frozen and source == p.sources['policy']:
    params = lora.adopt_sharing_frozen(params, p.model, model, kit.train, dtype)
  else:
    params = load_weights.load(source, model, kit.train, dtype, workdir, seed=kit.config.seed, ledger=kit.ledger)
  return make_trainable(kit, 'critic', model, params)


def ask_frozen(kit: Kit, name: str, spec, params, workdir):
  """Host rows -> what a role, made when first asked, says of them."""
  role = functools.cache(lambda: make_frozen(kit, name, params, workdir))

  def run(batch):
    found = to_host(spec.read(role()(place(kit.score, kit.shape[1], batch))))
    return {k: x.reshape(-1, *x.shape[2:]) for k, x in found.items()}

  return run


def make_frozen(kit: Kit, name: str, params, workdir) -> Frozen:
  """A role that only reads, in the type that products round weights to."""
  p, config = kit.prepared, kit.config
  source, layout, shared = p.sources[name], kit.score, {}
  part = model = lora.build(source.config)
  if name == 'reference':
    part = model = p.model  # the policy as it is now
    if layout == kit.train:  # what training leaves as it is is shared
      part, (params, shared) = lora.trained_part(model), lora.split(params, model)
    params = load_weights.move(params, part.shardings(layout))
  elif layout == kit.train and load_weights.is_beside(source, p):
    model, params, shared = load_weights.load_beside(source, p, params, layout, kit.ledger)
    part = lora.trained_part(model)
  else:
    params = load_weights.load(
      source, model, layout, config.model.param_dtype, workdir, seed=config.seed, ledger=kit.ledger
    )
  params = join(shared, score.frozen_copy(part, params, kit.compute, part.shardings(layout), kit.ledger))
  make, options = score.make_score, {}
  if name == 'reference':
    options = dict(temperature=kit.objectives['policy'].temperature)
  elif name.startswith('teacher_'):
    d, make = config.distill, score.make_hidden
    if d.top_k:
      make, options = score.make_topk, dict(k=d.top_k, vocab_size=p.model.config.vocab_size, temperature=d.temperature)
  return Frozen(params, make(model, layout, kit.compute, kit.ledger, **options), layout, model)


def make_trainable(kit: Kit, role: str, model, params):
  """The policy or the critic, with optimizer, `update` and `score`."""
  p, config, o = kit.prepared, kit.config, kit.config.optim
  rl, objective = config.rl, kit.objectives[role]
  updates = rl.epochs * rl.minibatches if p.algorithm.on_policy else 1
  steps, lr = config.train.steps, o.lr
  if role == 'critic':
    lr = config.critic.lr or lr
  elif 'critic' in kit.objectives:
    steps -= config.critic.warmup_steps
  part, (params, fixed) = lora.trained_part(model), lora.split(params, model)
  schedule = optim.make_schedule(o.schedule, lr, steps * updates, o.warmup_steps * updates, o.end_lr)
  optimizer = optim.make_optimizer(
    o.name, schedule, dict(b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay), optim.decayed(part.axes())
  )
  if kit.compute.dtype == 'float16':
    optimizer = loss_scale.scaled(optimizer)
  shardings = programs.state_shardings(part, optimizer, kit.train)
  update = programs.make_update(
    model,
    objective,
    optimizer,
    schedule,
    kit.train,
    kit.compute,
    kit.ledger,
    clip_norm=o.clip_norm or math.inf,
    shardings=shardings,
  )
  read = score.make_score(model, kit.train, kit.compute, kit.ledger, temperature=objective.temperature)
  state = programs.make_state(params, optimizer, shardings, kit.ledger)
  rest = (kit.train, kit.shape[1], update, read, objective, {'params': fixed})
  return (
    Trainable(model, state, *rest)
    if role == 'critic'
    else Policy(model, state, *rest, export_fn=functools.partial(export, p))
  )


def make_engine(kit: Kit, slots: int = 0):
  from jaxpost.rollout.native import NativeEngine, SamplerConfig

  p, r, e = kit.prepared, kit.config.rollout, kit.config.eval
  wanted = r.prompts * r.group_size if kit.algorithm.on_policy else (e.size * e.samples)
  model = routing.recording(p.model) if kit.config.router.routing_replay else p.model
  return NativeEngine(
    model,
    SamplerConfig(
      slots=slots or r.slots or min(wanted, 256),
      max_prompt=r.max_prompt_length,
      max_new_tokens=r.max_new_tokens,
      stop_ids=p.tokenizer.stop_ids,
      temperature=r.temperature,
      top_k=r.top_k,
      top_p=r.top_p,
      min_p=r.min_p,
      block=r.block,
      forbidden_ids=r.forbidden_ids,
      stop_strings=r.stop_strings,
      min_new_tokens=r.min_new_tokens,
      page_size=r.page_size,
      cache_tokens=r.cache_tokens,
      top_logprobs=r.top_logprobs,
    ),
    kit.rollout,
    kit.compute,
    kit.ledger,
    functools.partial(p.tokenizer.decode, skip_special=False),
    transfer.make_bridge(kit.train, kit.rollout, 'config.mesh.rollout'),
    r.share_base,
    ahead=r.staleness > 0,
  )


def run_key(seed: int, purpose: int) -> np.ndarray:
  """Key data [2] uint32; training and evaluation draw from different ones."""
  key = jax.random.fold_in(jax.random.key(seed), purpose)
  return np.asarray(jax.random.key_data(key))


def make_sampler(kit: Kit, engine, purpose: int):
  """The engine in single answers, or in episodes of an environment."""
  key = run_key(kit.config.seed, purpose)
  if kit.prepared.environment:
    from jaxpost.environments import factory

    return factory.make_sampler(kit.prepared, engine, key)
  from jaxpost.rollout.sampler import Sampler

  return Sampler(engine, key)


def make_grader(p: Prepared):
  from jaxpost.rl import grading

  return grading.Grader(p.pool, p.tokenizer, reward_model.weight(p.config))


def make_controller(kit: Kit, roles: Roles, engine):
  from jaxpost.rl import demonstrations
  from jaxpost.rl.controller import Controller

  p, config = kit.prepared, kit.config
  sampler, share = make_sampler(kit, engine, 1), p.algorithm.from_data(config)
  if config.train_on_rollouts:
    from jaxpost.rollout import rollout_files

    sampler = rollout_files.RecordedSampler(config.train_on_rollouts, p.name, not config.reward)
  elif share:
    sampler = demonstrations.DemonstrationSampler(
      sampler=sampler, tokenizer=p.tokenizer, share=share, seed=config.seed, max_tokens=config.rollout.max_new_tokens
    )
  return Controller(
    algorithm=p.algorithm,
    config=config,
    roles=roles,
    sampler=sampler,
    grader=make_grader(p),
    prompts=p.stream,
    timer=kit.timer,
    step_shape=RowShape(kit.shape[0], kit.shape[2]),
    update_shape=RowShape(kit.update_rows, kit.shape[2]),
    engine=None if config.train_on_rollouts else engine,  # recorded rollouts need no weights
  )


@dataclasses.dataclass
class DataStream:
  """A data set as a stream of items."""

  batches: loader.PackedStream
  algorithm: Algorithm
  config: object
  roles: Roles

  def __iter__(self):
    return self

  def __next__(self) -> Item:
    batch, info = next(self.batches)
    batch = self.algorithm.prepare(self.roles.policy.place(batch), self.roles, self.config)
    return Item([Update('policy', batch)], info)

  def state(self) -> dict:
    return self.batches.state()

  def restore(self, state: dict):
    self.batches.restore(state)

  def close(self):
    self.batches.close()


def make_evaluator(kit: Kit, engine) -> Evaluator | None:
  p, config, e = kit.prepared, kit.config, kit.config.eval
  if p.eval_rows is None:
    return None
  held_out, sampled = None, None
  if not p.algorithm.on_policy:
    batches = loader.eval_batches(p.eval_examples, kit.shape[0], kit.shape[2], per=p.algorithm.mean_per(config))
    held_out = HeldOut(
      batches,
      programs.make_evaluate(p.model, kit.objectives['policy'], kit.train, kit.compute, kit.ledger),
      lambda batch, roles: p.algorithm.prepare(batch, roles, kit.config),
    )
  if e.samples:
    from jaxpost.rl import grading
    from jaxpost.stage.evaluate import SampledEval

    values = functools.partial(
      grading.reward_model_values,
      shape=RowShape(kit.shape[0], kit.shape[2]),
      max_sequences=config.rollout.prompts * config.rollout.group_size,
    )
    sampled = SampledEval(
      make_sampler(kit, engine, 2),
      make_grader(p),
      p.eval_prompts,
      e.samples,
      e.pass_reward,
      e.temperature,
      values if 'reward_model' in p.sources else None,
    )
  return Evaluator(held_out, sampled)
