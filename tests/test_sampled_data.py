"""Mean gradients of losses on data, through precomputed arrays, packing and update, against exact ones by enumeration.

The data are samples of an older policy of `sampled.py`; the rest is as in test_sampled_gradients.py.
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
from jaxpost.programs import topk
from jaxpost.roles import Frozen, place
from jaxpost.stage import precompute

pytestmark = pytest.mark.long
ROWS, LENGTH, _ = sampled.SHAPE


def documents(graded):
  """The samples as rows of data."""
  rollout, found = graded.rollout, []
  for n, (ids, length) in enumerate(zip(rollout.completions, rollout.lengths)):
    prompt = rollout.prompts[n // sampled.SIZE].tokens
    found.append(Example(np.append(prompt, ids[:length]), np.arange(len(prompt) + length) >= len(prompt)))
  return found


def packed(roles, examples):
  rows = packing.pack_examples(examples, LENGTH)
  return roles.policy.place(packing.to_batch([[examples[i] for i in row] for row in rows], LENGTH, ROWS))


def filled(roles, examples, fields, read):
  """The batch with the arrays that a frozen model has computed before the first step."""
  found = Documents(examples.__getitem__, len(examples), fields)
  found.fill(examples, read)
  return packed(roles, [found[n] for n in range(len(examples))])


def runner(teacher, spec):
  """Host batch -> outputs, as `stage.frozen_roles` makes it."""

  def run(batch):
    found = to_host(spec.read(teacher(place(teacher.layout, ROWS // 2, batch))))
    return {k: x.reshape(-1, *x.shape[2:]) for k, x in found.items()}

  return run


def weights():
  """How often each token is trained [P, Y, C]; the sum is 1."""
  weight = sampled.chance('behavior')[..., None] * sampled.MASK
  return weight / weight.sum()


def exact(losses):
  """The gradients [D] by name of the mean over tokens of losses(logits [P, Y, C, SYMBOLS]), which compile at once."""
  weight = weights()

  def means(params):
    return {name: (weight * x).sum() for name, x in losses(sampled.logits(params)).items()}

  found = jax.jit(jax.jacrev(means))(sampled.params('policy'))
  return {name: sampled.flat(x) for name, x in found.items()}


def agree(found, wanted):
  """Within 4 standard errors; a gradient that is 1.5 times as long is not."""
  right, wrong = (sampled.z_scores(found, x) for x in (wanted, 1.5 * wanted))
  assert np.abs(right).max() < 4, right
  assert np.abs(wrong).max() > 4, wrong


def probability(p):
  """Returns the probability of each token of all answers, by probabilities [P, Y, C, SYMBOLS]."""
  return jnp.take_along_axis(p, jnp.asarray(sampled.PADDED)[None, ..., None], axis=-1)[..., 0]


def kl(p, q):
  return (p * jnp.log(p / q)).sum(axis=-1)


def jsd(teacher, student, beta):
  """GKD (arXiv:2306.13649), eq. 1, of probabilities of outcomes."""
  if beta == 0:
    return kl(teacher, student)
  mixed = beta * teacher + (1 - beta) * student
  return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


# --------------------------------------------------------------- cross entropy

NLL = {
  'cross entropy': {},
  'dft': dict(kind='dft'),
  'label smoothing': dict(label_smoothing=0.2),
  'z-loss': dict(z_loss=0.3),
}


@functools.lru_cache
def of_labels():
  cases = {
    name: Case(sft.SFT, sampled.config_of('sft', nll=options), sampler='behavior') for name, options in NLL.items()
  }
  return sampled.gradients(cases, lambda roles, config, graded: packed(roles, documents(graded)))


@functools.lru_cache
def of_cross_entropy():
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
def test_cross_entropy(name):
  agree(of_labels()[name], of_cross_entropy()[name])


# ------------------------------------------------- the teacher's most probable tokens

TOP = {'forward KL': dict(beta=0.0), 'JSD': dict(beta=0.3), 'JSD and cross entropy': dict(beta=0.3, nll_coef=0.5)}
KEPT, HOT = 2, 1.5


@functools.lru_cache
def of_top():
  common = sampled.shared()
  options = dict(k=KEPT, vocab_size=sampled.SYMBOLS, temperature=HOT)
  program = topk.make_topk(sampled.model(), common['layout'], tiny.EXACT, common['ledger'], **options)
  teacher = Frozen(sampled.params('reference'), program, common['layout'], sampled.model())

  def make(roles, config, graded):
    (spec,) = distill.precompute(config).values()
    examples = documents(graded)
    read = precompute.read(
      examples.__getitem__, len(examples), spec.arrays, runner(teacher, spec), rows=ROWS, row_length=LENGTH
    )
    return filled(roles, examples, spec.arrays, read)

  cases = {}
  for name, options in TOP.items():
    config = sampled.config_of('distill', distill=dict(options, teachers=('x',), top_k=KEPT, temperature=HOT))
    cases[name] = Case(distill.DISTILL, config, sampler='behavior')
  return sampled.gradients(cases, make)


@functools.lru_cache
def of_outcomes():
  """Divergences of the teacher's two most probable tokens and the rest, and cross entropy at temperature 1."""
  teacher = jax.nn.softmax(sampled.logits(sampled.params('reference')) / HOT)
  places = jnp.argsort(-teacher, axis=-1)

  def outcomes(p):
    ordered = jnp.take_along_axis(p, places, axis=-1)
    return jnp.concatenate([ordered[..., :KEPT], ordered[..., KEPT:].sum(axis=-1, keepdims=True)], axis=-1)

  def losses(logits):
    student = outcomes(jax.nn.softmax(logits / HOT))
    nll = -jnp.log(probability(jax.nn.softmax(logits)))
    found = {name: jsd(outcomes(teacher), student, x['beta']) for name, x in TOP.items()}
    return {name: x + TOP[name].get('nll_coef', 0) * nll for name, x in found.items()}

  return exact(losses)


