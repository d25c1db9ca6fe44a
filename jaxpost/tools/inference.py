"""Loads, exports and evaluates trained weights without the run that trained them.

Model and tokenizer come from a run's config.json or from a Hugging Face folder. Data, rewards and the mesh of the run
are not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from jaxpost.data import source_files, sources
from jaxpost.distributed.mesh import Layout
from jaxpost.distributed.phases import make_layout
from jaxpost.errors import InputError, NoCheckpointError
from jaxpost.models import model as model_lib
from jaxpost.models.parameters import join
from jaxpost.roles import Policy, Roles
from jaxpost.stage import (
  algorithms,
  assemble,
  checks,
  frozen_roles,
  on_policy,
  place,
  prepare,
  sampling_inputs,
  schema,
  weight_sources,
)
from jaxpost.stage import config as config_lib
from jaxpost.stage import export as export_lib
from jaxpost.stage import load_weights as weights_lib
from jaxpost.stage.records import Data, Inputs, PreparedStage, Source, Workers
from jaxpost.storage import object_store, seals
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps
from jaxpost.tools import best_step, chosen_template
from jaxpost.tools.working import working
from jaxpost.types import Batch, TrainState

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm


def to_stderr(line: str) -> None:
  """Prints a line on stderr."""
  print(line, file=sys.stderr)


@dataclasses.dataclass
class Weights:
  """Parameters, and what is needed to use them.

  inputs: model, tokenizer and config; its only source is the policy.
  params: in `layout`. step: number of updates that trained them; 0 for a model folder.
  """

  inputs: Inputs
  params: dict
  layout: Layout
  step: int


def load(
  run: str = '',
  model: str = '',
  stage: str = '',
  step: int | str | None = None,
  config: config_lib.Config | None = None,
  warn: Callable[[str], None] = to_stderr,
  template_kwargs: str = '',
  chat_template: str = '',
) -> Weights:
  """Loads the weights of a run or of a model folder; see `from_run` and `from_folder`.

  Args:
    run, model, stage, step, config, warn: see there.
    template_kwargs: variables of the chat template as a JSON object; they override those of the tokenizer.
    chat_template: replaces the tokenizer's own, as config.data.chat_template; its variables keep their values.
  """
  if bool(run) == bool(model):
    raise InputError('give one of --run=DIR and --model=FOLDER')
  if model and step is not None:
    raise InputError('--step: a model folder has no steps; it goes with --run')
  with working(f'loading weights of {run or model}'):
    weights = from_run(run, stage, step, warn) if run else from_folder(model, config, stage or 'model')
  tokenizer = chosen_template.apply(weights.inputs.tokenizer, chat_template, template_kwargs)
  return dataclasses.replace(weights, inputs=dataclasses.replace(weights.inputs, tokenizer=tokenizer))


def from_run(
  run: epath.PathLike, stage: str = '', step: int | str | None = None, warn: Callable[[str], None] = to_stderr
) -> Weights:
  """Loads a checkpoint of a run; relative paths in its config are resolved as by `where_started`.

  Args:
    stage: '' is the last one that has a checkpoint.
    step: None is the newest checkpoint that is not damaged; 'best' is that of `config.save.keep_best`.
    warn: gets one line if damaged checkpoints were skipped, and one if a step before the newest is best.
  """
  object_store.check(str(run), '--run')
  run = epath.Path(run).expanduser()
  configs = run_config(run)
  if step == 'best':
    stage = pick(configs, stage, run)[0]
    step = best_step.find(run / 'checkpoints' / stage, configs[stage].save)
  is_newest = step is None
  name, step = find_step(run, list(configs), stage, step, warn)
  if is_newest and (line := best_step.line(run / 'checkpoints' / name, configs[name].save, step)):
    warn(line)
  source = weight_sources.of_checkpoint(epath.Path(object_store.resolved(run)) / 'checkpoints' / name, step)
  with where_started(run):
    inputs = prepare_model(name, configs[name], source)
  layout = make_layout('fsdp=-1', 'train')
  params = weights_lib.load(source, inputs.model, layout, inputs.config.model.param_dtype)
  return Weights(inputs, params, layout, step)


def from_folder(folder: epath.PathLike, config: config_lib.Config | None = None, name: str = 'model') -> Weights:
  """Loads the weights of a Hugging Face folder (or org/name), for use with `config`.

  Without a config, matrix products are computed in float32 on CPU and in bfloat16 elsewhere. The tokenizer is that of
  the folder; that of the config is used only if the folder has none.
  """
  if config is None:
    dtype = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    config = config_lib.Config(model=schema.ModelSection(dtype=dtype, param_dtype=dtype))
  section = dataclasses.replace(config.model, path=str(folder), quantize='', text_only=True)
  if section.tokenizer:
    source = prepare.source_of_model(section)
    own = (source.base or source).folder
    if own and any((own / name).exists() for name in ('tokenizer.json', 'tokenizer_config.json')):
      section = dataclasses.replace(section, tokenizer='')
  inputs = prepare_model(
    name,
    dataclasses.replace(
      config, model=section, lora=schema.LoraSection(), train=dataclasses.replace(config.train, freeze='')
    ),
  )
  layout = make_layout('fsdp=-1', 'train')
  params = weights_lib.load(inputs.sources['policy'], inputs.model, layout, section.param_dtype)
  return Weights(inputs, params, layout, 0)


def merged(base: Weights) -> Weights:
  """Returns the weights with adapters and quantized matrices merged into plain ones."""
  model = base.inputs.model
  inputs = dataclasses.replace(base.inputs, model=model.base or model)
  return dataclasses.replace(base, params=model.merge(base.params), inputs=inputs)


def adapters(base: Weights, values: Sequence[str]) -> dict[str, Weights]:
  """Loads PEFT folders 'NAME=FOLDER' that share a base; returns {name: weights}, or {'': base} without folders."""
  pairs = [value.partition('=') for value in values]
  if not all(name and folder for name, _, folder in pairs) or len({name for name, *_ in pairs}) < len(pairs):
    raise InputError(f'--adapter: takes NAME=FOLDER, each name once; not {", ".join(values)}')
  out = {}
  base_source = base.inputs.sources['policy']
  params = merged(base).params if pairs else {}
  for name, _, folder in pairs:
    source = weight_sources.with_adapter(folder, base_source)
    model = model_lib.frozen_base_model(source.config)
    adapter = frozen_roles.load_adapter(source, model, base.layout, None)
    inputs = dataclasses.replace(base.inputs, model=model, sources={'policy': source})
    out[name] = dataclasses.replace(base, params=join(params, adapter), inputs=inputs)
  return out or {'': base}


def run_config(run: epath.Path) -> dict[str, config_lib.Config]:
  """Returns {stage: Config} of the config.json in a run's folder."""
  path = run / 'config.json'
  if not path.exists():
    raise InputError(
      f'{run}: not the folder of a run (it has no config.json); name the folder that training was given as --workdir'
    )
  if 'algorithm' not in seals.read_json(path):
    raise InputError(f'{path}: not the config of a run; a Hugging Face folder is given as --model')
  return config_lib.parse_saved(path)


