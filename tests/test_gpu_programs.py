"""GPU compiler options and host settings, and the programs of the main configs compiled for GPUs that are not there.

The programs are those of Qwen3-1.7B, most with four of its layers. They need the CUDA plugin of JAX, but no GPU.
"""

import fnmatch
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import children
import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh, AxisType

from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.hardware import gpu_options, host
from jaxpost.models import model as model_lib
from jaxpost.models import moe
from jaxpost.models.config import Experts
from jaxpost.planning import arithmetic, defaults, dry_run, machines
from jaxpost.programs.compile import options
from jaxpost.stage import prepare

CLONE = pathlib.Path(__file__).resolve().parents[1]
MESHES = {8: 'fsdp=8', 64: 'fsdp=16,tensor=4'}
CONFIGS = {
  'sft': ('sft_gsm8k', {}),
  'lora': ('sft_gsm8k', dict(lora=dict(rank=16))),
  'dpo': ('dpo_hh', dict(train=dict(micro_batch_size=16))),
  # With kl_coef, the log-probs of the reference model have a program of their own, score.
  'grpo': ('grpo_gsm8k', dict(rl=dict(kl_coef=0.04))),
  'ppo': ('ppo_gsm8k', {}),
  'shared': ('grpo_gsm8k', dict(rl=dict(kl_coef=0.04), train=dict(share_prompt=True))),
}
# Programs that attend over whole rows, and therefore use the attention kernel.
USE_ATTENTION_KERNEL = {
  'sft': {'update'},
  'lora': {'update'},
  'dpo': {'update', 'score'},
  'grpo': {'update', 'score', 'prefill'},
  'ppo': {'update', 'score', 'values', 'prefill'},
  'shared': {'update', 'score', 'prefill'},
}

DRIVER = """
import dataclasses, importlib, json, math, re, sys

from jaxpost.planning import machines
from jaxpost.models import presets
from jaxpost.planning import aot, cost, dry_run, hlo

name, gpus, mesh, over = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
topology = machines.parse(f'h200:1x{gpus // 8}x8')
machines.set_environment(topology)
presets.PRESETS['qwen3_1_7b'] = dataclasses.replace(
    presets.PRESETS['qwen3_1_7b'], num_layers=4)
config = importlib.import_module(f'configs.{name}').get_config()
config.model.update(path='qwen3_1_7b', attention='triton', remat='full')
config.mesh.train = mesh
config.eval.data.path = ''
for section, fields in json.loads(over).items():
  config[section].update(fields)
p, = dry_run.prepare_all(config.to_dict())
vocabulary, texts, look = p.inputs.model.config.padded_vocab_size, {}, aot.look

def watch(kit, name, compiled, args, times):
  texts.setdefault(name, []).append(compiled.as_text())
  return look(kit, name, compiled, args, times)

aot.look = watch

def overlapped(text):
  '''For each gather of a loop, whether a product or attention runs while it is under way.'''
  found = []
  for body in re.split(r'\\n}\\n', text):
    for name, rest in re.findall(r'%(all-gather-start[\\w.]*) = (.*?)all-gather-done\\(%\\1\\)', body, re.S):
      if 'while/body' in rest.split('\\n')[0]:
        found.append(bool(re.search(r'gemm_fusion_dot\\S* =|custom_call_target="__(?:cu|gpu)', rest)))
  return found

def kernels_between_layers(text):
  '''The kernels from the attention of a decoded layer to that of the next.'''
  for ops in hlo.parse(text)[0].values():
    kernels = [op for op in ops.values() if op.kind in ('fusion', 'custom-call', 'copy')]
    attention = [i for i, op in enumerate(kernels) if re.search(r'\\bdecode_\\d+/', hlo.op_name(op))]
    if len(attention) == 4:  # one for each layer
      return attention[1] - attention[0]
  return 0

compiled = aot.compile_stage(p, topology)
kit, out = compiled.placed, {}
for row in compiled.rows:
  text = texts[row['program']].pop(0)
  each = vocabulary // kit.train.mesh.shape['tensor']
  # Tokens by vocabulary: the largest array of logits, in tokens of a device.
  wide = [math.prod(map(int, dims.split(','))) // each for dims in re.findall(
      r'(?:f32|bf16)\\[([\\d,]+)\\]', text) if str(each) in dims.split(',')]
  said = out.setdefault(row['program'], [])
  said.append(dict(
      shapes=row['shapes'], overlapped=overlapped(text), layer=kernels_between_layers(text), kernels=len(set(re.findall(
          r'attention_(?:forward|queries|keys)_', text))),
      wide=max(wide, default=0), most=max(
          p.inputs.model.config.hidden_size, kit.compute.head_elements // each),
      unknown=row['totals'].unknown, least=row['least'], found={
          kind: {a: x[0] for a, x in axes.items()}
          for kind, axes in cost.by_axis(
              row['totals'], kit.train.mesh).items()}))
print(json.dumps(out))
"""


