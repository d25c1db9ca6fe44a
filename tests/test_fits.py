"""`launch.plan --fits` and docs/fits.md: estimates equal sizes that are computed by hand, and commands are accepted."""

import dataclasses
import json
import math
import pathlib
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import children
import pytest

from configs import dpo_hh, grpo_gsm8k, sft_gsm8k
from jaxpost.distributed import phases
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.models import presets, transformer
from jaxpost.planning import arithmetic, dry_run, fits, machines, nearest, sampling_arithmetic
from jaxpost.planning import stage as plan_stage
from jaxpost.rollout import buckets
from jaxpost.stage import config as config_lib
from jaxpost.stage import prepare
from jaxpost.stage.records import PreparedStage, Source
from launch import config_flag

CLONE = pathlib.Path(__file__).resolve().parents[1]
ONE_DEVICE = dict(data=1, fsdp=1, expert=1, context=1, tensor=1)
NAME = 'qwen3_0_6b'
SIZE = transformer.num_params(presets.PRESETS[NAME])
GIB = 2**30


def inputs(module, arg=f'model={NAME}', **settings):
  """Returns the inputs of a recipe with `remat: full` and these settings."""
  ((name, (algorithm, section)),) = prepare.resolve_all(prepare.as_dict(module.get_config(arg))).items()
  built = dry_run.make_inputs(name, algorithm, section)
  return plan_stage.vary(PreparedStage(built), {'model.remat': 'full'} | settings).inputs


def estimate(stage_inputs, device='H100', train=ONE_DEVICE, rollout=ONE_DEVICE):
  return arithmetic.estimate(stage_inputs, fits.topology(device), train, rollout)


def test_weights_and_optimizer_state_have_exact_sizes():
  """Weights and two moments are in float32, with two counts; the reference is in bfloat16. fsdp=8 divides them by 8."""
  stage_inputs = inputs(dpo_hh, **{'train.micro_batch_size': 8})
  one = estimate(stage_inputs).memory
  assert (one['parameters'], one['optimizer'], one['frozen']) == (4 * SIZE, 8 * SIZE + 8, 2 * SIZE)
  eight = estimate(stage_inputs, '8xH100', ONE_DEVICE | dict(fsdp=8)).memory
  for name in ('parameters', 'optimizer', 'frozen'):
    assert eight[name] == pytest.approx(one[name] / 8, rel=1e-3)  # norms are not sharded


@pytest.mark.parametrize('module', [sft_gsm8k, grpo_gsm8k])
def test_only_adapters_have_optimizer_moments(module):
  """Rank 16 has 16 * (inputs + outputs) weights for each matrix of a layer; GRPO samples from a copy of all weights."""
  stage_inputs = inputs(module, f'model={NAME},lora=16')
  cfg = presets.PRESETS[NAME]
  hidden, heads, kv = cfg.hidden_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
  dimensions = [hidden + heads, hidden + kv, hidden + kv, heads + hidden] + 3 * [hidden + cfg.intermediate_size]
  adapters = 16 * cfg.num_layers * sum(dimensions)
  result = estimate(stage_inputs)
  assert result.updating['optimizer'] == 8 * adapters + 8
  assert result.updating['parameters'] == 2 * SIZE + 4 * adapters  # the base in bfloat16
  assert result.sampling['sampler'] == 2 * SIZE


@pytest.mark.parametrize('name', ['sgd', 'lion', 'adafactor', 'muon'])
def test_size_of_optimizer_state_depends_on_the_optimizer(name):
  """SGD has none, Lion one, Adafactor one per row and column; Muon has one of matrices, and Adam's two of all else."""
  table = model_lib.build(presets.PRESETS[NAME]).table
  matrices = sum(math.prod(x.shape) for x in table.values() if x.matrix and x.stack)
  lower, upper = dict(
    sgd=(0, 8), lion=(4 * SIZE, 4 * SIZE + 8), adafactor=(0, 0.02 * SIZE), muon=(8 * SIZE - 4 * matrices,) * 2
  )[name]
  state = estimate(inputs(sft_gsm8k, **{'optim.name': name, 'optim.weight_decay': 0.0})).updating['optimizer']
  assert lower <= state <= upper + 32  # 32 bytes: counts of steps


def test_moving_reference_counts_as_float32_optimizer_state():
  result = estimate(inputs(dpo_hh, **{'train.micro_batch_size': 8, 'reference.every': 10})).memory
  assert result['optimizer'] == pytest.approx(12 * SIZE, abs=16) and 'frozen' not in result


