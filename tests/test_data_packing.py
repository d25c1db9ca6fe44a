"""Packing of Examples into batches: which tokens attend to which, sequence numbers, loss weights, and `Example.cut`."""

import numpy as np
import pytest

from jaxpost.data import packing
from jaxpost.data.examples import Example

LENGTH = 64


def plain(length, trained=1, weight=1.0):
  """Returns a document of `length` tokens whose last `trained` tokens are trained with this weight."""
  mask = np.where(np.arange(length) >= length - trained, weight, 0.0)
  return Example(np.arange(1, length + 1), mask.astype(np.float32))


def pair(prompt, chosen, rejected, share=True, last=False):
  """Returns two answers to a prompt, as a preference pair. Tokens of the chosen one are 200 + i, of the other 300 + i.

  Args:
    prompt, chosen, rejected: lengths in tokens.
    share: whether both answers share one copy of the prompt.
    last: whether only the last token of each answer is trained, as where a reward model reads its score.
  """
  p = np.arange(100, 100 + prompt)
  sides = [np.append(p, 200 + np.arange(chosen)), np.append(p, 300 + np.arange(rejected))]
  start = prompt - 1 if share else 0
  numbers = np.repeat([0, 1, 2], [start, *(len(s) - start for s in sides)]).astype(np.int32)

  def joined(arrays):
    return np.concatenate([arrays[0][:start], *(a[start:] for a in arrays)])

  positions = joined([np.arange(len(s)) for s in sides])
  scored = positions >= prompt
  mask = scored.astype(np.float32)
  if last:
    mask[:] = 0
    mask[[len(sides[0]) - 1, -1]] = 1
  tokens = joined(sides)
  return Example(
    tokens,
    mask,
    positions,
    None if share else numbers,
    numbers if share else None,
    sequence_ids=np.where(scored, numbers, 0),
    arrays={'margin': (scored * 0.5).astype(np.float32), 'topk': np.stack([tokens, tokens + 1], -1)},
  )


def visible(batch, row):
  """Returns a [T, T] bool: which tokens each token attends to, by the definition in `types.Batch`."""
  s = batch.segment_ids[row]
  b = np.zeros_like(s) if batch.branch_ids is None else batch.branch_ids[row]
  t = np.arange(len(s))
  same = (s[:, None] == s[None]) & (s[:, None] > 0) & (t[:, None] >= t[None])
  return same & ((b[None] == 0) | (b[:, None] == b[None]))


def contexts(batch):
  """Returns (tokens and positions of its context, the token) of each trained token."""
  predictions = []
  for r in range(len(batch.tokens)):
    attends = visible(batch, r)
    for t in np.flatnonzero(batch.loss_weights[r]):
      context = np.flatnonzero(attends[t - 1])
      tokens, positions = batch.tokens[r, context], batch.positions[r, context]
      predictions.append((tuple(tokens.tolist()), tuple(positions.tolist()), int(batch.tokens[r, t])))
  return sorted(predictions)


@pytest.mark.parametrize('prompt', [1, 2, 7])
def test_answers_with_a_shared_prompt_have_the_context_of_separate_copies(prompt):
  shared, apart = (packing.to_batch([[pair(prompt, 5, 3, share)] * 2], LENGTH, 1) for share in (True, False))
  assert contexts(shared) == contexts(apart)
  tokens, positions, first = contexts(shared)[0]
  assert tokens == tuple(range(100, 100 + prompt)) and first == 200
  assert positions == tuple(range(prompt))


