"""Where the weights of a role come from, and how they get onto the devices.

A source is '' (random), a Hugging Face folder or org/name, RUN[@step] (a
checkpoint of another run) or stage:NAME (an earlier stage of this one). A PEFT
folder, and a checkpoint of a run that froze parameters, hold some leaves; the
others come from the source that is their base.
"""

import contextlib
import dataclasses
import functools
import json
import zlib

import jax
import jax.numpy as jnp
from etils import epath

from jaxpost import cache, processes, store
from jaxpost.checkpoint import Checkpointer, finished_steps
from jaxpost.data import hub
from jaxpost.errors import InputError
from jaxpost.models import config as model_config
from jaxpost.models import hf, lora, peft, quantised
from jaxpost.models import model as model_lib
from jaxpost.models.config import ModelConfig
from jaxpost.models.model import Model
from jaxpost.models.table import join, nest
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
  store.check(text.partition('@')[0], key)
  local = epath.Path(text.partition('@')[0]).expanduser()
  if (local / 'checkpoints').exists() or local.exists() and '@' in text:
    return of_checkpoint(*find_run(text, key))
  if (local / peft.CONFIG).exists() and not (local / 'config.json').exists():
    base = peft.base_of(local)
    return with_adapter(text, find(base, f'{key}: base of {text}', earlier))
  folder, config = open_folder(text, key)
  there = epath.Path(text).expanduser().exists()
  return Source(config, folder=folder,
                name=store.resolved(folder) if there else text)


def own(code: str, path: str) -> Source:
  """Weights of the model that ./file.py:function makes, of a folder or random.
  """
  model = model_lib.from_code(code)
  if not path:
    return Source(model.config)
  folder = epath.Path(path).expanduser()
  if not folder.is_dir():
    raise InputError(f'config.model.path: {path} is no folder; a model of '
                     'your own reads what was exported from it')
  hf.check(folder, model.config, model.table)
  return Source(model.config, folder=folder, name=store.resolved(folder))


def of_checkpoint(folder, step=None) -> Source:
  """The checkpoint of a stage in the folder of its checkpoints."""
  meta = _read_meta(folder, step)
  config = model_config.from_json(meta['model'])
  return Source(config, checkpoints=folder, step=step,
                base=_recall(meta.get('base'), folder.parent))


def with_adapter(path: str, source: Source) -> Source:
  """`source` with the adapter of a PEFT folder on it; as it is without."""
  if not path:
    return source
  config = source.config
  if peft.is_judge(path) and not config.num_labels:
    config = model_lib.with_scalar_head(config)
  spec = peft.read_spec(path, config)
  return Source(dataclasses.replace(config, lora=spec),
                folder=epath.Path(path).expanduser(), base=source)


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
  seed = seed if source.seed is None else source.seed
  theirs = below = lora.build(source.config)
  # An adapter is put on merged weights, whatever else has been put on them.
  if source.folder and source.base:
    below = theirs.base
  if source.config.lora in ((), model.config.lora):  # else they are merged
    theirs, below = (quantised.hold(m, model.quantised) for m in (
        theirs, below))
  params = source.base and load(
      source.base, below, layout, dtype, workdir, seed=seed, ledger=ledger)
  params = join(params or {}, _own(
      source, theirs, layout, dtype, workdir, seed, ledger))
  return lora.adopt(params, theirs, model, layout, jnp.dtype(dtype), seed)


def is_beside(source: Source, p) -> bool:
  """Whether it is an adapter folder on the very leaves that the policy of the
  stage `p` (build.Prepared) leaves as they are."""
  below = lambda s: s.base if s.folder and s.base else s
  policy, base = p.sources['policy'], below(source)
  other = below(policy)
  if base is source or not base.name or base.config.lora or (
      (base.name, base.config) != (other.name, other.config)) or (
          policy.config.lora not in ((), p.model.config.lora)):
    return False
  shared = lora.on_frozen(source.config, p.model.quantised).frozen
  return shared <= p.model.frozen


def load_beside(source: Source, p, params, layout: Layout, ledger) -> tuple:
  """(model, its own leaves, those that it shares with the policy)."""
  model = lora.on_frozen(source.config, p.model.quantised)
  return (model, load_adapter(source, model, layout, ledger),
          lora.split(params, p.model)[1])


def load_adapter(source: Source, model: Model, layout: Layout, ledger) -> dict:
  """The leaves of an adapter folder by themselves."""
  part = lora.trained(model)
  if ledger and ledger.dry:
    return described(part, layout, 'float32')
  return peft.load(
      source.folder, model, part.shardings(layout), programs.write)


def _own(source, model: Model, layout, dtype, workdir, seed, ledger) -> dict:
  """The leaves that a source has without its base."""
  shardings, folder = model.shardings(layout), _checkpoints(source, workdir)
  keep = functools.partial(quantised.convert, model=model)
  plain = lora.build(source.config)  # which is what is stored
  if folder is not None:
    return keep(read_checkpoint(folder, source.step, plain, layout, dtype,
                                partial=source.base is not None))
  if source.base is not None:
    return peft.load(source.folder, model, shardings, programs.write)
  if source.folder is not None:  # one by one, so that all are never whole
    return hf.load_params(
        source.folder, plain, plain.shardings(layout), jnp.dtype(dtype), keep,
        programs.write)
  return programs.random_params(
      model, seed, jnp.dtype(dtype), shardings, ledger or Ledger())


