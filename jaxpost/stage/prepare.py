"""Config -> everything about a stage that needs no device.

Data, tokenizer, headers of model files and reward functions are looked at for
every stage before the first one starts, so that a mistake in the last one is
found in seconds. `assemble.py` then puts a stage on the devices.
"""

import dataclasses
from collections.abc import Callable

import ml_collections

from jaxpost.algorithms.base import Algorithm, refuse
from jaxpost.data import loader, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.distributed import mesh
from jaxpost.errors import InputError
from jaxpost.models import context_parallel, lora, presets, quantization
from jaxpost.models import model as model_lib
from jaxpost.stage import checks, optim, precompute, reward_model
from jaxpost.stage import config as config_lib
from jaxpost.stage import find_weights as find_weights_lib
from jaxpost.stage import sources as sources_lib
from jaxpost.stage.algorithms import load_algorithm
from jaxpost.stage.batch_shape import row_length
from jaxpost.stage.checks import check_sampling

_CHECKED = 20_000  # documents tokenised (and so checked) before step 0


@dataclasses.dataclass
class Prepared:
  """A stage after everything that needs no device."""

  name: str
  config: config_lib.Config
  algorithm: Algorithm
  sources: dict  # role -> weights.Source
  model: model_lib.Model
  tokenizer: tokenizer_lib.Tokenizer
  rows: sources.Rows
  stream: object  # PackedStream or PromptStream
  eval_rows: sources.Rows | None
  pool: object = None  # RewardPool
  environment: object = None  # EnvironmentPool
  first_batch: object = None  # its fields are those of every batch
  eval_examples: tuple = ()  # whose loss is evaluated
  eval_prompts: tuple = ()  # whose completions are
  example: Callable | None = None  # row number -> Example
  lookup: precompute.Lookup = dataclasses.field(default_factory=precompute.Lookup)

  def close(self):
    """Ends the worker processes."""
    for pool in filter(None, (self.pool, self.environment)):
      pool.close()


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
      prepared.append(prepare(name, stage, prepared))
  except BaseException:
    for p in prepared:
      p.close()
    raise
  return prepared


def prepare(name: str, config: config_lib.Config, before=()) -> Prepared:
  """Everything about a stage that can be known without a device.

  `before` holds the stages that run first.
  """
  algorithm = load_algorithm(config.algorithm)
  config = config_lib.resolve(config, algorithm.defaults)
  algorithm.check(config)
  checks.check_reward_model(config, algorithm)
  optim.check(config.optim.name, config.optim.weight_decay)
  for phase in ('train', 'rollout', 'score'):
    text = vars(config.mesh)[phase]
    if text != 'auto' or phase == 'score':
      mesh.mesh_sizes(text, f'config.mesh.{phase}')
  refuse(
    'context' in config.mesh.rollout,
    'config.mesh.rollout: sampling has no use for context, which splits rows in training; use tensor',
  )
  refuse(
    'context' in config.mesh.train + config.mesh.score and config.model.attention in context_parallel.WHOLE_ROW_KERNELS,
    f'config.model.attention: {config.model.attention} cannot attend over '
    'rows that a context axis splits; leave it auto',
  )
  refuse(
    config.mesh.rollout_devices > 0 and not (algorithm.on_policy or config.eval.samples),
    f'config.mesh.rollout_devices: {config.algorithm} samples nothing; leave it 0',
  )
  if config.save.keep_best and not config.eval.data.path:
    raise InputError('config.save.keep_best: nothing is evaluated; set config.eval.data.path')
  refuse(not config.data.path, 'config.data.path: is empty; name a file, a folder, org/name or generated:arithmetic')
  source = model_source(config.model)
  found = find_weights(
    config, algorithm, source, before[-1].name if before else '', {p.name: sources_lib.outcome(p) for p in before}
  )
  tokenizer = load_tokenizer(config, source)
  checks.check_reward_tokens(config, found, tokenizer, before)
  checks.check_own(config, found['policy'].config)
  checks.check_replay(config, algorithm, found)
  checks.check_teachers(config, found, tokenizer)
  rows = read_rows(config)
  evals = config.eval.data.path
  model = make_model(config, algorithm, found['policy'].config)
  out = Prepared(name, config, algorithm, found, model, tokenizer, rows, None, read_held_out(config))
  samples = algorithm.on_policy or (evals and config.eval.samples)
  if samples and config.environment:
    from jaxpost.environments import factory

    out.environment = factory.start_environments(config, algorithm, tokenizer)
  out.stream = prompt_stream(out) if algorithm.on_policy else row_stream(out)
  if out.eval_rows is not None:
    prepare_evaluation(out)
  if samples:
    check_sampling(config, algorithm.on_policy, algorithm.rewards or bool(evals and config.eval.samples))
    if algorithm.from_data(config):
      from jaxpost.rl import demonstrations

      demonstrations.check(tokenizer, rows, _CHECKED)
    if config.rewards_tuple():
      out.pool = reward_pool(config, rows)
  return out


