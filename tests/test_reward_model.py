"""Reward models: their losses, training, exported folders, and their use as the reward of an RL run.

Legend: B rows, T tokens a row, P pairs, N sequences.
"""

import dataclasses
import functools
import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden_losses import CASES, INPUTS

import jaxpost
from jaxpost.algorithms import grpo, reward_model
from jaxpost.data import generated, packing, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export
from jaxpost.losses import token_advantages
from jaxpost.models import model as model_lib
from jaxpost.programs import train as programs
from jaxpost.rewards.groups import Graded
from jaxpost.rl import attached_rewards, grading
from jaxpost.stage import algorithms, evaluate, prepare, records, reward_models, weight_sources
from jaxpost.stage import config as config_lib
from jaxpost.storage import manifest
from jaxpost.types import Batch, Outputs, Prompt, Rollout

TASK = 'generated:arithmetic'
KINDS = {'bradley_terry': 'pairs', 'regression': 'scores', 'process': 'steps'}
TOKENIZER = tokenizer_lib.load('bytes')


def test_run_folder_stands_for_its_last_stage_with_a_finished_save(tmp_path):
  """A stage that was killed in its first save is passed over; a stage that is no reward model is refused by name."""
  run = tmp_path / 'me@example.com' / 'run'  # the '@' in this path does not begin a step
  for step, finished in ('judge/1', True), ('sft/2', True), ('ppo/3', False):
    (run / 'checkpoints' / step).mkdir(parents=True)
    if finished:
      (run / 'checkpoints' / step / manifest.NAME).touch()
  (run / 'config.json').write_text(json.dumps({'stages': ['judge', 'sft', 'ppo'], 'judge': {}, 'sft': {}, 'ppo': {}}))
  assert weight_sources.find_run(f'{run}@2', 'config.init_from') == (run / 'checkpoints' / 'sft', 2)
  folder, step = weight_sources.find_run(str(run), 'config.init_from')
  assert folder.name == 'sft' and step is None
  source = records.Source(tiny.config(), checkpoints=folder)
  config = config_lib.parse({'reward_model': {'path': str(run)}})['sft']
  with pytest.raises(InputError, match='no head that gives a reward; RUN is its last stage, sft: launch.export'):
    reward_models.find(config, lambda *_: source)


def stage_config(kind, **over):
  """The Config of a stage that trains a reward model with the loss `kind`."""
  return config_lib.parse(tiny.merged(dict(algorithm='reward_model', reward_model=dict(loss=kind)), over))[
    'reward_model'
  ]


def examples(kind, share_prompt=True):
  """(Config, rendered documents) of seven generated rows for a loss."""
  config = stage_config(kind, preference=dict(share_prompt=share_prompt))
  generated_rows = generated.rows(f'arithmetic_{KINDS[kind]}', 'size=7,max=99')
  if kind == 'bradley_terry':
    generated_rows = [{**row, 'margin': n / 5} for n, row in enumerate(generated_rows)]
  rows = sources.read('rows', fake_rows=generated_rows)
  render = reward_model.REWARD_MODEL.render(rows, TOKENIZER, config)
  return config, [render(n) for n in range(len(generated_rows))]


@functools.lru_cache
def weights():
  model = model_lib.build(tiny.config(num_layers=1, vocab_size=259, num_labels=1))
  params = tiny.params(model)
  params['score'] = np.random.RandomState(1).standard_normal(params['score'].shape).astype(np.float32)
  return model, params


def losses(config, docs, row_length, num_rows, micro, packed):
  """(loss, metrics, gradients) of documents laid out in rows."""
  model, params = weights()
  row_documents = [[n] for n in range(len(docs))]
  if packed:
    row_documents = packing.pack([len(d.tokens) for d in docs], row_length)
  batch = packing.to_batch(
    [[docs[n] for n in row] for row in row_documents],
    row_length,
    num_rows,
    per=reward_model.REWARD_MODEL.mean_per(config),
  )
  loss = programs.make_loss(model, reward_model.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro, *x.shape[1:]), batch)
  (value, extra), grads = jax.jit(lambda p, b: programs.accumulate(loss, p, b))(params, split)
  return float(value), extra, grads


