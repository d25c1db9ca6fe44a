"""`NativeEngine.serve`: continuous batching of turns, caches, pages, per-request sampling, stops and cancellation.

The draws of a request do not depend on its slot or on other requests, so most tests serve the same requests in two
ways, which must draw the same tokens.
"""

import collections
import dataclasses
import functools
import inspect

import numpy as np
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.programs import extend
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import buckets, native, page_table, sampler_config
from jaxpost.rollout import engine as protocol
from jaxpost.rollout.sequence import ActiveSequence, DrawnTokens, Request
from jaxpost.types import Prompt

NEW, KEY = 12, np.array([1, 2], np.uint32)


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config(initializer_range=0.15))


def decode(ids):
  """The text of token ids; each token is one character, or the same character twice."""
  return ''.join(chr(97 + i % 26) * (1 + i % 2) for i in map(int, ids))


@pytest.mark.parametrize(
  'room, page, sizes',
  [
    (1024, 0, {64: [64, 128, 256, 512, 1056], 32: [128, 256, 512, 1056], 16: [256, 512, 1056], 8: [512, 1056]}),
    (272, 0, {64: [64, 128, 304], 32: [128, 304], 16: [304], 8: [304]}),
    (700, 128, {64: [128, 256, 512, 768], 32: [128, 256, 512, 768], 16: [256, 512, 768], 8: [512, 768]}),
  ],
)
def test_decode_blocks_read_few_shapes_and_all_filled_entries(room, page, sizes):
  """`sizes` has the lengths that each number of rows may read; few rows read at most a quarter more than all slots."""
  slots, block = 64, 32
  length = buckets.cache_length(room, block, page)
  shapes = buckets.Buckets(slots, 1, 1, room, length, page, block, max_new_tokens=room)
  assert shapes.row_sizes() == list(sizes)
  for rows, expected in sizes.items():
    reads = {n: shapes.decode(n + block, rows) for n in range(room + 1)}
    assert sorted(set(reads.values())) == expected
    for n, read in reads.items():
      assert n + block <= read
      assert rows * read <= 1.25 * slots * shapes.decode(n + block, slots)
      assert not page or read % page == 0


def make_engine(model, params, ledger=None, compute=tiny.EXACT, **fields):
  settings = native.SamplerConfig(
    **{**dict(slots=4, max_prompt=20, max_new_tokens=NEW, stop_ids=(), block=4, max_context=60), **fields}
  )
  engine = native.NativeEngine(model, settings, tiny.one_device('rollout'), compute, ledger or Ledger(), decode=decode)
  engine.load(params, version=3)
  return engine


@pytest.fixture(scope='module')
def engine(model, params):
  return make_engine(model, params)


def requests(count=7, **sampling):
  random = np.random.RandomState(1)
  return [Request(random.randint(0, 131, 3 + i, np.int32), 20 + i, i % 2, sampling) for i in range(count)]


def serve(engine, first_requests, next_requests=None, step=2, **options):
  """{(prompt, sample): [Completion of each turn]}; `serve.figures` has what `engine.serve` returned last."""
  turns = collections.defaultdict(list)

  def listen(completions, idle):
    for c in completions:
      turns[c.request.prompt, c.request.sample].append(c)
    return next_requests(completions, idle) if next_requests else ()

  serve.figures = engine.serve(first_requests, run_key=KEY, step=step, next_requests=listen, **options)
  return turns


def later(ends, tokens_a_turn=4):
  """A `next_requests` that continues each text some blocks after its turn, until its prompt has ends[prompt] tokens."""
  waiting = collections.deque()

  def follow(completions, idle):
    for c in completions:
      text = np.concatenate([c.request.tokens, c.tokens])
      if len(c.request.tokens) < ends[c.request.prompt]:
        waiting.append(
          [int(c.request.prompt) % 3, Request(text, c.request.prompt, c.request.sample, c.request.sampling)]
        )
    for item in waiting:
      item[0] -= 1
    ready = [r for n, r in waiting if n < 0 or idle]
    kept = [x for x in waiting if not (x[0] < 0 or idle)]
    waiting.clear()
    waiting.extend(kept)
    return ready

  return follow


