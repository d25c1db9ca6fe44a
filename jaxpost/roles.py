"""Roles: weights, and the programs that may touch them.

Legend: M micro-batches, B rows, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed import transfer
from jaxpost.hardware import memory
from jaxpost.models.parameters import join

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model
  from jaxpost.programs.compile import Program
  from jaxpost.types import Batch, Objective, Outputs, TrainState


@dataclasses.dataclass
class Trainable:
  """A model in training: a policy, a critic or a reward model.

  objective: what `update` minimises; a diagnosis reads it.
  frozen: what its objective reads besides state and batch: 'params' that are
    not trained, 'teacher_heads'.
  """

  model: Model
  state: TrainState
  layout: Layout
  micro_batch_size: int  # rows at a time; 0: all
  update_program: Program
  score_program: Program
  objective: Objective | None = None
  frozen: dict = dataclasses.field(default_factory=dict)

  @property
  def params(self):
    return join(self.frozen.get('params', {}), self.state.params)

  def place(self, batch: Batch) -> Batch:
    """Host rows [B, T] -> device micro-batches [M, B / M, T]."""
    return place(self.layout, self.micro_batch_size, batch)

  def update(self, batch: Batch) -> dict:
    """One optimizer step on host rows or placed ones; metrics on the device."""
    self.state, metrics = self.update_program(self.state, self._placed(batch), self.frozen)
    return metrics

  def score(self, batch: Batch) -> Outputs:
    """Outputs [M, B / M, T] of the tokens with a weight; a scalar head's
    values of all tokens."""
    return self.score_program(self.params, without_signal(self._placed(batch)))

  def _placed(self, batch):
    return batch if batch.tokens.ndim == 3 else self.place(batch)


def place(layout: Layout, micro_batch_size: int, batch: Batch) -> Batch:
  """Host rows [B, T] -> device micro-batches [M, B / M, T] in `layout`."""
  rows = micro_batch_size or batch.tokens.shape[0]

  def split(x):
    x = np.pad(x, ((0, -len(x) % rows), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, rows, *x.shape[1:])

  return layout.put(jax.tree.map(split, batch), None, 'batch')


@dataclasses.dataclass
class Policy(Trainable):
  """The model that the run is for."""

  export_fn: Callable | None = None  # (folder, params) -> None

  def export(self, folder):
    """Writes a Hugging Face folder."""
    self.export_fn(folder, self.params)


@dataclasses.dataclass
class Frozen:
  """Weights that only read: a reference, a teacher or a reward model."""

  params: dict
  program: Program  # score, hidden or values
  layout: Layout
  model: Model

  def __call__(self, batch: Batch):
    """What the program says of a placed batch [M, B / M, T]."""
    return self.program(self.params, transfer.move(self.layout, without_signal(batch), None, 'batch'))

  def head_for(self, student):
    """A teacher's output embedding [V, D], as the student's update reads it.

    Some families pad the vocabulary of larger models further. Of a smaller
    one the padding goes: the number of rows tells what it lacks.
    """
    size, head = self.model.config.vocab_size, self.model.head(self.params)
    rows = student.padded_vocab_size if size >= student.vocab_size else size
    fit = lambda head: head if len(head) == rows else jnp.pad(head[:rows], ((0, max(0, rows - len(head))), (0, 0)))
    described = isinstance(head, jax.ShapeDtypeStruct)
    return jax.eval_shape(fit, head) if described else fit(head)

  def compile(self, batch: Batch):
    """Ahead of time, for `jax.ShapeDtypeStruct`s in place of arrays."""
    self.program.compile(
      self.params,
      jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.layout.sharding((None, 'batch'), x.shape)), batch
      ),
    )


def without_signal(batch: Batch) -> Batch:
  """Tokens and weights only: scoring compiles once for all algorithms."""
  return batch.replace(sequence_ids=None, arrays={}, teacher_hidden=())


@dataclasses.dataclass
class Roles:
  """The roles of a stage; None or empty for what it lacks."""

  policy: Policy
  critic: Trainable | None = None
  reference: Frozen | None = None
  reward_model: Frozen | None = None
  teachers: tuple = ()  # of Frozen

  @property
  def trainable(self) -> dict[str, Trainable]:
    both = {'policy': self.policy, 'critic': self.critic}
    return {k: v for k, v in both.items() if v is not None}

  def idle(self) -> dict:
    """{id: array} of what nobody reads while the policy samples.

    Optimizer states, the critic and the reference, but for what these share
    with the policy; a reward model grades meanwhile.
    """
    used = memory.distinct(self.policy.params)
    found = memory.distinct(
      [(r.state, r.frozen) for r in self.trainable.values()], self.reference and self.reference.params
    )
    return {k: x for k, x in found.items() if k not in used}

  def park(self, there: bool):
    """Moves what is idle into the memory of the host, or back."""
    device = self.policy.layout.mesh.local_devices[0]
    kind = 'pinned_host' if there else device.default_memory().kind
    idle = self.idle()
    moved = dict(
      zip(idle, jax.device_put(list(idle.values()), [x.sharding.with_memory_kind(kind) for x in idle.values()]))
    )
    change = lambda tree: jax.tree.map(lambda x: moved.get(id(x), x), tree)
    for role in self.trainable.values():
      role.state, role.frozen = change(role.state), change(role.frozen)
    if self.reference:
      self.reference.params = change(self.reference.params)
