"""Mean gradients of samples, through sampler, credit, packing and update, against exact ones by enumeration.

`sampled.py` has the policy, with 40 answers to either of two prompts, and the steps of the controller, which all cases
share. The exact gradients come from formulas that share no code with the library: those of `formulas.py`, and those
below. Each is compared along several directions, within 4 standard errors.
"""

import dataclasses
import functools

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampled
from sampled import Case

from jaxpost.algorithms import kto, online_dpo, preference
from jaxpost.data import packing
from jaxpost.losses import importance, policy_gradient
from jaxpost.roles import place
from jaxpost.stage import algorithms

pytestmark = pytest.mark.long
BETA = 0.7  # of the preference losses
OLDER = dict(sampler='behavior')  # an older policy has sampled the answers
LATER = dict(present='later')  # the gradient is that of the second update on a rollout
BINARY_REWARDS = dict(size=3, right=True)  # 0 or 1
TURNS = dict(size=3, turns=True)


def case(algorithm='grpo', where=None, critic=None, **rl):
  """Returns a case of a method of the GRPO family; `where` has fields of `sampled.Case`."""
  advantage = dict(advantage='leave_one_out') if algorithm == 'grpo' else {}
  where = where or {}
  size = where.get('size', sampled.SIZE)
  drawn = dict(prompts=sampled.GROUPS[size], group_size=size)
  environment = 'x' if 'turns' in where else ''
  config = sampled.config_of(algorithm, rl=advantage | rl, rollout=drawn, environment=environment, critic=critic or {})
  return Case(algorithms.load_algorithm(algorithm), config, **where)


def losses():
  yield 'on policy', case()
  for name in policy_gradient.LOSSES:
    yield f'{name}, second update', case(loss=name, where=LATER, epochs=2)
    if name != 'reinforce':
      yield f'{name}, older sampler', case(loss=name, where=OLDER, old_policy='sampler')


def estimators():
  yield 'grpo', case(advantage='group')
  yield 'std of the batch', case(advantage='group', scale_rewards='batch')
  yield 'dr_grpo', case('dr_grpo')
  yield from ((name, case(name)) for name in ('reinforce_pp', 'reinforce_pp_baseline', 'opo'))
  yield from ((name, case(aggregate=name)) for name in ('token', 'sequence', 'constant'))
  yield 'truncated answers are masked', case(mask_truncated=True)
  yield 'entropy bonus', case(entropy_coef=1.0)
  yield 'gpg', case('gpg', where=BINARY_REWARDS)
  yield 'gdpo', case(advantage='gdpo')
  yield 'maxrl', case('maxrl', where=BINARY_REWARDS)
  yield 'pass_at_k', case('pass_at_k', where=BINARY_REWARDS, pass_k=2)
  yield 'remax', case('remax', where=BINARY_REWARDS)
  yield 'truncated sampling', case(where=dict(top_k=2))


def divergences():
  for name in policy_gradient.KL:
    if name != 'k1':
      yield f'{name} in the loss', case(kl_coef=1.0, kl_estimator=name)
  for name in ('k1', 'k3'):
    weighted = dict(kl_coef=1.0, kl_estimator=name, kl_weighted=True)
    yield f'{name} in the loss, weighted', case(**weighted)
    yield f'{name} in the loss, weighted, older sampler', case(**weighted, old_policy='sampler', where=OLDER)
  yield 'KL in the reward', case(kl_coef=1.0, kl_in='reward')
  yield 'KL in the reward of each token', case('reinforce_pp', kl_coef=1.0)
  yield 'KL in the advantage', case(kl_coef=1.0, kl_in='advantage')


def corrections():
  bounds = dict(
    token_truncated=dict(importance_cap=1.3),
    sequence_truncated=dict(importance_cap=1.3),
    icepop=dict(token_low=0.7, token_high=1.5),
    token_mask=dict(token_low=0.7, token_high=1.5),
    sequence_mask=dict(sequence_low=0.8, sequence_high=1.2),
    opsm=dict(opsm_threshold=0.1),
  )
  yield 'none', case(importance=(), where=OLDER)
  for name in (*importance.METHODS, 'opsm'):
    yield name, case(importance=(name,), where=OLDER, **bounds.get(name, {}))


CASES = {name: x for part in (losses, estimators, divergences, corrections) for name, x in part()}


