"""Tests of launch.report: the page report.html, the summary, and their figures, charts, cards and titles."""

import html.parser
import io
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import browser
import pytest
import rich.console

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.monitor import display, metrics, report
from jaxpost.stage import algorithms, schema

CLONE = pathlib.Path(__file__).resolve().parents[1]

HOSTILE = '<script>alert("1")</script>&amp;\'"><img src=x onerror=alert(2)></pre></body><!-- \x00 \x1b[31m \ud83d'
VOID = ('meta',)  # tags of the report that have no end tag


class Page(html.parser.HTMLParser):
  """Collects tags, attributes and text, and fails on unbalanced tags."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.attrs, self.text = [], [], [], []
    self.feed(text)
    self.close()
    assert self.open == []
    self.text = ' '.join(self.text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attrs += attrs
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attrs += attrs

  def handle_endtag(self, tag):
    assert self.open and self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def rows_of(workdir):
  return metrics.read_rows(workdir / 'metrics.jsonl')


def make_run(workdir, stages=('sft', 'grpo'), steps=40, evals=True, rows=True):
  console = rich.console.Console(file=io.StringIO())
  writer = metrics.MetricsWriter(workdir, tensorboard=False, console=console)
  with writer:
    for stage in stages:
      writer.start_stage(stage, steps)
      for step in range(1, steps + 1) if rows else ():
        writer.write(
          step,
          'train',
          {
            'loss': math.nan if step == 3 else 2 / step,
            'reward': step / steps,
            'entropy': 1.0,
            'odd_key': 1.0 * step,
            'tokens_per_s': 1e6,
            'time/sample': 2.0,
            'time/update': 1.0,
            'time/step': 4.0,
          },
        )
        if evals and step % 10 == 0:
          writer.write(step, 'eval', {'pass@1': 0.5, 'loss': 0.25})
  return writer


def read_page(workdir):
  path = report.write_report(workdir)
  assert path.name == 'report.html' and path.parent == workdir
  text = path.read_bytes().decode('utf-8')
  assert len(text) < 1_000_000
  assert not re.search(r'https?://|url\(|@import|<script|<link', text)
  return Page(text)


def test_page_shows_config_plan_resumes_figures_and_charts(tmp_path):
  writer = make_run(tmp_path)
  (tmp_path / 'config.json').write_text('{"optimizer": {"lr": 0.125}}')
  (tmp_path / 'plan.json').write_text(
    json.dumps(
      [
        {
          'device': 'one chip',
          'mesh': [1, 2],
          'programs': [
            {'program': 'update', 'temp_bytes': 3 * 2**20, 'flops': 5e12},
            {'program': 'score', 'temp_bytes': 2**19, 'flops': None},
          ],
        }
      ]
    )
  )
  (tmp_path / 'resumes.jsonl').write_text('{"stage": "grpo", "step": 17, "rows_dropped": 3}\n')
  report.summary(tmp_path, {'mine/grpo': 0.321, **report.figures(rows_of(tmp_path))}, writer.alerts.warnings)
  page = read_page(tmp_path)
  assert re.search(r'sft\s+→\s+grpo', page.text)
  for text in (
    'resumed after grpo 17',
    'optimizer',
    '0.125',
    'one chip',
    'update',
    '5T',
    'Temp memory',
    '3.0 MiB',
    '0.5 MiB',
    'mine',
    '0.321',
    'Pass@1',
    'train 1',
    'eval 0.5',
    'loss not finite',
    'More curves (1)',
    'Odd key',
    'sample 2 s (50%)',
    'other 1 s (25%)',
    'train step 7: 0.28571',
    'step 3: not finite',
  ):
    assert text in page.text, text
  # loss, reward, pass@1, entropy, tokens_per_s, and odd_key, in two stages
  assert page.tags.count('svg') == 12
  coordinates = [v for k, v in page.attrs if k in ('d', 'cx', 'cy', 'y')]
  assert coordinates and not any('nan' in v or 'inf' in v for v in coordinates)


@pytest.mark.parametrize(
  'options, charts',
  [
    ({'stages': ('sft',)}, 6),
    ({'evals': False}, 10),
    ({'stages': ('sft',), 'steps': 1}, 5),
    ({'stages': ('sft',), 'steps': 3, 'evals': False}, 5),
    ({'rows': False}, 0),
  ],
)
def test_report_of_incomplete_run_has_the_charts_it_can(tmp_path, options, charts):
  make_run(tmp_path, **options)
  assert read_page(tmp_path).tags.count('svg') == charts
  report.terminal_summary(tmp_path, rows_of(tmp_path), rich.console.Console(file=io.StringIO()))


def test_page_of_empty_folder_says_that_there_are_no_metrics(tmp_path):
  assert 'no rows of metrics yet' in read_page(tmp_path).text
  assert report.figures(rows_of(tmp_path)) == {}


def test_hostile_text_is_escaped_in_page_and_terminal(tmp_path):
  stage = 'a<b>&"\''
  console = rich.console.Console(file=io.StringIO())
  row = {
    'prompt': [{'role': 'user', 'content': HOSTILE}, HOSTILE],
    'completion': HOSTILE,
    'reward': 1.0,
    HOSTILE: HOSTILE,
    'components': {HOSTILE: 1.0},
  }
  with metrics.MetricsWriter(tmp_path, tensorboard=False, console=console) as writer:
    writer.start_stage(stage, 2)
    writer.write(1, 'train', {HOSTILE: 1.0, 'loss': 1.0, 'time/step': 1.0, f'time/{HOSTILE[:-1]}': 0.5})
    writer.write(1, HOSTILE[:-1], {'loss': 1.0, f'[red]{HOSTILE}': 1.0})
    for step in (0, 2):
      writer.samples(step, [row, row | {'prompt': 'plain', 'reward': None}])
    writer.write(2, 'train', {'failed_groups': 1, 'groups': 2}, error=HOSTILE)
  report.summary(tmp_path, {f'{HOSTILE}/{stage}': 1.0, f'x/{stage}': HOSTILE}, writer.alerts.warnings)
  (tmp_path / 'config.json').write_text(json.dumps({HOSTILE: [HOSTILE]}))
  (tmp_path / 'plan.json').write_text(json.dumps([{HOSTILE: HOSTILE, 'programs': [{HOSTILE: HOSTILE}]}]))
  page = read_page(tmp_path)
  assert not {'script', 'img'} & set(page.tags)
  assert not [k for k, _ in page.attrs if k.startswith('on') or k == 'src']
  assert page.text.count('<script>alert("1")</script>&amp;') > 15
  report.terminal_summary(tmp_path, rows_of(tmp_path), console)
  assert '[red]' in console.file.getvalue()


def write_samples(workdir, files):
  make_run(workdir, stages=('grpo',), steps=2)
  for step, rows in files.items():
    path = workdir / f'samples/grpo/{step}.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    path.with_stem(f'{step}-old').write_text('somebody has copied it')


def test_samples_of_first_and_last_step_are_shown_by_prompt(tmp_path):
  prompts = ('one', 'two', 'three')
  write_samples(
    tmp_path,
    {
      step: [
        {'prompt': p, 'completion': f'{p} at {step}, draw {n}', 'reward': step / 100} for p in prompts for n in range(2)
      ]
      for step in (2, 10, 100)
    },
  )
  page = read_page(tmp_path)
  positions = [page.text.index(f'{p} at {step}, draw 0') for p in prompts for step in (2, 100)]
  assert positions == sorted(positions)  # prompt by prompt, before then after
  assert 'at 10,' not in page.text and 'draw 1' not in page.text
  styles = [v for k, v in page.attrs if k == 'style' and '--v' in v]
  assert styles == ['--v:0%', '--v:100%'] * 3


def test_samples_of_different_prompts_are_shown_and_cut_to_1500_characters(tmp_path):
  write_samples(
    tmp_path, {1: [{'prompt': 'p1', 'completion': 'x' * 5000}], 2: [{'prompt': 'p2', 'completion': 'second'}]}
  )
  text = read_page(tmp_path).text
  assert 'before, step 1' in text and 'after, step 2' in text
  assert 'p1' in text and 'p2' in text and '3500 more characters' in text
  assert 'x' * 1501 not in text
  (tmp_path / 'samples/grpo/1.jsonl').unlink()
  text = read_page(tmp_path).text
  assert 'before' not in text and 'after, step 2' in text


def test_long_run_stays_small(tmp_path):
  rows = [
    {'stage': s, 'split': 'train', 'step': i, 'time/step': 1.0} | {f'key{k}': math.sin(i / 100 + k) for k in range(40)}
    for s in 'abc'
    for i in range(2000)
  ]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
  read_page(tmp_path)


def test_torn_last_row_is_ignored_and_damaged_files_are_refused(tmp_path):
  make_run(tmp_path, stages=('sft',))
  path = tmp_path / 'metrics.jsonl'
  text = path.read_text()
  path.write_text(text + '{"stage": "sft", "sp')  # the row is still being written
  assert read_page(tmp_path).tags.count('svg') == 6
  path.write_text('{"sta\n' + text)
  with pytest.raises(InputError, match=r'metrics\.jsonl:1: '):
    report.write_report(tmp_path)
  path.write_text(text)
  (tmp_path / 'config.json').write_text('{"a": ')
  with pytest.raises(InputError, match=r'config\.json:1: '):
    report.write_report(tmp_path)


def test_metrics_are_read_once(tmp_path, monkeypatch):
  """A report reads the metrics once, and so does the end of a run, which writes summary and report.

  Each read may take seconds.
  """
  make_run(tmp_path, stages=('sft',))
  reads, rows = [], rows_of(tmp_path)

  def read_rows(path):
    reads.append(path)
    return rows

  for module in (report, metrics):
    monkeypatch.setattr(module, 'read_rows', read_rows)
  text = report.write_report(tmp_path).read_text('utf-8')
  assert reads == [tmp_path / 'metrics.jsonl']
  assert report.write_report(tmp_path, rows).read_text('utf-8') == text and len(reads) == 1
  stages._finish(tmp_path, rich.console.Console(file=io.StringIO()), 0.0, [], {'sft': schema.SaveSection(export=False)})
  assert len(reads) == 2


def test_figures_are_means_of_the_last_10_steps(tmp_path):
  make_run(tmp_path, stages=('sft',), steps=20)
  figures = report.figures(rows_of(tmp_path))
  assert figures.pop('loss/sft') == pytest.approx(sum(2 / i for i in range(11, 21)) / 10)
  assert figures == {
    'steps/sft': 20,
    'reward/sft': pytest.approx(0.775),
    'entropy/sft': 1.0,
    'tokens_per_s/sft': 1e6,
    'time/step/sft': 4.0,
    'pass@1/sft': 0.5,
    'eval_loss/sft': 0.25,
  }


def test_phases_leave_out_the_compile():
  rows = [{'time/step': 60.0, 'time/update': 59.0}] + [{'time/step': 4.0, 'time/update': 3.0}] * 3
  assert report.phases(rows) == {'update': 3.0, 'other': 1.0}
  assert report.phases(rows[:1]) == {'update': 59.0, 'other': 1.0}
  assert report.phases([]) == {}


def test_overlapping_times_are_no_phases_of_a_step():
  """Busy times of devices, pauses of the sampler, the skew of hosts and the number of a process are no phases."""
  row = {'time/step': 4.0, 'time/update': 3.0, 'time/busy/devices': 3.5, 'time/busy/both': 1.0}
  row |= {'time/dispatch_gap': 0.3, 'time/host_skew': 0.5, 'time/slowest_process': 7}
  assert report.phases([row] * 2) == {'update': 3.0, 'other': 1.0}


def test_report_phases_are_the_names_that_the_timer_uses():
  """Each phase that the timer measures has a share in the report, and each share has a phase."""
  timed = {
    name
    for path in (CLONE / 'jaxpost').rglob('*.py')
    for name in re.findall(r"\btimer\('(\w+)'\)", path.read_text('utf-8'))
  }
  assert timed == set(metrics.PHASES)


def test_every_phase_of_a_step_has_a_color_of_its_own(tmp_path):
  names = metrics.PHASES
  write_rows(tmp_path, *(('train', step, {f'time/{n}': 1.0 for n in names} | {'time/step': 11.0}) for step in (1, 2)))
  text = report.write_report(tmp_path).read_text('utf-8')
  colors = re.findall(r'class="key"><i style="background:var\(--(\w+)\)', text)
  assert len(colors) == len(set(colors)) == len(names) + 1 and 'other' in colors
  shades = [re.search(rf'--{name}:(#\w+)', text)[1] for name in colors]
  assert len(set(shades)) == len(colors)


def test_chart_ranges_and_ticks_cover_all_values():
  assert display._ticks(0.0, 10.0, 4) == [0.0, 2.5, 5.0, 7.5, 10.0]
  low, high = display._range([1.0 + i / 100 for i in range(100)] + [1e6])
  assert low < 1.0 and 1.99 < high < 10  # a spike does not flatten the rest
  for values in ([0.0], [5.0] * 30, [-1e-30], [0.1, 0.1 + 1e-17], [1e300, 0.0]):
    low, high = display._range(values)
    assert low <= min(values) <= max(values) <= high and low < high
    assert 2 <= len(display._ticks(low, high, 4)) <= 9


def write_rows(workdir, *rows):
  """Writes the metrics rows (split, step, values) of a stage `grpo`."""
  rows = [{'stage': 'grpo', 'split': split, 'step': step} | values for split, step, values in rows]
  (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def read_parts(workdir):
  """Returns {name of a card: (value, first value)}, the keys of the open charts, and those of the folded charts."""
  text = report.write_report(workdir).read_text('utf-8')
  cards = re.findall(r'<small title="[^"]*">([^<]*)</small><b>([^<]*)</b><small>([^<]*)</small>', text)
  is_open, _, folded = text.partition('<details><summary>More curves')
  charts = [re.findall('<b title="(.*?)">', part) for part in (is_open, folded)]
  return {name: (value, first) for name, value, first in cards}, *charts


def test_page_opens_with_one_line_about_each_stage(tmp_path):
  write_rows(
    tmp_path,
    ('eval', 0, {'pass@1': 0.25}),
    ('train', 1, {'reward': 0.1, 'loss': 3.0, 'time/step': 200.0}),
    ('train', 2, {'reward': 0.3, 'loss': 1.0, 'time/step': 100.0}),
    ('eval', 2, {'pass@1': 0.75}),
  )
  assert 'grpo: Pass@1 0.25 → 0.75, 2 steps, 5 min.' in read_page(tmp_path).text
  write_rows(tmp_path, ('train', 1, {'loss': 3.0, 'reward': 0.1, 'time/step': 1.5}))
  assert 'grpo: Reward 0.1 → 0.1, 1 step, 1.5 s.' in read_page(tmp_path).text
  write_rows(tmp_path, ('train', 1, {'mine': 3.0}))
  assert 'grpo: 1 step, 0 s.' in read_page(tmp_path).text


def test_the_sum_of_steps_stands_beside_the_wall_time(tmp_path):
  write_rows(tmp_path, ('train', 1, {'loss': 3.0, 'time/step': 99.5}))
  assert 'sum of steps 99.5 s' in read_page(tmp_path).text
  assert 'wall time' not in read_page(tmp_path).text  # without summary.json, the run has not ended
  report.summary(tmp_path, {**report.figures(rows_of(tmp_path)), 'wall_s': 300.0})
  assert 'sum of steps 99.5 s · wall time 5 min' in read_page(tmp_path).text
  (tmp_path / 'resumes.jsonl').write_text('{"stage": "grpo", "step": 1, "rows_dropped": 0}\n')
  assert 'wall time since the last start 5 min' in read_page(tmp_path).text


def test_the_sampler_mismatch_is_shown_as_its_distance_from_1(tmp_path):
  write_rows(tmp_path, *(('train', step, {'sampler_mismatch': 1 + 0.001 * step}) for step in (1, 2, 3)))
  cards, charts, folded = read_parts(tmp_path)
  assert cards['Sampler mismatch minus 1'] == ('0.002', 'from 0.001')
  assert charts == ['sampler_mismatch'] and not folded
  text = read_page(tmp_path).text
  assert 'train 0.003' in text and 'train step 2: 0.002' in text and '1.00' not in text
  assert report.figures(rows_of(tmp_path))['sampler_mismatch/grpo'] == pytest.approx(1.002)

  def on_the_console():
    out = io.StringIO()
    report.terminal_summary(tmp_path, rows_of(tmp_path), rich.console.Console(file=out, width=100))
    (line,) = (line for line in out.getvalue().splitlines() if 'Sampler mismatch minus 1' in line)
    return line.replace('│', '').split()[-1]

  assert on_the_console() == '0.002'
  write_rows(tmp_path, *(('train', step, {'sampler_mismatch': 0.0}) for step in (1, 2)))  # no token was trained
  assert on_the_console() == '0'


def test_times_and_counters_that_stay_0_have_no_card(tmp_path):
  row = {'reward': 0.0, 'time/step': 2.0, 'time/busy/devices': 1.0, 'odd': 1.0}
  held_out = {'ungraded': 0, 'falling': 3, 'pass@4': 0.5, 'time/eval': 1.0, 'time/step': 2.0}
  write_rows(tmp_path, ('train', 1, row), ('eval', 1, held_out), ('eval', 2, held_out | {'falling': 0}))
  assert 'eval_time/step/grpo' in report.figures(rows_of(tmp_path))
  cards, _, _ = read_parts(tmp_path)
  assert cards == {'Reward': ('0', 'from 0'), 'Falling': ('0', 'from 3'), 'Pass@4': ('0.5', 'from 0.5')}


def test_figure_of_the_only_reward_has_no_card_beside_that_of_the_reward(tmp_path):
  held_out = {'reward': 0.5, 'rewards/exact_match/mean': 0.5, 'pass@1': 0.25, 'pass@1/exact_match': 0.25}
  write_rows(tmp_path, ('train', 1, {'reward': 0.75, 'rewards/exact_match/mean': 0.75}), ('eval', 1, held_out))
  cards, _, _ = read_parts(tmp_path)
  assert cards.keys() == {'Reward', 'Reward, held out', 'Pass@1'}


def test_card_of_failures_shows_their_sum(tmp_path):
  rows = [('train', step, {'reward': 0.0, 'failed_groups': count}) for step, count in enumerate((0, 2, 3, 0), 1)]
  write_rows(tmp_path, *rows)
  cards, _, _ = read_parts(tmp_path)
  assert cards['Groups whose reward failed'] == ('5', '')


def test_the_first_value_of_a_card_is_of_the_same_split(tmp_path):
  write_rows(
    tmp_path,
    ('eval', 0, {'reward': 0.5}),
    ('train', 1, {'reward': 0.25, 'tokens_per_s': 7.0}),
    ('eval', 1, {'reward': 0.75}),
  )
  cards, _, _ = read_parts(tmp_path)
  assert cards['Reward'] == ('0.25', 'from 0.25') and cards['Reward, held out'] == ('0.75', 'from 0.5')
  assert cards['Tokens per second'] == ('7', '')


def test_charts_that_are_0_throughout_are_folded_away(tmp_path):
  values = {'loss': 0.5, 'kl': 0.0, 'entropy': 0.0, 'sampler_mismatch': 1.0, 'odd': 1.0}
  held_out = {'pass@2': 0.0, 'pass@4': 0.0}
  write_rows(
    tmp_path,
    ('train', 1, values),
    ('train', 2, values | {'kl': 0.1, 'entropy': None}),
    ('eval', 1, held_out),
    ('eval', 2, held_out | {'pass@4': 0.5}),
  )
  _, charts, folded = read_parts(tmp_path)
  assert charts == ['kl', 'entropy', 'loss', 'pass@4']  # entropy was not finite once
  assert folded == ['sampler_mismatch', 'odd', 'pass@2']


@pytest.mark.parametrize(
  'algorithm, wanted',
  [
    ('dpo', 'loss rewards/accuracies rewards/chosen logps/rejected reward'),
    ('reward_model', 'loss rewards/accuracies rewards/chosen rewards/mean reward'),
    ('ppo', 'reward rewards/exact/mean critic/explained_variance loss rewards/accuracies'),
    ('distill', 'divergence reward rewards/exact/mean loss rewards/accuracies'),
    ('./mine.py', 'loss reward rewards/accuracies'),
  ],
)
def test_cards_and_open_curves_are_those_of_the_method(tmp_path, algorithm, wanted):
  keys = 'critic/explained_variance divergence logps/rejected loss reward rewards/accuracies rewards/chosen'.split()
  keys += ['rewards/exact/mean', 'rewards/mean']
  write_rows(tmp_path, ('train', 1, {key: 1.0 + i for i, key in enumerate(keys)}))
  (tmp_path / 'config.json').write_text(json.dumps({'algorithm': 'sft', 'grpo': {'algorithm': algorithm}}))
  cards, charts, folded = read_parts(tmp_path)
  assert list(cards) == list(map(display.title, wanted.split()))
  assert charts == wanted.split() and folded == [key for key in keys if key not in charts]


def test_every_method_has_a_list_of_known_curves():
  methods = display._CURVES['methods']
  assert sorted(' '.join(methods).split()) == sorted(algorithms.ALGORITHMS)
  exact, _ = display._known()
  known = {*exact, 'rewards/*/mean'}
  assert not {key for keys in (display.HEADLINES, *methods.values()) for key in keys} - known


def test_browser_renders_report_as_written_with_hostile_texts(tmp_path):
  """The browser moves, drops and adds no element, whatever the texts contain."""
  make_run(tmp_path, stages=('grpo',), steps=4)
  (tmp_path / 'samples/grpo').mkdir(parents=True)
  sample = {'prompt': HOSTILE, 'completion': '</div></section><script>document.title = "gone"</script>', 'reward': 1.0}
  (tmp_path / 'samples/grpo/4.jsonl').write_text(json.dumps(sample) + '\n')
  path = report.write_report(tmp_path)
  written, dom = Page(path.read_text('utf-8')), Page(browser.rendered(path.as_uri(), tmp_path / 'profile'))
  assert [tag for tag in dom.tags if tag != 'tbody'] == written.tags and dom.tags.count('figure') > 3
  assert tmp_path.name in dom.text and 'Time of a step: 4 s' in dom.text and 'document.title = "gone"' in dom.text


def test_report_is_written_in_any_locale_and_without_jax(tmp_path):
  make_run(tmp_path, steps=2)
  code = (
    'import sys\n'
    'from jaxpost.monitor import report\n'
    'report.write_report(sys.argv[1])\n'
    'assert "jax" not in sys.modules\n'
  )
  env = {**os.environ, 'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
  subprocess.run([sys.executable, '-c', code, str(tmp_path)], env=env, check=True)
  assert '</a> → <a href="#grpo">grpo</a>' in (tmp_path / 'report.html').read_text('utf-8')


def test_wheel_includes_style_and_template_of_the_page():
  folder = pathlib.Path(report.__file__).parent
  setup = (folder.parents[1] / 'setup.py').read_text()
  files = [path.name for path in folder.iterdir() if path.suffix in ('.css', '.jinja')]
  assert len(files) == 2 and all(f"'monitor/{name}'" in setup for name in files)


def test_durations_have_a_unit_of_their_size():
  texts = {0: '0 s', 2.75e-5: '27.5 us', 0.00377: '3.77 ms', 0.331: '331 ms', 1: '1 s', 600: '10 min', 9000: '2.5 h'}
  assert {seconds: report._seconds(seconds) for seconds in texts} == texts


def test_terminal_summary_has_figures_and_curves(tmp_path):
  make_run(tmp_path)
  report.write_report(tmp_path)
  out = io.StringIO()
  report.terminal_summary(tmp_path, rows_of(tmp_path), rich.console.Console(file=out, width=100))
  text = out.getvalue()
  for part in ('sft', 'grpo', 'Reward', '0.8875', 'Pass@1', 'update 1 s', f'{tmp_path}/report.html', '▁▁▂', '▇▇█'):
    assert part in text, part
  assert 'Means of the last 10 steps; time of a step: of all steps but the first.' in ' '.join(text.split())
  assert 'Reward over time' in text and re.search('Loss over time *│ [█▇]+[▂-▆]*▁+ ', text)
  rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  for row in rows:
    row.pop('reward', None)
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  report.terminal_summary(tmp_path, rows_of(tmp_path), rich.console.Console(file=out, width=100))
  text = out.getvalue().removeprefix(text)
  assert 'Reward over time' not in text and 'Loss over time' in text


def test_page_shows_versions_devices_and_changed_fields(tmp_path):
  make_run(tmp_path, stages=('grpo',), steps=4)
  start = {
    'time': '2026-01-02T03:04:05+00:00',
    'versions': {'jaxpost': '9.9.9'},
    'commit': 'abc123-dirty',
    'command': ['train.py', '--config=<b>.py'],
    'devices': 8,
    'device_kind': 'TPU v5p',
    'processes': 2,
    'host': 'worker',
    'seed': 5,
    'changes': {'grpo': {'optim.lr': 0.125}},
  }
  (tmp_path / 'starts.jsonl').write_text(json.dumps(start) + '\n' + json.dumps(start) + '\n')
  page = read_page(tmp_path)
  for text in ('jaxpost 9.9.9', 'abc123-dirty', '8 x TPU v5p', '--config=<b>.py', 'optim.lr', '0.125', 'starts'):
    assert text in page.text, text


def test_page_shows_expected_answers_and_percentiles_of_samples(tmp_path):
  make_run(tmp_path, stages=('grpo',), steps=4)
  folder = tmp_path / 'samples/grpo'
  folder.mkdir(parents=True)
  for step in (1, 4):
    rows = [
      {'prompt': f'q{n}', 'completion': 'x', 'reward': n / 100, 'length': n, 'expected': f'right{n}'}
      for n in range(101)
    ]
    (folder / f'{step}.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
  text = read_page(tmp_path).text
  assert 'expected: right3' in text
  assert 'reward 0.05 / 0.5 / 0.95' in text and 'length 5 / 50 / 95' in text


def test_six_cards_come_first(tmp_path):
  make_run(tmp_path, stages=('grpo',), steps=12)
  report.summary(tmp_path, {**report.figures(rows_of(tmp_path)), **{f'extra{n}/grpo': n + 1.0 for n in range(9)}})
  read_page(tmp_path)
  text = (tmp_path / 'report.html').read_text()
  assert text.split('More figures')[0].split('<h2 id="grpo">grpo</h2>')[1].count('<div class="box"><small title=') == 6


def test_turns_and_tool_calls_are_marked(tmp_path):
  make_run(tmp_path, stages=('grpo',), steps=4)
  turns = [
    {'role': 'assistant', 'content': 'I look.', 'tool_calls': [{'function': {'name': 'look', 'arguments': {'at': 3}}}]},
    {'role': 'tool', 'content': 'a <b>chest</b>', 'name': 'look'},
    {'role': 'assistant', 'content': 'Found it.'},
  ]
  folder = tmp_path / 'samples/grpo'
  folder.mkdir(parents=True)
  row = {'prompt': 'q', 'completion': 'I look.Found it.', 'turns': turns, 'reward': 1.0}
  (folder / '4.jsonl').write_text(json.dumps(row) + '\n')
  read_page(tmp_path)
  text = (tmp_path / 'report.html').read_text()
  assert text.count('<div class="turn mine">') == 2 and text.count('<div class="turn ">') == 1
  assert '<b>tool look</b><pre>a &lt;b&gt;chest' in text
  assert re.search(r'<pre class="call">look\({.*at.*3}\)</pre>', text)
  assert 'I look.Found it.' not in text  # each text is shown once, in its turn


def test_page_shows_fields_changed_on_the_command_line(tmp_path):
  make_run(tmp_path, stages=('sft',), steps=4)
  arguments = [
    'x.py',
    '--config=configs/a.py:lora=16',
    '--config.optim.lr=0.5',
    '--noconfig.save.export',
    '--config.seed',
    '7',
  ]
  (tmp_path / 'starts.jsonl').write_text(json.dumps({'command': [*arguments, '--workdir=w']}) + '\n')
  page = read_page(tmp_path)
  assert 'Changed from configs/a.py:lora=16 on the command line' in page.text
  changes = dict(re.findall('<code>(.*?)</code></th><td>(.*?)</td>', (tmp_path / 'report.html').read_text()))
  assert changes == {'optim.lr': '0.5', 'save.export': 'False', 'seed': '7'}


def documented_keys():
  """Yields an example of each key in docs/metrics.md."""
  text = (CLONE / 'docs/metrics.md').read_text('utf-8')
  for cell in re.findall(r'^\| (`.+?) \|', text, re.M):
    for key in re.findall('`(.+?)`', cell):
      for place, value in {
        'NAME': 'my_fn',
        'ROLE': 'policy',
        'KEY': 'reward',
        '/N': '/2',
        '_N': '_2',
        '@k': '@4',
      }.items():
        key = key.replace(place, value)
      yield key


def test_every_metric_has_a_title():
  exact, patterns = display._known()
  for key in documented_keys():
    known = key in exact or any(p.fullmatch(key) for p, *_ in patterns)
    assert known or key.endswith('/unfiltered'), f'{key}: give it a title in jaxpost/monitor/titles.toml'
    title = display.title(key)
    assert not re.search('[_/]', title) and title[0].isupper() and len(title) <= 48, title


def test_titles_contain_names_of_rewards_and_sources():
  assert display.title('pass@8/exact_match') == 'Pass@8 by exact match'
  assert display.title('eval_rewards/my_fn/mean') == 'Reward my fn, held out'
  assert display.title('data/3/documents') == 'Documents from source 3'
  assert display.title('of_mine/x_y') == 'Of mine, x y'


def test_report_command_works_for_an_unfinished_run(tmp_path):
  make_run(tmp_path / 'run')
  (tmp_path / 'run/summary.json').unlink(missing_ok=True)
  command = [sys.executable, '-m', 'launch.report', '--run=~/run']
  environment = os.environ | {'HOME': str(tmp_path)}
  result = subprocess.run(command, cwd=CLONE, text=True, capture_output=True, timeout=100, env=environment)
  assert result.returncode == 0, result.stderr
  assert 'grpo' in pathlib.Path(result.stdout.strip()).read_text('utf-8')
  result = subprocess.run([*command[:-1], f'--run={tmp_path}'], cwd=CLONE, text=True, capture_output=True, timeout=100)
  assert result.returncode == 2 and 'has no rows in metrics.jsonl' in result.stderr