def test_gpu_programs_get_compiler_options_unless_xla_flags_set_them(monkeypatch):
  def arguments_on(kind):
    return [types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=[types.SimpleNamespace(platform=kind)]))]

  assert options(arguments_on('cpu')) is None and options([]) is None
  assert options(arguments_on('gpu'), {'x': 1}) == gpu_options.PROGRAM_OPTIONS | {'x': 1}
  split = arguments_on('gpu')
  for fsdp, fsdp_options in ((1, {}), (8, gpu_options.GATHER_OPTIONS)):
    split[0].sharding.mesh = types.SimpleNamespace(shape=dict(data=1, fsdp=fsdp))
    assert options(split) == gpu_options.PROGRAM_OPTIONS | fsdp_options
  name = 'xla_gpu_enable_latency_hiding_scheduler'
  monkeypatch.setenv('XLA_FLAGS', f'--{name}=false')
  assert gpu_options.PROGRAM_OPTIONS.keys() - options(arguments_on('gpu')) == {name}


@pytest.mark.parametrize('reduce_dtype, sent', [('float32', 'f32'), ('bfloat16', 'bf16')])
def test_gradients_are_reduced_in_the_configured_dtype(reduce_dtype, sent):
  """The weights are split over devices, or whole on each of them; the result is float32 in both cases."""
  sizes = dict(data=2, fsdp=2, expert=1, context=1, tensor=1)
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 5)
  layout = Layout(mesh, 'train', reduce_dtype)

  x, g = jnp.ones((4, 8, 16)), jnp.ones((4, 8, 6))

  def product(x, g):
    return jnp.einsum('btd,bte->de', x, g)

  traced = jax.make_jaxpr(lambda x, g: layout.sum_over_tokens(product, (x, g), 'embed', 'heads'))(x, g)
  assert str(traced.out_avals[0]) == 'float32[16,6]'
  sums = [line.split('=')[0] for line in str(traced).splitlines() if 'reduce_scatter' in line or ' psum' in line]
  assert len(sums) == 2 and all(f':{sent}[' in line for line in sums), str(traced)
  whole = Layout(AbstractMesh((4, 1, 1, 1, 1), tuple(sizes), axis_types=(AxisType.Auto,) * 5), 'train', reduce_dtype)
  traced_whole = jax.make_jaxpr(lambda x, g: whole.sum_over_tokens(product, (x, g), 'embed', 'heads'))(x, g)
  # Sums in float32 are left to XLA.
  assert (traced_whole.out_avals == []) == (reduce_dtype == 'float32')


