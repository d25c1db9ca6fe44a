"""The documentation site builds without a warning and lists every page; its pages name existing fields and commands."""

import importlib
import importlib.util
import json
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

from launch.main import VERBS

CLONE = pathlib.Path(__file__).resolve().parents[1]
DOCS = CLONE / 'docs'
MISSING = [name for name in ('sphinx', 'myst_nb', 'furo') if importlib.util.find_spec(name) is None]


@pytest.mark.ci
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[docs]'")
def test_builds_without_a_warning(tmp_path):
  build = [sys.executable, '-m', 'sphinx', '-q', '-W', '--keep-going', '-b', 'html', '-d', str(tmp_path / 'trees')]
  done = subprocess.run([*build, str(DOCS), str(tmp_path / 'site')], cwd=CLONE, capture_output=True, encoding='utf-8')
  assert done.returncode == 0, done.stderr[-4000:]
  listed = re.findall(
    r'^- \[.*\]\((?:_sources/)?(.*?)(?:\.html|\.\w+\.txt)\): .', (tmp_path / 'site/llms.txt').read_text('utf-8'), re.M
  )
  pages = {
    page.relative_to(DOCS).with_suffix('').as_posix() for page in DOCS.rglob('*.*') if page.suffix in ('.md', '.ipynb')
  }
  assert sorted(listed) == sorted(pages - {'index'})


def test_troubleshooting_names_fields_and_metrics():
  known = set(re.findall(r'^\| `([\w.]+)`', (DOCS / 'config.md').read_text('utf-8'), re.M))
  for row in re.findall(r'^\| (`.*?) \|', (DOCS / 'metrics.md').read_text('utf-8'), re.M):
    known |= set(re.findall(r'`([^`]+)`', row))
  named = re.findall(r'`([a-z_]+[./][\w/.]+)(?:=[^`]*)?`', (DOCS / 'troubleshooting.md').read_text('utf-8'))
  other_names = {'plan.json', 'report.html', 'summary.json', 'samples/', 'launch.inspect', 'launch.plan'}
  assert set(named) - known - other_names <= {'data.template_kwargs.enable_thinking'} and len(set(named) & known) > 60


def site_settings(monkeypatch, **environment):
  """Returns the names that docs/conf.py defines with these environment variables."""
  monkeypatch.setattr(sys, 'path', list(sys.path))
  for name in ('JAXPOST_REPOSITORY', 'JAXPOST_REVISION'):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  return runpy.run_path(str(DOCS / 'conf.py'))


def test_the_site_links_to_a_repository_that_is_named(monkeypatch):
  page = ['[n](../notebooks/01.ipynb)\n    git clone URL jaxpost\n']
  named = site_settings(monkeypatch, JAXPOST_REPOSITORY='https://github.com/acme/post.git', JAXPOST_REVISION='v0.2.0')
  options = named['html_theme_options']
  assert (options['source_repository'], options['source_branch']) == ('https://github.com/acme/post', 'main')
  named['point_into_site'](None, 'getting_started', page)
  assert page == ['[n](notebooks/01.ipynb)\n    git clone https://github.com/acme/post jaxpost\n']
  assert 'git clone URL ' in (DOCS / 'getting_started.md').read_text('utf-8')
  assert 'html_theme_options' not in site_settings(monkeypatch)
  with pytest.raises(ValueError, match='no address of the form https://github.com/ORG/NAME'):
    site_settings(monkeypatch, JAXPOST_REPOSITORY='git@github.com:acme/post')


def test_stamping_notebooks_is_undone_without_an_address(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(DOCS))
  stamp_badges = importlib.import_module('stamp_badges')
  for folder in ('notebooks', 'docs/notebook_outputs'):
    shutil.copytree(CLONE / folder, tmp_path / folder, ignore=shutil.ignore_patterns('.*'))
  files = sorted(path for path in tmp_path.rglob('*') if path.suffix in ('.ipynb', '.json'))
  stamp_badges.main(tmp_path)
  unstamped = [path.read_bytes() for path in files]
  for revision in ('main', 'v0.2.0'):  # the second stamp replaces the first
    stamp_badges.main(tmp_path, 'https://github.com/acme/post/', revision)
  for path in (tmp_path / 'notebooks').glob('*.ipynb'):
    cells = [''.join(cell['source']) for cell in json.loads(path.read_text('utf-8'))['cells']]
    where = f'https://colab.research.google.com/github/acme/post/blob/v0.2.0/notebooks/{path.name}'
    assert re.match(r'# [^\n]+\n\n\[!\[Open in Colab\]\(https://\S+\.svg\)\]\((.*)\)\n\n\w', cells[0])[1] == where
    stored = json.loads((tmp_path / f'docs/notebook_outputs/{path.stem}.json').read_text('utf-8'))
    assert stored['code'][0] == cells[1] and cells[0].count('colab.research') == 2
  stamp_badges.main(tmp_path)
  assert [path.read_bytes() for path in files] == unstamped


@pytest.mark.parametrize('place', ['a checkout', 'no checkout'])
def test_a_stamped_notebook_clones_where_there_is_no_checkout(place, tmp_path, monkeypatch):
  """The first code cell of each notebook is run, with commands that are only recorded."""
  monkeypatch.syspath_prepend(str(DOCS))
  stamp_badges = importlib.import_module('stamp_badges')
  called = []
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  monkeypatch.setattr(subprocess, 'run', lambda command, **options: called.append((command, options.get('cwd'))))
  monkeypatch.setattr(sys, 'path', list(sys.path))
  work = CLONE / 'notebooks' if place == 'a checkout' else tmp_path
  monkeypatch.chdir(work)
  for path in (CLONE / 'notebooks').glob('*.ipynb'):
    book = json.loads(path.read_text('utf-8'))
    code = ''.join(stamp_badges.stamp(book, path.stem, 'https://github.com/acme/post', 'v0.2.0')['cells'][1]['source'])
    called.clear()
    exec(code, {})
    *clones, (install, cwd) = called
    assert install[1:4] == ['-m', 'pip', 'install'] and sys.path[0] == str(cwd)
    if place == 'a checkout':
      assert (clones, cwd) == ([], CLONE)
    else:
      ((clone, _),) = clones
      assert clone[:2] == ['git', 'clone'] and clone[-4:] == ['-b', 'v0.2.0', 'https://github.com/acme/post', str(cwd)]
      unstamped = ''.join(stamp_badges.stamp(book, path.stem, '')['cells'][1]['source'])
      with pytest.raises(AssertionError, match='not inside a checkout'):
        exec(unstamped, {})


def test_every_command_is_listed():
  text = (DOCS / 'getting_started.md').read_text('utf-8').partition('## Commands')[2]
  assert set(re.findall(r'^\| `(\w+)` \|', text, re.M)) == set(VERBS)
