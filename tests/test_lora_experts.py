"""LoRA adapters of experts: targets, merging, gradients, runs, quantized bases, and adapter folders of PEFT.

Legend: L layers, E experts, D hidden size, F size of an expert, r rank.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_lora
import tiny

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export, peft
from jaxpost.models import lora, quantization
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts

EXPERTS = Experts(4, 2, 24)
FAMILIES = {
  'qwen3_moe': dict(experts=EXPERTS),
  'mixtral': dict(qk_norm='', tie_embeddings=False, intermediate_size=24, experts=EXPERTS),
}
ALL = 'q|experts/(gate|up|down)'


def config(targets=ALL, rank=3, rslora=False, family='qwen3_moe', **fields):
  return tiny.config(lora=(rank, 5.0, rslora, targets), family=family, **FAMILIES[family] | fields)


def test_experts_get_adapters_only_if_targets_name_them():
  def adapted(targets):
    return set(model_lib.build(config(targets)).init(jax.random.key(0))['lora']['layers'])

  assert adapted('q|k|v|o|gate|up|down') == set('qkvo')
  assert adapted(ALL) == {'q', 'gate', 'up', 'down'}
  assert adapted('layers/experts/.*') == {'gate', 'up', 'down'}
  rows = model_lib.build(config()).table
  assert rows['lora/layers/gate/a'].shape == (2, 4, 32, 3)
  assert rows['lora/layers/gate/b'].shape == (2, 4, 3, 24)
  assert rows['lora/layers/down/a'].axes == ('layers', 'expert', 'mlp', None)
  a = np.asarray(model_lib.build(config(rank=8)).init(jax.random.key(0))['lora']['layers']['down']['a'])
  assert np.std(a) == pytest.approx((1 / 24) ** 0.5 / 3**0.5, rel=0.1)


def test_unsupported_expert_adapters_are_refused():
  with pytest.raises(InputError, match='routers and indexers have no adapters'):
    model_lib.build(config('router'))
  with pytest.raises(InputError, match='rank: 25 is larger than layers/gate'):
    model_lib.build(config('experts/gate', rank=25))
  with pytest.raises(InputError, match='dropout'):
    model_lib.build(config(), dropout=0.1)
  with pytest.raises(InputError, match='matches none of .*layers/experts/gate'):
    model_lib.build(config('expert/gate'))


@pytest.mark.parametrize('unroll', [True, False])
@pytest.mark.parametrize('targets, rslora', [(ALL, False), ('experts/down', True)])
def test_adapted_experts_equal_merged_experts(targets, rslora, unroll):
  model = model_lib.build(config(targets, rslora=rslora))
  compute = dataclasses.replace(tiny.EXACT, unroll=unroll, remat='full')
  params, ids = test_lora.params_of(model), tiny.tokens((2, 9))
  adapted = test_lora.logits(model, params, ids, compute)
  test_lora.near(adapted, test_lora.logits(model.base, model.merge(params), ids, compute))
  plain = test_lora.logits(model.base, test_lora.without(params), ids, compute)
  assert tiny.largest(adapted - plain) > 0.1 * tiny.largest(plain)


def test_adapter_gradients_follow_from_those_of_the_merged_matrices():
  """For each expert, dA = scale dW B^T and dB = scale A^T dW."""
  model = model_lib.freeze(model_lib.build(config('experts/(gate|up|down)')), '')
  params, batch = test_lora.params_of(model), test_lora.rows_batch()
  _, grads = test_lora.gradient(model, params, batch, 4)
  merged_model = dataclasses.replace(
    model, forward=model.base.forward, frozen=frozenset(), table=model.base.table, config=model.base.config
  )
  _, merged_grads = test_lora.gradient(merged_model, model.merge(params), batch, 4)
  scale = lora.scale(model.config)
  for name, pair in params['lora']['layers'].items():
    dw, pair_grads = merged_grads['layers'][name], grads['lora']['layers'][name]
    test_lora.near(pair_grads['a'], scale * jnp.einsum('lexf,lerf->lexr', dw, pair['b'], precision='highest'), 1e-4)
    test_lora.near(pair_grads['b'], scale * jnp.einsum('lexf,lexr->lerf', dw, pair['a'], precision='highest'), 1e-4)


@pytest.mark.parametrize('method', ['sft', 'grpo'])
def test_run_trains_expert_adapters_and_exports_merged_weights(tmp_path, method):
  base = tiny.folder(tmp_path / 'base', family='qwen3_moe', num_layers=2, experts=EXPERTS)
  make = tiny.run_config if method == 'sft' else tiny.grpo_config
  stages.run(
    tiny.merged(
      make(base), dict(lora=dict(rank=2, targets=ALL), optim=dict(lr=3e-2), train=dict(steps=2), save=dict(export=True))
    ),
    tmp_path / 'run',
  )
  rows = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  assert rows[0]['grad_norm'] > 0
  before, after = (test_lora.of_folder(folder).params['layers'] for folder in (base, tmp_path / 'run/export'))
  changed = {name for name in before if np.any(before[name] != after[name])}
  assert changed == {'q', 'gate', 'up', 'down'}
  for name in changed - {'q'}:  # every expert of every layer has changed
    assert np.all(np.any(before[name] != after[name], axis=(2, 3))), name


def test_adapters_on_int8_experts_match_dequantized_experts():
  """The loss and gradients are those of the numbers that the codes stand for."""
  plain = model_lib.freeze(model_lib.build(config()), '')
  quantized = model_lib.frozen_base_model(plain.config, 'int8')
  params, batch = test_lora.params_of(plain), test_lora.rows_batch()
  quantized_params = quantization.convert_params(params, quantized)
  (loss, _), grads = test_lora.gradient(quantized, quantized_params, batch, 4)
  (dequantized_loss, _), expected = test_lora.gradient(
    plain, quantization.convert_params(quantized_params, plain), batch, 4
  )
  assert float(loss) == pytest.approx(float(dequantized_loss), rel=1e-6)
  jax.tree.map(lambda a, b: test_lora.near(a, b, 1e-4), grads, expected)
  float_loss = test_lora.gradient(plain, params, batch, 4)[0][0]
  assert 0 < abs(loss - float_loss) < 0.05 * float_loss


# ------------------------------------------------------------------------ peft


@pytest.fixture(scope='module', params=FAMILIES)
def based(request, tmp_path_factory):
  """Returns (folder of a base model, its ModelConfig)."""
  folder = tmp_path_factory.mktemp('base') / request.param
  cfg = dataclasses.replace(config(family=request.param), lora=())
  model = model_lib.build(cfg)
  hf_export.save(folder, model, tiny.params(model))
  return folder, cfg


@pytest.mark.parametrize('rslora', [False, True])
def test_adapters_round_trip_through_peft(based, tmp_path, rslora):
  pytest.importorskip('torch', reason='parity with peft needs torch')
  library = pytest.importorskip('peft', reason='peft is not installed')
  from transformers import AutoModelForCausalLM

  folder, cfg = based
  model = model_lib.build(dataclasses.replace(cfg, lora=(3, 5.0, rslora, ALL)))
  params = test_lora.params_of(model) | hf.load_params(
    folder, model.base, model.base.shardings(tiny.one_device()), 'float32'
  )
  peft.writer(model, params, str(folder))(tmp_path / 'adapter')
  network = library.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / 'adapter')
  ids = tiny.tokens((2, 10))
  ours = test_lora.logits(model, params, ids)
  test_lora.near(tiny.torch_logits(network.eval(), ids), ours)
  loaded_model, loaded_params = test_lora.load(folder, tmp_path / 'adapter', cfg)
  test_lora.near(test_lora.logits(loaded_model, loaded_params, ids), ours)
  # PEFT stacks the experts when it saves; its folder is read, too.
  network.save_pretrained(tmp_path / 'theirs')
  raw = json.loads((tmp_path / 'theirs/adapter_config.json').read_text())
  assert raw['target_parameters']
  loaded_model, loaded_params = test_lora.load(folder, tmp_path / 'theirs', cfg)
  test_lora.near(test_lora.logits(loaded_model, loaded_params, ids), ours)
  assert loaded_model.config.lora[0] == 3 and 'experts/up' in loaded_model.config.lora[3]


@pytest.mark.parametrize('names', [('gate_up_proj', 'down_proj'), ('down_proj',), ('gate_up_proj',)])
def test_peft_target_parameters_are_loaded(based, tmp_path, names):
  """`target_parameters` of PEFT adapts fused tensors, in which gate and up share A."""
  folder, cfg = based
  network = test_lora.torch_model(
    folder, target_modules=['q_proj'], use_rslora=True, target_parameters=[f'mlp.experts.{name}' for name in names]
  )
  network.save_pretrained(tmp_path)
  model, params = test_lora.load(folder, tmp_path, cfg)
  ids = tiny.tokens((2, 10))
  test_lora.near(test_lora.logits(model, params, ids), tiny.torch_logits(network, ids))
  file = tmp_path / 'adapter_config.json'
  raw = json.loads(file.read_text())
  for fields in (dict(rank_pattern={'q_proj': 2}), dict(target_parameters=['mlp.gate.weight'])):
    file.write_text(json.dumps(raw | fields))
    with pytest.raises(InputError, match='|'.join(fields)):
      peft.read_spec(tmp_path, cfg)


def test_adapter_that_peft_cannot_represent_is_not_written(caplog):
  model = model_lib.build(config('experts/gate'))
  assert peft.writer(model, tiny.params(model), 'base') is None and 'both need' in caplog.text


@pytest.mark.parametrize(
  'family, first_dense, targets, warning',
  [
    ('glm4_moe', 1, lora.DEFAULT, 'does not load adapters such as base_model.model.model.layers.0.mlp.down_proj'),
    ('glm4_moe', 1, 'q|k|v|o', ''),
    ('qwen3_moe', 0, lora.DEFAULT, ''),
  ],
)
def test_warning_for_dense_mlp_adapters_that_peft_drops(tmp_path, caplog, family, first_dense, targets, warning):
  """PEFT takes gate_proj of a dense layer for that of the experts, and drops the adapter."""
  experts = dataclasses.replace(EXPERTS, first_dense=first_dense)
  cfg = tiny.config(family=family, num_layers=2, experts=experts, lora=(2, 3.0, False, targets))
  model = model_lib.build(cfg)
  peft.writer(model, tiny.params(model), 'base')(tmp_path / 'adapter')
  assert (tmp_path / 'adapter').exists()  # this library, and servers that read the file themselves, can load it
  assert warning in caplog.text and bool(warning) == ('does not load' in caplog.text)


def test_all_linear_covers_every_matrix_except_those_of_experts(caplog):
  table = model_lib.build(tiny.config(family='qwen3_moe', num_layers=2, experts=EXPERTS)).table
  all_linear_model = model_lib.build(config(lora.ALL_LINEAR))
  adapted = {
    path.split('/', 1)[1][:-2] for path in all_linear_model.table if path.startswith('lora/') and path.endswith('/a')
  }
  assert adapted == {p for p in lora.targets(table) if 'expert' not in table[p].axes} == {*lora.all_linear(table)}
  latent = model_lib.build(tiny.latent()).table
  assert lora.target_pattern(lora.ALL_LINEAR, latent, 2) == lora.ALL_LINEAR
  assert lora.target_pattern(lora.ALL_LINEAR, table, 2) == lora.DEFAULT  # the default names the same matrices here

  def warning_of(pattern, rank=2):
    caplog.clear()
    lora.warn_left_out(model_lib.build(tiny.latent(lora=(rank, 2.0, False, pattern))))
    return caplog.text

  assert 'kv_a, kv_b' in warning_of(lora.DEFAULT) and 'all-linear includes them' in warning_of(lora.DEFAULT)
  assert not warning_of('o') and not warning_of(lora.ALL_LINEAR)
  min_rank = min(lora.full_rank(latent[p]) for p in lora.all_linear(latent))
  narrow = [p for p in lora.all_linear(latent) if lora.full_rank(latent[p]) == min_rank]
  model = model_lib.build(tiny.latent(lora=(min_rank + 1, 2.0, False, lora.ALL_LINEAR)))
  assert not any(f'lora/{p}/a' in model.table for p in narrow)
  assert f'their rank is below {min_rank + 1}' in warning_of(lora.ALL_LINEAR, min_rank + 1)


@pytest.mark.parametrize(
  'family, targets, warning',
  [
    ('kimi_linear', lora.DEFAULT, ''),
    ('kimi_linear', 'o|in_b', ''),
    ('kimi_linear', 'o|in_a_down', 'self_attn.f_a_proj.lora_A.weight of a kimi_linear model'),
    ('kimi_linear', 'o|shared_up', 'shared_experts.up_proj.lora_A.weight of a kimi_linear model'),
    ('nemotron_h', lora.DEFAULT, 'out_proj.lora_A.weight of a nemotron_h model'),
    ('nemotron_h', 'q|k|v', ''),
  ],
)
def test_warning_for_hybrid_adapters_that_peft_does_not_load(tmp_path, caplog, family, targets, warning):
  model = model_lib.build(tiny.hybrid(family, lora=(2, 3.0, False, targets)))
  peft.writer(model, tiny.params(model), 'base')(tmp_path / 'adapter')
  assert (tmp_path / 'adapter').exists()  # this library, and servers that read the file themselves, can load it
  assert warning in caplog.text and bool(warning) == ('does not load' in caplog.text)
