"""Tests of on-policy distillation from teachers with other tokenizers (`algorithm=opd`, `distill.align=text`)."""

import itertools
import json
import shutil

import jax
import numpy as np
import proofs
import pytest
import test_distill_runs as runs
import tiny
from test_distill_text import MERGES, save_tokenizer

import jaxpost
from jaxpost import stages
from jaxpost.algorithms import teacher_text
from jaxpost.data import tokenizer
from jaxpost.errors import InputError
from jaxpost.planning import aot, dry_run, machines, roofline
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Prompt, Rollout

QUIET = runs.QUIET


def text_config(student, *teachers, **over):
  base = dict(
    algorithm='opd',
    model=dict(tokenizer=''),
    reward='',
    rl=dict(kl_coef=0.5),
    distill=dict(teachers=teachers, align='text'),
    rollout=dict(max_prompt_length=40, max_new_tokens=8),
  )
  return tiny.merged(tiny.grpo_config(student), tiny.merged(base, over))


def folder_with_tokens(path, end, merges, **fields):
  """Writes a model with a tokenizer of these merges, which ends turns with `end`; returns the folder."""
  size = save_tokenizer(path.parent / 'tokens', merges, end)
  folder = tiny.folder(path, vocab_size=size, **fields)
  shutil.copytree(path.parent / 'tokens', folder, dirs_exist_ok=True)
  return folder


STUDENT_MERGES = [('2', '+'), ('=', '5')]


@pytest.fixture(scope='module')
def student(tmp_path_factory):
  return folder_with_tokens(tmp_path_factory.mktemp('student') / 'model', '<end>', STUDENT_MERGES)


@pytest.fixture(scope='module')
def same(tmp_path_factory):
  """Returns the folder of another model with the tokenizer of the student."""
  path = tmp_path_factory.mktemp('same') / 'model'
  return folder_with_tokens(path, '<end>', STUDENT_MERGES, hidden_size=32, num_layers=2)


@pytest.fixture(scope='module')
def other(tmp_path_factory):
  """Returns the folder of a model whose tokenizer joins other letters than the student's."""
  return folder_with_tokens(tmp_path_factory.mktemp('other') / 'model', '</s>', MERGES, num_layers=2)


def chats(path, number=10):
  """Writes prompts, every other one as plain text; returns the path."""
  prompts = [f'{n}+{n}=' for n in range(number)]
  rows = [{'prompt': p if n % 2 else [dict(role='user', content=p)]} for n, p in enumerate(prompts)]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(path)


# Text of an answer: (tokens of the student, tokens of the other model) of each span, without the end of the turn.
# The student writes 12+4=5 as 1|2+|4|=5, and the other model as 12|+4|=|5.
SPANS = {
  '12+4=5': ((3, 2), (1, 2)),
  '3+412': ((2, 1), (1, 1), (2, 1)),
  'é =1': ((1, 1), (1, 1), (1, 1), (2, 1)),
  '32+4': ((1, 1), (2, 2)),
  '12': ((2, 1),),
  'a': ((1, 1),),
  '': (),
}


def first_item(config):
  """Returns the first item of a stage whose student samples the texts of SPANS in turn, every third one cut off."""
  _, stream = jaxpost.policy_and_stream(config)
  own = tokenizer.load(config['model']['path'])
  sample = stream.sampler

  def sampler(*args, **kwargs):
    rollout = sample(*args, **kwargs)
    completions, lengths = np.zeros_like(rollout.completions), np.zeros_like(rollout.lengths)
    finished = np.arange(len(lengths)) % 3 != 2
    for n, text in zip(range(len(lengths)), itertools.cycle(SPANS)):
      ids = own.encode(text) + [own.eos_id] * int(finished[n])
      completions[n, : len(ids)], lengths[n] = ids, len(ids)
    return rollout.replace(completions=completions, lengths=lengths, finished=finished)

  stream.sampler = sampler
  try:
    return next(stream)
  finally:
    stream.close()


