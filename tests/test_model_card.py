"""The model card of an export, the check against exporting over another stage, and `--push` to the hub."""

import json

import pytest
from test_report import make_run

from jaxpost.errors import InputError
from jaxpost.stage import export
from jaxpost.stage.config import defaults
from jaxpost.storage import hub
from jaxpost.tools import push


@pytest.fixture
def run(tmp_path):
  run = tmp_path / 'run'
  make_run(run, stages=('grpo',), steps=20)
  config = defaults() | {'algorithm': 'grpo', 'reward': 'exact_match'}
  config['model'] |= {'path': 'some/base|model'}
  (run / 'config.json').write_text(json.dumps(config))
  start = {'versions': {'jaxpost': '9.9'}, 'command': ['/home/me/jaxpost/launch/train.py', '--x=(1,)']}
  (run / 'starts.jsonl').write_text(json.dumps(start) + '\n')
  return run


def test_card_states_model_method_reward_step_command_and_metrics(run):
  text = export.describe(run, 'grpo', 15)
  for fact in ('some/base\\|model', '| method | grpo |', 'exact_match', 'step 15 of 100', 'jaxpost 9.9'):
    assert fact in text, fact
  assert "| python -m launch.train '--x=(1,)' |" in text  # a command for a shell, without the path of the clone
  assert '| held-out metric, step 10 | |' in text and '| pass@1 | 0.5 |' in text


def test_card_of_a_reward_model_has_no_commands_that_generate_text(run):
  assert 'vllm serve FOLDER' in export.describe(run, 'grpo', 15)
  config = json.loads((run / 'config.json').read_text())
  (run / 'config.json').write_text(json.dumps(config | {'algorithm': 'reward_model', 'reward': ''}))
  text = export.describe(run, 'reward_model', 15)
  assert 'AutoModelForSequenceClassification' in text and '--config.reward_model.path=FOLDER' in text
  assert not any(word in text for word in ('vllm', 'gguf', 'ollama'))
  assert 'logit at the stop token that ends an answer' in text
  config['reward_model']['loss'] = 'process'
  (run / 'config.json').write_text(json.dumps(config | {'algorithm': 'reward_model', 'reward': ''}))
  assert 'logit at the line break after each step' in export.describe(run, 'reward_model', 15)


def test_commands_in_the_card_name_the_folder_as_given_and_no_local_path(run, tmp_path, monkeypatch):
  """A card holds on any machine: it names a relative folder as given, and an absolute one by its last part."""
  monkeypatch.chdir(tmp_path)
  for folder, expected in (('exports/my model', "'exports/my model'"), (tmp_path / 'exports/my model', "'my model'")):
    card = tmp_path / 'exports/my model/README.md'
    card.parent.mkdir(parents=True, exist_ok=True)
    card.write_text('---\na: b\n---\n# title\n')
    export.write_card(folder, run, 'grpo', 15)
    text = card.read_text()
    assert f'    vllm serve {expected}\n' in text and 'FOLDER' not in text and str(tmp_path) not in text, text


def test_export_over_another_stage_is_refused(run, tmp_path):
  out = tmp_path / 'out'
  out.mkdir()
  (out / 'README.md').write_text('---\ntags:\n- jaxpost\n---\n')
  export.check_stage(out, 'sft')  # an export that was not made from a run has no stage
  export.write_card(out, run, 'grpo', 15)
  assert (out / 'README.md').read_text().startswith('---\ntags')
  export.check_stage(out, 'grpo')
  with pytest.raises(InputError, match='stage grpo, not sft'):
    export.check_stage(out, 'sft')


def test_the_header_names_base_model_and_license(run, tmp_path, monkeypatch):
  out, base = tmp_path / 'out', tmp_path / 'base'
  out.mkdir()
  base.mkdir()
  config = json.loads((run / 'config.json').read_text())

  def header(path):
    (run / 'config.json').write_text(json.dumps(config | {'model': config['model'] | {'path': path}}))
    (out / 'README.md').write_text('---\ntags:\n- jaxpost\n---\n')
    export.write_card(out, run, 'grpo', 15)
    return (out / 'README.md').read_text().split('---\n')[1]

  assert header('org/name') == header('org/name@v1.0') == 'tags:\n- jaxpost\nbase_model: org/name\n'
  assert header(str(base)) == 'tags:\n- jaxpost\n'
  (base / 'README.md').write_text('---\nlicense: apache-2.0\n---\nlicense: of the text\n')
  assert header(str(base)) == 'tags:\n- jaxpost\nlicense: apache-2.0\n'
  monkeypatch.chdir(tmp_path.parent)  # there, the relative folder looks like a name on the hub
  assert header(f'{tmp_path.name}/base') == 'tags:\n- jaxpost\nlicense: apache-2.0\n'
  for text in (b'license: of a text without a header', b'---\nlicense: see "LICENSE": all\n---\n', b'---\n\xff\n---\n'):
    (base / 'README.md').write_bytes(text)
    assert header(f'{tmp_path.name}/base') == 'tags:\n- jaxpost\n'


def test_push_without_a_token_sends_nothing(tmp_path, monkeypatch):
  (tmp_path / 'config.json').write_text('{}')
  monkeypatch.setattr(hub, 'has_token', lambda: False)
  monkeypatch.setattr(hub, 'upload', lambda *args, **kwargs: pytest.fail('sent'))
  messages = []
  push.push(str(tmp_path), 'org/name', False, messages.append)
  assert messages[0] == 'would send config.json, 2 bytes' and 'nothing was sent' in messages[1]
  with pytest.raises(InputError, match='ORG/NAME'):
    push.push(str(tmp_path), 'name', False, messages.append)


def test_push_with_a_token_creates_a_private_repo_and_uploads(tmp_path, monkeypatch):
  import huggingface_hub

  calls = []

  class Api:
    def create_repo(self, repo, **options):
      calls.append((repo, options))

    def upload_folder(self, **options):
      calls.append(options)
      if options['repo_id'] == 'org/refused':
        raise OSError('no way')

  monkeypatch.setattr(hub, 'has_token', lambda: True)
  monkeypatch.setattr(huggingface_hub, 'HfApi', Api)
  messages = []
  push.push(str(tmp_path), 'org/name', False, messages.append)
  assert calls == [
    ('org/name', {'private': True, 'exist_ok': True}),
    {'repo_id': 'org/name', 'folder_path': str(tmp_path)},
  ]
  assert messages == ['https://huggingface.co/org/name']
  with pytest.raises(InputError, match='no way'):
    push.push(str(tmp_path), 'org/refused', True, messages.append)
