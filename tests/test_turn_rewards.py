"""Rewards of turns: from the tools of an environment to the advantages of MT-GRPO, GiGPO and PPO.

Legend: N sequences, C completion tokens.
"""

import json

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_gradients as exact
import tiny

import jaxpost
from jaxpost.algorithms import grpo
from jaxpost.environments import pool as pool_lib
from jaxpost.environments import turns
from jaxpost.errors import InputError
from jaxpost.losses import advantages, turn_advantages
from jaxpost.programs import train as programs
from jaxpost.rl import batching, merging
from jaxpost.rollout import rollout_codec, rollout_files
from jaxpost.types import Experience, Prompt, Rollout

ENVIRONMENT = episodes.ENVIRONMENT.replace('  def reset(', '  turn_reward = 0.0\n\n  def reset(').replace(
  '    self.told.append(n)\n', '    self.told.append(n)\n    self.turn_reward = (n + 1) / 8\n'
)

# ------------------------------------------------------------ exact gradients


def enumerated(rl):
  """(mean gradient over all pairs of conversations, gradients of expectations of what they earn).

  A conversation is a symbol of the policy, an observation that says whether it is odd, and
  another symbol. The first turn has a reward; the outcome depends on both.
  """
  every = exact.completions(3)
  kept = every[:, 1] == every[:, 0] % 2
  answers = every[kept]
  random = np.random.RandomState(3)
  of_symbol, of_pair = random.standard_normal(exact.SYMBOLS), random.standard_normal((exact.SYMBOLS, exact.SYMBOLS))
  of_turn, outcome = of_symbol[answers[:, 0]], of_pair[answers[:, 0], answers[:, 2]]
  sampled = np.tile([1.0, 0, 1], (len(answers), 1)).astype(np.float32)

  def logprobs(weights):
    return exact.logprobs(weights, 3)[kept] * sampled

  logp = np.asarray(logprobs(exact.params('policy')))
  chance = np.exp(logp.sum(axis=1, dtype=np.float64))
  assert chance.sum() == pytest.approx(1, abs=1e-6)
  index = np.array([(i, j) for i in range(len(answers)) for j in range(len(answers))])
  weight, index = chance[index].prod(axis=1), index.reshape(-1)
  rollout = Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}) for i in range(len(weight))),
    completions=answers[index],
    lengths=np.full(len(index), 3),
    logprobs=logp[index],
    behavior_logprobs=logp[index],
    finished=np.ones(len(index), bool),
    mask=sampled[index] > 0,
    turn_rewards=of_turn[index, None] * [1.0, 0, 0],
  )
  given = dict(sampler_logprobs=logp[index], old_logprobs=logp[index])
  total = (of_turn + outcome)[index]
  experience = Experience(rollout, total, sampled[index], given, verdicts=total)
  config = exact.config_of('grpo', rl)
  credit = grpo.credit(experience, config)
  weights = batching.token_weights(credit.mask, 'token', 3) * np.repeat(weight * len(weight), 2)[:, None]
  batch = batching.to_batch(
    rollout, range(len(index)), weights.astype(np.float32), credit.arrays, len(index) // 16, row_length=64
  )
  loss = programs.make_loss(exact.model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  found = jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), split)
  same_state = np.array([chance[answers[:, 1] == o].sum() for o in (0, 1)])[answers[:, 1]]

  def expectation(name):
    def value(weights):
      ours = logprobs(weights)
      whole = jnp.exp(ours.sum(axis=1))
      first, second = jnp.exp(ours[:, 0]), jnp.exp(ours[:, 2])
      return {
        'first turn and outcome': (whole * (of_turn + outcome)).sum(),
        # The outcome by the second symbol alone, weighted by the chance that the other conversation is in its state.
        'second turn': (jax.lax.stop_gradient(first * same_state) * second * outcome).sum(),
        'first turn': (first * jax.lax.stop_gradient(second) * (of_turn + rl.get('turn_gamma', 1.0) * outcome)).sum(),
      }[name] / 2  # of the two sampled tokens

    return jax.grad(value)(exact.params('policy'))

  return found, expectation


def test_mt_grpo_has_the_gradient_of_all_rewards():
  """The mean of a pair as the baseline, so half of it; a turn's reward does not reach later turns."""
  found, expectation = enumerated(dict(advantage='mt_grpo', scale_rewards='none'))
  exact.close(found, (-1 / 2, expectation('first turn and outcome')))


def test_gigpo_adds_the_gradient_within_states():
  """All conversations share the first state, and half of their pairs or so the second."""
  rl = dict(advantage='gigpo', scale_rewards='none', turn_gamma=0.5, step_weight=3.0)
  found, expectation = enumerated(rl)
  exact.close(
    found,
    (-1 / 2, expectation('first turn and outcome')),
    (-3 / 2, expectation('first turn')),
    (-3 / 2, expectation('second turn')),
  )


def test_rewards_of_turns_stay_at_their_turns():
  """PPO and REINFORCE++ discount these values; their sum is the reward of the sequence."""
  mask = np.array([[1.0, 1, 0, 1], [1, 1, 0, 0]])
  of_turns = np.array([[0, 0.5, 0, 0], [0, 0, 0, 0.0]])
  ours = advantages.token_rewards(np.array([2.0, 1.0]), mask, 0.0, of_turns)
  np.testing.assert_array_equal(ours, [[0, 0.5, 0, 1.5], [0, 1, 0, 0]])


