"""`launch.submit`: rendered cluster jobs are valid, quote hostile text, and restart by exit code.

gcloud, srun and scontrol are doubles here, which run the command that they are given.
"""

import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import pytest
import yaml

CLONE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CLONE))

import jaxpost  # noqa: E402
from jaxpost import stages  # noqa: E402
from jaxpost.errors import InputError  # noqa: E402
from jaxpost.hardware import host  # noqa: E402
from launch import render  # noqa: E402

WORDS = ['--config=configs/sft_gsm8k.py:model=tiny', "--workdir=/data/it's a run", '--config.data.columns=a=b,c=d']
OPTIONS = dict(
  name='try',
  nodes=4,
  devices=0,
  tpu='',
  zone='',
  repo='',
  revision='1234abc',
  image='',
  topology='',
  accelerator='',
  hours=24,
  retries=2,
  compile_cache='',
  profile=0,
  volume='',
)
OPTIONS_OF_PLATFORM = {
  'tpu': dict(tpu='pod', zone='us-east5-a', repo='https://host/you.git'),
  'slurm': {},
  'skypilot': {},
  'gke': dict(image='img:1', volume='runs:/data'),
  'colab': dict(repo='https://host/you.git'),
}


def job(platform, words=WORDS, **overrides):
  return render.render(platform, words, OPTIONS | OPTIONS_OF_PLATFORM[platform] | overrides)


def submit(*arguments):
  return subprocess.run([sys.executable, '-m', 'launch.submit', *arguments], cwd=CLONE, text=True, capture_output=True)


@pytest.mark.parametrize('platform', ['tpu', 'slurm'])
def test_scripts_are_valid_bash(platform, tmp_path):
  text = job(platform)
  done = subprocess.run(['bash', '-n'], input=text, text=True, capture_output=True)
  assert done.returncode == 0 and not done.stderr
  assert '{{' not in text and 'JAX_COMPILATION_CACHE_DIR=/data/xla' in text
  # Variables whose text a shell would split or expand are quoted.
  for line in text.splitlines():
    if not line.lstrip().startswith('#'):
      assert not re.search(r'[^"\w]\$(TPU|ZONE|REPO)\b', line), line


@pytest.mark.parametrize(
  'over, limits, peers',
  [
    (dict(topology='2x2x4'), {'google.com/tpu': 4}, ['--distributed']),
    (
      dict(devices=8, nodes=2),
      {'nvidia.com/gpu': 8},
      ['--coordinator=try-hosts-0-0.try:8476', '--num_processes=2', '--process_id=$(PROCESS_ID)'],
    ),
  ],
)
def test_gke_jobset_has_command_resources_and_restart_rules(over, limits, peers):
  jobset = yaml.safe_load(job('gke', **over))
  assert jobset['kind'] == 'JobSet' and jobset['metadata']['name'] == 'try'
  assert jobset['spec']['failurePolicy']['maxRestarts'] == 2
  spec = jobset['spec']['replicatedJobs'][0]['template']['spec']
  assert spec['completions'] == spec['parallelism'] == over.get('nodes', 4)
  (pod,) = spec['template']['spec']['containers']
  assert pod['command'] == ['python', '-m', 'launch.train', *peers, *WORDS]
  assert pod['resources']['limits'] == limits and pod['image'] == 'img:1'
  (volume,) = spec['template']['spec']['volumes']
  (mount,) = pod['volumeMounts']
  assert volume['persistentVolumeClaim'] == {'claimName': 'runs'}
  assert mount == {'name': volume['name'], 'mountPath': '/data'}
  names = [v['name'] for v in pod['env']]
  assert names[0] == 'JAX_COMPILATION_CACHE_DIR'
  assert ('PROCESS_ID' in names) == ('nvidia.com/gpu' in limits)
  rules = spec['podFailurePolicy']['rules']
  assert {tuple(r['onExitCodes']['values']): r['action'] for r in rules if 'onExitCodes' in r} == {
    (2, 3, 4, 5): 'FailJob',
    (42,): 'Ignore',
  }
  selector = spec['template']['spec']['nodeSelector']
  assert ('cloud.google.com/gke-tpu-topology' in selector) == ('topology' in over)


def test_skypilot_task_has_resources_recovery_and_command():
  task = yaml.safe_load(job('skypilot', nodes=2))
  assert task['num_nodes'] == 2
  assert task['resources']['accelerators'] == 'H100:8'
  assert task['resources']['job_recovery'] == {'recover_on_exit_codes': [42], 'max_restarts_on_errors': 2}
  for script in task['setup'], task['run']:
    assert subprocess.run(['bash', '-n'], input=script, text=True).returncode == 0
  words = shlex.split(task['run'].splitlines()[-1])
  assert words[-len(WORDS) :] == WORDS


def test_colab_is_python():
  text = job('colab')
  plain = '\n'.join('' if line[:1] in '!%' else line for line in text.splitlines())
  ast.parse(plain)
  (call,) = [
    n for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.Call) and ast.unparse(n.func) == 'subprocess.call'
  ]
  words = call.args[0].elts[-1].value
  assert ast.literal_eval(words) == WORDS
  assert text.count('# %%') == 3


