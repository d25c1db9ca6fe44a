"""Built-in math rewards (numeric_match, gsm8k, math_verify): the number they read from a completion, and its reward."""

import fractions
import json
import sys

import pytest
from golden_losses import CASES

from jaxpost.errors import InputError
from jaxpost.rewards import builtin
from jaxpost.rewards import math as math_rewards
from jaxpost.rewards.format import text_of
from jaxpost.rewards.groups import Group
from jaxpost.rewards.pool import RewardPool

F = fractions.Fraction


@pytest.mark.parametrize(
  'text, number',
  [
    ('', None),
    ('none at all', None),
    ('18', 18),
    ('It is 18.', 18),
    ('$1,234.50', F('1234.5')),
    ('1{,}234 apples', 1234),
    (r'\$1,234,567', 1234567),
    ('50%', 50),
    (r'50\%.', 50),
    ('.5', F(1, 2)),
    ('1/2', F(1, 2)),
    ('3 1/2 cups', F(7, 2)),
    (r'\frac{1}{2}', F(1, 2)),
    (r'-\dfrac{1}{2}', F(-1, 2)),
    (r'\frac{-3}{4}', F(-3, 4)),
    (r'3\frac{1}{2}', F(7, 2)),
    ('5/0', 0),
    ('-7', -7),
    ('\u22127', -7),
    ('-$7', -7),
    ('$-7', -7),
    ('x = -7', -7),
    ('10-7', 7),
    ('10 - 7', 7),
    ('(2)-7', 7),
    ('3\u20135', 5),
    ('1e3', 1000),
    ('2.5e-3', F('0.0025')),
    ('1e9999999999', 9999999999),
    ('1,23', 23),
    ('12, 13', 13),
    ('**42**', 42),
    ('007', 7),
  ],
)
def test_last_number_of_a_text(text, number):
  assert math_rewards.last_number(text) == number


@pytest.mark.parametrize(
  'text, number',
  [
    ('#### 18', 18),
    ('#### 18 eggs in 3 days', 18),
    ('5\n#### $1,000\nso 7', 1000),
    ('####-5', -5),
    ('#### 1\n#### 2', 2),
    (r'so \boxed{18}, not 3', 18),
    (r'\boxed{x = \frac{1}{2}} of 9', F(1, 2)),
    (r'\boxed{1} \boxed{2} 3', 2),
    (r'\boxed{}  5', None),
    (r'\boxed{12', 12),
    ('#### 3\n' + r'\boxed{4}', 4),
    (r'\boxed{4}' + '\n#### 3', 3),
    ('#### Step 2\n6 * 3 = 18', 18),
    ('so 18 apples', 18),
    ('no idea', None),
  ],
)
def test_final_number_prefers_delimiters_and_boxes(text, number):
  assert math_rewards.final_number(text) == number


