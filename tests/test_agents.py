"""External agents as the environment of a run: they sample over HTTP, and the run trains on their conversations.

Legend: N sequences, C completion tokens.
"""

import json
import types

import episodes
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.data import tokenizer
from jaxpost.environments import agents, turns
from jaxpost.environments.episode import Episode, EpisodeLimits
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.rollout import rollout_files
from jaxpost.rollout.sequence import Completion
from jaxpost.types import Prompt

AGENT = '''
import json, urllib.error, urllib.request

class Agent:
  """Knows nothing of the library: a client of OpenAI's API, with two turns."""

  def reset(self, answer, **row):
    self.answer, self.said = int(answer), []

  def play(self, base_url: str, api_key: str) -> str:
    """
    Talks to the model.

    Args:
      base_url: Of the API.
      api_key: Says who asks.
    """
    if self.answer % 4 == 0:
      raise ValueError('no wish to play')
    try:
      _ask(base_url, '1-0-0', [{'role': 'user', 'content': 'for the episode of another'}])
    except urllib.error.HTTPError as error:
      assert 'belongs to no episode' in error.read().decode()
    else:
      raise ValueError('a guessed key was served')
    ask = lambda messages: _ask(base_url, api_key, messages)
    messages = [{'role': 'user', 'content': f'{self.answer}?'}]
    for turn in range(2):
      said = ask(messages)
      self.said.append(said['content'])
      messages += [said, {'role': 'user', 'content': 'again'}]
    if self.answer % 5 == 0:  # forgets what was said
      ask([{'role': 'user', 'content': 'bye'}])
    return 'done'

  def get_reward(self):
    text = ''.join(self.said)
    return sum(c < 'a' for c in text) / max(len(text), 1)


def _ask(url, key, messages):
  body = dict(model='x', messages=messages, max_tokens=12, temperature=0.3)
  request = urllib.request.Request(
      f'{url}/chat/completions', json.dumps(body).encode(), {
          'Content-Type': 'application/json',
          'Authorization': f'Bearer {key}'})
  with urllib.request.urlopen(request) as reply:
    return json.load(reply)['choices'][0]['message']
'''


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('agents')
  (path / 'agent.py').write_text(AGENT)
  episodes.folder(path / 'model', length=2)
  return path


def config(folder, **over):
  return tiny.run_config(
    str(folder / 'model'),
    **tiny.merged(
      dict(
        algorithm='grpo',
        environment=f'{folder}/agent.py:Agent',
        data=dict(path='generated:arithmetic:max=99,ops=+,size=50,correct=1'),
        train=dict(row_length=0, steps=3),
        optim=dict(lr=1e-2),
        log=dict(rollouts_every=1, samples_every=1),
        rewards=dict(max_failed=0.9),
        tools=dict(workers=3, timeout_s=60.0),
        rollout=dict(prompts=6, group_size=4, max_prompt_length=48, max_new_tokens=80, slots=8),
      ),
      over,
    ),
  )


@pytest.fixture(scope='module')
def run(folder):
  jaxpost.run(config(folder), folder / 'run')
  return folder / 'run'


