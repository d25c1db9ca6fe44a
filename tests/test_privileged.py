"""Self-distillation with `rl.privileged` (OPSD, SDPO): the teacher is the policy with a prompt that says more."""

import json

import jax
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import teachers
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.losses import head_chunk
from jaxpost.stage import algorithms, prepare
from jaxpost.stage import config as config_lib
from jaxpost.types import Prompt, Rollout


def stream_of(folder, tmp_path, hint, **overrides):
  """Returns (policy, stream) of OPD on sums; the teacher gets `hint(sum)` as its prompt."""
  sums = [f'{a}+{a + 1}=' for a in range(8)]
  (tmp_path / 'data.jsonl').write_text('\n'.join(json.dumps({'prompt': x, 'hint': hint(x)}) for x in sums))
  rl = dict(privileged='hint', kl_coef=1.0)
  config = tiny.grpo_config(folder, algorithm='opd', reward='', data=dict(path=str(tmp_path / 'data.jsonl')), rl=rl)
  return jaxpost.policy_and_stream(tiny.merged(config, overrides))


def test_the_teacher_scores_the_same_tokens_after_its_own_prompt(nano, tmp_path, monkeypatch):
  calls = []
  privileged_rollout = teachers.privileged_rollout
  monkeypatch.setattr(teachers, 'privileged_rollout', lambda *args: calls.append(args) or privileged_rollout(*args))
  policy, stream = stream_of(nano, tmp_path, lambda x: f'It is {eval(x[:-1])}. {x}')
  try:
    experience = next(stream).experience
  finally:
    stream.close()
  assert len(calls) == 1  # prompts of the teacher are tokenized once per step
  rollout, tokenizer = experience.rollout, tokenizer_lib.load('bytes')
  size = len(rollout.lengths) // len(rollout.prompts)
  for n in (0, size, len(rollout.lengths) - 1):
    prompt = teachers.prompts_lib.encode_prompt(tokenizer, rollout.prompts[n // size].columns['hint'], {}, '')
    answer = rollout.completions[n, : rollout.lengths[n]]
    row = np.concatenate([prompt, answer])[None]
    hidden = tiny.hidden(policy.model, policy.params, row)[:, len(prompt) - 1 : -1]
    logits = head_chunk.logits(hidden, policy.model.head(policy.params), policy.model.config.logit_form, 'float32')
    logp = jax.nn.log_softmax(logits[0, :, : policy.model.config.vocab_size])[np.arange(len(answer)), answer]
    np.testing.assert_allclose(experience.arrays['ref_logprobs'][n, : len(answer)], logp, rtol=1e-4, atol=1e-4)
  assert np.abs(experience.arrays['ref_logprobs'] - experience.arrays['old_logprobs']).max() > 1e-3


def test_teacher_with_the_same_prompt_gives_zero_advantages(nano, tmp_path):
  _, stream = stream_of(nano, tmp_path, lambda x: x)
  try:
    item = next(stream)
  finally:
    stream.close()
  assert np.abs(item.credit.arrays['advantages']).max() < 1e-5 and item.info['kl'] == pytest.approx(0, abs=1e-6)


def rollout_with(**columns):
  empty = np.zeros((1, 2), np.float32)
  prompts = (Prompt(3, np.zeros(1, np.int32), 'x', columns),)
  return Rollout(prompts, empty.astype(int), np.array([2]), empty, empty, np.array([True]))


def config_of(**settings):
  settings = tiny.merged(dict(algorithm='opd', reward='', rl=dict(privileged='hint')), settings)
  config = config_lib.resolve(
    next(iter(config_lib.parse(settings).values())), algorithms.load_algorithm(settings['algorithm']).defaults
  )
  algorithms.load_algorithm(settings['algorithm']).check(config)
  return config


@pytest.mark.parametrize(
  'columns, message', [({'answer': '4'}, "prompt 3 has no column 'hint'; known: answer"), ({'hint': 'y' * 99}, 'raise')]
)
def test_missing_or_too_long_privileged_prompts_are_refused(columns, message):
  config = config_of(rollout=dict(max_prompt_length=20))
  with pytest.raises(InputError, match=f'config.rl.privileged: .*{message}'):
    teachers.privileged_rollout(rollout_with(**columns), config, tokenizer_lib.load('bytes'))


@pytest.mark.parametrize('last, message', [({}, "no column 'hint'"), ({'hint': 'y' * 99}, 'raise')])
def test_privileged_prompts_of_all_steps_are_checked_before_the_run(nano, tmp_path, last, message):
  rows = [{'prompt': f'{a}+1=', 'hint': f'It is {a + 1}.'} for a in range(20)] + [{'prompt': '20+1=', **last}]
  (tmp_path / 'data.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  overrides = dict(algorithm='opd', reward='', data=dict(path=str(tmp_path / 'data.jsonl')), rl=dict(privileged='hint'))
  with pytest.raises(InputError, match=f'config.rl.privileged: .*{message}'):
    prepare.prepare_all(tiny.grpo_config(nano, **overrides))


def test_sft_stage_that_samples_for_evaluation_needs_no_privileged_prompts(nano, tmp_path):
  lines = [{'prompt': '1+1=', 'completion': '2', 'answer': '2', 'hint': 'It is 2.'}] * 4
  (tmp_path / 'data.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  data = dict(path=str(tmp_path / 'data.jsonl'))
  config = tiny.grpo_config(nano, reward='exact_match', rl=dict(privileged='hint'), data=data)
  config |= dict(stages=('first', 'second'), eval=dict(data=data, samples=2))
  config |= dict(first=dict(algorithm='sft'), second=dict(algorithm='opd'))
  for stage in prepare.prepare_all(config):
    stage.close()


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(environment='x'), 'config.rl.privileged: goes with neither'),
    (dict(algorithm='grpo', reward='x', rl=dict(kl_coef=0.1)), 'config.rl.privileged: .* would ignore it'),
    (dict(rl=dict(privileged='')), 'config.rl.reference: is empty'),
  ],
)
def test_privileged_is_refused_where_no_teacher_prompt_is_possible(over, message):
  with pytest.raises(InputError, match=message):
    config_of(**over)
