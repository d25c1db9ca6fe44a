"""The OpenAI-compatible server: its JSON, its tokens, and many at once."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request

import children
import jax
import numpy as np
import pytest
import test_lora
import tiny

from jaxpost.data import tokenizer
from jaxpost.environments import http_connections, openai_format, openai_server, openai_stream, turns
from jaxpost.environments.agents import Session
from jaxpost.environments.episode import Episode, EpisodeLimits
from jaxpost.environments.openai_server import Endpoint
from jaxpost.environments.shared_engines import FairLock
from jaxpost.errors import InputError
from jaxpost.formats import peft
from jaxpost.models import model as model_lib
from jaxpost.rollout.sampler_config import SamplerConfig
from jaxpost.rollout.sequence import Completion
from jaxpost.stage import on_policy
from jaxpost.tools import completions, inference, scoring
from jaxpost.types import Prompt

CLONE = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tiny.folder(tmp_path_factory.mktemp('model') / 'nano')
  tokenizer.load('bytes').save(path)
  return path


@pytest.fixture(scope='module')
def weights(folder):
  return inference.from_folder(folder)


@pytest.fixture(scope='module')
def server(weights):
  engine = completions.make_engine(weights, slots=4, max_prompt=64, max_new_tokens=64, top_logprobs=5)
  seen = []
  scorers = {'nano': scoring.Scorer(weights, 5, 128)}
  endpoint = Endpoint(engine, weights.inputs.tokenizer, name='nano', record=seen.append, scorers=scorers)
  thread = threading.Thread(target=endpoint.serve, args=(on_policy.run_key(0, 3),))
  thread.start()
  yield endpoint, seen
  endpoint.stop()
  thread.join(60)
  assert not thread.is_alive()


def post(url, path, key='', raw=None, **body):
  request = urllib.request.Request(
    f'{url}/{path}',
    json.dumps(body).encode() if raw is None else raw,
    {'Content-Type': 'application/json', 'Authorization': f'Bearer {key}'},
  )
  try:
    with urllib.request.urlopen(request, timeout=300) as reply:
      return reply.status, reply.read().decode()
  except urllib.error.HTTPError as error:
    return error.code, error.read().decode()


def ask(server, path, **body):
  code, text = post(server[0].url, path, **body)
  assert code == 200, text
  return json.loads(text)


HELLO = [{'role': 'user', 'content': 'hello'}]


def test_a_chat(server, weights):
  found = ask(
    server,
    'chat/completions',
    model='x',
    messages=HELLO,
    n=2,
    max_tokens=9,
    temperature=1.0,
    logprobs=True,
    key='agent-7',
  )
  t = weights.inputs.tokenizer
  text, _ = t.render_chat(HELLO, generation_prompt=True)
  assert found['prompt_token_ids'] == t.encode(text)
  assert found['object'] == 'chat.completion' and found['model'] == 'nano'
  assert [c['index'] for c in found['choices']] == [0, 1]
  for choice in found['choices']:
    ids = choice['token_ids']
    assert choice['message'] == {'role': 'assistant', 'content': t.decode(ids)}
    assert 1 <= len(ids) <= 9
    assert choice['finish_reason'] == ('stop' if ids[-1] in t.stop_ids else 'length')
    assert len(choice['logprobs']['content']) == len(ids)
    assert all(x['logprob'] <= 0 for x in choice['logprobs']['content'])
  assert found['choices'][0]['token_ids'] != found['choices'][1]['token_ids']
  drawn = sum(len(c['token_ids']) for c in found['choices'])
  assert found['usage'] == dict(
    prompt_tokens=len(t.encode(text)), completion_tokens=drawn, total_tokens=len(t.encode(text)) + drawn
  )
  mine = [e for e in server[1] if e['session'] == 'agent-7']
  assert [e['ids'] for e in mine] == [c['token_ids'] for c in found['choices']]
  assert [e['logprobs'] for e in mine] == [[x['logprob'] for x in c['logprobs']['content']] for c in found['choices']]


def test_log_probs_are_those_of_the_model(server, weights):
  found = ask(server, 'completions', prompt='1+1=', max_tokens=6, logprobs=1)
  choice = found['choices'][0]
  ids = np.array([[*found['prompt_token_ids'], *choice['token_ids']]])
  logits = tiny.logits(weights.inputs.model, weights.params, ids)[0]
  logits = logits - logits.max(-1, keepdims=True)
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  start = len(found['prompt_token_ids'])
  want = [logp[start - 1 + i, t] for i, t in enumerate(choice['token_ids'])]
  have = choice['logprobs']['token_logprobs']
  assert np.abs(np.array(have) - want).max() < 1e-4
  assert ''.join(choice['logprobs']['tokens']).startswith(choice['text'][:1])


def test_top_logprobs(server, weights):
  """A request gets as many log-probs as it asks for, of the distribution of the model."""
  found = ask(server, 'chat/completions', messages=HELLO, max_tokens=3, temperature=1.0, logprobs=True, top_logprobs=3)
  ids = np.array([[*found['prompt_token_ids'], *found['choices'][0]['token_ids']]])
  logits = tiny.logits(weights.inputs.model, weights.params, ids)[0]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  decode = weights.inputs.tokenizer.decode
  for at, entry in enumerate(found['choices'][0]['logprobs']['content']):
    row = logp[len(found['prompt_token_ids']) - 1 + at]
    best = np.argsort(-row)[:3]
    assert [x['token'] for x in entry['top_logprobs']] == [decode([i], skip_special=False) for i in best]
    np.testing.assert_allclose([x['logprob'] for x in entry['top_logprobs']], row[best], atol=1e-4)
  text = ask(server, 'completions', prompt='ab', max_tokens=2, logprobs=2)
  first, _ = text['choices'][0]['logprobs']['top_logprobs']
  assert 1 <= len(first) <= 2 and max(first.values()) <= 0
  plain = ask(server, 'completions', prompt='ab', max_tokens=2)
  assert plain['choices'][0]['logprobs'] is None


def model_logprobs(weights, ids):
  logits = tiny.logits(weights.inputs.model, weights.params, np.array([ids]))[0]
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_an_episode_goes_on_after_a_request_that_the_engine_refuses(server, weights, monkeypatch):
  endpoint, _ = server
  episode = Episode(0, Prompt(0, np.array([97, 98], np.int32), '', {}), 0)
  session = Session(episode, turns.Turns(weights.inputs.tokenizer), EpisodeLimits(prompt=32, tokens=32), {})
  monkeypatch.setitem(endpoint.sessions, 'agent', session)

  def refuse(request):
    raise InputError('stop: is refused')

  with monkeypatch.context() as patch:
    patch.setattr(endpoint.engine, 'check', refuse)
    assert post(endpoint.url, 'completions', key='agent', prompt='ab', max_tokens=2)[0] == 400
  code, text = post(endpoint.url, 'completions', key='agent', prompt='ab', max_tokens=2)
  assert code == 200, text


@pytest.mark.parametrize('max_tokens', [0, 1])
def test_a_prompt_is_echoed_with_its_log_probs(max_tokens, server, weights):
  """Texts, offsets and log-probs of all tokens, whatever the temperature of what is drawn."""
  recorded = len(server[1])
  asked = dict(prompt='h\u00e9: 1+1=2', max_tokens=max_tokens, logprobs=2, echo=True, temperature=0.5)
  found = ask(server, 'completions', **asked)
  choice, ids = found['choices'][0], found['prompt_token_ids']
  assert choice['text'].startswith('h\u00e9: 1+1=2') and len(choice['token_ids']) == max_tokens
  assert len(server[1]) == recorded + max_tokens  # what is only scored is not recorded
  assert choice['finish_reason'] == 'length' or max_tokens
  logprobs = choice['logprobs']
  assert {len(x) for x in logprobs.values()} == {len(ids) + max_tokens}
  assert logprobs['token_logprobs'][0] is None and logprobs['top_logprobs'][0] is None
  rows = model_logprobs(weights, ids)[:-1]
  want = rows[np.arange(len(rows)), ids[1:]]
  np.testing.assert_allclose(logprobs['token_logprobs'][1 : len(ids)], want, atol=1e-4)
  for top, row in zip(logprobs['top_logprobs'][1 : len(ids)], rows):
    assert abs(max(top.values()) - row.max()) < 1e-4 and 1 <= len(top) <= 2
  starts = logprobs['text_offset']
  assert starts[:4] == [0, 1, 1, 2]  # two bytes are one character
  text = choice['text']
  assert ''.join(text[a:b] for a, b in zip(starts, [*starts[1:], None])) == text


def test_what_was_drawn_greedily_is_scored_as_the_most_probable(server):
  """lm-eval compares a token's log-prob with the largest one for equality. Texts, ids and lists give the same."""
  drawn = ask(server, 'completions', prompt='1+1=', max_tokens=8, temperature=0, logprobs=1)
  ids, start = [*drawn['prompt_token_ids'], *drawn['choices'][0]['token_ids']], len(drawn['prompt_token_ids'])
  asked = dict(max_tokens=0, logprobs=1, echo=True)
  found = ask(server, 'completions', prompt=[ids, [97, 98]], **asked)
  logprobs = found['choices'][0]['logprobs']
  for logprob, top in zip(logprobs['token_logprobs'][start:], logprobs['top_logprobs'][start:]):
    assert logprob == max(top.values())
  sampled = drawn['choices'][0]['logprobs']['token_logprobs']
  np.testing.assert_allclose(logprobs['token_logprobs'][start:], sampled, atol=1e-4)
  assert found['usage'] == dict(prompt_tokens=len(ids) + 2, completion_tokens=0, total_tokens=len(ids) + 2)
  (alone,) = ask(server, 'completions', prompt='ab', n=1, **asked)['choices']
  both = found['choices'][1]['logprobs']
  assert alone['text'] == 'ab' and alone['logprobs']['tokens'] == both['tokens']
  np.testing.assert_allclose(alone['logprobs']['token_logprobs'][1:], both['token_logprobs'][1:], atol=1e-5)
  plain = ask(server, 'completions', prompt='ab', max_tokens=2, temperature=0, echo=True, n=2)['choices']
  assert [c['text'][:2] for c in plain] == ['ab', 'ab'] and plain[0]['logprobs'] is None