@pytest.mark.parametrize('reduce_dtype, sent', [('float32', 'f32'), ('bfloat16', 'bf16')])
def test_expert_gradients_are_scattered_over_fsdp_in_the_configured_dtype(reduce_dtype, sent):
  """Gradients that the other axes do not split, and those of the router, are summed in float32 either way."""
  sizes = dict(data=2, fsdp=2, expert=2, context=1, tensor=1)
  devices = jax.devices()[:1] * 8  # one device, repeated: the program is traced, but not run
  mesh = jax.sharding.Mesh(np.reshape(devices, tuple(sizes.values())), tuple(sizes))
  layout = Layout(mesh, 'train', reduce_dtype)
  cfg = tiny.config(family='qwen3_moe', experts=Experts(8, 3, 24))
  shapes = model_lib.build(cfg).shapes()['layers']
  params = {k: jnp.zeros(shapes[k][1:]) for k in ('router', 'gate', 'up', 'down')}
  x = jnp.zeros((8, 10, cfg.hidden_size))

  def loss(params):
    return jnp.sum(moe.mlp(params, x, cfg, tiny.EXACT, layout)[0])

  text = str(jax.make_jaxpr(jax.grad(loss))(params))
  scattered = [line.split('=')[0] for line in text.splitlines() if 'reduce_scatter' in line]
  assert sum(f':{sent}[4,' in line for line in scattered) == 3 == len(scattered) - 1, text  # the fourth: the router's


def test_unknown_compiler_option_is_left_out_with_a_warning(monkeypatch, caplog):
  """Of every program, also of one without arguments, and of commands that sample without a run."""
  gpu_options._is_accepted.cache_clear()
  known = gpu_options.PROGRAM_OPTIONS
  monkeypatch.setattr(gpu_options, 'PROGRAM_OPTIONS', {'xla_gpu_no_such_thing': True, **known})
  monkeypatch.setattr(gpu_options, 'DETERMINISTIC_OPTIONS', {'xla_gpu_nor_this': True})
  gpu = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=[types.SimpleNamespace(platform='gpu')]))
  assert options([gpu]) == options([gpu]) == known
  assert options([gpu], {'x': 1}) == known | {'x': 1}
  assert options([], gpu_options.of_run(True)) == {}
  warnings = [r.getMessage() for r in caplog.records]
  assert len(warnings) == 2 and 'compiler option xla_gpu_no_such_thing is left out: ' in warnings[0]


def test_compiler_options_of_a_run_by_hosts_and_determinism(monkeypatch):
  assert gpu_options.of_run(False) == {}
  assert gpu_options.of_run(True) == gpu_options.DETERMINISTIC_OPTIONS
  monkeypatch.setattr(gpu_options.coordination, 'process_count', lambda: 2)
  assert gpu_options.of_run(False) == gpu_options.HOSTS_OPTIONS
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_shard_autotuning=true')
  assert gpu_options.of_run(False) == {}


def test_installed_compiler_knows_all_options():
  """On GPUs, an unknown option would end the run at its first program."""
  lowered = jax.jit(lambda x: x + 1).lower(1.0)
  lowered.compile(gpu_options.OPTIONS)
  with pytest.raises(jax.errors.JaxRuntimeError, match='No such compile opt'):
    lowered.compile({'xla_gpu_no_such_thing': True})


