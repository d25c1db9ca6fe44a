"""Completions of single answers become a `Rollout`.

Legend: N sequences, P prompt tokens, C completion tokens, L layers.
"""

from collections.abc import Sequence

import numpy as np

from jaxpost.rollout.settings import SamplerConfig
from jaxpost.types import Completion, Prompt, Rollout


def rollout(prompts: Sequence[Prompt], done: list[Completion],
            config: SamplerConfig, step: int, version: int, figures: dict
            ) -> Rollout:
  """All completions of all prompts, whose tags say their order."""
  done = sorted(done, key=lambda c: c.request.tag)
  room = config.max_new_tokens

  def pad(name, room=room):
    return np.stack([
        np.pad(x, ((0, room - len(x)), *((0, 0),) * (x.ndim - 1)))
        for x in (vars(c)[name] for c in done)])

  names = ('top_ids', 'top_logprobs') if config.top_logprobs else ()
  more = {name: pad(name) for name in names}
  if done[0].experts is not None:  # [N, P + C, L, k] by position
    more['experts'] = pad('experts', config.max_prompt + room)
  return Rollout(
      tuple(prompts), pad('tokens'),
      np.array([len(c.tokens) for c in done], np.int32), pad('logprobs'),
      pad('behaviour_logprobs'), np.array([c.finished for c in done]),
      step, version, figures.pop('occupancy'), figures,
      versions=pad('versions'), **more)
