"""`data.loader` and `data.prompts`: packing, windows, resume, rows shared by processes, evaluation batches, prompts."""

import collections
import dataclasses
import functools
import json
import threading
import time
import types

import grain
import numpy as np
import pytest

from jaxpost.data import chat, few_rows, generated, loader, packing, preview, prompts, shared_rows, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.distributed.channel import seconds_waited
from jaxpost.errors import InputError
from jaxpost.stage import evaluate

NUM_ROWS, ROW_LENGTH = 37, 32


def example(row):
  """Returns document `row`: 2 to 20 tokens, all with the value row + 1."""
  length = 2 + row * 7 % 19
  mask = np.arange(length) >= 1
  return chat.Example(np.full(length, row + 1, np.int32), mask)


def make(batch_size=3, documents=example, **options):
  options = {'seed': 5, 'window': 16, **options}
  return loader.PackedStream(documents, NUM_ROWS, batch_size=batch_size, row_length=ROW_LENGTH, **options)


def uneven(row):
  """Returns examples like `example`, some of them too long and some without a trained token."""
  if row % 9 == 0:
    return chat.Example(np.full(50, row + 1), np.arange(50) >= 1)
  plain = example(row)
  return chat.Example(plain.tokens, plain.loss_mask & (row % 7 != 0))


def take(stream, n):
  for _ in range(n):
    yield next(stream)


def documents(batches):
  """Returns (tokens, positions) of every segment of the batches, in order."""
  segments = []
  for batch in batches:
    for tokens, positions, ids in zip(batch.tokens, batch.positions, batch.segment_ids):
      for s in range(1, ids.max() + 1):
        segments.append((tokens[ids == s].tolist(), positions[ids == s].tolist()))
  return segments


def test_pack_keeps_each_document_once_and_fits():
  lengths = [5, 3, 8, 1, 9, 10, 2]
  rows = packing.pack(lengths, 10)
  assert sorted(i for row in rows for i in row) == list(range(7))
  assert all(sum(lengths[i] for i in row) <= 10 for row in rows)
  assert len(rows) == 4


def test_pack_fills_lognormal_lengths():
  rng = np.random.default_rng(0)
  for sigma in (0.5, 0.8, 1.1):
    mean = np.log(180) - sigma**2 / 2
    lengths = np.clip(rng.lognormal(mean, sigma, 728), 2, 2048).astype(int)
    rows = packing.pack(lengths.tolist(), 2048)
    assert lengths.sum() / (len(rows) * 2048) >= 0.98
    assert len(rows) <= -(-lengths.sum() // 2048) + 1


def test_to_batch_isolates_documents():
  rows = [
    [
      chat.Example(np.array([5, 6, 7]), np.array([False, False, True])),
      chat.Example(np.array([8, 9]), np.array([True, True])),
    ]
  ]
  batch = packing.to_batch(rows, 6, 2)
  np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 9, 0], [0] * 6])
  np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0], [0] * 6])
  np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 2, 2, 0], [0] * 6])
  np.testing.assert_allclose(batch.loss_weights[0], np.array([0, 0, 1, 0, 1, 0]) / 2, rtol=1e-6)
  assert batch.loss_weights.dtype == np.float32
  assert batch.tokens.dtype == np.int32


def test_to_batch_without_trained_tokens_weighs_nothing():
  one = chat.Example(np.array([5]), np.array([True]))
  assert packing.to_batch([[one]], 4, 1).loss_weights.sum() == 0


def test_stream_keeps_each_token_of_each_epoch_once():
  # A window of one epoch: the rows of window w are exactly epoch w.
  stream = make(batch_size=1, window=NUM_ROWS)
  batches, total = [], 0
  for batch, info in stream:
    batches.append(batch)
    if info['epochs'] == 2.0:
      break
  stream.close()
  counts = collections.Counter()
  for tokens, positions in documents(batches):
    row = tokens[0] - 1
    assert tokens == example(row).tokens.tolist()
    assert positions == list(range(len(tokens)))
    counts[row] += 1
    total += len(tokens)
  assert counts == {row: 2 for row in range(NUM_ROWS)}
  assert total == 2 * sum(len(example(r).tokens) for r in range(NUM_ROWS))


