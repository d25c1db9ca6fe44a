"""An index of the samples of a run: samples/STAGE/STEP.jsonl, found, filtered and read page by page.

Only the short fields of an episode are kept in memory; its texts are read from the file when
they are shown or searched. `refresh` reads files that are new or were written again, and forgets those
that a resume has removed, so that an index can follow a run that goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import metrics

_SHORT = 160  # characters of a prompt and a completion in a list
PAGE = 50
SORTS = ('trouble', 'newest', 'oldest', 'reward', '-reward', 'length', '-length')
ONLY = ('', 'failed', 'truncated', 'right', 'wrong')


@dataclasses.dataclass(frozen=True)
class Query:
  """Which episodes are asked for, in which order.

  only: '' for all; 'failed' have no reward; 'truncated' did not end; 'right' and 'wrong'
    have the highest reward of the run, or less.
  text: what prompt, completion or expected answer contain, in any case.
  prompt: key of a prompt, see `Index.episodes`.
  sort: 'trouble' has failed and truncated ones first, then the newest.
  """

  stage: str = ''
  split: str = ''
  step: int | None = None
  only: str = ''
  text: str = ''
  prompt: str = ''
  lowest: float | None = None
  highest: float | None = None
  sort: str = 'trouble'


class Index:
  """The episodes of a run, in the order of its files.

  Attributes:
    episodes: one dict each: id, stage, split, step, prompt (key), index and sample (place in
      its group), reward, length, finished, and the beginnings of prompt and completion.
  """

  def __init__(self, run: epath.PathLike):
    """Reads the samples of a run's folder.

    Raises:
      InputError: there is no such folder, or it is none of a run.
    """
    self.run = epath.Path(run).expanduser()
    if not self.run.is_dir():
      raise InputError(f'--run: {run}: no such folder')
    if not any((self.run / name).exists() for name in ('config.json', 'samples')):
      raise InputError(f'--run: {run}: not the folder of a run; name the folder that training was given as --workdir')
    self.episodes: list[dict[str, Any]] = []
    self._files: dict[str, tuple[int, int, list[int]]] = {}  # path -> (bytes, time, ids)
    self._refreshing = threading.Lock()  # requests of a page come in threads of their own
    self._places: list[tuple[str, int, int]] = []  # of an episode: file, begin and bytes of its line
    self.refresh()

  def refresh(self) -> bool:
    """Reads files that have changed and forgets those that are gone; returns whether there are any."""
    changed = False
    there = set()
    with self._refreshing:
      for folder in sorted(self.run.glob('samples/*')):
        for path in metrics.sample_files(folder).values():
          with contextlib.suppress(FileNotFoundError):  # removed after it was listed
            stat = path.stat()
            key = (int(stat.length), int(stat.mtime))
            if self._files.get(str(path), ())[:2] != key:
              changed = True
              self._forget(str(path))
              self._files[str(path)] = (*key, list(self._read(path)))
            there.add(str(path))
      for name in self._files.keys() - there:
        changed = True
        self._forget(name)
    return changed

  def _forget(self, name: str) -> None:
    """Marks the episodes of a file, if it is known, as gone."""
    for number in self._files.pop(name, (0, 0, []))[2]:
      self.episodes[number]['gone'] = True

  def _read(self, path: epath.Path) -> Iterator[int]:
    """Adds the episodes of a file and yields their ids; a torn last line is left out."""
    begin = 0
    for line in path.read_bytes().splitlines(keepends=True):
      place, begin = begin, begin + len(line)
      try:
        row = json.loads(line)
      except ValueError:
        continue  # still being written
      number = len(self.episodes)
      self._places.append((str(path), place, len(line)))
      self.episodes.append(_short(number, path.parent.name, int(path.stem), row))
      yield number

  def full(self, number: int) -> dict[str, Any]:
    """Returns an episode with its texts, as the run wrote it, and the fields of `episodes`.

    Raises:
      InputError: there is no such episode, or not any more.
    """
    if not 0 <= number < len(self.episodes):
      raise InputError(f'episode {number}: there are {len(self.episodes)}')
    try:
      return json.loads(self._line(number)) | {'short': self.episodes[number]}
    except ValueError:
      raise InputError(f'episode {number}: a resume of the run has removed it; load the page again') from None

  def _line(self, number: int) -> bytes:
    """The line of an episode; b'' if its file is not there any more or was written again."""
    path, begin, size = self._places[number]
    if 'gone' in self.episodes[number]:
      return b''
    try:
      with epath.Path(path).open('rb') as file:
        file.seek(begin)
        return file.read(size)
    except FileNotFoundError:  # since the last refresh
      return b''

  def find(self, query: Query) -> list[int]:
    """Returns the ids of the episodes that a query asks for, in its order."""
    if query.sort not in SORTS or query.only not in ONLY:
      raise InputError(f'sort: one of {", ".join(SORTS)}; only: one of {", ".join(ONLY[1:])}')
    best = max((e['reward'] for e in self.episodes if e['reward'] is not None), default=0.0)
    found = [e['id'] for e in self.episodes if _fits(e, query, best)]
    if query.text:
      found = self._with_text(found, query.text)
    return sorted(found, key=lambda number: _order(self.episodes[number], query.sort))

  def _with_text(self, numbers: Iterable[int], text: str) -> list[int]:
    wanted = json.dumps(text, ensure_ascii=False)[1:-1].casefold()  # as it stands in the files
    return [n for n in numbers if wanted in self._line(n).decode('utf-8', 'replace').casefold()]

  def group(self, number: int) -> list[int]:
    """Returns the ids of the samples of one prompt in one step, this one among them."""
    own = self.episodes[number]
    same = ('stage', 'split', 'step', 'prompt', 'index')
    return [e['id'] for e in self.episodes if 'gone' not in e and all(e[k] == own[k] for k in same)]

  def history(self, number: int) -> list[int]:
    """Returns the ids of all samples of the same prompt over training, oldest first."""
    own = self.episodes[number]
    return self.find(Query(stage=own['stage'], prompt=own['prompt'], sort='oldest'))

  def overview(self) -> dict[str, Any]:
    """Returns counts of the run: episodes, failed and truncated ones, and the steps of each stage."""
    alive = [e for e in self.episodes if 'gone' not in e]
    stages: dict[str, dict[str, Any]] = {}
    for e in alive:
      stage = stages.setdefault(e['stage'], {'steps': {}, 'splits': {}})
      stage['steps'][e['step']] = stage['splits'][e['split']] = True
    return dict(
      run=str(self.run),
      episodes=len(alive),
      failed=sum(e['reward'] is None for e in alive),
      truncated=sum(e['finished'] is False for e in alive),
      stages={name: {k: list(v) for k, v in stage.items()} for name, stage in stages.items()},
    )


def _short(number: int, stage: str, step: int, row: dict) -> dict[str, Any]:
  prompt = str(row.get('prompt') or '')
  reward = row.get('reward')
  return dict(
    id=number,
    stage=stage,
    split=row.get('split', 'train'),
    step=step,
    prompt=hashlib.blake2b(prompt.encode('utf-8', 'replace'), digest_size=6).hexdigest(),
    index=row.get('prompt_index'),
    sample=row.get('sample', 0),
    reward=reward if isinstance(reward, (int, float)) else None,
    length=row.get('length', 0),
    finished=row.get('finished'),
    asked=prompt[-_SHORT:],
    said=str(row.get('completion') or '')[:_SHORT],
  )


def _fits(e: dict, query: Query, best: float) -> bool:
  reward = e['reward']
  return (
    'gone' not in e
    and query.stage in ('', e['stage'])
    and query.split in ('', e['split'])
    and query.step in (None, e['step'])
    and query.prompt in ('', e['prompt'])
    and (query.lowest is None or reward is not None and reward >= query.lowest)
    and (query.highest is None or reward is not None and reward <= query.highest)
    and {
      '': True,
      'failed': reward is None,
      'truncated': e['finished'] is False,
      'right': reward is not None and reward >= best,
      'wrong': reward is not None and reward < best,
    }[query.only]
  )


def _order(e: dict, sort: str) -> tuple:
  place = (e['step'], e['index'] or 0, e['sample'])
  if sort == 'trouble':
    return (e['reward'] is not None, e['finished'] is not False, -e['step'], *place)
  if sort in ('newest', 'oldest'):
    return (-e['step'] if sort == 'newest' else e['step'], *place)
  value = e[sort.lstrip('-')]
  return (value is None, -(value or 0) if sort.startswith('-') else value or 0, *place)
