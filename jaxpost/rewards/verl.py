"""Adapts reward functions written for verl.

  compute_score(data_source, solution_str, ground_truth, extra_info)

is called by keyword for each completion. It returns a number, or a dict whose 'score' is the reward and whose other
numbers are logged; it may be async.
"""

import asyncio
import inspect
import numbers
from collections.abc import Callable
from typing import Any

from jaxpost.rewards.format import text_of
from jaxpost.workers import call


def adapt(compute_score: Callable) -> Callable:
  """Returns a reward function that reads the columns of verl's data sets.

  They are `data_source`, `reward_model` ({'ground_truth': ...}) and, optionally, `extra_info`.
  """

  async def grade(completions, data_source, reward_model, extra_info=None, log_metric=None):
    extra_info = extra_info or [None] * len(completions)
    results = [
      compute_score(**_arguments(*row)) for row in zip(completions, data_source, reward_model, extra_info, strict=True)
    ]
    # All awaitables are started before the first one is awaited, so that they overlap.
    tasks = [asyncio.ensure_future(r) if inspect.isawaitable(r) else r for r in results]
    results = [await t if inspect.isawaitable(t) else t for t in tasks]
    return [_score(r, log_metric) for r in results]

  return grade


def _arguments(completion: str | list[dict], source: Any, model: Any, extra: Any) -> dict:
  if not isinstance(model, dict) or 'ground_truth' not in model:
    raise call.RewardError("the column 'reward_model' must be {'ground_truth': ...}, as in verl's data")
  return {
    'data_source': source,
    'solution_str': text_of(completion),
    'ground_truth': model['ground_truth'],
    'extra_info': {} if extra is None else extra,
  }


def _score(result: Any, log_metric: Callable | None) -> Any:
  """Returns the reward of a result and logs its other numbers."""
  if not isinstance(result, dict):
    return result
  if 'score' not in result:
    raise call.RewardError(f"returned a dict without 'score': {', '.join(map(str, result))}")
  for name, value in result.items():
    if name != 'score' and log_metric and isinstance(value, numbers.Real):
      log_metric(name, value)
  return result['score']
