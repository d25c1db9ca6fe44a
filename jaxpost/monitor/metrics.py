"""Metrics of a run: metrics.jsonl, TensorBoard, trackers, console, warnings.

metrics.jsonl has one row per step and split, {'stage', 'split', 'step', key: number}; numbers that are not finite are
null and named in 'nonfinite'. Only `time/*`, `*_per_s` and `mfu` depend on the clock, and `memory/*` on the machine;
all other values of two equal runs are equal byte by byte. Imports no JAX.
"""

import contextlib
import datetime
import io
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
from etils import epath
from rich import progress, table

from jaxpost.errors import InputError
from jaxpost.monitor.alerts import Alerts, nonfinite
from jaxpost.storage import object_store, seals

ROW_KEYS = ('stage', 'split', 'step', 'nonfinite')
# Phases of a step, in order. Other `time/*` keys are not parts of it: pauses within a phase, skew, busy devices.
PHASES = ('data', 'reshard', 'wait', 'sample', 'pack', 'reward', 'score', 'update', 'eval')
# Metrics that the console shows if a row has them: key -> label.
SHOWN = {
  'loss': 'loss',
  'reward': 'reward',
  'pass@1': 'pass@1',
  'rewards/accuracies': 'acc',
  'rewards/margins': 'margin',
  'logps/chosen': 'logp chosen',
  'logps/rejected': 'logp rejected',
  'mean_token_accuracy': 'acc',
  'kl': 'kl',
  'entropy': 'ent',
  'critic/explained_variance': 'critic explains',
  'completions/mean_length': 'len',
  'tools/failure_frequency': 'failed calls',
  'tools/malformed': 'unreadable calls',
  'tokens_per_s': 'tok/s',
  'time/step': 's/step',
}


def is_clock_key(key: str) -> bool:
  """Returns whether values of this key depend on the clock or the machine."""
  return key.startswith(('time/', 'memory/')) or key.endswith('_per_s') or key == 'mfu'


def plain(value: Any) -> Any:
  """Returns the value for JSON: arrays as lists, non-finite numbers as None."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if isinstance(value, (np.ndarray, np.generic)):
    return plain(value.tolist())
  return None if value != value or value in (math.inf, -math.inf) else value


def read_rows(path: epath.PathLike) -> list[dict]:
  """Returns the rows of a metrics.jsonl; an incomplete last line (kill -9) is left out."""
  return read_growing(path, 'a row of metrics', keys=('stage', 'split', 'step'))


def read_growing(path: epath.PathLike, what: str = 'JSON', keys: Sequence[str] = ()) -> list[dict]:
  """Returns the objects of a .jsonl, all with these keys, without an incomplete last line."""
  path, rows = epath.Path(path), []
  text = path.read_bytes().decode('utf-8', 'replace') if path.exists() else ''
  lines = text.rstrip('\0\r\n ').split('\n')
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      for key in keys:
        row[key]
      rows.append(row)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
      if number < len(lines):
        raise InputError(f'{path}:{number}: not {what}; remove the line or move the file away') from e
  return rows


def sample_files(folder: epath.Path) -> dict[int, epath.Path]:
  """Returns {step: path} of the files samples/STAGE/STEP.jsonl in a stage's folder, in order of steps."""
  files = {int(path.stem): path for path in folder.glob('*.jsonl') if path.stem.isdecimal()}
  return dict(sorted(files.items()))


def comparable_rows(path: epath.PathLike) -> list[dict]:
  """Returns rows without values that depend on the clock or machine: equal for equal runs."""
  return [{k: v for k, v in row.items() if not is_clock_key(k)} for row in read_rows(path)]


def short_number(x: float | None, small_digits: int = 2) -> str:
  """Returns a number as text with four digits (`small_digits` below 0.001): 0.1235, 12.35k, 1.2e-06."""
  if x is None or not math.isfinite(x):
    return str(x)
  x = float(f'{x:.4g}') if abs(x) >= 1e-3 else x  # 9999.7 is 10k
  for unit, name in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if abs(x) >= (1e4 if name == 'k' else unit):
      return f'{x / unit:.4g}{name}'
  return f'{x:.{4 if x == 0 or abs(x) >= 1e-3 else small_digits}g}'


