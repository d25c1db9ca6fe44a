"""Losses, metrics and gradients on eight simulated devices, in every layout, match those on one device.

One child process computes all layouts of the selected tests and prints 'ok' or the errors of each.
"""

import dataclasses
import functools
import sys
import tempfile

import children
import pytest

LAYOUTS = ['data=8', 'fsdp=8', 'tensor=8', 'fsdp=4,tensor=2', 'data=2,fsdp=2,tensor=2', 'context=8', 'fsdp=2,context=4']
# A model with every feature that dense families have, saved in tensors that hold several parameters each.
RICH = ['rich:tensor=8', 'rich:data=2,fsdp=2,tensor=2', 'rich:fsdp=2,context=2,tensor=2']
# A model with experts, and the losses of their router.
MOE = ['moe:expert=8', 'moe:expert=4,data=2', 'moe:expert=2,fsdp=2,tensor=2', 'moe:expert=2,context=2,fsdp=2']
LATENT = ['latent:fsdp=4,tensor=2', 'latent:expert=2,fsdp=2,tensor=2', 'sparse:expert=2,fsdp=2,tensor=2']
HYBRID = [
  'qwen3_5_moe_text:expert=2,fsdp=2,tensor=2',
  'lfm2_moe:expert=2,fsdp=2,tensor=2',
  'kimi_linear:expert=2,fsdp=2,tensor=2',
  'nemotron_h:expert=2,fsdp=2,tensor=2',
]
MIXED = ['mixed:context=2,data=2,fsdp=2', 'mixed_moe:expert=2,fsdp=2,tensor=2', 'chunked:context=2,expert=2,fsdp=2']
# Policy gradients by token and by sequence; `test_ppo` and `test_preference_layouts` test the other methods.
RL = [f'grpo:{mesh}' for mesh in LAYOUTS] + ['gspo:fsdp=4,tensor=2', 'gspo:context=4,data=2']
# Each axis and each kind of layer at least once.
IN_CI = [
  *('context=8', *RICH[1:], *MOE[2:], *LATENT[1:], *HYBRID[::3], *MIXED[1:]),
  *('grpo:fsdp=2,context=4', 'gspo:fsdp=4,tensor=2'),
]


@pytest.fixture(scope='module')
def report(request):
  """{layout: 'ok' or the errors}, from one child process for all selected tests."""
  items = [item for item in request.session.items if item.path == request.path]
  layouts = [item.callspec.params['layout'] for item in items if hasattr(item, 'callspec')]
  run = children.run(__file__, *layouts, 'bfloat16', devices=8, JAX_ENABLE_COMPILATION_CACHE='0', timeout=1200)
  results = dict(line.split(' ', 1) for line in run.stdout.splitlines())
  remats = run.stderr.count('Involuntary full rematerialization')
  return results | {'warnings': str(remats)}


@pytest.mark.parametrize(
  'layout',
  [
    pytest.param(text, marks=() if text in IN_CI else pytest.mark.nightly)
    for text in LAYOUTS + RICH + MOE + LATENT + HYBRID + MIXED + RL
  ],
)
def test_layout_matches_one_device(report, layout):
  assert report[layout] == 'ok'


def test_bfloat16_on_a_mesh_is_near_float32_on_one_device(report):
  assert report['bfloat16'] == 'ok'


def test_no_layout_needs_involuntary_full_rematerialization(report):
  assert report['warnings'] == '0'