def test_a_special_token_stops(server, weights):
  """This token is not a stop id of the tokenizer."""
  tokenizer = weights.inputs.tokenizer
  assert 256 not in tokenizer.stop_ids
  found = ask(server, 'completions', prompt='ab', max_tokens=60, temperature=50.0, n=16, stop='<|endoftext|>')
  ended = [c for c in found['choices'] if 256 in c['token_ids']]
  assert ended
  for choice in ended:
    assert choice['token_ids'].index(256) == len(choice['token_ids']) - 1
    assert choice['finish_reason'] == 'stop'


def test_texts_ids_and_lists_of_them(server):
  greedy = dict(max_tokens=4, temperature=0)
  text = ask(server, 'completions', prompt='ab', **greedy)
  ids = ask(server, 'completions', prompt=[97, 98], **greedy)
  both = ask(server, 'completions', prompt=['ab', 'cd'], **greedy)
  assert text['choices'][0] == ids['choices'][0] == both['choices'][0]
  assert len(both['choices']) == 2


def test_a_stop_string_is_left_out(server):
  whole = ask(server, 'completions', prompt='xy', max_tokens=12, temperature=0)
  text = whole['choices'][0]['text']
  stop = text[3:5]
  cut = ask(server, 'completions', prompt='xy', max_tokens=12, temperature=0, stop=[stop])['choices'][0]
  assert cut['text'] == text[: text.index(stop)]
  assert cut['finish_reason'] == 'stop'


