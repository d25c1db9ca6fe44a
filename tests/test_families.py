"""Every family of decoders against `transformers`: logits, gradients, decoding, config.json, import and export.

Legend: B rows, T tokens, V vocabulary, S slots.

Models are tiny, with random weights of standard deviation 0.5, large enough for an error in the math to show. Rows are
longer than the attention windows and than the context at which rope scaling begins.
"""

import copy
import dataclasses
import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.errors import InputError
from jaxpost.formats import (
  config_export,
  config_fields,
  config_json,
  families,
  hf,
  hf_export,
  other_families,
  tensor_layout,
)
from jaxpost.losses import head_chunk
from jaxpost.models import config as config_lib
from jaxpost.models import decoder_configs, parameters, presets
from jaxpost.models import model as model_lib
from jaxpost.models import rope as rope_lib
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Prompt

LOGITS, GRADIENTS = 3e-5, 1e-3  # tolerances, relative to the largest entry
LENGTH = 40
BASE = dict(
  vocab_size=131,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  rms_norm_eps=0.05,
  max_position_embeddings=64,
  bos_token_id=None,
  eos_token_id=None,
  pad_token_id=None,
)
FULL, LOCAL = 'full_attention', 'sliding_attention'
GEMMA_2 = dict(
  sliding_window=6,
  layer_types=[LOCAL, FULL],
  query_pre_attn_scalar=24,
  attn_logit_softcapping=4.0,
  final_logit_softcapping=9.0,
)

GEMMA_4 = dict(
  num_hidden_layers=3,
  hidden_size=36,
  head_dim=10,
  global_head_dim=14,
  sliding_window=6,
  layer_types=[LOCAL, LOCAL, FULL],
  hidden_size_per_layer_input=0,
  vocab_size_per_layer_input=131,
  final_logit_softcapping=9.0,
)


def rope(kind='default', theta=500.0, **fields):
  return dict(rope_type=kind, rope_theta=theta, **fields)


def longrope(**fields):
  return rope('longrope', short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[1.5, 3.0, 5.0, 9.0], **fields)


