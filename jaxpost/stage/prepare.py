"""Turns a config into everything about a stage that needs no device.

Every stage's data, tokenizer, model file headers and reward functions are checked before the first stage starts, so a
mistake in the last stage shows within seconds. `place.py` and `assemble.py` then put a stage on the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_collections

from jaxpost.algorithms.base import Algorithm
from jaxpost.data import loader, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.examples import Documents, warn_unseen, warn_without_stop
from jaxpost.data.sources import Rows
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.errors import InputError, did_you_mean, refuse
from jaxpost.models import model as model_lib
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.models.model import Model
from jaxpost.stage import checks, epochs
from jaxpost.stage import config as config_lib
from jaxpost.stage.algorithms import load_algorithm
from jaxpost.stage.batch_shape import row_length
from jaxpost.stage.config import Config
from jaxpost.stage.records import Data, HeldOutData, Inputs, PreparedStage, Source, Workers

if TYPE_CHECKING:
  from jaxpost.data.row_views import Chain
  from jaxpost.stage.schema import ModelSection
  from jaxpost.types import Batch

Note = Callable[[str], object]  # receives progress lines while rows are read; `str` ignores them
_NOTE_EVERY = 256  # rows between two progress lines


def as_dict(config: Any) -> dict:
  """Returns a ConfigDict, a dict or a Config as nested dicts."""
  if isinstance(config, ml_collections.ConfigDict):
    return config.to_dict()
  if dataclasses.is_dataclass(config):
    return dataclasses.asdict(config)
  return dict(config)


def prepare_all(config: Mapping, note: Note = str) -> list[PreparedStage]:
  """Prepares all stages of a config (nested dicts); on an error, ends the workers of the stages already prepared.

  Raises:
    InputError: a stage could not run.
  """
  prepared: list[PreparedStage] = []
  with contextlib.ExitStack() as undo:
    for name, (algorithm, section) in resolve_all(config).items():
      prepared.append(prepare(name, algorithm, section, prepared, note))
      undo.callback(prepared[-1].close)
    undo.pop_all()  # all stages are prepared: keep their workers
  return prepared


def prepare(
  name: str, algorithm: Algorithm, config: Config, before: Sequence[PreparedStage], note: Note
) -> PreparedStage:
  """Prepares one stage; `config` is resolved, see `resolve`, and `before` are the stages that run before this one."""
  checks.check_config(config, algorithm)
  checks.check_sizes(config, algorithm.on_policy)
  refuse(not config.data.path, 'config.data.path: is empty; name a file, a folder, org/name or generated:arithmetic')
  source = source_of_model(config.model)
  role_sources = find_weights(config, algorithm, source, {stage.name: stage.inputs.outcome for stage in before})
  tokenizer = load_tokenizer(config, source, role_sources['policy'], before)
  check_weights(config, algorithm, role_sources)
  algorithm.check_roles(config, role_sources, tokenizer)
  inputs = make_inputs(name, config, algorithm, role_sources, tokenizer)
  if config.lora.rank:
    from jaxpost.models import lora

    lora.warn_left_out(inputs.model)
  rows = read_rows(config)
  held_out_rows = read_held_out_rows(config)
  if checks.samples(config, algorithm):
    from jaxpost.stage import sampling_inputs

    return sampling_inputs.prepare(inputs, rows, held_out_rows, before, make_data)
  data = make_data(inputs, rows, held_out_rows, note=note)
  return PreparedStage(epochs.count_steps(inputs, data), data, Workers())


def check_weights(config: Config, algorithm: Algorithm, role_sources: Mapping[str, Source]) -> None:
  """Refuses options that the models of the roles do not support; warns of rows longer than the trained positions."""
  cfg = role_sources['policy'].config
  if isinstance(cfg, CustomConfig) or row_length(config, algorithm.on_policy) > cfg.max_position:
    from jaxpost.stage import model_limits

    model_limits.check(config, algorithm, cfg)
  checks.check_stored(config, algorithm, role_sources)
  if config.train.share_prompt:
    from jaxpost.rl import shared_prompts

    shared_prompts.check(config, algorithm, role_sources)


def resolve_all(config: Mapping) -> dict[str, tuple[Algorithm, Config]]:
  """Returns {stage: (algorithm, resolved config)} of a config; refuses fields that no stage reads."""
  stages = {name: resolve(section) for name, section in config_lib.parse(config).items()}
  checks.check_sections(stages.values())
  return stages


def resolve(config: Config) -> tuple[Algorithm, Config]:
  """Loads the algorithm of a config; returns it and the checked config with the algorithm's defaults filled in."""
  algorithm = load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  algorithm.check(config)
  refuse(
    algorithm.on_policy and config.lora.dropout > 0,
    'config.lora.dropout: an on-policy method must train the model that sampled, without dropout; set it to 0',
  )
  return algorithm, config


