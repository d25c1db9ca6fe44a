"""Refuses configs that cannot run, before any device is used.

Each function raises InputError with the field, the reason and a remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from jaxpost.distributed import phases
from jaxpost.errors import InputError, refuse, refuse_unread
from jaxpost.hardware import memory
from jaxpost.matmul import WHOLE_ROW_KERNELS
from jaxpost.stage import optim
from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.models.model import Model
  from jaxpost.stage.config import Config
  from jaxpost.stage.records import Source

READ_FIRST = 20_000  # documents that are tokenized, and so checked, before step 0
OF_METHODS = dict(  # section that only some methods read: its fields that sampling reads under every method
  nll=(), preference=(), reward_model=('path', 'per_step'), distill=(), rl=('correct_by', 'sources'), critic=()
)
_HOST_BYTES = 24  # per token of a batch on the host: ids, positions, segments, weights and masks


def samples_held_out(config: Config) -> bool:
  """True if evaluation samples completions."""
  return bool(config.eval.data.path and config.eval.samples)


def samples(config: Config, algorithm: Algorithm) -> bool:
  """True if the stage samples completions, in training or evaluation."""
  return algorithm.on_policy or samples_held_out(config)


def check_config(config: Config, algorithm: Algorithm) -> None:
  """Refuses errors that show in the config alone, in a run or a plan: without data, weights or the run's host."""
  optim.check(config.optim)
  check_mesh(config, algorithm)
  if config.reference.every:
    from jaxpost.stage import moving_reference

    moving_reference.check(config, algorithm)
  if config.save.keep_best:
    from jaxpost.stage import evaluate

    evaluate.check_keep_best(config, algorithm)


def check_sections(stages: Collection[tuple[Algorithm, Config]]) -> None:
  """Refuses fields that are set in a method's section if no stage reads that section; warns of those of samples."""
  unread = [name for name in OF_METHODS if not any(a.sections is None or name in a.sections for a, _ in stages)]
  is_sampled = any(algorithm.sections is None or samples(config, algorithm) for algorithm, config in stages)
  for name in () if is_sampled else ('reward', 'reward_weights', 'environment', 'train_on_rollouts'):
    if any(vars(config)[name] for _, config in stages):  # a recipe sets them, and its evaluation may be off
      logging.warning('config.%s changes nothing: no stage samples (config.algorithm, config.eval.samples)', name)
  adapters = any(config.lora.rank or config.lora.path for _, config in stages)
  for algorithm, config in stages:
    if not adapters:
      refuse_unread(config.lora, ('dropout',), 'a run with lora.rank=0', 'lora')
    for name in unread:
      read_by_sampling = OF_METHODS[name] if samples(config, algorithm) else ()
      refuse_unread(vars(config)[name], (*read_by_sampling, *algorithm.needs(config)), config.algorithm, name)


def check_sizes(config: Config, on_policy: bool) -> None:
  """Refuses batches whose arrays would not fit into the free memory of this host."""
  rollout, free_bytes = config.rollout, memory.free_on_host()
  sequence_length = rollout.max_prompt_length + rollout.max_new_tokens
  batch_tokens = {}  # {the fields whose product it is: tokens of a batch}
  if on_policy:
    fields = 'config.rollout: prompts x group_size x (max_prompt_length + max_new_tokens)'
    batch_tokens[fields] = rollout.prompts * rollout.group_size * sequence_length
  else:
    batch_tokens['config.train: batch_size x row_length'] = config.train.batch_size * row_length(config, False)
  if samples_held_out(config):
    fields = 'config.eval: size x samples x (rollout.max_prompt_length + max_new_tokens)'
    batch_tokens[fields] = config.eval.size * config.eval.samples * sequence_length
  for fields, tokens in batch_tokens.items():
    needed_bytes = tokens * _HOST_BYTES
    if needed_bytes > free_bytes:
      raise InputError(
        f'{fields} are {tokens:.3g} tokens, which take {needed_bytes / 2**30:.3g} GiB of host memory, and only '
        f'{free_bytes / 2**30:.3g} GiB are free; lower one of them'
      )


def check_mesh(config: Config, algorithm: Algorithm) -> None:
  """Refuses meshes that cannot be read, or that a phase cannot use."""
  section = config.mesh
  for phase, text in (('train', section.train), ('rollout', section.rollout), ('score', section.score)):
    if text != 'auto' or phase == 'score':
      phases.mesh_sizes(text, f'config.mesh.{phase}')
  refuse(
    'context' in section.rollout,
    'config.mesh.rollout: the context axis splits rows in training and is of no use in sampling; use tensor',
  )
  refuse(
    'context' in section.train + section.score and config.model.attention in WHOLE_ROW_KERNELS,
    f'config.model.attention: {config.model.attention} cannot attend over '
    'rows that a context axis splits; leave it auto',
  )
  trains_on_samples = algorithm.on_policy and not config.train_on_rollouts
  refuse(
    section.rollout_devices > 0 and not (trains_on_samples or samples_held_out(config)),
    f'config.mesh.rollout_devices: {config.algorithm} samples nothing with this config; leave it 0',
  )
  refuse(
    section.score_devices > 0 and not (algorithm.needs(config) or 'reward_model' in config.rewards_tuple()),
    f'config.mesh.score_devices: {config.algorithm} has no reference, teacher or reward model; leave it 0',
  )


def check_model(config: Config, model: Model) -> None:
  """Refuses router and sampler options that this model does not support."""
  router = config.router
  refuse(
    not model.config.experts and bool(router.balance_coef or router.z_coef or router.routing_replay),
    'config.router: balance_coef, z_coef and routing_replay are for mixtures of experts; this model has no experts',
  )
  if config.rollout.weights or config.rollout.cache:
    from jaxpost.models import scaled

    scaled.check(config.rollout, model)
  refuse(
    config.rollout.share_base and model.frozen <= model.mtp,
    'config.rollout.share_base: is for frozen weights under adapters (lora.rank or train.freeze); leave it False',
  )
  refuse(
    config.rollout.share_base and config.mesh.rollout_devices > 0,
    'config.rollout.share_base: the sampler has its own devices (mesh.rollout_devices); leave it False',
  )


def check_head(source: Source, scalar_head: bool, key: str) -> None:
  """Refuses to train a language model from the weights of a reward model."""
  if source.config.num_labels and not scalar_head:
    raise InputError(
      f'{key}: these weights are of a reward model, which has no head for tokens; start from a language model'
      ' (stage:NAME names an earlier stage)'
    )


def check_stored(config: Config, algorithm: Algorithm, role_sources: Mapping[str, Source]) -> None:
  """Refuses training on stored rollouts, and routing replay, if something that they need is not stored."""
  if config.train_on_rollouts and (config.router.routing_replay or (config.environment and config.reward)):
    raise InputError(
      'config.train_on_rollouts: stored rollouts have neither the chosen experts (config.router.routing_replay) '
      'nor the parts of a reward (config.environment with config.reward); sample again'
    )
  if config.router.routing_replay and (
    not algorithm.on_policy
    or algorithm.pack
    or algorithm.data_share(config)
    or config.environment
    or set(role_sources) - {'policy', 'reference'}
  ):
    raise InputError(
      'config.router.routing_replay: is for on-policy methods on whole completions, '
      'without data mixed in, environment, critic, reward model or teachers'
    )
