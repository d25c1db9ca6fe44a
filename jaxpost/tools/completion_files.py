"""Completions of many prompts, into a file that a killed call can continue, or row by row."""

import dataclasses
import json
import os
import pathlib

import rich.console
import rich.text
from rich import progress

from jaxpost.errors import InputError
from jaxpost.rl import batching
from jaxpost.storage import array_cache, object_store
from jaxpost.tools.completions import Draws, complete, completion_rows, draw, engine_for, only, text_after
from jaxpost.tools.inference import Weights, to_stderr
from jaxpost.types import Rollout

_TOGETHER = 256  # sequences of a file between two writes


def complete_file(weights: Weights, prompts, out, draws: Draws, mesh='data=-1', source='') -> int:
  """Writes {**row, completions, completion_ids, logprobs} for each prompt.

  What `out` holds already stays, if it is of the same prompts and draws: the
  same call goes on where another was killed, and the file is that of a call
  that was not. `OUT.of.json` beside it says what it is of.

  Args:
    source: the weights, by name.

  Returns:
    How many prompts were left to do.
  """
  together = max(1, _TOGETHER // draws.n)
  done = _keep_finished_rows(
    out,
    dict(
      weights=[source, weights.step],
      draws=dataclasses.asdict(draws),
      prompts=array_cache.fingerprint([p.tokens.tolist() for p in prompts]),
    ),
    together,
    len(prompts),
  )
  if done == len(prompts):
    return 0
  engine = engine_for(weights, prompts, draws, mesh)
  tokenizer = weights.inputs.tokenizer
  bar = progress.Progress(
    *progress.Progress.get_default_columns(), progress.MofNCompleteColumn(), console=rich.console.Console(stderr=True)
  )
  with open(out, 'a', encoding='utf-8') as file, bar:
    task = bar.add_task('prompts', total=len(prompts), completed=done)
    for start in range(done, len(prompts), together):
      part = prompts[start : start + together]
      rows = _rows_of(draw(engine, part, draws), tokenizer)
      file.write(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))
      file.flush()
      bar.advance(task, len(part))
  return len(prompts) - done


def _rows_of(rollout: Rollout, tokenizer) -> list[dict]:
  """One row a prompt: its own columns, and the completions."""
  size = len(rollout.lengths) // len(rollout.prompts)
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
      rows[-1]['top_logprobs'] = [batching.top_logprobs(rollout, n)['top_logprobs'] for n in members]
  return rows


def _keep_finished_rows(out, about: dict, together: int, total: int) -> int:
  """How many rows of the file stay; the rest of it is cut off.

  Whole batches stay, as the number of sequences sampled together decides the
  last bits of their log-probs.
  """
  beside, about = pathlib.Path(f'{out}.of.json'), json.loads(json.dumps(about))
  out = pathlib.Path(out)
  if not out.exists():
    out.parent.mkdir(parents=True, exist_ok=True)
    object_store.write_text(beside, json.dumps(about))
    out.touch()
    return 0
  was = json.loads(beside.read_text()) if beside.exists() else {}
  for key, value in about.items():
    if was.get(key) != value:
      raise InputError(
        f'{out}: is there and of other {key} ({was.get(key, "unknown")}, now {value}); name another file, or remove it'
      )
  lines = out.read_bytes().splitlines(keepends=True)
  whole = sum(line.endswith(b'\n') for line in lines)
  kept = whole if whole == total else whole // together * together
  os.truncate(out, sum(map(len, lines[:kept])))
  return kept


def finish(each: dict[str, Weights], prompts, draws, mesh, out, source, show):
  """Completes prompts into the file `out`, or row by row to `show`.

  By each of the `inference.adapters`, whose names are in their rows.
  """
  if out:
    left = complete_file(only(each, '--out'), prompts, out, draws, mesh, source)
    to_stderr(f'{out}: {len(prompts)} rows, {left} of them new')
    return
  for name, weights in each.items():
    rollout = complete(weights, prompts, draws, mesh)
    for row in completion_rows(rollout, weights.inputs.tokenizer):
      show(row | ({'adapter': name} if name else {}))
    cut = int((~rollout.finished).sum())
    if cut:
      to_stderr(f'{cut} of {len(rollout.lengths)} cut at --max_new_tokens')
