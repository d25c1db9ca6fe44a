"""Sampled gradients of a policy that is small enough to enumerate: it is sampled and trained by the real programs.

The policy is a transformer over 4 symbols that answers with up to 3 tokens; one symbol ends an answer. That makes 40
answers to each of two prompts. `blocks` samples and grades them with the engine, the reward workers and the scoring
programs; `gradients` turns the samples into credit, batches and updates. For the exact gradient, `groups` lists all
groups of answers with their probabilities, and `of_weights` turns derivatives with respect to their log-probs into the
gradient of the weights.

Legend: P prompts, Y answers to each prompt, C tokens of an answer, D weights, N blocks, K groups.
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
# Two rewards of each answer, 'one' and 'two'; the total is 'one' + 0.5 * 'two'. RIGHT is a third reward, of 0 or 1.
REWARDS = np.random.RandomState(3).standard_normal((2, len(PROMPTS), len(ANSWERS)))
WEIGHTS = (1.0, 0.5)
RIGHT = (REWARDS[0] > 0.2).astype(np.float64)
# Turn rewards of the first turn, by prompt and by the first token of the answer; see `with_turns`.
FIRST = np.array([[0, 1, 2, 0.5], [1.5, 0, 0.3, 2]])[:, [a[0] for a in ANSWERS]]

BLOCKS, SIZE = 48, 2  # controller steps; answers of a group, unless a case has another size
GROUPS = {2: 64, 3: 42}  # groups of a controller step, by the size of a group
SHAPE = RowShape(36, 20)  # rows of a batch, which are two micro-batches
PAIRS = RowShape(48, 16)


# ----------------------------------------------------------------- the policy


@functools.lru_cache
def model(head: str = ''):
  """Returns the policy; with head='critic' its critic, with 'value' a policy that also has a scalar head."""
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
  """Returns weights: of the 'policy', of noisy copies of it ('behavior', 'reference', 'later'), of the 'critic', of a
  noisy copy of that ('before'); 'value, critic' and 'value, before' are the policy with the head of that critic.
  """
  if kind.startswith('value, '):
    return params('policy') | {'score': params(kind.removeprefix('value, '))['score']}
  base = tiny.params(model('critic' if kind in ('critic', 'before') else ''))
  if kind in ('policy', 'critic'):
    return base
  seed, scale = {'behavior': (1, 0.07), 'reference': (2, 0.1), 'later': (4, 0.06), 'before': (5, 0.2)}[kind]
  random = np.random.RandomState(seed)
  return jax.tree.map(lambda x: x + scale * random.standard_normal(x.shape).astype(np.float32), base)


def _rows(fn: Callable[[np.ndarray], jax.Array]) -> jax.Array:
  """Applies fn(tokens [Y, T]) -> [Y, T, ...]; returns the positions that predict answers, [P, Y, C, ...]."""
  outputs = []
  for prompt in PROMPTS:
    rows = np.concatenate([np.tile(prompt, (len(ANSWERS), 1)), PADDED], axis=1)
    outputs.append(fn(rows)[:, len(prompt) - 1 : -1])
  return jnp.stack(outputs)


def logits(weights: dict) -> jax.Array:
  """Returns the logits of every token of every answer, [P, Y, C, SYMBOLS]."""
  head = model().head(weights)

  def logits_of_rows(rows):
    hidden = tiny.hidden(model(), weights, rows)
    return head_chunk.logits(hidden, head, model().config.logit_form, 'float32')[..., :SYMBOLS]

  return _rows(logits_of_rows)


def values(weights: dict) -> jax.Array:
  """Returns the critic's values of the state before each token, [P, Y, C]."""
  return _rows(lambda rows: model('critic').values(weights, tiny.hidden(model('critic'), weights, rows)))


@jax.jit
def _outputs(weights: dict) -> tuple[jax.Array, jax.Array]:
  logp = jax.nn.log_softmax(logits(weights) / TEMPERATURE)
  logprobs_of_answers = jnp.take_along_axis(logp, jnp.asarray(PADDED)[None, ..., None], axis=-1)[..., 0]
  return logprobs_of_answers * MASK, -(jnp.exp(logp) * logp).sum(axis=-1) * MASK


def logprobs(kind: str) -> np.ndarray:
  """Returns the log-probs of the tokens of all answers, [P, Y, C]."""
  return np.asarray(_outputs(params(kind))[0], np.float64)


def entropies(kind: str) -> np.ndarray:
  """Returns the entropies of the distributions from which the tokens were drawn, [P, Y, C]."""
  return np.asarray(_outputs(params(kind))[1], np.float64)


