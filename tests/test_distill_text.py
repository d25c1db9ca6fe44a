"""Tests of distillation from teachers with other tokenizers (`distill.align=text`): spans, loss, runs, refusals."""

import json
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_distill_runs as runs
import tiny
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxpost import stages
from jaxpost.algorithms import distill, distill_text, teacher_text
from jaxpost.data import text_alignment, tokenizer
from jaxpost.data.examples import Example
from jaxpost.errors import InputError
from jaxpost.losses import divergences
from jaxpost.stage import prepare, weight_sources
from jaxpost.tools import preview_stage
from jaxpost.types import Batch, Outputs

LETTERS = bytes_to_unicode()
MERGES = [('1', '2'), ('3', '+'), ('+', '4'), ('=', '1'), ('Ġ', '=')]


def save_tokenizer(folder, merges=MERGES, end='</s>', shift=3):
  """Saves a byte-level tokenizer with other ids than 'bytes', merges, and another end of a turn. Returns its size."""
  words = [f'<unused{n}>' for n in range(shift)] + [LETTERS[b] for b in range(256)] + [a + b for a, b in merges]
  model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([end])
  hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False)
  hf.chat_template = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
  )
  hf.save_pretrained(folder)
  return len(words) + 1


def example(tok, text, end=True, prompt='ab'):
  prompt_ids, completion = tok.encode(prompt), tok.encode(text)
  ids = np.array([*prompt_ids, *completion, *([tok.stop_ids[0]] if end else [])], np.int32)
  return Example(ids, np.arange(len(ids)) >= len(prompt_ids))


@pytest.fixture(scope='module')
def other(tmp_path_factory):
  folder = tmp_path_factory.mktemp('other')
  save_tokenizer(folder)
  return tokenizer.load(folder)


# ------------------------------------------------------------------ alignment


def test_spans_end_where_tokens_of_both_end(other):
  own = tokenizer.load('bytes')
  texts = text_alignment.Bytes.of(own), text_alignment.Bytes.of(other)
  a, b = example(own, '12+4=5é'), example(other, '12+4=5é')
  assert (texts[0].texts[a.tokens[2]], texts[1].texts[b.tokens[2]]) == (b'1', b'12')
  spans = list(text_alignment.spans(a, b, texts))
  assert [span.mine for span in spans] == [(2, 4), (4, 6), (6, 7), (7, 8), (8, 9), (9, 10), (10, 11)]
  assert [span.is_pair for span in spans] == [False, False, True, True, True, True, True]
  for span in spans[:-1]:
    own_text = b''.join(texts[0].texts[i] for i in a.tokens[slice(*span.mine)])
    other_text = b''.join(texts[1].texts[i] for i in b.tokens[slice(*span.theirs)])
    assert own_text == other_text


def test_spans_stop_where_the_texts_differ(other):
  own = tokenizer.load('bytes')
  texts = text_alignment.Bytes.of(own), text_alignment.Bytes.of(other)
  differing = list(text_alignment.spans(example(own, '5=6'), example(other, '5=7'), texts))
  assert [span.mine for span in differing] == [(2, 3), (3, 4)]  # the span of 6 and that of the end are left out
  cut = list(text_alignment.spans(example(own, '5=', end=False), example(other, '5='), texts))
  assert [span.mine for span in cut] == [(2, 3), (3, 4)]


def test_spans_stop_at_a_special_token_that_the_text_spells(other):
  """The log-prob of the special token belongs to no text; it was added to that of the text before it."""
  own = tokenizer.load('bytes')
  texts = text_alignment.Bytes.of(own), text_alignment.Bytes.of(other)
  mine, theirs = example(own, '5</s>6'), example(other, '5</s>6')
  assert theirs.tokens.tolist()[3] == other.stop_ids[0]
  assert [*text_alignment.spans(mine, theirs, texts)] == [((2, 3), (2, 3))]
  # It is a token like others if both read it as such, and what one tokenizer puts before a text is none of the text.
  both = example(own, '5<|im_end|>6')
  assert [span.mine for span in text_alignment.spans(both, both, texts[:1] * 2)] == [(n, n + 1) for n in range(2, 6)]
  begun = Example(np.array([other.stop_ids[0], *theirs.tokens[:3]], np.int32), np.ones(4, bool))
  spans = text_alignment.spans(example(own, 'ab5', end=False, prompt=''), begun, texts)
  assert [span.theirs for span in spans] == [(0, 2), (2, 3), (3, 4)]


