"""Reading rows (`data.sources`): files of each format, folders and splits, columns, map functions, and bad input."""

import gzip
import json
import sys

import pytest

from jaxpost import imports
from jaxpost.data import sources
from jaxpost.errors import InputError

ROWS = [{'prompt': f'q{n}', 'completion': f'a{n}'} for n in range(3)]
LINES = '\n'.join(json.dumps(r) for r in ROWS) + '\n'


def write(path, data):
  data = data.encode() if isinstance(data, str) else data
  path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
  return str(path)


def write_parquet(path, rows=ROWS):
  pa = pytest.importorskip('pyarrow')
  from pyarrow import parquet

  parquet.write_table(pa.Table.from_pylist(rows), path)
  return str(path)


def write_arrow(folder, rows):
  """Writes a folder like that of `datasets.Dataset.save_to_disk`."""
  pa = pytest.importorskip('pyarrow')
  folder.mkdir(parents=True)
  table = pa.Table.from_pylist(rows)
  name = 'data-00000-of-00001.arrow'
  with pa.OSFile(str(folder / name), 'wb') as file:
    with pa.ipc.new_stream(file, table.schema) as out:
      out.write_table(table)
  state = {'_data_files': [{'filename': name}], '_split': None}
  write(folder / 'state.json', json.dumps(state))
  write(folder / 'dataset_info.json', '{}')


def write_array_record(path, rows=ROWS):
  array_record_module = pytest.importorskip('array_record.python.array_record_module')
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for row in rows:
    writer.write(json.dumps(row).encode())
  writer.close()
  return str(path)


@pytest.mark.parametrize(
  'name, data, places',
  [
    ('a.jsonl', LINES, ':1 :2 :3'),
    ('a.jsonl', '\ufeff\n' + LINES.replace('\n', '\r\n\r\n'), ':2 :4 :6'),
    ('a.jsonl.gz', LINES, ':1 :2 :3'),
    ('a.json', json.dumps(ROWS, indent=1), '[0] [1] [2]'),
    ('a.JSON.gz', '\ufeff' + json.dumps(ROWS), '[0] [1] [2]'),
  ],
)
def test_json_files_are_read_with_the_place_of_each_row(tmp_path, name, data, places):
  path = write(tmp_path / name, data)
  rows = sources.read(path)
  assert list(rows) == ROWS and rows.name == path
  assert [rows.where(i) for i in range(3)] == [path + p for p in places.split()]
  assert rows[1:].where(0) == rows.where(1)


def test_parquet_and_array_record_files_are_read(tmp_path):
  for path in (write_parquet(tmp_path / 'a.parquet'), write_array_record(tmp_path / 'a.array_record')):
    rows = sources.read(path)
    assert list(rows) == ROWS and rows.where(2) == f'{path}[2]'


def test_null_keys_of_other_objects_are_dropped_from_parquet(tmp_path):
  """A list in a columnar file has one type, so each object gets the keys of the others as nulls."""
  calls = [dict(function=dict(name='f', arguments=dict(a=1))), dict(function=dict(name='g', arguments=dict(b=2)))]
  tools = [dict(type='function', function=dict(name=n, parameters={'properties': {n: {}}})) for n in 'ab']
  tools[0]['function']['parameters']['properties']['a']['type'] = 'string'
  tools[1]['function']['parameters']['properties']['b']['enum'] = ['x']
  seen = [dict(a=1, b=None), dict(a=None, b=2)]  # nulls of other columns stay, as a function may read them
  row = dict(messages=[dict(role='assistant', content='', tool_calls=calls)], tools=tools, seen=seen, note=None)
  path = write_parquet(tmp_path / 'a.parquet', [row])
  assert list(sources.read(path)) == [row]
  assert sources.read(path, streaming=True)[0] == row


