"""Flags of commands that sample completions: --n, --seed, --temperature and the like."""

from __future__ import annotations

from typing import Any, NamedTuple

from absl import flags

flags.disclaim_key_flags()  # the flags belong to the command that defines them


class SamplingFlags(NamedTuple):
  """The flags that decide completions, besides weights and prompts."""

  n: flags.FlagHolder
  seed: flags.FlagHolder
  max_new_tokens: flags.FlagHolder
  temperature: flags.FlagHolder
  top_p: flags.FlagHolder

  def arguments(self) -> dict[str, Any]:
    """Returns the arguments of `completions.Draws`."""
    return {name: flag.value for name, flag in self._asdict().items()}


def define(max_new_tokens: int) -> SamplingFlags:
  """Defines the flags for the calling command, with its default length."""
  return SamplingFlags(
    n=flags.DEFINE_integer('n', 1, 'Completions per prompt.', lower_bound=1),
    seed=flags.DEFINE_integer('seed', 0, 'Seed of sampling.', lower_bound=0),
    max_new_tokens=flags.DEFINE_integer(
      'max_new_tokens', max_new_tokens, 'Tokens of the longest completion.', lower_bound=1
    ),
    temperature=flags.DEFINE_float('temperature', 1.0, 'Temperature of sampling; 0: greedy.', lower_bound=0.0),
    top_p=flags.DEFINE_float(
      'top_p',
      1.0,
      'Sample from the most probable tokens of this total probability; 1: off.',
      lower_bound=1e-6,
      upper_bound=1.0,
    ),
  )
