"""Arrays that leave the devices while the policy samples (`config.rollout.offload`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax

from jaxpost.hardware import memory

if TYPE_CHECKING:
  from jaxpost.roles import Roles


def offloadable(roles: Roles) -> dict:
  """{id: array} of what no program reads while the policy samples.

  Optimizer states, the critic and the reference, without the arrays that these share with the policy. A reward model
  scores meanwhile and stays.
  """
  used = memory.distinct(roles.policy.params)
  trained = [(role.state, role.frozen) for role in roles.trainable.values()]
  found = memory.distinct(trained, roles.reference and roles.reference.params)
  return {key: x for key, x in found.items() if key not in used}


@contextlib.contextmanager
def offloaded(roles: Roles, timer: Callable = contextlib.nullcontext) -> Iterator[None]:
  """Keeps optimizer states, critic and reference in the memory of the host inside the block.

  Args:
    timer: phase -> context in which each of the two moves runs.
  """
  with timer('reshard'):
    _move(roles, 'pinned_host')
  yield
  with timer('reshard'):
    _move(roles, jax.local_devices()[0].default_memory().kind)


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
