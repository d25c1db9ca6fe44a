"""The records that pass between rooms.

Shape legend: B rows, T tokens a row, N sequences, P prompt tokens, C
completion tokens, S slots, K kv heads, h head size, L layers, M stop ids.

Everything per token is aligned with the token it speaks of: `logprobs[b, t]`
is log p(tokens[b, t] | tokens before it). The first token of a document has
no prediction, so its weight is 0.
"""

from typing import Any

from flax import struct
import numpy as np

Array = Any  # jax.Array or np.ndarray


@struct.dataclass
class Batch:
  """Packed rows for one update.

  Two documents, [5 6 7] and [8 9], the first token of each being its prompt,
  packed into a row of 6:

    tokens        5    6    7    8    9    0
    positions     0    1    2    0    1    0
    segment_ids   1    1    1    2    2    0     (0 is padding)
    loss_weights  0   1/3  1/3   0   1/3   0     (3 = trained tokens of the
                                                  *global* batch)

  `loss_weights` holds mask / global normaliser, so that every loss and every
  metric is a plain weighted sum, whatever the packing, the micro-batches or
  the mesh. The remaining fields exist only where an algorithm fills them.
  """

  tokens: Array  # [B, T] int32
  positions: Array  # [B, T] int32, restarts with each document
  segment_ids: Array  # [B, T] int32
  loss_weights: Array  # [B, T] float32
  advantages: Array | None = None  # [B, T] float32
  old_logprobs: Array | None = None  # [B, T], policy before the first update
  ref_logprobs: Array | None = None  # [B, T], reference model
  sampler_logprobs: Array | None = None  # [B, T], as returned by the sampler


@struct.dataclass
class TrainState:
  """What one trainable role carries from step to step."""

  step: Array  # [] int32, updates done
  params: Any  # nested dict of arrays, float32 by default
  opt_state: Any


@struct.dataclass
class Outputs:
  """What a model says of the tokens of a batch; objectives consume it."""

  logprobs: Array  # [B, T] float32, log_softmax(logits / temperature)
  entropy: Array  # [B, T] float32, nats


@struct.dataclass
class Sampling:
  """How each slot samples: arrays, so that changing a value compiles nothing.

  Example: temperature 1, top_k 0 (off), top_p 1 (off), stop_ids [2, -1]
  (padded with -1), max_tokens 128.
  """

  temperature: Array  # [S] float32, 0 is greedy
  top_k: Array  # [S] int32, 0 is off
  top_p: Array  # [S] float32, 1 is off
  stop_ids: Array  # [S, M] int32, padded with -1
  max_tokens: Array  # [S] int32


@struct.dataclass
class Cache:
  """Keys and values of what was read so far, one pair of arrays per layer."""

  k: tuple  # L x [S, K, length, h]
  v: tuple  # L x [S, K, length, h]


@struct.dataclass
class Prompt:
  """One prompt, tokenised once; `columns` go to the reward functions."""

  index: int = struct.field(pytree_node=False)  # global, counts epochs on
  tokens: np.ndarray = struct.field(pytree_node=False)  # [P] int32
  prompt: Any = struct.field(pytree_node=False)  # text or list of messages
  columns: dict = struct.field(pytree_node=False)  # the row's other columns


@struct.dataclass
class Rollout:
  """What a sampler returns: host arrays, equal on every process.

  Sequence n answers prompt `n // group_size`. Completions are padded with 0
  on the right; `lengths` counts the stop token, if one was sampled.
  """

  prompts: tuple  # of Prompt, N / group_size of them
  completions: np.ndarray  # [N, C] int32
  lengths: np.ndarray  # [N] int32
  logprobs: np.ndarray  # [N, C] float32, temperature applied, no truncation
  behaviour_logprobs: np.ndarray  # [N, C] float32, of what was drawn from
  finished: np.ndarray  # [N] bool: ended by a stop id, not by max_tokens
  step: int = 0  # step it was made for
  version: int = 0  # updates behind the weights that made it
  occupancy: float = 1.0  # share of slot-steps that drew a wanted token
