"""Describes the start of a run (versions, devices, commit, data, seed), for the console and starts.jsonl.

Each start and each resume of a run adds an object to WORKDIR/starts.jsonl, which the report shows. Nothing in a run
depends on it.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from etils import epath

from jaxpost.monitor.metrics import short_number

FILE = 'starts.jsonl'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'transformers')


def describe() -> dict[str, Any]:
  """Returns JSON-able facts about this process and its machine."""
  return dict(
    time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
    command=list(sys.argv),
    folder=os.getcwd(),  # of relative paths
    versions=versions(),
    commit=commit(),
    python=platform.python_version(),
    host=platform.node(),
    processes=jax.process_count(),
    devices=jax.device_count(),
    device_kind=jax.devices()[0].device_kind,
    platform=jax.default_backend(),
    cores=os.cpu_count(),
  )


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
  """Returns {package: version} of this library and of those packages, by default what it computes with."""
  out = {'jaxpost': sys.modules['jaxpost'].__version__}  # a clone need not be installed
  for name in packages:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      out[name] = importlib.metadata.version(name)
  return out


@functools.cache  # used for the opening line of a run and for its record
def commit() -> str:
  """Returns the git commit of this clone, with '-dirty' if files differ from it; '' outside a clone."""
  root = pathlib.Path(__file__).parents[2]
  if not (root / '.git').exists():
    return ''
  command = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--abbrev=12', '--exclude=*']
  try:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
  except (OSError, subprocess.SubprocessError):  # no git on this machine, or not for this folder
    return ''


def code_files(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
  """Returns {path: digest} of the Python files that {stage: {field: value}} names, as in reward='./my.py:fn'."""
  out = {}
  for value in (value for fields in changes.values() for value in fields.values()):
    for reference in value if isinstance(value, list) else [value]:
      path = str(reference).rpartition(':')[0]
      if path.endswith('.py') and epath.Path(path).exists():
        out[path] = hashlib.sha256(epath.Path(path).read_bytes()).hexdigest()
  return out


def opening(seed: int, workdir: str) -> str:
  """Returns the line that a run begins with, before anything is read: versions, seed and folder."""
  packages = versions()
  commit_text = f' ({git_commit})' if (git_commit := commit()) else ''
  return f'jaxpost {packages["jaxpost"]}{commit_text}, JAX {packages["jax"]}, seed {seed}, workdir {workdir}'


def lines(facts: Mapping[str, Any]) -> list[str]:
  """Returns a line about the machine, and one for each stage.

  Args:
    facts: of `describe`, with `stages` ({name: {'rows', 'tokens_per_epoch', 'batch', 'steps'}}).
  """
  processes = f' on {facts["processes"]} processes' if facts['processes'] > 1 else ''
  out = [f'devices: {facts["devices"]} x {facts["device_kind"]}{processes}']
  for name, stage in facts['stages'].items():
    noun = 'step' if stage['steps'] == 1 else 'steps'
    text = f'{name}: {stage["steps"]} {noun} of {stage["batch"]}, {stage["rows"]:,} rows'
    text += ' (less than a batch, which repeats them)' if stage['epochs'] > stage['steps'] else ''
    if stage['tokens_per_epoch']:
      text += f', about {short_number(stage["tokens_per_epoch"])} tokens an epoch'
    if stage['epochs']:
      text += f', {short_number(stage["epochs"])} epochs'
      text += ' (config.train.epochs=N makes it N)' if stage['epochs'] > 100 else ''
    out += [text] + [f'{name}: {note}' for note in stage.get('notes', ())]
  return out
