"""The schema of a run: every field, its type, range, default and meaning.

`defaults()` gives the nested dict that config files start from; `parse()`
turns what a user wrote into one frozen `Config` per stage, or raises
InputError naming the key, the value and the fix. Nothing below `build` reads
a config.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxpost.errors import InputError


def _f(default, help_, *, lo=None, hi=None, choices=None, each=None):
  """A field with its help text and what values it may take.

  `each` is the type of the members of a tuple.
  """
  return dataclasses.field(default=default, metadata=dict(
      help=help_, lo=lo, hi=hi, choices=choices, each=each))


@dataclasses.dataclass(frozen=True)
class ModelSection:
  path: str = _f('', 'Hugging Face folder or org/name[@revision]; "" starts '
                 'from random weights of `preset`')
  preset: str = _f('tiny', 'shape of a random model (models/families.py)')
  tokenizer: str = _f('', 'folder or "bytes"; "" means the one in `path`, or '
                      '"bytes" for a random model')
  dtype: str = _f('bfloat16', 'operands of matrix products; float32 is exact',
                  choices=('bfloat16', 'float32'))
  param_dtype: str = _f('float32', 'master weights',
                        choices=('float32', 'bfloat16'))
  remat: str = _f('none', 'what the backward pass recomputes',
                  choices=('none', 'dots', 'full'))


@dataclasses.dataclass(frozen=True)
class DataSection:
  path: str = _f('', 'file, folder, org/name[@revision] or generated:NAME')
  columns: str = _f('', 'renames columns: "prompt=question,completion=answer"')
  map: str = _f('', 'pkg.module:fn or ./file.py:fn applied to each row')
  shuffle: bool = _f(True, 'another order each epoch')
  packing: bool = _f(True, 'several documents a row, isolated')
  overlong: str = _f('truncate', 'documents longer than a row (counted)',
                     choices=('truncate', 'drop', 'error'))
  train_on: str = _f('assistant', 'tokens that are trained',
                     choices=('assistant', 'completion', 'all'))
  system_prompt: str = _f('', 'put before each conversation of an RL run')


@dataclasses.dataclass(frozen=True)
class TrainSection:
  steps: int = _f(100, 'updates of this stage', lo=1)
  batch_size: int = _f(8, 'rows of an update (SFT)', lo=1)
  row_length: int = _f(0, 'tokens of a row; 0: 512 for data, the longest '
                       'prompt and completion for rollouts', lo=0)
  micro_batch_size: int = _f(0, 'rows at a time; 0: all for data, about 8,192 '
                             'tokens a device for rollouts', lo=0)


@dataclasses.dataclass(frozen=True)
class OptimSection:
  name: str = _f('adamw', 'any optimizer of optax')
  lr: float = _f(1e-5, 'peak learning rate', lo=0.0)
  schedule: str = _f('constant', 'after the warm-up',
                     choices=('constant', 'linear', 'cosine'))
  warmup_steps: int = _f(0, 'steps from lr / warmup_steps to lr', lo=0)
  end_lr: float = _f(0.0, 'where linear and cosine end', lo=0.0)
  weight_decay: float = _f(0.0, 'of matrices and embeddings', lo=0.0)
  b1: float = _f(0.9, 'Adam', lo=0.0, hi=1.0)
  b2: float = _f(0.999, 'Adam', lo=0.0, hi=1.0)
  eps: float = _f(1e-8, 'Adam', lo=0.0)
  clip_norm: float = _f(1.0, 'global norm of the gradient', lo=0.0)
  max_skipped: int = _f(5, 'steps in a row with a gradient that is not finite '
                        'before the run stops', lo=1)


@dataclasses.dataclass(frozen=True)
class RolloutSection:
  prompts: int = _f(8, 'prompts a step', lo=1)
  group_size: int = _f(8, 'completions a prompt', lo=1)
  max_prompt_length: int = _f(512, 'longer prompts are left out, counted',
                              lo=1)
  max_new_tokens: int = _f(128, 'of a completion, stop token included', lo=1)
  temperature: float = _f(1.0, 'of sampling and of all log-probs', lo=1e-3)
  top_k: int = _f(0, '0 is off', lo=0)
  top_p: float = _f(1.0, '1 is off', lo=1e-6, hi=1.0)
  slots: int = _f(0, 'sequences in flight; 0: all of a step', lo=0)
  block: int = _f(16, 'tokens of every slot per dispatch', lo=1)


@dataclasses.dataclass(frozen=True)
class RlSection:
  kl_coef: float = _f(0.0, 'weight of the k3 KL to the reference', lo=0.0)
  clip_low: float = _f(0.2, 'ratio clipped at 1 - clip_low', lo=0.0, hi=1.0)
  clip_high: float = _f(0.2, 'ratio clipped at 1 + clip_high', lo=0.0)
  scale_rewards: bool = _f(True, 'divide by the std of the group; False is '
                           'Dr. GRPO')
  entropy_coef: float = _f(0.0, 'entropy bonus', lo=0.0)
  updates_per_rollout: int = _f(1, 'passes over a rollout', lo=1)


@dataclasses.dataclass(frozen=True)
class RewardSection:
  timeout_s: float = _f(30.0, 'for one group in one function', lo=0.01)
  workers: int = _f(2, 'processes that grade', lo=1)
  max_failed: float = _f(0.25, 'share of failed groups that stops the run',
                         lo=0.0, hi=1.0)


@dataclasses.dataclass(frozen=True)
class MeshSection:
  train: str = _f('fsdp=-1', 'sizes of data, fsdp, tensor; -1: the rest')
  rollout: str = _f('data=-1', 'same devices, another shape')


@dataclasses.dataclass(frozen=True)
class EvalDataSection:
  path: str = _f('', 'held-out data; "" evaluates nothing')


@dataclasses.dataclass(frozen=True)
class EvalSection:
  every: int = _f(0, 'steps; 0: at the end only', lo=0)
  size: int = _f(256, 'rows at most', lo=1)
  samples: int = _f(0, 'completions a prompt for pass@k; 0: loss only', lo=0)
  temperature: float = _f(1.0, 'of those completions; 0 is greedy', lo=0.0)
  pass_reward: float = _f(1.0, 'a completion with this reward has passed')
  data: EvalDataSection = EvalDataSection()


@dataclasses.dataclass(frozen=True)
class SaveSection:
  every: int = _f(0, 'steps; 0: at the end only', lo=0)
  keep: int = _f(2, 'newest checkpoints that stay', lo=1)
  keep_best: str = _f('', 'also the best by this metric of evaluation')
  best_mode: str = _f('max', 'of keep_best', choices=('max', 'min'))
  export: bool = _f(True, 'write export/ when the last stage ends')


@dataclasses.dataclass(frozen=True)
class LogSection:
  every: int = _f(10, 'steps between console lines without a terminal', lo=1)
  samples_every: int = _f(10, 'steps between samples/*.jsonl', lo=1)
  tensorboard: bool = _f(True, '')
  wandb: bool = _f(False, '')
  watchdog_s: float = _f(1800.0, 'a step that takes longer ends the process '
                         'with all stacks; 0 is off', lo=0.0)


@dataclasses.dataclass(frozen=True)
class Config:
  """One stage of a run, complete."""

  seed: int = _f(0, 'decides weights, data order and draws', lo=0)
  algorithm: str = _f('sft', 'a module of jaxpost/algorithms, or pkg.module')
  stages: tuple = _f((), 'names of blocks that override this one, in order',
                     each=str)
  init_from: str = _f('', 'RUN[@step]: start from the weights of another run')
  reward: Any = _f('', 'built-in name, pkg.module:fn or ./file.py:fn; several '
                   'as a tuple or with commas')
  reward_weights: tuple = _f((), 'one per reward; () is 1 each', each=float)
  model: ModelSection = ModelSection()
  data: DataSection = DataSection()
  train: TrainSection = TrainSection()
  optim: OptimSection = OptimSection()
  rollout: RolloutSection = RolloutSection()
  rl: RlSection = RlSection()
  rewards: RewardSection = RewardSection()
  mesh: MeshSection = MeshSection()
  eval: EvalSection = EvalSection()
  save: SaveSection = SaveSection()
  log: LogSection = LogSection()

  def rewards_tuple(self) -> tuple:
    """The reward functions, however they were written."""
    if isinstance(self.reward, str):
      return tuple(r.strip() for r in self.reward.split(',') if r.strip())
    return tuple(self.reward) if isinstance(
        self.reward, (tuple, list)) else (self.reward,)


def defaults() -> dict:
  """Every field at its default, as nested dicts: where config files start."""
  return dataclasses.asdict(Config())


def parse(config: Mapping) -> dict[str, Config]:
  """{stage name: Config}, in order; a run without `stages` has one."""
  config = dict(config)
  names = _check('config.stages', config.get('stages') or (), tuple,
                 Config.__dataclass_fields__['stages'].metadata)
  blocks = {k: v for k, v in config.items()
            if k not in _FIELDS and isinstance(v, Mapping)}
  for name in names:
    if name in _FIELDS:
      raise InputError(f'config.stages: {name!r} is a field of every config; '
                       'give the stage another name')
    if name not in blocks:
      raise InputError(f'config.stages: there is no block config.{name}; '
                       f'blocks: {", ".join(blocks) or "none"}')
  if names:  # a block that no stage names may wait for its turn
    config = {k: v for k, v in config.items() if k not in blocks}
  base = _build(Config, config, 'config')
  if not names:
    return {base.algorithm.rpartition('.')[2]: base}
  plain = dataclasses.asdict(base)
  stages = {}
  for name, block in blocks.items():
    _build(Config, block, f'config.{name}')  # names the block in its errors
    stages[name] = _build(Config, _merge(plain, block), 'config')
  return {name: stages[name] for name in names}


_FIELDS = frozenset(f.name for f in dataclasses.fields(Config))


def _merge(base: Mapping, over: Mapping) -> dict:
  """`over` on top of `base`, block by block."""
  out = dict(base)
  for key, value in over.items():
    nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
    out[key] = _merge(out[key], value) if nested else value
  return out


def _build(kind, values: Mapping, where: str):
  """A dataclass from a mapping, checked field by field."""
  fields = {f.name: f for f in dataclasses.fields(kind)}
  for key in values:
    if key not in fields:
      near = difflib.get_close_matches(key, fields, 1)
      hint = f'did you mean {where}.{near[0]}?' if near else (
          f'known: {", ".join(fields)}')
      raise InputError(f'{where}.{key}: unknown key; {hint}')
  hints = typing.get_type_hints(kind)
  out = {}
  for key, value in values.items():
    name, field = f'{where}.{key}', fields[key]
    if dataclasses.is_dataclass(hints[key]):
      if not isinstance(value, Mapping):
        raise InputError(f'{name}: want a block of fields, got {value!r}')
      out[key] = _build(hints[key], value, name)
    else:
      out[key] = _check(name, value, hints[key], field.metadata)
  return kind(**out)


def _check(name: str, value, kind, meta: types.MappingProxyType):
  """The value as the type of its field, inside its range."""
  if kind is Any:
    return value
  if kind is float and type(value) is int:
    value = float(value)
  if kind is tuple and isinstance(value, list):
    value = tuple(value)
  if type(value) is not kind:
    raise InputError(
        f'{name}: want {kind.__name__}, got {value!r} '
        f'({type(value).__name__})')
  if kind is tuple:
    limits = {**meta, 'each': None}
    return tuple(_check(f'{name}[{i}]', x, meta['each'], limits)
                 for i, x in enumerate(value))
  if kind is float and not math.isfinite(value):
    raise InputError(f'{name}: {value!r} is not a finite number')
  if meta['choices'] and value not in meta['choices']:
    near = difflib.get_close_matches(str(value), meta['choices'], 1)
    raise InputError(
        f'{name}: {value!r} is not one of {", ".join(meta["choices"])}' +
        (f'; did you mean {near[0]!r}?' if near else ''))
  if meta['lo'] is not None and value < meta['lo']:
    raise InputError(f'{name}: {value!r} is below {meta["lo"]!r}')
  if meta['hi'] is not None and value > meta['hi']:
    raise InputError(f'{name}: {value!r} is above {meta["hi"]!r}')
  return value


def parse_arg(arg: str | None, **options):
  """Reads what follows the colon of `--config=x.py:model=xs,runlocal`.

  `options` are the names a config file knows and their defaults; a bare name
  means True. Returns an object with these attributes.
  """
  values = dict(options)
  for item in filter(None, (arg or '').split(',')):
    name, has_value, value = item.partition('=')
    if name not in options:
      near = difflib.get_close_matches(name, options, 1)
      raise InputError(
          f'--config: no argument {name!r}; ' + (
              f'did you mean {near[0]!r}?' if near else
              f'known: {", ".join(options)}'))
    kind = type(options[name])
    if kind is bool:
      value = value if has_value else 'true'
      if value.lower() not in ('true', 'false', '1', '0'):
        raise InputError(f'--config: {name}={value} must be true or false')
      values[name] = value.lower() in ('true', '1')
    else:
      try:
        values[name] = kind(value)
      except ValueError:
        raise InputError(
            f'--config: {name}={value!r} is no {kind.__name__}') from None
  return types.SimpleNamespace(**values)