def where_started(run: epath.Path) -> contextlib.AbstractContextManager:
  """Changes to the folder where the run was last started, if it is there; not for processes with threads that read."""
  return contextlib.chdir(weight_sources.path_of_run(run, '.'))


def pick(stages: Mapping[str, Any], stage: str, where: epath.PathLike) -> tuple[str, Any]:
  """Returns (name, config) of a stage; '' is the last. `where` begins the error if there is no such stage."""
  if stage and stage not in stages:
    raise InputError(f'{where}: has no stage {stage!r}; it has {", ".join(stages)}')
  name = stage or list(stages)[-1]
  return name, stages[name]


def find_step(
  run: epath.Path, names: Sequence[str], stage: str, step: int | None, warn: Callable[[str], None]
) -> tuple[str, int]:
  """Returns (stage, step) of a checkpoint; `names` are the stages of the run, other arguments as in `from_run`."""
  pick(dict.fromkeys(names), stage, run)
  for name in [stage] if stage else reversed(names):
    folder = run / 'checkpoints' / name
    steps = finished_steps(folder)
    if steps:
      break
  else:
    raise NoCheckpointError(f'{run}: no checkpoint of {stage or "any stage"} was finished there')
  if step is None:
    with contextlib.closing(Checkpointer(folder)) as checkpointer:
      step = checkpointer.latest()
    if step is None:  # a run in progress deletes old ones
      raise NoCheckpointError(f'{folder}: its checkpoints have been removed meanwhile')
    if step != steps[0]:
      warn(f'checkpoint: using step {step} of {folder}; {steps[0]} is damaged')
  elif step not in steps:
    raise NoCheckpointError(f'{folder}: step {step} is not there; there is {", ".join(map(str, steps))}')
  return name, step


