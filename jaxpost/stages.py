"""Runs the stages of a config in order, each from the weights before it."""

import contextlib
import gc
import json
import time

import jax
import rich.console
from etils import epath

from jaxpost import loop
from jaxpost.distributed import coordination, watchdog
from jaxpost.errors import InputError
from jaxpost.formats import hf
from jaxpost.hardware import host, probe
from jaxpost.models import lora
from jaxpost.monitor import metrics, program_table, report
from jaxpost.stage import assemble, export, load_weights, prepare, sources
from jaxpost.stage import config as config_lib
from jaxpost.stage import kit as kit_lib
from jaxpost.stage.consistency import (
  check_same_config,
  check_same_inputs,
  check_same_models,
  check_same_run,
  check_same_start,
  is_finished,
  spelled,
)
from jaxpost.storage import object_store
from jaxpost.storage.checkpoint import Checkpointer
from jaxpost.storage.manifest import finished_steps

_SLOW_S = 600.0  # what else than a step may take, where watchdog_s is less


def run(config, workdir='runs/latest', console=None, choose_mesh=None) -> dict:
  """Starts or resumes the run in `workdir`; returns what summary.json holds.

  Args:
    config: a ConfigDict or nested dict (`jaxpost.defaults()` has all
      fields).
    workdir: the run's folder.
    console: a rich console for progress; None prints to standard output.
    choose_mesh: resolves `config.mesh` fields that are 'auto', as
      `jaxpost.planning.auto.resolve` does; None refuses them.

  Raises:
    InputError, NoCheckpointError, Preempted: see `jaxpost.errors`.
  """
  object_store.check(str(workdir), '--workdir')
  workdir = epath.Path(workdir).expanduser()
  if coordination.process_index():  # process 0 speaks for all
    console = rich.console.Console(quiet=True)
  with coordination.fail_together(), contextlib.ExitStack() as leave:
    leave.callback(watchdog.pause)
    return _run(prepare.as_dict(config), workdir, console or rich.console.Console(), choose_mesh)


def _run(raw, workdir, console, choose_mesh) -> dict:
  start = time.perf_counter()
  check_same_config(raw)
  raw = settle_dtype(raw, workdir, console)
  configs = config_lib.parse(raw)
  _watch('the start of the run', *configs.values())
  check_same_run(workdir, configs, console)
  check_same_start(workdir, configs)
  if is_finished(workdir, configs):
    console.out(f'{workdir}: was finished before', highlight=False)
    return json.loads((workdir / 'summary.json').read_text())
  with host.StopSignal(at_once=True):
    prepared = prepare.prepare_all(raw)
    try:
      if prepared[-1].config.save.export:
        hf.check_target(workdir / 'export')
      check_same_inputs(prepared)
      # From here on devices are used.
      check_same_models(prepared, workdir)
      prepared = with_meshes(prepared, raw, choose_mesh, console.print)
      kits = [kit_lib.make_kit(p) for p in prepared]
      if coordination.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / 'summary.json').unlink(missing_ok=True)
        object_store.write_text(workdir / 'config.json', json.dumps(spelled(raw), indent=1))
      return _finish(workdir, console, prepared, start, _run_stages(kits, workdir, console))
    finally:
      for p in prepared:
        p.close()


def with_meshes(prepared: list, raw, choose_mesh, note=str) -> list:
  """The stages with a mesh wherever their config says 'auto'."""
  if not any('auto' in vars(p.config.mesh).values() for p in prepared):
    return prepared
  if choose_mesh is None:
    raise InputError(
      'config.mesh: auto needs a planner; start the run by jaxpost.run or launch.train, or pass '
      'choose_mesh=jaxpost.planning.auto.resolve'
    )
  return choose_mesh(prepared, raw, note)


def settle_dtype(raw: dict, workdir, console) -> dict:
  """The config with a type in place of `model.dtype='auto'`.

  The one that the run began with, or the fastest of process 0.
  """
  names = [n for n in raw.get('stages') or () if isinstance(raw.get(n), dict)]
  asks = lambda block: (block.get('model') or {}).get('dtype') == 'auto'
  auto = [n for n in ('', *names) if asks(raw[n] if n else raw)]
  if not auto:
    return raw
  path, kept = workdir / 'config.json', None
  if coordination.process_index() == 0 and path.exists():
    saved = json.loads(path.read_text())
    blocks = [saved.get(n) or {} for n in auto if n] + [saved]
    kept = next((b['model']['dtype'] for b in blocks if (b.get('model') or {}).get('dtype')), None)
  kept = coordination.broadcast(kept)
  if not kept:
    jax.devices()  # on all: they wait for each other
    kept, why = coordination.broadcast(list(probe.matmul_type()) if coordination.process_index() == 0 else None)
    console.out(f'config.model.dtype: auto is {kept} here ({why})', highlight=False)
  settle = lambda block: block | {'model': block['model'] | {'dtype': kept}}
  out = settle(raw) if '' in auto else dict(raw)
  return out | {n: settle(raw[n]) for n in auto if n}


