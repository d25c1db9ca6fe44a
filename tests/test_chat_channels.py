"""Tests of the trained tokens of chats with channels, tool calls or other turn ends, in templates without markers."""

import numpy as np
import pytest

from jaxpost.data import chat, prompts
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError

# The part of gpt-oss's template that decides which messages, channels and ends a chat has.
GPT_OSS = """\
{%- set last = namespace(name=none) %}{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
  {%- set call = m.tool_calls[0].function or m.tool_calls[0] %}
  {%- set final = namespace(found=false) %}
  {%- for later in messages[loop.index:] if later.role == 'assistant' and not later.tool_calls %}
    {%- set final.found = true %}
  {%- endfor %}
  {%- if (m.content or m.thinking) and not final.found %}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
  {%- endif %}
  {{- '<|start|>assistant to=' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson }}
  {{- '<|call|>' }}{%- set last.name = call.name %}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
  {%- if 'thinking' in m %}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
  {%- endif %}
  {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}
  {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- set last.name = none %}
{%- elif m.role == 'tool' %}
  {%- if last.name is none %}{{- raise_exception('no call before the answer of a tool') }}{%- endif %}
  {{- '<|start|>' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}
  {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
# Llama 3.1 shows no content beside a tool call, and ends a call with another token than an answer.
LLAMA = """\
{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
  {%- set call = m.tool_calls[0].function %}
  {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eom_id|>' }}
{%- else %}{{- m.content + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
# Mistral has no generation prompt, and refuses consecutive turns of one role unless they are tool calls.
MISTRAL = """\
{%- set asked = namespace(next=true) %}{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}
  {%- if (m.role == 'user') != asked.next %}{{- raise_exception('roles must alternate') }}{%- endif %}
  {%- set asked.next = not asked.next %}
{%- endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' + m.tool_calls[0].function | tojson + ']</s>' }}
{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}{%- endfor %}"""
SPECIAL = '<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|start_header_id|> <|end_header_id|>'.split()
SPECIAL += '<|eot_id|> <|eom_id|> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]'.split()

USER = {'role': 'user', 'content': 'Q'}
ANSWER = {'role': 'assistant', 'content': 'A'}
CALL = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'f', 'arguments': {'a': 1}}}]}
RESULT = {'role': 'tool', 'content': 'R'}
Q, START = '<|start|>user<|message|>Q<|end|>', '<|start|>assistant'
FINAL, COMMENTARY = '<|channel|>final<|message|>', ' to=f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
ANALYSIS = '<|channel|>analysis<|message|>hm<|end|>'


@pytest.fixture(scope='module')
def load(tmp_path_factory):
  """Returns a function from a template to a byte tokenizer with it and the special tokens of all templates."""
  tokenizer = tokenizer_lib.load('bytes')
  tokenizer.hf.add_tokens(SPECIAL, special_tokens=True)
  folder = tmp_path_factory.mktemp('tokenizer')
  tokenizer.save(folder)
  return lambda template: tokenizer_lib.load(folder, template)


def render(tokenizer, messages, **options):
  """Returns the text of a chat with [[trained]] parts, each of which begins where a prompt of the sampler ends."""
  example = chat.make_example(tokenizer, {'messages': messages}, 'a.jsonl:1', **options)
  text, boundaries = '', np.flatnonzero(np.diff(example.loss_mask)) + 1
  for tokens, mask in zip(np.split(example.tokens, boundaries), np.split(example.loss_mask, boundaries)):
    part = tokenizer.decode(tokens, skip_special=False)
    text += f'[[{part}]]' if mask[0] else part
  assert example.tokens.tolist() == tokenizer.encode(tokenizer.render_chat(messages)[0])  # no token is cut in two
  return text


@pytest.mark.parametrize(
  'messages, want',
  [
    ([USER, ANSWER], f'{Q}{START}[[{FINAL}A<|return|>]]'),
    ([USER, ANSWER, USER, ANSWER], f'{Q}{START}[[{FINAL}A<|end|>]]{Q}{START}[[{FINAL}A<|return|>]]'),
    ([USER, ANSWER | {'thinking': 'hm'}], f'{Q}{START}[[{ANALYSIS}{START}{FINAL}A<|return|>]]'),
    ([USER, CALL], f'{Q}{START}[[{COMMENTARY}]]'),
    ([USER, CALL | {'thinking': 'hm'}], f'{Q}{START}[[{ANALYSIS}{START}{COMMENTARY}]]'),
    (
      [USER, CALL, RESULT, ANSWER],
      f'{Q}{START}[[{COMMENTARY}]]<|start|>f to=assistant<|channel|>commentary<|message|>"R"<|end|>{START}'
      f'[[{FINAL}A<|return|>]]',
    ),
  ],
)
def test_gpt_oss_trains_assistant_messages_from_their_channel(load, messages, want):
  tokenizer = load(GPT_OSS)
  assert render(tokenizer, messages) == want
  prompt = prompts.prompt_tokens(tokenizer, {'messages': messages}, 'x')
  assert want.replace('[[', '').replace(']]', '').startswith(tokenizer.decode(prompt, skip_special=False))


def test_last_answer_is_trained_where_the_template_drops_earlier_reasoning(load):
  # The template shows the reasoning before the call to the sampler, and drops it once the answer follows.
  row = [USER, CALL | {'thinking': 'hm'}, RESULT, ANSWER | {'thinking': 'so'}]
  text = render(load(GPT_OSS), row, train_on='completion')
  assert 'hm' not in text
  assert text.endswith(f'{START}[[{ANALYSIS.replace("hm", "so")}{START}{FINAL}A<|return|>]]')
  assert render(load(GPT_OSS), [*row[:3], ANSWER], train_on='completion').endswith(f'{START}[[{FINAL}A<|return|>]]')


@pytest.mark.parametrize('key', ['thinking', 'reasoning_content', 'reasoning'])
def test_dropped_reasoning_is_refused_by_any_key(load, key):
  with pytest.raises(InputError, match='a.jsonl:1: message 1: the chat template drops its reasoning'):
    render(load(GPT_OSS), [USER, ANSWER | {key: 'hm'}, USER, ANSWER])


def test_llama_trains_tool_calls_and_their_end(load):
  header = '<|start_header_id|>{}<|end_header_id|>\n\n'.format
  prompt, call = header('user') + 'Q<|eot_id|>' + header('assistant'), '{"name": "f", "parameters": {"a": 1}}<|eom_id|>'
  assert render(load(LLAMA), [USER, CALL]) == f'{prompt}[[{call}]]'
  result_and_answer = f'{header("tool")}R<|eot_id|>{header("assistant")}[[A<|eot_id|>]]'
  assert render(load(LLAMA), [USER, CALL, RESULT, ANSWER]) == f'{prompt}[[{call}]]{result_and_answer}'


def test_mistral_trains_tool_calls_and_refuses_repeated_roles(load):
  call = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]</s>'
  text = render(load(MISTRAL), [USER, CALL, RESULT, ANSWER])
  assert text.startswith(f'[INST] Q[/INST][[{call}]][TOOL_RESULTS] R[/TOOL_RESULTS]') and text.endswith('[[A</s>]]')
  with pytest.raises(InputError, match='a.jsonl:1: the chat template of .* refuses it: roles must alternate'):
    render(load(MISTRAL), [USER, ANSWER, ANSWER])
