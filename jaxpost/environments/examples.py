"""Two example environments: a calculator and a small text game.

Each is a class that TRL's `environment_factory` accepts; docs/environments.md describes the protocol. `treasure` and
`treasure_played` are functions for `config.data.map`, which make rows of the game from generated sums.
"""

import ast
import operator
import re
import zlib
from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
_CALL = '<tool_call>\n{"name": "move", "arguments": {"direction": "%s"}}\n</tool_call>'


class Calculator:
  """A calculator tool. It has no reward; `config.reward` grades the answer of the episode."""

  def reset(self, **row) -> None:
    """Adds nothing to the prompt."""

  def calculate(self, expression: str) -> str:
    """
    Works out an expression of numbers, + - * / and parentheses.

    Args:
      expression: Such as (16 - 3 - 4) * 2

    Returns:
      The value.
    """
    if len(expression) > 200:
      raise ValueError('an expression of 200 characters at most')
    return f'{_value(ast.parse(expression.strip(), mode="eval").body):.10g}'


def _value(node: ast.AST) -> float:
  """Evaluates a syntax tree of arithmetic."""
  if isinstance(node, ast.Constant) and (type(node.value) is int or type(node.value) is float):
    return node.value
  if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
    return _BINARY[type(node.op)](_value(node.left), _value(node.right))
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand)
  raise ValueError('only numbers, + - * / and parentheses')


class Treasure:
  """A line of rooms, one of which has a treasure. The data has the columns `start` and `treasure`, numbers of rooms."""

  def reset(self, start: int, treasure: int, **row) -> str:
    """Places the player in a room; returns its description, which is added to the prompt."""
    self.room = int(start)
    self.treasure = int(treasure)
    self.moves = 0
    return f' {self._view()}'

  def move(self, direction: str) -> str:
    """
    Goes to the next room.

    Args:
      direction: Either left or right.

    Returns:
      What there is to see.
    """
    if direction not in ('left', 'right'):
      raise ValueError('The direction is left or right.')
    if self.room == self.treasure:
      raise ValueError('The game is over.')
    self.room += 1 if direction == 'right' else -1
    self.moves += 1
    return self._view()

  def get_reward(self) -> float:
    """Returns 1 for the treasure, less 0.05 for each move after the first; else 0."""
    found = self.room == self.treasure
    return max(0.0, 1.05 - 0.05 * self.moves) if found else 0.0

  def _view(self) -> str:
    if self.room == self.treasure:
      return f'Room {self.room}: here it is!'
    side = 'right' if self.treasure > self.room else 'left'
    return f'Room {self.room}: it is {side}.'


def treasure(row: dict) -> dict:
  """Makes a game of one move from a row with two numbers in its prompt.

  The treasure is on the right in three games out of four.
  """
  start, other = _numbers(row)
  return {
    'prompt': [{'role': 'user', 'content': 'Find it.'}],
    'start': start,
    'treasure': start + (1 if other % 4 else -1),
  }


def treasure_played(row: dict) -> dict:
  """Makes a row for supervised fine-tuning: a game with one move in a random direction."""
  game_row = treasure(row)
  game = Treasure()
  view = game.reset(**game_row)
  direction = ('left', 'right')[zlib.crc32(repr(_numbers(row)).encode()) % 2]
  return {
    'messages': [
      {'role': 'user', 'content': game_row['prompt'][0]['content'] + view},
      {'role': 'assistant', 'content': _CALL % direction},
      {'role': 'tool', 'name': 'move', 'content': game.move(direction)},
      {'role': 'assistant', 'content': 'Done.'},
    ]
  }


def _numbers(row: dict) -> list[int]:
  """Returns the first two numbers of the prompt."""
  prompt = row['prompt']
  text = prompt if isinstance(prompt, str) else prompt[-1]['content']
  return [int(n) for n in re.findall(r'\d+', text)[:2]]
