"""Runs of the preference methods: the reference on disk, resume, learning."""

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


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


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
  """{leaf: bytes} of a checkpoint."""
  folder = workdir / 'checkpoints' / algorithm
  _, _, seal = (folder / str(step) / 'checksums.json').read_bytes().partition(b'\n')
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tree = {
    k: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here)
    for k, (shape, dtype) in json.loads(seal)['leaves'].items()
  }
  checkpointer = Checkpointer(folder)
  try:
    _, found, _ = checkpointer.restore(tree, step)
  finally:
    checkpointer.close()
  return {k: np.asarray(x).tobytes() for k, x in found.items()}


@pytest.mark.parametrize('algorithm', METHODS)
def test_reference_on_disk(model, algorithm, tmp_path, monkeypatch):
  """The same run; its second half, and a second run, score nothing."""
  made = functools.partial(config_of, model, algorithm)
  on_disk = dict(preference=dict(precompute_ref=True))
  plain = run(made(), tmp_path / 'plain')
  half = run(made(train=dict(steps=2), **on_disk), tmp_path / 'disk')
  # Nothing is left to score.
  monkeypatch.setattr(precompute, 'read', lambda *args: pytest.fail('scores'))
  whole = run(made(**on_disk), tmp_path / 'disk')
  assert whole[:3] == half[:3]
  for one, two in zip(plain, [r for r in whole if r not in half[3:]]):
    assert one.keys() == two.keys()
    for name in one:
      # Before the first update all rewards are 0, but for rounding.
      tie = name == 'rewards/accuracies' and one['step'] < 2
      if not isinstance(one[name], str) and not tie:
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-4), name
  assert plain[-1]['rewards/margins'] != 0
  # Else answers that are only read might as well be left out.
  assert algorithm == 'dpo' or any(r['kl'] > 0.01 for r in plain)
  # No copy of the weights was made.
  assert 'copy' in programs(tmp_path / 'plain')
  assert 'copy' not in programs(tmp_path / 'disk')


def test_what_is_kept_is_of_these_weights_and_data(model, tmp_path, monkeypatch):
  """Other data, rendering, weights or types of them: computed anew, beside the first."""
  on_disk = dict(train=dict(steps=1), preference=dict(precompute_ref=True))
  run(config_of(model, 'dpo', **on_disk), tmp_path / 'first')
  kept = sorted(p.name for p in (tmp_path / 'first/cache').iterdir())
  assert len(kept) == 2  # of the rows, and of those held out
  read, count = precompute.read, []
  monkeypatch.setattr(precompute, 'read', lambda *args: (count.append(1), read(*args))[1])
  other = tiny.folder(tmp_path / 'other', initializer_range=0.1)
  for n, (path, over, new) in enumerate(
    [
      (model, {}, 0),
      (model, dict(size=61), 1),  # of the rows alone
      (model, dict(preference=dict(share_prompt=False)), 2),
      (other, {}, 2),
      (model, dict(model=dict(param_dtype='bfloat16')), 2),
      (model, dict(lora=dict(rank=2)), 2),  # an adapter of other sizes would be merged, and rounded
    ]
  ):
    folder = tmp_path / f'again{n}'
    shutil.copytree(tmp_path / 'first/cache', folder / 'cache')
    count.clear()
    run(config_of(path, 'dpo', **tiny.merged(on_disk, over)), folder)
    assert len(count) == new, (n, count)


@pytest.mark.core
def test_resume_is_bitwise(model, tmp_path):
  """Four steps, and two and two: rows and every bit of the state."""
  one = run(config_of(model, 'dpo'), tmp_path / 'one')
  run(config_of(model, 'dpo', train=dict(steps=2)), tmp_path / 'two')
  two = run(config_of(model, 'dpo'), tmp_path / 'two')

  def train(rows):
    return [r for r in rows if r['split'] == 'train']

  assert train(one) == train(two) and len(train(one)) == 4
  assert leaves(tmp_path / 'one', 'dpo', 4) == leaves(tmp_path / 'two', 'dpo', 4)


def test_step_zero_in_bfloat16(model, tmp_path):
  """Reference and policy are two programs: the check must allow rounding."""
  config = config_of(model, 'dpo', train=dict(steps=1))
  config['model']['dtype'] = 'bfloat16'
  rows = run(config, tmp_path)
  assert rows[1]['loss'] == pytest.approx(np.log(2), abs=1e-3)
