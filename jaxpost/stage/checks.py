"""Refuses, before any device is used, configs that a run could not do.

Each function raises InputError with the field, the reason and a remedy.
"""

from __future__ import annotations

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
OF_METHODS = dict(  # section of a method: its fields that sampling reads, whatever the method
  nll=(), preference=(), reward_model=('path', 'per_step'), distill=(), rl=('correct_by', 'sources'), critic=()
)
_HOST_BYTES = 24  # of a token of a batch on the host: ids, positions, segments, weights and masks


def samples_held_out(config: Config) -> bool:
  """True if evaluation samples completions."""
  return bool(config.eval.data.path and config.eval.samples)


def samples(config: Config, algorithm: Algorithm) -> bool:
  """True if the stage samples completions, in training or evaluation."""
  return algorithm.on_policy or samples_held_out(config)


def check_config(config: Config, algorithm: Algorithm) -> None:
  """Refuses what the config alone shows to be wrong."""
  optim.check(config.optim)
  check_mesh(config, algorithm)
  if config.reference.every:
    from jaxpost.stage import moving_reference

    moving_reference.check(config, algorithm)
  refuse(
    config.save.keep_best and not config.eval.data.path,
    'config.save.keep_best: nothing is evaluated; set config.eval.data.path',
  )
  check_sizes(config, algorithm.on_policy)
  refuse(not config.data.path, 'config.data.path: is empty; name a file, a folder, org/name or generated:arithmetic')


def check_sections(stages: Collection[tuple[Algorithm, Config]]) -> None:
  """Refuses fields in the section of a method that no stage of a run reads."""
  unread = [name for name in OF_METHODS if not any(a.sections is None or name in a.sections for a, _ in stages)]
  adapters = any(config.lora.rank or config.lora.path for _, config in stages)
  for algorithm, config in stages:
    if not adapters:  # an earlier run may have some, which have a dropout
      refuse_unread(config.lora, ('dropout',), 'a run with lora.rank=0', 'lora')
    for name in unread:
      read = OF_METHODS[name] if samples(config, algorithm) else ()
      refuse_unread(vars(config)[name], (*read, *algorithm.needs(config)), config.algorithm, name)


def check_sizes(config: Config, on_policy: bool) -> None:
  """Refuses, by arithmetic, batches that the memory of this host cannot hold."""
  r, free = config.rollout, memory.free_on_host()
  prompts_and_completions = r.max_prompt_length + r.max_new_tokens
  sizes = {}
  if on_policy:
    sizes['config.rollout: prompts x group_size x (max_prompt_length + max_new_tokens)'] = (
      r.prompts * r.group_size * prompts_and_completions
    )
  else:
    sizes['config.train: batch_size x row_length'] = config.train.batch_size * row_length(config, False)
  if samples_held_out(config):
    sizes['config.eval: size x samples x (rollout.max_prompt_length + max_new_tokens)'] = (
      config.eval.size * config.eval.samples * prompts_and_completions
    )
  for what, tokens in sizes.items():
    needed = tokens * _HOST_BYTES
    if needed > free:
      raise InputError(
        f'{what} are {tokens:.3g} tokens, which take {needed / 2**30:.3g} GiB of this host as arrays of integers, '
        f'and {free / 2**30:.3g} are free; lower one of them'
      )


def check_mesh(config: Config, algorithm: Algorithm) -> None:
  """Refuses meshes that cannot be read, or that a phase cannot use."""
  section = config.mesh
  for phase, text in (('train', section.train), ('rollout', section.rollout), ('score', section.score)):
    if text != 'auto' or phase == 'score':
      phases.mesh_sizes(text, f'config.mesh.{phase}')
  refuse(
    'context' in section.rollout,
    'config.mesh.rollout: sampling has no use for context, which splits rows in training; use tensor',
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
  """Refuses options of router and sampler that this model does not support."""
  router = config.router
  refuse(
    not model.config.experts and bool(router.balance_coef or router.z_coef or router.routing_replay),
    'config.router: balance_coef, z_coef and routing_replay are of mixtures of experts; this model has none',
  )
  if config.rollout.top_logprobs or config.rollout.page_size:
    from jaxpost.rollout import sampler_config  # which no SFT run reads

    sampler_config.check_top_logprobs(config.rollout.top_logprobs, model.config.vocab_size)
    sampler_config.check_pages(config.rollout.page_size, model.config)
  if config.rollout.weights or config.rollout.cache:
    from jaxpost.models import scaled

    scaled.check(config.rollout, model)
  refuse(
    config.rollout.share_base and model.frozen <= model.mtp,
    'config.rollout.share_base: is for frozen weights under adapters (lora.rank or train.freeze); leave it False',
  )
  refuse(
    config.rollout.share_base and config.mesh.rollout_devices > 0,
    'config.rollout.share_base: the sampler has devices of its own (mesh.rollout_devices); leave it False',
  )


def check_head(source: Source, scalar_head: bool, key: str) -> None:
  """Refuses to train a language model from the weights of a reward model."""
  if source.config.num_labels and not scalar_head:
    raise InputError(
      f'{key}: these weights are of a reward model, which has no head for tokens; start from a language model'
      ' (stage:NAME names an earlier stage)'
    )


def check_stored(config: Config, algorithm: Algorithm, found: Mapping[str, Source]) -> None:
  """Refuses training on stored rollouts, or routing replay, where something needed is not stored."""
  if config.train_on_rollouts and (config.router.routing_replay or (config.environment and config.reward)):
    raise InputError(
      'config.train_on_rollouts: what is kept of a rollout has neither its experts '
      '(config.router.routing_replay) nor the parts of a reward (config.environment with config.reward); sample again'
    )
  if config.router.routing_replay and (
    not algorithm.on_policy
    or algorithm.pack
    or algorithm.data_share(config)
    or config.environment
    or set(found) - {'policy', 'reference'}
  ):
    raise InputError(
      'config.router.routing_replay: is for on-policy methods on whole completions, '
      'without data mixed in, environment, critic, reward model or teachers'
    )
