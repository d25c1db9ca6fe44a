"""The documentation is true: its table, its example, the files it names."""

import ast
import importlib
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxpost.algorithms import kto
from jaxpost.errors import InputError
from jaxpost.losses import preferences
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from launch import config_flag

CLONE = pathlib.Path(__file__).resolve().parents[1]
METHODS = sorted((CLONE / 'docs/methods').glob('*.md'))
PAGES = [*sorted((CLONE / 'docs').glob('*.md')), *METHODS]
SAVED = {'my_reward.py', 'warm.py', 'guess.py', 'games.py'}  # files that readers of a page make from its blocks
LONGEST = {'concepts.md': 80, 'your_reward.md': 60}


def test_config_table_is_up_to_date():
  made = subprocess.run(
    [
      sys.executable,
      '-c',
      'import sys, make_config_table as m; sys.stdout.reconfigure(encoding="utf-8"); print(m.page(), end="")',
    ],
    cwd=CLONE / 'docs',
    check=True,
    capture_output=True,
    encoding='utf-8',
  )
  assert (CLONE / 'docs/config.md').read_text('utf-8') == made.stdout, (
    'docs/config.md is not of this jaxpost/stage/schema.py; run python docs/make_config_table.py'
  )


def test_config_table_tells_every_field():
  from jaxpost.stage import config

  text = (CLONE / 'docs/config.md').read_text('utf-8')

  def names(value, prefix=''):
    for key, inner in value.items():
      if inner and isinstance(inner, dict):
        yield from names(inner, f'{prefix}{key}.')
      elif prefix + key != 'user':  # open: nothing in the library reads it
        yield prefix + key

  wanted = set(names(config.defaults()))
  assert len(wanted) > 50
  assert set(re.findall(r'^\| `([\w.]+)`', text, re.M)) == wanted


