"""Distillation: the divergence from teachers in the fused head, top-k caches, and independence of the packing.

Legend: B rows, T tokens, D hidden size, V vocabulary, k tokens kept of it.
"""

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

from jaxpost import roles as roles_lib
from jaxpost.algorithms import distill
from jaxpost.data import packing
from jaxpost.data.examples import Documents, Example
from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.models import model as model_lib
from jaxpost.programs import score, train
from jaxpost.programs.compile import Ledger
from jaxpost.stage import config as config_lib
from jaxpost.stage import precompute
from jaxpost.types import Batch


def config_of(**fields):
  """Returns a config of distillation from one teacher, or with these fields."""
  plain = config_lib.parse(dict(algorithm='distill', distill=dict(teachers=('teacher',)) | fields))
  return plain['distill']


def plan(config, vocab, elements=2**20):
  o = distill.objective(config)
  compute = dataclasses.replace(tiny.EXACT, head_elements=elements)
  return head_chunk.HeadConfig(
    o.fn, vocab, o.temperature, compute, tiny.one_device(), reads=o.reads, learns=o.learns, divergence=o.divergence
  )


# ------------------------------------------------------------------ the head


@pytest.mark.parametrize('elements', [2**20, 2 * 2 * 11])
@pytest.mark.parametrize('name', [n for n in CASES if 'gkd' in n])
def test_divergence_equals_figures_of_trl(name, elements):
  beta, temperature = map(float, re.findall(r'beta(.*)_T(.*)', name)[0])
  student, teacher = (jnp.asarray(INPUTS[k]) for k in ('student_logits', 'teacher_logits'))
  labels = jnp.asarray(INPUTS['kd_labels'].astype(int))
  mask = (labels != -100).astype(jnp.float32)
  vocab = student.shape[-1]
  head = jnp.eye(vocab)
  loss, metrics = head_lib.fused_loss(
    plan(config_of(beta=beta, temperature=temperature), vocab, elements),
    student,
    head,
    jnp.maximum(labels, 0),
    mask / mask.sum(),
    arrays={},
    teachers=[(teacher, head)],
  )
  assert float(loss) == pytest.approx(CASES[name], rel=1e-5)
  assert float(metrics['divergence']) == pytest.approx(float(loss))


B, T, D, V, REAL = 3, 10, 8, 24, 21  # the vocabulary is padded to 24


@pytest.fixture(scope='module')
def case():
  """Arrays of a student with a vocabulary of 21, a wider teacher with 21, and a narrower teacher with 17."""
  random = np.random.RandomState(0)

  def normal(*s):
    return jnp.asarray(random.standard_normal(s), jnp.float32)

  weights = np.abs(random.standard_normal((B, T))) * (random.uniform(size=(B, T)) > 0.4)
  weights[1] = 0
  return dict(
    hidden=normal(B, T, D),
    head=normal(V, D),
    labels=jnp.asarray(random.randint(0, 17, (B, T))),
    weights=jnp.asarray(weights, jnp.float32),
    teachers=[(normal(B, T, 12), normal(V, 12)), (normal(B, T, 6), normal(17, 6))],
  )


def dense(case, config, hidden, head):
  """Returns the loss from all logits at once, by the formulas of the paper."""
  d = config.distill

  def mm(h, w):
    return jnp.einsum('btd,vd->btv', h, w, precision='highest')

  logits, total = mm(hidden, head[:REAL]), 0
  for share, (h, w) in zip(distill.shares(d), case['teachers']):
    shared = min(len(w), REAL)
    t = jax.nn.log_softmax(mm(h, w[:shared]) / d.temperature)
    s = jax.nn.log_softmax(logits[..., :shared] / d.temperature)

    def kl(p, q):
      return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    if d.beta in (0.0, 1.0):
      total += share * (kl(s, t) if d.beta else kl(t, s))
    else:
      m = jnp.log((1 - d.beta) * jnp.exp(s) + d.beta * jnp.exp(t))
      total += share * (d.beta * kl(t, m) + (1 - d.beta) * kl(s, m))
  logp = jnp.take_along_axis(jax.nn.log_softmax(logits), case['labels'][..., None], -1)[..., 0]
  return jnp.sum(case['weights'] * (total - d.nll_coef * logp))


@pytest.mark.parametrize('elements', [2**20, B * V * 3, 1])
@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
def test_gradients_are_those_of_all_logits(case, beta, elements):
  config = config_of(teachers=('a', 'b'), weights=(1.0, 3.0), beta=beta, temperature=1.7, nll_coef=0.4)
  args = case['hidden'], case['head']
  actual = jax.jit(
    jax.value_and_grad(
      lambda h, w: head_lib.fused_loss(
        plan(config, REAL, elements), h, w, case['labels'], case['weights'], arrays={}, teachers=case['teachers']
      )[0],
      (0, 1),
    )
  )(*args)
  expected = jax.value_and_grad(lambda h, w: dense(case, config, h, w), (0, 1))(*args)
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, atol=2e-5 * tiny.largest(b))


