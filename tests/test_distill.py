"""Distillation: the divergence in the head, teachers, their cache, samples.

Legend: B rows, T tokens, D hidden size, V vocabulary, k kept of it.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
import tiny

from jaxpost import assemble
from jaxpost import build
from jaxpost import cache
from jaxpost import config as config_lib
from jaxpost import metrics
from jaxpost import roles as roles_lib
from jaxpost import stages
from jaxpost.algorithms import distill
from jaxpost.data import packing
from jaxpost.data.examples import Example
from jaxpost.errors import InputError
from jaxpost.losses import head as head_lib
from jaxpost.models import model as model_lib
from jaxpost.programs import score
from jaxpost.programs import train
from jaxpost.programs.compile import Ledger
from jaxpost.types import Batch

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / 'golden/losses.json').read_text())
TASK = 'generated:arithmetic:max=99,ops=+'
QUIET = rich.console.Console(quiet=True)


def of(**fields):
  """A config whose `distill` has one teacher, or these fields."""
  plain = config_lib.parse(dict(
      algorithm='distill', distill=dict(teachers=('teacher',)) | fields))
  return plain['distill']


def plan(config, vocab, elements=2**20):
  o = distill.objective(config)
  compute = dataclasses.replace(tiny.EXACT, head_elements=elements)
  return head_lib.Plan(
      o.fn, vocab, o.temperature, compute, tiny.one_device(), o.reads,
      o.learns, o.divergence)


# ------------------------------------------------------------------ the head


@pytest.mark.parametrize('elements', [2**20, 2 * 2 * 11])
@pytest.mark.parametrize('name', [n for n in GOLDEN['cases'] if 'gkd' in n])
def test_figures_of_trl_through_the_head(name, elements):
  beta, temperature = map(float, re.findall(r'beta(.*)_T(.*)', name)[0])
  inputs = GOLDEN['inputs']
  student, teacher = (
      jnp.asarray(inputs[k]) for k in ('student_logits', 'teacher_logits'))
  labels = jnp.asarray(inputs['kd_labels'])
  mask = (labels != -100).astype(jnp.float32)
  vocab = student.shape[-1]
  head = jnp.eye(vocab)
  loss, found = head_lib.fused_loss(
      plan(of(beta=beta, temperature=temperature), vocab, elements), student,
      head, jnp.maximum(labels, 0), mask / mask.sum(), {}, [(teacher, head)])
  assert float(loss) == pytest.approx(GOLDEN['cases'][name], rel=1e-5)
  assert float(found['divergence']) == pytest.approx(float(loss))


B, T, D, V, REAL = 3, 10, 8, 24, 21  # the vocabulary is padded to 24


@pytest.fixture(scope='module')
def case():
  """A student of 21 tokens; teachers of 21 (wider) and of 17 tokens."""
  random = np.random.RandomState(0)
  normal = lambda *s: jnp.asarray(random.standard_normal(s), jnp.float32)
  weights = np.abs(random.standard_normal((B, T))) * (
      random.uniform(size=(B, T)) > 0.4)
  weights[1] = 0
  return dict(
      hidden=normal(B, T, D), head=normal(V, D),
      labels=jnp.asarray(random.randint(0, 17, (B, T))),
      weights=jnp.asarray(weights, jnp.float32),
      teachers=[(normal(B, T, 12), normal(V, 12)),
                (normal(B, T, 6), normal(17, 6))])


def dense(case, config, hidden, head):
  """The loss from all logits at once, by the formulas of the paper."""
  d = config.distill
  mm = lambda h, w: jnp.einsum('btd,vd->btv', h, w, precision='highest')
  logits, total = mm(hidden, head[:REAL]), 0
  for share, (h, w) in zip(distill.shares(d), case['teachers']):
    shared = min(len(w), REAL)
    t = jax.nn.log_softmax(mm(h, w[:shared]) / d.temperature)
    s = jax.nn.log_softmax(logits[..., :shared] / d.temperature)
    kl = lambda p, q: jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    if d.beta in (0.0, 1.0):
      total += share * (kl(s, t) if d.beta else kl(t, s))
    else:
      m = jnp.log((1 - d.beta) * jnp.exp(s) + d.beta * jnp.exp(t))
      total += share * (d.beta * kl(t, m) + (1 - d.beta) * kl(s, m))
  logp = jnp.take_along_axis(
      jax.nn.log_softmax(logits), case['labels'][..., None], -1)[..., 0]
  return jnp.sum(case['weights'] * (total - d.nll_coef * logp))


@pytest.mark.parametrize('elements', [2**20, B * V * 3, 1])
@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
def test_gradients_are_those_of_all_logits(case, beta, elements):
  config = of(teachers=('a', 'b'), weights=(1.0, 3.0), beta=beta,
              temperature=1.7, nll_coef=0.4)
  args = case['hidden'], case['head']
  ours = jax.jit(jax.value_and_grad(lambda h, w: head_lib.fused_loss(
      plan(config, REAL, elements), h, w, case['labels'], case['weights'], {},
      case['teachers'])[0], (0, 1)))(*args)
  theirs = jax.value_and_grad(
      lambda h, w: dense(case, config, h, w), (0, 1))(*args)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
    np.testing.assert_allclose(a, b, atol=2e-5 * tiny.largest(b))


def test_weights_of_teachers(case):
  """Normalised, and one each by default."""
  def loss(**fields):
    count = len(fields['teachers'])
    return float(head_lib.fused_loss(
        plan(of(**fields), REAL), case['hidden'], case['head'],
        case['labels'], case['weights'], {},
        case['teachers'][-count:] if fields['teachers'] == ('b',) else (
            case['teachers'][:count]))[0])

  a, b = loss(teachers=('a',)), loss(teachers=('b',))
  both = ('a', 'b')
  assert loss(teachers=both) == pytest.approx((a + b) / 2, rel=1e-5)
  assert loss(teachers=both, weights=(2.0, 6.0)) == pytest.approx(
      a / 4 + 3 * b / 4, rel=1e-5)
  assert loss(teachers=both, weights=(0.0, 2.0)) == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize('fields', [
    dict(beta=0.9), dict(temperature=2.0), dict(nll_coef=0.3),
    dict(weights=(1.0, 3.0))])
def test_every_field_changes_the_loss(case, fields):
  one, two = (float(head_lib.fused_loss(
      plan(of(teachers=('a', 'b'), **more), REAL), case['hidden'],
      case['head'], case['labels'], case['weights'], {},
      case['teachers'])[0]) for more in ({}, fields))
  assert abs(one - two) > 1e-3


@pytest.mark.parametrize('elements', [2**20, B * V * 3])
def test_top_tokens(case, elements):
  p = plan(of(), REAL, elements)._replace(objective=None, temperature=0.7)
  ids, logprobs = jax.jit(lambda h, w: head_lib.top_tokens(
      p, h, w, case['weights'], 5))(case['hidden'], case['head'])
  logits = jnp.einsum('btd,vd->btv', case['hidden'], case['head'][:REAL],
                      precision='highest')
  top, place = jax.lax.top_k(jax.nn.log_softmax(logits / 0.7), 5)
  mask = (case['weights'] != 0)[..., None]
  np.testing.assert_array_equal(ids, jnp.where(mask, place, 0))
  np.testing.assert_allclose(
      logprobs, jnp.where(mask, top, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('beta', [0.0, 0.5, 1.0])
def test_all_tokens_kept_are_the_whole_distribution(case, beta):
  teacher = case['teachers'][0]
  whole = of(beta=beta, temperature=0.8)
  kept = of(beta=beta, temperature=0.8, topk=REAL)
  ids, logprobs = head_lib.top_tokens(
      plan(whole, REAL)._replace(objective=None, temperature=0.8), *teacher,
      case['weights'], REAL)
  def run(config, arrays, teachers):
    return jax.value_and_grad(lambda h: head_lib.fused_loss(
        plan(config, REAL, B * V * 3), h, case['head'], case['labels'],
        case['weights'], arrays, teachers)[0])(case['hidden'])
  full = run(whole, {}, [teacher])
  cached = run(kept, dict(teacher_0_ids=ids, teacher_0_logprobs=logprobs), ())
  for a, b in zip(full, cached):
    np.testing.assert_allclose(a, b, atol=1e-5 * tiny.largest(a))
  few = run(of(beta=beta, temperature=0.8, topk=3), dict(
      teacher_0_ids=ids[..., :3], teacher_0_logprobs=logprobs[..., :3]), ())
  assert 0 < few[0] < full[0]  # what is merged cannot differ


ROWS, LENGTH, MICRO, Q, WIDE = 2, 128, 2, 32, 640


def biggest_array(make, elements) -> int:
  """Elements of the largest array in a compiled program."""
  model = model_lib.build(tiny.config(vocab_size=WIDE, num_layers=1))
  layout = tiny.one_device()
  compute = dataclasses.replace(
      tiny.EXACT, dtype='bfloat16', head_elements=elements, q_chunk=Q)
  like = lambda s, dtype: jax.ShapeDtypeStruct(
      s, dtype, sharding=layout.sharding())
  params = jax.tree.map(lambda s: like(s, jnp.float32), model.shapes(),
                        is_leaf=lambda x: isinstance(x, tuple))
  ints = like((MICRO, ROWS, LENGTH), jnp.int32)
  batch = Batch(ints, ints, ints, like(ints.shape, jnp.float32))
  text = make(model, layout, compute, params, batch, like).as_text()
  shapes = re.findall(r'\b(?:f32|bf16|s32|pred|u32)\[([\d,]+)\]', text)
  return max(math.prod(map(int, s.split(','))) for s in shapes)


def compiled_update(model, layout, compute, params, batch, like):
  optimizer = optax.sgd(0.1)
  update = train.make_update(
      model, distill.objective(of()), optimizer, lambda step: 0.1, layout,
      compute, Ledger(), clip_norm=1.0,
      shardings=train.state_shardings(model, optimizer, layout))
  state = train.TrainState(like((), jnp.int32), params, optimizer.init({}))
  return update.compile(
      state, batch.replace(teacher_hidden=(
          like((*batch.tokens.shape, 48), jnp.bfloat16),)),
      {'teacher_heads': (like((WIDE, 48), jnp.bfloat16),)})


def compiled_topk(model, layout, compute, params, batch, like):
  return score.make_topk(
      model, layout, compute, Ledger(), k=4, vocab_size=WIDE,
      temperature=1.0).compile(params, batch)


@pytest.mark.parametrize('make', [compiled_update, compiled_topk])
def test_no_program_holds_all_logits(make):
  whole, chunk = ROWS * LENGTH * WIDE, ROWS * 16 * WIDE
  assert biggest_array(make, 2**30) >= whole  # so the test can see them
  scores = ROWS * 4 * Q * LENGTH  # of attention
  assert biggest_array(make, chunk) <= max(chunk, scores) < whole / 4


# ------------------------------------- how documents lie in rows and batches


@pytest.fixture(scope='module')
def models():
  """(student, teacher) with their parameters; other width and depth."""
  student = model_lib.build(tiny.config(num_layers=1))
  teacher = model_lib.build(tiny.config(hidden_size=48, num_layers=2))
  return (student, tiny.params(student, 1)), (teacher, tiny.params(teacher, 2))


def documents():
  out = []
  for n, length in enumerate((9, 14, 7, 12, 20)):
    tokens = tiny.tokens((length,), seed=n)
    out.append(Example(tokens, np.arange(length) >= 3))
  return out


ARRANGED = {  # rows of documents, row length, rows at a time, head elements
    'one a row': ([[0], [1], [2], [3], [4]], 20, 5, 2**20),
    'packed': ([[4, 0], [1, 3], [2]], 33, 3, 2**20),
    'padded': ([[4, 0], [], [1, 3], [2]], 64, 4, 2**20),
    'micro-batches': ([[4, 0], [1, 3], [2], []], 33, 1, 2**20),
    'small chunks': ([[4, 0], [1, 3], [2]], 33, 3, 3 * 192 * 4)}


@pytest.mark.parametrize('topk', [0, 7])
def test_loss_does_not_depend_on_the_arrangement(models, topk):
  (student, params), (teacher, weights) = models
  layout, config = tiny.one_device(), of(topk=topk, beta=0.3, nll_coef=0.1)

  def run(rows, length, micro, elements):
    compute = dataclasses.replace(tiny.EXACT, head_elements=elements)
    lookup = cache.Lookup()
    if topk:
      spec = distill.precompute(config)['teacher_0']
      program = score.make_topk(
          teacher, layout, compute, Ledger(), k=topk, vocab_size=131,
          temperature=1.0)
      def topk_of(batch):
        found = spec.read(program(weights, roles_lib.without_signal(
            roles_lib.place(layout, micro, batch))))
        return {k: np.asarray(x).reshape(-1, length, topk)
                for k, x in found.items()}
      lookup = cache.Lookup(spec.arrays)
      lookup.fill(documents(), cache.read(
          documents().__getitem__, 5, spec.arrays, topk_of, len(rows), length))
    made = [lookup.attach(n, e) for n, e in enumerate(documents())]
    batch = roles_lib.place(layout, micro, packing.to_batch(
        [[made[n] for n in row] for row in rows], length, len(rows)))
    frozen = {}
    if not topk:
      hidden = score.make_hidden(teacher, layout, compute, Ledger())
      batch = batch.replace(teacher_hidden=(hidden(weights, batch),))
      frozen = {'teacher_heads': (teacher.head(weights),)}
    loss = train.make_loss(
        student, distill.objective(config), layout, compute)
    return jax.jit(lambda p, b: train.accumulate(
        lambda p, micro: loss(p, micro, 0, frozen), p, b))(params, batch)

  (loss, _), grads = run(*ARRANGED['one a row'])
  for name in list(ARRANGED)[1:]:
    (other, _), others = run(*ARRANGED[name])
    assert float(other) == pytest.approx(float(loss), rel=1e-5), name
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads)):
      np.testing.assert_allclose(
          a, b, atol=2e-5 * tiny.largest(b), err_msg=name)


def test_long_documents_keep_the_values_of_what_fits():
  """An array lies at the tokens that were read, also where a row is short."""
  example = dataclasses.replace(documents()[4], arrays={})
  fields = {'seen': ((), np.int32)}
  run = lambda batch: {'seen': batch.tokens}
  values = cache.read(lambda n: (None, example)[n], 2, fields, run, 2, 8)
  lookup = cache.Lookup(fields)
  lookup.fill([None, example], values)
  assert lookup.attach(0, None) is None
  seen = lookup.attach(1, example).arrays['seen']
  np.testing.assert_array_equal(seen[3:8], example.tokens[3:8])
  assert not seen[:3].any() and not seen[8:].any()


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope='module')
def big(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('models') / 'big',
                     hidden_size=32, num_layers=2)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('models') / 'small')


def settings(student, teacher, **over):
  return tiny.run_config(student, **tiny.merged(dict(
      algorithm='distill', distill=dict(teachers=(teacher,)),
      train=dict(steps=2), data=dict(path=f'{TASK},split=train,size=40'),
      eval=dict(data=dict(path=f'{TASK},split=test,size=8'))), over))


def rows_of(workdir, split='train'):
  return [row for row in metrics.read_rows(
      pathlib.Path(workdir) / 'metrics.jsonl') if row['split'] == split]


def run(config, workdir):
  stages.run(config, workdir, QUIET)
  return rows_of(workdir)


GKD = dict(algorithm='gkd', train=dict(row_length=0), eval=dict(data=dict(
    path='')))


def first_loss(config) -> float:
  """Of the first update; nothing is written."""
  policy, stream = stages.policy_and_stream(config)
  try:
    item = next(stream)
    return float(policy.update(item.updates[0][1])['loss'])
  finally:
    stream.close()


@pytest.mark.parametrize('over', [
    {}, dict(distill=dict(topk=9)), dict(
        **GKD, distill=dict(on_policy=0.5), seed=1)])
def test_a_run_compiles_nothing_late(small, big, tmp_path, over, caplog):
  with caplog.at_level(logging.WARNING):
    rows = run(settings(small, big, **tiny.merged(
        over, dict(train=dict(steps=4)))), tmp_path)
  assert 'compiled' not in caplog.text
  assert all(row['divergence'] > 0 for row in rows)
  if 'algorithm' in over:  # both kinds of steps
    assert {row['on_policy'] for row in rows} == {0.0, 1.0}
    assert not any('reward' in row for row in rows)
  else:
    start, end = rows_of(tmp_path, 'eval')
    assert start['loss'] == pytest.approx(start['divergence'])
    assert end['divergence'] < start['divergence']
    assert start['perplexity'] == pytest.approx(
        math.exp(start['nll']), rel=1e-5)


@pytest.mark.parametrize('beta, over', [
    (1.0, {}), (0.5, GKD), (0.0, dict(distill=dict(topk=16)))])
def test_a_student_that_is_its_teacher_learns_nothing(
    small, tmp_path, over, beta):
  rows = run(settings(small, small, **tiny.merged(over, dict(
      distill=dict(beta=beta), train=dict(steps=1)))), tmp_path)
  assert rows[0]['divergence'] == pytest.approx(0, abs=1e-6)
  assert rows[0]['grad_norm'] < 1e-4


def test_the_first_step_is_checked(small, big):
  same = config_lib.parse(settings(small, small))['distill']
  distill.check_first_step({'divergence': 1e-7}, same)
  with pytest.raises(AssertionError, match='divergence is 0.1'):
    distill.check_first_step({'divergence': 0.1}, same)
  for other in (dict(distill=dict(teachers=(big,))), dict(init_from=big),
                dict(distill=dict(teachers=(small, big)))):
    distill.check_first_step({'divergence': 0.1}, config_lib.parse(
        settings(small, small, **other))['distill'])


def test_completions_of_the_data_are_those_of_distill(small, big):
  """gkd with on_policy = 0 is distill, on the same rows."""
  over = dict(data=dict(path=f'{TASK},split=train,size=4', packing=False),
              distill=dict(nll_coef=0.5), train=dict(batch_size=4))
  ours = settings(small, big, **tiny.merged(over, GKD), rollout=dict(
      prompts=4, group_size=2, max_new_tokens=8))
  ours['distill']['on_policy'] = 0.0
  assert first_loss(ours) == pytest.approx(
      first_loss(settings(small, big, **over)), rel=1e-6)


def test_shares_of_steps_are_those_of_the_seed():
  from jaxpost.data.demonstrations import Mixed
  steps = [[Mixed(None, None, 0.3, seed, 4).from_data(n) for n in range(2000)]
           for seed in (0, 0, 1)]
  assert steps[0] == steps[1] != steps[2]
  assert np.mean(steps[0]) == pytest.approx(0.3, abs=0.03)


@pytest.fixture(scope='module')
def plain_loss(small, big):
  """Of the first step with one teacher, all else at its default."""
  return first_loss(settings(small, big))


@pytest.mark.parametrize('fields, same', [
    (dict(topk=2), False), (dict(topk=259), True),
    (dict(teachers=('big', 'small')), False)])
def test_what_is_read_of_teachers_changes_the_loss(
    small, big, plain_loss, fields, same):
  """But for a cache of all tokens, which is the whole distribution."""
  if 'teachers' in fields:
    fields = dict(teachers=(big, small))
  loss = first_loss(settings(small, big, distill=fields))
  assert (loss == pytest.approx(plain_loss, rel=1e-5)) == same


@pytest.mark.parametrize('over', [
    dict(distill=dict(topk=9)), dict(
        **GKD, seed=1, distill=dict(on_policy=0.5))])
def test_resume_is_bitwise(small, big, tmp_path, over):
  config = lambda steps: settings(
      small, big, **tiny.merged(over, dict(train=dict(steps=steps))))
  whole = run(config(4), tmp_path / 'whole')
  run(config(2), tmp_path / 'parts')
  parts = run(config(4), tmp_path / 'parts')
  clock = lambda row: {k: v for k, v in row.items() if not (
      k.startswith('time/') or k.endswith('_per_s'))}
  assert [clock(r) for r in whole] == [clock(r) for r in parts]


# ----------------------------------------------------------------- the cache


def count_teachers(monkeypatch):
  """A list that grows with each teacher that is put on the devices."""
  made, make = [], assemble.make_frozen

  def counted(kit, name, *args):
    made.append(name)
    return make(kit, name, *args)

  monkeypatch.setattr(assemble, 'make_frozen', counted)
  return made


def test_the_cache_is_used_again(small, big, tmp_path, monkeypatch):
  made = count_teachers(monkeypatch)
  config = settings(small, big, distill=dict(topk=5))
  first = run(config, tmp_path)
  assert made == ['teacher_0']  # once for training and evaluation
  files = sorted((tmp_path / 'cache').rglob('*.npy'))
  assert len(files) == 4
  for name in ('checkpoints', 'metrics.jsonl'):
    (tmp_path / name).rename(tmp_path / f'old_{name}')
  config['optim']['lr'] = 1e-3  # another run in the same folder
  again = run(config, tmp_path)
  assert made == ['teacher_0'] and first[0]['loss'] == again[0]['loss']


@pytest.fixture(scope='module')
def paths(big, small):
  """(config) -> where training and evaluation would keep their arrays."""
  def find(config, workdir):
    seen = []
    def record(path, make):
      del make
      seen.append(path)
      return {}
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(cache, 'load_or_make', record)
      cache.precompute(
          assemble.make_kit(build.prepare_all(config)[0]), str, workdir)
    return seen
  return find


@pytest.mark.parametrize('over', [
    dict(distill=dict(temperature=2.0)), dict(distill=dict(topk=4)),
    dict(data=dict(train_on='all')), dict(model=dict(dtype='bfloat16')),
    dict(train=dict(row_length=48)), 'weights', 'data'])
def test_the_cache_knows_what_it_is_of(small, tmp_path, paths, over):
  shape = dict(hidden_size=32, num_layers=2)
  config = settings(small, tiny.folder(tmp_path / 'teacher', **shape),
                    distill=dict(topk=5))
  before = paths(config, tmp_path)
  assert len(set(before)) == 2 and before == paths(config, tmp_path)
  if over == 'weights':
    tiny.folder(tmp_path / 'teacher', initializer_range=0.1, **shape)
  elif over == 'data':
    config['data']['path'] = f'{TASK},split=train,size=39'
  else:
    config = tiny.merged(config, over)
  after = paths(config, tmp_path)
  assert before[0] != after[0]
  assert (before[1] == after[1]) == (over == 'data')


@pytest.mark.parametrize('harm', ['none', 'truncated', 'unfinished'])
def test_arrays_on_disk_are_whole_or_made_again(tmp_path, harm):
  made = []
  def make():
    made.append(1)
    return {'ids': np.arange(12).reshape(4, 3), 'p': np.ones(4, np.float32)}
  cache.load_or_make(tmp_path / 'x', make)
  file = tmp_path / 'x' / 'ids.npy'
  if harm == 'truncated':
    file.write_bytes(file.read_bytes()[:-4])
  elif harm == 'unfinished':
    (tmp_path / 'x' / 'index.json').unlink()
  found = cache.load_or_make(tmp_path / 'x', make)
  assert len(made) == 1 + (harm != 'none')
  jax.tree.map(np.testing.assert_array_equal, dict(found), make())
  assert sorted(f.name for f in (tmp_path / 'x').iterdir()) == [
      'ids.npy', 'index.json', 'p.npy']  # no drafts stay


# ------------------------------------------------------------------- stages


def test_a_student_teaches_the_next_stage(small, big, tmp_path):
  """Stage two starts from the weights of its teacher: nothing to learn."""
  config = settings(small, big, stages=('one', 'two', 'three'))
  config['eval']['data']['path'] = ''
  config |= dict(
      one=dict(train=dict(steps=2)),
      two=dict(train=dict(steps=1), distill=dict(teachers=('stage:one',))),
      three=dict(train=dict(steps=1), init_from=big, distill=dict(
          teachers=('stage:one',), topk=4)))
  rows = run(config, tmp_path)
  assert [r['stage'] for r in rows] == ['one', 'one', 'two', 'three']
  assert rows[0]['divergence'] > 1e-3 and rows[3]['divergence'] > 1e-3
  assert rows[2]['divergence'] == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize('over, message', [
    (dict(distill=dict(teachers=())), 'distill.teachers: is empty'),
    (dict(distill=dict(teachers=('',))), r'teachers\[0\]: is empty'),
    (dict(distill=dict(teachers=('/nowhere',))),
     r'teachers\[0\]: /nowhere does not exist'),
    (dict(distill=dict(teachers=('stage:none',))), 'is no stage before this'),
    (dict(distill=dict(weights=(1.0, 2.0))), '2 weights for 1 teachers'),
    (dict(distill=dict(weights=(0.0,))), 'not all 0'),
    (dict(distill=dict(topk=260)), 'topk: 260 of 259 tokens'),
    (dict(distill=dict(on_policy=0.5)), 'set config.algorithm=gkd'),
    (dict(distill=dict(topk=4), data=dict(streaming=True)), 'streaming'),
    (dict(**GKD, distill=dict(topk=4)), 'set it to 0, or config.algorithm'),
    (dict(**GKD, distill=dict(nll_coef=1.0)), 'nll_coef: is for completions'),
    (dict(**GKD, rl=dict(kl_coef=0.1)), 'reads no reference'),
    (tiny.merged(GKD, dict(eval=dict(samples=1, data=dict(path=TASK)))),
     'config.reward: is empty')])
def test_bad_input(small, big, over, message):
  with pytest.raises(InputError, match=message) as error:
    build.prepare_all(settings(small, big, **over))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('fields, message', [
    (dict(vocab_size=200), 'vocabulary of 200, less than the 259 tokens'),
    (dict(num_labels=1), 'is a reward model')])
def test_teachers_that_cannot_teach(small, tmp_path, fields, message):
  wrong = tiny.folder(tmp_path / 'wrong', **fields)
  with pytest.raises(InputError, match=message):
    build.prepare_all(settings(small, wrong))


def test_another_tokenizer_is_refused(small, big, tmp_path):
  from jaxpost.data import tokenizer
  path = pathlib.Path(tiny.folder(tmp_path / 'other'))
  tokenizer.load('bytes').save(path)
  build.prepare_all(settings(small, str(path)))  # the same one
  file = path / 'tokenizer.json'
  found = json.loads(file.read_text())
  vocab = found['model']['vocab']
  vocab['1'], vocab['2'] = vocab['2'], vocab['1']
  file.write_text(json.dumps(found))
  with pytest.raises(InputError, match='another tokenizer than bytes'):
    build.prepare_all(settings(small, str(path)))


def test_rows_without_a_completion_are_named(small, big, tmp_path):
  file = tmp_path / 'prompts.jsonl'
  file.write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
  over = tiny.merged(GKD, dict(data=dict(path=str(file))))
  build.prepare_all(settings(small, big, **over))
  with pytest.raises(InputError, match='prompts.jsonl:1: needs the columns'):
    build.prepare_all(settings(small, big, **tiny.merged(
        over, dict(distill=dict(on_policy=0.5)))))


@pytest.mark.parametrize('vocab', [270, 400])
def test_vocabularies_may_differ(small, tmp_path, vocab):
  """The smaller one counts, whoever has it, padded or not."""
  other = tiny.folder(tmp_path / 'other', hidden_size=32, vocab_size=vocab)
  wider, narrower = (first_loss(settings(*pair)) for pair in (
      (small, other), (other, small)))
  assert 0 < wider < 1 and 0 < narrower < 1


# ----------------------------------------------------------------- meshes

MESHES = {'one': ('data=1', ''), 'both': ('fsdp=4,tensor=2', 'data=2,tensor=4'),
          'wide': ('fsdp=2,tensor=4', 'data=8')}
KINDS = {'whole': {}, 'topk': dict(distill=dict(topk=6))}


def test_layouts_of_teachers_give_what_one_device_gives(tmp_path):
  found = {}
  for devices in (1, 8):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(devices)],
        capture_output=True, text=True, timeout=500,
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {
            'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
            'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': '.'})
    assert done.returncode == 0, done.stderr[-3000:]
    found |= json.loads(done.stdout.splitlines()[-1])
  assert len(found) == len(KINDS) * len(MESHES)
  for kind in KINDS:
    for name in MESHES:
      assert found[f'{kind} {name}'] == pytest.approx(
          found[f'{kind} one'], rel=2e-5), (kind, name)
  assert found['whole one'] != found['topk one']


def main(workdir, devices):
  folder = pathlib.Path(workdir)
  shape = dict(num_heads=4, num_kv_heads=4)
  small, big = (
      tiny.folder(folder / f'small{devices}', **shape),
      tiny.folder(folder / f'big{devices}', hidden_size=32, num_layers=2,
                  **shape))
  found = {}
  for kind, over in KINDS.items():
    for name, (on, reading) in MESHES.items():
      if (name == 'one') != (devices == '1'):
        continue
      policy, stream = stages.policy_and_stream(settings(small, big, **(
          tiny.merged(over, dict(
              mesh=dict(train=on, score=reading),
              train=dict(batch_size=4))))))
      got = policy.update(next(stream).updates[0][1])
      found[f'{kind} {name}'] = [float(got['loss']), float(got['grad_norm'])]
      stream.close()
  print(json.dumps(found))


# --------------------------------------------------------------- learning

EASY = 'generated:arithmetic:max=9,ops=+,correct=1'


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
  """A run that learnt sums of one digit."""
  folder = tmp_path_factory.mktemp('teacher')
  start = tiny.folder(folder / 'start', hidden_size=64, num_layers=2,
                      intermediate_size=128, num_heads=4, num_kv_heads=4,
                      initializer_range=0.05)
  run(lesson(start, algorithm='sft', train=dict(steps=150)), folder / 'run')
  return str(folder / 'run')


def lesson(start, **over):
  return tiny.run_config(start, **tiny.merged(dict(
      data=dict(path=f'{EASY},split=train'), optim=dict(lr=5e-3, b2=0.98),
      train=dict(steps=80, batch_size=4, row_length=128),
      eval=dict(size=64, data=dict(path=f'{EASY},split=test')),
      rollout=dict(prompts=16, group_size=1, max_new_tokens=6)), over))


@pytest.fixture(scope='module')
def pupil(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('pupil') / 'model',
                     hidden_size=32, intermediate_size=64,
                     initializer_range=0.05)


@pytest.mark.parametrize('fields', [
    dict(beta=0.0), dict(beta=0.5), dict(beta=1.0), dict(beta=0.0, topk=8)])
def test_students_come_nearer_to_their_teacher(
    teacher, pupil, tmp_path, fields):
  """On sums that neither has seen, by the divergence that was trained."""
  run(lesson(pupil, algorithm='distill', distill=dict(
      teachers=(teacher,), **fields)), tmp_path)
  before, after = (r['divergence'] for r in rows_of(tmp_path, 'eval'))
  print(f'distill {fields}: {before:.4f} -> {after:.4f}')
  assert after < 0.5 * before


def test_what_students_write_brings_them_nearer(teacher, pupil, tmp_path):
  def divergence(name, **over):
    run(lesson(pupil, algorithm='distill', distill=dict(teachers=(teacher,)),
               train=dict(steps=1), optim=dict(lr=0.0), **over),
        tmp_path / name)
    return rows_of(tmp_path / name, 'eval')[0]['divergence']

  run(lesson(pupil, algorithm='gkd', train=dict(row_length=0), distill=dict(
      teachers=(teacher,), on_policy=0.5)), tmp_path / 'gkd')
  before, after = (
      divergence('before'), divergence('after', init_from=f'{tmp_path}/gkd'))
  print(f'gkd: {before:.4f} -> {after:.4f}')
  assert after < 0.5 * before


if __name__ == '__main__':
  main(*sys.argv[1:])
