"""The console and the config as a new user meets them: start, activities, epochs, YAML, names of other libraries."""

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
from jaxpost.errors import InputError
from jaxpost.models import lora
from jaxpost.models import model as model_lib
from jaxpost.monitor import activity, metrics, start, timeline, titles
from jaxpost.programs import compile as compile_lib
from jaxpost.stage import config as config_lib
from jaxpost.stage import epochs, json_schema, optim, prepare, resumed_run
from jaxpost.stage.schema import OptimSection
from jaxpost.storage import manifest
from jaxpost.tools import chat, completions, inference, preview_stage
from jaxpost.tools.working import working
from launch import yaml_config

CLONE = pathlib.Path(__file__).resolve().parents[1]
SMALL = dict(
  data=dict(path='generated:arithmetic:max=9,size=60'),
  train=dict(epochs=3.0, batch_size=2, row_length=64),
  model=dict(preset='tiny'),
)


def test_no_silence_while_something_lasts():
  out = io.StringIO()
  shown = activity.Activity(rich.console.Console(file=out), period_s=0.1)
  with shown('loading'):
    time.sleep(0.35)
    shown.note('loading: 2 of 3')
    time.sleep(0.15)
    with shown.compiling('update', 3, 10):
      time.sleep(0.25)
    time.sleep(0.15)
  after = out.getvalue()
  time.sleep(0.3)
  assert out.getvalue() == after, 'lines go on after the end'
  lines = after.splitlines()
  assert lines.count('loading') >= 2 and 'compiling 3/10: update' in lines and lines.count('loading: 2 of 3') >= 2
  assert activity.PERIOD_S < 5


def test_each_phase_of_a_step_is_named():
  timer = timeline.Timeline({'sample': 'devices'})
  timer.place = 'grpo 3/40'
  assert timer.doing() == 'grpo 3/40 (0 s)'
  with timer('data'):
    assert timer.doing() == 'grpo 3/40: reading data (0 s)'
    with timer('sample'):
      timer._mark -= 9
      assert timer.doing() == 'grpo 3/40: sampling (9 s)'
  assert all(titles.title(f'time/{phase}').startswith('Seconds ') for phase in metrics.PHASES)