def chance(kind: str, top_k: int = 0) -> np.ndarray:
  """Returns the probability of each answer, [P, Y]; with `top_k`, only the `top_k` likeliest tokens can be drawn."""
  answer_logp = logprobs(kind)
  if top_k:
    logp = np.asarray(jax.nn.log_softmax(logits(params(kind)) / TEMPERATURE), np.float64)
    bound = np.sort(logp)[..., -top_k, None]
    kept = np.where(logp >= bound, logp, -np.inf)
    mass = np.log(np.exp(kept).sum(axis=-1))
    answer_logp = np.where(answer_logp >= bound[..., 0], answer_logp - mass, -np.inf) * np.where(MASK > 0, 1, np.nan)
  return np.exp(np.nansum(answer_logp, axis=2))


def greedy(kind: str) -> np.ndarray:
  """Returns the index of the greedy answer, whose every token is the most probable one, [P]."""
  best = np.asarray(logits(params(kind))).argmax(axis=-1)
  return ((best == PADDED) | (MASK == 0)).all(axis=2).argmax(axis=1)


@jax.jit
def _pull_back(weights, by_logprob, by_entropy):
  return jax.vjp(_outputs, weights)[1]((by_logprob, by_entropy))[0]


def of_weights(kind: str, by_logprob: np.ndarray, by_entropy: np.ndarray | None = None) -> np.ndarray:
  """Turns derivatives with respect to log-probs and entropies, [P, Y, C], into the gradient of the weights, [D]."""
  zeros = np.zeros(by_logprob.shape)
  arrays = (jnp.asarray(x, jnp.float32) for x in (by_logprob, zeros if by_entropy is None else by_entropy))
  return flat(_pull_back(params(kind), *arrays))


def flat(tree: Any) -> np.ndarray:
  """Returns all leaves of a tree as one vector, [D]."""
  return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@functools.lru_cache
def start_of(kind: str) -> np.ndarray:
  """Returns the weights before an update as one vector, [D]."""
  return flat(params(kind))


# ------------------------------------------------------------- all groups


def rewards() -> np.ndarray:
  """Returns the total reward of each answer, [P, Y]."""
  return np.tensordot(WEIGHTS, REWARDS, 1)


