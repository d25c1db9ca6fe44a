"""Expert parallelism: all-to-all dispatch of tokens to their experts, and combine.

Legend: n devices along the mesh axis 'expert', N rows of each (a row is a token), D width of a row, k experts of a row.

A row is sent once to each device that has some of its experts, which sends one sum back. Nothing is dropped: the
receive buffer has room for all rows of all devices, as much as an all-gather of them would take.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Dispatch:
  """Which rows are sent where, from the point of view of one device; integers are int32."""

  goes: jax.Array  # [n, N] bool, True where a local row is sent to a device
  rows: jax.Array  # [n, N], for each device the numbers of the local rows, first of those that are sent to it
  place: jax.Array  # [n, N], the place of a local row among those sent
  arrived: jax.Array  # [n, N], for each device the numbers that its rows have there, first of those received from it
  sent: jax.Array  # [n], numbers of rows to each device
  received: jax.Array  # [n], numbers of rows from each device
  exact: bool = struct.field(pytree_node=False)  # see `exchange`


def sort_by_key(key: jax.Array, num_keys: int) -> tuple[jax.Array, jax.Array]:
  """Stable argsort: returns (order, key[order]) along the last axis.

  Key and place are packed into one integer: XLA for TPU compiles a stable sort of
  pairs three times as long, and sorts three times as much data.

  Args:
    key: [..., M], integers in [0, num_keys).
  """
  size = key.shape[-1]
  bits = (size - 1).bit_length()
  if (num_keys - 1).bit_length() + bits > 32:
    order = jnp.argsort(key, axis=-1)
    return order, jnp.take_along_axis(key, order, axis=-1)
  packed = jax.lax.sort(key.astype(jnp.uint32) << bits | jnp.arange(size, dtype=jnp.uint32), is_stable=False)
  return (packed & (2**bits - 1)).astype(jnp.int32), (packed >> bits).astype(key.dtype)


def plan_dispatch(sends: jax.Array, exact: bool) -> Dispatch:
  """Plans the dispatch of one device.

  Args:
    sends: [n, N, n] bool, the same on all devices: sends[i, row, j] is True if row
      `row` of device i is sent to device j.
    exact: see `exchange`.
  """
  me = jax.lax.axis_index('expert')
  goes = sends[me].T
  comes = sends[..., me]
  counts = jnp.sum(sends, axis=1, dtype=jnp.int32)  # [from, to]
  return Dispatch(
    goes=goes,
    rows=_true_first(goes),
    place=jnp.maximum(jnp.cumsum(goes, axis=1) - 1, 0),
    arrived=_true_first(comes),
    sent=counts[me],
    received=counts[:, me],
    exact=exact,
  )


def _true_first(mask: jax.Array) -> jax.Array:
  """Returns a stable permutation of each row that puts the True entries first."""
  return sort_by_key(~mask, 2)[0]


def dispatch_tokens(
  x: jax.Array, weights: jax.Array, chosen: jax.Array, experts_per_device: int, exact: bool
) -> tuple[Dispatch, list[jax.Array]]:
  """Sends rows over the mesh axis to the devices that have their experts.

  Entries of the result without a received row have no effect, forward or
  backward, because their `chosen` are not experts of this device.

  Args:
    x: [N, D].
    weights, chosen: [N, k], of the router.

  Returns:
    (`Dispatch`, received [x, weights, chosen], each [n N, ...]).
  """
  weights, chosen = (jax.lax.all_gather(y, 'expert') for y in (weights, chosen))
  device = chosen[..., None] // experts_per_device
  sends = jnp.any(device == jnp.arange(len(chosen)), axis=-2)
  plan = plan_dispatch(sends, exact)
  weights, chosen = (jnp.take_along_axis(y, plan.arrived[..., None], axis=1) for y in (weights, chosen))
  return plan, [y.reshape(-1, y.shape[-1]) for y in (dispatch(x, plan), weights, chosen)]


def exchange(x: jax.Array, sent: jax.Array, received: jax.Array, exact: bool) -> jax.Array:
  """All-to-all: [n, N, D], part i for device i -> [n, N, D], part i from device i.

  Args:
    sent, received: [n], how many rows of each part are real.
    exact: whether to send only these (ragged all-to-all), so that other rows of the
      result are 0. XLA:CPU has no ragged all-to-all: there all rows are sent.
  """
  if not exact:
    return jax.lax.all_to_all(x, 'expert', 0, 0)
  n, rows, width = x.shape
  flat = x.reshape(-1, width)
  starts = jnp.arange(n, dtype=jnp.int32) * rows
  # Each part arrives where this device's rows are on the receiver.
  output_offsets = jnp.full((n,), jax.lax.axis_index('expert') * rows, jnp.int32)
  out = jax.lax.ragged_all_to_all(
    flat, jnp.zeros_like(flat), starts, sent, output_offsets, received, axis_name='expert'
  )
  return out.reshape(x.shape)


@jax.custom_vjp
def dispatch(x: jax.Array, plan: Dispatch) -> jax.Array:
  """[N, D] -> [n, N, D]: the rows received from each device, first in each part."""
  return exchange(x[plan.rows], plan.sent, plan.received, plan.exact)


@jax.custom_vjp
def combine(y: jax.Array, plan: Dispatch) -> jax.Array:
  """[n, N, D], results of the received rows -> [N, D], their sums by local row: the transpose of `dispatch`."""
  results = exchange(y, plan.received, plan.sent, plan.exact)
  results = jnp.take_along_axis(results, plan.place[..., None], axis=1)
  return jnp.sum(results, axis=0, where=plan.goes[..., None], dtype=jnp.float32).astype(y.dtype)


dispatch.defvjp(lambda x, plan: (dispatch(x, plan), plan), lambda plan, g: (combine(g, plan), None))
combine.defvjp(lambda y, plan: (combine(y, plan), plan), lambda plan, g: (dispatch(g, plan), None))
