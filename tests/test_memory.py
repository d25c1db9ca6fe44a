"""`hardware.memory`: predictions before step 0 and the memory then in use, free host memory, `rollout.offload`."""

import contextlib
import json
import math
import types

import jax
import pytest
import tiny

import jaxpost
from jaxpost import roles
from jaxpost.errors import InputError
from jaxpost.formats import hf
from jaxpost.hardware import memory
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.rl import offload
from jaxpost.rollout import sampler
from jaxpost.stage import evaluate


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('memory') / 'nano', num_layers=2, hidden_size=64, intermediate_size=256)


def test_free_host_memory_respects_the_limits_of_control_groups(tmp_path):
  def write(path, text):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)

  def free():
    return memory.free_on_host(str(tmp_path)) / 2**30

  assert free() == math.inf
  write('proc/meminfo', f'MemTotal: 1 kB\nMemAvailable: {2**30} kB\n')
  assert free() == 1024
  write('proc/self/cgroup', '0::/pod/box\n')  # version 2: the container has no limit, but its parent group has one
  write('sys/fs/cgroup/pod/box/memory.max', 'max\n')
  write('sys/fs/cgroup/pod/box/memory.current', '5\n')
  write('sys/fs/cgroup/pod/memory.max', f'{16 * 2**30}\n')
  write('sys/fs/cgroup/pod/memory.current', f'{6 * 2**30}\n')
  write('sys/fs/cgroup/pod/memory.stat', f'anon 3\ninactive_file {2 * 2**30}\n')
  assert free() == 12
  write('proc/self/cgroup', '4:cpu,cpuacct:/docker/7\n3:memory:/docker/7\n0::/\n')  # version 1, seen in a container
  write('sys/fs/cgroup/memory/memory.limit_in_bytes', f'{8 * 2**30}\n')
  write('sys/fs/cgroup/memory/memory.usage_in_bytes', f'{3 * 2**30}\n')
  assert free() == 5


def watched(model, folder, monkeypatch, **over):
  """Makes a run of GRPO; returns (plan, rows of metrics, most bytes of live arrays on the device during sampling, kinds
  of memory that held the optimizer state at updates)."""
  live_bytes, kinds = [], set()
  call = sampler.Sampler.__call__

  def sample(self, *args, **kwargs):
    serve = self.engine.serve

    def watched_serve(requests, *, next_requests, **fields):
      def measure(done, idle):
        live_bytes.append(sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind != 'pinned_host'))
        return next_requests(done, idle)

      return serve(requests, next_requests=measure, **fields)

    self.engine.serve = watched_serve
    try:
      return call(self, *args, **kwargs)
    finally:
      self.engine.serve = serve

  update = roles.Trainable.update

  def watch(self, batch):
    kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(self.state.opt_state))
    return update(self, batch)

  monkeypatch.setattr(sampler.Sampler, '__call__', sample)
  monkeypatch.setattr(roles.Trainable, 'update', watch)
  before = sum(x.nbytes for x in jax.live_arrays())
  jaxpost.run(
    tiny.grpo_config(model, **tiny.merged(dict(train=dict(steps=3), rollout=dict(prompts=8, group_size=8)), over)),
    folder,
  )
  (plan,) = json.loads((folder / 'plan.json').read_text())
  rows = tiny.rows(folder)
  return plan, rows, max(live_bytes) - before, kinds


def test_peak_memory_of_a_run_is_predicted_and_reported(model, tmp_path, monkeypatch):
  plan, rows, live_bytes, _ = watched(model, tmp_path / 'run', monkeypatch)
  assert plan['choices'] == {
    'model.dtype': 'float32',
    'model.attention': 'chunked (cpu)',
    'model.remat': 'none (cpu)',
    'train.micro_batch_size': '32 (cpu)',
    'logits': '33,554,432 at a time (cpu)',
    'rollout.block': '8 (cpu)',
    'rollout.slots': '64 (cpu)',
    'rl.importance': 'none',
    'rl.kl_estimator': 'k3',
    'rl.aggregate': 'token',
    'rl.clip_low': '0.2',
    'rl.clip_high': '0.2',
    'rl.old_policy': 'recomputed',
    'rl.scale_rewards': 'group',
  }
  predicted = plan['memory']
  assert {'reshard', 'prefill', 'generate', 'update', 'peak'} <= set(predicted)
  assert predicted['peak'] == max(predicted.values())
  temps = max(r['temp_bytes'] for r in plan['programs'] if r['program'] == 'generate')
  # Live arrays do not include the temporaries of the program that generates.
  assert 0.8 * (predicted['generate'] - temps) <= live_bytes <= predicted['generate']
  for row in rows:
    assert row['memory/predicted_bytes'] == predicted['peak']
    assert row['memory/peak_bytes'] > 0


