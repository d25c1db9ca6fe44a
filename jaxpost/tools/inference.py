"""Trained weights without the run that trained them: load, export, evaluate.

Model and tokenizer come from a run's config.json, or from a Hugging Face
folder; data, rewards and the mesh of the run are not looked at. Also shows
what a config reads, for which no weights are made.
"""

import contextlib
import dataclasses
import json
import sys

import jax
import numpy as np
from etils import epath
from rich import text as rich_text

from jaxpost.data import preview
from jaxpost.data.sources import Rows
from jaxpost.distributed.mesh import Layout, make_layout
from jaxpost.errors import InputError, NoCheckpointError
from jaxpost.models import lora, transformer
from jaxpost.models.parameters import join
from jaxpost.rewards import builtin
from jaxpost.roles import Policy, Roles
from jaxpost.stage import algorithms, assemble, batch_shape, checks, on_policy, place, prepare, schema
from jaxpost.stage import config as config_lib
from jaxpost.stage import export as export_lib
from jaxpost.stage import load_weights as weights_lib
from jaxpost.stage import sources as sources_lib
from jaxpost.stage.records import Data, Inputs, PreparedStage, Workers
from jaxpost.stage.sources import Source
from jaxpost.storage import object_store
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps
from jaxpost.types import TrainState

_COUNTED = 512  # rows behind the table of lengths
_IDS = 24  # token ids shown of a row


def to_stderr(line):
  print(line, file=sys.stderr)


@dataclasses.dataclass
class Weights:
  """Parameters, and what is needed to use them."""

  inputs: Inputs  # only the policy is among its sources
  params: dict  # in `layout`
  layout: Layout
  step: int  # updates behind them


def load(run='', model='', stage='', step=None, config=None, warn=to_stderr) -> Weights:
  """`from_run` or `from_folder`, whichever of the two is named."""
  if bool(run) == bool(model):
    raise InputError('give one of --run=DIR and --model=FOLDER')
  if run:
    return from_run(run, stage, step, warn)
  if step is not None:
    raise InputError('--step: a model folder has no steps; it goes with --run')
  return from_folder(model, config, stage or 'model')


def from_run(run, stage='', step=None, warn=to_stderr) -> Weights:
  """A checkpoint of a run.

  Args:
    run: folder of the run.
    stage: '' is the last one that has a checkpoint.
    step: None is the newest good one.
    warn: gets one line where damaged steps were passed over.
  """
  object_store.check(str(run), '--run')
  run = epath.Path(run).expanduser()
  configs = run_config(run)
  name, step = find_step(run, list(configs), stage, step, warn)
  source = sources_lib.of_checkpoint(run / 'checkpoints' / name, step)
  inputs = prepare_model(name, configs[name], source)
  layout = make_layout('fsdp=-1', 'train')
  params = weights_lib.load(source, inputs.model, layout, inputs.config.model.param_dtype)
  return Weights(inputs, params, layout, step)


def from_folder(folder, config=None, name='model') -> Weights:
  """The weights of a Hugging Face folder (or org/name), used as `config` says.

  Without a config they are computed with in float32 on CPU, in bfloat16
  elsewhere.
  """
  if config is None:
    dtype = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    config = config_lib.Config(model=schema.ModelSection(dtype=dtype, param_dtype=dtype))
  section = dataclasses.replace(config.model, path=str(folder), quantize='')
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
  """The weights with adapters and quantized matrices merged into plain ones."""
  model = base.inputs.model
  inputs = dataclasses.replace(base.inputs, model=model.base or model)
  return dataclasses.replace(base, params=model.merge(base.params), inputs=inputs)


def adapters(base: Weights, values) -> dict[str, Weights]:
  """Several PEFT folders, ('NAME=FOLDER', ...), that share the base.

  {name: weights}; without any folder {'': base}.
  """
  pairs = [v.partition('=') for v in values]
  if not all(name and folder for name, _, folder in pairs) or len({name for name, *_ in pairs}) < len(pairs):
    raise InputError(f'--adapter: takes NAME=FOLDER, each name once; not {", ".join(values)}')
  out, below = {}, base.inputs.sources['policy']
  params = merged(base).params if pairs else {}
  for name, _, folder in pairs:
    source = sources_lib.with_adapter(folder, below)
    model = lora.frozen_base_model(source.config)
    own = weights_lib.load_adapter(source, model, base.layout, None)
    out[name] = dataclasses.replace(
      base, params=join(params, own), inputs=dataclasses.replace(base.inputs, model=model, sources={'policy': source})
    )
  return out or {'': base}


def run_config(run: epath.Path) -> dict[str, config_lib.Config]:
  """{stage: Config} of what config.json in a run's folder says."""
  path = run / 'config.json'
  if not path.exists():
    raise InputError(
      f'{run}: not the folder of a run (it has no config.json); name the folder that training was given as --workdir'
    )
  try:
    raw = json.loads(path.read_text())
  except ValueError as e:
    raise InputError(f'{path}: bad JSON: {e}') from e
  if not isinstance(raw, dict) or 'algorithm' not in raw:
    raise InputError(f'{path}: not the config of a run; a Hugging Face folder is given as --model')
  return config_lib.parse_saved(path)


