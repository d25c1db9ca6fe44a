"""Refuses a `config.save.keep_best` that the evaluations of a stage will not have, before any stage trains."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.errors import refuse
from jaxpost.rewards import builtin
from jaxpost.rl.reward_metrics import has_threshold
from jaxpost.stage.algorithms import ALGORITHMS
from jaxpost.stage.evaluate import pass_rates
from jaxpost.types import Batch, Outputs

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.stage.config import Config


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises InputError unless an evaluation of the stage can have the metric `config.save.keep_best`.

  The metrics of the loss of an algorithm of the user are known once it is evaluated (`Checkpointer.check_metrics`).
  """
  name, has_loss = config.save.keep_best, bool(algorithm.render and not algorithm.on_policy)
  refuse(
    not (config.eval.data.path and (config.eval.samples or not algorithm.on_policy)),
    'config.save.keep_best: nothing is evaluated; set config.eval.data.path, and on-policy config.eval.samples, too',
  )
  names = of_samples(config) if config.eval.samples else set()
  if has_loss and config.algorithm in ALGORITHMS:
    names |= of_loss(config, algorithm)
  refuse(
    name not in names and not name.startswith('time/') and not (has_loss and config.algorithm not in ALGORITHMS),
    f'config.save.keep_best: an evaluation of {config.algorithm} has no metric {name!r}; it has '
    f'{", ".join(sorted(names))}',
  )


def of_samples(config: Config) -> set[str]:
  """Returns the names of the metrics of `evaluate.SampledEval`; some are left out if no sample is graded."""
  rewards = [*builtin.short_names(config.rewards_tuple()), *(['environment'] if config.environment else [])]
  names = {'completions/mean_length', 'completions/clipped_ratio', 'ungraded_prompts', 'reward'}
  names |= {f'rewards/{reward}/{figure}' for reward in rewards for figure in ('mean', 'std')}
  suffixes = ['', *(f'/{reward}' for reward in rewards)] if has_threshold(rewards, config.eval.pass_reward) else []
  return names | {rate + suffix for rate in pass_rates(np.zeros((1, config.eval.samples))) for suffix in suffixes}


def of_loss(config: Config, algorithm: Algorithm) -> set[str]:
  """Returns the names of the metrics of `evaluate.HeldOut`, without computing one of them."""
  objective = algorithm.objective(config)
  shape = (1, 4)  # one row; any number of tokens has the same metrics

  def metrics() -> dict:
    ints, floats = jnp.ones(shape, jnp.int32), jnp.zeros(shape)
    arrays = collections.defaultdict(lambda: floats, dict.fromkeys(objective.arrays, floats))  # also those of rows
    for computed in algorithm.precompute(config).values():
      arrays |= {name: jnp.zeros((*shape, *tail), dtype) for name, (tail, dtype) in computed.arrays.items()}
    batch = Batch(ints, ints, ints, floats, sequence_ids=ints, arrays=arrays)
    outputs = Outputs(**{field.name: floats for field in dataclasses.fields(Outputs)})
    return objective.fn(outputs, batch if objective.coupled else arrays)[1]

  names = {'loss', *jax.eval_shape(metrics)}
  return names | ({'perplexity'} if 'entropy' in names and 'rewards/chosen' not in names else set())
