"""Plans: topologies by name, HLO counted with loop turns, roofline, the CLI."""

import io
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import types

import children
import numpy as np
import pytest
import rich.console
import tiny

from configs import grpo_gsm8k
from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.hardware import chips, memory
from jaxpost.planning import aot, cost, dry_run, hlo, kernels, machines, roofline, stage, tables
from jaxpost.rollout import buckets

CLONE = pathlib.Path(__file__).resolve().parents[1]


def run(code, *args, devices=1, **env):
  """A program in a process of its own; what it prints."""
  done = subprocess.run(
    [sys.executable, '-c', code, *args],
    capture_output=True,
    text=True,
    timeout=300,
    cwd=CLONE,
    env=children.environment(devices=devices, **env),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def plan(*args):
  return subprocess.run(
    [sys.executable, '-m', 'launch.plan', *args], capture_output=True, text=True, timeout=300, cwd=CLONE
  )


# ---------------------------------------------------------------- topologies


@pytest.mark.parametrize(
  'text, slices, count',
  [
    ('v6e:16x16', 1, 256),
    ('v6e:8x8', 2, 128),
    ('v5p:16x20x28', 1, 8960),
    ('v4:2x2x4', 1, 16),
    ('h200:1x8x8', 1, 64),
    ('h100:2x4x8', 1, 64),
    ('cpu', 1, 1),
    ('cpu:8', 1, 8),
    ('8xH100', 1, 8),
    ('h100:8', 1, 8),
    ('16xh200', 1, 16),
    ('v5e-16', 2, 32),
    ('v5p-8', 1, 4),
  ],
)
def test_topology(text, slices, count):
  topology = machines.parse(text, slices)
  assert topology.chips == count and topology.slices == slices
  assert topology.gpu == ('h' in text.lower())


@pytest.mark.parametrize(
  'text, slices, words',
  [
    ('v7e:8x8', 1, 'did you mean .v6e.'),
    ('h20:1x8x8', 1, "'h200'"),
    ('v6e', 1, 'v6e has 2 numbers, as in v6e:16x16; write 8xH100, h100:8, .*v5e-16'),
    ('v5p:8x8', 1, 'v5p has 3 numbers'),
    ('v6e:32x16', 1, 'largest slice'),
    ('h200:8x8', 1, 'slices x hosts'),
    ('h200:1x8x8', 2, 'h200:2x8x8'),
    ('cpu:0', 1, 'cpu:8'),
    ('v5e:4y4', 1, 'v5e has 2 numbers'),
    ('v5e-2', 1, 'v5e-N has N of 1, 4, 8, 16, 32, 64, 128, 256; others have a size'),
    ('v5p-16384', 1, '4096, 8192; others'),
    ('12xH100', 1, 'hosts have 8 GPUs'),
    ('8xh100:8', 1, 'GPUs are one number'),
    ('h100:', 1, 'none of the forms; write 8xH100'),
    ('quantum:3', 1, 'known: v4, v5e'),
  ],
)
def test_unknown_topology_is_refused(text, slices, words):
  with pytest.raises(InputError, match=words) as error:
    machines.parse(text, slices)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('text, package', [('8xH100', "'jax[cuda13]'"), ('v6e:2x2', "-e '.[plan]' in a clone")])
def test_without_the_compiler_of_a_machine(text, package, monkeypatch):
  """The error names what to install, and the command that needs no compiler."""

  def lacking(*args, **kwargs):
    raise RuntimeError('topology not implemented')

  monkeypatch.setattr('jax.experimental.topologies.get_topology_desc', lacking)
  monkeypatch.setattr(machines, '_describe_gpu', lambda: None)
  with pytest.raises(InputError) as error:
    machines.devices(machines.parse(text))
  assert f'comes with pip install {package}' in str(error.value) and 'launch.plan --fits' in str(error.value)


def test_peak_of_a_device_by_its_kind():
  """'TPU v5' is v5p, and is part of the name of v5e."""
  assert chips.of_kind('TPU v5 lite').flops == 197e12
  assert chips.of_kind('TPU v5').flops == 459e12
  assert chips.of_kind('NVIDIA H100 80GB HBM3').flops == 989e12
  for kind, name in {
    'NVIDIA H100 PCIe': 'h100_pcie',
    'NVIDIA H100 NVL': 'h100_nvl',
    'NVIDIA GH200 480GB': 'gh200',
    'NVIDIA H200': 'h200',
    'NVIDIA A100-SXM4-40GB': 'a100',
    'NVIDIA A100-SXM4-80GB': 'a100_80gb',
    'NVIDIA A100 80GB PCIe': 'a100_pcie_80gb',
    'NVIDIA L4': 'l4',
    'NVIDIA L40S': 'l40s',
    'NVIDIA L40': 'l40',
    'Tesla T4': 't4',
  }.items():
    assert chips.of_kind(kind) == chips.CHIPS[name]
  assert chips.of_kind('cpu') is None
  assert chips.of_kind('NVIDIA T400 4GB') is None


def test_shapes_by_any_of_their_names():
  for name in ('qwen3_8b', 'Qwen/Qwen3-8B', 'qwen3-8b'):
    assert dry_run.named_shape(name).hidden_size == 4096
  for name in ('llama3_70b', 'meta-llama/Meta-Llama-3-70B-Instruct'):
    assert dry_run.named_shape(name).num_layers == 80
  assert dry_run.named_shape('qwen9_1b') is None
  with pytest.raises(InputError, match="did you mean 'qwen3_8b'"):
    dry_run.shape_of('qwen3_8', 'config.model.path')


def test_what_is_on_this_disk_has_its_own_shape(tmp_path, monkeypatch):
  """A folder by a path from here, with or without a dot, and a run, as for `launch.train`."""
  shutil.copytree(tiny.folder(tmp_path / 'model'), tmp_path / 'models' / 'mine')
  wanted = json.loads((tmp_path / 'models/mine/config.json').read_text())['hidden_size']
  monkeypatch.chdir(tmp_path)
  stages.run(tiny.run_config('models/mine', train=dict(steps=1), eval=dict(data=dict(path=''))), tmp_path / 'runs/one')
  for model, start in (('models/mine', ''), ('./models/mine', ''), ('qwen3_8b', 'runs/one')):
    config = tiny.run_config(model, init_from=start)
    (found,) = dry_run.prepare_all(config)
    assert found.inputs.model.config.hidden_size == wanted


@pytest.mark.parametrize(
  'name, billions',
  [
    ('qwen3_8b', 8.19),
    ('qwen3_14b', 14.77),
    ('qwen3_32b', 32.76),
    ('llama3_8b', 8.03),
    ('llama3_70b', 70.55),
    ('llama3_2_3b', 3.21),
  ],
)
def test_named_shapes_have_the_published_size(name, billions):
  from jaxpost.models import transformer

  shape = dry_run.named_shape(name)
  assert transformer.num_params(shape) / 1e9 == pytest.approx(billions, abs=0.01)


# ----------------------------------------------------------------------- HLO

_LOOPS = """
import jax, jax.numpy as jnp, json
from jaxpost.planning import cost

def inner(x, w):
  f = lambda x, _: (jnp.tanh(x @ w), None)
  return jax.lax.scan(f, x, None, length=5)[0]

def outer(x, w, n):
  x = jax.lax.fori_loop(0, 7, lambda i, x: inner(x, w) + i, x)
  return jax.lax.fori_loop(0, n, lambda i, x: x @ w, x)

x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
n = jax.ShapeDtypeStruct((), jnp.int32)
compiled = jax.jit(outer).lower(x, w, n).compile()
text = compiled.as_text()
print(json.dumps(dict(
  known=cost.count(text).flops, unknown=len(cost.count(text).unknown),
  told=cost.count(text, lambda name: 3).flops,
  xla=compiled.cost_analysis()['flops'])))
"""


def test_loops_count_as_often_as_they_turn():
  found = json.loads(run(_LOOPS))
  product = 2 * 16 * 32 * 32
  assert found['known'] == 36 * product  # a loop of unknown length counts once
  assert found['unknown'] == 1
  assert found['told'] == 38 * product
  assert found['xla'] < 4 * product  # which is why this is counted here


_COLLECTIVES = """
import jax, jax.numpy as jnp, json
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxpost.planning import cost
mesh = jax.make_mesh((2, 4), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2)

def body(x, w):  # 6 layers: all of w is gathered, x is summed over data
  def layer(x, _):
    whole = jax.lax.all_gather(w, 'fsdp', tiled=True)
    return jax.lax.psum(jnp.tanh(x @ whole), 'data') / 2, None
  x, _ = jax.lax.scan(layer, x, None, length=6)
  return jax.lax.psum_scatter(x, 'fsdp', tiled=True)

f = jax.shard_map(body, mesh=mesh, in_specs=(P(), P('fsdp')),
                  out_specs=P('fsdp'), check_vma=False)
put = lambda s, *p: jax.ShapeDtypeStruct(
  s, jnp.float32, sharding=NamedSharding(mesh, P(*p)))
text = jax.jit(f).lower(put((16, 32)), put((32, 32), 'fsdp')).compile(
  compiler_options={'xla_disable_hlo_passes':
                    'while-loop-invariant-code-motion'}).as_text()
print(json.dumps({k: {a: x[:2] for a, x in v.items()}
                  for k, v in cost.by_axis(cost.count(text), mesh).items()}))
"""


def test_collectives_by_kind_and_axis():
  found = json.loads(run(_COLLECTIVES, devices=8))
  gathered = found['all-gather']['fsdp']
  times = gathered[1]
  assert times in (1, 6)  # XLA may take it out of the loop
  assert gathered[0] == times * 3 * 8 * 32 * 4  # three shards of four
  assert found['all-reduce']['data'] == [6 * 16 * 32 * 4, 6]  # 2 b (2 - 1) / 2
  assert found['reduce-scatter']['fsdp'] == [16 * 32 * 4 * 3 / 4, 1]


@pytest.mark.parametrize(
  'text, group',
  [
    ('replica_groups={{0,2},{1,3}}', (0, 2)),
    ('replica_groups=[2,4]<=[4,2]T(1,0), use', (0, 2, 4, 6)),
    ('replica_groups=[8,2]<=[16], use', (0, 1)),
    ("replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_0'}, use", tuple(range(0, 16, 2))),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=8], device_ids=([8,2]T(1,0)) {'axis_0'}, use", (0, 1)),
    ("replica_groups=mesh['axis_0'=1,'axis_1'=8,'axis_2'=2] {'axis_1','axis_2'}, use", tuple(range(16))),
  ],
)
def test_groups_of_devices(text, group):
  op = hlo.Op('x', 'all-reduce', (), (), f', channel_id=1, {text}', inner='', root=False)
  assert hlo.group_of(op) == group


