"""Several environments in one run: the source of a prompt chooses its environment (`config.rl.sources`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxpost.rewards import builtin

if TYPE_CHECKING:
  from jaxpost.environments.pool import EnvironmentPool
  from jaxpost.types import Prompt


def specs(environment: str) -> dict[str, str]:
  """Returns {short name: './env.py:Class' or 'pkg.module:Class'} of `config.environment`, separated by commas."""
  entries = [spec.strip() for spec in environment.split(',') if spec.strip()]
  return dict(zip(builtin.short_names(entries), entries))


class PoolsBySource:
  """Replaces `EnvironmentPool` if the source of a prompt decides in which environment its episodes play.

  Attributes:
    tools: {name: JSON schemas of the tools of that environment}.
    gives_turn_rewards: True if one of them gives rewards of turns.
    agent: False, as an agent is the only environment of its run.
  """

  def __init__(self, pools: Mapping[str, EnvironmentPool]) -> None:
    self._pools = dict(pools)
    self.tools = {name: pool.tools for name, pool in pools.items()}
    self.gives_turn_rewards = any(pool.gives_turn_rewards for pool in pools.values())
    self.agent = False

  def each(self) -> list[EnvironmentPool]:
    """Returns the pools that episodes may play in."""
    return list(self._pools.values())

  def of(self, prompt: Prompt) -> EnvironmentPool | None:
    """Returns the pool in which the episodes of a prompt play; None for a single answer.

    Held-out prompts without a source play in the only environment.
    """
    return self._pools.get(prompt.source.get('environment', next(iter(self._pools))))

  def close(self) -> None:
    """Ends all processes."""
    for pool in self._pools.values():
      pool.close()
