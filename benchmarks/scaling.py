"""Speed-up: compares the standard workload on one process with the same on several.

  python benchmarks/scaling.py --processes=1,2 --batch=16
  python benchmarks/scaling.py --records=runs.jsonl

  strong   n processes share the batch that one has       t(1, B) / t(n, B)
  weak     each of n processes has that batch             n t(1, B) / t(n, nB)

Efficiency is the speed-up over n. The share of communication is what a step
on n takes longer than the same work of one process done alone, t(1, B / n) or
t(1, B), as a share of the step: transfers, and waiting for each other.
Processes of this machine get a core each; fake devices share their threads
and would measure nothing. With --records nothing is timed: the lines that
`launch.bench` printed on a cluster are evaluated. Prints a table on stderr and
its rows as JSON.
"""

import dataclasses
import functools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the clone

from absl import flags

from jaxpost.errors import InputError
from launch import exits, workload_flags

_CLONE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Flags of the workload that the timed processes get, too.
_PASSED_ON = ('shape', 'steps', 'prompt', 'new', 'ragged', 'mean', 'bf16', 'top_p', 'mesh', 'tune')
# Settings that compared runs must share.
_ALIKE = ('shape', 'bf16', 'mesh', 'prompt', 'new', 'ragged', 'mean', 'top_p', 'device', 'jax')
_MODES = ('strong', 'weak')
_KNOWN = ('sft', 'grpo')  # workloads


