"""Supervised fine-tuning: what `config.nll` adds to cross entropy."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import sft
from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.programs import noise
from jaxpost.programs import train as programs
from jaxpost.stage import config as config_lib
from jaxpost.types import Batch

GOLDEN = json.loads((pathlib.Path(__file__).parent / 'golden/losses.json').read_text())
TASK = 'generated:arithmetic:max=99,ops=+'
B, T = 4, 12


def objective(**nll):
  return sft.objective(config_lib.parse(dict(nll=nll))['sft'])


@pytest.fixture(scope='module')
def case():
  model = model_lib.build(tiny.config(num_layers=1))
  random = np.random.RandomState(0)
  weights = (random.uniform(size=(B, T)) > 0.4).astype(np.float32)
  weights[:, 0] = 0
  segments = np.ones((B, T), np.int32)
  segments[:, 8:] = 2
  segments[3, 10:] = 0
  weights[3, 10:] = 0
  batch = Batch(
    tiny.tokens((B, T)),
    np.concatenate([np.arange(8), np.arange(4)])[None].repeat(B, 0).astype(np.int32),
    segments,
    weights / weights.sum(),
  )
  return model, tiny.params(model), batch


def value_and_grad(case, made, micro=B, step=0):
  model, params, batch = case
  loss = programs.make_loss(model, made, tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro, T), batch)
  return jax.jit(lambda p: programs.accumulate(lambda p, b: loss(p, b, step), p, split))(params)


def dense(case):
  """Log-probs [B, T, V] of the tokens, and of the vocabulary."""
  model, params, batch = case
  logits = tiny.logits(model, params, batch.tokens, segments=batch.segment_ids, positions=batch.positions)
  return np.roll(logits, 1, axis=1).astype(np.float64), batch


@pytest.mark.parametrize(
  'nll',
  [dict(kind='dft'), dict(label_smoothing=0.2), dict(z_loss=0.01), dict(label_smoothing=0.1, z_loss=0.1, kind='dft')],
)
def test_losses_are_those_of_their_papers(case, nll):
  logits, batch = dense(case)
  lse = np.log(np.exp(logits).sum(-1))
  logp = np.take_along_axis(logits, batch.tokens[..., None], -1)[..., 0] - lse
  loss = -logp * np.exp(logp) if nll.get('kind') == 'dft' else -logp
  smooth = nll.get('label_smoothing', 0)
  loss = (1 - smooth) * loss + smooth * (lse - logits.mean(-1))
  loss = loss + nll.get('z_loss', 0) * lse**2
  expected = (loss * batch.loss_weights).sum()
  (value, found), _ = value_and_grad(case, objective(**nll))
  assert float(value) == pytest.approx(expected, rel=1e-5)
  # The value from which evaluation computes the perplexity, for any loss.
  assert float(found['nll']) == pytest.approx((-logp * batch.loss_weights).sum(), rel=1e-5)


@pytest.mark.parametrize(
  'nll', [dict(kind='dft'), dict(label_smoothing=0.2), dict(z_loss=0.01), dict(neftune_alpha=5.0)]
)
def test_micro_batches_and_rows_in_any_order_give_one_gradient(case, nll):
  (value, _), grads = value_and_grad(case, objective(**nll))
  model, params, batch = case
  turned = model, params, jax.tree.map(lambda x: x[::-1], batch)
  for other, micro in ((case, 1), (case, 2), (turned, 2)):
    (value_2, _), grads_2 = value_and_grad(other, objective(**nll), micro)
    assert float(value_2) == pytest.approx(float(value), rel=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_2)):
      assert tiny.largest(a - b) <= 1e-5 * tiny.largest(b)


def test_dft_of_trl():
  """-sg(p) log p, the mean over tokens."""
  inputs = GOLDEN['inputs']
  logits = np.array(inputs['student_logits'])
  labels = np.array(inputs['kd_labels'])
  logp = np.asarray(jax.nn.log_softmax(logits))
  counts = np.concatenate([labels[:, 1:] >= 0, np.zeros((2, 1), bool)], axis=1)
  shifted = np.where(counts, np.roll(labels, -1, axis=1), 0)
  picked = np.take_along_axis(logp, shifted[..., None], -1)[..., 0]
  loss, _ = objective(kind='dft').fn(head_lib.Outputs(logprobs=picked, entropy=picked), {})
  assert float(loss[counts].mean()) == pytest.approx(GOLDEN['cases']['trl/dft_loss'], rel=2e-5)


def test_cross_entropy_of_torch():
  """The chunked head against torch and TRL: the mean over shifted labels."""
  inputs = GOLDEN['inputs']
  hidden = jnp.array(inputs['ce_hidden'], jnp.float32)
  weight = jnp.array(inputs['ce_W'], jnp.float32)
  labels = np.array(inputs['kd_labels'])
  counts = np.concatenate([labels[:, 1:] >= 0, np.zeros((2, 1), bool)], axis=1)
  shifted = np.where(counts, np.roll(labels, -1, axis=1), 0)
  plan = head_chunk.HeadConfig(objective().fn, 11, 1.0, tiny.EXACT, tiny.one_device())
  loss, _ = head_lib.fused_loss(
    plan, hidden, weight, jnp.asarray(shifted), jnp.asarray(counts / counts.sum(), jnp.float32), arrays={}
  )
  for name in ('torch/ref_ce_shifted_mean', 'trl/chunked_ce'):
    expected = np.ravel(GOLDEN['cases'][name])[0]
    assert float(loss) == pytest.approx(expected, rel=2e-5)


def test_neftune_draws_anew_each_step_and_fits_the_document(case):
  model, _, batch = case
  first = noise.neftune(batch, 0, 32, 5.0, 0)
  again = noise.neftune(batch, 0, 32, 5.0, 0)
  later = noise.neftune(batch, 1, 32, 5.0, 0)
  other = noise.neftune(batch, 0, 32, 5.0, 1)
  np.testing.assert_array_equal(first, again)
  assert tiny.largest(first - other) > 0.1
  assert tiny.largest(first - later) > 0.1
  np.testing.assert_array_equal(first[3, 10:], 0)  # padding
  for rows, length in ((first[:3, :8], 8), (first[:3, 8:], 4)):
    size = 5 / np.sqrt(length * 32)
    assert 0.8 * size < tiny.largest(rows) <= size
    assert abs(float(rows.mean())) < size / 10
  assert not np.array_equal(first[0], first[1])


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def losses(config, workdir):
  jaxpost.run(config, workdir)
  rows = metrics.read_rows(workdir / 'metrics.jsonl')
  return [r['loss'] for r in rows if r['split'] == 'train'], [r['loss'] for r in rows if r['split'] == 'eval']


@pytest.mark.parametrize(
  'field,value', [('kind', 'dft'), ('label_smoothing', 0.1), ('z_loss', 0.1), ('neftune_alpha', 50.0)]
)
def test_no_field_is_a_no_op(field, value, model, tmp_path):
  base = tiny.run_config(model, train=dict(steps=3), eval=dict(data=dict(path=f'{TASK},split=test,size=8')))
  plain, held_out = losses(base, tmp_path / 'plain')
  other, held_out_2 = losses(tiny.merged(base, dict(nll={field: value})), tmp_path / 'other')
  assert plain[0] != other[0]
  if field == 'neftune_alpha':  # noise is for training
    assert held_out[0] == held_out_2[0] and held_out[-1] != held_out_2[-1]
    again, _ = losses(tiny.merged(base, dict(nll={field: value})), tmp_path / 'again')
    assert again == other


def test_a_batch_that_trains_nothing_moves_nothing(case):
  """Also not by momentum; it is counted, and the schedule stays."""
  import optax

  from jaxpost.programs.compile import Ledger

  model, params, batch = case
  layout, optimizer = tiny.one_device(), optax.adam(0.1)
  shardings = programs.state_shardings(model, optimizer, layout)
  update = programs.make_update(
    model,
    objective(),
    optimizer,
    lambda step: 0.1,
    layout,
    compute=tiny.EXACT,
    ledger=Ledger(),
    clip_norm=1.0,
    shardings=shardings,
  )
  state = programs.make_state(jax.tree.map(jnp.array, params), optimizer, shardings, Ledger())

  def place(b):
    return layout.put(jax.tree.map(lambda x: x[None], b), None)

  state, found = update(state, place(batch), {})
  assert found['empty_updates'] == 0 and int(state.step) == 1
  before = jax.tree.map(np.asarray, state)
  masked = batch.replace(loss_weights=np.zeros_like(batch.loss_weights))
  state, found = update(state, place(masked), {})
  assert found['empty_updates'] == 1 and found['skipped_updates'] == 0
  jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))


def test_mixtures_are_trained_with_their_shares(model, tmp_path):
  one, two = (f'{TASK},size=40,seed={n}' for n in (1, 2))
  config = tiny.run_config(
    model, data=dict(path=f'{one} + {two}', weights=(0.75, 0.25)), train=dict(steps=8, batch_size=4)
  )
  jaxpost.run(config, tmp_path)
  rows = [r for r in metrics.read_rows(tmp_path / 'metrics.jsonl') if r['split'] == 'train']
  first, second = (sum(r[f'data/{n}/documents'] for r in rows) for n in (0, 1))
  assert 0.6 < first / (first + second) < 0.9


def test_from_scratch_on_a_text_file(tmp_path):
  """The recipe's path: no folder, no prompt, all of the text is trained."""
  from configs import pretrain_text

  words = 'the cat sat on the mat and the dog ran to the cat'.split()
  draw = np.random.RandomState(0)
  for name, count in ('train', 200), ('held', 20):
    (tmp_path / f'{name}.txt').write_text('\n\n'.join(' '.join(draw.choice(words, 12)) for _ in range(count)))
  config = pretrain_text.get_config('runlocal=True')
  config.data.path = str(tmp_path / 'train.txt')
  config.eval.data.path = str(tmp_path / 'held.txt')
  config.train.update(steps=30)
  config.optim.update(lr=3e-3, warmup_steps=0, schedule='constant')
  config.log.tensorboard = False
  jaxpost.run(config, tmp_path / 'run')
  rows = metrics.read_rows(tmp_path / 'run/metrics.jsonl')
  train = [r['loss'] for r in rows if r['split'] == 'train']
  held = [r['loss'] for r in rows if r['split'] == 'eval'][-1]
  assert train[0] > 5 and train[-1] < 2.5 and held < 2.5
