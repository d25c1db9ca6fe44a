"""Roofline: seconds, rates and cost derived from the FLOPs, memory traffic and communication of programs.

With perfect overlap, a program takes as long as the slowest of three parts: matrix products at the peak rate, bytes
through the memory, bytes over the network. Without overlap it takes their sum. The estimate 'expected' uses rates that
were measured on the chip, if they are known; docs/performance.md compares it with measured steps.

Programs of a step run one after the other. With asynchronous sampling (`rl/rollout_queue.py`), programs on separate
devices run at the same time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING, Any

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
# Shares of peak FLOP/s and bandwidth of large products and copies on an H200, which has the same die as an H100.
_REACHED = 0.72, 0.86
_MEASURED = 'H100', 'H200'
_SCORING = 'score', 'values'
# Programs that both training and sampling devices wait for, or that an update waits for.
_WAITED_FOR = 'reshard', 'hidden'


@dataclasses.dataclass(frozen=True)
class Step:
  """How often a step calls its programs, and for how many tokens.

  calls: {program: calls}. trained, sampled: largest numbers of tokens.
  reads: {number of cache entries: share of decoding blocks that attend to it}.
  """

  calls: dict
  trained: int
  sampled: int
  reads: Mapping[int, float] = dataclasses.field(default_factory=dict)


def step_of(placed: PlacedStage) -> Step:
  """Returns the step in which every row and every completion has the maximum length."""
  config, on_policy = placed.config, placed.algorithm.on_policy
  calls = {'update': 1}
  for name, role in (('score', 'reference'), ('values', 'reward_model')):
    calls[name] = int(role in placed.inputs.sources)
  teachers = sum(k.startswith('teacher_') for k in placed.inputs.sources)
  calls['hidden'] = teachers if placed.distills else 0
  if not on_policy:
    return Step(calls, placed.shape.rows * placed.shape.row_length, 0)
  r, rl = config.rollout, config.rl
  scores = placed.algorithm.scores(config)
  calls['update'] = rl.epochs * rl.minibatches
  critic = 'critic' in placed.inputs.sources
  # One pass of the reference or of each teacher, and one of the policy.
  frozen_passes = (1 if placed.distills else max(teachers, 1)) if 'ref_logprobs' in scores else 0
  needs_policy_pass = 'old_logprobs' in scores or 'entropy' in scores or ('values' in scores and not critic)
  calls['score'] = frozen_passes + int(needs_policy_pass)
  calls['values'] += int('values' in scores and critic)
  total = r.prompts * r.group_size
  slots = batch_shape.slots(config, on_policy)
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
  """Returns `Step.reads` of a completion of maximum length; see `rollout/buckets.py`."""
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
    hosts, handed = host_of(topology, row['mesh']), _handed_over(placed, row, topology)
    out.append(
      dict(
        program=row['program'],
        shapes=row['shapes'],
        devices=row['mesh'].size,
        runs_on=_runs_on(placed, row['mesh']),
        calls=_calls(row, compiled.rows, step),
        compile_s=row['compile_s'],
        **memory(row, topology.memory),
        **work(row, row['mesh'], topology, hosts, handed),
      )
    )
  return out


def _calls(row: dict, rows: list, step: Step) -> float:
  """Returns the calls of a program per step. Programs with the same name share them, evenly or by their rows."""
  same = [r for r in rows if r['program'] == row['program']]
  calls = step.calls.get(row['program'], 0)
  if row['program'] in ('update', 'reshard'):  # each program does a part
    return calls * row['calls_per_step']
  if row['program'] == 'generate':
    return calls * _share_of_blocks(row, same, step)
  return calls / len(same)


def _share_of_blocks(row: dict, rows: list, step: Step) -> float:
  """Returns the share of decoding blocks that a program computes; those with fewer than all slots get 0."""
  all_slots = max(r['slots'] for r in rows)
  if row['slots'] < all_slots:
    return 0.0
  # Without buckets of the cache (a kernel reads its filled part), there is one program.
  return step.reads.get(row['read'], 0.0) if row['read'] else 1.0


def _runs_on(placed: PlacedStage, mesh: jax.sharding.Mesh) -> str:
  """Returns the phase of these devices, 'train' if several phases share them."""
  return next(name for name in ('train', 'rollout', 'score') if _shared(mesh, vars(placed)[name].mesh))


def _handed_over(placed: PlacedStage, row: dict, topology: machines.Topology) -> dict:
  """Returns the copies that a training device sends to the sampling devices after a reshard; {} if none."""
  train = placed.train.mesh
  rollout = placed.rollout.mesh
  if row['program'] != 'reshard' or _shared(train, rollout):
    return {}
  whole = math.prod(rollout.shape[a] for a in bridge.WHOLE)
  copies = train.size * whole // rollout.size
  copies_sent = math.ceil(whole / copies)
  hosts = {host for mesh in (train, rollout) for host in host_of(topology, mesh).values()}
  return dict(bytes=copies_sent * row['output_bytes'], number=copies_sent, between_hosts=len(hosts) > 1)


def _shared(mesh: jax.sharding.Mesh, other: jax.sharding.Mesh) -> bool:
  return mesh.devices.flat[0] in set(other.devices.flat)


def memory(row: dict, limit: float) -> dict:
  """Returns the memory in use while a program runs, by purpose, and whether it fits; `hardware.memory` has the sum.

  Args:
    row: of `aot.Compiled`.
    limit: usable bytes of a device; 0 if unknown.
  """
  purposes = 'parameters', 'optimizer', 'kv_cache', 'batch', 'other'
  out = {purpose: row['arguments'].get(purpose, 0) for purpose in purposes}
  out |= dict(outputs=row['output_bytes'] - row['alias_bytes'], temporaries=row['temp_bytes'])
  needed = row['argument_bytes'] + out['outputs'] + row['temp_bytes']
  out['elsewhere'] = max(0, row['in_use_bytes'] - needed)
  out['total'] = needed + out['elsewhere']
  fits = out['total'] <= limit if limit else None
  return dict(fits=fits, free_bytes=int(limit - out['total']) if limit else None, bytes_per_chip=out)


def work(
  row: dict, mesh: jax.sharding.Mesh, topology: machines.Topology, hosts: Mapping[int, int], handed: dict | None = None
) -> dict[str, Any]:
  """Returns FLOPs, bytes, seconds and the share of the peak of a program.

  Args:
    row: of `aot.Compiled`.
    hosts: {position in the mesh: host or slice}; see `host_of`.
    handed: copies sent to other devices afterwards, see `_handed_over`.
  """
  totals = row['totals']
  chip = topology.chip
  lower_bounds = {kind: {axis: float(size) for axis, size in by_axis.items()} for kind, by_axis in row['least'].items()}
  sent = _collectives(totals, mesh, hosts)
  if handed:
    lower_bounds['copy'] = dict(rollout=float(handed['bytes']))
    sent['copy'] = dict(rollout=handed)
  wire = sum(_wire_seconds(entry, chip) for axes in sent.values() for entry in axes.values())
  model = (row['flops'] or 0) / mesh.size
  if row['program'] == 'prefill':  # runs no head, which `flops` counts
    model = min(model, totals.flops)
  parts = dict(
    compute=totals.flops / chip.flops if chip.flops else None,
    memory=totals.bytes / chip.bandwidth if chip.bandwidth else None,
    network=wire if chip.link else None,
  )
  known_parts = [x for x in parts.values() if x is not None]
  seconds = max(known_parts) if known_parts else None
  return dict(
    flops=dict(model=model, program=totals.flops, xla_once=row['xla_flops_once']),
    memory_traffic_bytes=totals.bytes,
    collective_bytes=sent,
    collective_minimum=lower_bounds,
    seconds=dict(
      roofline=seconds,
      expected=expected(totals.flops, totals.bytes, wire, chip),
      no_overlap=sum(known_parts) if known_parts else None,
      **parts,
      xla=xla_seconds(totals, chip),
    ),
    roofline_mfu=model / chip.flops / seconds if seconds else None,
    unknown_loops=list(totals.unknown),
  )


def xla_seconds(totals: cost.Totals, chip: Chip) -> float | None:
  """Returns XLA's estimate of a program and, as it counts no kernels, their time by the roofline; None without one."""
  if not (chip.clock and totals.cycles):
    return None
  return totals.cycles / chip.clock + max(totals.kernel_flops / chip.flops, totals.kernel_bytes / chip.bandwidth)


