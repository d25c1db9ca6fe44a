"""Tiny models, their folders and configs of short runs, shared by all tests; logits are computed in exact float32.

Legend: B rows, T tokens, V padded vocabulary.
"""

import functools
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.phases import make_layout
from jaxpost.formats import hf, hf_export
from jaxpost.losses import head_chunk
from jaxpost.matmul import Compute
from jaxpost.models import model as model_lib
from jaxpost.models import parameters
from jaxpost.models.config import Experts, ModelConfig, Rope
from jaxpost.models.decoder_configs import ChunkedConfig, HybridConfig, LatentConfig, MixedConfig
from jaxpost.monitor import metrics
from jaxpost.stage.config import defaults
from jaxpost.storage import seals
from jaxpost.types import Prompt, Rollout

EXACT = Compute(dtype='float32', q_chunk=64)


def config(**fields) -> ModelConfig:
  """A dense decoder of two layers; `fields` replace its settings."""
  base = dict(
    family='qwen3',
    vocab_size=131,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm='head',
    tie_embeddings=True,
    initializer_range=0.2,
  )
  return ModelConfig(**{**base, **fields})


def latent(**fields) -> LatentConfig:
  """Latent attention, with two layers of experts after a dense one, as in DeepSeek-V3."""
  base = vars(
    config(
      family='deepseek_v3',
      qk_norm='',
      tie_embeddings=False,
      num_layers=3,
      num_kv_heads=4,
      head_dim=10,
      attention_scale=0.3,
      ropes=(Rope(interleaved=True),),
      experts=Experts(
        8, 3, 20, shared=1, first_dense=1, sigmoid=True, choice_bias=True, groups=4, top_groups=2, scale=1.7
      ),
    )
  )
  latent_sizes = dict(q_rank=14, kv_rank=12, rope_dim=4, v_dim=6)
  return LatentConfig(**base | latent_sizes | fields)


def sparse(**fields) -> LatentConfig:
  """`latent` with an indexer that selects the 5 tokens to which a query attends."""
  indexer = dict(family='deepseek_v32', index_topk=5, index_heads=7, index_dim=6)
  return latent(**indexer | fields)


_DELTA = dict(norm_offset=1.0, rotary_dim=4, mixers=('delta', 'layers', 'delta')) | dict(
  key_heads=3, value_heads=6, key_size=14, value_size=6, taps=3
)
# Family -> the fields in which its model differs from `config`.
HYBRIDS = {
  'qwen3_5_text': _DELTA,
  'qwen3_5_moe_text': _DELTA,
  'lfm2': dict(mixers=('convolution', 'layers', 'convolution'), taps=4, gated=False, qk_norm='head'),
  'lfm2_moe': dict(mixers=('convolution', 'layers', 'convolution'), taps=4, gated=False, qk_norm='head')
  | dict(experts=Experts(5, 2, 20, first_dense=1, sigmoid=True, choice_bias=True, epsilon=1e-6, scale=1.7)),
  'olmo_hybrid': dict(mixers=('delta', 'layers', 'delta'), norms='post', qk_norm='wide', gated=False)
  | dict(beta_scale=2.0, out_norm_eps=1e-5, layer_ropes=(-1, -1, -1))
  | dict(key_heads=3, value_heads=3, key_size=14, value_size=14, taps=3),
  'kimi_linear': dict(mixers=('delta', 'layers', 'delta'), qk_norm='', gated=False, num_kv_heads=4, head_dim=14)
  | dict(q_rank=10, kv_rank=12, rope_dim=6, v_dim=10, attention_scale=14**-0.5, layer_ropes=(-1, -1, -1))
  | dict(key_heads=3, value_heads=3, key_size=14, value_size=14, taps=3, gate_rank=14)
  | dict(experts=Experts(6, 2, 12, shared=1, first_dense=1, sigmoid=True, choice_bias=True, scale=1.7)),
  'nemotron_h': dict(mixers=('state_space', 'moe', 'layers', 'mlp', 'state_space'), num_layers=5, qk_norm='')
  | dict(gated=False, biases=('conv',), activation='relu2', layer_ropes=(-1,) * 5)
  | dict(experts=Experts(6, 2, 12, shared=1, shared_size=20, latent=24, sigmoid=True, choice_bias=True))
  | dict(key_heads=2, value_heads=6, key_size=10, value_size=16, taps=3),
  'granitemoehybrid': dict(qk_norm='', mixers=('state_space', 'layers', 'state_space'), gated=False, biases=('conv',))
  | dict(attention_scale=0.3)
  | dict(key_heads=2, value_heads=6, key_size=10, value_size=16, taps=3, layer_ropes=(-1, -1, -1)),
}


def hybrid(family='qwen3_5_text', **fields) -> HybridConfig:
  """A model of a family of `HYBRIDS`: mostly one layer of attention between two layers of another mixer.

  `norm_eps` is large because the output of the gated delta rule for the first token of a document is the product of a
  query and a key, which may be near 0. With a small epsilon, the norm would amplify the rounding errors of that output.
  """
  base = vars(config(family=family, num_layers=3, norm_eps=0.02))
  return HybridConfig(**base | HYBRIDS[family] | fields)


