"""Mixtures of experts: grouped products, routing, router losses and metrics, MXFP4 experts, and routing replay.

Legend: N rows, E experts, D hidden size, F expert size, B rows of a batch, T tokens, L layers, k experts per token.
"""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost import matmul, types
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export, tensor_layout, tensor_reader
from jaxpost.formats import mxfp4 as mxfp4_lib
from jaxpost.models import expert_mlp, grouped, moe, presets, transformer
from jaxpost.models import model as model_lib
from jaxpost.models import routing as routing_lib
from jaxpost.models.config import Experts
from jaxpost.programs import train
from jaxpost.programs.compile import Ledger
from jaxpost.rl import batching, merging
from jaxpost.rollout import native
from jaxpost.types import Batch, Prompt, RowShape

SPARSE = dict(family='qwen3_moe', experts=Experts(8, 3, 24))


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config(**SPARSE))


# An empty group, one that ends inside a block, and 3 rows of no group.
SIZES = np.array([5, 0, 21, 1, 10], np.int32)


# Block 0 is ragged_dot. On GPUs, blocks of 1 are too many to copy a matrix for each, so they run as a loop.
@pytest.mark.parametrize(
  'block, platform', [(0, 'tpu'), (1, 'cpu'), (8, 'cpu'), (64, 'cpu'), (1, 'gpu'), (8, 'gpu'), (64, 'gpu')]
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_grouped_products_and_gradients_match_one_matrix_per_row(block, platform, dtype):
  """Forward and backward, against a matrix for each row."""
  random = np.random.RandomState(0)

  def draw(*shape):
    return jnp.asarray(random.standard_normal(shape), dtype).astype(jnp.float32)

  x, w, g = draw(40, 12), draw(5, 12, 20), draw(40, 20)
  groups = np.repeat(np.arange(5), SIZES)
  in_a_group = np.arange(40) < SIZES.sum()

  def plain(x, w):
    row_matrices = w[np.append(groups, [0] * 3)]
    return jnp.where(in_a_group[:, None], jnp.einsum('nd,ndf->nf', x, row_matrices, precision='highest'), 0)

  compute = matmul.Compute(dtype=dtype, group_block=block or 32, ragged=not block, platform=platform)
  ours, back = jax.vjp(lambda x, w: grouped.grouped(x, w, jnp.asarray(SIZES), compute), x, w)
  expected, expected_back = jax.vjp(plain, x, w)
  assert ours.dtype == jnp.float32
  for a, b in zip((ours, *back(g)), (expected, *expected_back(g))):
    assert tiny.largest(a - b) <= 1e-5 * tiny.largest(b)


def test_no_array_is_as_large_as_tokens_times_experts_times_hidden(model, params):
  """Arrays grow with k times the tokens and with the weights, not with E times the tokens."""
  ids, experts = tiny.tokens((20, 20)), model.config.experts

  def sizes(jaxpr):
    for eqn in jaxpr.eqns:
      for value in eqn.params.values():
        for inner in value if isinstance(value, (tuple, list)) else [value]:
          if isinstance(inner, jax.extend.core.ClosedJaxpr):
            inner = inner.jaxpr
          if isinstance(inner, jax.extend.core.Jaxpr):
            yield from sizes(inner)
      yield from (math.prod(v.aval.shape) for v in eqn.outvars)

  def loss(p):
    return jnp.sum(tiny.hidden(model, p, ids))

  largest = max(sizes(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))
  assert largest < 400 * (experts.top_k + 1) * 32 < 400 * experts.num * 32


@pytest.mark.parametrize('room', [7, 20])
def test_experts_in_rounds_compute_the_same_output_and_gradients(model, params, room):
  """The experts are the middle half, and most tokens are routed to one of them."""
  random = np.random.RandomState(0)
  x, g = (random.standard_normal((20, 32)).astype('f') for _ in range(2))
  chosen = np.argsort(random.uniform(size=(20, 8)), axis=1)[:, :3]
  chosen[:15, 0] = 3
  weights = random.uniform(size=(20, 3)).astype('f')
  p = {k: params['layers'][k][0, 2:6] for k in ('gate', 'up', 'down')}
  p |= {f'{k}_bias': random.standard_normal((4, n)).astype('f') for k, n in (('gate', 24), ('up', 24), ('down', 32))}

  def run(room):
    out, back = jax.vjp(
      lambda p, x, w: expert_mlp.apply_experts(
        p, x, w, jnp.asarray(chosen), 2, cfg=model.config, compute=tiny.EXACT, room=room
      ),
      *jax.tree.map(jnp.asarray, (p, x, weights)),
    )
    return out, back(jnp.asarray(g))

  once, rounds = jax.jit(run, static_argnums=0)(0), jax.jit(run, static_argnums=0)(room)
  local_rows = sum(np.where(np.any(chosen == e, 1), 1, 0) for e in range(2, 6)).sum()
  assert local_rows > 20  # more than one round of either size, the last not full
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * tiny.largest(b)), rounds, once)


