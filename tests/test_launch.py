"""Tests of the commands that use a run (export, sample, inspect, evaluate), and flags of plan, report, bench and chat.

All of them use one shrunk quickstart run. Commands run in this process, by the same
entry point as `jaxpost VERB`, so that JAX starts only once.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import rich.console
import safetensors.numpy
import tiny
from absl import app, flags

import jaxpost
from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export
from jaxpost.monitor import metrics
from jaxpost.stage import algorithms, schema
from jaxpost.stage import config as config_lib
from jaxpost.storage import manifest
from jaxpost.tools import best_step, completions, inference, score_dataset

CLONE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CLONE))  # a plain `pytest` does not put the clone on the path

from configs import quickstart  # noqa: E402
from launch import main as command  # noqa: E402

QUICKSTART = f'--config={CLONE / "configs" / "quickstart.py"}'
STORY = 'stories260K/hf'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The folder of a finished run of two stages."""
  config = quickstart.get_config()
  config.eval.update(size=4, samples=2)
  config.model.dtype = 'float32'
  task = config.sft.data.path.replace('size=6000', 'size=64')
  for stage in (config.sft, config.grpo):
    stage.data.path = task
    stage.train.steps = 2
  config.sft.train.update(batch_size=2, row_length=64)
  config.sft.save = dict(every=1)
  # Few shapes, because most of the time is compilation.
  config.rollout.update(max_new_tokens=4, max_prompt_length=32, slots=4)
  config.grpo.rollout.update(prompts=2, group_size=2)
  config.grpo.rl.kl_coef = 0.0
  root = tmp_path_factory.mktemp('launch')
  # Any two completions get different rewards.
  (root / 'grade.py').write_text(
    'def grade(completion_ids, **_):\n'
    '  return [sum(n * i for n, i in enumerate(c, 1)) % 97 / 97 for c in'
    ' completion_ids]\n'
  )
  config.reward = f'{root}/grade.py:grade'
  folder = root / 'run'
  stages.run(config, folder, rich.console.Console(quiet=True))
  return folder


@pytest.fixture
def call(monkeypatch, capfd):
  """Returns a function call(verb, *flags) -> (exit code, stdout, stderr) that runs a command in this process."""

  def call(verb, *args):
    sys.modules.pop(f'launch.{verb}', None)  # its import defines the flags again
    monkeypatch.setattr(sys, 'argv', [])  # is restored at the end of the test
    capfd.readouterr()
    with own_flags(), pytest.raises(SystemExit) as exit_info:
      command.main([verb, *map(str, args)])
    out, err = capfd.readouterr()
    return exit_info.value.code or 0, out, err

  return call


@contextlib.contextmanager
def own_flags():
  """Removes the flags of other commands inside of the block, as absl has one set of flags per process."""
  app.define_help_flags()

  def remove_command_flags():
    module_of = flags.FLAGS.find_module_defining_flag
    command_flags = {
      name: flags.FLAGS[name]
      for name in flags.FLAGS
      if name.split('.')[0] == 'config' or (module_of(name, 'launch.').startswith('launch.'))
    }
    for name in command_flags:
      delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
    return command_flags

  saved = remove_command_flags()
  try:
    yield
  finally:
    remove_command_flags()
    for name, flag in saved.items():
      flags.FLAGS[name] = flag


def assert_refused(result, code, *words):
  """Asserts that the command ended with this exit code and one line of error that has these words."""
  assert result[0] == code, result
  assert not result[1]
  lines = [x for x in result[2].splitlines() if x.startswith('jaxpost: ')]
  assert len(lines) == 1 and 'Traceback' not in result[2], result[2]
  for word in words:
    assert word in lines[0], lines[0]


def copy_with_other_mesh(run, folder, stage, **changes):
  """Copies the config and the checkpoints of a stage into `folder`, with a mesh of more devices than there are here."""
  shutil.copytree(run / 'checkpoints' / stage, folder / 'checkpoints' / stage)
  config = json.loads((run / 'config.json').read_text())
  config['mesh'] = dict(train='fsdp=64', rollout='data=64')
  (folder / 'config.json').write_text(json.dumps(config | changes))
  return folder


