"""Mean gradients of SFT and distillation losses on data, compared with exact gradients by enumeration.

They go through precomputed arrays, packing and update. The data are samples of an older policy of `sampled.py`; the
rest is as in test_sampled_gradients.py.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampled
import tiny
from sampled import Case

from jaxpost.algorithms import distill, sft
from jaxpost.algorithms.teacher_text import TextsOfTeacher
from jaxpost.data import packing, text_alignment
from jaxpost.data.examples import Documents, Example
from jaxpost.distributed.transfer import to_host
from jaxpost.models import model as model_lib
from jaxpost.programs import score
from jaxpost.roles import Frozen, place
from jaxpost.stage import precompute

pytestmark = pytest.mark.long
ROWS, LENGTH, _ = sampled.SHAPE


def documents(graded):
  """Returns the samples as rows of data, whose answers are trained."""
  rollout, examples = graded.rollout, []
  for n, (ids, length) in enumerate(zip(rollout.completions, rollout.lengths)):
    prompt = rollout.prompts[n // sampled.SIZE].tokens
    examples.append(Example(np.append(prompt, ids[:length]), np.arange(len(prompt) + length) >= len(prompt)))
  return examples


def packed(roles, examples):
  rows = packing.pack_examples(examples, LENGTH)
  return roles.policy.place(packing.to_batch([[examples[i] for i in row] for row in rows], LENGTH, ROWS))


def filled(roles, examples, fields, read):
  """Returns the batch with the arrays that a frozen model computes before the first step."""
  documents = Documents(examples.__getitem__, len(examples), fields)
  documents.fill(examples, read)
  return packed(roles, [documents[n] for n in range(len(examples))])


def runner(teacher, spec):
  """Returns run(host batch) -> outputs of the teacher, like that of `stage.frozen_roles`."""

  def run(batch):
    outputs = to_host(spec.read(teacher(place(teacher.layout, ROWS // 2, batch))))
    return {k: x.reshape(-1, *x.shape[2:]) for k, x in outputs.items()}

  return run


def weights():
  """Returns how often each token is trained [P, Y, C], with a sum of 1."""
  weight = sampled.chance('behavior')[..., None] * sampled.MASK
  return weight / weight.sum()


def exact(losses):
  """Returns {name: gradient [D]} of the mean over tokens of losses(logits [P, Y, C, SYMBOLS]), in one program."""
  weight = weights()

  def means(params):
    return {name: (weight * x).sum() for name, x in losses(sampled.logits(params)).items()}

  gradients = jax.jit(jax.jacrev(means))(sampled.params('policy'))
  return {name: sampled.flat(x) for name, x in gradients.items()}


def probability(p):
  """Picks the probability of each token of all answers from probabilities [P, Y, C, SYMBOLS]."""
  return jnp.take_along_axis(p, jnp.asarray(sampled.PADDED)[None, ..., None], axis=-1)[..., 0]


def jsd(teacher, student, beta):
  """The divergence of GKD (arXiv:2306.13649, eq. 1) for probabilities of outcomes."""
  if beta == 0:
    return sampled.kl(teacher, student)
  mixed = beta * teacher + (1 - beta) * student
  return beta * sampled.kl(teacher, mixed) + (1 - beta) * sampled.kl(student, mixed)


# --------------------------------------------------------------- cross entropy

NLL = {
  'cross entropy': {},
  'dft': dict(kind='dft'),
  'label smoothing': dict(label_smoothing=0.2),
  'z-loss': dict(z_loss=0.3),
}


@functools.lru_cache
def measured_cross_entropy():
  cases = {
    name: Case(sft.SFT, sampled.config_of('sft', nll=options), sampler='behavior') for name, options in NLL.items()
  }
  return sampled.gradients(cases, lambda roles, config, graded: packed(roles, documents(graded)))


@functools.lru_cache
def exact_cross_entropy():
  def losses(logits):
    nll = -jnp.log(probability(jax.nn.softmax(logits)))
    every = -jnp.log(jax.nn.softmax(logits)).mean(axis=-1)
    return {
      'cross entropy': nll,
      'dft': -probability(jax.nn.softmax(logits)),  # arXiv:2508.05629, eq. 9: its gradient is that of -p
      'label smoothing': 0.8 * nll + 0.2 * every,  # arXiv:1512.00567, section 7
      'z-loss': nll + 0.3 * jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2,  # arXiv:2204.02311, section 5
    }

  return exact(losses)


@pytest.mark.parametrize('name', NLL)
def test_gradient_of_cross_entropy_variants(name):
  sampled.agree(measured_cross_entropy()[name], exact_cross_entropy()[name])


# ------------------------------------------------- the teacher's most probable tokens

TOP = {'forward KL': dict(beta=0.0), 'JSD': dict(beta=0.3), 'JSD and cross entropy': dict(beta=0.3, nll_coef=0.5)}
TOP_K, TEMPERATURE = 2, 1.5


@functools.lru_cache
def measured_top_k():
  common = sampled.shared()
  options = dict(k=TOP_K, vocab_size=sampled.SYMBOLS, temperature=TEMPERATURE)
  program = score.make_topk(sampled.model(), common['layout'], tiny.EXACT, common['ledger'], **options)
  teacher = Frozen(sampled.params('reference'), program, common['layout'], sampled.model())

  def make(roles, config, graded):
    (spec,) = distill.precompute(config).values()
    examples = documents(graded)
    read = precompute.read(examples, spec.arrays, runner(teacher, spec), rows=ROWS, row_length=LENGTH)
    return filled(roles, examples, spec.arrays, read)

  cases = {}
  for name, options in TOP.items():
    config = sampled.config_of('distill', distill=dict(options, teachers=('x',), top_k=TOP_K, temperature=TEMPERATURE))
    cases[name] = Case(distill.DISTILL, config, sampler='behavior')
  return sampled.gradients(cases, make)


@functools.lru_cache
def exact_top_k():
  """Divergences of the teacher's two most probable tokens and the rest, and cross entropy at temperature 1."""
  teacher = jax.nn.softmax(sampled.logits(sampled.params('reference')) / TEMPERATURE)
  places = jnp.argsort(-teacher, axis=-1)

  def outcomes(p):
    ordered = jnp.take_along_axis(p, places, axis=-1)
    return jnp.concatenate([ordered[..., :TOP_K], ordered[..., TOP_K:].sum(axis=-1, keepdims=True)], axis=-1)

  def losses(logits):
    student = outcomes(jax.nn.softmax(logits / TEMPERATURE))
    nll = -jnp.log(probability(jax.nn.softmax(logits)))
    divergences = {name: jsd(outcomes(teacher), student, x['beta']) for name, x in TOP.items()}
    return {name: x + TOP[name].get('nll_coef', 0) * nll for name, x in divergences.items()}

  return exact(losses)