BOXES = [
  # (text in a box, the number that it stands for)
  ('18', 18),
  ('-18', -18),
  ('+18', 18),
  ('\u221218', -18),
  ('18.', 18),
  ('18.50', F('18.5')),
  ('.5', F(1, 2)),
  ('1,234', 1234),
  ('1{,}234', 1234),
  (r'1\,234', 1234),
  (r'\$18', 18),
  (r'\$1,234.50', F('1234.5')),
  (r'50\%', 50),
  ('50%', 50),
  (r'90^\circ', 90),
  (r'90^{\circ}', 90),
  ('18 cm', 18),
  ('18 dollars', 18),
  ('18cm', 18),
  ('18 m', 18),
  (r'18 \text{ cm}^2', 18),
  (r'18\ \mathrm{m}^3', 18),
  (r'18\ \mathrm{m}^{3}', 18),
  (r'18\text{ miles per hour}', 18),
  (r'\text{18}', 18),
  (r'\textbf{18}', 18),
  (r'\mathrm{18}\text{ apples}', 18),
  ('x = 18', 18),
  (r'x=\frac{1}{2}', F(1, 2)),
  ('Total: 18', 18),
  (r'\frac{1}{2}', F(1, 2)),
  (r'\dfrac{1}{2}', F(1, 2)),
  (r'\frac34', F(3, 4)),
  (r'\frac12', F(1, 2)),
  (r'\frac1{2}', F(1, 2)),
  (r'\frac{1}{-2}', F(-1, 2)),
  (r'-\frac{1}{2}', F(-1, 2)),
  (r'3\frac{1}{2}', F(7, 2)),
  (r'\frac{1,000}{3}', F(1000, 3)),
  ('1/2', F(1, 2)),
  ('3 1/2', F(7, 2)),
  ('10^5', 100_000),
  ('10^{5}', 100_000),
  ('2^{10}', 1024),
  ('10^{-2}', F(1, 100)),
  (r'3\times 10^4', 30_000),
  (r'3 \cdot 10^{4}', 30_000),
  (r'6 \times 7', 42),
  ('1e3', 1000),
  (r'\frac{1}{0}', None),
  (r'2\pi', None),
  (r'\sqrt{5}', None),
  (r'3\sqrt{2}', None),
  ('(3, 4)', None),
  ('3, 4', None),
  ('x^2', None),
  ('2x', None),
  ('7:30', None),
  (r'\text{none}', None),
  (r'\{1, 2\}', None),
  ('1 + 2', None),
  ('', None),
]


@pytest.mark.parametrize('text, number', BOXES)
def test_box_is_read_as_one_number(text, number):
  assert math_rewards.boxed_number(text) == number
  assert math_rewards.final_number('so 7 and \\boxed{' + text + '}') == number


# math_verify does not know these spellings of plain text, which models write.
PLAIN_TEXT = {'18.', r'1\,234', '18 dollars', '18cm', 'Total: 18', r'\frac{1,000}{3}', '3 1/2', '1e3', '7:30'}
READ_DIFFERENTLY = {'1 + 2', r'\mathrm{18}\text{ apples}', *PLAIN_TEXT}  # math_verify adds up '1 + 2'


@pytest.mark.parametrize('text, number', [(text, n) for text, n in BOXES if text and text not in READ_DIFFERENTLY])
def test_boxes_are_read_as_math_verify_reads_them(text, number):
  """math_verify finds a box equal to our number; where we read no number, it finds it equal to no plain number."""
  library = pytest.importorskip('math_verify')
  parsed = library.parse('$\\boxed{' + text + '}$', parsing_timeout=None)
  guesses = [number] if number is not None else [math_rewards.last_number(text), 7]
  for guess in guesses:
    if guess is not None:
      gold = library.parse(f'${guess}$', parsing_timeout=None)
      assert library.verify(gold, parsed, timeout_seconds=None) == (number is not None), (text, guess, parsed)


def test_numbers_of_10000_digits_are_compared():
  digits = '9' * 10_000
  assert math_rewards.numeric_match([digits, digits + '1', '1/' + digits], [digits, digits, '9']) == [1.0, 0.0, 0.0]


def test_row_whose_answer_has_no_number_is_masked():
  for reward in (math_rewards.numeric_match, math_rewards.gsm8k):
    assert reward(['7', 'x', '7'], [7, '7', 'none']) == [1.0, 0.0, None]
  assert math_rewards.exact_match([' a\n', 'b', 'a b', 'None'], ['a', 'a', 'a  b', None]) == [1.0, 0.0, 0.0, None]


def test_text_of_a_chat_is_that_of_its_last_assistant_message():
  assert text_of('a') == 'a'
  assert text_of([{'role': 'assistant', 'content': 'a'}]) == 'a'
  assert text_of([{'role': 'assistant', 'content': None}]) == ''
  assert text_of([{'content': 'call'}, {'content': 'answer'}]) == 'answer'
  assert text_of([{'content': [{'type': 'text', 'text': 'a'}]}]) == 'a'
  # Only the model's own text is graded, never the answer of a tool.
  call, tool = {'role': 'assistant', 'content': 'call'}, {'role': 'tool', 'content': '#### 4'}
  assert text_of([call, tool]) == 'call' and text_of([tool]) == ''
  assert math_rewards.gsm8k([[call, tool]], ['4']) == [0.0]
  chat = [[{'role': 'assistant', 'content': '#### 4'}]]
  assert math_rewards.gsm8k(chat, ['4']) == [1.0]