@pytest.mark.core
def test_short_turns_draw_the_tokens_of_one_long_sample(engine):
  whole = serve(engine, requests())
  short = requests(max_tokens=4)
  ends = {r.prompt: len(r.tokens) + NEW - 4 for r in short}
  turns = serve(engine, short, later(ends))
  assert len(turns) == 7
  for key, (one,) in whole.items():
    parts = turns[key]
    assert [len(p.tokens) for p in parts] == [4, 4, 4]
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), one.tokens)
    np.testing.assert_allclose(np.concatenate([p.logprobs for p in parts]), one.logprobs, atol=1e-5)
  assert 0 < serve.figures['occupancy'] <= 1


def talk(answers, turns=3):
  """A `next_requests` that appends a text of `answers` to each turn and sends it some blocks later, for some turns."""
  turn_of, waiting = collections.Counter(), collections.deque()

  def follow(completions, idle):
    for c in completions:
      key = c.request.prompt, c.request.sample
      turn_of[key] += 1
      if turn_of[key] < turns:
        text = np.concatenate([c.request.tokens, c.tokens, answers[turn_of[key], key[0] % 5]])
        waiting.append([int(key[0]) % 3, Request(text, *key, c.request.sampling)])
    for item in waiting:
      item[0] -= 1
    ready = [r for n, r in waiting if n < 0 or idle]
    kept = [x for x in waiting if not (x[0] < 0 or idle)]
    waiting.clear()
    waiting.extend(kept)
    return ready

  return follow


@pytest.mark.parametrize(
  'fields',
  [
    {},
    dict(slots=9),
    dict(slots=16, max_new_tokens=40),
    dict(page_size=8),
    dict(slots=9, page_size=8),
    dict(slots=9, page_size=8, cache_tokens=176),
    dict(slots=9, platform='gpu'),
    dict(slots=9, page_size=8, platform='gpu'),
    pytest.param(dict(slots=9, platform='gpu', part=(4, 16)), marks=pytest.mark.ci),
    dict(slots=9, page_size=8, platform='gpu', part=(4, 16)),
    dict(slots=9, window=5),
  ],
  ids=str,
)
def test_conversations_with_kept_cache_draw_the_same_tokens(model, params, fields, monkeypatch):
  """Also, they prefill less than an engine that reads every turn from its beginning."""
  fields = dict(fields)
  if 'part' in fields:  # (slots, tokens) that one program reads at a time
    monkeypatch.setattr(extend, '_ACCELERATOR', fields.pop('part'))
  compute = dataclasses.replace(tiny.EXACT, platform=fields.pop('platform', 'cpu'))
  if 'window' in fields:
    model = model_lib.build(dataclasses.replace(model.config, layer_windows=(fields.pop('window'), 0)))
  random = np.random.RandomState(2)
  # Some are longer than what is read at a time.
  answers = {
    (turn, n): random.randint(0, 131, size, np.int32) for turn in (1, 2) for n, size in enumerate([1, 5, 37, 9, 2])
  }
  first_turns = requests(9, max_tokens=5)

  def fresh_engine():
    return make_engine(model, params, compute=compute, max_context=120, **fields)

  keeping, reading = fresh_engine(), fresh_engine()
  reread = serve(reading, first_turns, talk(answers), reuse_cache=False)
  prefilled_without_cache, figures = serve.figures['tokens_prefilled'], {}
  assert serve.figures['tokens_cached'] == 0
  cached = serve(keeping, first_turns, talk(answers))
  figures = serve.figures
  assert set(cached) == set(reread) and len(reread) == 9
  for key, parts in reread.items():
    assert len(parts) == 3
    for a, b in zip(parts, cached[key], strict=True):
      np.testing.assert_array_equal(a.request.tokens, b.request.tokens)
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
  assert figures['tokens_cached'] > 0
  assert figures['tokens_prefilled'] < prefilled_without_cache
  if fields.get('slots', 4) >= 9 and not fields.get('cache_tokens'):
    # Turns after the first read only the answers.
    texts = sum(len(c.request.tokens) for parts in cached.values() for c in parts[1:])
    answered = sum(len(answers[turn, k[0] % 5]) for k in cached for turn in (1, 2))
    assert figures['tokens_cached'] == texts - answered
    assert prefilled_without_cache - figures['tokens_prefilled'] == figures['tokens_cached']