def test_json_columns_of_parquet_and_arrow_are_parsed(tmp_path):
  """`datasets` 5 writes messages and tool schemas as JSON if the arguments of calls differ."""
  pa = pytest.importorskip('pyarrow')
  calls = [dict(function=dict(name='f', arguments=dict(a=1))), dict(function=dict(name='g', arguments=dict(b=[2])))]
  messages = [[dict(role='assistant', content='', tool_calls=[call])] for call in calls]
  tools = [[dict(function=dict(name=n, parameters={n: {'type': 'string'}}))] for n in 'fg']
  schemas = pa.array([json.dumps(t[0]['function']['parameters']) for t in tools]).cast(pa.json_())
  functions = pa.StructArray.from_arrays([pa.array(['f', 'g']), schemas], ['name', 'parameters'])
  ends = pa.array([0, 1, 2], pa.int32())
  columns = {
    'messages': pa.ListArray.from_arrays(ends, pa.array([json.dumps(m[0]) for m in messages]).cast(pa.json_())),
    'tools': pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([functions], ['function'])),
    'seen': pa.array(['{"x": 1}', None]).cast(pa.json_()),
  }
  table = pa.table(columns)
  from pyarrow import parquet

  parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=2)
  with pa.ipc.new_stream(tmp_path / 'a.arrow', table.schema) as writer:
    writer.write_table(table)
  expected = [dict(messages=m, tools=t, seen=s) for m, t, s in zip(messages, tools, ({'x': 1}, None))]
  assert list(sources.read(tmp_path / 'a.parquet')) == list(sources.read(tmp_path / 'a.arrow')) == expected
  streamed = sources.read(tmp_path / 'a.parquet', streaming=True)
  assert [streamed[n] for n in (0, 1, 0)] == [*expected, expected[0]]


def test_text_files_are_split_into_documents(tmp_path):
  path = write(tmp_path / 'a.txt', 'a\nb\n<|endoftext|>\nc\n\nd\n')
  rows = sources.read(path)
  assert [r['text'] for r in rows] == ['a\nb', 'c\n\nd']
  assert [rows.where(i) for i in (0, 1)] == [f'{path}:1', f'{path}:4']
  path = write(tmp_path / 'b.txt', 'a\nb\r\n\r\nc\n\n\n\nd\n')
  rows = sources.read(path)
  assert [r['text'] for r in rows] == ['a\nb', 'c', 'd']
  assert [rows.where(i) for i in range(3)] == [f'{path}:1', f'{path}:4', f'{path}:8']


@pytest.mark.parametrize('name, delimiter', [('a.csv', ','), ('a.tsv', '\t'), ('a.CSV.gz', ',')])
def test_csv_and_tsv_files_are_read(tmp_path, name, delimiter):
  cells = [['prompt', 'answer '], ['"1, 2\tor\n""3""?"', '4'], [], ['second', ''], ['x' * 200_000, 'long']]
  path = write(tmp_path / name, '\ufeff' + '\r\n'.join(delimiter.join(row) for row in cells))
  rows = sources.read(path)
  assert [row['prompt'] for row in rows] == ['1, 2\tor\n"3"?', 'second', 'x' * 200_000]
  assert [row['answer'] for row in rows] == ['4', '', 'long']
  assert [rows.where(i) for i in range(3)] == [f'{path}:{line}' for line in (2, 5, 6)]


def test_folder_reads_its_data_files_recursively(tmp_path):
  (tmp_path / 'plain' / 'more').mkdir(parents=True)
  write(tmp_path / 'plain' / 'README.md', 'no data')
  write(tmp_path / 'plain' / 'dataset_infos.json', '{}')
  write(tmp_path / 'plain' / 'b.jsonl', LINES)
  write(tmp_path / 'plain' / 'more' / 'c.json', json.dumps(ROWS[:1]))
  rows = sources.read(tmp_path / 'plain')
  assert list(rows) == ROWS + ROWS[:1]
  assert rows.where(3).endswith('plain/more/c.json[0]')


def test_splits_are_never_mixed(tmp_path):
  write(tmp_path / 'train-0.jsonl', LINES)
  write(tmp_path / 'train-1.jsonl', LINES)
  write(tmp_path / 'validation.jsonl', json.dumps(ROWS[0]))
  with pytest.raises(InputError, match='the splits train, validation; name'):
    sources.read(tmp_path)
  assert len(sources.read(f'{tmp_path}:train')) == 6
  assert len(sources.read(f'{tmp_path}:validation')) == 1
  with pytest.raises(InputError, match="no split 'test'; it has train, val"):
    sources.read(f'{tmp_path}:test')


