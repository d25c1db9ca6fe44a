"""An index of the samples of a run (samples/STAGE/STEP.jsonl), which are filtered, sorted and read page by page.

Only short fields of an episode are kept in memory; its texts are read from the file when they are shown or searched.
`refresh` reads new and changed files and forgets removed ones, so an index can follow a run in progress. A text search
reads each file once and parses few lines. Answers to the last few queries are cached, so their next pages cost nothing.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import metrics

_SHORT = 160  # characters of a prompt and a completion in a list
_CACHED = 16  # queries whose answers are cached; 0.8 MB each if they find 100,000 episodes
_ASCII = bytes(range(128))
_TEXTS = (b'prompt', b'completion', b'expected', b'error')
_ESCAPED = re.compile(rb'\\u(?!00[01])[\da-fA-F]{4}')  # a character that is no control character
PAGE = 50
SORTS = ('trouble', 'newest', 'oldest', 'reward', '-reward', 'length', '-length')
ONLY = ('', 'failed', 'truncated', 'right', 'wrong')


@dataclasses.dataclass(frozen=True)
class Query:
  """The episodes to find, and their order.

  only: '' for all; 'failed' without a reward; 'truncated' without an end; 'right' and 'wrong' with the highest reward
    of the run, or a lower one.
  text: a text in the prompt, completion, expected answer, error, messages or tool calls, ignoring case.
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


@dataclasses.dataclass(frozen=True)
class _File:
  """A file of samples as it was read.

  size: in bytes.
  time: modification time, in seconds since 1970.
  lines: id of the episode in each line; -1 for a line that is not a row, such as an incomplete one.
  folding: its non-ASCII characters that case folding changes, such as `Ö`. Few files have any, so a search need not
    fold all characters of a file, which takes longer than reading it.
  foreign: it is not formatted as a run writes it (`\\u00d6` for a character, other spaces): a search parses all lines.
  """

  size: int
  time: int
  lines: list[int]
  folding: frozenset[str]
  foreign: bool


