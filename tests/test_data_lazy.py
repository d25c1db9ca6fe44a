"""`data.sources` and `data.lazy`: weighted mixtures of sources, and rows that are streamed from disk (`streaming`)."""

import collections
import datetime
import errno
import io
import json
import os
import tracemalloc
import types

import numpy as np
import pytest

from jaxpost.data import chat, lazy, loader, prompts, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch):
  """Row groups are kept in a temporary file only while a tenth of the disk is free, which a test must not depend on."""
  monkeypatch.setattr(lazy.shutil, 'disk_usage', lambda folder: types.SimpleNamespace(total=2**40, free=2**39))


def row(n, name='q'):
  return {'prompt': f'{name}{n}', 'completion': 'a' * (1 + n % 7)}


def write_lines(path, rows):
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
  return str(path)


def write_parquet(path, rows, group=4):
  pa = pytest.importorskip('pyarrow')
  from pyarrow import parquet

  parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
  return str(path)


def write_array_record(path, rows):
  module = pytest.importorskip('array_record.python.array_record_module')
  writer = module.ArrayRecordWriter(str(path), 'group_size:1')
  for r in rows:
    writer.write(json.dumps(r).encode())
  writer.close()
  return str(path)


WRITERS = {'jsonl': write_lines, 'parquet': write_parquet, 'array_record': write_array_record}


def even(r):
  """A map that keeps the rows with an even number in their prompt."""
  return r if int(r['prompt'][1:]) % 2 == 0 else None


def stream_of(rows, batch_size=2, **options):
  tokenizer = tokenizer_lib.load('bytes')

  def example(i):
    return rows[i] and chat.make_example(tokenizer, rows[i], rows.where(i))

  return loader.PackedStream(
    example,
    len(rows),
    batch_size=batch_size,
    where=rows.where,
    sizes=rows.sizes,
    weights=rows.weights,
    **{'row_length': 48, 'seed': 3, 'window': 16, **options},
  )


def take(stream, n):
  return [next(stream) for _ in range(n)]


# ------------------------------------------------------------------ mixtures


def mixture(tmp_path, weights=(), sizes=(30, 70), **options):
  paths = [write_lines(tmp_path / f'{name}.jsonl', [row(i, name) for i in range(n)]) for name, n in zip('ab', sizes)]
  return sources.read_sources(' + '.join(paths), weights=weights, **options)


def test_unweighted_sources_are_concatenated(tmp_path):
  rows = mixture(tmp_path)
  assert len(rows) == 100 and rows.sizes == (30, 70) and rows.weights == ()
  assert [r['prompt'] for r in rows] == [*(f'a{n}' for n in range(30)), *(f'b{n}' for n in range(70))]
  assert rows.where(29).endswith('a.jsonl:30')
  assert rows.where(30).endswith('b.jsonl:1')
  assert rows[-1] == rows[99] and rows.name.count(' + ') == 1
  with pytest.raises(IndexError):
    rows[100]


@pytest.mark.parametrize('shuffle', [True, False])
def test_weighted_sources_have_their_shares_of_documents(shuffle):
  sizes, weights = (60, 150, 40), (2, 1, 1)
  order = loader.order(250, 0, shuffle, sizes, weights)
  drawn = np.array([order[i] for i in range(1600)])
  source = np.searchsorted(np.cumsum(sizes), drawn, 'right')
  share = np.bincount(source) / len(drawn)
  np.testing.assert_allclose(share, [0.5, 0.25, 0.25], atol=2e-3)
  # Sources alternate evenly, not in blocks: each run of 100 documents has their shares.
  for n in range(0, 1600, 100):
    part = np.bincount(source[n : n + 100], minlength=3)
    np.testing.assert_allclose(part, [50, 25, 25], atol=2)
  # Each source goes through all of its rows before one comes again.
  for n, (start, size) in enumerate(zip((0, 60, 210), sizes)):
    own = drawn[source == n][: 11 * size]
    all_rows = range(start, start + size)
    epochs = [own[k : k + size].tolist() for k in range(0, 10 * size, size)]
    whole_epochs = [e for e in epochs if len(e) == size]
    assert len(whole_epochs) > 1 and all(sorted(e) == list(all_rows) for e in whole_epochs)
    assert (whole_epochs[0] == whole_epochs[1]) != shuffle
  # The order depends on the global index only, whatever was read before.
  assert order[10**9] == loader.order(250, 0, shuffle, sizes, weights)[10**9]


