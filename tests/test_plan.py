"""Plans (`launch.plan`): topologies by name, costs counted in HLO, the roofline, memory, meshes, and the command."""

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
import described
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


def planned_by(tmp_path, *args):
  """Returns the plan of the only stage that `launch.plan` writes, and what it prints."""
  out = tmp_path / 'plan.json'
  done = children.run('-m', 'launch.plan', *args, f'--out={out}')
  (planned,) = json.loads(out.read_text())
  return planned, done.stdout


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
def test_topology_text_is_parsed(text, slices, count):
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
    ('quantum:3', 1, 'known: v4, v5e.* a100_80gb, l4'),
  ],
)
def test_unknown_topology_is_refused(text, slices, words):
  with pytest.raises(InputError, match=words) as error:
    machines.parse(text, slices)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('text, package', [('8xH100', "'jax[cuda13]'"), ('v6e:2x2', "-e '.[plan]' in a clone")])
def test_missing_compiler_error_names_the_package_and_fits(text, package, monkeypatch):
  """The error names what to install, and the command that needs no compiler."""

  def raise_not_implemented(*args, **kwargs):
    raise RuntimeError('topology not implemented')

  monkeypatch.setattr('jax.experimental.topologies.get_topology_desc', raise_not_implemented)
  monkeypatch.setattr(machines, '_describe_gpu', lambda: None)
  with pytest.raises(InputError) as error:
    machines.devices(machines.parse(text))
  assert f'comes with pip install {package}' in str(error.value) and 'launch.plan --fits' in str(error.value)


def test_memory_of_an_unknown_chip_is_what_the_device_reports():
  def device(kind, stats):
    return types.SimpleNamespace(device_kind=kind, memory_stats=lambda: stats)

  assert chips.memory_of(device('NVIDIA H100 80GB HBM3', dict(bytes_limit=1))) == chips.CHIPS['h100'].memory
  assert chips.memory_of(device('NVIDIA RTX 9090', dict(bytes_limit=24e9))) == 24e9
  assert chips.memory_of(device('NVIDIA RTX 9090', None)) == 0


def test_chip_is_found_by_jax_device_kind():
  """JAX calls v5p 'TPU v5', which is also part of its name for v5e."""
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
    'NVIDIA H200 NVL': 'h200_nvl',
    'NVIDIA GH200 144G HBM3e': 'gh200_144g',
    'NVIDIA GB200': 'gb200',
    'NVIDIA A100-PCIE-40GB': 'a100_pcie',
    'NVIDIA A10G': 'a10g',
    'NVIDIA A10': 'a10',
    'Tesla V100-SXM2-32GB': 'v100_32gb',
    'NVIDIA GeForce RTX 4090': 'rtx_4090',
    'NVIDIA RTX 6000 Ada Generation': 'rtx_6000_ada',
    'TPU v5p': 'v5p',
  }.items():
    assert chips.of_kind(kind) == chips.CHIPS[name]


@pytest.mark.parametrize(
  'kind',
  [
    'cpu',
    'NVIDIA T400 4GB',
    'NVIDIA GB300',
    'NVIDIA B300 SXM6 AC',
    'NVIDIA H20-3e',
    'NVIDIA GeForce RTX 4090 Laptop GPU',
    'NVIDIA A100-SXM4-80GB MIG 1g.10gb',
    'TPU v4 lite',
  ],
)
def test_variant_of_a_known_chip_has_no_figures_of_another(kind):
  assert chips.of_kind(kind) is None


def test_gpus_without_bfloat16_are_known():
  described = {name: machines.parse(name, flag='--devices', compiled=False) for name in ('T4', 'V100', 'A10G')}
  assert {name for name, machine in described.items() if machine.before_ampere} == {'T4', 'V100'}


def test_published_shapes_are_found_under_each_of_their_names():
  for name in ('qwen3_8b', 'Qwen/Qwen3-8B', 'qwen3-8b'):
    assert dry_run.named_shape(name).hidden_size == 4096
  for name in ('llama3_70b', 'meta-llama/Meta-Llama-3-70B-Instruct'):
    assert dry_run.named_shape(name).num_layers == 80
  assert dry_run.named_shape('qwen9_1b') is None
  with pytest.raises(InputError, match="did you mean 'qwen3_8b'"):
    dry_run.shape_of('qwen3_8', 'config.model.path')


def test_shape_of_a_local_model_or_run_is_read_from_disk(tmp_path, monkeypatch):
  """A model may be a relative path, with or without a dot, and the start may be a run, as for `launch.train`."""
  shutil.copytree(tiny.folder(tmp_path / 'model'), tmp_path / 'models' / 'mine')
  hidden_size = json.loads((tmp_path / 'models/mine/config.json').read_text())['hidden_size']
  monkeypatch.chdir(tmp_path)
  stages.run(tiny.run_config('models/mine', train=dict(steps=1), eval=dict(data=dict(path=''))), tmp_path / 'runs/one')
  for model, start in (('models/mine', ''), ('./models/mine', ''), ('qwen3_8b', 'runs/one')):
    config = tiny.run_config(model, init_from=start)
    (prepared,) = dry_run.prepare_all(config)
    assert prepared.inputs.model.config.hidden_size == hidden_size


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


def test_flops_of_a_loop_are_multiplied_by_its_trip_count():
  counts = children.printed('-c', _LOOPS)
  product = 2 * 16 * 32 * 32
  assert counts['known'] == 36 * product  # 7 x 5, and a loop of unknown length counts once
  assert counts['unknown'] == 1
  assert counts['told'] == 38 * product  # with the unknown length given as 3
  assert counts['xla'] < 4 * product  # XLA counts each loop body once, which is why `cost` counts itself


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


def test_collective_bytes_are_counted_by_kind_and_mesh_axis():
  traffic = children.printed('-c', _COLLECTIVES, devices=8)
  gathered_bytes, gathers = traffic['all-gather']['fsdp']
  assert gathers in (1, 6)  # XLA may move the all-gather out of the loop
  assert gathered_bytes == gathers * 3 * 8 * 32 * 4  # a device receives three of the four shards
  assert traffic['all-reduce']['data'] == [6 * 16 * 32 * 4, 6]  # 2 b (n - 1) / n of b bytes, for n = 2
  assert traffic['reduce-scatter']['fsdp'] == [16 * 32 * 4 * 3 / 4, 1]


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
def test_replica_groups_are_parsed_in_each_hlo_syntax(text, group):
  op = hlo.Op('x', 'all-reduce', (), (), f', channel_id=1, {text}', inner='', root=False)
  assert hlo.group_of(op) == group