def make_inputs(
  name: str, config: Config, algorithm: Algorithm, role_sources: dict[str, Source], tokenizer: Tokenizer
) -> Inputs:
  """Makes the first record of a stage, with the policy's model; `config` is resolved, see `resolve`."""
  if config.preference.share_prompt and algorithm.mean_per(config) in ('pair', 'label'):
    from jaxpost.stage import model_limits

    config = model_limits.with_readable_pairs(config, algorithm, role_sources)
  model = make_model(config, algorithm, role_sources['policy'].config)
  return Inputs(name, config, algorithm, role_sources, model, tokenizer=tokenizer)


def make_data(
  inputs: Inputs, rows: Rows, held_out_rows: Rows | None = None, tools: list[dict] | None = None, note: Note = str
) -> Data:
  """Makes the training stream and the held-out data of a stage from their rows.

  Args:
    held_out_rows: None if nothing is evaluated.
    tools: JSON schemas of the tools that prompts list.

  Raises:
    InputError: the rows lack something that the algorithm needs.
  """
  config, algorithm = inputs.config, inputs.algorithm
  fields = {k: v for computed in algorithm.precompute(config).values() for k, v in computed.arrays.items()}
  documents = first_batch = None
  if algorithm.on_policy:
    from jaxpost.stage import sampling_inputs

    stream = sampling_inputs.prompt_stream(inputs, rows, tools=tools)
  else:
    documents = read_documents(inputs, rows, fields, note)
    stream, first_batch = row_stream(inputs, rows, documents)
  held_out = None if held_out_rows is None else make_held_out(inputs, held_out_rows, fields, tools)
  return Data(rows, stream, documents, first_batch, held_out, checksum=sources.digest(rows))


def make_model(config: Config, algorithm: Algorithm, cfg: ModelConfig) -> Model:
  """Builds the decoder `cfg` with the heads and adapters that the stage trains."""
  adapter = config.lora
  spec = ()
  if adapter.path:
    spec = cfg.lora  # `find_weights` has read it from the adapter's folder
  elif adapter.rank:
    from jaxpost.models import lora

    table = model_lib.build(dataclasses.replace(cfg, lora=())).table  # parameters of the base model
    spec = (adapter.rank, adapter.alpha, adapter.rslora, lora.target_pattern(adapter.targets, table, adapter.rank))
  if algorithm.scalar_head:
    cfg = model_lib.with_scalar_head(cfg)
  cfg = dataclasses.replace(model_lib.with_value_head(cfg, algorithm.value_head(config)), lora=spec)
  model = model_lib.build(cfg, adapter.dropout)
  trains_mtp = _trains_mtp(config, algorithm)
  model = model_lib.freeze(model, config.train.freeze, trains_mtp)
  refuse(
    trains_mtp and not model.trains_mtp,
    'config.nll.mtp_weight: this stage trains no module for multi-token prediction: lora and train.freeze freeze it, '
    'and a custom model has none; set it to 0',
  )
  if config.model.quantize:
    from jaxpost.models import quantization

    model = quantization.quantize_model(model, config.model.quantize)
    quantization.check_frozen(model)
  checks.check_model(config, model)
  return model


