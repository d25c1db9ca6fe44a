"""Tests of the bytes that compiled programs send between devices, compared with a lower bound.

The bytes are counted in the compiled HLO (`planning/cost.py`), on 8 simulated CPU devices
and, where their compilers are installed, for described TPUs and GPUs.
"""

import functools
import json
import pathlib

import children
import described
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MESHES = ('fsdp=8', 'tensor=8', 'fsdp=4,tensor=2', 'data=2,fsdp=4', 'fsdp=2,context=4', 'fsdp=2,context=2,tensor=2')
RESHARD_MESHES = {'fsdp=8': 'data=8', 'fsdp=4,tensor=2': 'data=4,tensor=2'}
MOST = 1.05  # times the lower bound

# Each device has many more tokens than the width of the model. Otherwise XLA would gather tokens, not weights.
DRIVER = '''
import dataclasses, json, math, sys
from jaxpost.models import presets
for name in 'wide', 'tied':
  presets.PRESETS[name] = dataclasses.replace(
      presets.PRESETS['xs'], vocab_size=4096, num_layers=2, num_heads=8,
      num_kv_heads=8, head_dim=32, tie_embeddings=name == 'tied')
presets.PRESETS['moe'] = dataclasses.replace(
    presets.PRESETS['wide'], family='qwen3_moe',
    experts=presets.Experts(8, 2, 256))
from jaxpost.planning import aot, cost, dry_run
from jaxpost.planning import machines

topology, dtype, jobs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
machines.set_environment(machines.parse(topology))
import jax

look = aot.look

def watch(kit, name, compiled, args, times):
  """Arrays above 1 % of the parameters, by path: on how many more devices each
  is than it needs to be; 0 where it is on no more."""
  table = kit.model.table
  whole = sum(math.prod(x.shape) for x in table.values())
  experts = [k.split('/')[-1] for k, x in table.items() if 'expert' in x.axes]
  layout, copies = aot.layout_of(kit, name, args), {}
  many = lambda *names: math.prod(layout.mesh.shape[n] for n in names)

  def note(what, tree, kept, shardings=None):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shardings = shardings or [x.sharding for _, x in leaves]
    for (path, x), sharding in zip(leaves, shardings, strict=True):
      path = f'{name} {what}{jax.tree_util.keystr(path)}'
      found = math.prod(sharding.shard_shape(x.shape)) * layout.mesh.size / (
          max(1, x.size))
      if x.size > 0.01 * whole:
        copies[path] = found if found > kept(path) else 0

  # Whoever trains or scores keeps a part of each matrix for all axes but those
  # of rows; whoever samples for tensor, and of experts for their axis, too.
  part = lambda path: many('data', 'context')
  weights = lambda path: many('data', 'fsdp', 'context') * (
      1 if any(f"['{k}']" in path for k in experts) else many('expert'))
  alone, out = lambda path: 1, compiled.output_shardings
  if name == 'update':
    note('in', args[0], part)
    note('out', args[0], part, jax.tree.leaves(out[0]))
  elif name == 'score':
    note('reference', args[0], part)
  elif name == 'insert':
    note('state', args[0].cache, alone)
    note('prompts', args[1].cache, alone)
  elif name == 'generate':
    note('weights', args[0], weights)
    note('state', args[1].cache, alone)
    note('state out', args[1].cache, alone, jax.tree.leaves(out[0].cache))
  return look(kit, name, compiled, args, times) | {'copies': copies}

out = []
for train, rollout, preset, *score in jobs:
  aot.look = look if rollout and not score else watch
  programs = ('score', 'insert', 'generate') if score else (
      ('reshard',) if rollout else ('update',))
  p, = dry_run.prepare_all(dict(
      algorithm='grpo' if rollout else 'sft', data=dict(path='none'),
      reward='length', model=dict(preset=preset, dtype=dtype, remat='full'),
      mesh=dict(train=train, rollout=rollout or 'data=-1',
                **({'score': score[0]} if score else {})),
      rl=dict(kl_coef=0.1 if score else 0.0) if rollout else {},
      rollout=dict(prompts=16, max_prompt_length=64, max_new_tokens=16),
      train=dict(batch_size=16, row_length=0 if rollout else 512)))
  compiled = aot.compile_stage(p, machines.parse(topology), programs)
  said = dict(least={}, found={}, unknown=[], copies={})
  for row in compiled.rows:  # a reshard is several programs
    said['unknown'] += row['totals'].unknown
    said['copies'] |= row.get('copies', {})
    found = {kind: {a: x[0] for a, x in axes.items()}
             for kind, axes in cost.by_axis(
                 row['totals'], compiled.placed.train.mesh).items()}
    for into, more in ('least', row['least']), ('found', found):
      for kind, axes in more.items():
        kept = said[into].setdefault(kind, {})
        for axis, count in axes.items():
          kept[axis] = kept.get(axis, 0.0) + count * row['calls_per_step']
  out.append(said)
print(json.dumps(out))
'''