def main():
  import jax
  import numpy as np
  import tiny

  from jaxpost import types
  from jaxpost.distributed.phases import make_layout
  from jaxpost.distributed.transfer import to_host
  from jaxpost.formats import hf, hf_export
  from jaxpost.models import model as model_lib
  from jaxpost.models.config import Experts, Rope
  from jaxpost.programs import train
  from jaxpost.stage import algorithms
  from jaxpost.stage import config as config_lib
  from jaxpost.types import Batch

  # tensor=8 divides the 8 heads, but not the 4 key-value heads nor the vocabulary of 150.
  shapes = dict(vocab_size=150, vocab_multiple=192, num_heads=8, num_kv_heads=4)
  plain = model_lib.build(tiny.config(**shapes))
  rich = model_lib.build(
    tiny.config(
      **shapes,
      family='phi3',
      norms='both',
      qk_norm='wide',
      biases=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),
      rotary_dim=4,
      ropes=(Rope(), Rope(100.0)),
      layer_ropes=(0, 1),
      layer_windows=(0, 6),
      norm_offset=1.0,
      activation='gelu_tanh',
      embed_scale=2.0,
      attention_softcap=3.0,
      logit_softcap=4.0,
      tie_embeddings=False,
    )
  )
  sparse = model_lib.build(
    tiny.config(
      **shapes,
      family='gpt_oss',
      tie_embeddings=False,
      biases=('q', 'o', 'router', 'gate', 'up', 'down', 'sinks'),
      experts=Experts(8, 3, 16, limit=1.5, alpha=1.7),
    )
  )
  compute = dataclasses.replace(tiny.EXACT, unroll=False, remat='dots', q_chunk=8, head_elements=20_000)
  random = np.random.RandomState(0)
  shape = 8, 16
  weights = random.uniform(size=shape) * (random.uniform(size=shape) > 0.3)
  weights[5] = 0
  batch = Batch(
    tiny.tokens(shape, 150),
    np.broadcast_to(np.arange(16, dtype=np.int32) % 10, shape),
    np.broadcast_to(1 + np.arange(16, dtype=np.int32) // 10, shape),
    weights.astype(np.float32) / 64,
  )
  objective = types.Objective(
    lambda o, a: (-o.logprobs - 0.1 * o.entropy, {'e': o.entropy}),
    reads=('entropy',),
    learns=('entropy',),
    temperature=0.9,
  )

  plain_sft = objective, batch

  def saved(model):
    folder, params = tempfile.mkdtemp() + '/model', tiny.params(model)
    hf_export.save(folder, model, params, max_shard_bytes=20_000)
    return model, folder, params

  def surrogate(name):
    """Returns (objective, batch) of an RL method, with random advantages and log-probs."""
    method = algorithms.load_algorithm(name)
    settings = config_lib.resolve(
      config_lib.parse(
        tiny.grpo_config('', algorithm=name, rl=dict(kl_coef=0.1, entropy_coef=0.01, importance=('icepop',)))
      )[name],
      method.defaults,
    )
    arrays = {k: random.normal(size=shape).astype(np.float32) for k in ('advantages', 'importance_weights')}
    arrays |= {
      f'{k}_logprobs': np.float32(-5 + 0.5 * random.normal(size=shape)) for k in ('sampler', 'behavior', 'old', 'ref')
    }
    return method.objective(settings), batch.replace(
      arrays=arrays, sequence_ids=np.where(batch.loss_weights > 0, batch.segment_ids, 0)
    )

  def gradient(layout, saved_model, compute=compute, task=None):
    """((loss, metrics), gradients) of a saved model for a task: (objective, batch)."""
    model, folder, params = saved_model
    objective, batch = task or plain_sft
    loaded = hf.load_params(folder, model, model.shardings(layout), 'float32')
    jax.tree.map(np.testing.assert_array_equal, to_host(loaded), to_host(params))
    loss = train.make_loss(
      model, dataclasses.replace(objective, router=(0.1, 0.01)) if model.config.experts else objective, layout, compute
    )
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, model.shardings(layout)))
    return to_host(run(loaded, layout.put(batch, 'batch', None)))

  def compare(saved_model, expected, text, task=None):
    """Prints whether the results in a layout of 8 devices are those expected."""
    (loss, metrics), grads = expected
    (loss_8, metrics_8), grads_8 = gradient(make_layout(text.rpartition(':')[2], 'train'), saved_model, task=task)

    def near(a, b):
      return tiny.largest(a - b) / (tiny.largest(b) or 1)

    off = {'loss': abs(loss_8 / loss - 1)}
    for k in metrics.keys() - {'router'}:
      off[k] = abs(metrics_8[k] - metrics[k]) / max(abs(metrics[k]), 0.01)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads_8), jax.tree.leaves(grads)):
      off[jax.tree_util.keystr(path)] = near(a, b)
    wrong = {name: float(x) for name, x in off.items() if not x <= 1e-5}
    print(text, wrong or 'ok', flush=True)

  def compare_all(make, texts, task=None):
    """Compares a model on 8 devices with one device, in those of the layouts `texts` that the command line names."""
    texts = [text for text in texts if text in sys.argv[1:]]
    if texts:
      saved_model = make()
      expected = gradient(tiny.one_device(), saved_model, task=task)
    for text in texts:
      compare(saved_model, expected, text, task)

  def of(name, texts):
    return [text for text in texts if text.partition(':')[0] == name]

  def built(make, **fields):
    return lambda: saved(model_lib.build(make(**shapes | fields)))

  saved_plain = functools.cache(lambda: saved(plain))
  for name, make in dict(latent=tiny.latent, sparse=tiny.sparse).items():
    compare_all(built(make, num_kv_heads=8), of(name, LATENT))
  gated = Experts(8, 3, 16, shared=1, shared_size=24, shared_gate=True)
  shared = dataclasses.replace(gated, shared_gate=False)
  behind = Experts(8, 3, 16, first_dense=1, sigmoid=True, choice_bias=True)
  latent = dataclasses.replace(shared, latent=24, sigmoid=True, choice_bias=True)
  blocks = ('state_space', 'moe', 'layers', 'mlp')
  hybrids = {
    'qwen3_5_moe_text': dict(mixers=('delta', 'layers'), key_heads=4, value_heads=8, experts=gated),
    'lfm2_moe': dict(mixers=('convolution', 'layers'), experts=behind),
    'kimi_linear': dict(mixers=('delta', 'layers'), num_kv_heads=8, key_heads=4, value_heads=4, layer_ropes=(-1, -1))
    | dict(experts=behind),
    'nemotron_h': dict(mixers=blocks, num_layers=4, layer_ropes=(-1,) * 4, experts=latent),
  }
  for family, fields in hybrids.items():
    make = functools.partial(tiny.hybrid, family)
    compare_all(built(make, **dict(num_layers=2) | fields), of(family, HYBRID))
  alone = dict(shared_layers=0, wide_shared_mlp=False, values_are_keys=True, full_kv_heads=2, attention_scale=0.3)
  alone |= dict(num_layers=2, layer_windows=(6, 0), layer_ropes=(1, 0), experts=shared)
  # With a scale of 1 and an epsilon of 0.05, rounding alone makes a gradient of queries differ by 1.1e-5 on some CPUs.
  compare_all(built(tiny.mixed, full_kv_heads=4, attention_scale=0.3, norm_eps=0.2), of('mixed', MIXED))
  compare_all(built(tiny.mixed, **alone), of('mixed_moe', MIXED))
  experts_of = dataclasses.replace(shared, shared_size=0, normalize=False, sigmoid=True, on_inputs=True)
  kinds = dict(num_layers=2, layer_ropes=(0, 1), layer_windows=(5, 0), sparse=(1,), experts=experts_of)
  compare_all(built(tiny.chunked, **kinds), of('chunked', MIXED))
  compare_all(lambda: saved(rich), RICH)
  compare_all(lambda: saved(sparse), MOE)
  for name in 'grpo', 'gspo':
    compare_all(saved_plain, of(name, RL), surrogate(name))
  compare_all(saved_plain, LAYOUTS)
  if 'bfloat16' not in sys.argv[1:]:
    return
  (loss, _), grads = gradient(tiny.one_device(), saved_plain())
  (low, _), grads_8 = gradient(
    make_layout('data=2,fsdp=2,tensor=2', 'train'),
    saved_plain(),
    dataclasses.replace(compute, dtype='bfloat16', residual='bfloat16'),
  )
  near = abs(low / loss - 1) < 0.01 and all(
    tiny.largest(a - b) < 0.1 * tiny.largest(b) for a, b in zip(jax.tree.leaves(grads_8), jax.tree.leaves(grads))
  )
  print('bfloat16', 'ok' if near else f'{low} against {loss}')


if __name__ == '__main__':
  main()
