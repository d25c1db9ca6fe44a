"""Finds reward models, checks their tokens against the policy's, scores evaluations and exports their tokenizer."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.distributed import transfer
from jaxpost.errors import InputError, refuse
from jaxpost.rl import batching
from jaxpost.rl.reward_metrics import REWARD_MODEL
from jaxpost.rollout.rollout_codec import arrays_of
from jaxpost.stage import weight_sources
from jaxpost.storage import object_store

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.roles import Roles
  from jaxpost.stage.config import Config
  from jaxpost.stage.records import Source
  from jaxpost.types import Rollout, RowShape


def grades(config: Config, algorithm: Algorithm) -> bool:
  """Returns whether a reward model grades the completions of the stage's training."""
  return algorithm.on_policy and REWARD_MODEL in config.rewards_tuple()


def check_uses(config: Config, algorithm: Algorithm) -> None:
  """Refuses options that do not work with a reward model."""
  samples = config.eval.samples if config.eval.data.path else 0
  if algorithm.scalar_head and samples:
    raise InputError('config.eval.samples: a reward model writes no text; set it to 0 in the stage that trains one')
  per_step = config.reward_model.per_step
  refuse(
    per_step and (bool(config.environment) or not grades(config, algorithm)),
    f'config.reward_model.per_step: needs {REWARD_MODEL} in config.reward, without an environment; unset it',
  )
  if grades(config, algorithm):
    for name in ('dynamic_sampling', 'replay'):
      if vars(config.rl)[name]:
        raise InputError(f'config.rl.{name}: groups are chosen before a reward model scores them; set it to 0')
    if algorithm.greedy_baseline(config):
      raise InputError(
        f'config.reward: {REWARD_MODEL} does not grade the greedy answer that this '
        'method compares with; use another method, such as rloo'
      )
  elif samples and config.rewards_tuple() == (REWARD_MODEL,):
    raise InputError(
      f'config.eval.samples: only reward functions grade samples here, and '
      f'config.reward has none beside {REWARD_MODEL}; add one or set it to 0'
    )


def find(config: Config, find_source: Callable[[str, str], Source]) -> Source:
  """Finds the weights of the reward model by `find_source`, (text, config field) -> Source."""
  key, path = 'config.reward_model.path', config.reward_model.path
  refuse(not path, f'{key}: is empty, and config.reward asks for a reward model; name a folder, RUN or stage:NAME')
  source = find_source(path, key)
  if not source.config.num_labels:
    hint = ''
    if source.checkpoints is not None:
      hint = f'; RUN is its last stage, {source.checkpoints.name}: launch.export --stage=NAME writes another'
    raise InputError(f'{key}: {path} is a language model, it has no head that gives a reward{hint}')
  return source


def check_tokens(
  config: Config, role_sources: Mapping[str, Source], tokenizer: Tokenizer, earlier: Mapping[str, Tokenizer]
) -> None:
  """Raises InputError if the reward model or critic reads other tokens; see `weight_sources.check_tokenizer`."""
  for role in (REWARD_MODEL, 'critic'):
    key, path = f'config.{role}.path', vars(config)[role].path
    if role not in role_sources or not path:
      continue
    role_tokenizer = weight_sources.tokenizer_of(role_sources[role], earlier)
    size = role_sources[role].config.vocab_size
    needed = role_sources['policy'].config.vocab_size
    if size < needed or role_tokenizer is None and size != needed:
      raise InputError(
        f'{key}: {path} has a vocabulary of {size}, the policy has {needed}; it must read the tokens of the policy'
      )
    policy_ids = tokenizer.hf.get_vocab()  # token -> id
    role_ids = role_tokenizer.hf.get_vocab() if role_tokenizer else policy_ids
    for token in sorted({*policy_ids, *role_ids}):
      if policy_ids.get(token) != role_ids.get(token):
        raise InputError(
          f'{key}: {path} reads other tokens than the policy: the id of {token!r} is {role_ids.get(token)} there and '
          f'{policy_ids.get(token)} here; choose one that was trained with the tokenizer {tokenizer.source}'
        )
    if role_tokenizer:
      weight_sources.warn_of_other_chats(path, role_tokenizer, tokenizer)


def scores(rollout: Rollout, roles: Roles, *, max_sequences: int, shape: RowShape) -> np.ndarray:
  """Returns the outputs [N, C] of the reward model for N sequences of C tokens, in as many batches as needed.

  Args:
    max_sequences: how many sequences fit into a batch of `shape`.
  """
  assert roles.reward_model
  group_size = rollout.group_size
  out = []
  for start in range(0, len(rollout.lengths), max_sequences):
    members = [*range(start, min(start + max_sequences, len(rollout.lengths)))]
    arrays = {name: x[members] for name, x in arrays_of(rollout).items()}
    part = rollout.replace(prompts=tuple(rollout.prompts[n // group_size] for n in members), **arrays)
    batch = batching.to_batch(part, range(len(members)), batching.completion_mask(part), {}, shape)
    values = roles.reward_model(roles.policy.place(batch)).values
    out.append(batching.from_rows(part, transfer.to_host(values), shape))
  return np.concatenate(out)


def pad_id(tokenizer: Tokenizer) -> int:
  """Returns the id of a padding token that is not a stop token.

  transformers reads the score at the last token that is not padding. If the stop token were the padding token, it would
  read the score one token too early.
  """
  candidates = (tokenizer.pad_id, tokenizer.bos_id, *sorted(tokenizer.hf.added_tokens_decoder))
  usable = [i for i in candidates if i is not None and i not in tokenizer.stop_ids]
  if not usable:
    logging.warning('%s: can pad only with a stop token; read scores of one text at a time', tokenizer.source)
  return (usable or candidates)[0]


def save_tokenizer(tokenizer: Tokenizer, folder: epath.PathLike) -> None:
  """Writes the tokenizer's files, with `pad_id` as its padding token."""
  tokenizer.save(folder)
  if (pad := pad_id(tokenizer)) != tokenizer.pad_id:
    path = pathlib.Path(folder) / 'tokenizer_config.json'
    saved = object_store.read_json(path) if path.exists() else {}
    object_store.write_json(path, saved | {'pad_token': tokenizer.hf.convert_ids_to_tokens(pad)})
