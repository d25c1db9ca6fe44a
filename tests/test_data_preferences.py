"""`data.preferences`: examples of pairs, unpaired labels, steps and scores have the tokens of SFT.

`sequence_ids` numbers the answers of an example from 1 and is 0 at prompts; `branch_ids` is 0 at shared tokens of the
prompts and numbers the branches after them.
"""

import dataclasses
import functools

import numpy as np
import pytest

from jaxpost.data import chat, generated, loader, packing, preferences, preview, sources
from jaxpost.data import prompts as prompts_lib
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.stage import evaluate

load = functools.cache(tokenizer_lib.load)
USER = {'role': 'user', 'content': 'Q1'}
ANSWER = {'role': 'assistant', 'content': 'A1'}
USER_2 = {'role': 'user', 'content': 'Q2'}
GOOD = [{'role': 'assistant', 'content': 'yes, this'}]
BAD = [{'role': 'assistant', 'content': 'no'}]
CALL = {
  'role': 'assistant',
  'content': None,
  'tool_calls': [{'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}],
}
PAIRS = [
  {'prompt': [USER], 'chosen': GOOD, 'rejected': BAD},
  {'prompt': [USER, ANSWER, USER_2], 'chosen': GOOD, 'rejected': BAD},
  {'prompt': [USER], 'rejected': BAD, 'chosen': [CALL, {'role': 'tool', 'content': 'R'}, *GOOD]},
  {'prompt': 'Q1: ', 'chosen': ' yes, this', 'rejected': ' no'},
]
THOUGHT = [{'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nA1'}]


@pytest.fixture
def plain():
  return load('bytes')


@pytest.fixture(params=['qwen3', 'bytes', 'stories'])
def tokenizer(request, shared_data):
  folder = {'qwen3': 'tokenizers/qwen3', 'stories': 'stories260K/hf'}
  if request.param == 'bytes':  # with calls of tools, which its own template leaves out
    calls = "+ message.content + (message.tool_calls | tojson if message.tool_calls else '')"
    return load('bytes', tokenizer_lib.CHATML.replace('+ message.content', calls))
  return load(shared_data(folder[request.param]))


def unrolled(example):
  """(tokens, loss mask, whether each token is scored) of each answer with its prompt."""
  answers = []
  parts = example.branch_ids if example.branch_ids is not None else example.segment_ids
  head = np.flatnonzero(parts == 0)
  for n in range(1, parts.max() + 1):
    at = np.append(head, np.flatnonzero(parts == n))
    assert example.positions[at].tolist() == list(range(len(at)))
    assert set(example.sequence_ids[at].tolist()) == {0, n}
    answers.append(
      (example.tokens[at].tolist(), example.loss_mask[at].tolist(), (example.sequence_ids[at] == n).tolist())
    )
  return answers


def can_render(tokenizer, row):
  """A row of plain text needs no chat template."""
  return tokenizer.chat_template or isinstance(row['prompt'], str)


@pytest.mark.parametrize('row', PAIRS)
@pytest.mark.parametrize('thinking', [True, False])
def test_each_answer_has_the_tokens_of_sft(tokenizer, row, thinking):
  tokenizer = dataclasses.replace(tokenizer, template_kwargs={'enable_thinking': thinking})
  if not can_render(tokenizer, row):
    with pytest.raises(InputError, match='need a chat template'):
      preferences.make_pair_example(tokenizer, row, 'x')
    return
  shared, apart = (preferences.make_pair_example(tokenizer, row, 'x', share_prompt=share) for share in (True, False))
  assert unrolled(shared) == unrolled(apart)
  assert len(shared.tokens) < len(apart.tokens)
  assert shared.segment_ids is None and apart.branch_ids is None
  for side, (tokens, mask, scored) in zip(('chosen', 'rejected'), unrolled(shared)):
    sft_row = {'prompt': row['prompt'], 'completion': row[side]}
    expected = chat.make_example(tokenizer, sft_row, 'x')
    stop = np.flatnonzero(expected.loss_mask)[-1] + 1
    assert tokens == expected.tokens[:stop].tolist()
    assert mask == scored == expected.loss_mask[:stop].tolist()
    assert not expected.loss_mask[stop:].any()
    if row[side][0] is CALL:
      continue  # Qwen3 writes turns before the last without a <think> block
    prompt = prompts_lib.prompt_tokens(tokenizer, row, 'x').tolist()
    assert tokens[: len(prompt)] == prompt and not any(mask[: len(prompt)])
    assert mask[len(prompt)]


def test_answers_with_and_without_reasoning_have_own_headers(shared_data):
  # Qwen3 opens an empty <think> block before an answer without reasoning.
  qwen = load(shared_data('tokenizers/qwen3'))
  row = {'prompt': [USER], 'chosen': THOUGHT, 'rejected': BAD}
  with pytest.raises(InputError, match='^x: chosen: message 1: is trained after .*enable_thinking=True'):
    preferences.make_pair_example(qwen, row, 'x')
  labeled = {'prompt': [USER], 'completion': THOUGHT, 'label': True}
  with pytest.raises(InputError, match='^x: message 1: is trained after .*enable_thinking=True'):
    preferences.make_unpaired_example(qwen, labeled, {**labeled, 'completion': BAD}, 'x')
  row['chat_template_kwargs'] = {'enable_thinking': True}
  shared, apart = (preferences.make_pair_example(qwen, row, 'x', share_prompt=share) for share in (True, False))
  assert unrolled(shared) == unrolled(apart)
  (good, mask, _), (bad, bad_mask, _) = unrolled(shared)

  def text(ids, mask):
    return qwen.decode(np.asarray(ids)[np.asarray(mask) > 0], skip_special=False)

  assert text(good, mask) == '<think>\nhm\n</think>\n\nA1<|im_end|>'
  assert text(bad, bad_mask) == '<think>\n\n</think>\n\nno<|im_end|>'


@pytest.mark.parametrize('same', [0, 1, 3])
def test_prompts_of_different_tokens_are_shared_up_to_the_difference(same):
  """The prompts of a pair differ if the tokenizer merges the end of the prompt with the beginning of an answer."""
  sides = []
  for other in (50, 60):
    tokens = np.arange(1, 9, dtype=np.int32)
    tokens[same:] += other
    sides.append(preferences._Side(tokens, np.arange(8) >= 5.0, np.arange(8) >= 5))
  example = preferences._join(sides, True)
  batch = packing.to_batch([[example]], 32, 1)
  assert batch.branch_ids is not None  # the batch has the same fields as those of other rows
  assert example.sequence_ids.max() == 2
  if same:
    assert [ids for ids, _, _ in unrolled(example)] == [side.tokens.tolist() for side in sides]
    assert (example.branch_ids == 0).sum() == same - 1
  else:
    assert example.tokens.tolist() == [*sides[0].tokens.tolist(), *sides[1].tokens.tolist()]
    assert not example.branch_ids.any()
    assert example.segment_ids.tolist() == [1] * 8 + [2] * 8


def test_one_token_prompt_is_not_shared(plain):
  row = {'prompt': 'Q', 'chosen': 'a', 'rejected': 'b'}
  example = preferences.make_pair_example(plain, row, 'x')
  assert plain.decode(example.tokens, False) == 'Qa<|im_end|>Qb<|im_end|>'
  assert example.positions.tolist() == [0, 1, 2, 0, 1, 2]
  assert example.branch_ids.tolist() == [1, 1, 1, 2, 2, 2]
  assert example.sequence_ids.tolist() == [0, 1, 1, 0, 2, 2]


def test_prompt_is_the_common_beginning_of_whole_conversations(plain):
  """The conversations are messages, or texts in the format of hh-rlhf; the rows have no column `prompt`."""
  explicit = preferences.make_pair_example(plain, PAIRS[1], 'x')
  begin = PAIRS[1]['prompt']
  whole = {'chosen': begin + GOOD, 'rejected': begin + BAD}
  inferred = preferences.make_pair_example(plain, whole, 'x')
  assert inferred.tokens.tolist() == explicit.tokens.tolist()
  assert inferred.sequence_ids.tolist() == explicit.sequence_ids.tolist()
  head = '\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:'
  row = {'chosen': f'{head} same x', 'rejected': f'{head} same y'}
  assert preferences.pair_of(row, 'x') == (head, ' same x', ' same y')
  # A turn that only one of the conversations has belongs to the answers.
  row = {'chosen': f'{head} x\n\nHuman: d\n\nAssistant: e', 'rejected': f'{head} y\n\nHuman: f\n\nAssistant: g'}
  assert preferences.pair_of(row, 'x')[0] == head


def test_margin_is_a_column_or_difference_of_scores(plain):
  for extra, margin in [
    ({}, 0),
    ({'margin': 1.5}, 1.5),
    ({'margin': None}, 0),
    ({'score_chosen': 8.0, 'score_rejected': 5}, 3),
    ({'score_chosen': 8.0}, 0),
  ]:
    example = preferences.make_pair_example(plain, {**PAIRS[0], **extra}, 'x')
    np.testing.assert_array_equal(example.arrays['margin'], np.where(example.sequence_ids > 0, margin, 0))


def test_train_on_last_reads_only_the_last_token_of_each_answer(plain):
  for share in (True, False):
    example = preferences.make_pair_example(plain, PAIRS[1], 'x', train_on='last', share_prompt=share)
    full = preferences.make_pair_example(plain, PAIRS[1], 'x', share_prompt=share)
    assert example.tokens.tolist() == full.tokens.tolist()
    assert example.sequence_ids.tolist() == full.sequence_ids.tolist()
    at = np.flatnonzero(example.loss_mask)
    assert example.tokens[at].tolist() == [258, 258]  # <|im_end|>
    assert example.sequence_ids[at].tolist() == [1, 2]
    batch = packing.to_batch([[example, example]], 256, 1, per='pair')
    assert batch.loss_weights.sum() == 2 and batch.loss_weights.max() == 0.5


def test_unpaired_example_has_mismatched_answer_for_the_kl(plain):
  for label, value in ((True, 1), (False, -1)):
    row = {'prompt': [USER], 'completion': GOOD, 'label': label}
    other = {'prompt': [USER_2], 'completion': BAD, 'label': True}
    shared, apart = (
      preferences.make_unpaired_example(plain, row, other, 'x', share_prompt=share) for share in (True, False)
    )
    assert unrolled(shared) == unrolled(apart)
    (own, mask, _), (kl, kl_mask, scored) = unrolled(shared)
    text = functools.partial(plain.decode, skip_special=False)
    assert 'Q1' in text(own) and 'Q1' in text(kl) and 'Q2' not in text(kl)
    assert text(own).endswith('yes, this<|im_end|>')
    assert text(kl).endswith('no<|im_end|>')
    assert sum(mask) == len('yes, this') + 1 and sum(kl_mask) == 0
    assert sum(scored) == 3
    assert shared.read.sum() == shared.trained.sum() + 3
    ids = shared.sequence_ids
    np.testing.assert_array_equal(shared.arrays['label'], np.where(ids == 1, value, 0))
    np.testing.assert_array_equal(shared.arrays['kl_mask'], ids == 2)
    whole = {'messages': [USER, *GOOD], 'label': label}
    same = preferences.make_unpaired_example(plain, whole, other, 'x')
    assert same.tokens.tolist() == shared.tokens.tolist()
    batch = packing.to_batch([[shared, shared]], 128, 1, per='sequence')
    assert batch.loss_weights.max() == 0.5  # a mean over the two sequences that are trained


def test_mismatched_row_has_another_prompt():
  rows = [{'prompt': f'q{n // 4}', 'completion': str(n)} for n in range(16)]
  rows = sources.read('x', fake_rows=rows)
  partners = [preferences.mismatched(rows, i) for i in range(16)]
  assert partners == [preferences.mismatched(rows, i) for i in range(16)]
  assert all(rows[i]['prompt'] != rows[j]['prompt'] for i, j in enumerate(partners))
  assert len(set(partners)) > 6
  same_prompt = sources.read('x', fake_rows=[rows[0], rows[1]])
  assert [preferences.mismatched(same_prompt, i) for i in (0, 1)] == [1, 0]
  with pytest.raises(InputError, match='x: KTO.*only one row'):
    preferences.mismatched(sources.read('x', fake_rows=[rows[0]]), 0)


def test_step_labels_are_at_the_separators(plain):
  row = {'prompt': 'Q: ', 'completions': ['one', 'two', 'three'], 'labels': [True, False, 0.25]}
  example = preferences.make_steps_example(plain, row, 'x')
  assert plain.decode(example.tokens) == 'Q: one\ntwo\nthree\n'
  at = np.flatnonzero(example.loss_mask)
  assert plain.decode(example.tokens[at]) == '\n\n\n'
  assert example.arrays['label'][at].tolist() == [1, 0, 0.25]
  assert example.arrays['label'].sum() == 1.25
  assert example.sequence_ids.tolist() == [0] * 3 + [1] * 14
  chat_example = preferences.make_steps_example(plain, {**row, 'prompt': [USER]}, 'x')
  head = prompts_lib.prompt_tokens(plain, {'prompt': [USER]}, 'x')
  assert chat_example.tokens[: len(head)].tolist() == head.tolist()


def test_score_is_the_label_of_the_last_token(plain):
  for row in ({'prompt': [USER], 'completion': GOOD, 'score': 2.5}, {'messages': [USER, *GOOD], 'score': 2.5}):
    example = preferences.make_scored_example(plain, row, 'x')
    assert np.flatnonzero(example.loss_mask).tolist() == [len(example.tokens) - 1]
    assert example.tokens[-1] == 258
    assert example.arrays['label'][-1] == example.arrays['label'].sum() == 2.5
    assert example.sequence_ids.sum() == len('yes, this') + 1


def test_answers_take_no_weights_between_0_and_1(plain):
  """Pairs, labels and scores are those of whole answers: no loss would read a weight of a part."""
  half = [{**GOOD[0], 'weight': 0.5}]
  single = {'prompt': [USER], 'completion': half}
  for side in ('chosen', 'rejected'):
    for train_on in preferences.TRAIN_ON:
      with pytest.raises(InputError, match=f'^x: {side}: a message has a weight other than 0 and 1'):
        preferences.make_pair_example(plain, {**PAIRS[0], side: half}, 'x', train_on=train_on)
  with pytest.raises(InputError, match='^x: a message has a weight other than 0 and 1'):
    preferences.make_scored_example(plain, {**single, 'score': 1}, 'x')
  with pytest.raises(InputError, match='^x: a message has a weight other than 0 and 1'):
    other = {'prompt': [USER_2], 'completion': BAD, 'label': False}
    preferences.make_unpaired_example(plain, {**single, 'label': True}, other, 'x')


MESSAGES = {'prompt': [USER], 'chosen': GOOD, 'rejected': BAD}
TEXT = {'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}
BAD_PAIRS = [
  ({'prompt': 'q', 'rejected': 'b'}, r'needs the column chosen; it has prompt, rejected \(.*, chosen=...\)'),
  ({'q': 'q'}, r'needs the columns chosen and rejected; it has q \(.*, chosen=...,rejected=...\)'),
  ({**TEXT, 'chosen': None}, 'chosen: is null'),
  ({**TEXT, 'rejected': 'a'}, 'rejected: equals chosen'),
  ({**TEXT, 'chosen': ' \n'}, 'chosen: is empty'),
  ({**TEXT, 'rejected': 5}, 'rejected: is an int'),
  ({**TEXT, 'rejected': BAD}, 'one is text and one is a list'),
  ({**TEXT, 'prompt': [USER]}, 'prompt is a list and chosen a str'),
  ({**MESSAGES, 'prompt': 'Q1'}, 'both text or both lists of messages$'),
  # UltraFeedback as it is on the hub, and with the prompt as messages.
  ({'prompt': 'Q1', 'chosen': [USER, *GOOD], 'rejected': [USER, *BAD]}, 'chosen has the prompt, so rename it: '),
  ({'prompt': [USER], 'chosen': [USER, *GOOD], 'rejected': [USER, *BAD]}, 'chosen: the answer begins with its prompt'),
  ({**TEXT, 'prompt': None}, 'prompt: is null'),
  ({**TEXT, 'prompt': ''}, 'prompt is empty'),
  ({'chosen': 'a', 'rejected': 'b'}, 'needs the column prompt'),
  ({**MESSAGES, 'rejected': []}, 'rejected: is an empty list'),
  ({**MESSAGES, 'rejected': GOOD}, 'rejected: equals chosen'),
  ({**MESSAGES, 'rejected': [USER]}, 'rejected: is empty'),
  ({**MESSAGES, 'chosen': [{'role': 'assistant', 'content': ''}]}, 'chosen: is empty'),
  ({**MESSAGES, 'chosen': [{'role': 'assistant', 'content': None}]}, r'chosen\[0\].content: is null'),
  ({**MESSAGES, 'chosen': [{**GOOD[0], 'weight': 0}]}, 'chosen: has no token to train on'),
  ({**MESSAGES, 'margin': 'x'}, "margin: 'x' is no number"),
  ({**MESSAGES, 'margin': float('nan')}, 'margin: nan is no number'),
  ({**MESSAGES, 'score_chosen': True, 'score_rejected': 1}, 'score_chosen: True is no number'),
  ({'chosen': [USER, *GOOD], 'rejected': [USER]}, 'rejected: is only the start'),
  ({'chosen': [USER, *GOOD], 'rejected': [USER_2, *BAD]}, 'needs the column p'),
]


@pytest.mark.parametrize('row, message', BAD_PAIRS)
def test_bad_pairs_are_named(plain, row, message):
  with pytest.raises(InputError, match='^a.jsonl:7: .*' + message) as caught:
    preferences.make_pair_example(plain, row, 'a.jsonl:7')
  assert '\n' not in str(caught.value)


def test_bad_unpaired_step_and_score_rows_are_named(plain):
  kto = {'prompt': [USER], 'completion': GOOD, 'label': True}
  steps = {'prompt': 'q', 'completions': ['a'], 'labels': [True]}
  score = {'prompt': 'q', 'completion': 'a', 'score': 1}

  def unpaired(row, other=kto):
    return preferences.make_unpaired_example(plain, row, other, 'a.jsonl:7')

  def stepwise(row):
    return preferences.make_steps_example(plain, row, 'a.jsonl:7')

  def scored(row):
    return preferences.make_scored_example(plain, row, 'a.jsonl:7')

  for render, row, message in [
    (unpaired, {**kto, 'label': 'good'}, "label: 'good' is neither"),
    (unpaired, {**kto, 'label': None}, 'label: is null'),
    (unpaired, {**kto, 'completion': None}, 'completion: is null'),
    (unpaired, {'messages': [USER], 'label': True}, 'needs a prompt and then'),
    (unpaired, {**kto, 'prompt': 'q', 'completion': 'a'}, 'is text where'),
    (stepwise, {**steps, 'labels': [True, False]}, '2 labels for 1 comp'),
    (stepwise, {**steps, 'labels': ['x']}, r"labels\[0\]: 'x' is no number"),
    (stepwise, {**steps, 'labels': [-1]}, r'labels\[0\]: -1 is not from 0 to 1'),  # as in PRM800K
    (stepwise, {**steps, 'labels': [1.5]}, r'labels\[0\]: 1.5 is not from 0 to 1'),
    (stepwise, {**steps, 'completions': [' ']}, r'completions\[0\]: is empty'),
    (stepwise, {**steps, 'completions': 'a'}, 'completions: must be a list'),
    (stepwise, {'prompt': 'q'}, 'needs the columns completions and labels'),
    (scored, {**score, 'score': '1'}, "score: '1' is no number"),
    (scored, {'prompt': 'q', 'completion': 'a'}, 'needs the column score'),
  ]:
    with pytest.raises(InputError, match='^a.jsonl:7: .*' + message) as caught:
      render(row)
    assert '\n' not in str(caught.value)
  with pytest.raises(InputError, match='a.jsonl:7: the row paired with it: '):
    unpaired(kto, {'prompt': 'q'})
  with pytest.raises(InputError, match="train_on='all' is none of"):
    preferences.make_pair_example(plain, PAIRS[0], 'x', train_on='all')


def pair_stream(length, overlong, rows=40, **options):
  data = sources.read(f'generated:arithmetic_pairs:size={rows},digits=3')
  tokenizer = load('bytes')
  return loader.PackedStream(
    lambda i: preferences.make_pair_example(tokenizer, data[i], data.where(i)),
    len(data),
    batch_size=2,
    row_length=length,
    seed=0,
    overlong=overlong,
    window=rows,
    where=data.where,
    per='pair',
    **options,
  )


def test_pair_stream_normalizes_weights_and_resumes():
  stream = pair_stream(128, 'error')
  start = stream.state()
  seen = []
  for _ in range(20):
    batch, info = next(stream)
    pairs = info['documents']
    assert batch.sequence_ids.max(axis=1).sum() == 2 * pairs
    assert batch.arrays['nll_weights'].sum() == pytest.approx(1, rel=1e-5)
    tokens = (batch.loss_weights > 0).sum()
    assert batch.loss_weights.sum() == pytest.approx(tokens / pairs, rel=1e-5)
    seen.append(batch)
  stream.restore(start)
  again = [next(stream)[0] for _ in range(20)]
  stream.close()
  for batch, restored in zip(seen, again):
    np.testing.assert_array_equal(batch.sequence_ids, restored.sequence_ids)
    np.testing.assert_array_equal(batch.arrays['nll_weights'], restored.arrays['nll_weights'])


def test_pairs_too_long_for_a_row_are_truncated_dropped_or_refused():
  stream = pair_stream(35, 'truncate', packing=False)
  steps = [next(stream) for _ in range(20)]
  stream.close()
  assert sum(info['truncated'] for _, info in steps) > 0
  for batch, _ in steps:
    assert (batch.sequence_ids.max(axis=1) == 2).all()
  stream = pair_stream(35, 'drop')
  counts = [next(stream)[1]['dropped'] for _ in range(20)]
  stream.close()
  assert sum(counts) > 0
  with pytest.raises(InputError, match=r'_pairs.*\[\d+\]: has 3\d tokens'):
    next(pair_stream(30, 'error'))


def test_eval_batches_weight_all_pairs_equally():
  tokenizer = load('bytes')
  rows = generated.rows('arithmetic_pairs', 'size=11')
  pairs = [preferences.make_pair_example(tokenizer, r, 'x') for r in rows]
  batches = evaluate.eval_batches(pairs, 2, 80, per='pair')
  assert len(batches) > 1
  weights = np.concatenate([b.loss_weights for b in batches])
  nll = np.concatenate([b.arrays['nll_weights'] for b in batches])
  ids = np.concatenate([b.sequence_ids for b in batches])
  np.testing.assert_allclose(weights, (ids > 0) / 11, rtol=1e-6)
  chosen = ids % 2 == 1
  np.testing.assert_allclose(nll, chosen / chosen.sum(), rtol=1e-6)


def test_preview_colors_the_answers(plain):
  row = {'prompt': 'Q:', 'chosen': 'good', 'rejected': 'bad', 'margin': 2}
  other = {'prompt': 'R:', 'completion': 'else'}
  own = {'prompt': 'Q:', 'completion': 'good', 'label': False}
  pair = preview.preview([preferences.make_pair_example(plain, row, 'x')], plain)[0]
  unpaired = preview.preview([preferences.make_unpaired_example(plain, own, other, 'x')], plain)[0]

  def styles(text):
    return {text.plain[s.start : s.end]: str(s.style) for s in text.spans}

  assert styles(pair)['good<|im_end|>'] == 'green'
  assert styles(pair)['bad<|im_end|>'] == 'red'
  assert 'margin 2' in pair.plain and '[answer 2]' in pair.plain
  assert styles(unpaired)['good<|im_end|>'] == 'green'
  assert styles(unpaired)['else<|im_end|>'] == 'yellow'
  assert 'label -1' in unpaired.plain
  assert preview.marked(pair) == pair.plain.replace('good<|im_end|>', '«good<|im_end|>»').replace(
    'bad<|im_end|>', '«bad<|im_end|>»'
  )
  assert '«good<|im_end|>»' in preview.marked(unpaired) and '‹else<|im_end|>›' in preview.marked(unpaired)
