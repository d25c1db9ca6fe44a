"""config.data.chat_template and config.data.template_kwargs apply to every chat that a stage renders."""

import contextlib
import dataclasses
import json
import logging
import types

import pytest
import tiny

import jaxpost
from jaxpost.data import chat, examples, prompts, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.environments import openai_format, turns
from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare, records, reward_models, schema, weight_sources
from jaxpost.tools import chosen_template, completions, inference
from launch import config_flag

# Like the template of Qwen3, in which turns start with an empty thinking block where thinking is off
TEMPLATE = """\
{% set empty = '' if enable_thinking else '<think></think>' -%}
{% if effort %}<effort {{ effort }}>{% endif %}{% for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ empty }}{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ empty }}{% endif %}"""
QUESTION = {'role': 'user', 'content': 'Q'}
ANSWER = {'role': 'assistant', 'content': 'A'}
THINKING = {'enable_thinking': True}


@pytest.fixture
def folder(tmp_path):
  tokenizer_lib.load('bytes').save(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(TEMPLATE)
  return str(tmp_path)


def load(folder, **data):
  """Returns the tokenizer of a stage whose config has these data fields."""
  config = config_lib.parse(dict(model=dict(tokenizer=folder), data=data))['sft']
  source = records.Source(tiny.config(vocab_size=512))
  return prepare.load_tokenizer(config, source, source)


def texts(folder, **data):
  """Returns the texts of a training row and of a sampler's prompt, by a config with these data fields."""
  tokenizer = load(folder, **data)
  row = chat.make_example(tokenizer, {'messages': [QUESTION, ANSWER]}, 'a:1').tokens
  prompt = prompts.prompt_tokens(tokenizer, {'messages': [QUESTION]}, 'a:1')
  return tuple(tokenizer.decode(ids, skip_special=False) for ids in (row, prompt))


def test_thinking_is_off_by_default(folder):
  assert texts(folder) == texts(folder, template_kwargs={'enable_thinking': False})
  assert all('assistant\n<think></think>' in text for text in texts(folder))


def test_template_kwargs_apply_to_training_rows_and_prompts(folder):
  assert not any('<think>' in text for text in texts(folder, template_kwargs=THINKING))
  high_effort = texts(folder, template_kwargs={'effort': 'high'})
  assert all(text.startswith('<effort high>') and '<think>' in text for text in high_effort)


def test_command_line_sets_single_template_kwargs():
  config = {'data': {}}
  config_flag.apply(config, {'data.template_kwargs.enable_thinking': ['True'], 'data.template_kwargs.effort': ['high']})
  assert config_lib.parse(config)['sft'].data.template_kwargs == {'enable_thinking': True, 'effort': 'high'}
  assert config_flag.locate({}, 'data.template_kwargs.any') == ('', 'data.template_kwargs.any')


def test_former_field_enable_thinking_is_refused_with_the_new_name():
  with pytest.raises(InputError, match=r'did you mean config\.data\.template_kwargs\.enable_thinking'):
    config_lib.parse({'data': {'enable_thinking': True}})


def test_template_kwargs_that_the_template_does_not_read_are_refused(folder):
  with pytest.raises(InputError, match=r'config\.data\.template_kwargs\.enable_thinkin: the chat template of .* reads'):
    load(folder, template_kwargs={'enable_thinkin': True})
  with pytest.raises(InputError, match=r'config\.data\.template_kwargs.*: messages is given'):
    load(folder, template_kwargs={'messages': []})


def test_column_chat_template_kwargs_overrides_the_config_for_its_row(folder):
  tokenizer = load(folder)
  rows = sources.read('rows', fake_rows=[{'prompt': [QUESTION], 'chat_template_kwargs': k} for k in (None, THINKING)])
  for tools in (None, [{'type': 'function', 'function': {'name': 'f'}}]):
    stream = prompts.PromptStream(rows, tokenizer, per_step=2, max_prompt_length=99, seed=0, shuffle=False, tools=tools)
    thinks = ['<think>' in tokenizer.decode(p.tokens, skip_special=False) for p in next(stream)[0]]
    assert thinks == [True, False]


def test_request_to_a_server_overrides_template_kwargs(folder):
  tokenizer = load(folder)
  translator = openai_format.Translator(tokenizer, 99)
  for fields, thinks in ({}, True), ({'chat_template_kwargs': THINKING}, False):
    prompt = translator.chat_prompt({'messages': [QUESTION], **fields})
    assert ('<think>' in tokenizer.decode(prompt, skip_special=False)) == thinks
  with pytest.raises(InputError, match='chat_template_kwargs: 3 is no mapping'):
    translator.chat_prompt({'messages': [QUESTION], 'chat_template_kwargs': 3})


def test_later_turns_of_an_environment_follow_the_column_of_the_row(folder):
  tokenizer = load(folder)
  turns_ = turns.Turns(tokenizer)
  for row, thinks in ({}, True), ({'chat_template_kwargs': THINKING}, False):
    for ids in turns_.answers([('f', 'x')], row), turns_.continuation([QUESTION], True, row):
      assert ('<think>' in tokenizer.decode(ids, skip_special=False)) == thinks


def test_exported_tokenizer_keeps_the_template_and_its_kwargs(tmp_path, folder):
  (tmp_path / 'other.jinja').write_text(f'{{# other #}}{TEMPLATE}')
  for source in ('bytes', folder):
    tokenizer = load(source, chat_template=str(tmp_path / 'other.jinja'), template_kwargs=THINKING)
    tokenizer.save(tmp_path / source.strip('/').replace('/', '_'))
    out = tmp_path / source.strip('/').replace('/', '_')
    assert (out / 'chat_template.jinja').read_text() == tokenizer.chat_template
    saved = json.loads((out / 'tokenizer_config.json').read_text())
    assert saved['chat_template_kwargs'] == THINKING
    import transformers

    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    # A model folder is sampled with the kwargs of its training, unless a config sets others.
    assert texts(str(out)) == texts(folder, template_kwargs=THINKING)
    assert texts(str(out), template_kwargs={'enable_thinking': False}) == texts(folder)


def test_commands_take_template_kwargs_from_the_folder_or_a_flag(tmp_path):
  path = tiny.folder(tmp_path / 'nano')
  load('bytes', chat_template=TEMPLATE).save(path)
  for text, thinks in ('', True), ('{"enable_thinking": true}', False):
    weights = inference.load(model=str(path), template_kwargs=text)
    (prompt,) = completions.make_prompts(weights, ['Q'])
    assert ('<think>' in weights.inputs.tokenizer.decode(prompt.tokens, skip_special=False)) == thinks
  for text, message in ('{', 'bad JSON'), ('[]', 'no mapping'), ('{"messages": 1}', 'messages is given'):
    with pytest.raises(InputError, match=f'^--template_kwargs: .*{message}'):
      chosen_template.apply(weights.inputs.tokenizer, '', text)


def test_another_chat_template_of_a_command_gets_the_template_kwargs_of_the_run(folder, tmp_path):
  (tmp_path / 'other.jinja').write_text(f'{{# other #}}{TEMPLATE}')
  trained = load(folder, template_kwargs=THINKING | {'effort': 'low'})
  for kwargs, effort in (('', 'low'), ('{"effort": "high"}', 'high')):
    tokenizer = chosen_template.apply(trained, str(tmp_path / 'other.jinja'), kwargs)
    assert tokenizer.chat_template.startswith('{# other #}')
    assert tokenizer.template_kwargs == THINKING | {'effort': effort}
  chatml = chosen_template.apply(trained, 'chatml', '')  # it reads neither variable
  assert '<effort' not in chatml.render_chat([QUESTION], generation_prompt=True)[0]


def test_commands_take_a_chat_template_for_a_model_without_one(tmp_path):
  path = tiny.folder(tmp_path / 'nano')
  load('bytes').save(path)
  (tmp_path / 'nano' / 'chat_template.jinja').unlink()
  chat_row = [dict(prompt=[QUESTION])]
  with pytest.raises(InputError, match='--chat_template .*config.data.chat_template'):
    completions.prompts_of(inference.load(model=path), sources.read('rows', fake_rows=chat_row))
  weights = inference.load(model=path, chat_template='chatml')
  (prompt,) = completions.prompts_of(weights, sources.read('rows', fake_rows=chat_row))
  assert '<|im_start|>user' in weights.inputs.tokenizer.decode(prompt.tokens, skip_special=False)
  (tmp_path / 't.jinja').write_text(TEMPLATE)
  options = dict(chat_template=str(tmp_path / 't.jinja'), template_kwargs='{"effort": "low"}')
  tokenizer = inference.load(model=path, **options).inputs.tokenizer
  assert tokenizer.render_chat([QUESTION])[0].startswith('<effort low>')
  with pytest.raises(InputError, match="^--chat_template: no file chatlm, .*did you mean 'chatml'"):
    inference.load(model=path, chat_template='chatlm')


def test_chat_template_is_a_file_or_the_text_itself(tmp_path):
  (tmp_path / 't.jinja').write_text(TEMPLATE)
  assert texts('bytes', chat_template=TEMPLATE) == texts('bytes', chat_template=str(tmp_path / 't.jinja'))
  assert '<think>' in texts('bytes', chat_template=TEMPLATE)[0]
  with pytest.raises(InputError, match=r'config\.data\.chat_template: no file none\.jinja'):
    load('bytes', chat_template='none.jinja')


@pytest.mark.parametrize('end, warned', [('<|im_end|>', False), (';', True)])
def test_template_whose_turns_end_without_a_stop_token_is_warned_of(end, warned, caplog):
  template = '{% for m in messages %}{{ m.role + ":" + m.content + "END" }}{% endfor %}'.replace('END', end)
  tokenizer = load('bytes', chat_template=template)
  example = chat.make_example(tokenizer, {'messages': [QUESTION, ANSWER]}, 'a:1')
  with caplog.at_level(logging.WARNING):
    examples.warn_without_stop([None], tokenizer)
    assert not caplog.text
    examples.warn_without_stop([example, None], tokenizer)
  assert ('no trained span ends in a stop token (<|im_end|>)' in caplog.text) == warned


def test_run_or_adapter_as_model_path_brings_its_tokenizer(tmp_path, monkeypatch):
  """An adapter without a tokenizer takes that of its base; a run as `model.path` must not fall back to bytes."""
  config_ = tiny.config(vocab_size=512)
  base = records.Source(config_, folder=tmp_path / 'base')
  adapter = records.Source(config_, folder=tmp_path / 'adapter', base=base)
  assert adapter.tokenizer_path(schema.ModelSection(path='x')) == str(tmp_path / 'base')
  assert adapter.tokenizer_path(schema.ModelSection(path='x', tokenizer='y')) == 'y'
  load('bytes').save(adapter.folder)
  assert adapter.tokenizer_path(schema.ModelSection(path='x')) == str(adapter.folder)
  assert adapter.tokenizer_path(schema.ModelSection(path='x', tokenizer='y')) == 'y'
  missing = str(tmp_path / 'gone')
  for section, path in (
    (dict(path=missing, tokenizer='y'), 'y'),
    (dict(path='', preset='./gone.py:f'), 'bytes'),
    (dict(path='org/name'), 'org/name'),
  ):
    assert weight_sources.saved_tokenizer_path(tmp_path / 'run', schema.ModelSection(**section)) == path
  of_run = records.Source(config_, checkpoints=tmp_path / 'run' / 'checkpoints' / 'sft')
  monkeypatch.setattr('jaxpost.stage.weight_sources.own_tokenizer', lambda source: ('other', '', {}))
  loaded = {
    'bytes': tokenizer_lib.load('bytes'),
    'other': types.SimpleNamespace(encode=lambda text: [1], source='other'),
  }
  monkeypatch.setattr(tokenizer_lib, 'load', lambda path, *options: loaded[path])
  (config,) = config_lib.parse(tiny.run_config('run')).values()
  with pytest.raises(InputError, match='config.model.tokenizer: is empty, and run has its own; set it to other'):
    prepare.load_tokenizer(dataclasses.replace(config, model=schema.ModelSection(path='run')), of_run, of_run)


def test_a_tokenizer_of_the_weights_that_is_gone_is_not_replaced_by_bytes(tmp_path, monkeypatch):
  """A config that names another tokenizer does not need the one that is gone."""
  of_run = records.Source(tiny.config(vocab_size=512), checkpoints=tmp_path / 'run' / 'checkpoints' / 'sft')
  monkeypatch.setattr('jaxpost.stage.weight_sources.own_tokenizer', lambda source: (str(tmp_path / 'gone'),))
  bytes_ = tokenizer_lib.load('bytes')
  (config,) = config_lib.parse(tiny.run_config('run')).values()
  weight_sources.check_tokenizer(config, of_run, bytes_, 'named', {})
  with pytest.raises(InputError, match='gone'):
    weight_sources.check_tokenizer(config, of_run, bytes_, '', {})


def test_a_template_file_of_the_weights_that_is_gone_ends_no_run(tmp_path, caplog):
  saved = tiny.run_config('', data=dict(chat_template='./gone.jinja', template_kwargs=dict(effort='high')))
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(saved))
  of_run = records.Source(tiny.config(vocab_size=512), checkpoints=tmp_path / 'run' / 'checkpoints' / 'sft')
  own = weight_sources.tokenizer_of(of_run, {})
  assert own.source == 'bytes'
  (config,) = config_lib.parse(tiny.run_config('run')).values()
  caplog.clear()
  weight_sources.check_tokenizer(config, of_run, own, '', {})
  (record,) = caplog.records
  assert 'run: its chat template ./gone.jinja is gone, so no other is compared with it' in record.getMessage()


