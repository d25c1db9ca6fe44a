"""Tests of user-defined models: linen and nnx modules are trained, sampled, sharded and exported, or refused.

Legend: B rows, T tokens, D hidden size.
"""

import dataclasses
import json
import pathlib

import children
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import jaxpost
from jaxpost.data import chat
from jaxpost.distributed.phases import make_layout
from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.models import custom
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.planning import dry_run, machines, meshes
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.stage import model_limits, prepare
from jaxpost.stage.config import parse
from jaxpost.tools import inference, scoring
from jaxpost.types import Prompt

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'examples'
CODES = {name: f'{EXAMPLES}/{name}_decoder.py:make' for name in ('linen', 'nnx')}


@pytest.fixture(scope='module', params=CODES)
def code(request):
  return CODES[request.param]


@pytest.fixture(scope='module')
def case(code):
  model = model_lib.from_code(code)
  return model, jax.jit(model.init)(jax.random.key(0))


def hidden(model, params, ids, positions=None, segments=None):
  if positions is None:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    segments = np.ones_like(ids)
  return np.asarray(
    jax.jit(lambda p: model.forward(p, ids, positions, segments, compute=tiny.EXACT, constrain=None))(params)
  )


def test_packed_documents_do_not_see_each_other(case):
  """The examples promise this; a run checks it for every module."""
  model, params = case
  ids = tiny.tokens((1, 12))
  first, second = (hidden(model, params, part) for part in (ids[:, :7], ids[:, 7:]))
  packed = hidden(model, params, ids, np.r_[:7, :5][None], np.r_[[1] * 7, [2] * 5][None])
  np.testing.assert_allclose(packed, np.concatenate([first, second], 1), rtol=1e-5, atol=1e-5)


def test_mesh_of_a_custom_model_uses_fsdp_alone(code):
  (p,) = dry_run.prepare_all(dict(model=dict(preset=code), data=dict(path='none'), train=dict(row_length=32_768)))
  assert list(meshes.every(p.inputs, machines.parse('cpu:4'), 4)) == [
    dict(data=1, fsdp=4, expert=1, context=1, tensor=1)
  ]


def test_greedy_samples_match_a_forward_pass_of_the_whole_text(case):
  model, params = case
  engine = native.NativeEngine(
    model,
    native.SamplerConfig(slots=2, max_prompt=8, max_new_tokens=6, stop_ids=(-2,), block=4, temperature=0.0),
    tiny.one_device('rollout'),
    tiny.EXACT,
    Ledger(),
  )
  engine.load(params, version=0)
  ids = tiny.tokens((3, 8))
  sizes = 8, 5, 3
  rollout = engine(
    [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate(sizes)], group_size=1, step=0, run_key=np.zeros(2, np.uint32)
  )
  for i, n in enumerate(sizes):
    text = np.r_[ids[i, :n], rollout.completions[i]][None]
    logits = hidden(model, params, text) @ np.asarray(model.head(params)).T
    logp = jax.nn.log_softmax(logits[0, n - 1 : -1])
    np.testing.assert_array_equal(np.argmax(logp, -1), rollout.completions[i])
    np.testing.assert_allclose(np.max(logp, -1), rollout.logprobs[i], atol=1e-5)


SUMMING = """
import flax.linen as nn
import jax.numpy as jnp

from jaxpost.models import custom


class Decoder(nn.Module):
  @nn.compact
  def __call__(self, tokens, positions, segment_ids):
    x = nn.Embed(259, 16, name='embed')(tokens)
    row, column = jnp.arange(x.shape[1])[:, None], jnp.arange(x.shape[1])
    visible = SEEN
    return x + jnp.einsum('bij,bjd->bid', jnp.broadcast_to(visible, (len(x), *visible.shape[-2:])) * 0.1, x)


def make():
  return custom.linen(Decoder(), vocab_size=259, head='embed/embedding')
"""
SAME = 'segment_ids[:, :, None] == segment_ids[:, None, :]'


@pytest.mark.parametrize(
  'seen, complaint',
  [
    (f'(column <= row) & ({SAME})', ''),
    (f'(column <= row + 1) & ({SAME})', 'later tokens'),
    ('column <= row', 'other documents'),
  ],
)
def test_a_model_that_sees_what_it_must_not_is_refused(seen, complaint, tmp_path):
  code = tmp_path / 'summing.py'
  code.write_text(SUMMING.replace('SEEN', seen))
  config = dict(model=dict(preset=f'{code}:make'), data=dict(path='generated:arithmetic:max=5,ops=+'))
  config = tiny.merged(tiny.run_config(''), dict(config, algorithm='sft', train=dict(steps=1)))
  if not complaint:
    jaxpost.run(config, tmp_path / 'run')
    return
  with pytest.raises(InputError, match=rf'config.model.preset: .*summing.py:make change by .* with {complaint}'):
    jaxpost.run(config, tmp_path / 'run')


