"""The sampler of single answers: joins the completions of an engine into a `Rollout`.

Legend: N sequences, P prompt tokens, C completion tokens, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence

import numpy as np

from jaxpost.distributed import coordination
from jaxpost.rollout.sequence import Completion
from jaxpost.types import Prompt, Rollout

if typing.TYPE_CHECKING:  # a run that never samples imports no engine
  from jaxpost.rollout.engine import Engine, OnDispatch
  from jaxpost.rollout.sampler_config import SamplerConfig


def to_rollout(
  prompts: Sequence[Prompt],
  completions: Sequence[Completion],
  config: SamplerConfig,
  step: int,
  version: int,
  figures: dict,
) -> Rollout:
  """Stacks the completions of all prompts.

  Args:
    completions: in any order; their `request.tag` is the index of the sequence.
    figures: metrics of the engine, 'occupancy' included.
  """
  completions = sorted(completions, key=lambda c: c.request.tag)

  def stack(name: str, length: int) -> np.ndarray:
    """[N, length, ...], padded with 0 on the right."""
    arrays = [vars(completion)[name] for completion in completions]
    return np.stack([np.pad(x, ((0, length - len(x)), *((0, 0),) * (x.ndim - 1))) for x in arrays])

  length = config.max_new_tokens
  optional: dict[str, typing.Any] = {}
  if config.top_logprobs:
    optional |= {name: stack(name, length) for name in ('top_ids', 'top_logprobs')}
  if completions[0].experts is not None:  # [N, P + C, L, k] by position
    optional['experts'] = stack('experts', config.max_prompt + length)
  if config.sampling_mask:
    optional['allowed'] = stack('allowed', length)
  return Rollout(
    prompts=tuple(prompts),
    completions=stack('tokens', length),
    lengths=np.array([len(c.tokens) for c in completions], np.int32),
    logprobs=stack('behavior_logprobs' if config.sampling_mask else 'logprobs', length),
    behavior_logprobs=stack('behavior_logprobs', length),
    finished=np.array([c.finished for c in completions]),
    step=step,
    version=version,
    occupancy=figures['occupancy'],
    figures={name: value for name, value in figures.items() if name != 'occupancy'},
    versions=stack('versions', length),
    **optional,
  )


@dataclasses.dataclass
class Sampler:
  """Samples completions with the weights that its engine has loaded.

  `Episodes` (of an environment), `DemonstrationSampler` and `RecordedSampler` are called in the same way.
  """

  engine: Engine
  run_key: np.ndarray  # [2] uint32

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int, step: int = 0, on_dispatch: OnDispatch | None = None, **sampling
  ) -> Rollout:
    """Samples `group_size` completions of each prompt; the rollout is the same on every process of the run.

    Args:
      sampling: fields of `Sampling` that differ from the config.
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
    sampling_processes = coordination.owners(self.engine.layout.mesh.devices.flat)
    if len(sampling_processes) == coordination.process_count():
      return draw()
    from jaxpost.distributed import channel
    from jaxpost.rollout import rollout_codec

    # Drawn on the processes that have sampling devices, and sent to the others.
    text = rollout_codec.to_text(draw()) if coordination.process_index() in sampling_processes else ''
    data = channel.broadcast_bytes(sampling_processes[0], text.encode())
    return rollout_codec.from_text(data.decode()).replace(prompts=tuple(prompts))
