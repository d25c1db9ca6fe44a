"""`chat.make_example` and `prompts.prompt_tokens`: tokens and loss masks of rows, against renderings written by hand.

In a rendering, [[ ]] encloses the tokens that are trained.
"""

import dataclasses
import functools
import json
import types

import numpy as np
import pytest
import tiny

from jaxpost.algorithms import sft
from jaxpost.data import chat, sources
from jaxpost.data import prompts as prompts_lib
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.environments import openai_format
from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare

USER = {'role': 'user', 'content': 'Q1'}
ANSWER = {'role': 'assistant', 'content': 'A1'}
USER_2 = {'role': 'user', 'content': 'Q2'}
ANSWER_2 = {'role': 'assistant', 'content': 'A2'}
THOUGHT = {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nA1'}
CALL = {
  'role': 'assistant',
  'content': None,
  'tool_calls': [{'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}],
}
RESULT = {'role': 'tool', 'content': 'R'}
Q, A = '<|im_start|>user\n', '<|im_start|>assistant\n'
END, EMPTY = '<|im_end|>', '<think>\n\n</think>\n\n'


load = functools.cache(tokenizer_lib.load)


@pytest.fixture
def qwen(shared_data):
  return load(shared_data('tokenizers/qwen3'))


@pytest.fixture
def plain():
  return load('bytes')


def marked(tokenizer, example):
  """The text of an example with its trained tokens in [[ ]]."""
  text, cuts = '', np.flatnonzero(np.diff(example.loss_mask)) + 1
  for run, mask in zip(np.split(example.tokens, cuts), np.split(example.loss_mask, cuts)):
    part = tokenizer.decode(run, skip_special=False)
    text += f'[[{part}]]' if mask[0] else part
  return text


def render(tokenizer, row, **options):
  return marked(tokenizer, chat.make_example(tokenizer, row, 'a.jsonl:1', **options))


def thinking(tokenizer, on=True):
  return dataclasses.replace(tokenizer, template_kwargs={'enable_thinking': on})


def test_an_empty_answer_trains_its_end_token_alone(plain):
  silent = {'role': 'assistant', 'content': ''}
  assert render(plain, {'prompt': 'Q', 'completion': ''}) == f'Q[[{END}]]'
  chat_text = f'{Q}Q1{END}\n{A}[[{END}]]\n'
  assert render(plain, {'messages': [USER, silent]}) == chat_text
  assert render(plain, {'prompt': [USER], 'completion': [silent]}) == chat_text


def test_qwen3_trains_both_turns_and_empty_think_block_of_the_last(qwen):
  # The template gives only the last turn an (empty) thinking block.
  row = {'messages': [USER, ANSWER, USER_2, ANSWER_2]}
  head = f'{Q}Q1{END}\n{A}[[A1{END}]]\n{Q}Q2{END}\n{A}'
  assert render(qwen, row) == f'{head}{EMPTY}[[A2{END}]]\n'
  assert render(thinking(qwen), row) == f'{head}[[{EMPTY}A2{END}]]\n'
  assert render(qwen, row, train_on='completion') == (f'{Q}Q1{END}\n{A}A1{END}\n{Q}Q2{END}\n{A}{EMPTY}[[A2{END}]]\n')
  assert render(qwen, row, train_on='all').startswith('[[<|im_start|>')


def test_qwen3_trains_reasoning_as_text_and_as_field(qwen):
  row = {'messages': [{'role': 'system', 'content': 'S'}, USER, THOUGHT]}
  expected = f'{Q}Q1{END}\n{A}[[<think>\nhm\n</think>\n\nA1{END}]]\n'
  assert render(thinking(qwen), row) == f'<|im_start|>system\nS{END}\n{expected}'
  kept_apart = {'role': 'assistant', 'reasoning_content': 'hm', 'content': 'A1'}
  assert render(thinking(qwen), {'messages': [USER, kept_apart]}) == expected


def test_qwen3_dropped_reasoning_is_refused_unless_untrained(qwen):
  row = {'messages': [USER, THOUGHT, USER_2, ANSWER_2]}
  with pytest.raises(InputError, match='a.jsonl:1: message 1.*reasoning'):
    chat.make_example(qwen, row, 'a.jsonl:1')
  untrained = f'{Q}Q1{END}\n{A}A1{END}\n{Q}Q2{END}\n{A}{EMPTY}[[A2{END}]]\n'
  assert render(qwen, row, train_on='completion') == untrained
  assert render(qwen, {'messages': [USER, THOUGHT | {'weight': 0}, USER_2, ANSWER_2]}) == untrained
  with pytest.raises(InputError, match='a.jsonl:1: message 3.*reasoning'):  # not only in the first turn
    later = [USER, ANSWER, USER_2, THOUGHT, USER, ANSWER_2]
    chat.make_example(qwen, {'messages': later}, 'a.jsonl:1', train_on='all')


def test_trained_turn_after_header_that_sampling_never_sees_is_refused(qwen, tmp_path):
  row = {'messages': [USER, THOUGHT]}
  with pytest.raises(InputError) as caught:
    chat.make_example(qwen, row, 'a.jsonl:1')
  assert str(caught.value) == (
    f'a.jsonl:1: message 1: is trained after {A!r}, which sampling never sees, as its prompts end in {A + EMPTY!r}; '
    'set config.data.template_kwargs.enable_thinking=True, or the column chat_template_kwargs of the row'
  )
  template = tmp_path / 'marked.jinja'  # here {% generation %} markers decide what is trained
  template.write_text(
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ';' }}"
    "{% endgeneration %}{% else %}{{ m.content + ';' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'assistant:' + ('<think>' if enable_thinking else '') }}{% endif %}"
  )
  marked_up = tokenizer_lib.load('bytes', str(template), {'enable_thinking': True})
  with pytest.raises(InputError, match="after 'assistant:', .* end in 'assistant:<think>'; .*enable_thinking=False"):
    chat.make_example(marked_up, {'messages': [USER, ANSWER]}, 'a.jsonl:1')


def test_earlier_turns_after_unseen_headers_give_one_warning(qwen, caplog):
  """Turns before the last are trained without the think block that each prompt of a sampler ends in."""

  def warnings(*chats, tokenizer=qwen, train_on='assistant'):
    caplog.clear()
    rows = sources.read('a.jsonl', fake_rows=[{'messages': messages} for messages in chats])
    config = config_lib.parse({'data': {'train_on': train_on}})['sft']
    prepare.read_documents(types.SimpleNamespace(algorithm=sft.SFT, tokenizer=tokenizer, config=config), rows, {})
    return [record.getMessage() for record in caplog.records]

  earlier = [USER, ANSWER, USER_2, ANSWER_2]
  (text,) = warnings(earlier, [USER, ANSWER], earlier)
  reason = (
    f'a.jsonl[0]: message 1: is trained after {A!r}, which sampling never sees, as its prompts end in {A + EMPTY!r}'
  )
  assert text.startswith('config.data: 2 rows train a turn') and f'{reason}; set config.data.train_on=' in text
  assert warnings([USER, CALL, RESULT, ANSWER_2])  # the call is a turn as well
  assert warnings([USER, ANSWER, USER_2])
  untrained = [USER, ANSWER | {'weight': 0}, USER_2, ANSWER_2]
  assert not warnings([USER, ANSWER], untrained)
  assert not warnings(earlier, train_on='completion') and not warnings(earlier, train_on='all')
  assert not warnings(earlier, tokenizer=thinking(qwen))


def test_template_kwargs_of_a_row_override_those_of_the_config(qwen):
  row = {'messages': [USER, THOUGHT], 'chat_template_kwargs': {'enable_thinking': True, 'other': None}}
  assert render(qwen, row) == f'{Q}Q1{END}\n{A}[[<think>\nhm\n</think>\n\nA1{END}]]\n'
  prompt = prompts_lib.prompt_tokens(qwen, row, 'x')
  assert qwen.decode(prompt, skip_special=False) == f'{Q}Q1{END}\n{A}'
  row['chat_template_kwargs'] = {'enable_thinking': False}
  prompt = prompts_lib.prompt_tokens(thinking(qwen), row, 'x')
  assert qwen.decode(prompt, skip_special=False) == f'{Q}Q1{END}\n{A}{EMPTY}'


def test_qwen3_header_and_content_are_tokenized_apart(qwen):
  # In the whole text, the line breaks before and after the cut are one token.
  row = {'messages': [USER, {'role': 'assistant', 'content': '\nA1'}, USER_2, ANSWER_2]}
  assert render(thinking(qwen), row).startswith(f'{Q}Q1{END}\n{A}[[\nA1{END}]]\n')


def test_qwen3_trains_tool_calls_but_not_their_results(qwen):
  row = {'messages': [USER, CALL, RESULT, ANSWER_2]}
  call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
  assert render(qwen, row) == (
    f'{Q}Q1{END}\n{A}[[{call}{END}]]\n{Q}<tool_response>\nR\n</tool_response>{END}\n{A}{EMPTY}[[A2{END}]]\n'
  )
  tools = [{'type': 'function', 'function': {'name': 'f'}}]
  shown = render(qwen, {**row, 'tools': json.dumps(tools)})
  assert '<tools>\n{"type": "function"' in shown


def with_arguments(arguments):
  return CALL | {'tool_calls': [{'type': 'function', 'function': {'name': 'f', 'arguments': arguments}}]}


def test_tool_arguments_as_json_render_like_an_object(qwen):
  row, text = ({'messages': [USER, with_arguments(a), RESULT, ANSWER_2]} for a in ({'a': 'é'}, '{"a":"é"}'))
  assert render(qwen, text) == render(qwen, row)
  call = text['messages'][1]['tool_calls'][0]
  assert call['function']['arguments'] == '{"a":"é"}'  # the row is unchanged
  prompts = [prompts_lib.prompt_tokens(qwen, row, 'x').tolist() for row in (row, text)]
  assert prompts[0] == prompts[1]
  assert openai_format.Translator(qwen, 99).chat_prompt({'messages': text['messages'][:3]}).tolist() == prompts[0]
  no_arguments = {'messages': [USER, with_arguments('')]}
  assert render(qwen, no_arguments) == render(qwen, {'messages': [USER, with_arguments({})]})


@pytest.mark.parametrize('given', [{'a': '\ud800'}, r'{"a": "\ud800"}'])
def test_tool_arguments_with_lone_surrogate_are_refused(qwen, given):
  with pytest.raises(InputError, match='a.jsonl:1: has half a surrogate pair'):
    render(qwen, {'messages': [USER, with_arguments(given)]})


def test_tool_arguments_are_json_for_template_that_concatenates_them():
  template = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
  )
  tokenizer = tokenizer_lib.load('bytes', template)
  for arguments in {'a': 'é'}, '{"a": "é"}':
    row = {'messages': [USER, with_arguments(arguments)]}
    assert render(tokenizer, row) == f'user:Q1{END}assistant:[[f{{"a": "é"}}{END}]]'