def test_weights_average_the_teachers(case):
  """The weights are normalized; by default each teacher has weight 1."""

  def loss(**fields):
    count = len(fields['teachers'])
    return float(
      head_lib.fused_loss(
        plan(config_of(**fields), REAL),
        case['hidden'],
        case['head'],
        case['labels'],
        case['weights'],
        arrays={},
        teachers=case['teachers'][-count:] if fields['teachers'] == ('b',) else (case['teachers'][:count]),
      )[0]
    )

  a, b = loss(teachers=('a',)), loss(teachers=('b',))
  both = ('a', 'b')
  assert loss(teachers=both) == pytest.approx((a + b) / 2, rel=1e-5)
  assert loss(teachers=both, weights=(2.0, 6.0)) == pytest.approx(a / 4 + 3 * b / 4, rel=1e-5)
  assert loss(teachers=both, weights=(0.0, 2.0)) == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize(
  'fields', [dict(beta=0.9), dict(temperature=2.0), dict(nll_coef=0.3), dict(weights=(1.0, 3.0))]
)
def test_every_field_changes_the_loss(case, fields):
  default_loss, changed_loss = (
    float(
      head_lib.fused_loss(
        plan(config_of(teachers=('a', 'b'), **overrides), REAL),
        case['hidden'],
        case['head'],
        case['labels'],
        case['weights'],
        arrays={},
        teachers=case['teachers'],
      )[0]
    )
    for overrides in ({}, fields)
  )
  assert abs(default_loss - changed_loss) > 1e-3