def test_many_ask_at_once(server):
  def one(i):
    return ask(server, 'completions', prompt=[97 + i], max_tokens=5, temperature=0)['choices'][0]['token_ids']

  alone = [one(i) for i in range(12)]
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    assert list(pool.map(one, range(12))) == alone


def events(text):
  """The events of a stream that ends as the API's do."""
  *found, done, rest = text.split('\n\n')
  assert done == 'data: [DONE]' and not rest
  return [json.loads(event.removeprefix('data: ')) for event in found]


def joined(found, index, is_chat):
  """The text of a choice, from the parts in its events."""
  choices = [c for event in found for c in event['choices'] if c['index'] == index]
  assert [c['finish_reason'] for c in choices[:-1]] == [None] * (len(choices) - 1)
  if is_chat:
    assert [c['delta'].get('role') for c in choices] == ['assistant'] + [None] * (len(choices) - 1)
  return ''.join(c['delta']['content'] if is_chat else c['text'] for c in choices)


@pytest.mark.parametrize('path', ['chat/completions', 'completions'])
def test_a_stream_has_the_answer_in_parts(server, path):
  """The parts of each choice make up the text that is sent whole; the last event has what else a choice has."""
  is_chat = path == 'chat/completions'
  asked = dict(messages=HELLO) if is_chat else dict(prompt='ab')
  asked |= dict(max_tokens=60, temperature=1.0, seed=3, n=2)
  choice = ask(server, path, **asked)['choices'][0]
  text = choice['message']['content'] if is_chat else choice['text']
  asked['stop'] = [text[20:23]]  # of three characters, so that the end of a part may be the beginning of one
  whole = ask(server, path, **asked)
  code, text = post(server[0].url, path, stream=True, stream_options={'include_usage': True}, **asked)
  assert code == 200
  *found, usage = events(text)
  assert {event['object'] for event in found} == {'chat.completion.chunk' if is_chat else 'text_completion'}
  assert len({event['id'] for event in found}) == 1 and len(found) > 4
  for choice in whole['choices']:
    last = [c for event in found for c in event['choices'] if c['index'] == choice['index']][-1]
    content = choice['message']['content'] if is_chat else choice['text']
    assert joined(found, choice['index'], is_chat) == content
    assert last['finish_reason'] == choice['finish_reason'] and last['token_ids'] == choice['token_ids']
  assert usage['choices'] == [] and usage['usage'] == whole['usage']
  assert found[-1]['prompt_token_ids'] == whole['prompt_token_ids']


def test_log_probs_come_with_the_last_event(server):
  asked = dict(prompt='ab', max_tokens=20, temperature=0, logprobs=2)
  whole = ask(server, 'completions', **asked)['choices'][0]
  (event,) = events(post(server[0].url, 'completions', stream=True, **asked)[1])
  assert event['choices'] == [whole]


class Paced:
  """An engine that draws a token of a request when it may, and ends after three."""

  config = SamplerConfig(1, 8, 8, ())

  def __init__(self):
    self.may_draw = threading.Semaphore(0)

  def check(self, request):
    pass

  def serve(self, *args, next_requests, on_tokens, **kwargs):
    while requests := next_requests([], True):
      (request,) = requests
      ids = np.arange(97, 100, dtype=np.int32)
      for place in range(3):
        self.may_draw.acquire()
        if request.is_cancelled():
          break
        on_tokens(request, ids[place : place + 1])
      next_requests([Completion(request, ids, *np.zeros([2, 3], np.float32), finished=False, versions=ids)], False)
    return {}


@pytest.fixture
def paced(weights):
  engine = Paced()
  endpoint = Endpoint(engine, weights.inputs.tokenizer)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    served = pool.submit(endpoint.serve, None)
    yield endpoint, engine
    engine.may_draw.release(9)
    endpoint.stop()
    served.result(60)


def test_parts_are_sent_while_the_rest_is_drawn(paced):
  endpoint, engine = paced
  request = urllib.request.Request(f'{endpoint.url}/completions', b'{"prompt": "x", "max_tokens": 3, "stream": true}')
  engine.may_draw.release()
  with urllib.request.urlopen(request, timeout=60) as reply:
    assert reply.headers['Content-Type'] == 'text/event-stream'
    for letter in 'ab':
      assert json.loads(reply.readline().removeprefix(b'data: '))['choices'][0]['text'] == letter
      assert reply.readline() == b'\n'
      engine.may_draw.release()
    (last,) = events(reply.read().decode())[-1:]
  assert last['choices'][0]['finish_reason'] == 'length' and last['choices'][0]['token_ids'] == [97, 98, 99]
  assert endpoint.counts == dict(answered=1, refused=0, cancelled=0)


@pytest.mark.parametrize('ends', ['client', 'server'])
def test_a_stream_that_is_cut_off(paced, ends):
  """A client that leaves gives up its slot; if the server ends first, the last event is its error."""
  endpoint, engine = paced
  body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
  engine.may_draw.release()
  with connect(paced) as connection:
    connection.sendall(LOCAL + b'Content-Length: %d\r\n\r\n' % len(body) + body)
    got = b''
    while b'"text": "a"' not in got:
      got += connection.recv(1 << 14)
    if ends == 'server':
      endpoint.shared.cancel_open()
      while b'}\n\n' not in got.partition(b'"error"')[2]:
        got += connection.recv(1 << 14)
  wait_for(lambda: not endpoint.shared.open)
  assert endpoint.counts == dict(answered=0, refused=int(ends == 'server'), cancelled=int(ends == 'client'))


