"""Roofline: seconds, rates and cost that follow from what programs compute, read and send.

A program takes as long as the slowest of its three parts, were they perfectly
overlapped: products at the peak rate, bytes through the memory, bytes over
the network. The sum of the three is what it takes without any overlap. What is expected uses the
rates that a chip was measured to reach, where they are known; docs/performance.md compares it with steps.

Programs of a step follow each other. Where sampling is asynchronous (`rl/rollout_queue.py`),
those on devices of their own run at the same time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.distributed import bridge
from jaxpost.planning import aot, cost, machines
from jaxpost.rollout import buckets
from jaxpost.stage import batch_shape

if TYPE_CHECKING:
  from collections.abc import Mapping

  import jax

  from jaxpost.hardware.chips import Chip
  from jaxpost.stage.place import PlacedStage

_ESTIMATES = 'roofline', 'expected', 'no_overlap', 'xla'
# Shares of FLOP/s and bandwidth that large products and copies reached on an H200, which has the die of an H100.
_REACHED = 0.72, 0.86
_MEASURED = 'H100', 'H200'
_SCORING = 'score', 'values'
# Programs that training and sampling devices both wait for, or an update does.
_WAITED_FOR = 'reshard', 'hidden'


@dataclasses.dataclass(frozen=True)
class Step:
  """How often a step calls its programs, and for how many tokens.

  calls: {program: how often}. trained, sampled: tokens at most.
  reads: {cache entries: the share of blocks of decoding that attend to so many}.
  """

  calls: dict
  trained: int
  sampled: int
  reads: Mapping[int, float] = dataclasses.field(default_factory=dict)


def step_of(placed: PlacedStage) -> Step:
  """Returns the step in which every row and every completion is as long as it may be."""
  config, on_policy = placed.config, placed.algorithm.on_policy
  calls = {'update': 1}
  for name, held in (('score', 'reference'), ('values', 'reward_model')):
    calls[name] = int(held in placed.inputs.sources)
  teachers = sum(k.startswith('teacher_') for k in placed.inputs.sources)
  calls['hidden'] = teachers if placed.distills else 0
  if not on_policy:
    return Step(calls, placed.shape.rows * placed.shape.row_length, 0)
  r, rl = config.rollout, config.rl
  scores = placed.algorithm.scores(config)
  calls['update'] = rl.epochs * rl.minibatches
  critic = 'critic' in placed.inputs.sources
  # A pass of the reference, or of each teacher; and one of the policy.
  of_frozen = (1 if placed.distills else max(teachers, 1)) if 'ref_logprobs' in scores else 0
  of_policy = 'old_logprobs' in scores or 'entropy' in scores or ('values' in scores and not critic)
  calls['score'] = of_frozen + int(of_policy)
  calls['values'] += int('values' in scores and critic)
  total = r.prompts * r.group_size
  slots = batch_shape.slots(r, total)
  waves = math.ceil(total / slots)
  calls |= {
    'reshard': 1,
    'init_state': 1,
    'prefill': waves,
    'insert': waves,
    'generate': waves * math.ceil(r.max_new_tokens / placed.decode_block),
  }
  longest = r.max_prompt_length + r.max_new_tokens
  return Step(calls, total * longest, total * r.max_new_tokens, _reads(placed))


def _reads(placed: PlacedStage) -> dict[int, float]:
  """The shares of `Step.reads`, of a completion as long as it may be; see `rollout/buckets.py`."""
  r = placed.config.rollout
  block = min(placed.decode_block, r.max_new_tokens)
  length = buckets.cache_length(r.max_prompt_length + r.max_new_tokens, block, r.page_size)
  ends = range(r.max_prompt_length + block, r.max_prompt_length + block + r.max_new_tokens, block)
  counts = collections.Counter(buckets.entries_read(end, length, r.page_size) for end in ends)
  return {entries: count / len(ends) for entries, count in counts.items()}


def programs(compiled: aot.Compiled, topology: machines.Topology) -> list[dict]:
  """Returns one JSON-able object for each program."""
  placed = compiled.placed
  step = step_of(placed)
  out = []
  for row in compiled.rows:
    out.append(
      dict(
        program=row['program'],
        shapes=row['shapes'],
        devices=row['mesh'].size,
        runs_on=_runs_on(placed, row['mesh']),
        calls=_calls(row, compiled.rows, step),
        compile_s=row['compile_s'],
        **memory(row, topology.memory),
        **work(
          row,
          row['mesh'],
          topology,
          hosts=dict(host_of(topology, row['mesh'])),
          handed=_handed_over(placed, row, topology),
        ),
      )
    )
  return out


def _calls(row: dict, rows: list, step: Step) -> float:
  """Returns calls a step. Programs of one name share them: evenly, or as their rows say."""
  same = [r for r in rows if r['program'] == row['program']]
  calls = step.calls.get(row['program'], 0)
  if row['program'] in ('update', 'reshard'):  # each does a part of it
    return calls * row['calls_per_step']
  if row['program'] == 'generate':
    return calls * _share_of_blocks(row, same, step)
  return calls / len(same)


def _share_of_blocks(row: dict, rows: list, step: Step) -> float:
  """The share of the blocks of decoding that one of its programs computes: one of all slots, as none is idle."""
  most = max(r['slots'] for r in rows)
  if row['slots'] < most:
    return 0.0
  # A kernel that reads what is filled is in one program.
  return step.reads.get(row['read'], 0.0) if row['read'] else 1.0


def _runs_on(placed: PlacedStage, mesh: jax.sharding.Mesh) -> str:
  """Returns the phase that has these devices; training, if it shares them."""
  return next(name for name in ('train', 'rollout', 'score') if _shared(mesh, vars(placed)[name].mesh))


def _handed_over(placed: PlacedStage, row: dict, topology: machines.Topology) -> dict:
  """Returns the bytes that a training device sends to the sampling devices after a reshard."""
  ours = placed.train.mesh
  theirs = placed.rollout.mesh
  if row['program'] != 'reshard' or _shared(ours, theirs):
    return {}
  whole = math.prod(theirs.shape[a] for a in bridge.WHOLE)
  copies = ours.size * whole // theirs.size
  times = math.ceil(whole / copies)
  hosts = {host for mesh in (ours, theirs) for _, host in host_of(topology, mesh)}
  return dict(bytes=times * row['output_bytes'], number=times, between_hosts=len(hosts) > 1)


def _shared(mesh: jax.sharding.Mesh, other: jax.sharding.Mesh) -> bool:
  return mesh.devices.flat[0] in set(other.devices.flat)


def memory(row: dict, limit: float) -> dict:
  """Returns the memory in use while a program runs, by purpose, and whether it fits; `hardware.memory` has the sum.

  Args:
    row: of `aot.Compiled`.
    limit: bytes of a device that may be in use; 0 where they are unknown.
  """
  given = row['arguments']
  out = dict(
    parameters=given.get('parameters', 0),
    optimizer=given.get('optimizer', 0),
    kv_cache=given.get('kv_cache', 0),
    batch=given.get('batch', 0),
    other=given.get('other', 0),
    outputs=row['output_bytes'] - row['alias_bytes'],
    temporaries=row['temp_bytes'],
  )
  own = row['argument_bytes'] + out['outputs'] + row['temp_bytes']
  out['elsewhere'] = max(0, row['in_use_bytes'] - own)
  out['total'] = own + out['elsewhere']
  fits = out['total'] <= limit if limit else None
  return dict(fits=fits, free_bytes=int(limit - out['total']) if limit else None, bytes_per_chip=out)


def work(
  row: dict, mesh: jax.sharding.Mesh, topology: machines.Topology, hosts: Mapping[int, int], handed: dict | None = None
) -> dict[str, Any]:
  """Returns FLOPs, bytes, seconds and the share of the peak of a program.

  Args:
    row: of `aot.Compiled`.
    mesh: of the program.
    topology: with the chip's rates.
    hosts: {position in the mesh: host or slice}; see `host_of`.
    handed: what leaves for other devices afterwards, if anything; see `_handed_over`.
  """
  totals = row['totals']
  chip = topology.chip
  least = {k: {a: float(n) for a, n in v.items()} for k, v in row['least'].items()}
  sent = _collectives(totals, mesh, hosts)
  if handed:
    least['copy'] = dict(rollout=float(handed['bytes']))
    sent['copy'] = dict(rollout=handed)
  wire = sum(_wire_seconds(found, chip) for axes in sent.values() for found in axes.values())
  model = (row['flops'] or 0) / mesh.size
  if row['program'] == 'prefill':  # runs no head, which `flops` counts
    model = min(model, totals.flops)
  parts = dict(
    compute=totals.flops / chip.flops if chip.flops else None,
    memory=totals.bytes / chip.bandwidth if chip.bandwidth else None,
    network=wire if chip.link else None,
  )
  known = [x for x in parts.values() if x is not None]
  seconds = max(known) if known else None
  return dict(
    flops=dict(model=model, program=totals.flops, xla_once=row['xla_flops_once']),
    memory_traffic_bytes=totals.bytes,
    collective_bytes=sent,
    collective_minimum=least,
    seconds=dict(
      roofline=seconds,
      expected=expected(totals.flops, totals.bytes, wire, chip),
      no_overlap=sum(known) if known else None,
      **parts,
      xla=totals.cycles / chip.clock if chip.clock and totals.cycles else None,
    ),
    roofline_mfu=model / chip.flops / seconds if seconds else None,
    unknown_loops=list(totals.unknown),
  )


def _collectives(totals: cost.Totals, mesh: jax.sharding.Mesh, hosts: Mapping[int, int]) -> dict[str, dict[str, dict]]:
  """Returns {kind: {axis: bytes and number of the collectives, and whether they leave a host}} of a program."""
  return {
    kind: {
      axis: dict(bytes=count, number=number, between_hosts=len({hosts[i] for i in group}) > 1)
      for axis, (count, number, group) in axes.items()
    }
    for kind, axes in cost.by_axis(totals, mesh).items()
  }


def _wire_seconds(sent: Mapping[str, Any], chip: Chip) -> float:
  """Returns the seconds of what is sent along an axis; 0 where the rate of the chip is unknown."""
  rate = chip.network if sent['between_hosts'] else chip.link
  return sent['bytes'] / rate if rate else 0.0


def expected(flops: float, count: float, wire: float, chip: Chip) -> float | None:
  """Returns the seconds of a program at the rates that a chip reaches, None where they are unknown.

  The longest of products, memory and network, and half of the others: the overlap of what was measured on an H200.

  Args:
    count: bytes through the memory.
    wire: seconds of the network.
  """
  if chip.kind not in _MEASURED:
    return None
  parts = flops / chip.flops / _REACHED[0], count / chip.bandwidth / _REACHED[1], wire
  return (sum(parts) + max(parts)) / 2


def host_of(topology: machines.Topology, mesh: jax.sharding.Mesh) -> list[tuple[int, int]]:
  """Returns (position in the mesh, host or slice: devices of one share a fast network)."""
  devices = mesh.devices.flat
  if topology.gpu:
    return list(enumerate(d.process_index for d in devices))
  if topology.slices > 1:
    return list(enumerate(d.slice_index for d in devices))
  return list(enumerate(np.zeros(mesh.size, int).tolist()))


def step_seconds(rows: list[dict], name: str, staleness: int) -> float:
  """Returns seconds of a step: the sum of its programs, except that asynchronous ones overlap.

  With a staleness of 1 sampling runs beside the update, with more also the scores of the rollout before it. Weights
  move when sampling and the update are done; both wait for them, and an update waits for the teachers' outputs for its
  batch.

  Args:
    rows: of `programs`.
    name: which estimate, one of _ESTIMATES.
    staleness: as in config.rollout.
  """
  alone = 0.0
  phases: dict[str, float] = collections.defaultdict(float)
  for r in rows:
    took = r['calls'] * r['seconds'][name]
    scores_wait = staleness == 1 and r['program'] in _SCORING
    if not staleness or r['program'] in _WAITED_FOR or scores_wait:
      alone += took
    else:
      phases[r['runs_on']] += took
  return alone + max(phases.values(), default=0.0)


def summary(placed: PlacedStage, topology: machines.Topology, rows: list, price: float) -> dict:
  """Returns seconds a step, rates and cost by each estimate; price: USD per chip-hour."""
  step = step_of(placed)
  out = {}
  for name in _ESTIMATES:
    used = [r for r in rows if r['calls']]
    if not used or any(r['seconds'][name] is None for r in used):
      continue
    seconds = step_seconds(used, name, placed.config.rollout.staleness)
    rate = step.trained / seconds
    model = sum(r['calls'] * r['flops']['model'] * r['devices'] for r in used) / topology.devices
    out[name] = dict(
      step_s=seconds,
      tokens_per_s=rate,
      tokens_per_s_per_chip=rate / topology.chips,
      mfu=model / seconds / topology.chip.flops,
      seconds={r['program']: 0.0 for r in used},
    )
    for r in used:
      out[name]['seconds'][r['program']] += r['calls'] * r['seconds'][name]
    if price:
      out[name]['usd_per_million_tokens'] = price * topology.chips / 3600 / rate * 1e6
  return out
