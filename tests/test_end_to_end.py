"""Whole tiny runs of SFT and GRPO: they learn, stages hand over their weights, and the run folder is complete.

Also, the loss and its gradients do not depend on how documents are packed. Legend: B rows, T tokens.
"""

import functools
import json
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import grpo, sft
from jaxpost.data import examples as examples_lib
from jaxpost.data import packing
from jaxpost.models import model as model_lib
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.stage import config as config_lib
from jaxpost.types import RowShape

ROOT = pathlib.Path(__file__).resolve().parents[1]
TASK = 'generated:arithmetic:max=99,ops=+'


@pytest.mark.core
def test_overfits_one_batch(tmp_path):
  """The loss goes to 0, as the first letter of each of the four texts determines the others."""
  texts = ['abcabdac', 'bafgeade', 'cbafdegc', 'dcbabcef']
  (tmp_path / 'four.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
  model = tiny.folder(tmp_path / 'model', hidden_size=32, num_layers=2)
  config = tiny.run_config(
    model,
    data=dict(path=str(tmp_path / 'four.jsonl'), train_on='all'),
    train=dict(steps=120, batch_size=1),
    optim=dict(lr=1e-2),
  )
  jaxpost.run(config, tmp_path / 'run')
  losses = [r['loss'] for r in tiny.rows(tmp_path / 'run')]
  assert losses[0] > 3 and losses[-1] < 0.01, losses[::20]


@pytest.fixture(scope='module')
def grpo_run(nano, tmp_path_factory):
  """(folder, summary, log messages) of GRPO with a reward in this process, which rewards low token ids."""
  workdir = tmp_path_factory.mktemp('grpo') / 'run'
  config = tiny.grpo_config(
    nano,
    train=dict(steps=20),
    optim=dict(lr=1e-2),
    rollout=dict(prompts=8, group_size=8, max_new_tokens=8),
    save=dict(export=True),
    log=dict(tensorboard=True),
  )
  heard = []
  handler = logging.Handler()
  handler.emit = lambda record: heard.append(record.getMessage())
  logging.getLogger('jaxpost').addHandler(handler)
  try:
    summary = jaxpost.run(config, workdir)
  finally:
    logging.getLogger('jaxpost').removeHandler(handler)
  return workdir, summary, heard


def test_grpo_raises_reward(grpo_run):
  workdir, _, _ = grpo_run
  rewards = [r['reward'] for r in tiny.rows(workdir)]
  first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
  assert 0.1 < first < 0.5
  assert last > first + 0.3, rewards


def test_reward_in_this_process_is_warned_about(grpo_run):
  _, _, heard = grpo_run
  assert [h for h in heard if 'low_share runs inside this process' in h and 'cannot be killed' in h], heard


@pytest.mark.core
def test_run_folder_and_summary_are_complete(grpo_run):
  workdir, summary, _ = grpo_run
  assert {p.name for p in workdir.iterdir()} == {
    'config.json',
    'metrics.jsonl',
    'summary.json',
    'plan.json',
    'report.html',
    'tensorboard',
    'checkpoints',
    'samples',
    'export',
    'timeline',
    'starts.jsonl',
    'checksums.json',
  }
  assert summary == json.loads((workdir / 'summary.json').read_text())
  assert summary['steps/grpo'] == 20 and summary['wall_s'] > 0
  for key in ('reward', 'loss', 'entropy', 'sampler_mismatch', 'tokens_per_s', 'completions/mean_length', 'time/step'):
    assert np.isfinite(summary[f'{key}/grpo']), key
  assert summary['paths'].keys() == {'metrics', 'report', 'export'}
  assert all(pathlib.Path(p).exists() for p in summary['paths'].values())
  for key in summary:
    assert key in ('wall_s', 'paths', 'warnings') or key.endswith('/grpo')
  for row in tiny.rows(workdir):
    assert row['stage'] == 'grpo' and 'nonfinite' not in row
  assert sorted(int(p.stem) for p in (workdir / 'samples/grpo').iterdir()) == [1, 10, 20]
  sample = json.loads((workdir / 'samples/grpo/20.jsonl').open().readline())
  assert {'prompt', 'completion', 'reward', 'components'} <= sample.keys()


def test_first_step_of_grpo_is_on_policy(grpo_run):
  workdir, _, _ = grpo_run
  first = tiny.rows(workdir)[0]
  assert first['ratio'] == pytest.approx(1, abs=1e-5)
  assert first['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  assert first['clip_ratio/low_mean'] == first['clip_ratio/high_mean'] == 0


def test_second_epoch_on_a_rollout_is_off_policy(nano, tmp_path):
  """A run checks that the first update of a rollout is on-policy; the metrics are those of the last update."""
  config = tiny.grpo_config(nano, rl=dict(epochs=2, kl_coef=0.01), train=dict(steps=2))
  jaxpost.run(config, tmp_path)
  first, second = tiny.rows(tmp_path)
  assert first['ratio'] != 1 and first['kl'] > 0
  assert second['sampler_mismatch'] > 1


def test_stage_starts_from_weights_of_the_previous_stage(nano, tmp_path):
  """Its first evaluation and samples equal the last ones of the stage before, and its reference has these weights."""
  config = tiny.grpo_config(
    nano,
    stages=('one', 'two', 'online'),
    train=dict(steps=6),
    optim=dict(lr=1e-2),
    rl=dict(kl_coef=0.1),
    eval=dict(samples=1, temperature=0.0, data=dict(path=f'{TASK},split=test,size=8,correct=1')),
    one=dict(algorithm='sft', train=dict(row_length=64)),
    two=dict(algorithm='sft', train=dict(row_length=64)),
    online=dict(train=dict(steps=2)),
  )
  workdir = tmp_path / 'run'
  jaxpost.run(config, workdir)
  (before,) = [r for r in tiny.rows(workdir, 'eval', 'one') if r['step'] == 6]
  after = tiny.rows(workdir, 'eval', 'two')[0]
  assert after['step'] == 0
  assert [after[k] for k in ('loss', 'entropy')] == [before[k] for k in ('loss', 'entropy')]
  assert tiny.rows(workdir, 'eval', 'two')[1]['loss'] != after['loss']

  def samples(stage, step):
    lines = (workdir / f'samples/{stage}/{step}.jsonl').read_text().rstrip('\n').split('\n')
    return [r for r in map(json.loads, lines) if r['split'] == 'eval']

  for old, new in zip(samples('two', 6), samples('online', 0), strict=True):
    assert new['prompt'] == old['prompt']
    assert new['completion'] == old['completion']
    assert new['logprob'] == pytest.approx(old['logprob'], abs=1e-4)
  first, second = tiny.rows(workdir, stage='online')
  assert abs(first['kl']) < 1e-8 < second['kl']


# Runs SFT with a held-out loss, and prints its child processes and the modules that it imported.
IMPORTED = """
import json, os, sys
sys.path.insert(0, sys.argv[3])
import jaxpost
summary = jaxpost.run(json.load(open(sys.argv[1])), sys.argv[2])
assert summary['perplexity/sft'] > 1
children = open(f'/proc/self/task/{os.getpid()}/children').read().split()
print(json.dumps([children, sorted(
    m for m in sys.modules if m.startswith('jaxpost.'))]))
"""


def test_sft_imports_nothing_of_rl(nano, tmp_path):
  config = tiny.run_config(nano, train=dict(steps=2), eval=dict(data=dict(path=f'{TASK},split=test,size=8')))
  (tmp_path / 'config.json').write_text(json.dumps(config))
  out = subprocess.run(
    [sys.executable, '-c', IMPORTED, str(tmp_path / 'config.json'), str(tmp_path / 'run'), str(ROOT)],
    check=True,
    text=True,
    stdout=subprocess.PIPE,
    env=os.environ,
  ).stdout
  children, modules = json.loads(out.splitlines()[-1])
  assert children == []
  wrong = [
    m
    for m in modules
    if m.startswith(
      (
        'jaxpost.rollout',
        'jaxpost.rewards',
        'jaxpost.rl.controller',
        'jaxpost.algorithms.grpo',
        'jaxpost.programs.generate',
        'jaxpost.programs.sampling',
        'jaxpost.data.prompts',
      )
    )
  ]
  assert wrong == []
  assert 'jaxpost.algorithms.sft' in modules


# ------------------------------------------- the loss does not depend on the layout of documents


def examples(count=7, longest=12, seed=0):
  """Documents of 3 to `longest` tokens; a random number of their last tokens is trained."""
  random, documents = np.random.RandomState(seed), []
  for _ in range(count):
    size = random.randint(3, longest + 1)
    mask = np.arange(size) >= random.randint(1, size)
    documents.append(examples_lib.Example(random.randint(0, 131, size).astype(np.int32), mask))
  return documents


def laid_out(docs, row_length, num_rows, packed):
  """The batch of documents, packed into rows or one in each row."""
  lengths = [len(d.tokens) for d in docs]
  rows_of_docs = packing.pack(lengths, row_length) if packed else [[i] for i in range(len(docs))]
  return packing.to_batch([[docs[i] for i in r] for r in rows_of_docs], row_length, num_rows)


def losses(objective, batch, micro):
  """(loss, metrics, gradients) of [B, T] rows, `micro` rows at a time."""
  model, params = weights()
  loss = programs.make_loss(model, objective, tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro, x.shape[1]), batch)
  step = jax.jit(lambda p, b: programs.accumulate(loss, p, b))
  (value, extra), grads = step(params, split)
  return float(value), extra, grads


@functools.lru_cache
def weights():
  model = model_lib.build(tiny.config(num_layers=1))
  return model, tiny.params(model)


# (row length, rows, rows at a time, packed)
LAYOUTS = {
  'one row': (96, 1, 1, True),
  'micro-batches': (12, 8, 2, False),
  'longer and empty rows': (40, 9, 9, False),
  'packed, empty micro-batches': (24, 8, 2, True),
}


def assert_same(actual, expected):
  """Compares two results of `losses`."""
  loss, extra, grads = actual
  expected_loss, expected_extra, expected_grads = expected
  assert loss == pytest.approx(expected_loss, rel=1e-6)
  for key in expected_extra:
    assert float(extra[key]) == pytest.approx(float(expected_extra[key]), rel=2e-6, abs=1e-7), key
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads)):
    assert tiny.largest(a - b) <= 1e-5 * tiny.largest(b)