def prepared(algorithm, name=NAME, **sections):
  """Returns the prepared stage of a config without a recipe, with `remat: full`."""
  base = dict(algorithm=algorithm, reward='x:y', data=dict(path='generated:arithmetic'), **sections)
  (p,) = dry_run.prepare_all(config_lib.merge(dict(model=dict(preset=name, remat='full', dtype='bfloat16')), base))
  return p


def test_a_critic_with_adapters_shares_the_frozen_base():
  """Its own state is adapters and the score head, each with two moments."""
  adapted = prepared('ppo', lora=dict(rank=16), model=dict(param_dtype='bfloat16'))
  result = estimate(adapted.inputs).updating
  assert result['critic'] == pytest.approx(result['optimizer'] * 1.5, rel=0.01)
  # A critic with other base weights than the policy has a base of its own.
  separate_base = dataclasses.replace(
    adapted.inputs, sources=adapted.inputs.sources | {'critic': Source(presets.PRESETS[NAME])}
  )
  separate_base = dataclasses.replace(
    separate_base, sources=separate_base.sources | {'policy': Source(presets.PRESETS[NAME], name='other')}
  )
  assert estimate(separate_base).updating['critic'] == pytest.approx(result['critic'] + 2 * SIZE, rel=0.01)
  without_adapters = estimate(prepared('ppo').inputs).updating
  assert without_adapters['critic'] == pytest.approx(12 * SIZE, rel=0.01)


def test_update_needs_the_memory_of_the_larger_of_policy_and_critic():
  """They are updated one after the other; the policy trains all weights, or its last norm alone."""
  variants = (prepared('ppo', train=dict(micro_batch_size=1, freeze=names)).inputs for names in ('', '(?!norm$).*'))
  all_weights, last_norm = (estimate(x).updating for x in variants)
  assert all_weights['gradients'] == 8 * SIZE  # gradients of a micro-batch, and their sum
  assert last_norm['gradients'] == pytest.approx(8 * SIZE, rel=0.01)
  assert last_norm['activations'] < all_weights['activations']  # without logits


def test_a_teacher_counts_with_its_own_size():
  teacher = transformer.num_params(presets.PRESETS['qwen3_1_7b'])
  result = estimate(prepared('opd', rl=dict(reference='qwen3_1_7b')).inputs).updating
  assert result['frozen'] == 2 * teacher


def test_frozen_models_on_separate_or_shared_devices_count_where_they_are():
  """With `score_devices`, training devices keep only the teacher's head; with `mesh.score` all devices share it."""
  teacher = presets.PRESETS['qwen3_32b']
  size, head = transformer.num_params(teacher), 2 * teacher.padded_vocab_size * teacher.hidden_size
  sections = dict(distill=dict(teachers=('qwen3_32b',)), train=dict(batch_size=8))
  apart = prepared('distill', mesh=dict(score_devices=4), **sections)
  result = estimate(apart.inputs, '8xH100', ONE_DEVICE | dict(fsdp=4), ONE_DEVICE | dict(data=4))
  assert result.updating['frozen'] == pytest.approx(head / 4, rel=0.01)
  assert result.scoring == pytest.approx(2 * size / 4, rel=0.01)
  beside = prepared('distill', mesh=dict(score='fsdp=-1'), **sections)
  result = estimate(beside.inputs, '8xH100', ONE_DEVICE | dict(data=8), ONE_DEVICE | dict(data=8))
  assert result.scoring == 0
  assert result.updating['frozen'] == pytest.approx(2 * size / 8 + head, rel=0.01)


def test_frozen_models_are_refused_where_their_devices_are_too_few():
  def check(count, rows):
    sections = dict(mesh=dict(score_devices=count), train=dict(batch_size=rows))
    nearest.check_state(
      prepared('distill', distill=dict(teachers=('qwen3_235b_a22b',)), **sections), fits.topology('8xH200')
    )

  with pytest.raises(
    InputError, match=r'distill: frozen models take 4[0-9.]* GiB of a device of config.mesh.score_devices'
  ):
    check(1, 7)
  check(4, 8)