def test_folders_saved_by_datasets(tmp_path):
  write_arrow(tmp_path / 'one', ROWS)
  assert list(sources.read(tmp_path / 'one')) == ROWS
  # A dataset that was saved on its own has no splits to choose from.
  with pytest.raises(InputError, match="has no split 'test'; it has none"):
    sources.read(f'{tmp_path}/one:test')
  state = json.loads((tmp_path / 'one/state.json').read_text())
  write(tmp_path / 'one/state.json', json.dumps(state | {'_split': 'train'}))
  assert list(sources.read(f'{tmp_path}/one:train')) == ROWS
  with pytest.raises(InputError, match="has no split 'test'; it has train"):
    sources.read(f'{tmp_path}/one:test')
  for split in ('train', 'test'):
    write_arrow(tmp_path / 'both' / split, ROWS[:2])
  write(tmp_path / 'both' / 'dataset_dict.json', '{"splits": ["train", "test"]}')
  assert list(sources.read(f'{tmp_path}/both:test')) == ROWS[:2]
  assert list(sources.read(tmp_path / 'both' / 'train')) == ROWS[:2]
  with pytest.raises(InputError, match='the splits train, test'):
    sources.read(tmp_path / 'both')


BAD_FILES = [
  ('a.jsonl', '', 'a.jsonl: holds no rows'),
  ('a.jsonl', '\n \n', 'a.jsonl: holds no rows'),
  ('a.jsonl', '{"a": 1}\n{"a": }\n', r'a.jsonl:2:7: bad JSON: Expecting'),
  ('a.jsonl', '{"a": 1}\n{"a": 1', r"a.jsonl:2:8: bad JSON: Expecting ','"),
  ('a.jsonl', '{"a": 1}\n[1]\n', r'a.jsonl:2: the row is a list, must be'),
  ('a.jsonl', 'null\n', r'a.jsonl:1: the row is a NoneType'),
  ('a.jsonl', '{"a": 1, "a": 2}\n', r"a.jsonl:1: .*'a' is in one object twice"),
  ('a.jsonl', b'{"a": 1}\n{"a": "\xff"}\n', r'a.jsonl:2:8: not UTF-8.*0xff'),
  ('a.jsonl', '{"a": ' + '9' * 5000 + '}', r'a.jsonl:1: bad JSON: Exceeds'),
  ('a.jsonl', '[' * 100000, r'a.jsonl:1: bad JSON'),
  ('a.json', '', 'a.json: is empty'),
  ('a.json', '[]', 'a.json: holds no rows'),
  ('a.json', '{"a": 1}', 'a.json: holds one dict, must be a list'),
  ('a.json', '[{"a": 1},\n {"a" 1}]', r"a.json:2:7: bad JSON: Expecting ':'"),
  ('a.json', '{"a": 1}\n{"a": 2}', r'a.json:2:1: .*name the file .jsonl'),
  ('a.json', '[{"a": 1}, 5]', r'a.json\[1\]: the row is an int'),
  ('a.json', b'[\n"\xe9"]', r'a.json:2:2: not UTF-8'),
  ('a.txt', '\n\n\n', 'a.txt: holds no rows'),
  ('a.txt', b'ok\n\n\xff', 'a.txt:3:1: not UTF-8'),
  ('a.xml', 'a,b', 'a.xml: unknown format'),
  ('a.csv', '', 'a.csv: holds no rows'),
  ('a.csv', 'a,b\n', 'a.csv: holds no rows'),
  ('a.csv', 'a,b\n1,2\n1,2,3\n', "a.csv:3: has 3 values, and the first line names 2 columns; .*','"),
  ('a.csv', 'a,b\n\n1,"2\n', 'a.csv:3: bad quotes: unexpected end of data'),
  ('a.csv', 'a,,b\n1,2,3\n', 'a.csv:1: a column has no name'),
  ('a.tsv', 'a\tb\ta\n1\t2\t3\n', "a.tsv:1: names the column 'a' twice"),
  ('a.csv', b'a,b\n\xff,1\n', 'a.csv:2:1: not UTF-8'),
  ('a.parquet', 'PAR1 or not', 'a.parquet: damaged or unreadable parquet'),
  ('a.parquet', '', 'a.parquet: damaged or unreadable parquet'),
  ('a.arrow', 'x' * 50, 'a.arrow: damaged or unreadable arrow'),
  ('a.array_record', '', 'a.array_record: damaged or unreadable ArrayR'),
  ('a.array_record', 'x' * 99, 'a.array_record: damaged or unreadable Arr'),
  (
    'a.json',
    '[{"conversations": [{"from": "bot", "value": "x"}]}]',
    r"a.json\[0\]: conversations\[0\].from: 'bot' is none of system, human",
  ),
  ('a.json', '[{"conversations": [{"role": "user"}]}]', r'conversations\[0\]: must be an object with from and value'),
  ('a.json', '[{"conversations": "hi"}]', 'must be a list of turns'),
  ('a.json', '[{"conversations": [{"from": "function_call", "value": "x"}]}]', r'conversations\[0\].value: bad JSON'),
  ('a.json', '[{"instruction": "", "output": "x"}]', 'instruction: is empty'),
  ('a.json', '[{"instruction": "x", "output": null}]', 'output: is empty'),
  ('a.json', '[{"instruction": "x", "output": 4}]', 'output: is an int'),
]