def _trains_mtp(config: Config, algorithm: Algorithm) -> bool:
  """True if the stage trains the multi-token prediction module; if not, that of an earlier stage is still exported."""
  return config.nll.mtp_weight > 0 and (algorithm.sections is None or 'nll' in algorithm.sections)


def source_of_model(section: ModelSection) -> Source:
  """Finds the weights that `config.model` names; those of a preset are random."""
  path, preset = section.path, section.preset
  if path or ':' in preset:
    from jaxpost.stage import weight_sources

    if ':' in preset:
      return weight_sources.of_code(preset, path)
    return weight_sources.find(path, 'config.model.path', {}, section.text_only)
  from jaxpost.models import presets

  known = presets.every()
  if preset not in known:
    raise InputError(f'config.model.preset: no {preset!r}; {did_you_mean(preset, known)}known: {", ".join(known)}')
  return Source(known[preset])


def find_weights(
  config: Config,
  algorithm: Algorithm,
  source: Source,
  earlier: Mapping[str, Source],
  find: Callable[[str, str, Mapping[str, Source]], Source] | None = None,
) -> dict[str, Source]:
  """Finds the weights of 'policy' and of every other role that the stage reads.

  Args:
    source: the weights of `config.model`.
    earlier: {stage: Source} of the final weights of the stages before this one, in order.
    find: (text, config field, earlier) -> Source, used by plans, which need no weights. None: `weight_sources.find`.
  """

  def locate(text: str, field: str) -> Source:
    if find:
      return find(text, field, earlier)
    from jaxpost.stage import weight_sources

    return weight_sources.find(text, field, earlier, config.model.text_only)

  policy_field = 'config.init_from' if config.init_from or earlier else 'config.model.path'
  policy = source
  if config.init_from:
    policy = locate(config.init_from, policy_field)
  elif earlier:
    *_, policy = earlier.values()  # the stage just before this one
  if config.lora.path:
    from jaxpost.stage import weight_sources

    policy = weight_sources.with_adapter(config.lora.path, policy, config.lora.rank)
  checks.check_head(policy, algorithm.scalar_head, policy_field)
  if _trains_mtp(config, algorithm):
    from jaxpost.stage import model_folders

    policy = model_folders.source_with_module(policy, config, algorithm.objective(config))
  role_sources = {'policy': policy}
  if 'reference' in algorithm.needs(config):
    path = config.rl.reference
    role_sources['reference'] = locate(path, 'config.rl.reference') if path else policy  # as the stage begins
  if algorithm.critic(config):
    path = config.critic.path
    role_sources['critic'] = locate(path, 'config.critic.path') if path else policy
  if algorithm.scalar_head or config.reward_model.per_step or 'reward_model' in config.rewards_tuple():
    from jaxpost.stage import reward_models

    reward_models.check_uses(config, algorithm)
    if reward_models.grades(config, algorithm):
      role_sources['reward_model'] = reward_models.find(config, locate)
  teachers = config.distill.teachers if 'teachers' in algorithm.needs(config) else ()
  for i, text in enumerate(teachers):
    role_sources[f'teacher_{i}'] = locate(text, f'config.distill.teachers[{i}]')
  return role_sources


def load_tokenizer(config: Config, source: Source, policy: Source, before: Sequence[PreparedStage] = ()) -> Tokenizer:
  """Loads the tokenizer of `config.model`; InputError if the policy's weights have another or too few embeddings."""
  section = config.model
  path = source.tokenizer_path(section)
  tokenizer = tokenizer_lib.load(path or 'bytes', config.data.chat_template, config.data.template_kwargs)
  if policy.folder or policy.checkpoints or policy.stage:
    from jaxpost.stage import weight_sources

    weight_sources.check_tokenizer(config, policy, tokenizer, path, {p.name: p.inputs.tokenizer for p in before})
  if tokenizer.vocab_size > policy.config.padded_vocab_size:
    raise InputError(
      f'tokenizer {tokenizer.source}: {tokenizer.vocab_size} tokens are more than the '
      f'{policy.config.vocab_size} embedding rows of {config.init_from or section.path or section.preset}'
    )
  return tokenizer