@pytest.mark.parametrize('fields', [dict(slots=4), dict(slots=8, page_size=8, cache_tokens=168)], ids=str)
def test_serving_compiles_nothing_after_its_jobs(model, params, fields):
  """Neither turns nor sequences that are preempted by a full page pool need another program."""
  ledger = Ledger()
  engine = make_engine(model, params, ledger, max_context=0, max_prompt=30, **{**fields, 'max_new_tokens': 60})
  first_turns = requests(8, max_tokens=25)
  for job in engine.jobs(params, [len(r.tokens) for r in first_turns], 1, True):
    job()
  ledger.seal()
  before = len(ledger.rows)
  random = np.random.RandomState(2)
  answers = {(1, n): random.randint(0, 131, 6, np.int32) for n in range(5)}
  serve(engine, first_turns, talk(answers, turns=2), prefill_rows=engine.prefill_rows(1))
  assert [r['program'] for r in ledger.rows[before:]] == []
  if 'page_size' in fields:
    assert serve.figures['preempted'] > 0
  assert serve.figures['tokens_cached'] > 0


def test_wave_with_many_page_copies_compiles_nothing(model, params):
  """In the first wave, each of eight prompts fills a page, and each of 40 samples has a last page of its own."""
  ledger = Ledger()
  engine = make_engine(model, params, ledger, slots=40, page_size=8, max_prompt=16, max_new_tokens=8)
  for job in engine.jobs(params, [11], 5, False):
    job()
  before = len(ledger.rows)
  prompts = [Prompt(n, np.arange(2 + n, 13 + n, dtype=np.int32), '', {}) for n in range(8)]
  engine(prompts, group_size=5, run_key=KEY, step=0)
  assert [r['program'] for r in ledger.rows[before:]] == []


def test_an_evaluation_prefills_as_many_prompts_at_a_time_as_training(model, params):
  """Although it draws one sample of each prompt: a prefill of 40 prompts would need five times the memory."""
  ledger = Ledger()
  engine = make_engine(model, params, ledger, slots=40, group_size=5, max_prompt=16, max_new_tokens=8)
  for job in engine.jobs(params, [11], 5, False):
    job()
  ledger.seal()
  prompts = [Prompt(n, np.arange(2 + n, 13 + n, dtype=np.int32), '', {}) for n in range(20)]
  assert len(engine(prompts, group_size=1, run_key=KEY, step=0).lengths) == 20
  assert engine.prefill_rows(1) == engine.prefill_rows(5) == 8 and engine.prefill_rows(10) == 4


def test_native_engine_has_the_signatures_of_the_protocol(engine):
  names = [n for n in vars(protocol.Engine) if not n.startswith('_')]
  names += protocol.Engine.__annotations__
  assert {'prefill_rows', 'next_requests', 'on_tokens', 'reuse_cache', 'on_dispatch'} <= set(
    inspect.signature(engine.serve).parameters
  )
  for name in names:
    assert hasattr(engine, name), name
    declared = getattr(protocol.Engine, name, None)
    if declared:
      actual = inspect.signature(getattr(engine, name)).parameters
      assert (
        list(inspect.signature(declared).parameters)[1:]
        == list(actual)[: len(inspect.signature(declared).parameters) - 1]
      ), name


@pytest.mark.parametrize('long', [(3, 13, 15), (0,)])
def test_only_long_texts_in_last_slots_are_moved(model, params, monkeypatch, long):
  """The requests in `long` draw 20 tokens, all others one: the long ones move to the first slots. No move is empty."""
  engine, moves = make_engine(model, params, slots=16, max_new_tokens=24), []
  move = engine.move
  monkeypatch.setattr(engine, 'move', lambda state, what: moves.append(dict(what)) or move(state, what))
  batch = [dataclasses.replace(r, sampling=dict(max_tokens=20 if n in long else 1)) for n, r in enumerate(requests(16))]
  completions = serve(engine, batch)
  assert all(moves) and bool(moves) == (max(long) > 0)
  for change in moves:
    assert not {*change} & {*change.values()}
  alone = serve(make_engine(model, params, max_new_tokens=24), batch)
  assert {k: [c.tokens.tolist() for c in v] for k, v in completions.items()} == {
    k: [c.tokens.tolist() for c in v] for k, v in alone.items()
  }


def test_serving_ends_when_idle_and_no_request_follows(engine):
  calls = []

  def follow(completions, idle):
    del completions
    calls.append(idle)
    return ()

  assert len(serve(engine, requests(2), follow)) == 2
  assert calls.count(True) == 1 and calls[-1]
  assert not serve(engine, [])


