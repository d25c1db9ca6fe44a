"""The records that pass between the parts of a run.

Shape legend: B rows, T tokens a row, N sequences, P prompt tokens, C
completion tokens, S slots, K kv heads, h head size, L layers.

Arrays per token are aligned with the token itself: `logprobs[b, t]` is log p(tokens[b, t] | tokens before it). The
first token of a document has no prediction, so its weight is 0.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

Array = Any  # jax.Array or np.ndarray

# The logit or score of masked entries. Finite, unlike -inf: neither a softmax over
# masked entries alone nor their differences may become NaN.
MASKED_LOGIT = -1e30


@struct.dataclass
class Batch:
  """Packed rows for one update.

  Two documents, [5 6 7] and [8 9], the first token of each being its prompt, packed into a row of 6:

    tokens        5    6    7    8    9    0
    positions     0    1    2    0    1    0
    segment_ids   1    1    1    2    2    0     (0 is padding)
    loss_weights  0   1/3  1/3   0   1/3   0     (3 = trained tokens of the *global* batch)

  `loss_weights` holds mask / global normalizer, so that every loss and every metric is a plain weighted sum, whatever
  the packing, the micro-batches or the mesh.

  Branches share a prompt. Chosen [8 9] and rejected [4] after the prompt [5 6 7] are one document; the last prompt
  token is repeated before each branch, so that every token is still predicted from its left neighbor:

    tokens        5    6    7    8    9    7    4
    positions     0    1    2    3    4    2    3
    branch_ids    0    0    1    1    1    2    2   (all branches attend to 0)
    sequence_ids  0    0    0    1    1    0    2   (numbered within a row)

  Each branch is contiguous. The chosen sequence of a pair has an odd number, the rejected one the next.

  `arrays` holds per-token inputs of the objective, under these names: advantages, old_logprobs (policy before the first
  update), ref_logprobs, sampler_logprobs, importance_weights, values and returns (critic), margin, label, nll_weights.
  """

  tokens: Array  # [B, T] int32
  positions: Array  # [B, T] int32, restarts with each document
  segment_ids: Array  # [B, T] int32
  loss_weights: Array  # [B, T] float32
  branch_ids: Array | None = None  # [B, T] int32
  sequence_ids: Array | None = None  # [B, T] int32
  arrays: dict = struct.field(default_factory=dict)  # name -> [B, T, ...]
  teacher_hidden: tuple = ()  # [B, T, D'] of each teacher, to distill from
  experts: Array | None = None  # [B, T, L, k] uint16 recorded, for routing replay (`models/routing.py`)
  allowed: Array | None = None  # [B, T, k] int32, see `Rollout`
  temperature: Array | None = None  # [B, T] float32, that of the source (`rl.sources`); 0 and None: that of the run


@struct.dataclass
class TrainState:
  """Parameters, optimizer state and step of a trainable role."""

  step: Array  # [] int32, updates done
  params: Any  # nested dict of arrays, float32 by default
  opt_state: Any


@struct.dataclass
class Outputs:
  """Outputs of a model per token of a batch, the input of objectives.

  Fields that the objective does not read (`Objective.reads`) are None.
  """

  logprobs: Array = None  # [B, T] float32, log_softmax(logits / T)
  entropy: Array = None  # [B, T] float32, nats
  lse: Array = None  # [B, T] float32, log-sum-exp of the logits
  mean_logprob: Array = None  # [B, T], over the vocabulary
  collision: Array = None  # [B, T], log of the sum of p^2 over the vocabulary; without gradient
  divergence: Array = None  # [B, T], from the teachers' distributions
  values: Array = None  # [B, T], of a scalar head: the value of the text up to and including a token


@struct.dataclass
class Cache:
  """KV cache, one pair of arrays per layer.

  A paged cache has a table: entry i of slot s is entry i % p of page table[s, i // p], p entries to a page.
  """

  k: tuple  # L x [S, K, length, h], or [pages, K, p, h]
  v: tuple  # the same shapes
  table: Array | None = None  # [S, n] int32
  experts: tuple = ()  # L x [S, 1, length, k] uint16, recorded for routing replay
  states: tuple = ()  # recurrent states of the layers without attention: arrays [S, heads, ...] of fixed size


@struct.dataclass
class Prompt:
  """One prompt, tokenized once; `columns` go to the reward functions."""

  index: int = struct.field(pytree_node=False)  # place in the endless order of prompts; each epoch counts on
  tokens: np.ndarray = struct.field(pytree_node=False)  # [P] int32
  prompt: Any = struct.field(pytree_node=False)  # text or list of messages
  columns: dict = struct.field(pytree_node=False)  # the row's other columns
  source: dict = struct.field(pytree_node=False, default_factory=dict)  # from `rl.mixture.parse`; {}: all as in config


@struct.dataclass
class Rollout:
  """Completions of a step's prompts: host arrays, equal on every process.

  Sequence n answers prompt `n // group_size`; groups are in order. Completions are padded with 0 on the right,
  `lengths` counts the stop token. Two prompts with a group of two samples each, at most 4 tokens, stop id 2:

    prompts       (Prompt(index=6, tokens=[5 7]), Prompt(index=7, tokens=[9]))
    completions   [[8 3 2 0]     sample 0 of prompt 6
                   [8 8 8 8]     sample 1 of prompt 6, cut off at max_new_tokens
                   [4 2 0 0]     sample 0 of prompt 7
                   [3 3 2 0]]    sample 1 of prompt 7
    lengths       [3 4 2 3]
    finished      [True False True True]
    logprobs      [[-0.1 -0.7 -0.2 0] ...]    0 where there is no token

  In conversations a completion holds the turns of the model and the answers of tools between them; `mask` tells which
  tokens the policy sampled.

  Attributes:
    logprobs: under the distribution with temperature, before truncation (top-k, top-p, min-p).
    behavior_logprobs: under the truncated distribution that tokens were drawn from; no loss reads them.
    finished: ended by a stop id, not by max_new_tokens.
    step: the step of training, from 0, that it was sampled for.
    version: number of optimizer updates that produced the weights (0: the initial ones).
    from_data: completions are demonstrations, nothing was sampled.
    mask: True on tokens that the policy sampled; None: it sampled all.
    versions: the version of each token, if weights were updated in the middle of the rollout; None: `version`.
    rewards: {name: [N] float64} that an environment gave, or that were recorded with the rollout; NaN: none.
    turn_rewards: rewards of turns, at the last token of each; `rewards` has their sums, too.
    verdicts: `Experience.verdicts` that were recorded with the rollout.
    messages, errors: the turns of model and tools of each sequence, and why its episode failed ('': it did not).
    top_ids, top_logprobs: the n most probable tokens at each position.
    demonstration, replayed: whether it is of the data (`rl.expert`; log-probs 0), or an earlier sample (`rl.replay`).
    experts: indices of the experts that the router chose at each position of prompt and completion.
    allowed: 1 + each id that could be drawn, padded with 0; `logprobs` are renormalized over them (`rl.sampling_mask`).
  """

  prompts: tuple[Prompt, ...]  # N / group_size of them
  completions: np.ndarray  # [N, C] int32
  lengths: np.ndarray  # [N] int32
  logprobs: np.ndarray  # [N, C] float32
  behavior_logprobs: np.ndarray  # [N, C] float32
  finished: np.ndarray  # [N] bool
  step: int = 0
  version: int = 0
  occupancy: float = 1.0  # share of computed slot-steps that drew a needed token
  figures: dict = struct.field(default_factory=dict)  # further metrics of the engine
  from_data: bool = False
  experts: np.ndarray | None = None  # [N, P + C, L, k] uint16
  mask: np.ndarray | None = None  # [N, C] bool
  versions: np.ndarray | None = None  # [N, C] int32
  rewards: dict[str, np.ndarray] | None = None
  turn_rewards: np.ndarray | None = None  # [N, C] float64
  verdicts: np.ndarray | None = None  # [N] float64
  messages: tuple | None = None  # N lists of dict
  errors: np.ndarray | None = None  # [N] str
  top_ids: np.ndarray | None = None  # [N, C, n] int32
  top_logprobs: np.ndarray | None = None  # [N, C, n] float32
  allowed: np.ndarray | None = None  # [N, C, k] int32
  demonstration: np.ndarray | None = None  # [N] bool
  replayed: np.ndarray | None = None  # [N] bool

  @property
  def group_size(self) -> int:
    """Number of samples of each prompt."""
    return len(self.lengths) // len(self.prompts)


class Scores(NamedTuple):
  """Scores of a rollout by the roles; None: the algorithm does not need them.

  Each is [M, B / M, T] on the devices, then [N, C] float32 on the host.
  """

  old_logprobs: Array | None = None  # of the policy before the first update of the step
  ref_logprobs: Any = None  # of the reference, for the KL term; on the devices a list, as opd has several teachers
  reward_model: Array | None = None  # its output at every token
  values: Array | None = None  # of the critic, of the text before a token
  entropy: Array | None = None  # of the policy before the first update of the step
  aligned: Array | None = None  # weight of the teachers that share a span of text with the token (`distill.align`)

  def computed(self) -> dict[str, Array]:
    """Returns {name: array} of the scores that are not None."""
    return {name: x for name, x in self._asdict().items() if x is not None}


@dataclasses.dataclass
class Experience:
  """A graded and scored rollout, the input of `Algorithm.credit`.

  Host arrays, equal on every process.

  Attributes:
    rewards: the sum of all rewards of each completion; NaN: it has none.
    mask: 1 on the tokens that the policy sampled.
    arrays: sampler_logprobs, and those of old_logprobs, ref_logprobs, entropy and values that `Algorithm.scores` names.
    baseline: rewards of greedy answers (ReMax); step: from 0.
    verdicts: values of the one reward that decides what is correct (`rl.correct_by`).
    components: {name: (weight in the sum, values of this reward)}; NaN: none.
    memory: state of the algorithm between steps; goes into checkpoints, so numbers and strings only.
  """

  rollout: Rollout
  rewards: np.ndarray  # [N] float64
  mask: np.ndarray  # [N, C] float32
  arrays: dict[str, np.ndarray]  # name -> [N, C] float32
  baseline: np.ndarray | None = None  # [N / group_size] float64
  step: int = 0
  memory: dict = dataclasses.field(default_factory=dict)
  verdicts: np.ndarray | None = None  # [N] float64
  components: dict[str, tuple[float, np.ndarray]] = dataclasses.field(default_factory=dict)  # weight, [N] float64

  @property
  def turn_rewards(self) -> np.ndarray:
    """Rewards of turns at their last tokens, [N, C]; 0 where there are none."""
    return np.zeros(self.mask.shape) if self.rollout.turn_rewards is None else self.rollout.turn_rewards


@dataclasses.dataclass
class Credit:
  """Advantages and other training signals that an algorithm computes.

  Attributes:
    arrays: per-token inputs of the objective, for `Batch.arrays` of the update.
    mask: weights of the trained tokens, usually 1; sequences whose row is all 0 are not trained on.
    metrics: for the row of the step.
    memory: `Experience.memory` of the next step.
  """

  arrays: dict[str, np.ndarray]  # name -> [N, C] float32
  mask: np.ndarray  # [N, C] float32
  metrics: dict = dataclasses.field(default_factory=dict)
  memory: dict = dataclasses.field(default_factory=dict)


class RowShape(NamedTuple):
  """Shape [num_rows, row_length] of a batch of packed rows, and whether prompts are shared (`train.share_prompt`)."""

  num_rows: int
  row_length: int
  share_prompt: bool = False


class Update(NamedTuple):
  """One optimizer step of one trainable role."""

  role: str  # 'policy' or 'critic'
  batch: Batch  # placed on the devices


@dataclasses.dataclass
class Item:
  """The data of one step of the loop.

  Attributes:
    updates: in the order in which they run.
    info: metrics of the data; always has 'tokens', the tokens of the step, and 'mean_context', the mean number of
      tokens that one of them attends to.
    samples: () -> rows for samples/STAGE/STEP.jsonl.
    experience, credit: the graded rollout and the advantages of an on-policy step, for rollouts/.
    error: the first error of a reward function or an episode in the step, '' for none.
  """

  updates: list[Update]
  info: dict
  samples: Callable[[], list[dict]] | None = None
  experience: Experience | None = None
  credit: Credit | None = None
  error: str = ''


Metrics = dict[str, Array]
# (outputs, `Batch.arrays`) -> (loss [B, T], metrics [B, T]), elementwise in tokens.
TokenLoss = Callable[[Outputs, dict[str, Array]], tuple[Array, Metrics]]
# (outputs, batch) -> (loss [], metrics []), sums over the batch, weighted by `loss_weights`.
BatchLoss = Callable[[Outputs, Batch], tuple[Array, Metrics]]
# (logits [B, C, V] of the student, those of each teacher, {name: [B, C, ...]}) -> [B, C], for C tokens of each row.
Divergence = Callable[[Array, Sequence[Array], dict[str, Array]], Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of a role: a function of the model's outputs and a batch.

  Attributes:
    fn: a TokenLoss, whose results `Batch.loss_weights` sums. It sees chunks of rows, so it must not sum over tokens.
    coupled: fn is a BatchLoss instead: for losses of sequences and pairs, which
      cost one more product with the head, and for scalar heads.
    token_means: metrics of a coupled fn are sums over tokens weighted by `loss_weights`, divided by the sum of these.
    reads: fields of `Outputs` that fn needs besides `logprobs`.
    learns: those of `reads` that gradients flow through.
    arrays: names in `Batch.arrays` that are filled before the update.
    divergence, teacher_forms: see `losses.head_chunk.HeadConfig`.
    neftune_alpha: size of the noise on embeddings; 0 is off. seed: of this noise and of dropout.
    router, mtp_weight: weights of the losses of `models.routing`, and of `programs.multi_token`.
  """

  fn: TokenLoss | BatchLoss
  coupled: bool = False
  token_means: bool = False
  reads: tuple[str, ...] = ()
  learns: tuple[str, ...] = ()
  arrays: tuple[str, ...] = ()
  temperature: float = 1.0
  divergence: Divergence | None = None
  teacher_forms: tuple[tuple[float, float], ...] = ()
  neftune_alpha: float = 0.0
  seed: int = 0
  router: tuple[float, float] = (0.0, 0.0)
  mtp_weight: float = 0.0