def read_rows(config: Config) -> Rows:
  """Reads the training data of `config.data`."""
  data = config.data
  rows = sources.read_sources(data.path, data.columns, data.map, data.weights, data.streaming)
  return sources.first(rows, data.max_samples or len(rows))


def read_held_out_rows(config: Config) -> Rows | Chain | None:
  """Reads the data of `config.eval`; None if nothing is evaluated."""
  held_out = config.eval.data
  if not held_out.path:
    return None
  # Held-out data has the columns and the map of the first source.
  columns = held_out.columns or _first(config.data.columns)
  try:
    return sources.read_sources(held_out.path, columns, held_out.map or _first(config.data.map))
  except InputError as error:  # name the field: the data may be a recipe's default that the user has not chosen
    raise InputError(f'config.eval.data: {error}') from error


def _first(option: str | Sequence[str]) -> str:
  """Returns the first source's value of a per-source option; '' if there is none."""
  return next(iter(sources.split(option)), '')


def read_documents(inputs: Inputs, rows: Rows, fields: Mapping, note: Note = str) -> Documents:
  """Renders the rows as Examples, the first `checks.READ_FIRST` of them now, so that mistakes show early.

  Args:
    fields: the arrays that frozen models compute, see `Documents`.
  """
  assert inputs.algorithm.render, 'all methods on data have one'
  render = inputs.algorithm.render(rows, inputs.tokenizer, inputs.config)
  checked = 0 if inputs.config.data.streaming else min(len(rows), checks.READ_FIRST)
  ready = []  # kept, so that no epoch renders them again
  for i in range(checked):
    if i and i % _NOTE_EVERY == 0:
      note(f'reading data: {i:,} of {checked:,} documents are tokenized')
    ready.append(render(i))
  if not inputs.algorithm.scalar_head:  # a reward model generates no text
    warn_without_stop(ready, inputs.tokenizer)
    warn_unseen(ready)

  def example(number: int):
    if number < len(ready):
      return ready[number]
    # A row that a map drops while streaming is None.
    return render(number) if rows[number] is not None else None

  return Documents(example, len(rows), fields)


def row_stream(inputs: Inputs, rows: Rows, documents: Documents) -> tuple[loader.PackedStream, Batch]:
  """Returns the stream of packed rows, at its start, and its first batch."""
  config = inputs.config
  stream = loader.PackedStream(
    documents.__getitem__,
    len(rows),
    batch_size=config.train.batch_size,
    row_length=row_length(config, False),
    seed=config.seed,
    shuffle=config.data.shuffle,
    packing=config.data.packing,
    overlong=config.data.overlong,
    where=rows.where,
    per=inputs.algorithm.mean_per(config),
    sizes=rows.sizes,
    weights=rows.weights,
  )
  return stream, stream.peek()  # raises here if no row can be made


def make_held_out(
  inputs: Inputs, rows: Rows, fields: Mapping | None = None, tools: list[dict] | None = None
) -> HeldOutData:
  """Renders the held-out documents, and tokenizes the prompts of `config.eval.samples`.

  Args:
    fields, tools: see `read_documents` and `make_data`.
  """
  section = inputs.config.eval
  count = min(len(rows), section.size)
  evaluated = sources.first(rows, count)
  documents, prompts = None, ()
  if inputs.algorithm.render and not inputs.algorithm.on_policy:
    render = inputs.algorithm.render(evaluated, inputs.tokenizer, inputs.config)
    examples = tuple(render(i) for i in range(count))
    documents = Documents(examples.__getitem__, count, fields)
  if section.samples:
    from jaxpost.stage import sampling_inputs

    stream = sampling_inputs.prompt_stream(inputs, evaluated, per_step=count, shuffle=False, tools=tools)
    prompts = tuple(stream.prompt(i) for i in range(min(count, len(stream))))
  return HeldOutData(rows, documents, prompts)
