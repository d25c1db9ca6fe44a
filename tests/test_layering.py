"""Tests of the code structure: imports between packages, sizes of files and functions, and style rules.

Each rule is a generator function of a `Tree` (the parsed clone) that yields one line per
violation: where, what, and what to do. `test_rule` checks that the clone has none;
`test_rule_can_fail` plants one violation of each rule in a copy of the text.
"""

import ast
import collections
import re
import sys

import children
import pytest
import reading
from reading import CLONE, Tree, called, has_code, read

pytestmark = pytest.mark.core

# A module imports only from its own package or from one in a lower row. A package
# here is a folder of jaxpost/ or a file at its root. The top row comes first.
ROWS = (
  ('launch', 'configs', 'notebooks'),
  ('tools', '__init__'),
  ('stages', 'planning'),
  ('stage', 'testing'),
  ('rl', 'loop'),
  ('monitor',),
  ('algorithms', 'environments'),
  ('rollout',),
  ('roles',),
  ('programs',),
  ('data', 'formats', 'hardware'),
  ('models', 'losses', 'rewards', 'storage'),
  ('distributed', 'workers'),
  ('imports', 'matmul', 'types'),
  ('errors',),
)
ROW = {package: -row for row, packages in enumerate(ROWS) for package in packages}

# The modules that may import a dependency; all others go through them.
GATES = {
  'grain': ('jaxpost/data/loader.py',),
  'orbax': ('jaxpost/storage/checkpoint.py',),
  'transformers': ('jaxpost/data/tokenizer.py',),
  'tokenizers': ('jaxpost/data/tokenizer.py',),
  'safetensors': ('jaxpost/formats/peft.py',),
  'huggingface_hub': ('jaxpost/storage/hub.py',),
  'h11': ('jaxpost/environments/http_connections.py',),
  'jetstream': ('jaxpost/rollout/jetstream.py',),
  'tensorboardX': ('jaxpost/monitor/metrics.py',),
  'wandb': ('jaxpost/monitor/trackers.py',),
  'trackio': ('jaxpost/monitor/trackers.py',),
  'mlflow': ('jaxpost/monitor/trackers.py',),
  'absl': ('launch/',),
  'ml_collections': ('configs/', 'launch/', 'jaxpost/stage/prepare.py'),
  'jax': ('jaxpost/', 'launch/'),
}
FORBIDDEN = ('torch', 'tensorflow', 'clu', 'seqio', 'ray', 'chex')
PICKLES = ('pickle', 'cPickle', 'cloudpickle', 'dill', 'joblib', 'shelve', 'marshal')
GENERIC = ('launch', 'configs', 'tests', 'notebooks')

# All programs of a run are compiled in programs/. hardware/ compiles small programs
# of its own, with which it times and checks devices.
JITS = ('jaxpost/programs/', 'jaxpost/hardware/')

# Packages whose public functions all have type annotations. No package may leave this list.
TYPED = ('algorithms', 'data', 'distributed', 'environments', 'formats', 'hardware', 'imports', 'loop', 'losses')
TYPED += ('matmul', 'models', 'monitor', 'planning', 'programs', 'rewards', 'rl', 'roles', 'rollout', 'stage')
TYPED += ('stages', 'storage', 'testing', 'tools', 'types', 'workers')

MAX_FILE, MAX_FUNCTION, MAX_MAIN, MAX_FIELDS = 400, 60, 80, 32  # lines, and fields of ModelConfig
SHORT = {'jaxpost/loop.py': 200, 'jaxpost/rl/controller.py': 200}
SFT = ('jaxpost.algorithms.sft', 'jaxpost.loop', 'jaxpost.stages')
NOT_IN_SFT = ('jaxpost.rollout', 'jaxpost.rewards', 'jaxpost.rl.controller')


def package_of(module):
  parts = module.split('.')
  if parts[0] != 'jaxpost':
    return parts[0]
  return parts[1] if len(parts) > 1 else '__init__'


# ------------------------------------------------------------------ imports


def layers(tree):
  """A module imports only from its own package or from packages in lower rows."""
  for name, file in tree.name.items():
    package = package_of(name)
    if package not in ROW:
      yield f'{file}: {package} is in no layer; add it to ROWS in this test'
      continue
    for statement in tree.imports[file]:
      target_package = package_of(statement.target)
      if statement.target.split('.')[0] not in ('jaxpost', 'launch', 'configs'):
        continue
      if target_package == package or target_package not in ROW or ROW[target_package] < ROW[package]:
        continue
      if package == '__init__' and statement.when == 'lazy':
        continue
      yield (
        f'{file}:{statement.line}: {package} (row {ROW[package]}) imports {target_package} (row'
        f' {ROW[target_package]}); pass it in as an argument, or move the code down'
      )