def pick(stages: dict, stage: str, where):
  """(name, Config) of a stage; '' is the last."""
  if stage and stage not in stages:
    raise InputError(f'{where}: has no stage {stage!r}; it has {", ".join(stages)}')
  name = stage or list(stages)[-1]
  return name, stages[name]


def find_step(run, names, stage, step, warn) -> tuple[str, int]:
  """(stage, step) of a checkpoint; arguments as in `from_run`."""
  pick(dict.fromkeys(names), stage, run)
  for name in [stage] if stage else reversed(names):
    folder = run / 'checkpoints' / name
    there = finished_steps(folder)
    if there:
      break
  else:
    raise NoCheckpointError(f'{run}: no checkpoint of {stage or "any stage"} was finished there')
  if step is None:
    with _checkpoints(run, name) as checkpointer:
      step = checkpointer.latest()
    if step != there[0]:
      warn(f'checkpoint: using step {step} of {folder}; {there[0]} is damaged')
  elif step not in there:
    raise NoCheckpointError(f'{folder}: step {step} is not there; there is {", ".join(map(str, there))}')
  return name, step


def _checkpoints(run, name):
  return contextlib.closing(Checkpointer(run / 'checkpoints' / name))


def prepare_model(name: str, config: config_lib.Config, made: Source | None = None) -> Inputs:
  """Returns model and tokenizer of a stage, and nothing else of it.

  Args:
    name: of the stage.
    config: of the stage.
    made: where its checkpoint is; None for the weights that the config names.
  """
  algorithm = algorithms.load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  source = prepare.model_source(config.model)
  made = made or sources_lib.with_adapter(config.lora.path, source)
  sources_lib.check_head(source, algorithm.scalar_head, 'config.model.path')
  return prepare.make_inputs(name, config, algorithm, {'policy': made}, prepare.load_tokenizer(config, source))


def export(weights: Weights, folder):
  """Writes a Hugging Face folder that `transformers` loads."""
  export_lib.export(weights.inputs, folder, weights.params)


# ---------------------------------------------------------------- evaluation


def evaluate_as(
  run='', model='', stage='', step=None, config=None, mesh='data=-1', data='', size=None, samples=None
) -> dict:
  """The metrics of a run's own config, or of `config` where one is given.

  Args:
    run, model, stage, step: as in `load`.
    config: a ConfigDict or nested dict; a model folder needs one.
    data, size, samples: in place of those of `config.eval`.
  """
  stages, wanted, name = {}, None, stage
  if config is not None:
    stages = config_lib.parse(prepare.as_dict(config))
  if model and stages:
    name, wanted = pick(stages, name, '--config')
  weights = load(run, model, name, step, wanted)
  name = weights.inputs.name
  if run and stages:  # a stage of that name, else the last
    wanted = stages.get(name) or pick(stages, '', '--config')[1]
  wanted = wanted or weights.inputs.config
  fields = dict(size=size, samples=samples)
  if data:
    fields['data'] = dataclasses.replace(wanted.eval.data, path=data)
  wanted = dataclasses.replace(
    wanted, eval=dataclasses.replace(wanted.eval, **{k: v for k, v in fields.items() if v is not None})
  )
  return dict(weights=run or model, stage=name, step=weights.step, **evaluate(weights, wanted, mesh))


def evaluate(weights: Weights, config: config_lib.Config, mesh='data=-1') -> dict:
  """The metrics that training with `config` evaluates, as it does."""
  held_out, samples = config.eval.data.path, config.eval.samples
  if not held_out:
    raise InputError('config.eval.data.path: is empty, so there is nothing to evaluate; name held-out data')
  algorithm = algorithms.load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  if algorithm.on_policy and not samples:
    raise InputError(
      f'config.eval.samples: 0 measures the loss only, and {config.algorithm}'
      ' is evaluated by its samples; set how many a prompt'
    )
  rows = prepare.read_held_out_rows(config)
  config = _on_these_devices(config, algorithm.on_policy, weights.layout, mesh)
  inputs = dataclasses.replace(weights.inputs, config=config, algorithm=algorithm)
  with contextlib.ExitStack() as cleanup:
    environment = rewards = None
    if samples and config.environment:
      environment = prepare.start_environment(inputs)
      cleanup.callback(environment.close)
    held_out_data = prepare.make_held_out(inputs, rows, tools=environment.tools if environment else None)
    if samples:
      checks.check_sampling(config, False)
      rewards = prepare.start_rewards(config, rows)
      if rewards:
        cleanup.callback(rewards.close)
    if samples and not (rewards or environment):
      raise InputError('config.reward: a reward model grades in training only; name a reward function')
    placed = place.place_stage(PreparedStage(inputs, Data(rows, held_out=held_out_data), Workers(rewards, environment)))
    step = placed.train.put(np.int32(weights.step))
    policy = Policy(
      model=inputs.model,
      state=TrainState(step, weights.params, None),
      layout=placed.train,
      micro_batch_size=placed.shape.micro_rows,
      update_program=None,
      score_program=None,
    )
    evaluator = assemble.make_evaluator(placed, on_policy.make_engine(placed) if samples else None)
    metrics, _ = evaluator(Roles(policy), weights.step)
  return dict(data=held_out, rows=min(len(rows), config.eval.size), **metrics)


