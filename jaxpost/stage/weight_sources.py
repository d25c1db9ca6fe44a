"""Finds the weights that a config names, and in a later run finds them again and checks that they are the same.

Finding a `records.Source` needs no device; `load_weights.py` loads it. A preset with random weights needs nothing here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etils import epath

from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.distributed import coordination
from jaxpost.errors import InputError, refuse
from jaxpost.models import decoder_configs
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics, start
from jaxpost.stage import config as config_lib
from jaxpost.stage.config import Config
from jaxpost.stage.records import Source
from jaxpost.storage import manifest, object_store, seals
from jaxpost.storage.checkpoint import Checkpointer

if TYPE_CHECKING:
  from jaxpost.stage.schema import ModelSection

_STAGE = 'stage:'
_BLOCK = 1 << 16  # bytes of one sample of a file
_PROBE = 'Zwölf: 12 + 345'  # almost any two tokenizers encode it differently


def find(text: str, key: str, earlier: Mapping[str, Source], text_only: bool = False) -> Source:
  """Returns the source that `text` names.

  Args:
    text: stage:NAME, RUN[@step], a folder of a model or an adapter, or org/name.
    key: the config field that holds it, for errors.
    earlier: {stage: Source} of the final weights of the stages before this one.
    text_only: whether to take the text model of a multimodal folder.
  """
  if text.startswith(_STAGE):
    name = text[len(_STAGE) :]
    refuse(name not in earlier, f'{key}: {text!r} is no stage before this one; there is {", ".join(earlier) or "none"}')
    return earlier[name]
  object_store.check(text, key)
  path, step = manifest.split_run(text)
  local = epath.Path(path).expanduser()
  if (local / 'checkpoints').exists() or (step and local.exists()):
    return of_checkpoint(*find_run(text, key))
  from jaxpost.formats import peft
  from jaxpost.stage import model_folders

  if (base := peft.base_of(local)) is not None:
    return with_adapter(text, find(base, f'{key}: base of {text}', earlier, text_only))
  folder, config = model_folders.open_folder(text, key, text_only)
  is_local = epath.Path(text).expanduser().exists()
  return Source(config, folder=folder, name=object_store.resolved(folder) if is_local else text)


def of_code(code: str, path: str) -> Source:
  """Returns the weights of the custom model that ./file.py:function makes: the folder `path`, or random ones if ''."""
  model = model_lib.from_code(code)
  if not path:
    return Source(model.config)
  from jaxpost.stage import model_folders

  folder = model_folders.open_custom(path, model)
  return Source(model.config, folder=folder, name=object_store.resolved(folder))


def of_checkpoint(folder: epath.Path, step: int | None = None) -> Source:
  """Returns the checkpoint at a step (None: the newest) of a stage, given the folder of the stage's checkpoints."""
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    meta = checkpointer.restore_meta(step)
  config = decoder_configs.from_json(meta['model'])
  return Source(config, checkpoints=folder, step=step, base=recall(meta.get('base'), folder.parent))


def with_adapter(path: str, source: Source, rank: int = 0) -> Source:
  """Returns `source` with the adapter of the PEFT folder `path` on top, of this rank (0: any)."""
  from jaxpost.stage import model_folders

  config = model_folders.with_adapter(source.config, path, rank)
  return Source(config, folder=epath.Path(path).expanduser(), base=source)


def find_run(text: str, key: str) -> tuple[epath.Path, int | None]:
  """Parses RUN[@step] into (folder of the checkpoints of its last stage, step or None)."""
  run_folder, step = manifest.split_run(text)
  refuse(bool(step) and not step.isdigit(), f'{key}: {step!r} in {text!r} is not a step; name a number, as in RUN@100')
  root = epath.Path(run_folder).expanduser()
  refuse(not (root / 'config.json').exists(), f'{key}: {run_folder} is not the folder of a run (it has no config.json)')
  folders = [root / 'checkpoints' / name for name in config_lib.parse_saved(root / 'config.json')]
  folders = [f for f in folders if manifest.finished_steps(f)]  # a stage that has just begun has none
  refuse(not folders, f'{key}: {run_folder} has no checkpoints')
  steps = manifest.finished_steps(folders[-1])
  there = ', '.join(map(str, steps))
  refuse(bool(step) and int(step) not in steps, f'{key}: {folders[-1]} has no step {step}; it has {there}')
  return folders[-1], int(step) if step else None