@pytest.mark.parametrize('name, data, message', BAD_FILES)
def test_bad_files_are_refused_with_path_and_line(tmp_path, name, data, message):
  path = write(tmp_path / name, data)
  with pytest.raises(InputError, match=message) as caught:
    sources.read(path)
  assert str(caught.value).startswith(path)
  assert '\n' not in str(caught.value)


def test_truncated_and_damaged_files_are_refused(tmp_path):
  path = tmp_path / 'a.jsonl.gz'
  write(path, LINES * 50)
  path.write_bytes(path.read_bytes()[:-30])
  with pytest.raises(InputError, match='a.jsonl.gz: damaged gzip'):
    sources.read(path)
  path.write_bytes(b'not gzip')
  with pytest.raises(InputError, match='a.jsonl.gz: damaged gzip'):
    sources.read(path)
  for path in (
    write_parquet(tmp_path / 'b.parquet', ROWS * 500),
    write_array_record(tmp_path / 'b.array_record', ROWS * 500),
  ):
    with open(path, 'rb+') as file:
      file.truncate(300)
    with pytest.raises(InputError, match=f'^{path}: damaged'):
      sources.read(path)


@pytest.mark.parametrize('extra, name', [('pyarrow', 'a.parquet'), ('array_record.python', 'a.array_record')])
def test_missing_extras_say_what_to_install(tmp_path, monkeypatch, extra, name):
  monkeypatch.setitem(sys.modules, extra, None)
  path = write(tmp_path / name, 'x')
  with pytest.raises(InputError, match=r"pip install -e '\.\[data\]'"):
    sources.read(path)


def test_missing_file_error_suggests_the_nearest_name(tmp_path):
  write(tmp_path / 'train.jsonl', LINES)
  with pytest.raises(InputError, match='trian.jsonl: .*you mean .*/train.jso'):
    sources.read(tmp_path / 'trian.jsonl')
  with pytest.raises(InputError, match='nor is there a folder nowhere'):
    sources.read('nowhere/train.jsonl')
  (tmp_path / 'empty').mkdir()
  with pytest.raises(InputError, match='no data in this folder.*has nothing'):
    sources.read(tmp_path / 'empty')


