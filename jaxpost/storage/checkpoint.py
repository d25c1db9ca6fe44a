"""Saves checkpoints of a run in the background, and verifies their files each time before reading them.

A step is a folder that Orbax writes and that a manifest (manifest.py) then marks as finished:

  FOLDER/20/state/...           the arrays, under flat names ('params/embed')
  FOLDER/20/meta/...            the data position, config and so on, as JSON
  FOLDER/20/commit_success.txt  Orbax wrote all of it
  FOLDER/20/checksums.json      the manifest: checksums of every file above,
                                shapes of the leaves, the step's metrics

A folder without a manifest, or with files that differ from it, is not a checkpoint: restoring falls back to the step
before it. Old steps are removed only after the new one is finished.

Arrays are stored by path, without the types of the tree. None leaves and empty optimizer states come from the template
of a restore, so a change of their library does not matter.

All processes make the same calls in the same order; process 0 decides for all.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.serialization import tensorstore_utils  # see `_spare_memory`

from jaxpost import errors
from jaxpost.distributed import coordination, watchdog
from jaxpost.storage import manifest as manifests
from jaxpost.storage import object_store

_ARRAYS = 'state/'  # the subfolder of a step that holds the arrays


def _is_not_raised(record: logging.LogRecord) -> bool:
  """Filters out errors of background saves, which Orbax logs with a traceback: `wait` raises them."""
  is_of_save = record.pathname.endswith(('futures/future.py', 'checkpointers/async_checkpointer.py'))
  return not is_of_save or record.levelno < logging.ERROR


@functools.cache
def _spare_memory() -> None:
  """Makes Orbax build a tensorstore spec once per save, not per array: tensorstore <= 0.1.86 leaks each JSON spec."""
  if build := getattr(tensorstore_utils, '_build_ocdbt_kvstore_tspec', None):
    build = functools.lru_cache(1)(build)  # only the path differs between arrays
    tensorstore_utils._build_ocdbt_kvstore_tspec = lambda directory, name=None, **options: (
      build(directory, **options) | ({} if name is None else {'path': name})
    )
  tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0  # counters that it reads only for a line of its log


class Checkpointer:
  """Saves, restores and prunes the steps in one folder.

  Args:
    folder: local, or on gs:// or s3://; the first save creates it.
    keep: number of newest steps that are kept.
    keep_best: a metric; the step with its best value is kept as well; '' for none.
    best_mode: 'max' or 'min'.
  """

  def __init__(self, folder: epath.PathLike, *, keep: int = 2, keep_best: str = '', best_mode: str = 'max'):
    if keep < 1:
      raise errors.InputError(f'checkpoints to keep: {keep}; keep at least 1')
    if best_mode not in ('max', 'min'):
      raise errors.InputError(f"best_mode is '{best_mode}'; use 'max' or 'min'")
    self._folder = epath.Path(folder)
    if not object_store.is_remote(folder):  # Orbax needs absolute paths
      self._folder = self._folder.expanduser().resolve()
    # For an object store, a single process lets Orbax write to this local folder, which is then uploaded. Several
    # processes write to the store together, which Orbax supports on gs:// only.
    self._remote = self._spool = None
    if object_store.is_remote(folder) and coordination.process_count() == 1:
      from jaxpost.storage import remote

      self._remote, self._spool = remote, epath.Path(remote.folder())
    elif str(folder).startswith('s3://'):
      raise errors.InputError(
        f'{folder}: several processes can keep checkpoints on gs:// or on a disk that all of them share; mount the '
        'bucket, or use gs://'
      )
    self._keep = keep
    self._keep_best = keep_best
    self._best_mode = best_mode
    logging.getLogger('absl').addFilter(_is_not_raised)
    _spare_memory()
    self._orbax = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(),
      atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
    )
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pending = None  # (step, future) of the save in progress
    self._restored = None  # step this run continues from
    self._saved: set[int] = set()  # steps finished since then
    self._last = None  # step that was saved or restored last

  @watchdog.slow_operation('a save')
  def save(self, step: int, state: Any, meta: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
    """Starts saving; the caller may donate `state` once this returns.

    By then Orbax has copied the arrays of accelerators to the host. Of arrays on CPU it holds views, and XLA copies a
    donated buffer that has views.

    Waits for the save before it, and raises its error. Saving the step that was saved or restored last does nothing.
    Later steps than the restored one are replaced.

    Args:
      step: updates done.
      state: pytree of jax arrays; None leaves and empty nodes are fine.
      meta: dict of JSON values (tuples come back as lists).
      metrics: {name: value}, for `keep_best`.
    """
    self.wait()
    if step == self._last:
      return
    if self._keep_best and metrics is not None and self._keep_best not in metrics:
      logging.warning('%s: no finite %s at step %d, so it cannot be the best', self._folder, self._keep_best, step)
    named, _ = manifests.name_leaves(state)
    manifests.check_arrays(named)
    manifest = manifests.Manifest(
      step=step,
      leaves={k: [list(x.shape), str(x.dtype)] for k, x in named.items()},
      metrics={k: float(v) for k, v in (metrics or {}).items()},
      files={},
    )
    meta = json.loads(json.dumps(meta))  # a copy, as the caller may change the original during the save
    self._make_room(step)
    args = ocp.args.Composite(
      # Orbax stores no arrays without elements.
      state=ocp.args.PyTreeSave({k: _for_orbax(x) for k, x in named.items() if x.size}),
      meta=ocp.args.JsonSave(meta),
    )
    self._orbax.save(self._written_to(step), args=args, force=True)
    self._pending = step, self._thread.submit(self._finish, manifest)

  def metrics(self, step: int) -> dict[str, float]:
    """Returns the metrics that were saved with a step, on all processes; {} if it was not evaluated."""
    return coordination.broadcast({} if jax.process_index() else manifests.read(self._folder, step).metrics)

  def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds metrics to a step that was saved before its evaluation."""
    if not jax.process_index():
      manifests.write(self._folder / str(step), manifests.read(self._folder, step)._replace(metrics=dict(metrics)))

  def check_metrics(self, metrics: Iterable[str]) -> None:
    """Raises InputError if `keep_best` is not among these metrics of an evaluation."""
    if self._keep_best and self._keep_best not in metrics:
      raise errors.InputError(
        f"config.save.keep_best: no metric '{self._keep_best}'; there are {', '.join(sorted(metrics))}"
      )

  def check(self) -> None:
    """Raises the error of a background save that failed. Never waits."""
    if self._pending is not None and self._pending[1].done():
      self.wait()

  @watchdog.slow_operation('a save', completes=True)
  def wait(self, for_all: bool = False) -> None:
    """Returns once the save in progress is finished; raises the error of a save that failed.

    for_all: also waits for process 0, which writes the manifest; all processes must call it.
    """
    if self._pending is not None:
      (step, future), self._pending = self._pending, None
      if error := future.exception():
        error.add_note(f'while saving step {step} to {self._folder}')
        raise error
      self._last = step
    if for_all:
      coordination.all_gather(None)

  def close(self) -> None:
    """Waits, then frees the threads. The object cannot be used afterwards."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._orbax.close()
      if self._spool:
        self._spool.rmtree(missing_ok=True)

  def is_empty(self) -> bool:
    """Returns whether no save was ever finished here; unlike `latest`, it verifies no files."""
    self.wait()
    return not coordination.broadcast(len(manifests.finished_steps(self._folder)))

  def latest(self) -> int | None:
    """Returns the newest undamaged step; None if no save was ever finished.

    Raises:
      NoCheckpointError: all finished steps are damaged; whether to start over is then for the user to decide.
    """
    return None if self.is_empty() else self._choose(None, None)

  def restore(
    self, template: Any, step: int | None = None, *, warn: Callable[[str], None] | None = print
  ) -> tuple[int, Any, dict]:
    """Reads (step, state, meta) back, bit for bit, on any mesh.

    Args:
      template: pytree of jax.ShapeDtypeStruct, with the shardings that the state gets.
      step: None for the newest undamaged one.
      warn: receives one line if damaged steps had to be skipped; None for no warning.
    """
    step = self._choose(step, warn)
    state = self._read(step, template, '')
    meta = self._read_meta(step)
    self._restored = self._last = step
    self._saved = set()
    return step, state, meta

  def restore_meta(self, step: int | None = None) -> dict:
    """Reads only the saved `meta`, without verifying the arrays."""
    return self._read_meta(self._choose(step, None, arrays=False))

  def leaves(self, step: int | None = None) -> dict[str, list]:
    """Returns {name ('params/embed'): [shape, dtype]} of the leaves of a step, without verifying the arrays."""
    return manifests.read(self._folder, self._choose(step, None, arrays=False)).leaves

  def restore_params(self, template: Any, step: int | None = None, *, at: str = 'params') -> Any:
    """Reads only the subtree `at` ('params', 'policy/params') of the state."""
    return self._read(self._choose(step, print), template, at + '/')

  # Writing.

  def _finish(self, manifest: manifests.Manifest) -> None:
    """Writes the manifest once Orbax is done, then removes old steps; runs in the background."""
    self._orbax.wait_until_finished()
    if jax.process_index():
      return
    step = manifest.step
    written = self._written_to(step)
    names = [name for name in object_store.files(written) if not name.startswith(manifests.NAME)]
    manifest = manifest._replace(files=object_store.checksums(written, names))
    if self._spool:
      self._remote.upload(written, self._folder / str(step))
      written.rmtree()
    elif not object_store.is_remote(self._folder):
      object_store.sync_all(written)
      object_store.sync(self._folder)
    manifests.write(self._folder / str(step), manifest)
    self._saved.add(step)
    self._prune(step)

  def _make_room(self, step: int) -> None:
    """Removes unfinished saves; refuses to overwrite the steps this run descends from."""
    newest = -1
    if jax.process_index() == 0:
      object_store.make_folder(self._folder)
      finished = manifests.finished_steps(self._folder)
      for other in set(manifests.steps(self._folder)).difference(finished):
        self._remove(other)
      newest = max(filter(self._is_ancestor, finished), default=newest)
    newest = coordination.broadcast(newest)
    if newest >= step:
      raise errors.InputError(
        f'{self._folder} already holds step {newest}, so step {step} is not'
        ' saved there; resume that run or choose another folder'
      )

  def _is_ancestor(self, step: int) -> bool:
    """Returns whether the run descends from `step`: not if the run was rolled back to an earlier step."""
    return self._restored is None or step <= self._restored or step in self._saved

  def _prune(self, step: int) -> None:
    """Removes all but the newest steps, the best one, and `step`."""
    steps = manifests.steps(self._folder)
    relevant = filter(self._is_ancestor, steps)  # a rollback makes later steps obsolete
    scores = manifests.scores(self._folder, relevant, self._keep_best, self._best_mode)
    best = max(scores, key=lambda s: (scores[s], s), default=step)
    kept = {step, best, *sorted(scores)[-self._keep :]}
    for other in sorted(set(steps).difference(kept)):
      self._remove(other)

  def _remove(self, step: int) -> None:
    # Without its manifest, a step whose removal is interrupted counts as unfinished.
    folder = self._folder / str(step)
    (folder / manifests.NAME).unlink(missing_ok=True)
    folder.rmtree()

  def _written_to(self, step: int) -> epath.Path:
    return (self._spool or self._folder) / str(step)

  # Reading.

  def _read_from(self, step: int, arrays: bool = True) -> epath.Path:
    """Returns a folder with the files of a step (`arrays=False`: perhaps without its arrays), copied from a store."""
    if not self._spool:
      return self._folder / str(step)
    copy = self._spool / f'read-{step}{"" if arrays else "-meta"}'
    if not copy.exists():
      self._remote.download(self._folder / str(step), copy, leave_out='' if arrays else _ARRAYS)
    return copy

  def _damage(self, step: int, arrays: bool) -> str:
    """Returns which file of a step is damaged and how; '' if none is. `arrays`: whether to check the arrays, too."""
    try:
      manifest = manifests.read(self._folder, step)
      if not arrays:
        manifest = manifest._replace(files={k: v for k, v in manifest.files.items() if not k.startswith(_ARRAYS)})
      manifests.verify(manifest, self._read_from(step, arrays))
    except manifests.DamagedError as error:
      return str(error)
    return ''

  def _choose(self, step: int | None, warn: Callable[[str], None] | None, arrays: bool = True) -> int:
    """Returns the step to read, the same on all processes: `step`, or the newest undamaged one.

    arrays: whether its arrays will be read, and so have to be verified.
    """
    self.wait()
    chosen, problems = -1, []
    if jax.process_index() == 0:
      steps = manifests.steps(self._folder)
      there = ', '.join(map(str, steps)) or 'none'
      for candidate in steps if step is None else [step]:
        problem = f'not there; there is {there}' if candidate not in steps else self._damage(candidate, arrays)
        if not problem:
          chosen = candidate
          break
        problems.append(f'step {candidate} ({problem})')
    chosen = coordination.broadcast(chosen)
    problems = '; '.join(problems)
    if chosen < 0:
      raise errors.NoCheckpointError(f'no usable checkpoint in {self._folder}: {problems or "nothing there"}')
    if problems and warn:
      warn(f'checkpoint: using step {chosen} of {self._folder}; unusable: {problems}')
    return chosen

  def _read_meta(self, step: int) -> dict:
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    return self._orbax.restore(self._read_from(step, arrays=False), args=args)['meta']

  def _read(self, step: int, template: Any, prefix: str) -> Any:
    """Reads the leaves below `prefix` into a tree like `template`."""
    named, treedef = manifests.name_leaves(template)
    targets = {}
    for key, leaf in named.items():
      if leaf.sharding is None:
        raise TypeError(f'the template has no sharding for {key}')
      targets[prefix + key] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    folder = self._read_from(step)
    leaves = manifests.read(self._folder, step).leaves
    manifests.check_leaves(folder, {k: v for k, v in leaves.items() if k.startswith(prefix)}, targets)
    # Orbax stores no arrays without elements.
    arrays = {k: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for k, x in targets.items() if not x.size}
    stored = {k: x for k, x in targets.items() if x.size}
    if stored:
      arrays |= self._read_arrays(folder, stored)
    return jax.tree.unflatten(treedef, [arrays[key] for key in targets])

  def _read_arrays(self, folder: epath.Path, stored: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays by name, except for the content of those that have no shard on this process."""
    local = {k: x for k, x in stored.items() if x.sharding.addressable_devices}
    # All processes must take part in a restore: one without shards reads the smallest array.
    item: dict[str, Any] = local or {min(stored, key=lambda k: stored[k].size): np.zeros(())}
    args = ocp.args.PyTreeRestore(
      item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    restored = self._orbax.restore(folder, args=ocp.args.Composite(state=args))['state']

    def without_shards(x: jax.ShapeDtypeStruct) -> jax.Array:
      return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)

    return {k: restored[k] if k in local else without_shards(x) for k, x in stored.items()}


def _for_orbax(x: jax.Array) -> jax.Array | np.ndarray:
  """Returns an array in a form that every process of a run can pass to Orbax."""
  if not x.sharding.addressable_devices:
    return np.zeros((), x.dtype)
  # Orbax takes an array that is on one process only as numpy, which process 0 writes.
  if coordination.process_count() > 1 and x.is_fully_addressable:
    return np.asarray(x)
  return x
