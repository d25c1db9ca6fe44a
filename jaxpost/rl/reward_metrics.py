"""TODO."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import numpy as np

from jaxpost.rl import batching

if typing.TYPE_CHECKING:
  from jaxpost.rewards.groups import Graded
  from jaxpost.types import Rollout

  pass


def component_metrics(graded: Sequence[Graded]) -> dict:
  """rewards/<fn>/mean and std over the samples it applied to."""
  out = {}
  for name in graded[0].components if graded else ():
    values = [r for g in graded for r in g.components[name] if r is not None]
    if values:
      out[f'rewards/{name}/mean'] = float(np.mean(values))
      out[f'rewards/{name}/std'] = float(np.std(values))
  return out


def length_metrics(rollout: Rollout) -> dict:
  ended = rollout.lengths[rollout.finished]
  return {
    'completions/mean_length': float(rollout.lengths.mean()),
    'completions/min_length': int(rollout.lengths.min()),
    'completions/max_length': int(rollout.lengths.max()),
    'completions/clipped_ratio': float(1 - rollout.finished.mean()),
    'completions/mean_terminated_length': float(ended.mean()) if ended.size else 0.0,
    'completion_tokens': int(rollout.lengths.sum()),
  }


def sample_rows(rollout: Rollout, groups, graded, rewards) -> list[dict]:
  """What a person wants to see of a step, one row a completion."""
  rows = []
  size = len(rollout.lengths) // len(rollout.prompts)
  for n, length in enumerate(rollout.lengths):
    group, result, i = groups[n // size], graded[n // size], n % size
    rows.append(
      dict(
        prompt=_text(group.prompts[i]),
        completion=_text(group.completions[i]),
        reward=float(rewards[n]) if np.isfinite(rewards[n]) else None,
        **({'error': result.error} if result.error else {}),
        components={k: v[i] for k, v in result.components.items()},
        length=int(length),
        finished=bool(rollout.finished[n]),
        **batching.top_logprobs(rollout, n),
        logprob=float(rollout.logprobs[n, :length].sum()),
        prompt_index=rollout.prompts[n // size].index,
        sample=i,
        version=rollout.version,
      )
    )
  return rows


def _text(prompt) -> str:
  if isinstance(prompt, str):
    return prompt
  return '\n'.join(str(m['content']) for m in prompt)
