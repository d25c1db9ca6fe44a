"""Suites of launch.evaluate: tiny files of each format, verdicts by hand."""

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
ASKED = {
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
def test_suites_that_sample(name, weights, tmp_path):
  data = write(tmp_path / 'd.jsonl', ASKED[name], ASKED[name])
  draws = completions.Draws(n=1, max_new_tokens=4, temperature=0.0)
  found = suites.measure(name, weights, data, str(tmp_path / 'out'), draws, size=1)
  assert found['suite'] == name and found['count'] == 1 and found['pass@1'] in (0.0, 1.0)
  (row,) = (json.loads(line) for line in (tmp_path / 'out/completions.jsonl').read_text().splitlines())
  text = row['completions'][0]
  right = {'gsm8k': '2' in text, 'ifeval': ',' not in text}[name]
  assert found['pass@1'] == right


def test_math_is_asked_for_a_box(tmp_path):
  """Its reward needs the extra [math]; the prompt is that of training."""
  row = score_dataset.read(write(tmp_path / 'd.jsonl', ASKED['math500']), map_fn=suites.SUITES['math500'].map)[0]
  assert r'\boxed{}' in row['prompt'][0]['content'] and row['answer'] == '2'


def test_instructions_that_are_added_are_said(tmp_path, capsys):
  (tmp_path / 'd.jsonl').write_text('{"question": "1+1=", "answer": "2"}\n')
  path = str(tmp_path / 'd.jsonl')
  assert '####' in score_dataset.read(path)[0]['prompt'][0]['content']
  assert 'jaxpost.data.maps:gsm8k, which adds' in capsys.readouterr().err
  assert score_dataset.read(path, 'prompt=question')[0]['prompt'] == '1+1='
  assert not capsys.readouterr().err


def log_prob(weights, text, answer):
  """By a whole forward pass in float32."""
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


def test_choices_have_their_log_probs(weights):
  rows = [
    ASKED['choices'],
    {'question': 'A much longer question ' * 4, 'choices': ['yes', 'no', 'why not'], 'answer': 'B'},
  ]
  asked = [choices.question(row, 'x', letters=False) for row in rows]
  examples = [e for q in asked for e in choices._examples(q, weights.inputs.tokenizer)]
  found = [s.logprobs.sum() for s in scoring.Scorer(weights)(examples)]
  wanted = []
  for q in asked:
    prompt, _ = weights.inputs.tokenizer.render_chat([{'role': 'user', 'content': q.prompt}], generation_prompt=True)
    wanted += [log_prob(weights, prompt, answer) for answer in q.answers]
  np.testing.assert_allclose(found, wanted, rtol=0.02)
  right = [max(range(2), key=found[:2].__getitem__) == 0, max(range(3), key=found[2:].__getitem__) == 1]
  assert choices.measure(weights, asked)['accuracy'] == np.mean(right)


def test_subjects_and_bytes(weights, monkeypatch):
  """A long answer loses by its sum and wins by its bytes."""
  sums = [scoring.TextScore(np.array([x]), None, None) for x in (-3.0, -4.0, -1.0, -2.0)]
  monkeypatch.setattr(scoring, 'Scorer', lambda weights: lambda examples, where: iter(sums))
  rows = [{'question': 'q', 'choices': ['a', 'bbbb'], 'answer': 1, 'subject': s} for s in ('x', 'y')]
  found = choices.measure(weights, [choices.question(row, 'w', False) for row in rows])
  assert found == {'accuracy': 0.0, 'accuracy_by_bytes': 1.0, 'count': 2, 'accuracy/x': 0.0, 'accuracy/y': 0.0}


def test_answers_are_numbers_letters_or_texts():
  for answer, right in ((1, 1), ('B', 1), ('c', 2), ('5', 3)):
    assert choices.question({**ASKED['mmlu'], 'answer': answer}, 'x', True).right == right
  shown = choices.question(ASKED['mmlu'], 'x', True)
  assert shown.prompt == 'Which is even?\nA. 1\nB. 2\nC. 3\nD. 5\nAnswer:' and shown.answers == ('A', 'B', 'C', 'D')
  for bad in (4, -1, True, 'E', 1.0, '', '  ', 'AB', 'BC', 'ABCD'):
    with pytest.raises(InputError, match='f.jsonl:3: answer'):
      choices.question({**ASKED['mmlu'], 'answer': bad}, 'f.jsonl:3', True)
  for row in ({'question': 'q'}, {**ASKED['mmlu'], 'answer': None}):
    with pytest.raises(InputError, match='want question, choices and answer; has no (choices|answer)'):
      choices.question(row, 'f.jsonl:3', True)


@pytest.mark.parametrize('letters', [True, False])
def test_choices_are_a_list_of_texts(letters):
  """A CSV has one text, whose characters were the choices."""
  for bad in ('["a", "b"]', 'AB', ['a'], [], {'text': ['a', 'b']}, 3):
    with pytest.raises(InputError, match='f.csv:3: choices: .*: want a list of two or more texts'):
      choices.question({**ASKED['mmlu'], 'choices': bad}, 'f.csv:3', letters)
  for bad, words in (
    (['a', ''], 'is empty'),
    (['a', None], 'is null'),
    (['a', 2], 'is an int'),
    (['a', ['b']], 'list'),
  ):
    with pytest.raises(InputError, match=rf'f.csv:3: choices\[1\]: .*{words}'):
      choices.question({**ASKED['mmlu'], 'choices': bad}, 'f.csv:3', letters)


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
def test_instructions(name):
  given, good, bad = GOOD_AND_BAD[name]
  given = given | {'of_others': None}  # data files have all arguments of all instructions, most of them null
  found = ifeval.ifeval([good, bad], instruction_id_list=[[name]] * 2, kwargs=[[given]] * 2)
  assert found == [1.0, 0.0]


def test_all_instructions_count_and_unknown_ones_give_no_verdict():
  ids = ['punctuation:no_comma', 'startend:quotation']
  found = ifeval.ifeval(['"a"', '"a, b"', 'a'], instruction_id_list=[ids] * 3, kwargs=[[{}, {}]] * 3)
  assert found == [1.0, 0.0, 0.0]
  assert ifeval.ifeval(['x'], instruction_id_list=[['language:response_language']], kwargs=[[{'language': 'de'}]]) == [
    None
  ]


def test_the_reward_has_a_name():
  with RewardPool('ifeval', workers=1) as pool:
    pool.check(['prompt', 'instruction_id_list', 'kwargs'])


def test_mistakes_are_one_line(weights, tmp_path):
  with pytest.raises(InputError, match="did you mean 'gsm8k'.*known: gsm8k"):
    suites.find('gms8k')
  data = write(tmp_path / 'd.jsonl', {'text': 'x'})
  with pytest.raises(InputError, match='--suite=mmlu: .*d.jsonl: rows lack question, choices, answer'):
    suites.measure('mmlu', weights, data, '', completions.Draws())


def test_the_command(folder, tmp_path):
  data = write(tmp_path / 'd.jsonl', *[ASKED['mmlu']] * 3)
  command = [sys.executable, '-m', 'launch.evaluate', f'--model={folder}', '--suite=mmlu', f'--data={data}', '--size=2']
  done = subprocess.run(command, capture_output=True, text=True, cwd=CLONE, env=children.environment())
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads(done.stdout)
  assert found['suite'] == 'mmlu' and found['count'] == 2 and math.isfinite(found['accuracy/math'])


@pytest.mark.parametrize('args, words', [(['--suite=mmlu'], '--data'), (['--suite=mmlu', '--reward=x'], '--suite')])
def test_flags_that_do_not_go_together(args, words, folder):
  command = [sys.executable, '-m', 'launch.evaluate', f'--model={folder}', *args]
  done = subprocess.run(command, capture_output=True, text=True, cwd=CLONE, env=children.environment())
  assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
