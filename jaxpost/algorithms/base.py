"""What sets one method apart from another: a handful of plain functions.

Legend: N sequences, C completion tokens, B rows, T tokens.

A file in this folder, or one of yours, ends with `ALGORITHM = Algorithm(...)`.
Each function gets the stage's config; everything else (data, programs,
sampling, grading, packing, checkpoints) is the same for all methods.
"""

import dataclasses
from collections.abc import Callable, Mapping

from jaxpost.errors import InputError


def _nothing(config) -> tuple:
  del config
  return ()


def _accept(*args):
  del args


def _same(batch, roles, config):
  del roles, config
  return batch


def _empty(config) -> dict:
  del config
  return {}


def _never(config) -> float:
  del config
  return 0.0


@dataclasses.dataclass(frozen=True)
class Precompute:
  """What a frozen role says of each example, once, before the first step.

  The role is let go then. The arrays stand in `Batch.arrays`, at the trained
  tokens; elsewhere they are 0.

  arrays: name -> (shape after [B, T], dtype).
  read: what the role's program returns -> {name: [M, B / M, T, ...]}.
  options: config fields besides the role's weights and the data that decide
    what is computed, for the name of the file that keeps it.
  """

  arrays: Mapping
  read: Callable
  options: tuple = ()


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm = a stream of batches + an objective.

  defaults: {section: {field: value}} of the config fields that are left to
    the algorithm; a value may be a function of the config.
  objective: config -> `programs.train.Objective` of the policy.
  critic: config -> Objective of a second trainable role with a scalar head,
    or nothing where it has none.
  value_head: config -> whether the policy has a scalar head, too.
  needs: config -> names of the frozen roles it reads: 'reference',
    'teachers', 'reward_model'.
  prepare: (placed batch, roles, config) -> batch. On the devices, before
    each update; adds what the objective's `arrays` lacks.
  precompute: config -> {name of a frozen role: `Precompute`}; such a role is
    in no `Roles`. Teachers are called teacher_0, teacher_1, ...
  check: (config) -> None; raises InputError for what cannot work.
  check_first_step: (metrics, config) -> None; raises AssertionError where
    the first step, before anything was learnt, is wrong.

  Of a method on data:
  render: (rows, tokenizer, config) -> row number -> `data.chat.Example`.
  per: what the loss is a mean of, 'token', 'sequence' or 'pair'; or a
    function config -> that.
  scalar_head: the policy is a reward model.

  Of an on-policy method:
  on_policy: the controller samples for it.
  rewards: it learns from them.
  from_data: config -> share of the steps that take the completions of the
    data in place of samples.
  scores: config -> names to compute of each rollout: 'old_logprobs',
    'ref_logprobs', 'values'.
  greedy_baseline: config -> whether a greedy answer is graded, too.
  credit: (`Experience`, config) -> `Credit`.
  pack: (Experience, Credit, numbers of sequences, config, rows, row_length)
    -> Batch on the host with `branch_ids` and `sequence_ids`, for methods
    that do not train on whole completions one by one.
  """

  objective: Callable
  defaults: Mapping = dataclasses.field(default_factory=dict)
  critic: Callable = _nothing
  value_head: Callable = _nothing
  needs: Callable = _nothing
  prepare: Callable = _same
  precompute: Callable = _empty
  check: Callable = _accept
  check_first_step: Callable = _accept
  render: Callable | None = None
  per: str | Callable = 'token'
  scalar_head: bool = False
  on_policy: bool = False
  rewards: bool = True
  from_data: Callable = _never
  scores: Callable = _nothing
  greedy_baseline: Callable = _nothing
  credit: Callable | None = None
  pack: Callable | None = None

  def mean_per(self, config) -> str:
    return self.per(config) if callable(self.per) else self.per


def expect(metrics: dict, limits: dict, why: str):
  """AssertionError unless each metric is within its (value, tolerance)."""
  for name, (value, tolerance) in limits.items():
    # Written so that NaN fails too.
    if name in metrics and not abs(metrics[name] - value) <= tolerance:
      raise AssertionError(f'{name} is {metrics[name]} at the first step and must be {value}: {why}')


def refuse_unread(block, read, by: str, section='rl'):
  """InputError for a field of config.SECTION that is set and not in `read`."""
  for field in dataclasses.fields(block):
    refuse(
      field.name not in read and vars(block)[field.name] not in (field.default, field.metadata['auto']),
      f'config.{section}.{field.name}: {by} would ignore it; leave it {field.default!r}',
    )


def refuse(wrong: bool, text: str):
  """InputError(text) if `wrong`."""
  if wrong:
    raise InputError(text)