def test_tokenizer_and_template_of_a_run_are_found_where_it_started(tmp_path, monkeypatch, caplog):
  """Files with the same names in the folder of the run that continues it are others."""
  here, there = tmp_path / 'here', tmp_path / 'there'
  for place, template in ((here, TEMPLATE), (there, TEMPLATE.replace('im_start', 'im_end'))):
    place.mkdir()
    tokenizer_lib.load('bytes').save(place / 'nano')
    (place / 't.jinja').write_text(template)
  named = dict(model=dict(path='', preset='tiny', tokenizer='nano'), data=dict(chat_template='./t.jinja'))
  (there / 'run').mkdir()
  (there / 'run' / 'config.json').write_text(json.dumps(tiny.merged(tiny.run_config(''), named)))
  (there / 'run' / 'starts.jsonl').write_text(json.dumps(dict(folder=str(there))) + '\n')
  of_run = records.Source(tiny.config(vocab_size=512), checkpoints=there / 'run' / 'checkpoints' / 'sft')
  monkeypatch.chdir(here)
  own = weight_sources.tokenizer_of(of_run, {})
  assert own.source == str(there / 'nano') and '<|im_end|>user' in own.render_chat([QUESTION])[0]
  (config,) = config_lib.parse(tiny.run_config('run')).values()
  weight_sources.check_tokenizer(config, of_run, tokenizer_lib.load('nano'), 'nano', {})
  assert len(warnings_of_templates(caplog)) == 1


