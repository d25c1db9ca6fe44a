"""A reference model that follows the policy: reset every so many updates, or an exponential moving average.

TR-DPO (arXiv:2404.09656): reference = mix * policy + (1 - mix) * reference,
every `config.reference.every` updates; with mix 1 it is reset to the policy, as in ProRL
(arXiv:2505.24864), which also starts the optimizer anew (`reset_optimizer`).

Its weights are a part of the optimizer's state, so that checkpoints, meshes and skipped
updates treat them as the moments of Adam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpost.errors import refuse
from jaxpost.models.parameters import join
from jaxpost.programs import loss_scale
from jaxpost.roles import Frozen

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.roles import Policy
  from jaxpost.stage.config import Config


class Following(NamedTuple):
  """The state of an optimizer, and the weights of the reference."""

  updates: jax.Array  # [] int32, since the reference moved
  reference: Any
  inner: Any


def following(
  optimizer: optax.GradientTransformation, every: int, mix: float, reset_optimizer: bool = False
) -> optax.GradientTransformation:
  """Returns the optimizer with a reference in its state, which moves after `every` updates.

  With `reset_optimizer`, moments and their counts then start anew (ProRL); the schedule of
  the learning rate goes on.
  """

  def init(params):
    # A copy: an update is given both, and reuses the memory of both.
    return Following(jnp.int32(0), jax.tree.map(jnp.copy, params), optimizer.init(params))

  def update(grads, state, params=None):
    updates, inner = optimizer.update(grads, state.inner, params)
    moves = state.updates + 1 >= every  # [] bool

    def moved(old, x, update):
      return jnp.where(moves, (1 - mix) * old + mix * (x + update), old).astype(old.dtype)

    reference = jax.tree.map(moved, state.reference, params, updates)
    if reset_optimizer:

      def anew(old, fresh):
        return old if _is_schedule(old) else jnp.where(moves, fresh, old)

      inner = jax.tree.map(anew, inner, optimizer.init(params), is_leaf=_is_schedule)
    return updates, Following(jnp.where(moves, 0, state.updates + 1), reference, inner)

  return optax.GradientTransformation(init, update)


def _is_schedule(state: Any) -> bool:
  return isinstance(state, optax.ScaleByScheduleState)


class MovingReference(Frozen):
  """The role of a reference whose weights are in the policy's optimizer state."""

  def __init__(self, policy: Policy):
    self.policy = policy
    self.program, self.layout, self.model = policy.score_program, policy.layout, policy.model

  @property
  def params(self) -> dict:
    """All parameters, those that are not trained included."""
    state = self.policy.state.opt_state
    state = state.inner if isinstance(state, loss_scale.LossScaled) else state
    return join(self.policy.frozen.get('params', {}), state.reference)

  @params.setter
  def params(self, value: dict) -> None:
    raise AttributeError('these weights are in the state of the policy')


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises InputError where the reference cannot follow the policy."""
  refuse(
    'reference' not in algorithm.needs(config),
    f'config.reference.every: {config.algorithm} reads no reference model with these fields; leave it 0, or '
    'set config.rl.kl_coef',
  )
  refuse(
    bool(config.rl.reference), 'config.reference.every: a teacher (config.rl.reference) does not follow; leave it 0'
  )
  refuse(
    config.preference.precompute_ref,
    'config.preference.precompute_ref: the reference changes with config.reference.every; set one of the two',
  )
  refuse(
    bool(config.mesh.score or config.mesh.score_devices),
    'config.mesh.score: a reference that follows is on the mesh of training; leave score and score_devices out',
  )
  refuse(
    config.rollout.offload, 'config.rollout.offload: moves no reference that follows (config.reference.every); unset it'
  )