def policy_and_stream(config, choose_mesh=None) -> tuple:
  """The parts of a run with one stage, for a loop of your own.

  `policy.update(next(stream).updates[0][1])` is a step. Of an on-policy
  algorithm the stream is a `Controller`, which has `sampler`, `prompts`, `pool`
  and the rest. Nothing is written; `stream.close()` ends workers and threads.
  """
  raw = settle_dtype(prepare.as_dict(config), epath.Path(''), rich.console.Console())
  names = list(config_lib.parse(raw))
  if len(names) > 1:
    raise InputError(f'config.stages: {", ".join(names)} are several; a loop of your own drives one')
  (prepared,) = with_meshes(prepare.prepare_all(raw), raw, choose_mesh)
  kit = kit_lib.make_kit(prepared)
  roles, stream, _ = assemble.make_parts(kit, initial_params(kit, None))
  return roles.policy, stream


def _finish(workdir, console, prepared, start, warnings) -> dict:
  """summary.json, which says that the run is finished, and the report."""
  paths = {'metrics': str(workdir / 'metrics.jsonl'), 'report': str(workdir / 'report.html')}
  if prepared[-1].config.save.export:
    paths['export'] = str(workdir / 'export')
  summary = None
  if coordination.process_index() == 0:
    summary = metrics.summary(
      workdir, {**report.figures(workdir), 'wall_s': round(time.perf_counter() - start, 1), 'paths': paths}, warnings
    )
    report.write_report(workdir)
    report.terminal_summary(workdir, console)
  return coordination.broadcast(summary)


def _run_stages(kits, workdir, console) -> list[dict]:
  """What is left of the stages, and the export; the warnings."""
  log, save = kits[-1].config.log, kits[-1].config.save
  done = stages_done(kits, workdir)
  params, plans = None, program_table.read(workdir / 'plan.json', [kit.prepared.name for kit in kits[:done]])
  with metrics.MetricsWriter(
    workdir,
    tensorboard=log.tensorboard,
    wandb=log.wandb,
    primary=coordination.process_index() == 0,
    print_every=log.every,
    console=console,
  ) as writer:
    for i, kit in enumerate(kits[done:], done):
      _watch(f'the start of {kit.prepared.name}', kit.config)
      if params is None or kit.prepared.sources['policy'].stage != (kits[i - 1].prepared.name):
        params = initial_params(kit, workdir)
      else:
        params = lora.adopt(
          params,
          kits[i - 1].prepared.model,
          kit.prepared.model,
          kit.train,
          kit.config.model.param_dtype,
          kit.config.seed,
        )
      stage = assemble.assemble(kit, workdir, writer, params)
      del params
      with contextlib.ExitStack() as leave:
        leave.callback(stage.checkpointer.close)  # waits for a save under way
        leave.callback(kit.timer.close)
        leave.callback(stage.stream.close)
        leave.callback(stage.stop_profiler)
        plans.append(
          program_table.make_plan(
            stage.name,
            kit.prepared.model.config,
            {'train': kit.train, 'rollout': kit.rollout},
            kit.shape[0] * kit.shape[2],
            kit.ledger.rows,
            stage.memory_usage.predicted,
          )
        )
        if coordination.process_index() == 0:
          program_table.write(workdir / 'plan.json', plans)
          console.print(program_table.render(plans[-1]))
        before = loop.resume(stage)
        writer.start_stage(stage.name, stage.steps, before)
        loop.run_stage(stage, before)
        kit.timer.flush()
        _watch(f'the end of {stage.name}', kit.config)
      params = stage.roles.policy.params
      del stage
      gc.collect()  # the optimizer state goes before the next stage's comes
    if save.export:
      if params is None:
        params = final_params(kits[-1], workdir)
      export.export(kits[-1].prepared, workdir / 'export', params)
    if done == len(kits):  # nobody has looked at the rows
      for row in metrics.read_rows(writer.path):
        if row['split'] == 'train':
          writer.alerts.check(row['stage'], row['step'], row)
    return writer.alerts.warnings


def _watch(doing: str, *configs):
  """Under the watchdog, which a config may have switched off."""
  limits = [c.log.watchdog_s for c in configs]
  watchdog.start_operation(doing, max(_SLOW_S, *limits) if all(limits) else 0.0)


def stages_done(kits, workdir) -> int:
  """How many of the stages, from the first on, have made all their steps."""
  for i, kit in reversed(list(enumerate(kits))):
    folder = workdir / 'checkpoints' / kit.prepared.name
    steps = finished_steps(folder)
    if not steps:
      continue
    if steps[0] < kit.config.train.steps:
      return i
    checkpointer = Checkpointer(folder)
    try:  # a damaged newest one means that some steps are to be made again
      return i + (checkpointer.latest() >= kit.config.train.steps)
    finally:
      checkpointer.close()
  return 0


def initial_params(kit, workdir) -> dict:
  """The weights that a stage starts from, in the training layout of `kit`."""
  p = kit.prepared
  return load_weights.load(
    p.sources['policy'], p.model, kit.train, p.config.model.param_dtype, workdir, seed=p.config.seed, ledger=kit.ledger
  )


def final_params(kit, workdir) -> dict:
  """The weights that a finished stage has left."""
  p = kit.prepared
  return load_weights.load(
    sources.outcome(p), p.model, kit.train, p.config.model.param_dtype, workdir, ledger=kit.ledger
  )
