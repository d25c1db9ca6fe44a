"""A policy that is small enough to enumerate, sampled and trained by the real programs.

A transformer with 4 symbols answers with up to 3 tokens, one symbol ends an answer: 40 answers to each
of two prompts. `blocks` samples and grades with engine, workers and scoring programs, `gradients` makes
credit, batches and updates of them. `groups` lists all pairs of answers with their probabilities, and
`of_weights` turns derivatives of their log-probs into the gradient of the weights.

Legend: P prompts, Y answers to each, C tokens of an answer, D weights, N blocks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny

from jaxpost.losses import head_chunk
from jaxpost.models import model as model_lib
from jaxpost.monitor.timeline import Timeline
from jaxpost.programs import score
from jaxpost.programs import train as programs
from jaxpost.programs.compile import Ledger
from jaxpost.rewards.pool import RewardPool
from jaxpost.rl import batching
from jaxpost.rl.controller import Controller
from jaxpost.rl.grading import GradedRollout, Grader
from jaxpost.roles import Frozen, Policy, Roles, Trainable
from jaxpost.rollout import native
from jaxpost.rollout.sampler import Sampler
from jaxpost.stage import algorithms, frozen_roles
from jaxpost.stage import config as config_lib
from jaxpost.testing import IntTokenizer
from jaxpost.types import Batch, Objective, Prompt, RowShape, Scores

SYMBOLS, C, STOP = 4, 3, 3
TEMPERATURE = 0.8
PROMPTS = (np.array([2], np.int32), np.array([0, 1], np.int32))
ANSWERS = [
  a
  for n in range(1, C + 1)
  for a in itertools.product(range(SYMBOLS), repeat=n)
  if STOP not in a[:-1] and (n == C or a[-1] == STOP)
]
LENGTHS = np.array([len(a) for a in ANSWERS])
MASK = (np.arange(C) < LENGTHS[:, None]).astype(np.float64)  # [Y, C]
FINISHED = np.array([a[-1] == STOP for a in ANSWERS])
PADDED = np.array([(*a, *(0,) * (C - len(a))) for a in ANSWERS], np.int32)
# Two rewards of each answer, of which the sum is 'one' + 0.5 'two'. A third one says which answers are right.
REWARDS = np.random.RandomState(3).standard_normal((2, len(PROMPTS), len(ANSWERS)))
WEIGHTS = (1.0, 0.5)
RIGHT = (REWARDS[0] > 0.2).astype(np.float64)
# Rewards of first turns, by their token; see `with_turns`.
FIRST = np.array([[0, 1, 2, 0.5], [1.5, 0, 0.3, 2]])[:, [a[0] for a in ANSWERS]]

BLOCKS, SIZE = 48, 2  # of a group, unless a case has another
GROUPS = {2: 64, 3: 42}  # of a step of the controller, by the size of a group
SHAPE = RowShape(36, 20)  # rows of a batch; two micro-batches
PAIRS = RowShape(48, 16)


# ----------------------------------------------------------------- the policy


@functools.lru_cache
def model(head: str = ''):
  """The policy; with head='critic' its critic, with 'value' a policy that has a scalar head, too."""
  config = tiny.config(
    num_layers=1,
    vocab_size=SYMBOLS,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    initializer_range=0.05,
  )
  config = dataclasses.replace(config, more_heads=('value',) * (head == 'value'))
  return model_lib.build(model_lib.with_scalar_head(config) if head == 'critic' else config)


@functools.lru_cache
def params(kind: str) -> dict:
  """Weights of 'policy', and of others near it; of 'critic' and the critic 'before'; of the policy with their heads."""
  if kind.startswith('value, '):
    return params('policy') | {'score': params(kind.removeprefix('value, '))['score']}
  base = tiny.params(model('critic' if kind in ('critic', 'before') else ''))
  if kind in ('policy', 'critic'):
    return base
  seed, size = {'behavior': (1, 0.07), 'reference': (2, 0.1), 'later': (4, 0.06), 'before': (5, 0.2)}[kind]
  random = np.random.RandomState(seed)
  return jax.tree.map(lambda x: x + size * random.standard_normal(x.shape).astype(np.float32), base)


def _rows(fn: Callable[[np.ndarray], jax.Array]) -> jax.Array:
  """fn(tokens [Y, T]) -> [Y, T, ...] at the positions that predict answers: [P, Y, C, ...]."""
  found = []
  for prompt in PROMPTS:
    rows = np.concatenate([np.tile(prompt, (len(ANSWERS), 1)), PADDED], axis=1)
    found.append(fn(rows)[:, len(prompt) - 1 : -1])
  return jnp.stack(found)


def logits(weights: dict) -> jax.Array:
  """[P, Y, C, SYMBOLS]."""
  head = model().head(weights)

  def of(rows):
    hidden = tiny.hidden(model(), weights, rows)
    return head_chunk.logits(hidden, head, model().config.logit_form, 'float32')[..., :SYMBOLS]

  return _rows(of)


def values(weights: dict) -> jax.Array:
  """[P, Y, C], of the state before each token."""
  return _rows(lambda rows: model('critic').values(weights, tiny.hidden(model('critic'), weights, rows)))


@jax.jit
def _outputs(weights: dict) -> tuple[jax.Array, jax.Array]:
  logp = jax.nn.log_softmax(logits(weights) / TEMPERATURE)
  taken = jnp.take_along_axis(logp, jnp.asarray(PADDED)[None, ..., None], axis=-1)[..., 0]
  return taken * MASK, -(jnp.exp(logp) * logp).sum(axis=-1) * MASK


def logprobs(kind: str) -> np.ndarray:
  """[P, Y, C]."""
  return np.asarray(_outputs(params(kind))[0], np.float64)


def entropies(kind: str) -> np.ndarray:
  return np.asarray(_outputs(params(kind))[1], np.float64)


def chance(kind: str, top_k: int = 0) -> np.ndarray:
  """The probability of each answer to its prompt, [P, Y]; with `top_k`, where only so many tokens can be drawn."""
  drawn = logprobs(kind)
  if top_k:
    logp = np.asarray(jax.nn.log_softmax(logits(params(kind)) / TEMPERATURE), np.float64)
    bound = np.sort(logp)[..., -top_k, None]
    kept = np.where(logp >= bound, logp, -np.inf)
    mass = np.log(np.exp(kept).sum(axis=-1))
    drawn = np.where(drawn >= bound[..., 0], drawn - mass, -np.inf) * np.where(MASK > 0, 1, np.nan)
  return np.exp(np.nansum(drawn, axis=2))


def greedy(kind: str) -> np.ndarray:
  """The index of the answer that has the most probable token everywhere, [P]."""
  best = np.asarray(logits(params(kind))).argmax(axis=-1)
  return ((best == PADDED) | (MASK == 0)).all(axis=2).argmax(axis=1)


@jax.jit
def _pull_back(weights, by_logprob, by_entropy):
  return jax.vjp(_outputs, weights)[1]((by_logprob, by_entropy))[0]


def of_weights(kind: str, by_logprob: np.ndarray, by_entropy: np.ndarray | None = None) -> np.ndarray:
  """Derivatives by log-probs and entropies [P, Y, C] -> the gradient of the weights [D]."""
  zeros = np.zeros(by_logprob.shape)
  arrays = (jnp.asarray(x, jnp.float32) for x in (by_logprob, zeros if by_entropy is None else by_entropy))
  return flat(_pull_back(params(kind), *arrays))


def flat(tree: Any) -> np.ndarray:
  """[D]."""
  return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@functools.lru_cache
def start_of(kind: str) -> np.ndarray:
  """[D], the weights before an update."""
  return flat(params(kind))


# ------------------------------------------------------------- all groups


def rewards() -> np.ndarray:
  """[P, Y]."""
  return np.tensordot(WEIGHTS, REWARDS, 1)


@functools.lru_cache
def members(size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
  """The prompt [K] and the answers [K, size] of all groups."""
  found = np.array(list(itertools.product(range(len(ANSWERS)), repeat=size)))
  return np.repeat(np.arange(len(PROMPTS)), len(found)), np.tile(found, (len(PROMPTS), 1))


def groups(sampler: str, present: str, old: str, size: int = SIZE, top_k: int = 0, right: bool = False) -> Any:
  """All groups that can be drawn, as `formulas.Groups`; the first arguments say which policy is which."""
  prompt, answers = members(size)
  p = prompt[:, None]
  kinds = dict(present=present, old=old, sampler=sampler, reference='reference')
  graded = RIGHT if right else rewards()
  return formulas.Groups(
    chance=chance(sampler, top_k)[p, answers].prod(axis=1) / len(PROMPTS),
    mask=MASK[answers],
    finished=FINISHED[answers],
    rewards=graded[p, answers],
    **{name: logprobs(kind)[p, answers] for name, kind in kinds.items()},
    entropy=entropies(old)[p, answers],
    components={name: (w, x[p, answers]) for name, w, x in zip(('one', 'two'), WEIGHTS, REWARDS)},
    greedy=graded[prompt, greedy(sampler)[prompt]],
  )


def of_answers(x: np.ndarray) -> np.ndarray:
  """Sums over groups: [K, SIZE, C] -> [P, Y, C]."""
  prompt, answers = members(x.shape[1])
  out = np.zeros((len(PROMPTS), len(ANSWERS), C))
  np.add.at(out, (prompt[:, None], answers), x)
  return out


# ------------------------------------------------------------ the product


_TEXTS = [' '.join(map(str, tokens)) for tokens in PROMPTS]
_PLACES = {answer: i for i, answer in enumerate(ANSWERS)}


def _graded(table, prompts, completion_ids):
  return [float(table[_TEXTS.index(p), _PLACES[tuple(ids)]]) for p, ids in zip(prompts, completion_ids)]


def one(prompts, completion_ids, **columns):
  """A reward function in the form of TRL's."""
  return _graded(REWARDS[0], prompts, completion_ids)