def test_asynchronous_sampler_counts_during_updates():
  ahead, synchronous = (estimate(prepared('grpo', rollout=dict(staleness=n)).inputs) for n in (1, 0))
  of_sampler = {k: ahead.sampling[k] for k in ('sampler', 'cache')}
  assert ahead.updating == synchronous.updating | of_sampler
  apart = dict(rollout=dict(staleness=1), mesh=dict(rollout_devices=4))
  result = estimate(prepared('grpo', **apart).inputs, '8xH100', ONE_DEVICE | dict(fsdp=4), ONE_DEVICE | dict(data=4))
  assert 'sampler' not in result.updating


def test_a_sampler_shares_the_base():
  """On one device it copies the adapters alone; on a mesh other than that of training, it copies the base, too."""
  settings = dict(lora=dict(rank=16), model=dict(param_dtype='bfloat16'), rollout=dict(share_base=True))
  p = prepared('grpo', **settings)
  result = estimate(p.inputs)
  assert result.sampling['sampler'] == pytest.approx(result.updating['optimizer'] / 2, abs=8)
  eight = estimate(p.inputs, '8xH100', ONE_DEVICE | dict(fsdp=8), ONE_DEVICE | dict(data=8))
  assert eight.sampling['sampler'] == pytest.approx(2 * SIZE, rel=0.05)


def test_weights_outside_experts_are_gathered_over_the_expert_axis():
  """Embedding and head need more than a layer here: gathered whole in bfloat16, with gradients in float32."""
  stage_inputs = prepared('sft', 'qwen3_30b_a3b', train=dict(batch_size=8)).inputs
  cfg = presets.PRESETS['qwen3_30b_a3b']
  meshes = (dict(expert=8), dict(fsdp=2, expert=4))
  activations = {estimate(stage_inputs, '8xH100', ONE_DEVICE | axes).updating['activations'] for axes in meshes}
  assert len(activations) == 1 and activations.pop() > (2 + 4) * 2 * cfg.padded_vocab_size * cfg.hidden_size


def test_cache_prefill_and_sampler_have_exact_sizes():
  """The cache has 256 sequences of 832 tokens and a block of 32: keys and values of 8 heads of 128 in 28 layers.

  32 prompts fill the slots with 8 samples each, and are padded from 320 to 512 tokens.
  """
  stage_inputs = inputs(grpo_gsm8k, **{'train.micro_batch_size': 8})  # sampling needs more than the update
  result = estimate(stage_inputs).memory
  assert result['sampler'] == 2 * SIZE
  token = 28 * 8 * (128 + 128) * 2  # in bfloat16
  assert result['cache'] == (256 * (832 + 32) + 32 * 512) * token
  assert result['copied'] == 0  # the decoding kernel reads the filled entries of each slot where they are
  # A prefill needs the projections of a layer, and no logits: q and attention of 16 heads, k and v, gate, up and down
  # of 3,072, and four arrays of 1,024.
  layer = 16384 * (2 * 16 * 128 + 2 * 8 * 128 + 3 * 3072 + 4 * 1024) * 2
  assert result['logits'] + result['prefill'] == layer > result['logits'] == 2 * 256 * 151936 * 4
  assert not estimate(inputs(grpo_gsm8k, **{'rollout.page_size': 64})).sampling['copied']
  paged = estimate(inputs(grpo_gsm8k, **{'rollout.page_size': 8}))  # too small for the kernel
  assert paged.sampling['copied'] == 256 * 512 * token  # XLA reads 512 entries of 864, and copies them
  on_tpus = estimate(stage_inputs, 'v6e-8', ONE_DEVICE | dict(fsdp=8), ONE_DEVICE | dict(data=8))
  assert on_tpus.sampling['copied'] == 256 / 8 * 3 * 32 * token  # XLA for TPU copies the 32 entries of a block only
  split = estimate(stage_inputs, '8xH100', ONE_DEVICE | dict(fsdp=8), ONE_DEVICE | dict(data=4, tensor=2)).memory
  assert split['cache'] == result['cache'] / 8