@pytest.mark.parametrize(
  'target, kind, group, sent',
  [
    ('{1,2}x{0:3}', 'ALL_REDUCE', (0, 4), 4096),  # 2 b (n - 1) / n of b = 4096 bytes, for n = 2
    ('{0:3}x{0:7}', 'ALL_REDUCE', (0, 8, 16, 24), 6144),
    ('{0,1}x{0:3}', 'ALL_GATHER', (0, 4), 4096),
  ],
)
def test_megascale_transfers_between_tpu_slices_count_as_collectives(target, kind, group, sent):
  attributes = (
    f'is_host_transfer=true, frontend_attributes={{'
    f'_xla_megascale_target="{target}",'
    f'_xla_megascale_transfer_type="{kind}"}}'
  )
  collectives = cost.count(f"""HloModule m

ENTRY %main (p: f32[1024]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  %t = token[] after-all()
  %a = (f32[1024]{{0}}, u32[], token[]) send(%p, %t), channel_id=6, {attributes}
  %b = (f32[1024]{{0}}, u32[], token[]) recv(%t), channel_id=7, {attributes}
  ROOT %x = f32[1024]{{0}} get-tuple-element(%b), index=0
}}
""").collectives
  assert collectives == {(kind.lower().replace('_', '-'), group): [sent, 1]}


def test_hlo_of_the_tpu_compiler_is_counted():
  """Tiled layouts, fast memory, estimated cycles, asynchronous copies, and a loop counter that advances by two."""
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
  for placeholder, hlo_text in {
    'PAIR': '(u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)})',
    'SENT': '(f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]{:S(2)})',
    'SLICED': '((f32[8,128]{1,0:T(8,128)}), f32[4,128]{1,0:S(1)}, u32[])',
    'PERMUTED': 'source_target_pairs={{0,2},{1,3}}',
    'CYCLES': 'backend_config={"window_config":{"estimated_cycles":"100"}}',
  }.items():
    text = text.replace(placeholder, hlo_text)
  totals = cost.count(text)
  assert totals.unknown == () and totals.cycles == 4 * 100
  assert totals.collectives == {('collective-permute', (0, 2)): [4 * 4096, 4]}
  # The permuted array is sent and received, and then negated in fast memory, which costs no read.
  # Of an array that is sliced, only the slice is read.
  assert totals.bytes == pytest.approx(4 * (2 * 4096 + 4096 + 2048), rel=0.01)


@pytest.mark.parametrize('asynchronous', [False, True])
def test_async_fusion_moves_as_many_bytes_as_a_sync_one(asynchronous):
  """XLA for GPUs of jax 0.12 starts the slices that scanned layers read and store as `fusion-start`."""
  stack, layer = 'f32[28,1024]{1,0}', 'f32[1,1024]{1,0}'

  def fusion(name, result, inputs, types, calls):
    operands = ', '.join(f'%{i}' for i in inputs)
    if not asynchronous:
      return f'%{name} = {result} fusion({operands}), kind=kLoop, calls=%{calls}'
    started = f'%{name}.s = (({types}), {result}, u32[]) fusion-start({operands}), kind=kLoop, calls=%{calls}'
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
  {fusion('layer', layer, ('x', 'n'), f'{stack}, s32[]', 'read')}
  {fusion('out', stack, ('x', 'layer', 'n'), f'{stack}, {layer}, s32[]', 'write')}
  ROOT %copy = {stack} bitcast(%out)
}}
"""
  # Each of the two fusions reads and writes a layer, and the place that is written counts as read: 5 layers of 4 KiB.
  assert cost.count(text).bytes == pytest.approx(5 * 4096, abs=16)


WEIGHTS = 'bf16[4096,1024]{1,0:T(8,128)(2,1)}'  # 8 MiB


def bytes_of_fusion(*lines):
  """Returns the bytes of a fusion of `lines`, which takes weights (%w), x in fast memory, and a place (%i)."""
  body = '\n  '.join(lines)
  return cost.count(f"""HloModule m

%renamed (r: bf16[4096,1024]) -> bf16[4096,1024] {{
  %r = {WEIGHTS} parameter(0)
  ROOT %b = {WEIGHTS} bitcast(%r)
}}

%fused (w: bf16[4096,1024], x: bf16[8,1024], i: s32[]) -> f32[8,4096] {{
  %w = {WEIGHTS} parameter(0)
  %x = bf16[8,1024]{{1,0:S(1)}} parameter(1)
  %i = s32[]{{:S(1)}} parameter(2)
  %zero = s32[] constant(0)
  {body}
}}

ENTRY %main (a: bf16[4096,1024], c: bf16[8,1024], n: s32[]) -> f32[8,4096] {{
  %a = {WEIGHTS} parameter(0)
  %c = bf16[8,1024]{{1,0:S(1)}} parameter(1)
  %n = s32[]{{:S(1)}} parameter(2)
  ROOT %y = f32[8,4096]{{1,0:S(1)}} fusion(%a, %c, %n), kind=kOutput, calls=%fused
}}
""").bytes


def test_weights_that_a_fusion_renames_are_read():
  """XLA for TPU wraps the operands of a product in fusions of a bitcast alone."""
  product = 'convolution(%x, %v), dim_labels=bf_oi->bf'
  renamed = f'%v = {WEIGHTS} fusion(%w), kind=kLoop, calls=%renamed'
  assert bytes_of_fusion(renamed, f'ROOT %y = f32[8,4096]{{1,0}} {product}') == 8 * 2**20
  # Of renamed weights that are sliced, only the slice is read; of those that are the result, all.
  row = 'ROOT %y = bf16[1,1024]{1,0} dynamic-slice(%v, %i, %zero), dynamic_slice_sizes={1,1024}'
  assert bytes_of_fusion(renamed, row) == 2048
  assert bytes_of_fusion('ROOT %y = f32[4096,1024]{1,0} convert(%w)') == 8 * 2**20


def test_collective_repeated_along_a_fusion_chain_counts_once():
  """XLA for TPU repeats a collective in each product that overlaps with it."""
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
  for placeholder, hlo_text in {
    'PAIR': '(bf16[8,128]{1,0}, bf16[16,128]{1,0}, u32[])',
    'WHOLE': 'bf16[16,128]{1,0}',
    'TARGET': 'custom_call_target',
    'GATHER': 'replica_groups={{0,1}}, frontend_attributes={chain_id="8"}',
  }.items():
    text = text.replace(placeholder, hlo_text)
  assert cost.count(text).collectives == {('all-gather', (0, 1)): [2048, 1]}


@pytest.mark.parametrize('scope, real', [('', 64), ('rounds/while/body/', 32)])
def test_flops_of_the_tpu_ragged_dot_kernel(scope, real):
  """The matrices are 16 x 8. In rounds, half of a round's rows are real if all experts are equally likely."""
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


