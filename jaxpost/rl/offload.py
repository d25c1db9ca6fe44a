"""Moves arrays from the devices to the host while the policy samples (`config.rollout.offload`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax

from jaxpost.hardware import memory

if TYPE_CHECKING:
  from jaxpost.roles import Roles


def offloadable(roles: Roles) -> dict:
  """Returns {id: array} of the arrays that no program reads while the policy samples.

  These are optimizer states, the critic and the reference, except arrays that they share with the policy. A reward
  model scores meanwhile and stays.
  """
  used = memory.distinct(roles.policy.params)
  trained = [(role.state, role.frozen) for role in roles.trainable.values()]
  arrays = memory.distinct(trained, roles.reference and roles.reference.params)
  return {key: x for key, x in arrays.items() if key not in used}


@contextlib.contextmanager
def offloaded(roles: Roles, timer: Callable = contextlib.nullcontext) -> Iterator[None]:
  """Keeps optimizer states, critic and reference in the memory of the host inside the block.

  Args:
    timer: phase -> context in which each of the two moves runs.
  """
  # A process without training devices has no local device in their mesh.
  device_memory = jax.local_devices()[0].default_memory().kind
  with timer('reshard'):
    _move(roles, 'pinned_host')
  yield
  with timer('reshard'):
    _move(roles, device_memory)


def _move(roles: Roles, memory_kind: str) -> None:
  arrays = offloadable(roles)
  shardings = [x.sharding.with_memory_kind(memory_kind) for x in arrays.values()]
  moved = dict(zip(arrays, jax.device_put(list(arrays.values()), shardings)))

  def replace(tree):
    return jax.tree.map(lambda x: moved.get(id(x), x), tree)

  for role in roles.trainable.values():
    role.state = replace(role.state)
    role.frozen = replace(role.frozen)
  if roles.reference:
    roles.reference.params = replace(roles.reference.params)
