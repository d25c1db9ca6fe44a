"""`monitor.metrics`: metrics.jsonl after kills and resumes, samples, TensorBoard, console output, alerts, summary."""

import errno
import io
import json
import math
import pathlib
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import rich.console

from jaxpost.errors import InputError
from jaxpost.monitor import metrics, report
from jaxpost.monitor.alerts import HOLDS, Alerts
from jaxpost.stage import field_names
from jaxpost.storage import object_store


def make_writer(workdir, terminal=False, **options):
  out = io.StringIO()
  console = rich.console.Console(
    file=out, force_terminal=terminal, width=120, _environ={'TERM': 'xterm', 'COLUMNS': '120', 'LINES': '40'}
  )
  options.setdefault('tensorboard', False)
  return metrics.MetricsWriter(workdir, console=console, **options), out


def write_run(workdir, plan, resume=0):
  """Writes rows and samples of stages; returns the console output.

  plan: (stage, steps) pairs; the first stage continues after step `resume`.
  """
  writer, out = make_writer(workdir)
  with writer:
    for stage, steps in plan:
      writer.start_stage(stage, steps, resume)
      if not resume:
        writer.write(0, 'eval', {'pass@1': 0.25})
      for step in range(resume + 1, steps + 1):
        writer.write(step, 'train', {'loss': 1 / step, 'time/step': 0.1})
        writer.samples(step, [{'prompt': 'p', 'completion': str(step)}])
      writer.write(steps, 'eval', {'pass@1': 0.5})
      resume = 0
  return out.getvalue()


def keys(path):
  """Returns (stage, split, step) of each row."""
  return [(r['stage'], r['split'], r['step']) for r in metrics.read_rows(path)]


def test_row_is_one_valid_json_line(tmp_path):
  writer, _ = make_writer(tmp_path)
  with writer:
    writer.start_stage('sft', 2)
    writer.write(
      1, 'train', {'loss': np.float32(0.5), 'n': np.int64(7), 'kl': math.nan, 'grad_norm': math.inf, 'mfu': math.nan}
    )
    # Each line is flushed: another process can read the file during the run.
    text = (tmp_path / 'metrics.jsonl').read_text()
  assert text == (
    '{"stage": "sft", "split": "train", "step": 1, "loss": 0.5, "n": 7, '
    '"kl": null, "grad_norm": null, "mfu": null, '
    '"nonfinite": ["kl", "grad_norm"]}\n'
  )


def test_rows_survive_kill_9(tmp_path):
  code = (
    'import os, signal, sys\n'
    'from jaxpost.monitor import metrics\n'
    'w = metrics.MetricsWriter(sys.argv[1], tensorboard=False)\n'
    "w.start_stage('sft', 9)\n"
    "for i in range(1, 4): w.write(i, 'train', {'loss': 1.0})\n"
    "assert 'jax' not in sys.modules\n"
    'os.kill(os.getpid(), signal.SIGKILL)\n'
  )
  root = pathlib.Path(__file__).resolve().parents[1]
  run = subprocess.run([sys.executable, '-c', code, tmp_path], cwd=root)
  assert run.returncode == -9
  path = tmp_path / 'metrics.jsonl'
  assert [s for _, _, s in keys(path)] == [1, 2, 3]


@pytest.mark.parametrize('tail', ['{"stage": "sft", "spl', '{"a', '3', '\0\0'])
def test_torn_last_line_is_dropped_and_mended(tmp_path, tail):
  path = tmp_path / 'metrics.jsonl'
  write_run(tmp_path, [('sft', 3)])
  undamaged = path.read_text()
  path.write_text(undamaged + tail)
  assert len(metrics.read_rows(path)) == 5
  writer, _ = make_writer(tmp_path)
  with writer:
    writer.start_stage('sft', 5, resume_step=3)
    writer.write(4, 'train', {'loss': 0.0})
  lines = path.read_text().splitlines()
  assert '\n'.join(lines[:5]) + '\n' == undamaged
  assert json.loads(lines[5])['step'] == 4


def test_damage_in_the_middle_is_named(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  write_run(tmp_path, [('sft', 3)])
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([lines[0], lines[1][:9], *lines[2:]]) + '\n')
  with pytest.raises(InputError, match=r'metrics\.jsonl:2: '):
    metrics.read_rows(path)


