"""Named configs of models with other layers than a Llama's, for `presets.every`."""

from jaxpost.models.attention_configs import MixedConfig
from jaxpost.models.config import Experts, ModelConfig, Rope
from jaxpost.models.hybrid_config import HybridConfig

# Vocabulary, hidden size, MLP size, layers, heads, kv heads, head size: the first fields of a config after the family.
Sizes = tuple[int, int, int, int, int, int, int]


def _lfm2(sizes: Sizes, attention: tuple[int, ...]) -> HybridConfig:
  """Returns a config of an LFM2; `attention` has the numbers of the layers with attention."""
  return HybridConfig(
    'lfm2',
    *sizes,
    ropes=(Rope(1e6),),
    qk_norm='head',
    mixers=tuple('layers' if i in attention else 'convolution' for i in range(sizes[3])),
    norm_eps=1e-5,
    max_position=128_000,
    taps=3,
    gated=False,
  )


def _qwen3_5(sizes: Sizes, heads: tuple[int, int], experts: Experts | None = None, tied: bool = False) -> HybridConfig:
  """Returns a config of a Qwen 3.5, with attention in every fourth layer and the gated delta rule in the others.

  heads: those of keys and of values of the gated delta rule.
  """
  return HybridConfig(
    'qwen3_5_moe_text' if experts else 'qwen3_5_text',
    *sizes,
    ropes=(Rope(1e7),),
    rotary_dim=sizes[-1] // 4,
    norm_offset=1.0,
    qk_norm='head',
    tie_embeddings=tied,
    max_position=262_144,
    experts=experts,
    mixers=tuple('delta' if (i + 1) % 4 else 'layers' for i in range(sizes[3])),
    key_heads=heads[0],
    value_heads=heads[1],
    key_size=128,
    value_size=128,
    taps=4,
  )


def _gemma4(sizes: Sizes, period: int, full_size: int, shared: int, side: int, window: int) -> MixedConfig:
  """Returns a config of a Gemma 4 whose layers each have an embedding, with full attention in every `period`-th."""
  _, hidden, _, layers, _, kv_heads, size = sizes
  local = [(i + 1) % period > 0 for i in range(layers)]
  full = Rope(1e6, (('rope_type', 'proportional'), ('partial_rotary_factor', 0.25)), size=full_size)
  return MixedConfig(
    'gemma4_text',
    *sizes,
    ropes=(full, Rope(1e4, size=size)),
    layer_ropes=tuple(map(int, local)),
    layer_windows=tuple(window * x for x in local),
    norms='both',
    qk_norm='head',
    activation='gelu_tanh',
    embed_scale=hidden**0.5,
    attention_scale=1.0,
    max_position=131_072,
    full_head_dim=full_size,
    full_kv_heads=kv_heads,
    shared_layers=shared,
    wide_shared_mlp=True,
    side_size=side,
  )


def _glm_moe(sizes: Sizes, experts: tuple[int, int, int]) -> ModelConfig:
  """Returns a config of a GLM-4.5 whose first layer is dense, and whose other layers have one shared expert.

  experts: their number, those of a token, and their size.
  """
  return ModelConfig(
    'glm4_moe',
    *sizes,
    ropes=(Rope(1e6),),
    rotary_dim=sizes[-1] // 2,
    norm_eps=1e-5,
    biases=('q', 'k', 'v'),
    tie_embeddings=False,
    max_position=131_072,
    experts=Experts(*experts, shared=1, first_dense=1, sigmoid=True, choice_bias=True),
  )


PRESETS: dict[str, ModelConfig] = {
  'tiny_hybrid': HybridConfig(
    'qwen3_5_text',
    *(259, 128, 384, 3, 4, 2, 32),
    ropes=(Rope(1e6),),
    rotary_dim=8,
    norm_offset=1.0,
    qk_norm='head',
    max_position=40_960,
    mixers=('delta', 'layers', 'delta'),
    key_heads=4,
    value_heads=8,
    key_size=16,
    value_size=24,
    taps=4,
  ),
  'qwen3_5_0_8b': _qwen3_5((248_320, 1024, 3584, 24, 8, 2, 256), (16, 16), tied=True),
  'qwen3_5_9b': _qwen3_5((248_320, 4096, 12_288, 32, 16, 4, 256), (16, 32)),
  'tiny_hybrid_moe': _qwen3_5(
    (259, 128, 384, 4, 4, 2, 32), (2, 4), Experts(8, 2, 96, shared=1, shared_size=96, shared_gate=True)
  ),
  'qwen3_5_35b_a3b': _qwen3_5(
    (248_320, 2048, 5632, 40, 16, 2, 256), (16, 32), Experts(256, 8, 512, shared=1, shared_size=512, shared_gate=True)
  ),
  'tiny_lfm2': _lfm2((259, 128, 384, 3, 4, 2, 32), attention=(1,)),
  'lfm2_1_2b': _lfm2((65_536, 2048, 8192, 16, 32, 8, 64), attention=(2, 5, 8, 10, 12, 14)),
  'tiny_gemma4': _gemma4((259, 128, 384, 4, 4, 2, 32), period=2, full_size=48, shared=2, side=16, window=64),
  'gemma4_e2b': _gemma4((262_144, 1536, 6144, 35, 8, 1, 256), period=5, full_size=512, shared=20, side=256, window=512),
  'tiny_glm_moe': _glm_moe((259, 128, 384, 3, 4, 2, 32), (8, 2, 96)),
  'glm4_5_air': _glm_moe((151_552, 4096, 10_944, 46, 96, 8, 128), (128, 8, 1408)),
}