def record(source: Source, workdir: epath.PathLike | None, seed: int) -> dict:
  """Returns JSON with which `recall` finds the weights again and checks that they are the same."""
  return dict(
    config=dataclasses.asdict(source.config),
    folder=source.folder and object_store.resolved(source.folder),
    checkpoints=source.checkpoints and object_store.resolved(source.checkpoints),
    stage=source.stage,
    step=source.step,
    seed=seed if source.seed is None else source.seed,
    name=source.name,
    base=source.base and record(source.base, workdir, seed),
    fingerprint=seals.fingerprint(identity(source, workdir, seed, here=False)),
  )


def recall(saved: dict | None, checkpoints: epath.Path) -> Source | None:
  """Returns the source of a `record`.

  Args:
    checkpoints: folder of the checkpoints of the run that has saved the record.

  Raises:
    InputError: the weights are gone or have changed.
  """
  if saved is None:
    return None
  folder = saved['folder']
  base_checkpoints = checkpoints / saved['stage'] if saved['stage'] else saved['checkpoints']
  source = Source(
    decoder_configs.from_json(saved['config']),
    folder=folder and epath.Path(folder),
    checkpoints=base_checkpoints and epath.Path(base_checkpoints),
    step=saved['step'],
    seed=saved['seed'],
    name=saved['name'],
    base=recall(saved['base'], checkpoints),
  )
  path = folder or base_checkpoints
  is_gone = path and not epath.Path(path).exists()
  if is_gone or seals.fingerprint(identity(source, None, 0, here=False)) != saved['fingerprint']:
    raise InputError(
      f'{path}: is gone or has changed, and {checkpoints} holds only the parameters that were trained on top of these '
      'weights; restore them'
    )
  return source


def path_of_run(run: epath.Path, path: str) -> str:
  """Returns a path of a run's config in the folder where the run was last started; unchanged if it has no such file."""
  folders = [entry.get('folder', '') for entry in (metrics.read_growing(run / start.FILE) if path else ())]
  place = os.path.join(*folders[-1:], path)
  return place if os.path.exists(place) else path


def saved_tokenizer_path(run: epath.Path, section: ModelSection) -> str:
  """Returns where a run with this `config.model` read its tokenizer from; loads no weights and no code of the user."""
  path, tokenizer = path_of_run(run, section.path), path_of_run(run, section.tokenizer)
  if not tokenizer and path and epath.Path(path).expanduser().is_dir():
    return find(path, 'config.model.path', {}, section.text_only).tokenizer_path(section) or 'bytes'
  return tokenizer or path or 'bytes'


def tokenizer_of(source: Source, earlier: Mapping[str, Tokenizer]) -> Tokenizer | None:
  """Returns the tokenizer that a model was trained with, or None if it is not recorded; see `check_tokenizer`."""
  if source.stage:
    return earlier[source.stage]
  return tokenizer_lib.load(*own) if (own := own_tokenizer(source)) else None


def own_tokenizer(source: Source) -> tuple:
  """Returns arguments of `tokenizer.load` for the weights of a folder or another run; () if they are not recorded."""
  if source.checkpoints is not None:
    run, stage = source.checkpoints.parent.parent, source.checkpoints.name
    config = config_lib.parse_saved(run / 'config.json')[stage]
    path, template = saved_tokenizer_path(run, config.model), path_of_run(run, config.data.chat_template)
    if template.endswith('.jinja') and not epath.Path(template).expanduser().exists():
      logging.warning('%s: its chat template %s is gone, so no other is compared with it', run, template)
      return (path,)
    return path, template, config.data.template_kwargs
  return (str(source.folder),) if source.folder and (source.folder / 'tokenizer.json').exists() else ()