UPDATE_JOBS = *((mesh, '', 'wide') for mesh in MESHES), *((mesh, '', 'tied') for mesh in MESHES if 'fsdp' in mesh)
# Meshes of training and sampling, the model, and the mesh of scoring, for the arrays held between updates.
HELD_JOBS = (
  ('fsdp=8', 'data=8', 'wide', ''),
  ('fsdp=8', 'data=4,tensor=2', 'tied', 'fsdp=4,tensor=2'),
  ('fsdp=2,expert=4', 'data=2,expert=2,tensor=2', 'moe', ''),
)
IN_CI = ('fsdp=8', '', 'tied'), ('tensor=8', '', 'wide'), ('fsdp=2,context=2,tensor=2', '', 'wide')


@functools.cache
def counted(topology, dtype, jobs):
  """Compiles the jobs in a child process, and returns {job: figures}."""
  return dict(zip(jobs, children.printed('-c', DRIVER, topology, dtype, json.dumps(jobs), timeout=3000)))


def by_axis(figures):
  """Returns {axis: (bytes that are sent, lower bound)}.

  Bytes that are summed over two axes at once count for both axes together.
  """
  out = {}
  for axes in figures['least'].values():
    for axis, count in axes.items():
      out[axis] = 0.0, out.get(axis, (0, 0.0))[1] + count
  for axes in figures['found'].values():
    for axis, count in axes.items():
      sent, least = out.get(axis, (0.0, 0.0))
      out[axis] = sent + count, least
  total = sum(least for _, least in out.values())
  if any('+' in axis and sent > 1e-2 * total for axis, (sent, _) in out.items()):
    return {'all': (sum(sent for sent, _ in out.values()), total)}
  return out


def assert_near_lower_bound(figures):
  """Asserts that each mesh axis sends at most MOST times its lower bound."""
  assert not figures['unknown']
  axes = by_axis(figures)
  assert axes
  total = sum(least for _, least in axes.values())
  for axis, (sent, least) in axes.items():
    if not least:  # counts, norms, tokens
      assert sent < 1e-2 * total, (axis, sent, figures)
      continue
    assert 0 < sent <= MOST * least, (axis, sent / least, figures)


@pytest.fixture(scope='module')
def updates(request):
  """Returns {job: figures} of the selected update tests, which one process compiles."""
  items = [item for item in request.session.items if item.path == request.path]
  jobs = [item.callspec.params['job'] for item in items if 'updates' in item.fixturenames]
  return counted('cpu:8', 'float32', tuple(jobs))


@pytest.mark.parametrize(
  'job', [pytest.param(job, marks=() if job in IN_CI else pytest.mark.nightly) for job in UPDATE_JOBS], ids=' '.join
)
def test_update_sends_little_more_than_the_lower_bound(job, updates):
  figures = updates[job]
  assert_near_lower_bound(figures)
  assert_not_replicated(figures, 'update in.params', 'update in.opt_state', 'update out')


def assert_not_replicated(figures, *places):
  """Asserts that large arrays were found at each of these places, and that none of them is replicated."""
  copies = figures['copies']
  assert not {path: factor for path, factor in copies.items() if factor}
  for place in places:
    assert any(path.startswith(place) for path in copies), (place, copies)


@pytest.mark.parametrize('job', HELD_JOBS, ids=' '.join)
def test_sampler_and_scorer_hold_only_their_shards(job):
  assert_not_replicated(
    counted('cpu:8', 'float32', HELD_JOBS)[job],
    'score reference',
    'generate weights',
    'generate state.k',
    'generate state.v',
    'generate state out',
    'insert state',
    'insert prompts',
  )