def generic_names(tree):
  """`launch` and `configs` are imported relatively: once installed, they are jaxpost.launch and jaxpost.configs."""
  for file, imports in tree.imports.items():
    for statement in imports:
      is_generic = statement.target.split('.')[0] in GENERIC
      line = tree.text[file].splitlines()[statement.line - 1]
      if is_generic and not re.match(r'\s*from \.', line):
        yield (
          f'{file}:{statement.line}: imports {statement.target}, which an installed'
          ' jaxpost has under another name; import it relatively'
        )


def gatekeepers(tree):
  """A dependency is imported only by the modules of GATES, and those of FORBIDDEN by none."""
  for file, imports in tree.imports.items():
    for statement in imports:
      top = statement.target.split('.')[0]
      gates = GATES.get(top)
      if gates and not file.startswith(gates):
        yield (f'{file}:{statement.line}: imports {top}; only {" ".join(gates)} may: call a function there')
      if top in FORBIDDEN:
        yield f'{file}:{statement.line}: imports {top}; do without it'


def declared(tree):
  """Every imported dependency is listed in setup.py."""
  setup = (CLONE / 'setup.py').read_text('utf-8')
  listed = {
    re.split(r'[\[<>=!;]', value)[0].strip().lower().replace('_', '-')
    for value in re.findall(r"'([A-Za-z][\w.\-\[\]]*[<>=\[][^']*)'", setup)
  }
  names = {'absl': 'absl-py', 'orbax': 'orbax-checkpoint', 'jetstream': 'google-jetstream', 'yaml': 'pyyaml'}
  for file, imports in tree.imports.items():
    for statement in imports:
      top = statement.target.split('.')[0]
      dist = names.get(top, top).lower().replace('_', '-')
      needs_no_entry = top in sys.stdlib_module_names or top in ('jaxpost', *GENERIC)
      if not needs_no_entry and dist not in listed:
        yield f'{file}:{statement.line}: imports {top}; add {dist} to setup.py'


def jit(tree):
  """Only JITS use `jax.jit` or `jax.pmap`."""
  for file, node in tree.nodes(ast.Attribute, ast.ImportFrom, under='jaxpost'):
    if isinstance(node, ast.Attribute):
      used = ast.unparse(node) in ('jax.jit', 'jax.pmap')
    else:
      used = (node.module or '').split('.')[0] == 'jax' and any(
        alias.name in ('jit', 'pjit', 'pmap') for alias in node.names
      )
    if used and not file.startswith(JITS):
      yield f'{file}:{node.lineno}: jits; move the program to programs/'


def cycles(tree):
  """No modules import each other in a cycle, not even inside functions."""
  visited = set()

  def visit(name, path):
    if name in path:
      cycle = [*path[path.index(name) :], name]
      yield f'{" -> ".join(cycle)}: a cycle; move what both need below them'
    elif name not in visited:
      for other in tree.edges(name, lazy=True):
        yield from visit(other, [*path, name])
      visited.add(name)

  for name in sorted(tree.name):
    yield from visit(name, [])


def rewards_without_jax(tree):
  """Reward functions and workers import no JAX: workers start in milliseconds and never touch a device."""
  roots = [name for name in tree.name if package_of(name) in ('rewards', 'workers')] + ['jaxpost.environments.worker']
  for name in tree.closure(roots, lazy='all'):
    for edge in tree.imports[tree.name[name]]:
      if edge.target.split('.')[0] in ('jax', 'jaxlib', 'flax', 'optax'):
        yield (
          f'{tree.name[name]}:{edge.line}: imports {edge.target}, and rewards/ imports this file; rewards use no jax'
        )


def sft_is_plain(tree):
  """An SFT run imports nothing that only on-policy methods need."""
  importers = tree.closure(SFT, lazy=('jaxpost.algorithms.sft', 'jaxpost.loop'))
  for name, importer in importers.items():
    if name.startswith(NOT_IN_SFT):
      yield (
        f'{name}: imported by {importer or "no one"} in an SFT run; import it inside'
        ' the function of stage/on_policy.py that an on-policy run calls'
      )