def test_flops_of_the_tpu_kernel_for_gradients_of_experts():
  """The gradient of 3 matrices of 16 x 8, from 64 rows of all experts."""
  text = """HloModule jit_f, is_scheduled=true

ENTRY %main (s: s32[4], x: bf16[64,16], g: bf16[64,8]) -> f32[3,16,8] {
  %s = s32[4]{0} parameter(0)
  %x = bf16[64,16]{1,0} parameter(1)
  %g = bf16[64,8]{1,0} parameter(2)
  ROOT %y = f32[3,16,8]{2,1,0} custom-call(%s, %x, %g), CALL
}
""".replace('CALL', 'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/jit(tgmm)/pallas_call"}')
  assert cost.count(text).flops == 2 * 64 * 16 * 8


@pytest.mark.parametrize(
  'branches', ['true_computation=%dear, false_computation=%cheap', 'branch_computations={%cheap, %dear}']
)
def test_conditional_of_known_value_costs_one_branch(branches):
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
  dear = cost.count(text).bytes  # of a condition that is not known, the dearer branch counts
  cheap = cost.count(text, branch=lambda name: False if name.endswith('choose/cond') else None).bytes
  assert (cheap, cost.count(text, branch=lambda name: True).bytes) == (dear / 2, dear)


def test_top_p_search_is_counted_only_where_the_config_asks_for_it():
  """Sampling from the whole vocabulary (top_p=1) moves fewer bytes, as it searches for no threshold."""
  config, traffic = grpo_gsm8k.get_config('model=tiny'), []
  config.eval.data.path = ''
  config.rollout.update(prompts=2, group_size=2, max_prompt_length=16, max_new_tokens=8)
  for config.rollout.top_p in (1.0, 0.9):
    (prepared,) = dry_run.prepare_all(config.to_dict())
    planned = stage.plan(prepared, stage.Options(machines.parse('cpu'), ('generate',)))
    traffic.append(max(row['memory_traffic_bytes'] for row in planned['programs']))
  assert traffic[0] < 0.9 * traffic[1]


def test_groups_of_devices_are_attributed_to_mesh_axes():
  class Mesh:
    shape = {'data': 2, 'fsdp': 4, 'tensor': 2}

  by_axis = cost.by_axis(
    cost.Totals(
      collectives={
        ('all-reduce', (0, 8)): [1, 1],
        ('all-reduce', (0, 2, 4, 6)): [2, 1],
        ('all-reduce', tuple(range(0, 16, 2))): [3, 1],
      }
    ),
    Mesh,
  )
  assert {k: v[0] for k, v in by_axis['all-reduce'].items()} == {'data': 1, 'fsdp': 2, 'data+fsdp': 3}


# ---------------------------------------------------------- roofline, minimum


def update_row(**over):
  totals = cost.Totals(918e12, 820e9, 0, {('all-gather', (0, 1, 2, 3)): [90e9, 1]})
  return dict(program='update', flops=4 * 459e12, totals=totals, least={}, xla_flops_once=None, **over)


class FourChips:
  size, shape = 4, {'data': 1, 'fsdp': 4, 'tensor': 1}

  class devices:
    flat = ()