def test_resume_equals_an_uninterrupted_run(tmp_path):
  plan = [('a', 4), ('b', 4), ('c', 2)]
  write_run(tmp_path / 'whole', plan)
  write_run(tmp_path / 'cut', plan)
  printed = write_run(tmp_path / 'cut', plan[1:], resume=2)
  assert 'drops 7 later rows' in printed  # b 3, 4, eval; c eval, 1, 2, eval
  whole, cut = (metrics.comparable_rows(tmp_path / d / 'metrics.jsonl') for d in ('whole', 'cut'))
  assert whole == cut
  assert len(cut) == 16 and 'time/step' not in cut[1]
  assert json.loads((tmp_path / 'cut/resumes.jsonl').read_text()) == {'stage': 'b', 'step': 2, 'rows_dropped': 7}


def test_start_without_checkpoint_reports_the_steps_it_discards(tmp_path):
  message = 'steps of an earlier start are discarded'
  assert message not in write_run(tmp_path, [('a', 2), ('b', 3)])
  printed = write_run(tmp_path, [('b', 3)])
  assert f'b: no checkpoint, so 3 {message} (config.save.every)' in printed


def test_start_of_a_stage_keeps_earlier_rows_and_drops_later_ones(tmp_path):
  write_run(tmp_path, [('a', 2), ('b', 3), ('c', 2)])
  (tmp_path / 'samples/b/notes.txt').write_text('mine')
  writer, _ = make_writer(tmp_path)
  with writer:
    writer.start_stage('b', 3, resume_step=2)
  path = tmp_path / 'metrics.jsonl'
  a = [('a', 'eval', 0), ('a', 'train', 1), ('a', 'train', 2), ('a', 'eval', 2)]
  assert keys(path) == a + [('b', 'eval', 0), ('b', 'train', 1), ('b', 'train', 2)]
  sample_files = sorted(str(p.relative_to(tmp_path / 'samples')) for p in (tmp_path / 'samples').rglob('*.*'))
  assert sample_files == ['a/1.jsonl', 'a/2.jsonl', 'b/1.jsonl', 'b/2.jsonl', 'b/notes.txt']
  writer, _ = make_writer(tmp_path)
  with writer:  # a start at step 0 drops all rows of the stage
    writer.start_stage('b', 3)
  assert keys(path) == a


def test_repeated_evaluation_has_one_row(tmp_path):
  """A run is killed after the row of an evaluation that a stop signal left to it, before its checkpoint."""
  write_run(tmp_path, [('b', 3)])
  samples = [{'split': split, 'completion': 'x'} for split in ('train', 'eval')]
  expected = [('b', 'eval', 0), ('b', 'train', 1), ('b', 'train', 2), ('b', 'train', 3), ('b', 'eval', 3)]
  for evaluated in (True, False):
    writer, _ = make_writer(tmp_path)
    with writer:
      writer.start_stage('b', 3, resume_step=3, evaluated=evaluated)
      assert keys(tmp_path / 'metrics.jsonl') == expected[: 5 if evaluated else 4]
      for row in samples:
        writer.samples(3, [row])
  assert metrics.read_growing(tmp_path / 'samples/b/3.jsonl')[1:] == samples  # the first row is of write_run