class _Board:
  """The console: a bar per stage on a terminal, plain lines elsewhere."""

  def __init__(self, console: rich.console.Console, every: int):
    self._console, self._every, self._bar = console, every, None
    if console.is_terminal and not console.is_dumb_terminal:
      self._bar = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn('[bold]{task.description}'),
        progress.BarColumn(bar_width=16),
        progress.MofNCompleteColumn(),
        progress.TextColumn('{task.fields[eta]}', style='cyan'),
        progress.TextColumn('{task.fields[shown]}', markup=False, table_column=table.Column(no_wrap=True, ratio=1)),
        console=console,
        refresh_per_second=2,
        expand=True,
      )

  def start(self, stage: str, total: int, done: int) -> None:
    self._stage, self._total, self._next, self._due = stage, total, 0, 0.0
    self._first_row: tuple[float, int] | None = None  # its time and step
    self._unprinted: list[Mapping[str, Any]] = []  # rows since the last line
    if self._bar is not None:
      self._bar.start()
      self._task = self._bar.add_task(stage, total=total, completed=done, eta='', shown='')

  def _eta(self, step: int) -> str:
    """Returns the remaining time as text, from the second row on, because the first one compiles."""
    start, first = self._first_row = self._first_row or (time.monotonic(), step)
    step_seconds = (time.monotonic() - start) / max(1, step - first)
    remaining = datetime.timedelta(seconds=round(step_seconds * abs(self._total - step)))
    return '' if step in (first, self._total) else f'left {remaining}'

  def row(self, step: int, split: str, values: Mapping[str, Any]) -> None:
    names = SHOWN
    if split != 'train':
      from jaxpost.monitor import display

      others = [k for k in values if not is_clock_key(k) and k not in SHOWN and not display.says_nothing_new(k, values)]
      names = SHOWN | {k: display.title(k).lower() for k in others}
    elif self._bar is None:
      self._unprinted.append(values)
      if step < min(self._next, self._total) and time.monotonic() + values.get('time/step', 0) <= self._due:
        return
      self._next, self._due = step + self._every, time.monotonic() + 4.5  # or a row would come too late
      values = {**values, **self._speed()}
    keys = [key for key in names if key in values and (values[key] or not key.startswith('tools/'))]
    shown = '  '.join(f'{names[key]} {short_number(values[key])}' for key in keys)
    if split != 'train':
      self.line(f'{self._stage} {step} {split}  {shown}', 'bold')
    elif self._bar is not None:
      self._bar.update(self._task, completed=step, eta=self._eta(step), shown=shown)
    else:
      self.line(f'{self._stage} {step}/{self._total}  {shown}  {self._eta(step)}'.rstrip())

  def _speed(self) -> dict[str, float]:
    """Returns the speed of the steps since the last line."""
    tokens, seconds = (sum(row.get(key, 0) for row in self._unprinted) for key in ('tokens', 'time/step'))
    steps, self._unprinted = len(self._unprinted), []
    return {'tokens_per_s': tokens / seconds, 'time/step': seconds / steps} if seconds else {}

  def line(self, text: str, style: str | None = None) -> None:
    self._console.out(text, style=style, highlight=False)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()


