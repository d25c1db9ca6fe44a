"""Compiles the programs of a stage for described devices; a row for each.

No array is made: roles hold shapes and shardings in place of weights.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import TYPE_CHECKING

import jax

from jaxpost.hardware import chips, memory
from jaxpost.losses import head_chunk
from jaxpost.models import context_parallel
from jaxpost.planning import cost, traffic_bound
from jaxpost.programs.compile import Ledger
from jaxpost.programs.generate import DecodeState, Prefix
from jaxpost.stage import assemble, load_weights, place, precompile
from jaxpost.types import Batch, Cache, TrainState

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.stage.records import PreparedStage

SAMPLING = tuple(x for x in memory.SAMPLING if x != 'reshard')


@dataclasses.dataclass
class Compiled:
  """A stage whose programs are compiled.

  rows: with 'held': bytes of what stays on their devices from step to step.
  """

  placed: place.PlacedStage
  rows: list


def compile_stage(prepared: PreparedStage, topology: chips.Topology, only: tuple = ()) -> Compiled:
  """Compiles what a run of this stage would, before its first step.

  Args:
    only: names of programs, for a look at some; (): all.
  """
  ledger = Ledger(dry=True, options=chips.compiler_options(topology), only=only)
  placed = place.place_stage(prepared, chips.devices(topology), ledger)
  ledger.look = functools.partial(look, placed)
  params = load_weights.described(placed.model, placed.train, placed.config.model.param_dtype)
  roles, _, engine = assemble.make_parts(placed, params)
  evaluator = assemble.make_evaluator(placed, engine)
  precompile.compile_all(placed, roles, engine, evaluator)
  for row in ledger.rows:
    row['held'] = held_on(row['mesh'].devices.flat[0], roles)
  return Compiled(placed, ledger.rows)


def held_on(device, roles) -> dict:
  """Bytes on a device of what stays there from step to step."""
  held = collections.Counter()
  for role in roles.trainable.values():
    held.update(parts(role.state, device))
  for role in (roles.reference, roles.reward_model, *roles.teachers):
    if role:
      held.update(frozen=memory.size(role.params, device))
  return dict(held)


def look(placed: place.PlacedStage, name: str, compiled, args, times: int) -> dict:
  """The figures of a program beyond its shapes: bytes by purpose, counted from its HLO."""
  micro, chunks, rows, length = 1, 1, 0, 0
  layout = layout_of(placed, name, args)
  shards = layout.batch_shards
  if name == 'prefill':
    rows, length = args[1].shape
    rows = -(-rows // shards)
  for batch in (a for a in args if isinstance(a, Batch)):
    micro, rows, length = batch.tokens.shape
    rows = rows // shards if rows % shards == 0 else rows
    chunks = -(
      -length
      // head_chunk.chunk_length(rows, length, placed.model.config.padded_vocab_size, placed.compute.head_elements)
    )

  experts = placed.model.config.experts

  def turns(loop):
    if re.search(r'\brounds\)*/while$', loop):
      return 1
    if re.search(r'\bblocks\)*/while$', loop):
      return _blocks(placed, layout, rows * length)
    whole = micro > 1 and re.fullmatch(r'jit\(\w+\)/while', loop)
    return micro if whole else chunks

  totals = cost.count(compiled.as_text(), turns, lambda number: experts.share(number) if experts else 1.0)
  found = collections.Counter()
  for arg in args:
    found.update(parts(arg))
  analysis = compiled.cost_analysis()
  return dict(
    arguments=dict(found),
    totals=totals,
    mesh=layout.mesh,
    micro=micro,
    least=traffic_bound.of_program(placed, layout, name, args, times),
    xla_flops_once=(analysis or {}).get('flops'),
  )


def layout_of(placed: place.PlacedStage, name: str, args) -> Layout:
  """Whose devices a program runs on; a reshard on those that train."""
  if name in SAMPLING:
    return placed.rollout
  first = next(iter(jax.tree.leaves(args)), None)
  mesh = getattr(getattr(first, 'sharding', None), 'mesh', None)
  return placed.score if mesh == placed.score.mesh != placed.train.mesh else placed.train


def _blocks(placed: place.PlacedStage, layout: Layout, tokens: int) -> int:
  """Blocks of rows that the experts of a device multiply, were each as likely.

  Args:
    tokens: of whole rows; `context` splits them.
  """
  tokens //= context_parallel.num_shards(layout)
  experts = placed.model.config.experts
  return -(-tokens * experts.top_k // placed.compute.group_block) + (experts.num // layout.mesh.shape['expert'])


def parts(arg, device=None) -> dict:
  """Bytes a device of an argument, by what they are; or of those on one."""
  if isinstance(arg, TrainState):
    return dict(parameters=memory.size(arg.params, device), optimizer=memory.size(arg.opt_state, device))
  if isinstance(arg, (DecodeState, Prefix)):
    cache = memory.size(arg.cache)
    return dict(kv_cache=cache, other=memory.size(arg) - cache)
  if isinstance(arg, Cache):
    return dict(kv_cache=memory.size(arg))
  if isinstance(arg, Batch):
    return dict(batch=memory.size(arg))
  if isinstance(arg, dict) and 'embed' in arg:
    return dict(parameters=memory.size(arg))
  return dict(other=memory.size(arg))
