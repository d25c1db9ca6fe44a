"""The documentation site builds without a warning and lists every page; its help names what is there."""

import importlib.util
import pathlib
import re
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
  others = {'plan.json', 'report.html', 'summary.json', 'samples/', 'launch.inspect', 'launch.plan'}
  assert set(named) - known - others <= {'data.template_kwargs.enable_thinking'} and len(set(named) & known) > 60


def test_every_command_is_listed():
  text = (DOCS / 'getting_started.md').read_text('utf-8').partition('## Commands')[2]
  assert set(re.findall(r'^\| `(\w+)` \|', text, re.M)) == set(VERBS)
