"""`openai_server.Endpoint` and `launch.serve`: replies, log-probs, streams, tool calls, bad requests and adapters.

Most tests send HTTP requests to one server of a tiny random model with a byte tokenizer, whose token ids are bytes.
"""

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
import tokenizers

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
from jaxpost.tools import completions, inference, scoring, server_files
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
  """(status, text) of the reply to a body, which is sent as JSON, or to the bytes `raw`."""
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
  """The JSON of the reply to a request that must succeed."""
  code, text = post(server[0].url, path, **body)
  assert code == 200, text
  return json.loads(text)


HELLO = [{'role': 'user', 'content': 'hello'}]


def test_chat_reply_has_messages_log_probs_usage_and_is_recorded(server, weights):
  reply = ask(
    server,
    'chat/completions',
    model='',
    messages=HELLO,
    n=2,
    max_tokens=9,
    temperature=1.0,
    logprobs=True,
    key='agent-7',
  )
  t = weights.inputs.tokenizer
  text, _ = t.render_chat(HELLO, generation_prompt=True)
  assert reply['prompt_token_ids'] == t.encode(text)
  assert reply['object'] == 'chat.completion' and reply['model'] == 'nano'
  assert [c['index'] for c in reply['choices']] == [0, 1]
  for choice in reply['choices']:
    ids = choice['token_ids']
    assert choice['message'] == {'role': 'assistant', 'content': t.decode(ids)}
    assert 1 <= len(ids) <= 9
    assert choice['finish_reason'] == ('stop' if ids[-1] in t.stop_ids else 'length')
    assert len(choice['logprobs']['content']) == len(ids)
    assert all(x['logprob'] <= 0 for x in choice['logprobs']['content'])
    shown = [t.decode([i], skip_special=False) for i in ids]
    assert [x['token'] for x in choice['logprobs']['content']] == shown
    own_bytes = [[i] if i < 256 else [*text.encode()] for i, text in zip(ids, shown)]  # of a part of a character, too
    assert [x['bytes'] for x in choice['logprobs']['content']] == own_bytes
  assert reply['choices'][0]['token_ids'] != reply['choices'][1]['token_ids']
  drawn = sum(len(c['token_ids']) for c in reply['choices'])
  assert reply['usage'] == dict(
    prompt_tokens=len(t.encode(text)), completion_tokens=drawn, total_tokens=len(t.encode(text)) + drawn
  )
  recorded = [e for e in server[1] if e['session'] == 'agent-7']
  assert [e['ids'] for e in recorded] == [c['token_ids'] for c in reply['choices']]
  assert [e['logprobs'] for e in recorded] == [
    [x['logprob'] for x in c['logprobs']['content']] for c in reply['choices']
  ]


def test_log_probs_match_forward_pass_of_model(server, weights):
  reply = ask(server, 'completions', prompt='1+1=', max_tokens=6, logprobs=1)
  choice = reply['choices'][0]
  ids = np.array([[*choice['prompt_token_ids'], *choice['token_ids']]])
  logits = tiny.logits(weights.inputs.model, weights.params, ids)[0]
  logits = logits - logits.max(-1, keepdims=True)
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  start = len(choice['prompt_token_ids'])
  expected = [logp[start - 1 + i, t] for i, t in enumerate(choice['token_ids'])]
  actual = choice['logprobs']['token_logprobs']
  assert np.abs(np.array(actual) - expected).max() < 1e-4
  assert ''.join(choice['logprobs']['tokens']).startswith(choice['text'][:1])