def test_a_mixture_resumes_exactly(tmp_path):
  rows = mixture(tmp_path, (3, 1))
  whole = stream_of(rows)
  states, batches = [whole.state()], []
  for _ in range(12):
    batches.append(next(whole))
    states.append(whole.state())
  whole.close()
  assert all(type(v) is int for v in states[-1].values())
  for n in (0, 1, 5, 11):
    resumed = stream_of(rows)
    resumed.restore(states[n])
    for (expected, info), (actual, actual_info) in zip(batches[n:], take(resumed, 12 - n)):
      assert info == actual_info
      np.testing.assert_array_equal(expected.tokens, actual.tokens)
    resumed.close()
  counts = collections.Counter()
  for _, info in batches:
    counts.update({k: v for k, v in info.items() if 'documents' in k})
  assert counts['data/0/documents'] + counts['data/1/documents'] == (counts['documents'])
  assert counts['data/0/documents'] == pytest.approx(0.75 * counts['documents'], abs=4)
  other = stream_of(mixture(tmp_path, (1, 1)))
  with pytest.raises(InputError, match='weight_ppm_of_source_0=750000 and'):
    other.restore(states[3])
  # Only the ratio of the weights counts.
  stream_of(mixture(tmp_path, (0.75, 0.25))).restore(states[3])


def test_documents_are_counted_for_their_source(tmp_path):
  rows = mixture(tmp_path, sizes=(10, 13))
  counts = collections.Counter()
  stream = stream_of(rows, window=23, batch_size=1)
  for _, info in stream:
    counts.update({k: v for k, v in info.items() if k.startswith('data/')})
    if info['epochs'] == 1:
      break
  stream.close()
  assert counts == {'data/0/documents': 10, 'data/1/documents': 13}


def test_single_source_has_no_counts_and_no_mixture_keys_in_its_state(tmp_path):
  rows = sources.read_sources(write_lines(tmp_path / 'a.jsonl', [row(1)]))
  assert isinstance(rows, sources.Rows)
  stream = stream_of(rows)
  _, info = next(stream)
  stream.close()
  assert not [k for k in info if k.startswith('data/')]
  assert set(stream.state()) == {
    'window',
    'row',
    'num_rows',
    'row_length',
    'seed',
    'shuffle',
    'packing',
    'overlong',
    'window_size',
  }


def test_columns_and_maps_apply_to_all_sources_or_one_each(tmp_path):
  first = write_lines(tmp_path / 'a.jsonl', [{'q': 'x0', 'a': 'y'}])
  second = write_lines(tmp_path / 'b, c.jsonl', [{'p': 'x0', 'b': 'z'}])
  third = write_lines(tmp_path / 'c.jsonl', [row(n) for n in range(4)])

  def read(*arguments, **named):
    return list(sources.read_sources(*arguments, **named))

  expected = [{'prompt': 'x0', 'completion': 'y'}, {'prompt': 'x0', 'completion': 'z'}]
  columns = ('prompt=q,completion=a', 'prompt=p,completion=b')
  assert read((first, second), columns) == expected
  assert read(f'{first} + {second}', ' + '.join(columns)) == expected
  assert read((first, first), columns[0]) == [expected[0]] * 2
  assert read((third, third), map_fn=even) == [row(0), row(2)] * 2
  assert read((third, third), map_fn=('', even)) == [*map(row, range(4)), row(0), row(2)]
  for arguments, message in [
    (((first, second, third), columns), '2 columns for 3 sources'),
    (((first, second), '', ('x:y',) * 3), '3 map for 2 sources'),
    (((third, third), '', None, (1,)), '1 weights for 2 sources'),
    (((third, third), '', None, (1, 0)), f'weight of {third} is 0; it must'),
    (((third, third), '', None, (1, float('nan'))), 'is nan; it must'),
    ((f'{first} + ',), 'has an empty source'),
    (((),), 'has an empty source'),
  ]:
    with pytest.raises(InputError, match=message):
      sources.read_sources(*arguments)


