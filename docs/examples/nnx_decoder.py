"""A custom decoder in flax.nnx, with a gated recurrence in place of attention.

  python -m launch.train --config=configs/quickstart.py:short \
    --config.model.preset=docs/examples/nnx_decoder.py:make --workdir=runs/custom

Legend: B rows, T tokens, D hidden size.
"""

import jax
from flax import nnx

from jaxpost.models import custom


class Mixer(nnx.Module):
  """h[t] = a[t] h[t - 1] + (1 - a[t]) u[t], as an associative scan."""

  def __init__(self, width, rngs):
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.gate = nnx.Linear(width, width, rngs=rngs)
    self.value = nnx.Linear(width, width, rngs=rngs)
    self.out = nnx.Linear(width, width, rngs=rngs)

  def __call__(self, x, starts):
    """Mixes x [B, T, D] along T; starts [B, T] is True where a document begins, which resets the state."""
    y = self.norm(x)
    keep = jax.nn.sigmoid(self.gate(y)) * ~starts[..., None]
    new = (1 - keep) * self.value(y)
    _, state = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (keep, new), axis=1)
    return x + self.out(jax.nn.silu(state))


class Decoder(nnx.Module):
  """Alternating mixers and MLPs, with residual connections."""

  def __init__(self, vocab_size, width, layers, rngs):
    self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
    self.mixers = nnx.List([Mixer(width, rngs) for _ in range(layers)])
    self.widen = nnx.List([nnx.Linear(width, 4 * width, rngs=rngs) for _ in range(layers)])
    self.narrow = nnx.List([nnx.Linear(4 * width, width, rngs=rngs) for _ in range(layers)])
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.head = nnx.Linear(width, vocab_size, use_bias=False, rngs=rngs)

  def __call__(self, tokens, positions, segment_ids):
    """Maps tokens, positions and segment_ids, [B, T] int32 each, to hidden states [B, T, D]."""
    x = self.embed(tokens)
    for mix, widen, narrow in zip(self.mixers, self.widen, self.narrow):
      x = mix(x, positions == 0)
      x += narrow(jax.nn.gelu(widen(x)))
    return self.norm(x)


def make():
  """Returns the model for `config.model.preset`; `axes` names the dimensions to shard."""
  return custom.nnx(
    lambda rngs: Decoder(259, 64, 4, rngs),
    vocab_size=259,
    head='head/kernel',
    axes=[(r'head/kernel', ('embed', 'vocab'))],
  )
