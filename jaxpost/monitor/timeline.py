"""Timelines of a run: when the host and the devices of each phase were busy.

The host enters and leaves its phases itself. For devices, a thread waits for the results of a program and notes when
they came; no decision of a run depends on it. The first steps are written as Chrome trace events, which
ui.perfetto.dev opens.
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

  A phase inside another is not counted twice.

  lanes: {phase: name of the devices that run it}.
  place: what the phases are parts of, such as 'grpo 3/40'.
  path: file of trace events; None writes none. steps: number of steps in it.
  """

  def __init__(self, lanes: dict[str, str]):
    self.lanes = lanes
    self.place = ''
    self.path: epath.Path | None = None
    self.steps = 0
    self._open: list[str] = []  # phases of the host, innermost last
    self._spent: dict[str, float] = {}  # {phase: seconds since the last `pop`}
    self._start = self._mark = time.perf_counter()  # the last `pop`; the last time that a phase began or ended
    self._zero = time.time() - time.perf_counter()  # of the clock used here
    self._threads: dict[str, queue.SimpleQueue] = {}  # lane -> the arrays that its thread waits for
    self._lock = threading.Lock()  # of the four that follow
    # Spans since the last `pop` and since the last `flush`; without these the oldest are dropped.
    self._done: collections.deque[_Span] = collections.deque(maxlen=10_000)
    self._unwritten: collections.deque[_Span] = collections.deque(maxlen=10_000)
    # Lane -> (phase, time) of the programs in its queue.
    self._asked: dict[str, collections.deque[tuple[str, float]]] = collections.defaultdict(collections.deque)
    self._last: dict[str, float] = collections.defaultdict(float)  # lane -> end of its last program
    self._named = False  # lanes, in the file

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
        if phase == 'sample':  # the host harvests it block by block
          self._add((self.lanes[phase], phase, before, self._mark))

  def _add(self, span: _Span) -> None:
    """Adds a span; the caller has the lock."""
    self._done.append(span)
    if self.path:
      self._unwritten.append(span)

  def doing(self) -> str:
    """Returns what the host does now, such as 'grpo 3/40: sampling (5 s)'; called by another thread."""
    from jaxpost.monitor import titles

    phases = [titles.title(f'time/{phase}').removeprefix('Seconds ') for phase in self._open[-1:]]
    return f'{": ".join([self.place, *phases])} ({time.perf_counter() - self._mark:.0f} s)'

  # ----------------------------------------------------------------- devices

  def watch(self, phase: str, tree: Any) -> None:
    """Notes when the devices of a phase have computed these arrays."""
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

  def _wait(self, lane: str, waiting: queue.SimpleQueue) -> None:
    while (array := waiting.get()) is not None:
      with contextlib.suppress(RuntimeError):  # the caller of the program gets the same error
        jax.block_until_ready(array)
      now = time.perf_counter()
      with self._lock:
        phase, asked = self._asked[lane].popleft()
        # Programs of a lane run one after the other: this one began when the one before it ended.
        self._add((lane, phase, max(asked, self._last[lane]), now))
        self._last[lane] = now

  def pop(self) -> dict[str, float]:
    """Returns seconds since the last call: of phases, of the whole step, and of busy devices.

    time/PHASE, time/step: of the host.
    time/busy/LANE: seconds in which the devices of a lane were busy.
    time/busy/both: seconds in which those of training and of sampling were.
    """
    self._settle()
    start, now = self._start, self._mark
    out = {f'time/{phase}': seconds for phase, seconds in self._spent.items()} | {'time/step': now - start}
    self._start, self._spent = now, {}
    with self._lock:
      spans = list(self._done) + [
        (lane, asked[0][0], max(asked[0][1], self._last[lane]), now) for lane, asked in self._asked.items() if asked
      ]
      self._done.clear()
    train, rollout = self.lanes['update'], self.lanes['sample']
    busy = {}
    for lane in (train, rollout, *self._threads):
      of_lane = merged([(begin, end) for other, _, begin, end in spans if other == lane])
      busy[lane] = both(of_lane, [(start, now)])
    out |= {f'time/busy/{lane}': _total(x) for lane, x in busy.items()}
    if train != rollout:
      out['time/busy/both'] = _total(both(busy[train], busy[rollout]))
    return out

  def close(self) -> None:
    """Ends the threads, once the arrays that they watch are computed."""
    for waiting in self._threads.values():
      waiting.put(None)
    self._threads.clear()

  # -------------------------------------------------------------------- file

  def begin(self, path: epath.PathLike, steps: int) -> None:
    """Writes the spans of the next `steps` steps to a file; an object store, which cannot append, gets none."""
    if steps and not object_store.is_remote(path):
      self.path, self.steps = epath.Path(path), steps

  def flush(self) -> None:
    """Writes the spans since the last call; called once a step on all processes."""
    if not self.path:
      return
    with self._lock:
      done = list(self._unwritten)
      self._unwritten.clear()
    mine = [
      [lane, name, round((self._zero + start) * 1e6), round((end - start) * 1e6)] for lane, name, start, end in done
    ]
    every = coordination.all_gather(mine)
    if coordination.process_index() == 0:
      self._write(self.path, every)
    self.steps -= 1
    if self.steps < 0:
      self.path = None

  def _write(self, path: epath.Path, every: list) -> None:
    """Appends the spans of each process; trace viewers accept a file without its closing bracket."""
    lanes = [_HOST, *dict.fromkeys(self.lanes.values())]
    events = []
    for pid, spans in enumerate(every):
      if not self._named:
        names = [('process_name', 0, f'process {pid}'), *(('thread_name', tid, lane) for tid, lane in enumerate(lanes))]
        events += [dict(ph='M', name=what, pid=pid, tid=tid, args=dict(name=text)) for what, tid, text in names]
      events += [
        dict(ph='X', name=phase, pid=pid, tid=lanes.index(lane), ts=ts, dur=dur) for lane, phase, ts, dur in spans
      ]
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = not path.exists()
    with path.open('a') as file:
      file.write(('[\n' if begins else '') + ''.join(json.dumps(event) + ',\n' for event in events))
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


def both(these: list, those: list) -> list:
  """Returns the intersection of two lists of spans."""
  return [(max(a, c), min(b, d)) for a, b in these for c, d in those if max(a, c) < min(b, d)]
