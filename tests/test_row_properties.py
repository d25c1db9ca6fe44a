"""A row of data with any value anywhere is encoded, or refused in one line that names file, line and key."""

import copy
import json

import pytest

from jaxpost.data import chat, preferences, sources, tokenizer
from jaxpost.data import prompts as prompts_lib
from jaxpost.errors import InputError

hypothesis = pytest.importorskip('hypothesis', reason="pip install -e '.[test]' has hypothesis")
st = hypothesis.strategies

CALL = {'id': 'c1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
SYSTEM = {'role': 'system', 'content': 'Be short.'}
USER = {'role': 'user', 'content': [{'type': 'text', 'text': 'What is 1+1?'}]}
ANSWER = {'role': 'assistant', 'content': '2', 'reasoning_content': '', 'weight': 0.5}
WHOLE = {**ANSWER, 'weight': 1}  # pairs, labels and scores are those of whole answers
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'adds', 'parameters': {'type': 'object'}}}]
CHAT = [
  SYSTEM,
  USER,
  {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
  {'role': 'tool', 'name': 'add', 'tool_call_id': 'c1', 'content': '2'},
  ANSWER,
]
CALLS = " + (message.tool_calls | tojson if message.tool_calls else '')"  # the template `CHATML` leaves them out
TOKENIZER = tokenizer.load('bytes', tokenizer.CHATML.replace('+ message.content', f'+ message.content{CALLS}'))


def example(row, where):
  chat.make_example(TOKENIZER, row, where)


def pair(row, where):
  preferences.make_pair_example(TOKENIZER, row, where)


def unpaired(row, where):
  preferences.make_unpaired_example(TOKENIZER, row, {'prompt': 'a', 'completion': 'b', 'label': True}, where)


def steps(row, where):
  preferences.make_steps_example(TOKENIZER, row, where)


def scored(row, where):
  preferences.make_scored_example(TOKENIZER, row, where)


def prompt(row, where):
  prompts_lib.prompt_tokens(TOKENIZER, row, where)


# kind: (a valid row, the function that encodes it, config.data.map)
KINDS = {
  'chat': ({'messages': CHAT, 'tools': TOOLS, 'chat_template_kwargs': {'x': 1}}, example, None),
  'pair of chats': ({'prompt': CHAT[:2], 'completion': [ANSWER]}, example, None),
  'pair of texts': ({'prompt': 'a', 'completion': 'b'}, example, None),
  'text': ({'text': 'a'}, example, None),
  'sharegpt': (
    {
      'system': 'Be short.',
      'conversations': [
        {'from': 'human', 'value': '1+1?'},
        {'from': 'function_call', 'value': '{"name": "add", "arguments": {}}'},
        {'from': 'observation', 'value': '2'},
        {'from': 'gpt', 'value': '2'},
      ],
    },
    example,
    None,
  ),
  'alpaca': (
    {'instruction': 'Add.', 'input': '1 1', 'output': '2', 'system': 'Be short.', 'history': [['1+1?', '2']]},
    example,
    None,
  ),
  'GSM8K': ({'question': '1+1?', 'answer': 'so\n#### 2'}, example, 'jaxpost.data.maps:gsm8k'),
  'MATH': ({'problem': '1+1?', 'answer': '2', 'solution': 'so 2'}, example, 'jaxpost.data.maps:math'),
  'preference': (
    {'prompt': CHAT[:2], 'chosen': [WHOLE], 'rejected': [{'role': 'assistant', 'content': '3'}], 'margin': 1.0},
    pair,
    None,
  ),
  'preference of texts': (
    {'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'score_chosen': 2, 'score_rejected': 1.5},
    pair,
    None,
  ),
  'hh-rlhf': (
    {'chosen': '\n\nHuman: a\n\nAssistant: b', 'rejected': '\n\nHuman: a\n\nAssistant: c'},
    pair,
    'jaxpost.data.maps:hh_rlhf',
  ),
  'UltraFeedback': (
    {'prompt': 'a', 'chosen': [{'role': 'user', 'content': 'a'}, WHOLE], 'rejected': 'c', 'score_chosen': 3},
    pair,
    'jaxpost.data.maps:ultrafeedback',
  ),
  'sharegpt preference': (
    {
      'conversations': [{'from': 'human', 'value': 'a'}],
      'chosen': {'from': 'gpt', 'value': 'b'},
      'rejected': {'from': 'gpt', 'value': 'c'},
    },
    pair,
    None,
  ),
  'label': ({'prompt': 'a', 'completion': 'b', 'label': True}, unpaired, None),
  'steps': ({'prompt': 'a', 'completions': ['b', 'c'], 'labels': [True, 0.5]}, steps, None),
  'score': ({'prompt': 'a', 'completion': 'b', 'score': 1.5}, scored, None),
  'prompt': ({'prompt': CHAT[:2], 'tools': json.dumps(TOOLS), 'answer': '2'}, prompt, None),
  'prompt of a chat': ({'messages': CHAT, 'answer': '2'}, prompt, None),
}
# Keys that have a meaning at any depth, with the types of their values; null is the same as no key.
NUMBER, ANY = (int, float), object
TYPES = {
  **dict.fromkeys(('messages', 'conversations', 'completions', 'labels', 'tool_calls'), list),
  **dict.fromkeys(('role', 'from', 'value', 'name', 'id', 'tool_call_id', 'reasoning_content', 'text'), str),
  **dict.fromkeys(('instruction', 'input', 'output', 'system', 'question', 'problem', 'solution'), str),
  **dict.fromkeys(('weight', 'margin', 'score_chosen', 'score_rejected'), NUMBER),
  **dict.fromkeys(('content', 'prompt', 'completion'), (str, list)),
  **dict.fromkeys(('chosen', 'rejected'), (str, list, dict)),
  'chat_template_kwargs': dict,
  'function': dict,
  'arguments': (dict, str),
  'tools': (list, str),
  'score': (*NUMBER, bool),
}
SCALARS = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(),
  st.floats(),
  st.text(max_size=5),
  st.sampled_from(
    [7, 10**400, -1, '', ' ', '\ud800', 'a\nb', 'a' * 3000, float('nan'), [], {}, [[]], [{}], {'a\nb': 1}]
  ),
)
ANYTHING = st.recursive(
  SCALARS, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=3), x, max_size=2), max_leaves=5
)


