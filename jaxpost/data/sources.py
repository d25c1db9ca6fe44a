"""Rows (plain dicts) from files, folders, the hub, or a generator.

    read('train.jsonl')                     read('folder:train')
    read('openai/gsm8k:main/train.parquet') read('generated:arithmetic:max=9')

Columns are TRL's: `text`; `messages`; `prompt` + `completion`; `prompt` +
`chosen` + `rejected`; ... Sharegpt and alpaca rows are mapped to them.
"""

import collections.abc
import difflib
import json
import re

from etils import epath

from jaxpost import imports
from jaxpost.data import files
from jaxpost.data import generated
from jaxpost.data import hub
from jaxpost.errors import InputError

_SHAREGPT_ROLES = {
  'system': 'system',
  'human': 'user',
  'user': 'user',
  'gpt': 'assistant',
  'assistant': 'assistant',
  'chatgpt': 'assistant',
  'model': 'assistant',
  'tool': 'tool',
  'observation': 'tool',
  'function_response': 'tool',
  'function_call': 'assistant',
}
_SPLIT_WORDS = {
  'train': 'train',
  'training': 'train',
  'test': 'test',
  'testing': 'test',
  'validation': 'validation',
  'valid': 'validation',
  'val': 'validation',
  'dev': 'validation',
  'eval': 'validation',
}


class Rows(collections.abc.Sequence):
  """A sequence of dict rows that knows where each one stands.

  Attributes:
    name: what was read.
    dropped: rows for which the map function returned None.
  """

  def __init__(self, name, rows, places, dropped=0):
    self.name = name
    self.dropped = dropped
    self._rows = rows
    self._places = places

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, i):
    if isinstance(i, slice):
      return Rows(self.name, self._rows[i], self._places[i])
    return self._rows[i]

  def where(self, i):
    """'file.jsonl:12' (a line, from 1) or 'file.parquet[12]' (from 0)."""
    return files.where(*self._places[i])


def read(path, columns='', map_fn=None, fake_rows=None):
  """All rows of a source.

  Args:
    path: a file (.jsonl .json .txt, each also .gz; .parquet .array_record
      .arrow), a folder of them or one saved by `datasets` (':split' picks
      one), 'generated:NAME[:key=value,...]', or 'org/name[@revision][:file or
      split]' on the hub. What exists locally is local.
    columns: 'prompt=question,completion=answer' renames, target=source; other
      columns are kept.
    map_fn: row -> row or None (drop it), or its import path; sees the renamed
      columns.
    fake_rows: rows to use instead of reading the path, which only names them.
  """
  if fake_rows is not None:
    numbered = ((n, row) for n, row in enumerate(fake_rows))
    found = [(f'{path}[', numbered)]
  else:
    found = _open(str(path))
  renames = _parse_columns(columns)
  if map_fn is not None:
    map_fn = imports.load_callable(map_fn, 'map_fn')
  rows, places, dropped = [], [], 0
  for prefix, numbered in found:
    for number, row in numbered:
      where = files.where(prefix, number)
      if not isinstance(row, dict):
        raise InputError(
          f'{where}: the row is a {type(row).__name__}, must be an object')
      if renames:
        row = _rename(row, renames, where)
      if map_fn is not None:
        row = _mapped(map_fn, row, where)
        if row is None:
          dropped += 1
          continue
      rows.append(_recognise(row, where))
      places.append((prefix, number))
  if not rows and dropped:
    raise InputError(f'{path}: map_fn dropped all {dropped} rows')
  if not rows:
    raise InputError(f'{path}: holds no rows')
  return Rows(str(path), rows, places, dropped)


def _open(path):
  """[(prefix of where, iterator of (number, row))] of a source."""
  if path.startswith('generated:'):
    _, name, *options = path.split(':', 2)
    made = generated.rows(name, ''.join(options))
    return [(f'{path}[', enumerate(made))]
  local = epath.Path(path).expanduser()
  if local.exists():
    return _open_local(local, path, '')
  folder, _, split = path.rpartition(':')
  if folder and epath.Path(folder).expanduser().is_dir():
    return _open_local(epath.Path(folder).expanduser(), folder, split)
  named = hub.parse(path)
  if named is None or (files.kind(path) and not named[2]):
    raise _missing(local, path)
  repo, revision, file = named
  whole = bool(files.kind(file))
  found = epath.Path(
    hub.download(repo, 'dataset', revision, file if whole else ''))
  if whole:
    return [files.open_file(found, path)]
  return _open_local(found, path, file)


def _open_local(local, path, split):
  if not local.is_dir():
    return [files.open_file(local, path)]
  if (local / 'dataset_dict.json').exists():
    names = files.load_json(local / 'dataset_dict.json').get('splits', [])
    split = _choose(split, names, path)
    local, split = local / split, ''
  if (local / 'state.json').exists():
    state = files.load_json(local / 'state.json')
    listed = [f['filename'] for f in state.get('_data_files', [])]
    found = [local / name for name in listed]
  else:
    found = files.find(local)
    splits = {f: _split_of(f.relative_to(local).parts) for f in found}
    named = sorted({s for s in splits.values() if s})
    if split or len(named) > 1:
      split = _choose(split, named, path)
      found = [f for f in found if splits[f] == split]
  if not found:
    there = ', '.join(sorted(f.name for f in local.iterdir())[:8])
    raise InputError(
      f'{path}: no data in this folder ({", ".join(files.KINDS)}); it has'
      f' {there or "nothing"}')
  return [files.open_file(f, str(f)) for f in found]