def _checkpoints(source: Source, workdir):
  """The folder of checkpoints that a source is in, or None."""
  return epath.Path(workdir) / 'checkpoints' / source.stage if (
      source.stage) else source.checkpoints


def described(model: Model, layout: Layout, dtype: str, keep=None) -> dict:
  """Shapes and shardings of parameters, no memory; of the paths in `keep`."""
  return nest({
      path: jax.ShapeDtypeStruct(
          spec.shape, jnp.dtype(spec.dtype or dtype),
          sharding=layout.sharding(spec.axes, spec.shape))
      for path, spec in model.table.items() if keep is None or path in keep})


def move(tree, shardings):
  """Device arrays as `shardings` says; of a plan, their descriptions."""
  def place(x, sharding):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
  return jax.tree.map(place, tree, shardings)


def read_checkpoint(folder, step, model: Model, layout: Layout, dtype: str,
                    role='policy', warn=print, partial=False) -> dict:
  """The parameters of one role in a checkpoint; if `partial`, those in it."""
  checkpointer, at = Checkpointer(folder), f'{role}/params'
  try:
    template = described(model, layout, dtype, {
        leaf.removeprefix(f'{at}/') for leaf in checkpointer.leaves(step)
    } if partial else None)
    return checkpointer.restore_params(template, step, at=at, warn=warn)
  finally:
    checkpointer.close()


def record(source: Source, workdir, seed: int) -> dict:
  """What finds these weights again, and knows them, as JSON."""
  path = lambda x: x and store.resolved(x)
  return dict(
      config=dataclasses.asdict(source.config), folder=path(source.folder),
      checkpoints=path(source.checkpoints), stage=source.stage,
      step=source.step, seed=seed if source.seed is None else source.seed,
      name=source.name, base=source.base and record(source.base, workdir, seed),
      fingerprint=_fingerprint(source, workdir, seed))


def _fingerprint(source: Source, workdir, seed) -> str:
  return cache.fingerprint(identity(source, workdir, seed, here=False))


def _recall(saved: dict | None, checkpoints) -> Source | None:
  """The source of a record in a run whose checkpoints are in this folder."""
  if saved is None:
    return None
  folder, made = saved['folder'], saved['checkpoints']
  made = checkpoints / saved['stage'] if saved['stage'] else made
  source = Source(
      model_config.from_json(saved['config']), folder and epath.Path(folder),
      made and epath.Path(made), '', saved['step'], saved['seed'],
      saved['name'], _recall(saved['base'], checkpoints))
  place = folder or made
  if place and not epath.Path(place).exists() or (
      _fingerprint(source, None, 0) != saved['fingerprint']):
    raise InputError(
        f'{place}: is gone or has changed, and {checkpoints} holds what was '
        'trained on top of these weights only; bring them back')
  return source


def make_meta(p, workdir) -> dict:
  """What is kept in each checkpoint of the stage `p` (build.Prepared).

  InputError where the weights below those that are trained have changed since
  the stage began.
  """
  meta = dict(model=dataclasses.asdict(p.model.config))
  if p.model.frozen:
    saved = saved_meta(p, workdir)
    base = record(p.sources['policy'], workdir, p.config.seed)
    if saved and saved['base']['fingerprint'] != base['fingerprint']:
      raise InputError(
          f'{base["folder"] or base["checkpoints"] or base["stage"]}: these '
          f'weights have changed since {p.name} of {workdir} was made on top '
          'of them; bring the old ones back or choose another --workdir')
    meta['base'] = base
  return meta


def saved_meta(p, workdir) -> dict | None:
  """That of the newest checkpoint of the stage `p`."""
  folder = epath.Path(workdir) / 'checkpoints' / p.name
  if not finished_steps(folder):
    return None
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    return checkpointer.newest_meta()


def outcome(p) -> Source:
  """The weights that the stage `p` ends with."""
  return Source(
      p.model.config, stage=p.name, step=p.config.train.steps,
      seed=p.config.seed, base=p.sources['policy'] if p.model.frozen else None)


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
  shape, folder = here and dataclasses.asdict(source.config), (
      _checkpoints(source, workdir))
  base = [identity(source.base, workdir, seed, here)] if source.base else []
  if folder is not None:
    checkpointer = Checkpointer(folder)
    try:
      step = checkpointer.latest() if source.step is None else source.step
    finally:
      checkpointer.close()
    # Process 0 writes it, and may be about to.
    return [shape, processes.from_first(
        (folder / str(step) / 'checksums.json').read_text()
        if processes.index() == 0 else None), *base]
  if source.folder is not None:
    return [shape, _samples(source), here and sorted(
        int(f.stat().mtime) for f in _files(source)), *base]
  return [shape, seed if source.seed is None else source.seed]


def outline(source: Source) -> list:
  """The shape, and samples of the files of a folder, as JSON."""
  return [dataclasses.asdict(source.config), _samples(source),
          source.base and outline(source.base)]


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


def check_head(source: Source, scalar_head: bool, key: str):
  """A language model cannot go on from a reward model."""
  if source.config.num_labels and not scalar_head:
    raise InputError(
        f'{key}: these weights are of a reward model, which has no head for '
        'tokens; start from a language model (stage:NAME names an earlier '
        'stage)')
