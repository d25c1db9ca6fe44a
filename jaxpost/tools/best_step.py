"""The checkpoint of a stage that is best by the metric of `config.save.keep_best`."""

from __future__ import annotations

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
  step = manifest.best(folder, save.keep_best, save.best_mode)
  if step is None:
    raise InputError(f'--step=best: {folder}: no checkpoint was evaluated by {save.keep_best}; name a step')
  return step


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
