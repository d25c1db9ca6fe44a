"""Sampling settings: the config of an engine, per-request overrides, and their checks.

Legend: S slots, M ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.errors import InputError, refuse
from jaxpost.hardware import memory
from jaxpost.models import rope
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.programs.sampling import Sampling
from jaxpost.rollout.sequence import Request

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout

IDS = 8  # a request may have at least this many stop ids and forbidden ids


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How an engine samples; `Request.sampling` overrides it per request.

  slots: sequences decoded at the same time.
  max_prompt: longest prompt, in tokens.
  max_context: longest prompt with its completion; 0: max_prompt + max_new_tokens.
  stop_ids: any of these ends a completion and is part of it; below 0: none.
  stop_strings: end a completion, too; the engine then needs `decode`.
  block: decode steps per dispatch.
  top_logprobs: number of most probable tokens reported at each position; a request may ask for fewer.
  sampling_mask: report the tokens that could be drawn, at most `top_k`, see `Rollout.allowed`.
  page_size: cache entries of a page, a power of two; 0: each slot holds the longest sequence.
  cache_tokens: entries of all pages; 0: half as many as slots without pages have.
  group_size: samples of each prompt in a rollout; calls with fewer do not prefill more prompts at a time.
  speculation: 'ngram' drafts tokens from samples of the same prompt (`drafts.py`); '': one token at a time.
  """

  slots: int
  max_prompt: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  forbidden_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  min_new_tokens: int = 0
  block: int = 8
  max_context: int = 0
  top_logprobs: int = 0
  sampling_mask: bool = False
  page_size: int = 0
  cache_tokens: int = 0
  group_size: int = 1
  speculation: str = ''

  @property
  def room(self) -> int:
    """Tokens of the longest sequence that a slot holds."""
    return self.max_context or self.max_prompt + self.max_new_tokens


def can_extend(cfg: ModelConfig) -> bool:
  """True if a cache takes several tokens at once: not of custom or recurrent models, nor while experts are recorded."""
  return not (isinstance(cfg, CustomConfig) or cfg.state_shapes or (cfg.experts and cfg.experts.record))


def check(cfg: ModelConfig, config: SamplerConfig, shards: int = 1) -> None:
  """Raises InputError if a model cannot be sampled with this config.

  shards: parts that the mesh splits the batch into.
  """
  limit = rope.by_length(cfg)
  rope_types = {dict(r.scaling).get('rope_type') for r in cfg.ropes} & set(rope.BY_LENGTH)
  refuse(
    0 < limit < config.room,
    f'config.rollout: a sequence may have {config.room} tokens (max_prompt_length + max_new_tokens, or --max_context '
    f'of a server), but rope scaling {"".join(rope_types)} rotates keys differently once a sequence is longer than '
    f'{limit}; shorten the longest sequence to that',
  )
  where, size = 'config.rollout.page_size', config.page_size
  refuse(bool(config.cache_tokens and not size), f'{where}: 0 leaves no pages to rollout.cache_tokens; set both')
  refuse(bool(size & (size - 1)), f'{where}: {size} is no power of two')
  refuse(
    size > 0 and bool(cfg.state_shapes),
    f'{where}: layers with a recurrent state keep it by slot, and sequences whose pages are shared would each need a '
    'copy; set it to 0',
  )
  refuse(
    size > 0 and shards > 1,
    f'{where}: pages are not split over devices; leave it 0, or give config.mesh.rollout a tensor axis only',
  )
  low, high = config.min_new_tokens, config.max_new_tokens
  refuse(low > high, f'config.rollout.min_new_tokens: {low} is more than max_new_tokens = {high}; lower it')
  count, vocab_size = config.top_logprobs, cfg.vocab_size
  refuse(count > vocab_size, f'config.rollout.top_logprobs: {count} of a vocabulary of {vocab_size}; lower it')
  refuse(
    config.sampling_mask and not 0 < config.top_k <= vocab_size,
    f'config.rl.sampling_mask: the ids of config.rollout.top_k tokens are kept for each one drawn; set it from 1 to '
    f'{vocab_size}',
  )
  if config.speculation:
    from jaxpost.rollout import drafts

    drafts.check(config, can_extend(cfg), shards)
  refuse('' in config.stop_strings, 'config.rollout.stop_strings: "" is in every text; leave it out')
  for name in 'stop_ids', 'forbidden_ids':
    check_ids(vars(config)[name], vocab_size, f'config.rollout.{name}')