def test_agent_run_trains_with_matching_logprobs(run):
  """The sampler's log-probs equal the trainer's in the first step, and the weights change in each step."""
  rows = metrics.read_rows(run / 'metrics.jsonl')
  assert rows[0]['ratio'] == pytest.approx(1, abs=1e-5)
  assert rows[0]['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  assert [r['step'] for r in rows] == [1, 2, 3]
  for row in rows:
    assert 0 < row['episodes/turns'] <= 3 and row['tokens_cached'] > 0
    assert row['reward'] == row['rewards/environment/mean'] > 0
  assert len({r['loss'] for r in rows}) == 3


def test_recorded_tokens_follow_the_conversation_and_mask_the_template(run):
  """Tokens between two answers are those of the chat template, and are not trained."""
  decode = tokenizer.load('bytes').decode
  failed = begun_again = 0
  for step in 1, 2, 3:
    rollout, arrays = rollout_files.load(run / f'rollouts/grpo/{step}.npz')
    size = len(rollout.lengths) // len(rollout.prompts)
    for n, length in enumerate(rollout.lengths):
      prompt = rollout.prompts[n // size]
      answer = int(prompt.columns['answer'])
      if answer % 4 == 0:
        failed += 1
        assert np.isnan(arrays['rewards'][n])
        continue
      ids, mask = rollout.completions[n, :length], rollout.mask[n, :length]
      text = decode([*prompt.tokens, *ids], False)
      between = decode(ids[~mask], False)
      if answer % 5 == 0:  # the episode began again, and its last conversation is recorded
        begun_again += 1
        assert '<|im_start|>user\nbye<|im_end|>' in text
        assert between.count('again') == 0
      else:
        assert text.startswith(f'<|im_start|>user\n{answer}?<|im_end|>')
        assert between.endswith('\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n')
      assert not arrays['trained'][n, :length][~mask].any()
  assert failed and begun_again
  rows = metrics.read_rows(run / 'metrics.jsonl')
  assert sum(r['episodes/failed'] for r in rows) == failed
  assert sum(r['episodes/begun_again'] for r in rows) == begun_again
  samples = [sample for file in run.glob('samples/*/*.jsonl') for sample in metrics.read_growing(file)]
  lost = [sample for sample in samples if sample['reward'] is None]
  assert lost and lost == [sample for sample in samples if sample.get('error')]
  warnings = json.loads((run / 'summary.json').read_text())['warnings']
  (warning,) = (warning for warning in warnings if warning['kind'] == 'lost')
  assert any(sample['error'] in warning['text'] for sample in lost)


def test_api_keys_of_episodes_are_unique_and_long():
  episode = Episode(0, Prompt(0, np.arange(3), '', {}), 0)
  owner = types.SimpleNamespace(
    pool=types.SimpleNamespace(all=[]), endpoint=types.SimpleNamespace(), turns=None, limits=None
  )
  keys = {
    *agents.AgentScheduler(owner, [episode] * 2, {}).sessions,
    *agents.AgentScheduler(owner, [episode], {}).sessions,
  }
  assert len(keys) == 3 and all(len(key) >= 32 for key in keys)


def test_samples_do_not_depend_on_the_order_of_requests(folder, run):
  jaxpost.run(config(folder, train=dict(steps=1), tools=dict(workers=1)), folder / 'again')
  three_workers, _ = rollout_files.load(run / 'rollouts/grpo/1.npz')
  one_worker, _ = rollout_files.load(folder / 'again/rollouts/grpo/1.npz')
  np.testing.assert_array_equal(three_workers.completions, one_worker.completions)
  np.testing.assert_allclose(three_workers.logprobs, one_worker.logprobs, atol=1e-5)


def test_tokens_between_turns_equal_those_of_the_chat_template():
  t = tokenizer.load('bytes')
  turns_of_template = turns.Turns(t)
  user = {'role': 'user', 'content': 'why?'}
  reply = {'role': 'assistant', 'content': 'no'}
  head = t.encode(t.render_chat([user], generation_prompt=True)[0])
  conversation = t.encode(t.render_chat([user, reply, user], generation_prompt=True)[0])
  no = t.encode('no')
  assert head + no + [turns_of_template.end_id] + turns_of_template.continuation([user], ended=True) == conversation
  assert head + no + turns_of_template.continuation([user], ended=False) == conversation
  assert json.dumps(turns_of_template.continuation([user], True)) == json.dumps(
    turns_of_template.continuation([user], False)[1:]
  )


def test_refused_request_leaves_the_episode_unchanged():
  """Earlier samples stay, and are not taken for an answer to the refused request."""
  t = tokenizer.load('bytes')
  episode = Episode(0, Prompt(0, np.array([1, 2], np.int32), '', {}), 0)
  session = agents.Session(episode, turns.Turns(t), EpisodeLimits(prompt=9, tokens=20), {})

  def ask(text):
    return {'messages': [{'role': 'user', 'content': text}]}

  first = session.request(ask('a'), lambda: np.array([5, 6], np.int32), 8)
  sampled_ids = np.array([7, 8], np.int32)
  session.record_answer(
    ask('a'),
    Completion(first, sampled_ids, np.zeros(2), np.zeros(2), True, versions=np.full(2, 3)),
    {'role': 'assistant', 'content': 'x'},
  )
  tokens_before = list(episode.tokens)
  assert [x.id for x in tokens_before] == [7, 8] and [x.version for x in tokens_before] == [3, 3]
  with pytest.raises(InputError, match='30 tokens exceed config.rollout.max_prompt_length=9'):
    session.request(ask('b'), lambda: np.zeros(30, np.int32), 8)
  assert episode.tokens == tokens_before and episode.context.tolist() == [5, 6]
  session.request(ask('b'), lambda: np.zeros(9, np.int32), 8)
  session.busy.release()  # as if the engine had refused the request
  assert episode.tokens == tokens_before and episode.context.tolist() == [5, 6]
  assert session.begun == 1
