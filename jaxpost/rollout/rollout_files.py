"""What a step has learnt from, on disk: rollouts/STAGE/STEP.npz of a run.

Legend: N sequences, C completion tokens.
"""

import base64
import io
import json

import numpy as np
from etils import epath

from jaxpost.errors import InputError
from jaxpost.storage import object_store
from jaxpost.types import Credit, Experience, Prompt, Rollout

_ARRAYS = ('completions', 'lengths', 'logprobs', 'behaviour_logprobs', 'finished')


def keeper(folder, every: int):
  """(step, Experience, Credit) -> None: `save`s each `every`th step."""

  def keep(step, experience, credit):
    if step % every == 0:
      save(folder / f'{step}.npz', experience, credit)

  return keep


def save(path, experience: Experience, credit: Credit):
  """Writes the rollout, its rewards and advantages; no pickle."""
  rollout = experience.rollout
  arrays = {name: vars(rollout)[name] for name in _ARRAYS}
  if rollout.mask is not None:
    arrays['mask'] = rollout.mask
  arrays |= {'rewards': experience.rewards, 'trained': credit.mask}
  arrays |= {f'credit/{k}': x for k, x in credit.arrays.items()}
  about = dict(step=rollout.step, version=rollout.version, prompts=_prompts(rollout), messages=rollout.messages)
  data = io.BytesIO()
  np.savez_compressed(data, about=np.array(json.dumps(about, default=str)), **arrays)
  object_store.write(path, data.getvalue())


def load(path) -> tuple[Rollout, dict]:
  """(the rollout, with its rewards as those 'recorded'; all arrays)."""
  path = epath.Path(path)
  try:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
      arrays = dict(file)
    about = json.loads(str(arrays.pop('about')))
  except FileNotFoundError as error:
    raise InputError(f'{path}: is not there; a run keeps its rollouts where config.log.rollouts_every is 1') from error
  except (ValueError, KeyError, OSError) as error:
    raise InputError(f'{path}: not a rollout of a run: {error}') from error
  prompts = tuple(
    Prompt(p['index'], np.asarray(p['tokens'], np.int32), p['prompt'], p['columns']) for p in about['prompts']
  )
  return Rollout(
    prompts,
    **{name: arrays[name] for name in _ARRAYS},
    step=about['step'],
    version=about['version'],
    mask=arrays.get('mask'),
    messages=about['messages'] and tuple(about['messages']),
    rewards={'recorded': arrays['rewards']},
  ), arrays


def to_text(rollout: Rollout) -> str:
  """All of a rollout, to the bit, as JSON can hold it."""
  arrays = {name: x for name, x in vars(rollout).items() if isinstance(x, np.ndarray)}
  arrays |= {f'rewards/{k}': x for k, x in (rollout.rewards or {}).items()}
  about = {name: vars(rollout)[name] for name in ('step', 'version', 'occupancy', 'figures', 'from_data', 'messages')}
  about['prompts'] = _prompts(rollout)
  data = io.BytesIO()
  np.savez_compressed(data, about=np.array(json.dumps(about, default=str)), **arrays)
  return base64.b64encode(data.getvalue()).decode()


def from_text(text: str) -> Rollout:
  """What `to_text` was given."""
  with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as file:
    arrays = dict(file)
  about = json.loads(str(arrays.pop('about')))
  rewards = {k.removeprefix('rewards/'): arrays.pop(k) for k in list(arrays) if k.startswith('rewards/')}
  prompts, messages = about.pop('prompts'), about.pop('messages')
  return Rollout(
    tuple(Prompt(p['index'], np.asarray(p['tokens'], np.int32), p['prompt'], p['columns']) for p in prompts),
    **arrays,
    **about,
    rewards=rewards or None,
    messages=messages and tuple(messages),
  )


def _prompts(rollout: Rollout) -> list[dict]:
  return [dict(index=p.index, tokens=p.tokens.tolist(), prompt=p.prompt, columns=p.columns) for p in rollout.prompts]


class Replayed:
  """A sampler that shows what another run has sampled, step by step."""

  def __init__(self, folder, stage: str, rewards: bool):
    """rewards: those of the other run count, too."""
    folder = epath.Path(folder).expanduser()
    inside = folder / 'rollouts' / stage
    self.folder, self.rewards = inside if inside.exists() else folder, rewards

  def sync(self, policy, version: int) -> dict:
    del policy, version
    return {'bytes': 0}

  def release(self):
    pass

  def __call__(self, prompts, group_size: int = 1, step: int = 0, on_dispatch=None) -> Rollout:
    """The rollout of a step; `prompts` are those it should answer."""
    del on_dispatch  # nothing is sampled
    path = self.folder / f'{step + 1}.npz'
    rollout, _ = load(path)
    have, size = len(rollout.prompts), len(rollout.lengths)
    if (have, size) != (len(prompts), len(prompts) * group_size):
      raise InputError(
        f'{path}: {size} completions of {have} prompts, and config.rollout '
        f'asks for {len(prompts) * group_size} of {len(prompts)}'
      )
    return rollout if self.rewards else rollout.replace(rewards=None)
