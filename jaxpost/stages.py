"""Runs the stages of a config in order, each from the weights before it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath
from rich.console import Console

from jaxpost import loop
from jaxpost.distributed import coordination, watchdog
from jaxpost.errors import InputError, PeerError
from jaxpost.hardware import signals
from jaxpost.models import model as model_lib
from jaxpost.monitor import activity as activity_lib
from jaxpost.monitor import metrics, program_table
from jaxpost.monitor import start as start_lib
from jaxpost.programs.compile import TooLargeError
from jaxpost.stage import assemble, epochs, load_weights, place, precompile, prepare
from jaxpost.stage import config as config_lib
from jaxpost.stage.place import PlacedStage
from jaxpost.storage import object_store, run_lock, seals
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps, is_finished

if TYPE_CHECKING:
  from jaxpost.stage.records import PreparedStage, Source


def run(
  config: Any,
  workdir: epath.PathLike = 'runs/latest',
  console: Console | None = None,
  choose_mesh: Callable | None = None,
  stop: signals.StopSignal | None = None,
  verbose: bool = False,
) -> dict:
  """Starts or resumes the run in `workdir`; returns what summary.json holds.

  Args:
    config: a ConfigDict or nested dict (`jaxpost.defaults()` has all fields).
    console: a rich console for progress; None prints to standard output.
    choose_mesh: resolves `config.mesh` fields that are 'auto', as
      `jaxpost.planning.auto.resolve` does; None refuses them.
    stop: handler of the signals that end the run, entered by the calling command; None: the run enters its own.
    verbose: print the table of compiled programs.

  Raises:
    InputError, NoCheckpointError, Preempted: see `jaxpost.errors`.
  """
  workdir = object_store.check_workdir(workdir)
  if coordination.process_index():  # process 0 prints for all
    console = Console(quiet=True)
  with coordination.fail_together(), contextlib.ExitStack() as cleanup:
    cleanup.enter_context(object_store.explained(f'a file in {workdir}/'))
    cleanup.callback(watchdog.pause)
    stop = stop or cleanup.enter_context(signals.StopSignal())
    stop.install()
    lock = run_lock.RunLock(workdir, functools.partial(_leave, PeerError.exit_code))
    cleanup.callback(lock.release)

    def end(code: int, message: str) -> None:
      lock.release()
      _leave(code, message)

    stop.end = end
    activity = activity_lib.Activity(console or activity_lib.Console(), verbose)
    cleanup.enter_context(activity.following(lambda: f'{watchdog.operation()} is in progress'))  # between activities
    return _run(prepare.as_dict(config), workdir, activity, choose_mesh, stop, lock=lock)


def _leave(code: int, message: str) -> None:
  """Ends this process from any thread, with one line."""
  coordination.leave(watchdog.print_reason(message, code), message)


def _run(
  raw: dict,
  workdir: epath.Path,
  activity: activity_lib.Activity,
  choose_mesh: Callable | None,
  stop: signals.StopSignal,
  lock: run_lock.RunLock,
) -> dict:
  start, console = time.perf_counter(), activity.console
  if multi_process := coordination.process_count() > 1:
    from jaxpost.stage import agreement

    agreement.check_config(raw)
  configs = config_lib.parse(raw)  # before names of stages are used as keys
  raw = with_dtype(raw, workdir, console)
  raw = epochs.with_steps_of_run(raw, configs, workdir / 'config.json')
  configs = config_lib.parse(raw)
  _watch('the start of the run', *configs.values())
  if (workdir / 'config.json').exists():
    from jaxpost.stage import resumed_run

    resumed_run.check_config(workdir, configs, console)
  if multi_process:
    agreement.check_workdir(workdir, configs)
  if is_finished(workdir, configs):
    return _read_summary(workdir, console)
  if coordination.process_index() == 0:
    if names := list(configs.values())[-1].log.trackers:
      from jaxpost.monitor import trackers

      trackers.check_installed(names)
    console.out(start_lib.opening(next(iter(configs.values())).seed, str(workdir)), highlight=False)
    if workdir.exists():
      lock.acquire(console.print)
  with contextlib.ExitStack() as cleanup:
    with activity('reading data and the headers of weights'):
      prepared = prepare.prepare_all(raw, activity.note)
    for stage in prepared:
      cleanup.callback(stage.close)
    raw = epochs.with_steps(raw, {p.name: p.config.train.steps for p in prepared if p.config.train.epochs})
    stop.check('the start of the run')
    if prepared[-1].config.save.export:
      from jaxpost.formats import hf_export

      hf_export.check_target(workdir / 'export')
    if multi_process:
      agreement.check_inputs(prepared)
    # From here on devices are used.
    if (workdir / 'checkpoints').exists():
      from jaxpost.stage import resumed_run

      resumed_run.check_models(prepared, workdir, console)
    with activity('choosing meshes and checking kernels'):
      prepared = with_meshes(prepared, choose_mesh, console.print)
      placed = [place.place_stage(stage) for stage in prepared]
    _begin(workdir, raw, lock, prepared, console)
    warnings = _run_stages(placed, workdir, activity, stop)
    return _finish(workdir, console, start, warnings, {p.name: p.config.save for p in prepared})


def _read_summary(workdir: epath.Path, console: Console) -> dict:
  """Returns the summary of a finished run; prints which of its files were damaged or changed since."""
  console.out(f'{workdir}: was finished before; another --workdir starts a new run', highlight=False)
  for name in seals.damaged(workdir):
    console.out(f'{workdir / name}: differs from its checksum: it was damaged or changed', highlight=False)
  return object_store.read_json(workdir / 'summary.json')


def _begin(
  workdir: epath.Path, raw: dict, lock: run_lock.RunLock, prepared: Sequence[PreparedStage], console: Console
) -> None:
  """Takes the lock, deletes an old summary, writes config.json and the facts of this start, and prints the latter."""
  if coordination.process_index() == 0:
    lock.acquire(console.print)
    (workdir / 'summary.json').unlink(missing_ok=True)
    seals.write(workdir / 'config.json', json.dumps(config_lib.spelled(raw), indent=1))
    facts = start_lib.describe() | {'seed': prepared[0].config.seed, 'stages': epochs.facts(prepared)}
    facts['changes'] = config_lib.changes(raw)
    facts['files'] = start_lib.code_files(facts['changes'])
    lines = start_lib.lines(facts)
    if (workdir / start_lib.FILE).exists():
      from jaxpost.stage import resumed_run

      resumed_run.remove_drafts(workdir)
      lines += resumed_run.changed_code(workdir, facts['files'])
    object_store.add_line(workdir / start_lib.FILE, json.dumps(facts))
    for line in lines:
      console.out(line, highlight=False)


def with_meshes(
  prepared: Sequence[PreparedStage], choose_mesh: Callable | None, note: Callable = str
) -> Sequence[PreparedStage]:
  """Returns the stages with a mesh wherever their config says 'auto', and on accelerators with defaults that fit.

  Args:
    choose_mesh: see `run`.
    note: called with a line about each choice.
  """
  auto = any('auto' in vars(p.config.mesh).values() for p in prepared)
  if not auto and (choose_mesh is None or jax.default_backend() == 'cpu'):
    return prepared
  if choose_mesh is None:
    raise InputError(
      'config.mesh: auto needs a planner; start the run by jaxpost.run or launch.train, or pass '
      'choose_mesh=jaxpost.planning.auto.resolve'
    )
  return choose_mesh(prepared, note)


def with_dtype(raw: dict, workdir: epath.Path, console: Console) -> dict:
  """Returns the config with a type in place of `model.dtype='auto'`.

  It is the type that the run began with, or else the fastest of process 0. A stage without a type has that of the run.
  """
  blocks = {name: raw[name] for name in raw.get('stages') or () if isinstance(raw.get(name), dict)}
  auto = [name for name, block in blocks.items() if (block.get('model') or {}).get('dtype') == 'auto']
  if (raw.get('model') or {}).get('dtype', 'auto') == 'auto':
    auto.insert(0, '')  # stands for the run
  if not auto:
    return raw
  from jaxpost.hardware import probe

  dtype = probe.measured_dtype(workdir / 'config.json', auto, console)
  change = {'model': {'dtype': dtype}}
  for name in auto:
    raw = config_lib.merge(raw, {name: change} if name else change)
  return raw


def _finish(workdir: epath.Path, console: Console, start: float, warnings: list[dict], saves: dict[str, Any]) -> dict:
  """Writes the report and summary.json, which marks the run as finished; `saves` is {stage: its `config.save`}."""
  from jaxpost.monitor import report

  paths = {'metrics': str(workdir / 'metrics.jsonl'), 'report': str(workdir / 'report.html')}
  if [*saves.values()][-1].export:
    paths['export'] = str(workdir / 'export')
  summary = None
  if coordination.process_index() == 0:
    rows = metrics.read_rows(workdir / 'metrics.jsonl')
    figures: dict[str, Any] = {**report.figures(rows), 'wall_s': round(time.perf_counter() - start, 1), 'paths': paths}
    summary = report.summary(workdir, figures, warnings, saves)
    report.write_report(workdir, rows)
    samples = [f'samples/{name}' for name in object_store.files(workdir / 'samples')]
    seals.add(workdir, ['metrics.jsonl', *samples])
    report.terminal_summary(workdir, rows, console)
  return coordination.broadcast(summary)


def _run_stages(
  placed: list[PlacedStage], workdir: epath.Path, activity: activity_lib.Activity, stop: signals.StopSignal
) -> list[dict]:
  """Runs the stages that are not done, exports the last weights, and returns the warnings."""
  last, done = placed[-1], stages_done(placed, workdir)
  log = last.config.log
  start_trackers = None
  if log.trackers:
    from jaxpost.monitor import trackers

    start_trackers = functools.partial(trackers.Trackers, log)
  plans = program_table.read(workdir / 'plan.json', [stage.name for stage in placed[:done]])
  params = None
  with metrics.MetricsWriter(
    workdir,
    tensorboard=log.tensorboard,
    trackers=start_trackers,
    primary=coordination.process_index() == 0,
    print_every=log.every,
    console=activity.console,
    stages=[stage.name for stage in placed],
  ) as writer:
    for i in range(done, len(placed)):
      _watch(f'the start of {placed[i].name}', placed[i].config)
      placed[i].ledger.announce = activity.compiling
      if params is not None and not _takes_over(placed[i], placed[i - 1]):
        params = None
      stage = None
      while not stage:
        with activity(f'loading weights of {placed[i].name}'):
          params = initial_params(placed[i], workdir) if params is None else _adopt(params, placed[i - 1], placed[i])
          try:
            stage = assemble.assemble(placed[i], workdir, writer, params)
          except TooLargeError as error:
            if not (choose_smaller := placed[i].choose_smaller):
              raise
            placed[i] = choose_smaller(placed[i], error)
        params = None  # the stage has taken them over
        gc.collect()  # frees those of a stage that was too large
      plans.append(precompile.plan_entry(placed[i], stage.memory_usage))
      stop.check(f'the start of {placed[i].name}')
      _run_stage(placed[i], stage, workdir, activity, plans, stop=stop)
      stop.unsaved = False
      params = stage.roles.policy.params
      del stage
      gc.collect()  # frees the optimizer state before the next stage makes its own
    if last.config.save.export:
      from jaxpost.stage import export

      stop.check('the export')
      with activity('writing export/'):
        params = _load_params(last, last.inputs.outcome, workdir) if params is None else params
        export.export(last.inputs, workdir / 'export', params)
        if coordination.process_index() == 0:
          export.write_card(workdir / 'export', workdir, last.name, last.config.train.steps)
    if done == len(placed):  # all rows are of earlier starts, so no step has passed them to the alerts
      for row in metrics.read_rows(writer.path):
        if row['split'] == 'train':
          writer.alerts.check(row['stage'], row['step'], row)
    return writer.alerts.warnings


def _takes_over(placed: PlacedStage, before: PlacedStage) -> bool:
  """True if a stage starts from the weights of the one before, and those in memory are what a resume would load."""
  old, new = before.model, placed.model
  # The codes of a quantized base are never computed again, and adapters would have to be merged into them.
  same_codes = old.quantized == new.quantized and (not old.quantized or old.config.lora in ((), new.config.lora))
  return placed.inputs.sources['policy'].stage == before.name and same_codes


def _adopt(params: dict, before: PlacedStage, placed: PlacedStage) -> dict:
  """Returns the weights of the stage before in the model structure, layout and type of the next one."""
  config = placed.config
  return model_lib.adopt(params, before.model, placed.model, placed.train, config.model.param_dtype, seed=config.seed)


def _run_stage(
  placed: PlacedStage,
  stage: loop.Stage,
  workdir: epath.Path,
  activity: activity_lib.Activity,
  plans: list[dict],
  stop: signals.StopSignal,
) -> None:
  """Resumes a stage and runs its steps; `plans` has the entries of plan.json up to this stage."""
  with contextlib.ExitStack() as cleanup:  # in reverse order
    cleanup.callback(stage.checkpointer.close)  # waits for a save in progress
    cleanup.callback(placed.timer.close)
    cleanup.callback(stage.stream.close)
    if stage.stop_profiler:
      cleanup.callback(stage.stop_profiler)
    if coordination.process_index() == 0:
      seals.write(workdir / 'plan.json', json.dumps(plans, indent=1))
      if activity.verbose:
        activity.console.print(program_table.render(plans[-1]))
      else:
        activity.console.out(program_table.one_line(plans[-1]), highlight=False)
    with activity(f'looking for checkpoints of {stage.name}'):
      done = loop.resume(stage)
    stage.writer.start_stage(stage.name, stage.steps, done, evaluated=bool(done and stage.checkpointer.metrics(done)))
    with activity.following(placed.timer.doing):
      loop.run_stage(stage, done, stop)
    placed.timer.flush()
    _watch(f'the end of {stage.name}', placed.config)


def _watch(doing: str, *configs: config_lib.Config) -> None:
  """Starts the watchdog, unless a config switches it off."""
  limits = [c.log.watchdog_s for c in configs]
  watchdog.start_operation(doing, max(watchdog.SLOW_S, *limits) if all(limits) else 0.0)


def stages_done(placed: Sequence[PlacedStage], workdir: epath.Path) -> int:
  """Returns how many of the stages, from the first on, have made all their steps and evaluations."""
  for i in reversed(range(len(placed))):
    folder = workdir / 'checkpoints' / placed[i].name
    if steps := finished_steps(folder):
      return i + 1 if steps[0] >= placed[i].config.train.steps and _is_complete(placed[i], folder) else i
  return 0


def _is_complete(placed: PlacedStage, folder: epath.Path) -> bool:
  """Returns whether a good checkpoint has all steps of a stage and, where data is held out, the last evaluation."""
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    newest = checkpointer.latest() or 0  # a damaged checkpoint does not count: its steps are made again
    evaluated = not placed.data.held_out or checkpointer.metrics(newest)  # a stop signal may have come before
    return bool(evaluated) and newest >= placed.config.train.steps


def initial_params(placed: PlacedStage, workdir: epath.PathLike | None) -> dict:
  """Loads the weights that a stage starts from, in its training layout."""
  return _load_params(placed, placed.inputs.sources['policy'], workdir)


def _load_params(placed: PlacedStage, source: Source, workdir: epath.PathLike | None) -> dict:
  config, ledger = placed.config, placed.ledger
  dtype = config.model.param_dtype
  return load_weights.load(source, placed.model, placed.train, dtype, workdir, seed=config.seed, ledger=ledger)
