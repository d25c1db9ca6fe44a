"""Runs the stages of a config in order, each from the weights before it."""

import contextlib
import dataclasses
import gc
import json
import pathlib
import time

import jax
import numpy as np
import rich.console
from etils import epath

from jaxpost import assemble, build, cache, config as config_lib
from jaxpost import (
    host, loop, metrics, plan, processes, report, store, watchdog, weights)
from jaxpost.checkpoint import Checkpointer, finished_steps
from jaxpost.errors import InputError
from jaxpost.models import config as model_config, hf, lora
from jaxpost.programs import probe

# Changing these does not change what a run computes, or only from here on.
_FREE = ('log', 'save', 'eval', 'rewards', 'mesh', 'train.steps')
# Rows that processes compare at the start: all of most data sets.
_HASHED, _HASHED_LAZY = 20_000, 100
_SLOW_S = 600.0  # what else than a step may take, where watchdog_s is less


def run(config, workdir='runs/latest', console=None) -> dict:
  """Starts or resumes the run in `workdir`; returns what summary.json holds.

  Args:
    config: a ConfigDict or nested dict (`jaxpost.config.defaults()` has all
      fields).
    workdir: the run's folder.

  Raises:
    InputError, NoCheckpointError, Preempted: see `jaxpost.errors`.
  """
  store.check(str(workdir), '--workdir')
  workdir = epath.Path(workdir).expanduser()
  if processes.index():  # process 0 speaks for all
    console = rich.console.Console(quiet=True)
  with processes.together(), contextlib.ExitStack() as leave:
    leave.callback(watchdog.rest)
    return _run(
        build.as_dict(config), workdir, console or rich.console.Console())


def _run(raw, workdir, console) -> dict:
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
    prepared = build.prepare_all(raw)
    try:
      if prepared[-1].config.save.export:
        hf.check_target(workdir / 'export')
      check_same_inputs(prepared)
      # From here on devices are used.
      check_same_models(prepared, workdir)
      prepared = with_meshes(prepared, raw, console.print)
      kits = [assemble.make_kit(p) for p in prepared]
      if processes.index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / 'summary.json').unlink(missing_ok=True)
        metrics.write_atomic(
            workdir / 'config.json', json.dumps(_spelled(raw), indent=1))
      return _finish(workdir, console, prepared, start, _run_stages(
          kits, workdir, console))
    finally:
      for p in prepared:
        p.close()


def with_meshes(prepared: list, raw, note=str) -> list:
  """The stages with a mesh wherever their config says 'auto'."""
  if not any('auto' in vars(p.config.mesh).values() for p in prepared):
    return prepared
  from jaxpost.planning import auto  # compiles: few need it
  return auto.resolve(prepared, raw, note)


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
  if processes.index() == 0 and path.exists():
    saved = json.loads(path.read_text())
    blocks = [saved.get(n) or {} for n in auto if n] + [saved]
    kept = next((b['model']['dtype'] for b in blocks
                 if (b.get('model') or {}).get('dtype')), None)
  kept = processes.from_first(kept)
  if not kept:
    jax.devices()  # on all: they wait for each other
    kept, why = processes.from_first(
        list(probe.matmul_type()) if processes.index() == 0 else None)
    console.out(f'config.model.dtype: auto is {kept} here ({why})',
                highlight=False)
  settle = lambda block: block | {'model': block['model'] | {'dtype': kept}}
  out = settle(raw) if '' in auto else dict(raw)
  return out | {n: settle(raw[n]) for n in auto if n}


def policy_and_stream(config) -> tuple:
  """The parts of a run with one stage, for a loop of your own.

  `policy.update(next(stream).updates[0][1])` is a step. Of an on-policy
  algorithm the stream is a `Controller`, which has `sampler`, `prompts`, `pool`
  and the rest. Nothing is written; `stream.close()` ends workers and threads.
  """
  raw = settle_dtype(
      build.as_dict(config), epath.Path(''), rich.console.Console())
  names = list(config_lib.parse(raw))
  if len(names) > 1:
    raise InputError(f'config.stages: {", ".join(names)} are several; a loop '
                     'of your own drives one')
  prepared, = with_meshes(build.prepare_all(raw), raw)
  kit = assemble.make_kit(prepared)
  roles, stream, _ = assemble.make_parts(kit, initial_params(kit, None))
  return roles.policy, stream


def _finish(workdir, console, prepared, start, warnings) -> dict:
  """summary.json, which says that the run is finished, and the report."""
  paths = {'metrics': str(workdir / 'metrics.jsonl'),
           'report': str(workdir / 'report.html')}
  if prepared[-1].config.save.export:
    paths['export'] = str(workdir / 'export')
  summary = None
  if processes.index() == 0:
    summary = metrics.summary(workdir, {
        **report.figures(workdir),
        'wall_s': round(time.perf_counter() - start, 1), 'paths': paths
    }, warnings)
    report.write_report(workdir)
    report.terminal_summary(workdir, console)
  return processes.from_first(summary)