def two(prompts, completion_ids, **columns):
  """Another one."""
  return _graded(REWARDS[1], prompts, completion_ids)


def right(prompts, completion_ids, **columns):
  """1 or 0."""
  return _graded(RIGHT, prompts, completion_ids)


class Prompts:
  """Both prompts in turn, endlessly, like `PromptStream`."""

  def __init__(self, count: int):
    self.index, self.count = 0, count

  def __next__(self):
    start, self.index = self.index, self.index + self.count
    return tuple(Prompt(i, PROMPTS[i % 2], _TEXTS[i % 2], {}) for i in range(start, self.index)), {}


def config_of(algorithm: str, **over: Any) -> config_lib.Config:
  base = dict(
    algorithm=algorithm,
    reward='x' if algorithms.load_algorithm(algorithm).rewards else '',
    rollout=dict(prompts=GROUPS[SIZE], group_size=SIZE, max_new_tokens=C, max_prompt_length=2, temperature=TEMPERATURE),
    model=dict(dtype='float32'),
  )
  found = algorithms.load_algorithm(algorithm)
  config = config_lib.resolve(next(iter(config_lib.parse(tiny.merged(base, over)).values())), found.defaults)
  found.check(config)
  return config


@functools.lru_cache
def shared() -> dict[str, Any]:
  """Returns what all cases share: engine, grader, scoring programs, frozen roles."""
  layout, ledger = tiny.one_device(), Ledger()
  settings = native.SamplerConfig(
    slots=GROUPS[SIZE] * SIZE, max_prompt=2, max_new_tokens=C, stop_ids=(STOP,), temperature=TEMPERATURE
  )
  engine = native.NativeEngine(model(), settings, tiny.one_device('rollout'), tiny.EXACT, ledger)
  tokenizer = IntTokenizer(SYMBOLS, stop_ids=(STOP,))
  scored = score.make_score(model(), layout, tiny.EXACT, ledger, temperature=TEMPERATURE)
  hidden = score.make_hidden(model(), layout, tiny.EXACT, ledger)
  return dict(
    layout=layout,
    ledger=ledger,
    engine=engine,
    sampler=Sampler(engine, np.array([1, 2], np.uint32)),
    graders=(Grader(RewardPool((one, two), weights=WEIGHTS), tokenizer), Grader(RewardPool((right,)), tokenizer)),
    score=scored,
    reference=Frozen(params('reference'), scored, layout, model()),
    teachers=tuple(Frozen(params(kind), hidden, layout, model()) for kind in ('reference', 'behavior')),
  )


