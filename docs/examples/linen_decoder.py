"""A custom decoder in flax.linen, which returns hidden states of packed rows.

  python -m launch.train --config=configs/quickstart.py:short \
    --config.model.preset=docs/examples/linen_decoder.py:make --workdir=runs/custom

Legend: B rows, T tokens, D hidden size, H heads, h head size.
"""

import flax.linen as nn
import jax.numpy as jnp

from jaxpost.models import custom


class Decoder(nn.Module):
  """A transformer with learned positions and attention within each packed document."""

  vocab_size: int
  width: int = 64
  heads: int = 4
  layers: int = 2

  @nn.compact
  def __call__(self, tokens, positions, segment_ids):
    """Maps tokens, positions and segment_ids, [B, T] int32 each, to hidden states [B, T, D]."""
    x = nn.Embed(self.vocab_size, self.width, name='embed')(tokens)
    x += nn.Embed(1024, self.width, name='places')(positions)
    order = jnp.arange(tokens.shape[1])
    sees = (order[:, None] >= order)[None] & (segment_ids[:, :, None] == segment_ids[:, None])
    for _ in range(self.layers):
      x += nn.MultiHeadDotProductAttention(self.heads)(nn.RMSNorm()(x), mask=sees[:, None])
      x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.RMSNorm()(x))))
    return nn.RMSNorm()(x)


def make():
  """Returns the model for `config.model.preset`; `axes` names the dimensions to shard."""
  return custom.linen(
    Decoder(259),
    vocab_size=259,
    head='embed/embedding',
    axes=[
      (r'embed/embedding', ('vocab', 'embed')),
      (r'.*/(query|key|value)/kernel', ('embed', 'heads', None)),
      (r'.*/out/kernel', ('heads', None, 'embed')),
    ],
  )