@pytest.mark.parametrize('train', RESHARD_MESHES)
def test_reshard_to_the_sampler_sends_little_more_than_the_lower_bound(train):
  jobs = tuple((*meshes, 'wide') for meshes in RESHARD_MESHES.items())
  figures = counted('cpu:8', 'float32', jobs)[train, RESHARD_MESHES[train], 'wide']
  sent = sum(sum(axes.values()) for axes in figures['found'].values())
  least = sum(sum(axes.values()) for axes in figures['least'].values())
  assert 0 < sent <= MOST * least, figures


@pytest.mark.long
@pytest.mark.parametrize(
  'topology, job',
  [
    pytest.param('v5e:2x4', ('tensor=8', '', 'wide'), marks=described.TPUS),
    pytest.param('h200:1x1x8', ('fsdp=8', '', 'tied'), marks=described.GPUS),
  ],
)
def test_update_for_described_chips_sends_little_more_than_the_lower_bound(topology, job):
  assert_near_lower_bound(counted(topology, 'bfloat16', (job,))[job])


LOOPS = r"""
import json, math, sys
from jaxpost.planning import machines
topology = machines.parse('cpu:8')
machines.set_environment(topology)
from jaxpost.planning import aot, dry_run, hlo
out, texts, count = {}, [], aot.cost.count
aot.cost.count = lambda *args: (texts.append(args[0]), count(*args))[1]

def sent(text):
  '''(collectives; kind and float32 numbers of those that a loop has in it).'''
  parts, _ = hlo.parse(text)
  calls = {name: {other for op in ops.values() for other in parts if (
      '%' + other in op.text or '%' + other in op.inner)}
           for name, ops in parts.items()}
  inside, more = set(), {op.attribute('body').lstrip('%') for ops in (
      parts.values()) for op in ops.values() if op.kind == 'while'}
  while more - inside:
    inside |= more
    more = set().union(*(calls[name] for name in more))
  each = {name: [(op.kind, sum(math.prod(x.dims) for x in op.arrays if x.dtype == 'f32'))
                 for op in ops.values() if hlo.collective(op)]
          for name, ops in parts.items()}
  return sum(map(len, each.values())), sum((each[name] for name in inside), [])

for mesh in sys.argv[1:]:
  texts.clear()
  p, = dry_run.prepare_all(dict(
      algorithm='grpo', reward='exact_match', data=dict(path='none'),
      model=dict(preset='tiny'), mesh=dict(rollout=mesh),
      rollout=dict(prompts=4, group_size=4, max_new_tokens=64)))
  aot.compile_stage(p, topology, ('generate',))
  out[mesh] = [sent(text) for text in texts]
print(json.dumps(out))
"""


def test_decoding_sends_nothing_per_token_unless_split_over_tensor():
  """Only what the host reads of a block is sent.

  Over `tensor`, each token has one all-to-all of the logits, from parts of the vocabulary to parts of the slots.
  """
  by_mesh = children.printed('-c', LOOPS, 'data=8', 'fsdp=4,data=2', 'data=4,tensor=2', timeout=600)
  for mesh, programs in by_mesh.items():
    assert programs
    for sent, each_token in programs:
      assert sent and bool(each_token) == ('tensor' in mesh), mesh
      if each_token:
        vocab, slots_of_device = 320, 16 // 8
        assert [size for kind, size in each_token if kind == 'all-to-all'] == [vocab * slots_of_device]
        # All other arrays are log-probs.
        assert all(size <= 16 for kind, size in each_token if kind not in ('all-to-all', 'all-reduce')), each_token


DRAWS = r"""
import json
import jax, jax.numpy as jnp, numpy as np
import test_sampler, tiny
from jaxpost.distributed.phases import make_layout
from jaxpost.models import model as model_lib
from jaxpost.programs import generate

model = model_lib.build(tiny.config())
random = np.random.default_rng(0)
whole = {k: np.asarray(random.integers(-8, 8, x.shape), np.float32) / 8  # whose products are exact
         for k, x in model.table.items() if len(x.shape) == 2 and 'vocab' in x.axes}
out = []
for mesh, slots in ('tensor=4', 8), ('tensor=4', 6), ('data=2,tensor=2', 6):
  state = generate.DecodeState(
      cache=None, hidden=np.asarray(random.integers(-8, 8, (slots, model.config.hidden_size)), np.float32) / 16,
      positions=jnp.zeros(slots, int), counts=jnp.zeros(slots, int), active=jnp.ones(slots, bool),
      sampling=test_sampler.slots_of(slots, top_k=jnp.arange(slots), top_logprobs=jnp.full(slots, 3)),
      keys=jnp.zeros((slots, 2), jnp.uint32))
  uniform = random.uniform(size=slots).astype(np.float32)
  drawn = []
  for layout in tiny.one_device('rollout'), make_layout(mesh, 'rollout', devices=jax.devices()):
    weights = {k: jax.device_put(x, layout.sharding(model.table[k].axes, x.shape)) for k, x in whole.items()}
    placed = generate.slot_shardings(layout)(state)
    draw = jax.jit(lambda *given: generate.draw(
        model, *given, report=dict(top=3, allowed=4), compute=tiny.EXACT, layout=layout))
    drawn.append(draw(weights, jax.device_put(state, placed), uniform))
  same = [bool((np.asarray(a) == np.asarray(b)).all()) for a, b in zip(*map(jax.tree.leaves, drawn), strict=True)]
  out.append(dict(mesh=mesh, slots=slots, same=same, tokens=np.asarray(drawn[0].tokens).tolist()))
print(json.dumps(out))
"""


