"""Secrets: workers see no variables that may hold one, run folders hold none, and configs with one are refused."""

import os
import pathlib

import pytest
import rich.console
import tiny

from jaxpost import stages
from jaxpost.environments.pool import EnvironmentPool
from jaxpost.errors import InputError
from jaxpost.rewards.pool import Group, RewardPool
from jaxpost.stage import config as config_lib
from jaxpost.workers import process

NAMES = (
  *('OPENAI_API_KEY', 'OPENAI_KEY', 'HF_TOKEN', 'GITHUB_PAT', 'DB_PASS', 'DATABASE_URL', 'SLACK_WEBHOOK', 'PASSWD'),
  *(
    'SSH_AUTH_SOCK',
    'AZURE_STORAGE_CONNECTION_STRING',
    'JWT',
    'AWS_ACCESS_KEY_ID',
    'AWS_SECRET_ACCESS_KEY',
    'SENTRY_DSN',
  ),
  *(
    'WANDB_API_KEY',
    'MY_VALUE',
    'NETRC',
    'KUBECONFIG',
    'GOOGLE_APPLICATION_CREDENTIALS',
    'PGPASSFILE',
    'SESSION',
    'SENTRY_DSN',
  ),
  *('PYTHON_KEY', 'LC_secret', 'PATH2', 'HOME_TOKEN', 'XDG_SESSION_ID'),
)
CANARY = 'canary-5b1d'
CODE = """
import os

def seen(completions, **columns):
  return [float(any(name in os.environ for name in c.split(','))) for c in completions]

def fine(completions, **columns):
  print(dict(os.environ))
  return [float(len(c)) for c in completions]

class Env:
  def reset(self, **row):
    return 'go'
  def look(self, name: str) -> str:
    \"\"\"Looks.

    Args:
      name: of what.
    \"\"\"
    return os.environ.get(name, 'nothing')
  def get_reward(self):
    return 1.0
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
  for name in NAMES:
    monkeypatch.setenv(name, CANARY)
  monkeypatch.setenv('https_proxy', f'http://me:{CANARY}@proxy')
  (tmp_path / 'code.py').write_text(CODE)
  return tmp_path / 'code.py'


def test_worker_variables_leave_out_possible_secrets(file, monkeypatch):
  monkeypatch.setenv('http_proxy', 'http://proxy:3128')
  kept, dropped = process.worker_variables()
  assert CANARY not in ' '.join(kept.values()) and {*NAMES, 'https_proxy'} <= {*dropped}
  assert kept['PATH'] == os.environ['PATH'] and kept['http_proxy'] == 'http://proxy:3128'
  assert kept['JAX_PLATFORMS'] == 'cpu'
  kept, dropped = process.worker_variables(('MY_VALUE',))
  assert kept['MY_VALUE'] == CANARY and 'MY_VALUE' not in dropped
  with pytest.raises(InputError, match='no environment variable NO_SUCH is set'):
    process.worker_variables(('NO_SUCH',))


def test_reward_function_sees_only_variables_that_env_vars_names(file):
  group = Group(['p'] * 2, [','.join(NAMES), 'PATH'], [[1]] * 2, {})
  with RewardPool(f'{file}:seen') as pool:
    assert pool.grade([group])[0].rewards == [0.0, 1.0]
  with RewardPool(f'{file}:seen', env_vars=('MY_VALUE',)) as pool:
    assert pool.grade([group])[0].rewards == [1.0, 1.0]


@pytest.mark.parametrize('env_vars, expected', [((), 'nothing'), (('MY_VALUE',), CANARY)])
def test_environment_sees_only_variables_that_env_vars_names(env_vars, expected, file):
  pool = EnvironmentPool(f'{file}:Env', workers=1, env_vars=env_vars)
  try:
    (worker,) = pool.all
    worker.submit(verb='reset', row={}).result()
    assert worker.submit(verb='call', name='look', arguments={'name': 'MY_VALUE'}).result().value == expected
  finally:
    pool.close()


def test_run_folder_and_output_hold_no_secret(file, tmp_path):
  config = tiny.grpo_config(
    tiny.folder(tmp_path / 'nano'),
    reward=f'{file}:fine',
    rewards=dict(workers=1, env_vars=('HF_TOKEN',)),
    train=dict(steps=2),
    save=dict(export=True),
    log=dict(tensorboard=True, rollouts_every=1, samples_every=1),
  )
  console = rich.console.Console(file=open(tmp_path / 'printed', 'w'), width=200)
  stages.run(config, tmp_path / 'run', console)
  console.file.close()
  files = [path for path in (*(tmp_path / 'run').rglob('*'), tmp_path / 'printed') if path.is_file()]
  assert len(files) > 20
  assert [path for path in files if CANARY.encode() in pathlib.Path(path).read_bytes()] == []


@pytest.mark.parametrize(
  'change, field',
  [
    (dict(user=dict(api_key='sk-1')), 'config.user.api_key'),
    (dict(user=dict(a=[dict(DB_PASSWORD='x')])), r'config.user.a\[0\].DB_PASSWORD'),
    (dict(data=dict(template_kwargs=dict(secret='x'))), 'config.data.template_kwargs.secret'),
    (dict(data=dict(path='https://me:pass@host/rows.jsonl')), 'config.data.path'),
    (dict(model=dict(path='s3://key:secret@bucket/x')), 'config.model.path'),
    (dict(reward='./r.py:fn?api_key=sk-1'), 'config.reward'),
    (dict(reward=('length', './r.py:fn?a=1&db_password=x')), r'config.reward\[1\]'),
  ],
)
def test_config_with_a_secret_is_refused(change, field):
  """Otherwise config.json would hold the secret. The error does not repeat it."""
  with pytest.raises(InputError, match=f'^{field}: looks like a secret') as error:
    config_lib.parse(change)
  assert 'sk-1' not in str(error.value) and 'pass@' not in str(error.value)


@pytest.mark.parametrize(
  'change',
  [
    dict(user=dict(api_key_env='JUDGE_KEY', token='x', max_tokens=3, secret='')),
    dict(reward='judge?api_key_env=JUDGE_KEY&max_tokens=512'),
    dict(data=dict(path='https://host:8080/a@b/rows.jsonl')),
    dict(data=dict(path='org/name@main:file.jsonl')),
  ],
)
def test_config_fields_that_only_resemble_secrets_are_accepted(change):
  config_lib.parse(change)