_RANGES = {
  'temperature': (0, 1e4),
  **dict.fromkeys(('top_p', 'min_p'), (0, 1)),
  **dict.fromkeys(('top_k', 'min_tokens', 'seed', 'top_logprobs'), (0, 2**31 - 1)),
}


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
  """Raises InputError for ids outside the vocabulary; ids below 0 mean none."""
  wrong = [i for i in ids if i >= vocab_size]
  if wrong:
    raise InputError(f'{where}: {wrong[0]} is outside the vocabulary of {vocab_size}')


def widths(config: SamplerConfig) -> dict[str, int]:
  """{'stop_ids', 'forbidden_ids'}: number of ids that fit a request."""
  return {name: max(IDS, len(vars(config)[name])) for name in ('stop_ids', 'forbidden_ids')}


def sampling(config: SamplerConfig, overrides: dict) -> Sampling:
  """Returns the `Sampling` of one slot, as numpy scalars and [M] ids: the config, with `overrides` of a request."""
  values = dict(vars(config), min_tokens=config.min_new_tokens, max_tokens=config.max_new_tokens, seed=0) | overrides
  ids = {name: np.array([*values[name]] + [-1] * width, np.int32)[:width] for name, width in widths(config).items()}
  return Sampling(
    **{name: np.float32(values[name]) for name in ('temperature', 'top_p', 'min_p')},
    **{name: np.int32(values[name]) for name in ('top_k', 'min_tokens', 'max_tokens', 'seed', 'top_logprobs')},
    **ids,
  )


def check_request(config: SamplerConfig, request: Request, vocab_size: int) -> None:
  """Raises InputError if an engine with this config cannot serve a request; it begins with the wrong parameter."""
  size = len(request.tokens)
  overrides = request.sampling
  name = f'prompt {request.prompt}'
  refuse(not size, f'{name}: is empty; a sequence begins with at least one token')
  max_tokens = overrides.get('max_tokens', config.max_new_tokens)
  if max_tokens < 1 or size + max_tokens > config.room:
    raise InputError(
      f'max_tokens: {max_tokens} tokens to draw and the {size} of {name} do not fit the {config.room} of a slot; '
      'shorten it, or raise config.rollout.max_prompt_length (launch.serve: --max_context)'
    )
  for key, (low, high) in _RANGES.items():
    value = overrides.get(key, low)
    if not low <= value <= high:  # NaN is in no range
      raise InputError(f'{key}: {value} is not from {low} to {high} ({name})')
  if (count := overrides.get('top_logprobs', 0)) > (most := config.top_logprobs):
    raise InputError(f'top_logprobs: a request may ask for at most {most}, and {name} asks for {count}; ask for fewer')
  for string in overrides.get('stop_strings', ()):
    refuse(not isinstance(string, str) or not string, f'stop: {string!r} must be a text, not empty ({name})')
  for key, width in widths(config).items():
    ids = overrides.get(key, ())
    refuse(len(ids) > width, f'{key}: a request may name {width} token ids, and {name} names {len(ids)}; name fewer')
    check_ids(ids, vocab_size, f'{key} of {name}')


def free_bytes(layout: Layout) -> float:
  """Returns the free bytes of all devices of a layout together; inf if they do not report it."""
  stats = [d.memory_stats() for d in layout.mesh.local_devices]
  if all(s and 'bytes_limit' in s for s in stats):
    return len(layout.mesh.devices.flat) * min(s['bytes_limit'] - s['bytes_in_use'] for s in stats)
  if layout.mesh.devices.flat[0].platform == 'cpu':
    return memory.free_on_host()
  return float('inf')
