"""Opens a model folder and the tensors of its weight files."""

import contextlib
import mmap
import pathlib
from typing import Any, TypeAlias

from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import safetensors_file
from jaxpost.formats.safetensors_file import FLOAT8, INDEX, SINGLE
from jaxpost.storage import object_store

Path: TypeAlias = pathlib.Path | epath.Path

_LONGEST = 255  # characters of a file name
_PICKLES = ('.bin', '.pt', '.pth', '.ckpt')


def open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Path, Any]]:
  """Opens every tensor in the folder: name -> (file, open slice). The files are closed with `stack`."""
  files, index = weight_files(folder)
  tensors = {name: (file, tensor) for file in files for name, tensor in open_file(file, stack).items()}
  for name, file in index.items():
    if name not in tensors or tensors[name][0].name != file:
      raise InputError(f'{folder / file}: lacks tensor {name}, which {INDEX} places there; copy or download both again')
  if any(tensor.dtype == FLOAT8 for _, tensor in tensors.values()):
    from jaxpost.formats import fp8

    tensors = fp8.joined(tensors, object_store.read_json(folder / 'config.json'))
  if any(name.endswith('_blocks') for name in tensors):
    from jaxpost.formats import mxfp4

    tensors = mxfp4.joined(tensors)
  return tensors


def open_file(file: Path, stack: contextlib.ExitStack) -> dict[str, safetensors_file.Tensor]:
  """Opens the tensors of a file, which is closed with `stack`."""
  try:
    handle = stack.enter_context(file.open('rb'))
    if object_store.is_remote(file):
      from jaxpost.storage import remote

      return safetensors_file.tensors(remote.exactly(handle), epath.Path(file).stat().length, file)
    mapped = stack.enter_context(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    return safetensors_file.tensors(mapped, len(mapped), file)
  except (OSError, ValueError) as e:
    raise InputError(f'{file}: unreadable ({e}); copy or download it again') from e


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
  """Returns the files with weights, and the index: tensor name -> file name."""
  if (folder / SINGLE).is_file():
    return [folder / SINGLE], {}
  path = folder / INDEX
  if not path.is_file():
    names = sorted(p.name for p in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
      raise InputError(
        f'{folder / pickles[0]}: pickled weights can run code and are not read; convert to safetensors with '
        'transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)'
      )
    raise InputError(f'{folder}: no weights ({SINGLE} or {INDEX}); the folder has {", ".join(names[:8]) or "nothing"}')
  index = object_store.read_json(path).get('weight_map')
  if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
    raise InputError(f'{path}: has no "weight_map" of tensor to file name')
  for name, file in index.items():
    # By name, not by where it lands: download caches are links.
    if file != pathlib.PurePath(file).name or file in ('', '..') or len(file) > _LONGEST or '\0' in file:
      raise InputError(f'{path}: tensor {name} is in {file[:_LONGEST]!r}, which is no file name inside the folder')
    if not (folder / file).is_file():
      raise InputError(f'{folder / file}: no such file, but {INDEX} places {name} there; copy or download it again')
  return [folder / file for file in dict.fromkeys(index.values())], index


def opened(folder: epath.PathLike) -> Path:
  """Returns the path of a model folder; InputError if there is none."""
  object_store.check(str(folder), 'model')
  folder = (epath if object_store.is_remote(folder) else pathlib).Path(folder).expanduser()
  if not folder.is_dir():
    raise InputError(f'{folder}: no such folder; a model is a Hugging Face folder with config.json and {SINGLE}')
  return folder