def test_prompt_stream_of_mixture_has_shares_and_skips_long_prompts(tmp_path):
  rows = mixture(tmp_path, (1, 1), sizes=(4, 12))

  def make(rows, longest=9):
    return prompts.PromptStream(rows, tokenizer_lib.load('bytes'), per_step=4, max_prompt_length=longest, seed=0)

  stream = make(rows)
  names = [p.prompt[0] for _ in range(10) for p in next(stream)[0]]
  assert names.count('a') == names.count('b') == 20
  assert len(stream) == 16
  # b10 and b11 are longer than two tokens.
  assert make(rows, 2).skipped == 2 and len(make(rows, 2)) == 14
  long = sources.read_sources(
    (write_lines(tmp_path / 'c.jsonl', [row(1)]), write_lines(tmp_path / 'd.jsonl', [row(1, 'x' * 20)])), weights=(1, 1)
  )
  with pytest.raises(InputError, match='all 1 prompts of source 1 are longer'):
    make(long)


# ----------------------------------------------------------------- streaming


@pytest.mark.parametrize('kind', WRITERS)
def test_streaming_reads_the_same_rows(tmp_path, kind):
  written = [row(n) for n in range(23)]
  path = WRITERS[kind](tmp_path / f'a.{kind}', written)
  eager = sources.read(path, 'question=prompt')
  lazy = sources.read(path, 'question=prompt', streaming=True)
  assert lazy.streaming and not eager.streaming
  assert len(lazy) == len(eager) == 23 and lazy.sizes == eager.sizes
  order = np.random.default_rng(0).permutation(23).tolist()
  assert [lazy[i] for i in order] == [eager[i] for i in order]
  assert [lazy.where(i) for i in order] == [eager.where(i) for i in order]
  assert lazy[-1] == eager[-1] and list(lazy) == list(eager)


@pytest.mark.parametrize(
  'text',
  [
    '\ufeff{"n": 0}\n\n  \n{"n": 1}\r\n\r\n {"n": 2}',
    '{"n": 0}\n{"n": 1}\n\n\t\n{"n": 2}\n\n\n',
    '\ufeff\n\n{"n": 0}\n{"n": 1}\n{"n": 2}\n',
  ],
)
@pytest.mark.parametrize('chunk', [1, 2, 3, 7, 1 << 20])
def test_streamed_lines_are_found_among_blank_lines_and_byte_order_marks(tmp_path, monkeypatch, text, chunk):
  from jaxpost.data import lazy as lazy_lib

  monkeypatch.setattr(lazy_lib, '_CHUNK', chunk)
  path = tmp_path / 'a.jsonl'
  path.write_bytes(text.encode())
  eager, lazy = (sources.read(path, streaming=streaming) for streaming in (False, True))
  assert list(lazy) == list(eager) == [{'n': n} for n in range(3)]
  assert [lazy.where(i) for i in range(3)] == [eager.where(i) for i in range(3)]


