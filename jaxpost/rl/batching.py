"""Rollouts into packed rows, and what was computed of the rows back.

Legend: N sequences, C completion tokens, B rows, T tokens a row.
"""

from collections.abc import Sequence

import numpy as np

from jaxpost.data import packing
from jaxpost.types import Batch, Prompt, Rollout

AGGREGATES = ('token', 'sequence', 'constant')


def token_weights(mask, aggregate: str, max_tokens: int):
  """[N, C] mask -> weights whose sum with losses is the loss of the batch.

  'token': the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8).
  'sequence': the mean over sequences of their means (GRPO,
    arXiv:2402.03300, eq. 3).
  'constant': sums over tokens / (sequences x max_tokens) (Dr. GRPO,
    arXiv:2503.20783, section 3.2).
  Sequences without a trained token do not count.
  """
  mask = np.asarray(mask, np.float64)
  lengths = mask.sum(axis=1, keepdims=True)
  sequences = max(int((lengths > 0).sum()), 1)
  scale = {
    'token': max(lengths.sum(), 1e-9),
    'sequence': sequences * np.maximum(lengths, 1e-9),
    'constant': sequences * max_tokens,
  }[aggregate]
  return (mask / scale).astype(np.float32)


def completion_mask(rollout: Rollout) -> np.ndarray:
  """[N, C] float32: 1 on the tokens that the policy wrote."""
  steps = np.arange(rollout.completions.shape[1])
  written = steps < rollout.lengths[:, None]
  if rollout.mask is not None:
    written &= rollout.mask
  return written.astype(np.float32)


def versions(rollout: Rollout) -> np.ndarray:
  """[N, C] int32: updates behind the weights that drew each token."""
  if rollout.versions is not None:
    return rollout.versions
  return np.full(rollout.completions.shape, rollout.version, np.int32)


def minibatches(number: int, rl, seed: int, step: int):
  """Numbers of the sequences of each update of a step, in order."""
  for epoch in range(rl.epochs):
    order = np.arange(number)
    if rl.minibatches > 1:
      order = np.random.default_rng((seed, step, epoch)).permutation(number)
    yield from np.array_split(order, rl.minibatches)


def prompt_lengths(rollout: Rollout) -> np.ndarray:
  group = len(rollout.lengths) // len(rollout.prompts)
  return np.repeat([len(p.tokens) for p in rollout.prompts], group)


def places(rollout: Rollout, members: Sequence[int], row_length: int, num_rows: int) -> np.ndarray:
  """(row, column of its first completion token) of each member [n, 2]."""
  prompts = prompt_lengths(rollout)
  total = (prompts + rollout.lengths)[list(members)].tolist()
  rows = packing.pack(total, row_length)
  if len(rows) > num_rows:
    raise ValueError(f'{len(rows)} rows do not fit {num_rows}')
  out = np.zeros((len(total), 2), np.int64)
  for r, row in enumerate(rows):
    at = 0
    for i in row:
      out[i] = r, at + prompts[members[i]]
      at += total[i]
  return out