@pytest.mark.parametrize('stops', [(), ('\u00e9\u00e9x',), ('bb', 'abc')])
def test_parts_of_a_text_make_it_up(stops):
  """Whatever the parts are: half characters and halves of stop strings are held back."""
  decode = tokenizer.load('bytes').decode
  draw = random.Random(0)
  for _ in range(200):
    text = ''.join(draw.choice(['a', 'b', 'c', 'x', '\u00e9', '\u2713']) for _ in range(20))
    whole = text[: min([len(text)] + [text.index(stop) for stop in stops if stop in text])]
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    stream, got, at = openai_stream.TextStream(decode, stops), '', 0
    while at < len(ids):
      begin, at = at, at + draw.randint(1, 5)
      got += stream.add(ids[begin:at])
      assert whole.startswith(got)
    assert got + stream.rest(whole) == whole


def test_a_seed_repeats_an_answer(server):
  def drawn(seed, n=1):
    found = ask(server, 'completions', prompt='ab', max_tokens=16, temperature=1.0, seed=seed, n=n)
    return found['id'], [c['token_ids'] for c in found['choices']]

  (first, one), (second, same), (_, other), (_, two) = drawn(5), drawn(5), drawn(6), drawn(5, n=2)
  assert one == same != other and first != second
  assert two[0] == one[0] != two[1]


def test_streamed_calls_of_tools_have_an_index(server, monkeypatch):
  text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
  monkeypatch.setattr(openai_format.Translator, 'decode', lambda self, c, skip_special=True: text)
  tools = [{'type': 'function', 'function': {'name': name}} for name in 'fg']
  _, text = post(server[0].url, 'chat/completions', messages=HELLO, max_tokens=2, tools=tools, stream=True)
  delta = events(text)[0]['choices'][0]['delta']
  assert [(call['index'], call['function']['name']) for call in delta['tool_calls']] == [(0, 'f'), (1, 'g')]


def test_a_stream_leaves_the_message_as_a_session_knows_it():
  message = {'role': 'assistant', 'content': None, 'tool_calls': [{'id': 'call_0'}]}
  response = dict(choices=[dict(index=0, message=message)], prompt_token_ids=[])
  text = openai_stream.EventStream(True, 'm').end(response, with_usage=False)
  assert '"index": 0' in text and message['tool_calls'] == [{'id': 'call_0'}]


def test_calls_of_tools_are_told_apart(server, monkeypatch):
  text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
  monkeypatch.setattr(openai_format.Translator, 'decode', lambda self, c, skip_special=True: text)
  tool = {'type': 'function', 'function': {'name': 'f'}}
  choice = ask(server, 'chat/completions', messages=HELLO, max_tokens=2, tools=[tool])['choices'][0]
  assert choice['finish_reason'] == 'tool_calls'
  (call,) = choice['message']['tool_calls']
  assert call['function'] == {'name': 'f', 'arguments': '{"a": 1}'}


@pytest.mark.parametrize('before, content', [('I will look.\n', 'I will look.'), ('\n', None)])
def test_text_before_a_call_is_the_content(server, monkeypatch, before, content):
  text = before + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  monkeypatch.setattr(openai_format.Translator, 'decode', lambda self, c, skip_special=True: text)
  body = dict(messages=HELLO, max_tokens=2, tools=[{'type': 'function', 'function': {'name': 'f'}}])
  message = ask(server, 'chat/completions', **body)['choices'][0]['message']
  _, streamed = post(server[0].url, 'chat/completions', **body, stream=True)
  for found in message, events(streamed)[0]['choices'][0]['delta']:
    assert found['content'] == content and len(found['tool_calls']) == 1


def test_marks_of_calls_may_be_special_tokens():
  """As that of Mistral, which texts of answers leave out."""
  made = tokenizer.load('bytes')
  made.hf.add_special_tokens({'additional_special_tokens': ['[TOOL_CALLS]']})
  ids = made.encode('<|im_start|>I look.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]<|im_end|>')
  completion = types.SimpleNamespace(tokens=np.array(ids), stop_string='', finished=True)
  body = {'tools': [{'type': 'function', 'function': {'name': 'f'}}]}
  choice = openai_format.Translator(made, room=100).chat_choice(0, completion, body)
  assert choice['finish_reason'] == 'tool_calls' and choice['message']['content'] == 'I look.'
  assert [call['function'] for call in choice['message']['tool_calls']] == [{'name': 'f', 'arguments': '{"a": 1}'}]


def test_an_answer_in_json_is_no_call(server, monkeypatch):
  answer = '{"name": "Paris", "parameters": {}}'
  monkeypatch.setattr(openai_format.Translator, 'decode', lambda self, c, skip_special=True: answer)
  tool = {'type': 'function', 'function': {'name': 'f'}}
  choice = ask(server, 'chat/completions', messages=HELLO, max_tokens=2, tools=[tool])['choices'][0]
  assert choice['message'] == {'role': 'assistant', 'content': answer} and choice['finish_reason'] == 'length'