def test_columns_option_renames_and_keeps_columns():
  rows = [{'question': 'q', 'answer': 'a', 'level': 1}]

  def read(columns):
    return sources.read('x', columns, fake_rows=rows)[0]

  assert read('prompt=question, completion=answer') == {'prompt': 'q', 'completion': 'a', 'level': 1}
  assert read('prompt=question,completion=answer,answer=answer') == {
    'prompt': 'q',
    'completion': 'a',
    'answer': 'a',
    'level': 1,
  }
  with pytest.raises(InputError, match=(r"x\[0\]: no column 'questoin'; did you mean 'question'\? it has que")):
    read('prompt=questoin')
  for bad_columns in ('prompt', 'prompt=', 'a=b,a=c'):
    with pytest.raises(InputError, match='^columns: '):
      read(bad_columns)


@pytest.mark.parametrize('name', ['images', 'videos', 'audios', 'image', 'audio'])
def test_rows_with_other_media_than_text_are_refused(name):
  """Their texts have placeholders such as <image>, which would be trained on as text."""
  row = {'prompt': '<image>\nWhat is this?', 'completion': 'A cat.', name: ['cat.png']}
  with pytest.raises(InputError, match=rf'x\[1\]: {name}: only text is supported'):
    sources.read('x', fake_rows=[{**row, name: []}, row])
  (kept,) = sources.read('x', fake_rows=[row], map_fn=lambda row: {k: v for k, v in row.items() if k != name})
  assert kept == {k: v for k, v in row.items() if k != name}


@pytest.mark.parametrize('image', ['python:3.12', 'registry/jpg:1', 'none', ''])
def test_image_may_be_text_such_as_the_name_of_a_container(image):
  row = {'prompt': 'Mend the test.', 'completion': 'Done.', 'image': image}
  assert [*sources.read('x', fake_rows=[row])] == [row]


@pytest.mark.parametrize('column', [{'image': 'coco/0.JPG'}, {'image': 'data:image/png;base64,A'}, {'audio': 'a.wav'}])
def test_names_of_image_files_are_refused_as_images_are(column):
  row = {'prompt': '<image>\nWhat is this?', 'completion': 'A cat.', **column}
  with pytest.raises(InputError, match=f'{[*column][0]}: only text is supported'):
    sources.read('x', fake_rows=[row])


def test_map_fn_maps_drops_and_counts(tmp_path):
  write(tmp_path / 'mine.py', "def odd(row):\n  return {'n': row['n']} if row['n'] % 2 else None\n")
  input_rows = [{'n': n, 'x': 0} for n in range(5)]
  rows = sources.read('x', map_fn=f'{tmp_path}/mine.py:odd', fake_rows=input_rows)
  assert list(rows) == [{'n': 1}, {'n': 3}]
  assert rows.dropped == 3 and rows.where(1) == 'x[3]'
  for map_fn, message in [
    (lambda row: None, 'x: map_fn dropped all 5 rows: it returned None for each'),
    (lambda row: 5, r'x\[0\]: map_fn returned an int'),
    (lambda row: row['y'], r"x\[0\]: map_fn raised KeyError: 'y'; .*n, x"),
    (lambda row: 1 / 0, r'x\[0\]: map_fn raised ZeroDivisionError'),
  ]:
    with pytest.raises(InputError, match=message):
      sources.read('x', map_fn=map_fn, fake_rows=input_rows)


def test_alpaca_history_precedes_the_instruction():
  row = {'system': 'S', 'history': [['2+2?', '4'], ['so', 'yes']], 'instruction': 'And', 'input': '3+3?', 'output': '6'}
  earlier_turns = [('system', 'S'), ('user', '2+2?'), ('assistant', '4'), ('user', 'so'), ('assistant', 'yes')]
  (mapped,) = sources.read('x', fake_rows=[row])
  assert mapped == {
    'prompt': [{'role': role, 'content': text} for role, text in [*earlier_turns, ('user', 'And\n\n3+3?')]],
    'completion': [{'role': 'assistant', 'content': '6'}],
  }
  for empty in [], None:
    (mapped,) = sources.read('x', fake_rows=[row | {'history': empty}])
    assert [m['role'] for m in mapped['prompt']] == ['system', 'user'] and 'history' not in mapped
  for bad_history in 'a', [['a']], [['a', 'b', 'c']], ['ab'], [['a', 1]]:
    with pytest.raises(InputError, match=r'x\[0\]: history: must be a list of pairs of texts, \[question, answer\]'):
      sources.read('x', fake_rows=[row | {'history': bad_history}])[0]