@functools.lru_cache
def unpacked(kind):
  """`losses` with one document per row."""
  return losses(*examples(kind, False), 128, 7, 7, False)


@pytest.mark.parametrize(
  'kind, share, length, num_rows, micro, reverse',
  [
    ('bradley_terry', True, 160, 4, 2, True),
    ('bradley_terry', False, 320, 3, 3, False),
    ('regression', True, 90, 6, 2, True),
    ('process', True, 200, 4, 2, True),
  ],
)
def test_losses_do_not_depend_on_the_layout(kind, share, length, num_rows, micro, reverse):
  config, docs = examples(kind, share)
  expected = unpacked(kind)
  actual = losses(config, docs[::-1] if reverse else docs, length, num_rows, micro, packed=True)
  assert actual[0] == pytest.approx(expected[0], rel=1e-5)
  for key in expected[1]:
    assert float(actual[1][key]) == pytest.approx(float(expected[1][key]), rel=1e-5, abs=1e-6), key
  for a, b in zip(jax.tree.leaves(actual[2]), jax.tree.leaves(expected[2])):
    assert tiny.largest(a - b) <= 1e-5 * tiny.largest(b)


def pair_batch(chosen, rejected, margin=0.0):
  """(Outputs, Batch) of P pairs in one row; each answer has two tokens, and its score is that of the second."""
  count = len(chosen)
  scores = np.stack([chosen, rejected], axis=1).reshape(-1)

  def row(x):
    return jnp.asarray(np.stack([np.full_like(x, 9), x], axis=1).reshape(1, -1))

  number = np.arange(1, 2 * count + 1)
  weights_ = np.tile([0, 1 / count], 2 * count).astype(np.float32)[None]
  batch = Batch(
    *[np.zeros((1, 4 * count), np.int32)] * 3,
    loss_weights=weights_,
    sequence_ids=jnp.asarray(np.repeat(number, 2)[None]),
    arrays={'margin': jnp.full((1, 4 * count), margin, jnp.float32)},
  )
  return Outputs(values=row(np.float32(scores))), batch


@pytest.mark.parametrize('coef, name', [(0.0, 'bt'), (0.01, 'bt_center')])
def test_bradley_terry_loss_matches_trl(coef, name):
  outputs, batch = pair_batch(INPUTS['rm_chosen'], INPUTS['rm_rejected'])
  config = stage_config('bradley_terry', reward_model=dict(center_coef=coef))
  loss, rewards = reward_model.objective(config).fn(outputs, batch)
  assert float(loss) == pytest.approx(CASES['trlformula/rm_bt_center0.01'][name], rel=1e-5)
  assert float(rewards['rewards/accuracies']) == 0.5 - 0.25 * (
    np.sum(np.greater(*[INPUTS[f'rm_{k}'] for k in ('chosen', 'rejected')])) == 1
  )


def test_margin_column_is_subtracted_in_bradley_terry():
  fn = reward_model.objective(stage_config('bradley_terry')).fn
  without_margin, with_margin = (float(fn(*pair_batch([1.0], [0.5], m))[0]) for m in (0, 2.0))
  assert without_margin == pytest.approx(math.log1p(math.exp(-0.5)), rel=1e-5)
  assert with_margin == pytest.approx(math.log1p(math.exp(1.5)), rel=1e-5)


def test_first_step_with_zero_scores_must_have_loss_log_2():
  config = stage_config('bradley_terry')
  first_step = dict(loss=math.log(2), margin=0.0)
  first_step |= {'rewards/chosen': 0.0, 'rewards/rejected': 0.0}
  reward_model.check_first_step(first_step, config)
  with pytest.raises(AssertionError, match='all scores are 0'):
    reward_model.check_first_step({**first_step, 'loss': 0.7}, config)
  # Scores other than 0, as of a model that was trained before, determine no loss.
  reward_model.check_first_step({**first_step, 'loss': 0.7, 'rewards/chosen': 0.1}, config)


# -------------------------------------------------------------------- learning