class Index:
  """The episodes of a run, in the order of its files.

  Attributes:
    episodes: one dict each: id, stage, split, step, prompt (key), index and sample (place in
      its group), reward, length, finished, and the beginnings of prompt and completion.
  """

  def __init__(self, run: epath.PathLike):
    """Reads the samples of a run's folder.

    Raises:
      InputError: there is no such folder, or it is not that of a run.
    """
    self.run = epath.Path(run).expanduser()
    if not self.run.is_dir():
      raise InputError(f'--run: {run}: no such folder')
    if not any((self.run / name).exists() for name in ('config.json', 'samples')):
      raise InputError(f'--run: {run}: not the folder of a run; name the folder that training was given as --workdir')
    self.episodes: list[dict[str, Any]] = []
    self._files: dict[str, _File] = {}
    self._changes = 0  # number of changes of files, a key of the caches below
    self._found = functools.lru_cache(_CACHED)(self._find)
    self._ordered = functools.lru_cache(len(SORTS))(self._sort)
    self._refreshing = threading.Lock()  # requests come in separate threads
    self._places: list[tuple[str, int, int]] = []  # of each episode: file, and begin and size of its line in bytes
    self.refresh()

  def refresh(self) -> bool:
    """Reads changed files and forgets removed ones; returns whether there were any."""
    present = set()
    with self._refreshing:
      before = self._changes
      for folder in sorted(self.run.glob('samples/*')):
        for path in metrics.sample_files(folder).values():
          with contextlib.suppress(FileNotFoundError):  # removed after it was listed
            stat = path.stat()
            name, size, time = str(path), int(stat.length), int(stat.mtime)
            earlier = self._files.get(name)
            if earlier is None or (earlier.size, earlier.time) != (size, time):
              self._forget(name)
              self._files[name] = self._read(path, size, time)
              self._changes += 1
            present.add(name)
      for name in self._files.keys() - present:
        self._forget(name)
      return self._changes != before

  def _forget(self, name: str) -> None:
    """Marks the episodes of a file as gone, if it was read before."""
    if file := self._files.pop(name, None):
      for number in file.lines:
        if number >= 0:
          self.episodes[number]['gone'] = True
      self._changes += 1

  def _read(self, path: epath.Path, size: int, time: int) -> _File:
    """Adds the episodes of a file of this size and time, without an incomplete last line."""
    name, stage, step = str(path), path.parent.name, int(path.stem)
    data = path.read_bytes()
    end = 0
    lines, foreign = [], None
    for line in data.split(b'\n'):
      begin, end = end, end + len(line) + 1
      try:
        row = json.loads(line)
      except ValueError:
        lines.append(-1)  # still being written, or empty after the last line
        continue
      if foreign is None:
        foreign = _ESCAPED.search(data) or json.dumps(row, ensure_ascii=False).encode('utf-8', 'surrogatepass') != line
      lines.append(len(self.episodes))
      self._places.append((name, begin, len(line)))
      self.episodes.append(_short(lines[-1], stage, step, row))
    return _File(size, time, lines, _folding(data), bool(foreign))

  def full(self, number: int) -> dict[str, Any]:
    """Returns an episode with its texts, as the run wrote it, and the fields of `episodes`.

    Raises:
      InputError: there is no such episode, or it was removed.
    """
    if not 0 <= number < len(self.episodes):
      raise InputError(f'episode {number}: there are {len(self.episodes)}')
    try:
      return json.loads(self._line(number)) | {'short': self.episodes[number]}
    except ValueError:
      raise InputError(f'episode {number}: a resume of the run has removed it; load the page again') from None

  def _line(self, number: int) -> bytes:
    """Returns the line of an episode; b'' if its file was removed or written again."""
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
    """Returns the ids of the episodes that match a query, in its order."""
    if query.sort not in SORTS or query.only not in ONLY:
      raise InputError(f'sort: one of {", ".join(SORTS)}; only: one of {", ".join(ONLY[1:])}')
    return list(self._found(query, self._changes))

  def _find(self, query: Query, changes: int) -> list[int]:
    """Computes `find`; `changes` is the number of changes of files so far."""
    best = max((e['reward'] for e in self.episodes if e['reward'] is not None and 'gone' not in e), default=0.0)
    numbers = [n for n in self._ordered(query.sort, changes) if _fits(self.episodes[n], query, best)]
    if query.text:
      with_text = self._with_text({self._places[n][0] for n in numbers}, query.text)
      numbers = [n for n in numbers if n in with_text]
    return numbers

  def _sort(self, sort: str, changes: int) -> list[int]:
    """Returns the ids of all episodes in an order; `changes` is the number of changes of files so far."""
    del changes  # only a key of the cache
    return [e['id'] for e in sorted(self.episodes, key=lambda e: _order(e, sort))]

  def _with_text(self, names: Iterable[str], text: str) -> set[int]:
    """Returns the ids of the episodes in these files that have `text` in one of their texts, ignoring case."""
    numbers: set[int] = set()
    for name in names:
      file = self._files.get(name)
      try:
        data = epath.Path(name).read_bytes()
      except FileNotFoundError:  # since the last refresh
        continue
      if file is not None:  # a refresh may have removed it in the meantime
        hits = _lines_with(data, file, text.casefold())
        numbers.update(file.lines[line] for line in hits if line < len(file.lines))
    return numbers

  def group(self, number: int) -> list[int]:
    """Returns the ids of all samples of this one's prompt in its step."""
    episode = self.episodes[number]
    keys = ('stage', 'split', 'prompt', 'index')
    step_episodes = (e for e in self.episodes if e['step'] == episode['step'] and 'gone' not in e)
    return [e['id'] for e in step_episodes if all(e[k] == episode[k] for k in keys)]

  def history(self, number: int) -> list[int]:
    """Returns the ids of all samples of the same prompt over training, oldest first."""
    episode = self.episodes[number]
    return self.find(Query(stage=episode['stage'], prompt=episode['prompt'], sort='oldest'))

  def overview(self) -> dict[str, Any]:
    """Returns counts of the run: episodes, failed and truncated ones, and the steps of each stage."""
    present = [e for e in self.episodes if 'gone' not in e]
    stages: dict[str, dict[str, Any]] = {}
    for e in present:
      stage = stages.setdefault(e['stage'], {'steps': {}, 'splits': {}})
      stage['steps'][e['step']] = stage['splits'][e['split']] = True
    return dict(
      run=str(self.run),
      episodes=len(present),
      failed=sum(e['reward'] is None for e in present),
      truncated=sum(e['finished'] is False for e in present),
      stages={name: {k: list(v) for k, v in stage.items()} for name, stage in stages.items()},
    )


