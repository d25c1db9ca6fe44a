"""The scale of a loss whose gradients come from float16 products."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LossScaled(NamedTuple):
  """The state of an optimizer whose gradients come from float16 products.

  Multiplying the loss by `scale` keeps small gradients from becoming 0. The scale is halved when gradients overflow,
  and doubled after `_PATIENCE` good steps (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
  """

  scale: jax.Array  # [] float32
  good: jax.Array  # [] int32, number of steps since the scale last changed
  inner: Any


_FIRST = 2.0**15
_LARGEST = 2.0**24
_PATIENCE = 1000


def scaled(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns the optimizer with a loss scale in its state. It takes gradients that are already divided by the scale."""

  def init(params):
    return LossScaled(jnp.float32(_FIRST), jnp.int32(0), optimizer.init(params))

  def update(grads, state, params=None):
    updates, inner = optimizer.update(grads, state.inner, params)
    grow = state.good + 1 >= _PATIENCE
    scale = jnp.where(grow, jnp.minimum(2 * state.scale, _LARGEST), state.scale)
    return updates, LossScaled(scale, jnp.where(grow, 0, state.good + 1), inner)

  return optax.GradientTransformation(init, update)


def unmoved(state: LossScaled, finite: jax.Array) -> LossScaled:
  """Returns the state after a step that changes no weights; an overflow (not `finite`) halves the scale."""
  return state._replace(
    scale=jnp.where(finite, state.scale, jnp.maximum(state.scale / 2, 1.0)), good=jnp.where(finite, state.good, 0)
  )


def report(state: LossScaled, finite: jax.Array) -> dict[str, jax.Array]:
  """Returns the metrics of a step with a loss scale: an overflow counts as skipped if the scale is at its minimum."""
  overflowed, skipped = ~finite & (state.scale > 1), ~finite & ~(state.scale > 1)
  return {'loss_scale': state.scale, 'overflowed_updates': 1.0 * overflowed, 'skipped_updates': 1.0 * skipped}
