"""Uploads an exported folder to the Hugging Face hub."""

import pathlib
import re
from collections.abc import Callable

from jaxpost.errors import InputError
from jaxpost.storage import hub, object_store


def push(folder: str, repo: str, public: bool, say: Callable[[str], None]) -> None:
  """Uploads a folder to the hub; without a token, only lists what would be sent.

  Raises:
    InputError: `repo` is not org/name, or the hub refuses it.
  """
  if not re.fullmatch(r'[\w.-]+/[\w.-]+', repo):
    raise InputError(f'--push={repo}: name a model of the hub, as ORG/NAME')
  if object_store.is_remote(folder):
    raise InputError(f'--push: {folder} is no local folder; export to one')
  if not hub.has_token():
    for path in sorted(p for p in pathlib.Path(folder).rglob('*') if p.is_file()):
      say(f'would send {path.relative_to(folder)}, {path.stat().st_size:,} bytes')
    say(f'--push={repo}: nothing was sent, there is no token of the hub; run `hf auth login`, or set HF_TOKEN')
    return
  say(hub.upload(folder, repo, private=not public))
