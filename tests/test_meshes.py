"""GRPO that trains on one mesh and samples on another, of the same devices: first-step checks and experts."""

import pathlib
import sys

import children
import pytest

from jaxpost.monitor import metrics

MESHES = {
  'fsdp=2,tensor=2': 'data=2,tensor=2',
  'data=4': 'tensor=4',
  'expert=2,fsdp=2': 'expert=2,tensor=2',
  'expert=4': 'data=4',
}


@pytest.mark.parametrize('train', MESHES)
def test_grpo_reshards_between_meshes(train, tmp_path):
  """Log-probs of sampler, trainer and reference agree in the first step, which runs in float32."""
  children.run(__file__, str(tmp_path), train, MESHES[train], devices=4)
  first, *_ = [row for row in metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl') if row['split'] == 'train']
  assert first['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  assert first['ratio'] == pytest.approx(1, abs=1e-5)
  assert 0 <= first['kl'] < 1e-9
  assert first['reshard_bytes'] > 0


def train_rows(devices, folder, mesh):
  """Returns the training rows of a GRPO run on this number of devices."""
  children.run(__file__, str(folder), *mesh, devices=devices)
  return [row for row in metrics.read_rows(folder / 'run' / 'metrics.jsonl') if row['split'] == 'train']


def test_experts_on_8_devices_match_one_device(tmp_path):
  """Samples and rewards are the same, and the first step differs only by the order of sums."""
  (one_device,) = train_rows(1, tmp_path / 'one', ('expert=1', 'expert=1', '1'))
  (eight_devices,) = train_rows(8, tmp_path / 'many', ('expert=4,fsdp=2', 'expert=2,data=4', '1'))
  assert one_device['reward'] == eight_devices['reward']
  assert one_device['completions/mean_length'] == eight_devices['completions/mean_length']
  for name in ('loss', 'grad_norm', 'entropy', 'router/entropy', 'router/max_load'):
    assert eight_devices[name] == pytest.approx(one_device[name], rel=1e-4, abs=1e-6), name
  assert eight_devices['grad_norm'] > 0


def main(workdir, train, rollout, steps='2'):
  import tiny

  from jaxpost import stages
  from jaxpost.models.config import Experts

  sparse = dict(family='qwen3_moe', experts=Experts(8, 3, 16))
  model = tiny.folder(
    pathlib.Path(workdir) / 'model', vocab_size=259, num_heads=4, num_kv_heads=4, **sparse if 'expert' in train else {}
  )
  stages.run(
    tiny.grpo_config(
      model, mesh=dict(train=train, rollout=rollout), rl=dict(kl_coef=0.01), train=dict(steps=int(steps))
    ),
    pathlib.Path(workdir) / 'run',
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