YARN = rope('yarn', factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0)
LATENT = dict(
  num_hidden_layers=3,
  num_key_value_heads=4,
  head_dim=4,
  kv_lora_rank=12,
  q_lora_rank=14,
  qk_rope_head_dim=4,
  qk_nope_head_dim=6,
  v_head_dim=10,
  n_routed_experts=8,
  n_shared_experts=2,
  n_group=4,
  topk_group=2,
  num_experts_per_tok=3,
  moe_intermediate_size=20,
  first_k_dense_replace=1,
  routed_scaling_factor=1.7,
  norm_topk_prob=True,
  num_mtp_layers=0,
)
# Rows are longer than the 7 tokens that a query attends to. With few heads, many scores would be 0, and torch.topk
# could select any of these ties.
SPARSE = LATENT | dict(index_n_heads=7, index_head_dim=6, index_topk=7)
LINEAR = 'linear_attention'
# At these sizes, transformers in float32 agrees with itself in float64 within the tolerance. It subtracts sums of
# decays, so at other sizes of this order it is off by up to 4e-5 of the largest logit (this library by 1e-5).
HYBRID = dict(
  num_hidden_layers=4,
  layer_types=[LINEAR, LINEAR, FULL, LINEAR],
  linear_num_key_heads=3,
  linear_num_value_heads=6,
  linear_key_head_dim=14,
  linear_value_head_dim=6,
  linear_conv_kernel_dim=3,
  head_dim=12,
  rope_parameters=rope(partial_rotary_factor=0.5),
)
HYBRID_EXPERTS = dict(
  num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28
)
KIMI = dict(
  num_hidden_layers=4,
  hidden_size=36,
  layer_types=[LINEAR, LINEAR, FULL, LINEAR],
  linear_num_heads=3,
  linear_head_dim=14,
  linear_conv_kernel_dim=3,
  num_key_value_heads=4,
  head_dim=6,
  kv_lora_rank=12,
  q_lora_rank=None,
  qk_rope_head_dim=6,
  qk_nope_head_dim=8,
  v_head_dim=10,
  num_local_experts=8,
  num_experts_per_tok=3,
  n_shared_experts=2,
  n_group=4,
  topk_group=2,
  moe_intermediate_size=20,
  routed_scaling_factor=1.7,
)
SPACE = dict(
  num_hidden_layers=4,
  layer_types=[LINEAR, LINEAR, FULL, LINEAR],
  num_local_experts=0,
  shared_intermediate_size=44,
  mamba_n_groups=3,
  mamba_n_heads=6,
  mamba_d_head=16,
  mamba_expand=3,
  mamba_d_state=10,
  mamba_d_conv=3,
  embedding_multiplier=3.0,
  residual_multiplier=0.4,
  attention_multiplier=0.2,
  logits_scaling=2.5,
)
SINGLE = dict(
  num_hidden_layers=4,
  layers_block_type=[LINEAR, 'moe', FULL, 'mlp'],
  ssm_state_size=10,
  mamba_num_heads=6,
  mamba_head_dim=16,
  n_groups=3,
  conv_kernel=3,
  time_step_min=0.3,
  layer_norm_epsilon=0.05,
  n_routed_experts=8,
  num_experts_per_tok=3,
  n_group=4,
  topk_group=2,
  moe_intermediate_size=20,
  moe_shared_expert_intermediate_size=28,
  moe_latent_size=20,
  routed_scaling_factor=1.7,
)
CHUNKED = dict(
  hidden_size=36,
  head_dim=10,
  num_hidden_layers=6,
  num_attention_heads=6,
  intermediate_size=20,
  intermediate_size_mlp=44,
  attention_chunk_size=6,
  no_rope_layer_interval=3,
  floor_scale=5,
  attn_scale=0.3,
  num_local_experts=5,
  num_experts_per_tok=2,
)
NOT_TRAINED = ('correction_bias', 'expert_bias', 'layer_scalar')  # tensors without a gradient
OTHER_DECODE = ('nemotron_h',)  # decoding in transformers ignores `time_step_min`, unlike its forward pass
# Name -> (prefix of the classes in transformers, fields of the config).
CASES = {
  'llama2': ('Llama', dict(num_key_value_heads=4)),
  'llama3': (
    'Llama',
    dict(
      rope_parameters=rope(
        'llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
      ),
      tie_word_embeddings=True,
    ),
  ),
  'llama_biases': ('Llama', dict(attention_bias=True, mlp_bias=True, hidden_act='gelu')),
  'llama_linear': ('Llama', dict(rope_parameters=rope('linear', factor=3.0))),
  'llama_dynamic': ('Llama', dict(max_position_embeddings=24, rope_parameters=rope('dynamic', factor=3.0))),
  'llama_yarn': ('Llama', dict(rope_parameters=YARN)),
  'mistral': ('Mistral', dict(sliding_window=6)),
  'qwen2': ('Qwen2', dict(use_sliding_window=True, max_window_layers=1, sliding_window=6)),
  'qwen2_yarn': (
    'Qwen2',
    dict(tie_word_embeddings=True, rope_parameters=YARN | dict(attention_factor=1.3, truncate=False)),
  ),
  'qwen3': ('Qwen3', dict(tie_word_embeddings=True, attention_bias=True)),
  'qwen3_moe': (
    'Qwen3Moe',
    dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, attention_bias=True),
  ),
  'qwen3_moe_raw': (
    'Qwen3Moe',
    dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, use_sliding_window=True, sliding_window=6),
  ),
  'qwen3_next': ('Qwen3Next', HYBRID | HYBRID_EXPERTS | dict(num_hidden_layers=3, layer_types=[LINEAR, LINEAR, FULL])),
  'qwen3_5': ('Qwen3_5Text', HYBRID | dict(num_hidden_layers=6, layer_types=[LINEAR, LINEAR, FULL] * 2)),
  'qwen3_5_moe': (
    'Qwen3_5MoeText',
    HYBRID | HYBRID_EXPERTS | dict(linear_num_value_heads=3, num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR]),
  ),
  'lfm2': (
    'Lfm2',
    dict(
      layer_types=['conv', FULL, 'conv'],
      num_hidden_layers=3,
      conv_L_cache=4,
      norm_eps=0.05,
      intermediate_size=54,
      block_multiple_of=12,
      tie_word_embeddings=True,
    ),
  ),
  'lfm2_moe': (
    'Lfm2Moe',
    dict(
      layer_types=['conv', FULL, 'conv'],
      num_hidden_layers=3,
      conv_L_cache=4,
      norm_eps=0.05,
      num_dense_layers=1,
      num_experts=6,
      num_experts_per_tok=3,
      moe_intermediate_size=20,
      routed_scaling_factor=1.7,
    ),
  ),
  'olmo_hybrid': (
    'OlmoHybrid',
    # transformers writes the convolutions of queries, keys and values in three tensors of one size. With the usual eps,
    # the norm of one output of the delta rule, 50 times smaller than the others, would amplify rounding to 1.5e-5.
    HYBRID
    | dict(linear_num_value_heads=3, linear_value_head_dim=14, head_dim=8, num_hidden_layers=3)
    | dict(layer_types=[LINEAR, FULL, LINEAR], rope_parameters=rope(theta=None), rms_norm_eps=1e-3),
  ),
  'kimi_linear': ('KimiLinear', KIMI),
  'nemotron_h': ('NemotronH', SINGLE),
  'granite_hybrid': ('GraniteMoeHybrid', SPACE),
  'granite_hybrid_rope': (
    'GraniteMoeHybrid',
    SPACE
    | dict(num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], position_embedding_type='rope')
    | dict(mamba_n_groups=1, mamba_conv_bias=False, attention_bias=True),
  ),
  'granite_hybrid_moe': (
    'GraniteMoeHybrid',
    SPACE
    | dict(num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], num_local_experts=6)
    | dict(num_experts_per_tok=2, intermediate_size=20),
  ),
  'granite_dense': ('GraniteMoeHybrid', SPACE | dict(layer_types=[FULL] * 4, position_embedding_type='rope')),
  'mixtral': ('Mixtral', dict(num_local_experts=5, sliding_window=6)),
  'gpt_oss': (
    'GptOss',
    dict(
      num_local_experts=5,
      num_experts_per_tok=2,
      sliding_window=6,
      swiglu_limit=1.5,
      rope_parameters=YARN | dict(truncate=False),
    ),
  ),
  'deepseek_v3': ('DeepseekV3', LATENT | dict(rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=0.6))),
  'moonlight': (
    'DeepseekV3',
    LATENT
    | dict(
      q_lora_rank=None, rope_interleave=False, n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=0
    ),
  ),
  'kimi_k2': (
    'DeepseekV3',
    LATENT
    | dict(
      n_group=1,
      topk_group=1,
      n_shared_experts=1,
      routed_scaling_factor=2.827,
      rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    ),
  ),
  'deepseek_v32': ('DeepseekV32', SPARSE | dict(rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=0.6))),
  'glm_moe_dsa': ('GlmMoeDsa', SPARSE | dict(rope_parameters=rope(), n_group=1, topk_group=1, index_n_heads=9)),
  'mistral4': (
    'Mistral4',
    {k: v for k, v in LATENT.items() if k != 'num_mtp_layers'}
    | dict(head_dim=10, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)),
  ),
  'llama4': (
    'Llama4Text',
    CHUNKED
    | dict(interleave_moe_layer_step=2)
    | dict(
      rope_parameters=rope(
        'llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=32
      )
    ),
  ),
  'llama4_untuned': (
    'Llama4Text',
    CHUNKED | dict(num_hidden_layers=3, use_qk_norm=False, attn_temperature_tuning=False, num_experts_per_tok=1),
  ),
  'gemma': ('Gemma', dict(hidden_act='gelu')),
  'gemma2': ('Gemma2', GEMMA_2),
  'gemma3': (
    'Gemma3Text',
    dict(
      num_hidden_layers=3,
      sliding_window=6,
      sliding_window_pattern=2,
      query_pre_attn_scalar=24,
      final_logit_softcapping=9.0,
      rope_parameters={FULL: rope('linear', 5000.0, factor=8.0), LOCAL: rope(theta=100.0)},
    ),
  ),
  'gemma4': ('Gemma4Text', GEMMA_4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
  'gemma4_e': (
    'Gemma4Text',
    GEMMA_4
    | dict(num_hidden_layers=5, layer_types=[LOCAL, LOCAL, FULL, LOCAL, FULL], num_kv_shared_layers=2)
    | dict(hidden_size_per_layer_input=6, use_double_wide_mlp=True),
  ),
  'gemma4_moe': (
    'Gemma4Text',
    GEMMA_4 | dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=20),
  ),
  'olmo2': ('Olmo2', {}),
  'olmo3': ('Olmo3', dict(sliding_window=6, layer_types=[LOCAL, FULL], rope_parameters={FULL: YARN, LOCAL: rope()})),
  'olmoe': ('Olmoe', dict(num_experts=6, num_experts_per_tok=2)),
  'phi3': ('Phi3', dict(sliding_window=12)),
  'phi3_longrope': ('Phi3', dict(original_max_position_embeddings=16, rope_parameters=longrope())),
  'phi4_mini': (
    'Phi3',
    dict(
      head_dim=16,
      hidden_size=64,
      original_max_position_embeddings=16,
      tie_word_embeddings=True,
      rope_parameters=longrope(partial_rotary_factor=0.5),
    ),
  ),
  'smollm3': ('SmolLM3', dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1])),
  'ministral3': (
    'Ministral3',
    dict(sliding_window=6, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)),
  ),
  'seed_oss': ('SeedOss', dict(attention_bias=True, attention_out_bias=False, mlp_bias=True)),
  'hunyuan': (
    'HunYuanDenseV1',
    dict(tie_word_embeddings=True, rope_parameters=rope('dynamic', alpha=9.0, factor=1.0), attention_bias=True),
  ),
  'ernie': ('Ernie4_5', dict(use_bias=True)),
  'ernie_moe': (
    'Ernie4_5_Moe',
    dict(num_hidden_layers=3, moe_num_experts=6, moe_k=3, moe_intermediate_size=20, moe_num_shared_experts=2),
  ),
  'glm4': ('Glm4', dict(attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5))),
  'glm4_moe': (
    'Glm4Moe',
    dict(
      num_hidden_layers=3,
      n_routed_experts=6,
      num_experts_per_tok=3,
      moe_intermediate_size=20,
      n_shared_experts=2,
      routed_scaling_factor=1.7,
      use_qk_norm=True,
      attention_bias=True,
      rope_parameters=rope(partial_rotary_factor=0.5),
      num_mtp_layers=0,
    ),
  ),
  'minimax_m2': (
    'MiniMaxM2',
    dict(num_local_experts=6, num_experts_per_tok=3, rotary_dim=4, rope_parameters=rope(partial_rotary_factor=0.5)),
  ),
  'granite': (
    'Granite',
    dict(
      embedding_multiplier=3.0,
      residual_multiplier=0.4,
      attention_multiplier=0.2,
      logits_scaling=2.5,
      attention_bias=True,
    ),
  ),
}
# Fields of published configs that `transformers` does not write, or writes differently.
WRITTEN = {
  'kimi_k2': dict(
    model_type='kimi_k2',
    architectures=['DeepseekV3ForCausalLM'],
    scoring_func='sigmoid',
    topk_method='noaux_tc',
    moe_layer_freq=1,
    ep_size=1,
    aux_loss_alpha=0.001,
    seq_aux=True,
    num_nextn_predict_layers=0,
  )
}