@pytest.mark.parametrize('far, network', [(False, 0.5), (True, 7.2)])
def test_roofline_of_compute_memory_and_network(far, network):
  topology = machines.parse('v6e:2x2')
  hosts = {i: i // 2 if far else 0 for i in range(4)}
  work = roofline.work(update_row(), FourChips, topology, hosts)
  seconds = work['seconds']
  assert seconds['compute'] == 1.0 and seconds['memory'] == 0.5
  assert seconds['network'] == pytest.approx(network)
  assert seconds['roofline'] == max(1.0, network) and seconds['expected'] is None
  assert seconds['no_overlap'] == pytest.approx(1.5 + network)
  assert work['roofline_mfu'] == pytest.approx(0.5 / max(1.0, network))
  gathered = work['collective_bytes']['all-gather']['fsdp']
  assert gathered == dict(bytes=90e9, number=1, between_hosts=far)


def test_memory_includes_arrays_that_other_programs_keep_on_the_devices():
  generate = dict(
    program='generate',
    arguments=dict(parameters=7, kv_cache=3),
    argument_bytes=10,
    output_bytes=4,
    alias_bytes=3,
    temp_bytes=2,
    batch_bytes=0,
  )
  update = generate | dict(
    program='update', arguments=dict(parameters=10, optimizer=20), argument_bytes=30, temp_bytes=30
  )
  start = generate | dict(program='init')
  predicted = memory.predict([generate, update, start], held=35, sampler=10)
  usage = roofline.memory(generate, 50)
  assert usage['fits'] and usage['free_bytes'] == 50 - (10 + 1 + 2 + 35)
  assert usage['bytes_per_chip']['elsewhere'] == 35
  usage = roofline.memory(update, 50)
  assert not usage['fits'] and usage['free_bytes'] == 50 - (30 + 1 + 30 + 5)
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


def test_minimum_traffic_of_fsdp():
  """All layers are gathered twice, the tied embedding once, in the forward pass; gradients are scattered once.

  With adapters, gradients are those of the trained parameters only.
  """
  from jaxpost.models import presets, transformer

  figures = children.printed('-c', _LEAST, devices=4)
  table = transformer.param_table(presets.PRESETS['xs'])
  sizes = {k: np.prod(v.shape) for k, v in table.items() if 'embed' in v.axes}
  layers = sum(n for k, n in sizes.items() if k.startswith('layers'))
  embed = sizes['embed']
  gathered_bytes = 4 * 3 / 4 * (2 * layers + embed)
  assert figures['least']['all-gather']['fsdp'] == gathered_bytes
  assert figures['least']['reduce-scatter']['fsdp'] == 3 * (layers + embed)
  model, counted = figures['flops']
  assert counted == pytest.approx(model, rel=0.1)  # nothing is rematerialized
  adapter_scattered, adapter_bytes = figures['adapters']  # frozen parameters have no gradients
  assert 0 < adapter_scattered == adapter_bytes * 3 / 4 < 3 * layers / 10


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
  """Plans GRPO for each (mesh, options of the rollout); returns bytes, calls and seconds of its programs."""
  return children.printed('-c', _PHASES, *(json.dumps(x) for pair in pairs for x in pair), devices=8)


def test_memory_of_separate_device_groups_counts_what_each_holds():
  (apart,) = phases((dict(train='fsdp=2', rollout='data=-1', rollout_devices=4, score_devices=2), {}))
  rows, plan, predicted = (apart[k] for k in ('rows', 'plan', 'predicted'))
  state = rows['update']['arguments']
  adam = state['parameters'], state['optimizer']
  assert plan['update']['elsewhere'] <= 1000  # nothing but scalars, in whole words
  assert plan['generate']['elsewhere'] <= 100  # the sampler's devices train nothing
  sampler = rows['generate']['argument_bytes']
  assert 0.9 * sampler < plan['init_state']['total'] < 1.1 * sampler < sum(adam)
  for name, row in rows.items():  # a plan and a run count the same bytes
    assert (
      plan[name]['total'] == pytest.approx(row['in_use_bytes'], rel=1e-3) and row['in_use_bytes'] <= predicted[name]
    )
  for name, held in dict(score=rows['score']['arguments']['parameters'], update=sum(adam)).items():
    row = rows[name]
    assert predicted[name] == pytest.approx(
      held + row['temp_bytes'] + row['batch_bytes'] + row['output_bytes'] - row['alias_bytes'], rel=1e-5
    )  # the tolerance covers the step's number
  moved_weights = apart['moved']  # in the sampler's layout, before they are sent
  assert predicted['reshard'] >= sum(adam) + moved_weights
  assert plan['reshard']['total'] >= sum(adam) + moved_weights


def test_async_sampler_keeps_its_weights_in_memory_during_the_update():
  """Training devices hold the sampler's weights as well, unless the sampler has devices of its own."""
  shared_mesh = dict(train='fsdp=8', rollout='data=-1')
  separate_mesh = dict(train='fsdp=4', rollout='data=-1', rollout_devices=4)
  plain, ahead, apart = phases((shared_mesh, {}), (shared_mesh, dict(staleness=1)), (separate_mesh, dict(staleness=1)))
  sampler = ahead['rows']['generate']['argument_bytes']
  assert sampler > 2_000_000
  for program in ('update', 'score'):
    added = ahead['predicted'][program] - plain['predicted'][program]
    assert added == pytest.approx(sampler, rel=0.02)  # `generate` does not read all that the sampler holds
    added = [x['plan'][program]['elsewhere'] for x in (plain, ahead)]
    assert added[1] - added[0] == pytest.approx(sampler, rel=0.02)
  frozen = apart['rows']['score']['arguments']['parameters']
  assert apart['plan']['update']['elsewhere'] == pytest.approx(frozen, rel=1e-3)


MEASURED = pathlib.Path(__file__).parents[1] / 'docs' / 'accelerator_rows.jsonl'


def measured_seconds(row):
  """Returns {program: measured seconds} of a row of `launch.bench accelerator`, where a program is timed alone."""
  if row['row'].startswith('decode/'):
    return {'generate': 32 * row['token_s']}
  return {'update': row.get('time/update') or row.get('step_s')}


@pytest.mark.parametrize('window, filled, read', [(0, 0, 800), (0, 496, 496), (128, 496, 128), (4096, 0, 800)])
def test_decode_kernel_reads_only_filled_entries_of_the_cache(window, filled, read):
  """The kernel reads the filled entries of the slots in use, within the window, and half of a block on average."""
  text = (
    '  %x = (bf16[1,64,8,2,128]{4,3,2,1,0}) custom-call(%a, %b, %c), custom_call_target="__gpu$xla.gpu.triton", '
    f'metadata={{op_name="jit(generate)/while/body/decode_{window}"}}'
  )
  shapes = (64, 8, 2, 128), (256, 8, 800, 128), (256, 8, 800, 64), (64, 8, 32, 128), (64, 8, 32, 64)
  operands = [hlo.Array('bf16', dims, False) for dims in shapes]
  op = hlo.Op('x', 'custom-call', (), (), text, '', False)
  flops, extra_bytes = kernels.cost(op, operands, filled)
  assert flops == 2 * 64 * 8 * 2 * read * (128 + 64)
  assert sum(x.bytes for x in operands[1:]) + extra_bytes == pytest.approx(64 * 8 * (read + 32 / 2) * (128 + 64) * 2)


@pytest.mark.parametrize('paged, window, wasted', [(False, 0, 255 / 2), (True, 0, 255 / 2), (False, 128, 255)])
def test_decode_kernel_of_tpus_reads_whole_chunks(paged, window, wasted):
  """A chunk of 256 entries is half full on average at each end; pages are read from several arguments."""
  text = (
    '  %x = bf16[64,8,2,128]{3,2,1,0} custom-call(%a, %b, %c), custom_call_target="tpu_custom_call", '
    f'metadata={{op_name="jit(generate)/while/body/decode_{window}_256{"_pages" if paged else ""}"}}'
  )
  caches = [(2000, 8, 128, 128)] * 2 + [(2000, 8, 128, 128)] * 2 if paged else [(256, 8, 800, 128), (256, 8, 800, 128)]
  shapes = (64,), (64, 8, 2, 128), *caches, (64, 8, 32, 128), (64, 8, 32, 128)
  operands = [hlo.Array('bf16', dims, False) for dims in shapes]
  op = hlo.Op('x', 'custom-call', (), (), text, '', False)
  flops, extra_bytes = kernels.cost(op, operands, 500)
  assert flops == 2 * 64 * 8 * 2 * (window or 500) * (128 + 128)
  read = sum(x.bytes for x in operands[2:]) + extra_bytes
  assert read == pytest.approx(64 * 8 * ((window or 500) + wasted + 32) * (128 + 128) * 2)


def test_the_time_of_kernels_is_added_to_the_estimate_of_xla():
  """XLA for TPU estimates its own instructions: the kernel of a loop has none, and the roofline says its time."""
  call = (
    'bf16[64,8,2,128]{3,2,1,0} custom-call(%q, %k, %v, %n, %m), custom_call_target="tpu_custom_call", '
    'metadata={op_name="jit(generate)/decode_0_256"}'
  )
  entries, new = 'bf16[64,8,512,128]{3,2,1,0}', 'bf16[64,8,32,128]{3,2,1,0}'
  text = f"""HloModule jit_f, is_scheduled=true

ENTRY %main (q: bf16[64,8,2,128]) -> bf16[64,8,2,128] {{
  %q = bf16[64,8,2,128]{{3,2,1,0}} parameter(0)
  %k = {entries} parameter(1)
  %v = {entries} parameter(2)
  %n = {new} parameter(3)
  %m = {new} parameter(4)
  %o = {call}
  ROOT %z = bf16[64,8,2,128]{{3,2,1,0}} negate(%o), backend_config={{"window_config":{{"estimated_cycles":"1750"}}}}
}}
"""
  totals, chip = cost.count(text), machines.parse('v6e-1').chip
  q, entries, new = (2 * 64 * 8 * n * 128 for n in (2, 512, 32))  # bytes
  assert totals.kernel_bytes == 2 * (q + entries + new) and totals.bytes == totals.kernel_bytes + 2 * q
  assert totals.flops == totals.kernel_flops == 2 * 64 * 8 * 2 * 512 * 2 * 128
  assert roofline.xla_seconds(totals, chip) == pytest.approx(1750 / chip.clock + totals.kernel_bytes / chip.bandwidth)
  assert roofline.xla_seconds(cost.Totals(flops=1.0), chip) is None


def test_rotating_kernel_writes_the_entries_of_one_token():
  """The entries of a block are arguments and results, of 32 tokens each, in the same memory."""
  text = (
    '  %x = (bf16[64,8,2,2,64]{4,3,2,1,0}) custom-call(%a, %b, %c), custom_call_target="__gpu$xla.gpu.triton", '
    'metadata={op_name="jit(generate)/while/body/rotate/pallas_call"}'
  )
  projected, keys, values = (hlo.Array('bf16', dims, False) for dims in ((64, 32, 2, 64), *[(64, 8, 32, 2, 64)] * 2))
  op = hlo.Op('x', 'custom-call', (), (), text, '', False)
  flops, extra_bytes = kernels.cost(op, [projected, keys, values])
  read_and_written = 2 * (keys.bytes + values.bytes)
  assert not flops and read_and_written + extra_bytes == (keys.bytes + values.bytes) / 32


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
def test_calls_of_decode_programs_by_cache_entries_read(rollout, slots, wanted):
  """Completions have the full length.

  The blocks of a completion are not spread evenly over the programs, and programs for idle slots are not called.
  """
  config = types.SimpleNamespace(rollout=types.SimpleNamespace(page_size=0, **rollout))
  max_tokens = rollout['max_prompt_length'] + rollout['max_new_tokens']
  engine = buckets.Buckets(8, 1, 1, max_tokens, max_tokens + 16, 0, 16, rollout['max_new_tokens'])
  assert {engine.decode(n + 16, 8) for n in range(rollout['max_prompt_length'], max_tokens)} == wanted.keys()
  reads = roofline._reads(types.SimpleNamespace(config=config, decode_block=16))
  step = roofline.Step({'generate': sum(wanted.values())}, 0, 0, reads)
  # With attention to a window, all programs of as many slots have the same FLOPs.
  rows = [dict(program='generate', slots=n, read=read, flops=n * 100) for n in slots for read in (*wanted, 32)]
  random.Random(0).shuffle(rows)
  for row in rows:
    expected = wanted.get(row['read'], 0) if row['slots'] == 8 else 0
    assert roofline._calls(row, rows, step) == pytest.approx(expected), row
  # A kernel reads the filled entries, so there is one program for each number of slots.
  row = dict(program='generate', slots=8, read=0)
  assert roofline._calls(row, [row], step) == sum(wanted.values())


def test_compiled_decode_programs_name_the_cache_entries_they_read():
  """With attention to a window, the FLOPs of the programs would not tell them apart."""
  (prepared,) = dry_run.prepare_all(
    dict(
      algorithm='grpo',
      reward='gsm8k',
      data=dict(path='none'),
      model=dict(preset='tiny', dtype='float32'),
      rollout=dict(prompts=4, group_size=2, max_prompt_length=44, max_new_tokens=68, block=17),
    )
  )
  compiled = aot.compile_stage(prepared, machines.parse('cpu:1'), ('generate',))
  step = roofline.step_of(compiled.placed)
  assert {row['read']: roofline._calls(row, compiled.rows, step) for row in compiled.rows} == {64: 1, 129: 3}


def filled_traffic(program, prompt, new, cache_bytes, block=32):
  """Returns the traffic of a decoding block whose tokens read the entries that are filled on average."""
  traffic = program['memory_traffic_bytes']
  if 'filled' in program:
    return traffic
  # An older plan: every token read the whole cache.
  config = types.SimpleNamespace(rollout=types.SimpleNamespace(max_prompt_length=prompt, max_new_tokens=new))
  filled = aot.filled_entries(types.SimpleNamespace(config=config, decode_block=block))
  return traffic - block * cache_bytes * (1 - filled / (prompt + new + block))


def sampling_seconds(row):
  """Returns (expected, measured) seconds of sampling in a row of GRPO: 512 completions of 256 + 512 tokens."""
  prompt, new, block = 256, 512, 32
  programs = {}
  for program in row['programs']:
    if program['program'] not in programs or program['program_flops'] > programs[program['program']]['program_flops']:
      programs[program['program']] = program
  slots = int(re.match(r'\[(\d+)', programs['generate']['shapes'])[1])
  calls = dict(init_state=1, prefill=512 // slots, insert=512 // slots, generate=512 // slots * new // block)
  seconds = 0.0
  for name, number_of_calls in calls.items():
    traffic = programs[name]['memory_traffic_bytes']
    if name == 'generate':
      cache = programs['init_state']['memory_traffic_bytes']  # `init_state` writes the cache once
      traffic = filled_traffic(programs[name], prompt, new, cache)
    seconds += number_of_calls * roofline.expected(programs[name]['program_flops'], traffic, 0.0, chips.CHIPS['h200'])
  return seconds, row['time/sample']


def test_expected_seconds_of_sampling_match_those_measured_on_h200():
  """Completions are whole, so a plan counts the entries of the cache that are filled on average."""
  rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
  pairs = [sampling_seconds(r) for r in rows if r['row'].startswith('grpo/')]
  ratios = [expected / measured for expected, measured in pairs]
  assert len(ratios) >= 2 and all(0.85 < x < 1.15 for x in ratios), ratios


def expected_seconds(row, program):
  """Returns the expected seconds of a program of a row of `launch.bench accelerator`."""
  traffic = program['memory_traffic_bytes']
  if program['program'] == 'generate' and row['row'].startswith('decode/'):  # the blocks follow each other
    new = 7 * 32
    traffic = filled_traffic(program, row['cache_entries'] - 32 - new, new, row['cache_bytes'])
  return roofline.expected(program['program_flops'], traffic, 0.0, chips.CHIPS['h200'])


def test_expected_seconds_of_dense_models_match_those_measured_on_h200():
  """The rows are updates and blocks of 128 slots; docs/performance.md explains the rows that differ by more."""
  rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
  planned = [row for row in rows if 'programs' in row and (row.get('attention', 'triton') == 'triton')]
  dense = [row for row in planned if not row['row'].startswith(('moe', 'decode/qwen3_1_7b/32x512'))]
  ratios = {}
  for row in dense:
    measured = measured_seconds(row)
    for program in row['programs']:
      if measured.get(program['program']):
        expected = expected_seconds(row, program)
        ratios[row['code'], row['row']] = expected / measured[program['program']]
  assert len(ratios) >= 6
  assert all(0.85 < x < 1.15 for x in ratios.values()), ratios
  (blocks,) = [x for (_, name), x in ratios.items() if name.startswith('decode/')]
  assert round(blocks, 2) == 0.89, 'docs/performance.md says 11 % below'


@pytest.fixture(scope='module')
def async_phases():
  """Phases with sampling on the training devices, on devices of its own, and with scoring on its own devices, too."""
  shared = dict(train='fsdp=8', rollout='data=-1')
  own_sampler = dict(train='fsdp=-1', rollout='data=-1', rollout_devices=4)
  own_scorer = dict(train='fsdp=-1', rollout='data=2,tensor=2', rollout_devices=4, score_devices=2)
  return phases((shared, dict(staleness=1)), (own_sampler, dict(staleness=1)), (own_scorer, dict(staleness=2)))


def test_phases_overlap_if_async_sampling_has_its_own_devices(async_phases):
  together, apart, all_apart = async_phases
  for name in 'roofline', 'no_overlap':
    for phase_plan in together, apart, all_apart:
      seconds_of = {}
      for program, device_group, calls, seconds in phase_plan['took']:
        phase = 'sample' if program in ('init_state', 'generate') else program
        seconds_of[phase, device_group] = seconds_of.get((phase, device_group), 0.0) + calls * seconds[name]
      assert all(seconds_of.values())
      if phase_plan is together:
        assert {device_group for _, device_group in seconds_of} == {'train'}
        step_s = sum(seconds_of.values())
      elif phase_plan is apart:  # training devices score the rollout, so that part does not overlap
        step_s = max(seconds_of['sample', 'rollout'], seconds_of['update', 'train']) + (
          seconds_of['score', 'train'] + seconds_of['reshard', 'train']
        )
      else:  # the training devices score with the policy, others with the reference
        step_s = seconds_of['reshard', 'train'] + max(
          seconds_of['sample', 'rollout'],
          seconds_of['score', 'score'],
          seconds_of['update', 'train'] + seconds_of['score', 'train'],
        )
      assert phase_plan['step'][name]['step_s'] == pytest.approx(step_s)
      assert phase_plan['step'][name]['tokens_per_s'] == pytest.approx(8 * 32 / step_s)


def test_reshard_to_other_devices_counts_the_copied_weights(async_phases):
  """Each training device sends its share to as many of the other devices as there are for each training device."""
  together, apart, all_apart = async_phases
  assert together['copied'] == 0
  assert apart['copied'] == apart['moved'] > 0
  assert all_apart['copied'] == 2 * all_apart['moved'] > 0  # two devices train for four that sample
  link = chips.CHIPS['h200'].link
  for phase_plan in apart, all_apart:
    network = sum(calls * seconds['network'] for name, _, calls, seconds in phase_plan['took'] if name == 'reshard')
    assert network > phase_plan['copied'] / link
    reshard_s = phase_plan['step']['roofline']['seconds']['reshard']
    assert reshard_s >= network


@pytest.mark.parametrize('lag, step_s', [(0, 27.5), (1, 19.5), (2, 13.5)])
def test_step_seconds_for_each_staleness(lag, step_s):
  """Sampling takes 13 s, updates take 8 s, scores 4 s, and values 2 s on other devices."""
  rows = [
    dict(program=name, calls=calls, runs_on=on, seconds=dict(x=took_s))
    for name, calls, on, took_s in (
      ('reshard', 1, 'train', 0.5),
      ('generate', 24, 'rollout', 0.5),
      ('prefill', 2, 'rollout', 0.5),
      ('update', 2, 'train', 4.0),
      ('score', 1, 'train', 4.0),
      ('values', 1, 'score', 2.0),
    )
  ]
  assert roofline.step_seconds(rows, 'x', lag) == step_s


# ------------------------------------------------------------------- commands


def test_plan_command_covers_all_programs_of_grpo(tmp_path):
  """The command needs no weights, data, tokenizer or devices."""
  planned, printed = planned_by(
    tmp_path,
    '--config=configs/grpo_gsm8k.py:model=tiny',
    '--topology=cpu:4',
    '--config.model.dtype=float32',
    '--config.eval.data.path=',
    '--config.rollout.max_prompt_length=32',
    '--config.rl.kl_coef=0.1',
    '--config.rollout.max_new_tokens=16',
    '--config.rollout.prompts=4',
    '--config.mesh.rollout=data=2,tensor=2',
  )
  names = [r['program'] for r in planned['programs']]
  assert set(names) == {'copy', 'init', 'update', 'score', 'reshard', 'init_state', 'prefill', 'insert', 'generate'}
  assert planned['mesh']['rollout'] == {'data': 2, 'fsdp': 1, 'expert': 1, 'context': 1, 'tensor': 2}
  update = planned['programs'][names.index('update')]
  memory = update['bytes_per_chip']
  parameter_bytes = 4 * planned['parameters'] / 4
  assert memory['parameters'] == pytest.approx(parameter_bytes, rel=0.01)
  assert memory['optimizer'] == pytest.approx(2 * parameter_bytes, rel=0.01)
  assert memory['elsewhere'] == pytest.approx(parameter_bytes, rel=0.02)  # the frozen copy, as the reference
  assert update['calls'] == 1 and not update['unknown_loops']
  assert 'fsdp' in update['collective_bytes']['all-gather']
  generate = [r for r in planned['programs'] if r['program'] == 'generate']
  assert sum(r['calls'] for r in generate) == 2  # 16 tokens are two blocks
  assert generate[0]['bytes_per_chip']['kv_cache'] > 0
  assert 'update' in printed and 'all-gather' in printed


@pytest.mark.parametrize('speculation', [True, False])
def test_plan_table_notes_that_drafts_are_not_counted(speculation):
  """How often drafts are verified, and how many tokens are accepted, depends on the texts."""
  rows = [dict(program=name, slots=8, read=0) for name in ('generate', *['verify'] * speculation)]
  step = roofline.Step({'generate': 4}, 1, 1)
  assert [roofline._calls(row, rows, step) for row in rows] == [4, *[0] * speculation]
  no_bytes = dict.fromkeys(('parameters', 'optimizer', 'kv_cache', 'batch', 'other', 'outputs', 'temporaries'), 0)
  seconds = dict.fromkeys(('compute', 'memory', 'network', 'roofline', 'xla'))
  common = dict(
    shapes='', fits=None, calls=1, compile_s=1.0, roofline_mfu=None, collective_bytes={}, collective_minimum={}
  )
  programs = [
    common
    | dict(program=row['program'], flops=dict(program=1.0, model=1.0), seconds=seconds)
    | dict(bytes_per_chip=no_bytes | dict(elsewhere=0, total=1))
    for row in rows
  ]
  heading = dict(stage='a', algorithm='grpo', parameters=1, devices=1, device_kind='x', topology='cpu', mesh={})
  console = rich.console.Console(file=io.StringIO(), width=200)
  tables.show(heading | dict(programs=programs, memory_per_device=0, step={}), console)
  printed = console.file.getvalue()
  assert 'generate' in printed and ('drafts (rollout.speculation) are not counted' in printed) == speculation


def test_plan_of_a_sampler_with_more_devices_than_training(tmp_path):
  """Axes and shares of the sampler's programs are those of its own mesh."""
  planned, _ = planned_by(
    tmp_path,
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
  )
  assert [path.name for path in tmp_path.iterdir()] == ['plan.json']
  assert planned['devices'] == 8
  generate = [r for r in planned['programs'] if r['program'] == 'generate'][-1]
  assert generate['devices'] == 6
  assert 'tensor' in generate['collective_bytes']['all-reduce']
  assert 0.8 < generate['flops']['program'] / generate['flops']['model'] < 1.5


@pytest.mark.parametrize('mesh', ['data=4', 'expert=4'])
def test_planned_flops_include_the_products_of_experts(mesh, tmp_path):
  """Their loops have trip counts that only a run knows; the bound allows for blocks that are not full."""
  planned, _ = planned_by(
    tmp_path,
    '--config=configs/sft_gsm8k.py:model=tiny_moe',
    '--topology=cpu:4',
    f'--config.mesh.train={mesh}',
    '--config.train.batch_size=4',
    '--config.eval.data.path=',
    '--programs=update',
  )
  (update,) = planned['programs']
  flops = update['flops']
  assert 1 <= flops['program'] / flops['model'] < 1.3


@pytest.mark.parametrize('algorithm', ['dpo', 'kto', 'reward_model', 'ppo'])
def test_stages_of_other_algorithms_are_described(algorithm):
  (prepared,) = dry_run.prepare_all(dict(algorithm=algorithm, data=dict(path='none'), reward='gsm8k'))
  assert prepared.name == algorithm
  if prepared.inputs.algorithm.on_policy:
    assert prepared.data.stream.lengths == [512]
  else:
    assert prepared.data.first_batch.tokens.shape[1] == 512


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
def test_plan_refuses_options_that_the_model_lacks(over, field):
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
    ('grpo', dict(environment='./env.py:One,./env.py:Two'), 'environment: there are 2 .One, Two.; config.rl.sources'),
    ('grpo', dict(environment='./env.py:One', rollout=dict(top_logprobs=2)), 'rollout.top_logprobs: is for single'),
  ],
)
def test_plan_refuses_configs_that_a_run_refuses(algorithm, over, words):
  config = dict(algorithm=algorithm, data=dict(path='none'))
  with pytest.raises(InputError, match=words):
    dry_run.prepare_all(config | (dict(reward='gsm8k') if algorithm == 'grpo' else {}) | over)