def readable(tree):
  """The imports of an entry point stay small, and each limit stays within 1 % of the measured value."""
  for entry in reading.ENTRIES:
    figures = reading.reading(tree, entry.roots, entry.lazy, entry.options)
    for unit, figure, limit in zip(('modules', 'lines', 'links of a chain'), figures, entry.limit):
      if figure > limit:
        yield f'{entry.name}: {figure} {unit}, of {limit} allowed; import inside a function what few runs need, or cut'
      elif figure < limit * 0.99:
        yield f'{entry.name}: {figure} {unit}, but {limit} are allowed; lower the limit in tests/reading.py'


# -------------------------------------------------------------------- sizes


def sizes(tree):
  """No file is longer than its limit: MAX_FILE, or that of SHORT, or MAX_MAIN for a command in launch/."""
  for file, text in tree.text.items():
    limit = SHORT.get(file, MAX_FILE)
    has_main = any(isinstance(n, ast.FunctionDef) and n.name == 'main' for n in tree.ast[file].body)
    if file.startswith('launch/') and has_main:
      limit = MAX_MAIN
    lines = len(text.splitlines())
    if lines > limit:
      yield f'{file}: {lines} lines, of {limit} allowed; split it by purpose'


def functions(tree):
  for file, node in tree.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
    lines = node.end_lineno - node.lineno + 1
    if lines > MAX_FUNCTION:
      yield (f'{file}:{node.lineno}: {node.name} has {lines} lines, of {MAX_FUNCTION} allowed; name its steps')


def model_config(tree):
  for file, node in tree.nodes(ast.ClassDef, under='jaxpost/models/'):
    fields = sum(isinstance(part, ast.AnnAssign) for part in node.body)
    if node.name == 'ModelConfig' and fields > MAX_FIELDS:
      yield (
        f'{file}:{node.lineno}: ModelConfig has {fields} fields, of'
        f' {MAX_FIELDS} allowed; what does not fit is another model file'
      )


# -------------------------------------------------------------------- style


def docstrings(tree):
  """Every module has a docstring, except empty __init__.py files."""
  for file, module in tree.ast.items():
    if not ast.get_docstring(module) and (module.body or not file.endswith('__init__.py')):
      yield f'{file}: no docstring; say what it is for and its shapes'


def families(tree):
  """Only families.py compares the family of a model."""
  for file, node in tree.nodes(ast.Compare, under='jaxpost'):
    sides = [node.left, *node.comparators]
    names = {getattr(side, 'attr', getattr(side, 'id', '')) for side in sides}
    if names & {'family', 'model_type'} and not file.endswith('families.py'):
      yield (
        f'{file}:{node.lineno}: asks for the family; make the difference a field of ModelConfig that families.py sets'
      )


def excepts(tree):
  """No handler catches all exceptions."""
  for file, node in tree.nodes(ast.ExceptHandler):
    kind = ast.unparse(node.type) if node.type else ''
    # A handler of BaseException must raise the exception again, or pass it to a
    # call, which hands it over to a waiting thread.
    is_passed_on = any(
      isinstance(n, ast.Raise) or isinstance(n, ast.Call) and any(ast.unparse(a) == node.name for a in n.args)
      for part in node.body
      for n in ast.walk(part)
    )
    if kind in ('', 'Exception') or 'BaseException' in kind and not is_passed_on:
      yield (f'{file}:{node.lineno}: catches everything; name the errors, or use finally')


def no_pickle(tree):
  """Nothing imports pickle or its relatives, and no call sets `allow_pickle`."""
  for file, imports in tree.imports.items():
    for statement in imports:
      if statement.target.split('.')[0] in PICKLES:
        yield f'{file}:{statement.line}: {statement.target} runs code; use json'
  for file, node in tree.nodes(ast.keyword):
    if node.arg == 'allow_pickle' and ast.unparse(node.value) != 'False':
      yield f'{file}:{node.value.lineno}: allow_pickle runs code; leave it out'


def getattr_config(tree):
  """No `getattr` or `hasattr` on a config."""
  for file, node in tree.nodes(ast.Call):
    if called(node) in ('getattr', 'hasattr') and node.args:
      of = ast.unparse(node.args[0]).split('.')[-1]
      if of in ('config', 'cfg', 'section'):
        yield (f'{file}:{node.lineno}: {called(node)} on a config; name the field, and give it a default in config.py')