@functools.lru_cache
def measured_policy_losses(coupled):
  """The gradients of all cases whose losses are of sequences (`coupled`), or of tokens; either compiles once."""
  return sampled.gradients({n: x for n, x in CASES.items() if x.algorithm.objective(x.config).coupled == coupled})


def exact(x):
  """Returns the exact gradient [D] of a case, by formulas.py."""
  groups = sampled.groups(x.sampler, x.present, 'policy', x.size, x.top_k, x.right)
  parts = formulas.gradient(groups, x.config.rl, sampled.C)
  return sampled.of_weights(x.present, *(sampled.of_answers(part) for part in parts))


@pytest.mark.parametrize('name', CASES)
def test_gradient_of_policy_losses_and_estimators(name):
  x = CASES[name]
  sampled.agree(measured_policy_losses(x.algorithm.objective(x.config).coupled)[name], exact(x))


# --------------------------------------------------------------------- turns

TURN_CASES = {
  'mt_grpo': case('mt_grpo', where=TURNS, turn_gamma=0.6),
  'mt_grpo, without the std': case('mt_grpo', where=TURNS, scale_rewards='none'),
  'gigpo': case('gigpo', where=TURNS, turn_gamma=0.6, step_weight=1.5),
}


@functools.lru_cache
def measured_turns():
  return sampled.gradients(TURN_CASES)


def within(x, alike):
  """(x - mean) / std of each sample among the samples of its group that are `alike` [K, G, G]; 0 if it is alone."""
  count = alike.sum(axis=2)
  mean = (alike * x[:, None]).sum(axis=2) / np.maximum(count, 1)
  variance = (alike * (x[:, None] - mean[..., None]) ** 2).sum(axis=2) / np.maximum(count - 1, 1)
  return np.where(variance > 1e-12, (x - mean) / (np.sqrt(variance) + formulas.EPS), 0)


def advantages_of_turns(rl, first, outcome, second, state):
  """Returns advantages [K, G, 2]; `second`: whether there is a second turn; `state`: what it has seen."""
  every = np.ones((*first.shape, first.shape[1]), bool)
  both_have_second = second[:, None] & second[..., None]

  def normalized(x, alike):
    centered = x - (alike * x[:, None]).sum(axis=2) / np.maximum(alike.sum(axis=2), 1)
    return within(x, alike) if rl.scale_rewards == 'group' else centered

  if rl.advantage == 'mt_grpo':  # arXiv:2505.11821: A_1 + gamma A_2 and A_2; the outcome belongs to the last turn
    end = normalized(outcome, every)
    late = np.where(second, end, 0)
    return np.stack([normalized(first, every) + np.where(second, rl.turn_gamma * late, end), late], axis=2)
  # GiGPO (arXiv:2505.10978), eqs. 3, 7 and 8: returns are compared where the states are the same.
  returns = first + np.where(second, rl.turn_gamma, 1) * outcome
  same_state = both_have_second & (state[:, None] == state[..., None])
  gains = np.stack([normalized(returns, every), np.where(second, normalized(outcome, same_state), 0)], axis=2)
  return normalized(first + outcome, every)[..., None] + rl.step_weight * gains


@pytest.mark.parametrize('name', TURN_CASES)
def test_gradient_with_rewards_per_turn(name):
  prompt, answers = sampled.members(3)
  p, rl = prompt[:, None], TURN_CASES[name].config.rl
  groups = sampled.groups('policy', 'policy', 'policy', 3)
  turns = sampled.MASK[answers][..., [0, 2]]
  seen = np.array([a[1] if len(a) > 1 else -1 for a in sampled.ANSWERS])[answers]
  first = sampled.FIRST[p, answers]
  gains = advantages_of_turns(rl, first, groups.rewards, turns[..., 1] > 0, seen)
  weight = groups.chance[:, None, None] * turns
  slope = np.zeros((*answers.shape, sampled.C))
  slope[..., [0, 2]] = -weight / weight.sum() * gains
  sampled.agree(measured_turns()[name], sampled.of_weights('policy', sampled.of_answers(slope)))


