"""The options of the commands in a shell script, whose own variables are filled in; nothing is run."""

from __future__ import annotations

import ast
import io
import itertools
import operator
import re
import shlex
from typing import Any

import yaml

_FLAG = re.compile(r'(?:--|\+{0,2})(?P<name>[A-Za-z_][\w./@-]*)=(?P<value>.*)', re.DOTALL)
_ASSIGNED = re.compile(r'(?P<name>[A-Za-z_]\w*)=(?P<value>.*)', re.DOTALL)  # the names of options have points or dashes
_NEGATIVE = re.compile(r'-\.?\d')
_ENDS = '\n;&|<>'  # what ends the words of a command in a shell
_STREAM = re.compile(r'(?<=\s)\d+(?=[<>])')  # as in 2>&1
_ARRAY = re.compile(r'(?m)^[ \t]*(?:declare -a )?[A-Za-z_]\w*\+?=\(')  # whose words are options of a later command
# Arithmetic, with brackets of its own two deep.
_SUM = re.compile(r'\$\(\(((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*)\)\)')
# $NAME, ${NAME}, and ${NAME:-DEFAULT}, where the default holds no other.
_VARIABLE = re.compile(r'\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}$]*))?\})')
_USED = re.compile(r'\$\{?[#!]?(\w+)')
_KEPT = '\0'  # stands for a $ that is left as it is: of a variable without a value in the script, and of values
_LONGEST = 1 << 20  # characters of a value: a variable that holds itself several times doubles with every line
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.floordiv,
  ast.Mod: operator.mod,
}


class _Lines:
  """A script whose comments, which shlex reads as lines, leave the end of the line, where a command ends."""

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

  A variable has the value that the script assigned to it before, or its default (`${NAME:-DEFAULT}`); others are left
  as they are written. A variable that the script assigns, but neither exports nor uses, is returned as $NAME. A script
  without any option is a file of settings: its variables are returned by their names.

  Raises:
    ValueError: a quotation has no end, or a value is too long.
  """
  words = [*_words(script), '\n']
  found: dict[str, Any] = {}
  variables: dict[str, str] = {}  # all that have a value at this place of the script
  own: dict[str, str] = {}  # those that the script keeps to itself
  assigned: dict[str, str] = {}  # by the command at hand
  exported = False  # by the command at hand
  begins = True  # a command, where NAME=VALUE is an assignment
  for i, word in enumerate(words):
    if begins and (match := _ASSIGNED.fullmatch(word)):
      variables[match['name']] = assigned[match['name']] = _filled(match['value'], variables)
      continue
    if _is_end(word) and not exported:  # before another word they are the environment of a program
      own |= assigned
    assigned = {}
    exported = word == 'export'
    begins = word in ('export', 'local', 'readonly', 'declare') or _is_end(word)
    if match := _FLAG.fullmatch(word):
      found[match['name']] = _value(match['value'], variables)
    elif word.startswith('--') and word != '--':
      found[word[2:]] = _value_behind(words[i + 1 :], variables)
  if not found:
    return {name: _value(value, {}) for name, value in own.items()}
  used = {*_USED.findall(script), *re.findall(r'\w+', ' '.join(_SUM.findall(script)))}
  return found | {f'${name}': _value(value, {}) for name, value in own.items() if name not in used}


def _value_behind(words: list[str], variables: dict[str, str]) -> Any:
  """Returns the value of an option that these words follow: one, a list of several, or True where there is none."""
  values = list(itertools.takewhile(_is_value, words))
  # Behind the value of a launcher's last option stands the program that it starts.
  program = next((n for n, value in enumerate(values) if n and value.endswith('.py')), None)
  values = [_value(value, variables) for value in values[:program]]
  if not values:
    return True
  return values if len(values) > 1 else values[0]


def _words(script: str) -> list[str]:
  """The words of a script, with the ends of its commands."""
  script = _ARRAY.sub('\n', _STREAM.sub('', script.replace('\\\n', ' ')))
  script = _SUM.sub(lambda match: re.sub(r'\s', '', match[0]), script)
  lexer = shlex.shlex(_Lines(script), posix=True, punctuation_chars=_ENDS)
  lexer.whitespace, lexer.whitespace_split = ' \t\r', True
  # The last word of an array has its bracket, or is that bracket, which ends the words as a line does.
  words = ('\n' if word == ')' else word for word in lexer)
  return [word.removesuffix(')') if word.count(')') > word.count('(') else word for word in words]


def _value(text: str, variables: dict[str, str]) -> Any:
  text = _filled(text, variables)
  return text if '$' in text else yaml.safe_load(text)


def _filled(text: str, variables: dict[str, str]) -> str:
  """The text with the values of variables and of sums of them."""

  def variable(match: re.Match) -> str:
    name = match[1] or match[2]
    return variables.get(name, match[0] if match[3] is None else match[3]).replace('$', _KEPT)

  text = _SUM.sub(lambda match: _computed(match, variables), text)
  before = ''
  while text != before:  # ends: each turn leaves fewer $
    before, text = text, _VARIABLE.sub(variable, text)
    if len(text) > _LONGEST:
      raise ValueError(f'the value {text[:40]}... grows to {len(text):,} characters')
  return text.replace(_KEPT, '$')


def _computed(match: re.Match, variables: dict[str, str]) -> str:
  """The value of an arithmetic expression of integers and variables, or its text."""
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
  """Returns whether a word behind an option belongs to it: it is no option itself, and the command goes on."""
  is_option = _FLAG.fullmatch(word) or word.startswith('-') and not _NEGATIVE.match(word)
  return not is_option and not _is_end(word)
