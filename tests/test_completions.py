"""Prompt files, chats and scores: what launch.sample and launch.evaluate do.

Legend: N prompts, n samples a prompt.
"""

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

import jax
import numpy as np
import pytest
import tiny

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
  """Twelve rows of all kinds: three batches of a file with n=64."""
  path = tmp_path_factory.mktemp('in') / 'in.jsonl'
  rows = [{'prompt': f'{i}+1=', 'answer': str(i + 1)} for i in range(10)]
  rows += [{'prompt_ids': [49, 43], 'answer': 'x'}, {'prompt': [{'role': 'user', 'content': 'hi'}], 'answer': 'y'}]
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
  return path


@pytest.fixture(scope='module')
def whole(weights, source, tmp_path_factory):
  out = tmp_path_factory.mktemp('out') / 'out.jsonl'
  prompts = completions.make_prompts(weights, file=str(source))
  assert completion_files.complete_file(weights, prompts, out, DRAWS) == 12
  return out


def test_rows_keep_their_columns(whole, source, weights):
  before = [json.loads(x) for x in source.read_text().splitlines()]
  after = [json.loads(x) for x in whole.read_text().splitlines()]
  assert len(before) == len(after)
  for old, new in zip(before, after):
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


def test_columns_that_json_lacks_are_named_before_anything_is_sampled(weights, tmp_path, monkeypatch):
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


def test_prompt_ids_are_taken_as_they_are(weights, source):
  prompts = completions.make_prompts(weights, file=str(source))
  assert prompts[10].tokens.tolist() == [49, 43]
  assert 'hi' in weights.inputs.tokenizer.decode(prompts[11].tokens.tolist())
  for bad in ([], [999], 'x', [1.5]):
    row = [{'prompt_ids': bad}]
    rows = completions.sources.read('rows', fake_rows=row)
    with pytest.raises(InputError, match=r'rows\[0\].*prompt_ids'):
      completions.prompts_of(weights, rows)


def test_plain_text_is_read_as_training_reads_it(weights, source):
  """Tokens and the columns of rewards are the same, with a chat template, too."""
  assert weights.inputs.tokenizer.chat_template
  rows = completions.sources.read(source)[:2]
  stream = prompts_lib.PromptStream(
    rows, weights.inputs.tokenizer, per_step=2, max_prompt_length=64, seed=0, shuffle=False
  )
  for mine, trained in zip(completions.make_prompts(weights, file=str(source)), next(stream)[0]):
    assert mine.tokens.tolist() == trained.tokens.tolist() and mine.prompt == trained.prompt
    group = score_dataset._group(mine, dict(completions=['1', '2'], completion_ids=[[49], [50]]))
    assert group.prompts == [mine.prompt] * 2 and group.completions == ['1', '2']
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
def test_a_typed_prompt_is_asked_as_the_data_of_the_run(weights, tmp_path, row, data, plain):
  """Without the data of a run, a prompt is a user's message, or plain text where there is no chat template."""
  path = tmp_path / 'data.jsonl'
  if row:
    path.write_text(json.dumps(row) + '\n')
  config = weights.inputs.config
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(path), **data))
  trained = of(weights, config=config, sources={'policy': Source(None, checkpoints=tmp_path)})
  asked = '1+1=' if plain else [{'role': 'user', 'content': '1+1='}]
  assert completions.make_prompts(trained, ['1+1='])[0].prompt == asked
  for weights_, as_chat, is_text in (
    (trained, True, False),
    (trained, False, True),
    (of(weights, config=config), None, False),
  ):
    (prompt,) = completions.make_prompts(weights_, ['1+1='], as_chat=as_chat)
    assert isinstance(prompt.prompt, str) == is_text


@pytest.mark.parametrize('kept', [0, 3, 4, 7, 12])
def test_a_cut_file_is_continued(weights, source, whole, tmp_path, kept):
  """Cut anywhere, in the middle of a row, too."""
  lines = whole.read_bytes().splitlines(keepends=True)
  out = tmp_path / 'out.jsonl'
  torn = lines[kept][:40] if kept < 12 else b''
  out.write_bytes(b''.join(lines[:kept]) + torn)
  beside = f'{out}.of.json'
  pathlib.Path(beside).write_text(pathlib.Path(f'{whole}.of.json').read_text())
  prompts = completions.make_prompts(weights, file=str(source))
  left = completion_files.complete_file(weights, prompts, out, DRAWS)
  assert left == 12 - kept // 4 * 4
  assert out.read_bytes() == whole.read_bytes()


def of(weights, **fields):
  """The same weights with other fields in their inputs."""
  return dataclasses.replace(weights, inputs=dataclasses.replace(weights.inputs, **fields))


