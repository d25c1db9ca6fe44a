"""Runs side by side: configs, paired differences, where they part, the page."""

import html.parser
import itertools
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys

import browser
import pytest
import scipy.stats
from test_report import Page, make_run
from test_view import row, write

from jaxpost.errors import InputError
from jaxpost.stage.config import defaults
from jaxpost.tools import compare_runs

CLONE = pathlib.Path(__file__).resolve().parents[1]
NAMES = ('a', 'b')


@pytest.fixture
def runs(tmp_path):
  """Two runs with the same prompts: the second has 1 more reward in prompt 1, and says the same until step 2."""
  for name, lr in zip(NAMES, (1e-3, 2e-3)):
    run = tmp_path / name
    make_run(run, stages=('grpo',), steps=4)
    config = defaults() | {'algorithm': 'grpo'}
    config['optim'] |= {'lr': lr}
    config['log'] |= {'every': 7 if name == 'a' else 9}
    (run / 'config.json').write_text(json.dumps(config))
    for step in (1, 2):
      rows = [row(step, p, s, reward=float(s == 0) + (p == 1) * (name == 'b')) for p in range(3) for s in range(4)]
      if step == 2 and name == 'b':
        rows[6]['completion'] = rows[6]['completion'].replace('said 2', 'said two')
      write(run, step, rows)
  return [tmp_path / name for name in NAMES]


def test_config_without_what_changes_nothing(runs):
  assert compare_runs.compare(*runs).fields == {'grpo.optim.lr': (1e-3, 2e-3)}


def test_a_stage_that_only_one_has_is_one_line(runs):
  config = json.loads((runs[1] / 'config.json').read_text())
  (runs[1] / 'config.json').write_text(json.dumps(config | {'stages': ['sft', 'grpo'], 'sft': {}, 'grpo': {}}))
  assert compare_runs.compare(*runs).fields['stages'] == (['grpo'], ['sft', 'grpo'])
  assert len(compare_runs.compare(*runs).fields) == 2


def test_stages_of_other_names_are_compared_by_position(runs):
  """The last with the last, each with the values that its method uses; what only one of them reads says nothing."""
  config = json.loads((runs[1] / 'config.json').read_text())
  config['optim']['lr'] = -1.0
  (runs[1] / 'config.json').write_text(json.dumps(config))
  config |= {'algorithm': 'sft', 'data': config['data'] | {'path': 'other.jsonl'}}
  (runs[0] / 'config.json').write_text(json.dumps(config | {'stages': ['warm', 'sft'], 'warm': {}, 'sft': {}}))
  fields = compare_runs.compare(*runs).fields
  assert fields['stages'] == (['warm', 'sft'], ['grpo'])
  assert fields['sft/grpo.optim.lr'] == (2e-5, 1e-6) and fields['sft/grpo.data.path'][0] == 'other.jsonl'
  assert fields['sft/grpo.algorithm'] == ('sft', 'grpo')
  assert not any(key.startswith(('warm', 'sft/grpo.rl.', 'sft/grpo.rollout.')) for key in fields), fields


def test_figures_are_said_once_stage_by_stage(tmp_path):
  """The table leaves out the mean of a single reward and its pass@1, which repeat other rows, and spreads."""
  runs = [tmp_path / 'a', tmp_path / 'b']
  for run in runs:
    make_run(run, stages=('sft', 'grpo'), steps=4)
    (run / 'config.json').write_text('{}')
    with open(run / 'metrics.jsonl', 'a', encoding='utf-8') as file:
      for stage in ('sft', 'grpo'):
        more = {'pass@1/right': 0.5, 'rewards/right/std': 0.1, 'perplexity': 2.0}
        file.write(json.dumps(dict(stage=stage, split='eval', step=4, time=0, **{'pass@1': 0.5}, **more)) + '\n')
  found = list(compare_runs.compare(*runs).figures)
  assert {'pass@1/sft', 'perplexity/sft', 'pass@1/grpo', 'perplexity/grpo'} <= set(found)
  assert not {'pass@1/right/sft', 'rewards/right/std/sft'} & set(found)
  assert [stage for stage, _ in itertools.groupby(key.rpartition('/')[2] for key in found)] == ['sft', 'grpo']


def test_a_curve_that_says_nothing_new_is_not_drawn():
  def drawn(mean):
    row = {'stage': 'grpo', 'split': 'train', 'step': 1, 'reward': 0.5, 'rewards/right/mean': mean}
    return [chart['key'] for chart in compare_runs._charts({'a': [row]}, {})]

  assert drawn(0.5) == ['reward'] and drawn(0.25) == ['reward', 'rewards/right/mean']


