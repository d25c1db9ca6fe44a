"""A chat on the terminal: answers that appear as they are decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from jaxpost.data import chat
from jaxpost.rollout.native import NativeEngine
from jaxpost.rollout.sequence import Completion, Request
from jaxpost.stage import on_policy
from jaxpost.tools.completions import Draws, make_engine, sampling_of
from jaxpost.tools.inference import Weights
from jaxpost.types import Prompt

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer

_CONTEXT = 4096  # tokens of a chat at most


def chat_loop(weights: Weights, draws: Draws, mesh: str, first: Iterable[str], asked: TextIO, out: TextIO) -> None:
  """Answers messages of a user, line by line, until the end of `asked`.

  Args:
    weights: of the model that answers.
    draws: how to sample.
    mesh: as config.mesh.rollout.
    first: messages before those of `asked`.
    asked: lines, such as sys.stdin.
    out: gets the answers as they are decoded.
  """
  tokenizer = weights.inputs.tokenizer
  messages = begin(weights.inputs.config.data.system_prompt)
  # A template that cannot render a chat is reported before a model is loaded.
  chat.encode_prompt(tokenizer, [{'role': 'user', 'content': ''}], {}, '--chat')
  engine = make_engine(
    weights,
    slots=1,
    max_prompt=_CONTEXT,
    max_new_tokens=draws.max_new_tokens,
    mesh=mesh,
    top_logprobs=draws.top_logprobs,
  )
  for turn, text in enumerate(itertools.chain(first, _lines(asked, out))):
    if text.startswith('/'):
      left = command(text, messages, out)
      if left is None:
        return
      messages = left
      continue
    messages.append({'role': 'user', 'content': text})
    ids = chat.encode_prompt(tokenizer, messages, {}, '--chat')
    if len(ids) > _CONTEXT:
      messages.pop()
      out.write(f'{len(ids)} tokens are more than the {_CONTEXT} that a chat may have; /reset begins a new one\n')
      continue
    answer = _answer(engine, tokenizer, Prompt(turn, ids, messages, {}), draws, out)
    messages.append({'role': 'assistant', 'content': answer})


HELP = '/reset: begin anew; /system TEXT: begin anew with this system message; /exit or Ctrl-D: end'


def begin(system: str) -> list[dict]:
  """Returns the messages of a new chat; `system` may be ''."""
  return [{'role': 'system', 'content': system}] if system else []


def command(text: str, messages: list[dict], out: TextIO) -> list[dict] | None:
  """Does what a line that begins with / asks for.

  Returns:
    The messages to go on with; None to end the chat.
  """
  name, _, rest = text[1:].partition(' ')
  if name == 'exit':
    return None
  if name == 'reset':
    out.write('a new chat\n')
    return [m for m in messages[:1] if m['role'] == 'system']
  if name == 'system':
    out.write('a new chat with this system message\n' if rest.strip() else 'a new chat without a system message\n')
    return begin(rest.strip())
  out.write(f'{HELP}\n')
  return messages


def _answer(engine: NativeEngine, tokenizer: Tokenizer, prompt: Prompt, draws: Draws, out: TextIO) -> str:
  """Writes an answer as it is decoded, and returns it."""
  shown = 0

  def write(tokens: list[int]) -> None:
    nonlocal shown
    text = tokenizer.decode(tokens)
    # Half a character is a mark of its own until the rest comes.
    if not text.endswith('\ufffd'):
      out.write(text[shown:])
      out.flush()
      shown = max(shown, len(text))

  text = tokenizer.decode(stream(engine, prompt, draws, write).tokens)
  out.write(text[shown:] + '\n')
  return text


def _lines(asked: TextIO, out: TextIO) -> Iterator[str]:
  """Yields the lines that are not empty, each after a prompt sign."""
  while True:
    out.write('> ')
    out.flush()
    line = asked.readline()
    if not line:
      out.write('\n')
      return
    if line.strip():
      yield line.rstrip('\n')


def stream(engine: NativeEngine, prompt: Prompt, draws: Draws, on_tokens: Callable[[list[int]], None]) -> Completion:
  """Returns one completion; calls `on_tokens(token ids so far)` after each block."""
  done = []

  def follow(completions, idle):
    del idle
    done.extend(completions)
    return ()

  engine.serve(
    [Request(prompt.tokens, prompt.index, 0, {**sampling_of(draws), 'max_tokens': draws.max_new_tokens})],
    run_key=on_policy.run_key(draws.seed, 3),
    step=0,
    next_requests=follow,
    on_tokens=lambda request, ids: on_tokens(ids.tolist()),
  )
  return done[0]