@pytest.mark.parametrize(
  'wrong,message',
  [
    (Request(np.zeros(0, np.int32), 4), 'prompt 4: is empty'),
    (Request(np.zeros(50, np.int32), 4), 'max_tokens: 12 tokens to draw and the 50 of prompt 4'),
    (
      Request(np.zeros(3, np.int32), 4, 0, dict(stop_ids=(131,))),
      'stop_ids of prompt 4: 131 is outside the vocabulary of 131',
    ),
    (
      Request(np.zeros(3, np.int32), 4, 0, dict(forbidden_ids=range(9))),
      'forbidden_ids: a request may name 8 token ids, and prompt 4 names 9; name fewer',
    ),
    (
      Request(np.zeros(3, np.int32), 4, 0, dict(top_logprobs=3)),
      'top_logprobs: a request may ask for at most 0, and prompt 4 asks for 3; ask for fewer',
    ),
  ],
)
def test_request_that_does_not_fit_the_engine_is_refused(engine, wrong, message):
  with pytest.raises(InputError, match=message):
    serve(engine, [wrong])


def test_each_request_has_its_own_sampling_settings(model, params):
  ledger = Ledger()
  engine = make_engine(model, params, ledger, top_logprobs=2)
  plain = serve(engine, requests())
  compiled = len(ledger.rows)
  first = {k: c.tokens for k, (c,) in plain.items()}
  settings = [
    dict(temperature=0.0),
    dict(top_k=1),
    dict(seed=3),
    dict(max_tokens=5),
    dict(forbidden_ids=(int(first[24, 0][0]),)),
    dict(stop_ids=(int(first[25, 1][2]),)),
    dict(stop_ids=(int(first[26, 0][2]),), min_tokens=6),
  ]
  changed = serve(
    engine, [Request(r.tokens, r.prompt, r.sample, sampling) for r, sampling in zip(requests(), settings)]
  )
  assert len(ledger.rows) == compiled  # no setting needs another program
  changed = {k: c for k, (c,) in changed.items()}
  for key in (20, 0), (21, 1):
    np.testing.assert_array_equal(changed[key].tokens, changed[key].top_ids[:, 0])
    np.testing.assert_array_equal(changed[key].behavior_logprobs, 0)
    np.testing.assert_allclose(changed[key].logprobs, changed[key].top_logprobs[:, 0], atol=1e-6)
  assert (changed[22, 0].tokens != first[22, 0]).any()
  np.testing.assert_array_equal(changed[23, 1].tokens, first[23, 1][:5])
  assert not changed[23, 1].finished
  assert first[24, 0][0] not in changed[24, 0].tokens
  end = list(first[25, 1]).index(first[25, 1][2]) + 1
  np.testing.assert_array_equal(changed[25, 1].tokens, first[25, 1][:end])
  assert changed[25, 1].finished and end <= 3
  assert len(changed[26, 0].tokens) >= 6


def test_no_token_is_kept_after_a_stop_string_is_complete(engine):
  whole = {k: c for k, (c,) in serve(engine, requests()).items()}
  text = decode(whole[21, 1].tokens)
  string = text[5:8]  # may begin and end inside of tokens
  blocks = []
  stopped = serve(engine, requests(stop_strings=('no such', string)), on_dispatch=blocks.append)
  kept = sum(len(c.tokens) for (c,) in stopped.values())  # tokens that are cut do not count
  assert serve.figures['tokens_per_dispatch'] == kept / len(blocks)
  for key, (c,) in stopped.items():
    full = whole[key]
    ends = [n for n in range(1, NEW + 1) if string in decode(full.tokens[:n])]
    size = ends[0] if ends else NEW
    np.testing.assert_array_equal(c.tokens, full.tokens[:size])
    np.testing.assert_allclose(c.logprobs, full.logprobs[:size], atol=1e-5)
    assert c.finished == bool(ends) and c.stop_string == (string if ends else '')
  assert len(stopped[21, 1][0].tokens) < NEW


def test_stop_string_is_searched_in_last_blocks_only():
  """To join all blocks of a long completion after each of them would take quadratic time."""

  def block(text):
    ids = np.array(list(text.encode()), np.int32)
    return DrawnTokens(ids, ids, ids, (), (), (), ids)

  def text_of(ids):
    return bytes(ids.tolist()).decode()

  blocks = [block('ab')] * 79 + [block('cd')]
  sequence = ActiveSequence(Request(np.array([1]), 0), 9, np.array([1]), blocks=[None] * 9 + blocks)
  assert sequence.cut_at_stop_string(('no',), text_of) == ''
  sequence.blocks = blocks
  assert sequence.cut_at_stop_string(('bc',), text_of, 159) == ''
  assert sequence.cut_at_stop_string(('bc',), text_of, 158) == 'bc' and text_of(sequence.drawn()[-3:]) == 'abc'


