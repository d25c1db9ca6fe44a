"""Gemma 4 (attention layers of two sizes): layer scan, caches, adapters, config fields and shared key-value layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import proofs
import pytest
import safetensors.numpy
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import config_export, config_json, hf, hf_export
from jaxpost.models import mixed_attention, transformer
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts

FULL, LOCAL = 'full_attention', 'sliding_attention'
EXPERTS = dict(shared_layers=0, wide_shared_mlp=False, values_are_keys=True, full_kv_heads=1) | dict(
  experts=Experts(5, 2, 12, shared=1, shared_size=48), layer_windows=(6, 0, 6, 0)
)
VARIANTS = {'e': {}, 'experts': EXPERTS}


@functools.cache
def build(variant):
  model = model_lib.build(tiny.mixed(**VARIANTS[variant]))
  return model, tiny.params(model)


@pytest.mark.parametrize('fields', [dict(attention_scale=0.5), dict(layer_windows=(3, 0, 3, 0))], ids=str)
def test_each_field_changes_the_logits(fields):
  ids, (model, params) = tiny.tokens((1, 20)), build('e')
  other = model_lib.build(tiny.mixed(**fields))
  expected = tiny.logits(model, params, ids)
  assert tiny.largest(tiny.logits(other, params, ids) - expected) > 1e-3 * tiny.largest(expected)


@pytest.mark.parametrize('variant', VARIANTS)
def test_scanned_layers_with_remat_match_unrolled_layers(variant):
  """Rows have several documents. Without shared layers, the scan is over pairs of layers."""
  model, params = build(variant)
  ids = tiny.tokens((2, 20))
  segments = np.repeat([[1, 2, 3, 0]], 2, axis=0).repeat([3, 9, 6, 2], axis=1)

  def grads_and_hidden(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute, segments=segments)[:, :18]
      return jnp.sum(jnp.cos(x)), x

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, expected = grads_and_hidden()
  scanned_grads, scanned = grads_and_hidden(unroll=False, remat='full')
  assert tiny.largest(scanned - expected) <= 1e-5 * tiny.largest(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_less(tiny.largest(a - b), 1e-4 * tiny.largest(b) + 1e-9), scanned_grads, grads
  )
  for stack in {*model.config.layer_stacks}:
    assert not np.any(grads[stack]['scalar'])  # the scale of a layer is not trained


@pytest.mark.parametrize('variant, pages', [('e', 4), ('experts', 0)])
def test_slots_have_caches_of_two_sizes(variant, pages):
  model, params = build(variant)
  engine = proofs.engine(model, max_new_tokens=24, page_size=pages)
  engine.load(params, version=0)
  cache = engine.programs.init.outputs().cache
  assert [(x.shape[1], x.shape[3]) for x in cache.k] == [(h, sizes[0]) for h, sizes in model.config.layer_caches]
  assert len(cache.k) == 4 - model.config.shared_layers
  proofs.check_slots(model, params, engine)


def test_64_greedy_tokens_equal_those_of_transformers(tmp_path):
  proofs.check_greedy_text(tiny.mixed(tie_embeddings=False), tmp_path)


@pytest.fixture
def folder(tmp_path):
  return tiny.folder(tmp_path / 'model', family='gemma4_text', num_layers=4, num_kv_heads=2)


def test_grpo_step_has_matching_sampler_and_trainer_logprobs(folder, tmp_path):
  proofs.check_grpo(folder, tmp_path / 'run', targets='q|o|side_gate')


@pytest.mark.parametrize('quantized', ['', 'int8'])
def test_adapters_match_merged_weights_on_plain_and_int8_bases(tmp_path, quantized):
  targets = 'q|k|o|gate|up|side_gate|side_out'
  params = proofs.check_adapters(tiny.mixed(lora=(2, 5.0, False, targets)), quantized, tmp_path)
  assert 'k' in params['lora']['local'] and 'k' not in params['lora']['local_shared']


def test_resumed_run_is_bitwise_identical(folder, tmp_path):
  proofs.check_resume(folder, tmp_path)


RAW = dict(
  model_type='gemma4_text',
  vocab_size=262_144,
  hidden_size=1536,
  intermediate_size=6144,
  num_hidden_layers=35,
  num_attention_heads=8,
  num_key_value_heads=1,
  num_kv_shared_layers=20,
  use_double_wide_mlp=True,
  layer_types=[LOCAL, LOCAL, LOCAL, LOCAL, FULL] * 7,
)


def test_published_config_fields_and_size_are_read():
  cfg, unread = config_json.from_hf(RAW, 'config.json')
  assert not unread and (cfg.full_head_dim, cfg.full_kv_heads, cfg.side_size) == (512, 1, 256)
  assert [cfg.place_in_cache(i) for i in (0, 14, 15, 19, 34)] == [0, 14, 13, 14, 14]
  assert len(cfg.layer_caches) == 15
  assert config_json.from_hf(config_export.to_hf(cfg), 'here') == (cfg, [])
  # The per-layer embeddings are looked up, so they count as parameters, but add no FLOPs.
  assert transformer.num_params(cfg) == pytest.approx(4.63e9, rel=0.01)
  assert transformer.flops_per_token(cfg, 1024) == pytest.approx(2 * 2.3e9, rel=0.05)


def test_layer_numbers_in_per_layer_config_may_have_leading_zeros():
  """`transformers` 5.23 writes them with leading zeros for more than ten layers."""
  raw = {k: v for k, v in RAW.items() if k not in ('global_head_dim', 'num_global_key_value_heads')}
  full = [i for i, kind in enumerate(RAW['layer_types']) if kind == FULL]
  blocks = {f'{i:02}': dict(head_dim=512, num_key_value_heads=1) for i in full}
  assert config_json.from_hf(raw | dict(per_layer_config=blocks), 'here')[0] == config_json.from_hf(RAW, 'here')[0]
  with pytest.raises(InputError, match='per_layer_config'):
    config_json.from_hf(raw | dict(per_layer_config=blocks | {'00': blocks['04']}), 'here')


def test_unused_key_tensors_of_shared_layers_are_ignored(tmp_path):
  """Published folders hold keys and values for layers that use the keys and values of other layers."""
  model, params = build('e')
  hf_export.save(tmp_path, model, params)
  tensors = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  tensors['model.layers.2.self_attn.k_proj.weight'] = np.zeros((20, 36), 'f')
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
  hf.check(tmp_path, model.config)
  del tensors['model.layers.0.self_attn.k_proj.weight']
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
  with pytest.raises(InputError, match=r'layers\.0\.self_attn\.k_proj.* is missing'):
    hf.check(tmp_path, model.config)


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(num_kv_shared_layers=34), 'num_kv_shared_layers=34'),
    (dict(num_kv_shared_layers='2'), 'num_kv_shared_layers'),
    (dict(layer_types=[FULL] + [LOCAL] * 34), 'the last layer has a sliding window'),
    (dict(use_bidirectional_attention='all'), 'use_bidirectional_attention'),
    (dict(vocab_size_per_layer_input=1000), 'vocab_size_per_layer_input=1000'),
    (dict(global_head_dim=0), 'global_head_dim=0'),
    (dict(per_layer_config={'3': dict(head_dim=16)}), 'per_layer_config'),
    (dict(attention_k_eq_v=True, num_global_key_value_heads=3), 'num_global_key_value_heads=3 must divide'),
    (dict(attention_k_eq_v='yes'), 'attention_k_eq_v'),
    (dict(attention_bias=True), 'attention_bias'),
    (dict(enable_moe_block=True, num_experts=4, top_k_experts=5, moe_intermediate_size=8), 'of 4 experts'),
  ],
)
def test_unsupported_config_is_refused_with_its_field_name(fields, words):
  with pytest.raises(InputError, match=f'^config.json: .*{words}') as e:
    config_json.from_hf(RAW | fields, 'config.json')
  assert '\n' not in str(e.value)


def test_each_layer_gets_its_own_side_input():
  """Entry i of the side inputs that are computed for all layers at once goes to layer i, whichever stack holds it."""
  model, params = build('e')
  ids = tiny.tokens((1, 5))
  x = transformer.embed(params, ids, model.config, tiny.EXACT, transformer.unconstrained)
  by_stack = mixed_attention.with_side_inputs(params, ids, x, model.config, tiny.EXACT, transformer.unconstrained)
  unrolled_params = params | {'layers': [{} for _ in range(4)]}
  by_layer = mixed_attention.with_side_inputs(
    unrolled_params, ids, x, model.config, tiny.EXACT, transformer.unconstrained
  )
  order = model.config.layer_stacks
  for i, stack in enumerate(order):
    np.testing.assert_array_equal(by_layer['layers'][i]['side'], by_stack[stack]['side'][order[:i].count(stack)])
