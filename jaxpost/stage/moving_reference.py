"""A reference model that follows the policy, by periodic resets or as an exponential moving average.

TR-DPO (arXiv:2404.09656) sets reference = mix * policy + (1 - mix) * reference every `config.reference.every` updates.
With mix 1 the reference is reset to the policy, as in ProRL (arXiv:2505.24864), which then also resets the state of the
optimizer (`reset_optimizer`).

The reference is part of the optimizer's state, so that checkpoints, meshes and skipped updates treat it like the
moments of Adam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpost.errors import refuse
from jaxpost.models.parameters import join
from jaxpost.programs import loss_scale
from jaxpost.roles import Frozen, Policy

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.stage.config import Config


class Following(NamedTuple):
  """The state of an optimizer, and the weights of the reference."""

  updates: jax.Array  # [] int32, updates since the reference last changed
  reference: Any
  inner: Any


def following(
  optimizer: optax.GradientTransformation, every: int, mix: float, reset_optimizer: bool = False
) -> optax.GradientTransformation:
  """Returns the optimizer with a reference in its state, which changes every `every` updates.

  With `reset_optimizer`, moments and their counts are then reset (ProRL); the learning rate schedule continues.
  """

  def init(params):
    # A copy, because an update donates the buffers of parameters and state.
    return Following(jnp.int32(0), jax.tree.map(jnp.copy, params), optimizer.init(params))

  def update(grads, state, params=None):
    updates, inner = optimizer.update(grads, state.inner, params)
    is_due = state.updates + 1 >= every  # [] bool

    def follow(reference, param, update):
      mixed = (1 - mix) * reference + mix * (param + update)
      return jnp.where(is_due, mixed, reference).astype(reference.dtype)

    reference = jax.tree.map(follow, state.reference, params, updates)
    if reset_optimizer:

      def reset(old, initial):
        return old if _is_schedule(old) else jnp.where(is_due, initial, old)

      inner = jax.tree.map(reset, inner, optimizer.init(params), is_leaf=_is_schedule)
    return updates, Following(jnp.where(is_due, 0, state.updates + 1), reference, inner)

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
    """All parameters, including those that are not trained."""
    state = self.policy.state.opt_state
    state = state.inner if isinstance(state, loss_scale.LossScaled) else state
    return join(self.policy.frozen.get('params', {}), state.reference)

  @params.setter
  def params(self, value: dict) -> None:
    raise AttributeError('these weights are in the state of the policy')


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises InputError if the config does not allow a reference that follows the policy."""
  refuse(
    'reference' not in algorithm.needs(config),
    f'config.reference.every: {config.algorithm} reads no reference model with these fields; leave it 0, or '
    'set config.rl.kl_coef',
  )
  refuse(
    bool(config.rl.reference),
    'config.reference.every: a reference from config.rl.reference does not follow the policy; leave it 0',
  )
  refuse(
    config.preference.precompute_ref,
    'config.preference.precompute_ref: the reference changes with config.reference.every; set one of the two',
  )
  refuse(
    bool(config.mesh.score or config.mesh.score_devices),
    'config.mesh.score: config.reference.every keeps the reference on the mesh of training; leave score and '
    'score_devices out',
  )
  refuse(
    config.rollout.offload, 'config.rollout.offload: cannot offload the reference of config.reference.every; unset it'
  )
