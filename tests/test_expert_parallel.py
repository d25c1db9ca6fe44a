"""Tokens that travel to experts on 4 pretended devices, and back.

Legend: n devices, N rows of each, D numbers a row, k experts of a row.
"""

import children
import pytest

# Destinations of tokens: those of the router; all to experts of one device
# (so that others have nothing to do, and it has several rounds of work).
CASES = [
  f'{way}:{chosen}:{mesh}' for way in ('padded', 'ragged') for chosen in ('routed', 'crowded') for mesh in ('4', '2')
]
# The experts have adapters.
ADAPTED = [
  f'adapted:{way}:{chosen}:{mesh}'
  for way, chosen in (('padded', 'routed'), ('ragged', 'crowded'))
  for mesh in ('expert=4', 'expert=2,tensor=2', 'expert=2,fsdp=2')
]


@pytest.fixture(scope='module')
def report():
  """{case: 'ok' or what is wrong}."""
  run = children.run(__file__, devices=4)
  return dict(line.split(' ', 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize('case', CASES + ADAPTED)
def test_experts_on_devices_are_those_on_one(report, case):
  """Forward, and the gradients of rows, experts and router, in float32."""
  assert report[case] == 'ok'


def test_parts_of_a_row_stay_where_they_are(report):
  assert report['context=4'] == 'ok'


@pytest.mark.parametrize('way', ['padded', 'ragged'])
def test_rows_arrive_as_they_left(report, way):
  """Rows that one device requests from another arrive in order, compared with numpy."""
  assert report[f'arrived:{way}'] == 'ok'


@pytest.mark.parametrize('way', ['padded', 'ragged'])
def test_the_way_back_is_the_transpose(report, way):
  """<dispatch(x), y> = <x, combine(y)>, of the rows that travel."""
  assert report[f'transpose:{way}'] == 'ok'


def test_no_more_rows_travel_than_want_to(report):
  """The sizes that an exact exchange sends are those counted in numpy."""
  assert report['sent'] == 'ok'


def ragged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
  """Does what the documentation of `jax.lax.ragged_all_to_all` says; XLA:CPU does not have it."""
  import jax
  import jax.numpy as jnp

  every = [jax.lax.all_gather(y, axis_name) for y in (operand, input_offsets, send_sizes, output_offsets)]
  me, at = jax.lax.axis_index(axis_name), jnp.arange(len(output))
  for given, starts, sizes, ends in zip(*every):
    place = at - ends[me]
    take = (place >= 0) & (place < sizes[me])
    moved = given[jnp.where(take, place + starts[me], 0)]
    output = jnp.where(take[:, None], moved, output)
  # A device that expects other sizes than it is sent hangs, or worse.
  wrong = jnp.any(every[2][:, me] != recv_sizes)
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
  ways = {'padded': plain, 'ragged': lambda *args: plain(*args[:4], True)}
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
    found, right = run(layout, chosen), run(tiny.one_device(), chosen)
    wrong = {
      jax.tree_util.keystr(path): float(tiny.largest(a - b))
      for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(right))
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
  wanted = random.uniform(size=(4, 6, 4)) < 0.4
  x, y = random.normal(size=(4, 6, 5)), random.normal(size=(4, 4, 6, 5))
  split = PartitionSpec('expert')

  def both(x, y):
    trip = expert_parallel.plan_dispatch(jnp.asarray(wanted), 'expert', way == 'ragged')
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
    lost = [
      (i, to)
      for i in range(4)
      for to in range(4)
      for rows in [x[i, wanted[i, :, to]].astype('f')]
      if not np.array_equal(there[to, i, : len(rows)], rows)
    ]
    print(f'arrived:{way}', lost or 'ok')
  counts = wanted.sum(1)
  good = np.array_equal(sizes, [counts, counts.T])
  print('sent', 'ok' if good else f'{sizes}, {counts}')


if __name__ == '__main__':
  main()