def test_sentencepiece_letters_are_not_byte_stand_ins():
  vocabulary = {token: i for i, token in enumerate(['▁', '▁the', 'Ġ', 'Ċ', 'é', '<0x0A>'])}
  hf = types.SimpleNamespace(added_tokens_decoder={}, get_vocab=lambda: vocabulary)
  vocabulary_bytes = text_alignment.Bytes.of(types.SimpleNamespace(hf=hf, stop_ids=()))
  assert vocabulary_bytes.texts == [text.encode() for text in (' ', ' the', 'Ġ', 'Ċ', 'é', '\n')]


def test_leading_space_does_not_shift_spans():
  plain = text_alignment.Bytes([b'a', b'b', b'ab'], {}, frozenset())
  pieces = text_alignment.Bytes([b' a', b'b', b' '], {}, frozenset())
  tokens = Example(np.array([0, 1], np.int32), np.ones(2, bool))
  spans = list(text_alignment.spans(tokens, Example(np.array([0, 1], np.int32), np.ones(2, bool)), (plain, pieces)))
  assert [span.mine for span in spans] == [(0, 1), (1, 2)]


def test_tokens_with_the_same_text_are_mapped(other):
  own, theirs = text_alignment.Bytes.of(tokenizer.load('bytes')), text_alignment.Bytes.of(other)
  mapping = text_alignment.same_tokens(own, theirs, {other.stop_ids[0]: 258})
  assert mapping[3 : 3 + 256].tolist() == list(range(256)) and mapping[other.stop_ids[0]] == 258
  assert (mapping[3 + 256 : 3 + 256 + len(MERGES)] == -1).all()


# ----------------------------------------------------------------------- loss


def expected_loss(logits, teacher, labels, beta):
  """Returns the loss in float64, of two pairs and a span of two tokens.

  Args:
    teacher: {position: {id: probability}} of pairs, {position: log-prob} of the span.
  """
  logp = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))

  def jsd(p, q):
    if beta == 0:
      return (p * np.log(p / q)).sum()
    if beta == 1:
      return (q * np.log(q / p)).sum()
    m = beta * p + (1 - beta) * q
    return beta * (p * np.log(p / m)).sum() + (1 - beta) * (q * np.log(q / m)).sum()

  def with_rest(x):
    return np.append(x, 1 - x.sum())

  total = 0
  for t, known in teacher.items():
    if isinstance(known, dict):
      student = np.exp(logp[t])[list(known)]
      total += jsd(with_rest(np.array(list(known.values()))), with_rest(student))
    else:
      text = np.exp(sum(logp[t + i, labels[t + i]] for i in range(2)))
      total += jsd(with_rest(np.array([np.exp(known)])), with_rest(np.array([text])))
  return total


