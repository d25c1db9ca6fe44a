"""A chat on the terminal, whose answers appear as they are decoded."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

import numpy as np

from jaxpost.data import prompts as prompts_lib
from jaxpost.data.messages import check_text
from jaxpost.environments.openai_stream import TextStream
from jaxpost.errors import InputError
from jaxpost.rollout.native import NativeEngine
from jaxpost.rollout.sequence import Completion, Request
from jaxpost.stage import model_limits, on_policy
from jaxpost.tools.completions import Draws, make_engine, sampling_of
from jaxpost.tools.inference import Weights
from jaxpost.tools.working import working
from jaxpost.types import Prompt

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer

_CONTEXT = 4096  # largest number of tokens of a chat, if the model has positions for them


@dataclasses.dataclass
class Speaker:
  """A model that answers, with its messages of the chat.

  name: shown before its answers; '' if it is the only one.
  room: largest number of tokens of a chat before an answer.
  positions: of the model, which the chat and an answer share.
  """

  name: str
  engine: NativeEngine
  room: int
  tokenizer: Tokenizer
  messages: list[dict]
  positions: int = _CONTEXT


def check_templates(models: Mapping[str, Weights]) -> None:
  """Raises InputError for a model without a chat template."""
  for name, weights in models.items():
    if not weights.inputs.tokenizer.chat_template:
      raise InputError(
        f'{name}: its tokenizer has no chat template, so it cannot chat; train it with config.data.chat_template, add '
        'a chat_template.jinja to the folder of the model, or give --chat_template=chatml or a .jinja file; '
        'launch.sample --nochat continues plain text'
      )


def chat_loop(
  models: Mapping[str, Weights], draws: Draws, mesh: str, first: Iterable[str], asked: TextIO, out: TextIO
) -> None:
  """Answers the messages of a user, line by line, until the end of `asked`.

  Args:
    models: {name: weights} of the models that answer in turn, each in its own chat.
    mesh: as config.mesh.rollout.
    first: messages before those of `asked`.
    asked: lines, such as sys.stdin.
    out: gets the answers as they are decoded.
  """
  for weights in models.values():  # reports a template that cannot render a chat early
    prompts_lib.encode_prompt(weights.inputs.tokenizer, [{'role': 'user', 'content': ''}], {}, '--chat')
  if isinstance(asked, io.TextIOWrapper):
    asked.reconfigure(errors='surrogateescape')  # otherwise a byte that is not UTF-8 ends the chat in some locales
  with working('preparing to sample'):
    speakers = [_speaker(name if len(models) > 1 else '', weights, draws, mesh) for name, weights in models.items()]
  for turn, text in enumerate(itertools.chain(first, _lines(asked, out))):
    try:
      check_text(text, 'this message')
    except InputError:
      out.write('this message is not valid UTF-8; type it again\n')
      continue
    if not text.startswith('/'):
      for speaker in speakers:
        _reply(speaker, text, turn, draws, out)
      continue
    for speaker in speakers:  # only the first one reports what it does; all of them end at the same command
      messages = command(text, speaker.messages, out if speaker is speakers[0] else io.StringIO())
      if messages is None:
        return
      speaker.messages = messages


def with_room(draws: Draws, models: Mapping[str, Weights]) -> Draws:
  """Returns `draws` with answers of at most half of the positions that each model has; the rest is for messages."""
  positions = min(model_limits.longest(weights.inputs.model.config) for weights in models.values())
  return dataclasses.replace(draws, max_new_tokens=min(draws.max_new_tokens, max(1, positions // 2)))


def _speaker(name: str, weights: Weights, draws: Draws, mesh: str) -> Speaker:
  positions = model_limits.longest(weights.inputs.model.config)
  room = min(_CONTEXT, max(1, positions - draws.max_new_tokens))
  engine = make_engine(
    weights, slots=1, max_prompt=room, max_new_tokens=draws.max_new_tokens, mesh=mesh, top_logprobs=draws.top_logprobs
  )
  messages = begin(weights.inputs.config.data.system_prompt)
  return Speaker(name, engine, room, weights.inputs.tokenizer, messages, positions=positions)


def _reply(speaker: Speaker, text: str, turn: int, draws: Draws, out: TextIO) -> None:
  """Adds a message and the answer to the chat of one model."""
  messages, prefix = speaker.messages, f'{speaker.name}: ' if speaker.name else ''
  messages.append({'role': 'user', 'content': text})
  ids = prompts_lib.encode_prompt(speaker.tokenizer, messages, {}, '--chat')
  if len(ids) > speaker.room:
    messages.pop()
    out.write(
      f'{prefix}{len(ids)} tokens are more than the {speaker.room} of a chat, as an answer may take '
      f'--max_new_tokens={draws.max_new_tokens} of the {speaker.positions} positions of the model; /reset begins a new '
      'one\n'
    )
    return
  answer = _answer(speaker.engine, speaker.tokenizer, Prompt(turn, ids, messages, {}), draws, prefix=prefix, out=out)
  messages.append({'role': 'assistant', 'content': answer})


HELP = '/reset: begin anew; /system TEXT: begin anew with this system message; /exit or Ctrl-D: end'


def opening(name: str, step: int | None, draws: Draws) -> str:
  """Returns the first line of a chat: the model, its step if it is known, the temperature, and `HELP`."""
  step_text = '' if step is None else f', step {step}'
  return f'{name}{step_text}, temperature {draws.temperature:g}. {HELP}'


def begin(system: str) -> list[dict]:
  """Returns the messages of a new chat; `system` may be ''."""
  return [{'role': 'system', 'content': system}] if system else []


def command(text: str, messages: list[dict], out: TextIO) -> list[dict] | None:
  """Executes a line that begins with /.

  Returns:
    The messages to continue with; None to end the chat.
  """
  name, _, argument = text[1:].partition(' ')
  if name == 'exit':
    return None
  if name == 'reset':
    out.write('a new chat\n')
    return [m for m in messages[:1] if m['role'] == 'system']
  if name == 'system':
    out.write('a new chat with this system message\n' if argument.strip() else 'a new chat without a system message\n')
    return begin(argument.strip())
  out.write(f'{HELP}\n')
  return messages


def _answer(engine: NativeEngine, tokenizer: Tokenizer, prompt: Prompt, draws: Draws, prefix: str, out: TextIO) -> str:
  """Writes `prefix` and an answer as it is decoded, and returns the answer."""
  parts = TextStream(tokenizer.decode)

  with contextlib.ExitStack() as until_first_tokens:  # shown until the first tokens, which wait for compilation
    until_first_tokens.callback(out.write, prefix)
    until_first_tokens.enter_context(working('sampling'))

    def write(tokens: np.ndarray) -> None:
      until_first_tokens.close()
      out.write(parts.add(tokens))
      out.flush()

    text = tokenizer.decode(stream(engine, prompt, draws, write).tokens)
  out.write(parts.rest(text) + '\n')
  return text


def _lines(asked: TextIO, out: TextIO) -> Iterator[str]:
  """Yields lines that are not empty, after writing a prompt sign for each."""
  while True:
    out.write('> ')
    out.flush()
    line = asked.readline()
    if not line:
      out.write('\n')
      return
    if line.strip():
      yield line.rstrip('\n')


def stream(engine: NativeEngine, prompt: Prompt, draws: Draws, on_tokens: Callable[[np.ndarray], None]) -> Completion:
  """Returns one completion; calls `on_tokens(its token ids)` after each block."""
  completed = []

  def collect(completions, idle):
    del idle
    completed.extend(completions)
    return ()

  engine.serve(
    [Request(prompt.tokens, prompt.index, 0, {**sampling_of(draws), 'max_tokens': draws.max_new_tokens})],
    run_key=on_policy.run_key(draws.seed, 3),
    step=0,
    next_requests=collect,
    on_tokens=lambda request, ids: on_tokens(ids),
  )
  return completed[0]
