"""The processes of a run gather, broadcast, agree and fail together.

Every process calls these functions from its main thread and in the same order. With one process they return at once;
`channel.py` has the exchange between several processes.
"""

import contextlib
import os
import types
from collections.abc import Iterable
from typing import Any

import jax
from jax._src import distributed  # the service has no public name


def process_count() -> int:
  """Number of processes of the run; touches no device."""
  return distributed.global_state.num_processes if distributed.global_state.client else 1


def process_index() -> int:
  """Index of this process; touches no device."""
  return distributed.global_state.process_id if distributed.global_state.client else 0


def owners(devices: Iterable[jax.Device]) -> list[int]:
  """Indices of the processes that have some of these devices, in order."""
  return sorted({d.process_index for d in devices})


def all_gather(value: Any) -> list:
  """The values of all processes, in their order; JSON values."""
  return [value] if process_count() == 1 else _channel().all_gather(value)


def broadcast(value: Any) -> Any:
  """The value of process 0, on all processes; a JSON value."""
  return all_gather(value if process_index() == 0 else None)[0]


def shard(items: range) -> range:
  """This process's share of `items`: every n-th, from its index on."""
  return items[process_index() :: process_count()]


def any_process(flag: bool) -> bool:
  """True on all processes if `flag` was set on any of them by now.

  Process 0 decides from the flags that have reached it; a later one counts in the next step.
  """
  return flag if process_count() == 1 else _channel().any_process(flag)


def fail_together() -> contextlib.AbstractContextManager[None]:
  """Around a run: when one process fails, all do, with the error of the first."""
  return contextlib.nullcontext() if process_count() == 1 else _channel().fail_together()


def leave(code: int, message: str) -> None:
  """Ends this process from any thread; the others of the run end with the same code and this message."""
  if process_count() > 1:
    _channel().leave(code, message)
  os._exit(code)


def _channel() -> types.ModuleType:
  from jaxpost.distributed import channel

  return channel