_PROPORTIONAL = Rope(scaling=(('rope_type', 'proportional'), ('partial_rotary_factor', 0.4)), size=14)


def mixed(**fields) -> MixedConfig:
  """Heads of two sizes, an embedding per layer, and for each size a layer that reads the keys of an earlier layer."""
  base = vars(
    config(
      family='gemma4_text', num_layers=4, norm_eps=0.05, head_dim=10, hidden_size=36, norms='both', embed_scale=6.0
    )
  )
  layer_kinds = dict(ropes=(_PROPORTIONAL, Rope(100.0, size=10)), layer_ropes=(1, 0, 1, 0), layer_windows=(6, 0, 6, 0))
  sharing = dict(full_head_dim=14, full_kv_heads=2, shared_layers=2, wide_shared_mlp=True, side_size=6)
  return MixedConfig(
    **base | layer_kinds | sharing | dict(attention_scale=1.0, activation='gelu_tanh', logit_softcap=9.0) | fields
  )


def chunked(**fields) -> ChunkedConfig:
  """Attention in chunks of 5 tokens in every other layer, and experts in the remaining layers, as in Llama 4."""
  scaling = (('llama_4_scaling_beta', 0.3), ('original_max_position_embeddings', 5), ('query_offset', 1))
  ropes = Rope(500.0, interleaved=True), Rope(scaling=(('rope_type', 'none'), *scaling))
  settings = dict(ropes=ropes, layer_ropes=(0, 1, 0, 1), layer_windows=(5, 0, 5, 0), head_dim=10)
  settings |= dict(qk_norm='unscaled', tie_embeddings=False, norm_eps=0.02, num_layers=4)
  settings |= dict(experts=Experts(5, 2, 20, normalize=False, shared=1, sigmoid=True, on_inputs=True))
  return ChunkedConfig(**vars(config(family='llama4_text')) | settings | dict(sparse=(1, 3)) | fields)


def one_device(phase='train'):
  return make_layout('data=1', phase, devices=jax.devices()[:1])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, size, scale):
  return scale * jax.random.normal(key, (size,))


def initial(key, cfg, table):
  """Draws parameters like `model.init`, without compiling a program for each model.

  Sizes are rounded up to powers of 2, so that all models share a few compiled programs. The values of a parameter
  depend on the seed, on its place in the table and on its size, not on the rest of the model.
  """

  def draw(i, spec):
    if spec.init in ('ones', 'zeros'):
      return np.full(spec.shape, spec.init == 'ones', spec.dtype or 'float32')
    size = math.prod(spec.shape)
    normal = _normal(jax.random.fold_in(key, i), max(1024, 1 << (size - 1).bit_length()), cfg.initializer_range)
    value = np.array(normal)[:size].reshape(spec.shape)
    if spec.axes[0] == 'vocab':
      value[cfg.vocab_size :] = 0
    return value

  return parameters.nest({path: draw(i, spec) for i, (path, spec) in enumerate(table.items())})


def params(model, seed=0):
  """Random parameters; the scales of norms are varied as well, so that none of them is 1."""
  random, key = np.random.RandomState(seed), jax.random.key(seed)

  def vary(x, spec):
    noise = 0.2 * random.standard_normal(x.shape).astype(np.float32)
    return jnp.asarray(x + noise if spec.exact else x)

  is_decoder = isinstance(model.init, functools.partial) and model.init.func is model_lib.init
  initialized = initial(key, model.config, model.table) if is_decoder else jax.jit(model.init)(key)
  return jax.tree.map(vary, initialized, parameters.nest(model.table))


def tokens(shape, vocab=131, seed=0):
  return np.random.RandomState(seed).randint(0, vocab, shape, dtype=np.int32)


def hidden(model, weights, ids, compute=EXACT, segments=None, positions=None):
  """[B, T] tokens -> [B, T, D] hidden states; by default, each row is one document."""
  shape = ids.shape
  if positions is None:
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  if segments is None:
    segments = np.ones(shape, np.int32)
  return _forward(model.config, compute)(weights, ids, positions, segments)


@functools.lru_cache(maxsize=None)
def _forward(cfg, compute):
  """The compiled forward pass of a config; without compilation it would take ten times as long."""
  model = model_lib.build(cfg)
  return jax.jit(lambda *args: model.forward(*args, compute=compute))


def logits(model, weights, ids, **kwargs):
  """[B, T] tokens -> [B, T, V] in numpy, without the padded vocabulary."""
  x = hidden(model, weights, jnp.asarray(ids), **kwargs)
  out = head_chunk.logits(x, model.head(weights), model.config.logit_form, 'float32')
  return np.asarray(out)[..., : model.config.vocab_size]


def largest(x) -> float:
  """The largest absolute value of an array."""
  return float(np.max(np.abs(np.asarray(x))))


def difference(actual, expected) -> float:
  """The largest absolute difference of two arrays, as a share of the largest absolute value expected."""
  return largest(actual - expected) / largest(expected)


def pointers(tree) -> set[int]:
  """The addresses of the buffers of all arrays."""
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