@pytest.mark.parametrize('name', TOP)
def test_distillation_of_most_probable_tokens(name):
  agree(of_top()[name], of_outcomes()[name])


# ------------------------------------------------------ a teacher with other tokens

# The symbols of the student are the texts a, b, c, and a stop token; the teacher has a token for ab.
MINE = text_alignment.Bytes([b'a', b'b', b'c', None], {'<stop>': 3}, frozenset([3]))
THEIRS = text_alignment.Bytes([b'ab', b'c', b'a', b'b', None, b'd'], {'<end>': 4}, frozenset([4]))
OWN = {(0, 1): 0, (2,): 1, (0,): 2, (1,): 3, (3,): 4}  # symbols of the student -> token of the teacher
SAME = {token: symbols[0] for symbols, token in OWN.items() if len(symbols) == 1}
TEXT = {'JSD': dict(beta=0.3), 'forward KL': dict(beta=0.0)}
TEXT_TOP = 3


def in_their_tokens(symbols):
  """[(the first of the symbols that a token stands for, their number, the token)]."""
  found, at = [], 0
  while at < len(symbols):
    size = 2 if tuple(symbols[at : at + 2]) == (0, 1) else 1
    found.append((at, size, OWN[tuple(symbols[at : at + size])]))
    at += size
  return found


@functools.lru_cache
def teacher_of_text():
  shape = dict(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)
  made = model_lib.build(tiny.config(vocab_size=len(THEIRS.texts), initializer_range=0.5, **shape))
  return made, tiny.params(made, seed=5)


def make_text(teacher, roles, config, graded):
  (spec,) = distill.precompute(config).values()
  examples, theirs = documents(graded), []
  for mine in examples:
    parts = [in_their_tokens(mine.tokens[mine.loss_mask == side].tolist()) for side in (False, True)]
    ids = [token for part in parts for *_, token in part]
    theirs.append(Example(np.array(ids, np.int32), np.arange(len(ids)) >= len(parts[0])))
  shape = types.SimpleNamespace(rows=ROWS, row_length=LENGTH)
  texts = TextsOfTeacher(types.SimpleNamespace(shape=shape), 'teacher_0', examples, None, None)
  texts.theirs, texts.texts = theirs, (MINE, THEIRS)  # made by hand, not by chat templates and tokenizers of folders
  return filled(roles, examples, spec.arrays, texts.read(spec, runner(teacher, spec), precompute.read))


