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

from jaxpost import build, optim, plan
from jaxpost.build import Prepared
from jaxpost.checkpoint import Checkpointer
from jaxpost.data import loader
from jaxpost.evaluate import Evaluator
from jaxpost.loop import Item, Stage
from jaxpost.matmul import Compute, compute_for
from jaxpost.metrics import Chrono, MetricsWriter
from jaxpost.models import hf
from jaxpost.models.transformer import flops_per_token
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.roles import Policy, Reference, Sampler
from jaxpost.sharding import Layout, make_layout
from jaxpost.types import Batch


@dataclasses.dataclass
class Kit:
  """What the parts of a stage share."""

  prepared: Prepared
  train: Layout
  rollout: Layout
  compute: Compute
  objective: programs.Objective
  ledger: Ledger
  chrono: Chrono
  shape: tuple[int, int, int]  # rows, rows at a time, tokens

  @property
  def config(self):
    return self.prepared.config

  @property
  def on_policy(self) -> bool:
    return self.prepared.algorithm.ON_POLICY


def make_kit(p: Prepared) -> Kit:
  config = p.config
  train = make_layout(config.mesh.train, 'train')
  compute = compute_for(
      jax.default_backend(), config.model.dtype, config.model.remat)
  return Kit(
      p, train, make_layout(config.mesh.rollout, 'rollout', beside=train),
      compute,
      p.algorithm.make_objective(config), Ledger(), Chrono(),
      build.batch_shape(config, p.algorithm.ON_POLICY, train.batch_shards))


def assemble(kit: Kit, workdir, writer: MetricsWriter, params) -> Stage:
  """The stage, ready to run from its first step.

  Args:
    params: initial parameters in `kit.train`; their buffers are taken over.
  """
  p, config = kit.prepared, kit.config
  policy, stream, engine, reference = make_parts(kit, params)
  save, log = config.save, config.log
  stage = Stage(
      p.name, config.train.steps, policy, stream, make_evaluator(kit, engine),
      Checkpointer(epath.Path(workdir) / 'checkpoints' / p.name,
                   keep=save.keep, keep_best=save.keep_best,
                   best_mode=save.best_mode),
      writer, kit.chrono, dict(model=dataclasses.asdict(p.model.config)),
      functools.partial(seal, kit.ledger),
      functools.partial(p.algorithm.check_first_step, config=config),
      on_policy=kit.on_policy, eval_every=config.eval.every,
      save_every=save.every, samples_every=log.samples_every,
      max_skipped=config.optim.max_skipped, watchdog_s=log.watchdog_s,
      flops_per_token=flops_per_token(p.model.config, kit.shape[2] / 2),
      peak_flops=plan.peak_flops(jax.devices()))
  compile_all(kit, policy, reference, engine, stage.evaluate)
  return stage


def make_parts(kit: Kit, params) -> tuple:
  """(policy, stream, engine, reference); None for what the stage lacks."""
  p, reference = kit.prepared, None
  score = programs.make_score(
      p.model, kit.train, kit.compute, kit.ledger,
      temperature=kit.objective.temperature)
  if kit.on_policy and kit.config.rl.kl_coef:
    reference = Reference(programs.frozen_copy(
        p.model, params, kit.compute, p.model.shardings(kit.train),
        kit.ledger), score)
  policy = make_policy(kit, params, score)
  engine = make_engine(kit) if p.pool else None
  stream = make_controller(kit, policy, engine, reference) if (
      kit.on_policy) else DataStream(p.stream)
  return policy, stream, engine, reference


def make_policy(kit: Kit, params, score) -> Policy:
  p, o = kit.prepared, kit.config.optim
  repeats = kit.config.rl.updates_per_rollout if kit.on_policy else 1
  schedule = optim.make_schedule(
      o.schedule, o.lr, kit.config.train.steps * repeats, o.warmup_steps,
      o.end_lr)
  optimizer = optim.make_optimizer(
      o.name, schedule,
      dict(b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay),
      optim.decayed(p.model.axes()))
  shardings = programs.state_shardings(p.model, optimizer, kit.train)
  update = programs.make_update(
      p.model, kit.objective, optimizer, schedule, kit.train, kit.compute,
      kit.ledger, clip_norm=o.clip_norm or math.inf, shardings=shardings)
  return Policy(
      p.model, programs.make_state(params, optimizer, shardings, kit.ledger),
      kit.train, kit.shape[1], update, score, functools.partial(export, p))