def test_paired_difference(runs):
  first, second = compare_runs.compare(*runs).paired
  assert (first.step, second.step, first.prompts, first.samples) == (1, 2, 3, 12)
  assert first.first == pytest.approx(0.25) and first.difference == pytest.approx(1 / 3)
  by_prompt = [0.0, 1.0, 0.0]
  half = scipy.stats.t.ppf(0.975, 2) * statistics.stdev(by_prompt) / math.sqrt(3)
  assert (first.low, first.high) == pytest.approx((1 / 3 - half, 1 / 3 + half))


def test_one_prompt_has_no_interval():
  assert math.isnan(compare_runs.half_width([1.0]))


def test_other_prompts_are_not_paired(runs):
  write(runs[1], 1, [row(1, 9, s) for s in range(4)])
  assert [p.step for p in compare_runs.compare(*runs).paired] == [2]


def test_samples_without_reward_are_not_paired(runs):
  rows = [row(1, p, s, reward=None if p else 1.0) for p in range(3) for s in range(4)]
  write(runs[1], 1, rows)
  assert compare_runs.compare(*runs).paired[0].prompts == 1


def test_where_they_part(runs):
  part = compare_runs.compare(*runs).parting
  assert (part.step, part.sample, part.shared) == (2, 2, 'said ')
  assert part.first.startswith('2 1') and part.second.startswith('two 1')


def test_labels_differ():
  assert compare_runs.labels(['x/one/run', 'x/two/run/']) == ('one/run', 'two/run')
  with pytest.raises(InputError, match='twice'):
    compare_runs.labels(['x/run', 'x/run'])


def test_the_page_needs_nothing_else(runs, tmp_path):
  compare_runs.write_page(runs, tmp_path / 'c.html')
  text = (tmp_path / 'c.html').read_text('utf-8')
  assert '<script' not in text and 'http' not in text and 'grpo.optim.lr' in text
  parser = html.parser.HTMLParser()
  parser.feed(text)
  assert text.count('<path fill="none"') >= 4 and 'said' in text


def test_the_page_in_a_browser(runs, tmp_path):
  """A browser reads the markup as it is written, whatever a run's samples and name say."""
  hostile = runs[1].rename(tmp_path / '<b>"& run')
  said = '</pre></table></div><script>document.title = "gone"</script>'
  write(hostile, 1, [row(1, p, s, completion=said) for p in range(3) for s in range(4)])
  path = tmp_path / 'c.html'
  compare_runs.write_page([runs[0], hostile], path)
  written, seen = Page(path.read_text('utf-8')), Page(browser.rendered(path.as_uri(), tmp_path / 'profile'))
  assert [tag for tag in seen.tags if tag != 'tbody'] == written.tags and seen.tags.count('svg') >= 4
  assert seen.text.split() == written.text.split()
  assert '<b>"& run' in seen.text and 'grpo.optim.lr' in seen.text and 'document.title = "gone"' in seen.text


def test_a_missing_browser_fails_where_ci_promises_one(tmp_path, monkeypatch):
  monkeypatch.setattr(browser.shutil, 'which', lambda name: None)
  monkeypatch.setenv('CI', 'true')
  for promised, outcome in (('0', pytest.skip.Exception), ('1', pytest.fail.Exception)):
    monkeypatch.setenv('JAXPOST_CI_BROWSER', promised)
    with pytest.raises(outcome, match='none of chromium, .* apt-get install chromium'):
      browser.rendered('about:blank', tmp_path)


def test_the_command(runs, tmp_path):
  def call(*words):
    command = [sys.executable, '-m', 'launch.compare', *map(str, words)]
    return subprocess.run(command, cwd=CLONE, text=True, capture_output=True, timeout=100)

  done = call(*runs, f'--out={tmp_path / "c.html"}')
  assert done.returncode == 0, done.stderr
  assert 'difference 0.3333' in done.stdout and 'they part in grpo train step 2, sample 2' in done.stdout
  shutil.rmtree(runs[1] / 'samples')
  page = tmp_path / 'without.html'
  assert 'no prompt was sampled' not in call(*runs, f'--out={page}').stdout and 'shared prompts' not in page.read_text()
  assert call(runs[0]).returncode == 2
  done = call(runs[0], tmp_path)
  assert done.returncode == 2 and 'config.json' in done.stderr