@dataclasses.dataclass(frozen=True)
class Plan:
  """Measurements to be taken.

  what: sft or grpo. counts: of processes, 1 first. batch: of one process.
  rounds: repetitions of all measurements, interleaved, so that a slow minute
  of the machine falls on all. flags: for `launch.bench`.
  """

  what: str
  counts: tuple[int, ...]
  batch: int
  rounds: int
  flags: tuple[str, ...]

  def settings(self) -> list[tuple[int, int]]:
    """Returns the distinct (processes, batch) to be timed."""
    out = [(1, self.batch)]
    for n in self.counts:
      if n > 1:
        out += [(1, self.batch // n), (n, self.batch), (n, self.batch * n)]
    return list(dict.fromkeys(out))


def counts(texts: Sequence[str]) -> tuple[int, ...]:
  """Parses numbers of processes; InputError unless all are whole numbers, and one is above 1."""
  if not all(text.isdecimal() for text in texts) or max(map(int, texts), default=0) < 2:
    raise InputError(f'--processes: {",".join(texts)}: write whole numbers, one of them above 1, as in 1,2')
  return tuple(dict.fromkeys((1, *map(int, texts))))


def check(plan: Plan) -> None:
  """InputError where this machine cannot take the measurements."""
  cores = len(os.sched_getaffinity(0))
  for n in plan.counts:
    if n > cores:
      raise InputError(f'--processes: {n} need a core each, and there are {cores} here; on a cluster use --distributed')
    if plan.batch % (8 * n if plan.what == 'grpo' else n):
      raise InputError(
        f'--batch: {plan.batch} rows cannot be split over {n} processes'
        + (' in groups of 8' if plan.what == 'grpo' else '')
      )


def measure(plan: Plan, run: Callable[[int, int], float] | None = None) -> list[dict]:
  """Takes the measurements and returns rows of `figures`.

  Args:
    run: (processes, batch) -> seconds a step; None starts real processes.
  """
  check(plan)
  run = run or functools.partial(time_step, plan)
  times = {setting: [] for setting in plan.settings()}
  for _ in range(plan.rounds):
    for setting in times:
      times[setting].append(run(*setting))
  best = {k: min(v) for k, v in times.items()}
  return [figures(plan.what, mode, n, plan.batch, best) for n in plan.counts if n > 1 for mode in _MODES]


def recorded(path: str) -> list[dict]:
  """Returns rows of `figures` for every comparison that the printed lines of `launch.bench` in a file allow.

  A step of n processes with a batch is compared with one process's steps with
  that batch and with its n-th part.
  """
  times = {}
  kinds = set()
  try:
    with open(path, encoding='utf-8') as file:
      for line in filter(str.strip, file):
        r = json.loads(line)
        kinds.add(tuple(f'{k}={r[k]}' for k in _ALIKE) + (f'devices of a process={r["devices"] / r["processes"]}',))
        found = times.setdefault(r['what'], {})
        key = r['processes'], r['batch']
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
  """Returns one row of the table.

  Args:
    what: sft or grpo.
    mode: strong or weak.
    n: processes that are compared with one.
    batch: of one process.
    times: (processes, batch) -> seconds a step.
  """
  whole = batch * n if mode == 'weak' else batch
  one = times[1, batch]
  many = times[n, whole]
  alone = times[1, whole // n]  # what each of n does, without the others
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
  """Returns the median seconds of a step in a record of `launch.bench`, without the first two, which compile."""
  return statistics.median(found['all'][2:])


def time_step(plan: Plan, n: int, batch: int) -> float:
  """Runs n processes of the workload, each on a core of its own; returns seconds a step."""
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
  cores = sorted(os.sched_getaffinity(0))
  # Fake devices of the caller would share the cores.
  xla_flags = ' '.join(x for x in os.environ.get('XLA_FLAGS', '').split() if 'host_platform_device_count' not in x)
  children = []
  logs = []
  for i in range(n):
    command = [sys.executable, '-m', 'launch.bench', plan.what, f'--batch={batch}', f'--core={cores[i]}', *plan.flags]
    if n > 1:
      command += [f'--coordinator={address}', f'--num_processes={n}', f'--process_id={i}']
    logs.append(tempfile.TemporaryFile('w+'))
    children.append(
      subprocess.Popen(
        command,
        cwd=_CLONE,
        text=True,
        stdout=subprocess.PIPE,
        stderr=logs[-1],
        env={'JAX_PLATFORMS': 'cpu', **os.environ, 'XLA_FLAGS': xla_flags},
      )
    )
  try:
    printed = [child.communicate()[0] for child in children]
  finally:
    for child in children:
      child.kill()
  for child, log in zip(children, logs):
    if child.returncode:
      log.seek(0)
      raise RuntimeError(f'{" ".join(child.args)}: {log.read()[-2000:]}')
  return seconds(json.loads(printed[0].splitlines()[-1]))


def table(rows: list[dict]) -> str:
  """Returns the rows as a text table."""
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


def main(_):
  """Compares throughput over numbers of processes, and prints the table."""
  if _RECORDS.value:
    rows = recorded(_RECORDS.value)
  else:
    rows = []
    if unknown := [what for what in _WORKLOADS.value if what not in _KNOWN]:
      raise InputError(f'--workloads: there is no {unknown[0]!r}; known: {", ".join(_KNOWN)}')
    for what in _WORKLOADS.value:
      plan = Plan(
        what=what,
        counts=counts(_COUNTS.value),
        batch=flags.FLAGS.batch,
        rounds=_ROUNDS.value,
        flags=tuple(f'--{name}={flags.FLAGS[name].value}' for name in _PASSED_ON),
      )
      rows += measure(plan)
  print(table(rows), file=sys.stderr)
  print(json.dumps(rows))


if __name__ == '__main__':
  workload_flags.define()
  _COUNTS = flags.DEFINE_list('processes', ['1', '2'], 'Numbers of processes to compare.')
  _WORKLOADS = flags.DEFINE_list('workloads', list(_KNOWN), 'Workloads to time.')
  _ROUNDS = flags.DEFINE_integer('rounds', 3, 'Repetitions, of which the fastest counts.', lower_bound=1)
  _RECORDS = flags.DEFINE_string('records', '', 'File of printed lines to evaluate instead of timing.')
  exits.run(main)