MATH = [
  # (text, answer of the row, reward)
  (r'so \boxed{63}', '63', 1.0),
  (r'so \boxed{64}', '63', 0.0),
  (r'It is $x = \frac{126}{2}$, thus \boxed{\frac{126}{2}}.', '63', 1.0),
  ('63, I think', '63', 0.0),  # no LaTeX
  ('', '63', 0.0),
  ('\u00e4\u4e16 \U0001f600', '63', 0.0),
  (r'\boxed{\frac{1}{2}}', '0.5', 1.0),
  (r'\boxed{(x+1)^2}', '$x^2+2x+1$', 1.0),
  (r'\boxed{63}', 'no idea', None),
  (r'\boxed{63}', '', None),
  (r'\boxed{63}', None, None),
]


def test_math_verify_rewards_alone_and_in_a_pool():
  """The first four rewards of MATH are those of TRL's accuracy_reward for the answer 63."""
  assert [reward for _, _, reward in MATH[:4]] == CASES['trl/accuracy_reward_gold63']
  pytest.importorskip('math_verify', reason="not installed: pip install -e '.[math]'")
  texts, answers, rewards = zip(*MATH)
  assert math_rewards.MathVerify()(texts, answers) == list(rewards)
  chat = [[{'role': 'assistant', 'content': t}] for t in texts]
  with RewardPool('math_verify', timeout_s=60.0) as pool:
    pool.check(['answer'])
    (graded,) = pool.grade([Group(['p'] * len(chat), chat, [[1]] * len(chat), {'answer': list(answers)})])
  assert graded.error is None
  assert graded.rewards == list(rewards)


BARE = [
  # (answer of a row, boxes that are right, boxes that are wrong)
  (r'3\sqrt{13}', [r'\sqrt{117}'], ['3', '13']),
  ('6 - 5i', ['-5i + 6'], ['5', '6 + 5i']),
  (r'\pi', [], ['3']),
  ('2pi', [r'2\pi'], ['2']),
  (r'\frac34', ['0.75', '3/4'], ['3', '4']),
  ('x=5', ['5'], ['6', 'y=5']),
  ('y = 2x + 3', ['2x+3'], ['3']),
  ('[0,5)', [r'\left[0, 5\right)'], ['[0,5]', '5']),
  (r'(-\infty, 2]', [], ['2']),
  ('1,2,3', ['3, 2, 1', r'\{1,2,3\}'], ['1.2', '3']),
  ('2 or 3', [r'3 \text{ or } 2'], ['3']),
  (r'50\%', ['50', '0.5'], ['5']),
  ('50%', ['0.5'], ['5']),
  (r'\$18.90', ['18.9', r'\$18.9'], ['1890', '18']),
  ('$18.90', ['18.9'], ['18']),
  (r'90^\circ', ['90', r'90^{\circ}'], ['9']),
  ('45\u00b0', ['45'], ['4']),
  (r'18\text{ cm}.', ['18'], ['81']),
  ('18 dollars', ['18', r'18\text{ dollars}'], ['19']),
  ('1,234', ['1234', r'1{,}234'], ['1', '234']),
  (r'10\,000', ['10000'], ['0', '10']),
  ('10 000', ['10000'], ['0', '10']),
  ('1.6e-19', [r'1.6 \times 10^{-19}'], ['1.6']),
  ('-7', [], ['7']),
  ('42.', ['42'], ['4']),
  ('1/2', [r'\frac{1}{2}', '.5'], ['1', '2']),
  ('Evelyn', [r'\text{Evelyn}'], [r'\text{Navin}', 'Navin']),
  (r'\text{east}', ['east'], [r'\text{seat}']),
  (r'\text{(C)}', ['C', r'\text{C}'], ['D']),
  ('C', ['(C)'], ['(D)']),
]


