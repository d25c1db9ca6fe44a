"""The recipes in configs/ parse and train a step in small, and library code reads every field of the config schema."""

import ast
import collections
import dataclasses
import difflib
import importlib
import pathlib
import re

import ml_collections
import pytest
import rich.console

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.losses import advantages
from jaxpost.rollout import sampler_config
from jaxpost.stage import algorithms
from jaxpost.stage import config as schema

CLONE = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted(f for f in (CLONE / 'configs').glob('*.py') if f.stem != '__init__')
NAMES = [f.stem for f in FILES]
SMALL = ('runlocal', 'short')  # arguments for a small form; each recipe has at least one of them


def module(name):
  return importlib.import_module(f'configs.{name}')


def arguments(name):
  """{argument: default} of a recipe, from its call of parse_arg."""
  for node in ast.walk(ast.parse((CLONE / f'configs/{name}.py').read_text())):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'parse_arg':
      return {k.arg: ast.literal_eval(k.value) for k in node.keywords}
  raise AssertionError(f'configs/{name}.py: get_config never calls parse_arg')


# Values of the argument `method` by recipe.
METHODS = {
  'grpo_gsm8k': ('dr_grpo', 'dapo', 'gspo', 'cispo', 'sapo', 'rloo', 'reinforce_pp', 'reinforce_pp_baseline', 'remax'),
  'dpo_hh': ('orpo', 'cpo', 'simpo'),
}


def variants(name):
  """All texts that may follow the colon of --config: none, each switch, each known model, each method."""
  defaults = arguments(name)
  switches = [k for k, v in defaults.items() if isinstance(v, bool)]
  models = vars(module(name)).get('MODELS', {}) if 'model' in defaults else {}
  return ['', *switches, *(f'model={m}' for m in models), *(f'method={m}' for m in METHODS.get(name, ()))]


def small(name):
  """The argument for the small form of a recipe."""
  return next(v for v in SMALL if v in arguments(name))


@pytest.mark.parametrize('name', NAMES)
def test_docstring_has_a_command_with_existing_fields(name):
  doc = module(name).__doc__
  command = re.search(r'^python -m launch\.train (.*)', doc, re.M)
  assert command, f'configs/{name}.py: its docstring has no command'
  flags = dict(re.findall(r'--([\w.]+)=(\S+)', command[1]))
  assert flags['config'] == f'configs/{name}.py' and flags['workdir']
  for key in flags:
    if key.startswith('config.'):
      block = schema.defaults()
      for part in key.split('.')[1:]:
        block = block[part]  # KeyError: there is no such field
  assert len(FILES[NAMES.index(name)].read_text().splitlines()) <= 60


@pytest.mark.parametrize('name, variant', [(n, v) for n in NAMES for v in variants(n)])
def test_variant_parses(name, variant):
  config = module(name).get_config(variant)
  assert isinstance(config, ml_collections.ConfigDict)
  parsed = schema.parse(config.to_dict())
  assert list(parsed) == list(config.stages or [config.algorithm])
  for stage in parsed.values():
    assert stage.data.path
    algorithm = algorithms.load_algorithm(stage.algorithm)
    algorithm.check(schema.resolve(stage, algorithm.defaults))


@pytest.mark.parametrize('name', NAMES)
def test_unknown_variant_is_refused_with_a_suggestion(name):
  argument = small(name)
  for typo in (argument[:-1], f'{argument}s=1'):
    with pytest.raises(InputError, match=f'did you mean {argument!r}'):
      module(name).get_config(typo)
  with pytest.raises(InputError, match='must be true or false'):
    module(name).get_config(f'{argument}=perhaps')


def shrunk(name, model):
  """The small form of a recipe for one step with few and short samples."""
  config = module(name).get_config(small(name))
  over = dict(
    train=dict(steps=1, batch_size=2, row_length=96),
    rollout=dict(prompts=2, group_size=2, max_new_tokens=4, max_prompt_length=92 if config.environment else 48),
    eval=dict(size=2, samples=0, every=0),
  )
  for block in (config, *(config[stage] for stage in config.stages)):
    block.update(over)
  config.model.update(path=model, tokenizer='bytes')
  config.log.tensorboard = config.save.export = False
  return config


@pytest.mark.parametrize('name', NAMES)
def test_recipe_trains_a_step_offline(name, nano, tmp_path):
  config = shrunk(name, nano)
  summary = stages.run(config, tmp_path, rich.console.Console(quiet=True))
  for stage in schema.parse(config.to_dict()):
    assert summary[f'steps/{stage}'] == 1
    assert f'loss/{stage}' in summary


@pytest.fixture
def recipes(monkeypatch):
  """The module that writes docs/recipes.md."""
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  return importlib.import_module('make_recipes_table')