def weights(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


# ------------------------------------------------------------------- export


def test_export_expands_home_for_its_checks_and_for_writing(call, run, tmp_path, monkeypatch):
  """No shell expands ~ inside of a word, so the check of the folder and the writer must expand it in the same way."""
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'models').mkdir()
  (tmp_path / 'models' / 'mine.txt').write_text('years of work')
  assert_refused(call('export', f'--run={run}', '--out=~/models'), 2, f'{tmp_path}/models', 'is no export')
  assert (tmp_path / 'models' / 'mine.txt').read_text() == 'years of work'
  with pytest.raises(InputError, match='is no export'):
    hf_export.check_target('~/models')  # from Python
  code, _, err = call('export', f'--run={run}', '--out=~/new')
  assert code == 0, err
  assert 'how it was made' in (tmp_path / 'new' / 'README.md').read_text()


def test_export_command_writes_the_same_files_as_the_run(run, call, tmp_path):
  out = tmp_path / 'out'
  code, stdout, stderr = call('export', f'--run={run}', f'--out={out}')
  assert code == 0 and stdout == f'{out}\n'
  assert 'step 2 of stage grpo' in stderr
  exported, expected = weights(out), weights(run / 'export')
  assert exported.keys() == expected.keys()
  assert all(np.array_equal(exported[k], expected[k]) for k in expected)
  assert {f.name for f in out.iterdir()} == {f.name for f in (run / 'export').iterdir()}


def test_export_of_a_stage_and_a_step_loads_in_transformers(run, call, tmp_path):
  torch = pytest.importorskip('torch')
  import transformers

  out = tmp_path / 'out'
  copied_run = copy_with_other_mesh(
    run, tmp_path / 'bare', 'sft', reward='./gone.py:reward', data=dict(map='./gone.py:map')
  )
  code, _, stderr = call('export', f'--run={copied_run}', '--stage=sft', '--step=1', f'--out={out}')
  assert code == 0 and 'step 1 of stage sft' in stderr
  last_weights = weights(run / 'export')
  assert any(not np.array_equal(v, last_weights[k]) for k, v in weights(out).items())
  network = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  ids = np.array([tokenizer('17+25=')['input_ids']])
  with torch.no_grad():
    expected = network(torch.tensor(ids)).logits.numpy()
  model = tiny.model_lib.build(hf.read_config(out))
  params = hf.load_params(out, model, model.shardings(tiny.one_device()), 'float32')
  actual = tiny.logits(model, params, ids)
  assert tiny.largest(actual - expected) <= 3e-5 * tiny.largest(expected)


@pytest.mark.parametrize(
  'flag, code, words',
  [
    ('--run=/no/run', 2, ('/no/run', '--workdir')),
    ('--run={run}/export', 2, ('not the config of a run', '--model')),
    ('--stage=dpo', 2, ("'dpo'", 'sft, grpo')),
    ('--step=7', 3, ('step 7 is not there', 'there is 2')),
    ('--step=x', 2, ('step', 'x')),
    ('--out={run}', 2, ('no export',)),
    ('--nonsense', 2, ('nonsense',)),
  ],
)
def test_export_refuses(run, call, tmp_path, flag, code, words):
  arguments = {'--run': run, '--out': tmp_path / 'out'}
  name, _, value = flag.format(run=run).partition('=')
  arguments[name] = value
  result = call('export', *(f'{k}={v}' if v else k for k, v in arguments.items()))
  assert_refused(result, code, *words)
  assert not (tmp_path / 'out').exists()


def test_export_skips_damaged_checkpoints_with_a_warning(run, call, tmp_path):
  copied_run = copy_with_other_mesh(run, tmp_path / 'run', 'sft')
  args = f'--run={copied_run}', f'--out={tmp_path / "out"}'

  def damage(step):
    for file in (copied_run / f'checkpoints/sft/{step}/state').rglob('*'):
      if file.is_file() and file.stat().st_size > 1000:
        data = bytearray(file.read_bytes())
        data[500] ^= 1
        file.write_bytes(data)

  damage(2)
  code, _, err = call('export', *args)
  assert code == 0 and 'using step 1 of' in err and '2 is damaged' in err
  assert_refused(call('export', *args, '--step=2'), 3, 'no usable', 'step 2')
  damage(1)
  assert_refused(call('export', *args), 3, 'no usable checkpoint')
  shutil.rmtree(copied_run / 'checkpoints')
  assert_refused(call('export', *args), 3, 'no checkpoint')