def test_custom_model_has_no_length_limit(case):
  assert model_limits.longest(case[0].config) >= 1 << 20


def test_sft_and_grpo_train_and_the_export_loads_again(code, tmp_path):
  """GRPO's first step checks the sampler's log-probs against the trainer's."""
  task = 'generated:arithmetic:max=5,ops=+,split=train,correct=1'
  config = tiny.merged(
    tiny.run_config(''),
    dict(
      stages=('sft', 'online'),
      model=dict(preset=code),
      data=dict(path=task),
      save=dict(export=True),
      reward='exact_match',
      sft=dict(algorithm='sft', train=dict(steps=12)),
      online=dict(algorithm='grpo', train=dict(row_length=0, steps=2), rollout=dict(prompts=4, group_size=2)),
    ),
  )
  jaxpost.run(config, tmp_path / 'run')
  rows = metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl')
  losses = [r['loss'] for r in rows if r['stage'] == 'sft' and r['split'] == 'train']
  assert losses[-1] < 0.7 * losses[0]
  mismatch = [r['sampler_mismatch'] for r in rows if 'sampler_mismatch' in r]
  assert mismatch and max(mismatch) < 1.001
  export = tmp_path / 'run' / 'export'
  assert json.loads((export / 'config.json').read_text())['code'] == code
  (section,) = (
    x.model for x in parse(tiny.merged(tiny.run_config(''), dict(model=dict(preset=code, path=str(export))))).values()
  )
  source = prepare.source_of_model(section)
  assert source.folder is not None
  with pytest.raises(InputError, match="'custom'.*config.model.preset"):
    prepare.source_of_model(dataclasses.replace(section, preset='tiny'))
  # launch.serve and launch.evaluate --suite compute these log-probs.
  example = chat.Example(np.arange(40, 52, dtype=np.int32), np.arange(12) > 0)
  (scored,) = scoring.Scorer(inference.from_run(tmp_path / 'run'))([example])
  assert scored.logprobs[0] == 0 and (scored.logprobs[1:] < 0).all()


# Layout -> into how many parts it splits an axis over fsdp, and over tensor, where the axis divides evenly.
LAYOUTS = {'fsdp=8': (8, 1), 'fsdp=4,tensor=2': (4, 2), 'data=8': (1, 1)}


def main():
  """Prints {module: {layout: (largest error, parts of each parameter)}}."""
  out, ids = {}, tiny.tokens((8, 16), 259)
  positions = np.broadcast_to(np.arange(16) % 10, ids.shape)
  segments = np.broadcast_to(1 + np.arange(16) // 10, ids.shape)

  def gradient(model, params, layout):
    def loss(params, ids, positions, segments):
      x = model.forward(params, ids, positions, segments, compute=tiny.EXACT, constrain=layout)
      logits = jnp.einsum('btd,vd->btv', x, model.head(params), precision='highest')
      return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    shardings = model.shardings(layout)
    placed = jax.tree.map(jax.device_put, params, shardings)
    parts = {}
    for path, x in jax.tree_util.tree_leaves_with_path(placed):
      shard = x.sharding.shard_shape(x.shape)
      parts[jax.tree_util.keystr(path, simple=True, separator='/')] = [n // m for n, m in zip(x.shape, shard)]
    value_and_grads = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))(
      placed, *(layout.put(x, 'batch', None) for x in (ids, positions, segments))
    )
    return to_host(value_and_grads), parts

  for name, code in CODES.items():
    model = model_lib.from_code(code)
    params = jax.jit(model.init)(jax.random.key(0))
    expected, _ = gradient(model, params, tiny.one_device())
    out[name] = {}
    for text in LAYOUTS:
      ours, parts = gradient(model, params, make_layout(text, 'train'))
      # The gradient of the bias of keys is 0 but for rounding, so errors are relative to at least `smallest`.
      smallest = 1e-3 * max(map(tiny.largest, jax.tree.leaves(expected)))
      errors = [
        tiny.largest(a - b) / max(smallest, tiny.largest(b))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
      ]
      out[name][text] = max(errors), parts
  print(json.dumps(out))