def to_batch(rollout: Rollout, members: Sequence[int], weights, arrays: dict, num_rows: int, row_length: int) -> Batch:
  """Packs the prompts and completions of some sequences.

  Args:
    members: numbers of the sequences, n of them.
    weights: [N, C] of the completion tokens; arrays: {name: [N, C]}.

  Returns:
    Batch [num_rows, row_length], a sequence each.
  """
  place = places(rollout, members, row_length, num_rows)
  shape = num_rows, row_length
  tokens, positions, segments, sequences = (np.zeros(shape, np.int32) for _ in range(4))
  loss_weights = np.zeros(shape, np.float32)
  packed = {k: np.zeros(shape, np.float32) for k in arrays}
  experts = rollout.experts
  if experts is not None:
    experts = np.zeros((*shape, *experts.shape[2:]), experts.dtype)
  group = len(rollout.lengths) // len(rollout.prompts)
  for n, (row, answer) in zip(members, place):
    prompt, length = rollout.prompts[n // group], rollout.lengths[n]
    start, end = answer - len(prompt.tokens), answer + length
    tokens[row, start:answer] = prompt.tokens
    tokens[row, answer:end] = rollout.completions[n, :length]
    positions[row, start:end] = np.arange(end - start)
    number = segments[row].max() + 1
    segments[row, start:end] = sequences[row, answer:end] = number
    loss_weights[row, answer:end] = weights[n, :length]
    for name, values in arrays.items():
      packed[name][row, answer:end] = values[n, :length]
    if experts is not None:
      experts[row, start:end] = rollout.experts[n, : end - start]
  return Batch(tokens, positions, segments, loss_weights, sequence_ids=sequences, arrays=packed, experts=experts)


def from_rows(rollout: Rollout, values, row_length: int, num_rows: int):
  """[M, B / M, T] of a batch of all sequences -> [N, C] float32."""
  values = np.asarray(values).reshape(-1, row_length)
  out = np.zeros(rollout.completions.shape, np.float32)
  every = range(len(rollout.lengths))
  for n, (row, at) in enumerate(places(rollout, every, row_length, num_rows)):
    length = rollout.lengths[n]
    out[n, :length] = values[row, at : at + length]
  return out


# Of episodes: what is counted; other figures are means.
_COUNTS = ('tools/malformed', 'episodes/failed', 'episodes/killed', 'tokens_prefilled', 'tokens_kept', 'requeued')


def _wide(x, width: int):
  """[N, C] -> [N, width], padded with 0; others as they are."""
  return np.pad(x, ((0, 0), (0, width - x.shape[1]))) if x.ndim == 2 else x


def merge(rollouts: Sequence[Rollout], groups: Sequence[Sequence[int]]) -> Rollout:
  """One rollout of the chosen groups of several."""
  size = len(rollouts[0].lengths) // len(rollouts[0].prompts)
  rows = [
    np.concatenate([np.arange(g * size, (g + 1) * size) for g in some]) if len(some) else np.zeros(0, int)
    for some in groups
  ]
  width = max(r.completions.shape[1] for r in rollouts)
  pick = lambda name: np.concatenate(  # episodes have rounds of some length
    [_wide(vars(r)[name][i], width) for r, i in zip(rollouts, rows)]
  )
  prompts: tuple[Prompt, ...] = tuple(r.prompts[g] for r, some in zip(rollouts, groups) for g in some)
  names = (
    'completions',
    'lengths',
    'logprobs',
    'behaviour_logprobs',
    'finished',
    *(n for n in ('mask', 'experts', 'versions', 'top_ids', 'top_logprobs') if vars(rollouts[0])[n] is not None),
  )
  rewards = rollouts[0].rewards and {
    name: np.concatenate([r.rewards[name][i] for r, i in zip(rollouts, rows)]) for name in rollouts[0].rewards
  }
  messages = rollouts[0].messages and tuple(r.messages[n] for r, some in zip(rollouts, rows) for n in some)
  figures = {
    k: (np.sum if k in _COUNTS else np.mean)([r.figures[k] for r in rollouts]).item() for k in rollouts[0].figures
  }
  return rollouts[0].replace(
    prompts=prompts,
    rewards=rewards,
    messages=messages,
    figures=figures,
    **{n: pick(n) for n in names},
    occupancy=float(np.mean([r.occupancy for r in rollouts])),
  )


def top_logprobs(rollout: Rollout, n: int) -> dict:
  """{'top_logprobs': [C, n] pairs of id and log-prob} of completion n.

  Of the likeliest at each place; {} where they were not asked for.
  """
  if rollout.top_ids is None:
    return {}
  size = rollout.lengths[n]
  return {
    'top_logprobs': [
      [[int(i), round(float(x), 6)] for i, x in zip(*at)]
      for at in zip(rollout.top_ids[n, :size], rollout.top_logprobs[n, :size])
    ]
  }