def test_info_counts_tokens_documents_and_context():
  stream = make()
  batch, info = next(stream)
  stream.close()
  filled = (batch.segment_ids > 0).sum()
  assert info['tokens'] == filled
  assert info['packing_efficiency'] == filled / (3 * ROW_LENGTH)
  # Tokens of a document of n attend to 1, 2, ..., n.
  contexts = [n + 1 for _, positions in documents([batch]) for n in range(len(positions))]
  assert len(contexts) == filled and info['mean_context'] == pytest.approx(np.mean(contexts))
  assert info['documents'] == len(documents([batch]))
  assert info['truncated'] == info['dropped'] == 0
  assert abs(batch.loss_weights.sum() - 1) < 1e-6


@pytest.mark.parametrize('packed', [True, False])
def test_resume_at_each_batch_continues_the_same(packed):
  uninterrupted = make(packing=packed, documents=uneven)
  states, batches = [uninterrupted.state()], []
  for batch, info in take(uninterrupted, 14):
    batches.append((batch, info))
    states.append(uninterrupted.state())
  uninterrupted.close()
  assert all(type(v) is int for s in states for v in s.values())
  for count in ('truncated', 'dropped'):
    assert sum(info[count] for _, info in batches) > 0
  for n in range(14):
    resumed = make(packing=packed, documents=uneven)
    resumed.restore(states[n])
    for expected, actual in zip(batches[n:], take(resumed, 14 - n)):
      assert expected[1] == actual[1]
      for a, b in zip(
        (expected[0].tokens, expected[0].positions, expected[0].segment_ids, expected[0].loss_weights),
        (actual[0].tokens, actual[0].positions, actual[0].segment_ids, actual[0].loss_weights),
      ):
        np.testing.assert_array_equal(a, b)
    assert resumed.state() == states[-1]
    resumed.close()


def test_resume_into_another_batch_size_loses_no_row():
  uninterrupted = make(batch_size=1)
  rows = [b.tokens[0].tolist() for b, _ in take(uninterrupted, 24)]
  uninterrupted.close()
  first, second = make(batch_size=3), make(batch_size=2)
  resumed = [r for b, _ in take(first, 4) for r in b.tokens.tolist()]
  second.restore(first.state())
  resumed += [r for b, _ in take(second, 6) for r in b.tokens.tolist()]
  first.close()
  second.close()
  assert resumed == rows


def test_resume_keeps_the_windows_of_the_run_where_other_lengths_would_choose_others():
  longer = make(documents=uneven, window=0)
  shorter = make(documents=lambda row: uneven(row).cut(4), window=0)
  assert shorter.state()['window_size'] != longer.state()['window_size']
  list(take(longer, 3))
  longer.close()
  shorter.restore(longer.state())
  assert shorter.state() == longer.state()
  [(batch, info)] = take(shorter, 1)
  assert info['tokens'] == (batch.segment_ids > 0).sum() > 0
  shorter.close()
  assert shorter.state()['window_size'] == longer.state()['window_size']


def test_restore_in_a_running_stream_goes_back():
  stream = make()
  start = stream.state()
  first = [b.tokens for b, _ in take(stream, 5)]
  stream.restore(start)
  repeated = [b.tokens for b, _ in take(stream, 5)]
  stream.close()
  np.testing.assert_array_equal(first, repeated)


class Threads:
  """Makes channels between threads, which stand for `count` processes."""

  def __init__(self, count):
    self.count = count
    self._parts = [b''] * count
    self.barrier = threading.Barrier(count)

  def channel(self, index):
    made = types.SimpleNamespace(index=index, count=self.count, closed=threading.Event(), waited=0.0)
    made.join = functools.partial(self._join, made)
    return made

  def _join(self, channel, data):
    self._parts[channel.index] = data
    self.barrier.wait(60)
    joined = b''.join(self._parts)
    self.barrier.wait(60)
    return joined


def rows_on(own):
  """Returns a stand-in for the placement of a batch, in which this process has the devices of the rows `own`."""

  def place(batch):
    shards = [types.SimpleNamespace(data=batch.tokens[n : n + 1]) for n in own]
    return types.SimpleNamespace(tokens=types.SimpleNamespace(addressable_shards=shards))

  return place