def test_top_logprobs_match_forward_pass_of_model(server, weights):
  """A request gets as many log-probs as it asks for, of the distribution of the model."""
  reply = ask(server, 'chat/completions', messages=HELLO, max_tokens=3, temperature=1.0, logprobs=True, top_logprobs=3)
  ids = np.array([[*reply['prompt_token_ids'], *reply['choices'][0]['token_ids']]])
  logits = tiny.logits(weights.inputs.model, weights.params, ids)[0]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  decode = weights.inputs.tokenizer.decode
  for at, entry in enumerate(reply['choices'][0]['logprobs']['content']):
    row = logp[len(reply['prompt_token_ids']) - 1 + at]
    top = np.argsort(-row)[:3]
    assert [x['token'] for x in entry['top_logprobs']] == [decode([i], skip_special=False) for i in top]
    np.testing.assert_allclose([x['logprob'] for x in entry['top_logprobs']], row[top], atol=1e-4)
  completion = ask(server, 'completions', prompt='ab', max_tokens=2, logprobs=2)
  first, _ = completion['choices'][0]['logprobs']['top_logprobs']
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
def test_echoed_prompt_has_log_probs_of_its_tokens(max_tokens, server, weights):
  """Texts, offsets and log-probs of all tokens; those of the prompt do not depend on the temperature."""
  recorded = len(server[1])
  body = dict(prompt='h\u00e9: 1+1=2', max_tokens=max_tokens, logprobs=2, echo=True, temperature=0.5)
  reply = ask(server, 'completions', **body)
  choice = reply['choices'][0]
  ids = choice['prompt_token_ids']
  assert choice['text'].startswith('h\u00e9: 1+1=2') and len(choice['token_ids']) == max_tokens
  assert len(server[1]) == recorded + max_tokens  # a request that is only scored is not recorded
  assert choice['finish_reason'] == 'length' or max_tokens
  logprobs = choice['logprobs']
  assert {len(x) for x in logprobs.values()} == {len(ids) + max_tokens}
  assert logprobs['token_logprobs'][0] is None and logprobs['top_logprobs'][0] is None
  rows = model_logprobs(weights, ids)[:-1]
  expected = rows[np.arange(len(rows)), ids[1:]]
  np.testing.assert_allclose(logprobs['token_logprobs'][1 : len(ids)], expected, atol=1e-4)
  for top, row in zip(logprobs['top_logprobs'][1 : len(ids)], rows):
    assert abs(max(top.values()) - row.max()) < 1e-4 and 1 <= len(top) <= 2
  starts = logprobs['text_offset']
  assert starts[:4] == [0, 1, 1, 2]  # two bytes are one character
  text = choice['text']
  assert ''.join(text[a:b] for a, b in zip(starts, [*starts[1:], None])) == text


def test_greedy_tokens_have_largest_log_prob_when_scored(server):
  """lm-eval tests whether a token's log-prob equals the largest one. Texts, ids and lists of both score alike."""
  drawn = ask(server, 'completions', prompt='1+1=', max_tokens=8, temperature=0, logprobs=1)['choices'][0]
  ids, start = [*drawn['prompt_token_ids'], *drawn['token_ids']], len(drawn['prompt_token_ids'])
  scoring = dict(max_tokens=0, logprobs=1, echo=True)
  scored = ask(server, 'completions', prompt=[ids, [97, 98]], **scoring)
  logprobs = scored['choices'][0]['logprobs']
  for logprob, top in zip(logprobs['token_logprobs'][start:], logprobs['top_logprobs'][start:]):
    assert logprob == max(top.values())
  sampled = drawn['logprobs']['token_logprobs']
  np.testing.assert_allclose(logprobs['token_logprobs'][start:], sampled, atol=1e-4)
  assert scored['usage'] == dict(prompt_tokens=len(ids) + 2, completion_tokens=0, total_tokens=len(ids) + 2)
  (alone,) = ask(server, 'completions', prompt='ab', n=1, **scoring)['choices']
  in_list = scored['choices'][1]['logprobs']
  assert alone['text'] == 'ab' and alone['logprobs']['tokens'] == in_list['tokens']
  np.testing.assert_allclose(alone['logprobs']['token_logprobs'][1:], in_list['token_logprobs'][1:], atol=1e-5)
  plain = ask(server, 'completions', prompt='ab', max_tokens=2, temperature=0, echo=True, n=2)['choices']
  assert [c['text'][:2] for c in plain] == ['ab', 'ab'] and plain[0]['logprobs'] is None


def test_special_token_as_stop_string_stops(server, weights):
  """<|endoftext|>, id 256, is not a stop id of the tokenizer, and the text of an answer would leave it out."""
  tokenizer = weights.inputs.tokenizer
  assert 256 not in tokenizer.stop_ids
  reply = ask(server, 'completions', prompt='ab', max_tokens=60, temperature=50.0, n=16, stop='<|endoftext|>')
  ended = [c for c in reply['choices'] if 256 in c['token_ids']]
  assert ended
  for choice in ended:
    assert choice['token_ids'].index(256) == len(choice['token_ids']) - 1
    assert choice['finish_reason'] == 'stop'


def test_prompt_may_be_text_ids_or_list(server):
  greedy = dict(max_tokens=4, temperature=0)
  from_text = ask(server, 'completions', prompt='ab', **greedy)
  from_ids = ask(server, 'completions', prompt=[97, 98], return_token_ids=True, **greedy)
  from_list = ask(server, 'completions', prompt=['ab', 'cd'], **greedy)
  assert from_text['choices'][0] == from_ids['choices'][0] == from_list['choices'][0]
  assert [choice['prompt_token_ids'] for choice in from_list['choices']] == [[97, 98], [99, 100]]  # as in vLLM
  assert 'prompt_token_ids' not in from_list


def test_a_stop_string_is_left_out(server):
  whole = ask(server, 'completions', prompt='xy', max_tokens=12, temperature=0)
  text = whole['choices'][0]['text']
  stop = text[3:5]
  cut = ask(server, 'completions', prompt='xy', max_tokens=12, temperature=0, stop=[stop])['choices'][0]
  assert cut['text'] == text[: text.index(stop)]
  assert cut['finish_reason'] == 'stop'