def paths(value, prefix=()):
  """Yields the path of every key and element, at any depth."""
  for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
    yield (*prefix, key)
    yield from paths(value[key], (*prefix, key))


def change(row, path, value, remove):
  """Returns a copy of the row with another value at a path, or without that path."""
  changed = copy.deepcopy(row)
  inner = changed
  for key in path[:-1]:
    inner = inner[key]
  if remove:
    del inner[path[-1]]
  else:
    inner[path[-1]] = value
  return changed


def encode(kind, row):
  """Encodes a row as that of line 7, and returns the error or None."""
  _, encoded, map_fn = KINDS[kind]
  try:
    rows = sources.read('rows.jsonl', map_fn=map_fn, fake_rows=[row])
    encoded(rows[0], 'rows.jsonl:7')
  except InputError as error:
    return str(error)
  return None


CHANGES = [(kind, path) for kind, (row, *_) in KINDS.items() for path in paths(row)]


@pytest.mark.parametrize('kind', KINDS)
def test_valid_rows_of_each_kind_are_encoded(kind):
  assert encode(kind, KINDS[kind][0]) is None


@hypothesis.settings(max_examples=2500, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.sampled_from(CHANGES), ANYTHING, st.booleans())
def test_anything_anywhere_is_taken_or_refused_in_one_line(at, value, remove):
  kind, path = at
  line = encode(kind, change(KINDS[kind][0], path, value, remove))
  if line is not None:
    assert line.startswith(('rows.jsonl:7: ', 'rows.jsonl[0]: ', 'rows.jsonl: map_fn dropped')), line
    assert line.isprintable() and len(line) < 600, line


WRONG = [7, 1.5, True, False, 0, 'x', '', [], {}, [7], [[]], [{}], {'a': 1}, 10**400, float('nan')]


def wrong_types():
  """Yields (kind, path, value) with each value of a type that the key at the path does not accept."""
  for kind, path in CHANGES:
    accepted = TYPES.get(path[-1] if isinstance(path[-1], str) else '', ANY)
    if isinstance(path[-1], int):  # elements of lists with a meaning
      accepted = {'messages': dict, 'tool_calls': dict, 'tools': dict, 'completions': str, 'conversations': dict}.get(
        path[-2], ANY
      )
    if (
      accepted is ANY or 'parameters' in path or path[-2:] == ('arguments', 'a') or path[0] == 'tools' and len(path) > 2
    ):
      continue
    for value in WRONG:
      is_bool = isinstance(value, bool)
      if (is_bool and bool not in (accepted if isinstance(accepted, tuple) else (accepted,))) or not isinstance(
        value, accepted
      ):
        yield kind, path, value


def test_no_wrong_type_passes(record_property):
  """A wrong type of any key that has a meaning, at any depth, is refused by the key's name."""
  cases = list(wrong_types())
  record_property('cases', len({(kind, path) for kind, path, _ in cases}))
  passed, unnamed = [], []
  for kind, path, value in cases:
    line = encode(kind, change(KINDS[kind][0], path, value, False))
    if line is None:
      passed.append((kind, path, value))
    elif not any(str(key) in line for key in path if isinstance(key, str)):
      unnamed.append((kind, path, value, line))
  assert not passed
  assert not unnamed