def make(case, folder):
  """Writes the folder of a `transformers` model with random weights; returns the model."""
  torch = pytest.importorskip('torch')
  import transformers

  kind, fields = CASES[case]
  fields = BASE | fields
  config = getattr(transformers, f'{kind}Config')(**fields)
  torch.manual_seed(0)
  name = kind.removesuffix('Text')
  network = getattr(transformers, f'{name}ForCausalLM')._from_config(config, attn_implementation='eager').eval()
  scales_around_1 = not name.startswith('Gemma') or name == 'Gemma4'  # earlier Gemmas add 1 to the scales of norms
  with torch.no_grad():
    for path, p in network.named_parameters():
      if not path.endswith('correction_bias'):
        p.copy_(0.5 * torch.randn_like(p) + (scales_around_1 and 'norm' in path))
    for path, value in (*network.named_parameters(), *network.named_buffers()):
      if path.endswith(NOT_TRAINED):
        value.copy_(0.2 * torch.randn_like(value) + path.endswith('scalar'))
  network.save_pretrained(folder)
  path = pathlib.Path(folder) / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | WRITTEN.get(case, {})))
  return network


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """reference(case) -> (folder, torch model), made once per case."""
  references = {}

  def get(case):
    if case not in references:
      folder = tmp_path_factory.mktemp(case)
      references[case] = folder, make(case, folder)
    return references[case]

  return get


def logit_error(folder, network) -> float:
  """Returns the relative error of the logits of long rows.

  Families whose rope depends on the length of a document are also compared on short rows.
  """
  model, params = tiny.load(folder)
  lengths = (LENGTH, 12) if rope_lib.by_length(model.config) else (LENGTH,)
  rows = [tiny.tokens((2, n)) for n in lengths]
  return max(tiny.difference(tiny.logits(model, params, ids), tiny.torch_logits(network, ids)) for ids in rows)


def stored_gradients(network):
  """The gradients under the tensor names of a saved folder, where experts are separate and not fused as in memory."""
  import torch

  saved = copy.deepcopy(network)
  with torch.no_grad():
    for parameter, copied in zip(network.parameters(), saved.parameters()):
      # A parameter that only selects experts has no gradient.
      copied.copy_(torch.zeros_like(copied) if parameter.grad is None else parameter.grad)
    for path, buffer in saved.named_buffers():
      if path.endswith(NOT_TRAINED):
        buffer.zero_()
  with tempfile.TemporaryDirectory() as folder:
    saved.save_pretrained(folder)
    return tensors(pathlib.Path(folder))