def test_a_token_across_the_start_of_an_answer_is_refused():
  """SentencePiece joins a space and the word after it, here of the generation prompt 'a: '."""
  tokenizer = types.SimpleNamespace(adds_space=True, offsets=lambda text: ([1, 2], [(0, 2), (2, 5)]))
  with pytest.raises(InputError) as caught:
    chat._encode_text(tokenizer, 'a: It', [((3, 5), 1)], 'a.jsonl:1')
  assert str(caught.value) == (
    "a.jsonl:1: the tokenizer joins ' It' across the start of an assistant turn (token 1); use a template that "
    'ends its generation prompt in a newline or special token'
  )


def test_function_call_of_a_message_is_a_tool_call(qwen, plain):
  """The older form of OpenAI, one call without a list: templates do not read it, so the call was dropped."""
  call = {'name': 'f', 'arguments': '{"a": 1}'}
  older, newer = (
    {'role': 'assistant', 'content': None} | fields
    for fields in ({'function_call': call}, {'tool_calls': [call], 'function_call': None})
  )
  assert render(qwen, {'messages': [USER, older]}) == render(qwen, {'messages': [USER, newer]})
  with pytest.raises(InputError, match="leaves out its call of 'f'"):
    render(plain, {'messages': [USER, older]})


def test_tool_call_that_template_leaves_out_is_refused(plain):
  row = {'messages': [USER, CALL, RESULT, ANSWER_2]}
  for train_on in 'assistant', 'all':
    with pytest.raises(InputError) as caught:
      render(plain, row, train_on=train_on)
    assert str(caught.value) == (
      "a.jsonl:1: message 1: the chat template leaves out its call of 'f'; set config.data.chat_template to a template "
      'that shows tool calls'
    )
  flat = {'role': 'assistant', 'content': 'A', 'tool_calls': [{'name': 'f', 'arguments': {}}]}
  with pytest.raises(InputError, match="leaves out its call of 'f'"):
    render(plain, {'prompt': [USER], 'completion': [flat]})
  assert render(plain, row, train_on='completion').endswith(f'[[A2{END}]]\n')  # an untrained call may be left out


