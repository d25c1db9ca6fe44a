"""Files of launch.serve (the API key, a record of all answers), and an example request."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer


def read_key(path: str) -> str:
  """Returns the API key in a file, '' without one; InputError if the file holds no key."""
  if not path:
    return ''
  try:
    key = pathlib.Path(path).read_text('utf-8').strip()
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f'--api_key_file: {path}: {error}') from error
  if not key or not key.isascii() or not key.isprintable():
    raise InputError(f'--api_key_file: {path}: must hold one line of printable ASCII')
  return key


def recorder(path: str) -> Callable[[dict], None] | None:
  """Opens a .jsonl file and returns a function that appends a line; None without a path.

  Raises:
    InputError: the file cannot be written.
  """
  if not path:
    return None
  try:
    file = open(path, 'a', encoding='utf-8')
  except OSError as error:
    raise InputError(f'--record: {path}: {error.strerror}; name a file that can be written') from error

  def record(entry: dict) -> None:
    file.write(json.dumps(entry) + '\n')
    file.flush()

  return record


def public_name(model: str) -> str:
  """Returns the name under which a model is served: the last part of a path, to hide folders from clients."""
  path = os.path.expanduser(model)
  return os.path.basename(os.path.abspath(path)) if os.path.exists(path) else model


def example(url: str, name: str, key_file: str, tokenizer: Tokenizer) -> str:
  """Returns a line with a curl command that sends a request to a model of a server: a chat, or a text to continue."""
  is_chat = bool(tokenizer.chat_template)
  content = {'messages': [{'role': 'user', 'content': 'Hello'}]} if is_chat else {'prompt': 'Once', 'max_tokens': 32}
  body = json.dumps({'model': name, **content})
  token = f' -H "Authorization: Bearer $(cat {shlex.quote(key_file)})"' if key_file else ''
  path = 'chat/completions' if is_chat else 'completions'
  return f"try: curl {url}/{path} -H 'Content-Type: application/json'{token} -d {shlex.quote(body)}"