@pytest.mark.parametrize(
  'path, body, code, words',
  [
    ('chat/completions', dict(messages=[]), 400, 'empty list'),
    ('chat/completions', dict(messages=[{'role': 'x'}]), 400, 'none of system'),
    ('chat/completions', dict(), 400, 'messages'),
    ('completions', dict(prompt=''), 400, 'empty'),
    ('completions', dict(prompt=[9999]), 400, 'token ids'),
    ('completions', dict(prompt='a', max_tokens=999), 400, 'max_tokens: 999 tokens to draw'),
    ('completions', dict(prompt='a' * 130), 400, 'max_tokens: 1 tokens to draw and the 130 of'),
    ('completions', dict(prompt='a' * 130), 400, '--max_context'),
    ('completions', dict(prompt='a', temperature='hot'), 400, 'temperature'),
    ('completions', dict(prompt='a', max_tokens=1, logprobs=6), 400, 'top_logprobs: 6 are more than'),
    ('completions', dict(prompt='a', temperature=-1), 400, 'temperature: -1.0 is not from 0'),
    ('completions', dict(prompt='a', top_p=2), 400, 'top_p: 2.0 is not from 0 to 1'),
    ('completions', dict(prompt='a', seed=-1), 400, 'seed: -1 is not from 0'),
    ('completions', dict(raw=b'{'), 400, 'Expecting'),
    ('completions', dict(raw=b'[]'), 400, 'JSON object'),
    ('nothing', dict(), 404, 'nothing'),
    ('completions', dict(prompt='a', n=0), 400, 'n: 0 is not between 1 and 1024'),
    ('completions', dict(prompt='a', n=3000), 400, 'n: 3000 is not between 1 and 1024'),
    ('completions', dict(prompt=['a'] * 5, n=300), 400, 'n: 300 is not between 1 and 204, for 5 prompts'),
    ('completions', dict(prompt=[5.5]), 400, 'prompt: token ids'),
    ('completions', dict(prompt=[[97], 3]), 400, 'prompt: token ids'),
    ('completions', dict(raw=b'[' * 100_000), 400, 'nested too deeply'),
    ('completions', dict(raw=b'{"prompt": "a", "temperature": NaN}'), 400, 'temperature: nan'),
    ('completions', dict(raw=b'{"prompt": "a", "max_tokens": 1e400}'), 400, 'max_tokens: inf'),
    ('completions', dict(prompt='a', seed=10**400), 400, 'seed'),
    ('completions', dict(prompt='a', logit_bias={'5': 1}), 400, 'logit_bias: is not supported'),
    ('completions', dict(prompt='a', max_tokens=0), 400, 'max_tokens: 0 is less than 1; with echo'),
    ('completions', dict(prompt='a', echo='yes'), 400, "echo: 'yes' is not true or false"),
    ('completions', dict(prompt='a', echo=True, max_tokens=0, logprobs=6), 400, 'logprobs: 6 is not from 0 to 5'),
    ('completions', dict(prompt='a', echo=True, max_tokens=0, logprobs=-1), 400, 'logprobs: -1 is not from 0 to 5'),
    ('completions', dict(prompt='', echo=True, max_tokens=0, logprobs=1), 400, 'prompt: is empty'),
    ('completions', dict(prompt=[97] * 129, echo=True, max_tokens=0, logprobs=0), 400, 'prompt: 129 tokens are more'),
    ('chat/completions', dict(messages=HELLO, echo=True), 400, 'echo: chats have none'),
    ('chat/completions', dict(messages=HELLO, response_format={'type': 'json_object'}), 400, 'response_format'),
    ('chat/completions', dict(messages=HELLO, presence_penalty=0.5), 400, 'presence_penalty'),
    ('completions', dict(prompt='a', max_tokens=-1), 400, 'max_tokens: -1 is less than 1'),
    ('completions', dict(prompt=['a'] * 1025, max_tokens=1), 400, 'prompt: 1025 prompts are more than 1024'),
    (
      'completions',
      dict(prompt='a', max_token=1),
      400,
      'max_token: there is no such parameter; did you mean max_tokens',
    ),
    ('chat/completions', dict(messages=HELLO, functions=[]), 400, 'functions: there is no such parameter'),
    ('chat/completions', dict(messages=HELLO, parallel_tool_calls=False), 400, 'parallel_tool_calls: is not supported'),
    ('completions', dict(prompt='a', stop=['b'] * 65), 400, 'stop: at most 64'),
    ('completions', dict(prompt='a', stop='b' * 1025), 400, 'stop: at most 64'),
    ('completions', dict(prompt='a' * 2000), 400, 'prompt: 2000 characters are more than 1664'),
    ('chat/completions', dict(messages=HELLO * 200), 400, 'characters are more than 1664'),
    ('completions', dict(prompt='a', stream='yes'), 400, "stream: 'yes' is not true or false"),
    ('completions', dict(prompt='a', stream=True, stream_options=7), 400, 'stream_options: 7 is not an object'),
    ('chat/completions', dict(messages=[*HELLO, {'role': 'assistant', 'tool_calls': 7}]), 400, 'tool_calls: is an int'),
  ],
)
def test_what_cannot_be_asked(server, path, body, code, words):
  have, text = post(server[0].url, path, **body)
  error = json.loads(text)['error']
  assert have == code and words in error['message']
  assert error['type'] == 'invalid_request_error' and error['code'] is None
  assert error['param'] == (words.split(':')[0] if words.split(':')[0] in body else error['param'])
  assert ask(server, 'completions', prompt='a', max_tokens=1)  # still there


def test_what_asks_for_nothing_is_taken(server):
  plain = dict(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, response_format={'type': 'text'}, user='me')
  assert ask(server, 'completions', prompt='a', max_tokens=1, **plain)


def connect(server, patience=30):
  host, port = server[0].url.removeprefix('http://').removesuffix('/v1').split(':')
  return socket.create_connection((host, int(port)), timeout=patience)


