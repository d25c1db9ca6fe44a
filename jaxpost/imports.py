"""Imports a user's function by its name, or by the path of its file.

Imports only the standard library, so that reward workers can use it.
"""

import importlib
import importlib.util
import pathlib
import re
import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jaxpost.errors import InputError, type_of

_FILES: dict[str, tuple[pathlib.Path, int]] = {}  # name of the module of a file -> the file, crc32 of its text


def forget_edited_files() -> None:
  """Drops the modules of files that have changed since they were loaded, as between two runs in a notebook."""
  for name, (path, crc) in list(_FILES.items()):
    if not path.is_file() or zlib.crc32(path.read_bytes()) != crc:
      sys.modules.pop(name, None)
      del _FILES[name]


def load_callable(spec: str | Callable, what: str) -> Callable[..., Any]:
  """Returns the callable that `spec` names.

  Args:
    spec: 'pkg.module:fn', './file.py:fn', or a callable (returned as it is).
      `fn` may be dotted: 'pkg.module:Class.method'.
    what: what it is for, in errors, e.g. 'reward' or 'data.map_fn'.
  """
  if callable(spec):
    return spec
  target, _, name = str(spec).rpartition(':')
  if not target or not name:
    raise InputError(f'{what}: {spec!r} names no function; write pkg.module:function or ./file.py:function')
  module = load_module(target, what)
  found = module
  for part in name.split('.'):
    if not hasattr(found, part):
      there = [n for n, v in vars(module).items() if callable(v) and not n.startswith('_')]
      raise InputError(f'{what}: {target} has no {name!r}; it has {", ".join(sorted(there)) or "no functions"}')
    found = getattr(found, part)
  if not callable(found):
    raise InputError(f'{what}: {spec} is {type_of(found)}, not a function')
  return found


def load_module(target: str, what: str) -> ModuleType:
  """Imports 'pkg.module' or './file.py'."""
  if target.endswith('.py') or '/' in target:
    return _load_file(target, what)
  if not re.fullmatch(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*', target):
    raise InputError(f'{what}: {target!r} is no module name')
  try:
    return importlib.import_module(target)
  except ModuleNotFoundError as error:
    # A missing import inside the user's module is the user's error too, but needs another fix.
    if error.name and (target + '.').startswith(error.name + '.'):
      raise InputError(
        f'{what}: no module {error.name!r}; is it installed, or its folder'
        ' on PYTHONPATH? (a file is written ./file.py:function)'
      ) from error
    raise InputError(f'{what}: {target} imports {error.name!r}, which is not installed') from error
  except SyntaxError as error:
    raise _syntax(error, what) from error


def _load_file(target: str, what: str) -> ModuleType:
  path = pathlib.Path(target).expanduser()
  if not path.is_file():
    raise InputError(f'{what}: no file {target}')
  path = path.resolve()
  # One module per file, under a name that no import statement uses.
  name = f'_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}'
  if name in sys.modules:
    return sys.modules[name]
  module_spec = importlib.util.spec_from_file_location(name, path)
  if module_spec is None:
    raise InputError(f'{what}: {target} is no .py file')
  module = importlib.util.module_from_spec(module_spec)
  sys.modules[name] = module
  _FILES[name] = path, zlib.crc32(path.read_bytes())
  try:
    module_spec.loader.exec_module(module)
  except ModuleNotFoundError as error:
    beside = path.parent / str(error.name).partition('.')[0]
    is_beside = beside.is_dir() or beside.with_suffix('.py').is_file()
    hint = f'; it is beside that file: put {path.parent} on PYTHONPATH' if is_beside else ''
    raise InputError(f'{what}: {target} imports {error.name!r}, which is not installed{hint}') from error
  except SyntaxError as error:
    raise _syntax(error, what) from error
  finally:
    if sys.exc_info()[0] is not None:
      del sys.modules[name]
  return module


def _syntax(error: SyntaxError, what: str) -> InputError:
  return InputError(f'{what}: {error.filename}:{error.lineno}:{error.offset}: {error.msg}')