@pytest.mark.parametrize(
  'settings, rows',
  [
    ({}, 32),
    ({'rollout.slots': 64}, 8),  # slots for 8 of the 32 prompts
    ({'rollout.slots': 60, 'rollout.prompts': 512, 'rollout.group_size': 1}, 60),
  ],
)
def test_cache_holds_the_prefixes_of_one_prefill(settings, rows):
  """Only these count, however many prompts a rollout has: the engine drops them before the next prefill."""
  stage_inputs = inputs(grpo_gsm8k, **settings)
  assert sampling_arithmetic.prefilled(stage_inputs) == rows
  slots = settings.get('rollout.slots', 256)
  assert buckets.Buckets(slots, 1, 2, 832, 864, 0, 32, 512).prefill_rows(stage_inputs.config.rollout.group_size) == rows
  with_environment = dataclasses.replace(
    stage_inputs, config=dataclasses.replace(stage_inputs.config, environment='a.module:Tools')
  )
  assert sampling_arithmetic.prefilled(with_environment) == slots
  token = 28 * 8 * (128 + 128) * 2
  assert estimate(stage_inputs).sampling['cache'] == (slots * (832 + 32) + rows * 512) * token


def test_recurrent_states_count_in_the_cache():
  """18 of 24 layers have 16 matrices of 128 x 128, and 3 inputs of each convolution, in float32."""
  result = estimate(inputs(grpo_gsm8k, 'model=qwen3_5_0_8b'))
  token, state = 6 * 2 * (256 + 256) * 2, 18 * (16 * 128 * 128 + 3 * 3 * 16 * 128) * 4
  assert result.sampling['cache'] == (256 * (832 + 32) + 32 * 512) * token + (256 + 32) * state
  assert result.sampling['copied'] == 256 * state


def test_more_rows_need_more_memory_and_less_time():
  few, many = (estimate(inputs(sft_gsm8k, **{'train.micro_batch_size': rows})) for rows in (1, 8))
  assert few.total < many.total and few.tokens_per_s < many.tokens_per_s


def test_speed_without_other_limits_follows_from_model_flops():
  """With endless bandwidth, a step takes 3 forward passes and one for recomputation at the peak rate."""
  stage_inputs = inputs(sft_gsm8k)
  machine = fits.topology('H100')
  endless = dataclasses.replace(machine, chip=dataclasses.replace(machine.chip, bandwidth=1e30))
  result = arithmetic.estimate(stage_inputs, endless, ONE_DEVICE, ONE_DEVICE)
  per_token = transformer.flops_per_token(presets.PRESETS[NAME], 512)
  assert result.tokens_per_s == pytest.approx(machine.chip.flops / (4 * per_token), rel=1e-6)


@pytest.mark.parametrize(
  'module, rows, attention, compiled',
  [
    (sft_gsm8k, 16, 'auto', 5.17),
    (dpo_hh, 32, 'auto', 10.67),
    (dpo_hh, 32, 'chunked', 11.94),
    (dpo_hh, 56, 'chunked', 18.26),
  ],
)
def test_estimates_for_v5e_are_near_the_memory_its_compiler_counted(module, rows, attention, compiled):
  """docs/fits.md has both figures; libtpu 0.0.42 counted for one chip of v5e-8. Pairs of DPO share their prompts."""
  settings = {'model.remat': 'dots', 'model.attention': attention}
  stage_inputs = inputs(module, **settings, **{'train.micro_batch_size': rows, 'train.batch_size': rows})
  machine, sizes = machines.parse('v5e:2x4'), (ONE_DEVICE | {'fsdp': 8}, ONE_DEVICE | {'data': 8})
  estimated = sum(arithmetic.estimate(stage_inputs, machine, *sizes, branches=module is dpo_hh).updating.values()) / GIB
  assert 0.98 * compiled <= estimated <= 1.15 * compiled
  assert f' | {estimated:.2f} | {compiled} |' in (CLONE / 'docs/fits.md').read_text('utf-8')


def test_estimate_without_remat_is_refused():
  with pytest.raises(InputError, match='remat'):
    estimate(inputs(sft_gsm8k, **{'model.remat': 'none'}))


@pytest.fixture(scope='module')
def cells():
  raw = {
    'SFT': prepare.as_dict(sft_gsm8k.get_config('model=qwen3_8b')),
    'GRPO': prepare.as_dict(grpo_gsm8k.get_config('model=qwen3_0_6b')),
  }
  return {(cell.method, cell.device): cell for cell in fits.cells(raw, list(fits.DEVICES))}