def check_tokenizer(config: Config, policy: Source, tokenizer: Tokenizer, path: str, earlier: Mapping) -> None:
  """Warns if the policy's weights were trained with another tokenizer or chat template, which may be meant.

  Args:
    path: where `tokenizer` was read from; '' if the config names none, which is an InputError if the weights have one.
    earlier: {stage: its tokenizer} of the stages before this one.
  """
  here = (path or 'bytes', config.data.chat_template, config.data.template_kwargs)
  saved = own_tokenizer(policy)
  if not policy.stage and saved in ((), here[:1], here):
    return
  try:
    own = earlier[policy.stage] if policy.stage else tokenizer_lib.load(*saved)
  except InputError:  # it is gone since those weights were trained
    if path or saved[0] == 'bytes':
      return
    raise
  weights = policy.stage or config.init_from or config.lora.path or config.model.path
  if own.encode(_PROBE) == tokenizer.encode(_PROBE):
    if not any(here[1:]):  # a template and variables that are set are meant
      warn_of_other_chats(weights, own, tokenizer)
    return
  refuse(not path, f'config.model.tokenizer: is empty, and {weights} has its own; set it to {own.source}')
  logging.warning(
    'config.model.tokenizer: %s encodes text differently than %s, the tokenizer of the weights, which read wrong '
    'tokens at first; name their own, unless the vocabulary is to be replaced',
    path,
    own.source,
  )


def warn_of_other_chats(weights: str, own: Tokenizer, tokenizer: Tokenizer) -> None:
  """Warns if `own`, with which the weights were trained, renders a chat differently than `tokenizer`."""
  chat = [dict(role=role, content=_PROBE) for role in ('user', 'assistant', 'user')]
  if len({t.render_chat(chat, generation_prompt=True)[0] for t in (own, tokenizer) if t.chat_template}) > 1:
    logging.warning(
      'config.data.chat_template: %s was trained with another one, or other template_kwargs, so chats have a form here '
      'that it has not learned; set both as in its training',
      weights,
    )


def identity(source: Source, workdir: epath.PathLike | None, seed: int, here: bool = True) -> list:
  """Returns JSON that identifies the weights, without reading all of them.

  It has names, sizes and samples of the files of a folder, or the checksums of a checkpoint.

  Args:
    here: also includes the shape of the model and the times of the files, which another version of the library, or a
      copy of the files, may change.
  """
  shape = here and dataclasses.asdict(source.config)
  folder = source.checkpoints_in(workdir)
  base = [identity(source.base, workdir, seed, here)] if source.base else []
  if folder is not None:
    with contextlib.closing(Checkpointer(folder)) as checkpointer:
      step = checkpointer.latest() if source.step is None else source.step
    checksums = None
    if coordination.process_index() == 0:  # it writes the file, which others might not see yet
      checksums = (folder / str(step) / 'checksums.json').read_text()
    return [shape, coordination.broadcast(checksums), *base]
  if source.folder is not None:
    return [shape, file_samples(source), here and sorted(int(f.stat().mtime) for f in _files(source)), *base]
  return [shape, seed if source.seed is None else source.seed]


def file_samples(source: Source) -> list[list]:
  """Returns [name, bytes, crc32 of about 64 blocks] of each safetensors file of a folder; [] if there is no folder."""
  samples = []
  for file in _files(source):
    stat, crc = file.stat(), 0
    with file.open('rb') as f:
      for at in range(0, stat.length, max(stat.length // 64, _BLOCK)):  # all blocks of a small file
        f.seek(at)
        crc = zlib.crc32(f.read(_BLOCK), crc)
    samples.append([file.name, stat.length, crc])
  return sorted(samples)


def _files(source: Source) -> list:
  return list(source.folder.glob('*.safetensors')) if source.folder else []