def trainable(objective: Objective, head: str = '') -> Trainable:
  """A policy or a critic whose optimizer subtracts the gradient; `head` is that of `model`."""
  common, part = shared(), model(head)
  layout, ledger = common['layout'], common['ledger']
  optimizer = optax.sgd(1.0)
  shardings = programs.state_shardings(part, optimizer, layout)
  update = programs.make_update(
    part, objective, optimizer, lambda step: 1.0, layout, tiny.EXACT, ledger, clip_norm=math.inf, shardings=shardings
  )
  start = {'': 'policy', 'critic': 'critic', 'value': 'value, critic'}[head]
  temperature = 1.0 if head == 'critic' else TEMPERATURE
  made = dict(
    model=part,
    state=programs.make_state(_copy(params(start)), optimizer, shardings, ledger),
    layout=layout,
    micro_batch_size=SHAPE.num_rows // 2,
    update_program=update,
    make_score=lambda: (
      score.make_score(part, layout, tiny.EXACT, ledger, temperature=temperature) if head else common['score']
    ),
    objective=objective,
  )
  if head == 'critic':
    return Trainable(**made)
  heads = tuple(frozen_roles.teacher_head(x, part.config) for x in common['teachers']) if objective.divergence else ()
  return Policy(**made, frozen={'teacher_heads': heads})


