"""Timelines of a run: when the host and the devices of each phase were busy.

The host enters and leaves its phases explicitly. For devices, a thread waits for the results of each program; nothing
in a run depends on it. The first steps are written as Chrome trace events, for ui.perfetto.dev.
"""

import collections
import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from jaxpost.distributed import coordination
from jaxpost.storage import object_store

_HOST = 'host'
_Span = tuple[str, str, float, float]  # lane, phase, begin, end


class Timeline:
  """Seconds of the host in each of `metrics.PHASES` (`with timeline('data'): ...`), and when devices were busy.

  Time in a nested phase counts for that phase only.

  lanes: {phase: name of the devices that run it}.
  place: stage and step of the current phases, such as 'grpo 3/40'.
  path: file of trace events; None writes none. steps: number of steps in it.
  """

  def __init__(self, lanes: dict[str, str]):
    self.lanes = lanes
    self.place = ''
    self.path: epath.Path | None = None
    self.steps = 0
    self._open: list[str] = []  # phases of the host, innermost last
    self._spent: dict[str, float] = {}  # {phase: seconds since the last `pop`}
    self._start = self._mark = time.perf_counter()  # times of the last `pop`, and of the last start or end of a phase
    self._zero = time.time() - time.perf_counter()  # Unix time at 0 of time.perf_counter
    self._threads: dict[str, queue.SimpleQueue] = {}  # lane -> the arrays that its thread waits for
    self._lock = threading.Lock()  # of the four fields below
    # Spans since the last `pop` and since the last `flush`; the oldest are dropped if these are not called.
    self._done: collections.deque[_Span] = collections.deque(maxlen=10_000)
    self._unwritten: collections.deque[_Span] = collections.deque(maxlen=10_000)
    # Lane -> (phase, time of dispatch) of the programs in its queue.
    self._asked: dict[str, collections.deque[tuple[str, float]]] = collections.defaultdict(collections.deque)
    self._last: dict[str, float] = collections.defaultdict(float)  # lane -> end of its last program
    self._named = False  # whether the file has the names of the lanes

  # -------------------------------------------------------------------- host

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    self._settle()
    self._open.append(phase)
    try:
      yield
    finally:
      self._settle()
      self._open.pop()

  def _settle(self) -> None:
    """Counts the time since the last call for the innermost phase."""
    before, self._mark = self._mark, time.perf_counter()
    for phase in self._open[-1:]:
      self._spent[phase] = self._spent.get(phase, 0.0) + self._mark - before
      with self._lock:
        self._add((_HOST, phase, before, self._mark))
        if phase == 'sample':  # the host collects samples block by block
          self._add((self.lanes[phase], phase, before, self._mark))

  def _add(self, span: _Span) -> None:
    """Adds a span; the caller holds the lock."""
    self._done.append(span)
    if self.path:
      self._unwritten.append(span)

  def doing(self) -> str:
    """Returns what the host is doing, such as 'grpo 3/40: sampling (5 s)'; called by another thread."""
    from jaxpost.monitor import display

    phases = [display.title(f'time/{phase}').removeprefix('Seconds ') for phase in self._open[-1:]]
    return f'{": ".join([self.place, *phases])} ({time.perf_counter() - self._mark:.0f} s)'

  # ----------------------------------------------------------------- devices

  def watch(self, phase: str, tree: Any) -> None:
    """Records when the devices of a phase have computed these arrays."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.sharding.addressable_devices]
    if not arrays:
      return
    lane = self.lanes[phase]
    if lane not in self._threads:
      pending = self._threads[lane] = queue.SimpleQueue()
      threading.Thread(target=self._wait, args=(lane, pending), daemon=True, name=f'timeline {lane}').start()
    now = time.perf_counter()
    with self._lock:
      self._asked[lane].append((phase, now))
    self._threads[lane].put(arrays[-1])

  def _wait(self, lane: str, pending: queue.SimpleQueue) -> None:
    while (array := pending.get()) is not None:
      with contextlib.suppress(RuntimeError):  # the caller of the program gets this error as well
        jax.block_until_ready(array)
      now = time.perf_counter()
      with self._lock:
        phase, dispatched = self._asked[lane].popleft()
        # Programs of a lane run one after the other: this one began when the previous one ended.
        self._add((lane, phase, max(dispatched, self._last[lane]), now))
        self._last[lane] = now

  def pop(self) -> dict[str, float]:
    """Returns seconds since the last call: of phases, of the whole step, and of busy devices.

    time/PHASE, time/step: of the host.
    time/busy/LANE: seconds in which the devices of a lane were busy.
    time/busy/both: seconds in which devices of training and of sampling were busy at the same time.
    """
    self._settle()
    start, now = self._start, self._mark
    out = {f'time/{phase}': seconds for phase, seconds in self._spent.items()} | {'time/step': now - start}
    self._start, self._spent = now, {}
    with self._lock:
      spans = list(self._done)
      for lane, dispatched in self._asked.items():
        if dispatched:  # its first program is still running
          phase, begin = dispatched[0]
          spans.append((lane, phase, max(begin, self._last[lane]), now))
      self._done.clear()
    train, rollout = self.lanes['update'], self.lanes['sample']
    busy = {}
    for lane in (train, rollout, *self._threads):
      lane_spans = merged([(begin, end) for span_lane, _, begin, end in spans if span_lane == lane])
      busy[lane] = both(lane_spans, [(start, now)])
    out |= {f'time/busy/{lane}': _total(intervals) for lane, intervals in busy.items()}
    if train != rollout:
      out['time/busy/both'] = _total(both(busy[train], busy[rollout]))
    return out

  def close(self) -> None:
    """Ends the threads after their remaining arrays are computed."""
    for pending in self._threads.values():
      pending.put(None)
    self._threads.clear()

  # -------------------------------------------------------------------- file

  def begin(self, path: epath.PathLike, steps: int) -> None:
    """Writes the spans of the next `steps` steps to a file; none on an object store, which cannot append."""
    if steps and not object_store.is_remote(path):
      self.path, self.steps = epath.Path(path), steps

  def flush(self) -> None:
    """Writes the spans since the last call; called once a step on all processes."""
    if not self.path:
      return
    with self._lock:
      spans = list(self._unwritten)
      self._unwritten.clear()
    local_spans = [
      [lane, name, round((self._zero + start) * 1e6), round((end - start) * 1e6)] for lane, name, start, end in spans
    ]
    spans_by_process = coordination.all_gather(local_spans)
    if coordination.process_index() == 0:
      self._write(self.path, spans_by_process)
    self.steps -= 1
    if self.steps < 0:
      self.path = None

  def _write(self, path: epath.Path, spans_by_process: list) -> None:
    """Appends the spans of each process; trace viewers accept a file without the closing bracket."""
    lanes = [_HOST, *dict.fromkeys(self.lanes.values())]
    events = []
    for pid, spans in enumerate(spans_by_process):
      if not self._named:
        names = [('process_name', 0, f'process {pid}'), *(('thread_name', tid, lane) for tid, lane in enumerate(lanes))]
        events += [dict(ph='M', name=kind, pid=pid, tid=tid, args=dict(name=text)) for kind, tid, text in names]
      events += [
        dict(ph='X', name=phase, pid=pid, tid=lanes.index(lane), ts=ts, dur=dur) for lane, phase, ts, dur in spans
      ]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open('a') as file:
      file.write(('[\n' if is_new else '') + ''.join(json.dumps(event) + ',\n' for event in events))
    self._named = True


def _total(spans: list) -> float:
  return sum(end - begin for begin, end in spans)


def merged(spans: list) -> list:
  """Returns the union of spans, as spans that do not touch."""
  out: list[tuple[float, float]] = []
  for begin, end in sorted(spans):
    if out and begin <= out[-1][1]:
      out[-1] = out[-1][0], max(end, out[-1][1])
    else:
      out.append((begin, end))
  return out


def both(first: list, second: list) -> list:
  """Returns the intersection of two lists of spans."""
  return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]