def test_streaming_a_folder_and_its_splits(tmp_path):
  for name, size in (('train-0', 3), ('train-1', 2), ('test', 4)):
    write_lines(tmp_path / f'{name}.jsonl', [row(n) for n in range(size)])
  (tmp_path / 'train-2.jsonl').write_text('')  # a shard may be empty
  lazy = sources.read(f'{tmp_path}:train', streaming=True)
  assert list(lazy) == [row(0), row(1), row(2), row(0), row(1)]
  assert lazy.where(3).endswith('train-1.jsonl:1')


def test_at_most_32_files_are_open(tmp_path):
  for n in range(80):
    write_lines(tmp_path / f'{n:03}.jsonl', [row(n)])
  lazy = sources.read(tmp_path, streaming=True)
  for _ in range(2):
    assert [r['prompt'] for r in lazy] == [f'q{n}' for n in range(80)]
  handles = lazy._parts[0]._handles
  assert len(handles._entries) == 32


def write_typed(path):
  """1,000 rows of many types in 25 row groups."""
  pa = pytest.importorskip('pyarrow')
  from pyarrow import parquet

  day = datetime.date(2026, 1, 31)
  rows = [
    dict(n=n, text='é' * (n % 90), raw=bytes([n % 256]), day=day, some=[{'a': n}, {'a': None}] * (n % 3), none=None)
    for n in range(1000)
  ]
  kinds = pa.DictionaryArray.from_arrays(pa.array([n % 3 for n in range(1000)], pa.int8()), pa.array(['x', 'y', 'z']))
  parquet.write_table(pa.Table.from_pylist(rows).append_column('kind', kinds), path, row_group_size=40)
  return parquet.ParquetFile


def count_reads(monkeypatch, kind):
  """{row group: number of reads} from now on; pieces of row groups have 300 bytes."""
  reads, read = collections.Counter(), kind.read_row_group

  def counted(self, group):
    reads[group] += 1
    return read(self, group)

  monkeypatch.setattr(kind, 'read_row_group', counted)
  monkeypatch.setattr(lazy, '_PIECE', 300)
  return reads


def draw(rows, eager, passes=3, window=100):
  """Reads rows in a random order, sorted within each window as `PackedStream` does, and compares them with `eager`."""
  order = np.random.default_rng(0).permutation(passes * len(eager)) % len(eager)
  for start in range(0, len(order), window):
    for i in sorted(order[start : start + window].tolist()):
      assert rows[i] == eager[i]


def groups_of(rows):
  return rows._parts[0]._groups


def size_of_file(rows):
  return os.fstat(groups_of(rows)._file.fileno()).st_size


def test_row_groups_are_read_at_most_twice(tmp_path, monkeypatch, caplog):
  """A random order needs each row group in every window, and must not read it anew in each of them."""
  kind, path = write_typed(tmp_path / 'a.parquet'), str(tmp_path / 'a.parquet')
  eager, reads = list(sources.read(path)), count_reads(monkeypatch, kind)
  rows = sources.read(path, streaming=True)
  draw(rows, eager)
  assert len(reads) == 25 and max(reads.values()) <= 2 and not caplog.text
  # Groups that were copied to the temporary file are no longer in memory.
  assert groups_of(rows)._recent._entries.keys().isdisjoint(groups_of(rows)._pieces)


class SmallDisk(io.FileIO):
  """A file on a disk of 20,000 bytes: the last write stores only a part of its data, as on a disk that becomes full."""

  def write(self, data):
    room = 20_000 - self.tell()
    if not room:
      raise OSError(errno.ENOSPC, 'No space left on device')
    return super().write(memoryview(data)[:room])


def small_disk(path):
  def open_file(mode='w+b', buffering=-1):
    file = SmallDisk(path, mode)
    return io.BufferedRandom(file) if buffering else file

  return open_file


def no_folder():
  raise FileNotFoundError(errno.ENOENT, 'No usable temporary directory found')


