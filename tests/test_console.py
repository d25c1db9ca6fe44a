"""What a user sees of a run and how its config is read: progress lines, warnings at the start, epochs, YAML, schema."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

import jax
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost import stages
from jaxpost.data import sources, tokenizer
from jaxpost.distributed import watchdog
from jaxpost.errors import InputError
from jaxpost.models import lora
from jaxpost.models import model as model_lib
from jaxpost.monitor import activity, display, metrics, start, timeline
from jaxpost.programs import compile as compile_lib
from jaxpost.stage import config as config_lib
from jaxpost.stage import epochs, json_schema, optim, prepare, resumed_run
from jaxpost.stage.schema import OptimSection
from jaxpost.storage import manifest, object_store
from jaxpost.tools import chat, completions, inference, preview_stage
from jaxpost.tools.working import working
from launch import yaml_config

CLONE = pathlib.Path(__file__).resolve().parents[1]
SMALL = dict(
  data=dict(path='generated:arithmetic:max=9,size=60'),
  train=dict(epochs=3.0, batch_size=2, row_length=64),
  model=dict(preset='tiny'),
)


def test_activity_prints_a_line_each_period_until_it_ends():
  out = io.StringIO()
  reporter = activity.Activity(rich.console.Console(file=out), period_s=0.1)
  with reporter('loading'):
    time.sleep(0.35)
    reporter.note('loading: 2 of 3')
    time.sleep(0.15)
    with reporter.compiling('update', 3, 10):
      time.sleep(0.25)
      with reporter.compiling('score', 4, 10):
        assert reporter.text() == 'compiling 4/10: score'
      assert reporter.text() == 'compiling 4/10: update'  # of two at a time, the older one takes longer
    time.sleep(0.15)
  output = out.getvalue()
  time.sleep(0.3)
  assert out.getvalue() == output, 'lines go on after the end'
  lines = output.splitlines()
  assert lines.count('loading') >= 2 and 'compiling 3/10: update' in lines and lines.count('loading: 2 of 3') >= 2
  assert activity.PERIOD_S < 5


def test_timeline_names_the_phase_that_a_step_is_in():
  timer = timeline.Timeline({'sample': 'devices'})
  timer.place = 'grpo 3/40'
  assert timer.doing() == 'grpo 3/40 (0 s)'
  with timer('data'):
    assert timer.doing() == 'grpo 3/40: reading data (0 s)'
    with timer('sample'):
      timer._mark -= 9
      assert timer.doing() == 'grpo 3/40: sampling (9 s)'
  assert all(display.title(f'time/{phase}').startswith('Seconds ') for phase in metrics.PHASES)


class Clock(io.StringIO):
  """A stream that keeps the time of each line, with a simulated clock that `scenario` moves.

  Each number that `scenario` yields is the seconds until it goes on. A Clock stands in for the event that `Activity`
  waits for and, by monkeypatching, for the clocks of the process.
  """

  def __init__(self, scenario):
    super().__init__()
    self.now, self.next, self.lines, self.scenario = 100.0, 100.0, [(100.0, 'start')], scenario

  def write(self, text):
    self.lines += [(self.now, line) for line in text.splitlines()]
    return len(text)

  def clear(self):
    pass

  set = clear

  def wait(self, seconds):
    """Lets `seconds` pass; returns whether the scenario has ended."""
    end = self.now + max(seconds, 1e-3)
    while self.next <= end:
      self.now = self.next
      pause = next(self.scenario, None)
      if pause is None:
        return True
      self.next += pause
    self.now = end
    return False


@pytest.mark.parametrize('seed', range(4))
def test_a_run_is_never_silent_for_five_seconds(seed, tmp_path, monkeypatch):
  """Off a terminal, a line with the step and its phase comes after each silence, however long the phases take."""
  rng = random.Random(seed)
  longest = (0.3, 1.5, 4.0, 12.0)[seed]  # most seconds that a phase takes
  timer = timeline.Timeline({'sample': 'devices'})

  def run():
    step_start = clock.now
    for step in range(1, 31):
      timer.place = f'grpo {step}/30'
      for phase in ('data', 'sample', 'score', 'update'):
        with timer(phase):
          yield rng.random() * longest
      writer.write(step, 'train', {'loss': 1.0, 'time/step': clock.now - step_start})
      step_start = clock.now
      yield rng.random() * longest  # between steps, in no phase

  clock = Clock(run())
  monkeypatch.setattr('time.perf_counter', lambda: clock.now)
  monkeypatch.setattr('time.monotonic', lambda: clock.now)
  timer._settle()
  console = rich.console.Console(file=clock, width=200)
  reporter = activity.Activity(console)
  monkeypatch.setattr(reporter, '_wake', clock)
  with metrics.MetricsWriter(tmp_path, tensorboard=False, console=console, print_every=1000) as writer:
    writer.start_stage('grpo', 30)
    with reporter.following(timer.doing):
      with reporter.compiling('prefill', 12, 11):  # for a new shape; the phase goes on afterwards
        pass
      reporter._thread.join()
  assert not console._render_hooks
  gaps = [after[0] - before[0] for before, after in itertools.pairwise(clock.lines)]
  assert max(gaps) <= 4.6 and clock.now - clock.lines[-1][0] <= 4.6
  progress = [(line, gap) for (_, line), gap in zip(clock.lines[1:], gaps) if ' loss ' not in line]
  assert all(gap >= 4.499 for _, gap in progress) and len(progress) < len(clock.lines) - 1
  pattern = r'grpo \d+/30(: (reading data|sampling|scoring|updating))? \(\d+ s\)'
  assert all(re.fullmatch(pattern, line) for line, _ in progress), progress
  assert bool(progress) == (longest > 1)


def test_a_command_is_never_silent_for_five_seconds(monkeypatch):
  """Stderr names the work of a command, a compilation while it lasts, and the work again afterwards."""
  ledger = compile_lib.Ledger(announce=working.compiling)

  def command():
    yield 12.0
    with ledger.begin('prefill'):
      yield 2.0
    with ledger.begin('generate'):
      yield 21.0
    yield 30.0

  clock = Clock(command())
  monkeypatch.setattr('time.perf_counter', lambda: clock.now)
  monkeypatch.setattr(sys, 'stderr', clock)
  monkeypatch.setattr(working, '_wake', clock)
  monkeypatch.setattr(working, '_printed', 97.0)  # the last line is three seconds old when the clock starts, at 100
  with working('sampling 64 completions'):
    working._thread.join()
  gaps = [after[0] - before[0] for before, after in itertools.pairwise(clock.lines)]
  assert max(gaps) <= 4.6 and clock.now - clock.lines[-1][0] <= 4.6 and gaps[0] <= 1.6
  progress = [re.sub(r' \(\d+ s\)$', '', line) for _, line in clock.lines[1:]]
  assert [name for name, _ in itertools.groupby(progress)] == [
    'sampling 64 completions',
    'compiling generate',
    'sampling 64 completions',
  ]
  assert re.search(r' \(6[45] s\)$', clock.lines[-1][1]) and working.text() == ''


def test_chat_and_evaluation_report_compilations_on_stderr(tmp_path, monkeypatch, capsys):
  """Compiles real programs, with a line after every 0.1 s of silence; the answer alone goes to stdout."""
  tokenizer.load('bytes').save(tiny.folder(tmp_path / 'nano'))
  monkeypatch.setattr(working, '_period', 0.1)
  weights = inference.load(model=str(tmp_path / 'nano'))
  data = dict(path='generated:arithmetic:max=9,size=60')
  notes = []
  monkeypatch.setattr(working, 'note', notes.append)
  config = dict(data=data, train=dict(batch_size=1, row_length=32), eval=dict(data=data, size=4))
  inference.evaluate_as(model=str(tmp_path / 'nano'), config=config)
  assert len(notes) > 1 and notes == [f'evaluating: {n} of {len(notes)} batches are done' for n in range(len(notes))]
  captured = capsys.readouterr()
  assert captured.out == '' and re.search(r'^compiling evaluate', captured.err, re.MULTILINE)
  out = io.StringIO()
  chat.chat_loop({'nano': weights}, completions.Draws(max_new_tokens=4), 'data=-1', [], io.StringIO('hello\n'), out=out)
  captured = capsys.readouterr()
  assert captured.out == '' and re.search(r'^compiling generate', captured.err, re.MULTILINE)
  assert 'compiling' not in out.getvalue()


def test_a_line_between_activities_is_a_whole_phrase(tmp_path, monkeypatch):
  """A long start of a stage printed "the start of dpo" and nothing else."""

  def starts_slowly(*_, **__):
    watchdog.start_operation('the start of dpo', 0.0)
    time.sleep(0.4)

  monkeypatch.setattr(stages, '_run', starts_slowly)
  monkeypatch.setattr(activity.Activity.__init__, '__defaults__', (False, 0.1))
  out = io.StringIO()
  stages.run({}, tmp_path, rich.console.Console(file=out))
  assert {*out.getvalue().splitlines()} == {'the start of dpo is in progress'}


def test_activity_thread_ends_after_an_exception():
  reporter = activity.Activity(rich.console.Console(file=io.StringIO()), period_s=0.05)
  with pytest.raises(KeyError), reporter('looking'):
    raise KeyError
  assert not reporter._thread.is_alive()


def test_console_survives_a_closed_stdout():
  code = (
    'import sys; from jaxpost.monitor import activity; c = activity.Console(); c.out("a"); c.out("b")\n'
    'print("c", flush=True); print("went on", file=sys.stderr)'
  )
  read, write = os.pipe()
  os.close(read)
  done = subprocess.run([sys.executable, '-c', code], cwd=CLONE, stdout=write, stderr=-1, text=True)
  os.close(write)
  assert (done.returncode, done.stderr) == (0, 'went on\n')


def test_train_epochs_sets_the_number_of_steps():
  (stage,) = prepare.prepare_all(SMALL)
  per_epoch = epochs.steps_of(stage.inputs, stage.data)
  assert stage.config.train.steps == round(3 * per_epoch)
  epochs_used = [info['epochs'] for _, info in (next(stage.data.stream) for _ in range(stage.config.train.steps))]
  stage.data.stream.close()
  assert epochs_used[-1] == pytest.approx(3, rel=0.1)


def two_sources(folder):
  """Writes 300 rows with prompts of 10 characters and 300 of 60; returns the path of the mixture."""
  for name, length in (('short', 10), ('long', 60)):
    rows = [json.dumps(dict(prompt='a' * length, completion='b')) + '\n' for _ in range(300)]
    (folder / f'{name}.jsonl').write_text(''.join(rows))
  return f'{folder}/short.jsonl + {folder}/long.jsonl'


def test_held_out_rows_come_from_each_source_of_a_mixture(tmp_path):
  held_out = dict(data=dict(path=two_sources(tmp_path)), size=4)
  (stage,) = prepare.prepare_all(SMALL | dict(eval=held_out))
  documents = stage.data.held_out.documents
  lengths = [len(documents[n].tokens) for n in range(len(documents))]
  assert lengths[0] == lengths[1] < lengths[2] == lengths[3]


@pytest.mark.parametrize('over', [dict(overlong='drop'), dict(weights=(9.0, 1.0))])
def test_epochs_account_for_dropped_rows_and_source_weights(tmp_path, over):
  """Rows dropped for their length do not count; where sources have weights, their sizes do not."""
  length = 40 if 'overlong' in over else 64
  data = dict(path=two_sources(tmp_path), **over)
  train, messages = dict(epochs=2.0, batch_size=2, row_length=length), []
  (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=train), messages.append)
  assert messages == [f'reading data: {n} of 600 documents are tokenized' for n in (256, 512)]
  epochs_used = [info['epochs'] for _, info in (next(stage.data.stream) for _ in range(stage.config.train.steps))]
  stage.data.stream.close()
  assert epochs_used[-1] == pytest.approx(2, rel=0.1)


def start_warnings(lengths, folder, **over):
  """Returns (rows, *warnings) at the start of a run on prompts of these lengths."""
  rows = [json.dumps(dict(prompt='a' * n, completion='b', answer='b')) + '\n' for n in lengths]
  (folder / 'data.jsonl').write_text(''.join(rows))
  data = dict(path=f'{folder}/data.jsonl') | over.pop('data', {})
  (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=dict(steps=2, batch_size=2, row_length=64)) | over)
  stage.close()
  (facts,) = epochs.facts([stage]).values()
  inspect_warnings = [line for line in preview_stage.show_stage(stage, 1) if str(line).startswith('warning: ')]
  assert inspect_warnings == facts['notes']
  return facts['rows'], *facts['notes']


@pytest.mark.parametrize(
  'min_prompt, expected', [(2, 'rows.jsonl:3: '), (550, 'the first 512 rows are all dropped by')]
)
def test_inspect_names_the_first_streamed_row_that_a_map_keeps(tmp_path, min_prompt, expected):
  """The heading names the row shown below it; if the map drops all of the first 512 rows, a line says so."""
  (tmp_path / 'rows.jsonl').write_text(''.join(f'{{"prompt": "{n}", "completion": "b"}}\n' for n in range(600)))
  (tmp_path / 'few.py').write_text(f"def keep(row):\n  return row if int(row['prompt']) >= {min_prompt} else None\n")
  data = dict(path=f'{tmp_path}/rows.jsonl', map=f'{tmp_path}/few.py:keep', streaming=True)
  (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=dict(steps=2, batch_size=1, row_length=64)))
  with contextlib.closing(stage):
    assert any(expected in str(line) for line in preview_stage.show_stage(stage, 1))


def test_inspect_shows_a_reward_model_among_the_rewards(tmp_path):
  judge = tiny.folder(tmp_path / 'judge', num_labels=1)
  over = dict(reward='length?max=9,reward_model,gsm8k', reward_weights=(1.0, 0.5, 0.25), reward_model=dict(path=judge))
  (stage,) = prepare.prepare_all(tiny.grpo_config(tiny.folder(tmp_path / 'model'), **over))
  with contextlib.closing(stage):
    lines = [line for line in preview_stage.show_stage(stage, 1) if isinstance(line, str)]
  (method,) = (line for line in lines if line.startswith('method: '))
  assert 'rl.importance none' in method and '()' not in method
  reward_lines = [line for line in lines if line.startswith('reward: ')]
  assert reward_lines == [
    'reward: length (jaxpost.rewards.length:Length?max=9), weight 1, decides what is correct',
    f'reward: reward_model ({judge}), weight 0.5',
    'reward: gsm8k (jaxpost.rewards.math:gsm8k), weight 0.25',
  ]


def test_inspect_shows_the_reward_of_an_environment(tmp_path):
  (tmp_path / 'own.py').write_text(
    'class Own:\n  def reset(self, **row):\n    pass\n\n  def look(self) -> str:\n    """Looks."""\n    return "x"\n\n'
    '  def get_reward(self):\n    return 1.0\n'
  )
  over = dict(environment=f'{tmp_path}/own.py:Own', reward='gsm8k', rl=dict(correct_by='environment'))
  (stage,) = prepare.prepare_all(tiny.grpo_config(tiny.folder(tmp_path / 'model'), **over))
  with contextlib.closing(stage):
    lines = [line for line in preview_stage.show_stage(stage, 1) if isinstance(line, str)]
  assert [line for line in lines if line.startswith('reward: ')] == [
    'reward: gsm8k (jaxpost.rewards.math:gsm8k), weight 1',
    f'reward: environment ({tmp_path}/own.py:Own), weight 1, decides what is correct',
  ]


def test_run_warns_how_many_documents_are_left_out(tmp_path):
  lengths = (3, *[80] * 5)
  advice = 'raise config.train.row_length'
  assert start_warnings(lengths, tmp_path) == (
    6,
    'warning: 5 of 6 documents (83%) are longer than 64 tokens and are left out, as nothing trained would remain: '
    f'{advice}',
  )
  assert start_warnings(lengths, tmp_path, data=dict(overlong='drop'))[1].endswith(f'are left out: {advice}')
  assert start_warnings([3] * 199 + [80], tmp_path) == (200,)


def test_run_warns_how_many_documents_are_truncated(tmp_path):
  start = 'warning: 5 of 6 documents (83%) are longer than 64 tokens and are '
  for algorithm, lengths, fate in (
    ('sft', [3, 62, *[80] * 4], 'cut there (1) or left out (4), as nothing trained would remain'),
    ('dpo', [3, 61, *[80] * 4], 'cut there (1) or left out (4), as nothing trained would remain'),
    ('sft', [3, *[62] * 5], 'cut there'),
  ):
    rows = [dict(prompt='a' * n, completion='bcde', chosen='bcde', rejected='fghi') for n in lengths]
    keys = ['prompt', 'completion'] if algorithm == 'sft' else ['prompt', 'chosen', 'rejected']
    lines = [json.dumps({key: row[key] for key in keys}) + '\n' for row in rows]
    (tmp_path / 'data.jsonl').write_text(''.join(lines))
    config = dict(algorithm=algorithm, data=dict(path=f'{tmp_path}/data.jsonl'), train=dict(steps=2, row_length=64))
    (stage,) = prepare.prepare_all(SMALL | config)
    with contextlib.closing(stage):
      (facts,) = epochs.facts([stage]).values()
      assert facts['notes'] == [f'{start}{fate}: raise config.train.row_length'], algorithm
      *_, table = preview_stage.show_stage(stage, 1)
      assert table.caption.endswith(f'5 over-long, {5 - lengths.count(62) - lengths.count(61)} left out')


def test_inspect_counts_the_documents_that_overlong_drops(tmp_path):
  """With 'drop', the table leaves out documents that 'truncate' would cut."""
  rows = [dict(prompt='a' * n, completion='bcde') for n in (3, 62, 62)]
  (tmp_path / 'data.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  for overlong, left_out in (('truncate', 0), ('drop', 2)):
    data = dict(path=f'{tmp_path}/data.jsonl', overlong=overlong)
    (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=dict(steps=2, row_length=64)))
    with contextlib.closing(stage):
      *_, table = preview_stage.show_stage(stage, 1)
    assert table.caption.endswith(f'2 over-long, {left_out} left out')


def test_run_warns_how_many_prompts_are_dropped(tmp_path):
  rollout = dict(prompts=1, max_prompt_length=40, max_new_tokens=8)
  rows_and_warnings = start_warnings(
    (3, *[80] * 5), tmp_path, algorithm='grpo', reward='exact_match', rollout=rollout, train=dict(steps=2)
  )
  assert rows_and_warnings == (
    1,
    'warning: 5 of 6 prompts (83%) are longer than 40 tokens and are left out: raise config.rollout.max_prompt_length',
  )
  stage = dict(steps=9, rows=1, tokens_per_epoch=0, batch='1 prompt', epochs=9.0, notes=rows_and_warnings[1:])
  assert start.lines(start.describe() | {'stages': {'rl': stage}})[2] == f'rl: {rows_and_warnings[1]}'


@pytest.mark.parametrize(
  ('steps', 'every', 'warns'), [(100, 0, False), (101, 0, True), (300, 99, False), (300, 300, True)]
)
def test_run_without_intermediate_checkpoints_warns(steps, every, warns):
  train = dict(steps=steps, batch_size=2, row_length=64)
  (stage,) = prepare.prepare_all(SMALL | dict(train=train, save=dict(every=every)))
  stage.close()
  (facts,) = epochs.facts([stage]).values()
  warning = (
    f'warning: nothing is saved before step {steps}, so a crash loses all of them: config.save.every=N saves every N'
  )
  assert facts['notes'] == [warning] * warns


@pytest.mark.parametrize(
  'saved, evaluated, candidates',
  [
    (0, 10, 'only step 90, the last, is'),
    (20, 0, 'only step 90, the last, is'),
    (20, 45, 'only step 90, the last, is'),
    (20, 30, 'every 60 steps one is'),
    (20, 10, ''),
    (10, 20, ''),
    (10, 10, ''),
  ],
)
def test_keep_best_warns_if_few_steps_are_both_saved_and_evaluated(saved, evaluated, candidates):
  raw = SMALL | dict(train=dict(steps=90), save=dict(every=saved, keep_best='loss'))
  raw['eval'] = dict(every=evaluated, data=dict(path=SMALL['data']['path']))
  (stage,) = prepare.prepare_all(raw)
  stage.close()
  (facts,) = epochs.facts([stage]).values()
  advice = 'both saved and evaluated: let config.save.every equal config.eval.every'
  assert facts['notes'] == [f'warning: config.save.keep_best: {candidates} {advice}'] * bool(candidates)


def test_run_warns_about_settings_without_effect(tmp_path):
  """Such settings are not refused: recipes are run without their held-out data, and stages share a section."""
  rollout = dict(prompts=1, max_prompt_length=40, max_new_tokens=8)
  grpo = dict(algorithm='grpo', reward='exact_match', rollout=rollout)
  over = dict(train=dict(steps=2, batch_size=4), eval=dict(every=5), log=dict(profile_from=3))
  assert start_warnings((3, 4), tmp_path, **grpo, **over) == (
    2,
    'warning: config.train.batch_size changes nothing, rollout.prompts and rollout.group_size are the batch',
    'warning: config.log.profile_from=3 traces nothing, as there are 2 steps',
    'warning: config.eval.every changes nothing, as config.eval.data.path is empty',
  )
  assert start_warnings((3, 4), tmp_path, **grpo, train=dict(steps=2)) == (2,)
  held_out = dict(data=dict(path=SMALL['data']['path']))
  assert start_warnings((3, 4), tmp_path, **grpo, train=dict(steps=2), eval=held_out) == (
    2,
    'warning: nothing is evaluated: grpo has no loss of held-out rows, so set config.eval.samples',
  )
  assert start_warnings((3, 4), tmp_path, **grpo, train=dict(steps=2), eval=held_out | dict(samples=1)) == (2,)


def test_lora_alpha_with_rank_0_is_refused():
  words = 'config.lora.alpha: a run with lora.rank=0 would ignore it; leave it 16.0'
  with pytest.raises(InputError, match=re.escape(words)):
    prepare.resolve_all(SMALL | dict(lora=dict(alpha=32.0)))
  stages = SMALL | dict(stages=('a', 'b'), lora=dict(alpha=32.0), a=dict(lora=dict(rank=2)), b={})
  assert len(prepare.resolve_all(stages)) == 2  # accepted, as stage a has adapters and reads it


def test_critic_warmup_is_compared_with_the_steps_of_the_epochs():
  rollout = dict(prompts=1, max_prompt_length=40, max_new_tokens=8)
  raw = SMALL | dict(algorithm='ppo', reward='exact_match', rollout=rollout, critic=dict(warmup_steps=101))
  (stage,) = prepare.prepare_all(raw | dict(train=dict(epochs=4.0)))  # more than 100, the default of train.steps
  stage.close()
  assert stage.config.train.steps > 101
  with pytest.raises(InputError, match='critic.warmup_steps: 101 leaves the policy none of [0-9]+ steps'):
    prepare.prepare_all(raw | dict(train=dict(epochs=0.5, steps=200)))


def test_epochs_of_grpo_are_counted_in_prompts():
  raw = SMALL | dict(
    algorithm='grpo', reward='exact_match', rollout=dict(prompts=7, max_prompt_length=40, max_new_tokens=8)
  )
  (stage,) = prepare.prepare_all(raw)
  stage.close()
  assert stage.config.train.steps == round(3 * len(stage.data.stream) / 7)
  resolved = epochs.with_steps(raw, {stage.name: stage.config.train.steps})
  assert resolved['train']['steps'] == stage.config.train.steps and raw['train'].get('steps') is None


def test_steps_of_epochs_are_read_from_the_config_of_the_run(tmp_path):
  """config.json holds the steps, so no data has to be read to see that a run is finished."""
  raw = {'stages': ('a',), 'a': {}, **SMALL}
  saved = epochs.with_steps(raw, {'a': 77})
  (tmp_path / 'config.json').write_text(json.dumps(saved))
  resumed = epochs.with_steps_of_run(raw, config_lib.parse(raw), tmp_path / 'config.json')
  assert config_lib.parse(resumed)['a'].train.steps == 77
  other = raw | {'train': raw['train'] | {'epochs': 4.0}}
  resumed = epochs.with_steps_of_run(other, config_lib.parse(other), tmp_path / 'config.json')
  assert config_lib.parse(resumed)['a'].train.steps == 100


def test_run_of_epochs_resumes_with_steps_but_not_with_other_epochs(tmp_path):
  original = tiny.merged(SMALL, dict(train=dict(steps=45)))
  (tmp_path / 'config.json').write_text(json.dumps(original))
  saved = tmp_path / 'checkpoints/sft/10' / manifest.NAME
  saved.parent.mkdir(parents=True)
  saved.touch()

  def resume(**train):
    configs = config_lib.parse(tiny.merged(SMALL, dict(train=train)))
    resumed_run.check_config(tmp_path, configs, rich.console.Console())

  resume(steps=60, epochs=0.0)
  with pytest.raises(InputError, match='config.train.epochs of sft differs from the run'):
    resume(steps=45, epochs=4.0)


@pytest.mark.parametrize(
  'change, refused',
  [
    (dict(train=dict(micro_batch_size=1)), ''),
    (dict(model=dict(remat='full')), ''),
    (dict(rollout=dict(slots=3, offload=True)), ''),
    (dict(tools=dict(workers=2)), ''),
    (dict(rollout=dict(temperature=0.5)), 'rollout.temperature'),
    (dict(tools=dict(max_turns=3)), 'tools.max_turns'),
  ],
)
def test_resume_accepts_changed_memory_settings_but_no_other_sampling(tmp_path, change, refused):
  original = tiny.merged(SMALL, dict(train=dict(steps=45, epochs=0.0)))
  (tmp_path / 'config.json').write_text(json.dumps(original))
  saved = tmp_path / 'checkpoints/sft/10' / manifest.NAME
  saved.parent.mkdir(parents=True)
  saved.touch()
  configs = config_lib.parse(tiny.merged(original, change))
  with contextlib.nullcontext() if not refused else pytest.raises(InputError, match=f'config.{refused} of sft differs'):
    resumed_run.check_config(tmp_path, configs, rich.console.Console())


def test_start_lines_name_version_seed_devices_steps_and_rows(tmp_path):
  facts = start.describe() | {
    'seed': 3,
    'stages': {'sft': dict(steps=9, rows=1200, tokens_per_epoch=5e4, batch='2 rows', epochs=1.5)},
  }
  for _ in range(2):
    object_store.add_line(tmp_path / start.FILE, json.dumps(facts))
  assert [row['seed'] for row in metrics.read_growing(tmp_path / start.FILE)] == [3, 3]
  many_epochs = facts | {'stages': {'dpo': facts['stages']['sft'] | {'epochs': 6400.0}}}
  assert start.lines(many_epochs)[1].endswith(', 6400 epochs (config.train.epochs=N makes it N)')
  few_rows = facts | {'stages': {'sft': facts['stages']['sft'] | dict(steps=1, rows=3, epochs=8.0)}}
  few_rows_line = (
    'sft: 1 step of 2 rows, 3 rows (less than a batch, which repeats them), about 50k tokens an epoch, 8 epochs'
  )
  assert start.lines(few_rows)[1] == few_rows_line
  text = '\n'.join([start.opening(3, 'runs/x'), *start.lines(facts)])
  assert 'repeats' not in text and f'\ndevices: {jax.device_count()} x ' in text
  for part in (
    jaxpost.__version__,
    'JAX ',
    'seed 3',
    'runs/x',
    '9 steps of 2 rows',
    '1,200 rows',
    '50k tokens',
    '1.5 ep',
  ):
    assert part in text, part


def test_run_prints_version_seed_and_workdir_before_it_reads_data(tmp_path, monkeypatch):
  def fail_to_read(*_):
    (line,) = out.getvalue().splitlines()
    assert line.startswith(f'jaxpost {jaxpost.__version__}') and line.endswith(f', seed 5, workdir {tmp_path}/run')
    assert console._render_hooks
    raise InputError('no data')

  out = io.StringIO()
  console = rich.console.Console(file=out, width=400)
  monkeypatch.setattr('jaxpost.stages.prepare.prepare_all', fail_to_read)
  with pytest.raises(InputError, match='no data'):
    stages.run(tiny.merged(SMALL, dict(seed=5, model=dict(dtype='float32'))), tmp_path / 'run', console)
  assert not console._render_hooks and not (tmp_path / 'run').exists()


def test_max_samples_takes_rows_from_each_source_of_a_mixture():
  rows = sources.read_sources('generated:arithmetic:max=9,size=40 + generated:arithmetic:max=9,size=20')
  first = sources.first(rows, len(rows) // 2)
  assert len(first) == len(rows) // 2 == sum(first.sizes) and all(first.sizes)
  starts = [0, rows.sizes[0]]
  expected = [starts[part] + n for part, size in enumerate(first.sizes) for n in range(size)]
  assert [first[i] for i in range(len(first))] == [rows[i] for i in expected]
  assert first.where(first.sizes[0]) == rows.where(rows.sizes[0])
  (stage,) = prepare.prepare_all(SMALL | dict(data=SMALL['data'] | dict(max_samples=10)))
  assert len(stage.data.rows) == 10


@pytest.mark.parametrize(
  'theirs, ours',
  [
    ('q_proj,v_proj', 'q|v'),
    ('q_proj|k_proj', 'q|k'),
    ('gate_proj, up_proj, down_proj', 'gate|up|down'),
    ('all-linear', 'q|k|v|o|gate|up|down'),
    ('q|k', 'q|k'),
    ('layers/.*q', 'layers/.*q'),
  ],
)
def test_peft_target_names_are_translated(theirs, ours):
  assert lora.target_pattern(theirs, model_lib.build(tiny.config()).table, 2) == ours


def test_warmup_ratio():
  assert optim.warmup_steps(OptimSection(warmup_ratio=0.03), 1000) == 30
  assert optim.warmup_steps(OptimSection(warmup_steps=7), 1000) == 7
  with pytest.raises(InputError, match='warmup_ratio'):
    optim.check(OptimSection(warmup_ratio=0.1, warmup_steps=7))


def test_yaml_config_is_parsed(tmp_path):
  path = tmp_path / 'my.yaml'
  path.write_text('algorithm: sft\noptim: {lr: 2e-5, name: muon}\nstages: [one]\none: {train: {steps: 3}}\n')
  (stage,) = config_lib.parse(prepare.as_dict(yaml_config.get_config(path))).values()
  assert stage.optim.lr == 2e-5 and stage.optim.name == 'muon' and stage.train.steps == 3
  path.write_text('a: [1\n')
  with pytest.raises(InputError, match='my.yaml'):
    yaml_config.get_config(path)


def test_load_config_reads_yaml_as_the_commands_do(tmp_path):
  (tmp_path / 'my.yaml').write_text('optim: {lr: 2e-5}\nlog: {run_name: 12e5}\n')
  config = jaxpost.load_config(tmp_path / 'my.yaml')
  assert config['optim']['lr'] == 2e-5 and config['log']['run_name'] == '12e5' and config['seed'] == 0
  assert config == yaml_config.get_config(tmp_path / 'my.yaml').to_dict()


def test_quoted_numbers_in_yaml_stay_strings(tmp_path):
  path = tmp_path / 'my.yaml'
  numbers = '[12e5, 1E-5, -.5e3, 1.5e+2, 2.e1, 7]'
  path.write_text(f'log: {{run_name: "12e5"}}\nuser: {{numbers: {numbers}, texts: ["1e5", 1e5.py, e5, +1e]}}\n')
  config = prepare.as_dict(yaml_config.get_config(path))
  assert config['log']['run_name'] == '12e5' and config['user']['numbers'] == (12e5, 1e-5, -500.0, 150.0, 20.0, 7)
  assert config['user']['texts'] == ('1e5', '1e5.py', 'e5', '+1e')


YAML_OF_MISREAD_TYPES = """
log: {run_name: 12e5, tags: [on, 0o17, 2026-11-27, 1.50, 1_000]}
model: {path: 007}
data: {path: [2024-01-01, 12:30], shuffle: off, weights: [1, 5e-1]}
train: {steps: 0o17, epochs: 1e1}
stages: [no]
no: {model: {path: 1e5}, optim: {lr: 1e-5}, seed: +3}
reward: yes
user: {day: 2026-11-27, yes: on, n: 0x1F, share: .5}
"""


def test_yaml_values_get_the_type_of_their_field(tmp_path):
  """YAML 1.1 alone reads `on` as True, 12:30 as 750, 007 as 7, and a date as an object that JSON cannot hold."""
  path = tmp_path / 'my.yaml'
  path.write_text(YAML_OF_MISREAD_TYPES)
  config = prepare.as_dict(yaml_config.get_config(path))
  (stage,) = config_lib.parse(config).values()
  assert (stage.log.run_name, stage.model.path, stage.reward) == ('12e5', '1e5', 'yes')
  assert stage.log.tags == ('on', '0o17', '2026-11-27', '1.50', '1_000')
  assert stage.data.path == ('2024-01-01', '12:30') and stage.data.weights == (1.0, 0.5) and not stage.data.shuffle
  assert (stage.train.steps, stage.train.epochs, stage.optim.lr, stage.seed) == (15, 10.0, 1e-5, 3)
  assert stage.user == {'day': '2026-11-27', 'yes': True, 'n': 31, 'share': 0.5}
  anchors = 'base: &a {run_name: off}\nlog: {<<: *a, tags: &t [1]}\nuser: {<<: [*a], tags: *t}\n'
  path.write_text(anchors)
  config = yaml_config.get_config(path)
  assert config.log.run_name == 'off' and config.log.tags == ('1',) and config.user.tags == (1,)


@pytest.mark.parametrize(
  'text, message',
  [
    ('train: {steps: 017}', "config.train.steps: want int, got '017'"),
    ('train: {steps: 12:30}', "config.train.steps: want int, got '12:30'"),
    ('train: {steps: 1e3}', 'config.train.steps: want int, got 1000.0'),
    ('optim: {lr: 1:30.5}', "config.optim.lr: want float, got '1:30.5'"),
    ('data: {shuffle: 2026-11-27}', "config.data.shuffle: want bool, got '2026-11-27'"),
    ('model: {path: }', 'config.model.path: want str, got None'),
  ],
)
def test_yaml_values_of_a_wrong_type_are_refused(tmp_path, text, message):
  path = tmp_path / 'my.yaml'
  path.write_text(text)
  with pytest.raises(InputError, match=re.escape(message)):
    config_lib.parse(prepare.as_dict(yaml_config.get_config(path)))


def test_duplicate_yaml_keys_are_refused(tmp_path):
  """A plain YAML parser silently drops the first of two blocks with the same key."""
  path = tmp_path / 'my.yaml'
  duplicates = ('optim: {lr: 1.0}\nseed: 1\noptim: {b1: 0.9}\n', 3), ('data: {path: a, path: b}\n', 1)
  for text, line in duplicates:
    path.write_text(text)
    with pytest.raises(InputError, match=f'my.yaml:{line}: (optim|path) is also in line 1; keep one'):
      yaml_config.get_config(path)
  path.write_text('optim: &a {lr: 1.0}\nsft: {optim: &b {<<: *a, lr: 2.0}}\nrl: {<<: *b}\n')
  assert yaml_config.get_config(path).sft.optim.lr == 2.0


def run_python(*words, env=None):
  return subprocess.run(
    [sys.executable, *words], cwd=CLONE, env={**os.environ, **(env or {})}, text=True, capture_output=True, timeout=200
  )


def test_inspect_reads_yaml_and_checks_as_training_does(tmp_path):
  (tmp_path / 'my.yaml').write_text('data: {path: "generated:arithmetic:max=9,size=30"}\nsave: {keep_best: loss}\n')
  done = run_python('-m', 'launch.inspect', f'--config={tmp_path}/my.yaml', '--rows=1')
  assert done.returncode == 2 and 'config.save.keep_best' in done.stderr, done.stderr
  done = run_python('-m', 'launch.inspect', f'--config={tmp_path}/my.yml')
  assert done.returncode == 2 and 'my.yaml?' in done.stderr, done.stderr


def test_version_flag_prints_the_version():
  done = run_python('-m', 'launch.main', '--version')
  assert done.stdout.strip() == f'jaxpost {jaxpost.__version__}'


def test_transformers_advice_about_torch_is_suppressed():
  """transformers prints how to install torch when it is imported without it, which is simulated here."""
  code = (
    'import importlib.util as u, sys; find = u.find_spec\n'
    'u.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)\n'
    '{}import transformers; transformers.AutoTokenizer'
  )
  env = {'TRANSFORMERS_NO_ADVISORY_WARNINGS': '', 'TRANSFORMERS_VERBOSITY': 'warning'}
  direct = run_python('-c', code.format(''), env=env)
  unset = 'import os; del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]; '
  ours = run_python('-c', code.format(unset + 'import jaxpost.data.tokenizer; '), env=env)
  assert 'PyTorch' in direct.stdout + direct.stderr, 'transformers advises no more; this test and the variable can go'
  assert 'PyTorch' not in ours.stdout + ours.stderr and ours.returncode == 0, ours.stderr


def test_config_schema_is_current_and_rejects_wrong_configs():
  import jsonschema

  text = (CLONE / 'docs/config_schema.json').read_text('utf-8')
  assert json.loads(text) == json.loads(json.dumps(json_schema.schema())), 'run python docs/make_config_table.py'
  validator = jsonschema.Draft202012Validator(json.loads(text))
  valid_config = json.loads(json.dumps(jaxpost.defaults()))
  assert not list(validator.iter_errors(valid_config | {'stages': ['one'], 'one': {'optim': {'lr': 0.1}}}))
  for wrong in ({'optim': {'lr': -2}}, {'one': {'optim': {'lrr': 1}}}, {'train': {'steps': 'x'}}):
    assert list(validator.iter_errors(valid_config | wrong)), wrong


def test_held_out_rows_use_the_columns_of_the_first_source(tmp_path):
  rows = ''.join(json.dumps(dict(q=f'{n}+1=', r=str(n + 1))) + '\n' for n in range(4))
  path = tmp_path / 'rows.jsonl'
  path.write_text(rows)
  columns = 'prompt=q,completion=r'
  for columns_of_mixture in (f'{columns} + {columns}', (columns, columns)):
    data = dict(path=f'{path} + {path}', columns=columns_of_mixture)
    (config,) = config_lib.parse(tiny.run_config('', data=data, eval=dict(data=dict(path=str(path))))).values()
    assert [row['prompt'] for row in prepare.read_held_out_rows(config)] == [f'{n}+1=' for n in range(4)]
  (config,) = config_lib.parse(
    tiny.run_config('', data=dict(columns=()), eval=dict(data=dict(path=str(path))))
  ).values()
  assert prepare.read_held_out_rows(config)[0]['q'] == '0+1='