def make_engine(kit: Kit, slots: int = 0):
  from jaxpost.rollout.native import NativeEngine, SamplerConfig
  p, r, e = kit.prepared, kit.config.rollout, kit.config.eval
  wanted = r.prompts * r.group_size if kit.on_policy else e.size * e.samples
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


def make_controller(kit: Kit, policy, engine, reference):
  from jaxpost.controller import Controller
  p, config = kit.prepared, kit.config
  return Controller(
      p.algorithm, config, policy, Sampler(engine, run_key(config.seed, 1)),
      reference, p.pool, p.stream, p.tokenizer, kit.chrono,
      config.rollout.group_size, (kit.shape[0], kit.shape[2]),
      config.rl.updates_per_rollout)


@dataclasses.dataclass
class DataStream:
  """A data set as a stream of items."""

  batches: loader.PackedStream

  def __iter__(self):
    return self

  def __next__(self) -> Item:
    return Item(*next(self.batches))

  def state(self) -> dict:
    return self.batches.state()

  def restore(self, state: dict):
    self.batches.restore(state)

  def close(self):
    self.batches.close()


def make_evaluator(kit: Kit, engine) -> Evaluator | None:
  p, e = kit.prepared, kit.config.eval
  if p.eval_rows is None:
    return None
  batches, sampled = [], None
  if not kit.on_policy:
    batches = loader.eval_batches(
        p.eval_examples, kit.shape[0], kit.shape[2])
  if e.samples:
    from jaxpost import controller
    from jaxpost.evaluate import SampledEval
    sampled = SampledEval(
        Sampler(engine, run_key(kit.config.seed, 2)), p.pool,
        p.eval_prompts, e.samples, e.pass_reward, e.temperature,
        functools.partial(controller.to_groups, tokenizer=p.tokenizer),
        controller.sample_rows)
  return Evaluator(batches, sampled)


def compile_all(kit: Kit, policy: Policy, reference, engine, evaluator):
  """Compiles every program before step 0, two at a time."""
  rows, micro, length = kit.shape
  sharding = kit.train.sharding((None, 'batch', None), (1, micro, 1))
  array = lambda dtype: jax.ShapeDtypeStruct(
      (rows // micro, micro, length), dtype, sharding=sharding)
  plain = Batch(*(array(jnp.int32) for _ in range(3)), array(jnp.float32))
  full, old = plain, kit.config.rl.updates_per_rollout > 1
  if kit.on_policy:
    signal = dict(advantages=True, sampler_logprobs=True,
                  ref_logprobs=reference is not None, old_logprobs=old)
    full = plain.replace(
        **{k: array(jnp.float32) for k, used in signal.items() if used})
  jobs = [lambda: policy.update_program.compile(policy.state, full)]
  if reference:
    jobs.append(
        lambda: reference.score_program.compile(reference.params, plain))
  later = []  # shares programs with what is in `jobs`
  if evaluator and evaluator.batches or kit.on_policy and old:
    later.append(lambda: policy.score_program.compile(policy.params, plain))
  if engine and kit.on_policy:
    jobs += engine.jobs(policy.params, kit.prepared.stream.lengths,
                        kit.config.rollout.group_size)
  if engine and evaluator and evaluator.sampled:
    sampled = evaluator.sampled
    later += engine.jobs(
        policy.params, [len(p.tokens) for p in sampled.prompts],
        sampled.samples)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for some in jobs, later:
      for done in [pool.submit(job) for job in some]:
        done.result()


def seal(ledger: Ledger):
  ledger.sealed = True


def export(p: Prepared, folder, params):
  """Writes a Hugging Face folder that `transformers` loads."""
  t = p.tokenizer
  hf.save(folder, p.model, params, stop_ids=t.stop_ids, bos_id=t.bos_id,
          pad_id=t.pad_id, tokenizer_save=t.save)
