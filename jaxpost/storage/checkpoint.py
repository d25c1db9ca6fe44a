"""Checkpoints of a run: saved in the background; files are verified each time before they are read.

A step is a folder written by Orbax, and finished by its manifest (manifest.py):

  FOLDER/20/state/...           the arrays, under flat names ('params/embed')
  FOLDER/20/meta/...            the data position, config and so on, as JSON
  FOLDER/20/commit_success.txt  Orbax wrote all of it
  FOLDER/20/checksums.json      the manifest: checksums of every file above,
                                shapes of the leaves, the step's metrics

A folder without a manifest, or with files that differ from it, is no checkpoint: restoring falls back to the step
before it. Old steps are removed only after the new one is finished.

Arrays are stored by path, not by tree type: None leaves and empty optimizer states are
in the template, so neither has to survive a change of library.

All processes make the same calls in one order; process 0 decides for all.
"""

from __future__ import annotations

import functools
import json
import logging
import math
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

_ARRAYS = 'state/'  # where they are in the folder of a step


def _is_not_raised(record: logging.LogRecord) -> bool:
  """False for errors of a save in the background, which Orbax logs with a traceback and `wait` raises."""
  return not record.pathname.endswith(('futures/future.py', 'checkpointers/async_checkpointer.py')) or (
    record.levelno < logging.ERROR
  )


@functools.cache
def _spare_memory() -> None:
  """tensorstore (up to 0.1.86) never frees what it makes of JSON: Orbax gets this once a save, not for each array."""
  if build := getattr(tensorstore_utils, '_build_ocdbt_kvstore_tspec', None):
    build = functools.lru_cache(1)(build)  # only the path differs between arrays
    tensorstore_utils._build_ocdbt_kvstore_tspec = lambda directory, name=None, **options: (
      build(directory, **options) | ({} if name is None else {'path': name})
    )
  tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0  # of counters, for a line of its log