@pytest.mark.parametrize(
  'disk, why',
  [
    ('half', 'has 0 MiB left'),  # as much stays free as the file takes
    ('tenth', 'has 95 MiB left'),
    ('full', 'is full'),
    ('none', 'No usable temporary directory found'),
  ],
)
def test_row_groups_are_read_again_where_the_disk_has_no_room(tmp_path, monkeypatch, caplog, disk, why):
  """Keeping row groups must neither fill a disk that others write to nor end the run when the disk is full."""
  kind, path = write_typed(tmp_path / 'a.parquet'), str(tmp_path / 'a.parquet')
  eager, reads = list(sources.read(path)), count_reads(monkeypatch, kind)
  total, free = {'half': (0, 60_000), 'tenth': (10**9, 10**8 + 40_000)}.get(disk, (0, 10**9))

  def usage(folder):
    return types.SimpleNamespace(total=total, free=free - size_of_file(rows))

  monkeypatch.setattr(lazy.shutil, 'disk_usage', usage)
  if disk == 'full':
    monkeypatch.setattr(lazy.tempfile, 'TemporaryFile', small_disk(str(tmp_path / 'small')))
  if disk == 'none':
    monkeypatch.setattr(lazy.tempfile, 'gettempdir', no_folder)
  rows = sources.read(path, streaming=True)
  draw(rows, eager)
  assert max(reads.values()) > 20
  assert caplog.text.count('set TMPDIR to a folder with more room') == caplog.text.count(why) == 1
  kept = groups_of(rows)._pieces
  assert bool(kept) == (2 in reads.values()) == (disk != 'none')
  # Nothing remains in the file of the group that had no room.
  assert disk == 'none' or size_of_file(rows) == max(ends[-1] for _, ends in kept.values())


def test_a_row_group_that_would_outgrow_a_bound_is_not_kept(tmp_path, monkeypatch, caplog):
  """Each piece of a row group whose lists have a dictionary would hold the whole dictionary."""
  kind, path = write_typed(tmp_path / 'a.parquet'), str(tmp_path / 'a.parquet')
  eager, read = list(sources.read(path)), kind.read_row_group
  pa = pytest.importorskip('pyarrow')
  words = pa.array(['x', *(f'{n:09}' for n in range(2000))])

  def with_lists(self, group):
    table = read(self, group)
    codes = pa.DictionaryArray.from_arrays(pa.array([0] * len(table), pa.int16()), words)
    return table.append_column('lists', pa.ListArray.from_arrays(pa.array(range(len(table) + 1), pa.int32()), codes))

  monkeypatch.setattr(kind, 'read_row_group', with_lists)
  monkeypatch.setattr(lazy, '_PIECE', 300)
  monkeypatch.setattr(lazy, '_LARGEST', 0)
  rows = sources.read(path, streaming=True)
  draw(rows, [row | {'lists': ['x']} for row in eager], passes=1)
  assert not groups_of(rows)._pieces and size_of_file(rows) == 0
  assert caplog.text.count('a row group of 0 MiB takes more than 0 MiB') == 1


def test_row_group_pieces_do_not_copy_dictionaries(tmp_path, monkeypatch):
  """If each piece of a group held the whole dictionary, 5 MB of texts would take 12 GB."""
  pa = pytest.importorskip('pyarrow')
  from pyarrow import parquet

  texts = pa.array([f'{n:04}' * 100 for n in range(2000)])
  column = pa.DictionaryArray.from_arrays(pa.array(range(2000), pa.int16()), texts)
  parquet.write_table(pa.table({'text': column}), tmp_path / 'a.parquet', row_group_size=200)
  reads = count_reads(monkeypatch, parquet.ParquetFile)
  rows = sources.read(str(tmp_path / 'a.parquet'), streaming=True)
  draw(rows, [{'text': text} for text in texts.to_pylist()], passes=2)
  assert max(reads.values()) == 2 and size_of_file(rows) < 4 * texts.nbytes


