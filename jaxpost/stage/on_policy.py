"""Makes the parts of a stage that sample and grade: engine, sampler, grader, controller.

Imported only by stages that sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxpost.rl import grading
from jaxpost.rl.controller import Controller
from jaxpost.rl.reward_metrics import REWARD_MODEL
from jaxpost.rollout.native import NativeEngine
from jaxpost.rollout.sampler import Sampler
from jaxpost.stage import batch_shape, sampling_inputs
from jaxpost.types import Prompt, RowShape

if TYPE_CHECKING:
  from jaxpost.environments.episodes import Episodes
  from jaxpost.roles import Roles
  from jaxpost.stage.evaluate import SampledEval
  from jaxpost.stage.place import PlacedStage

_TRAINING, _EVALUATION = 1, 2  # purposes of keys, see `run_key`


def make_engine(placed: PlacedStage, slots: int = 0) -> NativeEngine:
  """Makes the engine that generates completions; it has no weights yet.

  Args:
    slots: sequences decoded at a time, each with its own prompt; 0 for groups of `config.rollout`.
  """
  model, tokenizer = placed.model, placed.inputs.tokenizer
  rollout, on_policy = placed.config.rollout, placed.algorithm.on_policy
  if placed.config.router.routing_replay:
    from jaxpost.models import routing

    model = routing.recording(model)
  compute, reshard, bridge = placed.compute, None, None
  if rollout.weights or rollout.cache:
    from jaxpost.models import scaled

    model, compute = scaled.for_sampler(model, compute, rollout)
  if rollout.share_base:
    from jaxpost.models import shared_weights

    reshard, model = shared_weights.share(model, placed.rollout)
  if placed.config.mesh.rollout_devices:
    from jaxpost.distributed.bridge import make_bridge

    bridge = make_bridge(placed.train, placed.rollout)
  return NativeEngine(
    model,
    sampling_inputs.engine_config(
      placed.config,
      slots=slots or batch_shape.slots(placed.config, on_policy),
      stop_ids=tokenizer.stop_ids,
      block=placed.decode_block,
      group_size=rollout.group_size if on_policy and not slots else 1,
    ),
    placed.rollout,
    compute,
    placed.ledger,
    decode=functools.partial(tokenizer.decode, skip_special=False),
    bridge=bridge,
    reshard=reshard,
    asynchronous=rollout.staleness > 0,
  )


def run_key(seed: int, purpose: int) -> np.ndarray:
  """Returns key data [2] uint32; training and evaluation draw from different keys."""
  return np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), purpose)))


def make_sampler(placed: PlacedStage, engine: NativeEngine, purpose: int) -> Sampler | Episodes:
  """Makes the sampler: of single answers, or of episodes if the stage has an environment."""
  key = run_key(placed.config.seed, purpose)
  if environment := placed.workers.environment:
    from jaxpost.environments import factory

    return factory.make_sampler(environment, placed.inputs.tokenizer, placed.config, engine, key)
  return Sampler(engine, key)


def make_grader(placed: PlacedStage, observers: Sequence[Callable] = ()) -> grading.Grader:
  """Makes the grader of rollouts on the stage's worker processes; `observers` as in `Grader`."""
  config = placed.config
  weights = dict(zip(config.rewards_tuple(), config.reward_weights))
  return grading.Grader(
    placed.workers.rewards,
    placed.inputs.tokenizer,
    model_weight=weights.get(REWARD_MODEL, 1.0),
    correct_by=sampling_inputs.correct_by(config, REWARD_MODEL in placed.inputs.sources),
    observers=observers,
    per_step=config.reward_model.per_step,
  )


def make_controller(placed: PlacedStage, roles: Roles, engine: NativeEngine | None) -> Controller:
  """Makes the stream of an on-policy algorithm, which turns prompts into graded batches."""
  config, algorithm, tokenizer = placed.config, placed.algorithm, placed.inputs.tokenizer
  sampler = make_sampler(placed, engine, _TRAINING)
  if config.train_on_rollouts:
    from jaxpost.rollout import rollout_files

    reads_logprobs = 'advantages' in placed.objectives['policy'].arrays
    temperature = config.rollout.temperature if reads_logprobs else None
    sampler = rollout_files.RecordedSampler(config.train_on_rollouts, placed.name, not config.reward, temperature)
  elif share := algorithm.data_share(config):
    from jaxpost.rl import demonstrations

    sampler = demonstrations.DemonstrationSampler(
      sampler=sampler, tokenizer=tokenizer, share=share, seed=config.seed, max_tokens=config.rollout.max_new_tokens
    )
  if config.rl.expert:
    from jaxpost.rl import demonstrations

    sampler = demonstrations.SamplerWithDemonstrations(sampler, tokenizer, config.rollout.max_new_tokens)
  shape, stream = placed.shape, placed.data.stream
  observers = []  # they are called with the grades of each group
  if config.rl.curriculum:
    from jaxpost.rl import curriculum

    stream.curriculum = curriculum.Curriculum(
      config.rl.curriculum, config.seed, config.eval.pass_reward, stream, per_step=config.rollout.prompts
    )
    observers.append(stream.curriculum.observe)
  if config.rl.sources:
    from jaxpost.rl import mixture

    observers.append(mixture.observe)
  grader = make_grader(placed, observers)
  surplus = correct_samples = None
  if config.rl.dynamic_sampling:
    from jaxpost.rl import dynamic_sampling

    surplus = dynamic_sampling.Surplus(grader, config.rl.keep_surplus)
  if config.rl.replay:
    from jaxpost.rl import replay

    correct_samples = replay.Replay(grader, config.rl.replay, config.eval.pass_reward)
  return Controller(
    algorithm=algorithm,
    config=config,
    roles=roles,
    sampler=sampler,
    grader=grader,
    prompts=stream,
    timer=placed.timer,
    step_shape=RowShape(shape.rows, shape.row_length, config.train.share_prompt),
    update_shape=RowShape(shape.update_rows, shape.row_length, config.train.share_prompt),
    engine=None if config.train_on_rollouts else engine,  # recorded rollouts need no weights
    surplus=surplus,
    replay=correct_samples,
  )


def make_sampled_eval(placed: PlacedStage, engine: NativeEngine, prompts: tuple[Prompt, ...]) -> SampledEval:
  """Makes the evaluation that samples completions of held-out prompts."""
  from jaxpost.stage.evaluate import SampledEval

  config, shape = placed.config, placed.shape
  score = None
  if REWARD_MODEL in placed.inputs.sources:
    from jaxpost.stage import reward_models

    sequences_per_row = shape.row_length // (config.rollout.max_prompt_length + config.rollout.max_new_tokens)
    score = functools.partial(
      reward_models.scores,
      shape=RowShape(shape.rows, shape.row_length, config.train.share_prompt),
      max_sequences=shape.rows * sequences_per_row,
    )
  return SampledEval(
    sampler=make_sampler(placed, engine, _EVALUATION),
    grader=make_grader(placed),
    prompts=prompts,
    samples=config.eval.samples,
    pass_reward=config.eval.pass_reward,
    temperature=config.eval.temperature,
    score=score,
    offload=config.rollout.offload,
  )