def test_tokens_equal_apply_chat_template_of_transformers(qwen):
  chats = [
    [USER, ANSWER],
    [USER, ANSWER, USER_2, ANSWER_2],
    [USER, {'role': 'assistant', 'content': 'é日本 \n\n  x\n'}],
    [USER, CALL | {'content': ''}, RESULT, ANSWER_2],
  ]
  for messages in chats:
    expected = qwen.hf.apply_chat_template(messages, return_dict=False)
    actual = chat.make_example(qwen, {'messages': messages}, 'x').tokens
    assert actual.tolist() == expected
    prompt = prompts_lib.prompt_tokens(qwen, {'messages': messages}, 'x')
    assert prompt.tolist() == qwen.hf.apply_chat_template(
      messages[:-1], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )


def test_chat_that_ends_with_user_turn_is_a_whole_prompt(plain):
  row = {'messages': [USER, ANSWER, USER_2]}
  answered = {'messages': [*row['messages'], ANSWER]}
  assert prompts_lib.prompt_of(row, 'x') == row['messages'] == prompts_lib.prompt_of(answered, 'x')
  with pytest.raises(InputError, match='there is nothing before the last assistant turn'):
    prompts_lib.prompt_of({'messages': [ANSWER]}, 'x')


@pytest.mark.parametrize('content', ['A1', ' A1', '\nA1', '\n\n A1', 'é', ''])
@pytest.mark.parametrize('on', [True, False])
def test_sampling_prompt_equals_untrained_head_of_example(qwen, plain, content, on):
  answer = {'role': 'assistant', 'content': content}
  rows = [
    {'prompt': [USER], 'completion': [answer]},
    {'prompt': [USER, ANSWER, USER_2], 'completion': [answer]},
    {'prompt': 'Q1: ', 'completion': content},
  ]
  for tokenizer in (thinking(t, on) for t in (qwen, plain)):
    for row in rows:
      prompt = prompts_lib.prompt_tokens(tokenizer, row, 'x')
      example = chat.make_example(tokenizer, row, 'x')
      head = int(example.loss_mask.argmax())
      assert example.tokens[:head].tolist() == prompt.tolist()
      assert not example.loss_mask[:head].any()


