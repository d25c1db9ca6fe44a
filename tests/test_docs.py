"""The documentation matches the code: generated pages are current, files, links and names exist, examples work."""

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
from jaxpost.rewards.groups import Group, stats_of
from jaxpost.rewards.pool import RewardPool
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from launch import config_flag

CLONE = pathlib.Path(__file__).resolve().parents[1]
METHODS = sorted((CLONE / 'docs/methods').glob('*.md'))
PAGES = [*sorted((CLONE / 'docs').glob('*.md')), *METHODS]
SAVED = {'my_reward.py', 'warm.py', 'guess.py', 'games.py'}  # files that readers of a page make from its blocks
MAX_LINES = {'concepts.md': 80, 'your_reward.md': 60}


def test_config_table_is_up_to_date():
  generated = subprocess.run(
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
  assert (CLONE / 'docs/config.md').read_text('utf-8') == generated.stdout, (
    'docs/config.md is not of this jaxpost/stage/schema.py; run python docs/make_config_table.py'
  )


def test_config_table_lists_every_field():
  from jaxpost.stage import config

  text = (CLONE / 'docs/config.md').read_text('utf-8')

  def names(value, prefix=''):
    for key, inner in value.items():
      if inner and isinstance(inner, dict):
        yield from names(inner, f'{prefix}{key}.')
      elif prefix + key != 'user':  # `user` is open: its fields are not known to the library
        yield prefix + key

  fields = set(names(config.defaults()))
  assert len(fields) > 50
  assert set(re.findall(r'^\| `([\w.]+)`', text, re.M)) == fields


@pytest.mark.parametrize('page', [CLONE / 'README.md', *PAGES], ids=lambda page: page.name)
def test_files_and_commands_named_on_a_page_exist(page):
  text = page.read_text('utf-8')
  for verb in re.findall(r'python -m launch\.(?!NAME)(\w+)', text):
    assert (CLONE / f'launch/{verb}.py').is_file(), verb
  for file in re.findall(r'\b(?:configs|docs|launch|notebooks)/\w+\.\w+', text):
    if 'NAME' not in file:
      assert (CLONE / file).is_file(), file
  for file in re.findall(r'`((?:\w+/)*\w+\.py)`', text):
    known = file in SAVED or (CLONE / file).is_file()
    assert known or (CLONE / 'jaxpost' / file).is_file(), file
  assert len(text.splitlines()) <= MAX_LINES.get(page.name, 10_000)


@pytest.mark.parametrize('page', [CLONE / 'README.md', *PAGES], ids=lambda page: page.name)
def test_relative_links_of_a_page_exist(page):
  for target in re.findall(r'\]\(([^)#]+)', page.read_text('utf-8')):
    if '://' not in target:
      assert (page.parent / target).exists(), target


def test_readme_begins_with_install_train_and_result():
  """The first screen shows both commands and their result; the README stays short, as the docs have the details."""
  lines = (CLONE / 'README.md').read_text('utf-8').splitlines()
  shown = [line for line in lines[:18] if line.startswith(('pip install', 'python -m launch.train', '!['))]
  assert [line.split()[0] for line in shown] == ['pip', 'python', '![The'] and len(lines) <= 110


def test_method_pages_are_up_to_date(monkeypatch):
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  generated = importlib.import_module('make_method_pages').pages()
  committed = {page.name: page.read_text('utf-8') for page in [*METHODS, *(CLONE / 'docs/methods').glob('*.svg')]}
  assert committed == generated, 'run python docs/make_method_pages.py'


def test_stored_curves_are_drawn_on_the_page_of_their_method(monkeypatch):
  """Each seed is a line of the plot; docs/make_methods_table.py stores the curves of the methods that it runs."""
  monkeypatch.syspath_prepend(str(CLONE / 'docs'))
  maker = importlib.import_module('make_method_pages')
  curves = dict(metric='reward', steps=[10, 20, 30], seeds=[[0.1, 0.2, 0.4], [0.2, 0.2, 0.3]])
  monkeypatch.setattr(maker.facts, 'curves', lambda: dict(ppo=curves))
  pages = maker.pages()
  assert pages['ppo.svg'].count('<polyline') == 2 and '>seed 1</text>' in pages['ppo.svg']
  assert '![Reward over 30 steps](ppo.svg)' in pages['ppo.md'] and '.svg' not in pages['dpo.md']


def test_every_method_has_a_heading():
  headings = [name for page in METHODS for name in re.findall(r'^##? ([a-z_]+)$', page.read_text('utf-8'), re.M)]
  assert sorted(headings) == sorted(algorithms.ALGORITHMS)


def in_code(text):
  """Returns the texts between backticks of a page, except those in code blocks."""
  return set(re.findall(r'`([^`\n]+)`', re.sub(r'^```$.*?^```$', '', text, flags=re.M | re.S)))


@pytest.mark.parametrize('page', METHODS, ids=lambda page: page.name)
def test_names_in_code_on_method_pages_exist(page):
  config, metrics, rewards = (
    (CLONE / f'docs/{name}.md').read_text('utf-8') for name in ('config', 'metrics', 'rewards')
  )
  known = {*algorithms.ALGORITHMS, *preferences.LOSSES, *kto.LOSSES, 'pass@1', 'samples/', 'turn_reward'}
  known |= set(re.findall(r'^\| `([\w.]+)`', config, re.M))
  known |= in_code('\n'.join(re.findall(r'^\| (`.*?) \|', metrics + rewards, re.M)))
  for text in in_code(page.read_text('utf-8')):
    name = re.sub(r'^(?:--)?config\.|(?<=^reward)/unfiltered$', '', text)
    name = re.sub(r'^rewards/\w+/', 'rewards/NAME/', name)
    # Files and commands are the business of test_files_and_commands_named_on_a_page_exist.
    elsewhere = text.endswith('.py') or text.startswith('python -m ')
    assert elsewhere or name in known or name.partition('=')[0] in known, text


@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
def test_commands_of_methods_are_accepted(name):
  text = '\n'.join(page.read_text('utf-8') for page in METHODS)
  (command,) = re.findall(rf'^python -m launch\.train (--config=.* --workdir=runs/{name}(?: \\\n.*)?)$', text, re.M)
  (file, *_), overrides = config_flag.split(shlex.split(command))
  path, _, argument = file.removeprefix('--config=').partition(':')
  config = importlib.import_module(path.removesuffix('.py').replace('/', '.')).get_config(argument or None)
  config_flag.apply(config, overrides)
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
  completions = [[{'role': 'assistant', 'content': text}] for text in texts]
  return Group(['2+2='] * len(texts), completions, [[0]] * len(texts), {'answer': [answer] * len(texts)})


def test_reward_example_of_the_docs_grades_as_described(my_reward):
  with RewardPool(f'{my_reward}:right_sum') as pool:
    pool.check(['prompt', 'completion', 'answer'])
    right, unknown = pool.grade([group('4', '5', '?', answer='4'), group('4', answer=None)])
    assert right.rewards == [1.0, pytest.approx(0.1), 0.0]
    assert unknown.rewards == [None]
    assert stats_of([right, unknown]) == dict(groups=2, failed_groups=0, timeouts=0, masked_rows=1)


def test_failing_reward_masks_its_group_and_stops_a_run_if_all_fail(my_reward):
  """A failing group is masked and reported, not graded as 0; if the whole first batch fails, the run stops."""
  broken = group('4', '5', answer='4')
  broken.completions[1] = 'no message'  # the example expects a list of messages
  with RewardPool(f'{my_reward}:right_sum') as pool:
    bad, good = pool.grade([broken, group('4', answer='4')])
    assert bad.rewards == [None, None] and good.rewards == [1.0]
    assert re.search(r'TypeError.*my_reward\.py:3', bad.error)
    assert stats_of([bad, good])['failed_groups'] == 1
  with RewardPool(f'{my_reward}:right_sum') as pool:
    with pytest.raises(InputError, match=r'every group.*my_reward\.py:3'):
      pool.grade([broken])


def test_reward_argument_without_a_column_is_refused(my_reward):
  with RewardPool(f'{my_reward}:right_sum') as pool:
    with pytest.raises(InputError, match="needs the column 'answer'"):
      pool.check(['prompt', 'completion'])


def test_family_entries_are_as_short_as_the_docs_say():
  """No entry of the table has more than 22 lines; test_new_family.py adds a family."""
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


def test_names_in_reading_the_code_are_in_the_named_files():
  """Every name in a row of the table is defined in one of the files of that row."""
  text = (CLONE / 'docs/reading_the_code.md').read_text('utf-8')
  rows = re.findall(r'^\| [^|]*\? \| (.*?) \| (.*?) \|$', text, re.M)
  assert len(rows) > 10
  for files, names in rows:
    files = re.findall(r'`([\w/]+\.py)`', files)
    source = '\n'.join((CLONE / 'jaxpost' / file).read_text('utf-8') for file in files)
    for name in re.findall(r'`(\w+)`', names):
      assert re.search(rf'^\s*(?:class|def) {name}\b|^{name}\b.* = ', source, re.M), (files, name)


def test_rounding_example_shows_divergences_of_one_size(monkeypatch, capsys):
  spec = importlib.util.spec_from_file_location('rounding', CLONE / 'docs/examples/rounding.py')
  example = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(example)
  for name, value in dict(T=64, D=128, F=256, H=4, V=256, L=8).items():
    monkeypatch.setattr(example, name, value)
  example.main()
  divergences = [float(x) for x in re.findall(r'KL (\S+),', capsys.readouterr().out)]
  # Any difference in rounding grows to the same size.
  assert len(divergences) == 3 and 0 < max(divergences) < 2 * min(divergences)
