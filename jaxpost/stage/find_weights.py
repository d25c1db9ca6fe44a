"""TODO."""

import contextlib
import dataclasses
import json

from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import hf, peft
from jaxpost.models import config as model_config
from jaxpost.models import model as model_lib
from jaxpost.stage.sources import Source, recall
from jaxpost.storage import hub, object_store
from jaxpost.storage.checkpoint import Checkpointer

_STAGE = 'stage:'


def find(text: str, key: str, earlier: dict[str, Source]) -> Source:
  """The source that `text` names; `key` is its config field, for errors.

  `earlier` holds what the stages before this one end with.
  """
  if text.startswith(_STAGE):
    name = text[len(_STAGE) :]
    if name not in earlier:
      raise InputError(f'{key}: {text!r} is no stage before this one; there is {", ".join(earlier) or "none"}')
    return earlier[name]
  object_store.check(text.partition('@')[0], key)
  local = epath.Path(text.partition('@')[0]).expanduser()
  if (local / 'checkpoints').exists() or local.exists() and '@' in text:
    return of_checkpoint(*find_run(text, key))
  if (local / peft.CONFIG).exists() and not (local / 'config.json').exists():
    base = peft.base_of(local)
    return with_adapter(text, find(base, f'{key}: base of {text}', earlier))
  folder, config = open_folder(text, key)
  there = epath.Path(text).expanduser().exists()
  return Source(config, folder=folder, name=object_store.resolved(folder) if there else text)


def of_code(code: str, path: str) -> Source:
  """Finds the weights of the custom model that ./file.py:function makes: in a folder, or random."""
  model = model_lib.from_code(code)
  if not path:
    return Source(model.config)
  folder = epath.Path(path).expanduser()
  if not folder.is_dir():
    raise InputError(f'config.model.path: {path} is no folder; a model of your own reads what was exported from it')
  hf.check(folder, model.config, model.table)
  return Source(model.config, folder=folder, name=object_store.resolved(folder))


def of_checkpoint(folder, step=None) -> Source:
  """The checkpoint of a stage in the folder of its checkpoints."""
  meta = _read_meta(folder, step)
  config = model_config.from_json(meta['model'])
  return Source(config, checkpoints=folder, step=step, base=recall(meta.get('base'), folder.parent))


def with_adapter(path: str, source: Source) -> Source:
  """`source` with the adapter of a PEFT folder on it; as it is without."""
  if not path:
    return source
  config = source.config
  if peft.is_judge(path) and not config.num_labels:
    config = model_lib.with_scalar_head(config)
  spec = peft.read_spec(path, config)
  return Source(dataclasses.replace(config, lora=spec), folder=epath.Path(path).expanduser(), base=source)


def _read_meta(folder, step):
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    return checkpointer.restore_meta(step)


def open_folder(text: str, key: str) -> tuple:
  """(folder, ModelConfig) of a Hugging Face folder or org/name."""
  folder = epath.Path(text).expanduser()
  if not folder.exists():
    if not hub.parse(text):
      raise InputError(f'{key}: {text} does not exist')
    repo, revision, file = hub.parse(text)
    folder = epath.Path(hub.download(repo, 'model', revision, file))
  if folder.is_dir() and not (folder / 'config.json').exists():
    raise InputError(f'{key}: {text} is neither the folder of a run nor a Hugging Face folder; it has no config.json')
  config = hf.read_config(folder)
  hf.check(folder, config)
  return folder, config


def find_run(text: str, key: str) -> tuple:
  """RUN[@step] -> (folder of its last stage's checkpoints, step or None)."""
  run_folder, _, step = text.partition('@')
  if step and not step.isdigit():
    raise InputError(f'{key}: {step!r} in {text!r} is no step')
  root = epath.Path(run_folder).expanduser()
  if not (root / 'config.json').exists():
    raise InputError(f'{key}: {run_folder} is not the folder of a run (it has no config.json)')
  folders = [f for f in (root / 'checkpoints').glob('*') if f.is_dir()]
  saved = json.loads((root / 'config.json').read_text())
  order = list(saved.get('stages') or ())
  found = sorted(folders, key=lambda f: order.index(f.name) if f.name in order else -1)
  if not found:
    raise InputError(f'{key}: {run_folder} has no checkpoints')
  return found[-1], int(step) if step else None


def check_head(source: Source, scalar_head: bool, key: str):
  """A language model cannot go on from a reward model."""
  if source.config.num_labels and not scalar_head:
    raise InputError(
      f'{key}: these weights are of a reward model, which has no head for '
      'tokens; start from a language model (stage:NAME names an earlier '
      'stage)'
    )
