"""Translates bodies of OpenAI's API into requests of the engine, and completions into response bodies."""

import difflib
import functools
import itertools
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpost.data import messages as messages_lib
from jaxpost.data import prompts as prompts_lib
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.environments import turns
from jaxpost.errors import InputError, refuse
from jaxpost.rollout.sequence import Completion, Request

_LARGEST = 1e300  # limit of numbers; excludes NaN and infinity, which Python reads although JSON has none
_KINDS = {int: 'an integer', float: 'a finite number', bool: 'true or false', dict: 'an object'}
_INTEGERS = ('top_k', 'min_tokens', 'seed')
# Parameters that are not supported, with the values that are accepted because they change nothing.
_UNSUPPORTED = {
  'frequency_penalty': (0,),
  'presence_penalty': (0,),
  'repetition_penalty': (1,),
  'logit_bias': ({},),
  'response_format': ({'type': 'text'},),
  'tool_choice': ('auto',),
  'suffix': ('',),
  'best_of': (1,),
  'parallel_tool_calls': (True,),
}
# Parameters that change no answer.
_IGNORED = 'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key', 'return_token_ids'
MAX_ANSWERS = 1024  # choices of one body, over all of its prompts
_MAX_STOPS, _MAX_STOP = 64, 1024  # stop strings of a body, and characters of each: each block is searched for all
_READ = 'model messages prompt echo n max_tokens max_completion_tokens stop logprobs top_logprobs tools'.split()
_READ += ['chat_template_kwargs', 'stream', 'stream_options']
_FIELDS = ('temperature', 'top_p', 'top_k', 'min_p', 'min_tokens', 'seed')