def _collectives(totals: cost.Totals, mesh: jax.sharding.Mesh, hosts: Mapping[int, int]) -> dict[str, dict[str, dict]]:
  """Returns {kind: {axis: bytes, number, and whether they cross hosts}} of a program's collectives."""
  return {
    kind: {
      axis: dict(bytes=count, number=number, between_hosts=len({hosts[i] for i in group}) > 1)
      for axis, (count, number, group) in axes.items()
    }
    for kind, axes in cost.by_axis(totals, mesh).items()
  }


def _wire_seconds(sent: Mapping[str, Any], chip: Chip) -> float:
  """Returns the seconds of the collectives along an axis; 0 if the chip's rate is unknown."""
  rate = chip.network if sent['between_hosts'] else chip.link
  return sent['bytes'] / rate if rate else 0.0


def expected(flops: float, count: float, wire: float, chip: Chip) -> float | None:
  """Returns the seconds of a program at measured rates of the chip; None if they are unknown.

  It is the longest of compute, memory and network plus half of the others, which is the overlap measured on an H200.

  Args:
    count: bytes through the memory.
    wire: seconds of the network.
  """
  if chip.kind not in _MEASURED:
    return None
  parts = flops / chip.flops / _REACHED[0], count / chip.bandwidth / _REACHED[1], wire
  return (sum(parts) + max(parts)) / 2


def host_of(topology: machines.Topology, mesh: jax.sharding.Mesh) -> dict[int, int]:
  """Returns {position in the mesh: host or slice}; the devices of one share a fast network."""
  devices = mesh.devices.flat
  if topology.gpu:
    return dict(enumerate(d.process_index for d in devices))
  if topology.slices > 1:
    return dict(enumerate(d.slice_index for d in devices))
  return dict.fromkeys(range(mesh.size), 0)


def step_seconds(rows: list[dict], name: str, staleness: int) -> float:
  """Returns seconds of a step: the sum of its programs, except that asynchronous ones overlap.

  With a staleness of 1, sampling overlaps with the update; above 1, also with the scores of the previous rollout.
  Weights are sent when sampling and the update are done, and both wait for them. An update waits for the teachers'
  outputs on its batch.

  Args:
    rows: of `programs`.
    name: the estimate, one of _ESTIMATES.
    staleness: as in config.rollout.
  """
  sequential = 0.0
  phases: dict[str, float] = collections.defaultdict(float)
  for row in rows:
    seconds = row['calls'] * row['seconds'][name]
    scores_wait = staleness == 1 and row['program'] in _SCORING
    if not staleness or row['program'] in _WAITED_FOR or scores_wait:
      sequential += seconds
    else:
      phases[row['runs_on']] += seconds
  return sequential + max(phases.values(), default=0.0)


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
