"""Tests of runs of preference methods: the precomputed reference on disk, resuming, and the loss at step 0."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import rich.console
import tiny

from jaxpost import stages
from jaxpost.monitor import metrics
from jaxpost.stage import precompute
from jaxpost.storage.checkpoint import Checkpointer

TASK = 'generated:arithmetic_{}:max=99,split={},size={}'
METHODS = {'dpo': 'pairs', 'kto': 'labels'}


def config_of(folder, algorithm, size=60, **over):
  kind = METHODS[algorithm]
  common = tiny.run_config(
    folder,
    algorithm=algorithm,
    seed=1,
    train=dict(steps=4, batch_size=4, row_length=96),
    data=dict(path=TASK.format(kind, 'train', size)),
    eval=dict(data=dict(path=TASK.format(kind, 'test', 8))),
  )
  return tiny.merged(common, over)


def run(config, workdir):
  stages.run(config, workdir, rich.console.Console(quiet=True))
  return metrics.comparable_rows(workdir / 'metrics.jsonl')


def programs(workdir):
  return [row['program'] for row in json.loads((workdir / 'plan.json').read_text())[0]['programs']]


def leaves(workdir, algorithm, step):
  """Returns {leaf: bytes} of a checkpoint."""
  folder = workdir / 'checkpoints' / algorithm
  _, _, seal = (folder / str(step) / 'checksums.json').read_bytes().partition(b'\n')
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tree = {
    k: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    for k, (shape, dtype) in json.loads(seal)['leaves'].items()
  }
  checkpointer = Checkpointer(folder)
  try:
    _, arrays, _ = checkpointer.restore(tree, step)
  finally:
    checkpointer.close()
  return {k: np.asarray(x).tobytes() for k, x in arrays.items()}


@pytest.mark.parametrize('algorithm', METHODS)
def test_run_with_precomputed_reference_equals_run_with_reference_model(nano, algorithm, tmp_path, monkeypatch):
  """The resumed half of the run scores nothing."""
  config = functools.partial(config_of, nano, algorithm)
  on_disk = dict(preference=dict(precompute_ref=True))
  plain = run(config(), tmp_path / 'plain')
  first_half = run(config(train=dict(steps=2), **on_disk), tmp_path / 'disk')
  # From here on, scoring fails the test.
  monkeypatch.setattr(precompute, 'read', lambda *args: pytest.fail('scores'))
  whole = run(config(**on_disk), tmp_path / 'disk')
  assert whole[:3] == first_half[:3]
  for one, two in zip(plain, [r for r in whole if r not in first_half[3:]]):
    assert one.keys() == two.keys()
    for name in one:
      # Before the first update, all rewards are 0 but for rounding, so which is larger is arbitrary.
      is_tie = name == 'rewards/accuracies' and one['step'] < 2
      if not isinstance(one[name], str) and not is_tie:
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-4), name
  assert plain[-1]['rewards/margins'] != 0
  # Where the KL of KTO stayed 0, the answers that only estimate it would not be tested.
  assert algorithm == 'dpo' or any(r['kl'] > 0.01 for r in plain)
  # Only the run with a reference model copies the weights.
  assert 'copy' in programs(tmp_path / 'plain')
  assert 'copy' not in programs(tmp_path / 'disk')


def test_precomputed_reference_is_reused_only_for_same_weights_and_data(nano, tmp_path, monkeypatch):
  """With other data, rendering, weights or types of weights, the reference is computed again, beside the first."""
  on_disk = dict(train=dict(steps=1), preference=dict(precompute_ref=True))
  run(config_of(nano, 'dpo', **on_disk), tmp_path / 'first')
  cached = sorted(p.name for p in (tmp_path / 'first/cache').iterdir())
  assert len(cached) == 2  # one for the training rows, and one for the held-out rows
  read, reads = precompute.read, []
  monkeypatch.setattr(precompute, 'read', lambda *args: (reads.append(1), read(*args))[1])
  other_model = tiny.folder(tmp_path / 'other', initializer_range=0.1)
  for n, (path, over, expected_reads) in enumerate(
    [
      (nano, {}, 0),
      (nano, dict(size=61), 1),  # of the training rows alone
      (nano, dict(preference=dict(share_prompt=False)), 2),
      (other_model, {}, 2),
      (nano, dict(model=dict(param_dtype='bfloat16')), 2),
      (nano, dict(lora=dict(rank=2)), 2),  # an adapter of other sizes would be merged, and rounded
    ]
  ):
    folder = tmp_path / f'again{n}'
    shutil.copytree(tmp_path / 'first/cache', folder / 'cache')
    reads.clear()
    run(config_of(path, 'dpo', **tiny.merged(on_disk, over)), folder)
    assert len(reads) == expected_reads, (n, reads)


@pytest.mark.core
def test_resume_is_bitwise(nano, tmp_path):
  """Four steps at once, and two and two, have the same rows and every bit of the state."""
  whole = run(config_of(nano, 'dpo'), tmp_path / 'one')
  run(config_of(nano, 'dpo', train=dict(steps=2)), tmp_path / 'two')
  resumed = run(config_of(nano, 'dpo'), tmp_path / 'two')

  def train_rows(rows):
    return [r for r in rows if r['split'] == 'train']

  assert train_rows(whole) == train_rows(resumed) and len(train_rows(whole)) == 4
  assert leaves(tmp_path / 'one', 'dpo', 4) == leaves(tmp_path / 'two', 'dpo', 4)


def test_first_dpo_loss_in_bfloat16_is_log_2(nano, tmp_path):
  """Reference and policy are two programs, so the check of the first step must allow for rounding."""
  config = config_of(nano, 'dpo', train=dict(steps=1))
  config['model']['dtype'] = 'bfloat16'
  rows = run(config, tmp_path)
  assert rows[1]['loss'] == pytest.approx(np.log(2), abs=1e-3)