@functools.lru_cache
def members(size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
  """Returns the index of the prompt, [K], and the indices of the answers, [K, size], of all groups."""
  answers = np.array(list(itertools.product(range(len(ANSWERS)), repeat=size)))
  return np.repeat(np.arange(len(PROMPTS)), len(answers)), np.tile(answers, (len(PROMPTS), 1))


def groups(sampler: str, present: str, old: str, size: int = SIZE, top_k: int = 0, right: bool = False) -> Any:
  """Returns all groups that can be drawn, as `formulas.Groups`; sampler, present and old are kinds of `params`."""
  prompt, answers = members(size)
  p = prompt[:, None]
  kinds = dict(present=present, old=old, sampler=sampler, reference='reference')
  reward_of_answers = RIGHT if right else rewards()
  return formulas.Groups(
    chance=chance(sampler, top_k)[p, answers].prod(axis=1) / len(PROMPTS),
    mask=MASK[answers],
    finished=FINISHED[answers],
    rewards=reward_of_answers[p, answers],
    **{name: logprobs(kind)[p, answers] for name, kind in kinds.items()},
    entropy=entropies(old)[p, answers],
    components={name: (w, x[p, answers]) for name, w, x in zip(('one', 'two'), WEIGHTS, REWARDS)},
    greedy=reward_of_answers[prompt, greedy(sampler)[prompt]],
  )


def of_answers(x: np.ndarray) -> np.ndarray:
  """Sums what belongs to the same answer over all groups: [K, size, C] -> [P, Y, C]."""
  prompt, answers = members(x.shape[1])
  out = np.zeros((len(PROMPTS), len(ANSWERS), C))
  np.add.at(out, (prompt[:, None], answers), x)
  return out


# ------------------------------------------------------------ the real programs


_TEXTS = [' '.join(map(str, tokens)) for tokens in PROMPTS]
_PLACES = {answer: i for i, answer in enumerate(ANSWERS)}


def _graded(table, prompts, completion_ids):
  return [float(table[_TEXTS.index(p), _PLACES[tuple(ids)]]) for p, ids in zip(prompts, completion_ids)]


def one(prompts, completion_ids, **columns):
  """Returns the first reward of each answer, by TRL's signature of a reward function."""
  return _graded(REWARDS[0], prompts, completion_ids)


def two(prompts, completion_ids, **columns):
  """Returns the second reward of each answer."""
  return _graded(REWARDS[1], prompts, completion_ids)


def right(prompts, completion_ids, **columns):
  """Returns 1 for right answers and 0 for wrong ones."""
  return _graded(RIGHT, prompts, completion_ids)


class Prompts:
  """An endless stream of both prompts in turn, with the interface of `PromptStream`."""

  def __init__(self, count: int):
    self.index, self.count = 0, count

  def __next__(self):
    start, self.index = self.index, self.index + self.count
    return tuple(Prompt(i, PROMPTS[i % 2], _TEXTS[i % 2], {}) for i in range(start, self.index)), {}


def config_of(algorithm: str, **fields: Any) -> config_lib.Config:
  loaded = algorithms.load_algorithm(algorithm)
  base = dict(
    algorithm=algorithm,
    reward='x' if loaded.rewards else '',
    rollout=dict(prompts=GROUPS[SIZE], group_size=SIZE, max_new_tokens=C, max_prompt_length=2, temperature=TEMPERATURE),
    model=dict(dtype='float32'),
  )
  stage = next(iter(config_lib.parse(tiny.merged(base, fields)).values()))
  config = config_lib.resolve(stage, loaded.defaults)
  loaded.check(config)
  return config


@functools.lru_cache
def shared() -> dict[str, Any]:
  """Returns the objects that all cases share: engine, sampler, graders, scoring programs and frozen roles."""
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
  """Returns a policy or a critic whose optimizer subtracts the gradient as it is; `head` is that of `model`."""
  common, part = shared(), model(head)
  layout, ledger = common['layout'], common['ledger']
  optimizer = optax.sgd(1.0)
  shardings = programs.state_shardings(part, optimizer, layout)
  update = programs.make_update(
    part, objective, optimizer, lambda step: 1.0, layout, tiny.EXACT, ledger, clip_norm=math.inf, shardings=shardings
  )
  start = {'': 'policy', 'critic': 'critic', 'value': 'value, critic'}[head]
  temperature = 1.0 if head == 'critic' else TEMPERATURE
  fields = dict(
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
    return Trainable(**fields)
  heads = tuple(frozen_roles.teacher_head(x, part.config) for x in common['teachers']) if objective.divergence else ()
  return Policy(**fields, frozen={'teacher_heads': heads})


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
  """Returns BLOCKS steps of the controller with samples of these weights, graded and scored by policy and reference.

  Args:
    sampler, size, top_k, right: see `Case`. With `right`, each group also has a greedy baseline.
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
  graded_and_scored = []
  for step in range(BLOCKS):
    pending = controller.sample(step)
    scores = controller.scorer.fetch(controller.scorer.start(pending.rollout))
    graded_and_scored.append((pending.result(scores.reward_model), scores))
  return graded_and_scored


@dataclasses.dataclass
class Case:
  """A method whose sampled gradient is compared with the exact one.

  Attributes:
    sampler, present: kinds of `params`, of the policy that samples and of the one from which the update starts.
    role: 'policy' or 'critic', whose gradient is compared.
    size: answers of a group.
    top_k: how many tokens can be drawn; 0: all.
    right: rewards are those of RIGHT, 0 or 1.
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
  """Makes answers of two turns: the first token, then the second as the environment's reply, then the third token.

  The first turn has a reward of its own; it is added to the reward of the whole answer.
  """
  rollout = graded.rollout
  turn_rewards = np.zeros(rollout.completions.shape)
  prompt = np.arange(len(turn_rewards)) // rollout.group_size % 2
  answers = [_PLACES[tuple(a[:n])] for a, n in zip(rollout.completions.tolist(), rollout.lengths)]
  turn_rewards[:, 0] = FIRST[prompt, answers]
  sampled = np.tile(np.arange(C) != 1, (len(turn_rewards), 1))
  rollout = rollout.replace(mask=sampled, turn_rewards=turn_rewards)
  return dataclasses.replace(graded, rollout=rollout, rewards=graded.rewards + turn_rewards.sum(axis=1))


def objective_of(cases: Sequence[Case]) -> Objective:
  """Returns one objective for all cases, which compiles once; `Batch.arrays['case']` holds the number of the case."""
  objectives = [case.algorithm.objective(case.config) for case in cases]
  added = {name for x in objectives for name in x.arrays}  # arrays that an algorithm adds; others belong to the data

  def arrays_of_case(number, arrays):
    return {name: x for name, x in arrays.items() if name not in added or name in objectives[number].arrays}

  def with_arrays(number, fn, outputs, arrays):
    return fn(outputs, arrays_of_case(number, arrays))[0]

  def tokens(outputs, arrays):
    number = jnp.max(arrays['case']).astype(jnp.int32)
    branches = [functools.partial(with_arrays, i, x.fn) for i, x in enumerate(objectives)]
    return jax.lax.switch(number, branches, outputs, arrays), {}

  def of_batch(number, fn, outputs, batch):
    return fn(outputs, batch.replace(arrays=arrays_of_case(number, batch.arrays)))[0]

  def whole(outputs, batch):
    number = jnp.max(batch.arrays['case']).astype(jnp.int32)
    branches = [functools.partial(of_batch, i, x.fn) for i, x in enumerate(objectives)]
    return jax.lax.switch(number, branches, outputs, batch), {}

  def divergence(logits, teachers, arrays):
    number = jnp.max(arrays['case']).astype(jnp.int32)
    branches = [lambda *args, d=x.divergence: d(*args) for x in objectives]
    return jax.lax.switch(number, branches, logits, teachers, arrays)

  return dataclasses.replace(
    objectives[0],
    fn=whole if objectives[0].coupled else tokens,
    reads=tuple({name for x in objectives for name in x.reads}),
    learns=tuple({name for x in objectives for name in x.learns}),
    arrays=tuple(sorted(added)),
    divergence=divergence if objectives[0].divergence else None,
  )


def gradients(cases: dict[str, Case], make: Callable | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Returns {name of a case: (gradients [N, D], their normalizers [N])} of one update for each block.

  Args:
    cases: methods that share one objective, by name.
    make: (roles, config, graded rollout) -> placed batch, for methods that do not train on sampled rollouts.
  """
  case_list = list(cases.values())
  algorithm, config = case_list[0].algorithm, case_list[0].config
  objective = objective_of(case_list)
  has_values = algorithm.value_head(config)
  policy = trainable(objective, 'value' if has_values else '')
  critic = trainable(algorithm.critic(config), 'critic') if algorithm.critic(config) else None
  # Only distillation gets teachers: the log-probs of teachers take the place of the reference's where there are any.
  teachers = shared()['teachers'] if objective.divergence else ()
  roles = Roles(policy, critic, shared()['reference'], None, teachers)
  gradients_of_cases = {}
  for number, (name, case) in enumerate(cases.items()):
    controller = make_controller(case.algorithm, case.config, roles)
    rows = []
    for step, (graded, scores) in enumerate(blocks(case.sampler, case.size, case.top_k, case.right)):
      count = 1.0
      graded = with_turns(graded) if case.turns else graded
      if make or critic or has_values:
        set_params(policy, 'value, before' if has_values else 'policy')  # the weights that score
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
    gradients_of_cases[name] = tuple(np.array(x) for x in zip(*rows))
  return gradients_of_cases


def _step(roles: Roles, case: Case, batch: Batch, number: int, objective: Objective) -> np.ndarray:
  """Returns the gradient that an update subtracts from the weights, [D]."""
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
  """Returns the number of tokens, sequences or pairs over which the loss is a mean."""
  if case.algorithm.pack:
    return credit.metrics['pairs']
  per_token = case.config.rl.aggregate == 'token'
  return float(credit.mask.sum() if per_token else (credit.mask > 0).any(axis=1).sum())


@functools.lru_cache
def directions(size: int) -> np.ndarray:
  """Returns unit vectors, [n, D], along which gradients of `size` weights are compared, besides the exact gradient."""
  vectors = [*np.random.RandomState(9).standard_normal((3, size))]
  if size == len(start_of('policy')):
    probable = chance('policy')[..., None] * MASK
    vectors.append(of_weights('policy', probable * rewards()[..., None]))
    vectors.append(of_weights('policy', probable * (logprobs('policy') - logprobs('reference'))))
  return np.array([x / np.linalg.norm(x) for x in vectors])


def z_scores(measured: tuple[np.ndarray, np.ndarray], exact: np.ndarray) -> np.ndarray:
  """Returns by how many standard errors the mean of gradients [N, D] differs from the exact one [D], by direction."""
  gradient, count = measured
  along = np.vstack([exact / np.linalg.norm(exact), directions(len(exact))])
  sampled = gradient @ along.T
  mean = count @ sampled / count.sum()
  error = count[:, None] * (sampled - mean) / count.mean()
  standard = np.sqrt((error**2).sum(axis=0) / (len(error) - 1) / len(error))
  return (mean - along @ exact) / standard


def agree(measured: tuple[np.ndarray, np.ndarray], expected: np.ndarray) -> None:
  """Checks a measured gradient within 4 standard errors, and that 1.5 times the exact one would fail."""
  scores, scores_of_longer = (z_scores(measured, x) for x in (expected, 1.5 * expected))
  assert np.abs(scores).max() < 4, scores
  assert np.abs(scores_of_longer).max() > 4, scores_of_longer


def kl(p, q):
  """Returns the divergence of probabilities p [..., K] from q."""
  return (p * jnp.log(p / q)).sum(axis=-1)