def test_concurrent_requests_get_same_tokens_as_alone(server):
  def tokens_of(i):
    return ask(server, 'completions', prompt=[97 + i], max_tokens=5, temperature=0)['choices'][0]['token_ids']

  alone = [tokens_of(i) for i in range(12)]
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    assert list(pool.map(tokens_of, range(12))) == alone


def events(text):
  """The parsed events of a stream, which must end with [DONE] as the API's do."""
  *parts, done, tail = text.split('\n\n')
  assert done == 'data: [DONE]' and not tail
  return [json.loads(event.removeprefix('data: ')) for event in parts]


def joined(stream, index, is_chat):
  """The text of a choice, from the parts in its events."""
  choices = [c for event in stream for c in event['choices'] if c['index'] == index]
  assert [c['finish_reason'] for c in choices[:-1]] == [None] * (len(choices) - 1)
  if is_chat:
    assert [c['delta'].get('role') for c in choices] == ['assistant'] + [None] * (len(choices) - 1)
  return ''.join(c['delta']['content'] if is_chat else c['text'] for c in choices)


@pytest.mark.parametrize('path', ['chat/completions', 'completions'])
def test_streamed_parts_join_to_the_unstreamed_reply(server, path):
  """The last event of a choice also has its finish reason and token ids, and the stream its usage."""
  is_chat = path == 'chat/completions'
  body = dict(messages=HELLO) if is_chat else dict(prompt='ab')
  body |= dict(max_tokens=60, temperature=1.0, seed=3, n=2)
  choice = ask(server, path, **body)['choices'][0]
  text = choice['message']['content'] if is_chat else choice['text']
  body['stop'] = [text[20:23]]  # three characters, so that a part may end with the beginning of the stop string
  whole = ask(server, path, **body)
  code, text = post(server[0].url, path, stream=True, stream_options={'include_usage': True}, **body)
  assert code == 200
  *stream, usage = events(text)
  assert {event['object'] for event in stream} == {'chat.completion.chunk' if is_chat else 'text_completion'}
  assert len({event['id'] for event in stream}) == 1 and len(stream) > 4
  for choice in whole['choices']:
    last = [c for event in stream for c in event['choices'] if c['index'] == choice['index']][-1]
    content = choice['message']['content'] if is_chat else choice['text']
    assert joined(stream, choice['index'], is_chat) == content
    assert last['finish_reason'] == choice['finish_reason'] and last['token_ids'] == choice['token_ids']
    assert last.get('prompt_token_ids') == choice.get('prompt_token_ids')
  assert usage['choices'] == [] and usage['usage'] == whole['usage']
  assert stream[-1].get('prompt_token_ids') == whole.get('prompt_token_ids')


def test_stream_with_log_probs_is_one_event(server):
  body = dict(prompt='ab', max_tokens=20, temperature=0, logprobs=2)
  whole = ask(server, 'completions', **body)['choices'][0]
  (event,) = events(post(server[0].url, 'completions', stream=True, **body)[1])
  assert event['choices'] == [whole]


class Paced:
  """An engine that draws one of `ids` for each release of `may_draw`, and then completes a request."""

  config = SamplerConfig(1, 8, 8, ())

  def __init__(self, ids=(97, 98, 99)):
    self.ids = np.array(ids, np.int32)
    self.may_draw = threading.Semaphore(0)

  def check(self, request):
    pass

  def serve(self, *args, next_requests, on_tokens, **kwargs):
    while requests := next_requests([], True):
      (request,) = requests
      ids = self.ids
      for place in range(len(ids)):
        self.may_draw.acquire()
        if request.is_cancelled():
          break
        on_tokens(request, ids[place : place + 1])
      zeros = np.zeros([2, len(ids)], np.float32)
      next_requests([Completion(request, ids, *zeros, finished=False, versions=ids)], False)
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


def test_parts_are_sent_as_soon_as_they_are_drawn(paced):
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


@pytest.fixture(scope='module')
def sentencepiece(tmp_path_factory):
  """A tokenizer whose decoder drops the space before the first word, as Llama's does."""
  pieces = ['<unk>', '</s>', *(f'<0x{i:02X}>' for i in range(256)), *('▁Once', '▁upon', '▁a', '▁there', 'fore', '▁')]
  model = tokenizers.models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0, byte_fallback=True)
  made = tokenizers.Tokenizer(model)
  made.normalizer = tokenizers.normalizers.Sequence(
    [tokenizers.normalizers.Prepend('▁'), tokenizers.normalizers.Replace(' ', '▁')]
  )
  decoders = tokenizers.decoders
  made.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
  )
  made.add_special_tokens(['<unk>', '</s>'])
  folder = tmp_path_factory.mktemp('sentencepiece')
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
  return tokenizer.load(folder)