@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
def test_loss_and_gradient_match_float64_numpy(beta):
  random = np.random.RandomState(0)
  logits = random.standard_normal((5, 7)).astype(np.float32)
  labels = np.array([3, 2, 5, 0, 1])
  teacher = {0: {3: 0.5, 1: 0.2}, 1: {2: 0.1, 6: 0.3}, 2: -1.7}
  kind = np.array([distill_text.PAIR, distill_text.PAIR, distill_text.FIRST, distill_text.FURTHER, distill_text.NONE])
  span = np.array([0, 0, -1.7, 0, 0], np.float32)
  # The log-probs of entries with id 0, which are no tokens of the student, are not read.
  ids, top = np.zeros((5, 3), np.int32), np.full((5, 3), -0.5, np.float32)
  for t in (0, 1):
    for n, (i, p) in enumerate(teacher[t].items()):
      ids[t, n], top[t, n] = i + 1, np.log(p)
  options = types.SimpleNamespace(distill=types.SimpleNamespace(teachers=('x',), weights=(), beta=beta, nll_coef=0.25))
  objective = distill_text.objective(options, [1.0])
  arrays = dict(zip(distill_text.names(0), (ids, top, kind, span)))
  weights = np.array([0.1, 0.1, 0.1, 0.1, 0.1], np.float32)

  def loss(x):
    logp = jax.nn.log_softmax(x)
    outputs = Outputs(
      logprobs=jnp.take_along_axis(logp, labels[:, None], axis=-1)[None, :, 0],
      entropy=-jnp.sum(jnp.exp(logp) * logp, axis=-1)[None],
      divergence=objective.divergence(x[None], (), {k: jnp.asarray(v)[None] for k, v in arrays.items()}),
    )
    batch = Batch(labels[None], None, None, weights[None], arrays={k: jnp.asarray(v)[None] for k, v in arrays.items()})
    return objective.fn(outputs, batch)

  (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logits))
  float64_logits = logits.astype(np.float64)
  logp = float64_logits - np.log(np.exp(float64_logits).sum(axis=-1, keepdims=True))
  nll = -logp[np.arange(5), labels].sum()
  expected = expected_loss(float64_logits, teacher, labels, beta)
  assert float(metrics['divergence']) == pytest.approx(0.1 * expected, rel=1e-5)
  assert float(value) == pytest.approx(0.1 * (expected + 0.25 * nll), rel=1e-5)
  assert float(metrics['aligned']) == pytest.approx(0.4)
  for position in [(0, 3), (1, 4), (2, 5), (3, 1), (4, 0)]:
    nudged = float64_logits.copy()
    nudged[position] += 1e-5
    nudged_logp = nudged - np.log(np.exp(nudged).sum(axis=-1, keepdims=True))
    change = (
      expected_loss(nudged, teacher, labels, beta) - expected + 0.25 * (-nudged_logp[np.arange(5), labels].sum() - nll)
    )
    assert float(grad[position]) == pytest.approx(0.1 * change / 1e-5, abs=2e-5)


@pytest.mark.parametrize('beta', [0.0, 0.5, 1.0])
def test_partial_jsd_over_all_tokens_is_the_full_jsd(beta):
  random = np.random.RandomState(1)
  student, teacher = (random.standard_normal((4, 9)).astype(np.float32) for _ in range(2))
  order = np.argsort(-teacher, axis=-1)
  logp = np.take_along_axis(np.asarray(jax.nn.log_softmax(teacher)), order, axis=-1)
  partial = divergences.partial_jsd(student, order + 1, logp, beta)
  np.testing.assert_allclose(partial, divergences.generalized_jsd(student, teacher, beta), rtol=2e-5)


# ----------------------------------------------------------------------- runs


@pytest.fixture(scope='module')
def student(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('models') / 'student')


def text_settings(student, teacher, **over):
  return runs.settings(student, teacher, **tiny.merged(dict(distill=dict(align='text', top_k=259)), over))


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
  """Returns the folder of a model that has learned sums, with another tokenizer than the student."""
  folder = tmp_path_factory.mktemp('teacher')
  size = save_tokenizer(folder / 'tokens')
  start = tiny.folder(folder / 'start', vocab_size=size, hidden_size=32, num_layers=2)
  config = runs.settings(
    start, '', algorithm='sft', distill=dict(teachers=()), optim=dict(lr=1e-2), eval=dict(data=dict(path=''))
  )
  config['model']['tokenizer'] = str(folder / 'tokens')
  config['train']['steps'] = 60
  config['save']['export'] = True
  stages.run(config, folder / 'run', runs.QUIET)
  return str(folder / 'run' / 'export')


