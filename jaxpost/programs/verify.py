"""The verify program: draws several tokens of each slot at a time, as far as a draft predicts them.

A draw is a function of the slot's key, the position and the logits. A drafted token is accepted if and only if it is
the token that is drawn at its position, so drafts change the speed of sampling and not the completions. This is
speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) with fixed random numbers: there is no rejection step.

Legend: S slots, R of them in a block, T drafted tokens, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct

from jaxpost.models.transformer import flops_per_token
from jaxpost.programs import extend, generate
from jaxpost.programs import sampling as sampling_lib
from jaxpost.programs.cache_storage import where
from jaxpost.programs.compile import Ledger, Program
from jaxpost.programs.generate import Block, DecodeState
from jaxpost.types import Array

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model


@struct.dataclass
class Draft:
  """The tokens that slots are expected to draw next."""

  tokens: Array  # [R, T] int32, padded on the right
  lengths: Array  # [R] int32, number of tokens; 0: no draft


def make_verify(
  model: Model, rows: int, read: int, report: dict[str, int], layout: Layout, compute: Compute, ledger: Ledger
) -> Program:
  """Makes the program verify(weights, state, draft, table) -> (state, Block of T + 1 steps).

  One pass over the model reads all drafted tokens. Each slot accepts the drafted tokens before the first wrong one and
  then draws one more by a decode step, so that it advances by 1 to T + 1 tokens, which `Block.drawn` marks. The cache
  entries of rejected tokens are overwritten by the next block. Arguments are those of `generate.make_generate`.
  """
  decode_one = functools.partial(
    generate.decode_block, model=model, compute=compute, steps=1, rows=rows, read=read, report=report, constrain=layout
  )
  draw = functools.partial(generate.draw, model, report=report, compute=compute, layout=layout)

  def verify(weights, state: DecodeState, draft: Draft, table=None):
    slots, cache = generate.first_slots(state, table, rows=rows, read=read)
    recent, hidden = extend.after_tokens(
      model, weights, cache, draft.tokens, slots.positions, compute=compute, layout=layout
    )
    slots, accepted = _accept(draw, weights, slots, draft, hidden)
    state = generate.with_first_slots(state, slots, recent, table, compute=compute, layout=layout)
    state, last = decode_one(weights, state, table)
    return state, _join(accepted, last)

  def flops(_weights, _state, draft, *_):
    return (draft.tokens.size + rows) * flops_per_token(model.config, read)

  return Program('verify', verify, ledger, generate.block_shardings(layout), donate=(1,), flops=flops)


def _accept(draw: Callable, weights, state: DecodeState, draft: Draft, hidden: jax.Array) -> tuple[DecodeState, Block]:
  """Returns (the state after the accepted tokens of the draft, a block of these tokens).

  draw: (weights, state, uniform) -> Drawn; hidden: [R, T, D], the hidden state of each drafted token.
  """
  numbers = jnp.arange(draft.tokens.shape[1])
  uniforms = jax.vmap(lambda n: sampling_lib.uniforms(state.keys, state.positions + n))(numbers)

  def step(carry, inputs):
    state, accepted = carry  # accepted: [R], all drafted tokens up to here were drawn
    number, uniform, expected, next_hidden = inputs
    # One position at a time: the logits of all positions may take more memory than the model.
    drawn = draw(weights, state, uniform)
    broken = accepted & state.active & drawn.broken
    accepted &= state.active & (drawn.tokens == expected) & (number < draft.lengths)
    advanced, stopped = generate.advance(state.replace(active=accepted), drawn.tokens)
    state = advanced.replace(
      active=jnp.where(accepted, advanced.active, state.active),
      positions=state.positions + accepted,
      hidden=where(accepted, next_hidden, state.hidden),
    )
    return (state, accepted), (drawn, accepted, stopped, broken)

  all_accepted = jnp.ones(len(state.active), bool)
  by_step = (numbers, uniforms, draft.tokens.T, hidden.astype(state.hidden.dtype).swapaxes(0, 1))
  (state, _), (drawn, accepted, stopped, broken) = jax.lax.scan(step, (state, all_accepted), by_step)
  return state, Block(
    tokens=drawn.tokens,
    logprobs=drawn.logprobs,
    behavior_logprobs=drawn.behavior_logprobs,
    drawn=accepted,
    active=state.active,
    finished=jnp.any(stopped, axis=0),
    broken=jnp.any(broken, axis=0),
    top=drawn.top,
    allowed=drawn.allowed,
    experts=(),
  )


def _join(first: Block, last: Block) -> Block:
  """Concatenates two blocks of the same slots along the steps."""
  names = ('tokens', 'logprobs', 'behavior_logprobs', 'drawn', 'top', 'allowed')
  by_step = [{name: getattr(block, name) for name in names} for block in (first, last)]
  joined = jax.tree.map(lambda *steps: jnp.concatenate(steps), *by_step)
  return last.replace(**joined, finished=first.finished | last.finished, broken=first.broken | last.broken)
