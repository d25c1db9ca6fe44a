"""Flags of commands that sample completions: --seed, --temperature and the like, and --n where there can be several."""

from __future__ import annotations

from typing import Any, NamedTuple

from absl import flags

flags.disclaim_key_flags()  # the flags belong to the command that defines them


class SamplingFlags(NamedTuple):
  """The flags that decide completions, in addition to weights and prompts; a chat has no `n`."""

  seed: flags.FlagHolder
  max_new_tokens: flags.FlagHolder
  temperature: flags.FlagHolder
  top_p: flags.FlagHolder
  n: flags.FlagHolder | None

  def arguments(self) -> dict[str, Any]:
    """Returns the arguments of `completions.Draws`."""
    values = {name: flag.value for name, flag in self._asdict().items() if flag is not None}
    return {name: value for name, value in values.items() if value is not None}


def define(max_new_tokens: int, several: bool = True) -> SamplingFlags:
  """Defines the flags for the calling command, with its default length.

  Args:
    max_new_tokens: default of that flag.
    several: whether a prompt can have several completions, which --n asks for.
  """
  return SamplingFlags(
    n=flags.DEFINE_integer('n', 1, 'Completions per prompt.', lower_bound=1) if several else None,
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