def one_layer_sums(logits, k, real):
  chosen = jax.lax.top_k(logits, k)[1]
  return routing_lib.totals(moe.Routing(chosen[None], logits[None]), real)


def test_balance_loss_equals_that_of_transformers():
  """The loss is that of one layer, over all tokens except padding."""
  torch = pytest.importorskip('torch')
  from transformers.models.mixtral import modeling_mixtral

  logits = np.random.RandomState(0).standard_normal((2, 9, 6)).astype('f')
  real = np.arange(9) < np.array([[9], [5]])
  sums = one_layer_sums(jnp.asarray(logits), 2, real)
  theirs = modeling_mixtral.load_balancing_loss_func((torch.tensor(logits.reshape(-1, 6)),), 6, 2, torch.tensor(real))
  balance, z = routing_lib.balance_loss(sums, sums['tokens'])
  assert float(balance) == pytest.approx(float(theirs), rel=1e-6)
  expected_z = np.mean(np.log(np.sum(np.exp(logits[real]), -1)) ** 2)
  assert float(z) == pytest.approx(expected_z, rel=1e-6)


def test_router_losses_add_up_over_micro_batches():
  """Both losses add up exactly if the expert shares of each micro-batch are those of the batch."""
  logits = np.random.RandomState(0).standard_normal((4, 7, 6)).astype('f')
  real = np.ones((4, 7), bool)
  real[1, 3:] = False
  twice = one_layer_sums(np.concatenate([logits, logits]), 2, np.concatenate([real, real]))
  losses = routing_lib.balance_loss(twice, twice['tokens'])
  losses_of_half = routing_lib.balance_loss(one_layer_sums(logits, 2, real), twice['tokens'])
  np.testing.assert_allclose(np.multiply(losses_of_half, 2), losses, rtol=1e-6)
  # With other shares, the z loss adds up, and so do the sums from which metrics are computed.
  parts = [one_layer_sums(logits[i : i + 2], 2, real[i : i + 2]) for i in (0, 2)]
  sums = one_layer_sums(logits, 2, real)
  jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a + b, c, rtol=1e-6), *parts, sums)
  z = [routing_lib.balance_loss(p, sums['tokens'])[1] for p in parts]
  assert float(sum(z)) == pytest.approx(float(routing_lib.balance_loss(sums, sums['tokens'])[1]), rel=1e-6)


