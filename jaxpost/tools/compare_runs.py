"""Compares runs: configs, final figures, curves, rewards on shared prompts, the first sample that differs.

Random draws depend only on the seed, the step, the prompt and the index of the sample, so two runs that differ in one
field share prompts and random numbers. Their rewards are compared in pairs, which removes the variance between prompts.
"""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import scipy.stats
from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import display, metrics, report
from jaxpost.stage import algorithms, checks
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store

_LEVEL = 0.95
_IGNORED = ('log.', 'save.', 'stages')  # fields that do not change what a stage computes


@dataclasses.dataclass(frozen=True)
class Paired:
  """The mean difference of rewards, the second run minus the first, over shared prompts.

  low, high: its 95 % confidence interval, over the means of prompts; nan for a single prompt.
  """

  stage: str
  split: str
  step: int
  prompts: int
  samples: int
  first: float
  second: float
  low: float
  high: float

  @property
  def difference(self) -> float:
    """Mean reward of the second run minus that of the first."""
    return self.second - self.first


@dataclasses.dataclass(frozen=True)
class Parting:
  """The first sample of a shared prompt that differs: its place, and both texts from the first difference on."""

  stage: str
  split: str
  step: int
  prompt: str
  sample: int
  shared: str  # their common beginning
  first: str
  second: str


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Two runs side by side; `fields` is {stage.field: (first, second)}, `figures` {METRIC/STAGE: (first, second)}.

  Figures are as `report.shown` returns them. Those that repeat others of their run are left out. `sampled`: both runs
  have samples.
  """

  names: tuple[str, ...]
  fields: dict[str, tuple]
  figures: dict[str, tuple]
  paired: list[Paired]
  sampled: bool
  parting: Parting | None


def compare(first: epath.PathLike, second: epath.PathLike) -> Comparison:
  """Compares two runs.

  Raises:
    InputError: one of the folders holds no run.
  """
  runs = [_run(first), _run(second)]
  names = labels([first, second])
  values = [report.figures(metrics.read_rows(run / 'metrics.jsonl')) for run in runs]
  keys = [
    key
    for key in values[0] | values[1]
    if not metrics.is_clock_key(key.rpartition('/')[0].removeprefix('eval_'))
    and not all(report.is_repeated(key, run_values) for run_values in values if key in run_values)
  ]
  stages = list(dict.fromkeys(key.rpartition('/')[2] for key in keys))
  keys.sort(key=lambda key: stages.index(key.rpartition('/')[2]))
  paired: list[Paired] = []
  parting = None
  for stage, step, rows in _shared_samples(*runs):
    paired += _pairs(stage, step, rows)
    parting = parting or _first_difference(stage, step, rows)
  return Comparison(
    names,
    fields=config_difference(*runs),
    figures={k: tuple(report.shown(k.rpartition('/')[0], v.get(k)) for v in values) for k in keys},
    paired=paired,
    sampled=all(any(run.glob('samples/*/*.jsonl')) for run in runs),
    parting=parting,
  )


def labels(runs: Sequence[epath.PathLike]) -> tuple[str, ...]:
  """Returns short names of the folders, all different."""
  paths = [str(run).rstrip('/').split('/') for run in runs]
  for count in range(1, max(map(len, paths)) + 1):
    names = tuple('/'.join(path[-count:]) for path in paths)
    if len(set(names)) == len(names):
      return names
  raise InputError(f'{runs[0]}: is named twice')


def _run(path: epath.PathLike) -> epath.Path:
  path = epath.Path(path).expanduser()
  if not (path / 'config.json').exists():
    raise InputError(f'{path}: is no run, it has no config.json')
  return path


def config_difference(first: epath.Path, second: epath.Path) -> dict[str, tuple]:
  """Returns {stage.field: (first, second)} of the fields that decide what two runs compute.

  Stages with the same name are compared; the others are paired from the last one backward, as 'FIRST/SECOND'. Values
  that are left to the method are those that it uses.
  """
  configs = [config_lib.parse_saved(run / 'config.json') for run in (first, second)]
  order = tuple(list(stages) for stages in configs)
  fields: dict[str, tuple] = {'stages': order} if order[0] != order[1] else {}
  unpaired = [[name for name in own if name not in others] for own, others in (order, order[::-1])]
  pairs = [(name, name) for name in order[0] if name in configs[1]]
  pairs += reversed(list(zip(reversed(unpaired[0]), reversed(unpaired[1]))))
  for a, b in pairs:
    differences = _stage_difference(configs[0][a], configs[1][b])
    label = a if a == b else f'{a}/{b}'
    fields |= {f'{label}.{key}': values for key, values in differences.items()}
  return fields


def _stage_difference(*stages: config_lib.Config) -> dict[str, tuple]:
  """Returns {field: (first, second)}; fields that a method does not read only if the configs themselves differ."""
  written = config_lib.difference(*stages)
  resolved = [_resolved(config) for config in stages]
  used = config_lib.difference(*(config for config, _ in resolved))
  unread = {section for _, sections in resolved for section in sections}
  shared = {key: values for key, values in used.items() if key.partition('.')[0] not in unread}
  differences = {key: values for key, values in used.items() if key in written} | shared
  return {key: differences[key] for key in sorted(differences) if not key.startswith(_IGNORED)}


def _resolved(config: config_lib.Config) -> tuple[config_lib.Config, set[str]]:
  """Returns the config as the method uses it, and the sections that the method does not read.

  If a custom method cannot be imported here, returns the config itself.
  """
  try:
    algorithm = algorithms.load_algorithm(config.algorithm)
  except InputError:
    return config, set()
  sections = checks.OF_METHODS if algorithm.sections is None else algorithm.sections
  unread = {*checks.OF_METHODS} - {*sections} | (set() if algorithm.on_policy else {'rollout'})
  return config_lib.resolve(config, algorithm.defaults), unread


def _shared_samples(first: epath.Path, second: epath.Path) -> Iterator[tuple[str, int, list[tuple[dict, dict]]]]:
  """Yields (stage, step, pairs of rows of the same prompt and sample), in the order of training."""
  for stage in config_lib.parse_saved(first / 'config.json'):
    first_files = metrics.sample_files(first / 'samples' / stage)
    second_files = metrics.sample_files(second / 'samples' / stage)
    for step, file in first_files.items():
      if step not in second_files:
        continue
      others = {_key(row): row for row in metrics.read_growing(second_files[step])}
      rows = [(row, others[_key(row)]) for row in metrics.read_growing(file) if _key(row) in others]
      if rows:
        yield stage, step, rows


def _key(row: Mapping) -> tuple:
  return row.get('split'), json.dumps(row.get('prompt')), row.get('prompt_index'), row.get('sample', 0)


def _pairs(stage: str, step: int, rows: Sequence[tuple[dict, dict]]) -> Iterator[Paired]:
  """Yields the paired difference of each split with rewards."""
  by_split: dict[str, dict] = collections.defaultdict(lambda: collections.defaultdict(list))
  for row, other in rows:
    values = row.get('reward'), other.get('reward')
    if None not in values:
      by_split[row['split']][_key(row)[1:3]].append(values)
  for split, prompts in by_split.items():
    means = [tuple(statistics.fmean(rewards) for rewards in zip(*values)) for values in prompts.values()]
    differences = [second_mean - first_mean for first_mean, second_mean in means]
    middle, half_interval = statistics.fmean(differences), half_width(differences)
    first, second = (statistics.fmean(rewards) for rewards in zip(*means))
    yield Paired(
      stage,
      split,
      step,
      prompts=len(means),
      samples=sum(map(len, prompts.values())),
      first=first,
      second=second,
      low=middle - half_interval,
      high=middle + half_interval,
    )


def half_width(values: Sequence[float]) -> float:
  """Returns half of the 95 % confidence interval of a mean, by Student's t; nan for fewer than two values."""
  if len(values) < 2:
    return math.nan
  return float(scipy.stats.t.ppf((1 + _LEVEL) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def _first_difference(stage: str, step: int, rows: Sequence[tuple[dict, dict]]) -> Parting | None:
  for row, other in rows:
    texts = str(row.get('completion')), str(other.get('completion'))
    if texts[0] != texts[1]:
      shared = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
      return Parting(
        stage,
        row.get('split', 'train'),
        step,
        prompt=str(row.get('prompt')),
        sample=row.get('sample', 0),
        shared=texts[0][:shared],
        first=texts[0][shared:],
        second=texts[1][shared:],
      )
  return None


def write_page(runs: Sequence[epath.PathLike], out: epath.PathLike) -> None:
  """Writes one HTML page: each run compared with the first, and curves of all runs with common axes."""
  paths = [_run(run) for run in runs]
  names = labels(runs)
  rows = {name: metrics.read_rows(path / 'metrics.jsonl') for name, path in zip(names, paths)}
  configs = [config_lib.parse_saved(path / 'config.json') for path in paths]
  algorithms = {stage: config.algorithm for stages in configs for stage, config in stages.items()}
  filters = dict(number=report.number, title=report.title)
  text = report.template('tools', 'compare.html.jinja', filters).render(
    names=names, comparisons=[compare(runs[0], run) for run in runs[1:]], charts=list(_charts(rows, algorithms))
  )
  object_store.write(epath.Path(out), text.encode('utf-8', 'replace'))


def _charts(rows: Mapping[str, list[dict]], algorithms: Mapping[str, str]) -> Iterator[dict[str, Any]]:
  """Yields a chart for each stage, split and important metric of its method, with a line for each run."""
  splits = dict.fromkeys((row['stage'], row['split']) for run_rows in rows.values() for row in run_rows)
  for stage, split in splits:
    by_run = {n: [r for r in run_rows if (r['stage'], r['split']) == (stage, split)] for n, run_rows in rows.items()}
    keys = {key for run_rows in by_run.values() for r in run_rows for key in r if not display.says_nothing_new(key, r)}
    for key in display.chosen(algorithms.get(stage, stage), keys):
      series = {n: [(r['step'], report.shown(key, r[key])) for r in rs if key in r] for n, rs in by_run.items()}
      if chart := display.chart(key, {name: points for name, points in series.items() if points}, most=60):
        yield chart | {'where': f'{stage}, {split}'}