def _folding(data: bytes) -> frozenset[str]:
  """Returns the non-ASCII characters of a text that case folding changes."""
  if data.isascii():
    return frozenset()
  others = data.translate(None, _ASCII).decode('utf-8', 'replace')
  is_present = np.zeros(sys.maxunicode + 1, bool)  # a set would take as long as parsing the file
  is_present[np.frombuffer(others.encode('utf-32-le'), np.uint32)] = True
  return frozenset(c for c in map(chr, np.flatnonzero(is_present).tolist()) if c.casefold() != c)


def _folded(data: bytes, folding: Iterable[str], wanted: str) -> bytes:
  """Returns the bytes of a file, with the same lines, folded as far as a search for the folded text `wanted` needs it.

  Characters that are not in `folding`, or whose folded form has no character of `wanted`, cannot become a part of it.
  """
  for letter in folding:
    if set(letter.casefold()) & set(wanted):
      data = data.replace(letter.encode(), letter.casefold().encode())
  return data.lower()  # affects ASCII letters only


def _lines_with(data: bytes, file: _File, text: str) -> Iterator[int]:
  """Yields the number of each line of a file that has `text`, folded, in a text of its episode, in order."""
  lines = data.split(b'\n')
  if file.foreign:
    yield from (number for number, line in enumerate(lines) if _has(line, text))
    return
  as_written = json.dumps(text, ensure_ascii=False)[1:-1]
  data = _folded(data, file.folding, as_written)
  number = counted = at = 0
  while (at := data.find(as_written.encode('utf-8', 'surrogatepass'), at)) >= 0:
    number += data.count(b'\n', counted, at)
    counted = at
    begin, end = data.rfind(b'\n', 0, at) + 1, data.find(b'\n', at)
    end = end if end >= 0 else len(data)
    is_hit = _in_text(data, begin, at, end)
    if is_hit is None:
      is_hit, at = _has(lines[number], text), end
    if is_hit:
      yield number
    at = end if is_hit else at + 1


def _in_text(data: bytes, begin: int, place: int, end: int) -> bool | None:
  """Returns whether `place` in the line from `begin` to `end` is in a text of the episode; None: parse the line.

  A quote in a text has a backslash before it, so `": "` begins a text and `", "` ends one.
  """
  if (place - begin - len(data[begin:place].rstrip(b'\\'))) % 2:
    return None  # the hit begins within an escape such as \n
  value = data.rfind(b'": "', begin, place)
  if value >= 0 and data.find(b'", "', value + 4, place) < 0:
    if data[data.rfind(b'"', begin, value) + 1 : value] in _TEXTS:
      return True
  return None if data.find(b'"turns": ', begin, end) >= 0 else False


def _has(line: bytes, text: str) -> bool:
  """Returns whether the episode in a line has `text`, folded, in one of its texts."""
  try:
    row = json.loads(line)
  except ValueError:  # written again since the last refresh
    return False
  return any(text in episode_text.casefold() for episode_text in _texts(row))


def _texts(row: dict) -> Iterator[str]:
  """Yields the texts of an episode: what is in its messages, and the names and arguments of tool calls."""
  yield from (str(row[name.decode()]) for name in _TEXTS if row.get(name.decode()))
  for turn in row.get('turns', ()):
    yield from _strings([turn.get('content'), turn.get('name')])
    for call in turn.get('tool_calls', ()):
      called = call.get('function', call)
      yield from _strings([called.get('name'), called.get('arguments')])


def _strings(value: Any) -> Iterator[str]:
  """Yields the texts and numbers of a JSON value, and the keys of its objects."""
  if isinstance(value, dict):
    yield from value
  if isinstance(value, (dict, list)):
    for part in value.values() if isinstance(value, dict) else value:
      yield from _strings(part)
  elif value is not None:
    yield str(value)


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
