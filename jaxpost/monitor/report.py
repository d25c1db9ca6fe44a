"""The report of a run: report.html, final figures, a terminal summary.

Reads the files of a run and writes one page that needs nothing else: inline
CSS and SVG, no scripts, no requests. Imports no JAX.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
CSS = epath.resource_path('jaxpost') / 'monitor' / 'report.css'


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


def _esc(x: Any) -> str:
  """Escaped for HTML; a lone surrogate, which UTF-8 lacks, becomes `?`."""
  return html.escape(str(x)).encode('utf-8', 'replace').decode()


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


def figures(workdir: epath.PathLike) -> dict[str, float]:
  """Final figures, METRIC/STAGE: means of the last train rows, last eval.

  An eval key that train rows have too gets `eval_` in front: eval_loss/sft.
  """
  out, stages = {}, _stages(read_rows(epath.Path(workdir) / 'metrics.jsonl'))
  for stage, splits in stages.items():
    train, known = splits['train'], {k for r in splits['train'] for k in r}
    out[f'steps/{stage}'] = max(r['step'] for s in splits.values() for r in s)
    for key in (key for key in NAMES if key not in ('lr', 'grad_norm')):
      last = [r[key] for r in train[-10:] if r.get(key) is not None]
      if last:
        out[f'{key}/{stage}'] = sum(last) / len(last)
    for row in (r for s, past in splits.items() if s != 'train' for r in past):
      for key in (key for key in row if key not in ROW_KEYS):
        out[f'{"eval_" if key in known else ""}{key}/{stage}'] = row[key]
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
  cut = len(ordered) // 50 + 1
  near, far = ordered[cut:-cut][:1], ordered[cut:-cut][-1:]
  if len(ordered) >= 20 and near < far:
    low = max(low, near[0] - 2 * (far[0] - near[0]))
    high = min(high, far[0] + 2 * (far[0] - near[0]))
  low = 0.0 if 0 < low < 0.4 * high else low
  flat = high - low < 1e-9 * abs(high)
  pad = (0.06 * (high - low), 0.1 * abs(high))[flat] or 1.0
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


def _chart(key: str, series: Mapping[str, list[tuple]], most: int) -> str:
  """A figure with one line per split; at most `most` points can be hovered."""
  good = {s: [p for p in pts if p[1] is not None] for s, pts in series.items()}
  good = {s: pts for s, pts in good.items() if pts}
  if not good:
    return ''
  steps = [step for pts in series.values() for step, _ in pts]
  left, right = min(steps), max(max(steps), min(steps) + 1)
  low, high = _range([v for pts in good.values() for _, v in pts])

  def x(s):
    return LEFT + (s - left) / (right - left) * (WIDTH - LEFT - RIGHT)

  def y(v):
    return TOP + (high - v) / (high - low) * (HEIGHT - TOP - BOTTOM)

  base = HEIGHT - BOTTOM
  out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
  for v in _ticks(low, high, 4):
    out.append(
      f'<path class="rule" d="M{LEFT} {y(v):.1f}H{WIDTH - RIGHT}"'
      f'/><text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">'
      f'{_number(float(f"{v:.6g}"))}</text>'
    )
  for s in (s for s in _ticks(left, right, 6) if s == int(s)):
    out.append(f'<text x="{x(s):.1f}" y="{base + 18}" text-anchor="middle">{int(s)}</text>')
  for split, pts in good.items():
    inside = [p for p in pts if low <= p[1] <= high]
    kind = 'train' if split == 'train' else 'eval'
    out.append(f'<g class="{kind}{" few" if len(inside) < 40 else ""}">')
    smooth = [min(max(v, low), high) for _, v in pts]
    smooth = smooth if key == 'lr' else _smooth(smooth)
    line = 'L'.join(f'{x(s):.1f} {y(v):.1f}' for (s, _), v in _pick(list(zip(pts, smooth)), 160))
    out.append(f'<path class="area" d="M{x(pts[0][0]):.1f} {base}L{line}V{base}Z"/><path class="curve" d="M{line}"/>')
    for s, v in _pick(inside, most):
      out.append(
        f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.2"><title>{_esc(split)} step {s}: {v:.5g}</title></circle>'
      )
    out.append('</g>')
  gone = [p[0] for pts in series.values() for p in pts if p[1] is None]
  for s in _pick(gone, 40):
    out.append(f'<path class="gone" d="M{x(s):.1f} {base}v-9"><title>step {s}: not finite</title></path>')
  beyond = sum(not low <= v <= high for pts in good.values() for _, v in pts)
  notes = ', '.join(f'{n} {what}' for n, what in ((beyond, 'beyond the frame'), (len(gone), 'not finite')) if n)
  out.append(f'<text x="{WIDTH - 14}" y="18" text-anchor="end">{notes}</text>')
  now = ' '.join(
    f'<i class="{"train" if s == "train" else "eval"}">{_esc(s)} {_number(pts[-1][1])}</i>' for s, pts in good.items()
  )
  return (
    '<figure class="box"><div class="cap"><b>'
    f'{_esc(NAMES.get(key, ""))}</b><code>{_esc(key)}</code>{now}</div>'
    f'{"".join(out)}</svg></figure>'
  )


def _curves(splits: Mapping[str, list[dict]], budget: int) -> str:
  """Charts of a stage: the ones that matter, the others folded away."""
  keys = {k for rows in splits.values() for row in rows for k in row}
  keys = sorted(k for k in keys - set(ROW_KEYS) if not k.startswith('time/'))
  main = [k for k in NAMES if k in keys]
  main += [k for k in keys if k not in main and not any(k in row for row in splits['train'])]
  more = [k for k in keys if k not in main]
  most = max(12, min(150, budget // max(1, len(keys))))

  def grid(keys):
    series = [{s: [(r['step'], r[key]) for r in rows if key in r] for s, rows in splits.items()} for key in keys]
    return f'<div class="grid">{"".join(_chart(k, points, most) for k, points in zip(keys, series))}</div>'

  return grid(main) + (f'<details><summary>More curves ({len(more)})</summary>{grid(more[:60])}</details>') * bool(more)


def phases(train: Sequence[Mapping]) -> dict[str, float]:
  """Mean seconds a step of each phase, without the first step's compile.

  `time/busy/*` says when devices were busy, which is the same time counted
  another way, so only keys of one level are phases.
  """
  rows = [row for row in train if row.get('time/step') is not None]
  rows, out = rows[1:] or rows, {}
  for key, value in ((k, v) for row in rows for k, v in row.items()):
    if key.startswith('time/') and key.count('/') == 1 and value is not None:
      out[key[5:]] = out.get(key[5:], 0.0) + value / len(rows)
  rest = out.pop('step', 0.0) - sum(out.values())
  return out | ({'other': rest} if rest > 0 else {})


def _time_bar(train: Sequence[Mapping]) -> str:
  parts = phases(train)
  total = sum(parts.values())
  bar = keys = ''
  for i, (name, s) in enumerate(parts.items() if total else ()):
    color = f'background:var(--c{7 if name == "other" else i % 7})'
    text = f'{_esc(name)} {_seconds(s)} ({s / total:.0%})'
    bar += f'<i style="flex:{100 * s / total:.4f};{color}" title="{text}">{_esc(name) if s > 0.08 * total else ""}</i>'
    keys += f'<span class="key"><i style="{color}"></i>{text}</span>'
  return (
    (f'<h3>Time of a step: {_seconds(total)}</h3><div class="box"><div class="bar">{bar}</div>{keys}</div>')
    if total
    else ''
  )


def _text(prompt: Any) -> str:
  """A prompt or completion, text or messages, as text."""
  return '\n'.join(
    f'{m.get("role")}: {m.get("content")}' if isinstance(m, dict) else str(m)
    for m in (prompt if isinstance(prompt, list) else [prompt])
  )


def _sample(row: Mapping, title: str, rewards: list[float]) -> str:
  facts = {k: v for k, v in row.items() if k not in ('prompt', 'completion')}
  reward, pill = facts.pop('reward', None), ''
  if isinstance(reward, (int, float)):
    share = (reward - min(rewards)) / (max(rewards) - min(rewards) or 1)
    pill = f'<b class="pill" style="--v:{share:.0%}">{_number(reward)}</b>'
  facts |= facts.pop('components', None) or {}
  facts = ' · '.join(f'{k} {_number(v)}' for k, v in facts.items())
  text = _text(row.get('completion', ''))
  more = f' … {len(text) - 1500} more characters' * (len(text) > 1500)
  return f'<section><small>{title}{pill}{_esc(facts[:400])}</small><pre>{_esc(text[:1500] + more)}</pre></section>'


def _samples(folder: epath.Path) -> str:
  """First and last samples of a stage, side by side where prompts agree."""
  files = sorted(folder.glob('[0-9]*.jsonl'), key=lambda path: int(path.stem))
  if not files:
    return ''
  before, after = (
    {json.dumps(row.get('prompt')): row for row in reversed(read_growing(path))} for path in (files[0], files[-1])
  )
  before = before if len(files) > 1 else {}
  rewards = [
    row['reward'] for row in (*before.values(), *after.values()) if isinstance(row.get('reward'), (int, float))
  ]
  prompts = [p for p in before if p in after][::-1]
  out = ''
  for p in prompts[:12] or [*before][-4:] + [*after][-4:]:
    prompt = _text((before.get(p) or after.get(p)).get('prompt', ''))[:1000]
    out += f'<div class="box"><pre><b>{_esc(prompt)}</b></pre><div class="two">'
    for rows, name in ((before, f'before, step {files[0].stem}'), (after, f'after, step {files[-1].stem}')):
      out += _sample(rows[p], name, rewards) if p in rows else ''
    out += '</div></div>'
  return f'<h3>Samples</h3>{out}'


def _plan(plan: Mapping[str, Any]) -> str:
  """The programs of a stage as a table, what is one value as a line."""
  rows = plan['programs']
  columns = list(dict.fromkeys(k for row in rows for k in row))
  body = ''.join(f'<th>{_esc(k)}</th>' for k in columns)
  for row in rows:
    cells = ''.join(f'<td>{_esc(_number(row[k] or ""))}</td>' for k in columns)
    body += f'</tr><tr>{cells}'
  facts = ' · '.join(f'{_esc(k)} {_esc(_number(v))}' for k, v in plan.items() if not isinstance(v, (dict, list)))
  return f'<div class="box"><div class="dim">{facts}</div><table><tr>{body}</tr></table></div>'


def _cards(values: Mapping[str, Any], stage: str, rows: list[dict]) -> str:
  """Final figures of a stage as cards, each with where it came from."""
  out = ''
  for key in (k[: -len(stage) - 1] for k in values if k.endswith(f'/{stage}')):
    past = [r[key] for r in rows if r.get(key) is not None]
    past = () if key in ('tokens_per_s', 'mfu', 'time/step') else past
    out += (
      f'<div class="box"><small>{_esc(NAMES.get(key, key))}</small><b>'
      f'{_esc(_number(values[f"{key}/{stage}"]))}</b><small>'
      f'{f"from {_number(past[0])}" if past else ""}</small></div>'
    )
  return f'<div class="cards">{out}</div>'


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
  plans = _read_json(workdir / 'plan.json', [])
  config = _read_json(workdir / 'config.json', {})
  rows = read_rows(workdir / 'metrics.jsonl')
  resumes = read_growing(workdir / 'resumes.jsonl')
  stages, warnings = _stages(rows), done.pop('warnings', ())
  values, name = done or figures(workdir), _esc(object_store.resolved(workdir).rpartition('/')[2])
  facts = [' → '.join(stages) or 'no rows of metrics yet', _seconds(sum(row.get('time/step') or 0 for row in rows))]
  facts += [f'resumed after {r["stage"]} {r["step"]}' for r in resumes]
  body = f'<h1>{name}</h1><div class="dim">{_esc(" · ".join(facts))}</div>' + '<h2>Warnings</h2>' * bool(warnings)
  for w in warnings:
    body += (
      f'<div class="box warn"><b>{_esc(w["stage"])} step {w["step"]}</b>'
      f' {_esc(w["text"])} <small>× {w["count"]}</small></div>'
    )
  for stage, splits in stages.items():
    past = [row for row in rows if row['stage'] == stage]
    body += (
      f'<h2>{_esc(stage)}</h2>{_cards(values, stage, past)}'
      f'<h3>Curves</h3>{_curves(splits, 2500 // len(stages))}'
      f'{_time_bar(splits["train"])}'
      f'{_samples(workdir / "samples" / stage)}'
    )
  body += '<h2>Plan</h2>' * bool(plans) + ''.join(map(_plan, plans))
  text = _esc(json.dumps(config, indent=2, ensure_ascii=False))
  body += (f'<h2>Config</h2><details class="box"><summary>config.json</summary><pre>{text}</pre></details>') * bool(
    config
  )
  text = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name='
    '"viewport" content="width=device-width,initial-scale=1"><title>'
    f'{name}</title><style>{CSS.read_text()}</style></head><body>{body}</body></html>'
  )
  object_store.write(workdir / 'report.html', text.encode())
  return workdir / 'report.html'
