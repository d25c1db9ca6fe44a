"""Finds the weights that a config names, and finds and recognizes them again in a later run.

A `records.Source` is found before a device is touched; `load_weights.py` loads it. A preset with random weights needs
no part of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etils import epath

from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.models import saved_config
from jaxpost.stage import config as config_lib
from jaxpost.stage.records import Source
from jaxpost.storage import manifest, object_store, seals
from jaxpost.storage.checkpoint import Checkpointer

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.stage.schema import ModelSection

_STAGE = 'stage:'
_BLOCK = 1 << 16  # bytes of a sample of a file


def find(text: str, key: str, earlier: Mapping[str, Source], text_only: bool = False) -> Source:
  """Returns the source that `text` names.

  Args:
    text: stage:NAME, RUN[@step], a folder of a model or an adapter, or org/name.
    key: the config field that holds it, for errors.
    earlier: {stage: Source} of what the stages before this one end with.
    text_only: of a multimodal folder, takes the text model.
  """
  if text.startswith(_STAGE):
    name = text[len(_STAGE) :]
    if name not in earlier:
      raise InputError(f'{key}: {text!r} is no stage before this one; there is {", ".join(earlier) or "none"}')
    return earlier[name]
  object_store.check(text, key)
  path, step = manifest.split_run(text)
  local = epath.Path(path).expanduser()
  if (local / 'checkpoints').exists() or (step and local.exists()):
    return of_checkpoint(*find_run(text, key))
  from jaxpost.stage import model_folders

  base = model_folders.adapter_base(local)
  if base is not None:
    return with_adapter(text, find(base, f'{key}: base of {text}', earlier, text_only))
  folder, config = model_folders.open_folder(text, key, text_only)
  is_local = epath.Path(text).expanduser().exists()
  return Source(config, folder=folder, name=object_store.resolved(folder) if is_local else text)


def of_code(code: str, path: str) -> Source:
  """Returns the weights of the custom model that ./file.py:function makes.

  They are in the folder `path`, or random if it is ''.
  """
  model = model_lib.from_code(code)
  if not path:
    return Source(model.config)
  from jaxpost.stage import model_folders

  folder = model_folders.open_custom(path, model)
  return Source(model.config, folder=folder, name=object_store.resolved(folder))


def of_checkpoint(folder: epath.Path, step: int | None = None) -> Source:
  """Returns the checkpoint of a stage, given the folder of its checkpoints; None is the newest."""
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    meta = checkpointer.restore_meta(step)
  config = saved_config.from_json(meta['model'])
  return Source(config, checkpoints=folder, step=step, base=recall(meta.get('base'), folder.parent))


def with_adapter(path: str, source: Source, rank: int = 0) -> Source:
  """Returns `source` with the adapter of a PEFT folder on top, of this rank (0: any); unchanged if `path` is ''."""
  if not path:
    return source
  from jaxpost.stage import model_folders

  config = model_folders.with_adapter(source.config, path, rank)
  return Source(config, folder=epath.Path(path).expanduser(), base=source)


def find_run(text: str, key: str) -> tuple[epath.Path, int | None]:
  """Parses RUN[@step] into (folder of the checkpoints of its last stage, step or None)."""
  run_folder, step = manifest.split_run(text)
  if step and not step.isdigit():
    raise InputError(f'{key}: {step!r} in {text!r} is no step')
  root = epath.Path(run_folder).expanduser()
  if not (root / 'config.json').exists():
    raise InputError(f'{key}: {run_folder} is not the folder of a run (it has no config.json)')
  folders = [f for f in (root / 'checkpoints').glob('*') if f.is_dir()]
  # A stage that has begun and saved nothing yet is no outcome of the run.
  folders = [f for f in folders if manifest.finished_steps(f)] or folders
  saved = seals.read_json(root / 'config.json')
  order = list(saved.get('stages') or ())
  found = sorted(folders, key=lambda f: order.index(f.name) if f.name in order else -1)
  if not found:
    raise InputError(f'{key}: {run_folder} has no checkpoints')
  return found[-1], int(step) if step else None


def record(source: Source, workdir: epath.PathLike | None, seed: int) -> dict:
  """Returns JSON from which `recall` finds the weights again and checks that they are the same."""
  return dict(
    config=dataclasses.asdict(source.config),
    folder=source.folder and object_store.resolved(source.folder),
    checkpoints=source.checkpoints and object_store.resolved(source.checkpoints),
    stage=source.stage,
    step=source.step,
    seed=seed if source.seed is None else source.seed,
    name=source.name,
    base=source.base and record(source.base, workdir, seed),
    fingerprint=_fingerprint(source, workdir, seed),
  )


def _fingerprint(source: Source, workdir, seed) -> str:
  return seals.fingerprint(identity(source, workdir, seed, here=False))


def recall(saved: dict | None, checkpoints: epath.Path) -> Source | None:
  """Returns the source of a record in a run whose checkpoints are in this folder."""
  if saved is None:
    return None
  folder, made = saved['folder'], saved['checkpoints']
  made = checkpoints / saved['stage'] if saved['stage'] else made
  source = Source(
    saved_config.from_json(saved['config']),
    folder=folder and epath.Path(folder),
    checkpoints=made and epath.Path(made),
    step=saved['step'],
    seed=saved['seed'],
    name=saved['name'],
    base=recall(saved['base'], checkpoints),
  )
  place = folder or made
  is_gone = place and not epath.Path(place).exists()
  if is_gone or _fingerprint(source, None, 0) != saved['fingerprint']:
    raise InputError(
      f'{place}: is gone or has changed, and {checkpoints} holds what was '
      'trained on top of these weights only; bring them back'
    )
  return source


def saved_tokenizer_path(section: ModelSection) -> str:
  """Returns what a run with this section has read its tokenizer from, without its weights or code of the user."""
  if not section.tokenizer and section.path and epath.Path(section.path).expanduser().is_dir():
    return find(section.path, 'config.model.path', {}, section.text_only).tokenizer_path(section) or 'bytes'
  return section.tokenizer or section.path or 'bytes'


def tokenizer_of(source: Source, earlier: Mapping[str, Tokenizer]) -> Tokenizer | None:
  """Returns the tokenizer that a model was trained with, or None if it is not recorded.

  Args:
    earlier: {stage: its tokenizer} of the stages before this one.
  """
  if source.stage:
    return earlier[source.stage]
  if source.checkpoints is not None:
    run, stage = source.checkpoints.parent.parent, source.checkpoints.name
    section = config_lib.parse_saved(run / 'config.json')[stage].model
    return tokenizer_lib.load(saved_tokenizer_path(section))
  if source.folder and (source.folder / 'tokenizer.json').exists():
    return tokenizer_lib.load(str(source.folder))
  return None


def identity(source: Source, workdir: epath.PathLike | None, seed: int, here: bool = True) -> list:
  """Returns JSON that tells these weights from others, without reading them.

  Files of a folder by name, size and samples of what they hold; a checkpoint by its checksums. here: the shape and the
  times of the files, too, which a copy or a later version may change.
  """
  shape = here and dataclasses.asdict(source.config)
  folder = source.checkpoints_in(workdir)
  base = [identity(source.base, workdir, seed, here)] if source.base else []
  if folder is not None:
    with contextlib.closing(Checkpointer(folder)) as checkpointer:
      step = checkpointer.latest() if source.step is None else source.step
    # Process 0 writes it, and may be about to.
    return [
      shape,
      coordination.broadcast(
        (folder / str(step) / 'checksums.json').read_text() if coordination.process_index() == 0 else None
      ),
      *base,
    ]
  if source.folder is not None:
    return [shape, file_samples(source), here and sorted(int(f.stat().mtime) for f in _files(source)), *base]
  return [shape, seed if source.seed is None else source.seed]


def file_samples(source: Source) -> list[list]:
  """Returns [name, bytes, crc32 of up to 64 blocks over it] of each file of a folder; [] where there is no folder."""
  return sorted(_sampled(f) for f in _files(source))


def _files(source: Source) -> list:
  return list(source.folder.glob('*.safetensors')) if source.folder else []


def _sampled(file: epath.Path) -> list:
  stat, crc = file.stat(), 0
  with file.open('rb') as f:
    for at in range(0, stat.length, max(stat.length // 64, _BLOCK)):  # a small file as a whole
      f.seek(at)
      crc = zlib.crc32(f.read(_BLOCK), crc)
  return [file.name, stat.length, crc]
