"""Saves and loads the rollout, rewards and advantages of a step: rollouts/STAGE/STEP.npz of a run."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxpost.errors import InputError, refuse
from jaxpost.rollout.rollout_codec import arrays_of, decode, encode, prompts_from_json, prompts_to_json
from jaxpost.storage import object_store
from jaxpost.types import Credit, Experience, Prompt, Rollout

_SEAL = b'crc32 %08x\n'
_LEFT_OUT = ('allowed', 'experts', 'top_ids', 'top_logprobs')  # arrays of a rollout that are large, and never read


def save(path: epath.PathLike, experience: Experience, credit: Credit, temperature: float = 1.0) -> None:
  """Writes a rollout, its rewards, advantages and scores as arrays and JSON, without pickle."""
  rollout = experience.rollout
  arrays = {name: x for name, x in arrays_of(rollout).items() if name not in _LEFT_OUT}
  arrays |= {'rewards': experience.rewards, 'trained': credit.mask}
  if experience.verdicts is not None:
    arrays['verdicts'] = experience.verdicts
  arrays |= {'temperature': np.array([temperature]), 'sampling_mask': np.array([rollout.allowed is not None])}
  arrays |= {f'credit/{name}': x for name, x in credit.arrays.items()}
  scores = {name: x for name, x in experience.arrays.items() if name not in {'sampler_logprobs', *credit.arrays}}
  arrays |= {f'score/{name}': x for name, x in scores.items()}
  about = {name: vars(rollout)[name] for name in ('step', 'version', 'messages', 'from_data')}
  about['prompts'] = prompts_to_json(rollout)
  object_store.write(path, _sealed(encode(about, arrays)))


def load(path: epath.PathLike) -> tuple[Rollout, dict[str, np.ndarray]]:
  """Returns the rollout of a file that `save` wrote, with its rewards under the name 'recorded', and all arrays.

  Raises:
    InputError: there is no such file, or it holds something else.
  """
  path = epath.Path(path)
  try:
    about, arrays = decode(_unsealed(path.read_bytes()))
    fields = {field.name for field in dataclasses.fields(Rollout)} - {'rewards'}
    rollout = Rollout(
      prompts_from_json(about['prompts']),
      **{name: x for name, x in arrays.items() if name in fields},
      step=about['step'],
      version=about['version'],
      from_data=about.get('from_data', False),
      messages=about['messages'] and tuple(about['messages']),
      rewards={'recorded': arrays['rewards']},
    )
  except FileNotFoundError as error:
    raise InputError(f'{path}: is missing; a run saves all rollouts with config.log.rollouts_every=1') from error
  except (KeyError, TypeError) as error:
    raise InputError(f'{path}: another version of jaxpost has written it ({error}); sample again') from error
  except (ValueError, OSError) as error:
    raise InputError(f'{path}: not a rollout of a run: {error}') from error
  return rollout, arrays


def _sealed(data: bytes) -> bytes:
  """Returns the file with its checksum at the end, which readers of zip files ignore."""
  return data + _SEAL % zlib.crc32(data)


def _unsealed(data: bytes) -> bytes:
  """Returns the file without its checksum; ValueError if it is damaged or cut off."""
  size = len(_SEAL % 0)
  if data[-size:] != _SEAL % zlib.crc32(data[:-size]):
    raise ValueError('differs from its checksum, or has none')
  return data[:-size]


class RecordedSampler:
  """A sampler that reads the rollouts of another run, step by step."""

  def __init__(self, folder: epath.PathLike, stage: str, rewards: bool, temperature: float | None = None):
    """Reads from a run's folder, or from the folder of the files.

    Args:
      stage: name of the stage in the other run.
      rewards: use the recorded rewards; False: completions are graded again.
      temperature: that of this run, if it trains on the recorded log-probs; None: it does not read them.
    """
    folder = epath.Path(folder).expanduser()
    stage_folder = folder / 'rollouts' / stage
    self.folder = stage_folder if stage_folder.exists() else folder
    self.rewards = rewards
    self.temperature = temperature

  def check(self, steps: int) -> None:
    """Raises InputError unless each of the steps has a file, and the first and the last can be read."""
    present = {path.name for path in self.folder.glob('*.npz')}
    missing = [step for step in range(1, steps + 1) if f'{step}.npz' not in present]
    for step in (1, steps, *missing):
      load(self.folder / f'{step}.npz')

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int, step: int, on_dispatch: Any = None, **sampling: Any
  ) -> Rollout:
    """Returns the recorded rollout of a step; InputError unless it has as many prompts and completions."""
    del on_dispatch  # nothing is sampled
    refuse(bool(sampling), f'config.train_on_rollouts: the stored rollouts cannot be sampled with {sampling}')
    path = self.folder / f'{step + 1}.npz'
    rollout, arrays = load(path)
    if self.temperature is not None:
      self._check_logprobs(path, rollout, arrays)
    num_prompts, num_completions = len(rollout.prompts), len(rollout.lengths)
    expected = len(prompts) * (1 if rollout.from_data else group_size)  # the data have one completion of a prompt
    refuse(
      (num_prompts, num_completions) != (len(prompts), expected),
      f'{path}: {num_completions} completions of {num_prompts} prompts, and config.rollout asks for {expected} of '
      f'{len(prompts)}',
    )
    # Recorded rewards count for every source, also for one that had no environment in that run.
    sources = [prompt.source | {'environment': None} for prompt in rollout.prompts]
    if not self.rewards:  # nothing of the old grading is used, and the sources of this run name the functions
      rollout = rollout.replace(rewards=None, turn_rewards=None, verdicts=None)
      functions = {prompt.index: prompt.source.get('rewards') for prompt in prompts}
      sources = [x | {'rewards': functions.get(p.index)} for x, p in zip(sources, rollout.prompts, strict=True)]
    recorded = [p.replace(source=x) for p, x in zip(rollout.prompts, sources, strict=True)]
    return rollout.replace(prompts=tuple(recorded))

  def _check_logprobs(self, path: epath.Path, rollout: Rollout, arrays: dict[str, np.ndarray]) -> None:
    """Raises InputError unless the recorded log-probs are of the distribution that this run trains."""
    if rollout.from_data or rollout.demonstration is not None:
      raise InputError(f'{path}: has answers of the data, which have no log-probs; sample again')
    if 'temperature' not in arrays:
      raise InputError(f'{path}: another version of jaxpost has written it (it has no temperature); sample again')
    if arrays['sampling_mask'].item():
      raise InputError(
        f'{path}: was sampled with config.rl.sampling_mask, and its log-probs are not those of the whole distribution; '
        'sample again without it'
      )
    by_source = 'temperature' in rollout.prompts[0].source.get('sampling', ())  # each prompt has the one of its source
    if not by_source and (recorded := arrays['temperature'].item()) != self.temperature:
      raise InputError(
        f'{path}: was sampled at temperature {recorded:g}, and its log-probs hold for that one alone; set '
        f'config.rollout.temperature={recorded:g} (now {self.temperature:g})'
      )