def _copy(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)


def set_params(role: Trainable, kind: str) -> None:
  role.state = role.state.replace(params=_copy(params(kind)))


def make_controller(algorithm: Any, config: Any, roles: Roles) -> Controller:
  common = shared()
  return Controller(
    algorithm=algorithm,
    config=config,
    roles=roles,
    sampler=common['sampler'],
    grader=common['graders'][0],
    prompts=Prompts(config.rollout.prompts),
    timer=Timeline(collections.defaultdict(str)),
    step_shape=SHAPE,
    update_shape=PAIRS if algorithm.pack else SHAPE,
  )


@functools.lru_cache
def blocks(sampler: str, size: int = SIZE, top_k: int = 0, right: bool = False) -> list[tuple[GradedRollout, Scores]]:
  """Returns what steps of the controller sampled from these weights, graded, and scored by policy and reference.

  Args:
    size, top_k, right: see `Case`. Answers that are right or wrong are graded beside a greedy one.
  """
  config = config_of('grpo', rollout=dict(prompts=GROUPS[size], group_size=size))
  algorithm = dataclasses.replace(
    algorithms.load_algorithm('grpo'),
    scores=lambda config: ('old_logprobs', 'ref_logprobs', 'entropy'),
    greedy_baseline=lambda config: right,
  )
  policy = trainable(algorithm.objective(config))
  controller = make_controller(algorithm, config, Roles(policy, reference=shared()['reference']))
  controller.grader = shared()['graders'][right]
  if top_k:
    controller.sampler = functools.partial(controller.sampler, top_k=top_k)
  shared()['engine'].load(params(sampler), 0)
  found = []
  for step in range(BLOCKS):
    pending = controller.sample(step)
    scores = controller.scorer.fetch(controller.scorer.start(pending.rollout))
    found.append((controller.grade(pending, scores), scores))
  return found


@dataclasses.dataclass
class Case:
  """A method, and which policy is which.

  Attributes:
    sampler, present: that samples, and from which the update starts.
    role: 'policy' or 'critic', whose gradient is compared.
    size: of groups; top_k: tokens that can be drawn, 0: all; right: rewards are 0 and 1.
    turns: the second token of an answer counts as one of an environment, see `with_turns`.
  """

  algorithm: Any
  config: Any
  sampler: str = 'policy'
  present: str = 'policy'
  role: str = 'policy'
  size: int = SIZE
  top_k: int = 0
  right: bool = False
  turns: bool = False


def with_turns(graded: GradedRollout) -> GradedRollout:
  """Makes turns of answers: the first token, what the environment says, and the third token.

  The first turn has a reward of its own, and the outcome is that of the answer.
  """
  rollout = graded.rollout
  of_turns = np.zeros(rollout.completions.shape)
  prompt = np.arange(len(of_turns)) // batching.group_size(rollout) % 2
  of_turns[:, 0] = FIRST[prompt, [_PLACES[tuple(a[:n])] for a, n in zip(rollout.completions.tolist(), rollout.lengths)]]
  sampled = np.tile(np.arange(C) != 1, (len(of_turns), 1))
  rollout = rollout.replace(mask=sampled, turn_rewards=of_turns)
  return dataclasses.replace(graded, rollout=rollout, rewards=graded.rewards + of_turns.sum(axis=1))


def objective_of(cases: Sequence[Case]) -> Objective:
  """One objective for all cases, which compiles once; `Batch.arrays['case']` holds the number of the one to compute."""
  each = [case.algorithm.objective(case.config) for case in cases]
  added = {name for x in each for name in x.arrays}  # by an algorithm; others belong to the data

  def own(number, arrays):
    return {name: x for name, x in arrays.items() if name not in added or name in each[number].arrays}

  def with_arrays(number, fn, outputs, arrays):
    return fn(outputs, own(number, arrays))[0]

  def tokens(outputs, arrays):
    number = jnp.max(arrays['case']).astype(jnp.int32)
    branches = [functools.partial(with_arrays, i, x.fn) for i, x in enumerate(each)]
    return jax.lax.switch(number, branches, outputs, arrays), {}

  def of_batch(number, fn, outputs, batch):
    return fn(outputs, batch.replace(arrays=own(number, batch.arrays)))[0]

  def whole(outputs, batch):
    number = jnp.max(batch.arrays['case']).astype(jnp.int32)
    branches = [functools.partial(of_batch, i, x.fn) for i, x in enumerate(each)]
    return jax.lax.switch(number, branches, outputs, batch), {}

  def divergence(logits, teachers, arrays):
    number = jnp.max(arrays['case']).astype(jnp.int32)
    return jax.lax.switch(number, [lambda *args, d=x.divergence: d(*args) for x in each], logits, teachers, arrays)

  return dataclasses.replace(
    each[0],
    fn=whole if each[0].coupled else tokens,
    reads=tuple({name for x in each for name in x.reads}),
    learns=tuple({name for x in each for name in x.learns}),
    arrays=tuple(sorted(added)),
    divergence=divergence if each[0].divergence else None,
  )