def test_rows_and_samples_of_removed_stages_are_dropped(tmp_path):
  """A run is restarted with other stages, before the first checkpoint."""
  write_run(tmp_path, [('a', 2), ('gone', 3), ('b', 3)])
  (tmp_path / 'samples/early').mkdir()  # samples are written before the row of their step
  (tmp_path / 'samples/early/1.jsonl').touch()
  writer, _ = make_writer(tmp_path, stages=['a', 'b', 'c'])
  with writer:
    writer.start_stage('b', 3, resume_step=1)
  a = [('a', 'eval', 0), ('a', 'train', 1), ('a', 'train', 2), ('a', 'eval', 2)]
  assert keys(tmp_path / 'metrics.jsonl') == [*a, ('b', 'eval', 0), ('b', 'train', 1)]
  samples = {str(p.relative_to(tmp_path / 'samples')) for p in tmp_path.glob('samples/*/*.jsonl')}
  assert samples == {'a/1.jsonl', 'a/2.jsonl', 'b/1.jsonl'}
  writer, _ = make_writer(tmp_path, stages=['c', 'a'])
  with writer:
    writer.start_stage('c', 3)
  assert keys(tmp_path / 'metrics.jsonl') == [] and not [*tmp_path.glob('samples/*/*.jsonl')]


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path, monkeypatch):
  path = tmp_path / 'summary.json'
  object_store.write_text(path, 'old')

  def crash(*_):
    raise OSError('disk full')

  monkeypatch.setattr('os.replace', crash)
  monkeypatch.setattr('pathlib.Path.replace', crash)
  with pytest.raises(OSError, match='disk full'):
    object_store.write_text(path, 'new')
  assert path.read_text() == 'old'


def test_a_step_line_of_ppo_shows_what_the_critic_explains(tmp_path):
  writer, console = make_writer(tmp_path, tensorboard=False)
  writer.start_stage('ppo', 1)
  writer.write(1, 'train', {'loss': 0.5, 'critic/explained_variance': 0.25, 'critic/vf_loss': 0.1})
  writer.close()
  assert 'loss 0.5  critic explains 0.25' in console.getvalue()


def test_secondary_process_writes_nothing(tmp_path, capsys):
  with metrics.MetricsWriter(tmp_path / 'run', primary=False) as writer:
    writer.start_stage('sft', 2)
    writer.write(1, 'train', {'loss': 1.0})
    writer.samples(1, [{}])
    writer.flush()
  assert not (tmp_path / 'run').exists()
  assert capsys.readouterr().out == ''


def test_tensorboard_is_left_out_without_writable_shared_memory(tmp_path, monkeypatch):
  """Its queue needs a writable /dev/shm; an error about a file of the run is still raised."""
  import tensorboardX

  def fail(folder, **options):
    raise OSError(errno.EROFS, 'Read-only file system', *filename)

  monkeypatch.setattr(tensorboardX, 'SummaryWriter', fail)
  filename = []
  writer, console = make_writer(tmp_path, tensorboard=True)
  writer.start_stage('sft', 2)
  writer.write(1, 'train', {'loss': 1.0})
  assert 'tensorboard: left out (Read-only file system' in console.getvalue()
  filename.append(str(tmp_path / 'tensorboard'))
  with pytest.raises(OSError):
    writer.start_stage('sft', 2)


def test_tensorboard_gets_finite_metrics_under_stage_and_split(tmp_path):
  writer, _ = make_writer(tmp_path, tensorboard=True)
  with writer:
    writer.start_stage('sft', 2)
    writer.write(1, 'train', {'loss': 1.0, 'kl': math.nan})
  (events,) = (tmp_path / 'tensorboard/sft').iterdir()
  data = events.read_bytes()
  assert b'sft/train/loss' in data and b'sft/train/kl' not in data


def test_object_stores_get_whole_files(tmp_path):
  writer, _ = make_writer(tmp_path)
  writer._remote = True
  path = tmp_path / 'metrics.jsonl'
  for resume, last in ((0, 50), (50, 53)):
    writer.start_stage('sft', 60, resume)
    for step in range(resume + 1, last + 1):
      writer.write(step, 'train', {'loss': 1.0})
    assert len(keys(path)) == 50
  writer.close()
  assert [s for _, _, s in keys(path)] == list(range(1, 54))


def test_slow_steps_are_printed_more_often_than_print_every(tmp_path, monkeypatch):
  clock = iter(range(1000))
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: next(clock))
  writer, out = make_writer(tmp_path, print_every=10)
  with writer:
    writer.start_stage('sft', 40)
    for step in range(1, 41):
      writer.write(step, 'train', {'loss': 1.0})
  steps = [int(line.split()[1].split('/')[0]) for line in out.getvalue().splitlines()]
  assert steps[0] == 1 and steps[-1] == 40
  assert len(steps) < 40 and all(after - before <= 5 for before, after in zip(steps, steps[1:]))


