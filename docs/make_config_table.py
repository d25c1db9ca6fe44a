"""Writes docs/config.md from jaxpost/stage/schema.py: every field, as a table.

python docs/make_config_table.py
"""

import dataclasses
import pathlib
import sys
import typing

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxpost.stage.config import Config  # noqa: E402

HEAD = """# Every field of a config

Made by `python docs/make_config_table.py` from `jaxpost/stage/schema.py`; change it
there. A config file starts from `jaxpost.defaults()` and sets what differs;
`--config.a.b=value` on the command line wins over the file. An unknown key, a
value of another type or outside its range ends the run with exit code 2
before anything starts, and the message names the key and the nearest one:

    $ python -m launch.train --config=configs/quickstart.py --workdir=runs/x \\
        --config.optim.schedule=cosin
    jaxpost: config.optim.schedule: 'cosin' is not one of constant, linear, \\
    cosine; did you mean 'cosine'?

With `config.stages = ('sft', 'grpo')` each name is a block,
`config.sft = dict(...)`, whose fields override those of the config for that
stage; stages run in this order, each from the weights of the one before.
"""
COLUMNS = ('field', 'type', 'default', 'values', 'meaning')


def table(kind, prefix: str) -> list[str]:
  """Markdown lines of the fields of a dataclass that are no sections."""
  hints = typing.get_type_hints(kind)
  lines = [f'| {" | ".join(COLUMNS)} |', '|---' * len(COLUMNS) + '|']
  for field in dataclasses.fields(kind):
    hint = hints[field.name]
    if dataclasses.is_dataclass(hint) or hint is dict:  # `user` is open
      continue
    name = 'any' if hint is typing.Any else hint.__name__
    cells = (f'`{prefix}{field.name}`', name, f'`{field.default!r}`', values(field.metadata), field.metadata['help'])
    cells = [cell.replace('|', '\\|') for cell in cells]
    lines.append(f'| {" | ".join(cells)} |')
  return lines


def values(meta) -> str:
  """What a field may hold, in words."""
  if meta['choices']:
    return ', '.join(f'`{c}`' for c in meta['choices'])
  low, high = meta['lo'], meta['hi']
  if low is not None and high is not None:
    return f'{low:g} to {high:g}'
  return '' if low is None else f'from {low:g}'


def sections(kind, prefix='') -> list[str]:
  """The sections of a dataclass, each with its own below it."""
  lines = []
  hints = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    if dataclasses.is_dataclass(hints[field.name]):
      name = f'{prefix}{field.name}'
      lines += ['', f'## {name}', '', *table(hints[field.name], f'{name}.'), *sections(hints[field.name], f'{name}.')]
  return lines


def page() -> str:
  lines = ['', '## The config itself', '', *table(Config, ''), *sections(Config)]
  return HEAD + '\n'.join(lines) + '\n'


if __name__ == '__main__':
  (ROOT / 'docs' / 'config.md').write_text(page(), encoding='utf-8')