class MetricsWriter(contextlib.AbstractContextManager):
  """Writes the rows of a run on the first process; does nothing on others.

  A context manager: bar and files are closed on any exception. A row must be written before the checkpoint of its step
  is final, because a run that resumes from it would lack the row.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    tensorboard: bool = True,
    trackers: Callable[[epath.Path], Any] | None = None,
    primary: bool = True,
    console: rich.console.Console | None = None,
    print_every: int = 10,
    stages: Sequence[str] = (),
  ):
    """trackers: starts those of the run, see `trackers.Trackers`. stages: names of its stages, in order."""
    self.workdir = epath.Path(workdir)
    self.path = self.workdir / 'metrics.jsonl'
    # An object store cannot append: growing files are kept here and uploaded.
    self._remote, self._board_dir = None, self.workdir
    if object_store.is_remote(self.path):
      from jaxpost.storage import remote

      self._remote, self._board_dir = remote, remote.folder()
    self._primary, self._tensorboard, self._stages = primary, tensorboard, [*stages]
    self.alerts, self._stage = Alerts(), ''
    self._noted: set[tuple[str, str]] = set()  # (stage, beginning of a note)
    self._file: Any = None  # a text file; on an object store an io.StringIO
    self._tb: Any = None
    if not primary:
      return
    self.workdir.mkdir(parents=True, exist_ok=True)
    self._board = _Board(console or rich.console.Console(), print_every)
    self._trackers = trackers(self.workdir) if trackers is not None else None

  def __exit__(self, *_):
    self.close()

  def note(self, text: str) -> None:
    """Prints a note once per stage, on something that no metric shows."""
    if self._primary and (self._stage, text[:40]) not in self._noted:
      self._noted.add((self._stage, text[:40]))
      self._board.line(f'note: {text}')

  def start_stage(self, stage: str, total_steps: int, resume_step: int = 0, evaluated: bool = True) -> None:
    """Starts a stage; keeps rows of earlier ones, and its own up to resume_step > 0 (its evaluation if `evaluated`)."""
    is_first = not self._stage
    self._stage = stage
    if not self._primary:
      return
    self._close_stage()
    rows = read_rows(self.path)
    if seals.damaged(self.workdir, [self.path.name]):
      self._board.line(f'{self.path}: differs from its checksum: rows were damaged or changed since they were written')
    kept = self._drop_later(rows, resume_step, evaluated)
    for row in kept if is_first else ():  # restores levels and warnings of an earlier process
      if row['split'] == 'train':
        self.alerts.check(row['stage'], row['step'], row)
    self._board.start(stage, total_steps, resume_step)
    if resume_step:
      dropped = len(rows) - len(kept)
      later = f', and drops {dropped} later rows' if dropped else ''
      self._board.line(f'{stage} resumes after step {resume_step}{later}')
      resumed = {'stage': stage, 'step': resume_step, 'rows_dropped': dropped}
      object_store.add_line(self.workdir / 'resumes.jsonl', json.dumps(resumed))
    elif lost := max((row['step'] for row in rows if row['stage'] == stage and row['split'] == 'train'), default=0):
      self._board.line(f'{stage}: no checkpoint, so {lost} steps of an earlier start are discarded (config.save.every)')
    if self._tensorboard:
      self._start_tensorboard(resume_step)
    if self._trackers is not None:
      self._trackers.start_stage(stage)

  def _drop_later(self, rows: list[dict], resume_step: int, evaluated: bool) -> list[dict]:
    """Deletes rows and samples that will be written again, and opens metrics.jsonl; returns the rows that are kept."""
    names = self._stages or [*dict.fromkeys(row['stage'] for row in rows), self._stage]
    earlier = names[: names.index(self._stage)]
    last = (resume_step, evaluated)  # if the checkpoint lacks the metrics of an evaluation, the run makes it again

    def is_kept(stage: str, step: int, split: str) -> bool:
      return stage in earlier or (stage == self._stage and resume_step > 0 and (step, split == 'eval') <= last)

    kept = [row for row in rows if is_kept(row['stage'], row['step'], row['split'])]
    text = ''.join(json.dumps(row) + '\n' for row in kept)
    object_store.write_text(self.path, text)
    self._file = io.StringIO() if self._remote else open(self.path, 'a', 1)
    self._file.write(text if self._remote else '')
    self._size, self._crc = len(text.encode()), zlib.crc32(text.encode())
    seals.add_beginning(self.path, self._size, self._crc)
    for folder in self.workdir.glob('samples/*'):
      for step, file in sample_files(folder).items():
        if not is_kept(folder.name, step, 'train'):
          file.unlink()
    return kept

  def _start_tensorboard(self, resume_step: int) -> None:
    import tensorboardX  # takes half a second, so only if it is used

    folder = os.fspath(self._board_dir / 'tensorboard' / self._stage)
    try:
      self._tb = tensorboardX.SummaryWriter(folder, flush_secs=10, purge_step=resume_step and resume_step + 1)
    except OSError as error:
      if error.filename:
        raise
      # Its queue needs a system semaphore, which a container without a writable /dev/shm lacks.
      self._board.line(f'tensorboard: left out ({error.strerror}; is /dev/shm writable?); metrics.jsonl has it all')

  def write(self, step: int, split: str, values: Mapping[str, Any], error: str = '') -> None:
    """Writes one row to all sinks and checks train rows for warnings; `error` is one of the reward in this step."""
    if not self._primary:
      return
    values = {k: int(v) if isinstance(v, (int, np.integer)) else float(v) for k, v in values.items()}
    assert not set(ROW_KEYS) & set(values), f'{ROW_KEYS} are taken'
    row = {'stage': self._stage, 'split': split, 'step': int(step)}
    bad_keys = [k for k in nonfinite(values) if not is_clock_key(k)]
    row |= plain(values) | ({'nonfinite': bad_keys} if bad_keys else {})
    line = json.dumps(row) + '\n'
    self._file.write(line)
    self._size, self._crc = self._size + len(line.encode()), zlib.crc32(line.encode(), self._crc)
    if self._remote and step % 50 == 0:
      self.flush()
    tags = {f'{self._stage}/{split}/{k}': v for k, v in values.items() if math.isfinite(v)}
    if self._tb is not None:
      for tag, value in tags.items():
        self._tb.add_scalar(tag, value, step)
    if self._trackers is not None:
      self._trackers.log(self._stage, step, tags)
    self._board.row(step, split, values)
    if split != 'train':
      return
    for text in self.alerts.check(self._stage, step, values, error):
      self._board.line(f'warning: {self._stage} step {step}: {text}', 'yellow')
    is_relative = values.get('frac_reward_zero_std', 1) < 1 and 'critic/loss' not in values
    if is_relative and abs(values.get('loss', 1)) < 0.01:
      self.note('a loss near 0 is expected, as advantages of both signs cancel: watch reward and kl')

  def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Puts rows (prompt, completion, reward, ...) in the place of those of their split in samples/STAGE/STEP.jsonl."""
    if self._primary:
      name = f'samples/{self._stage}/{step}.jsonl'
      splits = {row.get('split') for row in rows}
      rows = [row for row in read_growing(self.workdir / name) if row.get('split') not in splits] + [*map(plain, rows)]
      object_store.write_text(self.workdir / name, ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))
      if self._tb is not None and rows:
        shown = json.dumps(rows[-8:], ensure_ascii=False, indent=1).replace('\\n', '\n')
        self._tb.add_text(f'{self._stage}/samples', '    ' + shown.replace('\n', '\n    '), step)
      if self._trackers is not None:
        self._trackers.samples(self._stage, step, rows, name)

  def flush(self) -> None:
    """Makes the rows so far durable against the end of this process and a loss of power."""
    if self._file is None:
      return
    if not self._remote:
      os.fsync(self._file.fileno())
    else:
      object_store.write_text(self.path, self._file.getvalue())
      if self._tb is not None:
        self._tb.flush()
        self._remote.upload(self._board_dir, self.workdir)
    seals.add_beginning(self.path, self._size, self._crc)

  def _close_stage(self) -> None:
    self.flush()
    for sink in filter(None, (self._file, self._tb)):
      sink.close()
    self._file = self._tb = None

  def close(self) -> None:
    """Closes the bar and the files; a second call does nothing."""
    if self._primary:
      self._board.close()
      self._close_stage()
      if self._trackers is not None:
        self._trackers.finish()
      self._trackers = None
