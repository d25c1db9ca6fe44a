"""Attention layers of two sizes: what tests/test_families.py does not see of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import config_json, hf, peft
from jaxpost.models import mixed_attention, partition, quantization, transformer
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts
from jaxpost.monitor import metrics
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Prompt

FULL, LOCAL = 'full_attention', 'sliding_attention'
EXPERTS = dict(shared_layers=0, wide_shared_mlp=False, values_are_keys=True, full_kv_heads=1) | dict(
  experts=Experts(5, 2, 12, shared=1, shared_size=48), layer_windows=(6, 0, 6, 0)
)
VARIANTS = {'e': {}, 'experts': EXPERTS}


@functools.cache
def made(variant):
  model = model_lib.build(tiny.mixed(**VARIANTS[variant]))
  return model, tiny.params(model)


def make_engine(model, **fields):
  settings = dict(slots=3, max_prompt=9, max_new_tokens=24, stop_ids=(-2,), block=4, temperature=0.0)
  return native.NativeEngine(
    model, native.SamplerConfig(**settings | fields), tiny.one_device('rollout'), tiny.EXACT, Ledger()
  )


@pytest.mark.parametrize('fields', [dict(attention_scale=0.5), dict(layer_windows=(3, 0, 3, 0))], ids=str)
def test_every_field_counts(fields):
  ids, (model, params) = tiny.tokens((1, 20)), made('e')
  other = model_lib.build(tiny.mixed(**fields))
  right = tiny.logits(model, params, ids)
  assert tiny.largest(tiny.logits(other, params, ids) - right) > 1e-3 * tiny.largest(right)


@pytest.mark.parametrize('variant', VARIANTS)
def test_layers_under_remat_are_those_in_a_row(variant):
  """Forward and gradient, of rows with several documents: a scan over pairs of layers where none is shared."""
  model, params = made(variant)
  ids = tiny.tokens((2, 20))
  segments = np.repeat([[1, 2, 3, 0]], 2, axis=0).repeat([3, 9, 6, 2], axis=1)

  def both(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute, segments=segments)[:, :18]
      return jnp.sum(jnp.cos(x)), x

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, right = both()
  again, found = both(unroll=False, remat='full')
  assert tiny.largest(found - right) <= 1e-5 * tiny.largest(right)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_less(tiny.largest(a - b), 1e-4 * tiny.largest(b) + 1e-9), again, grads
  )
  for stack in {*model.config.layer_stacks}:
    assert not np.any(grads[stack]['scalar'])  # which is not trained


@pytest.mark.parametrize('variant, pages', [('e', 4), ('experts', 0)])
def test_slots_have_caches_of_two_sizes(variant, pages):
  """Prompts of several lengths, forked, and more of them than slots: each as the whole text alone."""
  model, params = made(variant)
  engine = make_engine(model, page_size=pages)
  engine.load(params, version=0)
  cache = engine.programs.init.outputs().cache
  assert [(x.shape[1], x.shape[3]) for x in cache.k] == [(h, sizes[0]) for h, sizes in model.config.layer_caches]
  assert len(cache.k) == 4 - model.config.shared_layers
  ids, lengths = tiny.tokens((3, 9)), (9, 2, 5)
  prompts = [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate(lengths)]
  rollout = engine(prompts, group_size=2, step=0, run_key=np.zeros(2, np.uint32), sampling=dict(temperature=1.0))
  texts = [np.r_[ids[i // 2, : lengths[i // 2]], rollout.completions[i]] for i in range(6)]
  logp = jax.nn.log_softmax(tiny.logits(model, params, np.stack([np.pad(x, (0, 33 - len(x))) for x in texts])))
  for i, text in enumerate(texts):
    n = lengths[i // 2]
    own = np.take_along_axis(np.asarray(logp[i, n - 1 : len(text) - 1]), text[n:, None], 1)[:, 0]
    np.testing.assert_allclose(own, rollout.logprobs[i], atol=1e-5)


def test_64_greedy_tokens_are_those_of_transformers(tmp_path):
  torch = pytest.importorskip('torch')
  from transformers import AutoModelForCausalLM

  model = model_lib.build(tiny.mixed(tie_embeddings=False))
  params = tiny.params(model)
  hf.save(tmp_path, model, params)
  network = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation='eager').eval()
  engine = make_engine(model, max_new_tokens=64)
  engine.load(params, version=0)
  ids = tiny.tokens((2, 9), seed=3)
  prompts = [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate((9, 4))]
  rollout = engine(prompts, group_size=1, step=0, run_key=np.zeros(2, np.uint32))
  for i, n in enumerate((9, 4)):
    text = network.generate(torch.tensor(ids[i : i + 1, :n]).long(), max_new_tokens=64, do_sample=False)[0, n:]
    assert len(set(text.tolist())) > 4  # no loop over a few tokens
    np.testing.assert_array_equal(rollout.completions[i], text.numpy())


def test_grpo(tmp_path):
  """Its first step holds the sampler's log-probs against the trainer's, with whom it shares the stacks."""
  import jaxpost

  lora = dict(rank=2, targets='q|o|side_gate')

  path = tiny.folder(tmp_path / 'model', family='gemma4_text', num_layers=4, num_kv_heads=2)
  jaxpost.run(tiny.grpo_config(path, lora=lora, rl=dict(kl_coef=0.01), train=dict(steps=1)), tmp_path / 'run')
  row = metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl')[0]
  assert abs(row['sampler_mismatch'] - 1) < 1e-5 and row['kl'] < 1e-9
  assert row['grad_norm'] > 0


@pytest.mark.parametrize('quantized', ['', 'int8'])
def test_adapters_and_quantized_bases(tmp_path, quantized):
  """Adapters of all kinds of layers compute what merged ones do, and come back from PEFT."""
  model = partition.build(tiny.mixed(lora=(2, 5.0, False, 'q|k|o|gate|up|side_gate|side_out')))
  if quantized:
    model = quantization.quantize_model(partition.freeze(model, ''), quantized)
  params = model.init(jax.random.key(0))
  random = np.random.RandomState(0)
  for stack in params['lora'].values():
    for pair in stack.values():
      pair['b'] = jnp.asarray(0.2 * random.standard_normal(pair['b'].shape).astype('f'))
  assert 'k' in params['lora']['local'] and 'k' not in params['lora']['local_shared']
  ids = tiny.tokens((2, 12))
  at = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)

  def run(m, p):
    return jax.jit(lambda p: m.forward(p, ids, at, np.ones_like(ids), compute=tiny.EXACT))(p)

  adapted, merged = run(model, params), run(model.base, model.merge(params))
  assert tiny.largest(adapted - merged) <= 1e-5 * tiny.largest(merged)
  if quantized:
    return
  peft.writer(model, params, 'base')(tmp_path)
  loaded = peft.load(tmp_path, model, partition.trained_part(model).shardings(tiny.one_device()))
  jax.tree.map(np.testing.assert_array_equal, loaded['lora'], params['lora'])


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
  import jaxpost

  path = tiny.folder(tmp_path / 'model', family='gemma4_text', num_layers=4, num_kv_heads=2)
  config = tiny.run_config(path, train=dict(steps=4), save=dict(every=2, export=True))
  jaxpost.run(config, tmp_path / 'whole')
  jaxpost.run(tiny.merged(config, dict(train=dict(steps=2))), tmp_path / 'parts')
  jaxpost.run(config, tmp_path / 'parts')
  one, two = (safetensors.numpy.load_file(tmp_path / name / 'export/model.safetensors') for name in ('whole', 'parts'))
  jax.tree.map(np.testing.assert_array_equal, one, two)


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


def test_published_fields_are_read():
  cfg, unread = config_json.from_hf(RAW, 'config.json')
  assert not unread and (cfg.full_head_dim, cfg.full_kv_heads, cfg.side_size) == (512, 1, 256)
  assert [cfg.place_in_cache(i) for i in (0, 14, 15, 19, 34)] == [0, 14, 13, 14, 14]
  assert len(cfg.layer_caches) == 15
  assert config_json.from_hf(config_json.to_hf(cfg), 'here') == (cfg, [])
  # The embeddings of layers are looked up, and are no operand of a product.
  assert transformer.num_params(cfg) == pytest.approx(4.63e9, rel=0.01)
  assert transformer.flops_per_token(cfg, 1024) == pytest.approx(2 * 2.3e9, rel=0.05)


def test_tensors_of_layers_without_keys_are_no_part_of_the_model(tmp_path):
  """Published folders hold keys and values of layers that read those of others."""
  model, params = made('e')
  hf.save(tmp_path, model, params)
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
def test_what_is_not_built_is_refused_by_name(fields, words):
  with pytest.raises(InputError, match=f'^config.json: .*{words}') as e:
    config_json.from_hf(RAW | fields, 'config.json')
  assert '\n' not in str(e.value)


def test_a_layer_reads_its_own_part_of_the_side_inputs():
  """Entry i of what is made for all layers goes to layer i, whichever stack it is in."""
  model, params = made('e')
  ids = tiny.tokens((1, 5))
  x = transformer.embed(params, ids, model.config, tiny.EXACT, transformer.unconstrained)
  whole = mixed_attention.with_side_inputs(params, ids, x, model.config, tiny.EXACT, transformer.unconstrained)
  listed = params | {'layers': [{} for _ in range(4)]}
  each = mixed_attention.with_side_inputs(listed, ids, x, model.config, tiny.EXACT, transformer.unconstrained)
  order = model.config.layer_stacks
  for i, stack in enumerate(order):
    np.testing.assert_array_equal(each['layers'][i]['side'], whole[stack]['side'][order[:i].count(stack)])