def test_pipe_gets_plain_lines(tmp_path):
  writer, out = make_writer(tmp_path, print_every=10)
  with writer:
    writer.start_stage('grpo', 25)
    for step in range(1, 26):
      writer.write(
        step,
        'train',
        {
          'loss': 0.5,
          'reward': 0.25,
          'kl': 1e-5,
          'tokens_per_s': 12345.6,
          'completions/mean_length': 31.0,
          'other': 3.0,
        },
      )
    writer.write(25, 'eval', {'completions/clipped_ratio': 0.5, 'pass@1': 0.75, '[red]odd': 2.0})
    writer.write(
      25,
      'eval',
      {'reward': 0.5, 'pass@1': 0.75, 'pass@1/a': 0.75, 'pass@1/b': 0.5, 'ungraded_prompts': 0}
      | {'rewards/a/mean': 0.5, 'rewards/a/std': 0.1, 'rewards/b/mean': 0.25},
    )
  lines = out.getvalue().splitlines()
  assert '\x1b' not in out.getvalue() and '\r' not in out.getvalue()
  assert lines[0] == ('grpo 1/25  loss 0.5  reward 0.25  kl 1e-05  len 31  tok/s 12.35k')
  assert re.fullmatch(r'grpo 11/25 .* left \d:\d\d:\d\d', lines[1])
  assert [s.split('/')[0] for s in lines[:4]] == ['grpo 1', 'grpo 11', 'grpo 21', 'grpo 25']
  assert lines[4:] == [
    'grpo 25 eval  pass@1 0.75  cut completions 0.5  [red]odd 2',
    'grpo 25 eval  reward 0.5  pass@1 0.75  pass@1 by b 0.5  reward b 0.25',  # `a` is in reward and pass@1
  ]


def test_step_lines_show_the_log_probs_of_pairs_and_failing_tool_calls(tmp_path):
  writer, out = make_writer(tmp_path, print_every=1)
  with writer:
    writer.start_stage('dpo', 3)
    writer.write(1, 'train', {'rewards/accuracies': 1.0, 'logps/chosen': -12.5, 'logps/rejected': -40.0})
    writer.write(2, 'train', {'reward': 0.5, 'tools/failure_frequency': 0.25, 'tools/malformed': 3})
    writer.write(3, 'train', {'reward': 0.5, 'tools/failure_frequency': 0.0, 'tools/malformed': 0})
  lines = [re.sub('  left .*', '', line) for line in out.getvalue().splitlines()]
  assert lines == [
    'dpo 1/3  acc 1  logp chosen -12.5  logp rejected -40',
    'dpo 2/3  reward 0.5  failed calls 0.25  unreadable calls 3',
    'dpo 3/3  reward 0.5',
  ]


def test_a_step_line_has_the_speed_since_the_line_before(tmp_path):
  """A step that is slow, as after a save, does not make the run look slow."""
  writer, out = make_writer(tmp_path, print_every=10)
  with writer:
    writer.start_stage('sft', 21)
    for step in range(1, 22):
      seconds = 2.8 if step == 11 else 0.1 if step <= 20 else 0.2
      writer.write(step, 'train', {'tokens': 740, 'tokens_per_s': 740 / seconds, 'time/step': seconds})
  speeds = [line.split('  ')[1:3] for line in out.getvalue().splitlines()]
  assert speeds == [['tok/s 7400', 's/step 0.1'], ['tok/s 2000', 's/step 0.37'], ['tok/s 6727', 's/step 0.11']]


def test_terminal_gets_a_bar_that_closes_on_errors(tmp_path):
  writer, out = make_writer(tmp_path, terminal=True)
  with pytest.raises(KeyError), writer:
    writer.start_stage('grpo', 20, resume_step=4)
    for step in range(5, 9):
      writer.write(step, 'train', {'loss': 0.5, 'reward': 0.25})
      writer.write(step, 'eval', {'pass@1': 0.5})
    raise KeyError('boom')
  text = out.getvalue()
  assert text.count('\x1b[?25l') == text.count('\x1b[?25h') == 1  # the cursor is hidden and shown again
  clean = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', text).replace('\r', '\n')
  assert ' 8/20 ' in clean and 'loss 0.5  reward 0.25' in clean
  # A line of an evaluation does not share its line with the bar.
  for step in range(5, 9):
    assert f'\ngrpo {step} eval  pass@1 0.5\n' in clean
  writer.close()  # a second close is harmless
  assert out.getvalue() == text


