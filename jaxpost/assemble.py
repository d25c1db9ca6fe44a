"""A prepared stage -> a stage on the devices, with its programs compiled.

Legend: M micro-batches, B rows, T tokens.
"""

import concurrent.futures
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxpost import (
    build, cache, optim, placement, plan, reward_role, weights)
from jaxpost.algorithms.base import Algorithm
from jaxpost.build import Prepared
from jaxpost.checkpoint import Checkpointer
from jaxpost.data import loader
from jaxpost.evaluate import Evaluator, HeldOut
from jaxpost.loop import Stage
from jaxpost.matmul import Compute, compute_for
from jaxpost.metrics import Chrono, MetricsWriter
from jaxpost.models import hf
from jaxpost.models import model as model_lib
from jaxpost.models.transformer import flops_per_token
from jaxpost.programs import score
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.roles import (
    Frozen, Policy, Roles, Sampler, Trainable, place, without_signal)
from jaxpost.sharding import Layout, make_layout, to_host
from jaxpost.types import Batch, Item


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
  chrono: Chrono
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
  train = make_layout(config.mesh.train, 'train', devices=devices,
                      arrange=placement.arrange)
  compute = compute_for(
      train.mesh.devices.flat[0].platform, config.model.dtype,
      config.model.remat)
  objectives = {'policy': p.algorithm.objective(config)}
  if critic := p.algorithm.critic(config):
    objectives['critic'] = critic
  shards = train.batch_shards
  return Kit(
      p, train, make_layout(config.mesh.rollout, 'rollout', beside=train),
      make_layout(config.mesh.score or config.mesh.train, 'train',
                  'config.mesh.score', beside=train),
      compute, objectives, ledger or Ledger(), Chrono(),
      build.batch_shape(config, on_policy, shards),
      build.batch_shape(config, on_policy, shards, whole=False)[0])


def assemble(kit: Kit, workdir, writer: MetricsWriter, params) -> Stage:
  """The stage, ready to run from its first step.

  Args:
    params: initial parameters in `kit.train`; their buffers are taken over.
  """
  p, config = kit.prepared, kit.config
  roles, stream, engine = make_parts(kit, params, workdir)
  save, log = config.save, config.log
  stage = Stage(
      p.name, config.train.steps, roles, stream, make_evaluator(kit, engine),
      Checkpointer(epath.Path(workdir) / 'checkpoints' / p.name,
                   keep=save.keep, keep_best=save.keep_best,
                   best_mode=save.best_mode),
      writer, kit.chrono, dict(model=dataclasses.asdict(p.model.config)),
      functools.partial(seal, kit.ledger),
      lambda metrics: p.algorithm.check_first_step(metrics, config),
      on_policy=p.algorithm.on_policy, eval_every=config.eval.every,
      save_every=save.every, samples_every=log.samples_every,
      max_skipped=config.optim.max_skipped, watchdog_s=log.watchdog_s,
      flops_per_token=flops_per_token(p.model.config, kit.shape[2] / 2),
      peak_flops=plan.peak_flops(jax.devices()))
  compile_all(kit, roles, stream, engine, stage.evaluate)
  return stage


def make_parts(kit: Kit, params, workdir=None) -> tuple:
  """(roles, stream, engine or None)."""
  p, config = kit.prepared, kit.config
  ready = cache.precompute(
      kit, lambda name, spec: ask_frozen(kit, name, spec, params, workdir),
      lambda source: weights.identity(source, workdir, config.seed), workdir)
  frozen = {name: make_frozen(kit, name, params, workdir)
            for name in p.sources if name not in ('policy', 'critic', *ready)}
  critic = None
  if 'critic' in p.sources:
    model = model_lib.build(
        model_lib.with_scalar_head(p.sources['critic'].config))
    critic = make_trainable(kit, 'critic', model, weights.load(
        p.sources['critic'], model, kit.train, config.model.param_dtype,
        workdir, seed=config.seed, ledger=kit.ledger))
  policy = make_trainable(kit, 'policy', p.model, params)
  teachers = tuple(v for k, v in frozen.items() if k.startswith('teacher_'))
  policy.frozen = distill_heads(kit, teachers)
  roles = Roles(policy, critic, frozen.get('reference'),
                frozen.get('reward_model'), teachers)
  samples = p.algorithm.on_policy or p.pool and config.eval.samples
  engine = make_engine(kit) if samples else None
  stream = make_controller(kit, roles, engine) if p.algorithm.on_policy else (
      DataStream(p.stream, p.algorithm, config, roles))
  return roles, stream, engine


def ask_frozen(kit: Kit, name: str, spec, params, workdir):
  """Host rows -> what a role, made when first asked, says of them."""
  role = functools.cache(lambda: make_frozen(kit, name, params, workdir))

  def run(batch):
    found = to_host(spec.read(role()(place(
        kit.score, kit.shape[1], batch))))
    return {k: x.reshape(-1, *x.shape[2:]) for k, x in found.items()}

  return run


