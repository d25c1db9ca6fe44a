"""Commands of the documentation are accepted by their own flags, and fields of the config that it names are there."""

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from absl import flags
from test_docs_code import CLONE, PAGES, check_stages
from test_launch import own_flags

from jaxpost.errors import InputError
from jaxpost.stage import field_names
from launch import exits
from launch.verbs import VERBS, WORDS

# The pages, and the help of the commands and of the examples.
TEXTS = PAGES | {
  str(path.relative_to(CLONE)): ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
  for folder in ('launch', 'docs/examples')
  for path in sorted((CLONE / folder).glob('*.py'))
}


class Command(NamedTuple):
  """A command `python -m launch.VERB WORDS` of a page.

  Attributes:
    inline: it stands in a sentence or a table, so that required flags may be missing.
    refused: what it prints instead of running, as the page says; '' for all others.
  """

  verb: str
  words: tuple[str, ...]
  inline: bool
  refused: str


def commands(text: str) -> Iterator[Command]:
  """Yields the commands of a page; lines that end in a backslash go on."""
  text = re.sub(r' *\\\n\s*', ' ', text)
  for found in re.finditer(
    r'(?P<tick>`?)\bpython -m launch\.(?P<verb>\w+)(?P<rest>[^\n]*)(?P<said>\n +jaxpost: .*)?', text
  ):
    rest = found['rest'].partition('`')[0] if found['tick'] else found['rest']
    words = shlex.split(re.sub(r'\[(--\w+)\]', r'\1', rest), comments=True)
    if '>>' in words:
      words = words[: words.index('>>')]
    said = (found['said'] or '').strip()
    if found['verb'] not in ('NAME', 'VERB'):
      yield Command(found['verb'], tuple(words), bool(found['tick']), said.removeprefix('jaxpost: '))


def check_command(verb: str, words: list[str], inline: bool = False):
  """Parses the words of a command by its own flags, and makes the checks of a launch of its config.

  A config file that the page only speaks of is replaced by the quickstart, and what stands behind `--` is for
  `launch.train`.

  Args:
    verb: name of the command.
    words: the flags and arguments.
    inline: only the names of the flags and of the fields of the config are checked.

  Raises:
    InputError: as the command would.
  """
  mine, behind = words, []
  if '--' in words:
    mine, behind = words[: words.index('--')], words[words.index('--') + 1 :]
  sys.modules.pop(f'launch.{verb}', None)  # defines its flags anew
  with own_flags():
    importlib.import_module(f'launch.{verb}')
    if inline or '...' in mine:
      for name in re.findall(r'--([\w.]+)', ' '.join(mine)):
        section, _, field = name.partition('.')
        known = {name, name.removeprefix('no')} & set(flags.FLAGS)
        assert known or (section == 'config' and field_names.field_type(field)), f'launch.{verb}: no flag --{name}'
    else:
      exits.parse([verb, *map(with_a_config, mine)], words=WORDS.get(verb, 0))
      if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
        check_stages(flags.FLAGS['config'].value.to_dict())
  if behind:
    check_command('train', behind, inline)


def with_a_config(word: str) -> str:
  """Returns a word of a command, with a config that is there."""
  path = re.fullmatch(r'--config=([^:]*)(:.*)?', word)
  return word if not path or (CLONE / path[1]).is_file() else '--config=configs/quickstart.py'


@pytest.mark.parametrize('page', [page for page in TEXTS if 'python -m launch.' in TEXTS[page]])
def test_commands_of_a_page_are_accepted(page, monkeypatch):
  """Those of docs/fits.md have their test in test_fits.py, too; here it is one of each kind."""
  monkeypatch.chdir(CLONE)
  found = dict.fromkeys(commands(TEXTS[page]))
  if page == 'docs/fits.md':
    found = {(c.verb, *(w for w in c.words if not w.startswith('--config.'))): c for c in found}.values()
  for command in found:
    assert command.verb in VERBS
    try:
      check_command(command.verb, list(command.words), command.inline)
      said = ''
    except InputError as error:
      said = str(error)
    assert said == command.refused, ' '.join(command.words)


def test_fields_that_pages_name_are_there():
  """`config.a.b` is a field, also behind the name of a stage of the quickstart."""
  files = {'json', 'md', 'py', 'yaml'}
  for page, text in PAGES.items():
    named = set(re.findall(r'(?<![\w./])(?:--)?(?:no)?config\.([a-z_]\w*(?:\.[a-z_]\w*)*)', text))
    # A method of a ConfigDict, the form of a flag, and a name of Hugging Face.
    for path in named - files - {'ignore_type', 'a.b', 'learning_rate'}:
      field = re.sub(r'^(?:sft|grpo)\.', '', path)
      assert field in ('sft', 'grpo') or field_names.field_type(field), f'{page}: config.{path}'