def _choose(split, names, path):
  if split in names:
    return split
  if not split and len(names) == 1:
    return names[0]
  listed = ', '.join(names) or 'none'
  if split:
    raise InputError(f'{path}: has no split {split!r}; it has {listed}')
  raise InputError(
    f'{path}: has the splits {listed}; name one, e.g. {path}:{names[0]}'
    if names
    else f'{path}: has no splits')


def _split_of(parts):
  words = re.split(r'[^A-Za-z]+', '/'.join(parts).lower())
  return next((_SPLIT_WORDS[w] for w in words if w in _SPLIT_WORDS), '')


def _missing(local, path):
  folder = local.parent
  if not folder.is_dir():
    return InputError(f'{path}: no such file, nor is there a folder {folder}')
  names = [f.name for f in folder.iterdir()]
  near = difflib.get_close_matches(local.name, names, 1, 0.4)
  hint = (
    f'did you mean {folder / near[0]}?'
    if near
    else (f'{folder} has {", ".join(sorted(names)[:8]) or "nothing"}'))
  return InputError(f'{path}: no such file; {hint}')


def _parse_columns(columns):
  renames = {}
  for part in filter(None, (p.strip() for p in columns.split(','))):
    target, equals, source = (p.strip() for p in part.partition('='))
    if not (target and equals and source):
      raise InputError(
        f'columns: {part!r} must be target=source, e.g. prompt=question')
    if target in renames:
      raise InputError(f'columns: {target!r} is given twice')
    renames[target] = source
  return renames


def _rename(row, renames, where):
  for source in renames.values():
    if source not in row:
      near = difflib.get_close_matches(source, map(str, row), 1)
      raise InputError(
        f'{where}: no column {source!r}; it has'
        f' {", ".join(map(str, row)) or "none"}'
        + (f' (did you mean {near[0]}?)' if near else ''))
  kept = {k: v for k, v in row.items() if k not in renames.values()}
  return kept | {target: row[source] for target, source in renames.items()}


def _mapped(map_fn, row, where):
  try:
    made = map_fn(dict(row))
  except (LookupError, TypeError, ValueError, AttributeError) as error:
    raise InputError(
      f'{where}: map_fn raised {type(error).__name__}: {error}; the row has'
      f' {", ".join(map(str, row)) or "no columns"}'
    ) from error
  if made is not None and not isinstance(made, dict):
    raise InputError(
      f'{where}: map_fn returned a {type(made).__name__}, must return a row'
      ' (dict) or None to drop it')
  return made


def _recognise(row, where):
  """Sharegpt and alpaca rows in TRL's columns, others as they are."""
  if 'conversations' in row and not {'messages', 'prompt'} & set(row):
    return _from_sharegpt(row, where)
  if {'instruction', 'output'} <= set(row) and not (
    {'messages', 'prompt', 'completion'} & set(row)
  ):
    return _from_alpaca(row, where)
  return row


def _from_sharegpt(row, where):
  turns = row['conversations']
  if not isinstance(turns, list):
    raise InputError(f'{where}: conversations: must be a list of turns')
  messages = [
    _turn(turn, f'{where}: conversations[{n}]') for n, turn in enumerate(turns)
  ]
  if row.get('system'):
    messages = [{'role': 'system', 'content': row['system']}, *messages]
  kept = {k: v for k, v in row.items() if k not in ('conversations', 'system')}
  if isinstance(row.get('chosen'), dict):
    for side in ('chosen', 'rejected'):
      kept[side] = [_turn(row.get(side), f'{where}: {side}')]
    return {**kept, 'prompt': messages}
  return {**kept, 'messages': messages}


def _turn(turn, where):
  if not isinstance(turn, dict) or not {'from', 'value'} <= set(turn):
    raise InputError(f'{where}: must be an object with from and value')
  role = turn['from']
  if role not in _SHAREGPT_ROLES:
    raise InputError(
      f'{where}.from: {role!r} is none of {", ".join(_SHAREGPT_ROLES)}')
  message = {'role': _SHAREGPT_ROLES[role], 'content': turn['value']}
  if role != 'function_call':
    return message
  try:
    call = json.loads(turn['value'])
  except (ValueError, TypeError) as error:
    raise InputError(f'{where}.value: bad JSON: {error}') from error
  calls = call if isinstance(call, list) else [call]
  if not all(isinstance(c, dict) and 'name' in c for c in calls):
    raise InputError(f'{where}.value: a function call needs a name')
  return {
    'role': 'assistant',
    'content': '',
    'tool_calls': [{'type': 'function', 'function': c} for c in calls],
  }


def _from_alpaca(row, where):
  for column in ('instruction', 'input', 'output', 'system'):
    if not isinstance(row.get(column) or '', str):
      raise InputError(
        f'{where}: {column}: is a {type(row[column]).__name__}, must be a'
        ' string')
  if not row['instruction'] or row['output'] is None:
    empty = 'output' if row['instruction'] else 'instruction'
    raise InputError(f'{where}: {empty}: is empty')
  asked = row['instruction']
  if row.get('input'):
    asked += '\n\n' + row['input']
  prompt = [{'role': 'user', 'content': asked}]
  if row.get('system'):
    prompt = [{'role': 'system', 'content': row['system']}, *prompt]
  used = ('instruction', 'input', 'output', 'system')
  return {
    **{k: v for k, v in row.items() if k not in used},
    'prompt': prompt,
    'completion': [{'role': 'assistant', 'content': row['output']}],
  }