@pytest.mark.parametrize('content', ['\ue000', 'assistant', '<|im_start|>assistant\nA', 'A1<|im_end|>', '<b>'])
def test_contents_that_look_like_the_template_are_trained_as_text(plain, content):
  answer = {'role': 'assistant', 'content': content}
  row = {'messages': [USER, answer, USER, answer]}
  assert render(plain, row) == (f'{Q}Q1{END}\n{A}[[{content}{END}]]\n' * 2)


def test_generation_markers_decide_what_is_trained(tmp_path):
  template = tmp_path / 'marked.jinja'
  template.write_text(
    '{% for m in messages %}{{ m.role }}: '
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
    '{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}'
    '{% if add_generation_prompt %}assistant: {% endif %}'
  )
  tokenizer = tokenizer_lib.load('bytes', str(template))
  row = {'messages': [USER, ANSWER, USER_2, ANSWER_2]}
  text, spans = tokenizer.render_chat(row['messages'])
  assert [text[a:b] for a, b in spans] == ['A1!', 'A2!']
  assert render(tokenizer, row) == ('user: Q1;assistant: [[A1!]];user: Q2;assistant: [[A2!]];')
  assert render(tokenizer, row, train_on='completion') == ('user: Q1;assistant: A1!;user: Q2;assistant: [[A2!]];')