def alerts_of(rows, stage='grpo'):
  """Returns {kind: (step of the first alert, count)} for the rows of steps 1, 2, ..."""
  alerts = Alerts()
  for step, row in enumerate(rows, 1):
    alerts.check(stage, step, row)
  return {w['kind']: (w['step'], w['count']) for w in alerts.warnings}


HEALTHY = {
  'loss': 0.1,
  'reward': 0.5,
  'entropy': 2.0,
  'sampler_mismatch': 1.0,
  'completions/mean_length': 40.0,
  'completions/clipped_ratio': 0.1,
  'frac_reward_zero_std': 0.3,
  'grad_norm': 1.0,
  'critic/vf_clipfrac': 0.45,
  'time/reward': 0.9,
  'time/step': 2.0,
}


@pytest.mark.parametrize(
  'kind, sick, steps',
  [
    ('entropy', {'entropy': 0.1}, 10),
    ('clipped', {'completions/clipped_ratio': 0.6}, 10),
    ('length', {'completions/mean_length': 130.0}, 10),
    ('flat', {'frac_reward_zero_std': 0.95}, 10),
    ('mismatch', {'sampler_mismatch': 1.06}, 1),
    ('mismatch', {'sampler_mismatch': math.inf}, 1),
    ('mismatch', {'sampler_mismatch': None}, 1),  # as a resume reads infinity
    ('values', {'critic/vf_clipfrac': 0.55}, 10),
    ('slow_rewards', {'time/reward': 1.1}, 10),
    ('nonfinite', {'loss': math.nan}, 1),
    ('nonfinite', {'grad_norm': math.inf}, 1),
    ('nonfinite', {'loss': None}, 1),
  ],
)
def test_unhealthy_metrics_raise_one_counted_alert(kind, sick, steps):
  healthy = [HEALTHY] * 8
  sick = HEALTHY | sick
  assert alerts_of(healthy * 5) == {}
  assert alerts_of(healthy + [sick] * (steps - 1) + healthy) == {}
  # There is one alert, which counts all steps.
  assert alerts_of(healthy + [sick] * (steps + 2)) == {kind: (8 + steps, 3)}


def test_chosen_answers_that_become_less_likely_raise_one_alert():
  """The mean log-prob has to double for ten steps; answers of a run with rewards are its own, and may grow."""
  start, healthy, sick, steep = ({'logps/chosen': x, 'rewards/accuracies': 1.0} for x in (-200, -320, -410, -900))
  rows = [start] * 5 + [healthy] * 40
  assert alerts_of(rows + [steep] * 9 + [healthy], 'dpo') == {}
  assert alerts_of(rows + [sick] * 12, 'dpo') == {'chosen': (55, 3)}
  assert alerts_of([row | {'reward': 0.5} for row in rows + [sick] * 12], 'online_dpo') == {}
  assert alerts_of([{'logps/chosen': -0.2}] * 5 + [{'logps/chosen': -1.5}] * 20, 'dpo') == {}
  # Batches of kto without a desirable completion have 0, which is no level.
  assert alerts_of([start | {'logps/chosen': 0.0}] * 4 + [start] * 30, 'kto') == {}
  alerts = Alerts()
  (text,) = [text for step, row in enumerate(rows + [sick] * 12, 1) for text in alerts.check('dpo', step, row)]
  assert text.startswith('logps/chosen fell from -200 to -410: ')
  assert all(f'config.{field}' in text for field in ('optim.lr', 'preference.beta', 'preference.nll_coef'))


