"""`launch.evaluate --suite`: GSM8K, MATH, IFEval and multiple choice on tiny files, with verdicts made by hand."""

import json
import math
import pathlib
import subprocess
import sys

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.data import tokenizer
from jaxpost.errors import InputError
from jaxpost.rewards import ifeval
from jaxpost.rewards.pool import RewardPool
from jaxpost.tools import choices, completions, inference, score_dataset, scoring, suites

CLONE = pathlib.Path(__file__).resolve().parents[1]
# A row in the format of each suite.
ROWS = {
  'gsm8k': {'question': '1+1?', 'answer': 'It is 2.\n#### 2'},
  'math500': {'problem': 'What is $1+1$?', 'answer': '2', 'solution': r'\boxed{2}', 'subject': 'x'},
  'ifeval': {
    'key': 1,
    'prompt': 'Write without commas.',
    'instruction_id_list': ['punctuation:no_comma'],
    'kwargs': [{}],
  },
  'mmlu': {'question': 'Which is even?', 'choices': ['1', '2', '3', '5'], 'answer': 1, 'subject': 'math'},
  'choices': {'question': 'The sky is', 'choices': ['blue', 'a fish'], 'answer': 'blue'},
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tiny.folder(tmp_path_factory.mktemp('model') / 'nano')
  tokenizer.load('bytes').save(path)
  return path


@pytest.fixture(scope='module')
def weights(folder):
  return inference.from_folder(folder)


def write(path, *rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(path)


@pytest.mark.parametrize('name', ['gsm8k', 'ifeval'])
def test_sampling_suite_grades_its_completions(name, weights, tmp_path):
  data = write(tmp_path / 'd.jsonl', ROWS[name], ROWS[name])
  draws = completions.Draws(n=1, max_new_tokens=4, temperature=0.0)
  summary = suites.measure(name, weights, data, str(tmp_path / 'out'), draws, size=1)
  assert summary['suite'] == name and summary['count'] == 1 and summary['pass@1'] in (0.0, 1.0)
  (row,) = (json.loads(line) for line in (tmp_path / 'out/completions.jsonl').read_text().splitlines())
  text = row['completions'][0]
  right = {'gsm8k': '2' in text, 'ifeval': ',' not in text}[name]
  assert summary['pass@1'] == right


def test_math_prompt_asks_for_a_box(tmp_path):
  """Only the prompt is tested, which is that of training, as the reward needs the extra [math]."""
  row = score_dataset.read(write(tmp_path / 'd.jsonl', ROWS['math500']), map_fn=suites.SUITES['math500'].map)[0]
  assert r'\boxed{}' in row['prompt'][0]['content'] and row['answer'] == '2'


def test_instructions_added_to_the_prompt_are_reported(tmp_path, capsys):
  (tmp_path / 'd.jsonl').write_text('{"question": "1+1=", "answer": "2"}\n')
  path = str(tmp_path / 'd.jsonl')
  assert '####' in score_dataset.read(path)[0]['prompt'][0]['content']
  assert 'jaxpost.data.maps:gsm8k, which adds' in capsys.readouterr().err
  assert score_dataset.read(path, 'prompt=question')[0]['prompt'] == '1+1='
  assert not capsys.readouterr().err


def log_prob(weights, text, answer):
  """The log-prob of `answer` after `text`, by a forward pass over both in float32."""
  model, tokens = weights.inputs.model, weights.inputs.tokenizer
  head, tail = tokens.encode(text), tokens.encode(answer)
  ids = jnp.array([head + tail])
  from jaxpost.matmul import compute_for

  compute = compute_for('cpu', 'float32', 'none')
  where = jnp.arange(ids.shape[1])[None]
  hidden = model.forward(weights.params, ids, where, jnp.ones_like(ids), compute=compute, constrain=lambda x, *_: x)
  logits = hidden @ model.head(weights.params).T
  scores = jax.nn.log_softmax(logits[0, :, : model.config.vocab_size])
  return float(sum(scores[len(head) - 1 + i, token] for i, token in enumerate(tail)))


def test_choices_are_scored_by_log_probs_of_the_model(weights):
  rows = [
    ROWS['choices'],
    {'question': 'A much longer question ' * 4, 'choices': ['yes', 'no', 'why not'], 'answer': 'B'},
  ]
  questions = [choices.question(row, 'x', letters=False) for row in rows]
  examples = [e for q in questions for e in choices._examples(q, weights.inputs.tokenizer)]
  actual = [s.logprobs.sum() for s in scoring.Scorer(weights)(examples)]
  expected = []
  for q in questions:
    prompt, _ = weights.inputs.tokenizer.render_chat([{'role': 'user', 'content': q.prompt}], generation_prompt=True)
    expected += [log_prob(weights, prompt, answer) for answer in q.answers]
  np.testing.assert_allclose(actual, expected, rtol=0.02)
  right = [max(range(2), key=actual[:2].__getitem__) == 0, max(range(3), key=actual[2:].__getitem__) == 1]
  assert choices.measure(weights, questions)['accuracy'] == np.mean(right)


def test_accuracy_by_subject_and_by_bytes(weights, monkeypatch):
  """The right answer is longer: its log-prob is lower, but higher if divided by its bytes."""
  sums = [scoring.TextScore(np.array([x]), None, None) for x in (-3.0, -4.0, -1.0, -2.0)]
  monkeypatch.setattr(scoring, 'Scorer', lambda weights: lambda examples, where: iter(sums))
  rows = [{'question': 'q', 'choices': ['a', 'bbbb'], 'answer': 1, 'subject': s} for s in ('x', 'y')]
  summary = choices.measure(weights, [choices.question(row, 'w', False) for row in rows])
  assert summary == {'accuracy': 0.0, 'accuracy_by_bytes': 1.0, 'count': 2, 'accuracy/x': 0.0, 'accuracy/y': 0.0}


def test_answer_may_be_number_letter_or_text_of_a_choice():
  for answer, right in ((1, 1), ('B', 1), ('c', 2), ('5', 3)):
    assert choices.question({**ROWS['mmlu'], 'answer': answer}, 'x', True).right == right
  shown = choices.question(ROWS['mmlu'], 'x', True)
  assert shown.prompt == 'Which is even?\nA. 1\nB. 2\nC. 3\nD. 5\nAnswer:' and shown.answers == ('A', 'B', 'C', 'D')
  for bad in (4, -1, True, 'E', 1.0, '', '  ', 'AB', 'BC', 'ABCD'):
    with pytest.raises(InputError, match='f.jsonl:3: answer'):
      choices.question({**ROWS['mmlu'], 'answer': bad}, 'f.jsonl:3', True)
  for row in ({'question': 'q'}, {**ROWS['mmlu'], 'answer': None}):
    with pytest.raises(InputError, match='want question, choices and answer; has no (choices|answer)'):
      choices.question(row, 'f.jsonl:3', True)


@pytest.mark.parametrize('letters', [True, False])
def test_choices_that_are_no_list_of_texts_are_refused(letters):
  """A CSV has one text, whose characters must not become the choices."""
  for bad in ('["a", "b"]', 'AB', ['a'], [], {'text': ['a', 'b']}, 3):
    with pytest.raises(InputError, match='f.csv:3: choices: .*: want a list of two or more texts'):
      choices.question({**ROWS['mmlu'], 'choices': bad}, 'f.csv:3', letters)
  for bad, words in (
    (['a', ''], 'is empty'),
    (['a', None], 'is null'),
    (['a', 2], 'is an int'),
    (['a', ['b']], 'list'),
  ):
    with pytest.raises(InputError, match=rf'f.csv:3: choices\[1\]: .*{words}'):
      choices.question({**ROWS['mmlu'], 'choices': bad}, 'f.csv:3', letters)


# Instruction -> (its arguments, an answer that follows it, one that does not).
GOOD_AND_BAD = {
  'keywords:existence': (dict(keywords=['red', 'fox']), 'A Red fox.', 'A reddish fox.'),
  'keywords:forbidden_words': (dict(forbidden_words=['no']), 'none', 'No.'),
  'keywords:frequency': (dict(keyword='a', frequency=2, relation='at least'), 'a b a', 'a b'),
  'keywords:letter_frequency': (dict(letter='z', let_frequency=2, let_relation='less than'), 'z', 'zZ'),
  'length_constraints:number_words': (dict(num_words=3, relation='less than'), 'two words', 'now three words'),
  'length_constraints:number_sentences': (dict(num_sentences=2, relation='at least'), 'One. Two!', 'One, two.'),
  'length_constraints:number_paragraphs': (dict(num_paragraphs=2), 'a\n***\nb', 'a\n***\n'),
  'detectable_content:number_placeholders': (dict(num_placeholders=1), 'to [name]', 'to []'),
  'detectable_content:postscript': (dict(postscript_marker='P.S.'), 'x\nP.S. y', 'x'),
  'detectable_format:number_bullet_lists': (dict(num_bullets=2), '* a\n- b', '* a\n* b\n* c'),
  'detectable_format:number_highlighted_sections': (dict(num_highlights=1), 'a *b c* d', 'a * b'),
  'detectable_format:multiple_sections': (
    dict(section_spliter='Part', num_sections=2),
    'Part 1\na\nPart 2\nb',
    'Part 1',
  ),
  'detectable_format:json_format': ({}, '```json\n{"a": 1}\n```', '{a}'),
  'detectable_format:title': ({}, '<<A tale>>\nx', '<< >>'),
  'startend:end_checker': (dict(end_phrase='The end.'), 'x the end.', 'The end. x'),
  'startend:quotation': ({}, '"x"', '"x'),
  'punctuation:no_comma': ({}, 'a b', 'a, b'),
  'change_case:english_capital': ({}, 'LOUD 1', 'Loud'),
  'change_case:english_lowercase': ({}, 'quiet 1', 'Quiet'),
  'change_case:capital_word_frequency': (
    dict(capital_frequency=2, capital_relation='at least'),
    'A BIG fox',
    'A big fox',
  ),
  'combination:two_responses': ({}, 'a\n******\nb', 'a\n******\na'),
  'combination:repeat_prompt': (dict(prompt_to_repeat='Say it.'), 'Say it. It.', 'It.'),
}


def test_every_check_has_a_case():
  assert set(GOOD_AND_BAD) == set(ifeval.CHECKS)


@pytest.mark.parametrize('name', GOOD_AND_BAD)
def test_ifeval_instruction_accepts_good_and_rejects_bad_answer(name):
  arguments, good, bad = GOOD_AND_BAD[name]
  arguments = arguments | {'of_others': None}  # data files have all arguments of all instructions, most of them null
  rewards = ifeval.ifeval([good, bad], instruction_id_list=[[name]] * 2, kwargs=[[arguments]] * 2)
  assert rewards == [1.0, 0.0]


def test_answer_must_follow_all_instructions_and_unknown_instruction_gives_none():
  ids = ['punctuation:no_comma', 'startend:quotation']
  rewards = ifeval.ifeval(['"a"', '"a, b"', 'a'], instruction_id_list=[ids] * 3, kwargs=[[{}, {}]] * 3)
  assert rewards == [1.0, 0.0, 0.0]
  assert ifeval.ifeval(['x'], instruction_id_list=[['language:response_language']], kwargs=[[{'language': 'de'}]]) == [
    None
  ]


def test_ifeval_is_a_builtin_reward():
  with RewardPool('ifeval', workers=1) as pool:
    pool.check(['prompt', 'instruction_id_list', 'kwargs'])


def test_unknown_suite_and_missing_columns_are_refused(weights, tmp_path):
  with pytest.raises(InputError, match="did you mean 'gsm8k'.*known: gsm8k"):
    suites.find('gms8k')
  data = write(tmp_path / 'd.jsonl', {'text': 'x'})
  with pytest.raises(InputError, match='--suite=mmlu: .*d.jsonl: rows lack question, choices, answer'):
    suites.measure('mmlu', weights, data, '', completions.Draws())


def test_evaluate_command_prints_the_summary(folder, tmp_path):
  data = write(tmp_path / 'd.jsonl', *[ROWS['mmlu']] * 3)
  command = [sys.executable, '-m', 'launch.evaluate', f'--model={folder}', '--suite=mmlu', f'--data={data}', '--size=2']
  done = subprocess.run(command, capture_output=True, text=True, cwd=CLONE, env=children.environment())
  assert done.returncode == 0, done.stderr[-2000:]
  summary = json.loads(done.stdout)
  assert summary['suite'] == 'mmlu' and summary['count'] == 2 and math.isfinite(summary['accuracy/math'])


@pytest.mark.parametrize('args, words', [(['--suite=mmlu'], '--data'), (['--suite=mmlu', '--reward=x'], '--suite')])
def test_incompatible_flags_are_refused(args, words, folder):
  command = [sys.executable, '-m', 'launch.evaluate', f'--model={folder}', *args]
  done = subprocess.run(command, capture_output=True, text=True, cwd=CLONE, env=children.environment())
  assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