def raw(server, data):
  """Sends bytes and returns all that comes back until the server closes the connection."""
  with connect(server) as connection:
    connection.sendall(data)
    return b''.join(iter(lambda: connection.recv(1 << 16), b''))


def wait_for(condition):
  deadline = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


LOCAL = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'


@pytest.mark.parametrize(
  'data, code',
  [
    (LOCAL + b'Content-Length: abc\r\n\r\n', 400),
    (LOCAL + b'Content-Length: -1\r\n\r\n', 400),
    (LOCAL + b'Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}', 400),
    (LOCAL + b'\r\n{}', 411),
    (b'nonsense\r\n\r\n', 400),
    (LOCAL + b'Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n', 411),
    (LOCAL + b'Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}', 411),
    (LOCAL + b'Content-Length: 99999999999999\r\n\r\n', 413),
    (LOCAL + b'Content-Length: 20000000\r\n\r\n', 413),
    (b'POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}', 403),
    (b'DELETE /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n', 501),
    (b'GET /' + b'a' * 70_000 + b' HTTP/1.1\r\n\r\n', 414),
    (b'GET / HTTP/1.1\r\nHost: localhost\r\nA: ' + b'a' * 70_000 + b'\r\n\r\n', 431),
  ],
)
def test_a_broken_request_gets_an_error_of_the_api(server, data, code):
  head, _, body = raw(server, data).partition(b'\r\n\r\n')
  assert int(head.split()[1]) == code and b'application/json' in head
  assert json.loads(body)['error']['message']


def test_an_answer_to_head_has_no_body(server, caplog):
  head, _, body = raw(server, b'HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n').partition(b'\r\n\r\n')
  assert head.split()[1] == b'501' and not body
  assert not caplog.records


def test_half_a_request_is_not_waited_for(server, monkeypatch):
  monkeypatch.setattr(http_connections, 'PATIENCE_S', 0.2)
  assert raw(server, b'') == b''
  assert raw(server, b'POST /v1/comp') == b''
  assert raw(server, LOCAL + b'Content-Length: 10\r\n\r\n{') == b''


def test_a_slow_request_is_not_waited_for(server, monkeypatch):
  """The limit is on the whole request, so that a byte now and then does not extend it."""
  monkeypatch.setattr(http_connections, 'PATIENCE_S', 0.5)
  with connect(server) as connection:
    with pytest.raises(ConnectionError):
      for _ in range(100):
        connection.sendall(b'G')
        time.sleep(0.05)


def test_half_requests_hold_no_threads(server):
  before = threading.active_count()
  with contextlib.ExitStack() as stack:
    for i in range(300):
      stack.enter_context(connect(server)).sendall((b'POST /v1/comp', LOCAL + b'Content-Length: 10\r\n\r\n{')[i % 2])
    assert ask(server, 'completions', prompt='a', max_tokens=1)
    assert threading.active_count() <= before + openai_server._THREADS


def test_a_client_that_leaves_gives_up_its_slots(server):
  """All four slots are taken for as long as possible; the clients leave, and what they had asked for is not drawn."""
  endpoint, seen = server
  cancelled, recorded = endpoint.counts['cancelled'], len(seen)
  body = json.dumps(dict(prompt='leaving', max_tokens=50, n=1024, temperature=1.0)).encode()
  for _ in range(2):
    with connect(server) as connection:
      connection.sendall(LOCAL + b'Content-Length: %d\r\n\r\n' % len(body) + body)
      wait_for(lambda: endpoint.shared.open)
  assert ask(server, 'completions', prompt='a', max_tokens=1)
  assert endpoint.counts['cancelled'] == cancelled + 2 and not endpoint.shared.open
  assert len(seen) == recorded + 1


def test_requests_on_one_connection(server):
  """One after another, and one sent early."""
  body = b'{"prompt": "a", "max_tokens": 2}'
  one = LOCAL + b'Content-Length: %d\r\n\r\n' % len(body) + body
  with connect(server) as connection:
    replies = connection.makefile('rb')
    for count in (1, 1, 2, 3):
      connection.sendall(one * count)
      for _ in range(count):
        head = b''.join(iter(replies.readline, b'\r\n'))
        assert head.startswith(b'HTTP/1.1 200')
        size = int(head.lower().split(b'content-length: ')[1].split()[0])
        assert json.loads(replies.read(size))['choices']
    connection.sendall(LOCAL + b'Expect: 100-continue\r\nContent-Length: %d\r\n\r\n' % len(body))
    assert replies.readline().startswith(b'HTTP/1.1 100') and replies.readline() == b'\r\n'
    connection.sendall(body)
    assert replies.readline().startswith(b'HTTP/1.1 200')