@contextlib.contextmanager
def drawing(words, loaded, scorer=None):
  """(endpoint,) of a server whose engine draws the tokens of `words`, all at once."""
  engine = Paced([loaded.hf.get_vocab()[word] for word in words])
  endpoint = Endpoint(engine, loaded, name='nano', scorers={'nano': scorer} if scorer else {})
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    served = pool.submit(endpoint.serve, None)
    engine.may_draw.release(99)
    yield (endpoint,)
    endpoint.stop()
    served.result(60)


def test_text_continues_a_prompt_with_the_space_of_its_first_word(sentencepiece):
  """In text, streamed parts and tokens, with and without the prompt; special tokens are left out of text only."""

  def chunks(examples):
    size = [(len(e.tokens), 2) for e in examples]
    yield [scoring.TextScore(np.zeros(n), np.zeros((n, k), np.int32), np.zeros((n, k))) for n, k in size]

  body = dict(prompt='Once upon', max_tokens=5, logprobs=0)
  with drawing(
    ['▁there', 'fore', '<unk>', '▁a', '<0xC3>', '<0xA9>'], sentencepiece, types.SimpleNamespace(top=2, chunks=chunks)
  ) as server:
    choice = ask(server, 'completions', **body)['choices'][0]
    echoed = ask(server, 'completions', **body, echo=True)['choices'][0]
    streamed = events(post(server[0].url, 'completions', prompt='Once upon', stream=True)[1])
  assert choice['text'] == ' therefore a\u00e9' == joined(streamed, 0, False) and len(streamed) > 3
  assert echoed['text'] == 'Once upon' + choice['text']
  assert choice['logprobs']['tokens'] == [' there', 'fore', '<unk>', ' a', '\ufffd', '\ufffd']
  assert choice['logprobs']['text_offset'] == [0, 6, 10, 15, 17, 17]
  assert echoed['logprobs']['tokens'] == ['Once', ' upon', *choice['logprobs']['tokens']]
  assert echoed['logprobs']['text_offset'] == [0, 4, *(9 + x for x in choice['logprobs']['text_offset'])]


def test_errors_number_the_prompts_of_their_request(server):
  """From 0, whatever the server has answered before."""
  long = 'a' * 60
  ask(server, 'completions', prompt='ab', max_tokens=1)
  for prompt, number, n in ((long, 0, 1), (['ab', long], 1, 1), (['ab', long], 1, 2)):
    code, text = post(server[0].url, 'completions', prompt=prompt, n=n, max_tokens=100)
    assert code == 400 and f' the 60 of prompt {number} do not fit' in text, text


@pytest.mark.parametrize(
  'text, starts',
  [
    (b'a\xffb\xc3\xa9c', [0, 1, 2, 3, 3, 4]),  # an invalid byte is a character of the text
    (b'\xff\xff\xff\xff\xffb', [0, 1, 2, 3, 4, 5]),
    ('\U0001f600b'.encode(), [0, 0, 0, 0, 1]),
    (b'\xff\xe2\x82\xacb\xff', [0, 1, 1, 1, 2, 3]),
    (b'a\xff\xff\xff\xe2\x82\xacb', [0, 1, 2, 3, 4, 4, 4, 5]),
    (b'b\xe2\x82', [0, 1, 1]),  # the text ends in a part of a character
  ],
)
def test_offsets_of_tokens_are_where_their_text_begins(text, starts):
  bytes_ = tokenizer.load('bytes')
  for before in ([], [97], [0xE2]):
    assert openai_format._starts(bytes_, before, [*text]) == starts


def test_tokens_of_a_chat_have_their_text_and_bytes(sentencepiece):
  """A token that is a part of a character has its bytes, too."""
  ids = np.array(
    [sentencepiece.hf.get_vocab()[word] for word in ('▁there', '▁a', '<0xC3>', '<0xA9>', '</s>')], np.int32
  )
  completion = types.SimpleNamespace(
    tokens=ids, logprobs=np.zeros(5), stop_string='', finished=True, top_ids=None, top_logprobs=None
  )
  choice = openai_format.Translator(sentencepiece, room=9).chat_choice(0, completion, {'logprobs': True})
  assert choice['message']['content'] == 'there a\u00e9'
  entries = choice['logprobs']['content']
  assert [entry['token'] for entry in entries] == [' there', ' a', '\ufffd', '\ufffd', '</s>']
  assert [bytes(e['bytes']) for e in entries] == [b' there', b' a', b'\xc3', b'\xa9', b'</s>']