def test_weights_of_a_run_are_loaded_in_any_folder(tmp_path, monkeypatch):
  """Relative paths of the run's config, and of the tokenizer that is read again, are of the folder where it started."""
  path = tiny.folder(tmp_path / 'nano', vocab_size=300)
  tokenizer_lib.load('bytes').save(path)
  (tmp_path / 't.jinja').write_text(TEMPLATE)
  named = dict(model=dict(path='./nano', tokenizer=''), data=dict(chat_template='./t.jinja'), train=dict(steps=1))
  with contextlib.chdir(tmp_path):
    jaxpost.run(tiny.merged(tiny.run_config(''), named), 'run')
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.chdir(tmp_path / 'elsewhere')
  for run in ('../run', tmp_path / 'run'):
    weights = inference.load(run=str(run))
    assert weights.inputs.tokenizer.chat_template == TEMPLATE
    inference.export(weights, 'out')
    assert (tmp_path / 'elsewhere/out/chat_template.jinja').read_text() == TEMPLATE
  (tmp_path / 'elsewhere/t.jinja').write_text(f'{{# mine #}}{TEMPLATE}')
  replaced = inference.load(run='../run', chat_template='./t.jinja').inputs.tokenizer  # this path is of this folder
  assert replaced.chat_template.startswith('{# mine #}')
  (tmp_path / 't.jinja').unlink()
  with pytest.raises(InputError, match=r'no file \./t\.jinja'):
    inference.load(run='../run')