@pytest.mark.long
def test_text_alignment_with_one_tokenizer_equals_token_alignment(student, tmp_path):
  big = tiny.folder(tmp_path / 'big', hidden_size=32, num_layers=2)
  tokenizer.load('bytes').save(big)
  over = dict(distill=dict(beta=0.3, nll_coef=0.1))
  plain = runs.run(runs.settings(student, big, **over), tmp_path / 'plain')
  text = runs.run(text_settings(student, big, **over), tmp_path / 'text')
  for a, b in zip(plain, text, strict=True):
    assert b['aligned'] == 1
    assert b['divergence'] == pytest.approx(a['divergence'], rel=1e-5)
    assert b['grad_norm'] == pytest.approx(a['grad_norm'], rel=1e-4)
  a, b = (runs.rows_of(tmp_path / name, 'eval')[-1] for name in ('plain', 'text'))
  assert b['divergence'] == pytest.approx(a['divergence'], rel=1e-4)


@pytest.mark.long
def test_student_learns_from_a_teacher_with_another_tokenizer(student, teacher, tmp_path):
  config = text_settings(student, teacher, distill=dict(top_k=16), train=dict(steps=40), optim=dict(lr=1e-2))
  rows = runs.run(config, tmp_path / 'run')
  assert rows[0]['aligned'] == 1
  assert np.mean([r['divergence'] for r in rows[-5:]]) < 0.6 * rows[0]['divergence']
  held_out = runs.rows_of(tmp_path / 'run', 'eval')
  assert held_out[-1]['nll'] < rows[0]['nll'] - 1
  cache = tmp_path / 'run' / 'cache'
  assert {p.stem for p in cache.glob('*/*.npy')} == set(distill_text.names(0))
  kinds = np.concatenate([np.load(p) for p in sorted(cache.glob('*/teacher_0_kind.npy'))])
  assert {distill_text.PAIR, distill_text.FIRST, distill_text.FURTHER} == set(kinds.tolist())


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(distill=dict(top_k=0)), 'config.distill.top_k: with distill.align=text'),
    (dict(distill=dict(temperature=2.0)), 'config.distill.temperature'),
    (dict(distill=dict(top_k=300)), '300 of 259 tokens'),
    (dict(), 'has no tokenizer of its own'),
    (dict(algorithm='gkd', distill=dict(top_k=0), train=dict(row_length=0)), 'config.distill.align: gkd reads'),
  ],
)
def test_incompatible_alignment_options_are_refused(student, over, message):
  with pytest.raises(InputError, match=message):
    runs.prepare.prepare_all(text_settings(student, student, **over))


def test_precomputed_arrays_have_the_shapes_of_top_k():
  options = types.SimpleNamespace(distill=types.SimpleNamespace(align='text', teachers=('a', 'b'), top_k=5))
  spec = distill.precompute(options)
  assert list(spec) == ['teacher_0', 'teacher_1']
  assert json.dumps({k: v[0] for k, v in spec['teacher_1'].arrays.items()}) == json.dumps(
    {'teacher_1_ids': [5], 'teacher_1_logprobs': [5], 'teacher_1_kind': [], 'teacher_1_span': []}
  )


def test_tokenizer_of_initial_weights_is_not_replaced_by_bytes(tmp_path):
  """With `init_from` and without `model.path`, the config must name the tokenizer of the initial weights."""
  path = tiny.folder(tmp_path / 'model', vocab_size=300)
  config = tiny.merged(tiny.run_config(''), dict(model=dict(path='', preset='tiny', tokenizer=''), init_from=path))
  prepare.prepare_all(config)[0].close()
  save_tokenizer(tmp_path / 'model')
  with pytest.raises(InputError, match='config.model.tokenizer: is empty, and .* has its own; set it to /'):
    prepare.prepare_all(config)
  prepare.prepare_all(tiny.merged(config, dict(model=dict(tokenizer=path))))[0].close()


