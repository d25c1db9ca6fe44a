"""Expert parallelism on 4 simulated devices: dispatch of tokens to experts, and the way back.

Legend: n devices, N rows of each, D numbers a row, k experts of a row.
"""

import children
import pytest

# Destinations of tokens: "routed", as the router decides; "crowded", all to the experts of one device, which then needs
# several rounds while the others are idle.
CASES = [
  f'{way}:{chosen}:{mesh}' for way in ('padded', 'ragged') for chosen in ('routed', 'crowded') for mesh in ('4', '2')
]
# Cases in which experts have adapters.
ADAPTED = [
  f'adapted:{way}:{chosen}:{mesh}'
  for way, chosen in (('padded', 'routed'), ('ragged', 'crowded'))
  for mesh in ('expert=4', 'expert=2,tensor=2', 'expert=2,fsdp=2')
]


@pytest.fixture(scope='module')
def report():
  """{case: 'ok' or the error}, from one child process with 4 devices."""
  run = children.run(__file__, devices=4)
  return dict(line.split(' ', 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize('case', CASES + ADAPTED)
def test_experts_split_over_devices_match_one_device(report, case):
  """Outputs, and gradients of rows, experts and router, agree in float32."""
  assert report[case] == 'ok'


def test_experts_without_an_expert_axis_need_no_communication_over_context(report):
  assert report['context=4'] == 'ok'


@pytest.mark.parametrize('way', ['padded', 'ragged'])
def test_rows_arrive_as_they_left(report, way):
  """All rows that one device sends to another arrive in their order, as selected by numpy."""
  assert report[f'arrived:{way}'] == 'ok'


@pytest.mark.parametrize('way', ['padded', 'ragged'])
def test_combine_is_the_transpose_of_dispatch(report, way):
  """<dispatch(x), y> = <x, combine(y)> for the rows that are sent."""
  assert report[f'transpose:{way}'] == 'ok'


def test_exact_exchange_sends_only_the_requested_rows(report):
  """The sizes that the ragged exchange sends and receives are those counted by numpy."""
  assert report['sent'] == 'ok'


def ragged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
  """Implements `jax.lax.ragged_all_to_all` as documented, because XLA:CPU lacks it."""
  import jax
  import jax.numpy as jnp

  gathered = [jax.lax.all_gather(y, axis_name) for y in (operand, input_offsets, send_sizes, output_offsets)]
  device, index = jax.lax.axis_index(axis_name), jnp.arange(len(output))
  for sent, starts, sizes, ends in zip(*gathered):
    offset = index - ends[device]
    is_for_device = (offset >= 0) & (offset < sizes[device])
    received = sent[jnp.where(is_for_device, offset + starts[device], 0)]
    output = jnp.where(is_for_device[:, None], received, output)
  # On an accelerator, a device that expects other sizes than are sent to it would hang; here its output is NaN.
  wrong = jnp.any(gathered[2][:, device] != recv_sizes)
  return jnp.where(wrong, jnp.nan, output)


def main():
  import jax
  import jax.numpy as jnp
  import numpy as np
  import tiny
  from jax.sharding import PartitionSpec

  from jaxpost.distributed.phases import make_layout
  from jaxpost.models import expert_parallel, lora, moe
  from jaxpost.models import model as model_lib
  from jaxpost.models.config import Experts

  jax.lax.ragged_all_to_all = ragged
  plain = expert_parallel.exchange
  ways = {'padded': plain, 'ragged': lambda *args: plain(*args[:3], True)}
  model = model_lib.build(tiny.config(family='qwen3_moe', experts=Experts(8, 3, 24)))
  params = {k: tiny.params(model)['layers'][k][0] for k in ('router', 'gate', 'up', 'down')}
  random = np.random.RandomState(0)
  x, g = random.standard_normal((2, 8, 10, 32)).astype('f')
  crowd = 2 + np.argsort(random.uniform(size=(8, 10, 3)), axis=-1)

  def crowded(chosen, size):
    return None if chosen == 'routed' else crowd % (8 // size) + 8 // size

  def run(layout, chosen):
    def both(params, x):
      out, back = jax.vjp(lambda p, x: moe.mlp(p, x, model.config, tiny.EXACT, layout, chosen=chosen)[0], params, x)
      return out, back(g)

    return jax.jit(both)(params, x)

  def compare(text, layout, chosen=None):
    actual, expected = run(layout, chosen), run(tiny.one_device(), chosen)
    wrong = {
      jax.tree_util.keystr(path): float(tiny.largest(a - b))
      for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected))
      if not tiny.largest(a - b) <= 1e-5 * tiny.largest(b)
    }
    print(text, wrong or 'ok')

  for text in CASES:
    way, chosen, size = text.split(':')
    expert_parallel.exchange = ways[way]
    compare(text, make_layout(f'data=-1,expert={size}', 'train'), crowded(chosen, int(size)))
  expert_parallel.exchange = plain

  def draw(*shape):
    return random.standard_normal(shape).astype('f')

  for name, (into, onto) in dict(gate=(32, 24), up=(32, 24), down=(24, 32)).items():
    params[name] = lora.Adapted(params[name], draw(8, into, 2), draw(8, 2, onto), None, 0.7, rate=0.0)
  for text in ADAPTED:
    _, way, chosen, mesh = text.split(':')
    expert_parallel.exchange, layout = ways[way], make_layout(mesh, 'train')
    compare(text, layout, crowded(chosen, layout.mesh.shape['expert']))
  expert_parallel.exchange = plain

  layout, rows = make_layout('context=4', 'train'), x[..., :8, :]
  placed = jax.device_put(rows, layout.sharding(('batch', 'time', None)))
  local = jax.jit(lambda p, x: moe.mlp(p, x, model.config, tiny.EXACT, layout)[0])
  near = tiny.largest(
    local(params, placed)
    - jax.jit(lambda p, x: moe.mlp(p, x, model.config, tiny.EXACT, tiny.one_device())[0])(params, rows)
  )
  text = local.lower(params, placed).compile().as_text()
  print(
    'context=4',
    'ok' if near < 1e-4 and 'all-' not in text else (f'{near}, {[li for li in text.splitlines() if "all-" in li]}'),
  )

  mesh = make_layout('expert=4', 'train').mesh
  requested = random.uniform(size=(4, 6, 4)) < 0.4
  x, y = random.normal(size=(4, 6, 5)), random.normal(size=(4, 4, 6, 5))
  split = PartitionSpec('expert')

  def both(x, y):
    trip = expert_parallel.plan_dispatch(jnp.asarray(requested), way == 'ragged')
    there, back = expert_parallel.dispatch(x[0], trip), expert_parallel.combine(y[0], trip)
    real = jnp.arange(6)[:, None] < trip.received[:, None, None]
    return jax.lax.psum(jnp.stack([jnp.sum(jnp.where(real, there * y[0], 0)), jnp.sum(x[0] * back)]), 'expert'), (
      trip.sent[None],
      trip.received[None],
      there[None],
    )

  for way in ways:
    (one, other), (*sizes, there) = jax.jit(
      jax.shard_map(both, mesh=mesh, in_specs=split, out_specs=(PartitionSpec(), split), check_vma=False)
    )(x.astype('f'), y.astype('f'))
    near = abs(one - other) < 1e-4 < abs(one)
    print(f'transpose:{way}', 'ok' if near else f'{one}, {other}')
    lost = []
    for source, target in np.ndindex(4, 4):
      sent_rows = x[source, requested[source, :, target]].astype('f')
      if not np.array_equal(there[target, source, : len(sent_rows)], sent_rows):
        lost.append((source, target))
    print(f'arrived:{way}', lost or 'ok')
  counts = requested.sum(1)
  good = np.array_equal(sizes, [counts, counts.T])
  print('sent', 'ok' if good else f'{sizes}, {counts}')


if __name__ == '__main__':
  main()