def test_batches_of_the_shared_steps_equal_those_of_the_controller():
  """`sampled.gradients` calls the parts of a step; `whole` makes a whole one, which also loads weights and samples."""
  x = case(kl_coef=1.0)
  roles = sampled.Roles(sampled.trainable(sampled.objective_of([x])), reference=sampled.shared()['reference'])
  controller = sampled.make_controller(x.algorithm, x.config, roles)
  graded, scores = sampled.blocks('policy')[0]
  experience = controller.make_experience(graded, scores)
  (parts,) = controller.make_batches(experience, x.algorithm.credit(experience, x.config))
  whole = sampled.make_controller(x.algorithm, x.config, roles)
  whole.rollouts.engine = sampled.shared()['engine']
  (update,) = next(whole).updates
  assert float(update.batch.loss_weights.sum()) == pytest.approx(1, rel=1e-5)
  jax.tree.map(np.testing.assert_array_equal, update.batch, parts.batch)


@pytest.mark.parametrize(
  'name, other',
  [
    ('none', 'token_truncated'),
    ('token_truncated', 'icepop'),
    ('sequence_truncated', 'none'),
    ('clip, second update', 'cispo, second update'),
    ('k2 in the loss', 'k3 in the loss'),
    ('KL in the reward', 'on policy'),
    ('token', 'sequence'),
  ],
)
def test_gradient_of_another_method_is_rejected(name, other):
  assert np.abs(sampled.z_scores(measured_policy_losses(False)[name], exact(CASES[other]))).max() > 4


# --------------------------------------------------------------- preferences


def s(x):  # sigmoid
  return 1 / (1 + jnp.exp(-x))


def odds(logp, length):
  p = jnp.exp(logp / length)
  return jnp.log(p / (1 - p))


def both(margin):
  """Returns the probabilities that the first, and that the second answer is the better one."""
  return jnp.stack([s(margin), s(-margin)], axis=-1)


ALPHA = 0.7  # of the alpha divergence, and the weight of LD-DPO beyond the shorter answer


def by_divergence(score):
  """DPO with score(ratio) in place of log ratio (arXiv:2309.16240); score is f' up to a constant, which cancels."""
  return lambda c, r, *_: -jnp.log(s(BETA * (score(jnp.exp(c)) - score(jnp.exp(r)))))


SMOOTHED = np.array([0.7, 0.3])  # labels with label_smoothing=0.3
UNBIASED = np.array([0.7, -0.3]) / 0.4  # makes the loss unbiased if a share of 0.3 of the labels is wrong

# Of the chosen and the rejected answer, c and r are log-ratios to the reference, and w and v are (log-prob, length).
# OPTIONS has the options that differ from the defaults of a loss.
PREFERENCES = {
  'sigmoid': lambda c, r, *_: -jnp.log(s(BETA * (c - r))),  # arXiv:2305.18290, eq. 7
  'ipo': lambda c, r, w, v: (c / w[1] - r / v[1] - 1 / (2 * BETA)) ** 2,  # arXiv:2310.12036, eq. 17, of means
  'hinge': lambda c, r, *_: jnp.maximum(0, 1 - BETA * (c - r)),  # arXiv:2305.10425
  'exo_pair': lambda c, r, *_: sampled.kl(both(BETA * (c - r)), SMOOTHED),  # arXiv:2402.00856
  'nca_pair': lambda c, r, *_: -jnp.log(s(BETA * c)) - (jnp.log(s(-BETA * c)) + jnp.log(s(-BETA * r))) / 2,
  'robust': lambda c, r, *_: -(jnp.log(both(BETA * (c - r))) * UNBIASED).sum(axis=-1),  # arXiv:2403.00409
  'bco_pair': lambda c, r, *_: -jnp.log(s(BETA * c)) - jnp.log(1 - s(BETA * r)),  # arXiv:2404.04656, no shift
  'sppo_hard': lambda c, r, *_: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,  # arXiv:2405.00675
  'apo_zero': lambda c, r, *_: 1 - s(BETA * c) + s(BETA * r),  # arXiv:2408.06266
  'apo_down': lambda c, r, *_: s(BETA * c) + 1 - s(BETA * (c - r)),
  'discopop': lambda c, r, *_: blended(BETA * (c - r)),  # arXiv:2406.08414
  'sigmoid_norm': lambda c, r, w, v: -jnp.log(s(BETA * (c / w[1] - r / v[1]))),  # arXiv:2411.15124
  'cpo': lambda c, r, w, v: -jnp.log(s(BETA * (w[0] - v[0]))),  # arXiv:2401.08417, without its NLL
  'cpo_hinge': lambda c, r, w, v: jnp.maximum(0, 1 - BETA * (w[0] - v[0])),  # arXiv:2305.10425
  'simpo': lambda c, r, w, v: -jnp.log(s(BETA * (w[0] / w[1] - v[0] / v[1]) - 0.4)),  # arXiv:2405.14734, eq. 6
  'orpo': lambda c, r, w, v: -BETA * jnp.log(s(odds(*w) - odds(*v))),  # arXiv:2403.07691, eq. 6 and 7
  'sigmoid, smoothed': lambda c, r, *_: -(jnp.log(both(BETA * (c - r))) * SMOOTHED).sum(axis=-1),
  'sigmoid, forward_kl': by_divergence(lambda ratio: -1 / ratio),
  'sigmoid, js_divergence': by_divergence(lambda ratio: jnp.log(2 * ratio / (1 + ratio))),
  # The alpha of this formula is 1 - f_alpha.
  'sigmoid, alpha_divergence': by_divergence(lambda ratio: (1 - ratio**-ALPHA) / ALPHA),
  'sigmoid, wpo': lambda c, r, *_: -jnp.log(s(BETA * (c - r))),
  'sigmoid, ld': lambda c, r, *_: -jnp.log(s(BETA * (c - r))),  # arXiv:2409.06411, eq. 10
}
OPTIONS = {'simpo': dict(gamma=0.4), 'discopop': dict(discopop_tau=0.3), 'sigmoid, wpo': dict(weighting='wpo')}
OPTIONS |= {'sigmoid, ld': dict(ld_alpha=ALPHA)}
OPTIONS |= {name: dict(label_smoothing=0.3) for name in ('exo_pair', 'robust', 'sigmoid, smoothed')}
OPTIONS |= {f'sigmoid, {f}': dict(f_divergence=f) for f in ('forward_kl', 'js_divergence')}
OPTIONS |= {'sigmoid, alpha_divergence': dict(f_divergence='alpha_divergence', f_alpha=1 - ALPHA)}