def test_programs_flag_knows_all_compiled_programs():
  sources = [
    path.read_text() for package in ('programs', 'rollout') for path in (CLONE / 'jaxpost' / package).glob('*.py')
  ]
  names = {name for text in sources for name in re.findall(r"\b(?:Program|reader)\('(\w+)'", text)}
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
  command = [sys.executable, '-m', 'launch.plan', '--config=configs/sft_gsm8k.py:model=tiny']
  done = subprocess.run(
    [*command, '--config.eval.data.path=', *args], capture_output=True, text=True, timeout=300, cwd=CLONE
  )
  assert done.returncode == 2, done.stderr[-2000:]
  (line,) = [x for x in done.stderr.splitlines() if x.startswith('jaxpost')]
  assert re.search(words, line)


# ---------------------------------------------------------------- accelerators


DESCRIBE = """
import sys
from jaxpost.planning import machines
for name in sys.argv[1:]:
  machine = machines.parse(name)
  machines.set_environment(machine)
  print(name, len(machines.devices(machine)) == machine.devices)
"""


@described.TPUS
@pytest.mark.long
def test_parts_of_a_host_are_described_for_tpus():
  """A host of the default slices has 2 x 2 chips; these have fewer along a dimension."""
  names = 'v5e-1', 'v6e-1', 'v5e:1x4', 'v6e:2x1', 'v4:1x1x1', 'v5p:1x1x1', 'tpu7x:1x1x1', 'v5e:2x4'
  assert children.run('-c', DESCRIBE, *names).stdout.split() == [word for name in names for word in (name, 'True')]


