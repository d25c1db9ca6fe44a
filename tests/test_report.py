"""report.html shows a run, whatever its files hold, and needs nothing else."""

import html.parser
import io
import json
import math
import re

import pytest
import rich.console

from jaxpost.errors import InputError
from jaxpost.monitor import metrics, report

HOSTILE = '<script>alert("1")</script>&amp;\'"><img src=x onerror=alert(2)></pre></body><!-- \x00 \x1b[31m \ud83d'
VOID = ('meta',)  # of the tags we write, those that have no end


class Page(html.parser.HTMLParser):
  """Fails on unbalanced tags; collects tags, attributes and text."""

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


def test_full_run(tmp_path):
  writer = make_run(tmp_path)
  (tmp_path / 'config.json').write_text('{"optimizer": {"lr": 0.125}}')
  (tmp_path / 'plan.json').write_text(
    json.dumps(
      [
        {
          'device': 'one chip',
          'mesh': [1, 2],
          'programs': [
            {'program': 'update', 'bytes': 3 * 10**9, 'flops': 5e12},
            {'program': 'score', 'bytes': 1, 'flops': None},
          ],
        }
      ]
    )
  )
  (tmp_path / 'resumes.jsonl').write_text('{"stage": "grpo", "step": 17, "rows_dropped": 3}\n')
  metrics.summary(tmp_path, {'mine/grpo': 0.321, **report.figures(tmp_path)}, writer.alerts.warnings)
  page = read_page(tmp_path)
  for text in (
    'sft → grpo',
    'resumed after grpo 17',
    'optimizer',
    '0.125',
    'one chip',
    'update',
    '5T',
    'mine',
    '0.321',
    'Pass@1',
    'train 1',
    'eval 0.5',
    'loss not finite',
    'More curves (1)',
    'odd_key',
    'sample 2 s (50%)',
    'other 1 s (25%)',
    'train step 7: 0.28571',
    'step 3: not finite',
  ):
    assert text in page.text, text
  # loss, reward, pass@1, entropy, tokens_per_s, odd_key; twice
  assert page.tags.count('svg') == 12
  numbers = [v for k, v in page.attrs if k in ('d', 'cx', 'cy', 'y')]
  assert numbers and not any('nan' in v or 'inf' in v for v in numbers)


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
def test_parts_may_be_absent(tmp_path, options, charts):
  make_run(tmp_path, **options)
  assert read_page(tmp_path).tags.count('svg') == charts
  report.terminal_summary(tmp_path, rich.console.Console(file=io.StringIO()))


def test_empty_folder(tmp_path):
  assert 'no rows of metrics yet' in read_page(tmp_path).text
  assert report.figures(tmp_path) == {}


def test_hostile_text_is_text(tmp_path):
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
    writer.warn(1, 'kind', HOSTILE)
  metrics.summary(tmp_path, {f'{HOSTILE}/{stage}': 1.0, f'x/{stage}': HOSTILE}, writer.alerts.warnings)
  (tmp_path / 'config.json').write_text(json.dumps({HOSTILE: [HOSTILE]}))
  (tmp_path / 'plan.json').write_text(json.dumps([{HOSTILE: HOSTILE, 'programs': [{HOSTILE: HOSTILE}]}]))
  page = read_page(tmp_path)
  assert not {'script', 'img'} & set(page.tags)
  assert not [k for k, _ in page.attrs if k.startswith('on') or k == 'src']
  assert page.text.count('<script>alert("1")</script>&amp;') > 15
  report.terminal_summary(tmp_path, console)
  assert '[red]' in console.file.getvalue()


def write_samples(workdir, files):
  make_run(workdir, stages=('grpo',), steps=2)
  for step, rows in files.items():
    path = workdir / f'samples/grpo/{step}.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def test_samples_before_and_after(tmp_path):
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
  at = [page.text.index(f'{p} at {step}, draw 0') for p in prompts for step in (2, 100)]
  assert at == sorted(at)  # prompt by prompt, before then after
  assert 'at 10,' not in page.text and 'draw 1' not in page.text
  styles = [v for k, v in page.attrs if k == 'style' and '--v' in v]
  assert styles == ['--v:0%', '--v:100%'] * 3


def test_samples_of_different_prompts_and_of_one_file(tmp_path):
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


def test_live_and_damaged_files(tmp_path):
  make_run(tmp_path, stages=('sft',))
  path = tmp_path / 'metrics.jsonl'
  text = path.read_text()
  path.write_text(text + '{"stage": "sft", "sp')  # being written
  assert read_page(tmp_path).tags.count('svg') == 6
  path.write_text('{"sta\n' + text)
  with pytest.raises(InputError, match=r'metrics\.jsonl:1: '):
    report.write_report(tmp_path)
  path.write_text(text)
  (tmp_path / 'config.json').write_text('{"a": ')
  with pytest.raises(InputError, match=r'config\.json:1: '):
    report.write_report(tmp_path)


def test_figures(tmp_path):
  make_run(tmp_path, stages=('sft',), steps=20)
  figures = report.figures(tmp_path)
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


def test_time_of_a_step_is_counted_once():
  """time/busy/* says when devices were busy, which the phases have counted."""
  row = {'time/step': 4.0, 'time/update': 3.0, 'time/busy/devices': 3.5, 'time/busy/both': 1.0}
  assert report.phases([row] * 2) == {'update': 3.0, 'other': 1.0}


def test_axis():
  assert report._ticks(0.0, 10.0, 4) == [0.0, 2.5, 5.0, 7.5, 10.0]
  low, high = report._range([1.0 + i / 100 for i in range(100)] + [1e6])
  assert low < 1.0 and 1.99 < high < 10  # a spike does not flatten the rest
  for values in ([0.0], [5.0] * 30, [-1e-30], [0.1, 0.1 + 1e-17], [1e300, 0.0]):
    low, high = report._range(values)
    assert low <= min(values) <= max(values) <= high and low < high
    assert 2 <= len(report._ticks(low, high, 4)) <= 9


def test_terminal_summary(tmp_path):
  make_run(tmp_path)
  report.write_report(tmp_path)
  out = io.StringIO()
  report.terminal_summary(tmp_path, rich.console.Console(file=out, width=100))
  text = out.getvalue()
  for part in ('sft', 'grpo', 'Reward', '0.8875', 'Pass@1', 'update 1 s', f'{tmp_path}/report.html', '▁▁▂', '▇▇█'):
    assert part in text, part
  assert re.search('loss over time *│ [█▇]+[▂-▆]*▁+ ', text)
