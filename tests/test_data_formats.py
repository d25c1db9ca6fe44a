"""Each example of docs/data_formats.md is a row that a stage accepts with the flags that the page gives."""

import contextlib
import json
import pathlib
import re
import shlex

import pytest

from jaxpost import defaults
from jaxpost.stage import prepare
from jaxpost.tools import preview_stage

PAGE = pathlib.Path(__file__).resolve().parents[1] / 'docs/data_formats.md'


def examples():
  """Yields (flags, rows) of each block of JSON; the flags are the last `--config.algorithm=...` before the block."""
  decoder, flags = json.JSONDecoder(), ''
  for flag, text in re.findall(r'`(--config\.algorithm=[^`]*)`|```json\n(.*?)```', PAGE.read_text('utf-8'), re.S):
    flags, rows = flag or flags, []
    while text.strip():
      row, end = decoder.raw_decode(text.lstrip())
      rows.append(row)
      text = text.lstrip()[end:]
    if rows:
      yield flags, rows


@pytest.mark.parametrize('flags, rows', list(examples()))
def test_example_of_the_page_is_read(flags, rows, tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)), 'utf-8')
  raw = defaults() | {'reward': 'exact_match'}
  for flag in [*shlex.split(flags), f'--config.data.path={path}']:
    names, _, value = flag.removeprefix('--config.').partition('=')
    *sections, name = names.split('.')
    (raw[sections[0]] if sections else raw)[name] = value
  (stage,) = prepare.prepare_all(raw)
  with contextlib.closing(stage):
    assert preview_stage.show_stage(stage, len(rows))