def test_a_file_of_something_else_is_refused(weights, source, whole):
  prompts = completions.make_prompts(weights, file=str(source))
  before = whole.read_bytes()
  for change, word in (
    (dict(draws=completions.Draws(n=64, max_new_tokens=4, seed=1)), 'draws'),
    (dict(source='other'), 'weights'),
    (dict(weights=of(weights, name='another stage')), 'weights'),
    (dict(weights=of(weights, sources={'policy': Source(None, folder=pathlib.Path('adapter'))})), 'weights'),
  ):
    given = dict(weights=weights, prompts=prompts, out=whole, draws=DRAWS) | change
    with pytest.raises(InputError, match=f'with other {word}'):
      completion_files.complete_file(**given)
  with pytest.raises(InputError, match='with other prompts'):
    completion_files.complete_file(weights, prompts[:3], whole, DRAWS)
  corrected = [dataclasses.replace(p, columns={**p.columns, 'answer': 'another'}) for p in prompts]
  with pytest.raises(InputError, match='with other prompts'):
    completion_files.complete_file(weights, corrected, whole, DRAWS)
  assert whole.read_bytes() == before


def test_killed_the_same_command_goes_on(folder, source, whole, tmp_path):
  out = tmp_path / 'out.jsonl'
  code = 'import sys\nfrom launch import main\nmain.main(sys.argv[1:])\n'
  # Stops after the first write, so that the kill comes between two.
  stuck = 'import time\nfrom rich import progress\nprogress.Progress.advance = lambda *_: time.sleep(99)\n'
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

  first = start(stuck + code)
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
  assert '12 rows, 8 of them new' in error
  assert out.read_bytes() == whole.read_bytes()


def test_chat_streams_answers_and_remembers(weights, monkeypatch):
  asked, out = io.StringIO('and now?\n\nbye\n'), io.StringIO()
  seen, stream = [], chat.stream

  def spy(engine, prompt, draws, tell):
    seen.append(weights.inputs.tokenizer.decode(prompt.tokens, skip_special=False))
    return stream(engine, prompt, draws, tell)

  monkeypatch.setattr(chat, 'stream', spy)
  chat.chat_loop({'nano': weights}, completions.Draws(max_new_tokens=20), 'data=-1', ['hello'], asked, out=out)
  turns = [text.count('<|im_start|>user') for text in seen]
  assert turns == [1, 2, 3] and seen[2].count('<|im_start|>assistant') == 3
  assert out.getvalue().count('> ') >= 3
  answer = seen[1].split('<|im_start|>assistant\n')[1].split('<|im_end|>')[0]
  assert answer and out.getvalue().startswith(answer)


def test_a_chat_ends_where_the_positions_of_the_model_do(weights, monkeypatch):
  model = dataclasses.replace(
    weights.inputs.model, config=dataclasses.replace(weights.inputs.model.config, max_position=60)
  )
  short = dataclasses.replace(weights, inputs=dataclasses.replace(weights.inputs, model=model))
  monkeypatch.setattr(chat, 'make_engine', lambda *_, max_prompt, **options: max_prompt)
  for draws, room in ((20, 40), (80, 1)):
    out = io.StringIO()
    speaker = chat._speaker('', short, completions.Draws(max_new_tokens=draws), 'data=-1')
    assert speaker.engine == speaker.room == room
    chat._reply(speaker, 'a' * 60, 0, completions.Draws(), out)
    assert f'tokens are more than the {room} of a chat' in out.getvalue() and not speaker.messages


def test_a_line_that_is_no_text_is_refused_and_the_chat_goes_on(weights, monkeypatch):
  asked = []
  monkeypatch.setattr(chat, '_reply', lambda speaker, text, *_: asked.append(text))
  monkeypatch.setattr(chat, '_speaker', lambda *_: chat.Speaker('', None, 9, None, []))
  given = io.TextIOWrapper(io.BytesIO(b'\xff\n/system \xff\nhello\n'), 'utf-8', errors='strict')
  out = io.StringIO()
  chat.chat_loop({'nano': weights}, completions.Draws(), 'data=-1', ['gr\udcfc\udcdf'], given, out=out)
  assert asked == ['hello'] and out.getvalue().count('this message is not valid UTF-8; type it again\n') == 3


def test_a_chat_without_a_template_is_refused_before_it_begins(tmp_path):
  tokenizer.load('bytes').save(tiny.folder(tmp_path / 'nano'))
  (tmp_path / 'nano/chat_template.jinja').unlink()
  command = [sys.executable, '-m', 'launch.chat', f'--model={tmp_path}/nano']
  done = subprocess.run(command, cwd=CLONE, input='hello\n', text=True, capture_output=True)
  assert done.returncode == 2 and done.stdout == ''
  error = done.stderr.splitlines()[-1]  # on a busy machine, lines of what is being done come before it
  assert error.startswith(f'jaxpost: {tmp_path}/nano: its tokenizer has no chat template, so it cannot chat; ')
  assert 'chat_template.jinja' in error and 'Traceback' not in done.stderr


