"""How completions are sampled, and what cannot be.

Legend: S slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.errors import InputError
from jaxpost.hardware import host
from jaxpost.models import rope
from jaxpost.types import Request, Sampling

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.config import ModelConfig

IDS = 8  # at least so many stop ids and forbidden ids fit a request


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How completions are sampled; requests may differ, see `Request.sampling`.

  slots: sequences in flight. max_prompt: longest prompt, in tokens.
  max_context: longest text with what is drawn; 0: the sum of the two others.
  stop_ids: any of these ends a completion and is part of it; below 0: none.
  stop_strings: likewise, and needs `decode` of the engine.
  block: tokens per dispatch.
  top_logprobs: how many of the likeliest tokens to report at each place; a
    request may ask for fewer.
  page_size: cache entries of a page, a power of two; 0: each slot has room
    for the longest text. cache_tokens: entries of all pages; 0: half of what
    slots with room for the longest text would have.
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
  page_size: int = 0
  cache_tokens: int = 0

  @property
  def room(self) -> int:
    """The longest text that a slot holds."""
    return self.max_context or self.max_prompt + self.max_new_tokens


def rung(length: int, longest: int, smallest: int = 32) -> int:
  """The least of 32, 64, 128, ... that holds `length`, at most `longest`."""
  size = smallest
  while size < length:
    size *= 2
  return min(size, longest)


def _check_lengths(cfg: ModelConfig, config: SamplerConfig):
  """Cached keys must be those that training would make of the whole text."""
  limit, longest = rope.by_length(cfg), config.room
  if limit and longest > limit:
    kinds = {dict(r.scaling).get('rope_type') for r in cfg.ropes}
    raise InputError(
      f'config.rollout: max_prompt_length + max_new_tokens = {longest}, but '
      f'rope scaling {"".join(kinds & set(rope.BY_LENGTH))} turns keys '
      f'otherwise once a text is longer than {limit}; lower them to that'
    )


def _check_pages(config: SamplerConfig, shards: int):
  if config.page_size & (config.page_size - 1):
    raise InputError(f'config.rollout.page_size: {config.page_size} is no power of two')
  if shards > 1:
    raise InputError(
      'config.rollout.page_size: pages are not split over devices; leave it '
      '0, or give config.mesh.rollout a tensor axis only'
    )


def check_likeliest(most: int, vocab_size: int):
  """InputError where `top_logprobs` are more than there are tokens."""
  if most > vocab_size:
    raise InputError(f'config.rollout.top_logprobs: {most} of a vocabulary of {vocab_size}; lower it')


def check(cfg: ModelConfig, config: SamplerConfig, shards: int):
  """InputError where no sampler could work like this."""
  _check_lengths(cfg, config)
  if config.page_size:
    _check_pages(config, shards)
  if config.min_new_tokens > config.max_new_tokens:
    raise InputError(
      f'config.rollout.min_new_tokens: {config.min_new_tokens} is more than '
      f'max_new_tokens = {config.max_new_tokens}; lower it'
    )
  check_likeliest(config.top_logprobs, cfg.vocab_size)
  if '' in config.stop_strings:
    raise InputError('config.rollout.stop_strings: "" is in every text; leave it out')
  for name in 'stop_ids', 'forbidden_ids':
    check_ids(vars(config)[name], cfg.vocab_size, f'config.rollout.{name}')


_INT = 2**31 - 1
_RANGES = {
  'temperature': (0, 1e4),
  'top_p': (0, 1),
  'min_p': (0, 1),
  'top_k': (0, _INT),
  'min_tokens': (0, _INT),
  'seed': (0, _INT),
  'top_logprobs': (0, _INT),
}


def check_ids(ids: Sequence[int], vocab_size: int, where: str):
  """InputError for ids outside the vocabulary; those below 0 mean none."""
  wrong = [i for i in ids if i >= vocab_size]
  if wrong:
    raise InputError(f'{where}: {wrong[0]} is outside the vocabulary of {vocab_size}')


def widths(config: SamplerConfig) -> dict[str, int]:
  """How many ids of each kind fit a request."""
  return {name: max(IDS, len(vars(config)[name])) for name in ('stop_ids', 'forbidden_ids')}


def sampling(config: SamplerConfig, given: dict) -> Sampling:
  """One slot's, as numpy scalars and [M] ids: `given`, else the config."""
  own = dict(vars(config), min_tokens=config.min_new_tokens, max_tokens=config.max_new_tokens, seed=0)
  value = lambda name, kind: kind(given.get(name, own[name]))
  ids = {
    name: np.array([*given.get(name, own[name])] + [-1] * width, np.int32)[:width]
    for name, width in widths(config).items()
  }
  return Sampling(
    **{name: value(name, np.float32) for name in ('temperature', 'top_p', 'min_p')},
    **{name: value(name, np.int32) for name in ('top_k', 'min_tokens', 'max_tokens', 'seed', 'top_logprobs')},
    **ids,
  )


def check_request(config: SamplerConfig, request: Request, vocab_size: int):
  """InputError where the engine of this config cannot serve a request."""
  size, given = len(request.tokens), request.sampling
  name = f'prompt {request.prompt}'
  if not size:
    raise InputError(f'{name}: is empty; a text begins with some token')
  most = given.get('max_tokens', config.max_new_tokens)
  if most < 1 or size + most > config.room:
    raise InputError(
      f'{name}: {size} tokens and {most} to draw do not fit the '
      f'{config.room} of a slot; shorten it, or raise '
      'config.rollout.max_prompt_length'
    )
  for key, (low, high) in _RANGES.items():
    value = given.get(key, low)
    if not low <= value <= high:  # NaN is in no range
      raise InputError(f'{name}: {key}={value} is not from {low} to {high}')
  if given.get('top_logprobs', 0) > config.top_logprobs:
    raise InputError(
      f'{name}: top_logprobs={given["top_logprobs"]} of {config.top_logprobs} that config.rollout.top_logprobs allows'
    )
  for string in given.get('stop_strings', ()):
    if not isinstance(string, str) or not string:
      raise InputError(f'{name}: stop {string!r} must be a text, not empty')
  for key, width in widths(config).items():
    ids = given.get(key, ())
    if len(ids) > width:
      raise InputError(f'{name}: {len(ids)} {key}, of {width} that fit; name as many in the config of the engine')
    check_ids(ids, vocab_size, f'{name}: {key}')


# --------------------------------------------------------------------- memory


def free_bytes(layout: Layout) -> float:
  """Memory that the devices of a layout have left; inf where none tells."""
  stats = [d.memory_stats() for d in layout.mesh.local_devices]
  if all(s and 'bytes_limit' in s for s in stats):
    return len(layout.mesh.devices.flat) * min(s['bytes_limit'] - s['bytes_in_use'] for s in stats)
  if layout.mesh.devices.flat[0].platform == 'cpu':
    return host.free_memory()
  return float('inf')


def too_large(slots: int, length: int, wanted: int, free: float) -> str:
  """What is said of a cache of `wanted` bytes."""
  return (
    f'config.rollout.slots: {slots} slots of {length} cache entries '
    f'take {wanted / 2**30:.2f} GiB and {max(free, 0) / 2**30:.2f} are '
    f'free: {max(int(slots * free / max(wanted, 1)), 0)} slots would fit; '
    'lower it, or the lengths'
  )