def test_a_teacher_with_the_same_tokenizer_gives_the_numbers_of_the_plain_route(student, same, tmp_path):
  config = text_config(student, same, student, data=dict(path=chats(tmp_path / 'data.jsonl')))
  text = first_item(config)
  plain = first_item(tiny.merged(config, dict(distill=dict(align='tokens'))))
  assert text.info['aligned'] == 1 and 'aligned' not in plain.info
  assert np.abs(plain.experience.arrays['ref_logprobs'] - plain.experience.arrays['old_logprobs']).max() > 0.1
  mask = plain.experience.mask > 0
  np.testing.assert_allclose(
    text.experience.arrays['ref_logprobs'][mask], plain.experience.arrays['ref_logprobs'][mask], rtol=1e-6
  )
  np.testing.assert_allclose(text.credit.arrays['advantages'], plain.credit.arrays['advantages'], rtol=1e-5, atol=1e-6)
  assert text.info['kl'] == pytest.approx(plain.info['kl'], rel=1e-6)
  for a, b in zip(jax.tree.leaves(text.updates[0].batch), jax.tree.leaves(plain.updates[0].batch), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def teacher_logprobs(folder, ids, start):
  """Returns the log-probs of ids[start:] in float64, computed without the library's scoring."""
  logits = np.float64(tiny.logits(*tiny.load(folder), np.asarray(ids)[None])[0])[start - 1 : -1]
  return logits[np.arange(len(ids) - start), ids[start:]] - np.log(np.exp(logits).sum(axis=1))


def test_the_log_ratios_of_a_span_sum_to_that_of_its_text(student, other, tmp_path):
  item = first_item(text_config(student, other, data=dict(path=chats(tmp_path / 'data.jsonl'))))
  theirs = tokenizer.load(other)
  experience, rollout = item.experience, item.experience.rollout
  kinds = set()
  for n, text in zip(range(len(rollout.lengths)), itertools.cycle(SPANS)):
    prompt = rollout.prompts[n // 4].prompt
    is_chat = not isinstance(prompt, str)
    start = theirs.encode(f'[user]{prompt[0]["content"]}</s>[assistant]' if is_chat else prompt)
    end = [theirs.eos_id] * int(rollout.finished[n])
    logprobs = teacher_logprobs(other, start + theirs.encode(text) + end, len(start))
    old, ref = (experience.arrays[name][n].astype(np.float64) for name in ('old_logprobs', 'ref_logprobs'))
    mine = their = 0
    for tokens, their_tokens in (*SPANS[text], *[(1, 1)] * len(end)):
      part = slice(mine, mine + tokens)
      ratio = logprobs[their : their + their_tokens].sum() - old[part].sum()
      np.testing.assert_allclose((ref - old)[part], ratio / tokens, rtol=1e-4, atol=2e-5)
      mine, their = mine + tokens, their + their_tokens
    assert (mine, their) == (rollout.lengths[n], len(logprobs))
    kinds.add((is_chat, bool(end)))
  assert len(kinds) == 4 and item.info['aligned'] == 1
  advantages = 0.5 * (experience.arrays['ref_logprobs'] - experience.arrays['old_logprobs']) * experience.mask
  np.testing.assert_allclose(item.credit.arrays['advantages'], advantages, rtol=1e-5, atol=1e-6)


def test_added_tokens_are_read_as_text_and_special_tokens_end_what_is_read(other, tmp_path):
  """<think> is text to both models, though decoding hides it; an id without a token, and <|im_start|>, are no text."""
  bytes_ = tokenizer.load('bytes')
  bytes_.save(tmp_path)
  path = tmp_path / 'tokenizer_config.json'
  saved = json.loads((tmp_path / 'tokenizer.json').read_text())
  saved['added_tokens'].append(dict(saved['added_tokens'][0], id=259, content='<think>', special=True))
  (tmp_path / 'tokenizer.json').write_text(json.dumps(saved))
  decoder = json.loads(path.read_text())
  think = dict(content='<think>', lstrip=False, normalized=False, rstrip=False, single_word=False, special=False)
  decoder['added_tokens_decoder'] = {'259': think} | decoder.get('added_tokens_decoder', {})
  path.write_text(json.dumps(decoder))
  own = tokenizer.load(tmp_path)
  ids = own.encode('<think>12')
  assert ids == [259, 49, 50] and own.decode(ids) == '12'
  teacher = teacher_text.TextTeacher(
    None, None, None, None, tokenizer=tokenizer.load(other), student_tokenizer=own, room=99
  )
  # A model may have more ids than its tokenizer has tokens.
  completions = np.array([[*ids, 300], [49, 257, 50, 258]], np.int32)
  zeros = np.zeros(completions.shape, np.float32)
  prompts = (Prompt(0, np.array([65], np.int32), 'A', {}),)
  rollout = Rollout(prompts, completions, np.array([4, 4]), zeros, zeros, finished=np.array([False, True]))
  reading = teacher.reading(rollout)
  texts = [teacher.tokenizer.decode(x[:size]) for x, size in zip(reading.completions, reading.lengths)]
  assert texts == ['<think>12', '1'] and reading.lengths[1] == 1  # without the end of the turn
  logprobs, aligned = teacher.align(rollout, reading, np.full(reading.completions.shape, -1.0, np.float32), zeros)
  np.testing.assert_allclose(logprobs, [[-7, -0.5, -0.5, 0], [-1, 0, 0, 0]], rtol=1e-6)
  assert aligned.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_nothing_is_read_from_a_special_token_of_the_teacher_on():
  """Text that spells one, as </s> of an HTML page may, is that token to the teacher, and no text."""
  own = tokenizer.load('bytes')
  teacher = teacher_text.TextTeacher(None, None, None, None, tokenizer=own, student_tokenizer=own, room=99)
  completions = np.array([[*b'a<|im_end|>b', own.eos_id]], np.int32)
  zeros = np.zeros(completions.shape, np.float32)
  prompts = (Prompt(0, np.array([65], np.int32), 'A', {}),)
  rollout = Rollout(prompts, completions, np.array([completions.size]), zeros, zeros, finished=np.array([True]))
  reading = teacher.reading(rollout)
  assert reading.completions.tolist() == [[*b'a']] and reading.lengths.tolist() == [1]
  logprobs, aligned = teacher.align(rollout, reading, np.full((1, 1), -2.0, np.float32), zeros)
  assert logprobs[0, 0] == -2 and not logprobs[0, 1:].any() and aligned.sum() == 1


def test_tokens_without_a_teacher_get_no_signal(student, other, tmp_path):
  """A prompt with too many tokens for the teacher leaves no room for the answers, and another one room for 3 tokens."""
  path = tmp_path / 'data.jsonl'
  path.write_text(json.dumps({'prompt': '2+' * 19}) + '\n')  # 19 tokens of the student, 38 of the other model
  item = first_item(text_config(student, other, data=dict(path=str(path)), rollout=dict(max_prompt_length=19)))
  length = 19 + 8 - 38
  assert length < 0 and item.info['aligned'] == 0 and item.info['kl'] == 0
  assert not item.credit.arrays['advantages'].any()
  path.write_text(json.dumps({'prompt': '2+' * 12}) + '\n')  # 12 and 24 tokens: 3 tokens of an answer fit
  item = first_item(text_config(student, other, data=dict(path=str(path)), rollout=dict(max_prompt_length=19)))
  has_teacher = item.experience.arrays['aligned'] > 0
  assert has_teacher[0].tolist() == [True] * 3 + [False] * 5  # 12+4 has two tokens of the teacher, and =5 two more
  assert item.info['aligned'] == pytest.approx(has_teacher.sum() / item.experience.mask.sum())
  assert not item.credit.arrays['advantages'][~has_teacher].any()


def test_the_teachers_of_a_source_are_weighed_with_their_alignment(student, same, other, tmp_path):
  """One teacher reads the student's tokens and one its own: the log-ratios are weighed like those of plain teachers."""
  over = dict(data=dict(path=chats(tmp_path / 'data.jsonl')))
  ratios = []
  for names, weights in (((same,), ()), ((other,), ()), ((same, other), (1.0, 3.0))):
    arrays = first_item(text_config(student, *names, **over, distill=dict(weights=weights))).experience.arrays
    ratios.append(arrays['ref_logprobs'] - arrays['old_logprobs'])
  np.testing.assert_allclose(ratios[2], 0.25 * ratios[0] + 0.75 * ratios[1], rtol=1e-4, atol=1e-5)


def test_a_privileged_prompt_is_read_in_the_tokens_of_the_teacher(student, other, tmp_path):
  rows = [dict(prompt=f'{n}+{n}=', hint=f'It is {2 * n}. {n}+{n}=') for n in range(4)]
  (tmp_path / 'hints.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = text_config(student, other, data=dict(path=str(tmp_path / 'hints.jsonl')), rl=dict(privileged='hint'))
  experience = first_item(config).experience
  theirs, rollout = tokenizer.load(other), experience.rollout
  start = theirs.encode(rollout.prompts[0].columns['hint'])
  logprobs = teacher_logprobs(other, [*start, *theirs.encode('12+4=5'), theirs.eos_id], len(start))
  assert experience.arrays['ref_logprobs'][0, :5].sum() == pytest.approx(logprobs.sum(), rel=1e-5)


# ----------------------------------------------------------------------- runs


def trained(folder, tokens, steps, **fields):
  """Returns the folder of a model that has learned sums for some steps, with the tokenizer in the folder `tokens`."""
  start = tiny.folder(folder / 'start', vocab_size=len(tokenizer.load(tokens).hf), **fields)
  config = runs.settings(
    start, '', algorithm='sft', distill=dict(teachers=()), optim=dict(lr=1e-2), eval=dict(data=dict(path=''))
  )
  config['model']['tokenizer'] = str(tokens)
  config['train']['steps'] = steps
  config['save']['export'] = True
  stages.run(config, folder / 'run', QUIET)
  return str(folder / 'run' / 'export')


@pytest.fixture(scope='module')
def learners(tmp_path_factory, student, other):
  """Returns the folders of a student that writes digits, and of a teacher that has learned more."""
  path = tmp_path_factory.mktemp('learners')
  return (trained(path / 'student', student, 20), trained(path / 'teacher', other, 80, hidden_size=32, num_layers=2))


def learning_config(learners, **over):
  base = dict(
    data=dict(path=f'{runs.TASK},split=train,size=40'),
    rl=dict(kl_coef=1.0),
    optim=dict(lr=3e-3),
    rollout=dict(prompts=16, group_size=1),
  )
  return text_config(*learners, **tiny.merged(base, over))


@pytest.mark.long
def test_the_student_learns_from_a_teacher_with_another_tokenizer(learners, tmp_path):
  rows = runs.run(learning_config(learners, train=dict(steps=25)), tmp_path)
  assert np.mean([row['aligned'] for row in rows]) > 0.7
  assert np.mean([row['kl'] for row in rows[-5:]]) < 0.7 * np.mean([row['kl'] for row in rows[:5]])


@pytest.mark.long
def test_a_run_resumes_bit_for_bit(learners, tmp_path):
  config = learning_config(learners, train=dict(steps=4), save=dict(every=2, export=True))
  proofs.check_lost_steps(config, tmp_path)


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(distill=dict(teachers=()), rl=dict(reference='x')), 'config.distill.align: text needs config.distill.teach'),
    (dict(rollout=dict(temperature=0.7)), 'config.rollout.temperature: probabilities of texts have none'),
    (dict(rl=dict(sources=('a?temperature=0.7',))), 'config.rl.sources: probabilities of texts have no temperature'),
    (dict(rl=dict(sampling_mask=True), rollout=dict(top_k=5)), 'config.distill.align: text goes with neither'),
    (dict(rl=dict(kl_in='loss')), 'config.rl.kl_in: loss compares tokens'),
    (dict(environment='x'), 'config.distill.align: text goes with neither'),
    (dict(distill=dict(top_k=5)), 'config.distill.top_k: opd would ignore it'),
    (dict(algorithm='gkd'), 'config.distill.align: gkd reads .* use algorithm=opd'),
  ],
)
def test_options_that_do_not_go_with_texts_are_refused(over, message):
  fields = tiny.merged(dict(algorithm='opd', distill=dict(teachers=('a',), align='text')), over)
  method = algorithms.load_algorithm(fields['algorithm'])
  with pytest.raises(InputError, match=message):
    method.check(config_lib.resolve(next(iter(config_lib.parse(fields).values())), method.defaults))


