"""The fused head (`losses.head`) equals arithmetic on all logits, and never materializes all logits."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from golden_losses import CASES, INPUTS

from jaxpost import types
from jaxpost.algorithms import sft
from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.matmul import compute_for
from jaxpost.models import model as model_lib
from jaxpost.models import presets
from jaxpost.programs import train
from jaxpost.programs.compile import Ledger
from jaxpost.stage.config import parse
from jaxpost.types import Batch, TrainState

B, T, D, V, REAL = 3, 10, 8, 24, 21


@pytest.fixture(scope='module')
def case():
  random = np.random.RandomState(0)

  def normal(*s):
    return jnp.asarray(random.standard_normal(s), jnp.float32)

  weights = np.abs(random.standard_normal((B, T))) * (random.uniform(size=(B, T)) > 0.4)
  weights[1] = 0  # a row of padding only
  return dict(
    hidden=normal(B, T, D),
    head=normal(V, D),
    labels=jnp.asarray(random.randint(0, REAL, (B, T))),
    weights=jnp.asarray(weights, jnp.float32),
    arrays={'advantages': normal(B, T), 'old': -jnp.abs(normal(B, T))},
  )


def objective(outputs, arrays):
  """Returns (loss, metrics) of tokens from all that a loss may read: ratio, clip and entropy."""
  ratio = jnp.exp(outputs.logprobs - arrays['old'])
  gain = jnp.minimum(ratio, jnp.clip(ratio, 0.5, 2)) * arrays['advantages']
  loss = -gain + 0.3 * outputs.entropy**2
  return loss, {'ratio': ratio, 'entropy': outputs.entropy}


def dense(case, temperature, hidden, head):
  """Returns (loss, metrics, Outputs) from all logits at once."""
  logits = jnp.einsum('btd,vd->btv', hidden, head[:REAL], precision='highest')
  logp = jax.nn.log_softmax(logits / temperature)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
  picked = jnp.take_along_axis(logp, case['labels'][..., None], -1)[..., 0]
  outputs = head_lib.Outputs(picked, entropy)
  loss, metrics = objective(outputs, case['arrays'])

  def total(x):
    return jnp.sum(x * case['weights'])

  return total(loss), jax.tree.map(total, metrics), outputs


def plan(elements=2**20, temperature=1.0, dtype='float32', fn=objective, platform='cpu'):
  compute = dataclasses.replace(tiny.EXACT, head_elements=elements, dtype=dtype, platform=platform)
  return head_chunk.HeadConfig(fn, REAL, temperature, compute, tiny.one_device())


@pytest.mark.parametrize(
  'elements,temperature,platform',
  [(2**20, 1.0, 'cpu'), (B * V * 4, 0.7, 'tpu'), (B * V * 4, 0.7, 'cpu'), (B * V * 3, 1.0, 'cpu'), (1, 1.3, 'gpu')],
)
def test_values_and_gradients_are_those_of_all_logits(case, elements, temperature, platform):
  def fused(hidden, head):
    return head_lib.fused_loss(
      plan(elements, temperature, platform=platform),
      hidden,
      head,
      case['labels'],
      case['weights'],
      arrays=case['arrays'],
    )

  def reference(hidden, head):
    return dense(case, temperature, hidden, head)[:2]

  args = case['hidden'], case['head']

  def grad(f):
    return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*args)

  (loss, metrics), grads = grad(fused)
  (expected_loss, expected_metrics), expected_grads = grad(reference)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  for name in metrics:
    np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
  for a, b in zip(grads, expected_grads):
    np.testing.assert_allclose(a, b, atol=1e-5 * tiny.largest(b))
  np.testing.assert_array_equal(grads[1][REAL:], 0)
  np.testing.assert_array_equal(grads[0][1], 0)


@pytest.mark.parametrize('elements', [2**20, B * V * 3])
def test_outputs_equal_those_of_all_logits_where_weights_are_not_zero(case, elements):
  outputs = head_lib.token_outputs(
    plan(elements, 0.7, fn=None), case['hidden'], case['head'], case['labels'], case['weights']
  )
  expected = dense(case, 0.7, case['hidden'], case['head'])[2]
  for a, b in ((outputs.logprobs, expected.logprobs), (outputs.entropy, expected.entropy)):
    np.testing.assert_allclose(a, jnp.where(case['weights'] != 0, b, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('peer', ['trl', 'verl'])
def test_entropy_equals_that_of_peers(peer):
  """The head is the identity, so that the hidden states are the logits; 'collision' is checked beside it."""
  logits = jnp.asarray(INPUTS['student_logits'])
  rows, length, size = logits.shape
  config = plan(fn=None)._replace(vocab_size=size, reads=('entropy', 'collision'))
  labels = jnp.zeros((rows, length), int)
  outputs = head_lib.token_outputs(config, logits, jnp.eye(size), labels, jnp.ones((rows, length)))
  np.testing.assert_allclose(outputs.entropy, CASES[f'{peer}/entropy_from_logits'], rtol=2e-5)
  squares = jnp.log(jnp.sum(jax.nn.softmax(logits) ** 2, axis=-1))
  np.testing.assert_allclose(outputs.collision, squares, rtol=1e-5)


def test_tokens_with_zero_weight_have_no_influence(case):
  """Huge values of tokens with zero weight do not change the loss or gradients."""
  unweighted = case['weights'] == 0
  arrays = jax.tree.map(lambda x: jnp.where(unweighted, 1e30, x), case['arrays'])
  labels = jnp.where(unweighted, REAL - 1, case['labels'])
  run = jax.jit(
    jax.value_and_grad(
      lambda h, labels, a: head_lib.fused_loss(plan(B * V * 3), h, case['head'], labels, case['weights'], arrays=a)[0]
    )
  )
  noisy = run(case['hidden'], labels, arrays)
  clean = run(case['hidden'], case['labels'], case['arrays'])
  for a, b in zip(noisy, clean):
    np.testing.assert_allclose(a, b, rtol=1e-6)


FIELDS = ('entropy', 'lse', 'mean_logprob')

PLAIN, CAPPED = (1.0, 0.0), (2.5, 1.5)


def apply_form(x, form):
  """Applies the form (divisor, soft cap) to logits: Granite has a divisor, Gemma 2 a soft cap."""
  x = x / form[0]
  return form[1] * jnp.tanh(x / form[1]) if form[1] else x


def all_outputs(case, temperature, form, hidden, head):
  """Returns every field of Outputs from all logits at once."""
  logits = jnp.einsum('btd,vd->btv', hidden, head[:REAL], precision='highest')
  logits = apply_form(logits, form) / temperature
  logp = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(logp, case['labels'][..., None], -1)[..., 0]
  counts = case['weights'] != 0
  return head_lib.Outputs(
    **{
      k: jnp.where(counts, v, 0)
      for k, v in dict(
        logprobs=picked,
        entropy=-jnp.sum(jnp.exp(logp) * logp, axis=-1),
        lse=jax.nn.logsumexp(logits, axis=-1),
        mean_logprob=logp.mean(axis=-1),
      ).items()
    }
  )


def couple(outputs, arrays):
  """Returns a loss in which the tokens of a row depend on each other."""
  sums = jnp.sum(outputs.logprobs * arrays['advantages'], axis=1)
  return jnp.sum(jax.nn.sigmoid(sums)) + sum(jnp.sum(jnp.sum(outputs.__dict__[k], axis=1) ** 2) for k in FIELDS)


def elementwise(outputs, arrays):
  return (outputs.logprobs * arrays['advantages'] + sum(outputs.__dict__[k] ** 2 for k in FIELDS)), {}


@pytest.mark.parametrize('coupled', [True, False])
@pytest.mark.parametrize('elements,form', [(2**20, PLAIN), (B * V * 3, PLAIN), (B * V * 3, CAPPED)])
def test_gradients_of_all_outputs_equal_those_of_all_logits(case, coupled, elements, form):
  spec = plan(elements, 0.7, fn=elementwise)._replace(reads=FIELDS, learns=FIELDS, form=form)

  def fused_loss(hidden, head):
    args = hidden, head, case['labels'], case['weights']
    if coupled:
      return couple(head_lib.token_outputs(spec, *args), case['arrays'])
    return head_lib.fused_loss(spec, *args, case['arrays'])[0]

  def dense_loss(hidden, head):
    outputs = all_outputs(case, 0.7, form, hidden, head)
    if coupled:
      return couple(outputs, case['arrays'])
    return jnp.sum(elementwise(outputs, case['arrays'])[0] * case['weights'])

  args = case['hidden'], case['head']
  value, grads = jax.jit(jax.value_and_grad(fused_loss, (0, 1)))(*args)
  expected_value, expected_grads = jax.jit(jax.value_and_grad(dense_loss, (0, 1)))(*args)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  for a, b in zip(grads, expected_grads):
    np.testing.assert_allclose(a, b, atol=1e-5 * tiny.largest(b))


def test_divergence_from_teachers_has_gradients_of_all_logits(case):
  """The loss and all gradients, with two teachers of other widths and logit forms than the student."""
  forms = CAPPED, PLAIN, (0.5, 4.0)  # of the student, and of the two teachers
  random = np.random.RandomState(1)

  def normal(*s):
    return jnp.asarray(random.standard_normal(s), jnp.float32)

  teachers = [(normal(B, T, n), normal(V, n)) for n in (4, 12)]

  def kl_from_teachers(logits, others, arrays):
    student = jax.nn.log_softmax(logits)
    return sum(jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - student), axis=-1) for x in others) * jnp.abs(
      arrays['old']
    )

  spec = plan(B * V * 3, fn=lambda o, a: (o.divergence**2, {}))._replace(
    reads=(), learns=(), divergence=kl_from_teachers, form=forms[0], teacher_forms=forms[1:]
  )

  def fused_loss(hidden, head):
    return head_lib.fused_loss(
      spec, hidden, head, case['labels'], case['weights'], arrays=case['arrays'], teachers=teachers
    )[0]

  def dense_loss(hidden, head):
    student, *others = (
      jnp.where(jnp.arange(V) < REAL, apply_form(jnp.einsum('btd,vd->btv', h, w), form), -1e30)
      for form, (h, w) in zip(forms, [(hidden, head), *teachers])
    )
    by_token = kl_from_teachers(student, others, case['arrays'])
    return jnp.sum(case['weights'] * by_token**2)

  args = case['hidden'], case['head']
  value, grads = jax.jit(jax.value_and_grad(fused_loss, (0, 1)))(*args)
  expected_value, expected_grads = jax.jit(jax.value_and_grad(dense_loss, (0, 1)))(*args)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  for a, b in zip(grads, expected_grads):
    np.testing.assert_allclose(a, b, atol=1e-5 * tiny.largest(b))


def test_no_tokens_give_no_loss(case):
  loss, metrics = head_lib.fused_loss(
    plan(), case['hidden'], case['head'], case['labels'], jnp.zeros((B, T)), arrays=case['arrays']
  )
  assert loss == 0 and metrics['ratio'] == 0


def test_reading_entropy_does_not_change_the_loss(case):
  def simple(outputs, arrays):
    return (-outputs.logprobs * arrays['advantages'], {})

  def run(entropy):
    return jax.jit(
      jax.value_and_grad(
        lambda h: head_lib.fused_loss(
          plan(fn=simple)._replace(reads=('entropy',) * entropy, learns=()),
          h,
          case['head'],
          case['labels'],
          case['weights'],
          arrays=case['arrays'],
        )[0]
      )
    )(case['hidden'])

  for a, b in zip(run(True), run(False)):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  'rows,length,vocab,elements', [(2, 100, 50, 1000), (2, 100, 50, 999), (4, 7, 50, 1), (1, 64, 8, 10**9)]
)
def test_chunk_length_keeps_to_the_allowed_elements(rows, length, vocab, elements):
  chunk = head_chunk.chunk_length(rows, length, vocab, elements)
  assert 1 <= chunk <= length
  assert chunk == 1 or chunk * rows * vocab <= elements


ROWS, LENGTH, MICRO, Q = 2, 128, 2, 32


def biggest_array(elements) -> int:
  """Returns the number of elements of the largest array in the compiled update."""
  model = model_lib.build(tiny.config(vocab_size=640, num_layers=1))
  layout, optimizer = tiny.one_device(), optax.sgd(0.1)
  shardings = train.state_shardings(model, optimizer, layout)
  compute = dataclasses.replace(tiny.EXACT, dtype='bfloat16', head_elements=elements, q_chunk=Q)
  update = train.make_update(
    model,
    types.Objective(lambda o, a: (-o.logprobs, {}), reads=('entropy',)),
    optimizer,
    lambda step: 0.1,
    layout,
    compute=compute,
    ledger=Ledger(),
    clip_norm=1.0,
    shardings=shardings,
  )

  def like(s, dtype, place):
    return jax.ShapeDtypeStruct(s, dtype, sharding=place)

  state = train.TrainState(
    like((), jnp.int32, shardings.step),
    jax.tree.map(
      lambda s, place: like(s, jnp.float32, place),
      model.shapes(),
      shardings.params,
      is_leaf=lambda x: isinstance(x, tuple),
    ),
    jax.tree.map(lambda x: x, optimizer.init({})),
  )
  ints = like((MICRO, ROWS, LENGTH), jnp.int32, layout.sharding())
  floats = like(ints.shape, jnp.float32, layout.sharding())
  text = update.compile(state, Batch(ints, ints, ints, floats), {}).as_text()
  shapes = re.findall(r'\b(?:f32|bf16|s32|pred|u32)\[([\d,]+)\]', text)
  return max(math.prod(map(int, s.split(','))) for s in shapes)


def test_the_update_never_holds_all_logits():
  all_logits = ROWS * LENGTH * 640
  chunk = ROWS * 16 * 640
  assert biggest_array(2**30) >= all_logits  # the count sees logits where one chunk holds all
  scores = ROWS * 4 * Q * LENGTH  # scores of attention
  assert biggest_array(chunk) <= max(chunk, scores) < all_logits / 4


def test_step_needs_less_than_a_third_of_the_memory_of_a_one_hot_step():
  """The vocabulary is 151,936 and the model small, so that logits need almost all of the memory."""
  config = dataclasses.replace(
    presets.PRESETS['tiny'], vocab_size=151_936, hidden_size=64, intermediate_size=128, num_layers=1
  )
  model = model_lib.build(config)
  layout, compute = tiny.one_device(), compute_for('cpu', 'bfloat16', 'none')
  optimizer = optax.adamw(1e-3)
  shardings = train.state_shardings(model, optimizer, layout)
  update = train.make_update(
    model,
    sft.objective(parse({})['sft']),
    optimizer,
    lambda step: 1e-3,
    layout,
    compute=compute,
    ledger=Ledger(),
    clip_norm=1.0,
    shardings=shardings,
  )
  shapes = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
  )
  state = jax.eval_shape(lambda p: TrainState(jnp.zeros((), jnp.int32), p, optimizer.init(p)), shapes)

  def place(x, s):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

  state = jax.tree.map(place, state, shardings)
  rows = layout.sharding((None, 'batch', None))

  def field(dtype):
    return jax.ShapeDtypeStruct((1, 4, 512), dtype, sharding=rows)

  batch = Batch(*(field(jnp.int32) for _ in range(3)), field(jnp.float32))

  def one_hot_step(state, batch):
    batch = jax.tree.map(lambda x: x[0], batch)

    def loss(params):
      hidden = model.forward(params, batch.tokens, batch.positions, batch.segment_ids, compute=compute)
      logits = jnp.einsum('btd,vd->btv', hidden, model.head(params))
      labels = jax.nn.one_hot(train.next_token(batch.tokens), logits.shape[-1])
      logp = jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)
      return -jnp.sum(logp * train.next_token(batch.loss_weights))

    grads = jax.grad(loss)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return TrainState(state.step, optax.apply_updates(state.params, updates), opt_state)

  one_hot = jax.jit(one_hot_step, donate_argnums=0).lower(state, batch).compile()
  fused_bytes = update.compile(state, batch, {}).memory_analysis().temp_size_in_bytes
  assert fused_bytes < one_hot.memory_analysis().temp_size_in_bytes / 3
