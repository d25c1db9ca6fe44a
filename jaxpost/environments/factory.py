"""Makes the environments of a stage, and the sampler that plays in them; imported only with `config.environment`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpost.distributed import coordination
from jaxpost.environments import by_source
from jaxpost.environments.episode import EpisodeLimits
from jaxpost.environments.episodes import Episodes
from jaxpost.environments.pool import EnvironmentPool
from jaxpost.errors import InputError, refuse

if TYPE_CHECKING:
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer

_MAX_WORKERS = 64  # processes, if config.tools.workers is 0
_CHARACTERS = 16  # upper limit of the characters of one token; bounds the length of texts from an environment


def start_environments(
  config: Any, algorithm: Any, tokenizer: Tokenizer, data: Sequence[Rows] = ()
) -> EnvironmentPool | by_source.PoolsBySource:
  """Makes the pool of each environment of `config.environment` and starts its first process, to read the tools.

  The other processes start when they are needed.

  Args:
    data: rows that episodes start from; their columns are checked if there is one environment.

  Raises:
    InputError: if the environment cannot be imported, or does not fit the config, the tokenizer or the data.
  """
  if not tokenizer.chat_template:
    raise InputError(
      f'config.environment: tools need a chat template, and the tokenizer {tokenizer.source} has none; use the '
      'tokenizer of an instruct model'
    )
  specs = check_fields(config)
  if len(specs) == 1 and not any('environment=' in entry for entry in config.rl.sources):
    pool = _start(next(iter(specs.values())), config, algorithm)
    for rows in data:
      pool.check_rows(rows)
    return pool
  pools = {}
  with contextlib.ExitStack() as undo:
    for name, spec in specs.items():
      pools[name] = _start(spec, config, algorithm)
      undo.callback(pools[name].close)
      if pools[name].agent:
        raise InputError(
          f'config.environment: {spec} is an agent, which plays with all prompts of its run; leave it alone'
        )
    undo.pop_all()
  return by_source.PoolsBySource(pools)


def check_fields(config: Any) -> dict[str, str]:
  """Returns `by_source.specs` of a run or a plan; InputError for fields that do not fit `config.environment`."""
  specs = by_source.specs(config.environment)
  refuse(
    config.rollout.top_logprobs > 0,
    'config.rollout.top_logprobs: is for single answers, not for the turns of config.environment; set it to 0',
  )
  refuse(
    len(specs) > 1 and not config.rl.sources,
    f'config.environment: there are {len(specs)} ({", ".join(specs)}); config.rl.sources has to say which one the '
    'prompts of each source play in',
  )
  return specs


def _start(spec: str, config: Any, algorithm: Any) -> EnvironmentPool:
  tools = config.tools
  pool = EnvironmentPool(
    spec,
    workers=tools.workers or _default_workers(config, algorithm),
    timeout_s=tools.timeout_s,
    env_vars=tools.env_vars,
    max_characters=max(config.rollout.max_prompt_length, tools.max_result_tokens) * _CHARACTERS,
  )
  has_rewards = pool.gives_reward or pool.gives_turn_rewards or config.rewards_tuple() or config.train_on_rollouts
  problem, processes = '', coordination.process_count()
  if pool.agent and processes > 1:
    problem = f'an agent uses HTTP, which works in a run of one process; there are {processes}'
  elif pool.agent and pool.gives_turn_rewards:
    problem = 'an agent, whose calls are its own, gives no reward for a turn; leave out the attribute turn_reward'
  elif pool.agent and any('max_new_tokens=' in entry for entry in config.rl.sources):
    problem = 'episodes of an agent end at config.rollout.max_new_tokens; leave out max_new_tokens in config.rl.sources'
  elif config.rl.advantage == 'mt_grpo' and not pool.gives_turn_rewards:
    problem = 'rl.advantage=mt_grpo needs rewards of turns: let tools set the attribute turn_reward, or use grpo'
  elif algorithm.rewards and not has_rewards:
    problem = 'has no get_reward and no turn_reward, and config.reward is empty, so nothing is graded; add one of them'
  if problem:
    pool.close()
    raise InputError(f'config.environment: {spec}: {problem}')
  return pool


def _default_workers(config: Any, algorithm: Any) -> int:
  """Returns how many processes to start on this host: one per episode in flight, up to a limit."""
  rollout = config.rollout
  episodes = rollout.prompts * rollout.group_size if algorithm.on_policy else config.eval.size * config.eval.samples
  in_flight = min(episodes, rollout.slots or episodes, _MAX_WORKERS)
  return max(1, in_flight // coordination.process_count())


def make_sampler(
  environment: EnvironmentPool | by_source.PoolsBySource, tokenizer: Tokenizer, config: Any, engine: Any, run_key: Any
) -> Episodes:
  """Makes the sampler of a stage: `Agents` if the environment is an agent, else `Episodes`."""
  limits = EpisodeLimits(
    prompt=config.rollout.max_prompt_length,
    tokens=config.rollout.max_new_tokens,
    turns=config.tools.max_turns,
    result=config.tools.max_result_tokens,
    wait_blocks=config.tools.wait_blocks,
    failed=config.rewards.max_failed,
  )
  if environment.agent:
    from jaxpost.environments.agents import Agents  # it starts an HTTP server

    return Agents(engine, run_key, environment, tokenizer, limits)
  return Episodes(engine, run_key, environment, tokenizer, limits)