class Checkpointer:
  """Saves, restores and prunes the steps in one folder."""

  def __init__(self, folder: epath.PathLike, *, keep: int = 2, keep_best: str = '', best_mode: str = 'max'):
    """Opens a folder, which the first save creates.

    Args:
      folder: local, or on gs:// or s3://.
      keep: number of newest steps that are kept.
      keep_best: a metric, whose best step is kept as well; '' is off.
      best_mode: 'max' or 'min'.
    """
    if keep < 1:
      raise errors.InputError(f'checkpoints to keep: {keep}; keep at least 1')
    if best_mode not in ('max', 'min'):
      raise errors.InputError(f"best_mode is '{best_mode}'; use 'max' or 'min'")
    self._folder = epath.Path(folder)
    if not object_store.is_remote(folder):  # Orbax wants absolute paths
      self._folder = self._folder.expanduser().resolve()
    # A single process lets Orbax write to this local folder and uploads it afterwards;
    # several write to the object store together, which Orbax can do on gs:// only.
    self._spool = None
    if object_store.is_remote(folder) and coordination.process_count() == 1:
      from jaxpost.storage import remote

      self._spool = epath.Path(remote.folder())
    elif str(folder).startswith('s3://'):
      raise errors.InputError(
        f'{folder}: several processes keep checkpoints on gs:// or on a disk'
        ' that all of them reach; mount the bucket, or take gs://'
      )
    self._keep = keep
    self._keep_best = keep_best
    self._best_sign = 1 if best_mode == 'max' else -1
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
    self._last = None  # step of the state on disk, as far as known

  @watchdog.slow_operation('a save')
  def save(self, step: int, state: Any, meta: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
    """Starts saving; the caller may donate `state` once this returns.

    (On accelerators Orbax has copied it to the host by then; on CPU it holds
    views, and XLA copies instead of donating a buffer that is being viewed.)

    Waits for the save before it, and raises its error. Saving the step saved
    or restored last is a no-op. Steps after the one restored are replaced.

    Args:
      step: updates done.
      state: pytree of jax arrays; None leaves and empty nodes are fine.
      meta: dict of JSON values (tuples come back as lists).
      metrics: name -> float, for `keep_best`.
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
    meta = json.loads(json.dumps(meta))  # a copy: the caller may change its own
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
    """Gives metrics to a step that was saved before its evaluation."""
    if not jax.process_index():
      manifests.write(self._folder / str(step), manifests.read(self._folder, step)._replace(metrics=dict(metrics)))

  def check_metrics(self, metrics: Iterable[str]) -> None:
    """Raises InputError if `keep_best` is none of these metrics of an evaluation."""
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
    """Returns once nothing is being saved; raises if the save failed.

    for_all: all processes call this, and return once process 0, which writes the manifest, does.
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
    """Returns whether no save was ever finished here; unlike `latest`, it reads no arrays to verify them."""
    self.wait()
    return not coordination.broadcast(len(manifests.finished_steps(self._folder)))

  def latest(self) -> int | None:
    """Returns the newest good step, or None where no save was ever finished.

    Raises:
      NoCheckpointError: where steps were finished and none of them is good: starting
        afresh over a damaged run is a decision for a person.
    """
    return None if self.is_empty() else self._choose(None, None)

  def restore(
    self, template: Any, step: int | None = None, *, warn: Callable[[str], None] | None = print
  ) -> tuple[int, Any, dict]:
    """Reads a step back, bit for bit, on any mesh.

    Args:
      template: pytree of jax.ShapeDtypeStruct with shardings.
      step: which step; None is the newest good one.
      warn: gets one line if damaged steps had to be skipped; None: nothing does.

    Returns:
      (step, state, meta), with the shardings of the template.
    """
    step = self._choose(step, warn)
    state = self._read(step, template, '')
    meta = self._read_meta(step)
    self._restored = self._last = step
    self._saved = set()
    return step, state, meta

  def restore_meta(self, step: int | None = None) -> dict:
    """Reads only what was saved as `meta`, and verifies no arrays."""
    return self._read_meta(self._choose(step, None, arrays=False))

  def leaves(self, step: int | None = None) -> dict[str, list]:
    """Returns {name ('params/embed'): [shape, type]} of the leaves of a step, and verifies no arrays."""
    return manifests.read(self._folder, self._choose(step, None, arrays=False)).leaves

  def restore_params(self, template: Any, step: int | None = None, *, at: str = 'params') -> Any:
    """Reads only the subtree `at` ('params', 'policy/params') of the state."""
    return self._read(self._choose(step, print), template, at + '/')

  # Writing.

  def _finish(self, manifest: manifests.Manifest) -> None:
    """Writes the manifest once Orbax is done, then prunes; runs in the background."""
    self._orbax.wait_until_finished()
    if jax.process_index():
      return
    step = manifest.step
    written = self._written_to(step)
    names = [name for name in object_store.files(written) if not name.startswith(manifests.NAME)]
    manifest = manifest._replace(files=object_store.checksums(written, names))
    if self._spool:
      from jaxpost.storage import remote

      remote.upload(written, self._folder / str(step))
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
    """True if the run descends from `step`, False if it was rolled back to one before."""
    since = self._restored
    return since is None or step <= since or step in self._saved

  def _prune(self, step: int) -> None:
    """Removes all but the newest steps, the best one, and `step`."""
    steps = manifests.steps(self._folder)
    scores = {}
    for other in filter(self._is_ancestor, steps):  # of a run that was rolled back, later steps are none
      try:
        metrics = manifests.read(self._folder, other).metrics
      except manifests.DamagedError:
        continue
      scores[other] = self._best_sign * metrics.get(self._keep_best, math.nan)
    kept = {step, *sorted(scores)[-self._keep :]}
    known = [s for s in scores if not math.isnan(scores[s])]
    if known:
      kept.add(max(known, key=lambda s: (scores[s], s)))
    for other in steps:
      if other not in kept:
        self._remove(other)

  def _remove(self, step: int) -> None:
    # The manifest goes first: a removal cut short must not leave half a step.
    folder = self._folder / str(step)
    (folder / manifests.NAME).unlink(missing_ok=True)
    folder.rmtree()

  def _written_to(self, step: int) -> epath.Path:
    """Returns the folder that Orbax writes a step to."""
    return (self._spool or self._folder) / str(step)

  # Reading.

  def _read_from(self, step: int, arrays: bool = True) -> epath.Path:
    """Returns a folder with the files of a step, or with all but its arrays; a local copy of those on a store."""
    if not self._spool:
      return self._folder / str(step)
    copy = self._spool / f'read-{step}{"" if arrays else "-meta"}'
    if not copy.exists():
      from jaxpost.storage import remote

      remote.download(self._folder / str(step), copy, leave_out='' if arrays else _ARRAYS)
    return copy

  def _damage(self, step: int, arrays: bool) -> str:
    """Describes what is wrong with a step, or with its files besides the arrays, naming the file; '' if it is good."""
    try:
      manifest = manifests.read(self._folder, step)
      if not arrays:
        manifest = manifest._replace(files={k: v for k, v in manifest.files.items() if not k.startswith(_ARRAYS)})
      manifests.verify(manifest, self._read_from(step, arrays))
    except manifests.DamagedError as error:
      return str(error)
    return ''

  def _choose(self, step: int | None, warn: Callable[[str], None] | None, arrays: bool = True) -> int:
    """Returns the step to read, on all processes: `step`, or the newest good one; `arrays`: whether those are read."""
    self.wait()
    chosen, problems = -1, []
    if jax.process_index() == 0:
      steps = manifests.steps(self._folder)
      for candidate in steps if step is None else [step]:
        problem = 'not there' if candidate not in steps else self._damage(candidate, arrays)
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
    """Reads the leaves below `prefix` into the shape of `template`."""
    named, treedef = manifests.name_leaves(template)
    wanted = {}
    for key, leaf in named.items():
      if leaf.sharding is None:
        raise TypeError(f'the template has no sharding for {key}')
      wanted[prefix + key] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    folder = self._read_from(step)
    leaves = manifests.read(self._folder, step).leaves
    manifests.check_leaves(folder, {k: v for k, v in leaves.items() if k.startswith(prefix)}, wanted)
    # Orbax stores no arrays without elements.
    arrays = {k: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for k, x in wanted.items() if not x.size}
    stored = {k: x for k, x in wanted.items() if x.size}
    if stored:
      arrays |= self._read_arrays(folder, stored)
    return jax.tree.unflatten(treedef, [arrays[key] for key in wanted])

  def _read_arrays(self, folder: epath.Path, stored: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays by name; those of which this process holds no shard are not read."""
    held = {k: x for k, x in stored.items() if x.sharding.addressable_devices}
    # All processes take part in a restore: one that holds nothing reads the smallest array.
    item: dict[str, Any] = held or {min(stored, key=lambda k: stored[k].size): np.zeros(())}
    args = ocp.args.PyTreeRestore(
      item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    found = self._orbax.restore(folder, args=ocp.args.Composite(state=args))['state']

    def without_shards(x: jax.ShapeDtypeStruct) -> jax.Array:
      return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)

    return {k: found[k] if k in held else without_shards(x) for k, x in stored.items()}


def _for_orbax(x: jax.Array) -> jax.Array | np.ndarray:
  """Returns an array as every process of a run can hand it to Orbax."""
  if not x.sharding.addressable_devices:
    return np.zeros((), x.dtype)
  # An array of one process among several: Orbax takes numpy, and process 0 writes it.
  if coordination.process_count() > 1 and x.is_fully_addressable:
    return np.asarray(x)
  return x