def test_a_first_step_without_a_reward_warns_at_once(tmp_path):
  row = HEALTHY | {'reward': math.nan, 'empty_updates': 2, 'masked_samples': 16}
  del row['loss']  # a mean over no token
  writer, out = make_writer(tmp_path)
  with writer:
    writer.start_stage('grpo', 20)
    writer.write(1, 'train', row)
  text = 'config.reward returned None for all 16 completions, which train nothing'
  assert f'warning: grpo step 1: {text}' in out.getvalue().replace('\n', ' ')
  assert 'a loss near 0 is expected' not in out.getvalue()
  (warning,) = writer.alerts.warnings
  assert warning['kind'] == 'ungraded' and warning['text'].startswith(text)
  resumed = row | {'reward': None}
  assert alerts_of([resumed]) == {'ungraded': (1, 1)}
  assert alerts_of([row | {'empty_updates': 0}]) == {}  # a teacher trains them
  assert list(alerts_of([row | {'failed_groups': 2, 'groups': 2}])) == ['failed']
  assert alerts_of([HEALTHY | {'empty_updates': 2}]) == {}


def test_a_reward_of_none_for_some_completions_warns():
  """A reward that returns None for what is wrong has a mean of 1; failures have a warning of their own."""
  row = HEALTHY | {'reward': 1.0, 'masked_samples': 28, 'completion_tokens': 2560}  # 64 completions of 40 tokens
  alerts = Alerts()
  assert not alerts.check('grpo', 1, row) and not alerts.check('grpo', 2, row)
  (text,) = alerts.check('grpo', 3, row)
  assert text.startswith('28 of 64 completions have no reward, and are not trained on: ')
  assert alerts_of([row] * 2 + [HEALTHY] + [row] * 2) == {}
  assert alerts_of([row | {'masked_samples': 6}] * 20) == {}
  assert list(alerts_of([row | {'failed_groups': 1, 'groups': 8}] * 20)) == ['failed']
  assert list(alerts_of([row | {'episodes/failed': 5}] * 20)) == ['lost']
  assert alerts_of([row | {'completions/mean_length': 0.0, 'completion_tokens': 0}] * 20) == {}


def test_lost_episodes_warn_with_their_error():
  alerts = Alerts()
  (text,) = alerts.check('grpo', 1, HEALTHY | {'episodes/failed': 5}, 'get_reward: raised ValueError: x')
  assert text == '5 episodes failed, and train nothing: get_reward: raised ValueError: x'


def rewarded(*rewards):
  return [HEALTHY | {'reward': reward} for reward in rewards]


def test_a_reward_that_collapses_warns():
  """Its mean over three steps is below a tenth of the best such mean before, in five rows."""
  assert alerts_of(rewarded(0.45, *[0.0] * 8)) == {'collapsed': (8, 2)}
  assert alerts_of(rewarded(*[0.2] * 10, None, *[0.01] * 9)) == {'collapsed': (18, 3)}
  assert alerts_of(rewarded(*[0.4] * 20, *[0.05] * 20)) == {}
  assert alerts_of(rewarded(*[0.4] * 20, *[0.0] * 6, *[0.4] * 20)) == {}
  assert alerts_of(rewarded(*[0.5] * 5, -0.1, *[0.01] * 20)) == {}  # of both signs: any mean may be near 0
  assert alerts_of(rewarded(*[-0.1] * 5, *[-5.0] * 20)) == {}
  alerts = Alerts()
  (text,) = (text for step, row in enumerate(rewarded(0.45, *[0.0] * 8), 1) for text in alerts.check('rl', step, row))
  assert text.startswith('reward fell from 0.15 to 0 ') and 'config.optim.lr' in text and 'config.init_from' in text


def test_a_policy_far_from_its_reference_warns():
  near, far = (HEALTHY | {'kl': kl} for kl in (0.0, 1.5))
  assert alerts_of([near] + [far] * 4) == {'kl': (4, 2)}
  assert alerts_of([near, far, far, near] * 9) == {}
  assert alerts_of([far] * 20) == {}  # the reference is another model, such as a teacher
  kto = [{'loss': 0.1, 'kl': kl} for kl in (0.0, *[40.0] * 20)]  # in nats a sequence
  assert alerts_of(kto, 'kto') == {}


@pytest.mark.parametrize(
  'kind, sick',
  [
    ('clipped', {'completions/clipped_ratio': 1.0}),
    ('flat', {'frac_reward_zero_std': 1.0}),
    ('empty', {'empty_updates': 2}),
  ],
)
def test_what_is_certain_warns_in_the_third_row(kind, sick):
  assert alerts_of([HEALTHY | {'lr': 0.1}] + [HEALTHY | sick] * 4) == {kind: (4, 2)}
  assert alerts_of([HEALTHY] + [HEALTHY | sick] * 2 + [HEALTHY] * 9) == {}