def test_a_chat_that_begins_with_a_stop_string_has_no_text(sentencepiece):
  """Its first word is decoded without the space that the stop string begins with."""
  ids = np.array([sentencepiece.hf.get_vocab()['▁there']], np.int32)
  translator = openai_format.Translator(sentencepiece, room=9)
  for before in (), translator.before:  # of a chat, and of a text
    completion = types.SimpleNamespace(tokens=ids, stop_string=' there', finished=True)
    assert translator.decode(completion, before=before) == ''
    assert translator.decode(types.SimpleNamespace(tokens=ids, stop_string='re', finished=True)) == 'the'


def test_a_name_of_no_model_is_refused_and_none_is_accepted(server):
  body = dict(prompt='a', max_tokens=1)
  code, text = post(server[0].url, 'completions', model='other', **body)
  error = json.loads(text)['error']
  assert code == 404 and error['code'] == 'model_not_found' and 'there is nano' in error['message']
  for name in ('', None, 'nano'):
    assert ask(server, 'completions', model=name, **body)['model'] == 'nano'


def test_example_request_is_one_that_the_model_answers(server):
  for template, path in (('x', 'chat/completions'), (None, 'completions')):
    of_model = types.SimpleNamespace(chat_template=template)
    words = shlex.split(server_files.example(server[0].url, 'nano', '', of_model))
    assert words[:3] == ['try:', 'curl', f'{server[0].url}/{path}']
    assert post(server[0].url, path, **{'max_tokens': 2, **json.loads(words[-1])})[0] == 200


@pytest.mark.parametrize('ends', ['client', 'server'])
def test_interrupted_stream_frees_slot_or_ends_with_error(paced, ends):
  """If the client disconnects, its request is cancelled; if the server cancels, the last event is an error."""
  endpoint, engine = paced
  body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
  engine.may_draw.release()
  with connect(paced) as connection:
    connection.sendall(LOCAL + b'Content-Length: %d\r\n\r\n' % len(body) + body)
    received = b''
    while b'"text": "a"' not in received:
      received += connection.recv(1 << 14)
    if ends == 'server':
      endpoint.shared.cancel_open()
      while b'}\n\n' not in received.partition(b'"error"')[2]:
        received += connection.recv(1 << 14)
  wait_for(lambda: not endpoint.shared.open)
  assert endpoint.counts == dict(answered=0, refused=int(ends == 'server'), cancelled=int(ends == 'client'))


@pytest.mark.parametrize('stops', [(), ('\u00e9\u00e9x',), ('bb', 'abc')])
def test_streamed_text_never_has_partial_characters_or_stop_strings(stops):
  """Tokens arrive in random runs; half characters and beginnings of stop strings are held back."""
  decode = tokenizer.load('bytes').decode
  draw = random.Random(0)
  for _ in range(200):
    text = ''.join(draw.choice(['a', 'b', 'c', 'x', '\u00e9', '\u2713']) for _ in range(20))
    whole = text[: min([len(text)] + [text.index(stop) for stop in stops if stop in text])]
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    stream, sent, end = openai_stream.TextStream(decode, stops), '', 0
    while end < len(ids):
      begin, end = end, end + draw.randint(1, 5)
      sent += stream.add(ids[begin:end])
      assert whole.startswith(sent)
    assert sent + stream.rest(whole) == whole


def test_a_seed_repeats_an_answer(server):
  def drawn(seed, n=1):
    reply = ask(server, 'completions', prompt='ab', max_tokens=16, temperature=1.0, seed=seed, n=n)
    return reply['id'], [c['token_ids'] for c in reply['choices']]

  first_id, first = drawn(5)
  second_id, second = drawn(5)
  _, other_seed = drawn(6)
  _, two_choices = drawn(5, n=2)
  assert first == second != other_seed and first_id != second_id
  assert two_choices[0] == first[0] != two_choices[1]


def test_streamed_calls_of_tools_have_an_index(server, monkeypatch):
  text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
  monkeypatch.setattr(openai_format.Translator, 'decode', lambda self, c, skip_special=True: text)
  tools = [{'type': 'function', 'function': {'name': name}} for name in 'fg']
  _, text = post(server[0].url, 'chat/completions', messages=HELLO, max_tokens=2, tools=tools, stream=True)
  delta = events(text)[0]['choices'][0]['delta']
  assert [(call['index'], call['function']['name']) for call in delta['tool_calls']] == [(0, 'f'), (1, 'g')]


def test_ids_of_tool_calls_are_unique_in_a_conversation(server, monkeypatch):
  """Clients pair calls and answers by id, and Mistral's chat template refuses ids that are not 9 characters long."""
  text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
  monkeypatch.setattr(openai_format.Translator, 'decode', lambda self, c, skip_special=True: text)
  tools, messages, ids = [{'type': 'function', 'function': {'name': 'f'}}], list(HELLO), []
  for _ in range(2):
    reply = ask(server, 'chat/completions', messages=messages, max_tokens=1, tools=tools)['choices'][0]['message']
    ids += [call['id'] for call in reply['tool_calls']]
    messages += [reply, *({'role': 'tool', 'tool_call_id': i, 'content': ''} for i in ids[-2:])]
  assert len(set(ids)) == 4 and all(len(i) == 9 and i.isalnum() for i in ids)