def test_stop_string_that_begins_with_a_space_stops_at_the_first_word():
  """SentencePiece tokenizers leave out the space at the start of a text, and a completion is not one."""
  words = ['A:', '▁END', '▁x']

  def text_of(ids):
    return ''.join(words[i] for i in ids).replace('▁', ' ').removeprefix(' ')

  ids = np.array([1, 2], np.int32)
  sequence = ActiveSequence(Request(np.array([0]), 0), 9, np.array([0]))
  sequence.blocks = [DrawnTokens(ids, ids, ids, (), (), (), ids)]
  assert sequence.cut_at_stop_string((' END',), text_of) == ' END'
  assert sequence.drawn().tolist() == [1]


def test_stop_string_before_minimum_length_does_not_stop(engine):
  """The strings lie in one block or in several, and before, across and after the minimum length `least`."""
  whole = {k: c for k, (c,) in serve(engine, requests()).items()}
  text, seen = decode(whole[21, 1].tokens), set()
  for string in (text[0], text[3:5], text[6]):
    ends = [n for n in range(1, NEW + 1) if decode(whole[21, 1].tokens[:n]).endswith(string)]
    for least in (0, ends[0], ends[0] - 1, 5, 20):
      (completion,) = serve(engine, requests(stop_strings=(string,), min_tokens=least))[21, 1]
      size = min([n for n in ends if n > least], default=NEW)
      assert len(completion.tokens) == size, (string, least)
      assert completion.stop_string == (string if size in ends else '')
      seen.add(size)
  assert len(seen) > 3


def test_nan_logits_stop_serving_with_an_error(model, params):
  engine = make_engine(model, params)
  engine.load({**params, 'norm': params['norm'] * np.nan}, version=7)
  with pytest.raises(FloatingPointError, match='step 5.*7 updates'):
    serve(engine, requests(1), step=5)


@pytest.mark.parametrize(
  'fields', [{}, dict(page_size=8), dict(page_size=16, cache_tokens=80)], ids=['slots', 'pages', 'few_pages']
)
def test_cancelled_requests_give_up_their_slots(model, params, fields):
  """Half of the requests are cancelled, some in a slot and some in the queue; the others draw the same as alone."""
  engine = make_engine(model, params, **fields)
  batch = requests(10)
  alone = serve(engine, batch[1::2])
  cancelled, blocks = set(), []
  cancellable = [
    dataclasses.replace(x, is_cancelled=functools.partial(cancelled.__contains__, x.prompt)) if i % 2 == 0 else x
    for i, x in enumerate(batch)
  ]

  def cancel_after_two_blocks(completions, idle):
    blocks.append(completions)
    if len(blocks) == 2:
      cancelled.update(x.prompt for x in batch[::2])
    return ()

  same(serve(engine, cancellable, cancel_after_two_blocks), alone)
  assert len(blocks) < 20 and serve.figures['occupancy'] < 1
  same(serve(engine, batch[1::2]), alone)


def test_a_slot_of_a_cancelled_request_goes_to_the_next(model, params):
  """One slot: the second request is served although the first, which is cancelled after a block, had 40 to draw."""
  engine = make_engine(model, params, slots=1, max_new_tokens=40)
  first, second = requests(2)
  calls = []
  first = dataclasses.replace(first, is_cancelled=lambda: len(calls) > 2)
  served = serve(
    engine, [first, dataclasses.replace(second, sampling={'max_tokens': 4})], lambda *x: calls.append(x) or ()
  )
  assert set(served) == {(second.prompt, second.sample)} and len(calls) <= 8


def test_token_ids_outside_the_vocabulary_are_refused():
  model = model_lib.build(tiny.config())
  for fields, message in (
    (dict(stop_ids=(131,)), 'stop_ids: 131 is outside'),
    (dict(forbidden_ids=(5, 400)), 'forbidden_ids: 400 is outside'),
  ):
    with pytest.raises(InputError, match=message):
      native.NativeEngine(
        model,
        native.SamplerConfig(**{**dict(slots=2, max_prompt=8, max_new_tokens=8, stop_ids=()), **fields}),
        tiny.one_device('rollout'),
        tiny.EXACT,
        Ledger(),
      )


