"""Tests of rewards of turns, from an environment's tools to the advantages of MT-GRPO, GiGPO and PPO.

Legend: N sequences, C completion tokens.
"""

import json
import pathlib

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_gradients as exact
import tiny

import jaxpost
from jaxpost import imports
from jaxpost.algorithms import grpo
from jaxpost.environments import pool as pool_lib
from jaxpost.environments import turns
from jaxpost.errors import InputError
from jaxpost.losses import advantages, turn_advantages
from jaxpost.programs import train as programs
from jaxpost.rl import batching, merging
from jaxpost.rollout import rollout_codec, rollout_files
from jaxpost.types import Experience, Prompt, Rollout, RowShape

ENVIRONMENT = episodes.ENVIRONMENT.replace('  def reset(', '  turn_reward = 0.0\n\n  def reset(').replace(
  '    self.told.append(n)\n', '    self.told.append(n)\n    self.turn_reward = (n + 1) / 8\n'
)

# ------------------------------------------------------------ exact gradients


def enumerated(rl):
  """Returns the mean gradient over all pairs of conversations, and a function to the gradients of expected rewards.

  A conversation is a symbol of the policy, an observation that says whether the symbol is
  odd, and another symbol. The first turn has a reward, and the outcome depends on both symbols.
  """
  completions = exact.completions(3)
  is_valid = completions[:, 1] == completions[:, 0] % 2
  answers = completions[is_valid]
  random = np.random.RandomState(3)
  of_symbol, of_pair = random.standard_normal(exact.SYMBOLS), random.standard_normal((exact.SYMBOLS, exact.SYMBOLS))
  of_turn, outcome = of_symbol[answers[:, 0]], of_pair[answers[:, 0], answers[:, 2]]
  sampled = np.tile([1.0, 0, 1], (len(answers), 1)).astype(np.float32)

  def logprobs(weights):
    return exact.logprobs(weights, 3)[is_valid] * sampled

  logp = np.asarray(logprobs(exact.params('policy')))
  probabilities = np.exp(logp.sum(axis=1, dtype=np.float64))
  assert probabilities.sum() == pytest.approx(1, abs=1e-6)
  pairs = np.array([(i, j) for i in range(len(answers)) for j in range(len(answers))])
  pair_weights, pairs = probabilities[pairs].prod(axis=1), pairs.reshape(-1)
  rollout = Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}) for i in range(len(pair_weights))),
    completions=answers[pairs],
    lengths=np.full(len(pairs), 3),
    logprobs=logp[pairs],
    behavior_logprobs=logp[pairs],
    finished=np.ones(len(pairs), bool),
    mask=sampled[pairs] > 0,
    turn_rewards=of_turn[pairs, None] * [1.0, 0, 0],
  )
  scores = dict(sampler_logprobs=logp[pairs], old_logprobs=logp[pairs])
  total = (of_turn + outcome)[pairs]
  experience = Experience(rollout, total, sampled[pairs], scores, verdicts=total)
  config = exact.config_of('grpo', rl)
  credit = grpo.credit(experience, config)
  weights = batching.token_weights(credit.mask, 'token', 3) * np.repeat(pair_weights * len(pair_weights), 2)[:, None]
  batch = batching.to_batch(
    rollout, range(len(pairs)), weights.astype(np.float32), credit.arrays, RowShape(len(pairs) // 16, 64)
  )
  loss = programs.make_loss(exact.model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  gradient = jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), split)
  same_state = np.array([probabilities[answers[:, 1] == o].sum() for o in (0, 1)])[answers[:, 1]]

  def expectation(name):
    def value(weights):
      logp_of_policy = logprobs(weights)
      probability = jnp.exp(logp_of_policy.sum(axis=1))
      first, second = jnp.exp(logp_of_policy[:, 0]), jnp.exp(logp_of_policy[:, 2])
      return {
        'first turn and outcome': (probability * (of_turn + outcome)).sum(),
        # The outcome by the second symbol alone, weighted by the chance that the other conversation is in its state.
        'second turn': (jax.lax.stop_gradient(first * same_state) * second * outcome).sum(),
        'first turn': (first * jax.lax.stop_gradient(second) * (of_turn + rl.get('turn_gamma', 1.0) * outcome)).sum(),
      }[name] / 2  # of the two sampled tokens

    return jax.grad(value)(exact.params('policy'))

  return gradient, expectation


def test_mt_grpo_has_the_gradient_of_all_rewards():
  """The baseline is the mean of a pair, which halves the gradient. A turn's reward does not reach later turns."""
  actual, expectation = enumerated(dict(advantage='mt_grpo', scale_rewards='none'))
  exact.close(actual, (-1 / 2, expectation('first turn and outcome')))


def test_gigpo_adds_the_gradient_within_states():
  """All conversations share the first state. About half of their pairs share the second."""
  rl = dict(advantage='gigpo', scale_rewards='none', turn_gamma=0.5, step_weight=3.0)
  actual, expectation = enumerated(rl)
  exact.close(
    actual,
    (-1 / 2, expectation('first turn and outcome')),
    (-3 / 2, expectation('first turn')),
    (-3 / 2, expectation('second turn')),
  )