def warnings_of_templates(caplog):
  return [r.getMessage() for r in caplog.records if r.getMessage().startswith('config.data.chat_template: ')]


@pytest.mark.parametrize(
  'data', [dict(chat_template='mistral'), dict(chat_template=TEMPLATE, template_kwargs=dict(effort='high'))]
)
def test_weights_of_a_run_with_another_chat_template_are_warned_of(tmp_path, caplog, data):
  """A run that continues another one has the template of the tokenizer, which the model may never have seen."""
  saved = tiny.run_config('', data=data)
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(saved))
  of_run = records.Source(tiny.config(vocab_size=512), checkpoints=tmp_path / 'run' / 'checkpoints' / 'sft')
  bytes_, own = tokenizer_lib.load('bytes'), weight_sources.tokenizer_of(of_run, {})
  assert own.render_chat([QUESTION]) == load('bytes', **data).render_chat([QUESTION])
  over = dict(init_from='run', reward='reward_model', reward_model=dict(path='rm'))
  (same,) = config_lib.parse(tiny.merged(saved, over)).values()
  new = dataclasses.replace(same, data=dataclasses.replace(same.data, chat_template='', template_kwargs={}))
  with caplog.at_level(logging.WARNING):
    weight_sources.check_tokenizer(same, of_run, own, 'bytes', {})
    reward_models.check_tokens(same, dict(reward_model=of_run, policy=of_run), own, {})
    assert not caplog.records
    weight_sources.check_tokenizer(new, of_run, bytes_, 'bytes', {})
    reward_models.check_tokens(new, dict(reward_model=of_run, policy=of_run), bytes_, {})
  assert [line.split()[1] for line in warnings_of_templates(caplog)] == ['run', 'rm']


def test_a_stage_or_folder_with_another_chat_template_is_warned_of_unless_the_config_names_one(tmp_path, caplog):
  path = tiny.folder(tmp_path / 'model', vocab_size=300)
  load('bytes', chat_template='mistral').save(tmp_path / 'model')
  blocks = dict(stages=('first', 'second'), first=dict(data=dict(chat_template='mistral')), second={})
  random = dict(model=dict(path='', preset='tiny'))
  explicit = dict(data=dict(chat_template='chatml'))
  for over, expected in (
    (dict(random, **blocks), ['first']),
    (dict(random, **dict(blocks, second=explicit)), []),
    (dict(random, init_from=path), [path]),
    (dict(random, init_from=path, **explicit), []),
    (dict(model=dict(path=path, tokenizer='')), []),
  ):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      for stage in prepare.prepare_all(tiny.merged(tiny.run_config(''), over)):
        stage.close()
    assert [line.split()[1] for line in warnings_of_templates(caplog)] == expected, over