def test_streaming_does_not_change_the_message_of_the_session():
  message = {'role': 'assistant', 'content': None, 'tool_calls': [{'id': 'call_0'}]}
  response = dict(choices=[dict(index=0, message=message)], prompt_token_ids=[])
  text = openai_stream.EventStream(True, 'm').end(response, with_usage=False)
  assert '"index": 0' in text and message['tool_calls'] == [{'id': 'call_0'}]


def test_tool_call_is_parsed_from_text(server, monkeypatch):
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
  for reply in message, events(streamed)[0]['choices'][0]['delta']:
    assert reply['content'] == content and len(reply['tool_calls']) == 1


def test_tool_call_after_special_token_is_parsed():
  """Mistral marks calls with the special token [TOOL_CALLS], which the text of an answer leaves out."""
  mistral = tokenizer.load('bytes')
  mistral.hf.add_special_tokens({'additional_special_tokens': ['[TOOL_CALLS]']})
  ids = mistral.encode('<|im_start|>I look.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]<|im_end|>')
  completion = types.SimpleNamespace(tokens=np.array(ids), stop_string='', finished=True)
  body = {'tools': [{'type': 'function', 'function': {'name': 'f'}}]}
  choice = openai_format.Translator(mistral, room=100).chat_choice(0, completion, body)
  assert choice['finish_reason'] == 'tool_calls' and choice['message']['content'] == 'I look.'
  assert [call['function'] for call in choice['message']['tool_calls']] == [{'name': 'f', 'arguments': '{"a": 1}'}]


def test_json_answer_is_not_parsed_as_tool_call(server, monkeypatch):
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
    ('completions', dict(prompt='a', max_tokens=1, logprobs=6), 400, 'top_logprobs: a request may ask for at most 5'),
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
    ('chat/completions', dict(messages=HELLO, top_logprobs=2), 400, 'top_logprobs: chats take it with logprobs=true'),
    ('completions', dict(prompt='a', top_logprobs=2), 400, 'top_logprobs: chats take it with logprobs=true'),
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
def test_invalid_request_is_refused(server, path, body, code, words):
  status, text = post(server[0].url, path, **body)
  error = json.loads(text)['error']
  assert status == code and words in error['message']
  assert error['type'] == 'invalid_request_error' and error['code'] is None
  parameter = words.split(':')[0]
  if parameter in body:
    assert error['param'] == parameter
  assert ask(server, 'completions', prompt='a', max_tokens=1)  # the server still answers


def test_unsupported_parameters_with_neutral_values_are_accepted(server):
  neutral = dict(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, response_format={'type': 'text'}, user='me')
  assert ask(server, 'completions', prompt='a', max_tokens=1, **neutral)


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
def test_malformed_http_gets_json_error(server, data, code):
  head, _, body = raw(server, data).partition(b'\r\n\r\n')
  assert int(head.split()[1]) == code and b'application/json' in head
  assert json.loads(body)['error']['message']


def test_an_answer_to_head_has_no_body(server, caplog):
  head, _, body = raw(server, b'HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n').partition(b'\r\n\r\n')
  assert head.split()[1] == b'501' and not body
  assert not caplog.records


def test_half_sent_request_times_out(server, monkeypatch):
  monkeypatch.setattr(http_connections, 'PATIENCE_S', 0.2)
  assert raw(server, b'') == b''
  assert raw(server, b'POST /v1/comp') == b''
  assert raw(server, LOCAL + b'Content-Length: 10\r\n\r\n{') == b''


def test_slowly_sent_request_times_out(server, monkeypatch):
  """The time limit is on the whole request, so that sending a byte now and then does not extend it."""
  monkeypatch.setattr(http_connections, 'PATIENCE_S', 0.5)
  with connect(server) as connection:
    with pytest.raises(ConnectionError):
      for _ in range(100):
        connection.sendall(b'G')
        time.sleep(0.05)


def test_half_sent_requests_hold_no_threads(server):
  before = threading.active_count()
  with contextlib.ExitStack() as stack:
    for i in range(300):
      stack.enter_context(connect(server)).sendall((b'POST /v1/comp', LOCAL + b'Content-Length: 10\r\n\r\n{')[i % 2])
    assert ask(server, 'completions', prompt='a', max_tokens=1)
    assert threading.active_count() <= before + openai_server._THREADS


def test_disconnected_client_frees_its_slots(server):
  """Clients that ask for 1,024 samples each, of 50 tokens on four slots, disconnect: none of these is recorded."""
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


