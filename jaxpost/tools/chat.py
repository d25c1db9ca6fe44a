"""A chat on the terminal: answers that appear as they are decoded."""

import itertools

from jaxpost.data import chat
from jaxpost.errors import InputError
from jaxpost.rollout.native import NativeEngine
from jaxpost.rollout.sequence import Completion, Request
from jaxpost.stage import on_policy
from jaxpost.tools.completions import Draws, make_engine, sampling_of
from jaxpost.tools.inference import Weights
from jaxpost.types import Prompt

_CONTEXT = 4096  # tokens of a chat at most


def chat_loop(weights: Weights, draws, mesh, first, asked, out):
  """Answers what is said, line by line, until the end of `asked`.

  Args:
    first: what is said first, if anything.
    asked: lines, such as sys.stdin; `out` gets the answers as they come.
  """
  tokenizer, messages = weights.inputs.tokenizer, []
  system = weights.inputs.config.data.system_prompt
  if system:
    messages.append({'role': 'system', 'content': system})
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
    messages.append({'role': 'user', 'content': text})
    ids = chat.encode_prompt(tokenizer, messages, {}, '--chat')
    if len(ids) > _CONTEXT:
      raise InputError(f'--chat: {len(ids)} tokens are more than the {_CONTEXT} that a chat may have; begin a new one')
    messages.append(
      {'role': 'assistant', 'content': _answer(engine, tokenizer, Prompt(turn, ids, messages, {}), draws, out)}
    )


def _answer(engine, tokenizer, prompt, draws, out) -> str:
  """Writes an answer as it comes."""
  shown = 0

  def tell(tokens):
    nonlocal shown
    text = tokenizer.decode(tokens)
    # Half a character is a mark of its own until the rest comes.
    if not text.endswith('\ufffd'):
      out.write(text[shown:])
      out.flush()
      shown = max(shown, len(text))

  text = tokenizer.decode(stream(engine, prompt, draws, tell).tokens)
  out.write(text[shown:] + '\n')
  return text


def _lines(asked, out):
  while True:
    out.write('> ')
    out.flush()
    line = asked.readline()
    if not line:
      out.write('\n')
      return
    if line.strip():
      yield line.rstrip('\n')


def stream(engine: NativeEngine, prompt: Prompt, draws: Draws, tell) -> Completion:
  """Returns one completion; calls `tell(token ids so far)` after each block."""
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
    on_tokens=lambda request, ids: tell(ids.tolist()),
  )
  return done[0]