def test_math_verify_reads_answers_without_delimiters():
  """The answer of the row itself is right, too. A sentence is read as its number.

  An answer that is neither LaTeX nor a single word masks its row.
  """
  pytest.importorskip('math_verify')
  reward = math_rewards.MathVerify()
  for answer, right, wrong in BARE:
    boxes = [f'\\boxed{{{text}}}' for text in (answer, *right, *wrong)]
    assert reward(boxes, [answer] * len(boxes)) == [1.0] * (1 + len(right)) + [0.0] * len(wrong), answer
  for answer in ('The answer is 42.', 'so 6*7 = 42\n#### 42', '**42**'):
    assert reward([r'\boxed{42}', r'\boxed{6}'], [answer] * 2) == [1.0, 0.0]
  for answer in ('no solution', r'\frac{1', '?', '12:30 p.m.'):
    assert reward([r'\boxed{1}'], [answer]) == [None]


def test_math_500_answers_equal_themselves_but_not_each_other(shared_data):
  """Of the answers that are not integers, every eighth is right in a box, and the next one of these is wrong."""
  pytest.importorskip('math_verify')
  answers = [row['answer'] for row in json.loads((shared_data('math') / 'math500.json').read_text())]
  answers = sorted({a for a in answers if not a.lstrip('-').isdigit()})[::8]
  assert len(answers) > 20
  boxes = [f'so \\boxed{{{a}}}' for a in answers]
  reward = math_rewards.MathVerify()
  assert reward(boxes, answers) == [1.0] * len(answers)
  assert reward(boxes[1:] + boxes[:1], answers) == [0.0] * len(answers)


def test_math_verify_without_its_package_is_refused(monkeypatch):
  monkeypatch.setitem(sys.modules, 'math_verify', None)
  with pytest.raises(InputError, match=r"'math_verify', .*'.\[math\]'"):
    math_rewards.MathVerify()


@pytest.mark.parametrize('text', ['', '\u00e4 \U0001f600', '\ud800', '{' * 9999])
def test_odd_texts_are_wrong_rather_than_errors(text):
  for reward in (math_rewards.exact_match, math_rewards.numeric_match, math_rewards.gsm8k):
    for completion in (text, [{'role': 'assistant', 'content': text}]):
      assert reward([completion], ['42']) == [0.0]


def test_gsm8k_answers_equal_themselves(shared_data):
  for name, rows in (('train', 7473), ('test', 1319)):
    text = (shared_data('gsm8k') / f'{name}.jsonl').read_text()
    answers = [json.loads(line)['answer'] for line in text.splitlines()]
    assert len(answers) == rows
    assert math_rewards.gsm8k(answers, answers) == [1.0] * rows
    assert [math_rewards.delimited(a) for a in answers] == answers  # so that math_verify takes none for bare LaTeX
    # The number after ####, read without code of the library
    golds = [a.split('#### ')[1].replace(',', '') for a in answers]
    assert [str(math_rewards.final_number(a)) for a in answers] == golds
    assert math_rewards.gsm8k([f'{g}1' for g in golds], answers) == [0.0] * rows


def test_unknown_builtin_is_named_with_a_suggestion():
  with pytest.raises(InputError, match="'gsm8'.*mean 'gsm8k'.*exact_match"):
    builtin.locate('gsm8')
  with pytest.raises(InputError, match='is an int'):
    builtin.locate(3)


def test_short_names_of_rewards_are_unique():
  fn = text_of
  assert builtin.short_names(('gsm8k', './a.py:f', 'b:f', fn)) == ('gsm8k', './a.py:f', 'b:f', 'text_of')
  with pytest.raises(InputError, match='given twice'):
    builtin.short_names(('gsm8k', 'gsm8k'))
