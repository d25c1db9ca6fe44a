"""DeepSeek-V3: latent attention and its router, besides the checks of tests/test_families.py; reading and writing.

The tiny model has latents of rank 12 and 4 rotated entries.
"""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import config_export, config_json, hf, hf_export, peft
from jaxpost.models import config as config_lib
from jaxpost.models import decoder_configs, parameters, transformer
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.stage import model_folders, schema
from jaxpost.types import Prompt

ALL_TARGETS = 'q_a|q_b|kv_a|kv_b|o|shared_up'


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.latent())


def model_with(**fields):
  return model_lib.build(tiny.latent(**fields))


@pytest.mark.parametrize(
  'fields',
  [
    dict(ropes=(config_lib.Rope(),)),
    dict(attention_scale=0.2),
    dict(norm_eps=0.5),
    *(
      dict(experts=dataclasses.replace(tiny.latent().experts, **change))
      for change in (dict(scale=1.0), dict(groups=2), dict(top_groups=4), dict(normalize=False), dict(top_k=2))
    ),
  ],
  ids=str,
)
def test_every_config_field_changes_the_logits(model, params, fields):
  ids = tiny.tokens((1, 20))
  expected = tiny.logits(model, params, ids)
  changed = tiny.logits(model_with(**fields), params, ids)
  assert tiny.largest(changed - expected) > 1e-3 * tiny.largest(expected)


def test_router_bias_chooses_experts_and_has_no_gradient(model, params):
  """A large bias of three experts sends all tokens to these."""
  choice = jnp.zeros((2, 8)).at[:, jnp.array([2, 3, 4])].set(9.0)
  pushed = params | {'layers': params['layers'] | {'router_choice': choice}}

  def run(p):
    return model.forward(
      p, tiny.tokens((1, 9)), np.arange(9)[None], np.ones((1, 9), np.int32), compute=tiny.EXACT, routing=True
    )

  _, routing = jax.jit(run)(pushed)
  assert routing.chosen.shape == (2, 1, 9, 3)
  assert set(np.unique(routing.chosen)) == {2, 3, 4}
  grads = jax.jit(jax.grad(lambda p: jnp.sum(run(p)[0] ** 2)))(pushed)
  assert not np.any(grads['layers']['router_choice'])
  assert np.any(grads['layers']['router']) and np.any(grads['dense']['gate'])


def test_scanned_layers_equal_unrolled_layers(model, params):
  ids = tiny.tokens((2, 20))
  expected = tiny.hidden(model, params, ids)
  for remat in ('none', 'dots', 'full'):
    compute = dataclasses.replace(tiny.EXACT, unroll=False, remat=remat)
    scanned = tiny.hidden(model, params, ids, compute)
    assert tiny.largest(scanned - expected) <= 1e-5 * tiny.largest(expected)


def test_cache_holds_latents_and_decoding_equals_forward_pass(model, params):
  engine = native.NativeEngine(
    model,
    native.SamplerConfig(slots=2, max_prompt=8, max_new_tokens=6, stop_ids=(-2,), block=4, temperature=0.0),
    tiny.one_device('rollout'),
    tiny.EXACT,
    Ledger(),
  )
  engine.load(params, version=0)
  shapes = {x.shape for x in jax.tree.leaves(jax.eval_shape(engine.programs.init.fn).cache)}
  assert {s[-1] for s in shapes} == {12 + 4} and {s[1] for s in shapes} == {1}
  ids = tiny.tokens((3, 8))
  rollout = engine(
    [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate((8, 5, 3))],
    group_size=1,
    step=0,
    run_key=np.zeros(2, np.uint32),
  )
  for i, n in enumerate((8, 5, 3)):
    text = np.r_[ids[i, :n], rollout.completions[i]][None]
    logp = jax.nn.log_softmax(tiny.logits(model, params, text)[0, n - 1 : -1])
    np.testing.assert_array_equal(logp.argmax(-1), rollout.completions[i])
    np.testing.assert_allclose(logp.max(-1), rollout.logprobs[i], atol=1e-5)


