"""The report of a run: report.html, final figures, a terminal summary.

Reads the files of a run and writes one page that needs nothing else: inline
CSS and SVG, no scripts, no requests. The markup is report.html.jinja; this file
prepares what it shows. Imports no JAX.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import rich.console
import rich.table
from etils import epath
from rich import markup

from jaxpost.errors import InputError
from jaxpost.monitor.metrics import ROW_KEYS, read_growing, read_rows, short_number
from jaxpost.storage import object_store

# Headline metrics of a stage, most important first: key -> label.
NAMES = {
  'steps': 'Steps',
  'loss': 'Loss',
  'reward': 'Reward',
  'pass@1': 'Pass@1',
  'rewards/accuracies': 'Preference accuracy',
  'rewards/margins': 'Margin',
  'mean_token_accuracy': 'Token accuracy',
  'kl': 'KL to the reference',
  'entropy': 'Entropy',
  'completions/mean_length': 'Completion length',
  'completions/clipped_ratio': 'Cut completions',
  'frac_reward_zero_std': 'Groups without variance',
  'sampler_mismatch': 'Sampler mismatch',
  'lr': 'Learning rate',
  'grad_norm': 'Gradient norm',
  'mfu': 'MFU',
  'tokens_per_s': 'Tokens per second',
  'time/step': 'Seconds per step',
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 210, 56, 14, 12, 26


def _number(x: Any) -> str:
  """Returns a value of metrics as text; a number that was not finite is None there."""
  if x is None:
    return 'not finite'
  if isinstance(x, bool) or not isinstance(x, (int, float)):
    return str(x)
  return short_number(x, small_digits=4)


def _seconds(x: float) -> str:
  if x < 120:
    return f'{x:.3g} s'
  return f'{x / 60:.0f} min' if x < 7200 else f'{x / 3600:.1f} h'


def _read_json(path: epath.Path, default: Any) -> Any:
  """Returns the value in a .json file, or `default` where there is none."""
  text = path.read_bytes().decode('utf-8', 'replace').rstrip('\0\n ') if path.exists() else ''
  try:
    return json.loads(text) if text else default
  except json.JSONDecodeError as e:
    raise InputError(f'{path}:{e.lineno}: not JSON; remove it') from e


def _stages(rows: Sequence[Mapping]) -> dict[str, dict[str, list[dict]]]:
  """{stage: {split: rows}} in the order of the run."""
  out = {}
  for row in rows:
    splits = out.setdefault(row['stage'], {'train': []})
    splits.setdefault(row['split'], []).append(row)
  return out


def _held_out(splits: Mapping[str, list[dict]]) -> list[dict]:
  """Rows of every split but train."""
  return [row for split, rows in splits.items() if split != 'train' for row in rows]


def _values(rows: Sequence[Mapping], key: str) -> list[Any]:
  """Values of a metric in the rows that have it and where it is finite."""
  return [row[key] for row in rows if row.get(key) is not None]


def figures(workdir: epath.PathLike) -> dict[str, float]:
  """Final figures, METRIC/STAGE: means of the last train rows, last eval.

  An eval key that train rows have too gets `eval_` in front: eval_loss/sft.
  """
  out, stages = {}, _stages(read_rows(epath.Path(workdir) / 'metrics.jsonl'))
  for stage, splits in stages.items():
    train, held_out = splits['train'], _held_out(splits)
    in_train = {key for row in train for key in row}
    out[f'steps/{stage}'] = max(row['step'] for row in train + held_out)
    for key in NAMES:
      last = _values(train[-10:], key)
      if last and key not in ('lr', 'grad_norm'):
        out[f'{key}/{stage}'] = sum(last) / len(last)
    for row in held_out:
      for key in row:
        if key not in ROW_KEYS:
          prefix = 'eval_' if key in in_train else ''
          out[f'{prefix}{key}/{stage}'] = row[key]
  first = [f'{key}/{stage}' for stage in stages for key in NAMES]
  return {k: out[k] for k in [*first, *out] if k in out}


def _ticks(low: float, high: float, count: int) -> list[float]:
  """About `count` round numbers within [low, high]."""
  raw = (high - low) / count
  unit = 10.0 ** math.floor(math.log10(raw))
  step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: list[float]) -> tuple[float, float]:
  """Limits of the y axis; lone spikes do not flatten the rest."""
  ordered = sorted(values)
  low, high = ordered[0], ordered[-1]
  if len(ordered) >= 20:
    cut = len(ordered) // 50 + 1  # this many at each end may be spikes
    near, far = ordered[cut], ordered[-cut - 1]
    if near < far:
      low = max(low, near - 2 * (far - near))
      high = min(high, far + 2 * (far - near))
  if 0 < low < 0.4 * high:
    low = 0.0
  flat = high - low < 1e-9 * abs(high)
  pad = 0.1 * abs(high) if flat else 0.06 * (high - low)
  pad = pad or 1.0
  return (low if low == 0 else low - pad), high + pad


def _smooth(values: list[float]) -> list[float]:
  """Mean over a window around each point."""
  n, half = len(values), len(values) // 25
  windows = (values[max(0, i - half) : i + half + 1] for i in range(n))
  return [sum(window) / len(window) for window in windows]


def _pick(items: list, most: int) -> list:
  """At most `most` of them, evenly, first and last included."""
  last, count = len(items) - 1, min(most, len(items))
  return [items[i * last // max(1, count - 1)] for i in range(count)]


def _chart(key: str, series: Mapping[str, list[tuple]], most: int) -> dict[str, Any] | None:
  """Coordinates of a figure with one line per split; at most `most` points can be hovered."""
  steps = [step for points in series.values() for step, _ in points]
  lost = [step for points in series.values() for step, value in points if value is None]
  finite = {split: [(step, value) for step, value in points if value is not None] for split, points in series.items()}
  finite = {split: points for split, points in finite.items() if points}
  if not finite:
    return None
  left, right = min(steps), max(max(steps), min(steps) + 1)
  low, high = _range([value for points in finite.values() for _, value in points])

  def x(step: float) -> float:
    return LEFT + (step - left) / (right - left) * (WIDTH - LEFT - RIGHT)

  def y(value: float) -> float:
    return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

  lines, beyond = [], 0
  for split, points in finite.items():
    inside = [(step, value) for step, value in points if low <= value <= high]
    beyond += len(points) - len(inside)
    heights = [min(max(value, low), high) for _, value in points]
    heights = heights if key == 'lr' else _smooth(heights)
    corners = _pick([(x(step), y(value)) for (step, _), value in zip(points, heights)], 160)
    lines.append(
      dict(
        split=split,
        last=points[-1][1],
        few=len(inside) < 40,
        start=x(points[0][0]),
        path='L'.join(f'{across:.1f} {down:.1f}' for across, down in corners),
        points=[(x(step), y(value), step, value) for step, value in _pick(inside, most)],
      )
    )
  notes = {'beyond the frame': beyond, 'not finite': len(lost)}
  return dict(
    key=key,
    name=NAMES.get(key, ''),
    frame=dict(width=WIDTH, height=HEIGHT, left=LEFT, right=WIDTH - RIGHT, base=HEIGHT - BOTTOM),
    rules=[(y(value), float(f'{value:.6g}')) for value in _ticks(low, high, 4)],
    steps=[(x(step), int(step)) for step in _ticks(left, right, 6) if step == int(step)],
    lines=lines,
    lost=[(x(step), step) for step in _pick(lost, 40)],
    notes=', '.join(f'{number} {what}' for what, number in notes.items() if number),
  )


def _curves(splits: Mapping[str, list[dict]], budget: int) -> dict[str, list[dict]]:
  """Charts of a stage: the main ones, and more that are folded away."""
  keys = {k for rows in splits.values() for row in rows for k in row}
  keys = sorted(k for k in keys - set(ROW_KEYS) if not k.startswith('time/'))
  main = [k for k in NAMES if k in keys]
  main += [k for k in keys if k not in main and not any(k in row for row in splits['train'])]
  more = [k for k in keys if k not in main]
  most = max(12, min(150, budget // max(1, len(keys))))

  def charts(keys: list[str]) -> list[dict]:
    series = {k: {s: [(r['step'], r[k]) for r in rows if k in r] for s, rows in splits.items()} for k in keys}
    return [chart for k, points in series.items() if (chart := _chart(k, points, most))]

  return dict(main=charts(main), more=charts(more[:60]), count=len(more))


def phases(train: Sequence[Mapping]) -> dict[str, float]:
  """Mean seconds a step of each phase, without the first step's compile.

  `time/busy/*` says when devices were busy, which is the same time counted
  another way, so only keys of one level are phases.
  """
  rows = [row for row in train if row.get('time/step') is not None]
  rows = rows[1:] or rows
  out = {}
  for row in rows:
    for key, value in row.items():
      if key.startswith('time/') and key.count('/') == 1 and value is not None:
        phase = key.removeprefix('time/')
        out[phase] = out.get(phase, 0.0) + value / len(rows)
  other = out.pop('step', 0.0) - sum(out.values())
  return out | {'other': other} if other > 0 else out


def _text(prompt: Any) -> str:
  """A prompt or completion, text or messages, as text."""
  return '\n'.join(
    f'{m.get("role")}: {m.get("content")}' if isinstance(m, dict) else str(m)
    for m in (prompt if isinstance(prompt, list) else [prompt])
  )


def _sample(row: Mapping, title: str, rewards: list[float]) -> dict[str, Any]:
  """A completion, its facts as a line, and where its reward is between the smallest and the largest (0 to 1)."""
  facts = {k: v for k, v in row.items() if k not in ('prompt', 'completion', 'reward', 'components')}
  facts |= row.get('components') or {}
  reward, share = row.get('reward'), None
  if isinstance(reward, (int, float)):
    share = (reward - min(rewards)) / (max(rewards) - min(rewards) or 1)
  text = _text(row.get('completion', ''))
  if len(text) > 1500:
    text = f'{text[:1500]} … {len(text) - 1500} more characters'
  line = ' · '.join(f'{k} {_number(v)}' for k, v in facts.items())
  return dict(title=title, reward=reward, share=share, facts=line[:400], text=text)


def _samples(folder: epath.Path) -> list[dict[str, Any]]:
  """First and last samples of a stage, side by side where prompts agree."""
  files = sorted(folder.glob('[0-9]*.jsonl'), key=lambda path: int(path.stem))
  if not files:
    return []
  before, after = (
    {json.dumps(row.get('prompt')): row for row in reversed(read_growing(path))} for path in (files[0], files[-1])
  )
  before = before if len(files) > 1 else {}
  rows = [*before.values(), *after.values()]
  rewards = [row['reward'] for row in rows if isinstance(row.get('reward'), (int, float))]
  common = [p for p in before if p in after][::-1]
  titled = {f'before, step {files[0].stem}': before, f'after, step {files[-1].stem}': after}
  return [
    dict(
      prompt=_text((before.get(p) or after.get(p)).get('prompt', ''))[:1000],
      rows=[_sample(rows[p], title, rewards) for title, rows in titled.items() if p in rows],
    )
    for p in common[:12] or [*before][-4:] + [*after][-4:]
  ]


def _cards(values: Mapping[str, Any], stage: str, rows: list[dict]) -> list[dict[str, Any]]:
  """Final figures of a stage as cards, each with where it came from."""
  cards = []
  for key in (k[: -len(stage) - 1] for k in values if k.endswith(f'/{stage}')):
    past = [r[key] for r in rows if r.get(key) is not None and key not in ('tokens_per_s', 'mfu', 'time/step')]
    cards.append(dict(name=NAMES.get(key, key), value=values[f'{key}/{stage}'], past=past[:1]))
  return cards


def terminal_summary(workdir: epath.PathLike, console: rich.console.Console) -> None:
  """Prints final figures, a reward or loss sparkline, times and paths."""
  workdir = epath.Path(workdir)
  values, stages = figures(workdir), _stages(read_rows(workdir / 'metrics.jsonl'))
  table = rich.table.Table('', *map(markup.escape, stages))
  for key in dict.fromkeys(k.rpartition('/')[0] for k in values):
    table.add_row(markup.escape(NAMES.get(key, key)), *(_number(values.get(f'{key}/{stage}', '')) for stage in stages))
  for key in ('reward', 'loss'):
    table.add_row(
      f'{key} over time',
      *(_sparkline([r[key] for r in splits['train'] if r.get(key) is not None]) for splits in stages.values()),
    )
  table.add_row(
    'time of a step',
    *(
      '\n'.join(f'{markup.escape(k)} {_seconds(s)}' for k, s in phases(splits['train']).items())
      for splits in stages.values()
    ),
  )
  console.print(table)
  for name in ('report.html', 'metrics.jsonl', 'summary.json', 'samples', 'tensorboard', 'checkpoints', 'export'):
    if (workdir / name).exists():
      console.out(workdir / name, highlight=False)


def _sparkline(values: list[float]) -> str:
  values = _pick(_smooth(values), 24)
  low, high = min(values, default=0), max(values, default=0)
  return ''.join('▁▂▃▄▅▆▇█'[int(7.99 * (v - low) / (high - low or 1))] for v in values)


def write_report(workdir: epath.PathLike) -> epath.Path:
  """Writes report.html from the files of a run, finished or alive."""
  workdir = epath.Path(workdir)
  done = _read_json(workdir / 'summary.json', {})
  config = _read_json(workdir / 'config.json', {})
  rows = read_rows(workdir / 'metrics.jsonl')
  stages, warnings = _stages(rows), done.pop('warnings', ())
  values = done or figures(workdir)
  text = _template().render(
    name=object_store.resolved(workdir).rpartition('/')[2],
    seconds=sum(row.get('time/step') or 0 for row in rows),
    resumes=read_growing(workdir / 'resumes.jsonl'),
    warnings=warnings,
    stages={
      stage: dict(
        cards=_cards(values, stage, [row for row in rows if row['stage'] == stage]),
        curves=_curves(splits, 2500 // len(stages)),
        phases=phases(splits['train']),
        samples=_samples(workdir / 'samples' / stage),
      )
      for stage, splits in stages.items()
    },
    plans=_read_json(workdir / 'plan.json', []),
    config=config and json.dumps(config, indent=2, ensure_ascii=False),
  )
  # A lone surrogate, which UTF-8 lacks, becomes `?`.
  object_store.write(workdir / 'report.html', text.encode('utf-8', 'replace'))
  return workdir / 'report.html'


def _template() -> jinja2.Template:
  """The page in this folder, which escapes what it shows."""
  folder = epath.resource_path('jaxpost') / 'monitor'
  loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text())
  made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
  made.filters |= {'number': _number, 'duration': _seconds}
  return made.get_template('report.html.jinja')