def test_requests_share_a_limit(server, monkeypatch):
  """The limit counts bytes that have arrived: a client that announces more and never sends it blocks no other."""
  monkeypatch.setattr(http_connections, '_MAX_BODIES', 1000)
  head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n{'
  with connect(server) as half:
    half.sendall(head)
    assert post(server[0].url, 'completions', prompt='a', max_tokens=1)[0] == 200
  assert post(server[0].url, 'completions', raw=b' ' * 2000)[0] == 503
  monkeypatch.undo()
  wait_for(lambda: not server[0]._http.held)


def test_no_page_of_another_site_may_ask(server):
  """CORS is off: a browser asks for permission first, and reads no answer."""
  origin = b'Host: localhost\r\nOrigin: http://evil.example\r\nConnection: close\r\n\r\n'
  asked = raw(server, b'OPTIONS /v1/completions HTTP/1.1\r\n' + origin)
  read = raw(server, b'GET /v1/models HTTP/1.1\r\n' + origin)
  assert asked.startswith(b'HTTP/1.1 501') and read.startswith(b'HTTP/1.1 200')
  assert b'access-control' not in (asked + read).lower()


def test_bodies_of_all_kinds_get_an_answer(server, record_property):
  """A seeded fuzzer: values of all types and sizes in all fields; every reply is JSON, an answer or an error."""
  record_property('cases', 2000)
  rng = random.Random(0)
  odd = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    '',
    'a',
    '\ud800',
    [],
    [1],
    [1.5],
    ['a', 1],
    [[]],
    {},
    {'a': []},
    'x' * 2000,
  )
  fields = 'model messages prompt n max_tokens max_completion_tokens temperature top_p top_k min_p min_tokens seed'
  fields = f'{fields} stop logprobs top_logprobs tools chat_template_kwargs stream best_of logit_bias'.split()
  known = dict(prompt='a', messages=HELLO, max_tokens=1)
  for _ in range(2000):
    body = {k: v for k, v in known.items() if rng.random() < 0.8}
    body |= {name: rng.choice(odd) for name in rng.sample(fields, rng.randint(1, 3))}
    code, text = post(server[0].url, rng.choice(('completions', 'chat/completions')), **body)
    if text.startswith('data: '):
      text = text.split('\n\n')[0].removeprefix('data: ')
    found = json.loads(text)
    assert (code == 200 and found['choices']) or (code == 400 and found['error']['message']), (body, code, text)


def test_other_clients_do_not_wait_for_a_long_prompt(weights):
  """The lock of the interpreter is free while a text becomes tokens."""
  text, longest = 'a, ' * 300_000, [0.0]
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    encoding = thread.submit(weights.inputs.tokenizer.encode, text)
    begin = time.monotonic()
    while not encoding.done():
      now = time.monotonic()
      time.sleep(0.001)
      longest.append(time.monotonic() - now)
  assert encoding.result()[:3] == list(b'a, ') and len(encoding.result()) == len(text)
  assert sorted(longest)[-1] < 0.5 * (time.monotonic() - begin)


def test_a_key_is_asked_for(weights):
  engine = completions.make_engine(weights, slots=1, max_prompt=8, max_new_tokens=8)
  endpoint = Endpoint(engine, weights.inputs.tokenizer, api_key='right')
  try:
    assert post(endpoint.url, 'completions', 'wrong', raw=b'x' * 10_000_000)[0] == 401
    for key in ('', 'wrong', 'rig\u00e9ht'.encode('latin-1').decode('latin-1')):
      code, text = post(endpoint.url, 'completions', key, prompt='a')
      assert code == 401 and 'API key' in json.loads(text)['error']['message']
    assert post(endpoint.url, 'completions', 'right', prompt='')[0] == 400
    head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nAuthorization: %s\r\n\r\n'
    assert b' 401 ' in raw((endpoint,), head % b'Bearer wrong')  # before the body is there
    assert endpoint._http.held == 0
    assert b' 400 ' in raw(
      (endpoint,), (head % b'bearer  right').replace(b'Auth', b'Connection: close\r\nAuth') + b'{}'
    )
  finally:
    endpoint.close()


def test_a_taken_port_is_refused(server, weights):
  port = int(server[0].url.split(':')[2].split('/')[0])
  with pytest.raises(InputError, match='another --port'):
    Endpoint(server[0].engine, weights.inputs.tokenizer, port=port)


def test_the_command(folder, several, tmp_path):
  child = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'launch.serve',
      f'--model={folder}',
      '--port=0',
      '--max_context=64',
      f'--adapter={several[2][1]}',
      f'--record={tmp_path}/asked.jsonl',
    ],
    cwd=CLONE,
    env=os.environ,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    url = child.stdout.readline().strip()
    words = shlex.split(next(line for line in child.stderr if line.startswith('try: curl')))
    assert words[2] == f'{url}/chat/completions' and json.loads(words[-1])['model'] == 'nano'
    code, _ = post(url, 'chat/completions', **json.loads(words[-1]) | dict(max_tokens=3, model='two'))
    with urllib.request.urlopen(f'{url}/models') as reply:
      assert [m['id'] for m in json.load(reply)['data']] == ['nano', 'two']  # no path
    child.send_signal(signal.SIGTERM)
    assert code == 200 and child.wait(60) == 0
  finally:
    child.kill()
    child.stdout.close()
    child.stderr.close()
  row = json.loads((tmp_path / 'asked.jsonl').read_text())
  assert len(row['ids']) == len(row['logprobs']) <= 3
  assert row['model'] == 'two'


@pytest.mark.parametrize(
  'flag, words',
  [
    ('--record=/proc/nothing/here.jsonl', '--record: /proc/nothing/here.jsonl: No such file'),
    ('--api_key_file=/proc/nothing/key', '--api_key_file: /proc/nothing/key'),
    ('--api_key_file=/dev/null', 'must hold one line'),
  ],
)
def test_files_that_cannot_be_used_are_refused_before_weights_are_read(flag, words):
  command = [sys.executable, '-m', 'launch.serve', '--model=/no/such/folder', flag]
  done = subprocess.run(command, cwd=CLONE, env=os.environ, capture_output=True, text=True)
  assert done.returncode == 2 and words in done.stderr and 'Traceback' not in done.stderr


# -------------------------------------------------------------------- adapters


