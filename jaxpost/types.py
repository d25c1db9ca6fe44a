"""The records that pass between rooms.

Shape legend: B rows, T tokens a row, N sequences, P prompt tokens, C
completion tokens, S slots, K kv heads, h head size, L layers, M stop ids, F
forbidden ids.

Everything per token is aligned with the token it speaks of: `logprobs[b, t]`
is log p(tokens[b, t] | tokens before it). The first token of a document has
no prediction, so its weight is 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import struct

Array = Any  # jax.Array or np.ndarray

# The logit or score of what cannot be chosen. Finite, unlike -inf: a softmax over
# nothing else, and differences of masked entries, must not become NaN.
MASKED_LOGIT = -1e30


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
  the mesh.

  Branches share a prompt. Chosen [8 9] and rejected [4] after the prompt
  [5 6 7] are one document; the last prompt token stands before each branch,
  so that every token is still predicted by its left neighbour:

    tokens        5    6    7    8    9    7    4
    positions     0    1    2    3    4    2    3
    branch_ids    0    0    1    1    1    2    2   (0 is seen by all branches)
    sequence_ids  0    0    0    1    1    0    2   (a row counts its own)

  Of a pair, the chosen sequence is odd and the rejected one follows it.

  `arrays` holds what an algorithm adds for each token. Its usual names:
  advantages, old_logprobs (policy before the first update), ref_logprobs,
  sampler_logprobs, importance_weights, values and returns (critic), margin,
  label, nll_weights.
  """

  tokens: Array  # [B, T] int32
  positions: Array  # [B, T] int32, restarts with each document
  segment_ids: Array  # [B, T] int32
  loss_weights: Array  # [B, T] float32
  branch_ids: Array | None = None  # [B, T] int32
  sequence_ids: Array | None = None  # [B, T] int32
  arrays: dict = struct.field(default_factory=dict)  # name -> [B, T, ...]
  teacher_hidden: tuple = ()  # [B, T, D'] of each teacher, to distil from
  experts: Array | None = None  # [B, T, L, k] uint16, to take (`models/moe.py`)


@struct.dataclass
class TrainState:
  """What one trainable role carries from step to step."""

  step: Array  # [] int32, updates done
  params: Any  # nested dict of arrays, float32 by default
  opt_state: Any


@struct.dataclass
class Outputs:
  """What a model says of the tokens of a batch; objectives consume it.

  A field nobody asked for is None.
  """

  logprobs: Array | None = None  # [B, T] float32, log_softmax(logits / T)
  entropy: Array | None = None  # [B, T] float32, nats
  lse: Array | None = None  # [B, T] float32, log-sum-exp of the logits
  mean_logprob: Array | None = None  # [B, T], over the vocabulary
  divergence: Array | None = None  # [B, T], from the teachers
  values: Array | None = None  # [B, T], of the text up to and with a token


@struct.dataclass
class Sampling:
  """How each slot samples: arrays, so that changing a value compiles nothing.

  Example: temperature 1, top_k 0 (off), top_p 1 (off), min_p 0 (off),
  stop_ids [2, -1] and forbidden_ids [-1] (padded with -1), min_tokens 0,
  max_tokens 128, seed 0, top_logprobs 0.
  """

  temperature: Array  # [S] float32, 0 is greedy
  top_k: Array  # [S] int32, 0 is off
  top_p: Array  # [S] float32, 1 is off
  min_p: Array  # [S] float32, share of the likeliest token's; 0 is off
  stop_ids: Array  # [S, M] int32, padded with -1
  forbidden_ids: Array  # [S, F] int32, never drawn; padded with -1
  min_tokens: Array  # [S] int32: no stop id before
  max_tokens: Array  # [S] int32
  seed: Array  # [S] int32, another draw for each; 0 changes nothing
  top_logprobs: Array  # [S] int32, how many of the likeliest are reported


@struct.dataclass
class Cache:
  """Keys and values of what was read so far, one pair of arrays per layer.

  In pages, with a table: entry i of slot s is entry i % p of page
  table[s, i // p].
  """

  k: tuple  # L x [S, K, length, h], or [pages, K, p, h]
  v: tuple  # likewise
  table: Array | None = None  # [S, n] int32
  experts: tuple = ()  # L x [S, 1, length, k] uint16 that these tokens passed,
  # of a prefill or a block, where they are kept to be replayed


@struct.dataclass
class Prompt:
  """One prompt, tokenised once; `columns` go to the reward functions."""

  index: int = struct.field(pytree_node=False)  # global, counts epochs on
  tokens: np.ndarray = struct.field(pytree_node=False)  # [P] int32
  prompt: Any = struct.field(pytree_node=False)  # text or list of messages
  columns: dict = struct.field(pytree_node=False)  # the row's other columns


@dataclasses.dataclass(frozen=True)
class Request:
  """A continuation of `tokens` that somebody wants.

  `prompt` and `sample` are the address of its draws, with the run key, the
  step and the position in the text. A further turn of a conversation keeps
  both and brings the longer text, so its draws are those of one long sample.
  """

  tokens: np.ndarray  # [P] int32, all that was said so far
  prompt: int  # global prompt index
  sample: int = 0  # index within its group
  sampling: dict = dataclasses.field(default_factory=dict)  # scalars and
  # tuples by the names of `Sampling`, and stop_strings; the rest as configured
  tag: Any = None  # the caller's own