def gradient_error(folder, network) -> float:
  """Returns the largest error over all gradients, each relative to its largest entry."""
  import torch

  ids = tiny.tokens((2, LENGTH))
  weights = np.random.RandomState(1).standard_normal((*ids.shape, 131)).astype(np.float32)
  network.zero_grad()
  loss = torch.sum(torch.log_softmax(network(torch.tensor(ids).long()).logits, -1) * torch.tensor(weights))
  loss.backward()
  theirs = stored_gradients(network)
  model, params = tiny.load(folder)

  def ours(params):
    out = head_chunk.logits(tiny.hidden(model, params, ids), model.head(params), model.config.logit_form, 'float32')
    return jnp.sum(jax.nn.log_softmax(out[..., :131]) * weights)

  grads = jax.jit(jax.grad(ours))(params)
  exported = dict(hf_export.export_tensors(tensor_layout.table(model.config), grads, np.dtype('float32')))
  assert set(theirs) == set(exported)
  return max(tiny.difference(exported[k], g) if np.any(g) else tiny.largest(exported[k]) for k, g in theirs.items())


@pytest.mark.parametrize('case', CASES)
def test_logits_equal_those_of_transformers(reference, case):
  assert logit_error(*reference(case)) <= LOGITS


@pytest.mark.parametrize('case', CASES)
def test_gradients_equal_those_of_torch(reference, case):
  assert gradient_error(*reference(case)) <= GRADIENTS


def tensors(folder):
  """Returns {name: value} of the tensors in a folder, with names spelled as in published folders."""
  family = families.every()[json.loads((folder / 'config.json').read_text())['model_type']]

  def published(name):
    return functools.reduce(lambda x, pair: x.replace(*pair), family.spellings.items(), name)

  return {
    published(name): value
    for path in sorted(folder.glob('*.safetensors'))
    for name, value in safetensors.numpy.load_file(path).items()
  }


@pytest.mark.parametrize('case', CASES)
def test_import_and_export_give_the_same_bits(reference, tmp_path, case):
  """And `transformers` computes the same logits from the exported folder."""
  from transformers import AutoModelForCausalLM

  folder, network = reference(case)
  model, params = tiny.load(folder)
  hf_export.save(tmp_path / 'x', model, params)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), tensors(folder), tensors(tmp_path / 'x'))
  config_of_export = hf.read_config(tmp_path / 'x')
  assert config_of_export == model.config
  record = json.loads(json.dumps(dataclasses.asdict(model.config)))  # as a checkpoint stores it
  assert decoder_configs.from_json(record) == model.config
  # AutoModelForCausalLM knows Mistral 4 only as a part of Mistral 3.
  kind = type(network) if case == 'mistral4' else AutoModelForCausalLM
  exported = kind.from_pretrained(tmp_path / 'x', attn_implementation='eager').eval()
  ids = tiny.tokens((2, LENGTH))
  np.testing.assert_array_equal(tiny.torch_logits(exported, ids), tiny.torch_logits(network, ids))


def greedy(model, params, prompts, lengths, steps):
  """Greedy decoding after a prefill: (tokens [B, steps], hidden states [B, steps, D])."""
  room, compute = prompts.shape[1] + steps, tiny.EXACT
  # The cache past the end of a prompt must not be read: it is filled with values that would change the results.
  past_prompt = (np.arange(room) >= lengths[:, None])[:, None, :, None]

  def widen(c):
    return jnp.where(past_prompt, 1e3, jnp.pad(c, ((0, 0), (0, 0), (0, steps), (0, 0))))

  @jax.jit
  def run(params):
    weights = parameters.unstack_layers(params, model.config.layer_stacks)
    cache, x = model.prefill(params, prompts, lengths, compute=compute)

    states = cache.states
    cache = jax.tree.map(widen, cache.replace(states=()))
    recent = jax.tree.map(lambda c: jnp.full_like(c, 1e3), cache).replace(states=states)

    def step(carry, i):
      recent, x = carry
      tokens = (
        head_chunk.logits(x, model.head(params), model.config.logit_form, 'float32')[:, :131]
        .argmax(-1)
        .astype(jnp.int32)
      )
      return model.decode(weights, cache, recent, tokens, lengths, step=i, compute=compute), (tokens, x)

    return jax.lax.scan(step, (recent, x), jnp.arange(steps))[1]

  return [np.asarray(x).swapaxes(0, 1) for x in run(params)]


@pytest.mark.parametrize('case', CASES)
def test_decode_and_packed_rows_match_forward_of_one_text(reference, case):
  """Greedy decoding from padded prompts writes the text of transformers, with the hidden states of a forward pass.

  A row that packs both texts, computed under a scan over layers in chunks of queries, has the same hidden states.
  """
  torch = pytest.importorskip('torch')
  folder, network = reference(case)
  model, params = tiny.load(folder)
  # If rope depends on the length of a document, all documents are on the same side of the limit of 16 tokens.
  longrope = rope_lib.by_length(model.config) == 16
  lengths = np.array([17, 20] if longrope else [9, 13], np.int32)
  steps, ids = 10, tiny.tokens((2, 20))
  padded = np.where(np.arange(20) < lengths[:, None], ids, 130)
  tokens, hidden = greedy(model, params, padded, lengths, steps)
  texts, ends = np.full((2, 30), 130, np.int32), lengths + steps
  for row, n in enumerate(lengths):
    texts[row, : ends[row]] = [*ids[row, :n], *tokens[row]]
    prompt, options = torch.tensor(ids[row : row + 1, :n]).long(), dict(max_new_tokens=steps, do_sample=False)
    expected = network.generate(prompt, **options, use_cache=case not in OTHER_DECODE)[0, n:].numpy()
    np.testing.assert_array_equal(tokens[row], expected)
  is_token = np.arange(30) < ends[:, None]
  token_positions = np.where(is_token, np.arange(30), 0)
  unpacked = np.asarray(
    tiny.hidden(model, params, texts, segments=is_token.astype(np.int32), positions=token_positions)
  )
  for row, n in enumerate(lengths):
    assert tiny.difference(hidden[row], unpacked[row, n - 1 : n - 1 + steps]) <= LOGITS
  compute = dataclasses.replace(tiny.EXACT, unroll=False, q_chunk=16)
  segments = np.repeat([1, 2], ends)[None]
  packed = tiny.hidden(
    model, params, texts[is_token][None], compute, segments, positions=token_positions[is_token][None]
  )
  assert tiny.difference(packed[0], unpacked[is_token]) <= LOGITS