def test_adapters_of_latent_projections_merge_exactly():
  cfg = tiny.latent(lora=(2, 5.0, False, ALL_TARGETS))
  model = model_lib.build(cfg)
  stacks = {p.split('/')[1] for p in model.table if parameters.is_adapter(p)}
  assert stacks == {'dense', 'layers'}
  random = np.random.RandomState(0)
  params = jax.tree.map(lambda x: x + 0.1 * random.standard_normal(x.shape).astype('f'), model.init(jax.random.key(0)))
  ids = tiny.tokens((2, 12))
  at = np.broadcast_to(np.arange(12), ids.shape)

  def run(m, p):
    return jax.jit(lambda p: m.forward(p, ids, at, np.ones_like(ids), compute=tiny.EXACT))(p)

  adapted, merged = run(model, params), run(model.base, model.merge(params))
  assert tiny.largest(adapted - merged) <= 1e-5 * tiny.largest(merged)
  plain = {k: v for k, v in params.items() if k != parameters.ADAPTER_ROOT}
  assert tiny.largest(adapted - run(model.base, plain)) > 1e-2

  def stacks_with_adapters(targets):
    return {
      p.split('/')[1]
      for p in model_lib.build(tiny.latent(lora=(2, 5.0, False, targets))).table
      if parameters.is_adapter(p)
    }

  assert stacks_with_adapters('up') == {'dense'} and stacks_with_adapters('experts/up') == {'layers'}


@pytest.mark.parametrize(
  'over', [dict(router=dict(routing_replay=True)), dict(lora=dict(rank=2, targets='kv_b|o'))], ids=['replay', 'lora']
)
def test_first_grpo_step_is_on_policy(tmp_path, over):
  """`sampler_mismatch` compares the log-probs of the sampler with those of the trainer."""
  import jaxpost

  path = tiny.folder(tmp_path / 'model', family='deepseek_v3', num_layers=2, num_heads=2, num_kv_heads=2)
  jaxpost.run(tiny.grpo_config(path, **over, rl=dict(kl_coef=0.01), train=dict(steps=1)), tmp_path / 'run')
  row = metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl')[0]
  assert abs(row['sampler_mismatch'] - 1) < 1e-5 and row['kl'] < 1e-9
  assert row['grad_norm'] > 0


# --------------------------------------------------------------------- folders


RAW_CONFIG = dict(
  model_type='deepseek_v3',
  vocab_size=131,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=4,
  kv_lora_rank=12,
  q_lora_rank=14,
  qk_rope_head_dim=4,
  qk_nope_head_dim=6,
  v_head_dim=6,
  n_routed_experts=8,
  n_group=4,
  topk_group=2,
  num_experts_per_tok=3,
  moe_intermediate_size=20,
  first_k_dense_replace=1,
)


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(scoring_func='softmax'), 'scoring_func'),
    (dict(topk_method='greedy'), 'topk_method'),
    (dict(moe_layer_freq=2), 'moe_layer_freq'),
    (dict(quantization_config=dict(quant_method='awq')), 'awq'),
    (dict(attention_bias=True), 'attention_bias'),
    (dict(n_group=3), 'n_group=3 of 8'),
    (dict(topk_group=5), 'topk_group=5'),
    (dict(num_experts_per_tok=5), 'num_experts_per_tok=5 of 2 groups'),
    (dict(first_k_dense_replace=3), 'first_k_dense_replace=3 of 3'),
    (dict(num_key_value_heads=2), 'num_key_value_heads=2'),
    (dict(kv_lora_rank=0), 'kv_lora_rank=0'),
    (dict(head_dim=7), 'head_dim=7'),
    (dict(qk_rope_head_dim=5), 'even'),
    (dict(rope_interleave=1), 'interleave'),
    (dict(routed_scaling_factor=0), 'routed_scaling_factor'),
  ],
)
def test_unsupported_config_fields_are_refused_by_name(fields, words):
  config_json.from_hf(RAW_CONFIG, 'config.json')
  with pytest.raises(InputError, match=f'^config.json: .*{words}') as e:
    config_json.from_hf(RAW_CONFIG | fields, 'config.json')
  assert '\n' not in str(e.value)