@pytest.mark.parametrize('name', TOP)
def test_gradient_of_top_k_distillation(name):
  sampled.agree(measured_top_k()[name], exact_top_k()[name])


# ------------------------------------------------------ a teacher with other tokens

# The symbols of the student are a, b, c, and a stop token; the teacher also has a token for ab.
STUDENT_TEXTS = text_alignment.Bytes([b'a', b'b', b'c', None], {'<stop>': 3}, frozenset([3]))
TEACHER_TEXTS = text_alignment.Bytes([b'ab', b'c', b'a', b'b', None, b'd'], {'<end>': 4}, frozenset([4]))
TEACHER_TOKENS = {(0, 1): 0, (2,): 1, (0,): 2, (1,): 3, (3,): 4}  # symbols of the student -> token of the teacher
SHARED_SYMBOLS = {token: symbols[0] for symbols, token in TEACHER_TOKENS.items() if len(symbols) == 1}
TEXT = {'JSD': dict(beta=0.3), 'forward KL': dict(beta=0.0)}
TEXT_TOP = 3


def in_teacher_tokens(symbols):
  """Splits symbols into the teacher's tokens: [(index of its first symbol, number of symbols, token)]."""
  tokens, first = [], 0
  while first < len(symbols):
    size = 2 if tuple(symbols[first : first + 2]) == (0, 1) else 1
    tokens.append((first, size, TEACHER_TOKENS[tuple(symbols[first : first + size])]))
    first += size
  return tokens


@functools.lru_cache
def teacher_of_text():
  shape = dict(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)
  model = model_lib.build(tiny.config(vocab_size=len(TEACHER_TEXTS.texts), initializer_range=0.5, **shape))
  return model, tiny.params(model, seed=5)


