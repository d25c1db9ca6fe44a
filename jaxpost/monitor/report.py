"""The report of a run: report.html, final figures, a terminal summary.

Reads the files of a run and writes one self-contained page: inline CSS and SVG, no scripts, no requests. The markup is
report.html.jinja; this module prepares its values. Imports no JAX.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import rich.console
import rich.table
from etils import epath
from rich import markup

from jaxpost.errors import InputError
from jaxpost.monitor import display, metrics
from jaxpost.monitor.metrics import ROW_KEYS, is_clock_key, read_growing, read_rows
from jaxpost.storage import object_store, seals

_TOTALS = ('failed_groups', 'timeouts', 'episodes/failed')  # train metrics whose figure is the sum over the stage


def number(x: Any) -> str:
  """Returns a value of metrics as text; None stands for a number that was not finite."""
  if x is None or x != x:
    return 'not finite'
  if isinstance(x, bool) or not isinstance(x, (int, float)):
    return str(x)
  return metrics.short_number(x, small_digits=4)


def _seconds(x: float) -> str:
  if 0 < x < 1:
    return f'{1e6 * x:.3g} us' if x < 1e-3 else f'{1e3 * x:.3g} ms'
  if x < 120:
    return f'{x:.3g} s'
  return f'{x / 60:.0f} min' if x < 7200 else f'{x / 3600:.1f} h'


def _read_json(path: epath.Path, default: Any) -> Any:
  """Returns the value in a .json file, or `default` if it is missing or empty."""
  text = path.read_bytes().decode('utf-8', 'replace').rstrip('\0\n ') if path.exists() else ''
  try:
    return json.loads(text) if text else default
  except json.JSONDecodeError as e:
    raise InputError(f'{path}:{e.lineno}: not JSON; remove it') from e


def _stages(rows: Sequence[dict]) -> dict[str, dict[str, list[dict]]]:
  """Returns {stage: {split: rows}} in the order of the run."""
  out: dict[str, dict[str, list[dict]]] = {}
  for row in rows:
    splits = out.setdefault(row['stage'], {'train': []})
    splits.setdefault(row['split'], []).append(row)
  return out


def _held_out(splits: Mapping[str, list[dict]]) -> list[dict]:
  return [row for split, rows in splits.items() if split != 'train' for row in rows]


def _values(rows: Sequence[Mapping], key: str) -> list[Any]:
  """Returns the values of a metric in the rows in which it is present and finite."""
  return [row[key] for row in rows if row.get(key) is not None]


def _keys(rows: Sequence[Mapping]) -> set[str]:
  return {key for row in rows for key in row}


def _recent(train: Sequence[Mapping], key: str) -> float | None:
  """Returns the mean of a metric over the last ten rows; None if they lack it."""
  recent = _values(train[-10:], key)
  return sum(recent) / len(recent) if recent else None


def figures(rows: Sequence[Mapping]) -> dict[str, float]:
  """Returns {METRIC/STAGE: final figure}: means of the last train rows, the last evaluation, sums of failures.

  Keys of evaluations that train rows have as well get the prefix `eval_`, as in eval_loss/sft.
  """
  stages = _stages(rows)
  out: dict[str, float] = {}
  for stage, splits in stages.items():
    train, held_out = splits['train'], _held_out(splits)
    in_train = _keys(train)
    out[f'steps/{stage}'] = max(row['step'] for row in train + held_out)
    for key in display.HEADLINES:
      recent = _recent(train, key)
      if recent is not None and key not in ('lr', 'grad_norm'):
        out[f'{key}/{stage}'] = recent
    out |= {f'{key}/{stage}': total for key in _TOTALS if (total := sum(_values(train, key)))}
    for key, value in (pair for row in held_out for pair in row.items()):
      if key not in ROW_KEYS:
        out[f'{"eval_" if key in in_train else ""}{key}/{stage}'] = value
  headlines = [f'{key}/{stage}' for stage in stages for key in display.HEADLINES]
  return {k: out[k] for k in [*headlines, *out] if k in out}


def summary(
  workdir: epath.Path, values: Mapping[str, Any], warnings: Sequence = (), saves: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Writes summary.json ({METRIC/STAGE: number, 'warnings'}) and returns it; `saves` is {stage: its `config.save`}."""
  from jaxpost.storage import manifest

  best: dict[str, float] = {}
  for stage, save in (saves or {}).items():
    folder = workdir / 'checkpoints' / stage
    if (step := manifest.best(folder, save.keep_best, save.best_mode)) is not None:
      metric = manifest.read(folder, step).metrics[save.keep_best]
      best |= {f'best_step/{stage}': step, f'best_{save.keep_best}/{stage}': metric}
  starts = read_growing(workdir / 'starts.jsonl')[-1:]
  notes = [(name, note) for start in starts for name, stage in start['stages'].items() for note in stage['notes']]
  first = [dict(stage=name, step=0, kind='start', text=note.removeprefix('warning: '), count=1) for name, note in notes]
  out = metrics.plain({**values, **best, 'warnings': [*first, *warnings]})
  seals.write(workdir / 'summary.json', json.dumps(out, indent=2))
  return out


