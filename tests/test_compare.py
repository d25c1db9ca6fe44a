"""Tests of launch.compare: differences of configs, figures and curves, paired rewards, and the page."""

import html.parser
import itertools
import json
import math
import os
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
  """Two runs with the same prompts. The second has 1 more reward for prompt 1, and other texts from step 2 on."""
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


def test_config_difference_leaves_out_fields_that_change_no_training(runs):
  assert compare_runs.compare(*runs).fields == {'grpo.optim.lr': (1e-3, 2e-3)}


def test_stage_that_only_one_run_has_is_one_difference(runs):
  config = json.loads((runs[1] / 'config.json').read_text())
  (runs[1] / 'config.json').write_text(json.dumps(config | {'stages': ['sft', 'grpo'], 'sft': {}, 'grpo': {}}))
  assert compare_runs.compare(*runs).fields['stages'] == (['grpo'], ['sft', 'grpo'])
  assert len(compare_runs.compare(*runs).fields) == 2


def test_stages_of_other_names_are_compared_by_position(runs):
  """The last stage is compared with the last. Fields that only one of the two methods reads are left out."""
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


def test_figures_leave_out_repetitions_and_are_grouped_by_stage(tmp_path):
  """The table leaves out spreads, and the mean and pass@1 of a single reward, which repeat other rows."""
  runs = [tmp_path / 'a', tmp_path / 'b']
  for run in runs:
    make_run(run, stages=('sft', 'grpo'), steps=4)
    (run / 'config.json').write_text('{}')
    with open(run / 'metrics.jsonl', 'a', encoding='utf-8') as file:
      for stage in ('sft', 'grpo'):
        extra = {'pass@1/right': 0.5, 'rewards/right/std': 0.1, 'perplexity': 2.0}
        file.write(json.dumps(dict(stage=stage, split='eval', step=4, time=0, **{'pass@1': 0.5}, **extra)) + '\n')
  keys = list(compare_runs.compare(*runs).figures)
  assert {'pass@1/sft', 'perplexity/sft', 'pass@1/grpo', 'perplexity/grpo'} <= set(keys)
  assert not {'pass@1/right/sft', 'rewards/right/std/sft'} & set(keys)
  assert [stage for stage, _ in itertools.groupby(key.rpartition('/')[2] for key in keys)] == ['sft', 'grpo']


def test_the_sampler_mismatch_is_shown_as_in_the_report(runs, tmp_path):
  """As its distance from 1, in the command, the page and the curves."""
  for run, value in zip(runs, (1.0025, 1.0075)):
    rows = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    rows = [r | {'sampler_mismatch': value} for r in rows if r['split'] == 'train']
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
  command = [sys.executable, '-m', 'launch.compare', *map(str, runs), f'--out={tmp_path / "c.html"}']
  wide = os.environ | {'COLUMNS': '150'}
  out = subprocess.run(command, cwd=CLONE, text=True, capture_output=True, timeout=100, env=wide)
  (line,) = (line for line in out.stdout.splitlines() if 'Sampler mismatch' in line)
  assert 'Sampler mismatch minus 1' in line and '0.0025' in line and '0.0075' in line
  page = (tmp_path / 'c.html').read_text()
  assert page.count('Sampler mismatch minus 1') == 2 and 'Sampler mismatch<' not in page
  assert 'step 4: 0.0075<' in page and '1.0075' not in page


def test_mean_of_a_single_reward_is_not_drawn_beside_the_equal_reward():
  def drawn_keys(mean):
    metrics_row = {'stage': 'grpo', 'split': 'train', 'step': 1, 'reward': 0.5, 'rewards/right/mean': mean}
    return [chart['key'] for chart in compare_runs._charts({'a': [metrics_row]}, {})]

  assert drawn_keys(0.5) == ['reward'] and drawn_keys(0.25) == ['reward', 'rewards/right/mean']


def test_paired_difference_is_of_prompts_with_a_t_interval(runs):
  first, second = compare_runs.compare(*runs).paired
  assert (first.step, second.step, first.prompts, first.samples) == (1, 2, 3, 12)
  assert first.first == pytest.approx(0.25) and first.difference == pytest.approx(1 / 3)
  differences = [0.0, 1.0, 0.0]
  half_width = scipy.stats.t.ppf(0.975, 2) * statistics.stdev(differences) / math.sqrt(3)
  assert (first.low, first.high) == pytest.approx((1 / 3 - half_width, 1 / 3 + half_width))


