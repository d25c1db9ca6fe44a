"""How well a model does on a data file, by any reward function.

Legend: N prompts, K samples a prompt.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import tempfile
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.data import sources
from jaxpost.errors import InputError
from jaxpost.monitor.metrics import json_lines
from jaxpost.rewards import math
from jaxpost.rewards.groups import Graded, Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.stage.evaluate import pass_rates
from jaxpost.storage import object_store
from jaxpost.tools import completion_files, completions

if TYPE_CHECKING:
  from jaxpost.tools.inference import Weights

_TOGETHER = 512  # groups that are graded at a time
# Columns of known data sets -> the function that makes prompts of them.
_MAPS = {('question', 'answer'): 'jaxpost.data.maps:gsm8k', ('problem', 'answer'): 'jaxpost.data.maps:math'}


def read(path, columns='', map_fn='', size=0):
  """The rows of a data file; those of GSM8K and MATH are known by columns."""
  if not map_fn:
    row = sources.read(path, columns, streaming=False)[0]
    map_fn = next((fn for names, fn in _MAPS.items() if set(names) <= set(row) and 'prompt' not in row), '')
  rows = sources.read(path, columns, map_fn or None)
  return rows[:size] if size else rows


def measure(
  weights: Weights, rows, rewards, out, draws, *, mesh='data=-1', source='', pass_reward=1.0, workers=2, timeout_s=30.0
) -> dict:
  """Samples, grades and counts; a second call goes on with the first's file.

  Args:
    rows: of `read`.
    rewards: as config.reward: a name, pkg.module:fn or ./file.py:fn, or
      several with commas.
    out: folder of completions.jsonl and graded.jsonl; '' keeps neither.
    source: the weights, by name.

  Returns:
    pass@k and maj@k of what reaches `pass_reward`, and
    'frac_reward_differs': the share of prompts whose K samples differ in
    reward, which is what a method that compares them learns from.
  """
  if not out:
    with tempfile.TemporaryDirectory() as scratch:
      return measure(
        weights,
        rows,
        rewards,
        scratch,
        draws,
        mesh=mesh,
        source=source,
        pass_reward=pass_reward,
        workers=workers,
        timeout_s=timeout_s,
      )
  out, prompts = pathlib.Path(out), completions.prompts_of(weights, [rows])
  specs = tuple(r.strip() for r in rewards.split(',') if r.strip())
  with RewardPool(specs, workers=workers, timeout_s=timeout_s) as pool:
    names = [k for k in prompts[0].columns if k != 'prompt']
    pool.check(['prompt', *names])  # before anything is sampled
    completion_files.complete_file(weights, prompts, out / 'completions.jsonl', draws, mesh, source)
    done, graded = json_lines(out / 'completions.jsonl'), []
    groups = [_group(p, row) for p, row in zip(prompts, done, strict=True)]
    for start in range(0, len(groups), _TOGETHER):
      graded += pool.grade(groups[start : start + _TOGETHER])
  object_store.write_text(
    out / 'graded.jsonl',
    ''.join(json.dumps(dict(rewards=g.rewards, components=g.components, error=g.error)) + '\n' for g in graded),
  )
  return summary(done, graded, weights.inputs.tokenizer.stop_ids, pass_reward)


def _group(prompt, row) -> Group:
  """The completions of a prompt as reward functions take them."""
  texts, size = row['completions'], len(row['completions'])
  if not isinstance(prompt.prompt, str):
    texts = [[{'role': 'assistant', 'content': text}] for text in texts]
  return Group(
    [prompt.prompt] * size,
    texts,
    row['completion_ids'],
    {k: [v] * size for k, v in prompt.columns.items() if k != 'prompt'},
  )


def summary(rows, graded: list[Graded], stop_ids, pass_reward=1.0) -> dict:
  """The figures of N graded rows; prompts with a failed sample are left out."""
  table = np.array([[np.nan if r is None else r for r in g.rewards] for g in graded], np.float64)
  whole = np.isfinite(table).all(axis=1)
  if not whole.any():
    errors = [g.error for g in graded if g.error]
    raise InputError(
      '--reward: no prompt could be graded' + (f'; {errors[0]}' if errors else ': each has a sample without reward')
    )
  ids = [x for row in rows for x in row['completion_ids']]
  ended = [bool(x) and x[-1] in stop_ids for x in ids]
  passed, k = table[whole] >= pass_reward, table.shape[1]
  votes = [majority(row['completions'], p) for row, p in zip(itertools.compress(rows, whole), passed)]
  return {
    **pass_rates(passed),
    f'maj@{k}': float(np.mean(votes)),
    'count': len(rows),
    'ungraded_prompts': int((~whole).sum()),
    'reward': float(table[whole].mean()),
    'frac_reward_differs': float((np.ptp(table[whole], axis=1) > 0).mean()),
    'completions/mean_length': float(np.mean([len(x) for x in ids])),
    'completions/clipped_ratio': 1 - float(np.mean(ended)),
  }


def majority(texts, passed) -> float:
  """1 if the most frequent answer passes, else 0; the mean over a tie.

  Self-consistency (Wang et al. 2022, arXiv:2203.11171).
  """
  answers = [math.answer_of(text) for text in texts]
  counts = collections.Counter(answers)
  most = max(counts.values())
  first = [answers.index(a) for a, n in counts.items() if n == most]
  return float(np.mean([passed[i] for i in first]))
