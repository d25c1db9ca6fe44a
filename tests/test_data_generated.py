"""Generated data (`generated:arithmetic...`) is correct and deterministic, and its splits share no problem."""

import pytest

from jaxpost.data import generated, sources
from jaxpost.errors import InputError


def test_generated_arithmetic_is_correct_and_deterministic():
  rows = sources.read('generated:arithmetic:max=20,ops=+-*,correct=1')
  assert len(rows) > 900 and rows.where(4).endswith('[4]')
  for row in rows:
    question = row['prompt'][0]['content']
    assert eval(question[:-1]) == int(row['answer'])
    assert row['completion'][0]['content'] == row['answer']
  again = sources.read('generated:arithmetic:max=20,ops=+-*,correct=1')
  assert list(rows) == list(again)


def problems(options):
  """Returns the set of questions that these options generate, none of which may repeat."""
  questions = [r['prompt'][0]['content'] for r in generated.rows('arithmetic', options)]
  assert len(set(questions)) == len(questions)
  return set(questions)


def test_generated_splits_share_no_problem():
  for options in ('max=30', 'digits=3,size=3000', 'max=9,ops=+-*,seed=4'):
    train = problems(f'{options},split=train')
    test = problems(f'{options},split=test')
    assert train and test
    mirrored = {f'{t[:-1].split("+")[1]}+{t.split("+")[0]}=' for t in test if '+' in t}
    assert not train & (test | mirrored)
  # A problem is in the same split with other options.
  assert not problems('max=30,split=test') & problems('max=40,correct=1,size=9999')


def test_generated_wrong_answers_are_as_frequent_as_the_option_says():
  rows = generated.rows('arithmetic', 'correct=0.3,ops=+-*,max=50')
  right = [r['completion'][0]['content'] == r['answer'] for r in rows]
  assert abs(sum(right) / len(right) - 0.3) < 0.03
  assert all(r['completion'][0]['content'].lstrip('-').isdigit() for r in rows)
  all_wrong = generated.rows('arithmetic', 'correct=0,ops=+-*,max=50')
  assert all(r['completion'][0]['content'] != r['answer'] for r in all_wrong)


def content(messages):
  (message,) = messages
  return message['content']


NAMES = ('pairs', 'labels', 'scores', 'steps')


def test_generated_preference_data_has_the_problems_and_splits_of_arithmetic():
  for options in ('max=30', 'max=30,split=test', 'digits=3,size=500,ops=+-*'):
    plain = generated.rows('arithmetic', options)
    answers = {content(r['prompt']): r['answer'] for r in plain}
    for name in NAMES:
      rows = sources.read(f'generated:arithmetic_{name}:{options}')
      again = sources.read(f'generated:arithmetic_{name}:{options}')
      assert list(rows) == list(again)
      if 'digits' not in options:  # which has so many problems that each data set draws 500 others
        assert {content(r['prompt']): r['answer'] for r in rows} == answers
  for name in NAMES:
    train, test = (
      {content(r['prompt']) for r in generated.rows(f'arithmetic_{name}', f'max=30,split={split}')}
      for split in ('train', 'test')
    )
    assert train and test and not train & test


def test_generated_pairs_prefer_the_right_answer_except_for_noise():
  for noise in (0, 0.25):
    rows = generated.rows('arithmetic_pairs', f'ops=+-*,max=50,noise={noise}')
    right = [content(r['chosen']) == r['answer'] for r in rows]
    assert abs(sum(right) / len(right) - (1 - noise)) < 0.03
    assert all((content(r['rejected']) == r['answer']) != ok for r, ok in zip(rows, right))
    assert all(r['chosen'] != r['rejected'] for r in rows)


@pytest.mark.parametrize('noise', [0, 0.2])
def test_generated_labels_and_scores_match_correctness_except_for_noise(noise):
  options = f'ops=+-*,max=50,correct=0.4,noise={noise}'
  for name, column in (('labels', 'label'), ('scores', 'score')):
    rows = generated.rows(f'arithmetic_{name}', options)
    assert {'prompt', 'completion', 'answer', column} == set(rows[0])
    right = [content(r['completion']) == r['answer'] for r in rows]
    agree = [bool(r[column]) == ok for r, ok in zip(rows, right)]
    assert abs(sum(right) / len(rows) - 0.4) < 0.03
    assert abs(sum(agree) / len(rows) - (1 - noise)) < 0.03
    kind = bool if column == 'label' else float
    assert all(type(r[column]) is kind for r in rows)


def test_generated_steps_are_labeled_right_until_the_first_wrong_one():
  rows = generated.rows('arithmetic_steps', 'ops=+-*,max=199,correct=0.5')
  all_right = 0
  for row in rows:
    steps, labels = row['completions'], row['labels']
    assert len(steps) == len(labels) >= 2
    # The labels are True, ..., True, False, ..., False: no step after the first wrong one is right.
    assert labels == sorted(labels, reverse=True)
    all_right += labels[-1]
    assert (steps[-1] == row['answer']) == labels[-1]
    values = []
    for step, label in zip(steps[:-1], labels):
      expression, result = step.rsplit('=', 1)
      values.append(eval(expression) == int(result))
      assert values[-1] or not label
    if not labels[-1]:
      # The first false label is where the arithmetic goes wrong.
      assert values.index(False) == labels.index(False)
  assert abs(all_right / len(rows) - 0.5) < 0.03


def test_bad_options_of_generated_data_are_refused():
  for name, message in [
    ('nope', 'generated:nope: there is no such data; there is arithmetic'),
    ('arithmetic:maxx=3', "unknown option 'maxx'; there are split, max"),
    ('arithmetic:max=x', "max='x' is no int"),
    ('arithmetic:split=dev', 'neither train nor test'),
    ('arithmetic:ops=/', r'only \+ - and \*'),
    ('arithmetic:correct=2', 'correct is a share'),
    ('arithmetic:noise=0.1', "unknown option 'noise'"),
    ('arithmetic_pairs:noise=2', 'noise is a share'),
    ('arithmetic_steps:max=1,split=test', 'arithmetic_steps: no test problems'),
    ('arithmetic:max=0', 'must be positive'),
    ('arithmetic:max=1,split=test', 'no test problems'),
  ]:
    with pytest.raises(InputError, match=message):
      sources.read(f'generated:{name}')
