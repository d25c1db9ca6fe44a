"""Loading, saving and exporting tokenizers: stop ids, chat templates, bad folders, and code that must not run."""

import io
import json

import pytest

from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.stage import prepare, schema


def test_bytes_tokenizer_round_trips_and_exports(tmp_path):
  tokenizer = tokenizer_lib.load('bytes')
  text = 'Hé\n\t 日本 <|im_end|>'
  ids = tokenizer.encode(text)
  assert ids == [*text.removesuffix('<|im_end|>').encode(), 258]
  assert tokenizer.decode(ids, skip_special=False) == text
  assert tokenizer.decode(ids) == text.removesuffix('<|im_end|>')
  assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (259, 258, 256)
  assert tokenizer.stop_ids == (258,) and tokenizer.bos_id is None
  tokenizer.save(tmp_path)
  import transformers

  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert theirs.encode(text) == ids and theirs.chat_template
  ours = tokenizer_lib.load(tmp_path)
  assert ours.encode(text) == ids
  assert ours.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
  'name, eos, stop_ids, size',
  [
    ('stories260K/hf', 2, (2,), 512),
    ('tokenizers/gpt2', 50256, (50256,), 50257),
    ('tokenizers/qwen3', 151645, (151645,), 151669),
  ],
)
def test_published_tokenizers_load_save_and_batch_encode(shared_data, tmp_path, name, eos, stop_ids, size):
  tokenizer = tokenizer_lib.load(shared_data(name))
  assert (tokenizer.eos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (eos, stop_ids, size)
  tokenizer.save(tmp_path)
  reloaded = tokenizer_lib.load(tmp_path)
  text = 'One day, a girl.\n  12'
  assert reloaded.encode(text) == tokenizer.encode(text)
  texts = [text, '', 'Zwölf 日本<|im_end|>']
  one_by_one = [tokenizer.hf.backend_tokenizer.encode(x, add_special_tokens=False).ids for x in texts]
  assert tokenizer.encode_all(texts) == one_by_one
  assert reloaded.chat_template == tokenizer.chat_template


def test_stop_ids_include_those_of_the_generation_config(tmp_path):
  tokenizer_lib.load('bytes').save(tmp_path)
  path = tmp_path / 'generation_config.json'
  path.write_text('{"eos_token_id": [256, 258]}')
  assert tokenizer_lib.load(tmp_path).stop_ids == (258, 256)


@pytest.mark.parametrize('last, stops', [('<|return|>', False), ('<|end|>', True)])
def test_token_that_ends_each_message_is_a_stop_only_if_it_ends_the_answer(tmp_path, last, stops):
  """gpt-oss ends its reasoning with <|end|> and its answer with <|return|>; Phi ends its answer with <|end|>."""
  tokenizer = tokenizer_lib.load('bytes')
  tokenizer.hf.add_tokens(['<|end|>', '<|return|>'], special_tokens=True)
  tokenizer.save(tmp_path)
  template = "{% for m in messages %}{{ m.content + ('<|end|>' if not loop.last else 'LAST') }}{% endfor %}"
  loaded = tokenizer_lib.load(tmp_path, template.replace('LAST', last))
  assert (loaded.encode('<|end|>')[0] in loaded.stop_ids) == stops


DEFAULT_TEMPLATE = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
TOOL_TEMPLATE = (
  "{{ (tools | tojson if effort else tools[0].name) + ';' }}{% for m in messages %}{{ m.role + ':' }}"
  "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
  "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_a_template_that_ignores_tools_is_warned_of_once(caplog):
  """The warning names the tokenizer and the fix, and is not given for a template that reads tools."""
  tokenizer_lib._warn_once.cache_clear()
  chat, row = [{'role': 'user', 'content': 'hi'}], {'tools': [{'name': 'look'}]}
  tokenizer = tokenizer_lib.load('bytes')
  tokenizer.render_chat(chat)
  tokenizer_lib.load('bytes', TOOL_TEMPLATE).render_chat(chat, row=row)
  assert not caplog.messages
  for _ in range(2):
    tokenizer.render_chat(chat, row=row)
  (text,) = caplog.messages
  assert text.startswith('the chat template of bytes does not read `tools`') and 'config.data.chat_template' in text
  assert 'unless the prompts list them (config.data.system_prompt)' in text  # then nothing is wrong


@pytest.mark.parametrize('folder', [False, True])
def test_rows_with_tools_use_the_tool_use_template(tmp_path, folder):
  """As in transformers, for a list of templates in tokenizer_config.json and for a folder of template files."""
  import transformers

  source = tokenizer_lib.load('bytes')
  source.hf.chat_template = {'default': DEFAULT_TEMPLATE, 'tool_use': TOOL_TEMPLATE, 'rag': 'R'}
  source.hf.save_pretrained(tmp_path / 'source', save_jinja_files=folder)
  row = {'tools': [{'name': 'look'}]}
  chat = [{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': 'A'}]
  tokenizer = tokenizer_lib.load(tmp_path / 'source', template_kwargs={'effort': ''})
  tokenizer.save(tmp_path / 'export')
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'export')
  assert theirs.chat_template == source.hf.chat_template
  for loaded in tokenizer, tokenizer_lib.load(tmp_path / 'export'):
    assert loaded.template_kwargs == {'effort': ''} and loaded.stop_ids == (258,)
    for columns, beginning in ({}, ''), (row, 'look;'):
      text, spans = loaded.render_chat(chat, row=columns)
      assert text == f'{beginning}user:Q<|im_end|>assistant:A<|im_end|>'
      assert text == theirs.apply_chat_template(chat, tools=columns.get('tools'), tokenize=False)
      assert spans == ([(len(text) - 11, len(text))] if columns else None)
  with_chatml = tokenizer_lib.load(tmp_path / 'source', 'chatml')  # chatml replaces all templates of the folder
  with pytest.raises(InputError, match='the template chatml shows no tools'):
    with_chatml.render_chat(chat, row=row)
  with_chatml.save(tmp_path / 'other')
  assert tokenizer_lib.load(tmp_path / 'other').render_chat(chat)[0].startswith('<|im_start|>user')


def test_bad_tokenizer_folders_are_refused_with_their_path(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(InputError, match='no tokenizer here.*has config.json'):
    tokenizer_lib.load(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"a": \n}')
  with pytest.raises(InputError, match=r'tokenizer.json:2:1: bad JSON'):
    tokenizer_lib.load(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{}')
  with pytest.raises(InputError, match='has no "model"'):
    tokenizer_lib.load(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"model": null}')
  with pytest.raises(InputError, match='unreadable tokenizer'):  # tokenizers raises a bare Exception here
    tokenizer_lib.load(tmp_path)
  for path in ('no_such_folder', str(tmp_path / 'config.json')):
    with pytest.raises(InputError, match='folder'):
      tokenizer_lib.load(path)


@pytest.mark.parametrize('of', ['tokenizer', 'tokenizer_and_config', 'config'])
def test_code_in_a_folder_is_never_run(tmp_path, monkeypatch, of):
  folder, mark_of_execution = tmp_path / 'model', tmp_path / 'mark'
  folder.mkdir()
  (folder / 'planted.py').write_text(
    f'open({str(mark_of_execution)!r}, "w").close()\nimport transformers\n'
    'class Tok(transformers.PreTrainedTokenizerFast): pass\n'
    'class Cfg(transformers.PretrainedConfig):\n  model_type = "planted"\n'
  )
  (folder / 'vocab.json').write_text('{"a": 0}')
  (folder / 'merges.txt').write_text('#version: 0.2\n')
  tokenizer = {'auto_map': {'AutoTokenizer': ['planted.Tok', 'planted.Tok']}}
  config = {'auto_map': {'AutoConfig': 'planted.Cfg'}, 'model_type': 'planted'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer if 'tokenizer' in of else {}))
  (folder / 'config.json').write_text(json.dumps(config if 'config' in of else {}))
  monkeypatch.setattr('sys.stdin', io.StringIO('y\n' * 9))
  with pytest.raises(
    InputError, match='code of its own, which is never run' if 'tokenizer' in of else 'unreadable tokenizer'
  ) as caught:
    tokenizer_lib.load(folder)
  assert '\n' not in str(caught.value)
  with pytest.raises(InputError) as caught:
    prepare.source_of_model(schema.ModelSection(path=str(folder)))
  assert '\n' not in str(caught.value)
  assert not mark_of_execution.exists()