def test_a_teacher_without_a_tokenizer_is_refused(student, tmp_path):
  bare = tiny.folder(tmp_path / 'bare')
  with pytest.raises(InputError, match='has no tokenizer of its own'):
    runs.prepare.prepare_all(text_config(student, bare, data=dict(path=chats(tmp_path / 'data.jsonl'))))


def test_a_template_that_refuses_a_prompt_is_refused_before_the_first_step(student, tmp_path):
  folder = folder_with_tokens(tmp_path / 'tokens_of_teacher' / 'model', '</s>', MERGES)
  (tmp_path / 'tokens_of_teacher' / 'model' / 'chat_template.jinja').write_text("{{ raise_exception('no chats') }}")
  with pytest.raises(InputError, match='config.distill.teachers: prompt .*no chats'):
    jaxpost.policy_and_stream(text_config(student, folder, data=dict(path=chats(tmp_path / 'data.jsonl'))))
  # With another prompt for the teacher, that one counts.
  row = dict(prompt=[dict(role='user', content='1+1=')], hint='It is 2. 1+1=')
  for name, (prompt, hint) in dict(taken=('prompt', 'hint'), refused=('hint', 'prompt')).items():
    (tmp_path / f'{name}.jsonl').write_text(json.dumps({'prompt': row[prompt], 'hint': row[hint]}) + '\n')
  config = text_config(student, folder, data=dict(path=str(tmp_path / 'taken.jsonl')), rl=dict(privileged='hint'))
  jaxpost.policy_and_stream(config)[1].close()
  config['data']['path'] = str(tmp_path / 'refused.jsonl')
  with pytest.raises(InputError, match='config.distill.teachers: prompt .*no chats'):
    jaxpost.policy_and_stream(config)


# ----------------------------------------------------------------------- plan


def test_a_plan_has_the_programs_of_the_student_and_of_its_teacher(student, other):
  """The teacher scores in its own vocabulary; a plan needs neither its tokenizer nor prompts."""
  config = text_config(student, other, rollout=dict(prompts=1, group_size=1, max_prompt_length=8))
  (prepared,) = dry_run.prepare_all(config)
  compiled = aot.compile_stage(prepared, machines.parse('cpu'), ('score',))
  assert [row['program'] for row in compiled.rows] == ['score'] * 2
  assert len({row['arguments']['parameters'] for row in compiled.rows}) == 2
  assert roofline.step_of(compiled.placed).calls['score'] == 2