@described.TPUS
@pytest.mark.long
@pytest.mark.parametrize('slices', [1, 2])
def test_plan_for_tpus(slices, tmp_path):
  planned, _ = planned_by(
    tmp_path,
    '--config=configs/sft_gsm8k.py:model=xs',
    '--topology=v5e:2x2',
    f'--slices={slices}',
    '--config.model.remat=full',
    '--config.mesh.train=' + ('fsdp=-1' if slices == 1 else 'data=2,fsdp=-1'),
    '--config.train.batch_size=8',
    '--config.train.row_length=256',
    '--programs=update',
    '--price=1',
  )
  (update,) = planned['programs']
  assert planned['chips'] == 4 * slices and update['fits']
  assert update['seconds']['xla'] > 0 and not update['unknown_loops']
  assert planned['step']['roofline']['usd_per_million_tokens'] > 0
  between_hosts = {axis: x['between_hosts'] for kind in update['collective_bytes'].values() for axis, x in kind.items()}
  assert between_hosts['fsdp'] is False
  assert slices == 1 or between_hosts['data'] is True


@described.GPUS
@pytest.mark.long
def test_plan_for_gpus(tmp_path):
  planned, _ = planned_by(
    tmp_path,
    '--config=configs/sft_gsm8k.py:model=xs',
    '--topology=h200:1x2x8',
    '--config.mesh.train=fsdp=2,tensor=8',
    '--config.train.row_length=256',
    '--programs=update',
  )
  (update,) = planned['programs']
  assert planned['chips'] == 16 and update['fits']
  between_hosts = {axis: x['between_hosts'] for kind in update['collective_bytes'].values() for axis, x in kind.items()}
  assert between_hosts['fsdp'] is True and between_hosts['tensor'] is False


