"""Tests of rematerialization (model.remat): gradients stay the same, and the backward pass stores a bounded size."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import test_lora_experts
import tiny

from jaxpost.matmul import compute_for
from jaxpost.models import model as model_lib
from jaxpost.models import presets

MODELS = {
  'dense': tiny.config(),
  'biases': tiny.config(biases=('q', 'k', 'v', 'up')),
  'post_norms': tiny.config(norms='both'),
  'latent': tiny.latent(),
  'experts': dataclasses.replace(test_lora_experts.config(), lora=None),
}


def gradient(model, compute, ids, g):
  """Returns a function of the parameters: the gradient of a sum of the hidden states weighted by `g`."""
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

  def total(params):
    hidden = model.forward(params, ids, positions, jnp.ones_like(positions), compute=compute, constrain=lambda x, *_: x)
    return jnp.sum(hidden.astype(jnp.float32) * g)

  return jax.grad(total)


@pytest.mark.parametrize('unroll', [True, False])
@pytest.mark.parametrize('name', MODELS)
def test_gradients_do_not_depend_on_remat(name, unroll):
  model = model_lib.build(MODELS[name])
  params, ids = tiny.params(model), tiny.tokens((2, 12))
  g = jax.random.normal(jax.random.key(1), (2, 12, model.config.hidden_size))
  grads = {
    remat: jax.jit(gradient(model, dataclasses.replace(tiny.EXACT, unroll=unroll, remat=remat), ids, g))(params)
    for remat in ('none', 'dots', 'full')
  }
  for remat in ('dots', 'full'):
    for a, b in zip(jax.tree.leaves(grads[remat]), jax.tree.leaves(grads['none']), strict=True):
      assert tiny.largest(a - b) <= 1e-5 * max(tiny.largest(b), 1e-3)


def test_dots_repeats_no_projection():
  """Its FLOPs are those of storing everything, except for attention."""
  model = model_lib.build(tiny.config(hidden_size=128, intermediate_size=512))
  params, ids = tiny.params(model), tiny.tokens((2, 12))
  flops = {}
  for remat in ('none', 'dots', 'full'):
    compute = dataclasses.replace(tiny.EXACT, remat=remat)
    compiled = jax.jit(gradient(model, compute, ids, jnp.ones(()))).lower(params).compile()
    flops[remat] = compiled.cost_analysis()['flops']
  assert flops['dots'] <= 1.03 * flops['none'] and flops['full'] >= 1.2 * flops['none'], flops


def stored_bytes(remat, quantize=''):
  """Returns the bytes per token and layer that Qwen3-1.7B stores for its backward pass on an accelerator."""
  cfg = dataclasses.replace(presets.PRESETS['qwen3_1_7b'], num_layers=4)
  model = model_lib.build(cfg)
  compute = compute_for('gpu', 'bfloat16', remat, 'chunked')
  params = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
  )

  def of_rows(rows):
    ids = jnp.zeros((rows, 4096), jnp.int32)
    positions = jnp.zeros((rows, 4096), jnp.int32)

    def pull(params):
      def run(p):
        return model.forward(p, ids, positions, positions, compute=compute, constrain=lambda x, *_: x)

      return jax.vjp(run, params)[1]

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pull, params)))

  return (of_rows(2) - of_rows(1)) / 4096 / cfg.num_layers


def test_stored_bytes_per_token_and_layer_are_bounded():
  """`dots` keeps the input, q, k, v, the results of attention and its projection, gate and up, in bfloat16."""
  assert stored_bytes('auto') == stored_bytes('dots') <= 50_000
  assert stored_bytes('full') <= 10_000
  assert stored_bytes('none') > 2 * stored_bytes('dots')


def test_auto_remat_is_none_on_cpu_and_dots_on_accelerators():
  assert compute_for('cpu', 'bfloat16', 'auto').remat == 'none'
  for platform in ('gpu', 'tpu'):
    assert compute_for(platform, 'bfloat16', 'auto').remat == 'dots'
    assert compute_for(platform, 'bfloat16', 'full').remat == 'full'