def test_yarn_mscale_multiplies_attention_scale():
  scaling = dict(type='yarn', factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
  plain, scaled = (config_json.from_hf(RAW_CONFIG | dict(rope_scaling=x), 'here')[0] for x in (None, scaling))
  factor = (0.1 * np.log(40) + 1) ** 2
  assert scaled.attention_scale == pytest.approx(plain.attention_scale * factor)
  assert plain.attention_scale == pytest.approx(10**-0.5)


def test_kimi_is_read_and_written_as_deepseek():
  cfg, unread = config_json.from_hf(
    RAW_CONFIG | dict(model_type='kimi_k2', n_group=1, topk_group=1, auto_map=dict(AutoModel='x.Y')), 'here'
  )
  assert cfg.family == 'deepseek_v3' and unread == ['auto_map']
  raw = config_export.to_hf(cfg)
  assert raw['model_type'] == 'deepseek_v3'
  assert config_json.from_hf(raw, 'here')[0] == cfg
  assert decoder_configs.from_json(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


def test_multi_token_prediction_layers_are_not_read_but_exported(model, params, tmp_path, caplog):
  hf_export.save(tmp_path / 'model', model, params)
  (tmp_path / 'model/checksums.json').unlink()  # as the files are changed below
  file = tmp_path / 'model/model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  first = tensors['model.layers.2.self_attn.o_proj.weight']
  safetensors.numpy.save_file(tensors | {'model.layers.3.eh_proj.weight': first}, file)
  config = tmp_path / 'model/config.json'
  raw = json.loads(config.read_text()) | dict(num_nextn_predict_layers=1)
  config.write_text(json.dumps(raw))
  with caplog.at_level(logging.WARNING):
    cfg = hf.read_config(tmp_path / 'model')
  assert 'num_nextn_predict_layers' in caplog.text
  assert cfg == dataclasses.replace(  # fields that config.json does not hold
    model.config, attention_scale=cfg.attention_scale, initializer_range=cfg.initializer_range
  )
  hf.check(tmp_path / 'model', cfg)
  loaded = hf.load_params(tmp_path / 'model', model, model.shardings(tiny.one_device()), 'float32')
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  with model_folders.origin(schema.ModelSection(path=str(tmp_path / 'model')), cfg) as origin:
    hf_export.save(tmp_path / 'export', model, params, origin=origin)
  files = (tmp_path / 'export').glob('*.safetensors')
  exported = {name: x for path in files for name, x in safetensors.numpy.load_file(path).items()}
  jax.tree.map(np.testing.assert_array_equal, exported, safetensors.numpy.load_file(file))
  assert json.loads((tmp_path / 'export/config.json').read_text())['num_nextn_predict_layers'] == 1


@pytest.mark.parametrize('targets', ['dense/.*', 'layers/o', 'q_b|o'])
def test_adapters_of_some_stacks_survive_export_and_load(tmp_path, targets):
  cfg = tiny.latent(lora=(2, 5.0, False, targets))
  model = model_lib.build(cfg)
  params = model.init(jax.random.key(0))
  peft.writer(model, params, 'base')(tmp_path)
  read = model_lib.build(dataclasses.replace(cfg, lora=peft.read_spec(tmp_path, dataclasses.replace(cfg, lora=()))))

  def adapters(m):
    return {p for p in m.table if parameters.is_adapter(p)}

  assert adapters(read) == adapters(model)
  loaded = peft.load(tmp_path, read, model_lib.trained_part(read).shardings(tiny.one_device()))
  jax.tree.map(np.testing.assert_array_equal, loaded['lora'], params['lora'])


def test_tensors_of_layers_beyond_the_config_are_refused(model, params, tmp_path):
  hf_export.save(tmp_path / 'model', model, params)
  config = tmp_path / 'model/config.json'
  config.write_text(json.dumps(json.loads(config.read_text()) | dict(num_hidden_layers=2)))
  with pytest.raises(InputError, match=r'tensor model.layers.2\.'):
    hf.check(tmp_path / 'model', hf.read_config(tmp_path / 'model'))


def test_router_bias_is_stored_in_float32(tmp_path):
  """As in transformers: in bfloat16, biases that are close would become equal."""
  model = model_lib.build(tiny.latent())
  params = model.init(jax.random.key(0), dtype=jnp.bfloat16)
  choice = 14 + 1e-3 * np.arange(16, dtype=np.float32).reshape(2, 8)
  params['layers']['router_choice'] = jnp.asarray(choice)
  hf_export.save(tmp_path / 'model', model, params)
  stored = safetensors.numpy.load_file(tmp_path / 'model/model.safetensors')
  kinds = {k: str(v.dtype) for k, v in stored.items()}
  assert {k for k, v in kinds.items() if v == 'float32'} == {
    f'model.layers.{i}.mlp.gate.e_score_correction_bias' for i in (1, 2)
  }
  loaded = hf.load_params(tmp_path / 'model', model, model.shardings(tiny.one_device()), 'bfloat16')
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert loaded['norm'].dtype == jnp.bfloat16


def test_head_size_that_is_no_integer_is_refused():
  for field, value in (('qk_rope_head_dim', None), ('qk_rope_head_dim', '8')):
    raw = config_export.to_hf(tiny.latent()) | {field: value}
    with pytest.raises(InputError, match=field):
      config_json.from_hf(raw, 'config.json')


def test_number_of_parameters_equals_published_sizes():
  shape = dict(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
  )
  cfg, _ = config_json.from_hf(dict(model_type='deepseek_v3') | shape, 'here')
  assert transformer.num_params(cfg) / 1e9 == pytest.approx(671, rel=0.01)
  assert transformer.num_active(cfg, transformer.param_table(cfg)) / 1e9 == pytest.approx(37, rel=0.03)