@described.GPUS
@pytest.mark.long
@pytest.mark.parametrize('name', ['a100', 'a100_40gb', 'l4', 'h100'])
def test_plan_for_gpus_of_each_kind(name, tmp_path):
  """Both an update and decoding, with the kernels of this kind."""
  planned, _ = planned_by(
    tmp_path,
    '--config=configs/grpo_gsm8k.py:model=xs',
    f'--topology={name}',
    '--config.eval.data.path=',
    '--config.rollout.max_prompt_length=64',
    '--config.rollout.max_new_tokens=64',
    '--programs=update,generate',
  )
  assert {row['program'] for row in planned['programs']} == {'update', 'generate'}
  assert all(row['fits'] for row in planned['programs'])


def test_search_proposes_the_fastest_settings_that_fit(monkeypatch):
  """With fake plans, in which tensor=2 is fastest, and does not fit without rematerialization."""
  from jaxpost.planning import search

  def fake_plan(prepared, options):
    tensor = 2 if 'tensor=2' in prepared.config.mesh.train else 1
    remat = prepared.config.model.remat
    seconds = {'full': 4.0, 'dots': 3.0, 'none': 2.0}[remat] / tensor
    row = dict(
      program='update',
      calls=1,
      fits='tensor' not in prepared.config.mesh.train or tensor == 2 and remat != 'none',
      bytes_per_chip=dict(total=2**30),
      roofline_mfu=0.5,
      flops=dict(model=1.0),
      seconds=dict(no_overlap=seconds),
    )
    return dict(fits=row['fits'], programs=[row], trained_tokens=1000, step=dict(no_overlap=dict(step_s=seconds)))

  monkeypatch.setattr(stage, 'plan', fake_plan)
  out = io.StringIO()
  (best,) = search.search(
    dict(algorithm='sft', data=dict(path='none')),
    stage.Options(machines.parse('v6e:2x2')),
    rich.console.Console(file=out, width=200),
  )
  assert best['settings']['mesh.train'] == 'fsdp=-1,tensor=2'
  assert best['settings']['model.remat'] == 'dots'  # 'none' would be faster, but does not fit
  assert '--config.mesh.train=fsdp=-1,tensor=2' in out.getvalue()
  assert '--config.model.remat=dots' in out.getvalue()


