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
  found = vars(module).get(attribute)
  if not isinstance(found, Algorithm):
    raise InputError(
      f'config.algorithm: {target} has no {attribute} = jaxpost.Algorithm(...); docs/your_algorithm.md shows one'
    )
  _check_complete(found, target)
  return found


def _check_complete(found: Algorithm, target: str) -> None:
  """Raises InputError where an algorithm lacks a function, or has something else in its place."""
  for field in dataclasses.fields(found):
    value = vars(found)[field.name]
    if (field.name == 'objective' or callable(field.default)) and not callable(value):
      raise InputError(
        f'config.algorithm: {target}: `{field.name}` is {value!r:.60} and must be a function; the docstring of '
        'jaxpost.Algorithm has its arguments'
      )
  if found.on_policy and found.credit is Algorithm.credit:
    raise InputError(f'config.algorithm: {target}: on_policy without `credit`; that of jaxpost.algorithms.grpo is one')
  if not found.on_policy and found.render is None:
    raise InputError(
      f'config.algorithm: {target}: neither on_policy nor a `render` for '
      'data; jaxpost.algorithms.sft.render_text is that of SFT'
    )
