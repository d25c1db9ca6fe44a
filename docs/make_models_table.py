"""Writes docs/models.md: every family beside `transformers`, as measured.

  python docs/make_models_table.py [CASE ...]

Runs the cases of tests/test_families.py, or those alone and keeps the rows of
the others: random tiny models, weights of std 0.5, exact float32 on both
sides. Takes a few minutes.
"""

import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
BEGIN, END = '<!-- measured -->', '<!-- end of measured -->'


def rows(kept: dict) -> list[str]:
  """Markdown lines of the table; {case: line} of those not to be measured."""
  import test_families as families

  lines = ['| case | family | what differs from a plain Llama | logits | gradients |', '|---|---|---|---|---|']
  for case in families.CASES:
    if case in kept:
      lines.append(kept[case])
      continue
    with tempfile.TemporaryDirectory() as folder:
      folder = pathlib.Path(folder)
      network = families.make(case, folder)
      cfg = families.hf.read_config(folder)
      written = json.loads((folder / 'config.json').read_text())
      errors = (families.logit_error(folder, network), families.gradient_error(folder, network))
    lines.append(f'| {case} | `{written["model_type"]}` | {told(cfg)} | {errors[0]:.0e} | {errors[1]:.0e} |')
    print(lines[-1], flush=True)
  return lines


def told(cfg) -> str:
  """The differences of a ModelConfig from a plain Llama, in words."""
  from jaxpost.models.decoder_configs import LatentConfig

  turning = [r for r in cfg.ropes if dict(r.scaling).get('rope_type') != 'none']
  scaled = [dict(r.scaling)['rope_type'] for r in turning if r.scaling]
  words = {
    f'rope {" ".join(scaled)}': scaled,
    'interleaved rope': cfg.ropes[0].interleaved,
    'queries scaled by position': any('llama_4_scaling_beta' in dict(r.scaling) for r in cfg.ropes),
    'two rope bases': len(turning) > 1,
    'layers without rope': -1 in cfg.layer_ropes or turning != [*cfg.ropes],
    'rotates a part of a head': cfg.rotary_dim,
    'attention in chunks' if cfg.chunked else 'sliding window': any(cfg.layer_windows),
    'of some layers': len(set(cfg.layer_windows)) > 1,
    f'norms {cfg.norms}': cfg.norms != 'pre' and not cfg.state_shapes,
    'norm scale + 1': cfg.norm_offset,
    f'q and k norms ({cfg.qk_norm})': cfg.qk_norm,
    f'biases of {" ".join(cfg.biases)}': cfg.biases,
    cfg.activation: cfg.activation not in ('silu', 'relu2'),
    'MLPs without a gate (relu2)': cfg.activation == 'relu2',
    'scaled embeddings': cfg.embed_scale != 1,
    'residual multiplier': cfg.residual_scale != 1,
    'attention scale': cfg.attention_scale,
    'soft caps': cfg.attention_softcap or cfg.logit_softcap,
    'logit divisor': cfg.logit_divisor != 1,
  }
  if isinstance(cfg, LatentConfig):
    words |= {'latent attention': True}
  if isinstance(cfg, LatentConfig) and cfg.index_topk:
    words |= {f'to the {cfg.index_topk} tokens that an indexer of {cfg.index_heads} heads chooses': True}
    words |= {'whose rope is interleaved': cfg.index_interleaved}
  if cfg.mixed:
    words |= {
      f'heads of {cfg.head_dim} and {cfg.full_head_dim}': True,
      'values that are keys': cfg.values_are_keys,
      f'{cfg.shared_layers} layers without keys': cfg.shared_layers,
      'an embedding for each layer': cfg.side_size,
    }
  if cfg.state_shapes:
    name = {'delta': 'gated delta rule', 'convolution': 'short convolution', 'state_space': 'Mamba-2'}[cfg.mixer]
    words |= {f'{name} in {cfg.mixers.count(cfg.mixer)} of {cfg.num_layers} layers': True, 'gated attention': cfg.gated}
    words |= {'a decay for each channel': cfg.gate_rank}
    words |= {'one part for each layer': cfg.single, 'negative eigenvalues': cfg.beta_scale > 1}
    words |= {'norms post in layers with attention': cfg.norms == 'post', 'a least step': cfg.step_min}
  if cfg.experts:
    e = cfg.experts
    words |= {
      f'{e.top_k} of {e.num} experts': True,
      'whose weights do not add up to 1': not e.normalize,
      'clamped SwiGLU': e.limit,
      'router by sigmoids': e.sigmoid,
      f'of {e.top_groups} of {e.groups} groups': e.groups > 1,
      'a bias in the choice': e.choice_bias,
      'shared experts': e.shared and not e.shared_gate,
      'a gated shared expert': e.shared_gate,
      'dense layers first': e.first_dense,
      'dense layers between': cfg.chunked and 'dense' in cfg.layer_stacks,
      'weighted inputs of experts': e.on_inputs,
      f'latents of {e.latent}': e.latent,
    }
  return ', '.join(word for word, said in words.items() if said)


if __name__ == '__main__':
  path = ROOT / 'docs' / 'models.md'
  text = path.read_text(encoding='utf-8')
  head, rest = text.split(BEGIN)
  table, tail = rest.split(END)
  here = {line.split('|')[1].strip(): line for line in table.splitlines()[3:]}
  kept = {k: x for k, x in here.items() if sys.argv[1:] and (k not in sys.argv[1:])}
  path.write_text('\n'.join([head + BEGIN, *rows(kept), END]) + tail, encoding='utf-8')