@pytest.mark.parametrize(
  'program, files, expected', [('nvidia-smi', [], 'data,cuda'), (None, ['x'], 'data,tpu'), (None, [], 'data')]
)
def test_colab_installs_the_extras_of_its_accelerator(monkeypatch, program, files, expected):
  """Without the extras, a clone would train on the CPU, and could not read the Parquet files of a recipe."""
  cell = job('colab').split('%cd jaxpost')[1].split('# %% Train')[0]
  monkeypatch.setattr('shutil.which', lambda name: program)
  monkeypatch.setattr('glob.glob', lambda pattern: files)
  namespace = {}
  exec('\n'.join(line for line in cell.splitlines() if line[:1] not in '!%'), namespace)
  assert namespace['extras'] == expected and "%pip install -q -e '.[{extras}]'" in cell


HOSTILE = ['x\ny', 'x\n#SBATCH --uid=0', '$(id)', '`id`', 'a b', "a'b", 'a"b', '-x', '', 'x: y', 'x\u2028y', 'a' * 80]


@pytest.mark.parametrize('text', [t for t in HOSTILE if t])
@pytest.mark.parametrize('field', ['name', 'tpu', 'zone', 'topology', 'accelerator', 'image', 'volume'])
@pytest.mark.parametrize('platform', render.PLATFORMS)
def test_names_with_special_characters_are_refused(platform, field, text):
  """Names are written into YAML, #SBATCH lines and comments, where quoting is impossible."""
  if text == 'a' * 80 and field in ('accelerator', 'image'):
    return
  with pytest.raises(InputError, match=f'--{field}: .* is not of the form'):
    job(platform, **{field: text})


@pytest.mark.parametrize('platform', render.PLATFORMS)
def test_arguments_with_line_breaks_are_refused(platform):
  for extra in ({'repo': 'https://x\ny'}, {'compile_cache': '/a\nb'}, {'words': [*WORDS, '--config.data.path=a\nb']}):
    with pytest.raises(InputError, match='has a line break'):
      job(platform, **extra)


@pytest.mark.parametrize('platform', render.PLATFORMS)
def test_hostile_arguments_are_passed_as_text(platform):
  """The arguments arrive as they were written, and no shell or YAML parser interprets them."""
  hostile = ['$(touch /tmp/owned)', '`id`', "it's", 'a"b', '$HOME', 'a: b', '{{ 1 }}', '; exit 9']
  words = [*WORDS, *(f'--config.data.path={text}' for text in hostile)]
  text = job(platform, words=words)
  if platform == 'gke':
    spec = yaml.safe_load(text)['spec']['replicatedJobs'][0]['template']['spec']
    arguments = spec['template']['spec']['containers'][0]['command'][-len(hostile) :]
    assert [word.replace('$$(', '$(') for word in arguments] == words[-len(hostile) :]
    assert not any(re.search(r'(?<!\$)\$\(', word) for word in arguments)
  elif platform == 'skypilot':
    assert shlex.split(yaml.safe_load(text)['run'].splitlines()[-1])[-len(hostile) :] == words[-len(hostile) :]
  elif platform == 'slurm':
    line = next(line for line in text.splitlines() if '--config=' in line)
    assert shlex.split(line.partition(' || ')[0])[-len(hostile) :] == words[-len(hostile) :]


def test_profile_and_compile_cache_are_in_every_job():
  for platform in render.PLATFORMS:
    text = job(platform, profile=10, compile_cache='gs://bucket/xla', topology='2x2')
    assert '--config.log.profile_from=10' in text
    assert 'gs://bucket/xla' in text


def test_compile_cache_under_home_is_expanded(monkeypatch, tmp_path):
  """A script exports it in quotes, so that the shell does not expand ~ for a --workdir under ~."""
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '~/runs/xla')
  updates = {}
  monkeypatch.setattr(jax.config, 'update', updates.__setitem__)
  assert host.use_compile_cache() == updates['jax_compilation_cache_dir'] == f'{tmp_path}/runs/xla'


@pytest.mark.parametrize('folder', ['', '/tmp/of_the_user'])
def test_a_run_in_python_uses_the_compile_cache_of_the_commands_unless_the_user_has_one(folder, monkeypatch):
  """Each call compiled everything anew, for minutes."""
  calls = []
  monkeypatch.setattr(jax, 'config', types.SimpleNamespace(jax_compilation_cache_dir=folder))
  monkeypatch.setattr(host, 'use_compile_cache', lambda: calls.append('cache'))
  monkeypatch.setattr(stages, 'run', lambda *_, **options: calls.append('run') or {})
  jaxpost.run({})
  assert calls == (['run'] if folder else ['cache', 'run'])


# ----------------------------------------------------------------- restarts