def _on_these_devices(config, on_policy, layout, mesh):
  """The config with a mesh and a batch that fit, whatever the run had."""
  train, shards = config.train, layout.batch_shards
  rows = train.micro_batch_size or train.batch_size
  micro = 0 if on_policy else -(-rows // shards) * shards
  return dataclasses.replace(
    config, mesh=schema.MeshSection(rollout=mesh), train=dataclasses.replace(train, micro_batch_size=micro)
  )


# ------------------------------------------------------------------- preview


def show_stage(name: str, config: config_lib.Config, rows: int) -> list:
  """Rich renderables: model, `rows` rows as the model sees them, rewards."""
  inputs = prepare_model(name, config)
  config, tokenizer = inputs.config, inputs.tokenizer
  if not config.data.path:
    raise InputError('config.data.path: is empty; name a file, a folder, org/name or generated:arithmetic')
  data = prepare.read_rows(config)
  held_out = config.eval.data.path
  count = transformer.num_params(inputs.model.config)
  out = [
    rich_text.Text(f'{name}: {config.algorithm}, {config.train.steps} steps', 'bold'),
    f'model: {config.model.path or config.model.preset}, {count:,} '
    f'parameters, {tokenizer.vocab_size} tokens of {tokenizer.source}',
    f'data: {len(data)} rows of {config.data.path}',
  ]
  if data.dropped:
    out[-1] += f', {data.dropped} more dropped by config.data.map'
  if held_out:
    read = prepare.read_held_out_rows(config)
    out.append(f'held out: {min(len(read), config.eval.size)} of {len(read)} rows of {held_out}')
  on_policy = inputs.algorithm.on_policy
  samples = on_policy or held_out and config.eval.samples
  tools = None
  with contextlib.ExitStack() as cleanup:
    if samples and config.environment:
      environment = prepare.start_environment(inputs)
      cleanup.callback(environment.close)
      tools = environment.tools
      out += [f'tool: {tool["function"]["name"]} of {config.environment}' for tool in tools]
    out += _show_prompts(inputs, data, rows, tools) if on_policy else _show_rows(inputs, data, rows)
    if samples:
      out += _show_rewards(inputs, data)
  return out


def _show_rows(inputs: Inputs, data: Rows, count: int) -> list:
  config, tokenizer = inputs.config, inputs.tokenizer
  render = inputs.algorithm.render(data, tokenizer, config)
  examples = [render(i) for i in range(min(max(count, _COUNTED), len(data)))]
  length = batch_shape.row_length(config, False)
  *shown, _ = preview.preview(examples[:count] or examples[:1], tokenizer)
  out = []
  for i, row in enumerate(shown[:count]):
    out += [_heading(data.where(i), examples[i].tokens), row]
  table = preview.preview(examples, tokenizer, length)[-1]
  table.title = f'the first {len(examples)} rows'
  return [*out, table]


def _show_prompts(inputs: Inputs, data: Rows, count: int, tools: list[dict] | None) -> list:
  config, tokenizer = inputs.config, inputs.tokenizer
  prompts = prepare.prompt_stream(inputs, data, shuffle=False, tools=tools)
  out = []
  for i in range(min(count, len(prompts))):
    prompt = prompts.prompt(i)
    out += [
      _heading(f'prompt {i}', prompt.tokens),
      rich_text.Text(tokenizer.decode(prompt.tokens, skip_special=False), 'dim'),
    ]
    for key, value in prompt.columns.items():
      out.append(f'  {key} = {repr(value)[:200]}')
  lengths = prompts.lengths
  return [
    *out,
    f'{len(lengths)} prompts of {min(lengths)} to {max(lengths)} '
    f'tokens, median {np.median(lengths):.0f}; {prompts.skipped} longer '
    f'than {config.rollout.max_prompt_length} are left out',
  ]


def _show_rewards(inputs: Inputs, data: Rows) -> list:
  config = inputs.config
  checks.check_sampling(config, inputs.algorithm.on_policy)
  pool = prepare.start_rewards(config, data)  # imports every function
  if pool is None:
    return []
  pool.close()
  specs = config.rewards_tuple()
  weights = config.reward_weights or [1.0] * len(specs)
  where = [builtin.locate(s) if isinstance(s, str) else 'in this process' for s in specs]
  return [f'reward: {name} ({place}), weight {weight:g}' for name, place, weight in zip(pool.names, where, weights)]


def _heading(place, tokens):
  """A heading of a row: its place in the file, its length and its first token ids."""
  place = f'...{place[-37:]}' if len(place) > 40 else place
  ids = ' '.join(map(str, tokens[:_IDS].tolist()))
  more = ' ...' if len(tokens) > _IDS else ''
  return rich_text.Text.assemble((f'{place}: {len(tokens)} tokens', 'bold'), f'  {ids}{more}')
