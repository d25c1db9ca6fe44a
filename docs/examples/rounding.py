"""Shows how far two computations of one model in bfloat16 differ that only sum in another order.

    python docs/examples/rounding.py

A decoder with random weights is computed exactly but for what is rounded to bfloat16, as on an accelerator: the
results of products, the residual stream, and what products read. Sums are then taken in parts, as other kernels would,
or the weights of attention are rounded. Printed are the KL divergence of the model from the exact one and the root mean
square difference of log-probs.

Legend: B rows, T tokens, D hidden size, F MLP size, H heads, V vocabulary, L layers.
"""

import functools

import jax
import jax.numpy as jnp

B, T, D, F, H, V, L = 2, 256, 512, 1536, 8, 4096, 28


def rounded(x):
  """Rounds to bfloat16, which XLA must not remove."""
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def weights(key, *shape):
  return rounded(jax.random.normal(key, shape) * shape[-2] ** -0.5)


def product(x, w, parts):
  """Computes x @ w, summed in `parts`."""
  xs, ws = jnp.split(x, parts, axis=-1), jnp.split(w, parts, axis=0)
  return rounded(sum(a @ b for a, b in zip(xs, ws)))


def norm(x):
  return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@functools.partial(jax.jit, static_argnames=('parts', 'round_attention'))
def log_probs(tokens, table, layers, head, parts=1, round_attention=False):
  """Returns [B, T, V]."""

  def layer(x, p):
    q, k, v = jnp.split(product(rounded(norm(x)), p['qkv'], parts).reshape(B, T, 3 * H, -1), 3, axis=2)
    q, k = rounded(norm(q) * q.shape[-1] ** -0.5), rounded(norm(k))
    scores = jnp.where(jnp.tri(T, dtype=bool), jnp.einsum('bthd,bshd->bhts', q, k), -jnp.inf)
    weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    out = jnp.einsum('bhts,bshd->bthd', rounded(weight) if round_attention else weight, v)
    x = rounded(x + product(rounded(out / total.swapaxes(1, 2)).reshape(B, T, -1), p['o'], parts))
    gate, up = jnp.split(product(rounded(norm(x)), p['gate_up'], parts), 2, axis=-1)
    return rounded(x + product(rounded(jax.nn.silu(gate) * up), p['down'], parts)), None

  x, _ = jax.lax.scan(layer, table[tokens], layers)
  return jax.nn.log_softmax(rounded(norm(x)) @ head)


def main():
  keys = jax.random.split(jax.random.key(0), 7)
  sizes = dict(qkv=(D, 3 * D), o=(D, D), gate_up=(D, 2 * F), down=(F, D))
  layers = {name: weights(key, L, *size) for (name, size), key in zip(sizes.items(), keys)}
  tokens = jax.random.randint(keys[4], (B, T), 0, V)
  given = tokens, weights(keys[5], V, D) * V**0.5, layers, weights(keys[6], D, V)
  exact = log_probs(*given)
  for label, options in {
    'products summed in 8 parts': dict(parts=8),
    'weights of attention rounded': dict(round_attention=True),
    'both': dict(parts=8, round_attention=True),
  }.items():
    d = log_probs(*given, **options) - exact
    kl = jnp.mean(jnp.sum(jnp.exp(exact) * (jnp.expm1(d) - d), axis=-1))
    print(f'{label}: KL {kl:.1e}, RMS difference {jnp.sqrt(jnp.mean(jnp.sum(jnp.exp(exact) * d * d, axis=-1))):.1e}')


if __name__ == '__main__':
  main()