def test_connection_is_kept_for_further_and_pipelined_requests(server):
  """Requests one after another, up to three sent at once, and one that waits for 100 Continue."""
  body = b'{"prompt": "a", "max_tokens": 2}'
  request = LOCAL + b'Content-Length: %d\r\n\r\n' % len(body) + body
  with connect(server) as connection:
    replies = connection.makefile('rb')
    for count in (1, 1, 2, 3):
      connection.sendall(request * count)
      for _ in range(count):
        head = b''.join(iter(replies.readline, b'\r\n'))
        assert head.startswith(b'HTTP/1.1 200')
        size = int(head.lower().split(b'content-length: ')[1].split()[0])
        assert json.loads(replies.read(size))['choices']
    connection.sendall(LOCAL + b'Expect: 100-continue\r\nContent-Length: %d\r\n\r\n' % len(body))
    assert replies.readline().startswith(b'HTTP/1.1 100') and replies.readline() == b'\r\n'
    connection.sendall(body)
    assert replies.readline().startswith(b'HTTP/1.1 200')


def test_bodies_share_a_memory_limit(server, monkeypatch):
  """The limit counts bytes that have arrived: a client that announces a large body and never sends it blocks nobody."""
  monkeypatch.setattr(http_connections, '_MAX_BODIES', 1000)
  head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n{'
  with connect(server) as connection:
    connection.sendall(head)
    assert post(server[0].url, 'completions', prompt='a', max_tokens=1)[0] == 200
  assert post(server[0].url, 'completions', raw=b' ' * 2000)[0] == 503
  monkeypatch.undo()
  wait_for(lambda: not server[0]._http.held)


def test_cross_origin_requests_get_no_cors_headers(server):
  """Without CORS headers, a browser sends no JSON of another site's page, and lets the page read no reply."""
  origin = b'Host: localhost\r\nOrigin: http://evil.example\r\nConnection: close\r\n\r\n'
  preflight = raw(server, b'OPTIONS /v1/completions HTTP/1.1\r\n' + origin)
  models = raw(server, b'GET /v1/models HTTP/1.1\r\n' + origin)
  assert preflight.startswith(b'HTTP/1.1 501') and models.startswith(b'HTTP/1.1 200')
  assert b'access-control' not in (preflight + models).lower()


def test_bodies_of_all_kinds_get_an_answer(server, record_property):
  """A seeded fuzzer puts values of all types and sizes into all fields; each reply is JSON, an answer or an error."""
  record_property('cases', 2000)
  rng = random.Random(0)
  odd_values = (
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
  valid = dict(prompt='a', messages=HELLO, max_tokens=1)
  for _ in range(2000):
    body = {k: v for k, v in valid.items() if rng.random() < 0.8}
    body |= {name: rng.choice(odd_values) for name in rng.sample(fields, rng.randint(1, 3))}
    code, text = post(server[0].url, rng.choice(('completions', 'chat/completions')), **body)
    if text.startswith('data: '):
      text = text.split('\n\n')[0].removeprefix('data: ')
    reply = json.loads(text)
    refused = code == 400 or (code == 404 and body['model'] not in (None, '', 'nano'))
    assert (code == 200 and reply['choices']) or (refused and reply['error']['message']), (body, code, text)


def test_encoding_a_long_prompt_releases_the_gil(weights):
  """Otherwise other clients would wait: no pause of this thread may take half of the time of the encoding."""
  text, pauses = 'a, ' * 300_000, [0.0]
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    encoding = thread.submit(weights.inputs.tokenizer.encode, text)
    begin = time.monotonic()
    while not encoding.done():
      now = time.monotonic()
      time.sleep(0.001)
      pauses.append(time.monotonic() - now)
  assert encoding.result()[:3] == list(b'a, ') and len(encoding.result()) == len(text)
  assert sorted(pauses)[-1] < 0.5 * (time.monotonic() - begin)


def test_wrong_api_key_gets_401_before_body_is_read(weights):
  engine = completions.make_engine(weights, slots=1, max_prompt=8, max_new_tokens=8)
  endpoint = Endpoint(engine, weights.inputs.tokenizer, api_key='right')
  try:
    assert post(endpoint.url, 'completions', 'wrong', raw=b'x' * 10_000_000)[0] == 401
    for key in ('', 'wrong', 'rig\u00e9ht'.encode('latin-1').decode('latin-1')):
      code, text = post(endpoint.url, 'completions', key, prompt='a')
      assert code == 401 and 'API key' in json.loads(text)['error']['message']
    assert post(endpoint.url, 'completions', 'right', prompt='')[0] == 400
    head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nAuthorization: %s\r\n\r\n'
    assert b' 401 ' in raw((endpoint,), head % b'Bearer wrong')  # before the body is sent
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


def test_serve_command_serves_adapter_records_and_ends_on_sigterm(folder, with_adapters, tmp_path):
  child = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'launch.serve',
      f'--model={folder}',
      '--port=0',
      '--max_context=64',
      f'--adapter={with_adapters[2][1]}',
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
      assert [m['id'] for m in json.load(reply)['data']] == ['nano', 'two']  # names, not paths
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
def with_adapters(folder, weights, tmp_path_factory):
  """(endpoint, {name: weights}, values of --adapter) of a server with the base `nano` and the adapters `one`, `two`."""
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


def test_concurrent_requests_are_answered_by_the_adapter_they_name(with_adapters):
  """The engines of all adapters also share the buffers of one base."""
  endpoint, weights_of, _ = with_adapters
  prompts = ['ab', '1+2=', 'x']

  def answer(pair):
    return ask(with_adapters, 'completions', model=pair[0], prompt=pair[1], max_tokens=6, temperature=0)

  pairs = [(name, text) for text in prompts for name in weights_of]
  with concurrent.futures.ThreadPoolExecutor(9) as pool:
    replies = dict(zip(pairs, pool.map(answer, pairs)))
  draws = completions.Draws(max_new_tokens=6, temperature=0.0)
  for name, weights in weights_of.items():
    rollout = completions.complete(weights, completions.make_prompts(weights, prompts, as_chat=False), draws)
    for text, ids, length in zip(prompts, rollout.completions, rollout.lengths):
      reply = replies[name, text]
      assert reply['model'] == name
      assert reply['choices'][0]['token_ids'] == ids[:length].tolist()
  assert len({str(replies[name, 'ab']['choices']) for name in weights_of}) == 3
  base = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(weights_of['nano'].params)}
  for engine in endpoint.engines.values():
    assert base <= {x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.weights)}


