"""Sends a run's metrics, samples and report to experiment trackers: wandb, trackio, MLflow.

A tracker's package is imported only if `config.log.trackers` names it. A tracker that fails during a run is left out
from then on, with one warning: `metrics.jsonl` has all values.
"""

import functools
import importlib.util
import logging
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from jaxpost.errors import InputError
from jaxpost.storage import object_store


class Client(NamedTuple):
  """A started tracker: log(values, step), file(path in the run folder), finish(); the others are optional."""

  log: Callable[[dict[str, float], int], Any]
  file: Callable[[str], Any]
  finish: Callable[[], Any]
  define: Callable[[str], Any] = str  # of a stage; does nothing
  show: Callable[[str, int, Sequence[Mapping]], Any] = lambda stage, step, rows: None


def _kept(folder: str, file: str, mark: str) -> str:
  """Returns the mark by which a tracker knows the run of this folder; it is written at the first start."""
  mark_file = epath.Path(folder) / file
  if not mark_file.exists():
    object_store.write_text(mark_file, mark)
  return mark_file.read_text()


def _wandb(options: Any, folder: str) -> Client:
  import wandb

  run = wandb.init(
    project=options.project or 'jaxpost',
    entity=options.entity or None,
    name=options.run_name or None,
    tags=list(options.tags) or None,
    mode='offline' if options.offline else None,
    dir=None if object_store.is_remote(folder) else folder,
    id=_kept(folder, 'wandb_run.txt', secrets.token_hex(4)),
    resume='allow',
  )

  def define(stage: str) -> None:
    run.define_metric(f'{stage}/*', step_metric=f'{stage}/step')

  def show(stage: str, step: int, rows: Sequence[Mapping]) -> None:
    columns = ['split', 'prompt', 'completion', 'reward']
    data = [[row.get(c) if c == 'reward' else str(row.get(c, '')) for c in columns] for row in rows[-8:]]
    run.log({f'{stage}/samples': wandb.Table(columns=columns, data=data), f'{stage}/step': step})

  file = functools.partial(run.save, base_path=folder, policy='now')
  return Client(lambda values, step: run.log(values), file, run.finish, define, show)


def _trackio(options: Any, folder: str) -> Client:
  import trackio

  if options.offline and (os.environ.get('TRACKIO_SPACE_ID') or os.environ.get('TRACKIO_SERVER_URL')):
    raise InputError('config.log.offline: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL would send metrics away; unset it')
  name = f'{options.run_name or os.path.basename(folder.rstrip("/"))}-{secrets.token_hex(4)}'
  name = _kept(folder, 'trackio_run.txt', name)  # trackio has no other mark of a run, and merges equal names
  group = options.tags[0] if options.tags else None
  trackio.init(project=options.project or 'jaxpost', name=name, group=group, resume='allow')
  return Client(lambda values, step: trackio.log(values), trackio.save, trackio.finish)


def _mlflow(options: Any, folder: str) -> Client:
  import mlflow

  experiment = options.project or 'jaxpost'
  if options.offline:
    mlflow.set_tracking_uri(f'sqlite:///{folder}/mlflow.db')
    if mlflow.get_experiment_by_name(experiment) is None:  # its default folder for files is ./mlruns
      mlflow.create_experiment(experiment, artifact_location=pathlib.Path(folder, 'mlruns').as_uri())
  mlflow.set_experiment(experiment)
  id_file = epath.Path(folder) / 'mlflow_run.txt'  # the same folder continues the same run
  run = mlflow.start_run(
    run_id=id_file.read_text() if id_file.exists() else None,
    run_name=options.run_name or os.path.basename(folder.rstrip('/')),
    tags=dict.fromkeys(options.tags, 'true') or None,
  )
  object_store.write_text(id_file, run.info.run_id)

  def log(values: dict[str, float], step: int) -> None:
    mlflow.log_metrics({key.replace('@', '_at_'): value for key, value in values.items()}, step=step)

  def file(path: str) -> None:
    mlflow.log_artifact(path, os.path.dirname(os.path.relpath(path, folder)) or None)

  return Client(log, file, mlflow.end_run)


TRACKERS: dict[str, Callable[[Any, str], Client]] = {'wandb': _wandb, 'trackio': _trackio, 'mlflow': _mlflow}


def check_installed(names: Sequence[str]) -> None:
  """Raises InputError for a tracker whose package is not installed."""
  for name in names:
    if importlib.util.find_spec(name) is None:
      raise InputError(f"config.log.trackers: {name} is not installed: pip install -e '.[{name}]', or leave it out")


class Trackers:
  """The trackers of a run, whose failures do not end it."""

  def __init__(self, options: Any, workdir: epath.PathLike):
    """Starts the trackers of `options`, which is `config.log`; `check_installed` has checked their packages."""
    self._folder = object_store.resolved(epath.Path(workdir))
    self._clients: dict[str, Client] = {}
    for name in options.trackers:
      try:
        self._clients[name] = TRACKERS[name](options, self._folder)
      except InputError:
        raise
      except BaseException as error:
        _left_out(name, 'start', error)

  def start_stage(self, stage: str) -> None:
    """Declares that the metrics of a stage have their own steps."""
    self._each('start of a stage', lambda client: client.define(stage))

  def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
    """Sends a row, {'STAGE/SPLIT/KEY': value}."""
    self._each('metrics', lambda client: client.log({**values, f'{stage}/step': step}, step))

  def samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Sends sample rows, and the file `name` of the run folder that holds them, unless it is in a bucket."""
    self._each('samples', lambda client: client.show(stage, step, rows) if rows else None)
    path = os.path.join(self._folder, name)
    if os.path.isfile(path):
      self._each(name, lambda client: client.file(path))

  def finish(self) -> None:
    """Sends the report in its current state, and ends the trackers."""
    started = dict(self._clients)
    self._each('the report', lambda client: client.file(self._report) if os.path.isfile(self._report) else None)
    self._clients = started  # a tracker that failed to take the report still has to be ended
    self._each('the end', lambda client: client.finish())
    self._clients = {}

  @functools.cached_property
  def _report(self) -> str:
    """The path of the report, which is written once for all trackers."""
    from jaxpost.monitor import report

    return os.fspath(report.write_report(self._folder))

  def _each(self, what: str, call: Callable[[Client], Any]) -> None:
    for name, client in list(self._clients.items()):
      try:
        call(client)
      except BaseException as error:
        _left_out(name, what, error)
        del self._clients[name]


def _left_out(name: str, what: str, error: BaseException) -> None:
  """Warns of a failure of any type: the errors of clients and their networks have no common type."""
  if not isinstance(error, Exception):  # such as KeyboardInterrupt or SystemExit
    raise error
  logging.warning(
    f'{name} failed at {what} and is left out from here on ({type(error).__name__}: {error}); '
    'metrics.jsonl has everything'
  )