@pytest.mark.parametrize('elements', [2**20, B * V * 3])
def test_top_tokens_equal_those_of_all_logits(case, elements):
  top_plan = plan(config_of(), REAL, elements)._replace(loss_fn=None, temperature=0.7)
  ids, logprobs = jax.jit(lambda h, w: score.top_tokens(top_plan, h, w, case['weights'], 5))(
    case['hidden'], case['head']
  )
  logits = jnp.einsum('btd,vd->btv', case['hidden'], case['head'][:REAL], precision='highest')
  top, top_ids = jax.lax.top_k(jax.nn.log_softmax(logits / 0.7), 5)
  mask = (case['weights'] != 0)[..., None]
  np.testing.assert_array_equal(ids, jnp.where(mask, top_ids, 0))
  np.testing.assert_allclose(logprobs, jnp.where(mask, top, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('beta', [0.0, 0.5, 1.0])
def test_cache_of_all_tokens_equals_the_whole_distribution(case, beta):
  teacher = case['teachers'][0]
  all_logits = config_of(beta=beta, temperature=0.8)
  all_cached = config_of(beta=beta, temperature=0.8, top_k=REAL)
  ids, logprobs = score.top_tokens(
    plan(all_logits, REAL)._replace(loss_fn=None, temperature=0.8), *teacher, case['weights'], REAL
  )

  def run(config, arrays, teachers):
    return jax.value_and_grad(
      lambda h: head_lib.fused_loss(
        plan(config, REAL, B * V * 3),
        h,
        case['head'],
        case['labels'],
        case['weights'],
        arrays=arrays,
        teachers=teachers,
      )[0]
    )(case['hidden'])

  expected = run(all_logits, {}, [teacher])
  size = jnp.full(ids.shape[:2], REAL)
  actual = run(all_cached, dict(teacher_0_ids=ids, teacher_0_logprobs=logprobs, teacher_0_vocab_size=size), ())
  for a, b in zip(expected, actual):
    np.testing.assert_allclose(a, b, atol=1e-5 * tiny.largest(a))
  three_tokens = dict(teacher_0_ids=ids[..., :3], teacher_0_logprobs=logprobs[..., :3], teacher_0_vocab_size=size)
  of_three = run(config_of(beta=beta, temperature=0.8, top_k=3), three_tokens, ())
  assert 0 < of_three[0] < expected[0]  # tokens outside the top 3 are merged, so their differences do not count


ROWS, LENGTH, MICRO, Q, WIDE = 2, 128, 2, 32, 640


def biggest_array(make, elements) -> int:
  """Returns the number of elements of the largest array in a compiled program."""
  model = model_lib.build(tiny.config(vocab_size=WIDE, num_layers=1))
  layout = tiny.one_device()
  compute = dataclasses.replace(tiny.EXACT, dtype='bfloat16', head_elements=elements, q_chunk=Q)

  def like(s, dtype):
    return jax.ShapeDtypeStruct(s, dtype, sharding=layout.sharding())

  params = jax.tree.map(lambda s: like(s, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple))
  ints = like((MICRO, ROWS, LENGTH), jnp.int32)
  batch = Batch(ints, ints, ints, like(ints.shape, jnp.float32))
  text = make(model, layout, compute, params, batch, like).as_text()
  shapes = re.findall(r'\b(?:f32|bf16|s32|pred|u32)\[([\d,]+)\]', text)
  return max(math.prod(map(int, s.split(','))) for s in shapes)


def compiled_update(model, layout, compute, params, batch, like):
  optimizer = optax.sgd(0.1)
  update = train.make_update(
    model,
    distill.objective(config_of()),
    optimizer,
    lambda step: 0.1,
    layout,
    compute=compute,
    ledger=Ledger(),
    clip_norm=1.0,
    shardings=train.state_shardings(model, optimizer, layout),
  )
  state = train.TrainState(like((), jnp.int32), params, optimizer.init({}))
  return update.compile(
    state,
    batch.replace(teacher_hidden=(like((*batch.tokens.shape, 48), jnp.bfloat16),)),
    {'teacher_heads': (like((WIDE, 48), jnp.bfloat16),)},
  )


def compiled_topk(model, layout, compute, params, batch, like):
  return score.make_topk(model, layout, compute, Ledger(), k=4, vocab_size=WIDE, temperature=1.0).compile(params, batch)


@pytest.mark.parametrize('make', [compiled_update, compiled_topk])
def test_no_program_holds_all_logits(make):
  all_logits, chunk = ROWS * LENGTH * WIDE, ROWS * 16 * WIDE
  assert biggest_array(make, 2**30) >= all_logits  # the count sees logits where one chunk holds all
  scores = ROWS * 4 * Q * LENGTH  # scores of attention
  assert biggest_array(make, chunk) <= max(chunk, scores) < all_logits / 4


# ------------------------------------- how documents lie in rows and batches


@pytest.fixture(scope='module')
def models():
  """(student, teacher), each with its parameters; the teacher is wider and deeper."""
  student = model_lib.build(tiny.config(num_layers=1))
  teacher = model_lib.build(tiny.config(hidden_size=48, num_layers=2))
  return (student, tiny.params(student, 1)), (teacher, tiny.params(teacher, 2))


def documents():
  out = []
  for n, length in enumerate((9, 14, 7, 12, 20)):
    tokens = tiny.tokens((length,), seed=n)
    out.append(Example(tokens, np.arange(length) >= 3))
  return out


ARRANGEMENTS = {  # rows of documents, row length, rows at a time, head elements
  'one a row': ([[0], [1], [2], [3], [4]], 20, 5, 2**20),
  'packed': ([[4, 0], [1, 3], [2]], 33, 3, 2**20),
  'padded': ([[4, 0], [], [1, 3], [2]], 64, 4, 2**20),
  'micro-batches': ([[4, 0], [1, 3], [2], []], 33, 1, 2**20),
  'small chunks': ([[4, 0], [1, 3], [2]], 33, 3, 3 * 192 * 4),
}


@pytest.mark.parametrize('topk', [0, 7])
def test_loss_does_not_depend_on_the_arrangement(models, topk):
  (student, params), (teacher, teacher_params) = models
  layout, config = tiny.one_device(), config_of(top_k=topk, beta=0.3, nll_coef=0.1)

  def run(rows, length, micro, elements):
    compute = dataclasses.replace(tiny.EXACT, head_elements=elements)
    examples = documents()
    if topk:
      spec = distill.precompute(config)['teacher_0']
      program = score.make_topk(teacher, layout, compute, Ledger(), k=topk, vocab_size=131, temperature=1.0)

      def topk_of(batch):
        top = spec.read(program(teacher_params, roles_lib.without_signal(roles_lib.place(layout, micro, batch))))
        return {k: np.asarray(x).reshape(-1, length, *x.shape[3:]) for k, x in top.items()}

      examples = Documents(documents().__getitem__, 5, spec.arrays)
      examples.fill(documents(), precompute.read(documents(), spec.arrays, topk_of, len(rows), row_length=length))
    batch = roles_lib.place(
      layout, micro, packing.to_batch([[examples[n] for n in row] for row in rows], length, len(rows))
    )
    frozen = {}
    if not topk:
      hidden = score.make_hidden(teacher, layout, compute, Ledger())
      batch = batch.replace(teacher_hidden=(hidden(teacher_params, batch),))
      frozen = {'teacher_heads': (teacher.head(teacher_params),)}
    loss = train.make_loss(student, distill.objective(config), layout, compute)
    return jax.jit(lambda p, b: train.accumulate(lambda p, micro: loss(p, micro, 0, frozen), p, b))(params, batch)

  (loss, _), grads = run(*ARRANGEMENTS['one a row'])
  for name in list(ARRANGEMENTS)[1:]:
    (other, _), others = run(*ARRANGEMENTS[name])
    assert float(other) == pytest.approx(float(loss), rel=1e-5), name
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads)):
      np.testing.assert_allclose(a, b, atol=2e-5 * tiny.largest(b), err_msg=name)


def test_precomputed_arrays_of_long_documents_hold_the_tokens_that_fit():
  """Where rows are shorter than a document, the array has the trained tokens that were read, and zeros elsewhere."""
  example = dataclasses.replace(documents()[4], arrays={})
  fields = {'seen': ((), np.int32)}

  def run(batch):
    return {'seen': batch.tokens}

  examples = Documents((None, example).__getitem__, 2, fields)
  examples.fill([None, example], precompute.read([None, example], fields, run, 2, row_length=8))
  assert examples[0] is None
  seen = examples[1].arrays['seen']
  np.testing.assert_array_equal(seen[3:8], example.tokens[3:8])
  assert not seen[:3].any() and not seen[8:].any()