def test_row_groups_that_are_read_in_order_are_not_kept(tmp_path, monkeypatch):
  kind, path = write_typed(tmp_path / 'a.parquet'), str(tmp_path / 'a.parquet')
  eager, reads = list(sources.read(path)), count_reads(monkeypatch, kind)
  rows = sources.read(path, streaming=True)
  for _ in range(3):
    assert list(rows) == eager
  assert set(reads.values()) == {3} and groups_of(rows)._file is None


def test_bad_streamed_rows_are_named_when_they_are_read(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"n": 0}\n\n{"n": }\n[1]\n{"n": "\xff"}\n{"n": 5, "n": 5}\n')
  lazy = sources.read(path, streaming=True)
  assert len(lazy) == 5 and lazy[0] == {'n': 0}
  for i, message in [
    (1, r'a.jsonl:3:7: bad JSON: Expecting value'),
    (2, r'a.jsonl:4: the row is a list'),
    (3, r'a.jsonl:5:8: not UTF-8'),
    (4, r"a.jsonl:6: bad JSON: the key 'n' is in one object twice"),
  ]:
    with pytest.raises(InputError, match=message) as caught:
      lazy[i]
    assert '\n' not in str(caught.value)
  renamed = sources.read(path, 'prompt=m', streaming=True)
  with pytest.raises(InputError, match=r"a.jsonl:1: no column 'm'; it has n"):
    renamed[0]
  mapped = sources.read(path, map_fn=lambda r: r['m'], streaming=True)
  with pytest.raises(InputError, match='a.jsonl:1: map_fn raised KeyError'):
    mapped[0]


def test_files_that_cannot_be_streamed_are_refused_when_opened(tmp_path):
  (tmp_path / 'a.jsonl').write_text(' \n\n')
  (tmp_path / 'b.json').write_text('[{"n": 0}]')
  (tmp_path / 'c.jsonl.gz').write_bytes(b'')
  (tmp_path / 'd.parquet').write_bytes(b'PAR1 or not')
  (tmp_path / 'e.array_record').write_bytes(b'x' * 99)
  for name, message in [
    ('a.jsonl', 'a.jsonl: holds no rows'),
    ('b.json', 'b.json: cannot be streamed; convert it to .jsonl, .parq'),
    ('c.jsonl.gz', 'c.jsonl.gz: cannot be streamed'),
    ('d.parquet', 'd.parquet: damaged or unreadable parquet'),
    ('e.array_record', 'e.array_record: damaged or unreadable ArrayRecord'),
  ]:
    with pytest.raises(InputError, match=message):
      sources.read(tmp_path / name, streaming=True)
  generated = sources.read('generated:arithmetic:max=3', streaming=True)
  assert not generated.streaming  # its rows are in memory anyway


@pytest.mark.parametrize('kind', WRITERS)
def test_batches_of_streamed_rows_equal_those_of_rows_in_memory(tmp_path, kind):
  path = WRITERS[kind](tmp_path / f'a.{kind}', [row(n) for n in range(40)])
  eager, lazy = (stream_of(sources.read(path, streaming=streaming)) for streaming in (False, True))
  states = []
  for (expected, info), (actual, actual_info) in zip(take(eager, 8), take(lazy, 8)):
    np.testing.assert_array_equal(expected.tokens, actual.tokens)
    assert info == actual_info
    states.append(lazy.state())
  assert states[-1] == eager.state()
  interrupted = stream_of(sources.read(path, streaming=True))
  resumed = stream_of(sources.read(path, streaming=True))
  third = take(interrupted, 3)[-1]
  resumed.restore(interrupted.state())
  for s in (interrupted, resumed):
    batches = take(s, 5)
    np.testing.assert_array_equal(batches[-1][0].tokens, actual.tokens)
  assert third[1]['tokens'] > 0
  for s in (eager, lazy, interrupted, resumed):
    s.close()


