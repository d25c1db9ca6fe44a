"""Tests of optimizers by name (optax and optax.contrib), Muon on stacked layers, weight decay, and refused options."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
import tiny
from flax import nnx
from optax import contrib

import jaxpost
from jaxpost.errors import InputError
from jaxpost.models import custom
from jaxpost.models import lora as lora_lib
from jaxpost.models import model as model_lib
from jaxpost.models.parameters import flatten, leaf
from jaxpost.monitor import metrics
from jaxpost.programs import train as programs
from jaxpost.stage import optim
from jaxpost.stage.schema import OptimSection

LR = optax.constant_schedule(1e-2)


def gradients(params, seed):
  random = np.random.RandomState(seed)
  return jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), jnp.float32), params)


def two_updates(optimizer, params):
  """Returns the second of two updates, which depends on momentum."""
  state = optimizer.init(params)
  _, state = optimizer.update(gradients(params, 1), state, params)
  return optimizer.update(gradients(params, 2), state, params)[0]


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config(tie_embeddings=False))


@pytest.fixture(scope='module')
def muon(model):
  params = tiny.params(model)
  section = OptimSection(name='muon', b1=0.8, b2=0.9, weight_decay=0.1)
  return params, jax.jit(lambda: two_updates(optim.make_optimizer(section, LR, model), params))()


@pytest.mark.parametrize(
  'path, inputs', [('layers/q', 32), ('layers/v', 32), ('layers/o', 32), ('layers/gate', 32), ('layers/down', 48)]
)
def test_muon_orthogonalizes_each_matrix_of_a_stack_by_itself(muon, path, inputs):
  """For each layer, the update is that of `optax.contrib.muon` on the layer's matrix [inputs, outputs] alone."""
  params, updates = muon

  def matrix(tree, layer):
    return leaf(tree, path)[layer].reshape(inputs, -1)

  muon_of_matrix = contrib.muon(LR, weight_decay=0.1, consistent_rms=0.2)
  for layer in range(2):
    state = muon_of_matrix.init(matrix(params, layer))
    for seed in (1, 2):
      update, state = muon_of_matrix.update(matrix(gradients(params, seed), layer), state, matrix(params, layer))
    np.testing.assert_allclose(matrix(updates, layer), update, rtol=2e-4, atol=2e-6)


def test_muon_updates_other_parameters_with_adamw(muon, model):
  params, updates = muon
  adamw = optim.make_optimizer(OptimSection(name='adamw', b1=0.8, b2=0.9, weight_decay=0.1), LR, model)
  expected = two_updates(adamw, params)
  for path in ('embed', 'head', 'norm', 'layers/q_norm', 'layers/mlp_norm'):
    np.testing.assert_allclose(leaf(updates, path), leaf(expected, path), rtol=1e-4, atol=1e-7)
  assert not np.allclose(leaf(updates, 'layers/q'), leaf(expected, 'layers/q'), rtol=0.1)


# Matches the names of vectors and filters in any family. All other parameters are matrices or embeddings.
NO_MATRICES = 'norm|bias|sinks|log_decay|skip|conv|router_choice|router_in|router_scale|^scalar$'
DECAYED = {
  'qwen2': tiny.config(biases=('q', 'k', 'v', 'o', 'gate', 'up', 'down', 'sinks')),
  'deepseek_v3': tiny.latent(),
  'llama4': tiny.chunked(),
  'gemma4': tiny.mixed(),
  **{family: tiny.hybrid(family) for family in tiny.HYBRIDS},
}


@pytest.mark.parametrize('family', DECAYED)
def test_weight_decay_applies_to_matrices_and_embeddings_only(family):
  """Norms, biases, decays and time steps of recurrences, and taps of convolutions do not decay. A and B of LoRA do."""
  lora = (2, 4.0, False, lora_lib.ALL_LINEAR)
  model = model_lib.build(dataclasses.replace(DECAYED[family], lora=lora, more_heads=('value',)))
  decayed = flatten(optim.decayed(model))
  assert {path for path, decays in decayed.items() if not decays} == {
    path for path in model.table if re.search(NO_MATRICES, path.rpartition('/')[2])
  }
  assert {path.startswith('lora/') for path, decays in decayed.items() if decays} == {True, False}


def test_weight_decay_reaches_matrices_of_custom_models_whose_axes_have_no_names():
  def make(rngs):
    module = ParameterHolder()
    module.embed, module.scale = nnx.Param(jnp.ones((131, 8))), nnx.Param(jnp.ones(8))
    module.w = nnx.Param(jnp.ones((8, 8)))
    return module

  model = custom.nnx(make, vocab_size=131, head='embed', axes=[('w', (None, None))])
  assert optim.decayed(model) == dict(embed=True, w=True, scale=False)