def forwarded_kwargs(tree):
  """No public function of jaxpost/ forwards its **kwargs to a call."""
  for file, node in tree.nodes(ast.FunctionDef, under='jaxpost'):
    public = not node.name.startswith('_')
    if node.args.kwarg and public and node not in _nested(tree.ast[file]):
      for call in ast.walk(node):
        if isinstance(call, ast.Call) and any(
          k.arg is None and ast.unparse(k.value) == node.args.kwarg.arg for k in call.keywords
        ):
          yield (f'{file}:{call.lineno}: forwards **{node.args.kwarg.arg}; name the arguments')


def _nested(module):
  outer = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)]
  return [n for o in outer for n in ast.walk(o) if n is not o and isinstance(n, ast.FunctionDef)]


def inheritance(tree):
  """No class inherits from a class of this repository that itself inherits from one."""
  bases = collections.defaultdict(set)
  for _, node in tree.nodes(ast.ClassDef):
    bases[node.name] |= {ast.unparse(b).split('.')[-1] for b in node.bases}
  for file, node in tree.nodes(ast.ClassDef):
    for base in bases[node.name] & set(bases):
      for grand in (bases[base] & set(bases)) - {base}:
        yield (
          f'{file}:{node.lineno}: {node.name} -> {base} -> {grand}: inherits twice; use a field or a function instead'
        )


def typed(tree):
  """Public functions of the packages in TYPED have annotations for all arguments and the result."""
  for file, module in tree.ast.items():
    if file.startswith('jaxpost/') and package_of(file[:-3].replace('/', '.')) in TYPED:
      for node in public_functions(module):
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [a.arg for a in args if a.arg not in ('self', 'cls') and not a.annotation]
        if untyped or node.returns is None:
          missing = ', '.join([*untyped, *(['its result'] if node.returns is None else [])])
          yield f'{file}:{node.lineno}: {node.name} has no type for {missing}; annotate it'


def positional(tree):
  """Calls of this repository's functions pass at most five arguments by position."""
  names = {node.name for _, node in tree.nodes(ast.FunctionDef, ast.ClassDef)} - {'extend'}  # also a list's
  for file, node in tree.nodes(ast.Call):
    spread = any(isinstance(arg, ast.Starred) for arg in node.args)
    if called(node) in names and len(node.args) > 5 and not spread:
      yield f'{file}:{node.lineno}: {called(node)} gets {len(node.args)} by position; name the sixth and on'


def repeated(tree):
  """No text, list or tuple is repeated as often as a condition is true; `a if condition else b` says what is meant."""
  for file, node in tree.nodes(ast.BinOp):
    if isinstance(node.op, ast.Mult):
      for value, times in ((node.left, node.right), (node.right, node.left)):
        is_condition = isinstance(times, (ast.Compare, ast.BoolOp)) or called_bool(times)
        is_condition |= isinstance(times, ast.UnaryOp) and isinstance(times.op, ast.Not)
        is_sequence = isinstance(value, (ast.List, ast.Tuple, ast.JoinedStr))
        is_sequence |= isinstance(value, ast.Constant) and isinstance(value.value, str)
        if is_condition and (is_sequence or called_bool(times)):
          yield f'{file}:{node.lineno}: {ast.unparse(node)[:60]} repeats by a condition; write a conditional expression'


def called_bool(node):
  """Returns whether an expression is a call of `bool`."""
  return isinstance(node, ast.Call) and called(node) == 'bool'


def public_functions(node):
  """Yields the public functions and methods of a module or class."""
  for child in node.body:
    if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith('_'):
      yield child
    elif isinstance(child, ast.ClassDef) and not child.name.startswith('_'):
      yield from public_functions(child)