def _run_stages(kits, workdir, console) -> list[dict]:
  """What is left of the stages, and the export; the warnings."""
  log, save = kits[-1].config.log, kits[-1].config.save
  done = stages_done(kits, workdir)
  params, plans = None, plan.read(
      workdir / 'plan.json', [kit.prepared.name for kit in kits[:done]])
  with metrics.MetricsWriter(
      workdir, tensorboard=log.tensorboard, wandb=log.wandb,
      primary=processes.index() == 0, print_every=log.every,
      console=console) as writer:
    for i, kit in enumerate(kits[done:], done):
      _watch(f'the start of {kit.prepared.name}', kit.config)
      if params is None or kit.prepared.sources['policy'].stage != (
          kits[i - 1].prepared.name):
        params = initial_params(kit, workdir)
      else:
        params = lora.adopt(
            params, kits[i - 1].prepared.model, kit.prepared.model,
            kit.train, kit.config.model.param_dtype, kit.config.seed)
      stage = assemble.assemble(kit, workdir, writer, params)
      del params
      with contextlib.ExitStack() as leave:
        leave.callback(stage.checkpointer.close)  # waits for a save under way
        leave.callback(kit.chrono.close)
        leave.callback(stage.stream.close)
        leave.callback(stage.close)
        plans.append(plan.make_plan(
            stage.name, kit.prepared.model.config,
            {'train': kit.train, 'rollout': kit.rollout},
            kit.shape[0] * kit.shape[2], kit.ledger.rows,
            stage.memory.predicted))
        if processes.index() == 0:
          plan.write(workdir / 'plan.json', plans)
          console.print(plan.render(plans[-1]))
        before = loop.resume(stage)
        writer.start_stage(stage.name, stage.steps, before)
        loop.run_stage(stage, before)
        kit.chrono.flush()
        _watch(f'the end of {stage.name}', kit.config)
      params = stage.roles.policy.params
      del stage
      gc.collect()  # the optimizer state goes before the next stage's comes
    if save.export:
      if params is None:
        params = final_params(kits[-1], workdir)
      assemble.export(kits[-1].prepared, workdir / 'export', params)
    if done == len(kits):  # nobody has looked at the rows
      for row in metrics.read_rows(writer.path):
        if row['split'] == 'train':
          writer.watch.check(row['stage'], row['step'], row)
    return writer.watch.warnings


def _watch(doing: str, *configs):
  """Under the watchdog, which a config may have switched off."""
  limits = [c.log.watchdog_s for c in configs]
  watchdog.begin(doing, max(_SLOW_S, *limits) if all(limits) else 0.0)


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


def is_finished(workdir, configs: dict) -> bool:
  """Whether nothing is left to do; asks no device."""
  name, config = list(configs.items())[-1]
  steps = finished_steps(workdir / 'checkpoints' / name)
  exported = not config.save.export or (workdir / 'export').exists()
  return bool(steps) and steps[0] >= config.train.steps and exported and (
      workdir / 'summary.json').exists()


def initial_params(kit, workdir) -> dict:
  """The weights that a stage starts from, in the training layout of `kit`."""
  p = kit.prepared
  return weights.load(
      p.sources['policy'], p.model, kit.train, p.config.model.param_dtype,
      workdir, seed=p.config.seed, ledger=kit.ledger)


def final_params(kit, workdir) -> dict:
  """The weights that a finished stage has left."""
  p = kit.prepared
  return weights.load(
      weights.outcome(p), p.model, kit.train, p.config.model.param_dtype,
      workdir, ledger=kit.ledger)


def check_same_run(workdir, configs: dict, console):
  """Shows what changed since the run began; refuses what would corrupt it.

  Stages of which nothing is saved may change in any way.
  """
  path = workdir / 'config.json'
  if not path.exists():
    return
  try:
    old = config_lib.parse(json.loads(path.read_text()))
  except InputError as e:
    raise InputError(
        f'{path}: is of another version ({e}); choose another --workdir'
    ) from e
  done = {n: finished_steps(workdir / 'checkpoints' / n) for n in old}
  begun = [name for name, steps in done.items() if steps]
  if begun != list(configs)[:len(begun)]:
    raise InputError(
        f'config.stages: {", ".join(begun)} of {workdir} have begun and must '
        f'stay the first, not {", ".join(configs)}; set them back or choose '
        'another --workdir')
  for name, config in configs.items():
    changes = difference(
        _spelled(vars(old[name])), _spelled(vars(config))
    ) if name in old else {}
    for key, (was, now) in changes.items():
      if key != 'stages':
        console.out(f'config.{key} of {name}: {was!r} in {path}, now {now!r}',
                    highlight=False)
    for key in changes if name in begun else ():
      _refuse(workdir, name, key, *changes[key], name == begun[-1],
              done[name][0])