def same(a, b):
  """Asserts that two results of `serve` with one turn each hold the same samples."""
  assert set(a) == set(b)
  for key, (completion,) in a.items():
    np.testing.assert_array_equal(completion.tokens, b[key][0].tokens)
    np.testing.assert_allclose(completion.logprobs, b[key][0].logprobs, atol=1e-5)


@pytest.mark.parametrize('page,tokens', [(8, 0), (16, 80)])
def test_paged_cache_draws_the_same_tokens(model, params, engine, page, tokens):
  """Samples share the pages of a prompt; a pool of 80 tokens is too small for all and preempts some of them."""
  paged = make_engine(model, params, page_size=page, cache_tokens=tokens)
  batch = [Request(r.tokens, r.prompt, n, dict(max_tokens=30)) for r in requests(4) for n in range(3)]
  unpaged = serve(engine, batch)
  same(serve(paged, batch), unpaged)
  if tokens:
    assert serve.figures['preempted'] > 0


def evict_nothing():
  return False


def test_page_table_holds_more_sequences_than_slots_would():
  """The pool has the memory of 64 slots of 16,384 entries; sequences have at most as many, about 4,096 on average."""
  size, room, memory = 128, 16384, 64 * 16384
  pool = page_table.PageTable(size, memory // size + 1)
  lengths = np.random.RandomState(0).exponential(4096 - 512, 9999)
  holders = 0
  for i, length in enumerate(np.minimum(lengths, room - 512).astype(int)):
    text = str(i // 8).encode()  # 8 samples share a prompt of 512
    if pool.admit(i, text, 0, 512, int(length), evict_nothing) is None:
      break
    holders += 1
  assert holders >= 2 * 64 and len(pool.free) < room // size
  assert pool.grow(0, 512, evict_nothing) and not pool.grow(0, 10**6, evict_nothing)
  for i in range(holders):
    pool.release(i)
  assert len(pool.free) == memory // size and not pool.users and (not pool.shared)


def test_samples_share_full_pages_of_prompt_and_copy_the_last():
  pool = page_table.PageTable(4, 11)
  first = pool.admit('a', b'x', 1, 10, 4, evict_nothing)
  second = pool.admit('b', b'x', 1, 10, 4, evict_nothing)
  assert [(c.row, c.place) for c in first] == [(1, 0), (1, 1), (1, 2)]
  assert [(c.row, c.place) for c in second] == [(1, 2)]
  assert pool.held['a'][:2] == pool.held['b'][:2]
  assert not set(pool.held['a'][2:]) & set(pool.held['b'][2:])
  pool.release('a')
  assert len(pool.free) == 6 and pool.admit('c', b'x', 0, 10, 18, evict_nothing) is not None
  assert pool.admit('d', b'y', 0, 4, 16, evict_nothing) is None and 'd' not in pool.held
  table = pool.table({3: 'b'}, 5, 12)
  assert table.shape == (5, 3) and table[3].tolist() == pool.held['b'][:3]
  assert not table[:3].any()


@pytest.mark.parametrize(
  'fields,message',
  [
    (dict(page_size=12), 'page_size: 12 is no power of two'),
    (dict(page_size=8, cache_tokens=40), 'cache_tokens: .*; raise it'),
    (dict(min_new_tokens=99), 'min_new_tokens: 99 is more'),
    (dict(stop_strings=('a', '')), 'stop_strings: "" is in every'),
  ],
)
def test_invalid_sampler_config_is_refused(fields, message):
  with pytest.raises(InputError, match=message):
    native.NativeEngine(
      model_lib.build(tiny.config()),
      native.SamplerConfig(**{**dict(slots=2, max_prompt=40, max_new_tokens=8, stop_ids=()), **fields}),
      tiny.one_device('rollout'),
      tiny.EXACT,
      Ledger(),
    )


def test_too_many_slots_are_refused_with_the_number_that_fits(model, params, monkeypatch):
  engine = make_engine(model, params, slots=8)
  # 8 slots x (60 + 4) entries x 2 x 2 layers x 2 heads x 8 x 4 bytes
  monkeypatch.setattr(sampler_config, 'free_bytes', lambda layout: 8 * 64 * 256 * 0.7)
  with pytest.raises(InputError, match='8 slots of 64 .* 5 slots would fit'):
    serve(engine, requests())
