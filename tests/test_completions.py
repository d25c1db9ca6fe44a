"""`launch.sample`, `launch.chat` and `launch.evaluate`: prompt files, resumed outputs, chats and scores.

Legend: N prompts, n samples a prompt.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost.data import prompts as prompts_lib
from jaxpost.data import tokenizer
from jaxpost.errors import InputError
from jaxpost.rewards import math
from jaxpost.rewards.groups import Graded
from jaxpost.rollout import sampler_config
from jaxpost.stage import config as config_lib
from jaxpost.stage.evaluate import pass_at_k
from jaxpost.stage.records import Source
from jaxpost.tools import chat, completion_files, completions, inference, score_dataset

CLONE = pathlib.Path(__file__).resolve().parents[1]
DRAWS = completions.Draws(n=64, max_new_tokens=4)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tiny.folder(tmp_path_factory.mktemp('model') / 'nano')
  tokenizer.load('bytes').save(path)
  return path


@pytest.fixture(scope='module')
def weights(folder):
  return inference.from_folder(folder)


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """A file of twelve prompts of all kinds; with n=64, completions are written in three batches of four rows."""
  path = tmp_path_factory.mktemp('in') / 'in.jsonl'
  rows = [{'prompt': f'{i}+1=', 'answer': str(i + 1)} for i in range(10)]
  rows += [{'prompt_ids': [49, 43], 'answer': 'x'}, {'prompt': [{'role': 'user', 'content': 'hi'}], 'answer': 'y'}]
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
  return path


@pytest.fixture(scope='module')
def finished(weights, source, tmp_path_factory):
  out = tmp_path_factory.mktemp('out') / 'out.jsonl'
  prompts = completions.make_prompts(weights, file=str(source))
  assert completion_files.complete_file(weights, prompts, out, DRAWS) == 12
  return out


def test_rows_keep_their_columns(finished, source, weights):
  inputs = [json.loads(x) for x in source.read_text().splitlines()]
  outputs = [json.loads(x) for x in finished.read_text().splitlines()]
  assert len(inputs) == len(outputs)
  for old, new in zip(inputs, outputs):
    assert {k: new.pop(k) for k in old} == old
    assert set(new) == {'completions', 'completion_ids', 'logprobs'}
    for text, ids, logprobs in zip(*(new[k] for k in ('completions', 'completion_ids', 'logprobs')), strict=True):
      assert 1 <= len(ids) == len(logprobs) <= 4 and max(logprobs) <= 0
      assert text == weights.inputs.tokenizer.decode(ids)
    assert len({tuple(x) for x in new['completion_ids']}) > 32


def test_top_logprobs_of_each_position(weights, source, tmp_path):
  draws = dataclasses.replace(DRAWS, n=2, temperature=0.0, top_logprobs=2)
  prompts = completions.make_prompts(weights, file=str(source))
  completion_files.complete_file(weights, prompts, tmp_path / 'out.jsonl', draws)
  for line in (tmp_path / 'out.jsonl').read_text().splitlines():
    row = json.loads(line)
    for ids, logprobs, top in zip(*(row[k] for k in ('completion_ids', 'logprobs', 'top_logprobs')), strict=True):
      assert [pairs[0][0] for pairs in top] == ids  # greedy
      assert [len(pairs) for pairs in top] == [2] * len(ids)
      np.testing.assert_allclose([pairs[0][1] for pairs in top], logprobs, atol=2e-6)


def test_columns_json_cannot_hold_are_refused_before_sampling(weights, tmp_path, monkeypatch):
  import datetime
  import decimal

  import pyarrow
  import pyarrow.parquet

  monkeypatch.setattr(completion_files, 'engine_for', lambda *_: pytest.fail('an engine is made'))
  for kind, values in {
    'datetime': [None, datetime.datetime(2026, 1, 1)],
    'Decimal': [None, decimal.Decimal('1.5')],
    'bytes': [None, b'a'],
  }.items():
    pyarrow.parquet.write_table(pyarrow.table({'prompt': ['1', '2'], 'when': values}), tmp_path / 'a.parquet')
    prompts = completions.make_prompts(weights, file=str(tmp_path / 'a.parquet'))
    with pytest.raises(InputError, match=f"^prompt 1: column 'when': .*{kind} is not JSON.*make it text"):
      completion_files.complete_file(weights, prompts, tmp_path / 'out.jsonl', DRAWS)
    assert not (tmp_path / 'out.jsonl').exists()


def test_prompt_ids_are_used_unchanged_and_checked(weights, source):
  prompts = completions.make_prompts(weights, file=str(source))
  assert prompts[10].tokens.tolist() == [49, 43]
  assert 'hi' in weights.inputs.tokenizer.decode(prompts[11].tokens.tolist())
  for bad in ([], [999], 'x', [1.5]):
    row = [{'prompt_ids': bad}]
    rows = completions.sources.read('rows', fake_rows=row)
    with pytest.raises(InputError, match=r'rows\[0\].*prompt_ids'):
      completions.prompts_of(weights, rows)


def test_prompts_from_files_equal_those_of_training(weights, source):
  """Prompts and the columns for rewards equal those of a stream of training, also where there is a chat template."""
  assert weights.inputs.tokenizer.chat_template
  rows = completions.sources.read(source)[:2]
  stream = prompts_lib.PromptStream(
    rows, weights.inputs.tokenizer, per_step=2, max_prompt_length=64, seed=0, shuffle=False
  )
  for typed, trained in zip(completions.make_prompts(weights, file=str(source)), next(stream)[0]):
    assert typed.tokens.tolist() == trained.tokens.tolist() and typed.prompt == trained.prompt
    group = score_dataset._group(typed, dict(completions=['1', '2'], completion_ids=[[49], [50]]))
    assert group.prompts == [typed.prompt] * 2 and group.completions == ['1', '2']
  (as_chat, *_) = completions.make_prompts(weights, file=str(source), as_chat=True)
  assert as_chat.prompt == [{'role': 'user', 'content': '0+1='}]


@pytest.mark.parametrize(
  'row, data, plain',
  [
    ({'prompt': '1+1=', 'completion': '2'}, {}, True),
    ({'text': 'once'}, {}, True),
    ({'question': '1+1='}, dict(columns='prompt=question'), True),
    ({'prompt': '1+1='}, dict(map='jaxpost.data.maps:as_chat'), False),
    ({'messages': [{'role': 'user', 'content': 'hi'}]}, {}, False),
    (None, {}, False),
  ],
)
def test_typed_prompt_has_the_form_of_the_training_data(weights, tmp_path, row, data, plain):
  """`as_chat` overrides the form of the data. Without data, it is a user message, or plain text without a template."""
  path = tmp_path / 'data.jsonl'
  if row:
    path.write_text(json.dumps(row) + '\n')
  config = weights.inputs.config
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(path), **data))
  trained = with_inputs(weights, config=config, sources={'policy': Source(None, checkpoints=tmp_path)})
  expected = '1+1=' if plain else [{'role': 'user', 'content': '1+1='}]
  assert completions.make_prompts(trained, ['1+1='])[0].prompt == expected
  for loaded, as_chat, is_text in (
    (trained, True, False),
    (trained, False, True),
    (with_inputs(weights, config=config), None, False),
  ):
    (prompt,) = completions.make_prompts(loaded, ['1+1='], as_chat=as_chat)
    assert isinstance(prompt.prompt, str) == is_text


@pytest.mark.parametrize('kept_rows', [0, 3, 4, 7, 12])
def test_a_cut_file_is_continued(weights, source, finished, tmp_path, kept_rows):
  """The file may be cut anywhere, also in the middle of a row; whole batches of four rows are kept."""
  lines = finished.read_bytes().splitlines(keepends=True)
  out = tmp_path / 'out.jsonl'
  partial_row = lines[kept_rows][:40] if kept_rows < 12 else b''
  out.write_bytes(b''.join(lines[:kept_rows]) + partial_row)
  note = f'{out}.of.json'
  pathlib.Path(note).write_text(pathlib.Path(f'{finished}.of.json').read_text())
  prompts = completions.make_prompts(weights, file=str(source))
  completed = completion_files.complete_file(weights, prompts, out, DRAWS)
  assert completed == 12 - kept_rows // 4 * 4
  assert out.read_bytes() == finished.read_bytes()


def with_inputs(weights, **fields):
  """Returns the weights with these fields changed in their inputs."""
  return dataclasses.replace(weights, inputs=dataclasses.replace(weights.inputs, **fields))


def test_output_file_of_other_draws_weights_or_prompts_is_refused(weights, source, finished):
  prompts = completions.make_prompts(weights, file=str(source))
  before = finished.read_bytes()
  for change, kind in (
    (dict(draws=completions.Draws(n=64, max_new_tokens=4, seed=1)), 'draws'),
    (dict(source='other'), 'weights'),
    (dict(weights=with_inputs(weights, name='another stage')), 'weights'),
    (dict(weights=with_inputs(weights, sources={'policy': Source(None, folder=pathlib.Path('adapter'))})), 'weights'),
  ):
    arguments = dict(weights=weights, prompts=prompts, out=finished, draws=DRAWS) | change
    with pytest.raises(InputError, match=f'with other {kind}'):
      completion_files.complete_file(**arguments)
  with pytest.raises(InputError, match='with other prompts'):
    completion_files.complete_file(weights, prompts[:3], finished, DRAWS)
  corrected = [dataclasses.replace(p, columns={**p.columns, 'answer': 'another'}) for p in prompts]
  with pytest.raises(InputError, match='with other prompts'):
    completion_files.complete_file(weights, corrected, finished, DRAWS)
  assert finished.read_bytes() == before


def test_kill_9_during_sample_resumes_with_the_same_command(folder, source, finished, tmp_path):
  out = tmp_path / 'out.jsonl'
  code = 'import sys\nfrom launch import main\nmain.main(sys.argv[1:])\n'
  # The process hangs after its first write, so that the kill comes between two writes.
  hang = 'import time\nfrom rich import progress\nprogress.Progress.advance = lambda *_: time.sleep(99)\n'
  command = [
    'sample',
    f'--model={folder}',
    f'--prompts={source}',
    f'--out={out}',
    '--n=64',
    '--max_new_tokens=4',
    '--seed=0',
    '--temperature=1',
  ]

  def start(code):
    return subprocess.Popen([sys.executable, '-c', code, *command], cwd=CLONE, stderr=subprocess.PIPE, text=True)

  first = start(hang + code)
  while not (out.exists() and out.read_bytes().count(b'\n') >= 4):
    assert first.poll() is None, first.stderr.read()
    time.sleep(0.02)
  first.send_signal(signal.SIGKILL)
  first.wait()
  first.stderr.close()
  assert out.read_bytes().count(b'\n') == 4
  second = start(code)
  error = second.communicate()[1]
  assert second.returncode == 0, error
  assert '12 rows, 8 new' in error
  assert out.read_bytes() == finished.read_bytes()


def test_chat_streams_answers_and_keeps_history(weights, monkeypatch):
  typed, out = io.StringIO('and now?\n\nbye\n'), io.StringIO()
  prompts, stream = [], chat.stream

  def recording_stream(engine, prompt, draws, tell):
    prompts.append(weights.inputs.tokenizer.decode(prompt.tokens, skip_special=False))
    return stream(engine, prompt, draws, tell)

  monkeypatch.setattr(chat, 'stream', recording_stream)
  chat.chat_loop({'nano': weights}, completions.Draws(max_new_tokens=20), 'data=-1', ['hello'], typed, out=out)
  turns = [text.count('<|im_start|>user') for text in prompts]
  assert turns == [1, 2, 3] and prompts[2].count('<|im_start|>assistant') == 3
  assert out.getvalue().count('> ') >= 3
  answer = prompts[1].split('<|im_start|>assistant\n')[1].split('<|im_end|>')[0]
  assert answer and out.getvalue().startswith(answer)


def test_chat_refuses_prompts_beyond_the_positions_of_the_model(weights, monkeypatch):
  model = dataclasses.replace(
    weights.inputs.model, config=dataclasses.replace(weights.inputs.model.config, max_position=60)
  )
  short = dataclasses.replace(weights, inputs=dataclasses.replace(weights.inputs, model=model))
  monkeypatch.setattr(chat, 'make_engine', lambda *_, max_prompt, **options: max_prompt)
  for draws, room in ((20, 40), (80, 1)):
    out = io.StringIO()
    speaker = chat._speaker('', short, completions.Draws(max_new_tokens=draws), 'data=-1')
    assert speaker.engine == speaker.room == room
    chat._reply(speaker, 'a' * 60, 0, completions.Draws(max_new_tokens=draws), out)
    assert f'tokens are more than the {room} of a chat' in out.getvalue() and not speaker.messages
    assert f'--max_new_tokens={draws} of the 60 positions of the model' in out.getvalue()
  both = {'short': short, 'long': weights}  # the shorter one decides
  assert chat.with_room(completions.Draws(max_new_tokens=512), both).max_new_tokens == 30
  assert chat.with_room(completions.Draws(max_new_tokens=20), both).max_new_tokens == 20


def test_completions_beyond_the_positions_of_the_model_are_warned_of(weights, monkeypatch, caplog):
  monkeypatch.setattr(completions.sampler_config, 'free_bytes', lambda layout: 1)
  engine = types.SimpleNamespace(max_concurrent_decodes=1, layout=None, cache_bytes=lambda: 0)
  monkeypatch.setattr(completions, 'make_engine', lambda *_, **options: engine)
  positions = weights.inputs.model.config.max_position
  prompts = completions.make_prompts(weights, ['a' * 28], as_chat=False)
  completions.engine_for(weights, prompts, completions.Draws(max_new_tokens=positions - 28), 'data=-1')
  assert not caplog.messages
  completions.engine_for(weights, prompts, completions.Draws(max_new_tokens=positions), 'data=-1')
  completions.make_engines({'nano': weights}, slots=1, max_prompt=28, max_new_tokens=positions)
  sampled, served = caplog.messages
  text = f': {positions + 28} tokens are more than the {positions} positions of the model'
  assert sampled.startswith(f'--max_new_tokens after the longest prompt{text}')
  assert served.startswith(f'--max_context{text}')


@pytest.mark.nightly
def test_chat_with_a_model_of_few_positions_answers_by_default(folder, tmp_path):
  """The default of --max_new_tokens left no position to a message."""
  shutil.copytree(folder, tmp_path / 'short')
  config = json.loads((tmp_path / 'short/config.json').read_text())
  (tmp_path / 'short/config.json').write_text(json.dumps(config | dict(max_position_embeddings=128)))
  command = [sys.executable, '-m', 'launch.chat', f'--model={tmp_path}/short']
  done = subprocess.run(command, cwd=CLONE, input='hello\n', text=True, capture_output=True)
  assert done.returncode == 0 and 'tokens are more' not in done.stdout, done.stdout + done.stderr


def test_chat_refuses_lines_that_are_not_utf8_and_goes_on(weights, monkeypatch):
  replied = []
  monkeypatch.setattr(chat, '_reply', lambda speaker, text, *_: replied.append(text))
  monkeypatch.setattr(chat, '_speaker', lambda *_: chat.Speaker('', None, 9, None, []))
  typed = io.TextIOWrapper(io.BytesIO(b'\xff\n/system \xff\nhello\n'), 'utf-8', errors='strict')
  out = io.StringIO()
  chat.chat_loop({'nano': weights}, completions.Draws(), 'data=-1', ['gr\udcfc\udcdf'], typed, out=out)
  assert replied == ['hello'] and out.getvalue().count('this message is not valid UTF-8; type it again\n') == 3


def test_a_chat_without_a_template_is_refused_before_it_begins(tmp_path):
  tokenizer.load('bytes').save(tiny.folder(tmp_path / 'nano'))
  (tmp_path / 'nano/chat_template.jinja').unlink()
  command = [sys.executable, '-m', 'launch.chat', f'--model={tmp_path}/nano']
  done = subprocess.run(command, cwd=CLONE, input='hello\n', text=True, capture_output=True)
  assert done.returncode == 2 and done.stdout == ''
  error = done.stderr.splitlines()[-1]  # on a busy machine, lines of progress come before
  assert error.startswith(f'jaxpost: {tmp_path}/nano: its tokenizer has no chat template, so it cannot chat; ')
  assert 'chat_template.jinja' in error and 'Traceback' not in done.stderr


def test_chat_opens_with_model_step_and_temperature():
  draws = completions.Draws(temperature=0.7)
  assert chat.opening('exports/capitals', None, draws) == f'exports/capitals, temperature 0.7. {chat.HELP}'
  assert chat.opening('runs/capitals', 12, draws).startswith('runs/capitals, step 12, temperature 0.7. ')


def test_a_prompt_is_printed_once_above_its_completions(capsys):
  for prompt in ('17+25=', [{'role': 'user', 'content': '17+25='}]):
    for sample in range(3):
      completions.printer(3, False)(dict(prompt=prompt, sample=sample, completion=f'4{sample}'))
    assert capsys.readouterr().out == '17+25=\n1: 40\n2: 41\n3: 42\n'
  completions.printer(1, False)(dict(prompt='17+25=', sample=0, completion='42'))
  assert capsys.readouterr().out == '17+25=42\n'


def test_two_models_answer_side_by_side(weights):
  """Each has its own conversation; a command applies to both, and is answered once."""
  other = dataclasses.replace(weights, params=jax.tree.map(lambda x: -x, weights.params))
  draws, outputs = completions.Draws(max_new_tokens=12), []
  for models in ({'one': weights, 'two': other}, {'one': weights}, {'two': other}):
    out = io.StringIO()
    chat.chat_loop(models, draws, 'data=-1', [], io.StringIO('hello\n/reset\nbye\n'), out=out)
    outputs.append(out.getvalue().split('> '))
  of_both, *of_each = outputs
  assert of_both == [
    f'one: {one}two: {two}' if is_answer else one
    for is_answer, (one, two) in zip((0, 1, 0, 1, 0), zip(*of_each, strict=True))
  ]
  assert of_each[0][1] != of_each[1][1]


def test_slots_are_limited_by_free_memory(weights, monkeypatch):
  """Half of the free memory may hold the cache. There is at least one slot; drawing fails where that does not fit."""
  prompts, draws = completions.make_prompts(weights, ['17+25=']), completions.Draws(n=8, max_new_tokens=8)
  engine = completions.engine_for(weights, prompts, draws, 'data=-1')
  assert engine.max_concurrent_decodes == 8
  bytes_of_a_slot = engine.cache_bytes() / 8
  for memory, slots in ((17, 8), (9, 4), (0.5, 1)):
    monkeypatch.setattr(sampler_config, 'free_bytes', lambda layout, memory=memory: memory * bytes_of_a_slot)
    fitting = completions.engine_for(weights, prompts, draws, 'data=-1')
    assert fitting.max_concurrent_decodes == slots
  with pytest.raises(InputError, match='would fit'):
    completions.draw(fitting, prompts, draws)


def test_streaming_gives_the_completion(weights):
  (prompt,) = completions.make_prompts(weights, ['17+25='])
  draws = completions.Draws(max_new_tokens=40, seed=3)
  expected = completions.complete(weights, [prompt], draws)
  engine = completions.make_engine(weights, slots=1, max_prompt=64, max_new_tokens=40)
  parts = []
  last = chat.stream(engine, prompt, draws, lambda tokens: parts.append(tokens.tolist()))
  assert last.tokens.tolist() == expected.completions[0, : expected.lengths[0]].tolist()
  assert len(parts) > 2 and sum(parts, []) == last.tokens.tolist()


# -------------------------------------------------------------------- scores


def test_scores_equal_figures_computed_by_hand():
  """Three prompts, four samples; the third could not be graded."""
  rows = [
    dict(completions=['#### 4', '#### 4', '5', '6'], completion_ids=[[1, 258], [1, 1], [2], [3, 258]]),
    dict(completions=['1', '1', '2', '2'], completion_ids=[[1]] * 4),
    dict(completions=['x'] * 4, completion_ids=[[1, 1, 1]] * 4),
  ]
  graded = [
    Graded([1.0, 1.0, 0.0, 0.0], {}, None),
    Graded([0.0, 0.0, 1.0, 1.0], {}, None),
    Graded([1.0, None, 1.0, 1.0], {}, None),
  ]
  scores = score_dataset.summary(rows, graded, (258,))
  assert scores['pass@1'] == 0.5
  assert scores['pass@2'] == pytest.approx(1 - 1 / 6)  # 1 - C(2,2)/C(4,2)
  assert scores['pass@4'] == 1
  assert scores['maj@4'] == pytest.approx((1 + 0.5) / 2)  # the vote on the second prompt is a tie
  assert (scores['count'], scores['ungraded_prompts']) == (3, 1)
  assert scores['frac_reward_differs'] == 1
  assert scores['completions/mean_length'] == pytest.approx(23 / 12)
  assert scores['completions/clipped_ratio'] == pytest.approx(10 / 12)
  all_correct = [Graded([1.0] * 4, {}, None), *graded[1:]]
  assert score_dataset.summary(rows, all_correct, (258,))['frac_reward_differs'] == 0.5


def test_pass_at_k_is_unbiased():
  """It equals the mean over all ways to draw k of n samples, which are listed."""
  import itertools

  for row in itertools.product((0, 1), repeat=5):
    for k in range(1, 6):
      drawn = [any(c) for c in itertools.combinations(row, k)]
      assert pass_at_k(np.array([row], bool), k) == pytest.approx(np.mean(drawn))


@pytest.mark.parametrize(
  'text, answer',
  [
    ('so\n#### 1,234', '1234'),
    ('it is \\boxed{ x^2 + 1 }.', 'x^2+1'),
    (r'first \boxed{1}, then \boxed{\frac{1}{2}}', '1/2'),
    (r'\boxed{0.5}', '1/2'),
    (r'\boxed{123456^{999}}', '123456^{999}'),  # too large to print as a number
    ('it is 7', '7'),
    (' yes ', 'yes'),
  ],
)
def test_majority_vote_normalizes_answers(text, answer):
  assert math.answer_of(text) == answer


def test_evaluate_grades_with_a_user_reward_and_with_gsm8k(folder, tmp_path, shared_data):
  """A reward from a file of the user on any rows; then the reward `gsm8k` on its own rows."""
  reward = tmp_path / 'mine.py'
  reward.write_text('def low(completion_ids, **_):\n  return [float(i[0] < 64) for i in completion_ids]\n')
  data = tmp_path / 'data.jsonl'
  data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)

  def run(*args):
    return subprocess.run(
      [sys.executable, '-m', 'launch.evaluate', f'--model={folder}', '--n=4', '--max_new_tokens=3', *args],
      cwd=CLONE,
      capture_output=True,
      text=True,
      env=os.environ,
    )

  out = run(f'--data={data}', f'--reward={reward}:low', f'--out={tmp_path}/o')
  assert out.returncode == 0, out.stderr
  assert 'its prompts are plain text' in out.stderr
  scores = json.loads(out.stdout.splitlines()[-1])
  assert scores['count'] == 3 and {'pass@1', 'pass@4', 'maj@4'} <= set(scores)
  assert (scores['weights'], scores['stage'], scores['step']) == (str(folder), 'model', 0)
  rows = [json.loads(x) for x in (tmp_path / 'o/completions.jsonl').read_text().splitlines()]
  expected = np.mean([ids[0] < 64 for r in rows for ids in r['completion_ids']])
  assert scores['pass@1'] == pytest.approx(expected) and 0 < expected < 1
  graded = (tmp_path / 'o/graded.jsonl').read_text().splitlines()
  assert len(graded) == 3
  gsm8k = shared_data('gsm8k') / 'test.jsonl'
  out = run(f'--data={gsm8k}', '--reward=gsm8k', '--size=2')
  assert out.returncode == 0, out.stderr
  assert json.loads(out.stdout.splitlines()[-1])['count'] == 2
  out = run(f'--data={data}', '--reward=nothing')
  assert out.returncode == 2 and out.stderr.count('jaxpost: ') == 1


@pytest.mark.parametrize('algorithm, role', [('dpo', 'reference'), ('kto', 'reference'), ('distill', 'teachers')])
def test_evaluate_refuses_losses_that_need_another_model(algorithm, role, folder):
  overrides = dict(algorithm=algorithm, eval=dict(data=dict(path='x.jsonl')), distill=dict(teachers=(str(folder),)))
  (config,) = config_lib.parse(tiny.run_config(str(folder), **overrides)).values()
  with pytest.raises(InputError, match=f'evaluating {algorithm} needs its {role}, '):
    inference.evaluate(None, config)


def test_a_model_folder_is_evaluated_with_its_own_tokenizer(folder, tmp_path):
  """That of the recipe belongs to the model that the recipe trains."""
  other = tmp_path / 'other'
  other.mkdir()
  tokenizer.load('bytes').save(other)
  (config,) = config_lib.parse(dict(model=dict(tokenizer=str(other)))).values()
  assert inference.from_folder(folder, config).inputs.tokenizer.source == str(folder)
  bare = tiny.folder(tmp_path / 'bare')  # without a tokenizer
  assert inference.from_folder(bare, config).inputs.tokenizer.source == str(other)


def test_files_of_a_run_are_those_of_the_folder_where_it_started(folder, tmp_path, monkeypatch):
  """Those of the same names here are read only if --data names them; that the run's data is plain text decides, too."""
  here, there = tmp_path / 'here', tmp_path / 'there'
  for place, rows in ((here, 1), (there, 3)):
    place.mkdir()
    (place / 'sums.jsonl').write_text('{"question": "1+1=", "answer": "2"}\n' * rows)
  (there / 'only_there.jsonl').write_text('{"question": "1+1=", "answer": "2"}\n')
  (there / 'maps.py').write_text(
    'def to_prompt(row):\n  return dict(prompt=row["question"], completion=row["answer"])\n'
  )
  data = dict(path='sums.jsonl', map='./maps.py:to_prompt')
  with contextlib.chdir(there):
    over = dict(data=data, train=dict(steps=1), eval=dict(data=dict(path='sums.jsonl')))
    jaxpost.run(tiny.run_config(str(folder), **over), 'run', rich.console.Console(quiet=True))
  monkeypatch.chdir(here)
  for given, rows in (('', 3), ('sums.jsonl', 1), ('../there/only_there.jsonl', 1), ('sums.jsonl + sums.jsonl', 2)):
    figures = inference.evaluate_as(run='../there/run', data=given)
    assert figures['rows'] == rows and figures['loss'] > 0
  with pytest.raises(InputError, match='only_there.jsonl: no such file'):
    inference.evaluate_as(run='../there/run', data='only_there.jsonl')
  assert not completions.typed_as_chat(inference.load(run='../there/run'))
  assert pathlib.Path.cwd() == here


def test_evaluate_without_held_out_data_names_the_flags_that_give_it(folder):
  (config,) = config_lib.parse(tiny.run_config(str(folder))).values()
  with pytest.raises(InputError, match='nothing to evaluate.* --data=FILE, .* --reward=NAME .*--suite=NAME'):
    inference.evaluate(None, config)


def test_output_file_of_changed_weights_in_the_same_folder_is_refused(folder, source, tmp_path):
  copied = shutil.copytree(folder, tmp_path / 'model')

  def completed():
    weights = inference.from_folder(str(copied))
    prompts = completions.make_prompts(weights, file=str(source))[:1]
    return completion_files.complete_file(weights, prompts, tmp_path / 'out.jsonl', completions.Draws(max_new_tokens=2))

  assert completed() == 1 and completed() == 0
  (weights,) = copied.glob('*.safetensors')
  data = bytearray(weights.read_bytes())
  data[-1] ^= 1
  weights.write_bytes(data)
  with pytest.raises(InputError, match='with other weights'):
    completed()