def make_frozen(kit: Kit, name: str, params, workdir) -> Frozen:
  """A role that only reads, in the type that products round weights to."""
  p, config = kit.prepared, kit.config
  source, layout = p.sources[name], kit.score
  model = model_lib.build(source.config)
  if name == 'reference':
    model = p.model  # the policy as it is now
    params = weights.move(params, model.shardings(layout))
  else:
    params = weights.load(
        source, model, layout, config.model.param_dtype, workdir,
        seed=config.seed, ledger=kit.ledger)
  params = score.frozen_copy(
      model, params, kit.compute, model.shardings(layout), kit.ledger)
  make, options = score.make_score, {}
  if name == 'reference':
    options = dict(temperature=kit.objectives['policy'].temperature)
  elif name.startswith('teacher_'):
    d, make = config.distill, score.make_hidden
    if d.topk:
      make, options = score.make_topk, dict(
          k=d.topk, vocab_size=p.model.config.vocab_size,
          temperature=d.temperature)
  return Frozen(params, make(model, layout, kit.compute, kit.ledger, **options),
                layout, model)


def distill_heads(kit: Kit, teachers) -> dict:
  """The teachers' output embeddings, as the student's update reads them."""
  if not teachers:
    return {}
  student = kit.prepared.model.config

  def fit(head, vocab_size):
    if kit.ledger.dry and isinstance(head, jax.ShapeDtypeStruct):
      return jax.eval_shape(lambda x: fit(x, vocab_size), head)
    # Some families pad the vocabulary of larger models further. Of a smaller
    # one the padding goes: the number of rows tells what it lacks.
    rows = student.padded_vocab_size
    if vocab_size < student.vocab_size:
      rows = vocab_size
    if len(head) == rows:
      return head
    return jnp.pad(head[:rows], ((0, max(0, rows - len(head))), (0, 0)))

  heads = tuple(fit(t.model.head(t.params), t.model.config.vocab_size)
                for t in teachers)
  return {'teacher_heads': weights.move(heads, tuple(
      kit.train.sharding(('vocab', 'embed'), x.shape) for x in heads))}


def make_trainable(kit: Kit, role: str, model, params):
  """The policy or the critic, with optimizer, `update` and `score`."""
  p, config, o = kit.prepared, kit.config, kit.config.optim
  rl, objective = config.rl, kit.objectives[role]
  updates = rl.epochs * rl.minibatches if p.algorithm.on_policy else 1
  lr = config.critic.lr if role == 'critic' and config.critic.lr else o.lr
  schedule = optim.make_schedule(
      o.schedule, lr, config.train.steps * updates, o.warmup_steps, o.end_lr)
  optimizer = optim.make_optimizer(
      o.name, schedule,
      dict(b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay),
      optim.decayed(model.axes()))
  shardings = programs.state_shardings(model, optimizer, kit.train)
  update = programs.make_update(
      model, objective, optimizer, schedule, kit.train, kit.compute,
      kit.ledger, clip_norm=o.clip_norm or math.inf, shardings=shardings)
  read = score.make_score(
      model, kit.train, kit.compute, kit.ledger,
      temperature=objective.temperature)
  state = programs.make_state(params, optimizer, shardings, kit.ledger)
  if role == 'critic':
    return Trainable(model, state, kit.train, kit.shape[1], update, read)
  return Policy(model, state, kit.train, kit.shape[1], update, read,
                export_fn=functools.partial(export, p))


def make_engine(kit: Kit, slots: int = 0):
  from jaxpost.rollout.native import NativeEngine, SamplerConfig
  p, r, e = kit.prepared, kit.config.rollout, kit.config.eval
  wanted = r.prompts * r.group_size if kit.algorithm.on_policy else (
      e.size * e.samples)
  return NativeEngine(
      p.model, SamplerConfig(
          slots=slots or r.slots or min(wanted, 256),
          max_prompt=r.max_prompt_length, max_new_tokens=r.max_new_tokens,
          stop_ids=p.tokenizer.stop_ids,
          temperature=r.temperature, top_k=r.top_k, top_p=r.top_p,
          block=r.block),
      kit.rollout, kit.compute, kit.ledger)


def run_key(seed: int, purpose: int) -> np.ndarray:
  """Key data [2] uint32; training and evaluation draw from different ones."""
  key = jax.random.fold_in(jax.random.key(seed), purpose)
  return np.asarray(jax.random.key_data(key))


def make_grader(p: Prepared):
  from jaxpost import grading
  return grading.Grader(p.pool, p.tokenizer, reward_role.weight(p.config))


