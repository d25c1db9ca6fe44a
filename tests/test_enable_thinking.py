"""config.data.enable_thinking reaches every chat that a stage renders."""

import pytest
import tiny

from jaxpost.data import chat
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare, sources

# As Qwen3's: without thinking, a turn starts with an empty thinking block.
TEMPLATE = """\
{% set empty = '' if enable_thinking else '<think></think>' -%}
{% for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ empty }}{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ empty }}{% endif %}"""
QUESTION = {'role': 'user', 'content': 'Q'}
ANSWER = {'role': 'assistant', 'content': 'A'}


@pytest.fixture
def folder(tmp_path):
  tokenizer_lib.load('bytes').save(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(TEMPLATE)
  return str(tmp_path)


def texts(folder, data):
  """(training row, prompt of the sampler) as text, by a config with these data fields."""
  config = config_lib.parse(dict(model=dict(tokenizer=folder), data=data))['sft']
  tokenizer = prepare.load_tokenizer(config, sources.Source(tiny.config(vocab_size=512)))
  row = chat.make_example(tokenizer, {'messages': [QUESTION, ANSWER]}, 'a:1').tokens
  prompt = chat.prompt_tokens(tokenizer, {'messages': [QUESTION]}, 'a:1')
  return tuple(tokenizer.decode(ids, skip_special=False) for ids in (row, prompt))


def test_thinking_is_off_by_default(folder):
  assert texts(folder, {}) == texts(folder, dict(enable_thinking=False))
  assert all('assistant\n<think></think>' in text for text in texts(folder, {}))


def test_one_field_switches_training_rows_and_prompts(folder):
  assert not any('<think>' in text for text in texts(folder, dict(enable_thinking=True)))
