"""The reliability scorecard: runs the tests that try to break runs, and writes their results to docs/reliability.md.

    python -m tests.scorecard            # 6 minutes
    python -m tests.scorecard --size=hour
    python -m tests.scorecard --size=night

runs the tests of each row and prints a table, too. The smallest size runs tests that CI runs; a larger size runs
more tests, repeats those that draw at random, and soaks and loads for longer. A test counts as one case
unless it reports more with `record_property('cases', count)`. `--rows=R8,R13` runs only those rows and writes nothing.
SIGTERM, SIGINT or SIGHUP ends it with all of its processes, and prints what was measured until then.
"""

import argparse
import collections
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

CLONE = pathlib.Path(__file__).resolve().parents[1]
SIZES = ('ci', 'hour', 'night')
RUNS = 'JAXPOST_SCORECARD' in os.environ  # whether the scorecard runs the tests, which then make more cases
SIZE = SIZES.index(os.environ.get('JAXPOST_SCORECARD', 'ci'))
ROUNDS = (1, 6, 30)[SIZE]  # repetitions of tests that draw at random
REQUESTS = (3_000, 100_000, 100_000)[SIZE]  # that the load test sends to the server
SOAK_S = (40, 900, 6 * 3600)[SIZE]


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table.

  Attributes:
    what: the attempt to break a run.
    unit: what a case is, in the plural.
    tests: node ids, or their beginnings, that all sizes run.
    more: those that the sizes `hour` and `night` run besides.
    lacks: what no test covers yet.
  """

  number: str
  what: str
  unit: str
  tests: tuple
  more: tuple = ()
  lacks: str = ''


ROWS = (
  Row(
    'R1',
    '`kill -9` in steps, saves, evaluation, export and start of SFT, DPO, distillation, reward models, GRPO, PPO, GKD,'
    ' an environment, a staleness of one step and two processes; the run is resumed and compared bit for bit',
    'kills',
    (
      'test_kills.py',
      'test_resume.py::test_run_killed_at_random_moments_resumes_bitwise',
      'test_checkpoint.py::test_kill_9_during_write_keeps_previous_step',
      'test_checkpoint.py::test_kill_between_commit_and_seal_and_inside_a_removal',
    ),
  ),
  Row(
    'R2',
    'SIGTERM, SIGINT and SIGHUP, once and again, in the start, steps, compilation and export: no step is lost',
    'tests',
    ('test_signals.py', 'test_resume.py::test_signal_in_the_last_step_is_not_lost'),
    (
      'test_resume.py::test_run_stopped_by_sigterm_saves_and_resumes_bitwise',
      'test_processes.py::test_signal_to_one_process_stops_all_at_one_step',
    ),
  ),
  Row(
    'R3',
    'Resume on other meshes and numbers of processes: equal state, the same next batches',
    'tests',
    ('test_checkpoint.py::test_restores_on_other_meshes',),
    ('test_elastic.py', 'test_processes.py::test_run_resumes_with_another_number_of_processes'),
  ),
  Row(
    'R4',
    'Faults of one process end all processes in time: killed, stopped, stuck, missing, slow, different,'
    ' with clocks an hour apart',
    'tests',
    (
      'test_faults.py::test_killed_process_is_named_and_ends_the_others_in_time[worker]',
      'test_faults.py::test_missing_host_is_named_and_ends_the_others_in_time[1]',
    ),
    ('test_faults.py',),
  ),
  Row(
    'R5',
    'A flipped bit, a cut or a missing file in a run folder: found or harmless, never silent',
    'flips and cuts',
    (
      'test_checkpoint.py::test_every_flipped_bit_is_noticed',
      'test_checkpoint.py::test_truncated_or_missing_file_falls_back_to_previous_step',
      'test_resume.py::test_damaged_checkpoint_falls_back_and_none_left_ends_with_code_3',
      'test_flips.py',
    ),
  ),
  Row(
    'R6',
    'Bad configs, data, models, rewards and flags: exit code 2 and one line that names the field',
    'inputs',
    (
      'test_bad_input.py',
      'test_row_properties.py::test_no_wrong_type_passes',
      'test_submit.py::test_bad_input_is_one_line',
      'test_openai_server.py::test_invalid_request',
    ),
    ('test_launch.py::test_export_refuses', 'test_launch.py::test_evaluate_refuses', 'test_row_properties.py'),
  ),
  Row(
    'R7',
    'Rewards, environments and agents that raise, hang, crash or lie: their samples are masked and counted',
    'samples and tests',
    (
      'test_lost_samples.py',
      'test_rewards_bounded.py',
      'test_rewards_pool.py::',
      'test_environments.py::test_lost_episodes',
      'test_environments.py::test_a_lost_process',
    ),
    ('test_agents.py', 'test_rewards_judge.py'),
  ),
  Row(
    'R8',
    'Programs that break out of the sandbox, forge the verdict, or leave something behind',
    'programs',
    (
      'test_rewards_forgeries.py::test_forgery_runs_and_passes_no_test',
      'test_rewards_verdicts.py',
      'test_rewards_code.py::test_cheating_programs_pass_no_test',
      'test_rewards_code.py::test_program_reaches_only_its_own_folder',
      'test_seccomp.py::test_dangerous_calls_do_not_exist',
      'test_sandbox_limits.py',
    ),
    ('test_rewards_code.py', 'test_rewards_forgeries.py', 'test_seccomp.py'),
  ),
  Row(
    'R9',
    'Code in model folders, pickles, secrets in the environment of rewards',
    'tests',
    (
      'test_data_tokenizer.py::test_code_in_a_folder_is_never_run',
      'test_layering.py::test_rule[no_pickle]',
      'test_rewards_pool.py::test_secrets_in_environment_are_hidden_from_workers',
    ),
  ),
  Row(
    'R10',
    'NaN and infinity in rewards, gradients, weights, optimizer states, the critic, the router, the loss scale, a'
    ' teacher, on one of two hosts, and in model folders: never saved',
    'injections',
    ('test_nonfinite.py',),
  ),
  Row(
    'R11',
    'A disk that is full, over its quota, read-only or slow: one line at the next save, the same run afterwards',
    'tests',
    ('test_checkpoint.py::test_disk_full', 'test_bad_input.py::test_full_disk', 'test_disks.py'),
  ),
  Row('R12', 'GRPO with an environment and evaluation: memory, open files and threads stay as they are', 'soak', ()),
  Row(
    'R13',
    f'1,000 clients at once, {REQUESTS:,} requests: none lost or answered twice, memory flat; 2,000 odd bodies',
    'requests',
    ('test_server_load.py', 'test_openai_server.py::test_half', 'test_openai_server.py::test_bodies_of_all_kinds'),
  ),
)


class Collector:
  """A pytest plugin that counts the cases of each row, and writes the counts to a file after each test."""

  def __init__(self, chosen, file=None):
    self.chosen = chosen  # {row number: beginnings of node ids}
    self.file = file
    self.rows = collections.defaultdict(list)  # node id -> numbers of its rows
    self.counts = {number: collections.Counter() for number in chosen}
    self.failed = []
    self.soaked = ''

  def pytest_collection_modifyitems(self, items):
    for item in items:
      name = item.nodeid.removeprefix('tests/')
      for number, starts in self.chosen.items():
        if name.startswith(starts):
          self.rows[item.nodeid].append(number)
          self.counts[number]['waiting'] += 1
    items[:] = [item for item in items if item.nodeid in self.rows]
    self.write()

  def pytest_runtest_logreport(self, report):
    if report.when == 'teardown':
      for number in self.rows[report.nodeid]:
        self.counts[number]['waiting'] -= 1
      self.write()
    if report.when != 'call' and report.outcome == 'passed':
      return
    cases = int(dict(report.user_properties).get('cases', 1))
    for number in self.rows[report.nodeid]:
      self.counts[number][report.outcome] += cases if report.when == 'call' else 1
      self.counts[number]['seconds'] += report.duration
    if report.outcome == 'failed':
      self.failed.append(report.nodeid)
    self.write()

  def write(self, soaked=''):
    self.soaked = soaked or self.soaked
    if self.file:
      draft = self.file.with_suffix('.draft')
      draft.write_text(json.dumps([self.counts, self.failed, self.soaked]))
      draft.replace(self.file)


def chosen(rows):
  """Returns {row number: beginnings of node ids} of the existing tests that this size runs."""
  return {row.number: tuple(x for x in (*row.tests, *(row.more if SIZE else ())) if is_there(x)) for row in rows}


def is_there(test):
  """Returns whether this clone has a test with this node id, or one that begins with it."""
  file, _, name = test.partition('::')
  path = CLONE / 'tests' / file
  return path.exists() and f'def {name.partition("[")[0]}' in path.read_text('utf-8')


def soak(folder, note):
  """Samples, each second, the resources of a run of GRPO with an environment and evaluation.

  Sampling starts when all programs are compiled. `note` is called with the samples so far, every ten seconds.
  Returns [(seconds, MB, open files, threads, rows of metrics)].
  """
  sys.path.insert(0, str(CLONE / 'tests'))
  import episodes
  import tiny

  (folder / 'env.py').write_text(episodes.ENVIRONMENT)
  config = episodes.config(
    episodes.folder(folder / 'model'),
    folder / 'env.py',
    train=dict(steps=10**6),
    save=dict(every=20, keep=2),
    eval=dict(every=10, samples=2, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=8,correct=1')),
  )
  path = tiny.config_file(folder / 'soak.py', config)
  command = [sys.executable, '-m', 'launch.train', f'--config={path}', f'--workdir={folder}/run']
  run = subprocess.Popen(command, cwd=CLONE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  samples, rows = [], folder / 'run' / 'metrics.jsonl'
  try:
    start = 0.0
    while not start or time.monotonic() < start + SOAK_S:
      time.sleep(1)
      assert run.poll() is None, run.stderr.read()
      if not start and rows.exists() and '"eval"' in rows.read_text('utf-8'):
        start = time.monotonic()  # All programs are compiled.
      if start:
        samples.append((time.monotonic() - start, *_held(run.pid), len(rows.read_text('utf-8').splitlines())))
        if len(samples) % 10 == 0:
          note(samples)
    run.terminate()
    run.communicate(timeout=120)
    assert run.returncode == 42, run.returncode
  finally:
    run.kill()
  return samples


def grown(samples):
  """Returns a text for each resource that grew from a third of a soak to its end.

  Memory may grow by 1 %, or by 1 % an hour in soaks of more than an hour; open files and threads may not grow.
  """
  third, last = _ends(samples)
  hours = max(1.0, (last[0] - third[0]) / 3600)
  limits = {
    'MB of memory': (third[1], last[1], third[1] * (1 + 0.01 * hours)),
    'open files': (third[2], last[2], third[2]),
    'threads': (third[3], last[3], third[3]),
  }
  return [
    f'{resource} grew from {before:.0f} to {after:.0f}'
    for resource, (before, after, limit) in limits.items()
    if after > limit
  ]


def _ends(samples):
  """Returns the samples at a third and at the end of a soak.

  Their open files and threads are the fewest of ten samples, because a save has some of its own for a while.
  """
  third = len(samples) // 3
  return [
    (*middle[:2], *(min(sample[i] for sample in ten) for i in (2, 3)), middle[4])
    for middle, ten in ((samples[third], samples[third : third + 10]), (samples[-1], samples[-10:]))
  ]


def _soaked(samples):
  third, last = _ends(samples)
  seconds = last[0] - third[0]
  middle = samples[2 * len(samples) // 3]
  speed = ' and '.join(f'{(b[4] - a[4]) / max(b[0] - a[0], 1):.1f}' for a, b in ((third, middle), (middle, last)))
  return (
    f'{last[0]:.0f} s, {last[4]} rows of metrics; from a third of the time to the end ({seconds:.0f} s): memory'
    f' {third[1]:.0f} -> {last[1]:.0f} MB ({100 * (last[1] / third[1] - 1):+.1f} %), open files {third[2]} ->'
    f' {last[2]}, threads {third[3]} -> {last[3]}, {speed} rows a second in the two halves of it'
  )


def _held(pid):
  """Returns (MB, open files, threads) of a process."""
  status = dict(x.split(':', 1) for x in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines())
  return int(status['VmRSS'].split()[0]) / 1024, len(os.listdir(f'/proc/{pid}/fd')), int(status['Threads'])


def line(row, count, soaked):
  """Returns the row of the table as a line of Markdown; `soaked` is the result of row R12."""
  if row.number == 'R12':
    return f'| R12 | {row.what} | {soaked} | |'
  passed, failed, skipped, waiting = (count.get(name, 0) for name in ('passed', 'failed', 'skipped', 'waiting'))
  text = f'{passed:,} of {passed + failed:,} {row.unit}' + (f', {skipped} skipped' if skipped else '')
  text += f'; {waiting} tests were not run' if waiting else ''
  lacks = [row.lacks] * bool(row.lacks) + ['further tests, which size `hour` runs'] * bool(row.more and not SIZE)
  return f'| {row.number} | {row.what} | {text} | {"; ".join(lacks)} |'


def page(lines, failed, seconds):
  """Returns the text of docs/reliability.md."""
  failures = '\n'.join(f'* `{name}` failed' for name in failed)
  cpu = next((x.split(':')[1].strip() for x in open('/proc/cpuinfo') if x.startswith('model name')), platform.machine())
  host = (
    f'Size `{SIZES[SIZE]}` in {seconds / 60:.0f} minutes, {datetime.date.today()}; {cpu}, {os.cpu_count()} cores, load'
    f' {os.getloadavg()[2]:.0f} (mean of 15 minutes); Python {platform.python_version()}, jax'
    f' {importlib.metadata.version("jax")}' + '. Larger sizes were not run' * (SIZE + 1 < len(SIZES))
  )
  return f"""# Reliability

