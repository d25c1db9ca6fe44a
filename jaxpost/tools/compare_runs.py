"""Compares runs: configs, final figures, curves, rewards on shared prompts, the first sample that differs.

Draws depend on the seed, the step, the prompt and the number of the sample alone, so that two
runs that differ in one field share prompts and random numbers. Their rewards are then compared
in pairs, which removes the variance between prompts.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import scipy.stats
from etils import epath

from jaxpost.errors import InputError
from jaxpost.monitor import curves, metrics, report, titles
from jaxpost.stage import algorithms, checks, consistency
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store

_LEVEL = 0.95
_IGNORED = ('log.', 'save.', 'stages')  # fields that change nothing of what a stage computes


@dataclasses.dataclass(frozen=True)
class Paired:
  """The mean difference of rewards, the second run minus the first, over shared prompts.

  low, high: its 95 % confidence interval, from the means of prompts; nan for a single prompt.
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
  """The first sample of the same prompt that differs: its place, and both texts from where they part."""

  stage: str
  split: str
  step: int
  prompt: str
  sample: int
  shared: str  # what both begin with
  first: str
  second: str


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Two runs side by side; `fields` is {stage.field: (first, second)}, `figures` {METRIC/STAGE: (first, second)}.

  Figures that others of their run repeat are left out. `sampled`: both runs have samples.
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
    and not all(report.is_repeated(key, of_run) for of_run in values if key in of_run)
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
    figures={k: (values[0].get(k), values[1].get(k)) for k in keys},
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

  Stages of the same name are compared; of the others the last with the last, and so on backward, as 'FIRST/SECOND'.
  Values that are left to the method are those that it uses.
  """
  configs = [config_lib.parse_saved(run / 'config.json') for run in (first, second)]
  order = tuple(list(stages) for stages in configs)
  fields: dict[str, tuple] = {'stages': order} if order[0] != order[1] else {}
  alone = [[name for name in mine if name not in others] for mine, others in (order, order[::-1])]
  pairs = [(name, name) for name in order[0] if name in configs[1]]
  pairs += reversed(list(zip(reversed(alone[0]), reversed(alone[1]))))
  for one, two in pairs:
    found = _stage_difference(configs[0][one], configs[1][two])
    fields |= {f'{one if one == two else f"{one}/{two}"}.{key}': values for key, values in found.items()}
  return fields


def _stage_difference(*stages: config_lib.Config) -> dict[str, tuple]:
  """Returns {field: (first, second)}; what one of two methods does not read is there only if the configs differ."""
  written = consistency.difference(*(consistency.spelled(vars(config)) for config in stages))
  resolved = [_resolved(config) for config in stages]
  used = consistency.difference(*(consistency.spelled(vars(config)) for config, _ in resolved))
  shared = {key: values for key, values in used.items() if all(key.partition('.')[0] not in x for _, x in resolved)}
  found = {key: values for key, values in used.items() if key in written} | shared
  return {key: found[key] for key in sorted(found) if not key.startswith(_IGNORED)}


def _resolved(config: config_lib.Config) -> tuple[config_lib.Config, set[str]]:
  """Returns the config as the method uses it, and the sections that the method does not read.

  The config itself where a method of the user's own cannot be imported here.
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
    ours, others = (metrics.sample_files(run / 'samples' / stage) for run in (first, second))
    for step in ours:
      if step not in others:
        continue
      theirs = {_key(row): row for row in metrics.read_growing(others[step])}
      rows = [(row, theirs[_key(row)]) for row in metrics.read_growing(ours[step]) if _key(row) in theirs]
      if rows:
        yield stage, step, rows


def _key(row: Mapping) -> tuple:
  return row.get('split'), json.dumps(row.get('prompt')), row.get('prompt_index'), row.get('sample', 0)


def _pairs(stage: str, step: int, rows: Sequence[tuple[dict, dict]]) -> Iterator[Paired]:
  """Yields the paired difference of each split with rewards."""
  by_split: dict[str, dict] = collections.defaultdict(lambda: collections.defaultdict(list))
  for one, two in rows:
    values = one.get('reward'), two.get('reward')
    if None not in values:
      by_split[one['split']][_key(one)[1:3]].append(values)
  for split, prompts in by_split.items():
    means = [tuple(statistics.fmean(v) for v in zip(*values)) for values in prompts.values()]
    differences = [two - one for one, two in means]
    middle, half = statistics.fmean(differences), half_width(differences)
    first, second = (statistics.fmean(v) for v in zip(*means))
    yield Paired(
      stage,
      split,
      step,
      prompts=len(means),
      samples=sum(map(len, prompts.values())),
      first=first,
      second=second,
      low=middle - half,
      high=middle + half,
    )


def half_width(values: Sequence[float]) -> float:
  """Returns half of the 95 % confidence interval of a mean, by Student's t; nan for fewer than two values."""
  if len(values) < 2:
    return math.nan
  return float(scipy.stats.t.ppf((1 + _LEVEL) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def _first_difference(stage: str, step: int, rows: Sequence[tuple[dict, dict]]) -> Parting | None:
  for one, two in rows:
    texts = str(one.get('completion')), str(two.get('completion'))
    if texts[0] != texts[1]:
      same = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
      return Parting(
        stage,
        one.get('split', 'train'),
        step,
        prompt=str(one.get('prompt')),
        sample=one.get('sample', 0),
        shared=texts[0][:same],
        first=texts[0][same:],
        second=texts[1][same:],
      )
  return None


def write_page(runs: Sequence[epath.PathLike], out: epath.PathLike) -> None:
  """Writes one HTML page: each run against the first, and the curves of all with common axes."""
  paths = [_run(run) for run in runs]
  names = labels(runs)
  rows = {name: metrics.read_rows(path / 'metrics.jsonl') for name, path in zip(names, paths)}
  algorithms = {s: c.algorithm for path in paths for s, c in config_lib.parse_saved(path / 'config.json').items()}
  loader = jinja2.PackageLoader('jaxpost', 'tools')
  made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
  made.filters |= {'number': report.number, 'title': titles.title}
  text = made.get_template('compare.html.jinja').render(
    names=names, comparisons=[compare(runs[0], run) for run in runs[1:]], charts=list(_charts(rows, algorithms))
  )
  object_store.write(epath.Path(out), text.encode('utf-8', 'replace'))


def _charts(rows: Mapping[str, list[dict]], algorithms: Mapping[str, str]) -> Iterator[dict[str, Any]]:
  """Yields a chart for each stage, split and metric that matters to its method, with a line for each run."""
  places = dict.fromkeys((row['stage'], row['split']) for found in rows.values() for row in found)
  for stage, split in places:
    mine = {n: [r for r in found if (r['stage'], r['split']) == (stage, split)] for n, found in rows.items()}
    keys = {key for found in mine.values() for r in found for key in r if not titles.says_nothing_new(key, r)}
    for key in curves.chosen(algorithms.get(stage, stage), keys):
      series = {n: [(r['step'], r[key]) for r in found if key in r] for n, found in mine.items()}
      if chart := curves.chart(key, {n: points for n, points in series.items() if points}, most=60):
        yield chart | {'where': f'{stage}, {split}'}