@dataclasses.dataclass(frozen=True)
class Completion:
  """What was drawn for a request: host arrays, equal on every process."""

  request: Request
  tokens: np.ndarray  # [C] int32, a stop id included
  logprobs: np.ndarray  # [C] float32, temperature applied, no truncation
  behaviour_logprobs: np.ndarray  # [C] float32, of what was drawn from
  finished: bool  # by a stop id or a stop string, not by max_tokens
  stop_string: str = ''  # that ended it; the last token completes it
  top_ids: np.ndarray | None = None  # [C, n] int32, likeliest first
  top_logprobs: np.ndarray | None = None  # [C, n] float32
  experts: np.ndarray | None = None  # [P + C, L, k] uint16, of all the text
  versions: np.ndarray | None = None  # [C] int32, updates behind the weights


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
  figures: dict = struct.field(default_factory=dict)  # more of the engine's
  from_data: bool = False  # completions of the data, not of a sampler
  experts: np.ndarray | None = None  # [N, P + C, L, k] uint16, by position
  mask: Any = None  # [N, C] bool, tokens that the policy wrote; None: all
  versions: Any = None  # [N, C] int32, `version` by token; None: all the same
  rewards: dict | None = None  # name -> [N] float64 that came with it; or NaN
  messages: tuple | None = None  # [N] lists: turns of the model and of tools
  top_ids: Any = None  # [N, C, n] int32, the likeliest at each place
  top_logprobs: Any = None  # [N, C, n] float32, as `logprobs`


@dataclasses.dataclass
class Experience:
  """A graded rollout: host arrays, equal on every process.

  arrays: per token of the completions: sampler_logprobs, behaviour_logprobs,
    and what the algorithm asked for of old_logprobs, ref_logprobs and values.
  memory: what the algorithm remembers from step to step; goes into
    checkpoints, so numbers and strings only.
  """

  rollout: Rollout
  rewards: np.ndarray  # [N] float64, NaN where there is none
  mask: np.ndarray  # [N, C] float32, 1 on tokens that the policy wrote
  arrays: dict  # name -> [N, C] float32
  baseline: np.ndarray | None = None  # [N / group_size], of greedy answers
  step: int = 0
  memory: dict = dataclasses.field(default_factory=dict)

  @property
  def groups(self) -> int:
    return len(self.rollout.prompts)


@dataclasses.dataclass
class Credit:
  """What an algorithm makes of experience.

  arrays: per token, into `Batch.arrays` of the update.
  mask: tokens that are trained, or how much; a row of zeros is left out.
  """

  arrays: dict  # name -> [N, C] float32
  mask: np.ndarray  # [N, C] float32
  metrics: dict
  memory: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Item:
  """What one step trains on.

  updates: (role, placed batch) of each update, in order.
  info: figures of the data, `tokens` among them.
  samples: () -> rows for samples/STAGE/STEP.jsonl.
  learnt: (`Experience`, `Credit`) of an on-policy step, for its record.
  """

  updates: list
  info: dict
  samples: Any = None
  learnt: tuple = ()


@dataclasses.dataclass(frozen=True)
class Objective:
  """Outputs of a model and a batch -> loss and metrics.

  fn: (outputs, arrays) -> (loss, {metric: value}), each of one shape and
    elementwise in tokens, for `Batch.loss_weights` to sum; `arrays` is
    `Batch.arrays`. It sees chunks of rows: no sum over tokens in it.
  coupled: fn is (outputs, batch) -> (loss [], {metric: []}) over whole rows
    instead, sums that are weighted already: for losses of sequences and pairs,
    which cost one more product with the head, and for scalar heads.
  token_means: the metrics of a coupled fn are sums over tokens weighted by
    `loss_weights`; like those of other fns they are reported as means,
    whatever the weights add up to (Dr. GRPO's are not 1).
  reads: fields of `Outputs` that fn needs besides `logprobs`; those it is
    differentiated through stand in `learns`, too.
  arrays: names in `Batch.arrays` that are filled before the update.
  divergence: see `losses.head_chunk.HeadConfig`; gives `outputs.divergence`.
  teacher_forms: see `losses.head_chunk.HeadConfig`; of the teachers in memory.
  neftune_alpha: size of the noise on embeddings; 0 is none. `seed` is its.
  router: weights of the losses of `moe.balance_loss`.
  """

  fn: Callable
  coupled: bool = False
  token_means: bool = False
  reads: tuple[str, ...] = ()
  learns: tuple[str, ...] = ()
  arrays: tuple[str, ...] = ()
  temperature: float = 1.0
  divergence: Callable | None = None
  teacher_forms: tuple[tuple[float, float], ...] = ()
  neftune_alpha: float = 0.0
  seed: int = 0
  router: tuple[float, float] = (0.0, 0.0)
