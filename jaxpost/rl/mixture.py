"""Sources of prompts in one run, each with its own rewards, environment and sampling settings (`config.rl.sources`).

`parse` reads the field before a device is used; each `Prompt` then carries the settings of its
source, so that resuming a run, sampling ahead and dynamic sampling need no further state.

Legend: N sequences, G samples a prompt.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import typing
import urllib.parse

import numpy as np

from jaxpost.errors import InputError, did_you_mean, refuse
from jaxpost.losses import advantages

if typing.TYPE_CHECKING:
  from collections.abc import Callable, Collection, Sequence

  from jaxpost.data.row_views import Chain
  from jaxpost.data.sources import Rows
  from jaxpost.rewards.pool import RewardPool
  from jaxpost.rl.grading import GradedRollout, PendingRollout

_KEY = 'config.rl.sources'
# Option -> (field of `programs.sampling.Sampling`, type, lowest value, highest value).
_SAMPLING = {
  'max_new_tokens': ('max_tokens', int, 1, 2**31 - 1),
  'min_new_tokens': ('min_tokens', int, 0, 2**31 - 1),
  'top_k': ('top_k', int, 0, 2**31 - 1),
  'top_p': ('top_p', float, 0, 1),
  'min_p': ('min_p', float, 0, 1),
  'temperature': ('temperature', float, 1e-3, 1e4),
}
_OPTIONS = ('rewards', 'environment', 'teachers', *_SAMPLING)
_NONE = 'none'  # value of `environment` for a source that has none: single answers


def parse(config: typing.Any, names: Sequence[str], rows: Rows | Chain, held_out: bool = True) -> tuple[dict, ...]:
  """Returns `Prompt.source` of each entry of `config.rl.sources`.

  Each is {'name': str, 'rewards': list of functions, 'sampling': {field of `Sampling`: value}}, with
  `config.environment` also 'environment', a name or '', and with the option `teachers` also 'teachers', a list of int.
  If one source has a temperature, all have: the others get that of the run.

  An entry is 'NAME?option=value&option=value'; the options are `rewards`, names joined by '+', `environment`,
  `teachers`, positions in `config.distill.teachers` joined by '+', and the fields of `config.rollout` in `_SAMPLING`.

  Args:
    config: the resolved config of the stage.
    names: names of the reward functions, see `RewardPool.names`.
    rows: the rows of as many sources as there are entries.
    held_out: `rows` may be for evaluation. If they are then of one source for several entries, all functions grade
      them, and the result has the temperature alone, or is ().

  Raises:
    InputError: an entry is wrong, or does not go with another field.
  """
  parsed: list[dict] = []
  environments = {}
  if config.environment:
    from jaxpost.environments import by_source

    environments = by_source.specs(config.environment)
  for entry in config.rl.sources:
    name, _, query = entry.partition('?')
    refuse(not name.isidentifier(), f'{_KEY}: {entry!r} must be NAME?option=value&..., NAME of letters, digits and _')
    refuse(name in [source['name'] for source in parsed], f'{_KEY}: {name} is given twice')
    options = _options(name, query)
    parsed.append({'name': name, 'rewards': _rewards(name, options, names), 'sampling': _sampling(name, options)})
    if 'teachers' in options:
      from jaxpost.algorithms import teachers

      parsed[-1]['teachers'] = teachers.of_source(f'{_KEY}: {name}', options['teachers'], config)
    if config.environment or 'environment' in options:
      parsed[-1]['environment'] = _environment(name, options, environments)
    _check(parsed[-1], config)
  common = {'temperature': config.rollout.temperature} if any('temperature' in s['sampling'] for s in parsed) else {}
  for source in parsed:
    source['sampling'] = common | source['sampling']
  count = len(rows.sizes)
  if held_out and count == 1 < len(parsed):
    refuse(
      len(environments) > 1,
      f'config.eval.data.path: {rows.name} is one source, and config.environment has several environments; name as '
      f'many sources as {_KEY}, in the same order',
    )
    return ({'sampling': common},) if common else ()
  refuse(
    count != len(parsed), f'{_KEY}: has {len(parsed)} entries for {count} sources of {rows.name}; give one each, or ()'
  )
  return tuple(parsed)


def _options(name: str, query: str) -> dict[str, str]:
  options: dict[str, str] = {}
  for item in filter(None, query.split('&')):
    key, equals, value = item.partition('=')
    hint = did_you_mean(key, _OPTIONS)
    refuse(key not in _OPTIONS, f'{_KEY}: {name}: no option {key!r}; {hint}there are {", ".join(_OPTIONS)}')
    refuse(not equals or key in options, f'{_KEY}: {name}: {item!r} must be option=value, given once')
    options[key] = urllib.parse.unquote(value)
  return options


def _rewards(name: str, options: dict[str, str], names: Sequence[str]) -> list[str]:
  selected = options['rewards'].split('+') if 'rewards' in options else list(names)
  for reward in selected:
    refuse(
      reward not in names,
      f'{_KEY}: {name}: there is no reward {reward!r}; config.reward has {", ".join(names) or "no function"}',
    )
  return selected


def _environment(name: str, options: dict[str, str], environments: Collection[str]) -> str:
  value = options.get('environment', '')
  if not value:
    refuse(len(environments) > 1, f'{_KEY}: {name}: choose one with environment={"|".join([*environments, _NONE])}')
    return next(iter(environments))
  refuse(
    value not in (_NONE, *environments),
    f'{_KEY}: {name}: there is no environment {value!r}; config.environment has '
    f'{", ".join(environments) or "nothing"}, and {_NONE} is for single answers',
  )
  return '' if value == _NONE else value


def tools_by_row(
  tools: dict[str, list[dict]], sources: Sequence[dict], rows: Rows | Chain
) -> Callable[[int], list[dict]]:
  """Returns a function of the number of a row: JSON schemas of the tools that its prompt shows.

  Args:
    tools: {name of an environment: schemas of its tools}.
    sources: as `parse` returns them; without names, all rows show the tools of the only environment.
  """
  stops = list(itertools.accumulate(rows.sizes))
  default = next(iter(tools))

  def of_row(n: int) -> list[dict]:
    source = sources[bisect.bisect_right(stops, n)] if sources else {}
    return tools.get(source.get('environment', default), [])

  return of_row


def _sampling(name: str, options: dict[str, str]) -> dict[str, int | float]:
  sampling = {}
  for option, (field, kind, low, high) in _SAMPLING.items():
    if option not in options:
      continue
    try:
      value = kind(options[option])
    except ValueError:
      raise InputError(f'{_KEY}: {name}: {option}={options[option]!r} is no {kind.__name__}') from None
    refuse(not low <= value <= high, f'{_KEY}: {name}: {option}={value} is not from {low} to {high}')
    sampling[field] = value
  return sampling


def _check(source: dict, config: typing.Any) -> None:
  """Raises InputError where sampling settings do not go with other fields."""
  key = f'{_KEY}: {source["name"]}'
  sampling = source['sampling']
  rollout = config.rollout
  max_tokens = sampling.get('max_tokens', rollout.max_new_tokens)
  min_tokens = sampling.get('min_tokens', rollout.min_new_tokens)
  refuse(
    max_tokens > rollout.max_new_tokens,
    f'{key}: max_new_tokens={max_tokens} is more than config.rollout.max_new_tokens={rollout.max_new_tokens}, which is '
    'the room of all sequences; raise that one',
  )
  refuse(min_tokens > max_tokens, f'{key}: min_new_tokens={min_tokens} is more than max_new_tokens={max_tokens}')
  refuse(
    'top_k' in sampling and config.rl.sampling_mask,
    f'{key}: config.rl.sampling_mask keeps config.rollout.top_k tokens everywhere; leave one of them out',
  )
  refuse(
    bool(config.train_on_rollouts),
    f'{_KEY}: the prompts of config.train_on_rollouts keep the sources of their run; leave one of them out',
  )


def of_prompts(
  inputs: typing.Any, names: Sequence[str], rows: Rows | Chain, tools: list[dict] | dict | None, held_out: bool
) -> tuple[tuple[dict, ...], typing.Any]:
  """Returns (`Prompt.source` of each source, see `parse`; the argument `tools` of `PromptStream`)."""
  sources = parse(inputs.config, names, rows, held_out)
  for source in sources:
    refuse(
      source.get('environment') == '' and inputs.algorithm.rewards and not inputs.config.rewards_tuple(),
      f'{_KEY}: {source.get("name")}: has no environment, and config.reward is empty, so nothing grades its samples; '
      'name a reward function, or an environment',
    )
  return sources, tools_by_row(tools, sources, rows) if isinstance(tools, dict) else tools


def check_rows(pool: RewardPool, rows: Rows | Chain, sources: Sequence[dict]) -> None:
  """Raises InputError if a source lacks a column that its functions need; with `sources` (), all grade all rows."""
  if not sources:
    pool.check_rows(rows)
  stops = list(itertools.accumulate(rows.sizes))
  for source, start, stop in zip(sources, [0, *stops[:-1]], stops):
    pool.check_rows(rows, source.get('rewards'), range(start, stop))


def observe(pending: PendingRollout, graded: GradedRollout) -> None:
  """Adds `sources/NAME/*` to the metrics of a graded rollout, over its samples without answers of the data."""
  groups = collections.defaultdict(list)
  for g, prompt in enumerate(graded.rollout.prompts):
    groups[prompt.source['name']].append(g)
  shape = graded.verdicts.shape
  num_samples = shape[1] - (graded.rollout.demonstration is not None)  # an answer of the data is the last of its group
  rollout = graded.rollout
  tables = [x.reshape(shape)[:, :num_samples] for x in (graded.rewards, rollout.lengths, rollout.finished)]
  messages = rollout.messages or ()
  turns = np.array([sum(m['role'] == 'assistant' for m in episode) for episode in messages]).reshape(-1, shape[1])
  for name, members in sorted(groups.items()):
    rewards, lengths, finished = (table[members] for table in tables)
    out = {
      'groups': len(members),
      'mean_length': float(lengths.mean()),
      'clipped_ratio': float(1 - finished.mean()),
      'masked_samples': int((~np.isfinite(rewards)).sum()),
    }
    if messages:
      out['turns'] = float(turns[members].mean())
    if np.isfinite(rewards).any():
      out['reward'] = float(np.nanmean(rewards))
    compared = rewards[np.isfinite(rewards).sum(axis=1) > 1]
    if len(compared):
      out['frac_reward_zero_std'] = float(advantages.uniform(compared, np.isfinite(compared)).mean())
    pending.info |= {f'sources/{name}/{key}': value for key, value in out.items()}
