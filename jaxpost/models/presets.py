"""Named model configs, for `config.model.preset`: models without a folder of weights."""

import dataclasses

from jaxpost.models.config import Experts, ModelConfig, Rope


def _qwen3(hidden, mlp, layers, heads, kv_heads, head_dim=128, vocab=151_936, tied=True) -> ModelConfig:
  sizes = vocab, hidden, mlp, layers, heads, kv_heads, head_dim
  return ModelConfig('qwen3', *sizes, ropes=(Rope(1e6),), tie_embeddings=tied, qk_norm='head', max_position=40_960)


def _with_experts(dense: ModelConfig, num: int, top_k: int, size: int) -> ModelConfig:
  """Returns the Qwen3 with experts in place of its MLP."""
  return dataclasses.replace(dense, family='qwen3_moe', experts=Experts(num, top_k, size))


def _gpt_oss(layers, experts) -> ModelConfig:
  yarn = (
    ('rope_type', 'yarn'),
    ('beta_fast', 32.0),
    ('beta_slow', 1.0),
    ('factor', 32.0),
    ('original_max_position_embeddings', 4096),
    ('truncate', False),
  )
  return ModelConfig(
    'gpt_oss',
    *(201_088, 2880, 2880, layers, 64, 8, 64),
    ropes=(Rope(150_000.0, yarn),),
    layer_windows=(128, 0) * (layers // 2),
    norm_eps=1e-5,
    tie_embeddings=False,
    max_position=131_072,
    biases=('router', 'gate', 'up', 'down', 'sinks', 'q', 'k', 'v', 'o'),
    experts=Experts(experts, 4, 2880, limit=7.0, alpha=1.702),
  )


def _llama3(hidden, mlp, layers, heads, head_dim, factor=0.0, tied=False) -> ModelConfig:
  scaling = (
    ('rope_type', 'llama3'),
    ('factor', factor),
    ('high_freq_factor', 4.0),
    ('low_freq_factor', 1.0),
    ('original_max_position_embeddings', 8192),
  )
  return ModelConfig(
    'llama',
    *(128_256, hidden, mlp, layers, heads, 8, head_dim),
    ropes=(Rope(5e5, scaling if factor else ()),),
    norm_eps=1e-5,
    tie_embeddings=tied,
    max_position=131_072 if factor else 8192,
  )


def _qwen2(hidden, mlp, layers, heads, kv_heads, vocab=151_936, tied=True) -> ModelConfig:
  sizes = vocab, hidden, mlp, layers, heads, kv_heads, hidden // heads
  return ModelConfig('qwen2', *sizes, ropes=(Rope(1e6),), tie_embeddings=tied, biases=('q', 'k', 'v'))


def _gemma3(hidden, mlp, layers, heads, kv_heads, window, vocab, scaling=()) -> ModelConfig:
  local = [(i + 1) % 6 > 0 for i in range(layers)]
  return ModelConfig(
    'gemma3_text',
    *(vocab, hidden, mlp, layers, heads, kv_heads, 256),
    ropes=(Rope(1e6, scaling), Rope(1e4)),
    layer_ropes=tuple(map(int, local)),
    layer_windows=tuple(window * x for x in local),
    norms='both',
    norm_offset=1.0,
    qk_norm='head',
    activation='gelu_tanh',
    embed_scale=hidden**0.5,
    attention_scale=256**-0.5,
  )


_TINY = _qwen3(128, 384, 3, 4, 2, head_dim=32, vocab=259)

PRESETS = {
  'nano': _qwen3(64, 192, 3, 4, 2, head_dim=16, vocab=259),
  'tiny': _TINY,
  'xs': _qwen3(256, 768, 4, 4, 2, head_dim=64, vocab=8192),
  's': _qwen3(512, 1536, 8, 8, 4, head_dim=64, vocab=32_768),
  'qwen3_0_6b': _qwen3(1024, 3072, 28, 16, 8),
  'qwen3_1_7b': _qwen3(2048, 6144, 28, 16, 8),
  'qwen3_4b': _qwen3(2560, 9728, 36, 32, 8),
  'qwen3_8b': _qwen3(4096, 12_288, 36, 32, 8, tied=False),
  'qwen3_14b': _qwen3(5120, 17_408, 40, 40, 8, tied=False),
  'qwen3_32b': _qwen3(5120, 25_600, 64, 64, 8, tied=False),
  'tiny_moe': _with_experts(_TINY, 8, 2, 96),
  'qwen3_30b_a3b': _with_experts(_qwen3(2048, 6144, 48, 32, 4, tied=False), 128, 8, 768),
  'qwen3_235b_a22b': _with_experts(_qwen3(4096, 12_288, 94, 64, 4, tied=False), 128, 8, 1536),
  'mixtral_8x7b': ModelConfig(
    'mixtral',
    *(32_000, 4096, 14_336, 32, 32, 8, 128),
    ropes=(Rope(1e6),),
    norm_eps=1e-5,
    tie_embeddings=False,
    max_position=32_768,
    experts=Experts(8, 2, 14_336),
  ),
  'gpt_oss_20b': _gpt_oss(24, 32),
  'gpt_oss_120b': _gpt_oss(36, 128),
  'llama3_2_1b': _llama3(2048, 8192, 16, 32, 64, factor=32.0, tied=True),
  'llama3_2_3b': _llama3(3072, 8192, 28, 24, 128, factor=32.0, tied=True),
  'llama3_8b': _llama3(4096, 14_336, 32, 32, 128),
  'llama3_70b': _llama3(8192, 28_672, 80, 64, 128),
  'llama3_1_8b': _llama3(4096, 14_336, 32, 32, 128, factor=8.0),
  'llama3_1_70b': _llama3(8192, 28_672, 80, 64, 128, factor=8.0),
  'qwen2_5_0_5b': _qwen2(896, 4864, 24, 14, 2),
  'qwen2_5_1_5b': _qwen2(1536, 8960, 28, 12, 2),
  'qwen2_5_7b': _qwen2(3584, 18_944, 28, 28, 4, vocab=152_064, tied=False),
  'gemma3_1b': _gemma3(1152, 6912, 26, 4, 1, window=512, vocab=262_144),
  'gemma3_4b_text': dataclasses.replace(
    _gemma3(2560, 10_240, 34, 8, 4, window=1024, vocab=262_208, scaling=(('rope_type', 'linear'), ('factor', 8.0))),
    max_position=131_072,
  ),
  'olmo2_7b': ModelConfig(
    'olmo2',
    *(100_352, 4096, 11_008, 32, 32, 32, 128),
    ropes=(Rope(5e5),),
    norms='post',
    norm_eps=1e-6,
    qk_norm='wide',
    tie_embeddings=False,
    max_position=4096,
  ),
  'smollm3_3b': ModelConfig(
    'smollm3',
    *(128_256, 2048, 11_008, 36, 16, 4, 128),
    ropes=(Rope(5e6),),
    layer_ropes=(0, 0, 0, -1) * 9,
    max_position=65_536,
  ),
  'mistral_7b': ModelConfig(
    'mistral', *(32_000, 4096, 14_336, 32, 32, 8, 128), layer_windows=(4096,) * 32, norm_eps=1e-5, tie_embeddings=False
  ),
}


def every() -> dict[str, ModelConfig]:
  """Returns `PRESETS` and those with other layers than a Llama's, which are imported now."""
  from jaxpost.models import hybrid_presets

  return PRESETS | hybrid_presets.PRESETS