# ------------------------------------------------------------------- sample


def test_greedy_sample_matches_golden_text_of_stories260k(shared_data, call, tmp_path):
  story = json.loads((shared_data('stories260K') / 'golden_greedy.json').read_text())
  # A space that begins a completion is kept.
  start, continuation = story['greedy_text'][:11], story['greedy_text'][11:]
  assert continuation.startswith(' ')
  model = tiny.after_bos(shared_data(STORY), tmp_path / 'model')
  args = (f'--model={model}', '--temperature=0', '--nochat', '--max_new_tokens=16')
  prompts = '--prompt=', f'--prompt={start}'
  code, out, err = call('sample', *args, *prompts)
  assert code == 0 and '2 of 2 cut' in err
  for line in out.splitlines():
    assert len(line) > 25 and story['greedy_text'].startswith(line)
  code, out, _ = call('sample', *args, *prompts, '--json')
  from_nothing, row = map(json.loads, out.splitlines())
  assert continuation.startswith(row['completion'])
  assert row['tokens'] == 16 and not row['finished'] and row['prompt'] == start
  assert from_nothing['prompt'] == ''
  (tmp_path / 'prompts.txt').write_text(f'{start}\n')
  code, out, _ = call('sample', *args, f'--file={tmp_path}/prompts.txt')
  assert code == 0 and story['greedy_text'].startswith(out.strip())
  (tmp_path / 'prompts.txt').write_text('a\nb\n\nc\n')  # blank lines separate prompts
  code, out, _ = call('sample', *args, '--json', f'--file={tmp_path}/prompts.txt')
  assert [json.loads(line)['prompt'] for line in out.splitlines()] == ['a\nb', 'c']
  assert_refused(call('sample', *args, '--chat', '--prompt=x'), 2, 'chat template')


def test_sample_draws_the_same_completions_from_a_run_and_its_export(run, call, tmp_path):
  prompt_file = tmp_path / 'prompts.jsonl'
  prompt_file.write_text('{"prompt": "1+1="}\n{"messages": [{"role": "user", "content": "2+2="}]}\n')
  args = ('--json', '--n=2', '--max_new_tokens=4', f'--file={prompt_file}', '--prompt=17+25=')
  code, out, err = call('sample', f'--run={run}', *args)
  assert code == 0
  rows = [json.loads(line) for line in out.splitlines()]
  questions = ['1+1=', '2+2=', '17+25=']
  assert [(r['prompt'] if r['prompt'] == '1+1=' else r['prompt'][-1]['content'], r['sample']) for r in rows] == [
    (prompt, n) for prompt in questions for n in range(2)
  ]
  assert "--prompt: is a user's message" in err and f'{prompt_file}: its plain text is continued' in err
  assert rows[0]['completion'] != rows[1]['completion']
  assert all(r['logprob'] < 0 and 1 <= r['tokens'] <= 4 for r in rows)
  folder = f'--model={run / "export"}'
  rows_of_export = [json.loads(x) for x in call('sample', folder, *args)[1].splitlines()]
  assert [r['completion'] for r in rows_of_export] == [r['completion'] for r in rows]
  code, out, err = call('sample', folder, *args, '--chat')
  assert [json.loads(x)['prompt'][-1]['content'] for x in out.splitlines()[::2]] == questions and 'prompt' not in err
  other_seed = call('sample', folder, *args, '--seed=1')[1]
  assert [json.loads(x)['completion'] for x in other_seed.splitlines()] != [r['completion'] for r in rows]


