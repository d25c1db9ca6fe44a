"""Config -> everything about a stage that needs no device.

Data, tokenizer, headers of model files and reward functions are looked at for
every stage before the first one starts, so that a mistake in the last one is
found in seconds. `assemble.py` then puts a stage on the devices.
"""

import dataclasses
import functools
import importlib
import math

import ml_collections
from etils import epath

from jaxpost import config as config_lib
from jaxpost import optim, sharding
from jaxpost.data import chat, hub, loader, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.models import families, hf
from jaxpost.models import model as model_lib

_CHECKED = 20_000  # documents tokenised (and so checked) before step 0
_ALGORITHMS = ('sft', 'grpo')
_PARTS = ('ON_POLICY', 'make_objective', 'check_first_step')  # of all of them


@dataclasses.dataclass
class Prepared:
  """A stage after everything that needs no device."""

  name: str
  config: config_lib.Config
  algorithm: object  # module of jaxpost/algorithms, or the user's
  folder: epath.Path | None  # of the model's weights
  model: model_lib.Model
  tokenizer: tokenizer_lib.Tokenizer
  rows: sources.Rows
  stream: object  # PackedStream or PromptStream
  eval_rows: sources.Rows | None
  pool: object = None  # RewardPool
  eval_examples: tuple = ()  # whose loss is evaluated
  eval_prompts: tuple = ()  # whose completions are


def as_dict(config) -> dict:
  """A ConfigDict, a dict or a Config as nested dicts."""
  if isinstance(config, ml_collections.ConfigDict):
    return config.to_dict()
  if dataclasses.is_dataclass(config):
    return dataclasses.asdict(config)
  return dict(config)


def prepare_all(config: dict) -> list[Prepared]:
  stages = config_lib.parse(config)
  prepared = []
  try:
    for name, stage in stages.items():
      prepared.append(prepare(name, stage))
  except BaseException:
    for p in prepared:
      if p.pool:
        p.pool.close()
    raise
  return prepared


def prepare(name: str, config: config_lib.Config) -> Prepared:
  """Everything about a stage that can be known without a device."""
  algorithm = load_algorithm(config.algorithm)
  optim.check(config.optim.name, config.optim.weight_decay)
  for phase, text in vars(config.mesh).items():
    sharding.mesh_sizes(text, f'config.mesh.{phase}')
  if config.save.keep_best and not config.eval.data.path:
    raise InputError('config.save.keep_best: nothing is evaluated; set '
                     'config.eval.data.path')
  if not config.data.path:
    raise InputError('config.data.path: is empty; name a file, a folder, '
                     'org/name or generated:arithmetic')
  folder, model_config = model_files(config.model)
  tokenizer = load_tokenizer(config.model, folder)
  if tokenizer.vocab_size > model_config.padded_vocab_size:
    raise InputError(
        f'tokenizer {tokenizer.source}: {tokenizer.vocab_size} tokens are more '
        f'than the {model_config.vocab_size} rows of the embedding of '
        f'{folder or config.model.preset}')
  rows = read_rows(config, config.data.path)
  evals = config.eval.data.path
  out = Prepared(
      name, config, algorithm, folder, model_lib.build(model_config),
      tokenizer, rows, None, read_rows(config, evals) if evals else None)
  samples = algorithm.ON_POLICY or (evals and config.eval.samples)
  out.stream = prompt_stream(out) if algorithm.ON_POLICY else row_stream(out)
  if out.eval_rows is not None:
    prepare_evaluation(out)
  if samples:
    check_sampling(config, algorithm.ON_POLICY)
    out.pool = reward_pool(config, rows)
  return out


def load_algorithm(name: str):
  """`sft` -> jaxpost.algorithms.sft; `my.module` -> itself."""
  path = name if '.' in name else f'jaxpost.algorithms.{name}'
  try:
    module = importlib.import_module(path)
  except ModuleNotFoundError as e:
    if e.name and not path.startswith(e.name):
      raise
    raise InputError(
        f'config.algorithm: there is no {name!r}; built in: '
        f'{", ".join(_ALGORITHMS)}, or the path of a module of yours'
    ) from None
  missing = [n for n in _PARTS if n not in vars(module)]
  if missing:
    raise InputError(
        f'config.algorithm: {path} is no algorithm, it lacks {missing[0]}; it '
        f'must have {", ".join(_PARTS)}')
  return module


