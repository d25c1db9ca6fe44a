"""Loads an `Algorithm` from a module or file of the user, and checks that it is complete."""

import dataclasses

from jaxpost import imports
from jaxpost.algorithms.base import Algorithm
from jaxpost.errors import InputError


def load(target: str, attribute: str) -> Algorithm:
  """Returns the Algorithm that pkg.module or ./file.py has as `attribute`.

  Raises:
    InputError: there is none, or it is incomplete.
  """
  module = imports.load_module(target, 'config.algorithm')
  algorithm = vars(module).get(attribute)
  if not isinstance(algorithm, Algorithm):
    raise InputError(
      f'config.algorithm: {target} has no {attribute} = jaxpost.Algorithm(...); docs/your_algorithm.md shows one'
    )
  _check_complete(algorithm, target)
  return algorithm


def _check_complete(algorithm: Algorithm, target: str) -> None:
  """Raises InputError if an algorithm lacks a function, or has a value that is not a function in its place."""
  for field in dataclasses.fields(algorithm):
    value = vars(algorithm)[field.name]
    if (field.name == 'objective' or callable(field.default)) and not callable(value):
      raise InputError(
        f'config.algorithm: {target}: `{field.name}` is {value!r:.60} and must be a function; the docstring of '
        'jaxpost.Algorithm has its arguments'
      )
  if algorithm.on_policy and algorithm.credit is Algorithm.credit:
    raise InputError(
      f'config.algorithm: {target}: is on_policy and has no `credit`; jaxpost.algorithms.grpo has an example'
    )
  if not algorithm.on_policy and algorithm.render is None:
    raise InputError(
      f'config.algorithm: {target}: is not on_policy and has no `render`, which makes examples of rows; '
      'jaxpost.algorithms.sft.render_text is an example'
    )