def test_a_chat_opens_with_what_is_known():
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
  """Each has its own chat; a command holds for both, and is answered once."""
  other = dataclasses.replace(weights, params=jax.tree.map(lambda x: -x, weights.params))
  draws, shown = completions.Draws(max_new_tokens=12), []
  for models in ({'one': weights, 'two': other}, {'one': weights}, {'two': other}):
    out = io.StringIO()
    chat.chat_loop(models, draws, 'data=-1', [], io.StringIO('hello\n/reset\nbye\n'), out=out)
    shown.append(out.getvalue().split('> '))
  both, *alone = shown
  assert both == [
    f'one: {one}two: {two}' if said else one for said, (one, two) in zip((0, 1, 0, 1, 0), zip(*alone, strict=True))
  ]
  assert alone[0][1] != alone[1][1]


def test_no_more_slots_than_fit(weights, monkeypatch):
  """Half of the free memory holds the cache; one slot is the least, and is refused where it is too much."""
  prompts, draws = completions.make_prompts(weights, ['17+25=']), completions.Draws(n=8, max_new_tokens=8)
  engine = completions.engine_for(weights, prompts, draws, 'data=-1')
  assert engine.max_concurrent_decodes == 8
  bytes_of_a_slot = engine.cache_bytes() / 8
  for room, slots in ((17, 8), (9, 4), (0.5, 1)):
    monkeypatch.setattr(sampler_config, 'free_bytes', lambda layout, room=room: room * bytes_of_a_slot)
    fitting = completions.engine_for(weights, prompts, draws, 'data=-1')
    assert fitting.max_concurrent_decodes == slots
  with pytest.raises(InputError, match='would fit'):
    completions.draw(fitting, prompts, draws)


def test_streaming_gives_the_completion(weights):
  (prompt,) = completions.make_prompts(weights, ['17+25='])
  draws = completions.Draws(max_new_tokens=40, seed=3)
  want = completions.complete(weights, [prompt], draws)
  engine = completions.make_engine(weights, slots=1, max_prompt=64, max_new_tokens=40)
  parts = []
  last = chat.stream(engine, prompt, draws, lambda tokens: parts.append(tokens.tolist()))
  assert last.tokens.tolist() == want.completions[0, : want.lengths[0]].tolist()
  assert len(parts) > 2 and sum(parts, []) == last.tokens.tolist()


# -------------------------------------------------------------------- scores


def test_figures_by_hand():
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
  out = score_dataset.summary(rows, graded, (258,))
  assert out['pass@1'] == 0.5
  assert out['pass@2'] == pytest.approx(1 - 1 / 6)  # 1 - C(2,2)/C(4,2)
  assert out['pass@4'] == 1
  assert out['maj@4'] == pytest.approx((1 + 0.5) / 2)  # the second is a tie
  assert (out['count'], out['ungraded_prompts']) == (3, 1)
  assert out['frac_reward_differs'] == 1
  assert out['completions/mean_length'] == pytest.approx(23 / 12)
  assert out['completions/clipped_ratio'] == pytest.approx(10 / 12)
  same = [Graded([1.0] * 4, {}, None), *graded[1:]]
  assert score_dataset.summary(rows, same, (258,))['frac_reward_differs'] == 0.5


def test_pass_at_k_is_unbiased():
  """The mean over all ways to draw k of n, by counting them."""
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
def test_answers_that_are_voted_on(text, answer):
  assert math.answer_of(text) == answer


def test_evaluate_by_a_reward(folder, tmp_path, shared_data):
  """A reward of one's own on any rows; GSM8K's own rows as they are."""
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
  have = json.loads(out.stdout.splitlines()[-1])
  assert have['count'] == 3 and {'pass@1', 'pass@4', 'maj@4'} <= set(have)
  rows = [json.loads(x) for x in (tmp_path / 'o/completions.jsonl').read_text().splitlines()]
  want = np.mean([ids[0] < 64 for r in rows for ids in r['completion_ids']])
  assert have['pass@1'] == pytest.approx(want) and 0 < want < 1
  graded = (tmp_path / 'o/graded.jsonl').read_text().splitlines()
  assert len(graded) == 3
  gsm8k = shared_data('gsm8k') / 'test.jsonl'
  out = run(f'--data={gsm8k}', '--reward=gsm8k', '--size=2')
  assert out.returncode == 0, out.stderr
  assert json.loads(out.stdout.splitlines()[-1])['count'] == 2
  out = run(f'--data={data}', '--reward=nothing')
  assert out.returncode == 2 and out.stderr.count('jaxpost: ') == 1


@pytest.mark.parametrize('algorithm, role', [('dpo', 'reference'), ('kto', 'reference'), ('distill', 'teachers')])
def test_what_needs_another_model_is_not_evaluated_here(algorithm, role, folder):
  over = dict(algorithm=algorithm, eval=dict(data=dict(path='x.jsonl')), distill=dict(teachers=(str(folder),)))
  (config,) = config_lib.parse(tiny.run_config(str(folder), **over)).values()
  with pytest.raises(InputError, match=f'evaluating {algorithm} needs its {role}, '):
    inference.evaluate(None, config)


def test_a_file_of_earlier_weights_of_the_same_folder_is_refused(folder, source, tmp_path):
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
