"""Built-in chat templates: the text that they render, which spans of it are trained, and their stop tokens."""

import pathlib

import numpy as np
import pytest
import tokenizers
import transformers

from jaxpost.data import chat as chat_lib
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError

NAMES = sorted(file.stem for file in (pathlib.Path(tokenizer_lib.__file__).parent / 'templates').glob('*.jinja'))
CHAT = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'Hi'},
  {'role': 'assistant', 'content': 'Hello.'},
  {'role': 'user', 'content': 'More'},
  {'role': 'assistant', 'content': 'No.'},
]
# The stop token of each template, and the text right before a trained span.
STOPS = {
  'chatml': ('<|im_end|>', '<|im_start|>assistant\n'),
  'llama3': ('<|eot_id|>', '<|start_header_id|>assistant<|end_header_id|>\n\n'),
  'gemma': ('<end_of_turn>', '<start_of_turn>model\n'),
  'mistral': ('</s>', '[/INST]'),
  'plain': ('</s>', 'Assistant:\n'),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The folder of a byte tokenizer with the special tokens of all templates and without a template."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=letters, show_progress=False)
  tokenizer.train_from_iterator([], trainer)
  special = ['<s>', '</s>', '<|im_start|>', '<|im_end|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>']
  tokenizer.add_special_tokens([*special, '<start_of_turn>', '<end_of_turn>', '[INST]', '[/INST]'])
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>')
  path = tmp_path_factory.mktemp('tokenizer')
  fast.save_pretrained(path)
  return path


def test_docs_list_all_templates():
  assert NAMES == sorted(STOPS)
  docs = (pathlib.Path(__file__).resolve().parents[1] / 'docs/chats.md').read_text('utf-8')
  assert all(f'| `{name}` |' in docs for name in NAMES)


@pytest.mark.parametrize('name', NAMES)
def test_answers_and_their_stop_tokens_are_trained(name, folder):
  tokenizer = tokenizer_lib.load(folder, name)
  text, spans = tokenizer.render_chat(CHAT)
  stop, header = STOPS[name]
  assert [text[a:b].strip() for a, b in spans] == [f'Hello.{stop}', f'No.{stop}']
  assert all(text[:a].endswith(header) for a, _ in spans)
  assert 'Be brief.' in text and text.count('Hi') == 1
  assert tokenizer.encode(stop)[-1] in tokenizer.stop_ids  # a sampler stops there


@pytest.mark.parametrize('name', NAMES)
def test_generation_prompt_ends_where_the_trained_span_starts(name, folder):
  tokenizer = tokenizer_lib.load(folder, name)
  prompt, _ = tokenizer.render_chat(CHAT[:2], generation_prompt=True)
  text, spans = tokenizer.render_chat(CHAT[:3])
  assert text[: spans[0][0]] == prompt


def test_chatml_trains_what_the_template_of_bytes_trains():
  """The two differ in tools only."""
  for extent in 3, 4, 5:  # messages
    of_bytes, of_file = (
      chat_lib.make_example(tokenizer_lib.load('bytes', template), {'messages': CHAT[:extent]}, 'a:1')
      for template in ('', 'chatml')
    )
    np.testing.assert_array_equal(of_bytes.tokens, of_file.tokens)
    np.testing.assert_array_equal(of_bytes.loss_mask, of_file.loss_mask)


@pytest.mark.parametrize('name', NAMES)
def test_rows_with_tools_are_refused(name, folder):
  tool = {'type': 'function', 'function': {'name': 'look', 'parameters': {}}}
  with pytest.raises(InputError, match='shows no tools'):
    tokenizer_lib.load(folder, name).render_chat(CHAT, row={'tools': [tool]})


@pytest.mark.parametrize('name', NAMES)
def test_messages_with_tool_calls_are_refused(name, folder):
  tokenizer = tokenizer_lib.load(folder, name)
  call = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'look', 'arguments': {}}}]}
  with pytest.raises(InputError, match=f'the template {name} shows no tools'):
    tokenizer.render_chat([*CHAT[:2], call])
  assert tokenizer.render_chat([*CHAT[:2], CHAT[2] | {'tool_calls': []}]) == tokenizer.render_chat(CHAT[:3])
  if name == 'plain':  # the other templates render messages of the role tool
    with pytest.raises(InputError, match='the template plain shows no tools'):
      tokenizer.render_chat([*CHAT[:3], {'role': 'tool', 'content': 'R'}])


@pytest.mark.parametrize('name', ['gemma', 'mistral'])
def test_system_message_that_is_not_before_the_first_question_is_refused(name, folder):
  tokenizer = tokenizer_lib.load(folder, name)
  system, user, answer = CHAT[:3]
  for chat in [system, answer], [user, answer, system, user], [system, system, user], [system]:
    with pytest.raises(InputError, match=f'the template {name} shows a system message only before the first question'):
      tokenizer.render_chat(chat)


def test_byte_order_mark_is_not_part_of_a_template(folder, tmp_path):
  text = (pathlib.Path(tokenizer_lib.__file__).parent / 'templates/chatml.jinja').read_text('utf-8')
  (tmp_path / 'bom.jinja').write_text(text, 'utf-8-sig')
  assert tokenizer_lib.load(folder, str(tmp_path / 'bom.jinja')).chat_template == text


def test_unknown_template_is_refused_with_the_known_names(folder):
  with pytest.raises(InputError, match="did you mean 'llama3'.*known: chatml, gemma, llama3, mistral, plain"):
    tokenizer_lib.load(folder, 'lama3')