@pytest.mark.parametrize('given, expected', [({}, '0.92'), ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.5'}, '.5')])
def test_tune_host_sets_the_gpu_memory_fraction_unless_it_is_set(given, expected):
  name = 'XLA_PYTHON_CLIENT_MEM_FRACTION'
  environment = {k: v for k, v in os.environ.items() if k != name} | given
  done = subprocess.run(
    [sys.executable, '-c', f'import os, jaxpost; jaxpost.tune_host(); print(os.environ["{name}"])'],
    capture_output=True,
    text=True,
    cwd=CLONE,
    env=environment | {'PYTHONPATH': str(CLONE)},
  )
  assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
  'platforms, files, tuned',
  [('cpu', ['/dev/nvidia0'], True), ('cuda', [], False), ('', ['/dev/nvidia0'], False), ('', [], True)],
)
def test_malloc_is_tuned_for_cpu_runs_only(monkeypatch, platforms, files, tuned):
  mallopt_calls = []

  class Libc:
    mallopt = staticmethod(lambda which, value: mallopt_calls.append(which) or 1)

  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  monkeypatch.setattr(host.ctypes, 'CDLL', lambda name: Libc)
  monkeypatch.setattr(host.importlib.util, 'find_spec', lambda name: name == 'jax_plugins')
  monkeypatch.setattr(host.glob, 'glob', lambda pattern: [f for f in files if fnmatch.fnmatch(f, pattern)])
  assert host.tune_host() == tuned == bool(mallopt_calls)


@functools.cache
def compiled(name, gpus):
  """Returns {program: [facts of each compiled variant]} of a config, compiled in a process of its own."""
  config, over = CONFIGS[name]
  return children.printed('-c', DRIVER, config, str(gpus), MESHES[gpus], json.dumps(over), timeout=3000)


def test_ci_runs_the_tests_that_need_a_compiler_for_other_devices():
  tests = CLONE.glob('tests/test_*.py')
  files = {path.name for path in tests if re.search(r'described\.[GT]PUS', path.read_text())}
  (listed,) = re.findall(r'^described\(\) \{(.*?)^\}', (CLONE / '.ci/run').read_text(), re.DOTALL | re.MULTILINE)
  assert files and files == set(re.findall(r'tests/(\w+\.py)', listed))


@described.GPUS
@pytest.mark.long
@pytest.mark.parametrize('gpus', MESHES)
@pytest.mark.parametrize('name', CONFIGS)
def test_programs_of_a_config_compile_for_gpus(name, gpus):
  programs = compiled(name, gpus)
  assert USE_ATTENTION_KERNEL[name] <= programs.keys()
  for program, variants in programs.items():
    for facts in variants:
      assert bool(facts['kernels']) == (program in USE_ATTENTION_KERNEL[name]), program
      assert facts['wide'] <= facts['most'], (program, facts)
      assert not facts['unknown'], (program, facts)
  for facts in programs.get('generate', ()):
    # A layer has 4 products, attention, 2 norms, 2 sums with the residual, the activation, the sum of the parts of the
    # first product, and the kernel that rotates heads and writes to the cache. Where devices split the heads, XLA does
    # what this kernel does.
    assert 0 < facts['layer'] <= {8: 12, 64: 16}[gpus]
  for facts in programs['update']:
    sent, least = (facts[k]['reduce-scatter']['fsdp'] for k in ('found', 'least'))
    assert 0 < sent <= 1.05 * least
    if gpus == 8 and name in ('sft', 'lora', 'dpo', 'grpo'):
      assert sum(facts['overlapped']) > 0.5 * len(facts['overlapped']) > 0


def planned(tmp_path, *words, model='qwen3_1_7b', gpu='h200'):
  """Returns the programs of a plan on one GPU, of all layers of `model`, or of the recipe's own model if it is ''."""
  out = tmp_path / 'plan.json'
  words = [*words, f'--config.model.path={model}', '--config.eval.data.path='] if model else words
  done = subprocess.run(
    [sys.executable, '-m', 'launch.plan', f'--topology={gpu}:1x1x1', f'--out={out}', *words],
    capture_output=True,
    text=True,
    cwd=CLONE,
    env=os.environ | {'PYTHONPATH': str(CLONE), 'JAX_PLATFORMS': 'cpu'},
  )
  assert out.exists(), done.stderr[-3000:]
  (plan,) = json.loads(out.read_text())
  return plan['programs']


@described.GPUS
@pytest.mark.long
@pytest.mark.parametrize('recipe', ['sft_gsm8k', 'sft_text', 'dpo_hh'])
def test_planned_memory_of_recipes_fits_80_gb_as_estimated(tmp_path, recipe):
  """Recipes name 80 GB in their docstrings. The estimate may be up to 15 % above the plan, and up to 3 % below."""
  (update,) = planned(tmp_path, f'--config=configs/{recipe}.py', '--programs=update', model='', gpu='h100')
  planned_bytes = update['bytes_per_chip']['total']
  assert planned_bytes <= machines.parse('h100:1x1x1').memory
  (stage,) = dry_run.prepare_all(prepare.as_dict(importlib.import_module(f'configs.{recipe}').get_config()))
  fitted = defaults.fitted(stage, machines.parse('h100:1x1x1'))
  one_device = dict.fromkeys(AXES, 1)
  branches = stage.data.first_batch.branch_ids is not None
  estimated_bytes = sum(
    arithmetic.estimate(fitted.inputs, machines.parse('h100:1x1x1'), one_device, one_device, branches).updating.values()
  )
  assert 0.97 * planned_bytes <= estimated_bytes <= 1.15 * planned_bytes


@described.GPUS
@pytest.mark.long
# The gradients of queries and of keys are two kernels that both compute the scores. Here, where a row counts as one
# document, that adds 3 % to the FLOPs.
@pytest.mark.parametrize('remat, flops, gib', [('auto', 1.061, 56), ('full', 1.281, 15)])
def test_planned_update_of_packed_rows_stays_within_flops_and_memory_bounds(tmp_path, remat, flops, gib):
  (update,) = planned(
    tmp_path,
    '--config=configs/sft_gsm8k.py',
    '--config.train.row_length=4096',
    '--config.train.batch_size=8',
    f'--config.model.remat={remat}',
    '--programs=update',
  )
  assert update['fits'] and update['roofline_mfu'] > 0.45
  assert update['flops']['program'] <= flops * update['flops']['model']
  assert update['bytes_per_chip']['temporaries'] <= gib * 2**30


@described.GPUS
@pytest.mark.long
@pytest.mark.parametrize('stage, program, bound', [('sft', 'update', 185), ('grpo', 'generate', 180)])
def test_planned_time_of_recurrent_layers_is_that_of_kernels(tmp_path, stage, program, bound):
  """By the roofline, an update takes 176 ms and a block of decoding 171. By XLA they take 392 and 315.

  XLA writes the terms of chunks, and copies the state of a head twice for each token.
  """
  words = '--config=configs/qwen3_5_gsm8k.py', f'--stage={stage}', f'--programs={program}'
  programs = planned(tmp_path, *words, model='', gpu='h100')
  assert max(1e3 * x['seconds']['roofline'] for x in programs) < bound
  assert all(0.95 < x['flops']['program'] / x['flops']['model'] < 1.05 for x in programs)  # with those of kernels


@described.GPUS
@pytest.mark.long
@pytest.mark.parametrize('gpu', ['l4:1', 'a100:1', 'h100:1'])
def test_kernels_for_recurrences_compile_for_gpus(gpu):
  """Shared memory suffices for the heads of all families and for the largest."""
  done = children.run('tests/compile_recurrences.py', 'triton', gpu, timeout=3000)
  assert done.stdout.split() == ['2', '1', '2'] * 4


@described.GPUS
@pytest.mark.long
@pytest.mark.parametrize('flags, bound', [('', 1.22), ('--xla_gpu_experimental_force_split_k=1', 1.085)])
def test_planned_decoding_does_not_copy_the_cache(tmp_path, monkeypatch, flags, bound):
  """For each token, weights and filled cache entries are read once; `bound` is all traffic, divided by that.

  With 64 slots, XLA splits the terms of a product into 2 to 8 parts, so that all multiprocessors have work. The float32
  sums of the parts are the difference of the two cases: 1.2 GB a token, which mostly stay in the second-level cache.
  """
  monkeypatch.setenv('XLA_FLAGS', flags)
  rows = planned(
    tmp_path, '--config=configs/grpo_gsm8k.py', '--config.rollout.slots=64', '--programs=generate,insert,move'
  )
  generate = [row for row in rows if row['program'] == 'generate']
  largest = max(generate, key=lambda row: row['memory_traffic_bytes'])
  bytes_held = largest['bytes_per_chip']
  entries = int(re.match(r'\[64, 8, (\d+), 128\]', largest['shapes'])[1])
  filled = 320 + (512 - 32) / 2  # at the start of a block of 32 steps, averaged over a completion
  once = bytes_held['parameters'] + bytes_held['kv_cache'] * filled / entries
  assert largest['memory_traffic_bytes'] <= 32 * bound * once
  for row in rows:
    if row['program'] in ('insert', 'move'):
      assert row['bytes_per_chip']['temporaries'] <= 2**28