def blended(x):
  """DiscoPOP: (1 - s(x / tau)) log(1 + e^-x) + s(x / tau) e^-x."""
  share = s(x / 0.3)
  return (1 - share) * jnp.log(1 + jnp.exp(-x)) + share * jnp.exp(-x)


@functools.lru_cache
def measured_pairs():
  """Gradients of pairs of the better and the worse of two samples, as online DPO makes them."""
  cases = {}
  for name in PREFERENCES:
    options = dict(losses=(name.partition(',')[0],), beta=BETA) | OPTIONS.get(name, {})
    cases[name] = Case(online_dpo.ONLINE_DPO, sampled.config_of('online_dpo', preference=options))
  return sampled.gradients(cases)


def weights_of_pairs(name, prompt, best, worst):
  """Returns the weight of each pair [K], which has no gradient."""
  rewards = sampled.rewards()
  weight = sampled.groups('policy', 'policy', 'policy').chance * (rewards[prompt, best] != rewards[prompt, worst])
  weight = weight / weight.sum()
  if name == 'sigmoid, wpo':  # arXiv:2406.11827, eq. 2: the probability of each answer relative to a typical one
    policy = jax.nn.softmax(sampled.logits(sampled.params('policy')) / sampled.TEMPERATURE)
    gap = sampled.logprobs('policy') - np.log((policy**2).sum(axis=-1)) * sampled.MASK
    mean = gap.sum(axis=2) / sampled.LENGTHS
    return weight * np.minimum(np.exp(mean[prompt, best] + mean[prompt, worst]), 1)
  return weight


@pytest.mark.parametrize('name', PREFERENCES)
def test_gradient_of_pair_losses(name):
  prompt, answers = sampled.members()
  rewards = sampled.rewards()[prompt[:, None], answers]
  best = answers[np.arange(len(answers)), rewards.argmax(axis=1)]
  worst = answers[np.arange(len(answers)), rewards.argmin(axis=1)]
  weight = weights_of_pairs(name, prompt, best, worst)
  tail_weight = ALPHA if name == 'sigmoid, ld' else 1
  shorter = np.minimum(sampled.LENGTHS[best], sampled.LENGTHS[worst])
  token_weight = np.where(np.arange(sampled.C) < shorter[:, None], 1, tail_weight)

  def loss(logprobs):
    ratio = logprobs - sampled.logprobs('reference')
    ratios = [(token_weight * ratio[prompt, x]).sum(axis=1) for x in (best, worst)]
    sides = [(logprobs[prompt, x].sum(axis=1), sampled.LENGTHS[x]) for x in (best, worst)]
    return (weight * PREFERENCES[name](*ratios, *sides)).sum()

  slope = jax.grad(loss)(jnp.asarray(sampled.logprobs('policy'), jnp.float32))
  sampled.agree(measured_pairs()[name], sampled.of_weights('policy', np.asarray(slope)))