DOUBLES = {
  'gcloud': 'for last; do :; done\nexec bash -c "${last#--command=}"',
  'git': (
    '[ "$1" = clone ] || exit 0\nmkdir -p jaxpost/.venv/bin\n'
    'cp fake jaxpost/.venv/bin/python\ncp fake jaxpost/.venv/bin/pip'
  ),
  'srun': 'shift\nexec "$@"',
  'scontrol': 'echo "scontrol $*"',
  'sleep': '',
  'seq': 'exec /usr/bin/env -i /usr/bin/seq "$@"',
}
# Stands for python and pip: python exits with the next of the codes in a file, and pip does nothing.
FAKE = """#!/bin/bash
case "$0" in *pip) exit 0 ;; esac
printf '%s\\n' "$@" > "$HOME/said"
code=$(head -n 1 "$HOME/codes")
sed -i 1d "$HOME/codes"
echo "ran, $code"
exit "$code"
"""


@pytest.mark.parametrize(
  'platform, codes, runs, code',
  [
    ('tpu', [42, 1, 134, 0], 4, 0),
    ('tpu', [1, 1, 1, 1, 0], 3, 1),  # two retries
    ('tpu', [42, 2], 2, 2),
    ('slurm', [1, 0], 2, 0),
    ('slurm', [1, 1, 1, 1, 0], 3, 1),
    ('slurm', [3], 1, 3),
    ('slurm', [1, 42], 2, 42),
  ],
)
def test_job_restarts_by_exit_code(platform, codes, runs, code, tmp_path):
  bin_ = tmp_path / 'bin'
  bin_.mkdir()
  for name, body in DOUBLES.items():
    (bin_ / name).write_text(f'#!/bin/bash\n{body}\n')
    (bin_ / name).chmod(0o755)
  (tmp_path / 'fake').write_text(FAKE)
  (tmp_path / 'fake').chmod(0o755)
  (tmp_path / 'codes').write_text(''.join(f'{c}\n' for c in codes))
  if platform == 'slurm':
    (tmp_path / '.venv' / 'bin').mkdir(parents=True)
    (bin_ / 'python').symlink_to(tmp_path / 'fake')
    (tmp_path / '.venv' / 'bin' / 'activate').write_text('')
  done = subprocess.run(
    ['bash', '-c', job(platform)],
    cwd=tmp_path,
    text=True,
    capture_output=True,
    env=dict(PATH=f'{bin_}:{os.environ["PATH"]}', HOME=str(tmp_path), SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_ID='7'),
  )
  assert done.returncode == code, done.stdout + done.stderr
  assert done.stdout.count('ran, ') == runs
  arguments = (tmp_path / 'said').read_text().splitlines()
  assert arguments == ['-m', 'launch.train', '--distributed', *WORDS]
  assert ('scontrol requeue 7' in done.stdout) == (platform == 'slurm' and code == 42)


# ------------------------------------------------------------------- command


def test_dry_run_prints_the_job():
  done = submit('slurm', '--dry_run', '--nodes=3', '--', *WORDS)
  assert done.returncode == 0, done.stderr
  assert '#SBATCH --nodes=3' in done.stdout


def test_a_program_that_is_not_there_is_named(monkeypatch):
  monkeypatch.setenv('PATH', '/nowhere')
  done = submit('slurm', '--', *WORDS)
  assert done.returncode == 2 and 'sbatch: is not on this machine' in done.stderr, done.stderr


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], 'name a platform: python -m launch.submit tpu|slurm'),
    (['lsf'], 'name a platform'),
    (['slurm', '--image=x', '--', *WORDS], '--image does nothing on slurm'),
    (['slurm', '--', '--config=x'], '--workdir=... after --'),
    (['tpu', '--tpu=a', '--', *WORDS], 'tpu needs --zone, --repo'),
    (['colab', '--repo=x', '--revision=-f', '--', *WORDS], "--revision: '-f' is not of the form"),
  ],
)
def test_bad_input_is_one_line(arguments, words):
  done = submit('--dry_run', *arguments)
  assert done.returncode == 2 and words in done.stderr
  assert 'Traceback' not in done.stderr


def test_cloned_revision_is_pinned(tmp_path):
  """It is the commit of this clone, or that of --revision."""
  head = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=CLONE, text=True, capture_output=True).stdout.strip()
  for arguments, revision in (([], head), (['--revision=v1.0'], 'v1.0')):
    done = submit('colab', '--dry_run', '--repo=https://host/you.git', *arguments, '--', *WORDS)
    assert f'git checkout --quiet --detach {revision}\n' in done.stdout, done.stderr
  with pytest.raises(InputError, match='tpu needs --revision'):
    job('tpu', revision='')
  for template in render.TEMPLATES.iterdir():
    text = template.read_text()
    assert text.count('git clone') == text.count('git checkout')


def test_missing_image_or_volume_is_refused():
  with pytest.raises(InputError, match='gke needs --image'):
    job('gke', image='')
  for volume in '', 'runs:/other':  # no pod would find files that another wrote
    with pytest.raises(InputError, match='gke: .* would be local to each pod'):
      job('gke', volume=volume)
  jobset = yaml.safe_load(job('gke', volume='', words=[WORDS[0], '--workdir=gs://bucket/run']))
  assert 'volumes' not in jobset['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
