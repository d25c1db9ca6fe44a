"""Generated data: right, pure, with splits that share no problem."""

import pytest

from jaxpost.data import generated
from jaxpost.data import sources
from jaxpost.errors import InputError


def test_generated_arithmetic_is_right_and_pure():
  rows = sources.read('generated:arithmetic:max=20,ops=+-*,correct=1')
  assert len(rows) > 900 and rows.where(4).endswith('[4]')
  for row in rows:
    asked = row['prompt'][0]['content']
    assert eval(asked[:-1]) == int(row['answer'])
    assert row['completion'][0]['content'] == row['answer']
  again = sources.read('generated:arithmetic:max=20,ops=+-*,correct=1')
  assert list(rows) == list(again)


def problems(options):
  found = [
    r['prompt'][0]['content'] for r in generated.rows('arithmetic', options)
  ]
  assert len(set(found)) == len(found)
  return set(found)


def test_generated_splits_share_no_problem():
  for options in ('max=30', 'digits=3,size=3000', 'max=9,ops=+-*,seed=4'):
    train = problems(f'{options},split=train')
    test = problems(f'{options},split=test')
    assert train and test
    mirrored = {
      f'{t[:-1].split("+")[1]}+{t.split("+")[0]}=' for t in test if '+' in t
    }
    assert not train & (test | mirrored)
  # Other options do not move a problem into the other split.
  assert not problems('max=30,split=test') & problems(
    'max=40,correct=1,size=9999'
  )


def test_generated_slips_are_wrong_and_as_frequent_as_asked():
  rows = generated.rows('arithmetic', 'correct=0.3,ops=+-*,max=50')
  right = [r['completion'][0]['content'] == r['answer'] for r in rows]
  assert abs(sum(right) / len(right) - 0.3) < 0.03
  assert all(r['completion'][0]['content'].lstrip('-').isdigit() for r in rows)
  none = generated.rows('arithmetic', 'correct=0,ops=+-*,max=50')
  assert all(r['completion'][0]['content'] != r['answer'] for r in none)


def test_generated_options_are_checked():
  for name, message in [
    ('nope', 'generated:nope: there is no such data; there is arithmetic'),
    ('arithmetic:maxx=3', "unknown option 'maxx'; there are split, max"),
    ('arithmetic:max=x', "max='x' is no int"),
    ('arithmetic:split=dev', 'neither train nor test'),
    ('arithmetic:ops=/', r'only \+ - and \*'),
    ('arithmetic:correct=2', 'correct is a share'),
    ('arithmetic:max=0', 'must be positive'),
    ('arithmetic:max=1,split=test', 'no test problems'),
  ]:
    with pytest.raises(InputError, match=message):
      sources.read(f'generated:{name}')