class Translator:
  """Translates between bodies of chats or completions and the engine's records.

  A body with `messages` is a chat; a body with `prompt` is a completion.

  Args:
    tokenizer: chats need its chat template.
    room: longest sequence of the engine, in tokens; limits `max_tokens` where a body names none.
  """

  def __init__(self, tokenizer: Tokenizer, room: int) -> None:
    self._tokenizer = tokenizer
    self._room = room
    self._max_characters = room * tokenizer.longest_token  # of a prompt; 16 MB take a minute to tokenize

  @functools.cached_property
  def before(self) -> list[int]:
    """Token ids that are decoded before those of a completion: some tokenizers drop a space where text begins."""
    return self._tokenizer.encode('a')

  def chat_prompt(self, body: dict) -> np.ndarray:
    """Returns the token ids of the messages of a chat; InputError if they are malformed."""
    messages = messages_lib.check_messages(body.get('messages'), 'messages')
    return prompts_lib.encode_prompt(self._tokenizer, messages, body, 'messages', self._max_characters)

  def text_prompts(self, body: dict) -> list[np.ndarray]:
    """Returns the token ids of each prompt: `prompt` is a text, token ids, or a list of either."""
    prompt = body.get('prompt')
    is_ids = bool(prompt) and isinstance(prompt, list) and isinstance(prompt[0], int)
    if isinstance(prompt, str) or is_ids:
      prompt = [prompt]
    refuse(not isinstance(prompt, list) or not prompt, 'prompt: must be a text, token ids, or a list of either')
    refuse(len(prompt) > MAX_ANSWERS, f'prompt: {len(prompt)} prompts are more than {MAX_ANSWERS}')
    return [np.asarray(self._ids(p), np.int32) for p in prompt]

  def _ids(self, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
      prompts_lib.check_length(messages_lib.check_text(prompt, 'prompt'), 'prompt', self._max_characters)
      return [*self._tokenizer.bos_ids, *self._tokenizer.encode(prompt)]
    size = self._tokenizer.vocab_size
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int and 0 <= i < size for i in prompt):
      raise InputError(f'prompt: token ids are ints below {size}')
    return prompt

  def sampling(self, body: dict, length: int) -> dict:
    """Returns the sampling parameters of a body, as in `Request.sampling`, for a prompt of `length` tokens."""
    parameters = {name: number(body, name, int if name in _INTEGERS else float, None) for name in _FIELDS}
    default = max(1, self._room - length)
    # `max_tokens` is the older name of `max_completion_tokens`.
    max_tokens = number(body, 'max_completion_tokens', int, number(body, 'max_tokens', int, default))
    if max_tokens < (0 if body.get('echo') else 1):
      hint = '; with echo, 0 scores the prompt alone' if max_tokens == 0 else ''
      raise InputError(f'max_tokens: {max_tokens} is less than 1{hint}')
    stop = body.get('stop') or ()
    refuse(not isinstance(stop, (str, list, tuple)), f'stop: {stop!r} is no text or list of texts')
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MAX_STOPS or any(isinstance(text, str) and len(text) > _MAX_STOP for text in stops):
      raise InputError(f'stop: at most {_MAX_STOPS} texts of {_MAX_STOP} characters')
    parameters |= dict(max_tokens=max_tokens, top_logprobs=self._top_count(body), stop_strings=tuple(stops))
    return {name: value for name, value in parameters.items() if value is not None}

  def _top_count(self, body: dict) -> int:
    """Returns the number of top-k log-probs: the field `top_logprobs` in chats, the value of `logprobs` otherwise."""
    if 'messages' in body:
      return number(body, 'top_logprobs', int, 0) if body.get('logprobs') else 0
    value = body.get('logprobs')
    return int(value) if isinstance(value, bool) else number(body, 'logprobs', int, 0)

  def chat_choice(self, index: int, completion: Completion, body: dict) -> dict:
    """Returns an entry of `choices` of a chat; tool calls are parsed if the body has tools."""
    message = {'role': 'assistant', 'content': self.decode(completion)}
    tools = messages_lib.tools_of(body, 'body')
    marked = self.decode(completion, skip_special=False) if tools else ''  # marks of calls may be special tokens
    calls = turns.parse(marked, tools) if tools else None
    reason = _finish_reason(completion)
    if calls:
      first = sum(len(m.get('tool_calls') or ()) for m in body.get('messages', ()))  # ids are unique in a conversation
      reason = 'tool_calls'
      message['content'] = self._without_special(turns.before_calls(marked)) or None
      message['tool_calls'] = [
        dict(id=f'call{i:05}', type='function', function=dict(name=c['name'], arguments=json.dumps(c['arguments'])))
        for i, c in enumerate(calls, first)
      ]
    return dict(
      index=index,
      message=message,
      finish_reason=reason,
      logprobs={'content': self._chat_logprobs(completion)} if body.get('logprobs') else None,
      token_ids=completion.tokens.tolist(),
    )

  def _chat_logprobs(self, completion: Completion) -> list[dict]:
    """Returns an entry per token with its log-prob and the top-k tokens at its position."""
    tops: Iterable = ()
    # An agent of a run may ask for the most probable tokens, but its sampler reports none.
    if completion.top_ids is not None and completion.top_logprobs is not None:
      tops = zip(completion.top_ids, completion.top_logprobs)
    return [
      self._logprob_entry(*drawn) | dict(top_logprobs=[*map(self._logprob_entry, *top)] if top else [])
      for drawn, top in itertools.zip_longest(zip(completion.tokens, completion.logprobs), tops)
    ]

  def _logprob_entry(self, token: int, logprob: float) -> dict:
    piece = self._added(self.before, [token])
    return dict(token=piece, logprob=float(logprob), bytes=self._bytes(token, piece))

  def _bytes(self, token: int, text: str) -> list[int]:
    """Returns the bytes of a token; those of a part of a character are in its name and not in its text."""
    name = self._tokenizer.hf.convert_ids_to_tokens(int(token)) if '\ufffd' in text else ''
    if byte := re.fullmatch('<0x(..)>', name):  # of SentencePiece
      return [int(byte[1], 16)]
    letters = tokenizer_lib.byte_of_letter()
    is_byte_level = name and letters.keys() >= {*name}
    return [letters[x] for x in name] if is_byte_level else [*text.encode()]

  def text_choice(self, index: int, completion: Completion, body: dict) -> dict:
    """Returns an entry of `choices` of a completion."""
    logprobs = None
    if body.get('logprobs') is not None:
      logprobs = self._text_logprobs(completion.tokens, completion, self._top_count(body), self.before)
    return dict(
      index=index,
      text=self.decode(completion, before=self.before),
      logprobs=logprobs,
      finish_reason=_finish_reason(completion),
      prompt_token_ids=completion.request.tokens.tolist(),
      token_ids=completion.tokens.tolist(),
    )

  def with_prompt(self, choice: dict, body: dict, ids: np.ndarray, score: Any) -> dict:
    """Returns an entry of `choices` of completions with the prompt `ids` before it.

    `score` is the `tools.scoring.TextScore` of the prompt; None: no log-probs were asked for.
    """
    text = self._tokenizer.decode(ids, skip_special=False)
    out = {**choice, 'text': text + choice['text']}
    if score is None:
      return out
    count, drawn = self._top_count(body), choice['logprobs']
    prompt = self._text_logprobs(ids, score, count, before=[])
    prompt['token_logprobs'][0] = None  # nothing predicts the first token
    if count:
      prompt['top_logprobs'][0] = None
    drawn['text_offset'] = [len(text) + offset for offset in drawn['text_offset']]
    out['logprobs'] = {name: x and x + drawn[name] for name, x in prompt.items()}
    return out

  def _text_logprobs(self, ids: np.ndarray, drawn: Any, count: int, before: Sequence[int]) -> dict:
    """Returns the log-probs of tokens as completions have them, with `count` of the most probable tokens each.

    `drawn` is the `Completion` or `TextScore` of the tokens.
    """
    top = None
    if count and drawn.top_ids is not None:  # an agent of a run may ask, but its sampler reports none
      top = [self._by_text(*x, count) for x in zip(ids, drawn.logprobs, drawn.top_ids, drawn.top_logprobs)]
    return dict(
      tokens=[self._added(self.before if n else before, [i]) for n, i in enumerate(ids)],
      text_offset=_starts(self._tokenizer, before, ids),
      token_logprobs=[float(x) for x in drawn.logprobs],
      top_logprobs=top,
    )

  def _by_text(self, token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray, count: int) -> dict:
    """Returns {text: log-prob} of the most probable tokens; of those with the same text the most probable counts.

    The token itself has its own log-prob among them to the last bit, as clients compare the two.
    """
    out: dict[str, float] = {}
    for i, x in zip(top_ids[:count], top_logprobs[:count]):
      out.setdefault(self._added(self.before, [i]), float(logprob if i == token else x))
    return out

  def decode(self, completion: Completion, skip_special: bool = True, before: Sequence[int] = ()) -> str:
    """Returns the text that a completion adds to `before`, without the stop string or token that ended it."""
    ids, stop = completion.tokens, completion.stop_string
    text = self._added(before, ids[:-1] if completion.finished and not stop else ids, skip_special)
    if stop and stop in text:
      return text[: text.index(stop)]
    # SentencePiece decodes the first word of a chat without the space that the stop string begins with.
    return '' if stop and text.startswith(stop.lstrip(' ')) else text

  def _without_special(self, text: str) -> str:
    for token in self._tokenizer.hf.added_tokens_decoder.values():
      text = text.replace(token.content, '') if token.special else text
    return text

  def _added(self, before: Sequence[int], ids: Iterable[int], skip_special: bool = False) -> str:
    """Returns the text that token ids add to that of the ids before them."""
    text = self._tokenizer.decode([*before, *ids], skip_special)
    return text[len(self._tokenizer.decode(before, skip_special)) :]


