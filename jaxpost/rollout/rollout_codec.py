"""Encodes rollouts as bytes or as text for JSON, bit for bit: for files, checkpoints and other processes."""

import base64
import io
import json

import numpy as np

from jaxpost.types import Prompt, Rollout

_RENAMED = {'expert': 'demonstration'}  # arrays in earlier files and checkpoints
_SCALARS = ('step', 'version', 'occupancy', 'figures', 'from_data', 'messages')


def arrays_of(rollout: Rollout) -> dict[str, np.ndarray]:
  """Returns {field: array [N, ...]} of the arrays of a rollout, without those in its dict `rewards`."""
  return {name: x for name, x in vars(rollout).items() if isinstance(x, np.ndarray)}


def to_text(rollout: Rollout) -> str:
  """Encodes a whole rollout, bit for bit, as text for JSON."""
  arrays = arrays_of(rollout)
  arrays |= {f'rewards/{name}': x for name, x in (rollout.rewards or {}).items()}
  about = {name: vars(rollout)[name] for name in _SCALARS}
  about['prompts'] = prompts_to_json(rollout)
  return base64.b64encode(encode(about, arrays)).decode()


def from_text(text: str) -> Rollout:
  """Decodes a rollout that `to_text` has encoded."""
  about, arrays = decode(base64.b64decode(text))
  names = [name for name in arrays if name.startswith('rewards/')]
  rewards = {name.removeprefix('rewards/'): arrays.pop(name) for name in names}
  prompts = prompts_from_json(about.pop('prompts'))
  messages = about.pop('messages')
  return Rollout(prompts, **arrays, **about, rewards=rewards or None, messages=messages and tuple(messages))


def encode(about: dict, arrays: dict[str, np.ndarray]) -> bytes:
  """Returns the bytes of an .npz file of the arrays, with JSON in its member 'about'."""
  data = io.BytesIO()
  np.savez_compressed(data, about=np.array(json.dumps(about, default=str)), **arrays)
  return data.getvalue()


def decode(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
  """Returns the (JSON values, arrays) that `encode` wrote."""
  with np.load(io.BytesIO(data), allow_pickle=False) as file:
    arrays = {_RENAMED.get(name, name): x for name, x in file.items()}
  return json.loads(str(arrays.pop('about'))), arrays


def prompts_to_json(rollout: Rollout) -> list[dict]:
  """Returns the prompts of a rollout as JSON values."""
  return [
    dict(index=p.index, tokens=p.tokens.tolist(), prompt=p.prompt, columns=p.columns, source=p.source)
    for p in rollout.prompts
  ]


def prompts_from_json(prompts: list[dict]) -> tuple[Prompt, ...]:
  """Returns prompts from the JSON values that `prompts_to_json` returned."""
  return tuple(
    Prompt(p['index'], np.asarray(p['tokens'], np.int32), p['prompt'], p['columns'], p.get('source', {}))
    for p in prompts
  )