# Optimal transport (arXiv:2406.05882): the two margins that are sorted, by log-probs [P, Y] of policy and reference.
TRANSPORTS = {
  'aot': lambda c, r, ref_c, ref_r: (c - r, ref_c - ref_r),
  'aot_unpaired': lambda c, r, ref_c, ref_r: (c - ref_c, r - ref_r),
}


def in_twos(roles, config, graded):
  """Makes a batch whose rows are micro-batches with a pair of either prompt, which the sorting couples."""
  rollout, rows = graded.rollout, []
  for first in range(0, len(rollout.prompts), 2):
    rows.append([])
    for g in (first, first + 1):
      members = np.arange(sampled.SIZE) + g * sampled.SIZE
      worst, best = members[np.argsort(graded.rewards[members])]
      if graded.rewards[best] > graded.rewards[worst]:
        answers = [(rollout.completions[n, : (k := rollout.lengths[n])], np.ones(k)) for n in (best, worst)]
        rows[-1].append(online_dpo.pair(rollout.prompts[g].tokens, *answers, share_prompt=True))
  batch = packing.to_batch(rows, 18, len(rows), per='pair', totals=())
  batch = batch.replace(loss_weights=batch.loss_weights / len(rows))
  return preference.prepare(place(roles.policy.layout, 1, batch), roles, config)


@functools.lru_cache
def measured_transports():
  options = dict(beta=BETA, label_smoothing=0.3)
  cases = {}
  for name in TRANSPORTS:
    config = sampled.config_of('online_dpo', preference=dict(options, losses=(name,)))
    cases[name] = Case(online_dpo.ONLINE_DPO, config)
  return sampled.gradients(cases, in_twos)


@pytest.mark.nightly
@pytest.mark.parametrize('name', TRANSPORTS)
def test_gradient_of_optimal_transport_losses(name):
  """For any two pairs that can be drawn, the smaller margins are compared with each other, and so are the larger."""
  rewards, chance = sampled.rewards(), sampled.chance('policy')
  better = [np.argwhere(x[:, None] > x) for x in rewards]  # for either prompt: (better, worse) answers [pairs, 2]
  weights = [2 * p[x[:, 0]] * p[x[:, 1]] for p, x in zip(chance, better)]
  alone = [1 - x.sum() for x in weights]  # the probability that a prompt has no pair

  def loss(logprobs):
    policy, reference = logprobs.sum(axis=2), sampled.logprobs('reference').sum(axis=2)
    sides = [[table[p][x[:, i]] for table in (policy, reference) for i in (0, 1)] for p, x in enumerate(better)]
    (one, one_below), (other, other_below) = (TRANSPORTS[name](*x) for x in sides)

    def compared(x, y):
      return -(jnp.log(both(BETA * (x - y))) * SMOOTHED).sum(axis=-1)

    one, one_below = one[:, None], one_below[:, None]
    of_two = sum(compared(f(one, other), f(one_below, other_below)) for f in (jnp.minimum, jnp.maximum))
    singles = (weights[0] * compared(one, one_below)[:, 0]).sum() * alone[1]
    singles += (weights[1] * compared(other, other_below)).sum() * alone[0]
    return (weights[0][:, None] * weights[1] * of_two).sum() + singles

  slope = jax.grad(loss)(jnp.asarray(sampled.logprobs('policy'), jnp.float32))
  sampled.agree(measured_transports()[name], sampled.of_weights('policy', np.asarray(slope)))


# -------------------------------------------------------------------- labels


