"""Roles: weights, and the programs that may touch them.

Legend: M micro-batches, B rows, T tokens.
"""

from collections.abc import Callable, Sequence
import dataclasses
import typing

import jax
import numpy as np

from jaxpost.models.model import Model
from jaxpost.programs.compile import Program
from jaxpost.sharding import Layout
from jaxpost.types import Batch, Outputs, Prompt, Rollout, TrainState

if typing.TYPE_CHECKING:  # a run that never samples imports no rollout
  from jaxpost.rollout.engine import Engine


@dataclasses.dataclass
class Policy:
  """The model in training: `update`, `score`, `export`."""

  model: Model
  state: TrainState
  layout: Layout
  micro_batch_size: int  # rows at a time; 0: all
  update_program: Program
  score_program: Program
  export_fn: Callable  # (folder, params) -> None

  @property
  def params(self):
    return self.state.params

  def place(self, batch: Batch) -> Batch:
    """Host rows [B, T] -> device micro-batches [M, B / M, T]."""
    rows = self.micro_batch_size or batch.tokens.shape[0]

    def split(x):
      x = np.pad(x, ((0, -len(x) % rows), (0, 0)))
      return x.reshape(-1, rows, x.shape[1])

    return self.layout.put(jax.tree.map(split, batch), None, 'batch', None)

  def update(self, batch: Batch) -> dict:
    """One optimizer step on host rows or placed ones; metrics on the device."""
    self.state, metrics = self.update_program(self.state, self._placed(batch))
    return metrics

  def score(self, batch: Batch) -> Outputs:
    """Log-probs and entropy [M, B / M, T] of the tokens with a weight."""
    return self.score_program(
        self.state.params, without_signal(self._placed(batch)))

  def export(self, folder):
    """Writes a Hugging Face folder."""
    self.export_fn(folder, self.state.params)

  def _placed(self, batch):
    return batch if batch.tokens.ndim == 3 else self.place(batch)


@dataclasses.dataclass
class Reference:
  """Frozen weights that score what the policy wrote."""

  params: dict
  score_program: Program

  def __call__(self, batch: Batch) -> Outputs:
    """Outputs [M, B / M, T] of a placed batch."""
    return self.score_program(self.params, without_signal(batch))


def without_signal(batch: Batch) -> Batch:
  """Tokens and weights only: scoring compiles once for all algorithms."""
  return Batch(batch.tokens, batch.positions, batch.segment_ids,
               batch.loss_weights)


@dataclasses.dataclass
class Sampler:
  """Completions from the policy's weights."""

  engine: 'Engine'
  run_key: np.ndarray  # [2] uint32

  def sync(self, policy: Policy, version: int) -> dict:
    """Moves the policy's weights into the sampling layout; bytes moved."""
    return self.engine.load(policy.params, version)

  def release(self):
    """Frees the sampling copy of the weights."""
    self.engine.unload()

  def __call__(self, prompts: Sequence[Prompt], group_size: int = 1,
               step: int = 0, **sampling) -> Rollout:
    """`group_size` completions of each prompt; `sampling` as in `Sampling`."""
    return self.engine(
        prompts, group_size=group_size, run_key=self.run_key, step=step,
        sampling=sampling)
