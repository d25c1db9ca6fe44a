"""Completes many prompts, into a file that a repeated call continues, or row by row."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import rich.console
import rich.text
from rich import progress

from jaxpost.errors import InputError
from jaxpost.programs import reported
from jaxpost.rewards.pool import check_json
from jaxpost.stage import weight_sources
from jaxpost.storage import object_store, seals
from jaxpost.tools.completions import Draws, complete, completion_rows, draw, engine_for, only, text_after
from jaxpost.tools.inference import Weights, to_stderr
from jaxpost.tools.working import working
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer

_TOGETHER = 256  # sequences between two writes to the file
_LATER = ('min_p', 'min_new_tokens', 'stop_strings')  # fields of `Draws` that files of earlier versions lack
_HINT = 'completions are written with the columns of their prompts: make it text, numbers, lists or dicts, or drop it'


def complete_file(
  weights: Weights,
  prompts: Sequence[Prompt],
  out: str | os.PathLike[str],
  draws: Draws,
  mesh: str = 'data=-1',
  source: str = '',
) -> int:
  """Writes {**row, completions, completion_ids, logprobs} for each prompt.

  Rows that `out` already has are kept if they are of the same weights, prompts and draws: a call continues where the
  same call was killed, with the same result as a single call. `OUT.of.json` identifies the weights, draws and prompts.

  Args:
    out: the .jsonl file.
    mesh: as config.mesh.rollout.
    source: name of the weights.

  Returns:
    The number of prompts that this call completed.

  Raises:
    InputError: `out` is of other weights, prompts or draws, or JSON cannot represent a column of the prompts.
  """
  _check_columns(prompts)
  batch_prompts = max(1, _TOGETHER // draws.n)
  policy = weights.inputs.sources['policy']
  content = seals.fingerprint(weight_sources.identity(policy, None, 0, here=False))
  identity = dict(
    weights=[source, weights.inputs.name, str(policy.folder or policy.checkpoints or ''), weights.step, content],
    draws={k: v for k, v in dataclasses.asdict(draws).items() if v or k not in _LATER},
    prompts=seals.fingerprint([[p.tokens.tolist(), p.columns] for p in prompts]),
  )
  finished = _keep_finished_rows(out, identity, batch_prompts, len(prompts))
  if finished == len(prompts):
    return 0
  with working('preparing to sample'):
    engine = engine_for(weights, prompts, draws, mesh)
  tokenizer = weights.inputs.tokenizer
  bar, completed = _bar(), finished

  def progress_text() -> str:
    return f'sampling: {completed} of {len(prompts)} prompts are done'

  with open(out, 'a', encoding='utf-8') as file, bar, working.following(progress_text):
    task = bar.add_task('prompts', total=len(prompts), completed=finished)
    for start in range(finished, len(prompts), batch_prompts):
      part = prompts[start : start + batch_prompts]
      rows = _rows_of(draw(engine, part, draws), tokenizer)
      file.write(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))
      file.flush()
      bar.advance(task, len(part))
      completed += len(part)
  return len(prompts) - finished


def _check_columns(prompts: Sequence[Prompt]) -> None:
  """Raises InputError for a column that cannot be written as JSON."""
  for prompt in prompts:
    for column, value in prompt.columns.items():
      check_json(column, value, f'prompt {prompt.index}', _HINT)


def _bar() -> progress.Progress:
  """Returns a progress bar on stderr that ends with the program that is being compiled."""
  columns = *progress.Progress.get_default_columns(), progress.MofNCompleteColumn(), _Line()
  return progress.Progress(*columns, console=rich.console.Console(stderr=True))


class _Line(progress.ProgressColumn):
  """Shows the program that is being compiled, at the end of the bar."""

  def render(self, task: progress.Task) -> rich.text.Text:
    return rich.text.Text('' if task.finished else working.text())


def _rows_of(rollout: Rollout, tokenizer: Tokenizer) -> list[dict]:
  """Returns one row per prompt: its columns and its completions."""
  size = rollout.group_size
  rows = []
  for i, prompt in enumerate(rollout.prompts):
    members = range(i * size, (i + 1) * size)
    ids = [rollout.completions[n, : rollout.lengths[n]].tolist() for n in members]
    rows.append(
      {
        **prompt.columns,
        'completions': [text_after(tokenizer, prompt.tokens, x) for x in ids],
        'completion_ids': ids,
        'logprobs': [[round(float(x), 6) for x in rollout.logprobs[n, : rollout.lengths[n]]] for n in members],
      }
    )
    if rollout.top_ids is not None:
      rows[-1]['top_logprobs'] = [reported.pairs(rollout, n) for n in members]
  return rows


def _keep_finished_rows(out: str | os.PathLike[str], identity: dict, batch_prompts: int, total: int) -> int:
  """Truncates the file after its last whole batch; returns the number of rows that are kept.

  Only whole batches are kept, because the number of sequences that are sampled together affects the last bits of their
  log-probs.

  Raises:
    InputError: the file is of other weights, prompts or draws.
  """
  identity_file = pathlib.Path(f'{out}.of.json')
  identity = json.loads(json.dumps(identity))  # tuples become lists, as in the file
  out = pathlib.Path(out)
  if not out.exists():
    out.parent.mkdir(parents=True, exist_ok=True)
    object_store.write_text(identity_file, json.dumps(identity))
    out.touch()
    return 0
  earlier = json.loads(identity_file.read_text()) if identity_file.exists() else {}
  for key, value in identity.items():
    if earlier.get(key) != value:
      raise InputError(
        f'{out}: exists, with other {key} ({earlier.get(key, "unknown")}, now {value}); name another file, or remove it'
      )
  lines = out.read_bytes().splitlines(keepends=True)
  whole_lines = sum(line.endswith(b'\n') for line in lines)
  kept = whole_lines if whole_lines == total else whole_lines // batch_prompts * batch_prompts
  os.truncate(out, sum(map(len, lines[:kept])))
  return kept


def complete_all(
  each: dict[str, Weights],
  prompts: Sequence[Prompt],
  draws: Draws,
  mesh: str,
  out: str,
  source: str,
  show: Callable[[dict], None],
) -> None:
  """Completes prompts into the file `out`, or passes them row by row to `show`.

  Args:
    each: {name: weights} of `inference.adapters`; a row has the name of its adapter.
    prompts, draws, mesh, out, source: as in `complete_file`; out: '' calls `show`.
    show: gets the rows of `completions.completion_rows`.
  """
  if out:
    new = complete_file(only(each, '--out'), prompts, out, draws, mesh, source=source)
    to_stderr(f'{out}: {len(prompts)} row{"s" if len(prompts) > 1 else ""}, {new} new')
    return
  for name, weights in each.items():
    rollout = complete(weights, prompts, draws, mesh)
    for row in completion_rows(rollout, weights.inputs.tokenizer):
      show(row | ({'adapter': name} if name else {}))
    cut = int((~rollout.finished).sum())
    if cut:
      to_stderr(f'{cut} of {len(rollout.lengths)} cut at --max_new_tokens')
