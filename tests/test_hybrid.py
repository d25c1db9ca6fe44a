"""Tests of models with other mixers than attention: delta rule, convolution and state space.

tests/test_families.py covers what these have in common with other families.

Legend: B rows, T tokens, S slots.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import proofs
import pytest
import safetensors.numpy
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.formats import config_export, config_json, hf, hf_export, tensor_layout
from jaxpost.models import convolution, decoder_configs, recurrence, routing, transformer
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts
from jaxpost.monitor import metrics
from jaxpost.stage import prepare

KDA = 'kimi_linear'  # gated delta rule with a decay per channel, beside latent attention
# A family for each mixer -> shapes of a layer's state of a sequence, and the matrices of its mixer.
MIXERS = {
  'qwen3_5_text': ([(3, 2, 14), (3, 2, 14), (6, 2, 6), (6, 14, 6)], 'in_q in_k in_v in_z in_a in_b o'),
  'lfm2_moe': ([(4, 3, 8)], 'in_b in_c in_x o'),
  KDA: ([(3, 2, 14)] * 3 + [(3, 14, 14)], 'in_q in_k in_v in_b in_a_down in_a_up in_z_down in_z_up o'),
  'nemotron_h': ([(6, 2, 16), (2, 2, 10), (2, 2, 10), (6, 10, 16)], 'in_z in_x in_b in_c in_step o'),
}
SAMPLED = MIXERS | {'olmo_hybrid': ([(3, 2, 14)] * 3 + [(3, 14, 14)], '')}


@functools.cache
def model_and_params(family, **fields):
  model = model_lib.build(tiny.hybrid(family, **fields))
  return model, tiny.params(model)


@pytest.mark.parametrize(
  'family, fields',
  [
    ('qwen3_5_text', dict(norm_offset=0.0)),
    ('qwen3_5_text', dict(rotary_dim=0)),
    ('qwen3_5_text', dict(norm_eps=0.5)),
    ('qwen3_5_text', dict(mixers=('layers', 'delta', 'delta'))),
    ('qwen3_5_text', dict(joined=True)),
    (KDA, dict(gate_rank=0)),
    (KDA, dict(layer_ropes=())),
    ('lfm2', dict(gated=True)),
    ('granitemoehybrid', dict(norm_eps=0.5)),
    ('granitemoehybrid', dict(layer_ropes=())),
    ('lfm2', dict(mixers=('layers', 'convolution', 'convolution'))),
  ],
  ids=str,
)
def test_every_field_changes_the_logits_or_the_shapes(family, fields):
  ids, (model, params) = tiny.tokens((1, 20)), model_and_params(family)
  expected = tiny.logits(model, params, ids)
  changed_model = model_lib.build(tiny.hybrid(family, **fields))
  if changed_model.shapes() != model.shapes():
    with pytest.raises((TypeError, ValueError, KeyError)):
      tiny.logits(changed_model, params, ids)
    return
  changed = tiny.logits(changed_model, params, ids)
  assert tiny.largest(changed - expected) > 1e-3 * tiny.largest(expected)


@pytest.mark.parametrize(
  'family, mixers', [('qwen3_5_text', ('delta', 'layers') * 2), ('lfm2', ('convolution', 'layers', 'convolution'))]
)
def test_scanned_layers_compute_the_same_as_unrolled_layers(family, mixers):
  """Rows have several documents. The layers repeat with a period in one case, and not in the other."""
  experts = Experts(5, 2, 12, shared=1, shared_size=14, shared_gate=True)
  model = model_lib.build(tiny.hybrid(family, mixers=mixers, num_layers=len(mixers), experts=experts, layer_ropes=()))
  params, ids = tiny.params(model), tiny.tokens((2, 20))
  segments = np.repeat([[1, 2, 3, 0]], 2, axis=0).repeat([3, 9, 6, 2], axis=1)

  def gradient_and_hidden(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute, segments=segments)
      return jnp.sum(jnp.cos(x[:, :18])), x[:, :18]

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, unrolled = gradient_and_hidden()
  scanned_grads, scanned = gradient_and_hidden(unroll=False, remat='dots')
  assert tiny.largest(scanned - unrolled) <= 1e-5 * tiny.largest(unrolled)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_less(tiny.largest(a - b), 1e-4 * tiny.largest(b)), scanned_grads, grads
  )


@pytest.mark.parametrize('chunk, block', [(8, 1024), (4, 8)])
@pytest.mark.parametrize('corrected, channels', [(True, 1), (False, 1), (True, 5)])
def test_chunked_recurrence_computes_the_same_as_token_by_token(corrected, channels, chunk, block):
  """Output, state and gradient are equal, with documents that begin and end inside of chunks and blocks, after a state.

  Some channels decay to 0 at once. Exponentials of differences of sums would overflow there, or lose later tokens.
  """
  random = np.random.RandomState(0)
  q, k = random.standard_normal((2, 2, 21, 2, 5)).astype('f')
  v, beta = random.standard_normal((2, 21, 6, 3)).astype('f'), random.uniform(0, 1, (2, 21, 6)).astype('f')
  decay = random.uniform(0, 2, (2, 21, 6, channels)).astype('f') * 10 ** random.choice([-2.0, 0.0, 2.0], (1, 21, 1, 1))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  segments = np.repeat([[1, 2, 3, 0], [4, 5, 6, 6]], (6, 10, 3, 2), axis=1)
  is_token = (segments > 0)[..., None]
  runs = convolution.runs_of(jnp.asarray(segments))
  initial_state = random.standard_normal((2, 6, 5, 3)).astype('f')

  def token_by_token(q, k, v, decay, beta, initial_state):
    state, out, last_run = initial_state, [], jnp.zeros(2, int)
    for i in range(21):
      state = jnp.where((runs[:, i] == last_run)[:, None, None, None], state, 0)
      x = (y[:, i] for y in (q, k, v, decay, beta))
      y, state = recurrence.step(*x, state, corrected=corrected)
      out, last_run = [*out, y], runs[:, i]
    return jnp.stack(out, 1), state

  def in_chunks(*args):
    options = dict(dtype='float32', corrected=corrected, chunk=chunk, block=block)
    return recurrence.chunked(*args[:-1], runs, state=args[-1], **options)

  def outputs_and_gradient(fn):
    def loss(args):
      out, state = fn(*args)
      return jnp.sum(jnp.cos(out) * is_token[..., None]) + jnp.sum(jnp.sin(state)), (out, state)

    return jax.jit(jax.grad(loss, has_aux=True))(
      (q, k, v, -decay.astype('f') * is_token[..., None], beta * is_token, initial_state)
    )

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * tiny.largest(b)),
    outputs_and_gradient(in_chunks),
    outputs_and_gradient(token_by_token),
  )


def test_gradient_of_a_long_row_keeps_the_terms_of_one_block_in_memory():
  """The gradient of a row in several blocks keeps the terms of one block. In one block, it keeps all of them."""
  shapes = [(1, 4096, *sizes) for sizes in ((1, 8), (1, 8), (2, 8), (2, 1), (2,))]
  *terms, runs = [jax.ShapeDtypeStruct(x, 'float32') for x in shapes] + [jax.ShapeDtypeStruct((1, 4096), 'int32')]

  def temporary_bytes(block):
    options = dict(dtype='float32', corrected=True, block=block)
    gradient = jax.grad(lambda terms, runs: jnp.sum(recurrence.chunked(*terms, runs, **options)[0] ** 2))
    return jax.jit(gradient).lower(terms, runs).compile().memory_analysis().temp_size_in_bytes

  assert temporary_bytes(512) < 0.4 * temporary_bytes(4096)


def test_layers_of_a_period_are_rematerialized_one_at_a_time():
  """Without barriers between the layers, XLA recomputes all layers of the scanned body before the first gradient."""
  compute = dataclasses.replace(tiny.EXACT, unroll=False, remat='full')
  model = model_lib.build(tiny.hybrid())
  ids = jax.ShapeDtypeStruct((1, 8), 'int32')
  params = jax.eval_shape(model.init, jax.random.key(0))
  text = str(jax.make_jaxpr(lambda p, *rows: model.forward(p, *rows, compute=compute))(params, ids, ids, ids))
  assert text.count('prevent_cse=True') == 3


@pytest.mark.parametrize('family', SAMPLED)
def test_slots_carry_states_and_keys(family):
  # The norm after OLMo's delta rule divides by outputs near 0. With its eps of 1e-5, rounding is 1.6e-5 of a log-prob.
  model, params = model_and_params(family, **(dict(out_norm_eps=1e-3) if family == 'olmo_hybrid' else {}))
  engine = proofs.engine(model, max_new_tokens=24)
  engine.load(params, version=0)
  cache = engine.programs.init.outputs().cache
  assert len(cache.k) == 1 and cache.k[0].shape[:2] == ((3, 1) if family == KDA else (3, 2))
  assert [[x.shape[1:] for x in layer] for layer in cache.states] == [SAMPLED[family][0]] * 2
  assert engine.cache_bytes() == 4 * sum(x.size for x in jax.tree.leaves(cache))
  proofs.check_slots(model, params, engine)


@pytest.mark.parametrize('family', SAMPLED)
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, family):
  proofs.check_greedy_text(tiny.hybrid(family, tie_embeddings=False), tmp_path)


@pytest.fixture
def folder(family, tmp_path):
  heads = dict(num_kv_heads=2) if family == KDA else {}
  return tiny.folder(tmp_path / 'model', family=family, num_layers=len(tiny.HYBRIDS[family]['mixers']), **heads)


@pytest.mark.parametrize('family', MIXERS)
def test_grpo_trains_hybrid_models(folder, tmp_path):
  proofs.check_grpo(folder, tmp_path / 'run', targets='.*/in_.*|.*/o|layers/q')


@pytest.mark.parametrize('quantized', ['', 'int8'])
@pytest.mark.parametrize('family', MIXERS)
def test_adapters_and_quantized_bases(tmp_path, family, quantized):
  targets = '.*/in_.*|.*/o|layers/q|gate|up|latent_.*' + '|experts/(gate|up)' * bool(quantized)
  config = tiny.hybrid(family, lora=(2, 5.0, False, targets))
  params, stack = proofs.check_adapters(config, quantized, tmp_path), config.layer_stacks[0]
  matrices = {*MIXERS[family][1].split(), *(() if config.single else ('gate', 'up'))}
  assert {*params['lora'][stack]} == matrices
  if quantized:
    mlp = set() if config.single else {'down'}
    assert {name for name, x in params[stack].items() if isinstance(x, dict)} == matrices | mlp
  if quantized and config.experts:
    assert 'up' in params['lora']['moe' if config.single else config.mixer]


@pytest.mark.parametrize('family', [name for name in MIXERS if name != KDA])
def test_resume_is_bitwise_and_exports_multi_token_modules(folder, tmp_path):
  """The export includes the modules of the folder that predict several tokens at once."""
  file, mtp_weight = tmp_path / 'model/model.safetensors', np.arange(12, dtype=np.float32).reshape(3, 4)
  tensors = safetensors.numpy.load_file(file) | {'mtp.fc.weight': mtp_weight}
  safetensors.numpy.save_file(tensors, file, metadata={'format': 'pt'})
  exported = proofs.check_resume(folder, tmp_path)
  assert exported.keys() == tensors.keys()
  np.testing.assert_array_equal(exported['mtp.fc.weight'], mtp_weight)


@pytest.mark.long
@pytest.mark.parametrize('family', ['qwen3_5_text'])
def test_adapter_is_exported_beside_multi_token_modules(folder, tmp_path):
  """This also holds with the option for multimodal folders, which has no effect on this folder."""
  file = tmp_path / 'model/model.safetensors'
  mtp_tensors = {'mtp.fc.weight': np.zeros((3, 4), np.float32)}
  safetensors.numpy.save_file(safetensors.numpy.load_file(file) | mtp_tensors, file, metadata={'format': 'pt'})
  config = tiny.run_config(folder, lora=dict(rank=2), train=dict(steps=1), save=dict(export=True))
  jaxpost.run(tiny.merged(config, dict(model=dict(text_only=True))), tmp_path / 'run')
  assert mtp_tensors.keys() < proofs.exported(tmp_path / 'run').keys()
  assert (tmp_path / 'run/export/adapter/adapter_config.json').exists()


@pytest.mark.parametrize('family', ['qwen3_5_text'])
@pytest.mark.parametrize('size, words', [(8, 'layers with a recurrent state'), (12, '12 is no power of two')])
def test_pages_are_refused_before_weights_are_loaded(folder, size, words):
  with pytest.raises(InputError, match=f'^config.rollout.page_size: {words}'):
    prepare.prepare_all(tiny.grpo_config(folder, rollout=dict(page_size=size)))


@pytest.mark.parametrize('family', ['qwen3_5_text'])
def test_page_size_is_ignored_by_a_stage_that_samples_nothing(folder):
  (stage,) = prepare.prepare_all(tiny.run_config(folder, rollout=dict(page_size=8)))
  stage.close()


def test_pages_branches_and_split_rows_are_refused():
  model, params = model_and_params('qwen3_5_text')
  with pytest.raises(InputError, match='^config.rollout.page_size: .*set it to 0$'):
    proofs.engine(model, page_size=4)
  assert not proofs.engine(model).can_reuse_cache
  ids = tiny.tokens((1, 8))
  with pytest.raises(InputError, match='^config.preference.share_prompt: .*set it to False$'):
    model.forward(params, ids, np.arange(8)[None], np.ones((1, 8), int), compute=tiny.EXACT, branch_ids=ids)


@pytest.mark.parametrize('family', ['qwen3_5_text'])
@pytest.mark.parametrize('algorithm', ['dpo', pytest.param('online_dpo', marks=pytest.mark.ci)])
def test_pairs_share_no_prompt(folder, algorithm, tmp_path, caplog):
  """Other models share prompts by default. The log says that recurrent models do not."""
  data = dict(path='generated:arithmetic_pairs:max=9,ops=+,split=train,size=20')
  config = tiny.run_config(folder, algorithm=algorithm, data=data, train=dict(steps=2))
  if algorithm == 'online_dpo':
    config = tiny.merged(tiny.grpo_config(folder), dict(algorithm=algorithm, train=dict(steps=2)))
  jaxpost.run(config, tmp_path / 'run')
  assert 'config.preference.share_prompt: is taken as False, because the policy ' in caplog.text
  caplog.clear()
  jaxpost.run(tiny.merged(config, dict(preference=dict(share_prompt=False))), tmp_path / 'apart')
  assert 'share_prompt' not in caplog.text
  rows = [metrics.comparable_rows(tmp_path / name / 'metrics.jsonl') for name in ('run', 'apart')]
  assert rows[0] == rows[1] and len(rows[0]) == 2


KIMI = dict(
  model_type=KDA,
  vocab_size=163_840,
  hidden_size=2304,
  intermediate_size=9216,
  num_hidden_layers=27,
  num_attention_heads=32,
  num_expert_group=1,
  num_experts_per_token=8,
  head_dim=72,
  rope_theta=10_000.0,
  first_k_dense_replace=1,
  mla_use_nope=True,
  linear_attn_config=dict(
    full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
    kda_layers=[i for i in range(1, 27) if i % 4],
    num_heads=32,
    head_dim=128,
    short_conv_kernel_size=4,
  ),
)


def test_kimi_linear_is_written_as_it_is_published():
  """Some readers know the layers only from `linear_attn_config`, and dense layers only as `mlp`."""
  cfg, _ = config_json.from_hf(KIMI, 'here')
  written = config_export.to_hf(cfg)
  assert written['linear_attn_config'] == KIMI['linear_attn_config']
  assert {written[name] for name in ('num_experts', 'n_routed_experts')} == {256} and written['mla_use_nope']
  (name,) = tensor_layout.table(cfg)['dense_delta/gate'].names
  assert name == 'model.layers.0.mlp.gate_proj.weight'


QWEN3_NEXT = dict(
  model_type='qwen3_next',
  vocab_size=131,
  hidden_size=32,
  num_hidden_layers=8,
  num_attention_heads=4,
  linear_num_key_heads=2,
  linear_num_value_heads=4,
)


def test_layers_follow_the_interval_where_layer_types_are_missing():
  cfg, unread = config_json.from_hf(QWEN3_NEXT, 'config.json')
  assert cfg.mixers == ('delta', 'delta', 'delta', 'layers') * 2 and not unread
  assert cfg.rotary_dim == 64 and cfg.experts.shared_gate and cfg.joined
  assert config_json.from_hf(config_export.to_hf(cfg), 'here') == (cfg, [])
  assert decoder_configs.from_json(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


LFM2 = dict(
  model_type='lfm2',
  vocab_size=131,
  hidden_size=32,
  num_hidden_layers=4,
  num_attention_heads=4,
  num_key_value_heads=2,
  block_ff_dim=54,
  full_attn_idxs=[2, 3],
  tie_embedding=False,
  norm_eps=1e-4,
)


GRANITE = dict(
  model_type='granitemoehybrid',
  vocab_size=131,
  hidden_size=32,
  intermediate_size=20,
  shared_intermediate_size=28,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_local_experts=0,
  num_experts_per_tok=0,
  layer_types=['mamba', 'attention'],
  mamba_n_heads=4,
  normalization_function='rmsnorm',
  position_embedding_type='nope',
)


def test_granite_is_read_as_it_is_published():
  cfg, unread = config_json.from_hf(GRANITE, 'config.json')
  assert (cfg.mixers, cfg.value_size, cfg.intermediate_size, unread) == (('state_space', 'layers'), 16, 28, [])
  assert cfg.layer_ropes == (-1, -1) and cfg.biases == ('conv',)
  assert config_json.from_hf(config_export.to_hf(cfg), 'here') == (cfg, [])


def test_sizes_that_lfm2_derives_are_written_explicitly():
  cfg, unread = config_json.from_hf(LFM2 | dict(block_multiple_of=10, conv_dim=32, use_pos_enc=True), 'config.json')
  assert cfg.mixers == ('convolution', 'convolution', 'layers', 'layers') and not unread
  assert (cfg.intermediate_size, cfg.tie_embeddings, cfg.norm_eps, cfg.taps) == (40, False, 1e-4, 3)
  written = config_export.to_hf(cfg)
  assert (written['norm_eps'], written['intermediate_size'], written['block_auto_adjust_ff_dim']) == (1e-4, 40, False)
  assert config_json.from_hf(written, 'here') == (cfg, [])


def test_folder_may_hold_multi_token_modules_but_no_other_unknown_tensor(tmp_path):
  """Folders of Qwen hold such modules without a config field for them."""
  model = model_lib.build(tiny.hybrid(num_layers=2, mixers=('delta', 'layers')))
  hf_export.save(tmp_path, model, tiny.params(model))
  file = tmp_path / 'model.safetensors'
  tensors, extra = safetensors.numpy.load_file(file), np.zeros((3, 4), np.float32)
  safetensors.numpy.save_file(tensors | {'mtp.fc.weight': extra}, file, metadata={'format': 'pt'})
  hf.check(tmp_path, model.config)
  safetensors.numpy.save_file(tensors | {'other.fc.weight': extra}, file, metadata={'format': 'pt'})
  with pytest.raises(InputError, match='other.fc.weight'):
    hf.check(tmp_path, model.config)


NEMOTRON = dict(
  model_type='nemotron_h',
  vocab_size=131_072,
  hidden_size=2688,
  hybrid_override_pattern='MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME',
  num_attention_heads=32,
  num_key_value_heads=2,
  mamba_num_heads=64,
  n_routed_experts=128,
  num_experts_per_tok=6,
  moe_intermediate_size=1856,
  moe_shared_expert_intermediate_size=3712,
)
LFM2_MOE = dict(model_type='lfm2_moe', vocab_size=65_536, hidden_size=2048, num_hidden_layers=24) | dict(
  num_attention_heads=32, intermediate_size=7168, full_attn_idxs=[2, 6, 10, 14, 18, 21]
)
OLMO = dict(model_type='olmo_hybrid', vocab_size=100_352, hidden_size=3840, num_hidden_layers=32) | dict(
  num_attention_heads=30, intermediate_size=11_008, rope_parameters=dict(rope_type='default', rope_theta=None)
)


QWEN3_NEXT_80B = dict(model_type='qwen3_next', vocab_size=151_936, hidden_size=2048, num_hidden_layers=48) | dict(
  num_attention_heads=16, num_key_value_heads=2
)
LFM2_1_2B = dict(model_type='lfm2', vocab_size=65_536, hidden_size=2048, num_hidden_layers=16) | dict(
  num_attention_heads=32, block_ff_dim=12_288, full_attn_idxs=[2, 5, 8, 10, 12, 14]
)


@pytest.mark.parametrize(
  'raw, size, active',
  [
    (NEMOTRON, 31.6, 3.6),
    (LFM2_MOE, 8.3, 1.5),
    (OLMO, 7.4, 7.4),
    (KIMI, 49.1, 3.5),
    (QWEN3_NEXT_80B, 80, 3.9),
    (LFM2_1_2B, 1.17, 1.17),
  ],
)
def test_published_configs_are_read_and_have_the_published_sizes(raw, size, active):
  cfg, unread = config_json.from_hf(raw, 'here')
  assert not unread and config_json.from_hf(config_export.to_hf(cfg), 'here') == (cfg, [])
  assert transformer.num_params(cfg) / 1e9 == pytest.approx(size, rel=0.01)
  assert transformer.num_active(cfg, transformer.param_table(cfg)) / 1e9 == pytest.approx(active, abs=0.07)


@pytest.mark.parametrize(
  'raw, fields, words',
  [
    (KIMI, dict(linear_head_dim=64), 'linear_head_dim=64 contradicts linear_attn_config.head_dim=128'),
    (KIMI, dict(linear_num_heads=0, linear_attn_config={}), 'linear_num_heads=0 must be'),
    (KIMI, dict(linear_attn_config=dict(gate_lower_bound=-5.0)), 'linear_attn_config.gate_lower_bound'),
    (KIMI, dict(linear_attn_config=[4]), 'linear_attn_config=.* must be an object'),
    (KIMI, dict(linear_attn_config=dict(kda_layers=[1], full_attn_layers=[2])), 'each of the 27 layers once'),
    (KIMI, dict(layer_types=['linear_attention'] * 27), 'layer_types=.* contradicts linear_attn_config'),
    (KIMI, dict(mlp_layer_types=['sparse'] * 26 + ['dense']), 'mlp_layer_types'),
    (KIMI, dict(mlp_layer_types=['dense'] * 2 + ['sparse'] * 25), 'first_k_dense_replace=1 contradicts dense layers'),
    (KIMI, dict(first_k_dense_replace=27), 'first_k_dense_replace=27'),
    (KIMI, dict(mla_use_nope=False), 'mla_use_nope'),
    (KIMI, dict(head_dim=64, qk_rope_head_dim=32), 'head_dim=64'),
    (KIMI, dict(num_key_value_heads=8), 'num_key_value_heads=8'),
    (KIMI, dict(kv_lora_rank=None), 'kv_lora_rank'),
    (QWEN3_NEXT, dict(linear_num_key_heads=3), 'linear_num_key_heads=3 must divide linear_num_value_heads=4'),
    (QWEN3_NEXT, dict(linear_conv_kernel_dim=1), 'linear_conv_kernel_dim=1 must be'),
    (QWEN3_NEXT, dict(linear_key_head_dim='8'), 'linear_key_head_dim'),
    (QWEN3_NEXT, dict(full_attention_interval=0), 'full_attention_interval'),
    (QWEN3_NEXT, dict(shared_expert_intermediate_size=None), 'shared_expert_intermediate_size'),
    (QWEN3_NEXT, dict(layer_types=['linear_attention'] * 7), 'layer_types'),
    (QWEN3_NEXT, dict(layer_types=['sliding_attention'] * 8), 'layer_types'),
    (QWEN3_NEXT, dict(layer_types=['linear_attention'] * 8), 'alone'),
    (QWEN3_NEXT, dict(hidden_act='gelu'), 'hidden_act'),
    (QWEN3_NEXT, dict(attention_bias=True), 'attention_bias'),
    (QWEN3_NEXT, dict(mlp_only_layers=[1]), 'mlp_only_layers'),
    (QWEN3_NEXT, dict(attn_output_gate=False), 'attn_output_gate'),
    (GRANITE, dict(num_local_experts=4), 'num_experts_per_tok=0 must be'),
    (GRANITE, dict(time_step_limit=[0.001, 0.1]), 'time_step_limit'),
    (GRANITE, dict(position_embedding_type='learned'), 'position_embedding_type'),
    (GRANITE, dict(mamba_n_heads=5), 'mamba_n_heads=5'),
    (GRANITE, dict(mamba_n_groups=3), 'mamba_n_groups=3 must divide'),
    (GRANITE, dict(mamba_d_conv=1), 'mamba_d_conv=1 must be'),
    (GRANITE, dict(mamba_proj_bias=True), 'mamba_proj_bias'),
    (GRANITE, dict(layer_types=['mamba', 'mamba']), 'alone'),
    (GRANITE, dict(layer_types=['conv', 'attention']), 'layer_types'),
    (GRANITE, dict(normalization_function='layernorm'), 'normalization_function'),
    (GRANITE, dict(hidden_act='gelu'), 'hidden_act'),
    (LFM2, dict(conv_bias=True), 'conv_bias=True'),
    (LFM2, dict(conv_L_cache=1), 'conv_L_cache=1 must be'),
    (LFM2, dict(full_attn_idxs=[4]), 'full_attn_idxs=.* below 4'),
    (LFM2, dict(full_attn_idxs=None), 'alone'),
    (LFM2, dict(layer_types=['conv'] * 4), 'contradicts full_attn_idxs'),
    (
      LFM2,
      dict(layer_types=['conv', 'full_attention'] * 2, full_attn_idxs=None, num_hidden_layers=3),
      'must be 3 times',
    ),
    (LFM2, dict(num_attention_heads=5, num_key_value_heads=5, head_dim=8), 'hidden_size=32'),
    (LFM2, dict(block_multiple_of=0), 'block_multiple_of'),
    (LFM2, dict(block_ffn_dim_multiplier=-1), 'block_ffn_dim_multiplier'),
    (LFM2, dict(block_auto_adjust_ff_dim='yes'), 'block_auto_adjust_ff_dim'),
    (LFM2, dict(hidden_act='gelu'), 'hidden_act'),
    (NEMOTRON, dict(hybrid_override_pattern='M*X'), "hybrid_override_pattern='M.X' must be"),
    (NEMOTRON, dict(hybrid_override_pattern=None), 'layers_block_type'),
    (NEMOTRON, dict(hybrid_override_pattern='M*'), 'without an MLP'),
    (NEMOTRON, dict(num_hidden_layers=3), 'must be 3 times'),
    (NEMOTRON, dict(time_step_min=-1), 'time_step_min=-1'),
    (NEMOTRON, dict(moe_latent_size=0), 'moe_latent_size=0'),
    (NEMOTRON, dict(n_routed_experts=0), 'n_routed_experts=0'),
    (NEMOTRON, dict(n_shared_experts=2), 'n_shared_experts=2'),
    (NEMOTRON, dict(mlp_hidden_act='silu'), 'only relu2'),
    (NEMOTRON, dict(use_bias=True), 'use_bias'),
    (LFM2_MOE, dict(num_dense_layers=22), 'num_dense_layers=22'),
    (LFM2_MOE, dict(use_expert_bias=False), 'use_expert_bias'),
    (OLMO, dict(linear_num_key_heads=4), 'linear_num_key_heads=4'),
    (OLMO, dict(linear_num_key_heads=0, linear_key_head_dim=None), 'linear_num_key_heads=0'),
    (OLMO, dict(num_attention_heads=None, linear_num_key_heads=None), 'num_attention_heads=None'),
    (NEMOTRON, dict(mlp_hidden_act=['relu2']), 'mlp_hidden_act='),
    (OLMO, dict(linear_allow_neg_eigval='no'), 'linear_allow_neg_eigval'),
  ],
)
def test_unsupported_config_is_refused_by_the_name_of_its_field(raw, fields, words):
  with pytest.raises(InputError, match=f'^config.json: .*{words}') as e:
    config_json.from_hf(raw | fields, 'config.json')
  assert '\n' not in str(e.value)


def test_router_adds_epsilon_to_the_sum_of_chosen_sigmoids():
  """The 1e-6 of LFM2-MoE makes a difference where all experts are unlikely."""
  cfg = tiny.hybrid('lfm2_moe')
  assert config_json.from_hf(LFM2_MOE, 'here')[0].experts.epsilon == cfg.experts.epsilon == 1e-6
  router = np.full((2, 5), -6.0, np.float32)
  weights, _ = routing.route({'router': router}, np.ones((1, 1, 2), np.float32), cfg.experts)
  sigmoid = 1 / (1 + np.exp(12.0))
  np.testing.assert_allclose(weights[0, 0], 1.7 * sigmoid / (2 * sigmoid + 1e-6), rtol=1e-5)