def model_source(section) -> sources_lib.Source:
  """Where the weights of `config.model` come from."""
  path, preset = section.path, section.preset
  if ':' in preset:
    return find_weights_lib.own(preset, path)
  if path:
    return find_weights_lib.find(path, 'config.model.path', {})
  refuse(
    preset not in presets.PRESETS,
    f'config.model.preset: no shape is called {preset!r}; known: {", ".join(presets.PRESETS)}',
  )
  return sources_lib.Source(presets.PRESETS[preset])


def make_model(config, algorithm, cfg) -> model_lib.Model:
  """The decoder `cfg` with the heads and adapters that the stage trains."""
  a = config.lora
  refuse(
    algorithm.on_policy and a.dropout > 0,
    'config.lora.dropout: what is trained on policy must be what has sampled; set it to 0',
  )
  spec = cfg.lora if a.path else (a.rank, a.alpha, a.rslora, a.targets) if a.rank else ()
  if algorithm.scalar_head:
    cfg = model_lib.with_scalar_head(cfg)
  cfg = dataclasses.replace(cfg, value_head=bool(algorithm.value_head(config)), lora=spec)
  model = quantization.quantize_model(
    lora.freeze(lora.build(cfg, config.lora.dropout), config.train.freeze), config.model.quantize
  )
  quantization.check_frozen(model, 'config.model.quantize')
  checks.check_sampler(config, model)
  return model


def find_weights(config, algorithm, source, last: str, earlier: dict, find=find_weights_lib.find) -> dict:
  """{role: Source}: 'policy' and whatever else the stage reads.

  Args:
    source: of `config.model`.
    last: name of the stage before; earlier: {stage: Source} of
      what they end with.
    find: names -> Source; a plan knows shapes without weights.
  """
  if config.init_from:
    source = find(config.init_from, 'config.init_from', earlier)
  elif last:
    source = earlier[last]
  source = find_weights_lib.with_adapter(config.lora.path, source)
  find_weights_lib.check_head(source, algorithm.scalar_head, 'config.init_from')
  out = {'policy': source}
  if 'reference' in algorithm.needs(config):
    out['reference'] = source
  if algorithm.critic(config):
    out['critic'] = find(config.critic.path, 'config.critic.path', earlier) if config.critic.path else source
  if reward_model.is_asked(config, algorithm):
    out[reward_model.NAME] = reward_model.find(config, earlier, find)
  for i, text in enumerate(config.distill.teachers if ('teachers' in algorithm.needs(config)) else ()):
    out[f'teacher_{i}'] = find(text, f'config.distill.teachers[{i}]', earlier)
  return out


def load_tokenizer(config, source: sources_lib.Source):
  """Returns the tokenizer of `config.model`; InputError if the model is too small."""
  section = config.model
  path = section.tokenizer or str((source.base or source).folder or 'bytes')
  tokenizer = tokenizer_lib.load(path, enable_thinking=config.data.enable_thinking)
  if tokenizer.vocab_size > source.config.padded_vocab_size:
    raise InputError(
      f'tokenizer {tokenizer.source}: {tokenizer.vocab_size} tokens are more '
      f'than the {source.config.vocab_size} rows of the embedding of '
      f'{section.path or section.preset}'
    )
  return tokenizer


