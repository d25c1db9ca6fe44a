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
from jaxpost.models import rope as rope_lib
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
  """Of long rows, and of short ones where the length decides."""
  model, params = load(folder)
  lengths = (LENGTH, 12) if rope_lib.by_length(model.config) else (LENGTH,)
  rows = [tiny.tokens((2, n)) for n in lengths]
  return max(difference(tiny.logits(model, params, ids),
                        torch_logits(network, ids)) for ids in rows)


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


def tensors(folder):
  return {name: value for path in sorted(folder.glob('*.safetensors'))
          for name, value in safetensors.numpy.load_file(path).items()}


@pytest.mark.parametrize('case', CASES)
def test_import_and_export_give_the_same_bits(reference, tmp_path, case):
  """And a folder that `transformers` computes the same logits from."""
  from transformers import AutoModelForCausalLM
  folder, network = reference(case)
  model, params = load(folder)
  hf.save(tmp_path / 'x', model, params)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True),
               tensors(folder), tensors(tmp_path / 'x'))
  again = hf.read_config(tmp_path / 'x')
  assert again == model.config
  assert config_lib.from_json(json.loads(json.dumps(
      dataclasses.asdict(model.config)))) == model.config  # of a checkpoint
  exported = AutoModelForCausalLM.from_pretrained(
      tmp_path / 'x', attn_implementation='eager').eval()
  ids = tiny.tokens((2, LENGTH))
  np.testing.assert_array_equal(
      torch_logits(exported, ids), torch_logits(network, ids))


def greedy(model, params, prompts, lengths, steps):
  """(tokens [B, steps], hidden [B, steps, D]) by prefill and decode."""
  room, compute = prompts.shape[1] + steps, tiny.EXACT
  prefill = jax.jit(lambda p, *a: model.prefill(p, *a, compute=compute))
  cache, x = prefill(params, prompts, lengths)
  # What is beyond a prompt must not be read: make it harmful.
  beyond = (np.arange(room) >= lengths[:, None])[:, None, :, None]
  cache = jax.tree.map(lambda c: jnp.where(beyond, 1e3, jnp.pad(
      c, ((0, 0), (0, 0), (0, steps), (0, 0)))), cache)
  weights = transformer.unstack_layers(params, model.config.num_layers)
  decode = jax.jit(lambda w, *a: model.decode(
      w, *a, compute=compute, read=room))
  tokens, hidden, at = [], [], lengths.copy()
  for _ in range(steps):
    logits = head_lib.logits(
        x, model.head(params), model.config.logit_form, 'float32')
    tokens.append(np.asarray(logits[:, :131].argmax(-1), np.int32))
    hidden.append(x)
    cache, x = decode(weights, cache, tokens[-1], at)
    at = at + 1
  return np.stack(tokens, 1), np.stack(hidden, 1)


@pytest.mark.parametrize('case', CASES)
def test_cached_decode_is_the_full_forward_and_greedy_text(reference, case):
  import torch
  folder, network = reference(case)
  model, params = load(folder)
  # Where a document's length decides, it is on one side of the limit.
  longrope = rope_lib.by_length(model.config) == 16
  lengths = np.array([17, 20] if longrope else [9, 13], np.int32)
  steps, ids = 10, tiny.tokens((2, 20))
  padded = np.where(np.arange(20) < lengths[:, None], ids, 130)
  tokens, hidden = greedy(model, params, padded, lengths, steps)
  for row, n in enumerate(lengths):
    whole = np.concatenate([ids[row, :n], tokens[row]])[None]
    full = tiny.hidden(model, params, whole)[0]
    assert difference(hidden[row], full[n - 1:n - 1 + steps]) <= 1e-5
    text = network.generate(
        torch.tensor(ids[row:row + 1, :n]).long(), max_new_tokens=steps,
        do_sample=False)[0, n:].numpy()
    np.testing.assert_array_equal(tokens[row], text)


@pytest.mark.parametrize('case', CASES)
def test_packed_documents_are_as_if_alone(reference, case):
  """Under a scan and in chunks of queries, too."""
  model, params = load(reference(case)[0])
  lengths, ids = (7, 1, 20, 12), tiny.tokens((1, 40))
  segments = np.repeat([1, 2, 3, 4], lengths)[None]
  positions = np.concatenate([np.arange(n) for n in lengths])[None]
  compute = dataclasses.replace(tiny.EXACT, unroll=False, q_chunk=8)
  packed = tiny.hidden(model, params, ids, compute, segments, positions)
  padded = np.zeros((4, 20), np.int32)
  start = np.cumsum((0, *lengths))
  for row, n in enumerate(lengths):
    padded[row, :n] = ids[0, start[row]:start[row] + n]
  real = np.arange(20) < np.array(lengths)[:, None]
  alone = tiny.hidden(
      model, params, padded, segments=real.astype(np.int32),
      positions=np.where(real, np.arange(20), 0))
  assert difference(packed[0], alone[real]) <= 1e-5


@pytest.mark.parametrize('case', ['mistral', 'gemma3'])
def test_windows_reach_into_the_shared_part_of_branches(reference, case):
  model, params = load(reference(case)[0])
  ids = tiny.tokens((1, 28))
  prompt, one, two = ids[:, :8], ids[:, 8:18], ids[:, 18:]
  whole = lambda branch: tiny.hidden(
      model, params, np.concatenate([prompt, branch], 1))[0, 8:]
  at = np.arange(8, 18)
  forward = jax.jit(lambda p: model.forward(
      p, ids, np.concatenate([np.arange(8), at, at])[None],
      np.ones((1, 28), np.int32), branch_ids=np.repeat(
          [0, 1, 2], (8, 10, 10))[None],
      compute=dataclasses.replace(tiny.EXACT, q_chunk=4)))
  out = forward(params)[0]
  assert difference(out[8:18], whole(one)) <= 1e-5
  assert difference(out[18:], whole(two)) <= 1e-5


@pytest.mark.parametrize('case', ['gemma2', 'granite', 'phi4_mini'])
def test_the_sampler_writes_what_transformers_writes(reference, case):
  import torch
  folder, network = reference(case)
  model, params = load(folder)
  settings = native.SamplerConfig(
      slots=2, max_prompt=8, max_new_tokens=8, stop_ids=(-2,), temperature=0.0)
  engine = native.NativeEngine(
      model, settings, tiny.one_device('rollout'), tiny.EXACT, Ledger())
  engine.load(params, version=0)
  ids = tiny.tokens((2, 8))
  rollout = engine([Prompt(i, ids[i], '', {}) for i in range(2)],
                   group_size=1, step=0, run_key=np.zeros(2, np.uint32))
  for row in range(2):
    text = network.generate(torch.tensor(ids[row:row + 1]).long(),
                            max_new_tokens=8, do_sample=False)[0].numpy()
    np.testing.assert_array_equal(rollout.completions[row], text[8:])
    whole = torch_logits(network, text[None])[0].astype(np.float64)
    logp = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        rollout.logprobs[row], logp[np.arange(7, 15), text[8:]], atol=1e-4)


def test_the_sampler_refuses_lengths_that_training_reads_otherwise(reference):
  model, _ = load(reference('phi4_mini')[0])
  settings = native.SamplerConfig(
      slots=1, max_prompt=8, max_new_tokens=9, stop_ids=(2,))
  with pytest.raises(InputError, match='longrope.*16'):
    native.NativeEngine(
        model, settings, tiny.one_device('rollout'), tiny.EXACT, Ledger())