def test_a_header_is_not_sought_in_earlier_turns(tmp_path):
  template = tmp_path / 'think.jinja'
  template.write_text(
    '{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}'
    '{% if add_generation_prompt %}assistant: THINK{% endif %}'
  )
  tokenizer = tokenizer_lib.load('bytes', str(template))
  first = {'role': 'assistant', 'content': 'THINK x'}
  assert render(tokenizer, {'messages': [USER, first, USER_2, ANSWER_2]}) == (
    'user: Q1;assistant: [[THINK x]];user: Q2;assistant: [[A2]];'
  )


def test_template_that_leaves_out_a_turn_is_refused(tmp_path):
  template = tmp_path / 'last.jinja'
  template.write_text('{{ messages[-1].role }}: {{ messages[-1].content }}')
  tokenizer = tokenizer_lib.load('bytes', str(template))
  with pytest.raises(InputError, match='leaves out message 1'):
    render(tokenizer, {'messages': [USER, ANSWER, USER_2, ANSWER_2]})


def test_text_row_is_trained_whole_with_bos_and_eos(plain, shared_data, tmp_path):
  assert render(plain, {'text': 'hi'}) == '[[hi<|im_end|>]]'
  stories = tokenizer_lib.load(tiny.after_bos(shared_data('stories260K/hf'), tmp_path / 'model'))
  tokens = chat.make_example(stories, {'text': 'Once'}, 'x').tokens
  assert tokens[0] == stories.bos_id == 1
  assert tokens[-1] == stories.eos_id == 2


def test_plain_prompt_and_completion_are_joined_as_they_are(plain, shared_data):
  row = {'prompt': '17+25=', 'completion': '42'}
  assert render(plain, row) == f'17+25=[[42{END}]]'
  assert render(plain, row, train_on='all') == f'[[17+25=42{END}]]'
  # This tokenizer begins each text with a space, which must not be inserted before the completion.
  stories = tokenizer_lib.load(shared_data('stories260K/hf'))
  example = chat.make_example(stories, {'prompt': 'Once upon', 'completion': ' a time'}, 'x')
  assert stories.decode(example.tokens) == 'Once upon a time'
  assert stories.decode(chat.make_example(stories, row, 'x').tokens) == '17+25=42'


def test_text_parts_are_joined(plain):
  # LLaMA-Factory has `value` instead of `text`.
  parts = [{'type': 'text', 'text': 'A'}, {'type': 'text', 'value': '1'}]
  row = {'messages': [USER, {'role': 'assistant', 'content': parts}]}
  assert render(plain, row) == f'{Q}Q1{END}\n{A}[[A1{END}]]\n'


