"""Sparse attention (DeepSeek-V3.2, GLM): the choice of tokens by the indexer, caches, adapters and config fields."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import proofs
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import config_export, config_json
from jaxpost.models import attention_xla, layers, sparse_attention, transformer
from jaxpost.models import model as model_lib

TOPK = tiny.sparse().index_topk


@functools.cache
def build():
  model = model_lib.build(tiny.sparse())
  return model, tiny.params(model)


@pytest.mark.parametrize('fields', [dict(index_topk=6), dict(index_interleaved=True)], ids=str)
def test_each_field_changes_the_logits(fields):
  ids, (model, params) = tiny.tokens((1, 20)), build()
  other = model_lib.build(tiny.sparse(**fields))
  expected = tiny.logits(model, params, ids)
  assert tiny.largest(tiny.logits(other, params, ids) - expected) > 1e-3 * tiny.largest(expected)


def test_attention_is_dense_up_to_index_topk_tokens():
  """Short rows equal dense attention to the bit, and the first tokens of longer rows do up to rounding."""
  model, params = build()
  dense = model_lib.build(tiny.latent())
  ids = tiny.tokens((2, TOPK + 4))
  short, long = (tiny.logits(model, params, ids[:, :n]) for n in (TOPK, TOPK + 4))
  expected = tiny.logits(dense, params, ids)
  np.testing.assert_array_equal(short, tiny.logits(dense, params, ids[:, :TOPK]))
  assert tiny.largest(long[:, :TOPK] - expected[:, :TOPK]) <= 1e-5 * tiny.largest(expected)
  assert tiny.largest(long[:, TOPK:] - expected[:, TOPK:]) > 1e-2 * tiny.largest(expected)


def test_ties_of_the_indexer_choose_the_earliest_tokens():
  """The query and its weight are 1, so the scores are the keys after a ReLU."""
  scores = jnp.array([0.0, 2.0, 0.0, 0.0, 1.0, 0.0, -1.0, 9.0])
  mask = jnp.arange(8) != 7  # the last key is masked, in spite of its score of 9
  cfg = tiny.sparse(index_topk=4, index_heads=1, index_dim=1)
  query = jnp.ones((1, 1, 1, 1))
  chosen = sparse_attention.choose(mask[None, None], query, query[0], scores[None, :, None], cfg, compute=tiny.EXACT)
  np.testing.assert_array_equal(np.flatnonzero(chosen), [0, 1, 2, 4])  # the ReLU makes -1 a 0, which comes too late
  short_mask = jnp.arange(8) < 3
  chosen = sparse_attention.choose(
    short_mask[None, None], query, query[0], scores[None, :, None], cfg, compute=tiny.EXACT
  )
  np.testing.assert_array_equal(np.flatnonzero(chosen), [0, 1, 2])


def test_chunked_and_rematerialized_rows_match_plain_attention(monkeypatch):
  """Forward and gradient of packed documents, one of them no longer than index_topk; the indexer is frozen."""
  model, params = build()
  ids, segments = tiny.tokens((2, 22)), np.repeat([[1, 2, 3, 0]], 2, axis=0).repeat([4, 9, 7, 2], axis=1)

  def grads_and_hidden(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute, segments=segments)[:, :20]
      return jnp.sum(jnp.cos(x)), x

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, expected = grads_and_hidden()
  monkeypatch.setattr(attention_xla, '_LONG', 16)
  chunked_grads, chunked = grads_and_hidden(unroll=False, remat='dots', q_chunk=3)
  assert tiny.largest(chunked - expected) <= 1e-5 * tiny.largest(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_less(tiny.largest(a - b), 1e-4 * tiny.largest(b) + 1e-9), chunked_grads, grads
  )
  frozen = model_lib.freeze(model, '').frozen
  assert frozen == {path for path in model.table if '/index_' in path}
  assert not any(np.any(g) for g in model_lib.split(grads, model_lib.freeze(model, ''))[1]['layers'].values())


@pytest.mark.parametrize('pages', [0, 4])
def test_cache_holds_the_keys_of_the_indexer(pages):
  model, params = build()
  engine = proofs.engine(model, max_new_tokens=24, page_size=pages)
  engine.load(params, version=0)
  cache = engine.programs.init.outputs().cache
  assert {(x.shape[1], x.shape[3], y.shape[1], y.shape[3]) for x, y in zip(cache.k, cache.v)} == {(1, 12 + 4, 1, 6)}
  proofs.check_slots(model, params, engine)


def test_64_greedy_tokens_equal_those_of_transformers(tmp_path):
  # With few heads, scores at the limit of the top k are often 0, and torch.topk may choose any of the ties.
  proofs.check_greedy_text(tiny.sparse(index_heads=16, attention_scale=10**-0.5), tmp_path)


@pytest.fixture
def folder(tmp_path):
  return tiny.folder(tmp_path / 'model', family='deepseek_v32', num_layers=2, num_heads=2, num_kv_heads=2)


def test_grpo_step_has_matching_sampler_and_trainer_logprobs(folder, tmp_path):
  proofs.check_grpo(folder, tmp_path / 'run', targets='q_b|kv_b|o')


@pytest.mark.parametrize('quantized', ['', 'int8'])
def test_adapters_match_merged_weights_on_plain_and_int8_bases(tmp_path, quantized):
  proofs.check_adapters(tiny.sparse(lora=(2, 5.0, False, 'q_a|q_b|kv_a|kv_b|o')), quantized, tmp_path)


def test_adapters_of_the_indexer_are_refused():
  with pytest.raises(InputError, match='matches dense/index_q; routers and indexers have no adapters'):
    model_lib.build(tiny.sparse(lora=(2, 5.0, False, 'index_q|o')))


def test_resumed_run_is_bitwise_identical_and_keeps_the_indexer(folder, tmp_path):
  """The weight decay would change parameters without a gradient if they were not frozen."""
  after = proofs.check_resume(folder, tmp_path, optim=dict(lr=3e-3, weight_decay=0.1))
  before = proofs.tensors(pathlib.Path(folder))
  unchanged = {name for name, x in before.items() if np.array_equal(x, after[name])}
  assert unchanged == {name for name in before if 'indexer' in name or 'correction_bias' in name}


RAW = dict(
  model_type='deepseek_v32',
  vocab_size=129_280,
  hidden_size=7168,
  intermediate_size=18_432,
  num_hidden_layers=61,
  num_attention_heads=128,
  num_key_value_heads=128,
)
GLM = RAW | dict(model_type='glm_moe_dsa', vocab_size=154_880, hidden_size=6144, intermediate_size=12_288)
GLM |= dict(num_hidden_layers=78, num_attention_heads=64, num_key_value_heads=64)


@pytest.mark.parametrize('raw, size, active', [(RAW, 672, 37.5), (GLM, 744, 40)], ids=['deepseek_v32', 'glm_moe_dsa'])
def test_parameter_counts_match_the_published_sizes(raw, size, active):
  cfg, unread = config_json.from_hf(raw | dict(rope_interleave=True, index_topk_freq=1), 'here')
  assert not unread and (cfg.index_topk, cfg.index_dim) == (2048, 128)
  assert config_json.from_hf(config_export.to_hf(cfg), 'here') == (cfg, [])
  assert transformer.num_params(cfg) / 1e9 == pytest.approx(size, rel=0.005)
  assert transformer.num_active(cfg, transformer.param_table(cfg)) / 1e9 == pytest.approx(active, rel=0.05)


def test_mlp_layer_types_sets_the_first_expert_layer():
  """`transformers` writes the list next to the default of the older field, first_k_dense_replace."""
  kinds = ['dense'] * 5 + ['sparse'] * 56
  cfg, _ = config_json.from_hf(RAW | dict(mlp_layer_types=kinds, first_k_dense_replace=3), 'here')
  assert cfg.experts.first_dense == 5


@pytest.mark.parametrize(
  'raw, fields, words',
  [
    (RAW, dict(index_topk=0), 'index_topk=0'),
    (RAW, dict(num_hidden_layers='2'), 'num_hidden_layers='),
    (RAW, dict(mlp_layer_types=1), 'mlp_layer_types=1 must be a list'),
    (RAW, dict(index_head_dim=32), 'index_head_dim=32 must be at least qk_rope_head_dim=64'),
    (RAW, dict(index_n_heads='64'), "index_n_heads='64'"),
    (RAW, dict(q_lora_rank=None), 'q_lora_rank=None'),
    (RAW, dict(indexer_rope_interleave=True), 'indexer_rope_interleave=True'),
    (GLM, dict(indexer_rope_interleave=False), 'indexer_rope_interleave=False'),
    (RAW, dict(rope_interleave=False), 'rope_interleave=False'),
    (GLM, dict(index_topk_freq=4), 'shared.* is not built'),
    (GLM, dict(index_topk_pattern='FS' * 39), 'shared.* is not built'),
    (GLM, dict(indexer_types=['full'] * 77), '78 times full'),
    (RAW, dict(layer_types=['full_attention'] * 61), 'layer_types'),
    (RAW, dict(mlp_layer_types=['sparse'] * 60 + ['dense']), 'mlp_layer_types'),
    (RAW, dict(mlp_layer_types='dense'), 'mlp_layer_types'),
    (RAW, dict(indexer_types=5), 'indexers of layers=5'),
    (RAW, dict(index_topk_freq='4'), 'config.json'),
  ],
)
def test_unsupported_config_is_refused_with_its_field_name(raw, fields, words):
  with pytest.raises(InputError, match=words) as e:
    config_json.from_hf(raw | fields, 'config.json')
  assert '\n' not in str(e.value) and str(e.value).startswith('config.json: ')


@pytest.mark.parametrize('parts, words', [(1, 'config.model.attention: splash'), (2, 'config.mesh: context')])
def test_splash_kernel_and_context_axis_are_refused_for_long_rows(monkeypatch, parts, words):
  """Rows that are longer than index_topk need attention without kernels, on undivided rows."""
  model, _ = build()
  monkeypatch.setattr(layers, 'row_shards', lambda layout: parts)
  compute = dataclasses.replace(tiny.EXACT, attention='splash', forced=True)
  ids = tiny.tokens((2, 20))
  forward = functools.partial(model.forward, compute=compute)
  with pytest.raises(InputError, match=words):
    jax.eval_shape(forward, jax.eval_shape(model.init, jax.random.key(0)), ids, ids, ids)
