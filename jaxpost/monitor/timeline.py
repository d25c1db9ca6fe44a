"""A trace of some steps: where their time goes, on devices and on the host.

When the host and the devices of each phase were at work.

The host's phases are those of `metrics.Chrono`. Of devices, a thread waits for
what a program returns and notes when it came: nothing that a run decides
depends on it. The first steps are written as Chrome trace events, which
ui.perfetto.dev opens.
"""

import collections
import json
import queue
import threading
import time

import jax
from etils import epath

from jaxpost.distributed import coordination
from jaxpost.monitor.metrics import Chrono
from jaxpost.storage import object_store


class Trace:
  """Traces steps `first` to `first` + `number` - 1 into a folder.

  Open it with TensorBoard or xprof; every process writes files of its own.
  """

  def __init__(self, folder: epath.Path, first: int, number: int, last: int):
    """`first` = 0 traces nothing; `last` is the last step there is."""
    self._folder, self._first = folder, first
    self._after = first and min(first + number, last)
    self._open = False

  def at(self, step: int):
    """Before each step."""
    if step >= self._after:
      self.close()
    # Of a run that is resumed inside, the rest.
    elif not self._open and self._first <= step < self._after:
      self._folder.mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(str(self._folder))
      self._open = True

  def close(self):
    """Ends a trace that is under way; JAX has one at a time."""
    if self._open:
      jax.profiler.stop_trace()
      self._open = False


_HOST = 'host'


class Timeline(Chrono):
  """A Chrono that also knows when devices were busy.

  lanes: phase -> the name of the devices that run it.
  path: of the file; None writes nothing. steps: how many go into it.
  """

  def __init__(self, lanes: dict):
    super().__init__()
    self.lanes = lanes
    self.path, self.steps = None, 0
    self._zero = time.time() - time.perf_counter()  # of the clock used here
    self._lock, self._threads = threading.Lock(), {}
    # (lane, name, start, end); the oldest go where nobody asks.
    self._done = collections.deque(maxlen=10_000)
    self._asked = collections.defaultdict(collections.deque)
    self._last = collections.defaultdict(float)  # lane -> end of its last
    self._told = 0.0  # until when `pop` has told of them
    self._named = False  # lanes, in the file

  # ------------------------------------------------------------------- spans

  def watch(self, phase: str, tree):
    """Notes when the devices of a phase have made these arrays."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.sharding.addressable_devices]
    if not arrays:
      return
    lane = self.lanes[phase]
    if lane not in self._threads:
      waiting = self._threads[lane] = queue.SimpleQueue()
      threading.Thread(target=self._wait, args=(lane, waiting), daemon=True, name=f'timeline {lane}').start()
    now = time.perf_counter()
    with self._lock:
      self._asked[lane].append((phase, now))
    self._threads[lane].put(arrays[-1])

  def _wait(self, lane: str, waiting):
    while (array := waiting.get()) is not None:
      try:
        jax.block_until_ready(array)
      except (jax.errors.JaxRuntimeError, RuntimeError):
        pass  # whoever asked for it hears of it, too
      now = time.perf_counter()
      with self._lock:
        phase, asked = self._asked[lane].popleft()
        start = max(asked, self._last[lane])
        self._done.append((lane, phase, start, now))
        self._last[lane] = now

  def _settle(self) -> None:
    before = self._mark
    super()._settle()
    if self._open and self._mark > before:
      phase = self._open[-1]
      with self._lock:
        self._done.append((_HOST, phase, before, self._mark))
        if phase == 'sample':  # the host sees to it block by block
          self._done.append((self.lanes[phase], phase, before, self._mark))

  def pop(self) -> dict[str, float]:
    """As of Chrono, and time/busy/LANE: seconds in which it was at work.

    time/busy/both: those in which training and sampling were.
    """
    out, start = super().pop(), self._told
    now = self._told = self._mark
    with self._lock:
      spans = list(self._done) + [
        (lane, asked[0][0], max(asked[0][1], self._last[lane]), now) for lane, asked in self._asked.items() if asked
      ]
      if not self.path:  # what is over is not asked for again
        self._done.clear()
    train, rollout = self.lanes['update'], self.lanes['sample']
    found = {lane: [] for lane in (train, rollout, *self._threads)}
    for lane, _, begin, end in spans:
      if lane != _HOST and end > start and begin < now:
        found[lane].append((max(begin, start), min(end, now)))
    total = lambda spans: sum(b - a for a, b in spans)
    out |= {f'time/busy/{lane}': total(merged(x)) for lane, x in found.items()}
    if train != rollout:
      out['time/busy/both'] = total(both(merged(found[train]), merged(found[rollout])))
    return out

  def close(self):
    """Ends the threads, when they have seen what they were told to watch."""
    for waiting in self._threads.values():
      waiting.put(None)
    self._threads.clear()

  # -------------------------------------------------------------------- file

  def begin(self, path, steps: int):
    """Writes the spans of the next `steps` steps to a file.

    Of a run on an object store, to which nothing can be appended, to none.
    """
    if steps and not object_store.is_remote(path):
      self.path, self.steps = epath.Path(path), steps

  def flush(self):
    """Once a step, on all processes: what has happened since goes there."""
    if not self.path:
      return
    with self._lock:
      done = list(self._done)
      self._done.clear()
    mine = [
      [lane, name, round((self._zero + start) * 1e6), round((end - start) * 1e6)] for lane, name, start, end in done
    ]
    every = coordination.all_gather(mine)
    if coordination.process_index() == 0:
      self._write(every)
    self.steps -= 1
    if self.steps < 0:
      self.path = None

  def _write(self, every: list):
    """Appends: the closing bracket of such a file may be missing."""
    lines, lanes = [], [_HOST, *dict.fromkeys(self.lanes.values())]
    if not self.path.exists():
      self.path.parent.mkdir(parents=True, exist_ok=True)
      lines.append('[')
    if not self._named:
      for pid in range(len(every)):
        name = lambda what, tid, text, pid=pid: (
          json.dumps(dict(ph='M', name=what, pid=pid, tid=tid, args=dict(name=text))) + ','
        )
        lines.append(name('process_name', 0, f'process {pid}'))
        lines += [name('thread_name', i, lane) for i, lane in enumerate(lanes)]
    for pid, spans in enumerate(every):
      lines += [
        json.dumps(dict(ph='X', name=phase, pid=pid, tid=lanes.index(lane), ts=ts, dur=dur)) + ','
        for lane, phase, ts, dur in spans
      ]
    with self.path.open('a') as file:
      file.write('\n'.join(lines) + '\n')
    self._named = True


def merged(spans: list) -> list:
  """The same time, as spans that do not touch."""
  out = []
  for begin, end in sorted(spans):
    if out and begin <= out[-1][1]:
      out[-1] = out[-1][0], max(end, out[-1][1])
    else:
      out.append((begin, end))
  return out


def both(these: list, those: list) -> list:
  """Where spans of both are."""
  return [(max(a, c), min(b, d)) for a, b in these for c, d in those if max(a, c) < min(b, d)]
