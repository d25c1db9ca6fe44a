"""Makes the golden logits beside it; `weights` is shared with the test."""

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
BASE = dict(
  vocab_size=67,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  rms_norm_eps=0.01,
  max_position_embeddings=64,
)
CONFIGS = {
  'llama': dict(
    model_type='llama',
    tie_word_embeddings=False,
    rope_parameters=dict(
      rope_type='llama3',
      rope_theta=1000.0,
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
  ),
  'qwen3': dict(
    model_type='qwen3', tie_word_embeddings=True, rope_parameters=dict(rope_type='default', rope_theta=1000.0)
  ),
}


def weights(config: dict) -> dict[str, np.ndarray]:
  """Tensor name -> values of std 0.5 (norm scales: around 1), by name."""
  d, f, h = (config[k] for k in ('hidden_size', 'intermediate_size', 'head_dim'))
  q, kv = (h * config[f'num_{k}_heads'] for k in ('attention', 'key_value'))
  shapes = {'model.embed_tokens': (config['vocab_size'], d), 'model.norm': (d,)}
  if not config['tie_word_embeddings']:
    shapes['lm_head'] = shapes['model.embed_tokens']
  block = {
    'input_layernorm': (d,),
    'post_attention_layernorm': (d,),
    'self_attn.q_proj': (q, d),
    'self_attn.k_proj': (kv, d),
    'self_attn.v_proj': (kv, d),
    'self_attn.o_proj': (d, q),
    'mlp.gate_proj': (f, d),
    'mlp.up_proj': (f, d),
    'mlp.down_proj': (d, f),
  }
  if config['model_type'] == 'qwen3':
    block |= {'self_attn.q_norm': (h,), 'self_attn.k_norm': (h,)}
  for i in range(config['num_hidden_layers']):
    shapes |= {f'model.layers.{i}.{k}': v for k, v in block.items()}
  random = np.random.RandomState(0)
  return {
    f'{name}.weight': (0.5 * random.standard_normal(shape) + ('norm' in name)).astype(np.float32)
    for name, shape in sorted(shapes.items())
  }


def main():
  import torch
  import transformers

  for name, fields in CONFIGS.items():
    raw = BASE | fields
    config = transformers.AutoConfig.for_model(**raw)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    values = {k: torch.tensor(v) for k, v in weights(raw).items()}
    missing, extra = network.load_state_dict(values, strict=False)
    tied = ['lm_head.weight'] if raw['tie_word_embeddings'] else []
    assert missing == tied and not extra, (missing, extra)
    network.tie_weights()
    tokens = np.random.RandomState(1).randint(0, 67, (1, 24))
    with torch.no_grad():
      logits = network(torch.tensor(tokens)).logits[0].numpy()
    np.savez_compressed(HERE / f'{name}.npz', config=json.dumps(raw), tokens=tokens, logits=logits)


if __name__ == '__main__':
  main()