class Clock(io.StringIO):
  """A stream that keeps when each line came, and a clock that a scenario moves: (seconds, what happens then) of each.

  In place of the event that `Activity` waits for, and of the clock of all.
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
    """Lets time pass; True once the scenario has ended."""
    end = self.now + max(seconds, 1e-3)
    while self.next <= end:
      self.now = self.next
      took = next(self.scenario, None)
      if took is None:
        return True
      self.next += took
    self.now = end
    return False


@pytest.mark.parametrize('seed', range(4))
def test_a_run_is_never_silent_for_five_seconds(seed, tmp_path, monkeypatch):
  """Whatever its phases take, off a terminal: a line with the step and its phase comes only after a silence."""
  draw = random.Random(seed)
  longest = (0.3, 1.5, 4.0, 12.0)[seed]  # seconds of a phase
  timer = timeline.Timeline({'sample': 'devices'})

  def run():
    begun = clock.now
    for step in range(1, 31):
      timer.place = f'grpo {step}/30'
      for phase in ('data', 'sample', 'score', 'update'):
        with timer(phase):
          yield draw.random() * longest
      writer.write(step, 'train', {'loss': 1.0, 'time/step': clock.now - begun})
      begun = clock.now
      yield draw.random() * longest  # in no phase

  clock = Clock(run())
  monkeypatch.setattr('time.perf_counter', lambda: clock.now)
  monkeypatch.setattr('time.monotonic', lambda: clock.now)
  timer._settle()
  console = rich.console.Console(file=clock, width=200)
  shown = activity.Activity(console)
  monkeypatch.setattr(shown, '_wake', clock)
  with metrics.MetricsWriter(tmp_path, tensorboard=False, console=console, print_every=1000) as writer:
    writer.start_stage('grpo', 30)
    with shown.following(timer.doing):
      with shown.compiling('prefill', 12, 11):  # a new shape: the phase goes on after it
        pass
      shown._thread.join()
  assert not console._render_hooks
  gaps = [after[0] - before[0] for before, after in itertools.pairwise(clock.lines)]
  assert max(gaps) <= 4.6 and clock.now - clock.lines[-1][0] <= 4.6
  said = [(line, gap) for (_, line), gap in zip(clock.lines[1:], gaps) if ' loss ' not in line]
  assert all(gap >= 4.499 for _, gap in said) and len(said) < len(clock.lines) - 1
  named = r'grpo \d+/30(: (reading data|sampling|scoring|updating))? \(\d+ s\)'
  assert all(re.fullmatch(named, line) for line, _ in said), said
  assert bool(said) == (longest > 1)


def test_a_command_is_never_silent_for_five_seconds(monkeypatch):
  """It says on stderr what it does; a compilation is named while it lasts, and what goes on after it again."""
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
  monkeypatch.setattr(working, '_printed', 97.0)  # the work before has been silent for three seconds
  with working('sampling 64 completions'):
    working._thread.join()
  gaps = [after[0] - before[0] for before, after in itertools.pairwise(clock.lines)]
  assert max(gaps) <= 4.6 and clock.now - clock.lines[-1][0] <= 4.6 and gaps[0] <= 1.6
  said = [re.sub(r' \(\d+ s\)$', '', line) for _, line in clock.lines[1:]]
  assert [name for name, _ in itertools.groupby(said)] == [
    'sampling 64 completions',
    'compiling generate',
    'sampling 64 completions',
  ]
  assert re.search(r' \(6[45] s\)$', clock.lines[-1][1]) and working.text() == ''


def test_a_chat_and_an_evaluation_say_what_they_compile(tmp_path, monkeypatch, capsys):
  """Of real programs, with a line after each tenth of a second without one; stdout has the answer alone."""
  tokenizer.load('bytes').save(tiny.folder(tmp_path / 'nano'))
  monkeypatch.setattr(working, '_period', 0.1)
  weights = inference.load(model=str(tmp_path / 'nano'))
  data = dict(path='generated:arithmetic:max=9,size=60')
  inference.evaluate_as(model=str(tmp_path / 'nano'), config=dict(data=data, eval=dict(data=data, size=4)))
  said = capsys.readouterr()
  assert said.out == '' and re.search(r'^compiling evaluate', said.err, re.MULTILINE)
  out = io.StringIO()
  chat.chat_loop({'nano': weights}, completions.Draws(max_new_tokens=4), 'data=-1', [], io.StringIO('hello\n'), out=out)
  said = capsys.readouterr()
  assert said.out == '' and re.search(r'^compiling generate', said.err, re.MULTILINE)
  assert 'compiling' not in out.getvalue()


def test_an_activity_ends_with_an_error():
  shown = activity.Activity(rich.console.Console(file=io.StringIO()), period_s=0.05)
  with pytest.raises(KeyError), shown('looking'):
    raise KeyError
  assert not shown._thread.is_alive()


def test_a_run_goes_on_when_nobody_reads_its_output():
  code = (
    'import sys; from jaxpost.monitor import activity; c = activity.Console(); c.out("a"); c.out("b")\n'
    'print("c", flush=True); print("went on", file=sys.stderr)'
  )
  read, write = os.pipe()
  os.close(read)
  done = subprocess.run([sys.executable, '-c', code], cwd=CLONE, stdout=write, stderr=-1, text=True)
  os.close(write)
  assert (done.returncode, done.stderr) == (0, 'went on\n')


def test_epochs_are_steps_of_the_data():
  (stage,) = prepare.prepare_all(SMALL)
  per_epoch = epochs.steps_of(stage.inputs, stage.data)
  assert stage.config.train.steps == round(3 * per_epoch)
  used = [info['epochs'] for _, info in (next(stage.data.stream) for _ in range(stage.config.train.steps))]
  stage.data.stream.close()
  assert used[-1] == pytest.approx(3, rel=0.1)


def two_sources(folder):
  """The path of 300 rows of 10 and 300 of 60 characters."""
  for name, length in (('short', 10), ('long', 60)):
    rows = [json.dumps(dict(prompt='a' * length, completion='b')) + '\n' for _ in range(300)]
    (folder / f'{name}.jsonl').write_text(''.join(rows))
  return f'{folder}/short.jsonl + {folder}/long.jsonl'


def test_held_out_rows_are_of_each_source(tmp_path):
  held_out = dict(data=dict(path=two_sources(tmp_path)), size=4)
  (stage,) = prepare.prepare_all(SMALL | dict(eval=held_out))
  documents = stage.data.held_out.documents
  lengths = [len(documents[n].tokens) for n in range(len(documents))]
  assert lengths[0] == lengths[1] < lengths[2] == lengths[3]


@pytest.mark.parametrize('over', [dict(overlong='drop'), dict(weights=(9.0, 1.0))])
def test_epochs_count_what_the_stream_packs(tmp_path, over):
  """Neither rows that are dropped for their length, nor sources by their size where they have weights."""
  length = 40 if 'overlong' in over else 64
  data = dict(path=two_sources(tmp_path), **over)
  train, said = dict(epochs=2.0, batch_size=2, row_length=length), []
  (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=train), said.append)
  assert said == [f'reading data: {n} of 600 documents are tokenized' for n in (256, 512)]
  used = [info['epochs'] for _, info in (next(stage.data.stream) for _ in range(stage.config.train.steps))]
  stage.data.stream.close()
  assert used[-1] == pytest.approx(2, rel=0.1)


def warned(lengths, folder, **over):
  """Returns the lines at the start of a run about data with prompts of these lengths: (rows, *warnings)."""
  rows = [json.dumps(dict(prompt='a' * n, completion='b', answer='b')) + '\n' for n in lengths]
  (folder / 'data.jsonl').write_text(''.join(rows))
  data = dict(path=f'{folder}/data.jsonl') | over.pop('data', {})
  (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=dict(steps=2, batch_size=2, row_length=64)) | over)
  stage.close()
  (facts,) = epochs.facts([stage]).values()
  shown = [line for line in preview_stage.show_stage(stage, 1) if str(line).startswith('warning: ')]
  assert shown == facts['notes']
  return facts['rows'], *facts['notes']


@pytest.mark.parametrize('least, wanted', [(2, 'rows.jsonl:3: '), (550, 'the first 512 rows are all dropped by')])
def test_inspect_of_streamed_rows_that_a_map_drops(tmp_path, least, wanted):
  """A heading names the row that is shown below it; where none of the first is left, a line says so."""
  (tmp_path / 'rows.jsonl').write_text(''.join(f'{{"prompt": "{n}", "completion": "b"}}\n' for n in range(600)))
  (tmp_path / 'few.py').write_text(f"def keep(row):\n  return row if int(row['prompt']) >= {least} else None\n")
  data = dict(path=f'{tmp_path}/rows.jsonl', map=f'{tmp_path}/few.py:keep', streaming=True)
  (stage,) = prepare.prepare_all(SMALL | dict(data=data, train=dict(steps=2, batch_size=1, row_length=64)))
  with contextlib.closing(stage):
    assert any(wanted in str(line) for line in preview_stage.show_stage(stage, 1))


def test_inspect_shows_a_reward_model_among_the_rewards(tmp_path):
  judge = tiny.folder(tmp_path / 'judge', num_labels=1)
  over = dict(reward='length?max=9,reward_model,gsm8k', reward_weights=(1.0, 0.5, 0.25), reward_model=dict(path=judge))
  (stage,) = prepare.prepare_all(tiny.grpo_config(tiny.folder(tmp_path / 'model'), **over))
  with contextlib.closing(stage):
    shown = [line for line in preview_stage.show_stage(stage, 1) if str(line).startswith('reward: ')]
  assert shown == [
    'reward: length (jaxpost.rewards.length:Length?max=9), weight 1, decides what is correct',
    f'reward: reward_model ({judge}), weight 0.5',
    'reward: gsm8k (jaxpost.rewards.math:gsm8k), weight 0.25',
  ]


def test_documents_that_are_cut_are_counted_at_the_start(tmp_path):
  most = (3, *[80] * 5)
  advice = 'raise config.train.row_length'
  assert warned(most, tmp_path) == (
    6,
    f'warning: 5 of 6 documents (83%) are longer than 64 tokens and are cut there: {advice}',
  )
  assert warned(most, tmp_path, data=dict(overlong='drop'))[1].endswith(f'are left out: {advice}')
  assert warned([3] * 199 + [80], tmp_path) == (200,)


def test_prompts_that_are_left_out_are_counted_at_the_start(tmp_path):
  rollout = dict(prompts=1, max_prompt_length=40, max_new_tokens=8)
  found = warned((3, *[80] * 5), tmp_path, algorithm='grpo', reward='exact_match', rollout=rollout, train=dict(steps=2))
  assert found == (
    1,
    'warning: 5 of 6 prompts (83%) are longer than 40 tokens and are left out: raise config.rollout.max_prompt_length',
  )
  stage = dict(steps=9, rows=1, tokens_per_epoch=0, batch='1 prompt', epochs=9.0, notes=found[1:])
  assert start.lines(start.describe() | {'stages': {'rl': stage}})[2] == f'rl: {found[1]}'


@pytest.mark.parametrize(
  ('steps', 'every', 'warns'), [(100, 0, False), (101, 0, True), (300, 99, False), (300, 300, True)]
)
def test_a_run_that_saves_nothing_before_its_end_says_so(steps, every, warns):
  train = dict(steps=steps, batch_size=2, row_length=64)
  (stage,) = prepare.prepare_all(SMALL | dict(train=train, save=dict(every=every)))
  stage.close()
  (facts,) = epochs.facts([stage]).values()
  said = (
    f'warning: nothing is saved before step {steps}, so a crash loses all of them: config.save.every=N saves every N'
  )
  assert facts['notes'] == [said] * warns


@pytest.mark.parametrize(
  'saved, evaluated, found',
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
def test_a_best_step_is_chosen_of_those_that_are_saved_and_evaluated(saved, evaluated, found):
  raw = SMALL | dict(train=dict(steps=90), save=dict(every=saved, keep_best='loss'))
  raw['eval'] = dict(every=evaluated, data=dict(path=SMALL['data']['path']))
  (stage,) = prepare.prepare_all(raw)
  stage.close()
  (facts,) = epochs.facts([stage]).values()
  advice = 'both saved and evaluated: let config.save.every equal config.eval.every'
  assert facts['notes'] == [f'warning: config.save.keep_best: {found} {advice}'] * bool(found)


def test_settings_that_change_nothing_here_are_named_at_the_start(tmp_path):
  """They are not refused: recipes are run without their held-out data, and stages share a section."""
  rollout = dict(prompts=1, max_prompt_length=40, max_new_tokens=8)
  grpo = dict(algorithm='grpo', reward='exact_match', rollout=rollout)
  over = dict(train=dict(steps=2, batch_size=4), eval=dict(every=5), log=dict(profile_from=3))
  assert warned((3, 4), tmp_path, **grpo, **over) == (
    2,
    'warning: config.train.batch_size changes nothing, rollout.prompts and rollout.group_size are the batch',
    'warning: config.log.profile_from=3 traces nothing, as there are 2 steps',
    'warning: config.eval.every changes nothing, as config.eval.data.path is empty',
  )
  assert warned((3, 4), tmp_path, **grpo, train=dict(steps=2)) == (2,)
  held_out = dict(data=dict(path=SMALL['data']['path']))
  assert warned((3, 4), tmp_path, **grpo, train=dict(steps=2), eval=held_out) == (
    2,
    'warning: nothing is evaluated: grpo has no loss of held-out rows, so set config.eval.samples',
  )
  assert warned((3, 4), tmp_path, **grpo, train=dict(steps=2), eval=held_out | dict(samples=1)) == (2,)


def test_adapters_of_rank_0_have_no_alpha():
  words = 'config.lora.alpha: a run with lora.rank=0 would ignore it; leave it 16.0'
  with pytest.raises(InputError, match=re.escape(words)):
    prepare.resolve_all(SMALL | dict(lora=dict(alpha=32.0)))
  stages = SMALL | dict(stages=('a', 'b'), lora=dict(alpha=32.0), a=dict(lora=dict(rank=2)), b={})
  assert len(prepare.resolve_all(stages)) == 2  # one of them reads it


def test_the_warm_up_of_a_critic_is_shorter_than_the_epochs():
  rollout = dict(prompts=1, max_prompt_length=40, max_new_tokens=8)
  raw = SMALL | dict(algorithm='ppo', reward='exact_match', rollout=rollout, critic=dict(warmup_steps=101))
  (stage,) = prepare.prepare_all(raw | dict(train=dict(epochs=4.0)))  # more than 100, the default of train.steps
  stage.close()
  assert stage.config.train.steps > 101
  with pytest.raises(InputError, match='critic.warmup_steps: 101 leaves the policy none of [0-9]+ steps'):
    prepare.prepare_all(raw | dict(train=dict(epochs=0.5, steps=200)))


def test_epochs_of_prompts():
  raw = SMALL | dict(
    algorithm='grpo', reward='exact_match', rollout=dict(prompts=7, max_prompt_length=40, max_new_tokens=8)
  )
  (stage,) = prepare.prepare_all(raw)
  stage.close()
  assert stage.config.train.steps == round(3 * len(stage.data.stream) / 7)
  settled = epochs.with_steps(raw, {stage.name: stage.config.train.steps})
  assert settled['train']['steps'] == stage.config.train.steps and raw['train'].get('steps') is None


def test_a_run_of_epochs_is_known_again(tmp_path):
  """Its steps are in config.json, so that nothing has to be read to see that it is done."""
  raw = {'stages': ('a',), 'a': {}, **SMALL}
  saved = epochs.with_steps(raw, {'a': 77})
  (tmp_path / 'config.json').write_text(json.dumps(saved))
  again = epochs.with_steps_of_run(raw, config_lib.parse(raw), tmp_path / 'config.json')
  assert config_lib.parse(again)['a'].train.steps == 77
  other = raw | {'train': raw['train'] | {'epochs': 4.0}}
  again = epochs.with_steps_of_run(other, config_lib.parse(other), tmp_path / 'config.json')
  assert config_lib.parse(again)['a'].train.steps == 100


def test_a_run_of_epochs_goes_on_by_steps(tmp_path):
  begun = tiny.merged(SMALL, dict(train=dict(steps=45)))
  (tmp_path / 'config.json').write_text(json.dumps(begun))
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
def test_a_run_that_ran_out_of_memory_goes_on_with_less(tmp_path, change, refused):
  begun = tiny.merged(SMALL, dict(train=dict(steps=45, epochs=0.0)))
  (tmp_path / 'config.json').write_text(json.dumps(begun))
  saved = tmp_path / 'checkpoints/sft/10' / manifest.NAME
  saved.parent.mkdir(parents=True)
  saved.touch()
  configs = config_lib.parse(tiny.merged(begun, change))
  with contextlib.nullcontext() if not refused else pytest.raises(InputError, match=f'config.{refused} of sft differs'):
    resumed_run.check_config(tmp_path, configs, rich.console.Console())


def test_what_a_run_starts_with(tmp_path):
  facts = start.describe() | {
    'seed': 3,
    'stages': {'sft': dict(steps=9, rows=1200, tokens_per_epoch=5e4, batch='2 rows', epochs=1.5)},
  }
  start.keep(tmp_path, facts)
  start.keep(tmp_path, facts)
  assert [row['seed'] for row in metrics.read_growing(tmp_path / start.FILE)] == [3, 3]
  many = facts | {'stages': {'dpo': facts['stages']['sft'] | {'epochs': 6400.0}}}
  assert start.lines(many)[1].endswith(', 6400 epochs (config.train.epochs sets it)')
  few = facts | {'stages': {'sft': facts['stages']['sft'] | dict(steps=1, rows=3, epochs=8.0)}}
  said = 'sft: 1 step of 2 rows, 3 rows (less than a batch, which repeats them), about 50k tokens an epoch, 8 epochs'
  assert start.lines(few)[1] == said
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


def test_a_run_says_what_it_is_before_it_reads_data(tmp_path, monkeypatch):
  def read(*_):
    (line,) = out.getvalue().splitlines()
    assert line.startswith(f'jaxpost {jaxpost.__version__}') and line.endswith(f', seed 5, workdir {tmp_path}/run')
    assert console._render_hooks
    raise InputError('no data')

  out = io.StringIO()
  console = rich.console.Console(file=out, width=400)
  monkeypatch.setattr('jaxpost.stages.prepare.prepare_all', read)
  with pytest.raises(InputError, match='no data'):
    stages.run(tiny.merged(SMALL, dict(seed=5, model=dict(dtype='float32'))), tmp_path / 'run', console)
  assert not console._render_hooks and not (tmp_path / 'run').exists()


def test_max_samples_of_a_mixture():
  rows = sources.read_sources('generated:arithmetic:max=9,size=40 + generated:arithmetic:max=9,size=20')
  first = sources.first(rows, len(rows) // 2)
  assert len(first) == len(rows) // 2 == sum(first.sizes) and all(first.sizes)
  starts = [0, rows.sizes[0]]
  picked = [starts[part] + n for part, size in enumerate(first.sizes) for n in range(size)]
  assert [first[i] for i in range(len(first))] == [rows[i] for i in picked]
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
def test_peft_names_of_targets(theirs, ours):
  assert lora.target_pattern(theirs, model_lib.build(tiny.config()).table, 2) == ours


def test_warmup_ratio():
  assert optim.warmup_steps(OptimSection(warmup_ratio=0.03), 1000) == 30
  assert optim.warmup_steps(OptimSection(warmup_steps=7), 1000) == 7
  with pytest.raises(InputError, match='warmup_ratio'):
    optim.check(OptimSection(warmup_ratio=0.1, warmup_steps=7))


def test_yaml_config(tmp_path):
  path = tmp_path / 'my.yaml'
  path.write_text('algorithm: sft\noptim: {lr: 2e-5, name: muon}\nstages: [one]\none: {train: {steps: 3}}\n')
  (stage,) = config_lib.parse(prepare.as_dict(yaml_config.get_config(path))).values()
  assert stage.optim.lr == 2e-5 and stage.optim.name == 'muon' and stage.train.steps == 3
  path.write_text('a: [1\n')
  with pytest.raises(InputError, match='my.yaml'):
    yaml_config.get_config(path)


def test_numbers_of_yaml_in_quotes_are_text(tmp_path):
  path = tmp_path / 'my.yaml'
  numbers = '[12e5, 1E-5, -.5e3, 1.5e+2, 2.e1, 7]'
  path.write_text(f'log: {{run_name: "12e5"}}\nuser: {{numbers: {numbers}, texts: ["1e5", 1e5.py, e5, +1e]}}\n')
  found = prepare.as_dict(yaml_config.get_config(path))
  assert found['log']['run_name'] == '12e5' and found['user']['numbers'] == (12e5, 1e-5, -500.0, 150.0, 20.0, 7)
  assert found['user']['texts'] == ('1e5', '1e5.py', 'e5', '+1e')


TYPED = """
log: {run_name: 12e5, tags: [on, 0o17, 2026-11-27, 1.50, 1_000]}
model: {path: 007}
data: {path: [2024-01-01, 12:30], shuffle: off, weights: [1, 5e-1]}
train: {steps: 0o17, epochs: 1e1}
stages: [no]
no: {model: {path: 1e5}, optim: {lr: 1e-5}, seed: +3}
reward: yes
user: {day: 2026-11-27, yes: on, n: 0x1F, share: .5}
"""


def test_values_of_yaml_are_of_the_type_of_their_field(tmp_path):
  """YAML 1.1 reads `on` as True, 12:30 as 750, 007 as 7, and a date as an object that no JSON holds."""
  path = tmp_path / 'my.yaml'
  path.write_text(TYPED)
  found = prepare.as_dict(yaml_config.get_config(path))
  (stage,) = config_lib.parse(found).values()
  assert (stage.log.run_name, stage.model.path, stage.reward) == ('12e5', '1e5', 'yes')
  assert stage.log.tags == ('on', '0o17', '2026-11-27', '1.50', '1_000')
  assert stage.data.path == ('2024-01-01', '12:30') and stage.data.weights == (1.0, 0.5) and not stage.data.shuffle
  assert (stage.train.steps, stage.train.epochs, stage.optim.lr, stage.seed) == (15, 10.0, 1e-5, 3)
  assert stage.user == {'day': '2026-11-27', 'yes': True, 'n': 31, 'share': 0.5}
  blocks = 'base: &a {run_name: off}\nlog: {<<: *a, tags: &t [1]}\nuser: {<<: [*a], tags: *t}\n'
  path.write_text(blocks)
  found = yaml_config.get_config(path)
  assert found.log.run_name == 'off' and found.log.tags == ('1',) and found.user.tags == (1,)


@pytest.mark.parametrize(
  'text, wanted',
  [
    ('train: {steps: 017}', "config.train.steps: want int, got '017'"),
    ('train: {steps: 12:30}', "config.train.steps: want int, got '12:30'"),
    ('train: {steps: 1e3}', 'config.train.steps: want int, got 1000.0'),
    ('optim: {lr: 1:30.5}', "config.optim.lr: want float, got '1:30.5'"),
    ('data: {shuffle: 2026-11-27}', "config.data.shuffle: want bool, got '2026-11-27'"),
    ('model: {path: }', 'config.model.path: want str, got None'),
  ],
)
def test_values_of_yaml_that_are_not_of_the_type_of_their_field(tmp_path, text, wanted):
  path = tmp_path / 'my.yaml'
  path.write_text(text)
  with pytest.raises(InputError, match=re.escape(wanted)):
    config_lib.parse(prepare.as_dict(yaml_config.get_config(path)))


def test_keys_that_stand_twice_in_yaml_are_refused(tmp_path):
  """A YAML parser would keep the second of two blocks and drop the first silently."""
  path = tmp_path / 'my.yaml'
  twice = ('optim: {lr: 1.0}\nseed: 1\noptim: {b1: 0.9}\n', 3), ('data: {path: a, path: b}\n', 1)
  for text, line in twice:
    path.write_text(text)
    with pytest.raises(InputError, match=f'my.yaml:{line}: (optim|path) is also in line 1; keep one'):
      yaml_config.get_config(path)
  path.write_text('optim: &a {lr: 1.0}\nsft: {optim: &b {<<: *a, lr: 2.0}}\nrl: {<<: *b}\n')
  assert yaml_config.get_config(path).sft.optim.lr == 2.0


def run(*words, env=None):
  return subprocess.run(
    [sys.executable, *words], cwd=CLONE, env={**os.environ, **(env or {})}, text=True, capture_output=True, timeout=200
  )


def test_inspect_reads_yaml_and_checks_as_training_does(tmp_path):
  (tmp_path / 'my.yaml').write_text('data: {path: "generated:arithmetic:max=9,size=30"}\nsave: {keep_best: loss}\n')
  done = run('-m', 'launch.inspect', f'--config={tmp_path}/my.yaml', '--rows=1')
  assert done.returncode == 2 and 'config.save.keep_best' in done.stderr, done.stderr
  done = run('-m', 'launch.inspect', f'--config={tmp_path}/my.yml')
  assert done.returncode == 2 and 'my.yaml?' in done.stderr, done.stderr


def test_version():
  done = run('-m', 'launch.main', '--version')
  assert done.stdout.strip() == f'jaxpost {jaxpost.__version__}'


def test_no_advice_of_transformers_without_torch():
  """transformers tells how to get torch when it is imported; its absence is simulated here."""
  code = (
    'import importlib.util as u, sys; find = u.find_spec\n'
    'u.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)\n'
    '{}import transformers; transformers.AutoTokenizer'
  )
  plain = {'TRANSFORMERS_NO_ADVISORY_WARNINGS': '', 'TRANSFORMERS_VERBOSITY': 'warning'}
  advised = run('-c', code.format(''), env=plain)
  unset = 'import os; del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]; '
  ours = run('-c', code.format(unset + 'import jaxpost.data.tokenizer; '), env=plain)
  assert 'PyTorch' in advised.stdout + advised.stderr, 'transformers advises no more; this test and the variable can go'
  assert 'PyTorch' not in ours.stdout + ours.stderr and ours.returncode == 0, ours.stderr


def test_schema_for_editors():
  import jsonschema

  text = (CLONE / 'docs/config_schema.json').read_text('utf-8')
  assert json.loads(text) == json.loads(json.dumps(json_schema.schema())), 'run python docs/make_config_table.py'
  check = jsonschema.Draft202012Validator(json.loads(text))
  plain = json.loads(json.dumps(jaxpost.defaults()))
  assert not list(check.iter_errors(plain | {'stages': ['one'], 'one': {'optim': {'lr': 0.1}}}))
  for wrong in ({'optim': {'lr': -2}}, {'one': {'optim': {'lrr': 1}}}, {'train': {'steps': 'x'}}):
    assert list(check.iter_errors(plain | wrong)), wrong


def test_held_out_data_has_the_columns_of_the_first_source(tmp_path):
  rows = ''.join(json.dumps(dict(q=f'{n}+1=', r=str(n + 1))) + '\n' for n in range(4))
  path = tmp_path / 'rows.jsonl'
  path.write_text(rows)
  columns = 'prompt=q,completion=r'
  for given in (f'{columns} + {columns}', (columns, columns)):
    data = dict(path=f'{path} + {path}', columns=given)
    (config,) = config_lib.parse(tiny.run_config('', data=data, eval=dict(data=dict(path=str(path))))).values()
    assert [row['prompt'] for row in prepare.read_held_out_rows(config)] == [f'{n}+1=' for n in range(4)]
  (config,) = config_lib.parse(
    tiny.run_config('', data=dict(columns=()), eval=dict(data=dict(path=str(path))))
  ).values()
  assert prepare.read_held_out_rows(config)[0]['q'] == '0+1='