def test_streamed_rows_dropped_by_map_are_counted(tmp_path):
  path = write_lines(tmp_path / 'a.jsonl', [row(n) for n in range(40)])
  lazy = sources.read(path, map_fn=even, streaming=True)
  assert lazy[1] is None and lazy[2] == row(2)
  stream = stream_of(lazy, window=40, batch_size=1)
  dropped = documents = 0
  for _, info in stream:
    dropped += info['dropped']
    documents += info['documents']
    if info['epochs'] == 2:
      break
  stream.close()
  assert dropped == documents == 40
  none = sources.read(path, map_fn=lambda r: None, streaming=True)
  with pytest.raises(InputError, match='none of the 40 documents'):
    next(stream_of(none, window=0))


def test_batches_of_streamed_mixture_equal_those_of_mixture_in_memory(tmp_path):
  rows = mixture(tmp_path, (3, 1), streaming=True)
  assert rows.streaming and rows.weights == (3, 1)
  in_memory = mixture(tmp_path, (3, 1))
  lazy, eager = stream_of(rows), stream_of(in_memory)
  for (actual, info), (expected, expected_info) in zip(take(lazy, 6), take(eager, 6)):
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    assert info == expected_info
  lazy.close()
  eager.close()


def test_streamed_prompts_skip_dropped_and_long_rows_and_resume(tmp_path):
  path = write_lines(tmp_path / 'a.jsonl', [row(n, 'q' * (1 + n % 3)) for n in range(20)])

  def short(r):
    return r if r['prompt'][-1] != '5' else None

  def make(per_step, longest, streaming=True, map_fn=short):
    return prompts.PromptStream(
      sources.read(path, map_fn=map_fn, streaming=streaming),
      tokenizer_lib.load('bytes'),
      per_step=per_step,
      max_prompt_length=longest,
      seed=0,
    )

  stream = make(3, 4)
  drawn = [p for _ in range(8) for p in next(stream)[0]]
  # Indices also count prompts that were left out.
  assert [p.index for p in drawn] == sorted({p.index for p in drawn})
  assert drawn[-1].index == 24 + stream.skipped - 1
  assert all(len(p.tokens) <= 4 and p.prompt[-1] != '5' for p in drawn)
  resumed = make(2, 4)
  first = make(2, 4)
  with_resume = [p for _ in range(5) for p in next(first)[0]]
  resumed.restore(first.state())
  with_resume += [p for _ in range(7) for p in next(resumed)[0]]
  assert [p.index for p in with_resume] == [p.index for p in drawn]
  assert [p.prompt for p in with_resume] == [p.prompt for p in drawn]
  assert set(stream.lengths) == {1, 2, 4} and len(stream) == 20
  assert set(make(2, 6).lengths) == {1, 2, 4, 6}
  with pytest.raises(InputError, match='none of the 20 prompts is kept'):
    next(make(3, 1))
  # If no row has to be left out, the prompts are those of rows in memory.
  lazy, eager = (make(4, 99, streaming, None) for streaming in (True, False))
  for _ in range(7):
    (streamed, info), (in_memory, expected_info) = next(lazy), next(eager)
    assert [p.prompt for p in streamed] == [p.prompt for p in in_memory] and info == expected_info


def test_memory_stays_bounded_with_200_megabytes(tmp_path):
  path = tmp_path / 'big.jsonl'
  lines = 100_000
  filling = 'x' * 2000
  with open(path, 'w') as file:
    for n in range(lines):
      file.write(f'{{"prompt": "{n}", "completion": "y", "z": "{filling}"}}\n')
  assert path.stat().st_size > 200e6
  tracemalloc.start()
  rows = sources.read(path, streaming=True)
  stream = stream_of(rows, row_length=256, window=0, batch_size=8)
  batches = take(stream, 8)
  stream.close()
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert len(rows) == lines and rows[77_777]['prompt'] == '77777'
  assert rows.where(77_777).endswith(':77778')
  assert sum(info['documents'] for _, info in batches) > 1000
  assert peak < 40e6
