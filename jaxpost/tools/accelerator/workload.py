"""Stages for measurements, with random weights and documents, and the figures that rows report about them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost import testing
from jaxpost.data import sources as data_sources
from jaxpost.hardware import memory, probe
from jaxpost.models import model as model_lib
from jaxpost.models import presets
from jaxpost.monitor.metrics import MetricsWriter
from jaxpost.planning import aot, defaults, machines, roofline
from jaxpost.rewards.pool import RewardPool
from jaxpost.stage import assemble, load_weights, place, prepare
from jaxpost.stage import config as config_lib
from jaxpost.stage.place import PlacedStage
from jaxpost.stage.records import PreparedStage, Source, Workers
from jaxpost.tools import bench

if TYPE_CHECKING:
  from jaxpost.loop import Stage
  from jaxpost.models.config import ModelConfig

_DOCUMENTS = 512
_SAMPLES = 10  # largest operations of a profile that are reported
_traces = ''  # folder that keeps the profile of the current row


def shape_of(preset: str, layers: int) -> ModelConfig:
  """Returns the shape of a preset with its first `layers` layers; 0, or layers of several kinds: all of them."""
  cfg = presets.every()[preset]
  if not layers or cfg.state_shapes:
    return cfg
  per_layer = {k: vars(cfg)[k][:layers] for k in ('layer_windows', 'layer_ropes') if vars(cfg)[k]}
  return dataclasses.replace(cfg, num_layers=layers, **per_layer)


def lengths_of(mean: int, longest: int) -> np.ndarray:
  """Returns lengths of documents in tokens: as in an instruction data set, or around `mean`."""
  if not mean:
    return testing.document_lengths(_DOCUMENTS, high=min(512, longest), low=min(32, longest // 2))
  drawn = np.random.default_rng(0).normal(mean, mean / 4, _DOCUMENTS)
  return np.clip(drawn, 16, longest).astype(int)


def write_rows(path: str, kind: str, lengths: np.ndarray, vocab: int) -> None:
  """Writes jsonl rows of kind 'sft', 'dpo' or 'prompts' with random tokens; `lengths` are total tokens per row."""
  rng = np.random.default_rng(0)

  def words(count: int) -> str:
    return ' '.join(map(str, rng.integers(3, vocab, max(1, count))))

  with open(path, 'w', encoding='utf-8') as file:
    for n in lengths.tolist():
      if kind == 'prompts':
        row = dict(prompt=words(n - 1))  # plus the BOS token
      elif kind == 'dpo':  # a row holds the prompt and both answers
        row = dict(prompt=words(n // 4), chosen=words(n // 3), rejected=words(n // 3))
      else:
        row = dict(prompt=words(n // 8), completion=words(n - n // 8 - 2))
      file.write(json.dumps(row) + '\n')


@dataclasses.dataclass
class Running:
  """A stage on the devices of this process."""

  placed: PlacedStage
  params: dict
  workdir: str

  def assembled(self) -> Stage:
    """Compiles the programs of the stage, which takes over the parameters."""
    writer = MetricsWriter(self.workdir, tensorboard=False, primary=False)
    return assemble.assemble(self.placed, self.workdir, writer, self.params)

  def figures(self) -> dict[str, Any]:
    """Returns the settings in use and what chose them (`choices`), and the compiled programs (`programs`)."""
    return dict(choices=self.placed.choices, programs=self._programs())

  def _programs(self) -> list[dict[str, Any]]:
    """Returns a row for each compiled program: compile time, memory, and the roofline if the chip is known."""
    topology = machines.here(list(self.placed.train.mesh.devices.flat))
    out = []
    for row in self.placed.ledger.rows:
      figures = {k: row[k] for k in ('program', 'shapes', 'compile_s', 'temp_bytes', 'argument_bytes')}
      figures['in_use_bytes'] = row.get('in_use_bytes')
      if 'totals' in row:
        work = roofline.work(row, row['mesh'], topology, roofline.host_of(topology, row['mesh']))
        seconds = work['seconds']
        figures |= dict(roofline_s=seconds['roofline'], expected_s=seconds['expected'])
        figures |= {f'{k}_flops': work['flops'][k] for k in ('program', 'model')}
        figures |= dict(memory_traffic_bytes=work['memory_traffic_bytes'], filled=row['filled'])
      out.append(figures)
    return out


@contextlib.contextmanager
def stage(
  cfg: ModelConfig, config: Mapping[str, Any], rows: tuple[str, np.ndarray], compute: Mapping[str, Any] | None = None
) -> Iterator[Running]:
  """Places a stage with random weights and, as a run does, with defaults that fit the memory of the device.

  Args:
    config: sections as in a config file.
    rows: kind and lengths of its documents or prompts; see `write_rows`.
    compute: fields of `Compute` to replace.
  """
  with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as cleanup:
    path = os.path.join(workdir, 'rows.jsonl')
    write_rows(path, *rows, cfg.vocab_size)
    sections = dict(config)
    sections['model'] = sections.get('model', {}) | dict(dtype=probe.matmul_type()[0])
    sections['log'] = dict(tensorboard=False, watchdog_s=0.0)
    sections['data'] = dict(path=path, train_on='all')
    ((name, parsed),) = config_lib.parse(sections).items()
    algorithm, parsed = prepare.resolve(parsed)
    source = Source(cfg)
    sources = prepare.find_weights(parsed, algorithm, source, {})
    if 'critic' in sources:
      sources['critic'] = Source(model_lib.with_scalar_head(cfg))
    inputs = prepare.make_inputs(name, parsed, algorithm, sources, testing.IntTokenizer(cfg.vocab_size))
    data = prepare.make_data(inputs, data_sources.read_sources(path))
    rewards = RewardPool(f'{bench.__name__}:even_words', workers=1) if sections.get('reward') else None
    prepared = PreparedStage(inputs, data, Workers(rewards))
    cleanup.callback(prepared.close)
    if close := getattr(data.stream, 'close', None):  # ends the prefetching thread
      cleanup.callback(close)
    placed = place.place_stage(defaults.fitted(prepared, machines.here(jax.devices()), print))
    placed = dataclasses.replace(placed, compute=dataclasses.replace(placed.compute, **compute or {}))
    placed.ledger.look = functools.partial(aot.look, placed)
    params = load_weights.load(source, placed.model, placed.train, parsed.model.param_dtype, ledger=placed.ledger)
    yield Running(placed, params, workdir)


class Watch:
  """Wall time of a row, and its memory compared with the prediction."""

  def __init__(self) -> None:
    self._start = time.perf_counter()
    self._peak = memory.peak().get('memory/peak_bytes', 0)

  def lap(self) -> float:
    """Returns the seconds since the last call, or since the start."""
    now = time.perf_counter()
    seconds, self._start = now - self._start, now
    return seconds

  def memory(self, predicted: int) -> dict[str, Any]:
    """Returns measured and predicted bytes. The peak is that of the process, so unknown if an earlier row used more."""
    peak = memory.peak().get('memory/peak_bytes', 0)
    measured = peak if peak > self._peak else None
    return dict(peak_bytes=measured, predicted_bytes=predicted, peak_share=measured and measured / max(predicted, 1))


def keep_traces(folder: str) -> None:
  """Keeps the profile of the next row in a folder, to be opened with xprof or Perfetto."""
  global _traces
  _traces = folder


def profile(work: Any, per: int = 1) -> dict[str, Any]:
  """Traces `work()`, which waits for the devices; returns the ten longest operations and the number of operations.

  Args:
    per: operations are counted over this number of tokens or steps.
  """
  with tempfile.TemporaryDirectory() as scratch:
    folder = _traces or scratch
    with jax.profiler.trace(folder):
      work()
    files = glob.glob(f'{folder}/**/*.xplane.pb', recursive=True)
    if not files:
      return dict(profile='this version of JAX wrote no trace')
    newest = max(files, key=os.path.getmtime)  # a kept folder may have older ones
    planes = list(jax.profiler.ProfileData.from_file(newest).planes)
    seconds: Counter[str] = Counter()
    count = 0
    for event in _operations(planes):
      seconds[event.name] += event.duration_ns / 1e9
      count += 1
  total = sum(seconds.values())
  largest = [dict(name=k[:120], s=v, share=v / total) for k, v in seconds.most_common(_SAMPLES)]
  return dict(operations=count / per, busy_s=total, largest=largest)


def _operations(planes: list[Any]) -> Iterator[Any]:
  """Yields the events of the first device: on streams of a GPU, operations of a TPU or CPU."""
  devices = sorted(p.name for p in planes if p.name.startswith('/device:') and 'CUSTOM' not in p.name)
  for plane in planes:
    if devices and plane.name != devices[0]:
      continue
    for line in plane.lines:
      if line.name == 'XLA Ops' or 'Stream' in line.name or (not devices and line.name.startswith('tf_XLA')):
        # On a CPU, a line also has events for the ends of operations, and those of the executor.
        yield from _innermost([e for e in line.events if devices or not re.match('end: |.*::', e.name)])


def _innermost(events: list[Any]) -> Iterator[Any]:
  """Yields the events of a line that span no other; that of a loop or branch spans those of its body."""
  ordered = sorted(events, key=lambda e: (e.start_ns, -e.duration_ns))
  for event, following in zip(ordered, [*ordered[1:], None]):
    # The middle decides, because events that follow each other may overlap by a rounded nanosecond.
    if following is None or following.start_ns + following.duration_ns / 2 >= event.start_ns + event.duration_ns:
      yield event