@pytest.mark.parametrize('name', NAMES)
def test_docstring_has_measured_figure_of_small_form(name, recipes):
  doc = ' '.join(module(name).__doc__.replace('`', '').split())
  if name in recipes.WHOLE:
    return
  if name not in recipes.measured():
    assert 'shows only that it runs' in doc.partition(':runlocal')[2]
    return
  figure, again = recipes.measured()[name], f'run python docs/make_recipes_table.py {name}'
  assert figure['settings'] == recipes.settings(name), f'configs/{name}.py:runlocal has changed; {again}'
  assert recipes.said(figure) in doc, again


def test_the_page_of_recipes_is_up_to_date(recipes):
  assert recipes.table(recipes.measured()) in recipes.PAGE.read_text('utf-8'), 'run python docs/make_recipes_table.py'


def test_sft_and_grpo_differ_in_few_lines():
  sft, grpo = ((CLONE / f'configs/{a}_gsm8k.py').read_text().splitlines() for a in ('sft', 'grpo'))
  added = [x for x in difflib.ndiff(sft, grpo) if x.startswith('+ ')]
  assert len(added) <= 15, '\n'.join(added)


# ---------------------------------------------------------- the schema itself

# Arguments of functions, (module, argument): block of the config that they are.
ARGUMENTS = {
  ('algorithms/grpo', 'rl'): 'rl',
  ('stage/prepare', 'section'): 'model',
  ('stage/optim', 'section'): 'optim',
  ('stages', 'log'): 'log',
  ('monitor/trackers', 'options'): 'log',
  ('models/routing', 'section'): 'router',
  ('distributed/phases', 'mesh'): 'mesh',
  ('algorithms/distill', 'options'): 'distill',
  **{(f'losses/{name}', 'options'): 'rl' for name in ('policy_gradient', 'surrogates', 'importance', 'rejection')},
}
# Fields that config.py itself reads, in parse and rewards_tuple.
OF_CONFIG = ('stages', 'reward', 'user')
# Modules that parse the config, or print or time a run: that they read a field gives it no effect.
NOT_A_RUN = ('stage/config', 'tools/inference', 'tools/preview_stage', 'tools/completions', 'tools/bench')


def leaves(kind=schema.Config, prefix=''):
  """Yields the dotted names of all fields that are no blocks."""
  for field in dataclasses.fields(kind):
    if dataclasses.is_dataclass(field.default):
      yield from leaves(type(field.default), f'{prefix}{field.name}.')
    else:
      yield prefix + field.name


def reads(text):
  """{field: [module:line]} of the fields that modules {name: text} read."""
  places = collections.defaultdict(list)
  for name, code in text.items():
    tree = ast.parse(code)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for scope in functions:
      alias = {a.arg: ARGUMENTS[name, a.arg] for a in scope.args.args if (name, a.arg) in ARGUMENTS}
      for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
          for target, value in _pairs(node):
            if isinstance(target, ast.Name) and (path := _path(value, alias)):
              alias[target.id] = path
      for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
          if path := _path(node, alias):
            places[path].append(f'{name}:{node.lineno}')
  for name, estimator in advantages.ESTIMATORS.items():  # estimators get the fields by name
    for field in estimator.reads.values():
      places[f'rl.{field}'].append(name)
  for field in sampler_config.SamplerConfig.__dataclass_fields__:  # `sampling_inputs.engine_config` reads them by name
    if f'rollout.{field}' in leaves():
      places[f'rollout.{field}'].append('sampling_inputs')
  return places


def _pairs(assign):
  """(target, value) of each variable that an assignment sets."""
  target, value = assign.targets[0], assign.value
  if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
    return list(zip(target.elts, value.elts))
  return [(target, value)]


def _path(node, alias):
  """'optim.lr' of the expression `o.lr` where alias['o'] is 'optim', and of `x.config.optim.lr`; else ''."""
  parts = []
  while isinstance(node, ast.Attribute):
    parts.insert(0, node.attr)
    if node.attr == 'config':
      return '.'.join(parts[1:])
    node = node.value
  if not isinstance(node, ast.Name):
    return ''
  if node.id in alias:
    return '.'.join([alias[node.id], *parts])
  return '.'.join(parts) if node.id in ('config', 'first') else ''


def source():
  """{name: text} of the modules that are part of a run."""
  return {
    name: file.read_text()
    for file in sorted((CLONE / 'jaxpost').rglob('*.py'))
    if (name := file.relative_to(CLONE / 'jaxpost').with_suffix('').as_posix()) not in NOT_A_RUN
  }


@pytest.fixture(scope='module')
def places():
  return reads(source())


@pytest.mark.parametrize('leaf', list(leaves()))
def test_field_is_read(leaf, places):
  if leaf not in OF_CONFIG:
    assert places[leaf], f'config.{leaf} changes nothing: no module reads it; remove it from config.py, or use it'


def test_unread_field_is_noticed():
  """Removes the only reads of three fields from the source."""
  text = {
    k: re.sub(r'\.end_lr\b', '.lr', v).replace('config.save, config.log', 'config.log, config.log')
    for k, v in source().items()
  }
  unread = set(leaves()) - set(reads(text)) - set(OF_CONFIG)
  assert unread == {'optim.end_lr', 'save.keep', 'save.best_mode'}
