"""Loads an `Algorithm` from a module or file of the user, and checks algorithms and models of the user."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import imports
from jaxpost.algorithms.base import Algorithm, Config
from jaxpost.errors import InputError, refuse, type_of
from jaxpost.programs.compile import Program
from jaxpost.types import Credit, Experience

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.stage.place import PlacedStage

_CHANGE = 1e-3  # share of the largest hidden state, in float32, that rounding may explain
_HALF = 6  # tokens of each of two documents


def load_algorithm(target: str, attribute: str) -> Algorithm:
  """Returns the Algorithm that pkg.module or ./file.py has as `attribute`, with a check of what its `credit` returns.

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
  return dataclasses.replace(algorithm, credit=functools.partial(_checked_credit, algorithm, target))


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


def _checked_credit(algorithm: Algorithm, target: str, experience: Experience, config: Config) -> Credit:
  """Returns an algorithm's credit; raises InputError for a type, name, shape or value that no update could read."""
  result, where = algorithm.credit(experience, config), f'config.algorithm: {target}: the result of `credit`'
  refuse(not isinstance(result, Credit), f'{where} is {type_of(result)} and must be a jaxpost.Credit')
  if algorithm.pack:  # makes the batch of arrays of its own
    return result
  shape = experience.mask.shape
  for name, values in {'mask': result.mask, **result.arrays}.items():
    shapes = [shape] if name == 'mask' else [shape, (len(experience.mask), 1)]
    refuse(
      np.shape(values) not in shapes,
      f'{where}: `{name}` has the shape {np.shape(values)} and must have {" or ".join(map(str, shapes))}',
    )
    refuse(
      not (np.isfinite(values) | (result.mask == 0)).all(),
      f'{where}: `{name}` is not finite on trained tokens in step {experience.step + 1}; where there is no reward, '
      'experience.rewards is NaN, and the mask must be 0',
    )
  if algorithm.prepare is Algorithm.prepare:  # another one may add arrays
    for objective in filter(None, (algorithm.objective(config), algorithm.critic(config))):
      for name in objective.arrays:
        refuse(name not in result.arrays, f'{where} has no array {name!r}, which the objective names in `arrays`')
  return result


def check_masks(placed: PlacedStage, params: dict) -> None:
  """Raises InputError if a custom model computes hidden states from tokens that they must not depend on.

  A model that sees the next token would train without an error, with a loss near 0.

  Args:
    params: in the layout `placed.train`.
  """
  compute = dataclasses.replace(placed.compute, dtype='float32')
  measure = functools.partial(_changes, placed.model, compute, placed.train)
  for name, change in Program('masks', measure, placed.ledger, placed.train.sharding())(params).items():
    refuse(
      not float(change) <= _CHANGE,
      f'config.model.preset: hidden states of {placed.model.config.code} change by {float(change):.1e} of the largest '
      f'with {name}; a token may attend only to itself and to earlier tokens with the same segment id',
    )


def _changes(model: Model, compute: Compute, layout: Layout, params: dict) -> dict[str, jax.Array]:
  """Returns {what changes: the largest change of a hidden state that has to stay, over the largest hidden state}.

  Two documents are in a row, without and with other tokens.
  """
  index = jnp.arange(2 * _HALF)
  in_first, before_last = index < _HALF, index < _HALF - 1  # before the last token of the first document
  # {what changes: (tokens that are replaced, tokens whose hidden states must stay)}
  cases = {'later tokens': (~before_last, before_last), 'other documents': (in_first, ~in_first)}
  tokens = jnp.stack([7 * index, *(7 * index + changed for changed, _ in cases.values())])
  positions, segment_ids = (jnp.broadcast_to(x, tokens.shape) for x in (index % _HALF, 1 + index // _HALF))
  hidden = model.forward(
    params, tokens % model.config.vocab_size, positions, segment_ids, compute=compute, constrain=layout
  ).astype(jnp.float32)
  changes = jnp.max(jnp.abs(hidden[1:] - hidden[0]), axis=2) / jnp.max(jnp.abs(hidden))
  return {name: jnp.max(change * stay) for change, (name, (_, stay)) in zip(changes, cases.items())}