def read_rows(config):
  """The training data."""
  data = config.data
  return sources.read_sources(data.path, data.columns, data.map, data.weights, data.streaming)


def read_held_out(config):
  """The data of `config.eval`; None where nothing is evaluated."""
  held_out = config.eval.data
  if not held_out.path:
    return None
  # Of several sources, the first one's shape is that of the held-out data.
  first = lambda x: x[0] if isinstance(x, (tuple, list)) else x
  return sources.read_sources(
    held_out.path, held_out.columns or first(config.data.columns), held_out.map or first(config.data.map)
  )


def row_stream(p: Prepared):
  """The packed rows of a data set."""
  config, train = p.config, p.config.train
  render = p.algorithm.render(p.rows, p.tokenizer, config)
  checked = 0 if config.data.streaming else min(len(p.rows), _CHECKED)
  ready = [render(i) for i in range(checked)]
  # A row that a map drops while streaming is None.
  p.example = lambda i: ready[i] if i < len(ready) else (render(i) if p.rows[i] is not None else None)
  for computed in p.algorithm.precompute(config).values():
    p.lookup.fields |= computed.arrays
  stream = loader.PackedStream(
    lambda i: p.lookup.attach(i, p.example(i)),
    len(p.rows),
    batch_size=train.batch_size,
    row_length=row_length(config, False),
    seed=config.seed,
    shuffle=config.data.shuffle,
    packing=config.data.packing,
    overlong=config.data.overlong,
    where=p.rows.where,
    per=p.algorithm.mean_per(config),
    sizes=p.rows.sizes,
    weights=p.rows.weights,
  )
  begin = stream.state()
  p.first_batch = next(stream)[0]  # says so now if no row can be made
  stream.restore(begin)
  return stream


def prepare_evaluation(p: Prepared):
  """The held-out documents and prompts."""
  rows, e = p.eval_rows, p.config.eval
  count = min(len(rows), e.size)
  if not p.algorithm.on_policy:
    render = p.algorithm.render(rows, p.tokenizer, p.config)
    p.eval_examples = tuple(render(i) for i in range(count))
  if e.samples:
    prompts = prompt_stream(p, rows, count, shuffle=False)
    p.eval_prompts = tuple(prompts.prompt(i) for i in range(min(count, len(prompts))))


def prompt_stream(p: Prepared, rows=None, per_step=0, shuffle=True):
  from jaxpost.data.prompts import PromptStream

  rollout = p.config.rollout
  return PromptStream(
    rows or p.rows,
    p.tokenizer,
    per_step=per_step or rollout.prompts,
    max_prompt_length=rollout.max_prompt_length,
    seed=p.config.seed,
    shuffle=shuffle,
    system_prompt=p.config.data.system_prompt,
    tools=p.environment and p.environment.tools,
  )


def reward_pool(config, rows):
  """The pool of the reward functions, or None where there is none."""
  from jaxpost.rewards.pool import RewardPool

  specs, weights = config.rewards_tuple(), config.reward_weights
  if weights and len(weights) != len(specs):
    raise InputError(f'config.reward_weights: {len(weights)} weights for {len(specs)} rewards; give one each, or ()')
  kept = [i for i, spec in enumerate(specs) if spec != reward_model.NAME]
  if not kept:
    return None
  pool = RewardPool(
    tuple(specs[i] for i in kept),
    weights=[weights[i] for i in kept] if weights else None,
    workers=config.rewards.workers,
    timeout_s=config.rewards.timeout_s,
    max_failed=config.rewards.max_failed,
  )
  try:
    pool.check(list(next(rows[i] for i in range(len(rows)) if rows[i])))
  except BaseException:
    pool.close()
    raise
  return pool