def gradients(cases: dict[str, Case], make: Callable | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """{name: (gradients [N, D], what each is normalized by [N])} of the updates of all blocks.

  make: (roles, config, graded rollout) -> placed batch, for what is not trained on policy.
  """
  several = list(cases.values())
  algorithm, config = several[0].algorithm, several[0].config
  objective = objective_of(several)
  has_values = algorithm.value_head(config)
  policy = trainable(objective, 'value' if has_values else '')
  critic = trainable(algorithm.critic(config), 'critic') if algorithm.critic(config) else None
  # Distillation alone has teachers: log-probs of teachers, where there are any, take the place of the reference's.
  teachers = shared()['teachers'] if objective.divergence else ()
  roles = Roles(policy, critic, shared()['reference'], None, teachers)
  found = {}
  for number, (name, case) in enumerate(cases.items()):
    controller = make_controller(case.algorithm, case.config, roles)
    rows = []
    for step, (graded, scores) in enumerate(blocks(case.sampler, case.size, case.top_k, case.right)):
      count = 1.0
      graded = with_turns(graded) if case.turns else graded
      if make or critic or has_values:
        set_params(policy, 'value, before' if has_values else 'policy')  # which scores
      if make:
        batch = make(roles, case.config, graded)
      else:
        controller.step = step
        if critic:
          set_params(critic, 'before')
        if critic or has_values:
          scores = controller.scorer.fetch(controller.scorer.start(graded.rollout))
        experience = controller.make_experience(graded, scores)
        credit = case.algorithm.credit(experience, case.config)
        batch = next(u.batch for u in controller.make_batches(experience, credit) if u.role == case.role)
        count = _normalizer(case, credit)
      rows.append((_step(roles, case, batch, number, objective), count))
    found[name] = tuple(np.array(x) for x in zip(*rows))
  return found


def _step(roles: Roles, case: Case, batch: Batch, number: int, objective: Objective) -> np.ndarray:
  """Returns what an update subtracts from the weights, [D]."""
  role = roles.trainable[case.role]
  start = case.present if case.role == 'policy' else 'critic'
  set_params(role, start)
  if case.role == 'policy':
    zeros = jnp.zeros_like(batch.loss_weights)
    arrays = {name: zeros for name in objective.arrays} | batch.arrays | {'case': zeros + number}
    batch = batch.replace(arrays=arrays)
  role.update(batch)
  return start_of(start) - flat(role.state.params)


def _normalizer(case: Case, credit: Any) -> float:
  """Tokens, sequences or pairs."""
  if case.algorithm.pack:
    return credit.metrics['pairs']
  per_token = case.config.rl.aggregate == 'token'
  return float(credit.mask.sum() if per_token else (credit.mask > 0).any(axis=1).sum())


@functools.lru_cache
def directions(size: int) -> np.ndarray:
  """Unit vectors [n, D] along which gradients [D] are compared, besides the exact gradient."""
  found = [*np.random.RandomState(9).standard_normal((3, size))]
  if size == len(start_of('policy')):
    probable = chance('policy')[..., None] * MASK
    found.append(of_weights('policy', probable * rewards()[..., None]))
    found.append(of_weights('policy', probable * (logprobs('policy') - logprobs('reference'))))
  return np.array([x / np.linalg.norm(x) for x in found])


def z_scores(measured: tuple[np.ndarray, np.ndarray], exact: np.ndarray) -> np.ndarray:
  """How many standard errors the mean of sampled gradients [N, D] is from the exact one [D], by direction."""
  gradient, count = measured
  along = np.vstack([exact / np.linalg.norm(exact), directions(len(exact))])
  sampled = gradient @ along.T
  mean = count @ sampled / count.sum()
  error = count[:, None] * (sampled - mean) / count.mean()
  standard = np.sqrt((error**2).sum(axis=0) / (len(error) - 1) / len(error))
  return (mean - along @ exact) / standard