def trained_weights(tokenizer, row, **options):
  example = chat.make_example(tokenizer, row, 'x', **options)
  return example.loss_mask[example.loss_mask > 0].tolist()


def test_weight_of_a_turn_is_the_loss_mask_of_its_tokens(plain):
  for key in ('weight', 'loss_weight'):
    off, half = {**ANSWER, key: 0}, {**ANSWER_2, key: 0.5}
    row = {'messages': [{**USER, key: 0.0}, off, USER_2, half]}
    assert trained_weights(plain, row) == [0.5] * 3  # A2 and the end of the turn
    row = {'messages': [USER, {**ANSWER, key: 2}, USER_2, ANSWER_2]}
    assert trained_weights(plain, row) == [2] * 3 + [1] * 3
    assert trained_weights(plain, row, train_on='completion') == [1] * 3
  row = {'prompt': [USER], 'completion': [{**ANSWER, 'weight': 0.25}]}
  assert trained_weights(plain, row) == [0.25] * 3
  # If all weights are 0 or 1, the mask is bool.
  row = {'messages': [USER, {**ANSWER, 'weight': 0}, USER_2, ANSWER_2]}
  assert render(plain, row) == (f'{Q}Q1{END}\n{A}A1{END}\n{Q}Q2{END}\n{A}[[A2{END}]]\n')
  assert chat.make_example(plain, row, 'x').loss_mask.dtype == bool


def test_weights_of_turns_with_generation_markers(tmp_path, shared_data):
  template = tmp_path / 'marked.jinja'
  template.write_text(
    '{% for m in messages %}{% if m.role == "assistant" %}{% generation %}'
    '{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}'
    ';{% endfor %}'
  )
  row = {'messages': [USER, {**ANSWER, 'weight': 0.5}, USER_2, ANSWER_2]}
  for source in ('bytes', shared_data('stories260K/hf')):
    tokenizer = tokenizer_lib.load(source, str(template))
    mask_values = trained_weights(tokenizer, row)
    assert set(mask_values) == {0.5, 1} and mask_values == sorted(mask_values)


IMAGE = [{'type': 'image', 'url': 'x'}]
BAD_ROWS = [
  ({}, 'needs the columns messages.*it has none'),
  ({'question': 'a', 'answer': 'b'}, 'it has question, answer'),
  ({'prompt': 'a'}, 'needs the columns'),
  ({'prompt': 'a', 'completion': None}, 'completion: is null'),
  ({'text': None}, 'text: is null'),
  ({'text': 5}, 'text: is an int, must be a string'),
  ({'text': '\ud800'}, 'text: has half a surrogate'),
  ({'messages': None}, 'messages: is null'),
  ({'messages': []}, 'messages: is an empty list'),
  ({'messages': 'hi'}, 'messages: is a str, must be a list'),
  ({'messages': {'role': 'user'}}, 'messages: is a dict'),
  ({'messages': ['hi']}, r'messages\[0\]: is a str'),
  ({'messages': [{'content': 'x'}]}, r'messages\[0\].role: None is none of'),
  (
    {'messages': [USER, {'role': 'bot', 'content': 'x'}]},
    r"messages\[1\].role: 'bot' is none of system, developer, user",
  ),
  ({'messages': [{'role': 'user', 'content': None}]}, r'messages\[0\].content: is null'),
  ({'messages': [{'role': 'user', 'content': 3}]}, r'messages\[0\].content: is an int'),
  ({'messages': [{'role': 'user', 'content': IMAGE}]}, r"messages\[0\].content\[0\]: 'image': only text"),
  ({'messages': [USER]}, 'has no assistant turn, so nothing to train on'),
  ({'prompt': 'a', 'completion': [ANSWER]}, 'prompt is a str and completio'),
  ({'prompt': [USER], 'completion': []}, 'completion: is an empty list'),
  ({'prompt': [USER], 'completion': [USER, ANSWER]}, 'the answer begins with its prompt, which'),
  ({'prompt': [USER], 'completion': [USER_2]}, 'has no assistant turn'),
  ({'prompt': 1, 'completion': 2}, 'prompt: is an int, must be a list'),
  ({'messages': [USER, {**ANSWER, 'weight': -1}]}, r'messages\[1\].weight: -1 is not a number >= 0'),
  ({'messages': [USER, {**ANSWER, 'weight': True}]}, 'weight: True is no numb'),
  ({'messages': [USER, {**ANSWER, 'weight': float('inf')}]}, 'weight: inf is'),
  (
    {'messages': [{**USER, 'weight': 1}, ANSWER]},
    r'messages\[0\].weight: 1 on a turn of the user; only turns of the ass',
  ),
  (
    {'messages': [USER, with_arguments('{"a": 1')]},
    r"messages\[1\].tool_calls\[0\].function.arguments: bad JSON: Expecting ',' delimiter",
  ),
  ({'messages': [USER, with_arguments('[1]')]}, r'function.arguments: is a list, must be an object, or one as JSON'),
  ({'messages': [USER, with_arguments(7)]}, r'function.arguments: is an int, must be an object, or one as JSON'),
  ({'messages': [USER, ANSWER], 'tools': '{'}, 'tools: bad JSON'),
  ({'messages': [USER, ANSWER], 'tools': 3}, 'tools: must be a list'),
  ({'messages': [USER, ANSWER], 'chat_template_kwargs': 'x'}, "chat_template_kwargs: 'x' is no mapping"),
  ({'messages': [USER, ANSWER], 'chat_template_kwargs': {'tools': []}}, 'chat_template_kwargs: tools is given to'),
]


