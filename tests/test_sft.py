"""Tests of supervised fine-tuning: losses and gradients of the `config.nll` options, and SFT runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden_losses import CASES, INPUTS

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


def value_and_grad(case, nll_objective, micro=B, step=0):
  model, params, batch = case
  loss = programs.make_loss(model, nll_objective, tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro, T), batch)
  return jax.jit(lambda p: programs.accumulate(lambda p, b: loss(p, b, step), p, split))(params)


def logits_and_batch(case):
  """Returns logits [B, T, V] in float64, shifted so that those at a token predict it, and the batch."""
  model, params, batch = case
  logits = tiny.logits(model, params, batch.tokens, segments=batch.segment_ids, positions=batch.positions)
  return np.roll(logits, 1, axis=1).astype(np.float64), batch


@pytest.mark.parametrize(
  'nll',
  [dict(kind='dft'), dict(label_smoothing=0.2), dict(z_loss=0.01), dict(label_smoothing=0.1, z_loss=0.1, kind='dft')],
)
def test_losses_match_the_formulas_of_their_papers(case, nll):
  logits, batch = logits_and_batch(case)
  lse = np.log(np.exp(logits).sum(-1))
  logp = np.take_along_axis(logits, batch.tokens[..., None], -1)[..., 0] - lse
  loss = -logp * np.exp(logp) if nll.get('kind') == 'dft' else -logp
  smoothing = nll.get('label_smoothing', 0)
  loss = (1 - smoothing) * loss + smoothing * (lse - logits.mean(-1))
  loss = loss + nll.get('z_loss', 0) * lse**2
  expected = (loss * batch.loss_weights).sum()
  (value, figures), _ = value_and_grad(case, objective(**nll))
  assert float(value) == pytest.approx(expected, rel=1e-5)
  # Evaluation computes the perplexity from this value, whatever the loss is.
  assert float(figures['nll']) == pytest.approx((-logp * batch.loss_weights).sum(), rel=1e-5)


@pytest.mark.parametrize(
  'nll', [dict(kind='dft'), dict(label_smoothing=0.2), dict(z_loss=0.01), dict(neftune_alpha=5.0)]
)
def test_gradient_is_independent_of_micro_batches_and_row_order(case, nll):
  (value, _), grads = value_and_grad(case, objective(**nll))
  model, params, batch = case
  reversed_rows = model, params, jax.tree.map(lambda x: x[::-1], batch)
  for other, micro in ((case, 1), (case, 2), (reversed_rows, 2)):
    (value_2, _), grads_2 = value_and_grad(other, objective(**nll), micro)
    assert float(value_2) == pytest.approx(float(value), rel=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_2)):
      assert tiny.largest(a - b) <= 1e-5 * tiny.largest(b)


def test_dft_matches_golden_value_of_trl():
  """The loss of DFT is -stop_gradient(p) log p, averaged over tokens."""
  labels = INPUTS['kd_labels'].astype(int)
  logp = np.asarray(jax.nn.log_softmax(INPUTS['student_logits']))
  is_target = np.concatenate([labels[:, 1:] >= 0, np.zeros((2, 1), bool)], axis=1)
  shifted = np.where(is_target, np.roll(labels, -1, axis=1), 0)
  logprobs = np.take_along_axis(logp, shifted[..., None], -1)[..., 0]
  loss, _ = objective(kind='dft').fn(head_lib.Outputs(logprobs=logprobs, entropy=logprobs), {})
  assert float(loss[is_target].mean()) == pytest.approx(CASES['trl/dft_loss'], rel=2e-5)


def test_chunked_cross_entropy_matches_golden_values_of_torch_and_trl():
  """The loss is the mean over shifted labels."""
  hidden, weight = jnp.array(INPUTS['ce_hidden']), jnp.array(INPUTS['ce_W'])
  labels = INPUTS['kd_labels'].astype(int)
  is_target = np.concatenate([labels[:, 1:] >= 0, np.zeros((2, 1), bool)], axis=1)
  shifted = np.where(is_target, np.roll(labels, -1, axis=1), 0)
  plan = head_chunk.HeadConfig(objective().fn, 11, 1.0, tiny.EXACT, tiny.one_device())
  loss, _ = head_lib.fused_loss(
    plan, hidden, weight, jnp.asarray(shifted), jnp.asarray(is_target / is_target.sum(), jnp.float32), arrays={}
  )
  for name in ('torch/ref_ce_shifted_mean', 'trl/chunked_ce'):
    expected = np.ravel(CASES[name])[0]
    assert float(loss) == pytest.approx(expected, rel=2e-5)


def test_neftune_noise_changes_with_step_and_seed_and_scales_with_document_length(case):
  model, _, batch = case
  first = noise.neftune(batch, 0, 32, 5.0, 0)
  repeated = noise.neftune(batch, 0, 32, 5.0, 0)
  next_step = noise.neftune(batch, 1, 32, 5.0, 0)
  other_seed = noise.neftune(batch, 0, 32, 5.0, 1)
  np.testing.assert_array_equal(first, repeated)
  assert tiny.largest(first - other_seed) > 0.1
  assert tiny.largest(first - next_step) > 0.1
  np.testing.assert_array_equal(first[3, 10:], 0)  # padding
  for noise_of_documents, length in ((first[:3, :8], 8), (first[:3, 8:], 4)):
    size = 5 / np.sqrt(length * 32)
    assert 0.8 * size < tiny.largest(noise_of_documents) <= size
    assert abs(float(noise_of_documents.mean())) < size / 10
  assert not np.array_equal(first[0], first[1])


def losses(config, workdir):
  jaxpost.run(config, workdir)
  rows = metrics.read_rows(workdir / 'metrics.jsonl')
  return [r['loss'] for r in rows if r['split'] == 'train'], [r['loss'] for r in rows if r['split'] == 'eval']


@pytest.mark.parametrize(
  'field,value', [('kind', 'dft'), ('label_smoothing', 0.1), ('z_loss', 0.1), ('neftune_alpha', 50.0)]
)
def test_each_nll_field_changes_the_training_loss(field, value, nano, tmp_path):
  base = tiny.run_config(nano, train=dict(steps=3), eval=dict(data=dict(path=f'{TASK},split=test,size=8')))
  plain_losses, plain_evals = losses(base, tmp_path / 'plain')
  changed_losses, changed_evals = losses(tiny.merged(base, dict(nll={field: value})), tmp_path / 'other')
  assert plain_losses[0] != changed_losses[0]
  if field == 'neftune_alpha':  # evaluation adds no noise
    assert plain_evals[0] == changed_evals[0] and plain_evals[-1] != changed_evals[-1]
    repeated_losses, _ = losses(tiny.merged(base, dict(nll={field: value})), tmp_path / 'again')
    assert repeated_losses == changed_losses


def test_batch_without_trained_tokens_changes_no_state(case):
  """Not even by momentum. The update is counted in `empty_updates`, and the step of the schedule stays."""
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

  state, figures = update(state, place(batch), {})
  assert figures['empty_updates'] == 0 and int(state.step) == 1
  before = jax.tree.map(np.asarray, state)
  masked = batch.replace(loss_weights=np.zeros_like(batch.loss_weights))
  state, figures = update(state, place(masked), {})
  assert figures['empty_updates'] == 1 and figures['skipped_updates'] == 0
  jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))


def test_data_mixture_is_trained_in_its_proportions(nano, tmp_path):
  first_path, second_path = (f'{TASK},size=40,seed={n}' for n in (1, 2))
  config = tiny.run_config(
    nano, data=dict(path=f'{first_path} + {second_path}', weights=(0.75, 0.25)), train=dict(steps=8, batch_size=4)
  )
  jaxpost.run(config, tmp_path)
  rows = tiny.rows(tmp_path)
  first, second = (sum(r[f'data/{n}/documents'] for r in rows) for n in (0, 1))
  assert 0.6 < first / (first + second) < 0.9


def test_pretrain_text_recipe_learns_from_scratch(tmp_path):
  """The recipe has no model folder and no prompts, and all of the text is trained."""
  from configs import pretrain_text

  words = 'the cat sat on the mat and the dog ran to the cat'.split()
  random = np.random.RandomState(0)
  for name, count in ('train', 200), ('held', 20):
    (tmp_path / f'{name}.txt').write_text('\n\n'.join(' '.join(random.choice(words, 12)) for _ in range(count)))
  config = pretrain_text.get_config('runlocal=True')
  config.data.path = str(tmp_path / 'train.txt')
  config.eval.data.path = str(tmp_path / 'held.txt')
  config.train.update(steps=30)
  config.optim.update(lr=3e-3, warmup_steps=0, schedule='constant')
  config.log.tensorboard = False
  jaxpost.run(config, tmp_path / 'run')
  rows = metrics.read_rows(tmp_path / 'run/metrics.jsonl')
  train_losses = [r['loss'] for r in rows if r['split'] == 'train']
  eval_loss = [r['loss'] for r in rows if r['split'] == 'eval'][-1]
  assert train_losses[0] > 5 and train_losses[-1] < 2.5 and eval_loss < 2.5
