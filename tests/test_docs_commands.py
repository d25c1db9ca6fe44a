"""The flags of all commands in the documentation are accepted, and the config fields that it names exist."""

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

# The text of each page, and the docstrings of the commands and of the examples.
TEXTS = PAGES | {
  str(path.relative_to(CLONE)): ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
  for folder in ('launch', 'docs/examples')
  for path in sorted((CLONE / folder).glob('*.py'))
}


class Command(NamedTuple):
  """A command `python -m launch.VERB WORDS` of a page.

  Attributes:
    inline: whether it is in a sentence or a table, where required flags may be missing.
    refused: the error that it prints according to the page; '' if it runs.
  """

  verb: str
  words: tuple[str, ...]
  inline: bool
  refused: str


def commands(text: str) -> Iterator[Command]:
  """Yields the commands of a page; a line that ends in a backslash continues on the next."""
  text = re.sub(r' *\\\n\s*', ' ', text)
  for match in re.finditer(
    r'(?P<tick>`?)\bpython -m launch\.(?P<verb>\w+)(?P<rest>[^\n]*)(?P<said>\n +jaxpost: .*)?', text
  ):
    rest = match['rest'].partition('`')[0] if match['tick'] else match['rest']
    words = shlex.split(re.sub(r'\[(--\w+)\]', r'\1', rest), comments=True)
    if '>>' in words:
      words = words[: words.index('>>')]
    error = (match['said'] or '').strip()
    if match['verb'] not in ('NAME', 'VERB'):
      yield Command(match['verb'], tuple(words), bool(match['tick']), error.removeprefix('jaxpost: '))


def check_command(verb: str, words: list[str], inline: bool = False):
  """Parses the words of a command by its own flags, and makes the checks of a launch of its config.

  A config file that does not exist in the clone is replaced by the quickstart. Words after `--` are parsed as those of
  `launch.train`.

  Args:
    verb: name of the command.
    words: the flags and arguments.
    inline: only the names of the flags and of the fields of the config are checked.

  Raises:
    InputError: as the command would.
  """
  own_words, train_words = words, []
  if '--' in words:
    own_words, train_words = words[: words.index('--')], words[words.index('--') + 1 :]
  sys.modules.pop(f'launch.{verb}', None)  # the import below then defines the flags again
  with own_flags():
    importlib.import_module(f'launch.{verb}')
    if inline or '...' in own_words:
      for name in re.findall(r'--([\w.]+)', ' '.join(own_words)):
        section, _, field = name.partition('.')
        known = {name, name.removeprefix('no')} & set(flags.FLAGS)
        assert known or (section == 'config' and field_names.field_type(field)), f'launch.{verb}: no flag --{name}'
    else:
      exits.parse([verb, *map(with_a_config, own_words)], words=WORDS.get(verb, 0))
      if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
        check_stages(flags.FLAGS['config'].value.to_dict())
  if train_words:
    check_command('train', train_words, inline)


def with_a_config(word: str) -> str:
  """Returns a word of a command; a config file that does not exist is replaced by the quickstart."""
  path = re.fullmatch(r'--config=([^:]*)(:.*)?', word)
  return word if not path or (CLONE / path[1]).is_file() else '--config=configs/quickstart.py'


@pytest.mark.parametrize('page', [page for page in TEXTS if 'python -m launch.' in TEXTS[page]])
def test_commands_of_a_page_are_accepted(page, monkeypatch):
  """Of the many commands of docs/fits.md, which test_fits.py checks as well, one of each kind is parsed."""
  monkeypatch.chdir(CLONE)
  page_commands = dict.fromkeys(commands(TEXTS[page]))
  if page == 'docs/fits.md':
    page_commands = {
      (c.verb, *(w for w in c.words if not w.startswith('--config.'))): c for c in page_commands
    }.values()
  for command in page_commands:
    assert command.verb in VERBS
    try:
      check_command(command.verb, list(command.words), command.inline)
      printed = ''
    except InputError as error:
      printed = str(error)
    assert printed == command.refused, ' '.join(command.words)


def test_config_fields_named_on_pages_exist():
  """`config.a.b` is a field, possibly after the name of a stage of the quickstart."""
  file_suffixes = {'json', 'md', 'py', 'yaml'}
  for page, text in PAGES.items():
    named = set(re.findall(r'(?<![\w./])(?:--)?(?:no)?config\.([a-z_]\w*(?:\.[a-z_]\w*)*)', text))
    # Not fields: a method of ConfigDict, the general form of a flag, and a field of Hugging Face.
    for path in named - file_suffixes - {'ignore_type', 'a.b', 'learning_rate'}:
      field = re.sub(r'^(?:sft|grpo)\.', '', path)
      assert field in ('sft', 'grpo') or field_names.field_type(field), f'{page}: config.{path}'