def shown(key: str, value: Any) -> Any:
  """Returns a value as the page and the console show it: the sampler mismatch, a ratio of at least 1, minus 1."""
  return value - 1 if key == 'sampler_mismatch' and value else value  # None: not finite


def _charts(splits: Mapping[str, list[dict]], algorithm: str, budget: int) -> list[dict[str, Any]]:
  """Returns the charts of a stage; `folded`: less important train metrics, those always 0, or shown by another."""
  in_train = _keys(splits['train'])
  keys = in_train.union(*_held_out(splits)).difference(ROW_KEYS)
  keys = {key for key in keys if not key.startswith('time/')}
  max_points = max(12, min(150, budget // max(1, len(keys))))
  charts = []
  important = display.chosen(algorithm, keys)
  for key in important + sorted(keys.difference(important)):
    series = {
      split: [(row['step'], shown(key, row[key])) for row in rows if key in row] for split, rows in splits.items()
    }
    is_zero = all(value == 0 for points in series.values() for _, value in points)
    is_known = all(display.says_nothing_new(key, row) for rows in splits.values() for row in rows if key in row)
    if chart := display.chart(key, series, max_points):
      charts.append(chart | {'folded': is_zero or is_known or key in in_train and key not in important})
  return charts


def phases(train: Sequence[Mapping]) -> dict[str, float]:
  """Returns mean seconds per step of each phase, and 'other'; without the first step, which compiles."""
  rows = [row for row in train if row.get('time/step') is not None]
  rows = rows[1:] or rows
  spent = {name: _values(rows, f'time/{name}') for name in (*metrics.PHASES, 'step')}
  out = {name: sum(seconds) / len(rows) for name, seconds in spent.items() if seconds}
  other = out.pop('step', 0.0) - sum(out.values())
  return out | {'other': other} if other > 0 else out


def _text(prompt: Any) -> str:
  """Returns a prompt or completion, text or messages, as text."""
  return '\n'.join(
    f'{m.get("role")}: {m.get("content")}' if isinstance(m, dict) else str(m)
    for m in (prompt if isinstance(prompt, list) else [prompt])
  )


def _percentiles(rows: Sequence[dict]) -> dict[str, list[float]]:
  """Returns {'reward' and 'length': percentiles 5, 50 and 95} of rows of samples, if they have them."""
  out = {}
  for key in ('reward', 'length'):
    values = sorted(row[key] for row in rows if isinstance(row.get(key), (int, float)))
    if len(values) > 1:
      out[key] = [values[round(share * (len(values) - 1))] for share in (0.05, 0.5, 0.95)]
  return out


def _samples(folder: epath.Path) -> dict[str, Any]:
  """Returns the first and last samples of a stage, in pairs if prompts are the same."""
  files = list(metrics.sample_files(folder).items())
  files_by_title = {f'before, step {step}': path for step, path in files[:-1][:1]}
  files_by_title |= {f'after, step {step}': path for step, path in files[-1:]}
  pairs: dict[str, dict[str, dict]] = {}  # {prompt: {title: its first sample}}
  spread: dict[str, dict[str, list[float]]] = {}
  for title, path in files_by_title.items():
    rows = read_growing(path)
    spread[title] = _percentiles(rows)
    for row in rows:
      pairs.setdefault(json.dumps(row.get('prompt')), {}).setdefault(title, row)
  values = [row.get('reward') for pair in pairs.values() for row in pair.values()]
  rewards = [reward for reward in values if isinstance(reward, (int, float))]
  shown = [pair for pair in pairs.values() if len(pair) == 2][:12]
  for title in files_by_title if not shown else ():
    shown += [pair for pair in pairs.values() if title in pair][:4]
  return dict(lowest=min(rewards, default=0), highest=max(rewards, default=0), pairs=shown, spread=spread)


def _cards(
  values: Mapping[str, Any], stage: str, splits: Mapping[str, list[dict]], algorithm: str
) -> list[dict[str, Any]]:
  """Returns final figures of a stage, each with its first value, beginning with those the algorithm is judged by.

  Times, counters that stayed 0, figures that another repeats, and steps, which the headline shows, are left out.
  """
  train = splits['train']
  names = [name for name in values if name.endswith(f'/{stage}') and not is_repeated(name, values)]
  final = {name.removesuffix(f'/{stage}'): values[name] for name in names}
  judged = {key: _recent(train, key) for key in display.judged_by(algorithm, _keys(train) - final.keys())}
  known = final | judged
  final |= {key: x for key, x in judged.items() if x is not None and not display.says_nothing_new(key, known)}
  chosen = display.chosen(algorithm, {key.removeprefix('eval_') for key in final})
  ordered = [key for metric in chosen for key in (metric, f'eval_{metric}') if key in final]
  cards = []
  for key in dict.fromkeys([*ordered, *final]):
    metric = key.removeprefix('eval_')
    history = _values(train, key) or _values(_held_out(splits), metric)
    is_informative = key in display.HEADLINES or final[key] or any(history)
    if metric.startswith('time/') or key == 'steps' or not is_informative:
      continue
    has_first = history and key not in _TOTALS and not is_clock_key(metric)
    cards.append(dict(key=key, value=shown(key, final[key]), first=shown(key, history[0]) if has_first else None))
  return cards


def terminal_summary(workdir: epath.PathLike, rows: Sequence[Mapping], console: rich.console.Console) -> None:
  """Prints final figures of rows of metrics, a sparkline of reward or loss, times and paths."""
  values = figures(rows)
  stages = _stages(rows)
  caption = 'Means of the last 10 steps; time of a step: of all steps but the first.'
  table = rich.table.Table('', *map(markup.escape, stages), caption=caption)
  for key in dict.fromkeys(k.rpartition('/')[0] for k in values if not is_repeated(k, values)):
    cells = (shown(key, values.get(f'{key}/{stage}', '')) for stage in stages)
    table.add_row(markup.escape(title(key)), *map(number, cells))
  for key in ('reward', 'loss'):
    lines = [_sparkline(_values(splits['train'], key)) for splits in stages.values()]
    if any(lines):
      table.add_row(f'{key.capitalize()} over time', *lines)
  means = [phases(splits['train']) for splits in stages.values()]
  times = ['\n'.join(f'{markup.escape(name)} {_seconds(s)}' for name, s in mean.items()) for mean in means]
  table.add_row('Time of a step', *times)
  console.print(table)
  for name in ('report.html', 'metrics.jsonl', 'summary.json', 'samples', 'tensorboard', 'checkpoints', 'export'):
    if (path := epath.Path(workdir) / name).exists():
      console.out(path, highlight=False)


def is_repeated(name: str, values: Mapping[str, Any]) -> bool:
  """Returns whether a table can omit METRIC/STAGE: times of evaluations, and values that another figure repeats."""
  key, _, stage = name.rpartition('/')
  of_stage = {k.rpartition('/')[0]: v for k, v in values.items() if k.endswith(f'/{stage}')}
  if not key.startswith('eval_'):
    return display.says_nothing_new(key, of_stage)
  key = key.removeprefix('eval_')
  of_stage |= {k.removeprefix('eval_'): v for k, v in of_stage.items() if k.startswith('eval_')}
  return key.startswith('time/') or display.says_nothing_new(key, of_stage)


def _sparkline(values: list[float]) -> str:
  values = display.pick(display.smooth(values), 24)
  low, high = min(values, default=0), max(values, default=0)
  return ''.join('▁▂▃▄▅▆▇█'[int(7.99 * (v - low) / (high - low or 1))] for v in values)


def write_report(workdir: epath.PathLike, rows: Sequence[Mapping] | None = None) -> epath.Path:
  """Writes report.html from the files of a run, finished or not, and its rows of metrics (None: read them, too)."""
  workdir = epath.Path(workdir)
  rows = read_rows(workdir / 'metrics.jsonl') if rows is None else rows
  saved = _read_json(workdir / 'summary.json', {})
  config = _read_json(workdir / 'config.json', {})
  stages = _stages(rows)
  warnings = saved.pop('warnings', ())
  values = saved or figures(rows)
  methods = {stage: _algorithm(config, stage) for stage in stages}
  filters: dict[str, Callable] = dict(number=number, duration=_seconds, text=_text, title=title)
  text = template('monitor', 'report.html.jinja', filters).render(
    name=object_store.resolved(workdir).rpartition('/')[2],
    wall_s=saved.get('wall_s'),
    resumes=read_growing(workdir / 'resumes.jsonl'),
    warnings=warnings,
    stages={
      stage: dict(
        steps=max(row['step'] for rows in splits.values() for row in rows),
        seconds=sum(sum(_values(rows, 'time/step')) for rows in splits.values()),
        cards=_cards(values, stage, splits, methods[stage]),
        charts=_charts(splits, methods[stage], 2500 // len(stages)),
        phases=phases(splits['train']),
        samples=_samples(workdir / 'samples' / stage),
      )
      for stage, splits in stages.items()
    },
    start=start_of_run(workdir),
    plans=_read_json(workdir / 'plan.json', []),
    config=config and json.dumps(config, indent=2, ensure_ascii=False),
  )
  # A lone surrogate, which UTF-8 cannot encode, becomes `?`.
  object_store.write(workdir / 'report.html', text.encode('utf-8', 'replace'))
  return workdir / 'report.html'


def _algorithm(config: dict, stage: str) -> str:
  """Returns the algorithm of a stage from a run's config.json; the stage's name if it is not there."""
  block = config[stage] if isinstance(config.get(stage), dict) else {}
  return block.get('algorithm') or config.get('algorithm') or stage


def start_of_run(workdir: epath.Path) -> dict[str, Any]:
  """Returns the last start: facts, changes {stage: {field: value}}, recipe (config file), overrides and count."""
  rows = read_growing(workdir / 'starts.jsonl')
  if not rows:
    return {}
  last = rows[-1]
  words = list(map(str, last.get('command') or ('',)))
  # A line to paste into a shell: modules of launch/ are named, without the folder of the clone.
  program = re.sub(r'.*\blaunch[/\\](\w+)\.py', r'python -m launch.\1', words[0])
  devices = f'{last.get("devices")} x {last.get("device_kind")}'
  facts = {
    'started': last.get('time'),
    'machine': f'{devices}, {last.get("processes")} processes, {last.get("host")}',
    'versions': ', '.join(f'{name} {version}' for name, version in (last.get('versions') or {}).items()),
    'commit': last.get('commit'),
    'command': ' '.join([program, *map(shlex.quote, words[1:])]),
    'seed': last.get('seed'),
  }
  for name, stage in (last.get('stages') or {}).items():
    facts[name] = f'{stage.get("rows")} rows, {stage.get("steps")} steps of {stage.get("batch")}'
  shown = {label: str(value) for label, value in facts.items() if value not in (None, '')}
  overrides = {
    flag.partition('.')[2]: 'False' if flag.startswith('--no') else 'True' if value is None else value
    for flag, value in config_flags(words)
  }
  recipe = overrides.pop('', '')  # --config itself has no field
  return dict(facts=shown, changes=last.get('changes') or {}, count=len(rows), recipe=recipe, overrides=overrides)


def config_flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
  """Yields (--config or --config.FIELD, its value) of the config flags of a command line; None: no value follows."""
  for word, following in zip(words, [*words[1:], '-']):
    if match := re.fullmatch(r'--?((?:no)?config(?:\.[^=]+)?)(?:=(.*))?', word, re.DOTALL):
      flag, value = match.groups()
      yield f'--{flag}', following if value is None and not following.startswith('-') else value


def title(key: str) -> str:
  """Returns the title of a value as the page and the console show it, see `shown`."""
  return display.title(key) + (' minus 1' if key.removeprefix('eval_') == 'sampler_mismatch' else '')


def template(folder: str, file: str, filters: Mapping[str, Callable]) -> jinja2.Template:
  """Returns the template in a file of a folder of jaxpost; it escapes all values."""
  loader = jinja2.PackageLoader('jaxpost', folder)
  environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
  environment.filters |= filters
  return environment.get_template(file)