@pytest.mark.parametrize('row, message', BAD_ROWS)
def test_bad_rows_are_named(plain, row, message):
  with pytest.raises(InputError, match='^a.jsonl:1: .*' + message) as caught:
    chat.make_example(plain, row, 'a.jsonl:1')
  assert '\n' not in str(caught.value)


def test_message_weights_with_train_on_all_are_refused(plain):
  row = {'messages': [USER, {**ANSWER, 'weight': 1}]}
  with pytest.raises(InputError, match='x: messages have a weight, which train'):
    chat.make_example(plain, row, 'x', train_on='all')


def test_bad_prompts_are_named(plain):
  system = {'role': 'system', 'content': 'S'}
  for row, options, message in [
    ({'question': 'x'}, {}, 'needs the column prompt'),
    ({'prompt': ''}, {}, 'prompt: is empty'),
    ({'prompt': 'x'}, {'system_prompt': 'S'}, 'plain text'),
    ({'prompt': [system, USER]}, {'system_prompt': 'S'}, 'its own system message'),
    ({'messages': [ANSWER]}, {}, 'there is nothing before'),
  ]:
    with pytest.raises(InputError, match='^a.jsonl:1: .*' + message):
      prompts_lib.encode_prompt(plain, prompts_lib.prompt_of(row, 'a.jsonl:1', **options), row, 'a.jsonl:1')


def test_messages_without_a_template_are_refused(shared_data):
  stories = tokenizer_lib.load(shared_data('stories260K/hf'))
  names = 'chatml, gemma, llama3, mistral, plain'
  with pytest.raises(InputError, match=rf'need a chat template.* config\.data\.chat_template to .* one of {names}$'):
    chat.make_example(stories, {'messages': [USER, ANSWER]}, 'a.jsonl:1')


def test_a_template_that_raises_is_quoted(tmp_path):
  template = tmp_path / 'strict.jinja'
  template.write_text("{{ raise_exception('roles must alternate') }}")
  tokenizer = tokenizer_lib.load('bytes', str(template))
  with pytest.raises(InputError, match='a.jsonl:1.*roles must alternate'):
    chat.make_example(tokenizer, {'messages': [USER, ANSWER]}, 'a.jsonl:1')