def labeled(row):
  """Returns examples like `uneven` with optional fields, and with the arrays that each divisor of weights reads."""
  plain = uneven(row)
  n = len(plain.tokens)
  ids = np.where(np.arange(n) < n // 2, 1, 2).astype(np.int32)
  label = np.full(n, row % 3 - 1.0, np.float32)
  mask = plain.loss_mask * np.float32(0.3 + row % 2)
  return dataclasses.replace(plain, loss_mask=mask, sequence_ids=ids, arrays={'label': label, 'n': np.arange(n)})


@pytest.mark.parametrize('count, per', [(2, 'token'), (2, 'sequence'), (4, 'pair'), (4, 'label'), (1, 'token')])
def test_shared_stream_builds_the_batches_of_one_process(count, per, monkeypatch):
  """Each process fills its own rows; some share a row, one has none. Weights and counts are those of all documents."""
  monkeypatch.setattr(shared_rows, '_WINDOW_ROWS', 2)  # two windows are shared at a time
  options = dict(documents=labeled, per=per, window=9)
  single = make(5, **options)
  position, batches = [], []
  for batch_and_info in take(single, 3):
    batches.append(batch_and_info)
    position.append(single.state())
  single.close()
  owned = {1: [range(5)], 2: [{0, 2}, {1, 2, 3, 4}], 4: [{0, 3}, {3, 4}, {1, 2}, set()]}[count]
  streams = [shared_rows.SharedStream(make(5, **options), batches[0][0], rows_on(own)) for own in owned]
  for start in (0, 2):  # from the start, and resumed after two batches
    threads = Threads(count)
    for index, stream in enumerate(streams):
      if start:
        stream.restore(position[start - 1])
      monkeypatch.setattr(shared_rows, 'Channel', functools.partial(threads.channel, index))
      stream._start()
    for expected, info in batches[start:]:
      for (actual, actual_info), own in zip([next(stream) for stream in streams], owned):
        assert actual_info == info
        for name, array in (vars(expected) | expected.arrays).items():
          if isinstance(array, np.ndarray):
            actual_array, rows = (vars(actual) | actual.arrays)[name], sorted(own)
            np.testing.assert_array_equal(actual_array[rows], array[rows])
            assert actual_array.shape == array.shape and not np.delete(actual_array, rows, 0).any()
    assert [stream.state() for stream in streams] == [position[-1]] * count
    threads.barrier.abort()
    for stream in streams:
      stream.close()


def test_time_waiting_for_other_processes_is_counted_apart(monkeypatch):
  """The main thread waits 0.5 s for a batch, and the thread of the stream waits 0.3 s of these for another process."""
  first = make().peek()
  stream = shared_rows.SharedStream(make(), first, rows_on(range(3)))
  channel = types.SimpleNamespace(index=0, count=1, closed=threading.Event(), waited=7.0)

  def join(data):
    time.sleep(0.5)
    channel.waited += 0.3
    return data

  channel.join = join
  monkeypatch.setattr(shared_rows, 'Channel', lambda: channel)
  stream._start()
  before = seconds_waited()
  next(stream)
  assert seconds_waited() - before == pytest.approx(0.3)
  channel.waited += 100  # while the main thread did other work, so this is not its waiting
  before = seconds_waited()
  next(stream)
  assert seconds_waited() - before < 0.6
  stream.close()


@pytest.mark.parametrize('column', ['sequence_ids', 'arrays'])
def test_a_column_that_the_first_batch_lacks_is_refused(column, monkeypatch):
  """A process whose batch has this column would run another program than the others, and all would hang."""

  def with_column(row):
    plain = example(row)
    ids = np.arange(len(plain.tokens), dtype=np.int32)
    return dataclasses.replace(plain, **{column: ids if column == 'sequence_ids' else {'n': ids}})

  stream = shared_rows.SharedStream(make(documents=with_column), make().peek(), rows_on(range(3)))
  monkeypatch.setattr(shared_rows, 'Channel', functools.partial(Threads(1).channel, 0))
  stream._start()
  with pytest.raises(InputError, match='which the first batch does not have'):
    next(stream)


def test_processes_with_different_files_are_refused(monkeypatch):
  """If a document has another length than on the process that measured it, the run ends."""
  first = make().peek()
  threads, packed_streams = Threads(2), [make(), make(documents=lambda row: example(row + 1))]
  streams = [shared_rows.SharedStream(stream, first, rows_on(range(3))) for stream in packed_streams]
  for index, stream in enumerate(streams):
    monkeypatch.setattr(shared_rows, 'Channel', functools.partial(threads.channel, index))
    stream._start()
  for stream in streams:
    with pytest.raises(InputError, match=r'row \d+: has \d+ tokens here and \d+ on another process'):
      next(stream)


def test_restore_refuses_state_of_another_seed():
  state = make().state()
  with pytest.raises(InputError, match='seed=5 and this run has seed=6'):
    make(seed=6).restore(state)


def test_epochs_are_shuffled_anew_and_by_seed():
  def epoch(seed, n):
    order = loader.order(NUM_ROWS, seed)
    return [order[n * NUM_ROWS + i] for i in range(NUM_ROWS)]

  orders = [epoch(s, n) for s in (0, 1) for n in (0, 1)]
  assert all(sorted(o) == list(range(NUM_ROWS)) for o in orders)
  assert len({tuple(o) for o in orders}) == 4
  assert [loader.order(4, 0, shuffle=False)[i] for i in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize('size', [2, 3, 16, 50, 257, 1024])
def test_few_rows_have_the_order_of_grain(size):
  for seed in (0, 5, (1 << 32) - 1):  # the seed after the last one is 0 again
    expected = grain.MapDataset.range(7, 7 + size).shuffle(seed=seed).repeat()
    row_at = few_rows.endless(7, size, seed)
    for index in (0, 1, size - 1, size, 3 * size + size // 2):
      assert row_at(index) == expected[index]
  assert sorted(map(row_at, range(size, 2 * size))) == list(range(7, 7 + size))


def test_few_rows_are_shuffled_once_an_epoch(monkeypatch):
  """Computing the order takes grain milliseconds per document, and a window has thousands of documents."""
  encryption, calls = few_rows._encryption, []
  monkeypatch.setattr(few_rows, '_encryption', lambda seed: calls.append(seed) or encryption(seed))
  monkeypatch.setattr(grain.MapDataset, 'shuffle', None)
  for weights in ((), (1.0, 2.0)):
    calls.clear()
    stream = loader.PackedStream(
      example, 5, batch_size=2, row_length=32, seed=5, window=20, sizes=(2, 3), weights=weights
    )
    stream.peek()
    next(stream._batches(0, 0))
    # Two passes over 20 documents: 4 epochs of 5 rows, or of 2 and 3 rows by their weights.
    assert len(calls) == len(set(calls)) and 4 <= len(calls) <= 9
    assert [row for row in map(stream._order.__getitem__, range(20)) if not 0 <= row < 5] == []


def long_example(row):
  """Returns documents, of which 2 and 3 are too long; the prompt of document 3 alone fills the row."""
  length = 50 if row in (2, 3) else 10
  return chat.Example(np.full(length, row, np.int32), np.arange(length) >= (40 if row == 3 else 1))


@pytest.mark.parametrize('overlong, truncated, dropped', [('truncate', 1, 1), ('drop', 0, 2)])
def test_overlong_documents_are_counted(overlong, truncated, dropped):
  stream = loader.PackedStream(long_example, 6, batch_size=1, row_length=32, seed=0, window=6, overlong=overlong)
  counts = collections.Counter()
  for batch, info in stream:
    assert batch.tokens.shape == (1, 32)
    counts.update(truncated=info['truncated'], dropped=info['dropped'])
    if info['epochs'] == 1:
      break
  stream.close()
  assert counts == {'truncated': truncated, 'dropped': dropped}


def test_overlong_error_names_the_row():
  stream = loader.PackedStream(
    long_example,
    6,
    batch_size=1,
    row_length=32,
    seed=0,
    window=6,
    overlong='error',
    where=lambda row: f'a.jsonl:{row + 1}',
  )
  with pytest.raises(InputError, match=r'a.jsonl:[34]: has 50 tokens'):
    list(take(stream, 3))


def test_nothing_to_train_on_is_an_error_not_a_hang():
  def untrained(row):
    return chat.Example(np.array([1, 2]), np.array([True, False]))

  stream = loader.PackedStream(untrained, 6, batch_size=1, row_length=32, seed=0, window=2)
  with pytest.raises(InputError, match='none of the 6 documents'):
    next(stream)


def test_an_error_in_the_thread_reaches_the_caller():
  def broken(row):
    raise InputError(f'a.jsonl:{row}: broken')

  stream = loader.PackedStream(broken, 6, batch_size=1, row_length=32, seed=0, window=2)
  with pytest.raises(InputError, match='broken'):
    next(stream)


def test_without_packing_each_row_is_a_document():
  stream = make(packing=False)
  for batch, _ in take(stream, 5):
    assert (batch.segment_ids.max(axis=1) == 1).all()
  stream.close()


def test_default_window_fills_rows():
  stream = make(window=0, batch_size=8)
  fills = [info['packing_efficiency'] for _, info in take(stream, 16)]
  stream.close()
  assert np.mean(fills) >= 0.97


def test_eval_batches_hold_each_example_once():
  examples = [example(r) for r in range(NUM_ROWS)]
  batches = evaluate.eval_batches(examples, 4, ROW_LENGTH)
  assert all(b.tokens.shape == (4, ROW_LENGTH) for b in batches)
  tokens_of_segments = sorted(tokens for tokens, _ in documents(batches))
  assert tokens_of_segments == sorted(e.tokens.tolist() for e in examples)
  # Sums over the batches are means over all trained tokens.
  count = sum(e.loss_mask[1:].sum() for e in examples)
  weights = np.concatenate([b.loss_weights for b in batches])
  assert len(batches) > 1 and (weights > 0).sum() == count
  np.testing.assert_allclose(weights[weights > 0], 1 / count, rtol=1e-6)


def test_eval_batches_leave_out_missing_examples():
  (batch,) = evaluate.eval_batches([None, example(1), None], 1, ROW_LENGTH)
  assert documents([batch])[0][0] == example(1).tokens.tolist()
  with pytest.raises(InputError, match='none of the 0 documents'):
    evaluate.eval_batches([None], 1, ROW_LENGTH)


def prompt_stream(per_step=3, rows=None, **options):
  rows = rows or generated.rows('arithmetic', 'size=10,max=9')
  return prompts.PromptStream(
    sources.read('memory', fake_rows=rows),
    tokenizer_lib.load('bytes'),
    per_step=per_step,
    seed=3,
    **{'max_prompt_length': 99, **options},
  )


def test_resumed_prompts_continue_order_and_index():
  uninterrupted = prompt_stream()
  expected = [p for _ in range(8) for p in next(uninterrupted)[0]]
  assert [p.index for p in expected] == list(range(24))
  first, second = prompt_stream(per_step=4), prompt_stream(per_step=5)
  resumed = [p for _ in range(2) for p in next(first)[0]]
  second.restore(first.state())
  resumed += [p for _ in range(3) for p in next(second)[0]]
  assert [p.prompt for p in resumed] == [p.prompt for p in expected[:23]]
  assert len({p.prompt[0]['content'] for p in expected[:10]}) == 10
  assert expected[0].tokens.dtype == np.int32
  assert expected[0].columns.keys() == {'completion', 'answer'}
  with pytest.raises(InputError, match='seed=3'):
    second.restore({**first.state(), 'seed': 4})


def test_overlong_prompts_are_counted():
  rows = [{'prompt': 'x' * n} for n in (1, 5, 9)]
  stream = prompt_stream(rows=rows, max_prompt_length=5)
  assert stream.skipped == 1 and len(stream) == 2
  assert next(stream)[1]['skipped'] == 1
  with pytest.raises(InputError, match='all 3 prompts.*longest has 9'):
    prompt_stream(rows=rows, max_prompt_length=0)


def test_rows_skipped_while_reading_are_counted_on_after_a_resume(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps({'prompt': 'x' * n}) + '\n' for n in (3, 9, 4, 9, 9, 5)))
  rows = sources.read(path, streaming=True)

  def stream():
    return prompts.PromptStream(
      rows, tokenizer_lib.load('bytes'), per_step=1, seed=3, max_prompt_length=5, shuffle=False
    )

  uninterrupted, resumed = stream(), stream()
  counts = [next(uninterrupted)[1]['skipped'] for _ in range(2)]
  state = json.loads(json.dumps(uninterrupted.state()))
  resumed.restore(state)
  assert [*counts, next(resumed)[1]['skipped']] == [0, 1, 3]
  del state['skipped']  # as in the state of an older version
  resumed = stream()
  resumed.restore(state)
  assert next(resumed)[1]['skipped'] == 2


def test_prompt_of_a_chat_ends_before_the_last_answer():
  chat_row = [
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'b'},
    {'role': 'user', 'content': 'c'},
    {'role': 'assistant', 'content': 'd'},
  ]
  stream = prompt_stream(rows=[{'messages': chat_row}], per_step=1, system_prompt='Be brief.')
  (prompt,), _ = next(stream)
  assert prompt.prompt == [{'role': 'system', 'content': 'Be brief.'}, *chat_row[:3]]
  text = tokenizer_lib.load('bytes').decode(prompt.tokens, False)
  assert text.endswith('c<|im_end|>\n<|im_start|>assistant\n')


def test_preview_shows_trained_text_and_fill():
  tokenizer = tokenizer_lib.load('bytes')
  row = {'prompt': 'ab', 'completion': 'cd'}
  renderables = preview.preview([chat.make_example(tokenizer, row, 'x')], tokenizer, row_length=10)
  assert 'abcd<|im_end|>' in renderables[0].plain
  styles = {renderables[0].plain[s.start : s.end]: str(s.style) for s in renderables[0].spans}
  assert styles['cd<|im_end|>'] == 'green' and styles['ab'] == 'dim'
  assert '50.0% filled' in renderables[1].caption
