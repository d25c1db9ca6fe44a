"""The checkpoint of a stage that is best by the metric of `config.save.keep_best`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxpost.errors import InputError
from jaxpost.storage import manifest

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.stage.schema import SaveSection


def find(folder: epath.Path, save: SaveSection) -> int:
  """Returns the best of the finished steps below `folder`; the later one of equals.

  Raises:
    InputError: the run names no metric, or no step has it.
  """
  if not save.keep_best:
    raise InputError(f'--step=best: {folder}: the run has no config.save.keep_best to decide it; name a step')
  sign = 1 if save.best_mode == 'max' else -1
  values = {}
  for step in manifest.finished_steps(folder):
    try:
      metrics = manifest.read(folder, step).metrics
    except manifest.DamagedError:
      continue
    if math.isfinite(value := metrics.get(save.keep_best, math.nan)):
      values[step] = sign * value
  if not values:
    raise InputError(f'--step=best: {folder}: no checkpoint was evaluated by {save.keep_best}; name a step')
  return max(values, key=lambda step: (values[step], step))


def line(folder: epath.Path, save: SaveSection, step: int) -> str:
  """Returns a line that names the best step if `step` is another one; '' else, and if there is none."""
  try:
    best = find(folder, save)
  except InputError:
    return ''
  if best == step:
    return ''
  value = manifest.read(folder, best).metrics[save.keep_best]
  return (
    f'checkpoint: using step {step}, the newest; step {best} has the best {save.keep_best}, {value:.4g}: --step=best'
  )