# ---------------------------------------------------------------- environment


@pytest.fixture(scope='module', autouse=True)
def calls():
  """A random model's turns are taken for calls."""
  old, turns.parse = turns.parse, episodes.parse
  yield
  turns.parse = old


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('turns')
  (path / 'env.py').write_text(ENVIRONMENT)
  (path / 'plain.py').write_text(episodes.ENVIRONMENT)
  (path / 'agent.py').write_text(ENVIRONMENT.replace('def nth(self, n: int)', 'def play(self, n: int)'))
  episodes.folder(path / 'model', length=3)
  return path


def config(folder, environment='env.py', **over):
  return episodes.config(str(folder / 'model'), folder / environment, **over)


def test_a_call_answers_with_its_reward(folder):
  environment = folder / 'bad.py'
  environment.write_text(ENVIRONMENT.replace('(n + 1) / 8', "(n + 1) / 8 if n < 9 else float('nan')"))
  pool = pool_lib.EnvironmentPool(f'{environment}:Env', workers=1)
  try:

    def ask(**request):
      return pool.all[0].submit(**request).result()

    assert pool.gives_turn_rewards
    ask(verb='reset', row={'answer': '2'})
    assert ask(verb='call', name='nth', arguments={'n': 4}) == pool_lib.Answer('it is 4', reward=0.625)
    assert ask(verb='call', name='nth', arguments={'n': 3}) == pool_lib.Answer(error='no such number', reward=0.5)
    assert ask(verb='call', name='other', arguments={}).reward == 0  # not that of the call before
    spoiled = ask(verb='call', name='nth', arguments={'n': 10})
    assert spoiled.spoiled and spoiled.error == 'nth set turn_reward to nan, no finite number'
  finally:
    pool.close()


@pytest.fixture(scope='module')
def steps(folder):
  """A step of GiGPO."""
  _, stream = jaxpost.policy_and_stream(config(folder, algorithm='gigpo'))
  try:
    yield next(stream)
  finally:
    stream.close()


def test_the_record_holds_them(steps, tmp_path):
  experience, rollout = steps.experience, steps.experience.rollout
  assert rollout.turn_rewards.any() and (rollout.turn_rewards[~rollout.mask] == 0).all()
  # Calls of the fourth turn, the last one, are not made; the answer to the last that is made may not fit.
  called = [[m for m in row if 'tool_calls' in m][:3] for row in rollout.messages]
  assert [np.count_nonzero(row) for row in rollout.turn_rewards] == [len(row) for row in called]
  np.testing.assert_array_equal(rollout.rewards['environment_turns'], rollout.turn_rewards.sum(axis=1))
  np.testing.assert_allclose(
    experience.rewards, rollout.rewards['environment'] + rollout.rewards['environment_turns'], rtol=1e-12
  )
  assert 'rewards/environment_turns/mean' in steps.info and 0 < steps.info['episodes/shared_states'] <= 1
  again = rollout_codec.from_text(rollout_codec.to_text(rollout))
  np.testing.assert_array_equal(again.turn_rewards, rollout.turn_rewards)
  rollout_files.save(tmp_path / '1.npz', experience, steps.credit)
  np.testing.assert_array_equal(rollout_files.load(tmp_path / '1.npz')[0].turn_rewards, rollout.turn_rewards)
  one = merging.merge([rollout, rollout], [[0, 2], [1]])
  np.testing.assert_array_equal(one.turn_rewards[8:], rollout.turn_rewards[4:8])


def test_the_run_trains_on_the_advantages_of_turns(steps):
  experience, rollout = steps.experience, steps.experience.rollout
  valid = np.isfinite(experience.rewards).reshape(4, 4)
  expected = turn_advantages.gigpo(
    experience.rewards.reshape(4, 4), valid, rollout.turn_rewards, experience.mask, rollout.completions
  )
  np.testing.assert_array_equal(steps.credit.arrays['advantages'], expected)
  several = [np.unique(row[mask > 0]) for row, mask in zip(expected, experience.mask)]
  assert max(map(len, several)) > 1


@pytest.mark.long
def test_they_are_in_the_checkpoint(folder):
  """Rollouts that wait in the queue have them."""
  over = dict(algorithm='mt_grpo', rollout=dict(staleness=1))
  streams = [jaxpost.policy_and_stream(config(folder, **over))[1] for _ in range(2)]
  try:
    next(streams[0])
    streams[1].restore(json.loads(json.dumps(streams[0].state())))
    one, two = (next(stream) for stream in streams)
    assert one.experience.rollout.turn_rewards.any()
    np.testing.assert_array_equal(one.credit.arrays['advantages'], two.credit.arrays['advantages'])
  finally:
    for stream in streams:
      stream.close()


@pytest.mark.parametrize(
  'script, over, words',
  [
    ('plain.py', dict(algorithm='mt_grpo'), 'mt_grpo needs rewards of turns'),
    ('agent.py', {}, 'gives no reward for a turn'),
    ('', dict(algorithm='gigpo', environment=''), "'gigpo' compares the turns of an environment"),
  ],
)
def test_what_has_no_turns_is_refused(folder, script, over, words):
  with pytest.raises(InputError, match=words):
    jaxpost.policy_and_stream(tiny.merged(config(folder, script, reward='gsm8k'), over))
