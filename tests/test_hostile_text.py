"""Parsers of rewards and tool calls read any text of a model in linear time and without an exception.

A completion that keeps its reward busy for minutes, or makes it raise, would get no verdict instead of a 0.
"""

import functools
import time

import pytest

from jaxpost.environments import turns
from jaxpost.rewards import code, format, ifeval, math

LENGTH = 50_000  # quadratic time would take a minute or more
TEXTS = {  # name -> (start, repeated unit, end)
  'spaces after a fence': ('```', ' ', 'x y'),
  'backticks': ('', '`', ' x y'),
  'tildes': ('', '~', ' x y'),
  'lines after a fence': ('```', '\n', 'x'),
  'blank lines': ('x', '\n', 'x'),
  'spaces between words': ('1', ' \n', '!'),
  'no end of a sentence': ('', 'a, ', ''),
  'opened calls': ('', '<tool_call>', ''),
  'spaces in a call': ('<tool_call>', ' ', ''),
  'opened functions': ('<tool_call>', '<function=a>', '</tool_call>'),
  'opened parameters': ('<tool_call><function=a>', '<parameter=a>', '</function></tool_call>'),
  'lines in a parameter': ('<tool_call><function=a><parameter=b>', '\n', '</function></tool_call>'),
  'lists in lists': ('<tool_call>', '[', '</tool_call>'),
  'lists in a parameter': ('<tool_call><function=a><parameter=b>', '[', '</parameter></function></tool_call>'),
  'only lists in lists': ('', '[', ''),
  'opened titles': ('', '<<', ''),
  'opened boxes': ('', '\\boxed{', ''),
  'marks of an answer': ('', '#### ', ''),
  'digits': ('\\boxed{', '9', '}'),
  'powers of powers': ('\\boxed{', '9^', '9}'),
  'opened tags': ('', '<think>', ''),
}
READERS = {
  'last_block': code.last_block,
  'parse': turns.parse,
  'answer_of': math.answer_of,
  'think_format': lambda text: format.think_format([text]),
  'tag_format': lambda text: format.TagFormat()([text]),
  'json_schema': lambda text: format.JsonSchema()([text], [{'type': 'object'}]),
  'sentences': functools.partial(ifeval._sentences, num_sentences=3),
  'bullets': functools.partial(ifeval._bullets, num_bullets=3),
  'postscript': functools.partial(ifeval._postscript, postscript_marker='P.S.'),
  'json': ifeval._json,
  'title': ifeval._title,
  'placeholders': functools.partial(ifeval._placeholders, num_placeholders=3),
  'highlights': functools.partial(ifeval._highlights, num_highlights=3),
}


@pytest.mark.parametrize('name', READERS)
def test_every_text_is_read_in_linear_time(name):
  for text_name, (before, unit, after) in TEXTS.items():
    begin = time.monotonic()
    READERS[name](before + unit * (LENGTH // len(unit)) + after)
    assert time.monotonic() - begin < 10, text_name