def make_controller(kit: Kit, roles: Roles, engine):
  from jaxpost.controller import Controller
  from jaxpost.data import demonstrations
  p, config = kit.prepared, kit.config
  sampler, share = Sampler(
      engine, run_key(config.seed, 1)), p.algorithm.from_data(config)
  if share:
    sampler = demonstrations.Mixed(
        sampler, p.tokenizer, share, config.seed,
        config.rollout.max_new_tokens)
  return Controller(
      p.algorithm, config, roles, sampler,
      make_grader(p), p.stream, kit.chrono, (kit.shape[0], kit.shape[2]),
      (kit.update_rows, kit.shape[2]))


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
    batch = self.algorithm.prepare(
        self.roles.policy.place(batch), self.roles, self.config)
    return Item([('policy', batch)], info)

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
    batches = loader.eval_batches(
        p.eval_examples, kit.shape[0], kit.shape[2],
        per=p.algorithm.mean_per(config))
    held_out = HeldOut(
        batches, programs.make_evaluate(
            p.model, kit.objectives['policy'], kit.train, kit.compute,
            kit.ledger),
        lambda batch, roles: p.algorithm.prepare(batch, roles, kit.config))
  if e.samples:
    from jaxpost import grading
    from jaxpost.evaluate import SampledEval
    values = functools.partial(
        grading.model_values, rows=(kit.shape[0], kit.shape[2]),
        at_once=config.rollout.prompts * config.rollout.group_size)
    sampled = SampledEval(
        Sampler(engine, run_key(config.seed, 2)), make_grader(p),
        p.eval_prompts, e.samples, e.pass_reward, e.temperature,
        values if 'reward_model' in p.sources else None)
  return Evaluator(held_out, sampled)


def compile_all(kit: Kit, roles: Roles, stream, engine, evaluator):
  """Compiles every program before step 0, two at a time."""
  p, config, length = kit.prepared, kit.config, kit.shape[2]
  on_policy, micro = p.algorithm.on_policy, kit.shape[1]
  sharding = kit.train.sharding((None, 'batch'), (1, micro))

  def placed(x, rows):
    return jax.ShapeDtypeStruct(
        (rows // micro, micro, *x.shape[1:]), x.dtype, sharding=sharding)

  if on_policy:
    ints, floats = (np.zeros((1, length), t) for t in (np.int32, np.float32))
    host = Batch(ints, ints, ints, floats, sequence_ids=ints,
                 branch_ids=ints if p.algorithm.pack else None)
  else:
    host = p.first_batch
  place = lambda rows: jax.tree.map(lambda x: placed(x, rows), host)
  plain, whole = place(kit.update_rows), place(kit.shape[0])
  per_token = placed(np.zeros((1, length), np.float32), kit.update_rows)
  names = {k for o in kit.objectives.values() for k in o.arrays}
  full = plain.replace(
      arrays={**dict.fromkeys(names, per_token), **plain.arrays},
      teacher_hidden=tuple(
          jax.ShapeDtypeStruct(
              (*per_token.shape, t.model.config.hidden_size),
              kit.compute.dtype, sharding=sharding) for t in roles.teachers))
  jobs = [functools.partial(
      r.update_program.compile, r.state, full, r.frozen)
      for r in roles.trainable.values()]
  reading = without_signal(whole)
  jobs += [functools.partial(role.compile, reading) for role in (
      roles.reference, roles.reward_model) if role]
  jobs += [functools.partial(role.compile, without_signal(plain))
           for role in roles.teachers]
  scores = p.algorithm.scores(config)
  readers = {'old_logprobs': 'policy',
             'values': 'critic' if roles.critic else 'policy'}
  for name in dict.fromkeys(readers[k] for k in scores if k in readers):
    trainable = roles.trainable[name]
    jobs.append(functools.partial(
        trainable.score_program.compile, trainable.params, reading))
  later = []  # shares programs with what is in `jobs`
  if evaluator and evaluator.held_out:
    later.append(functools.partial(
        evaluator.held_out.program.compile, roles.policy.params, full,
        roles.policy.state.step, roles.policy.frozen))
  if engine and on_policy:
    jobs += engine.jobs(roles.policy.params, p.stream.lengths,
                        config.rollout.group_size)
  if engine and evaluator and evaluator.sampled:
    sampled = evaluator.sampled
    later += engine.jobs(
        roles.policy.params, [len(x.tokens) for x in sampled.prompts],
        sampled.samples)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for some in jobs, later:
      for done in [pool.submit(job) for job in some]:
        done.result()


def seal(ledger: Ledger):
  ledger.sealed = True


def export(p: Prepared, folder, params):
  """Writes a Hugging Face folder that `transformers` loads."""
  t, pad, save = p.tokenizer, p.tokenizer.pad_id, p.tokenizer.save
  if p.algorithm.scalar_head:
    pad = reward_role.pad_id(t)
    save = functools.partial(reward_role.save_tokenizer, t)
  hf.save(folder, model_lib.build(dataclasses.replace(
      p.model.config, value_head=False)), params, stop_ids=t.stop_ids,
          bos_id=t.bos_id, pad_id=pad, tokenizer_save=save)
