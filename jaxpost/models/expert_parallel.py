"""Rows travel over a mesh axis to the devices that want them, and back.

Legend: n devices along the axis, N rows of each, D numbers of a row.

A row goes once to a device, however many of the experts there it has chosen,
and one sum comes back. Nothing is dropped: what arrives has room for all rows
of all devices, which is what a gather of them would take.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Dispatch:
  """Which rows go where, as one device sees it; the first of each [n, N].

  goes: bool, whether a row of its own goes to a device.
  rows: int32, the numbers of its rows, first those that go to the device.
  place: int32, where a row is among these.
  arrived: int32, the numbers that rows have where they come from, followed by
    those of rows that stay away.
  sent, received: [n] int32, numbers of rows to and from each device.
  """

  goes: jax.Array
  rows: jax.Array
  place: jax.Array
  arrived: jax.Array
  sent: jax.Array
  received: jax.Array
  axis: str = struct.field(pytree_node=False)
  exact: bool = struct.field(pytree_node=False)


def sort_by_key(number, kinds: int):
  """(order, number[order]) along the last axis, those alike as they were.

  By one key that holds the number and the place: a stable sort with places
  beside takes XLA for TPU three times as long to compile, and sorts thrice
  as much.

  Args:
    number: [..., M], integers from 0 to below `kinds`.
  """
  size = number.shape[-1]
  bits = (size - 1).bit_length()
  if (kinds - 1).bit_length() + bits > 32:
    order = jnp.argsort(number, axis=-1)
    return order, jnp.take_along_axis(number, order, axis=-1)
  keys = jax.lax.sort(number.astype(jnp.uint32) << bits | jnp.arange(size, dtype=jnp.uint32), is_stable=False)
  return (keys & (2**bits - 1)).astype(jnp.int32), (keys >> bits).astype(number.dtype)


def plan_dispatch(wanted, axis: str, exact: bool) -> Dispatch:
  """The trips of one device.

  Args:
    wanted: [n, N, n] bool, the same everywhere: whether a device's row goes to
      a device.
    exact: as of `exchange`.
  """
  me = jax.lax.axis_index(axis)
  first = lambda yes: sort_by_key(~yes, 2)[0]
  goes, comes, counts = wanted[me].T, wanted[..., me], jnp.sum(wanted, axis=1, dtype=jnp.int32)
  return Dispatch(
    goes,
    first(goes),
    jnp.maximum(jnp.cumsum(goes, axis=1) - 1, 0),
    first(comes),
    counts[me],
    counts[:, me],
    axis,
    exact,
  )


def dispatch_tokens(x, weights, chosen, each: int, exact: bool):
  """(`Trip`, [x, weights, chosen] of the rows that want experts here).

  Over the axis 'expert', each device with `each` experts: [N, D], [N, k] and
  [N, k] become [n N, ...]. Whatever is where no row has arrived counts for
  nothing, forward or backward: it chose no expert that is here.
  """
  weights, chosen = (jax.lax.all_gather(y, 'expert') for y in (weights, chosen))
  wanted = jnp.any(chosen[..., None] // each == jnp.arange(len(chosen)), axis=-2)
  trip = plan_dispatch(wanted, 'expert', exact)
  weights, chosen = (jnp.take_along_axis(y, trip.arrived[..., None], axis=1) for y in (weights, chosen))
  return trip, [y.reshape(-1, y.shape[-1]) for y in (dispatch(x, trip), weights, chosen)]


def exchange(x, sent, received, axis: str, exact: bool):
  """[n, N, D], part i for device i -> [n, N, D], part i from device i.

  Args:
    sent, received: [n], how many rows of each part are any.
    exact: only those travel; what else arrives is 0. XLA:CPU cannot do that:
      there all rows travel.
  """
  if not exact:
    return jax.lax.all_to_all(x, axis, 0, 0)
  n, rows, width = x.shape
  starts = jnp.arange(n, dtype=jnp.int32) * rows
  here = jnp.full((n,), jax.lax.axis_index(axis) * rows, jnp.int32)
  flat = x.reshape(-1, width)
  return jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), starts, sent, here, received, axis_name=axis).reshape(
    x.shape
  )


@jax.custom_vjp
def dispatch(x, trip: Dispatch):
  """[N, D] -> [n, N, D]: what arrives from each device, its rows first."""
  return exchange(x[trip.rows], trip.sent, trip.received, trip.axis, trip.exact)


@jax.custom_vjp
def combine(y, trip: Dispatch):
  """[n, N, D] of what arrived -> [N, D], the sums over where a row was.

  The transpose of `send`, and the other way round.
  """
  back = exchange(y, trip.received, trip.sent, trip.axis, trip.exact)
  back = jnp.take_along_axis(back, trip.place[..., None], axis=1)
  return jnp.sum(back, axis=0, where=trip.goes[..., None], dtype=jnp.float32).astype(y.dtype)


dispatch.defvjp(lambda x, trip: (dispatch(x, trip), trip), lambda trip, g: (combine(g, trip), None))
combine.defvjp(lambda y, trip: (combine(y, trip), trip), lambda trip, g: (dispatch(g, trip), None))