def test_which_methods_fit_on_which_devices(cells):
  """SFT of 8 B weights takes 16 bytes each, 122 GiB, and room for a step."""
  assert not cells['SFT', 'H100'].fits and cells['SFT', '8xH100'].fits
  assert cells['SFT', 'H100'].estimate.total > 16 * 8.19e9
  assert cells['GRPO', 'H100'].fits and 'rollout.slots' not in cells['GRPO', 'H100'].settings
  assert cells['GRPO', 'v5e-1'].settings['rollout.slots'] < 256  # 24 GiB of cache would not fit
  for method in ('SFT', 'GRPO'):  # an H200 has more memory than an H100
    assert cells[method, '8xH200'].fits >= cells[method, '8xH100'].fits
  assert cells['GRPO', 'T4'].settings['model.dtype'] == 'float16'
  assert cells['SFT', 'v5e-256'].settings['train.batch_size'] % 256 == 0


def test_command_of_each_cell_gives_the_estimated_config(cells):
  """The overrides of a command, applied as a launcher does, give the settings of the cell."""
  for (method, _), cell in cells.items():
    words = shlex.split(fits.command(cell, 'FOLDER'))
    assert words[3] == f'--config=configs/{fits.METHODS[method][0]}.py:model=FOLDER'
    config = (sft_gsm8k if method == 'SFT' else grpo_gsm8k).get_config('model=FOLDER')
    _, overrides = config_flag.split(words)
    config_flag.apply(config, overrides)
    for key, value in cell.settings.items():
      section, field = key.split('.')
      assert config[section][field] == value
    assert ('--distributed' in words) == (cell.device in ('v5e-256', 'v5p-64'))


def test_prices_are_parsed_per_device():
  assert fits.prices('1.5', ['T4', 'H100']) == {'T4': 1.5, 'H100': 1.5}
  assert fits.prices('h100=2,v5e-8=1.25', list(fits.DEVICES)) == {'H100': 2.0, 'v5e-8': 1.25}
  assert fits.prices('', ['T4']) == {}
  for bad in ('x', '-1', 'nan', 'h100=', 'h9=1'):
    with pytest.raises(InputError, match='--price|--devices'):
      fits.prices(bad, ['T4'])


@pytest.mark.parametrize(
  'names, size, spelled',
  [
    (('8xH100', 'h100:8', 'H100:1x1x8'), (1, 1, 8), '8xH100'),
    (('H100', '1xh100', 'h100:1'), (1, 1, 1), 'H100'),
    (('16xA100_40GB',), None, 'how fast so many a100 are'),
    (('v5e-16', 'v5e:4x4', 'V5litepod-16'), (4, 4), 'v5e-16'),
    (('v5e:2x8',), (2, 8), 'v5e:2x8'),
    (('v5p-128', 'v5p:4x4x4'), (4, 4, 4), 'v5p-128'),
    (('h200:2x1x8',), (2, 1, 8), 'h200:2x1x8'),
    (('8xL4', 'l4:1x1x2'), None, 'how fast so many l4'),
  ],
)
def test_device_names_are_parsed_to_one_spelling(names, size, spelled):
  if size is None:
    for name in names:
      with pytest.raises(InputError, match=f'^--devices: {name!r}: {spelled}'):
        fits.devices([name])
    return
  assert fits.devices(names) == [spelled] and fits.topology(spelled).size == size


def test_default_devices_are_those_of_the_page():
  assert fits.devices(fits.DEVICES) == list(fits.DEVICES) == fits.devices([])


def test_method_names_are_parsed():
  assert fits.methods(['grpo', 'SFT LoRA']) == ['GRPO', 'SFT LoRA'] and fits.methods([]) == list(fits.METHODS)
  with pytest.raises(InputError, match="--methods: there is no 'ppo'; known: sft, sft_lora"):
    fits.methods(['ppo'])


def test_dollars_per_token_count_all_chips(cells):
  cell = cells['SFT', '8xH100']
  assert cell.dollars(2.0) == pytest.approx(8 * 2.0 / 3600 * 1e6 / cell.estimate.tokens_per_s)


def test_topology_tells_gpus_from_tpus():
  """An A100 has no compiler target here, and is a GPU nevertheless."""
  assert fits.topology('8xA100').gpu and not fits.topology('v5e-8').gpu
  assert not machines.parse('cpu').gpu


def page_parts(text):
  """Returns {model: (rows of its table, {(method, device): command})} of docs/fits.md or a part of it."""
  parts = {}
  for part in text.split('\n### ')[1:]:
    commands = {}
    for method, names, command in re.findall(r'^# ([\w ]+): (.*)\n(python(?:.* \\\n)*.*)$', part, re.M):
      commands |= {(method, name): command.replace(' \\\n ', '') for name in names.split(', ')}
    parts[part.partition('\n')[0]] = re.findall(r'^\| .* \|$', part, re.M), commands
  return parts


