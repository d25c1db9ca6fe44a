"""Llama 4: chunked attention and sparse layers among dense ones, besides the checks of tests/test_families.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import proofs
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import config_export, config_json
from jaxpost.models import model as model_lib
from jaxpost.models import transformer

FULL, CHUNKED = 'full_attention', 'chunked_attention'


@functools.cache
def model_and_params():
  model = model_lib.build(tiny.chunked())
  return model, tiny.params(model)


def test_scanned_layers_equal_unrolled_layers():
  """Hidden states and gradients of rows with several documents; `q_chunk` is no multiple of the model's chunk size."""
  model, params = model_and_params()
  ids = tiny.tokens((2, 20))
  segments = np.repeat([[1, 2, 3, 0]], 2, axis=0).repeat([3, 9, 6, 2], axis=1)
  at = np.concatenate([np.arange(n) for n in (3, 9, 6, 2)])[None].repeat(2, axis=0)

  def grads_and_hidden(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute, segments=segments, positions=at)[:, :18]
      return jnp.sum(jnp.cos(x)), x

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, expected = grads_and_hidden()
  scanned_grads, scanned = grads_and_hidden(unroll=False, remat='full', q_chunk=4)
  assert tiny.largest(scanned - expected) <= 1e-5 * tiny.largest(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_less(tiny.largest(a - b), 1e-4 * tiny.largest(b) + 1e-9), scanned_grads, grads
  )


def test_branches_of_a_shared_prompt_are_chunked_by_position():
  """The prompt ends inside a chunk, so that the beginning of each branch attends to the end of the prompt."""
  model, params = model_and_params()
  ids, branch_positions = tiny.tokens((1, 28)), np.arange(8, 18)
  expected = [
    tiny.hidden(model, params, np.concatenate([ids[:, :8], x], 1))[0, 8:] for x in (ids[:, 8:18], ids[:, 18:])
  ]
  branches = np.repeat([0, 1, 2], (8, 10, 10))[None]
  positions = np.concatenate([np.arange(8), branch_positions, branch_positions])[None]
  segments = np.ones((1, 28), np.int32)
  rows = dict(branch_ids=branches, compute=tiny.EXACT)
  hidden = jax.jit(lambda p: model.forward(p, ids, positions, segments, **rows))(params)[0]
  assert tiny.largest(hidden[8:] - np.concatenate(expected)) <= 1e-5 * tiny.largest(expected)


@pytest.mark.parametrize('pages', [0, 4])
def test_decoding_in_slots_equals_forward_pass(pages):
  model, params = model_and_params()
  engine = proofs.engine(model, max_new_tokens=24, page_size=pages)
  engine.load(params, version=0)
  proofs.check_slots(model, params, engine)


def test_64_greedy_tokens_equal_those_of_transformers(tmp_path):
  proofs.check_greedy_text(tiny.chunked(), tmp_path)


def test_grpo_trains_llama4(tmp_path):
  folder = tiny.folder(tmp_path / 'model', family='llama4_text', num_layers=4, num_kv_heads=2)
  proofs.check_grpo(folder, tmp_path / 'run', targets='q|o|gate|shared_down')


@pytest.mark.parametrize('quantized', ['', 'int8'])
def test_adapters_on_plain_and_quantized_base(tmp_path, quantized):
  """PEFT has no names for adapters of experts, so that only the quantized case, which exports nothing, has these."""
  targets = 'q|k|v|o|shared_gate' + '|gate|up|down' * bool(quantized)
  params = proofs.check_adapters(tiny.chunked(lora=(2, 5.0, False, targets)), quantized, tmp_path)
  assert {*params['lora']} == {'dense', 'layers'}


SCOUT = dict(
  model_type='llama4_text',
  vocab_size=202_048,
  hidden_size=5120,
  num_hidden_layers=48,
  num_attention_heads=40,
  attn_temperature_tuning=4,
  for_llm_compressor=False,
  max_position_embeddings=10_485_760,
  rope_scaling=dict(rope_type='llama3', factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0)
  | dict(original_max_position_embeddings=8192),
)


def test_published_scout_and_maverick_configs_have_known_sizes():
  cfg, unread = config_json.from_hf(SCOUT, 'config.json')
  assert not unread and cfg.layer_windows[:4] == (8192, 8192, 8192, 0) and cfg.layer_ropes[:4] == (0, 0, 0, 1)
  assert config_json.from_hf(config_export.to_hf(cfg), 'here') == (cfg, [])
  assert config_json.from_hf(SCOUT | dict(no_rope_layers=[], pretraining_tp=2), 'config.json') == (cfg, [])
  assert transformer.num_params(cfg) == pytest.approx(107.8e9, rel=0.005)
  assert transformer.num_active(cfg, transformer.param_table(cfg)) == pytest.approx(17.2e9, rel=0.01)
  # On average, a token attends to half of its chunk.
  seen = [transformer.flops_per_token(cfg, n) for n in (0, 4096, 65_536)]
  assert seen[1] - seen[0] == 2 * 40 * 4096 * 256 * 48 and seen[2] - seen[1] == 2 * 40 * (65_536 - 4096) * 256 * 12
  maverick = SCOUT | dict(num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False, rope_scaling=None)
  cfg, _ = config_json.from_hf(maverick, 'config.json')
  assert not cfg.qk_norm and cfg.sparse == tuple(range(1, 48, 2))
  assert transformer.num_params(cfg) == pytest.approx(400.7e9, rel=0.005)


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(attention_chunk_size=None), 'attention_chunk_size=None must'),
    (dict(floor_scale=0), 'floor_scale=0 must'),
    (dict(attn_scale=-0.1), 'attn_scale'),
    (dict(attn_temperature_tuning='yes'), 'attn_temperature_tuning'),
    (dict(layer_types=[CHUNKED]), 'layer_types'),
    (dict(layer_types=[FULL, 'sliding_attention'] * 24), 'layer_types'),
    (dict(no_rope_layers=[1, 0]), 'no_rope_layers'),
    (dict(moe_layers=[]), r'moe_layers=\[\] must'),
    (dict(moe_layers=[3, 48]), 'moe_layers'),
    (dict(router_jitter_noise=0.1), 'router_jitter_noise'),
    (dict(quantization_config=dict(quant_method='compressed-tensors')), 'quantization_config'),
  ],
)
def test_unsupported_fields_are_refused_by_name(fields, words):
  with pytest.raises(InputError, match=f'^config.json: .*{words}'):
    config_json.from_hf(SCOUT | fields, 'config.json')