def stage_of(path, train=None, **over):
  """A stage of the model at `path`; `train` replaces fields after the rows were made."""
  (prepared,) = dry_run.prepare_all(dict(algorithm='sft', data=dict(path='none'), model=dict(path=path), **over))
  return stage.vary(prepared, {f'train.{k}': v for k, v in (train or {}).items()})


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
def test_training_meshes_that_search_tries(path, topology, train, has):
  from jaxpost.planning import meshes

  shards = meshes.training(stage_of(path, train).inputs, machines.parse(topology), False)
  assert has.items() <= shards.items() and len(shards) <= 10
  assert next(iter(shards)) == 'fsdp=-1'
  assert path == 'llama3_8b' and train or not any('context' in m for m in shards)
  if path == 'llama3_8b' and not train:
    assert len(shards) == 4  # no shard is narrow, so only fsdp and tensor are tried


def test_training_meshes_of_gpus_need_no_full_lanes():
  from jaxpost.planning import meshes

  prepared = stage_of('llama3_70b', dict(batch_size=64))
  assert not any('data' in m for m in meshes.training(prepared.inputs, machines.parse('h200:16x8x8'), False))
  assert meshes.training(prepared.inputs, machines.parse('h200:1x64x8'), True) == {'fsdp=-1,tensor=8': 64}


@pytest.mark.parametrize(
  'mesh, shards', [({}, 8), (dict(rollout_devices=4), 4), (dict(rollout_devices=2, score_devices=2), 4)]
)
def test_meshes_count_the_devices_of_their_phase_not_chips(mesh, shards):
  """A tpu7x chip is two devices; devices of other phases do not count for training."""
  from jaxpost.planning import meshes

  (prepared,) = dry_run.prepare_all(
    dict(algorithm='grpo', reward='gsm8k', data=dict(path='none'), mesh=mesh, model=dict(path='qwen3_8b'))
    | dict(rl=dict(kl_coef=0.1))
  )
  topology = machines.parse('tpu7x:1x2x2')
  assert meshes.training(prepared.inputs, topology, False)['fsdp=-1'] == shards
  tensor = mesh.get('rollout_devices', 8)
  assert meshes.sampling(prepared.inputs, topology)[-1] == f'data=-1,tensor={tensor}'


def test_launch_line_keeps_other_options_of_the_user():
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