def test_token_rewards_keep_turn_rewards_at_their_turns():
  """PPO and REINFORCE++ discount these rewards of tokens, whose sum is the reward of the sequence."""
  mask = np.array([[1.0, 1, 0, 1], [1, 1, 0, 0]])
  turn_rewards = np.array([[0, 0.5, 0, 0], [0, 0, 0, 0.0]])
  actual = advantages.token_rewards(np.array([2.0, 1.0]), mask, 0.0, turn_rewards)
  np.testing.assert_array_equal(actual, [[0, 0.5, 0, 1.5], [0, 1, 0, 0]])


# ---------------------------------------------------------------- environment


@pytest.fixture(scope='module', autouse=True)
def parse_all_turns_as_calls():
  """Parses every turn of the random model as a tool call."""
  original, turns.parse = turns.parse, episodes.parse
  yield
  turns.parse = original


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


def test_tool_call_answer_has_its_turn_reward(folder):
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
    assert ask(verb='call', name='other', arguments={}).reward == 0  # not the reward of the previous call
    spoiled = ask(verb='call', name='nth', arguments={'n': 10})
    assert spoiled.spoiled and spoiled.error == 'nth set turn_reward to nan, no finite number'
  finally:
    pool.close()


@pytest.fixture(scope='module')
def gigpo_step(folder):
  """Yields a step of GiGPO."""
  _, stream = jaxpost.policy_and_stream(config(folder, algorithm='gigpo'))
  try:
    yield next(stream)
  finally:
    stream.close()


def test_rollout_records_hold_turn_rewards(gigpo_step, tmp_path):
  experience, rollout = gigpo_step.experience, gigpo_step.experience.rollout
  assert rollout.turn_rewards.any() and (rollout.turn_rewards[~rollout.mask] == 0).all()
  # Calls of the fourth and last turn are not made. The answer to the last call that is made may not fit.
  called = [[m for m in row if 'tool_calls' in m][:3] for row in rollout.messages]
  assert [np.count_nonzero(row) for row in rollout.turn_rewards] == [len(row) for row in called]
  np.testing.assert_array_equal(rollout.rewards['environment_turns'], rollout.turn_rewards.sum(axis=1))
  np.testing.assert_allclose(
    experience.rewards, rollout.rewards['environment'] + rollout.rewards['environment_turns'], rtol=1e-12
  )
  assert 'rewards/environment_turns/mean' in gigpo_step.info and 0 < gigpo_step.info['episodes/shared_states'] <= 1
  decoded = rollout_codec.from_text(rollout_codec.to_text(rollout))
  np.testing.assert_array_equal(decoded.turn_rewards, rollout.turn_rewards)
  rollout_files.save(tmp_path / '1.npz', experience, gigpo_step.credit)
  np.testing.assert_array_equal(rollout_files.load(tmp_path / '1.npz')[0].turn_rewards, rollout.turn_rewards)
  merged = merging.merge([rollout, rollout], [[0, 2], [1]])
  np.testing.assert_array_equal(merged.turn_rewards[8:], rollout.turn_rewards[4:8])


def test_gigpo_run_trains_on_turn_advantages(gigpo_step):
  experience, rollout = gigpo_step.experience, gigpo_step.experience.rollout
  valid = np.isfinite(experience.rewards).reshape(4, 4)
  expected = turn_advantages.gigpo(
    experience.rewards.reshape(4, 4), valid, rollout.turn_rewards, experience.mask, rollout.completions
  )
  np.testing.assert_array_equal(gigpo_step.credit.arrays['advantages'], expected)
  several = [np.unique(row[mask > 0]) for row, mask in zip(expected, experience.mask)]
  assert max(map(len, several)) > 1


@pytest.mark.long
def test_queued_turn_rewards_are_restored_from_a_checkpoint(folder):
  """Rollouts that wait in the queue keep their turn rewards."""
  over = dict(algorithm='mt_grpo', rollout=dict(staleness=1))
  streams = [jaxpost.policy_and_stream(config(folder, **over))[1] for _ in range(2)]
  try:
    next(streams[0])
    streams[1].restore(json.loads(json.dumps(streams[0].state())))
    expected, restored = (next(stream) for stream in streams)
    assert expected.experience.rollout.turn_rewards.any()
    np.testing.assert_array_equal(expected.credit.arrays['advantages'], restored.credit.arrays['advantages'])
  finally:
    for stream in streams:
      stream.close()


def test_example_environment_rewards_moves_toward_the_treasure():
  path = pathlib.Path(__file__).resolve().parents[1] / 'docs/examples/scored_treasure.py'
  game = imports.load_callable(f'{path}:ScoredTreasure', 'config.environment')()
  game.reset(start=3, treasure=5)
  rewards = []
  for direction in ('right', 'left'):
    game.move(direction)
    rewards.append(game.turn_reward)
  assert rewards == [0.1, -0.1]


@pytest.mark.parametrize(
  'script, over, words',
  [
    ('plain.py', dict(algorithm='mt_grpo'), 'mt_grpo needs rewards of turns'),
    ('agent.py', {}, 'gives no reward for a turn'),
    ('', dict(algorithm='gigpo', environment=''), "'gigpo' compares the turns of an environment"),
  ],
)
def test_turn_methods_without_turn_rewards_are_refused(folder, script, over, words):
  with pytest.raises(InputError, match=words):
    jaxpost.policy_and_stream(tiny.merged(config(folder, script, reward='gsm8k'), over))