# Rule -> a file, and text that breaks the rule when appended to the file.
RULES = {
  layers: ('jaxpost/losses/head.py', 'from jaxpost.models import layers\n'),
  generic_names: ('jaxpost/stage/prepare.py', 'import configs\n'),
  gatekeepers: ('jaxpost/stage/optim.py', 'def f():\n  import grain\n'),
  declared: ('jaxpost/stage/optim.py', 'import pandas\n'),
  jit: ('jaxpost/roles.py', 'f = jax.jit(print)\n'),
  cycles: ('jaxpost/errors.py', 'def f():\n  from jaxpost.imports import load_callable\n'),
  rewards_without_jax: ('jaxpost/imports.py', 'import jax.numpy as jnp\n'),
  sft_is_plain: ('jaxpost/stage/optim.py', 'import jaxpost.rewards.pool\n'),
  readable: ('jaxpost/stage/optim.py', '#\n' * 9999),
  sizes: ('jaxpost/loop.py', '#\n' * 200),
  functions: ('jaxpost/stage/optim.py', 'def f():\n' + '  print()\n' * 60),
  model_config: ('jaxpost/models/model.py', 'class ModelConfig:\n' + ''.join(f'  f{i}: int = 0\n' for i in range(33))),
  docstrings: ('jaxpost/data/new.py', 'X = 1\n'),
  families: ('jaxpost/stage/prepare.py', 'def f(c):\n  return c.family == "llama"\n'),
  excepts: ('jaxpost/stage/prepare.py', 'try:\n  1\nexcept Exception:\n  pass\n'),
  no_pickle: ('jaxpost/monitor/metrics.py', 'import pickle\n'),
  getattr_config: ('jaxpost/stage/prepare.py', 'def f(x):\n  return getattr(x.config, "lr", 1)\n'),
  forwarded_kwargs: ('jaxpost/stage/prepare.py', 'def f(**kw):\n  return f(**kw)\n'),
  typed: ('jaxpost/data/packing.py', 'def f(x):\n  return x\n'),
  positional: ('jaxpost/stage/optim.py', 'def f(*x):\n  return f(1, 2, 3, 4, 5, 6)\n'),
  repeated: ('jaxpost/stage/optim.py', 'def f(n):\n  return "s" * (n > 1)\n'),
  inheritance: ('jaxpost/stage/optim.py', 'class A: pass\nclass B(A): pass\nclass C(B): pass\n'),
}


@pytest.fixture(scope='module')
def tree():
  return Tree(read(CLONE))


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_rule(tree, rule):
  complaints = list(rule(tree))
  assert not complaints, '\n' + '\n'.join(complaints)


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_rule_can_fail(tree, rule):
  file, text = RULES[rule]
  text = tree.text.get(file, '') + text
  assert set(rule(Tree({**tree.text, file: text}))) - set(rule(tree))


def modules_after_importing(*names):
  """Returns the names of all modules that a fresh interpreter has loaded after importing these."""
  code = f'import sys, {", ".join(names)}; print(*sys.modules)'
  return children.run('-c', code).stdout.split()


def test_importing_jaxpost_imports_no_jax():
  assert not {'jax', 'numpy', 'flax'} & set(modules_after_importing('jaxpost'))


def test_importing_sft_imports_no_on_policy_module():
  assert not [name for name in modules_after_importing(*SFT) if name.startswith(NOT_IN_SFT)]


def test_readme_map_names_all_packages_and_root_modules():
  """The map names every package and every module at the root of jaxpost/, and nothing that no longer exists."""
  text = (CLONE / 'README.md').read_text('utf-8')
  block = re.search(r'```\njaxpost/\n(.*?)\nconfigs/', text, re.S)[1]
  named = set(re.findall(r'(?:^  |  )(\w+(?:/|\.py))', block, re.M))
  root = CLONE / 'jaxpost'
  packages = {f'{path.parent.name}/' for path in root.glob('*/__init__.py')}
  modules = {path.name for path in root.glob('*.py')} - {'__init__.py'}
  assert named == packages | modules


def test_package_init_has_only_a_docstring():
  """A package's __init__.py is one docstring, so that importing a package runs no code."""
  for path in sorted((CLONE / 'jaxpost').glob('*/__init__.py')):
    module = ast.parse(path.read_text('utf-8'))
    assert len(ast.get_docstring(module) or '') > 100 and not has_code(module), path


def test_options_of_reading_name_existing_modules_and_config_fields(tree):
  from jaxpost.stage.config import defaults

  for module, field in reading.OPTIONS.items():
    assert module in tree.name, module
    section = defaults()
    for name in field.split('.'):
      section = section[name]


def test_optional_module_counts_in_closure_only_if_imported_at_top_level(tree):
  text = dict(tree.text)
  text['jaxpost/loop.py'] += 'import jaxpost.models.lora\n'
  added = set(Tree(text).closure((reading.LOOP,))) - set(tree.closure((reading.LOOP,)))
  assert 'jaxpost.models.lora' in added
  text['jaxpost/loop.py'] = tree.text['jaxpost/loop.py'] + 'def f():\n  import jaxpost.models.lora\n'
  assert Tree(text).closure((reading.LOOP,), lazy='all').keys() == tree.closure((reading.LOOP,), lazy='all').keys()


def test_jaxpost_root_has_at_most_10_modules():
  assert len(list((CLONE / 'jaxpost').glob('*.py'))) <= 10