def test_sharegpt_and_alpaca_rows_are_converted_to_messages():
  rows = sources.read(
    'x',
    fake_rows=[
      {
        'conversations': [
          {'from': 'human', 'value': 'a'},
          {'from': 'function_call', 'value': '{"name": "f"}'},
          {'from': 'observation', 'value': 'r'},
          {'from': 'gpt', 'value': 'b'},
        ],
        'system': 's',
        'id': 7,
      },
      {
        'conversations': [{'from': 'human', 'value': 'a'}],
        'chosen': {'from': 'gpt', 'value': 'b'},
        'rejected': {'from': 'gpt', 'value': 'c'},
      },
      {'instruction': 'i', 'input': 'j', 'output': 'o'},
    ],
  )
  assert rows[0] == {
    'id': 7,
    'messages': [
      {'role': 'system', 'content': 's'},
      {'role': 'user', 'content': 'a'},
      {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': {'name': 'f'}}]},
      {'role': 'tool', 'content': 'r'},
      {'role': 'assistant', 'content': 'b'},
    ],
  }
  assert rows[1] == {
    'prompt': [{'role': 'user', 'content': 'a'}],
    'chosen': [{'role': 'assistant', 'content': 'b'}],
    'rejected': [{'role': 'assistant', 'content': 'c'}],
  }
  assert rows[2] == {
    'prompt': [{'role': 'user', 'content': 'i\n\nj'}],
    'completion': [{'role': 'assistant', 'content': 'o'}],
  }


def test_load_callable_loads_functions_and_reports_bad_names(tmp_path):
  path = write(tmp_path / 'mine.py', 'def f(): return 3\nx = 5\n')
  assert imports.load_callable(f'{path}:f', 'reward')() == 3
  assert imports.load_callable('json:dumps', 'reward') is json.dumps
  assert imports.load_callable(len, 'reward') is len
  write(tmp_path / 'mine.py', 'def f(): return 33\nx = 5\n')
  assert imports.load_callable(f'{path}:f', 'reward')() == 3  # a run keeps the code that it began with
  imports.forget_edited_files()
  reloaded = imports.load_callable(f'{path}:f', 'reward')
  assert reloaded() == 33
  imports.forget_edited_files()
  assert imports.load_callable(f'{path}:f', 'reward') is reloaded
  broken = write(tmp_path / 'broken.py', 'def f(:\n')
  lacking = write(tmp_path / 'lacking.py', 'import not_there_at_all\n')
  sibling = write(tmp_path / 'sibling.py', 'import mine.part\n')
  for spec, message in [
    ('f', 'names no function'),
    (':f', 'names no function'),
    (f'{path}:g', "has no 'g'; it has f"),
    (f'{path}:x', 'is an int, not a'),
    (f'{tmp_path}/no.py:f', 'no file'),
    ('json:nope', "has no 'nope'"),
    ('not_there:f', "no module 'not_there'"),
    ('json.not_there:f', "no module 'json.not_there'"),
    ('../x y:f', 'no file'),
    ('x y:f', 'is no module name'),
    (f'{broken}:f', r'broken.py:1:\d+: '),
    (f'{lacking}:f', "imports 'not_there_at_all', which is not installed$"),
    (f'{sibling}:f', f"imports 'mine', which is not installed; it is beside that file: put {tmp_path} on PYTHONPATH"),
  ]:
    with pytest.raises(InputError, match='^reward: .*' + message):
      imports.load_callable(spec, 'reward')


@pytest.mark.parametrize('streaming', [False, True])
def test_digest_depends_on_the_rows_and_not_on_the_file(tmp_path, streaming):
  def digest(text):
    return sources.digest(sources.read(write(tmp_path / 'a.jsonl', text), streaming=streaming))

  assert digest(LINES) == digest(LINES.replace(': ', ':'))
  for n in range(3):
    assert digest(LINES) != digest(LINES.replace(f'a{n}', 'b'))
  assert len(sources.digest(sources.read('generated:arithmetic'))) == 8
