"""Prepares a stage that samples, before a device is used: checks, prompts, rewards, environments.

Imported only by stages that sample. The checks of every stage are in `checks.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.data import sources
from jaxpost.data.sources import Rows
from jaxpost.distributed import coordination
from jaxpost.errors import refuse
from jaxpost.rewards import builtin
from jaxpost.rl.reward_metrics import REWARD_MODEL
from jaxpost.rollout import sampler_config
from jaxpost.stage import checks, epochs
from jaxpost.stage.batch_shape import row_length
from jaxpost.stage.records import Inputs, PreparedStage, Workers
from jaxpost.types import Batch

if TYPE_CHECKING:
  from jaxpost.data.prompts import PromptStream
  from jaxpost.models.model import Model
  from jaxpost.rewards.pool import RewardPool
  from jaxpost.stage.config import Config
  from jaxpost.stage.place import PlacedStage


def prepare(
  inputs: Inputs, rows: Rows, held_out_rows: Rows | None, before: Sequence[PreparedStage], make_data: Callable
) -> PreparedStage:
  """Makes the data of a stage that samples, see `prepare.make_data`, and starts its worker processes."""
  config, algorithm, role_sources, tokenizer = inputs.config, inputs.algorithm, inputs.sources, inputs.tokenizer
  if {REWARD_MODEL, 'critic'} & role_sources.keys():
    from jaxpost.stage import reward_models

    reward_models.check_tokens(config, role_sources, tokenizer, {p.name: p.inputs.tokenizer for p in before})
  check_model(config, inputs.model)
  with contextlib.ExitStack() as undo:  # ends the processes if a later step fails
    environment = None
    evaluated = sources.first(held_out_rows, config.eval.size) if checks.samples_held_out(config) else ()
    sampled_rows = [data for data in (rows if algorithm.on_policy else (), evaluated) if data]
    if config.environment:
      from jaxpost.environments import factory

      environment = factory.start_environments(config, algorithm, tokenizer, sampled_rows)
      undo.callback(environment.close)
    data = make_data(inputs, rows, held_out_rows, environment.tools if environment else None)
    check_sampling(config, algorithm.on_policy, algorithm.rewards or checks.samples_held_out(config))
    if algorithm.data_share(config) or config.rl.expert:
      from jaxpost.rl import demonstrations

      demonstrations.check(tokenizer, rows, checks.READ_FIRST)
    if algorithm.on_policy and config.rl.privileged and not (config.data.streaming or config.train_on_rollouts):
      from jaxpost.algorithms import teachers

      for index in range(min(len(data.stream), checks.READ_FIRST)):
        teachers.teacher_prompt(data.stream.prompt(index), config, tokenizer)
    inputs = epochs.count_steps(inputs, data)
    if config.train_on_rollouts and algorithm.on_policy:
      from jaxpost.rollout import rollout_files

      recorded = rollout_files.RecordedSampler(config.train_on_rollouts, inputs.name, rewards=not config.reward)
      recorded.check(inputs.config.train.steps)
    rewards = start_rewards(config, sampled_rows) if config.rewards_tuple() else None
    undo.pop_all()
  return PreparedStage(inputs, data, Workers(rewards, environment))


def check_sampling(config: Config, on_policy: bool, rewards: bool = True) -> None:
  """Refuses configs with which the controller could not sample, grade or batch; `rewards`: whether it grades."""
  only_recorded = config.train_on_rollouts and not checks.samples_held_out(config)
  can_grade = config.rewards_tuple() or config.environment or only_recorded
  refuse(rewards and not can_grade, 'config.reward: is empty; name a built-in reward, pkg.module:fn or ./file.py:fn')
  specs, weights = config.rewards_tuple(), config.reward_weights
  refuse(
    bool(specs and weights) and len(weights) != len(specs),
    f'config.reward_weights: {len(weights)} weights for {len(specs)} rewards; give one each, or ()',
  )
  decides = correct_by(config, on_policy and REWARD_MODEL in specs)  # raises if it names no reward of the stage
  if not on_policy:
    return
  r, rl = config.rollout, config.rl
  of_prompts = bool(rl.curriculum or rl.replay) and config.eval.pass_reward == 1.0
  of_trained = (config.algorithm == 'rft' or rl.correct_nll_coef > 0) and rl.keep_reward == 1.0
  refuse(
    decides == REWARD_MODEL and (of_prompts or of_trained),
    f'config.{"eval.pass_reward" if of_prompts else "rl.keep_reward"}: curriculum, replay, rft and correct_nll_coef '
    'need to know which answers are right, and the zero of a reward model is arbitrary; set it to the smallest reward '
    'of a right answer',
  )
  refuse(
    bool(config.train_on_rollouts) and bool(rl.dynamic_sampling or rl.curriculum or rl.advantage == 'remax'),
    'config.train_on_rollouts: stored rollouts have neither resampled groups nor greedy answers, and no prompts are '
    'drawn; leave out rl.dynamic_sampling, rl.curriculum and remax',
  )
  refuse(
    r.staleness > 0 and bool(config.train_on_rollouts or rl.advantage == 'remax'),
    f'config.rollout.staleness: {r.staleness} does not work with config.train_on_rollouts or the greedy answers of '
    'remax; set it to 0',
  )
  refuse(
    r.offload and (r.staleness > 0 or config.mesh.rollout_devices > 0),
    'config.rollout.offload: rollout.staleness and mesh.rollout_devices sample beside training; leave it False',
  )
  refuse(
    r.inflight_update_blocks > 0 and not r.staleness,
    'config.rollout.inflight_update_blocks: with rollout.staleness=0 there are no newer weights; leave it 0',
  )
  length, needed = row_length(config, True), r.max_prompt_length + r.max_new_tokens
  refuse(
    length < needed,
    f'config.train.row_length: {length} is less than max_prompt_length + max_new_tokens = {needed}; raise it or leave '
    'it 0',
  )
  refuse(
    r.prompts * r.group_size % rl.minibatches > 0,
    f'config.rl.minibatches: {rl.minibatches} does not divide the {r.prompts} x {r.group_size} completions of a step',
  )


def check_model(config: Config, model: Model) -> None:
  """Refuses options with which the engine of a stage, if it has one, could not sample from the policy."""
  if config.router.routing_replay:
    from jaxpost.models import routing

    model = routing.recording(model)
  if not config.train_on_rollouts or checks.samples_held_out(config):
    sampler_config.check(model.config, engine_config(config, stop_ids=()))


def engine_config(config: Config, **others) -> sampler_config.SamplerConfig:
  """Returns the config of an engine that samples as the stage does; `others` replace fields, or add them."""
  rollout, fields = vars(config.rollout), dataclasses.fields(sampler_config.SamplerConfig)
  values = {field.name: rollout[field.name] for field in fields if field.name in rollout}
  values |= dict(max_prompt=config.rollout.max_prompt_length, sampling_mask=config.rl.sampling_mask)
  return sampler_config.SamplerConfig(**values | others)


def prompt_stream(
  inputs: Inputs, rows: Rows, per_step: int = 0, shuffle: bool = True, tools: list[dict] | dict | None = None
) -> PromptStream:
  """Makes the stream of prompts of `rows`.

  Args:
    per_step: prompts per step; 0 for `config.rollout.prompts`.
    shuffle: False keeps the order of the file.
    tools: JSON schemas of the tools that prompts list, or {environment of `config.rl.sources`: its schemas}.
  """
  from jaxpost.data.prompts import PromptStream

  rollout, sources = inputs.config.rollout, ()
  if inputs.config.rl.sources:
    from jaxpost.rl import mixture

    sources, tools = mixture.of_prompts(inputs, reward_names(inputs.config), rows, tools, held_out=not shuffle)
  return PromptStream(
    rows,
    inputs.tokenizer,
    per_step=per_step or rollout.prompts,
    max_prompt_length=rollout.max_prompt_length,
    seed=inputs.config.seed,
    shuffle=shuffle,
    system_prompt=inputs.config.data.system_prompt,
    tools=tools,
    sources=sources,
  )


def start_rewards(config: Config, data: Sequence[Rows]) -> RewardPool | None:
  """Starts the processes of the reward functions that grade `data`; returns None if only a reward model grades.

  Raises:
    InputError: a function cannot be imported, does not take the columns of the rows, or cannot grade one.
  """
  from jaxpost.rewards.pool import RewardPool

  specs, weights = config.rewards_tuple(), config.reward_weights
  functions = [i for i, spec in enumerate(specs) if spec != REWARD_MODEL]  # their indices in `specs`
  if not functions:
    return None
  pool = RewardPool(
    tuple(specs[i] for i in functions),
    weights=[weights[i] for i in functions] if weights else None,
    workers=config.rewards.workers,
    timeout_s=config.rewards.timeout_s,
    max_failed=config.rewards.max_failed,
    env_vars=config.rewards.env_vars,
    show_printed=coordination.process_index() == 0,
  )
  with contextlib.ExitStack() as undo:
    undo.callback(pool.close)
    for rows in data:
      if config.rl.sources:
        from jaxpost.rl import mixture

        mixture.check_rows(pool, rows, mixture.parse(config, pool.names, rows))
      else:
        pool.check_rows(rows)
    undo.pop_all()
  return pool


def reward_names(config: Config) -> list[str]:
  """Returns the names of the reward functions, without the reward model."""
  return list(builtin.short_names([spec for spec in config.rewards_tuple() if spec != REWARD_MODEL]))


def correct_by(config: Config, model_grades: bool) -> str:
  """Returns the name of the reward that decides which answers are correct; '' if nothing is graded.

  Args:
    model_grades: whether a reward model is among the roles of the stage.

  Raises:
    InputError: config.rl.correct_by is no reward of the stage.
  """
  names = reward_names(config)
  if config.environment:
    names.append('environment')
  if model_grades:
    names.append(REWARD_MODEL)
  return builtin.pick(names, config.rl.correct_by, 'config.rl.correct_by')


def empty_row(placed: PlacedStage, branches: bool) -> Batch:
  """Returns an empty batch of one row with the fields of packed rollouts; `branches`: whether prompts are shared."""
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