def load(folder, dtype='float32'):
  """Returns the model of a Hugging Face folder, which is checked, and its parameters on one device."""
  model = model_lib.build(hf.read_config(folder))
  hf.check(folder, model.config)
  return model, hf.load_params(folder, model, model.shardings(one_device()), dtype)


def torch_logits(network, ids, **options):
  """[B, T] tokens -> [B, T, V] logits of a `transformers` model, in numpy."""
  import torch

  with torch.no_grad():
    return network(input_ids=torch.tensor(ids).long(), **options).logits.numpy()


def folder(path, **fields):
  """Writes a Hugging Face folder for the 'bytes' tokenizer, without our checksums; returns its path."""
  shape = dict(vocab_size=259, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
  config_makers = dict(deepseek_v3=latent, deepseek_v32=sparse, gemma4_text=mixed, llama4_text=chunked)
  make_config = (config_makers | dict.fromkeys(HYBRIDS, hybrid)).get(fields.get('family'), config)
  model = model_lib.build(make_config(**{**shape, **fields}))
  hf_export.save(path, model, params(model))
  (pathlib.Path(path) / seals.NAME).unlink()
  return str(path)


def after_bos(source, path) -> str:
  """Copies a model's folder to `path` so that its tokenizer puts BOS before text, here and in transformers."""
  import transformers

  shutil.copytree(source, path, copy_function=shutil.copyfile)  # the source may be read-only
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
  tokenizer.add_bos_token = True
  tokenizer.save_pretrained(path)
  return str(path)


def merged(base, over):
  """Returns nested dict `base` with the values of nested dict `over` in place of its own."""
  out = dict(base)
  for key, value in over.items():
    both_are_dicts = isinstance(value, dict) and isinstance(out.get(key), dict)
    out[key] = merged(out[key], value) if both_are_dicts else value
  return out


def rollout(count=12, longest=6, groups=3, seed=3) -> Rollout:
  """Random samples of at most `longest` tokens, `count` in all, for prompts of 3, 4, 5 ... tokens."""
  random = np.random.RandomState(seed)

  def draw(n):
    return random.randint(0, 131, n).astype(np.int32)

  lengths = random.randint(1, longest + 1, count)
  return Rollout(
    prompts=tuple(Prompt(i, draw(3 + i), '', {}) for i in range(groups)),
    completions=np.stack([draw(longest) for _ in lengths]),
    lengths=lengths,
    logprobs=-np.ones((count, longest), np.float32),
    behavior_logprobs=-np.ones((count, longest), np.float32),
    finished=lengths < longest,
  )


def run_config(model, **over):
  """A config, as nested dicts: SFT on sums that takes a second; `over` replaces fields."""
  task = 'generated:arithmetic:max=99,ops=+'
  return merged(
    defaults(),
    merged(
      dict(
        model=dict(path=model, tokenizer='bytes', dtype='float32'),
        data=dict(path=f'{task},split=train,size=200'),
        train=dict(steps=6, batch_size=2, row_length=64),
        optim=dict(lr=3e-3),
        save=dict(export=False),
        log=dict(tensorboard=False, watchdog_s=300.0),
        rollout=dict(max_prompt_length=32, max_new_tokens=4),
        eval=dict(size=8),
      ),
      over,
    ),
  )


def grpo_config(model, **over):
  """A config of GRPO that rewards token ids below 64; the reward runs in this process."""
  return run_config(
    model,
    **merged(
      dict(algorithm='grpo', reward=low_share, train=dict(row_length=0), rollout=dict(prompts=4, group_size=4)), over
    ),
  )


def sums_config(folder_, **over):
  """A config of a short SFT on small sums and, in stage 'online', RL with the fields of `over`."""
  task = 'generated:arithmetic:max=5,ops=+,split=train,correct=1'
  model = folder(
    f'{folder_}/model',
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    initializer_range=0.05,
  )
  return run_config(
    model,
    stages=('sft', 'online'),
    reward='exact_match',
    data=dict(path=task),
    train=dict(batch_size=16, row_length=128),
    optim=dict(b2=0.98, schedule='linear', warmup_steps=5),
    eval=dict(samples=8, size=64, data=dict(path=task)),
    sft=dict(algorithm='sft', optim=dict(lr=1e-2), train=dict(steps=50)),
    online=merged(dict(train=dict(row_length=0), rollout=dict(prompts=32, group_size=4)), over),
  )


def low_share(completion_ids, **columns):
  """The share of tokens below 64 in each completion."""
  del columns
  return [sum(t < 64 for t in ids) / len(ids) for ids in completion_ids]


def rows(workdir, split='train', stage=None):
  """The rows of a run's metrics that have this split and, unless it is None, this stage."""
  return [
    row
    for row in metrics.read_rows(workdir / 'metrics.jsonl')
    if row['split'] == split and stage in (None, row['stage'])
  ]


def config_file(path, config):
  """Writes nested dicts as a config file for the launchers; returns its path."""
  path.write_text(f'import ml_collections\n\n\ndef get_config():\n  return ml_collections.ConfigDict({config!r})\n')
  return path