@pytest.mark.parametrize(
  'args, words',
  [
    (('--run=a', '--model=b', '--prompt=x'), ('one of --run',)),
    (('--model=/no/model', '--prompt=x'), ('/no/model', 'does not exist')),
    (('--model=b',), ('--prompt=', '--prompts=')),
    (('--model=b', '--prompt=x', '--top_p=2'), ('top_p',)),
  ],
)
def test_sample_refuses(call, args, words):
  assert_refused(call('sample', *args), 2, *words)


# ------------------------------------------------------------------ inspect


def test_inspect_shows_rows_prompts_and_rewards(call):
  code, out, _ = call(
    'inspect', QUICKSTART, '--rows=2', '--config.sft.data.path=generated:arithmetic:max=9,size=40,correct=1'
  )
  assert code == 0
  sft, grpo = out.split('grpo: grpo, 120 steps')
  assert '631,872 parameters' in sft and '40 rows of' in sft
  # Without colors, the trained answer is between marks.
  assert sft.count('<|im_start|>assistant\n«') == sft.count('<|im_end|>»') == 2
  assert ' 2 trained' in sft and 'rows of 256' in sft and '257 117' in sft
  assert grpo.count('<|im_start|>assistant\n') == 2
  assert grpo.count("  answer = '") == 2 and 'prompts of 23 to 25' in grpo
  for part in (sft, grpo):
    assert 'exact_match (jaxpost.rewards.math:exact_match), weight 1, decides what is correct' in part


@pytest.mark.parametrize(
  'args, words',
  [
    ((QUICKSTART, '--stage=dpo'), ("'dpo'", 'sft, grpo')),
    ((QUICKSTART, '--config.reward=./no.py:fn'), ('no.py',)),
    ((QUICKSTART, '--config.model.path=/no/model'), ('/no/model',)),
    ((QUICKSTART, '--config.sft.data.path=no.jsonl'), ('no.jsonl',)),
    (('--config=/no/file.py',), ('/no/file.py',)),
    ((), ('config',)),
  ],
)
def test_inspect_refuses(call, args, words):
  assert_refused(call('inspect', *args), 2, *words)


def test_inspect_works_from_an_installed_package(tmp_path):
  """Files are laid out as in the wheel, away from the clone. The config is a user's own."""
  site, workdir = tmp_path / 'site', tmp_path / 'away'
  no_caches = shutil.ignore_patterns('__pycache__')
  shutil.copytree(CLONE / 'jaxpost', site / 'jaxpost', ignore=no_caches)
  for name in ('launch', 'configs'):
    shutil.copytree(CLONE / name, site / 'jaxpost' / name, ignore=no_caches)
  workdir.mkdir()
  (workdir / 'train.jsonl').write_text('{"prompt": "a [b]", "completion": "c"}\n')
  (workdir / 'my.py').write_text(
    'import ml_collections\nfrom jaxpost.stage.config import defaults\n'
    'def get_config():\n  config = ml_collections.ConfigDict(defaults())\n'
    "  config.data.path = 'train.jsonl'\n  return config\n"
  )
  result = subprocess.run(
    [sys.executable, '-c', 'from jaxpost.launch import main; main.main()', 'inspect', '--config=my.py'],
    cwd=workdir,
    text=True,
    capture_output=True,
    env=os.environ | {'PYTHONPATH': str(site)},
  )
  assert result.returncode == 0, result.stderr
  assert 'train.jsonl:1: 7 tokens' in result.stdout and 'a [b]«c<|im_end|>»' in result.stdout


# ----------------------------------------------------------------- evaluate


def last_eval(run, stage, split='eval'):
  rows = map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
  return [r for r in rows if (r['stage'], r['split']) == (stage, split)][-1]


@pytest.mark.parametrize('stage', ['sft', 'grpo'])
def test_evaluate_reproduces_the_last_evaluation_of_training(run, call, tmp_path, stage):
  copied_run = copy_with_other_mesh(run, tmp_path / 'there', stage)
  code, out, _ = call('evaluate', f'--run={copied_run}')
  assert code == 0
  actual, expected = json.loads(out), last_eval(run, stage)
  assert (actual['stage'], actual['step'], actual['rows']) == (stage, 2, 4)
  assert actual['weights'] == str(copied_run) and 'split=test' in actual['data']
  names = {k for k in expected if not k.startswith('time/')} - {'stage', 'split', 'step'}
  assert {'pass@1', 'pass@2'} <= names and ('loss' in names) == (stage == 'sft')
  for name in names:
    assert actual[name] == pytest.approx(expected[name], rel=1e-5), name