@pytest.fixture(scope='module')
def plain_loss():
  objective = sft.objective(config_lib.parse({})['sft'])
  return objective, losses(objective, laid_out(examples(), 12, 7, False), 7)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_sft_loss_does_not_depend_on_the_layout(layout, plain_loss):
  length, num_rows, micro, packed = LAYOUTS[layout]
  objective, expected = plain_loss
  batch = laid_out(examples(), length, num_rows, packed)
  assert_same(losses(objective, batch, micro), expected)


@pytest.fixture(scope='module')
def grpo_loss():
  """(function of (row length, rows, rows at a time) -> `losses`, its result with one sequence in each row)."""
  config = config_lib.parse(dict(algorithm='grpo', reward='x', rl=dict(kl_coef=0.1, entropy_coef=0.01)))['grpo']
  config = config_lib.resolve(config, grpo.GRPO.defaults)
  objective = grpo.objective(config)
  values = np.random.RandomState(0).standard_normal((12, 1))
  samples = tiny.rollout()
  mask = batching.completion_mask(samples) * (np.arange(12) != 5)[:, None]
  arrays = dict(advantages=values * mask, sampler_logprobs=samples.logprobs, ref_logprobs=samples.logprobs * 3)
  weights = batching.token_weights(mask, 'token', 6)

  def compute(length, num_rows, micro):
    batch = batching.to_batch(samples, range(12), weights, arrays, RowShape(num_rows, length))
    return losses(objective, batch, micro)

  return compute, compute(11, 12, 12)


@pytest.mark.parametrize('layout', [(48, 3, 3), (24, 8, 2), (160, 1, 1)])
def test_grpo_loss_does_not_depend_on_the_layout(layout, grpo_loss):
  compute, expected = grpo_loss
  assert abs(expected[0]) > 1e-3
  assert_same(compute(*layout), expected)