def test_tensor_devices_draw_the_tokens_of_one_device():
  """The tokens are equal bit for bit, also where the number of devices does not divide that of the slots."""
  for case in children.printed('-c', DRAWS, devices=4, timeout=600):
    assert all(case['same']) and len(set(case['tokens'])) > 3, case


ADAPTED = r"""
import json, math, re
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxpost.distributed.phases import make_layout
from jaxpost.matmul import Compute
from jaxpost.models import layers, lora, presets

layout, compute = make_layout('tensor=4', 'train'), Compute('bfloat16', residual='bfloat16')
rows, tokens, hidden, width, rank = 2, 64, 32, 128, 4

def array(shape, dtype, *axes):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(layout.mesh, PartitionSpec(*axes)))

def sums(fn, *args):
  '''The elements of each array that devices add.'''
  compiled = jax.jit(fn, out_shardings=NamedSharding(layout.mesh, PartitionSpec())).lower(*args).compile()
  results = re.findall(r'= (.*?) all-reduce(?:-start)?\(', compiled.as_text())
  shapes = [shape for result in results for shape in re.findall(r'\w+\[([\d,]*)\]', result)]
  return sorted(math.prod(map(int, filter(None, shape.split(',')))) for shape in shapes)

x, y = array((rows, tokens, hidden), 'bfloat16'), array((rows, tokens, width), 'bfloat16', None, None, 'tensor')
up, down = array((hidden, width), 'bfloat16', None, 'tensor'), array((width, hidden), 'bfloat16', 'tensor')
up_a, up_b = array((hidden, rank), 'float32'), array((rank, width), 'float32', None, 'tensor')
down_a, down_b = array((width, rank), 'float32', 'tensor'), array((rank, hidden), 'float32')

def gate_up(x, *matrix):
  w = matrix[0] if len(matrix) == 1 else lora.Adapted(*matrix, None, 2.0, 0.0)
  more = dict(compute=compute, cfg=presets.PRESETS['xs'], layout=layout)
  ys = layers.project_all('btd,df->btf', x, dict(gate=w, up=w), 'gate_up', **more)
  return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in ys)

def project_down(y, *matrix):
  w = matrix[0] if len(matrix) == 1 else lora.Adapted(*matrix, None, 2.0, 0.0)
  return layers.project('btf,fd->btd', y, dict(down=w), 'down', compute, layout=layout)

print(json.dumps(dict(
    gradient=sums(jax.grad(gate_up), x, up), adapted=sums(jax.grad(gate_up), x, up, up_a, up_b),
    down=sums(project_down, y, down), adapted_down=sums(project_down, y, down, down_a, down_b),
    types=[re.findall(r'dot_general.*tensor<2x64x32x(\w+)>\n', jax.jit(project_down).lower(y, *m).as_text())
           for m in ((down,), (down, down_a, down_b))])))
"""


def test_adapters_add_only_small_sums_over_tensor():
  """For gate and up, [B, T, D] is summed once, in the type of activations. Adapters add sums of [B, T, rank]."""
  sums = children.printed('-c', ADAPTED, devices=4, timeout=600)
  large, small = 2 * 64 * 32, 2 * 64 * 4
  assert sums['gradient'] == sums['down'] == [large]
  assert sums['adapted'] == [small, small, large] and sums['adapted_down'] == [small, large]
  assert sums['types'] == [['bf16'], ['bf16', 'f32']]  # of x W, and of x A B, which is no partial sum on any device
