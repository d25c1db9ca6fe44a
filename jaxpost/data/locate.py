"""Finds the files of a source: a file, a folder with splits, or a data set on the hub."""

import difflib
import re
from collections.abc import Sequence

from etils import epath

from jaxpost.data import file_formats
from jaxpost.errors import InputError
from jaxpost.storage import object_store

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


def find_files(path: str) -> list[tuple[epath.Path, str]]:
  """Returns the files of a source, each with its name in errors."""
  local = epath.Path(path).expanduser()
  if local.exists():
    return _find_local(local, path, '')
  folder, _, split = path.rpartition(':')
  if folder and epath.Path(folder).expanduser().is_dir():
    return _find_local(epath.Path(folder).expanduser(), folder, split)
  from jaxpost.storage import hub

  named = hub.parse(path)
  if named is None or (file_formats.find(path) and not named[2]):
    raise _missing(local, path)
  repo, revision, file = named
  whole = bool(file_formats.find(file))
  patterns = file_formats.PATTERNS
  found = epath.Path(hub.download(repo, 'dataset', revision, file if whole else '', patterns))
  if whole:
    return [(found, path)]
  return _find_local(found, path, file)


def _find_local(local: epath.Path, path: str, split: str) -> list[tuple[epath.Path, str]]:
  if not local.is_dir():
    return [(local, path)]
  if (local / 'dataset_dict.json').exists():
    names = object_store.read_json(local / 'dataset_dict.json').get('splits', [])
    split = _choose(split, names, path)
    local, split = local / split, ''
  if (local / 'state.json').exists():
    state = object_store.read_json(local / 'state.json')
    listed = [f['filename'] for f in state.get('_data_files', [])]
    found = [local / name for name in listed]
  else:
    found = file_formats.data_files(local)
    splits = {f: _split_of(f.relative_to(local).parts) for f in found}
    named = sorted({s for s in splits.values() if s})
    if split or len(named) > 1:
      split = _choose(split, named, path)
      found = [f for f in found if splits[f] == split]
  if not found:
    there = ', '.join(sorted(f.name for f in local.iterdir())[:8])
    raise InputError(f'{path}: no data in this folder ({file_formats.NAMES}); it has {there or "nothing"}')
  return [(f, str(f)) for f in found]


def _choose(split: str, names: list[str], path: str) -> str:
  if split in names:
    return split
  if not split and len(names) == 1:
    return names[0]
  listed = ', '.join(names) or 'none'
  if split:
    raise InputError(f'{path}: has no split {split!r}; it has {listed}')
  if not names:
    raise InputError(f'{path}: has no splits')
  raise InputError(
    f'{path}: has the splits {listed}; name one, e.g. {path}:{"train" if "train" in names else names[0]}'
  )


def _split_of(parts: Sequence[str]) -> str:
  """Returns the split that the parts of a path name, '' for none."""
  words = re.split(r'[^A-Za-z]+', '/'.join(parts).lower())
  return next((_SPLIT_WORDS[w] for w in words if w in _SPLIT_WORDS), '')


def _missing(local: epath.Path, path: str) -> InputError:
  folder = local.parent
  if not folder.is_dir():
    return InputError(f'{path}: no such file, nor is there a folder {folder}')
  names = [f.name for f in folder.iterdir()]
  stems = {name.partition('.')[0]: name for name in sorted(names)}  # endings are alike, which says nothing
  near = [stems[stem] for stem in difflib.get_close_matches(local.name.partition('.')[0], stems, 1)]
  hint = f'{folder} has {", ".join(sorted(names)[:8]) or "nothing"}'
  if near:
    hint = f'did you mean {folder / near[0]}?'
  return InputError(f'{path}: no such file; {hint}')
