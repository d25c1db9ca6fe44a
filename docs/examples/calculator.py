"""An environment with a tool: word problems, and a calculator to work them out.

For rows with `answer` (GSM8K's, or a number): configs/tools_gsm8k.py. An
episode is rewarded if the last number that the model says is the answer.
"""

import ast
import operator
import re

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub,
              ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.USub: operator.neg}


class Calculator:
  """One problem; as TRL's `environment_factory` makes them."""

  def reset(self, answer, **row):
    """Starts a problem; the prompt says it all."""
    self.answer = float(str(answer).split('####')[-1].replace(',', ''))
    self.given = None

  def calculate(self, expression: str) -> str:
    """
    Works out an expression of numbers, + - * / and parentheses.

    Args:
      expression: such as (16 - 3 - 4) * 2

    Returns:
      The value.
    """
    return f'{_value(ast.parse(expression, mode="eval").body):g}'

  def submit(self, answer: float) -> str:
    """
    Gives the final answer to the problem.

    Args:
      answer: A number.

    Returns:
      What became of it.
    """
    if self.given is not None:
      raise ValueError('there was an answer already')
    self.given = float(re.sub('[^-.0-9]', '', str(answer)))
    return 'taken'

  def get_reward(self):
    """1 for the right answer, 0 for another or none."""
    return float(self.given is not None and abs(
        self.given - self.answer) < 1e-6)


def _value(node):
  """The number that a syntax tree of arithmetic stands for."""
  if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
    return node.value
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
  if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
    return _OPERATORS[type(node.op)](_value(node.operand))
  raise ValueError('only numbers, + - * / and parentheses')