def test_offload_frees_memory_during_sampling_and_changes_no_result(model, tmp_path, monkeypatch):
  """The optimizer state and the reference are on the host during sampling, and back on the device at updates."""
  over = dict(rl=dict(kl_coef=0.1))
  plan, rows, bytes_without, kinds = watched(model, tmp_path / 'a', monkeypatch, **over)
  over |= dict(rollout=dict(offload=True))
  offload_plan, offload_rows, bytes_with, offload_kinds = watched(model, tmp_path / 'b', monkeypatch, **over)
  assert kinds == offload_kinds == {'device'}

  def without_times(rows):
    return [{k: v for k, v in r.items() if not metrics.is_clock_key(k)} for r in rows]

  assert without_times(rows) == without_times(offload_rows)
  saved_bytes = plan['memory']['generate'] - offload_plan['memory']['generate']
  policy = model_lib.build(hf.read_config(model))
  # Offloaded are two moments and a reference: three times the size of the parameters.
  assert saved_bytes == pytest.approx(3 * memory.size(policy.init(jax.random.key(0))), rel=0.01)
  assert bytes_without - bytes_with == pytest.approx(saved_bytes, rel=0.01)
  assert plan['memory']['update'] == offload_plan['memory']['update']


def test_predicted_memory_of_programs_matches_sums_by_hand():
  def row(program, **kw):
    return dict(
      dict(program=program, argument_bytes=0, output_bytes=0, alias_bytes=0, temp_bytes=0, batch_bytes=0), **kw
    )

  predicted = memory.predict(
    [
      row('init', temp_bytes=999),
      row('update', output_bytes=100, alias_bytes=90, temp_bytes=7, batch_bytes=3),
      row('prefill', output_bytes=5, temp_bytes=2),
      row('generate', output_bytes=50, alias_bytes=40, temp_bytes=1),
      row('generate', output_bytes=50, alias_bytes=40, temp_bytes=4),
    ],
    100,
    60,
    30,
  )
  assert predicted == dict(
    update=100 + 3 + 10 + 7, prefill=100 - 60 + 30 + 5 + 2, generate=100 - 60 + 30 + 5 + 10 + 4, peak=120
  )
  predicted = memory.predict([row('verify', temp_bytes=1), row('update')], 100, 60, 30, overlap=True, preserved=20)
  assert predicted == dict(verify=100 - 60 + 30 + 20 + 1, update=100 + 30, peak=130)


def test_evaluation_samples_with_the_optimizer_on_the_host(monkeypatch):
  events = []
  monkeypatch.setattr(offload, '_move', lambda roles, memory_kind: events.append(memory_kind))

  class Sampler:
    engine = types.SimpleNamespace(
      preserve_weights=contextlib.nullcontext, load=lambda *args: events.append('load'), unload=lambda: None
    )

    def __call__(self, *args, **sampling):
      events.append('sample')
      raise LookupError

  roles = types.SimpleNamespace(policy=types.SimpleNamespace(params={}))  # other processes may hold all parameters
  for offloads, before in ((True, ['pinned_host']), (False, [])):
    with pytest.raises(LookupError):
      evaluate.SampledEval(Sampler(), None, (), 1, 1.0, 0.0, offload=offloads)(roles, 0)
    assert events == [*before, 'load', 'sample']
    events.clear()


def test_offload_on_devices_without_pinned_host_memory_is_refused(model, monkeypatch, tmp_path):
  config = tiny.grpo_config(model, rollout=dict(offload=True))
  monkeypatch.setattr(memory, 'can_offload', lambda device: False)
  with pytest.raises(InputError, match='config.rollout.offload: these'):
    jaxpost.run(config, tmp_path / 'run')
