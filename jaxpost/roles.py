"""Roles: weights and the programs that run on them.

A policy and a critic are trained; a reference, teachers and a reward model are frozen.

Legend: M micro-batches, B rows, T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.distributed import transfer
from jaxpost.models.parameters import join

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model
  from jaxpost.programs.compile import Program
  from jaxpost.types import Batch, Objective, Outputs, TrainState


@dataclasses.dataclass
class Trainable:
  """A model in training: a policy, a critic or a reward model.

  Attributes:
    micro_batch_size: rows of a micro-batch; 0: all rows.
    make_score: makes the program of `score` when it is first called, as many algorithms never score.
    objective: the loss that `update` minimizes.
    frozen: arrays that the objective reads besides state and batch: 'params' that are
      not trained, 'teacher_heads'.
  """

  model: Model
  state: TrainState
  layout: Layout
  micro_batch_size: int
  update_program: Program
  make_score: Callable[[], Program]
  objective: Objective | None = None
  frozen: dict = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def score_program(self) -> Program:
    return self.make_score()

  @property
  def params(self) -> dict:
    """All parameters, the frozen ones included."""
    return join(self.frozen.get('params', {}), self.state.params)

  def place(self, batch: Batch) -> Batch:
    """Returns host rows [B, T] as micro-batches [M, B / M, T] on the devices."""
    return place(self.layout, self.micro_batch_size, batch)

  def update(self, batch: Batch) -> dict:
    """Makes one optimizer step on a host batch or a placed one; returns its metrics, on the devices."""
    self.state, metrics = self.update_program(self.state, self._placed(batch), self.frozen)
    return metrics

  def score(self, batch: Batch) -> Outputs:
    """Returns outputs [M, B / M, T] of a host batch or a placed one.

    Only tokens with a loss weight have log-probs; all tokens have values of a scalar head.
    """
    return self.score_program(self.params, without_signal(self._placed(batch)))

  def _placed(self, batch: Batch) -> Batch:
    return batch if batch.tokens.ndim == 3 else self.place(batch)


def place(layout: Layout, micro_batch_size: int, batch: Batch) -> Batch:
  """Returns host rows [B, T] as micro-batches [M, B / M, T] on the devices, in `layout`."""
  rows = micro_batch_size or batch.tokens.shape[0]

  def split(x):
    x = np.pad(x, ((0, -len(x) % rows), *((0, 0),) * (x.ndim - 1)))  # empty rows, up to a multiple of `rows`
    return x.reshape(-1, rows, *x.shape[1:])  # [M, B / M, T, ...]

  return layout.put(jax.tree.map(split, batch), None, 'batch')


@dataclasses.dataclass
class Policy(Trainable):
  """The language model or reward model that the run trains and exports."""

  export_fn: Callable | None = None  # (folder, params) -> None

  def export(self, folder: epath.PathLike) -> None:
    """Writes the weights as a Hugging Face folder."""
    assert self.export_fn, 'only a policy that is trained is exported'
    self.export_fn(folder, self.params)


@dataclasses.dataclass
class Frozen:
  """Weights that are not trained: a reference, a teacher or a reward model.

  Attributes:
    program: computes scores, hidden states or values of a batch.
  """

  params: dict
  program: Program
  layout: Layout
  model: Model

  def __call__(self, batch: Batch) -> Any:
    """Runs the program on a placed batch [M, B / M, T]."""
    return self.program(self.params, transfer.move(self.layout, without_signal(batch), None, 'batch'))

  def compile(self, batch: Batch) -> None:
    """Compiles the program for a batch of `jax.ShapeDtypeStruct`s."""

    def moved(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.layout.sharding((None, 'batch'), x.shape))

    self.program.compile(self.params, jax.tree.map(moved, batch))


def without_signal(batch: Batch) -> Batch:
  """Returns the batch without fields that only updates read, so that scoring compiles once for all algorithms."""
  return batch.replace(sequence_ids=None, arrays={}, teacher_hidden=())


@dataclasses.dataclass
class Roles:
  """The roles of a stage; None or empty where it has no such role."""

  policy: Policy
  critic: Trainable | None = None
  reference: Frozen | None = None
  reward_model: Frozen | None = None
  teachers: tuple[Frozen, ...] = ()

  @property
  def trainable(self) -> dict[str, Trainable]:
    """The policy and, if there is one, the critic."""
    roles = {'policy': self.policy, 'critic': self.critic}
    return {name: role for name, role in roles.items() if role is not None}