PAGE = page_parts((CLONE / 'docs/fits.md').read_text('utf-8').partition('## Tables')[2])


def test_the_page_is_up_to_date():
  """It has the rows that are computed now for three devices, of a dense model and of one with experts."""
  code = """
import sys, make_fits_table as m
for model in ('qwen3_0_6b', 'gpt_oss_20b'):
  print('\\n' + m.section(model, ['T4', '8xH100', 'v5e-8']))
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=CLONE / 'docs',
    env=children.environment(),
    check=True,
    capture_output=True,
    text=True,
  )
  for model, (rows, commands) in page_parts(done.stdout).items():
    assert set(rows) <= set(PAGE[model][0]), 'run python docs/make_fits_table.py'
    assert commands and commands.items() <= PAGE[model][1].items(), 'run python docs/make_fits_table.py'


@pytest.mark.parametrize('model', PAGE)
def test_each_cell_that_fits_has_a_command_that_is_accepted(model):
  """The config of the command passes the checks of a launch, and its mesh has the devices of the cell."""
  (header, *rows), commands = PAGE[model]
  cells = {
    (method, row.split(' | ')[0].strip('| ')): cell.strip(' |')
    for row in rows
    for method, cell in zip(header.strip('| ').split(' | ')[1:], row.split(' | ')[1:])
  }
  assert commands.keys() == {key for key, cell in cells.items() if not cell.startswith('no')}
  recipes = {'sft_gsm8k': sft_gsm8k, 'dpo_hh': dpo_hh, 'grpo_gsm8k': grpo_gsm8k}
  for (method, device), command in commands.items():
    (recipe, *_), overrides = config_flag.split(shlex.split(command)[3:])
    name, _, argument = recipe.removeprefix('--config=configs/').partition('.py:')
    assert name == fits.METHODS[method][0]
    config = recipes[name].get_config(argument)
    config_flag.apply(config, overrides)
    ((_, stage),) = config_lib.parse(config.to_dict()).items()
    devices = fits.topology(device).devices
    assert math.prod(phases.parse_mesh(stage.mesh.train, devices, 'mesh.train').values()) == devices


def test_fits_command_prints_and_writes_the_table(tmp_path):
  out = tmp_path / 'fits.json'
  args = ['--fits', '--model=Qwen/Qwen3-0.6B', '--devices=h100,v5e:4x4', '--methods=sft,grpo,grpo_lora']
  args += ['--price=1xH100=3', f'--out={out}']
  done = subprocess.run(
    [sys.executable, '-m', 'launch.plan', *args], capture_output=True, text=True, cwd=CLONE, env=children.environment()
  )
  assert done.returncode == 0, done.stderr
  assert 'USD per million tokens' in done.stdout
  rows = json.loads(out.read_text())
  assert [(row['method'], row['device']) for row in rows] == [
    (method, device) for method in ('SFT', 'GRPO', 'GRPO LoRA') for device in ('H100', 'v5e-16')
  ]
  lines = done.stdout.splitlines()
  assert max(n for n, line in enumerate(lines) if 'launch.train' in line) < min(
    n for n, line in enumerate(lines) if 'by arithmetic' in line
  )
  for row in rows:
    assert (row['usd_per_million_tokens'] is not None) == (row['device'] == 'H100')
    assert (row['command'] in done.stdout) == row['fits']


USAGE = '--config and --topology say what to plan; or give --fits and --model'


@pytest.mark.parametrize(
  'args, words', [(['--fits'], USAGE), (['--topology=cpu'], USAGE), (['--config=configs/quickstart.py'], USAGE)]
)
def test_bad_input_is_one_line(args, words):
  done = subprocess.run(
    [sys.executable, '-m', 'launch.plan', *args], capture_output=True, text=True, cwd=CLONE, env=children.environment()
  )
  assert done.returncode == 2 and done.stderr == f'jaxpost: {words}\n'


def test_zero_slots_means_one_per_completion():
  """0 in a config stands for prompts times group size."""
  rollout = SimpleNamespace(prompts=2, group_size=2, slots=0)
  inputs = SimpleNamespace(
    algorithm=SimpleNamespace(on_policy=True), config=SimpleNamespace(rollout=rollout, eval=None)
  )
  assert fits._slots(inputs) == [4, 2, 1]
