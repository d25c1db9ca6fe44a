"""`Algorithm`, the record of functions and settings in which training methods differ.

Legend: N sequences, C completion tokens, M micro-batches, B rows, T tokens.

A file in this folder, or a file of yours, ends with `ALGORITHM = Algorithm(...)`. Each function gets the stage's
config; everything else (data, programs, sampling, grading, packing, checkpoints) is the same for all algorithms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax

  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.roles import Roles
  from jaxpost.types import Batch, Credit, Experience, Objective

# `stage.schema.Config`, with the sections data, rl, rollout, ...; this room may not import it.
Config = Any


def _always(value: Any) -> Callable[..., Any]:
  """Returns a function that returns `value` for any arguments."""
  return lambda *args: value


@dataclasses.dataclass(frozen=True)
class Precompute:
  """Outputs of a frozen role on every example, computed before the first step.

  The role's weights are freed afterwards. The arrays come with the batches, in `Batch.arrays`, at the trained tokens;
  elsewhere they are 0.

  Attributes:
    arrays: name -> (shape after [B, T], dtype).
    read: output of the role's program -> {name: [M, B / M, T, ...]}.
    options: config fields, besides the role's weights and the data, that decide what is computed; part of the name of
      the cache file.
    texts: for a role whose tokenizer is not the policy's, see `teacher_text.TextsOfTeacher`; None: it is the same.
  """

  arrays: Mapping[str, tuple]
  read: Callable[[Any], dict[str, jax.Array]]
  options: tuple = ()
  texts: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm: an objective, and the functions that make its batches.

  Attributes:
    objective: config -> Objective of the policy.
    defaults: {section: {field: value}} of the config fields that are left to the algorithm; a value may be a function
      of the config.
    sections: the config sections that it reads, of nll, preference, reward_model, distill, rl and critic; None: all.
    critic: config -> Objective of a second trainable role with a scalar head, or None.
    value_head: config -> True if the policy has a scalar head, too.
    needs: config -> names of the frozen roles: 'reference', 'teachers'. A reward model is named by `config.reward`.
    prepare: (placed batch, roles, config) -> batch with all arrays that the objective reads; runs on the devices
      before each update.
    precompute: config -> {name of a frozen role: Precompute}; such a role is not in `Roles`. Teachers are named
      teacher_0, teacher_1, ...
    check: raises InputError for a config that cannot work.
    check_roles: (config, {role: its weights, a `stage.records.Source`}, tokenizer of the policy); raises
      InputError for models that do not go together.
    check_first_step: (metrics, config); raises AssertionError where the metrics of the first step, before any learning,
      cannot be right.

    Algorithms on data:

    render: (rows, tokenizer, config) -> function of a row number that returns its example.
    per: 'token', 'sequence' or 'pair', what the loss is a mean of; or a function of the config that returns it.
    scalar_head: the policy has a scalar head in place of that for tokens: it is a reward model.

    On-policy algorithms:

    on_policy: `rl.controller.Controller` samples the batches.
    rewards: it learns from rewards; False: its samples need none.
    data_share: config -> fraction of the steps that take completions of the data instead of samples.
    scores: config -> names of `types.Scores` to compute of each rollout: 'old_logprobs', 'ref_logprobs', 'values'.
    greedy_baseline: config -> True if a greedy answer is graded, too.
    credit: (Experience, config) -> Credit.
    pack: (Experience, Credit, indices of sequences, config, num_rows, row_length) -> host Batch with `branch_ids` and
      `sequence_ids`, for algorithms that do not train on whole completions one by one.
  """

  objective: Callable[[Config], Objective]
  defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  sections: Collection[str] | None = None
  critic: Callable[[Config], Objective | None] = _always(None)
  value_head: Callable[[Config], bool] = _always(False)
  needs: Callable[[Config], Collection[str]] = _always(())
  prepare: Callable[[Batch, Roles, Config], Batch] = lambda batch, roles, config: batch
  precompute: Callable[[Config], Mapping[str, Precompute]] = _always({})
  check: Callable[[Config], None] = _always(None)
  check_roles: Callable[[Config, Mapping[str, Any], Tokenizer], None] = _always(None)
  check_first_step: Callable[[dict, Config], None] = _always(None)
  render: Callable[[Rows, Tokenizer, Config], Callable[[int], Example | None]] | None = None
  per: str | Callable[[Config], str] = 'token'
  scalar_head: bool = False
  on_policy: bool = False
  rewards: bool = True
  data_share: Callable[[Config], float] = _always(0.0)
  scores: Callable[[Config], Collection[str]] = _always(())
  greedy_baseline: Callable[[Config], bool] = _always(False)
  credit: Callable[[Experience, Config], Credit] = _always(None)
  pack: Callable[..., Batch] | None = None

  def mean_per(self, config: Config) -> str:
    """Returns what the loss is a mean of: 'token', 'sequence' or 'pair'."""
    return self.per(config) if callable(self.per) else self.per


def learning_rate(full: float) -> Callable[[Config], float]:
  """Returns the default of `config.optim.lr`: `full` if all weights are trained, ten times that for LoRA adapters.

  The factor is that of "LoRA Without Regret" (Schulman et al. 2025). docs/defaults.md has the source of each rate.
  """
  return lambda config: full * (10 if config.lora.rank or config.lora.path else 1)


def expect(metrics: Mapping[str, float], limits: Mapping[str, tuple[float, float]], why: str) -> None:
  """Raises AssertionError unless each metric is within its (value, tolerance); `why` explains the expected values."""
  for name, (value, tolerance) in limits.items():
    # Written so that NaN fails too.
    if name in metrics and not abs(metrics[name] - value) <= tolerance:
      raise AssertionError(f'{name} is {metrics[name]} at the first step and must be {value}: {why}')