def prepare_model(name: str, config: config_lib.Config, trained: Source | None = None) -> Inputs:
  """Returns inputs of a stage with its model and tokenizer only.

  Args:
    trained: the source of its checkpoint; None for the weights that the config names.
  """
  algorithm = algorithms.load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  source = prepare.source_of_model(config.model)
  if not trained:
    trained = weight_sources.with_adapter(config.lora.path, source) if config.lora.path else source
  checks.check_head(source, algorithm.scalar_head, 'config.model.path')
  tokenizer = prepare.load_tokenizer(config, source, trained)
  return prepare.make_inputs(name, config, algorithm, {'policy': trained}, tokenizer)


def export(weights: Weights, folder: epath.PathLike) -> None:
  """Writes a Hugging Face folder that `transformers` loads."""
  with working(f'writing {folder}'):
    export_lib.export(weights.inputs, folder, weights.params)


# ---------------------------------------------------------------- evaluation


def evaluate_as(
  run: str = '',
  model: str = '',
  stage: str = '',
  step: int | str | None = None,
  config: Mapping | None = None,
  mesh: str = 'data=-1',
  data: str = '',
  size: int | None = None,
  samples: int | None = None,
  template_kwargs: str = '',
  chat_template: str = '',
) -> dict[str, Any]:
  """Evaluates weights as in `config`, or as in the config of their run; returns the metrics.

  Args:
    run, model, stage, step, template_kwargs, chat_template: as in `load`.
    config: a ConfigDict or nested dict; a model folder needs one. Without it, relative paths are as in `from_run`.
    mesh: as config.mesh.rollout.
    data, size, samples: replace those of `config.eval`.
  """
  stages: dict[str, config_lib.Config] = {}
  eval_config = None
  name = stage
  if config is not None:
    stages = config_lib.parse(prepare.as_dict(config))
  if model and stages:
    name, eval_config = pick(stages, name, '--config')
  template = dict(template_kwargs=template_kwargs, chat_template=chat_template)
  weights = load(run, model, name, step, eval_config, **template)
  name = weights.inputs.name
  if run and stages:  # the stage with that name, or else the last one
    eval_config = stages.get(name) or pick(stages, '', '--config')[1]
  eval_config = eval_config or weights.inputs.config
  held_out = eval_config.eval
  if data:
    held_out = dataclasses.replace(held_out, data=dataclasses.replace(held_out.data, path=_from_here(data)))
  replaced = {name: value for name, value in dict(size=size, samples=samples).items() if value is not None}
  held_out = dataclasses.replace(held_out, **replaced)
  eval_config = dataclasses.replace(eval_config, eval=held_out)
  started = where_started(epath.Path(run).expanduser()) if run and not stages else contextlib.nullcontext()
  with working('evaluating'), started:
    metrics = evaluate(weights, eval_config, mesh)
  return dict(weights=run or model, stage=name, step=weights.step, **metrics)


def _from_here(data: str) -> str:
  """Returns a data source with absolute paths, so that it is the same in another folder."""

  def absolute(part: str) -> str:
    path = os.path.expanduser(part)
    is_path = any(map(os.path.exists, (path, path.rpartition(':')[0]))) or ':' not in path and source_files.find(path)
    return os.path.abspath(path) if is_path and not path.startswith('generated:') else part

  return ' + '.join(map(absolute, sources.split(data)))


