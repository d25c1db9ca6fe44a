"""The environment of a stage: its processes, and the sampler that plays in it.

Imported only where `config.environment` names one.
"""

from jaxpost.distributed import coordination
from jaxpost.environments.episodes import Episodes, Limits
from jaxpost.environments.pool import EnvironmentPool
from jaxpost.errors import InputError

_MOST = 64  # processes, where config.tools.workers leaves it open
_CHARACTERS = 16  # of a token at most, for what an environment may send


def start(config, algorithm, tokenizer) -> EnvironmentPool:
  """Checks the environment and its tools; the processes start when needed."""
  if not tokenizer.chat_template:
    raise InputError(
      'config.environment: tools answer in chats, and the tokenizer '
      f'{tokenizer.source} has no chat template; use that of an instruct '
      'model'
    )
  r, t = config.rollout, config.tools
  if r.top_logprobs:
    raise InputError(
      'config.rollout.top_logprobs: is for single answers, not for the turns of config.environment; set it to 0'
    )
  wanted = r.prompts * r.group_size if algorithm.on_policy else (config.eval.size * config.eval.samples)
  workers = t.workers or max(1, min(wanted, r.slots or wanted, _MOST) // coordination.process_count())
  pool = EnvironmentPool(
    config.environment,
    workers=workers,
    timeout_s=t.timeout_s,
    most=max(r.max_prompt_length, t.max_result_tokens) * _CHARACTERS,
  ).check()
  if pool.agent and coordination.process_count() > 1:
    pool.close()
    raise InputError(
      f'config.environment: {config.environment} is an agent that asks by '
      f'HTTP, for a run of one process; there are {coordination.process_count()}'
    )
  return pool


def sampler(prepared, engine, run_key) -> Episodes:
  config, make = prepared.config, Episodes
  r, t = config.rollout, config.tools
  if prepared.environment.agent:
    from jaxpost.environments.agents import Agents

    make = Agents
  return make(
    engine,
    run_key,
    prepared.environment,
    prepared.tokenizer,
    Limits(
      r.max_prompt_length, r.max_new_tokens, t.max_turns, t.max_result_tokens, t.wait_blocks, config.rewards.max_failed
    ),
  )