def test_router_metrics_of_a_balanced_and_a_collapsed_layer():
  """One layer is balanced, the other uses one expert of 4. A batch without tokens has finite metrics."""
  chosen = np.stack([np.arange(8) % 4, np.zeros(8, int)]).reshape(2, 1, 8, 1)
  routing = moe.Routing(jnp.asarray(chosen), jnp.zeros((2, 1, 8, 4)))
  empty = routing_lib.metrics(routing_lib.totals(routing, np.zeros((1, 8), bool)))
  loads = dict.fromkeys(('router/max_load', 'router/min_load'), 1.0)
  assert {name: float(x) for name, x in empty.items()} == dict.fromkeys(empty, 0.0) | loads
  metrics = routing_lib.metrics(routing_lib.totals(routing, np.ones((1, 8), bool)))
  assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
    {
      'router/max_load': 4,
      'router/min_load': 0,
      'router/dead_experts': 3,
      'router/entropy': math.log(4),
      'router/balance_loss': 1,
      'router/z_loss': math.log(4) ** 2,
    }
  )


def test_router_loss_falls_along_its_gradient_and_ignores_padding(model, params):
  """A step against the gradient lowers the loss; tokens of padding change neither loss nor gradient."""
  ids = tiny.tokens((2, 16))
  positions = np.broadcast_to(np.arange(16, dtype=np.int32), ids.shape)
  segments = (positions < 10).astype(np.int32)
  batch = Batch(ids, positions, segments, np.zeros(ids.shape, np.float32))

  def run(batch, **fields):
    return jax.jit(
      jax.value_and_grad(
        train.make_loss(
          model, types.Objective(lambda o, a: (-o.logprobs, {}), **fields), tiny.one_device(), tiny.EXACT
        ),
        has_aux=True,
      )
    )(params, batch)

  (loss_without_router, _), zero_grads = run(batch)
  assert loss_without_router == 0 and not any(map(np.any, jax.tree.leaves(zero_grads)))
  (value, metrics), grads = run(batch, router=(1.0, 0.0))
  value = float(value)
  assert value > model.config.experts.top_k  # the value for perfectly balanced experts
  assert metrics['router']['tokens'] == 20
  assert tiny.largest(grads['layers']['router']) > 0
  assert not np.any(grads['layers']['down'][-1])
  (padded_loss, _), padded_grads = run(batch.replace(tokens=np.where(segments, ids, 7)), router=(1.0, 0.0))
  assert float(padded_loss) == pytest.approx(value, rel=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * tiny.largest(b)), padded_grads, grads)
  stepped = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
  assert (
    train.make_loss(
      model, types.Objective(lambda o, a: (-o.logprobs, {}), router=(1.0, 0.0)), tiny.one_device(), tiny.EXACT
    )(stepped, batch)[0]
    < value
  )


def test_run_logs_router_metrics_and_refuses_router_losses_of_dense_models(tmp_path):
  import jaxpost

  path = tiny.folder(tmp_path / 'model', **SPARSE)
  jaxpost.run(
    tiny.run_config(path, router=dict(balance_coef=0.01, z_coef=0.001), train=dict(steps=2, micro_batch_size=1)),
    tmp_path / 'run',
  )
  row = json.loads((tmp_path / 'run/metrics.jsonl').read_text().splitlines()[0])
  assert 1 < row['router/max_load'] < 8 and 0 <= row['router/min_load'] < 1
  assert 0 < row['router/entropy'] < math.log(8)
  with pytest.raises(InputError, match='balance_coef'):
    jaxpost.run(tiny.run_config(tiny.folder(tmp_path / 'dense'), router=dict(z_coef=0.1)), tmp_path / 'other')


def test_active_parameters_and_flops_count_the_chosen_experts():
  billions = {'qwen3_30b_a3b': (30.5, 3.3), 'qwen3_235b_a22b': (235, 22), 'mixtral_8x7b': (46.7, 12.9)}
  for name, (total, active) in billions.items():
    cfg = presets.PRESETS[name]
    assert transformer.num_params(cfg) / 1e9 == pytest.approx(total, rel=0.01)
    assert transformer.num_active(cfg, transformer.param_table(cfg)) / 1e9 == pytest.approx(active, rel=0.02)
    assert transformer.flops_per_token(cfg, 1) < 2.01e9 * active