def evaluate(weights: Weights, config: config_lib.Config, mesh: str = 'data=-1') -> dict[str, Any]:
  """Returns the metrics of the evaluation that training with `config` would do."""
  if not config.eval.data.path:
    raise InputError(
      'config.eval.data.path: is empty, so there is nothing to evaluate; name held-out rows with --data=FILE, or '
      'prompts with --data=FILE --reward=NAME (or --suite=NAME)'
    )
  algorithm = algorithms.load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  samples = config.eval.samples
  _check_evaluation(config, algorithm)
  rows = prepare.read_held_out_rows(config)
  graded = [sources.first(rows, config.eval.size)]
  config = _on_these_devices(config, algorithm.on_policy, weights.layout, mesh)
  inputs = dataclasses.replace(weights.inputs, config=config, algorithm=algorithm)
  with contextlib.ExitStack() as cleanup:
    environment = rewards = None
    if samples and config.environment:
      from jaxpost.environments import factory

      environment = factory.start_environments(config, algorithm, inputs.tokenizer, graded)
      cleanup.callback(environment.close)
    held_out = prepare.make_held_out(inputs, rows, tools=environment.tools if environment else None)
    if samples:
      sampling_inputs.check_sampling(config, False)
      rewards = sampling_inputs.start_rewards(config, graded)
      if rewards:
        cleanup.callback(rewards.close)
      elif not environment:
        raise InputError('config.reward: a reward model grades in training only; name a reward function')
    placed = place.place_stage(PreparedStage(inputs, Data(rows, held_out=held_out), Workers(rewards, environment)))
    placed.ledger.announce = working.compiling
    evaluator = assemble.make_evaluator(placed, on_policy.make_engine(placed) if samples else None)
    assert evaluator is not None  # there is held-out data
    if evaluator.held_out is not None:
      evaluator.held_out.batches = _counted([*evaluator.held_out.batches])
    if evaluator.sampled is not None:
      working.note(f'sampling {len(evaluator.sampled.prompts) * samples} completions')
    metrics, _ = evaluator(Roles(_policy(weights, placed)), weights.step)
  return dict(data=config.eval.data.path, rows=min(len(rows), config.eval.size), **metrics)


def _counted(batches: list[Batch]) -> Iterator[Batch]:
  """Yields the batches; the status line shows how many of them are done."""
  for done, batch in enumerate(batches):
    working.note(f'evaluating: {done} of {len(batches)} batches are done')
    yield batch


def _check_evaluation(config: config_lib.Config, algorithm: Algorithm) -> None:
  """Raises InputError if the method has no evaluation, or one that needs roles that only training has."""
  if algorithm.on_policy and not config.eval.samples:
    raise InputError(
      f'config.eval.samples: 0 measures the loss only, and {config.algorithm}'
      ' is evaluated by its samples; set how many a prompt'
    )
  roles = [] if algorithm.on_policy else sorted({*algorithm.needs(config), *algorithm.precompute(config)})
  if roles:
    raise InputError(
      f'config.algorithm: evaluating {config.algorithm} needs its {roles[0].partition("_")[0]}, which only training '
      'loads; metrics.jsonl has what the run evaluated (split eval); give --reward to grade completions, or --config '
      'with algorithm=sft'
    )


def _policy(weights: Weights, placed: place.PlacedStage) -> Policy:
  """Returns the weights as a policy for evaluation only."""
  step = placed.train.put(np.int32(weights.step))
  return Policy(
    model=weights.inputs.model,
    state=TrainState(step, weights.params, None),
    layout=placed.train,
    micro_batch_size=placed.shape.micro_rows,
    update_program=None,
    make_score=None,
  )


def _on_these_devices(config: config_lib.Config, on_policy: bool, layout: Layout, mesh: str) -> config_lib.Config:
  """Returns the config with a mesh and a batch for these devices, and without 8-bit weights and cache."""
  train = config.train
  rows = train.micro_batch_size or train.batch_size
  shards = layout.batch_shards
  micro = 0 if on_policy else -(-rows // shards) * shards  # rounded up to whole rows of each shard
  return dataclasses.replace(
    config,
    mesh=schema.MeshSection(rollout=mesh),
    train=dataclasses.replace(train, micro_batch_size=micro),
    rollout=dataclasses.replace(config.rollout, weights='', cache=''),
  )
