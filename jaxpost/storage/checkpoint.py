"""Checkpoints of a run: saved in the background, verified before every use.

A step is a folder written through Orbax, then sealed with `checksums.json`:

  FOLDER/20/state/...           the arrays, under flat names ('params/embed')
  FOLDER/20/meta/...            the data position, config and so on, as JSON
  FOLDER/20/commit_success.txt  Orbax wrote all of it
  FOLDER/20/checksums.json      size and crc32 of every file above, what the
                                leaves are and the step's metrics

Orbax loads a flipped bit without a word, so a folder that is not sealed, or
whose files differ from its seal, is not a checkpoint here: restoring falls
back to the step before it. Old steps go only after the new one is sealed.

Arrays are stored by path, not by tree type: None leaves and empty optimizer
states live in the template, so neither has to survive a change of library.

All processes make the same calls in one order; process 0 decides for all.
"""

import json
import math
import zlib
from concurrent import futures

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxpost import errors
from jaxpost.distributed import coordination
from jaxpost.storage import object_store

_SEAL = 'checksums.json'


class Checkpointer:
  """Saves, restores and prunes the steps in one folder.

  The newest `keep` steps stay, and the one with the 'max' or 'min' of metric
  `keep_best` ('' is off). `folder` may be gs://; the first save makes it.
  """

  def __init__(self, folder, *, keep=2, keep_best='', best_mode='max'):
    if keep < 1:
      raise errors.InputError(f'checkpoints to keep: {keep}; keep at least 1')
    if best_mode not in ('max', 'min'):
      raise errors.InputError(f"best_mode is '{best_mode}'; use 'max' or 'min'")
    self._folder = epath.Path(folder)
    if not object_store.is_remote(folder):  # Orbax wants absolute paths
      self._folder = self._folder.expanduser().resolve()
    # What Orbax writes for one process goes to an object store afterwards;
    # several write there together, which it can do on gs:// only.
    self._spool = None
    if object_store.is_remote(folder) and coordination.process_count() == 1:
      self._spool = epath.Path(object_store.folder())
    elif str(folder).startswith('s3://'):
      raise errors.InputError(
        f'{folder}: several processes keep checkpoints on gs:// or on a disk'
        ' that all of them reach; mount the bucket, or take gs://'
      )
    self._keep, self._keep_best = keep, keep_best
    self._best_sign = 1 if best_mode == 'max' else -1
    self._orbax = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(),
      atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
    )
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pending = None  # (step, future) of the save under way
    self._restored = None  # step this run goes on from
    self._saved = set()  # steps sealed since then
    self._last = None  # step the state on disk is known to be at

  def save(self, step, state, meta, metrics=None):
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
    if self._keep_best and metrics is not None:
      if self._keep_best not in metrics:
        raise errors.InputError(f"keep_best: no metric '{self._keep_best}'; there are {', '.join(sorted(metrics))}")
    named, _ = _flatten(state)
    _check_arrays(named)
    # Of one process only: Orbax takes numpy, and process 0 writes it.
    alone = lambda x: coordination.process_count() > 1 and x.is_fully_addressable
    arrays = {
      k: np.zeros((), x.dtype) if not x.sharding.addressable_devices else np.asarray(x) if alone(x) else x
      for k, x in named.items()
      if x.size
    }
    seal = {
      'step': step,
      'leaves': {k: [list(x.shape), str(x.dtype)] for k, x in named.items()},
      'metrics': {k: float(v) for k, v in (metrics or {}).items()},
    }
    meta = json.loads(json.dumps(meta))  # the caller goes on changing his
    self._make_room(step)
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta))
    self._orbax.save(self._made(step), args=args, force=True)
    self._pending = step, self._thread.submit(self._finish, step, seal)

  def check(self):
    """Raises the error of a background save that failed. Never waits."""
    if self._pending is not None and self._pending[1].done():
      self.wait()

  def wait(self):
    """Returns once nothing is being saved; raises if the save failed."""
    if self._pending is None:
      return
    (step, future), self._pending = self._pending, None
    if error := future.exception():
      error.add_note(f'while saving step {step} to {self._folder}')
      raise error
    self._last = step

  def close(self):
    """Waits, then frees the threads. The object is of no use afterwards."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._orbax.close()
      if self._spool:
        self._spool.rmtree(missing_ok=True)

  def latest(self):
    """Newest good step, or None where no save was ever finished.

    Finished steps none of which is good raise NoCheckpointError: starting
    afresh over a damaged run is a decision for a person.
    """
    self.wait()
    if not coordination.broadcast(len(finished_steps(self._folder))):
      return None
    return self._choose(None, lambda line: None)

  def restore(self, template, step=None, *, warn=print):
    """Reads a step back, bit for bit, on any mesh.

    Args:
      template: pytree of jax.ShapeDtypeStruct with shardings.
      step: which step; None is the newest good one.
      warn: gets one line if damaged steps had to be skipped.

    Returns:
      (step, state, meta), state being sharded as the template says.
    """
    step = self._choose(step, warn)
    state = self._read(step, template, '')
    meta = self._read_meta(step)
    self._restored = self._last = step
    self._saved = set()
    return step, state, meta

  def restore_meta(self, step=None, *, warn=print):
    """Reads only what was saved as `meta`."""
    return self._read_meta(self._choose(step, warn))

  def leaves(self, step=None):
    """Names of the leaves of a step ('params/embed')."""
    return self._read_seal(self._choose(step, lambda line: None))[0]['leaves']

  def restore_params(self, template, step=None, *, at='params', warn=print):
    """Reads only the subtree `at` ('params', 'policy/params') of the state."""
    return self._read(self._choose(step, warn), template, at + '/')

  # Writing.

  def _finish(self, step, seal):
    """Background: seals the step once Orbax is done, then prunes."""
    self._orbax.wait_until_finished()
    if jax.process_index():
      return
    folder = self._made(step)
    seal['files'] = object_store.checksums(folder, [n for n in object_store.files(folder) if not n.startswith(_SEAL)])
    if self._spool:
      object_store.upload(folder, self._folder / str(step))
      folder.rmtree()
    text = json.dumps(seal, sort_keys=True).encode()
    object_store.write(self._folder / str(step) / _SEAL, b'%08x\n' % zlib.crc32(text) + text)
    self._saved.add(step)
    self._prune(step)

  def _make_room(self, step):
    """Removes unfinished saves; refuses to overwrite what this run rests on."""
    newest = -1
    if jax.process_index() == 0:
      self._folder.mkdir(parents=True, exist_ok=True)
      finished = finished_steps(self._folder)
      for other in set(_steps(self._folder)).difference(finished):
        self._remove(other)
      newest = max(filter(self._is_ours, finished), default=newest)
    newest = coordination.broadcast(newest)
    if newest >= step:
      raise errors.InputError(
        f'{self._folder} already holds step {newest}, so step {step} is not'
        ' saved there; resume that run or choose another folder'
      )

  def _is_ours(self, step):
    """Whether the run descends from `step`: not if it was rolled back."""
    since = self._restored
    return since is None or step <= since or step in self._saved

  def _prune(self, step):
    steps = _steps(self._folder)
    seals = {s: self._read_seal(s)[0] for s in steps if self._is_ours(s)}
    seals = {s: seal for s, seal in seals.items() if seal is not None}
    kept = {step, *sorted(seals)[-self._keep :]}
    scores = {
      s: self._best_sign * seal['metrics'][self._keep_best]
      for s, seal in seals.items()
      if not math.isnan(seal['metrics'].get(self._keep_best, math.nan))
    }
    if scores:
      kept.add(max(scores, key=lambda s: (scores[s], s)))
    for other in steps:
      if other not in kept:
        self._remove(other)

  def _remove(self, step):
    # The seal goes first: a removal cut short must not leave half a step.
    folder = self._folder / str(step)
    (folder / _SEAL).unlink(missing_ok=True)
    folder.rmtree()

  def _made(self, step):
    """The folder that Orbax writes a step to."""
    return (self._spool or self._folder) / str(step)

  # Reading.

  def _read_from(self, step):
    """A folder with the files of a step; of those on a store, a copy."""
    if not self._spool:
      return self._folder / str(step)
    here = self._spool / f'read-{step}'
    if not here.exists():
      object_store.download(self._folder / str(step), here)
    return here

  def _read_seal(self, step):
    """Returns (seal or None, what is wrong with it)."""
    path = self._folder / str(step) / _SEAL
    if not path.exists():
      return None, f'{step}/{_SEAL} is missing, the save was never finished'
    checksum, _, text = path.read_bytes().partition(b'\n')
    if checksum != b'%08x' % zlib.crc32(text):
      return None, f'{step}/{_SEAL} differs from its checksum'
    seal = json.loads(text)
    if seal['step'] != step:
      return None, f'{step}/{_SEAL} belongs to step {seal["step"]}'
    return seal, ''

  def _damage(self, step):
    """What is wrong with a step, naming the file; '' if it is good."""
    seal, problem = self._read_seal(step)
    if seal is None:
      return problem
    folder = self._read_from(step)
    for name in seal['files']:
      if not (folder / name).is_file():
        return f'{step}/{name} is missing'
    for name, found in object_store.checksums(folder, seal['files']).items():
      if found != seal['files'][name]:
        return f'{step}/{name} differs from its checksum'
    return ''

  def _choose(self, step, warn):
    """The step to read: `step`, or the newest good one, the same everywhere."""
    self.wait()
    chosen, problems = -1, []
    if jax.process_index() == 0:
      steps = _steps(self._folder)
      for candidate in steps if step is None else [step]:
        problem = 'not there' if candidate not in steps else self._damage(candidate)
        if not problem:
          chosen = candidate
          break
        problems.append(f'step {candidate} ({problem})')
    chosen = coordination.broadcast(chosen)
    problems = '; '.join(problems)
    if chosen < 0:
      raise errors.NoCheckpointError(f'no usable checkpoint in {self._folder}: {problems or "nothing there"}')
    if problems:
      where = f'step {chosen} of {self._folder}'
      warn(f'checkpoint: using {where}; unusable: {problems}')
    return chosen

  def _read_meta(self, step):
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    return self._orbax.restore(self._read_from(step), args=args)['meta']

  def _read(self, step, template, prefix):
    """Reads the leaves below `prefix` into the shape of `template`."""
    named, treedef = _flatten(template)
    wanted = {}
    for key, leaf in named.items():
      if leaf.sharding is None:
        raise TypeError(f'the template has no sharding for {key}')
      wanted[prefix + key] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    folder = self._read_from(step)
    seal, _ = self._read_seal(step)
    saved = {k: v for k, v in seal['leaves'].items() if k.startswith(prefix)}
    _check_match(folder, saved, wanted)
    arrays = {  # Orbax stores no arrays without elements
      k: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for k, x in wanted.items() if not x.size
    }
    stored = {k: x for k, x in wanted.items() if x.size}
    if stored:
      here = {k: x for k, x in stored.items() if x.sharding.addressable_devices}
      some = here or {min(stored, key=lambda k: stored[k].size): np.zeros(())}
      args = ocp.args.PyTreeRestore(
        item=some, restore_args=ocp.checkpoint_utils.construct_restore_args(some), partial_restore=True
      )
      args = ocp.args.Composite(state=args)
      found = self._orbax.restore(folder, args=args)['state']
      arrays |= {
        k: found[k] if k in here else jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)
        for k, x in stored.items()
      }
    return jax.tree.unflatten(treedef, [arrays[key] for key in wanted])


def finished_steps(folder):
  """Steps whose save was finished, newest first; looks at no contents."""
  folder = epath.Path(folder)
  return [s for s in _steps(folder) if (folder / str(s) / _SEAL).exists()]


def _steps(folder):
  """Numbered folders, good or not, newest first."""
  if not folder.exists():
    return []
  names = {path.name for path in folder.iterdir() if path.is_dir()}
  steps = {int(name) for name in names if name.isascii() and name.isdigit()}
  return sorted((s for s in steps if str(s) in names), reverse=True)


def _flatten(tree):
  """Returns ({'opt_state/0/mu/embed': leaf}, treedef), in leaf order."""
  pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
  named = {}
  for path, leaf in pairs:
    key = jax.tree_util.keystr(path, simple=True, separator='/')
    if key in named:
      raise ValueError(f'two leaves of the state are both called {key}')
    named[key] = leaf
  return named, treedef


def _check_arrays(named):
  for key, leaf in named.items():
    if not isinstance(leaf, jax.Array):
      raise TypeError(f'{key} is a {type(leaf).__name__}, not a jax array')
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise TypeError(f'{key} is {leaf.dtype}; save jax.random.key_data of it')


def _check_match(where, saved, wanted):
  """Raises InputError if the leaves on disk are not the ones wanted."""
  here = {k: f'{x.dtype} {list(x.shape)}' for k, x in wanted.items()}
  there = {k: f'{dtype} {shape}' for k, (shape, dtype) in saved.items()}
  wrong = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
  if not wrong:
    return
  key = wrong[0]
  more = f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''
  raise errors.InputError(
    f'{where}: {key} is {there.get(key, "absent")} in the checkpoint and'
    f' {here.get(key, "absent")} in the run{more}; the config changed since'
    ' this checkpoint: restore the old values or choose another folder'
  )
