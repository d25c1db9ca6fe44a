"""The parts of a stage for a custom training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rich.console
from etils import epath

from jaxpost import imports, stages
from jaxpost.errors import InputError
from jaxpost.stage import assemble, place, prepare
from jaxpost.stage import config as config_lib
from jaxpost.stage.assemble import DataStream

if TYPE_CHECKING:
  from jaxpost.rl.controller import Controller
  from jaxpost.roles import Policy


def policy_and_stream(config: Any, choose_mesh: Callable | None = None) -> tuple[Policy, DataStream | Controller]:
  """Returns the policy and the stream of a run with one stage, for a custom loop.

  `policy.update(next(stream).updates[0][1])` is a step. For on-policy algorithms, the stream is a `Controller`, with
  `sampler`, `prompts`, `pool` and so on. Nothing is written; `stream.close()` ends workers and threads.
  """
  imports.forget_edited_files()
  raw = stages.with_dtype(prepare.as_dict(config), epath.Path(''), rich.console.Console())
  names = list(config_lib.parse(raw))
  if len(names) > 1:
    raise InputError(f'config.stages: {", ".join(names)} are several; a custom loop drives one')
  (prepared,) = stages.with_meshes(prepare.prepare_all(raw), choose_mesh)
  placed = place.place_stage(prepared)
  roles, stream, _ = assemble.make_parts(placed, stages.initial_params(placed, None))
  return roles.policy, stream