SHARED_BASE = """
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


def test_adapters_share_the_base_on_several_devices(with_adapters, folder):
  done = subprocess.run(
    [sys.executable, '-c', SHARED_BASE, folder, *with_adapters[2]],
    cwd=CLONE,
    text=True,
    capture_output=True,
    env=children.environment(devices=2),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  devices, parts, *lacking = json.loads(done.stdout.splitlines()[-1])
  assert devices == 2 and parts >= 2 * 9
  assert lacking == [0, 0, 0]


def test_models_are_listed_and_others_refused(with_adapters):
  url = with_adapters[0].url
  with urllib.request.urlopen(f'{url}/models?limit=20') as reply:
    assert [m['id'] for m in json.load(reply)['data']] == ['nano', 'one', 'two']
  for body in (dict(model='three'), dict(model=['one']), dict()):
    code, text = post(url, 'completions', prompt='a', max_tokens=1, **body)
    assert code == 404 and json.loads(text)['error']['message'].endswith('there is nano, one, two')


def test_invalid_adapter_flag_is_refused(weights, with_adapters, tmp_path):
  for name, folders, words in (
    ('one', with_adapters[2], 'one is already the name of the model'),
    ('nano', ['x'], '--adapter: takes NAME=FOLDER'),
    ('nano', [f'one={tmp_path}'], 'no folder of an adapter'),
  ):
    with pytest.raises(InputError, match=words):
      completions.share_base(weights, name, folders)


def test_failure_of_one_engine_ends_the_server(weights):
  """Requests that wait for another engine get 503, and `serve` raises."""
  asked = threading.Event()

  class Broken:
    def serve(self, *args, **kwargs):
      asked.wait(60)
      raise ValueError('broken')

  class Waiting:  # accepts a request and never completes it
    config = SamplerConfig(1, 8, 8, ())

    def check(self, request):
      asked.set()

    def serve(self, *args, next_requests, **kwargs):
      while next_requests((), False) is not None and not endpoint.shared.stopped.is_set():
        time.sleep(0.01)

  endpoint = Endpoint(Waiting(), weights.inputs.tokenizer, name='nano', other_engines={'other': Broken()})
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    answer = pool.submit(post, endpoint.url, 'completions', model='nano', prompt='a', max_tokens=1)
    with pytest.raises(ValueError, match='broken'):
      endpoint.serve(on_policy.run_key(0, 3))
    code, text = answer.result(60)
  assert code == 503 and 'error' in json.loads(text)


def test_fair_lock_is_acquired_in_order_of_waiting():
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
  lock.acquire()  # after all threads that waited
  assert seen == [0, 1, 2, 3, 4]
  lock.release()
  for thread in threads:
    thread.join()


def test_listen_queue_holds_1000_connections():
  """1,000 clients connect before the server accepts any."""
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(http_connections.listen('127.0.0.1', 0))
    for _ in range(1000):
      stack.enter_context(socket.create_connection(server.getsockname(), timeout=2))