def test_a_step_with_some_empty_updates_is_healthy():
  assert alerts_of([HEALTHY | {'empty_updates': 1, 'lr': 0.1}] * 20) == {}
  assert alerts_of([HEALTHY | {'empty_updates': 1, 'critic/lr': 0.1}] * 20) == {}  # warm-up of the critic


def test_texts_of_warnings_name_fields_that_exist():
  known = tomllib.loads(pathlib.Path(metrics.__file__).with_name('alerts.toml').read_text('utf-8'))
  assert known.keys() == HOLDS.keys()
  for kind, warning in known.items():
    for field in re.findall(r'config\.(\w+(?:\.\w+)*)', warning['text']):
      assert field_names.field_type(field), f'{kind}: config.{field}'


def test_a_mismatch_names_both_of_its_causes():
  """A mismatch comes from types, or from updates: even float32 differs after them, and for samples of older weights."""
  (text,) = Alerts().check('grpo', 1, HEALTHY | {'sampler_mismatch': 1.0565})
  assert text.startswith('sampler_mismatch 1.056: ') and 'lower config.optim.lr' in text and 'check dtypes' in text


def test_harmless_changes_of_metrics_raise_no_alert():
  low = HEALTHY | {'entropy': 0.1}
  del low['reward']  # in SFT, entropy falls because the model learns
  assert alerts_of([HEALTHY] * 8 + [low] * 20) == {}
  short = HEALTHY | {'completions/mean_length': 2.0}
  longer = HEALTHY | {'completions/mean_length': 20.0}
  assert alerts_of([short] * 8 + [longer] * 20) == {}
  assert alerts_of([{'loss': 1.0}] * 20) == {}


def test_a_loss_near_0_is_explained_where_rewards_of_a_group_differ(tmp_path):
  def prints_the_note(row):
    writer, out = make_writer(tmp_path)
    with writer:
      writer.start_stage('rl', 2)
      writer.write(1, 'train', row)
    return 'note: a loss near 0 is expected' in out.getvalue()

  row = HEALTHY | {'loss': 0.001}
  del row['critic/vf_clipfrac']
  assert prints_the_note(row)
  assert not prints_the_note(row | {'frac_reward_zero_std': 1.0})
  assert not prints_the_note(row | {'frac_reward_zero_std': math.nan})
  assert not prints_the_note(row | {'critic/loss': 0.1})  # PPO's advantages are not relative to a group
  assert not prints_the_note({'loss': 0.001})
  assert not prints_the_note(HEALTHY)


def test_warnings_printed_once_and_kept_by_a_resume(tmp_path):
  def write_steps(writer, first, last):
    for step in range(first, last + 1):
      flat = 0.95 if step > 3 else 0.1
      writer.write(step, 'train', HEALTHY | {'loss': 0.001, 'frac_reward_zero_std': flat})

  writer, out = make_writer(tmp_path / 'whole')
  with writer:
    writer.start_stage('sft', 5)
    for step in (1, 2):
      writer.write(step, 'train', {'failed_groups': 1, 'groups': 2}, error='slow [b]disk')
    writer.start_stage('grpo', 20)
    write_steps(writer, 1, 20)
  text = out.getvalue()
  assert text.count('note: a loss near 0 is expected') == 1
  assert text.count('warning: grpo step 13: 95% of groups') == 1
  assert len(re.findall(r'warning: sft step 1: the reward of 1 of 2 groups failed .*slow \[b\]disk', text)) == 1
  assert text.count('slow [b]disk') == 1
  assert [(w['kind'], w['count']) for w in writer.alerts.warnings] == [('failed', 2), ('flat', 8)]
  for first, last in ((1, 15), (11, 20)):
    writer, out = make_writer(tmp_path / 'cut')
    with writer:
      writer.start_stage('grpo', 20, first - 1)
      write_steps(writer, first, last)
  assert [(w['kind'], w['count']) for w in writer.alerts.warnings] == [('flat', 8)]