def _refuse(workdir, stage, key, was, now, newest: bool, done: int):
  """InputError where a stage that has begun cannot go on with a change."""
  free = key == 'stages' or any(
      key == f or key.startswith(f + '.') for f in _FREE)
  if key == 'train.steps' and (not newest or now < done):
    raise InputError(
        f'config.train.steps: {now} of {stage}, but {workdir} holds its step '
        f'{done}' + ('' if newest else ' and a later stage has begun from it')
        + f'; set it back to {was} or choose another --workdir')
  if not free:
    raise InputError(
        f'{workdir}: config.{key} of {stage} differs from the run that is '
        f'being resumed ({was!r}, now {now!r}); set it back or choose another '
        '--workdir')


def check_same_config(raw):
  """InputError where processes have other code, or other configs."""
  if processes.count() == 1:
    return
  processes.check_same(  # first: other code may have other fields
      {'the version of jax': jax.__version__, 'the code of jaxpost': code()},
      'install one everywhere')
  plain = _spelled(raw)
  if len(set(processes.gather(cache.fingerprint(plain)))) > 1:
    every = processes.gather(plain)
    for i, other in enumerate(every):
      for key, (was, now) in difference(every[0], other).items():
        raise InputError(
            f'config.{key}: {was!r} on process 0 and {now!r} on process {i}; '
            'start all with the same config')


def check_same_start(workdir, configs: dict):
  """InputError where processes see another workdir."""
  if processes.count() == 1:
    return
  saved = {n: finished_steps(workdir / 'checkpoints' / n) for n in configs}
  processes.check_same(
      {f'what {workdir} holds': [is_finished(workdir, configs), saved]},
      'give a --workdir that all processes reach')


def code() -> str:
  """A hash of this library as it is installed here."""
  root = pathlib.Path(__file__).parent
  return cache.fingerprint([
      [str(file.relative_to(root)), file.read_text()]
      for file in sorted(root.rglob('*.py'))])


def check_same_inputs(prepared):
  """InputError where processes see different data, tokens or weights."""
  if processes.count() == 1:
    return
  values = {}
  for p in prepared:
    rows, held_out = p.config.data.path, p.config.eval.data.path
    values[f'config.data.path of {p.name}: what is in {rows}'] = digest(p.rows)
    if p.eval_rows is not None:
      values[f'config.eval.data.path of {p.name}: what is in {held_out}'] = (
          digest(p.eval_rows))
    first = p.first_batch
    values[f'the tokenizer of {p.name}'] = cache.fingerprint([
        p.tokenizer.encode(str(p.rows[0])),
        first is not None and first.tokens.tolist()])
    values |= {f'the {role} of {p.name}': cache.fingerprint(
        weights.outline(source)) for role, source in p.sources.items()}
  processes.check_same(values, 'give all processes the same files')


def check_same_models(prepared, workdir):
  """InputError where shapes would not show that a checkpoint is of another."""
  for p in prepared:
    if not (saved := weights.saved_meta(p, workdir)):
      continue
    was = dataclasses.asdict(model_config.from_json(saved['model']))
    for k, v in dataclasses.asdict(p.model.config).items():
      if was.get(k) != v:
        raise InputError(
            f'config.model.path of {p.name}: has {k} {v!r}, in the checkpoint '
            f'{was.get(k)!r}; bring it back or change --workdir')


def digest(rows) -> str:
  """Of the number of the rows, and of up to _HASHED of them."""
  most = _HASHED_LAZY if rows.streaming else _HASHED
  chosen = np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)
  return cache.fingerprint([len(rows), list(rows.sizes), *(
      json.dumps(rows[n], default=str) for n in chosen.tolist())])


def _spelled(value):
  """What JSON makes of a config; functions by name, the same each time."""
  def spell(x):
    if dataclasses.is_dataclass(x):
      return vars(x)
    named = x if hasattr(x, '__qualname__') else type(x)
    return f'{named.__module__}:{named.__qualname__}' if callable(x) else str(x)
  return json.loads(json.dumps(value, default=spell))


def difference(old, new, prefix='') -> dict:
  """{dotted key: (old, new)} of the leaves that differ."""
  if isinstance(old, dict) and isinstance(new, dict):
    out = {}
    for key in sorted({*old, *new}):
      out |= difference(old.get(key), new.get(key), f'{prefix}{key}.')
    return out
  return {} if old == new else {prefix[:-1]: (old, new)}
