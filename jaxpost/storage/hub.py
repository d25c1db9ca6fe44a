"""Downloads from and uploads to the Hugging Face hub: the only module that imports huggingface_hub.

Respects HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN, as that library does. Never downloads pickled weights.
"""

import os
import pathlib
import re
from collections.abc import Sequence

from jaxpost.errors import InputError

MODEL_FILES = ('*.json', '*.safetensors', '*.txt', '*.jinja', '*.model', 'LICENSE*')
_NAME = re.compile(r'(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?')


def parse(name: str) -> tuple[str, str, str] | None:
  """Splits 'org/name[@revision][:file]' into (repo, revision, file); None for other names."""
  match = _NAME.fullmatch(name)
  if not match:
    return None
  return match['repo'], match['revision'] or '', match['file'] or ''


def download(
  repo: str, kind: str, revision: str = '', file: str = '', patterns: Sequence[str] = MODEL_FILES
) -> pathlib.Path:
  """Returns the local path of a hub repository, or of one of its files.

  Args:
    repo: 'org/name'.
    kind: 'dataset' or 'model'.
    revision: branch, tag or commit; '' for the default branch.
    file: one file of the repository; '' for all whose names match the glob `patterns`.
  """
  import huggingface_hub as hf

  if 'HF_HUB_VERBOSITY' not in os.environ:
    hf.logging.set_verbosity_error()  # without its warnings about each retry; the last error is raised below
  named = f'{kind} {repo}' + (f'@{revision}' if revision else '')
  try:
    if file:
      path = hf.hf_hub_download(repo, file, repo_type=kind, revision=revision or None)
    else:
      path = hf.snapshot_download(repo, repo_type=kind, revision=revision or None, allow_patterns=list(patterns))
  except hf.errors.GatedRepoError as error:
    raise InputError(f'hub: {named} is gated: accept its terms on the hub, then set HF_TOKEN') from error
  except hf.errors.RepositoryNotFoundError as error:
    raise InputError(f'hub: there is no {named} (or it is private: set HF_TOKEN), and no local path {repo}') from error
  except hf.errors.RevisionNotFoundError as error:
    raise InputError(f'hub: {repo} has no revision {revision!r}') from error
  except hf.errors.LocalEntryNotFoundError as error:
    raise InputError(
      f'hub: {named}{":" + file if file else ""} is not in the local cache and the hub is off (HF_HUB_OFFLINE) or out '
      f'of reach; nor is there a local path {repo}'
    ) from error
  except hf.errors.EntryNotFoundError as error:
    raise InputError(f'hub: {named} has no file {file!r}') from error
  except hf.errors.HfHubHTTPError as error:
    raise InputError(f'hub: {named}: {str(error).splitlines()[0]}') from error
  except hf.errors.HFValidationError as error:
    raise InputError(f'hub: {repo!r} is no repository name') from error
  return pathlib.Path(path)


def upload(folder: str, repo: str, private: bool = True) -> str:
  """Uploads a folder as the model `repo` ('org/name') of the hub, which is created if missing; returns its URL.

  Raises:
    InputError: the hub refuses it, or cannot be reached.
  """
  import huggingface_hub as hf

  api = hf.HfApi()
  try:
    api.create_repo(repo, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=folder)
  except (hf.errors.HfHubHTTPError, OSError) as error:
    raise InputError(f'--push={repo}: {" ".join(str(error).split())[:300]}') from error
  return f'https://huggingface.co/{repo}'


def has_token() -> bool:
  """Returns whether this user has a token of the hub."""
  import huggingface_hub

  return huggingface_hub.get_token() is not None