def test_evaluate_accepts_other_data_and_a_model_folder(run, call, tmp_path):
  data = tmp_path / 'held_out.jsonl'
  data.write_text('{"prompt": "1+1=", "completion": "2", "answer": "2"}\n' * 3)
  args = f'--data={data}', '--samples=0'
  code, out, _ = call('evaluate', f'--run={run}', '--stage=sft', *args)
  assert code == 0
  of_run = json.loads(out)
  assert of_run['rows'] == 3 and of_run['data'] == str(data)
  assert 'pass@1' not in of_run
  code, out, _ = call(
    'evaluate', f'--model={run / "export"}', '--stage=sft', QUICKSTART, '--config.model.dtype=float32', *args
  )
  assert code == 0
  of_folder = json.loads(out)
  assert of_folder['loss'] != of_run['loss']
  assert of_folder['loss'] == pytest.approx(of_run['loss'], rel=0.2)


def test_evaluate_with_a_reward_samples_as_the_run_does_unless_flags_say_else(run, call, tmp_path):
  """The run has 4 tokens a completion and 2 samples; --n and --samples are one flag."""
  data = tmp_path / 'data.jsonl'
  data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
  args = f'--run={run}', f'--data={data}', '--reward=exact_match'
  code, out, err = call('evaluate', *args)
  assert code == 0, err
  assert 'n=2, seed=0, max_new_tokens=4, temperature=1.0' in err
  figures = json.loads(out)
  assert {'pass@2', 'maj@2'} <= set(figures) and figures['completions/mean_length'] <= 4
  code, out, err = call('evaluate', *args, '--samples=1', '--max_new_tokens=2', '--temperature=0')
  assert code == 0 and 'n=1, seed=0, max_new_tokens=2, temperature=0.0' in err
  assert 'pass@2' not in out and json.loads(out)['completions/mean_length'] <= 2
  assert_refused(call('evaluate', *args, '--n=0'), 2, '--n: 0 completions')
  assert_refused(call('evaluate', *args, '--reward_weights=x'), 2, '--reward_weights: x is not a list of numbers')
  assert_refused(call('evaluate', *args, '--reward_weights=(1,2)'), 2, 'reward_weights: 2 weights for 1 rewards')


def test_best_step_is_that_of_keep_best(run, call, monkeypatch, tmp_path):
  """By the metrics in the manifests of finished steps; the newest is used by default, with a line on the best."""
  for step, value in ((10, 0.5), (20, 0.75), (30, 0.75), (40, 0.25)):
    manifest.write(tmp_path / str(step), manifest.Manifest(step, {}, {'pass@1': value}, {}))
  (tmp_path / '50').mkdir()  # unfinished
  save = schema.SaveSection(keep_best='pass@1')
  assert best_step.find(tmp_path, save) == 30
  assert best_step.find(tmp_path, schema.SaveSection(keep_best='pass@1', best_mode='min')) == 40
  assert 'step 30 has the best pass@1, 0.75' in best_step.line(tmp_path, save, 40)
  assert not best_step.line(tmp_path, save, 30) and not best_step.line(tmp_path, schema.SaveSection(), 40)
  with pytest.raises(InputError, match='no checkpoint was evaluated by loss'):
    best_step.find(tmp_path, schema.SaveSection(keep_best='loss'))
  refused = call('export', f'--run={run}', f'--out={tmp_path}/out', '--step=best')
  assert_refused(refused, 2, '--step=best', 'no config.save.keep_best')
  configs = inference.run_config(run)
  configs = {
    k: dataclasses.replace(c, save=dataclasses.replace(c.save, keep_best='pass@1')) for k, c in configs.items()
  }
  monkeypatch.setattr(inference, 'run_config', lambda run: configs)
  assert inference.from_run(run, 'sft', 'best').step == 2


