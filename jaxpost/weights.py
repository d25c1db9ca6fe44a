"""Where the weights of a role come from, and how they get onto the devices.

A source is '' (random), a Hugging Face folder or org/name, RUN[@step] (a
checkpoint of another run) or stage:NAME (an earlier stage of this one).
"""

import dataclasses
import json
import zlib

import jax
import jax.numpy as jnp
from etils import epath

from jaxpost import processes
from jaxpost.checkpoint import Checkpointer
from jaxpost.data import hub
from jaxpost.errors import InputError
from jaxpost.models import hf
from jaxpost.models import model as model_lib
from jaxpost.models.config import ModelConfig
from jaxpost.models.model import Model
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.sharding import Layout

_STAGE = 'stage:'
_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Source:
  """Weights of `config`, found before a device is touched.

  folder: of safetensors. checkpoints: a stage's, of another run. stage: an
  earlier one of this run. None of them: random.
  """

  config: ModelConfig
  folder: epath.Path | None = None
  checkpoints: epath.Path | None = None
  stage: str = ''
  step: int | None = None


def find(text: str, key: str, earlier: dict[str, Source]) -> Source:
  """The source that `text` names; `key` is its config field, for errors.

  `earlier` holds what the stages before this one end with.
  """
  if text.startswith(_STAGE):
    name = text[len(_STAGE):]
    if name not in earlier:
      raise InputError(
          f'{key}: {text!r} is no stage before this one; there is '
          f'{", ".join(earlier) or "none"}')
    return earlier[name]
  local = epath.Path(text.partition('@')[0]).expanduser()
  if (local / 'checkpoints').exists() or local.exists() and '@' in text:
    folder, step = find_run(text, key)
    checkpointer = Checkpointer(folder)
    try:
      meta = checkpointer.restore_meta(step)
    finally:
      checkpointer.close()
    fields = {k: tuple(v) if isinstance(v, list) else v
              for k, v in meta['model'].items()}
    return Source(ModelConfig(**fields), checkpoints=folder, step=step)
  folder, config = open_folder(text, key)
  return Source(config, folder=folder)


def open_folder(text: str, key: str) -> tuple:
  """(folder, ModelConfig) of a Hugging Face folder or org/name."""
  folder = epath.Path(text).expanduser()
  if not folder.exists():
    if not hub.parse(text):
      raise InputError(f'{key}: {text} does not exist')
    repo, revision, file = hub.parse(text)
    folder = epath.Path(hub.download(repo, 'model', revision, file))
  if folder.is_dir() and not (folder / 'config.json').exists():
    raise InputError(
        f'{key}: {text} is neither the folder of a run nor a Hugging Face '
        'folder; it has no config.json')
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
    raise InputError(
        f'{key}: {run_folder} is not the folder of a run (it has no '
        'config.json)')
  folders = [f for f in (root / 'checkpoints').glob('*') if f.is_dir()]
  saved = json.loads((root / 'config.json').read_text())
  order = list(saved.get('stages') or ())
  found = sorted(folders, key=lambda f: order.index(f.name)
                 if f.name in order else -1)
  if not found:
    raise InputError(f'{key}: {run_folder} has no checkpoints')
  return found[-1], int(step) if step else None


def load(source: Source, model: Model, layout: Layout, dtype: str,
         workdir=None, *, seed: int = 0, ledger: Ledger | None = None) -> dict:
  """The parameters as `model` has them, in `layout`."""
  if ledger and ledger.dry:
    return described(model, layout, dtype)
  kind, theirs = jnp.dtype(dtype), model_lib.build(source.config)
  shardings = theirs.shardings(layout)
  folder, step = source.checkpoints, source.step
  if source.stage:
    folder = epath.Path(workdir) / 'checkpoints' / source.stage
  if folder is not None:
    params = read_checkpoint(folder, step, theirs, layout, dtype)
  elif source.folder is not None:
    params = hf.load_params(source.folder, theirs, shardings, kind)
  else:
    params = programs.random_params(theirs, seed, kind, shardings, ledger)
  return model_lib.adopt(params, model, model.shardings(layout), kind)


def described(model: Model, layout: Layout, dtype: str) -> dict:
  """Parameters that a plan stands for: shapes and shardings, no memory."""
  return jax.tree.map(
      lambda s, sharding: jax.ShapeDtypeStruct(
          s, jnp.dtype(dtype), sharding=sharding),
      model.shapes(), model.shardings(layout),
      is_leaf=lambda x: isinstance(x, tuple))


def move(tree, shardings):
  """Device arrays as `shardings` says; of a plan, their descriptions."""
  def place(x, sharding):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
  return jax.tree.map(place, tree, shardings)


def read_checkpoint(folder, step, model: Model, layout: Layout, dtype: str,
                    role='policy', warn=print) -> dict:
  """The parameters of one role in a checkpoint."""
  template = described(model, layout, dtype)
  checkpointer = Checkpointer(folder)
  try:
    return checkpointer.restore_params(
        template, step, at=f'{role}/params', warn=warn)
  finally:
    checkpointer.close()


def identity(source: Source, workdir, seed: int) -> list:
  """What tells these weights from others, without reading them: JSON.

  Files of a folder by name, size, time and samples of what they hold; a
  checkpoint by its checksums.
  """
  shape = dataclasses.asdict(source.config)
  folder = source.checkpoints
  if source.stage:
    folder = epath.Path(workdir) / 'checkpoints' / source.stage
  if folder is not None:
    checkpointer = Checkpointer(folder)
    try:
      step = checkpointer.latest() if source.step is None else source.step
    finally:
      checkpointer.close()
    # Process 0 writes it, and may be about to.
    return [shape, processes.from_first(
        (folder / str(step) / 'checksums.json').read_text()
        if processes.index() == 0 else None)]
  if source.folder is not None:
    return [*outline(source), sorted(
        int(f.stat().mtime) for f in _files(source))]
  return [shape, seed]


def outline(source: Source) -> list:
  """The shape, and samples of the files of a folder, as JSON."""
  return [dataclasses.asdict(source.config), sorted(
      _sampled(f) for f in _files(source))]


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


def check_head(source: Source, scalar_head: bool, key: str):
  """A language model cannot go on from a reward model."""
  if source.config.num_labels and not scalar_head:
    raise InputError(
        f'{key}: these weights are of a reward model, which has no head for '
        'tokens; start from a language model (stage:NAME names an earlier '
        'stage)')
