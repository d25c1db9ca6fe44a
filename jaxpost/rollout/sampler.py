"""Completions of single answers become a `Rollout`.

Legend: N sequences, P prompt tokens, C completion tokens, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import numpy as np

from jaxpost.distributed import coordination
from jaxpost.distributed.transfer import owners
from jaxpost.types import Completion, Prompt, Rollout

if typing.TYPE_CHECKING:  # a run that never samples imports no rollout
  from jaxpost.roles import Policy
  from jaxpost.rollout.engine import Engine
  from jaxpost.rollout.sampler_config import SamplerConfig


def rollout(
  prompts: Sequence[Prompt], done: list[Completion], config: SamplerConfig, step: int, version: int, figures: dict
) -> Rollout:
  """All completions of all prompts, whose tags say their order."""
  done = sorted(done, key=lambda c: c.request.tag)
  room = config.max_new_tokens

  def pad(name, room=room):
    return np.stack([np.pad(x, ((0, room - len(x)), *((0, 0),) * (x.ndim - 1))) for x in (vars(c)[name] for c in done)])

  names = ('top_ids', 'top_logprobs') if config.top_logprobs else ()
  more = {name: pad(name) for name in names}
  if done[0].experts is not None:  # [N, P + C, L, k] by position
    more['experts'] = pad('experts', config.max_prompt + room)
  return Rollout(
    tuple(prompts),
    pad('tokens'),
    np.array([len(c.tokens) for c in done], np.int32),
    pad('logprobs'),
    pad('behaviour_logprobs'),
    np.array([c.finished for c in done]),
    step,
    version,
    figures.pop('occupancy'),
    figures,
    versions=pad('versions'),
    **more,
  )


@dataclasses.dataclass
class Sampler:
  """Completions from the policy's weights."""

  engine: 'Engine'
  run_key: np.ndarray  # [2] uint32

  def sync(self, policy: Policy, version: int) -> dict:
    """Moves the policy's weights into the sampling layout; bytes moved."""
    return self.engine.load(policy.params, version)

  def release(self):
    """Frees the sampling copy of the weights."""
    self.engine.unload()

  def __call__(
    self,
    prompts: Sequence[Prompt],
    group_size: int = 1,
    step: int = 0,
    on_dispatch: Callable[[int], None] | None = None,
    **sampling,
  ) -> Rollout:
    """Samples `group_size` completions of each prompt.

    Args:
      on_dispatch: called before each block, see `engine.Engine.serve`.
      sampling: fields of `types.Sampling` that differ from the config.
    """
    draw = functools.partial(
      self.engine,
      prompts,
      group_size=group_size,
      run_key=self.run_key,
      step=step,
      sampling=sampling,
      on_dispatch=on_dispatch,
    )
    if coordination.process_count() == 1:
      return draw()
    have = owners(self.engine.layout.mesh.devices.flat)
    if len(have) == coordination.process_count():
      return draw()
    from jaxpost.rollout import rollout_files  # of some processes, sent to the others

    text = rollout_files.to_text(draw()) if coordination.process_index() in have else ''
    return rollout_files.from_text(coordination.broadcast_bytes(have[0], text.encode()).decode()).replace(
      prompts=tuple(prompts)
    )