@pytest.fixture(scope='module')
def on_8_devices():
  return children.printed(__file__, devices=8)


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('name, head, order', [('linen', 'embed/embedding', -1), ('nnx', 'head/kernel', 1)])
def test_sharded_gradients_match_one_device_and_shards_follow_the_rules(on_8_devices, name, head, order, layout):
  """Loss and gradients are compared. `embed` is split over fsdp, and `vocab` where its size divides evenly."""
  error, parts = on_8_devices[name][layout]
  assert error <= 2e-5
  fsdp, tensor = LAYOUTS[layout]
  # 259 tokens do not divide evenly, so that axis stays whole.
  assert parts[head] == [fsdp, 1][::order]
  if name == 'linen':
    key = next(k for k in parts if k.endswith('query/kernel'))
    assert parts[key] == [fsdp, tensor, 1]


class PlainModule(nn.Module):
  @nn.compact
  def __call__(self, tokens, positions, segment_ids):
    x = nn.Embed(11, 8, name='embed')(tokens)
    return nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp')))(x)


class ModuleWithScalar(nn.Module):
  @nn.compact
  def __call__(self, tokens, positions, segment_ids):
    return nn.Embed(11, 8, name='embed')(tokens) * self.param('scale', nn.initializers.ones, ())


def test_axes_come_from_rules_then_metadata_then_a_default():
  table = custom.linen(PlainModule(), vocab_size=11, head='embed/embedding', axes=[('embed/.*', ('vocab', None))]).table
  assert table['embed/embedding'].axes == ('vocab', None)
  assert table['Dense_0/kernel'].axes == ('embed', 'mlp')
  assert table['Dense_0/bias'].axes == (None,)
  table = custom.linen(PlainModule(), vocab_size=11, head='embed/embedding').table
  assert table['embed/embedding'].axes == ('embed', None)


class ModuleWithState(nn.Module):
  @nn.compact
  def __call__(self, tokens, positions, segment_ids):
    self.variable('state', 'calls', lambda: np.zeros(()))
    return nn.Embed(11, 8, name='embed')(tokens)


class ModuleWithDropout(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(11, 8, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, tokens, positions, segment_ids):
    return self.drop(self.embed(tokens))


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: custom.linen(PlainModule(), vocab_size=11, head='head'), "has no 'head'.*embed/embedding"),
    (lambda: custom.linen(PlainModule(), vocab_size=12, head='embed/embedding'), r'\[11, 8\], which is not \[12'),
    (
      lambda: custom.linen(PlainModule(), vocab_size=11, head='embed/embedding', axes=[('embed/.*', ('vocab',))]),
      '1 dimensions',
    ),
    (
      lambda: custom.linen(PlainModule(), vocab_size=11, head='embed/embedding', axes=[('emb', ('vocab', None))]),
      "'emb' in `axes`",
    ),
    (lambda: custom.linen(ModuleWithScalar(), vocab_size=11, head='embed/embedding'), 'the scalar scale'),
    (lambda: custom.linen(ModuleWithState(), vocab_size=11, head='embed/embedding'), 'collections params, state'),
    (lambda: custom.nnx(ModuleWithDropout, vocab_size=11, head='embed/embedding'), 'not an nnx.Param'),
  ],
)
def test_unusable_modules_are_refused(make, message):
  with pytest.raises(InputError, match=f'config.model.preset.*{message}'):
    make()


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(model=dict(preset='./nowhere.py:make')), 'no file ./nowhere.py'),
    (dict(model=dict(preset='json:dumps')), 'json:dumps'),
    (
      dict(model=dict(preset=CODES['nnx']), algorithm='ppo', reward='exact_match', train=dict(row_length=0)),
      'no scalar head',
    ),
    (dict(model=dict(preset=CODES['nnx']), nll=dict(neftune_alpha=1.0)), 'neftune_alpha'),
    (dict(model=dict(preset=CODES['nnx']), lora=dict(rank=4)), 'lora.rank'),
  ],
)
def test_unsupported_options_of_custom_models_are_refused(over, message, tmp_path):
  with pytest.raises(InputError, match=message):
    jaxpost.run(tiny.merged(tiny.run_config(''), over), tmp_path / 'run')


def test_pairs_of_custom_models_share_no_prompt(caplog):
  data = dict(path='generated:arithmetic_pairs:max=9,ops=+,split=train,size=20')
  config = tiny.merged(tiny.run_config('', algorithm='dpo', data=data), dict(model=dict(preset=CODES['nnx'])))
  (stage,) = prepare.prepare_all(config)
  stage.close()
  assert stage.data.first_batch.branch_ids is None and not stage.config.preference.share_prompt
  assert 'config.preference.share_prompt: is taken as False, because the policy is a model of your own,' in caplog.text


if __name__ == '__main__':
  main()