@pytest.fixture(scope='module')
def several(folder, weights, tmp_path_factory):
  """(endpoint, {name: weights}, values of --adapter), a base and two on it."""
  root, folders = tmp_path_factory.mktemp('adapters'), []
  for name, rank, seed in ('one', 2, 0), ('two', 3, 1):
    model = model_lib.build(dataclasses.replace(weights.inputs.model.config, lora=(rank, 9.0, False, 'q|o|gate')))
    params = test_lora.params_of(model, seed, b=0.5)
    peft.writer(model, params, folder)(root / name)
    folders.append(f'{name}={root / name}')
  engines = completions.make_engines(
    completions.share_base(weights, 'nano', folders), slots=2, max_prompt=32, max_new_tokens=32
  )
  endpoint = Endpoint(engines.pop('nano'), weights.inputs.tokenizer, name='nano', other_engines=engines)
  thread = threading.Thread(target=endpoint.serve, args=(on_policy.run_key(0, 3),))
  thread.start()
  yield (endpoint, {'nano': weights} | inference.adapters(weights, folders), folders)
  endpoint.stop()
  thread.join(60)
  assert not thread.is_alive()


def test_a_body_names_an_adapter(several):
  """Many at once; each is answered by whom it asks, from the one base."""
  endpoint, each, _ = several
  prompts = ['ab', '1+2=', 'x']

  def one(pair):
    return ask(several, 'completions', model=pair[0], prompt=pair[1], max_tokens=6, temperature=0)

  pairs = [(name, text) for text in prompts for name in each]
  with concurrent.futures.ThreadPoolExecutor(9) as pool:
    found = dict(zip(pairs, pool.map(one, pairs)))
  draws = completions.Draws(max_new_tokens=6, temperature=0.0)
  for name, w in each.items():
    rollout = completions.complete(w, completions.make_prompts(w, prompts, as_chat=False), draws)
    for text, ids, length in zip(prompts, rollout.completions, rollout.lengths):
      mine = found[name, text]
      assert mine['model'] == name
      assert mine['choices'][0]['token_ids'] == ids[:length].tolist()
  assert len({str(found[name, 'ab']['choices']) for name in each}) == 3
  own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(each['nano'].params)}
  for engine in endpoint.engines.values():
    assert own <= {x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.weights)}


SEVERAL = """
import json, sys
import jax
from jaxpost.tools import completions, inference

weights = inference.from_folder(sys.argv[1])
engines = completions.make_engines(
    completions.share_base(weights, 'base', sys.argv[2:]), slots=2, max_prompt=8, max_new_tokens=8)
where = {name: {
    shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.weights)
    for shard in x.addressable_shards} for name, engine in engines.items()}
print(json.dumps([
    jax.device_count(), len(where['base']),
    *(len(where['base'] - found) for found in where.values())]))
"""


def test_adapters_share_the_base_on_several_devices(several, folder):
  done = subprocess.run(
    [sys.executable, '-c', SEVERAL, folder, *several[2]],
    cwd=CLONE,
    text=True,
    capture_output=True,
    env=children.environment(devices=2),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  devices, parts, *lacking = json.loads(done.stdout.splitlines()[-1])
  assert devices == 2 and parts >= 2 * 9
  assert lacking == [0, 0, 0]


def test_models_are_listed_and_others_refused(several):
  url = several[0].url
  with urllib.request.urlopen(f'{url}/models?limit=20') as reply:
    assert [m['id'] for m in json.load(reply)['data']] == ['nano', 'one', 'two']
  for body in (dict(model='three'), dict(model=['one']), dict()):
    code, text = post(url, 'completions', prompt='a', max_tokens=1, **body)
    assert code == 404 and json.loads(text)['error']['message'].endswith('there is nano, one, two')


def test_adapters_that_cannot_be(weights, several, tmp_path):
  for name, folders, words in (
    ('one', several[2], 'one is already the name of the model'),
    ('nano', ['x'], '--adapter: takes NAME=FOLDER'),
    ('nano', [f'one={tmp_path}'], 'no folder of an adapter'),
  ):
    with pytest.raises(InputError, match=words):
      completions.share_base(weights, name, folders)


def test_a_failure_of_one_ends_all(weights):
  """Requests that wait are refused, and `serve` raises."""
  asked = threading.Event()

  class Broken:
    def serve(self, *args, **kwargs):
      asked.wait(60)
      raise ValueError('broken')

  class Waiting:  # has been asked, and is never done
    config = SamplerConfig(1, 8, 8, ())

    def check(self, request):
      asked.set()

    def serve(self, *args, next_requests, **kwargs):
      while next_requests((), False) is not None and not endpoint.shared.stopped:
        time.sleep(0.01)

  endpoint = Endpoint(Waiting(), weights.inputs.tokenizer, name='nano', other_engines={'other': Broken()})
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    answer = pool.submit(post, endpoint.url, 'completions', model='nano', prompt='a', max_tokens=1)
    with pytest.raises(ValueError, match='broken'):
      endpoint.serve(on_policy.run_key(0, 3))
    code, text = answer.result(60)
  assert code == 503 and 'error' in json.loads(text)


def test_turns_are_in_order():
  lock, seen = FairLock(), []

  def wait(i):
    with lock:
      seen.append(i)

  lock.acquire()
  threads = [threading.Thread(target=wait, args=(i,)) for i in range(5)]
  for i, thread in enumerate(threads):
    thread.start()
    while len(lock._queue) < i + 2:
      time.sleep(0.001)
  lock.release()
  lock.acquire()  # after all who have waited
  assert seen == [0, 1, 2, 3, 4]
  lock.release()
  for thread in threads:
    thread.join()


def test_connections_wait_until_they_are_accepted():
  """1,000 clients connect before the server accepts any."""
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(http_connections.listen('127.0.0.1', 0))
    for _ in range(1000):
      stack.enter_context(socket.create_connection(server.getsockname(), timeout=2))