@pytest.mark.parametrize(
  'target, does, group, sent',
  [
    ('{1,2}x{0:3}', 'ALL_REDUCE', (0, 4), 4096),  # 2 b (2 - 1) / 2
    ('{0:3}x{0:7}', 'ALL_REDUCE', (0, 8, 16, 24), 6144),
    ('{0,1}x{0:3}', 'ALL_GATHER', (0, 4), 4096),
  ],
)
def test_what_is_sent_between_slices(target, does, group, sent):
  about = (
    f'is_host_transfer=true, frontend_attributes={{'
    f'_xla_megascale_target="{target}",'
    f'_xla_megascale_transfer_type="{does}"}}'
  )
  found = cost.count(f"""HloModule m

ENTRY %main (p: f32[1024]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  %t = token[] after-all()
  %a = (f32[1024]{{0}}, u32[], token[]) send(%p, %t), channel_id=6, {about}
  %b = (f32[1024]{{0}}, u32[], token[]) recv(%t), channel_id=7, {about}
  ROOT %x = f32[1024]{{0}} get-tuple-element(%b), index=0
}}
""").collectives
  assert found == {(does.lower().replace('_', '-'), group): [sent, 1]}


def test_what_xla_for_tpu_writes():
  """Tiled layouts, fast memory, cycles, a counter that takes two at a time."""
  text = """HloModule jit_f, is_scheduled=true

%body (p: (u32[], f32[8,128])) -> (u32[], f32[8,128]) {
  %p = PAIR parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %q = SENT collective-permute-start(%x), PERMUTED
  %y = f32[8,128]{1,0:T(8,128)S(1)} collective-permute-done(%q)
  %z = f32[8,128]{1,0:T(8,128)} negate(%y), CYCLES
  %s = SLICED slice-start(%z), slice={[0:4], [0:128]}
  %v = f32[4,128]{1,0:T(8,128)S(1)} slice-done(%s)
  ROOT %t = PAIR tuple(%next, %z)
}

%cond (p.1: (u32[], f32[8,128])) -> pred[] {
  %p.1 = PAIR parameter(0)
  %end = u32[]{:T(128)} constant(7)
  %j = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %end), direction=LT
}

ENTRY %main (a: f32[8,128]) -> (u32[], f32[8,128]) {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %start = PAIR tuple(%zero, %a)
  ROOT %w = PAIR while(%start), condition=%cond, body=%body
}
"""
  for short, long in {
    'PAIR': '(u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)})',
    'SENT': '(f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]{:S(2)})',
    'SLICED': '((f32[8,128]{1,0:T(8,128)}), f32[4,128]{1,0:S(1)}, u32[])',
    'PERMUTED': 'source_target_pairs={{0,2},{1,3}}',
    'CYCLES': 'backend_config={"window_config":{"estimated_cycles":"100"}}',
  }.items():
    text = text.replace(short, long)
  found = cost.count(text)
  assert found.unknown == () and found.cycles == 4 * 100
  assert found.collectives == {('collective-permute', (0, 2)): [4 * 4096, 4]}
  # The permuted array is sent and received; it is negated from fast memory.
  # Only the slice is read of an array that is sliced.
  assert found.bytes == pytest.approx(4 * (2 * 4096 + 4096 + 2048), rel=0.01)


