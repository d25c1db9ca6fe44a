"""Tests of `matmul.einsum`, the matrix product of models and losses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import matmul

X_SHAPE, W_SHAPE = (2, 3, 4, 5), (4, 5, 6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_contracted_axes_are_in_memory_order(dtype):
  # In another order XLA transposes both operands: a sampler copied the output projection at every token.
  def product(x, w):
    return matmul.einsum('btnh,nhd->btd', x, w, dtype)

  @jax.jit
  def product_and_gradients(x, w):
    out, pull_back = jax.vjp(product, x, w)
    return out, pull_back(out)

  text = product_and_gradients.lower(jnp.ones(X_SHAPE), jnp.ones(W_SHAPE)).as_text()
  products = re.findall(r'contracting_dims = \[([0-9, ]*)\] x \[([0-9, ]*)\]', text)
  assert len(products) == 3  # forward, and the gradients of x and w
  for axes in (axes.split(', ') for pair in products for axes in pair):
    assert axes == sorted(axes)


def test_product_and_gradients_are_those_of_numpy():
  random = np.random.RandomState(0)
  x, w, g = random.randn(*X_SHAPE), random.randn(*W_SHAPE), random.randn(2, 3, 6)

  def product(x, w):
    return matmul.einsum('btnh,nhd->btd', x, w, 'float32')

  out, pull_back = jax.vjp(product, jnp.float32(x), jnp.float32(w))
  dx, dw = pull_back(jnp.float32(g))
  np.testing.assert_allclose(out, np.einsum('btnh,nhd->btd', x, w), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, np.einsum('btd,nhd->btnh', g, w), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dw, np.einsum('btnh,btd->nhd', x, g), rtol=1e-5, atol=1e-5)