def model_files(section) -> tuple:
  """(folder or None, ModelConfig) of `config.model`."""
  if not section.path:
    if section.preset not in families.PRESETS:
      raise InputError(
          f'config.model.preset: no shape is called {section.preset!r}; '
          f'known: {", ".join(families.PRESETS)}')
    return None, families.PRESETS[section.preset]
  folder = epath.Path(section.path).expanduser()
  if not folder.exists():
    if not hub.parse(section.path):
      raise InputError(f'config.model.path: {section.path} does not exist')
    repo, revision, file = hub.parse(section.path)
    folder = epath.Path(hub.download(repo, 'model', revision, file))
  cfg = hf.read_config(folder)
  hf.check(folder, cfg)
  return folder, cfg


def load_tokenizer(section, folder):
  return tokenizer_lib.load(section.tokenizer or (
      str(folder) if folder else 'bytes'))


def read_rows(config, path: str):
  data = config.data
  return sources.read(path, data.columns, data.map or None)


def row_stream(p: Prepared):
  """The packed rows of a data set."""
  config, train = p.config, p.config.train
  render = functools.partial(render_row, p.rows, p.tokenizer, config.data)
  ready = [render(i) for i in range(min(len(p.rows), _CHECKED))]
  stream = loader.PackedStream(
      lambda i: ready[i] if i < len(ready) else render(i), len(p.rows),
      batch_size=train.batch_size, row_length=row_length(config, False),
      seed=config.seed, shuffle=config.data.shuffle,
      packing=config.data.packing, overlong=config.data.overlong,
      where=p.rows.where)
  begin = stream.state()
  next(stream)  # says so now if no row can be made
  stream.restore(begin)
  return stream


def prepare_evaluation(p: Prepared):
  """The held-out documents and prompts."""
  rows, e = p.eval_rows, p.config.eval
  count = min(len(rows), e.size)
  if not p.algorithm.ON_POLICY:
    p.eval_examples = tuple(
        render_row(rows, p.tokenizer, p.config.data, i) for i in range(count))
  if e.samples:
    prompts = prompt_stream(p, rows, count, shuffle=False)
    p.eval_prompts = tuple(
        prompts.prompt(i) for i in range(min(count, len(prompts))))


def render_row(rows, tokenizer, data, i):
  return chat.render(tokenizer, rows[i], rows.where(i), train_on=data.train_on)


def prompt_stream(p: Prepared, rows=None, per_step=0, shuffle=True):
  from jaxpost.data.prompts import PromptStream
  rollout = p.config.rollout
  return PromptStream(
      rows or p.rows, p.tokenizer, per_step=per_step or rollout.prompts,
      max_prompt_length=rollout.max_prompt_length, seed=p.config.seed,
      shuffle=shuffle, system_prompt=p.config.data.system_prompt)


def reward_pool(config, rows):
  from jaxpost.rewards.pool import RewardPool
  pool = RewardPool(
      config.rewards_tuple(), weights=config.reward_weights or None,
      workers=config.rewards.workers, timeout_s=config.rewards.timeout_s,
      max_failed=config.rewards.max_failed)
  try:
    pool.check(list(rows[0]))
  except BaseException:
    pool.close()
    raise
  return pool


def check_sampling(config, on_policy: bool):
  if not config.rewards_tuple():
    raise InputError(
        'config.reward: is empty; name a built-in reward, pkg.module:fn or '
        './file.py:fn')
  if on_policy and config.rollout.group_size < 2:
    raise InputError(
        'config.rollout.group_size: 1 sample has nothing to be compared '
        'with; use at least 2')
  length = row_length(config, True)
  needed = config.rollout.max_prompt_length + config.rollout.max_new_tokens
  if on_policy and length < needed:
    raise InputError(
        f'config.train.row_length: {length} is less than max_prompt_length + '
        f'max_new_tokens = {needed}; raise it or leave it 0')


def row_length(config, on_policy: bool) -> int:
  if config.train.row_length:
    return config.train.row_length
  if on_policy:
    return config.rollout.max_prompt_length + config.rollout.max_new_tokens
  return 512


def batch_shape(config, on_policy: bool, shards: int) -> tuple[int, int, int]:
  """(rows of an update, rows at a time, tokens a row), fixed for the run."""
  length = row_length(config, on_policy)
  rows, micro = config.train.batch_size, config.train.micro_batch_size
  if on_policy:
    r = config.rollout
    a_row = max(1, length // (r.max_prompt_length + r.max_new_tokens))
    rows = math.ceil(r.prompts * r.group_size / a_row)
    micro = micro or min(
        math.ceil(rows / shards), max(1, 8192 // length)) * shards
  micro = micro or rows
  if micro % shards:
    raise InputError(
        f'config.train: {micro} rows at a time do not split over {shards} '
        f'batch shards of config.mesh.train; use a multiple of {shards}')
  return math.ceil(rows / micro) * micro, micro, length