def check_supported(body: dict, is_chat: bool, scorer: Any) -> None:
  """Raises InputError if a body has a parameter that would be ignored; `scorer` is that of its model, or None."""
  parameters = (*_READ, *_FIELDS, *_UNSUPPORTED, *_IGNORED)
  if unknown := [name for name in body if name not in parameters]:
    near = difflib.get_close_matches(unknown[0][:100], parameters, n=1)
    hint = f'did you mean {near[0]}?' if near else 'leave it out'
    raise InputError(f'{unknown[0][:100]}: there is no such parameter; {hint}')
  for name, harmless in _UNSUPPORTED.items():
    refuse(body.get(name) is not None and body[name] not in harmless, f'{name}: is not supported here; leave it out')
  for name, kind in (('stream', bool), ('echo', bool), ('stream_options', dict)):
    if not isinstance(body.get(name), (kind, type(None))):
      raise InputError(f'{name}: {messages_lib.shown(body[name])} is not {_KINDS[kind]}')
  has_top = is_chat and body.get('logprobs')
  refuse(body.get('top_logprobs') and not has_top, 'top_logprobs: chats take it with logprobs=true; completions do not')
  if body.get('echo'):
    refuse(is_chat, 'echo: chats have none; /v1/completions has')
    count = body.get('logprobs')
    refuse(count is not None and scorer is None, 'echo: this server has no log-probs of prompts; leave out logprobs')
    if not isinstance(count, bool | None) and not 0 <= number(body, 'logprobs', int, 0) <= scorer.top:
      raise InputError(f'logprobs: {count} is not from 0 to {scorer.top}')