def test_reward_failures_are_reported_again_after_fifty_steps(tmp_path):
  """The warning has the first error of the step and the count so far; a resume keeps the count and not the error."""
  failing = HEALTHY | {'groups': 4, 'failed_groups': 1}
  error = 'reward r: raised ValueError: x at r.py:3'
  writer, out = make_writer(tmp_path)
  with writer:
    writer.start_stage('grpo', 120)
    for step in range(1, 105):
      writer.write(step, 'train', failing if step > 1 else HEALTHY, error)
  warnings = [line for line in out.getvalue().splitlines() if 'warning' in line]
  assert [line.partition(': the')[0] for line in warnings] == [f'warning: grpo step {n}' for n in (2, 52, 102)]
  assert all(f'1 of 4 groups failed ({n} groups' in line for n, line in zip((1, 51, 101), warnings, strict=True))
  assert all(line.endswith(error) for line in warnings)
  (alert,) = writer.alerts.warnings
  assert (alert['step'], alert['kind'], alert['count']) == (2, 'failed', 103) and alert['text'].endswith(error)
  writer, out = make_writer(tmp_path)
  with writer:
    writer.start_stage('grpo', 120, 104)
    writer.write(105, 'train', failing, error)
  assert 'warning' not in out.getvalue()
  assert writer.alerts.warnings == [
    alert | {'count': 104, 'text': alert['text'].replace(error, 'samples/ has the errors')}
  ]


def test_samples_hold_any_text_and_number(tmp_path):
  writer, _ = make_writer(tmp_path)
  row = {
    'prompt': [{'role': 'user', 'content': 'Grüße 你好 \n'}],
    'completion': 'half \ud83d',
    'reward': math.nan,
    'lengths': np.array([1, 2]),
    'components': {'f': np.float32(0.5)},
  }
  with writer:
    writer.start_stage('grpo', 1)
    writer.samples(1, [row, {'prompt': 'x'}])
  text = (tmp_path / 'samples/grpo/1.jsonl').read_bytes().decode('utf-8')
  first, second = (json.loads(line) for line in text.split('\n')[:-1])
  assert first == row | {'reward': None, 'lengths': [1, 2], 'components': {'f': 0.5}}
  assert second == {'prompt': 'x'} and '你好' in text


def test_summary_is_returned_and_written_with_warnings(tmp_path):
  warnings = [{'kind': 'flat', 'count': 2}]
  out = report.summary(tmp_path, {'loss/sft': math.nan, 'x/y/sft': 1.5}, warnings)
  assert out == {'loss/sft': None, 'x/y/sft': 1.5, 'warnings': warnings}
  assert json.loads((tmp_path / 'summary.json').read_text()) == out


def test_summary_begins_with_the_warnings_of_the_last_start(tmp_path):
  """They are known before a step, so they have no metric."""
  for notes in (['warning: old'], ['warning: 3 of 4 documents are cut']):
    stages = dict(sft=dict(steps=2, notes=notes), grpo=dict(steps=1, notes=[]))
    object_store.add_line(tmp_path / 'starts.jsonl', json.dumps(dict(stages=stages)))
  out = report.summary(tmp_path, {}, [{'kind': 'flat', 'count': 2}])
  start = dict(stage='sft', step=0, kind='start', text='3 of 4 documents are cut', count=1)
  assert out['warnings'] == [start, {'kind': 'flat', 'count': 2}]


def test_is_clock_key_selects_times_and_rates():
  for key in ('time/step', 'tokens_per_s', 'mfu', 'x/samples_per_s'):
    assert metrics.is_clock_key(key)
  for key in ('loss', 'timeouts', 'mfu_target', 'tokens_per_step'):
    assert not metrics.is_clock_key(key)


def test_short_number_formats_numbers_of_any_size():
  cases = {
    0.12346: '0.1235',
    12345.6: '12.35k',
    1.234e-6: '1.2e-06',
    0: '0',
    2.5e7: '25M',
    3e10: '30G',
    -20000: '-20k',
    9999.0: '9999',
    9999.7: '10k',
    999.97: '1000',
    999_999.7: '1M',
    -999_999_999: '-1G',
  }
  assert {x: metrics.short_number(x) for x in cases} == cases
  assert metrics.short_number(math.nan) == 'nan'