@pytest.mark.parametrize('asynchronous', [False, True])
def test_a_fusion_that_runs_beside_others_moves_what_it_did_before(asynchronous):
  """Slices of what scanned layers store: XLA for GPUs of jax 0.12 starts them as `fusion-start`."""
  stack, layer = 'f32[28,1024]{1,0}', 'f32[1,1024]{1,0}'

  def fused(name, result, inputs, types, calls):
    given = ', '.join(f'%{i}' for i in inputs)
    if not asynchronous:
      return f'%{name} = {result} fusion({given}), kind=kLoop, calls=%{calls}'
    started = f'%{name}.s = (({types}), {result}, u32[]) fusion-start({given}), kind=kLoop, calls=%{calls}'
    return f'{started}\n  %{name} = {result} fusion-done(%{name}.s)'

  text = f"""HloModule m

%read (a: f32[28,1024], i: s32[]) -> f32[1,1024] {{
  %a = {stack} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = {layer} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={{1,1024}}
}}

%write (b: f32[28,1024], c: f32[1,1024], j: s32[]) -> f32[28,1024] {{
  %b = {stack} parameter(0)
  %c = {layer} parameter(1)
  %j = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %update = {stack} dynamic-update-slice(%b, %c, %j, %nought)
}}

ENTRY %main (x: f32[28,1024], n: s32[]) -> f32[28,1024] {{
  %x = {stack} parameter(0)
  %n = s32[] parameter(1)
  {fused('layer', layer, ('x', 'n'), f'{stack}, s32[]', 'read')}
  {fused('out', stack, ('x', 'layer', 'n'), f'{stack}, {layer}, s32[]', 'write')}
  ROOT %copy = {stack} bitcast(%out)
}}
"""
  # A layer is read and written by each of the two, and the place that is written counts as read.
  assert cost.count(text).bytes == pytest.approx(5 * 4096, abs=16)


def test_a_collective_in_links_of_a_chain_counts_once():
  """XLA for TPU writes it again in each product that it overlaps with."""
  text = """HloModule jit_f, is_scheduled=true

%first (p: bf16[8,128]) -> (bf16[8,128], bf16[16,128], u32[]) {
  %p = bf16[8,128]{1,0} parameter(0)
  %g = bf16[16,128]{1,0} all-gather(%p), GATHER
  ROOT %s = PAIR custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%last (q: bf16[8,128], r: bf16[16,128], t: u32[]) -> bf16[16,128] {
  %q = bf16[8,128]{1,0} parameter(0)
  %r = bf16[16,128]{1,0} parameter(1)
  %h = bf16[16,128]{1,0} all-gather(%q), GATHER
  %t = u32[] parameter(2)
  ROOT %d = WHOLE custom-call(%q, %r, %h, %t), TARGET="AsyncCollectiveDone"
}

ENTRY %main (a: bf16[8,128]) -> bf16[16,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %x = PAIR fusion(%a), kind=kCustom, calls=%first
  %b = bf16[8,128]{1,0} get-tuple-element(%x), index=0
  %c = bf16[16,128]{1,0} get-tuple-element(%x), index=1
  %e = u32[] get-tuple-element(%x), index=2
  ROOT %y = bf16[16,128]{1,0} fusion(%b, %c, %e), kind=kCustom, calls=%last
}
"""
  for short, long in {
    'PAIR': '(bf16[8,128]{1,0}, bf16[16,128]{1,0}, u32[])',
    'WHOLE': 'bf16[16,128]{1,0}',
    'TARGET': 'custom_call_target',
    'GATHER': 'replica_groups={{0,1}}, frontend_attributes={chain_id="8"}',
  }.items():
    text = text.replace(short, long)
  assert cost.count(text).collectives == {('all-gather', (0, 1)): [2048, 1]}


@pytest.mark.parametrize('scope, real', [('', 64), ('rounds/while/body/', 32)])
def test_products_of_groups_by_a_kernel(scope, real):
  """The matrices are 16 x 8; the rows are half of a round's, if all experts are equally likely."""
  name = f'jit(f)/while/body/{scope}ragged_dot_general/ragged-dot-none'
  text = """HloModule jit_f, is_scheduled=true

ENTRY %main (s: s32[4], x: bf16[64,16], w: bf16[3,16,8]) -> f32[64,8] {
  %s = s32[4]{0} parameter(0)
  %x = bf16[64,16]{1,0} parameter(1)
  %w = bf16[3,16,8]{2,1,0} parameter(2)
  ROOT %y = f32[64,8]{1,0} custom-call(%s, %x, %w), CALL
}
""".replace('CALL', f'custom_call_target="tpu_custom_call", metadata={{op_name="{name}"}}')
  assert cost.count(text).flops == 2 * real * 16 * 8


@pytest.mark.parametrize(
  'branches', ['true_computation=%dear, false_computation=%cheap', 'branch_computations={%cheap, %dear}']
)
def test_a_condition_of_known_value_has_one_branch(branches):
  text = f"""HloModule m

%cheap (x.1: f32[1024]) -> f32[1024] {{
  %x.1 = f32[1024]{{0}} parameter(0)
  ROOT %a.1 = f32[1024]{{0}} add(%x.1, %x.1)
}}

%dear (x.2: f32[1024]) -> f32[1024] {{
  %x.2 = f32[1024]{{0}} parameter(0)
  %a.2 = f32[1024]{{0}} add(%x.2, %x.2)
  ROOT %a.3 = f32[1024]{{0}} add(%a.2, %a.2)
}}

ENTRY %main (p: pred[], x: f32[1024]) -> f32[1024] {{
  %p = pred[] parameter(0)
  %x = f32[1024]{{0}} parameter(1)
  ROOT %c = f32[1024]{{0}} conditional(%p, %x, %x), {branches}, metadata={{op_name="jit(f)/choose/cond"}}
}}
"""
  one = cost.count(text, branch=lambda name: False if name.endswith('choose/cond') else None).bytes
  assert (one, cost.count(text, branch=lambda name: True).bytes) == (cost.count(text).bytes / 2, cost.count(text).bytes)


def test_samples_from_the_whole_vocabulary_pay_for_no_truncation():
  """A plan counts the search for a truncation where the config asks for one, and not elsewhere."""
  config, moved = grpo_gsm8k.get_config('model=tiny'), []
  config.eval.data.path = ''
  config.rollout.update(prompts=2, group_size=2, max_prompt_length=16, max_new_tokens=8)
  for config.rollout.top_p in (1.0, 0.9):
    (prepared,) = dry_run.prepare_all(config.to_dict())
    made = stage.plan(prepared, stage.Options(machines.parse('cpu'), ('generate',)))
    moved.append(max(row['memory_traffic_bytes'] for row in made['programs']))
  assert moved[0] < 0.9 * moved[1]


def test_axes_of_a_group():
  class Mesh:
    shape = {'data': 2, 'fsdp': 4, 'tensor': 2}

  found = cost.by_axis(
    cost.Totals(
      collectives={
        ('all-reduce', (0, 8)): [1, 1],
        ('all-reduce', (0, 2, 4, 6)): [2, 1],
        ('all-reduce', tuple(range(0, 16, 2))): [3, 1],
      }
    ),
    Mesh,
  )
  assert {k: v[0] for k, v in found['all-reduce'].items()} == {'data': 1, 'fsdp': 2, 'data+fsdp': 3}


# ---------------------------------------------------------- roofline, minimum


def row(**over):
  totals = cost.Totals(918e12, 820e9, 0, {('all-gather', (0, 1, 2, 3)): [90e9, 1]})
  return dict(program='update', flops=4 * 459e12, totals=totals, least={}, xla_flops_once=None, **over)