def test_the_summary_of_a_run_has_its_best_step_and_the_warnings_of_its_start(tmp_path):
  over = dict(
    train=dict(steps=4),
    optim=dict(lr=3.0),  # the loss rises
    save=dict(every=2, keep=1, keep_best='loss', best_mode='min'),
    eval=dict(every=2, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=8')),
    log=dict(profile_from=9),
  )
  summary = jaxpost.run(tiny.run_config('', **over), tmp_path)
  losses = {r['step']: r['loss'] for r in metrics.read_rows(tmp_path / 'metrics.jsonl') if r['split'] == 'eval'}
  weights = inference.load(run=str(tmp_path), step='best')
  assert summary['best_step/sft'] == weights.step == min((2, 4), key=losses.get)
  assert summary['best_loss/sft'] == losses[weights.step]
  (warning,) = summary['warnings']
  assert warning['step'] == 0 and warning['text'].startswith('config.log.profile_from=9 traces nothing')


def test_evaluate_takes_the_weights_of_the_run_where_the_rewards_are_its_own():
  (config,) = config_lib.parse(
    dict(
      algorithm='grpo',
      reward='exact_match,overlong?max=9',
      reward_weights=(1.0, 0.5),
      rl=dict(correct_by='overlong'),
      rollout=dict(max_new_tokens=9, top_p=0.9, stop_strings=('x',)),
      eval=dict(temperature=0.0, pass_reward=2.0),
    )
  ).values()
  inputs = types.SimpleNamespace(config=config, algorithm=algorithms.load_algorithm('grpo'))

  def as_in_run(rewards, *given):
    draws = completions.Draws(max_new_tokens=512, n=8)
    return score_dataset.as_in_run(inputs, rewards, draws, score_dataset.Grading(), given)

  draws, grading = as_in_run('overlong?max=9, exact_match')
  assert draws == completions.Draws(1, 0, 9, 0.0, top_p=0.9, stop_strings=('x',))
  assert grading == score_dataset.Grading(2.0, 'overlong', (0.5, 1.0))
  draws, grading = as_in_run('exact_match', 'n', 'max_new_tokens', 'pass_reward')
  assert (draws.n, draws.max_new_tokens, draws.temperature) == (8, 512, 0.0)
  assert grading == score_dataset.Grading(1.0, '', (1.0,))
  assert as_in_run('gsm8k', 'pass_reward')[1] == score_dataset.Grading()


@pytest.mark.parametrize(
  'args, words',
  [
    (('--model=x',), ('--model goes with --data and one of --reward and --suite, or else with --config=FILE',)),
    (('--model=x', '--run={run}'), ('give one of --run=DIR and --model=FOLDER',)),
    (('--run=/no/run',), ('/no/run',)),
    (('--run={run}', '--samples=0'), ('config.eval.samples',)),
    (('--run={run}', '--data=no.jsonl'), ('no.jsonl',)),
  ],
)
def test_evaluate_refuses(run, call, args, words):
  assert_refused(call('evaluate', *(a.format(run=run) for a in args)), 2, *words)


# ------------------------------------------------- flags that would do nothing

CPU, FITS = '--topology=cpu', ('--fits', '--model=qwen3_0_6b')


@pytest.mark.parametrize(
  'verb, flag, given, when',
  [
    *(
      ('evaluate', flag, ('--model=x', '--data=x', f'--suite={suite}'), f'with --suite={suite}')
      for suite in ('mmlu', 'choices')
      for flag in ('--n=2', '--temperature=0', '--out=x')
    ),
    ('sample', '--top_logprobs=2', ('--run=x', '--prompt=x'), 'without --out'),
    ('sample', '--top_logprobs=2', ('--run=x', '--chat'), 'without --out'),
    ('sample', '--json', ('--run=x', '--prompt=x', '--out=x'), 'with --out'),
    ('export', '--public', ('--run=x', '--out=x'), 'without --push'),
    *(
      ('plan', flag, FITS, 'with --fits')
      for flag in (CPU, '--search', '--stage=x', '--programs=update', '--slices=2', QUICKSTART)
    ),
    ('plan', '--programs=update', (QUICKSTART, CPU, '--search'), 'with --search'),
    ('bench', '--shape=s', ('accelerator', '--out=x'), 'with accelerator'),
    *(('plan', flag, (QUICKSTART, CPU), 'without --fits') for flag in ('--model=x', '--devices=T4')),
  ],
)
def test_flags_that_would_do_nothing_are_refused(call, verb, flag, given, when):
  assert_refused(call(verb, *given, flag), 2, f'{flag.partition("=")[0]} does nothing {when}', 'leave it out')


@pytest.mark.parametrize('price', ['-1', 'nan', 'inf', 'x', 'H100=1'])
def test_price_that_is_no_number_from_0_is_refused(call, price):
  assert_refused(call('plan', QUICKSTART, CPU, f'--price={price}'), 2, f'--price: {price!r}: write US dollars')


# --------------------------------------------------------------------- help


@pytest.mark.parametrize('verb', ['export', 'sample', 'inspect', 'evaluate'])
def test_help_has_examples(call, verb):
  code, out, _ = call(verb, '--help')
  assert code == 0 and out.count(f'python -m launch.{verb} --') >= 2
  assert '  --step' in out or verb == 'inspect'


def test_plan_fits_refuses_unknown_shape_and_prints_no_folder_placeholder(call):
  assert_refused(
    call('plan', '--fits', '--model=qwen3_80b'), 2, "--model: no shape is called 'qwen3_80b'; did you mean"
  )
  code, out, _ = call('plan', '--fits', '--model=qwen3_8b', '--devices=T4', '--methods=sft')
  assert code == 0 and 'NO' in out and 'FOLDER' not in out


def test_plan_fits_quotes_the_folder_of_a_run(run, call, tmp_path):
  """The shape is that of the run's last stage, and the shell reads a folder with spaces as one word of the command."""
  (tmp_path / 'my run').symlink_to(run)
  code, out, err = call('plan', '--fits', f'--model={tmp_path}/my run', '--devices=T4', '--methods=sft')
  assert code == 0, err
  assert shlex.split(out.splitlines()[0])[6] == f'--config=configs/sft_gsm8k.py:model={tmp_path}/my run'


def test_inspect_accepts_the_saved_config_of_a_run(run, call):
  code, out, err = call('inspect', f'--config={run}/config.json', '--stage=sft', '--config.sft.train.steps=1')
  assert code == 0, err
  assert_refused(call('inspect', f'--config={run}/confg.json'), 2, f'did you mean {run}/config.json')
  assert_refused(call('inspect', f'{run}/config.json'), 2, f'write --config={run}/config.json')


def test_folder_without_its_flag_is_refused_with_the_flag_to_write(call, tmp_path):
  assert_refused(call('report', tmp_path), 2, f"'{tmp_path}' is no flag; write --run={tmp_path}")
  assert_refused(call('report', tmp_path / 'no'), 2, '--run is the folder of a run')


def test_chat_has_no_flag_for_the_number_of_answers(call):
  assert '--n:' not in call('chat', '--help')[1] and '--n:' in call('sample', '--help')[1]
  assert_refused(call('chat', '--run=x', '--n=2'), 2, '--n: there is no such flag')


def test_ctrl_c_prints_no_traceback():
  """The process ends by the signal itself, so that a shell that runs it in a loop stops the loop."""
  script = 'import signal\nfrom launch import exits\nexits.run(lambda argv: signal.raise_signal(signal.SIGINT), ["x"])'
  result = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=CLONE)
  assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, '', 'interrupted\n')


def test_logged_warnings_look_like_those_that_commands_print():
  script = 'import logging\nfrom launch import exits\nexits.run(lambda argv: logging.warning("%d rows", 3), ["x"])'
  result = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=CLONE)
  assert (result.returncode, result.stderr) == (0, 'warning: 3 rows\n')


def test_help_into_a_closed_pipe_exits_silently():
  """The reader of the pipe has ended, as in `| head`."""
  read_end, write_end = os.pipe()
  os.close(read_end)
  command = [sys.executable, '-m', 'launch.main', '--help']
  result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, cwd=CLONE)
  os.close(write_end)
  assert (result.returncode, result.stderr) == (141, b'')
