"""Memory: what is predicted before step 0, and what is then in use."""

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


def test_what_a_container_leaves(tmp_path):
  def write(path, text):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)

  def free():
    return memory.free_on_host(str(tmp_path)) / 2**30

  assert free() == math.inf
  write('proc/meminfo', f'MemTotal: 1 kB\nMemAvailable: {2**30} kB\n')
  assert free() == 1024
  write('proc/self/cgroup', '0::/pod/box\n')  # version 2: a container without a limit, in a group that has one
  write('sys/fs/cgroup/pod/box/memory.max', 'max\n')
  write('sys/fs/cgroup/pod/box/memory.current', '5\n')
  write('sys/fs/cgroup/pod/memory.max', f'{16 * 2**30}\n')
  write('sys/fs/cgroup/pod/memory.current', f'{6 * 2**30}\n')
  write('sys/fs/cgroup/pod/memory.stat', f'anon 3\ninactive_file {2 * 2**30}\n')
  assert free() == 12
  write('proc/self/cgroup', '4:cpu,cpuacct:/docker/7\n3:memory:/docker/7\n0::/\n')  # version 1, seen from inside
  write('sys/fs/cgroup/memory/memory.limit_in_bytes', f'{8 * 2**30}\n')
  write('sys/fs/cgroup/memory/memory.usage_in_bytes', f'{3 * 2**30}\n')
  assert free() == 5


def watched(model, folder, monkeypatch, **over):
  """(plan, rows, most bytes of arrays that lived while it sampled, where
  optimizer states were then)."""
  seen, kinds = [], set()
  call = sampler.Sampler.__call__

  def sample(self, *args, **kwargs):
    serve = self.engine.serve

    def look(requests, *, next_requests, **fields):
      def listen(done, idle):
        seen.append(sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind != 'pinned_host'))
        return next_requests(done, idle)

      return serve(requests, next_requests=listen, **fields)

    self.engine.serve = look
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
  rows = [r for r in metrics.read_rows(folder / 'metrics.jsonl') if r['split'] == 'train']
  return plan, rows, max(seen) - before, kinds


def test_it_is_predicted_and_reported(model, tmp_path, monkeypatch):
  plan, rows, lived, _ = watched(model, tmp_path / 'run', monkeypatch)
  assert plan['choices'] == {
    'model.dtype': 'float32',
    'model.attention': 'chunked (cpu)',
    'model.remat': 'none (cpu)',
    'train.micro_batch_size': '32 (cpu)',
    'rollout.block': '8 (cpu)',
    'rl.importance': 'none',
    'rl.kl_estimator': 'k3',
    'rl.aggregate': 'token',
    'rl.clip_low': '0.2',
    'rl.clip_high': '0.2',
    'rl.old_policy': 'recomputed',
    'rl.scale_rewards': 'group',
  }
  found = plan['memory']
  assert {'reshard', 'prefill', 'generate', 'update', 'peak'} <= set(found)
  assert found['peak'] == max(found.values())
  temps = max(r['temp_bytes'] for r in plan['programs'] if r['program'] == 'generate')
  # Memory that is held during sampling, without the temporaries of the program.
  assert 0.8 * (found['generate'] - temps) <= lived <= found['generate']
  for row in rows:
    assert row['memory/predicted_bytes'] == found['peak']
    assert row['memory/peak_bytes'] > 0


def test_parking_changes_nothing_else(model, tmp_path, monkeypatch):
  """The optimizer state and a reference are offloaded."""
  kl = dict(rl=dict(kl_coef=0.1))
  plain, rows, lived, kinds = watched(model, tmp_path / 'a', monkeypatch, **kl)
  parked, same, less, then = watched(model, tmp_path / 'b', monkeypatch, rollout=dict(offload=True), **kl)
  assert kinds == then == {'device'}  # it is back when it is wanted

  def bare(rows):
    return [{k: v for k, v in r.items() if not metrics.is_clock_key(k)} for r in rows]

  assert bare(rows) == bare(same)
  idle = plain['memory']['generate'] - parked['memory']['generate']
  policy = model_lib.build(hf.read_config(model))
  # Two moments and a reference.
  assert idle == pytest.approx(3 * memory.size(policy.init(jax.random.key(0))), rel=0.01)
  assert lived - less == pytest.approx(idle, rel=0.01)
  assert plain['memory']['update'] == parked['memory']['update']


def test_by_hand():
  def row(program, **kw):
    return dict(
      dict(program=program, argument_bytes=0, output_bytes=0, alias_bytes=0, temp_bytes=0, batch_bytes=0), **kw
    )

  found = memory.predict(
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
  assert found == dict(
    update=100 + 3 + 10 + 7, prefill=100 - 60 + 30 + 5 + 2, generate=100 - 60 + 30 + 5 + 10 + 4, peak=120
  )
  found = memory.predict([row('verify', temp_bytes=1), row('update')], 100, 60, 30, overlap=True, preserved=20)
  assert found == dict(verify=100 - 60 + 30 + 20 + 1, update=100 + 30, peak=130)


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

  roles = types.SimpleNamespace(policy=types.SimpleNamespace(params={}))  # which may be on other processes alone
  for offloads, before in ((True, ['pinned_host']), (False, [])):
    with pytest.raises(LookupError):
      evaluate.SampledEval(Sampler(), None, (), 1, 1.0, 0.0, offload=offloads)(roles, 0)
    assert events == [*before, 'load', 'sample']
    events.clear()


def test_devices_without_such_memory_are_told(model, monkeypatch, tmp_path):
  config = tiny.grpo_config(model, rollout=dict(offload=True))
  monkeypatch.setattr(memory, 'can_offload', lambda device: False)
  with pytest.raises(InputError, match='config.rollout.offload: these'):
    jaxpost.run(config, tmp_path / 'run')
