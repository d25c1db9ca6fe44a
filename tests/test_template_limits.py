"""Chat templates that loop or grow are refused within seconds; ordinary templates render as in Jinja."""

import resource
import time

import pytest

from jaxpost.data import template_limits, tokenizer
from jaxpost.errors import InputError

CHAT = [{'role': 'user', 'content': 'hello\n' * 20}, {'role': 'assistant', 'content': 'x'}] * 3
LONG_RANGE = 'range(99999)'
LOOP_99 = '{% for a in range(99) %}'
HOSTILE = {
  'nested loops': f'{{% for a in {LONG_RANGE} %}}' * 3 + '{% endfor %}' * 3,
  'power': '{{ 10 ** (10 ** 8) }}',
  'power of powers': '{% set x = 9 ** 9 %}{{ x ** x }}',
  'division by zero': '{{ 1 / 0 }}',
  'recursion': '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}',
  'tree of calls': '{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}',
  'recursive loop': '{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}',
  'long range': '{% for a in range(10 ** 1) %}{% endfor %}{{ range(1000000000) | list }}',
  'text times number': "{{ 'a' * 99999999999 }}",
  'list times number': '{{ [1] * 99999999999 }}',
  'number by doubling': '{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}',
  'text by doubling': "{% set n = namespace(x='ab') %}" + LOOP_99 + '{% set n.x = n.x + n.x %}{% endfor %}',
  'text by joining': "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
  'nested lists': '{% set n = namespace(x=[1, 2]) %}' + LOOP_99 + '{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}',
  'nested dicts': '{% set n = namespace(x={}) %}' + LOOP_99 + "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
  'nested tuples': '{% set n = namespace(x=(1,)) %}{% for a in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}',
  'nested by dict()': '{% set n = namespace(x=1) %}' + LOOP_99 + '{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}',
  'center': "{{ 'a' | center(9999999999) }}",
  'ljust': "{{ 'a'.ljust(9999999999) }}",
  'format': "{{ '{:>9999999999}'.format(1) }}",
  'percent': "{{ '%9999999999d' % 1 }}",
  'percent star': "{{ '%*d' % (9999999999, 1) }}",
  'format filter': "{{ '%9999999999d' | format(1) }}",
  'replace': "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
  'replace filter': "{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}",
  'join': "{% set x = 'a' * 99999 %}{{ x.join(x) }}",
  'join filter': "{% set x = 'a' * 99999 %}{{ (x | list) | join(x) }}",
  'indent': '{{ messages[0].content | indent(9999999999) }}',
  'tojson': '{{ messages | tojson(indent=99999999) }}',
  'lipsum': '{{ lipsum(n=99999) }}',
  'capture': "{% set x = 'a' * 9999999 %}{% set y %}{% for a in range(99999) %}{{ x }}{% endfor %}{% endset %}{{ y }}",
  'constant text': '{% set y %}{% for a in range(99999) %}' + 'a' * 99999 + '{% endfor %}{% endset %}',
  'no such attribute': '{{ messages.a.b }}',
  'no such item': "{{ {}['a'].b }}",
  'bad syntax': '{% for %}',
  'deep syntax': '{{ ' + '(' * 5000 + '1' + ')' * 5000 + ' }}',
}


@pytest.mark.parametrize('case', HOSTILE)
def test_hostile_template_is_refused_quickly_and_without_memory(case):
  started, kib_before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  read = tokenizer.load('bytes', HOSTILE[case])
  with pytest.raises(InputError, match='the chat template of bytes refuses it: ') as error:
    read.render_chat(CHAT, where='rows.jsonl:3')
  assert str(error.value).startswith('rows.jsonl:3: ') and len(str(error.value)) < 1000
  assert '\n' not in str(error.value)
  assert time.monotonic() - started < 30
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kib_before < 2 << 20  # KiB


PLAIN = (
  "{% for m in messages %}{{ loop.index ~ ' ' ~ m.role ~ ': ' ~ m.content | trim }}{{ '\\n' * 2 }}{% endfor %}"
  "{% set n = namespace(found=false, text='') %}{% for m in messages[::-1] if m.role == 'user' %}"
  "{% set n.text = n.text + m['content'].split('\\n')[0] %}{% set n.found = true %}{% endfor %}{{ n.text if n.found }}"
  "{{ {'a': [1, (2, 3)]} | tojson(indent=2) }}{{ 7 % 2 }}{{ '%s-%d' | format('a', 3) }}{{ 'a,b'.replace(',', ';') }}"
  "{{ ['x', 'y'] | join(', ') }}{{ undefined_thing ~ 'z' }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('q') }}"
  "{{ messages | map(attribute='role') | list | length }}{{ 2 * 3 + 1 }}{{ 'ab'.join(['1', '2']) }}"
)


def test_ordinary_template_renders_as_in_jinja():
  from transformers.utils import chat_template_utils

  read = tokenizer.load('bytes', PLAIN)
  text, _ = read.render_chat(CHAT)
  expected = chat_template_utils._cached_compile_jinja_template(PLAIN).render(messages=CHAT)
  assert text == expected and 'zq' not in text and '<q>' in text


def test_step_limit_counts_each_chat_alone(monkeypatch):
  monkeypatch.setattr(template_limits, 'STEPS', 2000)
  read = tokenizer.load('bytes', '{% for m in messages %}{{ m.content }}{% endfor %}')
  for _ in range(5):
    read.render_chat([{'role': 'user', 'content': 'a'}] * 1000)
  with pytest.raises(InputError, match='takes more than 2,000 steps'):
    read.render_chat([{'role': 'user', 'content': 'a'}] * 4000)


def test_transformers_without_the_hook_gives_a_warning(monkeypatch, caplog):
  """The hook replaces a private function of transformers. Without it, templates render, and a warning says so."""
  from transformers.utils import chat_template_utils

  monkeypatch.delattr(chat_template_utils, '_compile_jinja_template')
  template_limits.install.__wrapped__(chat_template_utils)
  assert 'run without limits' in caplog.text