@pytest.mark.parametrize('field', ['init_from', 'model.path'])
def test_tokenizer_that_the_initial_weights_were_not_trained_with_is_warned_of(tmp_path, caplog, field):
  """Weights read a left-over `model.tokenizer` as wrong tokens, with losses above that of a uniform guess."""
  path = tiny.folder(tmp_path / 'model', vocab_size=300)
  save_tokenizer(tmp_path / 'model')
  weights = dict(model=dict(path='', preset='tiny'), init_from=path)
  if field == 'model.path':
    weights = dict(model=dict(path=path))
  config = tiny.merged(tiny.run_config(''), tiny.merged(weights, dict(model=dict(tokenizer=path))))
  with caplog.at_level(logging.WARNING):
    (stage,) = prepare.prepare_all(config)
    stage.close()
    assert f'model: {path}, ' in preview_stage.show_stage(stage, 0)[1]  # as `launch.inspect` shows it
    assert 'config.model.tokenizer' not in caplog.text
    prepare.prepare_all(tiny.merged(config, dict(model=dict(tokenizer='bytes'))))[0].close()
  (line,) = [r.getMessage() for r in caplog.records if 'config.model.tokenizer' in r.getMessage()]
  assert line.startswith(f'config.model.tokenizer: bytes encodes text differently than {path}, the tokenizer of')


def test_a_stage_with_another_tokenizer_than_the_stage_before_it_is_warned_of_or_refused(tmp_path, caplog):
  """A block that names a model for one stage alone leaves the next one without it, and so with bytes."""
  path = tiny.folder(tmp_path / 'model', vocab_size=300)
  save_tokenizer(tmp_path / 'model')
  blocks = dict(stages=('first', 'second'), first=dict(model=dict(path=path)), second={})
  config = tiny.merged(tiny.run_config(''), dict(model=dict(path='', preset='tiny', tokenizer=''), **blocks))
  with pytest.raises(InputError, match='config.model.tokenizer: is empty, and first has its own; set it to /'):
    prepare.prepare_all(config)
  with caplog.at_level(logging.WARNING):
    for name in path, 'bytes':
      assert 'config.model.tokenizer' not in caplog.text
      for stage in prepare.prepare_all(tiny.merged(config, dict(second=dict(model=dict(tokenizer=name))))):
        stage.close()
  assert f'config.model.tokenizer: bytes encodes text differently than {path}, the tokenizer of' in caplog.text


def test_teacher_template_gets_the_variables_of_the_run(tmp_path):
  """If only the student got the variables, the teacher's text would differ, and so would the spans."""
  (tmp_path / 'thinks.jinja').write_text('{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}')
  tokenizer_of_run = tokenizer.load('bytes', str(tmp_path / 'thinks.jinja'), dict(enable_thinking=True))
  tokenizer.load('bytes', str(tmp_path / 'thinks.jinja')).save(tmp_path / 'teacher')
  rendered_with = []
  inputs = types.SimpleNamespace(
    sources=dict(teacher_0=types.SimpleNamespace(stage='', checkpoints=None, folder=tmp_path / 'teacher')),
    tokenizer=tokenizer_of_run,
    algorithm=types.SimpleNamespace(render=lambda rows, own, config: rendered_with.append(own)),
    config=types.SimpleNamespace(data=types.SimpleNamespace(template_kwargs=tokenizer_of_run.template_kwargs)),
  )
  stored = weight_sources.tokenizer_of(inputs.sources['teacher_0'], {})
  teacher_text.TextsOfTeacher(types.SimpleNamespace(inputs=inputs), 'teacher_0', [], None, stored).theirs  # noqa: B018
  message = [dict(role='user', content='a')]
  assert rendered_with[0].render_chat(message) == tokenizer_of_run.render_chat(message) == ('a<think>', None)