def test_one_prompt_has_no_interval(runs, tmp_path):
  assert math.isnan(compare_runs.half_width([1.0]))
  rows = [row(1, p, s, reward=None if p else 1.0) for p in range(3) for s in range(4)]
  write(runs[1], 1, rows)
  command = [sys.executable, '-m', 'launch.compare', *map(str, runs), f'--out={tmp_path}/c.html']
  out = subprocess.run(command, cwd=CLONE, text=True, capture_output=True, timeout=100).stdout
  assert '(one prompt has no interval; 1 shared prompts, 4 pairs)' in out and 'not finite' not in out
  assert 'not finite' not in (tmp_path / 'c.html').read_text()


def test_steps_with_different_prompts_are_not_paired(runs):
  write(runs[1], 1, [row(1, 9, s) for s in range(4)])
  assert [p.step for p in compare_runs.compare(*runs).paired] == [2]


def test_samples_without_reward_are_not_paired(runs):
  rows = [row(1, p, s, reward=None if p else 1.0) for p in range(3) for s in range(4)]
  write(runs[1], 1, rows)
  assert compare_runs.compare(*runs).paired[0].prompts == 1


def test_first_sample_where_runs_part_is_found(runs):
  divergence = compare_runs.compare(*runs).parting
  assert (divergence.step, divergence.sample, divergence.shared) == (2, 2, 'said ')
  assert divergence.first.startswith('2 1') and divergence.second.startswith('two 1')


def test_labels_are_shortest_distinct_paths():
  assert compare_runs.labels(['x/one/run', 'x/two/run/']) == ('one/run', 'two/run')
  with pytest.raises(InputError, match='twice'):
    compare_runs.labels(['x/run', 'x/run'])


def test_page_has_no_script_and_no_external_link(runs, tmp_path):
  compare_runs.write_page(runs, tmp_path / 'c.html')
  text = (tmp_path / 'c.html').read_text('utf-8')
  assert '<script' not in text and 'http' not in text and 'grpo.optim.lr' in text
  parser = html.parser.HTMLParser()
  parser.feed(text)
  assert text.count('<path fill="none"') >= 4 and 'said' in text


def test_browser_renders_page_as_written_with_hostile_texts(runs, tmp_path):
  """The browser shows the elements and the text that were written, whatever a run's samples and name contain."""
  hostile = runs[1].rename(tmp_path / '<b>"& run')
  script = '</pre></table></div><script>document.title = "gone"</script>'
  write(hostile, 1, [row(1, p, s, completion=script) for p in range(3) for s in range(4)])
  path = tmp_path / 'c.html'
  compare_runs.write_page([runs[0], hostile], path)
  written, shown = Page(path.read_text('utf-8')), Page(browser.rendered(path.as_uri(), tmp_path / 'profile'))
  assert [tag for tag in shown.tags if tag != 'tbody'] == written.tags and shown.tags.count('svg') >= 4
  assert shown.text.split() == written.text.split()
  assert '<b>"& run' in shown.text and 'grpo.optim.lr' in shown.text and 'document.title = "gone"' in shown.text


def test_missing_browser_fails_only_where_ci_promises_one(tmp_path, monkeypatch):
  monkeypatch.setattr(browser.shutil, 'which', lambda name: None)
  monkeypatch.setenv('CI', 'true')
  for promised, outcome in (('0', pytest.skip.Exception), ('1', pytest.fail.Exception)):
    monkeypatch.setenv('JAXPOST_CI_BROWSER', promised)
    with pytest.raises(outcome, match='none of chromium, .* apt-get install chromium'):
      browser.rendered('about:blank', tmp_path)


def test_compare_command_prints_differences_and_refuses_bad_folders(runs, tmp_path):
  def call(*words):
    command = [sys.executable, '-m', 'launch.compare', *map(str, words)]
    return subprocess.run(command, cwd=CLONE, text=True, capture_output=True, timeout=100)

  result = call(*runs, f'--out={tmp_path / "c.html"}')
  assert result.returncode == 0, result.stderr
  assert 'difference 0.3333' in result.stdout
  assert 'the first stored sample that differs is in grpo train step 2, sample 2' in result.stdout
  shutil.rmtree(runs[1] / 'samples')
  page = tmp_path / 'without.html'
  assert 'no prompt was sampled' not in call(*runs, f'--out={page}').stdout and 'shared prompts' not in page.read_text()
  assert call(runs[0]).returncode == 2
  result = call(runs[0], tmp_path)
  assert result.returncode == 2 and 'config.json' in result.stderr
