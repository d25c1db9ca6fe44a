"""Reads the options of commands in a shell script and expands its variables, without running anything."""

import ast
import io
import itertools
import operator
import re
import shlex
from typing import Any

import yaml

_FLAG = re.compile(r'(?:--|\+{0,2})(?P<name>[A-Za-z_][\w./@-]*)=(?P<value>.*)', re.DOTALL)
_ASSIGNED = re.compile(r'(?P<name>[A-Za-z_]\w*)=(?P<value>.*)', re.DOTALL)  # names of options have dots or dashes
_NEGATIVE = re.compile(r'-\.?\d')
_ENDS = '\n;&|<>'  # characters that end a command in a shell
_STREAM = re.compile(r'(?<=\s)\d+(?=[<>])')  # as in 2>&1
_ARRAY = re.compile(r'(?m)^[ \t]*(?:declare -a )?[A-Za-z_]\w*\+?=\(')  # whose words are options of a later command
# Arithmetic $((...)), with up to two levels of nested brackets.
_SUM = re.compile(r'\$\(\(((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*)\)\)')
# $NAME, ${NAME}, and ${NAME:-DEFAULT} with a default without variables.
_VARIABLE = re.compile(r'\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}$]*))?\})')
_USED = re.compile(r'\$\{?[#!]?(\w+)')
_KEPT = '\0'  # stands for a $ that is not expanded: of variables without a value in the script, and in values
_LONGEST = 1 << 20  # characters of a value, because repeated self-references grow exponentially
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.floordiv,
  ast.Mod: operator.mod,
}


class _Lines:
  """A script for shlex, which reads comments by `readline`; the newline after them is kept, as it ends a command."""

  def __init__(self, script: str) -> None:
    self._text = io.StringIO(script)
    self.read = self._text.read
    self.close = self._text.close

  def readline(self) -> str:
    line = self._text.readline()
    self._text.seek(self._text.tell() - line.endswith('\n'))
    return line


def options(script: str) -> dict[str, Any]:
  """Returns {name: value} of `name=value`, `--name=value`, `--name value value` and `--name` in a script.

  A variable gets the value that the script assigned to it before, or its default (`${NAME:-DEFAULT}`); others are left
  unchanged. A variable that the script assigns, but neither exports nor uses, is returned as $NAME. A script without
  options is read as a file of settings: its variables are returned by their names.

  Raises:
    ValueError: a quotation is not closed, or a value is too long.
  """
  words = [*_words(script), '\n']
  out: dict[str, Any] = {}
  variables: dict[str, str] = {}  # all with a value at this point of the script
  local: dict[str, str] = {}  # assigned and not exported
  assigned: dict[str, str] = {}  # by the current command
  exported = False  # by the current command
  at_start = True  # whether a command begins, where NAME=VALUE is an assignment
  for i, word in enumerate(words):
    if at_start and (match := _ASSIGNED.fullmatch(word)):
      variables[match['name']] = assigned[match['name']] = _filled(match['value'], variables)
      continue
    if _is_end(word) and not exported:  # before another word, they are environment variables of a program
      local |= assigned
    assigned = {}
    exported = word == 'export'
    at_start = word in ('export', 'local', 'readonly', 'declare') or _is_end(word)
    if match := _FLAG.fullmatch(word):
      out[match['name']] = _value(match['value'], variables)
    elif word.startswith('--') and word != '--':
      out[word[2:]] = _value_after(words[i + 1 :], variables)
  if not out:
    return {name: _value(value, {}) for name, value in local.items()}
  used = {*_USED.findall(script), *re.findall(r'\w+', ' '.join(_SUM.findall(script)))}
  return out | {f'${name}': _value(value, {}) for name, value in local.items() if name not in used}


def _value_after(words: list[str], variables: dict[str, str]) -> Any:
  """Returns the value of an option before these words: one value, a list of several, or True if there is none."""
  values = list(itertools.takewhile(_is_value, words))
  # The value of a launcher's last option is followed by the program that it starts.
  program = next((n for n, value in enumerate(values) if n and value.endswith('.py')), None)
  values = [_value(value, variables) for value in values[:program]]
  if not values:
    return True
  return values if len(values) > 1 else values[0]


def _words(script: str) -> list[str]:
  """Returns the words of a script, including the ends of commands."""
  script = _ARRAY.sub('\n', _STREAM.sub('', script.replace('\\\n', ' ')))
  script = _SUM.sub(lambda match: re.sub(r'\s', '', match[0]), script)
  lexer = shlex.shlex(_Lines(script), posix=True, punctuation_chars=_ENDS)
  lexer.whitespace, lexer.whitespace_split = ' \t\r', True
  # The bracket that closes an array is a word or the end of one; as a word, it ends a command like a newline.
  words = ('\n' if word == ')' else word for word in lexer)
  return [word.removesuffix(')') if word.count(')') > word.count('(') else word for word in words]


def _value(text: str, variables: dict[str, str]) -> Any:
  text = _filled(text, variables)
  return text if '$' in text else yaml.safe_load(text)


def _filled(text: str, variables: dict[str, str]) -> str:
  """Expands variables and arithmetic in a text."""

  def value_of(match: re.Match) -> str:
    name = match[1] or match[2]
    return variables.get(name, match[0] if match[3] is None else match[3]).replace('$', _KEPT)

  text = _SUM.sub(lambda match: _computed(match, variables), text)
  before = ''
  while text != before:  # terminates: each iteration leaves fewer $
    before, text = text, _VARIABLE.sub(value_of, text)
    if len(text) > _LONGEST:
      raise ValueError(f'the value {text[:40]}... grows to {len(text):,} characters')
  return text.replace(_KEPT, '$')


def _computed(match: re.Match, variables: dict[str, str]) -> str:
  """Returns the value of an arithmetic expression of integers and variables, or its text if it has no value."""
  names = re.sub(r'[A-Za-z_]\w*', lambda name: f'${{{name[0]}}}', re.sub(r'[${}]', '', match[1]))
  filled = _filled(names, variables)
  try:
    return str(_integer(ast.parse(filled, mode='eval').body))
  except (SyntaxError, ValueError, ZeroDivisionError):
    return match[0].replace('$', _KEPT)


def _integer(node: ast.expr) -> int:
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_integer(node.operand)
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
  raise ValueError(ast.dump(node))


def _is_end(word: str) -> bool:
  return bool(word) and set(word) <= set(_ENDS)


def _is_value(word: str) -> bool:
  """Returns whether a word after an option belongs to it: it is neither an option nor the end of the command."""
  is_option = _FLAG.fullmatch(word) or word.startswith('-') and not _NEGATIVE.match(word)
  return not is_option and not _is_end(word)