@pytest.mark.parametrize('page', [CLONE / 'README.md', *PAGES], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
  text = page.read_text('utf-8')
  for verb in re.findall(r'python -m launch\.(?!NAME)(\w+)', text):
    assert (CLONE / f'launch/{verb}.py').is_file(), verb
  for file in re.findall(r'\b(?:configs|docs|launch|notebooks)/\w+\.\w+', text):
    if 'NAME' not in file:
      assert (CLONE / file).is_file(), file
  for file in re.findall(r'`((?:\w+/)*\w+\.py)`', text):
    known = file in SAVED or (CLONE / file).is_file()
    assert known or (CLONE / 'jaxpost' / file).is_file(), file
  assert len(text.splitlines()) <= LONGEST.get(page.name, 10_000)


@pytest.mark.parametrize('page', [CLONE / 'README.md', *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
  for target in re.findall(r'\]\(([^)#]+)', page.read_text('utf-8')):
    if '://' not in target:
      assert (page.parent / target).exists(), target


def test_readme_begins_with_a_run():
  """Its first screen has the two commands and their result; it is short, and the docs have the rest."""
  lines = (CLONE / 'README.md').read_text('utf-8').splitlines()
  shown = [line for line in lines[:18] if line.startswith(('pip install', 'python -m launch.train', '!['))]
  assert [line.split()[0] for line in shown] == ['pip', 'python', '![The'] and len(lines) <= 110


def test_method_pages_are_up_to_date(monkeypatch):
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  made = importlib.import_module('make_method_pages').pages()
  kept = {page.name: page.read_text('utf-8') for page in [*METHODS, *(CLONE / 'docs/methods').glob('*.svg')]}
  assert kept == made, 'run python docs/make_method_pages.py'


def test_a_stored_curve_is_drawn_on_the_page_of_its_method(monkeypatch):
  """A line for each seed; docs/make_methods_table.py stores the curves of the methods that it runs."""
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  maker = importlib.import_module('make_method_pages')
  found = dict(metric='reward', steps=[10, 20, 30], seeds=[[0.1, 0.2, 0.4], [0.2, 0.2, 0.3]])
  monkeypatch.setattr(maker.facts, 'curves', lambda: dict(ppo=found))
  made = maker.pages()
  assert made['ppo.svg'].count('<polyline') == 2 and '>seed 1</text>' in made['ppo.svg']
  assert '![Reward over 30 steps](ppo.svg)' in made['ppo.md'] and '.svg' not in made['dpo.md']


def test_every_method_has_a_heading():
  found = [name for page in METHODS for name in re.findall(r'^##? ([a-z_]+)$', page.read_text('utf-8'), re.M)]
  assert sorted(found) == sorted(algorithms.ALGORITHMS)


def in_code(text):
  """Returns the texts between backticks of a page, outside of code blocks."""
  return set(re.findall(r'`([^`\n]+)`', re.sub(r'^```$.*?^```$', '', text, flags=re.M | re.S)))


@pytest.mark.parametrize('page', METHODS, ids=lambda page: page.name)
def test_method_pages_name_fields_and_metrics(page):
  config, metrics, rewards = (
    (CLONE / f'docs/{name}.md').read_text('utf-8') for name in ('config', 'metrics', 'rewards')
  )
  known = {*algorithms.ALGORITHMS, *preferences.LOSSES, *kto.LOSSES, 'pass@1', 'samples/', 'turn_reward'}
  known |= set(re.findall(r'^\| `([\w.]+)`', config, re.M))
  known |= in_code('\n'.join(re.findall(r'^\| (`.*?) \|', metrics + rewards, re.M)))
  for text in in_code(page.read_text('utf-8')):
    name = re.sub(r'^(?:--)?config\.|(?<=^reward)/unfiltered$', '', text)
    name = re.sub(r'^rewards/\w+/', 'rewards/NAME/', name)
    others = text.endswith('.py') or text.startswith('python -m ')  # in test_what_a_page_names_is_there
    assert others or name in known or name.partition('=')[0] in known, text


@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
def test_commands_of_methods_are_accepted(name):
  text = '\n'.join(page.read_text('utf-8') for page in METHODS)
  (command,) = re.findall(rf'^python -m launch\.train (--config=.* --workdir=runs/{name}(?: \\\n.*)?)$', text, re.M)
  (file, *_), given = config_flag.split(shlex.split(command))
  path, _, argument = file.removeprefix('--config=').partition(':')
  config = importlib.import_module(path.removesuffix('.py').replace('/', '.')).get_config(argument or None)
  config_flag.apply(config, given)
  stage = list(config_lib.parse(config.to_dict()).values())[-1]
  assert stage.algorithm == name
  algorithm = algorithms.load_algorithm(name)
  algorithm.check(config_lib.resolve(stage, algorithm.defaults))


@pytest.fixture
def my_reward(tmp_path):
  """my_reward.py as docs/your_reward.md prints it."""
  text = (CLONE / 'docs/your_reward.md').read_text('utf-8')
  path = tmp_path / 'my_reward.py'
  path.write_text(re.search(r'```python\n(.*?)```', text, re.S)[1], 'utf-8')
  return path


def group(*texts, answer):
  said = [[{'role': 'assistant', 'content': text}] for text in texts]
  return Group(['2+2='] * len(texts), said, [[0]] * len(texts), {'answer': [answer] * len(texts)})


def test_reward_example(my_reward):
  with RewardPool(f'{my_reward}:right_sum') as pool:
    pool.check(['prompt', 'completion', 'answer'])
    right, unknown = pool.grade([group('4', '5', '?', answer='4'), group('4', answer=None)])
    assert right.rewards == [1.0, pytest.approx(0.1), 0.0]
    assert unknown.rewards == [None]
    assert pool.stats == dict(groups=2, failed_groups=0, timeouts=0, masked_rows=1)


def test_reward_failure_is_no_zero(my_reward):
  """A bad group is masked and told; a first batch of them stops the run."""
  broken = group('4', '5', answer='4')
  broken.completions[1] = 'no message'  # the example takes messages
  with RewardPool(f'{my_reward}:right_sum') as pool:
    bad, good = pool.grade([broken, group('4', answer='4')])
    assert bad.rewards == [None, None] and good.rewards == [1.0]
    assert re.search(r'TypeError.*my_reward\.py:3', bad.error)
    assert pool.stats['failed_groups'] == 1
  with RewardPool(f'{my_reward}:right_sum') as pool:
    with pytest.raises(InputError, match=r'every group.*my_reward\.py:3'):
      pool.grade([broken])


def test_reward_argument_that_is_no_column(my_reward):
  with RewardPool(f'{my_reward}:right_sum') as pool:
    with pytest.raises(InputError, match="needs the column 'answer'"):
      pool.check(['prompt', 'completion'])


def test_adding_a_family_is_an_entry():
  """No entry of the table has more than 22 lines; test_new_family.py adds another."""
  lines = (CLONE / 'jaxpost/formats/families.py').read_text('utf-8').splitlines()
  (table,) = [
    n
    for n in ast.parse('\n'.join(lines)).body
    if isinstance(n, (ast.Assign, ast.AnnAssign)) and 'FAMILIES' in ast.unparse(n)[:12]
  ]
  lengths = [value.end_lineno - key.lineno + 1 for key, value in zip(table.value.keys, table.value.values)]
  assert max(lengths) <= 22 and len(lengths) > 12
  page = (CLONE / 'docs/models.md').read_text('utf-8')
  assert f'The longest entry has {max(lengths)} lines' in page


def test_the_docs_say_where_things_happen():
  """Every name of the table is in one of the files of its row."""
  text = (CLONE / 'docs/reading_the_code.md').read_text('utf-8')
  rows = re.findall(r'^\| [^|]*\? \| (.*?) \| (.*?) \|$', text, re.M)
  assert len(rows) > 10
  for files, names in rows:
    files = re.findall(r'`([\w/]+\.py)`', files)
    source = '\n'.join((CLONE / 'jaxpost' / file).read_text('utf-8') for file in files)
    for name in re.findall(r'`(\w+)`', names):
      assert re.search(rf'^\s*(?:class|def) {name}\b|^{name}\b.* = ', source, re.M), (files, name)


def test_the_example_of_rounding_shows_what_other_sums_change(monkeypatch, capsys):
  spec = importlib.util.spec_from_file_location('rounding', CLONE / 'docs/examples/rounding.py')
  example = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(example)
  for name, value in dict(T=64, D=128, F=256, H=4, V=256, L=8).items():
    monkeypatch.setattr(example, name, value)
  example.main()
  found = [float(x) for x in re.findall(r'KL (\S+),', capsys.readouterr().out)]
  assert len(found) == 3 and 0 < max(found) < 2 * min(found)  # whatever differs grows to the same size