@pytest.mark.parametrize('fields', [dict(experts=Experts(8, 2, 24)), dict(experts=Experts(8, 3, 24, False))])
def test_each_field_of_experts_changes_the_logits(model, params, fields):
  ids = tiny.tokens((1, 20))
  other = model_lib.build(tiny.config(**SPARSE | fields))
  expected = tiny.logits(model, params, ids)
  assert tiny.largest(tiny.logits(other, params, ids) - expected) > (1e-3 * tiny.largest(expected))


# ------------------------------------------------------------------ GPT-OSS


def test_mxfp4_experts_load_as_transformers_dequantizes_them(tmp_path):
  """A folder of 4-bit experts loads as the folder of the numbers that they stand for."""
  torch = pytest.importorskip('torch')
  from transformers.integrations import mxfp4

  model = model_lib.build(
    tiny.config(
      family='gpt_oss',
      qk_norm='',
      hidden_size=64,
      intermediate_size=32,
      num_layers=1,
      tie_embeddings=False,
      layer_windows=(6,),
      biases=('router', 'gate', 'up', 'down', 'sinks', 'q', 'k', 'v', 'o'),
      experts=Experts(3, 2, 32, limit=7.0, alpha=1.702),
    )
  )
  hf_export.save(tmp_path / 'plain', model, tiny.params(model))
  tensors = safetensors.numpy.load_file(tmp_path / 'plain/model.safetensors')
  random, packed = np.random.RandomState(0), dict(tensors)
  for name in ('gate_up_proj', 'down_proj'):
    path = f'model.layers.0.mlp.experts.{name}'
    e, d, f = packed.pop(path).shape
    blocks = random.randint(0, 256, (e, f, d // 32, 16), np.uint8)
    scales = random.randint(118, 126, (e, f, d // 32), np.uint8)
    packed |= {f'{path}_blocks': blocks, f'{path}_scales': scales}
    tensors[path] = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    if tensors[path].shape != (e, d, f):
      tensors[path] = tensors[path].swapaxes(1, 2)
  shutil.copytree(tmp_path / 'plain', tmp_path / 'packed')
  for folder, values in ('plain', tensors), ('packed', packed):
    (tmp_path / folder / 'checksums.json').unlink(missing_ok=True)  # the files below are not written by the exporter
    safetensors.numpy.save_file(
      {k: np.ascontiguousarray(v) for k, v in values.items()}, tmp_path / folder / 'model.safetensors'
    )
  config = tmp_path / 'packed/config.json'
  raw = json.loads(config.read_text())
  config.write_text(json.dumps(raw | {'quantization_config': {'quant_method': 'mxfp4'}}))

  def load(folder, layout):
    cfg = hf.read_config(tmp_path / folder)
    hf.check(tmp_path / folder, cfg)
    loaded_model = model_lib.build(cfg)
    return hf.load_params(tmp_path / folder, loaded_model, loaded_model.shardings(layout), 'float32')

  one_device = tiny.one_device()
  jax.tree.map(np.testing.assert_array_equal, load('packed', one_device), load('plain', one_device))
  config.write_text(json.dumps(raw | {'quantization_config': {'quant_method': 'gptq'}}))
  with pytest.raises(InputError, match='gptq'):
    hf.read_config(tmp_path / 'packed')


def test_shards_of_fused_and_mxfp4_tensors_are_read_alone(tmp_path):
  """A shard of a mesh is such a part: a block of experts, inputs and outputs."""
  cfg = tiny.config(
    family='gpt_oss', qk_norm='', tie_embeddings=False, experts=Experts(4, 2, 32, limit=7.0, alpha=1.702)
  )
  fused = tensor_layout.table(cfg)['layers/up']
  unfused = np.random.RandomState(0).standard_normal((2, 4, 32, 64)).astype('f')
  tensors = dict(zip(fused.names, unfused))
  bounds = ((1, 2), (2, 4), (8, 24), (5, 9))
  np.testing.assert_array_equal(
    tensor_reader.read(fused, tensors, bounds, np.float32), unfused[1:2, 2:4, 8:24, 1::2][..., 5:9]
  )
  blocks = np.random.RandomState(0).randint(0, 256, (4, 8, 2, 16), np.uint8)
  matrices = mxfp4_lib.Matrices(blocks, np.full((4, 8, 2), 127, np.uint8))
  all_of_it = (slice(0, 4), slice(0, 64), slice(0, 8))
  part = (slice(1, 3), slice(20, 50), slice(2, 5))
  np.testing.assert_array_equal(matrices[part], matrices[all_of_it][part])


# --------------------------------------------------------------------- replay


def test_sampler_records_the_experts_of_each_token_for_replay(model, params):
  """At every position, the recorded experts are those that training chooses in exact float32."""
  settings = native.SamplerConfig(slots=2, max_prompt=8, max_new_tokens=6, stop_ids=(-2,), block=4)
  engine = native.NativeEngine(routing_lib.recording(model), settings, tiny.one_device('rollout'), tiny.EXACT, Ledger())
  engine.load(params, version=0)
  ids = tiny.tokens((3, 8))
  rollout = engine(
    [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate((8, 5, 3))],
    group_size=2,
    step=0,
    run_key=np.zeros(2, np.uint32),
  )
  batch = batching.to_batch(rollout, range(6), np.ones((6, 6)), {}, RowShape(3, 28))
  hidden, routing = jax.jit(
    lambda p: model.forward(p, batch.tokens, batch.positions, batch.segment_ids, compute=tiny.EXACT, routing=True)
  )(params)
  is_token = batch.segment_ids > 0
  np.testing.assert_array_equal(batch.experts[is_token], np.moveaxis(routing.chosen, 0, 2)[is_token])
  merged = merging.merge([rollout, rollout], [[0], [2]])
  np.testing.assert_array_equal(merged.experts, rollout.experts[[0, 1, 4, 5]])
  # Training uses the recorded experts, whatever its own router would choose.
  other_router = tiny.params(model, seed=1)['layers']['router']
  drifted = params | {'layers': params['layers'] | {'router': other_router}}
  run = jax.jit(
    lambda p, batch: train.run_model(model, p, batch, tiny.one_device(), tiny.EXACT, dict(routing=True))[1].chosen
  )
  np.testing.assert_array_equal(np.moveaxis(run(drifted, batch), 0, 2), batch.experts)
  own_choice = run(drifted, batch.replace(experts=None))
  assert np.any(np.moveaxis(own_choice, 0, 2)[is_token] != batch.experts[is_token])


def test_grpo_replays_recorded_routing_in_update_and_reference(tmp_path, monkeypatch):
  """If the recorded experts are changed, the checks of the first step fail."""
  import jaxpost

  path = tiny.folder(tmp_path / 'model', **SPARSE)

  def run(name):
    return jaxpost.run(
      tiny.grpo_config(path, router=dict(routing_replay=True), rl=dict(kl_coef=0.01), train=dict(steps=1)),
      tmp_path / name,
    )

  run('right')
  row = json.loads((tmp_path / 'right/metrics.jsonl').read_text().splitlines()[0])
  assert abs(row['sampler_mismatch'] - 1) < 1e-5 and row['kl'] < 1e-9
  to_batch = batching.to_batch

  def to_batch_with_other_experts(*args):
    batch = to_batch(*args)
    return batch.replace(experts=(batch.experts + 1) % 8)

  monkeypatch.setattr(batching, 'to_batch', to_batch_with_other_experts)
  with pytest.raises(AssertionError, match='sampler_mismatch'):
    run('wrong')
  with pytest.raises(InputError, match='replay'):
    jaxpost.run(tiny.run_config(path, router=dict(routing_replay=True)), tmp_path / 'sft')
