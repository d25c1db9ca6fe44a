"""Any value of any config field is accepted, or refused in one line that names the field, in little time and memory."""

import dataclasses
import resource
import time
import typing

import pytest

from jaxpost.errors import InputError
from jaxpost.stage import checks, prepare
from jaxpost.stage import config as config_lib
from jaxpost.stage.schema import Config

hypothesis = pytest.importorskip('hypothesis', reason="pip install -e '.[test]' has hypothesis")
st = hypothesis.strategies


def fields(kind=Config, prefix=''):
  """Yields (dotted name, type, metadata) of every field."""
  hints = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    hint = hints[field.name]
    if dataclasses.is_dataclass(hint):
      yield from fields(hint, f'{prefix}{field.name}.')
    yield f'{prefix}{field.name}', hint, field.metadata


FIELDS = sorted(fields(), key=lambda f: f[0])
SCALARS = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(),
  st.sampled_from([10**12, 2**31, 2**40, 10**30, -(10**30), 10**1000]),
  st.floats(),
  st.sampled_from([1e12, 1e30, 1e300, 5e-324]),
  st.text(),
  st.sampled_from(['', '../evil', '/etc/passwd', 'a/b', 'x\ny', '\0', '\ud800', 'a' * 5000, '$(id)', '{{ 1 }}']),
)
ANYTHING = st.recursive(
  SCALARS, lambda x: st.lists(x, max_size=3) | st.tuples(x) | st.dictionaries(st.text(max_size=5), x, max_size=3)
)
BY_TYPE = {int: st.integers(), float: st.floats(), str: st.text(), bool: st.booleans()}


@st.composite
def changes(draw):
  """(field, value): any value, or one of the type or of the choices of the field."""
  name, hint, meta = draw(st.sampled_from(FIELDS))
  likely = [ANYTHING, BY_TYPE.get(hint, ANYTHING)]
  if meta.get('choices'):
    likely.append(st.sampled_from(meta['choices']))
  if hint is tuple and meta.get('each'):
    likely.append(st.lists(BY_TYPE[meta['each']], max_size=3).map(tuple))
  return name, draw(st.one_of(likely))


def validate(raw):
  """Makes the checks of a config that a run makes before it reads data."""
  for section in config_lib.parse(raw).values():
    algorithm, section = prepare.resolve(section)
    checks.check_config(section, algorithm)


def nested(name, value):
  """{'a': {'b': value}} of 'a.b'."""
  for part in reversed(name.split('.')):
    value = {part: value}
  return value


def check(name, value, algorithm):
  """Asserts that a config with this value is accepted or refused in one line, in less than 10 s and 2 GiB."""
  raw = {'algorithm': algorithm, 'data': {'path': 'generated:arithmetic'}, 'reward': 'length'}
  top, _, rest = name.partition('.')
  over = nested(name, value)
  raw[top] = {**raw.get(top, {}), **over[top]} if rest and isinstance(raw.get(top, {}), dict) else over[top]
  begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  try:
    validate(raw)
  except InputError as error:
    line = str(error)
    assert '\n' not in line and len(line) < 2000, line
    shown = ascii(name)[1:-1]
    assert shown.rpartition('.')[2] in line or shown.partition('.')[0] in line, (name, value, line)
  assert time.monotonic() - begin < 10, (name, value)
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**21, (name, value)  # KiB


@pytest.mark.parametrize('value', [10**12, -1e300, 'x\ny', '0' * 5000], ids=lambda value: repr(value)[:9])
def test_extreme_values_of_every_field_are_accepted_or_refused(value):
  """Goes through all fields, of which the test with random values draws some."""
  for name, _, _ in FIELDS:
    check(name, value, 'grpo')


@pytest.mark.parametrize('key', ['\n', 'a\nb', '\0', '\ud800'], ids=ascii)
def test_unprintable_keys_are_accepted_or_refused_in_one_line(key):
  for section in ('critic', 'optim', 'user'):
    check(section, {key: None}, 'grpo')
  check(key, 1, 'grpo')


@hypothesis.settings(max_examples=500, deadline=None, derandomize=True, database=None)
@hypothesis.given(changes(), st.sampled_from(['sft', 'grpo']))
def test_random_value_of_a_field_is_accepted_or_refused(change, algorithm):
  check(*change, algorithm)
