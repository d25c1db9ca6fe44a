"""Speed-up: the standard workload on one process, and on several.

  strong   n processes share the batch that one has       t(1, B) / t(n, B)
  weak     each of n processes has that batch             n t(1, B) / t(n, nB)

Efficiency is the speed-up over n. The share of communication is what a step
on n takes longer than the same work of one process done alone, t(1, B / n) or
t(1, B), as a share of the step: transfers, and waiting for each other.
Processes of this machine get a core each; fake devices share their threads
and would measure nothing.
"""

import dataclasses
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile

from jaxpost.errors import InputError

# Settings that compared runs must share.
_ALIKE = ('shape', 'bf16', 'mesh', 'prompt', 'new', 'ragged', 'mean', 'top_p', 'device', 'jax')
_MODES = {'strong': lambda batch, n: batch, 'weak': lambda batch, n: batch * n}


@dataclasses.dataclass(frozen=True)
class Plan:
  """what: sft or grpo; counts: of processes, 1 first; batch: of one; flags:
  for `launch.bench`; rounds: of all measurements, interleaved."""

  what: str
  counts: tuple[int, ...]
  batch: int
  rounds: int
  flags: tuple[str, ...]

  def settings(self) -> list[tuple[int, int]]:
    """Distinct (processes, batch) to be timed."""
    out = [(1, self.batch)]
    for n in self.counts:
      if n > 1:
        out += [(1, self.batch // n), (n, self.batch), (n, self.batch * n)]
    return list(dict.fromkeys(out))


def check(plan: Plan):
  cores = len(os.sched_getaffinity(0))
  for n in plan.counts:
    if n > cores:
      raise InputError(f'--processes: {n} need a core each, and there are {cores} here; on a cluster use --distributed')
    if plan.batch % (8 * n if plan.what == 'grpo' else n):
      raise InputError(
        f'--batch: {plan.batch} rows cannot be split over {n} processes'
        + (' in groups of 8' if plan.what == 'grpo' else '')
      )


def measure(plan: Plan, run=None) -> list[dict]:
  """Rows of figures; see `figures`. `run(n, batch)` -> seconds a step."""
  check(plan)
  run = run or (lambda n, batch: time_step(plan, n, batch))
  times = {setting: [] for setting in plan.settings()}
  for _ in range(plan.rounds):
    for setting in times:
      times[setting].append(run(*setting))
  best = {k: min(v) for k, v in times.items()}
  return [figures(plan.what, mode, n, plan.batch, best) for n in plan.counts if n > 1 for mode in _MODES]


def recorded(path: str) -> list[dict]:
  """Rows of all that a file of what `launch.bench` printed has enough for.

  A step of n processes with a batch is compared with one process's steps with
  that batch and with its n-th part.
  """
  times, kinds = {}, set()
  try:
    with open(path, encoding='utf-8') as file:
      for line in filter(str.strip, file):
        r = json.loads(line)
        kinds.add(tuple(f'{k}={r[k]}' for k in _ALIKE) + (f'devices of a process={r["devices"] / r["processes"]}',))
        found, key = times.setdefault(r['what'], {}), (r['processes'], r['batch'])
        found[key] = min(seconds(r), found.get(key, math.inf))
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise InputError(f'--records: {path}: no lines of `launch.bench sft` or `grpo` ({e!r})') from e
  if len(kinds) > 1:
    one, two, *_ = sorted(kinds)
    raise InputError(f'--records: {path}: lines of different workloads: {sorted({*one} ^ {*two})}; keep them apart')
  rows = [
    figures(what, mode, n, batch, found)
    for what, found in times.items()
    for n, whole in sorted(found)
    for mode, batch in (('strong', whole), ('weak', whole // n))
    if n > 1 and whole % n == 0 and ({(1, batch), (1, whole // n)} <= found.keys())
  ]
  if not rows:
    have = sorted({key for found in times.values() for key in found})
    raise InputError(
      f'--records: {path}: has (processes, batch) {have}; n processes with B '
      'rows need one with B / n, and for strong speed-up one with B'
    )
  return rows


def figures(what: str, mode: str, n: int, batch: int, times: dict) -> dict:
  """One row.

  Args:
    times: (processes, batch) -> seconds a step.
  """
  whole = _MODES[mode](batch, n)
  one, many, alone = (times[1, batch], times[n, whole], times[1, whole // n])
  speedup = one / many * whole / batch
  return dict(
    what=what,
    mode=mode,
    processes=n,
    batch=whole,
    step_one_s=one,
    step_s=many,
    speedup=speedup,
    efficiency=speedup / n,
    communication_share=max(0.0, 1 - alone / many),
  )


def seconds(found: dict) -> float:
  """Median seconds of a step in the output of `launch.bench`, without the first two, which compile."""
  return statistics.median(found['all'][2:])


def time_step(plan: Plan, n: int, batch: int) -> float:
  """Starts n processes of the workload, each on a core of its own."""
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
  cores = sorted(os.sched_getaffinity(0))
  flags = ' '.join(x for x in os.environ.get('XLA_FLAGS', '').split() if 'host_platform_device_count' not in x)
  children, logs = [], []
  for i in range(n):
    command = [sys.executable, '-m', 'launch.bench', plan.what, f'--batch={batch}', f'--core={cores[i]}', *plan.flags]
    if n > 1:
      command += [f'--coordinator={address}', f'--num_processes={n}', f'--process_id={i}']
    logs.append(tempfile.TemporaryFile('w+'))
    children.append(
      subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=logs[-1],
        env={'JAX_PLATFORMS': 'cpu', **os.environ, 'XLA_FLAGS': flags},
      )
    )
  try:
    said = [child.communicate()[0] for child in children]
  finally:
    for child in children:
      child.kill()
  for child, log in zip(children, logs):
    if child.returncode:
      log.seek(0)
      raise RuntimeError(f'{" ".join(child.args)}: {log.read()[-2000:]}')
  return seconds(json.loads(said[0].splitlines()[-1]))


def table(rows: list[dict]) -> str:
  """The rows as a text table."""
  lines = [
    f'{"":6}{"":8}{"processes":>10}{"batch":>7}{"step, s":>9}{"speed-up":>10}{"efficiency":>12}{"communication":>15}'
  ]
  for r in rows:
    lines.append(
      f'{r["what"]:6}{r["mode"]:8}{r["processes"]:10}{r["batch"]:7}'
      f'{r["step_s"]:9.3f}{r["speedup"]:10.2f}{r["efficiency"]:12.0%}'
      f'{r["communication_share"]:15.0%}'
    )
  return '\n'.join(lines)
