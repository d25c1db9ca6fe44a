"""Compiles the programs of a stage for described devices, and returns a row of figures for each program.

No arrays are allocated: roles hold shapes and shardings instead of weights.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxpost.distributed.mesh import Layout, row_shards
from jaxpost.hardware import memory
from jaxpost.losses import head_chunk
from jaxpost.planning import cost, machines, traffic_bound
from jaxpost.programs.compile import Ledger
from jaxpost.programs.generate import DecodeState, Prefilled
from jaxpost.stage import assemble, load_weights, place, precompile
from jaxpost.types import Batch, Cache, TrainState

if TYPE_CHECKING:
  from jaxpost.stage.records import PreparedStage

SAMPLING = tuple(x for x in memory.SAMPLING if x != 'reshard')


@dataclasses.dataclass
class Compiled:
  """A stage and the ledger rows of its compiled programs, one per program."""

  placed: place.PlacedStage
  rows: list[dict]


def compile_stage(prepared: PreparedStage, topology: machines.Topology, only: tuple[str, ...] = ()) -> Compiled:
  """Compiles the programs that a run of this stage compiles before its first step.

  Args:
    prepared: a stage without data or weights; see `dry_run`.
    only: names of the programs to compile; (): all.

  Raises:
    TooLargeError: XLA did not compile a program because it is too large, as for TPUs.
  """
  ledger = Ledger(dry=True, options=machines.compiler_options(topology), only=only)
  placed = place.place_stage(prepared, machines.devices(topology), ledger)
  ledger.look = functools.partial(look, placed)
  params = load_weights.described(placed.model, placed.train, placed.config.model.param_dtype)
  roles, _, engine = assemble.make_parts(placed, params)
  evaluator = assemble.make_evaluator(placed, engine)
  precompile.compile_all(placed, roles, engine, evaluator)
  return Compiled(placed, ledger.rows)


def look(placed: place.PlacedStage, name: str, compiled: jax.stages.Compiled, args: Sequence[Any], times: int) -> dict:
  """Returns the figures of a program that its ledger row lacks: arguments by purpose, costs counted from its HLO.

  times: calls that share the work of one operation; see `programs.compile`.
  """
  micro = micro_run = chunks = 1
  rows = length = 0
  layout = layout_of(placed, name, args)
  shards = layout.batch_shards
  if name == 'prefill':
    rows, length = args[1].shape
    rows = -(-rows // shards)
  cfg = placed.model.config
  for batch in (a for a in args if isinstance(a, Batch)):
    micro, rows, length = batch.tokens.shape
    micro_run = -(-micro * placed.shape.filled // placed.shape.rows)  # the others are empty
    rows = rows // shards if rows % shards == 0 else rows
    chunk = head_chunk.chunk_length(rows, length, cfg.padded_vocab_size, placed.compute.head_elements)
    chunks = -(-length // chunk)

  def iterations(loop: str) -> int:
    """Returns how often a loop runs whose HLO does not say it; `loop` is its op_name, its place in the code."""
    if re.search(r'\brounds\)*/while$', loop):
      return 1
    if re.search(r'\bblocks\)*/while$', loop):
      return _blocks(placed, layout, rows * length)
    over_micro_batches = micro > 1 and re.fullmatch(r'jit\(\w+\)/while', loop)
    return micro_run if over_micro_batches else chunks

  def sent_share(number: int) -> float:
    return cfg.experts.share(number) if cfg.experts else 1.0

  def branch(condition: str) -> bool | None:
    """Returns False for the search of a truncation (top-k, top-p) if the config samples without one."""
    return False if re.search(r'\bchoose\)*/cond$', condition) and draws_from_all(placed) else None

  filled = filled_entries(placed) if name == 'generate' else 0
  totals = cost.count(compiled.as_text() or '', iterations, sent_share, branch, filled)
  arguments: collections.Counter[str] = collections.Counter()
  for arg in args:
    arguments.update(_parts(arg))
  analysis = compiled.cost_analysis()
  return dict(
    arguments=dict(arguments),
    totals=totals,
    mesh=layout.mesh,
    filled=filled,
    slots=compiled.out_info[1].tokens.shape[1] if name in ('generate', 'verify') else 0,
    micro=micro_run,
    least=traffic_bound.of_program(placed, layout, name, args, times),
    xla_flops_once=(analysis or {}).get('flops'),
  )


def filled_entries(placed: place.PlacedStage) -> int:
  """Returns how many cache entries of a slot are filled when a decoding block starts, averaged over a completion.

  Prompts and completions have the maximum length.
  """
  r = placed.config.rollout
  return r.max_prompt_length + max(0, r.max_new_tokens - placed.decode_block) // 2


def draws_from_all(placed: place.PlacedStage) -> bool:
  """Returns True if training samples are drawn from the whole distribution: no truncation, no excluded token."""
  r = placed.config.rollout
  truncated = r.top_k > 0 or r.top_p < 1 or r.min_p > 0 or r.temperature == 0 or r.forbidden_ids or r.min_new_tokens
  return placed.algorithm.on_policy and not truncated


def layout_of(placed: place.PlacedStage, name: str, args: Sequence[Any]) -> Layout:
  """Returns the layout of the phase whose devices run a program; a reshard runs on the training devices."""
  if name in SAMPLING:
    return placed.rollout
  first = next(iter(jax.tree.leaves(args)), None)
  mesh = getattr(getattr(first, 'sharding', None), 'mesh', None)
  has_own_devices = placed.score.mesh != placed.train.mesh
  return placed.score if has_own_devices and mesh == placed.score.mesh else placed.train


def _blocks(placed: place.PlacedStage, layout: Layout, tokens: int) -> int:
  """Returns the expected number of row blocks that the experts of a device multiply, for a uniform router.

  tokens: of whole rows, which the mesh axis `context` splits.
  """
  tokens //= row_shards(layout)
  experts = placed.model.config.experts
  assert experts is not None  # else no program has such a loop
  return -(-tokens * experts.top_k // placed.compute.group_block) + (experts.num // layout.mesh.shape['expert'])


def _parts(arg: Any) -> dict[str, int]:
  """Returns {purpose: bytes on a device} of an argument of a program."""
  if isinstance(arg, TrainState):
    return dict(parameters=memory.size(arg.params), optimizer=memory.size(arg.opt_state))
  if isinstance(arg, (DecodeState, Prefilled)):
    cache = memory.size(arg.cache)
    return dict(kv_cache=cache, other=memory.size(arg) - cache)
  if isinstance(arg, Cache):
    return dict(kv_cache=memory.size(arg))
  if isinstance(arg, Batch):
    return dict(batch=memory.size(arg))
  if isinstance(arg, dict) and 'embed' in arg:
    return dict(parameters=memory.size(arg))
  return dict(other=memory.size(arg))