def make_text(teacher, roles, config, graded):
  (spec,) = distill.precompute(config).values()
  examples, teacher_examples = documents(graded), []
  for example in examples:
    parts = [in_teacher_tokens(example.tokens[example.loss_mask == side].tolist()) for side in (False, True)]
    ids = [token for part in parts for *_, token in part]
    teacher_examples.append(Example(np.array(ids, np.int32), np.arange(len(ids)) >= len(parts[0])))
  shape = types.SimpleNamespace(rows=ROWS, row_length=LENGTH)
  texts = TextsOfTeacher(types.SimpleNamespace(shape=shape), 'teacher_0', examples, None, None)
  # Set directly, instead of by chat templates and tokenizers of folders.
  texts.theirs, texts.texts = teacher_examples, (STUDENT_TEXTS, TEACHER_TEXTS)
  return filled(roles, examples, spec.arrays, texts.read(spec, runner(teacher, spec), precompute.read))


@functools.lru_cache
def measured_texts():
  common, (model, params) = sampled.shared(), teacher_of_text()
  options = dict(k=TEXT_TOP, vocab_size=len(TEACHER_TEXTS.texts), temperature=1.0, own=True)
  program = score.make_topk(model, common['layout'], tiny.EXACT, common['ledger'], **options)
  teacher = Frozen(params, program, common['layout'], model)
  cases = {}
  for name, options in TEXT.items():
    config = sampled.config_of('distill', distill=dict(options, teachers=('x',), top_k=TEXT_TOP, align='text'))
    cases[name] = Case(distill.DISTILL, config, sampler='behavior')
  return sampled.gradients(cases, functools.partial(make_text, teacher))


def places_of_text():
  """Returns the teacher's rows and its tokens in answers: (prompt, answer, symbol, size, row, column, token)."""
  rows, places = [], []
  for p, prompt in enumerate(sampled.PROMPTS):
    head = [token for *_, token in in_teacher_tokens(prompt.tolist())]
    for y, answer in enumerate(sampled.ANSWERS):
      parts = in_teacher_tokens(answer)
      places += [(p, y, at, size, len(rows), len(head) + n - 1, token) for n, (at, size, token) in enumerate(parts)]
      row = [*head, *(token for *_, token in parts)]
      rows.append(row + [0] * (2 + sampled.C - len(row)))
  return np.array(rows, np.int32), np.array(places)


@functools.lru_cache
def exact_texts():
  """Divergences of tokens that both models have, and of the text ab as one event (arXiv:2503.20083, eq. 8)."""
  rows, places = places_of_text()
  teacher = np.asarray(jax.nn.softmax(tiny.logits(*teacher_of_text(), rows)))[places[:, 4], places[:, 5]]
  is_pair = places[:, 3] == 1
  chosen = np.zeros((is_pair.sum(), TEXT_TOP, sampled.SYMBOLS))  # one-hot: the symbol of each top token, if it has one
  for row, p in zip(chosen, teacher[is_pair]):
    for k, token in enumerate(np.argsort(-p)[:TEXT_TOP]):
      row[k] = np.arange(sampled.SYMBOLS) == SHARED_SYMBOLS.get(token, -1)
  mass = np.sort(teacher[is_pair])[:, ::-1][:, :TEXT_TOP] * chosen.sum(axis=2)
  event = teacher[~is_pair, places[~is_pair, 6]]
  assert 0 < chosen.sum(axis=(1, 2)).min() < TEXT_TOP and (~is_pair).sum() > 9

  def with_rest(x):
    """Appends the rest of the mass; a token without a symbol becomes 1 on both sides, which adds nothing."""
    return jnp.concatenate([jnp.where(chosen.sum(axis=2) > 0, x, 1), 1 - x.sum(axis=1, keepdims=True)], axis=1)

  def losses(logits):
    p = jax.nn.softmax(logits)
    at, first = (tuple(places[x, :3].T) for x in (is_pair, ~is_pair))
    student = jnp.einsum('nks,ns->nk', chosen, p[at])
    text = probability(p)[first] * probability(p)[(*first[:2], first[2] + 1)]
    by_name = {}
    for name, options in TEXT.items():
      pairs = jsd(with_rest(mass), with_rest(student), options['beta'])
      spans = jsd(*(jnp.stack([x, 1 - x], axis=1) for x in (event, text)), options['beta'])
      by_name[name] = jnp.zeros(p.shape[:3]).at[at].set(pairs).at[first].set(spans)
    return by_name

  return exact(losses)


@pytest.mark.parametrize('name', TEXT)
def test_gradient_of_distillation_with_another_tokenizer(name):
  sampled.agree(measured_texts()[name], exact_texts()[name])
