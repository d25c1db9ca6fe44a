"""Runs the stages of a config in order, each from the weights before it."""

import dataclasses
import gc
import json
import time

import jax
import jax.numpy as jnp
import rich.console
from etils import epath

from jaxpost import assemble, build, loop, metrics, plan, report
from jaxpost.checkpoint import Checkpointer
from jaxpost.errors import InputError
from jaxpost.models import hf
from jaxpost.programs import train as programs

# Changing these does not change what a run computes, or only from here on.
_FREE = ('log', 'save', 'eval', 'rewards', 'mesh', 'train.steps')


def run(config, workdir='runs/latest', console=None) -> dict:
  """Starts or resumes the run in `workdir`; returns what summary.json holds.

  Args:
    config: a ConfigDict or nested dict (`jaxpost.config.defaults()` has all
      fields).
    workdir: the run's folder.

  Raises:
    InputError, NoCheckpointError, Preempted: see `jaxpost.errors`.
  """
  start = time.perf_counter()
  raw = build.as_dict(config)
  workdir = epath.Path(workdir).expanduser()
  console = console or rich.console.Console()
  check_same_run(workdir, raw, console)
  prepared = build.prepare_all(raw)
  last = prepared[-1]
  log = last.config.log
  try:
    with metrics.MetricsWriter(
        workdir, tensorboard=log.tensorboard, wandb=log.wandb,
        primary=jax.process_index() == 0, print_every=log.every,
        console=console) as writer:
      _run_stages(prepared, workdir, writer, console)
      warnings = writer.watch.warnings
  finally:
    for p in prepared:
      if p.pool:
        p.pool.close()
  paths = {'metrics': str(workdir / 'metrics.jsonl'),
           'report': str(workdir / 'report.html')}
  if last.config.save.export:
    paths['export'] = str(workdir / 'export')
  figures = {**report.figures(workdir),
             'wall_s': round(time.perf_counter() - start, 1), 'paths': paths}
  if jax.process_index():
    return figures
  summary = metrics.summary(workdir, figures, warnings)
  report.write_report(workdir)
  report.terminal_summary(workdir, console)
  return summary


def _run_stages(prepared, workdir, writer, console):
  """All stages, each with the weights of the one before."""
  plans, params = [], None
  for i, p in enumerate(prepared):
    kit = assemble.make_kit(p)
    if params is None:
      params = initial_params(kit, workdir, prepared[:i])
    stage = assemble.assemble(kit, workdir, writer, params)
    del params
    plans.append(plan.make_plan(
        p.name, p.model.config, {'train': kit.train, 'rollout': kit.rollout},
        kit.shape[0] * kit.shape[2], kit.ledger.rows))
    if jax.process_index() == 0:
      plan.write(workdir / 'plan.json', plans)
      console.print(plan.render(plans[-1]))
    try:
      done = loop.resume(stage)
      writer.start_stage(p.name, stage.steps, done)
      loop.run_stage(stage, done)
      stage.checkpointer.wait()
    finally:
      stage.stream.close()
    params = stage.policy.params
    if p is prepared[-1] and p.config.save.export:
      stage.policy.export(workdir / 'export')
    stage.checkpointer.close()
    del stage, kit
    gc.collect()  # the optimizer state goes before the next stage's comes


def initial_params(kit, workdir, before) -> dict:
  """The weights a stage starts from, in its training layout."""
  p, model = kit.prepared, kit.prepared.model
  shardings = model.shardings(kit.train)
  dtype = jnp.dtype(p.config.model.param_dtype)
  if before:
    folder, step = workdir / 'checkpoints' / before[-1].name, None
  elif p.config.init_from:
    folder, step = parse_init_from(p.config.init_from)
  elif p.folder:
    return hf.load_params(p.folder, model, shardings, dtype)
  else:
    return programs.random_params(
        model, p.config.seed, dtype, shardings, kit.ledger)
  template = jax.tree.map(
      lambda s, sharding: jax.ShapeDtypeStruct(s, dtype, sharding=sharding),
      model.shapes(), shardings, is_leaf=lambda x: isinstance(x, tuple))
  checkpointer = Checkpointer(folder)
  try:
    return checkpointer.restore_params(template, step)
  finally:
    checkpointer.close()


def parse_init_from(text: str) -> tuple:
  """RUN[@step] -> (folder of its last stage's checkpoints, step or None)."""
  run_folder, _, step = text.partition('@')
  if step and not step.isdigit():
    raise InputError(f'config.init_from: {step!r} in {text!r} is no step')
  root = epath.Path(run_folder).expanduser()
  if not (root / 'config.json').exists():
    raise InputError(
        f'config.init_from: {run_folder} is not the folder of a run (it has '
        'no config.json)')
  saved = json.loads((root / 'config.json').read_text())
  names = saved.get('stages') or [saved['algorithm'].rpartition('.')[2]]
  folders = [root / 'checkpoints' / n for n in names]
  found = [f for f in folders if f.exists()]
  if not found:
    raise InputError(f'config.init_from: {run_folder} has no checkpoints')
  return found[-1], int(step) if step else None


def check_same_run(workdir, raw: dict, console):
  """Writes config.json, or compares with the one of the run being resumed."""
  path = workdir / 'config.json'
  mine = json.loads(json.dumps(raw, default=str))
  if path.exists():
    changes = difference(json.loads(path.read_text()), mine)
    for key, (old, new) in changes.items():
      console.print(f'config.{key}: {old!r} in {path}, now {new!r}')
    stages = set(mine.get('stages') or ())
    bad = [k for k in changes if not _is_free(k, stages)]
    if bad:
      raise InputError(
          f'{workdir}: config.{bad[0]} differs from the run that is being '
          f'resumed ({changes[bad[0]][0]!r}, now {changes[bad[0]][1]!r}); '
          'set it back or choose another --workdir')
  if jax.process_index() == 0:
    workdir.mkdir(parents=True, exist_ok=True)
    metrics.write_atomic(path, json.dumps(mine, indent=1))


def _is_free(key: str, stages: set) -> bool:
  first, _, rest = key.partition('.')
  key = rest if first in stages else key
  return any(key == f or key.startswith(f + '.') for f in _FREE)


def difference(old, new, prefix='') -> dict:
  """{dotted key: (old, new)} of the leaves that differ."""
  if isinstance(old, dict) and isinstance(new, dict):
    out = {}
    for key in sorted({*old, *new}):
      out |= difference(old.get(key), new.get(key), f'{prefix}{key}.')
    return out
  return {} if old == new else {prefix[:-1]: (old, new)}