class FourChips:
  size, shape = 4, {'data': 1, 'fsdp': 4, 'tensor': 1}

  class devices:
    flat = ()


@pytest.mark.parametrize('far, network', [(False, 0.5), (True, 7.2)])
def test_roofline(far, network):
  from jaxpost.planning import roofline

  topology = machines.parse('v6e:2x2')
  hosts = {i: i // 2 if far else 0 for i in range(4)}
  found = roofline.work(row(), FourChips, topology, hosts)
  seconds = found['seconds']
  assert seconds['compute'] == 1.0 and seconds['memory'] == 0.5
  assert seconds['network'] == pytest.approx(network)
  assert seconds['roofline'] == max(1.0, network) and seconds['expected'] is None
  assert seconds['no_overlap'] == pytest.approx(1.5 + network)
  assert found['roofline_mfu'] == pytest.approx(0.5 / max(1.0, network))
  sent = found['collective_bytes']['all-gather']['fsdp']
  assert sent == dict(bytes=90e9, number=1, between_hosts=far)


def test_what_stays_on_the_devices_counts():
  from jaxpost.planning import roofline

  given = dict(
    program='generate',
    arguments=dict(parameters=7, kv_cache=3),
    argument_bytes=10,
    output_bytes=4,
    alias_bytes=3,
    temp_bytes=2,
    batch_bytes=0,
  )
  update = given | dict(program='update', arguments=dict(parameters=10, optimizer=20), argument_bytes=30, temp_bytes=30)
  start = given | dict(program='init')
  predicted = memory.predict([given, update, start], held=35, sampler=10)
  found = roofline.memory(given, 50)
  assert found['fits'] and found['free_bytes'] == 50 - (10 + 1 + 2 + 35)
  assert found['bytes_per_chip']['elsewhere'] == 35
  found = roofline.memory(update, 50)
  assert not found['fits'] and found['free_bytes'] == 50 - (30 + 1 + 30 + 5)
  assert (
    roofline.memory(start, 50)['bytes_per_chip'] | dict(total=13, elsewhere=0)
    == (roofline.memory(start, 50)['bytes_per_chip'])
  )
  assert predicted == dict(generate=48, update=66, peak=66)  # as a run reports them


_LEAST = """
import json, math
from jaxpost.planning import aot, dry_run, tables
from jaxpost.hardware import chips
from jaxpost.planning import machines
def update(**over):
  p, = dry_run.prepare_all(dict(
    algorithm='sft', data=dict(path='none'), model=dict(
      preset='xs', dtype='float32'), mesh=dict(train='fsdp=4'),
    train=dict(batch_size=4, row_length=64), **over))
  return p, aot.compile_stage(p, machines.parse('cpu:4'), ('update',)).rows[0]
_, row = update()
p, some = update(lora=dict(rank=4))
print(json.dumps(dict(least=row['least'], flops=[
  row['flops'], row['totals'].flops * 4], micro=row['micro'],
  unknown=row['totals'].unknown, adapters=[
    some['least']['reduce-scatter']['fsdp'], sum(
      4 * math.prod(x.shape) for path, x in p.inputs.model.table.items()
      if path not in p.inputs.model.frozen and 'embed' in x.axes)])))
"""


def test_least_traffic_of_fsdp():
  """Twice all layers, once embedding (tied) forward; gradients once.

  Gradients of what is trained.
  """
  from jaxpost.models import presets, transformer

  found = json.loads(run(_LEAST, devices=4))
  table = transformer.param_table(presets.PRESETS['xs'])
  split = {k: np.prod(v.shape) for k, v in table.items() if 'embed' in v.axes}
  layers = sum(n for k, n in split.items() if k.startswith('layers'))
  embed = split['embed']
  wanted = 4 * 3 / 4 * (2 * layers + embed)
  assert found['least']['all-gather']['fsdp'] == wanted
  assert found['least']['reduce-scatter']['fsdp'] == 3 * (layers + embed)
  model, counted = found['flops']
  assert counted == pytest.approx(model, rel=0.1)  # no rematerialization
  sent, adapters = found['adapters']  # of what is frozen there are none
  assert 0 < sent == adapters * 3 / 4 < 3 * layers / 10


_PHASES = """
import dataclasses, json, sys
from jaxpost.stage import precompile as precompile_lib
from jaxpost.planning import aot, dry_run, roofline
from jaxpost.hardware import chips
from jaxpost.planning import machines
compile_all, said = precompile_lib.compile_all, []
precompile_lib.compile_all = lambda *a: said.append(compile_all(*a))

def look(mesh, **rollout):
  p, = dry_run.prepare_all(dict(
    algorithm='grpo', reward='gsm8k', data=dict(path='none'), mesh=mesh,
    model=dict(preset='tiny', dtype='float32'), rl=dict(kl_coef=0.1),
    rollout=dict(prompts=4, group_size=2, max_prompt_length=16,
                 max_new_tokens=16, **rollout)))
  top = machines.parse('cpu:8')
  found = aot.compile_stage(p, top, (
    'reshard', 'init_state', 'generate', 'score', 'update'))
  rows = {r['program']: {k: v for k, v in r.items() if k not in (
    'mesh', 'totals')} for r in found.rows}
  moved = sum(r['output_bytes'] * r['calls_per_step'] for r in found.rows
              if r['program'] == 'reshard')
  fast = dataclasses.replace(top, chip=chips.CHIPS['h200'])
  programs = roofline.programs(found, fast)
  return dict(
    rows=rows, predicted=said.pop().predicted, moved=moved,
    plan={r['program']: r['bytes_per_chip'] for r in programs},
    took=[[r['program'], r['runs_on'], r['calls'], r['seconds']]
          for r in programs],
    copied=sum(r['calls'] * x['bytes'] for r in programs
               for x in r['collective_bytes'].get('copy', {}).values()),
    step=roofline.summary(found.placed, fast, programs, 0.0))
print(json.dumps([look(json.loads(m), **json.loads(r)) for m, r in zip(
  sys.argv[1::2], sys.argv[2::2])]))
"""


def phases(*pairs):
  return json.loads(run(_PHASES, *(json.dumps(x) for pair in pairs for x in pair), devices=8))


def test_devices_are_charged_with_what_they_hold():
  (apart,) = phases((dict(train='fsdp=2', rollout='data=-1', rollout_devices=4, score_devices=2), {}))
  rows, plan, predicted = (apart[k] for k in ('rows', 'plan', 'predicted'))
  state = rows['update']['arguments']
  adam = state['parameters'], state['optimizer']
  assert plan['update']['elsewhere'] <= 1000  # nothing but scalars, in whole words
  assert plan['generate']['elsewhere'] <= 100  # devices that train nothing
  sampler = rows['generate']['argument_bytes']
  assert 0.9 * sampler < plan['init_state']['total'] < 1.1 * sampler < sum(adam)
  for name, row in rows.items():  # a plan and a run say the same
    assert (
      plan[name]['total'] == pytest.approx(row['in_use_bytes'], rel=1e-3) and row['in_use_bytes'] <= predicted[name]
    )
  for name, held in dict(score=rows['score']['arguments']['parameters'], update=sum(adam)).items():
    row = rows[name]
    assert predicted[name] == pytest.approx(
      held + row['temp_bytes'] + row['batch_bytes'] + row['output_bytes'] - row['alias_bytes'], rel=1e-5
    )  # the step's number
  whole = apart['moved']  # weights in their new layout, before they leave
  assert predicted['reshard'] >= sum(adam) + whole
  assert plan['reshard']['total'] >= sum(adam) + whole


def test_a_sampler_ahead_stays_during_the_update():
  """On the devices that train; where it has its own they know nothing of it."""
  same, own = dict(train='fsdp=8', rollout='data=-1'), dict(train='fsdp=4', rollout='data=-1', rollout_devices=4)
  plain, ahead, apart = phases((same, {}), (same, dict(staleness=1)), (own, dict(staleness=1)))
  sampler = ahead['rows']['generate']['argument_bytes']
  assert sampler > 2_000_000
  for what in ('update', 'score'):
    more = ahead['predicted'][what] - plain['predicted'][what]
    assert more == pytest.approx(sampler, rel=0.02)  # it reads not all
    more = [x['plan'][what]['elsewhere'] for x in (plain, ahead)]
    assert more[1] - more[0] == pytest.approx(sampler, rel=0.02)
  frozen = apart['rows']['score']['arguments']['parameters']
  assert apart['plan']['update']['elsewhere'] == pytest.approx(frozen, rel=1e-3)


MEASURED = pathlib.Path(__file__).parents[1] / 'docs' / 'accelerator_rows.jsonl'


def measured_seconds(row):
  """Returns {program: measured seconds} of a row of `launch.bench accelerator`, where a program is timed alone."""
  if row['row'].startswith('decode/'):
    return {'generate': 32 * row['token_s']}
  return {'update': row.get('time/update') or row.get('step_s')}


@pytest.mark.parametrize('window, filled, read', [(0, 0, 800), (0, 496, 496), (128, 496, 128), (4096, 0, 800)])
def test_decoding_reads_what_is_filled_of_a_cache(window, filled, read):
  """Of the slots that are in use, and of the window."""
  text = (
    '  %x = (bf16[1,64,8,2,128]{4,3,2,1,0}) custom-call(%a, %b, %c), custom_call_target="__gpu$xla.gpu.triton", '
    f'metadata={{op_name="jit(generate)/while/body/decode_{window}"}}'
  )
  given = [hlo.Array('bf16', dims, False) for dims in ((64, 8, 2, 128), (256, 8, 800, 128), (256, 8, 800, 64))]
  op = hlo.Op('x', 'custom-call', (), (), text, '', False)
  flops, more = kernels.cost(op, given, filled)
  assert flops == 2 * 64 * 8 * 2 * read * (128 + 64)
  cache = given[1].bytes + given[2].bytes
  assert cache + more == pytest.approx(64 * 8 * read * (128 + 64) * 2)


@pytest.mark.parametrize(
  'rollout, slots, wanted',
  [
    # Blocks of 16 end at 48, 64, ... 544; the cache has 560 entries, and attention reads 64, 128, 256, 512 or all.
    (dict(max_prompt_length=32, max_new_tokens=512), (8, 4), {64: 2, 128: 4, 256: 8, 560: 18}),
    (dict(max_prompt_length=480, max_new_tokens=64), (8,), {560: 4}),
    # A block of 113 entries reads all 129.
    (dict(max_prompt_length=33, max_new_tokens=80), (8, 4), {64: 1, 129: 4}),
  ],
)
def test_blocks_of_decoding_are_counted_for_what_they_read(rollout, slots, wanted):
  """Of completions as long as they may be: each number of entries used to have as many, and as many with idle slots."""
  config = types.SimpleNamespace(rollout=types.SimpleNamespace(page_size=0, **rollout))
  room = rollout['max_prompt_length'] + rollout['max_new_tokens']
  engine = buckets.Buckets(8, 1, 1, room, room + 16, 0, 16, rollout['max_new_tokens'])
  assert {engine.decode(n + 16, 8) for n in range(rollout['max_prompt_length'], room)} == wanted.keys()
  reads = roofline._reads(types.SimpleNamespace(config=config, decode_block=16))
  step = roofline.Step({'generate': sum(wanted.values())}, 0, 0, reads)
  # Attention to a window computes the same for all of them.
  rows = [dict(program='generate', slots=n, read=read, flops=n * 100) for n in slots for read in (*wanted, 32)]
  random.Random(0).shuffle(rows)
  for row in rows:
    expected = wanted.get(row['read'], 0) if row['slots'] == 8 else 0
    assert roofline._calls(row, rows, step) == pytest.approx(expected), row
  # A kernel reads what is filled: one program for each number of slots.
  row = dict(program='generate', slots=8, read=0)
  assert roofline._calls(row, [row], step) == sum(wanted.values())


def test_programs_of_decoding_say_what_they_read():
  """Their FLOPs do not, where attention is to a window."""
  (prepared,) = dry_run.prepare_all(
    dict(
      algorithm='grpo',
      reward='gsm8k',
      data=dict(path='none'),
      model=dict(preset='tiny', dtype='float32'),
      rollout=dict(prompts=4, group_size=2, max_prompt_length=44, max_new_tokens=68, block=17),
    )
  )
  found = aot.compile_stage(prepared, machines.parse('cpu:1'), ('generate',))
  step = roofline.step_of(found.placed)
  assert {row['read']: roofline._calls(row, found.rows, step) for row in found.rows} == {64: 1, 129: 3}


def sampling_seconds(row):
  """Returns (expected, measured seconds of sampling) of a row of GRPO: 512 completions of 256 + 512 tokens."""
  prompt, new, block = 256, 512, 32
  programs = {}
  for p in row['programs']:
    if p['program'] not in programs or p['program_flops'] > programs[p['program']]['program_flops']:
      programs[p['program']] = p
  slots = int(re.match(r'\[(\d+)', programs['generate']['shapes'])[1])
  calls = dict(init_state=1, prefill=512 // slots, insert=512 // slots, generate=512 // slots * new // block)
  seconds = 0.0
  for name, number in calls.items():
    count = programs[name]['memory_traffic_bytes']
    if name == 'generate' and 'filled' not in programs[name]:  # the whole cache was counted for every token
      config = types.SimpleNamespace(rollout=types.SimpleNamespace(max_prompt_length=prompt, max_new_tokens=new))
      filled = aot.filled_entries(types.SimpleNamespace(config=config, decode_block=block))
      cache = programs['init_state']['memory_traffic_bytes']  # which writes it
      count -= block * cache * (1 - filled / (prompt + new + block))
    seconds += number * roofline.expected(programs[name]['program_flops'], count, 0.0, chips.CHIPS['h200'])
  return seconds, row['time/sample']


def test_expected_seconds_of_sampling_are_those_of_an_h200():
  """Whole completions, of which a plan counts what is filled of the cache on average."""
  rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
  found = [sampling_seconds(r) for r in rows if r['row'].startswith('grpo/')]
  ratios = [expected / took for expected, took in found]
  assert len(ratios) >= 2 and all(0.85 < x < 1.15 for x in ratios), ratios


def test_expected_seconds_are_those_of_an_h200():
  """Updates of dense models and a block of 128 slots; what else misses is in docs/performance.md, with the reasons."""
  rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
  known = [r for r in rows if 'programs' in r and (r.get('attention', 'triton') == 'triton')]
  dense = [r for r in known if not r['row'].startswith(('moe', 'decode/qwen3_1_7b/32x512'))]
  ratios = {}
  for r in dense:
    took = measured_seconds(r)
    for p in r['programs']:
      if took.get(p['program']):
        expected = roofline.expected(p['program_flops'], p['memory_traffic_bytes'], 0.0, chips.CHIPS['h200'])
        ratios[r['code'], r['row']] = expected / took[p['program']]
  assert len(ratios) >= 6
  assert all(0.85 < x < 1.15 for x in ratios.values()), ratios


@pytest.fixture(scope='module')
def ahead():
  """Sampling on the devices that train; beside them; scores beside, too."""
  same = dict(train='fsdp=8', rollout='data=-1')
  own = dict(train='fsdp=-1', rollout='data=-1', rollout_devices=4)
  few = dict(train='fsdp=-1', rollout='data=2,tensor=2', rollout_devices=4, score_devices=2)
  return phases((same, dict(staleness=1)), (own, dict(staleness=1)), (few, dict(staleness=2)))


def test_phases_overlap_where_sampling_is_ahead_on_its_own_devices(ahead):
  together, apart, all_apart = ahead
  for name in 'roofline', 'no_overlap':
    for found in together, apart, all_apart:
      s = {}
      for program, on, calls, seconds in found['took']:
        what = 'sample' if program in ('init_state', 'generate') else program
        s[what, on] = s.get((what, on), 0.0) + calls * seconds[name]
      assert all(s.values())
      if found is together:
        assert {on for _, on in s} == {'train'}
        least = sum(s.values())
      elif found is apart:  # scores are of the rollout that is being sampled
        least = max(s['sample', 'rollout'], s['update', 'train']) + (s['score', 'train'] + s['reshard', 'train'])
      else:  # the policy's score has to be where the policy is
        least = s['reshard', 'train'] + max(
          s['sample', 'rollout'], s['score', 'score'], s['update', 'train'] + s['score', 'train']
        )
      assert found['step'][name]['step_s'] == pytest.approx(least)
      assert found['step'][name]['tokens_per_s'] == pytest.approx(8 * 32 / least)


def test_weights_that_go_to_other_devices_are_sent(ahead):
  """By each training device, to as many of them as there are for one."""
  together, apart, all_apart = ahead
  assert together['copied'] == 0
  assert apart['copied'] == apart['moved'] > 0
  assert all_apart['copied'] == 2 * all_apart['moved'] > 0  # two train
  link = chips.CHIPS['h200'].link
  for found in apart, all_apart:
    network = sum(calls * seconds['network'] for name, _, calls, seconds in found['took'] if name == 'reshard')
    assert network > found['copied'] / link
    step = found['step']['roofline']['seconds']['reshard']
    assert step >= network


@pytest.mark.parametrize('lag, wanted', [(0, 27.5), (1, 19.5), (2, 13.5)])
def test_seconds_of_a_step_ahead(lag, wanted):
  """Sampling takes 13 s, updates 8, scores 4, and values 2 elsewhere."""
  rows = [
    dict(program=name, calls=calls, runs_on=on, seconds=dict(x=took))
    for name, calls, on, took in (
      ('reshard', 1, 'train', 0.5),
      ('generate', 24, 'rollout', 0.5),
      ('prefill', 2, 'rollout', 0.5),
      ('update', 2, 'train', 4.0),
      ('score', 1, 'train', 4.0),
      ('values', 1, 'score', 2.0),
    )
  ]
  assert roofline.step_seconds(rows, 'x', lag) == wanted


# ------------------------------------------------------------------- commands


def test_plan_of_the_local_backend(tmp_path):
  """All programs of GRPO, without weights, data, tokenizer or devices."""
  out = tmp_path / 'plan.json'
  done = plan(
    '--config=configs/grpo_gsm8k.py:model=tiny',
    '--topology=cpu:4',
    '--config.model.dtype=float32',
    '--config.eval.data.path=',
    '--config.rollout.max_prompt_length=32',
    '--config.rl.kl_coef=0.1',
    '--config.rollout.max_new_tokens=16',
    '--config.rollout.prompts=4',
    '--config.mesh.rollout=data=2,tensor=2',
    f'--out={out}',
  )
  assert done.returncode == 0, done.stderr[-2000:]
  (found,) = json.loads(out.read_text())
  names = [r['program'] for r in found['programs']]
  assert set(names) == {'copy', 'init', 'update', 'score', 'reshard', 'init_state', 'prefill', 'insert', 'generate'}
  assert found['mesh']['rollout'] == {'data': 2, 'fsdp': 1, 'expert': 1, 'context': 1, 'tensor': 2}
  update = found['programs'][names.index('update')]
  memory = update['bytes_per_chip']
  parameters = 4 * found['parameters'] / 4
  assert memory['parameters'] == pytest.approx(parameters, rel=0.01)
  assert memory['optimizer'] == pytest.approx(2 * parameters, rel=0.01)
  assert memory['elsewhere'] == pytest.approx(parameters, rel=0.02)  # copy
  assert update['calls'] == 1 and not update['unknown_loops']
  assert 'fsdp' in update['collective_bytes']['all-gather']
  generate = [r for r in found['programs'] if r['program'] == 'generate']
  assert sum(r['calls'] for r in generate) == 2  # 16 tokens are two blocks
  assert generate[0]['bytes_per_chip']['kv_cache'] > 0
  assert 'update' in done.stdout and 'all-gather' in done.stdout


@pytest.mark.parametrize('speculation', [True, False])
def test_a_plan_says_that_it_does_not_count_drafts(speculation):
  """How often they are verified, and what is accepted, depends on the texts."""
  rows = [dict(program=name, slots=8, read=0) for name in ('generate', *['verify'] * speculation)]
  step = roofline.Step({'generate': 4}, 1, 1)
  assert [roofline._calls(row, rows, step) for row in rows] == [4, *[0] * speculation]
  nothing = dict.fromkeys(('parameters', 'optimizer', 'kv_cache', 'batch', 'other', 'outputs', 'temporaries'), 0)
  seconds = dict.fromkeys(('compute', 'memory', 'network', 'roofline', 'xla'))
  given = dict(
    shapes='', fits=None, calls=1, compile_s=1.0, roofline_mfu=None, collective_bytes={}, collective_minimum={}
  )
  programs = [
    given
    | dict(program=row['program'], flops=dict(program=1.0, model=1.0), seconds=seconds)
    | dict(bytes_per_chip=nothing | dict(elsewhere=0, total=1))
    for row in rows
  ]
  about = dict(stage='a', algorithm='grpo', parameters=1, devices=1, device_kind='x', topology='cpu', mesh={})
  console = rich.console.Console(file=io.StringIO(), width=200)
  tables.show(about | dict(programs=programs, memory_per_device=0, step={}), console)
  said = console.file.getvalue()
  assert 'generate' in said and ('drafts (rollout.speculation) are not counted' in said) == speculation


def test_a_sampler_with_more_devices_than_training(tmp_path):
  """Axes and shares of its programs are those of its own mesh."""
  out = tmp_path / 'plan.json'
  done = plan(
    '--config=configs/grpo_gsm8k.py:model=tiny',
    '--topology=cpu:8',
    '--config.mesh.train=data=2',
    '--config.mesh.rollout=data=3,tensor=2',
    '--config.mesh.rollout_devices=6',
    '--config.eval.data.path=',
    '--config.rollout.slots=6',
    '--config.rollout.max_prompt_length=32',
    '--config.rollout.max_new_tokens=16',
    '--programs=insert,generate',
    f'--out={out}',
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert [path.name for path in tmp_path.iterdir()] == ['plan.json']
  (found,) = json.loads(out.read_text())
  assert found['devices'] == 8
  generate = [r for r in found['programs'] if r['program'] == 'generate'][-1]
  assert generate['devices'] == 6
  assert 'tensor' in generate['collective_bytes']['all-reduce']
  assert 0.8 < generate['flops']['program'] / generate['flops']['model'] < 1.5


@pytest.mark.parametrize('mesh', ['data=4', 'expert=4'])
def test_products_of_experts_are_counted(mesh, tmp_path):
  """In loops that only a run knows the turns of; blocks are not all full."""
  out = tmp_path / 'plan.json'
  done = plan(
    '--config=configs/sft_gsm8k.py:model=tiny_moe',
    '--topology=cpu:4',
    f'--config.mesh.train={mesh}',
    '--config.train.batch_size=4',
    '--config.eval.data.path=',
    '--programs=update',
    f'--out={out}',
  )
  assert done.returncode == 0, done.stderr[-2000:]
  (update,) = json.loads(out.read_text())[0]['programs']
  flops = update['flops']
  assert 1 <= flops['program'] / flops['model'] < 1.3


@pytest.mark.parametrize('algorithm', ['dpo', 'kto', 'reward_model', 'ppo'])
def test_other_methods_are_described(algorithm):
  (found,) = dry_run.prepare_all(dict(algorithm=algorithm, data=dict(path='none'), reward='gsm8k'))
  assert found.name == algorithm
  if found.inputs.algorithm.on_policy:
    assert found.data.stream.lengths == [512]
  else:
    assert found.data.first_batch.tokens.shape[1] == 512


@pytest.mark.parametrize(
  'over, field',
  [
    (dict(algorithm='grpo', model=dict(preset='tiny_hybrid'), train=dict(share_prompt=True)), 'train.share_prompt'),
    (dict(algorithm='ppo', model=dict(preset='tiny_moe'), router=dict(routing_replay=True)), 'router.routing_replay'),
    (
      dict(algorithm='grpo', model=dict(preset='tiny_hybrid'), rollout=dict(speculation='ngram')),
      'rollout.speculation',
    ),
    (
      dict(
        algorithm='grpo',
        model=dict(preset='tiny_moe'),
        router=dict(routing_replay=True),
        rollout=dict(speculation='ngram'),
      ),
      'rollout.speculation',
    ),
    (dict(algorithm='grpo', rollout=dict(cache_tokens=1024)), 'rollout.page_size'),
    (dict(algorithm='grpo', rollout=dict(min_new_tokens=200)), 'rollout.min_new_tokens'),
    (dict(algorithm='grpo', rollout=dict(stop_strings=('',))), 'rollout.stop_strings'),
    (dict(algorithm='grpo', rollout=dict(forbidden_ids=(10**6,))), 'rollout.forbidden_ids'),
    (dict(algorithm='grpo', rollout=dict(top_logprobs=10**6)), 'rollout.top_logprobs'),
  ],
)
def test_what_the_models_of_a_run_cannot_do_is_not_planned(over, field):
  with pytest.raises(InputError, match=f'config.{field}: '):
    dry_run.prepare_all(dict(reward='gsm8k') | over)


@pytest.mark.parametrize(
  'algorithm, over, words',
  [
    ('grpo', dict(mesh=dict(rollout='context=2')), 'mesh.rollout: the context axis splits rows'),
    ('sft', dict(mesh=dict(rollout_devices=4)), 'mesh.rollout_devices: sft samples nothing'),
    ('sft', dict(mesh=dict(score_devices=2)), 'mesh.score_devices: sft has no reference'),
    ('sft', dict(train=dict(share_prompt=True)), 'train.share_prompt: sft samples nothing'),
    ('sft', dict(save=dict(keep_best='loss')), 'save.keep_best: nothing is evaluated'),
    (
      'grpo',
      dict(save=dict(keep_best='loss'), eval=dict(data=dict(path='none'))),
      'save.keep_best: nothing is evaluated',
    ),
    ('grpo', dict(reference=dict(every=1)), 'reference.every: grpo reads no reference model'),
    (
      'grpo',
      dict(reward='reward_model', reward_model=dict(path='tiny'), rl=dict(replay=4)),
      'rl.replay: groups are chosen before a reward model',
    ),
    ('reward_model', dict(eval=dict(samples=1, data=dict(path='none'))), 'eval.samples: a reward model writes no text'),
    ('grpo', dict(reward_weights=(1.0, 2.0)), 'reward_weights: 2 weights for 1 rewards'),
    ('grpo', dict(rl=dict(correct_by='length')), 'rl.correct_by: '),
  ],
)
def test_what_a_run_refuses_is_not_planned(algorithm, over, words):
  config = dict(algorithm=algorithm, data=dict(path='none'))
  with pytest.raises(InputError, match=words):
    dry_run.prepare_all(config | (dict(reward='gsm8k') if algorithm == 'grpo' else {}) | over)


def test_programs_that_can_be_asked_for():
  made = [path.read_text() for room in ('programs', 'rollout') for path in (CLONE / 'jaxpost' / room).glob('*.py')]
  names = {name for text in made for name in re.findall(r"\b(?:Program|reader)\('(\w+)'", text)}
  assert {'update', 'init_state', 'topk'} < names and names | {'score', 'values'} == set(stage.PROGRAMS)
  stage.check_names(['update', 'generate'])
  with pytest.raises(InputError, match="--programs: there is no 'generat'; did you mean 'generate'"):
    stage.check_names(['update', 'generat'])


@pytest.mark.parametrize(
  'args, words',
  [
    (['--topology=v6x:2x2'], "did you mean 'v6e'"),
    (['--topology=cpu', '--config.model.path=qwen3_80b'], 'did you mean'),
    (['--topology=cpu:4', '--config.mesh.train=fsdp=3'], 'config.mesh.train: .fsdp=3. does not fit 4'),
    (['--topology=cpu', '--programs=generate'], 'has none of these'),
    (['--topology=cpu', '--search'], 'only chips of known speed'),
  ],
)
def test_bad_input_is_one_line(args, words):
  import re

  done = plan('--config=configs/sft_gsm8k.py:model=tiny', '--config.eval.data.path=', *args)
  assert done.returncode == 2, done.stderr[-2000:]
  (line,) = [x for x in done.stderr.splitlines() if x.startswith('jaxpost')]
  assert re.search(words, line)


# ---------------------------------------------------------------- accelerators


def needs(package, extra):
  import importlib.util

  return pytest.mark.skipif(
    importlib.util.find_spec(package) is None, reason=f"no {package}, which compiles for these: pip install '{extra}'"
  )


@needs('libtpu', 'jax[tpu]')
@pytest.mark.long
@pytest.mark.parametrize('slices', [1, 2])
def test_plan_for_tpus(slices, tmp_path):
  out = tmp_path / 'plan.json'
  done = plan(
    '--config=configs/sft_gsm8k.py:model=xs',
    '--topology=v5e:2x2',
    f'--slices={slices}',
    '--config.model.remat=full',
    '--config.mesh.train=' + ('fsdp=-1' if slices == 1 else 'data=2,fsdp=-1'),
    '--config.train.batch_size=8',
    '--config.train.row_length=256',
    '--programs=update',
    '--price=1',
    f'--out={out}',
  )
  assert done.returncode == 0, done.stderr[-2000:]
  (found,) = json.loads(out.read_text())
  (update,) = found['programs']
  assert found['chips'] == 4 * slices and update['fits']
  assert update['seconds']['xla'] > 0 and not update['unknown_loops']
  assert found['step']['roofline']['usd_per_million_tokens'] > 0
  far = {axis: x['between_hosts'] for kind in update['collective_bytes'].values() for axis, x in kind.items()}
  assert far['fsdp'] is False
  assert slices == 1 or far['data'] is True


@needs('jax_cuda13_plugin', 'jax[cuda13]')
@pytest.mark.long
def test_plan_for_gpus(tmp_path):
  out = tmp_path / 'plan.json'
  done = plan(
    '--config=configs/sft_gsm8k.py:model=xs',
    '--topology=h200:1x2x8',
    '--config.mesh.train=fsdp=2,tensor=8',
    '--config.train.row_length=256',
    '--programs=update',
    f'--out={out}',
  )
  assert done.returncode == 0, done.stderr[-2000:]
  (found,) = json.loads(out.read_text())
  (update,) = found['programs']
  assert found['chips'] == 16 and update['fits']
  far = {axis: x['between_hosts'] for kind in update['collective_bytes'].values() for axis, x in kind.items()}
  assert far['fsdp'] is True and far['tensor'] is False


def test_search_ranks_what_fits(monkeypatch):
  """Doubles of plans: tensor=2 is fastest, without rematerialization best."""
  import io

  import rich.console

  from jaxpost.planning import search, stage

  def fake(p, options):
    tensor = 2 if 'tensor=2' in p.config.mesh.train else 1
    remat = p.config.model.remat
    seconds = {'full': 4.0, 'dots': 3.0, 'none': 2.0}[remat] / tensor
    row = dict(
      program='update',
      calls=1,
      fits='tensor' not in p.config.mesh.train or tensor == 2 and remat != 'none',
      bytes_per_chip=dict(total=2**30),
      roofline_mfu=0.5,
      flops=dict(model=1.0),
      seconds=dict(no_overlap=seconds),
    )
    return dict(fits=row['fits'], programs=[row], trained_tokens=1000, step=dict(no_overlap=dict(step_s=seconds)))

  monkeypatch.setattr(stage, 'plan', fake)
  out = io.StringIO()
  (best,) = search.search(
    dict(algorithm='sft', data=dict(path='none')),
    stage.Options(machines.parse('v6e:2x2')),
    rich.console.Console(file=out, width=200),
  )
  assert best['settings']['mesh.train'] == 'fsdp=-1,tensor=2'
  assert best['settings']['model.remat'] == 'dots'  # none does not fit
  assert '--config.mesh.train=fsdp=-1,tensor=2' in out.getvalue()
  assert '--config.model.remat=dots' in out.getvalue()


def shape(path, train=None, **over):
  """A stage of this model; `train` comes after its rows were made."""
  from jaxpost.planning import search

  (p,) = dry_run.prepare_all(dict(algorithm='sft', data=dict(path='none'), model=dict(path=path), **over))
  return search.vary(p, {f'train.{k}': v for k, v in (train or {}).items()})


@pytest.mark.parametrize(
  'path, topology, train, has',
  [
    (
      'llama3_70b',
      'v5p:16x16x32',
      {},
      {  # shards of 8,192 / 64 = 128 lanes
        'fsdp=-1,tensor=8': 1024,
        'data=16,fsdp=64,tensor=8': 1024,
      },
    ),
    ('qwen3_30b_a3b', 'v5p:4x4x4', dict(row_length=4096), {'fsdp=-1,expert=8': 64, 'data=4,fsdp=2,expert=8': 64}),
    ('llama3_8b', 'v5p:4x4x4', dict(row_length=32768), {'fsdp=-1,context=4': 16}),
    ('qwen3_5_9b', 'v5p:4x4x4', dict(row_length=32768), {'fsdp=-1': 64}),
    ('llama3_8b', 'v5p:2x2x4', {}, {'fsdp=-1': 16, 'fsdp=-1,tensor=8': 2}),
  ],
)
def test_meshes_to_try(path, topology, train, has):
  from jaxpost.planning import meshes

  found = meshes.training(shape(path, train).inputs, machines.parse(topology), False)
  assert has.items() <= found.items() and len(found) <= 10
  assert next(iter(found)) == 'fsdp=-1'
  assert path == 'llama3_8b' and train or not any('context' in m for m in found)
  if path == 'llama3_8b' and not train:
    assert len(found) == 4  # no shard is narrow: nothing but fsdp and tensor


def test_gpus_have_no_lanes_and_batches_split():
  from jaxpost.planning import meshes

  p = shape('llama3_70b', dict(batch_size=64))
  assert not any('data' in m for m in meshes.training(p.inputs, machines.parse('h200:16x8x8'), False))
  assert meshes.training(p.inputs, machines.parse('h200:1x64x8'), True) == {'fsdp=-1,tensor=8': 64}


@pytest.mark.parametrize(
  'mesh, shards', [({}, 8), (dict(rollout_devices=4), 4), (dict(rollout_devices=2, score_devices=2), 4)]
)
def test_devices_are_counted_not_chips(mesh, shards):
  """A tpu7x chip is two; those of other phases train nothing."""
  from jaxpost.planning import meshes

  (p,) = dry_run.prepare_all(
    dict(algorithm='grpo', reward='gsm8k', data=dict(path='none'), mesh=mesh, model=dict(path='qwen3_8b'))
    | dict(rl=dict(kl_coef=0.1))
  )
  top = machines.parse('tpu7x:1x2x2')
  assert meshes.training(p.inputs, top, False)['fsdp=-1'] == shards
  tensor = mesh.get('rollout_devices', 8)
  assert meshes.sampling(p.inputs, top)[-1] == f'data=-1,tensor={tensor}'


def test_launch_line():
  """The line keeps the options of the user, except those for which the plan proposes others."""
  from jaxpost.planning import search

  assert search.launch_line(
    (
      '--config',
      'my.py:model=qwen3_8b',
      '--topology=v6e:2x2',
      '--search',
      '--config.train.row_length=4096',
      '--config.mesh.train=fsdp=2',
      '-config.model.remat',
      'none',
      '--noconfig.save.keep_best',
      '--config.data.path=a b',
    ),
    {'--config.mesh.train': 'fsdp=-1', '--config.train.batch_size': 8},
  ) == (
    'python -m launch.train --config=my.py:model=qwen3_8b '
    '--config.train.row_length=4096 --config.mesh.train=fsdp=-1 '
    '--config.model.remat=none --noconfig.save.keep_best '
    "'--config.data.path=a b' --config.train.batch_size=8 "
    '--workdir=runs/planned'
  )