def test_answers_do_not_attend_to_other_answers():
  batch = packing.to_batch([[pair(3, 4, 2), pair(2, 2, 2)]], LENGTH, 1)
  attends = visible(batch, 0)
  ids, segments = batch.sequence_ids[0], batch.segment_ids[0]
  assert sorted(set(ids.tolist())) == [0, 1, 2, 3, 4]
  for a in (1, 2, 3, 4):
    for b in (1, 2, 3, 4):
      block = attends[np.ix_(ids == a, ids == b)]
      assert block.any() == (a == b)
  assert not attends[np.ix_(segments == 1, segments == 2)].any()
  # The row is p[:-1], p[-1] chosen..., p[-1] rejected...: each branch has a copy of the last token of the prompt.
  assert batch.tokens[0, :10].tolist() == [100, 101, 102, 200, 201, 202, 203, 102, 300, 301]
  assert batch.positions[0, :10].tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4]
  assert batch.branch_ids[0, :10].tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
  assert ids[:10].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 2, 2]


def test_arrays_of_examples_keep_their_dtype_and_shape():
  batch = packing.to_batch([[pair(3, 4, 2)], [pair(2, 2, 2)]], LENGTH, 3)
  assert batch.arrays['margin'].dtype == np.float32
  assert batch.arrays['topk'].shape == (3, LENGTH, 2)
  assert batch.arrays['topk'].dtype == np.int32
  np.testing.assert_array_equal(batch.arrays['margin'], np.where(batch.sequence_ids > 0, 0.5, 0))
  np.testing.assert_array_equal(batch.arrays['topk'][..., 1], np.where(batch.segment_ids > 0, batch.tokens + 1, 0))
  with pytest.raises(ValueError, match='have different arrays'):
    packing.to_batch([[plain(3), pair(2, 2, 2)]], LENGTH, 1)


def random_rows(rng, kind):
  """Returns random examples of one kind, and the rows of at most LENGTH tokens into which they are packed."""

  def make():
    a, b, c = rng.integers(1, 9, 3)
    return {
      'plain': lambda: plain(a + b, rng.integers(0, a + b + 1), rng.random()),
      'shared': lambda: pair(a, b, c),
      'apart': lambda: pair(a, b, c, share=False),
      'last': lambda: pair(a, b, c, last=True),
    }[kind]()

  examples = [make() for _ in range(rng.integers(1, 9))]
  rows = packing.pack([len(e.tokens) for e in examples], LENGTH)
  return examples, [[examples[i] for i in row] for row in rows]


