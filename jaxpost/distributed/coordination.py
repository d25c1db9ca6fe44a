"""Gathers and broadcasts values between the processes of a run, and makes them stop and fail together.

All processes call these functions from their main threads, in the same order. With one process they return at once;
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
  """Returns the number of processes of the run, without using a device."""
  return distributed.global_state.num_processes if distributed.global_state.client else 1


def process_index() -> int:
  """Returns the index of this process, without using a device."""
  return distributed.global_state.process_id if distributed.global_state.client else 0


def owners(devices: Iterable[jax.Device]) -> list[int]:
  """Returns the sorted indices of the processes that these devices belong to."""
  return sorted({d.process_index for d in devices})


def all_gather(value: Any) -> list:
  """Returns the JSON values of all processes, in the order of the processes."""
  return [value] if process_count() == 1 else _channel().all_gather(value)


def broadcast(value: Any) -> Any:
  """Returns the JSON value of process 0 on all processes."""
  return all_gather(value if process_index() == 0 else None)[0]


def shard(items: range) -> range:
  """Returns this process's share of `items`: of n processes, every n-th item from its index on."""
  return items[process_index() :: process_count()]


def any_process(flag: bool) -> bool:
  """Returns the same on all processes: True if `flag` is set on one of them and has reached process 0 by now."""
  return flag if process_count() == 1 else _channel().any_process(flag)


def fail_together() -> contextlib.AbstractContextManager[None]:
  """Returns a context for a run: if one process fails, all do, with the error of the first."""
  return contextlib.nullcontext() if process_count() == 1 else _channel().fail_together()


def leave(code: int, message: str) -> None:
  """Ends this process from any thread; the other processes of the run end with the same code and message."""
  if process_count() > 1:
    _channel().leave(code, message)
  os._exit(code)


def _channel() -> types.ModuleType:
  from jaxpost.distributed import channel

  return channel