@functools.lru_cache
def of_texts():
  common, (made, params) = sampled.shared(), teacher_of_text()
  options = dict(k=TEXT_TOP, vocab_size=len(THEIRS.texts), temperature=1.0, own=True)
  program = topk.make_topk(made, common['layout'], tiny.EXACT, common['ledger'], **options)
  teacher = Frozen(params, program, common['layout'], made)
  cases = {}
  for name, options in TEXT.items():
    config = sampled.config_of('distill', distill=dict(options, teachers=('x',), top_k=TEXT_TOP, align='text'))
    cases[name] = Case(distill.DISTILL, config, sampler='behavior')
  return sampled.gradients(cases, functools.partial(make_text, teacher))


def places_of_text():
  """Rows of the teacher, and (prompt, answer, first symbol, symbols, row, column, token) of its tokens of answers."""
  rows, places = [], []
  for p, prompt in enumerate(sampled.PROMPTS):
    head = [token for *_, token in in_their_tokens(prompt.tolist())]
    for y, answer in enumerate(sampled.ANSWERS):
      parts = in_their_tokens(answer)
      places += [(p, y, at, size, len(rows), len(head) + n - 1, token) for n, (at, size, token) in enumerate(parts)]
      row = [*head, *(token for *_, token in parts)]
      rows.append(row + [0] * (2 + sampled.C - len(row)))
  return np.array(rows, np.int32), np.array(places)


@functools.lru_cache
def of_spans():
  """Divergences of tokens that both have, and of the text ab as one event (arXiv:2503.20083, eq. 8)."""
  rows, places = places_of_text()
  teacher = np.asarray(jax.nn.softmax(tiny.logits(*teacher_of_text(), rows)))[places[:, 4], places[:, 5]]
  is_pair = places[:, 3] == 1
  chosen = np.zeros((is_pair.sum(), TEXT_TOP, sampled.SYMBOLS))  # which symbol each of the most probable tokens is
  for row, p in zip(chosen, teacher[is_pair]):
    for k, token in enumerate(np.argsort(-p)[:TEXT_TOP]):
      row[k] = np.arange(sampled.SYMBOLS) == SAME.get(token, -1)
  mass = np.sort(teacher[is_pair])[:, ::-1][:, :TEXT_TOP] * chosen.sum(axis=2)
  event = teacher[~is_pair, places[~is_pair, 6]]
  assert 0 < chosen.sum(axis=(1, 2)).min() < TEXT_TOP and (~is_pair).sum() > 9

  def with_rest(x):
    """Joins the chosen symbols and the rest; a symbol that is missing has 1 on both sides, which adds nothing."""
    return jnp.concatenate([jnp.where(chosen.sum(axis=2) > 0, x, 1), 1 - x.sum(axis=1, keepdims=True)], axis=1)

  def losses(logits):
    p = jax.nn.softmax(logits)
    at, first = (tuple(places[x, :3].T) for x in (is_pair, ~is_pair))
    student = jnp.einsum('nks,ns->nk', chosen, p[at])
    text = probability(p)[first] * probability(p)[(*first[:2], first[2] + 1)]
    found = {}
    for name, options in TEXT.items():
      pairs = jsd(with_rest(mass), with_rest(student), options['beta'])
      spans = jsd(*(jnp.stack([x, 1 - x], axis=1) for x in (event, text)), options['beta'])
      found[name] = jnp.zeros(p.shape[:3]).at[at].set(pairs).at[first].set(spans)
    return found

  return exact(losses)


@pytest.mark.parametrize('name', TEXT)
def test_distillation_of_texts(name):
  agree(of_texts()[name], of_spans()[name])