def number(body: dict, name: str, kind: type, default: Any) -> Any:
  """Returns a number of a body as `kind`, the default if it is missing or null; InputError if it is no number."""
  value = body.get(name)
  if value is None:
    return default
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
  refuse(not is_number or (kind is int and value != value // 1), f'{name}: {value!r} is not {_KINDS[kind]}')
  return kind(value)


def _starts(tokenizer: Tokenizer, before: Sequence[int], ids: Iterable[int]) -> list[int]:
  """Returns the offset of each token in the text that all add to `before`; bytes of one character share its offset."""
  offsets: list[int] = []
  ids = [*before, *ids]
  first, fresh, position = 0, len(before), 0  # tokens [first, fresh) are counted, and give context to the next ones
  while fresh < len(ids):
    texts = [tokenizer.decode(ids[first:fresh], skip_special=False)]
    while len(texts) == 1 or (texts[-1].endswith('\ufffd') and len(texts) < 5 and fresh + len(texts) <= len(ids)):
      texts.append(tokenizer.decode(ids[first : fresh + len(texts)], skip_special=False))
    for text, longer in itertools.pairwise(texts):  # \ufffd is a part of a character, or invalid
      start = len(os.path.commonprefix([text, texts[-1]]))
      start = min(start, len(longer) - 1) if longer.endswith('\ufffd') else start
      offsets.append(position + start - len(texts[0]))
    position += len(texts[-1]) - len(texts[0])
    first, fresh = fresh, fresh + len(texts) - 1
  return offsets


def _finish_reason(completion: Completion) -> str:
  return 'stop' if completion.finished else 'length'


def head(kind: str, model: str) -> dict:
  """Returns the fields that a response, or each event of a stream, begins with; `kind` is its `object`."""
  return dict(id=f'cmpl-{uuid.uuid4().hex}', created=int(time.time()), model=model, object=kind)


def response(
  is_chat: bool, model: str, choices: list[dict], prompts: list[np.ndarray], completions: list[Completion]
) -> dict:
  """Returns the body of a reply; that to a chat has the ids of its prompt, of completions each choice has its own."""
  prompt_tokens = sum(map(len, prompts))
  completion_tokens = sum(len(c.tokens) for c in completions)
  return dict(
    **head('chat.completion' if is_chat else 'text_completion', model),
    choices=choices,
    **({'prompt_token_ids': prompts[0].tolist()} if is_chat else {}),
    usage=dict(
      prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
    ),
  )


def nothing_drawn(request: Request) -> Completion:
  """Returns the completion of a request for no tokens."""
  ids, empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
  return Completion(request, ids, empty, empty, False, versions=ids, top_ids=ids[:, None], top_logprobs=empty[:, None])