@pytest.mark.parametrize('case', ['mistral', 'gemma3'])
def test_windows_reach_into_the_shared_part_of_branches(reference, case):
  model, params = tiny.load(reference(case)[0])
  ids = tiny.tokens((1, 28))
  prompt, first, second = ids[:, :8], ids[:, 8:18], ids[:, 18:]

  def unshared(branch):
    return tiny.hidden(model, params, np.concatenate([prompt, branch], 1))[0, 8:]

  branch_positions = np.arange(8, 18)
  forward = jax.jit(
    lambda p: model.forward(
      p,
      ids,
      np.concatenate([np.arange(8), branch_positions, branch_positions])[None],
      np.ones((1, 28), np.int32),
      branch_ids=np.repeat([0, 1, 2], (8, 10, 10))[None],
      compute=dataclasses.replace(tiny.EXACT, q_chunk=4),
    )
  )
  out = forward(params)[0]
  assert tiny.difference(out[8:18], unshared(first)) <= 1e-5
  assert tiny.difference(out[18:], unshared(second)) <= 1e-5


@pytest.mark.parametrize('case', ['gemma2', 'granite'])
def test_greedy_sampler_matches_transformers_generate(reference, case):
  torch = pytest.importorskip('torch')
  folder, network = reference(case)
  model, params = tiny.load(folder)
  settings = native.SamplerConfig(slots=2, max_prompt=8, max_new_tokens=8, stop_ids=(-2,), temperature=0.0)
  engine = native.NativeEngine(model, settings, tiny.one_device('rollout'), tiny.EXACT, Ledger())
  engine.load(params, version=0)
  ids = tiny.tokens((2, 8))
  rollout = engine([Prompt(i, ids[i], '', {}) for i in range(2)], group_size=1, step=0, run_key=np.zeros(2, np.uint32))
  for row in range(2):
    text = network.generate(torch.tensor(ids[row : row + 1]).long(), max_new_tokens=8, do_sample=False)[0].numpy()
    np.testing.assert_array_equal(rollout.completions[row], text[8:])
    expected_logits = tiny.torch_logits(network, text[None])[0].astype(np.float64)
    logp = expected_logits - np.log(np.exp(expected_logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(rollout.logprobs[row], logp[np.arange(7, 15), text[8:]], atol=1e-4)


def test_sampler_refuses_lengths_across_the_longrope_limit(reference):
  model, _ = tiny.load(reference('phi4_mini')[0])
  settings = native.SamplerConfig(slots=1, max_prompt=8, max_new_tokens=9, stop_ids=(2,))
  with pytest.raises(InputError, match='longrope.*16'):
    native.NativeEngine(model, settings, tiny.one_device('rollout'), tiny.EXACT, Ledger())


def changed(value):
  """Returns other values of the same type, each of which must change the model."""
  if isinstance(value, bool) or value is None:
    return [not value]
  if isinstance(value, (int, float)):
    return [value + 2, value * 2]
  if isinstance(value, str):
    return ['gelu' if value == 'silu' else 'silu', 'linear']
  if isinstance(value, list):
    return [value[::-1], value[:-1]]
  return [{**value, k: other} for k, v in value.items() for other in changed(v)]


@pytest.mark.parametrize('case', CASES)
def test_every_config_field_that_is_read_changes_the_model(reference, case):
  """Another value gives another ModelConfig, whose every field counts (test_models.py).

  A value that contradicts another field, such as a number of layers, may be refused instead. No field that
  `transformers` writes is reported as unknown, beyond those that the family lists as reported.
  """
  raw = json.loads((reference(case)[0] / 'config.json').read_text())
  family = families.every()[raw['model_type']]
  right, unknown = config_json.from_hf(raw, 'here')
  assert {*unknown} == {k for k in family.reported if raw.get(k)}
  # A list with one entry per layer takes precedence over the rules that make such a list.
  rules_of_layers = ('layer_types', 'max_window_layers', 'sliding_window_pattern', 'interleave_moe_layer_step')
  read = {*config_fields.READ, *family.reads} & set(raw) - {
    *rules_of_layers,
    'no_rope_layer_interval',
    'use_sliding_window',
  }
  if 'longrope' not in str(raw):
    read.discard('original_max_position_embeddings')
  if family.activation_field != 'hidden_act':
    read = read - {'hidden_act'} | {family.activation_field}
  if family.hybrid == 'state_space' and not right.experts:
    of_experts = {'moe_latent_size', 'moe_shared_expert_intermediate_size'}
    read -= of_experts if family.single else {'intermediate_size'}
  if family.hybrid == 'state_space' and not right.state_shapes:
    read = {field for field in read if not field.startswith('mamba_')}
  if family.mixed and not right.side_size:
    read.discard('vocab_size_per_layer_input')
  if not raw.get('attn_temperature_tuning', True):
    read -= {'floor_scale', 'attn_scale'}
  assert len(read) >= 12
  for field in sorted(read):
    for value in changed(raw[field]):
      try:
        wrong, _ = config_json.from_hf(raw | {field: value}, 'here')
      except InputError:
        continue
      assert wrong != right or value == raw[field], (field, value)


def without(raw, *names):
  return {field: value for field, value in raw.items() if field not in names}


@pytest.mark.parametrize('case', [case for case in CASES if case not in WRITTEN])
def test_missing_config_fields_get_the_defaults_of_transformers(case):
  """Each field, and each parameter of the rope, is left out in turn; each field is also set to null.

  Such a config may be refused, but it must not be read as another model than by transformers.
  """
  import transformers

  kind, fields = CASES[case]
  make_config = getattr(transformers, f'{kind}Config')
  raw = json.loads(json.dumps(make_config(**BASE | fields).to_dict()))
  raw['architectures'] = [kind.removesuffix('Text') + 'ForCausalLM']
  rope = raw.get('rope_parameters')
  incomplete = {f'no {field}': without(raw, field) for field in raw}
  incomplete |= {f'{field}=null': raw | {field: None} for field in raw}
  incomplete |= {f'no rope {field}': raw | {'rope_parameters': without(rope, field)} for field in rope} if rope else {}
  family = families.every()[raw['model_type']]
  if not family.local_rope:  # transformers 5.23 applies the rope_theta of Olmo 3 to full layers only
    incomplete['rope_theta alone'] = without(raw, 'rope_parameters') | {'rope_theta': 77.0}
  compared = 0
  for name, config in incomplete.items():
    try:
      theirs = make_config(**without(copy.deepcopy(config), 'model_type', 'transformers_version'))
    except Exception:  # transformers refuses incomplete configs with many types of errors
      continue
    filled = json.loads(json.dumps(theirs.to_dict())) | {'architectures': raw['architectures']}
    try:
      expected, actual = (config_json.from_hf(x, 'here')[0] for x in (filled, config))
    except InputError:
      continue
    assert actual == expected, name
    compared += 1
  assert compared > 30


ORIGINAL = 'original_max_position_embeddings'
# (case, rope parameter, another value, length of a row whose logits it must change).
ROPES = [
  ('llama_linear', 'factor', 9.0, 40),
  ('llama_dynamic', 'factor', 9.0, 60),
  ('llama_yarn', 'factor', 9.0, 40),
  ('llama_yarn', 'rope_theta', 90.0, 40),
  ('gpt_oss', 'beta_fast', 4.0, 40),
  ('gpt_oss', 'beta_slow', 3.0, 40),
  ('gpt_oss', 'truncate', True, 40),
  ('gpt_oss', ORIGINAL, 32, 40),
  ('gpt_oss', 'attention_factor', 3.0, 40),
  ('deepseek_v3', 'mscale', 2.0, 40),
  ('deepseek_v3', 'mscale_all_dim', 2.0, 40),
  ('phi3_longrope', 'long_factor', [9.0, 5.0, 3.0, 1.5], 40),
  ('phi3_longrope', 'short_factor', [2.0, 1.5, 1.2, 1.0], 12),
  ('phi3_longrope', 'attention_factor', 3.0, 40),
]


@pytest.mark.parametrize('case,key,other,length', ROPES)
def test_rope_parameters_change_the_logits(reference, case, key, other, length):
  folder = reference(case)[0]
  raw = json.loads((folder / 'config.json').read_text())
  if case == 'gpt_oss':  # with 64, some of its few rope frequencies lie between the two betas
    raw['rope_parameters'][ORIGINAL] = 64
  changes = dict(rope_parameters=raw['rope_parameters'] | {key: other})
  if key in raw:
    changes[key] = other
  original, modified = (model_lib.build(config_json.from_hf(raw | x, 'here')[0]) for x in ({}, changes))
  ids = tiny.tokens((1, length), vocab=90)
  params = hf.load_params(folder, original, original.shardings(tiny.one_device()), 'float32')
  original_logits, modified_logits = (tiny.logits(m, params, ids) for m in (original, modified))
  assert tiny.largest(original_logits - modified_logits) > 1e-3 * tiny.largest(original_logits)


LAYERS = dict(layer_types=[FULL, LOCAL])
# (family, fields of its config.json, a pattern in the error message).
REFUSED = [
  ('mistral', dict(attention_bias=True), 'attention_bias'),
  ('mistral', dict(sliding_window=0), 'sliding_window'),
  ('mistral', LAYERS, 'layer_types'),
  ('llama', LAYERS, 'layer_types'),
  ('llama', dict(sliding_window=8), 'sliding_window'),
  ('llama', dict(quantization_config=dict(bits=4)), 'quantization_config'),
  ('llama', dict(auto_map=dict(AutoModel='x.Y')), 'auto_map'),
  ('llama', dict(rope_scaling=dict(type='linear')), 'lacks factor'),
  ('llama', dict(rope_scaling=dict(type='yarn', factor='4')), 'factor'),
  ('llama', dict(rope_scaling=dict(type='mrope')), 'mrope'),
  ('llama', dict(rope_scaling=dict(type=['yarn'])), 'yarn'),
  ('llama', dict(rope_scaling=5), 'rope_scaling=5'),
  # The second is what `transformers` writes; instructions for long contexts say to add the first.
  ('llama', dict(rope_scaling=YARN, rope_parameters=rope()), "rope_scaling.*rope_type.*'yarn'.*'default'"),
  ('llama', dict(rope_scaling=dict(type='yarn', factor=2.0), rope_parameters=YARN), 'rope_scaling.*factor.*2.0.*4.0'),
  (
    'gemma3_text',
    dict(rope_scaling=rope('linear', factor=2.0), rope_parameters={FULL: rope(), LOCAL: rope()}),
    "rope_scaling.*rope_type.*'linear'.*'default'",
  ),
  ('llama', dict(is_causal=False), 'is_causal'),
  ('llama', dict(quantization_config='x'), 'quantization_config'),
  ('llama', dict(architectures=['LlamaForSequenceClassification'], id2label=5), 'id2label=5'),
  (['llama'], {}, 'model_type'),
  ('llama', dict(hidden_act=['silu']), r"hidden_act=\['silu'\] must be"),
  ('llama', dict(architectures=5), 'architectures=5 must be a list'),
  ('llama', dict(rope_theta=float('inf')), 'rope_theta'),
  ('llama', dict(rope_parameters=rope('yarn', factor=4.0, truncate='no')), 'truncate'),
  (
    'llama',
    dict(rope_parameters=rope('yarn', factor=4.0, original_max_position_embeddings=-4)),
    'original_max_position_embeddings=-4',
  ),
  (
    'llama',
    dict(rope_parameters=rope('llama3', factor=4.0, low_freq_factor=2.0, high_freq_factor=1.0)),
    'low_freq_factor must not be above',
  ),
  ('qwen3', dict(layer_types=[['a'], ['b']]), 'layer_types=.* must be'),
  ('smollm3', dict(no_rope_layers=[[1], [0]]), 'no_rope_layers=.* must'),
  ('deepseek_v3', dict(n_routed_experts=None), 'n_routed_experts=None must'),
  ('deepseek_v3', dict(num_nextn_predict_layers='1'), "layers='1' must be"),
  ('llama', dict(rope_parameters={FULL: rope()}), FULL),
  ('llama', dict(partial_rotary_factor=0.5), 'partial_rotary_factor'),
  ('qwen2', LAYERS, 'no sliding_window'),
  ('qwen2', dict(layer_types=['linear_attention'] * 2), 'linear_attention'),
  ('gemma2', dict(query_pre_attn_scalar=0), 'query_pre_attn_scalar'),
  ('gemma2', dict(attn_logit_softcapping='50'), 'attn_logit_softcapping'),
  ('gemma3_text', dict(use_bidirectional_attention=True), 'bidirectional'),
  ('gemma3_text', dict(attn_logit_softcapping=50.0), 'attn_logit_softcapping=50.0 is not supported'),
  ('gemma3_text', dict(layer_types=[FULL]), 'layer_types'),
  ('gemma3_text', dict(rope_parameters=rope()), 'rope_parameters'),
  ('gemma3', {}, 'gemma3_text'),
  ('qwen3_vl', dict(vision_config=dict(depth=2)), 'vision_config of .*qwen3_vl'),
  ('phi3', dict(rope_parameters=longrope(), head_dim=16), 'short_factor'),
  ('phi3', dict(partial_rotary_factor=0.3, head_dim=10), 'rotates 3'),
  ('smollm3', dict(no_rope_layers=[1]), 'no_rope_layers'),
  ('granite', dict(logits_scaling=None), 'logits_scaling'),
  ('granite', dict(hidden_act='relu'), 'relu'),
  ('ministral3', dict(rope_parameters=YARN | dict(llama_4_scaling_beta=-1.0)), 'llama_4_scaling_beta'),
  ('hunyuan_v1_dense', dict(rope_scaling=dict(type='dynamic', factor=2.0)), 'lacks alpha'),
  ('ernie4_5_moe', dict(moe_layer_interval=2), 'moe_layer_interval'),
  ('ernie4_5_moe', dict(moe_layer_end_index=0), 'moe_layer_end_index'),
  ('ernie4_5_moe', dict(use_bias=True), 'use_bias'),
  ('glm4_moe', dict(first_k_dense_replace=2), 'first_k_dense_replace=2 of 2 layers'),
  ('glm4_moe', dict(use_qk_norm='no'), 'use_qk_norm'),
  ('minimax_m2', dict(rotary_dim=2, partial_rotary_factor=0.5), 'rotary_dim=2'),
  ('minimax_m2', dict(scoring_func='softmax'), 'scoring_func'),
  ('qwen3_moe', dict(decoder_sparse_step=2), 'decoder_sparse_step'),
  ('qwen3_moe', dict(mlp_only_layers=[0]), 'mlp_only_layers'),
  ('qwen3_moe', dict(num_experts=4), 'num_experts_per_tok=8 of 4'),
  ('qwen3_moe', dict(norm_topk_prob='yes'), 'norm_topk_prob'),
  ('mixtral', dict(num_local_experts=0), 'num_local_experts'),
  ('olmoe', dict(clip_qkv=8.0), 'clip_qkv'),
  ('mixtral', dict(router_jitter_noise=0.1), 'router_jitter_noise'),
  ('gpt_oss', dict(hidden_act='gelu'), 'hidden_act'),
  ('gpt_oss', dict(swiglu_limit=0), 'swiglu_limit'),
  ('gpt_oss', dict(quantization_config=dict(quant_method='awq')), 'awq'),
  # Two names of one field. `transformers` takes either, by the family and by their order.
  ('qwen3_moe', dict(num_experts=4, num_local_experts=8), 'num_experts=4 and num_local_experts=8 are'),
  ('qwen3_moe', dict(num_local_experts=8, num_experts=4), 'num_local_experts=8 and num_experts=4 are'),
  ('kimi_linear', dict(num_local_experts=8, num_experts=4), 'num_local_experts=8 and num_experts=4 are'),
  ('lfm2', dict(intermediate_size=20, block_ff_dim=24), 'intermediate_size=20 and block_ff_dim=24 are'),
]


@pytest.mark.parametrize('family,fields,word', REFUSED)
def test_unsupported_or_invalid_config_field_is_refused_by_name(family, fields, word):
  raw = dict(BASE, model_type=family) | fields
  with pytest.raises(InputError, match=word) as e:
    config_json.from_hf(raw, 'config.json')
  assert str(e.value).startswith('config.json: ') and '\n' not in str(e.value)


@pytest.mark.parametrize('family, feature', other_families.NOT_BUILT.items())
def test_unsupported_families_are_refused_with_the_feature_they_need(family, feature):
  from transformers.models.auto.configuration_auto import CONFIG_MAPPING

  assert family in CONFIG_MAPPING and family not in families.every()
  with pytest.raises(InputError, match=f"^here: model_type '{family}' is not supported: it needs ") as e:
    config_json.from_hf(BASE | dict(model_type=family), 'here')
  assert str(e.value).endswith(feature)


def test_unknown_fields_and_keys_are_reported():
  def read(**fields):
    return config_json.from_hf(BASE | fields, 'here')[1]

  assert read(model_type='gemma2', hidden_act='silu', clip_all=8) == ['clip_all', 'hidden_act']
  assert read(model_type='llama', rope_scaling=dict(type='linear', factor=2.0, alpha=3), logits_scaling=2.0) == [
    'logits_scaling',
    'rope_parameters.alpha',
  ]
  assert read(model_type='phi3', auto_map=dict(AutoModel='x.Y')) == ['auto_map']


def test_older_spellings_are_read():
  def read(**fields):
    return config_json.from_hf(BASE | fields, 'here')[0]

  scaling = {k: v for k, v in longrope().items() if not k.startswith('rope')}
  new = dict(original_max_position_embeddings=16)
  assert read(model_type='phi3', rope_scaling=scaling | dict(type='su'), rope_theta=500.0, **new) == read(
    model_type='phi3', rope_parameters=longrope(), **new
  )
  both = dict(rope_scaling=scaling | dict(type='su'), rope_parameters=longrope())  # they agree
  assert read(model_type='phi3', **both, **new) == read(model_type='phi3', rope_parameters=longrope(), **new)
  assert read(
    model_type='gemma3_text',
    rope_theta=9.0,
    rope_local_base_freq=5.0,
    rope_scaling=dict(rope_type='linear', factor=8.0),
    sliding_window=6,
    sliding_window_pattern=2,
  ) == read(
    model_type='gemma3_text',
    sliding_window=6,
    layer_types=[LOCAL, FULL],
    rope_parameters={FULL: rope('linear', 9.0, factor=8.0), LOCAL: rope(theta=5.0)},
  )
  layers = read(model_type='qwen2', use_sliding_window=True, max_window_layers=1, sliding_window=6).layer_windows
  assert layers == (0, 6)
  assert read(model_type='gemma2', sliding_window=6).layer_windows == (6, 0)
  assert read(model_type='smollm3', no_rope_layer_interval=2).layer_ropes == (0, -1)


@pytest.mark.parametrize('name', presets.every())
def test_presets_round_trip_through_config_json(name):
  cfg = presets.every()[name]
  raw = json.loads(json.dumps(config_export.to_hf(cfg)))
  assert config_json.from_hf(raw, 'here') == (cfg, [])


RICH = dict(
  norms='both',
  norm_offset=1.0,
  num_layers=2,
  activation='gelu_tanh',
  attention_scale=0.5,
  logit_softcap=1.5,
  embed_scale=4.0,
  layer_windows=(8, 0),
)
GEMMAS = {
  'gemma2': RICH | dict(family='gemma2', attention_softcap=2.0, qk_norm=''),
  'gemma3': RICH | dict(family='gemma3_text', layer_ropes=(1, 0), ropes=(config_lib.Rope(1e6), config_lib.Rope(1e4))),
}


@pytest.mark.parametrize('name', GEMMAS)
def test_training_and_scoring_cap_the_logits_of_student_and_teachers(tmp_path, name):
  """The student is its own teacher: the run itself checks that the divergence of its first step is 0."""
  import jaxpost

  path = tiny.folder(tmp_path / 'model', **GEMMAS[name])
  jaxpost.run(
    tiny.run_config(path, algorithm='distill', distill=dict(teachers=(path,)), train=dict(steps=1)), tmp_path / 'run'
  )


@pytest.mark.parametrize('name', GEMMAS)
def test_sampler_and_training_give_the_same_logprobs(tmp_path, name):
  """Sequences are longer than the attention window; metrics of the first step compare the log-probs."""
  import jaxpost

  path = tiny.folder(tmp_path / 'model', **GEMMAS[name])
  jaxpost.run(tiny.grpo_config(path, train=dict(steps=1)), tmp_path / 'run')
  rows = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  row = next(r for r in rows if 'sampler_mismatch' in r)
  assert abs(row['sampler_mismatch'] - 1) <= 1e-4  # the mean of probability ratios
  assert abs(row['ratio'] - 1) <= 1e-4


def test_fixed_fields_of_families_have_known_names_and_values():
  """A misspelled value would build another model without an error."""
  known = {field.name for field in dataclasses.fields(config_lib.ModelConfig)}
  for name, family in families.every().items():
    assert set(family.fixed) <= known, name
    assert family.fixed.get('norms', 'pre') in ('pre', 'post', 'both'), name
    assert family.fixed.get('qk_norm', '') in ('', 'head', 'rotated', 'wide', 'unscaled'), name
    assert set(family.fixed.get('biases', ())) <= set('q k v o gate up down router sinks'.split()), name


def test_the_table_of_the_docs_has_every_case():
  text = (pathlib.Path(__file__).parents[1] / 'docs/models.md').read_text()
  errors_by_case = {
    cells[1].strip(): [float(x) for x in cells[-3:-1]]
    for cells in (line.split('|') for line in text.splitlines())
    if len(cells) == 7 and cells[1].strip() in CASES
  }
  assert list(errors_by_case) == list(CASES)
  assert all(x <= LOGITS and y <= GRADIENTS for x, y in errors_by_case.values())


@pytest.mark.parametrize('case', ['gemma3', 'smollm3'])
def test_scan_over_layers_that_differ_gives_the_same_gradients(reference, case):
  """Unrolled layers, and a scan over arrays of layers that differ, give the same gradients with rematerialization."""
  model, params = tiny.load(reference(case)[0])
  ids = tiny.tokens((2, 24))

  def gradient(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)
    return jax.jit(jax.grad(lambda p: jnp.sum(jnp.cos(tiny.hidden(model, p, ids, compute)))))(params)

  unrolled, scanned = gradient(remat='full'), gradient(unroll=False, remat='full')
  jax.tree.map(lambda a, b: np.testing.assert_array_less(tiny.difference(a, b), 1e-4), scanned, unrolled)


@pytest.mark.parametrize('family', families.every())
def test_classes_that_an_export_names_exist(family):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('torch')  # `modeling_auto` needs it
  from transformers.models.auto import modeling_auto

  with_labels = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
  assert {'llama', 'gemma3_text'} <= {*with_labels}
  mixer = families.every()[family].hybrid or families.every()[family].latent
  family_fields = {
    True: LATENT,
    'delta': dict(HYBRID),
    'state_space': SPACE,
    'convolution': dict(layer_types=['conv', FULL], num_dense_layers=1),
  }
  family_fields['delta'] |= (
    {} if 'partial_rotary_factor' in families.every()[family].reads else dict(rope_parameters=rope())
  )
  family_fields |= {'state_space': SINGLE} if families.every()[family].single else {}
  family_fields |= {'delta': KIMI} if families.every()[family].latent else {}
  family_fields = GEMMA_4 if families.every()[family].mixed else family_fields.get(mixer, {})
  raw = BASE | family_fields | dict(model_type=family)
  cfg = config_json.from_hf(raw, 'here')[0]
  for labels in (0, 1):
    (name,) = config_export.to_hf(dataclasses.replace(cfg, num_labels=labels))['architectures']
    # For some families `transformers` has no class with a scalar head; these are only read back here.
    assert hasattr(transformers, name) or labels and (cfg.family not in with_labels)
