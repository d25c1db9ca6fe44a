"""Packs rollouts into rows of a `Batch`, and unpacks arrays of rows again.

Legend: N sequences, G samples a prompt, C completion tokens, B rows, T tokens a row, n chosen sequences.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpost.data import packing
from jaxpost.types import Array, Batch, Rollout, RowShape


def token_weights(mask: np.ndarray, aggregate: str, max_tokens: int) -> np.ndarray:
  """Returns weights [N, C] such that sum(weights * losses) is the loss of a batch, by `aggregate`:

  'token': the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8).
  'sequence': the mean over sequences of their means (GRPO, arXiv:2402.03300, eq. 3).
  'constant': sums over tokens / (sequences x max_tokens) (Dr. GRPO, arXiv:2503.20783, section 3.2).
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
  """[N, C] float32: 1 on the tokens that the policy sampled."""
  mask = np.arange(rollout.completions.shape[1]) < rollout.lengths[:, None]
  if rollout.mask is not None:
    mask &= rollout.mask
  return mask.astype(np.float32)


def token_versions(rollout: Rollout) -> np.ndarray:
  """[N, C] int32: how many optimizer updates produced the weights that each token was sampled from."""
  if rollout.versions is not None:
    return rollout.versions
  return np.full(rollout.completions.shape, rollout.version, np.int32)


def minibatches(num_sequences: int, rl: Any, seed: int, step: int) -> Iterator[np.ndarray]:
  """Yields the indices of the sequences of each update of a step.

  Args:
    rl: `config.rl`. With more than one minibatch each epoch is shuffled, by a function of (seed, step, epoch).
  """
  for epoch in range(rl.epochs):
    order = np.arange(num_sequences)
    if rl.minibatches > 1:
      order = np.random.default_rng((seed, step, epoch)).permutation(num_sequences)
    yield from np.array_split(order, rl.minibatches)


def prompt_lengths(rollout: Rollout) -> np.ndarray:
  """[N] tokens of the prompt of each sequence."""
  return np.repeat([len(p.tokens) for p in rollout.prompts], rollout.group_size)


class Place(NamedTuple):
  """The columns [start, end) of a row that a sequence fills, as a branch of a document (a segment), both from 1.

  The first branch starts with the whole prompt, the others with its last token; the completion starts at `first`.
  """

  sequence: int
  row: int
  segment: int
  branch: int
  start: int
  first: int
  end: int


def places(rollout: Rollout, members: Collection[int], shape: RowShape) -> Iterator[Place]:
  """Packs sequences into rows, and yields the place of each; ValueError if they do not fit.

  With `shape.share_prompt`, sequences share documents (`shared_prompts`); without it each is a document.
  """
  prompts, completions = prompt_lengths(rollout), rollout.lengths

  def pack(documents: list[list[int]]) -> list[list[int]]:
    # A document has P - 1 tokens of the prompt, and in each branch the last one of the prompt and a completion.
    return packing.pack([int(prompts[d[0]] - 1 + (1 + completions[d]).sum()) for d in documents], shape.row_length)

  documents = [[n] for n in members]
  if shape.share_prompt:
    from jaxpost.rl import shared_prompts

    shared = [*shared_prompts.documents(members, rollout.group_size, prompts, completions, shape.row_length)]
    # Sequences that minibatches draw at random from groups may fill rows better one by one.
    documents = min(shared, documents, key=lambda x: len(pack(x)))
  rows = pack(documents)
  if len(rows) > shape.num_rows:
    raise ValueError(f'{len(rows)} rows do not fit {shape.num_rows}')
  for row, indices in enumerate(rows):
    start = 0
    for segment, i in enumerate(indices, 1):
      for branch, n in enumerate(documents[i], 1):
        first = start + (prompts[n] if branch == 1 else 1)
        end = first + completions[n]
        yield Place(n, row, segment, branch, start=start, first=first, end=end)
        start = end


def to_batch(
  rollout: Rollout, members: Sequence[int], weights: np.ndarray, arrays: Mapping[str, np.ndarray], shape: RowShape
) -> Batch:
  """Packs the prompts and completions of some sequences.

  Args:
    members: indices of the sequences, n of them.
    weights: [N, C] loss weights of the completion tokens.
    arrays: {name: [N, C]}, into `Batch.arrays`.

  Returns:
    A host batch [num_rows, row_length]. Each sequence is a document, or with `shape.share_prompt` a branch of one.
  """
  size = shape.num_rows, shape.row_length
  tokens, positions, segment_ids, sequence_ids, branch_ids = (np.zeros(size, np.int32) for _ in range(5))
  loss_weights = np.zeros(size, np.float32)
  packed = {name: np.zeros(size, np.float32) for name in arrays}
  recorded = {'experts': rollout.experts, 'allowed': rollout.allowed}
  optional = {name: np.zeros((*size, *x.shape[2:]), x.dtype) for name, x in recorded.items() if x is not None}
  if 'temperature' in rollout.prompts[0].source.get('sampling', ()):  # then every source has one
    optional['temperature'] = np.zeros(size, np.float32)
  for n, row, segment, branch, start, first, end in places(rollout, members, shape):
    length = end - first
    prompt = rollout.prompts[n // rollout.group_size]
    sequence = np.concatenate([prompt.tokens, rollout.completions[n, :length]])
    skipped = len(sequence) - (end - start)  # tokens of the prompt that the first branch has
    tokens[row, start:end] = sequence[skipped:]
    positions[row, start:end] = np.arange(skipped, len(sequence))
    segment_ids[row, start:end] = segment
    branch_ids[row, max(first - 1, start) : end] = branch
    # Prompts belong to no sequence: nothing is learned on them.
    sequence_ids[row, first:end] = sequence_ids[row].max() + 1
    loss_weights[row, first:end] = weights[n, :length]
    for name, values in arrays.items():
      packed[name][row, first:end] = values[n, :length]
    if rollout.experts is not None:  # of the prompt, too
      optional['experts'][row, start:end] = rollout.experts[n, skipped : len(sequence)]
    if rollout.allowed is not None:
      optional['allowed'][row, first:end] = rollout.allowed[n, :length]
    if 'temperature' in optional:
      optional['temperature'][row, first:end] = prompt.source['sampling']['temperature']
  if shape.share_prompt:
    optional['branch_ids'] = branch_ids
  return Batch(tokens, positions, segment_ids, loss_weights, sequence_ids=sequence_ids, arrays=packed, **optional)


def from_rows(rollout: Rollout, values: Array, shape: RowShape) -> np.ndarray:
  """Unpacks per-token outputs of a program for a batch of all sequences.

  Args:
    values: [M, B / M, T], M micro-batches.

  Returns:
    The outputs at completion tokens, [N, C] float32, 0 after the end of a completion.
  """
  values = np.asarray(values).reshape(-1, shape.row_length)
  out = np.zeros(rollout.completions.shape, np.float32)
  for place in places(rollout, range(len(out)), shape):
    out[place.sequence, : place.end - place.first] = values[place.row, place.first : place.end]
  return out
