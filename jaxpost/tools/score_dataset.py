"""Scores a model on a data file with any reward function: pass@k, majority vote, mean reward.

Legend: N prompts, K samples per prompt.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpost.data import sources
from jaxpost.errors import InputError
from jaxpost.monitor.metrics import read_growing
from jaxpost.rewards import builtin, math
from jaxpost.rewards.groups import Graded, Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.rl.reward_metrics import reward_table, verdict_table
from jaxpost.stage import checks
from jaxpost.stage.evaluate import pass_metrics
from jaxpost.storage import object_store
from jaxpost.tools import completion_files, completions
from jaxpost.tools.completions import Draws
from jaxpost.tools.working import working

if TYPE_CHECKING:
  from jaxpost.stage.records import Inputs
  from jaxpost.tools.inference import Weights
  from jaxpost.types import Prompt


class Grading(NamedTuple):
  """How samples are judged.

  pass_reward: smallest value of `correct_by` with which a sample passes. correct_by: name of the reward that decides
  what is correct; '': the first. reward_weights: of each reward in the sum; (): 1 each.
  """

  pass_reward: float = 1.0
  correct_by: str = ''
  reward_weights: tuple[float, ...] = ()


_TOGETHER = 512  # groups that are graded at the same time
# Columns of known data sets -> the function that makes prompts from them.
_MAPS = {('question', 'answer'): 'jaxpost.data.maps:gsm8k', ('problem', 'answer'): 'jaxpost.data.maps:math'}


def read(path: str, columns: str = '', map_fn: str = '', size: int = 0) -> sources.Rows:
  """Returns the rows of a data file, or the first `size` of them; GSM8K and MATH are recognized by their columns."""
  if not map_fn:
    row = completions.read_whole(path, columns)[0]
    map_fn = next((fn for names, fn in _MAPS.items() if set(names) <= set(row) and 'prompt' not in row), '')
    if map_fn:
      column = 'question' if 'question' in row else 'problem'
      print(
        f'{path}: read by {map_fn}, which adds instructions to the questions; --columns=prompt={column} does not',
        file=sys.stderr,
      )
  rows = completions.read_whole(path, columns, map_fn)
  return rows[:size] if size else rows


def measure(
  weights: Weights,
  rows: sources.Rows,
  rewards: str,
  out: str,
  draws: Draws,
  *,
  grading: Grading,
  mesh: str = 'data=-1',
  source: str = '',
  workers: int = 2,
  timeout_s: float = 30.0,
) -> dict[str, Any]:
  """Samples completions, grades them and returns figures; a second call continues the file of the first.

  Args:
    rows: of `read`.
    rewards: as config.reward: a name, pkg.module:fn or ./file.py:fn, or several with commas.
    out: folder of completions.jsonl and graded.jsonl; '' keeps neither.
    draws: how to sample; draws.n is K.
    mesh: as config.mesh.rollout.
    source: name of the weights.
    workers: processes that run the reward functions.
    timeout_s: seconds for a group of samples.

  Returns:
    pass@k and maj@k by `correct_by`, pass@k/NAME by each reward, and 'frac_reward_differs', the share of prompts whose
    K samples differ in the weighted sum of rewards: group-relative methods learn from these prompts only.
  """
  prompts = completions.prompts_of(weights, rows)
  pool = RewardPool(names_of(rewards), weights=grading.reward_weights, workers=workers, timeout_s=timeout_s)
  with tempfile.TemporaryDirectory() as scratch, pool:
    folder = pathlib.Path(out or scratch)
    correct_by = builtin.pick(pool.names, grading.correct_by, '--correct_by')
    names = [k for k in prompts[0].columns if k != 'prompt']
    with working('starting the reward functions'):
      pool.check(['prompt', *names])  # before anything is sampled
    completion_files.complete_file(weights, prompts, folder / 'completions.jsonl', draws, mesh, source=source)
    rows_done = read_growing(folder / 'completions.jsonl')
    graded = []
    groups = [_group(prompt, row) for prompt, row in zip(prompts, rows_done, strict=True)]
    with working(f'grading the completions of {len(groups)} prompts'):
      for start in range(0, len(groups), _TOGETHER):
        graded += pool.grade(groups[start : start + _TOGETHER])
    lines = [json.dumps(dict(rewards=g.rewards, components=g.components, error=g.error)) + '\n' for g in graded]
    object_store.write_text(folder / 'graded.jsonl', ''.join(lines))
  return summary(rows_done, graded, weights.inputs.tokenizer.stop_ids, grading.pass_reward, correct_by)


def names_of(rewards: str) -> tuple[str, ...]:
  """Returns the rewards that --reward lists."""
  return tuple(spec.strip() for spec in rewards.split(',') if spec.strip())


def as_in_run(
  inputs: Inputs, rewards: str, draws: Draws, grading: Grading, given: Collection[str]
) -> tuple[Draws, Grading]:
  """Returns how a stage of a run samples and grades its evaluation, except for the fields that are `given`.

  A stage that does not sample has no values for samples. Weights and `correct_by` are those of the run only if all
  `rewards` are among its own.
  """
  config = inputs.config
  rollout, weight_of = config.rollout, dict(zip(config.rewards_tuple(), config.reward_weights))
  of_draws: dict[str, Any] = {}
  of_grading: dict[str, Any] = {}
  if checks.samples(config, inputs.algorithm):
    fields = ('max_new_tokens', 'top_k', 'top_p', 'min_p', 'min_new_tokens', 'stop_strings')
    of_draws = {name: getattr(rollout, name) for name in fields} | {'temperature': config.eval.temperature}
    of_draws['n'] = config.eval.samples or 1
    of_grading['pass_reward'] = config.eval.pass_reward
  names = names_of(rewards)
  if {*names} <= {*config.rewards_tuple()}:
    of_grading['reward_weights'] = tuple(weight_of[name] for name in names) if weight_of else ()
    if config.rl.correct_by in builtin.short_names(names):
      of_grading['correct_by'] = config.rl.correct_by

  def left_open(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in given}

  return dataclasses.replace(draws, **left_open(of_draws)), grading._replace(**left_open(of_grading))


def described(draws: Draws, grading: Grading) -> str:
  """Returns the values that are not off, as NAME=VALUE with commas."""
  values = dataclasses.asdict(draws) | grading._asdict()
  return ', '.join(f'{k}={v}' for k, v in values.items() if v or k in ('seed', 'temperature', 'pass_reward'))


def _group(prompt: Prompt, row: dict) -> Group:
  """Returns the completions of a prompt in the form that reward functions take."""
  texts = row['completions']
  size = len(texts)
  if not isinstance(prompt.prompt, str):
    texts = [[{'role': 'assistant', 'content': text}] for text in texts]
  return Group(
    [prompt.prompt] * size,
    texts,
    row['completion_ids'],
    {k: [v] * size for k, v in prompt.columns.items() if k != 'prompt'},
  )


def summary(
  rows: Sequence[dict], graded: list[Graded], stop_ids: Sequence[int], pass_reward: float = 1.0, correct_by: str = ''
) -> dict[str, Any]:
  """Returns the figures of N graded rows; prompts with a sample that could not be graded are left out.

  Args:
    pass_reward, correct_by: as in `measure`; here '' is the sum of rewards.

  Raises:
    InputError: no prompt was graded.
  """
  table = reward_table(graded)
  values = verdict_table(graded, table, correct_by)
  is_graded = np.isfinite(values).all(axis=1)
  if not is_graded.any():
    errors = [g.error for g in graded if g.error]
    raise InputError(
      '--reward: no prompt could be graded' + (f'; {errors[0]}' if errors else ': each has a sample without reward')
    )
  all_ids = [ids for row in rows for ids in row['completion_ids']]
  ended = [bool(ids) and ids[-1] in stop_ids for ids in all_ids]
  k = table.shape[1]
  passed = values[is_graded] >= pass_reward
  votes = [majority(row['completions'], p) for row, p in zip(itertools.compress(rows, is_graded), passed)]
  return {
    **pass_metrics(graded, values, pass_reward),
    f'maj@{k}': float(np.mean(votes)),
    'count': len(rows),
    'reward': float(table[is_graded].mean()),
    'frac_reward_differs': float((np.ptp(table[is_graded], axis=1) > 0).mean()),
    'completions/mean_length': float(np.mean([len(ids) for ids in all_ids])),
    'completions/clipped_ratio': 1 - float(np.mean(ended)),
  }


def majority(texts: Sequence[str], passed: Sequence[bool] | np.ndarray) -> float:
  """Returns 1 if the most frequent answer passes, else 0; the mean over a tie.

  Self-consistency (Wang et al. 2022, arXiv:2203.11171).
  """
  answers = [math.answer_of(text) for text in texts]
  counts = collections.Counter(answers)
  votes = max(counts.values())
  representatives = [answers.index(a) for a, n in counts.items() if n == votes]
  return float(np.mean([passed[i] for i in representatives]))