class ParameterHolder(nnx.Module):
  """Holds parameters and computes nothing."""


def test_muon_state_is_sharded_like_its_parameters(model):
  optimizer = optim.make_optimizer(OptimSection(name='muon'), LR, model)
  shardings = programs.state_shardings(model, optimizer, tiny.one_device())
  state = optimizer.init(tiny.params(model))
  assert jax.tree.structure(shardings.opt_state) == jax.tree.structure(state)
  momentum = shardings.opt_state.inner_states['muon'].inner_state[0].mu
  assert leaf(momentum, 'layers/q') == leaf(shardings.params, 'layers/q')


@pytest.mark.parametrize('lora', [dict(), dict(rank=2)], ids=['all weights', 'adapters'])
def test_a_run_with_muon_resumes_bit_for_bit(tmp_path, lora):
  def rows(folder, *step_counts):
    for steps in step_counts:
      config = tiny.run_config(
        tiny.folder(tmp_path / 'model'),
        algorithm='sft',
        lora=lora,
        data=dict(path='generated:arithmetic:max=99,ops=+,size=40'),
        optim=dict(name='muon', lr=3e-2, weight_decay=0.1),
        train=dict(steps=steps, batch_size=2, row_length=64),
        save=dict(every=2, export=False),
      )
      jaxpost.run(config, tmp_path / folder, rich.console.Console(quiet=True))
    return metrics.comparable_rows(tmp_path / folder / 'metrics.jsonl')

  whole, resumed = rows('a', 4), rows('b', 2, 4)
  assert [row['loss'] for row in whole if row['split'] == 'train'][-1] < whole[0]['loss']
  assert resumed == whole


@pytest.mark.parametrize('name', ['adamw', 'lion', 'adafactor', 'ademamix', 'prodigy', 'muon'])
def test_optimizers_by_name_move_every_parameter(name, model):
  params = tiny.params(model)
  optimizer = optim.make_optimizer(OptimSection(name=name), LR, model)
  update, _ = optimizer.update(gradients(params, 1), optimizer.init(params), params)
  moved = [tiny.largest(x) for x in jax.tree.leaves(update)]
  assert np.isfinite(moved).all() and min(moved) > 0


@pytest.mark.parametrize('name', ['lion', 'yogi', 'adan'])
def test_an_optimizer_has_its_own_defaults(name, model):
  """The defaults are not Adam's: Lion's second moment decays by 0.99, and the epsilon of Yogi is 1e-3."""
  params = tiny.params(model)
  decay = {} if name == 'yogi' else {'weight_decay': 0.0}
  expected = (vars(contrib) | vars(optax))[name](LR, **decay)
  updates = two_updates(optim.make_optimizer(OptimSection(name=name), LR, model), params)
  for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(two_updates(expected, params)), strict=True):
    np.testing.assert_array_equal(x, y)
  changed = optim.make_optimizer(OptimSection(name=name, b1=0.5), LR, model)
  assert any((x != y).any() for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(two_updates(changed, params))))


@pytest.mark.parametrize(
  'section, message',
  [
    (OptimSection(name='muonn'), "has no optimizer 'muonn'; did you mean 'muon'"),
    (OptimSection(name='momo'), 'optax.momo needs the loss in each update'),
    (OptimSection(name='schedule_free_adamw'), 'needs other weights for evaluation'),
    (OptimSection(name='dpsgd'), 'optax.dpsgd needs'),
    (OptimSection(name='scale_by_madgrad'), "has no optimizer 'scale_by_madgrad'"),
    (OptimSection(name='sm3'), 'optax.sm3 needs the same learning rate in each update'),
    (OptimSection(name='sgd', weight_decay=0.1), 'optax.sgd takes none; use adamw'),
    (OptimSection(name='lamb'), 'optax.lamb needs the norm of each matrix of a layer in each update'),
    (OptimSection(name='prodigy', weight_decay=0.1), 'weight_decay: optax.prodigy would apply it to norms'),
    (OptimSection(name='sgd', b1=0.9), 'optim.b1: optax.sgd takes none; leave it -1'),
    (OptimSection(name='lion', eps=1e-8), 'optim.eps: optax.lion takes none; leave it -1'),
    (OptimSection(end_lr=1e-6), 'optim.end_lr: a constant learning rate has no end'),
  ],
)
def test_unsupported_and_ignored_optimizer_options_are_refused(section, message):
  with pytest.raises(InputError, match=message):
    optim.check(section)
