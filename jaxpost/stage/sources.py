"""TODO."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING

from etils import epath

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.models import config as model_config
from jaxpost.models import lora
from jaxpost.storage import array_cache, object_store
from jaxpost.storage.checkpoint import Checkpointer

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Source:
  """Weights of `config`, found before a device is touched.

  folder: of safetensors. checkpoints: a stage's, of another run. stage: an
  earlier one of this run. None of them: random.
  name: of the folder, for others. seed: of what is random; None is the run's.
  base: has the leaves that this lacks.
  """

  config: ModelConfig
  folder: epath.Path | None = None
  checkpoints: epath.Path | None = None
  stage: str = ''
  step: int | None = None
  seed: int | None = None
  name: str = ''
  base: 'Source | None' = None


def checkpoints(source: Source, workdir):
  """The folder of checkpoints that a source is in, or None."""
  return epath.Path(workdir) / 'checkpoints' / source.stage if (source.stage) else source.checkpoints


def record(source: Source, workdir, seed: int) -> dict:
  """What finds these weights again, and knows them, as JSON."""
  path = lambda x: x and object_store.resolved(x)
  return dict(
    config=dataclasses.asdict(source.config),
    folder=path(source.folder),
    checkpoints=path(source.checkpoints),
    stage=source.stage,
    step=source.step,
    seed=seed if source.seed is None else source.seed,
    name=source.name,
    base=source.base and record(source.base, workdir, seed),
    fingerprint=_fingerprint(source, workdir, seed),
  )


def _fingerprint(source: Source, workdir, seed) -> str:
  return array_cache.fingerprint(identity(source, workdir, seed, here=False))


def recall(saved: dict | None, checkpoints) -> Source | None:
  """The source of a record in a run whose checkpoints are in this folder."""
  if saved is None:
    return None
  folder, made = saved['folder'], saved['checkpoints']
  made = checkpoints / saved['stage'] if saved['stage'] else made
  source = Source(
    model_config.from_json(saved['config']),
    folder and epath.Path(folder),
    made and epath.Path(made),
    '',
    saved['step'],
    saved['seed'],
    saved['name'],
    recall(saved['base'], checkpoints),
  )
  place = folder or made
  if place and not epath.Path(place).exists() or (_fingerprint(source, None, 0) != saved['fingerprint']):
    raise InputError(
      f'{place}: is gone or has changed, and {checkpoints} holds what was '
      'trained on top of these weights only; bring them back'
    )
  return source


def outcome(p) -> Source:
  """The weights that the stage `p` ends with."""
  return Source(
    p.model.config,
    stage=p.name,
    step=p.config.train.steps,
    seed=p.config.seed,
    base=p.sources['policy'] if p.model.frozen else None,
  )


def below_adapter(p) -> str:
  """The model that the adapter of the stage `p` is for; '' if it has no name.

  Nor has it one where more is trained than the adapter.
  """
  source, more = p.sources['policy'], set(p.model.table) - p.model.frozen
  while source.base is not None and source.config.lora == p.model.config.lora:
    source = source.base
  plain = all(lora.is_adapter(path) or path == 'score' for path in more)
  return source.name if plain and source.base is None else ''


def identity(source: Source, workdir, seed: int, here=True) -> list:
  """What tells these weights from others, without reading them: JSON.

  Files of a folder by name, size and samples of what they hold; a checkpoint
  by its checksums. here: the shape and the times of the files, too, which a
  copy or a later version may change.
  """
  shape, folder = here and dataclasses.asdict(source.config), (checkpoints(source, workdir))
  base = [identity(source.base, workdir, seed, here)] if source.base else []
  if folder is not None:
    checkpointer = Checkpointer(folder)
    try:
      step = checkpointer.latest() if source.step is None else source.step
    finally:
      checkpointer.close()
    # Process 0 writes it, and may be about to.
    return [
      shape,
      coordination.broadcast(
        (folder / str(step) / 'checksums.json').read_text() if coordination.process_index() == 0 else None
      ),
      *base,
    ]
  if source.folder is not None:
    return [shape, _samples(source), here and sorted(int(f.stat().mtime) for f in _files(source)), *base]
  return [shape, seed if source.seed is None else source.seed]


def outline(source: Source) -> list:
  """The shape, and samples of the files of a folder, as JSON."""
  return [dataclasses.asdict(source.config), _samples(source), source.base and outline(source.base)]


def _samples(source: Source) -> list:
  return sorted(_sampled(f) for f in _files(source))


def _files(source: Source) -> list:
  return list(source.folder.glob('*.safetensors')) if source.folder else []


def _sampled(file) -> list:
  """[name, bytes, crc32 of up to 64 blocks over the whole file]."""
  stat, crc = file.stat(), 0
  with file.open('rb') as f:
    for at in range(0, stat.length, max(stat.length // 64, _BLOCK)):
      f.seek(at)
      crc = zlib.crc32(f.read(_BLOCK), crc)
  return [file.name, stat.length, crc]