def letters(kind, count, seed):
  """Yields rows for a loss: words of the letters a and b, of which those with more a are better."""
  draw = random.Random(seed)

  def word():
    return ''.join(draw.choice('ab') for _ in range(6))

  for n in range(count):
    row = {'prompt': f'{n % 10}:'}
    if kind == 'bradley_terry':
      first = second = word()
      while first.count('a') == second.count('a'):
        second = word()
      best = max(first, second, key=lambda w: w.count('a'))
      yield row | {'chosen': best, 'rejected': first if best == second else second}
    elif kind == 'regression':
      text = word()
      yield row | {'completion': text, 'score': text.count('a') / 3 - 1}
    else:
      steps = [word() for _ in range(3)]
      yield row | {'completions': steps, 'labels': [s.count('a') > 3 for s in steps]}


@pytest.mark.parametrize('kind', KINDS)
def test_learns(kind, nano, tmp_path):
  """A hundred steps halve the held-out loss; pairs are then ranked right in more than 90 % of the cases."""
  for name, count, seed in (('train', 2000, 1), ('test', 200, 2)):
    (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in letters(kind, count, seed)))
  jaxpost.run(
    tiny.run_config(
      nano,
      algorithm='reward_model',
      reward_model=dict(loss=kind),
      data=dict(path=str(tmp_path / 'train.jsonl')),
      train=dict(steps=100, batch_size=8, row_length=128),
      optim=dict(lr=1e-2, schedule='cosine', warmup_steps=10, b2=0.98),
      eval=dict(size=200, data=dict(path=str(tmp_path / 'test.jsonl'))),
    ),
    tmp_path / 'run',
  )
  before, after = tiny.rows(tmp_path / 'run', 'eval')
  print(kind, before, after)
  assert after['loss'] < 0.5 * before['loss']
  if kind == 'bradley_terry':
    assert before['loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert after['rewards/accuracies'] > 0.9
    assert after['rewards/margins'] > 1


# --------------------------------------------------------------------- folders


def trained_folder(path, source, seed=0, **fields):
  """Writes a reward model folder whose head is random instead of 0; returns (model, parameters)."""
  cfg = model_lib.with_scalar_head(hf.read_config(source))
  model = model_lib.build(dataclasses.replace(cfg, **fields))
  params = tiny.params(model, seed)
  params['score'] = np.random.RandomState(seed).standard_normal(params['score'].shape).astype(np.float32)
  tokenizer = TOKENIZER
  hf_export.save(
    path,
    model,
    params,
    stop_ids=tokenizer.stop_ids,
    pad_id=reward_models.pad_id(tokenizer),
    tokenizer_save=functools.partial(reward_models.save_tokenizer, tokenizer),
  )
  return model, params


def scores(model, params, texts):
  """Returns the score of each list of tokens, read at its last token."""
  out = []
  for ids in texts:
    x = tiny.hidden(model, params, np.int32([ids]))
    out.append(float(model.values(params, x)[0, -1]))
  return np.array(out)


TEXTS = [[257, 65, 66, 258], [70, 258, 71, 72, 258], [1, 2, 3]]


def test_transformers_gives_the_same_scores(nano, tmp_path):
  """AutoModelForSequenceClassification gives our scores, in a padded batch and for each text alone."""
  torch = pytest.importorskip('torch')
  import transformers

  model, params = trained_folder(tmp_path / 'judge', nano)
  theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'judge').eval()
  assert theirs.config.num_labels == 1
  ours, pad = scores(model, params, TEXTS), theirs.config.pad_token_id
  assert pad not in TOKENIZER.stop_ids
  longest = max(map(len, TEXTS)) + 2
  with torch.no_grad():
    padded = theirs(
      torch.tensor([t + [pad] * (longest - len(t)) for t in TEXTS]),
      attention_mask=torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in TEXTS]),
    ).logits
    alone = [theirs(torch.tensor([t])).logits[0, 0].item() for t in TEXTS]
  assert np.ptp(ours) > 0.1
  np.testing.assert_allclose(padded[:, 0], ours, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(alone, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('family', ['Qwen3', 'Llama'])
def test_a_folder_of_transformers_is_read(family, tmp_path):
  torch = pytest.importorskip('torch')
  import transformers

  config = getattr(transformers, f'{family}Config')(
    vocab_size=259,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_labels=1,
    pad_token_id=256,
  )
  torch.manual_seed(0)
  theirs = getattr(transformers, f'{family}ForSequenceClassification')(config).eval()
  theirs.save_pretrained(tmp_path)
  cfg = hf.read_config(tmp_path)
  assert cfg.num_labels == 1
  model = model_lib.build(cfg)
  params = hf.load_params(tmp_path, model, model.shardings(tiny.one_device()), 'float32')
  with torch.no_grad():
    expected = [theirs(torch.tensor([t])).logits[0, 0].item() for t in TEXTS]
  np.testing.assert_allclose(scores(model, params, TEXTS), expected, rtol=1e-4, atol=1e-5)


def test_padding_never_ends_a_text(tmp_path):
  """If a tokenizer pads with its end of turn, the reward model is saved with another padding token."""
  ends = dataclasses.replace(TOKENIZER, pad_id=TOKENIZER.eos_id)
  assert ends.pad_id in ends.stop_ids
  assert reward_models.pad_id(ends) == 256
  reward_models.save_tokenizer(ends, tmp_path)
  assert tokenizer_lib.load(str(tmp_path)).pad_id == 256


# ------------------------------------------------------------ as a role in RL


def judged(nano, judge, **over):
  """A config of GRPO whose reward is the reward model in folder `judge`."""
  return tiny.grpo_config(nano, **tiny.merged(dict(reward='reward_model', reward_model=dict(path=str(judge))), over))


@pytest.fixture(scope='module')
def judge(nano, tmp_path_factory):
  """(folder, model, parameters) of a reward model."""
  folder = tmp_path_factory.mktemp('judge') / 'judge'
  return folder, *trained_folder(folder, nano)


def graded(config, **changes):
  """Returns (Experience, Item) of the first step of a config."""
  _, controller = jaxpost.policy_and_stream(config)
  experiences = []
  controller.algorithm = dataclasses.replace(
    controller.algorithm, credit=lambda e, c: experiences.append(e) or grpo.credit(e, c), **changes
  )
  try:
    item = next(controller)
  finally:
    controller.close()
  return experiences[0], item


def texts_of(rollout):
  """Returns the tokens of prompt and completion of each sequence."""
  size = len(rollout.lengths) // len(rollout.prompts)
  return [
    [*rollout.prompts[n // size].tokens, *rollout.completions[n, :length]] for n, length in enumerate(rollout.lengths)
  ]


def test_reward_is_the_score_of_each_text_alone_even_when_packed(nano, judge):
  """The score is read at the last token of each text, with and without packing, and beside a reward function."""
  folder, model, params = judge
  long = dict(max_new_tokens=24, prompts=16)
  experience, item = graded(judged(nano, folder, train=dict(row_length=120), rollout=long))
  expected = scores(model, params, texts_of(experience.rollout))
  assert np.ptp(expected) > 0.1 and np.ptp(experience.rollout.lengths) > 0
  np.testing.assert_allclose(experience.rewards, expected, rtol=1e-4, atol=1e-5)
  assert item.info['rewards/reward_model/mean'] == pytest.approx(expected.mean(), rel=1e-4)
  mixed, _ = graded(
    judged(nano, folder, reward=(tiny.low_share, 'reward_model'), rollout=long, reward_weights=(2.0, 0.5))
  )
  np.testing.assert_array_equal(mixed.rollout.completions, experience.rollout.completions)
  functions = np.array(
    tiny.low_share([mixed.rollout.completions[n, :length].tolist() for n, length in enumerate(mixed.rollout.lengths)])
  )
  np.testing.assert_allclose(mixed.rewards, 2 * functions + 0.5 * expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('algorithm', ['reinforce_pp', pytest.param('grpo', marks=pytest.mark.long)])
def test_process_reward_is_placed_where_each_step_ends(nano, judge, algorithm):
  """A step is rewarded, where it ends, by its probability over the number of steps; functions reward at the end."""
  folder, model, params = judge
  over = dict(rollout=dict(max_new_tokens=24, prompts=16), reward=(tiny.low_share, 'reward_model'))
  over |= dict(algorithm=algorithm, reward_weights=(2.0, 0.5), reward_model=dict(per_step=True))
  experience, item = graded(judged(nano, folder, **over))
  rollout, texts, places = experience.rollout, [], []
  steps = np.zeros((len(rollout.lengths), 1))
  for n, length in enumerate(rollout.lengths):
    # In training, the judge saw a line break after the last step. A step that is cut off is not rewarded.
    tokens = [ord('\n') if t in TOKENIZER.stop_ids else t for t in rollout.completions[n, :length].tolist()]
    ends = [i for i, t in enumerate(tokens) if t == ord('\n') and (not i or tokens[i - 1] != ord('\n'))]
    steps[n] = len(ends) + (tokens[-1] != ord('\n'))
    for i in ends:
      texts.append([*rollout.prompts[n // 4].tokens, *tokens[: i + 1]])
      places.append((n, i))
  probabilities = np.zeros(rollout.completions.shape)
  probabilities[tuple(zip(*places))] = 1 / (1 + np.exp(-np.array(scores(model, params, texts))))
  assert rollout.finished.any() and not rollout.finished.all()
  assert (steps > 1).sum() > 2
  np.testing.assert_allclose(experience.turn_rewards, 0.5 * probabilities / steps, rtol=1e-4, atol=1e-6)
  functions = tiny.low_share([rollout.completions[n, :length].tolist() for n, length in enumerate(rollout.lengths)])
  np.testing.assert_allclose(
    experience.rewards, 2 * np.array(functions) + experience.turn_rewards.sum(axis=1), rtol=1e-4
  )
  if algorithm == 'reinforce_pp':
    rewards_to_go = np.cumsum(experience.turn_rewards[:, ::-1], axis=1)[:, ::-1] + 2 * np.array(functions)[:, None]
    advantages = token_advantages.whiten(rewards_to_go, experience.mask)
    np.testing.assert_allclose(item.credit.arrays['advantages'], advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('pass_reward, shown', [(1.0, False), (-50.0, True)], ids=['unset', 'set'])
def test_scores_of_a_reward_model_alone_pass_from_a_threshold_that_is_set(nano, judge, pass_reward, shown):
  """The zero of a Bradley-Terry score is arbitrary, so no value of it means right by default."""
  config = judged(nano, judge[0], eval=dict(pass_reward=pass_reward))
  _, item = graded(config)
  values = [1.5, 2.5]
  rates = evaluate.pass_metrics([Graded(values, {'reward_model': values}, None)], np.array([values]), pass_reward)
  ((_, resolved),) = prepare.resolve_all(tiny.merged(config, dict(eval=dict(samples=2)))).values()
  known = evaluate.metrics_of_samples(resolved)
  assert ['pass_rate/all' in item.info, 'pass@1' in rates, 'pass@1' in known] == [shown] * 3
  assert ('completions/right_length' in item.info) == shown


def test_consecutive_line_breaks_end_one_step():
  ids = np.array([list(b'a\n\nb\n'), list(b'\nab\0\0')], np.int32)
  rollout = Rollout(
    prompts=(Prompt(0, np.zeros(1, np.int32), '', {}),),
    completions=ids,
    lengths=np.array([5, 3]),
    logprobs=np.zeros(ids.shape, np.float32),
    behavior_logprobs=np.zeros(ids.shape, np.float32),
    finished=np.array([True, False]),
  )
  ends, cut_off = attached_rewards.step_ends(rollout, TOKENIZER)
  np.testing.assert_array_equal(ends, [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]])
  np.testing.assert_array_equal(cut_off, [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
  values = np.array([[9, 0, 9, 9, 1e9], [0, 9, 1e9, 9, 9]])
  np.testing.assert_allclose(
    attached_rewards.grade_steps(rollout, values, grading.Grader(None, TOKENIZER))[1], [0.75, 0.25]
  )
  stopped = np.array([[*b'a\n', TOKENIZER.eos_id, 0, 0], [*b'ab', TOKENIZER.eos_id, 0, 0]])
  rollout = rollout.replace(completions=stopped, lengths=np.array([3, 3]), finished=np.ones(2, bool))
  ends, cut_off = attached_rewards.step_ends(rollout, TOKENIZER)
  np.testing.assert_array_equal(ends, [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]])
  assert not cut_off.any()


@pytest.mark.parametrize(
  'over', [dict(reward='x'), dict(algorithm='sft'), dict(reward='reward_model', environment='x')]
)
def test_per_step_without_a_process_reward_model_is_refused(over):
  over = dict(dict(algorithm='grpo', reward_model=dict(per_step=True)), **over)
  algorithm = algorithms.load_algorithm(over['algorithm'])
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), algorithm.defaults)
  with pytest.raises(InputError, match='config.reward_model.per_step'):
    reward_models.check_uses(config, algorithm)


def test_sft_reward_model_and_grpo_stages_run_in_sequence(nano, tmp_path):
  """Three stages: SFT, a reward model that starts from it, and GRPO of the SFT model with that reward model."""
  held_out = dict(samples=2, pass_reward=-100.0, data=dict(path=f'{TASK}:max=99,split=test,size=8'))
  config = tiny.grpo_config(
    nano,
    stages=('sft', 'judge', 'online'),
    train=dict(steps=2),
    save=dict(export=True),
    eval=held_out,
    sft=dict(algorithm='sft', train=dict(row_length=64), eval=dict(samples=0)),
    judge=dict(
      algorithm='reward_model',
      train=dict(steps=4, row_length=128, batch_size=4),
      eval=dict(data=dict(path='')),
      data=dict(path=f'{TASK}_pairs:max=99,split=train,size=64'),
    ),
    online=dict(init_from='stage:sft'),
    reward='reward_model',
    reward_model=dict(path='stage:judge'),
  )
  jaxpost.run(config, tmp_path / 'run')
  first = tiny.rows(tmp_path / 'run', stage='online')[0]
  assert first['ratio'] == pytest.approx(1, abs=1e-4)
  assert first['rewards/reward_model/std'] > 0
  evals = tiny.rows(tmp_path / 'run', 'eval', 'online')
  for row in evals:  # every score is above pass_reward
    assert row['reward'] == row['rewards/reward_model/mean'] != 0
    assert row['pass@1'] == row['pass@2'] == 1
  assert not hf.read_config(tmp_path / 'run/export').num_labels
  # Another run cannot use this run as reward model: its last stage is a language model.
  other = tiny.grpo_config(
    nano, reward='reward_model', reward_model=dict(path=str(tmp_path / 'run')), train=dict(steps=1)
  )
  with pytest.raises(InputError, match='is a language model'):
    prepare.prepare_all(other)


def refused(config, match):
  """Asserts that the checks before a run refuse a config with a message."""
  with pytest.raises(InputError, match=match):
    prepare.prepare_all(config)


def test_unusable_reward_model_configs_are_refused(nano, judge, tmp_path):
  folder = judge[0]
  refused(judged(nano, ''), 'reward_model.path: is empty')
  refused(judged(nano, nano), 'is a language model')
  refused(judged(nano, folder, rl=dict(dynamic_sampling=3)), 'config.rl.dynamic_sampling')
  refused(judged(nano, folder, algorithm='remax'), 'the greedy answer')
  trained_folder(tmp_path / 'other', nano, vocab_size=200)
  refused(judged(nano, tmp_path / 'other'), 'has a vocabulary of 200')
  held_out = dict(samples=1, data=dict(path=f'{TASK}:split=test,size=4'))
  refused(
    tiny.run_config(
      nano, algorithm='reward_model', reward='exact_match', eval=held_out, data=dict(path=f'{TASK}_pairs:size=20')
    ),
    'writes no text',
  )
  refused(tiny.run_config(nano, reward='reward_model', eval=held_out), 'has none beside reward_model')
  refused(tiny.run_config(str(folder)), 'config.model.path: these weights are of a reward model')


def test_another_tokenizer_is_refused(nano, judge, tmp_path):
  """The vocabulary of the reward model has the same size, but two of its ids are exchanged."""
  model, params = judge[1:]

  def save_exchanged(folder):
    TOKENIZER.save(folder)
    path = folder / 'tokenizer.json'
    contents = json.loads(path.read_text())
    vocab = contents['model']['vocab']
    vocab['a'], vocab['b'] = vocab['b'], vocab['a']
    path.write_text(json.dumps(contents))

  hf_export.save(tmp_path / 'turned', model, params, tokenizer_save=save_exchanged)
  refused(
    judged(nano, tmp_path / 'turned'), "reads other tokens than the policy: the id of 'a' is 98 there and 97 here"
  )
