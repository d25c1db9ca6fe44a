"""Every family of decoders against `transformers`, on random tiny models.

Legend: B rows, T tokens, V vocabulary, S slots.

Weights of std 0.5, so that wrong mathematics shows; rows longer than the
windows and than the context that a rope scaling starts from.
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
from jaxpost.losses import head as head_lib
from jaxpost.models import config as config_lib
from jaxpost.models import families, hf, presets, transformer
from jaxpost.models import model as model_lib
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Prompt

LOGITS, GRADIENTS = 3e-5, 1e-3  # of the largest
LENGTH = 40
BASE = dict(
    vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    rms_norm_eps=0.05, max_position_embeddings=64, bos_token_id=None,
    eos_token_id=None, pad_token_id=None)
FULL, LOCAL = 'full_attention', 'sliding_attention'
GEMMA_2 = dict(
    sliding_window=6, layer_types=[LOCAL, FULL], query_pre_attn_scalar=24,
    attn_logit_softcapping=4.0, final_logit_softcapping=9.0)


def rope(kind='default', theta=500.0, **fields):
  return dict(rope_type=kind, rope_theta=theta, **fields)


def longrope(**fields):
  return rope('longrope', short_factor=[1.0, 1.2, 1.5, 2.0],
              long_factor=[1.5, 3.0, 5.0, 9.0], **fields)


YARN = rope('yarn', factor=4.0, original_max_position_embeddings=16,
            beta_fast=8.0, beta_slow=1.0)
# Name -> (class of transformers, fields of its config).
CASES = {
    'llama2': ('Llama', dict(num_key_value_heads=4)),
    'llama3': ('Llama', dict(rope_parameters=rope(
        'llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32), tie_word_embeddings=True)),
    'llama_biases': ('Llama', dict(
        attention_bias=True, mlp_bias=True, hidden_act='gelu')),
    'llama_linear': ('Llama', dict(rope_parameters=rope('linear', factor=3.0))),
    'llama_dynamic': ('Llama', dict(
        max_position_embeddings=24, rope_parameters=rope(
            'dynamic', factor=3.0))),
    'llama_yarn': ('Llama', dict(rope_parameters=YARN)),
    'mistral': ('Mistral', dict(sliding_window=6)),
    'qwen2': ('Qwen2', dict(
        use_sliding_window=True, max_window_layers=1, sliding_window=6)),
    'qwen2_yarn': ('Qwen2', dict(
        tie_word_embeddings=True, rope_parameters=YARN | dict(
            attention_factor=1.3, truncate=False))),
    'qwen3': ('Qwen3', dict(tie_word_embeddings=True, attention_bias=True)),
    'gemma': ('Gemma', dict(hidden_act='gelu')),
    'gemma2': ('Gemma2', GEMMA_2),
    'gemma3': ('Gemma3Text', dict(
        num_hidden_layers=3, sliding_window=6, sliding_window_pattern=2,
        query_pre_attn_scalar=24, rope_parameters={
            FULL: rope('linear', 5000.0, factor=8.0),
            LOCAL: rope(theta=100.0)})),
    'olmo2': ('Olmo2', {}),
    'olmo3': ('Olmo3', dict(sliding_window=6, layer_types=[LOCAL, FULL],
                            rope_parameters={FULL: YARN, LOCAL: rope()})),
    'phi3': ('Phi3', dict(sliding_window=12)),
    'phi3_longrope': ('Phi3', dict(
        original_max_position_embeddings=16, rope_parameters=longrope())),
    'phi4_mini': ('Phi3', dict(
        head_dim=16, hidden_size=64, original_max_position_embeddings=16,
        tie_word_embeddings=True, rope_parameters=longrope(
            partial_rotary_factor=0.5))),
    'smollm3': ('SmolLM3', dict(
        num_hidden_layers=3, no_rope_layers=[1, 0, 1])),
    'granite': ('Granite', dict(
        embedding_multiplier=3.0, residual_multiplier=0.4,
        attention_multiplier=0.2, logits_scaling=2.5, attention_bias=True)),
}
FAMILY_OF = {name: kind for name, (kind, _) in CASES.items()}


def make(case, folder):
  """Writes a model of `transformers` with random weights; returns it."""
  torch = pytest.importorskip('torch')
  import transformers
  kind, fields = CASES[case]
  fields = BASE | fields
  config = getattr(transformers, f'{kind}Config')(**fields)
  torch.manual_seed(0)
  name = kind.removesuffix('Text')
  network = getattr(transformers, f'{name}ForCausalLM')._from_config(
      config, attn_implementation='eager').eval()
  ones = not name.startswith('Gemma')  # Gemma adds 1 to its scales
  with torch.no_grad():
    for path, p in network.named_parameters():
      p.copy_(0.5 * torch.randn_like(p) + (ones and 'norm' in path))
  network.save_pretrained(folder)
  return network


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """case -> (folder, torch model), made once."""
  made = {}

  def get(case):
    if case not in made:
      folder = tmp_path_factory.mktemp(case)
      made[case] = folder, make(case, folder)
    return made[case]

  return get


def load(folder):
  model = model_lib.build(hf.read_config(folder))
  hf.check(folder, model.config)
  return model, hf.load_params(
      folder, model, model.shardings(tiny.one_device()), 'float32')


def torch_logits(network, ids):
  import torch
  with torch.no_grad():
    return network(torch.tensor(ids).long()).logits.numpy()


def difference(ours, theirs) -> float:
  return tiny.largest(ours - theirs) / tiny.largest(theirs)


def logit_error(folder, network) -> float:
  """Of a long row, and of a short one where lengths matter."""
  model, params = load(folder)
  return max(difference(tiny.logits(model, params, ids),
                        torch_logits(network, ids))
             for ids in (tiny.tokens((2, LENGTH)), tiny.tokens((1, 12))))


def gradient_error(folder, network) -> float:
  """The largest over tensors, each relative to its largest entry."""
  import torch
  ids = tiny.tokens((2, LENGTH))
  weights = np.random.RandomState(1).standard_normal(
      (*ids.shape, 131)).astype(np.float32)
  network.zero_grad()
  loss = torch.sum(torch.log_softmax(network(
      torch.tensor(ids).long()).logits, -1) * torch.tensor(weights))
  loss.backward()
  theirs = {k: p.grad.numpy() for k, p in network.named_parameters()}
  model, params = load(folder)

  def ours(params):
    out = head_lib.logits(tiny.hidden(model, params, ids), model.head(params),
                          model.config.logit_form, 'float32')
    return jnp.sum(jax.nn.log_softmax(out[..., :131]) * weights)

  grads = jax.jit(jax.grad(ours))(params)
  found = dict(hf.tensors(model, grads, np.dtype('float32')))
  assert set(theirs) == set(found)
  return max(difference(found[k], g) for k, g in theirs.items())


@pytest.mark.parametrize('case', CASES)
def test_logits_equal_those_of_transformers(reference, case):
  assert logit_error(*reference(case)) <= LOGITS


WITH_GRADIENTS = ('llama3', 'llama_biases', 'mistral', 'qwen2', 'gemma2',
                  'gemma3', 'olmo2', 'phi4_mini', 'granite')


@pytest.mark.parametrize('case', WITH_GRADIENTS)
def test_gradients_equal_those_of_torch(reference, case):
  assert gradient_error(*reference(case)) <= GRADIENTS
