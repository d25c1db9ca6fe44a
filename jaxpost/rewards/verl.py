"""Reward functions written for verl, called as this library calls rewards.

  compute_score(data_source, solution_str, ground_truth, extra_info)

for one completion each, by name; it returns a number or a dict with 'score',
whose other numbers are logged. May be async.
"""

import asyncio
import inspect
import numbers

from jaxpost.rewards.format import text_of
from jaxpost.workers import call


def adapt(compute_score):
  """A reward function with the columns of verl's data sets.

  `data_source`, `reward_model` ({'ground_truth': ...}), `extra_info`.
  """

  async def graded(completions, data_source, reward_model, extra_info=None, log_metric=None):
    extra_info = extra_info or [None] * len(completions)
    results = [
      compute_score(**_arguments(*row)) for row in zip(completions, data_source, reward_model, extra_info, strict=True)
    ]
    tasks = [
      asyncio.ensure_future(r) if inspect.isawaitable(r) else r for r in results
    ]  # all under way before the first is awaited
    results = [await t if inspect.isawaitable(t) else t for t in tasks]
    return [_score(r, log_metric) for r in results]

  return graded


def _arguments(completion, source, model, extra):
  if not isinstance(model, dict) or 'ground_truth' not in model:
    raise call.RewardError("the column 'reward_model' must be {'ground_truth': ...}, as in verl's data")
  return {
    'data_source': source,
    'solution_str': text_of(completion),
    'ground_truth': model['ground_truth'],
    'extra_info': {} if extra is None else extra,
  }


def _score(result, log_metric):
  if not isinstance(result, dict):
    return result
  if 'score' not in result:
    raise call.RewardError(f"returned a dict without 'score': {', '.join(map(str, result))}")
  for name, value in result.items():
    if name != 'score' and log_metric and isinstance(value, numbers.Real):
      log_metric(name, value)
  return result['score']