def labeled(roles, config, graded):
  """Makes a batch of KTO from samples; positive rewards are desirable, and z comes from answers to the other prompt."""
  rollout, examples = graded.rollout, []
  answers = [(x[:n], np.ones(n)) for x, n in zip(rollout.completions, rollout.lengths)]
  for i, answer in enumerate(answers):
    other = answers[(i + sampled.SIZE) % len(answers)]
    example = online_dpo.pair(rollout.prompts[i // sampled.SIZE].tokens, answer, other, share_prompt=True)
    first, second = (np.float32(example.sequence_ids == n) for n in (1, 2))
    arrays = dict(label=first * np.sign(graded.rewards[i]), kl_mask=second)
    arrays = {name: np.float32(x) for name, x in arrays.items()}
    examples.append(dataclasses.replace(example, loss_mask=first, arrays=arrays))
  rows = packing.pack_examples(examples, 18)
  batch = packing.to_batch([[examples[i] for i in row] for row in rows], 18, 72, per='label')
  return kto.prepare(roles.policy.place(batch), roles, config)


@functools.lru_cache
def measured_kto():
  def objective(config):  # at the temperature of the samples
    return dataclasses.replace(kto.objective(config), temperature=sampled.TEMPERATURE)

  algorithm = dataclasses.replace(kto.KTO, objective=objective)
  options = dict(beta=BETA, undesirable_weight=1.5)
  cases = {n: Case(algorithm, sampled.config_of('kto', preference=dict(losses=(n,), **options))) for n in kto.LOSSES}
  return sampled.gradients(cases, labeled)


@pytest.mark.parametrize('name', kto.LOSSES)
def test_gradient_of_kto_losses(name):
  """Desirable: 1 - s(beta (x - z)); others: 1 - s(beta (z - x)) (arXiv:2402.01306, eq. 8); z is constant."""
  chance, desirable = sampled.chance('policy'), sampled.rewards() > 0
  ratio = (sampled.logprobs('policy') - sampled.logprobs('reference')).sum(axis=2)
  z = max(0, (chance[::-1] * ratio).sum() / 2) if name == 'kto' else 0
  assert z > 0.05 or name != 'kto'

  def loss(logprobs):
    x = (logprobs - sampled.logprobs('reference')).sum(axis=2)
    return (chance / 2 * jnp.where(desirable, 1 - s(BETA * (x - z)), 1.5 * (1 - s(BETA * (z - x))))).sum()

  slope = jax.grad(loss)(jnp.asarray(sampled.logprobs('policy'), jnp.float32))
  sampled.agree(measured_kto()[name], sampled.of_weights('policy', np.asarray(slope)))


# -------------------------------------------------------------- distillation

BETAS = {'forward KL': 0.0, 'JSD': 0.3, 'reverse KL': 1.0, 'reverse KL to two': 1.0}


@functools.lru_cache
def measured_distillation():
  cases = {}
  for name, beta in BETAS.items():
    teachers = dict(teachers=('x', 'y'), weights=(1.0, 3.0)) if name.endswith('two') else dict(teachers=('x',))
    config = sampled.config_of('gkd', distill=dict(beta=beta, temperature=1.5, **teachers))
    cases[name] = Case(algorithms.load_algorithm('gkd'), config)
  return sampled.gradients(cases)


@functools.lru_cache
def exact_distillation():
  """Returns {name: gradient [D]}, in one program.

  Each is of the divergence of next tokens on samples of the student, which are not differentiated (arXiv:2306.13649,
  eq. 1).
  """
  weight = sampled.chance('policy')[..., None] * sampled.MASK
  teacher, other = (jax.nn.softmax(sampled.logits(sampled.params(kind)) / 1.5) for kind in ('reference', 'behavior'))

  def losses(weights):
    student = jax.nn.softmax(sampled.logits(weights) / 1.5)
    mixed = 0.7 * student + 0.3 * teacher
    by_name = {
      'forward KL': sampled.kl(teacher, student),
      'reverse KL': sampled.kl(student, teacher),
      'JSD': 0.3 * sampled.kl(teacher, mixed) + 0.7 * sampled.kl(student, mixed),
      'reverse KL to two': (sampled.kl(student, teacher) + 3 * sampled.kl(student, other)) / 4,
    }
    return {name: (weight / weight.sum() * x).sum() for name, x in by_name.items()}

  by_name = jax.jit(jax.jacrev(losses))(sampled.params('policy'))
  return {name: sampled.flat(x) for name, x in by_name.items()}


@pytest.mark.parametrize('name', BETAS)
def test_gradient_of_on_policy_distillation(name):
  sampled.agree(measured_distillation()[name], exact_distillation()[name])


# ------------------------------------------------------------------- critics

PPO = {
  'lambda 0.5': dict(lam=0.5),
  'two lambdas, by length': dict(length_alpha=0.8, critic=dict(lam=0.9)),
  'KL in the reward': dict(lam=0.9, kl_coef=0.5),
  'gamma 0.9': dict(lam=0.5, gamma=0.9, aggregate='sequence'),
}


@functools.lru_cache
def measured_ppo(role):
  return sampled.gradients({name: case('ppo', where=dict(role=role), **rl) for name, rl in PPO.items()})


def gae(config, before):
  """Returns (advantages, returns) [P, Y, C]."""
  rl = config.rl
  old = np.asarray(sampled.values(sampled.params(before)), np.float64) * sampled.MASK
  penalty = rl.kl_coef * (sampled.logprobs('policy') - sampled.logprobs('reference'))
  policy_lam = formulas.policy_lam(rl, sampled.MASK)
  critic_lam = policy_lam if config.critic.lam < 0 else config.critic.lam
  advantages, critic_advantages = (
    formulas.sums_of_gae(sampled.rewards(), penalty, old, sampled.MASK, rl.gamma, lam)
    for lam in (policy_lam, critic_lam)
  )
  return advantages, old + critic_advantages


def token_weights(rl):
  weight = sampled.chance('policy')[..., None] * sampled.MASK
  weight = weight / sampled.LENGTHS[:, None] if rl.aggregate == 'sequence' else weight
  return weight / weight.sum()


def exact_policy_gradient(config, kind='policy', before='before'):
  """Returns the exact gradient [D] of the PPO policy, or of a policy with a value head (`kind`)."""
  advantages, _ = gae(config, before)
  tokens = (
    sampled.chance('policy')[..., None] * sampled.MASK / (sampled.chance('policy')[..., None] * sampled.MASK).sum()
  )
  mean = (tokens * advantages).sum()
  whitened = (advantages - mean) / np.sqrt((tokens * (advantages - mean) ** 2).sum())
  return sampled.of_weights(kind, -token_weights(config.rl) * whitened)


def exact_critic_gradient(config, kind='critic', before='before'):
  """The loss is 1/2 max((V - R)^2, (clip(V) - R)^2), clipped near the scored values (arXiv:2005.12729, section 3)."""
  _, returns = gae(config, before)
  now, old = (np.asarray(sampled.values(sampled.params(x)), np.float64) for x in (kind, before))
  clip = config.critic.value_clip
  outside = np.abs(now - old) > clip
  clipped = np.clip(now, old - clip, old + clip)
  slope = np.where(outside & ((clipped - returns) ** 2 > (now - returns) ** 2), 0, now - returns)
  assert 0.05 < (token_weights(config.rl) * (slope == 0)).sum() < 0.95
  _, pull_back = jax.vjp(sampled.values, sampled.params(kind))
  (gradient,) = pull_back(jnp.asarray(token_weights(config.rl) * slope, jnp.float32))
  return sampled.flat(gradient)


@pytest.mark.parametrize('name', PPO)
def test_gradient_of_the_ppo_policy(name):
  sampled.agree(measured_ppo('policy')[name], exact_policy_gradient(case('ppo', **PPO[name]).config))


@pytest.mark.parametrize('name', PPO)
def test_gradient_of_the_ppo_critic(name):
  sampled.agree(measured_ppo('critic')[name], exact_critic_gradient(case('ppo', **PPO[name]).config))


def test_gradient_of_a_policy_with_a_value_head():
  """The loss of the values is added to that of the policy, and both reach the layers that they share."""
  head = dict(value_head=True, coef=0.3, value_clip=0.02)
  x = case('ppo', where=dict(present='value, critic'), critic=head, lam=0.5, kl_coef=0.5)
  measured = sampled.gradients({'': x})['']
  kinds = 'value, critic', 'value, before'
  value_gradient = exact_critic_gradient(x.config, *kinds)
  sampled.agree(measured, exact_policy_gradient(x.config, *kinds) + 0.3 * value_gradient)
  assert np.abs(sampled.z_scores(measured, exact_policy_gradient(x.config, *kinds) + 0.1 * value_gradient)).max() > 4