What was tried to break runs, and what broke. `python -m tests.scorecard` runs the tests of each row and writes this
page; `--size=hour` and `--size=night` run more of them, repeat those that draw at random, and soak and load for longer.
The sandbox and the server are described in [Security](security.md), resuming in [Running on a cluster](launch.md).

{host}.

| | what is tried | result | not covered |
|---|---|---|---|
{chr(10).join(lines)}

{failures or 'No test failed.'}
"""


def measure(rows, file):
  """Runs the tests of these rows in this process, and writes the results so far to the file."""
  import tempfile

  import pytest

  plugin = Collector(chosen(rows), file)
  files = sorted({str(CLONE / 'tests' / x.partition('::')[0]) for starts in plugin.chosen.values() for x in starts})
  if files:
    pytest.main(['-q', '-n', '0', '--long', '-p', 'no:cacheprovider', f'--rootdir={CLONE}', *files], plugins=[plugin])
  if any(row.number == 'R12' for row in rows):
    with tempfile.TemporaryDirectory() as folder:
      samples = soak(pathlib.Path(folder), lambda samples: plugin.write(_soaked(samples)))
    plugin.failed += [f'R12: {what}' for what in grown(samples)]
    plugin.write(_soaked(samples))


def watch(command, environment):
  """Runs a command until it ends or this process gets a signal; then ends all descendants of this process.

  Returns the exit code of the command, or 128 plus the number of the signal.
  """
  from jaxpost.workers import namespaces, supervisor

  signals = []
  for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
    signal.signal(number, lambda number, frame: signals.append(number))
  namespaces.become_subreaper()
  process = subprocess.Popen(command, cwd=CLONE, env=environment, start_new_session=True)
  while process.poll() is None and not signals:
    time.sleep(0.1)
  supervisor.end_all()
  return 128 + signals[0] if signals else process.returncode


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--size', choices=SIZES, default='ci')
  parser.add_argument('--rows', default='', help='numbers, by commas; all if empty')
  parser.add_argument('--file', help=argparse.SUPPRESS)  # where the process that runs the tests writes the counts
  options = parser.parse_args()
  rows = [row for row in ROWS if not options.rows or row.number in options.rows.split(',')]
  if options.file:
    return measure(rows, pathlib.Path(options.file))
  if SIZES[SIZE] != options.size:
    os.environ['JAXPOST_SCORECARD'] = options.size
    os.execv(sys.executable, [sys.executable, '-m', 'tests.scorecard', *sys.argv[1:]])
  import tempfile

  begin = time.monotonic()
  path = os.pathsep.join([str(CLONE), os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'counts.json'
    command = [sys.executable, '-m', 'tests.scorecard', *sys.argv[1:], f'--file={file}']
    code = watch(command, {**os.environ, 'PYTHONPATH': path, 'JAXPOST_SCORECARD': options.size})
    counts, failed, soaked = json.loads(file.read_text()) if file.exists() else ({}, [], '')
  lines = [line(row, counts.get(row.number, {}), soaked) for row in rows]
  print('\n'.join(lines))
  print({number: round(count.get('seconds', 0)) for number, count in counts.items()})
  print('\n'.join(f'failed: {name}' for name in failed))
  if code:
    print(f'ended early ({code}) after {time.monotonic() - begin:.0f} s; docs/reliability.md is not written')
    sys.exit(code)
  if not options.rows:
    (CLONE / 'docs' / 'reliability.md').write_text(page(lines, failed, time.monotonic() - begin), 'utf-8')
  sys.exit(bool(failed))


if __name__ == '__main__':
  main()