@pytest.mark.parametrize('kind', ['plain', 'shared', 'apart', 'last'])
@pytest.mark.parametrize('seed', range(6))
def test_weights_and_sequence_ids_of_random_batches(kind, seed):
  rng = np.random.default_rng(seed)
  examples, rows = random_rows(rng, kind)
  size = len(rows) + rng.integers(0, 3)
  mask = packing.to_batch(rows, LENGTH, size, totals=()).loss_weights
  trained = [e for e in examples if e.trained.any()]
  pairs = len(trained)
  sequences = pairs if kind == 'plain' else 2 * pairs
  totals = {'token': mask.sum(dtype=np.float64), 'sequence': sequences, 'pair': pairs}
  for per, total in totals.items():
    batch = packing.to_batch(rows, LENGTH, size, per=per)
    assert batch.loss_weights.dtype == np.float32
    np.testing.assert_allclose(batch.loss_weights, mask / max(total, 1e-30), rtol=1e-6)
    assert (batch.segment_ids > 0).sum() == sum(len(e.tokens) for e in examples)
    assert not batch.loss_weights[batch.segment_ids == 0].any()
    assert not batch.loss_weights[:, 0].any()
    if kind == 'last' and per == 'pair':
      # The one trained token of each answer weighs 1 / pairs.
      for r, ids in enumerate(batch.sequence_ids):
        for n in set(ids[ids > 0].tolist()):
          weight = batch.loss_weights[r, ids == n].sum()
          assert weight == pytest.approx(1 / pairs, rel=1e-6)
    if kind == 'plain':
      assert batch.sequence_ids is None and batch.branch_ids is None
      continue
    for ids, tokens in zip(batch.sequence_ids, batch.tokens):
      # Answers are numbered through the row; the odd ones are chosen, the even ones rejected.
      assert set(ids.tolist()) - {0} == set(range(1, ids.max() + 1))
      assert (tokens[ids % 2 == 1] // 100 == 2).all()
      assert (tokens[(ids > 0) & (ids % 2 == 0)] // 100 == 3).all()
    assert (batch.branch_ids is not None) == (kind != 'apart')
  chosen = batch.arrays['nll_weights'] if kind != 'plain' else mask
  if kind != 'plain':
    assert chosen.sum() == pytest.approx(1, rel=1e-5)
    assert ((chosen > 0) == (mask > 0) & (batch.sequence_ids % 2 == 1)).all()
    np.testing.assert_allclose(
      packing.to_batch(rows, LENGTH, size, 'pair', totals=()).arrays['nll_weights'],
      np.where(batch.sequence_ids % 2 == 1, mask, 0),
    )


@pytest.mark.parametrize('per', ['token', 'sequence', 'pair', 'label'])
def test_a_process_may_have_no_documents_of_a_batch(per):
  """The last rows of the last batch may be empty, and they may be all rows of one of several processes."""
  batch = packing.to_batch([[], []], 8, 2, per=per, totals=[(3.0, 1.0, 2.0)])
  assert not batch.loss_weights.any() and not any(x.any() for x in batch.arrays.values())


def test_weights_of_messages_scale_their_loss_weights():
  batch = packing.to_batch([[plain(4, 2, 0.5), plain(3, 1, 2.0)]], 8, 1, per='token')
  np.testing.assert_allclose(batch.loss_weights[0], np.array([0, 0, 0.5, 0.5, 0, 0, 2, 0]) / 3, rtol=1e-6)


def test_first_token_of_a_segment_is_not_trained():
  both = Example(
    np.arange(1, 7), np.ones(6, bool), np.array([0, 1, 2, 0, 1, 2]), segment_ids=np.array([1, 1, 1, 2, 2, 2])
  )
  batch = packing.to_batch([[both]], 8, 1, totals=())
  assert batch.loss_weights[0].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
  assert both.trained.tolist() == [False, True, True, False, True, True]


def answers(example):
  """Returns the tokens of the chosen and of the rejected answer."""
  return [example.tokens[example.sequence_ids == n].tolist() for n in (1, 2)]


@pytest.mark.parametrize('share', [True, False])
def test_cut_shortens_the_longer_answer_and_never_the_prompt(share):
  whole = pair(4, 9, 5, share)
  total = len(whole.tokens)
  assert whole.cut(total) is whole
  for less in range(1, 13):
    cut = whole.cut(total - less)
    assert len(cut.tokens) == total - less
    sizes = [len(a) for a in answers(cut)]
    # The first four tokens all come off the longer answer; then both have five.
    if less <= 4:
      assert sizes == [9 - less, 5]
    else:
      assert abs(sizes[0] - sizes[1]) <= 1
    assert answers(cut) == [a[:n] for a, n in zip(answers(whole), sizes)]
    batch = packing.to_batch([[cut]], LENGTH, 1)
    assert {c for c in contexts(batch)} <= {c for c in contexts(packing.to_batch([[whole]], LENGTH, 1))}
  assert whole.cut(total - 13) is None


def test_cut_keeps_the_last_token_of_an_answer_where_its_score_is_read():
  cut = pair(4, 9, 5, last=True).cut(13)
  assert len(cut.tokens) == 13
  assert answers(cut) == [[200, 201, 202, 208], [300, 301, 302, 304]]
  batch = packing.to_batch([[cut]], LENGTH, 1, per='pair')
  assert batch.tokens[0, batch.loss_weights[0] > 0].tolist() == [208, 304]
  assert batch.positions[0, :13].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7]
  assert cut.arrays['topk'][:, 0].tolist() == cut.tokens.tolist()


def test_cut_of_a_document_keeps_its_beginning():
  cut = plain(9, 3).cut(7)
  assert cut.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
  assert cut.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
